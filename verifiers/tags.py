"""The response consists of named sections, `<think>…</think> <answer>…</answer>`, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import Found, after_reasoning, boxed, final_text
from headway.verifiers.verdict import Verdict, correct, wrong

_NAME = re.compile(r"[A-Za-z][\w-]*")
_ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)


def tags(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the sections named in `tags` of the context (default: think, answer) follow each other, each once and
    with content, and only white space stands around them. Upper and lower case differ.

    `opened`: the first section's name, when the prompt's template has already opened it; the response must then
    begin inside it. The extracted answer is the content of the last section. Ignores the gold. Raises `DataError`.
    """
    names = _names(context)
    opened = context.get("opened")
    if opened not in (None, names[0]):
        raise DataError(f"opened {opened!r} is not the first of the tags, {names[0]!r}")
    position = 0
    closed = 0
    inside: str | None = opened
    content = ""
    for tag in re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", response):
        name, is_closing = tag[2], bool(tag[1])
        between = response[position : tag.start()].strip()
        if inside is None:
            if between:
                return wrong(None, "text_outside")
            if is_closing:
                return wrong(None, "tag_order")
            if name in names[:closed]:
                return wrong(None, "tag_repeated")
            if name != names[closed]:
                return wrong(None, "tag_order")
            inside = name
        else:
            if not is_closing:
                return wrong(None, "tag_repeated" if name in names[: closed + 1] else "tag_nested")
            if name != inside:
                return wrong(None, "tag_order")
            if not between:
                return wrong(None, "tag_empty")
            inside, content = None, between
            closed += 1
        position = tag.end()
    if inside is not None:
        return wrong(None, "tag_unclosed")
    if closed < len(names):
        return wrong(None, "tag_missing")
    if response[position:].strip():
        return wrong(None, "text_outside")
    return correct(content)


def answer_section(text: str) -> Found | None:
    """The content of the last `<answer>…</answer>`, None inside when it is unfinished or empty; None when the text
    has no such tag."""
    found = list(_ANSWER.finditer(text))
    if not found:
        return None
    if len(found) < 2 or not found[-1][1] or found[-2][1]:
        return Found(None)
    return Found(text[found[-2].end() : found[-1].start()].strip() or None)


def answer_text(response: str) -> str | None:
    """The last `<answer>` section after the reasoning, or the box in it; without such tags as `final_text`."""
    visible = after_reasoning(response)
    if visible is None:
        return None
    section = answer_section(visible)
    if section is None:
        return final_text(visible)
    box = boxed(section.text) if section.text else None
    return box.text if box is not None else section.text


def _names(context: Mapping[str, Any]) -> list[str]:
    value = context.get("tags")
    if value is None:
        return ["think", "answer"]
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not value
        or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in value)
        or len(set(value)) != len(value)
    ):
        raise DataError(f"tags {value!r} is not a list of different tag names, such as ['think', 'answer']")
    return list(value)
