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
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.actors.policy import PolicyActor
from headway.actors.reference import ReferenceActor
from headway.core.config import Config, parse_config
from headway.core.errors import WeightUpdateFailed
from headway.core.rollouts import build, replace_column
from headway.learner.batching import unpack
from headway.learner.pretrained import model_folder
from headway.learner.rewards import RewardState
from headway.learner.step import prepare
from headway.learner.trainer import NonFiniteStep, Trainer

VOCABULARY = 80


def config(algorithm: dict[str, Any] | None = None, *, dtype: str = "float32", **learner: Any) -> Config:
    return parse_config(
        {
            "model": {"dtype": dtype},
            "run": {"steps": 60},
            "lag": {"max_version_lag": 8},
            "sampling": {"temperature": 0.8},
            "algorithm": {"correction": "tis_token", "ess_lr": False, **(algorithm or {})},
            "learner": {"groups_per_step": 3, "learning_rate": 1e-4, "weight_decay": 0.1, **learner},
        }
    )


def group_table(
    group: int, *, seed: int, rewards: list[float | None], version: int = 0, longest: int = 9
) -> pa.Table:
    rng = np.random.default_rng([seed, group])
    prompt = rng.integers(4, VOCABULARY, rng.integers(2, 8)).tolist()
    rows = []
    for index, reward in enumerate(rewards):
        n = int(rng.integers(1, longest + 1))
        rows.append(
            {
                "rollout_id": f"{group}/{index}",
                "group_id": group,
                "prompt_id": f"p{group}",
                "sample_index": index,
                "prompt_ids": prompt,
                "response_ids": rng.integers(4, VOCABULARY, n).tolist(),
                "loss_mask": [1, *(rng.random(n - 1) < 0.8).astype(int).tolist()],
                "behavior_logprobs": (-4 - rng.random(n)).tolist(),
                "version_spans": [{"start": 0, "end": n, "version": version}],
                "finish_reason": "stop",
                "truncated": index == 0,
                "text": "",
                "reward": reward,
            }
        )
    return build(rows)


REWARDS: list[list[float | None]] = [[1, 0, 0, 1], [1, 1, 1, 1], [0, None, 1, 0]]


def batch(seed: int, version: int = 0, groups: int = 3) -> list[pa.Table]:
    return [group_table(g, seed=seed, rewards=REWARDS[g % 3], version=version) for g in range(groups)]


