"""Rounds of preference training on pairs that the model makes itself. A round samples from the model of the round before,
makes pairs, and trains on them from that model, which is the reference too.

`spin` (arXiv 2401.01335): a demonstration is preferred to the model's own answers; its loss is DPO's, its lambda `beta`.
`self_rewarding` (arXiv 2401.10020): the model judges its own answers, and the best is preferred to the worst.

Of a round, its pairs, its checkpoints and its model are kept in `RUN/round-K`: what is there is not made again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from headway.actors.chat import encode
from headway.actors.generation import GenerationActor
from headway.actors.generation_rows import GroupRequest, all_of
from headway.actors.judge import JudgeActor
from headway.actors.later_verdicts import leave
from headway.cluster.offline import CALL_DEADLINE_S, MODEL, OfflineRun, prepare_rows
from headway.cluster.preflight import model_len, tokenizer_of
from headway.cluster.progress import say
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.watch import Waits
from headway.core.config import Config, dump_config
from headway.core.datasets import read_rows
from headway.core.errors import DataError, RolloutFailed, UserError
from headway.core.preferences import read_supervised
from headway.core.prompts import Prompt, PromptStream, content_of
from headway.learner import checkpoint
from headway.verifiers.judging import JUDGE, rubric_of
from headway.verifiers.pending import PENDING
from headway.verifiers.verdict import Verdict

Row = dict[str, Any]

PAIRS, SAMPLED = "pairs.jsonl", "sampled.json"
"""In a round's folder: its pairs, and how many samples there were and why some are in no pair."""
RUBRIC = (
    "Give one point for each of these that holds. The ANSWER has to do with the task. It covers a good part of what the "
    "task asks for. It gives what the task is basically about, so that it is of use. It is complete, clear and well ordered. "
    "It is as an expert would write it: right in every detail, with nothing superfluous."
)
TOP = 5
"""Points of that rubric."""
SHOWN_EVERY_S = 10.0


def prompts_of(config: Config) -> tuple[Prompt, ...]:
    """What the model is asked: for `spin` the prompts of demonstrations (`preferences.read_supervised`), which are their
    golds; for `self_rewarding` the column `data.prompt_field`, with the rubric of `data.verifier_params` or `RUBRIC`.
    Raises `DataError`."""
    source, column = config.data.source, config.data.prompt_field
    if config.offline.loop == "spin":
        return tuple(
            Prompt(prompt_id=str(number), content=row.prompt, gold=row.completion, verifier="")
            for number, row in enumerate(read_supervised(source))
        )
    context = {"rubric": RUBRIC, "rubric_scale": TOP} | config.data.verifier_params
    rubric_of(context)
    prompts: list[Prompt] = []
    for where, row in read_rows(source):
        if row.get(column) is None:
            raise DataError(
                f"{where} has no {column!r}, only {', '.join(map(repr, row))} (data.prompt_field)"
            )
        content = content_of(row[column], where=f"{where}: {column}")
        prompts.append(
            Prompt(prompt_id=str(len(prompts)), content=content, gold=None, verifier=JUDGE, context=context)
        )
    if not prompts:
        raise DataError(f"{source} holds no rows; it needs at least one prompt")
    return tuple(prompts)


# ---- pairs -------------------------------------------------------------------------------------------------


def pairs_of(prompt: Prompt, samples: Sequence[Row], left_out: Counter[str]) -> list[Row]:
    """Pairs from rows of the rollout table, as `preferences.read_pairs` reads them: with a gold, that and each sample;
    without one, the sample with the highest `reward` and the one with the lowest, of equal ones the first. What is in no
    pair is counted in `left_out` by its reason. White space around them makes no difference between answers."""
    texts = _answers(prompt, samples, left_out)
    asked = {"prompt": prompt.content}
    if prompt.gold is not None:
        return [{**asked, "chosen": prompt.gold, "rejected": text} for text in texts]
    scored = {text: row["reward"] for text, row in texts.items() if row["reward"] is not None}
    for row in texts.values():
        if row["reward"] is None:
            left_out[f"unscored ({row['verdict_reason']})"] += 1
    if len(scored) < 2:
        left_out["prompts with fewer than two scores"] += 1
        return []
    best, worst = (choose(scored, key=lambda text: scored[text]) for choose in (max, min))
    if scored[best] == scored[worst]:
        left_out["prompts whose samples all have the same score"] += 1
        return []
    scores = {"chosen_score": scored[best], "rejected_score": scored[worst]}
    return [{**asked, "chosen": best, "rejected": worst, **scores}]


