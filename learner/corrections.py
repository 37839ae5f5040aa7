"""Off-policy corrections: how the loss makes up for tokens that another policy sampled. _N: trained tokens.

The log correction is proximal minus behavior log-probability: the policy that the learner started the batch
with, against the one that sampled (an older version, in another engine's arithmetic).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.learner.losses import MAX_LOG_RATIO


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceStatistics:
    """Of the uncapped weights of one optimizer step."""

    mean: float
    max: float
    p99: float
    ess_fraction: float
    """Effective sample size over the number of tokens, (sum w)^2 / (n sum w^2), in (0, 1]."""
    k1: float
    """KL(behavior || proximal), mean of -log w (nats per token; can be negative)."""
    k3: float
    """The same, mean of w - 1 - log w: never negative, less noise."""


def truncated_importance_weights(log_correction_N: Tensor, cap: float) -> Tensor:
    """min(exp(log correction), cap), detached: truncated importance sampling per token (IMPALA's rho,
    arXiv 1802.01561)."""
    return importance_weights(log_correction_N).clamp(max=cap)


def importance_weights(log_correction_N: Tensor) -> Tensor:
    """exp(log correction), detached, uncapped but for the clamp that keeps it finite."""
    return log_correction_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_missing(behavior_logprobs_N: Tensor) -> Tensor:
    """[N] bool: the engine gave no usable log-probability, so that no weight exists; such a token leaves the
    loss and is counted. (0.0 is a probability of 1, not a missing value.)"""
    return ~torch.isfinite(behavior_logprobs_N)


def k3(log_correction_N: Tensor) -> Tensor:
    """Per token: w - 1 - log w, an unbiased estimate of KL(behavior || proximal) under the behavior policy that
    is never negative (Schulman, "Approximating KL divergence", 2020)."""
    clamped_N = log_correction_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped_N) - clamped_N


def importance_statistics(log_correction_N: Tensor) -> ImportanceStatistics | None:
    """Of tokens whose behavior log-probability is known; None when there are none."""
    if log_correction_N.numel() == 0:
        return None
    log_correction_N = log_correction_N.detach().to(torch.float64)
    weights = importance_weights(log_correction_N)
    return ImportanceStatistics(
        mean=float(weights.mean()),
        max=float(weights.max()),
        p99=float(np.quantile(weights.cpu().numpy(), 0.99)),
        ess_fraction=float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum())),
        k1=float(-log_correction_N.mean()),
        k3=float(k3(log_correction_N).mean()),
    )
