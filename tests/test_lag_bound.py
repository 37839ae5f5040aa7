"""The effective bound falls with the ESS and comes back slowly."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.gate import Gate
from headway.cluster.lag_bound import RECOVERY_STEPS, LagBound


def bounds(bound: LagBound, *ess_fractions: float | None) -> list[int]:
    found = []
    for ess_fraction in ess_fractions:
        bound.observe(ess_fraction)
        found.append(bound.bound)
    return found


def test_each_step_below_the_floor_lowers_the_bound_by_one() -> None:
    assert bounds(LagBound(3, 0.5, 0), 0.5, 0.4, 0.3, 0.9, 0.2, 0.2) == [3, 2, 1, 1, 0, 0]


def test_ten_steps_in_a_row_at_or_above_the_floor_raise_it_by_one() -> None:
    bound = LagBound(4, 0.5, 0)
    assert bounds(bound, 0.1, 0.1) == [3, 2]
    assert bounds(bound, *[0.5] * 9, 0.1) == [2] * 9 + [1]  # the tenth was below: the count starts anew
    assert bounds(bound, *[0.5] * 20) == [1] * 9 + [2] * 10 + [3]
    assert bounds(bound, *[0.9] * 30)[-1] == 4  # never above the hard bound


def test_without_a_floor_it_never_moves() -> None:
    assert bounds(LagBound(2, None, 0), 0.0, 1.0, math.nan) == [2, 2, 2]


def test_a_step_without_weights_says_nothing_and_nan_is_no_sign_of_health() -> None:
    bound = LagBound(2, 0.5, 0)
    assert bounds(bound, math.nan, None, None) == [1, 1, 1]
    assert bounds(bound, *[0.9] * 5, *[None] * 5, *[0.9] * 5) == [1] * 14 + [2]


def test_the_lowest_bound_still_admits_one_whole_batch() -> None:
    # Three steps of 4 groups per batch: a bound of 2 admits (2 + 0 + 1) * 4 = 12 groups, a bound of 1 only 8.
    bound = LagBound(3, 0.5, 2)
    assert bounds(bound, 0.1, 0.1, 0.1) == [2, 2, 2]
    assert Gate(groups_per_step=4, total_groups=100, bound=bound.bound).capacity(0) == 12


@given(
    before=st.lists(st.none() | st.floats(0, 1), max_size=40),
    after=st.lists(st.floats(0, 1), max_size=40),
    lowest=st.integers(0, 2),
)
def test_it_stays_between_its_ends_and_goes_on_after_a_resume(
    before: list[float | None], after: list[float], lowest: int
) -> None:
    bound = LagBound(4, 0.7, lowest)
    assert all(lowest <= found <= 4 for found in bounds(bound, *before))
    again = LagBound(4, 0.7, lowest)
    again.resume(json.loads(json.dumps(bound.state())))
    assert bounds(again, *after, *[1.0] * RECOVERY_STEPS) == bounds(bound, *after, *[1.0] * RECOVERY_STEPS)
