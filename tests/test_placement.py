"""On a real local Ray: what workers import, what fits, and who owns the rows."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError

from headway.cluster.placement import Placement, check_resources, connect
from headway.core import rollouts
from headway.core.config import parse_config
from headway.core.errors import ClusterError

get: Any = ray.get


@pytest.fixture(scope="module", autouse=True)
def local_ray(root: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(root)  # where a user starts from: its folders must not become the workers' packages
    connect(parse_config({"run": {"name": "test-placement"}}))
    os.chdir(before)
    yield
    ray.shutdown()


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
    place = Placement(parse_config({}), tmp_path)
    queue = place.queue()

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
    place.discard(queue)


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


def test_what_fits_is_placed_in_a_group_per_role(tmp_path: Path) -> None:
    config = parse_config({"run": {"name": "placed"}, "generation": {"cpus": 0.5}, "learner": {"cpus": 0.5}})
    check_resources(config)
    place = Placement(config, tmp_path)
    place.reserve()
    groups = {row["name"]: row for row in ray.util.placement_group_table().values()}
    assert {name for name, row in groups.items() if row["state"] == "CREATED"} == {
        "placed-learner",
        "placed-generation",
        "placed-verifiers",
    }
    assert groups["placed-generation"]["bundles"] == {0: {"CPU": 0.5}}
