"""KL of the policy to the reference, from sampled tokens: estimates per token, and the term of the loss.

Value and gradient are different questions. `k1` and `k3` estimate KL(policy || reference) without bias, but the
expected gradient of `k1` is 0 and that of `k3` is the gradient of the forward KL(reference || policy); the gradient
of `k2` is that of KL(policy || reference), though its value is biased. All of it holds for tokens that the policy
itself sampled; others need the importance weight. _N: tokens, _M: trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, expm1

from headway.learner.losses import MAX_LOG_RATIO, check_shapes

Estimator = Literal["k1", "k2", "k3", "k3_plus", "unbiased"]


def k1(log_ratio_N: Tensor) -> Tensor:
    """-d, for d = reference minus policy log-probability: unbiased, noisy, negative for many tokens."""
    return -log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """d^2 / 2: never negative, biased."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(d) - 1 - d, as expm1(d) - d: unbiased, never negative, little noise (Schulman, "Approximating KL
    divergence", 2020).

    d is bounded above by MAX_LOG_RATIO before `exp`, where value and gradient would overflow. It is not bounded below:
    there `exp` goes to 0, and the linear rest is what pulls a policy back that has gone far above the reference.
    """
    bounded_N = log_ratio_N.clamp(max=MAX_LOG_RATIO)
    return expm1(bounded_N) - bounded_N


ESTIMATES: dict[Literal["k1", "k2", "k3"], Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Each takes d = reference minus policy log-probability."""


def kl_loss(
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    factor_N: Tensor,
    token_weights_N: Tensor,
    mask_N: Tensor,
    *,
    estimator: Estimator,
) -> Tensor:
    """[] float32: sum over unmasked tokens of estimate * factor * token weight; the coefficient is the caller's.

    All arguments are [N] and only `logprobs_N` carries gradient. Expected gradient of each, with the right factor:
    `k1`: 0. `k2`: of KL(policy || reference). `k3`: of KL(reference || policy), as in published GRPO. `k3_plus`:
    value of k3, gradient of k2 (straight through). `unbiased`: k3 times policy over behavior, with gradient through
    both, which is that of KL(policy || reference) whoever sampled (DeepSeek-V3.2, arXiv 2512.02556).

    `factor_N`: detached importance weight of each token, 0 where it is rejected. It multiplies all but `unbiased`,
    which carries its own weight, takes no other and keeps rejected tokens. `behavior_logprobs_N` is read by
    `unbiased` only. Masked positions may hold anything, NaN included. Raises `ValueError` when the shapes differ.
    """
    check_shapes(
        "kl_loss",
        logprobs=logprobs_N,
        reference_logprobs=reference_logprobs_N,
        behavior_logprobs=behavior_logprobs_N,
        factor=factor_N,
        token_weights=token_weights_N,
        mask=mask_N,
    )
    logprobs_M = logprobs_N[mask_N].float()
    log_ratio_M = reference_logprobs_N[mask_N].detach() - logprobs_M
    weight_M = token_weights_N[mask_N]
    if estimator == "unbiased":
        log_correction_M = logprobs_M - behavior_logprobs_N[mask_N].detach()
        correction_M = log_correction_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return (correction_M * k3(log_ratio_M) * weight_M).sum()
    if estimator == "k3_plus":
        squared_M = k2(log_ratio_M)
        estimate_M = k3(log_ratio_M).detach() + (squared_M - squared_M.detach())
    else:
        estimate_M = ESTIMATES[estimator](log_ratio_M)
    return (estimate_M * factor_N[mask_N].detach() * weight_M).sum()
