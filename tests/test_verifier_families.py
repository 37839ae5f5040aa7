"""Verdicts of the small families: choices, tags, patterns, JSON, shaping, and the partial credit of generated tasks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import verify
from headway.verifiers.verdict import Item

CITIES = {"choices": ["Rome", "Oslo", "Paris", "St. Louis"]}


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("C", r"\boxed{C}", 1),
        ("(C)", r"\boxed{c}", 1),
        (r"\text{(C)}", r"So it is \boxed{\textbf{(C)}\ 12}", 1),
        ("C. Paris", r"\boxed{(C) Paris}", 1),
        (r"the second, so \boxed{B}", "B", 1),
        ("C", "The answer is C", 1),
        ("C", "The answer is (C).\nIt has the most letters.", 1),
        ("C", "**Answer:** C", 1),
        ("C", "Answer:\n\nC", 1),
        ("C", "#### C", 1),
        ("C", "The correct option is **C**, because A and B are too small.", 1),
        ("C", "The answer is C, not B.", 1),
        ("C", "The answer is C. A is too small.", 1),
        ("C", "The answer is most likely C.", 1),
        ("C", "A is too small.\n\n**C. Paris**\n\nIt lies on the Seine.", 1),
        ("C", "I choose\n(C)", 1),
        ("C", "Rome fell first. So C.", 1),
        ("C", "I would go with C", 1),
        ("C", "It's C.", 1),
        ("C", "option c is the right one", 1),
        ("A", "A is right", 1),
        ("C", "<think>A or B?</think><answer>C</answer>", 1),
        ("C", "<answer>\nThe answer is C.\n</answer>", 1),
        ("C", "<answer>I think it is \\boxed{C}</answer>", 1),
        ("C", "A? B? <think>D</think> C", 1),
        ("B", r"\boxed{C}", 0),
        ("C", r"\boxed{ABC}", 0),
        ("C", r"\boxed{Cat}", 0),
        ("C", "Vitamin C", 0),
        ("C", "It is 25 °C", 0),
        ("A", "A dog barked at the mailman", 0),
        ("I", "I do not know", 0),
        ("C", "", 0),
        ("C", "<think>C", 0),
        ("C", r"\boxed{C} or maybe \boxed{", 0),
        ("C", "<answer>C", 0),
        ("C", "The answer is not C.", 0),
        ("C", "C is wrong", 0),
        ("A", "A is wrong, so C", 0),
        ("C", "A is wrong, so C", 0),
        ("C", "A is wrong, so the answer is C", 1),
        ("A", "The answer is A. Wait, no, it is C.", 0),
        ("D", "(A) too big\n(B) too small\n(C) just right\n(D) too red", 0),
        ("C", "**A** is too big.\n**C** is just right.", 0),
    ],
)
def test_choice_by_letter(gold: str, response: str, score: float) -> None:
    assert verify("choice", gold, response).score == score


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{A, B, C, D}",
        r"\boxed{A \text{ or } C}",
        r"\boxed{A} or \boxed{C}",
        r"\boxed{ABC, C, A}",
        "The answers are A and C.",
        "The answer is (A) or (C)",
        "A B C D",
        "A/C",
        "The answer is A. Rome, C. Paris",
        "<answer>(A) (B) (C) (D)</answer>",
        "Both B and C",
    ],
)
def test_several_options_are_ambiguous(response: str) -> None:
    for gold in "ABCD":
        assert verify("choice", gold, response).reason == "ambiguous"


@pytest.mark.parametrize(
    ("gold", "response", "score", "reason"),
    [
        ("C", r"\boxed{\text{Paris}}", 1, "correct"),
        ("Paris", r"\boxed{C}", 1, "correct"),
        ("C", "The answer is paris.", 1, "correct"),
        ("C", "<answer>Paris</answer>", 1, "correct"),
        ("D", "The answer is D. St. Louis.", 1, "correct"),
        ("D", "The answer is St. Louis.", 1, "correct"),
        ("C", "(C) Paris", 1, "correct"),
        ("C", "(C) Rome", 0, "ambiguous"),
        ("A", "(C) Rome", 0, "ambiguous"),
        ("C", "The answer is C. Rome", 0, "ambiguous"),
        ("C", "Answer: C (Rome)", 0, "ambiguous"),
        ("C", "Answer: Rome (C)", 0, "ambiguous"),
        ("C", "Answer: Paris (C)", 1, "correct"),
        ("C", "C. Paris\n\nIt is the only one on the Seine; Rome is on the Tiber.", 1, "correct"),
        ("C", "C. Paris\n\nWait, which river was it?", 0, "no_answer"),
        ("C", r"\boxed{Paris, Oslo}", 0, "wrong"),
        ("C", r"\boxed{Paris Hilton}", 0, "wrong"),
        ("C", r"\boxed{E}", 0, "wrong"),
        ("C", "A. Rome\nB. Oslo\nC. Paris", 0, "ambiguous"),
    ],
)
def test_choice_by_text(gold: str, response: str, score: float, reason: str) -> None:
    verdict = verify("choice", gold, response, CITIES)
    assert (verdict.score, verdict.reason) == (score, reason)


def test_an_options_text_may_name_letters() -> None:
    context = {"choices": {"A": "17", "B": "4", "C": "Both A and B", "D": "None of the above", "E": None}}
    assert verify("choice", "C", "The answer is Both A and B.", context).score == 1
    assert verify("choice", "D", r"\boxed{None of the above}", context).score == 1
    assert verify("choice", "B", r"\boxed{4}", context).extracted == "B"
    assert verify("choice", "x", r"\boxed{x}", {"choices": ["y", "x"]}).extracted == "B"


@pytest.mark.parametrize(
    ("gold", "context"),
    [
        ("", {}),
        ("Paris", {}),
        ("A, C", {}),
        (2, {}),
        (None, {}),
        ("E", CITIES),
        ("Bonn", CITIES),
        ("C. Rome", CITIES),
        ("A", {"choices": []}),
        ("A", {"choices": "Rome or Oslo"}),
        ("A", {"choices": {"first": "Rome", "second": "Oslo"}}),
        ("A", {"choices": ["Rome", ["Oslo"]]}),
        ("Rome", {"choices": ["Rome", "Rome"]}),
    ],
)
def test_a_gold_that_is_no_option_is_refused(gold: Any, context: Mapping[str, Any]) -> None:
    with pytest.raises(DataError, match=r"gold|choices"):
        verify("choice", gold, r"\boxed{A}", context)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", "correct"),
        ("  <think>a < b, <i>b</i></think><answer>4</answer> \n", "correct"),
        ("<think>a</think><answer>4</answer> junk", "text_outside"),
        ("Well, <think>a</think><answer>4</answer>", "text_outside"),
        ("<think>a</think> so <answer>4</answer>", "text_outside"),
        ("<think>a</think><answer>4", "tag_unclosed"),
        ("<think>a<answer>4</answer>", "tag_nested"),
        ("<think>a</think>", "tag_missing"),
        ("4", "tag_missing"),
        ("", "tag_missing"),
        ("<think>a</think><think>b</think><answer>4</answer>", "tag_repeated"),
        ("<think>a<think>b</think></think><answer>4</answer>", "tag_repeated"),
        ("<think>a</think><answer>3</answer><answer>4</answer>", "tag_repeated"),
        ("<answer>4</answer><think>a</think>", "tag_order"),
        ("a</think><answer>4</answer>", "text_outside"),
        ("</think><answer>4</answer>", "tag_order"),
        ("<think>a</answer><answer>4</answer>", "tag_order"),
        ("<think>\n</think><answer>4</answer>", "tag_empty"),
        ("<think>a</think><answer></answer>", "tag_empty"),
        ("<THINK>a</THINK><answer>4</answer>", "text_outside"),
    ],
)
def test_sections_in_order_each_once(response: str, reason: str) -> None:
    verdict = verify("tags", None, response)
    assert (verdict.score, verdict.reason) == (float(reason == "correct"), reason)
    assert verdict.extracted == ("4" if reason == "correct" else None)


def test_sections_of_other_names_and_one_that_the_prompt_opened() -> None:
    assert verify("tags", None, "<a>1</a><b-2>2</b-2>", {"tags": ["a", "b-2"]}).score == 1
    opened = {"opened": "think"}
    assert verify("tags", None, "a\n</think>\n<answer>4</answer>", opened).score == 1
    assert verify("tags", None, "<think>a</think><answer>4</answer>", opened).reason == "tag_repeated"
    assert verify("tags", None, "</think><answer>4</answer>", opened).reason == "tag_empty"
    for bad in (
        {"tags": []},
        {"tags": "think"},
        {"tags": ["a", "a"]},
        {"tags": ["a b"]},
        {"opened": "answer"},
    ):
        with pytest.raises(DataError, match=r"tags|opened"):
            verify("tags", None, "", bad)


@pytest.mark.parametrize(
    ("context", "response", "score"),
    [
        ({"pattern": r"\d{4}-\d\d-\d\d"}, r"\boxed{2024-02-29}", 1),
        ({"pattern": r"\d{4}-\d\d-\d\d"}, r"\boxed{on 2024-02-29}", 0),
        ({"pattern": r"\d{4}-\d\d-\d\d", "match": "search"}, "The answer is on 2024-02-29", 1),
        ({"pattern": "a|b", "match": "full"}, "<think>a</think>c\nb", 1),
        ({"pattern": "b.*c"}, "<answer>b\nc</answer>", 0),
        ({"pattern": "b.*c", "dotall": True}, "<answer>b\nc</answer>", 1),
        ({"pattern": "wait", "on": "response", "match": "search"}, "<think>wait</think>5", 1),
        ({"pattern": "wait", "on": "answer", "match": "search"}, "<think>wait</think>5", 0),
        ({"pattern": "a", "on": "response"}, "a\n\n", 1),
        ({"pattern": "a"}, "<think>a", 0),
        ({"pattern": "a"}, "<answer>a", 0),
        ({}, "gold+", 0),
        ({}, "goldddd", 1),
    ],
)
def test_pattern(context: dict[str, Any], response: str, score: float) -> None:
    assert verify("regex", "gold+", response, context).score == score


@pytest.mark.parametrize(
    ("gold", "context", "named"),
    [
        ("(", {}, "gold"),
        ("", {}, "gold"),
        (None, {}, "gold"),
        ("a", {"pattern": "*"}, "pattern"),
        ("a", {"pattern": "a{99999999999999999999}"}, "pattern"),
        ("a", {"match": "prefix"}, "match"),
        ("a", {"on": "prompt"}, "on"),
        ("a", {"dotall": "yes"}, "dotall"),
    ],
)
def test_a_pattern_that_is_none_is_refused(gold: Any, context: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=f"^{named} "):
        verify("regex", gold, "a", context)


def test_a_pattern_that_takes_for_ever_ends_with_the_pools_limit() -> None:
    items = [
        Item("regex", "(a+)+b", "a" * 40),
        Item("regex", "(a+)+b", "aab"),
        Item("json_schema", None, '"' + "a" * 40 + '"', {"schema": {"pattern": "^(a+)+b$"}}),
    ]
    with VerifierPool(1, 1.0, 512) as pool:
        verdicts = pool.score(items)
    assert [(verdict.score, verdict.reason) for verdict in verdicts] == [
        (0.0, "timeout"),
        (1.0, "correct"),
        (0.0, "timeout"),
    ]


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ('{"x": 1}', "correct"),
        ('{"x": 1.0}', "correct"),
        ('So:\n```json\n{"x": 1}\n```\nas [asked].', "correct"),
        ('First [1, 2), then {"x": 2}, at last {"x": 1}. {Done}', "correct"),
        ('<think>{"x": 2}</think> <answer>{"x": 1}</answer>', "correct"),
        ('```\n{"x": 1}\n```', "correct"),
        ('```json\n{"x": 2}\n```\n```json\n{"x": 1}\n```', "correct"),
        ('{"y": "}", "x": 1}', "wrong"),
        ('{"x": 2}', "wrong"),
        ('{"x": 1} {"x": 2}', "wrong"),
        ('{"x": true}', "schema"),
        ('{"y": 1}', "schema"),
        ("[1]", "schema"),
        ('{"x": 2, "x": 1}', "malformed"),
        ('{"x": 1, "y": NaN}', "malformed"),
        ('{"x": 1, "y": 1e999}', "malformed"),
        ('```json\n{"x": 1,}\n```', "malformed"),
        ('{"x": 1}\n```json\n{"x": 1', "no_answer"),
        ('{"x": 1} and [{"x": 1}, {"x":', "no_answer"),
        ('<think>{"x": 1}', "no_answer"),
        ('<answer>{"x": 1}', "no_answer"),
        ("x = 1", "no_answer"),
        ("", "no_answer"),
        ("[" * 100_000 + "]" * 100_000, "too_large"),
        ('{"x": ' + "1" * 5000 + "}", "malformed"),
    ],
)
def test_json_against_schema_and_gold(response: str, reason: str) -> None:
    started = time.perf_counter()
    for gold in ('{"x": 1}', {"x": 1}):
        verdict = verify("json_schema", gold, response, {"schema": POINT})
        assert (verdict.score, verdict.reason) == (float(reason == "correct"), reason)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("[1, 2.0]", "[1.0, 2]", 1),
        ("[1]", "[true]", 0),
        ("[false]", "[0]", 0),
        ("[1, 2]", "[2, 1]", 0),
        ('{"a": 1, "b": null}', '{"b": null, "a": 1}', 1),
        ('{"a": 1, "b": null}', '{"a": 1}', 0),
        ("9007199254740993", "9007199254740992.0", 0),
        ("true", "true", 1),
        ('"5"', "5", 0),
    ],
)
def test_json_is_compared_as_data(gold: str, response: str, score: float) -> None:
    assert verify("json_schema", gold, response).score == score


@pytest.mark.parametrize(
    ("gold", "context"),
    [
        (None, {}),
        ("{", {}),
        ('{"a": NaN}', {}),
        (float("nan"), {"schema": {"type": "number", "minimum": 0}}),
        ('{"x": "1"}', {"schema": POINT}),
        (None, {"schema": {"type": "objekt"}}),
        (None, {"schema": "{"}),
        (None, {"schema": 5}),
        (None, {"schema": {"$schema": []}}),
        (None, {"schema": {"pattern": "("}}),
        (None, {"schema": {"$ref": "#/$defs/missing"}}),
        (None, {"schema": {"properties": {"y": {"$ref": "http://127.0.0.1:9/schema.json"}}}}),
        (None, {"schema": {"properties": {"y": {"$ref": "file:///etc/passwd"}}}}),
        (None, {"schema": {"$schema": "http://127.0.0.1:9/dialect"}}),
        ("1", {"schema": {"$ref": "#"}}),
    ],
)
def test_a_schema_or_gold_that_cannot_be_used_is_refused(gold: Any, context: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"schema|gold"):
        verify("json_schema", gold, "{}", context)


def test_schemas_may_be_text_and_refer_to_themselves_and_to_published_ones() -> None:
    tree = '{"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}'
    assert verify("json_schema", None, "[[], [[]]]", {"schema": tree}).score == 1
    assert verify("json_schema", None, "[[], [1]]", {"schema": tree}).reason == "schema"
    meta = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert verify("json_schema", None, '{"type": "string"}', {"schema": meta}).score == 1


def test_json_in_a_million_characters_is_found_in_time() -> None:
    started = time.perf_counter()
    for text in (
        "[" * 10**6,
        '["' * 500_000,
        "{'" * 500_000,
        "[1, " * 250_000,
        '{"a":' * 200_000,
        "``` " * 250_000,
    ):
        assert verify("json_schema", "1", text).score == 0
    assert time.perf_counter() - started < 5.0


@pytest.mark.parametrize(
    ("words", "score", "reason"),
    [(2, 0, "too_short"), (3, 0.5, "too_short"), (4, 1, "correct"), (6, 1, "correct"), (7, 0.5, "too_long")],
)
def test_length_falls_over_the_slack(words: int, score: float, reason: str) -> None:
    response = "<think>not counted</think> " + "word " * words
    verdict = verify("length", None, response, {"min": 4, "max": 6, "slack": 2})
    assert (verdict.score, verdict.reason, verdict.extracted) == (score, reason, f"{words} words")


def test_length_of_characters_and_of_unfinished_reasoning() -> None:
    assert verify("length", None, " abc\n", {"max": 3, "unit": "characters"}).score == 1
    assert verify("length", None, "abcd", {"max": 3, "unit": "characters"}).score == 0
    assert verify("length", None, "<think>a b", {"max": 9}).reason == "no_answer"
    for bad in (
        {},
        {"min": 3, "max": 2},
        {"max": -1},
        {"max": "9"},
        {"max": True},
        {"max": float("nan")},
        {"max": 9, "slack": 10**400},
        {"max": 9, "unit": "tokens"},
    ):
        with pytest.raises(DataError, match=r"min|max|slack|unit"):
            verify("length", None, "", bad)


@pytest.mark.parametrize(
    ("response", "context", "score"),
    [
        ("a b c d e f g", {}, 1.0),
        ("a b a b a b a b a b a", {}, 0.25),  # 8 4-grams, 2 different ones
        ("a b a b", {"n": 2}, 2 / 3),
        ("a b a b", {"n": 2, "cap": 1 / 2}, 1 / 3),
        ("a b a b", {"n": 2, "cap": 0.1}, 0.0),
        ("<think>a a a a a</think>", {"n": 1}, 0.6),  # "<think>a", "a", "a</think>": 3 of 5
        ("哈哈哈哈哈", {"n": 2, "unit": "characters"}, 0.25),
        ("a b c", {}, 1.0),
        ("", {}, 1.0),
    ],
)
def test_repetition(response: str, context: dict[str, Any], score: float) -> None:
    assert verify("repetition", None, response, context).score == pytest.approx(score)


def test_repetition_in_a_million_characters_takes_bounded_time() -> None:
    started = time.perf_counter()
    assert verify("repetition", None, "a " * 500_000).score == pytest.approx(0, abs=1e-5)
    assert verify("repetition", None, "ab" * 10**6, {"n": 32, "unit": "characters"}).score == pytest.approx(
        0, abs=1e-5
    )
    assert time.perf_counter() - started < 5.0
    for bad in ({"n": 0}, {"n": 33}, {"n": 2.0}, {"cap": 0}, {"cap": 2}, {"unit": "tokens"}):
        with pytest.raises(DataError, match=r"n |cap|unit"):
            verify("repetition", None, "", bad)


def gym(task: str, response: str | None = None, **context: Any) -> Any:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=2, seed=3)[1]
    place = {"task": task, "size": 2, "seed": 3, "params": {}, "index": 1}
    answer = entry["answer"] if response is None else response
    return verify("reasoning_gym", entry["answer"], f"<answer>{answer}</answer>", place | context)


def test_partial_credit_of_a_generated_task_by_choice() -> None:
    import reasoning_gym

    gold = reasoning_gym.create_dataset("spiral_matrix", size=2, seed=3)[1]["answer"]
    as_list = "[" + ", ".join(gold.split()) + "]"
    assert gym("spiral_matrix", as_list).score == 0
    part = gym("spiral_matrix", as_list, partial=True)
    assert (part.score, part.reason, part.extracted) == (0.1, "partial", as_list)
    assert gym("spiral_matrix", partial=True).reason == "correct"
    assert gym("spiral_matrix", "?", partial=True).reason == "wrong"
    assert gym("spiral_matrix", "__import__('os')", partial=True).reason == "code"
    with pytest.raises(DataError, match="partial"):
        gym("spiral_matrix", partial="yes")


NO_SINGLE_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose answer is None: any of several solutions is right."""
NEEDS_PARAMS = {"composite"}
"""Mixes other datasets, given as objects that no dataset row can hold."""


