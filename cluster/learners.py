"""The learner's ranks as one: every call goes to all of them at once, rank 0 answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.core.weights import Manifest


class LearnerGroup:
    """`call(reference, what, deadline_s)` awaits an actor's answer under a deadline; `collective_deadline_s` is how
    long one rank may wait for another inside a call."""

    def __init__(
        self, actors: Sequence[Any], call: Callable[..., Awaitable[Any]], collective_deadline_s: float
    ) -> None:
        self.actors = list(actors)
        self._call = call
        self._collective_deadline_s = collective_deadline_s
        self._num_buckets = 0

    async def start(self, deadline_s: float) -> None:
        """Joins the ranks and loads the model on each."""
        address = await self._call(self.actors[0].address.remote(), "learner", deadline_s)
        starts = [
            actor.start.remote(rank, len(self.actors), address, self._collective_deadline_s)
            for rank, actor in enumerate(self.actors)
        ]
        self._num_buckets = (await self._all(starts, "learner to start", deadline_s))[0]

    async def train(self, version: int, tables: Sequence[Any], deadline_s: float) -> tuple[list[Any], Any]:
        """Statistics of the batch's steps, and a reference to the columns that the learner appends."""
        stats, columns = zip(
            *(actor.train.options(num_returns=2).remote(version, *tables) for actor in self.actors),
            strict=True,
        )
        return (await self._all(stats, "learner to train", deadline_s))[0], columns[0]

    async def publish(self, version: int) -> tuple[Any, Manifest, tuple[Any, ...]]:
        """Reference to the manifest, the manifest, and references to its buckets."""
        calls = [
            actor.publish.options(num_returns=1 + self._num_buckets).remote(version) for actor in self.actors
        ]
        manifests = [first for first, *_ in calls]
        manifest = (await self._all(manifests, "learner to publish"))[0]
        return manifests[0], manifest, tuple(calls[0][1:])

    async def save(self, folder: str, deadline_s: float) -> None:
        """Rank 0 writes."""
        await self._all([actor.save.remote(folder) for actor in self.actors], "learner to save", deadline_s)

    async def load(self, folder: str, deadline_s: float) -> int:
        """Returns the version."""
        return (
            await self._all(
                [actor.load.remote(folder) for actor in self.actors], "learner to load", deadline_s
            )
        )[0]

    async def _all(self, references: Sequence[Any], what: str, deadline_s: float | None = None) -> list[Any]:
        limit = () if deadline_s is None else (deadline_s,)
        return await asyncio.gather(*(self._call(reference, what, *limit) for reference in references))
