"""The controllers of elastic generation, by hand and on modelled engines and runs."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)

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
