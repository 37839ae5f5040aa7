"""What a cluster does to a run: places that are not there or were taken by others, devices that are not its own, a full
store, taken ports, endpoints that die. On a real Ray of two nodes, one of them with GPUs by name."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from prometheus_client import CollectorRegistry, generate_latest
from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from headway.cluster import submit as jobs
from headway.cluster.doctor_cluster import left_behind
from headway.cluster.exporter import LAST_PORT, Exporter
from headway.cluster.placement import Placement, _hosted, store_table
from headway.cluster.queue import RolloutQueue, Room
from headway.cluster.ray_crew import RayCrew
from headway.cluster.room import check_resources, shortfalls
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import ClusterError, ConfigError
from headway.core.metrics import METRICS, Recorder

get: Any = ray.get
MIB = 1 << 20
STORE_MIB = 80


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """This process is on a node with two CPUs; another one has a CPU and two GPUs, a third only a label and a CPU."""
    system = {"automatic_object_spilling_enabled": False}
    head = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": STORE_MIB * MIB, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=STORE_MIB * MIB)
    cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=STORE_MIB * MIB, labels={"pool": "small"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=50)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def configuration(name: str = "faults", **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": name},
        "learner": {"cpus": 0.1},
        "generation": {"cpus": 0.1},
        "metrics": {"host": "127.0.0.1"},
        "cluster": {"address": "somewhere", "placement_deadline_s": 20},
    }
    return parse_config({key: {**tree.get(key, {}), **sections.get(key, {})} for key in {*tree, *sections}})


async def places(config: Config, folder: Path) -> dict[str, set[str]]:
    """Nodes by group, of a run that is placed and gives its places back."""
    placement = Placement(config, folder)
    try:
        await placement.reserve()
        return {name: await placement.nodes(name) for name in placement._groups}
    finally:
        placement.close()


# ---- places ------------------------------------------------------------------------------------------------

NODE: dict[str, float] = {"CPU": 8, "GPU": 2}
ONE_GPU = [({"CPU": 8, "GPU": 1}, {})]
TWO = [(NODE, {})]


@pytest.mark.parametrize(
    ("nodes", "learner", "generation", "missing"),
    [
        # One and a half of one, and what fits exactly.
        (ONE_GPU, {"gpus": 0.5}, {"gpus": 1}, "group 'learner' needs 1 x (1 CPU + 0.5 GPU), only 0 fit: the cluster has 1 GPU"),
        (ONE_GPU, {"gpus": 0.5}, {"gpus": 0.25, "replicas": 2}, None),
        # Parts come from one GPU each.
        (TWO, {"gpus": 0.1}, {"gpus": 0.9, "replicas": 2}, None),
        (TWO, {}, {"gpus": 0.6, "replicas": 3}, "group 'generation' needs 3 x (1 CPU + 0.6 GPU), only 2 fit: the cluster has 2 GPU"),
        (TWO, {"gpus": 1}, {"gpus": 0.25, "replicas": 4}, None),
        (TWO, {"gpus": 1}, {"gpus": 0.25, "replicas": 5}, "only 4 fit"),
        (TWO * 2, {"gpus": 4}, {}, "group 'learner' needs 1 x (1 CPU + 4 GPU), only 0 fit: the cluster has 4 GPU"),
        (TWO * 2, {"gpus": 2}, {"gpus": 0.5, "replicas": 4}, None),
        # Labels: a node that someone asks for by name is not given to others before.
        ([({"CPU": 1}, {"a": "b"}), ({"CPU": 1}, {})], {}, {"labels": {"a": "b"}, "cpus": 0.9}, None),
        ([({"CPU": 9}, {"a": "b"})], {"labels": {"a": "c"}}, {}, "on nodes labelled {'a': 'c'}, only 0 fit"),
        # CPUs: what needs no GPU leaves the node with GPUs to others, in any order of the nodes.
        ([({"CPU": 1, "GPU": 1}, {}), ({"CPU": 2}, {})], {}, {"gpus": 1, "cpus": 0.9}, None),
        ([({"CPU": 2}, {}), ({"CPU": 1, "GPU": 1}, {})], {"replicas": 2, "cpus": 0.9}, {"gpus": 1, "cpus": 0.9}, None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    nodes: list[Any], learner: dict[str, Any], generation: dict[str, Any], missing: str | None
) -> None:
    found = shortfalls(parse_config({"learner": learner, "generation": generation}), nodes)
    if missing is None:
        assert found == []
    else:
        (line,) = found
        assert missing in line
        assert ("set gpus so that whole GPUs are divided" in line) == (generation.get("gpus") == 0.6)


def test_more_than_there_is_is_refused_in_seconds(cluster: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"needs 3 x \(0.1 CPU \+ 1 GPU\), only 2 fit: the cluster has 2 GPU"
    ):
        check_resources(configuration(generation={"gpus": 1, "replicas": 3}))
    assert time.monotonic() - began < 20


async def test_a_place_that_does_not_come_is_waited_for_in_vain_with_a_list_of_what_is_free(
    cluster: Cluster, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "generation": {"cpus": 0.5, "gpus": 0.6, "replicas": 3},
        "cluster": {"placement_deadline_s": 2},
    }
    began = time.monotonic()
    with pytest.raises(ClusterError) as failure:
        await places(configuration("late", **sections), tmp_path)
    assert time.monotonic() - began < 60
    said = re.fullmatch(
        r"group 'generation-\d' got no place in 2 s \(cluster.placement_deadline_s\): it asks for "
        r"\[{'CPU': 0.5, 'GPU': 0.6}\], each on one node, a part of a GPU from one GPU; free are (.*) by node",
        str(failure.value),
    )
    assert said, failure.value
    assert said[1].startswith("{'CPU': ") and said[1].count("'GPU': ") == 3


async def test_parts_of_gpus_share_them(cluster: Cluster, tmp_path: Path) -> None:
    config = configuration(
        "parts", learner={"gpus": 0.1, "cpus": 0.1}, generation={"gpus": 0.9, "cpus": 0.1, "replicas": 2}
    )
    check_resources(config)
    placement = Placement(config, tmp_path)

    class Plain:
        def visible(self) -> str:
            return os.environ["CUDA_VISIBLE_DEVICES"]

    try:
        await placement.reserve()
        roles = [("learner", 0), ("generation", 0), ("generation", 1)]
        actors = [placement.spawn(Plain, role, replica, 1, ()) for role, replica in roles]
        learner, *engines = get([actor.visible.remote() for actor in actors], timeout=60)
        assert sorted(engines) == ["0", "1"] and learner in ("0", "1")
    finally:
        placement.close()


async def test_a_group_with_gpus_has_its_place_before_those_without_take_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The node with GPUs has one CPU, and three groups want one. Ray would give it to any of them."""
    gpu_node = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU"))
    sections = {
        "learner": {"cpus": 1},
        "generation": {"cpus": 1, "gpus": 1},
        "verifiers": {"cpus": 1},
        "run": {"name": "packed"},
    }
    for attempt in range(4):
        config = configuration(f"packed-{attempt}", **{k: v for k, v in sections.items() if k != "run"})
        found = await places(config, tmp_path)
        assert found["generation-0"] == {gpu_node}
        assert gpu_node not in found["learner"] | found["verifiers-0"]
    # The same with labels.
    labelled = {
        "generation": {"cpus": 1, "labels": {"pool": "small"}},
        "learner": {"cpus": 1},
        "verifiers": {"cpus": 1},
    }
    for attempt in range(2):
        assert len(await places(configuration(f"labelled-{attempt}", **labelled), tmp_path)) == 3


