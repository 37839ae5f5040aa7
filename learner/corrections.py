"""Off-policy corrections: how the loss makes up for tokens that another policy sampled. _N: trained tokens of the
step, _M: of a micro-batch; _S: responses.

The log correction is the log importance weight, old-policy side minus behavior log-probability: proximal minus
behavior, or current minus behavior where the behavior policy is the old one (the ratio of the loss is the weight
then, and only rejecting corrections make sense). The behavior policy sampled: an older version, in another engine's
arithmetic. Every log correction here is known; tokens without one (`is_missing`) have left before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from headway.core.sections import WEIGHTS, Algorithm, Correction
from headway.learner.kl import k3
from headway.learner.losses import MAX_LOG_RATIO, Responses, check_shapes, responses_of


@dataclass(frozen=True, slots=True)
class Corrected:
    factor_M: Tensor
    """float32, detached: the importance weight (1 without a weighting correction), 0 where rejected."""
    rejected: dict[str, Tensor]
    """[M] bool by rejecting correction, each by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceStatistics:
    """Of the uncapped weights of one optimizer step."""

    mean: float
    max: float
    p99: float
    ess_fraction: float
    """Effective sample size over the number of tokens, (sum w)^2 / (n sum w^2), in (0, 1]."""
    k1: float
    """KL(behavior || proximal), mean of -log w (nats per token; can be negative)."""
    k3: float
    """The same, mean of w - 1 - log w: never negative, less noise."""


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """What one correction, alone, would do to a step."""

    tokens: float
    """Share of tokens that it would reject."""
    responses: float
    """Share of responses that it would reject with all their tokens."""
    ess_fraction: float
    """`ess_fraction` of its factors over all tokens, 0 where rejected."""


def importance_weights(log_correction_N: Tensor) -> Tensor:
    """exp(log correction), detached, uncapped but for the clamp that keeps it finite."""
    return log_correction_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_missing(behavior_logprobs_N: Tensor) -> Tensor:
    """[N] bool: the engine gave no usable log-probability, so that no weight exists; such a token leaves the
    loss and is counted. (0.0 is a probability of 1, not a missing value.)"""
    return ~torch.isfinite(behavior_logprobs_N)


class _Evidence(NamedTuple):
    """What the rules look at, detached."""

    log_correction_M: Tensor
    sum_S: Tensor
    """Of the log correction."""
    advantages_M: Tensor
    staleness_S: Tensor
    """Mean over the response."""
    responses: Responses


def _evidence(
    log_correction_M: Tensor, response_M: Tensor, advantages_M: Tensor, staleness_M: Tensor
) -> _Evidence:
    check_shapes(
        "a correction",
        log_correction=log_correction_M,
        response=response_M,
        advantages=advantages_M,
        staleness=staleness_M,
    )
    log_correction_M = log_correction_M.detach()
    responses = responses_of(response_M)
    return _Evidence(
        log_correction_M=log_correction_M,
        sum_S=responses.sums(log_correction_M),
        advantages_M=advantages_M.detach(),
        staleness_S=responses.sums(staleness_M.detach()) / responses.lengths_S,
        responses=responses,
    )


def _weights(name: Correction, evidence: _Evidence, algorithm: Algorithm) -> Tensor:
    """[M] float32: factors of a weighting correction."""
    if name == "tis_sequence":
        products_S = importance_weights(evidence.sum_S).clamp(max=algorithm.correction_cap)
        return products_S[evidence.responses.index_M]
    weights_M = importance_weights(evidence.log_correction_M)
    return weights_M.clamp(max=algorithm.correction_cap) if name == "tis_token" else weights_M


def _rejects(name: Correction, evidence: _Evidence, algorithm: Algorithm) -> Tensor:
    """[M] bool: tokens that a rejecting correction drops. Compares logarithms, which need no clamp and are exact at
    the bounds."""
    responses = evidence.responses
    if name == "mis_token":
        return _outside(evidence.log_correction_M, algorithm.mis_token_low, algorithm.mis_token_high)
    if name == "mis_sequence":
        geometric = algorithm.mis_sequence_mean == "geometric"
        log_weight_S = evidence.sum_S / responses.lengths_S if geometric else evidence.sum_S
        outside_S = _outside(log_weight_S, algorithm.mis_sequence_low, algorithm.mis_sequence_high)
        return outside_S[responses.index_M]
    if name == "veto":
        vetoed_M = evidence.log_correction_M < math.log(algorithm.veto_below)
        return (responses.sums(vetoed_M.to(torch.float32)) > 0)[responses.index_M]
    stale_M = (evidence.staleness_S > algorithm.off_policy_delta)[responses.index_M]
    return (evidence.advantages_M < 0) & stale_M


def _outside(log_weight: Tensor, low: float, high: float) -> Tensor:
    return (log_weight < (math.log(low) if low > 0 else -math.inf)) | (log_weight > math.log(high))


