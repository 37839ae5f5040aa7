"""Attention over prompts that share their answers' rows: each answer sees its prompt and itself.

_T: tokens of a micro-batch, one after another without padding; _Q: prompts; _P: padded prompt length; _A: answers per
prompt, padded; _R: padded answer length; _S: slots, Q * (P + A * R); _K: key-value heads; _M: query heads per
key-value head; _D: head size.

Everything in the network but attention works on the T tokens as one row. For attention they are spread over padded
slots, where the structure is regular: prompts attend to themselves; the answers' queries meet the prompt's keys, which
are not copied, and their own. One dense mask over a whole group would compute about five times as many scores for
eight short answers, and A times as many for long ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from headway.core.errors import DataError

PACKED_ATTENTION = "headway_packed"
"""Of this attention in `transformers`' table."""

MAX_DENSE_LENGTH = 256
"""Up to this many keys the scores are kept for the backward pass; beyond, answer by answer with torch's fused kernel,
which keeps none (and on CPUs is several times slower at short lengths)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Which tokens belong together: Q prompts, each followed by its answers."""

    prompt_lengths: tuple[int, ...]
    """[Q]."""
    answer_lengths: tuple[tuple[int, ...], ...]
    """[Q] tuples of the fed tokens of each answer; never 0."""
    slots_T: Tensor
    """[T] int64: each token's slot; slots of the prompts [Q, P] come first, then those of the answers [Q, A, R]."""
    prompt_padding_QP: Tensor | None
    """bool, True where a prompt has ended; None when all have the same length."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(Q, P, A, R)."""
        return (
            len(self.prompt_lengths),
            max(self.prompt_lengths),
            max(len(lengths) for lengths in self.answer_lengths),
            max((length for lengths in self.answer_lengths for length in lengths), default=0),
        )

    def to(self, device: torch.device) -> Packing:
        padding = self.prompt_padding_QP
        return Packing(
            prompt_lengths=self.prompt_lengths,
            answer_lengths=self.answer_lengths,
            slots_T=self.slots_T.to(device),
            prompt_padding_QP=None if padding is None else padding.to(device),
        )


