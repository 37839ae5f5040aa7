"""Trust region policy optimization (Schulman et al. 2015, arXiv 1502.05477): a natural gradient step of bounded KL.

Everything here works on lists of float32 tensors, one per parameter, and knows the policy only through closures. A
step holds about eight copies of the parameters at its peak: the gradient, the old weights, four vectors of the
conjugate gradient method, and a gradient in the making with its quotient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Sequence[Tensor]], list[Tensor]]
"""A symmetric matrix as what it does to a vector; both are lists of tensors in the shapes of the parameters."""

MOVED = 1e-3
"""By how much a Fisher product moves the log-probabilities (root mean square over tokens, nats)."""

MAX_PROBES = 4
"""Displacements that one Fisher product tries at most; the last one is taken as it is."""

MAX_BACKTRACKS = 10
"""Halvings of the full step; the last one tried is 1/1024 of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrpoResult:
    """What one step did."""

    accepted: bool
    """Otherwise the parameters are as they were, bit for bit."""
    kl: float
    """Mean KL from the policy before the step, as `evaluate` measured it (nats); 0 when rejected."""
    improvement: float
    """Of the surrogate; 0 when rejected."""
    step_fraction: float
    """Of the full step to the edge of the trust region: 1, 1/2, 1/4, ...; 0 when rejected."""
    grad_norm: float
    """Global norm of the surrogate's gradient."""


def conjugate_gradient(
    product: Product, b: Sequence[Tensor], *, iterations: int, tolerance: float = 1e-10
) -> list[Tensor]:
    """x with A x ~ b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Stops after `iterations` products, or once |b - A x|^2 <= tolerance * |b|^2, or at a direction in which A does
    not curve upwards (noise, or NaN), with what it has by then: 0 when that is the first direction.
    """
    x = [torch.zeros_like(part) for part in b]
    residual = [part.clone() for part in b]
    direction = [part.clone() for part in b]
    square = _dot(residual, residual)
    enough = tolerance * square
    for _ in range(iterations):
        if square <= enough:
            break
        image = product(direction)
        curvature = _dot(direction, image)
        if not curvature > 0:
            break
        length = square / curvature
        _add(x, direction, length)
        _add(residual, image, -length)
        last_square, square = square, _dot(residual, residual)
        for part, residual_part in zip(direction, residual, strict=True):
            part.mul_(square / last_square).add_(residual_part)
    return x


def fisher_product(parameters: Sequence[Tensor], k2_gradient: Callable[[], Sequence[Tensor]]) -> Product:
    """v -> F v, with F the Fisher matrix at the values that the parameters have now, for vectors of any length.

    k2_gradient: gradient at the parameters' present values of k2 = mean over sampled tokens of
    1/2 (log pi - log pi_old)^2, with log pi_old fixed at the values they have now. There it is 0, and its Jacobian is
    the mean of (grad log pi)(grad log pi)^T: F, as estimated from the sampled tokens. So
    F v = grad k2(theta + eps v) / eps + O(eps), from first derivatives of log-probabilities alone.

    eps is chosen by what it does: it moves the log-probabilities by about `MOVED`. Far above their rounding error in
    float32 (1e-6 to 1e-5 nats) the difference has digits left, and far below 1 nat it is linear; both errors are then
    about 1%. A displacement that is a fixed share of |theta| cannot do that, because log-probabilities are thousands
    of times steeper along some directions than along others: sqrt(machine epsilon) |theta|, as for a function with one
    scale, moves those of a pretrained model by whole nats along its policy gradient. So eps |v| starts at 1e-6 |theta|
    and is changed, at the price of another gradient, until the movement, sqrt(eps v^T grad k2) to first order, is
    within a factor of 3; the next product starts where this one ended.

    The parameters are put back from a copy: subtracting eps v would leave rounding behind.
    """
    theta = [parameter.detach().clone() for parameter in parameters]
    theta_norm = _norm(theta) or 1.0
    start, longest = 1e-6 * theta_norm, 1e-3 * theta_norm
    displacement = start

    def product(v: Sequence[Tensor]) -> list[Tensor]:
        nonlocal displacement
        v_norm = _norm(v)
        if v_norm == 0:
            return [torch.zeros_like(part) for part in v]
        image: list[Tensor] = []
        try:
            for _ in range(MAX_PROBES):
                eps = displacement / v_norm
                _set(parameters, theta, v, eps)
                image = [part.detach() / eps for part in k2_gradient()]
                moved = eps * math.sqrt(max(_dot(v, image), 0.0))  # NaN stays NaN, which ends the search
                if not (moved < MOVED / 3 or moved > MOVED * 3):
                    break
                displacement = min(displacement * MOVED / max(moved, MOVED / 100), longest)
            else:
                displacement = start
        finally:
            _set(parameters, theta)
        return image

    return product


