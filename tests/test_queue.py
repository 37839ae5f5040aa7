"""The queue keeps tables by value, is idempotent, and its bounds are kept by reservation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headway.cluster.queue import MAX_REFUSED, Receipt, RolloutQueue, Room
from headway.core import rollouts
from headway.core.errors import HeadwayError, StoreFull


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
    receipt = await q.put(table(4, version=3, rewards=(1.0, None, 0.5)))
    assert (receipt.group_id, receipt.oldest_version, receipt.newest_version) == (4, 3, 3)
    assert (receipt.rewards, receipt.num_scored, receipt.reward_sum) == ((1.0, 0.5), 2, 1.5)
    assert receipt.response_lengths == (2, 2, 2)
    assert (await q.take([4]))[0].equals(table(4, version=3, rewards=(1.0, None, 0.5)))
    assert len(await q.take([4])) == 1  # still there until released: a learner that died may ask again
    assert await q.held() == [4]
    await q.release([4, 99])
    assert await q.held() == []
    with pytest.raises(HeadwayError, match=r"does not hold groups \[4\]"):
        await q.take([4])


async def test_a_receipt_has_the_oldest_and_the_newest_version_of_all_responses() -> None:
    spans = [
        [{"start": 0, "end": 1, "version": 5}, {"start": 1, "end": 2, "version": 8}],
        [{"start": 0, "end": 2, "version": 6}],
    ]
    receipt = await queue().put(rollouts.replace_column(table(1), "version_spans", spans))
    assert (receipt.oldest_version, receipt.newest_version) == (5, 8)


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


async def test_a_refused_group_that_arrives_late_is_not_kept() -> None:
    q = queue()
    await q.refuse(4)
    for _ in range(2):  # its put may have been tried twice
        assert (await q.put(table(4))).group_id == 4
    assert await q.held() == []
    await q.put(table(5))
    await q.refuse(5)
    assert await q.held() == []


def light(group_id: int) -> Receipt:
    return Receipt(
        group_id=group_id,
        num_bytes=1,
        oldest_version=0,
        newest_version=0,
        rewards=(),
        response_lengths=(1,),
        equal_reward=None,
    )


async def test_rows_may_be_anything_that_has_a_receipt_and_refusals_do_not_pile_up() -> None:
    q = RolloutQueue(store=str, load=int, receipt=light)
    await q.put(7)
    assert await q.take([7]) == ["7"]
    for group_id in range(100, 100 + MAX_REFUSED):
        await q.refuse(group_id)
    await q.put(100)
    assert await q.held() == [7]
    await q.refuse(100)  # again: now it is the last to be forgotten
    await q.refuse(50)
    for group_id in (100, 101, 102):
        await q.put(group_id)
    assert await q.held() == [7, 101]  # one refusal too many: the oldest was forgotten
    await q.release(await q.held())
    assert await q.held() == []


async def test_a_full_store_takes_nothing_and_the_same_group_may_come_again() -> None:
    room: list[Any] = []

    def store(rows: int) -> int:
        if len(room) == 1:
            raise StoreFull("1 of 1 used")
        room.append(rows)
        return rows

    q = RolloutQueue(store=store, load=int, receipt=light)
    await q.put(1)
    with pytest.raises(StoreFull, match="1 of 1 used"):
        await q.put(2)
    assert await q.held() == [1]
    room.clear()
    assert (await q.put(2)).group_id == 2
    assert await q.held() == [1, 2]


async def test_content_survives_save_and_restore(tmp_path: Path) -> None:
    q = queue()
    before = [
        await q.put(table(group_id, version=group_id, rewards=(0.1, None, 1.0))) for group_id in (5, 2, 9)
    ]
    await q.save(str(tmp_path / "queue.parquet"))
    restored = queue()
    receipts = await restored.restore(str(tmp_path / "queue.parquet"))
    assert receipts == before  # so that whoever has the old receipt sees that the rows are the same
    assert [receipt.group_id for receipt in receipts] == [5, 2, 9]
    assert (await restored.take([5]))[0].equals(table(5, version=5, rewards=(0.1, None, 1.0)))


async def test_an_empty_queue_saves_and_restores(tmp_path: Path) -> None:
    await queue().save(str(tmp_path / "queue.parquet"))
    assert await queue().restore(str(tmp_path / "queue.parquet")) == []


async def test_a_table_of_another_schema_is_refused() -> None:
    q = queue()
    with pytest.raises(rollouts.SchemaError, match="not a rollout table"):
        await q.put(pa.table({"group_id": [1]}))
    assert await q.held() == []


def test_running_groups_hold_the_place_that_they_will_need() -> None:
    room = Room(max_groups=3, max_bytes=1000, group_bytes=100)
    assert room.admits(running=2) and not room.admits(running=3)
    room.queued_groups = 2
    assert room.admits(running=0) and not room.admits(running=1)
    wide = Room(max_groups=100, max_bytes=1000, group_bytes=300, queued_bytes=250)
    assert wide.admits(running=1)  # 250 + 2 * 300
    assert not wide.admits(running=2)  # 250 + 3 * 300
