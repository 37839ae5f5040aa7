"""The commands that need no cluster: `headway plan` and `headway simulate`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headway.cluster.scenario import Scenario
from headway.core.config import Config, load_config
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.cluster.measure import Measured
    from headway.cluster.plan import Plan, Split

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

PREFIX = "scenario."
FORMATS = (".svg", ".png", ".pdf")


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [OVERRIDES]...",
            help="Run folder, then overrides: section.key=value, and scenario.key=value for speeds.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=2, help="GPUs to divide; without GPUs: places.")] = 8,
    config: Annotated[
        Path | None, typer.Option(help="Configuration, where there is no run yet; state its speeds.")
    ] = None,
    efficiency: Annotated[
        float, typer.Option(min=0.5, max=1, help="Of each doubling of the learner ranks.")
    ] = 0.9,
    steps: Annotated[
        int | None,
        typer.Option(min=10, help="Of each simulation; default: as many as half a minute allows."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot: FILE.svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How many GPUs for generation, how many for the learner.

    Measures a run that has ended or goes on, and simulates every division of the GPUs with its speeds.

    Examples:

    `headway plan runs/demo --gpus 8`

    `headway plan runs/demo --gpus 16 lag.max_version_lag=4 sampling.group_size=16 --plot plan.svg`

    `headway plan --config configs/demo.yaml --gpus 8 scenario.length_median=900 scenario.decode_s=0.02
    scenario.step_s=2 scenario.token_s=1e-5`
    """
    from headway.cluster.measure import measure
    from headway.cluster.plan import count
    from headway.cluster.plan import plan as make_plan

    if plot and plot.suffix not in FORMATS:
        raise ConfigError(f"--plot {plot}: the name must end with {', '.join(FORMATS)}")
    run, overrides = _run_and_overrides(arguments or [])
    changes, speeds = split_overrides(overrides)
    if (run is None) == (config is None):
        raise ConfigError(
            "say either a run folder, such as runs/demo, or --config with the speeds of its actors"
        )
    measured: Measured | None = None
    if run is not None:
        measured = measure(run)
        settings = load_config(run / "config.json", [f"generation.replicas={measured.engines}", *changes])
        scenario = change(measured.scenario, speeds)
    else:
        assert config is not None
        settings, scenario = load_config(config, changes), change(Scenario(), speeds)
    with errors.status("simulating") as status:
        made = make_plan(
            settings,
            scenario,
            gpus,
            ranks=measured.ranks if measured else None,
            efficiency=efficiency,
            steps=steps,
            say=lambda text: status.update(f"simulating {text}"),
        )
    if plot:
        draw(made, plot)
    if as_json:
        print(json.dumps(_jsonable({"measured": asdict(measured) if measured else None, **asdict(made)})))
        return
    if measured:
        _show_measured(measured)
    _show(made, settings)
    if measured and not overrides:
        own = made.own
        console.print(
            f"check: simulated as it was ({count(own.engines, 'engine')}, {count(own.ranks, 'rank')}) a step takes {own.step_s:.3g} s and the "
            f"learner waits {own.learner_idle_share:.0%}; measured: {measured.step_s:.3g} s "
            f"({own.step_s / measured.step_s - 1:+.0%}) and {measured.learner_idle_share:.0%}",
            highlight=False,
        )
    if plot:
        console.print(f"plot: {plot}", highlight=False, markup=False)


