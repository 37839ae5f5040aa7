"""The controllers of elastic generation, by hand and on modelled engines and runs."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.crew import Fleet, Shortage
from headway.cluster.elastic import (
    COOLDOWN,
    HOLD,
    IMPATIENCE,
    MEMORY,
    PATIENCE,
    WINDOW,
    Autoscaler,
    Backlog,
    Concurrency,
    fitting,
    freed,
    in_the_way,
)
from headway.cluster.scenario import Failure, Scenario
from headway.cluster.session import Session
from headway.cluster.simulate import Silent, virtual_run
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, parse_config
from headway.core.errors import UserError

# ---- groups in flight on one engine -----------------------------------------------------------------------


def test_a_limit_falls_by_three_tenths_and_rises_by_one() -> None:
    engine = Concurrency(10)
    assert engine.limit == 10
    assert engine.observe(0.5, preemptions=0, running=10) == 10  # the cap
    assert engine.observe(1.0, preemptions=3, running=10) == 7
    assert engine.observe(1.0, preemptions=9, running=9) == 7  # still the old limit's doing
    for _ in range(HOLD):
        assert engine.observe(1.0, preemptions=12, running=7) == 7
    assert engine.observe(0.9, preemptions=12, running=7) == 8
    assert engine.observe(0.98, preemptions=12, running=8) == 8  # full: neither more nor fewer
    assert engine.observe(0.9, preemptions=12, running=7) == 8  # not the limit that binds
    assert engine.observe(0.97, preemptions=12, running=8) == 9
    assert engine.observe(0.9, preemptions=13, running=9) == 6  # round(6.3)


def test_a_new_engine_counts_from_zero() -> None:
    engine = Concurrency(10)
    assert engine.observe(1.0, preemptions=50, running=10) == 7
    for _ in range(HOLD):
        engine.observe(0.9, preemptions=50, running=7)
    assert engine.observe(0.1, preemptions=0, running=7) == 8  # nothing pushed out
    assert engine.observe(1.0, preemptions=4, running=8) == 6
    for _ in range(HOLD):
        engine.observe(0.9, preemptions=60, running=6)
    assert engine.observe(0.9, preemptions=2, running=6) == 4  # both of the new one's are new


def test_the_limit_falls_from_what_ran_not_from_what_might_have() -> None:
    engine = Concurrency(64)
    engine.observe(0.9, preemptions=0, running=20)
    assert engine.observe(0.2, preemptions=5, running=2) == 14  # 20 ran at the last look
    idle = Concurrency(10)
    assert idle.observe(0.0, preemptions=1, running=0) == 7  # nothing known of the burst: from the limit


def test_one_group_is_the_least() -> None:
    engine = Concurrency(2)
    for total in range(1, 40):
        assert engine.observe(1.0, preemptions=total, running=engine.limit) == 1
    with pytest.raises(ValueError, match="at least one group, not 0"):
        Concurrency(0)


@given(
    cap=st.integers(1, 64),
    seen=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9), st.integers(0, 80)), max_size=60),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_the_limit_stays_between_one_and_the_cap_and_moves_by_the_rule(
    cap: int, seen: list[tuple[float, int, int]]
) -> None:
    engine = Concurrency(cap)
    since_cut = HOLD
    for usage, preemptions, running in seen:
        before = engine.limit
        after = engine.observe(usage, preemptions, running)
        assert 1 <= after <= cap and after <= before + 1 and after == engine.limit
        since_cut += 1
        if after < before:
            assert since_cut > HOLD
            since_cut = 0


@given(
    room=st.integers(1, 40),
    cap_beyond=st.integers(1, 60),
    longest=st.integers(1, 10),
    usage_shows=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_the_limit_finds_the_room_of_an_engine(
    room: int, cap_beyond: int, longest: int, usage_shows: bool, seed: int
) -> None:
    """An engine with KV room for `room` groups, always offered more, pushes out a request per group beyond in every
    interval. After 250 observations the limit stays in [0.7 room, room + 1]: at most 14 cuts lead from 100 to 1, each
    followed by `longest` intervals in which groups end and HOLD + 1 more. Where the cache's usage shows how full it
    is, no request is pushed out any more."""
    rng = random.Random(seed)
    engine = Concurrency(room + cap_beyond)
    ends: list[int] = []
    preemptions, settled = 0, 0
    for now in range(600):
        ends = [end for end in ends if end > now]
        ends += [now + rng.randint(1, longest) for _ in range(engine.limit - len(ends))]
        preemptions += max(0, len(ends) - room)
        usage = min(1.0, len(ends) / room) if usage_shows else 0.5
        engine.observe(usage, preemptions, len(ends))
        if now == 250:
            settled = preemptions
        if now >= 250:
            assert 0.7 * room <= engine.limit <= room + 1
    assert preemptions == settled if usage_shows else preemptions > settled


# ---- engines of a run -------------------------------------------------------------------------------------


class ModelledRun:
    """A learner that eats `batch` groups in `train_s`, and engines with `slots` places, a group takes one for
    `latency_s`; dispatch starts groups while fewer than (max_version_lag + version + 1) * batch ever were."""

    def __init__(
        self,
        *,
        engines: int,
        slots: int,
        latency_s: float,
        batch: int,
        max_version_lag: int,
        train_s: float = 1.0,
        jitter: float = 0.0,
    ) -> None:
        self.engines, self.slots, self.latency_s = engines, slots, latency_s
        self.batch, self.max_version_lag, self.train_s = batch, max_version_lag, train_s
        self.rng, self.jitter = random.Random(0), jitter
        self.now, self.version, self.admitted, self.finished, self.blocked_s = 0.0, 0, 0, 0, 0.0
        self.ends: list[float] = []

    def step(self) -> tuple[float, float, float]:
        """Waited, total and blocked seconds."""
        began, self.blocked_s = self.now, 0.0
        self._go(lambda: self.finished >= self.batch, math.inf)
        waited_s = self.now - began
        self.finished -= self.batch
        self._go(lambda: False, self.now + self.train_s)
        self.version += 1
        return waited_s, self.now - began, self.blocked_s

    def _go(self, done: Callable[[], bool], until: float) -> None:
        while not done() and self.now < until:
            bound = (self.max_version_lag + self.version + 1) * self.batch
            while self.admitted < bound and len(self.ends) < self.engines * self.slots:
                self.admitted += 1
                latency_s = self.latency_s * self.rng.uniform(1 - self.jitter, 1 + self.jitter)
                heapq.heappush(self.ends, self.now + latency_s)
            then = min(until, self.ends[0] if self.ends else math.inf)
            self.blocked_s += then - self.now if self.admitted == bound else 0.0
            self.now = then
            while self.ends and self.ends[0] <= then + 1e-9:
                heapq.heappop(self.ends)
                self.finished += 1


def _control(run: ModelledRun, scaler: Autoscaler, steps: int) -> list[int]:
    targets = []
    for _ in range(steps):
        waited_s, total_s, blocked_s = run.step()
        run.engines = scaler.step(waited_s=waited_s, total_s=total_s, blocked_s=blocked_s, target=run.engines)
        targets.append(run.engines)
    return targets


def _changes(targets: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(targets) if after != before]


SETTLED = 15 * (COOLDOWN + WINDOW) + 50
"""Steps after which 15 changes, from 1 to 16, are over."""


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("max_version_lag", [2, 4])
@pytest.mark.parametrize(("slots", "batch"), [(1, 8), (1, 32), (2, 16), (4, 32), (8, 64)])
@pytest.mark.parametrize("need", [0.4, 1.4, 1.8, 2.7, 3.4, 4.5, 6.6, 9.4])
def test_it_ends_at_the_smallest_number_that_keeps_the_learner_busy(
    need: float, slots: int, batch: int, max_version_lag: int, jitter: float
) -> None:
    """`need` engines make as many groups as the learner eats (no whole number): n of them let it wait for 1 - n / need
    of the time. A group takes at most 1.2 steps (1.8 with jitter), within the bound."""
    for start in (1, 16):
        run = ModelledRun(
            engines=start,
            slots=slots,
            latency_s=need * slots / batch,  # an engine makes slots / latency_s groups/s
            batch=batch,
            max_version_lag=max_version_lag,
            jitter=jitter,
        )
        targets = _control(run, Autoscaler(1, 16), SETTLED + 300)
        assert math.ceil(0.8 * need) <= targets[-1] <= math.ceil(need)
        if start == 1 and not jitter:  # noise may win one more
            assert math.ceil(0.8 * need) == targets[-1]
        changes = _changes(targets[SETTLED:])
        assert changes.count(1) <= 1 and changes.count(-1) <= 1


def test_at_lag_zero_it_adds_engines_while_groups_wait_for_places_and_then_rests() -> None:
    """8 groups a step, one place per engine: until half of the wait is the last wave, so up to 4 engines (two waves).
    With 8 places on an engine all start at once: the learner waits for 0.75 of the time, and no engine would help."""
    for slots, engines in [(1, 4), (8, 1)]:
        run = ModelledRun(engines=1, slots=slots, latency_s=3.0, batch=8, max_version_lag=0)
        targets = _control(run, Autoscaler(1, 16), SETTLED + 300)
        assert set(targets[SETTLED:]) == {engines}
    waited_s, total_s, blocked_s = run.step()
    assert (waited_s, total_s, blocked_s) == pytest.approx((3, 4, 4))
    run = ModelledRun(engines=16, slots=1, latency_s=3.0, batch=8, max_version_lag=0)
    assert set(_control(run, Autoscaler(1, 16), 300)) == {16}  # nor is any given back: it waits already


@pytest.mark.parametrize("max_version_lag", [1, 2, 4])
def test_no_more_engines_than_the_bound_has_groups_for(max_version_lag: int) -> None:
    """A group takes 20 steps' time: under the bound the learner waits however many engines there are, and beyond
    places for all groups that the bound admits none is added."""
    run = ModelledRun(engines=1, slots=8, latency_s=20.0, batch=8, max_version_lag=max_version_lag)
    targets = _control(run, Autoscaler(1, 16), SETTLED + 300)
    assert targets[-1] <= max_version_lag + 1 and _changes(targets[SETTLED:]) == []


def test_it_follows_a_load_that_changes() -> None:
    """Answers become three times as long, and later as short as before: 2, 6, and 2 or 3 engines."""
    run = ModelledRun(engines=1, slots=4, latency_s=0.3, batch=32, max_version_lag=4)
    run.train_s = 0.3 * 32 / 4 / 2.3  # 2.3 engines are needed
    scaler = Autoscaler(1, 16)
    assert _control(run, scaler, 100)[-1] == 2
    run.latency_s *= 3
    assert _control(run, scaler, 100)[-1] == 6  # 0.8 * 6.9 = 5.52
    run.latency_s /= 3
    assert _control(run, scaler, MEMORY + 100)[-1] in (2, 3)


def _step(scaler: Autoscaler, target: int, waited: float, blocked: float) -> int:
    return scaler.step(waited_s=10 * waited, total_s=10.0, blocked_s=10 * blocked, target=target)


def test_a_change_is_waited_for() -> None:
    """One decision per COOLDOWN + WINDOW steps, also after a change by hand."""
    scaler, patience = Autoscaler(1, 9), COOLDOWN + WINDOW
    assert patience == 10
    assert [_step(scaler, 2, 0.5, 0.0) for _ in range(10)] == [2] * 9 + [3]
    assert [_step(scaler, 3, 0.5, 0.0) for _ in range(10)] == [3] * 9 + [4]
    assert [_step(scaler, 4, 0.5, 0.0) for _ in range(7)] == [4] * 7
    assert [_step(scaler, 7, 0.0, 1.0) for _ in range(10)] == [7] * 9 + [6]  # scaled by hand meanwhile


def test_the_cooldown_is_not_counted() -> None:
    scaler = Autoscaler(1, 9)
    assert [_step(scaler, 2, 1.0, 0.0) for _ in range(COOLDOWN)] == [2] * 5
    assert [_step(scaler, 2, 0.1, 0.0) for _ in range(20)] == [2] * 20


@pytest.mark.parametrize(
    ("waited", "blocked", "wanted"),
    [
        (0.21, 0.0, 5),
        (0.19, 0.0, 4),
        (0.5, 0.7, 5),  # blocked 0.2 of the 0.5
        (0.5, 0.8, 4),  # 0.3 of the 0.5: the bound is short
        (0.01, 0.26, 3),  # of 4, one idles
        (0.01, 0.24, 4),
        (0.03, 1.0, 4),
        (0.0, 0.0, 4),
    ],
)
def test_thresholds(waited: float, blocked: float, wanted: int) -> None:
    scaler = Autoscaler(1, 9)
    assert [_step(scaler, 4, waited, blocked) for _ in range(10)][-1] == wanted


def test_a_number_that_starved_the_learner_is_remembered_for_a_while() -> None:
    scaler = Autoscaler(1, 9)
    assert [_step(scaler, 1, 0.3, 0.0) for _ in range(10)][-1] == 2
    answers = [_step(scaler, 2, 0.0, 1.0) for _ in range(MEMORY)]
    assert answers == [2] * (MEMORY - 1) + [1]


def test_limits_hold() -> None:
    scaler = Autoscaler(2, 4)
    assert scaler.step(waited_s=0, total_s=1, blocked_s=0, target=1) == 2
    assert scaler.step(waited_s=0, total_s=1, blocked_s=0, target=9) == 4
    assert {_step(scaler, 4, 0.9, 0.0) for _ in range(30)} == {4}
    assert {_step(scaler, 2, 0.0, 1.0) for _ in range(30)} == {2}
    assert {scaler.step(waited_s=0, total_s=0, blocked_s=0, target=3) for _ in range(30)} == {3}
    for lowest, highest in [(0, 1), (3, 2)]:
        with pytest.raises(ValueError, match="no range"):
            Autoscaler(lowest, highest)


def test_scorers_follow_their_backlog() -> None:
    """Replicas of 2 places each: more than 4 groups per replica are too many, 1 per replica but one are few."""
    rule, replicas, seen = Backlog(1, 3, places=2), 1, []
    for groups in [4] * 10 + [5] * IMPATIENCE + [8] * 10 + [9] * IMPATIENCE + [100] * 10:
        replicas = rule.observe(groups, replicas)
        seen.append(replicas)
    assert seen == [1] * 12 + [2] * 13 + [3] * 11
    for _ in range(PATIENCE - 1):
        assert rule.observe(2, 3) == 3
    assert rule.observe(3, 3) == 3  # not sparse for once: it begins to count again
    assert [rule.observe(2, 3) for _ in range(PATIENCE)] == [3] * (PATIENCE - 1) + [2]
    assert [rule.observe(0, 1) for _ in range(2 * PATIENCE)] == [1] * (2 * PATIENCE)
    assert (rule.observe(0, 9), Backlog(2, 3, places=2).observe(0, 1)) == (3, 2)
    with pytest.raises(ValueError, match="from 3 to 2 replicas"):
        Backlog(3, 2, places=1)


# ---- engines of another size ------------------------------------------------------------------------------


def test_what_fits_on_a_node_and_what_does_not() -> None:
    assert fitting({"CPU": 1, "GPU": 2}, {"a": {"CPU": 8, "GPU": 5}, "b": {"CPU": 1, "GPU": 8}, "c": {}}) == 3
    assert fitting({"GPU": 4}, {"a": {"GPU": 3}, "b": {"GPU": 3}}) == 0
    assert fitting({"GPU": 0.4}, {"a": {"GPU": 2}}) == 4  # two on each, not five
    assert fitting({"GPU": 0.1}, {"a": {"GPU": 0.3}}) == 3
    assert fitting({"CPU": 0.5}, {"a": {"CPU": 2, "GPU": 1}}) == 4
    assert freed({"a": {"GPU": 1}, "b": {}}, {0: ("b", {"GPU": 2}), 1: ("b", {"GPU": 1})}) == {
        "a": {"GPU": 1},
        "b": {"GPU": 3},
    }


def test_as_few_engines_as_possible_make_room() -> None:
    one, four = {"GPU": 1.0}, {"GPU": 4.0}
    free = {"a": {"GPU": 1.0}, "b": {"GPU": 2.0}}
    held = {0: ("a", one), 1: ("a", one), 2: ("b", one), 3: ("b", one), 4: ("a", one)}
    assert in_the_way({"GPU": 2}, free, held, (), [4, 3, 2, 1, 0]) == []
    assert in_the_way(four, free, held, (), [4, 3, 2, 1, 0]) == [3, 2]  # on a it takes three
    assert in_the_way(four, free, held, (4, 1), [3, 2, 0]) == [0]
    assert in_the_way(four, free, held, (4, 1, 0), [3, 2]) == []
    assert in_the_way({"GPU": 5}, free, held, (), [4, 3, 2, 1, 0]) is None
    assert in_the_way(four, free, held, (), [3]) is None  # the others are not to leave


@given(
    free=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    engines=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.5, 1.0, 2.0])), max_size=5),
    gpus=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    gone=st.sets(st.integers(0, 4)),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_those_in_the_way_make_room_and_fewer_would_not_on_any_single_node(
    free: list[int], engines: list[tuple[int, float]], gpus: float, gone: set[int]
) -> None:
    """Engines of one size, as those that are replaced are: of them no smaller set does."""
    size = engines[0][1] if engines else 1.0
    held = {n: (str(node % len(free)), {"GPU": size}) for n, (node, _) in enumerate(engines)}
    nodes = {str(node): {"GPU": float(gpus)} for node, gpus in enumerate(free)}
    others = [n for n in held if n not in gone]

    def fits(leaving: set[int]) -> bool:
        return fitting({"GPU": gpus}, freed(nodes, {n: held[n] for n in leaving if n in held})) > 0

    found = in_the_way({"GPU": gpus}, nodes, held, gone, others)
    sizes = [
        n for n in range(len(others) + 1) if any(fits(gone | set(some)) for some in combinations(others, n))
    ]
    assert (len(found) if found is not None else None) == (sizes[0] if sizes else None)
    assert found is None or fits(gone | set(found))


class Scaled(VirtualCrew):
    """Its run is asked for other engines at these times: (seconds, engines, GPUs of each)."""

    def __init__(
        self,
        config: Config,
        nodes: Sequence[float],
        asked: Sequence[tuple[float, int, float]],
        *deaths: Failure,
    ) -> None:
        # A step takes 4 s, a group 11 s, and an engine 20 s to start.
        scenario = Scenario(
            length_median=500, length_sigma=0, engine_start_s=20, step_s=4, start_s=1, failures=deaths
        )
        super().__init__(config, scenario, gpus_of_nodes=nodes)
        self.asked = list(asked)

    async def next_request(self) -> tuple[int, str, Any]:
        at = self.asked[0][0] if self.asked else 1e9
        await self._one("control").work(max(0.0, at - asyncio.get_running_loop().time()))
        _, replicas, gpus = self.asked.pop(0)
        return len(self.asked), "scale", ("generation", replicas, gpus)

    @property
    def gpus(self) -> list[float]:
        """Of each engine."""
        return sorted(own["GPU"] for _, own in self.places.values())


def configuration(folder: Path, engines: int, gpus: float, drain_s: float = 30) -> Config:
    return parse_config(
        {
            "run": {
                "name": "r",
                "folder": str(folder),
                "steps": 60,
                "checkpoint_every": 5,
                "save_rollouts": False,
            },
            "sampling": {"group_size": 2, "max_new_tokens": 500},
            "algorithm": {"dynamic_sampling": False},
            "learner": {"groups_per_step": 4},
            "lag": {"max_version_lag": 4},
            "generation": {
                "replicas": engines,
                "gpus": gpus,
                "max_concurrent_requests": 8,
                "drain_s": drain_s,
            },
        }
    )


class Listener(Silent):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Second by second while the session is up: engines that serve, and GPUs of each engine."""

    serving: list[int]
    gpus: list[list[float]]
    said: list[str]
    session: Session


