"""Episodes of several turns, token for token: prompt ids, sampled ids, the ids of what came back, sampled ids, and so on.

What an agent has seen and said is never encoded again: the tokens in its row are those that the engine had before it.
For that a chat template has to leave past turns as they were (`chat.rewrites_past`). Where it does not, an episode can be
forked: every turn is a row of its own, whose prompt is the conversation as the template writes it by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from headway.actors.environments import Environment, Observation, Outcome, make
from headway.actors.samples import Sample, append_spans
from headway.core import config
from headway.core.errors import DataError, RolloutFailed
from headway.core.prompts import Message, Prompt, harmless
from headway.core.rollouts import can_hold
from headway.verifiers.verdict import Verdict

T = TypeVar("T")


@dataclass(slots=True)
class Voice:
    """A row in the making: what one agent has seen, and said."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 on what it said itself."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """After how many tokens each of its turns ended."""
    rewards: list[float | None] = field(default_factory=list)
    """Of its turns."""
    finish_reason: str = "stop"
    truncated: bool = False

    def hear(self, ids: Sequence[int]) -> None:
        """Tokens that are not its own. They belong to the version that spoke before them."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [math.nan] * len(ids)
        self.spans[-1]["end"] = len(self.ids)

    def say(self, sample: Sample) -> None:
        append_spans(self.spans, sample.version_spans, shift=len(self.ids))
        self.ids += sample.ids
        self.mask += [1] * len(sample.ids)
        self.logprobs += sample.logprobs
        self.ends.append(len(self.ids))
        self.rewards.append(None)
        self.finish_reason, self.truncated = sample.finish_reason, sample.truncated

    def columns(self, verdict: Verdict | None, answer: str) -> dict[str, Any]:
        """Of the rollout table. `answer`: what is to be scored where there is no verdict yet."""
        parts = [("step", reward or 0.0) for reward in self.rewards]
        if all(reward is None for reward in self.rewards):
            parts = []
        parts += verdict.parts if verdict else ()
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.ids,
            "loss_mask": self.mask,
            "behavior_logprobs": self.logprobs,
            "version_spans": self.spans,
            "finish_reason": self.finish_reason,
            "truncated": self.truncated,
            "step_ends": self.ends,
            "reward": verdict.score if verdict else None,
            "verdict_reason": verdict.reason if verdict else None,
            "reward_parts": [{"name": name, "value": value} for name, value in parts] or None,
            "extra": None if verdict else json.dumps({"answer": answer}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One episode of an environment. Played again with the same samples it takes the same course."""

    settings: config.Environment
    prompt: Prompt
    budget: int
    """Tokens of an agent after its first prompt, those that it hears included."""
    speak: Callable[[list[int], str, int, int], Awaitable[Sample]]
    """(prefix, agent, number of its turn, tokens of the budget that are in the prefix) -> the turn."""
    encode: Callable[[Prompt], list[int]]
    decode: Callable[[Sequence[int]], str]
    follow: Callable[[str, str], list[int]]
    """(text, chat role) -> the tokens between an agent's turn and its next one."""
    special_tokens: Sequence[str]
    told: dict[str, list[Message]] = field(default_factory=dict)
    """By agent, its conversation so far."""
    voices: dict[str, list[Voice]] = field(default_factory=dict)
    """By agent, in the order in which they first spoke; several of one when the episode is forked."""

    async def play(self) -> dict[str, dict[str, Any]]:
        """Columns of the rollout table by row: `agent`, or `agent/turn` when the episode is forked. It ends by the
        environment's word, or when an agent that is to speak has no turns or tokens left. Raises `RolloutFailed` when
        the environment does not start."""
        environment = make(self.settings.name or "", self.settings.params)
        now = await self._open(environment)
        said: dict[str, str] = {}
        while isinstance(now, Observation) and (voice := self._listen(now)) is not None:
            agent, own = now.agent, self.voices[now.agent]
            turn = sum(len(each.ends) for each in own)
            spent = len(voice.prompt_ids) - len(own[0].prompt_ids) + len(voice.ids)
            sample = await self.speak([*voice.prompt_ids, *voice.ids], agent, turn, spent)
            voice.say(sample)
            said[agent] = self.decode(sample.ids)
            words = harmless(said[agent], self.special_tokens)
            self.told[agent].append({"role": "assistant", "content": words})
            now = await self._react(environment, words)
            voice.rewards[-1] = now.reward
        verdicts = now.verdicts if isinstance(now, Outcome) else {}
        return {
            f"{agent}/{turn}" if self.forked else agent: {
                "agent_id": agent,
                **voice.columns(verdicts.get(agent), said[agent]),
            }
            for agent, own in self.voices.items()
            for turn, voice in enumerate(own)
        }

    @property
    def forked(self) -> bool:
        return self.settings.rewritten_past == "fork"

    async def _open(self, environment: Environment) -> Observation:
        try:
            return await call(environment.reset, self.prompt, deadline_s=self.settings.deadline_s)
        except Exception as error:  # whatever a user's class does
            what = f"the environment does not start: {type(error).__name__}: {error}"
            raise RolloutFailed("generation_failed", what) from error

    async def _react(self, environment: Environment, said: str) -> Observation | Outcome:
        """The environment's answer; when it has none, an outcome in which every agent is unscored."""
        try:
            now = await call(environment.step, said, deadline_s=self.settings.deadline_s)
            known = {now.agent} if isinstance(now, Observation) else now.verdicts.keys()
            if known <= set(environment.agents) and math.isfinite(now.reward or 0.0) and _is_usable(now):
                return now
            reason = "environment_error"
        except TimeoutError:
            reason = "environment_timeout"
        except Exception:
            reason = "environment_error"
        return Outcome(verdicts=dict.fromkeys(environment.agents, Verdict(score=None, reason=reason)))

    def _listen(self, now: Observation) -> Voice | None:
        """The voice that is to answer, with what it is told; None when its turns or its tokens are used up."""
        told, own = self.told.setdefault(now.agent, []), self.voices.setdefault(now.agent, [])
        is_text = isinstance(now.content, str)
        if own and not is_text:
            raise RolloutFailed(
                "generation_failed", f"agent {now.agent} is given messages after its first turn"
            )
        told += [{"role": now.role, "content": now.content}] if isinstance(now.content, str) else now.content
        if not own:
            # As the dataset has it: a text that becomes a user's message, or messages.
            own.append(Voice(self.encode(replace(self.prompt, content=now.content))))
            return own[0]
        if sum(len(voice.ends) for voice in own) < self.settings.max_turns:
            if self.forked:
                told[-1]["content"] = harmless(told[-1]["content"], self.special_tokens)
                voice = Voice(self.encode(replace(self.prompt, content=tuple(told))))
                if len(voice.prompt_ids) - len(own[0].prompt_ids) < self.budget:
                    own.append(voice)
                    return voice
            else:
                heard = self.follow(str(now.content), now.role)
                if len(own[0].ids) + len(heard) < self.budget:
                    own[0].hear(heard)
                    return own[0]
        own[-1].finish_reason, own[-1].truncated = "length", True
        return None


