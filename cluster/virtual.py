"""Virtual time and virtual actors: the same driver, minutes of a large cluster in seconds on one core.

`VirtualLoop` is an event loop whose clock jumps to the next timer as soon as nothing else can run. `VirtualCrew` is a
`Crew` whose actors are drawn from a `Scenario`: engines that share their speed among requests, scorers, a queue and a
learner, all of which may crash, hang or fail on a seed. Its rows carry lengths and rewards instead of tokens, and the
learner's weights are a hash of everything that they were trained on, in order: equal weights mean an equal history.

It checks what no driver may do wherever it sees it, and raises `AssertionError`.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import math
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headway.actors.generation_rows import GroupRequest
from headway.cluster.crew import EngineReport, Release, Trained
from headway.cluster.queue import Receipt
from headway.core.config import Config
from headway.core.errors import (
    ActorDied,
    ClusterError,
    HandedBack,
    HeadwayError,
    Lost,
    RolloutFailed,
    StoreFull,
    WeightUpdateFailed,
)
from headway.core.metrics import Recorder, Update
from headway.core.weights import Manifest

if TYPE_CHECKING:
    from headway.learner.stats import StepStats

T = TypeVar("T")


class Deadlock(HeadwayError):
    """Nothing is scheduled, nothing can run, and the main task has not ended."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0 and moves only when nothing can run: then it is that of the next timer. Work for threads is
    done at once, in no time. Raises `Deadlock` out of `run_until_complete`."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whatever the work raised belongs to who awaits it, as with a thread
            future.set_exception(error)
        return future

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            tasks = sorted(task.get_name() + " " + _place(task) for task in asyncio.all_tasks(self))
            raise Deadlock(
                f"at virtual time {self._now:.3f} s nothing is scheduled and {len(tasks)} tasks wait:\n  "
                + "\n  ".join(tasks)
            )
        self._now += max(seconds, 0.0)


