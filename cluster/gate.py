"""Admission and batch selection: the two decisions that bound the version lag. Pure, no clock, no Ray.

Why the bound holds. Call `deadline` of a live group the last version at which it may be trained: the oldest version
that sampled it, plus `max_version_lag` (L). With B groups per step, a learner at version v can meet every deadline
if and only if, for every u >= v, at most (u - v + 1) * B live groups have a deadline of u or earlier.

* Admission keeps that true: a group starts under version w, the one live on its engine, only while fewer than
  (w + L + 1) * B groups were ever admitted, that is, while fewer than (w + L - v + 1) * B are live.
* Selection keeps it true: a batch is cut only if what it leaves behind can still meet every deadline; otherwise the
  learner waits for the running groups that stand in the way. Once they have finished, oldest first always works.

So nothing is ever discarded for its age, and long answers are trained as often as short ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(kw_only=True)
class Gate:
    """Counts groups. `running`: being generated or scored. `accepted`: finished, in the queue or trained; a
    rejected group is in neither, so it gives its place back."""

    groups_per_step: int
    max_version_lag: int
    max_running: int
    total_groups: int
    """Groups that the whole run trains; more are never admitted."""
    running: int = 0
    accepted: int = 0

    @classmethod
    def resume(cls, *, version: int, queued: int, **limits: int) -> Gate:
        """The gate of a run that has applied `version` steps and holds `queued` finished groups."""
        return cls(**limits, accepted=version * limits["groups_per_step"] + queued)

    def capacity(self, version: int) -> int:
        """How many more groups may start now on an engine that serves `version`; may be negative."""
        admitted = self.accepted + self.running
        within_bound = (self.max_version_lag + version + 1) * self.groups_per_step - admitted
        return min(self.max_running - self.running, within_bound, self.total_groups - admitted)

    def start(self) -> None:
        self.running += 1

    def finish(self) -> None:
        """A running group was accepted into the queue."""
        self.running -= 1
        self.accepted += 1

    def reject(self, *, finished: bool = False) -> None:
        """A running (or already accepted) group was dropped."""
        if finished:
            self.accepted -= 1
        else:
            self.running -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A group that waits for the learner."""

    group_id: int
    oldest_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What the learner does next."""

    take: tuple[int, ...] = ()
    """Group ids of the batch, oldest version first; empty while it has to wait."""
    waits_for: tuple[int, ...] = ()
    """Running groups that this batch must still include."""
    stale: tuple[int, ...] = ()
    """Finished groups beyond the bound; never trained."""


def cut_batch(
    finished: Iterable[Finished],
    running_since: dict[int, int],
    *,
    version: int,
    groups_per_step: int,
    steps_per_batch: int,
    max_version_lag: int,
) -> Cut:
    """Selects the batch that a learner at `version` takes up, oldest version first.

    `running_since`: group id -> version of its engine at dispatch, a lower bound of its oldest token's version.
    The check on the bound stays on whatever the admission did: a group that the bound excludes is `stale`.
    """
    ordered = sorted(finished, key=lambda group: (group.oldest_version, group.group_id))
    stale = tuple(group.group_id for group in ordered if version - group.oldest_version > max_version_lag)
    fresh = ordered[len(stale) :]
    size = groups_per_step * steps_per_batch
    batch, rest = fresh[:size], fresh[size:]
    # Later optimizer steps on the batch see a later version: their share of it must hold the bound too.
    late = tuple(
        group.group_id
        for position, group in enumerate(batch)
        if version + position // groups_per_step - group.oldest_version > max_version_lag
    )
    if stale or late:
        return Cut(stale=stale + late)
    waits_for = _in_the_way(
        [group.oldest_version for group in rest],
        running_since,
        version=version + steps_per_batch,
        groups_per_step=groups_per_step,
        max_version_lag=max_version_lag,
    )
    if len(batch) < size or waits_for:
        return Cut(waits_for=waits_for)
    return Cut(take=tuple(group.group_id for group in batch))


def _in_the_way(
    waiting_since: list[int],
    running_since: dict[int, int],
    *,
    version: int,
    groups_per_step: int,
    max_version_lag: int,
) -> tuple[int, ...]:
    """Running groups without which a learner at `version` could not meet every deadline; empty when it can."""
    live = sorted([*waiting_since, *running_since.values()])
    for count, since in enumerate(live, 1):
        if count > (since + max_version_lag - version + 1) * groups_per_step:
            return tuple(sorted(group_id for group_id, other in running_since.items() if other <= since))
    return ()
