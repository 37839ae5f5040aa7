"""The run's actors on real Ray: what each failure is called, how soon it is known, and that nothing is left behind.
Actors that sleep stand in for models; queue, endpoint and mailbox are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.exceptions import OutOfDiskError, OwnerDiedError
from ray.util.placement_group import placement_group_table

from headway.actors.generation_rows import GroupRequest
from headway.cluster import members, ray_crew
from headway.cluster.crew import Crew, Fleet
from headway.cluster.engines import Engines
from headway.cluster.part import Shared
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.watch import Waits
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import (
    ActorDied,
    ClusterError,
    EngineDead,
    HandedBack,
    HeadwayError,
    Lost,
    RolloutFailed,
    StoreFull,
)
from headway.core.metrics import Recorder
from headway.core.prompts import Prompt
from headway.core.sections import Verifiers
from headway.core.weights import Manifest

pytestmark = pytest.mark.asyncio(loop_scope="module")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

STORE_MIB = 80
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """A head and two nodes for engines, which know of a lost node after a second and must not spill to disk."""
    system = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 500,
        "health_check_failure_threshold": 2,
        "local_fs_capacity_threshold": 1e-6,
        "automatic_object_spilling_enabled": False,
    }
    store = STORE_MIB * MIB
    head = {"num_cpus": 16, "num_gpus": 2, "object_store_memory": store, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=store, labels={"for": "engine"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=50)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Learner:
    """Sleeps for as long as its prompt files say; its weights are its version."""

    def __init__(self, config: Config, model_folder: str, run_folder: str) -> None:
        self.version = 0
        self.folder = Path(run_folder)

    def address(self) -> str:
        return "nowhere"

    def start(self, rank: int, size: int, address: str, deadline_s: float) -> int:
        return 2

    def train(self, version: int, *tables: pa.Table) -> tuple[list[Any], pa.Table]:
        time.sleep(float(tables[0].column("extra")[0].as_py() or 0))
        self.version = version + 1
        rows = [row for table in tables for row in table.column("group_id").to_pylist()]
        return [rows], pa.table({"advantages": pa.array([[0.5]] * len(rows), pa.list_(pa.float32()))})

    def publish(self, version: int) -> tuple[Any, ...]:
        buckets = tuple(np.full(size, version, np.uint8) for size in (10, MIB))
        return Manifest(version=version, entries=(), bucket_bytes=(10, MIB)), *buckets

    def save(self, folder: str) -> None:
        (Path(folder) / "version").write_text(str(self.version))

    def load(self, folder: str) -> int:
        self.version = int((Path(folder) / "version").read_text())
        return self.version


class Scorer(Learner):
    """A critic or a reference."""

    def __init__(self, config: Config, model_folder: str) -> None:
        super().__init__(config, model_folder, str(config.run_folder))

    def score(self, table: pa.Table) -> pa.Table:
        return table

    def update_weights(self, manifest: Manifest, *buckets: np.ndarray) -> None:
        self.version = manifest.version

    def train(self, version: int, *tables: pa.Table) -> Any:
        return super().train(version, *tables)[0]


class Verifier:
    def __init__(self, settings: Verifiers, before_others: bool) -> None:
        self.before_others = before_others
        self.scored = 0

    def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        time.sleep(prompt.context.get("score_s", 0))
        self.scored += 1
        return rollouts.replace_column(table, "reward", [1.0] * table.num_rows)

    def drain_updates(self) -> list[Any]:
        return [("headway_verifier_errors_total", "crash", 1.0)]

    def close(self) -> None:
        pass


class Judge:
    """Adds the number of prompts that it was tried on to each reward."""

    def __init__(self, config: Config, replica: int) -> None:
        self.replica = replica

    async def start(self, known: tuple[Prompt, ...]) -> None:
        self.known = len(known)

    async def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        if prompt.context.get("judge_dies"):
            raise EngineDead("judge", self.replica)
        rewards = [reward + self.known for reward in table["reward"].to_pylist()]
        return rollouts.replace_column(table, "reward", rewards)

    async def drain_updates(self) -> list[Any]:
        return [("headway_verifier_errors_total", "judge_timeout", 1.0)]

    async def shutdown(self) -> None:
        pass


class Engine:
    """Does what the prompt's context says. Has a child process, as a real engine has."""

    def __init__(self, config: Config, model_folder: str, replica: int) -> None:
        self.config = config
        self.replica = replica
        self.weights = -1
        self.sampled = 0
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        self.child = subprocess.Popen(["sleep", "600"])

    async def update_weights(self, manifest: Manifest, *buckets: np.ndarray) -> dict[str, float]:
        assert [len(bucket) for bucket in buckets] == list(manifest.bucket_bytes)
        assert {int(bucket[0]) for bucket in buckets} == {manifest.version}
        self.weights = manifest.version
        return {}

    async def report(self) -> tuple[float, int, list[Any]]:
        return 0.25, 3, [("headway_generation_tokens_total", "", float(self.sampled))]

    async def hand_back(self) -> None:
        self.stopped.set()

    async def take_back(self, group_id: int) -> list[int]:
        return [group_id] * 3

    async def generate(self, request: GroupRequest, kept: list[int] | None = None) -> pa.Table:
        context = request.prompt.context
        if error := context.get("raises"):
            raise error
        self.sampled += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(context.get("sample_s", 0)):
                await self.stopped.wait()
                raise HandedBack(f"group {request.group_id}")
        ids = [1, 2, *(kept or [])]
        return rollouts.build(
            {
                "rollout_id": f"{request.group_id}/{index}",
                "group_id": request.group_id,
                "prompt_id": "p",
                "sample_index": index,
                "prompt_ids": [1],
                "response_ids": ids,
                "loss_mask": [1] * len(ids),
                "behavior_logprobs": [-1.0] * len(ids),
                "version_spans": [{"start": 0, "end": len(ids), "version": max(self.weights, 0)}],
                "finish_reason": "stop",
                "truncated": False,
                "text": "x" * context.get("bytes", 1),
                "extra": str(context.get("train_s", 0)),
            }
            for index in range(request.group_size)
        )

    async def shutdown(self) -> None:
        self.child.kill()


