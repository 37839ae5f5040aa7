"""What a run says of itself while it runs and afterwards, and how it is ended from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from headway.cluster.cli import main
from headway.cluster.joining import connect, disconnect
from headway.cluster.run import Run
from headway.cluster.scenario import Scenario
from headway.cluster.simulate import virtual_run
from headway.cluster.status import of_folder, summary
from headway.cluster.status_cli import render
from headway.cluster.stop import holdings
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, parse_config
from headway.core.errors import UserError

# ---- on virtual time ---------------------------------------------------------------------------------------

SCENARIO = Scenario(
    length_median=50,
    length_sigma=0,
    start_s=2,
    engine_start_s=10,
    step_s=4,
    publish_s=1,
    reward_mean=0.5,
)


class Asked(VirtualCrew):
    """Its run is asked at these times (seconds after its actors are there)."""

    def __init__(self, config: Config, requests: Sequence[tuple[float, str, Any]]) -> None:
        super().__init__(config, SCENARIO)
        self._open_requests = list(requests)

    async def next_request(self) -> tuple[int, str, Any]:
        assert self._opened is not None
        at = self._open_requests[0][0] if self._open_requests else 1e9
        await self._one("control").work(max(0.0, self._opened + at - asyncio.get_running_loop().time()))
        _, kind, value = self._open_requests.pop(0)
        return len(self._open_requests), kind, value

    @property
    def said(self) -> list[Any]:
        return [value for _, value in self.answers]


def configuration(folder: Path, **more: dict[str, Any]) -> Config:
    tree = {
        "run": {
            "name": "r",
            "folder": str(folder),
            "steps": 20,
            "checkpoint_every": 8,
            "save_rollouts": False,
        },
        "sampling": {"group_size": 4, "max_new_tokens": 100},
        "learner": {"groups_per_step": 4},
        "lag": {"max_version_lag": 3},
        "generation": {"replicas": 2, "max_concurrent_requests": 8},
        "verifiers": {"replicas": 3},
        "queue": {"max_groups": 64, "max_mib": 64},
    }
    return parse_config(tree | more)


def execute(config: Config, *requests: tuple[float, str, Any]) -> tuple[Run, Asked, bool]:
    """The run, its crew, and whether it was cancelled."""
    crew = Asked(config, requests)
    run = virtual_run(config, crew)

    async def until_cancelled() -> bool:
        try:
            await asyncio.ensure_future(run.execute())
        except asyncio.CancelledError:
            return True
        return False

    return run, crew, run_virtual(until_cancelled())


def test_a_run_says_what_it_does_while_it_starts_and_while_it_trains(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    _, crew, _ = execute(config, (1, "status", None), (60, "status", None))
    starting, running = crew.said
    assert json.loads(json.dumps(crew.said)) == crew.said

    assert (starting["state"], starting["version"], starting["uptime_s"]) == ("starting", 0, 3.0)
    assert ("driver", "the learner to start") in {(wait["who"], wait["what"]) for wait in starting["waits"]}
    (engines,) = [wait for wait in starting["waits"] if wait["what"] == "its processes to start"]
    assert (engines["who"], engines["alike"], engines["waited_s"]) == ("engine 0", 2, 1.0)

    assert (running["state"], running["steps"], running["checkpoint"]) == ("running", 20, 8)
    assert 8 < running["version"] < 20
    # A step takes 4 s and the tokens of 16 responses, its publication 1 s; generation keeps up with that.
    assert running["step"]["seconds"] == pytest.approx(5, abs=0.6)
    assert sum(running["step"]["shares"].values()) == pytest.approx(1, abs=0.001)
    assert running["step"]["shares"]["forward_backward"] == pytest.approx(0.8, abs=0.1)
    assert running["left_s"] == pytest.approx(running["step"]["seconds"] * (20 - running["version"]), abs=0.1)
    lag = running["lag"]
    assert (lag["bound"], lag["effective"], lag["policy"]) == (3, 3, "pace")
    assert 0 < lag["mean"] <= lag["max"] <= 3
    groups = running["groups"]
    in_learner = 4  # from when it takes a batch up to the end of its step
    ended = groups["trained"] + sum(groups["dropped"].values())
    assert groups["issued"] - ended - groups["running"] - groups["queued"] in (0, in_learner)
    assert groups["trained"] == 4 * running["version"]
    assert (groups["queue_groups"], groups["queue_bytes"]) == (64, 64 << 20)
    assert running["roles"] == {
        role: {"live": number, "target": number, "gpus": 0, "restarts": 0}
        for role, number in
        {"learner": 1, "generation": 2, "verifiers": 3, "queue": 1, "metrics": 1, "control": 1}.items()
    }  # fmt: skip
    assert [engine["replica"] for engine in running["engines"]] == [0, 1]
    assert all(
        running["version"] - 1 <= engine["version"] <= running["version"] for engine in running["engines"]
    )
    assert all(engine["groups"] <= engine["limit"] == 2 for engine in running["engines"])
    assert len(running["reward"]["recent"]) == running["version"]


def test_a_run_says_how_many_gpus_its_engines_have_and_are_to_have(tmp_path: Path) -> None:
    _, crew, _ = execute(
        configuration(tmp_path),
        (60, "scale", ("generation", 3, 0.5)),
        (61, "status", None),
        (108, "status", None),
    )
    scaled, changing, changed = crew.said
    assert (scaled["before"], scaled["target"], scaled["gpus"]) == (2, 3, 0.5)
    assert changing["roles"]["generation"]["gpus"] == changed["roles"]["generation"]["gpus"] == 0.5
    assert [engine["gpus"] for engine in changing["engines"]] == [0, 0, 0.5]
    assert [engine["gpus"] for engine in changed["engines"]] == [0.5] * 3
    assert changed["roles"]["generation"]["live"] == 3


def test_a_stopped_run_ends_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run, crew, was_cancelled = execute(config, (40, "stop", False))
    (answer,) = crew.said
    assert answer["state"] == "running" and not was_cancelled and run.stopping
    assert run.version in (answer["version"], answer["version"] + 1) and run.version < 20
    found = of_folder(config.run_folder, was_killed=False)
    # Virtual runs write no configuration.
    assert found is None
    config.run_folder.joinpath("config.json").write_text(config.model_dump_json())
    found = of_folder(config.run_folder, was_killed=False)
    assert found is not None
    assert (found["state"], found["version"], found["checkpoint"]) == ("stopped", run.version, run.version)


def test_a_run_that_is_ended_at_once_writes_nothing_more(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run, crew, was_cancelled = execute(config, (70, "stop", True))
    (answer,) = crew.said
    assert was_cancelled and run.version == answer["version"] > 8
    assert not any(actor.alive for actor in crew._all_actors())
    config.run_folder.joinpath("config.json").write_text(config.model_dump_json())
    found = of_folder(config.run_folder, was_killed=False)
    assert found is not None
    assert (found["state"], found["version"], found["checkpoint"]) == ("interrupted", run.version, 8)


def test_a_run_that_starts_can_be_ended_but_not_scaled(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run, crew, was_cancelled = execute(
        config, (1, "scale", ("generation", 3)), (2, "what", None), (3, "stop", True)
    )
    scaled, unknown, stopped = crew.said
    assert isinstance(scaled, UserError) and "still starting" in str(scaled)
    assert isinstance(unknown, UserError) and str(unknown) == "unknown request 'what'"
    assert stopped["state"] == "starting" and was_cancelled and run.version == 0


# ---- numbers and words -------------------------------------------------------------------------------------


def record(version: int, reward: float | None, lag: list[int], total: float, waited: float) -> dict[str, Any]:
    return {
        "version": version,
        "reward_mean": reward,
        "sampled_reward_mean": 0.125,
        "lag": lag,
        "seconds": {"total": total, "optimizer": total - waited},
        "waited_s": waited,
        "dropped": {"stale": 2},
    }


RECORDS = [record(1, 0.0, [0, 1], 2, 1), record(2, None, [3], 2, 0), record(3, 0.5, [0], 4, 1)]


def test_means_and_trends_by_hand() -> None:
    found = summary(RECORDS, selects=False)
    assert found["reward"] == {"last": 0.5, "mean": 0.25, "change": 0.5, "recent": [0.0, 0.5]}
    assert found["step"] == {"seconds": 8 / 3, "shares": {"waited": 0.25, "optimizer": 0.75}}
    assert found["lag"] == {"mean": 1.0, "max": 3}
    assert summary(RECORDS, selects=True)["reward"]["recent"] == [0.125] * 3
    nothing = summary([], selects=False)
    assert nothing["reward"]["last"] is None and nothing["step"] == {"seconds": None, "shares": {}}


def folder_of(tmp_path: Path, steps: int, *, records: Sequence[dict[str, Any]] = RECORDS) -> Path:
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    config = parse_config({"run": {"name": "old", "steps": steps}})
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records) + '{"half')
    return folder


@pytest.mark.parametrize(
    ("steps", "was_killed", "state"),
    [(3, False, "finished"), (9, False, "interrupted"), (9, True, "interrupted")],
)
def test_what_a_folder_says_of_its_run(tmp_path: Path, steps: int, was_killed: bool, state: str) -> None:
    found = of_folder(folder_of(tmp_path, steps), was_killed=was_killed)
    assert found is not None
    assert (found["run"], found["state"], found["version"], found["checkpoint"]) == ("old", state, 3, None)
    assert found["groups"]["dropped"] == {"stale": 2}
    assert of_folder(tmp_path, was_killed=False) is None


def test_a_line_that_is_no_record_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 9)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\nnull\n[3]\n")
    found = of_folder(folder, was_killed=False)
    assert found is not None and found["version"] == 3


def shown(account: dict[str, Any]) -> str:
    console = Console(width=110, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(account), highlight=False)
    return console.export_text()


def test_an_account_on_the_terminal(tmp_path: Path) -> None:
    _, crew, _ = execute(configuration(tmp_path), (1, "status", None), (60, "status", None))
    starting, running = crew.said
    running["version"], running["engines"][0]["version"] = 12, 10
    running["engines"][1] |= {"version": None, "kv_cache": 0.25, "leaving": True}
    running["roles"]["generation"] |= {"live": 1, "gpus": 0.25}
    running["lag"]["effective"] = 2
    running["groups"]["dropped"] = {"stale": 3, "no_signal": 0}
    running["placement"] = [
        {
            "name": "r-learner",
            "role": "learner",
            "nodes": ["a", "b"],
            "bundles": [{"GPU": 4.0}, {"GPU": 4.0}],
        },
        {"name": "r-generation-0", "role": "generation", "nodes": ["b"], "bundles": [{"CPU": 2.0}]},
        {"name": "r-generation-1", "role": "generation", "nodes": [], "bundles": [{"CPU": 2.0}]},
    ]
    text = shown(running)
    for fact in (
        "r  running  step 12/20, up 1 min",
        "checkpoint 8",
        "bound 3, now 2 (lag.ess_floor)",
        "dropped: stale 3\n",
        "forward backward 7",
        "a (4 GPU); b (4 GPU)",
        "b (2 CPU); 1 wait for a place",
        "generation   1/2    0.25",
        "10 (-2)",
        "25%",
        "leaves",
    ):
        assert fact in text, text
    text = shown(starting)
    assert "r  starting  step 0/20" in text and "engine 0   its processes to start (and 1 like it)" in text


def headway(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str]:
    """The command line in this process: exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out + out.err


