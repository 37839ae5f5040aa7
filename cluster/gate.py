"""Admission and batch selection: the two decisions that bound the version lag. Pure, no clock, no Ray.

Why the bound holds. A group is admitted under version `w`, the one live on the engine that will sample it, and
only while the groups ever admitted number less than `(max_version_lag + w + 1) * groups_per_step`. Training takes
`groups_per_step` groups per version, oldest first, and never leaves behind a group that the next step could not
take. So the group is trained at a version of at most `w + max_version_lag`, whatever the order of finishing.
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
    """Selects the batch that a learner at `version` takes up.

    `running_since`: group id -> version of its engine at dispatch, a lower bound of its oldest token's version.
    The batch waits for every running group that the next batch could not take within the bound, rather than
    passing it by. The check on the bound stays on whatever the admission did.
    """
    next_version = version + steps_per_batch
    waits_for = tuple(g for g, since in sorted(running_since.items()) if next_version - since > max_version_lag)
    ordered = sorted(finished, key=lambda group: (group.oldest_version, group.group_id))
    fresh = [group for group in ordered if version - group.oldest_version <= max_version_lag]
    stale = tuple(group.group_id for group in ordered if version - group.oldest_version > max_version_lag)
    size = groups_per_step * steps_per_batch
    if len(fresh) < size or waits_for:
        return Cut(waits_for=waits_for, stale=stale)
    batch = fresh[:size]
    # Later optimizer steps on the batch see a later version: their share of it must hold the bound too.
    late = tuple(
        group.group_id
        for position, group in enumerate(batch)
        if version + position // groups_per_step - group.oldest_version > max_version_lag
    )
    if late:
        return Cut(stale=stale + late)
    return Cut(take=tuple(group.group_id for group in batch), stale=stale)
