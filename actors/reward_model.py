"""The reward model as an actor: completes the verdicts that the verifier stage has left to it. Tables of many
callers are scored together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from headway.actors.extra_rollouts import fold
from headway.actors.later_verdicts import leaves, settle
from headway.actors.together import Together, num_tokens
from headway.core.config import Config
from headway.core.errors import DataError
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt
from headway.learner.batching import unpack
from headway.learner.reward_model import RewardModel, read_about
from headway.verifiers.pending import REWARD_MODEL
from headway.verifiers.verdict import Verdict

NOT_FINITE = "reward_not_finite"
"""Reason of a response whose score is no number; it is unscored."""


class RewardModelActor:
    """`reward_model.path` must be a folder by now. Raises `DataError` when it is no reward model."""

    def __init__(self, config: Config) -> None:
        settings = config.reward_model
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        assert settings.path is not None
        folder = Path(settings.path)
        self._kind = read_about(folder)["kind"]
        self._model = RewardModel.load(folder, dtype=config.model.dtype, kind=self._kind)
        if self._model.calibration is None and self._kind == "outcome":
            raise DataError(
                f"reward_model.path={folder} has no calibration: its scores have no scale; finish its training"
            )
        self._microbatch_tokens = settings.microbatch_tokens
        self._judged = Together(self._verdicts, num_tokens, settings.microbatch_tokens)
        self._recorder = Recorder()

    def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        """The rollout table with what was pending for the reward model filled in (`later_verdicts.settle`), and extra
        rows folded into `values`.

        An outcome model's score is the calibrated one, of mean 0 and deviation 1 over held-out answers. A process
        model gives each step the probability that it is right, as parts `step`, and the least of them as the score.
        Raises `SchemaError` when the table is not one group.
        """
        own = leaves(table, prompt, REWARD_MODEL)
        if own:
            by_row = self._judged(table)
            found = {(leaf.row, leaf.number): by_row[leaf.row] for leaf in own}
            table, settled = settle(table, prompt, found)
            for verdict in settled:
                if verdict.score is None:
                    self._recorder.inc("headway_verifier_errors_total", label=verdict.reason)
        return fold(table)

    def _verdicts(self, tables: Sequence[pa.Table]) -> list[list[Verdict]]:
        """One for each response of each table."""
        groups = [unpack(table) for table in tables]
        if self._kind == "process":
            ends_R = [
                ends if len(ends) else np.array([length])
                for group in groups
                for ends, length in zip(group.step_ends, group.lengths, strict=True)
            ]
            logits_R = self._model.step_scores(groups, ends_R, microbatch_tokens=self._microbatch_tokens)
            found = iter([_of_steps(1 / (1 + np.exp(-logits.astype(np.float64)))) for logits in logits_R])
        else:
            assert self._model.calibration is not None
            raw_R = self._model.scores(groups, microbatch_tokens=self._microbatch_tokens)
            found = iter([_verdict(score) for score in self._model.calibration.apply(raw_R).tolist()])
        return [list(islice(found, table.num_rows)) for table in tables]

    def drain_updates(self) -> list[Update]:
        """Metric updates since the last call."""
        return self._recorder.drain()


def _verdict(score: float) -> Verdict:
    if not math.isfinite(score):
        return Verdict(score=None, reason=NOT_FINITE)
    return Verdict(score=score, reason="scored")


def _of_steps(probabilities: np.ndarray) -> Verdict:
    verdict = _verdict(float(probabilities.min()))
    parts = tuple(("step", probability) for probability in probabilities.tolist())
    return Verdict(score=verdict.score, reason=verdict.reason, parts=parts)
