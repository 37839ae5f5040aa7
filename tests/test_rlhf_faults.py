"""What goes wrong in RLHF systems, where it would go wrong in this one: tables that go from actor to actor, and rows from
files to optimizer steps."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.actors.extra_rollouts import branch_mark, greedy_mark
from headway.actors.offline import HELD_OUT, TRAIN, settings_of
from headway.actors.reference import ReferenceActor
from headway.actors.reward_model import RewardModelActor
from headway.actors.verifier import VerifierWorker
from headway.cluster.offline import prepare_rows
from headway.cluster.preflight import preflight
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import DataError
from headway.core.prompts import Prompt
from headway.core.sections import Verifiers
from headway.learner.batching import unpack
from headway.learner.offline import (
    LabelledIds,
    Objective,
    OfflineSettings,
    OfflineTrainer,
    PairIds,
    StepIds,
    batch_at,
    read_rows,
)
from headway.learner.reward_model import Calibration, Kind, RewardModel, read_about
from headway.learner.rewards import RewardState
from headway.learner.step import StepBatch, prepare, prepare_batch
from headway.learner.tiny_adder import PHRASES
from headway.learner.trainer import Trainer
from headway.verifiers.pending import with_pending

EOS = 2  # other systems pad with it; here nothing is padded
POISON = 77
"""A token whose embedding one test makes no number."""
SCORED = Prompt(prompt_id="p", content="1 + 2 =", gold="3", verifier="reward_model")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for each other more than they compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(number: int, response: list[int], **other: Any) -> dict[str, Any]:
    """Of group 0; every token sampled at version 0 unless `other` says otherwise."""
    return {
        "rollout_id": f"0/{number}",
        "group_id": 0,
        "prompt_id": "p",
        "sample_index": number,
        "agent_id": "policy",
        "prompt_ids": [7, 9, 12],
        "response_ids": response,
        "loss_mask": [1] * len(response),
        "behavior_logprobs": [-1.0] * len(response),
        "version_spans": [{"start": 0, "end": len(response), "version": 0}],
        "finish_reason": "stop",
        "truncated": False,
        "text": "",
        **other,
    }


def unscored(number: int, response: list[int], **other: Any) -> dict[str, Any]:
    """As the verifier stage leaves what the reward model alone is to score."""
    extra = with_pending(other.pop("extra", None), [None])
    return row(number, response, verdict_reason="pending", extra=extra, **other)


def column(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist()


# ---- values: tool tokens ---------------------------------------------------------------------------------------


def step_of(algorithm: dict[str, Any], *rows: dict[str, Any]) -> StepBatch:
    """What the learner makes of one group's table."""
    config = parse_config({"algorithm": algorithm, "learner": {"groups_per_step": 1}, "run": {"steps": 1}})
    table = rollouts.build(rows)
    (step,) = prepare_batch([table], config, RewardState.start(config.algorithm), version=0)
    return step


TOOL_CALL = [1, 1, 0, 0, 1]
ENDS_IN_TOOL = [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("algorithm", "mask", "want"),
    [
        # 0.7; 0.3 - 0.2 + 0.9 * 0.7 = 0.73; 0.2 - 0.1 + 0.9 * 0.73 = 0.757: the values of 9 are passed over.
        ({"preset": "a2c", "gae_lambda": 0.9}, TOOL_CALL, [0.757, 0.73, 0, 0, 0.7]),
        # The reward is earned by the last token that was sampled: 1 - 0.2 and 0.2 - 0.1 + 0.9 * 0.8.
        ({"preset": "a2c", "gae_lambda": 0.9}, ENDS_IN_TOOL, [0.82, 0.8, 0, 0]),
        # Discounted by sampled tokens, and not started anew behind the tool's.
        ({"preset": "reinforce", "advantage": "reinforce", "gamma": 0.9}, TOOL_CALL, [0.81, 0.9, 0, 0, 1]),
        ({"preset": "reinforce", "advantage": "reinforce", "gamma": 0.9}, ENDS_IN_TOOL, [0.9, 1, 0, 0]),
        # Rewards to go 3, 2 and 1 of the KL penalty -1 each, plus 1: -2, -1, 0; the reference of tools is not looked at.
        (
            {
                "preset": "reinforce",
                "advantage": "reinforce",
                "kl": "reward",
                "kl_estimator": "k1",
                "kl_coef": 1,
            },
            TOOL_CALL,
            [-2, -1, 0, 0, 0],
        ),
    ],
)
def test_tool_tokens_neither_earn_nor_interrupt(
    algorithm: dict[str, Any], mask: list[int], want: list[float]
) -> None:
    size = len(mask)
    sampled = row(
        0,
        [5, 6, 30, 31, 8][:size],
        loss_mask=mask,
        reward=1.0,
        behavior_logprobs=[-1.0 if flag else math.nan for flag in mask],
        reference_logprobs=[-2.0 if flag else math.nan for flag in mask],
        values=[0.1, 0.2, 9.0, 9.0, 0.3][:size],
    )
    step = step_of(algorithm, sampled)
    assert step.advantages_N.tolist() == pytest.approx(want, abs=1e-6)
    assert step.in_loss_N.tolist() == [bool(flag) for flag in mask]


