import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from headway.actors.critic import CriticActor
from headway.core.config import Config, parse_config
from headway.core.errors import DataError, SchemaError
from headway.core.rollouts import build, replace_column
from headway.learner.batching import pack, unpack
from headway.learner.critic import CriticTrainer, ValueModel, explained_variance, value_loss
from headway.learner.reward_model import Calibration, RewardModel
from headway.learner.trainer import NonFiniteStep

EOS = 2  # also the padding of other systems; here nothing is padded


def config(
    algorithm: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    groups: int = 2,
    steps: int = 1,
    **critic: Any,
) -> Config:
    return parse_config(
        {
            "model": {"dtype": dtype},
            "run": {"steps": 60},
            "lag": {"max_version_lag": 20},
            "algorithm": {"preset": "a2c", "gae_lambda": 1.0, **(algorithm or {})},
            "learner": {"groups_per_step": groups, "steps_per_batch": steps},
            "critic": {"threads": 1, "learning_rate": 1e-3, **critic},
        }
    )


def row(
    group: int,
    index: int,
    prompt: list[int],
    response: list[int],
    *,
    loss_mask: list[int] | None = None,
    reward: float | None = 1.0,
) -> dict[str, Any]:
    return {
        "rollout_id": f"{group}/{index}",
        "group_id": group,
        "prompt_id": f"p{group}",
        "sample_index": index,
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": loss_mask or [1] * len(response),
        "behavior_logprobs": [-1.0] * len(response),
        "version_spans": [{"start": 0, "end": len(response), "version": 0}] if response else [],
        "finish_reason": "stop",
        "truncated": False,
        "text": "",
        "reward": reward,
    }


def tool_group(group: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0, 1.0)) -> pa.Table:
    """Tool tokens, end-of-sequence tokens in the middle of a response, and an answer of one token."""
    rows = [
        row(group, 0, [7, 9, 12], [5, 30, 31, EOS, 8, EOS], loss_mask=[1, 0, 0, 1, 1, 1], reward=rewards[0]),
        row(group, 1, [7, 9, 12], [5], reward=rewards[1]),
        row(group, 2, [7, 9, 12], [8, 6, EOS, 30], loss_mask=[1, 1, 1, 0], reward=rewards[2]),
    ]
    return build(rows)


def random_head(model: ValueModel, seed: int = 0) -> None:
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.constant_(model.head.bias, 0.25)


def values_of(actor: CriticActor, table: pa.Table) -> list[list[float]]:
    return actor.score(table).column("values").to_pylist()


def state_of(trainer: CriticTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.masters.items()}


# ---- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_start_at_exactly_zero(tiny_random: Path, dtype: str) -> None:
    table = tool_group()
    out = CriticActor(config(dtype=dtype), str(tiny_random)).score(table)
    assert out.column("values").to_pylist() == [[0.0] * 6, [0.0], [0.0] * 4]
    assert out.schema == table.schema
    assert out.drop_columns(["values"]).equals(table.drop_columns(["values"]))


@torch.no_grad()
def test_a_value_comes_from_the_state_before_its_token(tiny_random: Path) -> None:
    actor = CriticActor(config(), str(tiny_random))
    head = actor._trainer.model.head
    random_head(actor._trainer.model)
    network = AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)
    got = values_of(actor, tool_group())
    for r, values in zip(tool_group().to_pylist(), got, strict=True):
        for t, (sampled, value) in enumerate(zip(r["loss_mask"], values, strict=True)):
            # What stands from the token on cannot matter: the row ends before it.
            before = torch.tensor([r["prompt_ids"] + r["response_ids"][:t]])
            state = network(before, output_hidden_states=True).hidden_states[-1][0, -1]
            want = float(state @ head.weight[0] + 0.25) if sampled else 0.0
            assert value == pytest.approx(want, abs=2e-4 if sampled else 0)
    assert np.abs(got[0]).max() > 1


