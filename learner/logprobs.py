"""Log-probabilities of given tokens straight from hidden states, in blocks of the vocabulary.

_N: tokens, _H: hidden size, _V: vocabulary, _K: one block of it. The logits [N, V] never exist at once: the
forward pass keeps a running maximum and sum per token, and the backward pass computes each block of logits again.
Blocks of the vocabulary, not of tokens, so that every block of the head's gradient is written once instead of
being summed up over many small products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 1 << 22
"""Elements of one block of logits (16 MiB in float32)."""

LEAST_LOG = -1000.0
"""What a log-probability is raised to before its product with the probability, which is 0 there: 0 * -inf would be
NaN."""


class TokenLogprobs(NamedTuple):
    logprobs: Tensor
    """[N] float32, at most 0, with gradient."""
    entropy: Tensor
    """[N] float32, of the whole next-token distribution (nats), with gradient."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
) -> TokenLogprobs:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy.

    The matrix products run in the dtype of `hidden_NH`; logits are float32 (float64 for float64 input) before
    anything else happens to them. Gradients of both results reach `hidden_NH`, `weight_VH` and `bias_V`; a result
    that the loss leaves out costs its backward pass nothing. There are no second derivatives: asking for them raises
    `RuntimeError`. A bias of -inf bans its token: entropy and gradients stay finite.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature)  # type: ignore[misc]
    return TokenLogprobs(logprobs, entropy)


def _blocks(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[tuple[int, int]]:
    vocabulary = weight_VH.shape[0]
    width = max(256, BLOCK_ELEMENTS // max(1, hidden_NH.shape[0]))
    for start in range(0, vocabulary, width):
        yield start, min(vocabulary, start + width)


def _logits(hidden_NH: Tensor, weight_KH: Tensor, bias_K: Tensor | None, temperature: float) -> Tensor:
    logits_NK = hidden_NH @ weight_KH.to(hidden_NH.dtype).T
    logits_NK = logits_NK.to(torch.promote_types(torch.float32, logits_NK.dtype))
    if bias_K is not None:
        logits_NK += bias_K
    if temperature != 1.0:
        logits_NK /= temperature
    return logits_NK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.float32, hidden_NH.dtype)
        # The least finite value instead of -inf: differences to it stay defined, and exp() of them is 0.
        max_N = hidden_NH.new_full((hidden_NH.shape[0],), torch.finfo(dtype).min, dtype=dtype)
        sum_N = torch.zeros_like(max_N)  # of exp(logit - max)
        moment_N = torch.zeros_like(max_N)  # of exp(logit - max) * (logit - max)
        target_N = torch.zeros_like(max_N)
        for start, end in _blocks(hidden_NH, weight_VH):
            bias_K = None if bias_V is None else bias_V[start:end]
            logits_NK = _logits(hidden_NH, weight_VH[start:end], bias_K, temperature)
            rows = ((targets_N >= start) & (targets_N < end)).nonzero().squeeze(1)
            target_N[rows] = logits_NK[rows, targets_N[rows] - start]
            new_max_N = torch.maximum(max_N, logits_NK.amax(dim=1))
            shift_N = max_N - new_max_N
            scale_N = shift_N.exp()
            logits_NK -= new_max_N[:, None]
            logits_NK.clamp_(min=LEAST_LOG)
            exp_NK = logits_NK.exp()
            moment_N = scale_N * (moment_N + shift_N * sum_N) + torch.einsum("nk,nk->n", exp_NK, logits_NK)
            sum_N = scale_N * sum_N + exp_NK.sum(dim=1)
            max_N = new_max_N
        normalizer_N = max_N + sum_N.log()
        entropy_N = sum_N.log() - moment_N / sum_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an unused result has gradient None, not zeros
        return target_N - normalizer_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        of_logprob_N, of_entropy_N = (None if g is None else g / ctx.temperature for g in grad_outputs)
        if of_logprob_N is None and of_entropy_N is None:
            return None, None, None, None, None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=normalizer_N.dtype)
        grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
        for start, end in _blocks(hidden_NH, weight_VH):
            weight_KH = weight_VH[start:end].to(hidden_NH.dtype)
            bias_K = None if bias_V is None else bias_V[start:end]
            logits_NK = _logits(hidden_NH, weight_KH, bias_K, ctx.temperature)
            grad_logits_NK = _softmax_part(
                logits_NK.sub_(normalizer_N[:, None]), entropy_N, of_logprob_N, of_entropy_N
            )
            if of_logprob_N is not None:
                rows = ((targets_N >= start) & (targets_N < end)).nonzero().squeeze(1)
                grad_logits_NK[rows, targets_N[rows] - start] += of_logprob_N[rows]
            if grad_bias_V is not None:
                grad_bias_V[start:end] = grad_logits_NK.sum(dim=0)
            grad_logits_NK = grad_logits_NK.to(hidden_NH.dtype)
            if needs_hidden:
                grad_hidden_NH += grad_logits_NK @ weight_KH
            if grad_weight_VH is not None:
                grad_weight_VH[start:end] = grad_logits_NK.T @ hidden_NH
        return (
            grad_hidden_NH.to(hidden_NH.dtype) if needs_hidden else None,
            grad_weight_VH,
            grad_bias_V,
            None,
            None,
        )


def _softmax_part(
    log_p_NK: Tensor, entropy_N: Tensor, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None
) -> Tensor:
    """[N, K] gradient of the logits, in place of `log_p_NK`, but for the 1 at the target:

    d log p_target / d logit_v = [v is target] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    if of_entropy_N is None:
        assert of_logprob_N is not None
        return log_p_NK.exp_().mul_(-of_logprob_N[:, None])
    p_NK = log_p_NK.exp()
    offset_N = of_entropy_N * entropy_N if of_logprob_N is None else of_entropy_N * entropy_N + of_logprob_N
    factor_NK = log_p_NK.clamp_(min=LEAST_LOG).mul_(of_entropy_N[:, None]).add_(offset_N[:, None])
    return factor_NK.mul_(p_NK).neg_()
