import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headway.learner.corrections import (
    importance_statistics,
    importance_weights,
    is_missing,
    k3,
    truncated_importance_weights,
)
from headway.learner.losses import clip_is_active, clipped_surrogate, policy_loss, token_weights


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def loss_and_grad(logprobs, proximal, advantages, *, mask=None, importance=None, weights=None):
    logprobs = logprobs.clone().requires_grad_()
    ones = torch.ones(len(logprobs))
    out = policy_loss(
        logprobs,
        proximal,
        advantages,
        ones if importance is None else importance,
        ones if weights is None else weights,
        torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask,
        clip_low=0.2,
        clip_high=0.28,
    )
    out.loss.backward()
    assert logprobs.grad is not None
    return out, logprobs.grad


def gradient(log_ratio: float, advantage: float) -> float:
    x = t(log_ratio).requires_grad_()
    clipped_surrogate(x, t(advantage), clip_low=0.2, clip_high=0.28).sum().backward()
    assert x.grad is not None
    return x.grad.item()


def test_the_clip_cuts_the_gradient_only_where_the_ratio_has_already_moved_as_wanted() -> None:
    up, down = math.log(1.5), math.log(0.5)
    assert gradient(up, 1.0) == 0.0
    assert gradient(down, -1.0) == 0.0
    assert gradient(down, 1.0) == pytest.approx(-0.5)  # -A r
    assert gradient(up, -1.0) == pytest.approx(1.5)
    active = clip_is_active(t(up, down, down, up, 0.0), t(1, -1, 1, -1, 1), clip_low=0.2, clip_high=0.28)
    assert active.tolist() == [True, True, False, False, False]


def test_both_bounds_of_the_clip() -> None:
    values = clipped_surrogate(t(1.0, -1.0), t(2.0, -2.0), clip_low=0.2, clip_high=0.28)
    assert_close(values, t(-2 * 1.28, 2 * 0.8))


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
    out, grad = loss_and_grad(
        t(-0.5, nan), t(-0.7, nan), t(2, nan), mask=mask, importance=t(1, nan), weights=t(1, nan)
    )
    assert_close(grad, t(-2.442806, 0.0))


def test_nan_in_an_unmasked_place_is_not_hidden() -> None:
    out, _ = loss_and_grad(t(-0.5, -0.5), t(-0.7, math.nan), t(2, 2))
    assert out.loss.isnan()


def test_everything_masked_gives_zero_connected_to_the_graph() -> None:
    nan = math.nan
    out, grad = loss_and_grad(t(-1, nan), t(nan, nan), t(1, nan), mask=torch.tensor([False, False]))
    assert out.loss.item() == 0.0 and out.loss.requires_grad
    assert grad.tolist() == [0.0, 0.0]


def test_any_finite_log_ratio_has_a_finite_value_and_gradient() -> None:
    out, grad = loss_and_grad(t(0, -1000), t(-1000, 0), t(-1, -1))
    assert out.loss.isfinite() and grad.isfinite().all()


def test_shapes_must_agree() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="one value per token"):
        policy_loss(t(0, 0), t(0, 0), t(1, 1), torch.ones(2, 2), t(1, 1), mask, clip_low=0.2, clip_high=0.2)


def test_importance_weight_carries_no_gradient() -> None:
    # loss -w log p with w = min(exp(0.5), 2); attached, the gradient would be 0
    logprobs = t(-1.0).requires_grad_()
    (-truncated_importance_weights(logprobs - t(-1.5), 2.0) * logprobs).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.648721, abs=1e-6)


def test_token_weights_by_hand() -> None:
    # 8 tokens of loss 1 and 2 tokens of loss 3
    token_mean = token_weights(torch.tensor([8, 2]), aggregation="token_mean")
    assert 8 * 1 * token_mean[0] + 2 * 3 * token_mean[1] == pytest.approx(1.4)
    seq_mean = token_weights(torch.tensor([8, 2]), aggregation="seq_mean_token_mean")
    assert 8 * 1 * seq_mean[0] + 2 * 3 * seq_mean[1] == pytest.approx(2.0)


