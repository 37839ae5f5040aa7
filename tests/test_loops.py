"""Loops of rounds: which pairs samples and verdicts come to, what is kept, and a round of SPIN for real."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headway.cluster.loops import LoopRun, pairs_of, prompts_of, round_config, sampler_config
from headway.core import preferences
from headway.core.config import Config, parse_config
from headway.core.errors import ConfigError, DataError
from headway.core.prompts import Prompt, PromptStream

DEMONSTRATED = Prompt(prompt_id="0", content="2 + 2 =", gold="4", verifier="")
JUDGED = Prompt(prompt_id="0", content="2 + 2 =", gold=None, verifier="judge")


def sample(text: str, reward: float | None = None, *, truncated: bool = False) -> dict[str, Any]:
    reason = "judge_no_verdict" if reward is None else "partial"
    return {"text": text, "truncated": truncated, "reward": reward, "verdict_reason": reason}


def loop(kind: str, folder: Path, source: Path | str = "rows.jsonl", **offline: Any) -> Config:
    return parse_config(
        {
            "stage": "preference",
            "run": {"name": "loop", "folder": str(folder), "steps": 4},
            "model": {"path": "tiny-random", "chat_template": False},
            "data": {"source": str(source)},
            "sampling": {"group_size": 2, "max_new_tokens": 10},
            "offline": {"loop": kind, **offline},
        }
    )


# ---- pairs -------------------------------------------------------------------------------------------------


def test_a_demonstration_is_preferred_to_every_other_answer_of_the_model() -> None:
    samples = [
        sample("5"),
        sample(" 4\n"),
        sample("five"),
        sample("5 "),
        sample(" "),
        sample("1111", truncated=True),
    ]
    left_out: Counter[str] = Counter()
    assert pairs_of(DEMONSTRATED, samples, left_out) == [
        {"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"},
        {"prompt": "2 + 2 =", "chosen": "4", "rejected": "five"},
    ]
    assert left_out == {
        "equal to the demonstration": 1,
        "equal to another sample": 1,
        "empty": 1,
        "cut off by sampling.max_new_tokens": 1,
    }


def test_the_best_answer_is_preferred_to_the_worst_and_of_equal_ones_the_first() -> None:
    samples = [
        sample("a", 0.4),
        sample("b", 0.8),
        sample("c"),
        sample("d", 0.2),
        sample("e", 0.8),
        sample("f", 0.2),
    ]
    left_out: Counter[str] = Counter()
    assert pairs_of(JUDGED, samples, left_out) == [
        {"prompt": "2 + 2 =", "chosen": "b", "rejected": "d", "chosen_score": 0.8, "rejected_score": 0.2}
    ]
    assert left_out == {"unscored (judge_no_verdict)": 1}


@pytest.mark.parametrize(
    ("samples", "reasons"),
    [
        ([sample("a", 0.6), sample("b", 0.6)], {"prompts whose samples all have the same score": 1}),
        (
            [sample("a", 0.6), sample("b")],
            {"unscored (judge_no_verdict)": 1, "prompts with fewer than two scores": 1},
        ),
        # One answer that the judge scored twice is no pair.
        (
            [sample("a", 0.6), sample("a", 0.2)],
            {"equal to another sample": 1, "prompts with fewer than two scores": 1},
        ),
    ],
)
def test_a_prompt_without_two_different_scores_gives_no_pair(
    samples: list[dict[str, Any]], reasons: dict[str, int]
) -> None:
    left_out: Counter[str] = Counter()
    assert pairs_of(JUDGED, samples, left_out) == []
    assert left_out == reasons


def test_prompts_of_a_loop(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 + 2 =", "answer": "4"}\n')
    shown = prompts_of(loop("spin", tmp_path, source))
    assert [(p.content, p.gold) for p in shown] == [("1 + 1 =", "2"), ("2 + 2 =", "4")]
    asked = prompts_of(loop("self_rewarding", tmp_path, source))
    assert [(p.content, p.gold, p.context["rubric_scale"]) for p in asked] == [
        ("1 + 1 =", None, 5),
        ("2 + 2 =", None, 5),
    ]
    source.write_text('{"question": "1 + 1 ="}\n')
    with pytest.raises(DataError, match=r"no 'prompt', only 'question' \(data.prompt_field\)"):
        prompts_of(loop("self_rewarding", tmp_path, source))


# ---- configurations ----------------------------------------------------------------------------------------


def test_a_round_is_a_run_of_its_own_from_the_model_of_the_round_before(tmp_path: Path) -> None:
    before = tmp_path / "loop" / "round-0" / "model"
    config = round_config(loop("spin", tmp_path), 1, before)
    assert config.run_folder == tmp_path / "loop" / "round-1"
    assert config.data.source == str(tmp_path / "loop" / "round-1" / "pairs.jsonl")
    assert (config.model.path, config.offline.loop, config.run.steps) == (str(before), "none", 4)


def test_the_judge_is_the_model_itself_and_shares_its_gpus(tmp_path: Path, tiny_random: Path) -> None:
    config = loop("self_rewarding", tmp_path)
    engines = sampler_config(config, tiny_random, [JUDGED])
    # "<bos>2 + 2 =" are 8 characters and tokens; with 10 new ones 18, rounded up to 32.
    assert engines.generation.max_model_len == 32
    assert engines.judge.model == str(tiny_random)
    assert (engines.generation.gpu_memory_utilization, engines.judge.gpu_memory_utilization) == (0.45, 0.45)
    assert sampler_config(loop("spin", tmp_path), tiny_random, [DEMONSTRATED]).judge.model is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "sft"}, "set stage=preference"),
        ({"offline": {"loop": "spin", "objective": "kto"}}, "another objective than kto"),
        ({"offline": {"loop": "self_rewarding"}, "sampling": {"group_size": 1}}, "need at least 2"),
    ],
)
def test_what_a_loop_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"stage": "preference", "offline": {"loop": "spin"}, **change})


# ---- rounds ------------------------------------------------------------------------------------------------


def test_rounds_whose_models_are_there_are_not_made_again(tmp_path: Path, tiny_random: Path) -> None:
    config = loop("spin", tmp_path, rounds=2)
    for number in range(2):
        model = tmp_path / "loop" / f"round-{number}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(str(number))
    shown = io.StringIO()
    run = LoopRun(
        config=config,
        console=Console(file=shown),
        model_folder=tiny_random,
        prompts=PromptStream((DEMONSTRATED,), 0),
    )
    asyncio.run(run.execute())  # without Ray, so that whatever it tried to make would fail
    assert (tmp_path / "loop" / "model" / "config.json").read_text() == "1"
    assert run.version == 8
    assert "round 0: its model is there" in shown.getvalue()


def answer_logprobs(model: Path, pairs: list[preferences.Pair]) -> np.ndarray:
    """Of (chosen, rejected), nats, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logprob(prompt: str, answer: str) -> float:
        prompt_ids = tokenizer(prompt)["input_ids"]
        ids = [*prompt_ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            every = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(every[at - 1, ids[at]]) for at in range(len(prompt_ids), len(ids)))

    return np.array([[logprob(str(p.prompt), answer) for answer in (p.chosen, p.rejected)] for p in pairs])


