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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from headway.core.errors import DataError
from headway.core.rollouts import read_parquet

MAX_POINTS = 250
"""Longer runs are drawn as means over equal numbers of steps, so that the file stays small."""
MAX_CHARACTERS = 4000
"""Longer responses lose their middle."""
MAX_LAG_SHOWN = 4
"""Higher lags share one colour."""
STAGES = {"waited": "b", "forward_backward": "a", "optimizer": "c", "publish": "d"}

# Matplotlib only knows fixed colours; these stand for the style sheet's variables, which differ in dark mode.
COLORS = {name: f"#00000{number}" for number, name in enumerate(("muted", "line", "a", "b", "c", "d"), start=1)}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headway",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": COLORS["muted"],
    "xtick.color": COLORS["line"],
    "ytick.color": COLORS["line"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "ytick.major.size": 0,
    "axes.edgecolor": COLORS["line"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.6,
}

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class History:
    """What `metrics.jsonl` says."""

    steps: list[Record]
    """One record per optimizer step that is part of the final weights, in order."""
    duration_s: float
    """Of all processes that worked on the run, steps that a resume undid included."""
    unreadable: int
    """Lines that are no record, such as one that a crash cut off."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A line through `high`, or with `low` the area between the two. [number of points] each; NaN: no value."""

    label: str
    color: str
    high: np.ndarray
    low: np.ndarray | None = None
    opacity: float = 1.0
    dots: bool = False


def write_report(run_folder: Path) -> Path:
    """Writes `run_folder/report.html`, whole or not at all, and returns its path. Raises `DataError` when the run
    has not finished a step."""
    history = load_history(run_folder / "metrics.jsonl")
    config_file = run_folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, visible=visible)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        name=_at(config, "run", "name") or run_folder.resolve().name,
        model=_at(config, "model", "path"),
        source=_at(config, "data", "source"),
        num_steps=len(history.steps),
        planned_steps=_at(config, "run", "steps"),
        duration=_duration(history.duration_s),
        max_version_lag=_at(config, "lag", "max_version_lag"),
        unreadable=history.unreadable,
        headlines=_headlines(history.steps),
        steps_per_point=_steps_per_point(history.steps),
        plots=_plots(history.steps),
        samples=_samples(run_folder / "rollouts", config, {record["version"] for record in history.steps}),
        num_trained=len(_pooled(history.steps, "lag")),
        dropped=_at(history.steps[-1], "dropped") or {},
        config=json.dumps(config, indent=2, ensure_ascii=False),
    )
    path = run_folder / "report.html"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(page, encoding="utf-8")
    os.replace(draft, path)
    return path


def load_history(path: Path) -> History:
    """Reads `metrics.jsonl`. A version that does not rise is a resume: it undoes every step from there on. Raises
    `DataError` without any record."""
    steps: list[Record] = []
    unreadable, duration, clock, newest = 0, 0.0, 0.0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            version = int(record["version"])
        except (ValueError, TypeError, KeyError):
            unreadable += bool(line.strip())
            continue
        time_s = _values([record], "time_s")[0]
        if version <= newest or time_s < clock:  # another process, whose clock starts at 0
            duration, clock = duration + clock, 0.0
        clock, newest = (clock if math.isnan(time_s) else time_s), version
        while steps and steps[-1]["version"] >= version:
            steps.pop()
        steps.append(record)
    if not steps:
        raise DataError(f"{path} holds no step: the run finished none, or this is not a run folder")
    return History(steps=steps, duration_s=duration + clock, unreadable=unreadable)


def _headlines(steps: list[Record]) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the run's most important figures."""
    tenth = math.ceil(len(steps) / 10)
    rewards, ess = _values(steps, "reward_mean"), _values(steps, "importance_ess_fraction")
    lags = _pooled(steps, "lag")
    total = np.nansum(_values(steps, "seconds", "total"))
    waited = np.nansum(_values(steps, "waited_s"))
    worked = sum(np.nansum(_values(steps, "seconds", stage)) for stage in ("unpack", "forward_backward", "optimizer"))
    tokens = np.nansum(_values(steps, "trained_tokens"))
    span = "one step" if tenth == 1 else f"{tenth} steps"
    return [
        ("Reward", f"{number(_mean(rewards[:tenth]))} → {number(_mean(rewards[-tenth:]))}", f"first and last {span}"),
        ("Groups at lag ≥ 1", _percent(_mean(lags >= 1)), "of all trained groups"),
        ("Version lag", f"{number(_mean(lags), 2)} / {number(_extreme(lags, max), 0)}", "mean / max, optimizer steps"),
        ("Trained tokens/s", number(_ratio(tokens, total), 0), f"{number(tokens, 0)} tokens"),
        ("ESS", number(_mean(ess)), f"share of tokens; lowest {number(_extreme(ess, min))}"),
        ("Waiting", _percent(_ratio(waited, total)), "of step time, for groups"),
        ("Framework overhead", _percent(1 - _ratio(waited + worked, total)), "neither waiting nor computing"),
    ]


