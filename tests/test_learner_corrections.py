import math
import time
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.core.config import parse_config
from headway.core.errors import ConfigError
from headway.core.sections import WEIGHTS, Algorithm, Correction
from headway.learner.corrections import (
    Corrected,
    correct,
    counterfactuals,
    ess_fraction,
    importance_statistics,
    importance_weights,
    is_missing,
    statistics_by_lag,
)
from headway.learner.kl import k3
from headway.learner.losses import policy_loss, token_weights

CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def algorithm(correction: str, **thresholds) -> Algorithm:
    return Algorithm.model_validate({"correction": correction, **thresholds})


def apply(
    log_correction: Tensor,
    correction: str,
    *,
    response: Tensor | None = None,
    advantages: Tensor | None = None,
    staleness: Tensor | None = None,
    **thresholds,
) -> Corrected:
    """One response, advantage 1 and no staleness unless given."""
    n = len(log_correction)
    return correct(
        log_correction,
        torch.zeros(n, dtype=torch.int64) if response is None else response,
        torch.ones(n) if advantages is None else advantages,
        torch.zeros(n) if staleness is None else staleness,
        algorithm(correction, **thresholds),
    )


FIVE = t(0.2, -1.2, 1.0, -9.0, -0.1)
"""c = 1.2214, 0.3012, 2.7183, 0.0001, 0.9048."""


# ---- rules


def test_no_correction_is_factor_one() -> None:
    corrected = apply(FIVE, "none")
    assert corrected.factor_M.tolist() == [1, 1, 1, 1, 1]
    assert corrected.rejected == {}


def test_weights_by_hand() -> None:
    assert_close(apply(FIVE, "is_token").factor_M, FIVE.exp())
    assert_close(apply(FIVE, "tis_token").factor_M, t(1.221403, 0.301194, 2.0, 1.234098e-4, 0.904837))
    # products exp(0.2) and exp(1) of two interleaved responses; the cap is 2
    log_correction, response = t(0.5, 0.7, -0.3, 0.3), torch.tensor([9, -4, 9, -4])
    assert_close(
        apply(log_correction, "tis_sequence", response=response).factor_M,
        t(math.exp(0.2), 2, math.exp(0.2), 2),
    )


def test_a_long_product_neither_overflows_nor_vanishes() -> None:
    for sign in (1.0, -1.0):
        factor = apply(sign * torch.ones(4000), "tis_sequence").factor_M
        assert_close(factor, torch.full((4000,), 2.0 if sign > 0 else math.exp(-20)))


def test_a_large_weight_is_clamped() -> None:
    assert_close(apply(t(1000), "is_token").factor_M, t(math.exp(20)))


def test_a_rejected_token_has_factor_zero_and_stays_in_the_denominator() -> None:
    corrected = apply(FIVE, "is_token+mis_token", mis_token_low=0.5, mis_token_high=2.0)
    assert_close(corrected.factor_M, t(1.221403, 0, 0, 0, 0.904837))
    assert corrected.rejected["mis_token"].tolist() == [False, True, True, True, False]
    # unit losses: (1.2214 + 0.9048) / 5, or / 2 where the rejected tokens leave the lengths
    total = corrected.factor_M.sum()
    for length, expected in ((5, 0.42525), (2, 1.06312)):
        weight = token_weights(torch.tensor([length]), aggregation="token_mean", budget=1)
        assert (total * weight).item() == pytest.approx(expected, abs=1e-5)
    truncated = apply(FIVE, "tis_token", correction_cap=2.0).factor_M
    assert truncated.mean().item() == pytest.approx(0.88551, abs=1e-5)


def test_a_fully_rejected_response_can_leave_the_mean_over_responses() -> None:
    response, log_correction = torch.tensor([0, 0, 1, 1]), t(-3, -3, 0, 0)
    corrected = apply(log_correction, "mis_sequence", response=response)
    assert corrected.factor_M.tolist() == [0, 0, 1, 1]
    kept = torch.bincount(response[~corrected.rejected["mis_sequence"]], minlength=2)
    weights = token_weights(kept, aggregation="seq_mean_token_mean", budget=1)
    assert weights.tolist() == [0.0, 0.5]


def test_bounds_belong_to_the_interval() -> None:
    log_correction = t(0.5, 5.0, 0.4999, 5.0001).log()
    assert apply(log_correction, "mis_token").factor_M.tolist() == [1, 1, 0, 0]
    assert apply(t(-50.0), "mis_token", mis_token_low=0.0).factor_M.tolist() == [1]


def test_mis_sequence_by_geometric_mean_or_product() -> None:
    # geometric mean exp(0.4) = 1.49 within [0.5, 2]; product exp(0.8) = 2.23 outside
    log_correction, response = t(0.9, -0.1, 0.0), torch.tensor([3, 3, 1])
    assert apply(log_correction, "mis_sequence", response=response).factor_M.tolist() == [1, 1, 1]
    by_product = apply(log_correction, "mis_sequence", response=response, mis_sequence_mean="product")
    assert by_product.factor_M.tolist() == [0, 0, 1]


