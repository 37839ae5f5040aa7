"""From an optimizer step's statistics to metrics and to its line in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.cluster.state import Group
from headway.core.metrics import Recorder
from headway.learner.stats import StepStats


def observe_step(recorder: Recorder, step: StepStats, groups: Sequence[Group]) -> dict[str, Any]:
    """Records the step that trained `groups`, and returns its record: JSON values, null where there is none."""
    trained_at = step.version - 1
    gauges = {
        "headway_importance_ess_fraction": step.ess_fraction,
        "headway_clipped_fraction": step.clipped_fraction,
        "headway_behavior_kl": step.behavior_kl,
        "headway_engine_learner_kl": step.engine_learner_kl,
        "headway_reward_mean": step.reward_mean,
        "headway_no_signal_groups_fraction": step.no_signal_groups / len(groups),
        "headway_truncated_fraction": step.truncated_fraction,
        "headway_entropy": step.entropy,
        "headway_loss": step.loss,
        "headway_grad_norm": step.grad_norm,
        "headway_learning_rate": step.learning_rate,
    }
    for name, value in gauges.items():
        if value is not None:
            recorder.set(name, value)
    for reason, value in step.masked_fraction.items():
        recorder.set("headway_masked_fraction", value, label=reason)
    recorder.inc("headway_trained_tokens_total", step.num_tokens)
    recorder.inc("headway_unscored_responses_total", step.num_unscored)
    recorder.observe("headway_reward", step.rewards)
    recorder.observe("headway_response_tokens", step.response_lengths)
    recorder.observe("headway_importance_weight", step.importance_weights.tolist())
    return {
        "version": step.version,
        **{name.removeprefix("headway_"): value for name, value in gauges.items()},
        "masked_fraction": step.masked_fraction,
        "lag": [trained_at - group.receipt.oldest_version for group in groups if group.receipt],
        "lag_queue": [trained_at - group.finished_at_version for group in groups],
        "response_tokens": step.response_lengths,
        "trained_tokens": step.num_tokens,
    }