# ---- log-probabilities and entropy --------------------------------------------------------------------------------


def plain_entropies(network: Any, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of the distribution that each sampled token was drawn from."""
    found = []
    for each in rows:
        log_p = network(torch.tensor([each["prompt_ids"] + each["response_ids"]])).logits[0].log_softmax(-1)
        predicting = log_p[len(each["prompt_ids"]) - 1 : -1]
        entropies = -(predicting.exp() * predicting).sum(-1)
        found += [float(h) for h, flag in zip(entropies, each["loss_mask"], strict=True) if flag]
    return found


@pytest.mark.parametrize("budget", [16, 4096])
@torch.no_grad()
def test_entropy_is_of_sampled_tokens_whatever_they_are_packed_with(tiny_random: Path, budget: int) -> None:
    """Responses of 1 to 9 tokens, which other systems pad: a mean that padding took part in would be another."""
    rows = [
        row(0, [5], reward=1.0),
        row(1, [5, 6, 30, 31, 8, 40, 41, 42, EOS], loss_mask=[1, 1, 0, 0, 1, 1, 1, 1, 1], reward=0.0),
        row(2, [8, EOS, 8], reward=0.0),
    ]
    algorithm = {"preset": "dr_grpo", "correction": "none"}
    config = parse_config(
        {
            "model": {"dtype": "float32"},
            "run": {"steps": 1},
            "lag": {"max_version_lag": 0},
            "algorithm": algorithm,
            "learner": {"groups_per_step": 1, "microbatch_tokens": budget, "threads": 1},
        }
    )
    with torch.enable_grad():
        (stats,), _ = Trainer(config, tiny_random).train([rollouts.build(rows)], 0)
    network = AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32)
    want = plain_entropies(network, rows)
    assert len(want) == stats.num_tokens == 11
    assert stats.entropy == pytest.approx(sum(want) / 11, abs=1e-4)
    assert all(entropy > 0 for entropy in want)


def test_in_bfloat16_the_first_step_has_ratio_1_and_no_kl(tiny_random: Path) -> None:
    """The reference, which is the policy still, also stands in for the engine here. A softmax in bfloat16 on one side would
    show: one part in 256 for each token."""
    config = parse_config(
        {
            "model": {"dtype": "bfloat16"},
            "run": {"steps": 1},
            "algorithm": {"preset": "reinforce_pp"},
            "learner": {"groups_per_step": 1, "threads": 1},
            "reference": {"threads": 1},
        }
    )
    table = rollouts.build([row(0, [5, 6, 30, 31, 8, EOS], reward=1.0), row(1, [8, EOS], reward=0.0)])
    scored = ReferenceActor(config, str(tiny_random)).score(table)
    logprobs = column(scored, "reference_logprobs")
    assert all(logprob <= 0 for each in logprobs for logprob in each)
    assert any(abs(float(torch.tensor(p).bfloat16()) - p) > 1e-4 for each in logprobs for p in each)
    scored = rollouts.replace_column(scored, "behavior_logprobs", logprobs)
    (stats,), _ = Trainer(config, tiny_random).train([scored], 0)
    assert np.abs(stats.importance_weights - 1).max() < 1e-5
    assert (stats.clipped_fraction, stats.rejected_responses) == (0.0, {})
    assert stats.kl_reference is not None and abs(stats.kl_reference) < 1e-9


# ---- the reward model in a run ----------------------------------------------------------------------------------------

MEAN, STD = 0.5, 2.0
RESPONSES = [
    [5, 30, 31, EOS, 8, EOS],  # a turn ends inside it
    [5, 30, 31, EOS, 8],  # cut off
    [EOS],  # says nothing
    [8, 6, 30, 40, 41, 42, 43, 44, EOS],
]


def saved(base: Path, folder: Path, kind: Kind, *, calibrated: bool = True) -> Path:
    """A reward model with a random head."""
    model = RewardModel(base, dtype="float32", kind=kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator))
        model.head.bias.fill_(0.25)
    if calibrated:
        model.calibration = Calibration(mean=MEAN, std=STD, num_responses=8)
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def outcome(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_random, tmp_path_factory.mktemp("outcome") / "model", "outcome")


@pytest.fixture(scope="module")
def process(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_random, tmp_path_factory.mktemp("process") / "model", "process")


def actor(folder: Path, microbatch_tokens: int = 8192) -> RewardModelActor:
    settings = {"path": str(folder), "threads": 1, "microbatch_tokens": microbatch_tokens}
    return RewardModelActor(parse_config({"model": {"dtype": "float32"}, "reward_model": settings}))


@torch.no_grad()
def plain_score(folder: Path, ids: list[int]) -> float:
    """Raw, at the last token, by the library's own forward pass over this row alone."""
    from safetensors.torch import load_file

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = load_file(folder / "head.safetensors")
    state = network(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    return float(state @ head["weight"][0] + head["bias"][0])


@pytest.mark.parametrize("budget", [16, 8192])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 1]])
def test_a_reward_is_the_calibrated_score_of_the_last_token(
    outcome: Path, budget: int, order: list[int]
) -> None:
    """Whatever the response is scored with, and wherever ends of sequence stand in it."""
    table = rollouts.build([unscored(number, RESPONSES[number]) for number in order])
    scored = actor(outcome, budget).score(table, SCORED)
    want = [(plain_score(outcome, [7, 9, 12, *RESPONSES[n]]) - MEAN) / STD for n in order]
    assert column(scored, "reward") == pytest.approx(want, abs=1e-4)
    assert len({round(reward, 2) for reward in want}) == len(want)
    assert column(scored, "verdict_reason") == ["scored"] * len(order)
    assert column(scored, "extra") == [None] * len(order)
    for name in set(table.column_names) - {"reward", "reward_parts", "verdict_reason", "extra", "timing"}:
        assert scored[name].equals(table[name]), name


