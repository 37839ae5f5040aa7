"""On a real local Ray: what workers import, what fits where, what the store must hold, and who owns the rows."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from safetensors.torch import save_file

from headway.cluster.joining import connect, disconnect
from headway.cluster.placement import Placement, _hosted, store_table
from headway.cluster.queue import RolloutQueue
from headway.cluster.room import SMALLEST_CPU_SHARE, check_resources, check_store, published_bytes
from headway.core import rollouts
from headway.core.config import parse_config
from headway.core.errors import ClusterError

get: Any = ray.get
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def local_ray(root: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(root)  # where a user starts from: its folders must not become the workers' packages
    connect(parse_config({"run": {"name": "test-placement"}}))
    os.chdir(before)
    yield
    disconnect()


def table(group_id: int) -> pa.Table:
    return rollouts.build(
        {
            "rollout_id": f"{group_id}/{index}",
            "group_id": group_id,
            "prompt_id": "p",
            "sample_index": index,
            "prompt_ids": [1],
            "response_ids": list(range(20_000)),
            "loss_mask": [1] * 20_000,
            "behavior_logprobs": [-1.0] * 20_000,
            "version_spans": [{"start": 0, "end": 20_000, "version": 0}],
            "finish_reason": "length",
            "truncated": True,
            "text": "",
        }
        for index in range(2)
    )


def test_workers_find_our_folders_only_under_their_full_name() -> None:
    names = ["core", "verifiers", "learner", "actors", "cluster", "headway.core"]

    def found() -> list[bool]:
        return [importlib.util.find_spec(name) is not None for name in names]

    remote: Any = ray.remote(found).options(num_cpus=0)
    assert get(remote.remote()) == [False] * 5 + [True]


def test_rows_outlive_the_actor_that_made_them(tmp_path: Path) -> None:
    args = (store_table, ray.get)
    queue = Placement(parse_config({}), tmp_path).spawn(RolloutQueue, "queue", 0, 10, args)

    class Producer:
        def produce(self, queue: Any, made: pa.Table) -> int:
            ray.get(queue.put.remote(made))
            return os.getpid()

    remote: Any = ray.remote(Producer).options(num_cpus=0)
    producer = remote.remote()
    os.kill(get(producer.produce.remote(queue, table(7))), signal.SIGKILL)
    with pytest.raises(RayActorError):
        get(producer.produce.remote(queue, table(8)), timeout=30)
    (reference,) = get(queue.take.remote([7]))
    assert get(reference, timeout=30).equals(table(7))
    ray.kill(queue)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"generation": {"gpus": 1, "replicas": 3}}, r"group 'generation' needs 3 x \(1 CPU \+ 1 GPU\), only 0 fit: the cluster has 0 GPU"),
        ({"learner": {"labels": {"role": "trainer"}}}, r"group 'learner' needs 1 x \(1 CPU\) on nodes labelled {'role': 'trainer'}, only 0 fit"),
        ({"generation": {"replicas": 500}}, "group 'generation' needs 500 x .* only [0-9]+ fit"),
    ],
)  # fmt: skip
def test_a_shortfall_names_the_group_and_what_is_missing(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        check_resources(parse_config(tree))


def test_an_instance_of_our_own_has_room_for_engines_to_come() -> None:
    # Learner, engine, four spare engines, and what the others ask for rounded up.
    assert ray.cluster_resources()["CPU"] >= 7


async def test_every_role_and_every_engine_has_a_group_of_its_own(tmp_path: Path) -> None:
    config = parse_config({"run": {"name": "placed"}, "generation": {"cpus": 0.5}, "learner": {"cpus": 0.5}})
    check_resources(config)

    def placed() -> dict[str, Any]:
        rows = ray.util.placement_group_table().values()
        return {
            row["name"]: row["bundles"]
            for row in rows
            if row["state"] == "CREATED" and row["name"].startswith("placed-")
        }

    place = Placement(config, tmp_path)
    await place.reserve()
    roles = {
        "placed-learner": {0: {"CPU": 0.5}},
        "placed-verifiers-0": {0: {"CPU": SMALLEST_CPU_SHARE}},
        "placed-generation-0": {0: {"CPU": 0.5}},
    }
    assert placed() == roles
    await place.reserve_one("generation", 3)
    await place.reserve_one("generation", 3)  # has its place already
    assert placed() == {**roles, "placed-generation-3": {0: {"CPU": 0.5}}}
    assert await place.nodes("learner") == {ray.get_runtime_context().get_node_id()}
    place.release_one("generation", 3)
    place.release_one("generation", 3)
    assert placed() == roles
    place.close()
    assert placed() == {}


async def test_an_engine_without_a_place_holds_none(tmp_path: Path) -> None:
    tree = {"generation": {"cpus": 500}, "cluster": {"placement_deadline_s": 0.3}, "run": {"name": "huge"}}
    place = Placement(parse_config(tree), tmp_path)
    with pytest.raises(
        ClusterError, match=r"group 'generation-0' got no place in 0.3 s .* asks for \[{'CPU': 500"
    ):
        await place.reserve_one("generation", 0)
    states = {
        row["state"]
        for row in ray.util.placement_group_table().values()
        if row["name"] == "huge-generation-0"
    }
    assert states <= {"REMOVED"}


def test_a_worker_that_does_not_see_its_devices_does_not_start(tmp_path: Path) -> None:
    class Plain:
        pass

    remote: Any = ray.remote
    hosted = _hosted(Plain, str(tmp_path / "x.log"), package_version("headway"), 1)
    actor = remote(num_cpus=0, concurrency_groups={"watch": 1})(hosted).remote()
    with pytest.raises(RayActorError, match=r"this worker was given 1 GPUs but sees \[\]"):
        get(actor.__ray_ready__.remote(), timeout=30)


def test_a_published_version_is_as_large_as_the_tensors_in_its_type(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.float32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def size(**sections: dict[str, Any]) -> int:
        return published_bytes(parse_config(sections), str(tmp_path))

    assert size(model={"dtype": "float32"}) == (15 + 7) * 4
    assert size(model={"dtype": "bfloat16"}) == (15 + 7) * 2
    assert size(model={"dtype": "bfloat16"}, learner={"lora_rank": 8}) == 0


def test_the_store_must_hold_the_queue_and_two_weight_versions(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(MIB // 4)}, tmp_path / "model.safetensors")
    here = ray.get_runtime_context().get_node_id()
    (node,) = ray.nodes()
    store_mib = int(node["Resources"]["object_store_memory"]) // MIB

    def check(queue_mib: int, weight_nodes: set[str]) -> None:
        tree = {"queue": {"max_mib": queue_mib}, "model": {"dtype": "float32"}}
        check_store(parse_config(tree), str(tmp_path), weight_nodes)

    check(store_mib, set())
    check(store_mib - 2, {here})
    with pytest.raises(
        ClusterError, match=rf"needs {store_mib + 1} MiB there: .* and 2 MiB for two weight versions"
    ):
        check(store_mib - 1, {here})
    with pytest.raises(ClusterError, match=rf"queue.max_mib={store_mib + 1} and 0 MiB"):
        check(store_mib + 1, set())
