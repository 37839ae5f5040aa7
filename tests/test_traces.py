"""Traces of groups, received by an OTLP/HTTP server as any collector is one: complete, in order, true to the ledger, and of
no consequence for the run."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
import ray
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from ray import cloudpickle

from headway.actors.generation_rows import GroupRequest
from headway.cluster import trace_export
from headway.cluster.dispatch import group_request
from headway.cluster.groups import Groups
from headway.cluster.ledger import trained_groups
from headway.cluster.preflight import check_outputs
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.run import Run
from headway.cluster.scenario import Failure, Scenario
from headway.cluster.simulate import Silent, virtual_run
from headway.cluster.traces import Life, Traces, traced
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import ConfigError
from headway.core.metrics import Recorder
from headway.core.prompts import Prompt, PromptStream

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

BELOW = {"generate", "wait_for_engine", "score", "queue", "train"}


@dataclass
class Collector:
    """What came in."""

    url: str
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/traces"
            for resource in request.resource_spans:
                found.resources.append(attributes(resource.resource))
                found.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    return {
        each.key.removeprefix("headway."): getattr(each.value, each.value.WhichOneof("value"))
        for each in of.attributes
    }


@dataclass
class Trace:
    root: Any
    about: dict[str, Any]
    below: list[Any]


def traces_of(spans: list[Any]) -> list[Trace]:
    """Checks that each is one tree, in which no span leaves its parent's time."""
    by_trace: dict[bytes, list[Any]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    found = []
    for members in by_trace.values():
        by_id = {span.span_id: span for span in members}
        assert len(by_id) == len(members), "a span came twice"
        (root,) = [span for span in members if not span.parent_span_id]
        for span in members:
            parent = by_id[span.parent_span_id] if span.parent_span_id else root
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent, span)
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano, (
                parent,
                span,
            )
        below = sorted((s for s in members if s is not root), key=lambda s: s.start_time_unix_nano)
        found.append(Trace(root, attributes(root), below))
    return found


def records_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_folder / "ledger.jsonl").read_text().splitlines()]


def configuration(folder: Path, **metrics: Any) -> Config:
    return parse_config(
        {
            "run": {
                "name": "traced",
                "folder": str(folder),
                "steps": 30,
                "checkpoint_every": 10,
                "save_rollouts": False,
            },
            "sampling": {"group_size": 4, "max_new_tokens": 400},
            "algorithm": {"dynamic_sampling": True},
            "lag": {"max_version_lag": 2, "policy": "drop"},
            "learner": {"groups_per_step": 8},
            "generation": {
                "replicas": 4,
                "max_concurrent_requests": 16,
                "drain_s": 1,
                "answer_deadline_s": 20,
            },
            "metrics": {"heartbeat_s": 5, **metrics},
        }
    )


MORTAL = Scenario(
    seed=3,
    length_median=60,
    start_s=1,
    engine_start_s=5,
    score_s=0.5,
    store_full_s=3,
    failures=(
        Failure(time_s=12, event="generation"),
        Failure(time_s=17, event="verifiers"),
        Failure(time_s=20, event="queue"),
        Failure(time_s=25, event="store_full"),
        Failure(time_s=33, event="generation", replica=1),
        Failure(time_s=41, event="verifiers"),
    ),
    scaling=((22, 2), (28, 4)),
)
"""All that a session survives: a run of about two minutes."""


def execute(config: Config, scenario: Scenario, said: list[str] | None = None) -> tuple[Run, VirtualCrew]:
    class Told(Silent):
        def say(self, text: str) -> None:
            if said is not None:
                said.append(text)

    crew = VirtualCrew(config, scenario)
    run = virtual_run(config, crew, progress=Told(config))
    run_virtual(run.execute())
    return run, crew


# ---- whole runs --------------------------------------------------------------------------------------------