def test_a_composite_is_completed_by_the_reward_model(outcome: Path) -> None:
    """(3 * score + 1 * right) / 4, the second part known from the verifiers."""
    parts = {
        "score": {"verifier": "reward_model", "weight": 3},
        "right": {"verifier": "numeric", "weight": 1},
    }
    prompt = replace(SCORED, verifier="weighted", context={"parts": parts})
    worker = VerifierWorker(
        Verifiers(processes=1, timeout_s=5.0, memory_mib=512, http_deadline_s=30), before_others=True
    )
    try:
        table = rollouts.build([row(0, RESPONSES[0], text="it is 3"), row(1, RESPONSES[1], text="4")])
        waiting = worker.score(table, prompt)
    finally:
        worker.close()
    assert column(waiting, "reward") == [None, None]
    scored = actor(outcome).score(waiting, prompt)
    for found, right in zip(scored.to_pylist(), (1.0, 0.0), strict=True):
        want = (plain_score(outcome, found["prompt_ids"] + found["response_ids"]) - MEAN) / STD
        assert found["reward"] == pytest.approx((3 * want + right) / 4, abs=1e-4)
        named = {part["name"]: part["value"] for part in found["reward_parts"]}
        assert named == pytest.approx({"score": want, "right": right}, abs=1e-4)
        assert (found["verdict_reason"], found["extra"]) == ("scored", None)


