"""The driver's books: ledger, gate, backlog, room and audits say the same at every moment."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.groups import Groups
from headway.cluster.ledger import LedgerError, trained_groups
from headway.cluster.queue import Receipt
from headway.cluster.state import Group
from headway.core.config import Config, parse_config
from headway.core.metrics import LAG_BUCKETS, Recorder

POLICIES = ("pace", "drop", "withhold", "downweight")


def config(
    *, lag: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **algorithm: Any
) -> Config:
    return parse_config(
        {
            "run": {"steps": 50},
            "sampling": {"group_size": 4},
            "learner": {"groups_per_step": 2, **(learner or {})},
            "lag": {"max_version_lag": 2, **(lag or {})},
            "algorithm": {"dynamic_sampling": True, "dynamic_sampling_tries": 2, **algorithm},
        }
    )


def receipt(
    group_id: int,
    *,
    version: int = 0,
    newest: int | None = None,
    equal: float | None = None,
    scored: int = 4,
    lengths: tuple[int, ...] = (2, 4, 6, 8),
) -> Receipt:
    mixed = (0.0, 1.0, 0.0, 1.0)
    return Receipt(
        group_id=group_id,
        num_bytes=100,
        oldest_version=version,
        newest_version=version if newest is None else newest,
        rewards=(mixed if equal is None else (equal,) * 4)[:scored],
        response_lengths=lengths,
        equal_reward=equal,
    )


def books(tmp_path: Path, settings_: Config | None = None, recorder: Recorder | None = None) -> Groups:
    return Groups.new(settings_ or config(), 10, tmp_path / "ledger.jsonl", recorder or Recorder())


def issue(groups: Groups, version: int = 0, now: float = 0.0) -> Group:
    return groups.issue(version, lambda group_id: f"task {group_id % 2}", now)


def finish(groups: Groups, group: Group, version: int = 0, **about: Any) -> str | None:
    about.setdefault("version", group.since_version)
    return groups.finish(group, receipt(group.group_id, **about), version)


def resume(
    groups: Groups, version: int, receipts: list[Receipt], state: dict[str, Any] | None = None
) -> tuple[Groups, list[int]]:
    """What another process makes of the journal and of a checkpoint that went through JSON."""
    saved = json.loads(json.dumps(state or groups.state()))
    groups.ledger.close()
    assert groups.ledger.path is not None
    return Groups.resume(
        groups._config, 10, groups.ledger.path, Recorder(), state=saved, version=version, receipts=receipts
    )


def gauges(recorder: Recorder) -> dict[str, float]:
    """Gauges and counters since the last call, by name and label."""
    return {
        f"{name} {label}".strip(): value
        for name, label, value in recorder.drain()
        if isinstance(value, float | int)
    }


def test_a_group_with_equal_rewards_gives_its_place_back(tmp_path: Path) -> None:
    groups = books(tmp_path)
    before = groups.gate.capacity(0)
    solved, mixed = issue(groups), issue(groups)
    assert groups.gate.capacity(0) == before - 2
    assert finish(groups, solved, equal=1.0) == "no_signal"
    groups.drop(solved, "no_signal")
    assert finish(groups, mixed) is None
    assert groups.gate.capacity(0) == before - 1
    assert (groups.room.queued_groups, groups.room.queued_bytes) == (1, 100)
    assert groups.ledger.dropped == {"no_signal": 1} and groups.ledger.balanced
    assert groups.take_sampled_reward() == 1.0  # the mixed one has not ended yet
    other = issue(groups)
    finish(groups, other)
    groups.train([mixed, other], 0)
    assert groups.take_sampled_reward() == 0.5 and groups.take_sampled_reward() is None
    assert groups.audit.sampled_lengths.total() == 12 and groups.audit.trained_lengths.total() == 8
    assert groups.audit.length_ks() == 0.0


def test_only_prompts_without_signal_are_a_fault_that_names_their_rewards(tmp_path: Path) -> None:
    groups = books(tmp_path)  # 2 tries of batches of 2
    for reward in (1.0, 0.0, 1.0):
        group = issue(groups)
        finish(groups, group, equal=reward)
        groups.drop(group, "no_signal")
        assert groups.no_signal(0) is None
    finish(groups, issue(groups), equal=1.0)
    fault = groups.no_signal(7)
    assert fault is not None
    assert str(fault).startswith(
        "4 groups in a row had equal rewards (3 at 1, 1 at 0): nothing to learn at version 7"
    )


def test_one_group_with_signal_starts_the_count_anew(tmp_path: Path) -> None:
    groups = books(tmp_path)
    for number in range(20):
        group = issue(groups)
        equal = None if number % 4 == 3 else 1.0
        groups.drop(group, "no_signal" if finish(groups, group, equal=equal) else "stale")
        assert groups.no_signal(0) is None


def test_a_group_that_lost_rows_goes_on_smaller_or_is_dropped_with_its_reason(tmp_path: Path) -> None:
    groups = books(tmp_path, config(dynamic_sampling=False))
    none, one, two, equal = (issue(groups) for _ in range(4))
    assert finish(groups, none, scored=0) == "verifier_failed"
    assert (
        finish(groups, one, scored=1) == "group_too_small"
    )  # a single survivor has nothing to be compared with
    assert finish(groups, two, scored=2) is None
    assert finish(groups, equal, equal=math.nan) is None  # without dynamic sampling all may train
    groups.train([two, equal], 0)
    assert groups.ledger.trained == 2


# ---- lag -----------------------------------------------------------------------------------------------------


def lags(recorder: Recorder) -> dict[str, list[int]]:
    """Observed version lags by phase, expanded from their buckets."""
    return {
        label: [step for step, count in zip(LAG_BUCKETS, payload[0], strict=False) for _ in range(int(count))]
        for name, label, payload in recorder.drain()
        if name == "headway_version_lag_steps" and isinstance(payload, tuple)
    }


def test_lag_is_split_into_what_arose_on_the_way_and_what_in_the_queue(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(lag={"max_version_lag": 3}), recorder)
    waited, spanned = issue(groups, 0), issue(groups, 0)
    finish(groups, waited, 0)  # finished at lag 0, then three updates pass
    finish(groups, spanned, 2, newest=2)  # two updates while it was generated, one in the queue
    groups.train([waited, spanned], 3)
    assert lags(recorder) == {"total": [3, 3], "queue": [1, 3], "generation": [0, 2]}


def test_lag_of_a_later_step_of_the_batch_counts_that_step(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(learner={"steps_per_batch": 2}), recorder)
    batch = [issue(groups, 0) for _ in range(4)]
    for group in batch:
        finish(groups, group, 0)
    groups.train(batch, 0)
    assert lags(recorder)["total"] == [0, 0, 1, 1]
    assert trained_groups(tmp_path / "ledger.jsonl") == {0: 1, 1: 1, 2: 2, 3: 2}


@pytest.mark.parametrize(("policy", "limit", "trained"), [("withhold", None, 2), ("downweight", 4, 4)])
def test_lag_is_that_of_the_oldest_token_in_the_loss(
    tmp_path: Path, policy: str, limit: int | None, trained: int
) -> None:
    # Tokens of versions 0 to 6 at version 7: those of a lag beyond 2, or beyond 4 where they only weigh less, are out.
    recorder = Recorder()
    groups = books(tmp_path, config(lag={"policy": policy, "downweight_limit": limit}), recorder)
    batch = [issue(groups, 0), issue(groups, 0)]
    for group in batch:
        finish(groups, group, 7, newest=6)
    groups.train(batch, 7)
    assert lags(recorder) == {"total": [trained] * 2, "queue": [0] * 2, "generation": [trained] * 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_beyond_the_bound_is_refused_even_where_no_cut_was_asked(tmp_path: Path, policy: str) -> None:
    groups = books(tmp_path, config(lag={"policy": policy}))
    limit = 5 if policy == "downweight" else 2
    old, new = issue(groups, 0), issue(groups, 7)
    finish(groups, old, 0)
    finish(groups, new, 9, newest=9)
    with pytest.raises(AssertionError):
        groups.train([old], limit + 1)
    with pytest.raises(AssertionError):  # a token of a version that the learner has not reached
        groups.train([new], 8)


def test_a_low_ess_lowers_the_bound_of_admission_alone(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(lag={"ess_floor": 0.5}), recorder)
    assert groups.gate.capacity(0) == 6  # (2 + 0 + 1) * 2
    assert gauges(recorder)["headway_effective_version_lag_steps"] == 2
    groups.observe_ess(0.4)
    assert groups.gate.capacity(0) == 4
    assert gauges(recorder)["headway_effective_version_lag_steps"] == 1
    group = issue(groups, 0)
    finish(groups, group, 0)
    assert groups.cut(2).stale == ()  # lag 2 is within the hard bound
    again, _ = resume(groups, 0, [])
    assert again.gate.bound == 1
    for _ in range(10):
        again.observe_ess(0.9)
    assert again.gate.bound == 2


def test_the_bound_of_admission_never_falls_below_what_one_batch_needs(tmp_path: Path) -> None:
    groups = books(tmp_path, config(lag={"ess_floor": 0.5}, learner={"steps_per_batch": 2}))
    for _ in range(5):
        groups.observe_ess(0.1)
    assert groups.gate.bound == 1 and groups.gate.capacity(0) == 4  # two steps of two groups


def long_share(tmp_path: Path, policy: str) -> tuple[Counter[str], Groups]:
    """Every other answer takes 10 ticks and is 10 times as long, a learner step takes 1 tick, the bound is 2. Engines
    always serve the newest version, so a token's version is that of the tick at which it is sampled."""
    folder = tmp_path / policy
    folder.mkdir()
    groups = books(folder, config(lag={"policy": policy}))
    ends: dict[int, int] = {}
    trained: Counter[str] = Counter()
    version = tick = 0
    while version < 50:
        while groups.gate.capacity(version) > 0:
            group = issue(groups, version)
            ends[group.group_id] = tick + (10 if group.group_id % 2 else 1)
        tick += 1
        for group_id in [group_id for group_id, end in ends.items() if end == tick]:
            del ends[group_id]
            lengths = (100, 100, 100, 100) if group_id % 2 else (10, 10, 10, 10)
            finish(groups, groups.live[group_id], version, newest=version, lengths=lengths)
        cut = groups.cut(version)
        for group_id in cut.stale:
            groups.drop(groups.live[group_id], "stale")
        trained.update("long" if group_id % 2 else "short" for group_id in cut.take)
        if cut.take:
            groups.train([groups.live[group_id] for group_id in cut.take], version)
            version += 1
    groups.ledger.close()
    return trained, groups


