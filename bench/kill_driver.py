"""A run whose driver is killed again and again, against one that nobody disturbed.

    python bench/kill_driver.py [KILLS] [STEPS] [SEED]

Both train the same small model at lag 0 with one engine in float32, where a run should repeat. The driver gets SIGKILL
at KILLS (20) random moments - while it starts, between steps, and while a checkpoint is written - and is started again
with --resume. Prints a line per kill, what each left behind, and at the end how the two runs differ: trained groups,
rollouts step by step, weights. Exits 1 if they do, or if anything is left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from uuid import uuid4

import numpy as np
from safetensors.numpy import load_file

from headway.cluster.ledger import trained_groups
from headway.core import rollouts
from headway.learner.checkpoint import newest_complete

SETTINGS = [
    "model.dtype=float32",
    "lag.max_version_lag=0",
    "generation.replicas=1",
    "learner.groups_per_step=8",
    "sampling.group_size=8",
    "sampling.max_new_tokens=32",
    "algorithm.dynamic_sampling=false",
    "data.num_prompts=1000",
    "run.checkpoint_every=3",
    "metrics.port=0",
]
START_DEADLINE_S = 300.0
END_DEADLINE_S = 600.0
GONE_DEADLINE_S = 90.0
"""For every process of a killed driver to end by itself."""
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Of Ray. When their node is killed they try for a minute to report it to whoever was killed with it."""
LAST_TRIES = 3
"""To run to the end undisturbed."""
LONGEST_DELAY_S = 1.5
"""From the first step of a session to the kill."""
SHARED = Path("/dev/shm")
MARK = "HEADWAY_BENCH_MARK"
COLUMNS = (
    "group_id",
    "prompt_ids",
    "response_ids",
    "version_spans",
    "behavior_logprobs",
    "reward",
    "advantages",
)


