"""Values and gradients of the KL estimators are tested apart: an estimate of the right value may have the gradient
of something else. Expectations are exact: every outcome of a small softmax counts by its probability."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.learner.kl import ESTIMATES, Estimator, k1, k2, k3, kl_loss

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def loss_and_grad(
    logprobs: Tensor,
    reference: Tensor,
    estimator: Estimator,
    *,
    behavior: Tensor | None = None,
    factor: Tensor | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[float, Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    loss = kl_loss(
        logprobs,
        reference,
        logprobs.detach() if behavior is None else behavior,
        torch.ones(len(logprobs)) if factor is None else factor,
        torch.ones(len(logprobs)) if weights is None else weights,
        torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask,
        estimator=estimator,
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), grad


def expected_loss(logits: Tensor, reference: Tensor, behavior: Tensor, estimator: Estimator) -> Tensor:
    """Over a token that `behavior` (probabilities) samples, with the importance weight as the factor."""
    logprobs = logits.log_softmax(-1)
    return kl_loss(
        logprobs,
        reference.log(),
        behavior.log(),
        logprobs.exp() / behavior,
        behavior,
        torch.ones_like(logprobs, dtype=torch.bool),
        estimator=estimator,
    )


def reverse_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference)."""
    return (logits.softmax(-1) * (logits.log_softmax(-1) - reference.log())).sum()


