"""Verdicts that stages after the verifiers give: which leaves of which rows are theirs, and what the rows come to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa

from headway.core.prompts import Prompt
from headway.core.rollouts import judged_text, replace_column
from headway.verifiers.composite import combine, expand
from headway.verifiers.pending import PENDING, pending, with_pending
from headway.verifiers.verdict import Item, Verdict


class Leaf(NamedTuple):
    """Something to be judged."""

    row: int
    number: int
    """In `expand` of the row's item."""
    item: Item


def leaves(table: pa.Table, prompt: Prompt, kind: str) -> list[Leaf]:
    """What verifier `kind` has still to judge."""
    found: list[Leaf] = []
    for row, (text, extra) in enumerate(
        zip(table["text"].to_pylist(), table["extra"].to_pylist(), strict=True)
    ):
        if (known := pending(extra)) is not None:
            parts = expand(item_of(prompt, text, extra))
            for number, (part, verdict) in enumerate(zip(parts, known, strict=True)):
                if verdict is None and part.name == kind:
                    found.append(Leaf(row, number, part))
    return found


def settle(
    table: pa.Table, prompt: Prompt, verdicts: Mapping[tuple[int, int], Verdict]
) -> tuple[pa.Table, list[Verdict]]:
    """The table with these verdicts, by row and leaf, and those on rows of which nothing is pending any more: only these
    have `reward`, `reward_parts`, `verdict_reason` and `timing.scored` now."""
    rows = table.select(["text", "extra", "reward", "reward_parts", "verdict_reason", "timing"]).to_pylist()
    settled: list[Verdict] = []
    now = time.time()
    for number in sorted({row for row, _ in verdicts}):
        row = rows[number]
        known = pending(row["extra"])
        assert known is not None, number
        found = [verdicts.get((number, leaf), verdict) for leaf, verdict in enumerate(known)]
        if None in found:
            row["extra"] = with_pending(row["extra"], found)
            continue
        extra = with_pending(row["extra"], None)
        verdict = combine(item_of(prompt, row["text"], extra), [each for each in found if each is not None])
        settled.append(verdict)
        row |= {"reward": verdict.score, "verdict_reason": verdict.reason, "extra": extra}
        parts = [{"name": name, "value": value} for name, value in verdict.parts]
        row["reward_parts"] = [*(row["reward_parts"] or ()), *parts]
        row["timing"] = {**(row["timing"] or {}), "scored": now}
    for name in ("reward", "reward_parts", "verdict_reason", "extra", "timing"):
        table = replace_column(table, name, [row[name] for row in rows])
    return table, settled


def leave(table: pa.Table, known_of_row: Mapping[int, list[Verdict]]) -> pa.Table:
    """The table with what is known so far on rows that later stages complete, by row."""
    extras = table["extra"].to_pylist()
    for row, known in known_of_row.items():
        left = [None if verdict.reason == PENDING else verdict for verdict in known]
        extras[row] = with_pending(extras[row], left)
    return replace_column(table, "extra", extras)


def item_of(prompt: Prompt, text: str, extra: str | None) -> Item:
    """What of a row is to be scored."""
    return Item(prompt.verifier, prompt.gold, judged_text(text, extra), prompt.context, prompt.text)
