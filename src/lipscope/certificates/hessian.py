"""How fast a score can fall to second order at X: its own Hessian, all heads and rows together.

Derived here; statement and proof: ``docs/theory/ball-certificate.md``, "The third order".
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.theorems.derived.intervals import BallName

_STEPS = 200  # of the ascent that finds weights for the token ball
_LEAST = 1e-3  # smallest weight of a token beside the mean
_SLACK = 1e-10  # of an eigenvalue in float64, with room


def hessian(
    layer: DotProduct, x: Float[Tensor, "n d"], w: Float[Tensor, " d_out"], share: Tensor
) -> Float[Tensor, "nd nd"]:
    """Second derivative of ``<w, sum_i share_i f(X)_i>``, by automatic differentiation."""

    def gradient(flat: Tensor) -> Tensor:
        return torch.func.grad(lambda z: share @ layer(z.view_as(x)) @ w)(flat)

    flat = x.flatten()
    unit = torch.eye(len(flat), dtype=x.dtype)
    rows = torch.func.vmap(lambda e: torch.func.jvp(gradient, (flat,), (e,))[1], chunk_size=64)
    found = rows(unit)
    return (found + found.T) / 2


def largest_form(h: Float[Tensor, "nd nd"], tokens: int, ball: BallName) -> float:
    """``>= sup <E, H E>`` over the unit ball, 0 at least.

    In the Frobenius ball the largest eigenvalue. In the token ball, for any ``μ_j > 0``,
    ``λ_max(D^(-1/2) H D^(-1/2)) sum_j μ_j`` with ``D = diag(μ_j I)``; the multipliers of a maximum
    make it one, nearly always to all digits, and an ascent finds them.
    """
    best = _top(h)
    if ball == "frobenius" or best == 0.0:
        return best
    best *= tokens
    d = len(h) // tokens
    for start in range(2):
        weights = _multipliers(h, tokens, start)
        root = weights.rsqrt().repeat_interleave(d)
        best = min(best, _top(root[:, None] * h * root) * float(weights.sum()))
    return best


def _top(h: Tensor) -> float:
    if not bool(h.isfinite().all()):
        return torch.inf
    values = torch.linalg.eigvalsh(h)
    rounding = _SLACK * float(values.abs().max())
    return max(float(values[-1]) + rounding, 0.0)


def _multipliers(h: Tensor, tokens: int, start: int) -> Tensor:
    """``<e_j, (H e)_j>`` after an ascent over tokens of norm 1, made positive; their mean is 1."""
    generator = torch.Generator().manual_seed(start)
    e = torch.randn(tokens, len(h) // tokens, generator=generator, dtype=h.dtype)
    shift = 0.1 * h.abs().sum(1).max()  # of the sum that the ascent climbs: it does not swing
    for _ in range(_STEPS):
        e = e / e.norm(dim=1, keepdim=True).clamp_min(1e-300)
        e = (h @ e.flatten()).view_as(e) + shift * e
    e = e / e.norm(dim=1, keepdim=True).clamp_min(1e-300)
    found = (e * (h @ e.flatten()).view_as(e)).sum(1).clamp_min(0.0)
    mean = found.mean()
    return (found / mean if mean > 0 else torch.ones_like(found)).clamp_min(_LEAST)
