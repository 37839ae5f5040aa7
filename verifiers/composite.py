"""A weighted mean of other verifiers' scores, each of them kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.verdict import Item, Verdict

KIND = "weighted"
"""The name of this verifier: a part of this kind is a composite itself."""
MAX_DEPTH = 4
"""How deep composites may stand in each other."""
MAX_WEIGHT = 10**9
STEP = "step"
"""Parts that are rewards of the response's steps, in order: they keep this name in every composite."""
_OWN = frozenset({"parts", "require", "main"})


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    weight: float
    item: Item


def weighted(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """sum(w * s) / sum(w) over `parts` of the context: {name: {"verifier": kind, "weight": w, …}}.

    What else a part holds goes over the row's context for its verifier, and its `gold` over the row's gold. `require`:
    names of parts that must score 1, or the whole is 0, so that form alone is never paid. The reason and the extracted
    answer are those of the part named by `main` (default: the first), or of the first required part that is below 1.
    Each part's score is in the verdict's parts under its name, and its own parts under "name.part", those of steps excepted. One unscored part
    leaves the whole unscored, with that part's reason. A part of weight 0 is only looked at.

    The limits of a pool hold for the whole; where parts are scored in different places there are `expand` and
    `combine`. Raises `DataError`.
    """
    from headway.verifiers import registry  # which has this verifier in its table

    item = Item(KIND, gold, response, context, prompt)
    verdicts: list[Verdict] = []
    for path, leaf in _leaves(item):
        try:
            verdict = registry.verify(leaf.name, leaf.gold, leaf.response, leaf.context, leaf.prompt)
        except DataError as error:
            raise DataError(_of_part(path, str(error))) from error
        if verdict.reason == "memory":  # this process is near its limit: whoever runs it must see that
            return verdict
        verdicts.append(verdict)
    return combine(item, verdicts)


def expand(item: Item) -> list[Item]:
    """What has to be scored for an item: itself, or the parts of a composite, all the way down, in order. Raises
    `DataError` for a context that is no good."""
    return [leaf for _, leaf in _leaves(item)]


def combine(item: Item, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on an item from those on `expand(item)`, in the same order. Raises `DataError`."""
    if len(verdicts) != (size := len(expand(item))):
        raise ValueError(f"{len(verdicts)} verdicts for {size} parts")
    return _combined(item, iter(verdicts), 0)


def _leaves(item: Item, path: str = "", depth: int = 0) -> Iterator[tuple[str, Item]]:
    if item.name != KIND:
        yield path, item
        return
    for part in _parts(item, depth):
        yield from _leaves(part.item, f"{path}.{part.name}".lstrip("."), depth + 1)


def _combined(item: Item, verdicts: Iterator[Verdict], depth: int) -> Verdict:
    if item.name != KIND:
        return next(verdicts)
    parts = _parts(item, depth)
    found = {part.name: _combined(part.item, verdicts, depth + 1) for part in parts}
    scores: dict[str, float] = {}
    kept: list[tuple[str, float]] = []
    unscored: str | None = None
    for name, verdict in found.items():
        if verdict.score is None:
            unscored = unscored or name
        else:
            scores[name] = verdict.score
            kept.append((name, verdict.score))
        kept.extend((inner if inner == STEP else f"{name}.{inner}", score) for inner, score in verdict.parts)
    if unscored is not None:
        failed = found[unscored]
        detail = _of_part(unscored, failed.extracted or failed.reason)
        return Verdict(score=None, reason=failed.reason, extracted=detail, parts=tuple(kept))
    main = found[_main(item, found)]
    for name in _required(item, found):
        if scores[name] < 1.0:
            reason = found[name].reason
            return Verdict(score=0.0, reason=reason, extracted=main.extracted, parts=tuple(kept))
    # fsum: the same sum in any order, and exactly 1 when all scores are
    total = math.fsum(part.weight * scores[part.name] for part in parts)
    score = total / math.fsum(part.weight for part in parts)
    return Verdict(score=score, reason=main.reason, extracted=main.extracted, parts=tuple(kept))


def _parts(item: Item, depth: int) -> list[_Part]:
    """Raises `DataError`."""
    if depth == MAX_DEPTH:
        raise DataError(f"parts stand more than {MAX_DEPTH} deep in each other")
    given = item.context.get("parts")
    if not isinstance(given, Mapping) or not given:
        raise DataError(f"parts {given!r} is not {{name: {{'verifier': kind, 'weight': w}}}}")
    row = {key: value for key, value in item.context.items() if key not in _OWN}
    parts: list[_Part] = []
    for name, part in given.items():
        if not isinstance(name, str) or not name or "." in name:
            raise DataError(f"parts: {name!r} is not a name without a point")
        if not isinstance(part, Mapping):
            raise DataError(f"parts.{name} {part!r} is not {{'verifier': kind, 'weight': w}}")
        kind, weight = part.get("verifier"), part.get("weight")
        if not isinstance(kind, str) or not kind:
            raise DataError(f"parts.{name}.verifier {kind!r} is not the name of a verifier")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
            raise DataError(f"parts.{name}.weight {weight!r} is not a number from 0 to {MAX_WEIGHT}")
        own = {key: value for key, value in part.items() if key not in ("verifier", "weight", "gold")}
        gold = part.get("gold", item.gold)
        parts.append(_Part(name, weight, Item(kind, gold, item.response, {**row, **own}, item.prompt)))
    if not any(part.weight for part in parts):
        raise DataError("parts: all weights are 0, so nothing counts")
    _main(item, given)
    _required(item, given)
    return parts


def _main(item: Item, parts: Mapping[str, Any]) -> str:
    main = item.context.get("main")
    if main is None:
        return next(iter(parts))
    if not isinstance(main, str) or main not in parts:
        raise DataError(f"main {main!r} is none of the parts {', '.join(map(str, parts))}")
    return main


def _required(item: Item, parts: Mapping[str, Any]) -> list[str]:
    """In the order of the parts."""
    require = item.context.get("require")
    if require is None:
        return []
    if not isinstance(require, list | tuple) or not all(
        isinstance(name, str) and name in parts for name in require
    ):
        raise DataError(
            f"require {require!r} is not a list of names of the parts {', '.join(map(str, parts))}"
        )
    return [name for name in parts if name in require]


def _of_part(path: str, text: str) -> str:
    return f"part {path!r}: {text}"
