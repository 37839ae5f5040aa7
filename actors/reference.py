"""The reference policy as an actor: fills `reference_logprobs` of rollout tables from weights that no gradient
changes. Tables of many callers are scored together.

_N: response tokens of some groups, flattened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headway.actors.together import Together, num_tokens
from headway.core.config import Config
from headway.core.errors import DataError, WeightUpdateFailed
from headway.core.rollouts import replace_column
from headway.core.weights import Manifest, TensorEntry, digest
from headway.learner.batching import pack, rows_of, unpack
from headway.learner.checkpoint import writing
from headway.learner.lora import LORA_A, LORA_B, merged
from headway.learner.model import DTYPES, PolicyModel

FILE = "reference.pt"
"""Its part of a checkpoint."""


class ReferenceActor:
    """A plain class; whoever runs it decides where. Raises `DataError` when the model folder cannot be used."""

    def __init__(self, config: Config, model_folder: str) -> None:
        torch.set_num_threads(config.reference.threads or os.cpu_count() or 1)
        self._config = config
        # Float32 masters only where there is something to average in.
        frozen = not config.algorithm.reference_refresh_steps
        folder = Path(config.reference.path or model_folder)
        self._model = PolicyModel(folder, dtype=config.model.dtype, frozen=frozen)
        self._version = 0
        self._scored = Together(self._score, num_tokens, config.reference.microbatch_tokens)
        self._base: dict[str, Tensor] = {}
        """Matrices of the model folder, which adapters are published against, on the CPU."""
        if config.algorithm.reference_refresh_steps and config.learner.lora_rank:
            self._base = {
                name: master.detach().to("cpu", copy=True)
                for name, master in self._model.masters.items()
                if master.dim() == 2
            }

    def score(self, table: pa.Table) -> pa.Table:
        """One group's table with `reference_logprobs` filled in: [T] float32 nats per response, at the sampling
        temperature; 0.0 where `loss_mask` is 0.

        A value that is not finite stays in the table, where the learner refuses it. Raises `SchemaError` when the
        table is not one group.
        """
        return self._scored(table)

    def _score(self, tables: Sequence[pa.Table]) -> list[pa.Table]:
        groups = [unpack(table) for table in tables]
        mask_N = np.concatenate([group.loss_mask for group in groups])
        logprobs_N = np.zeros(len(mask_N), dtype=np.float32)
        temperature = self._config.sampling.temperature
        with torch.no_grad():
            for batch in pack(groups, mask_N, microbatch_tokens=self._config.reference.microbatch_tokens):
                logprobs_M = self._model.logprobs(batch, temperature=temperature).logprobs
                logprobs_N[batch.token_index.numpy()] = logprobs_M.cpu().numpy()
        return [
            replace_column(table, "reference_logprobs", rows)
            for table, rows in zip(tables, rows_of(groups, logprobs_N), strict=True)
        ]

    def update_weights(self, manifest: Manifest, *buckets: np.ndarray) -> None:
        """Takes over a published version of the policy, keeping `algorithm.reference_decay` of its own float32
        weights: own = decay * own + (1 - decay) * published. A version that it has already is left alone, so that a
        repeated call does not average twice.

        Raises `WeightUpdateFailed`, with the weights as they were, when bytes arrived wrong, a tensor is missing or
        does not fit, or the version is older than its own.
        """
        with self._scored.turn:
            self._update(manifest, buckets)

    @torch.no_grad()
    def _update(self, manifest: Manifest, buckets: Sequence[np.ndarray]) -> None:
        if manifest.version == self._version:
            return
        if manifest.version < self._version:
            raise WeightUpdateFailed(f"version {manifest.version} after {self._version}")
        check_arrival(manifest, buckets)
        entries = {entry.name: entry for entry in manifest.entries}
        masters = self._model.masters
        if manifest.adapter_scale is None:
            expected = {name: tuple(master.shape) for name, master in masters.items()}
            weights = tuple(masters)
        else:
            weights = tuple(
                f"{name.removesuffix(LORA_A)}.weight" for name in entries if name.endswith(LORA_A)
            )
            expected = _adapter_shapes(weights, entries, self._base)
        published = {entry.name: entry.shape for entry in manifest.entries}
        if not weights or published != expected:
            odd = sorted(name for name, _ in published.items() ^ expected.items())
            raise WeightUpdateFailed(
                f"version {manifest.version} does not hold the reference's weights: {odd[:3] or 'nothing in it'}"
            )
        keep = self._config.algorithm.reference_decay
        for name in weights:
            if manifest.adapter_scale is None:
                weight = _tensor(entries[name], buckets)
            else:
                stem = name.removesuffix(".weight")
                down, up = (_tensor(entries[stem + end], buckets) for end in (LORA_A, LORA_B))
                weight = merged(self._base[name], down, up, manifest.adapter_scale)
            masters[name].lerp_(weight.to(self._model.device), 1 - keep)
        self._model.refresh()
        self._version = manifest.version

    def version(self) -> int:
        """Version of the policy that it took over last; 0: the model folder's weights."""
        return self._version

    def save(self, folder: str) -> None:
        """Writes its part of a checkpoint into an existing folder: nothing while the weights are the model folder's.
        Raises `CheckpointFailed`."""
        if self._version == 0:
            return
        masters = {name: master.detach() for name, master in self._model.masters.items()}
        with self._scored.turn, writing(Path(folder)):
            torch.save({"version": self._version, "masters": masters}, Path(folder) / FILE)

    @torch.no_grad()
    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part, bit for bit; returns its version. Raises `DataError` when it is of
        another model."""
        file = Path(folder) / FILE
        if not file.exists():
            return self._version
        state = torch.load(file, weights_only=True, map_location="cpu")
        masters = self._model.masters
        shapes = {name: master.shape for name, master in masters.items()}
        if shapes != {name: master.shape for name, master in state["masters"].items()}:
            raise DataError(f"{file} holds another model than {self._model.folder} (model.path)")
        with self._scored.turn:
            for name, master in masters.items():
                master.copy_(state["masters"][name])
            self._model.refresh()
            self._version = state["version"]
        return self._version


def check_arrival(manifest: Manifest, buckets: Sequence[np.ndarray]) -> None:
    """Raises `WeightUpdateFailed` unless every bucket has the manifest's size and every tensor its digest."""
    sizes = tuple(len(bucket) for bucket in buckets)
    if sizes != manifest.bucket_bytes:
        raise WeightUpdateFailed(
            f"version {manifest.version}: buckets of {sizes} bytes, manifest {manifest.bucket_bytes}"
        )
    wrong = [entry.name for entry in manifest.entries if digest(_bytes(entry, buckets).data) != entry.digest]
    if wrong:
        raise WeightUpdateFailed(
            f"version {manifest.version}: arrived digests differ for {wrong[:3]} "
            f"({len(wrong)} of {len(manifest.entries)})"
        )


def _bytes(entry: TensorEntry, buckets: Sequence[np.ndarray]) -> np.ndarray:
    return buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]


def _tensor(entry: TensorEntry, buckets: Sequence[np.ndarray]) -> Tensor:
    """A float32 copy: what lies in the object store is read-only."""
    data = torch.from_numpy(_bytes(entry, buckets).copy())
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape).float()


def _adapter_shapes(
    weights: Sequence[str], entries: dict[str, TensorEntry], base: dict[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """What an adapter for these weights must consist of, at the rank of each `lora_A`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weights:
        stem = name.removesuffix(".weight")
        rank = entries[stem + LORA_A].shape[0]
        if name in base:
            out, into = base[name].shape
            shapes[stem + LORA_A], shapes[stem + LORA_B] = (rank, into), (out, rank)
    return shapes