@settings(max_examples=8, deadline=None, derandomize=True)
@given(budget=st.integers(16, 200), order=st.permutations(range(3)))
def test_packing_and_order_do_not_change_values(tiny_random: Path, budget: int, order: list[int]) -> None:
    model = _random_model(tiny_random)
    groups = [unpack(tool_group(g)) for g in range(3)]
    sampled = groups[0].loss_mask
    want = torch.full((len(sampled),), torch.nan)
    (alone,) = pack(groups[:1], sampled, microbatch_tokens=4096)
    with torch.no_grad():
        want[alone.token_index] = model.values(alone)
        for batch in pack(groups, np.tile(sampled, 3), microbatch_tokens=budget):
            places = batch.token_index % len(sampled)
            assert_close(model.values(batch), want[places], atol=1e-4, rtol=0)
        rows = CriticTrainer(config(microbatch_tokens=budget), tiny_random)
        random_head(rows.model)
        mixed = rows.values([unpack(tool_group().take(order))])
    ends = [0, 6, 7, 11]
    expected = np.concatenate([want.nan_to_num(0.0).numpy()[ends[i] : ends[i + 1]] for i in order])
    np.testing.assert_allclose(mixed, expected, atol=1e-4)


_MODELS: dict[Path, ValueModel] = {}


def _random_model(folder: Path) -> ValueModel:
    if folder not in _MODELS:
        _MODELS[folder] = ValueModel(folder, "float32")
        random_head(_MODELS[folder])
    return _MODELS[folder]


def test_a_value_that_is_not_finite_is_not_hidden(tiny_random: Path) -> None:
    actor = CriticActor(config(), str(tiny_random))
    with torch.no_grad():
        actor._trainer.model.head.bias.fill_(math.inf)
    got = values_of(actor, tool_group())
    assert got == [[math.inf, 0.0, 0.0, math.inf, math.inf, math.inf], [math.inf], [math.inf] * 3 + [0.0]]


# ---- the loss --------------------------------------------------------------------------------------------


def loss_and_gradient(values: list[float], old: list[float], returns: list[float], **choice: Any) -> Any:
    values_M = torch.tensor(values, requires_grad=True)
    weights_M = torch.ones(len(values))
    loss = value_loss(values_M, torch.tensor(old), torch.tensor(returns), weights_M, **choice)
    loss.backward()
    assert values_M.grad is not None
    return loss.item(), values_M.grad.tolist()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the clip: 1/2 * 0.9^2
        (0.5, 0.0, 1.0, 0.32, 0.0),  # moved towards the return past the clip: 1/2 * 0.8^2, no more pull
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # moved away from it: 1/2 * 1.5^2, and it is pulled back
        (0.3, 0.5, 0.0, 0.045, 0.3),  # at the bound, which still counts as inside
        (1.5, 0.0, 1.0, 0.32, 0.0),  # past the return: max(1/2 * 0.5^2, 1/2 * 0.8^2)
    ],
)
def test_clipped_squared_loss_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float
) -> None:
    got, (slope,) = loss_and_gradient([value], [old], [target], clip=0.2, loss="squared")
    assert (got, slope) == pytest.approx((loss, gradient), abs=1e-6)


def test_without_a_clip_the_old_values_are_not_looked_at() -> None:
    got, slopes = loss_and_gradient([0.5, -2.0], [math.nan, math.inf], [1.0, 1.0], clip=None, loss="squared")
    assert (got, *slopes) == pytest.approx((0.125 + 4.5, -0.5, -3.0))


def test_huber_by_hand() -> None:
    # |e| = 0.5: 1/2 * 0.25; |e| = 3: 3 - 1/2, and the slope stays at 1.
    got, slopes = loss_and_gradient([0.5, -2.0], [0.0, 0.0], [1.0, 1.0], clip=None, loss="huber")
    assert (got, *slopes) == pytest.approx((0.125 + 2.5, -0.5, -1.0))
    # Clipped at 0.2: |e| = 0.8 is the larger error for the first, 3 for the second.
    got, slopes = loss_and_gradient([0.5, -2.0], [0.0, 0.0], [1.0, 1.0], clip=0.2, loss="huber")
    assert (got, *slopes) == pytest.approx((0.32 + 2.5, 0.0, -1.0))


