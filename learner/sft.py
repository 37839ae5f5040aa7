"""Supervised fine-tuning: negative log-likelihood of the answers, nothing on the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from headway.learner.batching import Group, pack
from headway.learner.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and what the model should answer; several answers share the prompt's row."""

    prompt_ids: Sequence[int]
    answers: Sequence[Sequence[int]]
    """Token ids, each with its end-of-sequence token."""


def supervised_step(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    demonstrations: Sequence[Demonstration],
    *,
    microbatch_tokens: int,
    max_grad_norm: float = 1.0,
) -> float:
    """One optimizer step on the mean over all answer tokens of -log p; returns that mean (nats)."""
    groups = [_group(demonstration) for demonstration in demonstrations]
    trained_N = np.ones(sum(len(group.response_ids) for group in groups), dtype=np.bool_)
    model.zero_grad()
    total = 0.0
    for batch in pack(groups, trained_N, microbatch_tokens=microbatch_tokens):
        loss = -model.logprobs(batch, temperature=1.0).logprobs.sum() / len(trained_N)
        loss.backward()
        total += loss.item()
    clip_grad_norm_(model.masters.values(), max_grad_norm)
    optimizer.step()
    model.refresh()
    return total


def _group(demonstration: Demonstration) -> Group:
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
