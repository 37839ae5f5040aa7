"""Supervised fine-tuning: negative log-likelihood of the answers, nothing on the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from headway.learner.batching import Group, deal
from headway.learner.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and what the model should answer; several answers share the prompt's row."""

    prompt_ids: Sequence[int]
    answers: Sequence[Sequence[int]]
    """Token ids, each with its end-of-sequence token."""


def accumulate(
    model: PolicyModel,
    demonstrations: Sequence[Demonstration],
    *,
    weight: float,
    microbatch_tokens: int,
) -> float:
    """Adds the gradient of weight * mean over all answer tokens of -log p (temperature 1); returns this rank's part of
    that mean (nats, without the weight). Every rank gives the same demonstrations."""
    groups = [group_of(demonstration) for demonstration in demonstrations]
    trained_N = np.ones(sum(len(group.response_ids) for group in groups), dtype=np.bool_)
    ranks = model.ranks
    total = 0.0
    for batch in deal(
        groups, trained_N, microbatch_tokens=microbatch_tokens, rank=ranks.rank, size=ranks.size
    ):
        if batch is None:
            model.idle_backward()
            continue
        loss = -model.logprobs(batch, temperature=1.0).logprobs.sum() / len(trained_N)
        (weight * loss).backward()
        total += loss.item()
    return total


def supervised_step(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    demonstrations: Sequence[Demonstration],
    *,
    microbatch_tokens: int,
    max_grad_norm: float = 1.0,
) -> float:
    """One optimizer step on the mean over all answer tokens of -log p; returns that mean (nats)."""
    model.zero_grad()
    total = accumulate(model, demonstrations, weight=1.0, microbatch_tokens=microbatch_tokens)
    model.clip_grad(max_grad_norm)
    optimizer.step()
    model.refresh()
    return total


def in_turn(demonstrations: Sequence[Demonstration], step: int, rows: int) -> list[Demonstration]:
    """The `rows` demonstrations of optimizer step number `step` (0-based): on from where the last step ended."""
    return [demonstrations[(step * rows + row) % len(demonstrations)] for row in range(rows)]


def write_demonstrations(demonstrations: Sequence[Demonstration], path: Path) -> None:
    """One row per answer."""
    rows = [(d.prompt_ids, answer) for d in demonstrations for answer in d.answers]
    columns = {"prompt_ids": [list(p) for p, _ in rows], "answer_ids": [list(a) for _, a in rows]}
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    pq.write_table(pa.table(columns, schema=schema), path)


def read_demonstrations(path: Path) -> list[Demonstration]:
    """What `write_demonstrations` wrote, each answer by itself."""
    rows = pq.read_table(path).to_pylist()
    return [Demonstration(row["prompt_ids"], [row["answer_ids"]]) for row in rows]


def group_of(demonstration: Demonstration) -> Group:
    lengths = np.array([len(answer) for answer in demonstration.answers], dtype=np.int64)
    num_tokens = int(lengths.sum())
    return Group(
        rollout_ids=("",) * len(lengths),
        prompts=(np.array(demonstration.prompt_ids, dtype=np.int64),),
        prompt_index=np.zeros(len(lengths), dtype=np.int64),
        lengths=lengths,
        response_ids=np.concatenate([np.array(answer, dtype=np.int64) for answer in demonstration.answers]),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        behavior_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int64),
        rewards=np.full(len(lengths), np.nan, dtype=np.float32),
        scored=np.zeros(len(lengths), dtype=np.bool_),
        truncated=np.zeros(len(lengths), dtype=np.bool_),
    )
