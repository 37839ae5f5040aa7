from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.actors.reference import ReferenceActor
from headway.core import weights
from headway.core.config import Config, parse_config
from headway.core.errors import DataError, SchemaError, WeightUpdateFailed
from headway.core.rollouts import build
from headway.core.weights import Manifest, TensorEntry
from headway.learner.batching import pack, unpack
from headway.learner.model import PolicyModel
from headway.learner.publish import export, layout_of

TEMPERATURE = 0.7


def config(
    *, dtype: str = "float32", microbatch_tokens: int = 8192, decay: float = 0.0, lora_rank: int = 0
) -> Config:
    return parse_config(
        {
            "model": {"dtype": dtype},
            "sampling": {"temperature": TEMPERATURE},
            "algorithm": {"kl": "loss", "reference_refresh_steps": 10, "reference_decay": decay},
            "learner": {"lora_rank": lora_rank},
            "reference": {"threads": 1, "microbatch_tokens": microbatch_tokens},
        }
    )


def row(index: int, prompt: list[int], response: list[int], loss_mask: list[int] | None = None) -> dict:
    return {
        "rollout_id": f"0/{index}",
        "group_id": 0,
        "prompt_id": "p",
        "sample_index": index,
        "agent_id": f"agent {prompt[0]}",
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": loss_mask or [1] * len(response),
        "behavior_logprobs": [-1.0] * len(response),
        "version_spans": [{"start": 0, "end": len(response), "version": 0}] if response else [],
        "finish_reason": "stop",
        "truncated": False,
        "text": "",
    }


def two_prompts() -> pa.Table:
    """Two agents' prompts, tool tokens in the middle and at both ends, and an answer without tokens."""
    return build(
        [
            row(0, [7, 9, 12], [5, 6, 2], [1, 1, 1]),
            row(1, [7, 9, 12], [8, 30, 31, 32, 5, 2], [1, 0, 0, 1, 1, 0]),
            row(2, [40, 41], [2], [1]),
            row(3, [40, 41], [17, 18, 2, 19], [0, 1, 1, 1]),
            row(4, [40, 41], []),
        ]
    )


def scored(actor: ReferenceActor, table: pa.Table) -> list[list[float]]:
    return actor.score(table).column("reference_logprobs").to_pylist()


@torch.no_grad()
def plain_logprobs(folder: Path, table: pa.Table) -> list[list[float]]:
    """One row after the other, by the model's own forward pass."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for r in table.to_pylist():
        ids = r["prompt_ids"] + r["response_ids"]
        logprobs = (network(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(dim=-1)
        places = enumerate(r["response_ids"], len(r["prompt_ids"]) - 1)
        own = [logprobs[place, token].item() for place, token in places]
        found.append([x if sampled else 0.0 for x, sampled in zip(own, r["loss_mask"], strict=True)])
    return found


def random_policy(folder: Path, seed: int, dtype: Any = "float32", lora_rank: int = 0) -> PolicyModel:
    """The folder's model after a random change of all that it trains."""
    policy = PolicyModel(folder, dtype=dtype, lora_rank=lora_rank)
    torch.manual_seed(seed)
    with torch.no_grad():
        for master in policy.masters.values():
            master += 0.05 * torch.randn_like(master)
    policy.refresh()
    return policy


def published(
    policy: PolicyModel, version: int, dtype: Any = "float32", bucket_bytes: int = 1 << 18
) -> tuple[Manifest, list[np.ndarray]]:
    manifest, buckets = export(policy, layout_of(policy, dtype, bucket_bytes), version)
    for bucket in buckets:
        bucket.flags.writeable = False  # as they come out of the object store
    return manifest, buckets


def masters(actor: ReferenceActor) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor._model.masters.items()}


def test_equal_to_the_models_own_on_rows_by_themselves(tiny_random: Path) -> None:
    table = two_prompts()
    got, want = scored(ReferenceActor(config(), str(tiny_random)), table), plain_logprobs(tiny_random, table)
    assert [len(r) for r in got] == [3, 6, 1, 4, 0]
    for left, right in zip(got, want, strict=True):
        assert left == pytest.approx(right, abs=1e-5)
    assert [got[1][i] for i in (1, 2, 5)] == [0.0] * 3 and got[3][0] == 0.0
    assert all(x < 0 for x in got[0] + got[2] + got[3][1:])