DOUBLES = {
    **ROLES,
    "learner": Learner,
    "generation": Engine,
    "verifiers": Verifier,
    "judge": Judge,
    "reference": Scorer,
    "critic": Scorer,
}


def configuration(tmp_path: Path, name: str, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": name, "folder": str(tmp_path)},
        "queue": {"max_mib": 40},
        "metrics": {"port": 0, "host": "127.0.0.1"},
        "generation": {"cpus": 0.5},
        "cluster": {"placement_deadline_s": 20},
    }
    return parse_config({key: {**tree.get(key, {}), **sections.get(key, {})} for key in {*tree, *sections}})


def new(config: Config, **roles: type) -> RayCrew:
    known = [Prompt(prompt_id="k", content="1 + 1", gold="2", verifier="judge")] * 3
    return RayCrew(config, config.run_folder, "no-model", {**DOUBLES, **roles}, known)


@asynccontextmanager
async def opened(config: Config, *, engines: int = 1, **roles: type) -> AsyncIterator[RayCrew]:
    crew = new(config, **roles)
    try:
        async with asyncio.timeout(90):
            await crew.open()
            await crew.start_learner()
            await asyncio.gather(*map(crew.start_engine, range(engines)))
        yield crew
    finally:
        await crew.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crew(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayCrew]:
    """Of all roles. Whoever ends one of these actors puts another in its place."""
    roles = {"algorithm": {"preset": "ppo"}, "verifiers": {"replicas": 2}}
    async with opened(configuration(tmp_path_factory.mktemp("runs"), "shared", **roles)) as crew:
        yield crew


def group(group_id: int, **context: Any) -> GroupRequest:
    prompt = Prompt(prompt_id="p", content="1 + 1", gold="2", verifier="numeric", context=context)
    return GroupRequest(
        group_id=group_id,
        prompt=prompt,
        group_size=2,
        temperature=1,
        top_p=1,
        max_new_tokens=5,
        deadline_s=60,
    )


async def roll(crew: Crew, group_id: int, **context: Any) -> Any:
    async with asyncio.timeout(30):
        return await crew.put(crew.sample(0, group(group_id, **context)))


