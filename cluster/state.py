"""What the driver knows of engines, live groups and published weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.cluster.queue import Receipt
from headway.core.weights import Manifest


@dataclass(kw_only=True)
class Engine:
    """One generation actor as the driver sees it."""

    replica: int
    actor: Any
    version: int | None = None
    """Version that it serves; None while it serves nothing."""
    running: int = 0


@dataclass(kw_only=True)
class Group:
    """A live prompt group."""

    group_id: int
    since_version: int
    """Version of its engine when it was dispatched."""
    dispatched: float
    receipt: Receipt | None = None
    finished_at_version: int = 0
    """Learner version when it entered the queue."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A published weight version: the manifest, and the buckets in the object store."""

    manifest: Manifest
    buckets: tuple[Any, ...]
