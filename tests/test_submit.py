"""The same run as a Ray job on a real cluster: a token-protected head and two nodes with emulated GPUs, all started by
`ray start`. What is checked beforehand, placed, followed, taken up again, stopped, and what is left of it: nothing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway.cluster import code
from headway.cluster import submit as jobs
from headway.cluster.room import can_grow, shortfalls
from headway.cluster.submit import build_wheel
from headway.core.config import Config, parse_config
from headway.core.errors import ClusterError, ConfigError

pytestmark = pytest.mark.timeout(1200)
TOKEN = "6f9619ff8b86d011b42d00c04fc964ff6f9619ff8b86d011b42d00c04fc964ff"
START_S = 120.0
STEP_S = 180.0
EDITED = '"""Another one."""\n'


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = STEP_S) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.2)
    return found


@dataclass
class Cluster:
    dashboard: str
    """Its address."""
    gcs: str
    temp: Path
    edited: Path
    """A folder with a copy of headway in which one module differs. It is on the import path of nodes `generation`."""
    stack: ExitStack
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str, *arguments: str) -> None:
        """One node, labelled with its role, with a folder of its own as if it were a machine of its own. Ray gives a node half
        a minute to come up, which may be too little on a busy machine."""
        for _ in range(3):
            node = self._started(role, *arguments)
            wait_for(
                lambda node=node: role in self.roles().values() or node.poll() is not None, role, START_S
            )
            if node.poll() is None:
                return
        pytest.fail((self.temp / f"{role}.out").read_text()[-2000:])

    def _started(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {
            "HOME": str(Path.home()),
            "PATH": "/usr/bin:/bin",  # whoever starts Ray need not have its Python there
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "10",
            "HF_HUB_OFFLINE": "1",
        }
        if role == "generation":
            environment["PYTHONPATH"] = str(self.edited)
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", f"--labels=role={role}",
            f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0",
            f"--object-store-memory={400 << 20}", f"--temp-dir={self.temp / role}", *arguments,
        ]  # fmt: skip
        with (self.temp / f"{role}.out").open("ab") as output:
            node = subprocess.Popen(
                command, env=environment, cwd="/", start_new_session=True, stdout=output, stderr=output
            )
        self.nodes[role] = node
        self.stack.callback(end, node)
        return node

    def start_worker(self, role: str) -> None:
        self.start(role, f"--address={self.gcs}", "--num-cpus=2", "--num-gpus=1")

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the dashboard answers."""
        request = urllib.request.Request(
            self.dashboard + path, method=method, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def listed(self, kind: str) -> list[dict[str, Any]]:
        return self.ask(f"/api/v0/{kind}?detail=1&limit=10000")["data"]["result"]["result"]

    def log(self, job: str) -> str:
        return self.ask(f"/api/jobs/{job}/logs")["logs"]

    def roles(self) -> dict[str, str]:
        """Of the nodes that are alive, by id."""
        try:
            nodes = self.listed("nodes")
        except OSError:
            return {}
        return {node["node_id"]: node["labels"]["role"] for node in nodes if node["state"] == "ALIVE"}


def end(node: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait(30)


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[Cluster]:
    """A head for drivers, a node for the learner and one for engines; all want the token."""
    with ExitStack() as stack:
        temp = Path(tempfile.mkdtemp(prefix="hw-ray-", dir="/tmp"))  # short: Ray's sockets lie in it
        stack.callback(shutil.rmtree, temp, ignore_errors=True)
        edited = temp / "edited"
        for package in code.PACKAGES:
            shutil.copytree(
                root / package, edited / "headway" / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        (edited / "headway" / "core" / "another.py").write_text(EDITED)
        about = edited / "headway-0.1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headway\nVersion: 0.1.0\n")
        dashboard, gcs = free_port(), free_port()
        cluster = Cluster(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", temp, edited, stack)
        cluster.start(
            "head", "--head", f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=2",
            "--dashboard-host=127.0.0.1", f"--ray-client-server-port={free_port()}",
        )  # fmt: skip
        cluster.start_worker("learner")
        cluster.start_worker("generation")
        yield cluster


USER = {key: value for key, value in os.environ.items() if key not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
USER["RAY_AUTH_TOKEN"] = TOKEN


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "headway.cluster.cli", *arguments]


def headway(root: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = subprocess.run(
        command(*arguments),
        cwd=root,
        env=USER | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


SMALL = (
    "model.path=tiny-random",
    "data.num_prompts=50",
    "learner.groups_per_step=2",
    "sampling.max_new_tokens=8",
    "metrics.port=0",
    "generation.replicas=1",
    "queue.max_mib=64",
    "algorithm.dynamic_sampling=false",
)
PLACED = (
    "learner.gpus=1",
    "generation.gpus=1",
    "learner.labels={role: learner}",
    "generation.labels={role: generation}",
    "verifiers.labels={role: learner}",
)


# ---- a run that ends by itself, and jobs that are refused ---------------------------------------------------


def test_a_submitted_run_trains_on_the_cluster_and_gives_its_exit_code(
    root: Path, tmp_path: Path, cluster: Cluster, tiny_random: Path
) -> None:
    rows = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    arguments = (
        *("submit", "configs/tiny.yaml", f"--address={cluster.dashboard}", *SMALL, "run.name=short", "run.steps=3"),
        *(f"data.source={tmp_path}/rows.jsonl", "data.verifier=numeric", f"run.folder={tmp_path}/runs"),
    )  # fmt: skip
    code, out, err = headway(root, *arguments)
    assert code == 0, out + err
    assert out.startswith(f"submitted headway-short to {cluster.dashboard}\n")
    assert re.search(r"step +3/3", out), out
    assert (tmp_path / "runs" / "short" / "report.html").exists()
    # The run folder is there now, so the same job again is a user's mistake: exit code 2, all the way through.
    again, said, _ = headway(root, *arguments)
    assert again == 2 and said.startswith("submitted headway-short-2 to "), said
    assert "exists; go on with --resume" in said
    assert TOKEN not in out + err + said
    # Whoever comes later sees the end of its log, and gets its exit code.
    late, said, _ = headway(root, "submit", "--attach", "short", f"--address={cluster.dashboard}")
    assert late == 2 and said.count("\n") <= jobs.SHOWN_LINES and "exists; go on with --resume" in said
    code, _, err = headway(root, *arguments, "--submission-id=headway-short")
    assert code == 2 and "there is a job headway-short on this cluster already (SUCCEEDED)" in err


def test_without_the_right_token_it_says_so(root: Path, cluster: Cluster, tmp_path: Path) -> None:
    arguments = ("configs/tiny.yaml", f"--address={cluster.dashboard}")
    for token in ({"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}):
        code, out, err = headway(root, "submit", *arguments, **token)
        assert code == 2 and not out
        assert err == (
            f"error: {cluster.dashboard}: unauthorised; set RAY_AUTH_TOKEN to the cluster's token, or put it into "
            "~/.ray/auth_token\n"
        )
    code, _, err = headway(root, "stop", "short", arguments[1], RAY_AUTH_TOKEN="0" * 64)
    assert code == 2 and "unauthorised" in err


def test_no_cluster_is_one_clear_line(root: Path) -> None:
    for address, said in (
        (f"http://127.0.0.1:{free_port()}", "Failed to connect"),
        ("head:6379", "as in http"),
    ):
        code, _, err = headway(root, "submit", "configs/tiny.yaml", f"--address={address}")
        assert code == 2 and err.count("\n") == 1 and address in err and said in err


@pytest.mark.parametrize("variable", ["RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"])
def test_a_job_goes_where_it_is_sent_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    own, other = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    monkeypatch.setenv(variable, other)
    with pytest.raises(ClusterError, match=rf"^{own}: Failed to connect to Ray at address: {own}"):
        jobs.connect(own)
    assert os.environ[variable] == other


def test_what_is_no_dashboard_is_named() -> None:
    with pytest.raises(ClusterError, match="http://head:80: what answers there is no dashboard of Ray"):
        with jobs.reaching("http://head:80"):
            json.loads("<html>")


def test_what_the_cluster_cannot_hold_is_not_sent(root: Path, cluster: Cluster) -> None:
    before = len(cluster.ask("/api/jobs/"))
    code, out, err = headway(
        *(root, "submit", "configs/tiny.yaml", f"--address={cluster.dashboard}", *SMALL, *PLACED),
        *("generation.replicas=3", "learner.labels={role: nobody}"),
    )
    assert code == 2 and not out
    assert [line.partition(": the cluster has ")[::2] for line in err.splitlines()] == [
        (
            "error: group 'learner' needs 1 x (1 CPU + 1 GPU) on nodes labelled {'role': 'nobody'}, only 0 fit",
            "2 GPU and 6 CPU on 3 node(s); lower learner.replicas, learner.gpus or learner.cpus, or add nodes",
        ),
        (
            "group 'generation' needs 3 x (0.5 CPU + 1 GPU) on nodes labelled {'role': 'generation'}, only 1 fit",
            "2 GPU and 6 CPU on 3 node(s); lower generation.replicas, generation.gpus or generation.cpus, or add nodes",
        ),
    ]
    assert len(cluster.ask("/api/jobs/")) == before


def test_a_node_with_other_code_is_refused(root: Path, cluster: Cluster, tmp_path: Path) -> None:
    """A run that is not submitted brings no code along: it finds what is installed on each node."""
    code_, out, err = headway(
        *(root, "train", "configs/tiny.yaml", f"cluster.address={cluster.gcs}", *SMALL, *PLACED),
        *(f"run.folder={tmp_path}", "run.name=other"),
    )
    assert code_ == 2, out + err
    kinds = re.findall(r"0\.1\.0 \(source [0-9a-f]{16}\)", err)
    assert len(set(kinds)) == 2 and err.count("\n") == 1, err
    assert re.match(r"error: node [0-9.]+ runs headway .*, the driver .*; install the same on both", err)
    assert code.of({p: cluster.edited / "headway" / p for p in code.PACKAGES}) == kinds[0]


# ---- a run that goes on until it is stopped -----------------------------------------------------------------


class Proxy:
    """A port that leads to another one, until it is cut."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._open: list[socket.socket] = []
        self.restore()

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@dataclass
class Running:
    """A submitted run that trains, and the process that submitted it and follows it through a proxy."""

    cluster: Cluster
    proxy: Proxy
    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    folder: Path

    def steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def trains_on(self, num_steps: int = 3) -> None:
        goal = self.steps() + num_steps
        wait_for(lambda: self.steps() >= goal, f"{num_steps} more steps\n{self.out.read_text()}")

    def processes(self) -> set[int]:
        """Those that write to the run's logs: its actors and their children."""
        found = set[int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "fd" / "1").startswith(str(self.folder)):
                    found.add(int(entry.name))
        return found

    def groups(self) -> dict[str, str]:
        """Role of the node that each of the run's placement groups is on."""
        roles = self.cluster.roles()
        return {
            group["name"]: roles.get(bundle["node_id"], "")
            for group in self.cluster.listed("placement_groups")
            if group["state"] == "CREATED" and group["name"].startswith("long-")
            for bundle in group["bundles"]
        }


@pytest.fixture(scope="module")
def running(
    root: Path, cluster: Cluster, tiny_random: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    temp = tmp_path_factory.mktemp("long")
    proxy = Proxy(int(cluster.dashboard.rpartition(":")[2]))
    arguments = command(
        *("submit", "configs/tiny.yaml", f"--address=http://127.0.0.1:{proxy.port}", *SMALL, *PLACED),
        *("run.name=long", "run.steps=1000000", f"run.folder={temp}", "run.checkpoint_every=0"),
    )
    with (temp / "out").open("wb") as out, (temp / "err").open("wb") as err:
        process = subprocess.Popen(arguments, cwd=root, env=USER, stdout=out, stderr=err)
    run = Running(cluster, proxy, process, temp / "out", temp / "err", temp / "long")
    try:
        wait_for(lambda: run.steps() >= 2 or process.poll() is not None, "the run to train", START_S + STEP_S)
        assert process.poll() is None, run.out.read_text() + run.err.read_text()
        yield run
    finally:
        process.kill()
        with suppress(OSError):
            cluster.ask("/api/jobs/headway-long/stop", "POST")


def test_each_group_is_on_the_node_with_its_label(running: Running) -> None:
    assert running.groups() == {
        "long-learner": "learner",
        "long-verifiers-0": "learner",
        "long-generation-0": "generation",
    }


def test_the_code_that_was_sent_comes_before_what_a_node_has(running: Running) -> None:
    """Engines run on the node that has an edited copy on its import path."""
    (engine,) = [
        actor
        for actor in running.cluster.listed("actors")
        if actor["state"] == "ALIVE" and actor["class_name"] == "GenerationActor"
    ]
    maps = Path(f"/proc/{engine['pid']}/environ").read_bytes().split(b"\0")
    (paths,) = [entry for entry in maps if entry.startswith(b"PYTHONPATH=")]
    assert paths.split(b":")[-1] == str(running.cluster.edited).encode()
    assert b"/py_modules_files/" in paths


def test_a_second_job_for_a_run_that_works_is_refused(root: Path, running: Running) -> None:
    address = running.cluster.dashboard
    code, _, err = headway(
        *(root, "submit", "configs/tiny.yaml", f"--address={address}", *SMALL),
        *("run.name=long", "--submission-id=mine"),
    )
    assert code == 2
    assert err == (
        f"error: run 'long' is job headway-long on this cluster already (RUNNING); follow it with 'headway submit --attach "
        f"headway-long --address {address}', end it with 'headway stop headway-long --address {address}', or give this one "
        "another run.name\n"
    )


def test_ctrl_c_ends_the_following_and_not_the_run(root: Path, running: Running) -> None:
    address = running.cluster.dashboard
    follower = subprocess.Popen(
        command("submit", "--attach", "long", f"--address={address}"),
        cwd=root,
        env=USER,
        stdout=subprocess.PIPE,
        # Whoever runs the tests in the background may have it ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert follower.stdout is not None
    first = follower.stdout.readline().decode()
    assert re.search(r"step +[0-9]+/1000000", first), first  # where the run is, not where it began
    assert not re.search(r"step +1/1000000", first)
    follower.send_signal(signal.SIGINT)
    rest, _ = follower.communicate(timeout=60)
    assert follower.returncode == 130
    assert rest.decode().splitlines()[-1] == (
        f"job headway-long goes on; follow it with 'headway submit --attach headway-long --address {address}', end it with "
        f"'headway stop headway-long --address {address}'"
    )
    running.trains_on()


def test_a_lost_connection_is_taken_up_again(running: Running) -> None:
    running.proxy.cut()
    wait_for(lambda: "trying again for 300 s" in running.err.read_text(), "the follower to notice")
    running.trains_on()
    at = running.out.stat().st_size
    running.proxy.restore()
    wait_for(lambda: running.out.stat().st_size > at, "the follower to go on")
    assert running.err.read_text().endswith("the cluster answers again\n")
    # That no line is lost or doubled is seen when the run has ended.


def test_a_run_outlives_a_node(running: Running) -> None:
    cluster = running.cluster
    (raylet,) = [
        process
        for process in psutil.Process(cluster.nodes["generation"].pid).children()
        if process.name() == "raylet"
    ]
    raylet.kill()
    wait_for(lambda: "engine 0 is replaced" in running.out.read_text(), "the run to notice")
    wait_for(lambda: "generation" not in cluster.roles().values(), "the cluster to notice")
    cluster.start_worker("generation")
    running.trains_on()
    assert running.groups()["long-generation-0"] == "generation"


def test_a_stopped_run_leaves_nothing(root: Path, running: Running) -> None:
    cluster = running.cluster
    before = running.processes()
    assert len(before) >= 5  # learner, engine, verifier, queue, metrics
    code, out, err = headway(root, "stop", "long", f"--address={cluster.dashboard}")
    assert code == 0, out + err
    first, *_, last = out.splitlines()
    assert first == (
        "job headway-long is asked to end after the optimizer step in progress, with a checkpoint"
    )
    assert re.fullmatch("run 'long' has ended; gone are its [0-9]+ actors and 3 placement groups", last), last
    saved = re.search(r"stopped at version ([0-9]+); go on with --resume", out)
    assert saved and (running.folder / "checkpoints" / f"version-{int(saved[1]):08}").is_dir()
    assert running.groups() == {}
    named = [actor for actor in cluster.listed("actors") if actor["ray_namespace"] == "headway-long"]
    assert {actor["state"] for actor in named} == {"DEAD"}
    assert running.processes() == set() and not any(map(psutil.pid_exists, before))
    assert cluster.ask("/api/jobs/headway-long")["status"] == "STOPPED"
    # Who followed it from its start has its whole log, through a cut connection, and its exit code.
    assert running.process.wait(60) == 130
    submitted, _, followed = running.out.read_text().partition("\n")
    assert submitted.startswith("submitted headway-long to ")
    assert followed == cluster.log("headway-long")
    code, _, err = headway(root, "stop", "long", f"--address={cluster.dashboard}")
    assert code == 2 and err == "error: job headway-long does not run any more: it stopped\n"


def test_a_run_can_be_ended_at_once(root: Path, cluster: Cluster, tmp_path: Path) -> None:
    """A step of this one takes minutes."""
    slow = ("sampling.max_new_tokens=64", "learner.groups_per_step=2000", "lag.max_version_lag=0")
    code, out, err = headway(
        *(
            root,
            "submit",
            "configs/tiny.yaml",
            "--no-follow",
            f"--address={cluster.dashboard}",
            *SMALL,
            *slow,
        ),
        *("run.name=slow", f"run.folder={tmp_path}", "queue.max_groups=2000"),
    )
    assert code == 0, out + err
    wait_for(lambda: "starting engines" in cluster.log("headway-slow"), "the run to start")
    code, out, err = headway(root, "stop", "headway-slow", "--now", f"--address={cluster.dashboard}")
    assert code == 0, out + err
    assert out.startswith("job headway-slow is asked to end at once\n")
    assert not list((tmp_path / "slow").glob("checkpoints/*"))
    assert headway(root, "submit", "--attach", "slow", f"--address={cluster.dashboard}")[0] == 130


# ---- what needs no cluster ----------------------------------------------------------------------------------


def test_the_digest_sees_every_edit(root: Path, tmp_path: Path) -> None:
    folders = {package: tmp_path / package for package in code.PACKAGES}
    for package, folder in folders.items():
        shutil.copytree(root / package, folder)
    whole = code.of(folders)
    assert re.fullmatch(r"0\.1\.0 \(source [0-9a-f]{16}\)", whole)
    assert code.of({package: folders[package] for package in reversed(folders)}) == whole
    (folders["core"] / "notes.txt").write_text("no module")
    assert code.of(folders) == whole
    file = folders["core"] / "errors.py"
    content = file.read_bytes()
    file.write_bytes(content + b"#")
    assert code.of(folders) != whole
    file.write_bytes(content)
    assert code.of(folders) == whole
    file.rename(file.with_name("error.py"))
    assert code.of(folders) != whole


def test_the_digest_covers_what_is_installed(root: Path) -> None:
    import tomllib

    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == [f"headway.{package}" for package in code.PACKAGES]


def test_other_code_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    code.check("0.1.0", "10.0.0.7")
    code.check(code.here(), "10.0.0.7")
    with pytest.raises(
        ClusterError, match=r"^node 10\.0\.0\.7 runs headway 0\.1\.0 \(.*\), the driver 0\.2\.0; "
    ):
        code.check("0.2.0", "10.0.0.7")
    monkeypatch.setenv(code.SENT, code.here())
    code.check_sent("10.0.0.7")
    monkeypatch.setenv(code.SENT, "0.1.0 (source 0000000000000000)")
    with pytest.raises(
        ClusterError, match=r"driver on node 10\.0\.0\.7 runs .* but 0\.1\.0 \(source 0{16}\) was"
    ):
        code.check_sent("10.0.0.7")


GPU = ({"CPU": 4.0, "GPU": 1.0}, {"role": "learner", "ray.io/node-group": "gpus"})


def test_replicas_are_fitted_onto_nodes_with_their_labels() -> None:
    def faults(config: Config, *nodes: tuple[dict[str, float], dict[str, str]]) -> list[str]:
        return [line.partition(":")[0] for line in shortfalls(config, nodes)]

    config = parse_config({"learner": {"gpus": 1, "labels": {"role": "learner"}}})
    assert faults(config, GPU) == []
    assert faults(config, (GPU[0], {"role": "other"})) == [
        "group 'learner' needs 1 x (1 CPU + 1 GPU) on nodes labelled {'role'"
    ]
    assert GPU[0] == {"CPU": 4.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("report", "labels", "grows"),
    [
        ({"a1": "node_a1", "b2": "node_b2"}, [{}, {}], False),  # started by hand
        ({"a1": "ray.head.default", "b2": "gpus"}, [{}, {}], True),  # the first autoscaler
        (None, [{}, {"ray.io/node-group": "gpus"}], True),  # the second one
        (None, [{}, {"role": "learner"}], False),
        (
            {"a1": "node_a1"},
            [{"ray.io/node-group": "gpus"}],
            False,
        ),  # Kubernetes, without an autoscaler
    ],
)
def test_an_autoscaler_is_told_by_the_types_of_its_nodes(
    report: dict[str, str] | None, labels: list[dict[str, str]], grows: bool
) -> None:
    assert can_grow(report, labels) is grows


def test_the_wheel_holds_every_module_under_its_full_name(root: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build_wheel(tmp_path))
    names = wheel.namelist()
    wheel.extractall(tmp_path / "unpacked")
    sent = {package: tmp_path / "unpacked" / "headway" / package for package in code.PACKAGES}
    assert code.of(sent) == code.of({package: root / package for package in code.PACKAGES})
    for folder in ("core", "verifiers", "learner", "actors", "cluster"):
        for source in (root / folder).glob("*.py"):
            assert f"headway/{folder}/{source.name}" in names
    assert "headway/cluster/report.html.j2" in names
    assert not (root / "build" / "lib").exists()


class Json(BaseHTTPRequestHandler):
    """Answers with JSON, and prints nothing."""

    def answer(self, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Dashboard(Json):
    """Ray's, with one job. Requests for what `left` names get no answer, as many times as it says."""

    left: dict[str, int]
    over: threading.Event

    def do_GET(self) -> None:
        for part in self.left:
            if self.path.endswith(part) and self.left[part]:
                self.left[part] -= 1
                self.over.wait()
                return
        job = {"type": "SUBMISSION", "submission_id": "job", "status": "SUCCEEDED", "entrypoint": "python"}
        answers = {
            "version": {"version": "4", "ray_version": "2.60.0", "ray_commit": ""},
            "logs": {"logs": "trained\n"},
        }
        self.answer(answers.get(self.path.rsplit("/", 1)[-1], job))


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_request_without_an_answer_is_sent_again_but_not_for_ever(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("REQUEST_DEADLINE_S", 0.2), ("LOST_AFTER_S", 1.0), ("POLL_S", 0.01)):
        monkeypatch.setattr(jobs, name, value)
    over = threading.Event()
    handler = type("Handler", (Dashboard,), {"left": {"logs": lost, "job": 1}, "over": over})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            client = jobs.connect(f"http://127.0.0.1:{server.server_port}")
            if lost == 1:
                assert "".join(jobs.follow(client, "job")) == "trained\n"
                assert jobs.exit_code(client, "job") == 0
            else:
                with pytest.raises(ClusterError, match="job job may still be running"):
                    list(jobs.follow(client, "job"))
        finally:
            over.set()
            server.shutdown()


@contextmanager
def dashboard(**answers: Any) -> Iterator[Any]:
    """A client of a dashboard that gives these answers, by the end of what is asked."""

    class Answering(Json):
        def do_GET(self) -> None:
            kind = self.path.partition("?")[0].rpartition("/")[2]
            answer = {"version": "4", "ray_version": "2.60.0", "ray_commit": ""}
            self.answer(answer if kind == "version" else {"data": answers[kind]})

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield jobs.connect(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


HEAD: dict[str, Any] = {
    "ip": "10.0.0.7",
    "raylet": {"isHeadNode": True, "tempDir": "/tmp/ray"},
    "disk": {"/": {"percent": 10.0}, "/tmp/ray": {"percent": 97.5, "free": 5 << 30}},
    "cmdline": [
        "raylet",
        "--head",
        "--python_worker_command=/opt/ray/bin/python3.11 setup_worker.py --webui=x",
    ],
}


def answers(ray_version: str, python_version: str, node_type: str) -> dict[str, Any]:
    """Of a cluster of one node."""
    node = {"resources_total": {"CPU": 1.0}, "labels": {"ray.io/node-id": "a1"}}
    report = {"nodeTypeMapping": {"a1": node_type}}
    return {
        "cluster_metadata": {"rayVersion": ray_version, "pythonVersion": python_version},
        "nodes": {"result": {"result": [node]}, "summary": [HEAD]},
        "cluster_status": {"clusterStatus": {"autoscalerReport": report}},
    }


def test_a_job_is_found_by_its_id_before_a_run_of_that_name() -> None:
    job, other = (
        SimpleNamespace(
            submission_id=f"headway-{run}",
            metadata={jobs.RUN: run},
            start_time=start,
            status=SimpleNamespace(is_terminal=lambda: False),
        )
        for start, run in enumerate(("one", "headway-one"))
    )
    client = SimpleNamespace(list_jobs=lambda: [job, other])
    assert jobs.find(client, "headway-one") is job
    assert jobs.find(client, "one") is job
    assert jobs.find(client, "headway-headway-one") is other


def test_other_versions_than_here_are_named() -> None:
    here = platform.python_version()
    with (
        dashboard(**answers("2.31.4", "3.8.20", "node_a1")) as client,
        pytest.raises(ClusterError) as refused,
    ):
        jobs.check_cluster(
            client, parse_config({"learner": {"cpus": 0.2}, "generation": {"cpus": 0.2}}), print
        )
    assert str(refused.value).splitlines() == [
        f"the cluster has Ray 2.31.4, this machine {version('ray')}; install the same on both",
        f"the cluster has Python 3.8.20, this machine {here}; use the same on both",
    ]


def test_a_lack_is_a_warning_where_an_autoscaler_may_add_nodes_and_a_full_disk_always() -> None:
    config, said = parse_config({"learner": {"gpus": 4}, "generation": {"cpus": 0.5}}), list[str]()
    known = (version("ray"), platform.python_version())
    lack = (
        "group 'learner' needs 1 x (1 CPU + 4 GPU), only 0 fit: the cluster has 0 GPU and 1 CPU on 1 node(s)"
    )
    with dashboard(**answers(*known, "node_a1")) as client:
        with pytest.raises(ClusterError, match=re.escape(lack)):
            jobs.check_cluster(client, config, said.append)
        assert said == []
    with dashboard(**answers(*known, "small-group")) as client:
        assert jobs.check_cluster(client, config, said.append) == "/opt/ray/bin/python3.11"
    assert len(said) == 2 and said[0].startswith(f"warning: {lack}")
    assert said[1] == (
        "warning: /tmp/ray on node 10.0.0.7 is 97.5% full (5 GiB free); Ray spills nothing to a disk over 95%: make room, "
        "or start it there with another --temp-dir"
    )


def test_prompts_travel_with_the_job_under_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file by its kind, a folder whole, its split kept; what is too large must be readable everywhere."""
    data, job = tmp_path / "data", tmp_path / "job"
    (data / "train").mkdir(parents=True)
    (data / "train" / "a.parquet").write_bytes(b"rows")
    (tmp_path / "held.jsonl.gz").write_bytes(b"more")
    monkeypatch.chdir(tmp_path)
    config = parse_config(
        {
            "data": {"source": f"{data}:train", "eval_source": str(tmp_path / "held.jsonl.gz")},
            "reward_model": {"path": "data"},
        }
    )
    job.mkdir()
    jobs.job_folder(config, job)
    tree = json.loads((job / "config.json").read_text())
    assert (tree["data"]["source"], tree["data"]["eval_source"]) == ("source:train", "eval_source.jsonl.gz")
    assert (tree["model"]["path"], tree["reward_model"]["path"]) == ("smollm2-135m-instruct", str(data))
    assert (job / "source" / "train" / "a.parquet").read_bytes() == b"rows"
    assert (job / "eval_source.jsonl.gz").read_bytes() == b"more"
    with pytest.raises(ConfigError, match=r"data.source=nowhere.jsonl is missing here .* absolute path"):
        jobs.job_folder(parse_config({"data": {"source": "nowhere.jsonl"}}), job)
