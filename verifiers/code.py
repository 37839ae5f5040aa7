"""The answer is a Python program that has to pass tests."""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import DataError
from headway.verifiers import harness
from headway.verifiers.extract import after_reasoning
from headway.verifiers.sandbox import Limits, Result, SandboxError, call, run_jobs, run_tests, script
from headway.verifiers.verdict import Verdict, wrong

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py"})
_ROOM_BYTES = 2**16
"""How much longer than the expected output a program's may be before it is stopped."""
_ENDINGS = {"wall": "timeout", "cpu": "timeout", "memory": "memory"}
"""Reasons for how a program ended; all other endings are `exception`."""


@dataclass(frozen=True, slots=True)
class _Scripts:
    """A program reads `inputs[i]` and has to print `outputs[i]`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Calls:
    """The function `name` of a program has to return one of `outputs[i]` for `arguments[i]`."""

    name: str
    arguments: tuple[list[Any], ...]
    outputs: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class _Tests:
    """Statements, those that are cases marked, for which `names` stand for expressions in the program."""

    statements: tuple[tuple[str, bool], ...]
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Options:
    timeout_s: float
    memory_mib: int
    partial: bool
    tolerance: float
    entry_point: str | None
    fn_name: str | None


def code(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """Runs the response's program in a sandbox (`headway.verifiers.sandbox`) against the gold's tests.

    `gold` is `{"inputs": […], "outputs": […]}` (standard input and output; with `fn_name` arguments and results), a
    list of `{"input": …, "output": …}`, or test code: a text, or a list of texts, with `assert` statements or a
    function `check(candidate)`. A text that is JSON of one of these is taken as that.

    The program is the last ```` ```python ```` block after the reasoning, else the last bare block; an unclosed one is
    no answer. With `entry_point` also: a text without a block that defines it, or that continues the prompt.

    Options, from `context`: `timeout_s` (4.0, for all cases together; keep it a second below the worker's limit),
    `memory_mib` (512), `partial` (false: 1 for all cases, else 0; true: the share of cases passed), `tolerance` (0.0,
    relative, for numbers in outputs and results), `entry_point` (what `candidate` is in the tests), `fn_name`.

    Results and arguments pass as plain data, by value: a program that returns anything else (`not_plain`) fails the
    case, and a change that it makes to an argument is not seen. The parts hold `passed` and `total`. Raises
    `DataError` for tests that hold no case, or that ask for what cannot be done.
    """
    options = _options(context)
    tests = _tests(gold, options)
    program = _program(prompt, response, options.entry_point)
    if program is None:
        return wrong(None, "no_answer")
    limits = Limits(
        wall_s=options.timeout_s, cpu_s=math.ceil(options.timeout_s), memory_mib=options.memory_mib
    )
    try:
        match tests:
            case _Scripts():
                outcomes = _run_scripts(program, tests, limits, options.tolerance)
            case _Calls():
                outcomes = _run_calls(program, tests, limits, options.tolerance)
            case _Tests():
                outcomes = _run_tests(program, prompt, tests, limits)
    except SandboxError as error:
        return Verdict(score=None, reason="sandbox", extracted=str(error))
    passed, total = outcomes.count("correct"), len(outcomes)
    share = passed / total
    return Verdict(
        score=share if options.partial else float(passed == total),
        reason=next((outcome for outcome in outcomes if outcome != "correct"), "correct"),
        extracted=program,
        parts=(("passed", float(passed)), ("total", float(total))),
    )


def code_solution(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    """How a policy may give a solution that the row holds (`canonical_solution` or `solution`); empty when it holds
    none. Raises `DataError` for tests that cannot be used."""
    _tests(gold, _options(context))
    solution = context.get("canonical_solution") or context.get("solution")
    return (f"```python\n{solution}\n```",) if isinstance(solution, str) else ()


# --- options and tests ------------------------------------------------------------------------------------------


def _options(context: Mapping[str, Any]) -> _Options:
    return _Options(
        timeout_s=_number(context, "timeout_s", 4.0, 0.1),
        memory_mib=int(_number(context, "memory_mib", 512, 64)),
        partial=_flag(context, "partial"),
        tolerance=_number(context, "tolerance", 0.0, 0.0),
        entry_point=_name(context, "entry_point"),
        fn_name=_name(context, "fn_name"),
    )


def _name(context: Mapping[str, Any], key: str) -> str | None:
    value = context.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"code: {key} must be a text, not {value!r}")
    return value or None


def _flag(context: Mapping[str, Any], key: str) -> bool:
    value = context.get(key)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"code: {key} must be true or false, not {value!r}")
    return bool(value)


def _number(context: Mapping[str, Any], key: str, default: float, least: float) -> float:
    value = context.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise DataError(f"code: {key} must be a number of at least {least:g}, not {value!r}")
    return value


def _tests(gold: Any, options: _Options) -> _Scripts | _Calls | _Tests:
    """Raises `DataError`."""
    if isinstance(gold, str):
        with contextlib.suppress(ValueError):
            gold = json.loads(gold)
    match gold:
        case {"inputs": [*inputs], "outputs": [*outputs], **rest}:
            name = rest.get("fn_name") or options.fn_name
        case [{"input": _, "output": _}, *_]:
            if not all(isinstance(case, Mapping) and {"input", "output"} <= case.keys() for case in gold):
                raise DataError("code: every case needs an input and an output")
            inputs, outputs = [case["input"] for case in gold], [case["output"] for case in gold]
            name = options.fn_name
        case str():
            return _test_code(gold, options.entry_point)
        case [str(), *_] if all(isinstance(part, str) for part in gold):
            return _test_code("\n".join(gold), options.entry_point)
        case _:
            raise DataError(
                f"code: the tests must be inputs and outputs, or test code, not {str(gold)[:200]!r}"
            )
    if not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"code: {len(inputs)} inputs and {len(outputs)} outputs; there must be as many, and some"
        )
    if name is None:
        return _Scripts(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not isinstance(name, str):
        raise DataError(f"code: fn_name must be a str, not {name!r}")
    if all(isinstance(given, str) for given in inputs):
        outputs = [_json(output) if isinstance(output, str) else output for output in outputs]
    # in some data sets every result is the only item of a list; where all look so, it may be either
    is_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    results = [(output, output[0]) if is_wrapped else (output,) for output in outputs]
    arguments = tuple(map(_arguments, inputs))
    try:
        json.dumps([arguments, results])
    except (TypeError, ValueError) as error:
        raise DataError(f"code: the arguments and results must be JSON: {error}") from error
    return _Calls(name, arguments, tuple(results))


def _text(value: Any) -> str:
    """Of one standard input or output; some data sets keep its lines."""
    match value:
        case str():
            return value
        case [*lines] if all(isinstance(line, str) for line in lines):
            return "\n".join(lines)
    raise DataError(f"code: an input or output must be a text, not {str(value)[:200]!r}")


def _arguments(value: Any) -> list[Any]:
    """Of one call: a list, or a text with JSON of one argument in each line."""
    if isinstance(value, str):
        return [_json(line) for line in value.splitlines() if line.strip()]
    if not isinstance(value, list):
        raise DataError(f"code: the arguments of a call must be a list, not {str(value)[:200]!r}")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"code: an argument or result is not JSON: {text[:200]!r}") from error


def _test_code(text: str, entry_point: str | None) -> _Tests:
    """Raises `DataError`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"code: the tests are not Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise DataError("code: the tests assert nothing")
    statements = [(_source(text, node), _is_case(node)) for node in tree.body]
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    needs_candidate = has_check and not any(_calls_check(node) for node in tree.body)
    if needs_candidate:
        statements.append(("check(candidate)", True))
    if not any(is_case for _, is_case in statements):
        raise DataError("code: the tests define functions but call none of them")
    if entry_point is None:
        names = {name: name for name in _free_names(tree)}
        if needs_candidate or not names:
            raise DataError("code: the tests do not say what they test; entry_point is needed")
        return _Tests(tuple(statements), names)
    try:
        ast.parse(entry_point, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"code: entry_point {entry_point!r} is not a Python expression") from error
    names = {"candidate": entry_point}
    if entry_point.isidentifier():
        names[entry_point] = entry_point
    return _Tests(tuple(statements), names)


def _source(text: str, node: ast.stmt) -> str:
    """A statement as it was written, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    if decorators:
        return "\n".join(text.splitlines()[decorators[0].lineno - 1 : node.end_lineno])
    return ast.get_source_segment(text, node) or ""


def _is_case(node: ast.stmt) -> bool:
    """Whether running the statement asserts something."""
    if _calls_check(node):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return isinstance(node, ast.Assert) or any(
        _is_case(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
    )


def _calls_check(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
    )


def _free_names(tree: ast.Module) -> list[str]:
    """Names that are used and neither defined there nor builtins."""
    used: dict[str, None] = {}
    defined = set(vars(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used[name] = None
            case ast.Name(id=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.alias(name=name, asname=other):
                defined.add((other or name).partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                defined.add(name)
    return [name for name in used if name not in defined]


# --- the program --------------------------------------------------------------------------------------------------


def _program(prompt: str, response: str, entry_point: str | None) -> str | None:
    """The response's program; None when there is none."""
    text = after_reasoning(response)
    if text is None:
        return None
    block = _block(text)
    if block is not None and not block.strip():
        return None
    if entry_point is None or not entry_point.isidentifier():
        return block
    start = _prompt_code(prompt)
    part = text if block is None else block
    if _defines(part, entry_point):
        whole = f"{_stub(start)}\n{part}"  # with the imports and helpers of the prompt
        return whole if start and _compiles(whole) else part
    if start and part.strip():
        # models drop the indentation of the first line, or of all
        for continuation in (part, "    " + part.lstrip(" "), textwrap.indent(part, "    ")):
            if _compiles(start + continuation):
                return start + continuation
    return block


def _block(text: str) -> str | None:
    """The last block of Python, else the last block without a language; None when there is no block, empty when
    the one that counts is not closed."""
    named: str | None = None
    bare: str | None = None
    for language, content in _blocks(text):
        if language in _PYTHON:
            named = content
        elif not language:
            bare = content
    return bare if named is None else named


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block; the content of one that is not closed is empty."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[2].startswith(opened[2]) and not fence[3].strip():
            lines = text[opened.end() + 1 : fence.start()].splitlines(keepends=True)
            yield _language(opened), "".join(line.removeprefix(opened[1]) for line in lines)
            opened = None
    if opened is not None:
        yield _language(opened), ""


def _language(fence: re.Match[str]) -> str:
    words = fence[3].replace("{", " ").replace(",", " ").split()
    return words[0].lower() if words else ""


def _prompt_code(prompt: str) -> str:
    """The start of a program that the prompt holds, ending in an open function; empty when it holds none."""
    for text in (_block(prompt) or "", prompt):
        text = text.rstrip() + "\n"
        if text.strip() and _compiles(_stub(text)):
            return text
    return ""


def _stub(start: str) -> str:
    return start + "    pass\n"


def _defines(text: str, name: str) -> bool:
    return _compiles(text) and any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        for node in ast.parse(text).body
    )


def _compiles(text: str) -> bool:
    try:
        compile(text, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


# --- running --------------------------------------------------------------------------------------------------------


def _run_scripts(program: str, tests: _Scripts, limits: Limits, tolerance: float) -> list[str]:
    jobs = [
        script(given.encode(errors="surrogatepass"), len(wanted.encode(errors="surrogatepass")) + _ROOM_BYTES)
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True)
    ]
    results = run_jobs(program, jobs, limits)
    outcomes = []
    for result, wanted in zip(results, tests.outputs, strict=False):
        outcome = _ending(result)
        if outcome == "correct" and not _same_text(result.stdout.decode(errors="replace"), wanted, tolerance):
            outcome = "wrong"
        outcomes.append(outcome)
    return _complete(outcomes, len(jobs))


def _run_calls(program: str, tests: _Calls, limits: Limits, tolerance: float) -> list[str]:
    jobs = [
        call(tests.name, arguments, 4 * len(json.dumps(wanted)) + _ROOM_BYTES)
        for arguments, wanted in zip(tests.arguments, tests.outputs, strict=True)
    ]
    results = run_jobs(program, jobs, limits)
    outcomes = []
    for result, wanted in zip(results, tests.outputs, strict=False):
        outcome = _ending(result)
        if outcome == "correct":
            outcome = _value_outcome(result.channel, wanted, tolerance)
        outcomes.append(outcome)
    return _complete(outcomes, len(jobs))


def _value_outcome(channel: bytes, wanted: Sequence[Any], tolerance: float) -> str:
    try:
        report = json.loads(channel)
        if "not_plain" in report:
            return "not_plain"
        value = harness.decode(report["value"])
        return "correct" if any(_same(value, one, tolerance) for one in wanted) else "wrong"
    except (ValueError, TypeError, KeyError, RecursionError):
        return "wrong"  # the program ended before its function returned, or wrote there itself


def _run_tests(program: str, prompt: str, tests: _Tests, limits: Limits) -> list[str]:
    """Raises `DataError` when the tests themselves fail."""
    start = _prompt_code(prompt)
    judged, tested = run_tests(program, _stub(start) if start else "", tests.names, tests.statements, limits)
    total = sum(is_case for _, is_case in tests.statements)
    outcomes: list[str] = []
    for line in judged.channel.splitlines():
        report = json.loads(line)
        if "bad" in report:
            raise DataError(f"code: {report['bad']}")
        outcomes.append(report["case"])
    if judged.ended == "exit" and judged.status != 0:
        raise DataError(f"code: the tests fail: {judged.stderr[-200:].decode(errors='replace')}")
    why = _ending(tested)
    if why == "correct":
        why = "exception"  # it ended in order, but before the tests did
    outcomes = [why if outcome == "gone" else outcome for outcome in outcomes[:total]]
    return _complete(outcomes, total)


def _ending(result: Result) -> str:
    if result.ended == "exit" and result.status == 0:
        return "correct"
    return _ENDINGS.get(result.ended, "exception")


def _complete(outcomes: list[str], total: int) -> list[str]:
    """An outcome for each case: those that were not reached fail like what kept them from it."""
    missing = outcomes[-1] if outcomes and outcomes[-1] != "correct" else "timeout"
    return outcomes + [missing] * (total - len(outcomes))


# --- comparison -----------------------------------------------------------------------------------------------------


def _same_text(text: str, wanted: str, tolerance: float) -> bool:
    """Line by line, without the white space at their ends and the empty lines at the end of all."""
    lines, wanted_lines = _lines(text), _lines(wanted)
    return len(lines) == len(wanted_lines) and all(
        line == other or (tolerance > 0 and _same_words(line.split(), other.split(), tolerance))
        for line, other in zip(lines, wanted_lines, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_words(words: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(
        word == other or _same_numbers(word, other, tolerance)
        for word, other in zip(words, wanted, strict=True)
    )


def _same_numbers(word: str, wanted: str, tolerance: float) -> bool:
    try:
        return math.isclose(float(word), float(wanted), rel_tol=tolerance)
    except ValueError:
        return False


def _same(value: Any, wanted: Any, tolerance: float) -> bool:
    """Whether plain data equals JSON: tuples are lists there, and the keys of objects are texts."""
    match value, wanted:
        case [*_], [*_]:
            return len(value) == len(wanted) and all(
                _same(item, other, tolerance) for item, other in zip(value, wanted, strict=True)
            )
        case dict(), dict():
            keyed = {key if isinstance(key, str) else json.dumps(key): item for key, item in value.items()}
            return len(value) == len(wanted) == len(keyed) and all(
                key in keyed and _same(keyed[key], other, tolerance) for key, other in wanted.items()
            )
        case int() | float(), int() | float():
            return value == wanted or (tolerance > 0 and _close(value, wanted, tolerance))
    return value == wanted


def _close(value: float, wanted: float, tolerance: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=tolerance)
    except OverflowError:  # an integer that no float holds
        return False
