"""Where Ray begins and ends: connecting, checking the cluster against the configuration, placing each role as a
group of its own, and turning the plain role classes into Ray actors."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as package_version
from inspect import getmembers, iscoroutinefunction
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.authentication.grpc_authentication_client_interceptor import (
    _get_authentication_metadata_tuple as metadata_with_token,
)
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RaySystemError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.core.config import Config
from headway.core.errors import ClusterError, StoreFull
from headway.core.sections import Resources
from headway.core.weights import ITEM_BYTES

PROBE_DEADLINE_S = 5.0
SMALLEST_CPU_SHARE = 0.01  # a placement-group bundle must ask for something
SPARE_ENGINES = 4
"""Engines that `headway scale` may add to a run on a Ray instance of its own."""
POLL_S = 0.1
FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 6,
}
"""A node that is gone is known to be gone after about three seconds; Ray's defaults take fifteen, and much less would
take a node for gone whose cores are all busy."""
CONTROL = "control"
"""Name of a run's mailbox in its namespace."""


def namespace(run_name: str) -> str:
    """Ray namespace of a run."""
    return f"headway-{run_name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one role's group asks for."""

    role: str
    replicas: int
    bundle: dict[str, float]
    """Resources of one replica."""
    labels: dict[str, str]


def needs(config: Config) -> list[Need]:
    """The groups of this configuration, largest GPU demand first."""
    if config.stage != "rl":
        return [_need("learner", config.learner.replicas, config.learner)]
    groups = [
        _need("learner", config.learner.replicas, config.learner),
        _need("generation", config.generation.replicas, config.generation),
        _need("verifiers", config.verifiers.replicas, config.verifiers),
    ]
    if config.judge.model:
        groups.append(_need("judge", config.judge.replicas, config.judge))
    if config.reward_model.path:
        groups.append(_need("reward_model", config.reward_model.replicas, config.reward_model))
    if config.algorithm.needs_reference:
        groups.append(_need("reference", config.reference.replicas, config.reference))
    if config.algorithm.needs_critic:
        groups.append(_need("critic", config.critic.replicas, config.critic))
    return sorted(groups, key=lambda need: -need.bundle.get("GPU", 0))


def _need(role: str, replicas: int, resources: Resources) -> Need:
    bundle = {"CPU": max(resources.cpus, SMALLEST_CPU_SHARE)}
    if resources.gpus:
        bundle["GPU"] = resources.gpus
    return Need(role=role, replicas=replicas, bundle=bundle, labels=resources.labels)


def connect(config: Config) -> None:
    """Starts a local Ray instance, or joins the one that the configuration names. Raises `ClusterError`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    address, run = config.cluster.address, namespace(config.run.name)
    if address != "local":
        join(address, run)
        return
    # CPUs of an instance of our own are tickets, not silicon: a small machine may share its cores, and engines that
    # come later need tickets too. GPUs are what the machine has.
    generation = config.generation
    engines = max(generation.max_replicas or 0, generation.replicas + SPARE_ENGINES)
    groups = [
        need if need.role != "generation" else replace(need, replicas=engines) for need in needs(config)
    ]
    cpus = math.ceil(sum(need.replicas * need.bundle["CPU"] for need in groups))
    join(
        "local",
        run,
        include_dashboard=False,
        num_cpus=max(os.cpu_count() or 1, cpus + 1),
        _system_config=dict(FAILURE_DETECTION),  # Ray writes into it
    )


def join(address: str, run: str, **options: Any) -> None:
    """Connects this process to Ray, in a run's namespace. Raises `ClusterError`."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address == "auto":
        address = _found()
    # Ray does not say that a cluster wants the token of this machine. Where it wants none, a driver that shows one cannot
    # be reached by its own actors.
    if address != "local" and wants_token(address):
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        if ":" in address and wants_token(address, metadata_with_token()):
            raise ClusterError(
                f"cannot join the Ray cluster at {address!r}: unauthorised; set RAY_AUTH_TOKEN to the cluster's token, or put "
                "it into ~/.ray/auth_token"
            )
    # Ray puts the driver's working directory first on every worker's import path. An empty folder keeps ours
    # from standing in for packages of the same name.
    neutral = Path(tempfile.gettempdir()) / f"headway-cwd-{os.getuid()}"
    neutral.mkdir(mode=0o700, exist_ok=True)
    before = os.getcwd()
    os.chdir(neutral)
    try:
        ray.init(address=address, namespace=run, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"cannot join the Ray cluster at {address!r}: {str(error).strip()}") from error
    finally:
        os.chdir(before)