def test_dropping_the_old_starves_the_long_ones_and_the_audit_says_so(tmp_path: Path) -> None:
    counts, groups = long_share(tmp_path, "pace")
    assert 48 <= counts["long"] <= 52 and groups.ledger.dropped == {}
    assert (
        groups.audit.length_ks() == groups.audit.task_distance() == 0.0 or groups.audit.task_distance() < 0.03
    )
    counts, groups = long_share(tmp_path, "withhold")
    assert 47 <= counts["long"] <= 53 and groups.ledger.dropped == {}
    assert groups.audit.length_ks() == 0.0 and groups.audit.task_distance() < 0.03
    counts, groups = long_share(tmp_path, "drop")
    assert counts["long"] < 40 and groups.ledger.dropped["stale"] > 20
    # Of all that ended, trained and dropped: the share of short ones among the trained is that much higher.
    longs = counts["long"] + groups.ledger.dropped["stale"]
    assert groups.audit.length_ks() == pytest.approx(
        counts["short"] / 100 - counts["short"] / (longs + counts["short"])
    )
    assert groups.audit.length_ks() > 0.1 and groups.audit.task_distance() > 0.1


# ---- audit ---------------------------------------------------------------------------------------------------


def test_what_never_finished_was_sampled_and_was_longer(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(), recorder)
    batch, straggler = [issue(groups), issue(groups)], issue(groups)
    for group in batch:
        finish(groups, group)
    groups.drop(straggler, "straggler")
    groups.train(batch, 0)
    groups.observe()
    found = gauges(recorder)
    # 8 trained responses and 4 of the group that was given up.
    assert found["headway_audit_length_ks"] == pytest.approx(4 / 12)
    # Tasks 0 and 1 were trained; of those dispatched two are 0 and one is 1.
    assert found["headway_audit_task_distance"] == pytest.approx(2 / 3 - 1 / 2)
    assert found["headway_audit_reward_ks"] == 0.0
    assert groups.audit.record()["unfinished"] == 4
    batch = [issue(groups), issue(groups)]
    for group in batch:
        finish(groups, group)
    groups.train(batch, 0)
    groups.observe()
    assert gauges(recorder)["headway_audit_length_ks"] == pytest.approx(4 / 20)


