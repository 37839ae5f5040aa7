"""The result of scoring one response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verifier says about one response."""

    score: float | None
    """In [0, 1]; None: unscored, because something other than the response failed."""
    reason: str
    """Short label. Score 1: correct; 0: wrong, no_answer, ambiguous (different answers side by side), too_large, code
    (would run as code), exception (the scorer failed on it), timeout, memory; None: crash, bad_gold."""
    extracted: str | None = None
    """The answer that was compared, whole; None when there is none."""
    parts: tuple[tuple[str, float], ...] = ()
    """Named parts of the score, for verifiers that have several."""


def correct(extracted: str) -> Verdict:
    return Verdict(score=1.0, reason="correct", extracted=extracted)


def wrong(extracted: str | None, reason: str = "wrong") -> Verdict:
    return Verdict(score=0.0, reason=reason, extracted=extracted)
