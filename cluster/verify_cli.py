"""`headway verify`: verdicts on responses, and on the golds of a dataset, before a GPU is spent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.core.datasets import parse_row
from headway.core.errors import ConfigError, DataError
from headway.core.prompts import content_of, load_prompts, names_code, text_of
from headway.verifiers.golds import GoldCheck, check_golds
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import lookup
from headway.verifiers.verdict import Item, Verdict

Block = TypeVar("Block")
Result = TypeVar("Result")

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

EXIT_FAULTS = 1
BLOCK_BYTES = 2**16
"""Read at a time, or less where no more is there yet: a line from a pipe is scored when it comes."""
AUDITED_AT_ONCE = 256
SHOWN_FAULTS = 20
SHOWN_CHARACTERS = 60
_OWN_FIELDS = frozenset({"id", "gold", "output", "response", "kind", "prompt"})
"""Fields of a line that are not its context."""


def verify(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="JSONL; - is standard input.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the verdicts here.", show_default=False)] = None,
    gold: Annotated[str | None, typer.Option(help="Of a single response.", show_default=False)] = None,
    output: Annotated[str | None, typer.Option(help="A single response.", show_default=False)] = None,
    context: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Other fields of a single response.", show_default=False),
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET", help="Check the golds of a dataset, as data.source.", show_default=False
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Verifier where none is named; your own: my_verifier.py:score.")
    ] = "math",
    params: Annotated[
        str, typer.Option(metavar="JSON", help="Options of the verifier, as data.verifier_params.")
    ] = "{}",
    prompt_field: Annotated[str, typer.Option(help="Column of the dataset.")] = "prompt",
    answer_field: Annotated[str, typer.Option(help="Column of the dataset.")] = "answer",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the dataset; default: all.", show_default=False)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes; default: one for each CPU.", show_default=False),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Wall-clock limit of one verdict (s).")] = 5.0,
    memory_mib: Annotated[int, typer.Option(min=64, help="Memory limit of one process (MiB).")] = 1024,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON for --output and --audit; of a file it always is.")
    ] = False,
) -> None:
    """Score responses in a file, or one response, or the golds of a dataset.

    A line of the file has `output` (or `response`), `gold`, and where it needs them `kind`, `prompt` and `id`; its
    other fields are the context. For each line, in order, comes `{"id", "score", "reason", "extracted", "parts"}`;
    score null is unscored. A line that cannot be read gets the reason bad_line, its number and what is wrong. Blank
    lines are passed over. The summary goes to standard error.

    With --audit the exit code is 1 when a gold does not score 1, holds no answer, or a meaningless answer is paid.

    Examples:

    `headway verify answers.jsonl --kind math > verdicts.jsonl`

    `tail -f answers.jsonl | headway verify - --kind numeric --params '{"relative_tolerance": 0.01}'`

    `headway verify --gold '\\frac{1}{2}' --output 'It is \\boxed{0.5}.'`

    `headway verify --audit train.parquet --kind my_verifier.py:score --answer-field solution --limit 2000`
    """
    modes = [file is not None, gold is not None or output is not None, audit is not None]
    if modes.count(True) != 1 or (output is None) != (gold is None):
        raise ConfigError("say one of: a FILE of responses, --gold with --output, or --audit DATASET")
    lookup(kind)
    options = _object("--params", params)
    processes = processes or len(os.sched_getaffinity(0))
    with VerifierPool(processes, timeout_s, memory_mib) as pool:
        if audit is not None:
            faults = _audit(pool, audit, kind, options, prompt_field, answer_field, limit, as_json=as_json)
            raise typer.Exit(EXIT_FAULTS if faults else 0)
        if output is not None:
            row = _object("--context", context or "{}") | {"gold": gold, "output": output}
            _one(pool, read_item(row, kind, options), as_json=as_json)
            return
        assert file is not None
        with _opened(file, out) as (source, target):
            _stream(pool, source, target, kind, options, ahead=4 + 2 * processes)


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        return parse_row(text.encode())
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} {error}") from error


# ---- lines -------------------------------------------------------------------------------------------------


def read_item(row: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> Item:
    """What a line asks for. Raises `DataError`. A line may not name code to run: only `kind` may."""
    name = row.get("kind", kind)
    if name != kind:
        if not isinstance(name, str) or ":" in name:
            raise DataError(f"kind {name!r}: a line may only name a verifier that headway has; use --kind")
        lookup(name)
    if names_code(row.get("parts")):
        raise DataError("parts: a line may only name verifiers that headway has; use --params")
    response = row.get("output", row.get("response"))
    if "output" not in row and "response" not in row:
        raise DataError(f"no output among the fields {', '.join(row) or '(none)'}")
    prompt = row.get("prompt") or ""
    return Item(
        name=name,
        gold=row.get("gold"),
        response=response,
        context={**options, **{k: v for k, v in row.items() if k not in _OWN_FIELDS and v is not None}},
        prompt=prompt if isinstance(prompt, str) else text_of(content_of(prompt)),
    )


@dataclass(slots=True)
class Tally:
    """Sums over the lines so far."""

    lines: int = 0
    scored: int = 0
    total: float = 0.0
    unscored: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)

    def add(self, score: float | None, reason: str) -> None:
        self.lines += 1
        if score is None:
            self.unscored[reason] += 1
        else:
            self.scored += 1
            self.total += score

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.started
        mean = f", mean score {self.total / self.scored:.4g}" if self.scored else ""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.unscored.most_common())
        return (
            f"{self.lines:,} lines, {self.scored:,} scored{mean}, {self.unscored.total():,} unscored"
            f"{f' ({reasons})' if reasons else ''}; {seconds:.1f} s, {self.lines / seconds:,.0f} lines per second"
        )


def _stream(
    pool: VerifierPool,
    source: FileIO,
    target: BinaryIO,
    kind: str,
    options: Mapping[str, Any],
    *,
    ahead: int,
) -> None:
    tally = Tally()

    def score(lines: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
        return score_lines(pool, lines, kind, options)

    # where verdicts go to the same terminal, they show the progress
    quiet = target is sys.stdout.buffer and sys.stdout.isatty()
    with contextlib.nullcontext() if quiet else errors.status("reading") as status:
        for results in in_order(score, read_lines(source), ahead=ahead):
            for result in results:
                tally.add(result["score"], result["reason"])
                target.write(_encoded(result) + b"\n")
            target.flush()
            if status is not None:
                status.update(str(tally))
    errors.print(str(tally), highlight=False)


def score_lines(
    pool: VerifierPool, lines: Iterable[tuple[int, bytes]], kind: str, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A result for each line, in order; what is wrong with a line is in its result."""
    results: list[dict[str, Any]] = []
    items: list[Item] = []
    waiting: list[dict[str, Any]] = []
    for number, line in lines:
        result: dict[str, Any] = {}
        results.append(result)
        try:
            row = parse_row(line)
            if "id" in row:
                result["id"] = row["id"]
            items.append(read_item(row, kind, options))
            waiting.append(result)
        except (ValueError, DataError) as error:
            result |= {"line": number, "score": None, "reason": "bad_line", "extracted": None}
            result["error"] = str(error)
    for result, verdict in zip(waiting, pool.score(items), strict=True):
        result |= _fields(verdict)
    return results


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields = {"score": verdict.score, "reason": verdict.reason, "extracted": verdict.extracted}
    return fields | ({"parts": dict(verdict.parts)} if verdict.parts else {})


