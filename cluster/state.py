"""What the driver knows of engines and live groups."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cluster.queue import Receipt


@dataclass(kw_only=True)
class Engine:
    """One generation actor as the driver sees it."""

    replica: int
    limit: int
    """Groups that it may have in flight."""
    incarnation: int = 0
    version: int | None = None
    """Version that it serves; None while it serves nothing."""
    running: int = 0
    leaving: bool = False
    """Takes no new groups and goes once it has none."""


@dataclass(kw_only=True)
class Group:
    """A live prompt group."""

    group_id: int
    task: str
    since_version: int
    """Version of its engine when it was dispatched."""
    dispatched: float
    """Time of the loop when it was dispatched (seconds)."""
    receipt: Receipt | None = None
    finished_at_version: int = 0
    """Learner version when it entered the queue."""
