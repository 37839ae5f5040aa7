"""Rows to learn from without sampling: preference pairs, labelled answers, steps of answers, and demonstrations.

Every kind has the columns that public datasets of it have. A prompt is a text or chat messages; an answer is always
one text, the last message of its conversation.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headway.core.datasets import Row, read_rows
from headway.core.errors import DataError
from headway.core.prompts import Message, content_of

Content = str | tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers to one prompt, of which one is preferred."""

    prompt: Content
    chosen: str
    rejected: str
    margin: float = 0.0
    """At least 0: by how much, in units of a reward model's score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """One answer that is desirable or not."""

    prompt: Content
    completion: str
    label: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepwise:
    """One answer as steps, each right or not. The answer is the steps one after another, nothing between them."""

    prompt: Content
    steps: tuple[str, ...]
    labels: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """A prompt and the answer to learn."""

    prompt: Content
    completion: str


class _HasPrompt(Protocol):
    @property
    def prompt(self) -> Content: ...


R = TypeVar("R")
P = TypeVar("P", bound=_HasPrompt)


def read_pairs(source: str) -> tuple[Pair, ...]:
    """Rows with `chosen` and `rejected`, and `prompt` unless those two are whole conversations, whose common beginning
    it then is; optionally `margin`. `source`: as for `datasets.read_rows`. Raises `DataError`."""
    return _read(source, _pair)


def read_labelled(source: str) -> tuple[Labelled, ...]:
    """Rows with `prompt`, `completion` and `label` (true or false). Raises `DataError`."""
    return _read(source, _labelled)


def read_stepwise(source: str) -> tuple[Stepwise, ...]:
    """Rows with `prompt`, `completions` (texts of the steps) and `labels` (true or false each). Raises `DataError`."""
    return _read(source, _stepwise)


def read_supervised(source: str) -> tuple[Supervised, ...]:
    """Rows with `prompt` and `completion` or `answer`, or with `messages`, of which the last one is the answer.
    Raises `DataError`."""
    return _read(source, _supervised)


def split_by_prompt(
    rows: Sequence[P], held_out_share: float, seed: int, *, needed: bool = True
) -> tuple[list[P], list[P]]:
    """(rows to train on, rows held out), each in the order given. Which side a row is on is decided by a hash of its
    prompt and the seed: all rows of a prompt are together, and adding, removing or shuffling rows moves no other row.

    Prompts are the same when they differ in white space around them only, and a text is the same as one message of
    the user. About `held_out_share` of the prompts are held out. When a side would be empty that should not be,
    raises `DataError`; or holds nothing out, if that is not `needed`.
    """
    if not 0.0 <= held_out_share < 1.0:
        raise ValueError(f"held_out_share must be in [0, 1), not {held_out_share}")
    train: list[P] = []
    held_out: list[P] = []
    for row in rows:
        (held_out if _place(row.prompt, seed) < held_out_share else train).append(row)
    if rows and not needed and not (train and held_out):
        return list(rows), []
    if not train or (held_out_share > 0.0 and not held_out):
        num_prompts = len({_identity(row.prompt) for row in rows})
        raise DataError(
            f"of {num_prompts} different prompts {'all' if rows and not train else 'none'} would be held out with a share of "
            f"{held_out_share:g} and seed {seed}; use more prompts, another share or another seed"
        )
    return train, held_out


def _identity(prompt: Content) -> str:
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    return json.dumps([[message["role"], message["content"].strip()] for message in messages])


def _place(prompt: Content, seed: int) -> float:
    """In [0, 1), uniform over prompts."""
    found = hashlib.blake2b(f"{seed}/{_identity(prompt)}".encode(), digest_size=8)
    return int.from_bytes(found.digest(), "big") / 2**64


# ---- rows --------------------------------------------------------------------------------------------------


def _read(source: str, make: Callable[[Row, str], R]) -> tuple[R, ...]:
    rows = tuple(make(_filled(row), where) for where, row in read_rows(source))
    if not rows:
        raise DataError(f"{source} holds no rows; it needs at least one")
    return rows


def _filled(row: Row) -> Row:
    """Without the fields that have no value: a Parquet file has every column in every row."""
    return {name: value for name, value in row.items() if value is not None}


def _pair(row: Row, where: str) -> Pair:
    _require(row, where, "chosen", "rejected")
    if "prompt" in row:
        prompt = content_of(row["prompt"], where=f"{where}: prompt")
        chosen, rejected = (_answer(row[name], prompt, f"{where}: {name}") for name in ("chosen", "rejected"))
    else:
        prompt, chosen, rejected = _implicit_prompt(row["chosen"], row["rejected"], where)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, {_short(chosen)}; leave the row out")
    margin = row.get("margin", 0.0)
    if (
        isinstance(margin, bool)
        or not isinstance(margin, int | float)
        or not 0.0 <= margin <= sys.float_info.max
    ):
        raise DataError(f"{where}: margin must be a number of at least 0, not {_short(margin)}")
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, margin=float(margin))


def _labelled(row: Row, where: str) -> Labelled:
    _require(row, where, "prompt", "completion", "label")
    prompt = content_of(row["prompt"], where=f"{where}: prompt")
    return Labelled(
        prompt=prompt,
        completion=_answer(row["completion"], prompt, f"{where}: completion"),
        label=_bool(row["label"], f"{where}: label"),
    )


def _stepwise(row: Row, where: str) -> Stepwise:
    _require(row, where, "prompt", "completions", "labels")
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or not steps or len(steps) != len(labels):
        raise DataError(
            f"{where}: completions and labels must be lists of the same length, one entry per step, not "
            f"{_short(steps)} and {_short(labels)}"
        )
    return Stepwise(
        prompt=content_of(row["prompt"], where=f"{where}: prompt"),
        steps=tuple(_text(step, f"{where}: completions, step {n}") for n, step in enumerate(steps, 1)),
        labels=tuple(_bool(label, f"{where}: labels, step {n}") for n, label in enumerate(labels, 1)),
    )


def _supervised(row: Row, where: str) -> Supervised:
    answer = next((name for name in ("completion", "answer") if name in row), None)
    if "prompt" in row and answer is not None:
        prompt = content_of(row["prompt"], where=f"{where}: prompt")
        return Supervised(prompt=prompt, completion=_answer(row[answer], prompt, f"{where}: {answer}"))
    if "messages" not in row:
        _require(row, where, "prompt", "completion", otherwise=", or prompt and answer, or messages")
    conversation = _conversation(row["messages"], f"{where}: messages")
    if len(conversation) < 2:
        raise DataError(f"{where}: messages must hold a prompt and an answer, not {_short(row['messages'])}")
    return Supervised(
        prompt=conversation[:-1], completion=_last(conversation, len(conversation) - 1, f"{where}: messages")
    )


def _require(row: Row, where: str, *names: str, otherwise: str = "") -> None:
    for name in names:
        if name in row:
            continue
        near = difflib.get_close_matches(
            name, [other for other in row if other not in names], n=1, cutoff=0.5
        )
        remedy = f"rename {near[0]!r}, which is nearest" if near else "rename or add it"
        raise DataError(
            f"{where} has no {name!r}, only {', '.join(map(repr, sorted(row))) or 'no columns with a value'}; needed: "
            f"{', '.join(names)}{otherwise}; {remedy}"
        )


def _answer(value: Any, prompt: Content, where: str) -> str:
    """The text of an answer to this prompt: given as a text, as its message, or as the conversation with the prompt."""
    if isinstance(value, str):
        return _text(value, where)
    conversation = _conversation(value, where)
    length = 1 if isinstance(prompt, str) else len(prompt)
    begins_with_prompt = len(conversation) > length and _identity(conversation[:length]) == _identity(prompt)
    return _last(conversation, length if begins_with_prompt else 0, where)


def _implicit_prompt(chosen: Any, rejected: Any, where: str) -> tuple[Content, str, str]:
    """What two whole conversations begin with, and how each ends."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _implicit_text(chosen, rejected, where)
    one = _conversation(chosen, f"{where}: chosen")
    other = _conversation(rejected, f"{where}: rejected")
    common = _common(one, other)
    if common == len(one) == len(other):
        raise DataError(f"{where}: chosen and rejected are the same conversation; leave the row out")
    if common == 0:
        raise DataError(
            f"{where} has no 'prompt', and chosen and rejected do not begin with the same messages; add the prompt's column"
        )
    return (
        one[:common],
        _last(one, common, f"{where}: chosen"),
        _last(other, common, f"{where}: rejected"),
    )


