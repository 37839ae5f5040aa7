"""How many GPUs for generation and how many for the learner: speeds measured on a run, and splits simulated with them."""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.cluster.scenario import Scenario
from headway.cluster.simulate import Result, simulate
from headway.core.config import Config
from headway.core.errors import ConfigError, HeadwayError

TIE = 0.03
"""Step times that differ by less are equal."""
LAGS = (0, 1, 2, 4, 8)
SIMULATIONS = 45
"""That a plan takes, about; their number of steps is such that all end in"""
PLAN_S = 30.0
"""seconds, within"""
STEPS = (20, 160)
"""these limits."""
AT_ONCE = {"start_s": 0.0, "engine_start_s": 0.0}
"""What the start of a run takes says nothing about its steps."""


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


def plan(
    config: Config,
    scenario: Scenario,
    gpus: int,
    *,
    ranks: int | None = None,
    efficiency: float = 0.9,
    steps: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The division of `gpus` with the least step time; among those within 3 % the one with the fewest GPUs, then the
    least lag. `scenario`: the speeds, those of the learner with `ranks` ranks (default: as configured); twice as many
    ranks are 2 * `efficiency` times as fast. `steps`: of each simulation; default: as many as half a minute allows.
    Raises `ConfigError` when nothing fits."""
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

    def run(engines: int, learners: int, lag: int, steps: int) -> Split:
        say(f"{count(engines, 'engine')}, {count(learners, 'learner rank')}, max_version_lag {lag}")
        slowness = learner_slowness(ranks, learners, efficiency)
        speeds = replace(scenario, step_s=scenario.step_s * slowness, token_s=scenario.token_s * slowness)
        used = engines * engine_gpus + learners * rank_gpus
        return _split(_with(config, engines, lag, steps), replace(speeds, **AT_ONCE), learners, used)

    if steps is None:
        largest = (int((gpus - rank_gpus) // engine_gpus), 1, own_lag)
        run(*largest, 1)  # loads what the simulator needs
        probe = max(5, 500 // config.groups_per_batch)
        began = time.monotonic()
        run(*largest, probe)
        each_s = (time.monotonic() - began) / (probe + own_lag + 1)
        steps = round(min(max(PLAN_S / SIMULATIONS / each_s, STEPS[0]), STEPS[1]))

    @functools.cache
    def at(engines: int, learners: int, lag: int) -> Split:
        return run(engines, learners, lag, steps)

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
    division = f"{count(best.engines, 'engine')} and {count(best.ranks, 'learner rank')}"
    first = f"{division} ({best.gpus:g} {places}): {best.step_s:.3g} s a step"
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
    """All numbers up to 8; of more, 1, 2, 3, 4, 6, 8, 12 ... and `most`."""
    if most <= 8:
        return list(range(1, most + 1))
    grid = {n << k for k in range(most.bit_length()) for n in (1, 3)}
    return sorted({number for number in grid if number <= most} | {most})


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
