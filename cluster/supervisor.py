"""What is done about actors that die, each death once: engines by their keepers, scorers, queue and metrics here; state
that cannot be replaced ends the session, which then goes on from its checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headway.cluster.engines import Engines
from headway.cluster.groups import Groups
from headway.cluster.part import Part, Shared
from headway.cluster.state import Group
from headway.core.errors import ActorDied, Lost, Starved
from headway.learner import checkpoint

CALL_DEADLINE_S = 60.0
T = TypeVar("T")


class Supervisor(Part):
    """`port` is the metrics endpoint's."""

    def __init__(
        self,
        shared: Shared,
        *,
        folder: Path,
        groups: Groups,
        engines: Engines,
        port: int,
    ) -> None:
        super().__init__(shared)
        self._folder = folder
        self._groups = groups
        self._engines = engines
        self._port = port
        self._repaired: dict[tuple[str, int], int] = {}
        """Highest incarnation whose death was dealt with."""
        self.training: Sequence[Group] = ()
        """Groups that the learner has taken: their rows are no longer the queue's business."""
        self.dead_queue = 0
        """Incarnation of the last queue that is known to have died; what it said that it holds is gone."""
        self.queue_is_whole = True
        """False while it is unknown which finished groups have rows."""

    async def run(self) -> None:
        """Waits for deaths."""
        while True:
            death = await self._crew.next_death()
            if death.role == "generation":
                self._engines.failed_with(death)
                continue
            if death.role == "queue":
                self.dead_queue, self.queue_is_whole = death.incarnation, False
            self._spawn(self._repair(death))

    async def _repair(self, death: ActorDied) -> None:
        try:
            await self._replace(death)
        except ActorDied as another:
            if another.role != death.role:
                raise
            return  # the one that was to take its place died too, which is a death of its own
        self._recorder.inc("headway_actor_restarts_total", label=death.role)
        self._say(f"{death.role} {death.replica} is replaced: {death}")
        key = (death.role, death.replica)
        self._repaired[key] = max(death.incarnation, self._repaired.get(key, 0))
        self._waits.changed("actors", "groups")

    async def _replace(self, death: ActorDied) -> None:
        match death.role:
            case "queue":
                await self._replace_queue()
            case "metrics":
                await self._serve_metrics()
            case "learner" | "critic":
                raise Lost(str(death))
            case _:
                await self._within(
                    self._crew.replace(death.role, death.replica),
                    f"{death.role} {death.replica} to start again",
                    self._config.generation.start_deadline_s,
                )

    async def _serve_metrics(self) -> None:
        """Again and again: no run ends for want of its endpoint."""
        while True:
            try:
                await self._within(
                    self._crew.serve_metrics(self._port), "the metrics endpoint to start again"
                )
                return
            except Starved as failure:
                self._say(str(failure))

    async def _replace_queue(self) -> None:
        """Groups that lay in the queue are taken from the newest checkpoint where it has the same rows; the others are
        issued again."""
        taken = {group.group_id for group in self.training}
        finished = {
            group.group_id: group
            for group in self._groups.live.values()
            if group.receipt is not None and group.group_id not in taken
        }
        await self._within(self._crew.start_queue(), "a new queue")
        kept: set[int] = set()
        newest = checkpoint.newest_complete(self._folder / "checkpoints")
        if newest is not None:
            # No others: the new queue takes groups already, and one that finishes there is not the checkpoint's to judge.
            receipts = await self._within(
                self._crew.restore_queue(newest / "queue.parquet", set(finished)), "the queue's checkpoint"
            )
            kept = {receipt.group_id for receipt in receipts if finished[receipt.group_id].receipt == receipt}
            await self._within(
                self._crew.release([r.group_id for r in receipts if r.group_id not in kept]), "the new queue"
            )
        gone = [group_id for group_id in finished if group_id not in kept and group_id in self._groups.live]
        self._groups.lose(gone)
        self.queue_is_whole = True
        self._say(
            f"the queue died with {len(finished)} groups: {len(kept)} restored, {len(gone)} issued again"
        )

    async def repaired(self, death: ActorDied, *, who: str) -> None:
        """Returns when whoever died was replaced; at once for an engine, since another one will do."""
        if death.role == "generation":
            return
        if death.role in ("learner", "critic"):
            raise Lost(str(death))
        key = (death.role, death.replica)
        await self._waits.until(
            lambda: self._repaired.get(key, 0) >= death.incarnation or None,
            who=who,
            what=f"{death.role} {death.replica} to be replaced",
            stage="replacement",
            deadline_s=self._config.run.no_progress_deadline_s,
            on=("actors",),
        )

    async def insist(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        what: str,
        stage: str,
        who: str = "driver",
        deadline_s: float = CALL_DEADLINE_S,
    ) -> T:
        """The call's result; made again when the actor died under it and was replaced. The call must be idempotent."""
        while True:
            try:
                return await self._waits.within(
                    make(), who=who, what=what, stage=stage, deadline_s=deadline_s
                )
            except ActorDied as death:
                await self.repaired(death, who=who)

    async def release(self, group_ids: Sequence[int]) -> None:
        """The queue lets go of groups that ended."""
        await self.insist(
            lambda: self._crew.release(group_ids), what="the queue to let groups go", stage="queue"
        )

    async def _within(self, awaitable: Awaitable[T], what: str, deadline_s: float = CALL_DEADLINE_S) -> T:
        return await self._waits.within(
            awaitable, who="supervisor", what=what, stage="replacement", deadline_s=deadline_s
        )
