"""Answers whose digits are no plain numbers: clock times, dates, numbers with a base, residues, lettered choices."""

from __future__ import annotations

import re
from typing import NamedTuple

_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:([ap])\.?m\.?)?", re.IGNORECASE)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
_BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?\s*(\d{1,2}|[a-z]{3,8})\s*\}?")
_ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
_SLASHED = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
_ORDINAL = r"(\d{1,2})(?:st|nd|rd|th)?"
_MONTH_FIRST = re.compile(rf"{_MONTH}\s*{_ORDINAL}(?:\s*,\s*|\s+)?(\d{{4}})?", re.IGNORECASE)
_DAY_FIRST = re.compile(
    rf"(?:the\s+)?{_ORDINAL}\s*(?:of\s+)?{_MONTH}(?:\s*,\s*|\s+)?(\d{{4}})?", re.IGNORECASE
)
_RESIDUE = re.compile(
    r"(?:[A-Za-z]\s*\\equiv\s*)?(.*?\S)\s*(?:\(\s*\\?p?mod\s*(\d+)\s*\)|\\?[pb]?mod\s*(?:\{\s*(\d+)\s*\}|(\d+)))"
)
_CHOICE = re.compile(r"[(\[]?([A-J])[)\]]?")
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:[(\[]([A-J])[)\]]|([A-J])(?:[.:)]|$))(?!\s*(?:[,;/]|or\b|and\b|nor\b|not\b))(?!.*(?<![A-Za-z])[A-J](?![A-Za-z]))\s*.*",
    re.IGNORECASE,
)


_HALF_DAY = 12 * 3600


class Clock(NamedTuple):
    seconds: int
    half: str
    """a, p, or nothing where the time does not say it."""
    is_certain: bool
    """No ratio looks like this."""

    def same(self, other: Clock) -> bool:
        """3:30 p.m. is 15:30, and 3:30 where no half of the day is named."""
        if bool(self.half) == bool(other.half):
            return (self.seconds, self.half) == (other.seconds, other.half)
        bare = other if self.half else self
        apart = abs(self.seconds - other.seconds)
        return apart == 0 or (apart == _HALF_DAY and bare.seconds <= _HALF_DAY + 3599)


class Based(NamedTuple):
    digits: str
    base: int


def clock(text: str) -> Clock | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hours, minutes, seconds = int(match[1]), int(match[2]), int(match[3] or 0)
    half = (match[4] or "").lower()
    if hours > 24 or (half and not 1 <= hours <= 12):
        return None
    if half:
        hours = hours % 12 + 12 * (half == "p")
    return Clock(
        hours * 3600 + minutes * 60 + seconds, half, bool(half) or match[2][0] == "0" or bool(match[3])
    )


def date(text: str) -> tuple[int | str, ...] | None:
    """(year, month, day), year 0 where there is none; what 5/6/2024 names first is not known, and stays first."""
    if iso := _ISO.fullmatch(text):
        return tuple(map(int, iso.groups()))
    if slashed := _SLASHED.fullmatch(text):
        return ("slashed", *map(int, slashed.groups()))
    if match := _MONTH_FIRST.fullmatch(text):
        month, day, year = match.groups()
    elif match := _DAY_FIRST.fullmatch(text):
        day, month, year = match.groups()
    else:
        return None
    return int(year or 0), _MONTHS.index(month[:3].lower()) + 1, int(day)


def based(text: str) -> Based | None:
    """Digits with their base as an index: 1011_2."""
    match = _BASE.fullmatch(text)
    base = (_BASES.get(match[2]) or (int(match[2]) if match[2].isdigit() else 0)) if match else 0
    if (
        match is None or not 2 <= base <= 36 or not (match[1][0].isdigit() or len(match[1]) > 1)
    ):  # a_1 is a symbol
        return None
    if any(int(digit, 36) >= base for digit in match[1]):
        return None
    return Based(match[1].lstrip("0").upper() or "0", base)


def residue(text: str) -> tuple[str, int] | None:
    """(value, modulus) of 3 mod 7, and of x \\equiv 3 mod 7."""
    match = _RESIDUE.fullmatch(text)
    return (match[1], int(match[2] or match[3] or match[4])) if match else None


def letter(text: str) -> str | None:
    """The choice that a gold is."""
    match = _CHOICE.fullmatch(text)
    return match[1] if match else None


def chosen(text: str) -> str | None:
    """The only choice that an answer names."""
    match = _CHOSEN.fullmatch(text)
    return (match[1] or match[2]).upper() if match else None
