import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headway.core.errors import SchemaError
from headway.core.sections import Algorithm
from headway.learner.rewards import (
    RewardState,
    Scale,
    exact_mean,
    exact_std,
    kl_estimate,
    overlong_penalty,
    reward_scale,
    token_rewards,
)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def algorithm(**choices: object) -> Algorithm:
    return Algorithm.model_validate({"preset": "grpo", **choices})


# --- length ---------------------------------------------------------------------------------------------------------


def test_overlong_penalty_falls_over_the_last_fifth() -> None:
    # limit 100, share 0.2: free up to 80, half way down at 90
    lengths = torch.tensor([0, 79, 80, 85, 90, 100, 130])
    assert_close(overlong_penalty(lengths, 100, 0.2), f64(0, 0, 0, -0.25, -0.5, -1, -1))


def test_overlong_penalty_of_the_paper() -> None:
    # DAPO: L_max 20480, L_cache 4096, so 16384 tokens are free
    lengths = torch.tensor([16384, 16384 + 1024, 20480])
    assert_close(overlong_penalty(lengths, 20480, 0.2), f64(0, -0.25, -1))


def test_overlong_penalty_is_off_at_share_zero_and_never_negative_zero() -> None:
    off = overlong_penalty(torch.tensor([0, 100, 1000]), 100, 0.0)
    on = overlong_penalty(torch.tensor([0, 50]), 100, 0.2)
    for penalty in (off, on):
        assert (penalty == 0).all() and not torch.signbit(penalty).any()


# --- KL -------------------------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand() -> None:
    behavior, reference = f64(-1.0, -2.0, -3.0), f64(-1.5, -1.0, -3.0)
    # d = reference - behavior = -0.5, 1, 0
    assert_close(kl_estimate(behavior, reference, "k1"), f64(0.5, -1.0, 0.0))
    assert_close(kl_estimate(behavior, reference, "k2"), f64(0.125, 0.5, 0.0))
    k3 = f64(math.exp(-0.5) - 1 + 0.5, math.e - 2, 0)
    assert_close(kl_estimate(behavior, reference, "k3"), k3)


def test_kl_has_no_gradient_and_does_not_overflow() -> None:
    behavior = torch.tensor([0.0, -2000.0], requires_grad=True)
    k1 = kl_estimate(behavior, torch.tensor([-2000.0, 0.0]), "k1")
    k2 = kl_estimate(behavior, torch.tensor([-2000.0, 0.0]), "k2")
    k3 = kl_estimate(behavior, torch.tensor([-2000.0, 0.0]), "k3")
    for kl in (k1, k2, k3):
        assert kl.dtype == torch.float64 and not kl.requires_grad and kl.isfinite().all()


# --- token rewards --------------------------------------------------------------------------------------------------


def test_outcome_goes_to_the_last_sampled_token() -> None:
    # lengths 3, 0, 2, 2; the first response ends in a tool token, the last has no sampled token at all
    sampled = torch.tensor([True, True, False, True, True, False, False])
    rewards = token_rewards(f64(1, 5, 2, 7), sampled, torch.tensor([3, 0, 2, 2]))
    assert rewards.tolist() == [0, 1, 0, 0, 2, 0, 0]


def test_kl_is_subtracted_from_sampled_tokens_only() -> None:
    sampled = torch.tensor([True, False, True])
    rewards = token_rewards(f64(1), sampled, torch.tensor([3]), penalties_N=f64(0.1, math.nan, 0.3))
    assert_close(rewards, f64(-0.1, 0, 0.7))


def test_a_nan_penalty_of_a_sampled_token_is_not_hidden() -> None:
    rewards = token_rewards(
        f64(1), torch.tensor([True, True]), torch.tensor([2]), penalties_N=f64(0, math.nan)
    )
    assert rewards.isnan().tolist() == [False, True]


