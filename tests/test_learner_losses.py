import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.learner.losses import (
    Aggregation,
    Objective,
    PolicyLoss,
    Ratio,
    clip_interval,
    policy_loss,
    response_log_ratio,
    token_weights,
)

OBJECTIVES: Sequence[Objective] = get_args(Objective)
RATIOS: Sequence[Ratio] = get_args(Ratio)
AGGREGATIONS: Sequence[Aggregation] = get_args(Aggregation)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def loss_and_grad(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    factor: Tensor | None = None,
    weights: Tensor | None = None,
    response: Tensor | None = None,
    objective: Objective = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    **options,
) -> tuple[PolicyLoss, Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    ones = torch.ones(len(logprobs))
    out = policy_loss(
        logprobs,
        old,
        advantages,
        ones if factor is None else factor,
        ones if weights is None else weights,
        torch.zeros(len(logprobs), dtype=torch.int64) if response is None else response,
        torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask,
        objective=objective,
        clip_low=clip_low,
        clip_high=clip_high,
        **options,
    )
    out.loss.backward()
    assert logprobs.grad is not None
    return out, logprobs.grad


# ---- denominators


def weighted(lengths: Sequence[int], token_losses: Sequence[float], aggregation: Aggregation) -> float:
    """Loss of responses whose tokens all have the same loss, with a budget of 10 tokens."""
    weights = token_weights(torch.tensor(lengths), aggregation=aggregation, budget=10)
    return float((weights * torch.tensor(lengths) * t(*token_losses)).sum())


def test_token_weights_by_hand() -> None:
    # 8 tokens of loss 1 and 2 tokens of loss 3: 14 in all
    assert weighted([8, 2], [1, 3], "token_mean") == pytest.approx(1.4)
    assert weighted([8, 2], [1, 3], "seq_mean_token_mean") == pytest.approx(2.0)
    assert weighted([8, 2], [1, 3], "seq_mean_token_sum_norm") == pytest.approx(14 / (10 * 2))
    assert weighted([8, 2], [1, 3], "seq_mean_token_sum") == pytest.approx(7.0)


def test_uneven_ranks_share_one_denominator() -> None:
    # 30 tokens with loss sum 30 on one rank, 10 with sum 30 on another: 1.5, where the mean of rank means is 2
    assert weighted([30, 10], [1, 3], "token_mean") == pytest.approx(1.5)
    # three responses with loss 1 each on one rank, one with loss 5 on another: 2, not 3
    assert weighted([4, 4, 4, 4], [1, 1, 1, 5], "seq_mean_token_mean") == pytest.approx(2.0)


def test_a_response_without_tokens_in_the_loss_is_not_counted() -> None:
    expected_weights: dict[Aggregation, float] = {
        "token_mean": 0.25,
        "seq_mean_token_mean": 0.25,
        "seq_mean_token_sum_norm": 0.05,
        "seq_mean_token_sum": 0.5,
    }
    for aggregation, expected in expected_weights.items():
        weights = token_weights(torch.tensor([2, 0, 2]), aggregation=aggregation, budget=10)
        assert_close(weights, t(expected, 0, expected))
        assert token_weights(torch.tensor([0, 0]), aggregation=aggregation, budget=10).tolist() == [0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
def test_a_last_partial_window_of_micro_batches_weighs_no_less(
    aggregation: Aggregation, accumulation: int
) -> None:
    # three responses of one token with loss 1: 1 for every window, never 3/4
    weights = token_weights(torch.tensor([1, 1, 1]), aggregation=aggregation, budget=1)
    total = sum(
        loss_and_grad(t(*[-1.0] * len(part)), t(*[-1.0] * len(part)), -torch.ones(len(part)), weights=part)[0]
        .loss.detach()
        .item()
        for part in weights.split(accumulation)
    )
    assert total == pytest.approx(1.0)


# ---- granularity of the ratio


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("token", [0.2, 0.4, -0.1]),
        ("sequence", [0.05, 0.4, 0.05]),
        ("sequence_token", [0.05, 0.4, 0.05]),
        ("trajectory", [0.1, 0.4, 0.1]),
        ("mixed", [0.25 * 0.05 + 0.75 * 0.2, 0.4, 0.25 * 0.05 - 0.75 * 0.1]),
    ],
)
def test_log_ratio_at_every_granularity(ratio: Ratio, expected: list[float]) -> None:
    # two responses, interleaved: log-ratios 0.2 and -0.1, and 0.4 alone
    log_ratio = response_log_ratio(t(0.2, 0.4, -0.1), torch.tensor([7, -3, 7]), ratio=ratio, mix=0.25)
    assert_close(log_ratio, t(*expected))


