import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.learner import advantages as estimators

Estimator = Callable[[Tensor, Tensor], Tensor]

GROUP_ESTIMATORS: dict[str, Estimator] = {
    "group": estimators.group,
    "group_mean": estimators.group_mean,
    "rloo": estimators.rloo,
    "group_batch_std": lambda rewards, scored: estimators.group_batch_std(rewards, scored, 0.5),
    "per_agent": lambda rewards, scored: estimators.per_agent(rewards, scored, ()),
    "joint_group": lambda rewards, scored: estimators.joint_group(
        rewards, scored, torch.arange(len(rewards))
    ),
    "min_variance": lambda rewards, scored: estimators.min_variance(
        rewards, scored, torch.ones(len(rewards)), torch.ones(len(rewards))
    ),
}
"""Each as a function of one agent's rewards and who is scored."""

ONE_OF_FOUR = {
    "group": [1.5, -0.5, -0.5, -0.5],  # mean 0.25, unbiased std 0.5
    "group_mean": [0.75, -0.25, -0.25, -0.25],
    "rloo": [1, -1 / 3, -1 / 3, -1 / 3],
    "group_batch_std": [1.5, -0.5, -0.5, -0.5],  # the batch's std is given as 0.5
    "per_agent": [1.5, -0.5, -0.5, -0.5],
    "joint_group": [1.5, -0.5, -0.5, -0.5],
    "min_variance": [0.75, -0.25, -0.25, -0.25],  # equal weights and norms: the plain mean
}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def near(got: Tensor, want: list[float]) -> None:
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor(want, dtype=torch.float32), atol=1e-5, rtol=0)


every_group_estimator = pytest.mark.parametrize("name", GROUP_ESTIMATORS)


# --- comparing the responses of a group -----------------------------------------------------------------------------


@every_group_estimator
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float32, torch.float64])
def test_one_right_answer_of_four(name: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 0, 0, 0]).to(dtype)
    near(GROUP_ESTIMATORS[name](rewards, mask(1, 1, 1, 1)), ONE_OF_FOUR[name])


def test_an_unscored_response_is_left_out_of_the_statistics() -> None:
    # of [1, 0, 0]: mean 1/3, unbiased std 0.57735
    got = estimators.group(f64(1, math.nan, 0, 0), mask(1, 0, 1, 1))
    near(got, [1.15470, 0, -0.57735, -0.57735])
    near(estimators.rloo(f64(1, math.nan, 0, 0), mask(1, 0, 1, 1)), [1, 0, -0.5, -0.5])


@every_group_estimator
@pytest.mark.parametrize("unscored", [math.nan, math.inf, 0.0, 9.0])
def test_an_unscored_response_may_hold_anything(name: str, unscored: float) -> None:
    estimate = GROUP_ESTIMATORS[name]
    want = estimate(f64(1, 0, 0.5), mask(1, 1, 1)).tolist()
    got = estimate(f64(1, unscored, 0, 0.5), mask(1, 0, 1, 1)).tolist()
    assert got == [want[0], 0.0, want[1], want[2]]


@every_group_estimator
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.7] * 7, [0.1] * 8, [0.4] * 7, [-0.0, 0.0, -0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float], dtype: torch.dtype) -> None:
    got = GROUP_ESTIMATORS[name](
        torch.tensor(rewards, dtype=dtype), torch.ones(len(rewards), dtype=torch.bool)
    )
    assert (got == 0).all() and not torch.signbit(got).any()


@every_group_estimator
def test_fewer_than_two_scored_responses_give_zero(name: str) -> None:
    estimate = GROUP_ESTIMATORS[name]
    assert estimate(f64(1), mask(1)).tolist() == [0]
    assert estimate(f64(1, 0, 0), mask(1, 0, 0)).tolist() == [0, 0, 0]
    assert estimate(f64(math.nan, math.nan), mask(0, 0)).tolist() == [0, 0]
    assert estimate(f64(), mask()).tolist() == []


@every_group_estimator
def test_a_nan_among_the_scored_rewards_is_not_hidden(name: str) -> None:
    assert GROUP_ESTIMATORS[name](f64(1, math.nan, 0), mask(1, 1, 1)).isnan().any()


