"""`headway rollouts`: what the policy answered, on the terminal, as JSON lines, or as a page with every token."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from headway.cluster.page import MAX_CHARACTERS, excerpt, number, visible
from headway.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from headway.cluster.stored import Batch, Rollout, Wanted

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

SORTS = ("step", "reward", "length", "lag")
SHOWN = 10
SHOWN_ON_PAGE = 50
JSON_AT_ONCE = 256

Key = tuple[float, ...]


def rollouts(
    run: Annotated[Path, typer.Argument(help="Run folder with stored rollouts.", show_default=False)],
    step: Annotated[
        str | None, typer.Option(metavar="RANGE", help="Optimizer steps that trained it.", show_default=False)
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="RANGE", help="Of scored responses.", show_default=False)
    ] = None,
    length: Annotated[
        str | None, typer.Option(metavar="RANGE", help="Tokens of the response.", show_default=False)
    ] = None,
    lag: Annotated[
        str | None,
        typer.Option(metavar="RANGE", help="Version lag of its oldest token, in steps.", show_default=False),
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option(help="Verdict reason; may be given again.", show_default=False)
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Agent that said it.", show_default=False)] = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Somewhere in the response.", show_default=False)
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, help="The N with the highest rewards.", show_default=False)
    ] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, help="The N with the lowest rewards.", show_default=False)
    ] = None,
    sort: Annotated[
        str, typer.Option(help="By step, reward, length or lag; with - before it from the highest.")
    ] = "-step",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Rollouts at most; default: {SHOWN}, of --html {SHOWN_ON_PAGE}, of --json all.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per rollout.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that shows every token.", show_default=False),
    ] = None,
) -> None:
    """Read what the policy answered.

    A RANGE is a number or `3..9`, `3..`, `..9`, both ends included. Of rollouts with the same reward, --best and --worst
    take one of each prompt first. The newest steps come first where nothing else is said.

    The page colours tokens by how far the learner's policy had moved away from the one that sampled them (proximal minus
    behavior log-probability), or by version. It is one file, and needs nothing else.

    Examples:

    `headway rollouts runs/demo --best 3 --worst 3`

    `headway rollouts runs/demo --step 15.. --reward 0 --search "let me" --sort -length`

    `headway rollouts runs/demo --lag 2.. --html lagging.html`

    `headway rollouts runs/demo --reason no_answer --json | jq .text`
    """
    from headway.cluster.stored import Wanted, batches, find_tokenizer, parse_range, read_config

    if as_json and html is not None:
        raise ConfigError("--json and --html: say one of them")
    if (best or worst) and (sort != "-step" or limit is not None):
        raise ConfigError(
            "--best and --worst say themselves how many, and sort by reward: leave out --sort and --limit"
        )
    if html is not None and not html.name:  # as of `.`, and of nothing
        raise ConfigError(f"--html {html}: name a file")
    if sort.removeprefix("-") not in SORTS:
        raise ConfigError(f"--sort {sort!r}: say one of {', '.join(SORTS)}, or -reward for the highest first")
    ranges = {"step": step, "reward": reward, "length": length, "lag": lag}
    wanted = Wanted(
        **{name: parse_range(f"--{name}", text) for name, text in ranges.items() if text is not None},
        reasons=tuple(reason or ()),
        agent=agent,
        text=search,
    )
    config = read_config(run)
    files = batches(run, config)
    tokenizer = find_tokenizer(run, config)
    found = Found(files, wanted)
    if best or worst:
        with errors.status("reading rollouts"):
            sections = {"best": found.ranked(best, highest=True), "worst": found.ranked(worst, highest=False)}
            sections = {title: rows for title, rows in sections.items() if rows}
    else:
        limit = limit or (None if as_json else SHOWN if html is None else SHOWN_ON_PAGE)
        sections = {"": found.sorted(sort, limit)}
    if as_json:
        for rows in sections.values():
            _print_json(rows, tokenizer)
        return
    with errors.status("reading rollouts"):
        shown = {title: list(rows) for title, rows in sections.items()}
    if html is not None:
        from headway.cluster.rollouts_page import write_rollouts_page

        try:
            write_rollouts_page(html, run, config, shown, tokenizer, _asked(ranges, wanted))
        except OSError as error:
            raise DataError(f"--html {html}: {error.strerror}") from error
    else:
        for title, rows in shown.items():
            _print(title, rows, tokenizer)
    count = sum(map(len, shown.values()))
    where = f" in {html}" if html is not None else ""
    more = ", and there are more (--limit)" if found.has_more else ""
    unread = "" if tokenizer else "; the run's tokenizer was not found, so prompts are shown as token ids"
    errors.print(
        Text(f"{count:,} rollout{'s' * (count != 1)}{where}{more}{unread if count else ''}", style="dim")
    )


class Found:
    """The wanted rollouts of a run, found anew each time that they are asked for."""

    def __init__(self, batches: list[Batch], wanted: Wanted) -> None:
        self._batches = batches
        self._wanted = wanted
        self.has_more = False
        """Whether a limit has left some out."""

    def sorted(self, sort: str, limit: int | None) -> Iterable[Rollout]:
        """In this order; unscored ones come last where it is that of rewards. Without a limit and in the order of
        steps they are found while one reads them."""
        name, falling = sort.removeprefix("-"), sort.startswith("-")
        if name == "step":
            return self._upto(limit, falling=falling)
        sign = -1 if falling else 1

        def key(rollout: Rollout) -> Key:
            value: float | None = getattr(rollout, name)
            return (value is None, sign * (value or 0.0))

        return self._smallest(limit, key, self._all(falling=True))

    def ranked(self, count: int | None, *, highest: bool) -> list[Rollout]:
        """The scored rollouts with the highest or lowest rewards; of equal ones one of each group comes first."""
        if count is None:
            return []
        sign = -1 if highest else 1

        def keyed() -> Iterator[tuple[Key, Rollout]]:
            for batch in reversed(self._batches):
                equal: Counter[tuple[int, float]] = Counter()
                for rollout in self._in(batch):
                    if rollout.reward is not None:
                        place = (rollout.group_id, rollout.reward)
                        yield (sign * rollout.reward, equal[place]), rollout
                        equal[place] += 1

        return [rollout for _, rollout in heapq.nsmallest(count, keyed(), key=lambda pair: pair[0])]

    def _smallest(
        self, limit: int | None, key: Callable[[Rollout], Key], found: Iterable[Rollout]
    ) -> list[Rollout]:
        """Python's sorts keep the order of equals."""
        if limit is None:
            return sorted(found, key=key)
        rows = heapq.nsmallest(limit + 1, found, key=key)
        self.has_more = len(rows) > limit
        return rows[:limit]

    def _upto(self, limit: int | None, *, falling: bool) -> Iterator[Rollout]:
        for count, rollout in enumerate(self._all(falling=falling)):
            if count == limit:
                self.has_more = True
                return
            yield rollout

    def _all(self, *, falling: bool) -> Iterator[Rollout]:
        for batch in reversed(self._batches) if falling else self._batches:
            rows = self._in(batch)
            # of a batch of several steps the last ones come first, each in its order
            yield from sorted(rows, key=lambda rollout: -rollout.step) if falling else rows

    def _in(self, batch: Batch) -> list[Rollout]:
        from headway.cluster.stored import find

        return find(batch, self._wanted)