def _answers(prompt: Prompt, samples: Sequence[Row], left_out: Counter[str]) -> dict[str, Row]:
    """The samples that can be in a pair, by their text."""
    found: dict[str, Row] = {}
    seen: set[str] = set()
    for row in samples:
        text = row["text"].strip()
        if row["truncated"]:
            left_out["cut off by sampling.max_new_tokens"] += 1
        elif not text:
            left_out["empty"] += 1
        elif prompt.gold is not None and text == prompt.gold.strip():
            left_out["equal to the demonstration"] += 1
        elif text in seen:
            left_out["equal to another sample"] += 1
        else:
            seen.add(text)
            found[row["text"]] = row
    return found


# ---- sampling ----------------------------------------------------------------------------------------------


class Sampler(GenerationActor):
    """An engine that serves its model folder from the start, and with `judge.model` one beside it that judges what it
    samples."""

    def __init__(self, config: Config, model_folder: str, replica: int) -> None:
        super().__init__(config, model_folder, replica)
        self._judge = JudgeActor(config, replica) if config.judge.model else None

    async def start(self) -> None:
        await super().start()
        await self.serve_loaded()
        if self._judge is not None:
            await self._judge.start()

    async def generate(self, request: GroupRequest, kept: pa.Table | None = None) -> pa.Table:
        table = await super().generate(request, kept)
        if self._judge is None:
            return table
        pending = {row: [Verdict(score=None, reason=PENDING)] for row in range(table.num_rows)}
        return await self._judge.score(leave(table, pending), request.prompt)

    async def shutdown(self) -> None:
        if self._judge is not None:
            await self._judge.shutdown()
        await super().shutdown()


def sampler_config(config: Config, model: Path, prompts: Sequence[Prompt]) -> Config:
    """For the engines of a round, which have the resources of `generation`. Raises `DataError`."""
    generation = config.generation
    if generation.max_model_len is None:
        tokenizer = tokenizer_of(model)
        longest = max(len(encode(tokenizer, p, chat_template=config.model.chat_template)) for p in prompts)
        generation = generation.model_copy(update={"max_model_len": model_len(config, longest)})
    judge = config.judge.model_copy(update={"model": None})
    if config.offline.loop == "self_rewarding":
        # Two engines with the same model share what one would have.
        half = generation.gpu_memory_utilization / 2
        generation = generation.model_copy(update={"gpu_memory_utilization": half})
        same = {"gpus": generation.gpus, "threads": generation.threads, "dtype": config.model.dtype}
        judge = judge.model_copy(update={"model": str(model), "gpu_memory_utilization": half, **same})
    return config.model_copy(update={"stage": "rl", "generation": generation, "judge": judge})


# ---- rounds ------------------------------------------------------------------------------------------------


def round_config(config: Config, number: int, model: Path) -> Config:
    """Of a round's training, which is an ordinary run of stage `preference` in a folder of its own."""
    folder = config.run_folder.resolve()
    run = config.run.model_copy(update={"folder": folder, "name": f"round-{number}"})
    return config.model_copy(
        update={
            "run": run,
            "model": config.model.model_copy(update={"path": str(model)}),
            "data": config.data.model_copy(update={"source": str(folder / run.name / PAIRS)}),
            "offline": config.offline.model_copy(update={"loop": "none"}),
        }
    )


