"""Stored rollouts scored and trained again."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headway.cluster.replay import batches, group_tables, replay_config, score, summary, train
from headway.core.config import Config, dump_config, parse_config
from headway.core.errors import ConfigError, DataError
from headway.core.rollouts import SCHEMA, build, read_parquet, write_parquet
from headway.learner.stats import StepStats
from headway.learner.trainer import Trainer

STEPS, GROUPS = 3, 2


def settings() -> Config:
    return parse_config(
        {
            "run": {"name": "stored", "steps": STEPS},
            "model": {"path": "tiny-random", "dtype": "float32", "chat_template": False},
            "sampling": {"group_size": 3, "max_new_tokens": 16},
            "learner": {"groups_per_step": GROUPS, "learning_rate": 1e-3},
        }
    )


def group_table(group: int, version: int) -> pa.Table:
    rng = np.random.default_rng([group, version])
    rows: list[dict[str, Any]] = []
    for index in range(3):
        n = int(rng.integers(2, 9))
        rows.append(
            {
                "rollout_id": f"{group}/{index}",
                "group_id": group,
                "prompt_id": f"p{group}",
                "sample_index": index,
                "agent_id": "policy",
                "prompt_ids": [5, 6, 7],
                "response_ids": rng.integers(4, 60, n).tolist(),
                "loss_mask": [1] * n,
                "behavior_logprobs": (-4 - rng.random(n)).tolist(),
                "version_spans": [{"start": 0, "end": n, "version": version}],
                "finish_reason": "stop",
                "truncated": False,
                "text": "",
                "reward": float(index == group % 3),
            }
        )
    return build(rows)


@pytest.fixture
def stored(tmp_path: Path, tiny_random: Path) -> tuple[Path, list[StepStats]]:
    """A run folder as a run leaves it, and what its steps reported."""
    config = settings()
    (tmp_path / "config.json").write_text(dump_config(config))
    trainer = Trainer(config, tiny_random)
    reported = []
    for step in range(STEPS):
        tables = [group_table(GROUPS * step + number, max(0, step - 1)) for number in range(GROUPS)]
        stats, columns = trainer.train(tables, step)
        reported += stats
        table = pa.concat_tables(tables)
        for name in columns.column_names:
            table = table.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), columns.column(name))
        write_parquet(table, tmp_path / "rollouts" / f"step-{step + 1:06d}.parquet")
    return tmp_path, reported


def test_scores_under_the_same_algorithm_are_what_the_run_reported(
    stored: tuple[Path, list[StepStats]],
) -> None:
    folder, reported = stored
    scores = list(score(replay_config(folder, []), batches(folder)))
    assert [s.version for s in scores] == [0, 1, 2]
    for mine, step in zip(scores, reported, strict=True):
        assert mine.reward_mean == pytest.approx(step.reward_mean)
        assert mine.num_tokens == step.num_tokens
        assert mine.ess_fraction == pytest.approx(step.correction_ess_fraction, abs=1e-6)
        assert mine.masked_fraction == pytest.approx(step.masked_fraction, abs=1e-6)
        for name, other in step.counterfactuals.items():
            assert asdict(mine.counterfactuals[name]) == pytest.approx(asdict(other), abs=1e-6)
        assert mine.by_lag == pytest.approx({lag: s.ess_fraction for lag, s in step.by_lag.items()})
    total = summary(scores)
    assert total["tokens"] == sum(step.num_tokens for step in reported)
    assert next(iter(total["counterfactuals"])) == "none"


def test_another_preset_replaces_the_whole_section(stored: tuple[Path, list[StepStats]]) -> None:
    folder, _ = stored
    config = replay_config(folder, ["--algorithm.preset=dr_grpo", "algorithm.clip_high=0.5"])
    assert config.algorithm == parse_config({"algorithm": {"preset": "dr_grpo", "clip_high": 0.5}}).algorithm
    assert config.learner == settings().learner
    (first, *_) = score(config, batches(folder))
    # R - mean of one right answer among three: 2/3, -1/3, -1/3.
    assert first.mean_abs_advantage is not None and 1 / 3 < first.mean_abs_advantage < 2 / 3
    assert not list(folder.glob(".replay*"))


def test_training_again_repeats_the_run(stored: tuple[Path, list[StepStats]]) -> None:
    folder, reported = stored
    records: list[dict[str, Any]] = []
    result = train(replay_config(folder, []), folder, "same", records.append)
    assert [r["loss"] for r in records] == pytest.approx([s.loss for s in reported], abs=1e-6)
    assert [r["grad_norm"] for r in records] == pytest.approx([s.grad_norm for s in reported], abs=1e-6)
    lines = (result / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2, 3]
    assert (result / "learner" / "model" / "model.safetensors").exists()
    other = train(
        replay_config(folder, ["algorithm.preset=rloo", "algorithm.kl=none"]), folder, "rloo", records.append
    )
    assert other == folder / "replays" / "rloo"
    assert records[STEPS]["loss"] != pytest.approx(records[0]["loss"], abs=1e-6)


def test_what_the_rollouts_cannot_serve_is_said(stored: tuple[Path, list[StepStats]]) -> None:
    folder, _ = stored
    with pytest.raises(DataError, match=r"algorithm.preset=ppo: column '\w+' is missing, which algorithm"):
        list(score(replay_config(folder, ["algorithm.preset=ppo"]), batches(folder)))
    with pytest.raises(ConfigError, match="groups_per_step=4, but the rollouts are stored in batches of 2"):
        replay_config(folder, ["learner.groups_per_step=4"])
    with pytest.raises(DataError, match=r"holds no config.json"):
        replay_config(folder / "nowhere", [])
    last = folder / "rollouts" / f"step-{STEPS:06d}.parquet"
    whole = last.read_bytes()
    last.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=rf"{last.name} cannot be read"):
        list(score(settings(), batches(folder)))
    last.write_bytes(whole)
    (folder / "rollouts" / "step-000001.parquet").unlink()
    with pytest.raises(DataError, match=r"first stored batch of .* starts at version 1"):
        train(settings(), folder, "late", lambda record: None)
    assert len(list(score(settings(), batches(folder)))) == STEPS - 1
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"run.save_rollouts=true keeps them"):
        batches(folder)


def test_a_batch_falls_apart_into_its_groups(stored: tuple[Path, list[StepStats]]) -> None:
    folder, _ = stored
    tables = group_tables(read_parquet(folder / "rollouts" / "step-000002.parquet"))
    assert [table.column("group_id").to_pylist() for table in tables] == [[2, 2, 2], [3, 3, 3]]


def test_the_command_scores_trains_and_explains(root: Path, stored: tuple[Path, list[StepStats]]) -> None:
    folder, reported = stored

    def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "headway.cluster.cli", "replay", str(folder), *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    done = replay("--score", "--json", "--algorithm.correction=veto")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["num_tokens"] for line in lines] == [step.num_tokens for step in reported]
    assert all(
        "veto" in line["masked_fraction"] and "tis_token" not in line["masked_fraction"] for line in lines
    )
    done = replay("--score")
    assert "3 steps" in done.stdout and "each correction by itself" in done.stdout
    done = replay("--score", "algorithm.preset=ppo")
    assert done.returncode == 2 and "column 'reference_logprobs' is missing" in done.stderr
    done = replay("algorithm.preset=rloo", "algorithm.kl=none", "--name=mine")
    assert done.returncode == 0, done.stderr
    assert "step     3  loss" in done.stdout and str(folder / "replays" / "mine") in done.stdout
