"""Tasks of reasoning-gym, scored by the task's own scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import tagged_answer
from headway.verifiers.verdict import Verdict, correct, wrong

NEARLY_ONE = 1 - 1e-6


def reasoning_gym(gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 only for full marks of the task's scorer. The context says which entry of which dataset was asked:
    task, size, seed, params, index. Raises `DataError` when it does not."""
    try:
        key = (context["task"], context["size"], context["seed"], json.dumps(context["params"], sort_keys=True))
        dataset, entry = _entry(*key, context["index"])
    except (KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
        raise DataError(f"no reasoning-gym entry for {dict(context)}: {type(error).__name__}: {error}") from error
    answer = tagged_answer(response)
    if not answer:
        return wrong(None, "no_answer")
    score = float(dataset.score_answer(answer, entry))
    return correct(answer) if score >= NEARLY_ONE else wrong(answer)


@lru_cache(maxsize=64)
def _dataset(task: str, size: int, seed: int, params: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(task, size=size, seed=seed, **json.loads(params))


@lru_cache(maxsize=1024)
def _entry(task: str, size: int, seed: int, params: str, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(task, size, seed, params)
    return dataset, dataset[index]
