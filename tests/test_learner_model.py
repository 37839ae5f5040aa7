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
