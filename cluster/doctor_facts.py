"""What the doctor looks at, each thing found once, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from headway.core.config import Config
from headway.core.errors import HeadwayError
from headway.core.prompts import Prompt

State = Literal["ok", "warning", "error", "skipped"]
T = TypeVar("T")
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a check found."""

    check: str
    state: State
    """skipped: it needs something that is wrong, which another row says."""
    value: str
    """What was found; of an error also what to change."""
    advice: str = ""


class Unknown(Exception):
    """Something that another check has found wrong."""


class Facts:
    """What the checks look at; each is found once, when it is first asked for. What is wrong with it is raised then, as a
    `HeadwayError`, and `Unknown` whenever it is asked for again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._failed: dict[str, str] = {}
        """What was found wrong, and by what."""

    def _found(self, name: str, find: Callable[[], T]) -> T:
        if name in self._failed:
            raise Unknown(self._failed[name])
        try:
            return find()
        except (HeadwayError, Unknown) as error:
            self._failed[name] = str(error) if isinstance(error, Unknown) else name
            raise

    @cached_property
    def model_folder(self) -> Path:
        from headway.learner.pretrained import model_folder

        return self._found("model", lambda: model_folder(self.config.model.path))

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        from headway.cluster.doctor_files import parameters_of

        return self._found("model", lambda: parameters_of(self.model_folder, self.config))

    @cached_property
    def tokenizer(self) -> Any:
        from headway.cluster.preflight import tokenizer_of

        return self._found("tokenizer", lambda: tokenizer_of(self.model_folder))

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        from headway.cluster.preflight import prompts_of

        config = self.config
        return self._found("prompts", lambda: prompts_of(config, config.data.source, config.run.seed))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Verifiers that score the prompts."""
        from headway.cluster.preflight import kinds_of

        return self._found("verifiers", lambda: kinds_of(*self.prompts))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        from headway.cluster.preflight import longest_of

        return self._found("lengths", lambda: longest_of(self.config, self.tokenizer, self.prompts))

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """Of the cluster, which is joined, or started, for this."""
        from headway.cluster.doctor_cluster import nodes_of

        return self._found("Ray", lambda: nodes_of(self.config))

    @cached_property
    def machines(self) -> dict[str, dict[str, Any] | None]:
        """What each node says of itself, by address; None: it did not answer."""
        from headway.cluster.doctor_cluster import machines_of

        return self._found("nodes", lambda: machines_of(self.nodes))


def faults_of(check: str, raised: HeadwayError) -> Iterator[Row]:
    for line in str(raised).splitlines():
        if line.strip():
            yield Row(check=check, state="error", value=line.strip())


def ok(value: str) -> Row:
    return Row(check="", state="ok", value=value)


def error(value: str) -> Row:
    return Row(check="", state="error", value=value)


def warning(value: str, advice: str = "") -> Row:
    return Row(check="", state="warning", value=value, advice=advice)
