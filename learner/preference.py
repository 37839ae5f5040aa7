"""Losses on preferences: pure functions of the log-probabilities of whole responses. _P: pairs, or rows, of the
optimizer step.

Every function takes all rows of the step and returns their mean, so that its derivative with respect to a response's
log-probability is that response's weight, however the step is cut for passes through the model. The inputs are sums
over a response's tokens, end of sequence included, in nats; `*_tokens_P` are the tokens they sum over. Results have the
dtype of the inputs; loss and gradient are finite for log-probabilities of any size that a model can give.

An implicit reward is what the policy would have to be paid for moving from the reference to where it is:
beta * (log pi - log pi_ref), up to a constant of the prompt (arXiv 2305.18290).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

GREATEST_LOG_PROBABILITY = -1e-6
"""What ORPO lowers the mean log-probability of a token to: the odds of a response that is certain are infinite."""
LEAST_STD = 1e-6
"""Of the margins of `beta_dpo`: they are all 0 at the start."""
LEAST_BETA = 1e-3
"""Of `beta_dpo`, as the authors have it: a beta of 0 has no gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceStats:
    """Means over the rows of the loss, before its step."""

    margin: float
    """Reward of the preferred less that of the other answer; NaN without either."""
    accuracy: float
    """Share of pairs whose preferred answer has the greater reward (equal: not); of labelled rows (KTO), share whose
    reward is on its side of the baseline."""
    chosen_reward: float
    """NaN without such rows."""
    rejected_reward: float
    kl: float | None = None
    """Nats per response, KTO's baseline; None where the loss has none."""
    beta: float | None = None
    """The one used where it moves (`beta_dpo`)."""
    kept_fraction: float = 1.0
    """Rows that were in the loss (`beta_dpo` leaves some out)."""


class PreferenceLoss(NamedTuple):
    loss: Tensor
    """[]."""
    stats: PreferenceStats


def dpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> PreferenceLoss:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with
    h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected).

    DPO (arXiv 2305.18290, eq. 7); with e = `label_smoothing` > 0 conservative DPO, for labels of which the share e is
    wrong. d/d log pi(chosen) = -beta (sigmoid(-beta h) - e). beta: per nat, 0.1 is usual.
    """
    chosen_rewards_P = beta * (chosen_P - reference_chosen_P)
    rejected_rewards_P = beta * (rejected_P - reference_rejected_P)
    margin_P = chosen_rewards_P - rejected_rewards_P
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return PreferenceLoss(loss_P.mean(), _pair_stats(chosen_rewards_P, rejected_rewards_P))


def ipo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    chosen_tokens_P: Tensor,
    rejected_tokens_P: Tensor,
    *,
    beta: float,
) -> PreferenceLoss:
    """(h - 1 / (2 beta))^2, with h as in `dpo` but of means over a response's tokens instead of sums.

    IPO (arXiv 2310.12036, eq. 17, whose tau is beta) writes h with sums; its authors corrected implementations to
    means (huggingface.co/blog/pref-tuning), so that the target 1 / (2 beta), in nats per token, does not depend on
    length. d/dh = 2 (h - 1 / (2 beta)). Rewards in the statistics are beta times the mean log-ratio.
    """
    chosen_ratio_P = (chosen_P - reference_chosen_P) / chosen_tokens_P
    rejected_ratio_P = (rejected_P - reference_rejected_P) / rejected_tokens_P
    loss_P = (chosen_ratio_P - rejected_ratio_P - 1 / (2 * beta)).square()
    return PreferenceLoss(loss_P.mean(), _pair_stats(beta * chosen_ratio_P, beta * rejected_ratio_P))


def kto(
    completion_P: Tensor,
    reference_P: Tensor,
    desirable_P: Tensor,
    mismatched_P: Tensor,
    reference_mismatched_P: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PreferenceLoss:
    """Mean of w (1 - sigmoid(+-beta (r - z))), + for desirable rows and - for others, w the class's weight,
    r = log pi - log pi_ref.

    KTO (arXiv 2402.01306). z = max(0, mean of log pi - log pi_ref over `mismatched_P`) estimates KL(pi || pi_ref)
    from answers to other prompts of the step and carries no gradient. With s = sigmoid of the above,
    d/dr = -+ w beta s (1 - s). `kto_weights` gives weights that balance the classes. beta: per nat.
    """
    kl = (mismatched_P - reference_mismatched_P).detach().mean().clamp(min=0.0)
    ratio_P = completion_P - reference_P
    sign_P = torch.where(desirable_P, 1.0, -1.0).to(ratio_P.dtype)
    weight_P = torch.where(desirable_P, desirable_weight, undesirable_weight).to(ratio_P.dtype)
    signed_P = sign_P * beta * (ratio_P - kl)
    loss_P = weight_P * torch.sigmoid(-signed_P)
    rewards_P = beta * ratio_P.detach()
    chosen, rejected = _mean(rewards_P[desirable_P]), _mean(rewards_P[~desirable_P])
    stats = PreferenceStats(
        margin=chosen - rejected,
        accuracy=_mean(signed_P.detach() > 0),
        chosen_reward=chosen,
        rejected_reward=rejected,
        kl=float(kl),
    )
    return PreferenceLoss(loss_P.mean(), stats)


def kto_weights(num_desirable: int, num_undesirable: int) -> tuple[float, float]:
    """(weight of desirable rows, of undesirable ones): 1 for the more frequent class, for the other what makes both
    weigh the same in sum, the lower end of the interval that arXiv 2402.01306 advises. 1 and 1 when a class is empty.
    """
    if not num_desirable or not num_undesirable:
        return 1.0, 1.0
    return max(1.0, num_undesirable / num_desirable), max(1.0, num_desirable / num_undesirable)


def orpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    chosen_tokens_P: Tensor,
    rejected_tokens_P: Tensor,
    *,
    coef: float,
) -> PreferenceLoss:
    """-l(chosen) - coef * log sigmoid(log odds(chosen) - log odds(rejected)), with l the mean log-probability of a
    response's tokens and odds = exp(l) / (1 - exp(l)). No reference.

    ORPO (arXiv 2403.07691; `coef` is its lambda). The first term is the mean over pairs of the
    mean over tokens. Both l are lowered to `GREATEST_LOG_PROBABILITY`. Rewards in the statistics are coef * l.
    """
    chosen_mean_P = chosen_P / chosen_tokens_P
    rejected_mean_P = rejected_P / rejected_tokens_P
    odds_ratio_P = _log_odds(chosen_mean_P) - _log_odds(rejected_mean_P)
    loss_P = -chosen_mean_P - coef * logsigmoid(odds_ratio_P)
    return PreferenceLoss(loss_P.mean(), _pair_stats(coef * chosen_mean_P, coef * rejected_mean_P))


def simpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    chosen_tokens_P: Tensor,
    rejected_tokens_P: Tensor,
    *,
    beta: float,
    gamma: float,
) -> PreferenceLoss:
    """-log sigmoid(beta (l(chosen) - l(rejected)) - gamma), with l the mean log-probability of a response's tokens.
    No reference.

    SimPO (arXiv 2405.14734). gamma: the margin aimed at, in units of the reward beta * l; beta 2 to 2.5 and
    gamma from 0.3 to 1.6 there. d/d log pi(chosen) = -beta / tokens * sigmoid(gamma - beta (l(chosen) - l(rejected))).
    """
    chosen_rewards_P = beta * chosen_P / chosen_tokens_P
    rejected_rewards_P = beta * rejected_P / rejected_tokens_P
    loss_P = -logsigmoid(chosen_rewards_P - rejected_rewards_P - gamma)
    return PreferenceLoss(loss_P.mean(), _pair_stats(chosen_rewards_P, rejected_rewards_P))


@dataclass(frozen=True, slots=True)
class Margins:
    """Running mean and standard deviation of the margins that `beta_dpo` has seen; None before the first step."""

    mean: float | None = None
    std: float | None = None

    def after(self, margin_P: Tensor, momentum: float) -> Margins:
        """With those of a step: momentum * before + (1 - momentum) * its own. The first step's are taken as they
        are."""
        mean, std = float(margin_P.mean()), float(margin_P.std(correction=0))
        if self.mean is None or self.std is None:
            return Margins(mean, std)
        return Margins(
            momentum * self.mean + (1 - momentum) * mean, momentum * self.std + (1 - momentum) * std
        )


def beta_dpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    scaling: float,
    keep_fraction: float,
    momentum: float,
    before: Margins,
    generator: torch.Generator,
) -> tuple[PreferenceLoss, Margins]:
    """DPO on a part of the pairs, with a beta that follows their margins M = beta h (h as in `dpo`):

    1. the running mean m and deviation s of M take the step in (`Margins.after`);
    2. ceil(keep_fraction * P) pairs are drawn without replacement, each with probability proportional to
       exp(-(M - m)^2 / (2 s^2)): outliers are left out;
    3. the loss is the mean over those of -log sigmoid(b h), with b = beta (1 + scaling (mean M over those - m)), at
       least `LEAST_BETA`, without gradient.

    beta-DPO (arXiv 2407.08639; there scaling 0.6, keep_fraction 0.8, momentum 0.9). The authors' code has
    M = h; this follows the paper. Also returns the running values after the step. `generator` decides the draw.
    """
    chosen_rewards_P = beta * (chosen_P - reference_chosen_P)
    rejected_rewards_P = beta * (rejected_P - reference_rejected_P)
    margin_P = chosen_rewards_P - rejected_rewards_P
    fixed_P = margin_P.detach()
    after = before.after(fixed_P, momentum)
    assert after.mean is not None and after.std is not None
    log_weights_P = -0.5 * ((fixed_P - after.mean) / max(after.std, LEAST_STD)).square()
    # The largest of log-weight plus Gumbel noise are such a draw, and cannot run out of weights that round to 0.
    noise_P = -torch.empty(fixed_P.shape, dtype=torch.float64).exponential_(generator=generator).log()
    num_kept = math.ceil(keep_fraction * len(fixed_P))
    kept = (log_weights_P.double().cpu() + noise_P).topk(num_kept).indices.to(fixed_P.device)
    used = max(LEAST_BETA, beta * (1 + scaling * (float(fixed_P[kept].mean()) - after.mean)))
    loss = -logsigmoid(used / beta * margin_P[kept]).mean()
    stats = _pair_stats(
        chosen_rewards_P, rejected_rewards_P, beta=used, kept_fraction=num_kept / len(fixed_P)
    )
    return PreferenceLoss(loss, stats), after


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)). log(1 - p) is computed from whichever of its two forms keeps its digits."""
    log_p = log_p.clamp(max=GREATEST_LOG_PROBABILITY)
    large = log_p > -math.log(2.0)
    # What `where` does not choose must still be finite, and so must its gradient.
    near_0 = torch.where(large, log_p, -1.0)
    far = torch.where(large, -1.0, log_p)
    return log_p - torch.where(large, torch.log(-torch.expm1(near_0)), torch.log1p(-torch.exp(far)))


def _pair_stats(
    chosen_rewards_P: Tensor,
    rejected_rewards_P: Tensor,
    beta: float | None = None,
    kept_fraction: float = 1.0,
) -> PreferenceStats:
    chosen_P, rejected_P = chosen_rewards_P.detach(), rejected_rewards_P.detach()
    return PreferenceStats(
        margin=_mean(chosen_P - rejected_P),
        accuracy=_mean(chosen_P > rejected_P),
        chosen_reward=_mean(chosen_P),
        rejected_reward=_mean(rejected_P),
        beta=beta,
        kept_fraction=kept_fraction,
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())  # NaN of none
