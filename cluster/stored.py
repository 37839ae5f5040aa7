"""The rollouts that a run has stored: found by what is known of them, read by columns, one file at a time.

A search reads neither tokens nor log-probabilities, and text only to search in it. The columns of the few rollouts that
are shown are read some rows at a time, so that memory depends on neither the length of the run nor that of its batches.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headway.core.errors import ConfigError, DataError, SchemaError
from headway.core.rollouts import check_schema

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROWS_AT_ONCE = 32
"""Of the columns that hold tokens."""
_LIGHT = [
    "rollout_id",
    "group_id",
    "prompt_id",
    "sample_index",
    "agent_id",
    "version_spans",
    "finish_reason",
    "truncated",
    "reward",
    "reward_parts",
    "verdict_reason",
]


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def parse_range(option: str, text: str) -> Range:
    """Of `7`, `3..9`, `3..` or `..9`. Raises `ConfigError` naming the option."""
    before, dots, after = text.partition("..")
    try:
        if dots and not before and not after:
            raise ValueError
        low = -math.inf if dots and not before else float(before)
        high = low if not dots else float(after) if after else math.inf
        if not low <= high:  # also when one of them is NaN
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: say a number or a range, such as 7, 3..9, 3.. or ..9"
        ) from None
    return Range(low, high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which rollouts; by default all."""

    step: Range = field(default_factory=Range)
    reward: Range = field(default_factory=Range)
    """With a bound, no unscored rollout is wanted."""
    length: Range = field(default_factory=Range)
    lag: Range = field(default_factory=Range)
    reasons: tuple[str, ...] = ()
    """Any of these verdict reasons; empty: all."""
    agent: str | None = None
    text: str | None = None
    """Somewhere in the response, whichever the case of its letters."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A stored batch: the rollouts of one optimizer step, or of the several that share a batch."""

    path: Path
    first_version: int
    """Of the learner when it trained the first group."""
    num_steps: int
    groups_per_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What is known of a stored rollout without its tokens."""

    path: Path
    step: int
    """The optimizer step that trained it, as `version` in `metrics.jsonl`."""
    lag: int
    """In steps: learner version when it was trained minus the version of its oldest token."""
    length: int
    """Tokens of the response, also those that are masked."""
    rollout_id: str
    group_id: int
    prompt_id: str
    sample_index: int
    agent_id: str | None
    spans: tuple[tuple[int, int, int], ...]
    """(start, end, version)"""
    finish_reason: str
    truncated: bool
    reward: float | None
    parts: tuple[tuple[str, float | None], ...]
    reason: str | None


def read_config(run_folder: Path) -> dict[str, Any]:
    """The run's configuration as it was written, also by another version of headway; empty where there is none."""
    path = run_folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def batches(run_folder: Path, config: dict[str, Any]) -> list[Batch]:
    """Every stored batch, in order. Raises `DataError` without any."""
    files = sorted((run_folder / "rollouts").glob("step-*.parquet"))
    if not files:
        where = f"{run_folder}/rollouts holds no rollouts"
        if not run_folder.is_dir():
            where = f"{run_folder} is no folder"
        elif not (run_folder / "config.json").exists():
            where = f"{run_folder} holds no run"
        raise DataError(f"{where}; name a run folder such as runs/demo, trained with run.save_rollouts=true")
    learner = config.get("learner") or {}
    num_steps = learner.get("steps_per_batch") or 1
    found = []
    for path in files:
        version = path.stem.removeprefix("step-")
        if not version.isdecimal():
            raise DataError(f"{path} is no batch of a run: they are called step-000001.parquet and so on")
        found.append(Batch(path, int(version) - num_steps, num_steps, learner.get("groups_per_step")))
    return found


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around what reads a stored batch: raises `DataError` for a file that is none, such as one that was copied in part."""
    try:
        yield
    except (SchemaError, pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def find(batch: Batch, wanted: Wanted) -> list[Rollout]:
    """The batch's rollouts that are wanted, in order. Raises `DataError` when it is no table of rollouts."""
    if batch.first_version + 1 > wanted.step.high or batch.first_version + batch.num_steps < wanted.step.low:
        return []
    with reading(batch.path):
        check_schema(pq.read_schema(batch.path))
        table = pq.read_table(batch.path, columns=_LIGHT, filters=_condition(wanted))
        positions = _positions(batch)
    rollouts = (_rollout(batch, positions, row) for row in table.to_pylist())
    return [
        rollout
        for rollout in rollouts
        if rollout.step in wanted.step and rollout.length in wanted.length and rollout.lag in wanted.lag
    ]


