"""Every check that can be made before a run: each says what it found, and what to change."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Literal, TypeVar

from headway.core.config import Config, load_config
from headway.core.consistency import warnings
from headway.core.errors import ClusterError, ConfigError, DataError, HeadwayError
from headway.core.prompts import Prompt
from headway.core.sections import Resources
from headway.core.weights import ITEM_BYTES

State = Literal["ok", "warning", "error", "skipped"]
T = TypeVar("T")

PROBE_S = 60.0
"""For a node to say what it has."""
MASTER_BYTES = 16
"""Of a trained parameter: master weight, gradient and AdamW's two moments, in float32."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a check found."""

    check: str
    state: State
    """skipped: it needs something that is wrong, which another row says."""
    value: str
    """What was found; of an error also what to change."""
    advice: str = ""


class Unknown(Exception):
    """Something that another check has found wrong."""


class Facts:
    """What the checks look at; each is found once, when it is first asked for. What is wrong with it is raised then, as a
    `HeadwayError`, and `Unknown` whenever it is asked for again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._failed: dict[str, str] = {}
        """What was found wrong, and by what."""

    def _found(self, name: str, find: Callable[[], T]) -> T:
        if name in self._failed:
            raise Unknown(self._failed[name])
        try:
            return find()
        except (HeadwayError, Unknown) as error:
            self._failed[name] = str(error) if isinstance(error, Unknown) else name
            raise

    @cached_property
    def model_folder(self) -> Path:
        from headway.learner.pretrained import model_folder

        return self._found("model", lambda: model_folder(self.config.model.path))

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        return self._found("model", lambda: _parameters(self.model_folder, self.config))

    @cached_property
    def tokenizer(self) -> Any:
        from headway.cluster.preflight import tokenizer_of

        return self._found("tokenizer", lambda: tokenizer_of(self.model_folder))

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        from headway.cluster.preflight import prompts_of

        config = self.config
        return self._found("prompts", lambda: prompts_of(config, config.data.source, config.run.seed))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Verifiers that score the prompts."""
        from headway.cluster.preflight import kinds_of

        return self._found("verifiers", lambda: kinds_of(*self.prompts))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        from headway.cluster.preflight import longest_of

        return self._found("lengths", lambda: longest_of(self.config, self.tokenizer, self.prompts))

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """Of the cluster, which is joined, or started, for this."""
        return self._found("Ray", lambda: _nodes(self.config))

    @cached_property
    def machines(self) -> dict[str, dict[str, Any] | None]:
        """What each node says of itself, by address; None: it did not answer."""
        return self._found("nodes", lambda: _machines(self.nodes))


