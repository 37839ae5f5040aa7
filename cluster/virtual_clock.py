"""An event loop whose clock jumps to the next timer as soon as nothing else can run: hours in seconds, and the same
order of events every time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar

from headway.core.errors import HeadwayError

T = TypeVar("T")


class Deadlock(HeadwayError):
    """Nothing is scheduled, nothing can run, and the main task has not ended."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Its time starts at 0 and moves only when nothing can run: then it is that of the next timer. Timers of the same
    time run in the order in which they were set. Work for threads is done at once, in no time. There is no input and
    no output. Raises `Deadlock` out of `run_until_complete`, and what a callback raised."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """Heap; cancelled ones are passed over when their time comes."""
        self._order = itertools.count()
        self._cancelled = 0
        self._running = self._stopping = self._closed = False
        self._fault: Exception | None = None

    # ---- what can be scheduled -----------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Most deadlines are never reached: when their timers are the most part of the heap they go."""
        self._cancelled += 1
        if self._cancelled > 1000 and self._cancelled > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whatever the work raised belongs to who awaits it, as with a thread
            future.set_exception(error)
        return future

    # ---- running -------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        hooks = sys.get_asyncgen_hooks()
        self._running, self._stopping = True, False
        sys.set_asyncgen_hooks(finalizer=self._end_generator)
        events._set_running_loop(self)
        try:
            while not self._stopping:
                self._turn()
                if self._fault is not None:
                    fault, self._fault = self._fault, None
                    raise fault
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _turn(self) -> None:
        """Moves the clock if nothing can run, and runs what can."""
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._cancelled -= 1
            if not timers:
                self._raise_deadlock()
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _raise_deadlock(self) -> None:
        tasks = sorted(f"{task.get_name()} {_place(task)}" for task in asyncio.all_tasks(self))
        raise Deadlock(
            f"at virtual time {self._now:.3f} s nothing is scheduled and {len(tasks)} tasks wait:\n  "
            + "\n  ".join(tasks)
        )

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop_with)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._stop_with)
        return task.result()

    def _stop_with(self, _: Any) -> None:
        self._stopping = True

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Generators that were not closed are closed when they are collected."""

    async def shutdown_default_executor(self) -> None:
        """There is none."""

    def _end_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    # ---- faults --------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Not supported: it would only cost time."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raised is a fault of the program. What a forgotten task raised is shown, as on any loop."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            self._fault = error
            return
        details = [
            f"{key}: {value!r}" for key, value in context.items() if key not in ("message", "exception")
        ]
        logging.getLogger("asyncio").error("\n".join([context["message"], *details]), exc_info=error)


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}" if frames else ""
    return f"in {getattr(task.get_coro(), '__qualname__', '?')}{where}"


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Result of `main` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