def executed(crew: Scaled, *, first_s: float = 55) -> Seen:
    """The whole run, and what was seen of it from `first_s` on."""
    listener = Listener(crew.config)
    run = virtual_run(crew.config, crew, progress=listener)
    serving: list[int] = []
    gpus: list[list[float]] = []

    async def main() -> None:
        running = asyncio.ensure_future(run.execute())
        await asyncio.sleep(first_s)
        while not running.done():
            if run.session and run.session.is_up and crew.places:
                serving.append(run.session.engines.serving)
                gpus.append(crew.gpus)
            await asyncio.sleep(1)
        await running

    run_virtual(main())
    assert run.session is not None
    # Whatever happened, every group was trained (and once, to which the crew sees), and none was sampled in vain.
    assert run.version == 60 and sorted(crew.trained) == list(range(240))
    assert run.session.groups.ledger.dropped.total() == 0
    return Seen(serving=serving, gpus=gpus, said=listener.said, session=run.session)


@pytest.mark.parametrize(
    ("nodes", "before", "after", "fewest"),
    [
        ([8], (2, 1), (2, 2), 2),  # room beside them: the new one first
        ([4], (2, 1), (2, 2), 1),
        ([2, 2], (4, 1), (2, 2), 1),
        ([2], (2, 1), (4, 0.5), 1),
        ([4], (1, 4), (4, 1), 0),  # its only GPUs
        ([2], (2, 1), (1, 2), 0),
        ([2, 4], (2, 1), (1, 4), 1),
    ],
)
def test_engines_of_another_size_replace_those_that_there_are_one_after_another(
    nodes: list[float],
    before: tuple[int, float],
    after: tuple[int, float],
    fewest: int,
    tmp_path: Path,
) -> None:
    crew = Scaled(configuration(tmp_path, *before), nodes, [(60, *after)])
    seen = executed(crew)
    (answer,) = [value for _, value in crew.answers]
    assert (answer["before"], answer["target"], answer["gpus"]) == (before[0], *after)
    assert seen.gpus[0] == [before[1]] * before[0] and seen.gpus[-1] == [after[1]] * after[0]
    assert max(map(sum, seen.gpus)) <= sum(nodes)
    assert seen.serving[0] == before[0] and seen.serving[-1] == after[0]
    assert min(seen.serving) == fewest
    assert seen.session.totals.value("headway_actor_restarts_total", "generation") == 0
    assert seen.session.totals.value("headway_groups_handed_back_total") == 0  # all could be finished
    # From one size to the other in one way: those that were added never leave again.
    new = [sum(gpus == after[1] for gpus in engines) for engines in seen.gpus]
    assert new == sorted(new)


