"""From rollout tables to packed rows. _N: response tokens of the step, flattened; _B: responses; _T: tokens of
a micro-batch; _M: its trained tokens.

A packed row is a prompt once, then answers to it. An answer sees the prompt and itself, and its positions
go on from the prompt's end, so its hidden states are those it would have in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headway.core.errors import SchemaError
from headway.core.rollouts import validate
from headway.learner.attention import Packing, packing_of

STEP_PART = "step"
"""Name of the parts of a verdict that reward single steps, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt group as arrays of its own (nothing shares memory with the object store)."""

    rollout_ids: tuple[str, ...]
    prompts: tuple[np.ndarray, ...]
    """[P] int64 each, all different; one unless several agents answer."""
    prompt_index: np.ndarray
    """[B] int64, the response's prompt in `prompts`."""
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
    agent_ids: tuple[str, ...] = ()
    """[B]; empty: all of one agent."""
    sample_index: np.ndarray | None = None
    """[B] int64; responses of different agents with the same index belong to one episode."""
    reference_logprobs: np.ndarray | None = None
    """[N] float32 nats, from the frozen reference; None without one."""
    values: np.ndarray | None = None
    """[N] float32, expected reward to go before the token: the critic's, or estimated from extra rollouts."""
    step_ends: tuple[np.ndarray, ...] = ()
    """[B] arrays of int64: after how many tokens each step of the response ends, ascending; empty: not split."""
    step_rewards: tuple[np.ndarray, ...] = ()
    """[B] arrays of float32, one per step (process rewards); empty arrays where there are none."""
    group_id: int | None = None
    """None: not from a table."""


def unpack(table: pa.Table) -> Group:
    """The arrays of one group's table. Raises `SchemaError` when it is not one group with one prompt."""
    validate(table)
    if table.num_rows == 0:
        raise SchemaError("a rollout table without rows is no group")
    group_ids = table.column("group_id").unique().to_pylist()
    if len(group_ids) != 1:
        raise SchemaError(f"one table must hold one group, this one holds groups {group_ids}")
    prompts, prompt_index = _distinct(table.column("prompt_ids").to_pylist())
    # Rows of one sample are turns of an episode, or continuations from within a response: each has a prompt of its own.
    one_row_each = len(table.column("sample_index").unique()) == table.num_rows
    if len(prompts) > 1 and one_row_each and len(table.column("agent_id").unique()) == 1:
        raise SchemaError(f"the rows of group {group_ids[0]} differ in their prompt, but are of one agent")
    if any(len(prompt) == 0 for prompt in prompts):
        raise SchemaError(f"group {group_ids[0]} has an empty prompt: nothing predicts its first token")
    spans = table.column("version_spans").combine_chunks().flatten()
    start, end, version = (child.to_numpy(zero_copy_only=False) for child in spans.flatten())
    reward = table.column("reward")
    return Group(
        rollout_ids=tuple(table.column("rollout_id").to_pylist()),
        prompts=prompts,
        prompt_index=prompt_index,
        lengths=_lengths(table, "response_ids"),
        response_ids=_flat(table, "response_ids", np.int64),
        loss_mask=_flat(table, "loss_mask", np.bool_),
        behavior_logprobs=_flat(table, "behavior_logprobs", np.float32),
        versions=np.repeat(version.astype(np.int64), end - start),
        rewards=np.array(reward.cast(pa.float32()).to_numpy(), dtype=np.float32),
        scored=np.array(reward.is_valid().to_numpy(), dtype=np.bool_),
        truncated=np.array(table.column("truncated").to_numpy(), dtype=np.bool_),
        agent_ids=tuple(table.column("agent_id").to_pylist()),
        sample_index=np.array(table.column("sample_index").to_numpy(), dtype=np.int64),
        reference_logprobs=_per_token(table, "reference_logprobs"),
        values=_per_token(table, "values"),
        step_ends=tuple(
            np.array(ends or [], dtype=np.int64) for ends in table.column("step_ends").to_pylist()
        ),
        step_rewards=tuple(
            np.array([part["value"] for part in parts or [] if part["name"] == STEP_PART], dtype=np.float32)
            for parts in table.column("reward_parts").to_pylist()
        ),
        group_id=group_ids[0],
    )


def _distinct(prompts: list[list[int]]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The different prompts in order of appearance, and each row's place among them."""
    places: dict[tuple[int, ...], int] = {}
    index = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    return tuple(np.array(prompt, dtype=np.int64) for prompt in places), np.array(index, dtype=np.int64)


def _per_token(table: pa.Table, name: str) -> np.ndarray | None:
    """A column that a stage fills in, or None where it has not. Raises `SchemaError` when it does not fit."""
    column = table.column(name)
    if column.null_count == len(column):
        return None
    if column.null_count or (_lengths(table, name) != _lengths(table, "response_ids")).any():
        raise SchemaError(f"{name!r} and 'response_ids' differ in length")
    return _flat(table, name, np.float32)


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).combine_chunks().value_lengths().to_numpy().astype(np.int64)


