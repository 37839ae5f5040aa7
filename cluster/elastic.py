"""The controllers of elastic groups: how many groups of rollouts an engine may hold, how many engines the run is to
have, how many replicas of a scorer, and where there is room for engines of another size. Pure: no clock, no Ray."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

Bundle = Mapping[str, float]
"""Amounts by resource."""

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
            self.limit = round(DECREASE * min(ran, self.limit))  # of one group, one stays
            self._hold = HOLD
        elif kv_cache_usage <= FULL and running >= self.limit:
            self.limit = min(self.cap, self.limit + 1)
        return self.limit


COOLDOWN = 5
WINDOW = 5
MEMORY = 300
"""Optimizer steps, all three."""
STARVING = 0.2
FED = 0.02
SHORT = 0.5


class Autoscaler:
    """Engines that the run is to have, between `lowest` and `highest`.

    Two shares of the time of the last `WINDOW` steps decide: that for which the learner waited for groups, and that for
    which dispatch stood still because the version-lag bound or the queue was full, so that engines may have idled.
    The first `COOLDOWN` steps after the number has changed show the change and not its result, and are left out.

    * One more when the learner waited for more than 0.2 of the time, and for less than half of that wait dispatch was
      blocked: otherwise the bound is short and not the engines, and one more would get no groups.
    * One fewer when the learner waited for less than 0.02 and dispatch was blocked for more than 1 / engines. Where m of
      n engines would do, they idle for 1 - m / n of the time and dispatch is blocked at least as long: for more than
      1 / n as soon as one is too many.

    So where the learner is never short of groups from m engines on (no whole number), a run that starts small ends at the
    first number from 0.8 m on, and one that starts large at m rounded up at the latest. As the bound can keep dispatch
    blocked though all engines are needed, a shrinking can fail; a number that starved the learner is not tried again for
    `MEMORY` steps. Otherwise two engines, where one and a half are needed, would come and go forever.

    At `max_version_lag=0` both shares are always large: nothing starts while a step is trained, and then the learner
    waits for all that started. So what counts is whether dispatch was blocked while the learner waited. Between two
    versions dispatch is free first and blocked last, the learner waits first and trains last: of the blocked time, what
    exceeds the training lies in the wait.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        if not 1 <= lowest <= highest:
            raise ValueError(f"from {lowest} to {highest} engines is no range")
        self.lowest = lowest
        self.highest = highest
        self._target = 0
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=COOLDOWN + WINDOW)
        """Waited, total and blocked time of the last steps with this target (seconds)."""
        self._too_few = 0
        self._memory = 0

    def step(self, *, waited_s: float, total_s: float, blocked_s: float, target: int) -> int:
        """Engines wanted from now on; to be called after every optimizer step that `target` live engines fed.

        `waited_s`: the learner's wait for groups; `total_s`: the whole step; `blocked_s`: time in which dispatch stood
        still because the bound or the queue was full, whether or not an engine had a place. `target`: engines that are
        wanted now, whoever said so; one outside of the limits is brought inside at once.
        """
        if target != self._target:
            self._target = target
            self._steps.clear()
        self._steps.append((waited_s, total_s, blocked_s))
        self._memory = max(0, self._memory - 1)
        if not self.lowest <= target <= self.highest:
            return min(max(target, self.lowest), self.highest)
        if len(self._steps) < COOLDOWN + WINDOW:
            return target
        waited, total, blocked = (sum(column) for column in zip(*list(self._steps)[-WINDOW:], strict=True))
        blocked_waiting = blocked - (total - waited)
        if waited > STARVING * total and blocked_waiting < SHORT * waited and target < self.highest:
            self._too_few, self._memory = target, MEMORY
            return target + 1
        remembered = self._memory > 0 and target - 1 <= self._too_few
        if waited < FED * total and blocked * target > total and target > self.lowest and not remembered:
            return target - 1
        return target


CROWDED, SPARSE = 2.0, 0.5
"""Groups for each place of a scorer,"""
IMPATIENCE, PATIENCE = 3, 60
"""and for how many observations, before there is one replica more or one fewer."""


class Backlog:
    """Replicas of a scorer, between `lowest` and `highest`, each with `places` for groups: one more when twice as many
    groups as it has places are there time after time, one fewer when the others would stand half empty."""

    def __init__(self, lowest: int, highest: int, places: int) -> None:
        if not 1 <= lowest <= highest:
            raise ValueError(f"from {lowest} to {highest} replicas is no range")
        self.lowest = lowest
        self.highest = highest
        self._places = places
        self._crowded = 0
        self._sparse = 0

    def observe(self, groups: int, replicas: int) -> int:
        """Replicas wanted from now on. `groups`: those that are there, waiting or being scored."""
        if not self.lowest <= replicas <= self.highest:
            return min(max(replicas, self.lowest), self.highest)
        self._crowded = self._crowded + 1 if groups > CROWDED * self._places * replicas else 0
        self._sparse = self._sparse + 1 if groups <= SPARSE * self._places * (replicas - 1) else 0
        if self._crowded >= IMPATIENCE and replicas < self.highest:
            self._crowded = 0
            return replicas + 1
        if self._sparse >= PATIENCE and replicas > self.lowest:
            self._sparse = 0
            return replicas - 1
        return replicas


ROUNDING = 1e-6
"""Of sums of parts of a GPU."""


def fitting(bundle: Bundle, free: Mapping[str, Bundle]) -> int:
    """How many of these bundles fit, each on one node, and a part of a GPU on one GPU. `free`: by node."""

    def on(node: Bundle) -> int:
        numbers = [math.floor(node.get(key, 0.0) / amount + ROUNDING) for key, amount in bundle.items()]
        if 0 < (part := bundle.get("GPU", 0.0)) < 1:
            whole, rest = divmod(node.get("GPU", 0.0) + ROUNDING, 1)
            numbers.append(int(whole) * math.floor(1 / part + ROUNDING) + math.floor(rest / part + ROUNDING))
        return min(numbers)

    return sum(on(node) for node in free.values())


def in_the_way(
    bundle: Bundle,
    free: Mapping[str, Bundle],
    held: Mapping[int, tuple[str, Bundle]],
    leaving: Collection[int],
    others: Sequence[int],
) -> list[int] | None:
    """Which of the engines `others` have to leave so that this bundle fits on a node: as few as there is a choice, the
    first ones first. `free`: by node; `held`: node and bundle of engines that have a place; those that are `leaving` count
    as gone. None when it would not fit without all of them."""
    best: list[int] | None = None
    for node, has in free.items():
        there = {replica: own for replica, (place, own) in held.items() if place == node}
        room = _sum(has, *(own for replica, own in there.items() if replica in leaving))
        gone: list[int] = []
        for replica in others:
            if fitting(bundle, {node: room}):
                break
            if replica in there:
                room = _sum(room, there[replica])
                gone.append(replica)
        if fitting(bundle, {node: room}) and (best is None or len(gone) < len(best)):
            best = gone
    return best


def _sum(*bundles: Bundle) -> Bundle:
    return {key: sum(each.get(key, 0.0) for each in bundles) for key in set().union(*bundles)}


def freed(free: Mapping[str, Bundle], held: Mapping[int, tuple[str, Bundle]]) -> dict[str, Bundle]:
    """What would be free on each node without these engines."""
    return {
        node: _sum(has, *(own for place, own in held.values() if place == node)) for node, has in free.items()
    }