def test_what_leaving_engines_do_not_finish_goes_on_elsewhere(tmp_path: Path) -> None:
    crew = Scaled(configuration(tmp_path, 2, 1, drain_s=0), [2], [(60, 1, 2)])
    seen = executed(crew)
    assert 0 < seen.serving.count(0) < 25  # an engine's start
    assert seen.session.totals.value("headway_groups_handed_back_total") > 0


def test_an_engine_that_dies_meanwhile_comes_back_as_wanted(tmp_path: Path) -> None:
    """Engine 0 dies while the first new one starts: it has no room before engine 1 leaves, which serves alone, and
    stays until the new one does."""
    death = Failure(time_s=65, event="generation", replica=0)
    crew = Scaled(configuration(tmp_path, 2, 1), [4], [(60, 2, 2)], death)
    seen = executed(crew)
    assert min(seen.serving) == 1 and seen.gpus[-1] == [2, 2]
    assert seen.session.totals.value("headway_actor_restarts_total", "generation") == 1
    assert "engine 0 waits for room" in seen.said
    # Later, too.
    death = Failure(time_s=200, event="generation", replica=2)
    crew = Scaled(configuration(tmp_path / "later", 2, 1), [4], [(60, 2, 2)], death)
    assert executed(crew).gpus[-1] == [2, 2]


