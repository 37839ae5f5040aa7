"""What a virtual run is made of: rows that carry lengths and rewards instead of tokens, engines that share their speed
among requests, and a learner whose weights are a hash of everything that they were trained on, in order."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.actors.generation_rows import GroupRequest
from headway.cluster.scenario import Scenario, seeded
from headway.core.errors import ActorDied, HandedBack, RolloutFailed, WeightUpdateFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRows:
    """What stands for a group's table."""

    group_id: int
    prompt_id: str
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    oldest: int
    """Version that sampled the first token,"""
    newest: int
    """and the last one."""
    oldest_weights: str
    """Those versions' weights."""
    newest_weights: str
    num_bytes: int


class Pending:
    """A group at an engine: rows or a failure to come. Anyone may wait for it, and stop waiting."""

    __slots__ = ("error", "rows", "waiting")

    def __init__(self) -> None:
        self.rows: VirtualRows | None = None
        self.error: Exception | None = None
        self.waiting: list[asyncio.Future[None]] = []

    def end(self, *, rows: VirtualRows | None = None, error: Exception | None = None) -> None:
        if self.rows is None and self.error is None:
            self.rows, self.error = rows, error
            for future in self.waiting:
                _settle(future)
            self.waiting.clear()

    async def get(self) -> VirtualRows:
        """The rows; raises the failure."""
        if self.rows is None and self.error is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            await future
        if self.error is not None:
            raise self.error
        assert self.rows is not None
        return self.rows


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What an engine had of a group when it gave it back."""

    group_id: int
    lengths: tuple[int, ...]
    remaining: tuple[int, ...]
    """Tokens still to be sampled of each response."""
    oldest: int
    oldest_weights: str
    newest: int
    newest_weights: str


class Job:
    """A group at an engine."""

    __slots__ = (
        "deadline",
        "kept",
        "lengths",
        "oldest",
        "oldest_weights",
        "open",
        "pending",
        "request",
        "stopped",
    )

    def __init__(
        self, request: GroupRequest, pending: Pending, lengths: tuple[int, ...], deadline: float
    ) -> None:
        self.request = request
        self.pending = pending
        self.lengths = lengths
        self.deadline = deadline
        self.open = 0
        """Responses that are not finished."""
        self.oldest: int | None = None
        self.oldest_weights = ""
        self.kept: Kept | None = None
        """What it goes on from."""
        self.stopped = False


# ---- actors ------------------------------------------------------------------------------------------------


class Actor:
    """One replica of a role, through all its incarnations."""

    def __init__(self, role: str, replica: int) -> None:
        self.role = role
        self.replica = replica
        self.incarnation = 0
        self.alive = False
        self.calls: dict[asyncio.Future[None], None] = {}
        """What ends when it dies, for someone else to find out."""

    def born(self) -> None:
        self.incarnation += 1
        self.alive = True

    def death(self, detail: str = "") -> ActorDied:
        return ActorDied(self.role, self.replica, self.incarnation, detail)

    def check(self) -> None:
        if not self.alive:
            raise self.death("it is dead")

    async def work(self, seconds: float) -> None:
        """A call on this actor. Raises `ActorDied` as soon as this incarnation is dead; infinite: it never answers."""
        self.check()
        incarnation = self.incarnation
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            call: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(seconds, _settle, call) if seconds < math.inf else None
            self.calls[call] = None
            try:
                await call
            finally:
                self.calls.pop(call, None)
                if timer:
                    timer.cancel()
        if not self.alive or self.incarnation != incarnation:
            raise ActorDied(self.role, self.replica, incarnation, "it died during the call")

    def die(self) -> ActorDied:
        self.alive = False
        error = self.death()
        for call in self.calls:
            _settle(call)
        self.calls.clear()
        return error


ROUNDING_TOKENS = 1e-6
"""Of a sum over many spans of time."""


class Engine(Actor):
    """Decodes all its responses at the same pace: one token each per step, and a step takes `decode_s` plus
    `decode_request_s` for each of them. `service` counts the tokens that a response which was always there would
    have got; a response ends when `service` passes its threshold, so one timer serves all."""

    def __init__(
        self, replica: int, scenario: Scenario, slots: int, finished: Callable[[Engine, Job], None]
    ) -> None:
        super().__init__("generation", replica)
        self._scenario = scenario
        self._slots = slots
        self._finished = finished
        self._slowness = math.exp(
            scenario.engine_spread * seeded(scenario.seed, "engine", replica).gauss(0, 1)
        )
        self.tokens = 0.0
        """Sampled, by all incarnations."""
        self.busy_s = 0.0
        """Time spent decoding,"""
        self.live_s = 0.0
        """of the time in which it served a version."""
        self.served_since = math.inf
        """When it served its first version."""
        self.jobs: dict[Job, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self.version: int | None = None
        self.weights = ""
        self.bad_update = False
        self.stalled = False
        self.leaving = False
        self.handed_back: dict[int, Kept] = {}
        self.jobs = {}
        self._decoding: list[tuple[float, int, int, Job]] = []
        """Heap of (threshold, order of entry, sample, group)."""
        self._entered = 0
        self._waiting: deque[tuple[int, int, Job]] = deque()
        """For a place among them."""
        self._unserved: list[Job] = []
        """Waiting for the first version."""
        self._service = 0.0
        self._since = 0.0
        self._halted = True
        self._earliest_deadline = math.inf
        self.reported_tokens = 0.0
        self.preemptions = 0

    def born(self) -> None:
        super().born()
        self._reset()
        self.reported_tokens = self.tokens

    def die(self) -> ActorDied:
        self._advance()
        self._halted = True
        error = super().die()
        for job in self.jobs:
            job.pending.end(error=error)
        self.jobs.clear()
        self._set_timer()
        return error

    @property
    def kv_cache_usage(self) -> float:
        """Above 1: it had to push requests out."""
        capacity = self._scenario.kv_cache_tokens
        if capacity is None:
            return len(self._decoding) / self._slots
        self._advance()
        held = sum(
            job.lengths[sample] - (threshold - self._service) + self._scenario.prompt_tokens
            for threshold, _, sample, job in self._decoding
        )
        return held / capacity

    def add(self, job: Job) -> None:
        """The same group may be here already, sampled for nobody since its scorer died."""
        self.jobs[job] = None
        self._earliest_deadline = min(self._earliest_deadline, job.deadline)
        if self._scenario.prefill_s > 0:
            asyncio.get_running_loop().call_later(
                self._scenario.prefill_s, self._decode, job, self.incarnation
            )
        else:
            self._decode(job, self.incarnation)

    def _decode(self, job: Job, incarnation: int) -> None:
        if job.stopped or not self.alive or self.incarnation != incarnation:
            return
        if self.version is None:
            self._unserved.append(job)
            return
        kept = job.kept
        job.oldest, job.oldest_weights = (
            (self.version, self.weights) if kept is None else (kept.oldest, kept.oldest_weights)
        )
        for sample, tokens in enumerate(job.lengths if kept is None else kept.remaining):
            if tokens:
                job.open += 1
                self._waiting.append((tokens, sample, job))
        self._advance()
        self._fill()
        if not job.open:
            self._end(job)
        self._set_timer()

    def _fill(self) -> None:
        while self._waiting and len(self._decoding) < self._slots:
            tokens, sample, job = self._waiting.popleft()
            self._entered += 1
            heapq.heappush(self._decoding, (self._service + tokens, self._entered, sample, job))

    def _step_s(self) -> float:
        scenario = self._scenario
        return (scenario.decode_s + scenario.decode_request_s * len(self._decoding)) * self._slowness

    def _advance(self) -> None:
        """Brings `service` up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        if self.version is not None:
            self.live_s += passed
        if passed > 0 and self._decoding and not self._halted:
            service = passed / self._step_s()
            self._service += service
            self.tokens += service * len(self._decoding)
            self.busy_s += passed

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._halted or not self.jobs:
            return
        at = self._earliest_deadline
        if self._decoding:
            at = min(at, self._since + max(0.0, self._decoding[0][0] - self._service) * self._step_s())
        if at < math.inf:
            self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        while self._decoding and self._decoding[0][0] <= self._service + ROUNDING_TOKENS:
            *_, job = heapq.heappop(self._decoding)
            job.open -= 1
            if not job.open:
                self._end(job)
        if self._since + 1e-6 >= self._earliest_deadline:
            for job in [job for job in self.jobs if job.deadline <= self._since + 1e-6]:
                self._stop(
                    job, RolloutFailed("straggler", f"unfinished after {job.request.deadline_s:.0f} s")
                )
            self._earliest_deadline = min((job.deadline for job in self.jobs), default=math.inf)
        self._fill()
        self._set_timer()

    def _end(self, job: Job) -> None:
        del self.jobs[job]
        job.stopped = True
        self._finished(self, job)

    def _stop(self, job: Job, error: Exception) -> None:
        del self.jobs[job]
        job.stopped = True
        self._decoding = [entry for entry in self._decoding if entry[3] is not job]
        heapq.heapify(self._decoding)
        self._waiting = deque(entry for entry in self._waiting if entry[2] is not job)
        job.pending.end(error=error)

    def hand_back(self) -> None:
        """Stops all groups and keeps what they have."""
        self._advance()
        self.leaving = True
        remaining = {job: [0] * len(job.lengths) for job in self.jobs}
        for threshold, _, sample, job in self._decoding:
            remaining[job][sample] = max(1, math.ceil(threshold - self._service - ROUNDING_TOKENS))
        for tokens, sample, job in self._waiting:
            remaining[job][sample] = tokens
        for job, tokens in remaining.items():
            group_id = job.request.group_id
            if job.oldest is not None:
                assert self.version is not None
                self.handed_back[group_id] = Kept(
                    group_id=group_id,
                    lengths=job.lengths,
                    remaining=tuple(tokens),
                    oldest=job.oldest,
                    oldest_weights=job.oldest_weights,
                    newest=self.version,
                    newest_weights=self.weights,
                )
            elif job.kept is not None:
                self.handed_back[group_id] = job.kept
            self._stop(job, HandedBack(f"engine {self.replica} leaves"))
        self._set_timer()

    async def update(self, version: int, weights: str) -> None:
        scenario = self._scenario
        incarnation = self.incarnation
        await self.work(math.inf if self.stalled else max(0.0, scenario.update_s - scenario.pause_s))
        self._advance()
        self._halted = True
        self._set_timer()
        if self.bad_update:
            self.version = None  # half of it is new: it must never sample again
            self.stalled = True
            raise WeightUpdateFailed(f"engine {self.replica} took half of version {version}")
        await self.work(scenario.pause_s)
        if self.stalled:
            await self.work(math.inf)
        assert self.incarnation == incarnation
        self._advance()
        self.version, self.weights = version, weights
        self.served_since = min(self.served_since, self._since)
        self._halted = False
        unserved, self._unserved = self._unserved, []
        for job in unserved:
            self._decode(job, incarnation)
        self._set_timer()

    def stall(self) -> None:
        self._advance()
        self.stalled = self._halted = True
        self._set_timer()


class Learner:
    """The state of the virtual learner: `weights[v]` is the hash of all that led to version v."""

    def __init__(self, seed: int) -> None:
        self.weights = [digest("", f"seed {seed}")]
        self.trained: dict[int, int] = {}
        """group id -> version that it led to."""
        self.ready = False

    @property
    def version(self) -> int:
        return len(self.weights) - 1

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "trained": list(self.trained.items())}

    def load(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]
        self.trained = dict(map(tuple, state["trained"]))


def digest(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()