def test_a_run_that_is_over_is_told_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_of(tmp_path, 9)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    code, text = headway(capsys, monkeypatch, "status", "old", "--json")
    assert code == 0 and json.loads(text)["state"] == "interrupted"
    code, text = headway(capsys, monkeypatch, "status", str(folder))
    assert (
        code == 0 and "old  interrupted  at step 3/9; it failed, or was ended at once; no checkpoint" in text
    )
    code, text = headway(capsys, monkeypatch, "top", "old")
    assert code == 0 and "old  interrupted" in text
    code, text = headway(capsys, monkeypatch, "stop", "old")
    assert code == 0 and text == "run 'old' is not running: interrupted at step 3/9\n"
    for command in ("status", "top", "stop"):
        code, text = headway(capsys, monkeypatch, command, "nothing")
        assert (
            code == 2 and text.startswith("error: no Ray cluster at '127.0.0.1:9'") and text.count("\n") == 1
        )
    # The run of this name on a cluster that was named may be another one.
    for arguments in (["status", "old"], ["top", "old"], ["stop", "old"]):
        code, text = headway(capsys, monkeypatch, *arguments, "--address", "127.0.0.1:9")
        assert code == 2 and text.startswith("error: no Ray cluster at '127.0.0.1:9'")
    code, text = headway(capsys, monkeypatch, "stop", "old", "--address", "http://127.0.0.1:9")
    assert code == 2 and text.startswith("error: http://127.0.0.1:9: ")
    (folder / "cluster.json").write_text(
        json.dumps({"address": "127.0.0.1:9", "namespace": "headway-old", "pid": 1})
    )
    code, text = headway(capsys, monkeypatch, "status", "old")
    assert code == 0 and "its driver was killed" in text


