"""Waits end: by a change, by their deadline, by cancellation; and they can be listed meanwhile. Time is virtual."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from headway.cluster.watch import MAX_LINES, TOPICS, Wait, Waits
from headway.core.errors import ActorDied, Starved
from headway.core.metrics import SECONDS_BUCKETS, WAIT_STAGES, Recorder

T = TypeVar("T")


class Jump(selectors.SelectSelector):
    """Time passes exactly when everyone sleeps."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everyone waits, and nothing will ever wake them"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now


def virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time() - Jump.now


def observed(recorder: Recorder) -> dict[str, tuple[int, float]]:
    """Waits and their seconds by stage."""
    waits: dict[str, tuple[int, float]] = {}
    for name, label, payload in recorder.drain():
        assert name == "headway_wait_seconds" and isinstance(payload, tuple)
        assert len(payload[0]) == len(SECONDS_BUCKETS) + 1
        waits[label] = (sum(payload[0]), payload[1])
    return waits


# ---- until ------------------------------------------------------------------------------------------------


def test_a_change_ends_a_wait_and_its_time_is_observed() -> None:
    async def main() -> None:
        recorder, box, asked = Recorder(), [], []
        waits = Waits(recorder)

        def ready() -> str | None:
            asked.append(now())
            return box[0] if box else None

        async def take() -> str:
            return await waits.until(
                ready,
                who="learner",
                what="a group",
                stage="learner_for_groups",
                deadline_s=300,
                on=("groups", "control"),
            )

        waiting = asyncio.create_task(take())
        await asyncio.sleep(10)
        waits.changed("control")  # nothing there yet: it goes on waiting
        await asyncio.sleep(10)
        box.append("group 7")
        await asyncio.sleep(10)
        waits.changed("engines")  # not its topic
        await asyncio.sleep(10)
        assert not waiting.done() and asked == [0, 10]
        waits.changed("groups")
        assert await waiting == "group 7"
        assert asked == [0, 10, 40]
        assert await take() == "group 7"  # at once
        assert waits.open() == [] and waits.table(0) == ""
        assert observed(recorder) == {"learner_for_groups": (2, 40.0)}

    virtual(main())


def test_many_changes_before_the_waiter_runs_cost_one_question() -> None:
    async def main() -> None:
        waits, asked = Waits(), []

        async def wait(n: int) -> None:
            await waits.until(
                lambda: asked.append(n),  # never ready
                who=f"group {n}",
                what="an engine",
                stage="engine",
                deadline_s=100,
                on=("engines", "actors", "engines"),
            )

        tasks = [asyncio.create_task(wait(n)) for n in range(3)]
        await asyncio.sleep(1)
        assert asked == [0, 1, 2]
        for _ in range(10):
            waits.changed("engines", "actors")
            waits.changed("actors")
        await asyncio.sleep(1)
        assert asked == [0, 1, 2, 0, 1, 2]
        await asyncio.sleep(90)  # nothing happens, nothing is asked
        assert len(asked) == 6
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waits.changed(*TOPICS)
        await asyncio.sleep(1)
        assert len(asked) == 6

    virtual(main())


def test_a_change_made_while_it_is_asked_is_not_lost() -> None:
    async def main() -> None:
        waits, rounds = Waits(), []

        def ready() -> int | None:
            rounds.append(0)
            if len(rounds) < 4:
                waits.changed("release")
                return None
            return len(rounds)

        got = await waits.until(
            ready, who="engine 0", what="a release", stage="weights", deadline_s=1, on=("release",)
        )
        assert (got, now()) == (4, 0)

    virtual(main())


def test_what_was_free_when_asked_is_free_when_the_waiter_goes_on() -> None:
    """100 takers, one slot given back at a time: nobody ever finds a slot taken that it was promised."""

    async def main() -> None:
        waits, slots, taken = Waits(), [0], []

        async def take(n: int) -> None:
            await waits.until(
                lambda: slots[0] or None,
                who=str(n),
                what="a slot",
                stage="engine",
                deadline_s=200,
                on=("engines",),
            )
            slots[0] -= 1
            assert slots[0] >= 0
            taken.append(n)

        crowd = [asyncio.create_task(take(n)) for n in range(100)]
        for _ in range(100):
            await asyncio.sleep(1)
            slots[0] += 1
            waits.changed("engines")
        await asyncio.gather(*crowd)
        assert taken == list(range(100))  # and in the order in which they came

    virtual(main())


