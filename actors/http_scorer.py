"""Verdicts from a scorer behind HTTP.

Request: POST `{"items": [{"prompt", "gold", "response", "context"}, ...]}`. Reply, status 200: `{"verdicts": [{"score":
number in [0, 1] or null, "reason": label, "extracted": text or null, "parts": {name: number}}, ...]}`, one for each item,
in order; all but the score may be left out. Whatever goes wrong leaves responses unscored, never 0.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from headway.core.errors import Closed, ConfigError, Starved
from headway.core.metrics import Update
from headway.core.rollouts import can_hold
from headway.verifiers.verdict import Item, Verdict

Failure = Literal["http_error", "http_timeout", "http_bad_reply", "http_circuit_open"]
UNSCORED = "http_unscored"
"""Reason when the scorer itself gives no score; `extracted` then has its own reason."""
CIRCUIT = "headway_http_scorer_circuit_state"
REQUESTS = "headway_http_scorer_requests_total"

MAX_REPLY_BYTES = 4 * 2**20
MAX_EXTRACTED = 100_000
"""Characters."""
MAX_PARTS = 64
BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0
"""Before the first retry; doubled for each further one up to the second."""
MAX_RETRY_AFTER_S = 30.0
"""What the scorer may ask for at most."""
GRACE_S = 10.0
_LABEL = re.compile(r"[a-z][a-z0-9_]{0,39}")

log = logging.getLogger(__name__)


class Circuit:
    """Lets requests through while the scorer is alive. Opens after `failures_to_open` failures in a row; `cool_down_s`
    later it is half open: one request may try, and its result closes or opens it again. Not for several threads."""

    def __init__(
        self, failures_to_open: int, cool_down_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.state: Literal["closed", "half_open", "open"] = "closed"
        self._failures_to_open = failures_to_open
        self._cool_down_s = cool_down_s
        self._now = now
        self._failures = 0
        self._opened_at = 0.0

    def admits(self) -> bool:
        """Whether a request may start; its result must then be reported."""
        if self.state == "open" and self._now() >= self._opened_at + self._cool_down_s:
            self.state = "half_open"
            return True
        return self.state == "closed"

    def succeeded(self) -> None:
        self._failures = 0
        self.state = "closed"

    def failed(self) -> bool:
        """True when this failure has opened it."""
        self._failures += 1
        opens = self.state == "half_open" or (
            self.state == "closed" and self._failures >= self._failures_to_open
        )
        if opens:
            self.state = "open"
            self._opened_at = self._now()
        return opens


@dataclass(frozen=True, slots=True)
class _Failed:
    """Why one attempt gave nothing."""

    reason: Failure
    detail: str
    """For the log: without anything that was sent or received."""
    again: bool = True
    """The same request may succeed later."""
    retry_after_s: float | None = None
    is_busy: bool = False
    """The scorer is alive and asks to wait."""


class HttpScorer:
    """`score` may be called from several threads at a time; `close` ends it."""

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 32,
        max_concurrent: int = 8,
        timeout_s: float = 30.0,
        deadline_s: float = 120.0,
        retries: int = 3,
        failures_to_open: int = 5,
        cool_down_s: float = 30.0,
        token_env: str | None = None,
    ) -> None:
        """`batch_size` items per request, `max_concurrent` requests at a time, each attempt within `timeout_s` seconds and
        retried `retries` times; a call of `score` takes `deadline_s` seconds at most. `token_env`: the environment
        variable that holds a bearer token. Raises `ConfigError`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "the URL of the HTTP scorer must start with http:// or https:// and have a host name"
            )
        if parts.username is not None or parts.password is not None:
            raise ConfigError("the URL of the HTTP scorer holds a password; name a token's variable instead")
        if deadline_s < timeout_s:
            raise ConfigError(
                f"the HTTP scorer's deadline of {deadline_s} s is below its timeout of {timeout_s} s"
            )
        self._url = url
        self._host = parts.hostname
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token_env is not None:
            self._headers["Authorization"] = f"Bearer {_token(token_env)}"
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._retries = retries
        self._circuit = Circuit(failures_to_open, cool_down_s)
        self._counting = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._submitting = threading.Lock()
        self._closed = False
        # One event loop has all connections and the circuit: nothing of them is shared between threads.
        self._slots = asyncio.Semaphore(max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-scorer", daemon=True)
        self._thread.start()

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per item, in order. Unscored items have reason `http_error` (no connection, or a status other than
        200), `http_timeout`, `http_circuit_open`, `http_bad_reply` (no such reply as above), `http_unscored` (by the
        scorer itself), or `bad_gold` (the item is no JSON). Raises `Closed` when it is closed."""
        with self._submitting:
            if self._closed:
                raise Closed("the HTTP scorer is closed")
            future = asyncio.run_coroutine_threadsafe(self._score(items), self._loop)
        try:
            return future.result(self._deadline_s + GRACE_S)
        except concurrent.futures.CancelledError:
            raise Closed("the HTTP scorer was closed while it scored") from None
        except TimeoutError:
            future.cancel()
            raise Starved(f"the HTTP scorer gave nothing in {self._deadline_s + GRACE_S:.0f} s") from None

    def drain_updates(self) -> list[Update]:
        """Metric updates since the last call: the circuit's state (0 closed, 1 half open, 2 open), and requests by how
        they ended."""
        with self._counting:
            outcomes, self._outcomes = self._outcomes, Counter()
        state = ("closed", "half_open", "open").index(self._circuit.state)
        return [(CIRCUIT, "", state), *((REQUESTS, outcome, n) for outcome, n in outcomes.items())]

    def close(self) -> None:
        """Releases every caller with `Closed`. May be called again."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with suppress(TimeoutError):
            closing.result(GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _score(self, items: Sequence[Item]) -> list[Verdict]:
        ends_at = asyncio.get_running_loop().time() + self._deadline_s
        verdicts: dict[int, Verdict] = {}
        bodies: dict[int, str] = {}
        for position, item in enumerate(items):
            try:
                bodies[position] = _body(item)
            except (TypeError, ValueError, RecursionError) as error:
                verdicts[position] = Verdict(score=None, reason="bad_gold", extracted=f"no JSON: {error}")
        positions = list(bodies)
        batches = [
            positions[start : start + self._batch_size]
            for start in range(0, len(positions), self._batch_size)
        ]
        results = await asyncio.gather(
            *(self._batch([bodies[position] for position in batch], ends_at) for batch in batches)
        )
        for batch, result in zip(batches, results, strict=True):
            verdicts.update(zip(batch, result, strict=True))
        return [verdicts[position] for position in range(len(items))]

    async def _batch(self, bodies: list[str], ends_at: float) -> list[Verdict]:
        """Verdicts of one request, however often it is sent."""
        body = f'{{"items": [{", ".join(bodies)}]}}'.encode()
        failure: Failure = "http_circuit_open"
        try:
            async with asyncio.timeout_at(ends_at):
                async with self._slots:
                    for attempt in range(self._retries + 1):
                        if not self._circuit.admits():
                            break
                        result = await self._attempt(body, len(bodies))
                        if not isinstance(result, _Failed):
                            return result
                        failure = result.reason
                        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
                        if result.retry_after_s is not None:
                            wait_s = min(MAX_RETRY_AFTER_S, result.retry_after_s)
                        is_last = (
                            attempt == self._retries or asyncio.get_running_loop().time() + wait_s >= ends_at
                        )
                        if is_last and result.is_busy:
                            self._count_failure(result)
                        if is_last or not result.again:
                            break
                        await asyncio.sleep(wait_s)
        except TimeoutError:
            failure = "http_timeout"
        return [_unscored(failure)] * len(bodies)

    async def _attempt(self, body: bytes, size: int) -> list[Verdict] | _Failed:
        try:
            result = await self._post(body, size)
        except BaseException:  # mostly the deadline of the whole call; a half-open circuit must learn of it
            self._count_failure(_Failed("http_timeout", "no reply by the deadline"))
            raise
        self._count(result.reason if isinstance(result, _Failed) else "ok")
        if not isinstance(result, _Failed):
            self._circuit.succeeded()
        elif not result.is_busy or self._circuit.state == "half_open":
            self._count_failure(result)
        return result

    async def _post(self, body: bytes, size: int) -> list[Verdict] | _Failed:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                # A redirect could carry prompts and token to another host; it is the URL that has to change.
                async with self._session.post(
                    self._url, data=body, headers=self._headers, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        return _refused(response.status, response.headers)
                    reply = bytearray()
                    async for chunk in response.content.iter_any():
                        reply += chunk
                        if len(reply) > MAX_REPLY_BYTES:
                            return _Failed(
                                "http_bad_reply", f"a reply of more than {MAX_REPLY_BYTES} bytes", again=False
                            )
        except TimeoutError:
            return _Failed("http_timeout", f"no reply in {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Failed("http_error", type(error).__name__)  # its text may hold the URL
        try:
            return read_reply(bytes(reply), size)
        except (ValueError, RecursionError):
            return _Failed(
                "http_bad_reply", f"a reply that does not hold {size} verdicts as JSON", again=False
            )

    def _count(self, outcome: str) -> None:
        with self._counting:
            self._outcomes[outcome] += 1

    def _count_failure(self, failure: _Failed) -> None:
        if self._circuit.failed():
            log.warning("HTTP scorer %s: circuit opened, last failure: %s", self._host, failure.detail)


def read_reply(reply: bytes, size: int) -> list[Verdict]:
    """The verdicts of a reply. One that is malformed by itself is unscored with reason `http_bad_reply`; raises
    `ValueError` when the reply as a whole is."""
    content = json.loads(reply)
    verdicts = content.get("verdicts") if isinstance(content, dict) else None
    if not isinstance(verdicts, list) or len(verdicts) != size:
        raise ValueError("verdicts do not match the items")
    return [_read(verdict) or _unscored("http_bad_reply") for verdict in verdicts]


def _read(entry: Any) -> Verdict | None:
    if not isinstance(entry, dict) or "score" not in entry:
        return None
    score, reason = entry["score"], entry.get("reason")
    extracted, parts = entry.get("extracted"), entry.get("parts") or {}
    if not (reason is None or isinstance(reason, str)) or not (
        extracted is None or isinstance(extracted, str)
    ):
        return None
    if score is None:
        return Verdict(score=None, reason=UNSCORED, extracted=reason and reason[:MAX_EXTRACTED])
    if not _is_number(score) or not 0 <= score <= 1:
        return None
    if not isinstance(parts, dict) or len(parts) > MAX_PARTS or not all(map(_is_number, parts.values())):
        return None
    if not all(map(can_hold, parts)):
        return None
    score = float(score)
    if reason is None or not _LABEL.fullmatch(reason):  # reasons are few: they are counted one by one
        reason = "correct" if score == 1 else "wrong" if score == 0 else "partial"
    return Verdict(
        score=score,
        reason=reason,
        extracted=extracted and extracted[:MAX_EXTRACTED],
        parts=tuple((name, float(value)) for name, value in parts.items()),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def _unscored(reason: Failure) -> Verdict:
    return Verdict(score=None, reason=reason)


def _body(item: Item) -> str:
    fields = {
        "prompt": item.prompt,
        "gold": item.gold,
        "response": item.response,
        "context": dict(item.context),
    }
    return json.dumps(fields, allow_nan=False)


def _refused(status: int, headers: Mapping[str, str]) -> _Failed:
    return _Failed(
        "http_error",
        f"status {status}",
        again=status == 429 or status >= 500,
        retry_after_s=_retry_after_s(headers.get("Retry-After")) if status in (429, 503) else None,
        is_busy=status == 429,
    )


def _retry_after_s(value: str | None) -> float | None:
    """From seconds or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return float(value)
    try:
        wait_s = parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None


def _token(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the HTTP scorer's token is to come from ${variable}, which is not set, or no token"
        )
    return token
