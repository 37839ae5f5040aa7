"""The driver's books: ledger, gate, room and audits say the same at every moment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.groups import Groups
from headway.cluster.queue import Receipt
from headway.core.config import Config, parse_config
from headway.core.metrics import Recorder


def config(**algorithm: Any) -> Config:
    return parse_config(
        {
            "run": {"steps": 50},
            "sampling": {"group_size": 4},
            "learner": {"groups_per_step": 2},
            "lag": {"max_version_lag": 2},
            "algorithm": {"dynamic_sampling": True, "dynamic_sampling_tries": 2, **algorithm},
        }
    )


def receipt(group_id: int, *, version: int = 0, equal: float | None = None, scored: int = 4) -> Receipt:
    return Receipt(
        group_id=group_id,
        num_bytes=100,
        oldest_version=version,
        num_scored=scored,
        reward_sum=scored * (0.5 if equal is None else equal),
        response_lengths=(2, 4, 6, 8),
        equal_reward=equal,
    )


def books(tmp_path: Path, settings_: Config | None = None) -> Groups:
    return Groups.new(settings_ or config(), 10, tmp_path / "ledger.jsonl", Recorder())


def test_a_group_with_equal_rewards_gives_its_place_back(tmp_path: Path) -> None:
    groups = books(tmp_path)
    before = groups.gate.capacity(0)
    solved, mixed = groups.issue(0), groups.issue(0)
    assert groups.gate.capacity(0) == before - 2
    assert groups.finish(solved, receipt(0, equal=1.0), 0) == "no_signal"
    groups.drop(solved, "no_signal")
    assert groups.finish(mixed, receipt(1), 0) is None
    assert groups.gate.capacity(0) == before - 1
    assert (groups.room.queued_groups, groups.room.queued_bytes) == (1, 100)
    assert groups.ledger.dropped == {"no_signal": 1} and groups.ledger.balanced
    assert groups.take_sampled_reward() == 1.0  # the mixed one has not ended yet
    other = groups.issue(0)
    groups.finish(other, receipt(2), 0)
    groups.train([mixed, other], 0)
    assert groups.take_sampled_reward() == 0.5 and groups.take_sampled_reward() is None
    assert groups.audit.sampled.total() == 12 and groups.audit.trained.total() == 8
    assert groups.audit.ks() == 0.0


def test_only_prompts_without_signal_are_a_fault_that_names_their_rewards(tmp_path: Path) -> None:
    groups = books(tmp_path)  # 2 tries of batches of 2
    for number, reward in enumerate((1.0, 0.0, 1.0)):
        group = groups.issue(0)
        groups.finish(group, receipt(number, equal=reward), 0)
        groups.drop(group, "no_signal")
        assert groups.no_signal(0) is None
    last = groups.issue(0)
    groups.finish(last, receipt(3, equal=1.0), 0)
    fault = groups.no_signal(7)
    assert fault is not None
    assert str(fault).startswith(
        "4 groups in a row had equal rewards (3 at 1, 1 at 0): nothing to learn at version 7"
    )


def test_one_group_with_signal_starts_the_count_anew(tmp_path: Path) -> None:
    groups = books(tmp_path)
    for number in range(20):
        group = groups.issue(0)
        equal = None if number % 4 == 3 else 1.0
        if groups.finish(group, receipt(number, equal=equal), 0):
            groups.drop(group, "no_signal")
        else:
            groups.drop(group, "stale")
        assert groups.no_signal(0) is None


def test_what_cannot_be_compared_is_dropped_with_its_reason(tmp_path: Path) -> None:
    groups = books(tmp_path, config(dynamic_sampling=False))
    first, second, third = (groups.issue(0) for _ in range(3))
    assert groups.finish(first, receipt(0, scored=0), 0) == "verifier_failed"
    assert groups.finish(second, receipt(1, scored=1), 0) == "group_too_small"
    assert (
        groups.finish(third, receipt(2, equal=math.nan), 0) is None
    )  # without dynamic sampling all may train


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    events=st.lists(st.sampled_from(["issue", "signal", "solved", "unscored", "fail", "train"]), max_size=80),
    cut_at=st.integers(0, 80),
)
def test_the_books_balance_at_every_moment_and_after_a_resume(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], cut_at: int
) -> None:
    folder = tmp_path_factory.mktemp("books")
    groups, version = books(folder), 0
    for number, event in enumerate(events):
        running = [g for g in groups.live.values() if g.receipt is None]
        if event == "issue" and groups.gate.capacity(version) > 0:
            groups.issue(version)
        elif event in ("signal", "solved", "unscored") and running:
            group = running[0]
            kinds = {"signal": {}, "solved": {"equal": 1.0}, "unscored": {"scored": 0}}
            found = receipt(group.group_id, version=group.since_version, **kinds[event])
            if reason := groups.finish(group, found, version):
                groups.drop(group, reason)
        elif event == "fail" and running:
            groups.drop(running[-1], "generation_failed")
        elif event == "train":
            cut = groups.cut(version)
            assert not cut.stale
            if cut.take:
                groups.train([groups.live[group_id] for group_id in cut.take], version)
                version += 1
        check(groups, version)
        if number == cut_at:
            waiting = [g.receipt for g in groups.live.values() if g.receipt is not None]
            groups.ledger.close()
            groups, unknown = Groups.resume(
                config(),
                10,
                folder / "ledger.jsonl",
                Recorder(),
                state=groups.state(),
                version=version,
                receipts=waiting,
            )
            assert unknown == []
            while groups.reissue:
                assert groups.gate.capacity(version) > 0  # what had its place before has it again
                groups.issue(version)
            check(groups, version)
    groups.ledger.close()


def check(groups: Groups, version: int) -> None:
    queued = [g for g in groups.live.values() if g.receipt is not None]
    assert groups.ledger.balanced
    assert groups.ledger.live.keys() == groups.live.keys() | set(groups.reissue)
    assert groups.gate.running == len(groups.live) - len(queued)
    assert groups.gate.accepted == 2 * version + len(queued)
    assert groups.room.queued_groups == len(queued)
    assert groups.room.queued_bytes == 100 * len(queued)
    assert groups.ledger.trained == 2 * version