async def roll_when_there_is_room(crew: Crew, group_id: int, **context: Any) -> Any:
    """What is no longer referred to leaves the store a moment later: within half a minute, or it never does."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await roll(crew, group_id, **context)
            except (StoreFull, RolloutFailed):
                await asyncio.sleep(0.1)


async def pid_of(crew: RayCrew, role: str, replica: int = 0) -> int:
    return await inside(crew, role, replica, lambda actor: os.getpid())


async def inside(crew: RayCrew, role: str, replica: int, function: Any) -> Any:
    async with asyncio.timeout(30):
        return await crew._members[role, replica].handle.__ray_call__.remote(function)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def gone(*pids: int, within_s: float = 30) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return not any(map(is_running, pids))


def placed() -> set[str]:
    return {row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"}


async def death_of(crew: RayCrew, within_s: float = 20) -> tuple[str, int, int]:
    """The next reported death: role, replica, incarnation."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        death = await crew.next_death()
    assert time.monotonic() - began < within_s
    return death.role, death.replica, death.incarnation


async def test_a_group_goes_from_the_engine_through_the_scorers_to_the_learner(
    crew: RayCrew, tmp_path: Path
) -> None:
    roles = {
        "learner": 1,
        "verifiers": 2,
        "reference": 1,
        "critic": 1,
        "queue": 1,
        "metrics": 1,
        "control": 1,
    }
    assert crew.replicas == roles
    await crew.update_engine(0, await crew.publish(0))
    receipt = await roll(crew, 7)
    assert (receipt.group_id, receipt.oldest_version, receipt.reward_sum) == (7, 0, 2.0)
    await roll(crew, 8)
    trained = await crew.train(0, [7, 8])
    assert trained.stats == [[7, 7, 8, 8]] and trained.critic_stats == [[7, 7, 8, 8]]
    await crew.write_batch([7, 8], tmp_path / "b.parquet", 1, trained.columns)
    assert rollouts.read_parquet(tmp_path / "b.parquet")["advantages"].to_pylist() == [[0.5]] * 4
    report = await crew.report(0)
    assert (report.kv_cache_usage, report.preemptions) == (0.25, 3)
    assert report.updates == [("headway_generation_tokens_total", "", 2.0)]
    updates: list[Any] = await crew.scorer_updates()
    counts = {label: sum(payload[0]) for name, label, payload in updates if name == "headway_scoring_seconds"}
    assert counts == {"verifiers": 2, "reference": 2, "critic": 2}
    assert updates[3:] == [("headway_verifier_errors_total", "crash", 1.0)] * 2
    # Rows in the queue, and weights that change, go through a checkpoint.
    await crew.save(tmp_path)
    await crew.save_queue(tmp_path / "queue.parquet")
    await crew.release([7, 8])
    assert [r.group_id for r in await crew.restore_queue(tmp_path / "queue.parquet")] == [7, 8]
    assert {path.parent.name for path in tmp_path.glob("*/version")} == {"learner", "critic"}
    assert await crew.load(tmp_path) == 1
    await crew.refresh_reference(await crew.publish(3))
    assert await inside(crew, "reference", 0, lambda actor: actor.version) == 3
    await crew.refuse(9)
    await roll(crew, 9)
    with pytest.raises(HeadwayError, match=r"does not hold groups \[9\]"):
        await crew.train(1, [9])


async def test_what_engines_raise_arrives_as_itself(crew: RayCrew) -> None:
    with pytest.raises(RolloutFailed) as failed:
        await roll(crew, 11, raises=RolloutFailed("straggler", "group 11 passed 3 s"))
    assert type(failed.value) is RolloutFailed and str(failed.value) == "straggler: group 11 passed 3 s"
    with pytest.raises(HeadwayError, match=r"^generation 0 failed: ValueError: a bug; see .*logs$") as bug:
        await roll(crew, 12, raises=ValueError("a bug"))
    assert type(bug.value) is HeadwayError
    with pytest.raises(ActorDied, match=r"^generation 0 died: the engine of generation 0 is dead$"):
        await roll(crew, 13, raises=EngineDead("generation", 0))
    before = crew.incarnation("generation", 0)
    assert await death_of(crew) == ("generation", 0, before)
    assert await crew.start_engine(0) == before + 1
    assert (await roll(crew, 14)).group_id == 14


