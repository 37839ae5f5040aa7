"""Processes are killed under a running job; the job goes on, and nothing is lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_run import steps_of, train, wait_for  # pyright: ignore[reportMissingImports]

from headway.cluster.ledger import trained_groups

pytestmark = pytest.mark.timeout(600)


def processes_of(log: Path) -> list[int]:
    """Processes that write to this log: an actor and its children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(log):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def kill(log: Path, title: str) -> None:
    pids = [p for p in processes_of(log) if title in Path(f"/proc/{p}/cmdline").read_text()]
    assert pids, f"no {title} writes to {log}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_killed_actors_are_replaced_and_every_prompt_is_trained_once(
    root: Path, tmp_path: Path, tiny_random: Path
) -> None:
    folder, steps = tmp_path / "tiny", 400
    command = train(root, tmp_path, "model.path=tiny-random", f"run.steps={steps}", "data.num_prompts=2000")
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= 3, process, "step 3")
        kill(folder / "logs" / "generation-0.log", "GenerationActor")
        kill(folder / "logs" / "verifiers-0.log", "VerifierWorker")
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "engine 0 is replaced" in output and "verifier 0 is replaced" in output
    trained = trained_groups(folder / "ledger.jsonl")
    assert sorted(trained) == list(range(4 * steps))
    assert all(0 <= lag <= 2 for step in steps_of(folder) for lag in step["lag"])
    assert steps_of(folder)[-1]["engine_versions"].count(None) == 0
    time.sleep(1)
    assert [p for log in (folder / "logs").iterdir() for p in processes_of(log)] == []
    assert not list(Path("/dev/shm").glob("headway-tiny-*"))
