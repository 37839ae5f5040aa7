"""What one optimizer step trains on: advantages, masks and denominators. _N: response tokens of the step,
flattened; _B: its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core.config import Algorithm
from headway.learner.advantages import group_advantages
from headway.learner.batching import Group
from headway.learner.corrections import is_missing
from headway.learner.losses import token_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The groups of one optimizer step as flat arrays over their tokens."""

    groups: tuple[Group, ...]
    advantages_N: Tensor
    """float32."""
    token_weights_N: Tensor
    """float32: what `losses.token_weights` gives a token of this response."""
    trained_N: np.ndarray
    """bool: in the loss, and in a group with signal."""
    behavior_logprobs_N: Tensor
    versions_N: Tensor
    no_signal_groups: int
    masked_fraction: dict[str, float]


def prepare(groups: Sequence[Group], algorithm: Algorithm) -> StepBatch:
    """Advantages, masks and denominators of one optimizer step; nothing here needs the model.

    Denominators count every sampled token that is scored and has a behavior log-probability (where the correction
    needs one). Tokens of a group without signal (all advantages 0) are among them, though they need no forward
    pass: leaving them out would raise the step size whenever a prompt is solved or hopeless.
    """
    advantages = [
        group_advantages(
            torch.from_numpy(group.rewards),
            torch.from_numpy(group.scored),
            normalize=algorithm.advantage == "group",
        )
        for group in groups
    ]
    has_signal = [bool((values != 0).any()) for values in advantages]
    lengths_B = torch.from_numpy(np.concatenate([group.lengths for group in groups]))
    tokens_of_group = [len(group.response_ids) for group in groups]
    sampled_N = np.concatenate([group.loss_mask for group in groups])
    scored_N = np.repeat(np.concatenate([group.scored for group in groups]), lengths_B.numpy())
    signal_N = np.repeat(np.array(has_signal), tokens_of_group)
    behavior_logprobs_N = torch.from_numpy(np.concatenate([group.behavior_logprobs for group in groups]))
    missing_N = np.zeros_like(sampled_N)
    if algorithm.correction != "none":
        missing_N = is_missing(behavior_logprobs_N).numpy()
    in_loss_N = sampled_N & scored_N & ~missing_N
    response_N = np.repeat(np.arange(len(lengths_B)), lengths_B.numpy())
    loss_lengths_B = torch.from_numpy(np.bincount(response_N[in_loss_N], minlength=len(lengths_B)))
    weights_B = token_weights(loss_lengths_B, aggregation=algorithm.aggregation)
    num_sampled = max(1, int(sampled_N.sum()))
    return StepBatch(
        groups=tuple(groups),
        advantages_N=torch.cat(advantages).repeat_interleave(lengths_B),
        token_weights_N=weights_B.repeat_interleave(lengths_B),
        trained_N=in_loss_N & signal_N,
        behavior_logprobs_N=behavior_logprobs_N,
        versions_N=torch.from_numpy(np.concatenate([group.versions for group in groups])),
        no_signal_groups=has_signal.count(False),
        masked_fraction={
            "unscored": float((sampled_N & ~scored_N).sum() / num_sampled),
            "no_signal": float((in_loss_N & ~signal_N).sum() / num_sampled),
            "missing_logprob": float((sampled_N & scored_N & missing_N).sum() / num_sampled),
        },
    )
