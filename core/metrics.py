"""Every metric: name, kind, unit in the name, labels, help. Series exist from the start, at zero."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SCORERS = ("verifiers", "judge", "reward_model", "reference", "critic")
ROLES = ("learner", "generation", *SCORERS, "queue", "metrics", "control")
DROP_REASONS = ("straggler", "generation_failed", "verifier_failed", "group_too_small", "stale", "no_signal")
ROWS = ("train", "held_out")
STATES = ("issued", "finished", "trained", "dropped")
STEP_STAGES = ("take", "unpack", "forward_backward", "optimizer", "publish", "total")
WAIT_STAGES = (
    "learner_for_groups",
    "gate",
    "queue_full",
    "engine",
    "group",
    "replacement",
    "weights",
    "train",
    "publish",
    "queue",
    "checkpoint",
    "start",
    "metrics",
)
SYNC_STAGES = ("fetch", "pause", "load", "total")
HTTP_FAILURES = ("http_error", "http_timeout", "http_bad_reply", "http_circuit_open")
VERIFIER_ERRORS = (
    "timeout",
    "memory",
    "crash",
    "exception",
    "bad_gold",
    "sandbox",
    "environment_error",
    "environment_timeout",
    *HTTP_FAILURES,
    "http_unscored",
    "judge_no_verdict",
    "judge_timeout",
    "judge_too_long",
    "reward_not_finite",
    "other",
)
REJECTING = ("mis_token", "mis_sequence", "veto", "off_policy_mask")
CORRECTIONS = ("none", "is_token", "tis_token", "tis_sequence", *REJECTING)
PHASES = ("generation", "queue", "total")

LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REWARD_BUCKETS = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
WEIGHT_BUCKETS = (0.01, 0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2, 4, 10, 100)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """With prefix and unit; counters end in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    """The one label, if any."""
    values: tuple[str, ...] = ()
    """Its values that exist from the start."""
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "headway_version_lag_steps",
        "histogram",
        "Version lag of trained groups in optimizer steps: learner version when trained minus oldest sampling version (total), split into the part during generation and the part in the queue.",
        "phase",
        PHASES,
        LAG_BUCKETS,
    ),
    Metric("headway_max_version_lag_steps", "gauge", "Configured bound on the version lag."),
    Metric(
        "headway_effective_version_lag_steps",
        "gauge",
        "Bound that admission keeps to: the configured one, or less while the ESS is low (lag.ess_floor).",
    ),
    Metric("headway_learner_version", "gauge", "Optimizer steps applied."),
    Metric("headway_engine_version", "gauge", "Weight version live on a generation engine.", "replica"),
    Metric(
        "headway_publish_lag_steps",
        "histogram",
        "Learner version minus version live on the engine when a group is dispatched.",
        "",
        (),
        LAG_BUCKETS,
    ),
    Metric(
        "headway_groups_total", "counter", "Prompt groups by the state that they reached.", "state", STATES
    ),
    Metric(
        "headway_groups_dropped_total",
        "counter",
        "Prompt groups that were not trained, by reason.",
        "reason",
        DROP_REASONS,
    ),
    Metric("headway_groups_running", "gauge", "Prompt groups being generated or scored."),
    Metric(
        "headway_groups_reissued_total",
        "counter",
        "Prompt groups issued again because an actor died with them.",
    ),
    Metric(
        "headway_groups_handed_back_total",
        "counter",
        "Prompt groups that an engine gave back unfinished when it left; they go on at another one.",
    ),
    Metric("headway_queue_groups", "gauge", "Finished groups that wait for the learner."),
    Metric("headway_queue_bytes", "gauge", "Their size in the object store."),
    Metric("headway_store_full_total", "counter", "Times that the object store took no more groups."),
    Metric("headway_generation_tokens_total", "counter", "Tokens sampled by the engines."),
    Metric("headway_trained_tokens_total", "counter", "Response tokens trained on."),
    Metric(
        "headway_step_seconds",
        "histogram",
        "Time of a batch (learner.steps_per_batch optimizer steps), by stage.",
        "stage",
        STEP_STAGES,
        SECONDS_BUCKETS,
    ),
    Metric(
        "headway_offline_loss",
        "gauge",
        "Loss of the last step on rows that were there already, and of the rows held out.",
        "rows",
        ROWS,
    ),
    Metric(
        "headway_preference_accuracy",
        "gauge",
        "Share of pairs (or labelled steps) on the right side.",
        "rows",
        ROWS,
    ),
    Metric(
        "headway_preference_margin",
        "gauge",
        "Mean (implicit) reward of preferred answers minus that of the others.",
        "rows",
        ROWS,
    ),
    Metric(
        "headway_wait_seconds",
        "histogram",
        "Time spent waiting, by who waits for what.",
        "stage",
        WAIT_STAGES,
        SECONDS_BUCKETS,
    ),
    Metric(
        "headway_wait_deadline_used_ratio",
        "gauge",
        "Time of the open wait that is nearest to its deadline, over that deadline.",
    ),
    Metric(
        "headway_weight_sync_seconds",
        "histogram",
        "Time of a weight update on one engine, by stage; generation stands still during pause.",
        "stage",
        SYNC_STAGES,
        SECONDS_BUCKETS,
    ),
    Metric(
        "headway_weight_sync_failures_total",
        "counter",
        "Weight updates that an engine refused or did not finish.",
    ),
    Metric(
        "headway_importance_ess_fraction",
        "gauge",
        "Effective sample size of the uncapped importance weights over the number of trained tokens, last step.",
    ),
    Metric(
        "headway_correction_ess_fraction",
        "gauge",
        "The same of the factors that the loss was weighted with, rejected tokens as 0.",
    ),
    Metric(
        "headway_counterfactual_masked_fraction",
        "gauge",
        "Share of the last step's tokens that each correction would have rejected, whichever are on.",
        "reason",
        CORRECTIONS,
    ),
    Metric(
        "headway_counterfactual_ess_fraction",
        "gauge",
        "ESS fraction that each correction would have left, whichever are on.",
        "reason",
        CORRECTIONS,
    ),
    Metric(
        "headway_importance_weight",
        "histogram",
        "Uncapped importance weight of proximal against behavior policy, per trained token.",
        "",
        (),
        WEIGHT_BUCKETS,
    ),
    Metric(
        "headway_masked_fraction",
        "gauge",
        "Share of the last batch's sampled tokens left out of the loss, by reason.",
        "reason",
        ("unscored", "truncated", "no_signal", "missing_logprob", "withheld", *REJECTING),
    ),
    Metric(
        "headway_clipped_fraction", "gauge", "Share of trained tokens whose ratio clip is active, last step."
    ),
    Metric(
        "headway_engine_learner_kl",
        "gauge",
        "k3 estimate of KL(engine || learner) on tokens sampled at version lag 0 (numerical mismatch, nats per token); keeps its last value while no such token is trained.",
    ),
    Metric(
        "headway_behavior_kl",
        "gauge",
        "k3 estimate of KL(behavior || proximal policy) on all trained tokens, last step (nats per token).",
    ),
    Metric(
        "headway_kl_reference", "gauge", "k3 estimate of KL(policy || reference), last step (nats per token)."
    ),
    Metric("headway_kl_coef", "gauge", "Weight of the KL in the reward or the loss."),
    Metric("headway_reward", "histogram", "Reward of trained responses.", "", (), REWARD_BUCKETS),
    Metric("headway_reward_mean", "gauge", "Mean reward of the last batch's scored responses."),
    Metric(
        "headway_sampled_reward_mean",
        "gauge",
        "Mean reward of the responses that the last batch trained and of those that were dropped since the batch before.",
    ),
    Metric(
        "headway_no_signal_groups_fraction",
        "gauge",
        "Share of the last batch's groups whose rewards are all equal.",
    ),
    Metric(
        "headway_unscored_responses_total",
        "counter",
        "Responses without a verdict, left out of statistics and loss.",
    ),
    Metric(
        "headway_truncated_fraction",
        "gauge",
        "Share of the last batch's responses that hit the token budget.",
    ),
    Metric("headway_response_tokens", "histogram", "Length of trained responses.", "", (), TOKEN_BUCKETS),
    Metric(
        "headway_sampled_response_tokens",
        "histogram",
        "Length of all finished responses, trained or not.",
        "",
        (),
        TOKEN_BUCKETS,
    ),
    Metric(
        "headway_audit_length_ks",
        "gauge",
        "Largest distance between the length distributions of sampled and of trained responses so far (Kolmogorov-Smirnov).",
    ),
    Metric(
        "headway_audit_reward_ks",
        "gauge",
        "The same distance between the rewards of sampled and of trained responses.",
    ),
    Metric(
        "headway_audit_task_distance",
        "gauge",
        "Total variation distance between the kinds of task of dispatched and of trained groups.",
    ),
    Metric(
        "headway_entropy",
        "gauge",
        "Mean entropy of the learner's next-token distribution on trained tokens, last step (nats).",
    ),
    Metric("headway_loss", "gauge", "Policy loss of the last step."),
    Metric("headway_grad_norm", "gauge", "Global gradient norm before clipping, last step."),
    Metric(
        "headway_learning_rate", "gauge", "Learning rate of the last step, scaled by the ESS where asked."
    ),
    Metric("headway_value_loss", "gauge", "Critic's loss, last step."),
    Metric(
        "headway_explained_variance",
        "gauge",
        "1 - Var(returns - values) / Var(returns) of the critic's values at scoring, last step.",
    ),
    Metric("headway_nonfinite_total", "counter", "Values that a step reported as NaN or infinite."),
    Metric("headway_verifier_seconds", "histogram", "Time to score one response.", "", (), SECONDS_BUCKETS),
    Metric(
        "headway_verifier_errors_total",
        "counter",
        "Responses left unscored or scored 0 by a limit, by reason.",
        "reason",
        VERIFIER_ERRORS,
    ),
    Metric("headway_scorer_groups", "gauge", "Groups at a scorer, waiting or being scored.", "role", SCORERS),
    Metric(
        "headway_scoring_seconds",
        "histogram",
        "Time that a group spent at a scorer, its wait there included.",
        "role",
        SCORERS,
        SECONDS_BUCKETS,
    ),
    Metric(
        "headway_http_scorer_requests_total",
        "counter",
        "Requests to the HTTP scorer by how they ended, retries included.",
        "outcome",
        ("ok", *HTTP_FAILURES),
    ),
    Metric(
        "headway_http_scorer_circuit_state",
        "gauge",
        "Of the HTTP scorer's circuit breaker: 0 closed, 1 half open (a request tries), 2 open (none is sent).",
    ),
    Metric(
        "headway_engine_concurrency_groups",
        "gauge",
        "Groups that an engine may have in flight; falls under KV-cache pressure.",
        "replica",
    ),
    Metric(
        "headway_engine_kv_cache_usage_ratio", "gauge", "Share of an engine's KV cache in use.", "replica"
    ),
    Metric(
        "headway_engine_preemptions_total",
        "counter",
        "Requests that an engine pushed out of its KV cache to make room.",
        "replica",
    ),
    Metric("headway_target_replicas", "gauge", "Engines that the run is to have."),
    Metric(
        "headway_run_restarts_total", "counter", "Times that the run went on from a checkpoint by itself."
    ),
    Metric("headway_actor_restarts_total", "counter", "Actors replaced after a failure.", "role", ROLES),
    Metric("headway_live_replicas", "gauge", "Replicas that are up.", "role", ROLES),
    Metric(
        "headway_last_step_timestamp_seconds",
        "gauge",
        "When the last optimizer step ended, seconds since the epoch.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}

Update = tuple[str, str, float | tuple[tuple[int, ...], float]]
"""(metric, label value, payload): counter increment, gauge value, or histogram (count per bucket, the last one
open-ended, not cumulative; exact sum)."""


class Recorder:
    """Collects updates in one process until the next heartbeat takes them. Histograms are reduced at once, so
    a million observations cost a few integers."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], float] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._histograms: dict[tuple[str, str], tuple[list[int], float]] = {}

    def inc(self, name: str, value: float = 1.0, *, label: str = "") -> None:
        assert BY_NAME[name].kind == "counter" and value >= 0
        self._counters[name, label] = self._counters.get((name, label), 0.0) + value

    def set(self, name: str, value: float, *, label: str = "") -> None:
        """A NaN or infinite value is counted and the gauge keeps its last one."""
        assert BY_NAME[name].kind == "gauge"
        if not math.isfinite(value):
            self.inc("headway_nonfinite_total")
            return
        self._gauges[name, label] = value + 0.0  # -0.0 becomes 0.0

    def observe(self, name: str, values: Iterable[float], *, label: str = "") -> None:
        metric = BY_NAME[name]
        assert metric.kind == "histogram"
        counts, total = self._histograms.get((name, label)) or ([0] * (len(metric.buckets) + 1), 0.0)
        for value in values:
            if not math.isfinite(value):
                self.inc("headway_nonfinite_total")
                continue
            counts[bisect.bisect_left(metric.buckets, value)] += 1
            total += value
        self._histograms[name, label] = (counts, total)

    def extend(self, updates: Iterable[Update]) -> None:
        """Adds what another process recorded."""
        for name, label, payload in updates:
            key = (name, label)
            if isinstance(payload, tuple):
                counts, total = self._histograms.get(key) or ([0] * len(payload[0]), 0.0)
                added = [a + b for a, b in zip(counts, payload[0], strict=True)]
                self._histograms[key] = (added, total + payload[1])
            elif BY_NAME[name].kind == "counter":
                self._counters[key] = self._counters.get(key, 0.0) + payload
            else:
                self._gauges[key] = payload

    def drain(self) -> list[Update]:
        """All updates since the last call."""
        updates: list[Update] = [(*key, value) for key, value in self._counters.items()]
        updates += [(*key, value) for key, value in self._gauges.items()]
        updates += [(*key, (tuple(counts), total)) for key, (counts, total) in self._histograms.items()]
        self._counters, self._gauges, self._histograms = {}, {}, {}
        return updates
