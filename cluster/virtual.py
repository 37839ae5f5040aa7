"""A crew of virtual actors, for a driver on virtual time: `VirtualCrew` draws them from a `Scenario`, in which they may
crash, hang or fail on a seed. Equal weights of its learner mean an equal history, since they are a hash of it.

It checks what no driver may do wherever it sees it, and raises `AssertionError`.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.actors.generation_rows import GroupRequest
from headway.cluster.crew import EngineReport, Fleet, Release, Shortage, Trained
from headway.cluster.elastic import Bundle, fitting, freed, in_the_way
from headway.cluster.queue import Receipt, RolloutQueue
from headway.cluster.scenario import Scenario, seeded
from headway.cluster.virtual_actors import Actor, Engine, Job, Learner, Pending, VirtualRows, digest
from headway.core.config import Config
from headway.core.errors import ActorDied, ClusterError, Lost, StoreFull
from headway.core.metrics import Update
from headway.core.weights import Manifest

if TYPE_CHECKING:
    from headway.learner.stats import StepStats


SCORERS = ("verifiers", "reference", "critic")


class VirtualCrew:
    """A `Crew` of virtual actors, on any event loop. What it saves is real files, of a few bytes a group. One object
    serves all sessions of a run: it can be opened again after it was closed, and incarnations go on. `gpus_of_nodes`: the
    GPUs of each node; none: engines need none."""

    def __init__(self, config: Config, scenario: Scenario, *, gpus_of_nodes: Sequence[float] = ()) -> None:
        self.config = config
        self.scenario = scenario
        self.lags: Counter[int] = Counter()
        """Groups trained, by version lag."""
        self.training_s: list[float] = []
        """Of each optimizer step, those included that were lost again."""
        self.engines: dict[int, Engine] = {}
        self.answers: list[tuple[int, Any]] = []
        self._actors: dict[str, list[Actor]] = {
            role: [Actor(role, replica) for replica in range(number)]
            for role, number in self.replicas.items()
        }
        self._gpus_of_nodes = {str(node): gpus for node, gpus in enumerate(gpus_of_nodes)}
        self.places: dict[int, tuple[str, Bundle]] = {}
        """Node and GPUs of each engine that has some."""
        self._asked: dict[int, float] = {}
        """GPUs that each engine is to have."""
        self._learner = Learner(scenario.seed)
        self._queue = RolloutQueue(_same, _same, _receipt)
        self._deaths: asyncio.Queue[ActorDied] = asyncio.Queue()
        self._opened: float | None = None
        self._full_until = -math.inf
        self._requested = 0

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> dict[str, int]:
        config = self.config
        replicas = {
            "learner": config.learner.replicas,
            "verifiers": config.verifiers.replicas,
            "reference": config.reference.replicas if config.algorithm.needs_reference else 0,
            "critic": config.critic.replicas if config.algorithm.needs_critic else 0,
            "queue": 1,
            "metrics": 1,
            "control": 1,
        }
        return {role: number for role, number in replicas.items() if number}

    @property
    def placement_deadline_s(self) -> float:
        return self.config.cluster.placement_deadline_s

    async def open(self, fleet: Fleet | None = None) -> None:
        await asyncio.sleep(self.scenario.start_s)
        if self._opened is None:
            self._schedule()
        self._deaths = asyncio.Queue()
        for actor in self._all_actors():
            self._bear(actor)
        self._queue = RolloutQueue(_same, _same, _receipt)

    async def close(self) -> None:
        for actor in (*self._all_actors(), *self.engines.values()):
            if actor.alive:
                actor.die()
        self.places.clear()
        self._learner.ready = False
        await asyncio.sleep(0)

    async def next_death(self) -> ActorDied:
        return await self._deaths.get()

    def incarnation(self, role: str, replica: int) -> int:
        if role == "generation":
            return self.engines[replica].incarnation if replica in self.engines else 0
        return self._actors[role][replica].incarnation

    async def replace(self, role: str, replica: int) -> None:
        if role in ("learner", "critic") or (
            role == "reference" and self.config.algorithm.reference_refresh_steps
        ):
            raise Lost(f"{role} {replica} died, and its weights with it")
        assert role in ("verifiers", "reference", "control"), role
        await self._start(self._actors[role][replica])

    def _all_actors(self) -> list[Actor]:
        return [actor for actors in self._actors.values() for actor in actors]

    def _one(self, role: str) -> Actor:
        return self._actors[role][0]

    async def _start(self, actor: Actor) -> None:
        if actor.alive:
            actor.die()
        self._bear(actor)
        await actor.work(self.scenario.start_s)

    async def _every(self, role: str, seconds: float) -> None:
        """A call on all actors of a role. Raises `ActorDied`."""
        first, *others = self._actors[role]
        if not others:
            await first.work(seconds)
        else:
            await asyncio.gather(*(actor.work(seconds) for actor in (first, *others)))

    # ---- what goes wrong -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._opened = loop.time()
        for failure in self.scenario.failures:
            loop.call_at(self._opened + failure.time_s, self._strike, failure.event, failure.replica)
        if rate := self.scenario.rates.get("store_full"):
            self._again("store_full", 0, rate, seeded(self.scenario.seed, "store_full"), strike=False)
        if rate := self.scenario.rates.get("node"):
            nodes = max(self.config.generation.replicas, self.config.generation.max_replicas or 0)
            for node in range(-(-nodes // self.scenario.engines_per_node)):
                self._again("node", node, rate, seeded(self.scenario.seed, "node", node), strike=False)

    def _again(
        self, event: str, replica: int, rate: float, chance: random.Random, *, strike: bool = True
    ) -> None:
        if strike:
            self._strike(event, replica)
        wait = chance.expovariate(rate / 3600)
        asyncio.get_running_loop().call_later(wait, self._again, event, replica, rate, chance)

    def _bear(self, actor: Actor) -> None:
        """A new incarnation, whose failures are drawn at once."""
        actor.born()
        events: tuple[str, ...] = (actor.role,)
        if actor.role == "generation":
            events = ("generation", "stall", "bad_update")
        for event in events:
            if rate := self.scenario.rates.get(event):
                chance = seeded(self.scenario.seed, event, actor.replica, actor.incarnation)
                asyncio.get_running_loop().call_later(
                    chance.expovariate(rate / 3600), self._strike, event, actor.replica, actor.incarnation
                )

    def _strike(self, event: str, replica: int, incarnation: int | None = None) -> None:
        """Lets it happen; an actor that is gone, or no longer this incarnation, is spared."""
        scenario = self.scenario
        if event == "store_full":
            self._full_until = asyncio.get_running_loop().time() + scenario.store_full_s
            return
        if event == "node":
            first = replica * scenario.engines_per_node
            for engine in range(first, first + scenario.engines_per_node):
                self._strike("generation", engine)
            return
        role = "generation" if event in ("stall", "bad_update") else event
        actors = self.engines if role == "generation" else dict(enumerate(self._actors.get(role, ())))
        actor = actors.get(replica)
        if actor is None or not actor.alive or incarnation not in (None, actor.incarnation):
            return
        if event == "stall":
            assert isinstance(actor, Engine)
            actor.stall()
        elif event == "bad_update":
            assert isinstance(actor, Engine)
            actor.bad_update = True
        else:
            death = actor.die()
            asyncio.get_running_loop().call_later(scenario.detect_s, self._deaths.put_nowait, death)

    @property
    def elastic(self) -> tuple[str, ...]:
        return ()

    def backlog(self, role: str) -> int:
        return 0

    async def resize(self, role: str, replicas: int) -> None:
        raise AssertionError(f"virtual {role} are as many as there are")

    # ---- requests from outside -----------------------------------------------------------------------------

    async def next_request(self) -> tuple[int, str, Any]:
        assert self._opened is not None
        control, scaling = self._one("control"), self.scenario.scaling
        if self._requested == len(scaling):
            await control.work(math.inf)
        at, replicas = scaling[self._requested]
        await control.work(self._opened + at - asyncio.get_running_loop().time())
        self._requested += 1
        return self._requested, "scale", ("generation", replicas)

    async def answer(self, ticket: int, value: Any) -> None:
        await self._one("control").work(0)
        self.answers.append((ticket, value))

    # ---- learner -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The learner's."""
        return self._learner.version

    @property
    def trained(self) -> dict[int, int]:
        """group id -> version that the learner's step on it made."""
        return dict(self._learner.trained)

    @property
    def weights(self) -> str:
        """The learner's newest."""
        return self._learner.weights[-1]

    async def start_learner(self) -> None:
        again = self._learner.ready
        self._learner = Learner(self.scenario.seed)
        for actor in (*self._actors["learner"], *self._actors.get("critic", ())):
            if again or not actor.alive:
                if actor.alive:
                    actor.die()
                self._bear(actor)
        await self._every("learner", self.scenario.start_s)
        self._learner.ready = True

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        queue, learner, config = self._one("queue"), self._learner, self.config
        await queue.work(0)
        rows: list[VirtualRows] = await self._queue.take(list(group_ids))
        assert learner.ready, "the learner trains before it has started"
        assert version == learner.version, (
            f"asked to train from {version}, the learner is at {learner.version}"
        )
        assert len(rows) == config.groups_per_batch, (
            f"{len(rows)} groups in a batch of {config.groups_per_batch}"
        )
        stats = []
        for step in range(config.learner.steps_per_batch):
            size = config.learner.groups_per_step
            share = rows[step * size : (step + 1) * size]
            for row in share:
                self._check(row, version + step)
            tokens = sum(sum(row.lengths) for row in share)
            seconds = self.scenario.step_s + self.scenario.token_s * tokens
            await self._every("learner", seconds)
            self.training_s.append(seconds)
            history = ";".join(f"{r.group_id},{r.oldest},{r.newest},{r.lengths}" for r in share)
            learner.weights.append(digest(learner.weights[-1], history))
            for row in share:
                learner.trained[row.group_id] = learner.version
                self.lags[version + step - row.oldest] += 1
            stats.append(_step_stats(self.scenario, self.config, share, learner.version, seconds))
        return Trained(stats=stats, critic_stats=[], columns=None)

    def _check(self, row: VirtualRows, version: int) -> None:
        learner, lag = self._learner, self.config.lag
        assert row.group_id not in learner.trained, f"group {row.group_id} is trained twice"
        assert row.oldest <= row.newest <= version, f"{row} comes from the future of version {version}"
        for sampled, weights in ((row.oldest, row.oldest_weights), (row.newest, row.newest_weights)):
            assert weights == learner.weights[sampled], f"{row}: not this learner's version {sampled}"
        if lag.policy in ("pace", "drop"):
            assert version - row.oldest <= lag.max_version_lag, (
                f"{row} is beyond the bound at version {version}"
            )
        assert version - row.newest <= self.config.max_trained_lag, (
            f"nothing of {row} may be trained at {version}"
        )

    async def publish(self, version: int) -> Release:
        learner = self._learner
        assert learner.ready and version == learner.version, (
            f"version {version}, the learner is at {learner.version}"
        )
        await self._every("learner", self.scenario.publish_s)
        return Release(
            manifest=Manifest(version=version, entries=(), bucket_bytes=()),
            reference=learner.weights[version],
            buckets=(),
        )

    async def refresh_reference(self, release: Release) -> None:
        await self._every("reference", self.scenario.update_s)

    async def save(self, folder: Path) -> None:
        await self._every("learner", self.scenario.checkpoint_s)
        (folder / "learner").mkdir(parents=True, exist_ok=True)
        (folder / "learner" / "state.json").write_text(json.dumps(self._learner.state()), encoding="utf-8")

    async def load(self, folder: Path) -> int:
        await self._every("learner", self.scenario.checkpoint_s)
        self._learner.load(json.loads((folder / "learner" / "state.json").read_text(encoding="utf-8")))
        return self._learner.version

    # ---- engines -------------------------------------------------------------------------------------------

    async def place_engine(self, replica: int, gpus: float) -> Shortage | None:
        self._end(replica)
        if self._asked.get(replica) != gpus:
            self.places.pop(replica, None)
        self._asked[replica] = gpus
        return None if self._take_place(replica) else Shortage(awaited="room", may_grow=False)

    async def start_engine(self, replica: int) -> int:
        scenario, loop = self.scenario, asyncio.get_running_loop()
        slots = self.config.generation.max_concurrent_requests
        engine = self.engines.setdefault(replica, Engine(replica, scenario, slots, self._made))
        self._end(replica)
        end = loop.time() + self.placement_deadline_s
        while not self._take_place(replica):
            if loop.time() >= end:
                room = f"{scenario.engine_places} engines" if not self._gpus_of_nodes else "no more"
                raise ClusterError(f"the cluster has room for {room}")
            await asyncio.sleep(1.0)
        self._bear(engine)
        incarnation = engine.incarnation
        await engine.work(scenario.engine_start_s)
        return incarnation

    def _take_place(self, replica: int) -> bool:
        """Takes one, if there is one and it has none; returns whether it has one."""
        if not self._gpus_of_nodes:
            others = sum(engine.alive for engine in self.engines.values())
            return self.scenario.engine_places is None or others < self.scenario.engine_places
        if replica not in self.places:
            bundle = {"GPU": self._asked.get(replica, self.config.generation.gpus)}
            for node, free in self._free.items():
                if fitting(bundle, {node: free}):
                    self.places[replica] = (node, bundle)
                    break
        return replica in self.places

    @property
    def _free(self) -> dict[str, Bundle]:
        return {
            node: {"GPU": gpus - sum(own["GPU"] for place, own in self.places.values() if place == node)}
            for node, gpus in self._gpus_of_nodes.items()
        }

    async def in_the_way(
        self, replica: int, leaving: Collection[int], others: Sequence[int]
    ) -> list[int] | None:
        if replica in self.places or not self._gpus_of_nodes:
            return []
        return in_the_way({"GPU": self._asked[replica]}, self._free, self.places, leaving, others)

    async def check_fleet(self, fleet: Fleet) -> None:
        free = freed(self._free, self.places)
        if self._gpus_of_nodes and (room := fitting({"GPU": fleet.gpus}, free)) < fleet.replicas:
            raise ClusterError(f"the nodes have room for {room} x {fleet.gpus:g} GPU")

    def _end(self, replica: int) -> None:
        if replica in self.engines and self.engines[replica].alive:
            self.engines[replica].die()

    async def update_engine(self, replica: int, release: Release) -> None:
        engine, version = self.engines[replica], release.manifest.version
        engine.check()
        known = self._learner.weights
        if engine.version is not None and known[engine.version : engine.version + 1] == [engine.weights]:
            assert version >= engine.version, (
                f"engine {replica} would go back from {engine.version} to {version}"
            )
        await engine.update(version, release.reference)

    async def report(self, replica: int) -> EngineReport:
        engine = self.engines[replica]
        await engine.work(math.inf if engine.stalled else 0)
        usage = engine.kv_cache_usage
        engine.preemptions += usage > 1
        tokens, engine.reported_tokens = engine.tokens - engine.reported_tokens, engine.tokens
        return EngineReport(
            kv_cache_usage=min(1.0, usage),
            preemptions=engine.preemptions,
            updates=[("headway_generation_tokens_total", "", tokens)],
        )

    async def hand_back(self, replica: int) -> None:
        engine = self.engines[replica]
        await engine.work(math.inf if engine.stalled else 0)
        engine.hand_back()

    async def stop_engine(self, replica: int) -> None:
        await asyncio.sleep(0)
        self._end(replica)
        self.places.pop(replica, None)

    # ---- groups --------------------------------------------------------------------------------------------

    def sample(self, replica: int, request: GroupRequest, kept: Any = None) -> Pending:
        engine, pending = self.engines[replica], Pending()
        if not engine.alive:
            pending.end(error=engine.death("it is dead"))
            return pending
        assert not engine.leaving, f"engine {replica} is to sample after it handed its groups back"
        lengths = self.scenario.draw_lengths(
            request.group_id,
            request.prompt.prompt_id,
            request.group_size * max(1, len(request.environment.agents)),
            request.max_new_tokens,
        )
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        job = Job(request, pending, lengths, deadline)
        if kept is not None:
            assert (kept.group_id, kept.lengths) == (request.group_id, lengths), (kept, request.group_id)
            job.kept = kept
        engine.add(job)
        return pending

    async def take_back(self, replica: int, group_id: int) -> Any:
        engine = self.engines[replica]
        await engine.work(0)
        return engine.handed_back.pop(group_id, None)

    def _made(self, engine: Engine, job: Job) -> None:
        """An engine has finished a group."""
        request, scenario, pending = job.request, self.scenario, job.pending
        assert engine.version is not None and job.oldest is not None
        newest, newest_weights = engine.version, engine.weights
        if job.kept is not None and job.kept.newest > newest:
            newest, newest_weights = job.kept.newest, job.kept.newest_weights
        rows = VirtualRows(
            group_id=request.group_id,
            prompt_id=request.prompt.prompt_id,
            lengths=job.lengths,
            rewards=scenario.draw_rewards(request.group_id, job.lengths),
            oldest=job.oldest,
            newest=newest,
            oldest_weights=job.oldest_weights,
            newest_weights=newest_weights,
            num_bytes=sum(job.lengths) * 33 + len(job.lengths) * (scenario.prompt_tokens * 4 + 1024),
        )
        pending.end(rows=rows)

    def _scorers(self, group_id: int) -> list[Actor]:
        roles = [role for role in SCORERS if role in self._actors]
        return [self._actors[role][group_id % len(self._actors[role])] for role in roles]

    async def sampled(self, rows: Pending) -> None:
        await rows.get()

    async def put(self, rows: Pending) -> Receipt:
        made = await rows.get()
        scorers = self._scorers(made.group_id)
        for scorer in scorers:
            await scorer.work(self.scenario.score_s / len(scorers))
        self._one("queue").check()
        if asyncio.get_running_loop().time() < self._full_until:
            raise StoreFull("the virtual object store is full")
        return await self._queue.put(made)

    # ---- queue and metrics ---------------------------------------------------------------------------------

    async def start_queue(self) -> None:
        self._queue = RolloutQueue(_same, _same, _receipt)
        await self._start(self._one("queue"))

    async def restore_queue(self, file: Path, only: Collection[int] | None = None) -> list[Receipt]:
        await self._one("queue").work(0)
        rows = [_rows_from(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        return [await self._queue.put(row) for row in rows if only is None or row.group_id in only]

    async def save_queue(self, file: Path) -> None:
        await self._one("queue").work(0)
        _write_rows(await self._queue.take(await self._queue.held()), file)

    async def release(self, group_ids: Sequence[int]) -> None:
        await self._one("queue").work(0)
        await self._queue.release(list(group_ids))

    async def refuse(self, group_id: int) -> None:
        await self._one("queue").work(0)
        await self._queue.refuse(group_id)

    async def write_batch(self, group_ids: Sequence[int], file: Path, version: int, columns: Any) -> None:
        await self._one("queue").work(0)
        _write_rows(await self._queue.take(list(group_ids)), file)

    async def serve_metrics(self, again_at: int | None) -> int:
        actor = self._one("metrics")
        if not actor.alive:
            await self._start(actor)
        await actor.work(0)
        return self.config.metrics.port

    async def show_metrics(self, state: dict[str, Any]) -> None:
        await self._one("metrics").work(0)

    async def scorer_updates(self) -> list[Update]:
        return []


def _same(rows: VirtualRows) -> VirtualRows:
    return rows


def _receipt(rows: VirtualRows) -> Receipt:
    return Receipt(
        group_id=rows.group_id,
        num_bytes=rows.num_bytes,
        oldest_version=rows.oldest,
        newest_version=rows.newest,
        rewards=rows.rewards,
        response_lengths=rows.lengths,
        equal_reward=rows.rewards[0] if len(set(rows.rewards)) == 1 else None,
    )


def _write_rows(rows: Sequence[VirtualRows], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def _rows_from(record: dict[str, Any]) -> VirtualRows:
    return VirtualRows(**{**record, "lengths": tuple(record["lengths"]), "rewards": tuple(record["rewards"])})


def _step_stats(
    scenario: Scenario, config: Config, rows: Sequence[VirtualRows], version: int, seconds: float
) -> StepStats:
    """What a real learner would report, as far as the driver looks at it. The importance weights are one a group."""
    import numpy as np

    from headway.learner.stats import StepStats

    lags = [version - 1 - row.oldest for row in rows]
    ess = math.exp(-scenario.ess_decay * sum(lags) / len(lags))
    rewards = [reward for row in rows for reward in row.rewards]
    lengths = [length for row in rows for length in row.lengths]
    spread = math.sqrt(-math.log(ess))  # log-normal weights of mean 1 have the ESS fraction exp(-spread^2)
    chance = seeded(scenario.seed, "weights", version)
    weights = [math.exp(spread * chance.gauss(0, 1) - spread**2 / 2) for _ in rows]
    return StepStats(
        version=version,
        loss=0.0,
        grad_norm=1.0,
        learning_rate=config.learner.learning_rate,
        ess_lr_scale=1.0,
        reward_mean=sum(rewards) / len(rewards),
        rewards=rewards,
        num_tokens=sum(lengths),
        response_lengths=lengths,
        truncated_fraction=sum(n == config.sampling.max_new_tokens for n in lengths) / len(lengths),
        no_signal_groups=sum(len(set(row.rewards)) == 1 for row in rows),
        num_unscored=0,
        ess_fraction=ess,
        correction_ess_fraction=ess,
        importance_weights=np.array(weights, dtype=np.float32),
        by_lag={},
        counterfactuals={},
        behavior_kl=spread**2 / 2,
        engine_learner_kl=None,
        kl_reference=None,
        kl_coef=None,
        clipped_fraction=0.0,
        masked_fraction={},
        rejected_responses={},
        entropy=1.0,
        sft_loss=None,
        stopped_by_kl=False,
        trust_region=None,
        seconds={"unpack": 0.0, "forward_backward": seconds, "optimizer": 0.0},
    )