def inherited(mark: str) -> set[int]:
    """Processes with this mark in their environment: a driver, its Ray, its actors and their children."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def title(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((Path(word.decode()).name for word in words if not word.startswith(b"-")), "")[:24].strip()


def mapped(processes: set[int]) -> set[Path]:
    """Files in shared memory that these processes have mapped."""
    inodes = set()
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        inodes |= {int(line.split(maxsplit=5)[4]) for line in lines}
    found = set()
    for path in SHARED.iterdir():
        try:
            if path.stat().st_ino in inodes:
                found.add(path)
        except FileNotFoundError:
            continue
    return found


def wait_for(condition: Callable[[], bool], deadline_s: float, pause_s: float = 0.1) -> bool:
    end = time.monotonic() + deadline_s
    while not (fulfilled := condition()) and time.monotonic() < end:
        time.sleep(pause_s)
    return fulfilled


class Driver:
    """One `headway train` of a run, from its start to its end. The next one is started before all processes of the last
    one are gone, as a person or a job manager would."""

    def __init__(self, folder: Path, steps: int, number: int) -> None:
        """`folder`: of the run."""
        self.folder, self.number, self.mark = folder, number, uuid4().hex
        self.gone_s: float | None = None
        """From the kill to the end of the last process but Ray's agents,"""
        self.last = ""
        """which that was,"""
        self.agents_gone_s: float | None = None
        """and to the end of all."""
        resume = ["--resume"] if (self.folder / "config.json").exists() else []
        overrides = [*SETTINGS, f"run.folder={self.folder.parent}", f"run.name={self.folder.name}"]
        command = [sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/tiny.yaml"]
        self.log = folder.parent / f"{folder.name}-{number:02d}.log"
        temporary = self.folder.parent / "t"
        temporary.mkdir(exist_ok=True)
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self.began, self.began_at = time.monotonic(), time.time()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *overrides, f"run.steps={steps}", *resume],
                cwd=Path(__file__).resolve().parents[1],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def has_stepped(self) -> bool:
        return self.has_ended or bool(re.search(r"step +\d+/", self.said))

    @property
    def version(self) -> int:
        """Of the last step that it showed, or that it resumed at."""
        found = re.findall(r"step +(\d+)/|resumed at version (\d+)|checkpoint (\d+) in", self.said)
        return max((int(number) for match in found for number in match if number), default=0)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint of its own is half written."""
        for draft in (self.folder / "checkpoints").glob(".version-*.partial"):
            try:
                if draft.stat().st_ctime > self.began_at:
                    return True
            except FileNotFoundError:
                continue
        return False

    def doing(self) -> str:
        if self.saves:
            return "writes a checkpoint"
        lines = [line.strip() for line in self.said.splitlines() if re.match(r" *[\d.]+ s  ", line)]
        last = re.sub(r"^[\d.]+ s +", "", lines[-1]) if lines else "imports"
        return f"after '{last.partition('  ')[0] if last.startswith('step') else last}'"[:60]

    def kill(self) -> set[Path]:
        """Returns the files in shared memory that its processes had mapped."""
        files = mapped(inherited(self.mark))
        self.process.kill()
        self.process.wait()
        self.watching = Thread(target=self._watch)
        self.watching.start()
        return files

    def _watch(self) -> None:
        killed = time.monotonic()
        while time.monotonic() < killed + GONE_DEADLINE_S:
            left = {title(pid) for pid in inherited(self.mark)} - {""}
            if left - AGENTS:
                self.last = " ".join(sorted(left - AGENTS))
            elif self.gone_s is None:
                self.gone_s = time.monotonic() - killed
            if not left:
                self.agents_gone_s = time.monotonic() - killed
                return
            time.sleep(0.25)


def moments(number: int, start_s: float, chance: random.Random) -> list[tuple[str, float]]:
    """What to wait for before each kill, and how much longer (seconds)."""
    starting, saving = round(number * 0.25), round(number * 0.25)
    found = [("start", chance.uniform(0.0, start_s)) for _ in range(starting)]
    found += [("save", chance.uniform(0.0, 0.15)) for _ in range(saving)]
    found += [("step", chance.uniform(0.0, LONGEST_DELAY_S)) for _ in range(number - starting - saving)]
    chance.shuffle(found)
    return found


def disturbed(folder: Path, steps: int, kills: int, start_s: float, chance: random.Random) -> list[str]:
    """Runs to the end under kills; returns what is wrong."""
    faults: list[str] = []
    touched: set[Path] = set()
    drivers: list[Driver] = []
    try:
        for number, (event, delay_s) in enumerate(moments(kills, start_s, chance), 1):
            driver = Driver(folder, steps, number)
            drivers.append(driver)
            match event:
                case "step":
                    wait_for(lambda driver=driver: driver.has_stepped, START_DEADLINE_S, 0.02)
                case "save":
                    wait_for(lambda driver=driver: driver.has_ended or driver.saves, START_DEADLINE_S, 0.002)
            time.sleep(delay_s)
            if driver.has_ended:
                faults.append(f"session {number} ended by itself with {driver.process.returncode}")
                print(f"kill {number:>2}: {faults[-1]}: {driver.said[-300:].strip()}", flush=True)
                if driver.process.returncode:
                    driver.kill()
                    continue
                break
            doing, version, lived_s = driver.doing(), driver.version, time.monotonic() - driver.began
            touched |= driver.kill()
            newest = newest_complete(folder / "checkpoints")
            print(
                f"kill {number:>2}: {lived_s:5.1f} s after its start, at version {version:>2}, {doing}; goes on from "
                f"{newest.name if newest else 'the start'}; {len(shared(folder))} files of the run in /dev/shm",
                flush=True,
            )
        for number in range(kills + 1, kills + 1 + LAST_TRIES):
            driver = Driver(folder, steps, number)
            drivers.append(driver)
            wait_for(lambda driver=driver: driver.has_ended, START_DEADLINE_S + END_DEADLINE_S)
            if not driver.process.returncode:
                break
            faults.append(f"session {number} ended by itself with {driver.process.returncode}")
            print(f"{faults[-1]}: {driver.said[-300:].strip()}", flush=True)
            driver.kill()
        gone = []
        for killed in drivers[:-1]:
            killed.watching.join()
            if killed.gone_s is None or killed.agents_gone_s is None:
                faults.append(f"after session {killed.number} lived on: {killed.last or 'agents of Ray'}")
            else:
                gone.append((killed.gone_s, killed.last, killed.agents_gone_s))
        if gone:
            gone_s, last, _ = max(gone)
            print(
                f"processes gone {statistics.median(s for s, _, _ in gone):.1f} s after a kill in the middle, {gone_s:.1f} s at "
                f"most (last: {last}), Ray's own agents after {max(s for *_, s in gone):.0f} s at most"
            )
        left = sorted(path.name for path in touched | shared(folder) if path.exists())
        print(f"files of its engines in /dev/shm at the end: {len(left)} {' '.join(left[:8])}")
        if left:
            faults.append(f"{len(left)} files were left in /dev/shm")
    finally:
        for driver in drivers:
            end_all(driver.mark)
    return faults


def shared(folder: Path) -> set[Path]:
    return set(SHARED.glob(f"headway-{folder.name}-*"))


def end_all(mark: str) -> None:
    for pid in inherited(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def undisturbed(folder: Path, steps: int) -> float:
    """Runs to the end; returns how long it took to the first step (seconds)."""
    driver = Driver(folder, steps, 0)
    try:
        wait_for(lambda: driver.has_stepped, START_DEADLINE_S)
        start_s = time.monotonic() - driver.began
        wait_for(lambda: driver.has_ended, END_DEADLINE_S)
        if driver.process.returncode != 0:
            raise SystemExit(
                f"the undisturbed run ended with {driver.process.returncode}:\n{driver.said[-2000:]}"
            )
        print(
            f"undisturbed: first step after {start_s:.0f} s, {steps} steps in {time.monotonic() - driver.began:.0f} s",
            flush=True,
        )
        return start_s
    finally:
        end_all(driver.mark)


def compare(one: Path, other: Path, steps: int) -> list[str]:
    """How two runs differ; prints it."""
    faults = []
    trained = [trained_groups(folder / "ledger.jsonl") for folder in (one, other)]
    alike = trained[0] == trained[1]
    print(
        f"trained groups: {len(trained[0])} and {len(trained[1])}, "
        f"{'the same in the same steps' if alike else 'NOT the same'}"
    )
    if not alike:
        faults.append("the runs trained other groups")
    counts = [len((folder / "metrics.jsonl").read_text().splitlines()) for folder in (one, other)]
    if counts != [steps, steps]:
        faults.append(f"metrics.jsonl has {counts} lines, {steps} steps were asked for")
    for column in COLUMNS:
        differing = [step for step in range(1, steps + 1) if not same(one, other, step, column)]
        if differing:
            print(f"{column}: {len(differing)} of {steps} steps differ, first {differing[0]}")
            if column in ("group_id", "prompt_ids", "response_ids"):
                faults.append(f"{column} differs from step {differing[0]} on")
    weights = []
    for folder in (one, other):
        newest = newest_complete(folder / "checkpoints")
        assert newest is not None, folder
        files = sorted((newest / "learner" / "model").glob("*.safetensors"))
        weights.append({name: value for file in files for name, value in load_file(file).items()})
        assert json.loads((newest / "state.json").read_text())["version"] == steps
    assert weights[0].keys() == weights[1].keys()
    apart = max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[0])
    print(f"weights after step {steps}: max |difference| {apart:.3g}")
    if apart:
        faults.append(f"weights differ by up to {apart:.3g}")
    return faults


def same(one: Path, other: Path, step: int, column: str) -> bool:
    tables = [
        rollouts.read_parquet(folder / "rollouts" / f"step-{step:06d}.parquet") for folder in (one, other)
    ]
    return tables[0].column(column).to_pylist() == tables[1].column(column).to_pylist()


def main() -> None:
    kills, steps, seed = (int(sys.argv[i]) if len(sys.argv) > i else n for i, n in ((1, 20), (2, 80), (3, 0)))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as name:
        parent = Path(name)
        whole, killed = parent / "whole", parent / f"killed-{os.getpid()}"
        start_s = undisturbed(whole, steps)
        faults = disturbed(killed, steps, kills, start_s, random.Random(seed))
        if newest_complete(killed / "checkpoints") == killed / "checkpoints" / f"version-{steps:08d}":
            faults += compare(whole, killed, steps)
        left = [path.name.rpartition("-")[0] or path.name for path in (parent / "t").iterdir()]
        print("left in the temporary folder:", {kind: left.count(kind) for kind in sorted(set(left))})
    print(f"{time.monotonic() - began:.0f} s; {'; '.join(faults) or 'no difference, nothing left'}")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
