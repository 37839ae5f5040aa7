"""The driver while everything around it dies: fifty random histories on virtual time, a driver that is killed at any
point, and answers that take a hundred times as long as the others.

Run as a script this file is the driver that is killed: it forks one child per kill and one per resumption.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.cluster.crew import Trained
from headway.cluster.ledger import trained_groups
from headway.cluster.run import Run
from headway.cluster.scenario import EVENTS, Failure, Scenario
from headway.cluster.session import Session
from headway.cluster.simulate import virtual_run
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, parse_config
from headway.learner import checkpoint, stats

# ---- everything dies ---------------------------------------------------------------------------------------

STEPS, GROUPS_PER_STEP, GROUP_SIZE = 200, 8, 4
POLICIES = ("pace", "drop", "withhold", "downweight")
RATES = {
    "generation": 20,
    "verifiers": 20,
    "queue": 10,
    "metrics": 10,
    "control": 10,
    "learner": 8,
    "node": 6,
    "stall": 6,
    "bad_update": 6,
    "store_full": 20,
}
"""Per actor and hour; a run takes about a quarter of an hour."""


class Watched(VirtualCrew):
    """Looks into the driver's books at every step."""

    run: Run

    @property
    def session(self) -> Session:
        assert self.run.session is not None
        return self.run.session

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        session = self.session
        ledger, groups = session.groups.ledger, session.groups
        assert ledger.issued == ledger.trained + ledger.dropped.total() + len(ledger.live)
        waiting = sum(state == "finished" for state in ledger.live.values())
        assert groups.room.queued_groups == waiting >= len(group_ids)
        assert session.waits.deadline_used() <= 1, session.waits.table(version)
        return await super().train(version, group_ids)


def chaos(seed: int, folder: Path) -> tuple[Config, Scenario]:
    chance = random.Random(seed)
    config = parse_config(
        {
            "run": {
                "name": "chaos",
                "folder": str(folder),
                "steps": STEPS,
                "checkpoint_every": 20,
                "save_rollouts": False,
                "no_progress_deadline_s": 600,
                "max_restarts": 100,
            },
            "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 400},
            "algorithm": {"dynamic_sampling": False},
            "lag": {"max_version_lag": chance.randint(1, 3), "policy": POLICIES[seed % 4]},
            "learner": {"groups_per_step": GROUPS_PER_STEP},
            "generation": {
                "replicas": 4,
                "max_concurrent_requests": 16,
                "answer_deadline_s": 20,
                "update_deadline_s": 20,
                "start_deadline_s": 60,
                "drain_s": 5,
            },
            "verifiers": {"replicas": 2},
            "metrics": {"heartbeat_s": 5},
        }
    )
    scenario = Scenario(
        seed=seed,
        length_median=60,
        engine_start_s=10,
        engine_spread=0.2,
        engines_per_node=2,
        rates=RATES,
        scaling=tuple((time_s, chance.randint(1, 8)) for time_s in (100, 250, 450)),
    )
    return config, scenario


@pytest.mark.parametrize("seed", range(50))
def test_a_run_survives_the_death_of_every_actor(seed: int, tmp_path: Path):
    config, scenario = chaos(seed, tmp_path)
    crew = Watched(config, scenario)
    crew.run = virtual_run(config, crew)
    run_virtual(crew.run.execute())

    session, num_groups = crew.session, STEPS * GROUPS_PER_STEP
    ledger, audit, bound = session.groups.ledger, session.groups.audit, config.lag.max_version_lag
    assert session.version == crew.version == STEPS
    assert (ledger.trained, len(ledger.live)) == (num_groups, 0)
    trained = trained_groups(config.run_folder / "ledger.jsonl")
    assert trained == crew.trained
    assert Counter(trained.values()) == dict.fromkeys(range(1, STEPS + 1), GROUPS_PER_STEP)
    steps = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    assert session.totals.value("headway_actor_restarts_total", "generation") >= 5
    assert sorted(trained) == sorted(set(range(ledger.issued)) - dropped_groups(config))
    lengths = [scenario.draw_lengths(group_id, "", GROUP_SIZE, 400) for group_id in trained]
    drawn = Counter(length for group in lengths for length in group)
    assert Counter(length for step in steps for length in step["response_tokens"]) == drawn
    if config.lag.policy == "pace":
        assert not ledger.dropped
        assert audit.length_ks() == audit.reward_ks() == audit.task_distance() == 0
    else:
        assert ledger.dropped.keys() <= {"stale"}
    if config.lag.policy in ("pace", "drop"):
        assert max(crew.lags) <= bound