def correct(
    log_correction_M: Tensor,
    response_M: Tensor,
    advantages_M: Tensor,
    staleness_M: Tensor,
    algorithm: Algorithm,
) -> Corrected:
    """The factor of each token in the loss, by `algorithm.correction` (one weight at most and any number of
    rejections, which the configuration checks) and its thresholds. All inputs are [M]; a response (int64 id) is here
    with all its trained tokens. c is exp(log correction); nothing carries gradient.

    Weights. `is_token`: c. `tis_token`: min(c, cap) (truncated importance sampling; IMPALA's rho, arXiv 1802.01561).
    `tis_sequence`: min(product of c over the response, cap), formed as a sum of logarithms.
    Rejections, which set the factor to 0. `mis_token`: c outside [low, high] (IcePop, arXiv 2510.18855, with
    `is_token`). `mis_sequence`: geometric mean or product of c over the response outside [low, high]: the whole
    response. `veto`: any c of the response below `veto_below`: the whole response. `off_policy_mask` (DeepSeek-V3.2,
    arXiv 2512.02556): tokens with A < 0 in responses whose mean of staleness_M = log(behavior / current) is above
    `off_policy_delta`; with one advantage per response that is the whole response.

    Rejected tokens have factor 0; whether they still count in the denominator is up to `token_weights`' lengths.
    Raises `ValueError` when the shapes differ.
    """
    evidence = _evidence(log_correction_M, response_M, advantages_M, staleness_M)
    factor_M = torch.ones_like(evidence.log_correction_M)
    rejected: dict[str, Tensor] = {}
    for name in algorithm.correction:
        if name in WEIGHTS:
            factor_M = _weights(name, evidence, algorithm)
        else:
            rejected[name] = _rejects(name, evidence, algorithm)
    for rejected_M in rejected.values():
        factor_M = factor_M.masked_fill(rejected_M, 0.0)
    return Corrected(factor_M, rejected)


def lag_factors(lag_N: Tensor, *, max_version_lag: int, max_trained_lag: int, downweight: float) -> Tensor:
    """[N] float32: what the lag policy multiplies a token's loss with, from its version lag (int64, optimizer steps).

    1 up to the bound L = `max_version_lag`; downweight^(lag - L) from there to `max_trained_lag`; beyond that 0, which
    means out of the loss and its denominators. A factor within the limit is never 0, however many steps make it up."""
    excess_N = (lag_N - max_version_lag).clamp(min=0).to(torch.float64)
    factor_N = (downweight**excess_N).to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    return factor_N.masked_fill(lag_N > max_trained_lag, 0.0)


def counterfactuals(
    log_correction_N: Tensor,
    response_N: Tensor,
    advantages_N: Tensor,
    staleness_N: Tensor,
    algorithm: Algorithm,
) -> dict[str, Counterfactual]:
    """For every correction, and for "none", what it alone would do with the algorithm's thresholds. Inputs as in
    `correct`, for whole responses; empty when there are no tokens. Needs no model: one pass over log-ratios."""
    evidence = _evidence(log_correction_N, response_N, advantages_N, staleness_N)
    if not log_correction_N.numel():
        return {}
    found = {"none": Counterfactual(0.0, 0.0, 1.0)}
    lengths_S = evidence.responses.lengths_S
    for name in get_args(Correction):
        if name in WEIGHTS:
            factor_N = _weights(name, evidence, algorithm)
            found[name] = Counterfactual(0.0, 0.0, ess_fraction(factor_N))
            continue
        rejected_N = _rejects(name, evidence, algorithm).to(torch.float32)
        whole_S = evidence.responses.sums(rejected_N) == lengths_S
        found[name] = Counterfactual(
            tokens=float(rejected_N.mean(dtype=torch.float64)),
            responses=float(whole_S.to(torch.float64).mean()),
            ess_fraction=ess_fraction(1 - rejected_N),
        )
    return found


def ess_fraction(factor_N: Tensor) -> float:
    """Effective sample size over the number of tokens, (sum f)^2 / (n sum f^2), of any factors, rejected ones (0)
    included in n; 0.0 when all are rejected or there are none."""
    factor_N = factor_N.detach().to(torch.float64)
    squares = float(factor_N.square().sum())
    return float(factor_N.sum()) ** 2 / (factor_N.numel() * squares) if squares else 0.0


def importance_statistics(log_correction_N: Tensor) -> ImportanceStatistics | None:
    """Of tokens whose behavior log-probability is known; None when there are none."""
    if log_correction_N.numel() == 0:
        return None
    log_correction_N = log_correction_N.detach().to(torch.float64)
    weights = importance_weights(log_correction_N)
    return ImportanceStatistics(
        mean=float(weights.mean()),
        max=float(weights.max()),
        p99=float(np.quantile(weights.cpu().numpy(), 0.99)),
        ess_fraction=ess_fraction(weights),
        k1=float(-log_correction_N.mean()),
        k3=float(k3(log_correction_N).mean()),
    )


def statistics_by_lag(log_correction_N: Tensor, lag_N: Tensor) -> dict[int, ImportanceStatistics]:
    """`importance_statistics` of the tokens of each version lag (int64, optimizer steps), ascending. Raises
    `ValueError` when the shapes differ."""
    check_shapes("statistics_by_lag", log_correction=log_correction_N, lag=lag_N)
    found = {int(lag): importance_statistics(log_correction_N[lag_N == lag]) for lag in lag_N.unique()}
    return {lag: statistics for lag, statistics in found.items() if statistics is not None}
