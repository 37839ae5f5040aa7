"""Waits that cannot be forgotten: each has an owner, a reason and a deadline, and shows up in one table."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from headway.core.errors import Starved

TICK_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    who: str
    what: str
    since: float
    """`time.monotonic()` when it began."""
    deadline_s: float


class Waits:
    """All waits of the driver, and the signal that ends those which wait for its own state to change."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._ids = itertools.count()
        self._changed = asyncio.Event()

    @contextmanager
    def on(self, who: str, what: str, deadline_s: float) -> Iterator[Wait]:
        """Registers a wait for as long as the block runs."""
        key, wait = next(self._ids), Wait(who=who, what=what, since=time.monotonic(), deadline_s=deadline_s)
        self._open[key] = wait
        try:
            yield wait
        finally:
            del self._open[key]

    async def within(self, awaitable: Awaitable[T], *, who: str, what: str, deadline_s: float) -> T:
        """The awaitable's result. Raises `Starved` after `deadline_s`."""
        with self.on(who, what, deadline_s):
            try:
                return await asyncio.wait_for(awaitable, deadline_s)
            except TimeoutError:
                raise Starved(f"{who} waited {deadline_s:.0f} s for {what}") from None

    def changed(self) -> None:
        """Wakes everyone in `until`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], T | None], *, who: str, what: str, deadline_s: float) -> T:
        """First value of `ready()` that is not None; asked again after every change, and once a second.

        Unblocked by: `changed()`. Raises `Starved` after `deadline_s`.
        """
        with self.on(who, what, deadline_s) as wait:
            while (value := ready()) is None:
                remaining = wait.since + deadline_s - time.monotonic()
                if remaining <= 0:
                    raise Starved(f"{who} waited {deadline_s:.0f} s for {what}")
                try:
                    await asyncio.wait_for(self._changed.wait(), min(remaining, TICK_S))
                except TimeoutError:
                    continue
            return value

    def table(self) -> str:
        """One line per open wait, longest first."""
        now = time.monotonic()
        rows = sorted(self._open.values(), key=lambda wait: wait.since)
        return "\n".join(
            f"  {wait.who} waits for {wait.what}: {now - wait.since:.1f} s (deadline {wait.deadline_s:.0f} s)"
            for wait in rows
        )