def test_every_issued_group_is_one_trace_that_says_what_the_ledger_says(tmp_path: Path, collector: Collector):
    config = configuration(tmp_path, traces=collector.url)
    run, crew = execute(config, MORTAL)
    assert run.session is not None
    ledger = run.session.groups.ledger
    traces = {trace.about["group_id"]: trace for trace in traces_of(collector.spans)}
    assert sorted(traces) == list(range(ledger.issued))
    assert len(traces) == sum(not span.parent_span_id for span in collector.spans)

    outcomes = Counter(trace.about["outcome"] for trace in traces.values())
    dropped = Counter(t.about["reason"] for t in traces.values() if t.about["outcome"] == "dropped")
    assert outcomes["trained"] == ledger.trained == 240
    assert dropped == ledger.dropped and {"stale", "no_signal"} <= dropped.keys()
    unfinished = {group_id for group_id, trace in traces.items() if trace.about["outcome"] == "unfinished"}
    assert unfinished == ledger.live.keys()
    trained = {g: t.about["version"] for g, t in traces.items() if t.about["outcome"] == "trained"}
    assert trained == trained_groups(config.run_folder / "ledger.jsonl")

    events = {
        event: Counter(r["group"] for r in records_of(config) if r["event"] == event)
        for event in ("restarted", "lost")
    }
    assert events["restarted"] and events["lost"]
    lags: Counter[int] = Counter()
    for group_id, trace in traces.items():
        about, names = trace.about, [span.name for span in trace.below]
        assert set(names) <= BELOW
        assert about["run"] == "traced" and about["prompt_id"] == run.prompts.at(group_id).prompt_id
        said = Counter(event.name for event in trace.root.events)
        assert said["restarted"] == events["restarted"][group_id]
        assert said["lost"] == events["lost"][group_id] >= said["issued again"]
        if about["outcome"] == "trained":
            lags[about["lag"]] += 1
            assert names[-2:] == ["queue", "train"]
            assert attributes(trace.below[-1])["version"] == about["version"]
            assert trace.below[-1].end_time_unix_nano == trace.root.end_time_unix_nano
            assert about["admission_version"] <= about["oldest_version"] <= about["newest_version"]
            assert about["oldest_version"] == about["version"] - 1 - about["lag"]
            generated = [attributes(span) for span in trace.below if span.name == "generate"]
            assert generated[-1]["tokens"] == about["tokens"]
            assert len(generated) >= 1 + said["restarted"]
    assert lags == crew.lags
    assert any("handed_back" in attributes(span) for span in collector.spans)
    failures = [span.status.message for span in collector.spans if span.status.code == 2]
    for words in ("generation", "verifiers", "queue", "StoreFull"):
        assert any(words in failure for failure in failures), words
    assert all(resource["service.name"] == "headway" for resource in collector.resources)
    assert {resource["run"] for resource in collector.resources} == {"traced"}


def test_where_the_time_of_a_group_went_can_be_computed_by_hand(tmp_path: Path, collector: Collector):
    """Two responses of 10 tokens at 0.1 s + 2 * 0.025 s each, 2 s of scoring, then a step of 3 s."""
    config = configuration(tmp_path, traces=f"{collector.url}/v1/traces")
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": 2}),
            "sampling": config.sampling.model_copy(update={"group_size": 2}),
            "learner": config.learner.model_copy(update={"groups_per_step": 1}),
            "lag": config.lag.model_copy(update={"max_version_lag": 0, "policy": "pace"}),
            "generation": config.generation.model_copy(update={"replicas": 1}),
            "algorithm": config.algorithm.model_copy(update={"dynamic_sampling": False}),
        }
    )
    even = Scenario(
        length_median=10,
        length_sigma=0,
        prefill_s=0,
        decode_s=0.1,
        decode_request_s=0.025,
        score_s=2,
        step_s=3,
        token_s=0,
    )
    before = time.time()
    execute(config, even)
    for trace in traces_of(collector.spans):
        seconds = {
            span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in trace.below
        }
        assert seconds == pytest.approx({"generate": 1.5, "score": 2, "queue": 0, "train": 3}, abs=1e-6)
        assert before < trace.root.start_time_unix_nano / 1e9 < time.time() + 100  # of the virtual clock


