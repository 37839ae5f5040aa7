"""Finished groups between the scorers and the learner.

A table arrives by value; the queue puts it into the object store itself, so the queue owns it and the rows
outlive whoever made them. What it hands out are its own references. It never refuses and never blocks a finished
group: the bounds in groups and bytes are kept at admission (`Room`), where slowing down costs nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from headway.core import rollouts
from headway.core.errors import HeadwayError
from headway.learner.checkpoint import writing

MAX_REFUSED = 10_000
"""Groups whose late arrival is still refused: by the time that so many others were refused, whoever made them is gone.
One that arrives even later lies in `held()` until it is released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What the control plane knows of a finished group; the rows stay in the object store."""

    group_id: int
    num_bytes: int = field(compare=False)
    """The same rows may take another room after a round trip through a file."""
    oldest_version: int
    """Of the token that was sampled by the oldest weights."""
    newest_version: int
    """Of the token that was sampled by the newest weights."""
    rewards: tuple[float, ...]
    """Of scored responses."""
    response_lengths: tuple[int, ...]
    """Tokens of each response."""
    equal_reward: float | None = field(compare=False)
    """The reward of all scored responses of every agent, where each agent's are equal: such a group carries no
    signal. None where they differ; NaN where agents differ from one another, which is
    never equal to itself."""
    parts: dict[str, tuple[float, int]] = field(default_factory=dict, compare=False)
    """Of the rewards, by name: sum and number."""
    reasons: dict[str, int] = field(default_factory=dict, compare=False)
    """Of the verdicts: how many responses have each."""

    @property
    def num_scored(self) -> int:
        return len(self.rewards)

    @property
    def reward_sum(self) -> float:
        return sum(self.rewards)


def receipt_of(table: pa.Table) -> Receipt:
    """Checks a rollout table and says what the control plane needs to know of it. Raises `SchemaError`."""
    rollouts.validate(table)
    return Receipt(
        group_id=table.column("group_id")[0].as_py(),
        num_bytes=table.nbytes,
        oldest_version=rollouts.oldest_version(table),
        newest_version=rollouts.newest_version(table),
        rewards=tuple(reward for reward in table.column("reward").to_pylist() if reward is not None),
        response_lengths=tuple(rollouts.lengths(table, "response_ids")),
        equal_reward=_equal_reward(table),
        parts=_parts(table),
        reasons=dict(Counter(reason for reason in table.column("verdict_reason").to_pylist() if reason)),
    )


def _parts(table: pa.Table) -> dict[str, tuple[float, int]]:
    values: dict[str, list[float]] = {}
    for row in table.column("reward_parts").to_pylist():
        for part in row or ():
            values.setdefault(part["name"], []).append(part["value"])
    return {name: (sum(found), len(found)) for name, found in values.items()}


@dataclass(kw_only=True)
class Room:
    """Bounds of the queue, kept by reservation: a running group holds the place that it will need."""

    max_groups: int
    max_bytes: int
    group_bytes: int
    """Upper estimate of one group's size."""
    queued_groups: int = 0
    queued_bytes: int = 0

    def admits(self, running: int) -> bool:
        """Whether one more group may start while `running` others are on their way."""
        groups = self.queued_groups + running + 1
        return (
            groups <= self.max_groups
            and self.queued_bytes + (running + 1) * self.group_bytes <= self.max_bytes
        )


