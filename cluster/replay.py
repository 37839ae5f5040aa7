"""Saved rollouts again: scored, or trained, under another algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headway.actors.policy import demonstrations_file
from headway.cluster.record import step_record
from headway.cluster.stored import reading
from headway.core.config import Config, dump_config, load_config
from headway.core.errors import ConfigError, DataError, SchemaError
from headway.core.rollouts import read_parquet
from headway.learner.batching import Group, unpack
from headway.learner.corrections import (
    Counterfactual,
    correct,
    counterfactuals,
    ess_fraction,
    statistics_by_lag,
)
from headway.learner.pretrained import model_folder
from headway.learner.rewards import RewardState
from headway.learner.sft import read_demonstrations
from headway.learner.step import LagOutOfBounds, policy_factors, prepare
from headway.learner.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What an algorithm would have made of one optimizer step's rollouts."""

    version: int
    """Optimizer steps applied when the rollouts were trained."""
    reward_mean: float | None
    no_signal_groups: int
    num_tokens: int
    """Tokens in the loss whose log-probabilities of both policies are stored."""
    mean_abs_advantage: float | None
    masked_fraction: dict[str, float]
    """Share of sampled tokens, by reason."""
    ess_fraction: float | None
    """Of the factors of the loss."""
    counterfactuals: dict[str, Counterfactual]
    by_lag: dict[int, float]
    """ESS fraction of the uncapped weights by version lag."""


def replay_config(run_folder: Path, overrides: Sequence[str]) -> Config:
    """The run's configuration under `overrides`. Another preset replaces the whole `algorithm` section. Raises
    `DataError` when the folder holds no run, `ConfigError` for what the rollouts cannot serve."""
    path = run_folder / "config.json"
    if not path.is_file():
        raise DataError(
            f"{run_folder} holds no config.json; headway replay takes a run folder such as runs/demo"
        )
    saved = load_config(path)
    if any(override.removeprefix("--").startswith("algorithm.preset=") for override in overrides):
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree.pop("algorithm")
        (fresh := run_folder / ".replay.json").write_text(json.dumps(tree), encoding="utf-8")
        try:
            config = load_config(fresh, overrides)
        finally:
            fresh.unlink()
    else:
        config = load_config(path, overrides)
    for name in ("groups_per_step", "steps_per_batch"):
        stored, asked = getattr(saved.learner, name), getattr(config.learner, name)
        if stored != asked:
            raise ConfigError(f"learner.{name}={asked}, but the rollouts are stored in batches of {stored}")
    return config


def batches(run_folder: Path) -> list[tuple[int, Path]]:
    """(version before the batch, file) of every stored batch in order. Raises `DataError` without any."""
    files = sorted((run_folder / "rollouts").glob("step-*.parquet"))
    if not files:
        raise DataError(f"{run_folder}/rollouts holds no batches; run.save_rollouts=true keeps them")
    per_batch = load_config(run_folder / "config.json").learner.steps_per_batch
    return [(int(path.stem.removeprefix("step-")) - per_batch, path) for path in files]


def score(config: Config, files: Sequence[tuple[int, Path]]) -> Iterator[Score]:
    """One score per optimizer step: no model, only what is stored. Raises `DataError` when the algorithm needs a
    column that the run did not make."""
    state = RewardState.start(config.algorithm)
    per_step = config.learner.groups_per_step
    for start, path in files:
        tables = group_tables(_stored(path))
        proximal = [_proximal(table) for table in tables]
        groups = [unpack(table) for table in tables]
        for number, at in enumerate(range(0, len(groups), per_step)):
            own = slice(at, at + per_step)
            yield _score_step(config, groups[own], np.concatenate(proximal[own]), start + number, state)