def test_microbatch_size_does_not_matter(tiny_random: Path) -> None:
    whole = scored(ReferenceActor(config(), str(tiny_random)), two_prompts())
    cut = scored(ReferenceActor(config(microbatch_tokens=16), str(tiny_random)), two_prompts())
    for left, right in zip(cut, whole, strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def test_bfloat16_rounds_the_weights(tiny_random: Path) -> None:
    got = scored(ReferenceActor(config(dtype="bfloat16"), str(tiny_random)), two_prompts())
    want = plain_logprobs(tiny_random, two_prompts())
    flat, exact = np.concatenate(got), np.concatenate(want)
    assert 1e-4 < np.abs(flat - exact).max() < 0.1


def test_only_its_own_column_changes(tiny_random: Path) -> None:
    table = two_prompts()
    out = ReferenceActor(config(), str(tiny_random)).score(table)
    assert out.schema == table.schema
    assert out.drop_columns(["reference_logprobs"]).equals(table.drop_columns(["reference_logprobs"]))


def test_a_table_of_two_groups_is_refused(tiny_random: Path) -> None:
    rows = [row(0, [7], [5]), {**row(1, [7], [6]), "group_id": 1}]
    with pytest.raises(SchemaError, match="must hold one group"):
        ReferenceActor(config(), str(tiny_random)).score(build(rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refresh_replaces_the_weights(tiny_random: Path, dtype: str) -> None:
    policy = random_policy(tiny_random, 1, dtype)
    manifest, buckets = published(policy, 5, dtype)
    assert len(buckets) > 1
    actor = ReferenceActor(config(dtype=dtype), str(tiny_random))
    assert actor.version() == 0
    before = scored(actor, two_prompts())
    actor.update_weights(manifest, *buckets)
    assert actor.version() == 5
    live = dict(policy.network.named_parameters())
    for name, master in masters(actor).items():
        assert torch.equal(master, live[name].float())
    for name, parameter in actor._model.network.named_parameters():
        assert torch.equal(parameter, live[name])
    assert abs(scored(actor, two_prompts())[0][0] - before[0][0]) > 1e-3


def test_the_moving_average_by_hand(tiny_random: Path) -> None:
    # 0.75 of 1 and 0.25 of 3 is 1.5; then 0.75 of 1.5 and 0.25 of -2 is 0.625.
    settings = config(decay=0.75)
    actor, policy = ReferenceActor(settings, str(tiny_random)), PolicyModel(tiny_random, dtype="float32")
    with torch.no_grad():
        for master in actor._model.masters.values():
            master.fill_(1.0)
    for version, value, average in ((10, 3.0, 1.5), (20, -2.0, 0.625)):
        with torch.no_grad():
            for master in policy.masters.values():
                master.fill_(value)
        manifest, buckets = published(policy, version)
        for _ in range(2):  # the same version again must not be averaged in twice
            actor.update_weights(manifest, *buckets)
        assert all((master == average).all() for master in masters(actor).values())


def test_the_average_is_kept_in_float32(tiny_random: Path) -> None:
    # A step of 1/1024 of the weight's size is lost in bfloat16, which has 8 bits; eight such steps are not.
    settings = config(dtype="bfloat16", decay=1 - 2**-10)
    actor, policy = ReferenceActor(settings, str(tiny_random)), PolicyModel(tiny_random, dtype="bfloat16")
    with torch.no_grad():
        for model, value in ((actor._model, 1.0), (policy, 2.0)):
            for master in model.masters.values():
                master.fill_(value)
            model.refresh()
    for version in range(1, 9):
        manifest, buckets = published(policy, version, "bfloat16")
        actor.update_weights(manifest, *buckets)
    want = 2 - (1 - 2**-10) ** 8
    for name, parameter in actor._model.network.named_parameters():
        assert actor._model.masters[name].flatten()[0].item() == pytest.approx(want, abs=1e-6)
        assert parameter.flatten()[0].item() == 1.0078125  # the bfloat16 nearest to 1.00779


def adapter(
    version: int, scale: float, tensors: dict[str, torch.Tensor]
) -> tuple[Manifest, list[np.ndarray]]:
    entries, sizes = weights.layout(
        [(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()], max_bucket_bytes=1 << 16
    )
    buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    filled: list[TensorEntry] = []
    for entry in entries:
        data = tensors[entry.name].contiguous().numpy().view(np.uint8).reshape(-1)
        buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes] = data
        filled.append(replace(entry, digest=weights.digest(data.data)))
    manifest = Manifest(version=version, entries=tuple(filled), bucket_bytes=sizes, adapter_scale=scale)
    return manifest, buckets


LAYER = "model.layers.1.mlp.down_proj"  # [128, 384]


def test_adapters_are_averaged_as_the_weights_they_stand_for(tiny_random: Path) -> None:
    actor = ReferenceActor(config(decay=0.5, lora_rank=2), str(tiny_random))
    base = masters(actor)
    torch.manual_seed(0)
    change = torch.zeros_like(base[f"{LAYER}.weight"])
    for version, scale in ((10, 2.0), (20, 0.5)):
        down, up = torch.randn(2, 384), torch.randn(128, 2)
        manifest, buckets = adapter(version, scale, {f"{LAYER}.lora_A": down, f"{LAYER}.lora_B": up})
        actor.update_weights(manifest, *buckets)
        change = 0.5 * change + 0.5 * scale * (up @ down)
    got = masters(actor)
    torch.testing.assert_close(got[f"{LAYER}.weight"] - base[f"{LAYER}.weight"], change, atol=1e-5, rtol=0)
    assert change.abs().max() > 0.5
    assert all(torch.equal(got[name], base[name]) for name in got if name != f"{LAYER}.weight")


def test_it_takes_the_adapter_that_the_learner_publishes(tiny_random: Path) -> None:
    policy = random_policy(tiny_random, 3, lora_rank=2)
    manifest, buckets = published(policy, 10)
    assert manifest.adapter_scale is not None
    actor = ReferenceActor(config(lora_rank=2), str(tiny_random))
    before = np.concatenate(scored(actor, two_prompts()))
    actor.update_weights(manifest, *buckets)
    group = unpack(two_prompts())
    (batch,) = pack([group], group.loss_mask, microbatch_tokens=4096)
    with torch.no_grad():
        want = policy.logprobs(batch, temperature=TEMPERATURE).logprobs
    got = np.concatenate(scored(actor, two_prompts()))[batch.token_index]
    # The learner keeps weight and adapter apart, here they are one matrix: another order of the same sums.
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float32), want, atol=1e-4, rtol=0)
    assert np.abs(got - before[batch.token_index]).max() > 1e-2


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{LAYER}.lora_A": torch.zeros(2, 384)},
        {f"{LAYER}.lora_B": torch.zeros(128, 2)},
        {f"{LAYER}.lora_A": torch.zeros(2, 384), f"{LAYER}.lora_B": torch.zeros(128, 3)},
        {"other.lora_A": torch.zeros(2, 384), "other.lora_B": torch.zeros(128, 2)},
    ],
    ids=["no B", "no A", "ranks differ", "unknown layer"],
)
def test_half_an_adapter_is_refused(tiny_random: Path, tensors: dict[str, torch.Tensor]) -> None:
    actor = ReferenceActor(config(decay=0.5, lora_rank=2), str(tiny_random))
    manifest, buckets = adapter(1, 1.0, tensors)
    with pytest.raises(WeightUpdateFailed, match="does not hold the reference's weights"):
        actor.update_weights(manifest, *buckets)


