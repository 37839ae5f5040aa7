"""A scorer behind HTTP that misbehaves in every way: no response ever gets a wrong score for it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.actors.http_scorer import MAX_REPLY_BYTES, Circuit, HttpScorer, read_reply
from headway.actors.verifier import VerifierWorker
from headway.core import rollouts
from headway.core.errors import Closed, ConfigError
from headway.core.prompts import Prompt
from headway.core.sections import Verifiers
from headway.verifiers.verdict import Item, Verdict

TOKEN = "sekrit-31415"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(json.loads(body))
            self.server.seen.append(dict(self.headers))
            self.server.times.append(time.monotonic())
        self.server.behave(self, number)

    do_GET = do_POST

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def judge(self, number: int) -> None:
        """1 for responses that equal their gold, else 0."""
        items = self.server.bodies[number]["items"]
        self.reply({"verdicts": [{"score": float(item["response"] == item["gold"])} for item in items]})

    def log_message(self, format: str, *args: object) -> None:
        pass


class Service(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, behave: Callable[[Handler, int], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave
        self.lock = threading.Lock()
        self.bodies: list[Any] = []
        self.seen: list[dict[str, str]] = []
        self.times: list[float] = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are expected."""


@contextmanager
def serving(behave: Callable[[Handler, int], None]) -> Iterator[Service]:
    service = Service(behave)
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield service
    finally:
        service.over.set()
        service.shutdown()
        service.server_close()
        thread.join()


@contextmanager
def scoring(url: str, **options: Any) -> Iterator[HttpScorer]:
    scorer = HttpScorer(url, **options)
    try:
        yield scorer
    finally:
        scorer.close()


def items(number: int) -> list[Item]:
    """Every other one right."""
    return [Item("http", str(n), str(n) if n % 2 else "?", {"row": n}, f"task {n}") for n in range(number)]


def once(behave: Callable[[Handler, int], None], **options: Any) -> tuple[list[Verdict], Service]:
    """Verdicts on two items, and what the service saw."""
    with serving(behave) as service, scoring(service.url, **options) as scorer:
        return scorer.score(items(2)), service


def reasons(verdicts: list[Verdict]) -> set[str]:
    assert all(verdict.score is None for verdict in verdicts)
    return {verdict.reason for verdict in verdicts}


def test_batches_keep_their_order_and_hold_what_the_item_holds() -> None:
    with serving(Handler.judge) as service, scoring(service.url, batch_size=3, max_concurrent=2) as scorer:
        assert scorer.score([]) == []
        verdicts = scorer.score(items(8))
    assert [verdict.score for verdict in verdicts] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [verdict.reason for verdict in verdicts[:2]] == ["wrong", "correct"]
    assert sorted(len(body["items"]) for body in service.bodies) == [2, 3, 3]
    sent = [item for body in service.bodies for item in body["items"]]
    assert {"prompt": "task 1", "gold": "1", "response": "1", "context": {"row": 1}} in sent
    assert {headers["Content-Type"] for headers in service.seen} == {"application/json"}
    assert not any("Authorization" in headers for headers in service.seen)


def test_many_threads_get_their_own_verdicts() -> None:
    results: dict[int, list[float | None]] = {}
    with serving(Handler.judge) as service, scoring(service.url, batch_size=2) as scorer:

        def ask(number: int) -> None:
            results[number] = [verdict.score for verdict in scorer.score(items(number))]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert results == {number: [n % 2 for n in range(number)] for number in range(12)}


def test_no_more_requests_at_a_time_than_allowed() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def slow(handler: Handler, number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        handler.judge(number)

    with serving(slow) as service, scoring(service.url, batch_size=1, max_concurrent=3) as scorer:
        assert all(verdict.score is not None for verdict in scorer.score(items(9)))
    assert most == 3


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_busy_and_broken_services_are_asked_again(status: int) -> None:
    def twice(handler: Handler, number: int) -> None:
        if number < 2:
            handler.reply({}, status, Retry_After="0")
        else:
            handler.judge(number)

    verdicts, service = once(twice)
    assert [verdict.score for verdict in verdicts] == [0, 1]
    assert len(service.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 204])