async def test_a_group_that_is_handed_back_goes_on_at_an_engine_that_came_late(crew: RayCrew) -> None:
    release = await crew.publish(4)
    assert await crew.start_engine(5) == 1 == crew.incarnation("generation", 5)
    await crew.update_engine(5, release)
    assert await inside(crew, "generation", 5, lambda engine: engine.weights) == 4
    putting = asyncio.ensure_future(crew.put(crew.sample(0, group(16, sample_s=60))))
    await asyncio.sleep(0.5)
    await crew.hand_back(0)
    with pytest.raises(HandedBack):
        await putting
    kept = await crew.take_back(0, 16)
    pids = [await pid_of(crew, "generation"), await inside(crew, "generation", 0, lambda e: e.child.pid)]
    assert "shared-generation-0" in placed()
    await crew.stop_engine(0)
    assert await gone(*pids) and "shared-generation-0" not in placed()
    await crew.stop_engine(0)  # again is no error
    assert (await crew.put(crew.sample(5, group(16), kept))).response_lengths == (5, 5)
    with pytest.raises(ActorDied, match=r"^generation 0 died: it was ended$"):
        crew.sample(0, group(17))
    await crew.stop_engine(5)
    await crew.start_engine(0)
    assert crew._deaths.empty()  # an end on purpose is no death


@pytest.mark.parametrize("role", ["generation", "verifiers", "reference", "queue", "metrics", "control"])
async def test_a_killed_actor_is_reported_once_and_replaced(crew: RayCrew, role: str) -> None:
    port = await crew.serve_metrics(None)
    targets = crew._folder.with_name("shared.targets.json")
    assert json.loads(targets.read_text()) == [
        {"targets": [f"localhost:{port}"], "labels": {"run": "shared"}}
    ]
    before = crew.incarnation(role, 0)
    os.kill(await pid_of(crew, role), signal.SIGKILL)
    async with asyncio.timeout(20):
        death = await crew.next_death()
    assert (death.role, death.replica, death.incarnation) == (role, 0, before)
    assert "process has died" in str(death) and "\n" not in str(death) and len(str(death)) < 150
    match role:
        case "generation":
            await crew.start_engine(0)
        case "queue":
            with pytest.raises(ActorDied, match="queue 0 died"):
                await crew.release([1])
            await crew.start_queue()
        case "metrics":
            assert await crew.serve_metrics(port) == port
            await crew.show_metrics({"gauges": [["headway_learner_version", "", 12.0]]})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert b"headway_learner_version 12.0" in answer.read()
        case _:
            await crew.replace(role, 0)
    assert crew.incarnation(role, 0) == before + 1
    assert (await roll(crew, 22)).group_id == 22  # even: verifier 0
    await crew.release([22])
    assert crew._deaths.empty()


async def test_a_group_fails_with_whoever_died_under_it(crew: RayCrew) -> None:
    engine, verifier = await pid_of(crew, "generation"), await pid_of(crew, "verifiers", 1)
    scoring = asyncio.ensure_future(roll(crew, 31, score_s=60))
    await asyncio.sleep(1)
    os.kill(verifier, signal.SIGKILL)
    with pytest.raises(ActorDied, match="verifiers 1 died"):
        await scoring
    assert (await death_of(crew))[:2] == ("verifiers", 1)
    with pytest.raises(ActorDied, match="verifiers 1 died"):  # not yet replaced
        await roll(crew, 33)
    assert ("headway_verifier_errors_total", "crash", 1.0) in await crew.scorer_updates()
    sampling = asyncio.ensure_future(roll(crew, 32, sample_s=60))
    await asyncio.sleep(0.5)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(ActorDied, match="generation 0 died"):
        await sampling
    assert (await death_of(crew))[:2] == ("generation", 0)
    await asyncio.gather(crew.replace("verifiers", 1), crew.start_engine(0))
    assert (await roll(crew, 33)).group_id == 33


async def test_rows_are_put_again_after_the_queue_died_and_not_sampled_again(crew: RayCrew) -> None:
    sampled = await inside(crew, "generation", 0, lambda engine: engine.sampled)
    pid = await pid_of(crew, "queue")
    rows = crew.sample(0, group(44, sample_s=1, bytes=MIB))
    putting = asyncio.ensure_future(crew.put(rows))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match="queue 0 died"):
        await putting
    assert (await death_of(crew))[0] == "queue"
    await crew.start_queue()
    assert (await crew.put(rows)).group_id == 44
    # Whoever stops waiting does not stop the engine, and may come again.
    rows = crew.sample(0, group(45, sample_s=0.5))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await crew.put(rows)
    assert (await crew.put(rows)).group_id == 45
    assert (await crew.train(0, [44, 45])).stats == [[44, 44, 45, 45]]
    assert await inside(crew, "generation", 0, lambda engine: engine.sampled) == sampled + 2
    await crew.release([44, 45])


