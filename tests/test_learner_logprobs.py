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
    possible = log_p > -math.inf
    entropy = -(log_p.exp() * log_p.masked_fill(~possible, 0.0)).sum(dim=1)
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
    uses=st.sampled_from(["logprobs", "entropy", "both"]),
    seed=st.integers(0, 99),
)
def test_equals_plain_log_softmax(n, vocabulary, temperature, with_bias, block, uses, seed) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    hidden, weight, bias = leaf(n, 5), leaf(vocabulary, 5), leaf(vocabulary) if with_bias else None
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    upstream = torch.randn(2, n, generator=generator, dtype=torch.float64)

    def loss(log_p: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = {"logprobs": log_p * upstream[0], "entropy": entropy * upstream[1]}
        return torch.stack([t.sum() for name, t in terms.items() if uses in (name, "both")]).sum()

    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    expected, expected_entropy = plain(hidden, weight, targets, bias, temperature)
    expected_grads = torch.autograd.grad(loss(expected, expected_entropy), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK_ELEMENTS", block)
        got, entropy = token_logprobs(hidden, weight, targets, bias_V=bias, temperature=temperature)
        grads = torch.autograd.grad(loss(got, entropy), inputs)
    assert_close(got, expected)
    assert_close(entropy, expected_entropy)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 2])

    def f(h, w, b):
        return tuple(token_logprobs(h, w, targets, bias_V=b, temperature=0.7))

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_gradient_of_the_entropy_by_hand() -> None:
    """p = (1/2, 1/4, 1/4): H = 3/2 ln 2, and -p (ln p + H) = ln 2 * (-1/4, 1/8, 1/8); at T = 2 half of that for
    the same p."""
    for temperature in (1.0, 2.0):
        logits = [temperature * math.log(p) for p in (0.5, 0.25, 0.25)]
        bias = torch.tensor(logits, requires_grad=True)
        result = token_logprobs(
            torch.zeros(1, 1), torch.zeros(3, 1), torch.tensor([0]), bias_V=bias, temperature=temperature
        )
        assert result.entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
        (grad,) = torch.autograd.grad(result.entropy.sum(), bias)
        assert_close(grad, math.log(2) / temperature * torch.tensor([-0.25, 0.125, 0.125]))


def test_entropy_with_an_impossible_token() -> None:
    result = from_logits([1.0, 1.0, 1.0, -math.inf], 0)
    assert result.entropy.item() == pytest.approx(math.log(3), abs=1e-6)
    assert result.logprobs.item() == pytest.approx(-math.log(3), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_banned_tokens_have_no_part_in_any_gradient(dtype: torch.dtype) -> None:
    """A bias of -inf at tokens 1 and 300: the results of the softmax over the other tokens alone."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(4, 5, generator=generator), torch.randn(600, 5, generator=generator)
    targets = torch.tensor([0, 2, 299, 599])
    bias = torch.zeros(600)
    bias[[1, 300]] = -math.inf
    kept = torch.isfinite(bias)

    def gradients(only: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden.clone(), weight[only], bias[only])]
        place = torch.cumsum(only, dim=0) - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logprobs, "BLOCK_ELEMENTS", 256)
            result = token_logprobs(leaves[0], leaves[1], place[targets], bias_V=leaves[2])
            (result.logprobs - 2 * result.entropy).sum().backward()
        return [result.entropy.detach()] + [x.grad for x in leaves if x.grad is not None]

    with_ban, without = gradients(torch.ones(600, dtype=torch.bool)), gradients(kept)
    assert_close(with_ban[:2], without[:2])
    for full, part in zip(with_ban[2:], without[2:], strict=True):
        assert_close(full[kept], part)
        assert not full[~kept].any()


def test_a_sampled_token_that_is_now_banned_has_finite_gradients() -> None:
    bias = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    result = token_logprobs(torch.zeros(1, 1), torch.zeros(3, 1), torch.tensor([2]), bias_V=bias)
    assert result.logprobs.item() == -math.inf
    (grad,) = torch.autograd.grad(result.logprobs.sum() + result.entropy.sum(), bias)
    assert_close(grad, torch.tensor([-0.5, -0.5, 1.0]))


def test_an_unused_entropy_takes_no_part_in_the_backward_pass() -> None:
    """The same tensor operations, however the entropy is held on to."""

    def operations(*, detached: bool) -> list[str]:
        names = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                names.append(str(func))
                return func(*args, **(kwargs or {}))

        hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
        result = token_logprobs(hidden, weight, torch.tensor([0, 1, 2, 8]))
        entropy = result.entropy.detach() if detached else result.entropy
        with Watch():
            result.logprobs.sum().backward()
        assert entropy.shape == (4,)
        return names

    names = operations(detached=False)
    assert names == operations(detached=True)
    assert names.count("aten.exp_.default") == 1 and "aten.exp.default" not in names


def test_second_derivatives_are_refused() -> None:
    hidden = torch.randn(2, 3, requires_grad=True)
    result = token_logprobs(hidden, torch.randn(5, 3), torch.tensor([0, 1]))
    (grad,) = torch.autograd.grad(result.logprobs.sum() + result.entropy.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


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
    bias = torch.tensor([0.0, math.nan, 1.0], requires_grad=True)
    result = token_logprobs(torch.zeros(1, 1), torch.zeros(3, 1), torch.tensor([0]), bias_V=bias)
    assert result.logprobs.isnan().all() and result.entropy.isnan().all()
    for value in result:
        (grad,) = torch.autograd.grad(value.sum(), bias, retain_graph=True)
        assert grad.isnan().any()


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
        result = token_logprobs(hidden, weight, torch.tensor([0, 1, 2, 4999]))
        (result.logprobs.sum() + result.entropy.sum()).backward()
    assert largest == 256
