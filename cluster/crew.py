"""What the control plane may ask of a run's actors. The driver knows this interface and nothing of Ray: under
`ray_crew` the actors are real, under `virtual` they are drawn from distributions and time is virtual.

Every method may raise `ActorDied` with the role and replica that is gone; none keeps a deadline of its own, whoever
awaits it does. What is passed on as `Any` is opaque to the driver: references to rows, which it never reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.actors.generation_rows import GroupRequest
from headway.cluster.queue import Receipt
from headway.core.errors import ActorDied
from headway.core.metrics import Update
from headway.core.weights import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A published weight version: the manifest, a reference to it, and references to its buckets."""

    manifest: Manifest
    reference: Any
    buckets: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a batch did to policy and critic."""

    stats: list[Any]
    """`StepStats` of each optimizer step."""
    critic_stats: list[Any]
    """`CriticStats` of each, or empty."""
    columns: Any
    """Reference to the columns that the learner appends to the batch's rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """What an engine says on the heartbeat."""

    kv_cache_usage: float
    """Share of its KV cache in use."""
    preemptions: int
    """Requests pushed out of the KV cache since it started."""
    updates: list[Update]


NODE_DEADLINE_S = 900.0
"""For an autoscaler to bring a node; Ray's own launcher gives one as long to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The engines that a run is to have."""

    replicas: int
    gpus: float
    """Of each: a part of one, or whole ones that share the model (tensor parallel)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The resources of a replica are asked for, and not there."""

    awaited: str
    """What it waits for."""
    may_grow: bool
    """Whether an autoscaler may bring a node for it."""


