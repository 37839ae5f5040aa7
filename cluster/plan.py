"""How many GPUs for generation and how many for the learner: speeds measured on a run, and splits simulated with them."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from headway.cluster.scenario import Scenario
from headway.cluster.simulate import Result, simulate
from headway.core.config import Config, load_config
from headway.core.errors import ConfigError, DataError, HeadwayError
from headway.core.rollouts import check_schema, lengths
from headway.learner import checkpoint

MIN_STEPS = 8
"""Optimizer steps that a run must have to be measured,"""
MAX_STEPS = 200
"""and how many of the last ones are looked at."""
MAX_LENGTHS = 20_000
TIE = 0.03
"""Step times that differ by less are equal."""
LAGS = (0, 1, 2, 4, 8)
SIMULATIONS = 35
"""That a plan takes, about; their number of steps is such that all end in"""
PLAN_S = 35.0
"""seconds."""
STEPS = (20, 160)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What a simulated division of the GPUs came to. It makes no progress: `step_s` is infinite, shares are 1."""

    engines: int
    ranks: int
    gpus: float
    max_version_lag: int
    step_s: float
    tokens_per_s: float
    """Generated."""
    lag_p50: int
    lag_p95: int
    learner_idle_share: float
    engine_idle_share: float
    dropped_share: float
    """Of all groups that ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    recommended: Split
    bottleneck: str
    """generation | learner | lag | none"""
    advice: str
    """One sentence."""
    splits: list[Split]
    """All that were simulated within the budget, by ranks and engines."""
    by_lag: list[Split]
    """The recommended one under other bounds on the version lag."""
    own: Split
    """The division that the run, or the configuration, has."""
    assumptions: list[str]
    steps: int
    """Of each simulation, after the pipeline has filled."""
    simulations: int


# ---- measure -----------------------------------------------------------------------------------------------


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
        reward_mean=_reward_mean(no_signal_share, config.sampling.group_size),
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
        score_s=float(np.median(scoring)) if scoring else 0.0,
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


def _reward_mean(no_signal_share: float, group_size: int) -> float:
    """The share p <= 0.5 of right responses under which p^n + (1 - p)^n of the groups of n have equal rewards."""
    low, high = 0.0, 0.5
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if p**group_size + (1 - p) ** group_size > no_signal_share else (low, p)
    return (low + high) / 2


def _engines(record: Mapping[str, Any]) -> int:
    return sum(version is not None for version in record["engine_versions"])


# ---- plan --------------------------------------------------------------------------------------------------


def plan(
    config: Config,
    scenario: Scenario,
    gpus: int,
    *,
    ranks: int | None = None,
    efficiency: float = 0.9,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The division of `gpus` with the least step time; among those within 3 % the one with the fewest GPUs, then the
    least lag. `scenario`: the speeds, those of the learner with `ranks` ranks (default: as configured); twice as many
    ranks are 2 * `efficiency` times as fast. Raises `ConfigError` when nothing fits."""
    engine_gpus, rank_gpus = config.generation.gpus or 1, config.learner.gpus or 1
    ranks = ranks or config.learner.replicas
    most = int((gpus - engine_gpus) // rank_gpus)
    if config.algorithm.objective == "trpo" or config.algorithm.advantage == "min_variance":
        most = min(most, 1)
    if most < 1:
        raise ConfigError(
            f"--gpus {gpus} holds no engine (generation.gpus={config.generation.gpus:g}) beside a learner rank "
            f"(learner.gpus={config.learner.gpus:g}); at least {engine_gpus + rank_gpus:g} are needed"
        )
    own = (config.generation.replicas, config.learner.replicas)
    own_lag = config.lag.max_version_lag
    steps = 10

    @functools.cache
    def at(engines: int, learners: int, lag: int) -> Split:
        say(f"{engines} engines, {learners} learner ranks, max_version_lag {lag}")
        slower = learner_slowness(ranks, learners, efficiency)
        speeds = replace(
            scenario, step_s=scenario.step_s * slower, token_s=scenario.token_s * slower, start_s=0.0,
            engine_start_s=0.0,
        )  # fmt: skip
        used = engines * engine_gpus + learners * rank_gpus
        return _split(_with(config, engines, lag, steps), speeds, learners, used)

    at(*own, own_lag)  # loads what the simulator needs
    at.cache_clear()
    steps = max(5, 500 // config.groups_per_batch)
    began = time.monotonic()
    at(*own, own_lag)
    step_wall_s = (time.monotonic() - began) / (steps + own_lag + 1)
    steps = round(min(max(PLAN_S / SIMULATIONS / step_wall_s, STEPS[0]), STEPS[1]))
    at.cache_clear()

    def full(learners: int) -> Split:
        return at(int((gpus - learners * rank_gpus) // engine_gpus), learners, own_lag)

    choices = [full(learners) for learners in _spread(most)]
    limit = min(split.step_s for split in choices) * (1 + TIE)
    if limit == math.inf:
        raise ConfigError(
            f"no division of {gpus} makes a step within run.no_progress_deadline_s="
            f"{config.run.no_progress_deadline_s:g} at these speeds; give more GPUs, or raise the deadlines"
        )

    def shrunk(split: Split) -> Split:
        """With the fewest engines, then ranks, that keep within the limit."""
        low, high = 0, split.engines
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle, split.ranks, own_lag).step_s <= limit else (middle, high)
        split = at(high, split.ranks, own_lag)
        for learners in reversed([number for number in _spread(most) if number < split.ranks]):
            if (fewer := at(split.engines, learners, own_lag)).step_s > limit:
                break
            split = fewer
        return split

    ties = [shrunk(split) for split in choices if split.step_s <= limit]
    best = min(ties, key=lambda split: (split.gpus, split.lag_p95, split.step_s))
    room = int((gpus - best.ranks * rank_gpus) // engine_gpus)
    splits = {(s.engines, s.ranks): s for s in (*choices, *ties)}
    for engines in {best.engines, *_spread(room)}:
        splits[engines, best.ranks] = at(engines, best.ranks, own_lag)
    lags = sorted({own_lag, *(lag for lag in LAGS if lag >= config.learner.steps_per_batch - 1)})
    by_lag = [at(best.engines, best.ranks, lag) for lag in lags]
    bottleneck, advice = _advice(best, by_lag, at, places="GPUs" if config.generation.gpus else "places")
    own_split = at(*own, own_lag)
    return Plan(
        recommended=best,
        bottleneck=bottleneck,
        advice=advice,
        splits=sorted(splits.values(), key=lambda split: (split.ranks, split.engines)),
        by_lag=by_lag,
        own=own_split,
        assumptions=[
            f"An engine takes {engine_gpus:g} and a learner rank {rank_gpus:g}; each has its own, so that engines and "
            "learner do not slow each other down more than they did.",
            f"Twice as many ranks train {2 * efficiency:g} times as fast (--efficiency {efficiency:g}); whether the "
            "model fits on fewer ranks is not checked.",
            "Lengths of responses are drawn one by one: those of a prompt are no more alike than others. Nothing fails, "
            "and no checkpoint is written.",
        ],
        steps=steps,
        simulations=at.cache_info().currsize,
    )


def learner_slowness(measured: int, ranks: int, efficiency: float) -> float:
    """Time of a step with `ranks` over that with `measured`: halves, over `efficiency`, with each doubling."""
    return (measured / ranks) * efficiency ** -math.log2(ranks / measured)


def _advice(
    best: Split, by_lag: Sequence[Split], at: Callable[[int, int, int], Split], *, places: str
) -> tuple[str, str]:
    """The bottleneck is what relieves most: more engines, more ranks, or a higher bound."""
    lag, idle = best.max_version_lag, best.learner_idle_share
    engines = min(max(1, round(best.engines * idle / max(1 - idle, 0.1))), best.engines)
    ranks = max(1, best.ranks // 2)
    fastest = min(s.step_s for s in by_lag if s.max_version_lag >= lag)
    relief = {
        "generation": at(best.engines + engines, best.ranks, lag),
        "learner": at(best.engines, best.ranks + ranks, lag),
        "lag": next(s for s in by_lag if s.max_version_lag >= lag and s.step_s <= (1 + TIE) * fastest),
    }
    name, relieved = min(relief.items(), key=lambda item: item[1].step_s)
    gain = 1 - relieved.step_s / best.step_s
    first = f"{count(best.engines, 'engine')} and {count(best.ranks, 'learner rank')} ({best.gpus:g} {places}): {best.step_s:.3g} s a step"
    shares = f"the learner waits {idle:.0%} of the time, the engines stand idle {best.engine_idle_share:.0%}"
    if gain < TIE:
        return (
            "none",
            f"{first}; {shares}, and neither more engines, more ranks nor a higher lag would gain much",
        )
    more = {
        "generation": f"{count(engines, 'more engine')} would take {relieved.step_s:.3g} s ({-gain:.0%})",
        "learner": f"{count(ranks, 'more learner rank')} would take {relieved.step_s:.3g} s ({-gain:.0%})",
        "lag": f"lag.max_version_lag={relieved.max_version_lag} would take {relieved.step_s:.3g} s ({-gain:.0%})",
    }
    what = {"generation": "generation", "learner": "the learner", "lag": "the lag bound"}[name]
    return name, f"{first}; the bottleneck is {what}: {shares}; {more[name]}"


def _split(config: Config, scenario: Scenario, ranks: int, gpus: float) -> Split:
    result: Result | None = None
    with tempfile.TemporaryDirectory(prefix="headway-plan-") as folder:
        try:
            result = simulate(config, scenario, Path(folder))
        except* HeadwayError:
            pass  # a run with this division would end like this
    place: dict[str, Any] = {
        "engines": config.generation.replicas,
        "ranks": ranks,
        "gpus": gpus,
        "max_version_lag": config.lag.max_version_lag,
    }
    if result is None:
        shares = dict.fromkeys(("learner_idle_share", "engine_idle_share", "dropped_share"), 1.0)
        return Split(**place, **shares, step_s=math.inf, tokens_per_s=0.0, lag_p50=0, lag_p95=0)
    # Per step and settled step time: at the end of a run engines stand idle, as there is nothing left to sample.
    live_s = result.run_s - scenario.publish_s - scenario.update_s
    per_step = live_s / (result.steps * result.step_s)
    dropped = sum(result.dropped.values())
    return Split(
        **place,
        step_s=result.step_s,
        tokens_per_s=result.generation_tokens_per_s * per_step,
        lag_p50=result.lag_p50,
        lag_p95=result.lag_p95,
        learner_idle_share=result.learner_idle_share,
        engine_idle_share=max(0.0, 1 - result.engine_busy_share * per_step),
        dropped_share=dropped / (dropped + result.steps * config.learner.groups_per_step),
    )


def _with(config: Config, engines: int, lag: int, steps: int) -> Config:
    """A run of `steps` after the pipeline has filled, without checkpoints and automatic scaling."""
    per_batch = config.learner.steps_per_batch
    total = -(-(steps + lag + 1) // per_batch) * per_batch
    changes: dict[str, dict[str, Any]] = {
        "run": {"steps": total, "checkpoint_every": 0},
        "lag": {"max_version_lag": lag},
        "generation": {"replicas": engines, "min_replicas": None, "max_replicas": None},
        "metrics": {"heartbeat_s": 60.0},
    }
    if lag == 0:
        changes["lag"] |= {"policy": "pace", "ess_floor": None, "downweight_limit": None}
    elif (config.lag.downweight_limit or lag) < lag:
        changes["lag"]["downweight_limit"] = None
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    )


def _spread(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... and `most`; all up to 8."""
    grid = {*range(1, 9), *(n << k for k in range(2, 20) for n in (2, 3))}
    return sorted({number for number in grid if number <= most} | {most})


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