def test_who_thinks_better_of_it_has_what_there_was(tmp_path: Path) -> None:
    """Back to engines of 1 GPU, and one more, while the first one with 2 starts: that one is not waited for."""
    crew = Scaled(configuration(tmp_path, 2, 1), [4], [(60, 2, 2), (70, 3, 1)])
    seen = executed(crew)
    assert min(seen.serving) == 2 and seen.gpus[-1] == [1, 1, 1]
    assert seen.serving.index(3) <= 70 + 1 + 20 + 2 - 55
    assert seen.said.count("engine 2 has left") == 1


def test_an_engine_that_waits_for_room_leaves_at_once(tmp_path: Path) -> None:
    crew = Scaled(configuration(tmp_path, 2, 1), [2], [(60, 3, 1), (75, 2, 1)])
    seen = executed(crew)
    waiting, left = seen.said.index("engine 2 waits for room"), seen.said.index("engine 2 has left")
    assert waiting < left and not any("did not start" in text for text in seen.said)
    assert set(seen.serving) == {2}


def test_what_the_cluster_could_never_hold_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    asked = [(60, 1, 3), (61, 2, 2), (62, 5, 1), (200, 1, 2)]
    crew = Scaled(configuration(tmp_path, 2, 1), [2, 1], asked)
    seen = executed(crew)
    answers = [value for _, value in crew.answers]
    assert [str(answer) for answer in answers[:2]] == [
        "the nodes have room for 0 x 3 GPU",
        "the nodes have room for 1 x 2 GPU",
    ]
    assert isinstance(answers[0], UserError)
    # More of the present size than there is room for: as many as fit.
    assert (answers[2]["target"], answers[3]["target"]) == (5, 1)
    assert seen.gpus[140] == [1, 1, 1] and seen.gpus[-1] == [2]