def test_weights_are_the_denominator() -> None:
    values_M = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weights_M = torch.tensor([0.5, 0.25, 0.25])
    zeros_M = torch.zeros(3)
    loss = value_loss(values_M, zeros_M, zeros_M, weights_M, clip=None, loss="squared")
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.5 + 0.25 * 2 + 0.25 * 4.5)
    assert values_M.grad is not None and values_M.grad.tolist() == [0.5, 0.5, 0.75]


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_garbage_of_weight_zero_changes_nothing(loss: Any, clip: float | None) -> None:
    def run(garbage: float) -> tuple[float, list[float]]:
        values_M = torch.tensor([0.5, garbage, 0.1], requires_grad=True)
        old_M, returns_M = torch.tensor([0.0, garbage, 0.0]), torch.tensor([1.0, garbage, 1.0])
        got = value_loss(values_M, old_M, returns_M, torch.tensor([0.5, 0.0, 0.5]), clip=clip, loss=loss)
        got.backward()
        assert values_M.grad is not None
        return got.item(), values_M.grad.tolist()

    want = run(0.0)
    assert run(math.nan) == run(math.inf) == want
    assert want[1][1] == 0.0


@pytest.mark.parametrize("place", range(3))
def test_a_nan_that_counts_is_not_hidden(place: int) -> None:
    tensors = [torch.tensor([0.1, 0.2]) for _ in range(3)]
    tensors[place][0] = math.nan
    values_M, old_M, returns_M = tensors
    loss = value_loss(values_M, old_M, returns_M, torch.ones(2), clip=0.2, loss="squared")
    assert math.isnan(loss.item())


def test_no_token_gives_a_loss_of_zero_with_a_gradient() -> None:
    values_M = torch.tensor([math.nan], requires_grad=True)
    nothing_M = torch.tensor([math.nan])
    loss = value_loss(values_M, nothing_M, nothing_M, torch.zeros(1), clip=0.2, loss="squared")
    loss.backward()
    assert loss.item() == 0.0
    assert values_M.grad is not None and values_M.grad.tolist() == [0.0]


def test_one_value_per_token_or_nothing() -> None:
    with pytest.raises(ValueError, match="one value per token"):
        value_loss(
            torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), torch.zeros(2), clip=None, loss="squared"
        )


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 3, returns) == 1.0  # a constant error is no variance
    assert explained_variance(torch.zeros(4), returns) == 0.0
    # residuals [-.5, .5, 0, 0]: variance 1/8 of a variance of 1/4
    assert explained_variance(torch.tensor([0.5, 0.5, 0.0, 1.0]), returns) == pytest.approx(0.5)
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.full((4,), 0.1)) is None
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None


# ---- training --------------------------------------------------------------------------------------------


def with_values(table: pa.Table, values: list[list[float]]) -> pa.Table:
    return replace_column(table, "values", values)


def zeros(table: pa.Table) -> pa.Table:
    return with_values(table, [[0.0] * len(r) for r in table.column("response_ids").to_pylist()])


def two_groups(rewards: tuple[float, float] = (1.0, 0.0)) -> list[pa.Table]:
    """Two prompts, each with the same reward for all its answers: 7 and 5 sampled tokens."""
    first, second = rewards
    return [
        build(
            [
                row(0, 0, [7, 9, 12], [5, 6, 30, EOS], reward=first),
                row(0, 1, [7, 9, 12], [8, 30, EOS], reward=first),
            ]
        ),
        build(
            [
                row(1, 0, [40, 41], [5, 6, EOS], reward=second),
                row(1, 1, [40, 41], [17, 5, EOS], loss_mask=[1, 0, 1], reward=second),
            ]
        ),
    ]