def _asked(ranges: dict[str, str | None], wanted: Wanted) -> str:
    """The filters as they were given."""
    said = [f"{name} {text}" for name, text in ranges.items() if text is not None]
    said += [" or ".join(wanted.reasons)] if wanted.reasons else []
    said += [f"agent {wanted.agent}"] if wanted.agent is not None else []
    said += [f"with “{wanted.text}”"] if wanted.text is not None else []
    return ", ".join(said)


# ---- JSON --------------------------------------------------------------------------------------------------


def _print_json(rows: Iterable[Rollout], tokenizer: Tokenizer | None) -> None:
    from headway.cluster.stored import decode, in_chunks, read_columns

    for chunk in in_chunks(rows, JSON_AT_ONCE):
        for rollout, row in zip(chunk, read_columns(chunk, ["prompt_ids", "text"]), strict=True):
            prompt = None if tokenizer is None else decode(tokenizer, row["prompt_ids"])
            # escapes whatever is not ASCII, also what a terminal would obey
            print(json.dumps(_fields(rollout) | {"prompt": prompt, "text": row["text"]}))


def _fields(rollout: Rollout) -> dict[str, Any]:
    return {
        "step": rollout.step,
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "prompt_id": rollout.prompt_id,
        "sample_index": rollout.sample_index,
        "agent_id": rollout.agent_id,
        "reward": rollout.reward,
        "reward_parts": [{"name": name, "value": value} for name, value in rollout.parts],
        "verdict_reason": rollout.reason,
        "length": rollout.length,
        "lag": rollout.lag,
        "version_spans": [
            {"start": start, "end": end, "version": version} for start, end, version in rollout.spans
        ],
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
    }


