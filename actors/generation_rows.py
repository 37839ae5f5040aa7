"""The rollout rows of one prompt group, made of single requests to an engine: responses, the extra rows of
`extra_rollouts`, and the answers of agents that read each other."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from headway.actors.extra_rollouts import branch_mark, greedy_mark, step_ends
from headway.core.errors import ConfigError, DataError, HandedBack
from headway.core.prompts import Message, Prompt
from headway.core.rollouts import SCHEMA

Row = dict[str, Any]
T = TypeVar("T")

KEPT_SCHEMA = pa.schema(
    [
        ("label", pa.string()),  # which sample of its group
        ("ids", SCHEMA.field("response_ids").type),
        ("logprobs", SCHEMA.field("behavior_logprobs").type),
        ("version_spans", SCHEMA.field("version_spans").type),
        ("finish_reason", SCHEMA.field("finish_reason").type),  # abort: unfinished
        ("truncated", SCHEMA.field("truncated").type),
    ]
)
"""What an engine has of a group that it handed back, one row per sample that has tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One continuation of a token prefix."""

    name: str
    """Whose it is, in errors."""
    prefix_ids: Sequence[int]
    seed: int
    temperature: float
    """0: greedy; the reported log-probabilities are then those at temperature 1."""
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One continuation of a token prefix, whole or up to where an engine handed it back."""

    ids: list[int]
    """The sampled tokens, the final end-of-sequence token included; never empty."""
    logprobs: list[float]
    """Nats per token, under the distribution that was sampled from; NaN where the engine gave none."""
    version_spans: list[dict[str, int]]
    """`start`, `end` (half-open, tokens) and `version` of the weights that sampled them."""
    finish_reason: str
    """`stop` | `length`; `abort`: unfinished."""
    truncated: bool
    """The token budget ended it, not an end-of-sequence token."""

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def then(self, rest: Sample) -> Sample:
        """This unfinished sample and its continuation as one."""
        shift = len(self.ids)
        spans = [dict(span) for span in self.version_spans]
        for span in rest.version_spans:
            if spans and spans[-1]["version"] == span["version"]:
                spans[-1]["end"] = span["end"] + shift
            else:
                spans.append({**span, "start": span["start"] + shift, "end": span["end"] + shift})
        return replace(
            rest, ids=[*self.ids, *rest.ids], logprobs=[*self.logprobs, *rest.logprobs], version_spans=spans
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One prompt to sample a group of responses for, with what their advantages need besides."""

    group_id: int
    prompt: Prompt
    group_size: int
    """Responses; with `agents` episodes."""
    temperature: float
    top_p: float
    max_new_tokens: int
    """Of one response; a branch gets what the response before it has left."""
    deadline_s: float
    greedy: bool = False
    """One greedy answer to the prompt as well, as a baseline."""
    branches: int = 0
    """Fresh continuations of the prompt and of the state after each step; needs `step_separator`."""
    step_separator: str | None = None
    """A step of a response ends with this text; null: responses are not split into steps."""
    max_steps: int = 8
    """Steps per response at most; the last one takes the rest."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """Prompt templates by agent, in order (`agent_prompt`); empty: one agent, which answers the prompt itself."""

    def __post_init__(self) -> None:
        if self.greedy + (self.branches > 0) + bool(self.agents) > 1:
            raise ConfigError("a group has a greedy answer, branches or agents, not several of them")
        if self.branches and self.step_separator is None:
            raise ConfigError("branches need a step separator: they start where a step ends")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSampler:
    """Turns a group into single requests and their answers into rows.

    Every sample of a group has a label, which gives it its seed and its place among the `kept`. A sample that was kept
    whole is used as it is; one that was kept in part goes on after its last token, with random numbers of its own and
    what is left of its budget. So a group goes on at another engine whatever it consists of: the steps and prompts of
    branches and agents are made anew from the same tokens, and come out the same.
    """

    request: GroupRequest
    run_seed: int
    sample: Callable[[SampleRequest], Awaitable[Sample]]
    """May return an unfinished sample, or raise `HandedBack` before the first token."""
    encode: Callable[[Prompt], list[int]]
    decode: Callable[[Sequence[int]], str]
    special_tokens: Sequence[str]
    kept: dict[str, Sample] = field(default_factory=dict)
    """Samples by label, from an earlier engine; `rows` puts there what it samples."""

    async def rows(self) -> list[Row]:
        """Rows of the rollout table, save for their timing: the responses in order, or each episode's agents in
        order, then the extra rows. Raises `HandedBack` when a sample came back unfinished; `kept` then holds all that
        the group has."""
        request = self.request
        if request.agents:
            episodes = await all_of(self._episode(number) for number in range(request.group_size))
            return [row for episode in episodes for row in episode]
        prompt_ids = self.encode(request.prompt)
        first: list[Coroutine[Any, Any, list[Row]]] = [self._responses(prompt_ids)]
        if request.greedy:
            first.append(self._greedy(prompt_ids))
        if request.branches:
            first.append(self._branches(prompt_ids))
        responses, *extra = await all_of(first)
        if request.branches:
            extra += await all_of(
                self._branches(prompt_ids, row["sample_index"], row["response_ids"][:end])
                for row in responses
                for end in row["step_ends"][:-1]
            )
        return [row for rows in (responses, *extra) for row in rows]

    async def _responses(self, prompt_ids: list[int]) -> list[Row]:
        labels = [str(index) for index in range(self.request.group_size)]
        samples = await self._sample(prompt_ids, labels)
        return [
            self._row(prompt_ids, sample, label, index)
            for index, (label, sample) in enumerate(zip(labels, samples, strict=True))
        ]

    async def _greedy(self, prompt_ids: list[int]) -> list[Row]:
        (sample,) = await self._sample(prompt_ids, ["greedy"], temperature=0.0)
        return [self._row(prompt_ids, sample, "greedy", -1, extra=greedy_mark())]

    async def _branches(
        self, prompt_ids: list[int], response: int | None = None, before: Sequence[int] = ()
    ) -> list[Row]:
        """Continuations of the first tokens of a response; None: of the prompt."""
        state = "prompt" if response is None else f"{response}/{len(before)}"
        labels = [f"{state}/{number}" for number in range(self.request.branches)]
        prefix_ids = [*prompt_ids, *before]
        samples = await self._sample(prefix_ids, labels, spent=len(before))
        index = -1 if response is None else response
        mark = branch_mark(response, len(before))
        return [
            self._row(prefix_ids, sample, label, index, before=before, extra=mark)
            for label, sample in zip(labels, samples, strict=True)
        ]

    async def _episode(self, episode: int) -> list[Row]:
        """One answer of each agent, each of which may read those before it."""
        answers: dict[str, str] = {}
        rows = []
        for agent, template in self.request.agents.items():
            prompt_ids = self.encode(agent_prompt(self.request.prompt, template, answers))
            label = f"{episode}/{agent}"
            (sample,) = await self._sample(prompt_ids, [label], agent=agent)
            rows.append(self._row(prompt_ids, sample, label, episode, agent=agent))
            answers[agent] = harmless(rows[-1]["text"], self.special_tokens)
        return rows

    async def _sample(
        self,
        prefix_ids: list[int],
        labels: list[str],
        *,
        agent: str = "",
        spent: int = 0,
        temperature: float | None = None,
    ) -> list[Sample]:
        """One sample per label; `spent` tokens of the response's budget are in the prefix."""
        request = self.request
        shared = SampleRequest(
            name=f"group {request.group_id}" + (f", agent {agent}" if agent else ""),
            prefix_ids=prefix_ids,
            seed=0,
            temperature=request.temperature if temperature is None else temperature,
            top_p=request.top_p,
            max_new_tokens=request.max_new_tokens - spent,
        )
        return await all_of(self._finish(shared, label) for label in labels)

    async def _finish(self, request: SampleRequest, label: str) -> Sample:
        """The sample of this label, from what is kept of it on."""
        before = self.kept.get(label)
        if before is not None and before.finished:
            return before
        ids = before.ids if before is not None else []
        rest = await self.sample(
            replace(
                request,
                prefix_ids=[*request.prefix_ids, *ids],
                seed=_seed(self.run_seed, self.request.group_id, label, len(ids)),
                max_new_tokens=request.max_new_tokens - len(ids),
            )
        )
        whole = rest if before is None else before.then(rest)
        self.kept[label] = whole
        if not whole.finished:
            raise HandedBack(request.name)
        return whole

    def _row(
        self,
        prompt_ids: list[int],
        sample: Sample,
        label: str,
        sample_index: int,
        *,
        agent: str = "policy",
        before: Sequence[int] = (),
        extra: str | None = None,
    ) -> Row:
        request = self.request
        steps = None
        if request.step_separator is not None and extra is None:
            steps = step_ends(sample.ids, self.decode, request.step_separator, request.max_steps)
        return {
            "rollout_id": f"{request.group_id}/{label}",
            "group_id": request.group_id,
            "prompt_id": request.prompt.prompt_id,
            "sample_index": sample_index,
            "agent_id": agent,
            "prompt_ids": prompt_ids,
            "response_ids": sample.ids,
            "loss_mask": [int(extra is None)] * len(sample.ids),
            "behavior_logprobs": sample.logprobs,
            "version_spans": sample.version_spans,
            "finish_reason": sample.finish_reason,
            "truncated": sample.truncated,
            "text": self.decode(
                [*before, *sample.ids]
            ),  # the whole answer: a branch is judged with what it continues
            "step_ends": steps,
            "extra": extra,
        }


def agent_prompt(prompt: Prompt, template: str, answers: Mapping[str, str]) -> Prompt:
    """What an agent is asked: `template` with `{prompt}`, the task's text, and `{NAME}`, what agent NAME answered.

    Of chat messages the last one of the user is the task's text, and is replaced. Raises `DataError` when there is
    none.
    """
    if isinstance(prompt.content, str):
        return replace(prompt, content=fill(template, {"prompt": prompt.content, **answers}))
    messages: list[Message] = [dict(message) for message in prompt.content]
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = fill(template, {"prompt": message["content"], **answers})
            return replace(prompt, content=tuple(messages))
    raise DataError(
        f"prompt {prompt.prompt_id} has no user message for the templates of data.agents to replace"
    )


def longest_prompt(
    prompt: Prompt, agents: Mapping[str, str], encode: Callable[[Prompt], list[int]], *, max_new_tokens: int
) -> int:
    """Tokens of the longest prompt of this task: the prompt's own, or of agents what they come to when each answer
    before takes its whole budget. Exact without agents; with them an answer's text may in rare cases encode to more
    tokens than were sampled, and its episode's group then fails."""
    if not agents:
        return len(encode(prompt))
    nothing = dict.fromkeys(agents, "")
    return max(
        len(encode(agent_prompt(prompt, template, nothing)))
        + max_new_tokens * sum(template.count(f"{{{agent}}}") for agent in agents)
        for template in agents.values()
    )


def fill(template: str, values: Mapping[str, str]) -> str:
    """`template` with each `{name}` of `values` replaced. Other braces stay, and so do those inside the values."""
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)


