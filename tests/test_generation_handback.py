"""Two real engines that leave and join a run: what a group keeps, how it goes on elsewhere, what an engine reports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from headway.actors.generation import GenerationActor
from headway.actors.generation_rows import GroupRequest
from headway.actors.generation_traces import SHARED, remove_traces
from headway.actors.samples import KEPT_SCHEMA, Sample, kept_samples, kept_table
from headway.core import rollouts
from headway.core.config import parse_config
from headway.core.errors import HandedBack, RolloutFailed, WeightUpdateFailed
from headway.core.prompts import Prompt
from headway.core.sections import Environment
from headway.core.weights import Manifest
from headway.learner.model import PolicyModel
from headway.learner.publish import export, layout_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 128
BLOCK_BYTES = BLOCK_TOKENS * 4 * 2 * 4 * 32 * 4  # layers, keys and values, heads, head size, float32
CONFIG: dict[str, Any] = {
    "run": {"name": "test-handback", "seed": 3},
    "model": {"dtype": "float32", "chat_template": False},
    "generation": {"threads": 1, "max_model_len": 500, "kv_cache_gib": 0.1},
}
SMALL = {**CONFIG, "generation": {**CONFIG["generation"], "kv_cache_gib": 8 * BLOCK_BYTES / 2**30}}
"""Room for 7 blocks: two sequences of 400 tokens do not fit."""
PROMPT = Prompt(prompt_id="p", content="12 + 34 =", gold="46", verifier="numeric")
LONG = " + ".join(map(str, range(10, 60)))  # 247 characters, a token each

Published = tuple[Manifest, list[np.ndarray]]


def relay(agents: dict[str, str]) -> Environment:
    return Environment(name="relay", params={"templates": agents}, agents=tuple(agents), max_turns=1)


def request(
    group_id: int, *, max_new_tokens: int = 400, deadline_s: float = 60.0, **more: Any
) -> GroupRequest:
    common: dict[str, Any] = {"prompt": PROMPT, "group_size": 4, "temperature": 1.0, "top_p": 1.0, **more}
    return GroupRequest(group_id=group_id, max_new_tokens=max_new_tokens, deadline_s=deadline_s, **common)


class Learner:
    """The weights on the other side, all versions of them."""

    def __init__(self, folder: Path) -> None:
        self.model = PolicyModel(folder, dtype="float32")
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layout = layout_of(self.model, "float32", 1 << 20)
        self.versions: list[dict[str, torch.Tensor]] = []

    @property
    def version(self) -> int:
        return len(self.versions) - 1

    def publish(self) -> Published:
        """Every weight a little different from the version before; the end of a response unlikely, so that there is
        something to interrupt."""
        generator = torch.Generator().manual_seed(len(self.versions))
        with torch.no_grad():
            for parameter in self.model.masters.values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        self.model.refresh()
        self.versions.append({name: value.clone() for name, value in self.model.masters.items()})
        return export(self.model, self.layout, self.version)

    @torch.no_grad()
    def largest_difference(self, table: pa.Table) -> float:
        """Between the table's log-probabilities and a plain forward pass of the version that sampled each token."""
        worst = 0.0
        for row in table.to_pylist():
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            for span in row["version_spans"]:
                for name, parameter in self.plain.named_parameters():
                    parameter.copy_(self.versions[span["version"]][name])
                logprobs = self.plain(torch.tensor([ids])).logits[0, start - 1 : -1].float().log_softmax(-1)
                sampled = logprobs.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
                difference = (sampled - torch.tensor(row["behavior_logprobs"])).abs()
                worst = max(worst, difference[span["start"] : span["end"]].max().item())
        return worst


@pytest.fixture(scope="module")
def learner(tiny_random: Path) -> Learner:
    return Learner(tiny_random)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tiny_random: Path) -> AsyncIterator[tuple[GenerationActor, GenerationActor]]:
    """Two engines that were sent nothing yet."""
    engines = []
    for replica, config in enumerate((CONFIG, SMALL)):
        engines.append(GenerationActor(parse_config(config), str(tiny_random), replica))
        await engines[-1].start()
    yield engines[0], engines[1]
    for engine in engines:
        await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def engines(
    started: tuple[GenerationActor, GenerationActor], learner: Learner
) -> AsyncIterator[tuple[GenerationActor, GenerationActor]]:
    """Both serve the newest version, and after a test are as if they had never left: starting new ones takes long."""
    if not learner.versions:
        learner.publish()
    for engine in started:
        if await engine.version() != learner.version:
            await engine.update_weights(*_flat(export(learner.model, learner.layout, learner.version)))
    yield started
    for engine in started:
        engine._leaving = False


