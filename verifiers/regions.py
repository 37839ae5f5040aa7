"""Sets of real numbers, written as inequalities, as intervals, or as unions of these; inequalities in general."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.verifiers import expressions, values
from headway.verifiers.canonical import split_top

RELATION = re.compile(r"<=|>=|!=|<|>")
_OR = re.compile(r"\s*(?:\bor\b|\\cup(?![A-Za-z]))\s*")
_AND = re.compile(r"\s*(?:,|;|\band\b)\s*")
_COMMA = re.compile(r"\s*[,;]\s*")
_MEMBER = re.compile(r"\s*(\\?[A-Za-z]+(?:_\{?\w\}?)?)\s*\\in(?![A-Za-z])\s*(.*)")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*(.*)\\\}")
_VARIABLE = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?|\\(?:theta|alpha|beta|lambda|phi|omega)")
_INTERVAL = re.compile(r"([(\[])(.*)([)\]])")
_OUTWARD = re.compile(r"([\[\]])([^\[\](){},;]+[,;][^\[\](){},;]+)([\[\]])")
_ALL_REALS = r"(?:\\mathbb\s*\{?R\}?|all reals|all real numbers)"
_REALS = re.compile(rf"{_ALL_REALS}(?:\s*(?:\\setminus|-|except(?: for)?)\s*(.+))?")
_SET = re.compile(r"\\\{(.*)\\\}")
_SIGNS = re.compile(
    rf"{RELATION.pattern}|\\cup|\\in|\\setminus|{_ALL_REALS}|[\[\]][^\[\]()]*\[|\][^\[\]()]*\]"
)
_LOW, _HIGH = "-\\infty", "\\infty"

Same = Callable[[str, str], bool]


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

    def is_numeric(self) -> bool:
        return not any(
            math.isnan(_number(bound)) for part in self.intervals for bound in (part.low, part.high)
        )

    def same(self, other: Region, same: Same) -> bool:
        """Whether two sets have the same intervals in the same variable (which one side need not name)."""
        if self.variable and other.variable and self.variable != other.variable:
            return False
        left, right = (
            sorted(region.intervals, key=lambda part: _place(part.low)) for region in (self, other)
        )
        return len(left) == len(right) and all(
            (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
            and same(a.low, b.low)
            and same(a.high, b.high)
            for a, b in zip(left, right, strict=True)
        )


def says_region(text: str) -> bool:
    """Whether a canonical text has a sign that only sets of numbers have. (1, 2) could also be a point."""
    return _SIGNS.search(text) is not None


def as_region(text: str) -> Region | None:
    """The set that a canonical text describes; None when it describes none in this way."""
    if builder := _BUILDER.fullmatch(text):
        region = as_region(builder[2])
        return region if region and region.variable == builder[1] else None
    variables: set[str] = set()
    intervals: list[Interval] = []
    for part in split_top(_OUTWARD.sub(_inward, text), _OR):
        found = _intervals(part.strip(), variables)
        if found is None:
            return None
        intervals += found
    if len(variables) > 1 or not intervals:
        return None
    return Region(next(iter(variables), None), tuple(intervals))


def same_relation(gold: str, answer: str, same: Same) -> bool:
    """Whether two inequalities say the same: x + y > 2 and 2y > 4 - 2x. Raises as `values.same_value`."""
    one, other = _sides(gold), _sides(answer)
    if one is None or other is None:
        return False
    (signs, left), (other_signs, right) = one, other
    if signs != other_signs:
        return False
    if len(signs) > 1:
        return all(map(same, left, right))
    try:
        first, second = (
            ("add", expressions.read(sides[0]), ("negative", expressions.read(sides[1])))
            for sides in (left, right)
        )
        return values.proportional(first, second, same_sign=signs != ["!="])
    except expressions.NotRead:
        return all(map(same, left, right))
    except values.Undefined:
        return False


def _sides(text: str) -> tuple[list[str], list[str]] | None:
    """The signs and sides of an inequality, turned so that it says "less"."""
    sides = [side.strip() for side in split_top(text, RELATION)]
    signs = RELATION.findall(text)
    if len(sides) != len(signs) + 1 or not all(sides):
        return None
    if signs[0].startswith(">"):
        signs = [
            sign.replace(">", "<") if ">" in sign else sign.replace("<", ">") for sign in reversed(signs)
        ]
        sides.reverse()
    return signs, sides


def _inward(match: re.Match[str]) -> str:
    """]0, 1[ is (0, 1)."""
    return ("[" if match[1] == "[" else "(") + match[2] + ("]" if match[3] == "]" else ")")


def _intervals(part: str, variables: set[str]) -> list[Interval] | None:
    conditions = split_top(part, _AND)
    if len(conditions) == 1 and (member := _MEMBER.fullmatch(part)):
        variables.add(member[1])
        part = member[2].strip()
    if reals := _REALS.fullmatch(part):
        return _without(reals[1]) if reals[1] else [Interval(_LOW, _HIGH)]
    if RELATION.search(part):
        return _inequalities(part, variables)
    if (points := _SET.fullmatch(part)) and len(listed := _points(part) or []) == 1 and points[1]:
        return [Interval(listed[0], listed[0], True, True)]
    match = _INTERVAL.fullmatch(part)
    ends = split_top(match[2], _COMMA) if match else []
    if match is None or len(ends) != 2 or not all(ends):
        return None
    if (match[1] == "[" and "infty" in ends[0]) or (match[3] == "]" and "infty" in ends[1]):
        return None
    return [_interval(ends[0], ends[1], match[1] == "[", match[3] == "]")]


def _interval(low: str, high: str, low_closed: bool, high_closed: bool) -> Interval:
    low, high = low.strip().removeprefix("+"), high.strip().removeprefix("+")
    return Interval(low, high, low_closed and "infty" not in low, high_closed and "infty" not in high)


def _inequalities(part: str, variables: set[str]) -> list[Interval] | None:
    """`x < 3`, `1 < x <= 3`, `x != 3`, or several that hold together. Two that exclude each other, with a comma
    between them, are alternatives."""
    lows: list[tuple[str, bool]] = []
    highs: list[tuple[str, bool]] = []
    excluded: list[str] = []
    for condition in split_top(part, _AND):
        member = _MEMBER.fullmatch(condition)
        if member and _REALS.fullmatch(member[2].strip()):
            variables.add(member[1])
            continue
        if not RELATION.search(condition):  # x != 3, 4
            if not excluded or lows or highs:
                return None
            excluded.append(condition.strip())
            continue
        sides = [side.strip() for side in split_top(condition, RELATION)]
        signs = RELATION.findall(condition)
        places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
        if len(sides) != len(signs) + 1 or not all(sides) or len(places) != 1 or len(sides) > 3:
            return None
        (place,) = places
        if len(sides) == 3 and (place != 1 or len({sign[0] for sign in signs}) > 1):
            return None
        variables.add(sides[place])
        for index, sign in enumerate(signs):
            bound, is_left = (sides[index], True) if index < place else (sides[index + 1], False)
            if sign == "!=":
                excluded.append(bound)
            else:
                (lows if (sign[0] == "<") == is_left else highs).append((bound, sign.endswith("=")))
    if excluded:
        return None if lows or highs else _without_points(excluded)
    if len(lows) > 1 or len(highs) > 1:
        return None
    low, high = (lows or [(_LOW, False)])[0], (highs or [(_HIGH, False)])[0]
    if _place(low[0]) > _place(high[0]):
        if re.search(r"\band\b", part):
            return None
        return [_interval(_LOW, high[0], False, high[1]), _interval(low[0], _HIGH, low[1], False)]
    return [_interval(low[0], high[0], low[1], high[1])]


def _points(text: str) -> list[str] | None:
    inner = _SET.fullmatch(text.strip())
    points = [point.strip() for point in split_top(inner[1] if inner else text, _AND)]
    return points if all(points) else None


def _without(text: str) -> list[Interval] | None:
    """All numbers but those of an interval or a list."""
    if match := _INTERVAL.fullmatch(text.strip()):
        ends = split_top(match[2], _COMMA)
        if len(ends) == 2 and all(ends):
            return [
                _interval(_LOW, ends[0], False, match[1] == "("),
                _interval(ends[1], _HIGH, match[3] == ")", False),
            ]
    points = _points(text)
    return _without_points(points) if points else None


def _without_points(points: Sequence[str]) -> list[Interval]:
    bounds = [_LOW, *sorted(points, key=_place), _HIGH]
    return [Interval(low, high) for low, high in itertools.pairwise(bounds)]


def _place(text: str) -> float:
    """Where a bound stands among others; all alike where that is not a number."""
    number = _number(text)
    return 0.0 if math.isnan(number) else number


def _number(text: str) -> float:
    """About the value of a bound; NaN where that is not a number."""
    if text.endswith("\\infty"):
        return -math.inf if text.startswith("-") else math.inf
    try:
        return float(values.evaluate(expressions.read(text), {}))
    except (
        expressions.NotRead,
        values.Undefined,
        expressions.TooLarge,
        KeyError,
        TypeError,
        OverflowError,
    ):
        return math.nan