def test_a_process_model_pays_each_step_at_its_end(process: Path) -> None:
    """Its score is the chance of the weakest step; without steps the whole response is one."""
    ends = [1, 4, 9]
    long, short = RESPONSES[3], RESPONSES[1]
    table = rollouts.build([unscored(0, long, step_ends=ends), unscored(1, short)])
    scored = actor(process).score(table, SCORED)

    def chance(response: list[int]) -> float:
        return 1 / (1 + math.exp(-plain_score(process, [7, 9, 12, *response])))

    want = [chance(long[:end]) for end in ends]
    first, second = scored.to_pylist()
    assert [part["name"] for part in first["reward_parts"]] == ["step"] * 3
    assert [part["value"] for part in first["reward_parts"]] == pytest.approx(want, abs=1e-4)
    assert first["reward"] == pytest.approx(min(want), abs=1e-4)
    assert second["reward"] == pytest.approx(chance(short), abs=1e-4)

    table = rollouts.replace_column(scored, "step_ends", [ends, [len(short)]])
    algorithm = parse_config(
        {"algorithm": {"preset": "a2c", "process_rewards": True}, "learner": {"groups_per_step": 1}}
    ).algorithm
    group = replace(unpack(table), values=np.zeros(len(long) + len(short), dtype=np.float32))
    paid = prepare([group], algorithm, max_new_tokens=16, state=RewardState.start(algorithm)).token_rewards_N
    by_hand = [0.0] * len(long)
    for end, each in zip(ends, want, strict=True):
        by_hand[end - 1] += each
    by_hand[-1] += min(want)
    assert paid[: len(long)].tolist() == pytest.approx(by_hand, abs=1e-4)


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_a_score_that_is_no_number_is_unscored_and_counted(
    tiny_random: Path, tmp_path: Path, kind: Kind
) -> None:
    """And only in the response that it is in, though all are packed together."""
    folder = saved(tiny_random, tmp_path / "model", kind)
    model = actor(folder)
    weight = model._model.body.parameters["model.embed_tokens.weight"]
    with torch.no_grad():
        weight[POISON] = math.nan
    table = rollouts.build([unscored(0, [5, 6, EOS]), unscored(1, [5, POISON, EOS]), unscored(2, [8, EOS])])
    scored = model.score(table, SCORED)
    healthy = actor(folder).score(table, SCORED)
    rewards, want = column(scored, "reward"), column(healthy, "reward")
    assert rewards[1] is None and want[1] is not None
    assert [rewards[0], rewards[2]] == pytest.approx([want[0], want[2]], abs=1e-4)
    assert column(scored, "verdict_reason") == ["scored", "reward_not_finite", "scored"]
    assert model.drain_updates() == [("headway_verifier_errors_total", "reward_not_finite", 1.0)]
    assert model.drain_updates() == []


def test_the_score_of_the_greedy_answer_is_the_baseline_of_the_others(outcome: Path) -> None:
    silent = {"loss_mask": [0] * 2, "sample_index": -1}
    table = rollouts.build(
        [
            unscored(0, [5, 6, EOS]),
            unscored(1, [8, EOS]),
            unscored(2, [5, EOS], extra=greedy_mark(), **silent),
        ]
    )
    scored = actor(outcome).score(table, SCORED)
    want = [
        (plain_score(outcome, [7, 9, 12, *ids]) - MEAN) / STD for ids in ([5, 6, EOS], [8, EOS], [5, EOS])
    ]
    assert column(scored, "reward") == pytest.approx(want[:2], abs=1e-4)
    assert column(scored, "values") == [
        pytest.approx([want[2]] * 3, abs=1e-4),
        pytest.approx([want[2]] * 2, abs=1e-4),
    ]


def test_continuations_are_scored_with_what_they_continue(outcome: Path) -> None:
    """Each from where it branches off: their prompts differ, though one agent gives them all."""
    branched = {"loss_mask": [0] * 2}
    table = rollouts.build(
        [
            unscored(0, [5, 6, 8], step_ends=[2, 3]),
            unscored(1, [9, EOS], extra=branch_mark(None, 0), **branched, sample_index=-1),
            unscored(
                2,
                [8, EOS],
                extra=branch_mark(0, 2),
                **branched,
                sample_index=0,
                prompt_ids=[7, 9, 12, 5, 6],
            ),
        ]
    )
    scored = actor(outcome).score(table, SCORED)
    ids = ([5, 6, 8], [9, EOS], [5, 6, 8, EOS])
    whole, fresh, continued = ((plain_score(outcome, [7, 9, 12, *each]) - MEAN) / STD for each in ids)
    assert column(scored, "reward") == pytest.approx([whole], abs=1e-4)
    assert column(scored, "values") == [pytest.approx([fresh, fresh, continued], abs=1e-4)]


