"""What a run's configuration asks of a Kubernetes cluster, as KubeRay's objects in plain dicts: a pod group for each
role, with its counts, resources and node labels."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml
from ray._private.label_utils import validate_node_label_syntax

from headway.cluster.joining import FAILURE_DETECTION
from headway.cluster.room import Need, needs
from headway.core import datasets
from headway.core.config import Config
from headway.core.errors import ConfigError
from headway.core.sections import MODELS, Resources

Manifest = dict[str, Any]

ROLE_LABEL = "headway-role"
"""Node label of every pod: its group's role."""
SET_BY_RAY = "ray.io/"
"""Node labels that Ray gives by itself, and lets nobody else give."""
MOUNTED_CONFIG = "/etc/headway"
MONITORING = "monitoring.coreos.com/v1"
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": 8265,
    "client": 10001,
    "as-metrics": 44217,
    "dash-metrics": 44227,
}
RAY_METRICS_PORT = 8080
"""Of every pod."""
GENERATED = ("reasoning_gym", *datasets.PACKAGED)
"""Sources of prompts that are no files."""
LONGEST_NAME = 47
"""Of a RayJob; the operator appends to it."""
LARGEST_CONFIG_MAP = 1_000_000
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""What Kubernetes takes for a namespace."""
SUBDOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""And for the name of most other objects."""
QUANTITY = r"(?=.*[1-9])(\d+\.?\d*|\.\d+)([kMGTPE]i?|[eE]\d+)?"
DIGEST_DIGITS = 6
GIB_PER_GPU = 64
GIB_PER_CPU_MODEL = 8
GIB_HEAD = 16
STORE_FRACTION = 0.3
"""Of a node's memory that Ray takes for its object store by itself."""
PRE_RUNNING_DEADLINE_S = 3600
IDLE_TIMEOUT_S = 300
KEPT_AFTER_END_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Pods of one role, all alike."""

    role: str
    pods: int
    min_pods: int
    max_pods: int
    cpus: int
    """Of one pod."""
    gpus: int
    """Of one pod."""
    memory_gib: int
    """Of one pod."""
    labels: dict[str, str]
    """Node labels."""


def node_labels(config: Config) -> dict[str, dict[str, str]]:
    """Labels that each role's nodes must be given, by role. Raises `ConfigError` for one that no node can carry."""
    found = {}
    for need in needs(config):
        given = {key: value for key, value in need.labels.items() if not key.startswith(SET_BY_RAY)}
        try:
            validate_node_label_syntax(given)
        except ValueError as error:
            raise ConfigError(f"{need.role}.labels={need.labels}: {error}") from error
        found[need.role] = given
    return found


def cores(config: Config, role: str) -> float:
    """Cores that one replica keeps busy: its Ray CPUs, or its threads or processes where these are more."""
    section: Resources = getattr(config, role)
    processes = config.verifiers.processes if role == "verifiers" else 0
    return max(section.cpus, section.threads, processes)


def groups(config: Config, *, gpus_per_pod: int) -> list[Group]:
    """One group of pods for each role. Learner ranks share pods, as many as fit; of the other roles each replica has
    its own, so that engines come and go one by one. Raises `ConfigError`."""
    labels = node_labels(config)
    return [_group(config, need, labels[need.role], gpus_per_pod) for need in needs(config)]


