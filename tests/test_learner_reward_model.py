"""Reward models: where a score is read, that nothing else changes it, what they learn, and what lies on the disk. This
file is also what two ranks run."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headway.core.errors import DataError
from headway.learner.batching import Group
from headway.learner.offline import (
    Objective,
    OfflineSettings,
    OfflineStats,
    OfflineTrainer,
    PairIds,
    StepIds,
    batch_at,
    labelled_ids,
)
from headway.learner.pretrained import fingerprint, model_folder
from headway.learner.reward_model import (
    ABOUT_FILE,
    HEAD_FILE,
    RewardModel,
    bradley_terry,
    calibration_of,
    fillers,
    long_empty_beats_right,
    process_loss,
)
from headway.learner.sharding import Ranks, alone, free_address, join, leave, whole
from headway.learner.tiny_adder import PHRASES, worked_answer

EOS = 2  # also the padding of other systems; here nothing is padded
DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for each other more than they compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROMPT = [7, 9, 12]
RESPONSES = [
    [5, 30, 31, EOS, 8, EOS],  # a turn ends inside it
    [5, 30, 31, EOS, 8],  # cut off
    [EOS],  # says nothing
    [8],
    [8, 6, 30, 40, 41, 42, 43, 44, EOS],
]


def group_of(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Group:
    num_responses, num_tokens = len(responses), sum(map(len, responses))
    return Group(
        rollout_ids=tuple(map(str, range(num_responses))),
        prompts=(np.array(prompt),),
        prompt_index=np.zeros(num_responses, dtype=np.int64),
        lengths=np.array([len(response) for response in responses]),
        response_ids=np.array([token for response in responses for token in response], dtype=np.int64),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int64),
        rewards=np.zeros(num_responses, dtype=np.float32),
        scored=np.ones(num_responses, dtype=np.bool_),
        truncated=np.zeros(num_responses, dtype=np.bool_),
    )


def random_head(model: RewardModel) -> RewardModel:
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.constant_(model.head.bias, 0.25)
    return model


@pytest.fixture(scope="module")
def model(tiny_random: Path) -> RewardModel:
    return random_head(RewardModel(tiny_random, dtype="float32", kind="outcome"))


@pytest.fixture(scope="module")
def network(tiny_random: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)


@torch.no_grad()
def own_scores(network: Any, model: RewardModel, rows: Sequence[Sequence[int]], pad: str) -> list[float]:
    """By the library's own forward pass over one padded batch, at each row's last token."""
    longest = max(map(len, rows))
    padded, attention, places = [], [], []
    for row in rows:
        filler, real = [EOS] * (longest - len(row)), [1] * len(row)
        padded.append([*filler, *row] if pad == "left" else [*row, *filler])
        attention.append([0] * len(filler) + real if pad == "left" else real + [0] * len(filler))
        places.append(longest - 1 if pad == "left" else len(row) - 1)
    mask = torch.tensor(attention)
    states = network(
        input_ids=torch.tensor(padded),
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        output_hidden_states=True,
    ).hidden_states[-1]
    last = states[torch.arange(len(rows)), torch.tensor(places)]
    return (last @ model.head.weight[0] + model.head.bias).tolist()


# ---- where a score is read -----------------------------------------------------------------------------------


def test_scores_start_at_exactly_zero(tiny_random: Path) -> None:
    fresh = RewardModel(tiny_random, dtype="bfloat16", kind="outcome")
    scores = fresh.scores([group_of(PROMPT, RESPONSES)], microbatch_tokens=4096)
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0] * 5


@pytest.mark.parametrize("pad", ["left", "right"])
def test_a_score_is_that_of_the_last_token_under_any_padding(
    model: RewardModel, network: Any, pad: str
) -> None:
    """Padding with end-of-sequence tokens, as other systems do: the last index of [0, 0, 1, 1, 1] is 4 and that of
    [1, 1, 1, 0, 0] is 2, though both have three tokens."""
    rows = [[*PROMPT, *response] for response in RESPONSES]
    scores = model.scores([group_of(PROMPT, RESPONSES)], microbatch_tokens=4096)
    assert scores.tolist() == pytest.approx(own_scores(network, model, rows, pad), abs=1e-4)
    singly = [own_scores(network, model, [row], pad)[0] for row in rows]
    assert scores.tolist() == pytest.approx(singly, abs=1e-4)
    assert min(abs(a - b) for i, a in enumerate(scores) for b in scores[:i]) > 1e-2  # all differ


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    budget=st.integers(1, 120),
    order=st.permutations(range(5)),
    cut=st.integers(1, 4),
    companions=st.lists(st.integers(1, 30), max_size=4),
)
def test_batch_size_order_and_packing_do_not_change_scores(
    model: RewardModel, budget: int, order: list[int], cut: int, companions: list[int]
) -> None:
    want = model.scores([group_of(PROMPT, RESPONSES)], microbatch_tokens=4096)
    mixed = [RESPONSES[i] for i in order]
    groups = [group_of(PROMPT, mixed[:cut]), group_of(PROMPT, mixed[cut:])]
    if companions:
        groups.insert(1, group_of([70, 71], [[50] * n for n in companions]))
    got = model.scores(groups, microbatch_tokens=budget)
    own = np.concatenate([got[:cut], got[cut + len(companions) :]])
    np.testing.assert_allclose(own, want[order], atol=1e-4)


def test_a_step_s_score_is_the_score_of_what_stands_up_to_there(
    model: RewardModel, tiny_random: Path
) -> None:
    """So nothing that comes later can matter, and an end-of-sequence token is read when it is there."""
    process = random_head(RewardModel(tiny_random, dtype="float32", kind="process"))
    long = RESPONSES[4]
    ends = [np.array([1, 4, 9]), np.array([6])]
    first, second = process.step_scores(
        [group_of(PROMPT, [long]), group_of(PROMPT, [RESPONSES[0]])], ends, microbatch_tokens=64
    )
    cut = model.scores([group_of(PROMPT, [long[:1], long[:4], long, RESPONSES[0]])], microbatch_tokens=64)
    np.testing.assert_allclose([*first, *second], cut, atol=1e-4)


def test_an_end_behind_a_response_moves_only_its_own_score(model: RewardModel) -> None:
    cut_off = [8, 6, 30]
    before = model.scores([group_of(PROMPT, [cut_off, RESPONSES[0]])], microbatch_tokens=64)
    after = model.scores([group_of(PROMPT, [[*cut_off, EOS], RESPONSES[0]])], microbatch_tokens=64)
    assert abs(after[0] - before[0]) > 1e-2
    assert after[1] == pytest.approx(before[1], abs=1e-4)


def test_bfloat16_scores_are_near(model: RewardModel, tiny_random: Path) -> None:
    rounded = random_head(RewardModel(tiny_random, dtype="bfloat16", kind="outcome"))
    groups = [group_of(PROMPT, RESPONSES)]
    got, want = (m.scores(groups, microbatch_tokens=4096) for m in (rounded, model))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())


def test_a_response_without_tokens_is_refused(model: RewardModel) -> None:
    with pytest.raises(ValueError, match="response 1 has no tokens"):
        model.scores([group_of(PROMPT, [[5], []])], microbatch_tokens=64)
    with pytest.raises(ValueError, match=r"steps end after \[2\] tokens of a response of 1"):
        model.step_scores([group_of(PROMPT, [[5]])], [np.array([2])], microbatch_tokens=64)
    assert model.scores([], microbatch_tokens=64).shape == (0,)


# ---- losses by hand ------------------------------------------------------------------------------------------


def pair_loss(chosen: float, rejected: float, margin: float, centring: float) -> tuple[float, float, float]:
    """Loss, and its slopes."""
    one, other = (torch.tensor([x], requires_grad=True) for x in (chosen, rejected))
    loss = bradley_terry(one, other, torch.tensor([margin]), centring=centring).loss
    slopes = torch.autograd.grad(loss, (one, other))
    return loss.item(), slopes[0].item(), slopes[1].item()


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "centring", "want"),
    [
        (0.0, 0.0, 0.0, 0.0, (0.693147, -0.5, 0.5)),
        # 1 - 0 - 0.5: log(1 + e^-0.5) = 0.474077, sigmoid(-0.5) = 0.377541.
        (1.0, 0.0, 0.5, 0.0, (0.474077, -0.377541, 0.377541)),
        # and 0.01 * 1^2 with slope 0.02 on both.
        (1.0, 0.0, 0.5, 0.01, (0.484077, -0.357541, 0.397541)),
        (-100.0, 100.0, 0.0, 0.0, (200.0, -1.0, 1.0)),
        (1e4, -1e4, 0.0, 0.0, (0.0, 0.0, 0.0)),
        (-5e3, 5e3, 0.0, 0.0, (1e4, -1.0, 1.0)),
    ],
)
def test_bradley_terry_by_hand(
    chosen: float, rejected: float, margin: float, centring: float, want: tuple[float, float, float]
) -> None:
    assert pair_loss(chosen, rejected, margin, centring) == pytest.approx(want, abs=1e-6)


def test_accuracy_counts_the_order_and_not_the_margin() -> None:
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    stats = bradley_terry(chosen, rejected, torch.full((3,), 5.0), centring=0.0).stats
    assert (stats.accuracy, stats.margin) == pytest.approx((1 / 3, -2 / 3))


def test_process_loss_by_hand() -> None:
    # log 2 and log(1 + 3); slopes (0.5 - 1) / 2 and 0.75 / 2.
    logits = torch.tensor([0.0, math.log(3)], requires_grad=True)
    loss, stats = process_loss(logits, torch.tensor([True, False]))
    assert loss.item() == pytest.approx((0.693147 + 1.386294) / 2, abs=1e-6)
    (slopes,) = torch.autograd.grad(loss, logits)
    assert slopes.tolist() == pytest.approx([-0.25, 0.375])
    assert (stats.margin, stats.accuracy) == pytest.approx((-math.log(3), 0.0))


def test_calibration_by_hand() -> None:
    found = calibration_of(np.array([1.0, 3.0, 5.0, 7.0], dtype=np.float32))
    assert (found.mean, found.std, found.num_responses) == (4.0, pytest.approx(math.sqrt(5)), 4)
    assert found.apply(np.array([4.0, 4.0 + 2 * math.sqrt(5)])).tolist() == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("scores", [[], [0.5, 0.5], [1.0, math.nan]])
def test_scores_that_rank_nothing_are_no_scale(scores: list[float]) -> None:
    with pytest.raises(DataError, match="rank nothing; train it longer"):
        calibration_of(np.array(scores, dtype=np.float32))


def test_share_of_fillers_that_win() -> None:
    right = np.array([1.0, 1.0, 1.0, 1.0])
    # Below, equal, above, and not a number: a model that scores all alike must not pass.
    assert long_empty_beats_right(right, np.array([0.0, 1.0, 2.0, math.nan])) == 0.75
    assert long_empty_beats_right(right, right - 1) == 0.0
    with pytest.raises(ValueError, match="one right and one filler score"):
        long_empty_beats_right(right, right[:3])


def test_fillers() -> None:
    assert fillers([7, 8, 9], EOS, num_tokens=5) == ((EOS,), (7, 8, 9, 7, 8, EOS), (9, 9, 9, 9, 9, EOS))


# ---- what it learns ------------------------------------------------------------------------------------------


Sum = tuple[int, str, int]


def sums(count: int) -> list[Sum]:
    every = [(a, sign, b) for a in range(10, 100) for b in range(10, 100) for sign in "+-"]
    return random.Random(0).sample(every, count)


def right_and_wrong(tokenizer: Any, tasks: Sequence[Sum]) -> list[PairIds]:
    """The three ways in which the small model answers: one right, the others where they are wrong. Beside each a
    filler, which is wrong too."""
    rng = random.Random(1)

    def tokens(text: str) -> tuple[int, ...]:
        return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)

    rows = []
    for number, (left, sign, right) in enumerate(tasks):
        answer = str(left + right if sign == "+" else left - right)
        prompt = tuple(tokenizer.encode(f"{PHRASES[0]}{left} {sign} {right} ="))
        others = [worked_answer(left, sign, right, way, rng) for way in ("quickly", "guess")]
        wrong = [tokens(text) for text in others if text.rsplit("\n", 1)[1] != answer]
        wrong.append(fillers(prompt, tokenizer.eos_token_id, num_tokens=40)[number % 3])
        rows += [
            PairIds(
                prompt_ids=prompt,
                chosen_ids=tokens(worked_answer(left, sign, right, "carefully", rng)),
                rejected_ids=ids,
            )
            for ids in wrong
        ]
    return rows


@pytest.fixture(scope="module")
def trained(
    tiny_adder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OfflineTrainer, list[PairIds], Path]:
    """A reward model, pairs of prompts that it never saw, and where it was saved."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_adder)
    tasks = sums(250)
    held_out, train = (right_and_wrong(tokenizer, part) for part in (tasks[:50], tasks[50:]))
    t = trainer("reward_model", tiny_adder, warmup_steps=10, microbatch_tokens=8192)
    for _ in range(20):
        t.step(batch_at(train, t.position, 12, seed=0))
    t.calibrate(held_out)
    assert t.reward is not None
    t.reward.filler_share = 0.125
    folder = tmp_path_factory.mktemp("reward") / "model"
    t.export(folder)
    return t, held_out, folder


