"""The answer is a text that must match."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import final_text, gold_answer
from headway.verifiers.verdict import Verdict, correct, wrong

_CHOICE = re.compile(r"\(([A-Za-z])\)|([A-Za-z])[.)]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def gold_text(gold: Any) -> str:
    """A gold as text. Raises `DataError` when it is not a string or a finite number, or holds no answer."""
    if isinstance(gold, float) and gold == gold and abs(gold) != float("inf"):
        gold = str(int(gold)) if gold.is_integer() and abs(gold) < 1e15 else repr(gold)
    if isinstance(gold, int):
        gold = str(gold)
    if not isinstance(gold, str):
        raise DataError(f"gold answer {gold!r} is neither text nor a finite number")
    answer = gold_answer(gold)
    if answer is None:
        raise DataError(f"no answer in gold {gold!r}: it is empty, or its last box is empty or unfinished")
    return answer


def exact(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the extracted answer is the gold, after Unicode NFKC and with white space collapsed.

    The answer: the last box after the reasoning, else what follows "####" or "answer is", else the last line.
    """
    expected = gold_text(gold)
    answer = final_text(response)
    if answer is None:
        return wrong(None, "no_answer")
    return correct(answer) if normal(answer) == normal(expected) else wrong(answer)


def normal(text: str) -> str:
    """One form of a text: compatibility characters, white space, and the brackets of a lettered choice."""
    text = " ".join(unicodedata.normalize("NFKC", _TEXT.sub(r"\1", text)).strip(" \t\n$").split())
    choice = _CHOICE.fullmatch(text)
    return (choice[1] or choice[2]) if choice else text
