"""The stages between an engine and the queue: verifiers, reference, critic. Each appends its columns to a group's
table; what passes between them are references, never rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from headway.cluster.placement import Placement
from headway.core.config import Config
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt


class Scorers:
    """The scoring actors that this algorithm needs. Those that hold no state of the run are replaced when they die."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        model_folder: str,
        recorder: Recorder,
        say: Callable[[str], None],
    ) -> None:
        self._placement = placement
        self._model_folder = model_folder
        self._recorder = recorder
        self._say = say
        self.actors: dict[str, list[Any]] = {
            "verifiers": [self._start("verifiers", replica) for replica in range(config.verifiers.replicas)]
        }
        if config.algorithm.needs_reference:
            self.actors["reference"] = [
                self._start("reference", replica) for replica in range(config.reference.replicas)
            ]
        if config.algorithm.needs_critic:
            self.actors["critic"] = [self._start("critic", 0)]
        self._stateful = {"critic"} | ({"reference"} if config.algorithm.reference_refresh_steps else set())

    def _start(self, role: str, replica: int) -> Any:
        match role:
            case "verifiers":
                return self._placement.verifier(replica)
            case "reference":
                return self._placement.reference(replica, self._model_folder)
            case _:
                return self._placement.critic(self._model_folder)

    @property
    def critic(self) -> Any | None:
        return self.actors["critic"][0] if "critic" in self.actors else None

    def score(self, table: Any, prompt: Prompt, group_id: int) -> Any:
        """Sends a table through every stage; returns a reference to what comes out."""
        for role, actors in self.actors.items():
            actor = actors[group_id % len(actors)]
            table = actor.score.remote(table, prompt) if role == "verifiers" else actor.score.remote(table)
        return table

    def replace_dead(self, failure: RayActorError) -> None:
        """Replaces the actor whose death this is. Weights that the run has changed died with it: then the failure is
        raised again."""
        for role, actors in self.actors.items():
            for replica, actor in enumerate(actors):
                if not died(failure, actor):
                    continue
                if role in self._stateful:
                    raise failure
                self._placement.discard(actor)
                actors[replica] = self._start(role, replica)
                self._recorder.inc("headway_actor_restarts_total", label=role)
                self._say(f"{role.removesuffix('s')} {replica} is replaced")

    async def drain_updates(self, call: Callable[..., Any]) -> list[Update]:
        """Metric updates of the verifiers; dead ones are replaced. (The other scorers do one thing at a time and may be
        at it for long; that one of them died shows in the groups it had.)"""
        updates: list[Update] = []
        for replica, actor in enumerate(list(self.actors["verifiers"])):
            try:
                updates += await call(actor.drain_updates.remote(), f"verifier {replica}'s metrics")
            except RayActorError as failure:
                self.replace_dead(failure)
        return updates

    @property
    def changing(self) -> dict[str, list[Any]]:
        """Actors by role whose weights change during the run; the replicas of a role hold the same."""
        return {role: actors for role, actors in self.actors.items() if role in self._stateful}

    def close(self) -> list[Any]:
        """Ends the verifiers' processes; references to wait for."""
        return [actor.close.remote() for actor in self.actors["verifiers"]]


def died(failure: Exception, actor: Any) -> bool:
    """Whether this failure is the death of this actor."""
    return getattr(failure, "actor_id", None) == actor._actor_id.hex()