def forward_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(reference || policy)."""
    return (reference * (reference.log() - logits.log_softmax(-1))).sum()


def grad_of(value: Tensor, logits: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
    return grad


def distributions(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, probabilities of the reference and of the behavior policy."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference, behavior = torch.randn(3, size, generator=generator)
    return logits.requires_grad_(), reference.softmax(-1), behavior.softmax(-1)


# ---- values


def test_values_by_hand() -> None:
    # policy log-probability -1, reference 0: d = 1
    assert k1(t(1)).item() == -1
    assert k2(t(1)).item() == 0.5
    assert k3(t(1)).item() == pytest.approx(math.e - 2)
    values: dict[Estimator, float] = {"k1": -1, "k2": 0.5, "k3": math.e - 2, "k3_plus": math.e - 2}
    for estimator, value in values.items():
        assert loss_and_grad(t(-1), t(0), estimator)[0] == pytest.approx(value)


def test_expected_values_of_a_coin() -> None:
    # policy (.5, .5), reference (.9, .1)
    policy, reference = t(0.5, 0.5), t(0.9, 0.1)
    d = (reference / policy).log()
    means = {name: float((policy * estimate(d)).sum()) for name, estimate in ESTIMATES.items()}
    assert means == pytest.approx({"k1": 0.510826, "k2": 0.733946, "k3": 0.510826}, abs=1e-6)
    assert reverse_kl(t(0, 0), reference).item() == pytest.approx(0.510826, abs=1e-6)


def test_k3_is_expm1_bit_for_bit_in_the_normal_range() -> None:
    d = torch.linspace(-20, 20, 4001)
    assert torch.equal(k3(d), torch.expm1(d) - d)
    assert (k3(d) >= 0).all()
    assert k3(t(1e-4)).item() == pytest.approx(5e-9, rel=1e-2)  # where exp(d) - d - 1 would be 0


# ---- gradients of single tokens


def test_gradients_by_hand() -> None:
    # d = 1: -d has gradient 1; d^2 / 2 has -1; exp(d) - 1 - d has 1 - e
    gradients: dict[Estimator, float] = {"k1": 1, "k2": -1, "k3": 1 - math.e, "k3_plus": -1}
    for estimator, gradient in gradients.items():
        assert loss_and_grad(t(-1), t(0), estimator)[1].item() == pytest.approx(gradient)
    # policy over behavior e: value e (e - 2); gradient of the product e ((e - 2) + (1 - e)) = -e
    value, grad = loss_and_grad(t(-1), t(0), "unbiased", behavior=t(-2))
    assert value == pytest.approx(math.e * (math.e - 2))
    assert grad.item() == pytest.approx(-math.e)


def test_k3_neither_overflows_nor_loses_its_pull_where_it_matters() -> None:
    # exp(100) is infinite, and a clamp of the result would leave a NaN gradient
    value, grad = loss_and_grad(t(-100), t(0), "k3")
    assert value == pytest.approx(math.exp(20) - 21) and grad.item() == 0.0
    # the policy far above the reference: exp(-100) is 0, the linear part pulls back
    value, grad = loss_and_grad(t(0), t(-100), "k3")
    assert value == pytest.approx(99) and grad.item() == 1.0
    # k2 pulls from both sides
    assert loss_and_grad(t(-100), t(0), "k2")[1].item() == -100
    assert loss_and_grad(t(0), t(-100), "k2")[1].item() == 100


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    logprobs=st.floats(-(2.0**50), 2.0**50, width=32),
    reference=st.floats(-(2.0**50), 2.0**50, width=32),
    behavior=st.floats(-(2.0**50), 2.0**50, width=32),
    estimator=st.sampled_from(ESTIMATORS),
)
def test_finite_inputs_have_a_finite_value_and_gradient(
    logprobs: float, reference: float, behavior: float, estimator: Estimator
) -> None:
    value, grad = loss_and_grad(t(logprobs), t(reference), estimator, behavior=t(behavior))
    assert math.isfinite(value) and grad.isfinite().all()


# ---- expected gradients


def test_expected_gradients_of_a_coin() -> None:
    logits = t(0, 0).requires_grad_()
    reference, half = t(0.9, 0.1), t(0.5, 0.5)
    expected = {"k1": 0.0, "k2": -0.549306, "k3": -0.4, "k3_plus": -0.549306, "unbiased": -0.549306}
    for estimator in ESTIMATORS:
        grad = grad_of(expected_loss(logits, reference, half, estimator), logits)
        assert grad[0].item() == pytest.approx(expected[estimator], abs=1e-6), estimator
        assert grad[1].item() == pytest.approx(-expected[estimator], abs=1e-6), estimator
    assert grad_of(reverse_kl(logits, reference), logits)[0].item() == pytest.approx(-0.549306, abs=1e-6)


@pytest.mark.parametrize("on_policy", [True, False])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(size=st.integers(2, 9), seed=st.integers(0, 9999))
def test_each_estimator_has_the_expected_gradient_that_it_claims(
    size: int, seed: int, on_policy: bool
) -> None:
    logits, reference, behavior = distributions(size, seed)
    if on_policy:
        behavior = logits.softmax(-1).detach()
    reverse, forward = (grad_of(kl(logits, reference), logits) for kl in (reverse_kl, forward_kl))
    expected = {
        "k1": torch.zeros(size),
        "k2": reverse,
        "k3": forward,
        "k3_plus": reverse,
        "unbiased": reverse,
    }
    for estimator in ESTIMATORS:
        grad = grad_of(expected_loss(logits, reference, behavior, estimator), logits)
        assert_close(grad, expected[estimator], rtol=1e-4, atol=2e-6, msg=estimator)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(size=st.integers(2, 9), seed=st.integers(0, 9999))
def test_expected_values_are_the_kl_whoever_sampled(size: int, seed: int) -> None:
    logits, reference, behavior = distributions(size, seed)
    exact = reverse_kl(logits, reference).item()
    for estimator in ("k1", "k3", "k3_plus", "unbiased"):
        value = expected_loss(logits, reference, behavior, estimator).item()
        assert value == pytest.approx(exact, rel=1e-4, abs=1e-5), estimator


def test_off_policy_tokens_need_the_weight() -> None:
    logits, reference, behavior = distributions(5, seed=1)
    logprobs = logits.log_softmax(-1)
    ones = torch.ones(5)
    reverse = grad_of(reverse_kl(logits, reference), logits)
    for estimator in ("k1", "k2", "k3", "k3_plus"):
        loss = kl_loss(
            logprobs, reference.log(), behavior.log(), ones, behavior, ones.bool(), estimator=estimator
        )
        assert (grad_of(loss, logits) - reverse).norm() > 0.1 * reverse.norm(), estimator


@settings(max_examples=15, deadline=None, derandomize=True)
@given(size=st.integers(2, 9), seed=st.integers(0, 9999))
def test_gradients_through_the_sampling_probability(size: int, seed: int) -> None:
    """With gradient through the probability as well: k1 and k3 have that of the reverse KL, k2 has a second penalty
    on top, E[grad log pi * k2]."""
    logits, reference, _ = distributions(size, seed)
    logprobs = logits.log_softmax(-1)
    policy, d = logprobs.exp(), reference.log() - logprobs
    reverse = grad_of(reverse_kl(logits, reference), logits)
    second = grad_of((policy * k2(d).detach()).sum(), logits)
    for estimate, expected in ((k1, reverse), (k3, reverse), (k2, reverse + second)):
        assert_close(grad_of((policy * estimate(d)).sum(), logits), expected, rtol=1e-4, atol=2e-6)
    # and only through the value: the factor of grad log pi is 1, log(pi / ref), 1 - ref / pi
    for estimate, factor in ((k1, torch.ones(size)), (k2, -d), (k3, 1 - d.exp())):
        through_value = grad_of((policy.detach() * estimate(d)).sum(), logits)
        by_score = grad_of(((policy * factor).detach() * logprobs).sum(), logits)
        assert_close(through_value, by_score, rtol=1e-4, atol=2e-6)


# ---- factor, weights, masks


def test_the_factor_multiplies_all_but_the_estimator_that_has_its_own() -> None:
    factor = t(2, 0)
    for estimator in ESTIMATORS:
        _, plain = loss_and_grad(t(-1, -1), t(0, 0), estimator)
        _, grad = loss_and_grad(t(-1, -1), t(0, 0), estimator, factor=factor)
        assert_close(grad, plain if estimator == "unbiased" else plain * factor)
        _, grad = loss_and_grad(t(-1, -1), t(0, 0), estimator, weights=t(0.25, 0.5))
        assert_close(grad, plain * t(0.25, 0.5))


def test_neither_factor_nor_reference_carries_gradient() -> None:
    for estimator in ESTIMATORS:
        logprobs = t(-1, -2).requires_grad_()
        one = torch.ones(2)
        kl_loss(
            logprobs,
            2 * logprobs,
            logprobs - 0.5,
            logprobs.exp(),
            one,
            one.bool(),
            estimator=estimator,
        ).backward()
        attached = logprobs.grad
        detached = loss_and_grad(
            t(-1, -2), t(-2, -4), estimator, behavior=t(-1.5, -2.5), factor=t(-1, -2).exp()
        )[1]
        assert attached is not None
        assert_close(attached, detached)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=8),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e38]),
    seed=st.integers(0, 999),
    parts=st.integers(1, 3),
)
def test_neither_masked_places_nor_the_cut_into_micro_batches_matter(
    mask: list[bool], junk: float, seed: int, parts: int, estimator: Estimator
) -> None:
    keep = torch.tensor(mask)
    clean = torch.randn(5, len(mask), generator=torch.Generator().manual_seed(seed))
    data = torch.where(keep, clean, junk)
    total, grads = 0.0, []
    for index in torch.arange(len(mask)).tensor_split(parts):
        part = data[:, index]
        value, grad = loss_and_grad(
            part[0],
            part[1],
            estimator,
            behavior=part[2],
            factor=part[3],
            weights=part[4],
            mask=keep[index],
        )
        total += value
        grads.append(grad)
    whole = clean[:, keep]
    value, grad = loss_and_grad(
        whole[0], whole[1], estimator, behavior=whole[2], factor=whole[3], weights=whole[4]
    )
    assert total == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert_close(torch.cat(grads)[keep], grad)
    assert torch.cat(grads)[~keep].tolist() == [0.0] * int((~keep).sum())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nan_in_an_unmasked_place_is_not_hidden(estimator: Estimator) -> None:
    nan = math.nan
    assert math.isnan(loss_and_grad(t(-1, nan), t(0, 0), estimator)[0])
    assert math.isnan(loss_and_grad(t(-1, -1), t(0, nan), estimator)[0])
    assert math.isnan(loss_and_grad(t(-1, -1), t(0, 0), estimator, weights=t(1, nan))[0])
    # what an estimator does not use may be missing
    missing = {"behavior": t(0, nan)} if estimator != "unbiased" else {"factor": t(1, nan)}
    assert math.isfinite(loss_and_grad(t(-1, -1), t(0, 0), estimator, **missing)[0])


def test_everything_masked_gives_zero_connected_to_the_graph() -> None:
    for estimator in ESTIMATORS:
        value, grad = loss_and_grad(t(-1), t(0), estimator, mask=torch.tensor([False]))
        assert value == 0.0 and grad.item() == 0.0


def test_shapes_must_agree() -> None:
    one = t(1, 1)
    with pytest.raises(ValueError, match=r"kl_loss needs one value per token.*'factor': \(2, 2\)"):
        kl_loss(one, one, one, torch.ones(2, 2), one, one.bool(), estimator="k2")
