"""The plots of a report: small SVG drawings of step records, in the colours of the page's style sheet."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

MAX_POINTS = 250
"""A longer run is drawn with several steps to a point, so that the file stays small."""
MAX_LAG_SHOWN = 4
"""Higher lags share its colour."""
NAMES = ("muted", "line", "a", "b", "c", "d")
COLORS = {name: f"#00000{digit}" for digit, name in enumerate(NAMES, start=1)}
"""Matplotlib knows fixed colours only; each of these stands for a variable of the style sheet, for dark mode."""
PALETTE = [(color, opacity) for opacity in (1.0, 0.55, 0.25) for color in ("a", "b", "c", "d")]
"""For as many layers as there are."""

OFFLINE = {"Loss": "loss", "Accuracy, share of pairs": "accuracy", "Margin, mean": "margin"}
"""Plots of an offline stage, with their key in a record's parts `train` and `held_out`."""
PARTS = "Parts of the reward, mean"
Record = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A line through `high`, or with `low` the area between the two. One value per point; NaN: none."""

    label: str
    color: str
    high: np.ndarray
    low: np.ndarray | None = None
    opacity: float = 1.0
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    layers: Sequence[Layer]
    svg: Markup | None
    """None where there is nothing to draw."""


def steps_per_point(steps: Sequence[Record]) -> int:
    return math.ceil(len(steps) / MAX_POINTS)


def offline_plots(steps: list[Record]) -> list[Plot]:
    """Those of a stage that learns from rows that are there already."""
    points, edges = _points(steps)

    def line(label: str, color: str, *keys: str, dots: bool = False) -> Layer:
        return Layer(label, color, np.array([mean(values(point, *keys)) for point in points]), dots=dots)

    drawn = {
        title: [
            line("trained rows", "a", "train", key),
            line("held-out rows", "b", "held_out", key, dots=True),
        ]
        for title, key in OFFLINE.items()
        if values(steps, "train", key) or values(steps, "held_out", key)
    }
    drawn["Gradient norm before clipping"] = [line("", "a", "grad_norm")]
    drawn["Step time, seconds"] = [line("", "a", "seconds")]
    return [Plot(title, layers, _svg(edges, layers)) for title, layers in drawn.items()]


def _points(steps: list[Record]) -> tuple[list[list[Record]], np.ndarray]:
    """The steps of each point, and [points + 1] where the points' steps meet."""
    width = steps_per_point(steps)
    points = [steps[start : start + width] for start in range(0, len(steps), width)]
    return points, np.array([*(point[0]["version"] for point in points), steps[-1]["version"] + 1]) - 0.5


def plots(steps: list[Record], reward: str) -> list[Plot]:
    """Every plot of a run, over its optimizer steps. `reward`: the record's key that speaks for all prompts."""
    points, edges = _points(steps)

    def line(label: str, color: str, *keys: str, opacity: float = 1.0, dots: bool = False) -> Layer:
        means = np.array([mean(values(point, *keys)) for point in points])
        return Layer(label, color, means, opacity=opacity, dots=dots)

    drawn: dict[str, Sequence[Layer]] = {
        "Reward": _reward(steps, points, reward, line(_reward_label(reward), "a", reward, opacity=0.5))
        + ([line("of trained groups", "c", "reward_mean", opacity=0.5)] if reward != "reward_mean" else []),
        **_parts(steps, line),
        "Response length, tokens": _lengths(points),
        "Share of groups by version lag": _shares_by_lag(points),
        "Version lag by phase, mean in steps": _lag_by_phase(points),
        "Effective sample size, share of trained tokens": [
            line("uncapped weights", "a", "importance_ess_fraction"),
            line("factors of the loss", "b", "correction_ess_fraction"),
        ],
        "Masked, share of sampled tokens by reason": _masked(steps, points),
        "KL divergence, nats per token": [
            line("behavior to proximal policy", "a", "behavior_kl"),
            line("engine to learner at lag 0", "b", "engine_learner_kl", dots=True),
            *([line("policy to reference", "c", "kl_reference")] if values(steps, "kl_reference") else []),
        ],
        "Shares of groups, responses and tokens": [
            line("groups without signal", "a", "no_signal_groups_fraction"),
            line("truncated responses", "b", "truncated_fraction"),
            line("clipped tokens", "c", "clipped_fraction"),
        ],
        **(
            {
                "Critic": [
                    line("explained variance", "a", "explained_variance"),
                    line("value loss", "b", "value_loss"),
                ]
            }
            if values(steps, "value_loss")
            else {}
        ),
        "Entropy, nats per trained token": [line("", "a", "entropy")],
        "Gradient norm before clipping": [line("", "a", "grad_norm")],
        "Step time, seconds": _stacked(_stages(points)),
        "Step time, shares": _stacked(_of_total(_stages(points))),
        "Trained tokens per second": [Layer("", "a", np.array([_speed(point) for point in points]))],
        "Audit: distance of what was trained from what was sampled": [
            line("lengths (KS)", "a", "audit", "length_ks"),
            line("rewards (KS)", "b", "audit", "reward_ks"),
            line("kinds of task (total variation)", "c", "audit", "task_distance"),
        ],
    }
    found = [Plot(title, layers, _svg(edges, layers)) for title, layers in drawn.items()]
    kl = np.array([mean(values(point, "kl_reference")) for point in points])
    if np.isfinite(kl).any():
        against = [
            replace(layer, dots=True, opacity=1.0) for layer in (drawn["Reward"][0], *drawn.get(PARTS, ()))
        ]
        found.insert(
            1, Plot("Reward against KL to the reference, nats per token", against, _svg(edges, against, kl))
        )
    return found


