import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from headway.learner import logprobs
from headway.learner.logprobs import token_logprobs


def plain(hidden, weight, targets, bias=None, temperature=1.0):
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    log_p = (logits / temperature).log_softmax(dim=1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def from_logits(logits: list[float], target: int, *, temperature: float = 1.0, dtype=torch.float32):
    """A head whose logits are the given ones: hidden [1], weight [V, 1]."""
    weight = torch.tensor(logits, dtype=dtype)[:, None]
    return token_logprobs(
        torch.ones(1, 1, dtype=dtype), weight, torch.tensor([target]), temperature=temperature
    )


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9),
    vocabulary=st.integers(2, 700),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    with_bias=st.booleans(),
    block=st.sampled_from([256, 1 << 22]),
    seed=st.integers(0, 99),
)
def test_equals_plain_log_softmax(n, vocabulary, temperature, with_bias, block, seed) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    hidden, weight, bias = leaf(n, 5), leaf(vocabulary, 5), leaf(vocabulary) if with_bias else None
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    upstream = torch.randn(n, generator=generator, dtype=torch.float64)
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    expected, expected_entropy = plain(hidden, weight, targets, bias, temperature)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK_ELEMENTS", block)
        got, entropy = token_logprobs(hidden, weight, targets, bias_V=bias, temperature=temperature)
        grads = torch.autograd.grad((got * upstream).sum(), inputs)
    assert_close(got, expected)
    assert_close(entropy, expected_entropy)
    assert not entropy.requires_grad
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 2])

    def f(h, w, b):
        return token_logprobs(h, w, targets, bias_V=b, temperature=0.7).logprobs

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_entropy_with_an_impossible_token() -> None:
    result = from_logits([1.0, 1.0, 1.0, -math.inf], 0)
    assert result.entropy.item() == pytest.approx(math.log(3), abs=1e-6)
    assert result.logprobs.item() == pytest.approx(-math.log(3), abs=1e-6)


def test_temperature_divides_the_logits() -> None:
    assert from_logits([2.0, 1.0, 0.0], 0, temperature=0.5).logprobs.item() == pytest.approx(
        -0.142932, abs=1e-6
    )


def test_logits_are_float32_before_the_softmax() -> None:
    # A softmax in bfloat16 would make it -0.693147.
    assert from_logits([16.0, 16.05], 0).logprobs.item() == pytest.approx(-0.718459, abs=2e-6)
    assert from_logits([1.0, 2.0], 1, dtype=torch.bfloat16).logprobs.dtype == torch.float32


def test_a_certain_token_has_logprob_zero_and_never_more() -> None:
    assert from_logits([0.0, 300.0], 1).logprobs.item() == 0.0
    torch.manual_seed(1)
    hidden, weight = 9 * torch.randn(200, 8), torch.randn(600, 8)
    assert (token_logprobs(hidden, weight, (hidden @ weight.T).argmax(dim=1)).logprobs <= 0).all()


def test_nan_is_not_hidden() -> None:
    assert from_logits([0.0, math.nan, 1.0], 0).logprobs.isnan().all()


def test_a_float32_block_of_logits_is_all_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest float32 tensor made on the way is one block, not [N, V]."""
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 256 * 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.dtype == torch.float32
                and out.dim() == 2
                and out.shape[0] == 4
            ):
                largest = max(largest, out.shape[1])
            return out

    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(5000, 3, requires_grad=True)
    with Watch():
        token_logprobs(hidden, weight, torch.tensor([0, 1, 2, 4999])).logprobs.sum().backward()
    assert largest == 256
