"""Checks against differences of a function: its Jacobian, and the largest sigma on a segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lipscope.linalg.operator import linearise, start_named
from lipscope.linalg.singular import top_singular

# Sizes of the steps, as multiples of the cube root of the rounding unit, at which rounding and
# curvature weigh alike: smaller where the function bends, larger where it is noisy.
_SIZES = (1 / 8, 1 / 64, 2.0, 1 / 512)
# Largest difference that rounding and curvature explain at a bad size; a wrong map is further off.
_LIMITS = {torch.float32: 1e-2, torch.float64: 1e-4}
_ROUNDING = 8  # units of the output, in norm, by which rounding moves a difference of two
_GOOD = 0.1  # part of the limit below which no other size is tried


@dataclass(frozen=True)
class Difference:
    """A product with a Jacobian beside the finite difference of the function."""

    # ``‖D - J e‖ / max(‖D‖, ‖J e‖)`` with D the difference, at the best size; 0 where both are zero
    error: float
    product: float  # ``‖J e‖``
    quotient: float  # ``‖D‖`` at that size
    # ``agrees``; ``disagrees``, if differences of two sizes agree with each other and not with the
    # product; ``unsettled``, if they agree with nothing, or if rounding of the output explains that
    # they do not agree with the product
    status: str
    # ``‖D+‖`` and ``‖D-‖``, the quotients ahead and behind, where it disagrees and they differ
    # alike at both sizes: the function has no derivative there
    sides: tuple[float, float] | None = None


def difference(f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor) -> Difference:
    """Compare ``J e`` with ``(f(x + t e) - f(x - t e)) / 2t``.

    The step ``t`` is such that no token moves by more than a small part of its own norm, or
    of the mean norm where it has none. Where that does not settle, it is such that the output
    moves by no more than a small part of its norm, by ``J e``: a norm takes a token that is zero
    apart within its epsilon. Two evaluations, unless they disagree.

    >>> x = torch.eye(2, dtype=torch.float64)
    >>> difference(lambda x: x**2, x, x, 2 * x).status, difference(lambda x: x**2, x, x, x).status
    ('agrees', 'disagrees')
    >>> difference(torch.abs, 0 * x, x, x).sides is None  # slope 1 ahead, -1 behind
    False
    """
    product, e = product.double(), e.to(x)
    norms = torch.linalg.vector_norm(x, dim=-1)
    norms = torch.where(norms > 0, norms, norms.square().mean().sqrt())
    whole = float((norms / torch.linalg.vector_norm(e, dim=-1)).min()) or 1.0
    found = _compare_steps(whole, f, x, e, product)
    if found.status != "unsettled":
        return found
    closer = float(f(x).detach().double().norm()) / found.product if found.product else whole
    again = _compare_steps(closer, f, x, e, product) if closer < whole else found
    # Rounding may swallow a step that small, so that it proves nothing against the product.
    return again if again.status == "agrees" else found


def _compare_steps(
    whole: float, f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor
) -> Difference:
    """The comparison with steps that are small beside ``whole``."""
    limit = _LIMITS[x.dtype]
    base = torch.finfo(x.dtype).eps ** (1 / 3) * whole
    best: Difference | None = None
    tried: list[_Tried] = []
    for size in _SIZES:
        step = e * (base * size)
        ahead, behind = (f(x + sign * step).detach().double() for sign in (1, -1))
        now = _Tried(ahead, behind, base * size)
        error = _relative_distance(now.quotient, product)
        if best is None or error < best.error:
            best = Difference(error, float(product.norm()), float(now.quotient.norm()), "unsettled")
        if error <= _GOOD * limit:
            break
        if float((now.quotient - product).norm()) <= now.rounding(torch.finfo(x.dtype).eps):
            break  # smaller steps say less
        alike = (one for one in tried if _relative_distance(now.quotient, one.quotient) <= limit)
        if best.error > limit and (other := next(alike, None)):
            sides = _sides(f(x).detach().double(), now, other, limit)
            quotient = float(now.quotient.norm())
            return Difference(best.error, best.product, quotient, "disagrees", sides)
        tried.append(now)
    assert best is not None
    return replace(best, status="agrees") if best.error <= limit else best


@dataclass(frozen=True)
class _Tried:
    """A function one step ahead and one behind."""

    ahead: Tensor
    behind: Tensor
    step: float

    @property
    def quotient(self) -> Tensor:
        return (self.ahead - self.behind) / (2 * self.step)

    def rounding(self, unit: float) -> float:
        """What rounding of the output, in the function's own type, may add to the quotient."""
        size = max(float(self.ahead.norm()), float(self.behind.norm()))
        return _ROUNDING * unit * size / (2 * self.step)


def _sides(here: Tensor, now: _Tried, other: _Tried, limit: float) -> tuple[float, float] | None:
    """Quotients ahead and behind at a kink, where what parts them is the same at two sizes.

    Curvature parts them as well, by as much less as the step is smaller.
    """
    jumps = [(one.ahead + one.behind - 2 * here) / one.step for one in (now, other)]
    sides = [float((end - here).norm()) / now.step for end in (now.ahead, now.behind)]
    kinked = float(jumps[0].norm()) > limit * max(sides) and _relative_distance(*jumps) < 0.5
    return (sides[0], sides[1]) if kinked else None


def _relative_distance(a: Tensor, b: Tensor) -> float:
    largest = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / largest if largest > 0 else 0.0


@dataclass(frozen=True)
class MeanValueCheck:
    """A finite difference and sigma between its two ends."""

    slope: float  # ``‖f(Y) - f(X)‖ / ‖Y - X‖``
    mean: float  # mean of sigma over the segment, by Gauss–Legendre quadrature
    largest: float  # largest sigma (upper end of its interval) among the points
    holds: bool  # whether ``slope ≤ largest``, up to 1e-6


def segment(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> MeanValueCheck:
    """Compare a finite difference with sigma along the segment.

    ``‖f(Y) - f(X)‖ ≤ ∫_0^1 ‖J(X + t (Y - X)) (Y - X)‖ dt ≤ max_t sigma · ‖Y - X‖``.

    Holds for continuously differentiable maps. Sigma is seen at eight points, too few for a
    segment on which it varies fast.

    Source: Lemma 3.1 of [castin2024].

    >>> segment(lambda x: x**2, torch.zeros(1), torch.ones(1)).slope
    1.0
    """
    nodes, weights = np.polynomial.legendre.leggauss(8)
    sigmas = []
    for t in (nodes + 1) / 2:
        point = x + float(t) * (y - x)
        start = start_named("segment", point)
        top = top_singular(linearise(f, point), tol=1e-3, generator=start)
        sigmas.append(top.upper)
    with torch.no_grad():
        slope = float((f(y) - f(x)).norm() / (y - x).norm())
    mean = float(np.dot(weights, sigmas) / 2)
    return MeanValueCheck(slope, mean, max(sigmas), slope <= max(sigmas) * (1 + 1e-6))
