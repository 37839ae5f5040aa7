"""One model on several processes: who takes part, how its parameters are spread, and gradients over all of them.

Every rank holds a slice of each parameter (fully sharded data parallelism, arXiv 2304.11277) and works on micro-batches
of its own. What is called collective here must be called by every rank, in the same order: forward and backward passes
are. A collective that misses a rank raises after the deadline given to `join`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.core.errors import Starved

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that share the model."""

    rank: int
    """0 to size - 1; rank 0 publishes and writes checkpoints."""
    size: int

    def all_gather(self, value: T) -> list[T]:
        """Collective: every rank's value, by rank. It must be picklable."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # pyright: ignore[reportReturnType]

    def barrier(self) -> None:
        """Collective: returns when every rank has come here."""
        self.all_gather(None)


alone = Ranks(rank=0, size=1)


def join(address: str, rank: int, size: int, deadline_s: float) -> Ranks:
    """Collective: meets the other ranks at `address` ("host:port", which rank 0 opens). `leave` ends it.

    `deadline_s` bounds the meeting and each later collective. Raises `Starved` when not all ranks come.
    """
    if size == 1:
        return alone
    try:
        dist.init_process_group(
            # gloo as well where NCCL is used: it carries Python values, and its waits end with an exception.
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_s),
        )
    except dist.DistError as error:
        raise Starved(
            f"learner rank {rank} of {size} waited {deadline_s:g} s for the others at {address}: {error}"
        ) from error
    return Ranks(rank, size)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def free_address() -> str:
    """For `join`: "host:port" that this machine can open and others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # sends nothing: it only picks the interface of the default route
            host = route.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    *,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Collective: spreads the parameters of `root` over the ranks, one gathered unit per layer and one for the rest.

    Parameters become float32 `DTensor`s of the same names (frozen ones keep their type), computed with in `dtype`.
    Gradients are float32 and summed over the ranks, not averaged: each rank's loss has the step's denominators.
    """
    mesh = init_device_mesh(device.type, (ranks.size,))
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a factor becomes an operation that gloo lacks


def reshard(root: nn.Module) -> None:
    """Drops gathered parameters: a forward pass without gradient leaves those of the root, and the next one would use
    them again although the slices have changed since."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Collective for a sharded tensor: all of it, on every rank. A plain one is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's slice of a sharded tensor. A plain one is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `full`, which every rank has, laid out as `like` and on its device."""
    full = full.to(like.device)
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Collective: the Euclidean norm over all gradients of all ranks, a float32 scalar, the same on every rank. A
    missing gradient becomes zero, so that an optimizer's moments decay in a step without signal too."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return whole(get_total_norm(gradients))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales the gradients so that their norm, which is `norm`, is at most `max_norm`."""
    if norm > max_norm:
        clip_grads_with_norm_(list(parameters), max_norm, norm)