def _group(config: Config, need: Need, labels: dict[str, str], gpus_per_pod: int) -> Group:
    role, gpus = need.role, need.bundle.get("GPU", 0)
    if gpus != int(gpus):
        raise ConfigError(
            f"{role}.gpus={gpus:g} is a part of a GPU, and pods have whole ones; set {role}.gpus={math.ceil(gpus)}"
        )
    if gpus > gpus_per_pod:
        raise ConfigError(
            f"{role}.gpus={gpus:g} is more than the {gpus_per_pod} of a node; lower it, or raise --gpus-per-node"
        )
    together = 1
    if role == "learner" and gpus:
        fit = range(1, min(need.replicas, gpus_per_pod // int(gpus)) + 1)
        together = max(ranks for ranks in fit if need.replicas % ranks == 0)
    pods = least = most = need.replicas // together
    if role == "generation" and config.generation.max_replicas is not None:
        least, most = config.generation.min_replicas or pods, config.generation.max_replicas
    return Group(
        role=role,
        pods=pods,
        min_pods=least,
        max_pods=most,
        cpus=max(1, math.ceil(together * cores(config, role))),
        gpus=together * int(gpus),
        memory_gib=together * _memory_gib(config, role, int(gpus)),
        labels={ROLE_LABEL: role, **labels},
    )


def _memory_gib(config: Config, role: str, gpus: int) -> int:
    """Of one replica: the configuration does not say it, so this is where to start from."""
    if gpus:
        return GIB_PER_GPU * gpus
    if role == "verifiers":
        return 2 + math.ceil(config.verifiers.processes * config.verifiers.memory_mib / 1024)
    return GIB_PER_CPU_MODEL + (math.ceil(config.generation.kv_cache_gib) if role == "generation" else 0)


# ---- KubeRay -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeRay:
    """What the configuration does not know of the Kubernetes cluster."""

    kind: Literal["rayjob", "raycluster"] = "rayjob"
    image: str
    namespace: str
    gpus_per_node: int = 8
    claim: str | None = None
    """An existing volume claim for run folders; null: one is made."""
    storage: str = "200Gi"
    storage_class: str | None = None
    resume: bool = False

    @property
    def volume_claim(self) -> str:
        return self.claim or "headway-runs"

    def check(self) -> None:
        """Raises `ConfigError` for what no object may carry."""
        for option, value, allowed, example in (
            ("--image", self.image, r"[^\s]+", "registry/headway:1"),
            ("--namespace", self.namespace, LABEL, "default"),
            ("--claim", self.claim, SUBDOMAIN, "headway-runs"),
            ("--storage", self.storage, QUANTITY, "200Gi"),
            ("--storage-class", self.storage_class, SUBDOMAIN, "shared"),
        ):
            if value is not None and not re.fullmatch(allowed, value):
                raise ConfigError(
                    f"{option} {value!r} is nothing that Kubernetes takes; give one such as {example}"
                )


def kuberay(
    config: Config, target: KubeRay, rule_groups: list[Manifest] | None = None
) -> dict[str, list[Manifest]]:
    """Kubernetes objects by file name. `rule_groups`: of Prometheus rules. Raises `ConfigError`."""
    name = object_name(config)
    target.check()
    if not config.metrics.port:
        raise ConfigError("metrics.port=0 takes any port, which nothing can scrape; set metrics.port=9400")
    if config.metrics.port in (RAY_METRICS_PORT, *HEAD_PORTS.values()):
        raise ConfigError(
            f"metrics.port={config.metrics.port} is a port of Ray's own in the head's pod; set metrics.port=9400"
        )
    pods = groups(config, gpus_per_pod=target.gpus_per_node)
    files: dict[str, list[Manifest]] = {}
    if target.claim is None:
        files["volume.yaml"] = [_claim(target)]
    cluster = _cluster_spec(config, target, pods)
    if target.kind == "raycluster":
        files["raycluster.yaml"] = [_object("ray.io/v1", "RayCluster", name, target, spec=cluster)]
    else:
        shipped = _shipped(config, {group.role: group.labels for group in pods})
        files["config.yaml"] = [_object("v1", "ConfigMap", name, target, **shipped)]
        files["rayjob.yaml"] = [_rayjob(name, target, cluster)]
    files["monitoring.yaml"] = _monitoring(name, target, rule_groups or [])
    return files


def object_name(config: Config) -> str:
    """Name of the run's objects in Kubernetes, which no other run's are called. Raises `ConfigError`."""
    own = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")
    if own != config.run.name:  # my.run and My_run are two runs
        own += f"-{hashlib.sha256(config.run.name.encode()).hexdigest()[:DIGEST_DIGITS]}"
    name = f"headway-{own}"
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"run.name={config.run.name} makes the name {name} of {len(name)} characters, KubeRay takes "
            f"{LONGEST_NAME}; choose a shorter run.name"
        )
    return name


def rule_groups(folder: Path) -> list[Manifest]:
    """The `groups` of all Prometheus rule files in a folder."""
    found: list[Manifest] = []
    for file in sorted(folder.glob("*.yml")):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            found += tree.get("groups") or []
    return found


def _object(api: str, kind: str, name: str, target: KubeRay, *, suffix: str = "", **content: Any) -> Manifest:
    metadata = {"name": name + suffix, "namespace": target.namespace, "labels": _own_labels(name)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _own_labels(name: str) -> dict[str, str]:
    """Kubernetes labels of everything that belongs to a run."""
    return {"app.kubernetes.io/name": "headway", "app.kubernetes.io/instance": name}


def _claim(target: KubeRay) -> Manifest:
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": target.storage}},
    }
    if target.storage_class:
        spec["storageClassName"] = target.storage_class
    # Shared by all runs of the namespace, so it carries no run's labels.
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": target.volume_claim, "namespace": target.namespace},
        "spec": spec,
    }