def test_a_step_by_hand_over_tool_tokens(tiny_random: Path) -> None:
    # Returns of [.1, .2, -, -, .3] with reward 1 at lambda .9: A = [.757, .73, -, -, .7], A + V = [.857, .93, -, -, 1].
    table = build([row(0, 0, [7, 9], [5, 30, 31, 6, EOS], loss_mask=[1, 1, 0, 0, 1])])
    settings_ = config({"gae_lambda": 0.9}, groups=1, value_clip=None, max_grad_norm=100.0)
    trainer = CriticTrainer(settings_, tiny_random)
    (stats,) = trainer.train([with_values(table, [[0.1, 0.2, 9.0, math.nan, 0.3]])], 0)
    assert stats.value_loss == pytest.approx((0.857**2 + 0.93**2 + 1.0) / 6, abs=1e-6)
    assert stats.value_mean == pytest.approx(0.2)
    # residuals [.757, .73, .7]: variance 5.42e-4; returns: 3.40867e-3
    assert stats.explained_variance == pytest.approx(1 - 5.42e-4 / 3.408667e-3, abs=1e-4)
    # Of the bias the gradient is the mean of V - R, of the head's weight that of (V - R) * state; V is 0.
    bias = trainer.optimizer.state[trainer.model.head.bias]["exp_avg"]
    assert bias.item() == pytest.approx(0.1 * -(0.857 + 0.93 + 1.0) / 3, abs=1e-6)
    network = AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)
    with torch.no_grad():
        row_ids = torch.tensor([[7, 9, 5, 30, 31, 6]])
        states = network(row_ids, output_hidden_states=True).hidden_states[-1][0]
    head = -(0.857 * states[1] + 0.93 * states[2] + states[5]) / 3
    assert_close(
        trainer.optimizer.state[trainer.model.head.weight]["exp_avg"][0], 0.1 * head, atol=1e-5, rtol=0
    )
    assert stats.grad_norm == pytest.approx(math.hypot(head.norm().item(), 2.787 / 3), rel=1e-5)


def test_targets_may_have_a_lambda_of_their_own(tiny_random: Path) -> None:
    """Monte Carlo: the reward itself at every sampled token, whatever the lambda of the advantages."""
    table = build([row(0, 0, [7, 9], [5, 30, 31, 6, EOS], loss_mask=[1, 1, 0, 0, 1])])
    values = [[0.1, 0.2, 9.0, math.nan, 0.3]]
    settings_ = config({"gae_lambda": 0.9}, groups=1, value_clip=None, target_lambda=1.0)
    (stats,) = CriticTrainer(settings_, tiny_random).train([with_values(table, values)], 0)
    assert stats.value_loss == pytest.approx(0.5)
    assert stats.explained_variance is None  # returns that do not vary


def test_vtrace_targets_see_how_far_the_policy_has_moved(tiny_random: Path) -> None:
    """Behavior log-probabilities are -1; of the learner's, -2 makes a token e times less likely, 0 counts as it is (cap 1),
    and NaN is a token that it did not look at. A second row without a verdict has no targets."""
    table = build(
        [
            row(0, 0, [7, 9], [5, 6, EOS]),
            row(0, 1, [7, 9], [5, EOS], reward=None),
        ]
    )
    table = with_values(table, [[0.1, 0.2, 0.3], [5.0, 5.0]])
    learned = pa.table({"proximal_logprobs": [[0.0, -2.0, math.nan], [-3.0, -3.0]]})
    learned = learned.cast(pa.schema([("proximal_logprobs", pa.list_(pa.float32()))]))
    settings_ = config(groups=1, value_clip=None, targets="vtrace")
    trainer = CriticTrainer(settings_, tiny_random)
    (stats,) = trainer.train([table], 0, learned)
    rho = math.exp(-1)
    last = 1.0
    middle = 0.2 + rho * 0.1 + rho * 0.7
    first = 0.1 + 0.1 + (middle - 0.2)
    assert stats.value_loss == pytest.approx((first**2 + middle**2 + last**2) / 6, abs=1e-6)
    with pytest.raises(ValueError, match=r"vtrace needs the learner's columns"):
        trainer.train([table], 1)


