"""Extra rollouts without an engine: steps, folding into values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.actors.environments import fill
from headway.actors.extra_rollouts import branch_mark, fold, greedy_mark, step_ends
from headway.actors.generation_rows import GroupRequest, GroupSampler
from headway.actors.samples import Sample, SampleRequest
from headway.actors.verifier import VerifierWorker
from headway.core import rollouts
from headway.core.config import load_config
from headway.core.errors import ConfigError, HandedBack, SchemaError
from headway.core.prompts import Prompt
from headway.core.sections import Environment, Verifiers

PIECES = ["a", "b", "\n", "\n\n", "b\n\nc", "a\n", "\nb"]
PROMPT = Prompt(prompt_id="p", content="2 + 3 =", gold="5", verifier="numeric")


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def test_a_step_ends_with_the_token_that_completes_the_separator() -> None:
    assert step_ends([0, 2, 1, 2, 0], decode, "\n", 8) == [2, 4, 5]  # a ⏎ | b ⏎ | a
    assert step_ends([0, 2, 2, 1], decode, "\n\n", 8) == [3, 4]  # across two tokens: a⏎ + ⏎
    assert step_ends([5, 6, 0], decode, "\n\n", 8) == [2, 3]  # a⏎ + ⏎b: it ends inside the second
    assert step_ends([0, 3, 0], decode, "\n", 8) == [2, 3]  # two occurrences in one token are one end
    assert step_ends([0, 2], decode, "\n", 8) == [2]  # an end at the end is the last step's
    assert step_ends([0, 1], decode, "\n", 8) == [2]


def test_the_last_step_takes_the_rest() -> None:
    ids = [2] * 6
    assert step_ends(ids, decode, "\n", 3) == [1, 2, 6]
    assert step_ends(ids, decode, "\n", 1) == [6]
    assert step_ends(ids, decode, "\n", 100) == [1, 2, 3, 4, 5, 6]


def test_a_separator_of_several_bytes_ends_with_its_last_byte() -> None:
    ids = list("a。b。".encode())  # tokens are bytes; unfinished characters decode to a replacement character
    assert len(ids) == 8
    assert step_ends(ids, lambda part: bytes(part).decode(errors="replace"), "。", 8) == [4, 8]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30),
    separator=st.sampled_from(["\n", "\n\n", "b", "c"]),
    max_steps=st.integers(1, 12),
)
def test_steps_are_those_of_a_token_by_token_search(ids: list[int], separator: str, max_steps: int) -> None:
    every = [
        end
        for end in range(1, len(ids))
        if decode(ids[:end]).count(separator) > decode(ids[: end - 1]).count(separator)
    ]
    assert step_ends(ids, decode, separator, max_steps) == [*every[: max_steps - 1], len(ids)]


def table_of(*rows: dict[str, Any]) -> pa.Table:
    def whole(number: int, row: dict[str, Any]) -> dict[str, Any]:
        ids = row.get("response_ids", [7, 8, 9, 10])
        return {
            "rollout_id": f"0/{number}",
            "group_id": 0,
            "prompt_id": "p",
            "sample_index": number,
            "agent_id": "policy",
            "prompt_ids": [1, 2],
            "response_ids": ids,
            "loss_mask": [int("extra" not in row)] * len(ids),
            "behavior_logprobs": [-1.0] * len(ids),
            "version_spans": [{"start": 0, "end": len(ids), "version": 3}],
            "finish_reason": "stop",
            "truncated": False,
            "text": "5",
            "verdict_reason": "scored",
            **row,
        }

    return rollouts.build(whole(number, row) for number, row in enumerate(rows))


def branch(row: int | None, at: int, reward: float | None) -> dict[str, Any]:
    return {
        "sample_index": -1 if row is None else row,
        "response_ids": [7],
        "reward": reward,
        "extra": branch_mark(row, at),
    }


def test_the_greedy_reward_is_on_every_token() -> None:
    rows = [{"reward": 1.0}, {"reward": 0.0, "response_ids": [7, 8]}]
    greedy = {"reward": 0.25, "sample_index": -1, "extra": greedy_mark()}
    table = fold(table_of(*rows, greedy))
    rollouts.validate(table)
    assert table["values"].to_pylist() == [[0.25] * 4, [0.25] * 2]
    assert table["reward"].to_pylist() == [1.0, 0.0]
    assert table["rollout_id"].to_pylist() == ["0/0", "0/1"]
    assert table["verdict_reason"].to_pylist() == ["scored", "scored"]


def test_an_unscored_greedy_answer_leaves_no_response_scored() -> None:
    greedy = {"reward": None, "sample_index": -1, "extra": greedy_mark()}
    unscored = {"reward": None, "verdict_reason": "crash"}
    table = fold(table_of({"reward": 1.0}, unscored, greedy))
    assert table["reward"].to_pylist() == [None, None]
    assert table["verdict_reason"].to_pylist() == ["no_baseline", "crash"]
    assert [[math.isnan(v) for v in values] for values in table["values"].to_pylist()] == [[True] * 4] * 2


def test_the_mean_of_a_states_branches_is_on_the_tokens_of_the_step_after_it() -> None:
    table = table_of(
        {"reward": 1.0, "step_ends": [1, 3, 4]},
        {"reward": 0.0, "step_ends": [4]},
        branch(None, 0, 1.0),
        branch(None, 0, 0.0),
        branch(None, 0, None),  # unscored: the mean is over the other two
        branch(0, 1, 0.25),
        branch(0, 1, 0.5),
        branch(0, 3, 1.0),
    )
    folded = fold(table)
    rollouts.validate(folded)
    assert folded["values"].to_pylist() == [[0.5, 0.375, 0.375, 1.0], [0.5] * 4]
    assert folded["reward"].to_pylist() == [1.0, 0.0]
    assert folded["step_ends"].to_pylist() == [[1, 3, 4], [4]]


def test_a_state_without_a_scored_branch_leaves_its_response_unscored() -> None:
    rows = [{"reward": 1.0, "step_ends": [2, 4]}, {"reward": 0.0, "step_ends": [2, 4]}]
    from_prompt = branch(None, 0, 0.5)
    table = fold(table_of(*rows, from_prompt, branch(0, 2, None), branch(1, 2, 1.0)))
    assert table["reward"].to_pylist() == [None, 0.0]
    assert table["verdict_reason"].to_pylist() == ["no_baseline", "scored"]
    values = table["values"].to_pylist()
    assert all(map(math.isnan, values[0])) and values[1] == [0.5, 0.5, 1.0, 1.0]
    without_prompt = fold(table_of(*rows, branch(0, 2, 1.0), branch(1, 2, 1.0)))
    assert without_prompt["reward"].to_pylist() == [None, None]


def test_a_table_without_extra_rows_stays_as_it_is() -> None:
    table = table_of({"reward": 1.0}, {"reward": None})
    assert fold(table) is table


def test_marks_that_make_no_sense_are_refused() -> None:
    greedy = {"reward": 1.0, "extra": greedy_mark()}
    with pytest.raises(SchemaError, match="kinds"):
        fold(table_of({"reward": 1.0, "step_ends": [4]}, greedy, branch(None, 0, 1.0)))
    with pytest.raises(SchemaError, match="0/0: steps None do not cover 4 tokens"):
        fold(table_of({"reward": 1.0}, branch(None, 0, 1.0)))


def test_the_verifier_scores_extra_rows_and_folds_them() -> None:
    worker = VerifierWorker(Verifiers(processes=1, timeout_s=5.0, memory_mib=512))
    try:
        table = table_of(
            {"text": "2 + 3 = 6", "step_ends": [2, 4]},
            {**branch(None, 0, None), "text": "5"},
            {**branch(None, 0, None), "text": "I say 4"},
            {**branch(0, 2, None), "text": "2 + 3 = 5"},
        )
        scored = worker.score(rollouts.replace_column(table, "verdict_reason", [None] * 4), PROMPT)
        updates: list[Any] = worker.drain_updates()
    finally:
        worker.close()
    assert scored["reward"].to_pylist() == [0.0]
    assert scored["values"].to_pylist() == [[0.5, 0.5, 1.0, 1.0]]
    assert [sum(value[0]) for name, _, value in updates if name == "headway_verifier_seconds"] == [4]


async def test_branches_have_the_budget_that_is_left_and_are_judged_with_what_they_continue() -> None:
    asked: list[SampleRequest] = []

    async def answer(request: SampleRequest) -> Sample:
        asked.append(request)
        ids = [0, 2, 1][: request.max_new_tokens]
        return Sample(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            version_spans=[{"start": 0, "end": len(ids), "version": 0}],
            finish_reason="length",
            truncated=True,
        )

    request = GroupRequest(
        group_id=4,
        prompt=PROMPT,
        group_size=2,
        temperature=0.7,
        top_p=1.0,
        max_new_tokens=3,
        deadline_s=9.0,
        branches=2,
        step_separator="\n",
    )
    sampler = GroupSampler(
        request=request,
        run_seed=0,
        sample=answer,
        encode=lambda prompt: [5, 5],
        decode=decode,
        follow=lambda text, role: [],
        special_tokens=(),
    )
    table = rollouts.build(await sampler.rows())
    assert Counter((tuple(a.prefix_ids), a.max_new_tokens) for a in asked) == {
        ((5, 5), 3): 2 + 2,  # the group, and branches of the prompt
        ((5, 5, 0, 2), 1): 2 + 2,  # after the step of each response
    }
    assert {a.temperature for a in asked} == {0.7}
    assert len({a.seed for a in asked}) == 8
    names = ["rollout_id", "sample_index", "response_ids", "text", "extra"]
    rows = [tuple(row.values()) for row in table.select(names).to_pylist()]
    assert rows[0] == ("4/0", 0, [0, 2, 1], "a\nb", None)
    assert rows[2] == ("4/prompt/0", -1, [0, 2, 1], "a\nb", '{"baseline": "branch", "row": null, "at": 0}')
    assert rows[7] == ("4/1/2/1", 1, [0], "a\na", '{"baseline": "branch", "row": 1, "at": 2}')
    assert [sum(mask) for mask in table["loss_mask"].to_pylist()] == [3, 3, 0, 0, 0, 0, 0, 0]


async def test_a_group_goes_on_from_its_tokens_with_new_random_numbers_each_time() -> None:
    asked: list[SampleRequest] = []
    patience = 2

    async def answer(request: SampleRequest) -> Sample:
        """Tokens 0 1 2 .. up to the budget, `patience` of them at a time; label 1's first part is whole at once."""
        asked.append(request)
        done = len(request.prefix_ids) - 2
        num = min(patience if len(asked) != 2 else 99, request.max_new_tokens)
        reason = "length" if num == request.max_new_tokens else "abort"
        return Sample(
            ids=list(range(done, done + num)),
            logprobs=[-1.0] * num,
            version_spans=[{"start": 0, "end": num, "version": patience}],
            finish_reason=reason,
            truncated=reason == "length",
        )

    request = GroupRequest(
        group_id=4,
        prompt=PROMPT,
        group_size=3,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=7,
        deadline_s=9.0,
    )
    kept: dict[str, Sample] = {}
    sampler = GroupSampler(
        request=request,
        run_seed=0,
        sample=answer,
        encode=lambda prompt: [5, 5],
        decode=str,
        follow=lambda text, role: [],
        special_tokens=(),
        kept=kept,
    )
    for length in (2, 4):
        with pytest.raises(HandedBack):
            await sampler.rows()
        assert {label: len(sample.ids) for label, sample in kept.items()} == {
            "0": length,
            "1": 7,
            "2": length,
        }
    patience = 99
    rows = await sampler.rows()
    assert [row["response_ids"] for row in rows] == [list(range(7))] * 3
    spans = [{"start": 0, "end": 4, "version": 2}, {"start": 4, "end": 7, "version": 99}]
    assert [row["version_spans"] for row in rows] == [spans, [{"start": 0, "end": 7, "version": 2}], spans]
    assert all(row["truncated"] and row["finish_reason"] == "length" for row in rows)
    assert [(len(a.prefix_ids), a.max_new_tokens) for a in asked] == [(2, 7)] * 3 + [(4, 5)] * 2 + [
        (6, 3)
    ] * 2
    assert len({a.seed for a in asked}) == 7
    assert asked[3].prefix_ids == [5, 5, 0, 1]


def test_requests_that_cannot_be_met_are_refused() -> None:
    common: dict[str, Any] = {
        "group_id": 0,
        "prompt": PROMPT,
        "group_size": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 8,
        "deadline_s": 1.0,
    }
    with pytest.raises(ConfigError, match="step separator"):
        GroupRequest(**common, branches=2)
    with pytest.raises(ConfigError, match="not several"):
        GroupRequest(**common, greedy=True, environment=Environment(name="calculator"))


def test_agents_of_the_example_read_only_those_before_them(root: Path) -> None:
    config = load_config(root / "configs/solver_checker.yaml")
    seen = {"prompt": "2 + 3 ="}
    for name, template in config.data.agents.items():
        asked = fill(template, seen)
        assert all(text in asked for text in seen.values()) and "{" not in asked
        seen[name] = f"answer of {name}"
