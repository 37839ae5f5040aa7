"""`headway verify`: a verdict per line, in order and while it reads; a bad line harms no other; golds that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from headway.cluster import verify_cli
from headway.cluster.verify_cli import in_order, read_item, read_lines, verify
from headway.core.errors import ConfigError, DataError
from headway.verifiers.verdict import Item

app = typer.Typer()
app.command()(verify)

OWN = """
import time
from headway.verifiers.verdict import Verdict

def score(prompt, gold, response, context):
    while response == "loop":
        pass
    parts = (("length", len(response) / 10), ("bonus", context.get("bonus", 0.0)))
    return Verdict(score=len(response) / 10, reason="wrong", extracted=f"{prompt}|{response}", parts=parts)
"""

SCRIPT = """
import sys, typer
from headway.cluster import cli, verify_cli
app = typer.Typer()
app.command()(verify_cli.verify)
app(standalone_mode=False)
heavy = {"ray", "torch", "vllm", "transformers", "pyarrow", "numpy", "sympy", "matplotlib"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--processes", "1"])


def done(*arguments: str | Path) -> Result:
    result = run(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8"
    )
    return path


# ---- a file of responses -----------------------------------------------------------------------------------


def test_each_line_gets_its_verdict_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"id": "first", "gold": "\\frac{1}{2}", "output": "It is \\boxed{0.5}."},
        {"gold": "5", "response": "2 + 3 = 6", "kind": "numeric", "id": None},
        "{broken",
        "",
        {"gold": 100, "output": "101", "kind": "numeric", "relative_tolerance": 0.02},
        {"gold": 100, "output": "101", "kind": "numeric", "relative_tolerance": None},
        {"id": 7, "gold": "five", "output": "5", "kind": "numeric"},
        {"gold": "5", "kind": "numeric"},
        {"gold": "5", "output": None, "kind": "numeric"},
        {"id": 9, "gold": "5", "output": "5", "kind": "numerik"},
    )
    result = done(file)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [
        (line.get("id", "-"), line["score"], line["reason"], line["extracted"]) for line in lines[:6]
    ] == [
        ("first", 1.0, "correct", "0.5"),
        (None, 0.0, "wrong", "6"),
        ("-", None, "bad_line", None),
        ("-", 1.0, "correct", "101"),
        ("-", 0.0, "wrong", "101"),
        (7, None, "bad_gold", "gold answer 'five' is not a number"),
    ]
    assert (lines[2]["line"], lines[2]["error"][:11]) == (3, "is not JSON")
    assert [(line["reason"], line.get("line")) for line in lines[6:]] == [
        ("bad_line", 8),
        ("no_answer", None),
        ("bad_line", 10),
    ]
    assert "did you mean 'numeric'" in lines[8]["error"] and lines[8]["id"] == 9
    assert result.exit_code == 0
    assert "9 lines, 5 scored, mean score 0.4, 4 unscored (bad_line 3, bad_gold 1);" in result.stderr


def test_options_hold_where_a_line_has_none(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"gold": 100, "output": "101"},
        {"gold": 100, "output": "101", "relative_tolerance": 0},
    )
    out = tmp_path / "out.jsonl"
    result = done(file, "--kind", "numeric", "--params", '{"relative_tolerance": 0.02}', "--out", out)
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, 0.0]
    assert result.stdout == ""


