"""The answer is a text that a regular expression describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.tags import answer_text
from headway.verifiers.verdict import Verdict, correct, wrong


def regex(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the expression `pattern` of the context (else the gold), in Python's syntax, matches.

    `match`: "full" (default) or "search". `on`: "answer" (default; the last `<answer>` section, box, final statement
    or line after the reasoning) or "response" (all of it, but for white space at its end). `dotall`: whether `.`
    matches line ends (default false). The extracted answer is what was matched, else what was looked at. Takes as
    long as the pattern makes it take: limits are the pool's. Raises `DataError`.
    """
    search = _option(context, "match", ("full", "search")) == "search"
    whole = _option(context, "on", ("answer", "response")) == "response"
    pattern = _compiled(context, gold)
    text = response.rstrip() if whole else answer_text(response)
    if text is None:
        return wrong(None, "no_answer")
    found = pattern.search(text) if search else pattern.fullmatch(text)
    return correct(found.group()) if found else wrong(text)


def _compiled(context: Mapping[str, Any], gold: Any) -> re.Pattern[str]:
    key, value = "pattern", context.get("pattern")
    if value is None:
        key, value = "gold", gold
    if not isinstance(value, str) or not value:
        raise DataError(f"{key} {value!r} is not a regular expression")
    dotall = context.get("dotall")
    if not isinstance(dotall, bool | None):
        raise DataError(f"dotall {dotall!r} is neither true nor false")
    try:
        return re.compile(value, re.DOTALL if dotall else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise DataError(f"{key} {value!r} is not a regular expression: {error}") from error


def _option(context: Mapping[str, Any], key: str, values: tuple[str, ...]) -> str:
    """The value of a key, by default the first of those that it may have."""
    value = context.get(key)
    if value is None:
        return values[0]
    if value not in values:
        raise DataError(f"{key} {value!r} is none of {', '.join(values)}")
    return value
