"""Groups of many callers scored in few passes: nobody's result, error or turn gets lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headway.actors.critic import CriticActor
from headway.actors.reference import ReferenceActor
from headway.actors.together import Together, num_tokens
from headway.core.config import parse_config
from headway.core.errors import SchemaError
from headway.core.rollouts import build

pytestmark = pytest.mark.timeout(120)


class Doubling:
    """Doubles numbers, and writes down which pass did which. The first pass lasts until `go`."""

    def __init__(self, callers: int) -> None:
        self.passes: list[list[int]] = []
        self.go = threading.Event()
        self.callers = callers

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.passes.append(list(numbers))
        assert self.go.wait(30)
        if 13 in numbers:
            raise ValueError(f"13 among {len(numbers)}")
        return [2 * number for number in numbers]

    def run(self, numbers: Sequence[int], room: int) -> list[int | str]:
        """What each caller got, after the first was alone in its pass and all others had to wait for it."""
        together = Together(self, lambda number: number, room)
        with ThreadPoolExecutor(len(numbers)) as threads:
            first = threads.submit(together, numbers[0])
            while not self.passes:
                pass
            calls = [first]
            for waiting, number in enumerate(numbers[1:], start=1):
                calls.append(threads.submit(together, number))
                while len(together._waiting) < waiting:  # so that they come in order
                    pass
            self.go.set()
            return [
                call.result(30) if call.exception(30) is None else str(call.exception()) for call in calls
            ]


def test_what_waits_is_done_in_one_pass_until_it_is_full() -> None:
    work = Doubling(6)
    assert work.run([1, 4, 3, 2, 5, 1], room=9) == [2, 8, 6, 4, 10, 2]
    assert work.passes == [[1], [4, 3, 2], [5, 1]]


def test_what_is_larger_than_a_pass_is_done_alone() -> None:
    work = Doubling(4)
    assert work.run([1, 2, 50, 3], room=9) == [2, 4, 100, 6]
    assert work.passes == [[1], [2], [50], [3]]


def test_an_error_belongs_to_its_own_caller() -> None:
    work = Doubling(4)
    assert work.run([1, 2, 13, 3], room=99) == [2, 4, "13 among 1", 6]
    assert work.passes == [[1], [2, 13, 3], [2], [13], [3]]


def test_whoever_holds_the_turn_keeps_passes_out() -> None:
    work = Doubling(1)
    work.go.set()
    together = Together(work, lambda number: number, 9)
    with together.turn, ThreadPoolExecutor(1) as threads:
        call = threads.submit(together, 4)
        with pytest.raises(TimeoutError):
            call.result(0.2)
        assert work.passes == []
        together.turn.release()
        assert call.result(30) == 8
        together.turn.acquire()


def group(number: int) -> pa.Table:
    """Two responses of different lengths to a prompt of its own."""
    return build(
        {
            "rollout_id": f"{number}/{sample}",
            "prompt_id": str(number),
            "group_id": number,
            "sample_index": sample,
            "prompt_ids": [5 + number, 6, 7],
            "response_ids": response,
            "behavior_logprobs": [-1.0] * len(response),
            "loss_mask": [1] * len(response),
            "version_spans": [{"start": 0, "end": len(response), "version": 0}],
            "finish_reason": "stop",
            "truncated": False,
            "text": "",
        }
        for sample, response in enumerate([[8, 9 + number], [10, 11, 12, 2]])
    )


@pytest.mark.parametrize(("role", "column"), [("reference", "reference_logprobs"), ("critic", "values")])
def test_groups_scored_together_have_the_scores_that_they_have_alone(
    role: str, column: str, tiny_random: Path
) -> None:
    config = parse_config({"model": {"dtype": "float32"}, "algorithm": {"preset": "ppo"}})
    actor = {"reference": ReferenceActor, "critic": CriticActor}[role](config, str(tiny_random))
    if isinstance(actor, CriticActor):  # a head that is not zero
        actor._trainer.model.head.weight.data.normal_()
    tables = [group(number) for number in range(12)]
    assert num_tokens(tables[0]) == 3 + 2 + 4
    alone = [actor.score(table)[column].to_pylist() for table in tables]
    with ThreadPoolExecutor(12) as threads:
        together = [scored[column].to_pylist() for scored in threads.map(actor.score, tables)]
    assert [[len(row) for row in rows] for rows in together] == [[2, 4]] * 12
    for ours, theirs in zip(together, alone, strict=True):
        for row, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(row, other, atol=1e-4)
    assert len({tuple(row) for rows in together for row in rows}) == 24  # which are all different
    two = pa.concat_tables(tables[:2])
    with pytest.raises(SchemaError, match="must hold one group"):
        actor.score(two)