@pytest.mark.parametrize("part", range(8))
def test_own_answers_of_generated_tasks_score_1(part: int) -> None:
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) >= NO_SINGLE_GOLD | NEEDS_PARAMS
    for task in sorted(set(DATASETS) - NO_SINGLE_GOLD - NEEDS_PARAMS)[part::8]:
        assert gym(task).score == 1, task
    for task in sorted(NO_SINGLE_GOLD)[part::8]:
        assert gym(task, "None").score == 0, task


def test_a_dataset_that_mixes_others_is_refused() -> None:
    context = {
        "task": "composite",
        "size": 2,
        "seed": 3,
        "params": {"datasets": [{"name": "n_queens", "weight": 1, "config": {}}]},
        "index": 1,
    }
    with pytest.raises(DataError, match="no reasoning-gym entry"):
        verify("reasoning_gym", "", "<answer>1</answer>", context)


KINDS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "choice": ("C", CITIES),
    "tags": (None, {}),
    "regex": (r"[a-c\d]+", {}),
    "json_schema": ('{"x": 1}', {"schema": POINT}),
    "length": (None, {"min": 3, "max": 5, "slack": 3}),
    "repetition": (None, {"n": 2}),
}
_PIECES = st.lists(
    st.sampled_from([
        "<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "{", "[", "]", '"x"', ":", "1", ",", "A", "C",
        "(C)", "Paris", " ", "\n", "**", "The answer is", "so", "not", "```json\n", "```", ".", "$", "wait", "\u00a0",
    ]),
    max_size=20,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(response=st.one_of(st.text(max_size=100), _PIECES), end=st.sampled_from(["\n", "  ", "\t\n \n"]))
def test_no_response_raises_and_white_space_at_the_end_changes_nothing(response: str, end: str) -> None:
    for kind, (gold, context) in KINDS.items():
        verdict = verify(kind, gold, response, context)
        assert verdict.score is not None
        assert 0 <= verdict.score <= 1
        assert verdict.reason != "exception"
        assert verify(kind, gold, response + end, context) == verdict


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
_KEYS = [
    "choices",
    "tags",
    "opened",
    "pattern",
    "match",
    "on",
    "dotall",
    "schema",
    "min",
    "max",
    "slack",
    "unit",
    "n",
]


@settings(max_examples=300, deadline=None)
@given(
    gold=_VALUES,
    context=st.dictionaries(st.sampled_from([*_KEYS, "cap"]), _VALUES, max_size=4),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_no_gold_or_context_is_the_responses_fault(gold: Any, context: dict[str, Any], kind: str) -> None:
    with contextlib.suppress(DataError):
        assert verify(kind, gold, "<think>a</think> [1, 2] C", context).reason != "exception"


def test_verdicts_are_the_same_in_a_thread() -> None:
    responses = ["<think>a</think><answer>C</answer>", 'b {"x": 1}', r"\boxed{b}", "Paris Paris"]

    def verdicts() -> list[Any]:
        return [
            verify(kind, gold, text, context) for kind, (gold, context) in KINDS.items() for text in responses
        ]

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(verdicts()))
    thread.start()
    thread.join(30)
    assert found == verdicts()
