"""Failures as typed data. A user's mistake exits 2 and says what to change; a bad rollout is a row with a
reason; everything else is a bug and crashes."""

from __future__ import annotations


class HeadwayError(Exception):
    """Base of every error that this project raises on purpose."""


class UserError(HeadwayError):
    """Something that the person at the terminal can change. The command line prints it and exits 2."""


class ConfigError(UserError):
    """A configuration value that is unknown, out of range, or at odds with another."""


class DataError(UserError):
    """A dataset or model folder that is missing, empty, or does not hold what it should."""


class ClusterError(UserError):
    """The cluster cannot hold what the configuration asks for."""


class NoSignal(UserError):
    """Dynamic sampling found only groups with equal rewards: there is nothing to learn from these prompts."""


class SchemaError(HeadwayError):
    """A rollout table that does not follow the schema, or follows one that this version cannot read."""


class RolloutFailed(HeadwayError):
    """One group could not be generated or scored. `reason` is a short label, used as a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class WeightUpdateFailed(HeadwayError):
    """An engine did not take a complete, verified weight version; it must not serve until it does."""


class EngineDead(HeadwayError):
    """The engine behind an actor of this role is gone, though the actor still answers."""

    def __init__(self, role: str, replica: int) -> None:
        super().__init__(role, replica)
        self.role = role
        self.replica = replica

    def __str__(self) -> str:
        return f"the engine of {self.role} {self.replica} is dead"


class Starved(HeadwayError):
    """A wait passed its deadline. The message says who waited for whom and for how long."""


class Closed(HeadwayError):
    """The run is shutting down; whoever waited is released with this."""


class ActorDied(HeadwayError):
    """An actor, or the node under it, is gone. `incarnation` counts the actors that this replica has had: a report
    about an earlier one than the present says nothing new."""

    def __init__(self, role: str, replica: int, incarnation: int, detail: str = "") -> None:
        super().__init__(role, replica, incarnation, detail)
        self.role = role
        self.replica = replica
        self.incarnation = incarnation
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.role} {self.replica} died{f': {self.detail}' if self.detail else ''}"


class Lost(HeadwayError):
    """State of the run died with an actor: only a checkpoint brings it back."""


class HandedBack(HeadwayError):
    """The engine leaves the run and has stopped this group; what it has of it can be fetched and continued."""


class StoreFull(HeadwayError):
    """The object store took nothing more, neither memory nor disk; the same call may succeed later."""
