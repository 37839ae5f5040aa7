"""What an optimizer step reports, and how it is added up over micro-batches and ranks. _M: trained tokens of a
micro-batch; _K: trained tokens of the step, in the order in which they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.core.sections import Algorithm
from headway.learner.corrections import (
    Counterfactual,
    ImportanceStatistics,
    counterfactuals,
    ess_fraction,
    importance_statistics,
    importance_weights,
    is_missing,
    statistics_by_lag,
)
from headway.learner.kl import k3
from headway.learner.step import StepBatch
from headway.learner.trpo import TrpoResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What one optimizer step did. Values over trained tokens are None when nothing was trained."""

    version: int
    """Optimizer steps applied, this one included."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    ess_lr_scale: float
    """Factor in the learning rate that the effective sample size asked for; 1 without `ess_lr`."""
    reward_mean: float | None
    """Over scored responses as the verifier paid them; None without any."""
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
    """Of the uncapped importance weights."""
    correction_ess_fraction: float | None
    """Of the factors that the loss was weighted with: corrections times lag factors."""
    importance_weights: np.ndarray
    """[num_tokens] float32, uncapped."""
    by_lag: dict[int, ImportanceStatistics]
    """The same weights by the version lag of their tokens, up to `Config.max_trained_lag`."""
    counterfactuals: dict[str, Counterfactual]
    """What each correction would have rejected and left, whichever are on."""
    behavior_kl: float | None
    """k3 of KL(behavior || proximal), nats per token."""
    engine_learner_kl: float | None
    """The same against the current policy, over tokens that it sampled itself (version lag 0): what is left is the
    difference in arithmetic. None when no such token was trained."""
    kl_reference: float | None
    """k3 of KL(policy || reference), nats per token; None without a reference."""
    kl_coef: float | None
    """Weight of the KL; None without one."""
    clipped_fraction: float | None
    """Share of trained tokens whose gradient the trust region cut off."""
    masked_fraction: dict[str, float]
    """Share of sampled tokens that did not count, by reason: `unscored`, `truncated`, `no_signal`,
    `missing_logprob`, `withheld`, and every rejecting correction that is on."""
    rejected_responses: dict[str, float]
    """Share of trained responses that lost a token, by rejecting correction."""
    entropy: float | None
    """Mean over trained tokens (nats)."""
    sft_loss: float | None
    """Mean -log p of the step's demonstrations (nats per token); None without them."""
    stopped_by_kl: bool
    """The weights were left alone because the KL from the proximal policy had passed `kl_stop`."""
    trust_region: TrpoResult | None
    """Of a `trpo` step."""
    seconds: dict[str, float]
    """By stage: `unpack`, `forward_backward`, `optimizer`. Work for the whole batch counts for its first step."""

    @property
    def moved(self) -> bool:
        """Whether the step changed the trained weights."""
        if self.trust_region is not None:
            return self.trust_region.accepted
        return self.learning_rate > 0 and self.grad_norm > 0


