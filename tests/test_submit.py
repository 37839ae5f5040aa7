"""The same run as a Ray job: a token-protected cluster, this code as a wheel, the job's exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.cluster import submit as jobs
from headway.cluster.submit import build_wheel
from headway.core.config import parse_config
from headway.core.errors import ClusterError, ConfigError

pytestmark = pytest.mark.timeout(600)
TOKEN = "6f9619ff8b86d011b42d00c04fc964ff6f9619ff8b86d011b42d00c04fc964ff"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of the dashboard of a one-node cluster that asks for a token."""
    temp = tempfile.mkdtemp(prefix="hw-ray-", dir="/tmp")  # short: Ray's sockets lie in it
    dashboard = free_port()
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ""}
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={temp}",
        f"--port={free_port()}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--num-cpus=4",
        "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    head = subprocess.Popen(command, env=env, cwd="/", start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", dashboard), timeout=1).close()
                break
            except OSError:
                assert head.poll() is None, "ray start failed"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def submit(root: Path, address: str, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-P", "-m", "headway.cluster.cli", "submit", "configs/tiny.yaml"]
    return subprocess.run(
        [*command, f"--address={address}", *arguments],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )


SMALL = [
    "model.path=tiny-random",
    "data.num_prompts=50",
    "learner.groups_per_step=2",
    "sampling.max_new_tokens=8",
    "metrics.port=0",
    "generation.replicas=1",
    "algorithm.dynamic_sampling=false",
]


def test_a_submitted_run_trains_on_the_cluster_and_gives_its_exit_code(
    root: Path, tmp_path: Path, cluster: str, tiny_random: Path
) -> None:
    rows = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    shipped = [f"data.source={tmp_path}/rows.jsonl", "data.verifier=numeric", f"run.folder={tmp_path}/runs"]
    done = submit(root, cluster, TOKEN, *SMALL, *shipped, "run.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step +3/3", done.stdout), done.stdout
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()
    # The run folder is there now, so the same job again is a user's mistake: exit code 2, all the way through.
    again = submit(root, cluster, TOKEN, *SMALL, *shipped, "run.steps=3")
    assert again.returncode == 2, again.stdout + again.stderr
    assert "exists; go on with --resume" in again.stdout
    assert TOKEN not in done.stdout + done.stderr + again.stdout


def test_without_the_right_token_it_says_so(root: Path, cluster: str) -> None:
    done = submit(root, cluster, "0" * 64)
    assert done.returncode == 2
    assert "RAY_AUTH_TOKEN" in done.stderr and "Traceback" not in done.stderr


def test_no_cluster_is_one_clear_line(root: Path) -> None:
    done = submit(root, f"http://127.0.0.1:{free_port()}", TOKEN)
    assert done.returncode == 2
    assert "cannot submit to http://127.0.0.1" in done.stderr and "Traceback" not in done.stderr


def test_the_wheel_holds_every_module_under_its_full_name(root: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(build_wheel(tmp_path)).namelist()
    for folder in ("core", "verifiers", "learner", "actors", "cluster"):
        for source in (root / folder).glob("*.py"):
            assert f"headway/{folder}/{source.name}" in names
    assert "headway/cluster/report.html.j2" in names
    assert not (root / "build" / "lib").exists()


class Dashboard(BaseHTTPRequestHandler):
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
        body = json.dumps(answers.get(self.path.rsplit("/", 1)[-1], job)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


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