def test_refusals_are_final(status: int) -> None:
    verdicts, service = once(lambda handler, _: handler.reply(b"", status))
    assert reasons(verdicts) == {"http_error"} and len(service.bodies) == 1


@pytest.mark.parametrize("in_seconds", [True, False])
def test_retry_after_is_honoured_as_seconds_and_as_a_date(in_seconds: bool) -> None:
    def busy(handler: Handler, number: int) -> None:
        if number:
            handler.judge(number)
        else:
            handler.reply(
                {}, 429, Retry_After="1" if in_seconds else formatdate(time.time() + 2, usegmt=True)
            )

    verdicts, service = once(busy)
    assert [verdict.score for verdict in verdicts] == [0, 1]
    assert service.times[1] - service.times[0] >= 0.95  # a date has whole seconds


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    started = time.monotonic()
    verdicts, service = once(
        lambda handler, _: handler.reply({}, 429, Retry_After="9999"), timeout_s=1.0, deadline_s=5.0
    )
    assert time.monotonic() - started < 20 and len(service.bodies) == 1
    assert reasons(verdicts) == {"http_error"}


def test_a_dead_host_is_an_error() -> None:
    with serving(Handler.judge) as service:
        pass
    with scoring(service.url, retries=1) as scorer:
        assert reasons(scorer.score(items(2))) == {"http_error"}


def hang(handler: Handler, _: int) -> None:
    handler.server.over.wait(30)


