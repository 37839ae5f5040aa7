"""A run on virtual time: the driver of `headway train` itself, with a `VirtualCrew` in place of engines and learner."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headway.cluster.progress import Progress
from headway.cluster.run import Run
from headway.cluster.scenario import Scenario
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config
from headway.core.metrics import ROLES
from headway.core.prompts import Prompt, PromptStream

NUM_PROMPTS = 4096
"""Different prompts of a simulated run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a simulated run came to. Times are virtual unless they say otherwise. Step times and shares leave out the
    first `lag.max_version_lag + 1` steps, in which the pipeline fills."""

    steps: int
    rollouts: int
    """Trained responses."""
    run_s: float
    """The whole run, its start included."""
    step_s: float
    """Mean time of an optimizer step."""
    learner_idle_share: float
    """Share of the step in which the learner waited for groups."""
    engine_busy_share: float
    """Share of the time of a serving engine in which it decoded something."""
    generation_tokens_per_s: float
    """Of all engines, from when the first one served to the end."""
    lag_p50: int
    """Version lag of trained groups (optimizer steps)."""
    lag_p95: int
    lag_max: int
    dropped: dict[str, int]
    """Groups by reason."""
    audit: dict[str, Any]
    """Distance of what was trained from what was sampled; see `headway_audit_*` in docs/metrics.md."""
    restarts: dict[str, int]
    """Actors replaced, by role; `run`: times that the run went on from a checkpoint."""
    weights: str
    """Equal for runs with the same history."""
    wall_s: float
    """Real time that the simulation took."""


class Silent(Progress):
    """Shows nothing: a simulated step takes less time than its line on the terminal."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Console(quiet=True))

    def say(self, text: str) -> None:
        pass

    def step(self, record: dict[str, Any]) -> None:
        pass

    def state(self, **_: Any) -> None:
        pass


def simulate(config: Config, scenario: Scenario, folder: Path, *, progress: Progress | None = None) -> Result:
    """Runs `config` under `scenario`; the run folder is made in `folder`. Raises what the run raises."""
    began = time.monotonic()
    config = in_folder(config, folder)
    crew = VirtualCrew(config, scenario)
    run = virtual_run(config, crew, progress=progress)
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)  # many live objects and few cycles: the default takes half of the time
    try:
        run_s = run_virtual(_timed(run))
    finally:
        gc.set_threshold(*before)
    return _result(config, run, crew, run_s, time.monotonic() - began)


def in_folder(config: Config, folder: Path) -> Config:
    """The configuration with its run folder in `folder`; rollouts, of which there are none, are not kept, and nothing leaves
    that folder."""
    run = config.run.model_copy(update={"folder": folder, "save_rollouts": False})
    metrics = config.metrics.model_copy(update={"traces": None, "tracker": "none"})
    return config.model_copy(update={"run": run, "metrics": metrics})


def virtual_run(
    config: Config, crew: VirtualCrew, *, progress: Progress | None = None, resume_from: Path | None = None
) -> Run:
    """The run, to be executed on a `VirtualLoop`. Prompts with long answers are tasks of kind `long`."""
    scenario = crew.scenario
    prompts = tuple(
        Prompt(
            prompt_id=str(number),
            content="",
            gold=None,
            verifier="math",
            task="long" if scenario.is_straggler(str(number)) else "usual",
        )
        for number in range(NUM_PROMPTS)
    )
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return Run(
        config=config,
        crew=lambda: crew,
        prompts=PromptStream(prompts, config.run.seed),
        longest_prompt=scenario.prompt_tokens,
        progress=progress or Silent(config),
        resume_from=resume_from,
    )


async def _timed(run: Run) -> float:
    await run.execute()
    return asyncio.get_running_loop().time()


def _result(config: Config, run: Run, crew: VirtualCrew, run_s: float, wall_s: float) -> Result:
    session = run.session
    assert session is not None
    lines = (config.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    settled = records[config.lag.max_version_lag + 1 :] or records
    total_s = sum(record["seconds"]["total"] for record in settled)
    lags = sorted(lag for record in records for lag in record["lag"])
    engines = list(crew.engines.values())
    tokens, live_s = sum(engine.tokens for engine in engines), sum(engine.live_s for engine in engines)
    served_since = min(engine.served_since for engine in engines)
    restarts = {role: int(session.totals.value("headway_actor_restarts_total", role)) for role in ROLES}
    restarts["run"] = int(session.totals.value("headway_run_restarts_total"))
    return Result(
        steps=session.version,
        rollouts=sum(len(record["response_tokens"]) for record in records),
        run_s=run_s,
        step_s=total_s / len(settled),
        learner_idle_share=sum(record["waited_s"] for record in settled) / total_s,
        engine_busy_share=sum(engine.busy_s for engine in engines) / live_s,
        generation_tokens_per_s=tokens / (run_s - served_since),
        lag_p50=_quantile(lags, 0.5),
        lag_p95=_quantile(lags, 0.95),
        lag_max=lags[-1],
        dropped=records[-1]["dropped"],
        audit=records[-1]["audit"],
        restarts={role: number for role, number in restarts.items() if number},
        weights=crew.weights,
        wall_s=wall_s,
    )


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
