"""The expected gradient of an optimizer step, exactly: every group that a small softmax policy can sample, with its
probability, goes through the learner's own functions, and the sum is compared with the gradient of the expected return.

A response is one or two sampled tokens out of three, with a token of the environment in between that is masked. A
first token 2 ends the response, so responses differ in length. Both gradients are [12]: of the logits of the first
token, and of the second token given the first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.core.sections import Algorithm
from headway.learner.batching import Group
from headway.learner.corrections import correct
from headway.learner.losses import policy_loss
from headway.learner.rewards import RewardState
from headway.learner.step import prepare

BUDGET = 5
"""Tokens of a response at most."""

Response = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """All possible responses (the sampled tokens of each) and their rewards."""

    responses: tuple[Response, ...]
    rewards: tuple[float, ...]


TWO_TOKENS = Task(
    ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2,)), (1.0, 0.0, 0.3, -0.5, 2.0, 0.0, 0.7)
)
ONE_TOKEN = Task(((0,), (1,), (2,)), (1.0, -0.5, 0.25))


class Policy:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
        """Of the first token, and of the second one after each first one."""

    def logprobs(self, response: Response) -> Tensor:
        """One per sampled token."""
        rows = [0] + [1 + token for token in response[:-1]]
        return torch.stack(
            [self.logits[row].log_softmax(0)[token] for row, token in zip(rows, response, strict=True)]
        )

    def probability(self, response: Response) -> float:
        return self.logprobs(response).sum().exp().item()

    def value(self, task: Task, prefix: Response = ()) -> float:
        """Expected reward once these tokens are sampled."""
        after = [
            (self.probability(response), reward)
            for response, reward in zip(task.responses, task.rewards, strict=True)
            if response[: len(prefix)] == prefix
        ]
        return sum(p * reward for p, reward in after) / sum(p for p, _ in after)

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0].flatten()


def exact_gradient(
    policy: Policy, task: Task, *, reference: Policy | None = None, beta: float = 0.0
) -> Tensor:
    """[12] of the expected reward minus beta times KL(policy || reference), by autograd through the enumeration."""
    total = torch.zeros((), dtype=torch.float64)
    for response, reward in zip(task.responses, task.rewards, strict=True):
        log_p = policy.logprobs(response).sum()
        penalty = beta * (log_p - reference.logprobs(response).sum()) if reference else 0.0
        total = total + log_p.exp() * (reward - penalty)
    return policy.gradient(total)


Values = Callable[[Response], list[float]]
"""State values before each sampled token."""


def exact_values(policy: Policy, task: Task) -> Values:
    return lambda response: [policy.value(task, response[:n]) for n in range(len(response))]


def arbitrary_values(response: Response) -> list[float]:
    """A function of what was sampled before, like a critic's."""
    return [0.4, 3.0 - 2.0 * response[0]][: len(response)]


def greedy_reward(policy: Policy, task: Task) -> Values:
    response: Response = ()
    while response not in task.responses:
        row = policy.logits[0 if not response else 1 + response[0]]
        response = (*response, int(row.argmax()))
    reward = task.rewards[task.responses.index(response)]
    return lambda other: [reward] * len(other)


def with_environment(per_token: Sequence[float], filler: float) -> list[float]:
    """The masked token stands between the first sampled token and the second one."""
    return [per_token[0], filler, per_token[1]] if len(per_token) == 2 else list(per_token)


def group_of(
    task: Task, picked: Sequence[int], behavior: Policy, *, reference: Policy | None, values: Values | None
) -> Group:
    responses = [task.responses[pick] for pick in picked]
    lengths = np.array([2 * len(response) - 1 for response in responses])

    def flat(per_token: Callable[[Response], Sequence[float]], dtype: type = np.float32) -> np.ndarray:
        filler = math.nan if dtype is np.float32 else 0
        rows = [with_environment(per_token(response), filler) for response in responses]
        return np.array([value for row in rows for value in row], dtype=dtype)

    return Group(
        rollout_ids=tuple(str(place) for place in range(len(picked))),
        prompts=(np.array([0]),),
        prompt_index=np.zeros(len(picked), dtype=np.int64),
        lengths=lengths,
        response_ids=flat(lambda response: response, np.int64),
        loss_mask=flat(lambda response: [1] * len(response), np.bool_),
        behavior_logprobs=flat(lambda response: behavior.logprobs(response).tolist()),
        versions=np.zeros(int(lengths.sum()), dtype=np.int64),
        rewards=np.array([task.rewards[pick] for pick in picked], dtype=np.float32),
        scored=np.ones(len(picked), dtype=np.bool_),
        truncated=np.zeros(len(picked), dtype=np.bool_),
        reference_logprobs=flat(lambda response: reference.logprobs(response).tolist())
        if reference
        else None,
        values=flat(values) if values else None,
        step_ends=tuple(np.array([2, 3] if len(response) == 2 else [1]) for response in responses),
    )


