"""Ray's own autoscaler, with nodes that are processes of this machine: what an engine without room asks for, and what
comes and goes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import cloudpickle

from headway.cluster.crew import NODE_DEADLINE_S, Fleet, Release
from headway.cluster.engines import Engines
from headway.cluster.joining import connect, disconnect
from headway.cluster.part import Shared
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.watch import Waits
from headway.core.config import Config, parse_config
from headway.core.metrics import Recorder
from headway.core.weights import Manifest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

HEAD = "f" * 51 + "00000"
HEAD_TYPE = "ray.head.default"
"""What the provider calls the head's node and its type."""
STORE = 80 << 20
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
UNUSED = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
"""Settings that must be there."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head with one GPU, and an autoscaler that brings up to two nodes with a GPU and takes back those that idle for
    three seconds. `ray.cluster_utils.AutoscalingCluster` does the same, but its settings are missing in Ray's wheel, and
    it ends every Ray on the machine."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="hw-"))
    at = f"{ray.util.get_node_ip_address()}:{port}"
    size = {"node_config": {}, "min_workers": 0}
    settings = {
        **{key: [] for key in UNUSED},
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "cluster_name": "test",
        "upscaling_speed": 1.0,
        "max_workers": 2,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "gcs_address": at,
            "head_node_id": HEAD,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {**size, "resources": {"CPU": 4, "GPU": 1}, "max_workers": 0},
            "engines": {
                **size,
                "resources": {"CPU": 1, "GPU": 1, "object_store_memory": STORE},
                "max_workers": 2,
            },
        },
    }
    (folder / "autoscaler.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_NODE_TYPE_NAME": HEAD_TYPE,
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    }
    head = subprocess.Popen(
        [
            *(Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}"),
            *("--num-cpus=4", "--num-gpus=1", f"--object-store-memory={STORE}", "--include-dashboard=false"),
            *("--disable-usage-stats", f"--temp-dir={folder}"),
            f"--autoscaling-config={folder / 'autoscaler.json'}",
        ],
        env=environment,
        stdout=(folder / "head.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        end = time.monotonic() + 90
        while "Ray runtime started" not in (folder / "head.log").read_text():
            assert head.poll() is None and time.monotonic() < end, (folder / "head.log").read_text()
            time.sleep(0.2)
        yield at
    finally:
        disconnect()
        started = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            head.kill()
        _, left = psutil.wait_procs(started, timeout=5)
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Engine:
    """Serves versions, and samples nothing."""

    def __init__(self, config: Config, model_folder: str, replica: int) -> None:
        pass

    async def start(self) -> None:
        pass

    async def update_weights(self, manifest: Manifest, *buckets: Any) -> dict[str, float]:
        return {}

    async def report(self) -> tuple[float, int, list[Any]]:
        return 0.0, 0, []

    async def shutdown(self) -> None:
        pass


def nodes() -> list[str]:
    """Ids of the nodes that there are besides the head."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != HEAD]


async def until(holds: Any, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.1)


async def test_an_engine_without_room_brings_a_node_and_its_leaving_lets_it_go(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.cluster.placement.ROOM_S", 30)  # the head has room
    tree = {
        "run": {"name": "grows", "folder": str(tmp_path)},
        "cluster": {"address": address, "placement_deadline_s": 1},  # no node comes as soon
        "generation": {"cpus": 0.5, "gpus": 1},
    }
    config = parse_config(tree)
    connect(config)
    crew = RayCrew(config, config.run_folder, "no-model", {**ROLES, "generation": Engine})
    manifest = Manifest(version=0, entries=(), bucket_bytes=())
    said: list[str] = []
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as loops:
        engines = Engines(
            Shared(
                config=config,
                crew=crew,
                waits=Waits(),
                recorder=Recorder(),
                say=said.append,
                spawn=lambda loop: tasks.add(loops.create_task(loop)),
            ),
            on_left=lambda replica: None,
        )
        try:
            await engines.start(Fleet(replicas=1, gpus=1))
            engines.published(Release(manifest=manifest, reference=ray.put(manifest), buckets=()))
            engines.keep_all()
            await until(lambda: engines.serving == 1)
            assert not said and not nodes()
            assert crew.placement_deadline_s == NODE_DEADLINE_S
            await crew.check_fleet(Fleet(replicas=3, gpus=1))  # which nodes may come nobody says

            monkeypatch.setattr("headway.cluster.placement.ROOM_S", 0.1)  # a raylet takes longer to start
            engines.scale(2)
            await until(lambda: engines.serving == 2)
            assert said == [
                "engine 1 joins (2 wanted, with 1 GPU each)",
                "engine 1 waits for the autoscaler, which is asked for 0.5 CPU + 1 GPU",
            ]
            assert list(await crew._placement.nodes("generation-0")) == [HEAD]
            assert list(await crew._placement.nodes("generation-1")) == nodes()

            engines.scale(1)
            await until(lambda: not nodes())
            assert said[2:] == ["engine 1 leaves (1 wanted, with 1 GPU each)", "engine 1 has left"]
            assert engines.serving == 1
        finally:
            for task in tasks:
                task.cancel()
            await crew.close()
