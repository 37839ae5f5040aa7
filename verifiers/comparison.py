"""Whether two canonical answers mean the same, from the cheap to the costly."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from headway.verifiers import expressions, lists, notations, values
from headway.verifiers.canonical import split_top
from headway.verifiers.numbers import parse_number
from headway.verifiers.regions import RELATION, as_region, same_relation, says_region
from headway.verifiers.symbolic import same_symbolically
from headway.verifiers.units import NO_UNITS, Unit, cut_unit, split_unit

MAX_DEPTH = 40
"""Deepest nesting of lists, names and units that is compared."""
MAX_ITEMS = 64
"""Longer lists are compared as texts only."""

_COLON = re.compile(r":|\bto\b")
_DEGREE = "\\degree"
_APPROXIMATELY = "\\approx"
_RADIAN: Unit = frozenset({("radian", 1)})
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.-]*(?:[\s,]+[A-Za-z][A-Za-z'’.-]*)*[.!]?")
_WORDS_AFTER_ALL = frozenset({
    "yes", "no", "not", "none", "true", "false", "neither", "both", "either", "undefined", "max", "from", "to", "by",
    "at", "in", "more", "less", "most", "least", "half", "twice", "double", "triple",
})  # fmt: skip
_INFINITE = {("constant", "infinity"), ("negative", ("constant", "infinity"))}
_FUNCTION_OF_X = re.compile(r"y|[fgh]\(x\)")


class Comparison:
    """Its rules decide (True, False) or do not apply (None), in their order."""

    def __init__(self, relative_tolerance: Fraction) -> None:
        self.relative_tolerance = relative_tolerance
        self.depth = 0
        self.rules: tuple[Callable[[str, str], bool | None], ...] = (
            self.numbers,
            self.approximations,
            self.choices,
            self.dates_and_times,
            self.bases,
            self.residues,
            self.definitions,
            self.ratios,
            self.percents,
            self.matrices,
            self.pieces,
            self.relations,
            self.collections,
            self.equations,
            self.words,
            self.units,
        )

    def same(self, gold: str, answer: str) -> bool:
        """Whether two canonical texts mean the same. Raises `expressions.TooLarge`."""
        if not gold or not answer:
            return False
        if gold == answer:
            return True
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise expressions.TooLarge
        decided = next((verdict for rule in self.rules if (verdict := rule(gold, answer)) is not None), None)
        if decided is None:
            decided = self.by_value(gold, answer)
        self.depth -= 1
        return decided

    def all_same(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def numbers(self, gold: str, answer: str) -> bool | None:
        if "," in gold or "," in answer:  # what grouped digits is gone; what is left separates
            return None
        one, other = parse_number(gold), parse_number(answer)
        if one is None or other is None:
            return None
        return abs(one - other) <= self.relative_tolerance * abs(one)

    def approximations(self, gold: str, answer: str) -> bool | None:
        """37/3 \\approx 12.33 is 37/3, when the number behind the sign is a rounding of what stands before it."""
        sides = [text.partition(_APPROXIMATELY) for text in (gold, answer)]
        if not any(sign for _, sign, _ in sides):
            return None
        left, right = (_exact(*side) for side in sides)
        return left is not None and right is not None and self.same(left, right)

    def choices(self, gold: str, answer: str) -> bool | None:
        letter = notations.letter(gold)
        chosen = notations.chosen(answer) if letter else None
        return letter == chosen if letter and chosen else None

    def dates_and_times(self, gold: str, answer: str) -> bool | None:
        dates = notations.date(gold), notations.date(answer)
        if any(dates):
            return dates[0] == dates[1]
        times = notations.clock(gold), notations.clock(answer)
        if times[0] and times[1]:
            return times[0].same(times[1])
        return False if any(time and time.is_certain for time in times) else None

    def bases(self, gold: str, answer: str) -> bool | None:
        one, other = notations.based(gold), notations.based(answer)
        return one == other if one or other else None

    def residues(self, gold: str, answer: str) -> bool | None:
        one, other = notations.residue(gold), notations.residue(answer)
        if other is None:
            return None if one is None else False
        value, modulus = other
        if one is None:  # 2 mod 5 may stand for 2, and 7 mod 5 for nothing else
            number = parse_number(value)
            return number is not None and 0 <= number < modulus and self.same(gold, value)
        turns = f"(({one[0]})-({value}))/{modulus}"
        return one[1] == modulus and self.by_value(f"\\lfloor{turns}\\rfloor", turns)

    def definitions(self, gold: str, answer: str) -> bool | None:
        """x = 5 beside x = 5 or beside 5."""
        one, other = lists.definition(gold), lists.definition(answer)
        if one and other:
            alike = one[0] == other[0] or all(_FUNCTION_OF_X.fullmatch(name) for name, _ in (one, other))
            return self.same(one[1], other[1]) if alike else None
        bare = answer if one else gold
        if not (one or other) or len(lists.equals(bare)) > 1:
            return None
        return self.same(one[1], answer) if one else self.same(gold, other[1] if other else answer)

    def ratios(self, gold: str, answer: str) -> bool | None:
        parts = split_top(gold, _COLON), split_top(answer, _COLON)
        sizes = len(parts[0]), len(parts[1])
        if ":" not in gold + answer or max(sizes) == 1:
            return None
        if sizes[0] != sizes[1]:
            if set(sizes) != {1, 2}:
                return False
            left, right = ("/".join(f"({side})" for side in part) for part in parts)
            return self.by_value(left, right)
        try:
            left, right = ([expressions.read(side) for side in part] for part in parts)
            scale = ("fraction", left[0], right[0])
            return all(
                values.same_value(one, ("multiply", other, scale))
                for one, other in zip(left[1:], right[1:], strict=True)
            )
        except (expressions.NotRead, values.Undefined):
            return None

    def percents(self, gold: str, answer: str) -> bool | None:
        if not (gold.endswith("%") or answer.endswith("%")) or lists.is_list(gold) or lists.is_list(answer):
            return None
        bare_gold, bare_answer = gold.rstrip("%"), answer.rstrip("%")
        if gold.endswith("%") == answer.endswith("%"):
            return self.same(bare_gold, bare_answer)
        bare = answer if gold.endswith("%") else gold
        if split_unit(bare)[1] or bare.endswith(_DEGREE):
            return False
        if self.same(bare_gold, bare_answer):
            return True
        hundredth = (
            (f"({bare_gold})/100", bare_answer) if gold.endswith("%") else (bare_gold, f"({bare_answer})/100")
        )
        return self.by_value(*hundredth)

    def relations(self, gold: str, answer: str) -> bool | None:
        """Sets of numbers given by inequalities, intervals or unions of them; inequalities in several unknowns."""
        if not (says_region(gold) or says_region(answer)):
            return None
        one, other = as_region(gold), as_region(answer)
        if one and other:
            return one.same(other, self.same)
        signed = [RELATION.search(text) is not None for text in (gold, answer)]
        if not all(signed):
            return False if one or other or any(signed) else None
        return (one is None or not one.is_numeric()) and same_relation(gold, answer, self.same)

    def matrices(self, gold: str, answer: str) -> bool | None:
        one, other = lists.matrix(gold), lists.matrix(answer)
        if one is None and other is None:
            return None
        one, other = one or lists.vector(gold), other or lists.vector(answer)
        if one is None or other is None:
            return False
        if lists.is_vector(one) and lists.is_vector(other):
            return self.all_same(lists.flat(one), lists.flat(other))
        return len(one) == len(other) and all(map(self.all_same, one, other))

    def pieces(self, gold: str, answer: str) -> bool | None:
        one, other = lists.pieces(gold), lists.pieces(answer)
        if one is None and other is None:
            return None
        if one is None or other is None or len(one) != len(other):
            return False
        return all(any(all(map(self.same, piece, candidate)) for candidate in other) for piece in one)

    def collections(self, gold: str, answer: str) -> bool | None:
        """Lists, sets and tuples. A list without brackets has the order that the other side gives it."""
        one, other = lists.collection(gold), lists.collection(answer)
        if one is None or other is None:
            return self.one_collection(gold, answer, one, other)
        if max(len(one.items), len(other.items)) > MAX_ITEMS:
            return False
        if one.names and other.names:
            if one.letters() != other.letters():
                return False
            if sorted(one.names) == sorted(other.names) and len(set(one.names)) == len(one.names):
                values_by_name = dict(zip(other.names, other.items, strict=True))
                return all(
                    self.same(item, values_by_name[name])
                    for name, item in zip(one.names, one.items, strict=True)
                )
        kinds = {one.kind, other.kind}
        if "set" in kinds or kinds == {"list"}:
            if max(len(one.letters()), len(other.letters())) > 1:  # x = 2 or y = 3 is no set of two numbers
                return False
            return kinds <= {"set", "list"} and self.same_set(one.items, other.items)
        are_intervals = (
            len(one.items) == 2 and len(kinds) == 2 and ("list" not in kinds or kinds & {"(]", "[)"})
        )
        return not are_intervals and self.all_same(one.items, other.items)

    def one_collection(
        self, gold: str, answer: str, one: lists.Collection | None, other: lists.Collection | None
    ) -> bool | None:
        found, bare = one or other, answer if one else gold
        if found is None:
            return None

        def all_same() -> bool:
            return all(self.same(item if one else gold, item if other else answer) for item in found.items)

        if not (gold if one else answer).startswith(("(", "[", "{", "\\")) and found.kind == "()":
            return None  # C(5,2) could be a point, or a number
        if len(found.items) == 1 and found.kind in ("set", "()"):
            return all_same()
        if found.kind in ("list", "set") and found.items:  # one value, written in several ways
            return len(set(found.names)) < 2 and all_same()
        if len(lists.equals(bare)) > 1:
            return None
        return False if found.kind != "()" or len(found.items) > 1 else None

    def same_set(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        return all(any(self.same(one, other) for other in answer) for one in gold) and all(
            any(self.same(one, other) for one in gold) for other in answer
        )

    def equations(self, gold: str, answer: str) -> bool | None:
        left, right = lists.equals(gold), lists.equals(answer)
        if len(left) == len(right) == 1:
            return None
        if len(left) == 1:
            exact = _exact(right[0], "=", right[1]) if len(right) == 2 else None  # 5/18 = 0.278
            return self.same(gold, exact) if exact else self.is_chain(right) and self.same(gold, right[-1])
        if len(right) == 1:
            return self.is_chain(left) and self.same(left[-1], answer)
        if len(left) > 2 or len(right) > 2:
            return self.is_chain(left) and self.is_chain(right) and self.same(left[-1], right[-1])
        try:
            one, other = (
                ("add", expressions.read(sides[0]), ("negative", expressions.read(sides[1])))
                for sides in (left, right)
            )
            return values.proportional(one, other)
        except expressions.NotRead:
            return self.all_same(left, right)
        except values.Undefined:
            return False

    def is_chain(self, sides: Sequence[str]) -> bool:
        """Whether a chain of equal things ends in a value: x = 10/2 = 5, or 3 + 4 = 7."""
        defined = sides[1:] if lists.is_name(sides[0]) else sides
        return all(itertools.starmap(self.same, itertools.pairwise(defined)))

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
            other_value, other_unit = cut_unit(other_value, unit)
        elif other_unit and not unit:
            value, unit = cut_unit(value, other_unit)
        in_degrees = value.endswith(_DEGREE), other_value.endswith(_DEGREE)
        if any(in_degrees) and _RADIAN in (unit, other_unit):
            return not all(in_degrees) and self.by_value(value, other_value, bare_degrees=False)
        if (unit and in_degrees[1]) or (other_unit and in_degrees[0]):
            return False
        if (
            unit
            and other_unit
            and unit != other_unit
            and not _is_general(unit)
            and not _is_general(other_unit)
        ):
            return False
        return self.same(value, other_value)

    def by_value(self, gold: str, answer: str, bare_degrees: bool = True) -> bool:
        if gold.endswith("+C") and answer.endswith("+c"):
            answer = answer[:-1] + "C"  # the constant of integration
        try:
            left, right = expressions.read(gold), expressions.read(answer)
        except expressions.NotRead:
            return same_symbolically(gold, answer)
        if _INFINITE & {left, right}:
            return left == right
        try:
            if values.same_value(left, right):
                return True
            if self.relative_tolerance and not values.symbols(left) | values.symbols(right):
                return values.near(left, right, self.relative_tolerance)
        except values.Undefined:
            return left == right
        if (
            bare_degrees
            and "\\pi" not in gold + answer
            and gold.endswith(_DEGREE) != answer.endswith(_DEGREE)
        ):
            return self.same(gold.removesuffix(_DEGREE).strip(), answer.removesuffix(_DEGREE).strip())
        return False


def _exact(exact: str, sign: str, rounded: str) -> str | None:
    """The exact side of an approximation, or of a text that is none; None when the other side is no rounding of it."""
    exact, rounded = exact.strip(), rounded.strip()
    if not sign or not rounded:
        return exact
    if not exact or lists.is_name(exact):
        return rounded
    percent = Fraction(1, 100 if rounded.endswith("%") else 1)
    rounded, _ = split_unit(rounded.removesuffix("%"))
    number = parse_number(rounded)
    if number is None:
        return None
    last_place = percent / 10 ** len(rounded.partition(".")[2])
    try:
        is_rounding = values.is_rounding(expressions.read(split_unit(exact)[0]), number * percent, last_place)
    except (expressions.NotRead, values.Undefined):
        return None
    return exact if is_rounding else None


def _is_general(unit: Unit) -> bool:
    """Square units are any area."""
    return {name for name, _ in unit} == {"unit"}


def _plain_words(text: str) -> list[str]:
    words = [word.strip(".,'’!-").casefold() for word in text.replace(",", " ").split()]
    return words[1:] if words[0] in ("the", "a", "an") and len(words) > 1 else words


def _are_words(text: str) -> bool:
    """Whether a text is words of a language and not a product of symbols."""
    if not _WORDS.fullmatch(text):
        return False
    words = [word.strip(".'’!-").lower() for word in text.replace(",", " ").split()]
    return (
        all(len(word) > 1 or word in ("a", "i") for word in words)
        and not any(word in NO_UNITS and word not in _WORDS_AFTER_ALL for word in words)
        and (any(len(word) > 2 for word in words) or words == ["no"])
    )
