"""The effective bound on the version lag, tightened while the data is too old for its importance weights."""

from __future__ import annotations

from typing import Any

RECOVERY_STEPS = 10
"""Steps in a row at or above the floor that raise the bound by one. Falling is quick and rising slow: what was admitted
under another bound is trained some steps later and shows its effect only then."""


class LagBound:
    """`bound` is what admission keeps to; the hard bound stays `max_bound`.

    `floor`: ESS over the number of tokens, in (0, 1), below which a step lowers the bound by one; None: it never moves.
    `lowest`: steps per batch minus one. Under a lower bound the gate would not admit one whole batch, and the learner
    would wait for it forever.
    """

    def __init__(self, max_bound: int, floor: float | None, lowest: int) -> None:
        self._max_bound = max_bound
        self._floor = floor
        self._lowest = lowest
        self.bound = max_bound
        self._good_steps = 0
        """In a row, since the bound last moved."""

    def observe(self, ess_fraction: float | None) -> None:
        """The importance ESS fraction of one optimizer step. None, a step without importance weights, says nothing;
        NaN is no sign of health and counts as below the floor."""
        if self._floor is None or ess_fraction is None:
            return
        if not ess_fraction >= self._floor:
            self.bound = max(self.bound - 1, self._lowest)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == RECOVERY_STEPS:
            self.bound = min(self.bound + 1, self._max_bound)
            self._good_steps = 0

    def state(self) -> dict[str, int]:
        """As JSON values."""
        return {"bound": self.bound, "good_steps": self._good_steps}

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.bound, self._good_steps = state["bound"], state["good_steps"]
