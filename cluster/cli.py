"""The command line. Exit codes: 0 done, 1 the run failed, 2 something the user can change, 130 interrupted."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway.cluster import deploy_cli, doctor_cli, rollouts_cli, simulate_cli, status_cli, verify_cli
from headway.core.config import Config, dump_config, load_config
from headway.core.errors import ConfigError, HeadwayError, UserError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read along is gone, as `tee` is after Ctrl-C. What is trained goes on, to its end or to its checkpoint."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush has a place


console = _Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

ConfigPath = Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides: section.key=value ...", show_default=False)
]

OVERRIDES = {"ignore_unknown_options": True}
"""Takes `--section.key=value` as it takes `section.key=value`."""

EXIT_USER, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130


@app.callback()
def headway() -> None:
    """Asynchronous reinforcement learning for language models on Ray."""


@app.command(context_settings=OVERRIDES)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
) -> None:
    """Train a model.

    Examples:

    `headway train configs/tiny.yaml`

    `headway train configs/demo.yaml run.steps=40 lag.max_version_lag=4`

    `headway train configs/demo.yaml --resume run.steps=100`
    """
    settings = load_config(config, overrides or [])
    if dry_run:
        print(dump_config(settings))
        return
    raise typer.Exit(_train(settings, resume=resume, overwrite=overwrite))


def _train(config: Config, *, resume: bool, overwrite: bool) -> int:
    from headway.cluster.run_folder import alone_in, prepare_folder

    with alone_in(config.run_folder):
        checkpoint = prepare_folder(config, resume=resume, overwrite=overwrite)
        # Heavy modules only now, when what can be known without them is known.
        from headway.cluster.train import train_loop, train_offline, train_policy

        offline = train_offline if config.offline.loop == "none" else train_loop
        train = train_policy if config.stage == "rl" else offline
        stopped_at = train(config, console, checkpoint=checkpoint, resume=resume)
    if stopped_at is not None:
        console.print(f"stopped at version {stopped_at}; go on with --resume", highlight=False)
        return EXIT_INTERRUPTED
    return 0


@app.command(context_settings=OVERRIDES)
def submit(
    config: Annotated[Path | None, typer.Argument(help="YAML configuration.", show_default=False)] = None,
    overrides: Overrides = None,
    address: Annotated[str, typer.Option(help="Dashboard address of the cluster.")] = "http://127.0.0.1:8265",
    submission_id: Annotated[
        str | None,
        typer.Option(help="Id of the job; default: headway-RUN, from the second job on with a number."),
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(help="Submit nothing: follow this job, an id or a run's name.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option(help="Print the job's log and exit with its exit code.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")] = False,
) -> None:
    """Send a training run to a Ray cluster as a job.

    First the cluster is checked: versions, token, room for every group on nodes with its labels. Then this code is
    shipped with the configuration and the prompt files; what headway depends on must be installed there, and `run.folder`
    be a folder that the nodes share. Ctrl-C only ends the following.

    Examples:

    `headway submit configs/demo.yaml --address http://head:8265`

    `headway submit configs/demo.yaml --no-follow run.steps=500 generation.replicas=4 generation.gpus=1`

    `headway submit --attach demo --address http://head:8265`
    """
    from headway.cluster import submit as jobs

    seen = 0
    if attach is not None and config is None:
        client, job, seen = jobs.attach(address, attach)
    elif attach is not None or config is None:
        raise ConfigError("name a configuration to submit, or a job to follow with --attach JOB")
    else:
        settings = load_config(config, overrides or [])

        def say(text: str) -> None:
            errors.print(text, highlight=False, markup=False)

        client, job = jobs.submit(
            settings, address, submission_id=submission_id, resume=resume, overwrite=overwrite, say=say
        )
        console.print(f"submitted {job} to {address}", highlight=False)
    if not follow:
        return
    try:
        for text in jobs.follow(client, job, seen):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        console.print(
            f"\njob {job} goes on; follow it with '{jobs.attaching(job, address)}', end it with "
            f"'{jobs.stopping(job, address)}'",
            highlight=False,
            markup=False,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(jobs.exit_code(client, job))


@app.command()
def scale(
    wanted: Annotated[
        str, typer.Argument(help="generation=N, or a group of scorers, e.g. verifiers=N", show_default=False)
    ],
    run: Annotated[
        str | None, typer.Option(help="Folder or name of the run; default: the only one that runs.")
    ] = None,
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(
            help="GPUs of each engine from now on: a part of one, or whole ones that share the model (tensor parallel).",
            show_default=False,
        ),
    ] = None,
    address: Annotated[str | None, typer.Option(help="Ray address of its cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Change the number of engines or scorers of a run while it trains, or the GPUs of its engines.

    New engines serve once they hold the newest weights. Those that leave finish their groups, or hand them on to the
    others with the tokens that they have. Engines that have another number of GPUs are replaced one after another.
    Scorers that can be scaled are those whose weights do not change.

    Examples:

    `headway scale generation=3`

    `headway scale generation=1 --run runs/demo`

    `headway scale generation=2 --gpus-per-replica 4`

    `headway scale verifiers=4`
    """
    from headway.cluster.control import scale as ask

    group, _, number = wanted.partition("=")
    if not group or not number.isdecimal():
        raise ConfigError(f"{wanted!r}: say GROUP=N, for example generation=3")
    answer = ask(run, address, group.removesuffix(".replicas"), int(number), gpus_per_replica)
    if as_json:
        print(json.dumps(answer))
        return
    each = f", with {answer['gpus']:g} GPU each" if answer["gpus"] else ""
    console.print(
        f"{answer['group']}: {answer['before']} -> {answer['target']}{each} ({answer['serving']} serve now, learner at version "
        f"{answer['version']})",
        highlight=False,
    )