def _plots(steps: list[Record]) -> list[dict[str, Any]]:
    width = _steps_per_point(steps)
    points = [steps[start : start + width] for start in range(0, len(steps), width)]

    def means(*keys: str) -> np.ndarray:
        return np.array([_mean(_values(point, *keys)) for point in points])

    rewards = means("reward_mean")
    window = math.ceil(len(points) / 10)
    running = np.array([_mean(rewards[max(0, end - window) : end]) for end in range(1, len(points) + 1)])
    reward_layers = [Layer(label="mean of the step", color="a", high=rewards, opacity=0.45 if window > 1 else 1.0)]
    if window > 1:
        reward_layers.append(Layer(label=f"mean of {window * width} steps", color="b", high=running))

    lags = [_pooled(point, "lag") for point in points]
    highest = int(min(max((point.max(initial=0) for point in lags), default=0), MAX_LAG_SHOWN))
    shares = [
        np.array([_mean(lag >= level if level == MAX_LAG_SHOWN else lag == level) for lag in lags])
        for level in range(highest + 1)
    ]
    lag_layers = _stacked(
        (f"lag {level}{'+' * (level == MAX_LAG_SHOWN)}", "a", share, 0.15 + 0.8 * level / MAX_LAG_SHOWN)
        for level, share in enumerate(shares)
    )

    lengths = [_pooled(point, "response_tokens") for point in points]
    p10, p50, p90 = (np.array([np.quantile(x, q) if x.size else math.nan for x in lengths]) for q in (0.1, 0.5, 0.9))

    stages = {stage: means(*(("waited_s",) if stage == "waited" else ("seconds", stage))) for stage in STAGES}
    rest = means("seconds", "total") - np.sum([np.nan_to_num(seconds) for seconds in stages.values()], axis=0)
    time_layers = _stacked(
        [(stage.replace("_", " + "), STAGES[stage], seconds, 0.75) for stage, seconds in stages.items()]
        + [("rest", "muted", rest.clip(min=0), 0.6)]
    )
    speeds = [_ratio(np.nansum(_values(p, "trained_tokens")), np.nansum(_values(p, "seconds", "total"))) for p in points]

    def draw(title: str, *layers: Layer, bottom: float | None = 0, top: float | None = None) -> dict[str, Any]:
        starts = [point[0]["version"] - 0.5 for point in points]
        svg = _svg(np.array([*starts, steps[-1]["version"] + 0.5]), layers, bottom, top)
        return {"title": title, "layers": layers, "svg": svg}

    def line(label: str, color: str, *keys: str, dots: bool = False) -> Layer:
        return Layer(label=label, color=color, high=means(*keys), dots=dots)

    return [
        draw("Reward", *reward_layers, bottom=None),
        draw("Version lag, share of groups", *lag_layers, top=1),
        draw("Effective sample size of the importance weights", line("share of tokens", "a", "importance_ess_fraction"), top=1.03),
        draw(
            "KL divergence, nats per token",
            line("behavior to proximal policy", "a", "behavior_kl"),
            line("engine to learner at lag 0", "b", "engine_learner_kl", dots=True),
        ),
        draw(
            "Response length, tokens",
            Layer(label="10 % to 90 %", color="a", high=p90, low=p10, opacity=0.22),
            Layer(label="median", color="a", high=p50),
        ),
        draw(
            "Shares",
            line("groups without signal", "a", "no_signal_groups_fraction"),
            line("truncated responses", "b", "truncated_fraction"),
            line("clipped tokens", "c", "clipped_fraction"),
        ),
        draw("Entropy, nats per token", line("mean over trained tokens", "a", "entropy")),
        draw("Gradient norm", line("before clipping", "a", "grad_norm")),
        draw("Step time, seconds", *time_layers),
        draw("Trained tokens per second", Layer(label="of the whole step", color="a", high=np.array(speeds))),
    ]


def _stacked(parts: Iterable[tuple[str, str, np.ndarray, float]]) -> list[Layer]:
    """Areas on top of each other, from (label, color, height, opacity)."""
    layers: list[Layer] = []
    for label, color, height, opacity in parts:
        low = layers[-1].high if layers else np.zeros(len(height))
        layers.append(Layer(label=label, color=color, low=low, high=low + np.nan_to_num(height), opacity=opacity))
    return layers