def test_process_rewards_stand_at_the_last_sampled_token_of_their_step() -> None:
    # steps [0, 2), [2, 4), [4, 5); the second one ends in a tool token, the outcome is 1
    sampled = torch.tensor([True, True, True, False, True])
    ends, parts = [np.array([2, 4, 5])], [np.array([0.5, -0.25, 0.125])]
    rewards = token_rewards(f64(1), sampled, torch.tensor([5]), step_ends=ends, step_rewards=parts)
    assert rewards.tolist() == [0, 0.5, -0.25, 0, 1.125]


def test_the_reward_of_a_step_without_sampled_tokens_goes_to_the_action_before_it() -> None:
    sampled = torch.tensor([False, True, False, True])
    ends, parts = [np.array([1, 2, 3, 4])], [np.array([8.0, 1.0, 2.0, 4.0])]
    rewards = token_rewards(f64(0), sampled, torch.tensor([4]), step_ends=ends, step_rewards=parts)
    # nothing was done before the first step's reward, so no action has it
    assert rewards.tolist() == [0, 3, 0, 4]


def test_step_rewards_must_match_the_steps() -> None:
    sampled, lengths = torch.tensor([True, True]), torch.tensor([2])
    none = token_rewards(f64(1), sampled, lengths, step_ends=[np.array([2])], step_rewards=[np.zeros(0)])
    assert none.tolist() == [0, 1]
    for ends in ([], [np.zeros(0, np.int64)], [np.array([1, 2])]):
        with pytest.raises(SchemaError, match=r"step_ends.*process_rewards"):
            token_rewards(f64(1), sampled, lengths, step_ends=ends, step_rewards=[np.array([1.0])])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_token_rewards_add_up_to_the_outcomes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    num_tokens = sum(lengths)
    sampled = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    ).bool()
    outcomes = f64(*range(1, len(lengths) + 1))
    rewards = token_rewards(outcomes, sampled, torch.tensor(lengths))
    carried = [
        outcome if part.any() else 0.0
        for outcome, part in zip(outcomes.tolist(), sampled.split(lengths), strict=True)
    ]
    assert [float(part.sum()) for part in rewards.split(lengths)] == carried
    assert (rewards[~sampled] == 0).all()


# --- statistics -----------------------------------------------------------------------------------------------------


def test_mean_and_std_of_equal_values_are_exact() -> None:
    for values in ([0.7] * 7, [0.1] * 8, [0.4] * 7, [1e300] * 3):
        assert (exact_mean(values), exact_std(values)) == (values[0], 0.0)
    assert (exact_mean([]), exact_std([]), exact_std([3.0])) == (0.0, 0.0, 0.0)
    assert math.copysign(1, exact_mean([-0.0, 0.0])) == 1


def test_mean_and_std_by_hand() -> None:
    # mean 0.25; squared differences 0.5625 + 3 * 0.0625 = 0.75, over 3: 0.25
    assert exact_mean([1, 0, 0, 0]) == 0.25
    assert exact_std([1, 0, 0, 0]) == 0.5


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_mean_and_std_do_not_depend_on_the_order(values: list[float], random) -> None:
    shuffled = random.sample(values, len(values))
    assert (exact_mean(values), exact_std(values)) == (exact_mean(shuffled), exact_std(shuffled))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=6))
def test_running_statistics_are_those_of_all_rewards_together(steps: list[list[float]]) -> None:
    state = RewardState(kl_coef=0.0)
    for rewards in steps:
        state.observe_rewards(rewards)
    seen = [reward for rewards in steps for reward in rewards]
    assert state.count == len(seen)
    assert state.mean == pytest.approx(np.mean(seen) if seen else 0.0, abs=1e-9)
    assert state.std == pytest.approx(np.std(seen, ddof=1) if len(seen) > 1 else 0.0, abs=1e-6)


def test_running_statistics_pass_over_what_is_not_finite() -> None:
    state = RewardState(kl_coef=0.0)
    state.observe_rewards([1.0, math.nan, math.inf, -math.inf, 3.0])
    assert (state.count, state.mean, state.m2) == (2, 2.0, 2.0)


