"""The queue keeps tables by value, is idempotent, and its bounds are kept by reservation."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

from headway.cluster.queue import RolloutQueue, Room
from headway.core import rollouts
from headway.core.errors import HeadwayError


def table(group_id: int, version: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> pa.Table:
    return rollouts.build(
        {
            "rollout_id": f"{group_id}/{index}",
            "group_id": group_id,
            "prompt_id": "p",
            "sample_index": index,
            "prompt_ids": [1],
            "response_ids": [2, 3],
            "loss_mask": [1, 1],
            "behavior_logprobs": [-1.0, -2.0],
            "version_spans": [{"start": 0, "end": 2, "version": version}],
            "finish_reason": "stop",
            "truncated": False,
            "text": "ab",
            "reward": reward,
        }
        for index, reward in enumerate(rewards)
    )


def queue() -> RolloutQueue:
    return RolloutQueue(store=lambda t: t, load=lambda t: t)


async def test_put_take_release() -> None:
    q = queue()
    receipt = await q.put(table(4, version=3, rewards=(1.0, None)))
    assert (receipt.group_id, receipt.oldest_version, receipt.num_scored) == (4, 3, 1)
    assert receipt.response_lengths == (2, 2)
    assert (await q.take([4]))[0].equals(table(4, version=3, rewards=(1.0, None)))
    assert len(await q.take([4])) == 1  # still there until released: a learner that died may ask again
    await q.release([4, 99])
    with pytest.raises(HeadwayError, match=r"does not hold groups \[4\]"):
        await q.take([4])


async def test_a_receipt_says_whether_rewards_are_equal() -> None:
    q = queue()
    assert (await q.put(table(1, rewards=(1.0, 0.0)))).equal_reward is None
    assert (await q.put(table(2, rewards=(0.5, None, 0.5)))).equal_reward == 0.5
    assert (await q.put(table(3, rewards=(None, None)))).equal_reward is None
    assert (await q.put(table(4, rewards=(0.0, -0.0)))).equal_reward == 0.0
    two = rollouts.replace_column(table(5, rewards=(1.0, 0.0)), "agent_id", ["solver", "checker"])
    assert math.isnan((await q.put(two)).equal_reward)  # type: ignore[arg-type]


async def test_a_written_batch_holds_what_the_learner_appends(tmp_path: Path) -> None:
    q = queue()
    await q.put(table(1))
    await q.put(table(2, rewards=(None, 0.0, 1.0)))
    columns = pa.table({"advantages": pa.array([[float(i)] * 2 for i in range(5)], pa.list_(pa.float32()))})
    await q.write_batch([2, 1], str(tmp_path / "b.parquet"), 7, columns)
    written = rollouts.read_parquet(tmp_path / "b.parquet")
    assert written.column("group_id").to_pylist() == [2, 2, 2, 1, 1]
    assert written.column("advantages").to_pylist() == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]
    assert (written.schema.metadata or {})[b"version"] == b"7"


async def test_putting_a_group_again_changes_nothing() -> None:
    q = queue()
    first = await q.put(table(4, version=3))
    assert await q.put(table(4, version=9)) == first
    assert (await q.take([4]))[0].equals(table(4, version=3))


async def test_a_dropped_group_that_arrives_late_is_not_kept() -> None:
    q = queue()
    await q.drop(4)
    assert (await q.put(table(4))).group_id == 4
    with pytest.raises(HeadwayError, match=r"does not hold groups \[4\]"):
        await q.take([4])


async def test_content_survives_save_and_restore(tmp_path: Path) -> None:
    q = queue()
    for group_id in (5, 2):
        await q.put(table(group_id, version=group_id))
    await q.save(str(tmp_path / "queue.parquet"))
    restored = queue()
    receipts = await restored.restore(str(tmp_path / "queue.parquet"))
    assert sorted((r.group_id, r.oldest_version) for r in receipts) == [(2, 2), (5, 5)]
    assert (await restored.take([5]))[0].equals(table(5, version=5))


async def test_an_empty_queue_saves_and_restores(tmp_path: Path) -> None:
    await queue().save(str(tmp_path / "queue.parquet"))
    assert await queue().restore(str(tmp_path / "queue.parquet")) == []


async def test_a_table_of_another_schema_is_refused() -> None:
    with pytest.raises(rollouts.SchemaError, match="not a rollout table"):
        await queue().put(pa.table({"group_id": [1]}))


def test_running_groups_hold_the_place_that_they_will_need() -> None:
    room = Room(max_groups=3, max_bytes=1000, group_bytes=100)
    assert room.admits(running=2) and not room.admits(running=3)
    room.queued_groups = 2
    assert room.admits(running=0) and not room.admits(running=1)
    wide = Room(max_groups=100, max_bytes=1000, group_bytes=300, queued_bytes=250)
    assert wide.admits(running=1)  # 250 + 2 * 300
    assert not wide.admits(running=2)  # 250 + 3 * 300
