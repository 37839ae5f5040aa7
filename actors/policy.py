"""The policy's learner as an actor: trains on rollout tables, publishes weights, saves and loads its part of a
checkpoint. One method at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from headway.core.config import Config
from headway.core.weights import Manifest
from headway.learner.publish import buffers, export, layout_of
from headway.learner.stats import StepStats
from headway.learner.trainer import Trainer


class PolicyActor:
    """A plain class; whoever runs it decides where."""

    def __init__(self, config: Config, model_folder: str) -> None:
        torch.set_num_threads(config.learner.threads or os.cpu_count() or 1)
        torch.manual_seed(config.run.seed)
        self._trainer = Trainer(config, Path(model_folder))
        self._layout = layout_of(self._trainer.model, config.model.dtype, config.learner.bucket_mib * 2**20)
        self._buckets = buffers(self._layout)

    def num_buckets(self) -> int:
        """Buckets of every published version."""
        return len(self._layout.bucket_bytes)

    def train(self, version: int, *tables: pa.Table) -> list[StepStats]:
        """`steps_per_batch` optimizer steps from `version` on; one table per group."""
        return self._trainer.train(tables, version)

    def publish(self, version: int) -> tuple[Manifest, *tuple[np.ndarray, ...]]:
        """The manifest of the current weights, then their buckets (uint8). `version` must be the learner's own."""
        if version != self._trainer.version:
            raise ValueError(
                f"asked to publish version {version}, but the learner is at {self._trainer.version}"
            )
        # Whoever runs this actor has copied the last version's buckets out before it can ask for the next.
        manifest, buckets = export(self._trainer.model, self._layout, version, into=self._buckets)
        return (manifest, *buckets)

    def save(self, folder: str) -> None:
        """Writes the learner's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        self._trainer.save(Path(folder))

    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part; returns its version."""
        self._trainer.load(Path(folder))
        return self._trainer.version
