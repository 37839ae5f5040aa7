"""The Grafana dashboard, as code. Prints its JSON; `python deploy/grafana/dashboard.py FILE` writes it.

Import the JSON in Grafana (11 or newer) and choose the Prometheus that scrapes the runs. It needs no recording rules.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphGradientMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.common import StackingMode as Stacking
from grafana_foundation_sdk.models.common import TooltipDisplayMode as Tooltip
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 8
"""Of 24 columns: three panels side by side."""
HEIGHT = 8


def on(metric: str, **labels: str) -> str:
    """Series of the chosen runs. A value that begins with `!` is left out instead."""
    matchers = [
        f'{name}!="{value[1:]}"' if value[0] == "!" else f'{name}="{value}"' for name, value in labels.items()
    ]
    return metric + "{" + ", ".join([*matchers, 'instance=~"$instance"']) + "}"


def rate(metric: str, **labels: str) -> str:
    return f"rate({on(metric, **labels)}[$window])"


def mean(histogram: str, **labels: str) -> str:
    """Of what was observed within the window."""
    return f"{rate(f'{histogram}_sum', **labels)} / {rate(f'{histogram}_count', **labels)}"


def quantile(q: float, histogram: str, **labels: str) -> str:
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', **labels)})"


def query(expr: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).legend_format(legend).range().datasource(SOURCE)


def lines(
    title: str,
    queries: Mapping[str, str],
    *,
    unit: str = "short",
    about: str = "",
    most: float | None = None,
    stacked: bool = False,
    dashed: str = "",
) -> timeseries.Panel:
    """Expressions by legend. `dashed` is the legend of a limit that the others are held against."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(WIDTH)
        .height(HEIGHT)
        .unit(unit)
        .line_width(2 if not stacked else 1)
        .fill_opacity(60 if stacked else 0)
        .gradient_mode(GraphGradientMode.NONE)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(Tooltip.MULTI))
    )
    if most is not None:
        panel.min(0).max(most)
    if stacked:
        panel.stacking(common.StackingConfig().mode(Stacking.NORMAL))
    if dashed:
        style = {"fill": "dash", "dash": [10, 10]}
        panel.override_by_name(dashed, [DynamicConfigValue(id_val="custom.lineStyle", value=style)])
    for letter, (legend, expr) in zip(string.ascii_uppercase, queries.items(), strict=False):
        panel.with_target(query(expr, legend).ref_id(letter))
    return panel


def heat(title: str, histogram: str, *, about: str = "", unit: str = "short", **labels: str) -> heatmap.Panel:
    """What was observed within the window, by bucket."""
    buckets = f"sum by (le) (increase({on(f'{histogram}_bucket', **labels)}[$window]))"
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(WIDTH)
        .height(HEIGHT)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
        .show_legend()
        .with_target(query(buckets, "{{le}}").ref_id("A").format(PromQueryFormat.HEATMAP))
    )


def number(title: str, expr: str, *, unit: str = "short", about: str = "") -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(4)
        .height(4)
        .unit(unit)
        .with_target(query(expr, "{{instance}}").ref_id("A"))
    )


Panel = timeseries.Panel | heatmap.Panel | stat.Panel


def overview() -> list[Panel]:
    lag = "headway_version_lag_steps"
    return [
        number("Learner version", on("headway_learner_version"), about="Optimizer steps applied."),
        number(
            "Last step", f"time() - ({on('headway_last_step_timestamp_seconds')} > 0)", unit="s", about="Ago."
        ),
        number("Mean lag", mean(lag, phase="total"), about="Optimizer steps."),
        number(
            "Mean reward", on("headway_sampled_reward_mean"), about="Of all that was sampled, trained or not."
        ),
        number("Tokens/s trained", rate("headway_trained_tokens_total")),
        number("Engines", on("headway_live_replicas", role="generation"), about="That serve."),
    ]


def lag() -> list[Panel]:
    name = "headway_version_lag_steps"
    return [
        lines(
            "Version lag by phase",
            {
                "{{phase}}": mean(name),
                "bound": on("headway_max_version_lag_steps"),
                "effective bound": on("headway_effective_version_lag_steps"),
            },
            about="Mean, in optimizer steps; total = generation + queue.",
            dashed="bound",
        ),
        heat("Version lag of trained groups", name, about="Optimizer steps, in total.", phase="total"),
        lines(
            "Version lag, quantiles",
            {f"p{q * 100:g}": quantile(q, name, phase="total") for q in (0.5, 0.9, 0.99)}
            | {"bound": on("headway_max_version_lag_steps")},
            dashed="bound",
        ),
    ]