def test_one_impossible_token_vetoes_its_response() -> None:
    log_correction, response = t(0, math.log(0.9e-4), 0, math.log(1.1e-4)), torch.tensor([0, 0, 1, 1])
    assert apply(log_correction, "veto", response=response).factor_M.tolist() == [0, 0, 1, 1]
    # below the clamp of weights, e^-20 = 2e-9
    assert apply(t(-30, -20), "veto", response=torch.tensor([0, 1]), veto_below=1e-10).factor_M.tolist() == [
        0,
        1,
    ]


def test_stale_failures_are_masked_and_stale_successes_kept() -> None:
    # mean log(behavior / current) 0.2, 0.2, 0.05 against delta 0.1
    corrected = apply(
        torch.zeros(6),
        "off_policy_mask",
        response=torch.tensor([0, 0, 1, 1, 2, 2]),
        advantages=t(-1, -1, 1, 1, -1, -1),
        staleness=t(0.5, -0.1, 0.5, -0.1, 0.05, 0.05),
    )
    assert corrected.factor_M.tolist() == [0, 0, 1, 1, 1, 1]


def test_a_weight_and_two_rejections_are_reported_apart() -> None:
    corrected = apply(FIVE, "tis_token+mis_token+veto", veto_below=1e-5)
    assert corrected.rejected["mis_token"].tolist() == [False, True, False, True, False]
    assert corrected.rejected["veto"].tolist() == [False] * 5
    assert_close(corrected.factor_M, t(1.221403, 0, 2, 0, 0.904837))


def test_the_factor_carries_no_gradient() -> None:
    for name in CORRECTIONS:
        corrected = apply(FIVE.clone().requires_grad_(), name)
        assert not corrected.factor_M.requires_grad
    # loss -w log p with w = min(exp(0.5), 2) where log p itself is the proximal one
    logprobs = t(-1.0).requires_grad_()
    factor = apply(logprobs - t(-1.5), "tis_token").factor_M
    one, mask = t(1), torch.tensor([True])
    policy_loss(
        logprobs, t(-1), one, factor, one, torch.tensor([0]), mask, objective="none", clip_low=1, clip_high=1
    ).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.648721, abs=1e-6)


def test_shapes_must_agree() -> None:
    for function in (correct, counterfactuals):
        with pytest.raises(ValueError, match=r"one value per token.*'advantages': \(1,\)"):
            function(t(0, 0), torch.tensor([0, 0]), t(1), t(0, 0), Algorithm())
    with pytest.raises(ValueError, match=r"'lag': \(1,\)"):
        statistics_by_lag(t(0, 0), torch.tensor([0]))


def test_a_nan_weight_is_not_hidden() -> None:
    for name in WEIGHTS:
        assert apply(t(0, math.nan), name).factor_M.isnan().any()