def test_scores_without_a_scale_are_refused(tiny_random: Path, tmp_path: Path) -> None:
    folder = saved(tiny_random, tmp_path / "model", "outcome", calibrated=False)
    with pytest.raises(DataError, match="has no calibration: its scores have no scale; finish its training"):
        actor(folder)


# ---- losses far out --------------------------------------------------------------------------------------------------


def trainer(objective: Objective, folder: Path, **other: Any) -> OfflineTrainer:
    options = {"dtype": "float32", "microbatch_tokens": 4096, "learning_rate": 1e-3, **other}
    return OfflineTrainer(OfflineSettings(objective=objective, **options), folder)


PAIR = PairIds(prompt_ids=(7, 9, 12), chosen_ids=(5, 6, EOS), rejected_ids=(8, EOS))


@pytest.mark.parametrize(("margin", "loss"), [(-200.0, 200.0), (0.0, math.log(2)), (-1e4, 1e4), (1e4, 0.0)])
def test_a_dpo_step_is_finite_at_any_margin(tiny_random: Path, margin: float, loss: float) -> None:
    t = trainer("dpo", tiny_random, beta=0.5)
    (known,) = t.with_reference([PAIR])
    assert known.reference is not None
    chosen, rejected = known.reference
    stats = t.step([replace(known, reference=(chosen - margin / 0.5, rejected))])
    assert stats.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert stats.preference is not None and stats.preference.margin == pytest.approx(margin, rel=1e-5)
    assert stats.grad_norm is not None and math.isfinite(stats.grad_norm)
    assert (stats.grad_norm > 0) == (margin < 1e4)
    assert all(torch.isfinite(master).all() for master in t.policy.masters.values())


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_a_reward_model_step_is_finite_at_any_gap(tiny_random: Path, gap: float) -> None:
    t = trainer("reward_model", tiny_random, centring=0.0)
    assert t.reward is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(t.reward.head.weight)
    found = t.evaluate([PAIR]).preference
    assert found is not None and abs(found.margin) > 0.1
    with torch.no_grad():
        t.reward.head.weight *= gap / found.margin
    stats = t.step([PAIR])
    assert stats.loss == pytest.approx(max(0.0, -gap), rel=1e-4, abs=1e-6)
    assert stats.grad_norm is not None and math.isfinite(stats.grad_norm)
    assert all(torch.isfinite(master).all() for master in t.reward.masters.values())


# ---- from files to steps -----------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, stage: str, rows: list[dict[str, Any]], **offline: Any) -> Config:
    """Of a run in a folder of its own, on rows of a file."""
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = parse_config(
        {
            "stage": stage,
            "run": {"name": "run", "folder": str(tmp_path), "steps": 3},
            "model": {"dtype": "float32", "chat_template": False},
            "data": {"source": str(source)},
            "learner": {"learning_rate": 1e-3, "microbatch_tokens": 4096, "threads": 1},
            "offline": {"rows_per_step": 8, "held_out": 0.25, **offline},
        }
    )
    config.run_folder.mkdir()
    return config


def three_steps(config: Config, folder: Path) -> tuple[OfflineTrainer, list[Any], list[Any]]:
    """The trainer after them, their statistics, and the rows held out."""
    t = OfflineTrainer(settings_of(config), folder)
    rows, held_out = (t.with_reference(read_rows(config.run_folder / name)) for name in (TRAIN, HELD_OUT))
    size, seed = config.offline.rows_per_step, config.run.seed
    stats = [t.step(batch_at(rows, t.position, size, seed)) for _ in range(3)]
    return t, stats, held_out


SUMS = [(a, b) for a in range(2, 8) for b in range(2, 6)]