def test_what_arrives_wrong_touches_nothing(tiny_random: Path) -> None:
    actor = ReferenceActor(config(), str(tiny_random))
    before = masters(actor)
    manifest, buckets = published(random_policy(tiny_random, 1), 5)
    last = manifest.entries[-1]
    flipped = [bucket.copy() for bucket in buckets]
    flipped[last.bucket][last.offset] ^= 1
    with pytest.raises(WeightUpdateFailed, match=rf"digests differ for \['{last.name}'\] \(1 of"):
        actor.update_weights(manifest, *flipped)
    with pytest.raises(WeightUpdateFailed, match="buckets of"):
        actor.update_weights(manifest, *buckets[:-1])
    with pytest.raises(WeightUpdateFailed, match="does not hold the reference's weights"):
        actor.update_weights(replace(manifest, entries=manifest.entries[:-1]), *buckets)
    with pytest.raises(WeightUpdateFailed, match="nothing in it"):
        actor.update_weights(Manifest(version=5, entries=(), bucket_bytes=(), adapter_scale=1.0))
    assert actor.version() == 0
    assert all(torch.equal(left, before[name]) for name, left in masters(actor).items())
    actor.update_weights(manifest, *buckets)
    with pytest.raises(WeightUpdateFailed, match="version 4 after 5"):
        actor.update_weights(replace(manifest, version=4), *buckets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refreshed_reference_survives_a_resume(tiny_random: Path, tmp_path: Path, dtype: str) -> None:
    settings = config(dtype=dtype, decay=0.3)
    whole = ReferenceActor(settings, str(tiny_random))
    whole.save(str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # the model folder's weights need no copy
    assert ReferenceActor(settings, str(tiny_random)).load(str(tmp_path)) == 0
    manifest, buckets = published(random_policy(tiny_random, 1, dtype), 5, dtype)
    whole.update_weights(manifest, *buckets)
    whole.save(str(tmp_path))
    resumed = ReferenceActor(settings, str(tiny_random))
    assert resumed.load(str(tmp_path)) == resumed.version() == 5
    assert scored(resumed, two_prompts()) == scored(whole, two_prompts())
    for actor in (whole, resumed):
        later, buckets = published(random_policy(tiny_random, 2, dtype), 9, dtype)
        actor.update_weights(later, *buckets)
    left, right = masters(whole), masters(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_another_models_part_of_a_checkpoint_is_refused(tiny_random: Path, tmp_path: Path) -> None:
    actor = ReferenceActor(config(), str(tiny_random))
    torch.save({"version": 3, "masters": {"model.norm.weight": torch.ones(3)}}, tmp_path / "reference.pt")
    with pytest.raises(DataError, match=r"another model .* \(model\.path\)"):
        actor.load(str(tmp_path))


def test_a_value_that_is_not_finite_is_not_hidden(tiny_random: Path) -> None:
    actor = ReferenceActor(config(), str(tiny_random))
    with torch.no_grad():
        actor._model.masters["model.norm.weight"][0] = float("nan")
    got = scored(actor, build([row(0, [7, 9], [5, 6, 2], [1, 0, 1]), row(1, [7, 9], [8])]))
    assert np.isnan(got[0]).tolist() == [True, False, True] and np.isnan(got[1]).all()
