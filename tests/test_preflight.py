"""What is prepared before a cluster is touched."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from headway.actors.policy import demonstrations_file
from headway.cluster.preflight import encode_demonstrations
from headway.core.config import parse_config
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
