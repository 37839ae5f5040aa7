"""Each role as a group of its own on the cluster, and the plain role classes as Ray actors in it."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version as package_version
from inspect import getmembers, iscoroutinefunction
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, OutOfMemoryError, RaySystemError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.cluster import code
from headway.cluster.crew import NODE_DEADLINE_S, Fleet, Shortage
from headway.cluster.elastic import Bundle, fitting, freed, in_the_way
from headway.cluster.joining import CONTROL, namespace
from headway.cluster.room import (
    SHOWN_NODES,
    Need,
    alive,
    answers_of,
    could_hold,
    demanding_first,
    free_by_node,
    may_grow,
    needs,
    nodes_for,
)
from headway.core.config import Config
from headway.core.errors import ClusterError, StoreFull

POLL_S = 0.1
ROOM_S = 2.0
"""A group that has no place by then has to wait for one."""
CODE_DEADLINE_S = 60.0
"""For a node to say which code it has."""


def check_code(config: Config) -> None:
    """The driver's node and every node that can carry a replica must run the driver's code. Raises `ClusterError` naming
    those that do not."""
    groups, own = needs(config), ray.get_runtime_context().get_node_id()

    def can_carry(node: dict[str, Any]) -> bool:
        return node["NodeID"] == own or any(
            need.labels.items() <= (node.get("Labels") or {}).items()
            and all(node["Resources"].get(key, 0) >= amount for key, amount in need.bundle.items())
            for need in groups
        )

    def look() -> str | None:
        try:
            from headway.cluster.code import here
        except ImportError:
            return None
        return here()

    nodes = [node for node in alive() if can_carry(node)]
    found = answers_of(nodes, look, CODE_DEADLINE_S)  # actors on those that do not answer look again
    faults = [
        code.difference(found[node["NodeID"]], code.here(), node["NodeManagerAddress"])
        for node in nodes
        if found.get(node["NodeID"], code.here()) != code.here()
    ]
    if faults:
        raise ClusterError("\n".join(faults))


def store_table(table: pa.Table) -> Any:
    """The queue's way into the object store. Raises `StoreFull`."""
    try:
        return ray.put(table)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise StoreFull(short_reason(error)) from error


