"""From rollout tables to packed rows. _N: response tokens of the step, flattened; _B: responses; _R: rows of a
micro-batch; _L: padded row length; _M: trained tokens of a micro-batch.

A packed row is the prompt once, then answers of its group. An answer sees the prompt and itself, and its positions
go on from the prompt's end, so its hidden states are those it would have in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from headway.core.errors import SchemaError
from headway.core.rollouts import validate


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt group as arrays of its own (nothing shares memory with the object store)."""

    rollout_ids: tuple[str, ...]
    prompt_ids: np.ndarray
    """[P] int64."""
    lengths: np.ndarray
    """[B] int64, response tokens."""
    response_ids: np.ndarray
    """[N] int64."""
    loss_mask: np.ndarray
    """[N] bool."""
    behavior_logprobs: np.ndarray
    """[N] float32 nats; NaN where the engine gave none."""
    versions: np.ndarray
    """[N] int64, the weights that sampled the token."""
    rewards: np.ndarray
    """[B] float32; NaN where not scored."""
    scored: np.ndarray
    """[B] bool."""
    truncated: np.ndarray
    """[B] bool."""


def unpack(table: pa.Table) -> Group:
    """The arrays of one group's table. Raises `SchemaError` when it is not one group with one prompt."""
    validate(table)
    if table.num_rows == 0:
        raise SchemaError("a rollout table without rows is no group")
    group_ids = pc.unique(table.column("group_id")).to_pylist()
    if len(group_ids) != 1:
        raise SchemaError(f"one table must hold one group, this one holds groups {group_ids}")
    num_rows = table.num_rows
    prompt_lengths = _lengths(table, "prompt_ids")
    prompts = _flat(table, "prompt_ids", np.int64)
    if prompt_lengths[0] == 0:
        raise SchemaError(f"group {group_ids[0]} has an empty prompt: nothing predicts its first token")
    if (prompt_lengths != prompt_lengths[0]).any() or (
        prompts.reshape(num_rows, -1) != prompts[: prompt_lengths[0]]
    ).any():
        raise SchemaError(f"the rows of group {group_ids[0]} differ in their prompt")
    spans = table.column("version_spans").combine_chunks().flatten()
    start, end, version = (
        pc.struct_field(spans, name).to_numpy(zero_copy_only=False) for name in ("start", "end", "version")
    )
    reward = table.column("reward")
    return Group(
        rollout_ids=tuple(table.column("rollout_id").to_pylist()),
        prompt_ids=prompts[: prompt_lengths[0]].copy(),
        lengths=_lengths(table, "response_ids"),
        response_ids=_flat(table, "response_ids", np.int64),
        loss_mask=_flat(table, "loss_mask", np.bool_),
        behavior_logprobs=_flat(table, "behavior_logprobs", np.float32),
        versions=np.repeat(version.astype(np.int64), end - start),
        rewards=np.array(reward.cast(pa.float32()).to_numpy(), dtype=np.float32),
        scored=np.array(pc.is_valid(reward).to_numpy(), dtype=np.bool_),
        truncated=np.array(table.column("truncated").to_numpy(), dtype=np.bool_),
    )


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_value_length(table.column(name)).to_numpy().astype(np.int64)


