"""The learner of rows that are there already, as an actor: demonstrations, preference pairs, labelled answers. Several of
them, one per rank, share a model. One method at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headway.core.config import Config
from headway.learner.offline import (
    Objective,
    OfflineRow,
    OfflineSettings,
    OfflineStats,
    OfflineTrainer,
    PairIds,
    batch_at,
    read_rows,
)
from headway.learner.reward_model import fillers, long_empty_beats_right
from headway.learner.sft import Demonstration, group_of, read_demonstrations
from headway.learner.sharding import alone, free_address, join

TRAIN, HELD_OUT = "rows.parquet", "held_out.parquet"
"""In the run folder, as token ids."""


class OfflineActor:
    """`start` must have returned before anything else is called. Every rank gets the same calls."""

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
        """Joins the other ranks, loads model and rows, and computes the reference's log-probabilities where the objective
        compares with them. Returns 0."""
        config = self._config
        ranks = alone if size == 1 else join(address, rank, size, deadline_s)
        self._trainer = OfflineTrainer(settings_of(config), self._model_folder, ranks)
        self._rows = self._trainer.with_reference(self._read(TRAIN))
        self._held_out = self._trainer.with_reference(self._read(HELD_OUT))
        return 0

    def _read(self, name: str) -> Sequence[OfflineRow]:
        file = self._run_folder / name
        if not file.exists():
            return []
        return read_demonstrations(file) if self._config.stage == "sft" else read_rows(file)

    def step(self, version: int) -> OfflineStats:
        """The optimizer step from `version`, on the next rows."""
        if version != self._trainer.version:
            raise ValueError(
                f"asked to train from version {version}, but the learner is at {self._trainer.version}"
            )
        config, position = self._config, self._trainer.position
        return self._trainer.step(
            batch_at(self._rows, position, config.offline.rows_per_step, config.run.seed)
        )

    def evaluate(self) -> OfflineStats | None:
        """On the rows held out; None without any."""
        return self._trainer.evaluate(self._held_out) if self._held_out else None

    def finish(self, folder: str) -> float | None:
        """Sets a reward model's scale, and writes what was trained to a new folder. Returns the share of held-out prompts
        for which an empty or filler answer scores at least as high as the right one; None where that has no meaning.
        Raises `DataError` for a reward model that tells nothing apart."""
        share = None
        if self._trainer.reward is not None and self._held_out and self._config.offline.reward == "outcome":
            self._trainer.calibrate(self._held_out)
            share = self._filler_share()
            self._trainer.reward.filler_share = share
        self._trainer.export(Path(folder))
        return share

    def _filler_share(self) -> float:
        pairs = [row for row in self._held_out if isinstance(row, PairIds)]
        longest = max(len(pair.chosen_ids) for pair in pairs)
        reward = self._trainer.reward
        assert reward is not None
        answers = [
            Demonstration(
                pair.prompt_ids,
                [pair.chosen_ids, *fillers(pair.prompt_ids, pair.chosen_ids[-1], num_tokens=longest)],
            )
            for pair in pairs
        ]
        scores = reward.scores(
            [group_of(demonstration) for demonstration in answers],
            microbatch_tokens=self._config.learner.microbatch_tokens,
        ).reshape(len(pairs), -1)
        right, worst = scores[:, 0], np.max(scores[:, 1:], axis=1)
        return long_empty_beats_right(right, worst)

    def save(self, folder: str) -> None:
        """Writes the learner's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        self._trainer.save(Path(folder))

    def load(self, folder: str) -> int:
        """Takes up from a checkpoint's part; returns its version."""
        self._trainer.load(Path(folder))
        return self._trainer.version


def objective_of(config: Config) -> Objective:
    """What a run of another stage than `rl` minimises."""
    match config.stage:
        case "sft":
            return "sft"
        case "reward_model":
            return "reward_model" if config.offline.reward == "outcome" else "process_reward_model"
        case _:
            return config.offline.objective


def settings_of(config: Config) -> OfflineSettings:
    learner, offline = config.learner, config.offline
    return OfflineSettings(
        objective=objective_of(config),
        dtype=config.model.dtype,
        microbatch_tokens=learner.microbatch_tokens,
        learning_rate=learner.learning_rate,
        warmup_steps=learner.warmup_steps,
        weight_decay=learner.weight_decay,
        adam_betas=learner.adam_betas,
        max_grad_norm=learner.max_grad_norm,
        lora_rank=learner.lora_rank,
        lora_alpha=learner.lora_alpha,
        activation_checkpointing=learner.activation_checkpointing,
        beta=offline.beta,
        label_smoothing=offline.label_smoothing,
        desirable_weight=offline.desirable_weight,
        undesirable_weight=offline.undesirable_weight,
        orpo_coef=offline.orpo_coef,
        gamma=offline.gamma,
        beta_scaling=offline.beta_scaling,
        beta_keep_fraction=offline.beta_keep_fraction,
        beta_momentum=offline.beta_momentum,
        centring=offline.centring,
        seed=config.run.seed,
    )