def examine(path: Path, overrides: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of all checks, each as soon as it is known. A check that fails ends none but itself; without a
    configuration there is nothing else to check."""
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        yield from _faults("configuration", error)
        return
    yield Row(
        check="configuration", state="ok", value=f"{path}: run {config.run.name!r}, {config.run.steps} steps"
    )
    for warning in warnings(config):
        yield Row(check="configuration", state="warning", value=warning)
    facts = Facts(config)
    try:
        for name, check in CHECKS:
            if config.stage != "rl" and name in RL_ONLY:
                continue
            try:
                yield from (replace(row, check=name) for row in check(facts))
            except Unknown as missing:
                yield Row(check=name, state="skipped", value=f"not looked at: needs {missing}")
            except HeadwayError as error:
                yield from _faults(name, error)
    finally:
        from headway.cluster.placement import disconnect

        disconnect()


def _faults(check: str, error: HeadwayError) -> Iterator[Row]:
    for line in str(error).splitlines():
        if line.strip():
            yield Row(check=check, state="error", value=line.strip())


def _ok(value: str) -> Row:
    return Row(check="", state="ok", value=value)


def _error(value: str) -> Row:
    return Row(check="", state="error", value=value)


def _warning(value: str, advice: str = "") -> Row:
    return Row(check="", state="warning", value=value, advice=advice)


# ---- files -------------------------------------------------------------------------------------------------


def _run_folder(facts: Facts) -> Iterable[Row]:
    from headway.cluster.run_folder import check_same_run
    from headway.learner.checkpoint import newest_complete

    config, folder = facts.config, facts.config.run_folder
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"run.folder={config.run.folder}: {existing} cannot be written to; set run.folder")
    if not folder.exists() or not any(folder.iterdir()):
        yield _ok(f"{folder} will be made")
        return
    newest = newest_complete(folder / "checkpoints")
    try:
        check_same_run(config, newest or folder)
        goes_on = f"--resume goes on from {newest.name if newest else 'its start'}"
    except ConfigError as error:
        goes_on = f"it cannot be resumed ({error})"
    yield _warning(f"{folder} exists: {goes_on}", "--overwrite replaces it; run.name gives another")


def _model(facts: Facts) -> Iterable[Row]:
    folder, parameters = facts.model_folder, facts.parameters
    yield _ok(f"{folder}: {parameters / 1e6:,.1f} million parameters")
    if (path := facts.config.judge.model) is not None:
        from headway.learner.pretrained import model_folder

        judge = model_folder(path)
        yield _ok(f"judge {judge}: {_parameters(judge, facts.config) / 1e6:,.1f} million parameters")


def _parameters(folder: Path, config: Config) -> int:
    """Raises `DataError` for weights that are missing or damaged."""
    from safetensors import SafetensorError, safe_open

    from headway.cluster.placement import published_bytes

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no *.safetensors; save the model with save_pretrained")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} is damaged or cut off ({error}); copy it again") from error
    whole = config.model_copy(update={"learner": config.learner.model_copy(update={"lora_rank": 0})})
    return published_bytes(whole, str(folder)) // ITEM_BYTES[config.model.dtype]


def _disk(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_disk

    check_disk(facts.config, facts.model_folder)
    free = shutil.disk_usage(facts.config.run.folder).free
    yield _ok(f"{free / GIB:,.0f} GiB free in {facts.config.run.folder}")


def _tokenizer(facts: Facts) -> Iterable[Row]:
    from headway.actors.chat import eos_token_ids
    from headway.cluster.preflight import check_template

    tokenizer = facts.tokenizer
    check_template(facts.config, facts.model_folder, tokenizer)
    ends = ", ".join(tokenizer.convert_ids_to_tokens(list(eos_token_ids(facts.model_folder, tokenizer))))
    template = "chat template" if facts.config.model.chat_template else "prompts as plain text"
    yield _ok(f"{len(tokenizer):,} tokens, {template}, a response ends with {ends}")


# ---- data --------------------------------------------------------------------------------------------------


def _prompts(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import prompts_of, versions_of

    data, seed = facts.config.data, facts.config.run.seed
    yield _ok(f"{len(facts.prompts):,} from {data.source}; verifiers: {versions_of(facts.prompts)}")
    for key in ("eval_source", "demonstrations"):
        source = getattr(data, key)
        if source is not None:
            yield _ok(f"data.{key}: {len(prompts_of(facts.config, source, seed)):,} from {source}")


def _golds(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import CHECKED_GOLDS, check_golds

    check_golds(facts.config, facts.prompts)
    yield _ok(f"the first {min(CHECKED_GOLDS, len(facts.prompts))} score 1 with their own verifier")


def _scorers(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_remote

    said: list[str] = []
    check_remote(facts.config, facts.kinds, said.append)
    yield from (_warning(text.removeprefix("warning: ")) for text in said)
    if not said:
        yield _ok(f"all there is for {', '.join(sorted(facts.kinds))}")


def _sandbox(facts: Facts) -> Iterable[Row]:
    from headway.verifiers import sandbox

    if "code" not in facts.kinds:
        yield _ok("no prompt is scored by running code")
    elif gap := sandbox.unprotected():
        yield _warning(gap)
    else:
        yield _ok("bubblewrap")


def _lengths(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import model_len

    config = facts.config
    limit = model_len(config, facts.longest)
    trained = _trained_positions(facts.model_folder)
    yield _ok(
        f"longest prompt {facts.longest} + sampling.max_new_tokens={config.sampling.max_new_tokens} tokens, engines hold "
        f"{limit}"
    )
    if trained is not None and limit > trained:
        raise ConfigError(
            f"engines would hold {limit} tokens, but {config.model.path} knows {trained} positions "
            "(max_position_embeddings); lower sampling.max_new_tokens or generation.max_model_len, or leave long prompts out"
        )


def _trained_positions(folder: Path) -> int | None:
    from transformers import PretrainedConfig

    found, _ = PretrainedConfig.get_config_dict(folder)
    return found.get("max_position_embeddings")


def _queue(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_batch

    check_batch(facts.config, facts.longest)
    yield _ok(
        f"queue.max_mib={facts.config.queue.max_mib} holds a batch of {facts.config.groups_per_batch} groups"
    )


# ---- this machine ------------------------------------------------------------------------------------------


def _endpoint(facts: Facts) -> Iterable[Row]:
    host, port = facts.config.metrics.host, facts.config.metrics.port
    if port == 0:
        yield _ok("any free port")
        return
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        yield _warning(
            f"port {port} is not free here ({_holder(port) or error.strerror or error})",
            "a run takes the next one that is, and says so; metrics.port=0 takes any",
        )
    else:
        yield _ok(f"port {port} is free")


def _holder(port: int) -> str:
    """The process that listens there, as far as this user may know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            is_there = (
                getattr(connection.laddr, "port", None) == port and connection.status == psutil.CONN_LISTEN
            )
            if is_there and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:80]}"
    except psutil.Error:
        pass
    return ""


