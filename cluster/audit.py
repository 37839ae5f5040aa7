"""What was sampled against what was trained: selection must not change what the policy learns from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class LengthAudit:
    """Response lengths of the whole run, in tokens; memory is bounded by the number of different lengths."""

    sampled: Counter[int] = field(default_factory=Counter)
    """Of every finished group, dropped ones included."""
    trained: Counter[int] = field(default_factory=Counter)

    def ks(self) -> float:
        """Kolmogorov-Smirnov distance of the two distributions: the largest difference of their cumulative shares, in
        [0, 1]; 0 while one of them is empty."""
        totals = self.sampled.total(), self.trained.total()
        if not all(totals):
            return 0.0
        largest, below_sampled, below_trained = 0.0, 0, 0
        for length in sorted(self.sampled | self.trained):
            below_sampled += self.sampled[length]
            below_trained += self.trained[length]
            largest = max(largest, abs(below_sampled / totals[0] - below_trained / totals[1]))
        return largest

    def record(self) -> dict[str, Any]:
        """For `metrics.jsonl`: mean lengths and their distance."""
        return {
            "length_ks": self.ks(),
            "sampled_mean": _mean(self.sampled),
            "trained_mean": _mean(self.trained),
        }

    def state(self) -> dict[str, list[tuple[int, int]]]:
        """As JSON values."""
        return {"sampled": sorted(self.sampled.items()), "trained": sorted(self.trained.items())}

    @classmethod
    def resume(cls, state: dict[str, list[tuple[int, int]]]) -> LengthAudit:
        return cls(sampled=Counter(dict(state["sampled"])), trained=Counter(dict(state["trained"])))


def _mean(lengths: Counter[int]) -> float | None:
    total = lengths.total()
    return sum(length * count for length, count in lengths.items()) / total if total else None
