"""Verdicts that wait for a later stage: what is known so far travels in a row's `extra`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.verifiers.verdict import Verdict

HTTP = "http"
"""The name of the verifier that asks a scorer behind HTTP."""
REWARD_MODEL = "reward_model"
"""The name of the verifier that asks the reward model."""
PENDING = "pending"
"""Reason of a response whose verdict a later stage completes, and the key of `extra` that holds what there is."""


def http(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """Unscored with reason `pending`: the verdict is for the HTTP scorer of the run (`verifiers.http_url`)."""
    return Verdict(score=None, reason=PENDING)


def reward_model(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """Unscored with reason `pending`: the verdict is for the run's reward model (`reward_model.path`)."""
    return Verdict(score=None, reason=PENDING)


def with_pending(extra: str | None, leaves: Sequence[Verdict | None] | None) -> str | None:
    """Column `extra` with the verdicts of a composite's leaves, in order: None for one that is still to come. `leaves`
    None takes them out. Other keys stay; null when none is left."""
    fields: dict[str, Any] = json.loads(extra or "{}")
    fields.pop(PENDING, None)
    if leaves is not None:
        fields[PENDING] = [
            None if leaf is None else [leaf.score, leaf.reason, leaf.extracted, leaf.parts] for leaf in leaves
        ]
    return json.dumps(fields) if fields else None


def pending(extra: str | None) -> list[Verdict | None] | None:
    """The leaves that `with_pending` wrote; None: nothing is pending."""
    leaves = json.loads(extra or "{}").get(PENDING)
    if leaves is None:
        return None
    return [leaf and _verdict(*leaf) for leaf in leaves]


def _verdict(
    score: float | None, reason: str, extracted: str | None, parts: list[tuple[str, float]]
) -> Verdict:
    named = tuple((name, value) for name, value in parts)
    return Verdict(score=score, reason=reason, extracted=extracted, parts=named)
