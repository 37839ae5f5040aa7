"""Scores held-out prompts with the very verifier of training, on one engine in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.actors.generation import GenerationActor, GroupRequest
from headway.actors.judge import JudgeActor
from headway.actors.verifier import VerifierWorker
from headway.cluster.preflight import known_to_judge, preflight, prompts_of
from headway.core.config import Config, load_config
from headway.core.errors import ConfigError
from headway.core.prompts import Prompt
from headway.learner import checkpoint

HELD_OUT_SEED_OFFSET = 1_000_003  # generated tasks: another seed than any training epoch's


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result over `num_prompts` prompts with `samples` responses each."""

    model: str
    source: str
    num_prompts: int
    samples: int
    mean_score: float
    """Mean over scored responses; NaN without any."""
    num_unscored: int
    truncated_fraction: float
    reasons: dict[str, int]
    examples: list[dict[str, Any]]
    """prompt, gold, text, reward, reason of a few responses, right and wrong."""


def evaluation_config(target: str, config_path: Path | None, overrides: list[str]) -> tuple[Config, str]:
    """The configuration and model folder for a run folder, or for a model with `--config`. Raises `ConfigError`."""
    run_config = Path(target) / "config.json"
    try:
        is_run = run_config.is_file() and "run" in json.loads(run_config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{run_config} is not JSON: {error}") from error
    if is_run:
        config = load_config(config_path or run_config, overrides)
        return config, str(_newest_model(Path(target), load_config(run_config)))
    if config_path is None:
        raise ConfigError(
            f"{target} is no run folder (it holds no config.json of a run); for a model, say --config CONFIG"
        )
    return load_config(config_path, overrides), target


def _newest_model(folder: Path, config: Config) -> Path:
    """Of a run. Raises `ConfigError` when it has none, or none that answers."""
    if config.stage == "reward_model":
        raise ConfigError(f"run {folder} trained a reward model, which scores answers and gives none")
    finished = folder / "model"  # of other stages than rl, once they are done
    if (finished / "config.json").is_file():
        return finished
    # A loop has a folder for each round, which is an ordinary run.
    rounds = sorted(folder.glob("round-*"), key=lambda each: int(each.name.partition("-")[2]), reverse=True)
    for each in (folder, *rounds):
        newest = checkpoint.newest_complete(each / "checkpoints")
        if each != folder and (each / "model" / "config.json").is_file():
            return each / "model"
        if newest is not None:
            return newest / "learner" / "model"
    raise ConfigError(f"run {folder} has no complete checkpoint yet, so there is nothing to evaluate")


def held_out(config: Config) -> tuple[str, tuple[Prompt, ...]]:
    """The prompts that training does not see. Raises `ConfigError` when the configuration names none."""
    data = config.data
    if data.eval_source is not None:
        return data.eval_source, prompts_of(config, data.eval_source, config.run.seed)
    if data.source.startswith("reasoning_gym:"):
        return data.source, prompts_of(config, data.source, config.run.seed + HELD_OUT_SEED_OFFSET)
    raise ConfigError("data.eval_source is not set; name a file with held-out prompts")


def evaluate(config: Config, model: str, *, limit: int, samples: int, temperature: float) -> Evaluation:
    """Samples and scores; raises `UserError`s for what the configuration lacks."""
    if samples > 1 and temperature == 0:
        raise ConfigError(f"--samples={samples} with --temperature=0: greedy answers are all the same")
    source, prompts = held_out(config)
    prompts = prompts[:limit]
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model}),
            "data": config.data.model_copy(update={"source": source}),
        }
    )
    checked = preflight(config, prompts, lambda text: print(text, file=sys.stderr))
    rows = asyncio.run(_sample(checked.config, str(checked.model_folder), prompts, samples, temperature))
    scores = [row["reward"] for row in rows if row["reward"] is not None]
    by_score = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    return Evaluation(
        model=model,
        source=source,
        num_prompts=len(prompts),
        samples=samples,
        mean_score=sum(scores) / len(scores) if scores else float("nan"),
        num_unscored=len(rows) - len(scores),
        truncated_fraction=sum(row["truncated"] for row in rows) / len(rows),
        reasons=dict(Counter(row["verdict_reason"] for row in rows).most_common()),
        examples=[
            {key: row[key] for key in ("prompt", "gold", "text", "reward", "verdict_reason")}
            for row in [*by_score[-3:], *by_score[:3]]
        ],
    )


async def _sample(
    config: Config, model_folder: str, prompts: tuple[Prompt, ...], samples: int, temperature: float
) -> list[dict[str, Any]]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine = GenerationActor(config, model_folder, 0)
    judge = JudgeActor(config, 0) if known_to_judge(prompts) else None
    verifier = VerifierWorker(config.verifiers, judge is not None)
    room = asyncio.Semaphore(max(1, config.generation.max_concurrent_requests // samples))

    async def one(number: int, prompt: Prompt) -> list[dict[str, Any]]:
        async with room:
            table = await engine.generate(
                GroupRequest(
                    group_id=number,
                    prompt=prompt,
                    group_size=samples,
                    temperature=temperature,
                    top_p=config.sampling.top_p,
                    max_new_tokens=config.sampling.max_new_tokens,
                    deadline_s=config.lag.straggler_deadline_s,
                    environment=config.episodes,
                )
            )
        table = await asyncio.to_thread(verifier.score, table, prompt)
        if judge is not None:
            table = await judge.score(table, prompt)
        kept = table.select(["text", "reward", "verdict_reason", "truncated"]).to_pylist()
        return [{**row, "prompt": prompt.content, "gold": prompt.gold} for row in kept]

    try:
        await engine.start()
        await engine.serve_loaded()
        if judge is not None:
            await judge.start(known_to_judge(prompts))
        groups = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        return [row for group in groups for row in group]
    finally:
        verifier.close()
        await engine.shutdown()
        if judge is not None:
            await judge.shutdown()
