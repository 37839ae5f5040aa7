"""The prompt stream: a pure function of seed and index; datasets that are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import DataError
from headway.core.prompts import Prompt, PromptStream, load_prompts


def stream(size: int, seed: int) -> PromptStream:
    prompts = (Prompt(prompt_id=str(n), content=str(n), gold=n, verifier="exact") for n in range(size))
    return PromptStream(tuple(prompts), seed)


def test_every_epoch_holds_each_prompt_once_in_its_own_order() -> None:
    s = stream(12, seed=1)
    epochs = [[s.at(epoch * 12 + k).prompt_id for k in range(12)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(12)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_position_is_known_without_the_ones_before() -> None:
    assert [stream(5, seed=7).at(n).prompt_id for n in (4, 5, 1_000_003)] == [
        stream(5, seed=7).at(n).prompt_id for n in (4, 5, 1_000_003)
    ]
    assert [stream(50, seed=7).at(n) for n in range(50)] != [stream(50, seed=8).at(n) for n in range(50)]


def test_rows_become_prompts_with_their_context(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"question": "1+1?", "gold": 0, "relative_tolerance": 0.1}\n\n'
        '{"question": [{"role": "user", "content": "hi"}], "gold": "x", "verifier": "exact", "prompt_id": "b"}\n'
    )
    first, second = load_prompts(
        str(path), verifier="numeric", prompt_field="question", answer_field="gold", template="Q: {prompt} A:"
    )
    assert (first.content, first.gold, first.verifier) == ("Q: 1+1? A:", 0, "numeric")
    assert first.context == {"relative_tolerance": 0.1}
    assert (second.prompt_id, second.verifier) == ("b", "exact")
    assert second.content == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"prompt": "x"}\n', "row 1 has fields \\['prompt'\\], but 'prompt' and 'answer' are needed"),
        ('{"prompt": "x", "answer": 1}\n{oops\n', "line 2 is not JSON"),
    ],
)
def test_a_bad_dataset_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_prompts(str(path), verifier="exact")


def test_generated_tasks_repeat_by_seed_and_refuse_bad_parameters() -> None:
    first = load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=5)
    assert first == load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=5)
    assert first != load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=6)
    with pytest.raises(DataError, match=r"nearest: chain_sum"):
        load_prompts("reasoning_gym:chainsum", verifier="")
    with pytest.raises(DataError, match=r"refuses .*min_terms"):
        load_prompts("reasoning_gym:chain_sum", verifier="", params={"min_terms": 9, "max_terms": 2})
    with pytest.raises(DataError, match=r"expected .jsonl, .parquet, or reasoning_gym:TASK"):
        load_prompts(__file__, verifier="exact")
