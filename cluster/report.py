"""The report of a run: one HTML file that refers to nothing outside itself, made from what the run folder holds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cluster.page import write_page
from headway.cluster.report_plots import (
    OFFLINE,
    Record,
    mean,
    offline_plots,
    plots,
    ratio,
    steps_per_point,
    values,
)
from headway.cluster.stored import (
    Batch,
    Rollout,
    Wanted,
    batches,
    decode,
    find,
    find_tokenizer,
    read_columns,
    read_config,
)
from headway.core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN_OF_EACH = 2
"""Best and worst responses of a batch."""


def write_report(run_folder: Path) -> Path:
    """Writes `run_folder/report.html`, whole or not at all, and returns its path. Raises `DataError` when the
    folder holds no optimizer step."""
    steps, duration_s, unreadable = read_metrics(run_folder / "metrics.jsonl")
    config = read_config(run_folder)
    path = run_folder / "report.html"
    page: dict[str, Any] = {
        "folder": run_folder.resolve().name,
        "config": config,
        "config_text": json.dumps(config, indent=2, ensure_ascii=False),
        "duration": timedelta(seconds=round(duration_s)),
        "steps": steps,
        "unreadable": unreadable,
        "steps_per_point": steps_per_point(steps),
    }
    if (stage := config.get("stage") or "rl") != "rl":
        ends = _offline_headlines(steps)
        write_page("offline.html.j2", path, stage=stage, ends=ends, plots=offline_plots(steps), **page)
        return path
    # Dynamic sampling trains neither solved nor hopeless prompts: what it trains says little about all of them.
    selects = (config.get("algorithm") or {}).get("dynamic_sampling")
    reward = "sampled_reward_mean" if selects else "reward_mean"
    write_page(
        "report.html.j2",
        path,
        headlines=_headlines(steps, reward),
        plots=plots(steps, reward),
        corrections=_corrections(steps),
        by_lag=_by_lag(steps),
        audit=steps[-1].get("audit") or {},
        samples=_samples(run_folder, config, {record["version"] for record in steps}),
        **page,
    )
    return path


def reported(run_folder: Path) -> str:
    """Writes the report and says where it is, or why there is none: a run ends as it does, with a page about it or without."""
    try:
        return f"report: {write_report(run_folder)}"
    except (DataError, OSError) as error:
        return f"no report: {error}"


def read_metrics(path: Path) -> tuple[list[Record], float, int]:
    """The steps that led to the final weights, in order; the seconds that all processes of the run worked; the
    number of lines that are no record, such as one that a crash cut off.

    A version that does not rise is a resume and undoes every step from there on. Raises `DataError` without steps.
    """
    steps: list[Record] = []
    unreadable, duration, clock, newest = 0, 0.0, 0.0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            version = record["version"] = int(record["version"])
        except (ValueError, TypeError, KeyError):
            unreadable += 1
            continue
        time_s = sum(values([record], "time_s"))
        if version <= newest or time_s < clock:  # another process: its clock started at 0
            duration += clock
        clock, newest = time_s, version
        while steps and steps[-1]["version"] >= version:
            steps.pop()
        steps.append(record)
    if not steps:
        raise DataError(f"{path} holds no optimizer step: the run finished none, or this is not a run folder")
    return steps, duration + clock, unreadable


def _headlines(steps: list[Record], reward: str) -> dict[str, float]:
    """The run's most important figures; NaN where unknown. `reward`: the record's key that speaks for all prompts."""
    tenth = math.ceil(len(steps) / 10)
    lags, ess = values(steps, "lag"), values(steps, "importance_ess_fraction")
    tokens, total = sum(values(steps, "trained_tokens")), sum(values(steps, "seconds", "total"))
    waited = sum(values(steps, "waited_s"))
    computed = sum(sum(values(steps, "seconds", x)) for x in ("unpack", "forward_backward", "optimizer"))
    return {
        "groups": len(lags),
        "tenth": tenth,
        "reward_first": mean(values(steps[:tenth], reward)),
        "reward_last": mean(values(steps[-tenth:], reward)),
        "lagging": mean([lag >= 1 for lag in lags]),
        "lag_mean": mean(lags),
        "lag_max": max(lags, default=math.nan),
        "tokens": tokens,
        "tokens_per_s": ratio(tokens, total),
        "ess_mean": mean(ess),
        "ess_min": min(ess, default=math.nan),
        "waiting": ratio(waited, total),
        "overhead": 1 - ratio(waited + computed, total),
    }


def _offline_headlines(steps: list[Record]) -> list[tuple[str, str, float, float]]:
    """(title, of which rows, first value, last value) of what was measured, on rows held out where there are any."""
    found = []
    for title, key in OFFLINE.items():
        for part, rows in (("held_out", "held-out rows"), ("train", "trained rows")):
            if measured := values(steps, part, key):
                found.append((title, rows, measured[0], measured[-1]))
                break
    return found


def _corrections(steps: list[Record]) -> list[tuple[str, float, float, float]]:
    """(correction, share of tokens and of responses that it would have rejected, ESS that it would have left), means
    over steps."""
    names = dict.fromkeys(name for step in steps for name in step.get("counterfactuals") or ())
    keys = ("tokens", "responses", "ess_fraction")
    return [
        (name, *(mean(values(steps, "counterfactuals", name, key)) for key in keys))  # type: ignore[misc]
        for name in names
    ]


def _by_lag(steps: list[Record]) -> list[tuple[str, int, float, float, float]]:
    """(lag, steps that trained tokens of that lag, mean ESS, largest weight, mean KL from the behavior policy)."""
    lags = {lag for step in steps for lag in step.get("by_lag") or ()}
    rows = []
    for lag in sorted(lags, key=int):
        ess = values(steps, "by_lag", lag, "ess_fraction")
        largest = max(values(steps, "by_lag", lag, "max"), default=math.nan)
        rows.append((lag, len(ess), mean(ess), largest, mean(values(steps, "by_lag", lag, "k3"))))
    return rows


def _samples(run_folder: Path, config: Record, versions: set[int]) -> list[dict[str, Any]]:
    """The best and the worst responses of the first, middle and last stored batch of the run; a resume may have left
    others."""
    try:
        stored = batches(run_folder, config)
    except DataError:  # it keeps none
        return []
    own = [batch for batch in stored if batch.first_version + batch.num_steps in versions]
    tokenizer = find_tokenizer(run_folder, config)
    chosen = sorted({0, len(own) // 2, len(own) - 1}) if own else []
    return [_sample(own[index], tokenizer) for index in chosen]


def _sample(batch: Batch, tokenizer: Tokenizer | None) -> dict[str, Any]:
    rollouts = find(batch, Wanted())
    scored = [(rollout.reward, rollout) for rollout in rollouts if rollout.reward is not None]
    ranked = [rollout for _, rollout in sorted(scored, key=lambda pair: -pair[0])]
    return {
        "step": batch.first_version + batch.num_steps,
        "num_responses": len(rollouts),
        "num_groups": len({rollout.group_id for rollout in rollouts}),
        "reward": mean([reward for reward, _ in scored]),
        "reasons": Counter(rollout.reason or "no verdict" for rollout in rollouts).most_common(),
        "shown": {
            "best": _with_texts(_one_per_group(ranked), tokenizer),
            "worst": _with_texts(_one_per_group(ranked[::-1]), tokenizer),
        },
    }


def _one_per_group(rollouts: Iterable[Rollout]) -> list[Rollout]:
    first: dict[int, Rollout] = {}
    for rollout in rollouts:
        first.setdefault(rollout.group_id, rollout)
    return list(first.values())[:SHOWN_OF_EACH]


def _with_texts(rollouts: Sequence[Rollout], tokenizer: Tokenizer | None) -> list[tuple[Rollout, str, str]]:
    """(rollout, prompt, response); without the tokenizer no prompt."""
    rows = read_columns(rollouts, ["prompt_ids", "text"])
    return [
        (rollout, decode(tokenizer, row["prompt_ids"]) if tokenizer else "", row["text"])
        for rollout, row in zip(rollouts, rows, strict=True)
    ]
