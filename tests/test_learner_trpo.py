"""On a softmax policy in a table, whose Fisher matrix, KL and return are sums over all that can happen."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headway.learner.trpo import Product, TrpoResult, conjugate_gradient, fisher_product, trpo_step

STATE_S = torch.tensor([0.2, 0.5, 0.3])
"""How often each state comes up."""
REWARD_SV = torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0], [0.2, 0.0, 1.0, 0.0]])


class Table:
    """One token in one of 3 states; logits = scale[:, None] * table, so that there are two parameters of different
    size, and products of parameters."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(3, 4, generator=generator).requires_grad_()
        self.scale = (1 + torch.rand(3, generator=generator)).requires_grad_()
        self.parameters = [self.table, self.scale]
        self.old_SV = self.log_policy().detach()

    def log_policy(self) -> Tensor:
        return (self.scale[:, None] * self.table).log_softmax(dim=1)

    def gradient(self, value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, self.parameters))

    def expected(self, value_SV: Tensor) -> Tensor:
        """Over states and over the tokens of the policy before the step."""
        return (STATE_S[:, None] * self.old_SV.exp() * value_SV).sum()

    def k2_gradient(self) -> list[Tensor]:
        return self.gradient(self.expected((self.log_policy() - self.old_SV).square() / 2))

    def fisher(self) -> Tensor:
        """[P, P] sum over states and tokens of p (grad log p)(grad log p)^T, at the policy before the step, in
        float64."""
        fisher = torch.zeros(15, 15, dtype=torch.float64)
        log_p_SV = self.log_policy()
        for state in range(3):
            for token in range(4):
                parts = torch.autograd.grad(log_p_SV[state, token], self.parameters, retain_graph=True)
                score = flat(parts).double()
                fisher += float(STATE_S[state] * self.old_SV[state, token].exp()) * torch.outer(score, score)
        return fisher

    def surrogate_gradient(self) -> list[Tensor]:
        return self.gradient(self.expected((self.log_policy() - self.old_SV).exp() * REWARD_SV))

    def expected_return(self) -> float:
        return (STATE_S[:, None] * self.log_policy().exp() * REWARD_SV).sum().item()

    def kl(self) -> float:
        """KL(before || now), mean over states."""
        return self.expected(self.old_SV - self.log_policy()).item()

    def evaluate(self) -> tuple[float, float]:
        return self.expected_return(), self.kl()

    def step(self, max_kl: float = 0.01, **changes) -> TrpoResult:
        arguments = {
            "gradient": self.surrogate_gradient(),
            "fisher_product": fisher_product(self.parameters, self.k2_gradient),
            "evaluate": self.evaluate,
            "iterations": 10,
            "damping": 1e-3,
        }
        return trpo_step(self.parameters, max_kl=max_kl, **{**arguments, **changes})


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


def bits(parts: Sequence[Tensor]) -> list[list[int]]:
    return [part.detach().flatten().view(torch.int32).tolist() for part in parts]


def matrix(rows: Sequence[Sequence[float]]) -> Product:
    return lambda v: [torch.tensor(rows) @ v[0]]


def test_conjugate_gradient_by_hand() -> None:
    """[[4, 1], [1, 3]] x = [1, 2] has the solution [1/11, 7/11], reached in as many products as dimensions; the first
    one ends at b (b.b / b.Ab) = [1/4, 1/2]."""
    b = [torch.tensor([1.0, 2.0])]
    (one,) = conjugate_gradient(matrix([[4.0, 1.0], [1.0, 3.0]]), b, iterations=1)
    assert_close(one, torch.tensor([0.25, 0.5]))
    (two,) = conjugate_gradient(matrix([[4.0, 1.0], [1.0, 3.0]]), b, iterations=2)
    assert_close(two, torch.tensor([1 / 11, 7 / 11]))
    assert_close(b[0], torch.tensor([1.0, 2.0]))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(size=st.integers(2, 12), seed=st.integers(0, 999))
def test_conjugate_gradient_solves_well_conditioned_systems(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator)
    a = root @ root.T / size + torch.eye(size)
    solution = torch.randn(size, generator=generator)
    b = a @ solution

    def product(v: Sequence[Tensor]) -> list[Tensor]:
        return list((a @ torch.cat([v[0].flatten(), v[1]])).split([2, size - 2]))

    x = conjugate_gradient(product, list(b.split([2, size - 2])), iterations=2 * size)
    assert_close(torch.cat(x), solution, rtol=1e-3, atol=1e-3)


