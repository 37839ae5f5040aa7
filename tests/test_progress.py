"""What a person is told."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from headway.cluster.progress import Progress
from headway.core.config import Config


def printed(act: str, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    getattr(Progress(Config(), console), act)(*arguments)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_taken_port_is_named_beside_the_one_used_instead() -> None:
    assert "http://localhost:9401/metrics (port 9400 is taken)" in printed("endpoint", 9401, 9400)
    assert "taken" not in printed("endpoint", 9400, 9400)
    assert "taken" not in printed("endpoint", 50123, 0)  # 0 asks for any port


def test_a_step_without_trained_tokens_has_a_line_too() -> None:
    record = {
        "version": 3, "reward_mean": None, "sampled_reward_mean": 0.25, "lag": [0, 2], "importance_ess_fraction": None, "behavior_kl": None,
        "grad_norm": 0.0, "response_tokens": [4, 6], "seconds": {"total": 1.5}, "waited_s": 0.25,
    }  # fmt: skip
    line = printed("step", record)
    assert (
        "step    3/100  reward 0.250 (trained –)  lag 1.0 (max 2)  ess –  kl –  grad 0.00  len 5.0  1.5 s (waited 0.2)"
        in line
    )


def test_brackets_are_no_markup() -> None:
    words = "engine 0 is replaced: [/dev/shm] is full [red]"
    assert words in printed("say", words)
    config = Config().model_copy(update={"run": Config().run.model_copy(update={"folder": Path("[/a] [b]")})})
    console = Console(file=io.StringIO(), width=200)
    Progress(config, console).header(config, num_prompts=1, model="[/models]/m")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "in [/a] [b]/run:" in said and "model [/models]/m," in said


def test_a_run_goes_on_without_whoever_read_along() -> None:
    script = """
import sys
from headway.cluster.cli import console
for _ in range(3):
    console.print("x" * 100_000, highlight=False)
print("goes on", file=sys.stderr)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout and run.stderr
        run.stdout.close()
        assert run.stderr.read() == "goes on\n"
    assert run.returncode == 0


def test_no_run_ends_because_a_terminal_lacks_a_character() -> None:
    script = (
        "from headway.cluster import cli\ncli.app = lambda: cli.console.print('reward \u2013')\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"reward \\u2013\n")