def _flat(published: Published) -> tuple[Any, ...]:
    manifest, buckets = published
    return (manifest, *buckets)


def requests_of(engine: GenerationActor) -> list[tuple[int, int]]:
    """Prompt and sampled tokens of every request that the engine has."""
    states = engine._engine.output_processor.request_states.values()
    return [(s.prompt_len, s.detokenizer.num_output_tokens()) for s in states if s.detokenizer is not None]


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def handed_back(
    engine: GenerationActor, asked: GroupRequest, kept: pa.Table | None = None, *, least: int = 20
) -> pa.Table:
    """What is kept of a group that its engine gave up once every sample that still ran had `least` new tokens."""
    running = asyncio.create_task(engine.generate(asked, kept))
    await until(lambda: min((tokens for _, tokens in requests_of(engine)), default=0) >= least)
    began = time.monotonic()
    await engine.hand_back()
    with pytest.raises(HandedBack):
        await running
    assert time.monotonic() - began < 20
    table = await engine.take_back(asked.group_id)
    assert table is not None and table.schema.equals(KEPT_SCHEMA)
    assert await engine.take_back(asked.group_id) is None
    return table


def continues(table: pa.Table, kept: pa.Table) -> None:
    """Every kept token stands where it stood, with its log-probability, in a row that goes on after it."""
    rows = {row["rollout_id"].partition("/")[2]: row for row in table.to_pylist()}
    for part in kept.to_pylist():
        label = part["label"]  # of a turn of an episode, or of a row
        row, num_kept = rows.get(label) or rows[label.rpartition("/")[0]], len(part["ids"])
        assert row["response_ids"][:num_kept] == part["ids"]
        assert row["behavior_logprobs"][:num_kept] == part["logprobs"]
        unfinished = part["finish_reason"] == "abort"
        assert (len(row["response_ids"]) > num_kept) == unfinished
        if not unfinished:
            assert (row["finish_reason"], row["truncated"]) == (part["finish_reason"], part["truncated"])


def rule_of_ends(table: pa.Table, eos: list[int], budget: int) -> None:
    """Every response ends like one made in one piece."""
    for row in table.to_pylist():
        ids = row["response_ids"]
        stopped = ids[-1] in eos
        assert not any(token in eos for token in ids[:-1]) and len(ids) <= budget
        assert (row["finish_reason"], row["truncated"]) == (("stop", False) if stopped else ("length", True))
        assert stopped or len(ids) == budget


