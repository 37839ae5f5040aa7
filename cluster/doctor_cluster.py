"""The doctor's checks of the cluster: nodes, versions, places, memory."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version as package_version
from typing import Any

from headway.cluster import code
from headway.cluster.doctor_facts import GIB, Facts, Row, Unknown, error, faults_of, ok, warning
from headway.core.config import Config
from headway.core.errors import ClusterError
from headway.core.sections import Resources
from headway.core.weights import ITEM_BYTES

USED_SHARE = 0.05
"""Of a GPU's memory before a run: driver and desktop take less."""
PROBE_S = 60.0
"""For a node to say what it has."""
MASTER_BYTES = 16
"""Of a trained parameter: master weight, gradient and AdamW's two moments, in float32."""


def nodes_of(config: Config) -> list[dict[str, Any]]:
    from headway.cluster.joining import connect
    from headway.cluster.room import alive

    connect(config)
    return alive()


def _ray(facts: Facts) -> Iterable[Row]:
    address = facts.config.cluster.address
    total = {key: sum(node["Resources"].get(key, 0) for node in facts.nodes) for key in ("CPU", "GPU")}
    what = "an instance of its own starts" if address == "local" else f"joined {address}"
    yield ok(f"{what}: {len(facts.nodes)} node(s), {total['CPU']:g} CPU, {total['GPU']:g} GPU")


def _token(facts: Facts) -> Iterable[Row]:
    import ray

    from headway.cluster.joining import wants_token

    address: str = ray.get_runtime_context().gcs_address if facts.nodes else ""
    if wants_token(address):
        yield ok("the cluster asks for a token, and takes this machine's")
    elif facts.config.cluster.address == "local":
        yield ok("none is needed on an instance of its own")
    else:
        yield warning(
            "the cluster runs whatever anyone sends who reaches it",
            "start Ray with RAY_AUTH_MODE=token on its head",
        )


