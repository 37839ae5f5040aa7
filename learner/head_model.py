"""A language model that says a number for each token: what reward models and critics are. _M: tokens of a micro-batch that are
looked at; _H: hidden size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headway.learner.batching import MicroBatch
from headway.learner.model import PolicyModel
from headway.learner.sharding import Ranks, alone, clip_gradients, gradient_norm


class HeadModel:
    """The network of a causal language model with a float32 linear head [H] and bias, both zero at the start, so that
    every output starts at exactly 0. On several ranks the network is sharded and the head is whole on each; making the
    model, passes through it, `clip_grad` and `checkpoint` of its body are then collective, and gradients are sums over
    the ranks. Raises `DataError` when the model folder cannot be used."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        head_name: str,
        ranks: Ranks = alone,
        frozen: bool = False,
        **body: Any,
    ) -> None:
        """`body`: further arguments of `PolicyModel`."""
        self.folder = folder
        self.ranks = ranks
        self.body = PolicyModel(folder, dtype=dtype, ranks=ranks, frozen=frozen, **body)
        output_layer = self.body.network.get_output_embeddings()
        assert output_layer is not None
        self.head = nn.Linear(output_layer.weight.shape[1], 1, device=self.body.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.requires_grad_(not frozen)
        self.head_masters = {
            f"{head_name}.{name}": parameter
            for name, parameter in self.head.named_parameters()
            if parameter.requires_grad
        }
        unused = next((n for n, p in self.body.parameters.items() if p is output_layer.weight), None)
        if output_layer.weight is self.body.network.get_input_embeddings().weight:
            unused = None
        self.body_masters = {name: p for name, p in self.body.masters.items() if name != unused}
        """All that reach the head: without an output layer that is not tied to the embedding."""
        self.masters: dict[str, nn.Parameter] = {**self.body_masters, **self.head_masters}
        """Float32, by name."""

    def outputs(self, batch: MicroBatch) -> Tensor:
        """[M] float32, on the model's device, from the hidden states that predict the batch's targets."""
        return self.head(self.body.hidden(batch).float()).squeeze(1)

    def zero_grad(self) -> None:
        self.body.zero_grad()
        for parameter in self.head_masters.values():
            parameter.grad = None

    def clip_grad(self, max_norm: float) -> float:
        """Sums the head's gradients over the ranks, where the body's are summed already, and scales all down to a norm
        of at most `max_norm`; returns the norm before. Where that is not finite they stay as they are."""
        for parameter in self.head_masters.values():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.stack(self.ranks.all_gather(own.cpu())).sum(dim=0).to(own.device)
        # Apart, because sharded and plain tensors do not mix in one call.
        parts = [list(self.body_masters.values()), list(self.head_masters.values())]
        norm = torch.stack([gradient_norm(part) for part in parts]).norm()
        for part in parts:
            clip_gradients(part, max_norm, norm)
        return float(norm)

    def refresh(self) -> None:
        """Rounds the masters into the network after they changed."""
        self.body.refresh()