def prompt_of(a: int, b: int) -> str:
    return f"{PHRASES[0]}{a} + {b} ="


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_three_steps_of_kto_from_a_file(tiny_random: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt_of(a, b), "completion": f"{how}: {a + b}", "label": how == "carefully"}
        for a, b in SUMS
        for how in ("carefully", "quickly")
    ]
    config = config_of(tmp_path, "preference", rows, objective="kto")
    assert sum(prepare_rows(config, tiny_random)) == len(rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    answers = {}
    for each in read_rows(config.run_folder / TRAIN):
        assert isinstance(each, LabelledIds)
        assert each.completion_ids[-1] == each.mismatched_ids[-1] == tokenizer.eos_token_id
        said = (decoded(tokenizer, each.prompt_ids), decoded(tokenizer, each.completion_ids[:-1]), each.label)
        answers.setdefault(said[0], []).append(said[1:])
    given = {
        f"<bos>{prompt_of(a, b)}": [(f"carefully: {a + b}", True), (f"quickly: {a + b}", False)]
        for a, b in SUMS
    }
    assert 1 < len(answers) < len(given) and all(given[prompt] == own for prompt, own in answers.items())

    t, stats, held_out = three_steps(config, tiny_random)
    assert stats[0].loss == pytest.approx(0.5)  # all ratios are 1, their KL is 0: 1 - sigmoid(0)
    assert stats[0].preference.kl == 0.0 and stats[2].preference.kl >= 0.0
    assert all(0 < each.loss < 1 and each.grad_norm > 0 for each in stats)
    found = t.evaluate(held_out)
    assert found.loss < 0.5
    assert found.preference is not None and found.preference.margin > 0
    t.export(tmp_path / "model")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, weight in reopened.named_parameters():
        assert torch.equal(weight, t.policy.masters[name]), name


def test_three_steps_of_a_process_reward_model_from_a_file(tiny_random: Path, tmp_path: Path) -> None:
    """And its way into a run: what it learnt from is what it is asked there."""
    rows = [
        {
            "prompt": prompt_of(a, b),
            "completions": [f"{how}: {a}+{b}={a + b}\n", f"{a + b}"],
            "labels": [how == "carefully"] * 2,
        }
        for a, b in SUMS
        for how in ("carefully", "quickly")
    ]
    config = config_of(tmp_path, "reward_model", rows, reward="process")
    prepare_rows(config, tiny_random)
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    some = read_rows(config.run_folder / TRAIN)[0]
    assert isinstance(some, StepIds)
    first, last = some.step_ends
    assert decoded(tokenizer, some.response_ids[:first]).endswith("\n")
    assert last == len(some.response_ids)

    t, stats, held_out = three_steps(config, tiny_random)
    assert stats[0].loss == pytest.approx(math.log(2))  # every logit is 0
    assert all(math.isfinite(each.loss) and each.grad_norm > 0 for each in stats)
    assert t.evaluate(held_out).loss != pytest.approx(math.log(2), abs=1e-3)
    t.export(tmp_path / "model")
    model = actor(tmp_path / "model")
    for each in held_out:
        table = rollouts.build(
            [unscored(0, list(each.response_ids), step_ends=list(each.step_ends), prompt_ids=list(each.prompt_ids))]
        )  # fmt: skip
        found = column(model.score(table, SCORED), "reward_parts")[0]
        by_label = [part["value"] if label else 1 - part["value"] for part, label in zip(found, each.labels, strict=True)]  # fmt: skip
        assert -np.log(by_label).mean() == pytest.approx(t.evaluate([each]).loss, abs=1e-4)


def test_the_last_step_of_an_answer_ends_where_a_response_does(tiny_random: Path, tmp_path: Path) -> None:
    """A response of the policy ends with its end-of-sequence token, and the last step is read there."""
    rows = [
        {"prompt": prompt_of(a, b), "completions": ["carefully\n", str(a + b)], "labels": [True, True]}
        for a, b in SUMS
    ]
    config = config_of(tmp_path, "reward_model", rows, reward="process")
    prepare_rows(config, tiny_random)
    end = AutoTokenizer.from_pretrained(tiny_random).eos_token_id
    for each in read_rows(config.run_folder / TRAIN):
        assert isinstance(each, StepIds)
        assert each.response_ids[-1] == end and each.step_ends[-1] == len(each.response_ids)


def test_answers_of_pairs_end(tiny_random: Path, tmp_path: Path) -> None:
    """A policy that is not taught where an answer ends goes on for ever."""
    rows = [
        {"prompt": prompt_of(a, b), "chosen": str(a + b), "rejected": str(a + b + 1), "margin": 0.5}
        for a, b in SUMS
    ]
    config = config_of(tmp_path, "preference", rows)
    prepare_rows(config, tiny_random)
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    for each in read_rows(config.run_folder / TRAIN):
        assert isinstance(each, PairIds) and each.margin == 0.5
        assert each.prompt_ids[0] == tokenizer.bos_token_id and each.prompt_ids.count(each.prompt_ids[0]) == 1
        for ids in each.answers:
            assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]


