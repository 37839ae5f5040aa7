"""The critic as an actor: fills `values` of rollout tables and trains on them. One method at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from headway.core.config import Config
from headway.core.rollouts import replace_column
from headway.learner.batching import unpack
from headway.learner.critic import CriticStats, CriticTrainer


class CriticActor:
    """A plain class; whoever runs it decides where. Raises `DataError` when the model folder cannot be used."""

    def __init__(self, config: Config, model_folder: str) -> None:
        torch.set_num_threads(config.critic.threads or os.cpu_count() or 1)
        self._trainer = CriticTrainer(config, Path(config.critic.path or model_folder))

    def score(self, table: pa.Table) -> pa.Table:
        """One group's table with `values` filled in: [T] float32 per response, the expected reward to go before the
        token; 0.0 where `loss_mask` is 0.

        A value that is not finite stays in the table, where the learner refuses it. Raises `SchemaError` when the
        table is not one group.
        """
        group = unpack(table)
        values_N = self._trainer.values(group)
        return replace_column(table, "values", np.split(values_N, np.cumsum(group.lengths)[:-1]))

    def train(self, version: int, *tables: pa.Table, columns: pa.Table | None = None) -> list[CriticStats]:
        """`steps_per_batch` optimizer steps from `version` on; one table per group. `columns`: the learner's, for
        `critic.targets=vtrace`."""
        return self._trainer.train(tables, version, columns)

    def save(self, folder: str) -> None:
        """Writes the critic's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        self._trainer.save(Path(folder))

    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part; returns its version."""
        self._trainer.load(Path(folder))
        return self._trainer.version