class RolloutQueue:
    """Holds the rows of finished groups by group id. `store` turns rows into a reference (Ray's `put`), and may raise
    `StoreFull`; `load` turns it back; `receipt` reads what the control plane needs. What rows are is theirs to know:
    only `save`, `restore` and `write_batch` need Arrow tables."""

    def __init__(
        self,
        store: Callable[[Any], Any],
        load: Callable[[Any], Any],
        receipt: Callable[[Any], Receipt] = receipt_of,
    ) -> None:
        self._store = store
        self._load = load
        self._receipt = receipt
        self._groups: dict[int, tuple[Receipt, Any]] = {}
        self._refused: dict[int, None] = {}
        """In the order in which they were refused."""

    async def put(self, rows: Any) -> Receipt:
        """Takes a group over. The same group again is the same receipt: retries change nothing. When the store is full
        the group is not taken, and the same call may succeed later."""
        receipt = self._receipt(rows)
        group_id = receipt.group_id
        if group_id in self._groups:
            return self._groups[group_id][0]
        if group_id not in self._refused:
            self._groups[group_id] = (receipt, self._store(rows))
        return receipt

    async def take(self, group_ids: list[int]) -> list[Any]:
        """References of these groups' rows. They stay here until `release`."""
        if missing := [group_id for group_id in group_ids if group_id not in self._groups]:
            raise HeadwayError(f"the queue does not hold groups {missing}")
        return [self._groups[group_id][1] for group_id in group_ids]

    async def held(self) -> list[int]:
        """Ids of the groups that are here."""
        return list(self._groups)

    async def release(self, group_ids: list[int]) -> None:
        """Forgets groups that were trained or dropped; unknown ones are no error."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def refuse(self, group_id: int) -> None:
        """Forgets a group that was dropped, also should it still arrive."""
        self._groups.pop(group_id, None)
        self._refused.pop(group_id, None)
        self._refused[group_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    async def save(self, path: str) -> None:
        """Writes everything that waits to one Parquet file."""
        references = [reference for _, reference in self._groups.values()]
        await asyncio.to_thread(self._write, references, path, dict[bytes, bytes]())

    async def restore(self, path: str, only: Collection[int] | None = None) -> list[Receipt]:
        """Takes over what `save` wrote: all of it, or of `only` these groups."""
        table = rollouts.read_parquet(Path(path))
        rows: dict[int, list[int]] = {}
        for row, group_id in enumerate(table.column("group_id").to_pylist()):
            if only is None or group_id in only:
                rows.setdefault(group_id, []).append(row)
        return [await self.put(table.take(of_group)) for of_group in rows.values()]

    async def write_batch(
        self, group_ids: list[int], path: str, version: int, columns: pa.Table | None = None
    ) -> None:
        """Keeps a trained batch as Parquet, tagged with the version that its last step made. `columns`: what the
        learner appends, a row per response of the groups in this order."""
        references = [self._groups[group_id][1] for group_id in group_ids]
        extra = {b"version": str(version).encode()}
        await asyncio.to_thread(self._write, references, path, extra, columns)

    def _write(
        self, references: list[Any], path: str, extra: dict[bytes, bytes], columns: pa.Table | None = None
    ) -> None:
        tables = [self._load(reference) for reference in references]
        table = pa.concat_tables(tables) if tables else rollouts.SCHEMA.empty_table()
        if columns is not None:
            for name in columns.column_names:
                place = table.schema.get_field_index(name)
                table = table.set_column(place, rollouts.SCHEMA.field(name), columns.column(name))
        with writing(Path(path)):
            rollouts.write_parquet(
                table.replace_schema_metadata({**(table.schema.metadata or {}), **extra}), Path(path)
            )

    async def ping(self) -> bool:
        return True


def _equal_reward(table: pa.Table) -> float | None:
    rewards: dict[str | None, set[float]] = {}
    for agent_id, reward in zip(
        table.column("agent_id").to_pylist(), table.column("reward").to_pylist(), strict=True
    ):
        if reward is not None:
            rewards.setdefault(agent_id, set()).add(reward)
    if not rewards or any(len(values) > 1 for values in rewards.values()):
        return None
    values = set.union(*rewards.values())
    return values.pop() if len(values) == 1 else math.nan


def group_bytes(num_rows: int, prompt_tokens: int, response_tokens: int) -> int:
    """Upper estimate of a group's table: ids, log-probabilities, masks, four columns to come, and text."""
    return num_rows * (prompt_tokens * 4 + response_tokens * (4 + 4 + 1 + 4 * 4 + 8) + 1024)
