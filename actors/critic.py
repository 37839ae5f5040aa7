"""The critic as an actor: fills `values` of rollout tables and trains on them. Tables of many callers are scored
together, and none while it trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from headway.actors.together import Together, num_tokens
from headway.core.config import Config
from headway.core.rollouts import replace_column
from headway.learner.batching import rows_of, unpack
from headway.learner.critic import CriticStats, CriticTrainer


class CriticActor:
    """A plain class; whoever runs it decides where. Raises `DataError` when the model folder cannot be used."""

    def __init__(self, config: Config, model_folder: str) -> None:
        torch.set_num_threads(config.critic.threads or os.cpu_count() or 1)
        self._trainer = CriticTrainer(config, Path(config.critic.path or model_folder))
        self._scored = Together(self._score, num_tokens, config.critic.microbatch_tokens)

    def score(self, table: pa.Table) -> pa.Table:
        """One group's table with `values` filled in: [T] float32 per response, the expected reward to go before the
        token; 0.0 where `loss_mask` is 0.

        A value that is not finite stays in the table, where the learner refuses it. Raises `SchemaError` when the
        table is not one group.
        """
        return self._scored(table)

    def _score(self, tables: Sequence[pa.Table]) -> list[pa.Table]:
        groups = [unpack(table) for table in tables]
        rows = rows_of(groups, self._trainer.values(groups))
        return [replace_column(table, "values", own) for table, own in zip(tables, rows, strict=True)]

    def train(self, version: int, *tables: pa.Table, columns: pa.Table | None = None) -> list[CriticStats]:
        """`steps_per_batch` optimizer steps from `version` on; one table per group. `columns`: the learner's, for
        `critic.targets=vtrace`."""
        with self._scored.turn:
            return self._trainer.train(tables, version, columns)

    def save(self, folder: str) -> None:
        """Writes the critic's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        with self._scored.turn:
            self._trainer.save(Path(folder))

    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part; returns its version."""
        with self._scored.turn:
            self._trainer.load(Path(folder))
        return self._trainer.version
