"""Published numbers, reproduced with the functions that train: a worked chapter on GRPO and its successors prints
these tables, with these seeds. Compared at the precision of the print."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headway.core.sections import Algorithm
from headway.learner.corrections import correct, importance_weights
from headway.learner.kl import ESTIMATES
from headway.learner.losses import Aggregation, policy_loss, response_log_ratio, token_weights

# ---- the weight of a token under two denominators

LENGTHS = torch.tensor([200, 50, 2000, 400])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("aggregation", "per_token", "per_response"),
    [
        (
            "seq_mean_token_mean",
            ["+1.08e-03", "-4.33e-03", "-1.08e-04", "+5.41e-04"],
            ["+0.217", "-0.217", "-0.217", "+0.217"],
        ),
        (
            "token_mean",
            ["+3.27e-04", "-3.27e-04", "-3.27e-04", "+3.27e-04"],
            ["+0.065", "-0.016", "-0.654", "+0.131"],
        ),
    ],
)
def test_weight_of_a_token_in_the_gradient(
    aggregation: Aggregation, per_token: list[str], per_response: list[str]
) -> None:
    advantages = (REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-6)
    response = torch.arange(4).repeat_interleave(LENGTHS)
    logprobs = torch.full((2650,), -1.0, requires_grad=True)
    policy_loss(
        logprobs,
        logprobs.detach(),
        advantages[response],
        torch.ones(2650),
        token_weights(LENGTHS, aggregation=aggregation, budget=2000)[response],
        response,
        torch.ones(2650, dtype=torch.bool),
        objective="clip",
        clip_low=0.2,
        clip_high=0.28,
    ).loss.backward()
    assert logprobs.grad is not None
    first_of_each = torch.tensor([0, 200, 250, 2250])
    assert [f"{value:+.2e}" for value in -logprobs.grad[first_of_each]] == per_token
    sums = torch.zeros(4).index_add(0, response, -logprobs.grad)
    assert [f"{value:+.3f}" for value in sums] == per_response


# ---- three estimates of one KL


def test_three_estimates_of_one_kl() -> None:
    torch.manual_seed(0)
    reference = torch.randn(1000).softmax(-1)
    policy = (reference.log() + 0.3 * torch.randn(1000)).softmax(-1)
    assert f"{(policy * (policy / reference).log()).sum():.4f}" == "0.0502"
    sampled = torch.multinomial(policy, 100_000, replacement=True)
    log_ratio = reference[sampled].log() - policy[sampled].log()
    expected = {"k1": (0.0497, 0.3221, "44%"), "k2": (0.0531, 0.0744, "0%"), "k3": (0.0505, 0.0697, "0%")}
    for name, estimate in ESTIMATES.items():
        value, (mean, std, negative) = estimate(log_ratio), expected[name]
        # Other instructions of a CPU round the seeded logits otherwise, and a few samples out of 100,000 with them.
        assert [value.mean().item(), value.std().item()] == pytest.approx([mean, std], abs=2e-4), name
        assert f"{(value < 0).float().mean():.0%}" == negative, name


# ---- ratios of tokens, products and geometric means


def clipped_fraction(log_ratio: Tensor, response: Tensor) -> float:
    """Share of tokens that the clip to [0.8, 1.28] takes hold of for one sign of the advantage or the other."""
    ones = torch.ones_like(log_ratio)
    clipped = 0
    for advantages in (ones, -ones):
        loss = policy_loss(
            log_ratio,
            torch.zeros_like(log_ratio),
            advantages,
            ones,
            ones,
            response,
            ones.bool(),
            objective="clip",
            clip_low=0.2,
            clip_high=0.28,
        )
        clipped += int(loss.num_clipped)
    return clipped / len(log_ratio)


def test_products_diverge_with_length_and_geometric_means_do_not() -> None:
    torch.manual_seed(0)
    table = []
    for sigma in (0.02, 0.2):
        for length in (100, 1000, 4000):
            log_ratio = (torch.randn(512, length) * sigma).flatten()
            response = torch.arange(512).repeat_interleave(length)
            product, geometric = (
                response_log_ratio(log_ratio, response, ratio=ratio, mix=0.0).exp()
                for ratio in ("trajectory", "sequence")
            )
            table.append(
                (
                    f"{clipped_fraction(log_ratio, response):.1%}",
                    f"[{product.min():.0e}, {product.max():.0e}]",
                    f"[{geometric.min():.4f}, {geometric.max():.4f}]",
                )
            )
    assert table == [
        ("0.0%", "[5e-01, 2e+00]", "[0.9932, 1.0057]"),
        ("0.0%", "[2e-01, 6e+00]", "[0.9983, 1.0018]"),
        ("0.0%", "[2e-02, 6e+01]", "[0.9990, 1.0010]"),
        ("24.0%", "[2e-03, 5e+02]", "[0.9392, 1.0639]"),
        ("24.1%", "[9e-10, 1e+07]", "[0.9794, 1.0164]"),
        ("24.1%", "[3e-17, 5e+22]", "[0.9905, 1.0132]"),
    ]


# ---- bias and noise of the corrections


def test_bias_and_noise_of_none_weight_truncation_and_rejection() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200) * 2
    policy = logits.softmax(-1)
    noise = 0.2 * torch.randn(200)
    noise[logits.argsort()[-8:-5]] -= 3  # a few likely tokens that the engine underrates
    behavior = (logits + noise).softmax(-1)
    advantages = torch.randn(200)
    logits.requires_grad_()
    (exact,) = torch.autograd.grad((logits.softmax(-1) * advantages).sum(), logits)
    by_hand = ((policy * advantages)[:, None] * (torch.eye(200) - policy)).sum(0)
    assert_close(exact, by_hand)

    log_correction = policy.log() - behavior.log()
    weights = importance_weights(log_correction)
    assert [f"{weights.median():.2f}", f"{weights.max():.1f}", f"{weights.min():.2f}"] == [
        "0.95",
        "19.7",
        "0.56",
    ]

    logprobs = logits.log_softmax(-1)
    generator = torch.Generator().manual_seed(1)

    def estimate(algorithm: Algorithm) -> Tensor:
        """Policy gradient from 256 tokens that the behavior policy samples."""
        sampled = torch.multinomial(behavior, 256, replacement=True, generator=generator)
        each = torch.arange(256)
        corrected = correct(
            log_correction[sampled], each, advantages[sampled], -log_correction[sampled], algorithm
        )
        loss = policy_loss(
            logprobs[sampled],
            policy.log()[sampled],
            advantages[sampled],
            corrected.factor_M,
            torch.full((256,), 1 / 256),
            each,
            torch.ones(256, dtype=torch.bool),
            objective="none",
            clip_low=1.0,
            clip_high=1.0,
        ).loss
        (grad,) = torch.autograd.grad(-loss, logits, retain_graph=True)
        return grad

    algorithms = {
        "none": Algorithm(correction=()),
        "importance sampling": Algorithm(correction=("is_token",)),
        "truncated at 2": Algorithm(correction=("tis_token",), correction_cap=2.0),
        "rejected above 2": Algorithm(
            correction=("is_token", "mis_token"), mis_token_low=0.0, mis_token_high=2.0
        ),
    }
    table = {}
    for name, algorithm in algorithms.items():
        estimates = torch.stack([estimate(algorithm) for _ in range(400)])
        bias = (estimates.mean(0) - exact).norm() / exact.norm()
        spread = (estimates - estimates.mean(0)).norm(dim=1).mean() / exact.norm()
        table[name] = (f"{bias:.1%}", f"{spread:.1%}")
    assert table == {
        "none": ("42.5%", "30.3%"),
        "importance sampling": ("2.4%", "54.8%"),
        "truncated at 2": ("23.6%", "30.6%"),
        "rejected above 2": ("26.8%", "29.6%"),
    }