# ---- devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("visible", "seen"), [("0,1", r"\['0', '1'\]"), ("", r"\[\]")])
def test_a_worker_that_sees_other_gpus_than_its_own_does_not_start(
    cluster: Cluster, tmp_path: Path, visible: str, seen: str
) -> None:
    """A cluster whose Ray leaves CUDA_VISIBLE_DEVICES alone: every engine would compute on the first device."""

    class Plain:
        pass

    hosted = _hosted(Plain, str(tmp_path / "x.log"), package_version("headway"), 1)
    remote: Any = ray.remote
    names = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": visible}
    options = {"num_cpus": 0, "num_gpus": 1, "runtime_env": {"env_vars": names}}
    actor = remote(concurrency_groups={"watch": 1})(hosted).options(**options).remote()
    with pytest.raises(RayActorError, match=f"this worker was given 1 GPUs but sees {seen}; on its node Ray"):
        get(actor.__ray_ready__.remote(), timeout=60)


HOST = """
import subprocess, sys, time
from headway.actors.generation_traces import Traces
traces = Traces(sys.argv[1])
child = subprocess.Popen(["sleep", "60"])
traces.note()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_what_a_killed_engine_has_left_is_found(tmp_path: Path) -> None:
    place = f"headway-test-{os.getpid()}-0"
    host = subprocess.Popen([sys.executable, "-c", HOST, place], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    child = int(host.stdout.readline())
    try:
        assert place not in left_behind()  # it lives
        host.kill()
        host.wait()
        assert left_behind()[place] == [child]
    finally:
        os.kill(child, 9)
    while place in left_behind():
        time.sleep(0.05)
    for trace in Path("/dev/shm").glob(f"{place}.*"):
        trace.unlink()


# ---- what is sent ------------------------------------------------------------------------------------------


def test_a_job_from_a_large_repository_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the folder that it is sent from travels along but the rows that the configuration names, and of those
    never more than Ray takes."""
    for folder in (".git", ".venv", "runs/old/checkpoints", "outputs"):
        (tmp_path / folder).mkdir(parents=True)
        with (tmp_path / folder / "large").open("wb") as file:
            file.truncate(300 * MIB)
    for key in ("source", "eval_source", "demonstrations"):
        with (tmp_path / f"{key}.jsonl").open("wb") as file:
            file.truncate(jobs.LARGEST_SHIPPED_FILE)
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory() as job:
        data = {key: f"{key}.jsonl" for key in ("source", "eval_source", "demonstrations")}
        jobs.job_folder(parse_config({"data": data, "algorithm": {"sft_coef": 0.1}}), Path(job))
        sizes = {path.name: path.stat().st_size for path in Path(job).rglob("*")}
    assert sizes.keys() == {"config.json", "source.jsonl", "eval_source.jsonl", "demonstrations.jsonl"}
    assert sum(sizes.values()) < GCS_STORAGE_MAX_SIZE / 2
    with (tmp_path / "source.jsonl").open("ab") as file:
        file.write(b" ")
    with pytest.raises(
        ConfigError,
        match=r"data.source=source.jsonl is .* over 50 MiB, so it is not shipped; give an absolute",
    ):
        jobs.job_folder(parse_config({"data": {"source": "source.jsonl"}}), tmp_path / "outputs")


