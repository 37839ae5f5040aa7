"""The verifier role: fills the reward columns of rollout tables."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headway.actors.extra_rollouts import fold
from headway.core.errors import HeadwayError
from headway.core.metrics import VERIFIER_ERRORS, Recorder, Update
from headway.core.prompts import Prompt
from headway.core.rollouts import replace_column
from headway.verifiers.golds import check_golds
from headway.verifiers.pool import VerifierPool
from headway.verifiers.verdict import Item, Verdict

_UNSCORED_OR_LIMIT = ("timeout", "memory", "exception")
"""Reasons of a score of 0 that count as an error; every unscored response does."""


class VerifierWorker:
    """Scores responses in killable processes. All methods may be called from several threads at a time."""

    def __init__(self, processes: int, timeout_s: float, memory_mib: int) -> None:
        """Starts the processes. Raises `HeadwayError` when they do not tell a right answer from a wrong one."""
        self._pool = VerifierPool(processes, timeout_s, memory_mib)
        self._recorder = Recorder()
        self._recording = threading.Lock()
        right, wrong = self._pool.score(
            [Item("numeric", "5", "2 + 3 = 5"), Item("numeric", "5", "2 + 3 = 6")]
        )
        if (right.score, wrong.score) != (1.0, 0.0):
            self._pool.close()
            raise HeadwayError(
                f"verifier processes do not work: a right answer got {right}, a wrong one {wrong}"
            )

    def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        """The rollout table with `reward` (null when unscored), `reward_parts`, `verdict_reason` and
        `timing.scored` filled in. What is scored is the column `text`, of an episode what its agent said last (`answer` in
        `extra`); rows that their environment has judged keep its verdict. Extra rows are scored too, and then folded
        into `values` (`extra_rollouts.fold`): they are not in the returned table."""
        rows = table.select(["text", "reward", "reward_parts", "verdict_reason", "extra"]).to_pylist()
        results = iter(
            self._pool.score_timed([_item(prompt, row) for row in rows if row["verdict_reason"] is None])
        )
        scored = [next(results) if row["verdict_reason"] is None else (_known(row), None) for row in rows]
        verdicts = [verdict for verdict, _ in scored]
        self._record(verdicts, [seconds for _, seconds in scored if seconds is not None])
        now = time.time()
        columns: dict[str, list[Any]] = {
            "reward": [verdict.score for verdict in verdicts],
            "reward_parts": [
                [*(row["reward_parts"] or ()), *({"name": n, "value": v} for n, v in verdict.parts)]
                for row, verdict in zip(rows, verdicts, strict=True)
            ],
            "verdict_reason": [verdict.reason for verdict in verdicts],
            "timing": [{**(timing or {}), "scored": now} for timing in table.column("timing").to_pylist()],
        }
        for name, values in columns.items():
            table = replace_column(table, name, values)
        return fold(table)

    def check_golds(self, prompts: Sequence[Prompt], limit: int) -> list[str]:
        """Scores the gold answers of the first `limit` prompts as if they were responses, and a meaningless answer
        beside each. One line for each gold that does not get 1 and each prompt that pays for the meaningless one:
        prompt id, gold, reason. Prompts whose gold is no answer are not checked. Raises `DataError` for an unknown
        verifier."""
        return [
            f"prompt {check.prompt.prompt_id}: gold {check.prompt.gold!r}: {check.reason}"
            + (f", {check.detail}" if check.detail else "")
            for check in check_golds(self._pool, prompts[:limit])
            if check.is_fault
        ]

    def drain_updates(self) -> list[Update]:
        """Metric updates since the last call."""
        with self._recording:
            return self._recorder.drain()

    def close(self) -> None:
        """Ends all processes; calls that wait for a verdict raise `Closed`."""
        self._pool.close()

    def _record(self, verdicts: list[Verdict], seconds: list[float]) -> None:
        with self._recording:
            self._recorder.observe("headway_verifier_seconds", seconds)
            for verdict in verdicts:
                if verdict.score is None or verdict.reason in _UNSCORED_OR_LIMIT:
                    # Reasons are as many as verifiers care to give; labels are few.
                    label = verdict.reason if verdict.reason in VERIFIER_ERRORS else "other"
                    self._recorder.inc("headway_verifier_errors_total", label=label)


def _item(prompt: Prompt, row: dict[str, Any]) -> Item:
    answer = json.loads(row["extra"] or "{}").get("answer", row["text"])
    return Item(prompt.verifier, prompt.gold, answer, prompt.context, prompt.text)


def _known(row: dict[str, Any]) -> Verdict:
    """Of an environment; its parts are in the row already."""
    return Verdict(score=row["reward"], reason=row["verdict_reason"])
