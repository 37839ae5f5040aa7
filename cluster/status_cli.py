"""`headway status`, `top` and `stop`: what a run is doing, once or live, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from headway.core.errors import ClusterError, UserError

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

REFRESH_S = 1.0
BLOCK_S = 10.0
"""Between two blocks where there is no terminal."""
BARS = "▁▂▃▄▅▆▇█"

RunArgument = Annotated[
    str | None,
    typer.Argument(help="Folder or name of the run; default: the only one that runs.", show_default=False),
]
Address = Annotated[str | None, typer.Option(help="Ray address of its cluster.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(run: RunArgument = None, address: Address = None, as_json: AsJson = False) -> None:
    """Show what a run is doing: steps, lag, groups, engines, places, and who waits for whom.

    Of a run that is over, what its folder says.

    Examples:

    `headway status`

    `headway status runs/demo --json | jq .lag`
    """
    found = _look(run, address, lambda look: look())
    if as_json:
        print(json.dumps(found))
        return
    console.print(render(found), highlight=False)


def top(run: RunArgument = None, address: Address = None) -> None:
    """Show what `headway status` shows, live, until the run ends or Ctrl-C.

    Where there is no terminal: one block every ten seconds.

    Examples:

    `headway top`

    `headway top demo --address head:6379`
    """
    try:
        last = _look(run, address, _on_terminal if console.is_terminal else _in_blocks)
    except KeyboardInterrupt:
        return
    # What was on the screen was the run; what comes last is what became of it.
    ended = _over(last["folder"]) if "version" in last else None
    if ended is not None:
        console.print(_headline(ended), highlight=False)
    else:
        console.print(f"run {last['run']!r} has ended", highlight=False, markup=False)


def stop(
    run: RunArgument = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step in progress; write no checkpoint.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds for the run to end; default: as long as a step and a checkpoint may take.",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray address of its cluster; for a submitted job also the dashboard's.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """End a run after the optimizer step in progress, with a checkpoint, and wait until it holds nothing on the cluster.

    What a run whose driver was killed has left behind is removed; what other runs have is never touched.

    Examples:

    `headway stop`

    `headway stop demo --address head:6379`

    `headway stop headway-demo --address http://head:8265`

    `headway stop runs/demo --now`
    """
    from headway.cluster.stop import stop as end

    def say(text: str) -> None:
        (errors if as_json else console).print(text, highlight=False, markup=False)

    try:
        ended = end(run, address, at_once=now, timeout_s=timeout, say=say)
    except UserError as error:
        over = None if run is None else _over(run, address)
        if over is None or (over["was_killed"] and not over["own_ray"]):
            raise
        why = f" ({error})" if over["was_killed"] else ""
        say(
            f"run {over['run']!r} is not running: {over['state']} at step {over['version']}/{over['steps']}{why}"
        )
        return
    if as_json:
        print(json.dumps(ended))
    elif not ended["removed"]:
        say(
            f"run {ended['run']!r} has ended; gone are its {ended['actors']} actors and {len(ended['groups'])} placement "
            "groups"
        )


# ---- looking -----------------------------------------------------------------------------------------------


def _look(
    run: str | None, address: str | None, show: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """What `show` made of a function that asks the run; of a run that is over, what its folder says. Raises as
    `control.scale`."""
    from headway.cluster.control import ask, cluster_of, find
    from headway.cluster.joining import CONTROL
    from headway.cluster.stop import cluster_address, holdings, is_there

    try:
        with cluster_of(run, address) as name:
            try:
                name, mailbox = find(name)
            except ClusterError:
                if name is None or not (held := holdings(name)):
                    raise
                return {"run": name, "state": "left", **_on_cluster(held)}

            gcs = cluster_address()

            def look() -> dict[str, Any]:
                if not is_there(gcs):
                    raise ClusterError(f"the cluster of run {name!r} is gone")
                try:
                    answer = ask(mailbox, "status", None)
                except ClusterError as silence:
                    held = holdings(name)
                    if CONTROL not in held.named:
                        raise  # it has just ended
                    state = "silent" if held.driver else "left"
                    return {"run": name, "state": state, "why": str(silence), **_on_cluster(held)}
                return answer | _on_cluster(holdings(name))

            return show(look)
    except UserError:
        if run is None or (found := _over(run, address)) is None:
            raise
        return found


def _over(run: str, address: str | None = None) -> dict[str, Any] | None:
    """What a folder says of a run that is over. With the address of a cluster a name means the run there: what is here under the
    same name may be another one."""
    from headway.cluster.control import CLUSTER_FILE
    from headway.cluster.status import of_folder

    for folder in (Path(run), Path("runs") / run)[: 2 if address is None else 1]:
        if found := of_folder(folder, was_killed=(folder / CLUSTER_FILE).exists()):
            return found
    return None


def _on_cluster(held: Any) -> dict[str, Any]:
    """Of `stop.Holdings`."""
    return {
        "driver_at": held.driver,
        "actors": held.num_actors,
        "placement": [
            {
                "name": group.name,
                "role": group.role,
                "nodes": list(group.nodes),
                "bundles": list(group.bundles),
            }
            for group in held.groups
        ],
    }


def _on_terminal(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    seen = look()
    with Live(render(seen), console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(render(seen), refresh=True)
            time.sleep(REFRESH_S)
            try:
                seen = look()
            except ClusterError:
                return seen


def _in_blocks(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    seen = look()
    while True:
        console.print(render(seen), highlight=False)
        end = time.monotonic() + BLOCK_S
        while time.monotonic() < end:
            time.sleep(REFRESH_S)
            try:
                seen = look()
            except ClusterError:
                return seen


# ---- showing -----------------------------------------------------------------------------------------------


def render(found: dict[str, Any]) -> RenderableType:
    """What `status` prints."""
    parts: list[RenderableType] = [_headline(found)]
    if "reward" in found:
        parts.append(_learning(found))
    if "roles" in found:
        parts += [_roles(found), _engines(found)]
    elif found.get("placement"):
        parts.append(_places(found))
    if found.get("waits"):
        parts.append(_waits(found))
    return Group(*parts)


def _headline(found: dict[str, Any]) -> Text:
    name, state = found["run"], found["state"]
    text = Text()
    if state in ("starting", "running", "stopping"):
        text.append(f"{name}", style="bold")
        text.append(f"  {state}", style="green" if state == "running" else "yellow")
        left = "" if found.get("left_s") is None else f", about {_time(found['left_s'])} left"
        saved = "no checkpoint yet" if found["checkpoint"] is None else f"checkpoint {found['checkpoint']}"
        text.append(
            f"  step {found['version']}/{found['steps']}, up {_time(found['uptime_s'])}{left}; {saved}"
            + (f"; {found['restarts']} restarts" if found["restarts"] else "")
        )
        host = "localhost" if found["own_ray"] else found.get("driver_at", "").rpartition(" ")[2]
        text.append(
            f"\n{found['folder']}  http://{host or found['driver']['host']}:{found['metrics_port']}/metrics",
            style="dim",
        )
        return text
    text.append(f"{name}", style="bold")
    if state == "silent":
        text.append("  does not answer", style="red")
        text.append(f"  {found['why']}; its driver is {found['driver_at']}")
    elif state == "left":
        text.append("  its driver is gone", style="red")
        text.append(f"  and has left {found['actors']} actors; 'headway stop {name}' removes them")
    else:
        saved = found["checkpoint"]
        text.append(f"  {state}", style="green" if state == "finished" else "yellow")
        text.append(f"  at step {found['version']}/{found['steps']}; ")
        if state == "interrupted":
            text.append(
                "its driver was killed; " if found["was_killed"] else "it failed, or was ended at once; "
            )
        text.append("no checkpoint" if saved is None else f"checkpoint {found['checkpoint_folder']}")
        if state != "finished":
            text.append("; go on with headway train CONFIG --resume")
    return text


def _learning(found: dict[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    reward, step, lag = found["reward"], found["step"], found["lag"]
    table.add_row(
        Text("reward", style="cyan"),
        f"{_number(reward['last'])}, mean {_number(reward['mean'])}, {_change(reward['change'])}  {_spark(reward['recent'])}",
    )
    shares = sorted(step["shares"].items(), key=lambda item: -item[1])
    table.add_row(
        Text("step", style="cyan"),
        ("–" if step["seconds"] is None else f"{step['seconds']:.1f} s")
        + "".join(f"  {name.replace('_', ' ')} {share:.0%}" for name, share in shares if share >= 0.005),
    )
    bound = f"bound {lag['bound']}"
    if lag.get("effective", lag["bound"]) != lag["bound"]:
        bound += f", now {lag['effective']} (lag.ess_floor)"
    mean = "–" if lag["mean"] is None else f"{lag['mean']:.2f}"
    most = "–" if lag["max"] is None else lag["max"]
    table.add_row(Text("lag", style="cyan"), f"mean {mean}, max {most}, {bound}")
    groups = found["groups"]
    dropped = ", ".join(
        f"{reason} {number}" for reason, number in groups.get("dropped", {}).items() if number
    )
    counts = [] if "running" not in groups else [
        f"{groups['running']} running",
        f"{groups['queued']}/{groups['queue_groups']} queued ({_mib(groups['queued_bytes'])}/{_mib(groups['queue_bytes'])} MiB)",
        f"{groups['trained']} trained",
    ]  # fmt: skip
    table.add_row(Text("groups", style="cyan"), ", ".join([*counts, f"dropped: {dropped or 'none'}"]))
    return table


def _roles(found: dict[str, Any]) -> Table:
    columns = ("role", "live", "GPU each", "restarts", "place")
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1), expand=False)
    for role, has in found["roles"].items():
        own = [group for group in found.get("placement", ()) if group["role"] == role]
        live = f"{has['live']}/{has['target']}"
        style = "" if has["live"] == has["target"] else "yellow"
        table.add_row(
            role,
            Text(live, style=style),
            f"{has['gpus']:g}" if has["gpus"] else "",
            str(has["restarts"] or ""),
            _place(own) or "driver's node",
        )
    return table


def _place(groups: list[dict[str, Any]]) -> str:
    """What these placement groups have on each node, and what waits."""
    placed: dict[str, dict[str, float]] = {}
    waiting = 0
    for group in groups:
        waiting += not group["nodes"]
        for node, bundle in zip(group["nodes"], group["bundles"], strict=False):
            has = placed.setdefault(node, {})
            for key, amount in bundle.items():
                has[key] = has.get(key, 0.0) + amount
    shown = [
        f"{node} ({', '.join(f'{amount:g} {key}' for key, amount in has.items() if key in ('CPU', 'GPU'))})"
        for node, has in placed.items()
    ]
    return "; ".join([*shown, *([f"{waiting} wait for a place"] if waiting else [])])


def _engines(found: dict[str, Any]) -> Table:
    table = Table("engine", "GPU", "version", "groups", "KV cache", "", box=SIMPLE_HEAD, padding=(0, 1))
    for engine in found["engines"]:
        version = engine["version"]
        behind = 0 if version is None else found["version"] - version
        usage = engine["kv_cache"]
        table.add_row(
            str(engine["replica"]),
            f"{engine['gpus']:g}" if engine["gpus"] else "",
            "starts" if version is None else f"{version}" + (f" (-{behind})" if behind else ""),
            f"{engine['groups']}/{engine['limit']}",
            "–" if usage is None else f"{usage:.0%}",
            "leaves" if engine["leaving"] else "",
        )
    return table


def _waits(found: dict[str, Any]) -> Table:
    table = Table(
        "who", Column("waits for", overflow="fold"), "s", "deadline", box=SIMPLE_HEAD, padding=(0, 1)
    )
    for wait in found["waits"]:
        alike = f" (and {wait['alike'] - 1} like it)" if wait["alike"] > 1 else ""
        used = wait["waited_s"] / wait["deadline_s"] if wait["deadline_s"] else 1.0
        style = "red" if used > 0.5 else ""
        table.add_row(
            wait["who"],
            wait["what"] + alike,
            Text(f"{wait['waited_s']:.1f}", style=style),
            f"{wait['deadline_s']:.0f}",
        )
    return table


def _places(found: dict[str, Any]) -> Table:
    table = Table("placement group", "place", box=SIMPLE_HEAD, padding=(0, 1))
    for group in found["placement"]:
        table.add_row(group["name"], _place([group]))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _change(value: float | None) -> str:
    if value is None:
        return "no trend yet"
    return "steady" if abs(value) < 0.005 else f"{'rising' if value > 0 else 'falling'} by {abs(value):.3f}"


def _spark(values: list[float]) -> str:
    """The values as bars between their lowest and highest, which are named behind them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    bars = "".join(BARS[round((value - low) / spread * (len(BARS) - 1))] for value in values)
    return f"{bars} {low:.2f} to {high:.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}" if size >= 10 << 20 else f"{size / 2**20:.1f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
