"""How weights get from a generation actor into vLLM's worker processes.

The actor lays the buckets of one version end to end in a shared-memory file. Each worker maps it and, in this
order: digests every tensor as it arrived (`WeightReader.arrived_digests`), loads them through this transport, and
digests the parameters that it now serves with (`WeightReader.live_digests`). Only then may the version be tagged.

vLLM's worker processes are no Ray workers: this module reaches them as an entry point of the group
`vllm.general_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from headway.core.weights import digest

BACKEND = "headway_shared_memory"
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WireEntry = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, first byte in the file, number of bytes): plain values, for vLLM's serialiser."""


def register() -> None:
    """Entry point: makes the transport known to vLLM."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryTransport.__name__)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """The path comes with each update; there is no rendezvous."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """The shared-memory file with the whole version."""
    entries: list[Any]
    """`WireEntry` of each tensor."""


class SharedMemoryTransport(WeightTransferEngine[NoInitInfo, SharedMemoryUpdateInfo]):
    """Loads one complete version from shared memory into the worker's model."""

    init_info_cls = NoInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # CPU kernels repack linear weights after loading; the layerwise reload gives each layer its checkpoint
        # layout back, loads it, and repacks.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then synchronises an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        model: Any = self.model  # every vLLM model has `load_weights`; torch's type does not say so
        model.load_weights(weights=_tensors(update_info.path, update_info.entries))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A tied head shares the embedding's parameter, so no tensor is ever loaded "for it"; but its CPU kernel
        # keeps a packed copy of its own, which would go on serving the old version.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, QuantizeMethodBase):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


class WeightReader:
    """Mixed into vLLM's worker (`worker_extension_cls`): reads digests back from inside the worker process."""

    def arrived_digests(self, path: str, entries: list[WireEntry]) -> dict[str, str]:
        """Digest of each tensor's bytes as this worker sees them in shared memory."""
        data = _map(path)
        return {name: digest(data[start : start + size].data) for name, _, _, start, size in entries}

    def live_digests(self, entries: list[WireEntry]) -> dict[str, str]:
        """Digest of each parameter that the model holds in its checkpoint layout.

        Kernels fuse or repack most linear weights, so these are the embeddings, norms and biases: tensors that
        every optimizer step changes, which is what tells a new version from an old one.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        live = dict(model.named_parameters())
        digests = {}
        for name, dtype, shape, _, _ in entries:
            tensor = live.get(name)
            if tensor is None or tuple(tensor.shape) != tuple(shape) or tensor.dtype != TORCH_DTYPES[dtype]:
                continue
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            digests[name] = digest(raw.reshape(-1).data)
        return digests


def _map(path: str) -> np.ndarray:
    return np.memmap(path, dtype=np.uint8, mode="r")


def _tensors(path: str, entries: list[WireEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    # Copy-on-write mapping: torch wants writable memory, nobody writes.
    data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
    for name, dtype, shape, start, size in entries:
        yield name, data[start : start + size].view(TORCH_DTYPES[dtype]).reshape(tuple(shape))