def _flat(table: pa.Table, name: str, dtype: type[np.generic]) -> np.ndarray:
    """A copy of the values of a list column: what lies in the object store is read-only. `flatten` and not
    `values`, which ignores where a slice begins and ends."""
    values = table.column(name).combine_chunks().flatten()
    if values.null_count and dtype != np.float32:
        raise SchemaError(f"column {name!r} holds null elements")
    return np.array(values.to_numpy(zero_copy_only=False), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed rows for one forward pass, padded to the longest."""

    input_ids: Tensor
    """[R, L] int64; 0 in padding."""
    position_ids: Tensor
    """[R, L] int64."""
    attention_mask: Tensor
    """[R, 1, L, L] bool, True where the second position may be seen from the first. Padding sees only itself, so
    that no row of the softmax is empty."""
    predict_index: Tensor
    """[M] int64: position in the flattened [R * L] whose hidden state predicts the token."""
    targets: Tensor
    """[M] int64."""
    token_index: Tensor
    """[M] int64: the token's place in the step's flat arrays."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class _Answer:
    first_token: int
    """Its first token's place in the step's flat arrays."""
    response_ids: np.ndarray
    trained: np.ndarray
    """Positions in the response, ascending, never empty."""

    @property
    def num_inputs(self) -> int:
        """Tokens that have to be fed: the last trained one is only predicted."""
        return int(self.trained[-1])


@dataclass(frozen=True, slots=True)
class _Row:
    prompt_ids: np.ndarray
    answers: tuple[_Answer, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(answer.num_inputs for answer in self.answers)


def pack(groups: Sequence[Group], trained_N: np.ndarray, *, microbatch_tokens: int) -> list[MicroBatch]:
    """Micro-batches that hold every token where `trained_N` is True, exactly once.

    Rows of similar length share a micro-batch; rows times padded length stays within `microbatch_tokens`, save
    for a single response that is longer by itself. Groups and responses without trained tokens take no room.
    """
    rows = [
        row
        for group, first in _with_offsets(groups)
        for row in _rows(group, first, trained_N, microbatch_tokens)
    ]
    rows.sort(key=lambda row: row.length, reverse=True)
    batches: list[MicroBatch] = []
    start = 0
    while start < len(rows):
        count = max(1, microbatch_tokens // rows[start].length)
        batches.append(_micro_batch(rows[start : start + count]))
        start += count
    return batches


def _with_offsets(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    first = 0
    for group in groups:
        yield group, first
        first += len(group.response_ids)


def _rows(group: Group, first: int, trained_N: np.ndarray, microbatch_tokens: int) -> Iterator[_Row]:
    """Cuts a group that does not fit into rows that do, each with its own copy of the prompt."""
    answers: list[_Answer] = []
    length = len(group.prompt_ids)
    start = 0
    for tokens in group.lengths.tolist():
        trained = np.flatnonzero(trained_N[first + start : first + start + tokens])
        if len(trained):
            answer = _Answer(first + start, group.response_ids[start : start + tokens], trained)
            if answers and length + answer.num_inputs > microbatch_tokens:
                yield _Row(group.prompt_ids, tuple(answers))
                answers, length = [], len(group.prompt_ids)
            answers.append(answer)
            length += answer.num_inputs
        start += tokens
    if answers:
        yield _Row(group.prompt_ids, tuple(answers))


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    length = max(row.length for row in rows)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    position_ids = np.zeros((len(rows), length), dtype=np.int64)
    segment = np.full((len(rows), length), -1, dtype=np.int64)  # 0: prompt, 1, 2, ...: answers, -1: padding
    predict_index: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    token_index: list[np.ndarray] = []
    for number, row in enumerate(rows):
        prompt = len(row.prompt_ids)
        input_ids[number, :prompt] = row.prompt_ids
        position_ids[number, :prompt] = np.arange(prompt)
        segment[number, :prompt] = 0
        at = prompt
        for answer_number, answer in enumerate(row.answers, 1):
            count = answer.num_inputs
            input_ids[number, at : at + count] = answer.response_ids[:count]
            position_ids[number, at : at + count] = prompt + np.arange(count)
            segment[number, at : at + count] = answer_number
            # Token t is predicted from token t - 1, the first one from the prompt's last.
            before = np.where(answer.trained == 0, prompt - 1, at + answer.trained - 1)
            predict_index.append(number * length + before)
            targets.append(answer.response_ids[answer.trained])
            token_index.append(answer.first_token + answer.trained)
            at += count
    segment_RL = torch.from_numpy(segment)
    same_RLL = segment_RL[:, :, None] == segment_RL[:, None, :]
    visible_RLL = (same_RLL | (segment_RL[:, None, :] == 0)) & (segment_RL[:, :, None] >= 0)
    visible_RLL = visible_RLL.tril_() | torch.eye(length, dtype=torch.bool)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=visible_RLL[:, None],
        predict_index=torch.from_numpy(np.concatenate(predict_index)),
        targets=torch.from_numpy(np.concatenate(targets)),
        token_index=torch.from_numpy(np.concatenate(token_index)),
    )