def test_it_learns_what_each_prompt_is_worth(tiny_random: Path) -> None:
    actor = CriticActor(config(), str(tiny_random))
    history = []
    for version in range(20):
        history += actor.train(version, *(actor.score(table) for table in two_groups()))
    first, last = history[0], history[-1]
    assert first.value_loss == pytest.approx(7 / 12 / 2)  # 7 of 12 tokens are worth 1, and all are held for 0
    assert (first.explained_variance, first.value_mean) == (0.0, 0.0)
    assert last.version == 20
    assert last.value_loss < 0.1 * first.value_loss
    assert last.explained_variance is not None and last.explained_variance > 0.8
    assert last.value_mean == pytest.approx(7 / 12, abs=0.15)


def test_it_learns_a_constant_reward(tiny_random: Path) -> None:
    actor = CriticActor(config(value_loss="huber"), str(tiny_random))
    history = []
    for version in range(15):
        history += actor.train(version, *(actor.score(table) for table in two_groups((1.0, 1.0))))
    assert history[0].value_loss == pytest.approx(0.5)
    assert history[0].explained_variance is None  # returns of 1 everywhere do not vary
    assert history[-1].value_loss < 0.02
    assert history[-1].value_mean == pytest.approx(1.0, abs=0.2)


def test_tokens_without_advantage_train_the_critic(tiny_random: Path) -> None:
    # Scored at what they turned out to be worth, so nothing is left for the policy; the critic is at 0 and has all
    # of it to learn.
    table = build([row(0, 0, [7], [5, 6]), row(0, 1, [7], [8])])
    trainer = CriticTrainer(config(groups=1), tiny_random)
    (stats,) = trainer.train([with_values(table, [[1.0, 1.0], [1.0]])], 0)
    assert stats.value_loss == pytest.approx(0.5)
    assert stats.grad_norm > 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_do_not_matter(tiny_random: Path, dtype: str) -> None:
    tables = [zeros(tool_group(g)) for g in range(2)]
    found = []
    for budget in (16, 4096):
        trainer = CriticTrainer(config(dtype=dtype, microbatch_tokens=budget), tiny_random)
        random_head(trainer.model)
        (stats,) = trainer.train(tables, 0)
        moments = [trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainer.model.masters.values()]
        found.append((stats, torch.cat(moments)))
    (left, left_moments), (right, right_moments) = found
    assert left.value_loss == pytest.approx(right.value_loss, rel=1e-5 if dtype == "float32" else 0.03)
    assert left_moments.dtype == torch.float32
    assert torch.cosine_similarity(left_moments, right_moments, dim=0) > (
        1 - 1e-5 if dtype == "float32" else 0.99
    )


def test_what_stands_in_places_that_do_not_count_changes_nothing(tiny_random: Path) -> None:
    # The second response has no verdict, and the others have tool tokens.
    table = tool_group(rewards=(1.0, None, 0.0))
    masks = table.column("loss_mask").to_pylist()
    clean = [[0.1 * m for m in mask] for mask in masks]
    dirty = [[0.1 if m and index != 1 else math.nan for m in mask] for index, mask in enumerate(masks)]
    trainers = [CriticTrainer(config(groups=1), tiny_random) for _ in range(2)]
    (want,), (got,) = (
        trainer.train([with_values(table, values)], 0)
        for trainer, values in zip(trainers, (clean, dirty), strict=True)
    )
    assert got == want
    left, right = map(state_of, trainers)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_batch_without_a_verdict_is_a_step_that_changes_nothing(tiny_random: Path) -> None:
    trainer = CriticTrainer(config(groups=1), tiny_random)
    before = state_of(trainer)
    (stats,) = trainer.train([zeros(tool_group(rewards=(None, None, None)))], 0)
    assert (stats.value_loss, stats.grad_norm, stats.version) == (0.0, 0.0, 1)
    assert stats.explained_variance is stats.value_mean is None
    assert all(torch.equal(left, before[name]) for name, left in state_of(trainer).items())


def test_a_batch_may_be_several_steps(tiny_random: Path) -> None:
    tables = [zeros(table) for table in two_groups()]
    trainer = CriticTrainer(config(groups=1, steps=2), tiny_random)
    first, second = trainer.train(tables, 0)
    assert (first.version, second.version, trainer.version) == (1, 2, 2)
    assert first.value_loss == pytest.approx(0.5)  # every token of the first group is worth 1
    assert 0 < second.value_loss < 0.1  # worth 0, seen by a critic that has taken a small step up


