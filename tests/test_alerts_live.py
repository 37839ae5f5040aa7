"""Alerts of a run that really trains: a real Prometheus with the shipped rules scrapes it while a verifier becomes slow, and
while its engine stands still. Times in the rules are shortened: seconds for minutes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytestmark = pytest.mark.timeout(1200)

LAG, STILL = "HeadwayLagOverBound", "HeadwayNoProgress"
BOUND = 1

VERIFIER = """\
import time
from pathlib import Path

from headway.verifiers.verdict import correct, wrong

HERE = Path(__file__).parent


def score(prompt, gold, response, context):
    # While there is a file "slow", one verdict at a time is.
    if (HERE / "slow").exists():
        try:
            (HERE / "taken").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            time.sleep(1.5)
            (HERE / "taken").unlink()
    return correct(gold) if response.strip() == gold else wrong(response)
"""

# Only under this policy may a group be older than the bound when it is trained.
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "live", "steps": 100_000, "checkpoint_every": 0},
    "model": {"path": "tiny-random", "dtype": "float32", "chat_template": False},
    "sampling": {"group_size": 2, "max_new_tokens": 4},
    "algorithm": {"dynamic_sampling": False},
    "lag": {"max_version_lag": BOUND, "policy": "downweight", "downweight_limit": 1000},
    "learner": {"groups_per_step": 1, "threads": 1},
    "generation": {"threads": 1, "kv_cache_gib": 0.1},
    "verifiers": {"processes": 3},
    "metrics": {"port": 0, "heartbeat_s": 0.2},
}


@contextmanager
def prometheus(root: Path, folder: Path) -> Iterator[str]:
    """Address of a Prometheus with the rules and alerts of `deploy/`; runs in the folder are its targets."""
    shipped = root / "deploy" / "prometheus"
    config = yaml.safe_load((shipped / "prometheus.yml").read_text())
    runs = next(job for job in config["scrape_configs"] if job["job_name"] == "headway-runs")
    runs["file_sd_configs"] = [{"files": ["*.targets.json"]}]
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = ["recording.yml", "alerts.yml"]
    config["scrape_configs"] = [runs]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for name in config["rule_files"]:
        text = (shipped / name).read_text()
        for minutes, seconds in (
            (r"\[5m\]", "[5s]"),
            (r"offset 10m", "offset 3s"),
            (r"> 600$", "> 3"),
            (r"for: \d+m", "for: 1s"),
        ):
            text = re.sub(minutes, seconds, text, flags=re.MULTILINE)
        (folder / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextmanager
def training(root: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "verifier.py").write_text(VERIFIER)
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(9))
    )
    data = {"source": f"{folder}/rows.jsonl", "verifier": f"{folder}/verifier.py:score"}
    config = {**CONFIG, "data": data, "run": {**CONFIG["run"], "folder": str(folder)}}
    (folder / "live.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-P", "-m", "headway.cluster.cli", "train", f"{folder}/live.yaml"]
    with (folder / "run.log").open("wb") as log:
        with subprocess.Popen(command, cwd=root, stdout=log, stderr=log, start_new_session=True) as process:
            family: list[psutil.Process] = []
            try:
                yield process
            finally:
                if process.poll() is None:
                    family = psutil.Process(process.pid).children(recursive=True)
                    process.kill()
                for member in family:
                    member.kill()


def test_a_live_run_passes_its_bound_and_stands_still_and_its_alerts_fire_and_end(
    root: Path, tmp_path: Path, tiny_random: Path
) -> None:
    with prometheus(root, tmp_path) as server, training(root, tmp_path) as run:

        def ask(path: str) -> list[dict[str, Any]]:
            with urllib.request.urlopen(f"{server}/api/v1/{path}", timeout=5) as answer:
                data = json.load(answer)["data"]
            return data["alerts"] if path == "alerts" else data["result"]

        def query(expr: str) -> float:
            """Of one series; NaN while there is none."""
            found = ask("query?" + urllib.parse.urlencode({"query": expr}))
            return float(found[0]["value"][1]) if found else float("nan")

        def firing() -> set[str]:
            found = [alert for alert in ask("alerts") if alert["state"] == "firing"]
            assert all(alert["labels"]["run"] == "live" for alert in found)
            return {alert["labels"]["alertname"] for alert in found}

        def until(condition: Callable[[], bool], seconds: float) -> None:
            end = time.monotonic() + seconds
            while not condition():
                assert run.poll() is None and time.monotonic() < end, (tmp_path / "run.log").read_text()[
                    -3000:
                ]
                time.sleep(0.2)

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(f"{server}/-/ready", timeout=5):
                    return True
            except OSError:
                return False

        until(is_ready, 30)
        oldest = 'headway:version_lag_steps:max5m{phase="total", run="live"}'
        until(lambda: query("headway_learner_version") >= 10, 300)
        assert query("headway_max_version_lag_steps") == BOUND
        assert firing() & {LAG, STILL} == set()

        # A verifier that is slow on some responses: their groups grow old while the learner goes on with the others.
        (tmp_path / "slow").touch()
        until(lambda: LAG in firing(), 60)
        assert query(oldest) > BOUND
        (tmp_path / "slow").unlink()
        until(lambda: LAG not in firing() and query(oldest) <= BOUND, 60)

        # The engine stands still: no group, no step.
        engine = [each for each in psutil.Process(run.pid).children(recursive=True) if "VLLM" in each.name()]
        assert engine
        version = query("headway_learner_version")
        for process in engine:
            process.suspend()
        until(lambda: STILL in firing(), 60)
        for process in engine:
            process.resume()
        until(lambda: STILL not in firing(), 60)
        assert query("headway_learner_version") > version

        # The end of a run is none of its endpoint. Prometheus takes changed targets at most every five seconds.
        run.send_signal(signal.SIGINT)
        assert run.wait(100) == 130, (tmp_path / "run.log").read_text()[-3000:]
        end = time.monotonic() + 60
        while ask("query?query=up") or firing():
            assert time.monotonic() < end
            time.sleep(0.2)