def test_dropped_rewards_show_in_the_audit(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(), recorder)
    for equal in (0.0, 0.0, None, None):
        group = issue(groups)
        if finish(groups, group, equal=equal):
            groups.drop(group, "no_signal")
    groups.train(list(groups.live.values()), 0)
    groups.observe()
    # 12 of 16 sampled responses have reward 0, of the trained 4 of 8.
    assert gauges(recorder)["headway_audit_reward_ks"] == 0.25


# ---- starting over -------------------------------------------------------------------------------------------


def test_a_group_whose_actor_died_starts_over_under_its_own_id(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(), recorder)
    group = issue(groups, 0, now=5.0)
    assert (group.task, group.dispatched, group.since_version) == ("task 0", 5.0, 0)
    groups.restart(group, 2, now=9.0)
    assert (group.dispatched, group.since_version) == (9.0, 2)
    assert groups.gate.running == 1 and groups.audit.dispatched_tasks == {"task 0": 1}
    found = gauges(recorder)
    assert found["headway_groups_reissued_total"] == 1 and found["headway_groups_total issued"] == 1
    with pytest.raises(AssertionError):
        groups.restart(group, 1, now=10.0)  # its deadline would come nearer: admission did not allow for that
    assert [json.loads(line)["event"] for line in (tmp_path / "ledger.jsonl").open()] == [
        "issued",
        "restarted",
    ]