class _Jump(selectors.DefaultSelector):
    """Never sleeps and never sees input."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._jump(timeout)
        return []


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}" if frames else ""
    return f"in {getattr(task.get_coro(), '__qualname__', '?')}{where}"


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Result of `main` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


# ---- scenario ----------------------------------------------------------------------------------------------

Event = Literal[
    "generation",
    "verifiers",
    "reference",
    "critic",
    "learner",
    "queue",
    "metrics",
    "node",
    "stall",
    "bad_update",
    "store_full",
]
"""A role: one of its actors dies. `node`: a node dies with its engines. `stall`: an engine stops answering and
sampling, but lives. `bad_update`: an engine's next weight update fails half way. `store_full`: the object store takes
nothing for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that goes wrong at a stated time."""

    time_s: float
    """Since the crew was opened first."""
    event: Event
    replica: int = 0
    """Or the number of the node; no matter for `store_full`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """How fast everything is, and what goes wrong. The same scenario and configuration give the same run."""

    seed: int = 0

    length_median: float = 256.0
    """Of a log-normal distribution of response lengths, clipped to [1, sampling.max_new_tokens] (tokens)."""
    length_sigma: float = 0.8
    """Standard deviation of the logarithm; 0: all responses are equally long."""
    lengths: tuple[int, ...] = ()
    """Measured response lengths to draw from instead (tokens)."""
    straggler_share: float = 0.0
    """Share of prompts whose responses are all `straggler_factor` times as long, up to the same limit."""
    straggler_factor: float = 1.0
    prompt_tokens: int = 128
    """Of every prompt."""

    prefill_s: float = 0.05
    """From dispatch to the first decode step."""
    decode_s: float = 0.02
    """A decode step of an engine takes this long,"""
    decode_request_s: float = 0.0002
    """and this much longer for each response that it decodes."""
    engine_spread: float = 0.0
    """Standard deviation of the logarithm of an engine's slowness."""
    engine_start_s: float = 30.0
    engine_places: int | None = None
    """Engines that the cluster has room for; None: any number."""
    update_s: float = 1.0
    """A weight update of an engine,"""
    pause_s: float = 0.2
    """at whose end it stands still for this long."""
    kv_cache_tokens: int | None = None
    """Tokens that an engine's KV cache holds; None: enough."""

    score_s: float = 0.1
    """Of a group."""
    start_s: float = 2.0
    """Of any actor but an engine."""
    step_s: float = 1.0
    """An optimizer step takes this long,"""
    token_s: float = 1e-5
    """and this much longer for each response token."""
    publish_s: float = 0.5
    checkpoint_s: float = 0.0
    """For the learner to write its part."""
    ess_decay: float = 0.05
    """The ESS fraction of a step is exp(-this * mean lag of its groups)."""
    reward_mean: float = 0.5
    """Share of responses that are right,"""
    reward_slope: float = 0.0
    """and how much more for each factor of e in length over the median."""

    rates: Mapping[Event, float] = field(default_factory=dict)
    """How often an event strikes one actor (an engine, a node), per hour."""
    failures: tuple[Failure, ...] = ()
    engines_per_node: int = 8
    store_full_s: float = 20.0
    """How long the object store is full."""
    detect_s: float = 1.0
    """Until a death is reported; calls on the dead actor fail at once."""
    scaling: tuple[tuple[float, int], ...] = ()
    """Requests to run another number of engines: (time_s, replicas)."""

    def is_straggler(self, prompt_id: str) -> bool:
        """Whether the answers to this prompt are long."""
        return self.straggler_share > 0 and _random(self.seed, "prompt", prompt_id).random() < self.straggler_share

    def draw_lengths(self, group_id: int, prompt_id: str, number: int, limit: int) -> tuple[int, ...]:
        """Tokens of a group's responses: the same whenever and wherever the group is sampled."""
        chance = random.Random(self.seed * 1_000_003 + group_id)
        factor = self.straggler_factor if self.is_straggler(prompt_id) else 1.0
        if self.lengths:
            drawn = [factor * length for length in chance.choices(self.lengths, k=number)]
        elif self.length_sigma:
            median, sigma = factor * self.length_median, self.length_sigma
            drawn = [median * math.exp(chance.gauss(0.0, sigma)) for _ in range(number)]
        else:
            drawn = [factor * self.length_median] * number
        return tuple([min(limit, max(1, round(length))) for length in drawn])

    def draw_rewards(self, group_id: int, lengths: Sequence[int]) -> tuple[float, ...]:
        """0 or 1 for each response, as repeatable as the lengths."""
        chance = random.Random(self.seed * 1_000_003 + group_id + (1 << 62))
        mean, slope = self.reward_mean, self.reward_slope
        if not slope:
            return tuple([float(chance.random() < mean) for _ in lengths])
        return tuple(
            [float(chance.random() < mean + slope * math.log(n / self.length_median)) for n in lengths]
        )


def _random(*key: object) -> random.Random:
    return random.Random("/".join(map(str, key)))


# ---- rows --------------------------------------------------------------------------------------------------


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


class _Pending:
    """A group between `sample` and the queue: rows or a failure to come. Anyone may wait for it, and stop waiting."""

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
        if self.rows is None and self.error is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            await future
        if self.rows is not None:
            return self.rows
        assert self.error is not None
        raise self.error


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


class _Job:
    """A group at an engine."""

    __slots__ = ("deadline", "kept", "lengths", "oldest", "oldest_weights", "open", "pending", "request", "stopped")

    def __init__(self, request: GroupRequest, pending: _Pending, lengths: tuple[int, ...], deadline: float) -> None:
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


class _Actor:
    """One replica of a role, through all its incarnations."""

    def __init__(self, role: str, replica: int) -> None:
        self.role = role
        self.replica = replica
        self.incarnation = 0
        self.alive = False
        self.calls: dict[asyncio.Future[None], None] = {}
        self.scoring: dict[_Pending, asyncio.TimerHandle | None] = {}

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
        for pending, timer in self.scoring.items():
            if timer:
                timer.cancel()
            pending.end(error=error)
        self.scoring.clear()
        for call in self.calls:
            _settle(call)
        self.calls.clear()
        return error


ROUNDING_TOKENS = 1e-3
"""The event loop runs timers up to a nanosecond early."""