@every_group_estimator
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.booleans())),
    order=st.randoms(use_true_random=False),
)
def test_any_finite_rewards_have_finite_advantages_that_follow_a_permutation(name, rows, order) -> None:
    rewards, scored = f64(*(reward for reward, _ in rows)), mask(*(flag for _, flag in rows))
    permutation = torch.tensor(order.sample(range(len(rows)), len(rows)), dtype=torch.int64)
    got = GROUP_ESTIMATORS[name](rewards, scored)
    permuted = GROUP_ESTIMATORS[name](rewards[permutation], scored[permutation])
    assert got.isfinite().all() and (got[~scored] == 0).all()
    scale = max([1.0, *rewards.abs().tolist()]) if name not in ("group", "per_agent", "joint_group") else 1.0
    assert_close(permuted / scale, got[permutation] / scale, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12))
def test_group_mean_is_rloo_times_g_minus_one_over_g(rewards: list[float]) -> None:
    scored, num = torch.ones(len(rewards), dtype=torch.bool), len(rewards)
    want = (num - 1) / num * estimators.rloo(f64(*rewards), scored)
    assert_close(estimators.group_mean(f64(*rewards), scored), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num", [2, 4, 16])
def test_variances_of_the_two_baselines(num: int) -> None:
    """Var(R - mean of the others) = s^2 G / (G - 1) and Var(R - mean) = s^2 (G - 1) / G, for s = 3. Over 4000 groups
    of independent normal rewards the estimates have a standard error below 2.3 %; five of them are allowed."""
    rewards = 3 * torch.randn(4000, num, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
    scored = torch.ones(num, dtype=torch.bool)
    leave_one_out = torch.stack([estimators.rloo(row, scored) for row in rewards])
    mean = torch.stack([estimators.group_mean(row, scored) for row in rewards])
    # the first response of each group: one sample per group
    assert float(leave_one_out[:, 0].var()) == pytest.approx(9 * num / (num - 1), rel=0.115)
    assert float(mean[:, 0].var()) == pytest.approx(9 * (num - 1) / num, rel=0.115)


def test_group_batch_std_divides_by_the_std_it_is_given() -> None:
    near(estimators.group_batch_std(f64(3, 1), mask(1, 1), 4.0), [0.25, -0.25])


def test_per_agent_keeps_scales_apart() -> None:
    # solver: [1, 0] has std 0.70711; checker: [100, 300] has std 141.42
    got = estimators.per_agent(
        f64(1, 100, 0, 300), mask(1, 1, 1, 1), ["solver", "checker", "solver", "checker"]
    )
    near(got, [0.70711, -0.70711, -0.70711, 0.70711])
    # an agent with a single scored response has nothing to compare it with
    got = estimators.per_agent(
        f64(1, 100, 0, 300), mask(1, 1, 1, 0), ["solver", "checker", "solver", "checker"]
    )
    near(got, [0.70711, 0, -0.70711, 0])


def test_joint_group_shares_the_episodes_reward() -> None:
    # episodes 4: mean(1, 0) = 0.5; 7: mean(1, 1) = 1; 9: 0 from its only scored response.
    # mean 0.5, std 0.5: [0, 1, -1]
    rewards, scored = f64(1, 1, 0, 0, 1, math.nan), mask(1, 1, 1, 1, 1, 0)
    got = estimators.joint_group(rewards, scored, torch.tensor([4, 7, 9, 4, 7, 9]))
    near(got, [0, 1, -1, 0, 1, 0])


def test_joint_group_leaves_out_an_episode_without_a_score() -> None:
    rewards, scored = f64(1, 0, math.nan, math.nan), mask(1, 1, 0, 0)
    got = estimators.joint_group(rewards, scored, torch.tensor([0, 1, 2, 2]))
    near(got, [0.70711, -0.70711, 0, 0])


def test_joint_episodes_of_different_size_with_one_reward_are_equal() -> None:
    # 0.7 + 0.7 + 0.7 is not 3 * 0.7 in binary; still no episode is better than another
    got = estimators.joint_group(f64(*[0.7] * 6), mask(*[1] * 6), torch.tensor([0, 0, 0, 1, 1, 2]))
    assert got.tolist() == [0] * 6


def test_min_variance_baseline_by_hand() -> None:
    # w^2 |g|^2 = 4 * 1, 1 * 2, 1 * 2: b = (4 * 1 + 2 * 0 + 2 * 0.5) / 8 = 0.625
    got = estimators.min_variance(f64(1, 0, 0.5), mask(1, 1, 1), f64(2, 1, 1), f64(1, 2, 2))
    near(got, [0.375, -0.625, -0.125])


def test_min_variance_without_gradients_is_the_plain_mean() -> None:
    near(estimators.min_variance(f64(1, 0), mask(1, 1), f64(1, 1), f64(0, 0)), [0.5, -0.5])


def test_min_variance_ignores_the_gradient_of_an_unscored_response() -> None:
    got = estimators.min_variance(f64(1, 0, 5), mask(1, 1, 0), f64(1, 1, math.nan), f64(3, 1, math.nan))
    near(got, [0.25, -0.75, 0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.floats(-5, 5), st.floats(0.01, 10), st.floats(0.01, 100)), min_size=2, max_size=6
    ),
    shift=st.floats(-1, 1),
)
def test_no_other_baseline_has_less_second_moment(
    rows: list[tuple[float, float, float]], shift: float
) -> None:
    """b minimises sum of w^2 |g|^2 (R - b)^2, of which the variance of the estimate is made."""
    rewards, weights, norms = (f64(*column) for column in zip(*rows, strict=True))
    got = estimators.min_variance(rewards, torch.ones(len(rows), dtype=torch.bool), weights, norms).double()

    def second_moment(advantages: Tensor) -> float:
        return float((weights**2 * norms * advantages**2).sum())

    assert second_moment(got) <= second_moment(got + shift) * (1 + 1e-5) + 1e-5


# --- token by token -------------------------------------------------------------------------------------------------

REWARDS = f64(0, 0, 0, 0, 1)
VALUES = f64(0.1, 0.2, 9, 9, 0.3)
MASK = mask(1, 1, 0, 0, 1)
LENGTHS = torch.tensor([5])
"""One response whose third and fourth token come from a tool."""


def test_gae_carries_over_tool_tokens() -> None:
    # 1 - 0.3 = 0.7; 0.3 - 0.2 + 0.9 * 0.7 = 0.73; 0.2 - 0.1 + 0.9 * 0.73 = 0.757
    got, returns = estimators.gae(REWARDS, VALUES, MASK, LENGTHS, gamma=1.0, gae_lambda=0.9)
    near(got, [0.757, 0.73, 0, 0, 0.7])
    near(returns, [0.857, 0.93, 0, 0, 1.0])


def test_gae_counts_trained_tokens_in_gamma() -> None:
    # gamma 0.5, lambda 1: A = discounted reward - V: 1 - 0.3, 0.5 - 0.2, 0.25 - 0.1
    got, returns = estimators.gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.5, gae_lambda=1.0)
    near(got, [0.15, 0.3, 0, 0, 0.7])
    near(returns, [0.25, 0.5, 0, 0, 1])