steps = st.lists(
    st.tuples(
        st.floats(-12, 3, width=32),
        st.integers(-2, 2),
        st.sampled_from([-1.0, 1.0]),
        st.floats(-1, 1, width=32),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(step=steps, weight=st.sampled_from([(), *((name,) for name in WEIGHTS)]), seed=st.integers(0, 99))
def test_neither_order_nor_the_cut_between_responses_matters(
    step: list[tuple[float, int, float, float]], weight: tuple[Correction, ...], seed: int
) -> None:
    log_correction, response, advantages, staleness = (
        torch.tensor(column) for column in zip(*step, strict=True)
    )
    rules = Algorithm(correction=(*weight, "mis_token", "mis_sequence", "veto", "off_policy_mask"))
    whole = correct(log_correction, response, advantages, staleness, rules)
    order = torch.randperm(len(step), generator=torch.Generator().manual_seed(seed))
    for index in (order[response[order] <= 0], order[response[order] > 0]):
        part = correct(log_correction[index], response[index], advantages[index], staleness[index], rules)
        assert_close(part.factor_M, whole.factor_M[index])
        for name, rejected in part.rejected.items():
            assert torch.equal(rejected, whole.rejected[name][index])


# ---- missing log-probabilities, restricted sampling


def test_zero_is_a_logprob_and_nan_is_none() -> None:
    assert is_missing(t(0.0, math.nan, -math.inf, -3.0)).tolist() == [False, True, True, False]


def test_a_nucleus_is_refused_with_a_correction_because_every_weight_would_be_wrong() -> None:
    # top-p 0.9 keeps the first two tokens and renormalises: the same model seems to differ by log 0.9526 everywhere
    probs = t(0.6964, 0.2562, 0.0347, 0.0128)
    nucleus = probs[:2] / probs[:2].sum()
    false_log_correction = probs[:2].log() - nucleus.log()
    assert_close(importance_weights(false_log_correction), t(0.9526, 0.9526))
    assert_close(false_log_correction, t(-0.0486, -0.0486), atol=5e-5, rtol=0)
    for correction in CORRECTIONS:
        with pytest.raises(ConfigError, match="top_p"):
            parse_config({"sampling": {"top_p": 0.9}, "algorithm": {"correction": correction}})
    none = {"correction": "none", "ess_lr": False}
    parse_config({"sampling": {"top_p": 0.9}, "algorithm": none})


# ---- statistics


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
    stats = importance_statistics(t(3.0, 0.0))
    assert stats is not None
    assert stats.max == pytest.approx(math.exp(3.0))
    assert_close(importance_weights(t(3.0, 0.0)), t(math.exp(3.0), 1.0))


def test_statistics_of_each_lag_are_those_of_its_tokens() -> None:
    log_correction, lag = t(0.0, 1.0, 0.5, -1.0), torch.tensor([2, 0, 2, 0])
    by_lag = statistics_by_lag(log_correction, lag)
    assert list(by_lag) == [0, 2]
    assert by_lag[0] == importance_statistics(t(1.0, -1.0))
    assert by_lag[2] == importance_statistics(t(0.0, 0.5))
    assert statistics_by_lag(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == {}


def test_ess_of_the_applied_factors() -> None:
    assert ess_fraction(t(1, 1, 1, 1)) == 1.0
    assert ess_fraction(t(1, 1, 0, 0)) == 0.5
    assert ess_fraction(t(1, 2, 1)) == pytest.approx(16 / 18)
    assert ess_fraction(t(0, 0)) == 0.0
    assert ess_fraction(torch.zeros(0)) == 0.0
    # capped at 2, the weights e^3 and 1 are worth more
    assert ess_fraction(apply(t(3.0, 0.0), "tis_token").factor_M) == pytest.approx(9 / 10)


def test_k3_of_the_log_correction_is_never_negative_and_finite() -> None:
    assert k3(t(1.0)).item() == pytest.approx(0.7182818, abs=1e-6)
    assert (k3(t(100.0, -100.0, 0.0)) >= 0).all() and k3(t(100.0, -100.0)).isfinite().all()


# ---- counterfactuals


def test_counterfactuals_by_hand() -> None:
    # two responses: c = 1, 1, and 8, 1 (geometric mean 2.83, product 8)
    found = counterfactuals(
        t(0, 0, math.log(8), 0),
        torch.tensor([5, 5, 6, 6]),
        t(1, 1, -1, -1),
        t(0, 0, -math.log(8), 0),
        Algorithm(),
    )
    assert list(found) == ["none", *CORRECTIONS]
    assert (found["none"].tokens, found["none"].responses, found["none"].ess_fraction) == (0, 0, 1)
    assert found["is_token"].ess_fraction == pytest.approx(11**2 / (4 * 67))
    assert found["tis_token"].ess_fraction == pytest.approx(25 / 28)  # 1, 1, 2, 1
    assert found["tis_sequence"].ess_fraction == pytest.approx(36 / 40)  # 1, 1, 2, 2
    assert found["mis_token"].tokens == 0.25  # 8 > 5
    assert found["mis_token"].responses == 0  # one of its tokens stays
    assert found["mis_token"].ess_fraction == pytest.approx(0.75)
    assert found["mis_sequence"].tokens == found["mis_sequence"].responses == 0.5
    assert found["mis_sequence"].ess_fraction == pytest.approx(0.5)
    assert found["veto"].tokens == found["off_policy_mask"].tokens == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(step=steps, mean=st.sampled_from(["geometric", "product"]), cap=st.floats(0.5, 5))
def test_a_counterfactual_is_what_the_correction_alone_does(
    step: list[tuple[float, int, float, float]], mean: str, cap: float
) -> None:
    log_correction, response, advantages, staleness = (
        torch.tensor(column) for column in zip(*step, strict=True)
    )
    thresholds = {"mis_sequence_mean": mean, "correction_cap": cap}
    found = counterfactuals(log_correction, response, advantages, staleness, algorithm("none", **thresholds))
    for name, claim in found.items():
        corrected = correct(log_correction, response, advantages, staleness, algorithm(name, **thresholds))
        rejected = corrected.rejected.get(name, torch.zeros(len(step), dtype=torch.bool))
        wholly = [bool(rejected[response == one].all()) for one in response.unique()]
        assert claim.tokens == pytest.approx(float(rejected.float().mean()))
        assert claim.responses == pytest.approx(sum(wholly) / len(wholly))
        assert claim.ess_fraction == pytest.approx(ess_fraction(corrected.factor_M))
        assert 0 <= claim.ess_fraction <= 1 + 1e-9


def test_counterfactuals_of_nothing_and_of_everything_rejected() -> None:
    none = torch.zeros(0)
    assert counterfactuals(none, none.long(), none, none, Algorithm()) == {}
    found = counterfactuals(t(-20), torch.tensor([0]), t(-1), t(20), Algorithm())
    for name in ("mis_token", "mis_sequence", "veto", "off_policy_mask"):
        assert (found[name].tokens, found[name].responses, found[name].ess_fraction) == (1, 1, 0)


def test_counterfactuals_of_a_large_step_take_milliseconds() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 100_000
    log_correction, advantages = 0.3 * torch.randn(2, n, generator=generator)
    response = torch.randint(0, 512, (n,), generator=generator)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        counterfactuals(log_correction, response, advantages, -log_correction, Algorithm())
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05
