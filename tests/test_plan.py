from __future__ import annotations

import asyncio
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from headway.cluster.measure import Measured, fit, measure, reward_mean
from headway.cluster.plan import Plan, learner_slowness, plan
from headway.cluster.scenario import Scenario
from headway.cluster.simulate import virtual_run
from headway.cluster.simulate_cli import change, split_overrides
from headway.cluster.simulate_cli import plan as plan_command
from headway.cluster.simulate_cli import simulate as simulate_command
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_actors import Engine, Job, Pending
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, dump_config, parse_config
from headway.core.errors import ConfigError, DataError
from headway.core.rollouts import build, write_parquet

# ---- measuring ---------------------------------------------------------------------------------------------


class WritingCrew(VirtualCrew):
    """Keeps the trained batches as a real crew does, with virtual times."""

    def __init__(self, config: Config, scenario: Scenario) -> None:
        super().__init__(config, scenario)
        self.started: dict[int, float] = {}
        self.finished: dict[int, float] = {}

    def sample(self, replica: int, request: Any, kept: Any = None) -> Pending:
        self.started[request.group_id] = asyncio.get_running_loop().time()
        return super().sample(replica, request, kept)

    def _made(self, engine: Engine, job: Job) -> None:
        self.finished[job.request.group_id] = asyncio.get_running_loop().time()
        super()._made(engine, job)

    async def write_batch(self, group_ids: Any, file: Path, version: int, columns: Any) -> None:
        rows = []
        for group in await self._queue.take(list(group_ids)):
            for sample, length in enumerate(group.lengths):
                versions = min(length, group.newest - group.oldest + 1)
                ends = [length * (n + 1) // versions for n in range(versions)]
                spans = [
                    {"start": ends[n - 1] if n else 0, "end": ends[n], "version": group.oldest + n}
                    for n in range(versions)
                ]
                finished = self.finished[group.group_id]
                rows.append(
                    {
                        "rollout_id": f"{group.group_id}/{sample}",
                        "group_id": group.group_id,
                        "prompt_id": group.prompt_id,
                        "sample_index": sample,
                        "prompt_ids": [1] * self.scenario.prompt_tokens,
                        "response_ids": [1] * length,
                        "loss_mask": [1] * length,
                        "behavior_logprobs": [0.0] * length,
                        "version_spans": spans,
                        "finish_reason": "stop",
                        "truncated": False,
                        "text": "",
                        "timing": {
                            "started": self.started[group.group_id],
                            "finished": finished,
                            "scored": finished + self.scenario.score_s,
                        },
                    }
                )
        write_parquet(build(rows), file)


SPEEDS = Scenario(
    length_median=60.0,
    length_sigma=0.6,
    prompt_tokens=9,
    prefill_s=0.3,
    decode_s=0.02,
    decode_request_s=0.001,
    update_s=0.4,
    pause_s=0.2,
    score_s=0.15,
    step_s=0.8,
    token_s=5e-4,
    publish_s=0.25,
    ess_decay=0.07,
)


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder), "steps": 50, "checkpoint_every": 0},
        "sampling": {"group_size": 4, "max_new_tokens": 400},
        "algorithm": {"dynamic_sampling": False},
        "lag": {"max_version_lag": 2},
        "learner": {"groups_per_step": 8},
        "generation": {"replicas": 2, "max_concurrent_requests": 64},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse_config(tree)


def make_run(config: Config, scenario: Scenario) -> Path:
    run = virtual_run(config, WritingCrew(config, scenario))
    run_virtual(run.execute())
    (config.run_folder / "config.json").write_text(dump_config(config), encoding="utf-8")
    return config.run_folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(config_of(tmp_path_factory.mktemp("run")), SPEEDS)


def assert_speeds(measured: Measured) -> None:
    found = measured.scenario
    # The learner's line is exact; the engines' rests on which tokens came when, which is not stored.
    assert found.step_s == pytest.approx(0.8, rel=1e-3)
    assert found.token_s == pytest.approx(5e-4, rel=1e-3)
    assert found.publish_s == pytest.approx(0.25, abs=1e-6)
    assert found.score_s == pytest.approx(0.15, abs=1e-6)
    assert found.ess_decay == pytest.approx(0.07, rel=1e-3)
    assert found.prompt_tokens == 9
    assert found.decode_s == pytest.approx(0.02, rel=0.1)
    assert found.decode_request_s == pytest.approx(0.001, rel=0.15)
    assert found.prefill_s == pytest.approx(0.3, rel=0.5)
    assert found.pause_s == pytest.approx(0.2, rel=0.3)


