"""Waits end: by a change, by their deadline, and they can be listed meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from headway.cluster.watch import Waits
from headway.core.errors import Starved


async def test_a_change_ends_a_wait() -> None:
    waits, box = Waits(), []
    waiting = asyncio.create_task(
        waits.until(lambda: box[0] if box else None, who="learner", what="a group", deadline_s=5)
    )
    await asyncio.sleep(0)
    assert "learner waits for a group" in waits.table()
    waits.changed()  # nothing there yet: it goes on waiting
    await asyncio.sleep(0.01)
    assert not waiting.done()
    box.append("group 7")
    waits.changed()
    assert await asyncio.wait_for(waiting, 0.5) == "group 7"
    assert waits.table() == ""


async def test_a_deadline_ends_a_wait_with_who_and_what() -> None:
    waits = Waits()
    with pytest.raises(Starved, match="learner waited 0 s for a group"):
        await waits.until(lambda: None, who="learner", what="a group", deadline_s=0.05)
    with pytest.raises(Starved, match="driver waited 0 s for engine 3"):
        await waits.within(asyncio.sleep(5), who="driver", what="engine 3", deadline_s=0.05)
    assert waits.table() == ""


async def test_everyone_who_waits_is_woken() -> None:
    waits, open_ = Waits(), []
    crowd = [
        asyncio.create_task(
            waits.until(lambda: True if open_ else None, who=str(n), what="the gate", deadline_s=5)
        )
        for n in range(50)
    ]
    await asyncio.sleep(0)
    open_.append(1)
    waits.changed()
    assert await asyncio.wait_for(asyncio.gather(*crowd), 0.5) == [True] * 50