async def test_rows_of_a_dead_queue_name_the_queue(crew: RayCrew) -> None:
    queue, learner = crew._members["queue", 0], crew._members["learner", 0]
    object_id = "0123456789abcdef" + queue.handle._actor_id.hex() + "02000000"
    death = crew._typed(OwnerDiedError(object_id, None, ""), learner)
    assert isinstance(death, ActorDied) and (death.role, death.incarnation) == ("queue", queue.incarnation)
    assert (await death_of(crew))[0] == "queue"
    assert isinstance(crew._typed(OwnerDiedError("f" * 56, None, ""), learner), Lost)
    await crew.start_queue()


async def test_a_full_store_takes_the_same_rows_when_there_is_room_again(crew: RayCrew) -> None:
    sampled = await inside(crew, "generation", 0, lambda engine: engine.sampled)
    rows = crew.sample(0, group(54, bytes=4 * MIB))
    ray.wait([rows.reference], timeout=30, fetch_local=False)
    await asyncio.sleep(0.5)  # what the earlier stages made is freed
    ballast: list[Any] = []

    def fill() -> None:
        while True:
            ballast.append(ray.put(np.zeros(2 * MIB, np.uint8)))

    with pytest.raises(OutOfDiskError):
        fill()
    with pytest.raises(StoreFull, match="object store") as full:
        await crew.put(rows)
    assert type(full.value) is StoreFull and "\n" not in str(full.value)
    with pytest.raises(RolloutFailed, match="store_full: generation 0: "):
        await roll(crew, 55, bytes=4 * MIB)  # an engine's own rows have no place to wait in
    ballast.clear()
    async with asyncio.timeout(30):
        while True:
            with suppress(StoreFull):
                assert (await crew.put(rows)).group_id == 54
                break
            await asyncio.sleep(0.1)
    assert await inside(crew, "generation", 0, lambda engine: engine.sampled) == sampled + 2
    await crew.release([54])


async def test_the_store_is_as_empty_after_many_groups_as_before(crew: RayCrew) -> None:
    gc.collect()  # the rows that tracebacks of earlier tests hold
    for group_id in range(60, 72):  # 12 x 2 x 8 MiB pass through 80 MiB that cannot spill
        await roll_when_there_is_room(crew, group_id, bytes=8 * MIB)
        await crew.train(group_id, [group_id])
        await crew.release([group_id])


async def test_an_actor_that_does_not_start_says_why(crew: RayCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Scorer):
        def __init__(self, config: Config, model_folder: str) -> None:
            raise ValueError("the model folder is empty")

    with monkeypatch.context() as patch:
        patch.setattr(crew, "_roles", {**DOUBLES, "reference": Broken})
        with pytest.raises(ActorDied, match=r"^reference 0 died: ValueError: the model folder is empty$"):
            await crew.replace("reference", 0)
    assert (await death_of(crew))[0] == "reference"
    await crew.replace("reference", 0)


async def test_an_engine_that_does_not_end_is_killed(crew: RayCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Engine):
        async def shutdown(self) -> None:
            self.child.kill()
            await asyncio.sleep(600)

    monkeypatch.setattr(members, "ENDING_DEADLINE_S", 0.5)
    monkeypatch.setattr(crew, "_roles", {**DOUBLES, "generation": Stuck})
    await crew.start_engine(1)
    pid = await pid_of(crew, "generation", 1)
    began = time.monotonic()
    await crew.stop_engine(1)
    assert time.monotonic() - began < 30 and await gone(pid)