def test_a_run_that_lost_its_learner_has_a_trace_for_each_time_that_a_group_was_there(
    tmp_path: Path, collector: Collector
):
    config = configuration(tmp_path, traces=collector.url)
    execute(config, Scenario(seed=1, length_median=60, failures=(Failure(time_s=110, event="learner"),)))
    records = records_of(config)
    (resumed,) = [record for record in records if record["event"] == "resumed"]
    traces = traces_of(collector.spans)
    told = Counter(
        (trace.about["group_id"], trace.about.get("version", trace.about.get("reason")))
        for trace in traces
        if trace.about["outcome"] != "unfinished"
    )
    assert told == Counter(
        (record["group"], record.get("version", record.get("reason")))
        for record in records
        if record["event"] in ("trained", "dropped")
    )
    assert max(told.values()) == 2  # once before the learner died and once after
    again = {trace.about["group_id"] for trace in traces if trace.about.get("resumed")}
    assert again == {int(group_id) for group_id in resumed["state"]["live"]}
    assert any(trace.about["outcome"] == "unfinished" for trace in traces)


# ---- of no consequence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [False, True], ids=["refused", "silent"])
def test_a_dead_collector_is_told_once_and_changes_nothing(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Nothing listens, or something that takes connections and never answers."""
    monkeypatch.setattr(trace_export, "CLOSE_DEADLINE_S", 1.0)
    monkeypatch.setattr(trace_export, "MAX_WAITING", 600)
    plain = execute(configuration(tmp_path / "plain"), MORTAL)[1]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        said: list[str] = []
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        execute(configuration(tmp_path / "warm"), MORTAL)
        began = time.monotonic()
        crew = execute(configuration(tmp_path / "dead", traces=url), MORTAL, said)[1]
        assert time.monotonic() - began < 30
    assert crew.weights == plain.weights
    told = [text for text in said if "traces" in text]
    assert len(told) == 1 and url in told[0], told
    assert capfd.readouterr() == ("", "")


def test_without_traces_the_library_is_not_even_imported(tmp_path: Path):
    program = """
import sys
from pathlib import Path
from headway.cluster.scenario import Scenario
from headway.cluster.simulate import simulate
from headway.core.config import parse_config
config = parse_config({"run": {"steps": 2}, "learner": {"groups_per_step": 2}, "sampling": {"group_size": 2}})
simulate(config, Scenario(), Path(sys.argv[1]))
print([name for name in sys.modules if name.startswith(("opentelemetry", "tensorboard", "wandb"))])
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_environment_can_leave_groups_out(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")
    run, _ = execute(configuration(tmp_path, traces=collector.url), Scenario(seed=1, length_median=60))
    assert run.session is not None
    assert 0.1 < len(traces_of(collector.spans)) / run.session.groups.ledger.issued < 0.5


# ---- into a file -------------------------------------------------------------------------------------------


def test_a_file_holds_the_same_message_line_by_line_and_is_gone_on_with(tmp_path: Path):
    config = configuration(tmp_path, traces="spans.jsonl")
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": 3})})
    execute(config, Scenario(seed=1, length_median=60))
    file = config.run_folder / "spans.jsonl"

    def read() -> list[Any]:
        messages = [json.loads(line) for line in file.read_text().splitlines()]
        for span in (
            s for m in messages for r in m["resourceSpans"] for c in r["scopeSpans"] for s in c["spans"]
        ):
            assert len(bytes.fromhex(span["traceId"])) == 16 and len(bytes.fromhex(span["spanId"])) == 8
        parsed = [ParseDict(message, ExportTraceServiceRequest()) for message in messages]
        return [s for m in parsed for r in m.resource_spans for c in r.scope_spans for s in c.spans]

    first = read()
    outcomes = Counter(trace.about["outcome"] for trace in traces_of(first))
    assert outcomes["trained"] == 24
    with file.open("a") as torn:
        torn.write('{"resourceSpans": [{"reso')
    (config.run_folder / "ledger.jsonl").unlink()
    execute(config, Scenario(seed=1, length_median=60))
    assert len(read()) == 2 * len(first)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["collector:4318", "spans.json", "http://", "", "ftp://collector/spans"])
def test_a_place_that_is_none_is_refused(where: str):
    with pytest.raises(ConfigError, match=r"metrics.traces=.* http://collector:4318, nor a file whose name"):
        parse_config({"metrics": {"traces": where}})


def test_what_cannot_be_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="stage=sft, which makes no rollouts to trace"):
        check_outputs(parse_config({"stage": "sft", "metrics": {"traces": "a.jsonl"}}))
    (tmp_path / "file").touch()
    config = configuration(tmp_path, traces=str(tmp_path / "file" / "spans.jsonl"))
    with pytest.raises(ConfigError, match=r"file/spans\.jsonl cannot be written: "):
        execute(config, MORTAL)
    wanted = configuration(tmp_path, traces="a.jsonl")
    check_outputs(wanted)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-exporter-otlp-proto-http$"):
        check_outputs(wanted)