def simulate(
    config: Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides: section.key=value, scenario.key=value ...", show_default=False),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Take lengths and speeds from this run's folder.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Make the run folder in here, and keep it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a configuration on virtual time: the same driver, engines and learner drawn from distributions.

    Examples:

    `headway simulate configs/demo.yaml run.steps=200 generation.replicas=4`

    `headway simulate configs/demo.yaml --run runs/demo lag.max_version_lag=8`

    `headway simulate configs/demo.yaml 'scenario.rates={generation: 6, learner: 1}' scenario.straggler_share=0.05
    scenario.straggler_factor=8`
    """
    from headway.cluster.measure import measure
    from headway.cluster.simulate import simulate as run_simulation

    changes, speeds = split_overrides(overrides or [])
    settings = load_config(config, changes)
    scenario = change(measure(run).scenario if run else Scenario(), speeds)
    with tempfile.TemporaryDirectory(prefix="headway-simulate-") as folder:
        if keep is not None:
            try:
                keep.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--keep {keep}: {error.strerror}") from error
        result = run_simulation(settings, scenario, keep or Path(folder))
    if as_json:
        print(json.dumps(asdict(result)))
        return
    table = Table(show_header=False)
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)


def _run_and_overrides(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    folders = [argument for argument in arguments if "=" not in argument]
    if len(folders) > 1:
        raise ConfigError(f"{folders[1]!r}: expected one run folder, then section.key=value")
    return Path(folders[0]) if folders else None, [word for word in arguments if "=" in word]


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Those of the configuration, and the values of `scenario.key=value`. Raises `ConfigError`."""
    changes, speeds = [], {}
    for override in overrides:
        key, equals, text = override.removeprefix("--").partition("=")
        if not key.startswith(PREFIX):
            changes.append(override)
            continue
        try:
            speeds[key.removeprefix(PREFIX)] = _number(yaml.safe_load(text)) if equals else None
        except yaml.YAMLError as error:
            raise ConfigError(f"{override!r}: the value is not YAML: {error}") from error
    return changes, speeds


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def change(scenario: Scenario, values: dict[str, Any]) -> Scenario:
    """The scenario with other values, as YAML has them. Raises `ConfigError` for unknown ones and wrong types."""
    from pydantic import TypeAdapter, ValidationError

    kinds = get_type_hints(Scenario)
    changed = {}
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown scenario.{name}; did you mean scenario.{near}?")
        try:
            changed[name] = TypeAdapter(kinds[name]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"scenario.{name}={value!r}: {error.errors()[0]['msg']}") from None
    return dataclasses.replace(scenario, **changed)


# ---- what is shown -----------------------------------------------------------------------------------------


def _show_measured(measured: Measured) -> None:
    """Each speed, and what it rests on."""
    from headway.cluster.plan import count

    s, responses = measured.scenario, f"{len(measured.scenario.lengths):,} responses"
    lengths = sorted(s.lengths)
    quantiles = " / ".join(str(lengths[int(share * (len(lengths) - 1))]) for share in (0.1, 0.5, 0.9))
    groups = f"{measured.groups} groups, error {measured.decode_error:.0%}"
    steps = f"{measured.steps} steps"
    updates = (
        f"{measured.updates} updates" if measured.updates else f"{measured.groups} groups (no checkpoint)"
    )
    table = Table("measured", "", "rests on", box=SIMPLE_HEAD, padding=0)
    table.add_row("response length, p10 / median / p90", f"{quantiles} tokens", responses)
    table.add_row(
        "decode step of an engine",
        f"{1000 * s.decode_s:.3g} ms + {1000 * s.decode_request_s:.3g} ms a response",
        groups,
    )
    table.add_row("until a group decodes", f"{s.prefill_s:.3g} s", groups)
    table.add_row("weight update, pause in it", f"{s.update_s:.3g} s, {s.pause_s:.3g} s", updates)
    table.add_row("scoring", f"{s.score_s:.3g} s", groups.partition(",")[0])
    table.add_row(
        f"training, {count(measured.ranks, 'rank')}",
        f"{s.step_s:.3g} s + {1000 * s.token_s:.3g} ms a token",
        f"{steps}, error {measured.learner_error:.0%}",
    )
    table.add_row("publishing", f"{s.publish_s:.3g} s", steps)
    if measured.no_signal_share:
        table.add_row("groups without signal", f"{measured.no_signal_share:.0%}", steps)
    console.print(table)


def _show(made: Plan, config: Config) -> None:
    places = "GPUs" if config.generation.gpus else "places"
    table = Table("engines", "ranks", places, *COLUMNS, box=SIMPLE_HEAD, padding=0)
    for split in made.splits:
        best = (split.engines, split.ranks) == (made.recommended.engines, made.recommended.ranks)
        table.add_row(
            f"{'> ' if best else ''}{split.engines}",
            str(split.ranks),
            f"{split.gpus:g}",
            *_cells(split),
            style="bold green" if best else None,
        )
    console.print(table)
    table = Table("max_version_lag", *COLUMNS, box=SIMPLE_HEAD, padding=0)
    for split in made.by_lag:
        own = split.max_version_lag == config.lag.max_version_lag
        table.add_row(
            f"{'> ' if own else ''}{split.max_version_lag}",
            *_cells(split),
            style="bold green" if own else None,
        )
    console.print(table)
    console.print(f"[bold]{made.advice}[/bold]", highlight=False)
    for text in (*made.assumptions, f"{made.simulations} simulations of {made.steps} steps."):
        console.print(f"[dim]- {text}[/dim]", highlight=False)


COLUMNS = ("step", "tokens/s", "lag\np50 / p95", "learner\nidle", "engines\nidle", "dropped")


def _cells(split: Split) -> tuple[str, ...]:
    if split.step_s == math.inf:
        return ("no progress", *["–"] * (len(COLUMNS) - 1))
    return (
        f"{split.step_s:.3g} s",
        f"{split.tokens_per_s:,.0f}",
        f"{split.lag_p50} / {split.lag_p95}",
        f"{split.learner_idle_share:.0%}",
        f"{split.engine_idle_share:.0%}",
        f"{split.dropped_share:.0%}",
    )


def _jsonable(value: Any) -> Any:
    """Without infinities, which JSON does not have, and the list of lengths, which nobody reads."""
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items() if name != "lengths"}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if value == math.inf else value


def draw(made: Plan, file: Path) -> None:
    """Step time and idle shares against the number of engines beside the recommended learner; under it the lag."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    from headway.cluster.plan import count

    best = made.recommended
    splits = [s for s in made.splits if s.ranks == best.ranks and s.step_s < math.inf]
    engines = [split.engines for split in splits]
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(engines, [split.step_s for split in splits], "o-", color="black", label="step time")
    above.axvline(best.engines, color="0.8", linewidth=6, zorder=0, label="recommended")
    above.set_ylabel("step (s)")
    above.set_ylim(bottom=0)
    shares = above.twinx()
    shares.plot(engines, [s.learner_idle_share for s in splits], "s--", color="C0", label="learner idle")
    shares.plot(engines, [s.engine_idle_share for s in splits], "^--", color="C1", label="engines idle")
    shares.set_ylim(0, 1)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    above.legend(handles=[*above.get_lines(), *shares.get_lines()], loc="upper right")
    above.set_title(f"{count(best.ranks, 'learner rank')}, lag.max_version_lag={best.max_version_lag}")
    below.plot(engines, [split.lag_p95 for split in splits], "o-", color="black")
    below.set_ylabel("version lag, p95")
    below.set_ylim(bottom=0)
    below.set_xlabel("engines")
    for axis in (below.xaxis, below.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