# ---- cluster -----------------------------------------------------------------------------------------------


def _nodes(config: Config) -> list[dict[str, Any]]:
    import ray

    from headway.cluster.placement import connect

    connect(config)
    return [node for node in ray.nodes() if node["Alive"]]


def _ray(facts: Facts) -> Iterable[Row]:
    address = facts.config.cluster.address
    total = {key: sum(node["Resources"].get(key, 0) for node in facts.nodes) for key in ("CPU", "GPU")}
    what = "an instance of its own starts" if address == "local" else f"joined {address}"
    yield _ok(f"{what}: {len(facts.nodes)} node(s), {total['CPU']:g} CPU, {total['GPU']:g} GPU")


def _token(facts: Facts) -> Iterable[Row]:
    import ray

    from headway.cluster.placement import wants_token

    address: str = ray.get_runtime_context().gcs_address if facts.nodes else ""
    if wants_token(address):
        yield _ok("the cluster asks for a token, and takes this machine's")
    elif facts.config.cluster.address == "local":
        yield _ok("none is needed on an instance of its own")
    else:
        yield _warning(
            "the cluster runs whatever anyone sends who reaches it",
            "start Ray with RAY_AUTH_MODE=token on its head",
        )


def _machines(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look() -> dict[str, Any]:
        """Runs where headway may be missing, so it stands for itself."""
        import os
        import platform
        import shutil
        import subprocess
        from importlib.metadata import PackageNotFoundError, version

        try:
            headway = version("headway")
        except PackageNotFoundError:
            headway = None
        smi = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        gpus = []
        if shutil.which(smi[0]):
            out = subprocess.run(smi, capture_output=True, text=True, timeout=20).stdout
            gpus = [int(line) << 20 for line in out.split() if line.isdecimal()]
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
        return {
            "python": platform.python_version(),
            "headway": headway,
            "memory": pages,
            "shm": shm.total if shm else 0,
            "gpus": gpus,
        }

    remote: Any = ray.remote
    asked = {
        node["NodeManagerAddress"]: remote(num_cpus=0, max_retries=0)(look)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_S)
    said: dict[str, dict[str, Any] | None] = {}
    get: Any = ray.get
    for address, reference in asked.items():
        try:
            said[address] = get(reference, timeout=0)
        except (RayError, TimeoutError):
            said[address] = None
    return said


def _versions(facts: Facts) -> Iterable[Row]:
    here = {"Python": platform.python_version(), "headway": package_version("headway")}
    rows: list[Row] = []
    for address, said in facts.machines.items():
        if said is None:
            rows.append(
                _warning(f"node {address} did not answer within {PROBE_S:.0f} s", "look at its raylet's log")
            )
            continue
        if said["headway"] is None:
            rows.append(
                _warning(
                    f"node {address} has no headway",
                    "headway submit brings it along; for headway train install it there",
                )
            )
        elif said["headway"] != here["headway"]:
            rows.append(
                _error(
                    f"node {address} has headway {said['headway']}, this machine {here['headway']}; install the same, or use "
                    "headway submit, which brings it along"
                )
            )
        if said["python"].split(".")[:2] != here["Python"].split(".")[:2]:
            rows.append(
                _error(
                    f"node {address} has Python {said['python']}, this machine {here['Python']}; use the same on all"
                )
            )
    if not rows:
        versions = f"Ray {package_version('ray')}, Python {here['Python']}, headway {here['headway']}"
        rows.append(_ok(f"{versions} on all {len(facts.machines)} node(s) as here"))
    return rows


def _groups(facts: Facts) -> Iterable[Row]:
    import ray

    from headway.cluster.placement import check_resources, needs

    assert facts.nodes
    faults = ""
    try:
        check_resources(facts.config)
    except ClusterError as error:
        faults = str(error)
        yield from _faults("", error)
    wanted: dict[str, float] = {}
    for need in needs(facts.config):
        each = " + ".join(f"{amount:g} {key}" for key, amount in need.bundle.items())
        where = f" on nodes labelled {need.labels}" if need.labels else ""
        if f"group '{need.role}'" not in faults:
            yield _ok(f"{need.role}: {need.replicas} x ({each}){where}")
        for key, amount in need.bundle.items():
            wanted[key] = wanted.get(key, 0.0) + need.replicas * amount
    free: Any = ray.available_resources()
    short = [
        f"{free.get(key, 0):g} of {amount:g} {key}"
        for key, amount in wanted.items()
        if free.get(key, 0) < amount
    ]
    if short and not faults:
        yield _warning(
            f"only {' and '.join(short)} are free now",
            "end what holds them, or the groups wait for cluster.placement_deadline_s",
        )


def _gpus(facts: Facts) -> Iterable[Row]:
    from headway.cluster.placement import needs

    groups = needs(facts.config)
    asked = sum(need.replicas * need.bundle.get("GPU", 0) for need in groups)
    there = sum(node["Resources"].get("GPU", 0) for node in facts.nodes)
    found = f"{asked:g} asked, {there:g} there"
    if not asked and there:
        yield _warning(f"{found}: they would stand idle", "set learner.gpus and generation.gpus")
    elif there < asked:
        yield _error(f"{found}; lower learner.gpus or generation.gpus and replicas, or add nodes")
    elif role := _does_not_share(groups, [int(node["Resources"].get("GPU", 0)) for node in facts.nodes]):
        yield _error(
            f"{found}, but parts of GPUs are taken from one GPU each, and what is left of them is too little for {role}; set "
            f"{role}.gpus so that whole GPUs are divided without rest"
        )
    else:
        yield _ok(found)


def _does_not_share(groups: list[Any], gpus_of_nodes: list[int]) -> str | None:
    """The role whose part of a GPU fits into no single one, all larger ones placed first; None when all fit."""
    nodes = [[1.0] * number for number in gpus_of_nodes]
    for need in sorted(groups, key=lambda need: -need.bundle.get("GPU", 0)):
        amount = need.bundle.get("GPU", 0)
        for _ in range(need.replicas if amount else 0):
            if not any(_take(gpus, amount) for gpus in nodes):
                return need.role
    return None


def _take(gpus: list[float], amount: float) -> bool:
    """Takes whole GPUs, or a part of the one that has least to spare, from what is free of a node's."""
    number = max(1, int(amount))
    part = min(1.0, amount)
    fitting = sorted((free, gpu) for gpu, free in enumerate(gpus) if free >= part)[:number]
    if len(fitting) < number:
        return False
    for free, gpu in fitting:
        gpus[gpu] = round(free - part, 6)
    return True


def _store(facts: Facts) -> Iterable[Row]:
    from headway.cluster.placement import check_store

    config, fault = facts.config, None
    labels = config.learner.labels.items()
    for node in facts.nodes:  # one that can hold the learner is enough
        if labels <= (node.get("Labels") or {}).items():
            try:
                check_store(config, str(facts.model_folder), {node["NodeID"]})
                fault = None
                break
            except ClusterError as error:
                fault = error
    if fault is not None:
        raise fault
    sizes = [int(node["Resources"].get("object_store_memory", 0)) for node in facts.nodes]
    yield _ok(f"{min(sizes) / GIB:.1f} GiB or more on each node, for the queue and two weight versions")
    for node in facts.nodes:
        said = facts.machines.get(node["NodeManagerAddress"])
        size = int(node["Resources"].get("object_store_memory", 0))
        if said is not None and said["shm"] < size:
            yield _warning(
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
        ("generation", config.generation, config.generation.replicas, parameters * item, kv),
    ]
    if config.algorithm.needs_reference:
        held.append(("reference", config.reference, config.reference.replicas, parameters * item, 0))
    if config.algorithm.needs_critic:
        held.append(("critic", config.critic, config.critic.replicas, trained, 0))
    machines = [said for said in facts.machines.values() if said is not None]
    if not machines:
        raise Unknown("nodes")
    largest, together = max(said["memory"] for said in machines), sum(said["memory"] for said in machines)
    smallest_gpu = min((gpu for said in machines for gpu in said["gpus"]), default=None)
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
        yield _warning(found, "take a smaller model or more nodes, lower generation.kv_cache_gib or replicas")
    else:
        yield _ok(found)


RL_ONLY = ("prompts", "golds", "scorers", "sandbox", "lengths", "queue", "object store")
"""Checks of what other stages do not have."""
CHECKS: tuple[tuple[str, Callable[[Facts], Iterable[Row]]], ...] = (
    ("run folder", _run_folder),
    ("model", _model),
    ("tokenizer", _tokenizer),
    ("prompts", _prompts),
    ("golds", _golds),
    ("scorers", _scorers),
    ("sandbox", _sandbox),
    ("lengths", _lengths),
    ("queue", _queue),
    ("disk", _disk),
    ("endpoint", _endpoint),
    ("Ray", _ray),
    ("token", _token),
    ("versions", _versions),
    ("groups", _groups),
    ("GPUs", _gpus),
    ("object store", _store),
    ("memory", _memory),
)
