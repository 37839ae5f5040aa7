"""Preference losses against numbers that a reader can check, and the optimizer steps that are made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.core.errors import DataError
from headway.learner import preference
from headway.learner.offline import (
    OBJECTIVES,
    Objective,
    OfflineSettings,
    OfflineTrainer,
    PairIds,
    StepIds,
    batch_at,
    labelled_ids,
    read_rows,
    write_rows,
)
from headway.learner.preference import Margins, PreferenceStats
from headway.learner.pretrained import model_folder
from headway.learner.sft import Demonstration
from headway.learner.tiny_adder import PHRASES, worked_answer
from headway.learner.trainer import NonFiniteStep

EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for each other more than they compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(*values: list[float]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in values)


def gradients(loss: Tensor, *inputs: Tensor) -> list[list[float]]:
    return [gradient.tolist() for gradient in torch.autograd.grad(loss, inputs)]


# ---- losses by hand --------------------------------------------------------------------------------------


def test_dpo_by_hand() -> None:
    # Log-ratios 2 and -1: h = 3, beta h = 0.3; log(1 + e^-0.3) = 0.554355, sigmoid(-0.3) = 0.425557.
    chosen, rejected, ref_chosen, ref_rejected = tensors([-10.0], [-20.0], [-12.0], [-19.0])
    loss, stats = preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.0)
    assert loss.item() == pytest.approx(0.554355, abs=1e-6)
    (of_chosen,), (of_rejected,) = gradients(loss, chosen, rejected)
    assert (of_chosen, of_rejected) == pytest.approx((-0.0425557, 0.0425557), abs=1e-7)
    assert (stats.margin, stats.chosen_reward, stats.rejected_reward) == pytest.approx((0.3, 0.2, -0.1))
    assert stats.accuracy == 1.0


def test_conservative_dpo_by_hand() -> None:
    # 0.9 * 0.554355 + 0.1 * (0.554355 + 0.3); the slope is -0.1 * (0.425557 - 0.1).
    chosen, rejected, ref_chosen, ref_rejected = tensors([-10.0], [-20.0], [-12.0], [-19.0])
    loss, _ = preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.584355, abs=1e-6)
    assert gradients(loss, chosen)[0] == pytest.approx([-0.0325557], abs=1e-7)


def test_dpo_has_the_weight_of_its_paper() -> None:
    """beta * sigmoid(-margin): the wronger the pair is ranked, the more it weighs."""
    ratios = [-30.0, -3.0, 0.0, 3.0, 30.0]
    chosen, rejected, zero = tensors(ratios, [0.0] * 5, [0.0] * 5)
    loss, stats = preference.dpo(chosen, rejected, zero, zero, beta=0.5, label_smoothing=0.0)
    want = [-0.5 / (1 + math.exp(0.5 * ratio)) / 5 for ratio in ratios]
    assert gradients(loss, chosen)[0] == pytest.approx(want, abs=1e-7)
    assert stats.accuracy == 0.4  # equal rewards rank nothing


def test_what_depends_on_the_prompt_only_cancels() -> None:
    """The normaliser Z(x) of the implicit reward is in both answers."""
    chosen, rejected, ref_chosen, ref_rejected = tensors([-10.0], [-20.0], [-12.0], [-19.0])
    for z in (-4.0, 8.0):
        plain, shifted = (
            preference.dpo(
                chosen + shift, rejected + shift, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0
            )
            for shift in (0.0, z)
        )
        assert shifted.loss.item() == pytest.approx(plain.loss.item(), abs=1e-6)


def test_ipo_by_hand() -> None:
    # Means: 2 / 4 and -1 / 5, h = 0.7; the target is 1 / (2 * 0.5) = 1: 0.3^2, slopes -0.6 / 4 and 0.6 / 5.
    inputs = tensors([-10.0], [-20.0], [-12.0], [-19.0])
    chosen, rejected, *reference = inputs
    tokens = (torch.tensor([4]), torch.tensor([5]))
    loss, stats = preference.ipo(chosen, rejected, reference[0], reference[1], *tokens, beta=0.5)
    assert loss.item() == pytest.approx(0.09, abs=1e-6)
    assert [g[0] for g in gradients(loss, chosen, rejected)] == pytest.approx([-0.15, 0.12], abs=1e-6)
    assert (stats.chosen_reward, stats.rejected_reward) == pytest.approx((0.25, -0.1))


def test_kto_by_hand() -> None:
    # Log-ratios 2 (desirable) and -1 (not), mismatched ones 1 and 0: z = 0.5. Both rows are at 0.5 * 1.5 on their good
    # side: 1 - sigmoid(0.75) = 0.320821, and s (1 - s) = 0.217895. Weights 1 and 2, mean of two rows.
    completion, reference, mismatched, zero = tensors([-10.0, -20.0], [-12.0, -19.0], [1.0, 0.0], [0.0, 0.0])
    loss, stats = preference.kto(
        completion,
        reference,
        torch.tensor([True, False]),
        mismatched,
        zero,
        beta=0.5,
        desirable_weight=1.0,
        undesirable_weight=2.0,
    )
    assert loss.item() == pytest.approx((0.320821 + 2 * 0.320821) / 2, abs=1e-6)
    assert gradients(loss, completion)[0] == pytest.approx(
        [-0.5 * 0.217895 / 2, 2 * 0.5 * 0.217895 / 2], abs=1e-6
    )
    assert torch.autograd.grad(loss, mismatched, allow_unused=True) == (None,)
    assert (stats.kl, stats.accuracy, stats.margin) == pytest.approx((0.5, 1.0, 1.5))


def test_the_baseline_of_kto_is_never_negative() -> None:
    ratio, zero, below = tensors([1.0], [0.0], [-3.0])
    desirable = torch.tensor([True])
    options = {"beta": 1.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    loss, stats = preference.kto(ratio, zero, desirable, below, zero, **options)
    assert stats.kl == 0.0
    assert loss.item() == pytest.approx(1 / (1 + math.e), abs=1e-6)
    assert math.isnan(stats.rejected_reward)


def test_kto_weights_balance_the_classes() -> None:
    assert preference.kto_weights(300, 100) == (1.0, 3.0)
    assert preference.kto_weights(100, 250) == (2.5, 1.0)
    assert preference.kto_weights(0, 5) == (1.0, 1.0)


def test_orpo_by_hand() -> None:
    # Token probabilities 0.8 and 0.5: odds 4 and 1. -log sigmoid(log 4) = log 1.25 = -log 0.8 = 0.223144.
    # Slopes: (-1 - 0.5 * 0.2 / (1 - 0.8)) / 2 tokens, and 0.5 * 0.2 / (1 - 0.5) / 3 tokens.
    chosen, rejected = tensors([2 * math.log(0.8)], [3 * math.log(0.5)])
    loss, stats = preference.orpo(chosen, rejected, torch.tensor([2]), torch.tensor([3]), coef=0.5)
    assert loss.item() == pytest.approx(1.5 * 0.223144, abs=1e-6)
    assert [g[0] for g in gradients(loss, chosen, rejected)] == pytest.approx([-0.75, 0.0666667], abs=1e-6)
    assert stats.margin == pytest.approx(0.5 * math.log(1.6))


@pytest.mark.parametrize("log_p", [-50.0, -5.0, -0.7, -0.69, -1e-2, -1e-4])
def test_log_odds_keep_their_digits(log_p: float) -> None:
    p = math.exp(log_p)
    want = log_p - math.log(-math.expm1(log_p))
    (mean,) = tensors([log_p])
    odds = preference._log_odds(mean)
    assert odds.item() == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert gradients(odds.sum(), mean)[0] == pytest.approx([1 / (1 - p)], rel=1e-3)


def test_simpo_by_hand() -> None:
    # Means -1 and -2, beta 2, gamma 0.5: 1.5; log(1 + e^-1.5) = 0.201413, sigmoid(-1.5) = 0.182426.
    chosen, rejected = tensors([-4.0], [-6.0])
    loss, stats = preference.simpo(
        chosen, rejected, torch.tensor([4]), torch.tensor([3]), beta=2.0, gamma=0.5
    )
    assert loss.item() == pytest.approx(0.201413, abs=1e-6)
    got = [g[0] for g in gradients(loss, chosen, rejected)]
    assert got == pytest.approx([-2 / 4 * 0.182426, 2 / 3 * 0.182426], abs=1e-6)
    assert (stats.chosen_reward, stats.rejected_reward) == pytest.approx((-2.0, -4.0))


def beta_dpo(
    ratios: list[float], before: Margins, *, keep: float = 1.0, momentum: float = 0.9, seed: int = 0
) -> Any:
    chosen, zero = tensors(ratios, [0.0] * len(ratios))
    (loss, stats), after = preference.beta_dpo(
        chosen,
        zero,
        zero.detach(),
        zero.detach(),
        beta=0.1,
        scaling=0.6,
        keep_fraction=keep,
        momentum=momentum,
        before=before,
        generator=torch.Generator().manual_seed(seed),
    )
    return loss, stats, after, gradients(loss, chosen)[0]


def test_beta_dpo_by_hand() -> None:
    # Margins 0.1, 0.2, 0.3, 0.6: mean 0.3, deviation sqrt((0.04 + 0.01 + 0 + 0.09) / 4) = 0.187083.
    # Running: 0.9 * 0.1 + 0.1 * 0.3 = 0.12 and 0.9 * 0.1 + 0.1 * 0.187083 = 0.108708.
    # beta = 0.1 * (1 + 0.6 * (0.3 - 0.12)) = 0.1108.
    ratios = [1.0, 2.0, 3.0, 6.0]
    loss, stats, after, slopes = beta_dpo(ratios, Margins(0.1, 0.1))
    assert (after.mean, after.std) == pytest.approx((0.12, 0.108708), abs=1e-6)
    assert stats.beta == pytest.approx(0.1108, abs=1e-6)
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-0.1108 * h)) for h in ratios) / 4, abs=1e-6)
    assert slopes == pytest.approx([-0.1108 / (1 + math.exp(0.1108 * h)) / 4 for h in ratios], abs=1e-6)
    assert stats.margin == pytest.approx(0.3)  # at the fixed beta


def test_the_first_step_of_beta_dpo_is_dpo() -> None:
    loss, stats, after, slopes = beta_dpo([0.0] * 3, Margins())
    assert (stats.beta, after) == (0.1, Margins(0.0, 0.0))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert slopes == pytest.approx([-0.1 / 2 / 3] * 3)


def test_beta_dpo_leaves_outliers_out_and_never_turns_round() -> None:
    ratios = [0.0, 1.0, -1.0, 0.5, 1e4]
    for seed in range(20):
        _, stats, _, slopes = beta_dpo(ratios, Margins(0.0, 0.1), keep=0.8, momentum=1.0, seed=seed)
        assert slopes[4] == 0.0 and all(slope < 0 for slope in slopes[:4])
        assert stats.kept_fraction == 0.8
    _, stats, _, slopes = beta_dpo([-1e4, -1e4], Margins(1.0, 0.1), momentum=1.0)
    assert stats.beta == 1e-3 and all(slope < 0 for slope in slopes)


def test_beta_dpo_draws_in_proportion_to_a_normal_density() -> None:
    # Margins at 0 and 1 deviations: 1 and e^-0.5, so the first is kept with 1 / (1 + 0.606531) = 0.62246.
    # 2000 draws: deviation 0.011.
    draws = [beta_dpo([0.0, 10.0], Margins(0.0, 1.0), keep=0.5, momentum=1.0, seed=n)[3] for n in range(2000)]
    assert sum(slopes[0] != 0.0 for slopes in draws) / 2000 == pytest.approx(0.62246, abs=0.04)
    assert all((slopes[0] == 0.0) != (slopes[1] == 0.0) for slopes in draws)


SUMS = st.lists(
    st.one_of(st.floats(-1e4, 0.0, width=32), st.sampled_from([0.0, -1e-7, -1e4])), min_size=3, max_size=3
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chosen=SUMS, rejected=SUMS, ref_chosen=SUMS, ref_rejected=SUMS)
def test_every_loss_is_finite_with_its_gradient(
    chosen: list[float], rejected: list[float], ref_chosen: list[float], ref_rejected: list[float]
) -> None:
    one, other, *reference = tensors(chosen, rejected, ref_chosen, ref_rejected)
    fixed = [r.detach() for r in reference]
    tokens = torch.tensor([1, 7, 300])
    losses = [
        preference.dpo(one, other, *fixed, beta=1.0, label_smoothing=0.1).loss,
        preference.ipo(one, other, fixed[0], fixed[1], tokens, tokens, beta=0.1).loss,
        preference.orpo(one, other, tokens, tokens, coef=1.0).loss,
        preference.simpo(one, other, tokens, tokens, beta=2.0, gamma=0.5).loss,
        preference.kto(
            one,
            fixed[0],
            torch.tensor([True, False, True]),
            other,
            fixed[1],
            beta=1.0,
            desirable_weight=1.0,
            undesirable_weight=1.0,
        ).loss
        + 0.0 * other.sum(),
        preference.beta_dpo(
            one,
            other,
            *fixed,
            beta=0.1,
            scaling=0.6,
            keep_fraction=0.8,
            momentum=0.9,
            before=Margins(0.0, 0.0),
            generator=torch.Generator(),
        )[0].loss,
    ]
    for loss in losses:
        assert torch.isfinite(loss)
        assert all(math.isfinite(g) for row in gradients(loss, one, other) for g in row)


def test_a_margin_of_minus_200_costs_200() -> None:
    chosen, zero = tensors([-200.0], [0.0])
    loss, _ = preference.dpo(chosen, zero, zero, zero, beta=1.0, label_smoothing=0.0)
    assert (loss.item(), gradients(loss, chosen)[0]) == (200.0, [-1.0])


# ---- steps ---------------------------------------------------------------------------------------------------


def trainer(objective: Objective, folder: Path, **choice: Any) -> OfflineTrainer:
    options = {"dtype": "float32", "microbatch_tokens": 4096, "learning_rate": 1e-3} | choice
    return OfflineTrainer(OfflineSettings(objective=objective, **options), folder)


def ids(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 80) for _ in range(rng.randint(low, high)))


def rows_for(objective: Objective, num_rows: int = 5, seed: int = 0) -> list[Any]:
    """Answers of very different lengths, and some prompts that are longer than their answers."""
    rng = random.Random(seed)
    prompts = [ids(rng, 2, 12) for _ in range(num_rows)]
    if objective == "sft":
        return [Demonstration(p, [(*ids(rng, 1, 20), EOS)]) for p in prompts]
    if objective == "kto":
        return labelled_ids([(p, (*ids(rng, 1, 20), EOS), n % 3 > 0) for n, p in enumerate(prompts)])
    if objective == "process_reward_model":
        return [
            StepIds(prompt_ids=p, response_ids=ids(rng, 6, 20), step_ends=(2, 5, 6), labels=(True, n > 1, False))
            for n, p in enumerate(prompts)
        ]  # fmt: skip
    return [
        PairIds(
            prompt_ids=p,
            chosen_ids=(*ids(rng, 1, 20), EOS),
            rejected_ids=(*ids(rng, 1, 20), EOS),
            margin=0.25,
        )
        for p in prompts
    ]


def own_logprob(network: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """By the library's forward pass, a row by itself."""
    row = torch.tensor([[*prompt, *answer]])
    logp = network(input_ids=row, use_cache=False).logits[0].log_softmax(dim=-1)
    return logp[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).sum()


