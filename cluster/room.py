"""What the groups of a configuration ask for, and whether the nodes of a cluster have it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headway.core.config import Config
from headway.core.errors import ClusterError
from headway.core.sections import Resources
from headway.core.weights import ITEM_BYTES

SMALLEST_CPU_SHARE = 0.01  # a placement-group bundle must ask for something
FRAGMENTS = (
    "; a part of a GPU is taken from one GPU, and what the others leave of each is too little: set gpus so that whole GPUs are "
    "divided without rest"
)
SHOWN_NODES = 8


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


def demanding_first(groups: Iterable[Need]) -> list[Need]:
    """In the order in which they take their places: those that the fewest nodes can hold first."""
    return sorted(groups, key=lambda n: (-n.bundle.get("GPU", 0), -len(n.labels), -n.bundle["CPU"]))


def _need(role: str, replicas: int, resources: Resources) -> Need:
    bundle = {"CPU": max(resources.cpus, SMALLEST_CPU_SHARE)}
    if resources.gpus:
        bundle["GPU"] = resources.gpus
    return Need(role=role, replicas=replicas, bundle=bundle, labels=resources.labels)


def alive() -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def answers_of(
    nodes: Iterable[Mapping[str, Any]], look: Callable[[], Any], timeout_s: float
) -> dict[str, Any]:
    """What `look` gives on each of these nodes, by their ids; of those that do not answer in time nothing. It runs where
    headway may be missing, so it has to stand for itself."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeID"]
        for node in nodes
    }
    answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=timeout_s)
    found: dict[str, Any] = {}
    for question in answered:
        with suppress(RayError):  # the node has just died
            found[asked[question]] = ray.get(question)
    return found


def check_resources(config: Config) -> None:
    """Fits every replica onto the nodes that are alive. Raises `ClusterError` naming what is missing, unless the autoscaler
    may add it."""
    faults = shortfalls(config, [(node["Resources"], node.get("Labels") or {}) for node in alive()])
    if faults and not may_grow():
        raise ClusterError("\n".join(faults))


def shortfalls(config: Config, nodes: Iterable[tuple[Mapping[str, float], Mapping[str, str]]]) -> list[str]:
    """What these nodes (their resources and labels) lack for every replica to fit, a line for each group."""
    rooms = [_Room.of(resources, labels) for resources, labels in nodes]
    total = {"CPU": sum(room.cpus for room in rooms), "GPU": sum(sum(room.gpus) for room in rooms)}
    faults = []
    for need in demanding_first(needs(config)):
        placed = 0
        while placed < need.replicas and any(room.take(need) for room in sorted(rooms, key=_Room.rest)):
            placed += 1
        if placed < need.replicas:
            each = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
            where = f" on nodes labelled {need.labels}" if need.labels else ""
            faults.append(
                f"group '{need.role}' needs {need.replicas} x ({each}){where}, only {placed} fit: the cluster has "
                f"{total['GPU']:g} GPU and {total['CPU']:g} CPU on {len(rooms)} node(s); "
                f"lower {need.role}.replicas, {need.role}.gpus or {need.role}.cpus, or add nodes"
                + (FRAGMENTS if any(room.is_in_fragments(need) for room in rooms) else "")
            )
    return faults


@dataclass(kw_only=True, slots=True)
class _Room:
    """What is free on a node."""

    cpus: float
    gpus: list[float]
    """Of each GPU."""
    labels: Mapping[str, str]

    @classmethod
    def of(cls, resources: Mapping[str, float], labels: Mapping[str, str]) -> _Room:
        gpus = [1.0] * int(resources.get("GPU", 0))
        return cls(cpus=resources.get("CPU", 0.0), gpus=gpus, labels=labels)

    def rest(self) -> tuple[float, float]:
        """The smallest is filled first: what needs no GPU leaves them to others."""
        return sum(self.gpus), self.cpus

    def take(self, need: Need) -> bool:
        """Room for one replica, if there is: whole GPUs, or a part of the one that has least to spare."""
        amount = need.bundle.get("GPU", 0.0)
        number, part = math.ceil(amount), min(1.0, amount)
        fitting = sorted((free, gpu) for gpu, free in enumerate(self.gpus) if free >= part)[:number]
        if not self._can_hold(need) or len(fitting) < number:
            return False
        self.cpus = round(self.cpus - need.bundle["CPU"], 6)
        for free, gpu in fitting:
            self.gpus[gpu] = round(free - part, 6)
        return True

    def _can_hold(self, need: Need) -> bool:
        return self.cpus >= need.bundle["CPU"] and need.labels.items() <= self.labels.items()

    def is_in_fragments(self, need: Need) -> bool:
        """Whether enough is free of its GPUs together, and too little of each."""
        amount = need.bundle.get("GPU", 0.0)
        return (
            0 < amount <= sum(self.gpus)
            and self._can_hold(need)
            and not replace(self, gpus=[*self.gpus]).take(need)
        )


def can_grow(report: Mapping[str, str] | None, labels: Iterable[Mapping[str, str]]) -> bool:
    """Whether an autoscaler may add nodes. `report`: the type of each node by its id, as Ray's first autoscaler tells it; it
    runs on every cluster that has no other, and where it can add none each node is a type of its own. The second one tells
    nothing; the nodes that it starts are labelled with their group."""
    if report is not None:
        return any(kind != f"node_{node}" for node, kind in report.items())
    return any("ray.io/node-group" in own for own in labels)


def may_grow() -> bool:
    """Whether an autoscaler may add nodes to this cluster."""
    return can_grow(_autoscaler_report(), (node.get("Labels") or {} for node in alive()))


def _autoscaler_report() -> dict[str, str] | None:
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    if status is None:
        return None
    return (json.loads(status).get("autoscaler_report") or {}).get("node_type_mapping")


def free_by_node() -> list[dict[str, float]]:
    """The node with the most GPUs and CPUs first."""
    there = {node["NodeID"] for node in alive()}
    found = [
        {key: free.get(key, 0.0) for key in ("CPU", "GPU")}
        for node, free in available_resources_per_node().items()
        if node in there
    ]
    return sorted(found, key=lambda free: (-free["GPU"], -free["CPU"]))


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
    for node in alive():
        identity = node["NodeID"]
        queue = config.queue.max_mib << 20 if identity == here else 0
        needed = queue + (weights if identity in weight_nodes else 0)
        size = int(node["Resources"].get("object_store_memory", 0))
        if needed > size:
            raise ClusterError(
                f"the object store of node {node['NodeManagerAddress']} holds {size >> 20} MiB, but this run needs "
                f"{-(-needed >> 20)} MiB there: queue.max_mib={queue >> 20} and {needed - queue >> 20} MiB for two weight "
                "versions; lower queue.max_mib, or start Ray with a larger --object-store-memory (and /dev/shm)"
            )


def nodes_for(need: Need) -> list[dict[str, Any]]:
    """The nodes with its labels."""
    return [node for node in alive() if need.labels.items() <= (node.get("Labels") or {}).items()]


def could_hold(need: Need) -> bool:
    """Whether a node has as much, free or not."""
    return any(
        all(node["Resources"].get(key, 0) >= amount for key, amount in need.bundle.items())
        for node in nodes_for(need)
    )