def short_reason(error: object) -> str:
    """The one line of an error that says what happened."""
    if isinstance(error, OutOfMemoryError):  # the first of a page
        return str(error).partition(".")[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit type:")[0][:300].rstrip(".") if lines else type(error).__name__


class Placement:
    """A placement group for the learner's ranks, and one for each replica of every other role. `close` gives all of them
    back."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._run = config.run.name
        # A Ray of its own starts its workers from this very installation, which someone may edit while the run goes on.
        self._is_own = config.cluster.address == "local"
        self._code = package_version("headway") if self._is_own else code.here()
        self._deadline_s = config.cluster.placement_deadline_s
        self._needs = {need.role: need for need in needs(config)}
        self._logs = folder / "logs"
        self._groups: dict[str, PlacementGroup] = {}
        """By name: `learner`, or `ROLE-REPLICA`."""
        self._may_grow = ray.is_initialized() and may_grow()
        """What was found when someone last asked for something."""

    @property
    def deadline_s(self) -> float:
        """Longest wait for resources; an autoscaler is given time to bring a node."""
        return max(self._deadline_s, NODE_DEADLINE_S) if self._may_grow else self._deadline_s

    def expect(self, fleet: Fleet) -> None:
        """Before `reserve`: the engines that there are to be."""
        need = self._with_gpus("generation", fleet.gpus)
        self._needs["generation"] = replace(need, replicas=fleet.replicas)

    def _with_gpus(self, role: str, gpus: float | None) -> Need:
        need = self._needs[role]
        if gpus is None:
            return need
        return replace(need, bundle={"CPU": need.bundle["CPU"], **({"GPU": gpus} if gpus else {})})

    async def reserve(self) -> None:
        """Waits for the resources of every role, and of the engines that the run starts with. Raises `ClusterError` after the
        placement deadline, and where a node runs other code.

        Ray puts a group wherever it fits, one without GPUs on the only node that has some. So the others come first."""
        if not self._is_own:
            await asyncio.to_thread(check_code, self._config)
        needs = demanding_first(self._needs.values())
        choosy = [need for need in needs if "GPU" in need.bundle or need.labels]
        for wave in (choosy, [need for need in needs if need not in choosy]):
            asked: list[str] = []
            for need in wave:
                together = need.role == "learner"
                for replica in range(1 if together else need.replicas):
                    name = "learner" if together else f"{need.role}-{replica}"
                    self._groups[name] = await self._ask_for(name, need, need.replicas if together else 1)
                    asked.append(name)
            for name in asked:
                await self._placed(name)

    async def reserve_one(self, role: str, replica: int) -> None:
        """Waits for the resources of one replica: those that it has, if it has any, moved to another node when theirs is
        gone. Raises `ClusterError` after the placement deadline, and then holds none."""
        name = f"{role}-{replica}"
        if name not in self._groups:
            self._groups[name] = await self._ask_for(name, self._needs[role], 1)
        try:
            await self._placed(name)
        except BaseException:
            self.release_one(role, replica)
            raise

    async def ask_one(self, role: str, replica: int, gpus: float | None = None) -> Shortage | None:
        """Asks for the resources of one replica: those that it has, unless they are to have other `gpus`. Returns what they
        wait for, None once they are there. Raises `ClusterError` when no node could hold them and none will come, and then
        holds none."""
        name, need = f"{role}-{replica}", self._with_gpus(role, gpus)
        group = self._groups.get(name)
        if group is not None and gpus is not None and _gpus(group) != gpus:
            self.release_one(role, replica)
        self._may_grow = await asyncio.to_thread(may_grow)
        bundle = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
        where = f" on a node labelled {need.labels}" if need.labels else ""
        if not self._may_grow and not await asyncio.to_thread(could_hold, need):
            self.release_one(role, replica)
            raise ClusterError(f"no node can hold group '{name}': it asks for {bundle}{where}")
        if name not in self._groups:
            self._groups[name] = await self._ask_for(name, need, 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                while not await self.nodes(name):
                    await asyncio.sleep(POLL_S)
                return None
        awaited = f"{'the autoscaler, which is asked' if self._may_grow else 'room'} for {bundle}{where}"
        return Shortage(awaited=awaited, may_grow=self._may_grow)

    async def in_the_way(
        self, replica: int, leaving: Collection[int], others: Sequence[int]
    ) -> list[int] | None:
        """As `Crew.in_the_way`."""
        group = self._groups.get(f"generation-{replica}")
        if group is None or await self.nodes(f"generation-{replica}"):
            return []
        free, held = await asyncio.to_thread(self._engine_room)
        return in_the_way(group.bundle_specs[0], free, held, leaving, others)

    async def check_fleet(self, fleet: Fleet) -> None:
        """As `Crew.check_fleet`."""
        need = self._with_gpus("generation", fleet.gpus)
        free, held = await asyncio.to_thread(self._engine_room)
        room = fitting(need.bundle, freed(free, held))
        if room >= fleet.replicas or await asyncio.to_thread(may_grow):
            return
        where = f" on nodes labelled {need.labels}" if need.labels else ""
        most = max((node["Resources"].get("GPU", 0) for node in nodes_for(need)), default=0)
        if fleet.gpus > most:
            has = f"the largest has {most:g}" if most else "there is none"
            raise ClusterError(f"no node has {fleet.gpus:g} GPU{where}: {has}")
        each = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
        raise ClusterError(
            f"there is room for {room} x ({each}){where} once the present engines have left, not for {fleet.replicas}; ask for "
            "fewer engines or GPUs, or add nodes"
        )

    def _engine_room(self) -> tuple[dict[str, Bundle], dict[int, tuple[str, Bundle]]]:
        """What is free on each node that engines may be on, and node and resources of those that have a place."""
        nodes = {node["NodeID"] for node in nodes_for(self._needs["generation"])}
        free = {node: has for node, has in available_resources_per_node().items() if node in nodes}
        held: dict[int, tuple[str, Bundle]] = {}
        for name, group in list(self._groups.items()):
            role, _, replica = name.rpartition("-")
            if role == "generation" and (row := placement_group_table(group))["state"] == "CREATED":
                (node,) = row["bundles_to_node_id"].values()
                held[int(replica)] = node, group.bundle_specs[0]
        return free, held

    def gpus_of(self, role: str, replica: int) -> float:
        """GPUs of a replica that asked for its resources."""
        return _gpus(self._groups[f"{role}-{replica}"])

    async def _ask_for(self, name: str, need: Need, replicas: int) -> PlacementGroup:
        """Asks for a group. A group's name is free again a moment after whoever had it was killed."""
        end = asyncio.get_running_loop().time() + self._deadline_s
        while True:
            asking = asyncio.ensure_future(
                asyncio.to_thread(
                    placement_group,
                    [need.bundle] * replicas,
                    strategy="PACK",
                    name=f"{self._run}-{name}",
                    bundle_label_selector=[need.labels] * replicas,
                )
            )
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:  # the thread goes on
                asking.add_done_callback(_remove)
                raise
            except RaySystemError as error:
                if asyncio.get_running_loop().time() > end:
                    raise ClusterError(f"group '{name}' cannot be placed: {short_reason(error)}") from error
            await asyncio.sleep(POLL_S)

    async def _placed(self, name: str) -> None:
        self._may_grow = await asyncio.to_thread(may_grow)
        deadline_s = self.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while not await self.nodes(name):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            need, free = self._needs[name.partition("-")[0]], await asyncio.to_thread(free_by_node)
            where = f" on nodes labelled {need.labels}" if need.labels else ""
            more = f" and on {len(free) - SHOWN_NODES} others less" if len(free) > SHOWN_NODES else ""
            parts = ", a part of a GPU from one GPU" if _gpus(self._groups[name]) % 1 else ""
            is_configured = deadline_s == self._deadline_s
            why = "cluster.placement_deadline_s" if is_configured else "the autoscaler brought no node for it"
            raise ClusterError(
                f"group '{name}' got no place in {deadline_s:g} s ({why}): it asks for "
                f"{self._groups[name].bundle_specs}{where}, each on one node{parts}; free are "
                f"{', '.join(map(str, free[:SHOWN_NODES]))} by node{more}"
            ) from None

    async def nodes(self, name: str) -> set[str]:
        """Ids of the nodes that a group was placed on; none while it waits for a place."""
        row = await asyncio.to_thread(placement_group_table, self._groups[name])
        nodes = set(row["bundles_to_node_id"].values()) if row["state"] == "CREATED" else set[str]()
        # A group is not moved before the cluster knows that its node is gone.
        there = {node["NodeID"] for node in await asyncio.to_thread(alive)}
        return nodes if nodes <= there else set()

    def release_one(self, role: str, replica: int) -> None:
        """Gives a replica's resources back, if it has any."""
        if (group := self._groups.pop(f"{role}-{replica}", None)) is not None:
            remove_placement_group(group)

    def spawn(self, cls: type, role: str, replica: int, concurrency: int, args: Sequence[Any]) -> Any:
        """Starts an actor of a role in its place; returns its handle. `concurrency`: calls at a time."""
        options: dict[str, Any] = {"max_concurrency": concurrency}
        need = self._needs.get(role)
        if need is None:
            # On the driver's node: the endpoint's address is then the one that the operator knows.
            options["num_cpus"] = 0
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            if role == CONTROL:
                options |= {"name": CONTROL, "namespace": namespace(self._run)}
        else:
            name, index = (role, replica) if role == "learner" else (f"{role}-{replica}", 0)
            bundle = self._groups[name].bundle_specs[index]
            options["num_cpus"] = bundle["CPU"]
            options["num_gpus"] = bundle.get("GPU", 0)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[name], placement_group_bundle_index=index
            )
            if not options["num_gpus"]:
                # Threads that spin while they wait take the cores from whoever else computes on them. And a role
                # without GPUs must not see any, or torch would take one that another role was given.
                hidden = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
                options["runtime_env"] = {"env_vars": hidden}
        log = self._logs / f"{role if need is None else f'{role}-{replica}'}.log"
        num_gpus = math.ceil(options.get("num_gpus", 0))
        hosted = _hosted(cls, str(log), self._code, num_gpus)
        remote: Any = ray.remote
        return remote(concurrency_groups={"watch": 1})(hosted).options(**options).remote(*args)

    def close(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()


def _gpus(group: PlacementGroup) -> float:
    return group.bundle_specs[0].get("GPU", 0.0)


def _remove(asked: asyncio.Future[PlacementGroup]) -> None:
    """Gives a group back that nobody waits for any more."""
    if not asked.cancelled() and asked.exception() is None:
        remove_placement_group(asked.result())


def _hosted(cls: type, log: str, expected_code: str, num_gpus: int) -> type:
    """The role class in its process: output in a file of its own, code and devices checked, and a call that ends
    only with the actor, whatever else it is busy with."""

    class Hosted(cls):
        def __init__(self, *args: Any) -> None:
            _redirect_output(log)
            code.check(expected_code, ray.util.get_node_ip_address())
            visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
            if num_gpus and len(visible) != num_gpus:
                raise RuntimeError(
                    f"this worker was given {num_gpus} GPUs but sees {visible}; on its node Ray must be free to set "
                    "CUDA_VISIBLE_DEVICES: take RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES away"
                )
            super().__init__(*args)

        if any(iscoroutinefunction(member) for _, member in getmembers(cls)):

            @ray.method(concurrency_group="watch")
            async def watch(self) -> None:
                await asyncio.Event().wait()

            async def signalled(self, method: str, *args: Any) -> Any:  # pyright: ignore[reportRedeclaration]
                """The result, and beside it something small to wait for, which fails as it does."""
                return await getattr(self, method)(*args), None
        else:

            @ray.method(concurrency_group="watch")
            def watch(self) -> None:
                threading.Event().wait()

            def signalled(self, method: str, *args: Any) -> Any:
                return getattr(self, method)(*args), None

    Hosted.__name__ = Hosted.__qualname__ = cls.__name__
    return Hosted


def _redirect_output(log: str) -> None:
    """Child processes (vLLM's engine core and workers) inherit it."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
