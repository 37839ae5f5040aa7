"""Finished groups between the scorers and the learner.

A table arrives by value; the queue puts it into the object store itself, so the queue owns it and the rows
outlive whoever made them. What it hands out are its own references. It never refuses and never blocks a finished
group: the bounds in groups and bytes are kept at admission (`Room`), where slowing down costs nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headway.core import rollouts
from headway.core.errors import HeadwayError


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What the control plane knows of a finished group; the rows stay in the object store."""

    group_id: int
    num_bytes: int
    oldest_version: int
    num_scored: int
    reward_sum: float
    """Of scored responses."""
    response_lengths: tuple[int, ...]
    """Tokens of each response."""
    equal_reward: float | None
    """The reward of all scored responses of every agent, where each agent's are equal: such a group carries no
    signal. None where they differ; NaN where agents differ from one another."""


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
    """Holds tables by group id. `store` turns a table into a reference (Ray's `put`); `load` turns it back."""

    def __init__(self, store: Callable[[pa.Table], Any], load: Callable[[Any], pa.Table]) -> None:
        self._store = store
        self._load = load
        self._groups: dict[int, tuple[Receipt, Any]] = {}
        self._dropped: set[int] = set()

    async def put(self, table: pa.Table) -> Receipt:
        """Takes a group over. The same group again is the same receipt: retries change nothing."""
        group_id = table.column("group_id")[0].as_py()
        if group_id in self._groups:
            return self._groups[group_id][0]
        rollouts.validate(table)
        receipt = Receipt(
            group_id=group_id,
            num_bytes=table.nbytes,
            oldest_version=rollouts.oldest_version(table),
            num_scored=table.num_rows - table.column("reward").null_count,
            reward_sum=sum(reward for reward in table.column("reward").to_pylist() if reward is not None),
            response_lengths=tuple(rollouts.lengths(table, "response_ids")),
            equal_reward=_equal_reward(table),
        )
        if group_id not in self._dropped:
            self._groups[group_id] = (receipt, self._store(table))
        return receipt

    async def take(self, group_ids: list[int]) -> list[Any]:
        """References of these groups' tables. They stay here until `release`."""
        if missing := [group_id for group_id in group_ids if group_id not in self._groups]:
            raise HeadwayError(f"the queue does not hold groups {missing}")
        return [self._groups[group_id][1] for group_id in group_ids]

    async def release(self, group_ids: list[int]) -> None:
        """Forgets groups that were trained; unknown ones are no error."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def drop(self, group_id: int) -> None:
        """Forgets a group that was dropped, also should it still arrive."""
        self._groups.pop(group_id, None)
        self._dropped.add(group_id)

    async def save(self, path: str) -> None:
        """Writes everything that waits to one Parquet file."""
        references = [reference for _, reference in self._groups.values()]
        await asyncio.to_thread(self._write, references, path, dict[bytes, bytes]())

    async def restore(self, path: str) -> list[Receipt]:
        """Takes over what `save` wrote."""
        table = rollouts.read_parquet(Path(path))
        ids = table.column("group_id").to_pylist()
        groups = [
            table.filter(pa.array([other == group_id for other in ids])) for group_id in dict.fromkeys(ids)
        ]
        return [await self.put(group) for group in groups]

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
