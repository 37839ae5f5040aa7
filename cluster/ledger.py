"""The journal of every prompt group: issued once, ends once, as trained or as dropped with a reason.

`issued = trained + dropped + live` holds after every record. A group's id is its position in the prompt stream,
so the ledger is also the position in the data.

Every record is one line, handed to the operating system in one write: a process that is killed leaves at most its last
line unfinished, without a newline. Whoever opens the journal again cuts that off.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError

_BLOCK = 1 << 16


class LedgerError(HeadwayError):
    """A group that ends twice, or ends without having been issued: a bug, never to be passed over. Or a journal that
    cannot be written or read."""


@dataclass(kw_only=True)
class Ledger:
    """In-memory state, mirrored record by record into a JSON-lines journal when `path` is given.

    Raises `LedgerError` when the journal cannot be written, naming it and the free space.
    """

    path: Path | None = None
    issued: int = 0
    """Groups ever issued; also the next group id."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    live: dict[int, str] = field(default_factory=dict)
    """group id -> `running` or `finished`."""
    observer: Callable[[str, Mapping[str, Any]], None] | None = field(default=None, compare=False, repr=False)
    """Is told every record: its event and its fields, time left out."""

    def __post_init__(self) -> None:
        self._file = None
        if self.path:
            try:
                self._file = self.path.open("ab", buffering=0)
                cut_torn_tail(self.path)
            except OSError as error:
                raise self._failure(error) from error

    def issue(self) -> int:
        """A new group; returns its id."""
        group_id = self.issued
        self.issued += 1
        self.live[group_id] = "running"
        self._write("issued", group=group_id)
        return group_id

    def restart(self, group_id: int) -> None:
        """An actor died with the group, which was dispatched anew."""
        self._expect(group_id, "running")
        self._write("restarted", group=group_id)

    def finish(self, group_id: int) -> None:
        """The group lies in the queue."""
        self._expect(group_id, "running")
        self.live[group_id] = "finished"
        self._write("finished", group=group_id)

    def lose(self, group_id: int) -> None:
        """The group's rows died with the queue: it runs again."""
        self._expect(group_id, "finished")
        self.live[group_id] = "running"
        self._write("lost", group=group_id)

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
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._failure(error) from error

    def close(self) -> None:
        if self._file:
            try:
                self.sync()
            finally:
                self._file.close()
                self._file = None

    def _expect(self, group_id: int, state: str) -> None:
        if self.live.get(group_id) != state:
            raise LedgerError(f"group {group_id} is {self.live.get(group_id, 'not live')}, expected {state}")

    def _write(self, event: str, **fields: Any) -> None:
        if self._file:
            line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}).encode() + b"\n"
            try:
                written = self._file.write(line)
            except OSError as error:
                raise self._failure(error) from error
            if written != len(line):  # the disk was full in the middle
                raise self._failure(f"{written} of {len(line)} bytes of a record were taken")
        if self.observer is not None:
            self.observer(event, fields)

    def _failure(self, cause: object) -> LedgerError:
        assert self.path is not None
        try:
            free = f"{shutil.disk_usage(self.path.parent).free / 2**20:.1f} MiB"
        except OSError as error:
            free = f"nobody can say how many bytes ({error})"
        return LedgerError(f"cannot write the journal {self.path}: {cause}; {free} are free there")


def trained_groups(journal: Path) -> dict[int, int]:
    """group id -> version of every group that is part of the final weights, read back from a journal.

    A last line without newline is what a killed process left, and is passed over. Raises `LedgerError` for a group that
    was trained twice, and for any other line that is no record, naming it.
    """
    trained: dict[int, int] = {}
    with journal.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                event = record["event"]
                if event == "trained":
                    group_id, version = record["group"], record["version"]
                    if group_id in trained:
                        raise LedgerError(f"group {group_id} was trained twice")
                    trained[group_id] = version
                elif event == "resumed":
                    resumed_at = record["version"]
                    trained = {
                        group_id: version for group_id, version in trained.items() if version <= resumed_at
                    }
            except (ValueError, KeyError, TypeError) as error:
                raise LedgerError(f"{journal} line {number} is no record: {line[:80]!r}") from error
    return trained


def cut_torn_tail(path: Path) -> None:
    """Removes a last line without newline."""
    with path.open("r+b") as file:
        keep = end = file.seek(0, os.SEEK_END)
        while keep:
            start = max(0, keep - _BLOCK)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            keep = start + newline + 1
            if newline >= 0:
                break
        if keep < end:
            file.truncate(keep)
