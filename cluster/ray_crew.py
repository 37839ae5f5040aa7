"""A run's actors on Ray. What goes wrong with them leaves this module as one of the typed errors, and every `ActorDied`
that a call raises is also reported by `next_death`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from headway.actors.critic import CriticActor
from headway.actors.generation import GenerationActor
from headway.actors.generation_rows import GroupRequest
from headway.actors.judge import JudgeActor
from headway.actors.policy import PolicyActor
from headway.actors.reference import ReferenceActor
from headway.actors.reward_model import RewardModelActor
from headway.actors.verifier import VerifierWorker
from headway.cluster.control import CLUSTER_FILE, Mailbox
from headway.cluster.crew import EngineReport, Fleet, Release, Shortage, Trained
from headway.cluster.exporter import Exporter
from headway.cluster.joining import CONTROL, namespace
from headway.cluster.members import Member, Members
from headway.cluster.placement import POLL_S, Placement, store_table
from headway.cluster.queue import Receipt, RolloutQueue
from headway.cluster.room import check_store, needs
from headway.cluster.traces import traced
from headway.core.config import Config
from headway.core.errors import ActorDied, ClusterError, Lost, RolloutFailed, StoreFull
from headway.core.metrics import SCORERS, Recorder, Update
from headway.core.prompts import Prompt
from headway.core.sections import Generation

ROLES: Mapping[str, type] = {
    "learner": PolicyActor,
    "generation": GenerationActor,
    "verifiers": VerifierWorker,
    "judge": JudgeActor,
    "reward_model": RewardModelActor,
    "reference": ReferenceActor,
    "critic": CriticActor,
    "queue": RolloutQueue,
    "metrics": Exporter,
    CONTROL: Mailbox,
}
"""The plain class behind each role."""

JUDGING = {"verifiers", "judge", "reward_model"}
"""Scorers that give rewards: they see the prompt, and have metrics of their own."""
DRAIN_S = 30.0
"""For a scorer that leaves, to end the groups that it has."""
REBIND_DEADLINE_S = 5.0
"""For the port of a metrics actor that died to be free again."""
QUESTION_S = 30.0
"""Longest wait of one question to the mailbox."""
NAME_DEADLINE_S = 10.0
"""For the name of a run whose driver was killed to be free again."""
MANY_CALLS = 10_000
SCORED_TOGETHER = 32
"""Groups at most in one pass of a scorer."""


@dataclass(slots=True, eq=False)
class _Stage:
    """A scorer's work on a group."""

    scorer: Member
    reference: Any
    """The rows with its columns, until the next scorer has seen them;"""
    sign: Any
    """the sign that they are there."""
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Rows:
    """What `sample` gives. Rows themselves never come here: what is awaited is the sign that they are there."""

    engine: Member
    request: GroupRequest
    reference: Any
    sign: Any
    stages: list[_Stage] = field(default_factory=list)
    """The scorers' work, once it is under way; none of it when it has to be done again."""


