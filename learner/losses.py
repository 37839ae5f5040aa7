"""Policy losses: pure float32 functions of tensors. _N: tokens, flattened over responses; _M: those of them that are
trained; _B: responses of the optimizer step; _S: responses of the micro-batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before `exp`, so that a finite input has a finite value and gradient."""

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"]
Ratio = Literal["token", "sequence", "sequence_token", "trajectory", "mixed"]
Objective = Literal["clip", "cispo", "masked", "none", "trpo"]


class PolicyLoss(NamedTuple):
    loss: Tensor
    """[] float32, connected to the log-probabilities even when every token is masked."""
    num_clipped: Tensor
    """[] int64, unmasked tokens whose gradient the trust region cuts off."""


class Responses(NamedTuple):
    """Which tokens belong together."""

    index_M: Tensor
    """int64 in [0, S): the token's response."""
    lengths_S: Tensor
    """float32, tokens."""

    def sums(self, values_M: Tensor) -> Tensor:
        """[S]: over the tokens of each response."""
        return values_M.new_zeros(len(self.lengths_S)).index_add(0, self.index_M, values_M)


def responses_of(response_M: Tensor) -> Responses:
    """From one id per token: any integers, in any order."""
    _, index_M, lengths_S = torch.unique(response_M, return_inverse=True, return_counts=True)
    return Responses(index_M, lengths_S.to(torch.float32))


