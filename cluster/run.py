"""The driver of a run: four loops around one learner.

    dispatch   prompt ─► engine ─► scorers ─► queue     (references only; tokens never come here)
    learn      cut a batch ─► train ─► publish
    keep       one loop per engine: pull the newest version; replace the engine when it dies
    heartbeat  collect metrics, write them out, watch for progress

They meet in this object's state and wake each other through `Waits`. `lag.max_version_lag = 0` is synchronous
training through the same code.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from headway.actors.generation import GroupRequest
from headway.cluster.groups import Groups
from headway.cluster.learners import LearnerGroup
from headway.cluster.placement import Placement
from headway.cluster.progress import Progress
from headway.cluster.queue import Receipt
from headway.cluster.record import observe_critic, observe_step
from headway.cluster.scorers import Scorers, died
from headway.cluster.state import Engine, Group, Release
from headway.cluster.watch import Waits
from headway.core.config import Config, dump_config
from headway.core.errors import (
    EngineDead,
    HeadwayError,
    NoSignal,
    RolloutFailed,
    Starved,
    WeightUpdateFailed,
)
from headway.core.metrics import Recorder
from headway.core.prompts import Prompt, PromptStream
from headway.learner import checkpoint

MAX_ATTEMPTS = 3
CALL_DEADLINE_S = 60.0
CHECKPOINT_DEADLINE_S = 600.0
GRACE_S = 30.0  # what a call may take beyond the deadline that its actor keeps


@dataclass(kw_only=True)
class Run:
    """A training run on a connected Ray cluster. `execute` runs it to its end or to `request_stop`."""

    config: Config
    model_folder: Path
    prompts: PromptStream
    longest_prompt: int
    """Tokens."""
    progress: Progress
    resume_from: Path | None = None
    version: int = 0
    stopping: bool = False
    waits: Waits = field(default_factory=Waits)

    async def execute(self) -> None:
        """Trains. Raises `Starved` when nothing moves for the no-progress deadline."""
        self.recorder = Recorder()
        self.folder = self.config.run_folder.resolve()
        self.started = self.last_progress = time.monotonic()
        self.release: Release | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.no_signal: NoSignal | None = None
        self.placement = Placement(self.config, self.folder)
        try:
            try:
                await self._start()
            except RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise HeadwayError(f"an actor did not start: {reason}; see {self.folder / 'logs'}") from error
            self.last_progress = time.monotonic()
            async with asyncio.TaskGroup() as self.loops:
                for loop in (self.dispatch(), self.heartbeat(), *map(self.keep, self.engines)):
                    self._spawn(loop)
                await self.learn()
                for task in self.tasks:
                    task.cancel()
            await self._collect_metrics()
            if self.no_signal:
                raise self.no_signal
        except* RayError as errors:
            reason = str(errors.exceptions[0]).strip().splitlines()[-1]
            raise HeadwayError(
                f"an actor that this run cannot replace failed: {reason}; see {self.folder / 'logs'}, go on with --resume"
            ) from errors
        finally:
            await self._close()

    def request_stop(self) -> None:
        """Ends the run after the optimizer step in progress, with a checkpoint."""
        self.stopping = True
        self.waits.changed()

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> None:
        """Runs beside the learner; its failure ends the run, its task ends with it."""
        task = self.loops.create_task(loop)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # ---- start and end -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config, place = self.config, self.placement
        self.progress.say("placing groups")
        await asyncio.to_thread(place.reserve)
        self.exporter, self.queue = place.exporter(), place.queue()
        self.port = await self.call(
            self.exporter.serve.remote(config.metrics.host, config.metrics.port), "metrics"
        )
        self.progress.endpoint(self.port, config.metrics.port)
        _write_text(self.folder / "metrics_port", str(self.port))
        ranks = place.learners(str(self.model_folder))
        self.learner = LearnerGroup(ranks, self.call, config.learner.step_deadline_s)
        self.scorers = Scorers(config, place, str(self.model_folder), self.recorder, self.progress.say)
        self.engines = [
            Engine(replica=replica, actor=place.engine(replica, str(self.model_folder)))
            for replica in range(config.generation.replicas)
        ]
        self.progress.say("starting engines and learner")
        starting = [asyncio.ensure_future(_as_future(engine.actor.start.remote())) for engine in self.engines]
        await self.learner.start(config.generation.start_deadline_s)
        await self._load_state()
        await self.publish()
        for engine, start in zip(self.engines, starting, strict=True):
            await self.waits.within(
                start,
                who="driver",
                what=f"engine {engine.replica} to start",
                deadline_s=config.generation.start_deadline_s,
            )
        self.recorder.set("headway_max_version_lag_steps", config.lag.max_version_lag)

    async def _load_state(self) -> None:
        journal, checkpoint = self.folder / "ledger.jsonl", self.resume_from
        if checkpoint is None:
            self.groups = Groups.new(self.config, self.longest_prompt, journal, self.recorder)
            return
        state = json.loads((checkpoint / "state.json").read_text())
        self.version = await self.learner.load(str(checkpoint / "learner"), CHECKPOINT_DEADLINE_S)
        if self.version != state["version"]:
            raise HeadwayError(f"checkpoint {checkpoint}: learner {self.version}, driver {state['version']}")
        for role, actors in self.scorers.changing.items():
            for actor in actors:
                await self.call(actor.load.remote(str(checkpoint / role)), role, CHECKPOINT_DEADLINE_S)
        receipts: list[Receipt] = await self.call(
            self.queue.restore.remote(str(checkpoint / "queue.parquet")), "queue"
        )
        await self.call(self.exporter.restore.remote(state["metrics"]), "metrics")
        self.groups, unknown = Groups.resume(
            self.config,
            self.longest_prompt,
            journal,
            self.recorder,
            state=state,
            version=self.version,
            receipts=receipts,
        )
        await self.call(self.queue.release.remote(unknown), "queue")
        self.progress.say(
            f"resumed at version {self.version}: {len(self.groups.live)} groups in the queue, "
            f"{len(self.groups.reissue)} issued again"
        )

    async def _close(self) -> None:
        if hasattr(self, "groups"):
            self.groups.ledger.close()
        ends = [engine.actor.shutdown.remote() for engine in getattr(self, "engines", [])]
        if hasattr(self, "scorers"):
            ends += self.scorers.close()
        if ends:
            await asyncio.to_thread(ray.wait, ends, num_returns=len(ends), timeout=10)
        await asyncio.to_thread(self.placement.close)

    async def call(self, reference: Any, what: str, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Result of an actor call. Raises `Starved` after `deadline_s`."""
        return await self.waits.within(_as_future(reference), who="driver", what=what, deadline_s=deadline_s)

    # ---- dispatch: prompt -> engine -> verifier -> queue ---------------------------------------------------

    async def dispatch(self) -> None:
        """Starts groups as room appears. Waits for: gate, room and engine. Unblocked by: every finished group,
        trained step and weight update."""
        while True:
            waited = time.monotonic()
            books = self.groups
            stage = "gate" if books.room.admits(books.gate.running) else "queue_full"
            try:
                engine = await self.waits.until(
                    self._free_engine,
                    who="dispatcher",
                    what="room under the version-lag bound, in the queue, and on an engine",
                    deadline_s=self.config.run.no_progress_deadline_s,
                )
            except Starved:
                continue  # whether that is a fault is for the progress deadline to say
            self.recorder.observe("headway_wait_seconds", [time.monotonic() - waited], label=stage)
            assert engine.version is not None
            group = books.issue(engine.version)
            engine.running += 1
            self.recorder.observe("headway_publish_lag_steps", [self.version - engine.version])
            self._spawn(self._roll(group, engine))

    def _free_engine(self) -> Engine | None:
        """The least loaded engine whose version leaves room for one more group."""
        gate = self.groups.gate
        if self.stopping or not self.groups.room.admits(gate.running):
            return None
        return self._least_loaded(lambda version: gate.capacity(version) > 0)

    def _least_loaded(self, admits: Any) -> Engine | None:
        limit = self.config.max_groups_running // len(self.engines)
        free = [
            engine
            for engine in self.engines
            if engine.version is not None and engine.running < limit and admits(engine.version)
        ]
        return min(free, key=lambda engine: (engine.running, engine.replica), default=None)

    async def _roll(self, group: Group, engine: Engine) -> None:
        """One group from prompt to queue; issued again when an actor dies under it. The engine already counts it."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._roll_once(group, engine)
                return
            except RolloutFailed as failure:
                self._drop(group, failure.reason if failure.reason == "straggler" else "generation_failed")
                self.progress.say(f"group {group.group_id} dropped: {failure}")
                return
            except Starved as failure:
                self._drop(group, "straggler")
                self.progress.say(f"group {group.group_id} dropped: {failure}")
                return
            except (RayActorError, EngineDead) as failure:
                self.progress.say(
                    f"group {group.group_id} is issued again (attempt {attempt}): {type(failure).__name__}"
                )
                if isinstance(failure, EngineDead) or died(failure, engine.actor):
                    engine.version = None  # its keeper replaces it
                else:
                    self.scorers.replace_dead(failure)
                engine = await self.waits.until(
                    lambda: self._least_loaded(lambda version: version >= group.since_version),
                    who=f"group {group.group_id}",
                    what="an engine to be issued to again",
                    deadline_s=self.config.run.no_progress_deadline_s,
                )
                engine.running += 1
        engine.running -= 1
        self._drop(group, "generation_failed")

    async def _roll_once(self, group: Group, engine: Engine) -> None:
        prompt = self.prompts.at(group.group_id)
        try:
            table = engine.actor.generate.remote(group_request(self.config, group.group_id, prompt))
            scored = self.scorers.score(table, prompt, group.group_id)
            receipt: Receipt = await self.waits.within(
                _as_future(self.queue.put.remote(scored)),
                who=f"group {group.group_id}",
                what=f"engine {engine.replica}, its scorers and the queue",
                deadline_s=self.config.lag.straggler_deadline_s + GRACE_S,
            )
        finally:
            engine.running -= 1
            self.waits.changed()
        if group.group_id not in self.groups.live:
            return  # dropped meanwhile; the queue knows
        if (reason := self.groups.finish(group, receipt, self.version)) is not None:
            self._drop(group, reason)
            if self.no_signal is None and (fault := self.groups.no_signal(self.version)):
                self.no_signal = fault
                self.request_stop()
        self.waits.changed()

    def _drop(self, group: Group, reason: str) -> None:
        self.groups.drop(group, reason)
        self.queue.drop.remote(group.group_id)
        self.waits.changed()

    # ---- learn: cut -> train -> publish --------------------------------------------------------------------

    async def learn(self) -> None:
        """Trains until the last step. Waits for: finished groups. Unblocked by: `_roll`, `request_stop`."""
        steps_per_batch = self.config.learner.steps_per_batch
        saved = self.version if self.resume_from else -1
        while self.version < self.config.run.steps:
            began = time.monotonic()
            batch = await self._take_batch()
            if batch is None:
                break
            waited = time.monotonic() - began
            references = await self.call(self.queue.take.remote([group.group_id for group in batch]), "queue")
            taken = time.monotonic()
            stats, columns, critic_stats = await self._train(references)
            trained = time.monotonic()
            self.groups.train(batch, self.version)
            self.version += len(stats)
            assert self.version == stats[-1].version, (self.version, stats[-1].version)
            # Started before the publish so that writing rollouts overlaps with it; both must end here.
            storing = asyncio.ensure_future(self._store(batch, columns))
            await self.publish()
            await storing
            self.last_progress = ended = time.monotonic()
            seconds = {
                "take": taken - began - waited,
                "publish": ended - trained,
                "total": ended - began,
                **{
                    stage: sum(s.seconds[stage] for s in stats)
                    for stage in ("unpack", "forward_backward", "optimizer")
                },
            }
            self._record(batch, stats, critic_stats, seconds, waited)
            every = self.config.run.checkpoint_every
            if every and self.version // every > (self.version - steps_per_batch) // every:
                await self.checkpoint()
                saved = self.version
        if saved != self.version:
            await self.checkpoint()

    async def _train(self, references: list[Any]) -> tuple[list[Any], Any, list[Any]]:
        """Trains policy and critic side by side: their statistics by step, and the columns for the rollouts."""
        deadline_s = self.config.learner.step_deadline_s * self.config.learner.steps_per_batch
        critic_stats: list[Any] = []
        critic = self.scorers.critic
        if critic is None:
            stats, columns = await self.learner.train(self.version, references, deadline_s)
        else:
            (stats, columns), critic_stats = await asyncio.gather(
                self.learner.train(self.version, references, deadline_s),
                self.call(critic.train.remote(self.version, *references), "critic to train", deadline_s),
            )
        return stats, columns, critic_stats

    async def _take_batch(self) -> list[Group] | None:
        """The next batch, oldest version first; None when the run is to stop."""

        def ready() -> list[Group] | bool | None:
            if self.stopping:
                return False
            cut = self.groups.cut(self.version)
            for group_id in cut.stale:
                self._drop(self.groups.live[group_id], "stale")
            return [self.groups.live[group_id] for group_id in cut.take] or None

        began = time.monotonic()
        batch = await self.waits.until(
            ready,
            who="learner",
            what=f"{self.config.groups_per_batch} finished groups",
            deadline_s=self.config.run.no_progress_deadline_s,
        )
        self.recorder.observe("headway_wait_seconds", [time.monotonic() - began], label="learner_for_groups")
        return batch if isinstance(batch, list) else None

    async def _store(self, batch: list[Group], columns: Any) -> None:
        """Keeps the trained batch as Parquet if asked, then lets its tables go."""
        group_ids = [group.group_id for group in batch]
        if self.config.run.save_rollouts:
            path = self.folder / "rollouts" / f"step-{self.version:06d}.parquet"
            await self.call(
                self.queue.write_batch.remote(group_ids, str(path), self.version, columns), "queue"
            )
        await self.call(self.queue.release.remote(group_ids), "queue")

    async def publish(self) -> None:
        """Puts the learner's weights into the object store and wakes the engines' keepers."""
        reference, manifest, buckets = await self.learner.publish(self.version)
        self.release = Release(manifest=manifest, buckets=buckets)
        self.recorder.set("headway_learner_version", self.version)
        every, last = self.config.algorithm.reference_refresh_steps, self.config.learner.steps_per_batch
        if every and self.version // every > (self.version - last) // every:
            await asyncio.gather(
                *(
                    self.call(actor.update_weights.remote(reference, *buckets), "reference to refresh")
                    for actor in self.scorers.actors["reference"]
                )
            )
        self.waits.changed()

    # ---- keep: every engine pulls the newest version -------------------------------------------------------

    async def keep(self, engine: Engine) -> None:
        """Brings one engine up to the newest version, again and again; replaces it when it dies.

        Waits for: `publish`. Pulling means that an engine which starts late needs nothing but the newest release.
        """
        while True:
            release = await self.waits.until(
                lambda: self._newer(engine),
                who=f"engine {engine.replica}",
                what="a newer weight version",
                deadline_s=float("inf"),
            )
            try:
                await self.call(
                    engine.actor.update_weights.remote(release.manifest, *release.buckets),
                    f"engine {engine.replica} to load version {release.manifest.version}",
                    self.config.generation.update_deadline_s,
                )
                engine.version = release.manifest.version
            except (RayActorError, EngineDead, Starved, WeightUpdateFailed) as error:
                engine.version = None
                self.recorder.inc("headway_weight_sync_failures_total")
                self.progress.say(f"engine {engine.replica} is replaced: {error}")
                await self._replace(engine)
            self.waits.changed()

    def _newer(self, engine: Engine) -> Release | None:
        assert self.release is not None
        behind = engine.version is None or engine.version < self.release.manifest.version
        return self.release if behind else None

    async def _replace(self, engine: Engine) -> None:
        self.placement.discard(engine.actor)
        engine.actor = self.placement.engine(engine.replica, str(self.model_folder))
        self.recorder.inc("headway_actor_restarts_total", label="generation")
        deadline_s = self.config.generation.start_deadline_s
        await self.call(engine.actor.start.remote(), f"engine {engine.replica} to start", deadline_s)

    # ---- heartbeat: metrics, health, progress --------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Collects metrics, notices dead engines, and ends a run that makes no progress."""
        while True:
            await asyncio.sleep(self.config.metrics.heartbeat_s)
            await self._collect_metrics()
            self.progress.state(
                version=self.version,
                running=self.groups.gate.running,
                queued=self.groups.room.queued_groups,
                engines={engine.replica: engine.version for engine in self.engines},
            )
            idle = time.monotonic() - self.last_progress
            if idle > self.config.run.no_progress_deadline_s:
                raise Starved(
                    f"no optimizer step for {idle:.0f} s (run.no_progress_deadline_s="
                    f"{self.config.run.no_progress_deadline_s:.0f}), learner version {self.version}; "
                    f"who waits for whom:\n{self.waits.table()}"
                )

    async def _collect_metrics(self) -> None:
        live = {
            "learner": len(self.learner.actors),
            "generation": sum(engine.version is not None for engine in self.engines),
            **{role: len(actors) for role, actors in self.scorers.actors.items()},
            "queue": 1,
            "metrics": 1,
        }
        for role, number in live.items():
            self.recorder.set("headway_live_replicas", number, label=role)
        self.groups.observe()
        updates = self.recorder.drain()
        for engine in self.engines:
            if engine.version is None:
                continue  # starting or being replaced: it does not answer, and its keeper is at it
            try:
                updates += await self.call(
                    engine.actor.drain_updates.remote(), f"engine {engine.replica}'s metrics"
                )
            except RayActorError:
                engine.version = None  # its keeper replaces it
                self.waits.changed()
        updates += await self.scorers.drain_updates(self.call)
        await self.call(self.exporter.apply.remote(updates), "metrics")

    def _record(
        self,
        batch: list[Group],
        stats: list[Any],
        critic_stats: list[Any],
        seconds: dict[str, float],
        waited: float,
    ) -> None:
        """Metrics of the batch's steps; one JSON line per optimizer step in `metrics.jsonl`."""
        for stage, value in seconds.items():
            self.recorder.observe("headway_step_seconds", [value], label=stage)
        self.recorder.set("headway_last_step_timestamp_seconds", time.time())
        sampled_mean = self.groups.take_sampled_reward()
        if sampled_mean is not None:
            self.recorder.set("headway_sampled_reward_mean", sampled_mean)
        per_step = self.config.learner.groups_per_step
        for position, step in enumerate(stats):
            record = {
                **observe_step(self.recorder, step, batch[position * per_step : (position + 1) * per_step]),
                **(observe_critic(self.recorder, critic_stats[position]) if critic_stats else {}),
                "audit": self.groups.audit.record(),
                "sampled_reward_mean": sampled_mean,
                "time_s": round(time.monotonic() - self.started, 3),
                "seconds": {stage: value / len(stats) for stage, value in seconds.items()},
                "waited_s": waited / len(stats),
                "queue_groups": self.groups.room.queued_groups,
                "running_groups": self.groups.gate.running,
                "engine_versions": [engine.version for engine in self.engines],
                "dropped": dict(self.groups.ledger.dropped),
            }
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            self.progress.step(record)

    # ---- checkpoint ----------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Writes everything that the run needs to go on, then removes the previous checkpoint."""
        began = time.monotonic()
        parent = self.folder / "checkpoints"
        draft = checkpoint.begin(parent, self.version)
        (draft / "learner").mkdir()
        await self.learner.save(str(draft / "learner"), CHECKPOINT_DEADLINE_S)
        for role, (first, *_) in self.scorers.changing.items():
            (draft / role).mkdir()
            await self.call(first.save.remote(str(draft / role)), f"{role} to save", CHECKPOINT_DEADLINE_S)
        books = self.groups.state()
        await self.call(
            self.queue.save.remote(str(draft / "queue.parquet")), "queue to save", CHECKPOINT_DEADLINE_S
        )
        await self._collect_metrics()
        metrics = await self.call(self.exporter.state.remote(), "metrics")
        state = {"version": self.version, "metrics": metrics, **books}
        _write_text(draft / "state.json", json.dumps(state))
        _write_text(draft / "config.json", dump_config(self.config))
        self.groups.ledger.sync()
        await asyncio.to_thread(checkpoint.commit, draft)
        self.progress.say(f"checkpoint {self.version} in {time.monotonic() - began:.1f} s")


def group_request(config: Config, group_id: int, prompt: Prompt) -> GroupRequest:
    """What to ask an engine for: the samples of one prompt, and what else the algorithm needs."""
    sampling, algorithm = config.sampling, config.algorithm
    vine = algorithm.advantage == "vine"
    return GroupRequest(
        group_id=group_id,
        prompt=prompt,
        group_size=sampling.group_size,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        deadline_s=config.lag.straggler_deadline_s,
        greedy=algorithm.advantage == "remax",
        branches=algorithm.branches if vine else 0,
        step_separator=algorithm.step_separator if vine or algorithm.process_rewards else None,
        max_steps=algorithm.max_steps,
        agents=config.data.agents,
    )


async def _as_future(reference: Any) -> Any:
    return await reference


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
