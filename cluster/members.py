"""The actors of a run: each by role and replica, how it is called, what its failures mean, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from headway.cluster.placement import short_reason
from headway.core.errors import ActorDied, EngineDead, HeadwayError, Lost, StoreFull

ENDINGS = {"generation": "shutdown", "verifiers": "close", "judge": "shutdown"}
"""Method of a role that ends its child processes."""
ENDING_DEADLINE_S = 10.0
KILL_DEADLINE_S = 5.0
ACTOR_OF_OBJECT = slice(16, 48)
"""Hexadecimal digits of an object's id that name the actor which made it."""


@dataclass(eq=False, slots=True)
class Member:
    """One actor: an incarnation of a role's replica."""

    role: str
    replica: int
    incarnation: int
    handle: Any
    watch: asyncio.Task[None] | None = None
    """Ends when the actor is dead."""
    is_ending: bool = False
    """Its end is on purpose."""
    is_reported: bool = False
    """Its death is."""
    groups: set[int] = field(default_factory=set)
    """A scorer's, those that are still on their way to it included."""


class Members:
    """Every `ActorDied` that a call raises is also given by `next_death`, once. `logs`: the folder of what they print."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._members: dict[tuple[str, int], Member] = {}
        """The present incarnations, dead or alive."""
        self._by_actor: dict[str, Member] = {}
        """All incarnations by their actor's id."""
        self._incarnations: dict[tuple[str, int], int] = {}
        self._deaths: asyncio.Queue[ActorDied] = asyncio.Queue()

    async def next_death(self) -> ActorDied:
        return await self._deaths.get()

    def incarnation(self, role: str, replica: int) -> int:
        return self._incarnations.get((role, replica), 0)

    def _enter(self, role: str, replica: int, handle: Any) -> Member:
        """A new incarnation, which is watched from here on."""
        incarnation = self.incarnation(role, replica) + 1
        member = Member(role, replica, incarnation, handle)
        self._incarnations[role, replica] = incarnation
        self._members[role, replica] = self._by_actor[handle._actor_id.hex()] = member
        member.watch = asyncio.create_task(self._watch(member), name=f"watch {role} {replica}")
        return member

    async def _watch(self, member: Member) -> None:
        """Waits for the actor's death. Unblocked by: Ray, which fails the open call at once."""
        try:
            await member.handle.watch.remote()
        except RayError as error:
            self._died(member, error)

    def _died(self, member: Member, error: RayError | str) -> ActorDied:
        """The death of this actor, which `next_death` gives once."""
        death = ActorDied(member.role, member.replica, member.incarnation, short_reason(error))
        if not member.is_ending and not member.is_reported:
            self._deaths.put_nowait(death)
        member.is_reported = True
        return death

    async def _end_present(self, role: str, replica: int) -> None:
        if (member := self._members.pop((role, replica), None)) is not None:
            await self._end([member])

    async def _end(self, members: Sequence[Member]) -> None:
        """Ends actors and their child processes; returns when Ray knows that they are dead."""
        for member in members:
            member.is_ending = True
        alive = [member for member in members if member.watch and not member.watch.done()]
        try:
            endings = [
                _settled(getattr(member.handle, ENDINGS[member.role]).remote())
                for member in alive
                if member.role in ENDINGS
            ]
            if endings:
                await asyncio.wait(map(asyncio.ensure_future, endings), timeout=ENDING_DEADLINE_S)
        finally:
            for member in members:
                ray.kill(member.handle)
        watches = [member.watch for member in alive if member.watch]
        if watches:
            await asyncio.wait(watches, timeout=KILL_DEADLINE_S)

    # ---- calls and what they raise -------------------------------------------------------------------------

    def _present(self, role: str, replica: int = 0) -> Member:
        try:
            return self._members[role, replica]
        except KeyError:
            raise ActorDied(role, replica, self.incarnation(role, replica), "it was ended") from None

    async def _ask(self, member: Member, method: str, *args: Any) -> Any:
        return await self._result(getattr(member.handle, method).remote(*args), member)

    async def _ask_all(self, members: Iterable[Member], method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(self._ask(member, method, *args) for member in members))

    async def _ready(self, member: Member) -> None:
        await self._result(member.handle.__ray_ready__.remote(), member)

    async def _result(self, reference: Any, member: Member) -> Any:
        """What a call to this actor gave. Whoever waits may be cancelled; the call goes on."""
        try:
            return await reference
        except RayError as error:
            raise self._typed(error, member) from error

    def _typed(self, error: RayError, member: Member) -> HeadwayError:
        """What an error means to the driver. `member`: whom to blame where the error names nobody."""
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        match cause:
            case EngineDead():
                return self._died(self._members.get((cause.role, cause.replica), member), str(cause))
            case HeadwayError():
                return cause
            case RayActorError():
                return self._died(self._by_actor.get(cause.actor_id, member), cause)
            case OutOfMemoryError():  # how Ray calls the death of an actor that its memory monitor has killed
                return self._died(member, cause)
            case ActorPlacementGroupRemoved() | ActorUnschedulableError():
                return self._died(member, cause)
            case ObjectLostError():
                # Rows and weights are as mortal as the node, and those that an actor put itself as the actor.
                maker = self._by_actor.get(cause.object_ref_hex[ACTOR_OF_OBJECT])
                if maker is None:
                    return Lost(short_reason(cause))
                return self._died(maker, "what it had made was lost")
            case ObjectStoreFullError() | OutOfDiskError():
                return StoreFull(f"{member.role} {member.replica}: {short_reason(cause)}")
            case _:
                what = f"{type(cause).__name__}: {short_reason(cause)}"
                return HeadwayError(f"{member.role} {member.replica} failed: {what}; see {self._logs}")


async def _settled(reference: Any) -> None:
    """Waits for a call whose result is of no interest."""
    with suppress(RayError):
        await reference