def test_groups_that_died_with_the_queue_are_issued_again_first_and_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    groups = books(tmp_path, config(), recorder)
    batch = [issue(groups) for _ in range(5)]
    for group in batch[:4]:
        finish(groups, group)
    before = groups.gate.capacity(0)
    groups.lose([3])
    groups.lose([2, 0])
    assert list(groups.reissue) == [0, 2, 3]
    assert groups.gate.capacity(0) == before + 3 and groups.gate.accepted == 1 and groups.gate.running == 1
    assert (groups.room.queued_groups, groups.room.queued_bytes) == (1, 100)
    assert groups.take_sampled_reward() is None  # none of them has ended
    assert groups.ledger.live == {0: "running", 1: "finished", 2: "running", 3: "running", 4: "running"}
    with pytest.raises(KeyError):
        groups.lose([0])
    again = [issue(groups, 1) for _ in range(4)]
    assert [group.group_id for group in again] == [0, 2, 3, 5]
    found = gauges(recorder)
    assert found["headway_groups_reissued_total"] == 3 and found["headway_groups_total issued"] == 6
    assert groups.audit.dispatched_tasks == {"task 0": 3, "task 1": 3}
    for group in again[:2]:
        finish(groups, group)
    groups.train([groups.live[1], again[0]], 1)
    groups.train([again[1]], 1)
    # Each group is in the audit once, however often it was made.
    assert groups.audit.sampled_lengths == groups.audit.trained_lengths == {2: 3, 4: 3, 6: 3, 8: 3}
    assert groups.ledger.balanced