def _score_step(
    config: Config, groups: list[Group], proximal_N: np.ndarray, version: int, state: RewardState
) -> Score:
    algorithm = config.algorithm
    try:
        step = prepare(
            groups,
            algorithm,
            max_new_tokens=config.sampling.max_new_tokens,
            state=state,
            lag_factors_N=torch.cat([policy_factors(group, version, config) for group in groups]),
        )
    except LagOutOfBounds as error:
        raise DataError(
            f"these rollouts cannot be scored under lag.policy={config.lag.policy}: {error}"
        ) from error
    except SchemaError as error:
        raise DataError(
            f"these rollouts cannot be scored under algorithm.preset={algorithm.preset}: {error}"
        ) from error
    log_correction_N = torch.from_numpy(proximal_N) - step.behavior_logprobs_N
    tokens = torch.from_numpy(
        np.flatnonzero(step.in_loss_N) if len(step.in_loss_N) else np.zeros(0, np.int64)
    )
    tokens = tokens[torch.isfinite(log_correction_N[tokens])]
    log_correction, advantages = log_correction_N[tokens], step.advantages_N[tokens]
    responses, lag = step.response_N[tokens], version - step.versions_N[tokens]
    num_sampled = max(1, sum(int(group.loss_mask.sum()) for group in groups))
    masked = dict(step.masked_fraction)
    ess = None
    if len(tokens):
        factors = step.lag_factors_N[tokens]
        if algorithm.correction:
            corrected = correct(log_correction, responses, advantages, -log_correction, algorithm)
            factors = factors * corrected.factor_M
            masked |= {name: float(mask.sum()) / num_sampled for name, mask in corrected.rejected.items()}
        ess = ess_fraction(factors)
    rewards = np.concatenate([group.rewards[group.scored] for group in groups])
    return Score(
        version=version,
        reward_mean=float(rewards.mean()) if len(rewards) else None,
        no_signal_groups=step.no_signal_groups,
        num_tokens=len(tokens),
        mean_abs_advantage=float(advantages.abs().mean()) if len(tokens) else None,
        masked_fraction=masked,
        ess_fraction=ess,
        counterfactuals=counterfactuals(log_correction, responses, advantages, -log_correction, algorithm),
        by_lag={
            lag: statistics.ess_fraction for lag, statistics in statistics_by_lag(log_correction, lag).items()
        },
    )


def train(config: Config, run_folder: Path, name: str, say: Callable[[dict[str, Any]], None]) -> Path:
    """Trains the run's initial model on its stored batches, in their order, under `config`. Writes
    `RUN/replays/NAME` with `metrics.jsonl` and `learner/model`, and returns it."""
    files = batches(run_folder)
    if files[0][0] != 0:
        raise DataError(
            f"the first stored batch of {run_folder} starts at version {files[0][0]}, whose weights are not kept; "
            "only a run whose rollouts are stored from the start can be trained again (--score still works)"
        )
    folder = run_folder / "replays" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(dump_config(config), encoding="utf-8")
    torch.manual_seed(config.run.seed)
    demonstrations = []
    if config.algorithm.sft_coef:
        if not demonstrations_file(run_folder).exists():
            raise DataError(f"{run_folder} was trained without demonstrations; set algorithm.sft_coef=0")
        demonstrations = read_demonstrations(demonstrations_file(run_folder))
    trainer = Trainer(config, model_folder(config.model.path), demonstrations=demonstrations)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for start, path in files:
            try:
                stats, _ = trainer.train(group_tables(_stored(path)), start)
            except LagOutOfBounds as error:
                raise DataError(
                    f"{path.name} cannot be trained under lag.policy={config.lag.policy}: {error}"
                ) from error
            for step in stats:
                record = step_record(step, config.learner.groups_per_step)
                file.write(json.dumps(record) + "\n")
                file.flush()
                say(record)
    (folder / "learner").mkdir(exist_ok=True)
    trainer.save(folder / "learner")
    return folder


def _stored(path: Path) -> pa.Table:
    with reading(path):
        return read_parquet(path)


def group_tables(table: pa.Table) -> list[pa.Table]:
    """A stored batch as one table per group, in the batch's order."""
    ids = np.asarray(table.column("group_id").to_numpy())
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    ends = [*starts[1:].tolist(), len(ids)]
    return [table.slice(start, end - start) for start, end in zip(starts.tolist(), ends, strict=True)]


def _proximal(table: pa.Table) -> np.ndarray:
    """[N] float32, NaN where the learner did not look."""
    column = table.column("proximal_logprobs")
    if column.null_count:
        raise DataError(
            "these rollouts hold no proximal log-probabilities: they were stored by another version"
        )
    return np.array(column.combine_chunks().flatten().to_numpy(zero_copy_only=False), dtype=np.float32)


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Means over steps, as JSON values."""
    names = dict.fromkeys(name for score in scores for name in score.counterfactuals)
    reasons = dict.fromkeys(reason for score in scores for reason in score.masked_fraction)
    return {
        "steps": len(scores),
        "tokens": sum(score.num_tokens for score in scores),
        "no_signal_groups": sum(score.no_signal_groups for score in scores),
        "ess_fraction": _mean([score.ess_fraction for score in scores]),
        "mean_abs_advantage": _mean([score.mean_abs_advantage for score in scores]),
        "masked_fraction": {
            reason: _mean([score.masked_fraction.get(reason) for score in scores]) for reason in reasons
        },
        "counterfactuals": {
            name: {
                key: _mean(
                    [asdict(score.counterfactuals[name])[key] for score in scores if score.counterfactuals]
                )
                for key in ("tokens", "responses", "ess_fraction")
            }
            for name in names
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
