"""The bound on the version lag, as arithmetic and as a property over random schedules."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.gate import Cut, Finished, Gate, cut_batch


def gate(**over: int) -> Gate:
    limits = {"groups_per_step": 4, "max_version_lag": 2, "max_running": 100, "total_groups": 10_000}
    return Gate(**{**limits, **over})


def test_a_fresh_gate_admits_bound_plus_one_batches() -> None:
    assert gate().capacity(version=0) == 12  # (2 + 0 + 1) * 4
    assert gate(max_version_lag=0).capacity(version=0) == 4


def test_a_resumed_gate_admits_no_more_than_a_fresh_one() -> None:
    # With counters at 0 it would be (2 + 10 + 1) * 4 = 52.
    limits = {"groups_per_step": 4, "max_version_lag": 2, "max_running": 100, "total_groups": 10_000}
    assert Gate.resume(version=10, queued=0, **limits).capacity(version=10) == 12
    assert Gate.resume(version=10, queued=5, **limits).capacity(version=10) == 7


def test_capacity_is_also_bounded_by_engines_and_by_the_end_of_the_run() -> None:
    assert gate(max_running=3).capacity(version=0) == 3
    assert gate(total_groups=5).capacity(version=0) == 5


def test_a_rejected_group_gives_its_place_back_and_a_finished_one_keeps_it() -> None:
    g = gate(max_version_lag=0)
    for _ in range(4):
        g.start()
    assert g.capacity(0) == 0
    g.reject()
    assert g.capacity(0) == 1
    g.finish()
    assert g.capacity(0) == 1
    g.reject(finished=True)
    assert g.capacity(0) == 2


def test_an_engine_that_lags_behind_has_less_room_than_the_newest() -> None:
    g = gate()
    for _ in range(12):
        g.start()
    assert g.capacity(version=0) == 0
    assert g.capacity(version=1) == 4


def cut(
    finished: dict[int, int], running: dict[int, int], version: int, bound: int = 2, steps: int = 1
) -> Cut:
    return cut_batch(
        [Finished(group_id=g, oldest_version=v) for g, v in finished.items()],
        running,
        version=version,
        groups_per_step=2,
        steps_per_batch=steps,
        max_version_lag=bound,
    )


def test_oldest_version_first() -> None:
    assert cut({7: 3, 5: 2, 6: 3}, {}, version=3).take == (5, 6)


def test_a_straggler_that_the_next_step_could_not_take_is_waited_for() -> None:
    assert cut({5: 3, 6: 3}, {1: 1}, version=3) == Cut(waits_for=(1,))  # at version 4 its lag would be 3
    assert cut({5: 3, 6: 3}, {1: 2}, version=3).take == (5, 6)  # at version 4 its lag is 2, within the bound


def test_lag_of_exactly_the_bound_is_trained_and_one_more_is_stale() -> None:
    # A rollout starts at version 5 and is trained at 7: its lag is 2.
    assert cut({1: 5, 2: 7}, {}, version=7, bound=2).take == (1, 2)
    assert cut({1: 5, 2: 7}, {}, version=7, bound=1) == Cut(stale=(1,))


def test_too_many_groups_of_one_age_are_not_left_for_one_step() -> None:
    """Three groups of version 2 run while younger ones have finished. Version 6 is the last that may train them and
    has room for two: with bound 4 the learner at 5 must wait although none of them is over the bound yet."""
    assert cut({14: 4, 16: 4}, {9: 2, 11: 2, 12: 2}, version=5, bound=4) == Cut(waits_for=(9, 11, 12))
    assert cut({14: 4, 16: 4}, {9: 2, 11: 2}, version=5, bound=4).take == (14, 16)
    assert cut({12: 2, 14: 4, 16: 4}, {9: 2, 11: 2}, version=5, bound=4).take == (12, 14)


def test_later_steps_of_a_batch_hold_the_bound_too() -> None:
    # Two steps on one batch: the second pair is trained at version 8.
    assert cut({1: 7, 2: 7, 3: 7, 4: 7}, {}, version=7, bound=1, steps=2).take == (1, 2, 3, 4)
    assert cut({1: 7, 2: 7, 3: 7, 4: 7}, {}, version=7, bound=0, steps=2) == Cut(stale=(3, 4))


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(0, 4),
    per_step=st.integers(1, 4),
    engines=st.integers(1, 3),
    steps_per_batch=st.integers(1, 2),
)
def test_whatever_finishes_when_the_bound_holds_and_nothing_is_discarded(
    seed: int, bound: int, per_step: int, engines: int, steps_per_batch: int
) -> None:
    """Random finishing order, engines that update late, and random losses: every trained group is within the bound,
    none is ever stale, and training never gets stuck."""
    if bound < steps_per_batch - 1:
        bound = steps_per_batch - 1
    rng = random.Random(seed)
    total_steps = 12 - 12 % steps_per_batch
    g = Gate(
        groups_per_step=per_step, max_version_lag=bound, max_running=6, total_groups=per_step * total_steps
    )
    engine_version = [0] * engines
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    version = next_id = idle = 0
    while version < total_steps:
        idle += 1
        assert idle < 2000, (version, running, finished, engine_version)
        event = rng.random()
        if event < 0.35:
            engine = rng.randrange(engines)
            if g.capacity(engine_version[engine]) > 0:
                running[next_id] = engine_version[engine]
                g.start()
                next_id += 1
        elif event < 0.65 and running:
            group = rng.choice(list(running))
            since = running.pop(group)
            if rng.random() < 0.1:
                g.reject()
            else:
                # An update in flight may only make the oldest token newer than the dispatch.
                finished[group] = since
                g.finish()
        elif event < 0.8:
            engine_version[rng.randrange(engines)] = version
        else:
            result = cut_batch(
                [Finished(group_id=k, oldest_version=v) for k, v in finished.items()],
                running,
                version=version,
                groups_per_step=per_step,
                steps_per_batch=steps_per_batch,
                max_version_lag=bound,
            )
            assert not result.stale
            for position, group in enumerate(result.take):
                assert 0 <= version + position // per_step - finished.pop(group) <= bound
            if result.take:
                version += steps_per_batch
                idle = 0
    assert g.running + g.accepted <= per_step * total_steps
