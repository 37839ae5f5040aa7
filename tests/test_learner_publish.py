from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headway.core.weights import digest
from headway.learner.model import PolicyModel
from headway.learner.publish import export, layout_of


def small_model(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_hold_the_checkpoint_under_its_names(tmp_path: Path, tied: bool, dtype) -> None:
    model = PolicyModel(small_model(tmp_path, tied=tied), dtype=dtype)
    layout = layout_of(model, dtype, max_bucket_bytes=20_000)
    manifest, buckets = export(model, layout, 7)
    checkpoint = load_file(tmp_path / "model.safetensors")
    assert manifest.version == 7
    assert {entry.name for entry in manifest.entries} == checkpoint.keys()
    assert ("lm_head.weight" in checkpoint) is not tied
    assert [len(bucket) for bucket in buckets] == list(manifest.bucket_bytes) and len(buckets) > 1
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    for entry in manifest.entries:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        assert digest(data.tobytes()) == entry.digest
        tensor = torch.from_numpy(data).view(torch_dtype).view(entry.shape)
        assert torch.equal(tensor, checkpoint[entry.name].to(torch_dtype))


def test_every_export_has_buckets_of_its_own_and_the_same_bytes(tmp_path: Path) -> None:
    model = PolicyModel(small_model(tmp_path, tied=True), dtype="bfloat16")
    layout = layout_of(model, "bfloat16", max_bucket_bytes=20_000)
    first_manifest, first = export(model, layout, 1)
    kept = [bucket.copy() for bucket in first]
    second_manifest, second = export(model, layout, 1)
    assert first_manifest == second_manifest
    with torch.no_grad():
        model.masters["model.norm.weight"].add_(1)
    model.refresh()
    third_manifest, third = export(model, layout, 2)
    for a, b, c, d in zip(first, second, third, kept, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, d)
        assert not np.shares_memory(a, b) and not np.shares_memory(a, c)
    changed = {
        name for name, value in third_manifest.digests.items() if first_manifest.digests[name] != value
    }
    assert changed == {"model.norm.weight"}
    again_manifest, again = export(model, layout, 2, into=first)
    assert again_manifest == third_manifest
    assert all(np.array_equal(a, b) and a is c for a, b, c in zip(again, third, first, strict=True))
