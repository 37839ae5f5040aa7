"""What `lag.policy` does to tokens beyond the bound: the learner's check, and what is left of the loss."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.cluster import replay
from headway.core.config import Config, dump_config, parse_config
from headway.core.errors import DataError, HeadwayError
from headway.core.rollouts import SCHEMA, build, replace_column, write_parquet
from headway.learner.batching import unpack
from headway.learner.corrections import lag_factors
from headway.learner.critic import CriticTrainer
from headway.learner.rewards import RewardState
from headway.learner.step import LagOutOfBounds, StepBatch, prepare, prepare_batch
from headway.learner.trainer import Trainer

NOW = 8
"""Version of the learner that takes up a batch; a token of lag k is of version NOW - k."""
BOUND = 2
BUDGET = 10
"""Tokens of a response at most."""

WITHHOLD: dict[str, Any] = {"policy": "withhold", "max_version_lag": BOUND}
DOWNWEIGHT: dict[str, Any] = {"policy": "downweight", "max_version_lag": BOUND, "downweight": 0.5}
FREE: dict[str, Any] = {"policy": "pace", "max_version_lag": NOW}
"""Bounds nothing here."""

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum")
CHOICES: dict[str, dict[str, Any]] = {
    "tis_token": {"correction": "tis_token"},
    "behavior as the old policy": {"correction": "veto", "old_policy": "behavior"},
    "gspo": {"preset": "gspo", "clip_low": 0.5, "clip_high": 0.5, "old_policy": "behavior"},
    "trajectory": {"correction": "tis_sequence", "ratio": "trajectory", "clip_low": 1.0, "clip_high": 9.0},
    "mixed": {"correction": "mis_sequence", "mis_sequence_low": 0.6, "ratio": "mixed"},
    "kl and entropy": {"correction": "is_token", "kl": "loss", "kl_coef": 0.5, "entropy_coef": 0.1},
    "unbiased kl": {"preset": "deepseek_v32", "kl_coef": 0.5},
    "without rejected": {"correction": "tis_token+mis_token", "rejected_in_denominator": False},
    "min_variance": {"preset": "vcpo", "ess_lr": False},
    "trpo": {"preset": "trpo"},
}


def config(lag: dict[str, Any], algorithm: dict[str, Any] | None = None, **learner: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny-random", "dtype": "float32"},
            "run": {"steps": 60},
            "lag": lag,
            "sampling": {"max_new_tokens": BUDGET},
            "algorithm": {
                "correction": "none",
                "ess_lr": False,
                "aggregation": "token_mean",
                **(algorithm or {}),
            },
            "learner": {"groups_per_step": 1, "learning_rate": 1e-3, "max_grad_norm": 1e6, **learner},
        }
    )


def spans(lags: list[int], version: int = NOW) -> list[dict[str, int]]:
    return [{"start": at, "end": at + 1, "version": version - lag} for at, lag in enumerate(lags)]


def table(
    lags: list[list[int]],
    rewards: list[float | None],
    *,
    masks: list[list[int]] | None = None,
    group: int = 0,
    version: int = NOW,
    **other: list[list[float]],
) -> pa.Table:
    """A group whose tokens have these version lags at `version`, one list per response."""
    rng = np.random.default_rng(group)
    rows = []
    for index, (own, reward) in enumerate(zip(lags, rewards, strict=True)):
        n = len(own)
        rows.append(
            {
                "rollout_id": f"{group}/{index}",
                "group_id": group,
                "prompt_id": f"p{group}",
                "sample_index": index,
                "prompt_ids": [5, 6, 7 + group],
                "response_ids": rng.integers(4, 80, n).tolist(),
                "loss_mask": masks[index] if masks else [1] * n,
                "behavior_logprobs": (-4.4 + 0.6 * rng.standard_normal(n)).tolist(),
                "reference_logprobs": (-4.4 + 0.5 * rng.standard_normal(n)).tolist(),
                "version_spans": spans(own, version),
                "finish_reason": "stop",
                "truncated": False,
                "text": "",
                "reward": reward,
                **{name: values[index] for name, values in other.items()},
            }
        )
    return build(rows)


OLD_FIRST = [[3, 3, 0, 0, 0, 1], [0, 0, 2], [5, 5, 5, 5], [6, 6, 4, 4, 0]]
"""Answers that went on across updates; the third lies beyond the bound with all its tokens."""
REWARDS: list[float | None] = [1.0, 0.0, 0.0, 1.0]
TOOLS = [[1, 1, 1, 0, 1, 1], [1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1, 1]]


def old_first(**other: Any) -> pa.Table:
    return table(OLD_FIRST, REWARDS, masks=TOOLS, **other)


def masked_out(rollouts: pa.Table, bound: int) -> pa.Table:
    """The same with `loss_mask` 0 on tokens of a higher lag."""
    masks = [
        [int(m and NOW - span["version"] <= bound) for m, span in zip(mask, own, strict=True)]
        for mask, own in zip(
            rollouts.column("loss_mask").to_pylist(),
            rollouts.column("version_spans").to_pylist(),
            strict=True,
        )
    ]
    return replace_column(rollouts, "loss_mask", masks)


def step_of(rollouts: pa.Table, settings: Config, version: int = NOW) -> StepBatch:
    (step,) = prepare_batch([rollouts], settings, RewardState.start(settings.algorithm), version)
    return step


def trainer_at(settings: Config, folder: Path, version: int = NOW) -> Trainer:
    trainer = Trainer(settings, folder)
    trainer.version = version
    return trainer


def gradient(settings: Config, folder: Path, *tables: pa.Table) -> dict[str, Tensor]:
    """Of one step: ten times Adam's first moment."""
    trainer = trainer_at(settings, folder)
    trainer.train(tables, NOW)
    return {name: 10 * trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.masters.items()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.masters.items()}