def _flat(table: pa.Table, name: str, dtype: type[np.generic]) -> np.ndarray:
    """A copy of the values of a list column: what lies in the object store is read-only. `flatten` and not
    `values`, which ignores where a slice begins and ends."""
    values = table.column(name).combine_chunks().flatten()
    if values.null_count and dtype != np.float32:
        raise SchemaError(f"column {name!r} holds null elements")
    return np.array(values.to_numpy(zero_copy_only=False), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed rows for one forward pass, one after another, without padding."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    packing: Packing
    """Which tokens see which."""
    predict_index: Tensor
    """[M] int64: the position in [T] whose hidden state predicts the token."""
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
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(answer.num_inputs for answer in self.answers)

    @property
    def longest_answer(self) -> int:
        return max(answer.num_inputs for answer in self.answers)


def pack(groups: Sequence[Group], trained_N: np.ndarray, *, microbatch_tokens: int) -> list[MicroBatch]:
    """Micro-batches that hold every token where `trained_N` is True, exactly once.

    A micro-batch has at most `microbatch_tokens` tokens, save for a single response that is longer by itself with
    its prompt. Groups and responses without trained tokens take no room.
    """
    rows = [
        row
        for group, first in _with_offsets(groups)
        for row in _rows(group, first, trained_N, microbatch_tokens)
    ]
    rows.sort(
        key=lambda row: row.longest_answer, reverse=True
    )  # alike lengths together: less padding in attention
    batches: list[list[_Row]] = []
    room = 0
    for row in rows:
        if row.num_tokens > room:
            batches.append([])
            room = microbatch_tokens
        batches[-1].append(row)
        room -= row.num_tokens
    return [_micro_batch(batch) for batch in batches]


def deal(
    groups: Sequence[Group], trained_N: np.ndarray, *, microbatch_tokens: int, rank: int, size: int
) -> list[MicroBatch | None]:
    """One rank's part of `pack`. Every rank gets as many passes as any other; None stands for one without tokens.
    Little work is cut small enough for every rank to have some."""
    batches = pack(groups, trained_N, microbatch_tokens=microbatch_tokens)
    if size > 1:
        total = sum(len(batch.input_ids) for batch in batches)
        fair = min(microbatch_tokens, -(-total // size))
        batches = pack(groups, trained_N, microbatch_tokens=fair)
    share: list[MicroBatch | None] = [*batches[rank::size]]
    return share + [None] * (-(-len(batches) // size) - len(share))


def rows_of(groups: Sequence[Group], values_N: np.ndarray) -> list[list[np.ndarray]]:
    """Values of all response tokens of these groups as a column for each group's table: [T] per response."""
    lengths = np.concatenate([group.lengths for group in groups])
    rows = iter(np.split(values_N, np.cumsum(lengths)[:-1]))
    return [list(islice(rows, len(group.lengths))) for group in groups]


def _with_offsets(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    first = 0
    for group in groups:
        yield group, first
        first += len(group.response_ids)


def _rows(group: Group, first: int, trained_N: np.ndarray, microbatch_tokens: int) -> Iterator[_Row]:
    """Each prompt with its answers, cut where they do not fit into rows that do, each with its own copy of the
    prompt."""
    starts = first + np.cumsum(group.lengths) - group.lengths
    for number, prompt_ids in enumerate(group.prompts):
        answers: list[_Answer] = []
        length = len(prompt_ids)
        for row in np.flatnonzero(group.prompt_index == number):
            start, tokens = int(starts[row]), int(group.lengths[row])
            trained = np.flatnonzero(trained_N[start : start + tokens])
            if len(trained) == 0:
                continue
            answer = _Answer(start, group.response_ids[start - first : start - first + tokens], trained)
            if answers and length + answer.num_inputs > microbatch_tokens:
                yield _Row(prompt_ids, tuple(answers))
                answers, length = [], len(prompt_ids)
            answers.append(answer)
            length += answer.num_inputs
        if answers:
            yield _Row(prompt_ids, tuple(answers))


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    input_ids: list[np.ndarray] = []
    position_ids: list[np.ndarray] = []
    predict_index: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    token_index: list[np.ndarray] = []
    at = 0
    for row in rows:
        prompt = len(row.prompt_ids)
        input_ids.append(row.prompt_ids)
        position_ids.append(np.arange(prompt))
        at += prompt
        last_of_prompt = at - 1
        for answer in row.answers:
            input_ids.append(answer.response_ids[: answer.num_inputs])
            position_ids.append(prompt + np.arange(answer.num_inputs))
            # Token t is predicted from token t - 1, the first one from the prompt's last.
            predict_index.append(np.where(answer.trained == 0, last_of_prompt, at + answer.trained - 1))
            targets.append(answer.response_ids[answer.trained])
            token_index.append(answer.first_token + answer.trained)
            at += answer.num_inputs
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(input_ids)),
        position_ids=torch.from_numpy(np.concatenate(position_ids)),
        packing=packing_of(
            [len(row.prompt_ids) for row in rows],
            [[answer.num_inputs for answer in row.answers] for row in rows],
        ),
        predict_index=torch.from_numpy(np.concatenate(predict_index)),
        targets=torch.from_numpy(np.concatenate(targets)),
        token_index=torch.from_numpy(np.concatenate(token_index)),
    )
