"""A scorer that takes the groups that wait in one pass, against one group after another, side by side on this machine:
`.venv/bin/python bench/scorers.py [--threads N]`. The reference policy; groups of short responses, as many callers as a
busy run has."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pyarrow as pa

from headway.actors.reference import ReferenceActor
from headway.core.config import parse_config
from headway.core.rollouts import build
from headway.learner.pretrained import model_folder

GROUPS, ANSWERS, PROMPT_TOKENS, RESPONSE_TOKENS, CALLERS = 64, 4, 40, 24, 32
ROUNDS = 3


def tables() -> list[pa.Table]:
    """Groups of random tokens."""
    rng = np.random.default_rng(0)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(4, 60, PROMPT_TOKENS).tolist()
        found.append(
            build(
                {
                    "rollout_id": f"{group}/{index}",
                    "group_id": group,
                    "prompt_id": str(group),
                    "sample_index": index,
                    "prompt_ids": prompt,
                    "response_ids": rng.integers(4, 60, RESPONSE_TOKENS).tolist(),
                    "loss_mask": [1] * RESPONSE_TOKENS,
                    "behavior_logprobs": [-1.0] * RESPONSE_TOKENS,
                    "version_spans": [{"start": 0, "end": RESPONSE_TOKENS, "version": 0}],
                    "finish_reason": "stop",
                    "truncated": False,
                    "text": "",
                }
                for index in range(ANSWERS)
            )
        )
    return found


def measure(model: str, dtype: Literal["float32", "bfloat16"], threads: int) -> None:
    """Best of some rounds, the two ways in turn."""
    config = parse_config(
        {"model": {"dtype": dtype}, "reference": {"threads": threads, "microbatch_tokens": 4096}}
    )
    actor = ReferenceActor(config, str(model_folder(model)))
    groups = tables()
    actor.score(groups[0])
    best = {1: np.inf, CALLERS: np.inf}
    for _ in range(ROUNDS):
        for callers in best:
            began = time.perf_counter()
            with ThreadPoolExecutor(callers) as calls:
                for _ in calls.map(actor.score, groups):
                    pass
            best[callers] = min(best[callers], time.perf_counter() - began)
    alone, together = best[1], best[CALLERS]
    print(
        f"{model} {dtype}: one at a time {GROUPS / alone:.0f} groups/s, waiting ones together "
        f"{GROUPS / together:.0f} groups/s, {alone / together:.2f} times as fast"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads: int = parser.parse_args().threads
    measure("tiny-adder", "float32", threads)
    measure("smollm2-135m-instruct", "bfloat16", threads)