def test_a_verifier_of_the_user_and_a_response_that_hangs(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(OWN)
    responses = ["abc", "loop", "loop!", "\ud800"]
    file = write(tmp_path / "a.jsonl", *({"output": r, "prompt": "p", "bonus": 0.5} for r in responses))
    result = done(file, "--kind", f"{own}:score", "--timeout-s", "0.3")
    abc, loop, other, half = [json.loads(line) for line in result.stdout_bytes.decode().splitlines()]
    assert abc == {
        "score": 0.3,
        "reason": "wrong",
        "extracted": "p|abc",
        "parts": {"length": 0.3, "bonus": 0.5},
    }
    assert (loop["score"], loop["reason"]) == (0.0, "timeout")
    assert (other["score"], half["score"], half["extracted"]) == (0.5, 0.1, "p|\ud800")


def test_a_line_asks_for_what_its_fields_say() -> None:
    row = {
        "id": 1,
        "gold": [1],
        "output": "o",
        "response": "r",
        "kind": "exact",
        "prompt": "p",
        "x": 2,
        "y": None,
    }
    assert read_item(row, "math", {"x": 1, "y": 3}) == Item("exact", [1], "o", {"x": 2, "y": 3}, "p")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert read_item({"response": "r", "prompt": chat}, "math", {}) == Item("math", None, "r", {}, "q")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"no output among the fields \(none\)"),
        ({"gold": 1, "text": "x"}, "no output among the fields gold, text"),
        (
            {"output": "x", "kind": "os:system"},
            "kind 'os:system': a line may only name a verifier that headway has",
        ),
        ({"output": "x", "kind": ["math"]}, "a line may only name"),
        ({"output": "x", "prompt": 5}, "prompt must be a text or a list of chat messages"),
    ],
)
def test_a_line_that_asks_for_nothing_or_too_much(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_item(row, "math", {})


def test_a_verdict_comes_before_the_next_line_is_there() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "-", "--kind", "numeric", "--processes", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    for number in range(3):
        process.stdin.write(json.dumps({"id": number, "gold": 1, "output": "1"}).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == number
    process.stdin.write(b'{"id": "last", "gold": 1, "output": "2"}')  # no line feed
    process.stdin.close()
    assert json.loads(process.stdout.readline()) == {
        "id": "last",
        "score": 0.0,
        "reason": "wrong",
        "extracted": "2",
    }
    errors = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert "4 lines, 4 scored, mean score 0.75, 0 unscored;" in errors
    assert errors.splitlines()[-1] == "[]"  # nothing heavy was imported


# ---- reading and ordering ----------------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.sampled_from([b"", b" ", b"a", b"bcd", b"e" * 20])), st.booleans(), st.integers(1, 9))
def test_lines_are_numbered_as_in_the_file(lines: list[bytes], ends: bool, block: int) -> None:
    reading, writing = os.pipe()
    with FileIO(reading) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_cli, "BLOCK_BYTES", block)
        os.write(writing, b"\n".join(lines) + (b"\n" if ends else b""))
        os.close(writing)
        found = [line for some in read_lines(source) for line in some]
    assert found == [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def test_results_keep_the_order_of_the_blocks_and_few_blocks_are_read_ahead() -> None:
    begun: list[int] = []
    second_done = threading.Event()

    def blocks() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    def work(number: int) -> int:
        if number == 0:
            assert second_done.wait(30)
        if number == 1:
            second_done.set()
        return number

    results = in_order(work, blocks(), ahead=3)
    assert next(results) == 0
    time.sleep(0.05)
    assert max(begun) <= 3  # three at work or done, one read
    assert list(results) == list(range(1, 100))


@pytest.mark.parametrize("at", ["reading", "working"])
def test_a_failure_is_raised_at_its_place(at: str) -> None:
    def blocks() -> Iterator[int]:
        yield from range(2)
        if at == "reading":
            raise OSError("gone")
        yield from range(2, 50)

    def work(number: int) -> int:
        if number == 2:
            raise OSError("gone")
        return number

    results = in_order(work, blocks(), ahead=2)
    assert (next(results), next(results)) == (0, 1)
    with pytest.raises(OSError, match="gone"):
        next(results)


def test_when_the_reader_of_results_leaves_no_thread_stays() -> None:
    before = set(threading.enumerate())
    results = in_order(lambda number: number, iter(range(1000)), ahead=2)
    next(results)
    assert set(threading.enumerate()) - before
    results.close()
    _eventually(lambda: not set(threading.enumerate()) - before)


def _eventually(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- one response ------------------------------------------------------------------------------------------


def test_one_response() -> None:
    shown = done("--gold", "[1, 2)", "--output", r"So \boxed{[1, 2)}")
    assert shown.stdout.splitlines() == ["score 1  correct", "extracted: [1, 2)"]
    shown = done("--gold", "5", "--output", "none", "--kind", "numeric")
    assert shown.stdout.splitlines() == ["score 0  no_answer", "extracted: none"]
    context = '{"relative_tolerance": 0.1}'
    shown = done("--gold", "10", "--output", "11", "--kind", "numeric", "--context", context, "--json")
    assert json.loads(shown.stdout) == {"score": 1.0, "reason": "correct", "extracted": "11"}
    shown = done("--gold", "x", "--output", "11", "--kind", "numeric")
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (0, "unscored  bad_gold")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say one of"),
        (["a.jsonl", "--audit", "b.jsonl"], "say one of"),
        (["--gold", "5"], "say one of"),
        (["a.jsonl", "--kind", "numerik"], "no verifier 'numerik', did you mean 'numeric'"),
        (["a.jsonl", "--kind", "no_such_file.py:score"], "'no_such_file.py:score' cannot be imported"),
        (["a.jsonl", "--params", "{"], "--params '{' is not JSON"),
        (["--gold", "5", "--output", "5", "--context", "[]"], "--context '\\[\\]' is no JSON object"),
        (["no/such.jsonl"], "no/such.jsonl: No such file or directory"),
        ([".", "--out", "x"], ": Is a directory"),
        (["--audit", "no/such.jsonl"], "dataset no/such.jsonl does not exist"),
    ],
)
def test_a_mistake_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        done(*arguments)


def test_the_file_that_is_read_is_never_written(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"gold": 1, "output": "1"})
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="is the file that is read"):
        done(file, "--out", tmp_path / "." / "a.jsonl")
    assert file.read_bytes() == before


