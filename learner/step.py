"""What one optimizer step trains on: rewards, advantages, masks and denominators. _N: response tokens of the step,
flattened; _B: its responses.

Everything here is arithmetic on what the groups bring along; nothing needs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headway.core.config import Config
from headway.core.errors import HeadwayError, SchemaError
from headway.core.sections import Algorithm
from headway.learner import advantages as estimators
from headway.learner.batching import Group, unpack
from headway.learner.corrections import is_missing, lag_factors
from headway.learner.losses import token_weights
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


class LagOutOfBounds(HeadwayError):
    """A batch holds a token of a version lag that cannot be: negative, or beyond the bound under a lag policy that
    keeps such tokens out of batches. Whoever cut the batch is wrong about versions; nothing was trained."""

    def __init__(
        self, group_id: int | None, rollout_id: str, sampled_by: int, version: int, max_version_lag: int
    ) -> None:
        super().__init__(group_id, rollout_id, sampled_by, version, max_version_lag)
        self.group_id, self.rollout_id = group_id, rollout_id
        self.sampled_by, self.version, self.max_version_lag = sampled_by, version, max_version_lag

    @property
    def lag(self) -> int:
        return self.version - self.sampled_by

    def __str__(self) -> str:
        fault = "negative" if self.lag < 0 else f"beyond lag.max_version_lag={self.max_version_lag}"
        return (
            f"group {self.group_id}, rollout {self.rollout_id}: the step from version {self.version} holds a token "
            f"that version {self.sampled_by} sampled; its version lag of {self.lag} is {fault}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The groups of one optimizer step as flat arrays over their tokens."""

    groups: tuple[Group, ...]
    advantages_N: Tensor
    """float32; 0 on tokens that the policy did not sample and on responses that do not count."""
    token_weights_N: Tensor
    """float32: what `losses.token_weights` gives a token of this response, times `lag_factors_N`. Every term of the
    loss has it."""
    lag_factors_N: Tensor
    """float32, by the lag policy; 0 where it withholds the token, which is then not in the loss."""
    trained_N: np.ndarray
    """bool: in the loss, and with a gradient."""
    in_loss_N: np.ndarray
    """bool: in the loss, and so in its denominators, with or without a gradient."""
    behavior_logprobs_N: Tensor
    """float32 nats; NaN where the engine gave none."""
    reference_logprobs_N: Tensor | None
    """float32 nats; None without `algorithm.kl`."""
    values_N: Tensor | None
    """float32, as the groups brought them; None for estimators that use none."""
    returns_N: Tensor | None
    """float32, what the critic's values should have been; 0 where they are not trained. Only for `gae`."""
    versions_N: Tensor
    """int64."""
    response_N: Tensor
    """int64: number of the token's response within the step."""
    lengths_B: Tensor
    """int64, response tokens, whether in the loss or not."""
    group_of_response_B: Tensor
    """int64."""
    token_rewards_N: Tensor
    """float64: what `rewards.token_rewards` gives each token."""
    rewards_B: Tensor
    """float64: outcome after penalty, normalisation and clip, plus process rewards, minus beta times the response's KL
    where it is in the reward; NaN where the response does not count."""
    kl_coef: float
    """Weight of the KL in this step (beta); 0 without `algorithm.kl`."""
    kl_reference: float | None
    """Mean of behavior - reference log-probability over the tokens in the loss (nats); None where there is none."""
    no_signal_groups: int
    """Groups whose advantages are all 0."""
    masked_fraction: dict[str, float]
    """Share of the sampled tokens that are not trained, by the first reason that applies: `unscored`, `truncated`,
    `missing_logprob`, `withheld`, `no_signal`."""

    def rollout_ids(self, tokens: Tensor) -> list[str]:
        """Of the responses that these tokens (int64 places in the flat arrays) belong to."""
        rollout_ids = [rollout_id for group in self.groups for rollout_id in group.rollout_ids]
        return [rollout_ids[row] for row in self.response_N[tokens].unique().tolist()]