def disconnect() -> None:
    """Leaves Ray; an instance that `connect` started ends with all its processes."""
    ray.shutdown()


def _found() -> str:
    """Where `auto` leads, so that it can be probed: a cluster that was killed leaves its address behind."""
    try:
        address = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        address = None
    if address is None:
        raise ClusterError(
            "no Ray cluster on this machine; start one with 'ray start --head', or name one with RAY_ADDRESS=HEAD:6379"
        )
    return address


def wants_token(address: str, metadata: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether the cluster refuses whoever shows only this. Ray itself retries an address that nobody answers at for minutes;
    one plain call tells at once. Raises `ClusterError`."""
    import grpc

    place = address.removeprefix("ray://")
    if ":" not in place:
        return True
    with grpc.insecure_channel(place) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(
                b"", timeout=PROBE_DEADLINE_S, metadata=metadata
            )
        except grpc.RpcError as error:
            code: Any = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ClusterError(
                    f"no Ray cluster at {address!r} ({code.name.lower()}); start one with 'ray start --head', or use "
                    "cluster.address=local"
                ) from error
            return code == grpc.StatusCode.UNAUTHENTICATED
    return False


def check_resources(config: Config) -> None:
    """Fits every replica onto the nodes that are alive. Raises `ClusterError` naming what is missing."""
    nodes = [
        (dict(node["Resources"]), dict(node.get("Labels") or {})) for node in ray.nodes() if node["Alive"]
    ]
    total = {key: sum(free.get(key, 0) for free, _ in nodes) for key in ("CPU", "GPU")}
    faults = []
    for need in needs(config):
        placed = 0
        for _ in range(need.replicas):
            for free, labels in nodes:
                fits = all(free.get(key, 0) >= amount for key, amount in need.bundle.items())
                if fits and need.labels.items() <= labels.items():
                    for key, amount in need.bundle.items():
                        free[key] -= amount
                    placed += 1
                    break
        if placed < need.replicas:
            each = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
            where = f" on nodes labelled {need.labels}" if need.labels else ""
            faults.append(
                f"group '{need.role}' needs {need.replicas} x ({each}){where}, only {placed} fit: the cluster has "
                f"{total['GPU']:g} GPU and {total['CPU']:g} CPU on {len(nodes)} node(s); "
                f"lower {need.role}.replicas, {need.role}.gpus or {need.role}.cpus, or add nodes"
            )
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit type:")[0][:300].rstrip(".") if lines else type(error).__name__


def published_bytes(config: Config, model_folder: str) -> int:
    """Size of one published weight version: the model's tensors in `model.dtype`. An adapter is small beside it and
    counts as nothing."""
    if config.learner.lora_rank:
        return 0
    elements = 0
    for file in Path(model_folder).glob("*.safetensors"):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        elements += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return elements * ITEM_BYTES[config.model.dtype]


def check_store(config: Config, model_folder: str, weight_nodes: set[str]) -> None:
    """The object store must hold the queue on the driver's node, and on each of `weight_nodes` (ids) the version that
    is served beside the one that replaces it. Raises `ClusterError`."""
    weights = 2 * published_bytes(config, model_folder)
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        identity = node["NodeID"]
        queue = config.queue.max_mib << 20 if identity == here else 0
        needed = queue + (weights if identity in weight_nodes else 0)
        size = int(node["Resources"].get("object_store_memory", 0))
        if node["Alive"] and needed > size:
            raise ClusterError(
                f"the object store of node {node['NodeManagerAddress']} holds {size >> 20} MiB, but this run needs "
                f"{-(-needed >> 20)} MiB there: queue.max_mib={queue >> 20} and {needed - queue >> 20} MiB for two weight "
                "versions; lower queue.max_mib, or start Ray with a larger --object-store-memory (and /dev/shm)"
            )


class Placement:
    """A placement group for the learner's ranks, and one for each replica of every other role. `close` gives all of them
    back."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._run = config.run.name
        self._deadline_s = config.cluster.placement_deadline_s
        self._needs = {need.role: need for need in needs(config)}
        self._logs = folder / "logs"
        self._groups: dict[str, PlacementGroup] = {}
        """By name: `learner`, or `ROLE-REPLICA`."""

    async def reserve(self) -> None:
        """Waits for the resources of every role but the engines'. Raises `ClusterError` after the placement deadline."""
        for need in self._needs.values():
            if need.role == "learner":
                self._groups["learner"] = await self._ask_for("learner", need, need.replicas)
            elif need.role != "generation":
                for replica in range(need.replicas):
                    name = f"{need.role}-{replica}"
                    self._groups[name] = await self._ask_for(name, need, 1)
        for name in list(self._groups):
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

    async def _ask_for(self, name: str, need: Need, replicas: int) -> PlacementGroup:
        """Asks for a group. A group's name is free again a moment after whoever had it was killed."""
        end = asyncio.get_running_loop().time() + self._deadline_s
        while True:
            try:
                return await asyncio.to_thread(
                    placement_group,
                    [need.bundle] * replicas,
                    strategy="PACK",
                    name=f"{self._run}-{name}",
                    bundle_label_selector=[need.labels] * replicas,
                )
            except RaySystemError as error:
                if asyncio.get_running_loop().time() > end:
                    raise ClusterError(f"group '{name}' cannot be placed: {short_reason(error)}") from error
            await asyncio.sleep(POLL_S)

    async def _placed(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while not await self.nodes(name):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            every = await asyncio.to_thread(ray.available_resources)
            free = {key: every.get(key, 0.0) for key in ("CPU", "GPU")}
            labels = self._needs[name.partition("-")[0]].labels
            where = f" on nodes labelled {labels}" if labels else ""
            raise ClusterError(
                f"group '{name}' got no place in {self._deadline_s:g} s (cluster.placement_deadline_s): it asks for "
                f"{self._groups[name].bundle_specs}{where}, free are {free} on all nodes together"
            ) from None

    async def nodes(self, name: str) -> set[str]:
        """Ids of the nodes that a group was placed on; none while it waits for a place."""
        row = await asyncio.to_thread(placement_group_table, self._groups[name])
        nodes = set(row["bundles_to_node_id"].values()) if row["state"] == "CREATED" else set[str]()
        # A group is not moved before the cluster knows that its node is gone.
        alive = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
        return nodes if nodes <= alive else set()

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
            options["num_cpus"] = need.bundle["CPU"]
            options["num_gpus"] = need.bundle.get("GPU", 0)
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
        hosted = _hosted(cls, str(log), package_version("headway"), num_gpus)
        remote: Any = ray.remote
        return remote(concurrency_groups={"watch": 1})(hosted).options(**options).remote(*args)

    def close(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()


def _hosted(cls: type, log: str, expected_version: str, num_gpus: int) -> type:
    """The role class in its process: output in a file of its own, version and devices checked, and a call that ends
    only with the actor, whatever else it is busy with."""

    class Hosted(cls):
        def __init__(self, *args: Any) -> None:
            _redirect_output(log)
            if (here := package_version("headway")) != expected_version:
                raise RuntimeError(f"this worker runs headway {here}, the driver {expected_version}")
            visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
            if num_gpus and len(visible) != num_gpus:
                raise RuntimeError(f"this worker was given {num_gpus} GPUs but sees {visible}")
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
