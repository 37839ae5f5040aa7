"""The verifiers by name, and the one way to call them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headway.core.errors import DataError
from headway.core.plugins import load
from headway.verifiers.choice import choice
from headway.verifiers.code import code, code_solution
from headway.verifiers.composite import expand, weighted
from headway.verifiers.exact import exact, gold_text
from headway.verifiers.gym import reasoning_gym
from headway.verifiers.json_schema import json_schema
from headway.verifiers.json_schema import present as json_gold
from headway.verifiers.judging import JUDGE, judge
from headway.verifiers.mathematics import math
from headway.verifiers.numeric import numeric
from headway.verifiers.pattern import regex
from headway.verifiers.pending import HTTP, REWARD_MODEL, http, reward_model
from headway.verifiers.shaping import length, repetition
from headway.verifiers.tags import tags
from headway.verifiers.verdict import Item, Verdict, wrong

Verifier = Callable[[str, Any, str, Mapping[str, Any]], Verdict]
"""(prompt, gold, response, context) -> verdict; pure and deterministic. Raises `DataError` for a gold or context that is
no good; anything else that it raises is the response's fault."""


def boxed_gold(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    return (f"\\boxed{{{gold_text(gold)}}}",)


def plain_gold(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    return (gold_text(gold),)


def tagged_gold(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    """A generated task without a single right answer has none."""
    return () if gold is None else (f"<answer>{gold}</answer>",)


def no_gold(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    verify: Verifier
    version: int = 1
    """Goes up when the verdict on some response changes."""
    imports: tuple[str, ...] = ()
    """Packages that it imports when first used."""
    present: Callable[[Any, Mapping[str, Any]], Sequence[str]] = boxed_gold
    """(gold, context) -> how a policy may give the gold as its answer: one of these responses scores 1, or the gold is no
    good. Empty: a gold of this kind is no answer. Raises `DataError`."""


VERIFIERS: dict[str, Family] = {
    "exact": Family(exact),
    "numeric": Family(numeric, present=plain_gold),
    "math": Family(math, version=2, imports=("math_verify", "mpmath")),
    "reasoning_gym": Family(reasoning_gym, imports=("reasoning_gym",), present=tagged_gold),
    "choice": Family(choice),
    "tags": Family(tags, present=no_gold),
    "regex": Family(regex, present=no_gold),
    "json_schema": Family(json_schema, imports=("jsonschema",), present=json_gold),
    "length": Family(length, present=no_gold),
    "repetition": Family(repetition, present=no_gold),
    "code": Family(code, present=code_solution),
    "weighted": Family(weighted, present=no_gold),
    HTTP: Family(http, present=no_gold),
    JUDGE: Family(judge, present=no_gold),
    REWARD_MODEL: Family(reward_model, present=no_gold),
}


def verify(
    name: str, gold: Any, response: str, context: Mapping[str, Any] | None = None, prompt: str = ""
) -> Verdict:
    """Scores one response. Never raises because of the response; raises `DataError` for an unknown name, and for
    a gold or context that the verifier cannot use. Has no time or memory limit: those are the pool's."""
    family = lookup(name)
    if not isinstance(response, str):
        return wrong(None, "no_answer")
    try:
        verdict = family.verify(prompt, gold, response, context or {})
    except DataError:
        raise
    except MemoryError:
        return wrong(None, "memory")
    except Exception:
        return wrong(None, "exception")
    if not isinstance(verdict, Verdict) or not (verdict.score is None or 0 <= verdict.score <= 1):
        raise DataError(
            f"verifier {name!r} returned {verdict!r}, which is no Verdict with a score in [0, 1] or None"
        )
    return verdict


def lookup(name: str) -> Family:
    """By its name here, or a user's own: `package.module:function`, `path/to/file.py:function`. Raises `DataError`."""
    if ":" in name:
        return _own(name)
    if name not in VERIFIERS:
        near = difflib.get_close_matches(name, VERIFIERS, n=1)
        raise DataError(
            f"no verifier {name!r}{f', did you mean {near[0]!r}' if near else ''}; there are {', '.join(VERIFIERS)}, and "
            "your own as package.module:function or path/to/file.py:function"
        )
    return VERIFIERS[name]


def _own(name: str) -> Family:
    """A function with the signature of a `Verifier`. Its attributes `version` and `present`, if it has them, are those
    of its `Family`."""
    verifier: Any = load(name)
    if not callable(verifier):
        raise DataError(f"verifier {name!r} is {type(verifier).__name__}, not a function")
    version, present = getattr(verifier, "version", 1), getattr(verifier, "present", _either_way)
    return Family(cast(Verifier, verifier), version=version, present=present)


def _either_way(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    return (*plain_gold(gold, context), *boxed_gold(gold, context))


def needed(
    name: str, gold: Any, response: str, context: Mapping[str, Any] | None = None, prompt: str = ""
) -> frozenset[str]:
    """Names of the verifiers that score this item: its own and, of a composite, those of its parts."""
    if name != "weighted":
        return frozenset([name])
    try:
        return frozenset(
            [name, *(leaf.name for leaf in expand(Item(name, gold, response, context or {}, prompt)))]
        )
    except DataError:  # the verdict will say so
        return frozenset([name])


def preload(names: Iterable[str]) -> None:
    """Imports what these verifiers need, so that it is not charged to the first response."""
    for name in names:
        for package in lookup(name).imports:
            importlib.import_module(package)