def test_the_speeds_of_a_run_are_found_again(run_folder: Path) -> None:
    measured = measure(run_folder)
    assert_speeds(measured)
    assert (measured.engines, measured.ranks, measured.updates) == (2, 1, 0)
    assert measured.steps == 50 - 3  # the first max_version_lag + 1 fill the pipeline
    assert measured.groups == 47 * 8
    assert len(measured.scenario.lengths) == 47 * 8 * 4


def test_a_run_that_goes_on_is_measured_without_its_last_steps(run_folder: Path, tmp_path: Path) -> None:
    running = tmp_path / "running"
    shutil.copytree(run_folder, running)
    lines = (running / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (running / "metrics.jsonl").write_text("".join(lines[:38]), encoding="utf-8")
    for version in range(39, 51):
        (running / "rollouts" / f"step-{version:06d}.parquet").unlink()
    measured = measure(running)
    assert_speeds(measured)
    assert measured.groups == (38 - 3 - 3) * 8


def test_groups_that_were_dropped_count_as_load(tmp_path: Path) -> None:
    """Half of all groups have equal rewards, p^4 + (1 - p)^4 = 0.5, and only the others are stored."""
    config = config_of(tmp_path, algorithm={"dynamic_sampling": True})
    measured = measure(make_run(config, change(SPEEDS, {"reward_mean": reward_mean(0.5, 4)})))
    assert measured.no_signal_share == pytest.approx(0.5, abs=0.05)
    assert measured.scenario.reward_mean == pytest.approx(reward_mean(0.5, 4), abs=0.02)
    own = plan(config, measured.scenario, 2, steps=45).own
    assert own.step_s == pytest.approx(measured.step_s, rel=0.08)
    assert own.dropped_share == pytest.approx(0.5, abs=0.05)


def test_a_run_with_its_measured_speeds_takes_as_long_as_it_did(run_folder: Path) -> None:
    measured = measure(run_folder)
    config = parse_config(json.loads((run_folder / "config.json").read_text(encoding="utf-8")))
    own = plan(config, measured.scenario, 2, steps=47).own
    assert own.step_s == pytest.approx(measured.step_s, rel=0.05)
    assert own.learner_idle_share == pytest.approx(measured.learner_idle_share, abs=0.05)


def test_what_cannot_be_measured_is_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no config.json; headway plan takes a run folder .* --config"):
        measure(tmp_path / "nothing")
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    shutil.rmtree(copy / "rollouts")
    with pytest.raises(DataError, match=r"holds no batches .* run.save_rollouts=true keeps them"):
        measure(copy)
    shutil.copytree(run_folder / "rollouts", copy / "rollouts")
    lines = (copy / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:7]), encoding="utf-8")
    with pytest.raises(DataError, match="has 7 steps; at least 8 are needed"):
        measure(copy)
    (copy / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    last = max((copy / "rollouts").glob("step-*.parquet"))
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{last.name} cannot be read"):
        measure(copy)


def test_fit_leaves_outliers_out_and_stays_positive() -> None:
    x = np.arange(10.0)
    columns = np.stack([np.ones(10), x], axis=1)
    values = 2 + 3 * x
    values[4] = 500.0
    coefficients, error = fit(columns, values)
    assert coefficients == pytest.approx((2, 3))
    assert error == pytest.approx(0, abs=1e-9)
    # The line that falls would have a negative slope: the best without one is the mean.
    assert fit(columns, 10 - x)[0] == pytest.approx((5.5, 0.0))


def test_reward_mean_gives_the_share_of_groups_without_signal() -> None:
    assert reward_mean(0.68, 2) == pytest.approx(0.2)  # 0.2^2 + 0.8^2 = 0.68
    assert reward_mean(0.5, 2) == pytest.approx(0.5)
    assert reward_mean(0.0, 8) == pytest.approx(0.5)  # as few as there can be


# ---- planning ----------------------------------------------------------------------------------------------


def clockwork(gpus: int, *, step_s: float = 0.0, token_s: float = 0.0, slots: int = 4, lag: int = 4) -> Plan:
    """All responses have 100 tokens of 10 ms: an engine makes a group of 4 in 1 s, `slots` / 4 of them at a time. A
    step takes 8 groups. Twice as many ranks are twice as fast, and nothing else takes time."""
    config = config_of(
        Path(),
        lag={"max_version_lag": lag},
        generation={"max_concurrent_requests": slots, "gpus": 1},
        learner={"groups_per_step": 8, "gpus": 1},
    )
    scenario = Scenario(
        length_median=100.0,
        length_sigma=0.0,
        prefill_s=0.0,
        decode_s=0.01,
        decode_request_s=0.0,
        update_s=0.0,
        pause_s=0.0,
        score_s=0.0,
        publish_s=0.0,
        step_s=step_s,
        token_s=token_s,
    )
    return plan(config, scenario, gpus, efficiency=1.0, steps=24)


@pytest.mark.parametrize("training", [{"step_s": 4.0}, {"token_s": 4.0 / (8 * 4 * 100)}])
def test_the_division_with_the_least_step_time_is_found(training: dict[str, float]) -> None:
    # The step takes the longer of 8 / engines and 4 / ranks: 4.0, 2.0, 2.7, 4.0 and 8.0 s.
    made = clockwork(6, step_s=training.get("step_s", 0.0), token_s=training.get("token_s", 0.0))
    times = {(s.engines, s.ranks): s.step_s for s in made.splits if s.gpus == 6}
    assert times == pytest.approx(
        {(5, 1): 4.0, (4, 2): 2.0, (3, 3): 8 / 3, (2, 4): 4.0, (1, 5): 8.0}, rel=0.03
    )
    best = made.recommended
    assert (best.engines, best.ranks, best.gpus) == (4, 2, 6)
    assert best.tokens_per_s == pytest.approx(8 * 4 * 100 / 2.0, rel=0.03)
    assert best.engine_idle_share == pytest.approx(0.0, abs=0.03)
    five = next(s for s in made.splits if (s.engines, s.ranks) == (5, 1))
    assert five.learner_idle_share == pytest.approx(0.0, abs=0.03)
    assert five.engine_idle_share == pytest.approx(1 - 8 / (5 * 4.0), abs=0.05)


def test_more_gpus_than_help_are_not_recommended() -> None:
    # At lag 0 an engine makes all groups of a step at once, in 1 s, and the learner trains no time at all.
    made = clockwork(8, slots=64, lag=0, step_s=0.0)
    assert (made.recommended.engines, made.recommended.ranks) == (1, 1)
    assert made.recommended.step_s == pytest.approx(1.0, rel=0.01)


def test_the_bottleneck_is_what_relieves_most() -> None:
    made = clockwork(2, step_s=2.0)  # 8 s of generation, 2 s of training
    assert made.bottleneck == "generation"
    assert made.recommended.learner_idle_share == pytest.approx(0.75, abs=0.02)
    assert "the learner waits 75% of the time" in made.advice
    assert "1 more engine would take 4 s (-50%)" in made.advice
    made = clockwork(2, step_s=16.0)  # 8 s of generation, 16 s of training
    assert made.bottleneck == "learner"
    assert "1 more learner rank would take 8 s (-50%)" in made.advice


def test_what_a_higher_lag_bound_buys() -> None:
    # Generation takes 1 s and so does training: one after the other at lag 0, beside each other from 1 on.
    made = clockwork(2, slots=64, lag=0, step_s=1.0)
    times = {split.max_version_lag: split.step_s for split in made.by_lag}
    assert times == pytest.approx({0: 2.0, 1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, rel=0.03)
    assert made.bottleneck == "lag"
    assert "lag.max_version_lag=1 would take 1 s (-50%)" in made.advice
    assert all(split.lag_p95 <= split.max_version_lag for split in made.by_lag)


def test_more_engines_are_never_slower(run_folder: Path) -> None:
    config = parse_config(json.loads((run_folder / "config.json").read_text(encoding="utf-8")))
    made = plan(config, measure(run_folder).scenario, 6, steps=24)
    beside = [split for split in made.splits if split.ranks == made.recommended.ranks]
    assert len(beside) >= 3
    for fewer, more in pairwise(beside):
        assert more.step_s <= fewer.step_s * 1.03, (fewer, more)
    assert made.recommended.step_s <= 1.03 * min(split.step_s for split in made.splits)


def test_a_division_that_makes_no_progress_is_not_chosen() -> None:
    # One rank takes 4 s; with a deadline of 3 s for a step it never ends one.
    config = config_of(Path(), learner={"step_deadline_s": 3.0})
    scenario = change(SPEEDS, {"step_s": 4.0, "token_s": 0.0})
    made = plan(config, scenario, 4, efficiency=1.0, steps=20)
    one = [split for split in made.splits if split.ranks == 1]
    assert one and all(split.step_s == float("inf") for split in one)
    assert made.recommended.ranks == 2


def test_gpus_that_hold_nothing_are_refused() -> None:
    config = config_of(Path(), generation={"gpus": 4}, learner={"gpus": 2})
    with pytest.raises(ConfigError, match=r"--gpus 5 holds no engine .* at least 6 are needed"):
        plan(config, SPEEDS, 5)


def test_learner_slowness() -> None:
    assert learner_slowness(1, 2, 0.9) == pytest.approx(1 / 1.8)
    assert learner_slowness(4, 1, 0.9) == pytest.approx(1.8**2)
    assert learner_slowness(3, 3, 0.9) == 1


# ---- commands ----------------------------------------------------------------------------------------------

app = typer.Typer()
app.command(context_settings={"ignore_unknown_options": True})(plan_command)
app.command(context_settings={"ignore_unknown_options": True})(simulate_command)


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_plan_command(run_folder: Path, tmp_path: Path) -> None:
    result = call("plan", run_folder, "--gpus", 3, "--steps", 20, "--json", "--plot", tmp_path / "plan.svg")
    answer = json.loads(result.stdout)
    assert answer["measured"]["engines"] == 2
    assert answer["recommended"]["gpus"] <= 3
    assert [split["max_version_lag"] for split in answer["by_lag"]] == [0, 1, 2, 4, 8]
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")

    text = call("plan", run_folder, "--gpus", 3, "--steps", 20).stdout
    assert "376 groups" in text and "47 steps" in text  # what the speeds rest on
    assert answer["advice"] in text.replace("\n", " ")
    assert "> " in text and "check: simulated as it was (2 engines, 1 rank)" in text


def test_plan_command_without_a_run(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(dump_config(config_of(tmp_path)), encoding="utf-8")
    speeds = ("scenario.decode_s=0.05", "--scenario.token_s=1e-5", "lag.max_version_lag=1")
    answer = json.loads(call("plan", "--config", file, "--gpus", 2, "--steps", 20, "--json", *speeds).stdout)
    assert answer["measured"] is None
    assert answer["recommended"]["max_version_lag"] == 1
    with pytest.raises(ConfigError, match="either a run folder"):
        call("plan", "--gpus", 2)
    with pytest.raises(ConfigError, match=r"must end with .svg"):
        call("plan", "--config", file, "--plot", "plan.gif")


def test_simulate_command(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(dump_config(config_of(tmp_path)), encoding="utf-8")
    result = call("simulate", file, "--run", run_folder, "--json", "run.steps=12", "generation.replicas=3")
    assert json.loads(result.stdout)["steps"] == 12
    failing = "scenario.failures=[{time_s: 60, event: generation}]"
    text = call("simulate", file, "run.steps=20", failing, "--keep", tmp_path / "kept").stdout
    assert "{'generation': 1}" in text
    assert (tmp_path / "kept" / "run" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=r"--keep .*: Not a directory"):
        call("simulate", file, "run.steps=3", "--keep", file / "kept")


def test_scenario_overrides() -> None:
    changes, speeds = split_overrides(
        ["run.steps=3", "--scenario.step_s=2", "scenario.rates={generation: 6}", "scenario.token_s=1e-5"]
    )
    assert changes == ["run.steps=3"]
    assert speeds == {"step_s": 2, "rates": {"generation": 6}, "token_s": 1e-5}
    scenario = change(Scenario(), {**speeds, "lengths": [5, 7], "scaling": [[60, 3]]})
    assert (scenario.step_s, scenario.lengths, scenario.scaling) == (2.0, (5, 7), ((60.0, 3),))
    with pytest.raises(ConfigError, match=r"unknown scenario.decode; did you mean scenario.decode_s"):
        change(scenario, {"decode": 1})
    with pytest.raises(ConfigError, match=r"scenario.step_s='fast'"):
        change(scenario, {"step_s": "fast"})
    for name, value in (("decode_s", -1.0), ("decode_s", float("nan")), ("rates", {"generation": -6.0})):
        with pytest.raises(ConfigError, match=rf"scenario.{name}.*finite number of at least 0"):
            change(scenario, {name: value})
    with pytest.raises(ConfigError, match="unknown event 'engine'"):
        change(scenario, {"rates": {"engine": 1}})
