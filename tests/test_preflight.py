"""What is prepared before a cluster is touched."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from headway.actors.policy import demonstrations_file
from headway.cluster.preflight import cautions, encode_demonstrations, known_to_judge, preflight, versions_of
from headway.core.config import parse_config
from headway.core.errors import ConfigError
from headway.core.prompts import Prompt
from headway.learner.sft import read_demonstrations


def test_demonstrations_are_encoded_as_the_policy_would_answer(tmp_path: Path, tiny_random: Path) -> None:
    """Prompt as for sampling, the answer's own tokens, then the end of sequence."""
    source = tmp_path / "answers.jsonl"
    rows = [{"prompt": "1 + 2 =", "answer": "3"}, {"prompt": "20 + 3 =", "answer": "the sum is 23"}]
    source.write_text("\n".join(map(json.dumps, rows)))
    config = parse_config(
        {
            "run": {"folder": str(tmp_path), "name": "r"},
            "model": {"chat_template": False},
            "algorithm": {"sft_coef": 0.1},
            "data": {"demonstrations": str(source)},
        }
    )
    config.run_folder.mkdir()
    encode_demonstrations(config, tiny_random)
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    found = read_demonstrations(demonstrations_file(config.run_folder))
    assert len(found) == 2
    for demonstration, row in zip(found, rows, strict=True):
        (answer,) = demonstration.answers
        assert answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer[:-1]) == row["answer"]
        assert tokenizer.decode(demonstration.prompt_ids, skip_special_tokens=True) == row["prompt"]


def test_without_demonstrations_nothing_is_written(tmp_path: Path, tiny_random: Path) -> None:
    config = parse_config({"run": {"folder": str(tmp_path), "name": "r"}})
    encode_demonstrations(config, tiny_random)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_bound_to_the_versions_of_its_verifiers() -> None:
    parts = {"right": {"verifier": "math", "weight": 1}, "kind": {"verifier": "judge", "weight": 1}}
    composite = Prompt(prompt_id="a", content="?", gold="4", verifier="weighted", context={"parts": parts})
    plain = Prompt(prompt_id="b", content="?", gold="4", verifier="numeric")
    assert versions_of((composite, plain)) == "judge 1, math 2, numeric 1, weighted 1"
    assert known_to_judge((plain, composite)) == [composite]


@pytest.mark.parametrize(("verifier", "key"), [("judge", "judge.model"), ("http", "verifiers.http_url")])
def test_a_scorer_that_rows_need_must_be_named(tmp_path: Path, verifier: str, key: str) -> None:
    config = parse_config({"run": {"folder": str(tmp_path), "name": "r"}})
    prompts = (Prompt(prompt_id="a", content="?", gold="4", verifier=verifier),)
    with pytest.raises(
        ConfigError, match=f"verifier '{verifier}' scores rows of .*, but {key} is null; set it"
    ):
        preflight(config, prompts, lambda _: None)


@pytest.mark.parametrize(
    ("capability", "tree", "told"),
    [
        ("AVX2", {}, True),
        ("AVX512", {}, False),
        ("AVX2", {"learner": {"gpus": 1}}, False),
        ("AVX2", {"model": {"dtype": "float32"}}, False),
        ("AVX2", {"stage": "sft"}, True),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: str, tree: dict[str, Any], told: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    said = [line for line in cautions(parse_config(tree)) if line.startswith("model.dtype=bfloat16 on a CPU")]
    assert len(said) == told