@dataclass(kw_only=True)
class LoopRun:
    """`execute` goes through all rounds or to `request_stop`; the last round's model is then `RUN/model` too."""

    config: Config
    console: Console
    model_folder: Path
    """Of the first round."""
    prompts: PromptStream
    stopping: bool = False
    rounds_done: int = 0
    training: OfflineRun | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def version(self) -> int:
        """Optimizer steps of all rounds so far."""
        return self.rounds_done * self.config.run.steps + (self.training.version if self.training else 0)

    def header(self) -> None:
        """What this run is about to do."""
        config, offline = self.config, self.config.offline
        self.console.print(
            f"[bold]headway[/bold] {offline.loop} run '{config.run.name}' in {escape(str(config.run_folder))}: {offline.rounds} rounds of "
            f"{offline.loop_prompts} prompts x {config.sampling.group_size} samples and {config.run.steps} steps\n  model "
            f"{escape(str(self.model_folder))}, {len(self.prompts.prompts)} prompts from {escape(config.data.source)}",
            highlight=False,
        )

    def say(self, text: str) -> None:
        say(self.console, self.started, text)

    def request_stop(self) -> None:
        """Ends the run after the optimizer step in progress, with a checkpoint. A round's samples that are not pairs yet
        are sampled again."""
        self.stopping = True
        if self.training is not None:
            self.training.request_stop()

    async def execute(self) -> None:
        """Raises `UserError` for a round without any pair, and other `HeadwayError`s."""
        model = self.model_folder
        for number in range(self.config.offline.rounds):
            config = round_config(self.config, number, model)
            if (config.run_folder / MODEL).exists():
                self.say(f"round {number}: its model is there")
            elif not await self._round(number, config):
                return
            model, self.rounds_done, self.training = config.run_folder / MODEL, number + 1, None
        link = self.config.run_folder / MODEL
        draft = link.with_suffix(".partial")
        draft.unlink(missing_ok=True)
        draft.symlink_to(model.relative_to(self.config.run_folder.resolve()))
        draft.replace(link)
        self.say(f"model: {link}")

    async def _round(self, number: int, config: Config) -> bool:
        """False: it was stopped on the way."""
        folder, model = config.run_folder, Path(config.model.path)
        folder.mkdir(exist_ok=True)
        if (folder / PAIRS).exists():
            self.say(f"round {number}: its pairs are there")
        else:
            await self._make_pairs(number, folder, model)
        if self.stopping:
            return False
        train, held_out = prepare_rows(config, model, must_hold_out=False)
        (folder / "config.json").write_text(dump_config(config), encoding="utf-8")
        self.training = OfflineRun(
            config=config,
            model_folder=str(model),
            console=self.console,
            resume_from=checkpoint.newest_complete(folder / "checkpoints"),
            started=self.started,
            cluster_name=self.config.run.name,
        )
        self.training.header(train, held_out)
        await self.training.execute()
        return (folder / MODEL).exists()

    async def _make_pairs(self, number: int, folder: Path, model: Path) -> None:
        """Nothing is written when it was stopped. Raises `UserError` when there is no pair."""
        size = self.config.offline.loop_prompts
        prompts = {index: self.prompts.at(index) for index in range(number * size, (number + 1) * size)}
        groups, left_out = await self._sample(number, folder, model, prompts)
        if self.stopping:
            return
        pairs = [
            pair for index in sorted(groups) for pair in pairs_of(prompts[index], groups[index], left_out)
        ]
        num_samples = sum(map(len, groups.values()))
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "nothing"
        found = f"{len(pairs)} pairs of {num_samples} samples for {size} prompts; left out: {reasons}"
        if not pairs:
            raise UserError(
                f"round {number} has nothing to learn from, {found}; raise what cuts most of them off, sampling.temperature, "
                "sampling.group_size or offline.loop_prompts, or use the model of the round before"
            )
        about = {"prompts": size, "samples": num_samples, "pairs": len(pairs), "left_out": dict(left_out)}
        _replace(folder / SAMPLED, [about])
        _replace(folder / PAIRS, pairs)
        self.say(f"round {number}: {found}")

    async def _sample(
        self, number: int, folder: Path, model: Path, prompts: dict[int, Prompt]
    ) -> tuple[dict[int, list[Row]], Counter[str]]:
        """Samples by number of their prompt. The engines have ended, and their memory is free, when this returns."""
        config = sampler_config(self.config, model, list(prompts.values()))
        crew = RayCrew(config, folder, str(model), {**ROLES, "generation": Sampler})
        waits, sampling = Waits(), config.sampling
        groups: dict[int, list[Row]] = {}
        left_out: Counter[str] = Counter()
        room = asyncio.Semaphore(max(1, config.generation.max_concurrent_requests // sampling.group_size))
        deadline_s = config.lag.straggler_deadline_s + config.judge.deadline_s + CALL_DEADLINE_S
        shown_at = time.monotonic()

        async def within(awaitable: Awaitable[Any], what: str, stage: str, deadline_s: float) -> None:
            await waits.within(awaitable, who="driver", what=what, stage=stage, deadline_s=deadline_s)

        async def one(index: int, prompt: Prompt) -> None:
            nonlocal shown_at
            async with room:
                if self.stopping:
                    return
                request = GroupRequest(
                    group_id=index,
                    prompt=prompt,
                    group_size=sampling.group_size,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_new_tokens=sampling.max_new_tokens,
                    deadline_s=config.lag.straggler_deadline_s,
                )
                rows = crew.sample(0, request)
                try:
                    await within(crew.sampled(rows), f"prompt {prompt.prompt_id}", "group", deadline_s)
                except RolloutFailed as failure:
                    left_out[f"prompts not sampled ({failure.reason})"] += 1
                    return
                table: pa.Table = await rows.reference
            groups[index] = table.select(["text", "truncated", "reward", "verdict_reason"]).to_pylist()
            if time.monotonic() >= shown_at + SHOWN_EVERY_S:
                shown_at = time.monotonic()
                self.say(f"round {number}: {len(groups)} of {len(prompts)} prompts are sampled")

        self.say(f"round {number}: sampling from {model}")
        try:
            opening_s = crew.placement_deadline_s + 2 * config.generation.start_deadline_s
            await within(crew.start_engine(0), "the engine", "start", opening_s)
            shown_at = time.monotonic()
            await all_of(one(index, prompt) for index, prompt in prompts.items())
        finally:
            await within(crew.close(), "the engine to end", "start", CALL_DEADLINE_S)
        return groups, left_out


def _replace(path: Path, rows: Sequence[Row]) -> None:
    """Writes JSON lines; the file is there whole or not at all."""
    draft = path.with_suffix(".partial")
    with checkpoint.writing(path):
        draft.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        draft.replace(path)