def test_the_sequence_gradient_spreads_and_the_sequence_token_gradient_stays() -> None:
    log_ratio, advantages = t(0.2, -0.1), t(1.0, 3.0)
    s = math.exp(0.05)
    wide = {"clip_low": 0.9, "clip_high": 9.0, "response": torch.tensor([5, 5])}
    out, grad = loss_and_grad(log_ratio, t(0, 0), advantages, ratio="sequence", **wide)
    assert out.loss.item() == pytest.approx(-4 * s)
    assert_close(grad, t(-2 * s, -2 * s))  # each token gets half of (1 + 3) s
    out, grad = loss_and_grad(log_ratio, t(0, 0), advantages, ratio="sequence_token", **wide)
    assert out.loss.item() == pytest.approx(-4 * s)
    assert_close(grad, t(-1 * s, -3 * s))
    out, grad = loss_and_grad(log_ratio, t(0, 0), advantages, ratio="trajectory", **wide)
    assert out.loss.item() == pytest.approx(-4 * math.exp(0.1))
    assert_close(grad, t(-4 * math.exp(0.1), -4 * math.exp(0.1)))


def test_with_one_advantage_per_response_both_sequence_ratios_have_one_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(12, generator=generator) * 0.1
    response = torch.arange(12) % 3
    advantages = t(1.0, -2.0, 0.5)[response]
    _, spread = loss_and_grad(log_ratio, torch.zeros(12), advantages, ratio="sequence", response=response)
    _, own = loss_and_grad(log_ratio, torch.zeros(12), advantages, ratio="sequence_token", response=response)
    assert_close(spread, own)


def test_masked_tokens_are_not_in_the_mean_of_a_response() -> None:
    mask = torch.tensor([True, False, True])
    out, grad = loss_and_grad(t(0.2, math.nan, -0.1), t(0, 0, 0), t(1, 1, 1), ratio="sequence", mask=mask)
    assert out.loss.item() == pytest.approx(-2 * math.exp(0.05))
    assert grad[1] == 0.0


