"""Numbers as people and models write them, read exactly."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from headway.verifiers.units import MEASURE

MAX_DIGITS = 4000
"""Longer numbers, and powers of ten beyond it, are not read as numbers."""

_SPACES = dict.fromkeys(map(ord, "\u2009\u202f\u00a0\u2007\u2008\u200a\u2006\u2005"), "\u2009")
_SIGNS = dict.fromkeys(map(ord, "−–—‒‐‑﹣－"), "-") | dict.fromkeys(map(ord, "﹢＋"), "+")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u2062\u2063"), "")
_TABLE = _SPACES | _SIGNS | _INVISIBLE

_GROUP = r"(?:,|\{,\}|\\,|\u2009|\\ |\\!|')"
_INTEGER = rf"(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:[eE][+-]?\d{1,5}(?![\d.])|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[+-]?\d{1,5}\s*\}|[+-]?\d{1,5}(?!\d)))"
_FRACTION = r"\\[dtc]?frac\s*(?:\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d(?!\d))"
_SLASH = r"\d+\s*/\s*\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)?\s*(?P<fraction>{_FRACTION})|(?:(?P<mixed>\d+)\s+)?(?P<slash>{_SLASH})"
    rf"|(?P<decimal>{_DECIMAL})(?P<exponent>{_EXPONENT})?)"
)
_PLAIN = re.compile(r"[+-]?\d{1,18}")
_SPACED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_DOT = r"\\dot\s*(?:\{\d\}|\d)"
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?:(?P<digits>\d+)(?:\.\.\.|\\[lc]?dots)"
    r"|(?P<fixed>\d*)(?:\\(?:overline|bar)\s*(?P<bar>\{\d+\}|\d)|\((?P<round>\d+)\)"
    rf"|(?P<dots>{_DOT}(?:\d*{_DOT})?)))"
)
_PERIOD = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,})\3+)")
_LAST = re.compile(
    rf"(?<![A-Za-z0-9_^.])(?<![_^]\{{)(?<![_^]\{{-)(?:{_FRACTION}|{_SLASH}(?![\d/])|{_DECIMAL}(?:{_EXPONENT})?)"
)
_BESIDE = re.compile(
    r"\s*(?:[,;+*/×·^±-]|,?\s*\b(?:or|and|to)\b)\s*\$?\s*"
    r"|\$?[\s,;(]*\bor\b\s*(?:(?:else|even|maybe|perhaps|possibly)\s+)?\$?\s*(?:(?P<name>[A-Za-z])\s*=\s*)?"
)
_BELONGS = re.compile(
    r"\$?(?:\s*\\?%|\s*°\w?|[A-Za-z]+\b|\s*[+*/^(√<>≤≥-]\s*[^\s.].*|\s*(?:\\?pi\b|π|\\sqrt).*|\s+(?:or|and|to)\b.*"
    rf"|\s+{MEASURE}(?![A-Za-z]))"
)
_NEGATED = re.compile(
    r"(?:\b(?:not|least|most|than|between|except|cannot|never|over|under|below|above|minus)\b|n['’]t\b|[<>≤≥≠√]|\\[lg]eq?|\\neq?|\w\("
    r"|(?:\d[A-Za-z]|\^\S+|\S/\S+|\))\s*=)[\s$({]*-?$",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """Text with every Unicode digit, minus sign and grouping space in one form."""
    if text.isascii():
        return text
    text = text.translate(_TABLE)
    return "".join(_digit(character) for character in text)


def _digit(character: str) -> str:
    if character.isascii() or unicodedata.category(character) != "Nd":
        return character
    return str(unicodedata.decimal(character))


def parse_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; None for anything else.

    Reads digits with grouping (1,234 or 1\\,234), decimals, powers of ten (1.5e3, 1.5 \\times 10^{3}), fractions
    (3/4, \\frac{3}{4}), mixed numbers (11 5/6) and repeating decimals (0.\\overline{3}, 0.(3), 0.333...).
    """
    text = plain(text).strip()
    if _PLAIN.fullmatch(text):
        return Fraction(int(text))
    if len(text) > MAX_DIGITS:
        return None
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    if match := _REPEATING.fullmatch(text):
        return _repeating(match)
    match = _NUMBER.fullmatch(text)
    return _value(match) if match else None


def last_number(text: str) -> str | None:
    """The last number in a running text, as written; exponents and indices are no numbers."""
    text = plain(text).replace("\\$", "$").replace("*", " ")
    last = None
    for last in _LAST.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    return _sign_before(text, last.start()) + last.group().rstrip(".")


def last_numbers(text: str) -> str | None:
    """The last number in a running text, together with what makes it part of something larger: numbers beside it
    (41 or 42, 6 * 7), a unit, a term that follows. None when the text denies it, bounds it or gives a multiple of
    something (not 42, at least 42, 2x = 42)."""
    text = plain(text).replace("\\$", "$").replace("**", "")
    found = list(_LAST.finditer(text))
    if not found:
        return None
    first = len(found) - 1
    while first > 0 and _is_beside(text, found[first - 1], found[first]):
        first -= 1
    start = found[first].start()
    sign = _sign_before(text, start)
    if negated(text[:start]):
        return None
    answer = sign + text[start : found[-1].end()]
    if more := _BELONGS.match(text, found[-1].end()):
        answer += more.group()
    return answer.rstrip(" .,;:!$*")