def test_gae_at_lambda_one_is_monte_carlo_and_at_zero_the_td_error() -> None:
    rewards, values = f64(0.5, -1, 7, 2, 0.25, 4), f64(1, 2, 9, 3, 4, 5)
    sampled, lengths = mask(1, 1, 0, 1, 1, 1), torch.tensor([4, 2])
    got, _ = estimators.gae(rewards, values, sampled, lengths, gamma=0.9, gae_lambda=1.0)
    to_go = [0.5 - 0.9 + 0.81 * 2, -1 + 0.9 * 2, 0, 2, 0.25 + 0.9 * 4, 4]
    near(got, [to_go[0] - 1, to_go[1] - 2, 0, to_go[3] - 3, to_go[4] - 4, to_go[5] - 5])
    got, _ = estimators.gae(rewards, values, sampled, lengths, gamma=0.9, gae_lambda=0.0)
    near(got, [0.5 + 0.9 * 2 - 1, -1 + 0.9 * 3 - 2, 0, 2 - 3, 0.25 + 0.9 * 5 - 4, 4 - 5])


def test_vtrace_weighs_what_the_present_policy_would_not_do() -> None:
    """gamma 1, lambda 1, cap 1; ratios 2 (capped), 1/2, 1: from the back 0.3 + 0.7; 0.2 + 0.5 * 0.1 + 0.5 * 0.7; 0.1 + 0.1
    + 0.4."""
    ratios = torch.tensor([2.0, 0.5, 7.0, 7.0, 1.0]).double().log()
    got = estimators.vtrace_targets(REWARDS, VALUES, ratios, MASK, LENGTHS, gamma=1.0, lam=1.0, cap=1.0)
    near(got, [0.6, 0.6, 0, 0, 1.0])
    # A cap of 2 and lambda 1/2: 0.2 + 0.5 * 0.1 + 0.25 * 0.7; 0.1 + 2 * 0.1 + 1 * 0.225
    got = estimators.vtrace_targets(REWARDS, VALUES, ratios, MASK, LENGTHS, gamma=1.0, lam=0.5, cap=2.0)
    near(got, [0.525, 0.425, 0, 0, 1.0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.9), (0.5, 1.0), (0.9, 0.0)])