# ---- trust regions


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    log_ratio=st.floats(-3, 3, width=32),
    advantage=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]),
    clip_low=st.floats(0.01, 0.9),
    clip_high=st.floats(0.01, 2.0),
    dual_clip=st.none() | st.floats(1.1, 5.0),
)
def test_where_each_objective_cuts_the_gradient_and_what_it_is_elsewhere(
    log_ratio: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> None:
    logprob = -0.75
    logprobs, old = t(logprob), t(logprob) - t(log_ratio)
    r = float((logprobs - old).exp())
    low, high = 1 - clip_low, 1 + clip_high
    bounds = [low, high, *([dual_clip] if dual_clip else [])]
    if any(abs(r - bound) < 1e-5 for bound in bounds):
        return  # float32 decides at the bound itself
    up = advantage > 0 and r > high
    down = advantage < 0 and r < low
    far = dual_clip is not None and advantage < 0 and r > dual_clip
    surrogate = min(r * advantage, min(max(r, low), high) * advantage)
    if dual_clip is not None and advantage < 0:
        surrogate = max(surrogate, dual_clip * advantage)
    expected: dict[
        Objective, tuple[float, float, bool]
    ] = {  # objective: (value, gradient of the objective, cut)
        "clip": (surrogate, 0.0 if up or down or far else r * advantage, up or down or far),
        "cispo": (min(max(r, low), high) * advantage * logprob, min(max(r, low), high) * advantage, False),
        "masked": (
            0.0 if up or down else r * advantage * logprob,
            0.0 if up or down else r * advantage,
            up or down,
        ),
        "none": (advantage * logprob, advantage, False),
        "trpo": (r * advantage, r * advantage, False),
    }
    for objective, (value, gradient, cut) in expected.items():
        out, grad = loss_and_grad(
            logprobs,
            old,
            t(advantage),
            objective=objective,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
        assert out.loss.item() == pytest.approx(-value, rel=1e-5, abs=1e-6), objective
        assert grad.item() == pytest.approx(-gradient, rel=1e-5, abs=1e-6), objective
        assert int(out.num_clipped) == cut, objective
        if cut:
            assert grad.item() == 0.0
        elif advantage != 0:
            assert grad.item() != 0.0


def test_the_four_regions_of_the_clip_by_hand() -> None:
    up, down = math.log(1.5), math.log(0.5)
    out, grad = loss_and_grad(t(up, down, down, up), t(0, 0, 0, 0), t(1, -1, 1, -1))
    assert_close(grad, t(0, 0, -0.5, 1.5))
    assert out.loss.item() == pytest.approx(-(1.28 - 0.8 + 0.5 - 1.5))
    assert out.num_clipped == 2


def test_the_ratio_one_has_its_full_gradient() -> None:
    for objective in OBJECTIVES:
        _, grad = loss_and_grad(t(-1, -1), t(-1, -1), t(2, -3), objective=objective)
        assert_close(grad, t(-2, 3))


def test_dual_clip_bounds_a_bad_action_that_became_likely() -> None:
    out, grad = loss_and_grad(t(math.log(5)), t(0), t(-2))
    assert out.loss.item() == pytest.approx(10) and grad.item() == pytest.approx(10)
    out, grad = loss_and_grad(t(math.log(5)), t(0), t(-2), dual_clip=3.0)
    assert out.loss.item() == pytest.approx(6) and grad.item() == 0.0
    assert out.num_clipped == 1


def test_cispo_keeps_the_gradient_that_the_clip_cuts_off() -> None:
    cispo, grad = loss_and_grad(t(0), t(-1), t(1), objective="cispo", clip_high=0.2)
    assert grad.item() == pytest.approx(-1.2)
    assert cispo.num_clipped == 0
    clip, grad = loss_and_grad(t(0), t(-1), t(1), clip_high=0.2)
    assert grad.item() == 0.0
    assert clip.num_clipped == 1


def test_staleness_contracts_the_end_that_the_sign_selects() -> None:
    # k = exp(-(m - 0.5)) is 1/2 at m = 0.5 + ln 2, on either side, and 1 up to m = 0.5
    tail = 0.5 + math.log(2)
    low, high = clip_interval(
        t(1, -1, 1, -1, 1, 0),
        clip_low=0.2,
        clip_high=0.28,
        log_importance_M=t(tail, tail, -tail, -tail, 0.5, tail),
        staleness_adaptive=0.5,
    )
    assert_close(low, t(0.8, 0.9, 0.8, 0.9, 0.8, 0.8))
    assert_close(high, t(1.14, 1.28, 1.14, 1.28, 1.28, 1.28))


def test_staleness_cuts_gradients_inside_the_full_interval() -> None:
    tail = 0.5 + math.log(2)
    old, ratio = t(0, 0, 0), t(math.log(1.2), math.log(0.85), math.log(1.2))
    options = {"staleness_adaptive": 0.5, "log_importance_N": t(tail, tail, tail)}
    out, grad = loss_and_grad(ratio, old, t(1, -1, -1), **options)
    assert_close(grad, t(0, 0, 1.2))
    assert out.num_clipped == 2
    out, grad = loss_and_grad(ratio, old, t(1, -1, -1))
    assert_close(grad, t(-1.2, 0.85, 1.2))
    assert out.num_clipped == 0
    _, grad = loss_and_grad(ratio, old, t(1, -1, -1), objective="cispo", **options)
    assert_close(grad, t(-1.14, 0.9, 1.2))
    with pytest.raises(ValueError, match="log importance weight"):
        loss_and_grad(ratio, old, t(1, -1, -1), staleness_adaptive=0.5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    log_importance=st.floats(-1e9, 1e9, width=32),
    advantage=st.sampled_from([-1.0, 0.0, 1.0]),
    threshold=st.floats(0.01, 5),
)
def test_staleness_only_ever_contracts_and_keeps_one_inside(
    log_importance: float, advantage: float, threshold: float
) -> None:
    low, high = clip_interval(
        t(advantage),
        clip_low=0.2,
        clip_high=0.28,
        log_importance_M=t(log_importance),
        staleness_adaptive=threshold,
    )
    assert t(1 - 0.2) <= low <= 1 <= high <= t(1 + 0.28)
    if abs(log_importance) <= threshold:
        assert (low, high) == (t(1 - 0.2), t(1 + 0.28))


# ---- the factor


def test_the_importance_weight_carries_no_gradient() -> None:
    # loss -w log p with w = exp(0.5); attached, the gradient would be 0
    logprobs = t(-1.0).requires_grad_()
    ones, mask = t(1), torch.tensor([True])
    factor = (logprobs - t(-1.5)).exp()
    policy_loss(
        logprobs,
        t(-1),
        ones,
        factor,
        ones,
        torch.tensor([0]),
        mask,
        objective="none",
        clip_low=1,
        clip_high=1,
    ).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.648721, abs=1e-6)


def test_factor_and_token_weight_multiply_each_token() -> None:
    for objective in OBJECTIVES:
        plain, plain_grad = loss_and_grad(t(-1, -1), t(-1.1, -0.9), t(1, -2), objective=objective)
        out, grad = loss_and_grad(
            t(-1, -1), t(-1.1, -0.9), t(1, -2), factor=t(3, 0), weights=t(0.5, 0.5), objective=objective
        )
        assert_close(grad, plain_grad * t(1.5, 0))
        assert out.num_clipped == plain.num_clipped


@pytest.mark.parametrize("objective", ["none", "trpo"])
def test_expected_gradient_is_the_policy_gradient(objective: Objective) -> None:
    # one token of five, all outcomes weighed by their probability under the behavior policy
    generator = torch.Generator().manual_seed(0)
    logits, behavior_logits, rewards = torch.randn(3, 5, generator=generator)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad((logits.softmax(-1) * rewards).sum(), logits)
    logprobs, behavior = logits.log_softmax(-1), behavior_logits.log_softmax(-1)
    weight = (logprobs - behavior).exp()
    cases = {
        "none": (logprobs.detach(), weight),  # the importance weight as the factor
        "trpo": (behavior, torch.ones(5)),  # or in the ratio
    }
    old, factor = cases[objective]
    loss = policy_loss(
        logprobs,
        old,
        rewards,
        factor,
        behavior.exp(),
        torch.arange(5),
        torch.ones(5, dtype=torch.bool),
        objective=objective,
        clip_low=0.2,
        clip_high=0.2,
    ).loss
    (grad,) = torch.autograd.grad(-loss, logits)
    assert_close(grad, expected)


def test_expected_gradient_of_the_trajectory_ratio_is_that_of_whole_responses() -> None:
    # two tokens of three, nine responses; the product ratio to the behavior policy is exact importance sampling
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, generator=generator, requires_grad=True)
    behavior = torch.randn(2, 3, generator=generator).log_softmax(-1)
    rewards = torch.randn(3, 3, generator=generator)
    policy = logits.softmax(-1)
    (expected,) = torch.autograd.grad(torch.einsum("a,b,ab->", policy[0], policy[1], rewards), logits)
    logprobs = logits.log_softmax(-1)
    a, b = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    probability = (behavior[0, a] + behavior[1, b]).exp()
    loss = policy_loss(
        torch.cat([logprobs[0, a], logprobs[1, b]]),
        torch.cat([behavior[0, a], behavior[1, b]]),
        rewards.flatten().repeat(2),
        torch.ones(18),
        probability.repeat(2) / 2,  # mean over the two tokens of a response
        torch.arange(9).repeat(2),
        torch.ones(18, dtype=torch.bool),
        objective="trpo",
        ratio="trajectory",
        clip_low=0.2,
        clip_high=0.2,
    ).loss
    (grad,) = torch.autograd.grad(-loss, logits)
    assert_close(grad, expected)


