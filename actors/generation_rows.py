"""The rollout rows of one prompt group, made of single requests to an engine: responses, the extra rows of
`extra_rollouts`, and episodes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from headway.actors.episodes import Episode
from headway.actors.extra_rollouts import branch_mark, greedy_mark, step_ends
from headway.actors.samples import Sample, SampleRequest, digest
from headway.core.errors import ConfigError, HandedBack
from headway.core.prompts import Prompt
from headway.core.sections import Environment

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One prompt to sample a group of responses for, with what their advantages need besides."""

    group_id: int
    prompt: Prompt
    group_size: int
    """Responses, or episodes."""
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
    environment: Environment = field(default_factory=Environment)
    """What a response is an episode of, if it has a name."""

    def __post_init__(self) -> None:
        if self.greedy + (self.branches > 0) + (self.environment.name is not None) > 1:
            raise ConfigError("a group has a greedy answer, branches or episodes, not several of them")
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
    follow: Callable[[str, str], list[int]]
    """(text, chat role) -> the tokens between an agent's turn and its next one."""
    kept: dict[str, Sample] = field(default_factory=dict)
    """Samples by label, from an earlier engine; `rows` puts there what it samples."""

    async def rows(self) -> list[Row]:
        """Rows of the rollout table, save for their timing: the responses in order, or each episode's agents in
        order, then the extra rows. Raises `HandedBack` when a sample came back unfinished; `kept` then holds all that
        the group has."""
        request = self.request
        if request.environment.name is not None:
            rows = await all_of(self._episode(number) for number in range(request.group_size))
            return [row for episode in rows for row in episode]
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

    async def _episode(self, number: int) -> list[Row]:
        """A row for each agent, in the order in which they first spoke; of forked episodes for each turn."""
        request = self.request

        async def speak(prefix_ids: list[int], agent: str, turn: int, spent: int) -> Sample:
            label = f"{number}/{agent}/{turn}"
            (sample,) = await self._sample(prefix_ids, [label], agent=agent, spent=spent)
            return sample

        episode = Episode(
            settings=request.environment,
            prompt=request.prompt,
            budget=request.max_new_tokens,
            speak=speak,
            encode=self.encode,
            decode=self.decode,
            follow=self.follow,
            special_tokens=self.special_tokens,
        )
        return [
            {
                "rollout_id": f"{request.group_id}/{number}/{label}",
                "group_id": request.group_id,
                "prompt_id": request.prompt.prompt_id,
                "sample_index": number,
                "text": self.decode(columns["response_ids"]),
                **columns,
            }
            for label, columns in (await episode.play()).items()
        ]

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
        before, prefix = self.kept.get(label), digest(request.prefix_ids)
        if before is not None and before.prefix != prefix:
            before = None  # an environment has said something else this time
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
        whole = replace(rest if before is None else before.then(rest), prefix=prefix)
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
            "agent_id": "policy",
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
