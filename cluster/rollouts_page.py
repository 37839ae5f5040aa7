"""One page with rollouts, token for token: what the engine and the learner thought of each, and which version sampled it."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cluster.page import write_page
from headway.cluster.stored import Rollout, decode, in_chunks, pieces, read_columns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STEPS = (0.02, 0.1, 0.3, 1.0)
"""|log-ratio| in nats from which on the colour is one deeper."""
NUM_VERSION_COLORS = 6
"""A version has the colour of its number modulo this: neighbours differ."""
ROLLOUTS_AT_ONCE = 32
COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "behavior_logprobs", "proximal_logprobs")


def write_rollouts_page(
    path: Path,
    run_folder: Path,
    config: Mapping[str, Any],
    sections: Mapping[str, Sequence[Rollout]],
    tokenizer: Tokenizer | None,
    asked: str,
) -> None:
    """Writes the sections' rollouts, by title, to one file that refers to nothing outside itself. `asked`: the filters,
    for the reader. Raises `OSError`, and `DataError` for rollouts that cannot be read."""
    write_page(
        "rollouts.html.j2",
        path,
        name=(config.get("run") or {}).get("name") or run_folder.resolve().name,
        asked=asked,
        count=sum(map(len, sections.values())),
        sections={title: _articles(rows, tokenizer) for title, rows in sections.items()},
        steps=STEPS,
        num_version_colors=NUM_VERSION_COLORS,
        has_texts=tokenizer is not None,
    )


def _articles(rollouts: Sequence[Rollout], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    return [
        _article(rollout, row, tokenizer)
        for chunk in in_chunks(rollouts, ROLLOUTS_AT_ONCE)
        for rollout, row in zip(chunk, read_columns(chunk, COLUMNS), strict=True)
    ]


def _article(rollout: Rollout, row: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids, mask, behavior = row["response_ids"], row["loss_mask"], row["behavior_logprobs"]
    proximal = row["proximal_logprobs"] or [math.nan] * len(ids)
    versions = [version for start, end, version in rollout.spans for _ in range(end - start)]
    tokens = [
        (piece, token_class(is_own, after - before, version))
        for piece, is_own, before, after, version in zip(
            pieces(tokenizer, ids), mask, behavior, proximal, versions, strict=True
        )
    ]
    return {
        "rollout": rollout,
        "kind": kind_of(rollout.reward),
        "prompt": decode(tokenizer, row["prompt_ids"]),
        "tokens": tokens,
        "ids": " ".join(map(str, ids)),
        "behavior": " ".join(map(_figure, behavior)),
        "proximal": " ".join(map(_figure, proximal)),
        "versions": " ".join(map(str, versions)),
        "num_own": sum(mask),
        "num_compared": sum(
            bool(own) and math.isfinite(b - a) for own, a, b in zip(mask, behavior, proximal, strict=True)
        ),
    }


def kind_of(reward: float | None) -> str:
    """Class of the style sheet."""
    if reward is None:
        return "unscored"
    return "high" if reward >= 1 else "low" if reward <= 0 else "middle"


def token_class(is_own: int, log_ratio: float, version: int) -> str:
    """Classes of the style sheet: `m` masked; `p1` to `p4` more and `n1` to `n4` less likely to the learner, `u` unknown;
    `v0` to `v5` by version."""
    if not is_own:
        return "m"
    by_version = f"v{version % NUM_VERSION_COLORS}"
    if not math.isfinite(log_ratio):
        return f"u {by_version}"
    depth = bisect(STEPS, abs(log_ratio))
    return f"{'p' if log_ratio > 0 else 'n'}{depth} {by_version}" if depth else by_version


def _figure(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "-"