# ---- masks, shapes, extreme values


def test_masked_nan_changes_neither_value_nor_gradient() -> None:
    nan = math.nan
    mask = torch.tensor([True, False])
    out, grad = loss_and_grad(t(-0.5, -0.5), t(-0.7, nan), t(2, 2), mask=mask)
    # ratio exp(0.2) = 1.2214 is within the clip: loss -2 * 1.2214
    assert out.loss.item() == pytest.approx(-2.442806, abs=1e-6)
    assert_close(grad, t(-2.442806, 0.0))
    # exp(200) in the masked place would be infinite
    out, grad = loss_and_grad(t(-0.5, 100.0), t(-0.7, -100.0), t(2, 2), mask=mask)
    assert out.loss.item() == pytest.approx(-2.442806, abs=1e-6)
    assert_close(grad, t(-2.442806, 0.0))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nan_in_an_unmasked_place_is_not_hidden(objective: Objective) -> None:
    nan, fine = math.nan, t(-0.5, -0.5)
    for ratio in RATIOS:
        for advantages in (t(2, 2), t(-2, -2)):
            out, _ = loss_and_grad(t(-0.5, nan), fine, advantages, objective=objective, ratio=ratio)
            assert out.loss.isnan()
            if objective != "none":
                out, _ = loss_and_grad(fine, t(-0.7, nan), advantages, objective=objective, ratio=ratio)
                assert out.loss.isnan()
            if objective not in ("none", "trpo"):
                stale = {"staleness_adaptive": 0.5, "log_importance_N": t(0, nan)}
                out, _ = loss_and_grad(fine, fine, advantages, objective=objective, ratio=ratio, **stale)
                assert out.loss.isnan()
    assert loss_and_grad(fine, fine, t(1, 1), objective=objective, factor=t(1, nan))[0].loss.isnan()
    assert loss_and_grad(fine, fine, t(1, 1), objective=objective, weights=t(1, nan))[0].loss.isnan()
    out, _ = loss_and_grad(fine, fine, t(1, nan), objective=objective)
    assert out.loss.isnan()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_everything_masked_gives_zero_connected_to_the_graph(objective: Objective, ratio: Ratio) -> None:
    nan = math.nan
    out, grad = loss_and_grad(
        t(-1, nan),
        t(nan, nan),
        t(1, nan),
        mask=torch.tensor([False, False]),
        objective=objective,
        ratio=ratio,
    )
    assert out.loss.item() == 0.0 and out.loss.requires_grad
    assert out.num_clipped == 0
    assert grad.tolist() == [0.0, 0.0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    tokens=st.lists(
        st.tuples(
            st.floats(-(2.0**40), 2.0**40, width=32),
            st.floats(-(2.0**40), 2.0**40, width=32),
            st.floats(-100, 100, width=32),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=4,
    ),
    objective=st.sampled_from(OBJECTIVES),
    ratio=st.sampled_from(RATIOS),
)
def test_finite_inputs_have_a_finite_loss_and_gradient(
    tokens: list[tuple[float, float, float, int]], objective: Objective, ratio: Ratio
) -> None:
    logprobs, old, advantages, response = zip(*tokens, strict=True)
    out, grad = loss_and_grad(
        t(*logprobs),
        t(*old),
        t(*advantages),
        response=torch.tensor(response),
        objective=objective,
        ratio=ratio,
    )
    assert out.loss.isfinite() and grad.isfinite().all()


def test_a_weight_per_sequence_does_not_broadcast_over_tokens() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    bounds = {"objective": "clip", "clip_low": 0.2, "clip_high": 0.2}
    one = t(1, 1)
    response = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"one value per token.*'factor': \(2, 2\)"):
        policy_loss(one, one, one, torch.ones(2, 2), one, response, mask, **bounds)
    with pytest.raises(ValueError, match=r"'log_importance': \(1,\)"):
        policy_loss(one, one, one, one, one, response, mask, log_importance_N=t(1), **bounds)
    rows = torch.ones(2, 2)
    with pytest.raises(ValueError, match="one value per token"):
        policy_loss(rows, rows, rows, rows, rows, rows.long(), rows.bool(), **bounds)