async def test_a_judge_sees_what_verifiers_leave_and_is_replaced_when_its_engine_dies(tmp_path: Path) -> None:
    async with opened(configuration(tmp_path, "judged", judge={"model": "m", "cpus": 0.5})) as crew:
        assert list(crew.elastic) == ["verifiers", "judge"] and "judged-judge-0" in placed()
        assert await inside(crew, "verifiers", 0, lambda verifier: verifier.before_others)
        assert (await roll(crew, 1)).reward_sum == 8.0  # two rows of 1 + 3
        with pytest.raises(ActorDied, match=r"^judge 0 died: the engine of judge 0 is dead$"):
            await roll(crew, 2, judge_dies=True)
        assert await death_of(crew) == ("judge", 0, 1)
        await crew.replace("judge", 0)
        assert (await roll(crew, 3)).reward_sum == 8.0
        updates = await crew.scorer_updates()
        assert ("headway_verifier_errors_total", "judge_timeout", 1.0) in updates
        seconds = {label for name, label, _ in updates if name == "headway_scoring_seconds"}
        assert seconds == {"verifiers", "judge"}


async def test_scorers_come_and_go_and_their_groups_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(configuration(tmp_path, "elastic", verifiers={"cpus": 0.5})) as crew:
        await crew.resize("verifiers", 3)
        assert crew.replicas["verifiers"] == 3 and {f"elastic-verifiers-{n}" for n in range(3)} <= placed()
        for group_id in range(6):
            await roll(crew, group_id)
        scored = [await inside(crew, "verifiers", n, lambda verifier: verifier.scored) for n in range(3)]
        assert scored == [2, 2, 2]
        # One that leaves ends what it has,
        slow = [asyncio.ensure_future(roll(crew, group_id, score_s=2)) for group_id in (6, 7, 8)]
        async with asyncio.timeout(30):
            while crew.backlog("verifiers") < 3:
                await asyncio.sleep(0.05)
        began = time.monotonic()
        await crew.resize("verifiers", 2)
        assert 0.3 < time.monotonic() - began < 20
        assert [receipt.group_id for receipt in await asyncio.gather(*slow)] == [6, 7, 8]
        assert crew.backlog("verifiers") == 0
        assert "elastic-verifiers-2" not in placed()
        # and when that takes too long, others score it: its end is no death that anyone has to mend.
        monkeypatch.setattr(ray_crew, "DRAIN_S", 0.2)
        late = asyncio.ensure_future(roll(crew, 9, score_s=2))
        await asyncio.sleep(0.5)
        await crew.resize("verifiers", 1)
        assert (await late).group_id == 9
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await crew.next_death()
        # Without room nothing changes.
        crew._placement._deadline_s = 1
        crew._placement._needs["verifiers"].bundle["CPU"] = 100
        with pytest.raises(
            ClusterError, match=r"^no node can hold group 'verifiers-1': it asks for 100 CPU$"
        ):
            await crew.resize("verifiers", 2)
        assert crew.replicas["verifiers"] == 1 and "elastic-verifiers-1" not in placed()
        assert (await roll(crew, 11)).group_id == 11


async def test_a_person_asks_the_run_from_another_process(crew: RayCrew) -> None:
    code = "import sys; from headway.cluster.control import scale; print(scale(sys.argv[1], None, 'verifiers', 3))"
    command = [sys.executable, "-P", "-c", code, str(crew._folder)]
    # This process's own Ray has set the mode; a person's terminal has not.
    environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    client = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    async with asyncio.timeout(60):
        ticket, kind, value = await crew.next_request()
        assert (kind, value) == ("scale", ("verifiers", 3, None))
        await crew.answer(ticket, {"before": 1, "after": 3})
        await crew.answer(99, "nobody asked")
        out, errors = await client.communicate()
    assert (out.decode().strip(), errors.decode()) == ("{'before': 1, 'after': 3}", "")


async def test_two_runs_of_one_name_do_not_share_a_cluster(
    crew: RayCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_crew, "NAME_DEADLINE_S", 0.3)
    second = new(crew._config)
    with pytest.raises(ClusterError, match="a run named 'shared' is on this cluster already"):
        await second.open()
    await second.close()
    assert (crew._folder / "cluster.json").exists()
    assert (await roll(crew, 74)).group_id == 74


