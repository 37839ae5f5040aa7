"""What a person sees while a run goes on: one line per optimizer step, and on a terminal a live status below."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from headway.core.config import Config
from headway.core.consistency import share_with_signal
from headway.core.sections import OUTCOME_GROUPS

ENOUGH_GROUPS = 100
LITTLE_SIGNAL = 0.4
"""Below this share of groups with signal a run is warned about it."""


def say(console: Console, started: float, text: str) -> None:
    """Prints it with the seconds since `started` (monotonic). Never as markup: what a path or an actor's last words hold in
    brackets may look like it."""
    clock = f"[dim]{time.monotonic() - started:6.1f} s[/dim]"
    console.print(f"{clock}  {escape(text)}", highlight=False)


class Progress:
    """Prints to `console`. Use as a context manager around the run."""

    def __init__(self, config: Config, console: Console) -> None:
        self._steps = config.run.steps
        self._signal = Signal(config)
        self._selects = config.algorithm.dynamic_sampling
        self._console = console
        self._started = time.monotonic()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def header(self, config: Config, *, num_prompts: int, model: str) -> None:
        """What this run is about to do, in three lines."""
        sampling, learner, generation = config.sampling, config.learner, config.generation
        algorithm = config.algorithm
        self._console.print(
            f"[bold]headway[/bold] run '{config.run.name}' in {escape(str(config.run_folder))}: {config.run.steps} steps, "
            f"max version lag {config.lag.max_version_lag}"
            + (" (synchronous)" if config.lag.max_version_lag == 0 else ""),
            highlight=False,
        )
        self._console.print(
            f"  model {model}, {num_prompts} prompts from {config.data.source}, {learner.groups_per_step} groups x "
            f"{sampling.group_size} responses of at most {sampling.max_new_tokens} tokens a step",
            highlight=False,
            markup=False,
        )
        self._console.print(
            f"  {generation.replicas} vLLM engine(s), {learner.replicas} learner rank(s)"
            f"{f' with an adapter of rank {learner.lora_rank}' if learner.lora_rank else ''}, learning rate "
            f"{learner.learning_rate:g}, preset {algorithm.preset}: advantage {algorithm.advantage}, correction "
            f"{' + '.join(algorithm.correction) or 'none'}",
            highlight=False,
        )

    def say(self, text: str) -> None:
        say(self._console, self._started, text)

    def endpoint(self, port: int, wanted: int) -> None:
        taken = f" (port {wanted} is taken)" if wanted not in (0, port) else ""
        self.say(f"metrics at http://localhost:{port}/metrics{taken}")

    def step(self, record: dict[str, Any]) -> None:
        """One finished optimizer step, from its line in `metrics.jsonl`."""
        lags, lengths = record["lag"], record["response_tokens"]
        self.say(
            f"step {record['version']:>4}/{self._steps}  reward {self._reward(record)}  "
            f"lag {sum(lags) / len(lags):.1f} (max {max(lags)})  ess {_number(record['importance_ess_fraction'], 3)}  "
            f"kl {_number(record['behavior_kl'], 4)}  grad {record['grad_norm']:.2f}  "
            f"len {sum(lengths) / len(lengths):.1f}  {record['seconds']['total']:.1f} s "
            f"(waited {record['waited_s']:.1f})"
        )
        if (warning := self._signal.step(record)) is not None:
            self.say(f"warning: {warning}")

    def _reward(self, record: dict[str, Any]) -> str:
        """Dynamic sampling trains neither solved nor hopeless prompts, so what it trains says little about all."""
        trained = _number(record["reward_mean"], 3)
        if not self._selects:
            return trained
        return f"{_number(record['sampled_reward_mean'], 3)} (trained {trained})"

    def state(self, *, version: int, running: int, queued: int, engines: dict[int, int | None]) -> None:
        """Refreshes the status line on a terminal; nothing elsewhere."""
        if self._live:
            serving = " ".join(f"{replica}:v{'–' if at is None else at}" for replica, at in engines.items())
            self._live.update(
                Text(
                    f"  learner v{version}/{self._steps} · {running} groups running · {queued} queued · engines {serving}",
                    style="cyan",
                ),
                refresh=True,
            )


class Signal:
    """How many groups hold different rewards, which is all that an advantage within the group learns from."""

    def __init__(self, config: Config) -> None:
        self._size = config.sampling.group_size
        self._is_wanted = config.algorithm.advantage in OUTCOME_GROUPS
        self._dropped: int | None = None
        """Without signal, up to the last step."""
        self._groups, self._with_signal, self._rewards = 0, 0.0, 0.0

    def step(self, record: dict[str, Any]) -> str | None:
        """A warning, once, when it is clear that most groups have none."""
        mean, without = record["sampled_reward_mean"], record.get("no_signal_groups_fraction")
        if not self._is_wanted or mean is None or without is None:
            return None
        trained, dropped = len(record["lag"]), record["dropped"].get("no_signal", 0)
        groups = trained + (dropped - self._dropped if self._dropped is not None else 0)
        self._dropped = dropped
        self._groups += groups
        self._with_signal += trained * (1 - without)
        self._rewards += groups * mean
        share = self._with_signal / self._groups
        if self._groups < ENOUGH_GROUPS or share >= LITTLE_SIGNAL:
            return None
        self._is_wanted = False
        found = f"{1 - share:.0%} of {self._groups} groups have equal rewards and teach nothing"
        if not 0 < (rate := self._rewards / self._groups) < 1:
            return f"{found}: give easier or harder prompts"
        more = 4 * self._size
        return (
            f"{found}; at a pass rate of {rate:.0%} a group of {self._size} has both right and wrong answers with 1 - p^n - (1-p)^n = "
            f"{share_with_signal(rate, self._size):.0%}, one of {more} with {share_with_signal(rate, more):.0%} "
            "(sampling.group_size)"
        )


def _number(value: float | None, digits: int) -> str:
    """A step without trained tokens has no such value."""
    return "–" if value is None else f"{value:.{digits}f}"
