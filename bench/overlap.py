"""Does generation overlap with training? The real driver on real Ray, with engines and a learner that sleep.

    python bench/overlap.py [STEPS]

Three balances of the two, equally long and log-normal answers, at lag 2 and lag 0. For each it prints the mean step time
in the steady state and what it is to be compared with:

* at lag 2, the larger of generation and training time per step (target: 1.05 times that at most). Training: the
  learner's sleep in `train` and `publish`. Generation: an engine has as many places as groups fit into it; a group holds
  its place for its longest answer; so it is the sum of that over a step's groups, over all places;
* at lag 0, their sum, where generation is the weight update, then the time in which those places, each taking the next
  group as soon as it is free, are through with the step's groups, and the scoring of the last;
* what `headway simulate` predicts for the same scenario (target: within 10 %).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import io
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from headway.actors.generation_rows import GroupRequest
from headway.cluster.joining import disconnect, join
from headway.cluster.ray_crew import ROLES, RayCrew
from headway.cluster.scenario import Scenario
from headway.cluster.simulate import simulate, virtual_run
from headway.cluster.virtual import VirtualCrew, _step_stats
from headway.cluster.virtual_actors import VirtualRows
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import HandedBack
from headway.core.prompts import Prompt
from headway.core.weights import Manifest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

SCENARIO = "scenario.pickle"
"""In the model folder: what there is to know of a model that sleeps."""
ENGINES = 2
PLACES = 4
"""Groups that all engines together sample at a time."""
GROUPS_PER_STEP = 8
GROUP_SIZE = 4
MAX_TOKENS = 2000
DECODE_S = 0.01
SCORE_S = 0.02
UPDATE_S = 0.02
PUBLISH_S = 0.02
DEADLINE_S = 300.0
FULL_TARGET, PREDICTION_TARGET = 1.05, 0.10


# ---- actors that sleep -------------------------------------------------------------------------------------


def scenario_of(model_folder: str) -> Scenario:
    return pickle.loads((Path(model_folder) / SCENARIO).read_bytes())


class SleepingEngine:
    """Samples as a virtual engine does that is not slowed by its other requests: a token every `decode_s`."""

    def __init__(self, config: Config, model_folder: str, replica: int) -> None:
        self.scenario = scenario_of(model_folder)
        self.version: int | None = None
        self.serving = asyncio.Event()
        self.leaving = asyncio.Event()
        self.kept: dict[int, tuple[list[int], list[dict[str, int]]]] = {}
        """Groups that were handed back: tokens sampled of each response, and the versions of the longest."""
        self.tokens = 0

    async def start(self) -> None:
        await asyncio.sleep(self.scenario.engine_start_s)

    async def update_weights(self, manifest: Manifest, *buckets: np.ndarray) -> dict[str, float]:
        await asyncio.sleep(self.scenario.update_s)
        self.version = manifest.version
        self.serving.set()
        return {}

    async def report(self) -> tuple[float, int, list[Any]]:
        tokens, self.tokens = self.tokens, 0
        return 0.0, 0, [("headway_generation_tokens_total", "", float(tokens))]

    async def generate(self, request: GroupRequest, kept: Any = None) -> pa.Table:
        await self.serving.wait()
        assert self.version is not None
        lengths = self.scenario.draw_lengths(
            request.group_id, request.prompt.prompt_id, request.group_size, request.max_new_tokens
        )
        had, spans = kept or ([0] * len(lengths), [])
        span = {"start": max(had), "end": 0, "version": self.version}
        results = await asyncio.gather(*(self._sample(n, h) for n, h in zip(lengths, had, strict=True)))
        span["end"] = max(results)
        if span["end"] > span["start"]:
            spans = [*spans, span]
        if self.leaving.is_set() and results != list(lengths):
            self.kept[request.group_id] = (results, spans)
            raise HandedBack(f"group {request.group_id}")
        if spans[-1]["version"] < self.version and spans[-1]["end"] - spans[-1]["start"] > 1:
            # Where it changed is of no matter to anyone here.
            last = spans.pop()
            middle = last["end"] - 1
            spans += [{**last, "end": middle}, {**last, "start": middle, "version": self.version}]
        rewards = self.scenario.draw_rewards(request.group_id, lengths)
        return rollouts.build(
            _row(request, index, length, rewards[index], spans) for index, length in enumerate(lengths)
        )

    async def _sample(self, length: int, had: int) -> int:
        """Tokens of a response after this engine has sampled what it could."""
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((length - had) * self.scenario.decode_s):
                await self.leaving.wait()
        passed = asyncio.get_running_loop().time() - began
        sampled = length - had
        if self.leaving.is_set():
            sampled = min(sampled, int(passed / self.scenario.decode_s))
        self.tokens += sampled
        return had + sampled

    async def hand_back(self) -> None:
        self.leaving.set()

    async def take_back(self, group_id: int) -> Any:
        return self.kept.pop(group_id, None)

    async def shutdown(self) -> None:
        pass


def _row(
    request: GroupRequest, index: int, length: int, reward: float, spans: list[dict[str, int]]
) -> dict[str, Any]:
    own = [{**span, "end": min(span["end"], length)} for span in spans if span["start"] < length]
    return {
        "rollout_id": f"{request.group_id}/{index}",
        "group_id": request.group_id,
        "prompt_id": request.prompt.prompt_id,
        "sample_index": index,
        "prompt_ids": [1],
        "response_ids": [2] * length,
        "loss_mask": [1] * length,
        "behavior_logprobs": [-1.0] * length,
        "version_spans": own,
        "finish_reason": "stop",
        "truncated": False,
        "text": "",
        "reward": reward,
    }


class SleepingVerifier:
    """The engine has drawn the rewards already."""

    def __init__(self, processes: int, timeout_s: float, memory_mib: int) -> None: ...

    def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        time.sleep(SCORE_S)
        return table

    def drain_updates(self) -> list[Any]:
        return []

    def close(self) -> None: ...


class SleepingLearner:
    """Its weights are its version."""

    def __init__(self, config: Config, model_folder: str, run_folder: str) -> None:
        self.config, self.scenario = config, scenario_of(model_folder)
        self.version = 0
        rows = VirtualRows(
            group_id=0,
            prompt_id="",
            lengths=(1,),
            rewards=(0.0,),
            oldest=0,
            newest=0,
            oldest_weights="",
            newest_weights="",
            num_bytes=0,
        )
        _step_stats(self.scenario, config, [rows], 1, 0.0)  # its first call imports a lot

    def address(self) -> str:
        return "nowhere"

    def start(self, rank: int, size: int, address: str, deadline_s: float) -> int:
        return 1

    def train(self, version: int, *tables: pa.Table) -> tuple[list[Any], pa.Table]:
        began = time.monotonic()
        assert version == self.version, (version, self.version)
        self.version += 1
        rows = [
            VirtualRows(
                group_id=table.column("group_id")[0].as_py(),
                prompt_id=table.column("prompt_id")[0].as_py(),
                lengths=tuple(rollouts.lengths(table, "response_ids")),
                rewards=tuple(table.column("reward").to_pylist()),
                oldest=rollouts.oldest_version(table),
                newest=rollouts.newest_version(table),
                oldest_weights="",
                newest_weights="",
                num_bytes=table.nbytes,
            )
            for table in tables
        ]
        seconds = self.scenario.step_s + self.scenario.token_s * sum(sum(row.lengths) for row in rows)
        stats = _step_stats(self.scenario, self.config, rows, self.version, seconds)
        advantages = pa.array(
            [[0.0] * length for row in rows for length in row.lengths], pa.list_(pa.float32())
        )
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return [stats], pa.table({"advantages": advantages})

    def publish(self, version: int) -> tuple[Any, ...]:
        time.sleep(self.scenario.publish_s)
        bucket = np.full(64, version % 256, np.uint8)
        return Manifest(version=version, entries=(), bucket_bytes=(len(bucket),)), bucket

    def save(self, folder: str) -> None:
        (Path(folder) / "version").write_text(str(self.version), encoding="utf-8")

    def load(self, folder: str) -> int:
        self.version = int((Path(folder) / "version").read_text(encoding="utf-8"))
        return self.version


SLEEPERS = {
    **ROLES,
    "generation": SleepingEngine,
    "learner": SleepingLearner,
    "verifiers": SleepingVerifier,
}


def real_run(config: Config, scenario: Scenario, folder: Path) -> Any:
    """The run of `headway train` on Ray, with actors that sleep as the scenario says."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / SCENARIO).write_bytes(pickle.dumps(scenario))
    run = virtual_run(config, VirtualCrew(config, scenario))
    run.crew = lambda: RayCrew(config, config.run_folder.resolve(), str(model), roles=SLEEPERS)
    return run


