"""`headway deploy`: what a Kubernetes, SLURM or SkyPilot cluster needs to hear to run a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from headway.core.config import load_config
from headway.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Run on a cluster of machines.")
render = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Write what a cluster needs to run a configuration: counts, resources and labels are the run's own.",
)
app.add_typer(render, name="render")
errors = Console(stderr=True, soft_wrap=True)

OVERRIDES = {"ignore_unknown_options": True}
PROMETHEUS = Path(__file__).resolve().parents[1] / "deploy" / "prometheus"

ConfigPath = Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides: section.key=value ...", show_default=False)
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of one machine.")]
CpusPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="CPUs of one machine; default: as many as it takes.", show_default=False),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the files; default: standard output.", show_default=False)
]


@render.command(context_settings=OVERRIDES)
def kuberay(
    config: ConfigPath,
    overrides: Overrides = None,
    image: Annotated[
        str, typer.Option(help="Container image with headway; deploy/docker builds one.")
    ] = "headway:latest",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace.")] = "default",
    kind: Annotated[
        Literal["rayjob", "raycluster"],
        typer.Option(help="The run itself, or only its cluster, for headway submit."),
    ] = "rayjob",
    gpus_per_node: GpusPerNode = 8,
    claim: Annotated[
        str | None,
        typer.Option(help="Existing volume claim for run folders; default: one is made.", show_default=False),
    ] = None,
    storage: Annotated[str, typer.Option(help="Size of the claim that is made.")] = "200Gi",
    storage_class: Annotated[
        str | None, typer.Option(help="Its class, one that many nodes can write.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    out: Out = None,
) -> None:
    """A RayJob (or RayCluster) for the KubeRay operator, with its volume, configuration and monitoring.

    Each role gets pods of its own, labelled as the configuration asks and with headway-role. Relative prompt files go
    along; an absolute path is one in the pods. With generation.max_replicas the engines' pods scale.

    Examples:

    `headway deploy render kuberay my.yaml --image registry/headway:1 | kubectl apply -f -`

    `headway deploy render kuberay my.yaml generation.max_replicas=8 --namespace rl --claim shared --out k8s`

    `headway deploy render kuberay my.yaml --kind raycluster --out k8s`
    """
    settings = load_config(config, overrides or [])
    from headway.cluster import render as rendering

    target = rendering.KubeRay(
        kind=kind,
        image=image,
        namespace=namespace,
        gpus_per_node=gpus_per_node,
        claim=claim,
        storage=storage,
        storage_class=storage_class,
        resume=resume,
    )
    files = rendering.kuberay(settings, target, rendering.rule_groups(PROMETHEUS))
    if out is None:
        _write({"": rendering.to_yaml([each for objects in files.values() for each in objects])}, None)
        return
    _write({name: rendering.to_yaml(objects) for name, objects in files.items()}, out)


@render.command(context_settings=OVERRIDES)
def slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = 8,
    cpus_per_node: CpusPerNode = None,
    time: Annotated[str, typer.Option(help="Time limit of the job; before it a checkpoint is written.")] = (
        "1-00:00:00"
    ),
    venv: Annotated[
        Path, typer.Option(help="Virtual environment with headway, at one place on all nodes.")
    ] = Path(sys.prefix),
    out: Out = None,
) -> None:
    """A batch script for SLURM: Ray on all nodes of the job, then the run; its exit code is the job's.

    Replicas share nodes, as many as fit, unless their labels differ. What sbatch is given by itself (--partition,
    --account, --time) goes before the script.

    Examples:

    `headway deploy render slurm my.yaml --gpus-per-node 4 --out . && sbatch headway.sbatch`

    `headway deploy render slurm my.yaml generation.replicas=12 --time 08:00:00 > run.sbatch`

    `sbatch --partition gpu headway.sbatch --resume run.steps=400`
    """
    settings = load_config(config, overrides or [])
    from headway.cluster import render_hosts

    size = render_hosts.Size(gpus=gpus_per_node, cpus=cpus_per_node)
    target = render_hosts.Slurm(size=size, time=time, venv=venv)
    _write({"headway.sbatch": render_hosts.slurm(settings, target, config, overrides or [])}, out)


@render.command(context_settings=OVERRIDES)
def skypilot(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = 8,
    cpus_per_node: CpusPerNode = None,
    accelerator: Annotated[
        str | None, typer.Option(help="The GPU's name at SkyPilot, for example H100.", show_default=False)
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(help="SkyPilot volume for run folders; several nodes need one.", show_default=False),
    ] = None,
    out: Out = None,
) -> None:
    """A task for SkyPilot. It takes this folder along, so start it from headway's source tree.

    Examples:

    `headway deploy render skypilot my.yaml --accelerator H100 --out .`

    `sky jobs launch headway.yaml --secret RAY_AUTH_TOKEN=$(openssl rand -hex 32)`
    """
    settings = load_config(config, overrides or [])
    from headway.cluster import render, render_hosts

    size = render_hosts.Size(gpus=gpus_per_node, cpus=cpus_per_node)
    target = render_hosts.SkyPilot(size=size, accelerator=accelerator, volume=volume)
    task = render_hosts.skypilot(settings, target, config, overrides or [])
    _write({"headway.yaml": render.to_yaml([task])}, out)


def _write(files: dict[str, str], out: Path | None) -> None:
    """Into a folder, or to standard output."""
    if out is None:
        sys.stdout.write("".join(files.values()))
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
            errors.print(f"wrote {out / name}", highlight=False, markup=False)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
