"""How weights get from a generation actor into vLLM's worker processes.

The actor lays the buckets of one version end to end in a shared-memory file. Each worker maps it and, in this
order: digests every tensor as it arrived (`WeightReader.arrived_digests`), loads them through this transport, and
digests the parameters that it now serves with (`WeightReader.live_digests`). Only then may the version be tagged.

Of a low-rank adapter only its own tensors travel. The worker adds their product to the weights of the model folder
and loads the sums like any other weights: no request has to name an adapter, and running requests go on as after a
full update. What it then serves with is read back by `WeightReader.probe_adapter`.

vLLM's worker processes are no Ray workers: this module reaches them as an entry point of the group
`vllm.general_plugins`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from headway.core.errors import WeightUpdateFailed
from headway.core.weights import digest

BACKEND = "headway_shared_memory"
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WireEntry = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, first byte in the file, number of bytes): plain values, for vLLM's serialiser."""

PROBE_ROWS = 64
PROBE_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 3e-5}
"""Largest relative difference (of norms) between two products by one kernel with equal weights. They are normally
equal to the bit; this much is left to a kernel that adds up in another order. Against a float32 product it would have
to be about 2e-3 in bfloat16, which rounds the outputs, and would hide several optimizer steps of a usual size."""


PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def register() -> None:
    """Entry point: makes the transport known to vLLM. In vLLM's own processes it also sees to it that they end with
    the actor, and write where it can clean up after them."""
    actor = multiprocessing.parent_process()
    if actor is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        _end_with(actor.pid)
        tempfile.tempdir = os.environ.get("VLLM_RPC_BASE_PATH")
    # At every update it warns of layers that hold no weights, as of rotary embeddings; digests and probe know better.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryTransport.__name__)


