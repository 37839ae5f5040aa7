"""A real vLLM engine that is sent low-rank adapters: what it then serves, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from headway.actors.generation import GenerationActor, GroupRequest, _lay_out
from headway.core import weights
from headway.core.config import parse_config
from headway.core.errors import RolloutFailed, WeightUpdateFailed
from headway.core.prompts import Prompt
from headway.core.weights import Manifest

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = {
    "run": {"name": "test-generation-adapter", "seed": 3},
    "model": {"dtype": "float32", "chat_template": False},
    "generation": {"threads": 1, "max_model_len": 256},
}
PROMPT = Prompt(prompt_id="p", content="12 + 34 =", gold="46", verifier="numeric")
RANK, SCALE = 4, 2.0

Tensors = dict[str, np.ndarray]
Published = tuple[Manifest, list[np.ndarray]]


def request(group_id: int, *, max_new_tokens: int = 60, deadline_s: float = 60.0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        prompt=PROMPT,
        group_size=4,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        deadline_s=deadline_s,
    )


def published(version: int, tensors: Mapping[str, np.ndarray], scale: float | None = SCALE) -> Published:
    """What a learner would send: float32 tensors in buckets, with their digests."""
    entries, sizes = weights.layout(
        [(name, "float32", tensor.shape) for name, tensor in tensors.items()], max_bucket_bytes=1 << 16
    )
    buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    signed = []
    for entry in entries:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        data[:] = np.ascontiguousarray(tensors[entry.name], dtype=np.float32).reshape(-1).view(np.uint8)
        signed.append(replace(entry, digest=weights.digest(data.data)))
    return Manifest(version=version, entries=tuple(signed), bucket_bytes=sizes, adapter_scale=scale), buckets


class Learner:
    """The weights on the other side: those of the folder, and an adapter of every linear layer."""

    def __init__(self, folder: Path) -> None:
        self.base = load_file(folder / "model.safetensors")
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.version = -1

    def adapter(self, seed: int, size: float = 0.3) -> Tensors:
        """lora_A as LoRA begins with, lora_B of the given size: with 0.3 the model's weights change by about 40 %."""
        random = np.random.default_rng(seed)
        tensors: Tensors = {}
        for name, weight in self.base.items():
            if name.endswith("_proj.weight"):
                stem = name.removesuffix(".weight")
                outputs, inputs = weight.shape
                tensors[f"{stem}.lora_A"] = random.normal(0, inputs**-0.5, (RANK, inputs)).astype(np.float32)
                tensors[f"{stem}.lora_B"] = size * random.normal(0, 0.1, (outputs, RANK)).astype(np.float32)
        return tensors

    def publish(self, tensors: Tensors) -> Published:
        self.version += 1
        return published(self.version, tensors)

    @torch.no_grad()
    def largest_difference(self, table: pa.Table, adapter: Tensors) -> float:
        """Between the table's behavior log-probabilities and transformers' with the adapter merged by hand."""
        for name, parameter in self.plain.named_parameters():
            weight, stem = self.base[name], name.removesuffix(".weight")
            if f"{stem}.lora_A" in adapter:
                weight = weight + SCALE * adapter[f"{stem}.lora_B"] @ adapter[f"{stem}.lora_A"]
            parameter.copy_(torch.from_numpy(weight))
        worst = 0.0
        for row in table.to_pylist():
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            logprobs = self.plain(torch.tensor([ids])).logits[0, start - 1 : -1].float().log_softmax(-1)
            sampled = logprobs.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
            worst = max(worst, (sampled - torch.tensor(row["behavior_logprobs"])).abs().max().item())
        return worst


@pytest.fixture(scope="module")
def learner(tiny_random: Path) -> Learner:
    return Learner(tiny_random)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_random: Path, learner: Learner) -> AsyncIterator[GenerationActor]:
    actor = GenerationActor(parse_config(CONFIG), str(tiny_random), 0)
    await actor.start()
    yield actor
    await actor.shutdown()


async def probe(engine: GenerationActor, update: Published) -> tuple[str, float]:
    """The read-back alone, for an adapter that was not necessarily loaded."""
    manifest, buckets = update
    entries = _lay_out(engine._shared, manifest, tuple(buckets))
    args = (str(engine._shared), entries, manifest.adapter_scale)
    (result,) = await engine._engine.collective_rpc("probe_adapter", args=args)
    return tuple(result)