def prepare_batch(
    tables: Sequence[pa.Table], config: Config, state: RewardState, version: int
) -> list[StepBatch]:
    """The optimizer steps of a batch of one table per group, taken up at the learner's `version`: the step of index k
    starts from version + k, and that is what its tokens' version lag counts from. Takes `state` that many steps on.

    Raises `ValueError` for a wrong number of groups, `LagOutOfBounds` as `policy_factors` does (both leave `state` as it
    was), and `SchemaError` as `unpack` and `prepare` do."""
    if len(tables) != config.groups_per_batch:
        raise ValueError(f"a batch is {config.groups_per_batch} groups, got {len(tables)}")
    groups = [unpack(table) for table in tables]
    per_step = config.learner.groups_per_step
    factors = [
        policy_factors(group, version + place // per_step, config) for place, group in enumerate(groups)
    ]
    return [
        prepare(
            groups[at : at + per_step],
            config.algorithm,
            max_new_tokens=config.sampling.max_new_tokens,
            state=state,
            lag_factors_N=torch.cat(factors[at : at + per_step]),
        )
        for at in range(0, len(groups), per_step)
    ]


def policy_factors(group: Group, version: int, config: Config) -> Tensor:
    """[N] float32: `corrections.lag_factors` of the group's tokens in the optimizer step from `version`, under
    `config.lag`.

    Raises `LagOutOfBounds` for a sampled token of a version that does not exist yet and, under the policies `pace` and
    `drop`, for one beyond the bound: these keep it by what they train, never by masking."""
    lag_N = version - group.versions
    wrong_N = lag_N < 0
    if config.lag.policy in ("pace", "drop"):
        wrong_N |= lag_N > config.lag.max_version_lag
    wrong = np.flatnonzero(wrong_N & group.loss_mask)
    if len(wrong):
        row = int(np.searchsorted(np.cumsum(group.lengths), wrong[0], side="right"))
        raise LagOutOfBounds(
            group.group_id,
            group.rollout_ids[row],
            int(group.versions[wrong[0]]),
            version,
            config.lag.max_version_lag,
        )
    return lag_factors(
        torch.from_numpy(lag_N),
        max_version_lag=config.lag.max_version_lag,
        max_trained_lag=config.max_trained_lag,
        downweight=config.lag.downweight,
    )


def prepare(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    max_new_tokens: int,
    state: RewardState,
    lag_factors_N: Tensor | None = None,
) -> StepBatch:
    """Rewards, advantages, masks and denominators of one optimizer step. Takes `state` one step on. `lag_factors_N`:
    `policy_factors` of the groups, one after another; None: 1 everywhere.

    Denominators count every token that the policy sampled, in a response that is scored and not masked for being
    truncated, with a behavior log-probability where the loss needs one, and not withheld for its lag. Tokens of a group
    without signal (all advantages 0) are among them, though they need no forward pass unless the KL or the entropy
    gives them a gradient: leaving them out would raise the step size whenever a prompt is solved or hopeless. A lag
    factor below 1 leaves denominators alone for the same reason.

    Rewards and advantages do not know of the lag policy: a token that is withheld was sampled, rewarded and valued like
    any other.

    Raises `SchemaError` when the groups lack a column that the algorithm needs.
    """
    columns = _columns(groups, algorithm, lag_factors_N)
    baseline, seen = state.mean, state.count > 0
    outcomes_B, scale = _outcomes(columns, algorithm, max_new_tokens, state)
    kl_coef = state.kl_coef if algorithm.kl != "none" else 0.0
    rewards_N = _token_rewards(columns, algorithm, outcomes_B, kl_coef)
    rewards_B = _totals(columns, outcomes_B, rewards_N)
    advantages_N, returns_N = _advantages(
        columns,
        algorithm,
        rewards_N,
        rewards_B,
        scale=scale,
        baseline=float(scale(torch.tensor(baseline, dtype=torch.float64))) if seen else 0.0,
    )
    in_loss_N, reasons = _in_loss(columns, algorithm)
    has_signal = _has_signal(columns, advantages_N)
    trained_N = in_loss_N
    if algorithm.kl != "loss" and algorithm.entropy_coef == 0:
        trained_N = in_loss_N & has_signal[columns.group_of_response_B][columns.response_N].numpy()
    reasons["no_signal"] = in_loss_N & ~trained_N
    num_sampled = max(1, int(columns.sampled_N.sum()))
    kl_reference = _mean_kl(columns, in_loss_N)
    if kl_reference is not None:
        state.observe_kl(kl_reference)
    return StepBatch(
        groups=columns.groups,
        advantages_N=advantages_N,
        token_weights_N=_token_weights(columns, algorithm, in_loss_N, max_new_tokens),
        lag_factors_N=columns.lag_factors_N,
        trained_N=trained_N,
        in_loss_N=in_loss_N,
        behavior_logprobs_N=columns.behavior_N,
        reference_logprobs_N=columns.reference_N,
        values_N=columns.values_N,
        returns_N=returns_N,
        versions_N=columns.versions_N,
        response_N=columns.response_N,
        lengths_B=columns.lengths_B,
        group_of_response_B=columns.group_of_response_B,
        token_rewards_N=rewards_N,
        rewards_B=rewards_B,
        kl_coef=kl_coef,
        kl_reference=kl_reference,
        no_signal_groups=int((~has_signal).sum()),
        masked_fraction={reason: float(mask_N.sum() / num_sampled) for reason, mask_N in reasons.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The groups' arrays, one after another, and who counts."""

    groups: tuple[Group, ...]
    lengths_B: Tensor
    response_N: Tensor
    group_of_response_B: Tensor
    sampled_N: Tensor
    behavior_N: Tensor
    versions_N: Tensor
    lag_factors_N: Tensor
    reference_N: Tensor | None
    values_N: Tensor | None
    scored_B: Tensor
    truncated_B: Tensor
    counted_B: Tensor
    """Scored, and not excluded for being truncated: in the statistics."""
    counted_N: Tensor
    """Sampled, in a response that counts."""
    num_sampled_B: Tensor
    """int64, sampled tokens of the response."""


def _columns(groups: Sequence[Group], algorithm: Algorithm, lag_factors_N: Tensor | None) -> _Columns:
    lengths_B = _joined(groups, "lengths")
    scored_B, truncated_B = _joined(groups, "scored"), _joined(groups, "truncated")
    response_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    sampled_N = _joined(groups, "loss_mask")
    counted_B = scored_B & ~truncated_B if algorithm.truncated == "exclude" else scored_B
    needs_values = algorithm.advantage in ("gae", "remax", "vine")
    return _Columns(
        groups=tuple(groups),
        lengths_B=lengths_B,
        response_N=response_N,
        group_of_response_B=torch.arange(len(groups)).repeat_interleave(
            torch.tensor([len(group.lengths) for group in groups])
        ),
        sampled_N=sampled_N,
        behavior_N=_joined(groups, "behavior_logprobs"),
        versions_N=_joined(groups, "versions"),
        lag_factors_N=torch.ones(len(sampled_N)) if lag_factors_N is None else lag_factors_N,
        reference_N=_needed(groups, "reference_logprobs", f"kl={algorithm.kl}")
        if algorithm.needs_reference
        else None,
        values_N=_needed(groups, "values", f"advantage={algorithm.advantage}") if needs_values else None,
        scored_B=scored_B,
        truncated_B=truncated_B,
        counted_B=counted_B,
        counted_N=sampled_N & counted_B[response_N],
        num_sampled_B=torch.bincount(response_N[sampled_N], minlength=len(lengths_B)),
    )


def _joined(groups: Sequence[Group], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(group, name) for group in groups]))


def _needed(groups: Sequence[Group], name: str, needed_by: str) -> Tensor:
    if any(getattr(group, name) is None and group.lengths.any() for group in groups):
        raise SchemaError(f"column {name!r} is missing, which algorithm.{needed_by} needs")
    empty = np.zeros(0, dtype=np.float32)
    return torch.from_numpy(
        np.concatenate([empty if getattr(group, name) is None else getattr(group, name) for group in groups])
    )


def _outcomes(
    columns: _Columns, algorithm: Algorithm, max_new_tokens: int, state: RewardState
) -> tuple[Tensor, Scale]:
    """[B] float64 rewards after overlong penalty, normalisation and clip, NaN where the response does not count; and
    the last two by themselves. `state` sees the rewards in between."""
    penalised_B = _joined(columns.groups, "rewards").to(torch.float64) + overlong_penalty(
        columns.num_sampled_B, max_new_tokens, algorithm.overlong_penalty
    )
    counted = penalised_B[columns.counted_B]
    state.observe_rewards(counted.tolist())
    scale = reward_scale(counted, algorithm, state)
    return scale(penalised_B).masked_fill(~columns.counted_B, float("nan")) + 0.0, scale


def _token_rewards(columns: _Columns, algorithm: Algorithm, outcomes_B: Tensor, kl_coef: float) -> Tensor:
    penalties_N = None
    if algorithm.kl == "reward" and columns.reference_N is not None:
        estimator = algorithm.kl_estimator
        assert estimator in ("k1", "k2", "k3")  # the configuration refuses the others in a reward
        kl_N = kl_estimate(columns.behavior_N, columns.reference_N, estimator)
        penalties_N = kl_coef * kl_N.masked_fill(is_missing(columns.behavior_N), 0.0)
    return token_rewards(
        outcomes_B,
        columns.counted_N,
        columns.lengths_B,
        penalties_N=penalties_N,
        step_ends=_steps(columns, "step_ends") if algorithm.process_rewards else (),
        step_rewards=_steps(columns, "step_rewards") if algorithm.process_rewards else (),
    )


def _steps(columns: _Columns, name: str) -> list[np.ndarray]:
    """One array per response of the step, empty where the group has none."""
    nothing = np.zeros(0, dtype=np.int64)
    return [
        steps for group in columns.groups for steps in getattr(group, name) or [nothing] * len(group.lengths)
    ]


def _totals(columns: _Columns, outcomes_B: Tensor, rewards_N: Tensor) -> Tensor:
    """[B] float64: the sum of a response's token rewards, or its outcome where no token can carry it."""
    sums_B = torch.zeros_like(outcomes_B).index_add_(0, columns.response_N, rewards_N)
    return torch.where(columns.counted_B & (columns.num_sampled_B > 0), sums_B, outcomes_B)


def _advantages(
    columns: _Columns,
    algorithm: Algorithm,
    rewards_N: Tensor,
    rewards_B: Tensor,
    *,
    scale: Scale,
    baseline: float,
) -> tuple[Tensor, Tensor | None]:
    """[N] float32 advantages, and returns where the estimator has them.

    `scale` brings values that are mean rewards of other responses (remax, vine) to the unit of `rewards_B`; a
    critic's are in it already. `baseline` is in it, too."""
    mask_N, lengths_B, gamma = columns.counted_N, columns.lengths_B, algorithm.gamma
    if algorithm.advantage == "none":
        return torch.zeros(mask_N.shape), None
    if algorithm.advantage == "reinforce":
        return estimators.reinforce(rewards_N, mask_N, lengths_B, gamma=gamma), None
    if algorithm.advantage == "reinforce_baseline":
        return estimators.reinforce_baseline(
            rewards_N, mask_N, lengths_B, gamma=gamma, baseline=baseline
        ), None
    if algorithm.advantage == "reinforce_pp":
        return estimators.reinforce_pp(rewards_N, mask_N, lengths_B, gamma=gamma), None
    if columns.values_N is None:
        advantages_B = _outcome_advantages(columns, algorithm, rewards_B)
        return torch.where(mask_N, advantages_B[columns.response_N], 0.0), None
    if algorithm.advantage == "gae":
        return estimators.gae(
            rewards_N, columns.values_N, mask_N, lengths_B, gamma=gamma, gae_lambda=algorithm.gae_lambda
        )
    if algorithm.advantage == "remax":
        return estimators.remax(rewards_B, scale(columns.values_N), mask_N, lengths_B), None
    return estimators.vine(
        rewards_B, scale(columns.values_N), _needed_step_ends(columns), mask_N, lengths_B
    ), None


def _needed_step_ends(columns: _Columns) -> list[np.ndarray]:
    step_ends = _steps(columns, "step_ends")
    has_tokens_B = columns.counted_B & (columns.num_sampled_B > 0)
    if any(not len(ends) and needed for ends, needed in zip(step_ends, has_tokens_B.tolist(), strict=True)):
        raise SchemaError("column 'step_ends' is missing, which algorithm.advantage=vine needs")
    return step_ends


def _outcome_advantages(columns: _Columns, algorithm: Algorithm, rewards_B: Tensor) -> Tensor:
    """[B] float32: of the estimators that compare the responses of a group. Rows of one forked episode are one response."""
    sizes = [len(group.lengths) for group in columns.groups]
    rewards, counted = rewards_B.split(sizes), columns.counted_B.split(sizes)
    standing = [
        _responses(group, counted_G) for group, counted_G in zip(columns.groups, counted, strict=True)
    ]
    compared = [
        (group, rewards_G[rows], counted_G[rows], rows)
        for group, rewards_G, counted_G, (rows, _) in zip(
            columns.groups, rewards, counted, standing, strict=True
        )
    ]
    batch_std = exact_std(
        torch.cat([rewards_R[counted_R] for _, rewards_R, counted_R, _ in compared]).tolist()
    )
    return torch.cat(
        [
            _group_advantages(group, rows, algorithm, rewards_R, counted_R, batch_std)[place_G]
            for (group, rewards_R, counted_R, rows), (_, place_G) in zip(compared, standing, strict=True)
        ]
    )


def _responses(group: Group, counted_G: Tensor) -> tuple[Tensor, Tensor]:
    """[R] int64 rows that stand for a group's responses, and [G] int64 each row's place among them. Several rows of one
    agent with the same sample index are the turns of one forked episode, for which its first row that counts stands."""
    if group.sample_index is None:
        every = torch.arange(len(group.lengths))
        return every, every
    agents = group.agent_ids or ("",) * len(group.lengths)
    places: dict[tuple[str, int], int] = {}
    rows: list[int] = []
    place_G = []
    for row, key in enumerate(zip(agents, group.sample_index.tolist(), strict=True)):
        place = places.setdefault(key, len(rows))
        if place == len(rows):
            rows.append(row)
        elif counted_G[row] and not counted_G[rows[place]]:
            rows[place] = row
        place_G.append(place)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(place_G, dtype=torch.int64)


def _group_advantages(
    group: Group, rows: Tensor, algorithm: Algorithm, rewards_G: Tensor, counted_G: Tensor, batch_std: float
) -> Tensor:
    if algorithm.advantage == "rloo":
        return estimators.rloo(rewards_G, counted_G)
    if algorithm.advantage == "group_batch_std":
        return estimators.group_batch_std(rewards_G, counted_G, batch_std)
    if algorithm.advantage == "per_agent":
        agents = [group.agent_ids[row] for row in rows.tolist()] if group.agent_ids else ()
        return estimators.per_agent(rewards_G, counted_G, agents)
    if algorithm.advantage == "joint_group":
        if group.sample_index is None:
            raise SchemaError("column 'sample_index' is missing, which algorithm.advantage=joint_group needs")
        return estimators.joint_group(rewards_G, counted_G, torch.from_numpy(group.sample_index)[rows])
    if algorithm.advantage == "group":
        return estimators.group(rewards_G, counted_G)
    # group_mean; and min_variance, whose baseline the trainer puts in once it knows the gradients' norms.
    return estimators.group_mean(rewards_G, counted_G)


def _in_loss(columns: _Columns, algorithm: Algorithm) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """[N] bool, sampled tokens that the loss takes; and those that it does not take, by reason."""
    sampled_N = columns.sampled_N.numpy()
    scored_N = columns.scored_B[columns.response_N].numpy()
    kept_N = np.ones_like(sampled_N)
    if algorithm.truncated != "keep":
        kept_N = ~columns.truncated_B[columns.response_N].numpy()
    known_N = np.ones_like(sampled_N)
    if algorithm.uses_behavior:
        known_N = ~is_missing(columns.behavior_N).numpy()
    young_N = (columns.lag_factors_N > 0).numpy()
    return sampled_N & scored_N & kept_N & known_N & young_N, {
        "unscored": sampled_N & ~scored_N,
        "truncated": sampled_N & scored_N & ~kept_N,
        "missing_logprob": sampled_N & scored_N & kept_N & ~known_N,
        "withheld": sampled_N & scored_N & kept_N & known_N & ~young_N,
    }


def _has_signal(columns: _Columns, advantages_N: Tensor) -> Tensor:
    """[groups] bool: some advantage is not 0."""
    has_signal = torch.zeros(len(columns.groups), dtype=torch.bool)
    has_signal[columns.group_of_response_B[columns.response_N[advantages_N != 0]]] = True
    return has_signal


def _token_weights(
    columns: _Columns, algorithm: Algorithm, in_loss_N: np.ndarray, max_new_tokens: int
) -> Tensor:
    loss_lengths_B = torch.bincount(
        columns.response_N[torch.from_numpy(in_loss_N)], minlength=len(columns.lengths_B)
    )
    weights_B = token_weights(loss_lengths_B, aggregation=algorithm.aggregation, budget=max_new_tokens)
    return weights_B.repeat_interleave(columns.lengths_B) * columns.lag_factors_N


def _mean_kl(columns: _Columns, in_loss_N: np.ndarray) -> float | None:
    """Mean k1 over tokens in the loss whose behavior log-probability is known; NaN if a reference one is not finite."""
    if columns.reference_N is None:
        return None
    used_N = torch.from_numpy(in_loss_N) & ~is_missing(columns.behavior_N)
    if not used_N.any():
        return None
    k1 = kl_estimate(columns.behavior_N[used_N], columns.reference_N[used_N], "k1")
    return exact_mean(k1.tolist()) if k1.isfinite().all() else float("nan")