def _end_with(parent: int | None) -> None:
    """An actor that is killed takes its engine along: else the engine would go on, with its memory and its cores, for
    nobody. It is asked to end (SIGTERM), as it then removes its shared memory and ends its workers."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # died before this took effect
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """The path comes with each update; there is no rendezvous."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """The shared-memory file with the whole version."""
    entries: list[Any]
    """`WireEntry` of each tensor."""
    adapter_scale: float | None
    """As in `Manifest`: None for weights, else the scale of the adapter that the entries are."""


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
        # An update that broke off left what it had loaded of a layer; counted again, the layer would be taken for
        # complete too early.
        for module in self.model.modules():
            info = get_layerwise_info(module)
            info.loaded_weights.clear()
            info.load_numel = 0

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then synchronises an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        model: Any = self.model  # every vLLM model has `load_weights`; torch's type does not say so
        tensors = _tensors(update_info.path, update_info.entries)
        if update_info.adapter_scale is not None:
            folder, dtype = self.model_config.model, self.model_config.dtype
            adapter = _Adapter(folder, dict(tensors), update_info.adapter_scale)
            tensors = adapter.merged_model(dtype, self.device)
        model.load_weights(weights=tensors)

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

    @torch.inference_mode()
    def probe_adapter(self, path: str, entries: list[WireEntry], scale: float) -> tuple[str, float]:
        """Proves that an adapted weight is live: the model's own layer gives, on a fixed input, what a new layer
        made from the merged weight gives by the same kernel. Returns the weight's name and the relative
        difference of the two.

        The weight is the one with the strongest adapter among those that vLLM holds under their checkpoint name
        (its kernels fuse q, k, v and gate, up; the output and down projections stay). A tensor-parallel worker
        checks its own slice. Raises `WeightUpdateFailed`.
        """
        worker: Any = self
        device, dtype = worker.device, worker.model_config.dtype
        adapter = _Adapter(worker.model_config.model, dict(_tensors(path, entries)), scale)
        layers = {
            f"{name}.weight": module
            for name, module in worker.model_runner.get_model().named_modules()
            if isinstance(module, RowParallelLinear)
            and isinstance(module.quant_method, UnquantizedLinearMethod)
        }
        candidates = [name for name in adapter.factors if name in layers]
        if not candidates:
            raise WeightUpdateFailed(
                f"none of the {len(adapter.factors)} adapted weights can be read back from the engine"
            )
        name = max(candidates, key=adapter.strength)
        layer, merged = layers[name], adapter.merged(name, dtype, device)
        first = layer.tp_rank * layer.input_size_per_partition
        mine = slice(first, first + layer.input_size_per_partition)
        inputs = adapter.inputs(name, PROBE_ROWS)[:, mine].to(device, dtype)
        twin = torch.nn.Module()
        twin.weight = torch.nn.Parameter(merged[:, mine].contiguous(), requires_grad=False)
        layer.quant_method.process_weights_after_loading(twin)
        live, expected = (layer.quant_method.apply(each, inputs, None).float() for each in (layer, twin))
        difference = float((live - expected).norm() / expected.norm())
        if not difference <= PROBE_TOLERANCE[dtype]:  # also when it is NaN
            raise WeightUpdateFailed(
                f"the engine does not serve the adapter: {name} gives outputs that differ by {difference:.1e} "
                f"(relative; at most {PROBE_TOLERANCE[dtype]:.0e} expected)"
            )
        return name, difference


class _Adapter:
    """A low-rank adapter beside the model folder whose weights it adapts.

    Raises `WeightUpdateFailed` for a tensor that belongs to no weight of the folder, lacks its partner, or does not
    fit in shape.
    """

    def __init__(self, folder: str, tensors: dict[str, torch.Tensor], scale: float) -> None:
        self._files = _open(Path(folder))
        self._scale = scale
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """lora_A [rank, in] and lora_B [out, rank] by the name of the adapted weight [out, in]."""
        for name in tensors:
            layer, _, factor = name.rpartition(".")
            weight, a, b = f"{layer}.weight", f"{layer}.lora_A", f"{layer}.lora_B"
            if factor not in ("lora_A", "lora_B"):
                raise WeightUpdateFailed(f"{name} is no tensor of an adapter")
            if weight not in self._files:
                raise WeightUpdateFailed(f"{name}: the model folder {folder} has no {weight} to adapt")
            if not (a in tensors and b in tensors):
                raise WeightUpdateFailed(f"{name} came without {b if factor == 'lora_A' else a}")
            lora_a, lora_b = tensors[a], tensors[b]
            shape = tuple(self._files[weight].get_slice(weight).get_shape())
            if lora_b.shape[1:] != lora_a.shape[:1] or (*lora_b.shape[:1], *lora_a.shape[1:]) != shape:
                raise WeightUpdateFailed(
                    f"{a} {tuple(lora_a.shape)} and {b} {tuple(lora_b.shape)} do not fit {weight} {shape}"
                )
            self.factors[weight] = lora_a, lora_b

    def strength(self, name: str) -> float:
        """An upper bound of the norm of the weight's change, up to the scale."""
        lora_a, lora_b = self.factors[name]
        return float(lora_a.norm() * lora_b.norm())

    def inputs(self, name: str, rows: int) -> torch.Tensor:
        """Fixed inputs of weight `name`, [rows, in] float32 with a root mean square of 1 per row: noise, and in the
        second half noise from the row space of lora_A, where the adapter acts most."""
        lora_a = self.factors[name][0].to(torch.float32)
        random = torch.Generator().manual_seed(0)
        plain = torch.randn(rows // 2, lora_a.shape[1], generator=random)
        inside = torch.randn(rows - rows // 2, len(lora_a), generator=random) @ lora_a
        return torch.nn.functional.normalize(torch.cat([plain, inside]), dim=1) * lora_a.shape[1] ** 0.5

    def merged(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Weight `name` as the engine should hold it, [out, in]: summed in float32, rounded once."""
        lora_a, lora_b = (factor.to(device, torch.float32) for factor in self.factors[name])
        base = self._files[name].get_tensor(name).to(device, torch.float32)
        return torch.addmm(base, lora_b, lora_a, alpha=self._scale).to(dtype)

    def merged_model(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the folder, one after the other, the adapted ones merged."""
        for name, file in self._files.items():
            if name in self.factors:
                yield name, self.merged(name, dtype, device)
            else:
                yield name, file.get_tensor(name).to(dtype)


def _open(folder: Path) -> dict[str, Any]:
    """The opened (memory-mapped) safetensors file of each tensor of a model folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {name: safe_open(folder / name, framework="pt") for name in sorted(set(where.values()))}
        return {name: files[file] for name, file in where.items()}
    opened = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _map(path: str) -> np.ndarray:
    return np.memmap(path, dtype=np.uint8, mode="r")


def _tensors(path: str, entries: list[WireEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    # Copy-on-write mapping: torch wants writable memory, nobody writes.
    data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
    for name, dtype, shape, start, size in entries:
        yield name, data[start : start + size].view(TORCH_DTYPES[dtype]).reshape(tuple(shape))
