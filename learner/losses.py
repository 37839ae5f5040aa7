"""Policy losses: pure float32 functions of tensors. _N: tokens, flattened over responses; _B: responses."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before `exp`, so that a finite input has a finite value and gradient."""

Aggregation = Literal["token_mean", "seq_mean_token_mean"]


class PolicyLoss(NamedTuple):
    loss: Tensor
    """[] float32, connected to the log-probabilities even when every token is masked."""
    num_clipped: Tensor
    """[] int64, unmasked tokens whose gradient the clip has cut off."""


def clipped_surrogate(
    log_ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_ratio): PPO (arXiv 1707.06347, equation 7)
    with the two bounds apart (DAPO, arXiv 2503.14476)."""
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def clip_is_active(log_ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """[N] bool: where the clip cuts the gradient off: the ratio has already moved past the bound on the side
    that the advantage asks for."""
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    up_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    down_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    return up_N | down_N


def token_weights(lengths_B: Tensor, *, aggregation: Aggregation) -> Tensor:
    """[B] float32: the weight of each token of a response, so that loss = sum(token loss * weight).

    lengths_B: trained tokens of every response of the **whole** optimizer step. The denominators are sums over
    it, so how the step is cut into micro-batches, packed, padded or spread cannot matter.
    `token_mean`: 1 / all trained tokens. `seq_mean_token_mean`: 1 / (own tokens * number of responses that have
    any). A response without trained tokens has weight 0.
    """
    lengths_B = lengths_B.to(torch.float64)
    has_tokens_B = lengths_B > 0
    if aggregation == "token_mean":
        weights_B = torch.full_like(lengths_B, 1.0) / lengths_B.sum().clamp(min=1)
    else:
        weights_B = 1.0 / (lengths_B.clamp(min=1) * has_tokens_B.sum().clamp(min=1))
    return torch.where(has_tokens_B, weights_B, 0.0).to(torch.float32)


def policy_loss(
    logprobs_N: Tensor,
    proximal_logprobs_N: Tensor,
    advantages_N: Tensor,
    importance_N: Tensor,
    token_weights_N: Tensor,
    mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Decoupled PPO (AReaL, arXiv 2505.24298, equation 5): the ratio to the proximal policy is clipped, and each
    token is weighted by the proximal policy's importance over the behavior policy.

    All arguments are [N]; only `logprobs_N` carries gradient. Masked positions may hold anything, NaN included,
    and change neither value nor gradient: they are not selected. A NaN in an unmasked position makes the loss NaN.
    """
    shapes = {
        tuple(t.shape)
        for t in (logprobs_N, proximal_logprobs_N, advantages_N, importance_N, token_weights_N, mask_N)
    }
    if len(shapes) != 1 or logprobs_N.dim() != 1:
        raise ValueError(f"policy_loss needs one value per token, got shapes {sorted(shapes)}")
    logprobs_M = logprobs_N[mask_N].float()
    advantages_M = advantages_N[mask_N]
    log_ratio_M = logprobs_M - proximal_logprobs_N[mask_N].detach()
    token_loss_M = clipped_surrogate(log_ratio_M, advantages_M, clip_low=clip_low, clip_high=clip_high)
    factor_M = importance_N[mask_N].detach() * token_weights_N[mask_N]
    with torch.no_grad():
        active_M = clip_is_active(log_ratio_M, advantages_M, clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss((token_loss_M * factor_M).sum(), active_M.sum())