def trainer(objective: Objective, folder: Path, ranks: Ranks = alone, **choice: Any) -> OfflineTrainer:
    options = {"dtype": "float32", "microbatch_tokens": 4096, "learning_rate": 1e-3} | choice
    return OfflineTrainer(OfflineSettings(objective=objective, **options), folder, ranks)


def test_it_tells_right_from_wrong_on_prompts_it_never_saw(trained: Any) -> None:
    t, held_out, _ = trained
    found = t.evaluate(held_out).preference
    assert found.accuracy >= 0.9
    assert found.margin > 1.0


def test_long_empty_answers_do_not_outscore_right_ones(trained: Any) -> None:
    t, held_out, _ = trained
    right = {row.prompt_ids: row.chosen_ids for row in held_out}
    groups = [group_of(prompt, [ids, *fillers(prompt, EOS, num_tokens=60)]) for prompt, ids in right.items()]
    scores = t.reward.scores(groups, microbatch_tokens=8192).reshape(-1, 4)
    for filler in range(1, 4):
        assert long_empty_beats_right(scores[:, 0], scores[:, filler]) <= 0.05


def test_it_scores_from_its_folder_alone(trained: Any, tiny_adder: Path) -> None:
    t, held_out, folder = trained
    loaded = RewardModel.load(folder, dtype="float32", kind="outcome")
    groups = [group_of(row.prompt_ids, row.answers) for row in held_out]
    scores = loaded.scores(groups, microbatch_tokens=500)
    np.testing.assert_allclose(scores, t.reward.scores(groups, microbatch_tokens=8192), atol=1e-4)
    assert loaded.masters == {}
    assert loaded.filler_share == 0.125
    assert loaded.calibration is not None and loaded.calibration == t.reward.calibration
    normal = loaded.calibration.apply(scores)
    assert (normal.mean(), normal.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
    about = json.loads((folder / ABOUT_FILE).read_text())
    assert (about["base_model"], about["base_digest"]) == (str(tiny_adder), fingerprint(tiny_adder))
    assert model_folder(str(folder)) == folder  # and it is a causal language model still


def test_training_goes_on_from_a_saved_one(trained: Any) -> None:
    t, held_out, folder = trained
    again = trainer("reward_model", folder)
    assert again.evaluate(held_out).loss == pytest.approx(t.evaluate(held_out).loss, abs=1e-4)
    assert again.reward is not None and again.reward.base_digest == t.reward.base_digest


def test_what_is_no_reward_model_is_told(trained: Any, tiny_adder: Path, tmp_path: Path) -> None:
    _, _, folder = trained
    with pytest.raises(DataError, match=r"holds no reward_model\.json, so it is no reward model"):
        RewardModel.load(tiny_adder, dtype="float32", kind="outcome")
    with pytest.raises(DataError, match="of kind outcome, not process"):
        RewardModel.load(folder, dtype="float32", kind="process")
    for name, words in ((HEAD_FILE, "are not those that"), (ABOUT_FILE, "no complete reward model")):
        broken = tmp_path / name
        shutil.copytree(folder, broken)
        data = bytearray((broken / name).read_bytes())
        data[-1] ^= 1
        (broken / name).write_bytes(data)
        with pytest.raises(DataError, match=words):
            RewardModel.load(broken, dtype="float32", kind="outcome")


def test_an_output_layer_of_its_own_is_left_alone(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    network = LlamaForCausalLM(LlamaConfig(vocab_size=90, tie_word_embeddings=False, **sizes))
    network.save_pretrained(tmp_path)
    t = trainer("reward_model", tmp_path, weight_decay=0.5)
    assert t.reward is not None
    before = t.policy.masters["lm_head.weight"].detach().clone()
    t.step([PairIds(prompt_ids=(5,), chosen_ids=(6, EOS), rejected_ids=(7, EOS))])
    t.step([PairIds(prompt_ids=(5,), chosen_ids=(6, EOS), rejected_ids=(7, EOS))])
    assert torch.equal(t.policy.masters["lm_head.weight"], before)
    assert "lm_head.weight" not in t.reward.masters


def test_a_process_model_learns_which_steps_are_right(tiny_random: Path) -> None:
    """A step is right when it begins with token 10; what stands in it otherwise is noise."""
    rng = random.Random(0)
    rows = []
    for _ in range(48):
        labels = tuple(rng.random() < 0.5 for _ in range(3))
        steps = [[10 if label else 11, rng.randrange(20, 80), 5] for label in labels]
        rows.append(
            StepIds(
                prompt_ids=(rng.randrange(20, 80), 6),
                response_ids=tuple(token for step in steps for token in step),
                step_ends=(3, 6, 9),
                labels=labels,
            )
        )
    t = trainer("process_reward_model", tiny_random)
    for _ in range(15):
        t.step(batch_at(rows[:32], t.position, 16, seed=0))
    found = t.evaluate(rows[32:]).preference
    assert found is not None and found.accuracy >= 0.9


def test_calibration_is_for_reward_models(tiny_random: Path) -> None:
    with pytest.raises(ValueError, match="sft trains no reward model"):
        trainer("sft", tiny_random).calibrate([])


# ---- several ranks -------------------------------------------------------------------------------------------


RANK_CASES: tuple[tuple[Objective, int], ...] = (
    ("reward_model", 40),
    ("process_reward_model", 4096),
    ("dpo", 4096),
    ("kto", 40),
)
"""With the tokens of a micro-batch: 40 is several of them on each rank."""


def rank_rows(objective: Objective) -> list[Any]:
    rng = random.Random(0)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(4, 80) for _ in range(rng.randint(low, high)))

    if objective == "process_reward_model":  # one row: there is nothing for a second rank
        return [StepIds(prompt_ids=ids(3, 5), response_ids=ids(8, 8), step_ends=(3, 8), labels=(True, False))]
    prompts = [ids(2, 6) for _ in range(4)]
    if objective == "kto":
        return labelled_ids([(prompt, ids(2, 20), n % 2 == 0) for n, prompt in enumerate(prompts)])
    return [PairIds(prompt_ids=p, chosen_ids=ids(2, 20), rejected_ids=ids(2, 20)) for p in prompts]


def weights(t: OfflineTrainer) -> dict[str, torch.Tensor]:
    masters = t.policy.masters if t.reward is None else t.reward.masters
    return {name: whole(p.detach()).clone() for name, p in masters.items()}


def run(ranks: Ranks, folder: Path, out: Path) -> dict[str, Any]:
    """Everything that must not depend on the number of ranks."""
    found: dict[str, Any] = {}
    for objective, budget in RANK_CASES:
        t = trainer(objective, folder, ranks, microbatch_tokens=budget, max_grad_norm=0.5)
        rows = t.with_reference(rank_rows(objective))
        stats: list[OfflineStats] = [t.step(rows), t.step(rows), t.evaluate(rows)]
        found[objective] = {"stats": stats, "weights": weights(t)}
        if objective == "reward_model":
            t.export(out / "exported")
            saved = out / "checkpoint"
            if ranks.rank == 0:
                saved.mkdir()
            ranks.barrier()
            t.save(saved)
            ranks.barrier()
            t.step(rows)
            found["went_on"] = weights(t)
            again = trainer(objective, folder, ranks, microbatch_tokens=budget, max_grad_norm=0.5)
            again.load(saved)
            again.step(rows)
            found["resumed"] = weights(again)
    return found


def main(rank: int, address: str, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join(address, rank, 2, DEADLINE_S)
    if rank == 0:
        (out / "two").mkdir()
    ranks.barrier()
    found = run(ranks, folder, out / "two")
    if rank == 0:
        torch.save(found, out / "two.pt")
    leave()


@pytest.fixture(scope="module")
def runs(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What one rank found, and two."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "one").mkdir()
    one = run(alone, tiny_random, out / "one")
    address = free_address()
    # Without the repository on the path: a bare `learner` must not be importable in the workers either.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    logs = [out / f"rank{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, str(rank), address, str(tiny_random), str(out)]
        with log.open("w") as file:
            workers.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
    try:
        codes = [worker.wait(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return {1: one, 2: torch.load(out / "two.pt", weights_only=False), 0: out}


@pytest.mark.parametrize("objective", [objective for objective, _ in RANK_CASES])
def test_two_ranks_do_what_one_does(runs: dict[int, Any], objective: Objective) -> None:
    one, two = (runs[size][objective] for size in (1, 2))
    for first, second in zip(one["stats"], two["stats"], strict=True):
        assert second.loss == pytest.approx(first.loss, abs=1e-5)
        assert second.num_tokens == first.num_tokens
        if first.grad_norm is not None:
            assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
    # Adam's first steps have the size of the learning rate, 1e-3, wherever the gradient is not zero.
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        assert float((two["weights"][name] - weight).abs().mean()) < 1e-5, name


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_goes_on_bit_for_bit(runs: dict[int, Any], size: int) -> None:
    went_on, resumed = runs[size]["went_on"], runs[size]["resumed"]
    assert all(torch.equal(resumed[name], weight) for name, weight in went_on.items())
    assert not torch.equal(
        went_on["reward_head.weight"], runs[size]["reward_model"]["weights"]["reward_head.weight"]
    )


def test_an_export_of_two_ranks_scores_like_that_of_one(runs: dict[int, Any]) -> None:
    groups = [group_of(PROMPT, RESPONSES)]
    one, two = (
        RewardModel.load(runs[0] / name / "exported", dtype="float32", kind="outcome")
        for name in ("one", "two")
    )
    want = one.scores(groups, microbatch_tokens=64)
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(two.scores(groups, microbatch_tokens=64), want, atol=1e-3)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