def _encoded(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair is escaped as JSON spells it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


@contextlib.contextmanager
def _opened(file: str, out: Path | None) -> Iterator[tuple[FileIO, BinaryIO]]:
    """The input, unbuffered, and where verdicts go. Raises `DataError`."""
    with contextlib.ExitStack() as files:
        try:
            source = files.enter_context(FileIO(0, closefd=False) if file == "-" else FileIO(file))
            if out is None:
                target = sys.stdout.buffer
            elif out.exists() and os.path.samestat(out.stat(), os.fstat(source.fileno())):
                raise ConfigError(f"--out {out} is the file that is read")
            else:
                target = files.enter_context(out.open("wb"))
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}") from error
        yield source, target


def read_lines(source: FileIO) -> Iterator[list[tuple[int, bytes]]]:
    """Numbered lines that are not blank, as many at a time as there are to read."""
    number = 0
    rest: list[bytes] = []
    while block := source.read(BLOCK_BYTES):
        if b"\n" not in block:
            rest.append(block)
            continue
        *lines, last = b"".join([*rest, block]).split(b"\n")
        rest = [last]
        yield [(number + n, line) for n, line in enumerate(lines, 1) if line.strip()]
        number += len(lines)
    if (last := b"".join(rest)).strip():
        yield [(number + 1, last)]


