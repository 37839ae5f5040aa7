"""What `headway scale` does to a run while it trains: from one engine to three and back.

    python bench/scale.py

Twice: with tiny real engines, which share this machine's cores, so that three are not three times as fast; and with
engines that sleep (bench/overlap.py) on the same driver and Ray, where the rates must be 1 : 3 : 1. Prints the rate of
generated tokens, scraped from the metrics endpoint every second, in each phase; whether a group was dropped; whether a
stored rollout has a token from a version that did not exist when it was trained; and how many groups leaving engines
handed on. Exits 1 if something was lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from overlap import DECODE_S, own_ray, real_run, steps_of
from ray import cloudpickle

from headway.cluster.ledger import trained_groups
from headway.cluster.scenario import Scenario
from headway.core.config import Config, parse_config

BOUND = 2
WINDOW_S = 12
"""Of a phase, from when its engines serve."""
DEADLINE_S = 150.0
"""For a phase to begin, and for the run to end."""
SLEEPING = "--sleeping"
TOKENS = "headway_generation_tokens_total"
HANDED_BACK = "headway_groups_handed_back_total"


def headway(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "headway.cluster.cli", *map(str, arguments)]


def real(folder: Path) -> list[str]:
    """A run of a tiny model whose learner has little to do."""
    overrides = {
        "run.name": "real",
        "run.folder": folder,
        "run.steps": 1_000_000,
        "run.checkpoint_every": 0,
        "model.path": "tiny-random",
        "data.num_prompts": 2000,
        "sampling.group_size": 4,
        "sampling.max_new_tokens": 40,
        "algorithm.dynamic_sampling": "false",
        "lag.max_version_lag": BOUND,
        "learner.groups_per_step": 4,
        "generation.replicas": 1,
        "generation.max_concurrent_requests": 8,
        "generation.drain_s": 0,
        "metrics.port": 0,
    }
    return headway("train", "configs/tiny.yaml", *(f"{key}={value}" for key, value in overrides.items()))


def sleeping(folder: Path) -> list[str]:
    return [sys.executable, __file__, SLEEPING, str(folder)]


def sleep(folder: Path) -> None:
    """The run with engines that sleep: two groups at a time in each, half a second long, and a learner that is fast
    enough for four engines."""
    scenario = Scenario(
        length_median=0.5 / DECODE_S,
        length_sigma=0.0,
        prefill_s=0.0,
        decode_s=DECODE_S,
        decode_request_s=0.0,
        engine_start_s=1.0,
        update_s=0.02,
        pause_s=0.0,
        start_s=0.1,
        step_s=0.1,
        token_s=0.0,
        publish_s=0.02,
    )
    config: Config = parse_config(
        {
            "run": {"name": "sleeping", "folder": str(folder), "steps": 1_000_000, "checkpoint_every": 0},
            "sampling": {"group_size": 4, "max_new_tokens": 1000},
            "algorithm": {"dynamic_sampling": False},
            "lag": {"max_version_lag": BOUND},
            "learner": {"groups_per_step": 8},
            "generation": {"replicas": 1, "max_concurrent_requests": 8, "drain_s": 0},
            "verifiers": {"processes": 8},
            "metrics": {"port": 0, "host": "127.0.0.1"},
        }
    )
    run = real_run(config, scenario, folder)

    async def until_interrupted() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.request_stop)
        await run.execute()

    with own_ray():
        asyncio.run(until_interrupted())


def scrape(folder: Path) -> dict[str, float]:
    """Counters of the run by name, those of all labels together."""
    port = (folder / "metrics_port").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = {TOKENS: 0.0, HANDED_BACK: 0.0}
    for name in values:
        for line in text.splitlines():
            if line.partition("{")[0].partition(" ")[0] == name:
                values[name] += float(line.rsplit(" ", 1)[1])
    return values


class Training:
    """A run in a process of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=Path(__file__).resolve().parents[1],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Returns how long it took (seconds)."""
        began = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() > began + DEADLINE_S:
                raise SystemExit(f"waited for {what} in vain:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def serve(self, engines: int) -> bool:
        """Whether so many engines serve, as of the last step."""
        if not (self.folder / "metrics.jsonl").exists() or not (steps := steps_of(self.folder)):
            return False
        versions = steps[-1]["engine_versions"]
        return len(versions) == engines and None not in versions

    def scale(self, engines: int) -> float:
        """Returns how long it took until they served (seconds)."""
        began = time.monotonic()
        command = headway("scale", f"generation={engines}", "--run", self.folder, "--json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode or json.loads(done.stdout)["target"] != engines:
            raise SystemExit(f"headway scale: {done.stdout}{done.stderr}")
        self.wait_for(lambda: self.serve(engines), f"{engines} engines")
        return time.monotonic() - began

    def rates(self) -> list[float]:
        """Tokens per second, second by second."""
        seen = [(time.monotonic(), scrape(self.folder)[TOKENS])]
        for _ in range(WINDOW_S):
            time.sleep(1.0)
            seen.append((time.monotonic(), scrape(self.folder)[TOKENS]))
        return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(seen)]


def measure(command: list[str], folder: Path) -> list[str]:
    """Prints what happened; returns what went wrong."""
    training = Training(command, folder)
    try:
        training.wait_for(lambda: training.serve(1), "the first step")
        found = [training.rates()]
        up_s = training.scale(3)
        found.append(training.rates())
        down_s = training.scale(1)
        found.append(training.rates())
        handed_back = scrape(folder)[HANDED_BACK]
        training.process.send_signal(signal.SIGINT)
        training.process.wait(DEADLINE_S)
    finally:
        if training.process.poll() is None:
            training.process.kill()
    means, medians = ([of(rates) for rates in found] for of in (statistics.fmean, statistics.median))
    spread = ", ".join(f"{engines} engine(s) {means[n]:,.0f}" for n, engines in enumerate((1, 3, 1)))
    print(
        f"{folder.name}: tokens/s with {spread}: 1 : {means[1] / means[0]:.2f} : {means[2] / means[0]:.2f} (medians of the "
        f"seconds 1 : {medians[1] / medians[0]:.2f} : {medians[2] / medians[0]:.2f}); three served "
        f"{up_s:.1f} s after they were asked for, one {down_s:.1f} s",
        flush=True,
    )
    for rates in found:
        print("   ", " ".join(f"{rate:,.0f}" for rate in rates))
    return check(folder, handed_back)


def check(folder: Path, handed_back: float) -> list[str]:
    faults = []
    steps: list[dict[str, Any]] = steps_of(folder)
    dropped = steps[-1]["dropped"]
    if dropped:
        faults.append(f"{folder.name}: groups were dropped: {dropped}")
    trained = trained_groups(folder / "ledger.jsonl")
    per_step = len(trained) // len(steps)
    if sorted(trained) != list(range(per_step * len(steps))):
        faults.append(f"{folder.name}: the trained groups are not the first {per_step * len(steps)}")
    lags, mixed = Counter[int](), 0
    for path in sorted((folder / "rollouts").iterdir()):
        table = pq.read_table(path, columns=["version_spans"])
        at = int((table.schema.metadata or {})[b"version"]) - 1
        for spans in table.column("version_spans").to_pylist():
            lags[at - min(span["version"] for span in spans)] += 1
            mixed += len(spans) > 1
            if any(not 0 <= at - span["version"] <= BOUND for span in spans):
                faults.append(f"{folder.name}: {path.name} was trained at {at}, with tokens of {spans}")
    print(
        f"    {len(steps)} steps, {len(trained)} groups, dropped {dropped or 0}, handed on by leaving engines {handed_back:.0f}; "
        f"responses by lag {dict(sorted(lags.items()))}, of several versions {mixed}",
        flush=True,
    )
    return faults


def main() -> None:
    if sys.argv[1:2] == [SLEEPING]:
        cloudpickle.register_pickle_by_value(sys.modules["overlap"])
        sleep(Path(sys.argv[2]))
        return
    faults = []
    with tempfile.TemporaryDirectory(prefix="headway-scale-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        faults += measure(sleeping(folder), folder / "sleeping")
        faults += measure(real(folder), folder / "real")
    print("\n".join(faults) or "nothing lost")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
