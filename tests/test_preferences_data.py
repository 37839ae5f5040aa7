"""Rows of preference data: what is read, what is refused with which words, and the split by prompt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.core.preferences import (
    Labelled,
    Pair,
    Stepwise,
    Supervised,
    read_labelled,
    read_pairs,
    read_stepwise,
    read_supervised,
    split_by_prompt,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def jsonl(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


PAIR = {"prompt": "1 + 2 =", "chosen": "3", "rejected": "4", "margin": 0.5}
READ = Pair(prompt="1 + 2 =", chosen="3", rejected="4", margin=0.5)


def test_a_pair_is_the_same_from_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(PAIR))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps(PAIR))
    pq.write_table(pa.Table.from_pylist([PAIR]), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read_pairs(str(tmp_path / name)) == (READ,)


@pytest.mark.parametrize(
    "row",
    [
        # The answer's message, with the prompt as text and as messages.
        {"prompt": "1 + 2 =", "chosen": [assistant("3")], "rejected": [assistant("4")]},
        {"prompt": [user("1 + 2 =")], "chosen": [assistant("3")], "rejected": [assistant("4")]},
        {"prompt": [user("1 + 2 =")], "chosen": "3", "rejected": "4"},
        # Whole conversations beside the prompt.
        {
            "prompt": "1 + 2 =",
            "chosen": [user("1 + 2 ="), assistant("3")],
            "rejected": [user("1 + 2 ="), assistant("4")],
        },
        # Whole conversations alone: the prompt is what they have in common.
        {"chosen": [user("1 + 2 ="), assistant("3")], "rejected": [user("1 + 2 ="), assistant("4")]},
    ],
)
def test_message_lists_mean_the_same_as_texts(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = read_pairs(jsonl(tmp_path, row))
    assert (pair.chosen, pair.rejected, pair.margin) == ("3", "4", 0.0)
    assert pair.prompt in ("1 + 2 =", (user("1 + 2 ="),))


def test_the_implicit_prompt_holds_all_common_turns(tmp_path: Path) -> None:
    common = [user("hello"), assistant("hi"), user("1 + 2 =")]
    (pair,) = read_pairs(
        jsonl(tmp_path, {"chosen": [*common, assistant("3")], "rejected": [*common, assistant("4")]})
    )
    assert pair == Pair(prompt=tuple(common), chosen="3", rejected="4")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q: 1 + 2? A: 3", "Q: 1 + 2? A: 4", "Q: 1 + 2? A:", (" 3", " 4")),
        # "2" begins "20": no number is cut, and neither answer is left empty.
        ("Q: 1 + 1? A: 2", "Q: 1 + 1? A: 20", "Q: 1 + 1? A:", (" 2", " 20")),
        # A word of one is the beginning of a word of the other.
        ("say: yes sir", "say: yessir", "say:", (" yes sir", " yessir")),
        ("Question\nyes", "Question\nno", "Question\n", ("yes", "no")),
    ],
)
def test_the_implicit_prompt_of_texts_cuts_no_word(
    tmp_path: Path, chosen: str, rejected: str, prompt: str, answers: tuple[str, str]
) -> None:
    (pair,) = read_pairs(jsonl(tmp_path, {"chosen": chosen, "rejected": rejected}))
    assert (pair.prompt, (pair.chosen, pair.rejected)) == (prompt, answers)


WORDS = st.lists(st.sampled_from(["a", "ab", "b", "1", "10"]), min_size=1, max_size=5).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=WORDS, chosen=WORDS, rejected=WORDS)
def test_implicit_prompt_and_answer_make_the_text(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, chosen: str, rejected: str
) -> None:
    texts = [f"{prompt} {answer}" for answer in (chosen, rejected)]
    if texts[0] == texts[1]:
        return
    source = jsonl(tmp_path_factory.mktemp("x"), {"chosen": texts[0], "rejected": texts[1]})
    (pair,) = read_pairs(source)
    assert [f"{pair.prompt}{answer}" for answer in (pair.chosen, pair.rejected)] == texts
    assert len(str(pair.prompt)) >= len(prompt)
    assert pair.chosen.strip() and pair.rejected.strip()
    assert pair.chosen[0] == pair.rejected[0] == " "


def test_labels_are_booleans_or_0_and_1(tmp_path: Path) -> None:
    rows = read_labelled(
        jsonl(
            tmp_path,
            {"prompt": "p", "completion": "c", "label": True},
            {"prompt": [user("p")], "completion": [assistant("c")], "label": 0},
        )
    )
    assert rows == (
        Labelled(prompt="p", completion="c", label=True),
        Labelled(prompt=(user("p"),), completion="c", label=False),
    )


def test_steps(tmp_path: Path) -> None:
    (row,) = read_stepwise(
        jsonl(tmp_path, {"prompt": "p", "completions": ["one\n", "two"], "labels": [True, False]})
    )
    assert row == Stepwise(prompt="p", steps=("one\n", "two"), labels=(True, False))


def test_demonstrations_in_their_three_forms(tmp_path: Path) -> None:
    rows = read_supervised(
        jsonl(
            tmp_path,
            {"prompt": "p", "completion": "c"},
            {"prompt": "p", "answer": "c"},
            {"messages": [user("p"), assistant("c")]},
        )
    )
    assert rows == (
        Supervised(prompt="p", completion="c"),
        Supervised(prompt="p", completion="c"),
        Supervised(prompt=(user("p"),), completion="c"),
    )


@pytest.mark.parametrize(
    ("read", "row", "words"),
    [
        (read_pairs, {"prompt": "p", "choosen": "a", "rejected": "b"}, ["'chosen'", "rename 'choosen'"]),
        (read_pairs, {"prompt": "p", "chosen": "a", "rejected": "a"}, ["are the same, 'a'", "leave the row"]),
        (
            read_pairs,
            {"prompt": "p", "chosen": "a", "rejected": " \n"},
            ["rejected is empty (' \\n')", "fill it in"],
        ),
        (read_pairs, {"prompt": "p", "chosen": "a", "rejected": None}, ["has no 'rejected'"]),
        (read_pairs, {"chosen": "yes", "rejected": "no"}, ["has no 'prompt'", "add the prompt's column"]),
        (read_pairs, {"chosen": "a b", "rejected": "a b"}, ["the same text"]),
        (
            read_pairs,
            {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]},
            ["do not begin with the same messages"],
        ),
        (
            read_pairs,
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
            ["the same conversation"],
        ),
        (
            read_pairs,
            {
                "chosen": [user("a"), assistant("b")],
                "rejected": [user("a"), assistant("c"), user("d"), assistant("e")],
            },
            ["rejected must end with exactly one message of the assistant", "earlier turns into the prompt"],
        ),
        (read_pairs, {"prompt": "p", "chosen": "a", "rejected": 7}, ["rejected must be", "7"]),
        (read_pairs, PAIR | {"margin": -1}, ["margin", "at least 0, not -1"]),
        (read_pairs, PAIR | {"margin": "big"}, ["margin", "'big'"]),
        (read_labelled, {"prompt": "p", "completion": "c", "label": "yes"}, ["label", "true or false, not 'yes'"]),
        (read_labelled, {"prompt": "p", "completion": "c", "labels": True}, ["'label'", "rename 'labels'"]),
        (read_stepwise, {"prompt": "p", "completions": ["a"], "labels": []}, ["same length"]),
        (read_stepwise, {"prompt": "p", "completions": ["a", ""], "labels": [1, 1]}, ["step 2 is empty"]),
        (read_supervised, {"prompt": "p", "complete": "c"}, ["'completion'", "rename 'complete'", "messages"]),
        (read_supervised, {"messages": [user("p")]}, ["messages must hold a prompt and an answer"]),
        (read_supervised, {"messages": [user("p"), user("q")]}, ["message of the assistant"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_row_value_and_remedy(
    tmp_path: Path, read: Any, row: dict[str, Any], words: list[str]
) -> None:
    good: dict[str, Any] = {
        read_pairs: PAIR,
        read_labelled: {"prompt": "p", "completion": "c", "label": True},
        read_stepwise: {"prompt": "p", "completions": ["c"], "labels": [True]},
        read_supervised: {"prompt": "p", "completion": "c"},
    }[read]
    with pytest.raises(DataError) as error:
        read(jsonl(tmp_path, good, row))
    for word in (f"{tmp_path}/rows.jsonl row 2", *words):
        assert word in str(error.value)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        read_pairs(jsonl(tmp_path))


# ---- split -----------------------------------------------------------------------------------------------


def rows_of(prompts: list[str]) -> list[Supervised]:
    return [Supervised(prompt=prompt, completion=str(n)) for n, prompt in enumerate(prompts)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    numbers=st.lists(st.integers(0, 30), min_size=40, max_size=80),
    seed=st.integers(0, 3),
    cut=st.integers(0, 39),
    mix=st.randoms(use_true_random=False),
)
def test_no_prompt_is_on_both_sides_and_position_does_not_matter(
    numbers: list[int], seed: int, cut: int, mix: Any
) -> None:
    rows = rows_of([f"prompt {n}" for n in [*range(31), *numbers]])
    train, held_out = split_by_prompt(rows, 0.4, seed)
    assert not {row.prompt for row in train} & {row.prompt for row in held_out}
    assert sorted([*train, *held_out], key=lambda row: int(row.completion)) == rows
    side = {row.completion: row in held_out for row in rows}
    fewer = rows[cut:]
    mix.shuffle(fewer)
    again = split_by_prompt([*fewer, *rows[:31]], 0.4, seed)[1]
    assert {row.completion for row in again} <= {name for name, held in side.items() if held}


def test_a_text_and_its_message_are_one_prompt() -> None:
    rows = [
        Supervised(prompt=prompt, completion="c")
        for n in range(40)
        for prompt in (f"question {n}", f" question {n}\n", (user(f"question {n}"),))
    ]
    train, held_out = split_by_prompt(rows, 0.5, seed=1)
    assert len(train) % 3 == len(held_out) % 3 == 0


def test_the_share_is_about_what_was_asked_for_and_the_seed_matters() -> None:
    rows = rows_of([f"prompt {n}" for n in range(1000)])
    first, second = (split_by_prompt(rows, 0.2, seed)[1] for seed in (0, 1))
    # 1000 draws at 0.2: mean 200, deviation 12.6.
    assert 150 < len(first) < 250
    assert 150 < len(second) < 250
    assert first != second
    assert split_by_prompt(rows, 0.0, 0) == (rows, [])


def test_a_side_that_would_be_empty_is_refused() -> None:
    with pytest.raises(DataError, match="of 1 different prompts none would be held out"):
        split_by_prompt(rows_of(["p", "p"]), 1e-9, 0)
    with pytest.raises(DataError, match="all would be held out"):
        split_by_prompt(rows_of(["p"]), 1 - 1e-9, 0)


def test_a_side_that_need_not_be_there_is_left_out() -> None:
    rows = rows_of(["p", "p"])
    assert split_by_prompt(rows, 1e-9, 0, needed=False) == (rows, [])
    assert split_by_prompt(rows, 1 - 1e-9, 0, needed=False) == (rows, [])


def test_a_margin_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f'{{"prompt": "p", "chosen": "a", "rejected": "b", "margin": {10**400}}}')
    with pytest.raises(DataError, match="row 1: margin must be a number"):
        read_pairs(str(source))
