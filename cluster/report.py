"""The report of a run: one HTML file that refers to nothing outside itself, made from what the run folder holds."""

from __future__ import annotations

import io
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChainableUndefined, Environment
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from headway.core.errors import DataError
from headway.core.rollouts import read_parquet

MAX_POINTS = 250
"""A longer run is drawn with several steps to a point, so that the file stays small."""
MAX_CHARACTERS = 4000
"""A longer response loses its middle."""
MAX_LAG_SHOWN = 4
"""Higher lags share its colour."""
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of characters that do not show, or that move others."""

COLORS = {name: f"#00000{digit}" for digit, name in enumerate(("muted", "line", "a", "b", "c", "d"), start=1)}
"""Matplotlib knows fixed colours only; each of these stands for a variable of the style sheet, for dark mode."""

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


def write_report(run_folder: Path) -> Path:
    """Writes `run_folder/report.html`, whole or not at all, and returns its path. Raises `DataError` when the
    folder holds no optimizer step."""
    steps, duration_s, unreadable = read_metrics(run_folder / "metrics.jsonl")
    config_file = run_folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    # Dynamic sampling trains neither solved nor hopeless prompts: what it trains says little about all of them.
    selects = (config.get("algorithm") or {}).get("dynamic_sampling")
    reward = "sampled_reward_mean" if selects else "reward_mean"
    environment = Environment(autoescape=True, undefined=ChainableUndefined)
    environment.filters.update(number=number, visible=visible)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        folder=run_folder.resolve().name,
        config=config,
        config_text=json.dumps(config, indent=2, ensure_ascii=False),
        duration=timedelta(seconds=round(duration_s)),
        steps=steps,
        unreadable=unreadable,
        headlines=_headlines(steps, reward),
        steps_per_point=math.ceil(len(steps) / MAX_POINTS),
        plots=_plots(steps, reward),
        corrections=_corrections(steps),
        by_lag=_by_lag(steps),
        audit=steps[-1].get("audit") or {},
        samples=_samples(run_folder / "rollouts", config, [record["version"] for record in steps]),
    )
    path = run_folder / "report.html"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(page, encoding="utf-8")
    os.replace(draft, path)
    return path


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
        time_s = sum(_values([record], "time_s"))
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
    lags, ess = _values(steps, "lag"), _values(steps, "importance_ess_fraction")
    tokens, total = sum(_values(steps, "trained_tokens")), sum(_values(steps, "seconds", "total"))
    waited = sum(_values(steps, "waited_s"))
    computed = sum(sum(_values(steps, "seconds", x)) for x in ("unpack", "forward_backward", "optimizer"))
    return {
        "groups": len(lags),
        "tenth": tenth,
        "reward_first": _mean(_values(steps[:tenth], reward)),
        "reward_last": _mean(_values(steps[-tenth:], reward)),
        "lagging": _mean([lag >= 1 for lag in lags]),
        "lag_mean": _mean(lags),
        "lag_max": max(lags, default=math.nan),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, total),
        "ess_mean": _mean(ess),
        "ess_min": min(ess, default=math.nan),
        "waiting": _ratio(waited, total),
        "overhead": 1 - _ratio(waited + computed, total),
    }


def _corrections(steps: list[Record]) -> list[tuple[str, float, float, float]]:
    """(correction, share of tokens and of responses that it would have rejected, ESS that it would have left), means
    over steps."""
    names = dict.fromkeys(name for step in steps for name in step.get("counterfactuals") or ())
    keys = ("tokens", "responses", "ess_fraction")
    return [
        (name, *(_mean(_values(steps, "counterfactuals", name, key)) for key in keys))  # type: ignore[misc]
        for name in names
    ]


def _by_lag(steps: list[Record]) -> list[tuple[str, int, float, float, float]]:
    """(lag, steps that trained tokens of that lag, mean ESS, largest weight, mean KL from the behavior policy)."""
    lags = {lag for step in steps for lag in step.get("by_lag") or ()}
    rows = []
    for lag in sorted(lags, key=int):
        ess = _values(steps, "by_lag", lag, "ess_fraction")
        largest = max(_values(steps, "by_lag", lag, "max"), default=math.nan)
        rows.append((lag, len(ess), _mean(ess), largest, _mean(_values(steps, "by_lag", lag, "k3"))))
    return rows


def _plots(steps: list[Record], reward: str) -> list[tuple[str, Sequence[Layer], Markup | None]]:
    """(title, layers, drawing) of every plot."""
    width = math.ceil(len(steps) / MAX_POINTS)
    points = [steps[start : start + width] for start in range(0, len(steps), width)]

    def line(label: str, color: str, *keys: str, opacity: float = 1.0, dots: bool = False) -> Layer:
        means = np.array([_mean(_values(point, *keys)) for point in points])
        return Layer(label, color, means, opacity=opacity, dots=dots)

    window = width * max(5, len(points) // 20)
    ends = [(index + 1) * width for index in range(len(points))]
    running = np.array([_mean(_values(steps[max(0, end - window) : end], reward)) for end in ends])

    lags = [[min(lag, MAX_LAG_SHOWN) for lag in _values(point, "lag")] for point in points]
    highest = int(max((lag for point in lags for lag in point), default=0))
    by_lag = []
    for lag in range(highest + 1):
        share = np.array([_mean([x == lag for x in point]) for point in lags])
        label = f"{lag} or more" if lag == MAX_LAG_SHOWN else str(lag)
        by_lag.append(Layer(label, "a", share, opacity=0.2 + 0.75 * lag / (highest or 1)))

    lengths = [_values(point, "response_tokens") or [math.nan] for point in points]
    p10, median, p90 = np.transpose([np.quantile(length, (0.1, 0.5, 0.9)) for length in lengths])

    stages = [line("waited", "b", "waited_s"), line("forward_backward", "a", "seconds", "forward_backward")]
    stages += [line("optimizer", "c", "seconds", "optimizer"), line("publish", "d", "seconds", "publish")]
    rest = line("rest", "muted", "seconds", "total")
    stages.append(replace(rest, high=rest.high - np.nansum([stage.high for stage in stages], axis=0)))
    speed = [_ratio(sum(_values(p, "trained_tokens")), sum(_values(p, "seconds", "total"))) for p in points]
    plots: dict[str, Sequence[Layer]] = {
        "Reward": [
            line("mean reward" if reward == "reward_mean" else "of all samples", "a", reward, opacity=0.5),
            Layer(f"over the last {window} steps", "b", running),
            *(
                [line("of trained groups", "c", "reward_mean", opacity=0.5)]
                if reward != "reward_mean"
                else []
            ),
        ],
        "Share of groups by version lag": _stacked(by_lag),
        "Effective sample size, share of trained tokens": [
            line("uncapped weights", "a", "importance_ess_fraction"),
            line("factors of the loss", "b", "correction_ess_fraction"),
        ],
        "KL divergence, nats per token": [
            line("behavior to proximal policy", "a", "behavior_kl"),
            line("engine to learner at lag 0", "b", "engine_learner_kl", dots=True),
            *([line("policy to reference", "c", "kl_reference")] if _values(steps, "kl_reference") else []),
        ],
        "Response length, tokens": [
            Layer("10th to 90th percentile", "a", p90, low=p10, opacity=0.25),
            Layer("median", "a", median),
        ],
        "Shares of groups, responses and tokens": [
            line("groups without signal", "a", "no_signal_groups_fraction"),
            line("truncated responses", "b", "truncated_fraction"),
            line("clipped tokens", "c", "clipped_fraction"),
        ],
        "Entropy, nats per trained token": [line("", "a", "entropy")],
        "Gradient norm before clipping": [line("", "a", "grad_norm")],
        "Step time, seconds": _stacked(stages),
        "Trained tokens per second": [Layer("", "a", np.array(speed))],
    }
    edges = np.array([*(point[0]["version"] for point in points), steps[-1]["version"] + 1]) - 0.5
    return [(title, layers, _svg(edges, layers)) for title, layers in plots.items()]


def _stacked(layers: Sequence[Layer]) -> list[Layer]:
    """Heights turned into areas on top of each other; an unknown height is none."""
    heights = [np.nan_to_num(layer.high).clip(min=0) for layer in layers]
    tops = np.cumsum(heights, axis=0)
    return [replace(layers[i], low=tops[i] - heights[i], high=tops[i]) for i in range(len(layers))]


def _svg(edges: np.ndarray, layers: Sequence[Layer]) -> Markup | None:
    """One small plot; None when there is nothing to draw. `edges` [points + 1]: where the points' steps meet."""
    if not any(np.isfinite(layer.high).any() for layer in layers):
        return None
    centers = (edges[:-1] + edges[1:]) / 2
    fixed: Any = {"svg.fonttype": "none", "svg.hashsalt": "headway", "font.family": "DejaVu Sans"}
    with rc_context(fixed):
        figure = Figure(figsize=(4.6, 1.9))
        axes = figure.add_axes((0.125, 0.12, 0.84, 0.84))
        for layer in layers:
            look: dict[str, Any] = {"color": COLORS[layer.color], "alpha": layer.opacity}
            if layer.low is not None:
                axes.stairs(layer.high, edges, baseline=layer.low, fill=True, linewidth=0, **look)
                continue
            known = np.isfinite(layer.high)
            form = "o" if layer.dots else "o-" if known.sum() <= 40 else "-"
            axes.plot(centers[known], layer.high[known], form, markersize=2.5, **look)
        axes.set_xlim(edges[0], edges[-1])
        if axes.dataLim.y0 >= 0:
            axes.set_ylim(0, 1.12 * axes.dataLim.y1 or 1)
        axes.grid(axis="y", color=COLORS["line"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=9, labelcolor=COLORS["muted"])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
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


def _samples(folder: Path, config: Record, versions: Iterable[int]) -> list[dict[str, Any]]:
    """The best and the worst responses of the first, middle and last stored batch."""
    files = [path for version in versions if (path := folder / f"step-{version:06d}.parquet").exists()]
    return [_sample(files[index], config) for index in sorted({0, len(files) // 2, len(files) - 1}) if files]


def _sample(path: Path, config: Record) -> dict[str, Any]:
    table = read_parquet(path)
    version = int(table.schema.metadata.get(b"version", path.stem.removeprefix("step-")))
    columns = ["group_id", "prompt_id", "version_spans", "truncated", "text", "reward", "verdict_reason"]
    rows = table.select(columns).to_pylist()
    group_ids = list(dict.fromkeys(row["group_id"] for row in rows))
    learner = config.get("learner") or {}
    first_version = version - (learner.get("steps_per_batch") or 1)
    groups_per_step = learner.get("groups_per_step") or len(group_ids)
    for row in rows:
        trained_at = first_version + group_ids.index(row["group_id"]) // groups_per_step
        row["num_tokens"] = sum(span["end"] - span["start"] for span in row["version_spans"])
        row["lag"] = trained_at - min((span["version"] for span in row["version_spans"]), default=trained_at)
        row["text"] = _excerpt(row["text"])
    ranked = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
    return {
        "step": version,
        "num_responses": len(rows),
        "num_groups": len(group_ids),
        "reward": _mean([row["reward"] for row in ranked]),
        "reasons": Counter(row["verdict_reason"] or "no verdict" for row in rows).most_common(),
        "shown": {"best": _one_per_group(ranked), "worst": _one_per_group(ranked[::-1])},
    }


def _one_per_group(rows: Iterable[Record], limit: int = 2) -> list[Record]:
    first: dict[int, Record] = {}
    for row in rows:
        first.setdefault(row["group_id"], row)
    return list(first.values())[:limit]


def _excerpt(text: str) -> str:
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}" if left_out > 0 else text


def visible(text: str) -> str:
    """The text with every character that would not be seen, or would move others, as its number; newlines stay."""
    unseen = {c for c in set(text) if c != "\n" and unicodedata.category(c) in UNSEEN}
    return text.translate({ord(c): f"⟨U+{ord(c):04X}⟩" for c in unseen})


def number(value: float, digits: int = 3) -> str:
    """Fixed point, never a negative zero; a dash where there is no value."""
    return f"{round(value, digits) + 0.0:,.{digits}f}" if math.isfinite(value) else "–"


def _values(steps: Iterable[Record], *keys: str) -> list[float]:
    """The finite numbers at a path of keys in all steps, those of lists one by one."""
    found: list[Any] = list(steps)
    for key in keys:
        found = [item.get(key) if isinstance(item, dict) else None for item in found]
    flat = (value for item in found for value in (item if isinstance(item, list) else [item]))
    return [value for value in flat if isinstance(value, int | float) and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
