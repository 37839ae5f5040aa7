"""Admission and batch selection, as arithmetic, against their plain specification, and as properties over random
schedules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.gate import WAITS_SHOWN, Backlog, Cut, Gate, Policy

POLICIES: tuple[Policy, ...] = ("pace", "drop", "withhold", "downweight")


def gate(**over: int) -> Gate:
    limits = {"groups_per_step": 4, "bound": 2, "total_groups": 10_000}
    return Gate(**{**limits, **over})


def test_a_fresh_gate_admits_bound_plus_one_batches() -> None:
    assert gate().capacity(version=0) == 12  # (2 + 0 + 1) * 4
    assert gate(bound=0).capacity(version=0) == 4


@pytest.mark.parametrize("version", [0, 1, 10, 1000])
def test_a_resumed_gate_admits_no_more_than_a_fresh_one(version: int) -> None:
    # With counters at 0 a gate resumed at version 10 would admit (2 + 10 + 1) * 4 = 52.
    limits = {"groups_per_step": 4, "bound": 2, "total_groups": 10_000}
    assert Gate.resume(version=version, queued=0, **limits).capacity(version) == 12
    assert Gate.resume(version=version, queued=5, **limits).capacity(version) == 7


def test_capacity_is_also_bounded_by_the_end_of_the_run() -> None:
    assert gate(total_groups=5).capacity(version=0) == 5


def test_a_rejected_group_gives_its_place_back_and_a_finished_one_keeps_it() -> None:
    g = gate(bound=0)
    for _ in range(4):
        g.start()
    assert g.capacity(0) == 0
    g.reject()
    assert g.capacity(0) == 1
    g.finish()
    assert g.capacity(0) == 1
    g.reject(finished=True)
    assert g.capacity(0) == 2


def test_a_producer_that_fails_for_good_leaves_room_for_its_replacement() -> None:
    # The learner needs 4; the fourth group is lost. Its place is free, so a fifth can make up for it.
    g = gate(bound=0)
    for _ in range(4):
        g.start()
    for _ in range(3):
        g.finish()
    g.reject()
    assert (g.running, g.accepted, g.capacity(0)) == (0, 3, 1)


def test_an_engine_that_lags_behind_has_less_room_than_the_newest() -> None:
    g = gate()
    for _ in range(12):
        g.start()
    assert g.capacity(version=0) == 0
    assert g.capacity(version=1) == 4


def test_a_lower_effective_bound_waits_for_what_was_admitted_before() -> None:
    g = gate()
    for _ in range(12):
        g.start()
    g.bound = 1
    assert [g.capacity(version) for version in (0, 1, 2)] == [-4, 0, 4]


@dataclass(frozen=True, kw_only=True)
class Limits:
    policy: Policy = "pace"
    per_step: int = 2
    steps: int = 1
    bound: int = 2
    trained: int = 0
    """`max_trained_lag`; 0: the bound."""

    @property
    def max_trained_lag(self) -> int:
        return self.trained or self.bound


def backlog_of(limits: Limits) -> Backlog:
    return Backlog(
        groups_per_step=limits.per_step,
        steps_per_batch=limits.steps,
        max_version_lag=limits.bound,
        max_trained_lag=limits.max_trained_lag,
        policy=limits.policy,
    )


def cut(
    finished: dict[int, int | tuple[int, int]], running: dict[int, int], version: int, **limits: Any
) -> Cut:
    """`finished`: group id -> its version, or oldest and newest; `running`: group id -> version at dispatch."""
    backlog = backlog_of(Limits(**limits))
    for group_id, since in running.items():
        backlog.start(group_id, since)
    for group_id, versions in finished.items():
        oldest, newest = versions if isinstance(versions, tuple) else (versions, versions)
        backlog.start(group_id, oldest)
        backlog.finish(group_id, oldest, newest)
    return backlog.cut(version)


def test_oldest_version_first() -> None:
    assert cut({7: 3, 5: 2, 6: 3}, {}, version=3).take == (5, 6)


def test_data_of_the_window_is_used_not_only_that_of_the_newest_version() -> None:
    # Needing exactly version 7 would wait forever with four groups of version 6 in the queue.
    assert cut({1: 6, 2: 6, 3: 6, 4: 6}, {}, version=7, bound=1).take == (1, 2)


def test_a_straggler_that_the_next_step_could_not_take_is_waited_for() -> None:
    assert cut({5: 3, 6: 3}, {1: 1}, version=3) == Cut(waits_for=(1,))  # at version 4 its lag would be 3
    assert cut({5: 3, 6: 3}, {1: 2}, version=3).take == (5, 6)  # at version 4 its lag is 2, within the bound


@pytest.mark.parametrize("policy", ["drop", "withhold", "downweight"])
def test_only_pace_waits_for_a_straggler(policy: Policy) -> None:
    assert cut({5: 3, 6: 3}, {1: 1}, version=3, policy=policy).take == (5, 6)


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_lag_of_exactly_the_bound_is_trained_and_one_more_is_stale(policy: Policy) -> None:
    # A rollout starts at version 5, the learner goes to 6 and 7: its lag is 2, whatever version its last token has.
    assert cut({1: (5, 7), 2: 7}, {}, version=7, bound=2, policy=policy).take == (1, 2)
    assert cut({1: (5, 7), 2: 7}, {}, version=7, bound=1, policy=policy) == Cut(stale=(1,))
    assert cut({1: (6, 7), 2: 7}, {}, version=7, bound=0, policy=policy) == Cut(stale=(1,))


def test_lag_counts_the_time_in_the_queue() -> None:
    # Finished at lag 0, then three updates pass: the check is at consumption.
    assert cut({1: 4, 2: 4}, {}, version=7, bound=3, policy="drop").take == (1, 2)
    assert cut({1: 4, 2: 4}, {}, version=7, bound=2, policy="drop") == Cut(stale=(1, 2))


def test_what_is_dropped_for_its_age_is_made_up_for_by_the_next() -> None:
    found = cut({1: 1, 2: 5, 3: 6, 4: 6}, {9: 1}, version=6, policy="drop")
    assert found == Cut(take=(2, 3), stale=(1,))


def test_withheld_tokens_do_not_make_a_group_stale_as_long_as_its_newest_is_in_time() -> None:
    groups: dict[int, int | tuple[int, int]] = {1: (0, 5), 2: (0, 3), 3: (6, 7)}
    assert cut(groups, {}, version=7, policy="drop") == Cut(stale=(1, 2))
    assert cut(groups, {}, version=7, policy="withhold") == Cut(take=(1, 3), stale=(2,))
    # Down to lag 4 tokens count less, but they count.
    assert cut(groups, {}, version=7, policy="downweight", trained=4) == Cut(take=(2, 1))


def test_the_longest_answers_are_first_so_that_least_of_them_is_withheld() -> None:
    assert cut({1: 7, 2: 7, 3: (4, 7)}, {}, version=7, policy="withhold").take == (3, 1)


def test_too_many_groups_of_one_age_are_not_left_for_one_step() -> None:
    """Three groups of version 2 run while younger ones have finished. Version 6 is the last that may train them and
    has room for two: with bound 4 the learner at 5 must wait although none of them is over the bound yet."""
    assert cut({14: 4, 16: 4}, {9: 2, 11: 2, 12: 2}, version=5, bound=4) == Cut(waits_for=(9, 11, 12))
    assert cut({14: 4, 16: 4}, {9: 2, 11: 2}, version=5, bound=4).take == (14, 16)
    assert cut({12: 2, 14: 4, 16: 4}, {9: 2, 11: 2}, version=5, bound=4).take == (12, 14)


def test_finished_groups_that_a_batch_leaves_need_room_as_well() -> None:
    # At version 4 the groups of version 3 have two steps left, room for four: two wait already, three are on their way.
    finished = {1: 3, 2: 3, 3: 3, 4: 3}
    assert cut({**finished}, {7: 3, 8: 3, 9: 3}, version=3) == Cut(waits_for=(7, 8, 9))
    assert cut({**finished}, {7: 3, 8: 3}, version=3).take == (1, 2)


def test_after_a_batch_of_two_steps_the_learner_is_two_versions_on() -> None:
    # Of two groups of version 5, version 7 is the last that may train them, and it trains one.
    assert cut({1: 5, 2: 5}, {8: 5, 9: 5}, version=5, per_step=1, steps=2) == Cut(waits_for=(8, 9))
    assert cut({1: 5, 2: 5}, {8: 5}, version=5, per_step=1, steps=2).take == (1, 2)


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_later_steps_of_a_batch_hold_the_bound_too(policy: Policy) -> None:
    # Two steps on one batch: the second pair is trained at version 8.
    limits = {"steps": 2, "policy": policy}
    assert cut({1: 7, 2: 7, 3: 7, 4: 7}, {}, version=7, bound=1, **limits).take == (1, 2, 3, 4)
    assert cut({1: 7, 2: 7, 3: 7, 4: 7}, {}, version=7, bound=0, **limits) == Cut(stale=(3, 4))


def test_a_group_is_stale_only_if_no_position_is_left_for_it() -> None:
    """One group per step, three steps from version 7, bound 2: one of the two from version 5 fits into the first step.
    The other cannot, and the one from version 6 is in time for the second."""
    found = cut({1: 5, 2: 5, 3: 6, 4: 7}, {}, version=7, per_step=1, steps=3, policy="drop")
    assert found == Cut(take=(1, 3, 4), stale=(2,))


def test_a_backlog_forgets_what_has_ended() -> None:
    backlog = backlog_of(Limits())
    for group_id in range(4):
        backlog.start(group_id, 0)
        backlog.finish(group_id, 0, 0)
    backlog.start(4, 0)
    backlog.restart(4, 3)  # its deadline moves away: version 5 instead of 2
    backlog.remove(1)
    assert backlog.cut(0).take == (0, 2)
    for group_id in (0, 2, 3):
        backlog.remove(group_id)
    assert len(backlog) == 1 and backlog.cut(2) == Cut()
    assert backlog.cut(5) == Cut(waits_for=(4,))


# ---- the plain specification ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finished:
    group_id: int
    oldest: int
    newest: int


def specification(
    finished: Iterable[Finished], running_since: dict[int, int], *, version: int, limits: Limits
) -> Cut:
    """Sorts and scans everything. `running_since` is in the order of dispatch."""
    whole = limits.policy in ("pace", "drop")
    most = limits.bound if whole else limits.max_trained_lag
    size = limits.per_step * limits.steps
    batch: list[Finished] = []
    rest: list[Finished] = []
    stale: list[Finished] = []

    def in_time(group: Finished, position: int) -> bool:
        trained_at = version + position // limits.per_step
        return trained_at - (group.oldest if whole else group.newest) <= most

    for group in sorted(finished, key=lambda g: (g.oldest, 0 if whole else g.newest, g.group_id)):
        if len(batch) < size and in_time(group, len(batch)):
            batch.append(group)
        elif not in_time(group, size - 1):
            stale.append(group)
        else:
            rest.append(group)
    waits_for: list[int] = []
    if limits.policy == "pace":
        live = sorted([*(g.oldest for g in rest), *running_since.values()])
        for count, since in enumerate(live, 1):
            if count > (since + limits.bound - version - limits.steps + 1) * limits.per_step:
                in_the_way = [group_id for group_id, other in running_since.items() if other <= since]
                waits_for = sorted(in_the_way, key=running_since.__getitem__)
                break
    take = () if len(batch) < size or waits_for else tuple(g.group_id for g in batch)
    return Cut(
        take=take, waits_for=tuple(waits_for[:WAITS_SHOWN]), stale=tuple(group.group_id for group in stale)
    )


def oldest_first(
    finished: Iterable[Finished], running_since: dict[int, int], *, version: int, limits: Limits
) -> Cut:
    """The same for `pace` alone, without a word about positions: what is beyond the bound now is stale, then the oldest
    make the batch, and of these what its own step is too late for is stale too."""
    ordered = sorted(finished, key=lambda group: (group.oldest, group.group_id))
    stale = [g.group_id for g in ordered if version - g.oldest > limits.bound]
    fresh = ordered[len(stale) :]
    size = limits.per_step * limits.steps
    batch, rest = fresh[:size], fresh[size:]
    late = [
        group.group_id
        for position, group in enumerate(batch)
        if version + position // limits.per_step - group.oldest > limits.bound
    ]
    if stale or late:
        return Cut(stale=tuple(stale + late))
    live = sorted([*(group.oldest for group in rest), *running_since.values()])
    waits_for: tuple[int, ...] = ()
    for count, since in enumerate(live, 1):
        if count > (since + limits.bound - version - limits.steps + 1) * limits.per_step:
            waits_for = tuple(
                sorted(
                    (group_id for group_id, other in running_since.items() if other <= since),
                    key=running_since.__getitem__,
                )[:WAITS_SHOWN]
            )
            break
    if len(batch) < size or waits_for:
        return Cut(waits_for=waits_for)
    return Cut(take=tuple(group.group_id for group in batch))


def any_limits(policies: tuple[Policy, ...] = POLICIES) -> st.SearchStrategy[Limits]:
    def possible(limits: Limits) -> Limits:
        return replace(limits, bound=max(limits.bound, limits.steps - 1))

    return st.builds(
        Limits,
        policy=st.sampled_from(policies),
        per_step=st.integers(1, 3),
        steps=st.integers(1, 3),
        bound=st.integers(0, 4),
    ).map(possible)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    limits=any_limits(),
    slack=st.integers(0, 4),
    events=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "start", "finish", "finish", "restart", "remove"]),
            st.integers(0, 5),
            st.integers(0, 5),
            st.integers(0, 40),
        ),
        min_size=10,
        max_size=60,
    ),
    ahead=st.integers(0, 3),
)
def test_a_cut_is_what_sorting_and_scanning_everything_finds(
    limits: Limits, slack: int, events: list[tuple[str, int, int, int]], ahead: int
) -> None:
    """Any groups of any versions, reachable or not, after any sequence of events."""
    version = 5 + ahead
    if limits.policy == "downweight":
        limits = replace(limits, trained=limits.bound + slack + 1)
    backlog = backlog_of(limits)
    running: dict[int, int] = {}
    finished: dict[int, Finished] = {}
    for number, (event, one, other, pick) in enumerate(events):
        candidates = {"finish": running, "restart": running, "remove": running | finished}.get(event)
        if candidates is None:
            backlog.start(number, one)
            running[number] = one
        elif candidates:
            group_id = list(candidates)[pick % len(candidates)]
            oldest, newest = sorted((one, other))
            since = running.pop(group_id, None)
            if event == "finish":
                backlog.finish(group_id, oldest, newest)
                finished[group_id] = Finished(group_id=group_id, oldest=oldest, newest=newest)
            elif event == "restart":
                backlog.restart(group_id, one)
                running[group_id] = one
            else:
                backlog.remove(group_id)
                if since is None:
                    del finished[group_id]
    found = backlog.cut(version)
    assert found == specification(finished.values(), running, version=version, limits=limits)
    assert found == backlog.cut(version)  # to ask changes nothing
    assert len(backlog) == len(running) + len(finished)
    for position, group_id in enumerate(found.take):
        group, trained_at = finished[group_id], version + position // limits.per_step
        least = group.oldest if limits.policy in ("pace", "drop") else group.newest
        assert 0 <= trained_at - least <= limits.max_trained_lag
    if limits.policy == "pace":
        plain = oldest_first(finished.values(), running, version=version, limits=limits)
        assert bool(found.stale) == bool(plain.stale)
        if not plain.stale:
            assert found == plain


# ---- random schedules ----------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), limits=any_limits(), engines=st.integers(1, 3))
def test_whatever_happens_training_goes_on_within_the_bound(seed: int, limits: Limits, engines: int) -> None:
    """Random finishing order, engines that update late, groups that fail, start over at another engine or are lost from
    the queue, and an effective bound that moves: every trained group is within the bound, training never gets stuck,
    and under `pace` nothing is ever stale."""
    rng = random.Random(seed)
    per_step, steps_per_batch = limits.per_step, limits.steps
    total_steps = 4 * steps_per_batch
    g = Gate(groups_per_step=per_step, bound=limits.bound, total_groups=per_step * total_steps)
    backlog = backlog_of(limits)
    engine_version = [0] * engines
    running: dict[int, int] = {}
    finished: dict[int, tuple[int, int]] = {}
    version = next_id = idle = 0
    while version < total_steps:
        idle += 1
        assert idle < 3000, (version, running, finished, engine_version, g)
        event = rng.random()
        if event < 0.35:
            engine = rng.randrange(engines)
            if g.capacity(engine_version[engine]) > 0:
                running[next_id] = engine_version[engine]
                backlog.start(next_id, running[next_id])
                g.start()
                next_id += 1
        elif event < 0.65 and running:
            group = rng.choice(list(running))
            since, what = running.pop(group), rng.random()
            if what < 0.1:
                g.reject()
                backlog.remove(group)
            elif what < 0.25:
                running[group] = rng.choice(
                    [other for other in engine_version if other >= since] or [version]
                )
                backlog.restart(group, running[group])
            else:
                # An update in flight may only make the oldest token newer than the dispatch.
                oldest, newest = sorted((rng.randint(since, version), rng.randint(since, version)))
                finished[group] = (oldest, newest)
                backlog.finish(group, oldest, newest)
                g.finish()
        elif event < 0.68 and finished:
            group = rng.choice(list(finished))
            del finished[group]
            backlog.remove(group)
            g.reject(finished=True)
        elif event < 0.7:
            g.bound = rng.randint(steps_per_batch - 1, limits.bound)
        elif event < 0.83:
            engine_version[rng.randrange(engines)] = version
        else:
            result = backlog.cut(version)
            assert not (limits.policy == "pace" and result.stale)
            assert not (limits.policy != "pace" and result.waits_for)
            for group in result.stale:
                del finished[group]
                backlog.remove(group)
                g.reject(finished=True)
            for position, group in enumerate(result.take):
                oldest, newest = finished.pop(group)
                trained_at = version + position // per_step
                decisive = oldest if limits.policy in ("pace", "drop") else newest
                assert newest <= trained_at and trained_at - decisive <= limits.max_trained_lag
                backlog.remove(group)
            if result.take:
                version += steps_per_batch
                idle = 0
    assert g.running + g.accepted <= per_step * total_steps
    assert len(backlog) == len(running) + len(finished)


def share_of_long(policy: Policy, learner_steps: int = 400) -> tuple[float, Counter[str]]:
    """Every other answer takes 10 ticks, the others 1; a learner step takes 1 tick; 2 groups per step, bound 2. Engines
    always serve the newest version, so a token's version is that of the tick at which it is sampled."""
    limits = Limits(policy=policy)
    g = Gate(groups_per_step=limits.per_step, bound=limits.bound, total_groups=10**6)
    backlog = backlog_of(limits)
    since: dict[int, int] = {}
    ends: dict[int, int] = {}
    count: Counter[str] = Counter()
    version = tick = next_id = 0
    while version < learner_steps:
        while g.capacity(version) > 0:
            since[next_id], ends[next_id] = version, tick + (10 if next_id % 2 else 1)
            backlog.start(next_id, version)
            g.start()
            next_id += 1
        tick += 1
        for group in [group for group, end in ends.items() if end == tick]:
            del ends[group]
            backlog.finish(group, since[group], version)
            g.finish()
        result = backlog.cut(version)
        for group in result.stale:
            backlog.remove(group)
            g.reject(finished=True)
            count["dropped long" if group % 2 else "dropped short"] += 1
        for group in result.take:
            backlog.remove(group)
            count["long" if group % 2 else "short"] += 1
        version += bool(result.take)
        assert tick < 100 * learner_steps
    return count["long"] / (count["long"] + count["short"]), count


def test_long_answers_are_trained_as_often_as_they_are_asked_for_unless_the_policy_drops_them() -> None:
    paced, count = share_of_long("pace")
    assert abs(paced - 0.5) < 0.01 and count["dropped long"] == count["dropped short"] == 0
    withheld, count = share_of_long("withhold")
    assert abs(withheld - 0.5) < 0.01 and count["dropped long"] == count["dropped short"] == 0
    dropped, count = share_of_long("drop")
    assert dropped < 0.4 and count["dropped long"] > 100 and count["dropped short"] == 0
