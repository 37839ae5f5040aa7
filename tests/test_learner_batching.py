from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import SchemaError
from headway.core.rollouts import build
from headway.learner.batching import pack, unpack


def row(
    index: int, response: list[int], *, prompt: list[int] | None = None, group: int = 0, **other: Any
) -> dict[str, Any]:
    num_tokens = len(response)
    return {
        "rollout_id": f"{group}/{index}",
        "group_id": group,
        "prompt_id": f"p{group}",
        "sample_index": index,
        "prompt_ids": [7, 8, 9] if prompt is None else prompt,
        "response_ids": response,
        "loss_mask": [1] * num_tokens,
        "behavior_logprobs": [-0.5] * num_tokens,
        "version_spans": [{"start": 0, "end": num_tokens, "version": 0}] if num_tokens else [],
        "finish_reason": "stop",
        "truncated": False,
        "text": "",
        **other,
    }


def test_unpack_by_hand() -> None:
    spans = [{"start": 0, "end": 1, "version": 4}, {"start": 1, "end": 3, "version": 6}]
    group = unpack(
        build(
            [
                row(0, [10, 11, 12], reward=1.0, version_spans=spans, loss_mask=[1, 0, 1], truncated=True),
                row(1, [], reward=0.0),
                row(2, [13], behavior_logprobs=[None]),
            ]
        )
    )
    assert group.rollout_ids == ("0/0", "0/1", "0/2")
    assert [prompt.tolist() for prompt in group.prompts] == [[7, 8, 9]]
    assert group.prompt_index.tolist() == [0, 0, 0]
    assert group.reference_logprobs is None and group.values is None
    assert group.lengths.tolist() == [3, 0, 1]
    assert group.response_ids.tolist() == [10, 11, 12, 13]
    assert group.loss_mask.tolist() == [True, False, True, True]
    assert group.versions.tolist() == [4, 6, 6, 0]
    assert group.scored.tolist() == [True, True, False]
    assert group.rewards[:2].tolist() == [1.0, 0.0] and np.isnan(group.rewards[2])
    assert group.truncated.tolist() == [True, False, False]
    assert np.isnan(group.behavior_logprobs[3])


def test_nothing_shares_memory_with_the_table() -> None:
    table = build([row(0, [10, 11], reward=1.0), row(1, [12], reward=0.0)])
    group = unpack(table)
    for name in (
        "prompt_index",
        "response_ids",
        "loss_mask",
        "behavior_logprobs",
        "versions",
        "rewards",
        "scored",
        "lengths",
    ):
        array = getattr(group, name)
        array[...] = 1  # an array over Arrow's memory would be read-only
    assert table.column("response_ids").to_pylist() == [[10, 11], [12]]
    assert table.column("reward").to_pylist() == [1.0, 0.0]


def test_columns_of_later_stages() -> None:
    rows = [
        row(0, [10, 11], reference_logprobs=[-1.0, -2.0], values=[0.5, 0.25], step_ends=[1, 2]),
        row(1, [12], reference_logprobs=[-3.0], values=[0.0], step_ends=[1]),
    ]
    rows[0]["reward_parts"] = [
        {"name": "format", "value": 9.0},
        {"name": "step", "value": 0.5},
        {"name": "step", "value": -0.5},
    ]
    group = unpack(build(rows))
    assert group.reference_logprobs is not None and group.reference_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert group.values is not None and group.values.tolist() == [0.5, 0.25, 0.0]
    assert [ends.tolist() for ends in group.step_ends] == [[1, 2], [1]]
    assert [rewards.tolist() for rewards in group.step_rewards] == [[0.5, -0.5], []]
    with pytest.raises(SchemaError, match="'values' and 'response_ids' differ in length"):
        unpack(build([row(0, [10, 11], values=[0.5])]))
    with pytest.raises(SchemaError, match="'values' and 'response_ids' differ in length"):
        unpack(build([row(0, [10], values=[0.5]), row(1, [10])]))


def test_agents_with_prompts_of_their_own() -> None:
    group = unpack(
        build(
            [
                row(0, [10, 11], agent_id="solver"),
                row(0, [12, 13], agent_id="checker", prompt=[5, 10, 11]),
                row(1, [14], agent_id="solver"),
            ]
        )
    )
    assert [prompt.tolist() for prompt in group.prompts] == [[7, 8, 9], [5, 10, 11]]
    assert group.prompt_index.tolist() == [0, 1, 0]
    assert group.agent_ids == ("solver", "checker", "solver")
    (batch,) = pack([group], np.ones(5, dtype=np.bool_), microbatch_tokens=64)
    assert sorted(batch.token_index.tolist()) == [0, 1, 2, 3, 4]
    assert batch.targets[batch.token_index.argsort()].tolist() == [10, 11, 12, 13, 14]
    assert sorted(batch.packing.prompt_lengths) == [3, 3]