def _implicit_text(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """The common beginning ends before white space or after a line's end, so that no word or number is cut, and leaves
    both answers something."""
    shortest = min(len(chosen.rstrip()), len(rejected.rstrip()))
    at = min(_common(chosen, rejected), shortest - 1)
    while at > 0 and not (chosen[at].isspace() and rejected[at].isspace()) and chosen[at - 1] != "\n":
        at -= 1
    if chosen == rejected:
        raise DataError(
            f"{where}: chosen and rejected are the same text, {_short(chosen)}; leave the row out"
        )
    if not chosen[: max(at, 0)].strip():
        raise DataError(
            f"{where} has no 'prompt', and chosen and rejected do not begin with the same words; add the prompt's column"
        )
    return chosen[:at], _text(chosen[at:], f"{where}: chosen"), _text(rejected[at:], f"{where}: rejected")


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))


def _conversation(value: Any, where: str) -> tuple[Message, ...]:
    content = content_of([value] if isinstance(value, dict) else value, where=where)
    if isinstance(content, str):
        raise DataError(
            f"{where} must be chat messages like the other columns of the row, not a text ({_short(value)})"
        )
    return content


def _last(conversation: tuple[Message, ...], first: int, where: str) -> str:
    """The text of the one message from number `first` on."""
    after = conversation[first:]
    roles = [message["role"] for message in after]
    if roles != ["assistant"]:
        raise DataError(
            f"{where} must end with exactly one message of the assistant after the prompt, not with "
            f"{roles or 'none'}; put earlier turns into the prompt"
        )
    return _text(after[0]["content"], where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} must be a text, not {_short(value)}")
    if not value.strip():
        raise DataError(f"{where} is empty ({value!r}); leave the row out or fill it in")
    content_of(value, where=where)  # a text that is no Unicode
    return value


def _bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise DataError(f"{where} must be true or false, not {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