def throughput() -> list[Panel]:
    step = "headway_step_seconds"
    total = rate(f"{step}_sum", stage="total")
    return [
        lines(
            "Tokens per second",
            {
                "sampled": rate("headway_generation_tokens_total"),
                "trained": rate("headway_trained_tokens_total"),
            },
        ),
        lines(
            "Step time by stage",
            {"{{stage}}": mean(step)},
            unit="s",
            about="Of one batch; total has the wait in it.",
        ),
        lines(
            "Where a step's time goes",
            {
                "{{stage}}": f"{rate(f'{step}_sum', stage='!total')} / ignoring (stage) group_left {total}",
                "wait for groups": f"{rate('headway_wait_seconds_sum', stage='learner_for_groups')} / ignoring (stage) {total}",
            },
            unit="percentunit",
            most=1,
            stacked=True,
        ),
    ]


def queue() -> list[Panel]:
    return [
        lines(
            "Groups under way",
            {"running": on("headway_groups_running"), "in the queue": on("headway_queue_groups")},
            stacked=True,
        ),
        lines("Queue in the object store", {"queue": on("headway_queue_bytes")}, unit="bytes"),
        lines(
            "What the dispatcher waits for",
            {
                "room under the bound": rate("headway_wait_seconds_sum", stage="gate"),
                "room in the queue": rate("headway_wait_seconds_sum", stage="queue_full"),
            },
            unit="percentunit",
            about="Share of the time; a wait counts when it ends.",
        ),
        lines(
            "Mean wait",
            {"{{stage}}": mean("headway_wait_seconds")},
            unit="s",
            about="Of the waits that ended within the window, by who waits for what.",
        ),
        lines(
            "Nearest deadline",
            {"used": on("headway_wait_deadline_used_ratio")},
            unit="percentunit",
            most=1,
            about="Of all open waits, the one that has used most of its deadline.",
        ),
        lines(
            "Object store full",
            {"refusals": f"increase({on('headway_store_full_total')}[$window])"},
        ),
    ]


def weights() -> list[Panel]:
    sync = "headway_weight_sync_seconds"
    return [
        lines(
            "Weight versions",
            {"learner": on("headway_learner_version"), "engine {{replica}}": on("headway_engine_version")},
        ),
        lines(
            "Weight update by stage",
            {"{{stage}}": mean(sync)},
            unit="s",
            about="Generation stands still during pause.",
        ),
        lines(
            "Publish lag at dispatch", {"mean": mean("headway_publish_lag_steps")}, about="Optimizer steps."
        ),
        lines(
            "Weight updates",
            {
                "per second": rate(f"{sync}_count", stage="total"),
                "failed": rate("headway_weight_sync_failures_total"),
            },
        ),
        lines(
            "KV cache in use",
            {"engine {{replica}}": on("headway_engine_kv_cache_usage_ratio")},
            unit="percentunit",
            most=1,
        ),
        lines(
            "Engine concurrency",
            {
                "engine {{replica}}": on("headway_engine_concurrency_groups"),
                "pushed out of {{replica}}": f"increase({on('headway_engine_preemptions_total')}[$window])",
            },
            about="Groups that an engine may hold, and requests that it pushed out of its cache.",
        ),
    ]


def corrections() -> list[Panel]:
    return [
        lines(
            "Effective sample size",
            {
                "uncapped weights": on("headway_importance_ess_fraction"),
                "with corrections": on("headway_correction_ess_fraction"),
            },
            unit="percentunit",
            most=1,
            about="Over the number of trained tokens, last step.",
        ),
        lines(
            "Tokens left out of the loss", {"{{reason}}": on("headway_masked_fraction")}, unit="percentunit"
        ),
        heat("Importance weights", "headway_importance_weight", about="Uncapped, per trained token."),
        lines(
            "KL of the behavior policy",
            {
                "engine, lag 0": on("headway_engine_learner_kl"),
                "behavior, all lags": on("headway_behavior_kl"),
            },
            about="k3, nats per token. Lag 0 is numerical mismatch alone.",
        ),
        lines(
            "ESS under each correction",
            {"{{reason}}": on("headway_counterfactual_ess_fraction")},
            unit="percentunit",
            most=1,
        ),
        lines(
            "Rejected by each correction",
            {"{{reason}}": on("headway_counterfactual_masked_fraction")},
            unit="percentunit",
        ),
    ]


