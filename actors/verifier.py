"""The verifier role: fills the reward columns of rollout tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headway.actors.extra_rollouts import fold
from headway.core.errors import DataError, HeadwayError
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt
from headway.core.rollouts import replace_column
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import Item, lookup
from headway.verifiers.verdict import Verdict

_UNSCORED_OR_LIMIT = ("timeout", "memory", "exception")
"""Reasons of a score of 0 that count as an error; every unscored response does."""

MEANINGLESS = "\\boxed{?}"
"""A response that no gold accepts."""


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
        `timing.scored` filled in; what is scored is the column `text`. Extra rows are scored too, and then folded
        into `values` (`extra_rollouts.fold`): they are not in the returned table."""
        texts = table.column("text").to_pylist()
        results = self._pool.score_timed(
            [Item(prompt.verifier, prompt.gold, text, prompt.context, prompt.text) for text in texts]
        )
        verdicts = [verdict for verdict, _ in results]
        self._record(verdicts, [seconds for _, seconds in results])
        now = time.time()
        columns: dict[str, list[Any]] = {
            "reward": [verdict.score for verdict in verdicts],
            "reward_parts": [[{"name": n, "value": v} for n, v in verdict.parts] for verdict in verdicts],
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
        checked: list[tuple[Prompt, int]] = []
        items: list[Item] = []
        failures: list[str] = []
        for prompt in prompts[:limit]:
            family = lookup(prompt.verifier)
            try:
                responses = family.present(prompt.gold, prompt.context)
            except DataError as error:
                failures.append(_line(prompt, str(error)))
                continue
            if responses:
                checked.append((prompt, len(responses)))
                items += [
                    Item(prompt.verifier, prompt.gold, response, prompt.context, prompt.text)
                    for response in (*responses, MEANINGLESS)
                ]
        verdicts = iter(self._pool.score(items))
        for prompt, number in checked:
            *golds, meaningless = [next(verdicts) for _ in range(number + 1)]
            if all(gold.score != 1.0 for gold in golds):
                failures.append(_line(prompt, f"{golds[0].reason}, extracted {golds[0].extracted!r}"))
            elif meaningless.score == 1.0:
                failures.append(_line(prompt, f"the meaningless answer {MEANINGLESS!r} is paid too"))
        return failures

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
                    self._recorder.inc("headway_verifier_errors_total", label=verdict.reason)


def _line(prompt: Prompt, reason: str) -> str:
    return f"prompt {prompt.prompt_id}: gold {prompt.gold!r}: {reason}"
