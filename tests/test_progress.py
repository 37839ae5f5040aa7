"""What a person is told."""

from __future__ import annotations

import io

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