def test_vtrace_of_the_sampling_policy_is_gae(gamma: float, lam: float) -> None:
    rewards, values = f64(0.5, -1, 7, 2, 0.25, 4), f64(1, 2, 9, 3, 4, 5)
    sampled, lengths = mask(1, 1, 0, 1, 1, 1), torch.tensor([4, 2])
    _, returns = estimators.gae(rewards, values, sampled, lengths, gamma=gamma, gae_lambda=lam)
    same = torch.zeros(6, dtype=torch.float64)
    got = estimators.vtrace_targets(rewards, values, same, sampled, lengths, gamma=gamma, lam=lam, cap=1.0)
    near(got, returns.tolist())


def test_reward_to_go_is_not_reset_at_tool_tokens() -> None:
    near(estimators.reinforce(REWARDS, MASK, LENGTHS, gamma=0.9), [0.81, 0.9, 0, 0, 1])


def test_reinforce_baseline_is_subtracted_from_trained_tokens() -> None:
    got = estimators.reinforce_baseline(REWARDS, MASK, LENGTHS, gamma=0.9, baseline=0.25)
    near(got, [0.56, 0.65, 0, 0, 0.75])


def test_reinforce_pp_normalises_over_all_tokens_of_the_step() -> None:
    # rewards to go 1, 1 and 0, 0 of two responses: mean 0.5, unbiased std 0.57735
    got = estimators.reinforce_pp(f64(0, 1, 5, 0, 0), mask(1, 1, 0, 1, 1), torch.tensor([3, 2]), gamma=1.0)
    near(got, [0.86603, 0.86603, 0, -0.86603, -0.86603])
    # rewards to go .81, .9, 1: mean 0.90333, std 0.09504
    got = estimators.reinforce_pp(REWARDS, MASK, LENGTHS, gamma=0.9)
    near(got, [-0.98199, -0.03507, 0, 0, 1.01706])


def test_reinforce_pp_of_equal_rewards_is_exactly_zero() -> None:
    rewards, lengths = f64(*[0, 0, 0.7] * 7), torch.tensor([3] * 7)
    got = estimators.reinforce_pp(rewards, torch.ones(21, dtype=torch.bool), lengths, gamma=1.0)
    assert got.tolist() == [0] * 21


def test_remax_with_a_right_greedy_answer() -> None:
    # one token each; greedy reward 1
    lengths = torch.tensor([1, 1, 1, 1])
    got = estimators.remax(f64(1, 0, 0, 0), torch.ones(4), mask(1, 1, 1, 1), lengths)
    near(got, [0, -1, -1, -1])
    got = estimators.remax(f64(-0.0), torch.zeros(2), mask(1, 1), torch.tensor([2]))
    assert (got == 0).all() and not torch.signbit(got).any()