def test_normalisation_by_hand() -> None:
    rewards = f64(1, 0, 0, 0)
    state = RewardState(kl_coef=0.0)
    state.observe_rewards([5.0, 3.0])  # mean 4, std sqrt(2)
    assert_close(reward_scale(rewards, algorithm(), state)(rewards), rewards)
    batch = reward_scale(rewards, algorithm(reward_normalization="batch"), state)
    assert_close(batch(rewards), f64(1.5, -0.5, -0.5, -0.5), atol=1e-5, rtol=0)
    running = reward_scale(rewards, algorithm(reward_normalization="running"), state)
    assert_close(running(rewards), (rewards - 4) / math.sqrt(2), atol=1e-5, rtol=0)


def test_clip_comes_after_normalisation() -> None:
    rewards = f64(1, 0, 0, 0)
    clipped = reward_scale(
        rewards, algorithm(reward_normalization="batch", reward_clip=1.0), RewardState(kl_coef=0.0)
    )
    assert_close(clipped(rewards), f64(1.0, -0.5, -0.5, -0.5), atol=1e-5, rtol=0)
    assert Scale(clip=0.25)(f64(1, -2, 0.125, math.nan)).nan_to_num(9).tolist() == [0.25, -0.25, 0.125, 9]


@pytest.mark.parametrize("how", ["running", "batch"])
def test_equal_rewards_normalise_to_exactly_zero_and_blow_nothing_up(how: str) -> None:
    rewards = torch.full((7,), 0.7, dtype=torch.float32).double()
    state = RewardState(kl_coef=0.0)
    for _ in range(3):
        state.observe_rewards(rewards.tolist())
        scale = reward_scale(rewards, algorithm(reward_normalization=how), state)
        assert scale(rewards).tolist() == [0.0] * 7
        # another value in the same unit is not divided by a standard deviation of 0
        assert float(scale(f64(1.7))) == pytest.approx(1.0)


# --- adaptive KL coefficient ----------------------------------------------------------------------------------------


def test_kl_coefficient_follows_the_target() -> None:
    state = RewardState(kl_coef=0.1, kl_target=2.0, kl_horizon=10)
    state.observe_kl(2.2)  # 10 % over: up by 0.1 / 10
    assert state.kl_coef == pytest.approx(0.1 * 1.01)
    state.observe_kl(20.0)  # clipped at 20 %
    assert state.kl_coef == pytest.approx(0.1 * 1.01 * 1.02)
    state.observe_kl(-5.0)
    assert state.kl_coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    state.observe_kl(2.0)
    state.observe_kl(math.nan)
    assert state.kl_coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_kl_coefficient_without_target_stays() -> None:
    state = RewardState.start(algorithm(kl_coef=0.04))
    state.observe_kl(100.0)
    assert state.kl_coef == 0.04


def test_start_takes_the_configuration() -> None:
    state = RewardState.start(algorithm(kl_coef=0.3, kl_target=0.5, kl_horizon=7))
    assert state == RewardState(kl_coef=0.3, kl_target=0.5, kl_horizon=7)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.lists(st.floats(-9, 9), max_size=4), st.floats(-1, 5)), min_size=1, max_size=8),
    st.integers(0, 8),
)
def test_a_resumed_state_is_the_uninterrupted_one(steps: list[tuple[list[float], float]], cut: int) -> None:
    start = algorithm(kl_coef=0.1, kl_target=1.0, kl_horizon=5)
    whole, resumed = RewardState.start(start), RewardState.start(start)
    for number, (rewards, kl) in enumerate(steps):
        if number == cut:
            text = json.dumps(resumed.state())
            resumed = RewardState.start(start)
            resumed.restore(json.loads(text))
        for state in (whole, resumed):
            state.observe_rewards(rewards)
            state.observe_kl(kl)
    assert resumed == whole


def test_restore_refuses_what_is_no_state_and_changes_nothing() -> None:
    state = RewardState(kl_coef=0.1)
    with pytest.raises(KeyError, match="m2"):
        state.restore({"count": 3, "mean": 1.0, "kl_coef": 0.5})
    assert state == RewardState(kl_coef=0.1)