def test_a_run_that_goes_on_from_its_checkpoint_keeps_its_engines(tmp_path: Path) -> None:
    """Their size from the start on, and those that were added beyond the configured number once the others work."""
    death = Failure(time_s=200, event="learner")
    crew = Scaled(configuration(tmp_path, 2, 1), [8], [(60, 3, 2)], death)
    seen = executed(crew)
    assert any("restart 1 of 3" in text for text in seen.said)
    again = seen.said[seen.said.index("starting engines and learner", 5) :]
    assert "engine 2 joins (3 wanted, with 2 GPU each)" in again
    assert not any("leaves" in text for text in again)
    assert seen.gpus[-1] == [2, 2, 2] and seen.session.engines.gpus == 2


class Verified(Scaled):
    """Its verifiers are scaled to three, once."""

    verifiers = 1

    @property
    def elastic(self) -> tuple[str, ...]:
        return ("verifiers",)

    @property
    def replicas(self) -> dict[str, int]:
        return {**super().replicas, "verifiers": self.verifiers}

    async def open(self, fleet: Fleet | None = None) -> None:
        self.verifiers = 1  # as configured
        await super().open(fleet)

    async def resize(self, role: str, replicas: int) -> None:
        self.verifiers = replicas

    async def next_request(self) -> tuple[int, str, Any]:
        ticket, kind, _ = await super().next_request()
        return ticket, kind, ("verifiers", 3, None)