def near(got: Tensor | None, want: list[float]) -> None:
    assert got is not None
    assert_close(got.double(), torch.tensor(want, dtype=torch.float64), atol=2e-5, rtol=0)


# ---- the factor --------------------------------------------------------------------------------------------


def test_factors_by_hand() -> None:
    lags = torch.arange(8)
    got = lag_factors(lags, max_version_lag=2, max_trained_lag=5, downweight=0.5)
    assert got.tolist() == [1, 1, 1, 0.5, 0.25, 0.125, 0, 0] and got.dtype == torch.float32
    assert (
        lag_factors(lags, max_version_lag=2, max_trained_lag=2, downweight=0.5).tolist() == [1] * 3 + [0] * 5
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(bound=st.integers(0, 9), more=st.integers(0, 200), factor=st.floats(1e-3, 0.999))
def test_a_factor_falls_with_the_lag_and_is_0_only_where_the_token_leaves(
    bound: int, more: int, factor: float
) -> None:
    lags = torch.arange(bound + more + 3)
    got = lag_factors(lags, max_version_lag=bound, max_trained_lag=bound + more, downweight=factor)
    assert (got[: bound + 1] == 1).all() and (got[1:] <= got[:-1]).all()
    assert ((got > 0) == (lags <= bound + more)).all()


# ---- the check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_a_token_beyond_the_bound_is_refused_by_name(policy: str, tiny_random: Path) -> None:
    settings_ = config({"policy": policy, "max_version_lag": BOUND}, {"reward_normalization": "running"})
    trainer = trainer_at(settings_, tiny_random)
    before = weights(trainer)
    with pytest.raises(LagOutOfBounds) as caught:
        trainer.train([table([[0, 1], [2, 2, 3]], [1, 0], group=7)], NOW)
    assert isinstance(caught.value, HeadwayError)
    assert str(caught.value) == (
        "group 7, rollout 7/1: the step from version 8 holds a token that version 5 sampled; its version lag of 3 is "
        "beyond lag.max_version_lag=2"
    )
    assert (trainer.version, trainer.rewards.count) == (NOW, 0)
    assert all(torch.equal(left, before[name]) for name, left in weights(trainer).items())
    copy = pickle.loads(pickle.dumps(caught.value))  # it travels from an actor to the driver
    assert (str(copy), copy.group_id, copy.lag) == (str(caught.value), 7, 3)
    trainer.train([table([[0, 1], [2, 2, 2]], [1, 0], group=7)], NOW)


@pytest.mark.parametrize("policy", ["pace", "drop", "withhold", "downweight"])
def test_a_version_that_does_not_exist_yet_is_refused(policy: str) -> None:
    settings_ = config({"policy": policy, "max_version_lag": BOUND})
    with pytest.raises(
        LagOutOfBounds, match=r"group 0, rollout 0/2: .* version 9 sampled.* lag of -1 is negative"
    ):
        step_of(table([[0], [], [-1, 0]], [1, 0, 0]), settings_)


def test_only_tokens_that_the_policy_sampled_have_a_lag() -> None:
    old_tool = table([[0, 7, -3], [1]], [1, 0], masks=[[1, 0, 0], [1]])
    assert step_of(old_tool, config({"policy": "pace", "max_version_lag": BOUND})).in_loss_N.sum() == 2


def test_the_second_step_of_a_batch_sees_every_lag_one_higher(tiny_random: Path) -> None:
    """A group of lag 2 is within the bound for the first step of the batch, and not for the second."""
    tables = [table([[2, 2, 0], [1]], [1, 0], group=group) for group in range(2)]

    def steps(lag: dict[str, Any]) -> list[StepBatch]:
        settings_ = config(lag, steps_per_batch=2)
        return prepare_batch(tables, settings_, RewardState.start(settings_.algorithm), NOW)

    first, second = steps(WITHHOLD)
    assert (first.masked_fraction["withheld"], second.masked_fraction["withheld"]) == (0.0, 0.5)
    near(first.token_weights_N, [1 / 4] * 4)
    near(second.token_weights_N, [0, 0, 1 / 2, 1 / 2])
    first, second = steps(DOWNWEIGHT)
    assert first.lag_factors_N.tolist() == [1, 1, 1, 1] and second.lag_factors_N.tolist() == [0.5, 0.5, 1, 1]

    pace = config({"policy": "pace", "max_version_lag": BOUND}, steps_per_batch=2)
    trainer = trainer_at(pace, tiny_random)
    with pytest.raises(LagOutOfBounds, match=r"group 1, .* step from version 9 .* version 6 sampled"):
        trainer.train(tables, NOW)
    assert trainer.version == NOW  # the first step has not been taken

    trainer = trainer_at(config(WITHHOLD, steps_per_batch=2), tiny_random)
    (first, second), _ = trainer.train(tables, NOW)
    assert [(s.num_tokens, s.masked_fraction["withheld"]) for s in (first, second)] == [(4, 0.0), (2, 0.5)]
    assert list(second.by_lag) == [1, 2]


# ---- masks, denominators, statistics -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "withheld", "weighed"),
    [
        # In the loss: 3 and 2 tokens of two responses; or 4, 2 and 1 of three, with factor 1/2 on two tokens.
        ("token_mean", [0, *[1 / 5] * 5, 0], [1 / 14, *[1 / 7] * 5, 1 / 14]),
        ("seq_mean_token_mean", [0, *[1 / 6] * 3, *[1 / 4] * 2, 0], [1 / 24, *[1 / 12] * 3, *[1 / 6] * 3]),
        ("seq_mean_token_sum_norm", [0, *[1 / 20] * 5, 0], [1 / 60, *[1 / 30] * 5, 1 / 60]),
        ("seq_mean_token_sum", [0, *[1 / 2] * 5, 0], [1 / 6, *[1 / 3] * 5, 1 / 6]),
    ],
)
def test_denominators_by_hand(aggregation: str, withheld: list[float], weighed: list[float]) -> None:
    group = table([[3, 0, 0, 0], [0, 2], [3]], [1, 0, 0])
    # [1, 0, 0] has mean 1/3 and std 0.57735, the response without any token left included.
    want = [1.15470] * 4 + [-0.57735] * 3
    step = step_of(group, config(WITHHOLD, {"aggregation": aggregation}))
    near(step.token_weights_N, withheld)
    near(step.advantages_N, want)
    assert step.in_loss_N.tolist() == step.trained_N.tolist() == [False] + [True] * 5 + [False]
    assert step.masked_fraction["withheld"] == pytest.approx(2 / 7)
    step = step_of(group, config(DOWNWEIGHT, {"aggregation": aggregation}))
    near(step.token_weights_N, weighed)
    near(step.advantages_N, want)
    assert step.in_loss_N.all() and step.masked_fraction["withheld"] == 0