# ---- on a cluster ------------------------------------------------------------------------------------------

DRIVER = """
import asyncio, sys
import ray
from headway.cluster.control import Mailbox
from headway.cluster.joining import CONTROL, join, namespace

address, name, behaviour = sys.argv[1:]
join(address, namespace(name))
is_left = behaviour == "leaves"
lifetime = {"lifetime": "detached"} if is_left else {}
groups = [
    ray.util.placement_group([{"CPU": 0.01}], name=f"{name}-{role}", **lifetime)
    for role in ("learner", "verifiers-0")
]
for group in groups:
    assert group.wait(30)
remote = ray.remote(max_concurrency=100, num_cpus=0)(Mailbox)
mailbox = remote.options(name=CONTROL, namespace=namespace(name), **lifetime).remote()
strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(groups[0])
worker = ray.remote(num_cpus=0.01)(Mailbox).options(scheduling_strategy=strategy).remote()
ray.get([mailbox.__ray_ready__.remote(), worker.__ray_ready__.remote()])
print("up", flush=True)
account = {
    "run": name, "state": "starting", "folder": "/runs/x", "driver": {"host": "h", "pid": 1}, "uptime_s": 1.0,
    "version": 0, "steps": 9, "checkpoint": None, "restarts": 0, "metrics_port": 9400, "own_ray": False,
    "step_deadline_s": 10.0, "waits": [],
}

async def serve():
    while True:
        for ticket, kind, value in await mailbox.take.remote(60):
            if behaviour == "answers":
                await mailbox.answer.remote(ticket, account)
                if kind == "stop":
                    await asyncio.sleep(0.5)
                    return

if not is_left:
    asyncio.run(serve())
"""
CLIENT = """
import sys
from headway.cluster import control
from headway.cluster.cli import main
control.ANSWER_DEADLINE_S = float(sys.argv.pop(1))
main()
"""
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    connect(parse_config({"run": {"name": "fixture"}}))
    yield ray.get_runtime_context().gcs_address
    disconnect()


