"""Answers of several parts: lists, sets, tuples, matrices, and functions in pieces."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from headway.verifiers.canonical import split_top
from headway.verifiers.units import NO_UNITS

NAME = re.compile(
    r"\\?(?:\\Delta\s*)?[A-Za-z]+(?:_\{?\w+(?:,\w+)*\}?)?'*(?:\([A-Za-z](?:,[A-Za-z])*\))?"  # x, x_1, Area, f(x)
    r"|[A-Za-wyz](?:\^\{-1\})?'*\(-?\w+\)"  # f(2), P(A)
    r"|\([A-Za-z](?:,[A-Za-z])+\)"  # (x,y)
    r"|(?:\\?Pr?|E|Var)\s*[(\[][^()\[\]]*(?:\([^()]*\)[^()\[\]]*)*[)\]]"  # P(X > 2)
    r"|m?\\angle\s*[A-Z]{1,3}|\|[A-Z]\w*\||\\(?:det|dim|sin|cos|tan)\s*\(?(?:[A-Z]|\\[A-Za-z]+)\)?|\\frac\{d\w*\}\{d\w\}"
)
"""What may stand before an equals sign and only names what stands behind it."""
_NAME_IN_WORDS = re.compile(r"[A-Za-z]{2,}(?: (?:[A-Za-z]{2,}|a))*")

_COMMA = re.compile(r"\s*(?:,|;|\bor\b|\band\b)\s*(?:(?:or|and)\b\s*)?")
_ALTERNATIVES = re.compile(r"\s*,?\s*\bor\b\s*")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)")
_ROW = re.compile(r"\\\\")
_CELL = re.compile(r"&")
_ENCLOSED = re.compile(r"(\\\{|\{|\(|\[)(.*?)(\\\}|\}|\)|\])", re.DOTALL)
_CLOSING = {"\\{": "\\}", "{": "}", "(": ")", "[": "]"}
_ELEMENTS = re.compile(r"([A-Za-z]|\([A-Za-z](?:,[A-Za-z])+\))\s*\\in\s*(?=\\\{)")
_POINT = re.compile(
    r"(?:[A-Z]|(?:the )?(?:ordered )?(?:point|vertex|center|centre|pair|triple|vector))\s*(?=\()"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_MATRIX = re.compile(
    r"(.*?)\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\2\}", re.DOTALL
)
_TRANSPOSED = re.compile(r"\^(?:\{\s*(?:T|\\top|\\mathsf T)\s*\}|T|\\top)$")
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_CONDITION = re.compile(r"^\s*(?:if|for|when|where)?\s*")


class Collection(NamedTuple):
    kind: str
    """set; list, which has no brackets; () [] (] [), its brackets."""
    items: list[str]
    names: tuple[str, ...] = ()
    """Of the items, where each has one: x = 1, y = 2."""

    def letters(self) -> set[str]:
        """The names without their indices."""
        return {name.partition("_")[0] for name in self.names}


Matrix = list[list[str]]


def definition(text: str) -> tuple[str, str] | None:
    """(name, value) of x = 5, and of 5 = x; None for any other text."""
    sides = equals(text)
    if len(sides) != 2 or not all(sides):
        return None
    left, right = sides
    if is_name(left):
        return left, right
    return (right, left) if is_name(right) and len(split_list(left)) == 1 else None


def is_name(text: str) -> bool:
    if NAME.fullmatch(text):
        return not text.startswith("(") or text == f"({','.join(sorted(text[1:-1].split(',')))})"
    return _NAME_IN_WORDS.fullmatch(text) is not None and not any(
        word in NO_UNITS for word in text.lower().split()
    )


def equals(text: str) -> list[str]:
    """The sides of an equation; one for anything else."""
    return [side.strip() for side in split_top(text, _EQUALS)]


def collection(text: str) -> Collection | None:
    """None for a text that is one thing."""
    if text == "\\emptyset":
        return Collection("set", [])
    if (elements := _ELEMENTS.match(text)) and is_name(elements[1]):
        text = text[elements.end() :]
    if pieces := _CASES.fullmatch(text):
        rows = [row.strip() for row in split_top(pieces[1], _ROW) if row.strip()]
        return None if any("&" in row for row in rows) else Collection("list", rows)
    if found := _in_brackets(_POINT.sub("", text, count=1)):
        return found
    items = split_list(text)
    if len(items) < 2:
        return None
    either = len(split_top(text, _ALTERNATIVES)) > 1 or len(items) > len(split_top(text, _COMMA))
    return _assignments(items, either) or Collection("set" if either else "list", items)


def _in_brackets(text: str) -> Collection | None:
    match = _ENCLOSED.fullmatch(text)
    if match is None or not _encloses(text):
        return None
    opening, inner, closing = match.groups()
    items = split_list(inner)
    if opening in ("\\{", "{"):
        is_set = closing == _CLOSING[opening] and (opening == "\\{" or len(items) > 1)
        return Collection("set", items) if is_set else None
    if closing not in (")", "]") or len(items) < 2 or (closing != _CLOSING[opening] and len(items) != 2):
        return None
    return Collection(opening + closing, items)


def split_list(text: str) -> list[str]:
    """The parts of a list; one with a plus-minus sign is two."""
    parts = (item.strip() for item in split_top(text, _COMMA))
    return [
        signed
        for item in parts
        if item
        for signed in (_both_signs(item) if _PLUS_MINUS.search(item) else [item])
    ]


def is_list(text: str) -> bool:
    return len(split_list(text)) > 1


def _assignments(items: list[str], either: bool) -> Collection | None:
    """The values of x = 1, y = 2 make up a point, in the order of x, y, z; several values of one letter are
    alternatives."""
    pairs = [pair for item in items if (pair := definition(item))]
    if len(pairs) < len(items):
        return None
    if {name for name, _ in pairs} <= {"x", "y", "z"}:
        pairs.sort()
    found = Collection("()", [value for _, value in pairs], tuple(name for name, _ in pairs))
    return found._replace(kind="set") if either or len(found.letters()) == 1 else found


def matrix(text: str) -> Matrix | None:
    """Rows of cells, without the brackets around them; a factor before the matrix is multiplied in."""
    while _encloses(text) and text[:1] in ("(", "[") and "\\begin" in text[:8]:
        text = text[1:-1].strip()
    match = _MATRIX.fullmatch(text)
    if match is None:
        outer = collection(text)
        rows = [collection(item) for item in outer.items] if outer and outer.kind == "[]" else []
        return (
            [row.items for row in rows if row]
            if rows and all(row and row.kind == "[]" for row in rows)
            else None
        )
    factor = match[1].strip().removesuffix("*")
    rows = [
        [cell.strip() for cell in split_top(row, _CELL)] for row in split_top(match[3], _ROW) if row.strip()
    ]
    if factor == "-":
        factor = "-1"
    return [[f"({factor})*({cell})" for cell in row] for row in rows] if factor else rows


def vector(text: str) -> Matrix | None:
    """A row in round or square brackets."""
    found = collection(_TRANSPOSED.sub("", text))
    return [found.items] if found and found.kind in ("()", "[]") else None


def is_vector(rows: Matrix) -> bool:
    return len(rows) == 1 or all(len(row) == 1 for row in rows)


def flat(rows: Matrix) -> list[str]:
    return list(itertools.chain(*rows))


def pieces(text: str) -> list[tuple[str, str]] | None:
    """(value, condition) of a function that is defined in pieces."""
    match = _CASES.fullmatch(text)
    rows = [split_top(row, _CELL) for row in split_top(match[1], _ROW) if row.strip()] if match else []
    if not rows or any(len(row) != 2 for row in rows):
        return None
    return [(value.strip(" ,"), _CONDITION.sub("", condition).strip(" ,.")) for value, condition in rows]


def _encloses(text: str) -> bool:
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


def _both_signs(text: str) -> list[str]:
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return [upper, lower]