def _rayjob(name: str, target: KubeRay, cluster: Manifest) -> Manifest:
    command = f"headway train {MOUNTED_CONFIG}/config.json"
    spec = {
        "entrypoint": f"{command} --resume" if target.resume else command,
        "jobId": name,
        # A run that failed is looked at, and goes on with --resume; it is not started again by itself. What takes
        # up a lost log again is no retry of the job: the submitter looks for its id first.
        "backoffLimit": 0,
        "submitterConfig": {"backoffLimit": 2},
        "preRunningDeadlineSeconds": PRE_RUNNING_DEADLINE_S,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_AFTER_END_S,
        "rayClusterSpec": cluster,
    }
    return _object("ray.io/v1", "RayJob", name, target, spec=spec)


def _cluster_spec(config: Config, target: KubeRay, workers: list[Group]) -> Manifest:
    spec: Manifest = {"rayVersion": version("ray"), "authOptions": {"mode": "token"}}
    if any(group.max_pods > group.min_pods for group in workers):
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": IDLE_TIMEOUT_S}
    queue_gib = math.ceil(config.queue.max_mib / 1024 / STORE_FRACTION)
    head = Group(
        role="head",
        pods=1,
        min_pods=1,
        max_pods=1,
        cpus=4,
        gpus=0,
        memory_gib=max(GIB_HEAD, queue_gib + 4),
        labels={ROLE_LABEL: "head"},
    )
    spec["headGroupSpec"] = {
        # No role's actors: the driver, the queue and the metrics endpoint take no Ray CPUs.
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "labels": head.labels,
        "template": _pod_template(config, target, head),
    }
    spec["workerGroupSpecs"] = [
        {
            "groupName": group.role.replace("_", "-"),  # a part of its pods' names
            "replicas": group.pods,
            "minReplicas": group.min_pods,
            "maxReplicas": group.max_pods,
            "rayStartParams": {},
            "labels": group.labels,
            "template": _pod_template(config, target, group),
        }
        for group in workers
    ]
    return spec


def _pod_template(config: Config, target: KubeRay, group: Group) -> Manifest:
    name, runs, is_head = object_name(config), run_volume(config), group.role == "head"
    limits = {"cpu": str(group.cpus), "memory": f"{group.memory_gib}Gi"}
    if group.gpus:
        limits["nvidia.com/gpu"] = str(group.gpus)
    environment = {
        "HEADWAY_CACHE": f"{runs}/.cache",
        "PYTHONUNBUFFERED": "1",
        **{f"RAY_{key}": str(value) for key, value in FAILURE_DETECTION.items()},
    }
    ports = {"metrics": RAY_METRICS_PORT}
    mounts: list[Manifest] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "runs", "mountPath": runs},
    ]
    volumes: list[Manifest] = [
        # Counts as the pod's memory. Ray's object store and the weights on their way to an engine lie in it.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{group.memory_gib // 2}Gi"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": target.volume_claim}},
    ]
    if is_head:
        ports |= HEAD_PORTS | {"headway": config.metrics.port}
    if is_head and target.kind == "rayjob":
        mounts.append({"name": "config", "mountPath": MOUNTED_CONFIG, "readOnly": True})
        volumes.append({"name": "config", "configMap": {"name": name}})
    container = {
        "name": "ray-head" if is_head else "ray-worker",
        "image": target.image,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "ports": [{"name": key, "containerPort": port} for key, port in ports.items()],
        # Requests are the limits: what runs here must not be the first that a full node evicts.
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": volumes,
    }
    if group.gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": _own_labels(name)}, "spec": pod}


