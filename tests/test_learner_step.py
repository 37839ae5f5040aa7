import json
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.core.errors import SchemaError
from headway.core.sections import Algorithm
from headway.learner.batching import Group
from headway.learner.rewards import RewardState
from headway.learner.step import StepBatch, prepare

BUDGET = 10
"""Tokens of a response at most."""

ADVANTAGES: tuple[str, ...] = get_args(Algorithm.model_fields["advantage"].annotation)


def make_group(
    rewards: list[float | None],
    masks: list[list[int]] | None = None,
    *,
    truncated: tuple[int, ...] = (),
    **other: Any,
) -> Group:
    """One token per response unless `masks` says otherwise; a reward of None is unscored. `other`: flat lists over
    tokens, or the remaining fields."""
    masks = masks or [[1] for _ in rewards]
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    num_tokens = int(lengths.sum())
    for name in ("behavior_logprobs", "reference_logprobs", "values"):
        if name in other:
            other[name] = np.array(other[name], dtype=np.float32)
    for name, dtype in (("step_ends", np.int64), ("step_rewards", np.float32)):
        if name in other:
            other[name] = tuple(np.array(row, dtype=dtype) for row in other[name])
    fields: dict[str, Any] = {
        "rollout_ids": tuple(str(row) for row in range(len(rewards))),
        "prompts": (np.array([7], dtype=np.int64),),
        "prompt_index": np.zeros(len(rewards), dtype=np.int64),
        "lengths": lengths,
        "response_ids": np.zeros(num_tokens, dtype=np.int64),
        "loss_mask": np.array([flag for mask in masks for flag in mask], dtype=np.bool_),
        "behavior_logprobs": np.full(num_tokens, -1.0, dtype=np.float32),
        "versions": np.arange(num_tokens, dtype=np.int64),
        "rewards": np.array([math.nan if reward is None else reward for reward in rewards], dtype=np.float32),
        "scored": np.array([reward is not None for reward in rewards], dtype=np.bool_),
        "truncated": np.array([row in truncated for row in range(len(rewards))], dtype=np.bool_),
        "sample_index": np.arange(len(rewards), dtype=np.int64),
    }
    return Group(**{**fields, **other})


def algorithm(**choices: Any) -> Algorithm:
    return Algorithm.model_validate({"preset": "grpo", "kl": "none", **choices})


def step_of(*groups: Group, state: RewardState | None = None, **choices: Any) -> StepBatch:
    chosen = algorithm(**choices)
    return prepare(groups, chosen, max_new_tokens=BUDGET, state=state or RewardState.start(chosen))


def near(got: Tensor | None, want: list[float]) -> None:
    assert got is not None
    assert_close(got.double(), torch.tensor(want, dtype=torch.float64), atol=2e-5, rtol=0, equal_nan=True)


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_flat_arrays_say_where_a_token_belongs() -> None:
    step = step_of(make_group([1, 0], [[1, 1], [1]]), make_group([0.5, 1, 0], [[1], [], [1, 0]]))
    assert step.lengths_B.tolist() == [2, 1, 1, 0, 2]
    assert step.response_N.tolist() == [0, 0, 1, 2, 4, 4]
    assert step.group_of_response_B.tolist() == [0, 0, 1, 1, 1]
    assert step.in_loss_N.tolist() == step.trained_N.tolist() == [True] * 5 + [False]
    assert step.versions_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert step.rewards_B.tolist() == [1, 0, 0.5, 1, 0]
    assert (step.reference_logprobs_N, step.values_N, step.returns_N, step.kl_reference) == (None,) * 4
    assert step.kl_coef == 0.0
    # [1, 0] has std 0.70711; [0.5, 1, 0] has mean 0.5 and std 0.5, and its empty response is part of it
    near(step.advantages_N, [0.70711, 0.70711, -0.70711, 0, -1, 0])


def test_denominators_are_of_the_step_as_it_is() -> None:
    groups = [make_group([1, 0], [[1, 1], [1]]), make_group([1, 0], [[1, 1, 1], [1, 0]])]
    for part in (groups[:1], groups):
        step = step_of(*part, aggregation="token_mean")
        weights = step.token_weights_N[torch.from_numpy(step.in_loss_N)]
        near(weights, [1 / len(weights)] * len(weights))
    norm = step_of(*groups, aggregation="seq_mean_token_sum_norm").token_weights_N
    near(norm, [1 / (4 * BUDGET)] * 8)


