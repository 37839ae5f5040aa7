"""Episodes: what an agent is told after it has spoken, until nobody has anything more to say.

An environment is a plain class. One instance plays one episode: `reset` opens it, `step` takes what the agent that was
spoken to has said. It must be deterministic (the same words, the same answers): an episode that another engine goes on
with is played again up to there. What a policy wrote is never to be run outside the sandbox.
"""

from __future__ import annotations

import cmath
import functools
import inspect
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, Protocol, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from headway.core.errors import DataError
from headway.core.plugins import load
from headway.core.prompts import Message, Prompt
from headway.verifiers import expressions, sandbox, values
from headway.verifiers.numbers import last_number, parse_number
from headway.verifiers.verdict import Verdict, wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an agent is told, and answers next."""

    content: str | tuple[Message, ...]
    """The first time an agent is spoken to: its whole prompt, as text or messages. Later: a text."""
    agent: str = "policy"
    role: str = "user"
    """Chat role of a later text."""
    reward: float | None = None
    """Of the turn before, whoever's it was: the process reward of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The episode is over."""

    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """By agent. Agents that are missing here are scored by the prompt's verifier, on what they said last."""
    reward: float | None = None
    """Of the last turn."""


class Environment(Protocol):
    agents: tuple[str, ...]
    """Each speaks at least once in every episode."""

    def reset(self, prompt: Prompt) -> Observation: ...

    def step(self, said: str) -> Observation | Outcome: ...


# ---- tools -------------------------------------------------------------------------------------------------

MAX_CALLS = 8
"""In one turn; more are not answered."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
INSTRUCTIONS = {
    "json": """\
You may call tools. To call one, write
<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>
and end your turn; its result is given to you. Tools, one JSON object each:
""",
    "fence": """\
You may use tools. To use one, write
```NAME
INPUT
```
and end your turn; its result is given to you. Tools:
""",
}


class Tools:
    """Typed functions that a policy may call. The docstring of a function is its description. A turn without a call ends
    the episode.

    `calls`: `json` is what large models are trained to, JSON in `<tool_call>` tags and results in `<tool_response>` tags;
    `fence` is for small ones and for code, a fenced block with the tool's name and its only argument, as text.
    `examples`: messages that go before the task, such as a task, the call, its result and the answer.
    """

    agents: tuple[str, ...] = ("policy",)

    def __init__(
        self,
        *functions: Callable[..., Any],
        calls: Literal["json", "fence"] = "json",
        examples: Sequence[Message] = (),
    ) -> None:
        if calls not in INSTRUCTIONS:
            raise TypeError(f"calls={calls!r} is none of {', '.join(INSTRUCTIONS)}")
        self._tools = {function.__name__: validate_call(function) for function in functions}
        self._fence = re.compile(rf"^```({'|'.join(self._tools)})[ \t]*\n(.*?)```", re.DOTALL | re.MULTILINE)
        self._is_fenced = calls == "fence"
        describe = _fenced_description if self._is_fenced else _json_description
        self._system = INSTRUCTIONS[calls] + "\n".join(map(describe, functions))
        self._examples = examples

    def reset(self, prompt: Prompt) -> Observation:
        task: Sequence[Message] = (
            [{"role": "user", "content": prompt.content}]
            if isinstance(prompt.content, str)
            else prompt.content
        )
        system = self._system
        if task[0]["role"] == "system":
            system = f"{task[0]['content']}\n\n{system}"
            task = task[1:]
        return Observation(content=({"role": "system", "content": system}, *self._examples, *task))

    def step(self, said: str) -> Observation | Outcome:
        if self._is_fenced:
            found = itertools.islice(self._fence.finditer(said), MAX_CALLS)
            results = [f"```result\n{self._use(call[1], call[2])}\n```" for call in found]
        else:
            calls = _CALL.findall(said)[:MAX_CALLS]
            results = [f"<tool_response>\n{self._call(call)}\n</tool_response>" for call in calls]
        return Observation(content="\n".join(results)) if results else Outcome()

    def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
            if name not in self._tools:
                return f"error: there is no such tool; there are {', '.join(self._tools)}"
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return 'error: a call is a JSON object {"name": ..., "arguments": {...}}'
        if not isinstance(arguments, dict):
            return "error: arguments must be a JSON object"
        return self._use(name, **arguments)

    def _use(self, name: str, /, *args: str, **arguments: Any) -> str:
        try:
            return str(self._tools[name](*args, **arguments))
        except ValidationError as error:
            first = error.errors()[0]
            return f"error: {'.'.join(map(str, first['loc']))}: {first['msg']}"


def _json_description(function: Callable[..., Any]) -> str:
    return json.dumps(
        {
            "name": function.__name__,
            "description": (function.__doc__ or "").strip(),
            "parameters": TypeAdapter[Any](cast(Any, function)).json_schema(),
        }
    )


def _fenced_description(function: Callable[..., Any]) -> str:
    if len(inspect.signature(function).parameters) != 1:
        raise TypeError(f"calls=fence is for tools of one argument; {function.__name__} takes others")
    return f"{function.__name__}: {(function.__doc__ or '').strip()}"


def calculator(expression: str) -> str:
    """Value of an arithmetic expression such as (3 + 4) * 2 / 7."""
    try:
        value = values.evaluate(expressions.read(expression.strip()), {})
        if isinstance(value, Fraction):
            return str(value) if value.denominator < 1000 else f"{float(value):.12g}"
        shown = f"{complex(value):.12g}" if complex(value).imag else f"{float(value):.12g}"
    # The last two: more digits than Python writes, or more than a float can hold.
    except (expressions.NotRead, expressions.TooLarge, values.Undefined, KeyError, ValueError, OverflowError):
        return "error: not an expression with a value"
    return shown if cmath.isfinite(complex(value)) else "error: too large"


SHOWN_CHARACTERS = 500
"""Of what a program printed, or of the last line of its error."""
PRINTED_BYTES = 2**16
"""A program that prints more is stopped."""
PROGRAM_S = 3.0
"""Wall-clock limit of a program (seconds). All that a turn may call end within the default `environment.deadline_s`."""
_STOPPED = {
    "wall": f"error: stopped after {PROGRAM_S:g} s",
    "cpu": "error: stopped after 2 s of computing",
    "memory": "error: out of memory",
    "output": f"error: stopped after {PRINTED_BYTES} bytes of output",
    "processes": "error: stopped, too many threads",
}
_programs = threading.BoundedSemaphore(32)
"""Programs of this process at a time, for the sake of its machine's memory."""