# ---- the object store --------------------------------------------------------------------------------------


def table(group_id: int, mib: int) -> pa.Table:
    return rollouts.build(
        {
            "rollout_id": f"{group_id}/{index}",
            "group_id": group_id,
            "prompt_id": "p",
            "sample_index": index,
            "prompt_ids": [1],
            "response_ids": [1],
            "loss_mask": [1],
            "behavior_logprobs": [-1.0],
            "version_spans": [{"start": 0, "end": 1, "version": 0}],
            "finish_reason": "stop",
            "truncated": False,
            "text": "x" * (mib * MIB // 2),
        }
        for index in range(2)
    )


def free_store() -> float:
    """Bytes on this node."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()[ray.get_runtime_context().get_node_id()]["object_store_memory"]


def until(holds: Callable[[], bool], what: str, within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_groups_wait_outside_of_a_store_that_they_would_fill() -> None:
    """A queue of 50 MiB groups over a store of 100: one may be on its way beside one that waits, and no third."""
    room = Room(max_groups=10, max_bytes=100 * MIB, group_bytes=50 * MIB)
    assert room.admits(running=0) and room.admits(running=1) and not room.admits(running=2)
    room.queued_groups, room.queued_bytes = 1, 50 * MIB
    assert room.admits(running=0) and not room.admits(running=1)
    room.queued_groups, room.queued_bytes = 0, 0
    assert room.admits(running=1)


def test_the_store_is_as_full_after_many_steps_as_before(cluster: Cluster, tmp_path: Path) -> None:
    """Three times what it holds passes through, as batches of two groups; a learner that dies with them holds nothing."""
    queue = Placement(configuration("store"), tmp_path).spawn(
        RolloutQueue, "queue", 0, 10, (store_table, ray.get)
    )

    class Learner:
        def train(self, *groups: pa.Table) -> int:
            return sum(group.nbytes for group in groups)

    remote: Any = ray.remote(num_cpus=0)(Learner)
    learner = remote.remote()
    get(queue.ping.remote(), timeout=60)
    before = free_store()
    for step in range(12):
        for group_id in (2 * step, 2 * step + 1):
            get(queue.put.remote(table(group_id, 10)), timeout=30)
        rows = get(queue.take.remote([2 * step, 2 * step + 1]), timeout=30)
        if step == 0:
            until(lambda: free_store() < before - 20 * MIB, "two groups are not in the store")
        assert get(learner.train.remote(*rows), timeout=30) > 20 * MIB
        if step == 5:
            ray.kill(learner)
            learner = remote.remote()
        del rows
        get(queue.release.remote([2 * step, 2 * step + 1]), timeout=30)
    until(lambda: free_store() > before - MIB, f"{before - free_store():,.0f} bytes stay")
    ray.kill(queue)
    ray.kill(learner)


# ---- the endpoint ------------------------------------------------------------------------------------------


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def value(text: str, series: str) -> float | None:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


async def test_two_runs_on_one_node_have_an_endpoint_each_and_say_where(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Both want the same port. Each endpoint is on its driver's node, however many there are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        wanted = probe.getsockname()[1]
    here = ray.get_runtime_context().get_node_id()
    crews = []
    try:
        for name in ("first", "second"):
            config = configuration(
                name, run={"folder": str(tmp_path)}, metrics={"port": wanted, "host": "0.0.0.0"}
            )
            crews.append(crew := RayCrew(config, config.run_folder, "no-model"))
            port = await crew.serve_metrics(None)
            (target,) = json.loads((tmp_path / f"{name}.targets.json").read_text())
            assert target == {
                "targets": [f"{ray.util.get_node_ip_address()}:{port}"],
                "labels": {"run": name},
            }
            assert value(scrape(port), "headway_learner_version") == 0.0
            endpoint = crew._members["metrics", 0].handle
            node: Any = endpoint.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            assert await node == here
            assert (port == wanted) == (name == "first")
    finally:
        for crew in crews:
            await crew.close()


async def test_no_counter_falls_while_its_endpoint_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever scrapes meanwhile sees no value, or the right one: from zero, `rate` would count all of it once more."""
    config = configuration("falls", run={"folder": str(tmp_path)}, metrics={"port": 0})
    crew, totals, recorder = RayCrew(config, config.run_folder, "no-model"), Exporter(), Recorder()
    series = 'headway_groups_total{state="finished"}'
    try:
        port = await crew.serve_metrics(None)
        assert value(scrape(port), series) == 0.0  # from the start
        recorder.inc("headway_groups_total", 10, label="finished")
        totals.apply(recorder.drain())
        await crew.show_metrics(totals.state())
        assert value(scrape(port), series) == 10.0
        ray.kill(crew._members["metrics", 0].handle)
        assert await crew.serve_metrics(port) == port
        assert value(scrape(port), series) is None and "headway" not in scrape(port)
        recorder.inc("headway_groups_total", 1, label="finished")
        totals.apply(recorder.drain())
        await crew.show_metrics(totals.state())
        assert value(scrape(port), series) == 11.0
    finally:
        await crew.close()


def test_the_last_port_that_is_taken_is_no_end() -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", LAST_PORT))
        except OSError:
            pass  # by another program: as good
        else:
            taken.listen()
        exporter = Exporter()
        try:
            port = exporter.serve("127.0.0.1", LAST_PORT)
            assert 0 < port < LAST_PORT and value(scrape(port), "headway_learner_version") == 0.0
        finally:
            exporter.close()


def test_a_role_has_one_series_whoever_reports_it() -> None:
    """What five processes send becomes the sum and the last value of one series; no label says which process."""
    labels = {"phase", "stage", "reason", "state", "role", "replica", "rows", "outcome"}
    assert {metric.label for metric in METRICS} - {""} <= labels
    exporter = Exporter()
    for process in range(5):
        recorder = Recorder()
        recorder.set("headway_queue_groups", process)
        recorder.set("headway_engine_version", 3, label="0")
        recorder.inc("headway_generation_tokens_total", 10)
        recorder.observe("headway_version_lag_steps", [process], label="total")
        exporter.apply(recorder.drain())
    registry = CollectorRegistry()
    registry.register(exporter)
    lines = generate_latest(registry).decode().splitlines()
    found = [
        line
        for line in lines
        if line.startswith(("headway_queue_groups", "headway_engine_v", "headway_generation_t"))
    ]
    assert found == [
        'headway_engine_version{replica="0"} 3.0', "headway_queue_groups 4.0", "headway_generation_tokens_total 50.0"
    ]  # fmt: skip
    assert 'headway_version_lag_steps_count{phase="total"} 5.0' in lines
    assert not [line for line in lines if "pid=" in line or line.startswith(("process_", "python_"))]


# ---- memory ------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = """
import asyncio, sys
import ray
from headway.cluster.ray_crew import RayCrew
from headway.core.config import parse_config
from headway.core.errors import ActorDied

monitor = {"memory_usage_threshold": 0.0, "memory_monitor_refresh_ms": 4000}  # any memory at all is too much
ray.init(
    address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
    logging_level=50,
    _system_config=monitor,
)

async def main():
    async with asyncio.timeout(90):
        await die_twice()

async def die_twice():
    tree = {"run": {"folder": sys.argv[1]}, "metrics": {"port": 0, "host": "127.0.0.1"}, "cluster": {"address": "x"}}
    config = parse_config(tree)
    crew = RayCrew(config, config.run_folder, "no-model")
    for incarnation in (1, 2):
        try:
            await crew.serve_metrics(None)
            await crew._ask(crew._present("metrics"), "watch")
        except ActorDied as death:
            print(death)
        death = await crew.next_death()
        assert (death.role, death.incarnation, crew._deaths.empty()) == ("metrics", incarnation, True)
    await crew.close()

asyncio.run(main())
"""


def test_an_actor_that_takes_too_much_memory_dies_like_any_other(tmp_path: Path) -> None:
    """Ray's memory monitor kills it under a call, which Ray does not call the death of an actor; the next one has its place."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OUT_OF_MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = "metrics 0 died: 1 worker(s) were killed due to the node running low on memory"
    assert done.stdout.splitlines() == [said] * 2