class Crew(Protocol):
    """The actors of one run."""

    @property
    def placement_deadline_s(self) -> float:
        """Longest wait for the resources of one replica: the configured one, or what an autoscaler may take for a node."""
        ...

    async def open(self, fleet: Fleet | None = None) -> None:
        """Waits for the resources of every group and creates all actors but the engines, which will be `fleet`; None: those
        of the configuration. Raises `ClusterError`."""
        ...

    async def close(self) -> None:
        """Ends every actor and gives all resources back. Never raises for actors that are dead already."""
        ...

    async def next_death(self) -> ActorDied:
        """The next actor that was found dead, each incarnation once. Waits for as long as all live."""
        ...

    def incarnation(self, role: str, replica: int) -> int:
        """How many actors this replica has had; 0: none yet."""
        ...

    async def replace(self, role: str, replica: int) -> None:
        """A new actor in place of a verifier or a reference, ready to score. Raises `Lost` for a role whose weights
        change during the run (learner, critic, refreshed reference)."""
        ...

    @property
    def replicas(self) -> dict[str, int]:
        """Actors by role, the engines left out."""
        ...

    @property
    def elastic(self) -> tuple[str, ...]:
        """Scorers of which there may be more or fewer at any time: nothing of theirs changes during the run."""
        ...

    def backlog(self, role: str) -> int:
        """Groups that are at this scorer now, waiting or being scored."""
        ...

    async def resize(self, role: str, replicas: int) -> None:
        """As many replicas of an elastic scorer: new ones get groups once they can score, those that leave end the groups
        that they have first, for a while; what is then left is scored by others. Raises `ClusterError` when the cluster
        has no room, and then nothing has changed."""
        ...

    # requests from outside

    async def next_request(self) -> tuple[int, str, Any]:
        """The next request that someone made of this run, as (ticket, kind, value). Waits for as long as there is
        none. Kind `scale`: the value is (group, replicas that the run is to have), and for engines GPUs of each."""
        ...

    async def answer(self, ticket: int, value: Any) -> None:
        """Answers a request, or refuses it with a `UserError` as value; a ticket that nobody waits for any more is no
        error."""
        ...

    # learner, and the scorers whose weights change

    async def start_learner(self) -> None: ...

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        """`steps_per_batch` optimizer steps from `version` on, on groups that the queue holds."""
        ...

    async def publish(self, version: int) -> Release: ...

    async def refresh_reference(self, release: Release) -> None:
        """The reference takes the policy's weights."""
        ...

    async def save(self, folder: Path) -> None:
        """Writes learner, critic and reference into a checkpoint's folder. Raises `CheckpointFailed`."""
        ...

    async def load(self, folder: Path) -> int:
        """Takes up from there; returns the version."""
        ...

    # engines

    async def place_engine(self, replica: int, gpus: float) -> Shortage | None:
        """Asks for the resources of an engine, ending the one that was in this place; None when they are there. Raises
        `ClusterError` when no node could hold it and none will come."""
        ...

    async def start_engine(self, replica: int) -> int:
        """Starts an engine in this place, ending the one that was there, with what `place_engine` asked for, or as the
        configuration has it; returns its incarnation. It serves nothing before the first `update_engine`. Raises
        `ClusterError` when the cluster has no room for it."""
        ...

    async def in_the_way(
        self, replica: int, leaving: Collection[int], others: Sequence[int]
    ) -> list[int] | None:
        """Which of the engines `others`, the first ones first, have to leave besides those that do already, so that this
        one gets what `place_engine` asked for; None when it would not get it without all of them."""
        ...

    async def check_fleet(self, fleet: Fleet) -> None:
        """Raises `ClusterError` when these engines could not run in place of those that there are, and no node will come."""
        ...

    async def update_engine(self, replica: int, release: Release) -> None:
        """Loads one complete version. Raises `WeightUpdateFailed`; the engine must then be started anew."""
        ...

    async def report(self, replica: int) -> EngineReport: ...

    async def hand_back(self, replica: int) -> None:
        """Stops sampling: every `put` of a group that this engine has not finished raises `HandedBack`."""
        ...

    async def stop_engine(self, replica: int) -> None:
        """Ends the engine and gives its resources back."""
        ...

    # groups

    def sample(self, replica: int, request: GroupRequest, kept: Any = None) -> Any:
        """Starts a group at an engine; reference to its rows. `kept`: what `take_back` gave."""
        ...

    async def take_back(self, replica: int, group_id: int) -> Any:
        """Reference to what an engine has of a group that it handed back; from here on it outlives the engine."""
        ...

    async def sampled(self, rows: Any) -> None:
        """Returns once the engine has made the rows: its place is free from here on. Raises what sampling raised:
        `RolloutFailed`, `HandedBack`."""
        ...

    async def put(self, rows: Any) -> Receipt:
        """Waits for the rows, sends them through the scorers and moves them into the queue. Idempotent: the same rows
        again, without sampling them again, after `StoreFull` or once a scorer or the queue was replaced. Raises what
        sampling or scoring raised: `RolloutFailed`, `HandedBack`."""
        ...

    # queue

    async def start_queue(self) -> None:
        """A new, empty queue in place of the dead one."""
        ...

    async def restore_queue(self, file: Path, only: Collection[int] | None = None) -> list[Receipt]:
        """Takes over what `save_queue` wrote: all of it, or of `only` these groups."""
        ...

    async def save_queue(self, file: Path) -> None: ...

    async def release(self, group_ids: Sequence[int]) -> None:
        """The queue lets go of groups; unknown ones are no error."""
        ...

    async def refuse(self, group_id: int) -> None:
        """The queue lets go of a group, and takes it no more should it still arrive."""
        ...

    async def write_batch(self, group_ids: Sequence[int], file: Path, version: int, columns: Any) -> None:
        """Keeps a trained batch as Parquet, tagged with the version that its last step made."""
        ...

    # metrics

    async def serve_metrics(self, again_at: int | None) -> int:
        """Starts the metrics endpoint; returns its port. `again_at`: where it was before, if it was."""
        ...

    async def show_metrics(self, state: dict[str, Any]) -> None:
        """Replaces every series of the endpoint by these (`Exporter.state`)."""
        ...

    async def scorer_updates(self) -> list[Update]:
        """Metric updates of the verifiers since the last call."""
        ...
