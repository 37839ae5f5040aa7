"""The cluster of one machine: up, a job on it that Prometheus sees, down."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(1200)

TINY = [
    "run.name=on-one-machine",
    "run.steps=100000",
    "model.path=tiny-random",
    "data.num_prompts=50",
    "learner.groups_per_step=2",
    "sampling.max_new_tokens=8",
    "algorithm.dynamic_sampling=false",
    "generation.replicas=1",
    "metrics.port=0",
]


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def env(root: Path) -> Iterator[dict[str, str]]:
    """A place, ports and a token of its own; what is up at the end goes down."""
    folder = Path(tempfile.mkdtemp(prefix="hw-up-", dir="/tmp"))  # short: Ray's sockets lie in it
    ray, dashboard, prometheus = map(str, free_ports(3))
    env = {
        **os.environ,
        "UP_FOLDER": str(folder / "up"),
        "UP_RUNS": str(folder / "runs"),
        "UP_BIN": str(Path(sys.executable).parent),
        "UP_RAY_PORT": ray,
        "UP_DASHBOARD_PORT": dashboard,
        "UP_PROMETHEUS_PORT": prometheus,
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_AUTH_MODE": "token",
    }
    env.pop("RAY_AUTH_TOKEN", None)
    yield env
    script(root, env, "down")
    shutil.rmtree(folder, ignore_errors=True)


def script(root: Path, env: dict[str, str], name: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "deploy" / "one-machine" / f"{name}.sh")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def started(env: dict[str, str]) -> list[int]:
    """The processes that up.sh started."""
    return [int(file.read_text().split()[0]) for file in sorted(Path(env["UP_FOLDER"]).glob("*.pid"))]


def family(pids: list[int]) -> list[psutil.Process]:
    first = [psutil.Process(pid) for pid in pids]
    return [*first, *(child for process in first for child in process.children(recursive=True))]


def runs(process: psutil.Process) -> bool:
    """A zombie does not: in a container nobody may collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def value(env: dict[str, str], expr: str) -> float | None:
    """What Prometheus says, of a query with one answer; None when there is none."""
    query = urllib.parse.urlencode({"query": expr})
    url = f"http://127.0.0.1:{env['UP_PROMETHEUS_PORT']}/api/v1/query?{query}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    return float(found[0]["value"][1]) if found else None


def wait_for(condition: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.5)


def test_a_job_on_the_cluster_of_one_machine_is_scraped_and_down_leaves_no_process(
    root: Path, env: dict[str, str], tiny_random: Path
) -> None:
    up = script(root, env, "up")
    assert up.returncode == 0, up.stderr
    dashboard, prometheus = (
        f"http://127.0.0.1:{env[f'UP_{name}_PORT']}" for name in ("DASHBOARD", "PROMETHEUS")
    )
    assert dashboard in up.stdout and prometheus in up.stdout and "Grafana" in up.stdout
    assert f"headway submit configs/demo.yaml --address {dashboard}" in up.stdout
    token = Path(env["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    assert token.read_text() not in up.stdout
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{dashboard}/api/version", timeout=10)

    once, key = started(env), token.read_text()
    again = script(root, env, "up")
    assert again.returncode == 0 and dashboard in again.stdout
    assert (started(env), token.read_text()) == (once, key)

    command = [
        sys.executable,
        "-P",
        "-m",
        "headway.cluster.cli",
        "submit",
        "configs/tiny.yaml",
        "--no-follow",
    ]
    place = [f"--address={dashboard}", f"run.folder={env['UP_RUNS']}"]
    submitted = subprocess.run(
        [*command, *place, *TINY], cwd=root, env=env, capture_output=True, text=True, timeout=100
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    mine = '{run="on-one-machine", job="headway-runs"}'
    lags = '{run="on-one-machine", phase="total"}'
    wait_for(
        lambda: (value(env, f"headway_version_lag_steps_count{lags}") or 0) > 0,
        300,
        lambda: "\n".join(
            file.read_text()[-2000:]
            for file in Path(env["RAY_TMPDIR"]).glob("ray/session_latest/logs/job-driver*")
        ),
    )
    assert value(env, f"up{mine}") == 1
    # All groups are in the buckets up to the bound of 2.
    within = 'headway_version_lag_steps_bucket{phase="total", le="2"}'
    assert value(env, f"{within} / ignoring (le) headway_version_lag_steps_count") == 1

    members = family(once)
    names = {member.name() for member in members}
    assert {"raylet", "gcs_server", "prometheus"} <= names and any("VLLM" in name for name in names), names
    down = script(root, env, "down")
    assert down.returncode == 0 and "ended: prometheus ray" in down.stdout, down.stdout + down.stderr
    assert "run on-one-machine went down with it" in down.stdout
    assert [member for member in members if runs(member)] == []
    assert not list(Path(env["UP_FOLDER"]).glob("*.pid"))
    assert not list(Path(env["UP_RUNS"]).glob("*.targets.json"))
    assert not list(Path("/dev/shm").glob("headway-on-one-machine-*"))
    assert script(root, env, "down").stdout == "nothing is up\n"


def test_a_port_that_is_taken_is_named_and_nothing_stays_up(root: Path, env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        up = script(root, env | {"UP_DASHBOARD_PORT": str(port)}, "up")
    assert up.returncode == 1
    assert f"ray: port {port} is taken" in up.stderr and "settings.sh" in up.stderr
    assert not list(Path(env["UP_FOLDER"]).glob("*.pid"))
