"""Programs judged by tests: what is run, what is compared, and that no program can make its verdict."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import DataError
from headway.verifiers import sandbox
from headway.verifiers.code import code, code_solution
from headway.verifiers.pool import VerifierPool
from headway.verifiers.verdict import Item, Verdict

NAME = "headway.verifiers.code:code"

SQUARES = {"inputs": ["3\n", "-2\n", "10"], "outputs": ["9\n", "4", "100"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [3, 0]}
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add(0, 10**30) == 10**30"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
ADD = "def add(a, b):\n    return a + b"
COMPLETION = 'from math import floor\n\ndef half(x: int) -> int:\n    """Half of x, rounded down.\n    """\n'


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is.\n```{language}\n{program}\n```\nDone."


def judged(gold: Any, program: str, **context: Any) -> Verdict:
    return code("", gold, fenced(program), context)


def outcome(verdict: Verdict) -> tuple[float | None, str, tuple[float, ...]]:
    return verdict.score, verdict.reason, tuple(value for _, value in verdict.parts)


# --- kinds of tests ---------------------------------------------------------------------------------------------


def test_standard_input_and_output() -> None:
    right = judged(SQUARES, "print(int(input()) ** 2)")
    assert outcome(right) == (1.0, "correct", (3.0, 3.0))
    assert [name for name, _ in right.parts] == ["passed", "total"]
    assert right.extracted == "print(int(input()) ** 2)\n"
    assert outcome(judged(SQUARES, "print(int(input()) * 3)")) == (0.0, "wrong", (1.0, 3.0))
    assert outcome(judged(SQUARES, "print(int(input()) * 3)", partial=True)) == (1 / 3, "wrong", (1.0, 3.0))
    assert outcome(judged(SQUARES, "print(int(input())**2)", partial=True)) == (1.0, "correct", (3.0, 3.0))


def test_a_list_of_cases_and_lines_and_json() -> None:
    cases = [{"input": ["1", "2"], "output": ["3"]}, {"input": "4\n5\n", "output": "9\n"}]
    program = "print(int(input()) + int(input()))"
    for gold in (cases, json.dumps(cases), json.dumps(SQUARES | {"inputs": ["1\n2"], "outputs": ["3"]})):
        assert judged(gold, program).score == 1.0
    assert judged(cases, "print(3)").parts == (("passed", 1.0), ("total", 2.0))


def test_calls_compare_values() -> None:
    assert outcome(judged(CALLS, ADD)) == (1.0, "correct", (2.0, 2.0))
    assert (
        judged(
            CALLS, f"class Solution:\n    {ADD.replace('(a', '(self, a').replace(chr(10), chr(10) + '    ')}"
        ).score
        == 1.0
    )
    assert outcome(judged(CALLS, "def add(a, b): return abs(a) + b")) == (0.0, "wrong", (1.0, 2.0))
    assert outcome(judged(CALLS, "def add(a, b): return str(a + b)")) == (0.0, "wrong", (0.0, 2.0))
    assert outcome(judged(CALLS, "def sub(a, b): return a + b")) == (0.0, "exception", (0.0, 2.0))
    assert judged([{"input": [1, 2], "output": 3}], ADD, fn_name="add").score == 1.0
    assert judged([{"input": "1\n2", "output": "3"}], ADD, fn_name="add").score == 1.0  # JSON in lines


def test_results_of_calls_are_plain_data() -> None:
    def result(value: str, wanted: Any, **context: Any) -> str:
        return judged(
            {"fn_name": "f", "inputs": [[], []], "outputs": [wanted, wanted]},
            f"def f(): return {value}",
            **context,
        ).reason

    assert result("(1, [2, (3,)])", [1, [2, [3]]]) == "correct"
    assert result("{1: 'a'}", {"1": "a"}) == "correct"
    assert result("__import__('collections').Counter('aab')", {"a": 2, "b": 1}) == "correct"
    assert result("10**5000", 10**4000) == "wrong"
    assert result("{1, 2}", [1, 2]) == "wrong"
    assert result("object()", 1) == "not_plain"
    assert result("(x for x in [1])", [1]) == "not_plain"
    assert (
        result("7", [7]) == result("[7]", [7]) == "correct"
    )  # all results are lists of one: it may be either
    assert result("0.1 + 0.2", 0.3) == "wrong"
    assert result("[0.1 + 0.2]", [0.3], tolerance=1e-9) == "correct"
    assert result("0.31", 0.3, tolerance=1e-2) == "wrong"


def test_asserts() -> None:
    assert outcome(judged(ASSERTS, ADD)) == (1.0, "correct", (3.0, 3.0))
    assert outcome(judged(ASSERTS, "def add(a, b): return abs(a) + b")) == (0.0, "wrong", (2.0, 3.0))
    assert outcome(judged(ASSERTS.splitlines(), ADD)) == (1.0, "correct", (3.0, 3.0))
    assert outcome(judged(json.dumps(ASSERTS), ADD)) == (1.0, "correct", (3.0, 3.0))
    assert outcome(judged(ASSERTS, "def add(a, b): raise ValueError")) == (0.0, "exception", (0.0, 3.0))
    assert outcome(judged(ASSERTS, "1 / 0")) == (0.0, "exception", (0.0, 3.0))
    mixed = "import math\nfor n in range(3):\n    assert math.isclose(half(n), n / 2)\nassert half(7) == 3.5"
    assert outcome(judged(mixed, "half = lambda n: n / 2")) == (1.0, "correct", (2.0, 2.0))
    raises = "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
    assert judged(raises, "def f(n): raise ValueError('no')").score == 1.0
    assert judged(raises, "class Mine(ValueError): pass\ndef f(n): raise Mine('no')").score == 1.0
    assert judged(raises, "def f(n): return n").reason == "wrong"
    assert judged(raises, "def f(n): raise KeyError('no')").reason == "exception"


def test_a_name_that_is_a_value_or_a_builtin() -> None:
    assert judged("assert LIMIT == 5 and f() == LIMIT", "LIMIT = 5\ndef f(): return 5").score == 1.0
    assert judged("assert sum(10, 15) == 6", "def sum(a, b): return 6", entry_point="sum").score == 1.0
    with pytest.raises(DataError, match="entry_point is needed"):
        judged("assert sum(10, 15) == 6", "def sum(a, b): return 6")


def test_check_with_an_entry_point() -> None:
    assert outcome(judged(CHECK, ADD, entry_point="add")) == (1.0, "correct", (1.0, 1.0))
    assert outcome(judged(CHECK, "def add(a, b): return 3", entry_point="add")) == (0.0, "wrong", (0.0, 1.0))
    assert judged(CHECK + "\ncheck(add)", ADD).score == 1.0
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert judged(CHECK, method, entry_point="Solution().add").score == 1.0


def test_helpers_of_the_tests_come_from_the_prompt_and_not_from_the_program() -> None:
    prompt = 'def value(x):\n    return x - 2\n\ndef root():\n    """A root of value."""\n'
    tests = "def check(candidate):\n    assert value(candidate()) == 0"
    context = {"entry_point": "root"}
    assert code(prompt, tests, fenced("def root(): return 2"), context).score == 1.0
    forged = "def value(x): return 0\ndef root(): return 7"
    assert code(prompt, tests, fenced(forged), context).reason == "wrong"


# --- the program --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        fenced("print(int(input()) ** 2)"),
        fenced("print(int(input()) ** 2)", "Python3"),
        fenced("print(int(input()) ** 2)", ""),
        fenced("print(1)") + "\nNo:\n" + fenced("print(int(input()) ** 2)"),
        fenced("print(int(input()) ** 2)") + "\nIt prints\n```\n9\n```\nso run\n```bash\npython a.py\n```",
        "<think>" + fenced("print(1)") + "</think>\n" + fenced("print(int(input()) ** 2)"),
        "1. Square:\n   ```python\n   n = int(input())\n   print(n * n)\n   ```",
        "~~~python\nprint('''\n```'''[:0] + str(int(input()) ** 2))\n~~~",
        "````python\nprint(int(input()) ** 2) # ```\n````",
    ],
)
def test_the_last_block_of_python_counts(response: str) -> None:
    assert code("", SQUARES, response, {}).score == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "print(int(input()) ** 2)",
        "```python\nprint(int(input()) ** 2)",
        fenced("print(int(input()) ** 2)") + "\nBetter:\n```python\nprint(",
        "<think>" + fenced("print(int(input()) ** 2)"),
        fenced("console.log(1)", "js"),
        "```python\n```",
        "\\boxed{?}",
    ],
)
def test_no_program(response: str) -> None:
    assert outcome(code("", SQUARES, response, {})) == (0.0, "no_answer", ())


@pytest.mark.parametrize(
    "response",
    [
        "    return floor(x / 2)\n",
        "return floor(x / 2)",
        "y = x / 2\nreturn floor(y)",
        "    y = x / 2\n    return floor(y)",
        fenced("    y = x / 2\n    return floor(y)"),
        fenced(COMPLETION + "    return floor(x / 2)"),
        fenced("def half(x):\n    return floor(x / 2)"),
        "def half(x):\n    return floor(x / 2)",
        fenced("from __future__ import annotations\ndef half(x): return x // 2"),
        "<think>Halve it.</think>\n    return x // 2",
    ],
)
@pytest.mark.parametrize("prompt", [COMPLETION, f"Complete this:\n```python\n{COMPLETION}```"])
def test_a_completion_continues_its_prompt(prompt: str, response: str) -> None:
    tests = "def check(candidate):\n    assert candidate(7) == 3 and candidate(-7) == -4"
    assert code(prompt, tests, response, {"entry_point": "half"}).reason == "correct"


def test_prose_does_not_continue_a_prompt() -> None:
    for response in ("I do not know.", "", "   \n", "-" * 100_000 + "1", "(" * 10_000, "    return '\0'"):
        assert code(COMPLETION, CHECK, response, {"entry_point": "half"}).reason == "no_answer"


# --- comparison of outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "wanted", "tolerance", "same"),
    [
        ("1 2\n3\n", "1 2\n3", 0.0, True),
        ("1 2  \n3\r\n\n\n", "1 2\n3\n", 0.0, True),
        ("1\n\n2", "1\n2", 0.0, False),
        ("\n1", "1", 0.0, False),
        ("1  2", "1 2", 0.0, False),
        ("1", "1\n2", 0.0, False),
        ("", "1", 0.0, False),
        ("1.0", "1", 0.0, False),
        ("1.0", "1", 1e-9, True),
        ("x 0.3333", "x 0.33333333", 1e-3, True),
        ("x 0.3333", "x 0.33333333", 1e-6, False),
        ("y 0.3333", "x 0.3333", 1e-3, False),
        ("1e-12", "0", 1e-3, False),
        ("nan", "1", 1e-3, False),
        ("é\u2200", "é\u2200", 0.0, True),
    ],
)
def test_outputs_are_compared_by_lines(printed: str, wanted: str, tolerance: float, same: bool) -> None:
    gold = {"inputs": [""], "outputs": [wanted]}
    assert judged(gold, f"print({printed!r}, end='')", tolerance=tolerance).score == float(same)


def test_a_program_that_fails_after_its_output_fails() -> None:
    gold = {"inputs": [""], "outputs": ["1"]}
    assert judged(gold, "print(1)\nexit()").reason == "correct"
    assert judged(gold, "print(1)\nraise SystemExit").reason == "correct"
    assert judged(gold, "print(1)\nexit(1)").reason == "exception"
    assert judged(gold, "print(1)\n1 / 0").reason == "exception"
    assert judged(gold, "syntax error").reason == "exception"


# --- golds and options that are no good -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "context", "says"),
    [
        ({"inputs": [], "outputs": []}, {}, "and some"),
        ({"inputs": ["1"], "outputs": []}, {}, "there must be as many"),
        ({"inputs": [5], "outputs": ["5"]}, {}, "must be a text"),
        ({"inputs": [5], "outputs": [5], "fn_name": "f"}, {}, "must be a list"),
        ({"inputs": [[1]], "outputs": [{1, 2}], "fn_name": "f"}, {}, "must be JSON"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, {}, "not JSON"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 5}, {}, "fn_name"),
        ([{"input": "1", "output": "1"}, {"input": "1"}], {}, "an input and an output"),
        ([], {}, "must be inputs and outputs"),
        ({}, {}, "must be inputs and outputs"),
        (None, {}, "must be inputs and outputs"),
        ("", {}, "assert nothing"),
        ("[]", {}, "must be inputs and outputs"),
        ("null", {}, "must be inputs and outputs"),
        ("def check(candidate): pass", {"entry_point": "f"}, "assert nothing"),
        ("def test(f): assert f()", {}, "call none of them"),
        (CHECK, {}, "entry_point is needed"),
        ("assert f(", {}, "not Python"),
        ("assert f()", {"entry_point": "a b"}, "no|not a Python expression"),
        (SQUARES, {"timeout_s": 0}, "timeout_s"),
        (SQUARES, {"timeout_s": "4"}, "timeout_s"),
        (SQUARES, {"partial": "yes"}, "partial"),
        (SQUARES, {"tolerance": -1}, "tolerance"),
        (SQUARES, {"memory_mib": 1}, "memory_mib"),
        (SQUARES, {"entry_point": 5}, "entry_point"),
    ],
)
def test_no_good(gold: Any, context: Mapping[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        code("", gold, fenced(ADD), context)
    with pytest.raises(DataError, match=says):
        code("", gold, "no program", context)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("import numpy_is_not_there\nassert f() == 1", "ModuleNotFoundError"),
        ("assert f(helper) == 1", "NameError: name 'helper'"),
        ("assert f(lambda: 1) == 1", "a function, which is not plain data"),
        ("assert f() == 1\nraise SystemExit(3)", "the tests fail"),
    ],
)
def test_tests_that_cannot_run_are_no_fault_of_the_program(tests: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        judged(tests, "def f(*_): return 1", entry_point="f")


def test_solutions_are_checked_with_their_tests() -> None:
    row = {"entry_point": "half", "canonical_solution": "    return x // 2\n"}
    tests = "def check(candidate):\n    assert candidate(7) == 3"
    (response,) = code_solution(tests, row)
    assert code(COMPLETION, tests, response, row).score == 1.0
    assert code_solution(SQUARES, {}) == ()
    with pytest.raises(DataError, match="assert nothing"):
        code_solution("", row)


def test_a_sandbox_that_does_not_start_leaves_the_response_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_interpreter", lambda: "/nowhere/python")
    for gold in (SQUARES, CALLS, ASSERTS):
        verdict = judged(gold, ADD)
        assert (verdict.score, verdict.reason) == (None, "sandbox")


# --- programs that would rather not solve it, in the real pool ---------------------------------------------------------

FORGERIES = {
    "exits in order": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits in the function": "def add(*_):\n    import os\n    os._exit(0)",
    "prints a verdict": "print('passed 3/3')\nprint('[1.0, \"correct\", null, [], 0.1]')",
    "writes everywhere": (
        "import os, json\n"
        "for fd in range(64):\n"
        "    for text in ('{\"value\": 3}', '{\"case\": \"correct\"}\\n' * 9, 'ready\\n', '[1.0, \"correct\"]'):\n"
        "        try: os.write(fd, text.encode())\n"
        "        except OSError: pass\n"
        "os._exit(0)"
    ),
    "writes a report and waits for nothing": (
        'import os\nos.write(3, b\'{"case": "correct"}\\n\' * 3)\ndef add(a, b): return None'
    ),
    "equals everything": (
        "class Always(int):\n"
        "    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\n"
        "def add(*_): return Always(77)\n"
        "print(Always(77))"
    ),
    "equals everything, no number": (
        "class Always:\n"
        "    def __eq__(self, other): return True\n"
        "    def __repr__(self): return '3'\n"
        "    def __reduce__(self): return (int, (3,))\n"
        "def add(*_): return Always()"
    ),
    "replaces builtins": (
        "import builtins, json\n"
        "builtins.AssertionError = type('Never', (Exception,), {})\n"
        "builtins.print = builtins.compile = builtins.exec = lambda *a, **k: None\n"
        'json.dumps = lambda *a: \'{"case": "correct"}\'\n'
        "def add(*_): return 77"
    ),
    "replaces the harness": (
        "import sys, gc, types\n"
        "for found in gc.get_objects():\n"
        "    if isinstance(found, types.FunctionType) and found.__globals__.get('_serve'):\n"
        "        found.__globals__.update(_outcome=lambda *_: 'correct', encode=lambda *_: None,\n"
        "                                 _answer=lambda *_: ['value', None])\n"
        "def add(*_): return 77"
    ),
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\nraise SystemExit(1)",
    "looks for the tests": (
        "import gc\n"
        "def add(*_):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict) and ('outputs' in o or 'statements' in o)]\n"
        "    return [(1, 2)] if found else 77\n"
        "print(open('/proc/self/environ').read())"
    ),
    "looks into other processes": (
        "import os\n"
        "for pid in range(2, 4000):\n"
        "    try: open(f'/proc/{pid}/mem', 'rb'); os._exit(0)\n"
        "    except OSError: pass\n"
        "def add(*_): return 77"
    ),
    "raises what asserts raise": "def add(*_): raise AssertionError",
    "raises to pass": "def add(*_): raise StopIteration",
    "replaces the functions of the tests": "def check(candidate): pass\nall = any = lambda *_: True\ndef add(*_): return 77",
    "returns nothing": "def add(*_): pass",
}
"""Each is judged by all three kinds of tests, and passes none."""


def forgeries() -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    for program in FORGERIES.values():
        for gold in (SQUARES, CALLS, ASSERTS):
            yield "forged", gold, program, {"partial": True}


def hostile(secret: Path, port: int) -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """(expected reason, gold, program, context)"""
    once = {"inputs": ["1\n"], "outputs": ["1"]}
    short = {"timeout_s": 1.0}
    yield "timeout", once, "while True: pass", short
    yield "timeout", ASSERTS, "def add(a, b):\n    while True: pass", short
    yield "timeout", CALLS, "import time\ntime.sleep(60)", short
    yield "exception", once, "import os\nwhile True: os.fork()", {}
    yield "timeout", once, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", short
    yield "exception", ASSERTS, "import subprocess\nsubprocess.Popen(['/bin/sleep', '60'])\n" + ADD, {}
    yield "memory", once, "held = []\nwhile True: held.append(bytearray(2**24))", {}
    yield "memory", ASSERTS, "held = bytearray(2**32)", {}
    yield "exception", ASSERTS, "def add(a, b): return bytearray(2**32)", {}
    yield "exception", once, "while True: print('1' * 10**6)", {}
    yield "correct", once, "import sys\nfor _ in range(300): sys.stderr.write('x' * 10**5)\nprint(1)", {}
    yield "exception", CALLS, "def add(a, b): return 'x' * 10**8", {}
    yield "exception", ASSERTS, "def add(a, b): return 'x' * 10**8", {}
    yield (
        "not_plain",
        CALLS,
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        {},
    )
    yield "exception", once, f"import socket\nsocket.create_connection(('127.0.0.1', {port}))\nprint(1)", {}
    yield "exception", once, f"print(open({str(secret)!r}).read())", {}
    yield "exception", once, f"open({str(secret.parent / 'left')!r}, 'w')\nprint(1)", {}
    yield (
        "exception",
        once,
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    while True: pass\nprint(1)",
        {},
    )
    yield "exception", once, "f = lambda: f()\nf()", {}
    yield "wrong", once, "import os\nos.closerange(0, 1024)", {}
    yield "exception", ASSERTS, "import os\nos.closerange(0, 1024)\n" + ADD, {}
    yield "exception", once, "import os\nos.kill(os.getppid(), 9)\nprint(1)", {}
    yield "exception", once, "import os\nos.kill(-1, 9)\nprint(1)", {}
    yield "exception", ASSERTS, "import os\nos.killpg(0, 9)\n" + ADD, {}
    yield "exception", once, "import ctypes\nctypes.string_at(0)", {}
    yield "correct", once, "print(input())", {}
    yield "correct", CALLS, "add = lambda a, b: a + b", {}
    yield "correct", ASSERTS, ADD, {}
    yield "correct", CHECK, ADD, {"entry_point": "add"}
    yield "bad_gold", {"inputs": [], "outputs": []}, ADD, {}


@pytest.mark.parametrize("way", ["bubblewrap", "plain"])
def test_a_hostile_batch(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verdict is right in bounded time, the pool is sound afterwards, and nothing is left behind."""
    assert sandbox.bubblewrap() is not None, "these tests need bubblewrap: apt-get install bubblewrap"
    folders = tmp_path / "folders"
    folders.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("1\n")
    monkeypatch.setenv("TMPDIR", str(folders))
    if way == "plain":
        (tmp_path / "sitecustomize.py").write_text(
            "from headway.verifiers import sandbox\nsandbox.bubblewrap = lambda: None\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server, VerifierPool(2, 6.0, 1024) as pool:
        server.setblocking(False)
        honest = [Item(NAME, CALLS, fenced(ADD)), Item(NAME, SQUARES, fenced("print(int(input()) ** 2)"))]
        cases = [*hostile(secret, server.getsockname()[1]), *forgeries()]
        items: list[Item] = []
        for start in range(0, len(cases), 4):  # honest ones among them
            items += [
                Item(NAME, gold, fenced(text), context) for _, gold, text, context in cases[start : start + 4]
            ]
            items += honest[start // 4 % 2 :][:1]
        started = time.perf_counter()
        verdicts = pool.score(items)
        seconds = time.perf_counter() - started
        scored = [verdict for item, verdict in zip(items, verdicts, strict=True) if item not in honest]
        for (expected, gold, program, _), verdict in zip(cases, scored, strict=True):
            if expected == "forged":
                assert verdict.score == 0.0 and verdict.reason != "correct", (program, gold, verdict)
            else:
                assert verdict.reason == expected, (program, gold, verdict)
                assert verdict.score == {"correct": 1.0, "bad_gold": None}.get(expected, 0.0)
        assert all(v.score == 1.0 for item, v in zip(items, verdicts, strict=True) if item in honest)
        assert seconds < 60
        assert [verdict.score for verdict in pool.score(honest * 3)] == [1.0] * 6
        with pytest.raises(BlockingIOError):
            server.accept()
    eventually(lambda: not harnesses())
    assert list(folders.iterdir()) == [] and not (tmp_path / "left").exists()


def test_nothing_survives_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own limit comes first; what it ran dies with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    endless = Item(NAME, ASSERTS, fenced("while True: pass"), {"timeout_s": 60.0})
    with VerifierPool(1, 1.0, 1024) as pool:
        (verdict,) = pool.score([endless])
        assert (verdict.score, verdict.reason) == (0.0, "timeout")
        eventually(lambda: not harnesses())
    assert list(tmp_path.iterdir()) == []


def harnesses() -> set[int]:
    """Processes of sandboxes: all have the harness in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"harness.py" in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
