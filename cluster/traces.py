"""What became of every prompt group, as one OpenTelemetry trace each. Off unless `metrics.traces` says where they go.

The root span `group` lasts from the group's admission to its end, as the ledger has them. Its children say where the time
went: `generate` on an engine, `wait_for_engine` for another one, `score` with a child for each scorer, `queue`, `train`.

A span is noted in the driver as two times of the loop's clock, and is made and sent once its group has ended. So nothing
is asked of the actors, and each span ends exactly once whatever dies on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.core.config import Config
from headway.core.errors import HandedBack
from headway.core.prompts import PromptStream

if TYPE_CHECKING:
    from headway.cluster.groups import Groups
    from headway.cluster.state import Group


@dataclass(kw_only=True, slots=True, eq=False)
class Span:
    """A part of a group's life."""

    name: str
    began: float
    """Time of the loop (seconds)."""
    attributes: dict[str, Any]
    parent: Span | None = None
    """None: the root, and itself for the root."""
    ended: float | None = None
    failure: str | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Life:
    """A group so far."""

    root: Span
    clock: Callable[[], float]
    spans: list[Span] = field(default_factory=list)
    """Below the root, parents before their children."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Of the root, with their times."""
    waiting: Span | None = None
    """`queue` or `train`, while it lasts."""

    def begin(self, name: str, parent: Span | None = None, **attributes: Any) -> Span:
        span = Span(name=name, began=self.clock(), attributes=attributes, parent=parent)
        self.spans.append(span)
        return span

    def wait(self, name: str) -> None:
        """What it waited for is over; from here on it is this."""
        self.end_wait()
        self.waiting = self.begin(name)

    def end_wait(self, failure: str | None = None) -> None:
        if self.waiting is not None:
            self.waiting.ended, self.waiting.failure = self.clock(), failure
            self.waiting = None


_here: ContextVar[tuple[Life, Span | None] | None] = ContextVar("_here", default=None)
"""The group that this task brings to its end, and the stage in which it is."""
_OFF = nullcontext()


def traced(name: str, **attributes: Any) -> AbstractContextManager[None]:
    """The block is a child span of the group that `Traces.follow` made this task's, inside the stage around it. Nothing in
    any other task."""
    here = _here.get()
    return _OFF if here is None else _stage(*here, name, attributes)


@contextmanager
def _stage(life: Life, parent: Span | None, name: str, attributes: dict[str, Any]) -> Iterator[None]:
    span = life.begin(name, parent, **attributes)
    token = _here.set((life, span))
    try:
        yield
    except HandedBack:
        span.attributes["handed_back"] = True
        raise
    except Exception as error:  # passed on, whatever it is
        span.failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        span.ended = life.clock()
        _here.reset(token)


class Traces:
    """Traces of the groups of a run, session by session. `clock` is the loop's. `send` takes a life that has ended, and what
    has to be added to the clock's times to make them times of day (nanoseconds)."""

    def __init__(self, config: Config, send: Callable[[Life, int], None], clock: Callable[[], float]) -> None:
        self._config = config
        self._send = send
        self._clock = clock
        self._offset_ns = time.time_ns() - round(clock() * 1e9)
        self._lives: dict[int, Life] = {}
        self._groups: Mapping[int, Group] = {}
        self._prompts: PromptStream | None = None

    def attach(self, groups: Groups, prompts: PromptStream) -> None:
        """A session starts: follows its ledger. Groups that lie in the queue already begin here once more."""
        self._groups, self._prompts = groups.live, prompts
        groups.ledger.observer = self.record
        for group_id in groups.live:
            self._begin(group_id, resumed=True).wait("queue")

    def detach(self) -> None:
        """The session is over: what has not ended is unfinished, and goes on in another trace if the run goes on."""
        for group_id in list(self._lives):
            self._end(group_id, outcome="unfinished")

    def follow(self, group: Group) -> None:
        """From here on the calling task brings this group to its end."""
        life = self._lives.get(group.group_id)
        if life is None:
            life = self._begin(group.group_id, resumed=True)
        elif "admission_version" in life.root.attributes:
            life.events.append((self._clock(), "issued again"))
        life.root.attributes.setdefault("admission_version", group.since_version)
        _here.set((life, None))

    def take(self, group_ids: Iterable[int]) -> None:
        """The learner takes these groups."""
        for group_id in group_ids:
            self._lives[group_id].wait("train")

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """The ledger's observer."""
        group_id: int = fields["group"]
        match event:
            case "issued":
                self._begin(group_id)
            case "restarted":
                self._lives[group_id].events.append((self._clock(), event))
            case "finished":
                self._finish(self._lives[group_id], self._groups[group_id])
            case "lost":
                life = self._lives[group_id]
                life.end_wait("its rows were lost with the queue")
                life.events.append((self._clock(), event))
            case "trained":
                version: int = fields["version"]
                life, receipt = self._lives[group_id], self._groups[group_id].receipt
                if life.waiting is not None:
                    life.waiting.attributes["version"] = version
                assert receipt is not None
                lag = min(version - 1 - receipt.oldest_version, self._config.max_trained_lag)
                self._end(group_id, outcome=event, version=version, lag=lag)
            case "dropped":
                self._end(group_id, outcome=event, reason=fields["reason"])

    def _begin(self, group_id: int, **attributes: Any) -> Life:
        about = {"run": self._config.run.name, "group_id": group_id, **attributes}
        root = Span(name="group", began=self._clock(), attributes=about)
        self._lives[group_id] = life = Life(root=root, clock=self._clock)
        return life

    @staticmethod
    def _finish(life: Life, group: Group) -> None:
        receipt = group.receipt
        assert receipt is not None, group
        tokens = sum(receipt.response_lengths)
        for span in life.spans[::-1]:
            if span.name == "generate":
                span.attributes["tokens"] = tokens
                break
        life.wait("queue")

    def _end(self, group_id: int, **attributes: Any) -> None:
        life, group = self._lives.pop(group_id), self._groups.get(group_id)
        life.end_wait()
        root = life.root
        root.ended = self._clock()
        if self._prompts is not None:
            root.attributes["prompt_id"] = self._prompts.at(group_id).prompt_id
        receipt = group.receipt if group else None
        if receipt is not None:
            root.attributes |= {
                "oldest_version": receipt.oldest_version,
                "newest_version": receipt.newest_version,
                "responses": len(receipt.response_lengths),
                "tokens": sum(receipt.response_lengths),
            }
            if receipt.num_scored:
                root.attributes["reward_mean"] = receipt.reward_sum / receipt.num_scored
        root.attributes |= attributes
        self._send(life, self._offset_ns)


@contextmanager
def opened(config: Config, say: Callable[[str], None], clock: Callable[[], float]) -> Iterator[Traces | None]:
    """Traces to where `metrics.traces` says, None when it says nothing. What is left is sent when the block ends, within a
    deadline. Raises `ConfigError` for a file that cannot be written. `say` may be called by another thread."""
    if config.metrics.traces is None:
        yield None
        return
    from headway.cluster.trace_export import TraceExport

    export: Any = TraceExport(config, say)  # type checkers know its lives under another name
    try:
        yield Traces(config, export.send, clock)
    finally:
        export.close()
