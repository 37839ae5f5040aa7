"""From a prompt to a finished group in the queue, whatever dies on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from headway.actors.generation_rows import GroupRequest
from headway.cluster.engines import Engines
from headway.cluster.groups import Groups
from headway.cluster.part import Part, Shared
from headway.cluster.queue import Receipt
from headway.cluster.state import Engine, Group
from headway.cluster.supervisor import Supervisor
from headway.cluster.traces import Traces, traced
from headway.core.config import Config
from headway.core.errors import ActorDied, HandedBack, RolloutFailed, Starved, StoreFull
from headway.core.prompts import Prompt, PromptStream

MAX_DEATHS = 5
"""Actors of a role that die under one group before it is taken to be the cause."""
GRACE_S = 30.0
"""What scoring and the queue may take beyond the deadline that the engine keeps."""
LONGEST_PAUSE_S = 10.0
"""Between attempts to store a group."""
BLOCKED_BY = {
    "queue_full": "room in the queue (queue.max_groups, queue.max_mib)",
    "gate": "room under the version-lag bound",
    "engine": "an engine that can take a group",
}
"""What the dispatcher waits for, by stage."""


class Dispatcher(Part):
    """Starts groups as room appears, and brings each to its end."""

    def __init__(
        self,
        shared: Shared,
        *,
        prompts: PromptStream,
        groups: Groups,
        engines: Engines,
        supervisor: Supervisor,
        on_no_signal: Callable[[], None],
        traces: Traces | None = None,
    ) -> None:
        super().__init__(shared)
        self._prompts = prompts
        self._groups = groups
        self._engines = engines
        self._supervisor = supervisor
        self._on_no_signal = on_no_signal
        self._traces = traces
        self.version = 0
        """The learner's."""
        self.stopping = False
        self._blocked_s = 0.0
        self._blocked_since: float | None = None

    async def run(self) -> None:
        """Waits for: room under the bound, in the queue, and on an engine. Unblocked by: every group that ends, every
        trained step, every weight update."""
        while True:
            engine = self._free_engine() or await self._wait()
            if engine is None:
                continue
            assert engine.version is not None
            group = self._groups.issue(engine.version, self._task, self._now())
            self._engines.take(engine)
            self._recorder.observe("headway_publish_lag_steps", [self.version - engine.version])
            self._spawn(self._roll(group, engine))

    async def _wait(self) -> Engine | None:
        stage = self._blocked_by()
        if stage != "engine":
            self._blocked_since = self._now()
        try:
            return await self._waits.until(
                self._free_engine,
                who="dispatcher",
                what=BLOCKED_BY[stage],
                stage=stage,
                deadline_s=self._config.run.no_progress_deadline_s,
                on=("groups", "engines", "release", "control"),
            )
        except Starved:
            return None  # whether that is a fault is for the progress deadline to say
        finally:
            self._blocked_s += self._blocked_until_now()
            self._blocked_since = None

    def take_blocked_s(self) -> float:
        """Time since the last call in which nothing could start because of the lag bound or the queue's size."""
        blocked, self._blocked_s = self._blocked_s + self._blocked_until_now(), 0.0
        if self._blocked_since is not None:
            self._blocked_since = self._now()
        return blocked

    def _blocked_until_now(self) -> float:
        return 0.0 if self._blocked_since is None else self._now() - self._blocked_since

    def _blocked_by(self) -> str:
        gate = self._groups.gate
        if not self._groups.room.admits(gate.running):
            return "queue_full"
        release = self._engines.release
        if release is None or gate.capacity(release.manifest.version) <= 0:
            return "gate"
        return "engine"

    def _free_engine(self) -> Engine | None:
        """The least loaded engine whose version leaves room for one more group."""
        gate = self._groups.gate
        if self.stopping or not self._groups.room.admits(gate.running):
            return None
        return self._engines.pick(lambda version: gate.capacity(version) > 0)

    async def _roll(self, group: Group, engine: Engine) -> None:
        """One group to its end. It goes on at another engine when its own leaves, and starts over when an actor dies
        under it. The engine already counts it."""
        if self._traces is not None:
            self._traces.follow(group)
        kept: Any = None
        pause_s = 0.0
        deaths: Counter[str] = Counter()
        while True:
            try:
                try:
                    rows = await self._sample(group, engine, kept)
                except HandedBack:
                    rows, kept = None, await self._take_back(group, engine)
                finally:
                    self._engines.give(engine)
                if rows is not None:
                    receipt = await self._store(group, rows, deaths)
                    break
            except RolloutFailed as failure:
                if failure.reason != "store_full":
                    reason = failure.reason if failure.reason == "straggler" else "generation_failed"
                    self._fail(group, reason, failure)
                    return
                # Its rows had no place and are gone: it is sampled again, by and by.
                kept, pause_s = None, await self._pause(group, failure, pause_s)
            except Starved as failure:
                # Its rows may still be on their way.
                self._spawn(self._refuse(group.group_id))
                self._fail(group, "straggler", failure)
                return
            except ActorDied as death:
                kept = None
                deaths[death.role] += 1
                self._engines.failed_with(death)
                if deaths[death.role] == MAX_DEATHS:
                    reason = "generation_failed" if death.role == "generation" else "verifier_failed"
                    self._fail(group, reason, death)
                    return
            with traced("wait_for_engine"):
                engine = await self._another(group)
            self._engines.take(engine)
            if kept is None:
                assert engine.version is not None
                self._groups.restart(group, engine.version, self._now())
        self._finish(group, receipt)

    async def _sample(self, group: Group, engine: Engine, kept: Any) -> Any:
        """Reference to the rows, once they are made. From here on the engine has nothing to do with them: while they are
        scored, another group has their place."""
        config = self._config
        prompt = self._prompts.at(group.group_id)
        left = self._left_s(group)
        request = group_request(config, group.group_id, prompt, deadline_s=left)
        rows = self._crew.sample(engine.replica, request, kept)
        with traced("generate", replica=engine.replica, version=engine.version):
            await self._waits.within(
                self._crew.sampled(rows),
                who=f"group {group.group_id}",
                what=f"engine {engine.replica}",
                stage="group",
                deadline_s=left + GRACE_S,
            )
        return rows

    async def _store(self, group: Group, rows: Any, deaths: Counter[str]) -> Receipt:
        """Through the scorers into the queue, as often as it takes. Only the loss of the rows is raised, or one death
        too many of a role."""
        left, pause_s = self._left_s(group), 0.0
        while True:
            queue = self._crew.incarnation("queue", 0)
            try:
                with traced("score"):
                    receipt = await self._waits.within(
                        self._crew.put(rows),
                        who=f"group {group.group_id}",
                        what="its scorers and the queue",
                        stage="group",
                        deadline_s=left + GRACE_S,
                    )
                if queue == self._crew.incarnation("queue", 0) and queue > self._supervisor.dead_queue:
                    return receipt
            except StoreFull as failure:
                pause_s = await self._pause(group, failure, pause_s)
            except ActorDied as death:
                if death.role == "generation" or deaths[death.role] == MAX_DEATHS - 1:
                    raise
                if death.role != "queue":  # which has to do with all groups, so that its death accuses none
                    deaths[death.role] += 1
                await self._supervisor.repaired(death, who=f"group {group.group_id}")

    def _left_s(self, group: Group) -> float:
        """Of the straggler deadline."""
        return max(self._config.lag.straggler_deadline_s - (self._now() - group.dispatched), 0.0)

    async def _pause(self, group: Group, failure: Exception, last_s: float) -> float:
        """Waits for room in the object store, each time longer. Meanwhile the group holds its place under the bound, so
        that nothing new starts in it."""
        self._recorder.inc("headway_store_full_total")
        if not last_s:
            self._say(f"group {group.group_id} waits for room in the object store: {failure}")
        pause_s = min(2 * last_s + 0.5, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)
        return pause_s

    async def _take_back(self, group: Group, engine: Engine) -> Any:
        """What the leaving engine has of the group; None when that is lost with it, so that the group starts over."""
        try:
            kept = await self._waits.within(
                self._crew.take_back(engine.replica, group.group_id),
                who=f"group {group.group_id}",
                what=f"its tokens from engine {engine.replica}",
                stage="group",
                deadline_s=GRACE_S,
            )
        except (ActorDied, Starved):
            return None
        self._recorder.inc("headway_groups_handed_back_total")
        return kept

    async def _another(self, group: Group) -> Engine:
        """Whether there is one in time is for the progress deadline to say."""
        while True:
            try:
                return await self._waits.until(
                    lambda: self._engines.pick(lambda version: version >= group.since_version),
                    who=f"group {group.group_id}",
                    what="an engine to go on at",
                    stage="engine",
                    deadline_s=self._config.run.no_progress_deadline_s,
                    on=("engines", "release"),
                )
            except Starved:
                continue

    def _finish(self, group: Group, receipt: Receipt) -> None:
        reason = self._groups.finish(group, receipt, self.version)
        if warning := self._groups.monotony.warning():
            self._say(f"warning: {warning}")
        if reason is not None:
            self.drop(group, reason)
            self._on_no_signal()
        self._waits.changed("groups")

    def drop(self, group: Group, reason: str) -> None:
        """Ends a group that is not to be trained."""
        self._groups.drop(group, reason)
        if group.receipt is not None:
            self._spawn(self._supervisor.release([group.group_id]))
        self._waits.changed("groups")

    def _fail(self, group: Group, reason: str, failure: Exception) -> None:
        self._say(f"group {group.group_id} dropped: {failure}")
        self.drop(group, reason)

    async def _refuse(self, group_id: int) -> None:
        await self._supervisor.insist(
            lambda: self._crew.refuse(group_id),
            who="dispatcher",
            what="the queue to refuse a late group",
            stage="queue",
        )

    def _task(self, group_id: int) -> str:
        return self._prompts.at(group_id).task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def group_request(config: Config, group_id: int, prompt: Prompt, *, deadline_s: float) -> GroupRequest:
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
        deadline_s=deadline_s,
        greedy=algorithm.advantage == "remax",
        branches=algorithm.branches if vine else 0,
        step_separator=algorithm.step_separator if vine or algorithm.process_rewards else None,
        max_steps=algorithm.max_steps,
        environment=config.episodes,
    )