async def test_weights_that_die_while_they_are_trained_are_lost_and_nothing_is_left(tmp_path: Path) -> None:
    config = configuration(tmp_path, "lost", algorithm={"preset": "ppo", "reference_refresh_steps": 2})
    async with opened(config) as crew:
        await crew.serve_metrics(None)
        assert (tmp_path / "lost.targets.json").exists()
        pids = {key: await pid_of(crew, *key) for key in crew._members}
        child = await inside(crew, "generation", 0, lambda engine: engine.child.pid)
        where = json.loads((config.run_folder / "cluster.json").read_text())
        assert where["namespace"] == "headway-lost" and where["pid"] == os.getpid()
        await roll(crew, 1, train_s=60)
        for role in ("critic", "learner"):
            training = asyncio.ensure_future(crew.train(0, [1]))
            await asyncio.sleep(0.5)
            os.kill(pids[role, 0], signal.SIGKILL)
            with pytest.raises(ActorDied, match=r"(critic|learner) 0 died"):
                await training
            assert (await death_of(crew))[0] == role
        for role in ("learner", "critic", "reference"):
            with pytest.raises(Lost, match=f"the weights of {role} 0"):
                await crew.replace(role, 0)
    assert await gone(child, *pids.values()) and not [name for name in placed() if name.startswith("lost-")]
    assert not (config.run_folder / "cluster.json").exists()
    assert not (tmp_path / "lost.targets.json").exists()
    async with opened(configuration(tmp_path, "lost")) as crew:
        assert (await roll(crew, 1)).group_id == 1
    await crew.close()  # again is no error


async def test_engines_get_distinct_devices_and_the_others_none(tmp_path: Path) -> None:
    config = configuration(tmp_path, "devices", generation={"cpus": 0.5, "gpus": 1})
    async with opened(config, engines=2) as crew:
        devices = [
            await inside(crew, role, replica, lambda _: os.environ["CUDA_VISIBLE_DEVICES"])
            for role, replica in (("generation", 0), ("generation", 1), ("learner", 0))
        ]
        assert sorted(devices[:2]) == ["0", "1"] and devices[2] == ""
        crew._placement._deadline_s = 1
        with pytest.raises(
            ClusterError, match=r"'generation-2' got no place in 1 s .*GPU.* free are .*'GPU': 0"
        ):
            await crew.start_engine(2)
        assert "devices-generation-2" not in placed()


async def test_engines_of_another_size_take_the_places_of_those_that_there_are(tmp_path: Path) -> None:
    """The driver's own engines, on two GPUs: 2 engines of one, 1 of both, 4 of a half."""
    config = configuration(tmp_path, "sizes", generation={"cpus": 0.5, "gpus": 1, "drain_s": 0})
    said: list[str] = []

    def bundles() -> dict[str, float]:
        rows = [row for row in placement_group_table().values() if row["name"].startswith("sizes-generation")]
        assert {row["state"] for row in rows} <= {"CREATED", "REMOVED", "PENDING"}
        return {
            row["name"].removeprefix("sizes-generation-"): row["bundles"][0]["GPU"]
            for row in rows
            if row["state"] == "CREATED"
        }

    async def of(replica: int) -> tuple[float, float, int]:
        """What an engine was told of its GPUs, and how many it sees."""
        return await inside(
            crew,
            "generation",
            replica,
            lambda engine: (
                engine.config.generation.gpus,
                engine.config.generation.gpu_memory_utilization,
                len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")),
            ),
        )

    async with opened(config, engines=0) as crew, asyncio.TaskGroup() as loops:
        release = await crew.publish(0)
        tasks: set[asyncio.Task[None]] = set()
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

        async def settled(replicas: int, gpus: float) -> None:
            async with asyncio.timeout(60):
                while not (engines.is_settled and engines.gpus == gpus and len(engines.all) == replicas):
                    await asyncio.sleep(0.1)

        await engines.start(Fleet(replicas=2, gpus=1))
        engines.published(release)
        engines.keep_all()
        await settled(2, 1)
        assert bundles() == {"0": 1, "1": 1} and await of(0) == (1, 0.9, 1)

        for fleet, refusal in (
            (Fleet(replicas=1, gpus=3), r"^no node has 3 GPU: the largest has 2$"),
            (
                Fleet(replicas=2, gpus=2),
                r"^there is room for 1 x \(0.5 CPU \+ 2 GPU\) once .* have left, not for 2; ",
            ),
            (Fleet(replicas=5, gpus=0.5), r"^there is room for 4 x .* have left, not for 5; "),
        ):
            with pytest.raises(ClusterError, match=refusal):
                await crew.check_fleet(fleet)
        await crew.check_fleet(Fleet(replicas=1, gpus=2))
        engines.scale(1, 2)
        await settled(1, 2)
        (replica,) = engines.all
        assert bundles() == {str(replica): 2} and await of(replica) == (2, 0.9, 2)
        assert f"engine {replica} waits for room for 0.5 CPU + 2 GPU" in said

        await crew.check_fleet(Fleet(replicas=4, gpus=0.5))
        engines.scale(4, 0.5)
        await settled(4, 0.5)
        assert bundles() == {str(replica): 0.5 for replica in engines.all}
        assert {await of(replica) for replica in engines.all} == {(0.5, 0.45, 1)}
        for task in tasks:
            task.cancel()
    assert not bundles()