def test_conjugate_gradient_stops_when_it_is_done() -> None:
    """The identity is solved by one product, and b = 0 by none; the tolerance is relative to b."""
    calls = 0

    def identity(v: Sequence[Tensor]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return [part.clone() for part in v]

    (x,) = conjugate_gradient(identity, [torch.tensor([3e-12, -4e-12])], iterations=10)
    assert_close(x, torch.tensor([3e-12, -4e-12]), rtol=1e-6, atol=0.0)
    assert calls == 1
    (x,) = conjugate_gradient(identity, [torch.zeros(2)], iterations=10)
    assert (x.tolist(), calls) == ([0.0, 0.0], 1)


def test_conjugate_gradient_stops_at_a_direction_without_upward_curvature() -> None:
    b = [torch.tensor([1.0, 1.0])]
    for bad in (-1.0, 0.0, math.nan):
        (x,) = conjugate_gradient(matrix([[bad, 0.0], [0.0, bad]]), b, iterations=5)
        assert x.tolist() == [0.0, 0.0]
    # b.Ab = 1 > 0: a step of 2 b. The next direction is [3, -3] + 9 b = [12, 6], of curvature -144 + 72: left out.
    (x,) = conjugate_gradient(matrix([[-1.0, 0.0], [0.0, 2.0]]), b, iterations=5)
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
def test_fisher_products_are_those_of_the_exact_matrix(length: float) -> None:
    """Along single parameters, random directions and the gradient, to 1%, whatever the vector's length."""
    table = Table()
    before = bits(table.parameters)
    fisher = table.fisher()
    product = fisher_product(table.parameters, table.k2_gradient)
    generator = torch.Generator().manual_seed(1)
    directions = [
        row.split([12, 3]) for row in torch.cat([torch.eye(15), torch.randn(5, 15, generator=generator)])
    ]
    for v in [[a.view(3, 4), b] for a, b in directions] + [table.surrogate_gradient()]:
        v = [length * part for part in v]
        exact = fisher @ flat(v).double()
        error = (flat(product(v)).double() - exact).norm()
        assert error <= 0.01 * exact.norm(), (v, float(error / exact.norm()))
        assert bits(table.parameters) == before


def test_a_fisher_product_with_zero_is_zero_and_costs_nothing() -> None:
    table = Table()

    def never() -> list[Tensor]:
        raise AssertionError

    (first, second) = fisher_product(table.parameters, never)([torch.zeros(3, 4), torch.zeros(3)])
    assert not first.any() and not second.any()


def test_a_fisher_product_along_what_changes_nothing_is_zero() -> None:
    """The same constant on all logits of a state leaves its softmax alone."""
    table = Table()
    product = fisher_product(table.parameters, table.k2_gradient)
    image = flat(product([torch.ones(3, 4), torch.zeros(3)]))
    assert image.norm() < 1e-3 * flat(product([torch.eye(3, 4), torch.zeros(3)])).norm()


def test_parameters_at_zero_have_fisher_products_too() -> None:
    """A new low-rank adapter is 0. With uniform p = 1/2: F = diag(p) - p p^T = [[1/4, -1/4], [-1/4, 1/4]]."""
    logits = torch.zeros(2, requires_grad=True)

    def k2_gradient() -> list[Tensor]:
        k2 = (logits.log_softmax(0) + math.log(2)).square().mean() / 2
        return list(torch.autograd.grad(k2, [logits]))

    (image,) = fisher_product([logits], k2_gradient)([torch.tensor([1.0, 0.0])])
    assert_close(image, torch.tensor([0.25, -0.25]), rtol=5e-3, atol=0.0)


def test_a_fisher_product_of_a_far_steeper_policy_is_right_from_the_first() -> None:
    """Logits of 1000 theta: a displacement of 1e-6 |theta| that fits a flat policy is 1000 times too far here."""
    theta = torch.tensor([1.0, 1.001], requires_grad=True)

    def log_policy() -> Tensor:
        return (1000 * theta).log_softmax(0)

    old = log_policy().detach()

    def k2_gradient() -> list[Tensor]:
        return list(torch.autograd.grad((old.exp() * (log_policy() - old).square()).sum() / 2, [theta]))

    p = float(old.exp()[0])
    (image,) = fisher_product([theta], k2_gradient)([torch.tensor([0.0, 1.0])])
    exact = 1e6 * p * (1 - p)
    assert_close(image, torch.tensor([-exact, exact]), rtol=1e-2, atol=0.0)


def test_a_failing_closure_leaves_the_parameters_alone() -> None:
    table = Table()
    before = bits(table.parameters)
    gradient = table.surrogate_gradient()

    def fails() -> list[Tensor]:
        assert bits(table.parameters) != before
        raise RuntimeError("the forward pass")

    with pytest.raises(RuntimeError, match="the forward pass"):
        fisher_product(table.parameters, fails)(gradient)
    assert bits(table.parameters) == before
    calls = iter([(0.0, 0.0)])
    with pytest.raises(StopIteration):
        table.step(evaluate=lambda: next(calls))
    assert bits(table.parameters) == before


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 9999), max_kl=st.sampled_from([1e-4, 1e-3, 1e-2, 0.1]))
def test_a_step_stays_within_the_kl_and_raises_the_return(seed: int, max_kl: float) -> None:
    table = Table(seed)
    before = table.expected_return()
    result = table.step(max_kl)
    assert result.accepted
    assert 0 < table.kl() <= max_kl
    assert table.kl() == result.kl
    assert table.expected_return() == pytest.approx(before + result.improvement, abs=1e-6)
    assert result.improvement > 0
    assert result.grad_norm == pytest.approx(float(flat(Table(seed).surrogate_gradient()).norm()), rel=1e-5)


