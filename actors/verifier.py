"""The verifier role: fills the reward columns of rollout tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headway.actors.extra_rollouts import fold
from headway.actors.http_scorer import HttpScorer
from headway.actors.later_verdicts import item_of, leave
from headway.core.errors import HeadwayError
from headway.core.metrics import VERIFIER_ERRORS, Recorder, Update
from headway.core.prompts import Prompt
from headway.core.rollouts import replace_column
from headway.core.sections import Verifiers
from headway.verifiers.composite import combine, expand
from headway.verifiers.golds import check_golds
from headway.verifiers.judging import JUDGE
from headway.verifiers.pending import HTTP, PENDING, REWARD_MODEL
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import needed
from headway.verifiers.verdict import Item, Verdict

_UNSCORED_OR_LIMIT = ("timeout", "memory", "exception")
"""Reasons of a score of 0 that count as an error; every unscored response does."""


class VerifierWorker:
    """Scores responses in killable processes, and what is for a scorer behind HTTP there. All methods may be called from
    several threads at a time."""

    def __init__(self, settings: Verifiers, before_others: bool = False) -> None:
        """Starts the processes. `before_others`: verdicts of a judge or a reward model are left to later stages, which also
        fold extra rows. Raises `HeadwayError` when the processes do not tell a right answer from a wrong one, and `ConfigError`
        for an HTTP scorer that cannot be one."""
        self._before_others = before_others
        self._http = _http_scorer(settings)
        self._pool = VerifierPool(settings.processes, settings.timeout_s, settings.memory_mib)
        self._recorder = Recorder()
        self._recording = threading.Lock()
        right, wrong = self._pool.score(
            [Item("numeric", "5", "2 + 3 = 5"), Item("numeric", "5", "2 + 3 = 6")]
        )
        if (right.score, wrong.score) != (1.0, 0.0):
            self.close()
            raise HeadwayError(
                f"verifier processes do not work: a right answer got {right}, a wrong one {wrong}"
            )

    def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        """The rollout table with `reward` (null when unscored), `reward_parts`, `verdict_reason` and
        `timing.scored` filled in. What is scored is the column `text`, of an episode what its agent said last (`answer` in
        `extra`); rows that their environment has judged keep its verdict. Extra rows are scored too, and then folded
        into `values` (`extra_rollouts.fold`): they are not in the returned table.

        Before other stages, a response of which they have to judge something has no reward yet, reason `pending`, and
        what is known so far in `extra` (`with_pending`); extra rows stay."""
        rows = table.select(["text", "reward", "reward_parts", "verdict_reason", "extra"]).to_pylist()
        answers = {
            number: item_of(prompt, row["text"], row["extra"])
            for number, row in enumerate(rows)
            if row["verdict_reason"] is None
        }
        found = dict(zip(answers, self._verdicts(list(answers.values())), strict=True))
        verdicts = [found[number][0] if number in found else _known(row) for number, row in enumerate(rows)]
        self._record(verdicts, [seconds for _, _, seconds in found.values()])
        if self._before_others:
            left = {number: each for number, (verdict, each, _) in found.items() if verdict.reason == PENDING}
            table = leave(table, left)
            verdicts = [
                replace(verdict, parts=()) if number in left else verdict
                for number, verdict in enumerate(verdicts)
            ]
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
        return table if self._before_others else fold(table)

    def _verdicts(self, items: Sequence[Item]) -> list[tuple[Verdict, list[Verdict], float]]:
        """On each item: the verdict, those on its leaves, and the seconds in the pool. A composite is one job of the pool
        unless some leaf is scored elsewhere."""
        split = [expand(item) if needed(*item) & {HTTP, JUDGE, REWARD_MODEL} else [item] for item in items]
        flat = [leaf for leaves in split for leaf in leaves]
        timed = self._pool.score_timed(flat)
        verdicts = [verdict for verdict, _ in timed]
        remote = [number for number, leaf in enumerate(flat) if leaf.name == HTTP]
        if self._http is not None and remote:
            answers = self._http.score([flat[number] for number in remote])
            for number, verdict in zip(remote, answers, strict=True):
                verdicts[number] = verdict
        results: list[tuple[Verdict, list[Verdict], float]] = []
        start = 0
        for item, leaves in zip(items, split, strict=True):
            own = slice(start, start := start + len(leaves))
            verdict = verdicts[own][0] if leaves == [item] else combine(item, verdicts[own])
            results.append((verdict, verdicts[own], sum(seconds for _, seconds in timed[own])))
        return results

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
            updates = self._recorder.drain()
        return [*updates, *(self._http.drain_updates() if self._http is not None else ())]

    def close(self) -> None:
        """Ends all processes; calls that wait for a verdict raise `Closed`."""
        self._pool.close()
        if self._http is not None:
            self._http.close()

    def _record(self, verdicts: list[Verdict], seconds: list[float]) -> None:
        with self._recording:
            self._recorder.observe("headway_verifier_seconds", seconds)
            for verdict in verdicts:
                if verdict.reason == PENDING and self._before_others:
                    continue
                if verdict.score is None or verdict.reason in _UNSCORED_OR_LIMIT:
                    # Reasons are as many as verifiers care to give; labels are few.
                    label = verdict.reason if verdict.reason in VERIFIER_ERRORS else "other"
                    self._recorder.inc("headway_verifier_errors_total", label=label)


def _http_scorer(settings: Verifiers) -> HttpScorer | None:
    if settings.http_url is None:
        return None
    return HttpScorer(
        settings.http_url,
        batch_size=settings.http_batch_size,
        timeout_s=settings.http_timeout_s,
        deadline_s=settings.http_deadline_s,
        retries=settings.http_retries,
        token_env=settings.http_token_env,
    )


def _known(row: dict[str, Any]) -> Verdict:
    """Of an environment; its parts are in the row already."""
    return Verdict(score=row["reward"], reason=row["verdict_reason"])
