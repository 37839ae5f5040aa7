"""The policy: a Hugging Face causal language model with float32 master weights. _M: trained tokens of a
micro-batch; _H: hidden size."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from headway.core.errors import DataError
from headway.learner.attention import PACKED_ATTENTION
from headway.learner.batching import Group, MicroBatch, pack
from headway.learner.logprobs import TokenLogprobs, token_logprobs

disable_progress_bar()  # loading takes a second; a bar per actor would only break up the log

MAX_PACKING_ERROR = 1e-2
"""Nats, in float32."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel:
    """A network that computes in `dtype`, and the float32 master weights that the optimizer changes.

    In bfloat16 the network holds the rounded masters, which are exactly the weights that get published, so learner
    and engine run the same numbers; gradients are added up in float32 on the masters. This casts each weight once
    per optimizer step, where autocast does it in every forward pass. In float32 the two are the same tensors.
    """

    def __init__(self, folder: Path, *, dtype: Literal["float32", "bfloat16"]) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        network.eval()  # no dropout: it would break the ratios
        self.network: PreTrainedModel = network.to(self.device)  # pyright: ignore[reportArgumentType]
        self.folder = folder
        if (error := _packing_error(self)) > MAX_PACKING_ERROR:
            raise DataError(
                f"{folder} ({self.network.config.model_type}) computes log-probabilities in a way that the learner "
                f"does not reproduce: they differ by {error:.2g} (model.path)"
            )
        self.masters: dict[str, nn.Parameter] = {}
        """Float32, by checkpoint name; a tied output layer is left out."""
        for name, parameter in self.network.named_parameters():
            self.masters[name] = parameter
            if dtype != "float32":
                # Parameters only: buffers such as rotary frequencies stay in float32, as they do in the engine.
                self.masters[name] = nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.to(DTYPES[dtype])
                parameter.register_post_accumulate_grad_hook(_adds_to(self.masters[name]))

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> TokenLogprobs:
        """Log-probabilities of the trained tokens, [M]."""
        batch = batch.to(self.device)
        window = getattr(self.network.config, "sliding_window", None)
        if window is not None and int(batch.position_ids.max()) >= window:
            raise DataError(
                f"a prompt with its response passes the model's sliding attention window of {window} tokens, which "
                "the learner does not support; lower sampling.max_new_tokens or choose another model.path"
            )
        head = self.network.get_output_embeddings()
        assert head is not None
        return token_logprobs(
            self.hidden(batch), head.weight, batch.targets, bias_V=head.bias, temperature=temperature
        )

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[M, H] last hidden states at the positions that predict the trained tokens."""
        states_1TH = self.network.get_decoder()(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            packing=batch.packing,
            use_cache=False,
        ).last_hidden_state
        return states_1TH[0].index_select(0, batch.predict_index)

    def zero_grad(self) -> None:
        for parameter in self.masters.values():
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the network after they changed."""
        for name, parameter in self.network.named_parameters():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])


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
