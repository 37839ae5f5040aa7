"""How many replicas each group of scorers has: what the run's own rule or a person wants, and the way there."""

from __future__ import annotations

from headway.cluster.elastic import Backlog
from headway.cluster.part import Part, Shared
from headway.core.errors import ActorDied, ClusterError, Starved

LEAVING_S = 60.0
"""For a replica that leaves, with the groups that it has."""


class Scorers(Part):
    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        config, crew = shared.config, shared.crew
        self._deadline_s = crew.placement_deadline_s + config.generation.start_deadline_s + LEAVING_S
        self.targets = {role: crew.replicas[role] for role in crew.elastic}
        self._moving: set[str] = set()
        verifiers = config.verifiers
        self._rules: dict[str, Backlog] = {}
        if verifiers.max_replicas is not None:
            lowest = verifiers.min_replicas or verifiers.replicas
            self._rules["verifiers"] = Backlog(lowest, verifiers.max_replicas, places=verifiers.processes)

    def scale(self, role: str, replicas: int) -> None:
        """Sets how many there are to be."""
        self.targets[role] = replicas
        if role not in self._moving:
            self._moving.add(role)
            self._spawn(self._move(role))

    def beat(self) -> None:
        """To be called on every heartbeat."""
        for role, target in self.targets.items():
            waiting = self._crew.backlog(role)
            self._recorder.set("headway_scorer_groups", waiting, label=role)
            if role in self._rules and role not in self._moving:
                wanted = self._rules[role].observe(waiting, target)
                if wanted != target:
                    self.scale(role, wanted)

    async def _move(self, role: str) -> None:
        try:
            while (target := self.targets[role]) != (present := self._crew.replicas[role]):
                try:
                    await self._waits.within(
                        self._crew.resize(role, target),
                        who="scorers",
                        what=f"{target} {role} instead of {present}",
                        stage="replacement",
                        deadline_s=self._deadline_s,
                    )
                except (ActorDied, ClusterError, Starved) as failure:
                    self._say(f"{role} stay {self._crew.replicas[role]}: {failure}")
                    self.targets[role] = self._crew.replicas[role]
                else:
                    self._say(f"{role}: {present} -> {target}")
        finally:
            self._moving.discard(role)
