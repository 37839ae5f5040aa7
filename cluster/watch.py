"""Waits that cannot be forgotten: each has an owner, a reason and a deadline, and shows up in one table.

Time is the running loop's, so under a virtual loop waits and deadlines are virtual.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from headway.core.errors import Starved
from headway.core.metrics import WAIT_STAGES, Recorder

TOPICS = ("groups", "engines", "fleet", "release", "actors", "control")
"""What a wait can be woken by: live groups, room on engines, engines that fail or leave, the newest release, the other
actors, requests from outside."""
MAX_LINES = 20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    who: str
    what: str
    stage: str
    """One of `WAIT_STAGES`."""
    since: float
    """Time of the loop when it began (seconds)."""
    deadline_s: float
    version: int
    """Learner version when it began."""

    def used(self, now: float) -> float:
        """Share of the deadline that is over at `now`; a deadline of 0 is used up from the start."""
        return (now - self.since) / self.deadline_s if self.deadline_s > 0 else 1.0


class Waits:
    """All waits of the driver, and the signal that ends those which wait for its own state to change.

    Cancelling a task that waits here always ends it as cancelled: also when in the same iteration of the loop what it
    waited for came true, and when what it awaited swallowed the cancellation.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.version = 0
        """Learner version; whoever counts it keeps it current here."""
        self._recorder = recorder
        self._open: dict[int, Wait] = {}
        self._ids = itertools.count()
        self._asleep: dict[str, dict[int, asyncio.Future[None]]] = {topic: {} for topic in TOPICS}
        """What wakes the waits on each topic that have not been woken yet, by wait, first asleep first."""

    @asynccontextmanager
    async def _wait(self, who: str, what: str, stage: str, deadline_s: float) -> AsyncIterator[int]:
        """The block runs as an open wait with this id, and under its deadline."""
        if stage not in WAIT_STAGES:
            raise ValueError(f"unknown wait stage {stage!r}, known: {', '.join(WAIT_STAGES)}")
        loop, key = asyncio.get_running_loop(), next(self._ids)
        since = loop.time()
        self._open[key] = Wait(
            who=who, what=what, stage=stage, since=since, deadline_s=deadline_s, version=self.version
        )
        limit = asyncio.timeout_at(since + deadline_s)
        try:
            async with limit:
                yield key
        except TimeoutError:
            if not limit.expired():  # the block's own
                raise
            raise Starved(f"{who} waited {deadline_s:g} s for {what}") from None
        finally:
            del self._open[key]
            if self._recorder is not None:
                self._recorder.observe("headway_wait_seconds", [loop.time() - since], label=stage)

    async def within(
        self, awaitable: Awaitable[T], *, who: str, what: str, stage: str, deadline_s: float
    ) -> T:
        """The awaitable's result. Raises `Starved` after `deadline_s`, and whatever the awaitable raises.

        On the deadline and on cancellation a coroutine or task is cancelled, and has ended when this raises: a second
        try never overlaps with the first. A bare future (`asyncio.gather` and `shield` make such, too) belongs to whoever
        completes it and is left alone; if that one cancels it, this raises CancelledError, as `await` does.
        """
        task = asyncio.current_task()
        assert task is not None
        if asyncio.isfuture(awaitable) and not isinstance(awaitable, asyncio.Task):
            awaitable = asyncio.shield(awaitable)
        async with self._wait(who, what, stage, deadline_s):
            requests = task.cancelling()
            try:
                return await awaitable
            finally:
                if task.cancelling() > requests:  # whatever the awaitable made of it
                    raise asyncio.CancelledError

    async def until(
        self,
        ready: Callable[[], T | None],
        *,
        who: str,
        what: str,
        stage: str,
        deadline_s: float,
        on: tuple[str, ...],
    ) -> T:
        """First value of `ready()` that is not None; asked at once, and again after changes of the topics in `on`.

        The caller goes on with the value before anything else runs, so what `ready` found free is still free.
        Unblocked by: `changed`. Raises `Starved` after `deadline_s`, ValueError for an unknown or no topic.
        """
        places = self._places(on)
        async with self._wait(who, what, stage, deadline_s) as key:
            try:
                while True:
                    # In place before the question: a change that `ready` itself makes is not lost either.
                    woken = asyncio.get_running_loop().create_future()
                    for place in places:
                        place[key] = woken
                    if (value := ready()) is not None:
                        return value
                    await woken
            finally:
                for place in places:
                    place.pop(key, None)

    def changed(self, *topics: str) -> None:
        """Wakes the waits on these topics: once, however many changes come before they run. Raises ValueError for an
        unknown or no topic."""
        for place in self._places(topics):
            for woken in place.values():
                if not woken.done():
                    woken.set_result(None)
            place.clear()

    def _places(self, topics: tuple[str, ...]) -> list[dict[int, asyncio.Future[None]]]:
        if not topics or not set(topics) <= self._asleep.keys():
            raise ValueError(f"topics {topics}: name at least one of {', '.join(TOPICS)}, and no other")
        return [self._asleep[topic] for topic in dict.fromkeys(topics)]

    def open(self) -> list[Wait]:
        """Longest first."""
        return sorted(self._open.values(), key=lambda wait: wait.since)

    def overdue(self, share: float) -> list[Wait]:
        """Open waits beyond this share of their deadline, longest first."""
        now = asyncio.get_running_loop().time()
        return [wait for wait in self.open() if wait.used(now) > share]

    def deadline_used(self) -> float:
        """Largest share of a deadline that an open wait has used; 0 without any."""
        now = asyncio.get_running_loop().time()
        return max((wait.used(now) for wait in self._open.values()), default=0.0)

    def table(self, version: int) -> str:
        """One line per open wait, longest first. `version`: the learner's. Beyond `MAX_LINES` those of one stage and
        kind (what they wait for, numbers aside) share a line, and the lines beyond those are only counted."""
        now = asyncio.get_running_loop().time()
        kinds: dict[tuple[str, str] | int, list[Wait]] = {}
        few = len(self._open) <= MAX_LINES
        for place, wait in enumerate(self.open()):
            kinds.setdefault(place if few else (wait.stage, re.sub(r"\d+", "N", wait.what)), []).append(wait)
        shown = list(kinds.values())[:MAX_LINES]
        lines = [_line(waits, now, version) for waits in shown]
        if hidden := len(self._open) - sum(map(len, shown)):
            lines.append(f"  and {hidden} more")
        return "\n".join(lines)


def _line(waits: list[Wait], now: float, version: int) -> str:
    """Waits of one kind, the longest first and in full."""
    wait = waits[0]
    line = (
        f"  {wait.who} waits for {wait.what}: {now - wait.since:.1f} s (deadline {wait.deadline_s:g} s), "
        f"begun at version {wait.version}"
    )
    if wait.version != version:
        line += f", now {version}"
    if len(waits) > 1:
        line += f"; and {len(waits) - 1} like it"
    return line
