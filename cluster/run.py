"""A training run: one session after another, until the last step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.cluster.crew import Crew
from headway.cluster.exporter import Exporter
from headway.cluster.progress import Progress
from headway.cluster.session import Session
from headway.cluster.traces import Traces
from headway.cluster.traces import opened as traces_opened
from headway.cluster.tracker import Tracker
from headway.cluster.tracker import opened as tracker_opened
from headway.core.config import Config
from headway.core.errors import HeadwayError, Lost
from headway.core.prompts import PromptStream
from headway.learner import checkpoint

CLOSE_DEADLINE_S = 60.0


@dataclass(kw_only=True)
class Run:
    """`crew` makes the actors of a session. `execute` runs to the end or to `request_stop`."""

    config: Config
    crew: Callable[[], Crew]
    prompts: PromptStream
    longest_prompt: int
    """Tokens."""
    progress: Progress
    resume_from: Path | None = None
    stopping: bool = False
    session: Session | None = field(default=None, init=False)
    _task: asyncio.Task[Any] | None = field(default=None, init=False)

    async def execute(self) -> None:
        """Trains. Goes on from the newest checkpoint when weights died with their actor, `run.max_restarts` times.
        Raises `Starved` when nothing moves, and the first other failure of any part."""
        self._task = asyncio.current_task()
        clock = asyncio.get_running_loop().time
        with (
            tracker_opened(self.config, self.config.run.name, self.say) as tracker,
            traces_opened(self.config, self.say, clock) as traces,
        ):
            await self._sessions(traces, tracker)

    async def _sessions(self, traces: Traces | None, tracker: Tracker | None) -> None:
        restarts, totals, port = 0, Exporter(), None
        while True:
            crew = self.crew()
            self.session = Session(
                config=self.config,
                crew=crew,
                prompts=self.prompts,
                longest_prompt=self.longest_prompt,
                progress=self.progress,
                totals=totals,
                resume_from=self.resume_from,
                on_stop=self.request_stop,
                is_restart=restarts > 0,
                port=port,
                fleet=self.session.fleet if self.session else None,
                scorers_wanted=self.session.scorers_wanted if self.session else {},
                stopping=self.stopping,
                traces=traces,
                tracker=tracker,
            )
            try:
                await self.session.execute()
                return
            except BaseExceptionGroup as failures:
                lost, others = failures.split(Lost)
                if lost is None or others is not None:
                    raise
                cause = _first(lost)
            except Lost as failure:
                cause = failure
            finally:
                await self._close(crew)
            restarts, port = restarts + 1, self.session.port
            if restarts > self.config.run.max_restarts:
                raise HeadwayError(
                    f"{cause}; the run went on from its checkpoint {self.config.run.max_restarts} times already "
                    "(run.max_restarts); see the logs in its folder, go on with --resume"
                )
            totals.apply([("headway_run_restarts_total", "", 1.0)])
            checkpoints = self.config.run_folder.resolve() / "checkpoints"
            newest = checkpoint.newest_complete(checkpoints)
            if newest is None and checkpoint.was_complete(checkpoints):
                faults = "; ".join(checkpoint.passed_over(checkpoints))
                raise HeadwayError(f"{cause}; no checkpoint is whole to go on from: {faults}")
            self.resume_from = newest
            self.progress.say(
                f"{cause}: going on from {newest.name if newest else 'the start'} "
                f"(restart {restarts} of {self.config.run.max_restarts})"
            )

    async def _close(self, crew: Crew) -> None:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await crew.close()
        except TimeoutError:
            self.progress.say(f"the actors did not end within {CLOSE_DEADLINE_S:.0f} s")

    @property
    def version(self) -> int:
        """Optimizer steps applied."""
        return self.session.version if self.session else 0

    def say(self, text: str) -> None:
        self.progress.say(text)

    def request_stop(self, at_once: bool = False) -> None:
        """Ends the run after the optimizer step in progress, with a checkpoint; or at once, by cancelling `execute`."""
        self.stopping = True
        if at_once and self._task:
            self._task.cancel()
        elif self.session:
            self.session.request_stop()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
