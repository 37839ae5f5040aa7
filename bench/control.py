"""The control plane alone: the driver's books, with their journal, without actors or an event loop.

    python bench/control.py [GROUPS]

Every group is issued, finishes in random order, and is trained; after each the books are asked for a batch, as the driver
asks them. Prints groups per second of processor time (one thread) with few and with many live groups, and by how much memory
grows over GROUPS (10^6) groups.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headway.cluster.groups import Groups
from headway.cluster.queue import Receipt
from headway.cluster.state import Group
from headway.core.config import parse_config
from headway.core.metrics import Recorder

RESPONSES = 8
RECEIPTS = 1000
"""Different receipts, drawn in turn, so that making them is no part of the time."""

HEARTBEAT = 50
"""Steps between two collections of the metrics."""


def receipts(rng: random.Random) -> list[tuple[tuple[float, ...], tuple[int, ...]]]:
    """Rewards and lengths of a group's responses."""
    return [
        (
            tuple(rng.random() for _ in range(RESPONSES)),
            tuple(min(16_384, int(rng.lognormvariate(6.5, 1.0))) + 1 for _ in range(RESPONSES)),
        )
        for _ in range(RECEIPTS)
    ]


def lifecycle(journal: Path, groups_per_step: int, max_version_lag: int, policy: str) -> Iterator[int]:
    """Yields after every trained batch how many groups were trained so far."""
    config = parse_config(
        {
            "run": {"steps": 10**9},
            "sampling": {"group_size": RESPONSES, "max_new_tokens": 16_384},
            "learner": {"groups_per_step": groups_per_step},
            "lag": {"max_version_lag": max_version_lag, "policy": policy},
            "queue": {"max_groups": 10**6, "max_mib": 10**6},
        }
    )
    rng, recorder = random.Random(0), Recorder()
    made = receipts(rng)
    books = Groups.new(config, 512, journal, recorder)
    running: list[Group] = []
    version = 0
    while True:
        while books.gate.capacity(version) > 0 and books.room.admits(books.gate.running):
            running.append(books.issue(version, lambda group_id: f"task {group_id % 5}", 0.0))
        place = rng.randrange(len(running))
        running[place], running[-1] = running[-1], running[place]
        group = running.pop()
        rewards, lengths = made[group.group_id % RECEIPTS]
        receipt = Receipt(
            group_id=group.group_id,
            num_bytes=10**6,
            oldest_version=group.since_version,
            newest_version=version,
            rewards=rewards,
            response_lengths=lengths,
            equal_reward=None,
        )
        assert books.finish(group, receipt, version) is None
        cut = books.cut(version)
        for group_id in cut.stale:
            books.drop(books.live[group_id], "stale")
        if cut.take:
            books.train([books.live[group_id] for group_id in cut.take], version)
            version += 1
            books.audit.record()
            if version % HEARTBEAT == 0:
                books.observe()
                recorder.drain()
            yield books.ledger.trained


def rate(folder: Path, groups_per_step: int, max_version_lag: int, policy: str) -> float:
    """Groups per second over two seconds, from when every version that the bound allows is in flight."""
    books = lifecycle(folder / f"{policy}-{groups_per_step}.jsonl", groups_per_step, max_version_lag, policy)
    first = max(next(books) for _ in range(max_version_lag + 1))
    began = time.process_time()
    for trained in books:
        elapsed = time.process_time() - began
        if elapsed > 2.0:
            return (trained - first) / elapsed
    raise AssertionError


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_mib(folder: Path, num_groups: int) -> float:
    """By how much memory grows from the first tenth to the last of `num_groups` groups."""
    before = None
    for trained in lifecycle(folder / "long.jsonl", 32, 3, "pace"):
        if before is None and trained >= num_groups // 10:
            before = resident_mib()
        if trained >= num_groups:
            assert before is not None
            return resident_mib() - before
    raise AssertionError


def main() -> None:
    num_groups = int(sys.argv[1]) if len(sys.argv) > 1 else 10**6
    with tempfile.TemporaryDirectory(prefix="headway-control-") as name:
        folder = Path(name)
        # First, while there is no freed memory that growth could hide in.
        grown = growth_mib(folder, num_groups)
        print(f"memory over {num_groups:,} groups: {grown:+.1f} MiB (target: 5 at most)", flush=True)
        for groups_per_step, lag in ((4, 1), (500, 15)):
            for policy in ("pace", "drop", "withhold"):
                found = rate(folder, groups_per_step, lag, policy)
                live = groups_per_step * (lag + 1)
                print(f"{live:,} live groups, {policy}: {found:,.0f} groups/s (target: 5,000)", flush=True)


if __name__ == "__main__":
    main()
