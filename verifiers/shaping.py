"""Scores for how a response is written, not for what it says. Parts of a `weighted` score, hardly ever the whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import after_reasoning
from headway.verifiers.verdict import Verdict

MAX_CHARACTERS = 1_000_000
"""Of a longer response `repetition` looks at this many characters at its end."""
MAX_N = 32
MAX_LENGTH = 10**9
"""Largest length that may be asked for."""


def length(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the length of the text after the reasoning is in [`min`, `max`] of the context (at least one of them),
    falling linearly to 0 over `slack` beyond either end (default 0: at once).

    All three are counted in `unit`: "words" (default; what white space separates) or "characters" (without white
    space at the ends). A verifier sees no tokens: `algorithm.overlong_penalty` is for those. An unclosed think tag
    leaves no text to measure: 0. Ignores the gold. Raises `DataError`.
    """
    low, high, slack = (_count(context, key) for key in ("min", "max", "slack"))
    unit = _unit(context)
    if low is None and high is None:
        raise DataError("a length needs min or max")
    if low is not None and high is not None and low > high:
        raise DataError(f"min {low} is above max {high}")
    visible = after_reasoning(response)
    if visible is None:
        return Verdict(score=0.0, reason="no_answer")
    size = len(visible.split() if unit == "words" else visible.strip())
    short, long = max(0, (low or 0) - size), max(0, size - (size if high is None else high))
    measured = f"{size} {unit}"
    if not short and not long:
        return Verdict(score=1.0, reason="correct", extracted=measured)
    score = max(0.0, 1.0 - (short + long) / slack) if slack else 0.0
    return Verdict(score=score, reason="too_short" if short else "too_long", extracted=measured)


def repetition(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 - min(1, share / `cap`), where share = 1 - (different n-grams) / (all n-grams) of the whole response, reasoning
    included: seq-rep-n of Welleck et al., "Neural Text Generation with Unlikelihood Training" (arXiv:1908.04319).

    `n`: length of an n-gram, 1 to 32 (default 4). `unit`: "words" (default) or "characters" (for scripts without
    spaces, with a larger n). `cap`: the share, in (0, 1], at which the score is 0 (default 1). A response shorter than
    one n-gram repeats nothing. Ignores the gold. Raises `DataError`.
    """
    n = context.get("n")
    if n is None:
        n = 4
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise DataError(f"n {n!r} is not a whole number from 1 to {MAX_N}")
    cap = context.get("cap")
    if cap is None:
        cap = 1.0
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap <= 1:
        raise DataError(f"cap {cap!r} is not a number in (0, 1]")
    text = response.rstrip()[-MAX_CHARACTERS:]
    pieces = text.split() if _unit(context) == "words" else text
    total = len(pieces) - n + 1
    if total < 1:
        return Verdict(score=1.0, reason="correct")
    different = len(set(zip(*(itertools.islice(pieces, start, None) for start in range(n)), strict=False)))
    share = 1.0 - different / total
    score = 1.0 - min(1.0, share / cap)
    return Verdict(
        score=score, reason="correct" if score == 1 else "repeated", extracted=f"{share:.3f} repeated"
    )


def _count(context: Mapping[str, Any], key: str) -> float | None:
    value = context.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_LENGTH:
        raise DataError(f"{key} {value!r} is not a number from 0 to {MAX_LENGTH}")
    return value


def _unit(context: Mapping[str, Any]) -> str:
    unit = context.get("unit")
    if unit is None:
        return "words"
    if unit not in ("words", "characters"):
        raise DataError(f"unit {unit!r} is neither words nor characters")
    return unit
