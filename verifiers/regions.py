"""Sets of real numbers, written as inequalities, as intervals, or as unions of these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headway.verifiers import expressions, values
from headway.verifiers.canonical import split_top

_OR = re.compile(r"\s*(?:\bor\b|\\cup(?![A-Za-z]))\s*")
_AND = re.compile(r"\s*\band\b\s*")
_COMMA = re.compile(r"\s*,\s*")
_RELATION = re.compile(r"<=|>=|!=|<|>")
_MEMBER = re.compile(r"\s*(\\?[A-Za-z]+(?:_\{?\w\}?)?)\s*\\in(?![A-Za-z])\s*(.*)")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*(.*)\\\}")
_VARIABLE = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?|\\(?:theta|alpha|beta|lambda|phi|omega)")
_INTERVAL = re.compile(r"([(\[])(.*)([)\]])")
_REALS = re.compile(r"\\mathbb\s*\{?R\}?")
_POINT = re.compile(r"\\\{([^,]*)\\\}")


@dataclass(frozen=True, slots=True)
class Interval:
    low: str
    high: str
    low_closed: bool = False
    high_closed: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    variable: str | None
    intervals: tuple[Interval, ...]


def as_region(text: str) -> Region | None:
    """The set that a canonical text describes; None when it describes none in this way."""
    if member := _MEMBER.fullmatch(text):
        region = as_region(member[2])
        return region and Region(member[1], region.intervals)
    if builder := _BUILDER.fullmatch(text):
        region = as_region(builder[2])
        return region if region and region.variable == builder[1] else None
    variables: set[str] = set()
    intervals: list[Interval] = []
    for part in split_top(text, _OR):
        found = _intervals(part.strip(), variables)
        if found is None:
            return None
        intervals += found
    if len(variables) > 1 or not intervals:
        return None
    return Region(next(iter(variables), None), tuple(intervals))


def same_region(one: Region, other: Region, same: Callable[[str, str], bool]) -> bool:
    """Whether two sets have the same intervals in the same variable (which one side need not name)."""
    if one.variable and other.variable and one.variable != other.variable:
        return False
    left, right = sorted(one.intervals, key=_place), sorted(other.intervals, key=_place)
    return len(left) == len(right) and all(
        (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
        and same(a.low, b.low)
        and same(a.high, b.high)
        for a, b in zip(left, right, strict=True)
    )


def _intervals(part: str, variables: set[str]) -> list[Interval] | None:
    if _REALS.fullmatch(part):
        return [Interval("-\\infty", "\\infty")]
    if point := _POINT.fullmatch(part):
        return [Interval(point[1], point[1], True, True)]
    if _RELATION.search(part):
        return _inequality(part, variables)
    match = _INTERVAL.fullmatch(part)
    ends = split_top(match[2], _COMMA) if match else []
    if match is None or len(ends) != 2:
        return None
    low, high = map(_end, ends)
    return [
        Interval(low, high, match[1] == "[" and "infty" not in low, match[3] == "]" and "infty" not in high)
    ]


def _inequality(part: str, variables: set[str]) -> list[Interval] | None:
    """`x < 3`, `1 < x <= 3`, `x != 3`, or several joined by "and"."""
    low, high, low_closed, high_closed = "-\\infty", "\\infty", False, False
    for condition in split_top(part, _AND):
        sides = [side.strip() for side in split_top(condition, _RELATION)]
        signs = _RELATION.findall(condition)
        if len(sides) != len(signs) + 1 or not all(sides):
            return None
        places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
        if len(places) != 1 or len(sides) > 3 or (len(sides) == 3 and places != [1]):
            return None
        place = places[0]
        variables.add(sides[place])
        if signs == ["!="]:
            excluded = sides[1 - place]
            return [Interval("-\\infty", excluded), Interval(excluded, "\\infty")]
        for index, sign in enumerate(signs):
            bound, is_left = (sides[index], True) if index < place else (sides[index + 1], False)
            if sign == "!=":
                return None
            if (sign[0] == "<") == is_left:
                low, low_closed = bound, sign.endswith("=")
            else:
                high, high_closed = bound, sign.endswith("=")
    return [
        Interval(
            _end(low), _end(high), low_closed and "infty" not in low, high_closed and "infty" not in high
        )
    ]


def _end(text: str) -> str:
    return text.strip().removeprefix("+")


def _place(interval: Interval) -> float:
    """Where an interval starts, to put unions in one order; all alike where that is not a number."""
    if interval.low.endswith("\\infty"):
        return float("-inf")
    try:
        return float(values.evaluate(expressions.read(interval.low), {}))
    except (
        expressions.NotRead,
        values.Undefined,
        expressions.TooLarge,
        KeyError,
        TypeError,
        OverflowError,
    ):
        return 0.0