def test_a_value_that_is_not_finite_is_named_and_destroys_nothing(tiny_random: Path) -> None:
    trainer = CriticTrainer(config(), tiny_random)
    good, other = (zeros(table) for table in two_groups())
    trainer.train([good, other], 0)
    before = state_of(trainer)
    bad = with_values(other, [[0.0, math.nan, 0.0], [0.0] * 3])
    with pytest.raises(
        NonFiniteStep, match=r"value loss is not finite at version 1, in rollouts .*1/0"
    ) as caught:
        trainer.train([good, bad], 1)
    assert caught.value.version == trainer.version == 1
    assert all(torch.equal(left, before[name]) for name, left in state_of(trainer).items())
    assert all(p.grad is None for p in trainer.model.masters.values())
    assert math.isfinite(trainer.train([good, other], 1)[0].grad_norm)


def test_wrong_input_is_refused(tiny_random: Path) -> None:
    trainer = CriticTrainer(config(), tiny_random)
    tables = two_groups()
    with pytest.raises(ValueError, match="critic is at 0"):
        trainer.train([zeros(table) for table in tables], 1)
    with pytest.raises(ValueError, match="a batch is 2 groups, got 1"):
        trainer.train(tables[:1], 0)
    with pytest.raises(SchemaError, match="'values' is missing"):
        trainer.train(tables, 0)


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_bit_for_bit(tiny_random: Path, tmp_path: Path, dtype: str) -> None:
    # Rewards over their running deviation: what was seen before the checkpoint decides the returns after it.
    settings_ = config({"reward_normalization": "running"}, dtype=dtype)
    whole = CriticActor(settings_, str(tiny_random))
    for version in range(2):
        whole.train(version, *(whole.score(table) for table in two_groups((1.0, 0.25))))
    whole.save(str(tmp_path))
    resumed = CriticActor(settings_, str(tiny_random))
    assert resumed.load(str(tmp_path)) == 2
    assert values_of(resumed, tool_group()) == values_of(whole, tool_group())
    want, got = (
        actor.train(2, *(actor.score(table) for table in two_groups((0.5, 0.0))))
        for actor in (whole, resumed)
    )
    assert got == want
    left, right = state_of(whole._trainer), state_of(resumed._trainer)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert values_of(resumed, tool_group()) == values_of(whole, tool_group()) != [[0.0] * 6, [0.0], [0.0] * 4]


def test_another_models_part_of_a_checkpoint_is_refused(tiny_random: Path, tmp_path: Path) -> None:
    trainer = CriticTrainer(config(), tiny_random)
    trainer.save(tmp_path)
    state = torch.load(tmp_path / "critic.pt", weights_only=True)
    del state["masters"]["value_head.bias"]
    torch.save(state, tmp_path / "critic.pt")
    with pytest.raises(DataError, match=r"another critic .* \(model\.path\)"):
        trainer.load(tmp_path)


def test_made_from_a_reward_model_values_start_at_its_calibrated_scores(
    tiny_random: Path, tmp_path: Path
) -> None:
    """The value before a token is the score of what is there up to it; that of the whole response comes after its last
    token, and is what a reward model would say."""
    reward = RewardModel(tiny_random, dtype="float32", kind="outcome")
    torch.manual_seed(3)
    torch.nn.init.normal_(reward.head.weight, std=0.5)
    reward.calibration = Calibration(mean=0.3, std=2.0, num_responses=9)
    reward.save(tmp_path / "model")
    values = values_of(
        CriticActor(config(groups=1), str(tmp_path / "model")), build([row(0, 0, [7, 9], [5, 8, 6])])
    )
    prefixes = [build([row(0, 0, [7, 9], [5])]), build([row(0, 0, [7, 9], [5, 8])])]
    scores = [reward.scores([unpack(table)], microbatch_tokens=64)[0] for table in prefixes]
    expected = [(float(score) - 0.3) / 2.0 for score in scores]
    assert values[0][1:] == pytest.approx(expected, abs=1e-5)