def in_order(
    work: Callable[[Block], Result], blocks: Iterator[Block], *, ahead: int
) -> Generator[Result, None, None]:
    """What `work` returns for each block, in order, each as soon as it and those before are done. At most `ahead` blocks
    are begun and not yet handed out, and one more is read. Waits for `blocks` and `work`, whose errors it raises."""
    results: queue.SimpleQueue[Future[Result] | None] = queue.SimpleQueue()
    room = threading.Semaphore(ahead)
    ended = threading.Event()

    def feed() -> None:
        try:
            for block in blocks:
                room.acquire()
                if ended.is_set():
                    return
                future: Future[Result] = Future()
                results.put(future)
                threading.Thread(target=fulfil, args=(future, block), daemon=True).start()
        except Exception as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            results.put(failed)
        results.put(None)

    def fulfil(future: Future[Result], block: Block) -> None:
        try:
            future.set_result(work(block))
        except Exception as error:
            future.set_exception(error)

    # daemons: Ctrl-C must not wait for the next line of a terminal
    threading.Thread(target=feed, daemon=True).start()
    try:
        while (future := results.get()) is not None:
            yield future.result()
            room.release()
    finally:
        ended.set()
        room.release()


# ---- one response ------------------------------------------------------------------------------------------


def _one(pool: VerifierPool, item: Item, *, as_json: bool) -> None:
    (verdict,) = pool.score([item])
    if as_json:
        print(json.dumps(_fields(verdict)))
        return
    score = "unscored" if verdict.score is None else f"score {verdict.score:g}"
    console.print(f"[bold]{score}[/bold]  {escape(verdict.reason)}", highlight=False)
    extracted = "[dim]none[/dim]" if verdict.extracted is None else escape(verdict.extracted)
    console.print(f"extracted: {extracted}", highlight=False)
    for name, value in verdict.parts:
        console.print(f"  {escape(name)} {value:g}", highlight=False)


# ---- golds of a dataset ------------------------------------------------------------------------------------


def _audit(
    pool: VerifierPool,
    source: str,
    kind: str,
    options: dict[str, Any],
    prompt_field: str,
    answer_field: str,
    limit: int | None,
    *,
    as_json: bool,
) -> int:
    """Prints what is wrong with the golds, and returns with how many. Raises `DataError`."""
    prompts = load_prompts(
        source,
        verifier=kind,
        prompt_field=prompt_field,
        answer_field=answer_field,
        num_prompts=limit or 1000,
        verifier_params=options,
    )[:limit]
    reasons: Counter[str] = Counter()
    faults: list[GoldCheck] = []
    with errors.status("checking golds") as status:
        for start in range(0, len(prompts), AUDITED_AT_ONCE):
            checks = check_golds(pool, prompts[start : start + AUDITED_AT_ONCE])
            reasons.update(check.reason for check in checks)
            faults += [check for check in checks if check.is_fault]
            status.update(f"{reasons.total():,} of {len(prompts):,} golds, {len(faults):,} at fault")
    if as_json:
        shown = [
            {
                "prompt_id": fault.prompt.prompt_id,
                "verifier": fault.prompt.verifier,
                "gold": fault.prompt.gold,
                "reason": fault.reason,
                "detail": fault.detail,
            }
            for fault in faults
        ]
        report = {"source": source, "prompts": len(prompts), "reasons": dict(reasons), "faults": shown}
        print(json.dumps(report, default=str))
        return len(faults)
    if faults:
        table = Table("prompt", "verifier", "gold", "reason", "detail", box=SIMPLE_HEAD, padding=0)
        for fault in faults[:SHOWN_FAULTS]:
            prompt = fault.prompt
            cells = (prompt.prompt_id, prompt.verifier, repr(prompt.gold), fault.reason, fault.detail)
            table.add_row(*(escape(_short(cell)) for cell in cells))
        console.print(table)
        if len(faults) > SHOWN_FAULTS:
            console.print(f"and {len(faults) - SHOWN_FAULTS:,} more (--json has all)", highlight=False)
    counts = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    console.print(f"{len(prompts):,} golds of {escape(source)}: {counts}", highlight=False)
    return len(faults)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
