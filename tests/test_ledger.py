"""Every group ends exactly once, and the journal says how."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
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
    ):
        with pytest.raises(LedgerError):
            again()
    assert (ledger.issued, ledger.trained, ledger.live) == (1, 1, {})


@given(st.lists(st.integers(0, 3), max_size=60), st.randoms(use_true_random=False))
def test_issued_is_trained_plus_dropped_plus_live_at_every_moment(events: list[int], rng) -> None:
    ledger = Ledger()
    for event in events:
        running = [g for g, s in ledger.live.items() if s == "running"]
        finished = [g for g, s in ledger.live.items() if s == "finished"]
        if event == 0:
            ledger.issue()
        elif event == 1 and running:
            ledger.finish(rng.choice(running))
        elif event == 2 and finished:
            ledger.train(rng.choice(finished), 1)
        elif event == 3 and ledger.live:
            ledger.drop(rng.choice(list(ledger.live)), "straggler")
        assert ledger.balanced


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


def test_a_journal_that_trains_a_group_twice_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "ledger.jsonl"
    journal.write_text('{"event": "trained", "group": 4, "version": 1}\n' * 2)
    with pytest.raises(LedgerError, match="group 4 was trained twice"):
        trained_groups(journal)
