"""The data path alone: tables from producers through the queue actor to a consumer, on a local Ray.

    python bench/queue_hop.py

Prints the time of one hop (put by value, take, read without a copy) for a group of 8 x 4096 tokens, groups per second
with two producers, and that the rows outlive their producer.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from headway.cluster.joining import connect, disconnect
from headway.cluster.placement import store_table
from headway.cluster.queue import RolloutQueue
from headway.core import rollouts
from headway.core.config import parse_config
from headway.core.rollouts import SCHEMA

ROWS, TOKENS, GROUPS = 8, 4096, 600
IN_FLIGHT, BATCH = 32, 8


def group(group_id: int) -> pa.Table:
    ids = np.arange(TOKENS, dtype=np.int32)
    logprobs = np.full(TOKENS, -1.0, dtype=np.float32)
    mask = np.ones(TOKENS, dtype=np.uint8)
    return rollouts.build(
        {
            "rollout_id": f"{group_id}/{index}",
            "group_id": group_id,
            "prompt_id": str(group_id),
            "sample_index": index,
            "prompt_ids": ids[:512],
            "response_ids": ids,
            "loss_mask": mask,
            "behavior_logprobs": logprobs,
            "version_spans": [{"start": 0, "end": TOKENS, "version": 0}],
            "finish_reason": "length",
            "truncated": True,
            "text": "x" * TOKENS,
            "reward": 1.0,
        }
        for index in range(ROWS)
    )


class Producer:
    """Puts prebuilt tables into the queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._template = group(0)

    async def produce(self, group_id: int) -> int:
        table = rollouts.replace_column(self._template, "group_id", [group_id] * ROWS)
        receipt = await self._queue.put.remote(table)
        return receipt.group_id


def main() -> None:
    config = parse_config({"run": {"name": "bench-queue"}, "metrics": {"port": 0}})
    connect(config)
    actor: Any = ray.remote(RolloutQueue).options(num_cpus=0, max_concurrency=10_000)
    queue = actor.remote(store_table, ray.get)
    ray.get(queue.__ray_ready__.remote())
    table = group(0)
    print(
        f"one group: {ROWS} x {TOKENS} tokens, {table.nbytes / 2**20:.2f} MiB, schema of {len(SCHEMA)} columns"
    )
    get: Any = ray.get
    puts, takes = [], []
    for number in range(50):
        one = rollouts.replace_column(table, "group_id", [number] * ROWS)
        began = time.perf_counter()
        get(queue.put.remote(one))
        put = time.perf_counter()
        (reference,) = get(queue.take.remote([number]))
        read = get(reference)
        read.column("response_ids").chunk(0).flatten().to_numpy()
        takes.append(time.perf_counter() - put)
        puts.append(put - began)
        get(queue.release.remote([number]))
    print(
        f"put {statistics.median(puts) * 1e3:.1f} ms, take and read {statistics.median(takes) * 1e3:.1f} ms (medians of 50)"
    )
    remote: Any = ray.remote(Producer).options(num_cpus=0)
    producers = [remote.remote(queue) for _ in range(2)]
    get([producer.produce.remote(1_000_000 + n) for n, producer in enumerate(producers)])
    began = time.perf_counter()
    pending = [producers[n % 2].produce.remote(n) for n in range(IN_FLIGHT)]
    issued = IN_FLIGHT
    taken = 0
    while taken < GROUPS:
        ready, pending = ray.wait(pending, num_returns=min(BATCH, len(pending)), timeout=60)
        group_ids = get(ready)
        get(get(queue.take.remote(group_ids)))
        queue.release.remote(group_ids)
        taken += len(ready)
        more = min(len(ready), GROUPS - issued)
        pending += [producers[n % 2].produce.remote(n) for n in range(issued, issued + more)]
        issued += more
    print(f"two producers, one consumer: {GROUPS / (time.perf_counter() - began):.0f} groups/s")
    get(producers[0].produce.remote(7))
    for producer in producers:
        ray.kill(producer)
    (reference,) = get(queue.take.remote([7]))
    print(f"rows after the producers died: {get(reference).num_rows}")
    disconnect()


if __name__ == "__main__":
    main()
