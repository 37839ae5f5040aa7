"""Shared builders. Everything here is real: models, tables, tokenizers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models here are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Roles set the number of torch's threads for their process, which here is that of all later tests too."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_adder() -> Path:
    """The small character model that adds numbers, right about every other time."""
    from headway.learner.pretrained import model_folder

    return model_folder("tiny-adder")


@pytest.fixture(scope="session")
def tiny_random() -> Path:
    """The same architecture and tokenizer with random weights."""
    from headway.learner.pretrained import model_folder

    return model_folder("tiny-random")


@pytest.fixture(scope="session")
def under_way() -> Callable[[Any], Awaitable[None]]:
    """Returns once a request of a generation actor has some tokens, and is far from its end."""

    async def wait(engine: Any) -> None:
        requests = engine._engine.output_processor.request_states
        async with asyncio.timeout(60):
            while not any(
                state.detokenizer and state.detokenizer.num_output_tokens() > 10
                for state in requests.values()
            ):
                await asyncio.sleep(0.002)

    return wait