# --- who is in the loss ---------------------------------------------------------------------------------------------


def test_an_unscored_response_leaves_loss_statistics_and_denominator() -> None:
    step = step_of(make_group([1, None, 0, 0], [[1], [1, 1], [1], [1]]), aggregation="token_mean")
    near(step.advantages_N, [1.15470, 0, 0, -0.57735, -0.57735])
    assert step.in_loss_N.tolist() == step.trained_N.tolist() == [True, False, False, True, True]
    near(step.token_weights_N[[0, 3, 4]], [1 / 3] * 3)
    near(step.rewards_B, [1, math.nan, 0, 0])
    assert step.masked_fraction == pytest.approx(
        {"unscored": 0.4, "truncated": 0, "missing_logprob": 0, "withheld": 0, "no_signal": 0}
    )


def test_a_group_without_any_score_contributes_nothing() -> None:
    step = step_of(make_group([None, None]))
    assert not step.trained_N.any() and not step.in_loss_N.any()
    assert step.advantages_N.tolist() == step.token_weights_N.tolist() == [0, 0]
    assert (step.no_signal_groups, step.masked_fraction["unscored"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("truncated", "want", "in_loss", "fraction"),
    [
        ("keep", [1.5, -0.5, -0.5, -0.5], [1, 1, 1, 1], 0),
        ("mask", [1.5, -0.5, -0.5, -0.5], [1, 1, 1, 0], 0.25),
        ("exclude", [1.15470, -0.57735, -0.57735, 0], [1, 1, 1, 0], 0.25),
    ],
)
def test_truncated_responses(truncated: str, want: list[float], in_loss: list[int], fraction: float) -> None:
    step = step_of(make_group([1, 0, 0, 0], truncated=(3,)), truncated=truncated, aggregation="token_mean")
    near(step.advantages_N, want)
    assert step.in_loss_N.tolist() == step.trained_N.tolist() == [bool(flag) for flag in in_loss]
    near(step.token_weights_N[:3], [1 / sum(in_loss)] * 3)
    assert step.masked_fraction["truncated"] == fraction
    assert math.isnan(float(step.rewards_B[3])) == (truncated == "exclude")


def test_excluded_responses_are_in_no_running_statistic() -> None:
    for truncated, count in (("keep", 4), ("mask", 4), ("exclude", 3)):
        state = RewardState(kl_coef=0.0)
        step_of(make_group([1, 0, 0, 9], truncated=(3,)), state=state, truncated=truncated)
        assert state.count == count


def test_groups_without_signal_stay_in_the_denominator() -> None:
    step = step_of(make_group([1, 0]), make_group([0.7] * 3), aggregation="token_mean")
    assert step.trained_N.tolist() == [True] * 2 + [False] * 3
    assert step.in_loss_N.all()
    near(step.token_weights_N, [0.2] * 5)
    assert (step.no_signal_groups, step.masked_fraction["no_signal"]) == (1, pytest.approx(0.6))


@pytest.mark.parametrize("advantage", ["group", "group_mean", "rloo", "group_batch_std", "per_agent"])
def test_the_turns_of_a_forked_episode_are_one_response(advantage: str) -> None:
    """Two answers of one turn, and one of three: compared are 1, 0, 0 and not 1, 0, 0, 0, 0."""
    plain = make_group([1, 0, 0], agent_ids=("policy",) * 3)
    forked = make_group([1, 0, 0, 0, 0], agent_ids=("policy",) * 5, sample_index=np.array([0, 1, 2, 2, 2]))
    expected = step_of(plain, advantage=advantage).advantages_N.tolist()
    near(step_of(forked, advantage=advantage).advantages_N, [*expected, expected[2], expected[2]])
    # Its first turn is unscored, so another one stands for it.
    unscored = make_group([1, 0, None, 0], agent_ids=("policy",) * 4, sample_index=np.array([0, 1, 2, 2]))
    near(step_of(unscored, advantage=advantage).advantages_N, [*expected[:2], 0, expected[2]])


@pytest.mark.parametrize("choices", [{"kl": "loss", "kl_estimator": "k2"}, {"entropy_coef": 0.01}])
def test_kl_and_entropy_train_groups_without_signal(choices: dict[str, Any]) -> None:
    groups = [
        make_group([1, 0], reference_logprobs=[-1, -1]),
        make_group([1, 1, None], reference_logprobs=[-1, -1, -1]),
    ]
    step = step_of(*groups, **choices)
    assert step.trained_N.tolist() == [True] * 4 + [False]
    assert (step.no_signal_groups, step.masked_fraction["no_signal"]) == (1, 0)


@pytest.mark.parametrize(
    ("choices", "leaves"),
    [
        ({"correction": "none"}, False),
        ({"correction": "tis_token"}, True),
        ({"correction": "veto"}, True),
        ({"correction": "none", "old_policy": "behavior"}, True),
        ({"correction": "none", "staleness_adaptive": 0.5}, True),
        ({"correction": "none", "kl": "loss", "kl_estimator": "unbiased"}, True),
        ({"correction": "none", "kl": "loss", "kl_estimator": "k2"}, False),
    ],
)
def test_a_token_without_behavior_logprob_leaves_a_loss_that_needs_it(
    choices: dict[str, Any], leaves: bool
) -> None:
    group = make_group(
        [1, 0], [[1, 1], [1]], behavior_logprobs=[math.nan, -1, -1], reference_logprobs=[-1, -1, -1]
    )
    step = step_of(group, **choices)
    assert step.trained_N.tolist() == step.in_loss_N.tolist() == [not leaves, True, True]
    assert step.masked_fraction["missing_logprob"] == pytest.approx(leaves / 3)
    near(step.advantages_N, [0.70711, 0.70711, -0.70711])


def test_masked_fractions_and_trained_tokens_make_up_the_sampled_ones() -> None:
    first = make_group(
        [None, 0, 1], [[1, 1], [1, 1, 0], [1]], truncated=(0, 1), behavior_logprobs=[math.nan] * 2 + [-1] * 4
    )
    second = make_group([1, 1], [[1], [1, 1]])
    step = step_of(first, second, truncated="mask")
    assert step.masked_fraction == pytest.approx(
        {"unscored": 2 / 8, "truncated": 2 / 8, "missing_logprob": 0, "withheld": 0, "no_signal": 3 / 8}
    )
    assert sum(step.masked_fraction.values()) + step.trained_N.sum() / 8 == pytest.approx(1)


# --- rewards --------------------------------------------------------------------------------------------------------


def test_overlong_then_normalised_then_clipped() -> None:
    # budget 10, the last half is punished: 5 tokens 0, 10 tokens -1 (tool tokens are not counted)
    masks = [[1] * 5 + [0] * 5, [1] * 10, [1] * 5, [1] * 5]
    shaped = make_group([1, 1, 1, 1], masks)
    near(step_of(shaped, overlong_penalty=0.5).rewards_B, [1, 0, 1, 1])
    # mean 0.75, std 0.5
    batch = step_of(shaped, overlong_penalty=0.5, reward_normalization="batch")
    near(batch.rewards_B, [0.5, -1.5, 0.5, 0.5])
    clipped = step_of(shaped, overlong_penalty=0.5, reward_normalization="batch", reward_clip=1.0)
    near(clipped.rewards_B, [0.5, -1, 0.5, 0.5])
    # statistics come after: of [.5, -1, .5, .5] mean 0.125
    got = step_of(
        shaped, overlong_penalty=0.5, reward_normalization="batch", reward_clip=1.0, advantage="group_mean"
    )
    near(got.advantages_N[[0, 10]], [0.375, -1.125])


def test_running_normalisation_knows_the_step_itself() -> None:
    state = RewardState(kl_coef=0.0)
    near(
        step_of(make_group([1, 0]), state=state, reward_normalization="running").rewards_B,
        [0.70711, -0.70711],
    )
    # of [1, 0, 1, 1]: mean 0.75, std 0.5
    near(step_of(make_group([1, 1]), state=state, reward_normalization="running").rewards_B, [0.5, 0.5])


def test_unscored_rewards_are_in_no_normalisation() -> None:
    step = step_of(make_group([1, None, 0]), reward_normalization="batch")
    near(step.rewards_B, [0.70711, math.nan, -0.70711])


@pytest.mark.parametrize("choices", [{}, {"overlong_penalty": 0.2}, {"reward_normalization": "batch"}])
@pytest.mark.parametrize("advantage", ["group", "reinforce", "reinforce_baseline", "remax"])
def test_negative_zero_is_zero(advantage: str, choices: dict[str, Any]) -> None:
    step = step_of(make_group([-0.0, 0.0], values=[0, 0]), advantage=advantage, **choices)
    for values in (step.rewards_B, step.advantages_N):
        assert (values == 0).all() and not torch.signbit(values).any()
    assert step.no_signal_groups == 1


# --- estimators, through the configuration --------------------------------------------------------------------------

TEAM: dict[str, Any] = {"agent_ids": ("a", "a", "b", "b"), "sample_index": np.array([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("advantage", "want"),
    [
        ("group", [1.5, -0.5, -0.5, -0.5]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
        ("min_variance", [0.75, -0.25, -0.25, -0.25]),  # until the trainer knows the gradients
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_batch_std", [1.5, -0.5, -0.5, -0.5]),
        ("per_agent", [0.70711, -0.70711, 0, 0]),
        ("joint_group", [0.70711, -0.70711, 0.70711, -0.70711]),  # episodes 0.5 and 0
        ("remax", [0, -1, -1, -1]),
        ("reinforce", [1, 0, 0, 0]),
        ("reinforce_baseline", [1, 0, 0, 0]),  # nothing seen before
        ("reinforce_pp", [1.5, -0.5, -0.5, -0.5]),
        ("gae", [0, -1, -1, -1]),  # V = 1 everywhere
        ("vine", [0, -1, -1, -1]),
    ],
)
def test_every_estimator_on_one_right_answer_of_four(advantage: str, want: list[float]) -> None:
    step = step_of(make_group([1, 0, 0, 0], values=[1] * 4, step_ends=[[1]] * 4, **TEAM), advantage=advantage)
    near(step.advantages_N, want)
    assert step.advantages_N.dtype == torch.float32


def test_group_batch_std_is_of_the_whole_step() -> None:
    # of [1, 0, 4, 3]: mean 2, squares 1 + 4 + 4 + 1, std sqrt(10 / 3) = 1.82574
    step = step_of(make_group([1, 0]), make_group([4, 3]), advantage="group_batch_std")
    near(step.advantages_N, [0.27386, -0.27386, 0.27386, -0.27386])


def test_gae_through_a_tool_call() -> None:
    masks, values = [[1, 1, 0, 0, 1]], [0.1, 0.2, math.nan, math.inf, 0.3]
    step = step_of(make_group([1], masks, values=values), advantage="gae", gamma=1.0, gae_lambda=0.9)
    near(step.advantages_N, [0.757, 0.73, 0, 0, 0.7])
    near(step.returns_N, [0.857, 0.93, 0, 0, 1])
    assert step.values_N is not None and step.values_N[1] == np.float32(0.2)


def test_an_outcome_on_a_tool_token_moves_to_the_last_sampled_one() -> None:
    step = step_of(make_group([1], [[1, 1, 0]]), advantage="reinforce", gamma=0.5)
    near(step.advantages_N, [0.5, 1, 0])


def test_process_rewards_are_earned_at_the_ends_of_steps() -> None:
    group = make_group([1, 0], [[1, 1, 1], [1]], step_ends=[[1, 3], [1]], step_rewards=[[0.5, 0.25], []])
    step = step_of(group, advantage="reinforce", process_rewards=True)
    near(step.advantages_N, [1.75, 1.25, 1.25, 0])
    near(step.rewards_B, [1.75, 0])
    near(step_of(group, advantage="reinforce").advantages_N, [1, 1, 1, 0])


def test_reinforce_baseline_is_the_mean_before_the_step() -> None:
    state = RewardState(kl_coef=0.0)
    near(step_of(make_group([1, 0]), state=state, advantage="reinforce_baseline").advantages_N, [1, 0])
    near(step_of(make_group([1, 1]), state=state, advantage="reinforce_baseline").advantages_N, [0.5, 0.5])
    assert (state.count, state.mean) == (4, 0.75)


def test_what_rewards_are_compared_with_is_normalised_like_them() -> None:
    # of [3, 1]: mean 2, std 1.41421; greedy reward 2 is 0 in that unit
    group = make_group([3, 1], values=[2, 2], step_ends=[[1], [1]])
    for advantage in ("remax", "vine"):
        near(
            step_of(group, advantage=advantage, reward_normalization="batch").advantages_N,
            [0.70711, -0.70711],
        )
    state = RewardState(kl_coef=0.0)
    state.observe_rewards([2.0])
    got = step_of(group, state=state, advantage="reinforce_baseline", reward_normalization="batch")
    near(got.advantages_N, [0.70711, -0.70711])
    # a critic has learned normalised rewards already
    near(step_of(group, advantage="gae", reward_normalization="batch").advantages_N, [-1.29289, -2.70711])


# --- KL -------------------------------------------------------------------------------------------------------------

KL_GROUP = make_group(
    [1, 1],
    [[1, 1, 0], [1]],
    behavior_logprobs=[-1, -1, math.nan, -1],
    reference_logprobs=[-1.5, -2, math.nan, -1],
    values=[0, 0, math.nan, 0],
    step_ends=[[2, 3], [1]],
    agent_ids=("a", "a"),
    sample_index=np.array([0, 1]),
)
"""k1 is 0.5 and 1 in the first response and 0 in the second."""


@pytest.mark.parametrize(
    ("advantage", "want"),
    [
        ("group_mean", [-0.075, -0.075, 0, 0.075]),  # 1 - 0.1 * 1.5 = 0.85 against 1
        ("min_variance", [-0.075, -0.075, 0, 0.075]),
        ("rloo", [-0.15, -0.15, 0, 0.15]),
        ("group", [-0.70711, -0.70711, 0, 0.70711]),
        ("group_batch_std", [-0.70711, -0.70711, 0, 0.70711]),
        ("per_agent", [-0.70711, -0.70711, 0, 0.70711]),
        ("joint_group", [-0.70711, -0.70711, 0, 0.70711]),
        ("remax", [0.85, 0.85, 0, 1]),
        ("vine", [0.85, 0.85, 0, 1]),
        ("reinforce", [0.85, 0.9, 0, 1]),  # each token sees the KL of what follows it
        ("gae", [0.85, 0.9, 0, 1]),
    ],
)
def test_kl_in_the_reward(advantage: str, want: list[float]) -> None:
    step = step_of(KL_GROUP, advantage=advantage, kl="reward", kl_estimator="k1", kl_coef=0.1, gae_lambda=1.0)
    near(step.advantages_N, want)
    near(step.rewards_B, [0.85, 1])
    assert (step.kl_coef, step.kl_reference) == (0.1, pytest.approx(0.5))
    near(step.reference_logprobs_N, [-1.5, -2, math.nan, -1])


def test_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    step = step_of(KL_GROUP, kl="loss", kl_estimator="k2", kl_coef=0.1)
    near(step.rewards_B, [1, 1])
    assert step.advantages_N.tolist() == [0] * 4
    assert step.trained_N.tolist() == [True, True, False, True]
    assert (step.kl_coef, step.kl_reference) == (0.1, pytest.approx(0.5))


def test_distillation_trains_every_sampled_token_and_pays_for_nothing() -> None:
    """Rewards are there and make no advantage; the tool's token is not in the loss."""
    group = make_group([1, 0], [[1, 0, 1], [1]], reference_logprobs=[-2.0, 0.0, -1.5, -1.0])
    step = step_of(group, preset="distill", kl="loss")
    assert step.advantages_N.tolist() == [0] * 4 and step.no_signal_groups == 1
    assert step.trained_N.tolist() == step.in_loss_N.tolist() == [True, False, True, True]
    assert step.kl_coef == 1.0
    near(step.token_weights_N, [1 / 3] * 4)
    assert step.kl_reference == pytest.approx((1.0 + 0.5 + 0.0) / 3)


def test_k2_in_the_reward() -> None:
    step = step_of(KL_GROUP, advantage="reinforce", kl="reward", kl_estimator="k2", kl_coef=1.0)
    near(step.advantages_N, [1 - 0.125 - 0.5, 0.5, 0, 1])


def test_a_missing_behavior_logprob_has_no_kl() -> None:
    group = replace(KL_GROUP, behavior_logprobs=np.array([math.nan, -1, -1, -1], dtype=np.float32))
    step = step_of(
        group, advantage="reinforce", kl="reward", kl_estimator="k1", kl_coef=0.1, correction="none"
    )
    near(step.advantages_N, [0.9, 0.9, 0, 1])
    assert step.in_loss_N.tolist() == [True, True, False, True]
    assert step.kl_reference == pytest.approx(0.5)  # of 1 and 0


def test_a_missing_reference_logprob_is_not_hidden() -> None:
    group = replace(KL_GROUP, reference_logprobs=np.array([-1.5, math.nan, 0, -1], dtype=np.float32))
    state = RewardState(kl_coef=0.1, kl_target=1.0)
    step = step_of(group, state=state, advantage="reinforce", kl="reward", kl_estimator="k1")
    assert step.advantages_N.isnan().tolist() == [True, True, False, False]
    assert step.kl_reference is not None and math.isnan(step.kl_reference)
    assert state.kl_coef == 0.1


def test_the_adaptive_coefficient_moves_after_the_step() -> None:
    choices = {"kl": "loss", "kl_coef": 0.1, "kl_target": 0.25, "kl_horizon": 10}
    state = RewardState.start(algorithm(**choices))
    # the KL of 0.5 is twice the target: up by the largest step, 0.2 / 10
    assert [step_of(KL_GROUP, state=state, **choices).kl_coef for _ in range(3)] == pytest.approx(
        [0.1, 0.102, 0.10404]
    )
    assert state.kl_coef == pytest.approx(0.1061208)


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"advantage": "gae"}, "'values' is missing, which algorithm.advantage=gae"),
        ({"advantage": "remax"}, "'values' is missing, which algorithm.advantage=remax"),
        ({"advantage": "vine"}, "'values' is missing, which algorithm.advantage=vine"),
        ({"kl": "reward"}, "'reference_logprobs' is missing, which algorithm.kl=reward"),
        ({"kl": "loss"}, "'reference_logprobs' is missing, which algorithm.kl=loss"),
    ],
)
def test_a_missing_column_is_named(choices: dict[str, Any], match: str) -> None:
    complete = make_group([1, 0], values=[0, 0], reference_logprobs=[-1, -1], step_ends=[[1], [1]])
    with pytest.raises(SchemaError, match=match):
        step_of(complete, make_group([1, 0]), **choices)


