"""The answer is the last number."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.exact import gold_text
from headway.verifiers.extract import after_reasoning
from headway.verifiers.numbers import last_number, parse_number
from headway.verifiers.verdict import Verdict, correct, wrong


def numeric(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the last number after the reasoning equals the gold exactly, or within `relative_tolerance` of the
    context (a share of the gold's size). Raises `DataError` when the gold is no number."""
    expected = parse_number(last_number(text) or "") if (text := gold_text(gold)) else None
    if expected is None:
        raise DataError(f"gold answer {gold!r} is not a number")
    visible = after_reasoning(response)
    answer = last_number(visible) if visible is not None else None
    if answer is None:
        return wrong(None, "no_answer")
    value = parse_number(answer)
    if value is None:
        return wrong(answer, "too_large")
    return correct(answer) if abs(value - expected) <= tolerance(context) * abs(expected) else wrong(answer)


def tolerance(context: Mapping[str, Any]) -> Fraction:
    """`relative_tolerance` of a context, 0 when it has none. Raises `DataError`."""
    value = context.get("relative_tolerance") or 0
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise DataError(f"relative_tolerance {value!r} is not a number in [0, 1)")
    return Fraction(value)
