"""The policy's learner as an actor: trains on rollout tables, publishes weights, saves and loads its part of a
checkpoint. Several of them, one per rank, share a model. One method at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from headway.core.config import Config
from headway.core.errors import WeightUpdateFailed
from headway.core.weights import Manifest
from headway.learner.publish import buffers, contribute, export, layout_of
from headway.learner.sft import Demonstration, read_demonstrations
from headway.learner.sharding import alone, free_address, join
from headway.learner.stats import StepStats
from headway.learner.trainer import Trainer


class PolicyActor:
    """A plain class; whoever runs it decides where. `start` must have returned before anything else is called."""

    def __init__(self, config: Config, model_folder: str, run_folder: str) -> None:
        torch.set_num_threads(config.learner.threads or os.cpu_count() or 1)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._model_folder = Path(model_folder)
        self._run_folder = Path(run_folder)

    def address(self) -> str:
        """Where the ranks may meet, if this is rank 0."""
        return free_address()

    def start(self, rank: int, size: int, address: str, deadline_s: float) -> int:
        """Joins the other ranks and loads the model. Returns the number of buckets of every published version."""
        ranks = alone if size == 1 else join(address, rank, size, deadline_s)
        config = self._config
        demonstrations: list[Demonstration] = []
        if config.algorithm.sft_coef:
            demonstrations = read_demonstrations(demonstrations_file(self._run_folder))
        self._trainer = Trainer(config, self._model_folder, ranks, demonstrations)
        self._layout = layout_of(self._trainer.model, config.model.dtype, config.learner.bucket_mib * 2**20)
        self._rank = rank
        self._digests: dict[str, str] = {}  # of the last published version
        self._moved = False  # since then
        self._no_buckets = [np.zeros(0, dtype=np.uint8) for _ in self._layout.bucket_bytes]
        self._buckets = buffers(self._layout) if rank == 0 else self._no_buckets
        return len(self._layout.bucket_bytes)

    def train(self, version: int, *tables: pa.Table) -> tuple[list[StepStats], pa.Table]:
        """`steps_per_batch` optimizer steps from `version` on; one table per group. Their statistics, and the columns
        that the learner appends to the rollouts."""
        stats, columns = self._trainer.train(tables, version)
        self._moved = self._moved or any(step.moved for step in stats)
        return stats, columns

    def publish(self, version: int) -> tuple[Manifest, *tuple[np.ndarray, ...]]:
        """The manifest of the current weights, then their buckets (uint8); of rank 0, the others only help to gather.
        `version` must be the learner's own. Raises `WeightUpdateFailed` when float32 weights that a step has moved are
        those of the last version to the bit: something else than the trained weights is about to be published."""
        if version != self._trainer.version:
            raise ValueError(
                f"asked to publish version {version}, but the learner is at {self._trainer.version}"
            )
        if self._rank > 0:
            contribute(self._trainer.model, self._layout)
            return (Manifest(version=version, entries=(), bucket_bytes=()), *self._no_buckets)
        # Whoever runs this actor has copied the last version's buckets out before it can ask for the next.
        manifest, buckets = export(self._trainer.model, self._layout, version, into=self._buckets)
        exact = all(entry.dtype == "float32" for entry in manifest.entries)
        if exact and self._moved and manifest.digests == self._digests:
            raise WeightUpdateFailed(
                f"version {version} holds the same bytes as the last one, though its steps moved the weights"
            )
        self._digests, self._moved = manifest.digests, False
        return (manifest, *buckets)

    def save(self, folder: str) -> None:
        """Writes the learner's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        self._trainer.save(Path(folder))

    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part; returns its version."""
        self._trainer.load(Path(folder))
        return self._trainer.version


def demonstrations_file(run_folder: Path) -> Path:
    """What the supervised loss is added on, as token ids."""
    return run_folder / "demonstrations.parquet"
