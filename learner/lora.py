"""Low-rank adapters (arXiv 2106.09685): a frozen weight W stands for W + scale * B @ A, of which A and B are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.core.errors import DataError

LORA_A, LORA_B = ".lora_A", ".lora_B"
"""How the names of an adapter's two factors end."""
_INIT_SEED = 0


def add_adapter(network: PreTrainedModel, *, rank: int, alpha: float) -> float:
    """Freezes the network and gives every linear layer but the output layer an adapter of `rank`, in place; returns
    its scale, alpha / rank. B is zero, so the network computes what it did; A is the same on every call.

    Raises `DataError` when there is no linear layer.
    """
    head = network.get_output_embeddings()
    targets = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    if not targets:
        raise DataError(
            f"{network.config.model_type} has no linear layers that an adapter could be added to (learner.lora_rank)"
        )
    network.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)  # pyright: ignore[reportArgumentType]
    inject_adapter_in_model(config, network)
    generator = torch.Generator().manual_seed(_INIT_SEED)  # on the CPU: every rank must begin with the same A
    for name, parameter in network.named_parameters():
        if checkpoint_name(name).endswith(LORA_A):
            start = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(
                start, a=math.sqrt(5), generator=generator
            )  # as nn.Linear, and as published
            parameter.data.copy_(start)
    return alpha / rank


def checkpoint_name(name: str) -> str:
    """Of a parameter of the network: as in the model folder, or `NAME.lora_A` and `NAME.lora_B` for the adapter of
    `NAME.weight`."""
    return (
        name.replace(".base_layer.", ".")
        .replace(f"{LORA_A}.default.weight", LORA_A)
        .replace(f"{LORA_B}.default.weight", LORA_B)
    )


def is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


def adapter_of(name: str, adapters: Mapping[str, nn.Parameter]) -> tuple[nn.Parameter, nn.Parameter] | None:
    """(A [rank, in], B [out, rank]) of the weight with this checkpoint name, or None if it has none."""
    stem = name.removesuffix(".weight")
    if stem == name or stem + LORA_A not in adapters:
        return None
    return adapters[stem + LORA_A], adapters[stem + LORA_B]


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight [out, in] + scale * b [out, rank] @ a [rank, in]."""
    return weight + scale * (b @ a)
