"""A real SLURM of two emulated nodes on this machine runs the rendered batch script."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cluster.render_hosts import Size, Slurm, slurm
from headway.core.config import load_config
from headway.learner.checkpoint import newest_complete

pytestmark = pytest.mark.timeout(1200)

CONF = """\
ClusterName=headway
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=10 State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Environment for SLURM's commands on a cluster of the nodes n1 and n2, with 8 CPUs each."""
    with tempfile.TemporaryDirectory(prefix="hw-slurm-", dir="/tmp") as name:  # short: sockets lie in it
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        controller, first, second = free_ports(3)
        (folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname(),
                user=getpass.getuser(),
                folder=folder,
                controller=controller,
                first=first,
                second=second,
            )
        )
        env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        files = [
            f"--{option}={folder}/munge.{option.split('-')[0]}"
            for option in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        daemons = [["munged", "--foreground", "--force", *files], ["slurmctld", "-D", "-i"]]
        daemons += [["slurmd", "-D", "-N", node] for node in ("n1", "n2")]
        started: list[subprocess.Popen[bytes]] = []
        try:
            end = time.monotonic() + 60
            with (folder / "daemons.log").open("wb") as log:
                for daemon in daemons:
                    started.append(subprocess.Popen(daemon, env=env, stdout=log, stderr=log))
                    time.sleep(0.5)
                    while not (folder / "munge.socket").exists():  # what the others ask first
                        assert time.monotonic() < end, (folder / "daemons.log").read_text()
                        time.sleep(0.1)
            while (states := idle_nodes(env)) != {"n1", "n2"}:
                assert time.monotonic() < end, f"{states}: {(folder / 'daemons.log').read_text()}"
                time.sleep(0.2)
            yield env
        finally:
            for daemon in reversed(started):
                daemon.send_signal(signal.SIGTERM)
            for daemon in started:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def idle_nodes(env: dict[str, str]) -> set[str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    return {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")}


def rendered(root: Path, folder: Path, overrides: list[str]) -> Path:
    path = root / "configs" / "tiny.yaml"
    target = Slurm(size=Size(gpus=8), time="00:09:00", venv=Path(sys.prefix))
    script = folder / "headway.sbatch"
    script.write_text(slurm(load_config(path, overrides), target, path, overrides))
    return script


def sbatch(env: dict[str, str], script: Path, *arguments: str, stop_at: str = "") -> tuple[int, str]:
    """Exit code and output of the job, when it has ended. With `stop_at` it gets SLURM's signal of the end that is near
    once that text is in its output."""
    log = script.with_suffix(".log")
    command = ["sbatch", "--wait", f"--chdir={script.parent}", f"--output={log}", str(script), *arguments]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 500
    try:
        while job.poll() is None:
            assert time.monotonic() < end, log.read_text()
            if stop_at and log.exists() and stop_at in log.read_text():
                scancel = ["scancel", "--batch", "--signal=TERM", "--name=headway-tiny"]
                subprocess.run(scancel, env=env, check=True, timeout=30)
                stop_at = ""
            time.sleep(0.2)
    finally:
        job.kill()
        output = job.communicate()[0]
    return job.returncode, log.read_text() if log.exists() else output


def test_a_run_trains_on_the_nodes_of_a_batch_job_and_ends_before_its_time_with_a_checkpoint(
    root: Path, tmp_path: Path, cluster: dict[str, str], tiny_random: Path
) -> None:
    rows = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = [
        "model.path=tiny-random",
        f"data.source={tmp_path}/rows.jsonl",
        "data.verifier=numeric",
        f"run.folder={tmp_path}/runs",
        "run.steps=100000",
        "learner.groups_per_step=2",
        "learner.labels.pool=training",
        "sampling.max_new_tokens=8",
        "generation.replicas=1",
        "generation.labels.pool=sampling",
        "algorithm.dynamic_sampling=false",
        "metrics.port=0",
    ]
    script = rendered(root, tmp_path, overrides)
    assert "#SBATCH --nodes=2\n" in script.read_text()  # labels that contradict each other
    code, log = sbatch(cluster, script, "learner.warmup_steps=1", stop_at="2/100000")
    assert code == 130, log  # headway's own
    assert "stopped at version" in log
    run = tmp_path / "runs" / "tiny"
    assert (run / "report.html").exists() and newest_complete(run / "checkpoints")
    settings = json.loads((run / "config.json").read_text())
    assert settings["learner"]["warmup_steps"] == 1  # what sbatch was told goes to headway
    assert settings["generation"]["labels"] == {"pool": "sampling", "headway-generation": "here"}
    assert {file.name.rpartition("-")[2] for file in tmp_path.glob("*-ray-*.log")} == {"n1.log", "n2.log"}


def test_a_mistake_ends_the_job_at_once_with_the_exit_code_of_headway(
    root: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    code, log = sbatch(cluster, rendered(root, tmp_path, []), "run.stps=3")
    assert code == 2
    assert "unknown key 'run.stps'" in log and "run.steps" in log
    assert not list(tmp_path.glob("*-ray-*.log"))


def test_a_job_with_too_few_nodes_says_so_at_once(
    root: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    overrides = ["learner.labels.pool=training", "generation.labels.pool=sampling"]
    script = rendered(root, tmp_path, overrides)
    script.write_text(script.read_text().replace("#SBATCH --nodes=2", "#SBATCH --nodes=1"))
    code, log = sbatch(cluster, script)
    assert code == 2
    assert "needs 2 nodes, the job has 1" in log
