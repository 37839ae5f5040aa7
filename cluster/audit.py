"""What was sampled against what was trained: selection must not change what the policy learns from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any


@dataclass(kw_only=True)
class Audit:
    """Of the whole run, each group once. A group counts as sampled when it ends, so that one whose rows were lost and
    made again is not seen twice, and one that still waits is not taken for one that was passed over.

    Lengths and rewards are kept to two significant digits: long responses and a reward model's rewards are nearly all
    different, and what is compared after every step must not grow with the run. A shift of less than that moves no
    distance here; the means are exact.
    """

    sampled_lengths: Counter[float] = field(default_factory=Counter)
    """Tokens of the responses of every group that finished and ended, dropped ones included."""
    trained_lengths: Counter[float] = field(default_factory=Counter)
    sampled_tokens: int = 0
    """Their exact sum."""
    trained_tokens: int = 0
    unfinished: int = 0
    """Responses of groups that were dropped before they finished: sampled, and longer than any that finished."""
    sampled_rewards: Counter[float] = field(default_factory=Counter)
    """Of scored responses."""
    trained_rewards: Counter[float] = field(default_factory=Counter)
    dispatched_tasks: Counter[str] = field(default_factory=Counter)
    """Kinds of task of the groups that were issued."""
    trained_tasks: Counter[str] = field(default_factory=Counter)

    def dispatch(self, task: str) -> None:
        """A group was issued for the first time."""
        self.dispatched_tasks[task] += 1

    def train(self, task: str, lengths: Sequence[int], rewards: Sequence[float]) -> None:
        """A group was trained."""
        self._sample(lengths, rewards)
        self.trained_tasks[task] += 1
        self.trained_lengths.update(map(_two_digits, lengths))
        self.trained_tokens += sum(lengths)
        self.trained_rewards.update(_numbers(rewards))

    def drop(self, lengths: Sequence[int], rewards: Sequence[float]) -> None:
        """A finished group was dropped."""
        self._sample(lengths, rewards)

    def give_up(self, num_responses: int) -> None:
        """A group was dropped before it finished. How long it would have become is unknown, but not that it took longer:
        left out, the loss of the longest answers would not show."""
        self.unfinished += num_responses

    def _sample(self, lengths: Sequence[int], rewards: Sequence[float]) -> None:
        self.sampled_lengths.update(map(_two_digits, lengths))
        self.sampled_tokens += sum(lengths)
        self.sampled_rewards.update(_numbers(rewards))

    def length_ks(self) -> float:
        return _ks(self.sampled_lengths, self.trained_lengths, self.unfinished)

    def reward_ks(self) -> float:
        return _ks(self.sampled_rewards, self.trained_rewards)

    def task_distance(self) -> float:
        """Total variation distance, in [0, 1]: the share of one distribution that would have to move to make the other;
        0 while one of them is empty."""
        dispatched, trained = self.dispatched_tasks.total(), self.trained_tasks.total()
        if not dispatched or not trained:
            return 0.0
        apart = (
            abs(number / dispatched - self.trained_tasks[task] / trained)
            for task, number in self.dispatched_tasks.items()
        )
        return sum(apart) / 2

    def record(self) -> dict[str, Any]:
        """For `metrics.jsonl`: mean lengths of finished responses, and how far the distributions are apart."""
        return {
            "length_ks": self.length_ks(),
            "reward_ks": self.reward_ks(),
            "task_distance": self.task_distance(),
            "sampled_mean": _mean(self.sampled_tokens, self.sampled_lengths),
            "trained_mean": _mean(self.trained_tokens, self.trained_lengths),
            "unfinished": self.unfinished,
        }

    def state(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: sorted(value.items()) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def resume(cls, state: dict[str, Any]) -> Audit:
        audit = cls()
        for name, value in state.items():
            setattr(audit, name, Counter(dict(value)) if isinstance(value, list) else value)
        return audit


def _ks(sampled: Counter[float], trained: Counter[float], above: int = 0) -> float:
    """Kolmogorov-Smirnov distance of the two distributions: the largest difference of their cumulative shares, in
    [0, 1]; 0 while one of them is empty. `above`: further samples, larger than every value. What was trained was sampled.
    """
    num_sampled, num_trained = sampled.total() + above, trained.total()
    if not num_sampled or not num_trained:
        return 0.0
    values = sorted(sampled)
    up_to_sampled = accumulate(map(sampled.__getitem__, values))
    up_to_trained = accumulate(map(trained.get, values, repeat(0)))
    return max(
        abs(s / num_sampled - t / num_trained) for s, t in zip(up_to_sampled, up_to_trained, strict=True)
    )


def _mean(tokens: int, lengths: Counter[float]) -> float | None:
    number = lengths.total()
    return tokens / number if number else None


def _numbers(rewards: Sequence[float]) -> list[float]:
    """To two digits. A NaN has no place in an order; the learner reports it."""
    return [_two_digits(reward) for reward in rewards if not math.isnan(reward)]


@lru_cache(maxsize=4096)
def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