def step_gradient(
    policy: Policy,
    task: Task,
    picked: Sequence[int],
    group: Group,
    algorithm: Algorithm,
    baseline: float | None,
) -> Tensor:
    """[12] what one optimizer step on this group would ascend."""
    state = RewardState.start(algorithm)
    if baseline is not None:
        state.observe_rewards([baseline])
    step = prepare([group], algorithm, max_new_tokens=BUDGET, state=state)
    tokens = torch.from_numpy(np.flatnonzero(step.trained_N))
    places = torch.from_numpy(np.flatnonzero(group.loss_mask)).tolist()
    logprobs = torch.cat([policy.logprobs(task.responses[pick]) for pick in picked])
    logprobs = logprobs[[places.index(token) for token in tokens.tolist()]]
    proximal = logprobs.detach().float()
    behavior, response, advantages = (
        values[tokens] for values in (step.behavior_logprobs_N, step.response_N, step.advantages_N)
    )
    log_correction = proximal - behavior
    factor = correct(log_correction, response, advantages, -log_correction, algorithm).factor_M
    loss = policy_loss(
        logprobs,
        behavior if algorithm.old_policy == "behavior" else proximal,
        advantages,
        factor,
        step.token_weights_N[tokens],
        response,
        torch.ones_like(tokens, dtype=torch.bool),
        objective=algorithm.objective,
        ratio=algorithm.ratio,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    ).loss
    return policy.gradient(-loss)


def expected_gradient(
    policy: Policy,
    task: Task,
    algorithm: Algorithm,
    *,
    group_size: int,
    behavior: Policy | None = None,
    reference: Policy | None = None,
    values: Values | None = None,
    baseline: float | None = None,
) -> Tensor:
    """[12], over all groups of this size that the behavior policy (default: the policy) can sample. `baseline`: the
    reward of all earlier steps."""
    behavior = behavior or policy
    probabilities = [behavior.probability(response) for response in task.responses]
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-12)
    total = torch.zeros(12, dtype=torch.float64)
    for picked in product(range(len(task.responses)), repeat=group_size):
        group = group_of(task, picked, behavior, reference=reference, values=values)
        gradient = step_gradient(policy, task, picked, group, algorithm, baseline)
        total += math.prod(probabilities[pick] for pick in picked) * gradient
    return total


SUM: dict[str, Any] = {"aggregation": "seq_mean_token_sum"}
PLAIN: dict[str, Any] = {**SUM, "objective": "none", "correction": "none", "kl": "none"}


