"""The last resort: notations that the strict reader does not know go to math-verify, one whole answer at a time."""

from __future__ import annotations

import logging
import re
from typing import Any

MAX_LENGTH = 300
MAX_DEPTH = 12

_UNFINISHED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|frac\{d)(?![A-Za-z])")
_WANTED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|cup|cap|setminus)(?![A-Za-z])")
_ALLOWED = re.compile(r"[A-Za-z0-9 \\{}()\[\]|^_+\-*/=<>!.,:;&'%]+")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\{?[^{}^]{0,3}\d{4,}|\{[^{}]*!)|\d{3,}\s*[})]*\s*!|!\s*!|\d{25,}|__")
_PIECES = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\d+")


def same_symbolically(gold: str, answer: str) -> bool:
    """Whether math-verify finds two canonical LaTeX answers with sums, integrals or operations on sets equal. Its own time limits are off (they need signals,
    which only a main thread gets): the limit is the pool's. It never sees more than these two texts, and none that
    leaves a sum, product, integral or limit to do which the gold does not have."""
    if not _WANTED.search(gold):
        return False
    if _UNFINISHED.search(answer) and not _UNFINISHED.search(gold):
        return False
    if not _is_safe(gold) or not _is_safe(answer):
        return False
    one, other = _parse(gold), _parse(answer)
    if one is None or other is None:
        return False
    from math_verify import verify

    return bool(verify(one, other, timeout_seconds=None))


def _is_safe(text: str) -> bool:
    """Whether a text may go to a symbolic parser: LaTeX of moderate size, without code or huge powers."""
    if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text) or _TOWER.search(text):
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest <= MAX_DEPTH


def _parse(text: str) -> Any | None:
    """The sympy object of a whole text; None when it is not read, or only its beginning is."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time limits are off
    from math_verify import LatexExtractionConfig, parse
    from sympy import srepr

    config = LatexExtractionConfig(boxed_match_priority=0)
    parsed = parse(
        f"\\boxed{{{text}}}",
        extraction_config=[config],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  (None: off)
    )
    if not parsed or isinstance(parsed[0], str):
        return None
    seen = srepr(parsed[0])
    return parsed[0] if all(piece in seen for piece in _PIECES.findall(text)) else None