class PlainTrainer:
    """The same training the ordinary way: a padded row per response, the whole logits, log_softmax, AdamW."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.learner.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learner.learning_rate)

    def logprobs(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        longest = max(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
        ids, mask = (
            torch.zeros(len(rows), longest, dtype=torch.int64),
            torch.zeros(len(rows), longest, dtype=torch.int64),
        )
        for i, r in enumerate(rows):
            tokens = r["prompt_ids"] + r["response_ids"]
            ids[i, : len(tokens)] = torch.tensor(tokens)
            mask[i, : len(tokens)] = 1
        logits = self.model(input_ids=ids, attention_mask=mask).logits / self.config.sampling.temperature
        picked = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.cat(
            [
                picked[i, len(r["prompt_ids"]) - 1 : len(r["prompt_ids"]) + len(r["response_ids"]) - 1]
                for i, r in enumerate(rows)
            ]
        )

    def step(self, tables: list[pa.Table], proximal: torch.Tensor | None = None) -> tuple[float, float]:
        algorithm = self.config.algorithm
        rows, advantages = [], []
        for table in tables:
            group = table.to_pylist()
            rows += group
            scored = [r["reward"] for r in group if r["reward"] is not None]
            std = np.std(scored, ddof=1)
            for r in group:
                flat = r["reward"] is None or max(scored) == min(scored)
                advantages.append(0.0 if flat else (r["reward"] - np.mean(scored)) / (std + 1e-6))
        logprobs = self.logprobs(rows)
        lengths = torch.tensor([len(r["response_ids"]) for r in rows])
        advantage = torch.tensor(advantages, dtype=torch.float32).repeat_interleave(lengths)
        behavior = torch.tensor([x for r in rows for x in r["behavior_logprobs"]])
        mask = torch.tensor([float(m and r["reward"] is not None) for r in rows for m in r["loss_mask"]])
        proximal = logprobs.detach() if proximal is None else proximal
        ratio = (logprobs - proximal).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        weight = (proximal - behavior).exp().clamp(max=algorithm.correction_cap)
        token_loss = -weight * torch.minimum(ratio * advantage, clipped * advantage)
        if algorithm.aggregation == "token_mean":
            loss = (token_loss * mask).sum() / mask.sum()
        else:
            means = [
                (x * m).sum() / m.sum()
                for x, m in zip(token_loss.split(lengths.tolist()), mask.split(lengths.tolist()), strict=True)
                if m.sum() > 0
            ]
            loss = torch.stack(means).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.max_grad_norm)
        self.optimizer.step()
        return loss.item(), norm.item()

    def momentum(self) -> dict[str, torch.Tensor]:
        return {name: self.optimizer.state[p]["exp_avg"] for name, p in self.model.named_parameters()}


def momentum(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Adam's first moment: unlike the weights it is linear in the gradients."""
    return {name: trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.masters.items()}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.masters.items()}


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert_close(
            left[name], right[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("microbatch_tokens", [16, 4096])
def test_three_steps_equal_the_plain_way(tiny_random: Path, aggregation: str, microbatch_tokens: int) -> None:
    settings_ = config({"aggregation": aggregation}, microbatch_tokens=microbatch_tokens)
    trainer, plain = Trainer(settings_, tiny_random), PlainTrainer(tiny_random, settings_)
    for step in range(3):
        tables = batch(seed=step, version=step)
        ((stats,), _) = trainer.train(tables, step)
        assert (stats.loss, stats.grad_norm) == pytest.approx(plain.step(tables), abs=1e-5)
        assert stats.version == trainer.version == step + 1
    assert_same_weights(weights(trainer), dict(plain.model.named_parameters()), atol=1e-5)
    assert_same_weights(momentum(trainer), plain.momentum(), atol=1e-6)


def test_later_steps_of_a_batch_keep_its_first_policy_as_proximal(tiny_random: Path) -> None:
    settings_ = config(steps_per_batch=2)
    trainer, plain = Trainer(settings_, tiny_random), PlainTrainer(tiny_random, settings_)
    tables = batch(seed=5, groups=6)
    (first, second), _ = trainer.train(tables, 0)
    with torch.no_grad():
        proximal = plain.logprobs([r for table in tables[3:] for r in table.to_pylist()])
    assert (first.loss, first.grad_norm) == pytest.approx(plain.step(tables[:3]), abs=1e-5)
    assert (second.loss, second.grad_norm) == pytest.approx(plain.step(tables[3:], proximal), abs=1e-5)
    assert (first.version, second.version) == (1, 2)
    assert_same_weights(weights(trainer), dict(plain.model.named_parameters()), atol=1e-5)
    # Version 0 sampled all of it: the first step trains at lag 0, the second at lag 1.
    assert first.engine_learner_kl is not None and second.engine_learner_kl is None


@settings(max_examples=8, deadline=None)
@given(budget=st.integers(16, 200), order=st.permutations(range(3)), rows=st.permutations(range(4)))
def test_budget_and_order_do_not_matter(
    tiny_random: Path, budget: int, order: list[int], rows: list[int]
) -> None:
    tables = batch(seed=7)
    expected = Trainer(config(), tiny_random)
    ((want,), _) = expected.train(tables, 0)
    trainer = Trainer(config(microbatch_tokens=budget), tiny_random)
    ((got,), _) = trainer.train([tables[i].take(rows) for i in order], 0)
    assert got.loss == pytest.approx(want.loss, abs=1e-6)
    assert got.grad_norm == pytest.approx(want.grad_norm, abs=1e-5)
    assert_same_weights(weights(trainer), weights(expected), atol=1e-5)
    assert_same_weights(momentum(trainer), momentum(expected), atol=1e-6)


def test_stats_by_hand(tiny_random: Path) -> None:
    tables = batch(seed=3, version=0)
    trainer = Trainer(config(warmup_steps=4), tiny_random)
    ((stats,), _) = trainer.train(tables, 0)
    rows = [r for table in tables for r in table.to_pylist()]
    assert sorted(stats.rewards) == [0.0] * 4 + [1.0] * 7
    assert stats.reward_mean == pytest.approx(7 / 11)
    assert stats.response_lengths == [len(r["response_ids"]) for r in rows]
    assert stats.truncated_fraction == pytest.approx(3 / 12)
    assert (stats.no_signal_groups, stats.num_unscored) == (1, 1)
    sampled = sum(sum(r["loss_mask"]) for r in rows)
    flat = sum(sum(r["loss_mask"]) for r in rows[4:8])
    unscored = sum(rows[9]["loss_mask"])
    assert stats.num_tokens == sampled - flat - unscored == len(stats.importance_weights)
    assert stats.masked_fraction == pytest.approx(
        {
            "unscored": unscored / sampled,
            "truncated": 0.0,
            "no_signal": flat / sampled,
            "missing_logprob": 0.0,
            "withheld": 0.0,
        }
    )
    assert stats.clipped_fraction == 0.0  # the ratio of the first step is 1
    assert stats.learning_rate == pytest.approx(1e-4 / 4)
    assert stats.entropy is not None and 0 < stats.entropy < math.log(
        len(AutoTokenizer.from_pretrained(tiny_random))
    )
    assert stats.importance_weights.dtype == np.float32
    # all tokens are of lag 0, so both say the same
    assert stats.engine_learner_kl == pytest.approx(stats.behavior_kl)
    assert set(stats.seconds) == {"unpack", "forward_backward", "optimizer"}


def test_groups_without_signal_stay_in_the_denominator(tiny_random: Path) -> None:
    signal = group_table(0, seed=1, rewards=[1, 0])
    flat = group_table(1, seed=1, rewards=[1, 1])

    def count(table: pa.Table) -> int:
        return sum(map(sum, table.column("loss_mask").to_pylist()))

    ((alone,), _) = Trainer(config(groups_per_step=1), tiny_random).train([signal], 0)
    ((both,), _) = Trainer(config(groups_per_step=2), tiny_random).train([signal, flat], 0)
    assert both.loss == pytest.approx(alone.loss * count(signal) / (count(signal) + count(flat)), abs=1e-6)
    assert both.num_tokens == alone.num_tokens


def test_a_batch_without_signal_is_a_step_with_gradient_zero(tiny_random: Path) -> None:
    trainer = Trainer(config(groups_per_step=1, weight_decay=0.0), tiny_random)
    before = weights(trainer)
    ((stats,), _) = trainer.train([group_table(0, seed=1, rewards=[0, 0, None])], 0)
    assert (stats.loss, stats.grad_norm, stats.num_tokens, stats.no_signal_groups) == (0.0, 0.0, 0, 1)
    assert stats.ess_fraction is stats.entropy is stats.behavior_kl is stats.clipped_fraction is None
    assert stats.version == trainer.version == 1
    assert_same_weights(weights(trainer), before, atol=0)
    ((stats,), _) = trainer.train([group_table(0, seed=1, rewards=[None, None])], 1)
    assert stats.reward_mean is None


def test_a_missing_behavior_logprob_leaves_the_loss_and_is_counted(tiny_random: Path) -> None:
    table = group_table(0, seed=2, rewards=[1, 0])
    lists = table.column("behavior_logprobs").to_pylist()
    lists[0][0] = math.nan
    table = replace_column(table, "behavior_logprobs", lists)
    num_sampled = sum(map(sum, table.column("loss_mask").to_pylist()))
    ((stats,), _) = Trainer(config(groups_per_step=1), tiny_random).train([table], 0)
    assert stats.masked_fraction["missing_logprob"] == pytest.approx(1 / num_sampled)
    assert stats.num_tokens == num_sampled - 1
    assert math.isfinite(stats.loss)
    # Without a correction the behavior policy is not in the loss, and nothing is missing.
    ((stats,), _) = Trainer(config({"correction": "none"}, groups_per_step=1), tiny_random).train([table], 0)
    assert stats.num_tokens == num_sampled and len(stats.importance_weights) == num_sampled - 1


def test_what_stands_in_masked_places_does_not_matter(tiny_random: Path) -> None:
    table = group_table(0, seed=4, rewards=[1, 0, None])
    masks, behavior = table.column("loss_mask").to_pylist(), table.column("behavior_logprobs").to_pylist()
    assert 0 in masks[0] + masks[1]
    garbage = [
        [x if m and i < 2 else math.nan for m, x in zip(mask, values, strict=True)]
        for i, (mask, values) in enumerate(zip(masks, behavior, strict=True))
    ]
    clean, dirty = (Trainer(config(groups_per_step=1), tiny_random) for _ in range(2))
    ((want,), _) = clean.train([table], 0)
    ((got,), _) = dirty.train([replace_column(table, "behavior_logprobs", garbage)], 0)
    assert got.loss == want.loss
    assert_same_weights(weights(dirty), weights(clean), atol=0)


def test_a_non_finite_value_is_named_and_destroys_nothing(tiny_random: Path) -> None:
    trainer = Trainer(config(groups_per_step=2), tiny_random)
    good = group_table(0, seed=1, rewards=[1, 0])
    bad = group_table(1, seed=1, rewards=[math.nan, 0.0])
    trainer.train([good, group_table(1, seed=1, rewards=[1, 0])], 0)
    before, moments = weights(trainer), trainer.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(NonFiniteStep, match=r"loss is not finite at version 1, in rollouts .*1/0") as caught:
        trainer.train([good, bad], 1)
    assert caught.value.version == 1
    assert_same_weights(weights(trainer), before, atol=0)
    assert torch.equal(trainer.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert trainer.version == 1
    # broken weights are found at the log-probabilities
    with torch.no_grad():
        trainer.model.masters["model.norm.weight"][0] = math.nan
    with pytest.raises(NonFiniteStep, match="log-probability"):
        trainer.train([good, good], 1)
    ((stats,), _) = _repaired(trainer, before).train([good, group_table(1, seed=1, rewards=[1, 0])], 1)
    assert math.isfinite(stats.grad_norm)


def _repaired(trainer: Trainer, good: dict[str, torch.Tensor]) -> Trainer:
    with torch.no_grad():
        for name, parameter in trainer.model.masters.items():
            parameter.copy_(good[name])
    return trainer


def test_wrong_version_or_size_is_refused(tiny_random: Path) -> None:
    trainer = Trainer(config(), tiny_random)
    with pytest.raises(ValueError, match="learner is at 0"):
        trainer.train(batch(seed=0), 1)
    with pytest.raises(ValueError, match="a batch is 3 groups, got 2"):
        trainer.train(batch(seed=0, groups=2), 0)


def test_seq_mean_counts_only_responses_with_trained_tokens() -> None:
    table = group_table(0, seed=4, rewards=[1, 0, None])
    algorithm = config({"aggregation": "seq_mean_token_mean"}).algorithm
    step = prepare([unpack(table)], algorithm, max_new_tokens=64, state=RewardState.start(algorithm))
    total = step.token_weights_N[torch.from_numpy(step.trained_N)].sum()
    assert total == pytest.approx(1.0)  # two responses of weight 1/2 each


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_goes_on_bit_for_bit(tiny_random: Path, tmp_path: Path, dtype: str) -> None:
    settings_ = config(warmup_steps=5, dtype=dtype)
    whole, resumed = (PolicyActor(settings_, str(tiny_random), "") for _ in range(2))
    for actor in (whole, resumed):
        actor.start(0, 1, "", 10.0)
    for step in range(2):
        whole.train(step, *batch(seed=step))
    whole.save(str(tmp_path))
    want, _ = whole.train(2, *batch(seed=2))
    assert resumed.load(str(tmp_path)) == 2
    with pytest.raises(ValueError, match="asked to train from version 1, but the learner is at 2"):
        resumed.train(1, *batch(seed=1))  # the last batch again
    got, _ = resumed.train(2, *batch(seed=2))
    assert (got[0].loss, got[0].grad_norm, got[0].learning_rate) == (
        want[0].loss,
        want[0].grad_norm,
        want[0].learning_rate,
    )
    for left, right in zip(whole.publish(3)[1:], resumed.publish(3)[1:], strict=True):
        assert np.array_equal(left, right)
    left, right = whole._trainer, resumed._trainer
    assert_same_weights(weights(left), weights(right), atol=0)
    for a, b in zip(
        left.optimizer.state_dict()["state"].values(),
        right.optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(a[key], b[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_resumed_learner_is_held_to_the_reference_that_it_started_with(
    tiny_random: Path, tmp_path: Path
) -> None:
    """The reference is the model folder's, to the bit, and not the checkpoint's weights, which have moved away."""
    settings_ = config({"kl": "loss", "kl_coef": 0.1}, learning_rate=1e-2)
    trainer, reference = Trainer(settings_, tiny_random), ReferenceActor(settings_, str(tiny_random))
    for step in range(2):
        trainer.train([reference.score(table) for table in batch(seed=step)], step)
    trainer.save(tmp_path)
    reference.save(str(tmp_path))
    resumed = ReferenceActor(settings_, str(tiny_random))
    assert resumed.load(str(tmp_path)) == 0
    own, moved = (
        [a.score(t).column("reference_logprobs").to_pylist() for t in batch(seed=2)]
        for a in (resumed, ReferenceActor(settings_, str(tmp_path / "model")))
    )
    want = [reference.score(table).column("reference_logprobs").to_pylist() for table in batch(seed=2)]
    assert own == want != moved
    other = Trainer(settings_, tiny_random)
    other.load(tmp_path)
    ((left,), _), ((right,), _) = (
        t.train([a.score(table) for table in batch(seed=2)], 2)
        for t, a in ((trainer, reference), (other, resumed))
    )
    assert (left.kl_reference, left.loss) == (right.kl_reference, right.loss)
    assert left.kl_reference is not None and left.kl_reference > 1e-3


def test_a_checkpoint_opens_as_a_model_folder(tiny_random: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(), tiny_random)
    trainer.train(batch(seed=0), 0)
    trainer.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_folder(str(tmp_path / "model")))
    assert model.dtype == torch.float32
    assert_same_weights(dict(model.named_parameters()), weights(trainer), atol=0)
    text = "State the final answer to the following arithmetic problem: 4 + 3 ="
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tiny_random).encode(text)


def test_bfloat16_network_holds_the_rounded_masters(tiny_random: Path) -> None:
    trainer = Trainer(config(dtype="bfloat16"), tiny_random)
    ((stats,), _) = trainer.train(batch(seed=0), 0)
    ((exact,), _) = Trainer(config(), tiny_random).train(batch(seed=0), 0)
    assert stats.loss == pytest.approx(exact.loss, abs=2e-2)
    for name, parameter in trainer.model.network.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, trainer.model.masters[name].to(torch.bfloat16))
    assert trainer.model.network.model.rotary_emb.inv_freq.dtype == torch.float32


def test_bfloat16_gradients_add_up_over_micro_batches(tiny_random: Path) -> None:
    whole = Trainer(config(dtype="bfloat16"), tiny_random)
    parts = Trainer(config(dtype="bfloat16", microbatch_tokens=16), tiny_random)
    ((want,), _) = whole.train(batch(seed=0), 0)
    ((got,), _) = parts.train(batch(seed=0), 0)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=0.03)
    left = torch.cat([tensor.flatten() for tensor in momentum(parts).values()])
    right = torch.cat([tensor.flatten() for tensor in momentum(whole).values()])
    assert torch.cosine_similarity(left, right, dim=0) > 0.995
    assert left.dtype == torch.float32


def test_publishing_what_training_did_not_touch_is_refused(tiny_random: Path) -> None:
    actor = PolicyActor(config(groups_per_step=1), str(tiny_random), "")
    actor.start(0, 1, "", 10.0)
    first, *_ = actor.publish(0)
    again, *_ = actor.publish(0)  # nothing has moved: as it should be
    assert again.digests == first.digests
    signal = group_table(0, seed=1, rewards=[1, 0])
    before = weights(actor._trainer)
    actor.train(0, signal)
    _repaired(actor._trainer, before)  # as if the trained weights were other tensors than the published ones
    with pytest.raises(WeightUpdateFailed, match="version 1 holds the same bytes as the last one"):
        actor.publish(1)


@pytest.mark.parametrize("rejected_in_denominator", [True, False])
def test_with_the_behavior_policy_as_the_old_one_steps_of_a_batch_are_batches(
    tiny_random: Path, rejected_in_denominator: bool
):
    """Weights, and so rejections and denominators, are those of the policy that each step starts from."""
    algorithm = {
        "old_policy": "behavior",
        "correction": ["mis_token", "off_policy_mask"],
        "rejected_in_denominator": rejected_in_denominator,
    }
    tables = [group_table(g, seed=5, rewards=REWARDS[0], longest=30) for g in range(6)]
    one, two = (
        Trainer(config(algorithm, steps_per_batch=steps, learning_rate=0.01), tiny_random) for steps in (1, 2)
    )
    apart = [*one.train(tables[:3], 0)[0], *one.train(tables[3:], 1)[0]]
    together, _ = two.train(tables, 0)
    assert 0 < apart[1].masked_fraction["mis_token"] < 1
    for step, other in zip(apart, together, strict=True):
        assert step.masked_fraction == other.masked_fraction
        assert (step.loss, step.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