async def test_the_engine_starts_with_an_adapter_that_does_nothing_yet(
    engine: GenerationActor, learner: Learner
) -> None:
    manifest, buckets = learner.publish(learner.adapter(seed=0, size=0.0))
    assert manifest.num_bytes < 0.15 * sum(weight.nbytes for weight in learner.base.values())
    await engine.update_weights(manifest, *buckets)
    table = await engine.generate(request(0))
    assert await engine.version() == 0
    assert learner.largest_difference(table, {}) <= 1e-4


async def test_after_each_update_the_engine_serves_the_merged_weights_and_the_new_version(
    engine: GenerationActor, learner: Learner
) -> None:
    for seed in (1, 2):  # the second replaces the first; added to it, it would be far off
        adapter = learner.adapter(seed)
        manifest, buckets = learner.publish(adapter)
        seconds = await engine.update_weights(manifest, *buckets)
        table = await engine.generate(request(100 + seed))
        assert learner.largest_difference(table, adapter) <= 1e-4
        assert learner.largest_difference(table, {}) > 0.1
        assert await engine.version() == learner.version == manifest.version
        versions = {span["version"] for spans in table["version_spans"].to_pylist() for span in spans}
        assert versions == {learner.version}
        assert set(seconds) == {"fetch", "pause", "load", "total"}


async def test_a_request_in_flight_goes_on_under_the_new_adapter(
    engine: GenerationActor, learner: Learner, under_way: Callable[[GenerationActor], Awaitable[None]]
) -> None:
    before = learner.version
    running = asyncio.gather(*(engine.generate(request(200 + i, max_new_tokens=200)) for i in range(8)))
    await under_way(engine)
    manifest, buckets = learner.publish(learner.adapter(seed=3))
    await engine.update_weights(manifest, *buckets)
    spans = [spans for table in await running for spans in table["version_spans"].to_pylist()]
    both = [s for s in spans if [span["version"] for span in s] == [before, before + 1]]
    assert both, spans
    assert all(s[0]["end"] == s[1]["start"] for s in both)


async def test_a_prefix_cached_under_the_old_adapter_is_not_used_under_the_new_one(
    engine: GenerationActor, learner: Learner
) -> None:
    await engine.generate(request(300))  # fills the cache with this prompt
    adapter = learner.adapter(seed=4)
    manifest, buckets = learner.publish(adapter)
    await engine.update_weights(manifest, *buckets)
    assert learner.largest_difference(await engine.generate(request(301)), adapter) <= 1e-4


async def test_the_read_back_tells_the_loaded_adapter_from_every_other(
    engine: GenerationActor, learner: Learner
) -> None:
    loaded = learner.adapter(seed=5)
    manifest, buckets = learner.publish(loaded)
    await engine.update_weights(manifest, *buckets)
    name, difference = await probe(engine, (manifest, buckets))
    assert name.endswith(("o_proj.weight", "down_proj.weight"))
    assert difference == 0.0
    step = {key: value + 1e-4 * np.sign(value) * key.endswith("lora_B") for key, value in loaded.items()}
    for other in (step, learner.adapter(seed=6), learner.adapter(seed=5, size=0.0)):
        with pytest.raises(Exception, match="the engine does not serve the adapter"):
            await probe(engine, published(manifest.version, other))
    with pytest.raises(Exception, match="the engine does not serve the adapter"):
        await probe(engine, published(manifest.version, loaded, scale=SCALE * 1.001))


async def test_an_adapter_corrupted_on_the_way_is_refused_and_the_old_version_goes_on(
    engine: GenerationActor, learner: Learner
) -> None:
    version = learner.version
    good = await engine.generate(request(400))
    manifest, buckets = published(version + 1, learner.adapter(seed=7))
    last = manifest.entries[-1]
    buckets[last.bucket][last.offset + 5] ^= 1
    with pytest.raises(WeightUpdateFailed, match=f"arrived digests differ for \\['{last.name}'\\]"):
        await engine.update_weights(manifest, *buckets)
    assert await engine.version() == version
    assert (await engine.generate(request(400)))["response_ids"] == good["response_ids"]