def dropped_groups(config: Config) -> set[int]:
    """From the journal, what a resumption voided left out."""
    dropped: set[int] = set()
    for line in (config.run_folder / "ledger.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "dropped":
            dropped.add(record["group"])
        elif record["event"] == "resumed":
            live = {int(group_id) for group_id in record["state"]["live"]}
            dropped = {g for g in dropped if g < record["state"]["issued"] and g not in live}
    return dropped


@pytest.mark.parametrize("event", EVENTS)
def test_no_moment_is_a_bad_one_to_die(event: str, tmp_path: Path):
    """The learner is busy all the time, with a step every 1.5 s. Each of these deaths comes at another moment of
    a step, the last ones just before the run ends."""
    config = parse_config(
        {
            "run": {
                "name": "moment",
                "folder": str(tmp_path),
                "steps": 12,
                "checkpoint_every": 5,
                "save_rollouts": False,
            },
            "sampling": {"group_size": 2, "max_new_tokens": 400},
            "algorithm": {
                "preset": "ppo" if event == "critic" else "async_grpo",
                "dynamic_sampling": False,
                "kl": "reward",
            },
            "lag": {"max_version_lag": 2},
            "learner": {"groups_per_step": 4},
            "generation": {
                "replicas": 2,
                "max_concurrent_requests": 8,
                "answer_deadline_s": 5,
                "update_deadline_s": 5,
            },
        }
    )
    for moment in range(14):
        failure = Failure(time_s=43 + 0.77 * moment, event=event)
        scenario = Scenario(seed=moment, length_median=20, store_full_s=5, failures=(failure,))
        crew = Watched(config, scenario)
        shutil.rmtree(config.run_folder, ignore_errors=True)
        crew.run = virtual_run(config, crew)
        run_virtual(crew.run.execute())
        assert sorted(crew.trained) == list(range(48)), failure


# ---- stragglers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """What became of a run in which one prompt in a hundred has answers a hundred times as long."""

    dispatched_share: float
    trained_share: float
    steps_per_s: float
    dropped: dict[str, int]
    length_ks: float
    task_distance: float


def with_stragglers(policy: str, folder: Path) -> Stragglers:
    config = parse_config(
        {
            "run": {"name": policy, "folder": str(folder), "steps": 400, "save_rollouts": False},
            "sampling": {"group_size": 4, "max_new_tokens": 4000},
            "algorithm": {"dynamic_sampling": False},
            "lag": {"max_version_lag": 2, "policy": policy},
            "learner": {"groups_per_step": 8},
            "generation": {"replicas": 4, "max_concurrent_requests": 32},
            "metrics": {"heartbeat_s": 10},
        }
    )
    scenario = Scenario(length_median=20, length_sigma=0.3, straggler_share=0.01, straggler_factor=100)
    crew = VirtualCrew(config, scenario)
    run = virtual_run(config, crew)

    async def timed() -> float:
        await run.execute()
        return asyncio.get_running_loop().time()

    run_s = run_virtual(timed())
    assert run.session is not None
    groups = run.session.groups
    tasks, trained = groups.audit.dispatched_tasks, groups.audit.trained_tasks
    return Stragglers(
        dispatched_share=tasks["long"] / tasks.total(),
        trained_share=trained["long"] / trained.total(),
        steps_per_s=400 / run_s,
        dropped=dict(groups.ledger.dropped),
        length_ks=groups.audit.length_ks(),
        task_distance=groups.audit.task_distance(),
    )


def test_pacing_trains_long_answers_as_often_as_they_are_asked_for_and_dropping_starves_them(tmp_path: Path):
    pace, drop = with_stragglers("pace", tmp_path), with_stragglers("drop", tmp_path)
    print(f"\n  pace {pace}\n  drop {drop}")
    assert 0.005 < pace.dispatched_share == pace.trained_share < 0.02
    assert (pace.dropped, pace.length_ks, pace.task_distance) == ({}, 0, 0)
    assert drop.dropped["stale"] >= 15
    assert drop.trained_share < 0.1 * drop.dispatched_share
    assert drop.task_distance > 0.8 * drop.dispatched_share  # the audit shows it
    assert drop.steps_per_s > 2 * pace.steps_per_s  # what it buys


# ---- kill -9 of the driver ---------------------------------------------------------------------------------

KILLS = 20
CALLS = (
    "start_learner",
    "start_engine",
    "update_engine",
    "sample",
    "sampled",
    "put",
    "train",
    "publish",
    "save",
    "save_queue",
    "load",
    "restore_queue",
    "release",
    "show_metrics",
)
FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Mortal(VirtualCrew):
    """Counts the calls that the driver makes, and the files that it opens, renames and removes in its run folder; at
    the given one the process kills itself, before it is made."""

    def __init__(
        self, config: Config, scenario: Scenario, *, dies_at_call: int = -1, dies_at_file: int = -1
    ) -> None:
        self.calls = self.files = 0
        self.dies_at_call, self.dies_at_file = dies_at_call, dies_at_file
        super().__init__(config, scenario)
        sys.addaudithook(self.on_event)

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            if self.calls == self.dies_at_call:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
        return super().__getattribute__(name)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILES and str(self.config.run_folder) in str(arguments[0]):
            if self.files == self.dies_at_file:
                os.kill(os.getpid(), signal.SIGKILL)
            self.files += 1


def mortal_config(folder: Path, *, lag: int) -> Config:
    return parse_config(
        {
            "run": {
                "name": "mortal",
                "folder": str(folder),
                "steps": 24,
                "checkpoint_every": 3,
                "save_rollouts": False,
            },
            "sampling": {"group_size": 2, "max_new_tokens": 400},
            "algorithm": {"dynamic_sampling": False},
            "lag": {"max_version_lag": lag},
            "learner": {"groups_per_step": 4},
            "generation": {"replicas": 1 if lag == 0 else 3, "max_concurrent_requests": 8},
        }
    )


def drive(folder: Path, lag: int, **death: int) -> Mortal:
    """Runs from the newest checkpoint, if there is one, to the end or to death."""
    config = mortal_config(folder, lag=lag)
    crew = Mortal(config, Scenario(seed=1, length_median=60), **death)
    newest = checkpoint.newest_complete(config.run_folder / "checkpoints")
    run_virtual(virtual_run(config, crew, resume_from=newest).execute())
    return crew


def in_child(folder: Path, lag: int, **death: int) -> int:
    """How a process ended that drives the run: 0, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        crew = drive(folder, lag, **death)
        report = {"weights": crew.weights, "calls": crew.calls, "files": crew.files}
        (folder / "report.json").write_text(json.dumps(report))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_and_resume(folder: Path, lag: int) -> None:
    """Prints, as JSON lines, how an undisturbed run ended and then the runs that were killed at points spread over
    all calls and files of it, and resumed."""

    def report(name: str) -> dict[str, Any]:
        steps = (folder / name / "mortal" / "metrics.jsonl").read_text().splitlines()
        return {
            "trained": sorted(trained_groups(folder / name / "mortal" / "ledger.jsonl").items()),
            "steps": [json.loads(step)["version"] for step in steps],
            **json.loads((folder / name / "report.json").read_text()),
        }

    (folder / "whole").mkdir()
    assert in_child(folder / "whole", lag) == 0
    whole = report("whole")
    print(json.dumps(whole))
    for kill in range(KILLS):
        name, (what, total) = f"kill-{kill}", (("call", whole["calls"]), ("file", whole["files"]))[kill % 2]
        (folder / name).mkdir()
        ended = in_child(folder / name, lag, **{f"dies_at_{what}": int(total * (kill + 0.5) / KILLS)})
        resumed = in_child(folder / name, lag)
        print(json.dumps({"killed": ended, "resumed": resumed, **report(name)}), flush=True)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_killed_driver_goes_on_as_if_nothing_had_happened(lag: int, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(lag)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole, *killed = map(json.loads, done.stdout.splitlines())
    assert len(killed) == KILLS
    for run in killed:
        assert (run["killed"], run["resumed"]) == (-signal.SIGKILL, 0)
        assert [group_id for group_id, _ in run["trained"]] == list(range(24 * 4))
        assert run["steps"] == list(range(1, 25))
        if lag == 0:
            assert run["trained"] == whole["trained"]
            assert run["weights"] == whole["weights"]


if __name__ == "__main__":
    assert stats  # heavy to import: once here, and not in every child
    kill_and_resume(Path(sys.argv[1]), int(sys.argv[2]))