def _condition(wanted: Wanted) -> pc.Expression | None:
    """What of it Parquet's reader can decide. Rewards are compared as they are stored: 0.1 is float32's 0.1."""
    conditions: list[pc.Expression] = []
    reward = pc.field("reward")
    if wanted.reward.low > -math.inf:
        conditions.append(reward >= pa.scalar(wanted.reward.low, pa.float32()))
    if wanted.reward.high < math.inf:
        conditions.append(reward <= pa.scalar(wanted.reward.high, pa.float32()))
    if wanted.reasons:
        conditions.append(pc.field("verdict_reason").isin(list(wanted.reasons)))
    if wanted.agent is not None:
        conditions.append(pc.field("agent_id") == wanted.agent)
    if wanted.text is not None:
        conditions.append(
            pc.match_substring(pc.field("text"), wanted.text, ignore_case=True)  # type: ignore[attr-defined]
        )
    return reduce(and_, conditions) if conditions else None


def _positions(batch: Batch) -> dict[int, int]:
    """Of each group in a batch of several steps, which are trained in the order of the groups."""
    if batch.num_steps == 1:
        return {}
    column = pq.read_table(batch.path, columns=["group_id"]).column("group_id")
    groups = dict.fromkeys(column.to_pylist())
    per_step = batch.groups_per_step or len(groups)
    return {group_id: number // per_step for number, group_id in enumerate(groups)}


def _rollout(batch: Batch, positions: dict[int, int], row: dict[str, Any]) -> Rollout:
    trained_at = batch.first_version + positions.get(row["group_id"], 0)
    spans = tuple((span["start"], span["end"], span["version"]) for span in row["version_spans"])
    return Rollout(
        path=batch.path,
        step=trained_at + 1,
        lag=trained_at - min((version for _, _, version in spans), default=trained_at),
        length=spans[-1][1] if spans else 0,
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        prompt_id=row["prompt_id"],
        sample_index=row["sample_index"],
        agent_id=row["agent_id"],
        spans=spans,
        finish_reason=row["finish_reason"],
        truncated=row["truncated"],
        reward=_shortest(row["reward"]),
        parts=tuple((part["name"], _shortest(part["value"])) for part in row["reward_parts"] or ()),
        reason=row["verdict_reason"],
    )


def _shortest(value: float | None) -> float | None:
    """The number with the fewest digits that is the same float32; none for what is not finite."""
    return float(str(np.float32(value))) if value is not None and math.isfinite(value) else None


def read_columns(rollouts: Sequence[Rollout], columns: Iterable[str]) -> list[dict[str, Any]]:
    """These columns of each rollout, in order. Raises `DataError`."""
    names = ["rollout_id", *columns]
    ids: dict[Path, list[str]] = {}
    for rollout in rollouts:
        ids.setdefault(rollout.path, []).append(rollout.rollout_id)
    rows: dict[tuple[Path, str], dict[str, Any]] = {}
    for path, wanted in ids.items():
        with reading(path), pq.ParquetFile(path) as file:
            for some in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names, use_threads=False):
                for row in some.filter(pc.field("rollout_id").isin(wanted)).to_pylist():
                    rows[path, row.pop("rollout_id")] = row
    return [rows[rollout.path, rollout.rollout_id] for rollout in rollouts]


def in_chunks(rollouts: Iterable[Rollout], size: int) -> Iterator[list[Rollout]]:
    """Lists of at most `size`."""
    chunk: list[Rollout] = []
    for rollout in rollouts:
        chunk.append(rollout)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# ---- tokens as text ----------------------------------------------------------------------------------------


def find_tokenizer(run_folder: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The run's tokenizer: of a checkpoint, of its model folder, or of the model that was made here. None where there is
    none of them; nothing is made or fetched."""
    from tokenizers import Tokenizer

    for file in _tokenizer_files(run_folder, config):
        with contextlib.suppress(Exception):  # of a missing file or a broken one the library raises just that
            return Tokenizer.from_file(str(file))
    return None


def _tokenizer_files(run_folder: Path, config: dict[str, Any]) -> Iterator[Path]:
    saved = (run_folder / "checkpoints").glob("version-*/learner/model/tokenizer.json")
    yield from sorted(saved, reverse=True)
    model = (config.get("model") or {}).get("path")
    if not isinstance(model, str):
        return
    if Path(model).is_dir() or os.sep in model:
        yield Path(model, "tokenizer.json")
        return
    from headway.learner.pretrained import is_to_be_made, model_folder

    if not is_to_be_made(model):
        with contextlib.suppress(DataError):  # no model has this name
            yield model_folder(model) / "tokenizer.json"


def decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """The tokens as text, special ones included; without a tokenizer their ids."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=False)


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text that each token adds: empty for one that ends within a character, which the token that completes it
    brings. Without a tokenizer the ids, each with a space."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]
