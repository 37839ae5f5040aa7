"""The policy: a Hugging Face causal language model with float32 master weights. _M: trained tokens of a
micro-batch; _H: hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from headway.core.errors import DataError
from headway.learner import lora
from headway.learner.attention import PACKED_ATTENTION, packing_of
from headway.learner.batching import Group, MicroBatch, pack
from headway.learner.logprobs import TokenLogprobs, token_logprobs
from headway.learner.sharding import (
    Ranks,
    alone,
    clip_gradients,
    gradient_norm,
    reshard,
    shard,
    whole,
)

disable_progress_bar()  # loading takes a second; a bar per actor would only break up the log

MAX_PACKING_ERROR = 1e-2
"""Nats, in float32."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_NOTHING = torch.zeros(0, dtype=torch.int64)
EMPTY = MicroBatch(
    input_ids=torch.zeros(1, dtype=torch.int64),
    position_ids=torch.zeros(1, dtype=torch.int64),
    packing=packing_of([1], [[]]),
    predict_index=_NOTHING,
    targets=_NOTHING,
    token_index=_NOTHING,
)
"""One token, of which nothing is trained."""


class PolicyModel:
    """A network that computes in `dtype`, and the float32 master weights that the optimizer changes.

    On one rank in bfloat16 the network holds the rounded masters, which are exactly the weights that get published, so
    learner and engine run the same numbers; gradients are added up in float32 on the masters. This casts each weight
    once per optimizer step, where autocast does it in every forward pass. In float32 the two are the same tensors.

    On several ranks the masters are the network's sharded parameters, rounded each time they are gathered: the same
    numbers again. Making the model, passes through it, gradient norms and `checkpoint` are then collective, and
    gradients are sums over the ranks.

    With `lora_rank` the network's own weights are frozen, in `dtype`, and the masters are an adapter's. `frozen`: there
    are no masters at all.

    Raises `DataError` for a model whose log-probabilities the learner does not reproduce.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        ranks: Ranks = alone,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        activation_checkpointing: bool = False,
        frozen: bool = False,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # What gets sharded waits on the CPU: no GPU has room for all of it, and layers move one at a time.
        self.device = device if ranks.size == 1 else torch.device("cpu")
        self.folder = folder
        self.ranks = ranks
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        network.eval()  # no dropout: it would break the ratios
        self.network: PreTrainedModel = network.to(self.device)  # pyright: ignore[reportArgumentType]
        self._scorer = _TokenScorer(self.network)
        if (error := _packing_error(self)) > MAX_PACKING_ERROR:
            raise DataError(
                f"{folder} ({self.network.config.model_type}) computes log-probabilities in a way that the learner "
                f"does not reproduce: they differ by {error:.2g} (model.path)"
            )
        self.adapter_scale: float | None = None
        """Of the adapter; None without one."""
        if lora_rank:
            self.adapter_scale = lora.add_adapter(self.network, rank=lora_rank, alpha=lora_alpha)
        if frozen:
            self.network.requires_grad_(False)
        for parameter in self.network.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[dtype])
        layers = [m for m in self.network.modules() if isinstance(m, GradientCheckpointingLayer)]
        if activation_checkpointing:
            for layer in layers:
                # Inside the layer's hooks, so that a sharded layer is gathered before it is computed again. The
                # library's own way works in training mode only, which switches dropout on.
                layer.forward = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
        if ranks.size > 1:
            shard(self._scorer, layers, ranks=ranks, device=device, dtype=DTYPES[dtype])
            self.device = device
        self.parameters: dict[str, nn.Parameter] = {
            lora.checkpoint_name(name): parameter for name, parameter in self.network.named_parameters()
        }
        """The network's, by checkpoint name; a tied output layer is left out."""
        self.masters: dict[str, nn.Parameter] = {}
        """Those that are trained, float32, by checkpoint name."""
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            self.masters[name] = parameter
            if dtype != "float32" and ranks.size == 1:
                # Parameters only: buffers such as rotary frequencies stay in float32, as they do in the engine.
                self.masters[name] = nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.to(DTYPES[dtype])
                parameter.register_post_accumulate_grad_hook(_adds_to(self.masters[name]))

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> TokenLogprobs:
        """Log-probabilities of the trained tokens, [M]."""
        return self._scorer(batch.to(self.device), temperature)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[M, H] last hidden states at the positions that predict the trained tokens."""
        return self._scorer(batch.to(self.device), None)

    @torch.no_grad()
    def idle_forward(self) -> None:
        """What a rank without a micro-batch has to do while others run `logprobs` without gradient."""
        self.logprobs(EMPTY, temperature=1.0)

    def idle_backward(self) -> None:
        """The same while others run `logprobs` and the backward pass: adds a gradient of zero."""
        self.logprobs(EMPTY, temperature=1.0).logprobs.sum().backward()

    def zero_grad(self) -> None:
        for parameter in self.masters.values():
            parameter.grad = None

    def grad_norm(self) -> float:
        """Euclidean norm of all gradients, those of all ranks. A missing one becomes zero."""
        return float(gradient_norm(self.masters.values()))

    def clip_grad(self, max_norm: float) -> float:
        """Scales the gradients down to a norm of at most `max_norm`; returns the norm before. Where that is not
        finite they stay as they are."""
        norm = gradient_norm(self.masters.values())
        clip_gradients(self.masters.values(), max_norm, norm)
        return float(norm)

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the network after they changed."""
        for name, master in self.masters.items():
            if self.parameters[name] is not master:
                self.parameters[name].copy_(master)
        reshard(self._scorer)

    @torch.no_grad()
    def checkpoint(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of a model folder that computes what this model does, by name: whole, in float32, an adapter
        added in. One at a time; all ranks have to go through all of them."""
        for name, parameter in self.parameters.items():
            if lora.is_adapter(name):
                continue
            weight = whole(self.masters.get(name, parameter).detach()).float()
            if (adapter := lora.adapter_of(name, self.masters)) is not None:
                assert self.adapter_scale is not None
                a, b = (whole(p.detach()) for p in adapter)
                weight = lora.merged(weight, a, b, self.adapter_scale)
            yield name, weight


class _TokenScorer(nn.Module):
    """The root of what is sharded: the head's weight is used directly, so its forward pass has to span the head."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def hidden(self, batch: MicroBatch) -> Tensor:
        window = getattr(self.network.config, "sliding_window", None)
        if window is not None and int(batch.position_ids.max()) >= window:
            raise DataError(
                f"a prompt with its response passes the model's sliding attention window of {window} tokens, which "
                "the learner does not support; lower sampling.max_new_tokens or choose another model.path"
            )
        states_1TH = self.network.get_decoder()(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            packing=batch.packing,
            use_cache=False,
        ).last_hidden_state
        return states_1TH[0].index_select(0, batch.predict_index)

    def forward(self, batch: MicroBatch, temperature: float | None) -> TokenLogprobs | Tensor:
        """Hidden states where there is no temperature: what several ranks gather is gathered for this call."""
        if temperature is None:
            return self.hidden(batch)
        head = self.network.get_output_embeddings()
        assert head is not None
        return token_logprobs(
            self.hidden(batch), head.weight, batch.targets, bias_V=head.bias, temperature=temperature
        )


def _adds_to(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


def _packing_error(policy: PolicyModel) -> float:
    """Switches the network to packed attention and returns the largest difference in log-probability from its
    own, on two short answers to one prompt. Whatever an architecture does otherwise (scaled or capped logits,
    layers without attention) shows here."""
    prompt, answers = [3, 1, 2], [[2, 3, 1], [1, 1, 3]]
    group = Group(
        rollout_ids=("a", "b"),
        prompts=(np.array(prompt),),
        prompt_index=np.zeros(2, dtype=np.int64),
        lengths=np.array([3, 3]),
        response_ids=np.array(answers).flatten(),
        loss_mask=np.ones(6, dtype=np.bool_),
        behavior_logprobs=np.zeros(6, dtype=np.float32),
        versions=np.zeros(6, dtype=np.int64),
        rewards=np.zeros(2, dtype=np.float32),
        scored=np.ones(2, dtype=np.bool_),
        truncated=np.zeros(2, dtype=np.bool_),
    )
    with torch.no_grad():
        rows_BL = torch.tensor([prompt + answer for answer in answers], device=policy.device)
        own_BLV = policy.network(input_ids=rows_BL, use_cache=False).logits.float().log_softmax(dim=-1)
        own_BT = own_BLV[:, 2:-1].gather(2, rows_BL[:, 3:, None]).squeeze(2).cpu()
        policy.network.set_attn_implementation(PACKED_ATTENTION)
        (batch,) = pack([group], group.loss_mask, microbatch_tokens=64)
        packed_BT = policy.logprobs(batch, temperature=1.0).logprobs.reshape(2, 3).cpu()
    return float((packed_BT - own_BT).abs().max())