def _parts(steps: list[Record], line: Callable[..., Layer]) -> dict[str, list[Layer]]:
    """The parts of the reward, by name, where it has several."""
    names = list(dict.fromkeys(name for step in steps for name in step.get("reward_parts") or ()))
    if not names:
        return {}
    colors = zip(names, PALETTE[1:], strict=False)
    return {PARTS: [line(name, color, "reward_parts", name, opacity=o) for name, (color, o) in colors]}


def _reward_label(reward: str) -> str:
    return "mean reward" if reward == "reward_mean" else "of all samples"


def _reward(steps: list[Record], points: list[list[Record]], reward: str, each: Layer) -> list[Layer]:
    width = len(points[0])
    window = width * max(5, len(points) // 20)
    ends = [(index + 1) * width for index in range(len(points))]
    running = np.array([mean(values(steps[max(0, end - window) : end], reward)) for end in ends])
    return [each, Layer(f"over the last {window} steps", "b", running)]


def _lengths(points: list[list[Record]]) -> list[Layer]:
    lengths = [values(point, "response_tokens") or [math.nan] for point in points]
    p10, median, p90 = np.transpose([np.quantile(length, (0.1, 0.5, 0.9)) for length in lengths])
    longest = np.array([max(length) for length in lengths])
    return [
        Layer("10th to 90th percentile", "a", p90, low=p10, opacity=0.25),
        Layer("median", "a", median),
        Layer("longest", "muted", longest, opacity=0.7),
    ]


def _shares_by_lag(points: list[list[Record]]) -> list[Layer]:
    lags = [[min(lag, MAX_LAG_SHOWN) for lag in values(point, "lag")] for point in points]
    highest = int(max((lag for point in lags for lag in point), default=0))
    layers = []
    for lag in range(highest + 1):
        share = np.array([mean([x == lag for x in point]) for point in lags])
        label = f"{lag} or more" if lag == MAX_LAG_SHOWN else str(lag)
        layers.append(Layer(label, "a", share, opacity=0.2 + 0.75 * lag / (highest or 1)))
    return _stacked(layers)


def _lag_by_phase(points: list[list[Record]]) -> list[Layer]:
    total = np.array([mean(values(point, "lag")) for point in points])
    queue = np.array([mean(values(point, "lag_queue")) for point in points])
    largest = np.array([max(values(point, "lag"), default=math.nan) for point in points])
    phases = [Layer("generation", "a", total - queue), Layer("queue", "b", queue)]
    return [*_stacked(phases), Layer("largest, total", "c", largest)]


def _masked(steps: list[Record], points: list[list[Record]]) -> list[Layer]:
    """Of the reasons that left anything out. Corrections may reject the same token, so their shares do not add up."""
    names = dict.fromkeys(name for step in steps for name in step.get("masked_fraction") or ())
    used = [name for name in names if any(values(steps, "masked_fraction", name))]
    if names and not used:
        return [Layer("none", "a", np.zeros(len(points)))]
    return [
        Layer(
            name.replace("_", " "),
            color,
            np.array([mean(values(point, "masked_fraction", name)) for point in points]),
            opacity=opacity,
        )
        for name, (color, opacity) in zip(used, PALETTE, strict=False)
    ]


def _stages(points: list[list[Record]]) -> list[Layer]:
    def seconds(*keys: str) -> np.ndarray:
        return np.array([mean(values(point, *keys)) for point in points])

    stages = [
        Layer("waited for groups", "b", seconds("waited_s")),
        Layer("forward and backward", "a", seconds("seconds", "forward_backward")),
        Layer("optimizer", "c", seconds("seconds", "optimizer")),
        Layer("publish", "d", seconds("seconds", "publish")),
    ]
    rest = seconds("seconds", "total") - np.nansum([stage.high for stage in stages], axis=0)
    return [*stages, Layer("rest", "muted", rest)]


def _of_total(layers: list[Layer]) -> list[Layer]:
    total = np.sum([np.nan_to_num(layer.high).clip(min=0) for layer in layers], axis=0)
    return [
        replace(
            layer, high=np.divide(layer.high, total, out=np.full_like(layer.high, np.nan), where=total > 0)
        )
        for layer in layers
    ]


def _speed(point: list[Record]) -> float:
    return ratio(sum(values(point, "trained_tokens")), sum(values(point, "seconds", "total")))


def _stacked(layers: Sequence[Layer]) -> list[Layer]:
    """Heights turned into areas on top of each other; an unknown height is none."""
    if not any(np.isfinite(layer.high).any() for layer in layers):
        return list(layers)
    heights = [np.nan_to_num(layer.high).clip(min=0) for layer in layers]
    tops = np.cumsum(heights, axis=0)
    return [replace(layers[i], low=tops[i] - heights[i], high=tops[i]) for i in range(len(layers))]


def _svg(edges: np.ndarray, layers: Sequence[Layer], x: np.ndarray | None = None) -> Markup | None:
    """One small plot; None when there is nothing to draw. `edges` [points + 1]: where the points' steps meet; `x` [points]:
    what dots are drawn over instead."""
    if not any(np.isfinite(layer.high).any() for layer in layers):
        return None
    centers = (edges[:-1] + edges[1:]) / 2 if x is None else x
    fixed: Any = {"svg.fonttype": "none", "svg.hashsalt": "headway", "font.family": "DejaVu Sans"}
    with rc_context(fixed):
        figure = Figure(figsize=(4.6, 1.9))
        axes = figure.add_axes((0.125, 0.12, 0.84, 0.84))
        for layer in layers:
            look: dict[str, Any] = {"color": COLORS[layer.color], "alpha": layer.opacity}
            if layer.low is not None:
                axes.stairs(layer.high, edges, baseline=layer.low, fill=True, linewidth=0, **look)
                continue
            known = np.isfinite(layer.high) & np.isfinite(centers)
            form = "o" if layer.dots else "o-" if known.sum() <= 40 else "-"
            axes.plot(centers[known], layer.high[known], form, markersize=2.5, **look)
        if x is None:
            axes.set_xlim(edges[0], edges[-1])
        if axes.dataLim.y0 >= 0:
            axes.set_ylim(0, 1.12 * axes.dataLim.y1 or 1)
        axes.grid(axis="y", color=COLORS["line"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=9, labelcolor=COLORS["muted"])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x is None, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value + 0.0:.6g}"))
        figure.savefig(file := io.StringIO(), format="svg", transparent=True)
    # Inside a page the namespaces are known, and the names of matplotlib's groups would repeat from plot to plot.
    noise = r'<metadata>.*?</metadata>|<!--.*?-->| xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"| transform="rotate\(-0[^"]*"'
    svg = re.sub(noise, "", file.getvalue().partition("<svg")[2], flags=re.DOTALL)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    # Safe as markup: no text of a model or a user gets into a plot.
    return Markup("<svg" + re.sub(r"\s*\n\s*", "\n", svg))


def values(steps: Iterable[Record], *keys: str) -> list[float]:
    """The finite numbers at a path of keys in all steps, those of lists one by one."""
    found: list[Any] = list(steps)
    for key in keys:
        found = [item.get(key) if isinstance(item, dict) else None for item in found]
    flat = (value for item in found for value in (item if isinstance(item, list) else [item]))
    return [value for value in flat if isinstance(value, int | float) and math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