# ---- what is measured --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    balance: str
    generation_s: float
    """Wanted generation time per step, at lag 2."""
    training_s: float
    sigma: float
    """0: all answers are equally long."""
    lag: int
    steps: int

    @property
    def skipped(self) -> int:
        """Steps in which the pipeline fills."""
        return self.lag + 2

    @property
    def title(self) -> str:
        return f"{self.balance:<16} {'log-normal' if self.sigma else 'equal':<10} lag {self.lag}"

    def config(self, folder: Path) -> Config:
        name = f"{self.balance}-{'log-normal' if self.sigma else 'equal'}-lag{self.lag}"
        return parse_config(
            {
                "run": {"name": name, "folder": str(folder), "steps": self.steps, "checkpoint_every": 0},
                "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": MAX_TOKENS},
                "algorithm": {"dynamic_sampling": False},
                "lag": {"max_version_lag": self.lag},
                "learner": {"groups_per_step": GROUPS_PER_STEP, "cpus": 0.01},
                "generation": {
                    "replicas": ENGINES,
                    "cpus": 0.01,
                    "max_concurrent_requests": PLACES // ENGINES * GROUP_SIZE,
                },
                "verifiers": {"processes": GROUPS_PER_STEP, "cpus": 0.01},
                "queue": {"max_mib": 64},
                "metrics": {"port": 0, "host": "127.0.0.1"},
            }
        )

    def scenario(self) -> Scenario:
        """Whose median length gives the wanted generation time."""
        scenario = Scenario(
            length_sigma=self.sigma,
            prefill_s=0.0,
            decode_s=DECODE_S,
            decode_request_s=0.0,
            engine_start_s=0.5,
            update_s=UPDATE_S,
            pause_s=0.0,
            score_s=SCORE_S,
            start_s=0.1,
            step_s=self.training_s - PUBLISH_S,
            token_s=0.0,
            publish_s=PUBLISH_S,
        )
        for _ in range(5):
            held_s = statistics.fmean(
                max(scenario.draw_lengths(group_id, "", GROUP_SIZE, MAX_TOKENS)) * DECODE_S
                for group_id in range(GROUPS_PER_STEP * self.steps)
            )
            per_place = GROUPS_PER_STEP / PLACES
            ratio = self.generation_s / per_place / held_s
            scenario = replace(scenario, length_median=scenario.length_median * ratio)
        return scenario

    def bound_s(self, folder: Path) -> float:
        """Mean over the steady steps of what a step must take at least."""
        held_s = [
            [max(group) * DECODE_S for group in groups_of(record)]
            for record in steps_of(folder)[self.skipped :]
        ]
        if self.lag:
            return max(statistics.fmean(map(sum, held_s)) / PLACES, self.training_s)
        return UPDATE_S + statistics.fmean(map(through_s, held_s)) + SCORE_S + self.training_s


