"""The math verifier against systematic edits of right answers: rewritten ones are paid, changed ones are not.

Each row of `RIGHT` is a gold and an answer with the same meaning. `REWRITES` keep the meaning of any answer that they
apply to; every edit of `edits` changes it, unless the edited text is in `UNCHANGED`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import Item, verify

RIGHT: tuple[tuple[str, str], ...] = (
    # numbers
    ("17", "17"),
    ("-8", "-8"),
    ("1234567", "1234567"),
    ("25,920", "25920"),
    ("0.75", r"\frac{3}{4}"),
    (r"\frac{7}{12}", r"\frac{7}{12}"),
    (r"-\frac{5}{2}", "-2.5"),
    (r"11\frac{5}{6}", r"\frac{71}{6}"),
    (r"\frac{71}{6}", r"11\frac{5}{6}"),
    ("12.5", "12.5"),
    ("1.5e3", r"1.5 \times 10^{3}"),
    (r"3 \times 10^{-4}", "0.0003"),
    ("0.00042", r"4.2 \cdot 10^{-4}"),
    (r"\frac{1}{6}", r"0.1\overline{6}"),
    (r"\frac{4}{33}", r"0.\overline{12}"),
    (r"2^{10}", "1024"),
    ("120", "5!"),
    ("120", r"\binom{10}{3}"),
    (r"\frac{1}{2^{90}}", r"2^{-90}"),
    ("1011_2", "1011_2"),
    # with percent, money, units, angles
    (r"35\%", r"35\%"),
    ("0.35", r"35\%"),
    (r"\$5.50", r"\$5.50"),
    ("48", r"\$48"),
    (r"250\text{ cm}^2", r"250\text{ cm}^2"),
    (r"60 \text{ km/h}", r"60\text{ km/h}"),
    (r"9.8\text{ m/s}^2", r"9.8\text{ m/s}^2"),
    ("12 hours", r"12\text{ hours}"),
    (r"3\text{ kg}", r"3\text{ kg}"),
    (r"12\text{ apples}", r"12\text{ apples}"),
    (r"30^\circ", r"30^\circ"),
    (r"\frac{\pi}{6}", r"30^\circ"),
    # irrational and complex numbers
    (r"\sqrt{50}", r"5\sqrt{2}"),
    (r"\frac{\sqrt{3}}{2}", r"\sin 60^\circ"),
    (r"2\pi", r"2\pi"),
    (r"\frac{3+\sqrt{5}}{2}", r"\frac{3+\sqrt{5}}{2}"),
    (r"\sqrt[3]{7}", r"\sqrt[3]{7}"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("e^{2}", "e^{2}"),
    ("2+3i", "2+3i"),
    # expressions
    ("x^2+x-6", "(x-2)(x+3)"),
    ("(x-2)(x+3)", "x^2+x-6"),
    ("3x^2-2x+1", "3x^2-2x+1"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\frac{x+1}{x-3}", r"\frac{x+1}{x-3}"),
    (r"2\sin x\cos x", r"\sin 2x"),
    ("|x-4|", "|x-4|"),
    (r"\lfloor 3x+1 \rfloor", r"\lfloor 3x+1 \rfloor"),
    ("x^3+5x+C", "x^3+5x+C"),
    # equations
    ("x = 9", "x = 9"),
    ("2x - y + 4 = 0", "y = 2x + 4"),
    ("x^2/9 + y^2/4 = 1", r"\frac{x^2}{9} + \frac{y^2}{4} = 1"),
    ("f(x) = x^2 + 3", "f(x) = x^2 + 3"),
    # several values
    (r"\{1, 2, 3\}", r"\{3, 1, 2\}"),
    ("(2, -7)", "(2, -7)"),
    ("(1, 2, 3)", "(1, 2, 3)"),
    ("5 or -1", "x = 5 \\text{ or } x = -1"),
    ("2, 6, 18", "2, 6, 18"),
    (r"1 \pm \sqrt{2}", r"1 + \sqrt{2}, 1 - \sqrt{2}"),
    ("x = 2, y = 3", "x = 2, y = 3"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\begin{pmatrix} 4 \\ -5 \end{pmatrix}", r"\begin{pmatrix} 4 \\ -5 \end{pmatrix}"),
    # sets of numbers
    (r"(-\infty, 4]", r"x \le 4"),
    (r"x \le 4", r"(-\infty, 4]"),
    ("[0, 1)", r"0 \le x < 1"),
    ("-3 < x < 7", "(-3, 7)"),
    (r"(-\infty, -1) \cup (3, \infty)", r"x < -1 \text{ or } x > 3"),
    (r"[2, 5] \cup [7, 9)", r"[2, 5] \cup [7, 9)"),
    (r"x \ne 3", r"(-\infty, 3) \cup (3, \infty)"),
    ("x + y > 2", "x + y > 2"),
    # other notations
    ("3:5", "3:5"),
    ("10:30 a.m.", r"10:30 \text{ a.m.}"),
    ("July 4, 1776", r"\text{July 4, 1776}"),
    (r"7 \pmod{12}", r"7 \pmod{12}"),
    (r"\text{(C)}", r"\text{(C)}"),
    ("yes", r"\text{yes}"),
    ("True", r"\text{True}"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\infty", r"\infty"),
    (r"\emptyset", r"\emptyset"),
)

# ---------------------------------------------------------------------------------------------------- rewrites

_FRACTION = re.compile(r"\\frac\{(\d)\}\{(\d)\}")
_LONG = re.compile(r"(?<![\d.])\d{4,}(?![\d_}])")
_FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
_UPPER = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_SYMBOLS = {r"\infty": "∞", r"\pi": "π", r"\cup": "∪", r"\le": "≤", r"^\circ": "°", r"\emptyset": "∅"}


def grouped(separator: str) -> Callable[[str], str]:
    return lambda answer: _LONG.sub(lambda digits: f"{int(digits[0]):,}".replace(",", separator), answer)


def symbols(answer: str) -> str:
    for command, symbol in _SYMBOLS.items():
        answer = re.sub(re.escape(command) + r"(?![A-Za-z])\s*", symbol, answer)
    return answer


def one_value(answer: str) -> bool:
    """No text, list, relation or choice, whose name or unit would mean something else."""
    return not re.search(r"[=<>,:|]|\\(?:le|text|cup|begin|emptyset|pm|infty)|_2$|mod|\\%|\\\$|circ", answer)


REWRITES: dict[str, Callable[[str], str]] = {
    "space": lambda a: re.sub(r"(?<![\\^{])(?:(?<=\w)|(?<=[)}]))([+=<>-])(?=[\w\\(])", r" \1 ", a),
    "no space": lambda a: re.sub(r"(?<=[\d,=+<>-]) (?=[\d\\+=<>x-])|(?<=x) (?=[=<+])", "", a),
    "thin space": lambda a: a.replace(", ", r",\,").replace(" = ", r"\;=\;").replace(" < ", r"\ <\ "),
    "no-break space": lambda a: a.replace(" ", "\u00a0"),
    "dfrac": lambda a: a.replace(r"\frac", r"\dfrac"),
    "tfrac": lambda a: a.replace(r"\frac", r"\tfrac"),
    "frac without braces": lambda a: _FRACTION.sub(r"\\frac\1\2", a),
    "slash": lambda a: re.sub(r"^(-?)" + _FRACTION.pattern + "$", r"\1\2/\3", a),
    "full-width digits": lambda a: a.translate(_FULL_WIDTH),
    "Unicode minus": lambda a: a.replace("-", "−"),
    "Unicode symbols": symbols,
    "Unicode root": lambda a: re.sub(r"\\sqrt\{(\d+)\}", r"√\1", a),
    "Unicode exponent": lambda a: re.sub(
        r"\^(?:\{(-?\d+)\}|(\d))", lambda m: (m[1] or m[2]).translate(_UPPER), a
    ),
    "Unicode times": lambda a: a.replace(r"\times", "×").replace(r"\cdot", "·"),
    "other times": lambda a: (
        a.replace(r"\times", r"\cdot") if r"\times" in a else a.replace(r"\cdot", r"\times")
    ),
    "comma groups": grouped(","),
    "thin groups": grouped(r"\,"),
    "brace groups": grouped("{,}"),
    "narrow no-break groups": grouped("\u202f"),
    "left and right": lambda a: (
        re.sub(r"(?<!\\sqrt)([(\[])", r"\\left\1", re.sub(r"([)\]])(?!\{)", r"\\right\1", a))
        if not re.search(r"pmod|sqrt\[|begin", a)
        else a
    ),
    "leqslant": lambda a: re.sub(r"\\le(?![a-z])", r"\\leqslant", a),
    "mathrm": lambda a: a.replace(r"\text", r"\mathrm"),
    "textbf": lambda a: a.replace(r"\text", r"\textbf"),
    "as text": lambda a: rf"\text{{{a}}}" if re.fullmatch(r"-?[\d.]+", a) else a,
    "math bold": lambda a: rf"\mathbf{{{a}}}" if re.fullmatch(r"-?[\d.]+|\(.*\)", a) else a,
    "with dollars": lambda a: f"${a}$" if r"\$" not in a else a,
    "full stop": lambda a: a + ".",
    "named": lambda a: "x = " + a if one_value(a) and "x" not in a else a,
    "approximately": lambda a: r"\approx " + a if one_value(a) else a,
    "unit": lambda a: a + r"\text{ units}" if re.fullmatch(r"-?[\d.]+", a) else a,
    "no unit": lambda a: (
        re.sub(r"\\text\{ (?:[a-z]+|km/h|m/s)\}(?:\^2)?$", "", a) if re.match(r"[\d.]+\\text", a) else a
    ),
    "percent in words": lambda a: a.replace(r"\%", r" \text{ percent}"),
    "dollars in words": lambda a: re.sub(r"^\\\$(.*)", r"\1\\text{ dollars}", a),
    "degrees in words": lambda a: re.sub(r"(\d)\^\\circ$", r"\1\\text{ degrees}", a),
    "trailing zero": lambda a: re.sub(r"^(\d+\.\d+)$", r"\g<1>0", re.sub(r"^(-?\d{1,3})$", r"\1.0", a)),
    "\\displaystyle": lambda a: r"\displaystyle " + a,
    "inverted relation": lambda a: re.sub(r"^(\w+) \\le (-?\w+)$", r"\2 \\ge \1", a),
}
"""New text of an answer; the same text where there is nothing to rewrite."""

FRAMES: dict[str, str] = {
    "sentence": "Therefore, the answer is \\boxed{%s}.",
    "display": "Adding up:\n\\[ \\boxed{ %s } \\]",
    "bold": "**Final Answer**\n\n**\\boxed{%s}**",
    "reasoning": "<think>Is it \\boxed{99}? No.</think>\nSo it is $\\boxed{%s}$.",
    "second thoughts": "I first thought \\boxed{99}. Rechecking, it is \\boxed{%s}.",
    "placeholder": "Format: \\boxed{answer}. Here: \\boxed{%s}",
    "twice": "So $\\boxed{%s}$. To restate: **Final Answer** $\\boxed{%s}$",
    "box in a box": "\\boxed{\\boxed{%s}}",
    "fbox": "\\fbox{%s}",
    "tags": "<think>ok</think><answer>%s</answer>",
    "hashes": "Adding up.\n#### %s",
    "stated": "So the answer is $%s$.",
    "final answer": "Final Answer: $%s$",
    "white space": "\\boxed{%s}\n\n \t\n",
}


def framed(answer: str) -> Iterator[tuple[str, str]]:
    for name, frame in FRAMES.items():
        if "$%s$" in frame and r"\$" in answer:
            continue
        yield name, frame.replace("%s", answer)


def rewritten() -> Iterator[tuple[str, str, str]]:
    """(name, gold, response)"""
    for gold, answer in RIGHT:
        yield "as it is", gold, f"\\boxed{{{answer}}}"
        for name, rewrite in REWRITES.items():
            if (other := rewrite(answer)) != answer:
                yield name, gold, f"\\boxed{{{other}}}"
        for name, response in framed(answer):
            yield name, gold, response


# ------------------------------------------------------------------------------------------------------- edits

_UNIT = re.compile(r"(?<=\\text\{ )(?:cm|km/h|m/s|hours|kg|apples)(?=\})")
_OTHER_UNITS = {
    "cm": ("m", "mm", "in"),
    "km/h": ("m/s", "mph", "km"),
    "m/s": ("cm/s", "ft/s", "m"),
    "hours": ("minutes", "days", "meters"),
    "kg": ("g", "lb", "km"),
    "apples": ("pears", "dollars", "cm"),
}
_WRONG_WORDS = {
    "yes": ("no", "not yes", "yes or no"),
    "True": ("False", "not True", "True or False"),
    "Evelyn": ("Eve", "Evelin", "not Evelyn", "Evelyn or Briana"),
}
_INTERVAL = re.compile(r"[(\[][^()\[\]]*, [^()\[\]]*[)\]]")
_EXPONENT = re.compile(r"\^(?:\{-?\w+\}|\w)")
_SWAPPED_BRACKET = {"(": "[", "[": "(", ")": "]", "]": ")"}
_RELATIONS = {"<": (">", r"\le "), ">": ("<", r"\ge "), r"\le": (r"\ge", "<"), "=": (r"\ne ", "<")}


def replaced(answer: str, start: int, end: int, text: str) -> str:
    return answer[:start] + text + answer[end:]


def edits(answer: str) -> Iterator[tuple[str, str]]:
    """(kind, edited answer): one edit each, of every kind, at every place."""
    for match in re.finditer(r"\d", answer):
        digit = int(match[0])
        yield "digit", replaced(answer, *match.span(), str((digit + 1) % 10))
        yield "digit", replaced(answer, *match.span(), str((digit + 7) % 10))
        yield "digit twice", replaced(answer, *match.span(), match[0] * 2)
    for match in re.finditer(r"(?<=\d)\d|\d(?=\d)", answer):
        yield "digit dropped", replaced(answer, *match.span(), "")
    for match in re.finditer(r"[+-]", answer):
        yield "sign", replaced(answer, *match.span(), "-" if match[0] == "+" else "+")
    if re.match(r"[\d\\(|ex]", answer) and not re.search(
        r"=|<|>|\\le|cup|\\text\{[A-Z(y]|emptyset|:|^\(|begin|\\\{", answer
    ):
        yield "sign", "-" + answer
    for match in re.finditer(r"(?<=\d)\.(?=\d)", answer):
        yield "decimal point", replaced(answer, *match.span(), "")
    for match in _EXPONENT.finditer(answer):
        if answer[match.start() - 1] != "}" or "text" not in answer:
            yield "exponent dropped", replaced(answer, *match.span(), "")
        yield "exponent", replaced(answer, *match.span(), "^{7}")
    for match in _UNIT.finditer(answer):
        for unit in _OTHER_UNITS[match[0]]:
            yield "unit", replaced(answer, *match.span(), unit)
    if r"}^2" in answer and "text" in answer:
        yield "unit", answer.replace("}^2", "}^3")
        yield "unit", answer.replace("}^2", "}")
    if answer.startswith(r"\$"):
        yield "unit", "€" + answer[2:]
        yield "unit", answer[2:] + r"\text{ cents}"
    if answer.endswith(r"\%"):
        yield "unit", answer.removesuffix(r"\%") + r"\text{ cm}"
    for match in _INTERVAL.finditer(answer):
        start, end = match.span()
        inner = match[0][1:-1].split(", ")
        if "infty" not in inner[0]:
            yield "bracket", replaced(answer, start, start + 1, _SWAPPED_BRACKET[match[0][0]])
        if "infty" not in inner[-1]:
            yield "bracket", replaced(answer, end - 1, end, _SWAPPED_BRACKET[match[0][-1]])
        yield "bracket", replaced(answer, start, start + 1, "")
        yield "bracket", replaced(answer, end - 1, end, "")
        yield "order", replaced(answer, start + 1, end - 1, ", ".join(reversed(inner)))
        for place in range(len(inner)):
            yield (
                "dropped",
                replaced(answer, start + 1, end - 1, ", ".join(inner[:place] + inner[place + 1 :])),
            )
        yield "added", replaced(answer, end - 1, end - 1, ", 11")
    for match in re.finditer(r"[<>=]|\\le(?![a-z])", answer):
        for other in _RELATIONS[match[0]]:
            yield "relation", replaced(answer, *match.span(), other)
    if match := re.fullmatch(r"\\\{(.*)\\\}", answer):
        items = match[1].split(", ")
        for place in range(len(items)):
            yield "dropped", rf"\{{{', '.join(items[:place] + items[place + 1 :])}\}}"
        yield "added", rf"\{{{match[1]}, 11\}}"
        yield "bracket", f"({match[1]})"
    for separator in (", ", r" \text{ or } ", r" \cup "):
        parts = answer.split(separator)
        splits = separator != ", " or not _INTERVAL.search(answer)
        whole = _INTERVAL.fullmatch(answer) or answer.startswith((r"\{", r"\text"))
        if splits and len(parts) > 1 and not whole and re.search(r"\d", parts[0]):
            for place in range(len(parts)):
                yield "dropped", separator.join(parts[:place] + parts[place + 1 :])
            yield "added", answer + separator + parts[0].replace(re.findall(r"\d", parts[0])[0], "11", 1)
    for match in re.finditer(r"(?<=& )\S+|(?<=matrix\} )\S+|(?<=\\\\ )\S+", answer):
        yield "dropped", replaced(answer, *match.span(), "0")
    if r"\cup" in answer:
        yield "relation", answer.replace(r"\cup", r"\cap")
    if r"\text{ or }" in answer and "<" in answer:
        yield "relation", answer.replace(r"\text{ or }", r"\text{ and }")
    for match in re.finditer(r"(?<![A-Za-z\\])[xyn](?![A-Za-z{])", answer):
        yield "variable", replaced(answer, *match.span(), "t")
    for match in re.finditer(r"\\(sin|ln|sqrt|pi|lfloor|binom)(?![a-z])", answer):
        other = {
            "sin": r"\cos",
            "ln": r"\sin",
            "sqrt": "",
            "pi": "e",
            "lfloor": r"\lceil",
            "binom": r"\frac",
        }[match[1]]
        edited = replaced(answer, *match.span(), other)
        yield "function", edited.replace("rfloor", "rceil") if match[1] == "lfloor" else edited
    for word, others in _WRONG_WORDS.items():
        if word in answer:
            yield from (("word", answer.replace(word, other)) for other in others)
    if answer == r"\text{(C)}":
        yield from (
            ("choice", rf"\text{{{other}}}")
            for other in ("(A)", "(B)", "(C) or (D)", "not (C)", "A, B, C, D")
        )
    if "a.m." in answer:
        yield "half of the day", answer.replace("a.m.", "p.m.")
    if "July" in answer:
        yield "word", answer.replace("July", "June")
    if answer == r"\infty":
        yield from (("word", other) for other in (r"\pm\infty", "0", r"\emptyset"))
    if answer == r"\emptyset":
        yield from (("word", other) for other in (r"\{0\}", r"\{\emptyset\}", r"\infty"))
    yield "hedge", answer + r" \text{ or } 99"
    yield "hedge", answer + r"} or \boxed{99"
    yield "hedge", "99, " + answer
    yield "unfinished", answer + r"}. Finally \boxed{\frac{1}"
    yield "empty", answer + r"}. Finally \boxed{"


UNCHANGED = frozenset({
    "00.0003", r"00.1\overline{6}", r"0.1\overline{66}", r"00.\overline{12}", r"\$5.500", r"\$5.5", r"00 \le x < 1",
    r"t \le 4", r"0 \le t < 1",  # the gold is an interval, which names no variable
    "€48", r"48\text{ cents}",  # the gold has no unit
})  # fmt: skip
"""Edited answers that still mean what the gold means."""


@functools.cache
def changed() -> tuple[tuple[str, str, str], ...]:
    """(kind, gold, response) of every edit that changes the meaning."""
    return tuple(
        (kind, gold, f"\\boxed{{{edited}}}")
        for gold, answer in RIGHT
        for kind, edited in dict.fromkeys(edits(answer))
        if edited not in UNCHANGED
    )


# ------------------------------------------------------------------------------------------------------- tests


def failing(rows: Sequence[tuple[str, str, str]], score: float) -> str:
    """The rows with another score, one a line."""
    return "\n".join(
        f"{name}: gold {gold!r}, response {response!r}"
        for name, gold, response in rows
        if verify("math", gold, response).score != score
    )


def test_rewritten_answers_are_right() -> None:
    rows = list(rewritten())
    assert len(RIGHT) >= 60
    assert {name for name, _, _ in rows} == {"as it is", *REWRITES, *FRAMES}
    assert failing(rows, 1.0) == ""


def test_edited_answers_are_wrong() -> None:
    assert len(changed()) > 10 * len(RIGHT)
    assert failing(changed(), 0.0) == ""


def test_edits_that_keep_the_meaning_are_paid() -> None:
    rows = [
        ("kept", gold, f"\\boxed{{{edited}}}")
        for gold, answer in RIGHT
        for _, edited in edits(answer)
        if edited in UNCHANGED
    ]
    assert {response[7:-1] for _, _, response in rows} == UNCHANGED
    assert failing(rows, 1.0) == ""


ALIKE = (
    {r"11\frac{5}{6}", r"\frac{71}{6}"},
    {"120"},
    {r"35\%", "0.35"},
    {r"30^\circ", r"\frac{\pi}{6}"},
    {"x^2+x-6", "(x-2)(x+3)"},
    {r"(-\infty, 4]", r"x \le 4"},
)
"""Golds of several rows that mean the same."""


def test_the_answer_to_one_gold_is_no_answer_to_another() -> None:
    rows = [
        ("of another", gold, f"\\boxed{{{answer}}}")
        for (gold, _), (other, answer) in itertools.permutations(RIGHT, 2)
        if not any({gold, other} <= golds for golds in ALIKE)
    ]
    assert failing(rows, 0.0) == ""


SAMPLE = [*((gold, response, 1.0) for _, gold, response in itertools.islice(rewritten(), 0, None, 7))] + [
    (gold, response, 0.0) for _, gold, response in changed()[::7]
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_response_raises(data: st.DataObject) -> None:
    gold, response, _ = data.draw(st.sampled_from(SAMPLE))
    pieces = st.sampled_from(
        [
            *"0123456789+-*/^_{}()[]|<>=,.:!%$&\\ xie",
            r"\frac",
            r"\sqrt",
            r"\boxed{",
            r"\{",
            r"\pm",
            "√",
            "²",
            "½",
        ]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(response)))
        end = start + data.draw(st.integers(0, 2))
        response = response[:start] + data.draw(pieces) + response[end:]
    verdict = verify("math", gold, response)
    assert verdict.score in (0.0, 1.0)
    assert verdict.reason != "exception"


def test_white_space_at_the_end_changes_nothing() -> None:
    for gold, response, _ in SAMPLE:
        bare = verify("math", gold, response)
        assert all(
            verify("math", gold, response + end) == bare for end in ("\n", "  ", "\t\n \n", "\u00a0\r\n")
        )


def test_threads_and_tasks_change_nothing() -> None:
    def scores() -> list[float | None]:
        return [verify("math", gold, response).score for gold, response, _ in SAMPLE]

    async def in_task() -> list[float | None]:
        return scores()

    expected = [score for _, _, score in SAMPLE]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(scores).result(60) == expected
    assert asyncio.run(in_task()) == expected


def test_one_verdict_per_sample_in_order() -> None:
    items = [Item("math", gold, response) for gold, response, _ in SAMPLE]
    with VerifierPool(2, timeout_s=10.0, memory_mib=512) as pool:
        verdicts = pool.score(items)
    assert [verdict.score for verdict in verdicts] == [score for _, _, score in SAMPLE]
