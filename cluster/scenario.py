"""How fast the actors of a virtual run are, what they sample, and what goes wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from headway.core.errors import ConfigError
from headway.core.metrics import ROLES

EVENTS = (*ROLES, "node", "stall", "bad_update", "store_full")
"""A role: one of its actors dies. `node`: a node dies with its engines. `stall`: an engine stops answering and
sampling, but lives. `bad_update`: an engine's next weight update fails half way. `store_full`: the object store takes
nothing for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that goes wrong at a stated time."""

    time_s: float
    """Since the crew was opened first."""
    event: str
    replica: int = 0
    """Or the number of the node; no matter for `store_full`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """How fast everything is, and what goes wrong. The same scenario and configuration give the same run."""

    seed: int = 0

    length_median: float = 256.0
    """Of a log-normal distribution of response lengths, clipped to [1, sampling.max_new_tokens] (tokens)."""
    length_sigma: float = 0.8
    """Standard deviation of the logarithm; 0: all responses are equally long."""
    lengths: tuple[int, ...] = ()
    """Measured response lengths to draw from instead (tokens)."""
    straggler_share: float = 0.0
    """Share of prompts whose responses are all `straggler_factor` times as long, up to the same limit."""
    straggler_factor: float = 1.0
    prompt_tokens: int = 128
    """Of every prompt."""

    prefill_s: float = 0.05
    """From dispatch to the first decode step."""
    decode_s: float = 0.02
    """A decode step of an engine takes this long,"""
    decode_request_s: float = 0.0002
    """and this much longer for each response that it decodes."""
    engine_spread: float = 0.0
    """Standard deviation of the logarithm of an engine's slowness."""
    engine_start_s: float = 30.0
    engine_places: int | None = None
    """Engines that the cluster has room for; None: any number."""
    update_s: float = 1.0
    """A weight update of an engine,"""
    pause_s: float = 0.2
    """at whose end it stands still for this long."""
    kv_cache_tokens: int | None = None
    """Tokens that an engine's KV cache holds; None: enough."""

    score_s: float = 0.1
    """Of a group."""
    start_s: float = 2.0
    """Of any actor but an engine."""
    step_s: float = 1.0
    """An optimizer step takes this long,"""
    token_s: float = 1e-5
    """and this much longer for each response token."""
    publish_s: float = 0.5
    checkpoint_s: float = 0.0
    """For the learner to write its part."""
    ess_decay: float = 0.05
    """The ESS fraction of a step is exp(-this * mean lag of its groups)."""
    reward_mean: float = 0.5
    """Share of responses that are right,"""
    reward_slope: float = 0.0
    """and how much more for each factor of e in length over the median."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """How often an event strikes one actor (an engine, a node), per hour."""
    failures: tuple[Failure, ...] = ()
    engines_per_node: int = 8
    store_full_s: float = 20.0
    """How long the object store is full."""
    detect_s: float = 1.0
    """Until a death is reported; calls on the dead actor fail at once."""
    scaling: tuple[tuple[float, int], ...] = ()
    """Requests to run another number of engines: (time_s, replicas)."""

    def __post_init__(self) -> None:
        for event in (*self.rates, *(failure.event for failure in self.failures)):
            if event not in EVENTS:
                raise ConfigError(f"unknown event {event!r}; there are {', '.join(EVENTS)}")
        # A virtual clock that is sent back, or to no time at all, never comes to the end of the run.
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, float)}
        rates = {f"rates.{event}": rate for event, rate in self.rates.items()}
        for name, value in (numbers | rates).items():
            is_time = name.endswith("_s") or name in rates
            if not math.isfinite(value) or (is_time and value < 0):
                least = " of at least 0" if is_time else ""
                raise ConfigError(f"scenario.{name}={value:g}: give a finite number{least}")

    def is_straggler(self, prompt_id: str) -> bool:
        """Whether the answers to this prompt are long."""
        return (
            self.straggler_share > 0
            and seeded(self.seed, "prompt", prompt_id).random() < self.straggler_share
        )

    def draw_lengths(self, group_id: int, prompt_id: str, number: int, limit: int) -> tuple[int, ...]:
        """Tokens of a group's responses: the same whenever and wherever the group is sampled."""
        chance = random.Random(self.seed * 1_000_003 + group_id)
        factor = self.straggler_factor if self.is_straggler(prompt_id) else 1.0
        if self.lengths:
            drawn = [factor * length for length in chance.choices(self.lengths, k=number)]
        elif self.length_sigma:
            median, sigma = factor * self.length_median, self.length_sigma
            drawn = [median * math.exp(chance.gauss(0.0, sigma)) for _ in range(number)]
        else:
            drawn = [factor * self.length_median] * number
        return tuple([min(limit, max(1, round(length))) for length in drawn])

    def draw_rewards(self, group_id: int, lengths: Sequence[int]) -> tuple[float, ...]:
        """0 or 1 for each response, as repeatable as the lengths."""
        chance = random.Random(self.seed * 1_000_003 + group_id + (1 << 62))
        mean, slope = self.reward_mean, self.reward_slope
        if not slope:
            return tuple([float(chance.random() < mean) for _ in lengths])
        return tuple(
            [float(chance.random() < mean + slope * math.log(n / self.length_median)) for n in lengths]
        )


def seeded(*key: object) -> random.Random:
    return random.Random("/".join(map(str, key)))
