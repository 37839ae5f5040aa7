"""Admission and batch selection: the two decisions that bound the version lag. Pure, no clock, no Ray.

Why the bound holds without throwing anything away (policy `pace`). Call `deadline` of a live group the last version at
which it may be trained: the oldest version that sampled it, plus `max_version_lag` (L). With B groups per step, a
learner at version v can meet every deadline if and only if, for every u >= v, at most (u - v + 1) * B live groups have
a deadline of u or earlier.

* Admission keeps that true: a group starts under version w, the one live on its engine, only while fewer than
  (w + b + 1) * B groups were ever admitted, with an effective bound b <= L, that is, while fewer than
  (w + L - v + 1) * B are live.
* Dispatching a running group anew keeps it true at any engine that serves its version or a newer one: its deadline
  only moves away. A finished group whose rows were lost leaves, and comes in again through admission.
* Selection keeps it true: a batch is cut only if what it leaves behind can still meet every deadline; otherwise the
  learner waits for the running groups that stand in the way. Once they have finished, oldest first always works.

So nothing is ever discarded for its age, and long answers are trained as often as short ones.

The other policies admit alike and never wait for running groups, so deadlines are missed. `drop` throws away a group
that no position of the batch could still train in time. `withhold` and `downweight` throw one away only when that is
so for its newest token; of the others the learner leaves out, or weighs less, the tokens that are too old.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import Literal

Policy = Literal["pace", "drop", "withhold", "downweight"]
WAITS_SHOWN = 8
"""Running groups that a cut names at most: a person reads them."""


@dataclass(kw_only=True)
class Gate:
    """Counts groups. `running`: being generated or scored. `accepted`: finished, in the queue or trained; a
    rejected group is in neither, so it gives its place back."""

    groups_per_step: int
    total_groups: int
    """Groups that the whole run trains; more are never admitted."""
    bound: int
    """Effective bound on the version lag, at most the configured one; may change at any time."""
    running: int = 0
    accepted: int = 0

    @classmethod
    def resume(cls, *, version: int, queued: int, **limits: int) -> Gate:
        """The gate of a run that has applied `version` steps and holds `queued` finished groups."""
        return cls(**limits, accepted=version * limits["groups_per_step"] + queued)

    def capacity(self, version: int) -> int:
        """How many more groups may start now on an engine that serves `version`; may be negative."""
        admitted = self.accepted + self.running
        within_bound = (self.bound + version + 1) * self.groups_per_step - admitted
        return min(within_bound, self.total_groups - admitted)

    def start(self) -> None:
        self.running += 1

    def finish(self) -> None:
        """A running group was accepted into the queue."""
        self.running -= 1
        self.accepted += 1

    def reject(self, *, finished: bool = False) -> None:
        """A running (or already accepted) group was dropped, or has to start over."""
        if finished:
            self.accepted -= 1
        else:
            self.running -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What the learner does next."""

    take: tuple[int, ...] = ()
    """Group ids of the batch, oldest version first; empty while it has to wait."""
    waits_for: tuple[int, ...] = ()
    """Running groups that this batch must still include, oldest version first; no more than `WAITS_SHOWN` of them."""
    stale: tuple[int, ...] = ()
    """Finished groups that can no longer be trained within the bound: to be dropped, whatever else is said here."""


class Backlog:
    """The live groups by version. A cut looks at each distinct version, at the groups that it takes or finds stale, and
    at no other group."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        steps_per_batch: int,
        max_version_lag: int,
        max_trained_lag: int,
        policy: Policy,
    ) -> None:
        self._per_step = groups_per_step
        self._steps = steps_per_batch
        self._max_version_lag = max_version_lag
        self._waits = policy == "pace"
        self._whole = policy in ("pace", "drop")
        """Every token of a group has to be within the bound, not only the newest."""
        self._limit = max_version_lag if self._whole else max_trained_lag
        self._finished: dict[tuple[int, int], list[int]] = {}
        """(oldest version, version that must be within the limit) -> group ids, ascending."""
        self._running: dict[int, dict[int, None]] = {}
        """Version at dispatch -> group ids in the order of their dispatch."""
        self._place: dict[int, tuple[int, int] | int] = {}
        """Where each live group is in the two above."""

    def __len__(self) -> int:
        return len(self._place)

    def start(self, group_id: int, since_version: int) -> None:
        """A group starts on an engine that serves `since_version`, a lower bound of its oldest token's version."""
        assert group_id not in self._place, f"group {group_id} is live already"
        self._running.setdefault(since_version, {})[group_id] = None
        self._place[group_id] = since_version

    def finish(self, group_id: int, oldest_version: int, newest_version: int) -> None:
        """A running group is complete; the versions are those of its oldest and its newest token."""
        assert oldest_version <= newest_version
        self.remove(group_id)
        place = (oldest_version, oldest_version if self._whole else newest_version)
        bisect.insort(self._finished.setdefault(place, []), group_id)
        self._place[group_id] = place

    def restart(self, group_id: int, since_version: int) -> None:
        """A running group was dispatched anew."""
        assert isinstance(self._place[group_id], int), f"group {group_id} has finished"
        self.remove(group_id)
        self.start(group_id, since_version)

    def remove(self, group_id: int) -> None:
        """The group was trained or dropped, or its rows were lost."""
        place = self._place.pop(group_id)
        if isinstance(place, int):
            del self._running[place][group_id]
            if not self._running[place]:
                del self._running[place]
            return
        group_ids = self._finished[place]
        del group_ids[bisect.bisect_left(group_ids, group_id)]
        if not group_ids:
            del self._finished[place]

    def cut(self, version: int) -> Cut:
        """The batch that a learner at `version` takes up, oldest version first. Changes nothing.

        The check on the bound stays on whatever admission did: no position of the batch is given to a group that would
        pass the limit at that position's own optimizer step.
        """
        size = self._per_step * self._steps
        taken: list[list[int]] = []
        stale: list[int] = []
        left: dict[int, int] = {}
        """Finished groups that this batch does not touch, by oldest version."""
        position = 0
        for place in sorted(self._finished):
            group_ids = self._finished[place]
            oldest, decisive = place
            # Positions before `room` are trained while the decisive version is within the limit.
            room = (decisive + self._limit - version + 1) * self._per_step
            number = min(len(group_ids), max(0, min(room, size) - position))
            if number:
                assert decisive <= version + position // self._per_step, "a group from a version yet to come"
                taken.append(group_ids[:number])
                position += number
            if room < size:  # nor will a later batch come in time
                stale += group_ids[number:]
            elif len(group_ids) > number:
                left[oldest] = left.get(oldest, 0) + len(group_ids) - number
        waits_for = self._in_the_way(left, version + self._steps) if self._waits else ()
        if position < size or waits_for:
            return Cut(waits_for=waits_for, stale=tuple(stale))
        return Cut(take=tuple(itertools.chain.from_iterable(taken)), stale=tuple(stale))

    def _in_the_way(self, left: dict[int, int], version: int) -> tuple[int, ...]:
        """Running groups without which a learner at `version` could not meet every deadline; empty when it can."""
        live = 0
        versions = sorted(left.keys() | self._running.keys())
        for place, since in enumerate(versions):
            live += left.get(since, 0) + len(self._running.get(since, ()))
            if live > (since + self._max_version_lag - version + 1) * self._per_step:
                running = (self._running.get(earlier, ()) for earlier in versions[: place + 1])
                return tuple(itertools.islice(itertools.chain.from_iterable(running), WAITS_SHOWN))
        return ()