def test_the_learner_gets_its_batch_although_one_of_four_producers_failed(tmp_path: Path) -> None:
    groups = books(tmp_path, config(learner={"groups_per_step": 4}, lag={"max_version_lag": 0}))
    batch = [issue(groups) for _ in range(4)]
    for group in batch[:3]:
        finish(groups, group)
    assert groups.gate.capacity(0) == 0 and groups.cut(0).take == ()
    groups.drop(batch[3], "generation_failed")
    assert groups.gate.capacity(0) == 1 and groups.ledger.dropped == {"generation_failed": 1}
    finish(groups, issue(groups))
    assert groups.cut(0).take == (0, 1, 2, 4)


# ---- resume --------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_no_more_in_flight_and_queued_than_a_new_one(tmp_path: Path) -> None:
    settings_ = config(learner={"groups_per_step": 4})
    groups = books(tmp_path, settings_)
    version, waiting = 0, []
    for version in range(10):
        batch = [issue(groups, version) for _ in range(4)]
        for group in batch:
            finish(groups, group, version)
        groups.train(batch, version)
    waiting = [issue(groups, 10) for _ in range(3)]
    for group in waiting[:2]:
        finish(groups, group, 10)
    again, unknown = resume(groups, 10, [g.receipt for g in waiting if g.receipt])
    assert unknown == [] and list(again.reissue) == [42]
    admitted = 0
    while again.gate.capacity(10) > 0:
        issue(again, 10)
        admitted += 1
    assert admitted == 10 and len(again.live) == 12  # (2 + 1) * 4 with the two in the queue


def test_twelve_prompts_stopped_and_resumed_are_each_trained_once(tmp_path: Path) -> None:
    """Four are trained, four more were taken from the stream when the run is killed: two lie in the queue, two run. The
    checkpoint is that of the second step."""
    groups = books(tmp_path)
    groups_before = [issue(groups) for _ in range(4)]
    for group in groups_before:
        finish(groups, group)
    groups.train(groups_before[:2], 0)
    groups.train(groups_before[2:], 1)
    ahead = [issue(groups, 2) for _ in range(4)]
    finish(groups, ahead[3], 2)
    state = json.loads(json.dumps(groups.state()))
    finish(groups, ahead[1], 2)  # between the two snapshots of the checkpoint
    saved = [group.receipt for group in ahead if group.receipt]
    late = issue(groups, 2)  # after the checkpoint: the resumed run issues it anew
    finish(groups, late, 2)
    saved.append(receipt(late.group_id))
    groups.train([ahead[1], ahead[3]], 2)  # lost with the weights that it made

    again, unknown = resume(groups, 2, saved, state)
    assert unknown == [late.group_id] and list(again.reissue) == [4, 6]
    assert again.live[7].task == "task 1"
    version = 2
    while again.ledger.trained < 12:
        while again.gate.capacity(version) > 0 and (again.reissue or again.ledger.issued < 12):
            finish(again, issue(again, version), version)
        batch = [again.live[group_id] for group_id in again.cut(version).take]
        again.train(batch, version)
        version += 1
    again.ledger.close()
    trained = trained_groups(tmp_path / "ledger.jsonl")
    assert sorted(trained) == list(range(12))
    assert sorted(trained.values()) == [version for version in range(1, 7) for _ in range(2)]  # none skipped
    assert again.audit.dispatched_tasks == again.audit.trained_tasks == {"task 0": 6, "task 1": 6}
    assert again.audit.trained_lengths.total() == 48 and again.ledger.balanced


def test_a_run_that_died_before_its_first_checkpoint_starts_from_nothing(tmp_path: Path) -> None:
    groups = books(tmp_path)
    batch = [issue(groups), issue(groups)]
    for group in batch:
        finish(groups, group)
    groups.train(batch, 0)
    again, unknown = resume(groups, 0, [receipt(5)], Groups.nothing(config(), 10))
    assert unknown == [5] and again.live == {} and not again.reissue
    assert again.gate.capacity(0) == 6
    assert trained_groups(tmp_path / "ledger.jsonl") == {}
    assert issue(again).group_id == 0


