"""The journal of every prompt group: issued once, ends once, as trained or as dropped with a reason.

`issued = trained + dropped + live` holds after every record. A group's id is its position in the prompt stream,
so the ledger is also the position in the data.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError


class LedgerError(HeadwayError):
    """A group that ends twice, or ends without having been issued: a bug, never to be passed over."""


@dataclass(kw_only=True)
class Ledger:
    """In-memory state, mirrored record by record into a JSON-lines journal when `path` is given."""

    path: Path | None = None
    issued: int = 0
    """Groups ever issued; also the next group id."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    live: dict[int, str] = field(default_factory=dict)
    """group id -> `running` or `finished`."""

    def __post_init__(self) -> None:
        self._file = self.path.open("a", encoding="utf-8") if self.path else None

    def issue(self) -> int:
        """A new group; returns its id."""
        group_id = self.issued
        self.issued += 1
        self.live[group_id] = "running"
        self._write("issued", group=group_id)
        return group_id

    def finish(self, group_id: int) -> None:
        """The group lies in the queue."""
        self._expect(group_id, "running")
        self.live[group_id] = "finished"
        self._write("finished", group=group_id)

    def train(self, group_id: int, version: int) -> None:
        """The group was part of the step that made `version`."""
        self._expect(group_id, "finished")
        del self.live[group_id]
        self.trained += 1
        self._write("trained", group=group_id, version=version)

    def drop(self, group_id: int, reason: str) -> None:
        if group_id not in self.live:
            raise LedgerError(f"group {group_id} dropped ({reason}) but it is not live")
        del self.live[group_id]
        self.dropped[reason] += 1
        self._write("dropped", group=group_id, reason=reason)

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + self.dropped.total() + len(self.live)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "live": {str(group_id): state for group_id, state in self.live.items()},
        }

    @classmethod
    def resume(cls, state: dict[str, Any], *, path: Path | None, version: int) -> Ledger:
        """The ledger of a checkpoint. The journal goes on after a record that voids what came after it."""
        ledger = cls(
            path=path,
            issued=state["issued"],
            trained=state["trained"],
            dropped=Counter(state["dropped"]),
            live={int(group_id): kind for group_id, kind in state["live"].items()},
        )
        ledger._write("resumed", version=version, state=state)
        return ledger

    def restate(self, *, finished: set[int]) -> None:
        """Says anew which live groups are finished; the others run again."""
        self.live = {group_id: "finished" if group_id in finished else "running" for group_id in self.live}

    def sync(self) -> None:
        """Forces the journal to disk."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self.sync()
            self._file.close()
            self._file = None

    def _expect(self, group_id: int, state: str) -> None:
        if self.live.get(group_id) != state:
            raise LedgerError(f"group {group_id} is {self.live.get(group_id, 'not live')}, expected {state}")

    def _write(self, event: str, **fields: Any) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, "time": round(time.time(), 3), **fields}) + "\n")
            self._file.flush()


def trained_groups(journal: Path) -> dict[int, int]:
    """group id -> version of every group that is part of the final weights, read back from a journal."""
    trained: dict[int, int] = {}
    for line in journal.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["event"] == "trained":
            if record["group"] in trained:
                raise LedgerError(f"group {record['group']} was trained twice")
            trained[record["group"]] = record["version"]
        elif record["event"] == "resumed":
            trained = {group: version for group, version in trained.items() if version <= record["version"]}
    return trained
