import math
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headway.core.errors import DataError
from headway.learner.attention import packing_of
from headway.learner.batching import MicroBatch
from headway.learner.model import PolicyModel


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


def one_row(tokens: list[int]) -> MicroBatch:
    """A prompt of one token and its answer."""
    num_tokens = len(tokens)
    return MicroBatch(
        input_ids=torch.tensor(tokens[:-1]),
        position_ids=torch.arange(num_tokens - 1),
        packing=packing_of([1], [[num_tokens - 2]]),
        predict_index=torch.arange(num_tokens - 1),
        targets=torch.tensor(tokens[1:]),
        token_index=torch.arange(num_tokens - 1),
    )


def small(**other) -> dict:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    return sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | other


@pytest.mark.parametrize(
    ("config", "network"),
    [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM), (MistralConfig, MistralForCausalLM)],
)
@pytest.mark.parametrize("tied", [True, False])
def test_other_architectures_give_their_own_logprobs(tmp_path: Path, config, network, tied: bool) -> None:
    folder = saved(tmp_path, network(config(**small(tie_word_embeddings=tied))))
    model = PolicyModel(folder, dtype="float32")
    tokens = [3, 9, 4, 4, 31, 7, 0, 12]
    got = model.logprobs(one_row(tokens), temperature=0.5).logprobs
    plain = network.from_pretrained(folder)(torch.tensor([tokens])).logits[0, :-1] / 0.5
    expected = plain.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_an_architecture_that_computes_otherwise_is_refused(tmp_path: Path) -> None:
    # Gemma 2 caps its attention scores and its logits.
    folder = saved(tmp_path, Gemma2ForCausalLM(Gemma2Config(**small())))
    with pytest.raises(DataError, match=r"model\.path"):
        PolicyModel(folder, dtype="float32")


def test_a_row_past_the_sliding_window_is_refused(tmp_path: Path) -> None:
    config = MistralConfig(**small(sliding_window=8))
    model = PolicyModel(saved(tmp_path, MistralForCausalLM(config)), dtype="float32")
    model.logprobs(one_row([1] * 9), temperature=1.0)
    with pytest.raises(DataError, match="sliding attention window of 8 tokens"):
        model.logprobs(one_row([1] * 10), temperature=1.0)


def saved_bytes(model: PolicyModel, batch: MicroBatch) -> int:
    """What a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.logprobs(batch, temperature=1.0)
    parameters = {p.untyped_storage().data_ptr() for p in model.network.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_changes_memory_only(tiny_random: Path, dtype) -> None:
    batch = one_row(list(range(4, 60)))
    plain, checkpointing = (
        PolicyModel(tiny_random, dtype=dtype, activation_checkpointing=on) for on in (False, True)
    )
    for model in (plain, checkpointing):
        model.logprobs(batch, temperature=1.0).logprobs.sum().backward()
    assert list(plain.masters) == list(checkpointing.masters)
    for name, master in plain.masters.items():
        grad = checkpointing.masters[name].grad
        assert master.grad is not None and grad is not None and master.grad.any()
        torch.testing.assert_close(grad, master.grad, atol=1e-6, rtol=1e-6)
    assert saved_bytes(checkpointing, batch) < saved_bytes(plain, batch) / 5


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"activation_checkpointing": True}])
def test_an_idle_pass_adds_a_gradient_of_zero(tiny_random: Path, options) -> None:
    model = PolicyModel(tiny_random, dtype="bfloat16", **options)
    model.idle_forward()
    assert all(p.grad is None for p in model.masters.values())
    model.idle_backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.masters.values())
    model.logprobs(one_row([3, 9, 4]), temperature=1.0).logprobs.sum().backward()
    before = model.grad_norm()
    model.idle_backward()
    assert 0 < before == model.grad_norm()


def test_gradients_are_scaled_down_to_the_largest_norm(tiny_random: Path) -> None:
    model = PolicyModel(tiny_random, dtype="float32")
    norm, head = model.masters["model.norm.weight"], model.masters["model.embed_tokens.weight"]
    norm.grad, head.grad = torch.zeros_like(norm), torch.zeros_like(head)
    norm.grad[0], head.grad[1, 1] = 3.0, 4.0
    assert model.clip_grad(6.0) == 5.0 == model.grad_norm()
    assert model.clip_grad(0.5) == 5.0
    assert model.grad_norm() == pytest.approx(0.5, abs=1e-5)
    assert (float(norm.grad[0]), float(head.grad[1, 1])) == pytest.approx((0.3, 0.4), abs=1e-5)
    # What had no gradient takes part with zero, and NaN is neither hidden nor spread.
    assert all(p.grad is not None for p in model.masters.values())
    norm.grad[1] = float("nan")
    assert math.isnan(model.clip_grad(0.5))
    assert float(head.grad[1, 1]) == pytest.approx(0.4, abs=1e-5)


def test_the_checkpoint_holds_the_masters(tiny_random: Path) -> None:
    model = PolicyModel(tiny_random, dtype="bfloat16")
    with torch.no_grad():
        model.masters["model.norm.weight"].add_(1e-4)  # too little for bfloat16
    weights = dict(model.checkpoint())
    assert weights.keys() == model.masters.keys()
    assert all(torch.equal(weights[name], master) for name, master in model.masters.items())
