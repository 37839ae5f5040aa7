import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from headway.core.errors import DataError
from headway.core.weights import Manifest
from headway.learner.attention import packing_of
from headway.learner.batching import MicroBatch
from headway.learner.learner_state import load_learner, save_learner
from headway.learner.model import DTYPES, PolicyModel
from headway.learner.publish import export, layout_of

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LINEAR = [f"self_attn.{name}" for name in ATTENTION] + [f"mlp.{name}" for name in MLP]
NAMES = {f"model.layers.{layer}.{name}" for layer in range(4) for name in LINEAR}

TOKENS = [5, 40, 22, 9, 61, 7, 33, 12]
ROW = MicroBatch(
    input_ids=torch.tensor(TOKENS[:-1]),
    position_ids=torch.arange(7),
    packing=packing_of([1], [[6]]),
    predict_index=torch.arange(7),
    targets=torch.tensor(TOKENS[1:]),
    token_index=torch.arange(7),
)


def adapted(folder: Path, dtype: Any = "float32", rank: int = 4, alpha: float = 32.0) -> PolicyModel:
    return PolicyModel(folder, dtype=dtype, lora_rank=rank, lora_alpha=alpha)


@torch.no_grad()
def logprobs(model: PolicyModel) -> torch.Tensor:
    return model.logprobs(ROW, temperature=1.0).logprobs


@torch.no_grad()
def disturb(model: PolicyModel) -> None:
    """Gives B some content."""
    generator = torch.Generator().manual_seed(1)
    for name, master in model.masters.items():
        if name.endswith("lora_B"):
            master.copy_(0.02 * torch.randn(master.shape, generator=generator))
    model.refresh()


def train(model: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    (-model.logprobs(ROW, temperature=1.0).logprobs.mean()).backward()
    optimizer.step()
    model.refresh()


def adamw(model: PolicyModel) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.masters.values(), lr=1e-3, weight_decay=0.0, fused=True)


def base(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.parameters.items() if ".lora_" not in name}


def published(model: PolicyModel) -> Manifest:
    return export(model, layout_of(model, "bfloat16", 1 << 20), 3)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_version_0_is_the_model_folder(tiny_random: Path, dtype) -> None:
    plain, model = PolicyModel(tiny_random, dtype=dtype), adapted(tiny_random, dtype)
    assert torch.equal(logprobs(model), logprobs(plain))
    assert base(model).keys() == plain.parameters.keys()
    for name, weight in base(model).items():
        assert weight.dtype == DTYPES[dtype]
        assert torch.equal(weight, plain.parameters[name])


def test_every_linear_layer_but_the_head_has_an_adapter(tiny_random: Path) -> None:
    model = adapted(tiny_random, rank=3)
    plain = PolicyModel(tiny_random, dtype="float32").masters
    assert model.masters.keys() == {f"{name}.{part}" for name in NAMES for part in ("lora_A", "lora_B")}
    for name in NAMES:
        out_size, in_size = plain[f"{name}.weight"].shape
        a, b = model.masters[f"{name}.lora_A"], model.masters[f"{name}.lora_B"]
        assert (a.shape, b.shape) == ((3, in_size), (out_size, 3))
        assert a.dtype == b.dtype == torch.float32
        assert a.any() and not b.any()


def test_an_untied_head_stays_as_it_is(tiny_random: Path, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny_random, tie_word_embeddings=False)
    network.lm_head.weight = nn.Parameter(network.model.embed_tokens.weight.detach().clone())
    network.config.tie_word_embeddings = False
    network.save_pretrained(tmp_path)
    model = adapted(tmp_path)
    assert "lm_head.weight" in model.parameters
    assert {name.rsplit(".", 1)[0] for name in model.masters} == NAMES


def test_all_ranks_begin_with_the_same_adapter(tiny_random: Path) -> None:
    torch.manual_seed(1)
    first = adapted(tiny_random)
    torch.manual_seed(2)
    second = adapted(tiny_random)
    assert published(first) == published(second)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 32.0), (2, 3.0)])
