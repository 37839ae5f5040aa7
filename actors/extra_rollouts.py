"""Rollouts that are scored but not trained: their rewards become the `values` of the rows that are.

An extra row travels in its group's table with a `loss_mask` of zeros and says in `extra` what it is for:
`{"baseline": "greedy"}`, the greedy answer to the prompt (ReMax), or
`{"baseline": "branch", "row": SAMPLE_INDEX or null, "at": TOKENS}`, a fresh continuation of the first TOKENS tokens
of a response, null: of the prompt itself (VinePPO).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from headway.core.errors import SchemaError
from headway.core.rollouts import replace_column

NO_BASELINE = "no_baseline"
"""Reason of a response that is unscored because what it is compared with could not be scored."""

State = tuple[int | None, int]
"""Where a continuation begins: sample index of the response (None: the prompt itself), its tokens so far."""


def greedy_mark() -> str:
    """Column `extra` of a greedy answer."""
    return json.dumps({"baseline": "greedy"})


def branch_mark(row: int | None, at: int) -> str:
    """Column `extra` of a continuation from after `at` tokens of response `row`; None: from the prompt."""
    return json.dumps({"baseline": "branch", "row": row, "at": at})


def step_ends(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], separator: str, max_steps: int
) -> list[int]:
    """After how many tokens each step of a response ends, ascending; the last is the number of tokens.

    A step ends with the token that completes an occurrence of `separator` in the text so far, wherever in that
    token. At most `max_steps` steps: the last one takes the rest. `ids` must not be empty.
    """
    ends: list[int] = []
    seen = 0
    while len(ends) < max_steps - 1:
        # Decoding a longer prefix never takes an occurrence away, so the first prefix with one more can be bisected.
        end = bisect_left(
            range(len(ids)),
            seen + 1,
            lo=ends[-1] + 1 if ends else 1,
            key=lambda length: decode(ids[:length]).count(separator),
        )
        if end >= len(ids):
            break
        ends.append(end)
        seen = decode(ids[:end]).count(separator)
    return [*ends, len(ids)]


def fold(table: pa.Table) -> pa.Table:
    """The scored table without its extra rows, `values` filled from their rewards.

    Greedy answer: its reward on every token (ReMax, arXiv 2310.10505). Branches: on every token of step k
    V(s_k), the mean reward of the scored continuations of the state before it (VinePPO, arXiv 2410.01679, section 4);
    those of the prompt belong to all responses. A row that lacks a baseline becomes unscored, with NaN values and
    reason `no_baseline`. A table without extra rows is returned as it is. Raises `SchemaError` when extra rows are
    of an unknown kind or of both, or a row of branches has no steps.
    """
    marks: list[dict[str, Any]] = [json.loads(text or "{}") for text in table.column("extra").to_pylist()]
    kinds = {mark["baseline"] for mark in marks if "baseline" in mark}
    if not kinds:
        return table
    if len(kinds) > 1 or not kinds <= {"greedy", "branch"}:
        raise SchemaError(f"extra rollouts of kinds {sorted(kinds)} in one group")
    rewards = table.column("reward").to_pylist()
    state_rewards: dict[State, list[float]] = defaultdict(list)
    for mark, reward in zip(marks, rewards, strict=True):
        if "baseline" in mark and reward is not None:
            state_rewards[mark.get("row"), mark.get("at", 0)].append(reward)
    state_values = {state: sum(found) / len(found) for state, found in state_rewards.items()}

    kept = pa.array(["baseline" not in mark for mark in marks])
    table = table.filter(kept)
    names = ["rollout_id", "sample_index", "response_ids", "step_ends", "reward", "verdict_reason"]
    rows = table.select(names).to_pylist()
    per_step = kinds == {"branch"}
    values = [_values(row, state_values, per_step=per_step) for row in rows]
    missing = [any(map(math.isnan, row_values)) for row_values in values]
    columns: dict[str, list[Any]] = {
        "values": [
            [math.nan] * len(row_values) if lacks else row_values
            for row_values, lacks in zip(values, missing, strict=True)
        ],
        "verdict_reason": [
            NO_BASELINE if lacks and row["reward"] is not None else row["verdict_reason"]
            for row, lacks in zip(rows, missing, strict=True)
        ],
        "reward": [None if lacks else row["reward"] for row, lacks in zip(rows, missing, strict=True)],
    }
    for name, column in columns.items():
        table = replace_column(table, name, column)
    return table


def _values(row: dict[str, Any], state_values: dict[State, float], *, per_step: bool) -> list[float]:
    """One value per token; NaN where the state has none."""
    num_tokens = len(row["response_ids"])
    ends = row["step_ends"] if per_step else [num_tokens]
    if not ends or ends[-1] != num_tokens:
        raise SchemaError(f"rollout {row['rollout_id']}: steps {ends} do not cover {num_tokens} tokens")
    values: list[float] = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        state: State = (row["sample_index"] if start else None, start)
        values += [state_values.get(state, math.nan)] * (end - start)
    return values