def drip_headers(handler: Handler, _: int) -> None:
    """Bytes come, often enough for any timeout between them, and never end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while not handler.server.over.wait(0.02):
        handler.wfile.write(b"x")


def drip_body(handler: Handler, _: int) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not handler.server.over.wait(0.02):
        handler.wfile.write(b" ")


@pytest.mark.parametrize("behave", [hang, drip_headers, drip_body])
def test_an_attempt_and_a_call_have_an_end(behave: Callable[[Handler, int], None]) -> None:
    started = time.monotonic()
    verdicts, service = once(behave, timeout_s=0.2, deadline_s=10.0, retries=1)
    assert reasons(verdicts) == {"http_timeout"} and len(service.bodies) == 2
    assert 0.4 <= time.monotonic() - started < 20
    started = time.monotonic()
    verdicts, _ = once(behave, timeout_s=0.4, deadline_s=0.4, retries=9)
    assert reasons(verdicts) == {"http_timeout"} and time.monotonic() - started < 20


def test_a_slow_batch_costs_only_itself() -> None:
    def slow_zero(handler: Handler, number: int) -> None:
        if handler.server.bodies[number]["items"][0]["gold"] == "0":
            time.sleep(2)
        handler.judge(number)

    with serving(slow_zero) as service:
        with scoring(service.url, batch_size=2, timeout_s=0.5, deadline_s=0.5) as scorer:
            verdicts = scorer.score(items(4))
    assert [verdict.score for verdict in verdicts] == [None, None, 0, 1]


def cut_off(handler: Handler, _: int) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    handler.close_connection = True


def no_http(handler: Handler, _: int) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    handler.close_connection = True


@pytest.mark.parametrize("behave", [cut_off, no_http])
def test_broken_connections_are_tried_again(behave: Callable[[Handler, int], None]) -> None:
    verdicts, service = once(behave, retries=1)
    assert reasons(verdicts) == {"http_error"} and len(service.bodies) == 2


GOOD = {"score": 1}


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>It works!</html>",
        b"",
        b"\xff\xfe\xfd",
        b"\x1f\x8b\x08",
        b"[" * 100_000,
        b'{"verdicts": [{"score": ' + b"1" * 10_000 + b"}, {}]}",
        [GOOD, GOOD],
        {"verdicts": {"0": GOOD, "1": GOOD}},
        {"verdicts": [GOOD]},
        {"verdicts": [GOOD] * 3},
        b" " * (MAX_REPLY_BYTES + 1),
    ],
)
def test_a_reply_that_is_not_the_verdicts_is_no_score(reply: Any) -> None:
    verdicts, service = once(lambda handler, _: handler.reply(reply))
    assert reasons(verdicts) == {"http_bad_reply"} and len(service.bodies) == 1


def test_an_endless_reply_is_cut_off() -> None:
    def endless(handler: Handler, _: int) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            handler.wfile.write(b" " * 65536)

    assert reasons(once(endless)[0]) == {"http_bad_reply"}


@pytest.mark.parametrize(
    "entry",
    [
        "NaN",
        "Infinity",
        "1.0001",
        "-0.1",
        "true",
        '"1"',
        "[1]",
        '1, "reason": 5',
        '1, "extracted": ["4"]',
        '1, "parts": [0.5]',
        '1, "parts": {"style": NaN}',
        '1, "parts": {"style": "good"}',
        r'1, "parts": {"\udfff": 1}',
    ],
)
def test_one_bad_verdict_does_not_touch_its_neighbour(entry: str) -> None:
    bad, good = read_reply(f'{{"verdicts": [{{"score": {entry}}}, {{"score": 1}}]}}'.encode(), 2)
    assert (bad.score, bad.reason) == (None, "http_bad_reply")
    assert (good.score, good.reason) == (1.0, "correct")


def test_what_a_verdict_may_say() -> None:
    reply = {
        "verdicts": [
            {"score": 0.25, "reason": "too_long", "extracted": "4", "parts": {"style": 0.5, "length": -3}},
            {"score": 0.25, "reason": "Half of it!", "extracted": None, "parts": None, "model": "x"},
            {"score": None, "reason": "the GPU is on fire"},
            {"score": 0},
            {"reason": "no score"},
            None,
        ]
    }
    assert read_reply(json.dumps(reply).encode(), 6) == [
        Verdict(score=0.25, reason="too_long", extracted="4", parts=(("style", 0.5), ("length", -3.0))),
        Verdict(score=0.25, reason="partial"),
        Verdict(score=None, reason="http_unscored", extracted="the GPU is on fire"),
        Verdict(score=0.0, reason="wrong"),
        Verdict(score=None, reason="http_bad_reply"),
        Verdict(score=None, reason="http_bad_reply"),
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_ENTRY = st.fixed_dictionaries({}, optional=dict.fromkeys(("score", "reason", "extracted", "parts"), _JSON))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(_ENTRY | _JSON, max_size=4))
def test_whatever_comes_is_a_verdict_or_no_score(entries: list[Any]) -> None:
    verdicts = read_reply(json.dumps({"verdicts": entries}).encode(), len(entries))
    for entry, verdict in zip(entries, verdicts, strict=True):
        if verdict.score is None:
            assert verdict.reason in ("http_bad_reply", "http_unscored")
        else:
            assert verdict.score == entry["score"] and 0 <= verdict.score <= 1


def test_an_item_that_is_no_json_is_bad_alone() -> None:
    with serving(Handler.judge) as service, scoring(service.url) as scorer:
        odd = [Item("http", {1, 2}, "a"), Item("http", float("nan"), "a"), Item("http", "\ud800", "\ud800")]
        verdicts = scorer.score(odd)
    assert [(verdict.score, verdict.reason) for verdict in verdicts] == [
        (None, "bad_gold"),
        (None, "bad_gold"),
        (1.0, "correct"),
    ]
    assert "set" in str(verdicts[0].extracted)


def test_redirects_are_not_followed() -> None:
    with serving(Handler.judge) as other:
        verdicts, service = once(lambda handler, _: handler.reply(b"", 307, Location=other.url))
        assert reasons(verdicts) == {"http_error"}
        assert len(service.bodies) == 1 and other.bodies == []


# ---- the circuit -------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_circuit_opens_tries_again_and_closes() -> None:
    clock = Clock()
    circuit = Circuit(3, 10.0, clock)
    assert [circuit.failed(), circuit.failed()] == [False, False]
    circuit.succeeded()  # only failures in a row count
    assert [circuit.failed(), circuit.failed(), circuit.failed()] == [False, False, True]
    assert circuit.state == "open" and not circuit.admits()
    clock.now = 9.9
    assert not circuit.admits()
    clock.now = 10.0
    assert circuit.admits() and circuit.state == "half_open"
    assert not circuit.admits()  # one tries
    assert circuit.failed() and circuit.state == "open"
    clock.now = 19.9
    assert not circuit.admits()
    clock.now = 20.0
    assert circuit.admits()
    circuit.succeeded()
    assert circuit.state == "closed" and circuit.admits() and circuit.admits()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["ask", "succeed", "fail", "wait"]), max_size=40))
def test_an_open_circuit_always_closes_again_when_the_scorer_recovers(events: list[str]) -> None:
    clock = Clock()
    circuit = Circuit(2, 10.0, clock)
    under_way = 0
    for event in events:
        if event == "ask":
            under_way += circuit.admits()
        elif event == "wait":
            clock.now += 6
        elif under_way:
            under_way -= 1
            circuit.succeeded() if event == "succeed" else circuit.failed()
    for _ in range(under_way):
        circuit.failed()
    clock.now += 10
    assert circuit.admits()
    circuit.succeeded()
    assert circuit.state == "closed"


def test_a_dead_scorer_costs_nothing_until_it_lives_again(caplog: pytest.LogCaptureFixture) -> None:
    dead = True

    def moody(handler: Handler, number: int) -> None:
        if dead:
            handler.reply(b"Traceback: secret of the service", 500)
        else:
            handler.judge(number)

    with (
        serving(moody) as service,
        scoring(
            service.url, batch_size=2, max_concurrent=1, retries=0, failures_to_open=3, cool_down_s=1
        ) as scorer,
        caplog.at_level(logging.WARNING),
    ):
        verdicts = scorer.score(items(20))  # ten batches, one at a time
        assert [verdict.reason for verdict in verdicts] == ["http_error"] * 6 + ["http_circuit_open"] * 14
        assert len(service.bodies) == 3
        assert set(scorer.drain_updates()) == {
            ("headway_http_scorer_circuit_state", "", 2),
            ("headway_http_scorer_requests_total", "http_error", 3),
        }
        for _ in range(20):
            assert reasons(scorer.score(items(4))) == {"http_circuit_open"}
        assert len(service.bodies) == 3
        time.sleep(1)
        assert reasons(scorer.score(items(6))) == {"http_error", "http_circuit_open"}
        assert len(service.bodies) == 4  # the one that tried
        time.sleep(1)
        dead = False
        assert [verdict.score for verdict in scorer.score(items(6))] == [0, 1, 0, 1, 0, 1]
        assert ("headway_http_scorer_circuit_state", "", 0) in scorer.drain_updates()
    assert [record.getMessage() for record in caplog.records] == [
        "HTTP scorer 127.0.0.1: circuit opened, last failure: status 500"
    ] * 2


def test_a_service_that_asks_to_wait_is_alive() -> None:
    """Eight requests at a time are all told to wait, which must not open the circuit."""

    def busy_at_first(handler: Handler, number: int) -> None:
        if number < 8:
            handler.reply({}, 429, Retry_After="0")
        else:
            handler.judge(number)

    with serving(busy_at_first) as service, scoring(service.url, batch_size=1, failures_to_open=2) as scorer:
        assert [verdict.score for verdict in scorer.score(items(8))] == [0, 1] * 4


def test_a_scorer_that_never_answers_opens_the_circuit() -> None:
    with serving(hang) as service:
        with scoring(
            service.url, timeout_s=0.1, deadline_s=0.1, failures_to_open=2, cool_down_s=60
        ) as scorer:
            found = [reasons(scorer.score(items(1))) for _ in range(3)]
    assert found == [{"http_timeout"}, {"http_timeout"}, {"http_circuit_open"}]


# ---- secrets, mistakes, the end ----------------------------------------------------------------------------


def test_the_token_reaches_the_scorer_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", f"{TOKEN}\n")
    with serving(Handler.judge) as service, caplog.at_level(logging.DEBUG):
        with scoring(service.url, token_env="JUDGE_TOKEN") as scorer:
            scorer.score(items(1))
        with scoring(
            "http://127.0.0.1:1/?key=" + TOKEN, retries=0, failures_to_open=1, token_env="JUDGE_TOKEN"
        ) as scorer:
            verdicts = scorer.score(items(1))
            assert TOKEN not in repr(scorer.drain_updates())
    assert [headers["Authorization"] for headers in service.seen] == [f"Bearer {TOKEN}"]
    assert "circuit opened" in caplog.text and TOKEN not in caplog.text and TOKEN not in repr(verdicts)


@pytest.mark.parametrize("token", [None, "", "two words", "line\nX-Forged: 1", "naïve"])
def test_a_token_that_is_none_is_said_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token is None:
        monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    else:
        monkeypatch.setenv("JUDGE_TOKEN", token)
    with pytest.raises(ConfigError, match=r"\$JUDGE_TOKEN, which is not set, or no token") as error:
        HttpScorer("http://localhost/", token_env="JUDGE_TOKEN")
    assert not token or token not in str(error.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000/score", "file:///etc/passwd", "http://", f"http://user:{TOKEN}@localhost/", ""]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL of the HTTP scorer") as error:
        HttpScorer(url)
    assert TOKEN not in str(error.value)


def test_a_deadline_below_the_timeout_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline of 5 s is below its timeout of 10 s"):
        HttpScorer("http://localhost/", timeout_s=10, deadline_s=5)


def test_closing_releases_who_waits() -> None:
    found: list[BaseException] = []
    with serving(hang) as service:
        scorer = HttpScorer(service.url)

        def ask() -> None:
            try:
                scorer.score(items(1))
            except Closed as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not service.bodies:
            time.sleep(0.01)
        started = time.monotonic()
        scorer.close()
        thread.join(20)
        assert len(found) == 1 and time.monotonic() - started < 20
        scorer.close()
        with pytest.raises(Closed):
            scorer.score(items(1))
    assert not any(thread.name == "http-scorer" for thread in threading.enumerate())


def test_the_verifier_stage_sends_what_is_for_it_and_keeps_the_rest() -> None:
    """Two thirds of the reward from the service, which takes "4" for right; a third from the pool."""
    parts = {
        "remote": {"verifier": "http", "weight": 2},
        "short": {"verifier": "length", "weight": 1, "unit": "characters", "max": 3},
    }
    prompt = Prompt(prompt_id="p", content="2 + 2 =", gold="4", verifier="weighted", context={"parts": parts})
    table = rollouts.build(
        {
            "rollout_id": f"7/{number}",
            "group_id": 7,
            "prompt_id": "p",
            "sample_index": number,
            "prompt_ids": [1],
            "response_ids": [2],
            "loss_mask": [1],
            "behavior_logprobs": [-1.0],
            "version_spans": [{"start": 0, "end": 1, "version": 0}],
            "finish_reason": "stop",
            "truncated": False,
            "text": text,
        }
        for number, text in enumerate(["4", "5", "four, I think"])
    )
    with serving(Handler.judge) as service:
        worker = VerifierWorker(Verifiers(processes=1, http_url=service.url))
        try:
            rows = worker.score(table, prompt).to_pylist()
            assert [row["reward"] for row in rows] == pytest.approx([1, 1 / 3, 0])
            assert rows[1]["reward_parts"] == [
                {"name": "remote", "value": 0.0},
                {"name": "short", "value": 1.0},
            ]
            (body,) = service.bodies
            assert [item["response"] for item in body["items"]] == ["4", "5", "four, I think"]
            assert ("headway_http_scorer_requests_total", "ok", 1) in worker.drain_updates()
            service.behave = lambda handler, _: handler.send_error(404)
            assert [row["reward"] for row in worker.score(table, prompt).to_pylist()] == [None] * 3
            assert ("headway_verifier_errors_total", "http_error", 3) in worker.drain_updates()
        finally:
            worker.close()
