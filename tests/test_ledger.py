"""Every group ends exactly once, and the journal says how, wherever its process was killed."""

from __future__ import annotations

import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.ledger import Ledger, LedgerError, trained_groups


def test_a_group_ends_once() -> None:
    ledger = Ledger()
    group = ledger.issue()
    with pytest.raises(LedgerError, match="expected finished"):
        ledger.train(group, 1)
    ledger.finish(group)
    ledger.train(group, 1)
    for again in (
        lambda: ledger.train(group, 2),
        lambda: ledger.drop(group, "stale"),
        lambda: ledger.finish(group),
        lambda: ledger.lose(group),
        lambda: ledger.restart(group),
    ):
        with pytest.raises(LedgerError):
            again()
    assert (ledger.issued, ledger.trained, ledger.live) == (1, 1, {})


def test_a_lost_group_runs_again_and_only_a_finished_one_can_be_lost(tmp_path: Path) -> None:
    ledger = Ledger(path=tmp_path / "ledger.jsonl")
    group = ledger.issue()
    with pytest.raises(LedgerError, match="group 0 is running, expected finished"):
        ledger.lose(group)
    ledger.restart(group)
    ledger.finish(group)
    with pytest.raises(LedgerError, match="group 0 is finished, expected running"):
        ledger.restart(group)
    ledger.lose(group)
    assert ledger.live == {0: "running"} and ledger.balanced
    ledger.finish(group)
    ledger.train(group, 1)
    ledger.close()
    assert events(tmp_path / "ledger.jsonl") == [
        ("issued", 0),
        ("restarted", 0),
        ("finished", 0),
        ("lost", 0),
        ("finished", 0),
        ("trained", 0),
    ]


def events(journal: Path) -> list[tuple[str, int | None]]:
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return [(record["event"], record.get("group")) for record in records]


@given(st.lists(st.integers(0, 5), max_size=60), st.randoms(use_true_random=False))
def test_issued_is_trained_plus_dropped_plus_live_at_every_moment(kinds: list[int], rng) -> None:
    ledger = Ledger()
    for kind in kinds:
        happen(ledger, kind, rng, 1)
        assert ledger.balanced


def happen(ledger: Ledger, kind: int, rng: random.Random, version: int) -> None:
    """One event of a run, where it is possible."""
    running = [g for g, s in ledger.live.items() if s == "running"]
    finished = [g for g, s in ledger.live.items() if s == "finished"]
    if kind == 0:
        ledger.issue()
    elif kind == 1 and running:
        ledger.finish(rng.choice(running))
    elif kind == 2 and finished:
        ledger.train(rng.choice(finished), version)
    elif kind == 3 and ledger.live:
        ledger.drop(rng.choice(list(ledger.live)), "straggler")
    elif kind == 4 and finished:
        ledger.lose(rng.choice(finished))
    elif kind == 5 and running:
        ledger.restart(rng.choice(running))


def test_resume_voids_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    journal = tmp_path / "ledger.jsonl"
    ledger = Ledger(path=journal)
    for group in range(3):
        ledger.issue()
        ledger.finish(group)
    ledger.train(0, 1)
    state = ledger.state()
    ledger.train(1, 2)  # after the checkpoint: not part of the weights that the run goes on from
    ledger.close()
    again = Ledger.resume(state, path=journal, version=1)
    assert again.live == {1: "finished", 2: "finished"}
    assert again.balanced
    again.train(2, 2)
    again.train(1, 3)
    again.close()
    assert trained_groups(journal) == {0: 1, 2: 2, 1: 3}


