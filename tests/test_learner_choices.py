"""Whole optimizer steps under many choices: the same on two ranks and under any micro-batching (this file is also what
the ranks run)."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.core.config import Config, parse_config
from headway.core.rollouts import build
from headway.learner.losses import token_weights
from headway.learner.sft import Demonstration, accumulate
from headway.learner.sharding import Ranks, alone, free_address, join, leave, whole
from headway.learner.stats import StepStats
from headway.learner.trainer import Trainer

DEADLINE_S = 120.0
STEPS = 2
CHOICES: dict[str, dict[str, Any]] = {
    "async_grpo": {"preset": "async_grpo"},
    "gspo": {"preset": "gspo", "clip_low": 0.01, "clip_high": 0.01, "old_policy": "behavior"},
    "grpo with entropy": {"preset": "grpo", "entropy_coef": 0.01},
    "reinforce_pp": {"preset": "reinforce_pp"},
    "rloo": {"preset": "rloo", "kl": "loss", "kl_estimator": "k3_plus", "kl_coef": 0.1},
    "deepseek_v32": {"preset": "deepseek_v32"},
    "tic_grpo": {"preset": "tic_grpo", "correction": "mis_sequence", "mis_sequence_low": 0.6},
    "mgpo": {"preset": "mgpo", "aggregation": "seq_mean_token_sum_norm", "dual_clip": 3.0},
    "without rejected": {"correction": "tis_token+mis_token", "rejected_in_denominator": False},
    "with demonstrations": {"correction": "tis_token", "sft_coef": 0.5, "sft_rows": 3},
}
DEMONSTRATIONS = [Demonstration([5, 6, 7 + i], [[20 + i, 21, 22 + i, 2]]) for i in range(4)]


def config(algorithm: dict[str, Any], **learner: Any) -> Config:
    return parse_config(
        {
            "model": {"dtype": "float32"},
            "run": {"steps": 60},
            "lag": {"max_version_lag": 8},
            "sampling": {"temperature": 0.8, "max_new_tokens": 32},
            "algorithm": algorithm,
            "data": {"demonstrations": "answers.jsonl" if "sft_coef" in algorithm else None},
            "learner": {"groups_per_step": 3, "learning_rate": 1e-4, **learner},
        }
    )


def group_table(group: int, *, rewards: list[float], version: int, behavior: float = -4.4) -> pa.Table:
    rng = np.random.default_rng([group, version])
    rows = []
    for index, reward in enumerate(rewards):
        n = int(rng.integers(1, 12))
        rows.append(
            {
                "rollout_id": f"{group}/{index}",
                "group_id": group,
                "prompt_id": f"p{group}",
                "sample_index": index,
                "prompt_ids": [5 + group, 6, 7],
                "response_ids": rng.integers(4, 80, n).tolist(),
                "loss_mask": [1, *(rng.random(n - 1) < 0.8).astype(int).tolist()],
                "behavior_logprobs": (behavior + 0.7 * rng.standard_normal(n)).tolist(),
                "reference_logprobs": (-4.4 + 0.5 * rng.standard_normal(n)).tolist(),
                "version_spans": [{"start": 0, "end": n, "version": max(0, version - index % 2)}],
                "finish_reason": "stop",
                "truncated": False,
                "text": "",
                "reward": reward,
            }
        )
    return build(rows)


def batch(version: int) -> list[pa.Table]:
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 1.0, 0.0]]
    return [group_table(group, rewards=rewards[group], version=version) for group in range(3)]


def result(folder: Path, choice: str, ranks: Ranks, **learner: Any) -> dict[str, Any]:
    """What two steps leave: their figures, and Adam's first moment, which is linear in the gradients."""
    trainer = Trainer(config(CHOICES[choice], **learner), folder, ranks, DEMONSTRATIONS)
    figures = []
    for version in range(STEPS):
        (stats,), _ = trainer.train(batch(version), version)
        figures.append((stats.loss, stats.grad_norm, stats.learning_rate, stats.sft_loss or 0.0))
    moments = {
        name: whole(trainer.optimizer.state[p]["exp_avg"]).clone()
        for name, p in trainer.model.masters.items()
    }
    return {"figures": figures, "moments": moments}


