"""Reward against version lag for four corrections: `.venv/bin/python bench/lag.py [--steps 80] [--seeds 3] [--plot FILE]`.

One real engine and the real learner in one process, with the lag held at an exact number: the rollouts of step v are
sampled by the weights of version max(0, v - lag). Everything else is alike, prompts and sampling seeds included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.actors.generation import GenerationActor, GroupRequest
from headway.actors.verifier import VerifierWorker
from headway.core.config import Config, parse_config
from headway.core.prompts import Prompt, PromptStream, load_prompts
from headway.core.sections import Verifiers
from headway.core.weights import Manifest
from headway.learner.pretrained import model_folder
from headway.learner.publish import export, layout_of
from headway.learner.trainer import NonFiniteStep, Trainer

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"correction": "none"},
    "tis_token": {"correction": "tis_token"},
    "decoupled": {"correction": "is_token"},
    "mis_sequence": {
        "correction": "tis_token+mis_sequence",
        "mis_sequence_low": 0.8,
        "mis_sequence_high": 1.25,
    },
}
LAGS = (0, 4, 8, 16)
LAST = 10
"""Steps that a run is judged by."""


def settings(correction: str, seed: int, learning_rate: float) -> Config:
    return parse_config(
        {
            "run": {"name": "bench-lag", "seed": seed},
            "model": {"path": "tiny-adder", "dtype": "float32", "chat_template": False},
            "sampling": {"group_size": 8, "max_new_tokens": 48},
            "algorithm": {"ess_lr": False, "dynamic_sampling": False, **CORRECTIONS[correction]},
            "lag": {"max_version_lag": max(LAGS)},
            "learner": {
                "groups_per_step": 16,
                "learning_rate": learning_rate,
                "microbatch_tokens": 8192,
                "threads": 1,
            },
            # One engine serves many runs, and a version is only unique within one: no cache over versions' names.
            "generation": {
                "threads": 1,
                "max_model_len": 160,
                "max_concurrent_requests": 128,
                "prefix_caching": False,
            },
        }
    )


async def train(
    engine: GenerationActor,
    verifier: VerifierWorker,
    prompts: PromptStream,
    config: Config,
    lag: int,
    steps: int,
) -> list[float]:
    """Mean reward of the samples of every step."""
    trainer = Trainer(config, model_folder(config.model.path))
    layout = layout_of(trainer.model, "float32", 64 << 20)
    releases: list[tuple[Manifest, list[np.ndarray]]] = [export(trainer.model, layout, 0)]
    rewards: list[float] = []
    per_step = config.learner.groups_per_step

    async def group(number: int, prompt: Prompt):
        request = GroupRequest(
            group_id=number,
            prompt=prompt,
            group_size=config.sampling.group_size,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=config.sampling.max_new_tokens,
            deadline_s=120.0,
        )
        table = await engine.generate(request)
        return await asyncio.to_thread(verifier.score, table, prompt)

    for step in range(steps):
        manifest, buckets = releases[max(0, step - lag)]
        await engine.update_weights(manifest, *buckets)
        numbers = range(step * per_step, (step + 1) * per_step)
        tables = await asyncio.gather(*(group(number, prompts.at(number)) for number in numbers))
        rewards.append(
            statistics.fmean(
                r for table in tables for r in table.column("reward").to_pylist() if r is not None
            )
        )
        try:
            trainer.train(tables, step)
        except NonFiniteStep:
            return rewards + [0.0] * (steps - len(rewards))
        releases.append(export(trainer.model, layout, step + 1))
    return rewards


async def measure(steps: int, seeds: int, learning_rate: float, lags: list[int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    config = settings("none", 0, learning_rate)
    folder = model_folder(config.model.path)
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    prompts = load_prompts(
        "reasoning_gym:chain_sum", verifier="math", num_prompts=4000, seed=0, params=params
    )
    engine = GenerationActor(config, str(folder), 0)
    verifier = VerifierWorker(Verifiers(processes=1, timeout_s=5.0, memory_mib=1024))
    results = []
    try:
        await engine.start()
        for lag in lags:
            for correction in CORRECTIONS if lag else ["none"]:
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    run = settings(correction, seed, learning_rate)
                    rewards = await train(engine, verifier, PromptStream(prompts, seed), run, lag, steps)
                    result = {"lag": lag, "correction": correction, "seed": seed, "rewards": rewards}
                    results.append(result)
                    print(
                        f"lag {lag:>2}  {correction:<12}  seed {seed}  reward {statistics.fmean(rewards[-LAST:]):.3f}"
                        f"  best {max(rewards):.3f}",
                        flush=True,
                    )
    finally:
        verifier.close()
        await engine.shutdown()
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Mean over seeds (lowest to highest) of the reward over the last steps."""
    lags = sorted({result["lag"] for result in results})
    lines = [f"| correction | {' | '.join(f'lag {lag}' for lag in lags)} |", "|---" * (len(lags) + 1) + "|"]
    for correction in CORRECTIONS:
        cells = []
        for lag in lags:
            ends = final(results, lag, correction)
            cells.append(f"{statistics.fmean(ends):.2f} ({min(ends):.2f}–{max(ends):.2f})" if ends else "–")
        lines.append(f"| `{correction}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def final(results: list[dict[str, Any]], lag: int, correction: str) -> list[float]:
    """One reward per seed. At lag 0 every weight is 1 to within arithmetic, so one measurement stands for all."""
    return [
        statistics.fmean(result["rewards"][-LAST:])
        for result in results
        if result["lag"] == lag and result["correction"] == (correction if lag else "none")
    ]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    lags = sorted({result["lag"] for result in results})
    for number, correction in enumerate(CORRECTIONS):
        ends = [final(results, lag, correction) for lag in lags]
        means = [statistics.fmean(values) for values in ends]
        (line,) = axes.plot(lags, means, "o-", markersize=4, label=correction, zorder=3 + number)
        for lag, values in zip(lags, ends, strict=True):
            axes.plot([lag] * len(values), values, ".", color=line.get_color(), alpha=0.4)
    axes.set_xlabel("version lag, optimizer steps")
    axes.set_ylabel(f"mean reward of the last {LAST} steps")
    axes.set_xticks(lags)
    axes.grid(axis="y", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lags", type=int, nargs="*", default=list(LAGS))
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, help="Rewards of every step.")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.steps, arguments.seeds, arguments.learning_rate, arguments.lags))
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