def test_a_second_resume_from_the_same_checkpoint_voids_the_first_ones_steps_too(tmp_path: Path) -> None:
    journal = tmp_path / "ledger.jsonl"
    ledger = Ledger(path=journal)
    for group in range(2):
        ledger.issue()
        ledger.finish(group)
    state = ledger.state()
    for last in range(3):
        ledger.train(0, 1)
        if last < 2:
            ledger.close()
            ledger = Ledger.resume(state, path=journal, version=0)
    assert trained_groups(journal) == {0: 1}
    ledger.close()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.integers(0, 7), min_size=5, max_size=60),
    rng=st.randoms(use_true_random=False),
    share=st.floats(0, 1),
)
def test_a_kill_at_any_byte_costs_nothing_that_the_checkpoint_holds(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[int], rng: random.Random, share: float
) -> None:
    """The journal of a run with steps, checkpoints and resumes is cut off at any byte. What can be read is what whole
    lines say; a resume from the newest checkpoint before the cut starts on a line of its own, and from there on the
    journal tells the same as a run that was never killed."""
    journal = tmp_path_factory.mktemp("killed") / "ledger.jsonl"
    ledger, version = Ledger(path=journal), 0
    checkpoints: list[tuple[int, int, dict[str, Any]]] = [(0, 0, ledger.state())]
    trained_at: dict[int, int] = {}
    for kind in kinds:
        if kind == 6:
            checkpoints.append((journal.stat().st_size, version, json.loads(json.dumps(ledger.state()))))
        elif kind == 7:
            ledger.close()
            _, version, state = checkpoints[-1]
            ledger = Ledger.resume(state, path=journal, version=version)
        else:
            before = set(ledger.live)
            happen(ledger, kind, rng, version + 1)
            version += kind == 2 and before != set(ledger.live)
    ledger.close()
    whole = journal.read_bytes()
    cut = round(share * len(whole))
    journal.write_bytes(whole[:cut])
    lines = whole[:cut].split(b"\n")[:-1]
    # What whole lines say, told by hand.
    for record in map(json.loads, lines):
        if record["event"] == "trained":
            trained_at[record["group"]] = record["version"]
        elif record["event"] == "resumed":
            trained_at = {group: at for group, at in trained_at.items() if at <= record["version"]}
    assert trained_groups(journal) == trained_at

    _, version, state = [found for found in checkpoints if found[0] <= cut][-1]
    again = Ledger.resume(state, path=journal, version=version)
    assert again.balanced and again.issued == state["issued"]
    kept = {group: at for group, at in trained_at.items() if at <= version}
    again.finish(again.issue())
    again.train(again.issued - 1, version + 1)
    again.close()
    assert journal.read_bytes().split(b"\n")[: len(lines)] == lines
    assert trained_groups(journal) == kept | {again.issued - 1: version + 1}


def test_a_torn_last_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    journal = tmp_path / "ledger.jsonl"
    journal.write_bytes(
        b'{"event": "issued", "group": 0}\n' + b'{"event": "resumed", "state": ' + b"1" * 200_000
    )
    Ledger(path=journal).close()
    assert journal.read_bytes() == b'{"event": "issued", "group": 0}\n'
    journal.write_bytes(b"x" * 200_000)
    Ledger(path=journal).close()
    assert journal.read_bytes() == b""


def test_a_journal_that_trains_a_group_twice_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "ledger.jsonl"
    journal.write_text('{"event": "trained", "group": 4, "version": 1}\n' * 2)
    with pytest.raises(LedgerError, match="group 4 was trained twice"):
        trained_groups(journal)


@pytest.mark.parametrize("line", ['{"event": "trai', "", "[1]", '{"group": 4}', '{"event": "trained"}'])
def test_any_other_line_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    journal = tmp_path / "ledger.jsonl"
    good = '{"event": "trained", "group": 4, "version": 1}\n'
    journal.write_text(f'{good}{line}\n{{"event": "issued", "group": 5}}\n')
    with pytest.raises(LedgerError, match="line 2 is no record"):
        trained_groups(journal)
    journal.write_text(good + line)  # the same without its newline is what a killed process leaves
    assert trained_groups(journal) == {4: 1}


def test_a_full_disk_is_told_with_path_and_free_space(tmp_path: Path) -> None:
    full = tmp_path / "ledger.jsonl"
    full.symlink_to("/dev/full")
    ledger = Ledger(path=full)
    with pytest.raises(
        LedgerError, match=r"ledger.jsonl: .*No space left on device; [\d.]+ MiB are free there"
    ):
        ledger.issue()


def issue_many(ledger: Ledger) -> None:
    for _ in range(10):
        ledger.issue()


def test_a_disk_that_fills_in_the_middle_of_a_record_leaves_a_line_that_a_resume_cuts_off(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "ledger.jsonl"
    ledger = Ledger(path=journal)
    state = ledger.state()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (180, before[1]))
    try:
        with pytest.raises(LedgerError, match=r"ledger.jsonl: \d+ of \d+ bytes of a record were taken"):
            issue_many(ledger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal.stat().st_size == 180 and not journal.read_bytes().endswith(b"\n")
    ledger.close()
    Ledger.resume(state, path=journal, version=0).close()
    found = events(journal)
    assert found == [("issued", group) for group in range(len(found) - 1)] + [("resumed", None)]


def test_a_journal_in_a_folder_that_is_gone_is_told_with_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    Ledger(path=folder / "ledger.jsonl").close()
    shutil.rmtree(folder)
    with pytest.raises(LedgerError, match=r"gone/ledger.jsonl: .*No such file"):
        Ledger(path=folder / "ledger.jsonl")