def test_a_run_that_goes_on_from_its_checkpoint_keeps_its_scorers(tmp_path: Path) -> None:
    deaths = [Failure(time_s=time_s, event="learner") for time_s in (200, 300)]
    crew = Verified(configuration(tmp_path, 2, 0), [], [(60, 2, 0)], *deaths)
    seen = executed(crew)
    assert any("restart 2 of 3" in text for text in seen.said)
    assert seen.said.count("verifiers: 1 -> 3") == 3 and crew.verifiers == 3


class Growing(Scaled):
    """With an autoscaler, which brings a node at this time, or none."""

    node_at_s = math.inf

    async def place_engine(self, replica: int, gpus: float) -> Shortage | None:
        shortage = await super().place_engine(replica, gpus)
        asyncio.get_running_loop().call_at(self.node_at_s, self._gpus_of_nodes.setdefault, "new", 4)
        return shortage and replace(shortage, may_grow=True)

    async def check_fleet(self, fleet: Fleet) -> None:
        """Whatever is asked for may come."""


def test_an_autoscaler_is_given_its_time_before_sampling_stops(tmp_path: Path) -> None:
    """2 engines have all GPUs; those of twice the size need a node. When it comes they go on there, and where none
    comes in a minute (`cluster.placement_deadline_s`) one replaces both."""
    crew = Growing(configuration(tmp_path / "comes", 2, 1), [2], [(60, 2, 2)])
    crew.node_at_s = 90
    seen = executed(crew)
    assert min(seen.serving) == 2 and seen.gpus[-1] == [2, 2]
    assert 90 - 55 <= seen.gpus.index([1, 1, 2]) <= 92 - 55

    crew = Growing(configuration(tmp_path / "does not", 2, 1), [2], [(60, 2, 2)])
    seen = executed(crew)
    assert seen.serving[: 120 - 55] == [2] * (120 - 55) and seen.gpus[-1] == [2]
    assert any("engine 2 did not start (attempt 1)" in text for text in seen.said)
