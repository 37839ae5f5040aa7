"""The verifiers by name, and the one way to call them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.exact import exact
from headway.verifiers.gym import reasoning_gym
from headway.verifiers.mathematics import math
from headway.verifiers.numeric import numeric
from headway.verifiers.verdict import Verdict, wrong

Verifier = Callable[[Any, str, Mapping[str, Any]], Verdict]
"""(gold, response, context) -> verdict. Raises `DataError` for a gold or context that is no good; anything else
that it raises is the response's fault."""

VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "numeric": numeric,
    "math": math,
    "reasoning_gym": reasoning_gym,
}

_HEAVY = {"math": ("math_verify", "mpmath"), "reasoning_gym": ("reasoning_gym",)}
"""Packages that a verifier imports when first used."""


def verify(name: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """Scores one response. Never raises because of the response; raises `DataError` for an unknown name, and for
    a gold or context that the verifier cannot use. Has no time or memory limit: those are the pool's."""
    verifier = lookup(name)
    if not isinstance(response, str):
        return wrong(None, "no_answer")
    try:
        return verifier(gold, response, context)
    except DataError:
        raise
    except MemoryError:
        return wrong(None, "memory")
    except Exception:
        return wrong(None, "exception")


def lookup(name: str) -> Verifier:
    """Raises `DataError` for an unknown name."""
    if name not in VERIFIERS:
        raise DataError(f"no verifier {name!r}; there are {', '.join(VERIFIERS)}")
    return VERIFIERS[name]


def preload(names: Iterable[str]) -> None:
    """Imports what these verifiers need, so that it is not charged to the first response."""
    for name in names:
        for package in _HEAVY.get(name, ()):
            importlib.import_module(package)
