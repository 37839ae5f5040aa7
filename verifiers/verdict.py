"""A response to be scored, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Item(NamedTuple):
    """One response to be scored."""

    name: str
    """Of its verifier."""
    gold: Any
    response: str
    context: Mapping[str, Any] = {}
    """Options of the verifier, and whatever else the dataset's row holds."""
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verifier says about one response."""

    score: float | None
    """In [0, 1]; None: unscored, because something other than the response failed."""
    reason: str
    """Short label. Score 1: correct; between: partial; 0: wrong, no_answer, ambiguous (different answers side by side),
    too_large, code (would run as code), not_plain (a program returned what is no plain data), exception (the scorer or the
    program failed on it), timeout, memory, malformed, schema, too_short, too_long, repeated, and of sections tag_missing,
    tag_unclosed, tag_repeated, tag_nested, tag_order, tag_empty, text_outside; None: crash, bad_gold, sandbox (no program
    could be run), environment_error, environment_timeout."""
    extracted: str | None = None
    """The answer that was compared, whole; None when there is none."""
    parts: tuple[tuple[str, float], ...] = ()
    """Named parts of the score, for verifiers that have several."""


def correct(extracted: str) -> Verdict:
    return Verdict(score=1.0, reason="correct", extracted=extracted)


def wrong(extracted: str | None, reason: str = "wrong") -> Verdict:
    return Verdict(score=0.0, reason=reason, extracted=extracted)