def test_uneven_shards_share_one_denominator() -> None:
    # three responses on one rank with loss 1 each, one on another with loss 5: mean 2, not 3
    weights = token_weights(torch.tensor([4, 4, 4, 4]), aggregation="seq_mean_token_mean")
    assert (weights * 4 * torch.tensor([1, 1, 1, 5])).sum() == pytest.approx(2.0)


def test_a_response_without_trained_tokens_leaves_the_sequence_count() -> None:
    assert_close(token_weights(torch.tensor([2, 0, 2]), aggregation="seq_mean_token_mean"), t(0.25, 0, 0.25))
    assert_close(token_weights(torch.tensor([2, 0, 2]), aggregation="token_mean"), t(0.25, 0, 0.25))
    assert token_weights(torch.tensor([0, 0]), aggregation="token_mean").tolist() == [0.0, 0.0]


def test_truncated_weights_stay_in_the_denominator() -> None:
    # exp of [.2, -1.2, 1, -9, -.1] capped at 2, unit losses, all five tokens count
    weights = truncated_importance_weights(t(0.2, -1.2, 1.0, -9.0, -0.1), 2.0)
    assert (weights * token_weights(torch.tensor([5]), aggregation="token_mean")).sum() == pytest.approx(
        0.88551, abs=1e-5
    )


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    aggregation=st.sampled_from(["token_mean", "seq_mean_token_mean"]),
    seed=st.integers(0, 999),
    parts=st.integers(1, 4),
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    lengths, aggregation, seed, parts
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    data = torch.randn(4, n, generator=generator)
    weights = token_weights(torch.tensor(lengths), aggregation=aggregation).repeat_interleave(
        torch.tensor(lengths)
    )
    whole, whole_grad = loss_and_grad(data[0], data[1], data[2], importance=data[3].exp(), weights=weights)
    order = torch.randperm(n, generator=generator)
    total, grad = 0.0, torch.zeros(n)
    for part in order.tensor_split(parts):
        out, part_grad = loss_and_grad(
            data[0][part], data[1][part], data[2][part], importance=data[3][part].exp(), weights=weights[part]
        )
        total += out.loss.item()
        grad[part] = part_grad
    assert total == pytest.approx(whole.loss.item(), abs=1e-5)
    assert_close(grad, whole_grad)


def test_statistics_by_hand() -> None:
    # weights 1, 2, 1: ESS 16 / (3 * 6); -log w averages -ln 2 / 3; w - 1 - log w averages (1 - ln 2) / 3
    stats = importance_statistics(t(0.0, math.log(2.0), 0.0))
    assert stats is not None
    assert stats.mean == pytest.approx(4 / 3)
    assert stats.max == pytest.approx(2.0)
    assert stats.ess_fraction == pytest.approx(16 / 18)
    assert stats.k1 == pytest.approx(-0.231049)
    assert stats.k3 == pytest.approx(0.102284, abs=1e-6)
    assert importance_statistics(torch.zeros(0)) is None


def test_the_cap_is_not_in_the_statistics() -> None:
    log_correction = t(3.0, 0.0)
    assert truncated_importance_weights(log_correction, 2.0).tolist() == [2.0, 1.0]
    stats = importance_statistics(log_correction)
    assert stats is not None
    assert stats.max == pytest.approx(math.exp(3.0))
    assert_close(importance_weights(log_correction), t(math.exp(3.0), 1.0))


def test_k3_value_and_no_overflow() -> None:
    assert k3(t(1.0)).item() == pytest.approx(0.7182818, abs=1e-6)
    assert k3(t(100.0, -100.0)).isfinite().all()


def test_zero_is_a_logprob_and_nan_is_none() -> None:
    assert is_missing(t(0.0, math.nan, -math.inf, -3.0)).tolist() == [False, True, True, False]