def test_vine_needs_steps_where_there_are_tokens() -> None:
    group = make_group([1, 0, None], [[1], [], [1]], values=[0, 0], step_ends=[[1], [], []])
    near(step_of(group, advantage="vine").advantages_N, [1, 0])
    with pytest.raises(SchemaError, match=r"'step_ends' is missing, which algorithm.advantage=vine"):
        step_of(replace(group, step_ends=()), advantage="vine")


def test_joint_group_needs_episodes() -> None:
    with pytest.raises(
        SchemaError, match=r"'sample_index' is missing, which algorithm.advantage=joint_group"
    ):
        step_of(make_group([1, 0], sample_index=None), advantage="joint_group")


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name != "none"])
def test_a_nan_reward_is_trained_so_that_it_is_found_and_spoils_no_later_step(advantage: str) -> None:
    state = RewardState(kl_coef=0.0)
    group = make_group([math.nan, 0, 1], values=[0] * 3, step_ends=[[1]] * 3)
    step = step_of(group, state=state, advantage=advantage)
    assert step.advantages_N[torch.from_numpy(step.trained_N)].isnan().any()
    assert (state.count, state.mean) == (2, 0.5)


# --- properties -----------------------------------------------------------------------------------------------------

rewards_of_any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def random_groups(draw: st.DrawFn, rewards: st.SearchStrategy[float]) -> list[Group]:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=5))
        num_tokens = sum(map(len, masks))
        logprobs = st.lists(st.floats(-8, 0, width=32), min_size=num_tokens, max_size=num_tokens)
        groups.append(
            make_group(
                [draw(st.none() | rewards) for _ in masks],
                masks,
                truncated=tuple(draw(st.sets(st.integers(0, len(masks) - 1)))),
                behavior_logprobs=draw(logprobs),
                reference_logprobs=draw(logprobs),
                values=draw(logprobs),
                step_ends=[sorted({(len(mask) + 1) // 2, len(mask)} - {0}) for mask in masks],
                sample_index=np.array([row // 2 for row in range(len(masks))]),
                agent_ids=tuple("ab"[row % 2] for row in range(len(masks))),
            )
        )
    return groups


random_choices = st.fixed_dictionaries(
    {
        "kl": st.sampled_from(["none", "reward"]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "truncated": st.sampled_from(["keep", "mask", "exclude"]),
        "reward_normalization": st.sampled_from(["none", "running", "batch"]),
        "overlong_penalty": st.sampled_from([0.0, 0.75]),
        "gamma": st.sampled_from([1.0, 0.9]),
    }
)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(groups=random_groups(rewards_of_any_size), choices=random_choices)
def test_finite_rewards_have_finite_advantages(
    advantage: str, groups: list[Group], choices: dict[str, Any]
) -> None:
    step = step_of(*groups, advantage=advantage, **choices)
    assert step.advantages_N.isfinite().all()
    assert (step.returns_N is None) == (advantage != "gae")
    assert step.returns_N is None or step.returns_N.isfinite().all()
    assert not (step.trained_N & ~step.in_loss_N).any()
    assert (step.advantages_N[torch.from_numpy(step.in_loss_N & ~step.trained_N)] == 0).all()


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(groups=random_groups(st.floats(-5, 5, width=32)), choices=random_choices)
def test_what_stands_on_masked_tokens_does_not_matter(
    advantage: str, groups: list[Group], choices: dict[str, Any]
) -> None:
    dirty = [
        replace(
            group,
            **{
                name: np.where(group.loss_mask, getattr(group, name), np.float32(math.nan))
                for name in ("behavior_logprobs", "reference_logprobs", "values")
            },
        )
        for group in groups
    ]
    want, got = (step_of(*given, advantage=advantage, **choices) for given in (groups, dirty))
    assert got.advantages_N.tolist() == want.advantages_N.tolist()
    assert got.trained_N.tolist() == want.trained_N.tolist()
    assert got.token_weights_N.tolist() == want.token_weights_N.tolist()
    assert (got.kl_reference, got.masked_fraction) == (want.kl_reference, want.masked_fraction)


@pytest.mark.parametrize("advantage", ["group", "group_mean", "rloo", "group_batch_std", "reinforce_pp"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rewards=st.lists(st.none() | st.floats(-5, 5, width=32), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_the_order_of_a_groups_responses_does_not_matter(advantage: str, rewards, order) -> None:
    permutation = order.sample(range(len(rewards)), len(rewards))
    want = step_of(make_group(rewards), advantage=advantage)
    got = step_of(make_group([rewards[row] for row in permutation]), advantage=advantage)
    # equal up to rounding, which is relative to a standard deviation that may be tiny
    assert_close(got.advantages_N, want.advantages_N[permutation], atol=1e-4, rtol=1e-4)
    assert got.trained_N.tolist() == want.trained_N[permutation].tolist()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    batches=st.lists(random_groups(st.floats(-5, 5, width=32)), min_size=2, max_size=4),
    choices=random_choices,
)
def test_a_resumed_run_prepares_the_same_steps(batches: list[list[Group]], choices: dict[str, Any]) -> None:
    chosen = algorithm(**{**choices, "kl": "reward", "kl_target": 0.5, "advantage": "reinforce_baseline"})
    whole, resumed = RewardState.start(chosen), RewardState.start(chosen)
    for groups in batches:
        text = json.dumps(resumed.state())
        resumed = RewardState.start(chosen)
        resumed.restore(json.loads(text))
        want, got = (
            prepare(groups, chosen, max_new_tokens=BUDGET, state=state) for state in (whole, resumed)
        )
        assert got.advantages_N.tolist() == want.advantages_N.tolist()
        assert resumed == whole
