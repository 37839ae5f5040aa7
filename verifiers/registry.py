"""The verifiers by name, and the one way to call them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.core.errors import DataError
from headway.core.plugins import load
from headway.verifiers.exact import exact, gold_text
from headway.verifiers.gym import reasoning_gym
from headway.verifiers.mathematics import math
from headway.verifiers.numeric import numeric
from headway.verifiers.verdict import Verdict, wrong

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


class Item(NamedTuple):
    """One response to be scored."""

    name: str
    """Of its verifier."""
    gold: Any
    response: str
    context: Mapping[str, Any] = {}
    """Options of the verifier, and whatever else the dataset's row holds."""
    prompt: str = ""


VERIFIERS: dict[str, Family] = {
    "exact": Family(exact),
    "numeric": Family(numeric, present=plain_gold),
    "math": Family(math, imports=("math_verify", "mpmath")),
    "reasoning_gym": Family(reasoning_gym, imports=("reasoning_gym",), present=tagged_gold),
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
    function = load(name)
    if not callable(function):
        raise DataError(f"verifier {name!r} is {type(function).__name__}, not a function")
    return Family(
        function, version=getattr(function, "version", 1), present=getattr(function, "present", _either_way)
    )


def _either_way(gold: Any, context: Mapping[str, Any]) -> Sequence[str]:
    return (*plain_gold(gold, context), *boxed_gold(gold, context))


def preload(names: Iterable[str]) -> None:
    """Imports what these verifiers need, so that it is not charged to the first response."""
    for name in names:
        for package in lookup(name).imports:
            importlib.import_module(package)
