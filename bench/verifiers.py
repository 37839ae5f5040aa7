"""The math verifier beside the stock library and a regular expression, and how fast the pool scores.

    python bench/verifiers.py [--every 1] [--limit 12] [--seconds 5]

Agreement: the reported cases, the rewrites of right answers and the wrong edits of the tests, and answers without end, judged by headway, by
math-verify with its default settings, and by the last match of `\\boxed\\{(.*?)\\}` and equality; each in a child process
that is killed after `--limit` seconds for one answer. Then the same with every call made in a thread of its own.
`--every 10` takes each tenth row. Throughput: verdicts per second of a pool with two processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import Item, verify

Row = tuple[str, str, bool]
"""(gold, response, whether it is right)"""

TESTS = Path(__file__).parents[1] / "tests"
_BOX = re.compile(r"\\boxed\{(.*?)\}")


def headway(gold: str, response: str) -> bool:
    verdict = verify("math", gold, response)
    if verdict.reason == "exception":
        raise RuntimeError(verdict)
    return verdict.score == 1


def stock(gold: str, response: str) -> bool:
    import math_verify

    return bool(math_verify.verify(math_verify.parse(f"\\boxed{{{gold}}}"), math_verify.parse(response)))


def naive(gold: str, response: str) -> bool:
    found = _BOX.findall(response)
    return bool(found) and found[-1] == gold


ENDLESS = (
    ("5", "9^{9^{9^{9}}}"),
    ("5", "(10^{8})!"),
    ("5", r"\sum_{k=1}^{10^{9}} \frac{1}{k^2+k!}"),
    ("5", "{" * 3000 + "5" + "}" * 3000),
    (r"\frac{1}{2}", r"\int_0^{10^{9}} \sin(x^{x^{x}}) dx"),
)
"""(gold, answer) that a computer algebra system must not begin to compute."""

CHECKERS: dict[str, Callable[[str, str], bool]] = {
    "headway": headway,
    "math-verify": stock,
    "naive regex": naive,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="take each n-th of the rewrites and edits")
    parser.add_argument("--limit", type=float, default=12.0, help="seconds for one answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement of the pool")
    options = parser.parse_args()
    tables = rows(options.every)
    print(
        "| answers | checker | called in | right verdicts | wrong answers paid | right answers not paid | exceptions, timeouts |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, table in tables.items():
        for checker in CHECKERS:
            for in_thread in (False, True):
                counts = agreement(checker, table, in_thread, options.limit)
                where = "a thread" if in_thread else "the main thread"
                print(
                    f"| {name} ({len(table)}) | {checker} | {where} | {100 * counts['agreed'] / len(table):.1f} % "
                    f"| {counts['wrong paid']} | {counts['right not paid']} | {counts['exception']}, {counts['timeout']} |",
                    flush=True,
                )
    print("\n| answers | verdicts/s, 2 processes |\n|---|---|")
    for name, items in workloads().items():
        print(f"| {name} | {throughput(items, options.seconds):.0f} |", flush=True)


def rows(every: int) -> dict[str, list[Row]]:
    reported, rewrites = _load("test_verifiers"), _load("test_math_rewrites")
    return {
        "reported cases": [
            (gold, response, score == 1) for gold, response, score in reported.REPORTED.values()
        ],
        "rewritten right answers": [(gold, response, True) for _, gold, response in rewrites.rewritten()][
            ::every
        ],
        "answers without end": [(gold, f"\\boxed{{{answer}}}", False) for gold, answer in ENDLESS],
        "edited, now wrong answers": [(gold, response, False) for _, gold, response in rewrites.changed()][
            ::every
        ],
    }


def _load(name: str) -> ModuleType:
    """A test module, which no package holds."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agreement(checker: str, table: list[Row], in_thread: bool, limit_s: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (_, _, is_right), outcome in zip(table, outcomes(checker, table, in_thread, limit_s), strict=True):
        if isinstance(outcome, str):
            counts[outcome] += 1  # neither is a verdict: a trainer would have to make one up
        elif outcome == is_right:
            counts["agreed"] += 1
        else:
            counts["wrong paid" if outcome else "right not paid"] += 1
    return counts


def outcomes(checker: str, table: list[Row], in_thread: bool, limit_s: float) -> Iterator[bool | str]:
    """One verdict per row, or "exception" or "timeout"; a child that took too long is killed and replaced."""
    context = multiprocessing.get_context("spawn")
    child: Any = None
    ours: Any = None
    for gold, response, _ in table:
        if child is None:
            ours, theirs = context.Pipe()
            child = context.Process(target=_judge, args=(checker, in_thread, theirs), daemon=True)
            child.start()
            theirs.close()
            ours.recv()  # imports are done
        ours.send((gold, response))
        try:
            outcome: bool | str = ours.recv() if ours.poll(limit_s) else "timeout"
        except EOFError:
            outcome = "exception"
        yield outcome
        if outcome == "timeout" or not child.is_alive():
            child.kill()
            child.join()
            ours.close()
            child = None
    if child is not None:
        child.kill()
        child.join()


def _judge(checker: str, in_thread: bool, connection: Connection) -> None:
    import logging

    logging.disable()
    judge = CHECKERS[checker]
    judge("5", r"\boxed{5}")
    connection.send("ready")
    while True:
        gold, response = connection.recv()
        result: list[bool | str] = []

        def call(gold: str = gold, response: str = response, result: list[bool | str] = result) -> None:
            try:
                result.append(judge(gold, response))
            except Exception:
                result.append("exception")

        if in_thread:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            call()
        connection.send(result[0])


def workloads() -> dict[str, list[Item]]:
    """Items of three kinds, more than the verifier's caches hold."""
    numbers = range(6000)
    return {
        "numeric": [Item("numeric", str(7 * n), f"That makes {n} * 7 = {7 * n}") for n in numbers],
        "math, numbers": [
            Item("math", rf"\frac{{{n}}}{{8}}", rf"So it is $\boxed{{\dfrac{{{2 * n}}}{{16}}}}$.")
            for n in numbers
        ],
        "math, symbolic": [
            Item("math", rf"x^2 + {n}x + \sqrt{{{n}}}", rf"Thus \boxed{{x(x + {n}) + {n}^{{1/2}}}}.")
            for n in numbers
        ],
    }


def throughput(items: list[Item], seconds: float) -> float:
    with VerifierPool(2, timeout_s=10.0, memory_mib=512) as pool:
        pool.score(items[:200])
        scored = 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            verdicts = pool.score(items)
            assert all(verdict.score == 1 for verdict in verdicts)
            scored += len(verdicts)
        return scored / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