def algorithm(preset: str, **changes: Any) -> Algorithm:
    return Algorithm.model_validate({"preset": preset, **changes})


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in norm."""
    return float((got - expected).norm() / expected.norm())


POLICY, OLD_POLICY, REFERENCE = Policy(5), Policy(1), Policy(2)
EXACT = exact_gradient(POLICY, TWO_TOKENS)
CLOSE = 1e-6
"""What float32 losses allow."""


def test_the_exact_gradient_by_hand() -> None:
    """One token, p = (1/2, 1/4, 1/4), rewards (1, -0.5, 0.25): the return is 0.4375, and the gradient
    p (R - return) = (0.28125, -0.234375, -0.046875)."""
    policy = Policy(0)
    policy.logits.data[0] = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).log()
    assert policy.value(ONE_TOKEN) == pytest.approx(0.4375)
    expected = [0.28125, -0.234375, -0.046875] + [0.0] * 9
    assert exact_gradient(policy, ONE_TOKEN).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "group_size", "constant"),
    [
        ("reinforce", 1, 1.0),
        ("reinforce", 2, 1.0),
        ("rloo", 2, 1.0),
        ("rloo", 3, 1.0),
        ("group_mean", 2, 1 / 2),
        ("group_mean", 3, 2 / 3),
    ],
)
def test_outcome_estimators_are_unbiased(advantage: str, group_size: int, constant: float) -> None:
    plain = algorithm("rloo", **PLAIN, advantage=advantage)
    got = expected_gradient(POLICY, TWO_TOKENS, plain, group_size=group_size)
    assert error(got, constant * EXACT) < CLOSE


@pytest.mark.parametrize("baseline", [-2.0, 0.3, 5.0])
def test_a_constant_baseline_leaves_the_expectation_alone(baseline: float) -> None:
    plain = algorithm("reinforce", **PLAIN)
    got = expected_gradient(POLICY, TWO_TOKENS, plain, group_size=1, baseline=baseline)
    assert error(got, EXACT) < CLOSE


def test_remax_is_unbiased() -> None:
    values = greedy_reward(POLICY, TWO_TOKENS)
    assert values((2,)) == [0.3]  # of the response (0, 2)
    got = expected_gradient(POLICY, TWO_TOKENS, algorithm("remax", **PLAIN), group_size=1, values=values)
    assert error(got, EXACT) < CLOSE


@pytest.mark.parametrize(
    ("gae_lambda", "values"),
    [
        (1.0, arbitrary_values),
        (1.0, exact_values(POLICY, TWO_TOKENS)),
        (0.5, exact_values(POLICY, TWO_TOKENS)),
        (0.0, exact_values(POLICY, TWO_TOKENS)),
    ],
)
def test_gae_is_unbiased_with_lambda_1_or_exact_values(gae_lambda: float, values: Values) -> None:
    plain = algorithm("a2c", **PLAIN, gae_lambda=gae_lambda)
    got = expected_gradient(POLICY, TWO_TOKENS, plain, group_size=1, values=values)
    assert error(got, EXACT) < CLOSE


def test_vine_is_unbiased_with_exact_values() -> None:
    values = exact_values(POLICY, TWO_TOKENS)
    got = expected_gradient(POLICY, TWO_TOKENS, algorithm("vineppo", **PLAIN), group_size=1, values=values)
    assert error(got, EXACT) < CLOSE


@pytest.mark.parametrize(
    ("objective", "ratio"),
    [
        ("clip", "token"),
        ("clip", "sequence_token"),
        ("cispo", "token"),
        ("masked", "token"),
        ("trpo", "token"),
    ],
)
def test_at_ratio_1_every_objective_has_the_gradient_of_none(objective: str, ratio: str) -> None:
    plain = algorithm("rloo", **{**PLAIN, "objective": objective, "ratio": ratio})
    got = expected_gradient(POLICY, TWO_TOKENS, plain, group_size=2)
    assert error(got, EXACT) < CLOSE


def test_dr_grpo_as_published_is_unbiased_up_to_its_constant() -> None:
    got = expected_gradient(POLICY, TWO_TOKENS, algorithm("dr_grpo"), group_size=2)
    assert error(got, EXACT / 2 / BUDGET) < CLOSE


@pytest.mark.parametrize(("preset", "group_size"), [("rloo", 2), ("remax", 1)])
def test_kl_in_the_reward_has_the_gradient_of_the_regularised_return(preset: str, group_size: int) -> None:
    """With the k1 estimator: of E[R] - beta KL(policy || reference)."""
    beta = 0.3
    exact = exact_gradient(POLICY, TWO_TOKENS, reference=REFERENCE, beta=beta)
    assert error(EXACT, exact) > 0.1
    got = expected_gradient(
        POLICY,
        TWO_TOKENS,
        algorithm(preset, kl_coef=beta),
        group_size=group_size,
        reference=REFERENCE,
        values=greedy_reward(POLICY, TWO_TOKENS),
    )
    assert error(got, exact) < CLOSE


@pytest.mark.parametrize(
    ("advantage", "group_size", "constant"),
    [("reinforce", 1, 1.0), ("rloo", 2, 1.0), ("group_mean", 3, 2 / 3)],
)
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (ONE_TOKEN, {"correction": "is_token"}),
        (ONE_TOKEN, {"correction": "tis_sequence", "correction_cap": 1e6}),
        (TWO_TOKENS, {"correction": "tis_sequence", "correction_cap": 1e6}),
        # The ratio to the behavior policy is the weight, as long as the clip does not act.
        (ONE_TOKEN, {"objective": "clip", "old_policy": "behavior", "clip_low": 1.0, "clip_high": 1e6}),
        (ONE_TOKEN, {"objective": "cispo", "old_policy": "behavior", "clip_low": 1.0, "clip_high": 1e6}),
    ],
)
def test_off_policy_the_exact_weight_gives_the_gradient_of_the_current_policy(
    task: Task, changes: dict[str, Any], advantage: str, group_size: int, constant: float
) -> None:
    corrected = algorithm("rloo", **{**PLAIN, "advantage": advantage, **changes})
    got = expected_gradient(POLICY, task, corrected, group_size=group_size, behavior=OLD_POLICY)
    assert error(got, constant * exact_gradient(POLICY, task)) < CLOSE


@pytest.mark.parametrize(
    ("changes", "group_size", "behavior", "values"),
    [
        # Dividing by the group's own standard deviation weighs groups by how rare their rewards are (GRPO).
        ({"advantage": "group"}, 2, POLICY, None),
        ({"advantage": "group"}, 3, POLICY, None),
        # A long response's tokens weigh less than a short one's.
        ({"aggregation": "seq_mean_token_mean"}, 2, POLICY, None),
        # The denominator is part of the sample.
        ({"aggregation": "token_mean"}, 2, POLICY, None),
        # Wrong values and no way past them.
        ({"advantage": "gae", "gae_lambda": 0.0}, 1, POLICY, arbitrary_values),
        ({"advantage": "vine"}, 1, POLICY, arbitrary_values),
        # Another policy's samples: without a weight, with a weight per token, with a cap that binds.
        ({}, 2, OLD_POLICY, None),
        ({"correction": "is_token"}, 2, OLD_POLICY, None),
        ({"correction": "tis_sequence", "correction_cap": 2.0}, 2, OLD_POLICY, None),
    ],
)
def test_these_are_biased(
    changes: dict[str, Any], group_size: int, behavior: Policy, values: Values | None
) -> None:
    """Whatever constant one allows: their expected gradient points elsewhere, by more than rounding can do."""
    biased = algorithm("rloo", **{**PLAIN, **changes})
    got = expected_gradient(
        POLICY, TWO_TOKENS, biased, group_size=group_size, behavior=behavior, values=values
    )
    nearest = (got @ EXACT) / (EXACT @ EXACT) * EXACT
    assert error(got, nearest) > 0.02