# ---- terminal ----------------------------------------------------------------------------------------------


def _print(title: str, rows: list[Rollout], tokenizer: Tokenizer | None) -> None:
    """Never as markup: what a model wrote may look like it, or hold what a terminal obeys."""
    from headway.cluster.stored import decode, read_columns

    columns = ["prompt_ids", "response_ids", "loss_mask", "text"]
    for rollout, row in zip(rows, read_columns(rows, columns), strict=True):
        console.print(_heading(title, rollout))
        if rollout.parts:
            console.print(
                Text(
                    "  parts  "
                    + ", ".join(f"{visible(name)} {number(value)}" for name, value in rollout.parts)
                )
            )
        console.print(Text("  prompt", style="bold cyan"))
        console.print(_indented(Text(visible(excerpt(decode(tokenizer, row["prompt_ids"]))))))
        console.print(Text("  response", style="bold cyan"))
        console.print(_indented(_response(row, tokenizer)))
        console.print()


def _heading(title: str, rollout: Rollout) -> Text:
    heading = Text(f"{title} · " if title else "", style="bold")
    heading.append(f"step {rollout.step} · ")
    score = "unscored" if rollout.reward is None else f"reward {number(rollout.reward)}"
    heading.append(f"{score} {visible(rollout.reason or 'no verdict')}", style=_style(rollout.reward))
    cut = " (truncated)" if rollout.truncated else ""
    spans = ", ".join(f"v{version} [{start}, {end})" for start, end, version in rollout.spans)
    heading.append(
        f" · {rollout.length:,} tokens, {rollout.finish_reason}{cut} · lag {rollout.lag} · {spans}",
        style="not bold",
    )
    agent = f", agent {visible(rollout.agent_id)}" if rollout.agent_id else ""
    heading.append(
        f"\n  rollout {visible(rollout.rollout_id)}, prompt {visible(rollout.prompt_id)}{agent}",
        style="not bold dim",
    )
    return heading


def _style(reward: float | None) -> str:
    if reward is None:
        return "magenta"
    return "green" if reward >= 1 else "red" if reward <= 0 else "yellow"


def _response(row: dict[str, Any], tokenizer: Tokenizer | None) -> Text:
    """The response, dim where its tokens are not the policy's own."""
    from headway.cluster.stored import pieces

    if tokenizer is None or all(row["loss_mask"]):
        return Text(visible(excerpt(row["text"])))
    text = Text()
    for piece, is_own in zip(pieces(tokenizer, row["response_ids"]), row["loss_mask"], strict=True):
        text.append(visible(piece), style="" if is_own else "dim")
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    if left_out <= 0:
        return text
    return Text.assemble(text[:half], f"\n[… {left_out:,} characters left out …]\n", text[-half:])


def _indented(text: Text) -> Text:
    return Text("\n").join(Text("    ").append_text(line) for line in text.split("\n", allow_blank=True))