# ---- scorers, on real Ray ----------------------------------------------------------------------------------


class Learner:
    """Is there."""

    def __init__(self, *_: Any) -> None: ...


class Engine(Learner):
    """Answers 2."""

    async def start(self) -> None: ...

    async def generate(self, request: GroupRequest, kept: None = None) -> pa.Table:
        return rollouts.build(
            {
                "rollout_id": f"{request.group_id}/{index}",
                "group_id": request.group_id,
                "prompt_id": request.prompt.prompt_id,
                "sample_index": index,
                "prompt_ids": [1],
                "response_ids": [2, 3],
                "loss_mask": [1, 1],
                "behavior_logprobs": [-1.0, -1.0],
                "version_spans": [{"start": 0, "end": 2, "version": 0}],
                "finish_reason": "stop",
                "truncated": False,
                "text": "2",
            }
            for index in range(request.group_size)
        )

    async def shutdown(self) -> None: ...


class Reference(Learner):
    """Takes half a second."""

    def score(self, table: pa.Table) -> pa.Table:
        time.sleep(0.5)
        return table


def test_each_scorer_has_a_span_of_its_own(tmp_path: Path):
    config = configuration(tmp_path, port=0, host="127.0.0.1")
    config = config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"kl": "loss"}),
            "verifiers": config.verifiers.model_copy(update={"replicas": 2}),
            "queue": config.queue.model_copy(update={"max_mib": 40}),
        }
    )
    lives: list[Life] = []
    prompts = PromptStream((Prompt(prompt_id="p", content="1 + 1", gold="2", verifier="numeric"),), 0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        roles = {**ROLES, "learner": Learner, "generation": Engine, "reference": Reference}
        crew = RayCrew(config, config.run_folder, "no-model", roles)
        traces = Traces(config, lambda life, offset_ns: lives.append(life), loop.time)
        groups = Groups.new(config, 1, tmp_path / "ledger.jsonl", Recorder())
        traces.attach(groups, prompts)

        async def roll(replica: int) -> None:
            group = groups.issue(0, lambda _: "", loop.time())
            traces.follow(group)
            request = group_request(config, group.group_id, prompts.at(0), deadline_s=60)
            with traced("score"):
                groups.finish(group, await crew.put(crew.sample(0, request)), 0)

        try:
            async with asyncio.timeout(60):
                await crew.open()
                await crew.start_engine(0)
                await asyncio.gather(roll(0), roll(1))
            traces.detach()
        finally:
            await crew.close()

    ray.init("local", num_cpus=8, log_to_driver=False, include_dashboard=False, object_store_memory=100 << 20)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
    assert len(lives) == 2
    for life in lives:
        score, verifiers, reference, queue = life.spans
        assert [span.name for span in life.spans] == ["score", "verifiers", "reference", "queue"]
        assert verifiers.attributes == {"replica": life.root.attributes["group_id"] % 2}
        assert reference.attributes == {"replica": 0}
        assert verifiers.parent is reference.parent is score and score.parent is queue.parent is None
        assert score.began <= verifiers.began < verifiers.ended <= reference.began  # pyright: ignore
        assert reference.ended is not None and reference.ended - reference.began >= 0.5