def test_beyond_the_limit_a_token_is_withheld_instead_of_weighed_down() -> None:
    group = table([[6, 5, 3, 2]], [1.0])
    reinforce = {"advantage": "reinforce"}
    assert step_of(group, config(DOWNWEIGHT, reinforce)).lag_factors_N.tolist() == [0, 0.125, 0.5, 1]
    nearer = step_of(group, config({**DOWNWEIGHT, "downweight_limit": 4}, reinforce))
    assert nearer.lag_factors_N.tolist() == [0, 0, 0.5, 1]
    assert nearer.in_loss_N.tolist() == [False, False, True, True]
    near(nearer.token_weights_N, [0, 0, 0.25, 0.5])


def test_the_first_reason_that_applies_is_counted() -> None:
    group = table([[3, 0], [3], [3, 3]], [None, 1, 0], behavior_logprobs=[[-1, -1], [-1], [math.nan, -1]])
    step = step_of(group, config(WITHHOLD, {"correction": "tis_token"}))
    assert step.masked_fraction == pytest.approx(
        {"unscored": 0.4, "truncated": 0, "missing_logprob": 0.2, "withheld": 0.4, "no_signal": 0}
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), aggregation=st.sampled_from(AGGREGATIONS))
def test_withheld_is_masked(data: st.DataObject, aggregation: str) -> None:
    lags = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=2, max_size=4))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=len(lags), max_size=len(lags)))
    masks = [[data.draw(st.integers(0, 1)) for _ in own] for own in lags]
    group = table(lags, rewards, masks=masks)
    settings_ = config(WITHHOLD, {"aggregation": aggregation})
    got, want = step_of(group, settings_), step_of(masked_out(group, BOUND), settings_)
    assert torch.equal(got.token_weights_N[got.in_loss_N], want.token_weights_N[want.in_loss_N])
    assert (got.in_loss_N == want.in_loss_N).all() and (got.trained_N == want.trained_N).all()
    assert torch.equal(got.advantages_N[got.trained_N], want.advantages_N[got.trained_N])
    sampled = max(1, sum(map(sum, masks)))
    assert sum(got.masked_fraction.values()) + got.trained_N.sum() / sampled == pytest.approx(
        1.0 if any(map(sum, masks)) else 0.0
    )


