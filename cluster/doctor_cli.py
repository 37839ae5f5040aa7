"""`headway doctor`: what is wrong with a configuration, its data and its cluster, before a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

console = Console(soft_wrap=True)

EXIT_USER = 2
SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red"), "skipped": ("–", "dim")}
NAME_WIDTH = 13


def doctor(
    config: Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: section.key=value ...", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per row.")] = False,
) -> None:
    """Check everything that can be checked before a run: configuration, model, data, cluster.

    Exit code 2 when something must be changed.

    Examples:

    `headway doctor configs/demo.yaml`

    `headway doctor my.yaml cluster.address=head:6379 generation.replicas=8 --json`
    """
    from headway.cluster.doctor import examine

    counts: Counter[str] = Counter()
    for row in examine(config, overrides or []):
        counts[row.state] += 1
        if as_json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        sign, style = SIGNS[row.state]
        said = Text(row.value)
        if row.advice:
            said.append(f"; {row.advice}", style="dim")
        if console.is_terminal:
            table = Table.grid(
                Column(width=1), Column(width=NAME_WIDTH), Column(overflow="fold"), padding=(0, 1)
            )
            table.add_row(Text(sign, style=style), row.check, said)
            console.print(table)
        else:  # a row is a line
            console.print(f"{sign} {row.check:{NAME_WIDTH}} {said.plain}", highlight=False, markup=False)
    if not as_json:
        names = (("error", "errors"), ("warning", "warnings"), ("ok", "ok"), ("skipped", "not looked at"))
        console.print(
            ", ".join(f"{counts[state]} {name}" for state, name in names if counts[state]), highlight=False
        )
    if counts["error"]:
        raise typer.Exit(EXIT_USER)
