"""From messages to tokens and on: what a chat template writes, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import DataError
from headway.core.prompts import Message, Prompt, harmless

_SAID = ("a word", "<think>\na thought\n</think>\n\na word")
"""Turns that conversations are tried with."""


def encode(tokenizer: Any, prompt: Prompt, *, chat_template: bool) -> list[int]:
    """Token ids of a prompt, with exactly one BOS where the model has one. Raises `DataError`."""
    if chat_template:
        messages = (
            [{"role": "user", "content": prompt.content}]
            if isinstance(prompt.content, str)
            else [dict(message) for message in prompt.content]
        )
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its own
            raise DataError(f"the model's chat template refuses {_named(prompt)}: {error}") from error
        # The template writes the special tokens that the model wants.
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if not isinstance(prompt.content, str):
        raise DataError(
            f"{_named(prompt)} holds chat messages, but model.chat_template is false; set it to true, or give texts"
        )
    ids: list[int] = tokenizer(prompt.content, add_special_tokens=False)["input_ids"]
    bos: int | None = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos] or tokenizer("", add_special_tokens=True)["input_ids"][:1] != [bos]:
        return ids
    return [bos, *ids]


def _named(prompt: Prompt) -> str:
    """By its id, or its beginning where it has none."""
    if prompt.prompt_id:
        return f"prompt {prompt.prompt_id}"
    shown = repr(prompt.content if isinstance(prompt.content, str) else list(prompt.content))
    return f"the prompt {shown if len(shown) <= 80 else f'{shown[:77]}...'}"


def eos_token_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's, else the tokenizer's."""
    path = folder / "generation_config.json"
    declared = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    candidates = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    ids = {token for token in candidates if token is not None}
    if not ids:
        raise DataError(f"model {folder} declares no end-of-sequence token; responses could never end")
    return sorted(ids)


def answer_end(folder: Path, tokenizer: Any, *, chat_template: bool) -> int:
    """The id that an answer to learn ends with. Of those that end a response it is the one that the chat template writes
    after an answer: a model of several, with the end of a text beside the end of a turn, samples that one. Without it, the
    tokenizer's own."""
    ends = eos_token_ids(folder, tokenizer)
    if chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID[0]}]
        _, _, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_SAID[0])
        written = [
            token for token in tokenizer(after, add_special_tokens=False)["input_ids"] if token in ends
        ]
        if written:
            return written[0]
    return ends[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def follower(tokenizer: Any, *, chat_template: bool) -> Callable[[str, str], list[int]]:
    """(text, role) -> the tokens between the end of an agent's turn and its answer to this text, in which no special
    token is read. Without a chat template they are those of the text alone."""

    def follow(text: str, role: str) -> list[int]:
        text = harmless(text, tokenizer.all_special_tokens)
        if chat_template:
            past: list[Message] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": _SAID[0]},
            ]
            text = _whole(tokenizer, [*past, {"role": role, "content": text}]).removeprefix(
                _past(tokenizer, past)
            )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return follow


def rewrites_past(tokenizer: Any, role: str = "user") -> str | None:
    """Why conversations of this chat template cannot go on token for token; None when they can. Tried on turns with and
    without reasoning, and on a third turn."""
    told: Message = {"role": role, "content": "b"}
    for said in _SAID:
        messages: list[Message] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            messages.append({"role": "assistant", "content": said})
            past = _past(tokenizer, messages)
            messages.append(told)
            try:
                whole = _whole(tokenizer, messages)
            except Exception as error:  # a template is a program of its own
                return f"it refuses a message of role {role!r}: {error}"
            if not whole.startswith(past):
                return f"what was {past!r} becomes {whole!r}"
    return None


def _past(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The conversation as an engine has it when the last message has just been sampled."""
    *before, last = messages
    return _whole(tokenizer, before) + last["content"] + (tokenizer.eos_token or "")


def _whole(tokenizer: Any, messages: Sequence[Message]) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