def _svg(edges: np.ndarray, layers: Sequence[Layer], bottom: float | None, top: float | None) -> Markup | None:
    """One small plot; None when there is nothing to draw. `edges` [number of points + 1]: where points meet."""
    if not any(np.isfinite(layer.high).any() for layer in layers):
        return None
    centers = (edges[:-1] + edges[1:]) / 2
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 1.9), layout="constrained")
        axes = figure.add_subplot()
        for layer in layers:
            look: dict[str, Any] = {"color": COLORS[layer.color], "alpha": layer.opacity}
            if layer.low is not None:
                axes.stairs(layer.high, edges, baseline=layer.low, fill=True, linewidth=0, **look)
                continue
            known = np.isfinite(layer.high)
            few = layer.dots or known.sum() <= 40
            look |= {"linewidth": 0 if layer.dots else 1.4, "marker": "o" if few else "", "markersize": 2.4}
            axes.plot(centers[known], layer.high[known], markeredgewidth=0, **look)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=bottom, top=top)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value + 0.0:.6g}"))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick)[._\w]*"| xmlns(?::\w+)?="[^"]*"', "", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return Markup(re.sub(r"\s*\n\s*", "\n", svg))  # numbers only: no text of the run gets into a plot


def _samples(folder: Path, config: Record, versions: set[int]) -> list[dict[str, Any]]:
    """The best and the worst responses of the first, middle and last stored batch."""
    files = [path for path in sorted(folder.glob("step-*.parquet")) if int(path.stem.removeprefix("step-")) in versions]
    return [_sample(files[index], config) for index in sorted({0, len(files) // 2, len(files) - 1}) if files]


def _sample(path: Path, config: Record) -> dict[str, Any]:
    table = read_parquet(path)
    version = int((table.schema.metadata or {}).get(b"version", b"0")) or None
    names = ["rollout_id", "group_id", "prompt_id", "version_spans", "truncated", "text", "reward", "verdict_reason"]
    rows = table.select(names).to_pylist()
    group_ids = list(dict.fromkeys(row["group_id"] for row in rows))
    steps_per_batch = _at(config, "learner", "steps_per_batch") or 1
    groups_per_step = _at(config, "learner", "groups_per_step") or len(group_ids)
    for row in rows:
        row["num_tokens"] = sum(span["end"] - span["start"] for span in row["version_spans"])
        row["lag"] = None
        if version is not None and row["version_spans"]:
            trained_at = version - steps_per_batch + group_ids.index(row["group_id"]) // groups_per_step
            row["lag"] = trained_at - min(span["version"] for span in row["version_spans"])
        row["excerpt"] = _excerpt(row["text"])
    scored = [row for row in rows if row["reward"] is not None]
    best = _one_per_group(sorted(scored, key=lambda row: -row["reward"]))
    taken = {row["rollout_id"] for row in best}
    worst = _one_per_group(sorted((r for r in scored if r["rollout_id"] not in taken), key=lambda row: row["reward"]))
    unscored = [] if scored else _one_per_group(rows)
    return {
        "step": version or path.stem.removeprefix("step-"),
        "num_responses": len(rows),
        "num_groups": len(group_ids),
        "reward": _mean(np.array([row["reward"] for row in scored], dtype=float)),
        "reasons": Counter(row["verdict_reason"] or "unscored" for row in rows).most_common(),
        "shown": [*(("best", r) for r in best), *(("worst", r) for r in worst), *(("unscored", r) for r in unscored)],
    }


def _one_per_group(rows: Iterable[Record], limit: int = 2) -> list[Record]:
    first: dict[int, Record] = {}
    for row in rows:
        first.setdefault(row["group_id"], row)
    return list(first.values())[:limit]


def _excerpt(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def visible(text: str) -> str:
    """The text with every character that would not be seen, or would move others, written out; newlines stay."""

    def show(character: str) -> str:
        code = ord(character)
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            return character
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return "".join(map(show, text))


def number(value: float | None, digits: int = 3) -> str:
    """Fixed point, never a negative zero; a dash where there is no value."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(float(value), digits) + 0.0:,.{digits}f}"


def _percent(fraction: float) -> str:
    text = number(100 * fraction, 1)
    return text if text == "–" else f"{text} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _steps_per_point(steps: list[Record]) -> int:
    return math.ceil(len(steps) / MAX_POINTS)


def _at(tree: Any, *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _values(steps: Iterable[Record], *keys: str) -> np.ndarray:
    """[number of steps] float64; NaN where a step lacks the value."""
    values = [_at(record, *keys) for record in steps]
    array = np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)
    return np.where(np.isfinite(array), array, math.nan)


def _pooled(steps: Iterable[Record], key: str) -> np.ndarray:
    """All numbers of the steps' lists, in one array."""
    return np.array([x for record in steps for x in record.get(key) or () if x is not None], dtype=float)


def _mean(values: np.ndarray) -> float:
    """Over what is known; NaN without anything."""
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(known.mean()) if known.size else math.nan


def _extreme(values: np.ndarray, pick: Any) -> float:
    return float(pick(values[~np.isnan(values)], default=math.nan))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else math.nan
