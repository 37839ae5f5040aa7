"""The stages of RLHF for real: a reward model from pairs, then PPO with every role on a GPU node of its own (emulated: nodes
that say they have a GPU), and scorers that die on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from headway.cluster.ledger import trained_groups
from headway.core import rollouts

pytestmark = pytest.mark.timeout(1200)

ROLES = ("learner", "generation", "reward_model", "reference", "critic")


def headway(root: Path, *arguments: str | Path, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "headway.cluster.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, "-P", "configs/rlhf/data.py", str(folder)], cwd=root, check=True)
    return folder


@pytest.fixture(scope="module")
def reward_run(root: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, tiny_adder: Path) -> Path:
    """A finished run of stage `reward_model`: gone on with after its end, and its learner killed on the way."""
    folder = tmp_path_factory.mktemp("runs")
    command = [
        *("train", "configs/rlhf/reward_model.yaml", "model.path=tiny-adder", f"data.source={data / 'pairs.jsonl'}"),
        *(f"run.folder={os.path.relpath(folder, root)}", "run.name=rm", "offline.evaluate_every=15", "metrics.port=0", "learner.threads=1"),
    ]  # fmt: skip
    first = headway(root, *command, "run.steps=15")
    assert first.returncode == 0, first.stdout + first.stderr
    log = folder / "output.log"
    resumed = [*command, "run.steps=45", "run.checkpoint_every=10", "--resume"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headway.cluster.cli", *resumed],
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 120
        while len(lines_of(folder / "rm")) < 25:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        kill(folder / "rm" / "logs" / "learner-0.log")
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
    assert "resumed at version 15" in log.read_text()
    assert "going on from version-00000020 (restart 1 of 3)" in log.read_text()
    before, after = re.findall(r"metrics at http://localhost:(\d+)/", log.read_text())
    assert before == after
    assert "Accuracy, share of pairs" in (folder / "rm" / "report.html").read_text()
    return folder / "rm"


def test_a_reward_model_is_right_on_prompts_that_it_never_saw(reward_run: Path) -> None:
    steps = lines_of(reward_run)
    assert [step["version"] for step in steps] == list(range(1, 46))
    accuracies = [step["held_out"]["accuracy"] for step in steps if "held_out" in step]
    assert len(accuracies) == 3 and accuracies[-1] >= 0.9, accuracies
    about = json.loads((reward_run / "model" / "reward_model.json").read_text())
    assert about["kind"] == "outcome" and about["filler_share"] <= 0.1
    assert about["calibration"]["std"] > 0.5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node for the driver, and one with a GPU and a label for each role."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": 1 << 30, "include_dashboard": False},
    )
    for role in ROLES:
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=300 << 20, labels={"role": role})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=50)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def placements(run: str) -> dict[str, str]:
    """Label of the node that each placement group of the run lies on."""
    labels = {node["NodeID"]: node["Labels"].get("role", "head") for node in ray.nodes()}
    return {
        row["name"].removeprefix(f"{run}-"): labels[node]
        for row in placement_group_table().values()
        if row["state"] == "CREATED" and row["name"].startswith(f"{run}-")
        for node in row["bundles_to_node_id"].values()
    }


def test_five_roles_on_gpus_of_their_own_and_scorers_that_die(
    root: Path, data: Path, reward_run: Path, cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "ppo"
    command = [
        *(sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/rlhf/ppo.yaml"),
        *("model.path=tiny-adder", f"data.source={data / 'prompts.jsonl'}", f"cluster.address={cluster.address}"),
        *(f"reward_model.path={reward_run / 'model'}", f"critic.path={reward_run / 'model'}", "critic.warmup_steps=2"),
        *(f"run.folder={tmp_path}", "run.name=ppo", "run.steps=100000", "metrics.port=0", "critic.targets=vtrace"),
        *("learner.groups_per_step=4", "run.checkpoint_every=0", "algorithm.kl_target=0.02"),
        *(f"{role}.gpus=1" for role in ROLES),
        *(f"{role}.labels={{role: {role}}}" for role in ROLES),
    ]  # fmt: skip
    log = tmp_path / "output.log"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=root, stdout=output, stderr=subprocess.STDOUT, env=environment
        )

    def wait_for(condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, f"waited for {what}\n{log.read_text()}"
            time.sleep(0.2)

    try:
        wait_for(lambda: len(lines_of(folder)) >= 3, "step 3")
        assert placements("ppo") == {
            "learner": "learner",
            "generation-0": "generation",
            "reward_model-0": "reward_model",
            "reference-0": "reference",
            "critic-0": "critic",
            "verifiers-0": placements("ppo")["verifiers-0"],
        }
        for role in ("reward_model", "reference"):
            kill(folder / "logs" / f"{role}-0.log")
            wait_for(lambda role=role: f"{role} 0 is replaced" in log.read_text(), f"{role} to be replaced")
            goal = len(lines_of(folder)) + 2
            wait_for(lambda goal=goal: len(lines_of(folder)) >= goal, "two more steps")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, log.read_text()
    finally:
        process.kill()
    steps = lines_of(folder)
    assert steps[-1]["dropped"] == {}
    assert sorted(trained_groups(folder / "ledger.jsonl")) == list(range(4 * len(steps)))
    # While only the critic learns, the policy does not move; then it does.
    assert [step["learning_rate"] for step in steps[:3]] == [0.0, 0.0, 2e-4]
    assert all(step["value_loss"] > 0 for step in steps)
    assert all(set(step["reward_parts"]) == {"score", "right"} for step in steps)
    table = rollouts.read_parquet(sorted((folder / "rollouts").iterdir())[-1])
    for row in table.to_pylist():
        parts = {part["name"]: part["value"] for part in row["reward_parts"]}
        assert row["reward"] == pytest.approx(parts["score"], abs=1e-6) and parts["right"] in (0, 1)
        assert len(row["values"]) == len(row["reference_logprobs"]) == len(row["response_ids"])
        assert row["extra"] is None
    end = time.monotonic() + 20
    while placements("ppo") and time.monotonic() < end:
        time.sleep(0.2)
    assert placements("ppo") == {}


def kill(log: Path) -> None:
    """The actor that writes to this log."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(log):
                found.append(int(entry.name))
        except OSError:
            continue
    assert found, f"nobody writes to {log}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