TURNS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<bos>{{ m.content }}"
    "{% if m.role == 'assistant' %}<unk>{% endif %}{% endfor %}"
)
"""Ends an answer with another token than the tokenizer's end of a text."""


@pytest.fixture
def two_ends(tiny_random: Path, tmp_path: Path) -> Path:
    """A model whose responses end with the end of a text, or with the end of a turn, which its chat template writes."""
    folder = tmp_path / "two-ends"
    shutil.copytree(tiny_random, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [0, 2, 3]}))
    (folder / "chat_template.jinja").write_text(TURNS)
    return folder


@pytest.mark.parametrize(("chat_template", "end"), [(True, 3), (False, 2)])
def test_answers_end_as_the_model_ends_them(
    two_ends: Path, tmp_path: Path, chat_template: bool, end: int
) -> None:
    """With the least of several ends a reward model would be read, and a policy end, at a token that it never samples."""
    rows = [{"prompt": prompt_of(a, b), "chosen": str(a + b), "rejected": str(a)} for a, b in SUMS]
    config = config_of(tmp_path, "reward_model", rows)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"chat_template": chat_template})}
    )
    prepare_rows(config, two_ends)
    for each in read_rows(config.run_folder / TRAIN):
        assert isinstance(each, PairIds)
        assert all(ids[-1] == end and not {0, 2, 3} & {*ids[:-1]} for ids in each.answers)


def test_an_answer_that_has_its_end_already_gets_no_second_one(tiny_random: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt_of(a, b), "chosen": f"{a + b}<eos>", "rejected": f"{a}"} for a, b in SUMS]
    config = config_of(tmp_path, "reward_model", rows)
    prepare_rows(config, tiny_random)
    for each in read_rows(config.run_folder / TRAIN):
        assert isinstance(each, PairIds)
        assert all(ids.count(EOS) == 1 and ids[-1] == EOS for ids in each.answers)


def test_rows_that_cannot_be_put_to_the_model_are_told(two_ends: Path, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 2 ="}]
    config = config_of(tmp_path, "sft", [{"prompt": chat, "completion": "3"}], held_out=0)
    with pytest.raises(DataError, match=r"the prompt \[.*holds chat messages, .*set it to true"):
        prepare_rows(config, two_ends)
    config = config.model_copy(update={"model": config.model.model_copy(update={"chat_template": True})})
    with pytest.raises(DataError, match=r"chat template refuses the prompt .*no system"):
        prepare_rows(config, two_ends)


def test_rows_longer_than_the_model_are_refused(tiny_random: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 2 =", "completion": "3" * n} for n in (5, 600)]
    config = config_of(tmp_path, "sft", rows, held_out=0)
    with pytest.raises(DataError, match=r"1 of 2 rows .* longer than the 512 positions"):
        prepare_rows(config, tiny_random)


@pytest.mark.parametrize("seed", range(8))
def test_one_prompt_held_out_is_enough_for_kto(tiny_random: Path, tmp_path: Path, seed: int) -> None:
    rows = [{"prompt": f"{n} =", "completion": f"{n}", "label": n % 2 == 0} for n in range(8)]
    config = config_of(tmp_path, "preference", rows, objective="kto")
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    assert sum(prepare_rows(config, tiny_random, must_hold_out=False)) == len(rows)


def test_a_scale_is_of_the_weights_that_it_is_kept_with(tiny_random: Path, tmp_path: Path) -> None:
    """What goes on from a reward model without rows held out has none, and no run takes it."""
    first = RewardModel(tiny_random, dtype="float32", kind="outcome")
    first.calibration, first.filler_share = Calibration(mean=1.0, std=2.0, num_responses=4), 0.0
    first.save(tmp_path / "first")
    t = OfflineTrainer(
        OfflineSettings(objective="reward_model", dtype="float32", microbatch_tokens=512, learning_rate=1e-3),
        tmp_path / "first",
    )
    t.step([PAIR])
    t.export(tmp_path / "second")
    about = read_about(tmp_path / "second")
    assert (about["calibration"], about["filler_share"]) == (None, None)
    config = parse_config(
        {
            "model": {"path": str(tiny_random), "chat_template": False},
            "reward_model": {"path": str(tmp_path / "second")},
            "metrics": {"port": 0},
        }
    )
    with pytest.raises(DataError, match=r"has no scale, .*offline\.held_out above 0"):
        preflight(config, (SCORED,), lambda _: None)