# ---- golds of a dataset ------------------------------------------------------------------------------------


def test_golds_that_fail_are_reported(tmp_path: Path) -> None:
    file = write(
        tmp_path / "d.jsonl",
        {"question": "a", "solution": "so it is \\boxed{5}"},
        {"question": "b", "solution": "\\boxed{", "prompt_id": "[b]"},
        {"question": "c", "solution": None},
        {"question": "d", "solution": "five", "verifier": "numeric"},
        {"question": "e", "solution": "?"},
    )
    options = ("--prompt-field", "question", "--answer-field", "solution", "--kind", "exact")
    result = done("--audit", file, *options, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["prompts"] == 5
    assert report["reasons"] == {"correct": 1, "bad_gold": 3, "pays_meaningless": 1}
    assert [(fault["prompt_id"], fault["reason"], fault["gold"]) for fault in report["faults"]] == [
        ("[b]", "bad_gold", "\\boxed{"),
        ("2", "bad_gold", None),
        ("3", "bad_gold", "five"),
        ("4", "pays_meaningless", "?"),
    ]
    assert report["faults"][2]["detail"] == "gold answer 'five' is not a number"
    shown = done("--audit", file, *options)
    assert shown.exit_code == 1
    assert "[b]" in shown.stdout and "bad_gold 3, correct 1, pays_meaningless 1" in shown.stdout
    first = done("--audit", file, *options, "--limit", "1")
    assert first.exit_code == 0
    assert first.stdout.strip() == f"1 golds of {file}: correct 1"


def test_a_gold_that_its_own_verifier_rejects(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(OWN)  # scores a tenth for each character, so a gold of three gets 0.3
    file = write(tmp_path / "d.jsonl", *({"prompt": "p", "answer": "abc"} for _ in range(21)))
    shown = done("--audit", file, "--kind", f"{own}:score")
    assert shown.exit_code == 1
    assert "and 1 more (--json has all)" in shown.stdout
    report = json.loads(done("--audit", file, "--kind", f"{own}:score", "--json").stdout)
    assert report["faults"][20]["detail"] == "score 0.3, extracted 'p|abc'"


def test_generated_tasks_have_no_faulty_golds() -> None:
    assert done("--audit", "reasoning_gym:chain_sum", "--limit", "5").exit_code == 0
    unchecked = json.loads(done("--audit", "reasoning_gym:graph_color", "--limit", "2", "--json").stdout)
    assert unchecked["reasons"] == {"unchecked": 2}


def test_a_line_names_no_code_in_the_parts_of_a_composite() -> None:
    deep = {
        "outer": {"verifier": "weighted", "weight": 1, "parts": {"x": {"verifier": "os:system", "weight": 1}}}
    }
    for parts in (deep, deep["outer"]["parts"]):
        with pytest.raises(DataError, match="a line may only name verifiers that headway has"):
            read_item({"gold": "5", "output": "5", "kind": "weighted", "parts": parts}, "math", {})
    own = {"parts": {"x": {"verifier": "own.py:score", "weight": 1}}}
    assert read_item({"gold": "5", "output": "5"}, "weighted", own).context == own