def test_what_was_sampled_at_two_versions_is_judged_by_each() -> None:
    """Three tokens of version 2, four more of version 4 after an interruption, trained at version 4."""
    group = table([[2, 2, 2, 0, 0, 0, 0]], [1.0], version=4)
    one = {"max_version_lag": 1}
    reinforce = {"advantage": "reinforce"}
    step = step_of(group, config({**WITHHOLD, **one}, reinforce), version=4)
    assert step.versions_N.tolist() == [2] * 3 + [4] * 4 and len(step.in_loss_N) == 7
    assert step.in_loss_N.tolist() == [False] * 3 + [True] * 4
    step = step_of(group, config({**DOWNWEIGHT, **one}, reinforce), version=4)
    assert step.lag_factors_N.tolist() == [0.5] * 3 + [1] * 4 and step.in_loss_N.all()


def test_lag_counts_when_the_group_is_trained_not_when_it_is_finished() -> None:
    """Sampled by version 0 and finished at version 0; three updates pass before a batch takes it."""
    group = table([[0, 0], [0]], [1, 0], version=0)
    pace = config({"policy": "pace", "max_version_lag": BOUND})
    assert step_of(group, pace, version=0).in_loss_N.all()
    assert step_of(group, pace, version=2).in_loss_N.all()
    with pytest.raises(LagOutOfBounds, match="version lag of 3"):
        step_of(group, pace, version=3)
    assert not step_of(group, config(WITHHOLD), version=3).in_loss_N.any()
    assert step_of(group, config(DOWNWEIGHT), version=3).lag_factors_N.tolist() == [0.5] * 3