def test_vine_gives_each_step_the_change_of_its_value() -> None:
    # V = 0.25, 0.75, 0.5 at the steps [0, 2), [2, 3), [3, 5); R = 1
    values = f64(0.25, 0.25, 0.75, 0.5, 0.5)
    got = estimators.vine(f64(1), values, [np.array([2, 3, 5])], mask(1, 1, 1, 1, 1), torch.tensor([5]))
    near(got, [0.5, 0.5, -0.25, 0.5, 0.5])
    assert float(got[[0, 2, 3]].sum()) == pytest.approx(1 - 0.25)  # steps add up to R - V(s_0)


def test_vine_passes_over_steps_and_tokens_that_are_not_trained() -> None:
    # a step of tool tokens between two of the policy's, and a tool token that opens the last one
    values = f64(0.25, math.nan, math.nan, 0.5)
    ends = [np.array([1, 2, 4])]
    near(estimators.vine(f64(1), values, ends, mask(1, 0, 0, 1), torch.tensor([4])), [0.25, 0, 0, 0.5])


def test_vine_gives_the_rest_to_the_last_step() -> None:
    values = f64(0.25, 0.5, 0.5)
    near(
        estimators.vine(f64(1), values, [np.array([1, 2])], mask(1, 1, 1), torch.tensor([3])),
        [0.25, 0.5, 0.5],
    )


TOKEN_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "gae": lambda r, _, v, m, n: estimators.gae(r, v, m, n, gamma=0.9, gae_lambda=0.8)[0],
    "returns of gae": lambda r, _, v, m, n: estimators.gae(r, v, m, n, gamma=0.9, gae_lambda=0.8)[1],
    "reinforce": lambda r, _, v, m, n: estimators.reinforce(r, m, n, gamma=0.9),
    "reinforce_baseline": lambda r, _, v, m, n: estimators.reinforce_baseline(
        r, m, n, gamma=0.9, baseline=0.5
    ),
    "reinforce_pp": lambda r, _, v, m, n: estimators.reinforce_pp(r, m, n, gamma=0.9),
    "remax": lambda _, R, v, m, n: estimators.remax(R, v, m, n),
    "vine": lambda _, R, v, m, n: estimators.vine(R, v, [np.array([k]) for k in n.tolist()], m, n),
}
"""Each as a function of token rewards, outcomes, values, mask and lengths; vine with a single step."""


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_masked_tokens_change_nothing_wherever_they_stand(name: str, data: st.DataObject) -> None:
    finite = st.floats(-10, 10, width=32)
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
    sampled = torch.tensor([flag for row in masks for flag in row], dtype=torch.bool)
    lengths = torch.tensor([len(row) for row in masks])
    num_tokens = len(sampled)
    rewards = f64(*data.draw(st.lists(finite, min_size=num_tokens, max_size=num_tokens)))
    values = f64(*data.draw(st.lists(finite, min_size=num_tokens, max_size=num_tokens)))
    outcomes = f64(*data.draw(st.lists(finite, min_size=len(masks), max_size=len(masks))))
    rewards[~sampled], values[~sampled] = math.nan, math.inf
    estimate = TOKEN_ESTIMATORS[name]
    got = estimate(rewards, outcomes, values, sampled, lengths)
    without = estimate(
        rewards[sampled],
        outcomes,
        values[sampled],
        torch.ones(int(sampled.sum()), dtype=torch.bool),
        torch.tensor([sum(row) for row in masks]),
    )
    assert got[sampled].tolist() == without.tolist()
    assert (got[~sampled] == 0).all() and got.isfinite().all()


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_a_nan_in_a_trained_token_is_not_hidden(name: str) -> None:
    nan = f64(math.nan)
    got = TOKEN_ESTIMATORS[name](nan, nan, nan, mask(1), torch.tensor([1]))
    two = TOKEN_ESTIMATORS[name](
        f64(math.nan, 0), f64(math.nan, 0), f64(0, 0), mask(1, 1), torch.tensor([1, 1])
    )
    assert name == "reinforce_pp" or got.isnan().all()  # a single value is its own mean
    assert two.isnan().any()


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_the_largest_rewards_stay_finite(name: str) -> None:
    large = torch.finfo(torch.float32).max
    got = TOKEN_ESTIMATORS[name](
        f64(large, -large, large),
        f64(large, -large),
        f64(-large, large, large),
        mask(1, 1, 1),
        torch.tensor([2, 1]),
    )
    assert got.isfinite().all()