def test_the_deadline_ends_a_wait_with_who_what_and_how_long() -> None:
    async def main() -> None:
        recorder = Recorder()
        waits = Waits(recorder)

        async def starve(deadline_s: float) -> None:
            await waits.until(
                lambda: None,
                who="learner",
                what="a group",
                stage="gate",
                deadline_s=deadline_s,
                on=("groups",),
            )

        waiting = asyncio.create_task(starve(1800))
        for _ in range(17):  # changes do not prolong it
            await asyncio.sleep(100)
            waits.changed("groups")
        with pytest.raises(Starved, match=r"^learner waited 1800 s for a group$"):
            await waiting
        assert now() == 1800
        with pytest.raises(Starved, match=r"^learner waited 0 s for a group$"):
            await starve(0)
        assert now() == 1800 and waits.open() == []
        assert observed(recorder) == {"gate": (2, 1800.0)}

    virtual(main())


def test_a_wrong_topic_or_stage_is_refused_and_cannot_hang() -> None:
    async def main() -> None:
        waits = Waits()

        async def wait(stage: str, *on: str) -> None:
            await waits.until(lambda: None, who="a", what="b", stage=stage, deadline_s=9, on=on)

        for on in [("group",), ("groups", "engine"), ()]:
            with pytest.raises(ValueError, match="groups, engines, fleet, release"):
                await wait("gate", *on)
            with pytest.raises(ValueError, match="groups, engines, fleet, release"):
                waits.changed(*on)
        with pytest.raises(ValueError, match="unknown wait stage 'gates'"):
            await wait("gates", "groups")
        assert waits.open() == [] and now() == 0

    virtual(main())


def test_an_error_of_the_question_ends_the_wait_as_it_is() -> None:
    async def main() -> None:
        waits, calls = Waits(), []

        def ready() -> None:
            calls.append(0)
            if len(calls) > 1:
                raise TimeoutError("its own")

        async def wait() -> None:
            await waits.until(ready, who="a", what="b", stage="gate", deadline_s=9, on=("groups",))

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1)
        waits.changed("groups")
        with pytest.raises(TimeoutError, match="its own"):
            await waiting
        assert waits.open() == []

    virtual(main())


# ---- within -----------------------------------------------------------------------------------------------


async def _within(waits: Waits, awaitable: Awaitable[T], deadline_s: float = 5) -> T:
    return await waits.within(
        awaitable, who="driver", what="engine 3", stage="replacement", deadline_s=deadline_s
    )


def test_within_gives_the_result_or_the_error_or_starves() -> None:
    async def main() -> None:
        recorder = Recorder()
        waits = Waits(recorder)

        async def answer(after_s: float, error: Exception | None = None) -> int:
            await asyncio.sleep(after_s)
            if error:
                raise error
            return 42

        assert await _within(waits, answer(4)) == 42
        with pytest.raises(ActorDied):
            await _within(waits, answer(1, ActorDied("generation", 3, 1)))
        with pytest.raises(TimeoutError, match="not ours"):
            await _within(waits, answer(1, TimeoutError("not ours")))
        assert now() == 6
        with pytest.raises(Starved, match=r"^driver waited 0.5 s for engine 3$"):
            await _within(waits, answer(9), 0.5)
        assert now() == 6.5 and waits.open() == []
        assert observed(recorder) == {"replacement": (4, 6.5)}

    virtual(main())


def test_on_the_deadline_coroutines_and_tasks_have_ended_and_futures_of_others_live_on() -> None:
    async def main() -> None:
        waits, ended = Waits(), []

        async def stubborn(name: str) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)  # cleans up
                ended.append(name)

        async def deaf() -> str:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                ended.append("deaf")
            return "too late"

        task = asyncio.create_task(stubborn("task"))
        for awaitable in (stubborn("coroutine"), task, deaf()):
            with pytest.raises(Starved):
                await _within(waits, awaitable)
        assert ended == ["coroutine", "task", "deaf"] and task.cancelled()

        shared: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        other = asyncio.create_task(_within(waits, shared, 50))
        with pytest.raises(Starved):
            await _within(waits, shared)
        assert not shared.done() and not other.done()
        shared.set_result(7)
        assert await other == 7
        assert await _within(waits, shared) == 7

    virtual(main())