def python(code: str) -> str:
    """What a Python program prints. It has the standard library and 3 seconds, no network and no files."""
    with _programs:
        ended = sandbox.run(
            code, wall_s=PROGRAM_S, cpu_s=2, memory_mib=128, processes=8, output_bytes=PRINTED_BYTES
        )
    if ended.ended in _STOPPED:
        return _STOPPED[ended.ended]
    if ended.status == 0:
        printed = ended.stdout.decode(errors="replace").strip()
        return _cut(printed) or "nothing was printed"
    *_, last = ended.stderr.decode(errors="replace").strip().split("\n")
    return _cut(f"error: {last or f'exit status {ended.status}'}")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


# ---- games -------------------------------------------------------------------------------------------------


class GuessingGame:
    """The gold is a whole number from 1 to `highest`; each guess is answered by "higher" or "lower". Score: 1 for the first
    guess, falling evenly with each further one to 1 / `guesses` for the last, 0 when it is not found. Process reward of a
    turn: the share of the numbers still possible that it has ruled out.
    """

    agents: tuple[str, ...] = ("policy",)

    def __init__(self, highest: int = 100, guesses: int = 7) -> None:
        self._highest = highest
        self._guesses = guesses

    def reset(self, prompt: Prompt) -> Observation:
        number = parse_number(str(prompt.gold))
        if number is None or number.denominator != 1 or not 1 <= number <= self._highest:
            raise DataError(
                f"prompt {prompt.prompt_id}: gold {prompt.gold!r} is no whole number in 1..{self._highest}"
            )
        self._number, self._made = int(number), 0
        self._low, self._high = 1, self._highest
        return Observation(content=prompt.content)

    def step(self, said: str) -> Observation | Outcome:
        self._made += 1
        text = last_number(said)
        guess = parse_number(text) if text else None
        if guess == self._number:
            score = 1 - (self._made - 1) / self._guesses
            return Outcome(
                verdicts={"policy": Verdict(score=score, reason="correct", extracted=text)}, reward=1.0
            )
        ruled_out = self._rule_out(guess)
        if self._made == self._guesses:
            reason = "no_answer" if guess is None else "wrong"
            return Outcome(verdicts={"policy": wrong(text, reason)}, reward=ruled_out)
        if guess is None:
            return Observation(content="not a number", reward=ruled_out)
        return Observation(content="higher" if guess < self._number else "lower", reward=ruled_out)

    def _rule_out(self, guess: Fraction | None) -> float:
        if guess is None:
            return 0.0
        possible = self._high - self._low + 1
        if guess < self._number:
            self._low = max(self._low, math.floor(guess) + 1)
        else:
            self._high = min(self._high, math.ceil(guess) - 1)
        return 1 - (self._high - self._low + 1) / possible


