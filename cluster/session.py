"""One session of a run: from its checkpoint, if it has one, to the last step or to a failure that only a checkpoint
mends. Loops beside one learner:

    dispatch   prompt ─► engine ─► scorers ─► queue     (references only; tokens never come here)
    learn      cut a batch ─► train ─► publish
    keep       one per engine: start, pull the newest version, replace, leave
    supervise  replace the other actors that die
    heartbeat  collect metrics, watch for progress
    control    requests from outside, and the run's own scaling (of scorers: on the heartbeat)

They meet in the books (`Groups`) and wake each other through `Waits`. `lag.max_version_lag = 0` is synchronous training
through the same code. The clock is the event loop's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from headway.cluster.crew import Crew, Fleet, Trained
from headway.cluster.dispatch import Dispatcher
from headway.cluster.elastic import Autoscaler
from headway.cluster.engines import Engines
from headway.cluster.exporter import Exporter
from headway.cluster.groups import Groups
from headway.cluster.part import Shared
from headway.cluster.progress import Progress
from headway.cluster.queue import Receipt
from headway.cluster.record import keep_batches, keep_steps, observe_critic, observe_step
from headway.cluster.scorers import Scorers
from headway.cluster.state import Group
from headway.cluster.status import RECENT_STEPS, snapshot
from headway.cluster.supervisor import CALL_DEADLINE_S, Supervisor
from headway.cluster.traces import Traces
from headway.cluster.tracker import Tracker
from headway.cluster.watch import Waits
from headway.core.config import Config, dump_config
from headway.core.errors import ActorDied, ClusterError, HeadwayError, Lost, NoSignal, Starved, UserError
from headway.core.metrics import Recorder
from headway.core.prompts import PromptStream
from headway.learner import checkpoint

CHECKPOINT_DEADLINE_S = 600.0
OVERDUE = 0.5
"""Share of its deadline after which a wait is shown,"""
NOTICEABLE_S = 10.0
"""if it is this long."""
T = TypeVar("T")


@dataclass(kw_only=True)
class Session:
    """`execute` raises `Lost` when the run has to go on from its checkpoint in another session."""

    config: Config
    crew: Crew
    prompts: PromptStream
    longest_prompt: int
    """Tokens."""
    progress: Progress
    totals: Exporter
    """Every series of the run, over all its sessions."""
    resume_from: Path | None
    on_stop: Callable[[bool], None]
    """Called when someone asks for the run's end: at once (True), or as `request_stop` does it."""
    is_restart: bool = False
    """Another session of this process came before,"""
    port: int | None = None
    """whose metrics endpoint was here."""
    fleet: Fleet | None = None
    """Engines that the run is to have by now; None: those of the configuration."""
    scorers_wanted: dict[str, int] = field(default_factory=dict)
    """Replicas by group, of those that someone scaled."""
    traces: Traces | None = None
    tracker: Tracker | None = None
    version: int = 0
    stopping: bool = False

    async def execute(self) -> None:
        """Trains. Raises `Starved` when nothing moves for the no-progress deadline."""
        self.recorder = Recorder()
        self.waits = Waits(self.recorder)
        self.folder = self.config.run_folder.resolve()
        self.started = self.last_progress = self._now()
        self.learner_works = self.is_up = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.no_signal: NoSignal | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        """Records of the newest steps."""
        self.saved: int | None = None
        """Version of the newest checkpoint."""
        self.autoscaler = _autoscaler(self.config)
        try:
            async with asyncio.TaskGroup() as self.loops:
                try:
                    await self._start()
                except ActorDied as death:
                    raise Lost(f"{death} while the run started") from death
                self.last_progress = self._now()
                self.is_up = True
                for loop in (self.dispatcher.run(), self.heartbeat()):
                    self._spawn(loop)
                if not self.answering:
                    self._spawn(self.control())
                self.engines.keep_all()
                assert self.fleet is not None
                self.engines.scale(self.fleet.replicas)
                for group, replicas in self.scorers_wanted.items():
                    self.scorers.scale(group, replicas)
                await self.learn()
                for task in self.tasks:
                    task.cancel()
            try:
                await self._send_metrics()
            except (ActorDied, Starved) as failure:
                self.progress.say(f"the last metrics were not shown: {failure}")
        finally:
            if hasattr(self, "groups"):
                self.groups.ledger.close()
            if self.traces is not None:
                self.traces.detach()
        if self.no_signal:
            raise self.no_signal

    def request_stop(self) -> None:
        """Ends the session after the optimizer step in progress, with a checkpoint."""
        self.stopping = True
        if hasattr(self, "dispatcher"):
            self.dispatcher.stopping = True
            self.waits.changed("control")

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> None:
        """Runs beside the learner; its failure ends the session, its task ends with it."""
        task = self.loops.create_task(loop)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _call(
        self, awaitable: Awaitable[T], what: str, stage: str, deadline_s: float = CALL_DEADLINE_S
    ) -> T:
        return await self.waits.within(awaitable, who="driver", what=what, stage=stage, deadline_s=deadline_s)

    # ---- start ---------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config, crew, start_s = self.config, self.crew, self.config.generation.start_deadline_s
        say = self.progress.say
        say("placing groups")
        generation = config.generation
        self.fleet = self.fleet or Fleet(replicas=generation.replicas, gpus=generation.gpus)
        # Those that were added meanwhile may have no room now; they come when the others work.
        first = replace(self.fleet, replicas=min(self.fleet.replicas, generation.replicas))
        opening_s = crew.placement_deadline_s * len(crew.replicas) + start_s
        await self._call(crew.open(first), "the groups to be placed", "start", opening_s)
        self.port = await self._call(crew.serve_metrics(self.port), "the metrics endpoint", "start")
        if self.is_restart:  # it shows nothing before it knows what was
            await self._call(crew.show_metrics(self.totals.state()), "the metrics endpoint", "start")
        self.progress.endpoint(self.port, config.metrics.port)
        _write_text(self.folder / "metrics_port", str(self.port))
        self.answering = True
        self._spawn(self.control())
        shared = Shared(
            config=config, crew=crew, waits=self.waits, recorder=self.recorder, say=say, spawn=self._spawn
        )
        self.engines = Engines(shared, on_left=lambda replica: self.totals.forget_replica(str(replica)))
        self.scorers = Scorers(shared)
        say("starting engines and learner")
        engines = asyncio.ensure_future(self.engines.start(first))
        try:
            await self._call(crew.start_learner(), "the learner to start", "start", start_s)
            await self._load_state()
            if self.traces is not None:
                self.traces.attach(self.groups, self.prompts)
            if self.tracker is not None:
                self.tracker.go_on(self.version)
            self.supervisor = Supervisor(
                shared, folder=self.folder, groups=self.groups, engines=self.engines, port=self.port
            )
            self.dispatcher = Dispatcher(
                shared,
                prompts=self.prompts,
                groups=self.groups,
                engines=self.engines,
                supervisor=self.supervisor,
                on_no_signal=self._on_no_signal,
                traces=self.traces,
            )
            self.dispatcher.stopping = self.stopping
            self._at(self.version)
            await self.publish()
            await engines
        finally:
            engines.cancel()
        self._spawn(self.supervisor.run())
        self.recorder.set("headway_max_version_lag_steps", config.lag.max_version_lag)

    async def _load_state(self) -> None:
        journal, newest = self.folder / "ledger.jsonl", self.resume_from
        books = (self.config, self.longest_prompt, journal, self.recorder)
        if newest is None:
            if not journal.exists():
                self.groups = Groups.new(*books)
                return
            # There was a session, and it ended before its first checkpoint.
            nothing = Groups.nothing(self.config, self.longest_prompt)
            self.groups, _ = Groups.resume(*books, state=nothing, version=0, receipts=())
            self._keep_steps()
            return
        state = json.loads((newest / "state.json").read_text())
        self.version = await self._call(
            self.crew.load(newest), f"{newest} to be loaded", "checkpoint", CHECKPOINT_DEADLINE_S
        )
        if self.version != state["version"]:
            raise HeadwayError(f"checkpoint {newest}: learner {self.version}, driver {state['version']}")
        receipts: list[Receipt] = await self._call(
            self.crew.restore_queue(newest / "queue.parquet"),
            "the queue's rows",
            "checkpoint",
            CHECKPOINT_DEADLINE_S,
        )
        self.groups, unknown = Groups.resume(*books, state=state, version=self.version, receipts=receipts)
        await self._call(self.crew.release(unknown), "the queue", "queue")
        if not self.is_restart:
            self.totals.restore({**state["metrics"], "gauges": ()})  # those of another day
        self._keep_steps()
        self.progress.say(
            f"resumed at version {self.version}: {len(self.groups.live)} groups in the queue, "
            f"{len(self.groups.reissue)} issued again"
        )

    def _keep_steps(self) -> None:
        """Of what the folder says, that up to this version."""
        keep_steps(self.folder / "metrics.jsonl", self.version)
        keep_batches(self.folder / "rollouts", self.version)

    def _at(self, version: int) -> None:
        """The learner has arrived there."""
        self.version = self.dispatcher.version = self.waits.version = version

    # ---- learn: cut -> train -> publish --------------------------------------------------------------------

    async def learn(self) -> None:
        """Trains until the last step. Waits for: finished groups. Unblocked by: every group that ends, `request_stop`."""
        config, steps_per_batch = self.config, self.config.learner.steps_per_batch
        self.saved = self.version if self.resume_from else None
        while self.version < config.run.steps:
            began = self._now()
            batch = await self._take_batch()
            if batch is None:
                break
            taken = self._now()
            self.learner_works = True
            queue = self.crew.incarnation("queue", 0)
            trained = await self._train(batch)
            if trained is None:
                self.learner_works = False
                continue
            ended_training = self._now()
            self.groups.train(batch, self.version)
            self._at(self.version + len(trained.stats))
            assert self.version == trained.stats[-1].version, (self.version, trained.stats[-1].version)
            for step in trained.stats:
                self.groups.observe_ess(step.ess_fraction)
            # Started before the publish so that writing rollouts overlaps with it; both must end here.
            storing = asyncio.ensure_future(self._store(batch, trained.columns, queue))
            try:
                await self.publish()
                await storing
            finally:
                storing.cancel()
            self.supervisor.training = ()
            self.learner_works = False
            self.last_progress = ended = self._now()
            stages = ("unpack", "forward_backward", "optimizer")
            computed = {stage: sum(s.seconds[stage] for s in trained.stats) for stage in stages}
            seconds = {
                "take": ended_training - taken - sum(computed.values()),
                "publish": ended - ended_training,
                "total": ended - began,
                **computed,
            }
            self._record(batch, trained, seconds, waited=taken - began)
            self._scale_itself(waited=taken - began, total=ended - began)
            every = config.run.checkpoint_every
            if every and self.version // every > (self.version - steps_per_batch) // every:
                await self.checkpoint()
        if self.saved != self.version:
            await self.checkpoint()

    async def _take_batch(self) -> list[Group] | None:
        """The next batch, oldest version first; None when the run is to stop."""

        def ready() -> list[Group] | bool | None:
            if self.stopping:
                return False
            if not self.supervisor.queue_is_whole:
                return None
            cut = self.groups.cut(self.version)
            for group_id in cut.stale:
                self.dispatcher.drop(self.groups.live[group_id], "stale")
            return [self.groups.live[group_id] for group_id in cut.take] or None

        try:
            batch = await self.waits.until(
                ready,
                who="learner",
                what=f"{self.config.groups_per_batch} finished groups",
                stage="learner_for_groups",
                deadline_s=self.config.run.no_progress_deadline_s,
                on=("groups", "control"),
            )
        except Starved as failure:
            raise self._stalled() from failure
        return batch if isinstance(batch, list) else None

    async def _train(self, batch: list[Group]) -> Trained | None:
        """None when the queue died with the rows before anything was trained on them."""
        config = self.config
        group_ids = [group.group_id for group in batch]
        self.supervisor.training = batch
        if self.traces is not None:
            self.traces.take(group_ids)
        try:
            return await self._call(
                self.crew.train(self.version, group_ids),
                f"the learner to train version {self.version + 1}",
                "train",
                config.learner.step_deadline_s * config.learner.steps_per_batch,
            )
        except ActorDied as death:
            if death.role != "queue":
                raise Lost(f"{death} while version {self.version + 1} was trained") from death
            if config.learner.replicas > 1 or config.algorithm.needs_critic:
                # Some may have had the rows already, and taken the step.
                raise Lost(f"{death} before all had the rows of version {self.version + 1}") from death
            await self.supervisor.repaired(death, who="learner")
            self.supervisor.training = ()
            self.groups.lose(group_ids)
            self.waits.changed("groups")
            return None
        except Starved as failure:
            raise Lost(str(failure)) from failure

    async def _store(self, batch: list[Group], columns: Any, queue: int) -> None:
        """Keeps the trained batch as Parquet if asked, then lets its tables go. `queue`: the incarnation that had
        them."""
        group_ids = [group.group_id for group in batch]
        path = self.folder / "rollouts" / f"step-{self.version:06d}.parquet"
        if self.config.run.save_rollouts:
            try:
                if queue != self.crew.incarnation("queue", 0):
                    raise ActorDied("queue", 0, queue)
                writing = self.crew.write_batch(group_ids, path, self.version, columns)
                await self._call(writing, f"{path} to be written", "queue")
            except ActorDied as death:
                self.progress.say(f"{path.name} is not kept: {death}")
        await self.supervisor.release(group_ids)

    async def publish(self) -> None:
        """Puts the learner's weights into the object store and wakes the engines' keepers."""
        try:
            release = await self._call(
                self.crew.publish(self.version), f"version {self.version} to be published", "publish"
            )
            self.recorder.set("headway_learner_version", self.version)
            every, last = self.config.algorithm.reference_refresh_steps, self.config.learner.steps_per_batch
            if every and self.version // every > (self.version - last) // every:
                await self._call(
                    self.crew.refresh_reference(release), "the reference to take the weights", "publish"
                )
        except (ActorDied, Starved) as failure:
            raise Lost(f"version {self.version} was not published: {failure}") from failure
        self.engines.published(release)

    def _on_no_signal(self) -> None:
        if self.no_signal is None and (fault := self.groups.no_signal(self.version)):
            self.no_signal = fault
            self.request_stop()

    # ---- control: requests from outside --------------------------------------------------------------------

    async def control(self) -> None:
        """Answers requests. Waits for: whoever asks. Ends when the mailbox dies before there is a supervisor to repair it."""
        while True:
            try:
                ticket, kind, value = await self.crew.next_request()
            except ActorDied as death:
                if not self.is_up:
                    self.answering = False
                    return
                await self.supervisor.repaired(death, who="control")
                continue
            answer, what = await self._answer(kind, value), "an answer to be passed on"

            def give(ticket: int = ticket, answer: Any = answer) -> Awaitable[None]:
                return self.crew.answer(ticket, answer)

            try:
                if self.is_up:
                    await self.supervisor.insist(give, what=what, stage="metrics")
                else:
                    await self._call(give(), what, "metrics")
            except ActorDied as death:  # while the run starts; what is asked is done all the same
                self.progress.say(f"an answer is lost: {death}")
            except Starved as failure:
                self.progress.say(str(failure))  # who asked finds out by a deadline of its own
            if kind == "stop":
                self.progress.say(
                    f"asked to stop {'at once' if value else 'after this step, with a checkpoint'}"
                )
                self.on_stop(value)

    async def _answer(self, kind: str, value: Any) -> dict[str, Any] | UserError:
        match kind:
            case "scale" if not self.is_up:
                return UserError("the run is still starting; scale it when it trains")
            case "scale":
                return await self._scale(*value)
            case "status" | "stop":
                this: Any = self  # type checkers know it under two names
                return snapshot(this)
            case _:
                return UserError(f"unknown request {kind!r}")

    async def _scale(self, group: str, wanted: int, gpus: float | None = None) -> dict[str, Any] | UserError:
        elastic = ("generation", *self.scorers.targets)
        if group not in elastic:
            return UserError(f"{group} cannot be scaled while this run trains; {' and '.join(elastic)} can")
        limit = self.config.verifiers.max_replicas if group == "verifiers" else None
        if group == "generation":
            limit = self.config.generation.max_replicas
        if limit is not None and wanted > limit:
            return UserError(f"{group}={wanted} is over {group}.max_replicas={limit}")
        if gpus is not None and gpus != self.engines.gpus:
            try:
                wish = self.crew.check_fleet(Fleet(replicas=wanted, gpus=gpus))
                await self._call(wish, "a look at the cluster's GPUs", "start")
            except (ClusterError, Starved) as failure:
                return UserError(str(failure))
        if group == "generation":
            before, serving = self.engines.target, self.engines.serving
            self._scale_engines(wanted, gpus)
        else:
            before, serving = self.scorers.targets[group], self.crew.replicas[group]
            self.scorers.scale(group, wanted)
            self.scorers_wanted[group] = wanted
        return {
            "group": group,
            "before": before,
            "target": wanted,
            "serving": serving,
            "gpus": self.engines.gpus if group == "generation" else None,
            "version": self.version,
        }

    def _scale_engines(self, replicas: int, gpus: float | None = None) -> None:
        self.engines.scale(replicas, gpus)
        self.fleet = Fleet(replicas=self.engines.target, gpus=self.engines.gpus)

    def _scale_itself(self, *, waited: float, total: float) -> None:
        blocked = self.dispatcher.take_blocked_s()
        if self.autoscaler is None or not self.engines.is_settled:
            return  # what engines that still start or leave would do is not to be seen yet
        target = self.autoscaler.step(
            waited_s=waited, total_s=total, blocked_s=blocked, target=self.engines.target
        )
        if target != self.engines.target:
            self._scale_engines(target)

    # ---- heartbeat: metrics and progress -------------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Collects metrics, shows waits that take long, and ends a run that makes no progress."""
        shown: set[tuple[str, str]] = set()
        deadline_s = self.config.run.no_progress_deadline_s
        while True:
            await asyncio.sleep(self.config.metrics.heartbeat_s)
            try:
                await self._send_metrics()
            except ActorDied:
                pass  # whoever takes its place is shown everything on a later beat
            except Starved as failure:
                self.progress.say(str(failure))
            self.progress.state(
                version=self.version,
                running=self.groups.gate.running,
                queued=self.groups.room.queued_groups,
                engines={engine.replica: engine.version for engine in self.engines.all.values()},
            )
            overdue = {
                (wait.who, wait.what)
                for wait in self.waits.overdue(OVERDUE)
                if self._now() - wait.since > NOTICEABLE_S
            }
            if overdue - shown:
                self.progress.say(f"waits that take long:\n{self.waits.table(self.version)}")
            shown = overdue
            if self.learner_works:  # whose calls all have deadlines of their own
                self.last_progress = self._now()
            if self._now() - self.last_progress > deadline_s:
                raise self._stalled()

    def _stalled(self) -> Starved:
        return Starved(
            f"no optimizer step for {self._now() - self.last_progress:.0f} s (run.no_progress_deadline_s="
            f"{self.config.run.no_progress_deadline_s:g}), learner version {self.version}; who waits for whom:\n"
            f"{self.waits.table(self.version)}"
        )

    async def _send_metrics(self) -> None:
        """Everything that was recorded since the last time: into the run's totals, and to the endpoint."""
        live = {**self.crew.replicas, "generation": self.engines.serving}
        for role, number in live.items():
            self.recorder.set("headway_live_replicas", number, label=role)
        self.recorder.set("headway_target_replicas", self.engines.target)
        self.recorder.set("headway_wait_deadline_used_ratio", self.waits.deadline_used())
        self.groups.observe()
        self.scorers.beat()
        self.recorder.extend(
            await self._call(self.crew.scorer_updates(), "the verifiers' metrics", "metrics")
        )
        self.totals.apply(self.recorder.drain())
        await self._call(self.crew.show_metrics(self.totals.state()), "the metrics endpoint", "metrics")

    def _record(self, batch: list[Group], trained: Trained, seconds: dict[str, float], waited: float) -> None:
        """Metrics of the batch's steps; one JSON line per optimizer step in `metrics.jsonl`."""
        for stage, value in seconds.items():
            self.recorder.observe("headway_step_seconds", [value], label=stage)
        self.recorder.set("headway_last_step_timestamp_seconds", time.time())
        sampled_mean = self.groups.take_sampled_reward()
        if sampled_mean is not None:
            self.recorder.set("headway_sampled_reward_mean", sampled_mean)
        stats, critic_stats = trained.stats, trained.critic_stats
        per_step = self.config.learner.groups_per_step
        for position, step in enumerate(stats):
            own = batch[position * per_step : (position + 1) * per_step]
            record = {
                **observe_step(self.recorder, step, own, self.config.max_trained_lag),
                **(observe_critic(self.recorder, critic_stats[position]) if critic_stats else {}),
                "audit": self.groups.audit.record(),
                "sampled_reward_mean": sampled_mean,
                "time_s": round(self._now() - self.started, 3),
                "seconds": {stage: value / len(stats) for stage, value in seconds.items()},
                "waited_s": waited / len(stats),
                "queue_groups": self.groups.room.queued_groups,
                "running_groups": self.groups.gate.running,
                "effective_bound": self.groups.gate.bound,
                "target_replicas": self.engines.target,
                "engine_versions": [engine.version for engine in self.engines.all.values()],
                "dropped": dict(self.groups.ledger.dropped),
            }
            path = self.folder / "metrics.jsonl"
            with checkpoint.writing(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if self.tracker is not None:
                self.tracker.step(record)
            self.recent.append(record)
            self.progress.step(record)

    # ---- checkpoint ----------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Writes everything that the run needs to go on, then removes the previous checkpoint."""
        began = self._now()
        self.learner_works = True
        draft = checkpoint.begin(self.folder / "checkpoints", self.version)
        try:
            await self._call(
                self.crew.save(draft), "the learner to save", "checkpoint", CHECKPOINT_DEADLINE_S
            )
        except (ActorDied, Starved) as failure:
            raise Lost(f"checkpoint {self.version} was not written: {failure}") from failure
        books = self.groups.state()
        await self.supervisor.insist(
            lambda: self.crew.save_queue(draft / "queue.parquet"),
            what="the queue to save",
            stage="checkpoint",
            deadline_s=CHECKPOINT_DEADLINE_S,
        )
        self.totals.apply(self.recorder.drain())
        state = {"version": self.version, "metrics": self.totals.state(), **books}
        with checkpoint.writing(draft):
            _write_text(draft / "state.json", json.dumps(state))
            _write_text(draft / "config.json", dump_config(self.config))
        self.groups.ledger.sync()
        await asyncio.to_thread(checkpoint.commit, draft)
        self.saved = self.version
        self.learner_works = False
        self.last_progress = self._now()
        self.progress.say(f"checkpoint {self.version} in {self._now() - began:.1f} s")


def _autoscaler(config: Config) -> Autoscaler | None:
    generation = config.generation
    if generation.max_replicas is None:
        return None
    return Autoscaler(generation.min_replicas or generation.replicas, generation.max_replicas)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