def learning() -> list[Panel]:
    return [
        lines(
            "Reward",
            {
                "trained": on("headway_reward_mean"),
                "sampled": on("headway_sampled_reward_mean"),
            },
        ),
        heat("Reward of trained responses", "headway_reward"),
        lines(
            "Response length",
            {
                "trained": mean("headway_response_tokens"),
                "sampled": mean("headway_sampled_response_tokens"),
                "sampled, p95": quantile(0.95, "headway_sampled_response_tokens"),
            },
            about="Tokens.",
        ),
        lines(
            "Shares of the last batch",
            {
                "truncated": on("headway_truncated_fraction"),
                "no signal": on("headway_no_signal_groups_fraction"),
                "clipped": on("headway_clipped_fraction"),
            },
            unit="percentunit",
            most=1,
        ),
        lines("Gradient norm", {"gradient norm": on("headway_grad_norm")}, about="Before clipping."),
        lines(
            "Entropy and KL to the reference",
            {
                "entropy": on("headway_entropy"),
                "KL": on("headway_kl_reference"),
                "weight of the KL": on("headway_kl_coef"),
            },
            about="Nats; KL per token.",
        ),
        lines("Loss", {"policy": on("headway_loss"), "critic": on("headway_value_loss")}),
        lines("Learning rate", {"learning rate": on("headway_learning_rate")}, unit="sci"),
        lines(
            "Sampled against trained",
            {
                "length": on("headway_audit_length_ks"),
                "reward": on("headway_audit_reward_ks"),
                "task": on("headway_audit_task_distance"),
            },
            most=1,
            about="Distances between what was sampled and what was trained (0: the same).",
        ),
    ]


def verifiers() -> list[Panel]:
    seconds = "headway_verifier_seconds"
    errors = f"sum without (reason) ({rate('headway_verifier_errors_total')})"
    return [
        lines(
            "Time of a verdict",
            {"mean": mean(seconds), "p95": quantile(0.95, seconds)},
            unit="s",
        ),
        lines(
            "Errors and limits by reason",
            {"{{reason}}": rate("headway_verifier_errors_total")},
            about="Per second.",
        ),
        lines(
            "Share of errors",
            {"errors": f"{errors} / {rate(f'{seconds}_count')}"},
            unit="percentunit",
        ),
        lines(
            "Groups at scorers", {"{{role}}": on("headway_scorer_groups")}, about="Waiting or being scored."
        ),
        lines(
            "Time of a group at a scorer",
            {"{{role}}": mean("headway_scoring_seconds")},
            unit="s",
            about="Its wait there included.",
        ),
        lines(
            "Unscored responses", {"unscored": rate("headway_unscored_responses_total")}, about="Per second."
        ),
        lines(
            "HTTP scorer",
            {"{{outcome}}": rate("headway_http_scorer_requests_total")},
            about="Requests per second.",
        ),
        lines(
            "Circuit of the HTTP scorer",
            {"state": on("headway_http_scorer_circuit_state")},
            about="0 closed, 1 half open, 2 open: no request is sent.",
            most=2,
        ),
    ]


def actors() -> list[Panel]:
    return [
        lines("Groups by state", {"{{state}}": rate("headway_groups_total")}, about="Per second."),
        lines(
            "Dropped groups by reason",
            {"{{reason}}": rate("headway_groups_dropped_total")},
            about="Per second.",
        ),
        lines(
            "Groups issued again",
            {
                "actor died": f"increase({on('headway_groups_reissued_total')}[$window])",
                "handed back": f"increase({on('headway_groups_handed_back_total')}[$window])",
            },
        ),
        lines(
            "Restarts",
            {
                "{{role}}": f"increase({on('headway_actor_restarts_total')}[$window])",
                "run": f"increase({on('headway_run_restarts_total')}[$window])",
            },
        ),
        lines(
            "Replicas",
            {"{{role}}": on("headway_live_replicas"), "target": on("headway_target_replicas")},
            dashed="target",
        ),
        lines(
            "Values that were not finite", {"values": f"increase({on('headway_nonfinite_total')}[$window])"}
        ),
    ]


ROWS = {
    "Now": overview,
    "Version lag": lag,
    "Throughput and step time": throughput,
    "Queue and waits": queue,
    "Weights and engines": weights,
    "Corrections": corrections,
    "Reward, lengths, loss": learning,
    "Verifiers": verifiers,
    "Groups and restarts": actors,
}


def build() -> str:
    """The dashboard's JSON."""
    instances = (
        dashboard.QueryVariable("instance")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(headway_learner_version, instance)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(False)
    )
    window = (
        dashboard.IntervalVariable("window")
        .label("Window of rates")
        .values("1m,5m,15m,1h")
        .current(VariableOption(text="5m", value="5m", selected=True))
    )
    board = (
        dashboard.Dashboard("headway")
        .uid("headway")
        .description("Asynchronous reinforcement learning: version lag, throughput, corrections, reward.")
        .tags(["headway"])
        .time("now-3h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(instances)
        .with_variable(window)
    )
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title))
        for panel in panels():
            board.with_panel(panel)
    made = board.build()
    for number, panel in enumerate(made.panels or (), 1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2).encode(made) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(build(), encoding="utf-8")
    else:
        sys.stdout.write(build())
