"""An event loop whose clock jumps to the next timer as soon as nothing else can run: hours in seconds, and the same
order of events every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from headway.core.errors import HeadwayError

T = TypeVar("T")


class Deadlock(HeadwayError):
    """Nothing is scheduled, nothing can run, and the main task has not ended."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0 and moves only when nothing can run: then it is that of the next timer. Work for threads is
    done at once, in no time. Raises `Deadlock` out of `run_until_complete`."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whatever the work raised belongs to who awaits it, as with a thread
            future.set_exception(error)
        return future

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            tasks = sorted(task.get_name() + " " + _place(task) for task in asyncio.all_tasks(self))
            raise Deadlock(
                f"at virtual time {self._now:.3f} s nothing is scheduled and {len(tasks)} tasks wait:\n  "
                + "\n  ".join(tasks)
            )
        self._now += max(seconds, 0.0)


class _Jump(selectors.DefaultSelector):
    """Never sleeps and never sees input."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._jump(timeout)
        return []


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}" if frames else ""
    return f"in {getattr(task.get_coro(), '__qualname__', '?')}{where}"


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Result of `main` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