# ---- several agents ----------------------------------------------------------------------------------------


class SolverChecker:
    """A solver answers, a checker judges, and the solver may answer once more when the checker says it is wrong. The
    solver is scored by the prompt's verifier on its last answer; the checker gets 1 when it was right about the first.
    """

    agents: tuple[str, ...] = ("solver", "checker")

    def __init__(
        self,
        check: str = "Task: {prompt}\nProposed answer: {answer}\nIs it correct? Answer yes or no.",
        again: str = "A checker disagrees: {remark}\nAnswer again.",
    ) -> None:
        self._check, self._again = check, again

    def reset(self, prompt: Prompt) -> Observation:
        self._prompt, self._turn = prompt, 0
        return Observation(agent="solver", content=prompt.content)

    def step(self, said: str) -> Observation | Outcome:
        self._turn += 1
        if self._turn == 1:
            self._first = said
            content = fill(self._check, {"prompt": self._prompt.text, "answer": said})
            return Observation(agent="checker", content=content)
        if self._turn == 2:
            self._agrees = _says_yes(said)
            if self._agrees is False:
                return Observation(agent="solver", content=fill(self._again, {"remark": said}))
        return Outcome(verdicts={"checker": self._judge_checker()})

    def _judge_checker(self) -> Verdict:
        from headway.verifiers.registry import verify

        prompt = self._prompt
        if self._agrees is None:
            return wrong(None, "no_answer")
        first = verify(prompt.verifier, prompt.gold, self._first, prompt.context, prompt.text)
        if first.score is None:
            return Verdict(score=None, reason=first.reason)
        right = self._agrees == (first.score == 1.0)
        return Verdict(
            score=float(right),
            reason="correct" if right else "wrong",
            extracted="yes" if self._agrees else "no",
        )


def _says_yes(text: str) -> bool | None:
    words = re.findall(r"\b(yes|no)\b", text.lower())
    return words[-1] == "yes" if words else None


class Relay:
    """Agents answer once each, one after another; `templates` gives each one's prompt, with `{prompt}` and what the agents
    before it have said, `{NAME}`."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._templates = templates
        self.agents = tuple(templates)

    def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        self._answers: dict[str, str] = {}
        return self._ask(self.agents[0])

    def step(self, said: str) -> Observation | Outcome:
        self._answers[self.agents[len(self._answers)]] = said
        if len(self._answers) == len(self.agents):
            return Outcome()
        return self._ask(self.agents[len(self._answers)])

    def _ask(self, agent: str) -> Observation:
        content = agent_prompt(self._prompt, self._templates[agent], self._answers).content
        return Observation(agent=agent, content=content)


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


def fill(template: str, values: Mapping[str, str]) -> str:
    """`template` with each `{name}` of `values` replaced. Other braces stay, and so do those inside the values."""
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)


ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "relay": Relay,
    "calculator": functools.partial(Tools, calculator),
    "python": functools.partial(Tools, python),
    "guessing_game": GuessingGame,
    "solver_checker": SolverChecker,
}


def make(name: str, params: Mapping[str, Any]) -> Environment:
    """A new instance, by its name here or as `package.module:Class` or `path/to/file.py:Class`. Raises `DataError`."""
    if ":" not in name and name not in ENVIRONMENTS:
        raise DataError(
            f"no environment {name!r}; there are {', '.join(ENVIRONMENTS)}, and your own as package.module:Class or "
            "path/to/file.py:Class (environment.name)"
        )
    found = load(name) if ":" in name else ENVIRONMENTS[name]
    try:
        return found(**params)
    except TypeError as error:
        raise DataError(
            f"environment {name!r} refuses {dict(params)}: {error} (environment.params)"
        ) from error