def machines_of(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    from headway.cluster.room import answers_of

    def look() -> dict[str, Any]:
        import os
        import platform
        import shutil
        import subprocess

        try:
            from headway.cluster.code import here
            from headway.cluster.doctor_cluster import left_behind
        except ImportError:
            headway, left = None, {}
        else:
            headway, left = here(), left_behind()
        smi = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
        gpus = []
        if shutil.which(smi[0]):
            out = subprocess.run(smi, capture_output=True, text=True, timeout=20).stdout
            numbers = [line.replace(",", " ").split() for line in out.splitlines()]
            gpus = [tuple(int(mib) << 20 for mib in row) for row in numbers if "".join(row).isdecimal()]
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
        return {
            "python": platform.python_version(),
            "headway": headway,
            "memory": pages,
            "shm": shm.total if shm else 0,
            "gpus": gpus,
            "left": left,
        }

    answers = answers_of(nodes, look, PROBE_S)
    return {node["NodeManagerAddress"]: answers.get(node["NodeID"]) for node in nodes}


def left_behind() -> dict[str, list[int]]:
    """Processes on this machine that have outlived the actor which started them, by its place."""
    from headway.actors.generation_traces import SHARED, lives

    found: dict[str, list[int]] = {}
    for path in SHARED.glob("headway-*.json"):
        try:
            record = json.loads(path.read_text())
        except OSError:
            continue  # an engine that starts has just removed it, or it is another user's
        left = [process[0] for process in record["processes"] if lives(process)]
        if left and not lives(record["author"]):
            found[path.name.partition(".")[0]] = left
    return found


def _versions(facts: Facts) -> Iterable[Row]:
    here = {"Python": platform.python_version(), "headway": code.here()}
    rows: list[Row] = []
    for address, said in facts.machines.items():
        if said is None:
            rows.append(
                warning(f"node {address} did not answer within {PROBE_S:.0f} s", "look at its raylet's log")
            )
            continue
        if said["headway"] is None:
            rows.append(
                warning(
                    f"node {address} has no headway",
                    "headway submit brings it along; for headway train install it there",
                )
            )
        elif said["headway"] != here["headway"]:
            rows.append(
                error(
                    f"node {address} has headway {said['headway']}, this machine {here['headway']}; install the same, or use "
                    "headway submit, which brings it along"
                )
            )
        if said["python"].split(".")[:2] != here["Python"].split(".")[:2]:
            rows.append(
                error(
                    f"node {address} has Python {said['python']}, this machine {here['Python']}; use the same on all"
                )
            )
    if not rows:
        versions = f"Ray {package_version('ray')}, Python {here['Python']}, headway {here['headway']}"
        rows.append(ok(f"{versions} on all {len(facts.machines)} node(s) as here"))
    return rows


def _groups(facts: Facts) -> Iterable[Row]:
    import ray

    from headway.cluster.room import check_resources, needs

    assert facts.nodes
    faults = ""
    try:
        check_resources(facts.config)
    except ClusterError as shortfall:
        faults = str(shortfall)
        yield from faults_of("", shortfall)
    wanted: dict[str, float] = {}
    for need in needs(facts.config):
        each = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
        where = f" on nodes labelled {need.labels}" if need.labels else ""
        if f"group '{need.role}'" not in faults:
            yield ok(f"{need.role}: {need.replicas} x ({each}){where}")
        for key, amount in need.bundle.items():
            wanted[key] = wanted.get(key, 0.0) + need.replicas * amount
    free: Any = ray.available_resources()
    short = [
        f"{free.get(key, 0):g} of {amount:g} {key}"
        for key, amount in wanted.items()
        if free.get(key, 0) < amount
    ]
    if short and not faults:
        yield warning(
            f"only {' and '.join(short)} are free now",
            "end what holds them, or the groups wait for cluster.placement_deadline_s",
        )


def _gpus(facts: Facts) -> Iterable[Row]:
    from headway.cluster.room import needs

    asked = sum(need.replicas * need.bundle.get("GPU", 0) for need in needs(facts.config))
    there = sum(node["Resources"].get("GPU", 0) for node in facts.nodes)
    found = f"{asked:g} asked, {there:g} there"
    if not asked and there:
        yield warning(f"{found}: they would stand idle", "set learner.gpus and generation.gpus")
    elif there < asked:
        yield error(f"{found}; lower learner.gpus or generation.gpus and replicas, or add nodes")
    else:
        yield ok(found)
    for address, said in facts.machines.items():
        gpus: list[tuple[int, int]] = said["gpus"] if said and asked else []
        for number, (total, used) in enumerate(gpus):
            if used > USED_SHARE * total:
                yield warning(
                    f"of GPU {number} of node {address} {used / GIB:.1f} of {total / GIB:.1f} GiB are in use",
                    "nvidia-smi there shows by whom; what a killed run has left must be ended by hand",
                )


def _leftovers(facts: Facts) -> Iterable[Row]:
    """Of runs that were killed."""
    from headway.cluster.stop import holdings

    assert facts.nodes
    run, found = facts.config.run.name, False
    if held := holdings(run):
        found = True
        whose = f"its driver is {held.driver}" if held.driver else "its driver is gone"
        yield warning(
            f"run {run!r} is on this cluster: {held}; {whose}",
            f"headway stop {run}, or give this one another run.name",
        )
    for address, said in facts.machines.items():
        left: dict[str, list[int]] = said["left"] if said else {}
        for name, processes in left.items():
            found = True
            yield warning(
                f"a killed actor of {name} has left processes {', '.join(map(str, processes))} on node {address}",
                "the next engine of that run there ends them; otherwise: kill -9",
            )
    if not found:
        yield ok("none")


def _store(facts: Facts) -> Iterable[Row]:
    from headway.cluster.room import check_store

    config, fault = facts.config, None
    labels = config.learner.labels.items()
    for node in facts.nodes:  # one that can hold the learner is enough
        if labels <= (node.get("Labels") or {}).items():
            try:
                check_store(config, str(facts.model_folder), {node["NodeID"]})
                fault = None
                break
            except ClusterError as too_small:
                fault = too_small
    if fault is not None:
        raise fault
    sizes = [int(node["Resources"].get("object_store_memory", 0)) for node in facts.nodes]
    yield ok(f"{min(sizes) / GIB:.1f} GiB or more on each node, for the queue and two weight versions")
    for node in facts.nodes:
        said = facts.machines.get(node["NodeManagerAddress"])
        size = int(node["Resources"].get("object_store_memory", 0))
        if said is not None and said["shm"] < size:
            yield warning(
                f"/dev/shm of node {node['NodeManagerAddress']} has {said['shm'] / GIB:.1f} GiB, its object store "
                f"{size / GIB:.1f}: it lies on disk",
                "make /dev/shm larger (docker: --shm-size; Kubernetes: a volume of medium Memory)",
            )


def _memory(facts: Facts) -> Iterable[Row]:
    """Estimates: what the parameters take, without activations."""
    config, parameters = facts.config, facts.parameters
    item = ITEM_BYTES[config.model.dtype]
    copy = item if item < 4 else 0
    trained = parameters * (MASTER_BYTES + copy)
    kv = int(config.generation.kv_cache_gib * GIB)
    held: list[tuple[str, Resources, int, int, int]] = [
        (
            "learner",
            config.learner,
            config.learner.replicas,
            parameters * item if config.learner.lora_rank else trained // config.learner.replicas,
            0,
        ),
    ]
    is_rl = config.stage == "rl"
    if is_rl or config.offline.loop != "none":
        engines = config.generation.replicas if is_rl else 1
        held.append(("generation", config.generation, engines, parameters * item, kv))
    if is_rl and config.algorithm.needs_reference:
        held.append(("reference", config.reference, config.reference.replicas, parameters * item, 0))
    if is_rl and config.algorithm.needs_critic:
        held.append(("critic", config.critic, config.critic.replicas, trained, 0))
    machines = [said for said in facts.machines.values() if said is not None]
    if not machines:
        raise Unknown("nodes")
    largest, together = max(said["memory"] for said in machines), sum(said["memory"] for said in machines)
    smallest_gpu = min((total for said in machines for total, _ in said["gpus"]), default=None)
    on_cpu, shown = 0, []
    for role, resources, replicas, weights, cache in held:
        if resources.gpus:
            share = resources.gpus * (smallest_gpu or 0)
            shown.append(f"{role} {weights / GIB:.1f} GiB of GPU memory")
            if smallest_gpu is not None and weights > share:
                raise ClusterError(
                    f"{role} needs about {weights / GIB:.1f} GiB for its parameters alone, its {resources.gpus:g} GPU(s) have "
                    f"{share / GIB:.1f}; raise {role}.gpus"
                    + (", or learner.replicas, which shard them" if role == "learner" else "")
                )
            continue
        each = weights + cache
        shown.append(f"{role} {replicas} x {each / GIB:.1f} GiB")
        on_cpu += replicas * each
        if each > largest:
            raise ClusterError(
                f"{role} needs about {each / GIB:.1f} GiB, the largest node has {largest / GIB:.1f}; take a smaller model, "
                f"model.dtype=bfloat16, {'generation.kv_cache_gib' if cache else 'learner.lora_rank'}, or a larger node"
            )
    found = f"about {', '.join(shown)}; nodes have {together / GIB:.1f} GiB"
    if on_cpu > 0.8 * together:
        yield warning(found, "take a smaller model or more nodes, lower generation.kv_cache_gib or replicas")
    else:
        yield ok(found)


CHECKS: tuple[tuple[str, Callable[[Facts], Iterable[Row]]], ...] = (
    ("Ray", _ray),
    ("token", _token),
    ("versions", _versions),
    ("groups", _groups),
    ("GPUs", _gpus),
    ("leftovers", _leftovers),
    ("object store", _store),
    ("memory", _memory),
)
