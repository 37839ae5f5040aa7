"""Curves of runs, read back by TensorBoard's own reader: the numbers of `metrics.jsonl`, each step once, also after the run was
gone on with."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headway.cluster.exporter import Exporter
from headway.cluster.offline import OfflineRun
from headway.cluster.preflight import check_outputs
from headway.cluster.scenario import Failure, Scenario
from headway.cluster.simulate import Silent, virtual_run
from headway.cluster.tracker import opened, scalars
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, parse_config
from headway.core.errors import ConfigError
from headway.core.metrics import Recorder
from headway.learner import checkpoint
from headway.learner.offline import OfflineStats
from headway.learner.preference import PreferenceStats


def configuration(folder: Path, steps: int, **metrics: Any) -> Config:
    return parse_config(
        {
            "run": {
                "name": "curves",
                "folder": str(folder),
                "steps": steps,
                "checkpoint_every": 4,
                "save_rollouts": False,
            },
            "sampling": {"group_size": 4, "max_new_tokens": 400},
            "algorithm": {"dynamic_sampling": False},
            "learner": {"groups_per_step": 4},
            "metrics": {"tracker": "tensorboard", **metrics},
        }
    )


def execute(config: Config, scenario: Scenario = Scenario(length_median=60), **how: Any) -> VirtualCrew:  # noqa: B008
    crew = VirtualCrew(config, scenario)
    run_virtual(virtual_run(config, crew, **how).execute())
    return crew


def curves_of(config: Config) -> dict[str, list[tuple[int, float]]]:
    """As a person sees them."""
    reader = EventAccumulator(str(config.run_folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def lines_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]


def expected(config: Config) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines_of(config):
        for tag, value in scalars(line).items():
            found.setdefault(tag, []).append((line["version"], float(np.float32(value))))
    return found


def test_the_numbers_of_a_line() -> None:
    line = {
        "version": 7,
        "loss": 0.5,
        "kl_coef": None,
        "stopped_by_kl": True,
        "seconds": {"total": 2, "by": {"0": 1.5}},
        "lag": [0, 1, 2, 1],
        "engine_versions": [6, None],
        "nothing": [],
        "words": "none",
    }
    assert scalars(line) == {
        "loss": 0.5,
        "stopped_by_kl": 1.0,
        "seconds/total": 2.0,
        "seconds/by/0": 1.5,
        "lag/mean": 1.0,
        "lag/max": 2.0,
        "engine_versions/mean": 6.0,
        "engine_versions/max": 6.0,
    }


def test_curves_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    config = configuration(tmp_path, 5)
    execute(config)
    curves = curves_of(config)
    assert curves == expected(config)
    rewards = [line["reward_mean"] for line in lines_of(config)]
    assert curves["reward_mean"] == [
        (version, pytest.approx(rewards[version - 1])) for version in range(1, 6)
    ]
    assert {"lag/max", "response_tokens/mean", "seconds/total", "importance_ess_fraction"} <= curves.keys()


def test_a_resumed_run_goes_on_with_the_same_curves(tmp_path: Path) -> None:
    """To 6 steps, then to 10."""
    execute(configuration(tmp_path, 6))
    config = configuration(tmp_path, 10)
    checkpoints = config.run_folder / "checkpoints"
    first = curves_of(config)["time_s"]
    assert [step for step, _ in first] == [1, 2, 3, 4, 5, 6]
    assert checkpoint.newest_complete(checkpoints) == checkpoints / "version-00000006"
    execute(config, resume_from=checkpoints / "version-00000006")
    assert curves_of(config) == expected(config)
    assert [step for step, _ in curves_of(config)["time_s"]] == list(range(1, 11))
    assert len(list((config.run_folder / "tensorboard").iterdir())) == 2


def test_steps_that_are_taken_again_are_not_doubled(tmp_path: Path) -> None:
    """The learner dies on the way: the same process goes on from the newest checkpoint."""
    config = configuration(tmp_path, 12)
    crew = execute(
        config,
        Scenario(length_median=60, failures=(Failure(time_s=55, event="learner"),)),
        progress=Silent(config),
    )
    assert len(crew.training_s) > 12
    curves = curves_of(config)
    assert curves == expected(config)
    assert [step for step, _ in curves["time_s"]] == list(range(1, 13))


def test_offline_stages_have_curves_too(tmp_path: Path) -> None:
    config = configuration(tmp_path, 2)
    config = config.model_copy(update={"stage": "preference"})
    config.run_folder.mkdir(parents=True)
    run = OfflineRun(config=config, model_folder="", console=Console(quiet=True))
    run.recorder, run.totals = Recorder(), Exporter()

    def stats(version: int, loss: float) -> OfflineStats:
        return OfflineStats(
            version=version,
            loss=loss,
            num_rows=4,
            num_tokens=40,
            grad_norm=1.5,
            learning_rate=1e-3,
            preference=PreferenceStats(
                margin=loss / 2, accuracy=0.75, chosen_reward=loss, rejected_reward=loss / 2
            ),
        )

    with opened(config, "curves", run.say) as run.tracker:
        run._record(stats(1, 0.5), None, 0.25)
        run._record(stats(2, 0.25), stats(2, 0.125), 0.5)
    curves = curves_of(config)
    assert curves == expected(config)
    assert curves["train/loss"] == [(1, 0.5), (2, 0.25)] and curves["held_out/margin"] == [(2, 0.0625)]
    assert curves["seconds"] == [(1, 0.25), (2, 0.5)]


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    config = configuration(tmp_path, 5)
    with opened(config, "curves", said.append) as tracker:
        assert tracker is not None
        tracker.step({"version": 1, "loss": 0.5})
        curves: Any = tracker._curves
        curves._writer.close()
        for version in (2, 3):
            tracker.step({"version": version, "loss": 0.5})
    assert said == ["metrics.tracker is given up: OSError: Writer is closed"]
    assert curves_of(config) == {"loss": [(1, 0.5)]}


def test_without_a_tracker_nothing_is_written(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1, tracker="none")
    execute(config)
    assert not (config.run_folder / "tensorboard").exists()


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_the_run(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, 1, tracker=package)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"^metrics.tracker={package} needs .*: pip install {package}$"):
        check_outputs(config)


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases leaves folders of its own name behind."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_outputs(configuration(tmp_path, 1, tracker="wandb"))


def test_event_files_that_cannot_be_written_are_told_before_the_run(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1)
    config.run_folder.mkdir()
    (config.run_folder / "tensorboard").touch()
    with pytest.raises(ConfigError, match=r"metrics\.tracker=tensorboard cannot write"):
        execute(config)