@contextmanager
def driver(address: str, name: str, behaviour: str) -> Iterator[subprocess.Popen[str]]:
    """A driver with two placement groups, a mailbox and a worker: it answers, is silent, or leaves all that behind."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, address, name, behaviour],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def client(address: str, *arguments: str, deadline_s: float = 30) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CLIENT, str(deadline_s), *arguments, f"--address={address}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_a_driver_left_behind_is_removed_and_nothing_else(address: str) -> None:
    with driver(address, "left", "leaves") as left, driver(address, "left-over", "leaves") as neighbour:
        assert (left.wait(30), neighbour.wait(30)) == (0, 0)
        while holdings("left").driver or holdings("left-over").driver:
            time.sleep(0.1)
        code, text = client(address, "status", "left", deadline_s=1)
        assert code == 0 and "its driver is gone  and has left 1 actors" in text, text
        code, text = client(address, "stop", "left")
        assert code == 0, text
        assert text.splitlines() == [
            "the driver of run 'left' is gone",
            "removed: actors control; placement groups left-learner, left-verifiers-0",
        ]
        assert not holdings("left")
        others = holdings("left-over")
        assert [group.name for group in others.groups] == ["left-over-learner", "left-over-verifiers-0"]
        assert others.named == ("control",)
        code, text = client(address, "stop", "left")
        assert code == 2 and "run 'left' is not running on this cluster; running: left-over" in text
        assert client(address, "stop", "left-over")[0] == 0


def test_a_run_is_asked_to_end_and_is_gone_when_stop_says_so(address: str) -> None:
    with driver(address, "answers", "answers") as process:
        code, text = client(address, "status", "--json")
        account = json.loads(text)
        assert code == 0 and account["actors"] == 2
        assert account["driver_at"].startswith(f"process {process.pid} on ")
        assert [group["role"] for group in account["placement"]] == ["learner", "verifiers"]
        assert account["placement"][0]["bundles"] == [{"CPU": 0.01}]
        code, text = client(address, "stop", "answers")
        assert code == 0, text
        assert text.splitlines() == [
            "run 'answers' ends once it has started (--now: at once)",
            "run 'answers' has ended; gone are its 2 actors and 2 placement groups",
        ]
        assert not holdings("answers")


def test_a_driver_that_hangs_keeps_its_run_until_it_is_taken_from_it(address: str) -> None:
    with driver(address, "silent", "hangs") as process:
        code, text = client(address, "status", "silent", deadline_s=1)
        assert code == 0 and "silent  does not answer" in text and f"process {process.pid}" in text
        code, text = client(address, "stop", "silent", deadline_s=1)
        assert code == 2 and "headway stop silent --now" in text and text.count("\n") == 1, text
        assert len(holdings("silent").groups) == 2
        code, text = client(address, "stop", "silent", "--now", deadline_s=1)
        assert code == 0 and f"it is process {process.pid} on" in text, text
        assert not holdings("silent").groups and process.poll() is None


def test_a_killed_driver_leaves_nothing(address: str) -> None:
    with driver(address, "killed", "answers") as process:
        watching = subprocess.Popen(
            [sys.executable, "-P", "-c", CLIENT, "30", "top", "killed", f"--address={address}"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        assert "killed  starting" in watching.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest, _ = watching.communicate(timeout=60)
        assert watching.returncode == 0 and rest.endswith("run 'killed' has ended\n"), rest
        code, text = client(address, "stop", "killed")
        assert code == 2 and "run 'killed' is not running on this cluster" in text