def test_gae_runs_over_withheld_tokens_as_over_the_steps_that_they_are() -> None:
    # delta = [.1, .3, -.1, -.1, .7], lambda .9, from the end: .7, .53, .377, .6393, .67537
    values = [[0.1, 0.2, 0.5, 0.4, 0.3]]
    choices = {"advantage": "gae", "gae_lambda": 0.9}
    want = [0.67537, 0.6393, 0.377, 0.53, 0.7]
    group = table([[0, 0, 3, 3, 0]], [1.0], values=values)
    step = step_of(group, config(WITHHOLD, choices))
    near(step.advantages_N, want)
    near(step.returns_N, [0.77537, 0.8393, 0.877, 0.93, 1.0])
    assert step.in_loss_N.tolist() == [True, True, False, False, True]
    # The outcome is paid on the last token that the policy sampled, whether that is trained or not.
    late = step_of(table([[0, 0, 0, 0, 3]], [1.0], values=values), config(WITHHOLD, choices))
    near(late.advantages_N, want)


def test_without_factors_a_step_knows_no_lag_policy() -> None:
    group = unpack(table([[0, 7], [3]], [1, 0]))
    algorithm = config(WITHHOLD).algorithm
    step = prepare([group], algorithm, max_new_tokens=BUDGET, state=RewardState.start(algorithm))
    assert step.in_loss_N.all() and step.lag_factors_N.tolist() == [1, 1, 1]


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_withholding_is_training_with_these_tokens_masked(choice: str, tiny_random: Path) -> None:
    """To the bit: weights after the step, loss, and every figure but those that count masked tokens."""
    results = []
    for rollouts in (old_first(), masked_out(old_first(), BOUND)):
        trainer = trainer_at(config(WITHHOLD, CHOICES[choice]), tiny_random)
        ((stats,), _) = trainer.train([rollouts], NOW)
        results.append((stats, weights(trainer)))
    (got, left), (want, right) = results
    assert (got.loss, got.grad_norm, got.num_tokens) == (want.loss, want.grad_norm, want.num_tokens)
    assert got.grad_norm > 1e-3 and got.moved
    # 15 tokens are sampled. Beyond the bound: 2 of the first answer, 3 of the third, 3 of the last.
    assert got.num_tokens == 7 and got.masked_fraction["withheld"] == pytest.approx(8 / 15)
    assert (got.ess_fraction, got.correction_ess_fraction) == (
        want.ess_fraction,
        want.correction_ess_fraction,
    )
    assert got.by_lag == want.by_lag and set(got.by_lag) == {0, 1, 2}
    assert got.counterfactuals == want.counterfactuals and got.entropy == want.entropy
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_withholding_is_masking_under_every_aggregation(aggregation: str, tiny_random: Path) -> None:
    settings_ = config(WITHHOLD, {"aggregation": aggregation, "correction": "tis_token"})
    got = gradient(settings_, tiny_random, old_first())
    want = gradient(settings_, tiny_random, masked_out(old_first(), BOUND))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert max(float(g.abs().max()) for g in got.values()) > 1e-4


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"correction": "tis_token"},
        {"objective": "cispo", "correction": "is_token"},
        {"kl": "loss", "kl_coef": 0.5},
        {"kl": "loss", "kl_estimator": "unbiased", "kl_coef": 0.5},
        {"entropy_coef": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("excess", [1, 2])
def test_a_token_that_is_weighed_down_has_so_much_of_its_gradient(
    choices: dict[str, Any], excess: int, tiny_random: Path
) -> None:
    """Every term of the loss: g(d) = g(1) - (1 - d) g_token, where g_token is what the token adds by itself, over the
    5 tokens of the denominator. The token is the second of the first response."""
    lags = [[0, BOUND + excess, 0], [1, 0]]
    rollouts = table(lags, [1, 0])
    alone = table(lags, [1, 0], masks=[[0, 1, 0], [0, 0]])
    whole = gradient(config(FREE, choices), tiny_random, rollouts)
    token = gradient(config(FREE, choices), tiny_random, alone)
    got = gradient(config({**DOWNWEIGHT, "downweight": 0.25}, choices), tiny_random, rollouts)
    lost = 1 - 0.25**excess
    for name in whole:
        assert_close(got[name], whole[name] - lost * token[name] / 5, atol=1e-5, rtol=1e-4)
    assert max(float((got[name] - whole[name]).abs().max()) for name in whole) > 1e-4


@pytest.mark.parametrize("choice", [name for name in CHOICES if name not in ("trpo", "min_variance")])
def test_the_gradient_is_linear_in_the_factor(choice: str, tiny_random: Path) -> None:
    """Denominators, ratios, rejections and baselines do not look at it. Lags here are beyond the bound by one step."""
    lags = [[min(lag, BOUND + 1) for lag in own] for own in OLD_FIRST]
    rollouts = table(lags, REWARDS, masks=TOOLS)
    low, middle, high = (
        gradient(config({**DOWNWEIGHT, "downweight": factor}, CHOICES[choice]), tiny_random, rollouts)
        for factor in (0.1, 0.4, 0.7)
    )
    for name in middle:
        assert_close(middle[name], (low[name] + high[name]) / 2, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lag", [WITHHOLD, DOWNWEIGHT], ids=["withhold", "downweight"])
@pytest.mark.parametrize("choice", CHOICES)
def test_micro_batches_and_packing_do_not_matter(choice: str, lag: dict[str, Any], tiny_random: Path) -> None:
    tables = [old_first(group=group) for group in range(2)]

    def run(budget: int) -> tuple[Any, ...]:
        settings_ = config(lag, CHOICES[choice], groups_per_step=2, microbatch_tokens=budget)
        ((stats,), _) = trainer_at(settings_, tiny_random).train(tables, NOW)
        return (
            stats.loss,
            stats.grad_norm,
            stats.correction_ess_fraction,
            stats.ess_fraction,
            stats.num_tokens,
        )

    assert run(16) == pytest.approx(run(4096), rel=1e-4, abs=1e-6)


def with_weights(rollouts: pa.Table, importance: list[list[float]], folder: Path) -> pa.Table:
    """The table with behavior log-probabilities that give these importance weights under the model in `folder`."""
    settings_ = config(FREE)
    trainer = trainer_at(settings_, folder)
    proximal = trainer.passes.logprobs(step_of(rollouts, settings_)).tolist()
    behavior = [[proximal.pop(0) - math.log(c) for c in row] for row in importance]
    return replace_column(rollouts, "behavior_logprobs", behavior)


def test_with_a_truncated_importance_weight_by_hand(tiny_random: Path) -> None:
    # A = +-0.70711; min(c, 2) times the lag factor: [2, .5 | 1, 2] * [.5, 1 | .25, 1] = [1, .5 | .25, 2]
    rollouts = with_weights(table([[3, 0], [4, 0]], [1, 0]), [[4, 0.5], [1, 3]], tiny_random)
    settings_ = config(DOWNWEIGHT, {"correction": "tis_token"})
    ((stats,), _) = trainer_at(settings_, tiny_random).train([rollouts], NOW)
    assert stats.loss == pytest.approx(-0.70711 * (1 + 0.5 - 0.25 - 2) / 4, abs=1e-5)
    assert stats.correction_ess_fraction == pytest.approx(3.75**2 / (4 * (1 + 0.25 + 0.0625 + 4)), abs=1e-4)
    # the uncapped weights know of no factor
    assert stats.ess_fraction == pytest.approx(8.5**2 / (4 * (16 + 0.25 + 1 + 9)), abs=1e-4)
    assert stats.importance_weights.tolist() == pytest.approx([4, 0.5, 1, 3], rel=1e-3)
    assert {lag: found.mean for lag, found in stats.by_lag.items()} == pytest.approx(
        {0: 1.75, 3: 4, 4: 1}, rel=1e-3
    )
    # a rejecting correction takes the rest of the factor: [0, .5 | .25, 1] of 4 tokens
    settings_ = config(DOWNWEIGHT, {"correction": "mis_token", "mis_token_high": 3.5})
    ((stats,), _) = trainer_at(settings_, tiny_random).train([rollouts], NOW)
    assert stats.loss == pytest.approx(-0.70711 * (0 + 1 - 0.25 - 1) / 4, abs=1e-5)
    # without the rejected token in the denominator it is 3
    settings_ = config(
        DOWNWEIGHT, {"correction": "mis_token", "mis_token_high": 3.5, "rejected_in_denominator": False}
    )
    ((stats,), _) = trainer_at(settings_, tiny_random).train([rollouts], NOW)
    assert stats.loss == pytest.approx(-0.70711 * (0 + 1 - 0.25 - 1) / 3, abs=1e-5)


def test_a_sequence_ratio_is_over_the_tokens_that_are_left(tiny_random: Path) -> None:
    """Weights [16, 2, 1] and [4, 1]: the geometric mean of the first is 3.17, without its old token 1.41."""
    rollouts = with_weights(table([[3, 0, 0], [3, 0]], [1, 0]), [[16, 2, 1], [4, 1]], tiny_random)
    choices = {"correction": "mis_sequence", "mis_sequence_high": 1.9, "mis_sequence_low": 0.5}
    ((free,), _) = trainer_at(config(FREE, choices), tiny_random).train([rollouts], NOW)
    ((left,), _) = trainer_at(config(WITHHOLD, choices), tiny_random).train([rollouts], NOW)
    assert free.rejected_responses == {"mis_sequence": 1.0} and free.loss == 0.0
    assert left.rejected_responses == {"mis_sequence": 0.0}
    # With the behavior policy as the old one the ratio is that mean: sqrt(2) and 1, unclipped.
    choices = {
        "preset": "gspo",
        "old_policy": "behavior",
        "clip_low": 0.9,
        "clip_high": 9.0,
        "correction": "none",
    }
    settings_ = config(WITHHOLD, {**choices, "aggregation": "seq_mean_token_mean"})
    ((stats,), _) = trainer_at(settings_, tiny_random).train([rollouts], NOW)
    assert stats.loss == pytest.approx(-0.70711 * (math.sqrt(2) - 1) / 2, abs=1e-5)


def test_trpo_climbs_the_weighed_surrogate(tiny_random: Path) -> None:
    """At its start the surrogate has the gradient of the clipped objective."""
    rollouts = table([[3, 0, 3], [1, 0]], [1, 0])
    choices = {"correction": "tis_token"}
    ((trpo,), _) = trainer_at(config(DOWNWEIGHT, {"preset": "trpo", **choices}), tiny_random).train(
        [rollouts], NOW
    )
    ((clip,), _) = trainer_at(config(DOWNWEIGHT, choices), tiny_random).train([rollouts], NOW)
    ((free,), _) = trainer_at(config(FREE, choices), tiny_random).train([rollouts], NOW)
    assert trpo.trust_region is not None and trpo.trust_region.accepted
    assert trpo.grad_norm == pytest.approx(clip.grad_norm, rel=1e-4)
    assert abs(trpo.grad_norm - free.grad_norm) > 0.1
    assert trpo.trust_region.improvement > 0 and trpo.trust_region.kl <= 0.01


# ---- nothing left ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_without_a_token_left_changes_nothing_and_says_so(choice: str, tiny_random: Path) -> None:
    trainer = trainer_at(config(WITHHOLD, CHOICES[choice], weight_decay=0.1), tiny_random)
    trainer.train([table([[0, 0], [1]], [1, 0])], NOW)  # there is momentum by now, and weights decay
    before = weights(trainer)
    moments = {
        name: trainer.optimizer.state[p]["exp_avg"].clone()
        for name, p in trainer.model.masters.items()
        if p in trainer.optimizer.state
    }
    ((stats,), columns) = trainer.train([table([[3, 3, 4], [5]], [1, 0], version=NOW + 1)], NOW + 1)
    assert (stats.loss, stats.grad_norm, stats.learning_rate, stats.num_tokens) == (0.0, 0.0, 0.0, 0)
    assert not stats.moved and not stats.stopped_by_kl and stats.by_lag == {}
    assert (stats.masked_fraction["withheld"], stats.no_signal_groups, stats.reward_mean) == (1.0, 0, 0.5)
    assert (
        stats.ess_fraction is stats.correction_ess_fraction is stats.entropy is stats.clipped_fraction is None
    )
    assert stats.version == trainer.version == NOW + 2
    assert all(torch.equal(left, before[name]) for name, left in weights(trainer).items())
    for name, moment in moments.items():
        assert torch.equal(trainer.optimizer.state[trainer.model.masters[name]]["exp_avg"], moment)
    assert all(math.isnan(x) for row in columns.column("proximal_logprobs").to_pylist() for x in row)
    assert not any(math.isnan(x) for row in columns.column("advantages").to_pylist() for x in row)
    ((stats,), _) = trainer.train([table([[0, 3], [1]], [1, 0], version=NOW + 2)], NOW + 2)
    assert math.isfinite(stats.loss) and math.isfinite(stats.grad_norm) and stats.num_tokens == 2


# ---- critic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag", "loss", "slope"),
    [
        (FREE, 0.5, -1.0),
        (WITHHOLD, 0.5, -1.0),  # over the 2 that are left
        (DOWNWEIGHT, (2 * 0.5 + 0.5 * 0.5 + 0.25 * 0.5) / 4, -(2 + 0.5 + 0.25) / 4),
    ],
    ids=["pace", "withhold", "downweight"],
)
def test_the_critics_step_by_hand(lag: dict[str, Any], loss: float, slope: float, tiny_random: Path) -> None:
    """Values of 0 that should have been 1: an error of 1/2 per token, lags 4, 3, 0, 2."""
    rollouts = table([[4, 3, 0, 2]], [1.0], values=[[0.0] * 4])
    settings_ = config(lag, {"advantage": "gae", "gae_lambda": 1.0})
    trainer = CriticTrainer(settings_, tiny_random)
    trainer.version = NOW
    (stats,) = trainer.train([rollouts], NOW)
    bias = trainer.optimizer.state[trainer.model.head.bias]["exp_avg"].item() * 10
    head = trainer.optimizer.state[trainer.model.head.weight]["exp_avg"].norm().item() * 10
    clipped = min(1.0, settings_.critic.max_grad_norm / stats.grad_norm)
    assert stats.value_loss == pytest.approx(loss)
    assert bias == pytest.approx(slope * clipped, rel=1e-4) and head > 0
    with pytest.raises(LagOutOfBounds, match="group 0"):
        trainer.train([table([[0, -1]], [1.0], values=[[0.0] * 2], version=NOW + 1)], NOW + 1)


def test_the_critic_does_not_fit_withheld_tokens(tiny_random: Path) -> None:
    """The same returns, one time with the old tokens' values far off: they are context only."""
    found = []
    for values in ([[0.0] * 4], [[9.0, 9.0, 0.0, 0.0]]):
        trainer = CriticTrainer(config(WITHHOLD, {"advantage": "gae", "gae_lambda": 1.0}), tiny_random)
        trainer.version = NOW
        (stats,) = trainer.train([table([[4, 3, 0, 2]], [1.0], values=values)], NOW)
        found.append((stats.value_loss, stats.grad_norm, stats.value_mean))
    assert found[0] == found[1] and found[0][2] == 0.0


# ---- replay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [WITHHOLD, DOWNWEIGHT], ids=["withhold", "downweight"])
def test_a_stored_run_trains_again_to_the_same_losses(
    lag: dict[str, Any], tmp_path: Path, tiny_random: Path
) -> None:
    settings_ = config(lag, {"correction": "tis_token"})
    (tmp_path / "config.json").write_text(dump_config(settings_))
    trainer, reported = Trainer(settings_, tiny_random), []
    for version in range(5):
        lags = [[min(version, 4), 0, 0], [version, version], [0]]
        rollouts = table(lags, [1, 0, 0], group=version, version=version)
        (stats,), columns = trainer.train([rollouts], version)
        reported.append(stats)
        for name in columns.column_names:
            rollouts = rollouts.set_column(
                SCHEMA.get_field_index(name), SCHEMA.field(name), columns.column(name)
            )
        write_parquet(rollouts, tmp_path / "rollouts" / f"step-{version + 1:06d}.parquet")
    assert [round(6 * stats.masked_fraction["withheld"]) for stats in reported] == (
        [0, 0, 0, 3, 3] if lag is WITHHOLD else [0] * 5
    )
    records: list[dict[str, Any]] = []
    replay.train(replay.replay_config(tmp_path, []), tmp_path, "again", records.append)
    assert [record["loss"] for record in records] == [stats.loss for stats in reported]
    assert [record["masked_fraction"] for record in records] == [stats.masked_fraction for stats in reported]
    assert (
        json.loads((tmp_path / "replays" / "again" / "config.json").read_text())["lag"]["policy"]
        == lag["policy"]
    )
    with pytest.raises(DataError, match=r"group 3, .* version lag of 3 is beyond lag.max_version_lag=2"):
        replay.train(replay.replay_config(tmp_path, ["lag.policy=pace"]), tmp_path, "paced", records.append)
