"""Runs on virtual time whose step times can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cluster.scenario import Failure, Scenario
from headway.cluster.simulate import Result, simulate
from headway.core.config import parse_config

EVEN = Scenario(
    length_median=10,
    length_sigma=0,
    prefill_s=0,
    decode_s=0.1,
    decode_request_s=0.025,
    update_s=0,
    pause_s=0,
    score_s=0,
    step_s=3,
    token_s=0.025,
    publish_s=0,
)
"""Four responses at a time: a token of each in 0.2 s, all 40 tokens in 2 s; a step on them takes 3 + 40 * 0.025 = 4 s."""


def run(folder: Path, scenario: Scenario = EVEN, *, lag: int, steps: int = 40, **overrides: Any) -> Result:
    """Two groups of two responses a step; an engine holds two groups."""
    tree: dict[str, Any] = {
        "run": {"name": f"lag-{lag}", "steps": steps, "checkpoint_every": 0},
        "sampling": {"group_size": 2, "max_new_tokens": 1000},
        "algorithm": {"dynamic_sampling": False},
        "lag": {"max_version_lag": lag},
        "learner": {"groups_per_step": 2},
        "generation": {"replicas": 1, "max_concurrent_requests": 4},
        "metrics": {"heartbeat_s": 10},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        tree[section][name] = value
    return simulate(parse_config(tree), scenario, folder)


def test_a_synchronous_step_is_the_sum_of_its_parts(tmp_path: Path):
    scenario = replace(EVEN, prefill_s=0.5, score_s=0.25, publish_s=1, update_s=2, pause_s=0.5)
    result = run(tmp_path, scenario, lag=0)
    generation_s = 0.5 + 2 + 0.25
    assert result.step_s == pytest.approx(2 + generation_s + 4 + 1)  # update, generation, training, publish
    assert result.learner_idle_share == pytest.approx((2 + generation_s) / result.step_s)
    assert (result.lag_p50, result.lag_max) == (0, 0)
    assert result.rollouts == 40 * 2 * 2


def test_with_lag_the_slower_side_sets_the_pace(tmp_path: Path):
    """Generation of a batch takes 2 s, training it 4 s or, without a fixed part, 1 s."""
    learner_bound = run(tmp_path, lag=2)
    assert learner_bound.step_s == pytest.approx(4)
    assert learner_bound.learner_idle_share == pytest.approx(0)
    assert learner_bound.engine_busy_share == pytest.approx(2 / 4, abs=0.03)
    generation_bound = run(tmp_path, replace(EVEN, step_s=0), lag=2)
    assert generation_bound.step_s == pytest.approx(2)
    assert generation_bound.learner_idle_share == pytest.approx(1 - 1 / 2)
    assert generation_bound.engine_busy_share == pytest.approx(1, abs=0.03)
    assert generation_bound.generation_tokens_per_s == pytest.approx(20, rel=0.03)


def test_more_engines_share_the_work(tmp_path: Path):
    """One group on each of two engines: 0.15 s a token instead of 0.2 s."""
    result = run(
        tmp_path,
        replace(EVEN, step_s=0),
        lag=2,
        generation__replicas=2,
        generation__max_concurrent_requests=2,
    )
    assert result.step_s == pytest.approx(1.5)


@pytest.mark.parametrize("train_s", [1.0, 2.0, 4.0])
def test_generation_and_training_overlap(train_s: float, tmp_path: Path):
    """Generation takes 2 s. With lag a step costs the longer of both, at lag 0 their sum."""
    scenario = replace(EVEN, step_s=train_s, token_s=0)
    for lag in (1, 2, 4):
        assert run(tmp_path, scenario, lag=lag).step_s <= 1.05 * max(2, train_s)
    assert run(tmp_path, scenario, lag=0).step_s == pytest.approx(2 + train_s)


def test_lengths_that_differ_cost_a_synchronous_run_more(tmp_path: Path):
    """It waits for the longest answer of every batch; with lag others fill the time."""
    scenario = replace(EVEN, length_median=50, length_sigma=0.8, step_s=0.1, token_s=0)
    steps = [run(tmp_path, scenario, lag=lag, steps=100).step_s for lag in (0, 1, 4)]
    assert steps[0] > 1.2 * steps[1] > 1.2 * steps[2]


def test_the_same_seed_is_the_same_run(tmp_path: Path):
    scenario = Scenario(seed=5, rates={"generation": 30, "queue": 20, "learner": 10}, length_median=60)
    results = []
    for name in ("a", "b"):
        result = run(tmp_path / name, scenario, lag=2, generation__replicas=3, run__max_restarts=50)
        results.append(replace(result, wall_s=0))
    assert results[0] == results[1]
    assert results[0].restarts["generation"] > 0
    other = run(
        tmp_path / "c", replace(scenario, seed=6), lag=2, generation__replicas=3, run__max_restarts=50
    )
    assert other.weights != results[0].weights


def test_a_lost_learner_costs_the_way_back_to_the_checkpoint(tmp_path: Path):
    quiet = run(tmp_path / "a", lag=2, run__checkpoint_every=10)
    lost = run(
        tmp_path / "b",
        replace(EVEN, failures=(Failure(time_s=100, event="learner"),)),
        lag=2,
        run__checkpoint_every=10,
    )
    assert (quiet.restarts, lost.restarts) == ({}, {"run": 1})
    # Back by at most 10 steps of 4 s, and through the start once more: 2 s and 30 s for the engine.
    assert quiet.run_s + 30 <= lost.run_s <= quiet.run_s + 40 + 40
    assert (lost.steps, lost.rollouts) == (quiet.steps, quiet.rollouts)


def test_long_prompts_show_in_the_audit_when_they_are_dropped(tmp_path: Path):
    scenario = replace(EVEN, straggler_share=0.05, straggler_factor=60, step_s=0.5)
    drop = run(tmp_path, scenario, lag=1, steps=200, lag__policy="drop", generation__replicas=3)
    assert drop.dropped["stale"] > 0
    assert drop.audit["task_distance"] > 0.02
    pace = run(tmp_path / "pace", scenario, lag=1, steps=200, generation__replicas=3)
    assert (pace.dropped, pace.audit["task_distance"]) == ({}, 0)


def test_a_simulated_run_leaves_the_files_of_a_run(tmp_path: Path):
    result = run(tmp_path, lag=1, steps=6, run__checkpoint_every=3)
    folder = tmp_path / "lag-1"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == list(range(1, 7))
    assert steps[-1]["response_tokens"] == [10, 10, 10, 10]
    assert (folder / "checkpoints" / "version-00000006" / "COMPLETE").exists()
    assert (folder / "ledger.jsonl").exists()
    assert result.steps == 6
