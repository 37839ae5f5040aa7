"""Mathematical answers: found in the response, written one way, and compared."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from headway.verifiers import expressions
from headway.verifiers.canonical import canonical
from headway.verifiers.comparison import Comparison
from headway.verifiers.exact import gold_text
from headway.verifiers.extract import final_answer
from headway.verifiers.numeric import tolerance
from headway.verifiers.verdict import Verdict, correct, wrong

MAX_ANSWER = 2000
"""Longer answers are compared as texts only."""

_COMMA = re.compile(r"\d,\d|\d\.\d{3}\.\d{3}")


def math(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the response's final answer means the same as the gold.

    Units may be missing on one side, never differ. 35% is 0.35, and 35 beside a bare number. An interval and an
    inequality are the same set. Ratios are equal up to scale, degrees equal radians, and \\approx is ignored. A
    rounded decimal is not its fraction unless the context sets `relative_tolerance`. Raises `DataError` for a gold
    without an answer.
    """
    expected = gold_text(gold)
    allowed = tolerance(context)
    found = final_answer(response)
    if found.text is None:
        return wrong(None, "no_answer")
    if found.text == expected:
        return correct(found.text)
    try:
        is_same = same_answer(expected, found.text, allowed)
    except expressions.TooLarge:
        return wrong(found.text, "too_large")
    if is_same:
        return correct(found.text)
    return wrong(found.text, "ambiguous" if found.candidates > 1 else "wrong")


def same_answer(gold: str, answer: str, relative_tolerance: Fraction = Fraction(0)) -> bool:
    """Whether two answers, as written, mean the same. Raises `expressions.TooLarge`."""
    if len(answer) > MAX_ANSWER or len(gold) > MAX_ANSWER:
        return "".join(answer.split()) == "".join(gold.split())
    comparison = Comparison(relative_tolerance)
    expected, given = _canonical_gold(gold), canonical(answer)
    if comparison.same(expected, given):
        return True
    # A comma between digits is read as the other side wants it: 12,5 beside a number, 100,200 beside a list.
    if "," not in expected and _COMMA.search(answer):
        return comparison.same(expected, canonical(answer, "decimal"))
    if _COMMA.search(answer) or _COMMA.search(gold):
        return comparison.same(canonical(gold, "separate"), canonical(answer, "separate"))
    return False


_canonical_gold = functools.lru_cache(maxsize=1024)(canonical)