def test_the_full_step_goes_to_the_edge_of_the_trust_region() -> None:
    """For a small radius the KL is its second-order form: the step's is max_kl, or a quarter of it after a halving,
    and the gain is that of the exact natural gradient, sqrt(2 max_kl g^T F^-1 g) times the fraction."""
    for max_kl in (1e-5, 1e-4):
        table = Table()
        gradient = flat(table.surrogate_gradient()).double()
        natural = gradient @ torch.linalg.pinv(table.fisher(), rtol=1e-6) @ gradient
        result = table.step(max_kl, damping=0.0)
        assert result.step_fraction in (1.0, 0.5)
        assert result.kl == pytest.approx(max_kl * result.step_fraction**2, rel=0.05)
        best = math.sqrt(2 * max_kl * float(natural))
        assert result.improvement == pytest.approx(best * result.step_fraction, rel=0.05)


def test_heavy_damping_turns_the_step_towards_the_gradient_but_does_not_shorten_it() -> None:
    table = Table()
    gradient = flat(table.surrogate_gradient())
    before = flat(table.parameters)
    result = table.step(1e-4, damping=1e4)
    moved = flat(table.parameters) - before
    assert float(torch.nn.functional.cosine_similarity(moved, gradient, dim=0)) == pytest.approx(
        1.0, abs=1e-4
    )
    assert result.kl == pytest.approx(1e-4 * result.step_fraction**2, rel=0.05)


def test_a_rejected_step_changes_no_bit() -> None:
    """By the KL, by a surrogate that does not grow, by one that is equal, and by NaN."""
    for surrogate, kl in ((1.0, 1.0), (-1.0, 0.0), (0.0, 0.0), (math.nan, 0.0), (1.0, math.nan)):
        table = Table()
        with torch.no_grad():
            table.table[0, 0] = -0.0
        table.old_SV = table.log_policy().detach()
        before = bits(table.parameters)
        seen = []

        def evaluate(seen=seen, table=table, surrogate=surrogate, kl=kl) -> tuple[float, float]:
            seen.append(flat(table.parameters))
            return (0.0, 0.0) if len(seen) == 1 else (surrogate, kl)

        result = table.step(evaluate=evaluate)
        assert bits(table.parameters) == before
        assert result == TrpoResult(
            accepted=False, kl=0.0, improvement=0.0, step_fraction=0.0, grad_norm=result.grad_norm
        )
        assert result.grad_norm > 0
        # The policy before, the full step, and ten halvings.
        assert len(seen) == 12
        lengths = [float((other - seen[0]).norm()) for other in seen[1:]]
        assert lengths == pytest.approx([lengths[0] / 2**k for k in range(11)], rel=1e-3)


def test_backtracking_stops_at_the_first_fraction_that_is_good_enough() -> None:
    answers = iter([(1.0, 0.0), (2.0, 0.02), (0.5, 0.0), (1.5, 0.01)])
    result = Table().step(0.01, evaluate=lambda: next(answers))
    assert (result.accepted, result.step_fraction, result.kl, result.improvement) == (True, 0.25, 0.01, 0.5)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_zero_gradient_is_no_step(damping: float) -> None:
    def never() -> tuple[float, float]:
        raise AssertionError

    table = Table()
    before = bits(table.parameters)
    zero = [torch.zeros_like(part) for part in table.parameters]
    result = table.step(gradient=zero, evaluate=never, damping=damping)
    assert result == TrpoResult(accepted=False, kl=0.0, improvement=0.0, step_fraction=0.0, grad_norm=0.0)
    assert bits(table.parameters) == before


@pytest.mark.parametrize("curvature", [-1.0, 0.0, math.nan])
@pytest.mark.parametrize("damping", [0.0, 2.0])
def test_a_fisher_matrix_that_does_not_curve_upwards_is_no_step(curvature: float, damping: float) -> None:
    table = Table()
    before = bits(table.parameters)
    result = table.step(fisher_product=lambda v: [curvature * part for part in v], damping=damping)
    assert not result.accepted
    assert bits(table.parameters) == before


def test_repeated_steps_find_the_best_policy() -> None:
    """Expected return 0.2 * 1 + 0.5 * 1 + 0.3 * 1 = 1 at best."""
    table = Table()
    for _ in range(40):
        table.old_SV = table.log_policy().detach()
        table.step(0.1)
    assert table.expected_return() > 0.99