@dataclass(kw_only=True, slots=True)
class Tally:
    """What micro-batches leave behind, on the CPU. Lists hold one [M] tensor per micro-batch."""

    loss: float = 0.0
    num_clipped: int = 0
    sft_loss: float | None = None
    """This rank's part of the mean."""
    tokens: list[Tensor] = field(default_factory=list)
    """int64, the tokens' places in the step's flat arrays."""
    current: list[Tensor] = field(default_factory=list)
    """Log-probabilities before the update."""
    factors: list[Tensor] = field(default_factory=list)
    """What correction and lag policy multiplied the loss with."""
    entropy: list[Tensor] = field(default_factory=list)
    rejected: dict[str, list[Tensor]] = field(default_factory=dict)
    """bool, by correction."""
    fault: tuple[str, Tensor] | None = None
    """What was not finite, and in which tokens."""

    @classmethod
    def merged(cls, tallies: Sequence[Tally]) -> Tally:
        """Of all ranks together."""
        total = cls()
        for tally in tallies:
            total.loss += tally.loss
            total.num_clipped += tally.num_clipped
            if tally.sft_loss is not None:
                total.sft_loss = (total.sft_loss or 0.0) + tally.sft_loss
            total.fault = total.fault or tally.fault
            for name in ("tokens", "current", "factors", "entropy"):
                getattr(total, name).extend(getattr(tally, name))
            for name, masks in tally.rejected.items():
                total.rejected.setdefault(name, []).extend(masks)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The trained tokens of a step under the three policies."""

    tokens_K: Tensor
    current_K: Tensor
    log_correction_K: Tensor
    """Old-policy side minus behavior; NaN where the engine gave no log-probability."""
    staleness_K: Tensor
    """Behavior minus current."""
    lag_K: Tensor
    """int64, optimizer steps."""

    @classmethod
    def of(cls, tally: Tally, step: StepBatch, proximal_N: Tensor | None, version: int) -> Trained:
        """`proximal_N`: None where the current policy is the proximal one."""
        tokens_K = torch.cat([torch.zeros(0, dtype=torch.int64), *tally.tokens])
        current_K = torch.cat([torch.zeros(0), *tally.current])
        behavior_K = step.behavior_logprobs_N[tokens_K]
        proximal_K = current_K if proximal_N is None else proximal_N[tokens_K]
        behavior_K = torch.where(is_missing(behavior_K), torch.nan, behavior_K)
        return cls(
            tokens_K=tokens_K,
            current_K=current_K,
            log_correction_K=proximal_K - behavior_K,
            staleness_K=behavior_K - current_K,
            lag_K=version - step.versions_N[tokens_K],
        )

    @property
    def known_K(self) -> Tensor:
        """bool: tokens whose behavior log-probability is known."""
        return ~torch.isnan(self.log_correction_K)


def step_stats(
    step: StepBatch,
    tally: Tally,
    trained: Trained,
    algorithm: Algorithm,
    *,
    version: int,
    grad_norm: float,
    learning_rate: float,
    ess_lr_scale: float,
    stopped_by_kl: bool,
    trust_region: TrpoResult | None,
    seconds: dict[str, float],
) -> StepStats:
    """The report of one step; `version` is the one that it made."""
    groups, known_K = step.groups, trained.known_K
    tokens_K = trained.tokens_K
    log_correction = trained.log_correction_K[known_K]
    responses = step.response_N[tokens_K]
    lag = trained.lag_K[known_K]
    importance = importance_statistics(log_correction)
    own_k3 = k3(-trained.staleness_K[known_K])[lag == 0]
    rewards = np.concatenate([group.rewards[group.scored] for group in groups])
    truncated = np.concatenate([group.truncated for group in groups])
    num_sampled = max(1, sum(int(group.loss_mask.sum()) for group in groups))
    num_tokens = len(tokens_K)
    factors = torch.cat([torch.zeros(0), *tally.factors])
    rejected = {name: torch.cat(masks) for name, masks in tally.rejected.items()}
    num_responses = max(1, len(responses.unique()))
    kl_reference = None
    if step.reference_logprobs_N is not None and num_tokens:
        kl_reference = float(k3(step.reference_logprobs_N[tokens_K] - trained.current_K).mean())
    return StepStats(
        version=version,
        loss=tally.loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        ess_lr_scale=ess_lr_scale,
        reward_mean=float(rewards.mean(dtype=np.float64)) if len(rewards) else None,
        rewards=rewards.tolist(),
        num_tokens=num_tokens,
        response_lengths=np.concatenate([group.lengths for group in groups]).tolist(),
        truncated_fraction=float(truncated.mean()),
        no_signal_groups=step.no_signal_groups,
        num_unscored=len(truncated) - len(rewards),
        ess_fraction=importance.ess_fraction if importance else None,
        correction_ess_fraction=ess_fraction(factors) if num_tokens else None,
        importance_weights=importance_weights(log_correction).numpy(),
        by_lag=statistics_by_lag(log_correction, lag),
        counterfactuals=counterfactuals(
            log_correction,
            responses[known_K],
            step.advantages_N[tokens_K][known_K],
            trained.staleness_K[known_K],
            algorithm,
        ),
        behavior_kl=importance.k3 if importance else None,
        engine_learner_kl=float(own_k3.mean()) if len(own_k3) else None,
        kl_reference=kl_reference,
        kl_coef=step.kl_coef if algorithm.kl != "none" else None,
        clipped_fraction=tally.num_clipped / num_tokens if num_tokens else None,
        masked_fraction={
            **step.masked_fraction,
            **{name: float(mask.sum()) / num_sampled for name, mask in rejected.items()},
        },
        rejected_responses={
            name: len(responses[mask].unique()) / num_responses for name, mask in rejected.items()
        },
        entropy=float(torch.cat(tally.entropy).mean()) if num_tokens else None,
        sft_loss=tally.sft_loss,
        stopped_by_kl=stopped_by_kl,
        trust_region=trust_region,
        seconds=seconds,
    )
