"""From verdicts to the rewards that advantages are made of, and the two things that a run learns about them: their
running mean and deviation, and the KL coefficient. _N: response tokens of the step, flattened; _B: its responses.

All float64. "Sampled" tokens are those that the policy sampled itself (loss mask True); only they carry rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headway.core.errors import SchemaError
from headway.core.sections import Algorithm
from headway.learner.kl import ESTIMATES

STD_EPS = 1e-6
"""Added to a standard deviation before dividing by it."""

_STATE = ("count", "mean", "m2", "kl_coef")


@dataclass(kw_only=True, slots=True)
class RewardState:
    """What earlier steps say about rewards and KL. Each process that prepares steps owns one; given the same steps
    they are equal to the last bit, because every sum is rounded once (`math.fsum`), whatever its order."""

    kl_coef: float
    """Weight of the KL in force for the next step (beta)."""
    kl_target: float | None = None
    """Nats per token that `kl_coef` is steered to; None: it stays."""
    kl_horizon: int = 10
    """Optimizer steps over which it adapts."""
    count: int = 0
    """Rewards seen."""
    mean: float = 0.0
    """Of them; 0 before the first."""
    m2: float = 0.0
    """Sum of their squared differences from the mean."""

    @classmethod
    def start(cls, algorithm: Algorithm) -> RewardState:
        """Of a run that has not trained yet."""
        return cls(kl_coef=algorithm.kl_coef, kl_target=algorithm.kl_target, kl_horizon=algorithm.kl_horizon)

    @property
    def std(self) -> float:
        """Unbiased (ddof 1); 0 for fewer than two rewards."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def observe_rewards(self, rewards: Iterable[float]) -> None:
        """Merges the rewards of a step (Chan, Golub, LeVeque 1979). Non-finite ones are passed over: the step they
        are in cannot be trained, and must not spoil what is known."""
        count, mean, m2 = _moments(rewards)
        if count == 0:
            return
        total, delta = self.count + count, mean - self.mean
        self.m2 += m2 + delta * delta * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total

    def observe_kl(self, kl: float) -> None:
        """Steers beta after a step with mean KL `kl`, by Ziegler et al. 2019 (arXiv 1909.08593, section 2.2):

        beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) / horizon),

        where the paper's K_beta = 0.1 is horizon = 10. Does nothing without a target or for a KL that is not finite.
        """
        if self.kl_target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.kl_target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error / self.kl_horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; goes through JSON unchanged."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: dict[str, float]) -> None:
        """Takes up where `state()` was called. Raises `KeyError` when it is no such state."""
        values = {name: state[name] for name in _STATE}
        for name, value in values.items():
            setattr(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Normalisation and clip of one step's rewards: also for whatever is compared with them, in the same unit."""

    mean: float = 0.0
    std: float = 0.0
    """0: nothing to divide by, the values are only centred."""
    clip: float = math.inf

    def __call__(self, values: Tensor) -> Tensor:
        """float64, of the same shape; NaN stays NaN."""
        centred = values.to(torch.float64) - self.mean
        scaled = centred / (self.std + STD_EPS) if self.std > 0 else centred
        return scaled.clamp(-self.clip, self.clip)


def reward_scale(rewards: Tensor, algorithm: Algorithm, state: RewardState) -> Scale:
    """The normalisation of a step with these scored rewards ([any]), which `state` has already seen: (R - mean) /
    (std + 1e-6), then clipped. Equal rewards become exactly 0."""
    clip = math.inf if algorithm.reward_clip is None else algorithm.reward_clip
    if algorithm.reward_normalization == "none":
        return Scale(clip=clip)
    if algorithm.reward_normalization == "running":
        return Scale(mean=state.mean, std=state.std, clip=clip)
    return Scale(mean=exact_mean(rewards.tolist()), std=exact_std(rewards.tolist()), clip=clip)


def exact_mean(values: Iterable[float]) -> float:
    """Of the finite values, independent of their order, and exactly their value if they are equal; 0 without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    if min(finite) == max(finite):  # a sum divided by its count need not give the value back
        return finite[0] + 0.0
    return math.fsum(finite) / len(finite)


def exact_std(values: Iterable[float]) -> float:
    """Unbiased (ddof 1), of the finite values; exactly 0 if they are equal or fewer than two."""
    count, _, m2 = _moments(values)
    return math.sqrt(m2 / (count - 1)) if count > 1 else 0.0


def _moments(values: Iterable[float]) -> tuple[int, float, float]:
    """Count, mean and sum of squared differences from the mean, of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    mean = exact_mean(finite)
    return len(finite), mean, math.fsum((value - mean) ** 2 for value in finite)


def overlong_penalty(lengths: Tensor, limit: int, share: float) -> Tensor:
    """What is added to the reward of long responses (DAPO, arXiv 2503.14476, equation 13): 0 up to
    limit * (1 - share) tokens, then linearly down to -1 at `limit`, and -1 beyond. `share` 0 turns it off.

    lengths: tokens, any shape. Returns float64 of that shape, never -0.0.
    """
    if share == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    excess = (lengths.to(torch.float64) - limit * (1 - share)) / (limit * share)
    return 0.0 - excess.clamp(0, 1)


def kl_estimate(
    behavior_logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """KL(behavior || reference) per token that the behavior policy sampled (`kl.ESTIMATES`): nats, float64, detached.
    k1 is behavior minus reference log-probability."""
    return ESTIMATES[estimator](
        reference_logprobs.detach().to(torch.float64) - behavior_logprobs.detach().to(torch.float64)
    )


def token_rewards(
    outcomes_B: Tensor,
    sampled_N: Tensor,
    lengths_B: Tensor,
    *,
    penalties_N: Tensor | None = None,
    step_ends: Sequence[np.ndarray] = (),
    step_rewards: Sequence[np.ndarray] = (),
) -> Tensor:
    """[N] float64: the outcome on the response's last sampled token, minus `penalties_N` (beta times the token's KL)
    on every sampled token, plus each step's process reward on the last sampled token up to the step's end.

    What would land on a token that the policy did not sample goes to the last one before it that it did; if there is
    none, no action earned it and it is left out. Other tokens have 0, and their penalties may hold anything.

    outcomes_B: [B], read only where a token is sampled. sampled_N: [N] bool, False in responses that do not count.
    lengths_B: [B] int64, tokens of each response. step_ends, step_rewards: [B] arrays each, or empty; a response
    with no step rewards has none. Raises `SchemaError` when a response has not one step reward for each step.
    """
    rewards_N = torch.zeros(sampled_N.shape, dtype=torch.float64)
    if penalties_N is not None:
        rewards_N[sampled_N] -= penalties_N[sampled_N].to(torch.float64)
    starts = (lengths_B.cumsum(0) - lengths_B).tolist()
    for row, (start, length) in enumerate(zip(starts, lengths_B.tolist(), strict=True)):
        sampled = np.flatnonzero(sampled_N[start : start + length].numpy())
        if len(sampled) == 0:
            continue
        rewards_N[start + int(sampled[-1])] += outcomes_B[row]
        if not step_rewards or len(step_rewards[row]) == 0:
            continue
        if not step_ends or len(step_ends[row]) != len(step_rewards[row]):
            raise SchemaError(
                f"column 'step_ends' has no end for each of the {len(step_rewards[row])} step rewards of a response, "
                "which algorithm.process_rewards needs"
            )
        places = np.searchsorted(sampled, step_ends[row], side="left") - 1
        for place, reward in zip(places.tolist(), step_rewards[row].tolist(), strict=True):
            if place >= 0:
                rewards_N[start + int(sampled[place])] += reward
    return rewards_N