async def test_an_adapter_that_fits_no_weight_is_refused_by_name_and_nothing_is_served_until_one_does(
    engine: GenerationActor, learner: Learner
) -> None:
    version, good = learner.version, learner.adapter(seed=8)
    a, b = "model.layers.0.mlp.down_proj.lora_A", "model.layers.0.mlp.down_proj.lora_B"
    unknown = "model.layers.9.mlp.down_proj.lora_A"
    wrong: list[tuple[Tensors, str]] = [
        ({**good, unknown: good[a]}, f"{unknown}: the model folder .* has no model.layers.9.mlp.down_proj.weight"),
        ({"lm_head.lora_A": good[a], "lm_head.lora_B": good[b]}, "lm_head.lora_A: .* has no lm_head.weight"),
        ({name: tensor for name, tensor in good.items() if name != b}, f"{a} came without {b}"),
        ({name: tensor for name, tensor in good.items() if name != a}, f"{b} came without {a}"),
        ({**good, a: good[a][:, :-1]}, r"do not fit model.layers.0.mlp.down_proj.weight \(128, 384\)"),
        ({**good, b: good[b][:, :-1]}, r"do not fit model.layers.0.mlp.down_proj.weight \(128, 384\)"),
        ({"model.norm.weight": learner.base["model.norm.weight"]}, "model.norm.weight is no tensor of an adapter"),
    ]  # fmt: skip
    for tensors, message in wrong:
        with pytest.raises(WeightUpdateFailed, match=message):
            await engine.update_weights(*_flat(published(version + 1, tensors)))
        assert await engine.version() == version
    with pytest.raises(RolloutFailed, match="straggler"):
        await engine.generate(request(500, deadline_s=0.5))
    await engine.update_weights(*_flat(learner.publish(good)))
    assert learner.largest_difference(await engine.generate(request(501)), good) <= 1e-4


async def test_an_update_that_broke_off_inside_a_layer_leaves_nothing_of_itself_in_the_next(
    engine: GenerationActor, learner: Learner
) -> None:
    query = "model.layers.0.self_attn.q_proj.weight"
    half = {query: 2 * learner.base[query], "model.layers.0.self_attn.unknown": learner.base[query]}
    with pytest.raises(WeightUpdateFailed, match="unknown"):
        await engine.update_weights(*_flat(published(learner.version + 1, half, scale=None)))
    adapter = learner.adapter(seed=9)
    await engine.update_weights(*_flat(learner.publish(adapter)))
    assert learner.largest_difference(await engine.generate(request(600)), adapter) <= 1e-4


async def test_whole_weights_and_adapters_may_follow_each_other(
    engine: GenerationActor, learner: Learner
) -> None:
    learner.version += 1
    await engine.update_weights(*_flat(published(learner.version, learner.base, scale=None)))
    assert learner.largest_difference(await engine.generate(request(700)), {}) <= 1e-4
    adapter = learner.adapter(seed=10)
    await engine.update_weights(*_flat(learner.publish(adapter)))
    assert learner.largest_difference(await engine.generate(request(701)), adapter) <= 1e-4


async def test_a_model_folder_in_several_files_is_merged_like_one_in_one_file(
    tiny_random: Path, learner: Learner, tmp_path: Path
) -> None:
    from headway.actors.generation_transport import _Adapter

    AutoModelForCausalLM.from_pretrained(tiny_random, dtype=torch.float32).save_pretrained(
        tmp_path, max_shard_size="1MB"
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tensors = {name: torch.from_numpy(tensor) for name, tensor in learner.adapter(seed=11).items()}
    one, several = (
        dict(_Adapter(str(folder), tensors, SCALE).merged_model(torch.bfloat16, torch.device("cpu")))
        for folder in (tiny_random, tmp_path)
    )
    assert one.keys() == several.keys() == learner.base.keys()
    for name, base in learner.base.items():
        expected, stem = torch.from_numpy(base), name.removesuffix(".weight")
        if f"{stem}.lora_A" in tensors:
            product = tensors[f"{stem}.lora_B"].double() @ tensors[f"{stem}.lora_A"].double()
            expected = expected.double() + SCALE * product
        assert torch.equal(one[name], several[name])
        # One rounding: never further off than half a step of bfloat16, at most 2^-8 of the value.
        assert ((one[name].double() - expected).abs() <= expected.abs() * 2**-8 + 1e-8).all()


def _flat(update: Published) -> tuple:
    manifest, buckets = update
    return (manifest, *buckets)
