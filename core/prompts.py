"""Seeded, resumable prompt stream over JSONL, Parquet, or a reasoning-gym task.

`stream.at(i)` is a pure function of the seed and `i`: resuming needs the next index and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

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
        if isinstance(self.content, str):
            return self.content
        return next((m["content"] for m in reversed(self.content) if m["role"] == "user"), "")


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
) -> tuple[Prompt, ...]:
    """Reads `source`: a `.jsonl` or `.parquet` path, or `reasoning_gym:TASK`. Raises `DataError`.

    `template` wraps the task's text at `{prompt}`; `num_prompts`, `seed` and `params` are for generated tasks.
    """
    if source.startswith("reasoning_gym:"):
        return _reasoning_gym(source.partition(":")[2], num_prompts, seed, params or {}, template)
    rows = _rows(Path(source))
    prompts = []
    for number, row in enumerate(rows, 1):
        if prompt_field not in row or answer_field not in row:
            raise DataError(
                f"{source} row {number} has fields {sorted(row)}, "
                f"but {prompt_field!r} and {answer_field!r} are needed (data.prompt_field, data.answer_field)"
            )
        prompts.append(
            Prompt(
                prompt_id=str(row.get("prompt_id", number - 1)),
                content=_content(row[prompt_field], template),
                gold=row[answer_field],
                verifier=str(row.get("verifier", verifier)),
                task=str(row.get(task_field, row.get("verifier", verifier))),
                context={k: v for k, v in row.items() if k not in (prompt_field, answer_field)},
            )
        )
    if not prompts:
        raise DataError(f"{source} holds no rows; it needs at least one prompt")
    return tuple(prompts)


def _content(value: Any, template: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return template.replace("{prompt}", value)
    return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in value)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"dataset {path} does not exist (data.source)")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number} is not JSON: {error}") from error
        return rows
    raise DataError(f"dataset {path}: expected .jsonl, .parquet, or reasoning_gym:TASK (data.source)")


def _reasoning_gym(
    task: str, num_prompts: int, seed: int, params: dict[str, Any], template: str
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
        dataset = reasoning_gym.create_dataset(task, size=num_prompts, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning-gym task {task!r} refuses {params}: {error} (data.params)") from error
    return tuple(
        Prompt(
            prompt_id=f"{task}-{seed}-{number}",
            content=_content(entry["question"], template),
            gold=entry["answer"],
            verifier="reasoning_gym",
            task=task,
            context={"task": task, "size": num_prompts, "seed": seed, "params": params, "index": number},
        )
        for number, entry in enumerate(dataset)
    )
