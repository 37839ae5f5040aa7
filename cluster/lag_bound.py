"""The effective bound on the version lag, tightened while the data has aged too much for its importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECOVERY_STEPS = 10
"""Steps in a row at or above the floor that raise the bound by one: slowly, since groups that were admitted under the
old bound are trained up to that many steps later and show its effect only then."""


@dataclass(kw_only=True)
class LagBound:
    """`bound` is what admission keeps to; the hard bound `max_bound` stays what it is."""

    max_bound: int
    floor: float | None
    """Effective sample size over the number of tokens, in (0, 1), below which the bound falls; None: it never moves."""
    lowest: int
    """Steps per batch minus one: under a lower bound the gate would not admit one whole batch, and the learner would
    wait for it forever."""
    bound: int = -1
    """Starts at `max_bound`."""
    streak: int = 0
    """Steps in a row at or above the floor."""

    def __post_init__(self) -> None:
        if self.bound < 0:
            self.bound = self.max_bound

    def observe(self, ess_fraction: float | None) -> None:
        """The importance ESS fraction of one optimizer step. None, a step without importance weights, says nothing;
        NaN is no sign of health and counts as below the floor."""
        if self.floor is None or ess_fraction is None:
            return
        if not ess_fraction >= self.floor:
            self.bound = max(self.bound - 1, self.lowest)
            self.streak = 0
            return
        self.streak += 1
        if self.streak == RECOVERY_STEPS:
            self.bound = min(self.bound + 1, self.max_bound)
            self.streak = 0

    def state(self) -> dict[str, int]:
        """As JSON values."""
        return {"bound": self.bound, "streak": self.streak}

    @classmethod
    def resume(cls, state: dict[str, Any], *, max_bound: int, floor: float | None, lowest: int) -> LagBound:
        return cls(max_bound=max_bound, floor=floor, lowest=lowest, **state)
