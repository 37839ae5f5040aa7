"""Verdicts on single responses. Most rows restate faults that public verifiers were reported to have."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.verifiers import gym
from headway.verifiers.extract import boxed, final_answer
from headway.verifiers.numbers import last_number, parse_number
from headway.verifiers.registry import VERIFIERS, preload, verify

# (gold, response, score)
REPORTED = {
    "nested braces": (r"\frac{7}{12}", r"So the ratio is \boxed{\dfrac{7}{12}}.", 1),
    "an earlier guess": ("17", r"I first thought \boxed{12}. Rechecking, it is \boxed{17}.", 1),
    "an earlier placeholder": ("13", r"Format: \boxed{answer}. So \boxed{13}", 1),
    "the same box twice": ("605", r"Therefore \boxed{605}. To restate: **Final Answer** \boxed{605}", 1),
    "unfinished last box": ("3", r"earlier \boxed{3}. Final: \boxed{", 0),
    "empty last box": ("3", r"earlier \boxed{3}. Final: \boxed{}", 0),
    "candidates listed": ("42", r"Either \boxed{40}, \boxed{41}, \boxed{42}, or \boxed{43}.", 0),
    "candidates listed, last right": ("43", r"Either \boxed{40}, \boxed{41}, \boxed{42}, or \boxed{43}.", 0),
    "one solution too many": ("5", r"\boxed{x=5 \text{ or } x=-1}", 0),
    "one element missing": (r"\{2, 5\}", r"\boxed{2}", 0),
    "set order": (r"\{1, 2, 3\}", r"\boxed{\{3, 1, 2\}}", 1),
    "tuple order": ("(1, 2, 3)", r"\boxed{(3, 1, 2)}", 0),
    "interval and inequality": (r"(-\infty, 4]", r"\boxed{x \le 4}", 1),
    "inequality and interval": (r"x \le 4", r"\boxed{(-\infty, 4]}", 1),
    "thin spaces group digits": ("1234567", r"\boxed{1\,234\,567}", 1),
    "narrow no-break spaces group digits": ("1234567", "\\boxed{1\u202f234\u202f567}", 1),
    "a pair is no number": ("(1,234)", r"\boxed{1234}", 0),
    "Unicode minus": ("-8", "The sum is \\boxed{\u22128}.", 1),
    "full-width digits": ("42", "\\boxed{\uff14\uff12}", 1),
    "markdown bold": ("11", "After summing, the count is **11**", 1),
    "percent as a word": (r"35\%", r"\boxed{35 \text{ percent}}", 1),
    "percent beside a bare number": ("35", r"\boxed{35\%}", 1),
    "percent beside its fraction": ("0.35", r"\boxed{35\%}", 1),
    "unit in the answer only": ("250", r"\boxed{250\text{ cm}^2}", 1),
    "text behind the first number": ("12", r"\boxed{12\text{ apples and }5\text{ pears}}", 0),
    "tiny numbers": (r"\frac{1}{2^{90}}", r"\boxed{\frac{1}{2^{89}}}", 0),
    "numbers that underflow": (r"\frac{1}{2030!}", r"\boxed{\frac{1}{2032!}}", 0),
    "malformed root": ("5", r"\boxed{5\sqrt(3)}", 0),
    "rearranged line": ("2x - y + 4 = 0", r"\boxed{y = 2x + 4}", 1),
    "two different ellipses": ("x^2/9 + y^2/4 = 1", r"\boxed{x^2/36 + y^2/16 = 1}", 0),
    "number as text": (r"\text{19}", r"\boxed{19}", 1),
    "mixed number": (r"11\frac{5}{6}", r"\boxed{11 5/6}", 1),
    "base as subscript": ("1011_2", r"\boxed{1011}", 0),
    "repeating decimal": (r"\frac{1}{3}", r"\boxed{0.\overline{3}}", 1),
    "scientific notation": ("1.5e3", r"\boxed{1500}", 1),
    "guess in unfinished reasoning": (r"\frac{1}{4}", r"<think> try \boxed{\frac{1}{4}} maybe", 0),
    "no answer is not zero": ("0", "I am not sure.", 0),
    "zero is a gold": ("0", r"\boxed{0}", 1),
    "choice in brackets": (r"\text{(C)}", r"\boxed{C}", 1),
    "all choices": ("C", r"\boxed{A, B, C, D}", 0),
    "clock times": ("12:00", r"\boxed{1:00}", 0),
    "rounded decimal": (r"\frac{1}{3}", r"\boxed{0.333}", 0),
    "ratio up to scale": ("3:5", r"\boxed{6:10}", 1),
    "degrees and radians": (r"\frac{\pi}{6}", r"\boxed{30^\circ}", 1),
    "approximately": ("50", r"\boxed{\approx 50}", 1),
}

MORE = {
    "reasoning ends, then the box": ("6", r"<think>\boxed{7}</think> so \boxed{6}", 1),
    "reasoning opened by the template": ("6", r"hm, \boxed{7}</think> so \boxed{6}", 1),
    "two thoughts, the second unfinished": ("6", r"<think>a</think>\boxed{6}<think> or", 0),
    "box in a box": ("6", r"\boxed{\boxed{6}}", 1),
    "boxes that make up a list": ("1, 2", r"\boxed{1} and \boxed{2}", 1),
    "gold with a worked solution": (r"... so x is \boxed{8}", r"\boxed{8}", 1),
    "gold of a grade-school problem": ("2 * 4 = 8\n#### 8", r"\boxed{8}", 1),
    "hashes": ("8", "2 * 4\n#### 8", 1),
    "stated": ("8", "The answer is $8$.\nGoodbye", 1),
    "stated, several numbers": ("8", "So the final answer is: 8, because 2 * 4 = 8.", 1),
    "stated in bold": ("-8", "**Answer:** -8", 1),
    "the same value in two forms": ("0.75", r"\boxed{\frac34 \text{ or } 0.75}", 1),
    "exact and rounded": (r"\frac{37}{3}", r"\boxed{\frac{37}{3} \approx 12.33}", 1),
    "unit in the gold only": (r"250\text{ cm}^2", r"\boxed{250}", 1),
    "another unit": (r"250\text{ cm}^2", r"\boxed{250\text{ m}^2}", 0),
    "the same unit in words": (r"250\text{ cm}^2", r"\boxed{250 \text{ square centimeters}}", 1),
    "hours are no minutes": ("12 hours", r"\boxed{12\text{ minutes}}", 0),
    "rate in words": (r"60 \text{ km/h}", r"\boxed{60 \text{ kilometers per hour}}", 1),
    "apples are no pears": (r"12\text{ apples}", r"\boxed{12\text{ pears}}", 0),
    "unit at the digits": (r"50\text{ m}", r"\boxed{50m}", 1),
    "named point": ("(2,-1)", r"\boxed{(x,y)=(2,-1)}", 1),
    "named angle": (r"30^\circ", r"\boxed{\angle ABC = 30^\circ}", 1),
    "integrals": (r"\int_0^1 x^2 dx", r"\boxed{\int_0^1 x\cdot x\, dx}", 1),
    "another integral": (r"\int_0^1 x^2 dx", r"\boxed{\int_0^1 x\, dx}", 0),
    "inequality in two unknowns": ("x+y>2", r"\boxed{2<y+x}", 1),
    "a factor is no unit": ("2", r"\boxed{2s}", 0),
    "an open answer": ("5", r"\boxed{5 \text{ or more}}", 0),
    "millions": (r"5 \text{ million}", r"\boxed{5,000,000}", 1),
    "money": (r"\$5.50", r"\boxed{5.5}", 1),
    "another currency": ("£5", r"\boxed{€5}", 0),
    "percent off by a hundred": (r"35\%", r"\boxed{0.0035}", 0),
    "union in another order": (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{x>3 \text{ or } x<-1}", 1),
    "open end": ("[0,1)", r"\boxed{0 < x < 1}", 0),
    "all but one number": (r"x \ne 3", r"\boxed{(-\infty,3)\cup(3,\infty)}", 1),
    "closed is not open": ("[1,2]", r"\boxed{(1,2)}", 0),
    "bound is no set": ("2", r"\boxed{x>2}", 0),
    "a set is no tuple": ("(1,2)", r"\boxed{\{1,2\}}", 0),
    "empty set": (r"\{\}", r"\boxed{\varnothing}", 1),
    "an empty set is no zero": ("0", r"\boxed{\emptyset}", 0),
    "infinity has a sign": (r"\infty", r"\boxed{-\infty}", 0),
    "plus-minus": (r"1 \pm \sqrt{2}", r"\boxed{1-\sqrt2, 1+\sqrt2}", 1),
    "unknowns of a system": ("x=2, y=3", r"\boxed{(2,3)}", 1),
    "definition": ("5", r"\boxed{x = 5}", 1),
    "another unknown": ("x = 5", r"\boxed{y = 5}", 0),
    "false chain": ("8", r"\boxed{x = 7 = 8}", 0),
    "scaled equation": (r"y=\frac{1}{2}x+3", r"\boxed{2y=x+6}", 1),
    "polynomial": ("x^3 - 2x", r"\boxed{x(x^2-2)}", 1),
    "trigonometric identity": (r"2\sin x\cos x", r"\boxed{\sin 2x}", 1),
    "root of a square": (r"\sqrt{x^2}", r"\boxed{x}", 0),
    "surd": (r"\sqrt{50}", r"\boxed{5\sqrt{2}}", 1),
    "cancelled surds": ("0", r"\boxed{\sqrt2\sqrt3-\sqrt6}", 1),
    "change of base": (r"\log_2 x", r"\boxed{\frac{\ln x}{\ln 2}}", 1),
    "mixed number in a product": (r"-\frac{5\pi}{2}", r"\boxed{-2\frac{1}{2}\pi}", 1),
    "brackets make a product": ("1", r"\boxed{(2)\frac{1}{2}}", 1),
    "complex": ("2+3i", r"\boxed{3i+2}", 1),
    "factorials": ("(n+1)!", r"\boxed{(n+1) n!}", 1),
    "large power": ("2^{100}", r"\boxed{1267650600228229401496703205376}", 1),
    "large power, rounded": ("2^{100}", r"\boxed{1.2676506e30}", 0),
    "matrix": (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\boxed{\begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}}",
        1,
    ),
    "column vector": (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{(1,2)}", 1),
    "transposed matrix": (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}",
        0,
    ),
    "words": ("Evelyn", r"\boxed{\text{evelyn}}", 1),
    "anagram": ("evil", r"\boxed{live}", 0),
    "choice with its value": ("A", r"\boxed{\textbf{(A)}\ 12}", 1),
    "morning": ("10:30 a.m.", r"\boxed{10:30 AM}", 1),
    "evening": ("10:30 p.m.", r"\boxed{10:30 AM}", 0),
    "a sum left to do": ("55", r"\boxed{\sum_{k=1}^{10} k}", 0),
    "the same notation": (r"A \cup B", r"\boxed{A\cup B}", 1),
}


@pytest.mark.parametrize(
    ("gold", "response", "score"), [pytest.param(*row, id=name) for name, row in REPORTED.items()]
)
def test_reported_answer_pairs(gold: str, response: str, score: float) -> None:
    assert verify("math", gold, response, {}).score == score


@pytest.mark.parametrize(
    ("gold", "response", "score"), [pytest.param(*row, id=name) for name, row in MORE.items()]
)
def test_further_answer_pairs(gold: str, response: str, score: float) -> None:
    assert verify("math", gold, response, {}).score == score


def test_verdict_does_not_depend_on_trailing_white_space() -> None:
    for gold, response, _ in [*REPORTED.values(), *MORE.values()]:
        bare = verify("math", gold, response, {})
        assert all(verify("math", gold, response + end, {}) == bare for end in ("\n", "  ", "\t\n \n"))


def test_verdict_is_the_same_in_a_thread_and_in_a_task() -> None:
    def scores() -> list[float | None]:
        return [verify("math", gold, response, {}).score for gold, response, _ in REPORTED.values()]

    expected = [float(score) for _, _, score in REPORTED.values()]
    in_thread: list[float | None] = []
    thread = threading.Thread(target=lambda: in_thread.extend(scores()))
    thread.start()
    thread.join(60)

    async def in_task() -> list[float | None]:
        return await asyncio.create_task(asyncio.to_thread(scores))

    assert in_thread == expected
    assert asyncio.run(in_task()) == expected


_LATEX = st.lists(
    st.sampled_from(
        [
            r"\boxed{",
            r"}",
            r"{",
            r"\frac",
            r"\sqrt",
            r"1",
            r"2",
            r"10",
            r"^",
            r"_",
            r"(",
            r")",
            r"[",
            r"]",
            r"x",
            r"\pi",
            r"+",
            r"-",
            r"*",
            r"/",
            r"=",
            r"<",
            r"\le",
            r"\cup",
            r"\text{",
            r"or",
            r",",
            r":",
            r"%",
            r"\%",
            r"!",
            r"\{",
            r"\}",
            r"$",
            r"\infty",
            r"\pm",
            r"cm",
            r"\sin",
            r"\log",
            r"e",
            r"|",
            r"\begin{pmatrix}",
            r"\end{pmatrix}",
            r"&",
            r"\\",
            r"\int",
            r"\overline",
            r"0.",
            r"**",
            r"<think>",
            r"</think>",
            r"####",
            r"is",
        ]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(response=st.one_of(st.text(max_size=200), _LATEX, _LATEX.map(lambda text: f"\\boxed{{{text}}}")))
def test_no_response_raises(response: str) -> None:
    for name, gold in (
        ("math", r"\frac{1}{2}"),
        ("math", "(1,2)"),
        ("math", "x=2"),
        ("numeric", "5"),
        ("exact", "b"),
    ):
        verdict = verify(name, gold, response, {})
        assert verdict.score in (0.0, 1.0)
        assert verdict.reason != "exception"


@settings(max_examples=200, deadline=None)
@given(number=st.integers(-(10**12), 10**12), decimals=st.integers(0, 6))
def test_a_decimal_is_its_fraction_and_no_other(number: int, decimals: int) -> None:
    sign, digits = "-" * (number < 0), str(abs(number)).zfill(decimals + 1)
    written = f"{sign}{digits[:-decimals]}.{digits[-decimals:]}" if decimals else f"{sign}{digits}"
    gold = rf"\frac{{{number}}}{{{10**decimals}}}"
    assert verify("math", gold, rf"\boxed{{{written}}}", {}).score == 1
    assert verify("math", rf"\frac{{{number + 1}}}{{{10**decimals}}}", rf"\boxed{{{written}}}", {}).score == 0


_Sum = tuple[str, Fraction]


def _combined(parts: st.SearchStrategy[_Sum]) -> st.SearchStrategy[_Sum]:
    """LaTeX for an operation on two parts, with its value."""
    return st.one_of(
        st.tuples(parts, parts).map(lambda p: (f"({p[0][0]})+({p[1][0]})", p[0][1] + p[1][1])),
        st.tuples(parts, parts).map(lambda p: (f"{p[0][0]} - ({p[1][0]})", p[0][1] - p[1][1])),
        st.tuples(parts, parts).map(lambda p: (rf"({p[0][0]}) \cdot ({p[1][0]})", p[0][1] * p[1][1])),
        st.tuples(parts, parts).map(lambda p: (f"({p[0][0]})({p[1][0]})", p[0][1] * p[1][1])),
        st.tuples(parts, parts)
        .filter(lambda p: p[1][1] != 0)
        .map(lambda p: (rf"\frac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])),
        parts.map(lambda p: (f"({p[0]})^2", p[1] ** 2)),
        parts.map(lambda p: (rf"\sqrt{{({p[0]})^2}}", abs(p[1]))),
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.integers(-9, 99).map(lambda n: (str(n), Fraction(n))), _combined, max_leaves=8))
def test_arithmetic_is_exact(written_and_value: _Sum) -> None:
    written, value = written_and_value
    assert verify("math", f"{value}", rf"\boxed{{{written}}}", {}).score == 1
    assert verify("math", f"{value + Fraction(1, 10**30)}", rf"\boxed{{{written}}}", {}).score == 0


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "(10^{8})!",
        r"\sum_{k=1}^{10^{9}} \frac{1}{k^2+k!}",
        "{" * 3000 + "5" + "}" * 3000,
        "(" * 900 + "5" + ")" * 900,
        r"\frac{1}{" * 200 + "5" + "}" * 200,
        r"\frac" * 400 + "5",
        "+1" * 900,
        "n" + "!" * 900,
        r"\{" * 600 + "5" + r"\}" * 600,
        "1" * 5000,
        r"\exp(\exp(\exp(100)))",
        "10^{10^{10}}+" * 50 + "1",
    ],
    ids=lambda answer: answer[:20],
)
def test_huge_answers_are_wrong_at_once(answer: str) -> None:
    preload(["math"])
    started = time.perf_counter()
    verdict = verify("math", "5", f"\\boxed{{{answer}}}", {})
    assert verdict.score == 0
    assert verdict.reason in ("wrong", "too_large")
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "answer",
    [
        r"__import__('os').mkdir('FOLDER')*\pi",
        r"\begin{pmatrix}__import__('os').mkdir('FOLDER')\end{pmatrix}",
        r"\int __import__('os').mkdir('FOLDER') dx",
    ],
)
def test_no_answer_runs_as_code(answer: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    response = f"\\boxed{{{answer.replace('FOLDER', str(folder))}}}"
    for gold in ("5", r"\begin{pmatrix}5\end{pmatrix}", r"\int x dx"):
        assert verify("math", gold, response, {}).score == 0
    assert not folder.exists()
    assert verify("math", "5", r"\boxed{5}", {}).score == 1


def test_relative_tolerance_of_the_task() -> None:
    assert verify("math", r"\frac{1}{3}", r"\boxed{0.333}", {"relative_tolerance": 0.01}).score == 1
    assert verify("math", r"\frac{1}{3}", r"\boxed{0.32}", {"relative_tolerance": 0.01}).score == 0
    assert verify("math", r"10^{-30}", r"\boxed{2 \cdot 10^{-30}}", {"relative_tolerance": 0.01}).score == 0
    assert verify("numeric", "1000", "about 1009", {"relative_tolerance": 0.01}).score == 1
    with pytest.raises(DataError, match="relative_tolerance"):
        verify("math", "1", r"\boxed{2}", {"relative_tolerance": "much"})


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7 + 5 = 12.", 1),
        ("7 + 5 = **12**", 1),
        ("<think>maybe 13</think>12", 1),
        ("<think>12", 0),
        ("It is 12 and not 13", 0),
        ("12,000", 0),
        ("The total is $12.00", 1),
        ("\uff11\uff12", 1),
        ("24/2", 1),
        ("-12", 0),
        ("7 - 12", 1),
        ("none", 0),
        ("", 0),
    ],
)
def test_numeric_takes_the_last_number(response: str, score: float) -> None:
    assert verify("numeric", "12", response, {}).score == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = -3", "-3"),
        ("5 - 3", "3"),
        ("it lost -$1,234.50.", "-1,234.50"),
        ("250 cm^2", "250"),
        ("10^{-5}", "10"),
        ("H2O", None),
        ("= \u22124", "-4"),
        (r"so \frac{3}{4} of it", r"\frac{3}{4}"),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("text", ["", "x", "12,34", "1,23", "3/0", "1e99999", "5 6", "1.2.3", "--1"])
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("(C)", r"\boxed{C}", 1),
        ("C", "I choose\n(C)", 1),
        ("caf\u00e9", "The answer is cafe\u0301.", 1),
        ("New  York", r"\boxed{New York}", 1),
        ("New York", r"\boxed{new york}", 0),
        (7, r"\boxed{7}", 1),
        ("C", "<think>C", 0),
    ],
)
def test_exact(gold: Any, response: str, score: float) -> None:
    assert verify("exact", gold, response, {}).score == score


@pytest.mark.parametrize("name", ["exact", "numeric", "math"])
@pytest.mark.parametrize("gold", ["", "  ", r"so \boxed{", None, float("nan"), [5], {"answer": 5}])
def test_a_gold_without_an_answer_is_refused(name: str, gold: Any) -> None:
    with pytest.raises(DataError):
        verify(name, gold, r"\boxed{5}", {})


def test_an_unknown_verifier_is_refused() -> None:
    with pytest.raises(DataError, match="exact, numeric, math, reasoning_gym"):
        verify("maths", "5", "5", {})


@pytest.mark.parametrize("gold", [0, 0.0, "0"])
def test_falsy_golds_are_golds(gold: Any) -> None:
    assert verify("math", gold, r"\boxed{0}", {}).score == 1
    assert verify("math", gold, "I do not know", {}).reason == "no_answer"


def test_verdict_names_its_reason_and_the_whole_answer() -> None:
    assert verify("math", "136", r"\boxed{137}", {}).extracted == "137"
    assert verify("math", "5", r"\boxed{4} or \boxed{5}", {}).reason == "ambiguous"
    assert verify("math", "5", r"\boxed{9^{9^{9^{9}}}}", {}).reason == "too_large"
    assert verify("math", "5", "", {}).reason == "no_answer"


def test_box_extraction_keeps_escaped_braces() -> None:
    assert final_answer(r"\boxed{\{1, 2\}}").text == r"\{1, 2\}"
    assert final_answer(r"\boxed{[0, \infty\}} ").text == r"[0, \infty\}"
    assert boxed("no box") is None


GYM_TASKS = (
    "chain_sum",
    "basic_arithmetic",
    "leg_counting",
    "prime_factorization",
    "number_sorting",
    "countdown",
    "simple_integration",
    "complex_arithmetic",
    "letter_counting",
    "spell_backward",
    "string_insertion",
    "spiral_matrix",
    "n_queens",
    "mini_sudoku",
    "gcd",
    "caesar_cipher",
)


def _gym_entry(task: str, index: int = 0, **params: Any) -> tuple[Any, dict[str, Any]]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=4, seed=1, **params)[index]
    return entry["answer"], {"task": task, "size": 4, "seed": 1, "params": params, "index": index}


@pytest.mark.parametrize("task", GYM_TASKS)
def test_gold_of_a_generated_task_scores_1_and_junk_0(task: str) -> None:
    gold, context = _gym_entry(task, index=2)
    for response in (
        f"<answer>{gold}</answer>",
        f"<think>hm</think> <answer>no</answer><answer>{gold}</answer>\n",
    ):
        assert verify("reasoning_gym", gold, response, context).score == 1
    for junk in (
        "",
        "junk ] {",
        "<answer>[]</answer>",
        "<answer>None</answer>",
        "<think>" + str(gold),
        '{"a": 1}',
    ):
        assert verify("reasoning_gym", gold, junk, context).score == 0


def test_a_scorer_that_fails_on_an_answer_gives_0() -> None:
    gold, context = _gym_entry("prime_factorization")
    assert verify("reasoning_gym", gold, "<answer>two times three</answer>", context).reason == "exception"
    gold, context = _gym_entry("graph_color")
    assert gold is None  # any valid colouring will do
    for answer in ('{"0": 1}', '{"unexpected": {}}', "[1, 2]", "null"):
        assert verify("reasoning_gym", gold, f"<answer>{answer}</answer>", context).score == 0


def test_partial_credit_of_a_generated_task_is_0() -> None:
    gold, context = _gym_entry("spiral_matrix")
    as_list = "[" + ", ".join(gold.split()) + "]"  # the task's scorer gives 0.1
    assert verify("reasoning_gym", gold, f"<answer>{as_list}</answer>", context).score == 0


def test_sorted_numbers_count_at_the_precision_of_the_prompt() -> None:
    gold, context = _gym_entry("number_sorting", min_decimals=2, max_decimals=2)
    answer = str([f"{float(number):.2f}" for number in re.findall(r"-?\d+\.\d+", gold)])
    assert verify("reasoning_gym", gold, f"<answer>{answer}</answer>", context).score == 1


@pytest.mark.parametrize("task", sorted(gym.EVALUATED | gym.PARSED))
def test_answers_to_generated_tasks_do_not_run(task: str, tmp_path: Path) -> None:
    gold, context = _gym_entry(task)
    folder = tmp_path / "made"
    for code in (f"__import__('os').mkdir('{folder}')", f"[__import__('os').mkdir('{folder}')]"):
        assert verify("reasoning_gym", gold, f"<answer>{code}</answer>", context).reason == "code"
    assert not folder.exists()


def test_every_scorer_that_evaluates_answers_is_known() -> None:
    from reasoning_gym.factory import DATASETS

    evaluating = {
        name
        for name, (dataset, *_) in DATASETS.items()
        if re.search(
            r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)", inspect.getsource(dataset.score_answer)
        )
    }
    own_parser = {"propositional_logic"}
    assert evaluating - own_parser == gym.EVALUATED | gym.PARSED


def test_a_context_that_names_no_entry_is_refused() -> None:
    gold, context = _gym_entry("chain_sum")
    for wrong in (
        {},
        context | {"task": "chain_summ"},
        context | {"params": {"no": 1}},
    ):
        with pytest.raises(DataError, match="no reasoning-gym entry"):
            verify("reasoning_gym", gold, "<answer>1</answer>", wrong)
    with pytest.raises(DataError, match="another entry"):
        verify("reasoning_gym", gold, "<answer>1</answer>", context | {"index": 3})


def test_light_verifiers_import_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from headway.verifiers.registry import verify; verify('numeric', '5', '5', {});"
        "print([name for name in ('math_verify', 'sympy', 'mpmath', 'reasoning_gym', 'torch', 'ray') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    assert set(VERIFIERS) == {
        "exact", "numeric", "math", "reasoning_gym", "choice", "tags", "regex", "json_schema", "length", "repetition",
        "code", "weighted", "http", "judge", "reward_model",
    }  # fmt: skip


def test_the_documented_policies_are_those_of_the_code(root: Path) -> None:
    text = (root / "docs/verifiers.md").read_text(encoding="utf-8")
    table = text.partition("## What means the same")[2].partition("## Code")[0]
    rows = re.findall(r"^\| ([^|]+) \| `(.+?)` \| `(.+?)` \| ([01]) \|$", table, re.MULTILINE)
    assert len(rows) > 20
    wrong = [
        policy for policy, gold, answer, score in rows if verify("math", gold, answer).score != float(score)
    ]
    assert not wrong


def test_every_verifier_is_documented(root: Path) -> None:
    table = (root / "docs/verifiers.md").read_text(encoding="utf-8").partition("## What means")[0]
    assert {name for name in VERIFIERS if f"| `{name}` |" in table} == set(VERIFIERS)