# ---- cancellation -----------------------------------------------------------------------------------------


async def _on_future(future: asyncio.Future[int]) -> int:
    return await future


async def _deaf(future: asyncio.Future[int]) -> int:
    try:
        return await future
    except asyncio.CancelledError:
        return -1


async def _failing(future: asyncio.Future[int]) -> int:
    try:
        return await future
    finally:
        raise ActorDied("generation", 3, 1)


def _until(waits: Waits, future: asyncio.Future[int]) -> Awaitable[int]:
    def ready() -> int | None:
        return future.result() if future.done() else None

    return waits.until(ready, who="a", what="b", stage="gate", deadline_s=9, on=("groups",))


WAYS: dict[str, Callable[[Waits, asyncio.Future[int]], Awaitable[int]]] = {
    "until": _until,
    "future": lambda waits, future: _within(waits, future),
    "coroutine": lambda waits, future: _within(waits, _on_future(future)),
    "task": lambda waits, future: _within(waits, asyncio.create_task(_on_future(future))),
    "swallowed": lambda waits, future: _within(waits, _deaf(future)),
    "swallowed by a task": lambda waits, future: _within(waits, asyncio.create_task(_deaf(future))),
    "turned into another error": lambda waits, future: _within(waits, _failing(future)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cancel_first", [True, False])
@pytest.mark.parametrize("iterations_between", range(-3, 4))
def test_a_cancelled_task_never_goes_on(way: str, cancel_first: bool, iterations_between: int) -> None:
    """Cancelled and answered around the same iteration of the loop, in either order: whoever goes on after its wait
    had not been cancelled by then, and in the end every task is."""

    async def main() -> None:
        waits = Waits()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        went_on_though: list[int] = []
        nothing: asyncio.Future[None] = loop.create_future()

        async def work() -> None:
            with contextlib.suppress(ActorDied):  # as a caller that tries again
                await WAYS[way](waits, future)
            task = asyncio.current_task()
            assert task is not None
            went_on_though.append(task.cancelling())
            await nothing

        def answer() -> None:
            if not future.done():
                future.set_result(7)
            waits.changed("groups")

        def after(iterations: int, act: Callable[[], object]) -> None:
            loop.call_soon(act) if iterations == 0 else loop.call_soon(after, iterations - 1, act)

        task = asyncio.create_task(work())
        await asyncio.sleep(1)
        acts = [(5, task.cancel), (5 + iterations_between, answer)]
        for iterations, act in acts if cancel_first else reversed(acts):
            after(iterations, act)
        await asyncio.wait({task}, timeout=100)
        assert task.cancelled()
        assert went_on_though in ([], [0])
        if iterations_between >= 0 and cancel_first:
            assert went_on_though == []
        assert waits.open() == []

    virtual(main())


@pytest.mark.parametrize("way", WAYS)
def test_cancelled_on_the_deadline_is_cancelled_not_starved(way: str) -> None:
    async def main() -> None:
        waits, loop = Waits(), asyncio.get_running_loop()
        deadline_s = 9 if way == "until" else 5
        for before_the_deadline in (True, False):  # in the order of the same iteration

            async def work() -> None:
                await WAYS[way](waits, loop.create_future())

            task = asyncio.create_task(work())
            if not before_the_deadline:
                await asyncio.sleep(0)
            loop.call_later(deadline_s, task.cancel)
            await asyncio.wait({task}, timeout=100)
            assert task.cancelled()

    virtual(main())


# ---- what is open -----------------------------------------------------------------------------------------


def _waits_of(
    waits: Waits, stage: str, *pairs: tuple[str, str], deadline_s: float
) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(
            waits.until(lambda: None, who=who, what=what, stage=stage, deadline_s=deadline_s, on=("groups",))
        )
        for who, what in pairs
    ]


def test_the_table_says_who_waits_for_what_since_when() -> None:
    async def main() -> None:
        waits = Waits()
        assert waits.table(0) == "" and waits.deadline_used() == 0.0 and waits.overdue(0) == []
        waits.version = 7
        _waits_of(waits, "learner_for_groups", ("learner", "8 groups"), deadline_s=300)
        await asyncio.sleep(20)
        waits.version = 9
        _waits_of(waits, "weights", ("engine 3", "version 9"), deadline_s=40)
        await asyncio.sleep(10)
        assert waits.open() == [
            Wait(
                who="learner",
                what="8 groups",
                stage="learner_for_groups",
                since=Jump.now,
                deadline_s=300,
                version=7,
            ),
            Wait(
                who="engine 3",
                what="version 9",
                stage="weights",
                since=Jump.now + 20,
                deadline_s=40,
                version=9,
            ),
        ]
        assert waits.table(9).splitlines() == [
            "  learner waits for 8 groups: 30.0 s (deadline 300 s), begun at version 7, now 9",
            "  engine 3 waits for version 9: 10.0 s (deadline 40 s), begun at version 9",
        ]
        assert waits.deadline_used() == 10 / 40
        assert [wait.who for wait in waits.overdue(0.05)] == ["learner", "engine 3"]
        assert [wait.who for wait in waits.overdue(0.2)] == ["engine 3"]
        assert waits.overdue(0.25) == []
        await asyncio.sleep(25)
        assert waits.deadline_used() == 35 / 40

    virtual(main())


def test_thousands_of_waits_make_a_short_table() -> None:
    async def main() -> None:
        waits = Waits()
        _waits_of(
            waits,
            "engine",
            *((f"group {n}", f"engine {n % 7} to take it") for n in range(2000)),
            deadline_s=300,
        )
        _waits_of(waits, "weights", ("engine 3", "version 9"), deadline_s=40)
        await asyncio.sleep(1)
        assert waits.table(0).splitlines() == [
            "  group 0 waits for engine 0 to take it: 1.0 s (deadline 300 s), begun at version 0; and 1999 like it",
            "  engine 3 waits for version 9: 1.0 s (deadline 40 s), begun at version 0",
        ]
        letters = [("x", f"kind {chr(97 + n // 26)}{chr(97 + n % 26)}") for n in range(100)]
        _waits_of(waits, "queue", *letters, deadline_s=300)
        await asyncio.sleep(1)
        lines = waits.table(0).splitlines()
        assert len(lines) == MAX_LINES + 1 == 21
        assert lines[-1] == "  and 82 more"  # 2 kinds and 18 of 100 are shown
        assert lines[2] == "  x waits for kind aa: 1.0 s (deadline 300 s), begun at version 0"

    virtual(main())


def test_every_stage_that_metrics_know_can_be_waited_in() -> None:
    async def main() -> None:
        recorder = Recorder()
        waits = Waits(recorder)
        for stage in WAIT_STAGES:
            await waits.within(asyncio.sleep(2), who="a", what="b", stage=stage, deadline_s=3)
        assert observed(recorder) == dict.fromkeys(WAIT_STAGES, (1, 2.0))

    virtual(main())


def test_waits_are_cheap() -> None:
    """20,000 waits that sleep and are woken, with a thousand idle ones around: far below 100 microseconds each."""

    async def main() -> float:
        waits, ball = Waits(Recorder()), [0]
        idle = [
            asyncio.create_task(
                waits.until(
                    lambda: None, who="group", what="x", stage="engine", deadline_s=1e6, on=("release",)
                )
            )
            for _ in range(1000)
        ]

        async def play(me: int) -> None:
            for _ in range(10_000):
                await waits.until(
                    lambda: True if ball[0] == me else None,
                    who="player",
                    what="the ball",
                    stage="gate",
                    deadline_s=60,
                    on=("groups",),
                )
                ball[0] = 1 - me
                waits.changed("groups")

        await asyncio.sleep(1)
        began = time.process_time()
        await asyncio.gather(play(0), play(1))
        seconds = time.process_time() - began
        for task in idle:
            task.cancel()
        return seconds

    assert virtual(main()) < 2.0