def run_volume(config: Config) -> str:
    """Where the nodes find the folder of runs: an absolute `run.folder` itself."""
    return str(config.run.folder) if config.run.folder.is_absolute() else "/runs"


def _shipped(config: Config, labels: dict[str, dict[str, str]]) -> Manifest:
    """Content of the ConfigMap: the resolved configuration and the prompt files that it names by a relative path. An
    absolute path is one in the pods. Raises `ConfigError`."""
    volume = run_volume(config)
    tree = config.model_dump(mode="json")
    tree["cluster"]["address"] = "auto"
    tree["run"]["folder"] = volume
    for role, own in labels.items():
        # Each role selects its own pods, or one would take what was made for another.
        tree[role]["labels"] = {**own, **tree[role]["labels"]}
    for section, key in MODELS:
        path = tree[section][key]
        if path and not Path(path).is_absolute() and ("/" in path or Path(path).exists()):
            raise ConfigError(
                f"{section}.{key}={path} is a folder here and not in the pods; put it on their volume and give its place "
                f"there, for example {section}.{key}={volume}/models/{Path(path).name}"
            )
    for key, own in (("data.verifier", config.data.verifier), ("environment.name", config.environment.name)):
        if own and ".py:" in own and not Path(own).is_absolute():
            raise ConfigError(
                f"{key}={own} is a file here and not in the pods; put it on their volume and give its place there, for "
                f"example {key}={volume}/{Path(own).name}, or name a module of the image"
            )
    files: dict[str, bytes] = {}
    for key in ("source", "eval_source", "demonstrations"):
        source = tree["data"][key]
        if source is None or source.partition(":")[0] in GENERATED or Path(source).is_absolute():
            continue
        path = Path(source)
        if not path.is_file() or path.stat().st_size + sum(map(len, files.values())) > LARGEST_CONFIG_MAP:
            raise ConfigError(
                f"data.{key}={source} is not a file here of at most {LARGEST_CONFIG_MAP:,} bytes (with the other prompt "
                "files), so no ConfigMap can ship it; put it on the pods' volume and give its place there, for example "
                f"data.{key}={volume}/data/{path.name}"
            )
        name = f"{key}{''.join(path.suffixes[-2:]) if path.suffix == '.gz' else path.suffix}"
        files[name] = path.read_bytes()
        tree["data"][key] = f"{MOUNTED_CONFIG}/{name}"
    content: Manifest = {"data": {"config.json": json.dumps(tree, indent=2)}}
    for name, payload in files.items():
        try:
            content["data"][name] = payload.decode("utf-8")
        except UnicodeDecodeError:
            content.setdefault("binaryData", {})[name] = base64.b64encode(payload).decode("ascii")
    return content


def _monitoring(name: str, target: KubeRay, rules: list[Manifest]) -> list[Manifest]:
    """For the Prometheus operator; `release: prometheus` is the label that its usual installation looks for."""
    relabeling = {
        "action": "replace",
        "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"],
        "targetLabel": "ray_io_cluster",
    }
    objects = []
    for node_type, ports in (
        ("head", ("headway", "metrics", "as-metrics", "dash-metrics")),
        ("worker", ("metrics",)),
    ):
        selected = {"app.kubernetes.io/instance": name, "ray.io/node-type": node_type}
        spec: Manifest = {
            "selector": {"matchLabels": selected},
            "podMetricsEndpoints": [{"port": port, "relabelings": [relabeling]} for port in ports],
        }
        objects.append(_object(MONITORING, "PodMonitor", name, target, suffix=f"-{node_type}", spec=spec))
    if rules:
        objects.append(_object(MONITORING, "PrometheusRule", name, target, spec={"groups": rules}))
    for each in objects:
        each["metadata"]["labels"]["release"] = "prometheus"
    return objects


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[Manifest]) -> str:
    """YAML documents: keys in their order, texts of several lines as they are, no anchors."""
    return yaml.dump_all(
        objects,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        explicit_start=len(objects) > 1,
    )
