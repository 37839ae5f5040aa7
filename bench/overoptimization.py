"""What PPO buys with KL: the reward model's score and the truth, with and without a price on the KL to the reference.

    python bench/overoptimization.py [--steps 150] [--folder runs] [--plot docs/images/overoptimization.svg]

Needs the first two stages of configs/rlhf in `--folder` (`make demo-rlhf`). Runs the third one twice, with beta 0 and
beta 0.05, prints both every ten steps, and draws them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BETAS = (0.0, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    found = {beta: run(beta, options.steps, options.folder) for beta in BETAS}
    for beta, steps in found.items():
        print(f"beta {beta}:\n  steps      score   right   KL to the reference (nats per token)")
        for start in range(0, len(steps), 10):
            part = steps[start : start + 10]
            kls = [step["kl_reference"] for step in part if step["kl_reference"] is not None]
            print(
                f"  {start + 1:>3}-{start + len(part):<4}  {mean(part, 'score'):>7.3f} {mean(part, 'right'):>7.3f}   "
                f"{sum(kls) / len(kls):.4f}"
            )
    if options.plot:
        draw(found, options.plot)


def run(beta: float, steps: int, folder: Path) -> list[dict[str, Any]]:
    name = f"overoptimization-{beta:g}"
    model, reward = folder / "rlhf-sft" / "model", folder / "rlhf-reward-model" / "model"
    subprocess.run(
        [
            *(
                sys.executable,
                "-P",
                "-m",
                "headway.cluster.cli",
                "train",
                "configs/rlhf/ppo.yaml",
                "--overwrite",
            ),
            *(f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}", "metrics.port=0"),
            *(f"model.path={model}", f"reward_model.path={reward}", f"critic.path={reward}"),
            *(f"data.source={folder / 'rlhf-data' / 'prompts.jsonl'}", f"algorithm.kl_coef={beta}"),
            "learner.learning_rate=5e-4",
        ],
        check=True,
        stdout=sys.stderr,
    )
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def mean(steps: list[dict[str, Any]], part: str) -> float:
    return sum(step["reward_parts"][part] for step in steps) / len(steps)


def draw(found: dict[float, list[dict[str, Any]]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3))
    for axes, (beta, steps) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        windows = [steps[start : start + 5] for start in range(0, len(steps), 5)]
        x = [window[-1]["version"] for window in windows]
        axes.plot(x, [mean(window, "score") for window in windows], label="score of the reward model")
        axes.plot(x, [mean(window, "right") for window in windows], label="right answers")
        axes.set_title(f"beta {beta:g}" + (": nothing holds the policy" if not beta else ""))
        axes.set_xlabel("optimizer steps")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