class _Engine(_Actor):
    """Decodes all its responses at the same pace: one token each per step, and a step takes `decode_s` plus
    `decode_request_s` for each of them. `service` counts the tokens that a response which was always there would
    have got; a response ends when `service` passes its threshold, so one timer serves all."""

    def __init__(self, replica: int, scenario: Scenario, slots: int, finished: Callable[[_Engine, _Job], None]) -> None:
        super().__init__("generation", replica)
        self._scenario = scenario
        self._slots = slots
        self._finished = finished
        self._slowness = math.exp(scenario.engine_spread * _random(scenario.seed, "engine", replica).gauss(0, 1))
        self.tokens = 0.0
        """Sampled, by all incarnations."""
        self.busy_s = 0.0
        """Time spent decoding,"""
        self.live_s = 0.0
        """of the time since it first served."""
        self.jobs: dict[int, _Job] = {}
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
        self._decoding: list[tuple[float, int, _Job]] = []
        self._waiting: deque[tuple[int, int, _Job]] = deque()
        self._service = 0.0
        self._since = 0.0
        self._halted = True
        self._earliest_deadline = math.inf
        self.reported_tokens = 0.0

    def born(self) -> None:
        super().born()
        self._reset()
        self.reported_tokens = self.tokens

    def die(self) -> ActorDied:
        self._advance()
        self._halted = True
        error = super().die()
        for job in self.jobs.values():
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
            for threshold, sample, job in self._decoding
        )
        return held / capacity

    def add(self, job: _Job) -> None:
        group_id = job.request.group_id
        assert group_id not in self.jobs, f"engine {self.replica} samples group {group_id} already"
        self.jobs[group_id] = job
        self._earliest_deadline = min(self._earliest_deadline, job.deadline)
        if self._scenario.prefill_s > 0:
            asyncio.get_running_loop().call_later(self._scenario.prefill_s, self._decode, job, self.incarnation)
        else:
            self._decode(job, self.incarnation)

    def _decode(self, job: _Job, incarnation: int) -> None:
        if job.stopped or not self.alive or self.incarnation != incarnation:
            return
        assert self.version is not None
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
            heapq.heappush(self._decoding, (self._service + tokens, sample, job))

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
            _, _, job = heapq.heappop(self._decoding)
            job.open -= 1
            if not job.open:
                self._end(job)
        if self._since + 1e-6 >= self._earliest_deadline:
            for job in [job for job in self.jobs.values() if job.deadline <= self._since + 1e-6]:
                self._stop(job, RolloutFailed("straggler", f"unfinished after {job.request.deadline_s:.0f} s"))
            self._earliest_deadline = min((job.deadline for job in self.jobs.values()), default=math.inf)
        self._fill()
        self._set_timer()

    def _end(self, job: _Job) -> None:
        del self.jobs[job.request.group_id]
        job.stopped = True
        self._finished(self, job)

    def _stop(self, job: _Job, error: Exception) -> None:
        del self.jobs[job.request.group_id]
        job.stopped = True
        self._decoding = [entry for entry in self._decoding if entry[2] is not job]
        heapq.heapify(self._decoding)
        self._waiting = deque(entry for entry in self._waiting if entry[2] is not job)
        job.pending.end(error=error)

    def hand_back(self) -> None:
        """Stops all groups and keeps what they have."""
        self._advance()
        self.leaving = True
        remaining: dict[int, list[int]] = {group_id: [0] * len(job.lengths) for group_id, job in self.jobs.items()}
        for threshold, sample, job in self._decoding:
            remaining[job.request.group_id][sample] = max(1, math.ceil(threshold - self._service - ROUNDING_TOKENS))
        for tokens, sample, job in self._waiting:
            remaining[job.request.group_id][sample] = tokens
        for group_id, job in list(self.jobs.items()):
            if job.oldest is not None:
                assert self.version is not None
                self.handed_back[group_id] = Kept(
                    group_id=group_id,
                    lengths=job.lengths,
                    remaining=tuple(remaining[group_id]),
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
        self._halted = False
        self._set_timer()

    def stall(self) -> None:
        self._advance()
        self.stalled = self._halted = True
        self._set_timer()


class _Learner:
    """The state of the virtual learner: `weights[v]` is the hash of all that led to version v."""

    def __init__(self, seed: int) -> None:
        self.weights = [_hash("", f"seed {seed}")]
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


def _hash(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()
