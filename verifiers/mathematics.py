"""Mathematical answers: found in the response, written one way, then compared from the cheap to the costly."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from headway.verifiers import expressions, values
from headway.verifiers.canonical import canonical, split_top
from headway.verifiers.exact import gold_text
from headway.verifiers.extract import final_answer
from headway.verifiers.numbers import parse_number
from headway.verifiers.numeric import tolerance
from headway.verifiers.regions import as_region, same_region
from headway.verifiers.symbolic import same_symbolically
from headway.verifiers.units import NO_UNITS, split_unit
from headway.verifiers.verdict import Verdict, correct, wrong

MAX_ANSWER = 2000
"""Longer answers are compared as texts only."""
MAX_ITEMS = 64
"""Longer lists are compared as texts only."""

_LIST = re.compile(r"\s*(?:,|;|\bor\b|\band\b)\s*(?:(?:or|and)\b\s*)?")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)")
_COLON = re.compile(r":")
_ROW = re.compile(r"\\\\")
_CELL = re.compile(r"&")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap]\.?m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(([A-J])\)|([A-J])(?:[.:)]|$))\s*(?!.*(?<![A-Za-z])[A-J](?![A-Za-z])).*",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.-]*(?:[\s,]+[A-Za-z][A-Za-z'’.-]*)*")
_ALSO_WORDS = frozenset({
    "yes", "no", "not", "none", "true", "false", "neither", "both", "either", "undefined", "infinity",
    "max", "min", "from", "to", "by", "at", "in",
})  # fmt: skip
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([A-Za-z](?:,[A-Za-z])*\))?|\([A-Za-z](?:,[A-Za-z])+\)|m?\\angle\s*[A-Z]{1,3}"
)
_BRACKETED = re.compile(r"(\\\{|\{|\(|\[|\\langle)(.*?)(\\\}|\}|\)|\]|\\rangle)", re.DOTALL)
_ELEMENTS = re.compile(r"(?:[A-Za-z]|\([A-Za-z](?:,[A-Za-z])+\))\s*\\in\s*(?=\\\{)")
_MATRIX = re.compile(r"\\begin\{([pbvVB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_INFINITE = {("constant", "infinity"), ("negative", ("constant", "infinity"))}
_REGION_SIGNS = ("<", ">", "!=", "\\cup", "\\in", "\\mathbb")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


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
    return _Comparison(relative_tolerance).same(_canonical_gold(gold), canonical(answer))


_canonical_gold = functools.lru_cache(maxsize=1024)(canonical)


class _Comparison:
    def __init__(self, relative_tolerance: Fraction) -> None:
        self.relative_tolerance = relative_tolerance

    def same(self, gold: str, answer: str) -> bool:
        """Whether two canonical texts mean the same."""
        if not gold or not answer:
            return False
        if gold == answer:
            return True
        for rule in (
            self.numbers,
            self.choices,
            self.notations,
            self.percents,
            self.regions,
            self.matrices,
            self.collections,
            self.equations,
            self.words,
            self.units,
        ):
            decided = rule(gold, answer)
            if decided is not None:
                return decided
        return self.by_value(gold, answer)

    # Each rule decides (True, False) or does not apply (None).

    def numbers(self, gold: str, answer: str) -> bool | None:
        one, other = parse_number(gold), parse_number(answer)
        if one is None or other is None:
            return None
        return self.close(one, other)

    def close(self, gold: Fraction, answer: Fraction) -> bool:
        return abs(gold - answer) <= self.relative_tolerance * abs(gold)

    def choices(self, gold: str, answer: str) -> bool | None:
        letter = _CHOICE.fullmatch(gold)
        chosen = _CHOSEN.fullmatch(answer) if letter else None
        if letter is None or chosen is None:
            return None
        return letter[1] == (chosen[1] or chosen[2]).upper()

    def notations(self, gold: str, answer: str) -> bool | None:
        """Clock times, ratios, and numbers with a base, whose digits are no plain numbers."""
        bases = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
        if (
            any(bases)
            and (bases[0] or parse_number(gold) is not None)
            and (bases[1] or parse_number(answer) is not None)
        ):
            one, other = bases
            if one is None or other is None:
                return False
            return (one[1].lstrip("0").lower(), one[2]) == (other[1].lstrip("0").lower(), other[2])
        one, other = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
        if one and other:
            return _clock(one) == _clock(other) and (not one[4] or not other[4] or _half(one) == _half(other))
        parts = split_top(gold, _COLON), split_top(answer, _COLON)
        if len(parts[0]) == len(parts[1]) > 1:
            return self.ratios(*parts)
        if one or other:
            return False
        if {len(parts[0]), len(parts[1])} == {1, 2}:
            left, right = ("/".join(f"({side})" for side in part) for part in parts)
            return self.by_value(left, right)
        return None

    def ratios(self, gold: Sequence[str], answer: Sequence[str]) -> bool | None:
        try:
            left = [expressions.read(part) for part in gold]
            right = [expressions.read(part) for part in answer]
            scale = ("fraction", left[0], right[0])
            return all(
                values.same_value(one, ("multiply", other, scale))
                for one, other in zip(left[1:], right[1:], strict=True)
            )
        except (expressions.NotRead, values.Undefined):
            return None

    def percents(self, gold: str, answer: str) -> bool | None:
        if not (gold.endswith("%") or answer.endswith("%")):
            return None
        bare_gold, bare_answer = gold.rstrip("%"), answer.rstrip("%")
        if gold.endswith("%") == answer.endswith("%"):
            return self.same(bare_gold, bare_answer)
        if self.same(bare_gold, bare_answer):
            return True
        hundredth = (
            (f"({bare_gold})/100", bare_answer) if gold.endswith("%") else (bare_gold, f"({bare_answer})/100")
        )
        return self.by_value(*hundredth)

    def regions(self, gold: str, answer: str) -> bool | None:
        """Sets of numbers given by inequalities, intervals or unions of them."""
        signed = [any(sign in text for sign in _REGION_SIGNS) for text in (gold, answer)]
        if not any(signed):
            return None
        one, other = as_region(gold), as_region(answer)
        if one is None or other is None:
            return None if all(signed) or one is other else False
        return same_region(one, other, self.same)

    def matrices(self, gold: str, answer: str) -> bool | None:
        one, other = _matrix(gold), _matrix(answer)
        if one is None and other is None:
            return None
        one, other = one or _vector(gold), other or _vector(answer)
        if one is None or other is None:
            return False
        if len(one) == 1 or len(other) == 1 or any(len(row) == 1 for row in one + other):
            one, other = [list(itertools.chain(*one))], [list(itertools.chain(*other))]
        return [len(row) for row in one] == [len(row) for row in other] and all(
            self.same(left, right)
            for left, right in zip(itertools.chain(*one), itertools.chain(*other), strict=True)
        )

    def collections(self, gold: str, answer: str) -> bool | None:
        """Lists, sets and tuples. A list without brackets has the order that the other side gives it."""
        one, other = _collection(gold), _collection(answer)
        if one is None and other is None:
            return None
        if one is None or other is None:
            kind, items = one or other or ("", ())
            if len(items) == 1 and kind in ("set", "()"):
                return self.same(items[0] if one else gold, items[0] if other else answer)
            if kind == "list":  # the same value written in several ways
                return all(self.same(item if one else gold, item if other else answer) for item in items)
            if len(split_top(answer if one else gold, _EQUALS)) > 1:  # (x, y) = (1, 2)
                return None
            return False if kind != "()" or len(items) > 1 else None
        (kind, items), (other_kind, other_items) = one, other
        if max(len(items), len(other_items)) > MAX_ITEMS:
            return False
        if "set" in (kind, other_kind) or kind == other_kind == "list":
            if {kind, other_kind} <= {"set", "list"}:
                return self.same_set(items, other_items)
            return False
        if kind != other_kind and "list" not in (kind, other_kind) and len(items) == 2:
            return False  # (a, b) and [a, b] are different intervals
        return len(items) == len(other_items) and all(map(self.same, items, other_items))

    def same_set(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        return all(any(self.same(one, other) for other in answer) for one in gold) and all(
            any(self.same(one, other) for one in gold) for other in answer
        )

    def equations(self, gold: str, answer: str) -> bool | None:
        left, right = split_top(gold, _EQUALS), split_top(answer, _EQUALS)
        if len(left) == len(right) == 1:
            return None
        if len(left) == 1:
            return self.same(gold, right[-1]) if self.is_definition(right) else False
        if len(right) == 1:
            return self.same(left[-1], answer) if self.is_definition(left) else False
        if len(left) > 2 or len(right) > 2:
            return self.is_definition(left) and self.is_definition(right) and self.same(left[-1], right[-1])
        if left[0] == right[0] and _NAME.fullmatch(left[0]):
            return self.same(left[1], right[1])
        try:
            one, other = (
                ("add", expressions.read(sides[0]), ("negative", expressions.read(sides[1])))
                for sides in (left, right)
            )
            return values.proportional(one, other)
        except expressions.NotRead:
            return len(left) == len(right) and all(map(self.same, left, right))
        except values.Undefined:
            return False

    def is_definition(self, sides: Sequence[str]) -> bool:
        """Whether a chain of equal things ends in a value: x = 5, f(x) = 2x, or 3 + 4 = 7."""
        defined = sides[1:] if _NAME.fullmatch(sides[0]) else sides
        return all(self.same(one, other) for one, other in itertools.pairwise(defined))

    def words(self, gold: str, answer: str) -> bool | None:
        one, other = _are_words(gold), _are_words(answer)
        if not one and not other:
            return None
        return one and other and _plain_words(gold) == _plain_words(answer)

    def units(self, gold: str, answer: str) -> bool | None:
        (value, unit), (other_value, other_unit) = split_unit(gold), split_unit(answer)
        if unit is None and other_unit is None and (value, other_value) == (gold, answer):
            return None
        if unit and not other_unit:
            other_value, other_unit = _cut(other_value, unit)
        elif other_unit and not unit:
            value, unit = _cut(value, other_unit)
        if unit and other_unit and unit != other_unit:
            return False
        degree = "\\degree"
        if (unit and other_value.endswith(degree)) or (other_unit and value.endswith(degree)):
            return False
        return self.same(value, other_value)

    def by_value(self, gold: str, answer: str) -> bool:
        try:
            left, right = expressions.read(gold), expressions.read(answer)
        except expressions.NotRead:
            return same_symbolically(gold, answer)
        if _INFINITE & {left, right}:
            return left == right
        degrees = [side.endswith("\\degree") for side in (gold, answer)]
        try:
            if values.same_value(left, right):
                return True
            if self.relative_tolerance and not values.symbols(left) | values.symbols(right):
                return values.near(left, right, self.relative_tolerance)
        except values.Undefined:
            return left == right
        if degrees[0] != degrees[1]:
            return self.same(gold.removesuffix("\\degree").strip(), answer.removesuffix("\\degree").strip())
        return False


def _cut(value: str, unit: str) -> tuple[str, str | None]:
    """Without a unit that stands right at the digits: 50m is 50 metres beside an answer in metres."""
    bare = value.removesuffix(unit)
    return (bare, unit) if bare != value and bare[-1:].isdigit() else (value, None)


def _clock(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match[1]), int(match[2]), int(match[3] or 0)


def _half(match: re.Match[str]) -> str:
    return match[4][0].lower()


def _plain_words(text: str) -> list[str]:
    words = [word.strip(".,'’-").casefold() for word in text.replace(",", " ").split()]
    return words[1:] if words[0] in ("the", "a", "an") and len(words) > 1 else words


def _collection(text: str) -> tuple[str, list[str]] | None:
    """(kind, items): kind is set, list, or the brackets; None for anything else."""
    if text == "\\emptyset":
        return "set", []
    text = _ELEMENTS.sub("", text, count=1)
    items = _items(text)
    if len(items) > 1:
        return "list", items
    match = _BRACKETED.fullmatch(text)
    if match is None or not _encloses(text, match[1]):
        return None
    items = _items(match[2])
    kind = {"\\{": "set", "{": "set", "\\langle": "()"}.get(match[1], match[1] + match[3])
    if (kind in ("()", "[]") or match[1] == "{") and len(items) == 1:
        return None
    return kind, items


def _items(text: str) -> list[str]:
    """The parts of a list; one with a plus-minus sign is two."""
    return [
        signed
        for item in split_top(text, _LIST)
        if item.strip()
        for signed in (_both_signs(item.strip()) if _PLUS_MINUS.search(item) else [item.strip()])
    ]


def _encloses(text: str, opening: str) -> bool:
    """Whether the first bracket closes at the end of the text and not before."""
    depth = 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and position < len(text) - 1:
                return False
    return True


def _matrix(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in split_top(match[2], _ROW) if row.strip()]
    return [[cell.strip() for cell in split_top(row, _CELL)] for row in rows]


def _vector(text: str) -> list[list[str]] | None:
    collection = _collection(text)
    return [collection[1]] if collection and collection[0] in ("()", "[]") else None


def _both_signs(text: str) -> list[str]:
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return [upper, lower]


def _are_words(text: str) -> bool:
    """Whether a text is words of a language and not a product of symbols."""
    if not _WORDS.fullmatch(text):
        return False
    words = [word.strip(".'’-").lower() for word in text.replace(",", " ").split()]
    return (
        all(len(word) > 1 or word in ("a", "i") for word in words)
        and not any(word in NO_UNITS and word not in _ALSO_WORDS for word in words)
        and (any(len(word) > 2 for word in words) or words == ["no"])
    )
