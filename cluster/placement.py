"""Where Ray begins and ends: connecting, checking the cluster against the configuration, placing each role as a
group of its own, and turning the plain role classes into Ray actors."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.actors.critic import CriticActor
from headway.actors.generation import GenerationActor
from headway.actors.policy import PolicyActor
from headway.actors.reference import ReferenceActor
from headway.actors.verifier import VerifierWorker
from headway.cluster.exporter import Exporter
from headway.cluster.queue import RolloutQueue
from headway.core.config import Config, Resources
from headway.core.errors import ClusterError

PROBE_DEADLINE_S = 5.0
SMALLEST_CPU_SHARE = 0.01  # a placement-group bundle must ask for something


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
    groups = [
        _need("learner", config.learner.replicas, config.learner),
        _need("generation", config.generation.replicas, config.generation),
        _need("verifiers", config.verifiers.replicas, config.verifiers),
    ]
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
    _probe(config.cluster.address)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    common: dict[str, Any] = {
        "namespace": f"headway-{config.run.name}",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    # Ray puts the driver's working directory first on every worker's import path. An empty folder keeps ours
    # from standing in for packages of the same name.
    neutral = tempfile.mkdtemp(prefix="headway-cwd-")
    before = os.getcwd()
    os.chdir(neutral)
    try:
        if config.cluster.address == "local":
            # CPUs of an instance of our own are tickets, not silicon: a small machine may share its cores.
            # GPUs are what the machine has.
            cpus = sum(need.replicas * need.bundle["CPU"] for need in needs(config))
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(os.cpu_count() or 1, int(cpus) + 1),
                **common,
            )
        else:
            ray.init(address=config.cluster.address, **common)
    except ConnectionError as error:
        raise ClusterError(
            f"no Ray cluster at cluster.address={config.cluster.address!r}: {error}"
        ) from error
    finally:
        os.chdir(before)


def _probe(address: str) -> None:
    """Ray retries an address that nobody listens on for minutes; a plain connection tells at once."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_DEADLINE_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at cluster.address={address!r}: {error}; start one with 'ray start --head', or use "
            "cluster.address=local"
        ) from error


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


class Placement:
    """One placement group per role, and the actors in them. `close` leaves nothing behind."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._needs = {need.role: need for need in needs(config)}
        self._folder = folder
        self._logs = folder / "logs"
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: list[Any] = []

    def reserve(self) -> None:
        """Waits for every group's resources. Raises `ClusterError` after the placement deadline."""
        for need in self._needs.values():
            self._groups[need.role] = placement_group(
                [need.bundle] * need.replicas,
                strategy="PACK",
                name=f"{self._config.run.name}-{need.role}",
                bundle_label_selector=[need.labels] * need.replicas,
            )
        for role, group in self._groups.items():
            if not group.wait(self._config.cluster.placement_deadline_s):
                raise ClusterError(
                    f"group '{role}' got no place in {self._config.cluster.placement_deadline_s:.0f} s: it asks for "
                    f"{group.bundle_specs}, free are {ray.available_resources()}"
                )

    def learners(self, model_folder: str) -> list[Any]:
        return [
            self._spawn(PolicyActor, "learner", rank, 1, self._config, model_folder, str(self._folder))
            for rank in range(self._config.learner.replicas)
        ]

    def reference(self, replica: int, model_folder: str) -> Any:
        return self._spawn(ReferenceActor, "reference", replica, 1, self._config, model_folder)

    def critic(self, model_folder: str) -> Any:
        return self._spawn(CriticActor, "critic", 0, 1, self._config, model_folder)

    def engine(self, replica: int, model_folder: str) -> Any:
        return self._spawn(
            GenerationActor, "generation", replica, 10_000, self._config, model_folder, replica
        )

    def verifier(self, replica: int) -> Any:
        limits = self._config.verifiers
        args = (limits.processes, limits.timeout_s, limits.memory_mib)
        return self._spawn(VerifierWorker, "verifiers", replica, limits.processes + 4, *args)

    def queue(self) -> Any:
        return self._beside_driver(RolloutQueue, "queue", 10_000, ray.put, ray.get)

    def exporter(self) -> Any:
        return self._beside_driver(Exporter, "metrics", 4)

    def _spawn(self, cls: type, role: str, replica: int, concurrency: int, *args: Any) -> Any:
        bundle = self._needs[role].bundle
        strategy = PlacementGroupSchedulingStrategy(self._groups[role], placement_group_bundle_index=replica)
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_concurrency": concurrency,
            "scheduling_strategy": strategy,
        }
        if "GPU" not in bundle:
            # Threads that spin while they wait take the cores from whoever else computes on them. And a role without
            # GPUs must not see any, or torch would take one that another role was given.
            options["runtime_env"] = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}}
        return self._remote(cls, f"{role}-{replica}", options, args)

    def _beside_driver(self, cls: type, role: str, concurrency: int, *args: Any) -> Any:
        # On the driver's node: the endpoint's address is then the one that the operator knows.
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": concurrency, "scheduling_strategy": strategy}
        return self._remote(cls, role, options, args)

    def _remote(self, cls: type, name: str, options: dict[str, Any], args: tuple[Any, ...]) -> Any:
        hosted = _hosted(cls, str(self._logs / f"{name}.log"), package_version("headway"))
        actor = ray.remote(hosted).options(**options).remote(*args)
        self._actors.append(actor)
        return actor

    def discard(self, actor: Any) -> None:
        """Ends an actor that is to be replaced."""
        self._actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups.values():
            remove_placement_group(group)
        ray.shutdown()


def _hosted(cls: type, log: str, expected_version: str) -> type:
    """The role class, with its process's output in a file of its own and its version checked."""

    class Hosted(cls):
        def __init__(self, *args: Any) -> None:
            _redirect_output(log)
            if (here := package_version("headway")) != expected_version:
                raise RuntimeError(f"this worker runs headway {here}, the driver {expected_version}")
            super().__init__(*args)

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