async def test_an_engine_serves_nothing_before_its_first_weights(
    started: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    for engine in started:
        assert await engine.version() is None
        with pytest.raises(RolloutFailed, match="straggler"):
            await engine.generate(request(0, deadline_s=0.2))
    waiting = asyncio.create_task(started[1].generate(request(1)))
    await asyncio.sleep(0.05)
    await started[1].hand_back()
    with pytest.raises(HandedBack):
        await waiting
    assert await started[1].take_back(1) is None
    started[1]._leaving = False
    started[1]._serving.clear()
    learner.publish()
    for engine in started:
        await engine.update_weights(*_flat(export(learner.model, learner.layout, 0)))
        table = await engine.generate(request(2, max_new_tokens=5))
        assert {s["version"] for spans in table["version_spans"].to_pylist() for s in spans} == {0}
        assert learner.largest_difference(table) <= 1e-4


async def test_a_group_goes_on_at_another_engine_as_if_in_one_piece(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    first, second = engines
    asked = request(10, group_size=6)
    kept = await handed_back(first, asked, least=30)
    with pytest.raises(HandedBack):
        await first.generate(request(11))
    assert await first.take_back(11) is None
    table = await second.generate(asked, kept)
    continues(table, kept)
    rule_of_ends(table, first._eos_ids, 400)
    assert [row["rollout_id"] for row in table.to_pylist()] == [f"10/{i}" for i in range(6)]
    assert table["version_spans"].to_pylist() == [
        [{"start": 0, "end": len(ids), "version": learner.version}]
        for ids in table["response_ids"].to_pylist()
    ]
    assert learner.largest_difference(table) <= 1e-4
    again = await second.generate(asked, kept)
    assert again["response_ids"] == table["response_ids"]


async def test_both_parts_are_tagged_with_the_version_that_sampled_them(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    first, second = engines
    asked = request(20)
    kept = await handed_back(first, asked)
    before = learner.version
    await second.update_weights(*_flat(learner.publish()))
    table = await second.generate(asked, kept)
    continues(table, kept)
    rule_of_ends(table, first._eos_ids, 400)
    parts = {part["label"]: part for part in kept.to_pylist()}
    for row in table.to_pylist():
        part, total = parts[str(row["sample_index"])], len(row["response_ids"])
        num_kept = len(part["ids"])
        spans = [{"start": 0, "end": num_kept, "version": before}]
        if part["finish_reason"] == "abort":
            spans.append({"start": num_kept, "end": total, "version": before + 1})
        assert row["version_spans"] == spans
    assert learner.largest_difference(table) <= 1e-4


async def test_a_greedy_group_comes_out_token_for_token_as_without_interruption(
    engines: tuple[GenerationActor, GenerationActor],
) -> None:
    first, second = engines
    asked = request(30, temperature=0.0, greedy=True)
    whole = await second.generate(asked)
    kept = await handed_back(first, asked)
    assert set(kept["label"].to_pylist()) == {"0", "1", "2", "3", "greedy"}
    table = await second.generate(asked, kept)
    assert table["response_ids"] == whole["response_ids"]
    assert table["extra"] == whole["extra"] and table["loss_mask"] == whole["loss_mask"]


async def test_a_group_may_be_handed_back_again(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    first, second = engines
    asked = request(40)
    once = await handed_back(first, asked)
    await second.update_weights(*_flat(learner.publish()))
    twice = await handed_back(second, asked, once)
    for part, longer in zip(once.to_pylist(), twice.to_pylist(), strict=True):
        assert longer["ids"][: len(part["ids"])] == part["ids"]
        if part["finish_reason"] == "abort":
            assert len(longer["ids"]) >= len(part["ids"]) + 20
    # Wherever it is sent while both leave, nothing of it is lost.
    for engine in engines:
        await engine.hand_back()
        with pytest.raises(HandedBack):
            await engine.generate(asked, twice)
        assert (await engine.take_back(40)) == twice
        engine._leaving = False
    await first.update_weights(*_flat(learner.publish()))
    table = await first.generate(asked, twice)
    continues(table, twice)
    rule_of_ends(table, first._eos_ids, 400)
    newest = learner.version
    versions = [[s["version"] for s in spans] for spans in table["version_spans"].to_pylist()]
    assert [newest - 2, newest - 1, newest] in versions
    assert learner.largest_difference(table) <= 1e-4


async def test_agents_and_branches_go_on_too(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    first, second = engines
    agents = {"solver": "{prompt}", "checker": "Is it {solver} ?"}
    for asked in (
        request(50, max_new_tokens=150, environment=relay(agents)),
        request(51, max_new_tokens=150, branches=2, step_separator="1", max_steps=3),
    ):
        running = asyncio.create_task(first.generate(asked))
        # Into the second round: checkers, or branches that start inside a response.
        await until(lambda: any(length > 20 and tokens > 5 for length, tokens in requests_of(first)))
        await first.hand_back()
        with pytest.raises(HandedBack):
            await running
        kept = await first.take_back(asked.group_id)
        first._leaving = False
        assert kept is not None
        reasons = set(kept["finish_reason"].to_pylist())
        assert "abort" in reasons and len(reasons) > 1
        table = await second.generate(asked, kept)
        rollouts.validate(table)
        continues(table, kept)
        assert learner.largest_difference(table) <= 1e-4


async def test_a_group_issued_again_is_the_same_at_any_engine(
    engines: tuple[GenerationActor, GenerationActor],
) -> None:
    first, second = engines
    one, two, other = await asyncio.gather(
        first.generate(request(60)), first.generate(request(60)), second.generate(request(60))
    )
    for table in (two, other):
        assert table["rollout_id"] == one["rollout_id"] and table["response_ids"] == one["response_ids"]


async def test_pressure_is_reported_and_disturbs_no_response(
    engines: tuple[GenerationActor, GenerationActor],
) -> None:
    roomy, small = engines
    _, before, _ = await small.report()
    asked = [request(70 + n, max_new_tokens=300) for n in range(3)]
    running = asyncio.gather(*map(small.generate, asked))
    seen: list[tuple[float, int]] = []
    increments = 0.0
    while not running.done():
        usage, preemptions, updates = await small.report()
        seen.append((usage, preemptions))
        metrics = {name: (label, value) for name, label, value in updates}
        assert metrics["headway_engine_kv_cache_usage_ratio"] == ("1", usage)
        label, new = metrics["headway_engine_preemptions_total"]
        assert label == "1" and isinstance(new, float)
        increments += new
        await asyncio.sleep(0.005)
    _, after, updates = await small.report()
    increments += sum(
        v for name, _, v in updates if name == "headway_engine_preemptions_total" and isinstance(v, float)
    )
    assert max(usage for usage, _ in seen) > 0.7 and min(usage for usage, _ in seen) >= 0
    assert after > before and increments == after - before
    assert [number for _, number in seen] == sorted(number for _, number in seen)
    assert (await small.report())[0] == 0
    roomy_tables = [await roomy.generate(each) for each in asked]
    assert [t["response_ids"] for t in await running] == [t["response_ids"] for t in roomy_tables]
    assert (await roomy.report())[1] == 0


async def test_a_prefix_is_reused_within_a_version_and_never_across_one(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    from vllm import SamplingParams

    engine, _ = engines
    prompt, other = (replace(PROMPT, content=LONG + end) for end in (" =", " + 7 ="))
    ids = engine._encode(prompt)
    assert len(ids) > BLOCK_TOKENS

    async def cached() -> int | None:
        probe: Any = {"prompt_token_ids": [*ids, 5], "cache_salt": f"v{await engine.version()}"}
        number = None
        async for output in engine._engine.generate(probe, SamplingParams(max_tokens=1), "probe"):
            number = output.num_cached_tokens
        return number

    await engine.generate(request(80, prompt=prompt, max_new_tokens=5))
    assert await cached() == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    running = asyncio.create_task(engine.generate(request(81, prompt=prompt, max_new_tokens=200)))
    await until(lambda: any(tokens > 5 for _, tokens in requests_of(engine)))
    await engine.update_weights(*_flat(learner.publish()))
    await running  # its blocks hold the old version's keys and values under this prompt
    for number, each in enumerate((prompt, other)):  # they share a block
        table = await engine.generate(request(82 + number, prompt=each, max_new_tokens=20))
        assert learner.largest_difference(table) <= 1e-4
    assert await cached() == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_an_engine_answers_while_an_update_hangs(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    engine, other = engines
    version = learner.version
    kept_before = asyncio.create_task(engine.generate(request(90)))
    await until(lambda: min((tokens for _, tokens in requests_of(engine)), default=0) >= 20)
    record = json.loads(engine._traces._record.read_text())
    (core,) = [pid for pid, _ in record["processes"] if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    with suspended(core):
        update = asyncio.create_task(engine.update_weights(*_flat(learner.publish())))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert await engine.ping() and await engine.version() == version
        usage, _, _ = await engine.report()
        assert usage > 0
        await engine.hand_back()
        with pytest.raises(HandedBack):
            await kept_before
        assert time.monotonic() - began < 20 and not update.done()
    kept = await engine.take_back(90)
    assert kept is not None and min(map(len, kept["ids"].to_pylist())) >= 20
    await update
    assert await engine.version() == version + 1
    await other.update_weights(*_flat(export(learner.model, learner.layout, learner.version)))
    table = await other.generate(request(90), kept)
    continues(table, kept)
    assert learner.largest_difference(table) <= 1e-4


async def test_an_update_that_fails_half_way_leaves_the_engine_serving_nothing(
    engines: tuple[GenerationActor, GenerationActor], learner: Learner
) -> None:
    engine, other = engines
    version = learner.version
    running = asyncio.create_task(engine.generate(request(100)))
    await until(lambda: min((tokens for _, tokens in requests_of(engine)), default=0) >= 20)
    manifest, buckets = export(learner.model, learner.layout, version + 1)
    last = manifest.entries[-1]
    broken = replace(manifest, entries=(*manifest.entries[:-1], replace(last, name="model.layers.9.norm")))
    with pytest.raises(WeightUpdateFailed, match=r"layers\.9"):
        await engine.update_weights(broken, *buckets)
    assert await engine.version() == version
    with pytest.raises(RolloutFailed, match="straggler"):
        await engine.generate(request(101, deadline_s=0.3))
    assert not running.done()  # paused: the weights under it are unknown
    await engine.hand_back()
    with pytest.raises(HandedBack):
        await running
    kept = await engine.take_back(100)
    assert kept is not None
    table = await other.generate(request(100), kept)
    continues(table, kept)
    assert learner.largest_difference(table) <= 1e-4
    engine._leaving = False
    await engine.update_weights(*_flat(learner.publish()))
    assert learner.largest_difference(await engine.generate(request(102, max_new_tokens=20))) <= 1e-4


def sample(length: int, *spans: tuple[int, int, int], reason: str = "abort") -> Sample:
    return Sample(
        ids=list(range(length)),
        logprobs=[-0.5] * length,
        version_spans=[{"start": a, "end": b, "version": v} for a, b, v in spans],
        finish_reason=reason,
        truncated=reason == "length",
    )


async def test_spans_of_two_parts_are_shifted_and_those_of_one_version_merged() -> None:
    first, rest = sample(5, (0, 2, 3), (2, 5, 4)), sample(3, (0, 1, 4), (1, 3, 5), reason="length")
    whole = first.then(rest)
    assert whole.ids == [0, 1, 2, 3, 4, 0, 1, 2] and len(whole.logprobs) == 8
    assert [(s["start"], s["end"], s["version"]) for s in whole.version_spans] == [
        (0, 2, 3),
        (2, 6, 4),
        (6, 8, 5),
    ]
    assert (whole.finish_reason, whole.truncated, whole.finished) == ("length", True, True)
    assert first.version_spans[-1]["end"] == 5
    assert kept_samples(kept_table({"0/solver": first, "1": whole})) == {"0/solver": first, "1": whole}


HOST = """
import subprocess, sys, time
from headway.actors.generation_traces import Traces
traces = Traces(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "from multiprocessing.shared_memory import SharedMemory as S;"
    "s = S(create=True, size=100); print(s.name, flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
name = child.stdout.readline().decode().strip()
traces.note()
print(child.pid, name, traces.folder, traces.weights, flush=True)
time.sleep(60)
"""


async def test_what_a_killed_actor_left_is_removed_by_the_next_of_its_run_only() -> None:
    hosts, found = [], []
    places = [f"headway-test-{os.getpid()}-{run}-1" for run in ("one", "two")]
    for place in places:
        host = subprocess.Popen([sys.executable, "-c", HOST, place], stdout=subprocess.PIPE, text=True)
        assert host.stdout is not None
        child, name, folder, weights = host.stdout.readline().split()
        hosts.append(host)
        found.append((Path("/proc") / child / "exe", SHARED / name, Path(folder), Path(weights)))
    remove_traces(places[0])  # its author lives: nothing happens
    assert all(path.exists() for paths in found for path in paths)
    for host in hosts:
        host.kill()
        host.wait()
    remove_traces(f"headway-test-{os.getpid()}-one-")
    await until(lambda: not any(path.exists() for path in found[0]))
    assert all(path.exists() for path in found[1])
    assert not list(SHARED.glob(f"{places[0]}.*")) and len(list(SHARED.glob(f"{places[1]}.*"))) == 2
    remove_traces(places[1])
    assert not list(SHARED.glob(f"headway-test-{os.getpid()}*"))


ACTOR = f"""
import asyncio, sys, time
from headway.actors.generation import GenerationActor
from headway.core.config import parse_config
async def main():
    actor = GenerationActor(parse_config({CONFIG!r}), sys.argv[1], 2)
    await actor.start()
    print(actor._traces._record, flush=True)
    await asyncio.sleep(100)
if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_an_actor_that_is_killed_takes_its_engine_along(tiny_random: Path, tmp_path: Path) -> None:
    (tmp_path / "actor.py").write_text(ACTOR)
    host = subprocess.Popen(
        [sys.executable, str(tmp_path / "actor.py"), str(tiny_random)], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    record = json.loads(Path(host.stdout.readline().strip()).read_text())
    files = [Path(file) for file in record["files"]]
    assert sum(file.name.startswith("psm_") for file in files) == 2 and all(file.exists() for file in files)
    assert [path for path in Path(record["folder"]).iterdir() if path.is_socket()]
    host.kill()
    host.wait()
    left = record["processes"]
    await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid, _ in left), timeout_s=60)
    assert [file.name for file in files if file.exists()] == [files[0].name]  # the weights
    remove_traces(files[0].name.rpartition(".")[0])
    assert not files[0].exists() and not Path(record["folder"]).exists()