# ---- how the step is cut up


@st.composite
def cut_steps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Lengths of the responses, the micro-batch of each, and a seed."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    parts = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    return lengths, parts, draw(st.integers(0, 999))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ratio", RATIOS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(step=cut_steps())
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradient(
    step: tuple[list[int], list[int], int], ratio: Ratio, objective: Objective
) -> None:
    lengths, parts, seed = step
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(10**12), 10**12, (len(lengths),), generator=generator)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    n = len(owner)
    logprobs = -torch.rand(n, generator=generator)
    old = logprobs + 0.3 * torch.randn(n, generator=generator)
    advantages = torch.randn(len(lengths), generator=generator)[owner]
    factor = torch.rand(n, generator=generator)
    options = {
        "objective": objective,
        "ratio": ratio,
        "dual_clip": 1.5,
        "staleness_adaptive": 0.2,
    }
    log_importance = torch.randn(n, generator=generator)
    order = torch.randperm(n, generator=generator)  # tokens of a response need not be neighbours
    micro_batches = [order[torch.tensor(parts)[owner[order]] == part] for part in set(parts)]
    for aggregation in AGGREGATIONS:
        weights = token_weights(torch.tensor(lengths), aggregation=aggregation, budget=5)[owner]

        def at(index: Tensor, weights: Tensor = weights) -> tuple[PolicyLoss, Tensor]:
            return loss_and_grad(
                logprobs[index],
                old[index],
                advantages[index],
                factor=factor[index],
                weights=weights[index],
                response=ids[owner[index]],
                log_importance_N=log_importance[index],
                **options,
            )

        whole, whole_grad = at(torch.arange(n))
        loss, num_clipped, grad = 0.0, 0, torch.full((n,), math.nan)
        for index in micro_batches:
            out, part_grad = at(index)
            loss += out.loss.item()
            num_clipped += int(out.num_clipped)
            grad[index] = part_grad
        assert loss == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-5)
        assert num_clipped == int(whole.num_clipped)
        assert_close(grad, whole_grad)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ratio", RATIOS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=8),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e38]),
    seed=st.integers(0, 999),
)
def test_what_masked_places_hold_changes_nothing(
    mask: list[bool], junk: float, seed: int, ratio: Ratio, objective: Objective
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.tensor(mask)
    data = torch.randn(6, len(mask), generator=generator)
    response = torch.randint(0, 2, (len(mask),), generator=generator)

    def run(data: Tensor, response: Tensor, mask: Tensor) -> tuple[PolicyLoss, Tensor]:
        return loss_and_grad(
            data[0],
            data[1],
            data[2],
            factor=data[3],
            weights=data[4],
            log_importance_N=data[5],
            staleness_adaptive=0.5,
            response=response,
            mask=mask,
            objective=objective,
            ratio=ratio,
        )

    out, grad = run(torch.where(keep, data, junk), response, keep)
    without, without_grad = run(data[:, keep], response[keep], keep[keep])
    assert out.loss.item() == without.loss.item()
    assert out.num_clipped == without.num_clipped
    assert_close(grad[keep], without_grad, rtol=0, atol=0)
    assert grad[~keep].tolist() == [0.0] * int((~keep).sum())
