"""Is a Jacobian the derivative of a function? Central differences say, where they settle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Sizes of the steps, as multiples of the cube root of the rounding unit, at which rounding and
# curvature weigh alike: smaller where the function bends, larger where it is noisy.
_SIZES = (1 / 8, 1 / 64, 2.0, 1 / 512)
# Largest difference that rounding and curvature explain at a bad size; a wrong map is further off.
_LIMITS = {torch.float32: 1e-2, torch.float64: 1e-4}
_GOOD = 0.1  # part of the limit below which no other size is tried


@dataclass(frozen=True)
class Difference:
    """A product with a Jacobian beside the finite difference of the function.

    Attributes:
        error: ``‖D - J e‖ / max(‖D‖, ‖J e‖)`` with D the difference, at the best size; 0 where
            both are zero.
        product: ``‖J e‖``.
        quotient: ``‖D‖`` at that size.
        status: ``agrees``; ``disagrees``, if differences of two sizes agree with each other and
            not with the product; ``unsettled``, if they agree with nothing.
    """

    error: float
    product: float
    quotient: float
    status: str


def difference(f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor) -> Difference:
    """Compare ``J e`` with ``(f(x + t e) - f(x - t e)) / 2t``.

    The step ``t`` is such that no token moves by more than a small part of its own norm, or
    of the mean norm where it has none. Where that does not settle, it is such that the output
    moves by no more than a small part of its norm, by ``J e``: a norm takes a token that is zero
    apart within its epsilon. Two evaluations, unless they disagree.

    Args:
        f: The function, of token matrices in the dtype of its own computation.
        x: The point, ``(n, d)``, in that dtype.
        e: The direction, ``(n, d)``, not zero.
        product: ``J e``.

    Returns:
        What was found.

    >>> x = torch.eye(2, dtype=torch.float64)
    >>> difference(lambda x: x**2, x, x, 2 * x).status, difference(lambda x: x**2, x, x, x).status
    ('agrees', 'disagrees')
    """
    product, e = product.double(), e.to(x)
    norms = torch.linalg.vector_norm(x, dim=-1)
    norms = torch.where(norms > 0, norms, norms.square().mean().sqrt())
    whole = float((norms / torch.linalg.vector_norm(e, dim=-1)).min()) or 1.0
    found = _within(whole, f, x, e, product)
    if found.status != "unsettled":
        return found
    closer = float(f(x).detach().double().norm()) / found.product if found.product else whole
    again = _within(closer, f, x, e, product) if closer < whole else found
    # Rounding may swallow a step that small, so that it proves nothing against the product.
    return again if again.status == "agrees" else found


def _within(
    whole: float, f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor
) -> Difference:
    """The comparison with steps that are small beside ``whole``."""
    limit = _LIMITS[x.dtype]
    base = torch.finfo(x.dtype).eps ** (1 / 3) * whole
    best: Difference | None = None
    quotients: list[Tensor] = []
    for size in _SIZES:
        step = e * (base * size)
        ends = (f(x + sign * step).detach().double() for sign in (1, -1))
        quotient = torch.sub(*ends) / (2 * base * size)
        error = _apart(quotient, product)
        if best is None or error < best.error:
            best = Difference(error, float(product.norm()), float(quotient.norm()), "unsettled")
        if error <= _GOOD * limit:
            break
        if best.error > limit and any(_apart(quotient, other) <= limit for other in quotients):
            return Difference(best.error, best.product, float(quotient.norm()), "disagrees")
        quotients.append(quotient)
    assert best is not None
    return replace(best, status="agrees") if best.error <= limit else best


def _apart(a: Tensor, b: Tensor) -> float:
    largest = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / largest if largest > 0 else 0.0
