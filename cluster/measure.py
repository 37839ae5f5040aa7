"""How fast the actors of a run are, measured on what its folder holds."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from headway.cluster.scenario import Scenario
from headway.cluster.stored import reading
from headway.core.config import load_config
from headway.core.errors import DataError
from headway.core.rollouts import check_schema, lengths
from headway.learner import checkpoint

MIN_STEPS = 8
"""Optimizer steps that a run must have to be measured,"""
MAX_STEPS = 200
"""and how many of the last ones are looked at."""
MAX_LENGTHS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How fast a run was. Left out are its first steps, in which everything warms up and the pipeline fills; of a run
    that goes on also the last ones, since what ran beside their groups is not stored yet."""

    scenario: Scenario
    engines: int
    ranks: int
    step_s: float
    """Mean time of an optimizer step."""
    learner_idle_share: float
    steps: int
    """That the learner's speed rests on,"""
    groups: int
    """and the engines'."""
    decode_error: float
    """Median relative error of the fitted time of a group,"""
    learner_error: float
    """and of a step's training."""
    updates: int
    """Weight updates that their time rests on; 0: only their pause is measured, on the groups that it stopped."""
    no_signal_share: float
    """Share of finished groups that dynamic sampling dropped."""


def measure(run_folder: Path) -> Measured:
    """Speeds of a run from what its folder holds. Raises `DataError` without stored rollouts or with too few steps."""
    from headway.cluster.report import read_metrics

    if not (run_folder / "config.json").is_file():
        raise DataError(
            f"{run_folder} holds no config.json; headway plan takes a run folder such as runs/demo, or --config and "
            "speeds such as scenario.decode_s=0.02"
        )
    config = load_config(run_folder / "config.json")
    records = read_metrics(run_folder / "metrics.jsonl")[0][-MAX_STEPS:]
    if not any((run_folder / "rollouts").glob("step-*.parquet")):
        raise DataError(
            f"{run_folder}/rollouts holds no batches to measure the engines on; run.save_rollouts=true keeps them"
        )
    if len(records) < MIN_STEPS:
        raise DataError(
            f"{run_folder} has {len(records)} steps; at least {MIN_STEPS} are needed, since the first ones only fill "
            "the pipeline"
        )
    fill, third = config.lag.max_version_lag + 1, len(records) // 3
    first = min(max(fill, 3), third)
    last = len(records) - (min(fill, third) if records[-1]["version"] < config.run.steps else 0)
    settled = records[first:]

    train_s = np.array([r["seconds"]["total"] - r["waited_s"] - r["seconds"]["publish"] for r in settled])
    tokens = np.array([sum(r["response_tokens"]) for r in settled], dtype=float)
    (step_s, token_s), learner_error = fit(np.stack([np.ones_like(tokens), tokens], axis=1), train_s)

    groups = _read_groups(run_folder, records, {r["version"] for r in records[first:last]})
    sync = _sync_seconds(run_folder)
    prefill_s, decode_s, decode_request_s, pause_s, decode_error = _fit_decoding(groups, sync)
    lags = np.array([np.mean(r["lag"]) for r in settled])
    ess = np.array([r.get("importance_ess_fraction") or 1.0 for r in settled])
    no_signal = records[-1]["dropped"].get("no_signal", 0)
    no_signal -= records[first - 1]["dropped"].get("no_signal", 0) if first else 0
    no_signal_share = no_signal / (no_signal + len(settled) * config.learner.groups_per_step)
    sampled = [length for r in settled for length in r["response_tokens"]]
    total_s = sum(r["seconds"]["total"] for r in settled)
    scenario = Scenario(
        lengths=tuple(sampled[:: -(-len(sampled) // MAX_LENGTHS)]),
        prompt_tokens=groups.longest_prompt,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_request_s=decode_request_s,
        update_s=sync[1] if sync else pause_s,
        pause_s=pause_s,
        engine_start_s=0.0,
        start_s=0.0,
        score_s=groups.score_s,
        step_s=step_s,
        token_s=token_s,
        publish_s=float(np.median([r["seconds"]["publish"] for r in settled])),
        ess_decay=float(-(np.log(ess) * lags).sum() / max((lags**2).sum(), 1e-9)),
        reward_mean=reward_mean(no_signal_share, config.sampling.group_size),
    )
    return Measured(
        scenario=scenario,
        engines=round(float(np.median([_engines(r) for r in settled]))),
        ranks=config.learner.replicas,
        step_s=total_s / len(settled),
        learner_idle_share=sum(r["waited_s"] for r in settled) / total_s,
        steps=len(settled),
        groups=int(groups.is_fitted.sum()),
        decode_error=decode_error,
        learner_error=learner_error,
        updates=sync[2] if sync else 0,
        no_signal_share=no_signal_share,
    )


def fit(columns_NK: np.ndarray, values_N: np.ndarray) -> tuple[tuple[float, ...], float]:
    """Coefficients >= 0 of the least squares, and the median relative error. What is off by more than three (robust)
    standard deviations of the residuals is left out, and the rest is fitted again.

    All subsets of the columns are tried, as there are few: the best one whose coefficients are positive is the solution
    of the constrained problem.
    """
    kept = np.ones(len(values_N), dtype=bool)
    solution = np.zeros(columns_NK.shape[1])
    residuals_N = np.zeros_like(values_N)
    for _ in range(3):
        solution = _non_negative(columns_NK[kept], values_N[kept])
        residuals_N = np.abs(values_N - columns_NK @ solution)
        kept = residuals_N <= 3 * 1.4826 * np.median(residuals_N[kept]) + 1e-9
    error = np.median(residuals_N / np.maximum(values_N, 1e-9))
    return tuple(solution.tolist()), float(error)


def _non_negative(columns_NK: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    width = columns_NK.shape[1]
    scale_K = np.maximum(np.abs(columns_NK).max(axis=0), 1e-12)
    best, least = np.zeros(width), float(values_N @ values_N)
    for size in range(1, width + 1):
        for subset in itertools.combinations(range(width), size):
            chosen = list(subset)
            found, *_ = np.linalg.lstsq(columns_NK[:, chosen] / scale_K[chosen], values_N, rcond=None)
            error = float(((columns_NK[:, chosen] / scale_K[chosen] @ found - values_N) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(width), error
                best[chosen] = found / scale_K[chosen]
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """Stored groups [N] and their responses [R]."""

    started: np.ndarray
    """[N] seconds since the epoch,"""
    finished: np.ndarray
    """[N] when the engine had the last token."""
    longest: np.ndarray
    """[N] tokens of the longest response."""
    switches: np.ndarray
    """[N] weight updates in its midst."""
    engines: np.ndarray
    """[N] that served then."""
    weight: np.ndarray
    """[N] finished groups that it stands for: those that were dropped are not stored."""
    is_fitted: np.ndarray
    """[N] whether it is a sample; the others are only the load beside it."""
    group: np.ndarray
    """[R] row in the above,"""
    tokens: np.ndarray
    """[R] and length of each response."""
    longest_prompt: int
    score_s: float


def _read_groups(run_folder: Path, records: Sequence[Mapping[str, Any]], fitted: set[int]) -> _Groups:
    """The groups of all steps that are stored. `fitted`: versions whose groups are samples."""
    rows: list[tuple[float, ...]] = []
    group: list[int] = []
    tokens: list[int] = []
    prompt, scoring = 1, []
    steps_of_batch: list[Mapping[str, Any]] = []
    dropped = Counter(records[0]["dropped"])
    for record in records:
        steps_of_batch.append(record)
        path = run_folder / "rollouts" / f"step-{record['version']:06d}.parquet"
        if not path.exists():  # the batch goes on, or was not kept
            continue
        with reading(path):
            file = pq.ParquetFile(path)
            check_schema(file.schema_arrow)
            table = file.read(["group_id", "prompt_ids", "loss_mask", "timing", "version_spans"])
        ids, first, of_row = np.unique(table["group_id"].to_numpy(), return_index=True, return_inverse=True)
        length = np.array(lengths(table, "loss_mask"))
        timing = table["timing"].to_pylist()
        spans = np.array(lengths(table, "version_spans"))
        lost = Counter(record["dropped"]) - dropped
        dropped = Counter(record["dropped"])
        # Groups that died unfinished cost little; the others were sampled whole.
        weight = 1 + (lost.total() - lost["generation_failed"]) / len(ids)
        engines = float(np.mean([_engines(step) for step in steps_of_batch]))
        for number, row in enumerate(first):
            own = of_row == number
            times = timing[row]
            if times is None or times["finished"] is None:
                continue
            if times["scored"] is not None:
                scoring.append(times["scored"] - times["finished"])
            group += [len(rows)] * int(own.sum())
            tokens += length[own].tolist()
            rows.append(
                (
                    times["started"],
                    times["finished"],
                    length[own].max(),
                    spans[own].max() - 1,
                    engines,
                    weight,
                    record["version"] in fitted,
                )
            )
        prompt = max(prompt, *lengths(table, "prompt_ids"))
        steps_of_batch = []
    if not any(row[-1] for row in rows):
        raise DataError(f"{run_folder}/rollouts holds no batch of the steps that are to be measured")
    started, finished, longest, switches, engine_count, weights, is_fitted = np.array(rows, dtype=float).T
    return _Groups(
        started=started,
        finished=finished,
        longest=longest,
        switches=switches,
        engines=engine_count,
        weight=weights,
        is_fitted=is_fitted.astype(bool),
        group=np.array(group),
        tokens=np.array(tokens, dtype=float),
        longest_prompt=prompt,
        score_s=max(0.0, float(np.median(scoring))) if scoring else 0.0,  # clocks of two nodes
    )


def _fit_decoding(
    groups: _Groups, sync: tuple[float, float, int] | None
) -> tuple[float, float, float, float, float]:
    """prefill_s, decode_s, decode_request_s, pause_s, and the relative error.

    A decode step takes a + b * (responses in it). Summed over the steps of a group that is a * (its longest response) +
    b * (tokens that its engine decoded meanwhile), which is linear, whatever came and went in between. Those tokens are
    not stored; they are the share of an engine in what all responses got, each response having grown evenly.
    """
    duration = np.maximum(groups.finished - groups.started, 1e-6)
    own = np.bincount(groups.group, groups.tokens, minlength=len(duration))
    prefill_s = pause_s = 0.0
    error = 0.0
    decode_s = decode_request_s = 0.0
    for _ in range(3):  # the second and third time without prefill and pauses in the pace
        begin = np.minimum(groups.started + prefill_s, groups.finished - 0.1 * duration)
        pace = np.maximum(groups.longest, 1) / (groups.finished - begin)
        start_R, pace_R = begin[groups.group], pace[groups.group]
        weight_R = groups.weight[groups.group]
        end_R = start_R + groups.tokens / pace_R
        times = np.concatenate([start_R, end_R])
        turns = np.concatenate([weight_R * pace_R, -weight_R * pace_R])
        order = np.argsort(times, kind="stable")
        times = times[order]
        speed = np.cumsum(turns[order])
        decoded = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(times))])
        meanwhile = np.interp(groups.finished, times, decoded) - np.interp(begin, times, decoded)
        load = np.maximum(own, meanwhile / np.maximum(groups.engines, 1))
        columns = [np.ones_like(duration), groups.longest, load]
        known_s = np.zeros_like(duration)
        if sync:
            known_s = np.minimum(sync[0] * groups.switches, 0.5 * duration)
        else:
            columns.append(groups.switches)
        chosen = groups.is_fitted
        found, error = fit(np.stack(columns, axis=1)[chosen], (duration - known_s)[chosen])
        prefill_s, decode_s, decode_request_s = found[:3]
        pause_s = sync[0] if sync else found[3]
    return prefill_s, decode_s, decode_request_s, pause_s, error


def _sync_seconds(run_folder: Path) -> tuple[float, float, int] | None:
    """Mean pause and mean time of the weight updates, and their number, as of the newest checkpoint."""
    newest = checkpoint.newest_complete(run_folder / "checkpoints")
    if newest is None:
        return None
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    found = {
        label: (total, sum(counts))
        for name, label, counts, total in state["metrics"]["histograms"]
        if name == "headway_weight_sync_seconds"
    }
    number = found.get("total", (0.0, 0))[1]
    if not number:
        return None
    return found["pause"][0] / number, found["total"][0] / number, number


def reward_mean(no_signal_share: float, group_size: int) -> float:
    """The share p <= 0.5 of right responses under which p^n + (1 - p)^n of the groups of n have equal rewards."""
    low, high = 0.0, 0.5
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if p**group_size + (1 - p) ** group_size > no_signal_share else (low, p)
    return (low + high) / 2


def _engines(record: Mapping[str, Any]) -> int:
    return sum(version is not None for version in record["engine_versions"])