def test_chunks_and_slices_hold_their_own_rows_only() -> None:
    table = build([row(i, [20 + i] * (i + 1), reward=float(i)) for i in range(4)])
    chunked = pa.concat_tables([table.slice(1, 1), table.slice(2, 2)])
    assert chunked.column("response_ids").num_chunks == 2
    group = unpack(chunked)
    assert group.response_ids.tolist() == [21, 21, 22, 22, 22, 23, 23, 23, 23]
    assert group.rewards.tolist() == [1.0, 2.0, 3.0]
    assert group.rollout_ids == ("0/1", "0/2", "0/3")


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(SchemaError, match="differ in their prompt"):
        unpack(build([row(0, [1]), row(1, [1], prompt=[7, 8, 8])]))
    with pytest.raises(SchemaError, match="differ in their prompt"):
        unpack(build([row(0, [1]), row(1, [1], prompt=[7, 8])]))
    with pytest.raises(SchemaError, match="one group"):
        unpack(build([row(0, [1]), row(1, [1], group=1)]))
    with pytest.raises(SchemaError, match="empty prompt"):
        unpack(build([row(0, [1], prompt=[])]))
    with pytest.raises(SchemaError, match="without rows"):
        unpack(build([]))


def test_a_packed_row_by_hand() -> None:
    group = unpack(build([row(0, [10, 11, 12]), row(1, [13]), row(2, [14, 15])]))
    (batch,) = pack([group], np.ones(6, dtype=np.bool_), microbatch_tokens=64)
    # The last token of an answer is only predicted, never fed: answer 1 takes no room.
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 11, 14]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.targets.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.predict_index.tolist() == [2, 3, 4, 2, 2, 5]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.packing.prompt_lengths == (3,)
    assert batch.packing.answer_lengths == ((2, 1),)
    # slots: prompt 0 1 2, then two answers of two slots each, of which the second fills one
    assert batch.packing.slots_T.tolist() == [0, 1, 2, 3, 4, 5]


def test_untrained_tokens_are_context_but_not_predicted() -> None:
    group = unpack(build([row(0, [10, 11, 12, 13]), row(1, [14, 15])]))
    trained = np.array([True, False, True, False, False, False])
    (batch,) = pack([group], trained, microbatch_tokens=64)
    assert batch.input_ids.tolist() == [7, 8, 9, 10, 11]
    assert batch.targets.tolist() == [10, 12]
    assert batch.predict_index.tolist() == [2, 4]
    assert batch.token_index.tolist() == [0, 2]


def test_a_group_over_the_budget_is_cut_and_carries_its_prompt_along() -> None:
    group = unpack(build([row(i, [10 + i] * 5) for i in range(3)]))
    batches = pack([group], np.ones(15, dtype=np.bool_), microbatch_tokens=11)
    assert [batch.input_ids.tolist() for batch in batches] == [
        [7, 8, 9, 10, 10, 10, 10, 11, 11, 11, 11],
        [7, 8, 9, 12, 12, 12, 12],
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    budget=st.integers(16, 60),
    seed=st.integers(0, 99),
)
def test_every_trained_token_is_there_exactly_once_within_the_budget(lengths, budget, seed) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        unpack(build([row(i, rng.integers(10, 99, n).tolist(), group=g) for i, n in enumerate(group)]))
        for g, group in enumerate(lengths)
    ]
    trained = rng.random(sum(map(sum, lengths))) < 0.7
    batches = pack(groups, trained, microbatch_tokens=budget)
    tokens = (
        torch.cat([batch.token_index for batch in batches]) if batches else torch.zeros(0, dtype=torch.int64)
    )
    assert sorted(tokens.tolist()) == np.flatnonzero(trained).tolist()
    flat = np.concatenate([group.response_ids for group in groups])
    for batch in batches:
        assert batch.input_ids.numel() <= budget
        assert batch.targets.tolist() == flat[batch.token_index.numpy()].tolist()


def test_an_end_of_sequence_id_is_a_token_like_any_other() -> None:
    """Tokenizers often pad with it. What is trained is what the loss mask says: the one that ended a response, and
    not those that a tool or a template put there."""
    eos = 2
    group = unpack(
        build([row(0, [5, 9, eos, eos, 8, eos], prompt=[eos, 7, eos], loss_mask=[1, 1, 1, 0, 0, 1])])
    )
    (batch,) = pack([group], group.loss_mask, microbatch_tokens=64)
    assert batch.token_index.tolist() == [0, 1, 2, 5]
    assert batch.targets.tolist() == [5, 9, eos, eos]
    assert batch.input_ids.tolist() == [eos, 7, eos, 5, 9, eos, eos, 8]  # nothing is padding