def _is_beside(text: str, left: re.Match[str], right: re.Match[str]) -> bool:
    """Whether two numbers are alternatives or parts of one thing: 41 or 42, x = 1 or x = 3, but not 2x = 6 or x = 3."""
    between = _BESIDE.fullmatch(text, left.end(), right.start())
    if between is None or (name := between["name"]) is None:
        return between is not None
    return (
        re.search(rf"(?<![\w^/)]){name}\s*=\s*-?$", text[max(0, left.start() - 100) : left.start()])
        is not None
    )


def negated(before: str) -> bool:
    """Whether what stands before a number denies or bounds it, or makes it the value of something else."""
    return _NEGATED.search(before[-100:]) is not None


def _sign_before(text: str, start: int) -> str:
    """A minus belongs to the number unless something that could be an operand stands before it."""
    before = text[:start]
    if before.endswith("$"):
        before = before.rstrip("$ \u2009")
    if not before.endswith("-"):
        return ""
    left = before[:-1]
    operand = left.rstrip()[-1:]
    return "" if left[-1:].isalnum() or (operand and operand in "0123456789)}]-") else "-"


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    if part := match["fraction"] or match["slash"]:
        numerator, denominator = _numerator_denominator(part)
        if denominator == 0:
            return None
        whole = match["whole"] or match["mixed"]
        if whole is not None and not 0 <= numerator < denominator:
            return None
        return sign * (int(whole or 0) + Fraction(numerator, denominator))
    digits = re.sub(r"[^\d.]", "", match["decimal"])
    value = Fraction(f"{digits}0" if digits.endswith(".") else digits)
    if match["exponent"]:
        power = int(re.sub(r".*?([+-]?\d+)[\s}]*$", r"\1", match["exponent"]))
        if abs(power) > MAX_DIGITS:
            return None
        value *= Fraction(10) ** power
    return sign * value


def _numerator_denominator(part: str) -> tuple[int, int]:
    numbers = re.findall(r"-?\d+", part)
    if len(numbers) == 1:  # \frac12
        numbers = list(numbers[0])
    return int(numbers[0]), int(numbers[1])


def _repeating(match: re.Match[str]) -> Fraction | None:
    """0.1\\overline{6} = (16 - 1) / 90."""
    fixed, period = match["fixed"] or "", match["bar"] or match["round"] or match["dots"]
    if not period:  # 0.1666...: what is seen to repeat
        shown = _PERIOD.fullmatch(match["digits"]) if len(match["digits"]) <= 60 else None
        if shown is None:
            return None
        fixed, period = shown[1], shown[2] or shown[3]
    period = re.sub(r"\D", "", period)
    nines = (10 ** len(period) - 1) * 10 ** len(fixed)
    value = int(match["whole"] or 0) + Fraction(int(fixed + period) - int(fixed or 0), nines)
    return -value if match["sign"] == "-" else value


_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SPELLED = {word: number for number, word in enumerate(_SMALL)} | {
    word: 10 * number for number, word in enumerate(_TENS, 2)
}
_POWERS = {"hundred": 100, "thousand": 1000, "million": 10**6}
_ONE_SPELLED = "|".join(sorted([*_SPELLED, *_POWERS], key=len, reverse=True))
_SPELLED_NUMBER = re.compile(
    rf"(?:(minus|negative)\s+)?((?:{_ONE_SPELLED})(?:(?:\s+and\s+|\s+|-)(?:{_ONE_SPELLED}))*)(?=\s|%|$)(?!\s+(?:of|or|and)\b)",
    re.IGNORECASE,
)


def unspelled(text: str) -> str:
    """Text with a number in words at its beginning ("twenty-five apples") in digits; others as they are."""
    match = _SPELLED_NUMBER.match(text)
    number = _read_words(re.findall(_ONE_SPELLED, match[2].lower())) if match else None
    if match is None or number is None:
        return text
    return f"{'-' if match[1] else ''}{number}{text[match.end() :]}"


def _read_words(words: list[str]) -> int | None:
    """The number that English number words make; None when they are several numbers, as "five six"."""
    total = below = 0
    previous = 10**9
    for word in words:
        if (power := _POWERS.get(word)) is not None:
            if power == 100:
                if not 0 < below < 10:
                    return None
                below *= 100
                previous = 100
                continue
            if not below:
                return None
            total, below, previous = total + below * power, 0, 10**9
            continue
        value = _SPELLED[word]
        smallest_before = 100 if value >= 10 else 20
        if previous < smallest_before or (value == 0 and len(words) > 1):
            return None
        below += value
        previous = value
    return total + below