def test_a_group_cannot_be_trained_again_after_it_was_lost(tmp_path: Path) -> None:
    groups = books(tmp_path)
    group = issue(groups)
    finish(groups, group)
    groups.lose([0])
    with pytest.raises(LedgerError, match="group 0 is running, expected finished"):
        groups.train([group], 0)


EVENTS = (
    "issue",
    "issue",
    "signal",
    "signal",
    "solved",
    "unscored",
    "fail",
    "restart",
    "lose",
    "train",
    "ess",
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=80),
    cut_at=st.integers(0, 80),
)
def test_the_books_balance_at_every_moment_and_after_a_resume(
    tmp_path_factory: pytest.TempPathFactory, policy: str, events: list[tuple[str, int]], cut_at: int
) -> None:
    folder = tmp_path_factory.mktemp("books")
    groups = books(folder, config(lag={"policy": policy, "ess_floor": 0.5}))
    version = 0
    for number, (event, pick) in enumerate(events):
        running = [g for g in groups.live.values() if g.receipt is None]
        finished = [g for g in groups.live.values() if g.receipt is not None]
        if event == "issue" and groups.gate.capacity(version) > 0:
            issue(groups, version)
        elif event in ("signal", "solved", "unscored") and running:
            group = running[pick % len(running)]
            kinds = {"signal": {}, "solved": {"equal": 1.0}, "unscored": {"scored": 0}}
            if reason := finish(groups, group, version, newest=version, **kinds[event]):
                groups.drop(group, reason)
        elif event == "fail" and running:
            groups.drop(running[-1], "generation_failed")
        elif event == "restart" and running:
            groups.restart(running[0], version, float(number))
        elif event == "lose" and finished:
            groups.lose([group.group_id for group in finished[: pick + 1]])
        elif event == "ess":
            groups.observe_ess(pick / 10)
        elif event == "train":
            cut = groups.cut(version)
            assert not (policy == "pace" and cut.stale)
            for group_id in cut.stale:
                groups.drop(groups.live[group_id], "stale")
            if cut.take:
                groups.train([groups.live[group_id] for group_id in cut.take], version)
                version += 1
        check(groups, version)
        if number == cut_at:
            waiting = [g.receipt for g in groups.live.values() if g.receipt is not None]
            before = groups
            groups, unknown = resume(groups, version, waiting)
            assert unknown == [] and groups.state() == before.state()
            while groups.reissue and groups.gate.capacity(version) > 0:
                issue(groups, version)
            # What had its place before has it again, unless the bound was lowered since it was issued.
            assert not groups.reissue or groups.gate.bound < 2
            check(groups, version)
    groups.observe()
    groups.ledger.close()


def check(groups: Groups, version: int) -> None:
    queued = [g for g in groups.live.values() if g.receipt is not None]
    assert groups.ledger.balanced
    assert groups.ledger.live.keys() == groups.live.keys() | set(groups.reissue)
    assert groups.gate.running == len(groups.live) - len(queued)
    assert groups.gate.accepted == 2 * version + len(queued)
    assert len(groups.backlog) == len(groups.live)
    assert groups.room.queued_groups == len(queued)
    assert groups.room.queued_bytes == 100 * len(queued)
    assert groups.ledger.trained == 2 * version == groups.audit.trained_tasks.total()
    assert groups.ledger.issued == groups.audit.dispatched_tasks.total()
    assert groups.audit.trained_lengths.total() == 4 * groups.ledger.trained
    ended = groups.ledger.trained + groups.ledger.dropped.total()
    assert groups.audit.sampled_lengths.total() + groups.audit.unfinished == 4 * ended
    assert groups.gate.bound == groups.lag_bound.bound