def loss_and_gradient(t: OfflineTrainer, rows: list[Any]) -> tuple[float, dict[str, Tensor]]:
    t._zero_grad()
    loss, _, _ = t._backward(rows, t._work(rows))
    masters = t.policy.masters if t.reward is None else t.reward.masters
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in masters.items()}
    t._zero_grad()
    return loss, found


def moved_on(t: OfflineTrainer, rows: list[Any]) -> list[Any]:
    """Rows with a reference that the weights have left: at the start no margin tells a thing."""
    rows = t.with_reference(rows)
    t.step(rows)
    return rows


def test_dpo_is_that_of_the_library_s_own_forward_pass(tiny_random: Path) -> None:
    rows = rows_for("dpo")
    t = trainer("dpo", tiny_random, beta=0.3)
    filled = t.with_reference(rows)
    shifted = [replace(row, reference=(row.reference[0] - 1.0, row.reference[1] + 0.5)) for row in filled]
    loss, found = loss_and_gradient(t, shifted)
    network: Any = AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)
    margins = []
    for row, kept in zip(rows, filled, strict=True):
        chosen, rejected = (own_logprob(network, row.prompt_ids, answer) for answer in row.answers)
        assert kept.reference == pytest.approx((chosen.item(), rejected.item()), abs=1e-3)
        margins.append(chosen - rejected - (kept.reference[0] - 1.0 - kept.reference[1] - 0.5))
    want = -torch.nn.functional.logsigmoid(0.3 * torch.stack(margins)).mean()
    want.backward()
    assert loss == pytest.approx(want.item(), abs=1e-5)
    for name, parameter in network.named_parameters():
        assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_do_not_depend_on_micro_batches(tiny_random: Path, objective: Objective) -> None:
    t = trainer(objective, tiny_random, undesirable_weight=1.5, label_smoothing=0.1, learning_rate=2e-4)
    rows = moved_on(t, rows_for(objective))
    loss, want = loss_and_gradient(t, rows)
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    for budget in (1, 40, 90):
        t.settings = replace(t.settings, microbatch_tokens=budget)
        again, found = loss_and_gradient(t, rows)
        assert again == pytest.approx(loss, abs=1e-5)
        for name in want:
            assert_close(found[name], want[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("objective", "loss"),
    [
        ("dpo", math.log(2)),
        ("beta_dpo", math.log(2)),
        ("ipo", 25.0),  # (0 - 1 / (2 * 0.1))^2
        ("kto", 0.5),
        ("reward_model", math.log1p(math.exp(0.25))),  # scores are 0 at the start, the margin is 0.25
        ("process_reward_model", math.log(2)),
    ],
)
def test_losses_at_the_start(tiny_random: Path, objective: Objective, loss: float) -> None:
    t = trainer(objective, tiny_random)
    rows = t.with_reference(rows_for(objective))
    assert t.evaluate(rows).loss == pytest.approx(loss, abs=1e-4)
    assert t.step(rows).loss == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_few_steps_lower_every_loss(tiny_random: Path, objective: Objective) -> None:
    t = trainer(objective, tiny_random)
    rows = t.with_reference(rows_for(objective))
    before = t.evaluate(rows)
    stats = [t.step(rows) for _ in range(4)][-1]
    after = t.evaluate(rows)
    assert after.loss < before.loss
    assert (stats.version, t.position, stats.num_rows) == (4, 20, 5)
    assert stats.num_tokens == sum(len(answer) for row in rows for answer in row.answers)
    if objective != "sft":
        assert isinstance(after.preference, PreferenceStats) and before.preference is not None
        assert after.preference.margin > before.preference.margin


def sums(count: int, seed: int) -> list[tuple[int, str, int]]:
    rng = random.Random(seed)
    every = [(a, sign, b) for a in range(10, 100) for b in range(10, 100) for sign in "+-"]
    return rng.sample(every, count)


def worked_pairs(tokenizer: Any, tasks: list[tuple[int, str, int]]) -> list[PairIds]:
    """Worked answers that are right, over guesses."""
    rng = random.Random(1)
    rows = []
    for left, sign, right in tasks:
        prompt = tokenizer.encode(f"{PHRASES[0]}{left} {sign} {right} =")
        answers = (worked_answer(left, sign, right, way, rng) for way in ("carefully", "guess"))
        chosen, rejected = (
            (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in answers
        )
        rows.append(PairIds(prompt_ids=tuple(prompt), chosen_ids=chosen, rejected_ids=rejected))
    return rows


def test_the_implicit_reward_ranks_pairs_held_out(tiny_adder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_adder)
    rows = worked_pairs(tokenizer, sums(64, seed=0))
    t = trainer("dpo", tiny_adder, learning_rate=3e-4)
    rows = t.with_reference(rows)
    train, held_out = rows[:32], rows[32:]
    assert t.evaluate(held_out).loss == pytest.approx(math.log(2), abs=1e-3)
    for _ in range(6):
        t.step(batch_at(train, t.position, 8, seed=0))
    found = t.evaluate(held_out).preference
    assert found is not None
    assert found.accuracy >= 0.95
    assert found.margin > 0.1


# ---- rows ----------------------------------------------------------------------------------------------------


def test_mismatched_completions_are_answers_to_other_prompts() -> None:
    rows = labelled_ids([([1], [10], True), ([1], [11], False), ([2], [12], True)])
    assert [row.mismatched_ids for row in rows] == [(12,), (12,), (10,)]
    with pytest.raises(DataError, match="same prompt"):
        labelled_ids([([1], [10], True), ([1], [11], False)])
    (alone,) = labelled_ids([([1], [10], True)], more=[([1], [11], True), ([2], [12], False)])
    assert alone.mismatched_ids == (12,)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(num_rows=st.integers(1, 9), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_epoch_has_each_row_once_wherever_steps_end(num_rows: int, sizes: list[int]) -> None:
    rows = list(range(num_rows))
    taken: list[int] = []
    for size in sizes:
        taken += batch_at(rows, len(taken), size, seed=3)
    assert taken == batch_at(rows, 0, len(taken), seed=3)
    for start in range(0, len(taken) - num_rows + 1, num_rows):
        assert sorted(taken[start : start + num_rows]) == rows


@pytest.mark.parametrize("objective", ["dpo", "kto", "process_reward_model"])
def test_rows_come_back_from_the_disk(tmp_path: Path, tiny_random: Path, objective: Objective) -> None:
    rows = trainer(objective, tiny_random).with_reference(rows_for(objective))
    write_rows(rows, tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == rows


def test_rows_that_do_not_fit_are_refused(tiny_random: Path) -> None:
    t = trainer("dpo", tiny_random)
    with pytest.raises(ValueError, match="needs rows with reference"):
        t.step(rows_for("dpo"))
    with pytest.raises(ValueError, match="learns from PairIds, not from LabelledIds"):
        t.step(t.with_reference(rows_for("kto")))
    t.step(t.with_reference(rows_for("dpo")))
    with pytest.raises(ValueError, match="no reference any more"):
        t.with_reference(rows_for("dpo"))
    with pytest.raises(ValueError, match="needs rows"):
        t.step([])


def test_a_step_that_is_not_finite_changes_nothing(tiny_random: Path) -> None:
    t = trainer("dpo", tiny_random)
    rows = t.with_reference(rows_for("dpo"))
    t.step(rows)
    before = {name: p.detach().clone() for name, p in t.policy.masters.items()}
    broken = [replace(rows[0], reference=(math.nan, 0.0)), *rows[1:]]
    with pytest.raises(NonFiniteStep, match="the loss is not finite at version 1, in rollouts row 5, row 6"):
        t.step(broken)
    assert (t.version, t.position) == (1, 5)
    for name, parameter in t.policy.masters.items():
        assert torch.equal(parameter, before[name])


# ---- on the disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "choice"),
    [
        ("beta_dpo", {}),
        ("dpo", {"lora_rank": 4}),
        ("sft", {"dtype": "bfloat16", "warmup_steps": 3}),
        ("reward_model", {}),
        ("process_reward_model", {"lora_rank": 4, "dtype": "bfloat16"}),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit(
    tmp_path: Path, tiny_random: Path, objective: Objective, choice: dict[str, Any]
) -> None:
    first = trainer(objective, tiny_random, **choice)
    rows = first.with_reference(rows_for(objective))
    first.step(rows[:3])
    first.step(rows[2:])
    first.save(tmp_path)
    want = first.step(rows)
    again = trainer(objective, tiny_random, **choice)
    assert again.with_reference(rows_for(objective)) == rows
    again.load(tmp_path)
    assert (again.version, again.position) == (2, 6)
    assert again.step(rows) == want
    for one, other in zip(first.optimizer.param_groups, again.optimizer.param_groups, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one["params"], other["params"], strict=True))


def test_a_checkpoint_of_another_objective_is_refused(tmp_path: Path, tiny_random: Path) -> None:
    trainer("dpo", tiny_random).save(tmp_path)
    with pytest.raises(DataError, match="of the objective dpo, not ipo"):
        trainer("ipo", tiny_random).load(tmp_path)


@pytest.mark.parametrize("choice", [{}, {"lora_rank": 4}])
def test_an_export_is_a_model_folder(tmp_path: Path, tiny_random: Path, choice: dict[str, Any]) -> None:
    t = trainer("orpo", tiny_random, **choice)
    rows = rows_for("orpo")
    for _ in range(3):
        t.step(rows)
    t.export(tmp_path / "trained")
    folder = model_folder(str(tmp_path / "trained"))
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == EOS
    with torch.no_grad():
        own = [own_logprob(network, row.prompt_ids, row.chosen_ids) / len(row.chosen_ids) for row in rows]
    found = t.evaluate(rows).preference
    assert found is not None
    assert found.chosen_reward == pytest.approx(0.1 * float(torch.stack(own).mean()), abs=1e-5)
    # The next stage begins there.
    reference = trainer("dpo", folder).with_reference(rows_for("dpo"))
    assert isinstance(reference[0], PairIds) and reference[0].reference is not None
