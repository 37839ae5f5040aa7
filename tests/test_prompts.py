"""The prompt stream: a pure function of seed and index; datasets that are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> tuple[Prompt, ...]:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(str(path), verifier="exact", **options)


def test_a_row_overrides_the_options_of_the_run_where_it_has_a_value(tmp_path: Path) -> None:
    prompts = load(
        tmp_path,
        {"prompt": "a", "answer": "b", "relative_tolerance": 0.5, "note": None},
        {"prompt": "a", "answer": "b", "relative_tolerance": None, "prompt_id": None, "verifier": None},
        verifier_params={"relative_tolerance": 0.1, "strict": True},
    )
    assert [prompt.context for prompt in prompts] == [
        {"relative_tolerance": 0.5, "strict": True},
        {"relative_tolerance": 0.1, "strict": True},
    ]
    assert (prompts[1].prompt_id, prompts[1].verifier, prompts[1].task) == ("1", "exact", "exact")
    (task,) = load_prompts(
        "reasoning_gym:chain_sum", verifier="", num_prompts=1, verifier_params={"x": 1, "seed": 9}
    )
    assert (task.context["x"], task.context["seed"]) == (1, 0)


def test_any_gold_is_handed_to_the_verifier_as_it_is(tmp_path: Path) -> None:
    golds = [None, 0, 0.5, False, "", ["a", 1], {"inputs": ["1"]}]
    prompts = load(tmp_path, *({"prompt": "a", "answer": gold} for gold in golds))
    assert [(type(prompt.gold), prompt.gold) for prompt in prompts] == [(type(gold), gold) for gold in golds]


def test_the_text_of_a_prompt_is_the_last_message_of_the_user(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one", "name": None},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "begun"},
    ]
    plain, messages, nobody = load(
        tmp_path,
        *({"prompt": prompt, "answer": 1} for prompt in ("p", chat, chat[:1])),
        template="<{prompt}>",
    )
    assert (plain.text, messages.text, nobody.text) == ("<p>", "two", "")
    assert messages.content[1] == {"role": "user", "content": "one"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "prompt must be a text or a list of chat messages, not 5"),
        (None, "prompt must be a text or a list of chat messages, not None"),
        ([], r"prompt must be a text or a list of chat messages, not \[\]"),
        (" \n", "prompt is empty"),
        (["hi"], "prompt, message 1 must have a role and a content, not 'hi'"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], "prompt, message 2 must have a role"),
        ([{"role": "user"}], "prompt, message 1: content must be a text, not None"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "content must be a text, not \\["),
        ("x\ud800", "prompt is no Unicode text: surrogates not allowed at character 1"),
        ([{"role": "user", "content": "\ud800"}], "message 1 is no Unicode text"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused_with_its_row(
    tmp_path: Path, prompt: Any, message: str
) -> None:
    with pytest.raises(DataError, match=f"d.jsonl row 2: .*{message}"):
        load(tmp_path, {"prompt": "fine", "answer": 1}, {"prompt": prompt, "answer": 1})


def test_two_rows_with_one_id_are_refused_and_both_named(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": 1}
    with pytest.raises(DataError, match=r"row 3 has the prompt_id 'x', which .*row 1 has too"):
        load(tmp_path, row | {"prompt_id": "x"}, row, row | {"prompt_id": "x"})
    with pytest.raises(DataError, match=r"row 2 has the prompt_id '1', which .*row 1 has too"):
        load(tmp_path, row | {"prompt_id": 1}, row)


def test_a_row_cannot_name_code_to_run(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": 1, "verifier": "os:system"}
    with pytest.raises(DataError, match="row 1 names the verifier 'os:system'; a row may only name one that"):
        load(tmp_path, row)
    (prompt,) = load_prompts(str(tmp_path / "d.jsonl"), verifier="os:system")  # the run's own choice
    assert prompt.verifier == "os:system"
    with pytest.raises(DataError, match="row 1 names the verifier 5"):
        load(tmp_path, row | {"verifier": 5})


def test_generated_tasks_repeat_by_seed_and_refuse_bad_parameters() -> None:
    first = load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=5)
    assert first == load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=5)
    assert first != load_prompts("reasoning_gym:chain_sum", verifier="", num_prompts=3, seed=6)
    with pytest.raises(DataError, match=r"nearest: chain_sum"):
        load_prompts("reasoning_gym:chainsum", verifier="")
    with pytest.raises(DataError, match=r"refuses .*min_terms"):
        load_prompts("reasoning_gym:chain_sum", verifier="", params={"min_terms": 9, "max_terms": 2})
    for task, params in (
        ("chain_sum", {"min_terms": 2.5}),
        ("spell_backward", {"min_word_len": 60, "max_word_len": 60}),
        ("power_function", {"min_exponent": 500, "max_exponent": 600}),
    ):  # only where the tasks are made
        with pytest.raises(DataError, match=rf"task '{task}' refuses .*\(data.params\)"):
            load_prompts(f"reasoning_gym:{task}", verifier="", num_prompts=5, params=params)
    with pytest.raises(DataError, match=r"expected .jsonl, .parquet, or reasoning_gym:TASK"):
        load_prompts(__file__, verifier="exact")
