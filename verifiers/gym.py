"""Tasks of reasoning-gym, scored by the task's own scorer."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import tagged_answer
from headway.verifiers.verdict import Verdict, correct, wrong

NEARLY_ONE = 1 - 1e-6

EVALUATED = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Tasks whose scorer calls `eval` on the answer, for less than full marks; no right answer has a parenthesis."""
PARSED = frozenset({
    "simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown",
})  # fmt: skip
"""Tasks whose scorer gives the answer to sympy's `parse_expr`, which calls `eval`."""
_FORMULA = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call,
)  # fmt: skip
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln",
    "sqrt", "abs", "Abs",
})  # fmt: skip


def reasoning_gym(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 only for full marks of the task's scorer; with `partial: true` in the context what the scorer gives. The
    context says which entry of which dataset was asked: task, size, seed, params, index. Raises `DataError` when it
    does not, or when the entry cannot be rebuilt."""
    partial = context.get("partial")
    if not isinstance(partial, bool | None):
        raise DataError(f"partial {partial!r} is neither true nor false")
    try:
        key = (
            context["task"],
            context["size"],
            context["seed"],
            json.dumps(context["params"], sort_keys=True),
        )
        dataset, entry = _entry(*key, context["index"])
    except (KeyError, IndexError, TypeError, ValueError, AssertionError, AttributeError) as error:
        raise DataError(
            f"no reasoning-gym entry for {dict(context)}: {type(error).__name__}: {error}"
        ) from error
    if entry["answer"] != gold:
        raise DataError(
            f"reasoning-gym gives another entry here for {dict(context)}: its answer is {entry['answer']!r}, the gold "
            f"{gold!r}. Some tasks depend on PYTHONHASHSEED, which must then be the same in all processes"
        )
    answer = tagged_answer(response)
    if not answer:
        return wrong(None, "no_answer")
    if may_run_code(entry["metadata"].get("source_dataset", context["task"]), answer):
        return wrong(answer, "code")
    score = float(dataset.score_answer(answer, entry))
    if score >= NEARLY_ONE:
        return correct(answer)
    if partial and score > 0:
        return Verdict(score=score, reason="partial", extracted=answer)
    return wrong(answer)


def may_run_code(task: str, answer: str) -> bool:
    """Whether the task's scorer would evaluate an answer that is more than a literal or a formula."""
    if task in EVALUATED:
        return "(" in answer
    return task in PARSED and not _is_formula(answer)


def _is_formula(text: str) -> bool:
    """Numbers, names, operators and calls of elementary functions, as Python writes them."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return all(isinstance(node, _FORMULA) and _is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.Name(id=name):
            return "__" not in name
        case ast.Call(func=function, keywords=keywords):
            return isinstance(function, ast.Name) and function.id in _FUNCTIONS and not keywords
    return True


@lru_cache(maxsize=64)
def _dataset(task: str, size: int, seed: int, params: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(task, size=size, seed=seed, **json.loads(params))


@lru_cache(maxsize=1024)
def _entry(task: str, size: int, seed: int, params: str, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(task, size, seed, params)
    return dataset, dataset[index]