def through_s(held_s: list[float]) -> float:
    """When all places are through with these groups."""
    free_at = [0.0] * PLACES
    for seconds in held_s:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def groups_of(record: dict[str, Any]) -> Iterator[list[int]]:
    """Response lengths of a step's groups."""
    lengths = record["response_tokens"]
    for start in range(0, len(lengths), GROUP_SIZE):
        yield lengths[start : start + GROUP_SIZE]


def step_s(folder: Path, skipped: int) -> float:
    """Mean time of a step once `skipped` are over."""
    times = [record["time_s"] for record in steps_of(folder)]
    return (times[-1] - times[skipped - 1]) / (len(times) - skipped)


def measure(cases: list[Case], folder: Path) -> None:
    """Side by side: whoever sleeps is in nobody's way."""
    configs = [case.config(folder) for case in cases]
    with own_ray():
        asyncio.run(_execute(cases, configs, folder))
    for case, config in zip(cases, configs, strict=True):
        report(case, config, folder / "simulated")


async def _execute(cases: list[Case], configs: list[Config], folder: Path) -> None:
    runs = [
        real_run(config, case.scenario(), folder / case.title)
        for case, config in zip(cases, configs, strict=True)
    ]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(run.execute() for run in runs))


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """Its CPUs are tickets. What it says of so many actors on so few cores goes unheard."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        join("local", "bench", include_dashboard=False, num_cpus=64)
        try:
            yield
        finally:
            disconnect()


def report(case: Case, config: Config, folder: Path) -> None:
    measured = step_s(config.run_folder, case.skipped)
    simulate(config, case.scenario(), folder)
    predicted = step_s(folder / config.run.name, case.skipped)
    bound = case.bound_s(config.run_folder)
    what = "max" if case.lag else "sum"
    met = measured <= FULL_TARGET * bound if case.lag else True
    print(
        f"{case.title}  step {measured:.3f} s = {measured / bound:.3f} x {what} {bound:.3f} s{'' if met else ' !'}   simulator "
        f"{predicted:.3f} s = {predicted / bound:.3f} x; measured / predicted {measured / predicted:.3f}"
        f"{'' if abs(measured / predicted - 1) <= PREDICTION_TARGET else ' !'}",
        flush=True,
    )


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(
        f"targets: {FULL_TARGET} x max at lag 2; measured / predicted within {PREDICTION_TARGET:.0%}; ! where missed"
    )
    balances = {"generation-bound": (0.9, 0.45), "learner-bound": (0.45, 0.9), "balanced": (0.8, 0.8)}
    with tempfile.TemporaryDirectory(prefix="headway-overlap-") as folder:
        for balance, (generation_s, training_s) in balances.items():
            cases = [
                Case(
                    balance=balance,
                    generation_s=generation_s,
                    training_s=training_s,
                    sigma=sigma,
                    lag=lag,
                    steps=steps if lag else steps // 2,
                )
                for sigma in (0.0, 0.5)
                for lag in (2, 0)
            ]
            measure(cases, Path(folder))


if __name__ == "__main__":
    main()