def trpo_step(
    parameters: Sequence[Tensor],
    gradient: Sequence[Tensor],
    fisher_product: Product,
    evaluate: Callable[[], tuple[float, float]],
    *,
    max_kl: float,
    iterations: int,
    damping: float,
) -> TrpoResult:
    """Moves the parameters along s = (F + damping I)^-1 gradient, scaled so that 1/2 s^T F s = max_kl, and halves the
    step until the surrogate has improved and the mean KL is at most `max_kl` (arXiv 1502.05477, appendix C).

    gradient: of the surrogate, which is to grow; finite. evaluate: surrogate and mean KL from the policy before the
    step (nats), at the parameters' present values. A NaN of either rejects. The parameters stay as they are, bit for
    bit, when no fraction of the step is good enough, when the gradient is 0, when F does not curve upwards along s,
    and when a closure raises.

    The damping shapes the direction but not the length: where it outweighs F, the step still goes to the edge of the
    trust region.
    """
    grad_norm = _norm(gradient)
    rejected = TrpoResult(accepted=False, kl=0.0, improvement=0.0, step_fraction=0.0, grad_norm=grad_norm)
    if grad_norm == 0:
        return rejected

    def damped(v: Sequence[Tensor]) -> list[Tensor]:
        image = fisher_product(v)
        _add(image, v, damping)
        return image

    step = conjugate_gradient(damped, gradient, iterations=iterations)
    curvature = _dot(step, fisher_product(step))
    if not curvature > 0:
        return rejected
    full = math.sqrt(2 * max_kl / curvature)
    theta = [parameter.detach().clone() for parameter in parameters]
    accepted = False
    try:
        before, _ = evaluate()
        for halvings in range(MAX_BACKTRACKS + 1):
            fraction = 0.5**halvings
            _set(parameters, theta, step, fraction * full)
            surrogate, kl = evaluate()
            accepted = surrogate > before and kl <= max_kl
            if accepted:
                return TrpoResult(
                    accepted=True,
                    kl=kl,
                    improvement=surrogate - before,
                    step_fraction=fraction,
                    grad_norm=grad_norm,
                )
    finally:
        if not accepted:
            _set(parameters, theta)
    return rejected


@torch.no_grad()
def _set(
    parameters: Sequence[Tensor],
    theta: Sequence[Tensor],
    v: Sequence[Tensor] | None = None,
    scale: float = 0.0,
) -> None:
    """parameters = theta + scale v, or an exact copy of theta."""
    for number, (parameter, value) in enumerate(zip(parameters, theta, strict=True)):
        if v is None:
            parameter.copy_(value)
        else:
            torch.add(value, v[number], alpha=scale, out=parameter)


def _add(x: Sequence[Tensor], y: Sequence[Tensor], scale: float) -> None:
    """x += scale y."""
    for x_part, y_part in zip(x, y, strict=True):
        x_part.add_(y_part, alpha=scale)


def _dot(x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    parts = [torch.dot(a.flatten(), b.flatten()) for a, b in zip(x, y, strict=True)]
    return float(torch.stack(parts).sum(dtype=torch.float64))


def _norm(x: Sequence[Tensor]) -> float:
    return math.sqrt(_dot(x, x))
