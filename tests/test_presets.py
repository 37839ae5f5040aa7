"""Every preset trains: real samples of a real engine, scored by every role that the preset needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from headway.actors.critic import CriticActor
from headway.actors.generation import GenerationActor, GroupRequest
from headway.actors.reference import ReferenceActor
from headway.actors.verifier import VerifierWorker
from headway.core.config import Config, parse_config
from headway.core.presets import PRESETS
from headway.core.prompts import Prompt, load_prompts
from headway.core.sections import Verifiers
from headway.learner.trainer import Trainer

GROUPS, RESPONSES = 6, 8
AGENTS = {"solver": "{prompt}", "checker": "{solver}\n{prompt}"}

pytestmark = pytest.mark.timeout(600)


def config(preset: str, **learner: Any) -> Config:
    agents = AGENTS if preset in ("magrpo", "dr_mas") else {}
    return parse_config(
        {
            "run": {"name": "test-presets", "seed": 5, "steps": 2},
            "model": {"path": "tiny-adder", "dtype": "float32", "chat_template": False},
            "data": {"agents": agents},
            "sampling": {"group_size": RESPONSES, "max_new_tokens": 40},
            "algorithm": {"preset": preset, "step_separator": " ", "branches": 2, "max_steps": 3},
            "lag": {"max_version_lag": 2},
            "learner": {"groups_per_step": GROUPS // 2, "learning_rate": 1e-4, "threads": 1, **learner},
            "reference": {"threads": 1},
            "critic": {"threads": 1},
            "generation": {"threads": 1, "max_model_len": 320},
        }
    )


@dataclass(frozen=True)
class Rollouts:
    """Scored groups of version 0, by what was asked of the engine."""

    plain: Sequence[pa.Table]
    greedy: Sequence[pa.Table]
    branches: Sequence[pa.Table]
    agents: Sequence[pa.Table]

    def of(self, preset: str) -> Sequence[pa.Table]:
        kinds = {"remax": self.greedy, "vineppo": self.branches, "magrpo": self.agents, "dr_mas": self.agents}
        return kinds.get(preset, self.plain)


@pytest.fixture(scope="module")
def rollouts(tiny_adder: Path) -> Rollouts:
    return asyncio.run(_rollouts(tiny_adder))


async def _rollouts(folder: Path) -> Rollouts:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    prompts = load_prompts(
        "reasoning_gym:chain_sum", verifier="math", num_prompts=GROUPS, seed=5, params=params
    )
    engine = GenerationActor(config("grpo"), str(folder), 0)
    verifier = VerifierWorker(Verifiers(processes=1, timeout_s=5.0, memory_mib=1024))

    async def group(number: int, prompt: Prompt, **extra: Any) -> pa.Table:
        request = GroupRequest(
            group_id=number,
            prompt=prompt,
            group_size=RESPONSES,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=40,
            deadline_s=60.0,
            **extra,
        )
        table = await engine.generate(request)
        return await asyncio.to_thread(verifier.score, table, prompt)

    async def groups(**extra: Any) -> list[pa.Table]:
        return await asyncio.gather(
            *(group(number, prompt, **extra) for number, prompt in enumerate(prompts))
        )

    try:
        await engine.start()
        await engine.serve_loaded(0)
        return Rollouts(
            plain=await groups(),
            greedy=await groups(greedy=True),
            branches=await groups(branches=2, step_separator=" ", max_steps=3),
            agents=await groups(environment=config("dr_mas").episodes),
        )
    finally:
        verifier.close()
        await engine.shutdown()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(preset: str, rollouts: Rollouts, tiny_adder: Path) -> None:
    settings = config(preset)
    tables = list(rollouts.of(preset))
    critic = None
    if settings.algorithm.needs_reference:
        reference = ReferenceActor(settings, str(tiny_adder))
        tables = [reference.score(table) for table in tables]
    if settings.algorithm.needs_critic:
        critic = CriticActor(settings, str(tiny_adder))
        tables = [critic.score(table) for table in tables]
    trainer = Trainer(settings, tiny_adder)
    before = {name: master.detach().clone() for name, master in trainer.model.masters.items()}
    for version in range(2):
        batch = tables[version * GROUPS // 2 : (version + 1) * GROUPS // 2]
        (stats,), columns = trainer.train(batch, version)
        assert math.isfinite(stats.loss) and math.isfinite(stats.grad_norm) and stats.grad_norm > 0
        assert stats.version == trainer.version == version + 1
        assert columns.num_rows == sum(table.num_rows for table in batch)
        assert set(stats.by_lag) <= {version}
        assert {"none", "tis_token", "mis_sequence", "veto"} <= set(stats.counterfactuals)
        assert (stats.kl_reference is not None) == settings.algorithm.needs_reference
        if stats.trust_region is not None:
            assert stats.trust_region.accepted
            assert 0 < stats.trust_region.kl <= settings.algorithm.trust_region_kl
        if critic is not None:
            (critic_stats,) = critic.train(version, *batch)
            assert critic_stats.value_loss > 0
    moved = max(
        float((master.detach() - before[name]).abs().max()) for name, master in trainer.model.masters.items()
    )
    assert moved > 1e-7


def test_extra_rollouts_become_values(rollouts: Rollouts) -> None:
    for table in rollouts.greedy:
        values = {value for row in table.column("values").to_pylist() for value in row}
        assert table.num_rows == RESPONSES and values <= {0.0, 0.01, 1.0} and len(values) == 1
    for table in rollouts.branches:
        for values, ends in zip(
            table.column("values").to_pylist(), table.column("step_ends").to_pylist(), strict=True
        ):
            assert len(values) == ends[-1]
            starts = [0, *ends[:-1]]
            assert all(len(set(values[start:end])) == 1 for start, end in zip(starts, ends, strict=True))


def test_a_single_response_with_a_greedy_baseline_has_signal(rollouts: Rollouts, tiny_adder: Path) -> None:
    """ReMax needs no group: half of the groups cut to one response still train."""
    settings = parse_config(
        {
            **config("remax").model_dump(mode="json"),
            "algorithm": {"preset": "remax", "kl": "none"},
            "sampling": {"group_size": 1},
            "learner": {"groups_per_step": GROUPS, "threads": 1},
        }
    )
    (stats,), _ = Trainer(settings, tiny_adder).train([table.slice(0, 1) for table in rollouts.greedy], 0)
    differ = sum(
        table.column("reward")[0].as_py() != table.column("values")[0].as_py()[0] for table in rollouts.greedy
    )
    assert stats.no_signal_groups == GROUPS - differ
    assert torch.isfinite(torch.tensor(stats.grad_norm))
