"""The numbers of `metrics.jsonl` as curves, in TensorBoard or Weights & Biases (`metrics.tracker`).

A curve's step is the version. A run that goes on continues its curves; of steps that are taken again TensorBoard shows the
new values, Weights & Biases, which takes no step twice, the first ones. Neither ends a run by failing.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from headway.core.config import Config
from headway.core.errors import ConfigError

FOLDER = "tensorboard"
"""In the run folder: TensorBoard's event files."""
RUN_ID = "wandb-id"
"""In the run folder: what Weights & Biases calls the run."""
INIT_DEADLINE_S = 60.0
"""For Weights & Biases to answer before the run starts,"""
FINISH_DEADLINE_S = 30.0
"""and to take the rest when it is over."""


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, by their path (`seconds/total`), the version left out; of a list its mean and
    largest (`lag/mean`, `lag/max`)."""
    found: dict[str, float] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= scalars(value, f"{name}/")
        elif isinstance(value, list):
            numbers = [each for each in value if isinstance(each, int | float)]
            if numbers:
                found |= {f"{name}/mean": sum(numbers) / len(numbers), f"{name}/max": float(max(numbers))}
        elif isinstance(value, int | float) and name != "version":
            found[name] = float(value)
    return found


class _Curves(Protocol):
    def go_on(self, version: int) -> None: ...
    def add(self, version: int, values: Mapping[str, float]) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    """Event files, as TensorBoard's own writer makes them; one more each time that the run goes on."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))

    def go_on(self, version: int) -> None:
        """Readers forget steps after this one when they come to this mark."""
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(version + 1, session_log=log)

    def add(self, version: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        points = [value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(version, summary=self._summaries.Summary(value=points))

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **what))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run there for the life of the run folder. Account, server and offline mode are those of its environment variables;
    the project is `headway` unless `WANDB_PROJECT` says another."""

    def __init__(self, config: Config, name: str, say: Callable[[str], None]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        folder = config.run_folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        about = folder / RUN_ID
        if not about.exists():
            about.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=INIT_DEADLINE_S,
            finish_timeout=FINISH_DEADLINE_S,
            finish_timeout_raises=False,
        )
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "headway"),
                id=about.read_text(encoding="utf-8"),
                name=name,
                dir=folder,
                resume="allow",
                config=config.model_dump(mode="json"),
                settings=settings,
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"metrics.tracker=wandb does not start: {reason} Set WANDB_API_KEY on the driver's machine, or "
                "WANDB_MODE=offline, or metrics.tracker=none"
            ) from error
        if not self._run.offline:
            say(f"curves at {self._run.url}")

    def go_on(self, version: int) -> None:
        """Steps that it has are passed over there."""

    def add(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Tracker:
    """What a run tells its tracker. A fault of the tracker is said once, and is its end."""

    def __init__(self, curves: _Curves, say: Callable[[str], None]) -> None:
        self._curves: _Curves | None = curves
        self._say = say

    def go_on(self, version: int) -> None:
        """The next step is the one after this version."""
        self._try(lambda curves: curves.go_on(version))

    def step(self, record: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`."""
        self._try(lambda curves: curves.add(record["version"], scalars(record)))

    def close(self, *, failed: bool) -> None:
        self._try(lambda curves: curves.close(failed=failed))

    def _try(self, act: Callable[[_Curves], None]) -> None:
        if self._curves is None:
            return
        try:
            act(self._curves)
        except Exception as error:  # whatever such a library raises: curves are no reason to end a run
            self._curves = None
            self._say(f"metrics.tracker is given up: {type(error).__name__}: {error}")


@contextmanager
def opened(config: Config, name: str, say: Callable[[str], None]) -> Iterator[Tracker | None]:
    """The tracker that `metrics.tracker` asks for, if any; `name` is what a person knows the run by. Raises `ConfigError` when
    it does not start."""
    match config.metrics.tracker:
        case "none":
            yield None
            return
        case "tensorboard":
            folder = config.run_folder.resolve() / FOLDER
            try:
                curves: _Curves = _TensorBoard(folder)
            except OSError as error:
                raise ConfigError(f"metrics.tracker=tensorboard cannot write {folder}: {error}") from error
        case "wandb":
            curves = _WeightsAndBiases(config, name, say)
    tracker = Tracker(curves, say)
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True)
        raise
    tracker.close(failed=False)