class RayCrew(Members):
    """Implements `Crew` on the Ray that this process is connected to. `folder` is the run's; `roles` says which class
    plays which role; `known`: prompts with whose golds a judge is tried."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        model_folder: str,
        roles: Mapping[str, type] = ROLES,
        known: Sequence[Prompt] = (),
    ) -> None:
        super().__init__(folder / "logs")
        self._config = config
        self._folder = folder
        self._model_folder = model_folder
        self._roles = roles
        self._known = tuple(known)
        self._placement = Placement(config, folder)
        self._requests: deque[tuple[int, str, Any]] = deque()
        self._targets = folder.with_name(f"{folder.name}.targets.json")
        """Where the endpoint is, for Prometheus, which reads all such files of a folder."""
        self._num_buckets = 0
        self._is_announced = False
        groups = {need.role: need.replicas for need in needs(config)}
        self._scorers = {role: groups[role] for role in SCORERS if role in groups}
        """Replicas by role, in the order in which they see a group."""
        self._recorder = Recorder()
        self._at: Counter[str] = Counter()
        """Groups at each scorer now."""
        self._changing = {"critic"} & self._scorers.keys()
        """Scorers whose weights change during the run; the replicas of a role hold the same."""
        if "reference" in self._scorers and config.algorithm.reference_refresh_steps:
            self._changing.add("reference")

    # ---- life and death ------------------------------------------------------------------------------------

    @property
    def placement_deadline_s(self) -> float:
        return self._placement.deadline_s

    async def open(self, fleet: Fleet | None = None) -> None:
        if fleet is not None:
            self._placement.expect(fleet)
        await self._take_name()
        await self._placement.reserve()
        weight_nodes = await self._placement.nodes("learner")
        await asyncio.to_thread(check_store, self._config, self._model_folder, weight_nodes)
        if self._config.stage == "rl":
            self._create("queue", 0)
        for rank in range(self._config.learner.replicas):
            self._create("learner", rank)
        for role, replicas in self._scorers.items():
            for replica in range(replicas):
                self._create(role, replica)
        where = {
            "address": ray.get_runtime_context().gcs_address,
            "namespace": namespace(self._config.run.name),
            "pid": os.getpid(),
        }
        self._is_announced = True
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / CLUSTER_FILE).write_text(json.dumps(where), encoding="utf-8")

    async def _take_name(self) -> None:
        """Starts the mailbox, of which there is one per run's name on a cluster. One whose driver was killed just now
        may still be there for a moment."""
        try:
            async with asyncio.timeout(NAME_DEADLINE_S):
                while True:
                    with suppress(ActorAlreadyExistsError):
                        self._create(CONTROL, 0)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ClusterError(
                f"a run named {self._config.run.name!r} is on this cluster already; give this one another run.name"
            ) from None

    async def close(self) -> None:
        members = list(self._members.values())
        self._members.clear()
        if self._is_announced:
            (self._folder / CLUSTER_FILE).unlink(missing_ok=True)
            self._targets.unlink(missing_ok=True)
        try:
            await self._end(members)
        finally:
            self._placement.close()

    async def replace(self, role: str, replica: int) -> None:
        if role == "learner" or role in self._changing:
            raise Lost(f"the weights of {role} {replica} died with it")
        await self._end_present(role, replica)
        if role not in self._scorers or replica < self._scorers[role]:
            await self._able(self._create(role, replica))

    async def _able(self, scorer: Member) -> None:
        """Returns once it can score."""
        if scorer.role == "judge":
            await self._ask(scorer, "start", self._known)
        else:
            await self._ready(scorer)

    @property
    def elastic(self) -> tuple[str, ...]:
        return tuple(role for role in self._scorers if role not in self._changing)

    def backlog(self, role: str) -> int:
        return self._at[role]

    async def resize(self, role: str, replicas: int) -> None:
        present = self._scorers[role]
        try:
            for replica in range(present, replicas):
                await self._placement.ask_one(role, replica)
            for replica in range(present, replicas):
                await self._placement.reserve_one(role, replica)
            await asyncio.gather(
                *(self._able(self._create(role, replica)) for replica in range(present, replicas))
            )
        except BaseException:
            for replica in range(present, replicas):
                await self._leave(role, replica)
            raise
        self._scorers[role] = replicas  # new groups go by this from here on
        for replica in range(replicas, present):
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    while self._present(role, replica).groups:
                        await asyncio.sleep(POLL_S)
            await self._leave(role, replica)

    async def _leave(self, role: str, replica: int) -> None:
        try:
            await self._end_present(role, replica)
        finally:
            self._placement.release_one(role, replica)

    @property
    def replicas(self) -> dict[str, int]:
        single = {**({"queue": 1} if self._config.stage == "rl" else {}), "metrics": 1, CONTROL: 1}
        return {"learner": self._config.learner.replicas, **self._scorers, **single}

    def _create(self, role: str, replica: int) -> Member:
        """A new actor in an empty place."""
        config = self._config
        concurrency, args = 1, ()
        match role:
            case "learner":
                args = (config, self._model_folder, str(self._folder))
            case "reference" | "critic":
                concurrency, args = SCORED_TOGETHER, (config, self._model_folder)
            case "generation":
                own = _with_gpus(config, self._placement.gpus_of(role, replica))
                concurrency, args = MANY_CALLS, (own, self._model_folder, replica)
            case "judge":
                concurrency, args = MANY_CALLS, (config, replica)
            case "verifiers":
                concurrency = config.verifiers.processes + 4
                args = (config.verifiers, bool(self._scorers.keys() & JUDGING - {"verifiers"}))
            case "reward_model":
                concurrency, args = SCORED_TOGETHER, (config,)
            case "queue":
                concurrency, args = MANY_CALLS, (store_table, ray.get)
            case "metrics":
                concurrency = 4
            case _:
                concurrency = MANY_CALLS
        handle = self._placement.spawn(self._roles[role], role, replica, concurrency, args)
        return self._enter(role, replica, handle)

    # ---- requests from outside -----------------------------------------------------------------------------

    async def next_request(self) -> tuple[int, str, Any]:
        while not self._requests:
            self._requests += await self._ask(self._present(CONTROL), "take", QUESTION_S)
        return self._requests.popleft()

    async def answer(self, ticket: int, value: Any) -> None:
        await self._ask(self._present(CONTROL), "answer", ticket, value)

    # ---- learner, and the scorers whose weights change -----------------------------------------------------

    @property
    def _ranks(self) -> list[Member]:
        return [self._present("learner", rank) for rank in range(self._config.learner.replicas)]

    def _replicas_of(self, role: str) -> list[Member]:
        return [self._present(role, replica) for replica in range(self._scorers[role])]

    async def start_learner(self) -> None:
        ranks = self._ranks
        address = await self._ask(ranks[0], "address")
        deadline_s = self._config.learner.step_deadline_s
        starts = [
            self._ask(member, "start", rank, len(ranks), address, deadline_s)
            for rank, member in enumerate(ranks)
        ]
        scorers = [self._able(member) for role in self._scorers for member in self._replicas_of(role)]
        self._num_buckets, *_ = await asyncio.gather(*starts, *scorers)

    async def ask_learner(self, method: str, *args: Any) -> Any:
        """What rank 0 answers; all ranks are asked."""
        first, *_ = await self._ask_all(self._ranks, method, *args)
        return first

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        rows = await self._ask(self._present("queue"), "take", list(group_ids))
        ranks = self._ranks
        calls = [member.handle.train.options(num_returns=2).remote(version, *rows) for member in ranks]
        ends = [self._result(stats, member) for (stats, _), member in zip(calls, ranks, strict=True)]
        if "critic" in self._scorers:
            # Its targets may need the learner's log-probabilities, for which Ray then lets it wait.
            late = self._config.critic.targets == "vtrace"
            learned = {"columns": calls[0][1]} if late else {}
            ends += [
                self._result(member.handle.train.remote(version, *rows, **learned), member)
                for member in self._replicas_of("critic")
            ]
        stats, *others = await asyncio.gather(*ends)
        critic_stats = others[-1] if "critic" in self._scorers else []
        return Trained(stats=stats, critic_stats=critic_stats, columns=calls[0][1])

    async def publish(self, version: int) -> Release:
        ranks = self._ranks
        calls = [
            member.handle.publish.options(num_returns=1 + self._num_buckets).remote(version)
            for member in ranks
        ]
        # This process owns what they return, so a version stays whole for as long as its release is kept here.
        manifests = await asyncio.gather(
            *(self._result(call[0], member) for call, member in zip(calls, ranks, strict=True))
        )
        reference, *buckets = calls[0]
        return Release(manifest=manifests[0], reference=reference, buckets=tuple(buckets))

    async def refresh_reference(self, release: Release) -> None:
        weights = (release.reference, *release.buckets)
        await self._ask_all(self._replicas_of("reference"), "update_weights", *weights)

    async def save(self, folder: Path) -> None:
        for role in ("learner", *self._changing):
            (folder / role).mkdir(parents=True, exist_ok=True)
        await self._ask_all(self._ranks, "save", str(folder / "learner"))
        for role in self._changing:
            await self._ask(self._present(role), "save", str(folder / role))

    async def load(self, folder: Path) -> int:
        version, *_ = await self._ask_all(self._ranks, "load", str(folder / "learner"))
        for role in self._changing:
            await self._ask_all(self._replicas_of(role), "load", str(folder / role))
        return version

    # ---- engines -------------------------------------------------------------------------------------------

    async def place_engine(self, replica: int, gpus: float) -> Shortage | None:
        await self._end_present("generation", replica)
        return await self._placement.ask_one("generation", replica, gpus)

    async def in_the_way(
        self, replica: int, leaving: Collection[int], others: Sequence[int]
    ) -> list[int] | None:
        return await self._placement.in_the_way(replica, leaving, others)

    async def check_fleet(self, fleet: Fleet) -> None:
        _check_divides(Path(self._model_folder), fleet.gpus)
        await self._placement.check_fleet(fleet)

    async def start_engine(self, replica: int) -> int:
        await self._end_present("generation", replica)
        await self._placement.reserve_one("generation", replica)
        member = self._create("generation", replica)
        await self._ask(member, "start")
        return member.incarnation

    async def update_engine(self, replica: int, release: Release) -> None:
        engine = self._present("generation", replica)
        await self._ask(engine, "update_weights", release.reference, *release.buckets)

    async def report(self, replica: int) -> EngineReport:
        usage, preemptions, updates = await self._ask(self._present("generation", replica), "report")
        return EngineReport(kv_cache_usage=usage, preemptions=preemptions, updates=updates)

    async def hand_back(self, replica: int) -> None:
        await self._ask(self._present("generation", replica), "hand_back")

    async def stop_engine(self, replica: int) -> None:
        await self._leave("generation", replica)

    # ---- groups --------------------------------------------------------------------------------------------

    def sample(self, replica: int, request: GroupRequest, kept: Any = None) -> _Rows:
        engine = self._present("generation", replica)
        call = engine.handle.signalled.options(num_returns=2)
        return _Rows(engine, request, *call.remote("generate", request, kept))

    def _score(self, rows: _Rows) -> list[_Stage]:
        """Through the scorers that live now: one that died while the group was sampled has not touched it."""
        stages: list[_Stage] = []
        scored = rows.reference
        for role, replicas in self._scorers.items():
            scorer = self._present(role, rows.request.group_id % replicas)
            prompt = (rows.request.prompt,) if role in JUDGING else ()
            call = scorer.handle.signalled.options(num_returns=2)
            scored, sign = call.remote("score", scored, *prompt)
            stages.append(_Stage(scorer, scored, sign))
        return stages

    async def _scored(self, rows: _Rows) -> Any:
        """Reference to the rows, once every scorer has seen them."""
        rows.stages = rows.stages or self._score(rows)
        group_id, left = rows.request.group_id, [stage for stage in rows.stages if not stage.is_done]
        for stage in left:
            stage.scorer.groups.add(group_id)
        try:
            for before, stage in zip([None, *left], left, strict=False):
                role, began = stage.scorer.role, time.monotonic()
                self._at[role] += 1
                try:
                    with traced(role, replica=stage.scorer.replica):
                        await self._result(stage.sign, stage.scorer)
                finally:
                    self._at[role] -= 1
                stage.is_done = True
                stage.scorer.groups.discard(group_id)
                if before is not None:
                    before.reference = None  # nobody reads those rows again
                self._recorder.observe("headway_scoring_seconds", [time.monotonic() - began], label=role)
        finally:
            for stage in left:
                stage.scorer.groups.discard(group_id)
        return rows.stages[-1].reference

    async def take_back(self, replica: int, group_id: int) -> Any:
        engine = self._present("generation", replica)
        reference = engine.handle.take_back.remote(group_id)
        await self._result(reference, engine)
        return reference

    async def sampled(self, rows: _Rows) -> None:
        try:
            await self._result(rows.sign, rows.engine)
        except StoreFull as full:  # these rows have no place anywhere
            raise RolloutFailed("store_full", str(full)) from full

    async def put(self, rows: _Rows) -> Receipt:
        await self.sampled(rows)
        queue = self._present("queue")
        while True:
            try:
                return await self._result(queue.handle.put.remote(await self._scored(rows)), rows.engine)
            except ActorDied as death:
                if death.role not in self._scorers:
                    raise
                rows.stages = []
                if death.replica < self._scorers[death.role]:
                    raise
                # It has left: others score what it had.
            except StoreFull:  # the queue's, or a scorer's: what it made is an error from now on
                rows.stages = []
                raise

    # ---- queue ---------------------------------------------------------------------------------------------

    async def start_queue(self) -> None:
        await self._end_present("queue", 0)
        await self._ready(self._create("queue", 0))

    async def restore_queue(self, file: Path, only: Collection[int] | None = None) -> list[Receipt]:
        return await self._ask(self._present("queue"), "restore", str(file), only)

    async def save_queue(self, file: Path) -> None:
        await self._ask(self._present("queue"), "save", str(file))

    async def release(self, group_ids: Sequence[int]) -> None:
        await self._ask(self._present("queue"), "release", list(group_ids))

    async def refuse(self, group_id: int) -> None:
        await self._ask(self._present("queue"), "refuse", group_id)

    async def write_batch(self, group_ids: Sequence[int], file: Path, version: int, columns: Any) -> None:
        await self._ask(self._present("queue"), "write_batch", list(group_ids), str(file), version, columns)

    # ---- metrics -------------------------------------------------------------------------------------------

    async def serve_metrics(self, again_at: int | None) -> int:
        await self._end_present("metrics", 0)
        metrics = self._config.metrics
        port, wait_s = (metrics.port, 0.0) if again_at is None else (again_at, REBIND_DEADLINE_S)
        port = await self._ask(self._create("metrics", 0), "serve", metrics.host, port, wait_s)
        is_own = self._config.cluster.address == "local" or metrics.host in ("localhost", "127.0.0.1")
        host = "localhost" if is_own else ray.util.get_node_ip_address()
        found = [{"targets": [f"{host}:{port}"], "labels": {"run": self._config.run.name}}]
        draft = self._targets.with_suffix(".partial")
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.replace(self._targets)
        return port

    async def show_metrics(self, state: dict[str, Any]) -> None:
        await self._ask(self._present("metrics"), "restore", state)

    async def scorer_updates(self) -> list[Update]:
        updates: list[Update] = self._recorder.drain()
        judging = [role for role in self._scorers if role in JUDGING]
        calls = [self._ask(member, "drain_updates") for role in judging for member in self._replicas_of(role)]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, list):
                updates += result
            elif not isinstance(
                result, ActorDied
            ):  # whose death is reported; what the others gave is not lost
                raise result
        return updates


def _with_gpus(config: Config, gpus: float) -> Config:
    """The configuration of an engine with this many GPUs. Of a part of a GPU it takes the part that it would take of a whole
    one, so that engines of other sizes than the configured one can share it."""
    own, usual = config.generation, Generation().gpu_memory_utilization
    if gpus == own.gpus:
        return config
    memory = own.gpu_memory_utilization * min(1.0, gpus) / (min(1.0, own.gpus) or 1.0)
    changes = {"gpus": gpus, "gpu_memory_utilization": min(memory, max(own.gpu_memory_utilization, usual))}
    return config.model_copy(update={"generation": own.model_copy(update=changes)})


def _check_divides(model_folder: Path, gpus: float) -> None:
    """Raises `ClusterError` when as many GPUs cannot share the model's attention heads (vLLM's tensor parallelism)."""
    try:
        model = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return
    model = model.get("text_config", model)
    heads, size = model.get("num_attention_heads", 0), max(1, int(gpus))
    shared = model.get("num_key_value_heads") or heads
    if heads % size or (shared % size and size % shared):
        raise ClusterError(
            f"{gpus:g} GPUs cannot share this model: it has {heads} attention heads and {shared} for keys and values"
        )