def harmless(text: str, special_tokens: Iterable[str]) -> str:
    """Spells out what a policy wrote so that no special token is read in it: it could end its turn in the prompt of
    another agent and speak for the user."""
    for token in special_tokens:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def kept_table(samples: Mapping[str, Sample]) -> pa.Table:
    """Samples by label, as a table that travels (`KEPT_SCHEMA`)."""
    return pa.Table.from_pylist(
        [{"label": label, **asdict(sample)} for label, sample in samples.items()], schema=KEPT_SCHEMA
    )


def kept_samples(table: pa.Table) -> dict[str, Sample]:
    """The samples of `kept_table`; log-probabilities as float32 holds them."""
    return {row.pop("label"): Sample(**row) for row in table.to_pylist()}


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure ends the rest: nobody would take what they still sample. Only when an engine
    hands back all of them come to their end, which is then near: each has something to keep."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except HandedBack:
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        for task in tasks:
            task.cancel()


def _seed(run_seed: int, group_id: int, label: str, num_kept: int) -> int:
    """The same sample for the same place in a group, however often and wherever it is issued; another one for what
    comes after kept tokens, whose random numbers are used up."""
    after = f"{num_kept}+" if num_kept else ""
    key = f"{after}{run_seed}/{group_id}/{label}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