def check_shapes(where: str, **tensors: Tensor) -> None:
    """Raises `ValueError` with every shape unless all are the same [N]: a [B] that met a [B, T] would broadcast."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{where} needs one value per token, got shapes {shapes}")


def token_weights(lengths_B: Tensor, *, aggregation: Aggregation, budget: int) -> Tensor:
    """[B] float32: the weight of each token of a response, so that loss = sum(token loss * weight).

    lengths_B: tokens in the loss, of every response of the **whole** optimizer step. The denominators are sums over
    it, so how the step is cut into micro-batches, packed, padded or spread over ranks cannot matter. A response
    without such tokens has weight 0 and is not counted. With R responses that have any:

    `token_mean` (DAPO, arXiv 2503.14476): 1 / all tokens. `seq_mean_token_mean` (GRPO, arXiv 2402.03300):
    1 / (own tokens * R). `seq_mean_token_sum_norm` (Dr. GRPO, arXiv 2503.20783): 1 / (budget * R), where budget is the
    most tokens that a response may have. `seq_mean_token_sum` (RLOO, arXiv 2402.14740): 1 / R.
    """
    lengths_B = lengths_B.to(torch.float64)
    has_tokens_B = lengths_B > 0
    num_responses = has_tokens_B.sum().clamp(min=1)
    if aggregation == "token_mean":
        denominators_B = lengths_B.sum()
    elif aggregation == "seq_mean_token_mean":
        denominators_B = lengths_B * num_responses
    elif aggregation == "seq_mean_token_sum_norm":
        denominators_B = budget * num_responses
    else:
        denominators_B = num_responses
    return torch.where(has_tokens_B, 1.0 / denominators_B, 0.0).to(torch.float32)


def response_log_ratio(log_ratio_M: Tensor, response_M: Tensor, *, ratio: Ratio, mix: float) -> Tensor:
    """[M] log-ratio at the granularity of the trust region, from the log-ratio of each token.

    response_M: int64, any id per response; a response is here with all its trained tokens or not at all.
    `token`: its own. `sequence`: mean over the response, so that the gradient of every token spreads over all of
    them (GSPO, arXiv 2507.18071, equation 7). `sequence_token`: the same value, the gradient of the token alone
    (GSPO-token, section 4.3: sg(s_i) * pi / sg(pi)). `trajectory`: sum over the response (TIC-GRPO, arXiv 2508.02833).
    `mixed`: (1 - mix) * token + mix * sequence.
    """
    if ratio == "token":
        return log_ratio_M
    responses = responses_of(response_M)
    sums_S = responses.sums(log_ratio_M)
    if ratio == "trajectory":
        return sums_S[responses.index_M]
    mean_M = (sums_S / responses.lengths_S)[responses.index_M]
    if ratio == "sequence":
        return mean_M
    if ratio == "sequence_token":
        return mean_M.detach() + (log_ratio_M - log_ratio_M.detach())
    return (1 - mix) * log_ratio_M + mix * mean_M


def clip_interval(
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_importance_M: Tensor | None = None,
    staleness_adaptive: float | None = None,
) -> tuple[Tensor, Tensor]:
    """[M], [M]: the ends 1 - clip_low and 1 + clip_high.

    With a threshold `staleness_adaptive` (nats), the end that the sign of the advantage selects contracts for tokens
    in the tail of the mismatch (after SAT, arXiv 2607.18722). The rule as it is here: m = |log importance weight|,
    k = exp(-max(0, m - threshold)) in (0, 1]; A > 0: the upper end is 1 + clip_high * k; A < 0: the lower end is
    1 - clip_low * k. The other end stays. The weight is that of the old-policy side over the behavior policy:
    proximal over behavior, or current over behavior where behavior is the old policy.
    """
    low_M = torch.full_like(advantages_M, 1 - clip_low)
    high_M = torch.full_like(advantages_M, 1 + clip_high)
    if staleness_adaptive is None:
        return low_M, high_M
    if log_importance_M is None:
        raise ValueError("staleness_adaptive needs the log importance weight of each token")
    room_M = torch.exp(-(log_importance_M.detach().abs() - staleness_adaptive).clamp(0, MAX_LOG_RATIO))
    return (
        torch.where(advantages_M < 0, 1 - clip_low * room_M, low_M),
        torch.where(advantages_M > 0, 1 + clip_high * room_M, high_M),
    )


def token_objective(
    logprobs_M: Tensor,
    ratio_M: Tensor,
    advantages_M: Tensor,
    low_M: Tensor,
    high_M: Tensor,
    *,
    objective: Objective,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """[M] float32 to be maximised, and [M] bool where the trust region cuts the gradient off. sg: no gradient.

    `clip`: min(r A, clip(r, low, high) A) (PPO, arXiv 1707.06347, equation 7; the bounds apart: DAPO, arXiv
    2503.14476). That bounds r from above where A > 0, and from below where A < 0. `dual_clip` c: max(that, c A) where
    A < 0 (arXiv 1912.09729), which bounds r by c there.
    `cispo`: sg(clip(r, low, high)) A log pi: every token keeps its gradient (MiniMax-M1, arXiv 2506.13585).
    `masked`: M sg(r) A log pi, with M = 0 where PPO would clip, else 1 (the unified form in the same paper).
    `none`: A log pi. `trpo`: r A, the surrogate whose step the KL bounds elsewhere (arXiv 1502.05477).
    """
    cut_M = torch.zeros_like(ratio_M, dtype=torch.bool)
    if objective == "none":
        return advantages_M * logprobs_M, cut_M
    if objective == "trpo":
        return ratio_M * advantages_M, cut_M
    if objective == "cispo":
        return ratio_M.detach().clamp(low_M, high_M) * advantages_M * logprobs_M, cut_M
    lower_M = torch.where(advantages_M < 0, low_M, 0.0)
    upper_M = torch.where(advantages_M > 0, high_M, torch.inf)
    if dual_clip is not None and objective == "clip":
        upper_M = torch.where(advantages_M < 0, upper_M.clamp(max=dual_clip), upper_M)
    cut_M = (ratio_M < lower_M) | (ratio_M > upper_M)
    bounded_M = ratio_M.clamp(lower_M, upper_M)
    if objective == "clip":
        return bounded_M * advantages_M, cut_M
    return ~cut_M * bounded_M.detach() * advantages_M * logprobs_M, cut_M


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    factor_N: Tensor,
    token_weights_N: Tensor,
    response_N: Tensor,
    mask_N: Tensor,
    *,
    objective: Objective,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
    ratio_mix: float = 0.5,
    dual_clip: float | None = None,
    staleness_adaptive: float | None = None,
    log_importance_N: Tensor | None = None,
) -> PolicyLoss:
    """-sum over unmasked tokens of token objective * factor * token weight.

    With the proximal policy as the old one and the importance weight proximal over behavior as the factor this is
    decoupled PPO (AReaL, arXiv 2505.24298, equation 5); with the behavior policy as the old one the factor only
    rejects.

    All arguments are [N] and only `logprobs_N` carries gradient. `factor_N`: detached weight of each token, 0 where
    rejected (`corrections.correct`); `token_weights_N`: `token_weights` of its response; `response_N`: int64, which
    tokens belong together; `log_importance_N`: for `staleness_adaptive` (`clip_interval`). Masked positions may hold
    anything, NaN included, and change neither value nor gradient: they are not selected. A NaN in an unmasked position
    makes the loss NaN. Log-ratios beyond +-MAX_LOG_RATIO count as that and have no gradient; `num_clipped` does not
    count them. Raises `ValueError` when the shapes differ.
    """
    check_shapes(
        "policy_loss",
        logprobs=logprobs_N,
        old_logprobs=old_logprobs_N,
        advantages=advantages_N,
        factor=factor_N,
        token_weights=token_weights_N,
        response=response_N,
        mask=mask_N,
        **({} if log_importance_N is None else {"log_importance": log_importance_N}),
    )
    logprobs_M = logprobs_N[mask_N].float()
    advantages_M = advantages_N[mask_N].detach()
    log_ratio_M = response_log_ratio(
        logprobs_M - old_logprobs_N[mask_N].detach(), response_N[mask_N], ratio=ratio, mix=ratio_mix
    )
    low_M, high_M = clip_interval(
        advantages_M,
        clip_low=clip_low,
        clip_high=clip_high,
        log_importance_M=None if log_importance_N is None else log_importance_N[mask_N],
        staleness_adaptive=staleness_adaptive,
    )
    objective_M, cut_M = token_objective(
        logprobs_M,
        log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        advantages_M,
        low_M,
        high_M,
        objective=objective,
        dual_clip=dual_clip,
    )
    weight_M = factor_N[mask_N].detach() * token_weights_N[mask_N]
    return PolicyLoss(-(objective_M * weight_M).sum(), cut_M.sum())