async def test_what_no_node_could_hold_is_refused_at_once(tmp_path: Path) -> None:
    labelled = {"cpus": 0.5, "labels": {"for": "engine"}}
    async with opened(configuration(tmp_path, "never", generation=labelled), engines=0) as crew:
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"^no node has 1 GPU on nodes labelled .*: there is none$"):
            await crew.check_fleet(Fleet(replicas=1, gpus=1))
        where = r"0.5 CPU \+ 1 GPU on a node labelled {'for': 'engine'}"
        with pytest.raises(
            ClusterError, match=rf"^no node can hold group 'generation-0': it asks for {where}$"
        ):
            await crew.place_engine(0, 1)
        assert time.monotonic() - began < 10 and crew.placement_deadline_s == 20
        assert "never-generation-0" not in placed()
        # Nor is any actor left whose start was given up, wherever that was.
        for pause_s in (0, 0.01, 0.3):
            starting = asyncio.ensure_future(crew.start_engine(0))
            await asyncio.sleep(pause_s)
            starting.cancel()
            await asyncio.wait([starting])
            await crew.stop_engine(0)
        async with asyncio.timeout(30):
            while "never-generation-0" in placed():
                await asyncio.sleep(0.05)


async def test_gpus_that_cannot_share_a_model_are_refused(tmp_path: Path) -> None:
    """Qwen2.5-0.5B: 14 attention heads, 2 for keys and values."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 14, "num_key_value_heads": 2}')
    for gpus in (0.5, 1, 2, 14):
        ray_crew._check_divides(tmp_path, gpus)
    with pytest.raises(
        ClusterError, match=r"^4 GPUs cannot share this model: it has 14 attention heads and 2 "
    ):
        ray_crew._check_divides(tmp_path, 4)
    with pytest.raises(ClusterError, match="7 GPUs"):
        ray_crew._check_divides(tmp_path, 7)  # no whole number of them for each head


async def test_a_store_that_is_too_small_is_refused_at_the_start(tmp_path: Path) -> None:
    crew = new(configuration(tmp_path, "large", queue={"max_mib": 100}))
    with pytest.raises(
        ClusterError, match=r"holds 80 MiB, but this run needs 100 MiB there: queue.max_mib=100"
    ):
        await crew.open()
    await crew.close()
    assert "large-learner" not in placed()


async def test_the_loss_of_a_node_is_the_death_of_its_engine(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes are for engines. The engine moves from the first that is lost to the second; after that, there is no
    room for it."""
    labelled = {"cpus": 0.5, "labels": {"for": "engine"}}
    async with opened(configuration(tmp_path, "nodes", generation=labelled)) as crew:
        crew._placement._deadline_s = 4
        for incarnation in (1, 2):
            await roll(crew, incarnation, bytes=MIB)
            rows = crew.sample(0, group(3, bytes=MIB))
            ray.wait([rows.reference], timeout=30, fetch_local=False)
            node = await inside(crew, "generation", 0, lambda _: ray.get_runtime_context().get_node_id())
            (lost,) = [other for other in cluster.worker_nodes if other.node_id == node]
            cluster.remove_node(lost, allow_graceful=False)
            assert await death_of(crew) == ("generation", 0, incarnation)
            # Rows that lay on that node are gone with the engine; those in the queue are not.
            with pytest.raises(ActorDied, match="generation 0 died"):
                await crew.put(rows)
            assert (await crew.train(0, [incarnation])).stats == [[incarnation] * 2]
            if incarnation == 1:
                assert await crew.start_engine(0) == 2
        with pytest.raises(
            ClusterError, match=r"'generation-0' got no place in 4 s .* labelled {'for': 'engine'}"
        ):
            await crew.start_engine(0)
        assert "nodes-generation-0" not in placed() and crew._deaths.empty()