def packing_of(prompt_lengths: list[int], answer_lengths: list[list[int]]) -> Packing:
    """Of tokens laid out as prompt, its answers, next prompt, its answers, ... Empty answers are left out."""
    answer_lengths = [[length for length in lengths if length] for lengths in answer_lengths]
    num_prompts, longest_prompt = len(prompt_lengths), max(prompt_lengths)
    most_answers = max(len(lengths) for lengths in answer_lengths)
    longest_answer = max((length for lengths in answer_lengths for length in lengths), default=0)
    slots: list[np.ndarray] = []
    for q, (prompt, answers) in enumerate(zip(prompt_lengths, answer_lengths, strict=True)):
        slots.append(q * longest_prompt + np.arange(prompt))
        for a, answer in enumerate(answers):
            first = num_prompts * longest_prompt + (q * most_answers + a) * longest_answer
            slots.append(first + np.arange(answer))
    lengths_Q = torch.tensor(prompt_lengths)
    return Packing(
        prompt_lengths=tuple(prompt_lengths),
        answer_lengths=tuple(map(tuple, answer_lengths)),
        slots_T=torch.from_numpy(np.concatenate(slots)),
        prompt_padding_QP=None
        if min(prompt_lengths) == longest_prompt
        else torch.arange(longest_prompt) >= lengths_Q[:, None],
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, K * M, T, D], key and value [1, K, T, D] -> [1, T, K * M, D], as `transformers` asks for it."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise DataError(
                f"the model's attention uses {name}, which the learner does not support (model.path)"
            )
    _, prompt, _, answer = packing.sizes
    attend = _dense if prompt + answer <= MAX_DENSE_LENGTH else _one_by_one
    return attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), packing, scaling
    )[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _dense(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, scaling: float) -> Tensor:
    q, p, a, r = packing.sizes
    heads, size = query_THD.shape[1:]
    kv = key_TKD.shape[1]
    m = heads // kv
    num_slots = q * (p + a * r)
    query, key, value = (
        _Spread.apply(x.reshape(len(x), -1), packing.slots_T, num_slots)
        for x in (query_THD, key_TKD, value_TKD)
    )
    prompts = q * p
    later_PP = torch.ones(p, p, dtype=torch.bool, device=query.device).triu(1)
    # Query heads that share a key head stand side by side as more queries. Padding needs a mask only among keys that
    # real queries see: what comes after a token is hidden from it anyway.
    prompt_query = query[:prompts].view(q, p, kv, m, size).permute(0, 2, 3, 1, 4).reshape(q, kv, m * p, size)
    prompt_key, prompt_value = (x[:prompts].view(q, p, kv, size).transpose(1, 2) for x in (key, value))
    scores = (prompt_query @ prompt_key.transpose(2, 3)).view(q, kv, m, p, p) * scaling
    weights = _softmax(scores.masked_fill(later_PP, float("-inf")))
    out = weights.view(q, kv, m * p, p) @ prompt_value
    outputs = [out.view(q, kv, m, p, size).permute(0, 3, 1, 2, 4).reshape(prompts, heads * size)]
    if r:
        later_RR = torch.ones(r, r, dtype=torch.bool, device=query.device).triu(1)
        answer_query = (
            query[prompts:].view(q, a, r, kv, m, size).permute(0, 3, 1, 4, 2, 5).contiguous()
        )  # QKAMRD
        own_key, own_value = (
            x[prompts:].view(q, a, r, kv, size).permute(0, 3, 1, 2, 4).contiguous() for x in (key, value)
        )
        flat_query = answer_query.view(q, kv, a * m * r, size)
        on_prompt = (flat_query @ prompt_key.transpose(2, 3)).view(q, kv, a, m * r, p) * scaling
        if packing.prompt_padding_QP is not None:
            on_prompt = on_prompt.masked_fill(packing.prompt_padding_QP[:, None, None, None], float("-inf"))
        on_own = (answer_query.view(q, kv, a, m * r, size) @ own_key.transpose(3, 4)) * scaling
        on_own = on_own.view(q, kv, a, m, r, r).masked_fill(later_RR, float("-inf")).view(q, kv, a, m * r, r)
        weights = _softmax(torch.cat([on_prompt, on_own], dim=4))
        out = (weights[..., :p].reshape(q, kv, a * m * r, p) @ prompt_value).view(q, kv, a, m * r, size)
        out = out + weights[..., p:] @ own_value
        outputs.append(
            out.view(q, kv, a, m, r, size).permute(0, 2, 4, 1, 3, 5).reshape(q * a * r, heads * size)
        )
    return _Collect.apply(torch.cat(outputs), packing.slots_T).view(-1, heads, size)  # type: ignore[union-attr]


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(scores.dtype)


def _one_by_one(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packing: Packing, scaling: float
) -> Tensor:
    groups = query_THD.shape[1] // key_TKD.shape[1]
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THD, key_TKD, value_TKD))  # 1HTD
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    outputs: list[Tensor] = []
    at = 0
    for prompt, answers in zip(packing.prompt_lengths, packing.answer_lengths, strict=True):
        own = slice(at, at + prompt)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, own], key[:, :, own], value[:, :, own], is_causal=True, scale=scaling
            )
        )
        prompt_key, prompt_value = key[:, :, own], value[:, :, own]
        at += prompt
        for answer in answers:
            own = slice(at, at + answer)
            visible = torch.ones(answer, prompt + answer, dtype=torch.bool, device=query.device).tril(prompt)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, own],
                    torch.cat([prompt_key, key[:, :, own]], dim=2),
                    torch.cat([prompt_value, value[:, :, own]], dim=2),
                    attn_mask=visible,
                    scale=scaling,
                )
            )
            at += answer
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


class _Spread(torch.autograd.Function):
    """[T, C] to [S, C] with zeros in empty slots. With `_Collect`, its transpose, instead of indexing, whose gradient
    is a slow sum over repeated indices that cannot occur here."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, slots_T: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots_T)
        return _spread(x_TC, slots_T, num_slots)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """[S, C] to [T, C]."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, slots_T: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        ctx.num_slots = len(x_SC)
        return x_SC.index_select(0, slots_T)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(grad_outputs[0], ctx.saved_tensors[0], ctx.num_slots), None


def _spread(x_TC: Tensor, slots_T: Tensor, num_slots: int) -> Tensor:
    if num_slots == len(slots_T):
        return torch.empty_like(x_TC).index_copy_(0, slots_T, x_TC)
    return x_TC.new_zeros(num_slots, x_TC.shape[1]).index_copy_(0, slots_T, x_TC)