def _is_usable(now: Observation | Outcome) -> bool:
    """Whether a table can hold these verdicts, and a tokenizer read this text."""
    if isinstance(now, Outcome):
        return all(
            isinstance(each, Verdict) and (each.score is None or 0 <= each.score <= 1)
            for each in now.verdicts.values()
        )
    texts = [now.content] if isinstance(now.content, str) else [message["content"] for message in now.content]
    return all(map(can_hold, texts))


async def call(function: Callable[..., T], *args: Any, deadline_s: float) -> T:
    """Runs an environment's method beside the event loop. Raises `TimeoutError`; what hangs is left to itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(settle, result, failure)

    # Not a pool: those that hang would use it up.
    threading.Thread(target=run, name="environment", daemon=True).start()
    async with asyncio.timeout(deadline_s):
        return await done


def longest_prompt(
    prompt: Prompt,
    settings: config.Environment,
    encode: Callable[[Prompt], list[int]],
    *,
    max_new_tokens: int,
) -> int:
    """Tokens of the longest prompt of this task: its own, or what an agent's first prompt comes to when everything that
    it reads of others takes their whole budget. A text may in rare cases encode to more tokens than were sampled; its
    episode's group then fails. Raises `DataError` when the environment does not work on this prompt."""
    if settings.name is None:
        return len(encode(prompt))
    said = " a" * 100
    (before, after), told = (
        (_openings(prompt, settings, encode, text) for text in ("", said)),
        _length(encode, said),
    )
    return max(
        length + max_new_tokens * math.ceil((after.get(agent, length) - length) / told - 0.1)
        for agent, length in before.items()
    )


def _openings(
    prompt: Prompt, settings: config.Environment, encode: Callable[[Prompt], list[int]], said: str
) -> dict[str, int]:
    """Tokens of each agent's first prompt when everyone says this."""
    environment, found = make(settings.name or "", settings.params), {}
    try:
        now: Observation | Outcome = environment.reset(prompt)
        for _ in range(settings.max_turns * len(environment.agents)):
            if not isinstance(now, Observation):
                break
            found.setdefault(now.agent, len(encode(replace(prompt, content=now.content))))
            now = environment.step(said)
    except DataError:
        raise
    except Exception as error:  # whatever a user's class does
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            f"environment {settings.name!r} fails on prompt {prompt.prompt_id}: {what}"
        ) from error
    return found


def _length(encode: Callable[[Prompt], list[int]], text: str) -> int:
    """Tokens of a text in a prompt."""
    with_it, without = (
        encode(Prompt(prompt_id="", content=content, gold=None, verifier="")) for content in (f"x{text}", "x")
    )
    return len(with_it) - len(without)
