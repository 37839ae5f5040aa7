"""What an optimizer step reports, and how it is added up over micro-batches. _M: trained tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.learner.batching import Group
from headway.learner.corrections import importance_statistics, importance_weights, is_missing, k3
from headway.learner.losses import PolicyLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What one optimizer step did. Values over trained tokens are None when nothing was trained."""

    version: int
    """Optimizer steps applied, this one included."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    reward_mean: float | None
    """Over scored responses; None without any."""
    rewards: list[float]
    """Of scored responses."""
    num_tokens: int
    """Tokens that went through the forward and backward pass."""
    response_lengths: list[int]
    """Of all responses, in tokens."""
    truncated_fraction: float
    """Of all responses."""
    no_signal_groups: int
    """Groups whose advantages are all 0."""
    num_unscored: int
    ess_fraction: float | None
    importance_weights: np.ndarray
    """[num_tokens] float32, uncapped."""
    behavior_kl: float | None
    """k3 of KL(behavior || proximal), nats per token."""
    engine_learner_kl: float | None
    """The same against the current policy, over tokens that it sampled itself (version lag 0): what is left is the
    difference in arithmetic. None when no such token was trained."""
    clipped_fraction: float | None
    """Share of trained tokens whose gradient the clip cut off."""
    masked_fraction: dict[str, float]
    """Share of sampled tokens that were not trained, by reason: `unscored`, `no_signal`, `missing_logprob`."""
    entropy: float | None
    """Mean over trained tokens (nats)."""
    seconds: dict[str, float]
    """By stage: `unpack`, `forward_backward`, `optimizer`. Work for the whole batch counts for its first step."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over the micro-batches of one step, all on the CPU."""

    num_tokens: int = 0
    loss: float = 0.0
    num_clipped: int = 0
    entropy: float = 0.0
    log_corrections: list[Tensor] = field(default_factory=list)
    """[M] each, where the behavior log-probability is known."""
    own_k3: list[Tensor] = field(default_factory=list)
    """[M] each, of tokens that the current version sampled."""

    def add(
        self,
        policy: PolicyLoss,
        entropy_M: Tensor,
        *,
        current_M: Tensor,
        proximal_M: Tensor,
        behavior_M: Tensor,
        own_M: Tensor,
    ) -> None:
        """Log-probabilities [M] of the three policies; own_M: bool, sampled by the current version."""
        known_M = ~is_missing(behavior_M)
        self.num_tokens += len(current_M)
        self.loss += policy.loss.item()
        self.num_clipped += int(policy.num_clipped.item())
        self.entropy += float(entropy_M.sum())
        self.log_corrections.append((proximal_M - behavior_M)[known_M])
        self.own_k3.append(k3(current_M - behavior_M)[known_M & own_M])

    def stats(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        grad_norm: float,
        learning_rate: float,
        no_signal_groups: int,
        masked_fraction: dict[str, float],
        seconds: dict[str, float],
    ) -> StepStats:
        log_correction_N = torch.cat([torch.zeros(0), *self.log_corrections])
        own_k3_N = torch.cat([torch.zeros(0), *self.own_k3])
        importance = importance_statistics(log_correction_N)
        rewards = np.concatenate([group.rewards[group.scored] for group in groups])
        truncated = np.concatenate([group.truncated for group in groups])
        return StepStats(
            version=version,
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            reward_mean=float(rewards.mean(dtype=np.float64)) if len(rewards) else None,
            rewards=rewards.tolist(),
            num_tokens=self.num_tokens,
            response_lengths=np.concatenate([group.lengths for group in groups]).tolist(),
            truncated_fraction=float(truncated.mean()),
            no_signal_groups=no_signal_groups,
            num_unscored=len(truncated) - len(rewards),
            ess_fraction=importance.ess_fraction if importance else None,
            importance_weights=importance_weights(log_correction_N).numpy(),
            behavior_kl=importance.k3 if importance else None,
            engine_learner_kl=float(own_k3_N.mean()) if len(own_k3_N) else None,
            clipped_fraction=self.num_clipped / self.num_tokens if self.num_tokens else None,
            masked_fraction=masked_fraction,
            entropy=self.entropy / self.num_tokens if self.num_tokens else None,
            seconds=seconds,
        )
