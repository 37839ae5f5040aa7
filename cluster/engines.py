"""The generation engines of a run: each is started, brought to the newest weights again and again, replaced when it
fails or is to have other GPUs, and let go when fewer are wanted."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from headway.cluster.crew import Fleet, Release, Shortage
from headway.cluster.elastic import Concurrency
from headway.cluster.part import Part, Shared
from headway.cluster.state import Engine
from headway.core.errors import ActorDied, ClusterError, Starved, WeightUpdateFailed

LONGEST_PAUSE_S = 60.0
"""Between attempts to start an engine that fails again and again."""
STOP_DEADLINE_S = 30.0


class Engines(Part):
    """Who serves what, and who is free. `on_left` is told the replica of an engine that has gone for good."""

    def __init__(self, shared: Shared, *, on_left: Callable[[int], None]) -> None:
        super().__init__(shared)
        self._on_left = on_left
        self.all: dict[int, Engine] = {}
        self.target = 0
        self.gpus = 0.0
        """Of each engine that starts from here on,"""
        self.gpus_of: dict[int, float] = {}
        """and of those that there are, by replica."""
        self.release: Release | None = None
        self._concurrency: dict[int, Concurrency] = {}
        self._ways_up: dict[int, asyncio.Task[None]] = {}
        """Starts, and pauses before them, by replica;"""
        self._short: dict[int, Shortage] = {}
        """what they wait for, if it is resources,"""
        self._refused: set[int] = set()
        """and those that got none the last time."""
        self._replaces = False
        self._free: list[tuple[int, int]] = []
        """Heap of (running, replica), the least loaded first; entries that are no longer true are passed over."""
        self._offered: set[tuple[int, int]] = set()

    # ---- who is free ---------------------------------------------------------------------------------------

    def pick(self, admits: Callable[[int], bool]) -> Engine | None:
        """The least loaded engine whose version is admitted; None without any."""
        if self.release is None or not admits(self.release.manifest.version):
            return None
        passed_over, found = [], None
        while self._free and found is None:
            entry = heapq.heappop(self._free)
            self._offered.discard(entry)
            engine = self.all.get(entry[1])
            if engine is None or engine.running != entry[0] or not self._takes_more(engine):
                continue
            assert engine.version is not None
            if admits(engine.version):
                found = engine
            else:
                passed_over.append(engine)
        for engine in passed_over:
            self._offer(engine)
        return found

    def take(self, engine: Engine) -> None:
        """One more group runs there."""
        engine.running += 1
        self._offer(engine)

    def give(self, engine: Engine) -> None:
        """A group has ended there."""
        engine.running -= 1
        self._offer(engine)
        self._waits.changed("engines")

    def _takes_more(self, engine: Engine) -> bool:
        return engine.version is not None and not engine.leaving and engine.running < engine.limit

    def _offer(self, engine: Engine) -> None:
        entry = (engine.running, engine.replica)
        if self._takes_more(engine) and entry not in self._offered:
            heapq.heappush(self._free, entry)
            self._offered.add(entry)

    # ---- how many ------------------------------------------------------------------------------------------

    async def start(self, fleet: Fleet) -> None:
        """The first engines; returns when all are up, but for those that died on the way, which their keepers start again.
        Raises what their start raised otherwise, and the last death where none came up."""
        self.target, self.gpus = fleet.replicas, fleet.gpus
        first = [self._new() for _ in range(fleet.replicas)]
        deaths: list[ActorDied] = []

        async def start(engine: Engine) -> None:
            try:
                await self._start(engine)
            except ActorDied as death:
                deaths.append(death)
                self._say(f"engine {engine.replica} did not start: {death}")

        await asyncio.gather(*map(start, first))
        if deaths and len(deaths) == len(first):
            raise deaths[-1]

    def keep_all(self) -> None:
        """From here on every engine is looked after."""
        for engine in self.all.values():
            self._look_after(engine)

    def scale(self, replicas: int, gpus: float | None = None) -> None:
        """The run is to have this many engines, with this many GPUs each; None: as many as before. Those that leave are
        the newest."""
        self.target = replicas
        self.gpus = self.gpus if gpus is None else gpus
        if not self._outdated():
            self._count()
        elif not self._replaces:
            self._replaces = True
            self._spawn(self._replace())
        self._waits.changed("engines", "fleet", "control")

    def _count(self) -> None:
        staying = sorted(self._staying(), key=lambda engine: engine.replica)
        for engine in staying[self.target :]:
            self._let_go(engine)
        for _ in range(self.target - len(staying)):
            self._join()

    def _staying(self) -> list[Engine]:
        return [engine for engine in self.all.values() if not engine.leaving]

    def _outdated(self) -> list[Engine]:
        """Engines that have other GPUs than wanted. The first one goes first: one that serves nothing, or the newest."""
        outdated = [engine for engine in self._staying() if self.gpus_of[engine.replica] != self.gpus]
        return sorted(outdated, key=lambda engine: (engine.version is not None, -engine.replica))

    def _let_go(self, engine: Engine) -> None:
        engine.leaving = True
        if (way_up := self._ways_up.get(engine.replica)) is not None:
            way_up.cancel()
        self._say(f"engine {engine.replica} leaves ({self._wanted})")
        self._waits.changed("engines", "fleet", "control")

    def _join(self) -> None:
        engine = self._new()
        self._say(f"engine {engine.replica} joins ({self._wanted})")
        self._look_after(engine)

    @property
    def _wanted(self) -> str:
        return f"{self.target} wanted" + (f", with {self.gpus:g} GPU each" if self.gpus else "")

    def _new(self) -> Engine:
        replica = next(n for n in range(len(self.all) + 1) if n not in self.all)
        cap = self._config.groups_per_engine
        self._concurrency[replica] = Concurrency(cap)
        self.gpus_of[replica] = self.gpus
        self.all[replica] = Engine(replica=replica, limit=cap)
        return self.all[replica]

    # ---- other GPUs ----------------------------------------------------------------------------------------

    async def _replace(self) -> None:
        """Replaces outdated engines one after another: the next one starts, and only when it serves does an outdated one
        leave; where there is no room for both, as many as are in its way leave first. Nothing changes while an engine
        that is to serve does not. Waits for: engines that start, and room. Ends when none is outdated."""
        try:
            while outdated := self._outdated():
                seen, staying = self._seen(), self._staying()
                starting = [engine for engine in staying if engine.version is None and engine not in outdated]
                if len(staying) - len(starting) > self.target:
                    self._let_go(outdated[0])
                    continue
                if not starting:
                    self._join()
                    continue
                for engine in starting:
                    if engine.replica in self._short:
                        await self._make_room(engine, outdated)
                        break
                with suppress(Starved):
                    await self._waits.until(
                        lambda seen=seen: self._seen() != seen or None,
                        who="the engines to be replaced",
                        what=f"engine {starting[0].replica} to serve",
                        stage="start",
                        deadline_s=self._config.generation.start_deadline_s + self._crew.placement_deadline_s,
                        on=("engines", "fleet"),
                    )
        finally:
            self._replaces = False
        self._count()

    def _seen(self) -> Any:
        """What the next replacement depends on."""
        states = {n: (engine.version is None, engine.leaving) for n, engine in self.all.items()}
        return self.target, self.gpus, states, dict(self.gpus_of), dict(self._short), set(self._refused)

    async def _make_room(self, engine: Engine, outdated: list[Engine]) -> None:
        """Lets those engines go that are in its way; never all that serve while another one has its place and starts, or
        an autoscaler may bring a node."""
        leaving = [replica for replica, other in self.all.items() if other.leaving]
        try:
            going = await self._waits.within(
                self._crew.in_the_way(engine.replica, leaving, [other.replica for other in outdated]),
                who=f"engine {engine.replica}",
                what="a look at what is in its way",
                stage="start",
                deadline_s=STOP_DEADLINE_S,
            )
        except Starved:
            return
        shortage = self._short.get(engine.replica)
        if not going or shortage is None:
            return
        staying = [other for other in self._staying() if other.replica not in going]
        if not any(other.version is not None for other in staying):
            others_come = any(other.replica not in self._short for other in staying)
            if others_come or (shortage.may_grow and engine.replica not in self._refused):
                return
        for replica in going:
            if not self.all[replica].leaving:
                self._let_go(self.all[replica])

    def _look_after(self, engine: Engine) -> None:
        self._spawn(self.keep(engine))
        self._spawn(self.listen(engine))

    # ---- keep: every engine pulls the newest version -------------------------------------------------------

    def published(self, release: Release) -> None:
        self.release = release
        self._waits.changed("release")

    def failed(self, replica: int, incarnation: int, why: object) -> None:
        """This engine is out of rotation; its keeper starts another one. An earlier incarnation's end is no news."""
        engine = self.all.get(replica)
        if engine is None or engine.incarnation != incarnation or not incarnation:
            return
        engine.version, engine.incarnation = None, 0
        self._recorder.inc("headway_actor_restarts_total", label="generation")
        self._say(f"engine {replica} is replaced: {why}")
        self._waits.changed("engines", "fleet")

    def failed_with(self, death: ActorDied) -> None:
        if death.role == "generation":
            self.failed(death.replica, death.incarnation, death)

    async def keep(self, engine: Engine) -> None:
        """One engine until it leaves. Waits for: a newer release. Pulling means that an engine which starts late needs
        nothing but the newest one."""
        failures = 0
        while not engine.leaving:
            incarnation = engine.incarnation
            try:
                if not engine.incarnation:
                    await self._unless_leaving(engine, self._start(engine))
                    continue
                release = await self._next_release(engine)
                if release is None:
                    continue
                await self._waits.within(
                    self._crew.update_engine(engine.replica, release),
                    who=f"engine {engine.replica}",
                    what=f"weights of version {release.manifest.version}",
                    stage="weights",
                    deadline_s=self._config.generation.update_deadline_s,
                )
                if engine.incarnation == incarnation:
                    engine.version = release.manifest.version
                    self._offer(engine)
                    self._waits.changed("engines")
                    failures = 0
            except (ActorDied, ClusterError, Starved, WeightUpdateFailed) as failure:
                failures += 1
                if incarnation:
                    self._recorder.inc("headway_weight_sync_failures_total")
                    self.failed(engine.replica, incarnation, failure)
                elif not engine.leaving:
                    self._say(f"engine {engine.replica} did not start (attempt {failures}): {failure}")
                if failures > 1 and not engine.leaving:
                    pause_s = min(2.0**failures, LONGEST_PAUSE_S)
                    await self._unless_leaving(engine, asyncio.sleep(pause_s))
        await self._leave(engine)

    async def _unless_leaving(self, engine: Engine, way_up: Coroutine[Any, Any, None]) -> None:
        """Awaits what brings an engine up; ends when it is to leave meanwhile."""
        task = self._ways_up[engine.replica] = asyncio.ensure_future(way_up)
        try:
            await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if not engine.leaving or (own and own.cancelling()):
                raise
        finally:
            del self._ways_up[engine.replica]

    async def _start(self, engine: Engine) -> None:
        replica, gpus = engine.replica, self.gpus
        self.gpus_of[replica] = gpus
        generation, place_s = self._config.generation, self._crew.placement_deadline_s
        who, what = f"engine {replica}", "its processes to start"
        try:
            shortage = await self._waits.within(
                self._crew.place_engine(replica, gpus),
                who=who,
                what="a place",
                stage="start",
                deadline_s=place_s + STOP_DEADLINE_S,
            )
            if shortage is not None:
                self._short[replica], what = shortage, shortage.awaited
                self._say(f"engine {replica} waits for {shortage.awaited}")
                self._waits.changed("fleet")
            engine.incarnation = await self._waits.within(
                self._crew.start_engine(replica),
                who=who,
                what=what,
                stage="start",
                deadline_s=generation.start_deadline_s + place_s,
            )
            self._refused.discard(replica)
        except ClusterError:
            self._refused.add(replica)
            raise
        finally:
            self._short.pop(replica, None)
            self._waits.changed("fleet")

    async def _next_release(self, engine: Engine) -> Release | None:
        """A release that this engine lacks; None when it has failed or leaves, or to look again."""

        def news() -> Release | bool | None:
            if engine.leaving or not engine.incarnation:
                return False
            newest = self.release
            behind = newest is not None and (
                engine.version is None or engine.version < newest.manifest.version
            )
            return newest if behind else None

        try:
            found = await self._waits.until(
                news,
                who=f"engine {engine.replica}",
                what="a newer weight version",
                stage="weights",
                deadline_s=self._config.run.no_progress_deadline_s,
                on=("release", "fleet"),  # not every group that ends wakes every keeper
            )
        except Starved:
            return None  # whether that is a fault is for the progress deadline to say
        return found if isinstance(found, Release) else None

    async def listen(self, engine: Engine) -> None:
        """Asks for a report on every heartbeat: takes its metrics and adapts its concurrency. An engine that does not
        answer is replaced."""
        while self.all.get(engine.replica) is engine:
            await asyncio.sleep(self._config.metrics.heartbeat_s)
            incarnation = engine.incarnation
            if engine.version is None or not incarnation:
                continue
            try:
                report = await self._waits.within(
                    self._crew.report(engine.replica),
                    who="heartbeat",
                    what=f"engine {engine.replica}'s report",
                    stage="metrics",
                    deadline_s=self._config.generation.answer_deadline_s,
                )
            except (ActorDied, Starved) as failure:
                self.failed(engine.replica, incarnation, failure)
                continue
            limit = self._concurrency[engine.replica].observe(
                report.kv_cache_usage, report.preemptions, engine.running
            )
            if limit > engine.limit:
                engine.limit = limit
                self._offer(engine)
                self._waits.changed("engines")
            engine.limit = limit
            self._recorder.set("headway_engine_concurrency_groups", engine.limit, label=str(engine.replica))
            self._recorder.extend(report.updates)

    # ---- leave ---------------------------------------------------------------------------------------------

    async def _leave(self, engine: Engine) -> None:
        """Lets it finish its groups for a while, takes the unfinished ones from it, and ends it."""
        try:
            if engine.incarnation and not await self._idle(engine, self._config.generation.drain_s):
                await self._waits.within(
                    self._crew.hand_back(engine.replica),
                    who=f"engine {engine.replica}",
                    what="its unfinished groups to stop",
                    stage="engine",
                    deadline_s=STOP_DEADLINE_S,
                )
                await self._idle(engine, STOP_DEADLINE_S)
        except (ActorDied, Starved) as failure:
            self._say(f"engine {engine.replica} failed while it left: {failure}")
        engine.version = None
        try:
            await self._waits.within(
                self._crew.stop_engine(engine.replica),
                who=f"engine {engine.replica}",
                what="its processes to end",
                stage="engine",
                deadline_s=STOP_DEADLINE_S,
            )
        except (ActorDied, Starved) as failure:
            self._say(f"engine {engine.replica} did not end cleanly: {failure}")
        del self.all[engine.replica], self.gpus_of[engine.replica]
        self._refused.discard(engine.replica)
        self._on_left(engine.replica)
        self._say(f"engine {engine.replica} has left")
        self._waits.changed("engines", "fleet", "control")

    async def _idle(self, engine: Engine, deadline_s: float) -> bool:
        if not engine.running or not deadline_s:
            return not engine.running
        try:
            return await self._waits.until(
                lambda: not engine.running or None,
                who=f"engine {engine.replica}",
                what="its groups to end before it leaves",
                stage="engine",
                deadline_s=deadline_s,
                on=("engines",),
            )
        except Starved:
            return False

    @property
    def serving(self) -> int:
        return sum(engine.version is not None for engine in self.all.values())

    @property
    def is_settled(self) -> bool:
        """Whether all that are wanted serve, as they are wanted."""
        return self.serving == self.target and not self._replaces
