"""Two controllers of elastic generation: how many groups an engine may hold, and how many engines the run is to have.
Pure: no clock, no Ray."""

from __future__ import annotations

from collections import deque

DECREASE = 0.7
FULL = 0.97
HOLD = 3
"""Observations."""


class Concurrency:
    """Groups that one engine may have in flight: additive increase, multiplicative decrease.

    An engine that holds more than its KV cache pushes requests out and computes their prefix again. So its limit falls to
    0.7 of what ran when it did so, and rises by one per observation while the limit binds and the cache has room: the
    rule of congestion control, which needs no knowledge of the capacity, follows it when it moves, and is the linear rule
    that converges to an efficient and fair point (Chiu & Jain, "Analysis of the increase and decrease algorithms for
    congestion avoidance in computer networks", 1989).

    A full cache alone is no fault, it is what the engine is for: beyond 0.97 the limit neither falls nor rises. After a
    decrease nothing changes until the engine has come down to the limit, and for `HOLD` observations more: requests
    pushed out meanwhile are the doing of the old limit.
    """

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"an engine holds at least one group, not {cap}")
        self.cap = cap
        self.limit = cap
        self._preemptions = 0
        self._running = 0
        self._hold = 0

    def observe(self, kv_cache_usage: float, preemptions: int, running: int) -> int:
        """The limit from now on. `preemptions`: total since the engine started; one below the last is a new engine's.
        `running`: groups in flight."""
        replaced = preemptions < self._preemptions
        pushed_out = preemptions > (0 if replaced else self._preemptions)
        # Requests were pushed out at some time between two observations: the fuller of both says how many ran then.
        ran = max(running, self._running) or self.limit
        self._preemptions, self._running = preemptions, running
        if self._hold:
            if running <= self.limit:
                self._hold -= 1
        elif pushed_out:
            self.limit = max(1, round(DECREASE * min(ran, self.limit)))
            self._hold = HOLD
        elif kv_cache_usage <= FULL and running >= self.limit:
            self.limit = min(self.cap, self.limit + 1)
        return self.limit


WINDOW = 5
"""Steps."""
MEMORY = 200
"""Steps."""
STARVING = 0.2
FED = 0.02
BLOCKED = 0.2


class Autoscaler:
    """Engines that the run is to have, between `lowest` and `highest`.

    The learner's waiting share says whether engines are missing, and the blocked share (of the time, dispatch stood
    still because the version-lag bound or the queue was full) whether engines are idle. Every `WINDOW` steps with the
    same number of engines, hence at least that long after each change:

    * one more when the learner waited for more than 0.2 of the time and dispatch was blocked for less than 0.2;
    * one fewer when it waited for less than 0.02 and dispatch was blocked for more than 1 / engines: n engines that make
      what m < n could are blocked for at least 1 - m / n, so below 1 / n the last engine is needed.

    A number that starved the learner is not tried again for `MEMORY` steps. Else two engines, of which one and a half are
    needed, would come and go forever. What it ends at keeps the learner busy for at least 0.8 of the time.

    When both wait, the learner for groups and dispatch for the learner, the bound is short and not the engines, and
    nothing changes. So it is at `max_version_lag=0`: while a step is trained nothing may start, and then the learner
    waits for the whole of generation. More engines come only while groups wait for a place on one for most of the step.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        if not 1 <= lowest <= highest:
            raise ValueError(f"from {lowest} to {highest} engines is no range")
        self.lowest = lowest
        self.highest = highest
        self._target = 0
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._too_few = 0
        self._memory = 0

    def step(self, *, waited_s: float, total_s: float, blocked_s: float, target: int) -> int:
        """Engines wanted from now on; call it after every optimizer step that `target` live engines fed.

        `waited_s`: the learner's wait for groups; `total_s`: the whole step; `blocked_s`: time in which dispatch stood
        still because the bound or the queue was full. `target`: engines that are wanted now, whoever said so.
        """
        if target != self._target:
            self._target = target
            self._recent.clear()
        self._recent.append((waited_s, total_s, blocked_s))
        self._memory = max(0, self._memory - 1)
        if not self.lowest <= target <= self.highest:
            return min(max(target, self.lowest), self.highest)
        waited, total, blocked = (sum(column) for column in zip(*self._recent, strict=True))
        if len(self._recent) < WINDOW or total <= 0:
            return target
        if waited / total > STARVING and blocked / total < BLOCKED:
            self._too_few, self._memory = target, MEMORY
            return min(target + 1, self.highest)
        remembered = self._memory > 0 and target - 1 <= self._too_few
        if waited / total < FED and blocked / total > 1 / target and not remembered:
            return max(target - 1, self.lowest)
        return target
