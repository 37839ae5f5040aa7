"""From an optimizer step's statistics to metrics and to its line in `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cluster.state import Group
from headway.core.metrics import Recorder

if TYPE_CHECKING:  # they need torch, which the simulator does without
    from headway.learner.critic import CriticStats
    from headway.learner.stats import StepStats


def observe_step(
    recorder: Recorder, step: StepStats, groups: Sequence[Group], max_trained_lag: int
) -> dict[str, Any]:
    """Records the step that trained `groups`, and returns its record: JSON values, null where there is none."""
    trained_at = step.version - 1
    for name, value in _gauges(step, len(groups)).items():
        if value is not None:
            recorder.set(f"headway_{name}", value)
    for reason, value in step.masked_fraction.items():
        recorder.set("headway_masked_fraction", value, label=reason)
    for name, other in step.counterfactuals.items():
        recorder.set("headway_counterfactual_masked_fraction", other.tokens, label=name)
        recorder.set("headway_counterfactual_ess_fraction", other.ess_fraction, label=name)
    recorder.inc("headway_trained_tokens_total", step.num_tokens)
    recorder.inc("headway_unscored_responses_total", step.num_unscored)
    recorder.observe("headway_reward", step.rewards)
    recorder.observe("headway_response_tokens", step.response_lengths)
    recorder.observe("headway_importance_weight", step.importance_weights.tolist())
    return {
        **step_record(step, len(groups)),
        "lag": [
            min(trained_at - group.receipt.oldest_version, max_trained_lag)
            for group in groups
            if group.receipt
        ],
        "reward_parts": _reward_parts([group.receipt.parts for group in groups if group.receipt]),
        "lag_queue": [trained_at - group.finished_at_version for group in groups],
    }


def _reward_parts(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Mean of each named part over the step's responses that have it."""
    names = dict.fromkeys(name for each in parts for name in each)
    found = {name: [each[name] for each in parts if name in each] for name in names}
    return {name: sum(s for s, _ in sums) / sum(n for _, n in sums) for name, sums in found.items()}


def step_record(step: StepStats, num_groups: int) -> dict[str, Any]:
    """What `metrics.jsonl` says about a step that the learner alone knows."""
    return {
        "version": step.version,
        **_gauges(step, num_groups),
        "masked_fraction": step.masked_fraction,
        "rejected_responses": step.rejected_responses,
        "counterfactuals": {name: asdict(other) for name, other in step.counterfactuals.items()},
        "by_lag": {str(lag): asdict(statistics) for lag, statistics in step.by_lag.items()},
        "ess_lr_scale": step.ess_lr_scale,
        "stopped_by_kl": step.stopped_by_kl,
        "sft_loss": step.sft_loss,
        **({"trust_region": asdict(step.trust_region)} if step.trust_region else {}),
        "response_tokens": step.response_lengths,
        "trained_tokens": step.num_tokens,
    }


def _gauges(step: StepStats, num_groups: int) -> dict[str, float | None]:
    """By name of the metric without its prefix."""
    return {
        "importance_ess_fraction": step.ess_fraction,
        "correction_ess_fraction": step.correction_ess_fraction,
        "kl_reference": step.kl_reference,
        "kl_coef": step.kl_coef,
        "clipped_fraction": step.clipped_fraction,
        "behavior_kl": step.behavior_kl,
        "engine_learner_kl": step.engine_learner_kl,
        "reward_mean": step.reward_mean,
        "no_signal_groups_fraction": step.no_signal_groups / num_groups,
        "truncated_fraction": step.truncated_fraction,
        "entropy": step.entropy,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
    }


def observe_critic(recorder: Recorder, step: CriticStats) -> dict[str, Any]:
    """Records the critic's part of a step, and returns its part of the record."""
    values = {"value_loss": step.value_loss, "explained_variance": step.explained_variance}
    for name, value in values.items():
        if value is not None:
            recorder.set(f"headway_{name}", value)
    return {**values, "critic_grad_norm": step.grad_norm}


def keep_steps(file: Path, version: int) -> None:
    """Leaves out the steps after this version, which are taken again."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["version"] <= version]
    draft = file.with_suffix(".partial")
    draft.write_text("".join(kept), encoding="utf-8")
    draft.replace(file)


def keep_batches(folder: Path, version: int) -> None:
    """Takes away the stored batches of the steps after this version. A run that ends before it has taken them again, or that
    stores no rollouts any more, would have some that it was never trained on."""
    for file in folder.glob("step-*.parquet"):
        if int(file.stem.removeprefix("step-")) > version:
            file.unlink()