def test_the_adapter_adds_its_scaled_product(
    tiny_random: Path, tmp_path: Path, rank: int, alpha: float
) -> None:
    model = adapted(tiny_random, rank=rank, alpha=alpha)
    disturb(model)
    weights = load_file(tiny_random / "model.safetensors")
    for name in NAMES:
        product = model.masters[f"{name}.lora_B"] @ model.masters[f"{name}.lora_A"]
        weights[f"{name}.weight"] += alpha / rank * product.detach()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_random / "config.json").read_text())
    merged = PolicyModel(tmp_path, dtype="float32")
    assert (logprobs(model) - logprobs(PolicyModel(tiny_random, dtype="float32"))).abs().max() > 0.05
    assert_close(logprobs(model), logprobs(merged), atol=1e-4, rtol=0)
    assert_close(dict(model.checkpoint()), dict(merged.checkpoint()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained_and_published(tiny_random: Path, dtype) -> None:
    model = adapted(tiny_random, dtype)
    optimizer = adamw(model)
    before, first = base(model), published(model)
    train(model, optimizer)
    second = published(model)
    train(model, optimizer)
    third = published(model)
    assert all(torch.equal(weight, before[name]) for name, weight in base(model).items())
    assert all(p.grad is None for name, p in model.parameters.items() if ".lora_" not in name)
    assert first.adapter_scale == second.adapter_scale == 8.0
    assert {entry.name for entry in first.entries} == model.masters.keys()
    assert {entry.dtype for entry in first.entries} == {"float32"}
    # While B is zero A has no gradient: the first step changes every B, the second everything.
    changed = {name for name in model.masters if first.digests[name] != second.digests[name]}
    assert changed == {f"{name}.lora_B" for name in NAMES}
    assert all(second.digests[name] != third.digests[name] for name in model.masters)


def test_without_an_adapter_nothing_is_scaled(tiny_random: Path) -> None:
    model = PolicyModel(tiny_random, dtype="float32")
    assert model.adapter_scale is None
    assert published(model).adapter_scale is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_adapter_and_the_merged_model(
    tiny_random: Path, tmp_path: Path, dtype
) -> None:
    model = adapted(tiny_random, dtype)
    disturb(model)
    optimizer = adamw(model)
    train(model, optimizer)
    save_learner(tmp_path, model, optimizer, 1, {"a": 1})
    assert {p.name for p in tmp_path.iterdir()} == {"model", "learner.pt", "adapter.safetensors"}
    assert load_file(tmp_path / "adapter.safetensors").keys() == model.masters.keys()
    # One file of weights in the folder: engines load every one that they find.
    assert [p.name for p in (tmp_path / "model").glob("*.safetensors")] == ["model.safetensors"]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    evaluated = PolicyModel(tmp_path / "model", dtype="float32")
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert_close(logprobs(evaluated), logprobs(model), atol=tolerance, rtol=0)
    other = adapted(tiny_random, dtype)
    other_optimizer = adamw(other)
    assert load_learner(tmp_path, other, other_optimizer) == (1, {"a": 1})
    assert torch.equal(logprobs(other), logprobs(model))
    train(model, optimizer)
    train(other, other_optimizer)
    assert all(torch.equal(other.masters[name], master) for name, master in model.masters.items())


def test_a_checkpoint_of_something_else_is_refused(tiny_random: Path, tmp_path: Path) -> None:
    whole = PolicyModel(tiny_random, dtype="float32")
    low_rank = adapted(tiny_random)
    for name, model in (("whole", whole), ("low_rank", low_rank)):
        (tmp_path / name).mkdir()
        save_learner(tmp_path / name, model, adamw(model), 0, {})
    for folder, model in (
        ("whole", low_rank),
        ("low_rank", whole),
        ("low_rank", adapted(tiny_random, rank=8)),
    ):
        with pytest.raises(DataError, match=r"learner\.lora_rank"):
            load_learner(tmp_path / folder, model, adamw(model))
    # The same adapter on other weights
    network = AutoModelForCausalLM.from_pretrained(tiny_random)
    with torch.no_grad():
        network.model.embed_tokens.weight[7, 7] += 0.5
    network.save_pretrained(tmp_path / "changed")
    changed = adapted(tmp_path / "changed")
    disturb(changed)
    before = published(changed)
    with pytest.raises(DataError, match=r"model\.embed_tokens\.weight differs \(model\.path\)"):
        load_learner(tmp_path / "low_rank", changed, adamw(changed))
    assert published(changed) == before


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    # GPT-2 has layers of its own kind, with weights [in, out].
    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    PolicyModel(tmp_path, dtype="float32")
    with pytest.raises(DataError, match=r"no linear layers .*learner\.lora_rank"):
        adapted(tmp_path)
