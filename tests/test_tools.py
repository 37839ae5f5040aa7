"""Tools in episodes: a real run with a calculator, token by token, and programs that nobody vouches for."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.actors.chat import encode, follower
from headway.actors.environments import (
    MAX_CALLS,
    PRINTED_BYTES,
    PROGRAM_S,
    SHOWN_CHARACTERS,
    Observation,
    Outcome,
    Tools,
    calculator,
    make,
    python,
)
from headway.cluster.preflight import prompts_of
from headway.core import rollouts
from headway.core.config import Config, load_config
from headway.core.errors import DataError
from headway.core.prompts import Prompt, harmless
from headway.core.sections import Environment
from headway.learner.pretrained import model_folder

PROMPT = Prompt(prompt_id="p", content="What is 6 * 7?", gold="42", verifier="numeric")

# ---- a run -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_run_trains_on_what_the_policy_said_and_on_nothing_that_it_heard(
    root: Path, tmp_path: Path
) -> None:
    """The shipped configuration, short and in float32: every row is rebuilt from its sampled tokens and the tool's
    answers, and a plain model finds the engine's log-probabilities again on the very tokens of the row."""
    small = ["run.steps=2", "learner.groups_per_step=1", "sampling.group_size=8", "lag.max_version_lag=0"]
    small += ["sampling.max_new_tokens=64", "model.dtype=float32", "metrics.port=0", f"run.folder={tmp_path}"]
    command = [sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/tools.yaml", *small]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    config = load_config(tmp_path / "tools" / "config.json")
    folder = model_folder(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = (
        rollouts.read_parquet(path).to_pylist()
        for path in sorted((tmp_path / "tools" / "rollouts").glob("*.parquet"))
    )
    source = str(root / config.data.source)
    prompts = {prompt.prompt_id: prompt for prompt in prompts_of(config, source, config.run.seed)}
    for row in (*first, *second):
        played_again(row, prompts[row["prompt_id"]], config, tokenizer)
        assert [math.isfinite(value) for value in row["behavior_logprobs"]] == list(
            map(bool, row["loss_mask"])
        )
        assert all(
            mask or (advantage == 0.0 and math.isnan(proximal))
            for mask, advantage, proximal in zip(
                row["loss_mask"], row["advantages"], row["proximal_logprobs"], strict=True
            )
        )
    assert any(row["advantages"][-1] != 0.0 for row in (*first, *second) if 0 in row["loss_mask"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with_tool = [row for row in first if len(row["step_ends"]) == 2]
    assert with_tool and all(0 in row["loss_mask"] for row in with_tool)
    for row in first:
        assert {span["version"] for span in row["version_spans"]} == {0}
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs[len(row["prompt_ids"]) - 1 :]
        known = torch.tensor(row["loss_mask"], dtype=torch.bool)
        behavior = torch.tensor(row["behavior_logprobs"])
        assert torch.allclose(logprobs[known], behavior[known], atol=1e-4)


def played_again(row: dict[str, Any], prompt: Prompt, config: Config, tokenizer: Any) -> None:
    """The row is the opening, then in turn what was sampled and what the environment answers to it; no more."""
    environment, follow = (
        make("calculator", config.environment.params),
        follower(tokenizer, chat_template=True),
    )
    now: Observation | Outcome = environment.reset(prompt)
    assert isinstance(now, Observation)
    opening = Prompt(prompt_id="", content=now.content, gold=None, verifier="")
    assert row["prompt_ids"] == encode(tokenizer, opening, chat_template=True)
    ids, mask, at = row["response_ids"], row["loss_mask"], 0
    for turn, end in enumerate(row["step_ends"]):
        assert isinstance(now, Observation)
        heard = follow(str(now.content), now.role) if turn else []
        assert ids[at : at + len(heard)] == heard
        at += len(heard)
        assert mask[at - len(heard) : end] == [0] * len(heard) + [1] * (end - at)
        said = tokenizer.decode(ids[at:end], skip_special_tokens=True)
        now = environment.step(harmless(said, tokenizer.all_special_tokens))
        at = end
    assert at == len(ids) == len(mask) == row["version_spans"][-1]["end"]
    assert isinstance(now, Outcome) or row["truncated"]


def test_the_shipped_tasks_and_examples_are_right(root: Path) -> None:
    config = load_config(root / "configs" / "tools.yaml")
    for source in (config.data.source, str(config.data.eval_source)):
        for prompt in prompts_of(config, str(root / source), 0):
            one, other = map(int, re.findall(r"\d+", prompt.text))
            assert prompt.gold == str(one * other)
    tools = make("calculator", config.environment.params)
    examples = config.environment.params["examples"]
    for call, result in zip(examples[1::4], examples[2::4], strict=True):
        assert tools.step(call["content"]) == Observation(content=result["content"], role=result["role"])
    assert all(tools.step(answer["content"]) == Outcome() for answer in examples[3::4])


# ---- calls in fences ---------------------------------------------------------------------------------------


def test_a_fenced_block_with_the_name_of_a_tool_is_a_call() -> None:
    examples = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
    tools = Tools(calculator, python, calls="fence", examples=examples)
    opening = tools.reset(PROMPT)
    system, *rest = opening.content
    assert isinstance(system, dict) and system["content"].splitlines()[-2:] == [
        "calculator: Value of an arithmetic expression such as (3 + 4) * 2 / 7.",
        f"python: {python.__doc__}",
    ]
    assert rest == [*examples, {"role": "user", "content": "What is 6 * 7?"}]
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"})
    merged = tools.reset(Prompt(prompt_id="p", content=chat, gold="5", verifier="numeric")).content
    assert merged == (
        {"role": "system", "content": f"Be brief.\n\n{system['content']}"},
        *examples,
        chat[1],
    )

    def answer(said: str) -> str | None:
        now = tools.step(said)
        return str(now.content) if isinstance(now, Observation) else None

    assert answer("I compute:\n```calculator\n6 * 7\n```") == "```result\n42\n```"
    assert answer("```calculator\n6 * 7```\nThen") == "```result\n42\n```"
    assert answer("```calculator\n```") == "```result\nerror: not an expression with a value\n```"
    both = "```python\nfor i in range(3):\n    print(i)\n```\n```calculator\n1 / 3\n```"
    assert answer(both) == "```result\n0\n1\n2\n```\n```result\n1/3\n```"
    assert str(answer("```calculator\n1\n```\n" * 20)).count("result") == MAX_CALLS
    for no_call in ("42", "```calculator\n6 * 7", "see ```calculator\n6 * 7\n```", "```c\n6 * 7\n```"):
        assert answer(no_call) is None


def test_tools_that_do_not_fit_are_refused_at_the_start() -> None:
    def power(base: int, exponent: int) -> int:
        return base**exponent

    with pytest.raises(TypeError, match="one argument; power"):
        Tools(power, calls="fence")
    with pytest.raises(DataError, match="calls='xml' is none of json, fence"):
        make("python", {"calls": "xml"})

    def double(number: int) -> int:
        return 2 * number

    now = Tools(double, calls="fence").step("```double\n21\n```\n```double\nx\n```")
    assert isinstance(now, Observation)
    good, bad = str(now.content).split("```result\n")[1:]
    assert good == "42\n```\n" and bad.startswith("error: 0: Input should be a valid integer")


# ---- programs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)", "42"),
        ("import math\nprint(math.comb(40, 20))", "137846528820"),
        ("x = 6 * 7", "nothing was printed"),
        ("", "nothing was printed"),
        ("print('a'); 1 / 0", "error: ZeroDivisionError: division by zero"),
        ("def f(:", "error: SyntaxError: invalid syntax"),
        ("\0", "error: SyntaxError: source code string cannot contain null bytes"),
        ("raise SystemExit(3)", "error: exit status 3"),
        ("print(input())", "error: EOFError: EOF when reading a line"),
        ("print('7' * 1000)", "7" * SHOWN_CHARACTERS + " ..."),
        ("raise ValueError('7' * 1000)", f"error: ValueError: {'7' * 1000}"[:SHOWN_CHARACTERS] + " ..."),
    ],
)
def test_a_program_is_answered_by_what_it_printed(code: str, answer: str) -> None:
    assert python(code) == answer


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("while True: pass", r"stopped after (3 s|2 s of computing)"),
        ("import time; time.sleep(60)", "stopped after 3 s"),
        ("while True: print('x' * 1000)", f"stopped after {PRINTED_BYTES} bytes of output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", r"stopped after (3 s|2 s of computing)"),
        ("data = [0] * 10**9", "out of memory"),
        ("import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()",
         r"(stopped, too many threads|RuntimeError: can't start new thread)"),
        ("import os\nwhile True: os.fork()", r"PermissionError: \[Errno 1\] .*"),
        ("import os; os.kill(os.getppid(), 9)", r"PermissionError: \[Errno 1\] .*"),
        ("import subprocess; subprocess.run(['true'])", r"PermissionError: \[Errno 1\] .*"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", r"PermissionError: \[Errno 1\] .*"),
        ("import urllib.request as r; r.urlopen('http://example.org')", r"urllib\.error\.URLError: .*"),
        ("open('/etc/passwd').read()", r"(FileNotFoundError|PermissionError): .*"),
    ],
)  # fmt: skip
def test_a_hostile_program_is_stopped_and_told_why(code: str, answer: str) -> None:
    began = time.monotonic()
    text = python(code)
    assert time.monotonic() - began < PROGRAM_S + 20
    assert re.fullmatch(f"error: {answer}", text), text
    assert python("print(1)") == "1"


def test_a_turn_of_endless_programs_ends_before_the_deadline_of_environments() -> None:
    assert Environment().deadline_s > MAX_CALLS * (PROGRAM_S + 0.25)


def test_python_is_a_tool_in_both_formats() -> None:
    asked = {
        "json": '<tool_call>{"name": "python", "arguments": {"code": "print(6*7)"}}</tool_call>',
        "fence": "```python\nprint(6*7)\n```",
    }
    told = {"json": "<tool_response>\n42\n</tool_response>", "fence": "```result\n42\n```"}
    for calls, said in asked.items():
        assert make("python", {"calls": calls}).step(said) == Observation(content=told[calls])
    assert make("python", {}).step(asked["json"]) == Observation(content=told["json"])
