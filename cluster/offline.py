"""Stages that learn from rows that are there already: rows to tokens, then optimizer steps, evaluations and checkpoints.
The learner's ranks are the only group on GPUs."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from headway.actors.chat import answer_end, encode
from headway.actors.offline import HELD_OUT, TRAIN, OfflineActor, objective_of
from headway.cluster.exporter import Exporter
from headway.cluster.preflight import check_outputs, check_template, tokenizer_of, trained_positions
from headway.cluster.progress import say
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.record import keep_steps
from headway.cluster.report import reported
from headway.cluster.tracker import Tracker, opened
from headway.cluster.watch import Waits
from headway.core import preferences
from headway.core.config import Config, dump_config
from headway.core.errors import ActorDied, DataError, HeadwayError, Lost, Starved
from headway.core.metrics import Recorder
from headway.core.prompts import Prompt
from headway.learner import checkpoint
from headway.learner.offline import OfflineStats, PairIds, StepIds, labelled_ids, write_rows
from headway.learner.sft import Demonstration, write_demonstrations

CALL_DEADLINE_S = 60.0
CHECKPOINT_DEADLINE_S = 600.0
SHOWN_EVERY_S = 1.0
"""Small steps need no line each."""
MODEL = "model"
"""In the run folder: what was trained, once the run is done."""
T = TypeVar("T")


def prepare_rows(config: Config, folder: Path, *, must_hold_out: bool = True) -> tuple[int, int]:
    """Writes the rows of `data.source` into the run folder as token ids, those held out apart; returns how many there are of
    each. `folder`: the model's. Without `must_hold_out` too few prompts for that are all trained on. Raises `DataError`, and
    `ConfigError` for a model without the chat template that it needs."""
    check_outputs(config)
    tokenizer = tokenizer_of(folder)
    check_template(config, folder, tokenizer)
    end = answer_end(folder, tokenizer, chat_template=config.model.chat_template)

    def prompt_ids(content: Any) -> tuple[int, ...]:
        asked = Prompt(prompt_id="", content=content, gold=None, verifier="")
        return tuple(encode(tokenizer, asked, chat_template=config.model.chat_template))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_ids(text: str) -> tuple[int, ...]:
        """Ended once: texts that went through a chat template have their end already."""
        found = ids(text)
        return found if found[-1:] == (end,) else (*found, end)

    source, offline, seed = config.data.source, config.offline, config.run.seed
    sizes: list[int] = []

    def write(
        read: Callable[[str], Any], make: Callable[[Any], Any], store: Callable[[Any, Path], None]
    ) -> None:
        rows = read(source)
        train, held_out = preferences.split_by_prompt(rows, offline.held_out, seed, needed=must_hold_out)
        for name, part in ((TRAIN, train), (HELD_OUT, held_out)):
            sizes.append(len(part))
            if part:
                made = make(part)
                check_positions(config, folder, made)
                store(made, config.run_folder / name)

    if config.stage == "sft":
        write(
            preferences.read_supervised,
            lambda rows: [Demonstration(prompt_ids(r.prompt), [answer_ids(r.completion)]) for r in rows],
            write_demonstrations,
        )
    elif config.stage == "reward_model" and offline.reward == "process":

        def steps(row: preferences.Stepwise) -> StepIds:
            *before, last = row.steps
            pieces = [*map(ids, before), answer_ids(last)]  # where the last step of a response ends in a run
            ends = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
            response = tuple(token for piece in pieces for token in piece)
            return StepIds(
                prompt_ids=prompt_ids(row.prompt),
                response_ids=response,
                step_ends=tuple(ends),
                labels=row.labels,
            )

        write(preferences.read_stepwise, lambda rows: list(map(steps, rows)), write_rows)
    elif config.stage == "preference" and offline.objective == "kto":
        before: list[Any] = []

        def labelled(rows: Any) -> Any:
            asked = [(prompt_ids(r.prompt), answer_ids(r.completion), r.label) for r in rows]
            found = labelled_ids(asked, before)
            before.extend(asked)  # one prompt held out has no other beside it
            return found

        write(preferences.read_labelled, labelled, write_rows)
    else:
        write(
            preferences.read_pairs,
            lambda rows: [
                PairIds(
                    prompt_ids=prompt_ids(r.prompt),
                    chosen_ids=answer_ids(r.chosen),
                    rejected_ids=answer_ids(r.rejected),
                    margin=r.margin,
                )
                for r in rows
            ],
            write_rows,
        )
    train, held_out = sizes
    return train, held_out


def check_positions(config: Config, folder: Path, rows: Sequence[Any]) -> None:
    """Whether the model has a position for every token of every row. Raises `DataError`."""
    known = trained_positions(folder)
    lengths = [len(row.prompt_ids) + max(map(len, row.answers)) for row in rows]
    if known is not None and (longer := sum(length > known for length in lengths)):
        raise DataError(
            f"{longer} of {len(rows)} rows of {config.data.source} are longer than the {known} positions that "
            f"{config.model.path} knows (max_position_embeddings), up to {max(lengths)} tokens with the prompt; shorten them "
            "or leave them out"
        )


@dataclass(kw_only=True)
class OfflineRun:
    """`execute` trains to the last step or to `request_stop`, and writes `RUN/model` at the end."""

    config: Config
    model_folder: str
    console: Console
    resume_from: Path | None = None
    cluster_name: str | None = None
    """What the run is called on the cluster, where this name is the only one; None: as it is called."""
    stopping: bool = False
    version: int = 0
    port: int | None = None
    """Of the metrics endpoint, which a restart keeps."""
    tracker: Tracker | None = None
    started: float = field(default_factory=time.monotonic)
    _shown_at: float = -math.inf

    @property
    def folder(self) -> Path:
        """Of the run, for actors too, whose working directory is another."""
        return self.config.run_folder.resolve()

    def header(self, train: int, held_out: int) -> None:
        """What this run is about to do."""
        config = self.config
        self.console.print(
            f"[bold]headway[/bold] {objective_of(config)} run '{config.run.name}' in {escape(str(config.run_folder))}: "
            f"{config.run.steps} steps of {config.offline.rows_per_step} rows, {config.learner.replicas} learner rank(s), "
            f"learning rate {config.learner.learning_rate:g}\n  model {escape(self.model_folder)}, {train} rows from "
            f"{escape(config.data.source)}, {held_out} held out",
            highlight=False,
        )

    def say(self, text: str) -> None:
        say(self.console, self.started, text)

    def request_stop(self) -> None:
        """Ends the run after the optimizer step in progress, with a checkpoint."""
        self.stopping = True

    async def execute(self) -> None:
        """Trains. Goes on from the newest checkpoint when a rank died, `run.max_restarts` times. Raises `HeadwayError`."""
        own = self.config.run.name
        name = f"{self.cluster_name}/{own}" if self.cluster_name else own
        try:
            with opened(self.config, name, self.say) as self.tracker:
                await self._execute()
        finally:
            if (self.folder / "metrics.jsonl").exists():
                self.say(await asyncio.to_thread(reported, self.config.run_folder))

    async def _execute(self) -> None:
        self.totals = Exporter()
        run = self.config.run.model_copy(update={"name": self.cluster_name or self.config.run.name})
        for restart in range(self.config.run.max_restarts + 1):
            crew = RayCrew(
                self.config.model_copy(update={"run": run}),
                self.folder,
                self.model_folder,
                {**ROLES, "learner": OfflineActor},
            )
            try:
                await self._session(crew)
                return
            except (ActorDied, Lost) as failure:
                if restart == self.config.run.max_restarts:
                    raise HeadwayError(
                        f"{failure}; the run went on from its checkpoint {restart} times already (run.max_restarts); see "
                        "the logs in its folder, go on with --resume"
                    ) from failure
                self.resume_from = checkpoint.newest_complete(self.folder / "checkpoints")
                self.totals.apply([("headway_run_restarts_total", "", 1.0)])
                whence = self.resume_from.name if self.resume_from else "the start"
                self.say(
                    f"{failure}: going on from {whence} (restart {restart + 1} of {self.config.run.max_restarts})"
                )
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CALL_DEADLINE_S):
                        await crew.close()

    async def _session(self, crew: RayCrew) -> None:
        config = self.config
        self.recorder = Recorder()
        self.waits = Waits(self.recorder)
        opening_s = 2 * crew.placement_deadline_s + config.generation.start_deadline_s
        await self._call(crew.open(), "the learner to be placed", "start", opening_s)
        self.port = await self._call(crew.serve_metrics(self.port), "the metrics endpoint", "start")
        (self.folder / "metrics_port").write_text(str(self.port), encoding="utf-8")
        self.say(f"metrics at http://localhost:{self.port}/metrics")
        await self._call(
            crew.start_learner(), "the learner to start", "start", config.learner.step_deadline_s
        )
        self.version = 0
        if self.resume_from is not None:
            self.version = await self._call(
                crew.load(self.resume_from),
                f"{self.resume_from} to be loaded",
                "checkpoint",
                CHECKPOINT_DEADLINE_S,
            )
            self.say(f"resumed at version {self.version}")
        keep_steps(self.folder / "metrics.jsonl", self.version)
        if self.tracker is not None:
            self.tracker.go_on(self.version)
        saved = self.version if self.resume_from else -1
        offline, every = config.offline, config.run.checkpoint_every
        while self.version < config.run.steps and not self.stopping:
            began = time.monotonic()
            stats: OfflineStats = await self._ask(crew, "step", self.version)
            self.version = stats.version
            seconds = time.monotonic() - began
            held_out = None
            if self.version == config.run.steps or (
                offline.evaluate_every and self.version % offline.evaluate_every == 0
            ):
                held_out = await self._ask(crew, "evaluate")
            self._record(stats, held_out, seconds)
            with suppress(ActorDied, Starved):
                await self._call(crew.show_metrics(self.totals.state()), "the metrics endpoint", "metrics")
            if every and self.version % every == 0:
                await self._checkpoint(crew)
                saved = self.version
        if saved != self.version:
            await self._checkpoint(crew)
        if self.version == config.run.steps:
            await self._finish(crew)

    async def _ask(self, crew: RayCrew, method: str, *args: Any) -> Any:
        deadline_s = self.config.learner.step_deadline_s
        what = f"the learner ({method} at version {self.version})"
        try:
            return await self._call(crew.ask_learner(method, *args), what, "train", deadline_s)
        except Starved as failure:
            raise Lost(str(failure)) from failure

    async def _call(
        self, awaitable: Awaitable[T], what: str, stage: str, deadline_s: float = CALL_DEADLINE_S
    ) -> T:
        return await self.waits.within(awaitable, who="driver", what=what, stage=stage, deadline_s=deadline_s)

    async def _checkpoint(self, crew: RayCrew) -> None:
        draft = checkpoint.begin(self.folder / "checkpoints", self.version)
        await self._call(crew.save(draft), "the learner to save", "checkpoint", CHECKPOINT_DEADLINE_S)
        with checkpoint.writing(draft):
            (draft / "state.json").write_text(json.dumps({"version": self.version}), encoding="utf-8")
            (draft / "config.json").write_text(dump_config(self.config), encoding="utf-8")
        await asyncio.to_thread(checkpoint.commit, draft)
        self.say(f"checkpoint {self.version}")

    async def _finish(self, crew: RayCrew) -> None:
        """A reward model's scale needs the rows held out, so what a checkpoint holds is not it."""
        target = self.folder / MODEL
        draft = target.with_suffix(".partial")
        for folder in (target, draft):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        share = await self._ask(crew, "finish", str(draft))
        draft.rename(target)
        if share is not None:
            self.say(
                f"empty and filler answers score at least as high as right ones for {share:.1%} of the prompts"
            )
        self.say(f"model: {target}")

    def _record(self, stats: OfflineStats, held_out: OfflineStats | None, seconds: float) -> None:
        """Metrics, one JSON line in `metrics.jsonl`, and one for people."""
        recorder = self.recorder
        recorder.set("headway_learner_version", stats.version)
        recorder.observe("headway_step_seconds", [seconds], label="total")
        recorder.inc("headway_trained_tokens_total", stats.num_tokens)
        recorder.set("headway_last_step_timestamp_seconds", time.time())
        if stats.grad_norm is not None and stats.learning_rate is not None:
            recorder.set("headway_grad_norm", stats.grad_norm)
            recorder.set("headway_learning_rate", stats.learning_rate)
        parts: dict[str, dict[str, float]] = {}
        for label, each in (("train", stats), ("held_out", held_out)):
            if each is None:
                continue
            recorder.set("headway_offline_loss", each.loss, label=label)
            parts[label] = {"loss": each.loss}
            if each.preference is not None:
                recorder.set("headway_preference_accuracy", each.preference.accuracy, label=label)
                recorder.set("headway_preference_margin", each.preference.margin, label=label)
                parts[label] |= {"accuracy": each.preference.accuracy, "margin": each.preference.margin}
        self.totals.apply(recorder.drain())
        finite = {
            label: {name: value if math.isfinite(value) else None for name, value in part.items()}
            for label, part in parts.items()
        }
        time_s = time.monotonic() - self.started
        record = {
            "version": stats.version,
            "time_s": time_s,
            "seconds": seconds,
            "grad_norm": stats.grad_norm,
            **finite,
        }
        path = self.folder / "metrics.jsonl"
        with checkpoint.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.tracker is not None:
            self.tracker.step(record)
        is_last = stats.version == self.config.run.steps
        if held_out is None and not is_last and time.monotonic() < self._shown_at + SHOWN_EVERY_S:
            return
        self._shown_at = time.monotonic()
        shown = "  ".join(
            f"{label.replace('_', ' ')} "
            + " ".join(f"{name} {value:.3f}" for name, value in part.items() if math.isfinite(value))
            for label, part in parts.items()
        )
        self.say(
            f"step {stats.version:>4}/{self.config.run.steps}  {shown}  grad {stats.grad_norm or 0:.2f}  {seconds:.1f} s"
        )