@pytest.mark.timeout(600)
def test_a_round_of_spin_moves_the_model_towards_the_demonstrations(
    root: Path, tmp_path: Path, tiny_adder: Path
) -> None:
    subprocess.run([sys.executable, "-P", "configs/rlhf/data.py", str(tmp_path)], cwd=root, check=True)
    folder = tmp_path / "spin"
    command = [
        *(sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/rlhf/spin.yaml"),
        *(f"data.source={tmp_path / 'careful.jsonl'}", f"run.folder={tmp_path}", "run.name=spin", "run.steps=4"),
        *("offline.rounds=1", "offline.loop_prompts=32", "offline.rows_per_step=16", "learner.learning_rate=3e-4"),
        *("metrics.port=0", "learner.threads=1", "generation.threads=1", "generation.kv_cache_gib=0.05"),
    ]  # fmt: skip

    def run(*arguments: str) -> str:
        ended = subprocess.run(
            [*command, *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=500,
            env={key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"},
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run()
    about = json.loads((folder / "round-0" / "sampled.json").read_text())
    assert about["samples"] == 32 == about["pairs"] + sum(about["left_out"].values())
    pairs = list(preferences.read_pairs(str(folder / "round-0" / "pairs.jsonl")))
    assert len(pairs) == about["pairs"] >= 16
    before, after = (answer_logprobs(model, pairs) for model in (tiny_adder, folder / "model"))
    margins = (after - before) @ [1, -1]
    assert margins.mean() > 0.1, margins
    assert (after - before)[:, 0].mean() > 0, "the demonstrations themselves"

    # As if it had been killed in training: the pairs stay, and the same weights come of them.
    made = (folder / "round-0" / "pairs.jsonl").stat().st_mtime_ns
    weights = (folder / "model" / "model.safetensors").read_bytes()
    for lost in ("model", "checkpoints"):
        shutil.rmtree(folder / "round-0" / lost)
    output = run("--resume")
    assert "round 0: its pairs are there" in output and "sampling from" not in output
    assert (folder / "round-0" / "pairs.jsonl").stat().st_mtime_ns == made
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    lines = (folder / "round-0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2, 3, 4]