@pytest.fixture(scope="module")
def on_two_ranks(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of rank 0, by choice."""
    out = tmp_path_factory.mktemp("ranks") / "results.pt"
    address = free_address()
    command = [sys.executable, "-P", __file__, str(tiny_random), address, str(out)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return torch.load(out, weights_only=True)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for mine, other in zip(got["figures"], want["figures"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-5)
    for name, moment in want["moments"].items():
        assert torch.allclose(got["moments"][name], moment, atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("choice", CHOICES)
def test_two_ranks_and_small_micro_batches_change_nothing(
    choice: str, tiny_random: Path, on_two_ranks: dict[str, dict[str, Any]]
) -> None:
    want = result(tiny_random, choice, alone)
    assert all(norm > 1e-4 for _, norm, _, _ in want["figures"])
    assert_same(on_two_ranks[choice], want)
    assert_same(result(tiny_random, choice, alone, microbatch_tokens=16), want)


# ---- single choices, by hand -----------------------------------------------------------------------------


def train(folder: Path, algorithm: dict[str, Any], tables: list[pa.Table], **learner: Any) -> StepStats:
    (stats, *_), _ = Trainer(config(algorithm, groups_per_step=len(tables), **learner), folder).train(
        tables, 0
    )
    return stats


def test_rejected_tokens_leave_the_denominator_when_asked(tiny_random: Path) -> None:
    """The loss of the same kept tokens over all tokens, or over kept ones."""
    tables = [group_table(0, rewards=[1.0, 0.0, 0.0, 1.0], version=0)]
    rule = {"correction": "mis_token", "mis_token_low": 0.7, "mis_token_high": 1.4, "ess_lr": False}
    kept = train(tiny_random, {**rule, "rejected_in_denominator": True}, tables)
    out = train(tiny_random, {**rule, "rejected_in_denominator": False}, tables)
    rejected = kept.masked_fraction["mis_token"]
    assert 0.1 < rejected < 0.9
    assert out.loss == pytest.approx(kept.loss / (1 - rejected), abs=1e-6)
    assert out.masked_fraction["mis_token"] == pytest.approx(rejected)


def test_the_learning_rate_follows_the_effective_sample_size(tiny_random: Path) -> None:
    tables = [group_table(0, rewards=[1.0, 0.0, 0.0, 1.0], version=0)]
    plain = train(tiny_random, {"ess_lr": False, "correction": "tis_token"}, tables)
    scaled = train(tiny_random, {"ess_lr": True, "correction": "tis_token"}, tables)
    assert plain.ess_fraction is not None and plain.ess_fraction < 0.9
    assert plain.ess_lr_scale == 1.0 and plain.learning_rate == 1e-4
    # The running ESS of fresh tokens starts at 1 and has moved a tenth of the way to that of this step's.
    fresh = 0.9 + 0.1 * scaled.by_lag[0].ess_fraction
    assert scaled.ess_lr_scale == pytest.approx(math.sqrt(scaled.ess_fraction / fresh))  # type: ignore[operator]
    assert scaled.learning_rate == pytest.approx(1e-4 * scaled.ess_lr_scale)


def test_later_steps_stop_once_the_kl_has_passed_its_bound(tiny_random: Path) -> None:
    tables = [group_table(g, rewards=[1.0, 0.0, 0.0, 1.0], version=0) for g in range(3)]

    def weights(bound: float | None) -> tuple[list[StepStats], Tensor]:
        settings = config(
            {"kl_stop": bound, "correction": "tis_token", "ess_lr": False},
            groups_per_step=1,
            steps_per_batch=3,
            learning_rate=0.01,
        )
        trainer = Trainer(settings, tiny_random)
        stats, _ = trainer.train(tables, 0)
        return stats, trainer.model.masters["model.norm.weight"].detach().clone()

    free, moved = weights(None)
    stopped, kept = weights(1e-6)
    assert [step.stopped_by_kl for step in free] == [False] * 3
    assert [step.stopped_by_kl for step in stopped] == [False, True, True]
    assert [step.version for step in stopped] == [1, 2, 3]
    assert [step.learning_rate for step in stopped] == [0.01, 0.0, 0.0]
    first = config({"correction": "tis_token", "ess_lr": False}, groups_per_step=1, learning_rate=0.01)
    alone_ = Trainer(first, tiny_random)
    alone_.train(tables[:1], 0)
    assert torch.equal(kept, alone_.model.masters["model.norm.weight"])
    assert not torch.equal(kept, moved)


def test_behavior_as_the_old_policy_weighs_by_the_ratio_itself(tiny_random: Path) -> None:
    """At the first step pi_theta is pi_prox, so r = pi_theta/mu is the importance weight c: the gradient of c A is
    that of the decoupled loss c A r at r = 1, where no clip acts."""
    tables = [group_table(0, rewards=[1.0, 0.0, 0.0, 1.0], version=0)]
    wide = {"clip_low": 1.0, "clip_high": 1e6, "ess_lr": False}
    decoupled = train(tiny_random, {"correction": "is_token", **wide}, tables)
    bypass = train(tiny_random, {"correction": "none", "old_policy": "behavior", **wide}, tables)
    assert bypass.loss == pytest.approx(decoupled.loss, abs=1e-6)
    assert bypass.grad_norm == pytest.approx(decoupled.grad_norm, abs=1e-5)
    assert bypass.correction_ess_fraction == 1.0


def test_an_entropy_bonus_raises_the_entropy(tiny_random: Path) -> None:
    tables = [group_table(0, rewards=[1.0, 1.0, 1.0, 1.0], version=0)]  # no signal but the bonus

    def entropies(coefficient: float) -> list[float]:
        settings = config({"entropy_coef": coefficient}, groups_per_step=1, learning_rate=1e-3)
        trainer = Trainer(settings, tiny_random)
        found = []
        for version in range(4):
            (stats,), _ = trainer.train(tables, version)
            assert stats.entropy is not None or coefficient == 0
            found.append(stats.entropy or 0.0)
        return found

    rising = entropies(1.0)
    assert rising == sorted(rising) and rising[-1] > rising[0] + 1e-3
    assert entropies(0.0) == [0.0] * 4  # nothing to train


def test_the_kl_in_the_loss_pulls_towards_the_reference(tiny_random: Path) -> None:
    """Without signal, the KL alone moves the policy's log-probabilities to the reference's. (`unbiased` does so only in
    expectation over fresh samples: on given ones it also gains by making them rare.)"""
    tables = [group_table(0, rewards=[1.0, 1.0, 1.0, 1.0], version=0)]
    for estimator in ("k2", "k3", "k3_plus"):
        algorithm = {"kl": "loss", "kl_estimator": estimator, "kl_coef": 1.0, "correction": "none"}
        trainer = Trainer(config(algorithm, groups_per_step=1, learning_rate=1e-3), tiny_random)
        kls = []
        for version in range(6):
            (stats,), _ = trainer.train(tables, version)
            assert stats.kl_reference is not None
            kls.append(stats.kl_reference)
        assert kls[-1] < 0.8 * kls[0], (estimator, kls)


def test_the_minimum_variance_baseline_weighs_by_true_gradient_norms(tiny_random: Path) -> None:
    """Norms against plain autograd on unpacked rows; advantages by the closed form with them."""
    table = group_table(0, rewards=[1.0, 0.0, 0.0, 1.0], version=0)
    settings = config({"preset": "vcpo"}, groups_per_step=1)
    trainer = Trainer(settings, tiny_random)
    model = AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)
    norms, log_weights = [], []
    for row in table.to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logprobs = (model(input_ids=ids).logits[0] / 0.8).log_softmax(-1)
        start = len(row["prompt_ids"])
        own = torch.stack([logprobs[start - 1 + t, x] for t, x in enumerate(row["response_ids"])])
        mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
        model.zero_grad()
        own[mask].sum().backward()
        norms.append(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        behavior = torch.tensor(row["behavior_logprobs"])
        log_weights.append(float((own.detach() - behavior)[mask].sum()))
    _, columns = trainer.train([table], 0)
    squares = [math.exp(2 * w) * n for w, n in zip(log_weights, norms, strict=True)]
    rewards = [1.0, 0.0, 0.0, 1.0]
    baseline = sum(s * r for s, r in zip(squares, rewards, strict=True)) / sum(squares)
    got = [row[0] for row in columns.column("advantages").to_pylist()]
    assert got == pytest.approx([r - baseline for r in rewards], abs=1e-4)
    assert 0.01 < baseline < 0.99 and abs(baseline - 0.5) > 0.01  # not the plain mean


def test_demonstrations_add_their_own_gradient(tiny_random: Path) -> None:
    """Without signal in the rollouts, the step is the supervised step on the next demonstrations, scaled."""
    tables = [group_table(0, rewards=[1.0, 1.0, 1.0, 1.0], version=0)]
    settings = config({"sft_coef": 0.5, "sft_rows": 3}, groups_per_step=1, max_grad_norm=1e9)
    trainer = Trainer(settings, tiny_random, demonstrations=DEMONSTRATIONS)
    plain = Trainer(config({}, groups_per_step=1), tiny_random)
    for version, rows in enumerate(([0, 1, 2], [3, 0, 1])):
        chosen = [DEMONSTRATIONS[row] for row in rows]
        plain.model.zero_grad()
        loss = accumulate(plain.model, chosen, weight=1.0, microbatch_tokens=64)
        norm = plain.model.grad_norm()
        (stats,), _ = trainer.train(tables, version)
        assert stats.sft_loss == pytest.approx(loss, abs=1e-5)
        assert stats.grad_norm == pytest.approx(0.5 * norm, rel=1e-4)
        with torch.no_grad():  # both go on from the same weights
            for name, master in plain.model.masters.items():
                master.copy_(trainer.model.masters[name])


def test_adaptive_beta_follows_the_kl(tiny_random: Path) -> None:
    """With a horizon of 1 beta grows by the clipped error of each step: 1.2 while the KL is far above its target."""
    algorithm = {"preset": "rloo", "kl_target": 1e-3, "kl_horizon": 1, "kl_coef": 0.1}
    tables = [group_table(0, rewards=[1.0, 0.0, 0.0, 1.0], version=0, behavior=-3.0)]
    trainer = Trainer(config(algorithm, groups_per_step=1), tiny_random)
    betas = []
    for version in range(3):
        (stats,), _ = trainer.train(tables, version)
        betas.append(stats.kl_coef)
    assert betas == pytest.approx([0.1, 0.12, 0.144])


def test_a_group_cut_to_nothing_trains_nothing() -> None:
    weights = token_weights(torch.zeros(3, dtype=torch.int64), aggregation="token_mean", budget=8)
    assert weights.tolist() == [0.0, 0.0, 0.0]


def main() -> None:
    folder, address, out, rank = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = join(address, int(rank), 2, DEADLINE_S)
    try:
        results = {choice: result(Path(folder), choice, ranks) for choice in CHOICES}
        if ranks.rank == 0:
            torch.save(results, out)
    finally:
        leave()


if __name__ == "__main__":
    main()
