"""Prompts made from datasets or generated tasks, and the seeded, resumable stream of them.

`stream.at(i)` is a pure function of the seed and `i`: resuming needs the next index and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headway.core import datasets
from headway.core.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task for the policy."""

    prompt_id: str
    content: str | tuple[Message, ...]
    """Plain text, or chat messages with `role` and `content`."""
    gold: Any
    """What the verifier compares with."""
    verifier: str
    """Name of the verifier that scores it."""
    task: str = ""
    """Kind of task, for the audit."""
    context: dict[str, Any] = field(default_factory=dict)
    """Whatever else the verifier needs, e.g. where in which reasoning-gym dataset the task is."""

    @property
    def text(self) -> str:
        """The task as text: of chat messages the last one of the user."""
        return text_of(self.content)


def text_of(content: str | tuple[Message, ...]) -> str:
    """A prompt's content as text: of chat messages the last one of the user, empty when there is none."""
    if isinstance(content, str):
        return content
    return next((message["content"] for message in reversed(content) if message["role"] == "user"), "")


@dataclass(frozen=True, slots=True)
class PromptStream:
    """An endless sequence of prompts: every epoch holds each prompt once, in its own seeded order."""

    prompts: tuple[Prompt, ...]
    seed: int

    def at(self, index: int) -> Prompt:
        """Prompt number `index` (0-based) of the run."""
        epoch, position = divmod(index, len(self.prompts))
        return self.prompts[self.order(epoch)[position]]

    def order(self, epoch: int) -> tuple[int, ...]:
        return _order(len(self.prompts), self.seed, epoch)


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Digest of prompts by content and order."""
    found = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        parts = [prompt.prompt_id, prompt.content, prompt.gold, prompt.verifier, prompt.task, prompt.context]
        found.update(json.dumps(parts, default=repr, sort_keys=True).encode() + b"\n")
    return found.hexdigest()


def harmless(text: str, special_tokens: Iterable[str]) -> str:
    """Spells out what a policy wrote so that no special token is read in it: it could end its turn in the prompt of
    another agent and speak for the user."""
    for token in special_tokens:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def load_prompts(
    source: str,
    *,
    verifier: str,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    task_field: str = "task",
    template: str = "{prompt}",
    num_prompts: int = 1000,
    seed: int = 0,
    params: dict[str, Any] | None = None,
    verifier_params: dict[str, Any] | None = None,
) -> tuple[Prompt, ...]:
    """Reads `source`: a file or folder that `datasets.read_rows` knows, `multilingual_gsm:LANGUAGE`, `human_eval`, or
    `reasoning_gym:TASK`. Raises `DataError`.

    `template` wraps the task's text at `{prompt}`, but not chat messages; `num_prompts`, `seed` and `params` are for
    generated tasks. The context of a prompt is the row's other fields, those without a value left out, over
    `verifier_params`.
    """
    name, _, argument = source.partition(":")
    options = verifier_params or {}
    if name == "reasoning_gym":
        return _reasoning_gym(argument, num_prompts, seed, params or {}, template, options)
    if name in datasets.PACKAGED:
        rows = datasets.PACKAGED[name](argument)
        prompt_field, answer_field, task_field = "question", "gold", "task"
    else:
        rows = datasets.read_rows(source)
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        if prompt_field not in row or answer_field not in row:
            raise DataError(
                f"{where} has fields {sorted(row)}, but {prompt_field!r} and {answer_field!r} are needed "
                "(data.prompt_field, data.answer_field)"
            )
        fields = {key: value for key, value in row.items() if value is not None}
        if "parts" in fields and names_code(fields["parts"]):
            raise DataError(
                f"{where} names a verifier of its own code in `parts`; only data.verifier_params may: a dataset is no program"
            )
        prompt = Prompt(
            prompt_id=str(fields.get("prompt_id", number)),
            content=content_of(row[prompt_field], template, f"{where}: {prompt_field}"),
            gold=row[answer_field],
            verifier=_verifier(fields.get("verifier", verifier), verifier, where),
            task=str(fields.get(task_field, fields.get("verifier", verifier))),
            context=options | {k: v for k, v in fields.items() if k not in (prompt_field, answer_field)},
        )
        if prompt.prompt_id in seen:
            raise DataError(
                f"{where} has the prompt_id {prompt.prompt_id!r}, which {seen[prompt.prompt_id]} has too; a row without "
                "one has its number, from 0"
            )
        seen[prompt.prompt_id] = where
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{source} holds no rows; it needs at least one prompt")
    return tuple(prompts)


def _verifier(name: Any, default: str, where: str) -> str:
    """A row may choose among the verifiers that there are; code of the user's own is named in the configuration."""
    if not isinstance(name, str) or (":" in name and name != default):
        raise DataError(
            f"{where} names the verifier {name!r}; a row may only name one that headway has, or the one of "
            "data.verifier"
        )
    return name


def names_code(parts: Any) -> bool:
    """Whether a part of a composite verifier, or a part of its parts, is code by its import path."""
    if not isinstance(parts, dict):
        return False
    return any(
        isinstance(part, dict) and (":" in str(part.get("verifier", "")) or names_code(part.get("parts")))
        for part in parts.values()
    )


def content_of(value: Any, template: str = "{prompt}", where: str = "prompt") -> str | tuple[Message, ...]:
    """A prompt's content: a text inside the template, or chat messages reduced to role and content. Raises `DataError`,
    beginning with `where`."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty")
        return _text(template.replace("{prompt}", value), where)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where} must be a text or a list of chat messages, not {_short(value)}")
    return tuple(_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or not value["role"]:
        raise DataError(f"{where} must have a role and a content, not {_short(value)}")
    if not isinstance(value.get("content"), str):
        raise DataError(f"{where}: content must be a text, not {_short(value.get('content'))}")
    return {"role": _text(value["role"], where), "content": _text(value["content"], where)}


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise DataError(f"{where} is no Unicode text: {error.reason} at character {error.start}") from error
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reasoning_gym(
    task: str, num_prompts: int, seed: int, params: dict[str, Any], template: str, options: dict[str, Any]
) -> tuple[Prompt, ...]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        import difflib

        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise DataError(
            f"reasoning-gym has no task {task!r}; nearest: {', '.join(near) or 'none'} (data.source)"
        )
    try:
        # Parameters that its checks let through may fail where the tasks are made.
        entries = list(reasoning_gym.create_dataset(task, size=num_prompts, seed=seed, **params))
    except (AssertionError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise DataError(f"reasoning-gym task {task!r} refuses {params}: {error} (data.params)") from error
    return tuple(
        Prompt(
            prompt_id=f"{task}-{seed}-{number}",
            content=content_of(entry["question"], template),
            gold=entry["answer"],
            verifier="reasoning_gym",
            task=task,
            context=options
            | {"task": task, "size": num_prompts, "seed": seed, "params": params, "index": number},
        )
        for number, entry in enumerate(entries)
    )
