"""From a configuration to a run that is over: checks, folder, Ray, the run itself, its report."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from headway.actors.offline import HELD_OUT, TRAIN
from headway.cluster import loops
from headway.cluster.joining import connect, disconnect
from headway.cluster.offline import OfflineRun, prepare_rows
from headway.cluster.preflight import (
    cautions,
    check_outputs,
    encode_demonstrations,
    known_to_judge,
    made_model,
    preflight,
    prompts_of,
    versions_of,
)
from headway.cluster.progress import Progress
from headway.cluster.ray_crew import RayCrew
from headway.cluster.report import reported
from headway.cluster.room import check_resources
from headway.cluster.run import Run
from headway.cluster.run_folder import check_same_inputs
from headway.core.config import Config, dump_config
from headway.core.prompts import PromptStream
from headway.core.prompts import fingerprint as fingerprint_of_prompts
from headway.learner.checkpoint import passed_over
from headway.learner.pretrained import fingerprint as fingerprint_of_model


class Stoppable(Protocol):
    version: Any
    stopping: bool

    def execute(self) -> Coroutine[Any, Any, None]: ...
    def request_stop(self) -> None: ...
    def say(self, text: str) -> None: ...


def train_policy(config: Config, console: Console, *, checkpoint: Path | None, resume: bool) -> int | None:
    """A run of stage `rl`. Returns the version at which it was interrupted; None when it is done."""
    with Progress(config, console) as progress:
        progress.say("checking model, data and golds")
        prompts = prompts_of(config, config.data.source, config.run.seed)
        checked = preflight(config, prompts, progress.say)
        config = checked.config
        encode_demonstrations(config, checked.model_folder)
        others = {
            "judge.model": config.judge.model,
            "reward_model.path": config.reward_model.path,
            "reference.path": config.reference.path,
        }
        inputs = {
            "model.path": fingerprint_of_model(checked.model_folder),
            "data.source": fingerprint_of_prompts(prompts),
            "the verifiers": versions_of(prompts),
            **{key: fingerprint_of_model(Path(folder)) for key, folder in others.items() if folder},
        }
        _settle(config, inputs, resume=resume, say=progress.say)
        progress.header(config, num_prompts=len(prompts), model=str(checked.model_folder))
        run = Run(
            config=config,
            crew=lambda: RayCrew(
                config, config.run_folder.resolve(), str(checked.model_folder), known=known_to_judge(prompts)
            ),
            prompts=PromptStream(prompts, config.run.seed),
            longest_prompt=checked.longest_prompt,
            progress=progress,
            resume_from=checkpoint,
        )
        connect(config)
        try:
            check_resources(config)
            return _executed(run)
        finally:
            if (config.run_folder / "metrics.jsonl").exists():
                console.print(reported(config.run_folder), highlight=False, markup=False)
            disconnect()


def train_offline(config: Config, console: Console, *, checkpoint: Path | None, resume: bool) -> int | None:
    """A run of any other stage. Returns as `train_policy`."""
    run = OfflineRun(config=config, model_folder="", console=console, resume_from=checkpoint)
    for caution in cautions(config):
        run.say(f"warning: {caution}")
    run.say("checking model and data")
    folder = made_model(config.model.path, run.say)
    run.model_folder = str(folder)
    train, held_out = prepare_rows(config, folder)
    inputs = {
        "model.path": fingerprint_of_model(folder),
        "data.source": "/".join(_digest(config.run_folder / name) for name in (TRAIN, HELD_OUT)),
    }
    _settle(config, inputs, resume=resume, say=run.say)
    run.header(train, held_out)
    connect(config)
    try:
        check_resources(config)
        return _executed(run)
    finally:
        disconnect()


def train_loop(config: Config, console: Console, *, checkpoint: Path | None, resume: bool) -> int | None:
    """A run of stage `preference` that makes its pairs itself. Returns as `train_policy`."""
    check_outputs(config)
    prompts = loops.prompts_of(config)
    folder = made_model(config.model.path, lambda text: console.print(text, highlight=False, markup=False))
    run = loops.LoopRun(
        config=config, console=console, model_folder=folder, prompts=PromptStream(prompts, config.run.seed)
    )
    inputs = {
        "model.path": fingerprint_of_model(folder),
        "data.source": fingerprint_of_prompts(prompts),
    }
    for caution in cautions(config):
        run.say(f"warning: {caution}")
    _settle(config, inputs, resume=resume, say=run.say)
    run.header()
    connect(config.model_copy(update={"stage": "rl"}))  # room for the engine, which comes before the learner
    try:
        check_resources(config)
        return _executed(run)
    finally:
        disconnect()


def _digest(file: Path) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()[:32]


def _settle(config: Config, inputs: dict[str, str], *, resume: bool, say: Any) -> None:
    """Binds the run folder to these inputs and this configuration."""
    check_same_inputs(config.run_folder, inputs, resume=resume)
    for fault in passed_over(config.run_folder / "checkpoints") if resume else ():
        say(f"passed over {fault}")
    config.run_folder.joinpath("config.json").write_text(dump_config(config), encoding="utf-8")


def _executed(run: Stoppable) -> int | None:
    interrupted = asyncio.run(_until_stopped(run))
    return run.version if interrupted else None


async def _until_stopped(run: Stoppable) -> bool:
    """Executes the run; the first Ctrl-C ends it after the step in progress, the second at once. Returns whether it
    was asked to stop."""
    task = asyncio.ensure_future(run.execute())

    def on_signal() -> None:
        if run.stopping:
            task.cancel()
            return
        run.say("stopping after this step, with a checkpoint (again to stop at once)")
        run.request_stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not run.stopping:
            raise
    return run.stopping