@app.command("eval", context_settings=OVERRIDES)
def evaluate(
    target: Annotated[
        str, typer.Argument(help="A run folder, or a model folder or name.", show_default=False)
    ],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="Configuration; default: the run's own.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score held-out prompts with the verifier of training.

    Examples:

    `headway eval runs/demo`

    `headway eval smollm2-135m-instruct --config configs/demo.yaml --samples 8 --temperature 1`
    """
    from headway.cluster.evaluate import evaluate as run_evaluation
    from headway.cluster.evaluate import evaluation_config

    settings, model = evaluation_config(target, config, overrides or [])
    result = run_evaluation(settings, model, limit=limit, samples=samples, temperature=temperature)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    console.print(
        f"[bold]{result.mean_score:.3f}[/bold] mean score of {result.num_prompts} prompts x {result.samples} from "
        f"{result.source}; {result.truncated_fraction:.1%} cut at the token budget, {result.num_unscored} unscored",
        highlight=False,
    )
    console.print(
        "  " + ", ".join(f"{reason} {count}" for reason, count in result.reasons.items()), highlight=False
    )
    for example in result.examples:
        console.print(
            f"  [dim]{example['reward']:g}[/dim] {escape(repr(example['prompt']))} -> {escape(repr(example['text']))} "
            f"[dim](gold {escape(str(example['gold']))}, {example['verdict_reason']})[/dim]",
            highlight=False,
        )


@app.command(context_settings=OVERRIDES)
def replay(
    run: Annotated[Path, typer.Argument(help="Run folder with stored rollouts.", show_default=False)],
    overrides: Overrides = None,
    score: Annotated[
        bool, typer.Option("--score", help="Only score: what the algorithm would have masked and weighted.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of RUN/replays/NAME; default: the preset's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per step.")] = False,
) -> None:
    """Train a run's initial model on its stored rollouts under another algorithm, or only score them.

    Examples:

    `headway replay runs/demo --score algorithm.preset=gspo`

    `headway replay runs/demo --algorithm.preset=dr_grpo --algorithm.clip_high=0.3`
    """
    from headway.cluster import replay as again

    if score and name is not None:
        raise ConfigError("--score writes nothing that --name could name; give one of them")
    config = again.replay_config(run, overrides or [])
    if score:
        _score(config, run, as_json=as_json)
        return

    def say(record: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(record), flush=True)
            return
        values = ("loss", "grad_norm", "importance_ess_fraction", "correction_ess_fraction", "entropy")
        shown = "  ".join(f"{key} {_figure(record[key])}" for key in values)
        console.print(f"step {record['version']:>5}  {shown}", highlight=False)

    folder = again.train(config, run, name or config.algorithm.preset, say)
    console.print(
        f"trained again: {folder} (model: {folder / 'learner' / 'model'})", highlight=False, markup=False
    )


def _score(config: Config, run: Path, *, as_json: bool) -> None:
    from rich.table import Table

    from headway.cluster import replay as again

    scores = []
    for score in again.score(config, again.batches(run)):
        scores.append(score)
        if as_json:
            print(json.dumps(asdict(score)), flush=True)
    if as_json:
        return
    total = again.summary(scores)
    console.print(
        f"{total['steps']} steps, {total['tokens']:,} tokens under algorithm.preset={config.algorithm.preset}: "
        f"{total['no_signal_groups']} groups without signal, mean |advantage| {_figure(total['mean_abs_advantage'])}, "
        f"ESS of the loss's factors {_figure(total['ess_fraction'])}",
        highlight=False,
    )
    masked = ", ".join(f"{reason} {value:.1%}" for reason, value in total["masked_fraction"].items() if value)
    console.print(f"masked, share of sampled tokens: {masked or 'none'}", highlight=False)
    table = Table("each correction by itself", "tokens rejected", "responses touched", "ESS left")
    for correction, other in total["counterfactuals"].items():
        table.add_row(
            correction, f"{other['tokens']:.2%}", f"{other['responses']:.2%}", _figure(other["ess_fraction"])
        )
    console.print(table)


app.command(context_settings=OVERRIDES)(simulate_cli.plan)
app.command(context_settings=OVERRIDES)(simulate_cli.simulate)
app.command()(verify_cli.verify)
app.command()(rollouts_cli.rollouts)
app.command()(status_cli.status)
app.command()(status_cli.top)
app.command()(status_cli.stop)
app.command(context_settings=OVERRIDES)(doctor_cli.doctor)
app.add_typer(deploy_cli.app, name="deploy")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def main() -> None:
    """Entry point: turns typed errors into one clear message and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As Python's stderr: no run ends because a terminal lacks a character.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (HeadwayError, BaseExceptionGroup) as error:
        cause = _first(error)
        if isinstance(cause, UserError):
            errors.print(f"[red]error:[/red] {escape(str(cause))}", highlight=False)
            raise SystemExit(EXIT_USER) from None
        if isinstance(cause, HeadwayError):
            errors.print(f"[red]failed:[/red] {escape(str(cause))}", highlight=False)
            raise SystemExit(EXIT_FAILED) from None
        raise


def _first(error: BaseException) -> BaseException:
    """The failure inside nested groups, as task groups raise them, and inside Ray's wrapper of a remote one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, HeadwayError) else error


if __name__ == "__main__":
    main()
