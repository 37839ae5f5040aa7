"""Every preset on the small task, asynchronously: `.venv/bin/python bench/presets.py [--steps 60] [PRESET ...]`.

Each is a whole run of `headway train configs/tiny.yaml` with one engine, 8 groups of 8 a step, one seed, and the
preset's own choices; the learning rate is the same for all and nothing is tuned. Reward is that of all samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.core.presets import PRESETS

AGENTS = ['data.agents={solver: "{prompt}", checker: "{solver}\\n{prompt}"}']
EXTRA = {
    "magrpo": AGENTS,
    "dr_mas": AGENTS,
    "vineppo": ["algorithm.step_separator=' '", "algorithm.branches=2", "algorithm.max_steps=3"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("presets", nargs="*")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    print("| preset | reward, first 5 steps | last 10 | lag, mean | ESS, mean | seconds/step |", flush=True)
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.presets or PRESETS:
            print(row(preset, arguments.steps, Path(folder)), flush=True)


def row(preset: str, steps: int, folder: Path) -> str:
    overrides = [
        f"algorithm.preset={preset}",
        f"run.name={preset}",
        f"run.folder={folder}",
        f"run.steps={steps}",
        "learner.groups_per_step=8",
        "run.checkpoint_every=0",
        "run.save_rollouts=false",
        "generation.replicas=1",
        "reference.threads=1",
        "critic.threads=1",
        "metrics.port=0",
        *EXTRA.get(preset, []),
    ]
    command = [sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/tiny.yaml", *overrides]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        return f"| `{preset}` | failed after {time.monotonic() - began:.0f} s: {done.stderr.strip()[-200:]} |"
    records = [json.loads(line) for line in (folder / preset / "metrics.jsonl").read_text().splitlines()]

    def mean(key: str, part: slice) -> float:
        values = [record[key] for record in records[part] if record[key] is not None]
        return sum(values) / len(values)

    lags = [lag for record in records for lag in record["lag"]]
    seconds = (records[-1]["time_s"] - records[4]["time_s"]) / (len(records) - 5)
    return (
        f"| `{preset}` | {mean('sampled_reward_mean', slice(0, 5)):.2f} | "
        f"{mean('sampled_reward_mean', slice(-10, None)):.2f} | {sum(lags) / len(lags):.1f} | "
        f"{mean('importance_ess_fraction', slice(None)):.3f} | {seconds:.2f} |"
    )


if __name__ == "__main__":
    main()
