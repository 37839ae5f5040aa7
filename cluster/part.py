"""What the parts of a session have in common."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from headway.cluster.crew import Crew
from headway.cluster.watch import Waits
from headway.core.config import Config
from headway.core.metrics import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """One object for all parts of a session."""

    config: Config
    crew: Crew
    waits: Waits
    recorder: Recorder
    say: Callable[[str], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine beside the learner."""


class Part:
    """Works beside the learner, on the session's event loop."""

    def __init__(self, shared: Shared) -> None:
        self._config = shared.config
        self._crew = shared.crew
        self._waits = shared.waits
        self._recorder = shared.recorder
        self._say = shared.say
        self._spawn = shared.spawn
