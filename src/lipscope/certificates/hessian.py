"""The Hessian of a score at X, all heads and rows together: how fast it falls to second order.

Derived here; statement and proof: ``docs/theory/ball-certificate.md``, "The third order".
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.linalg import start_named
from lipscope.theorems import BallName

_STARTS, _STEPS = 4, 300  # of the ascents
_FIRST = 1e-3  # smallest weight of a token beside the largest, after them
_ROUNDS = 16  # of the descent that finds weights for the token ball
_NEAR = 32  # power that tells top eigenvalues from the rest
_STEP = 5.0  # largest change of a weight asked for in a round
_LEAST = 1e-6  # smallest weight of a token at the end
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
    ``λ_max(D^(-1/2) H D^(-1/2)) sum_j μ_j`` with ``D = diag(μ_j I)``: a descent takes weights to
    the tokens that carry the top eigenvectors, from the multipliers of the best maximum that
    ascents find. Any weights hold.
    """
    if not bool(h.isfinite().all()):
        return math.inf
    size = float(h.abs().max())
    if size == 0.0:
        return 0.0
    h = h / size  # no square of it leaves the float range
    if ball == "frobenius":
        return size * _top(torch.linalg.eigvalsh(h))
    weights, best = _multipliers(h, tokens), math.inf
    for _ in range(_ROUNDS):
        root = weights.rsqrt().repeat_interleave(len(h) // tokens)
        values, vectors = torch.linalg.eigh(root[:, None] * h * root)
        best = min(best, _top(values) * float(weights.sum()))
        if not values[-1] > 0.0:  # it rises nowhere, and no weights are better
            break
        near = (values / values[-1]).clamp_min(0.0) ** _NEAR
        carried = (vectors.square() @ (near / near.sum())).view(tokens, -1).sum(1)
        step = (carried * weights.sum() / weights).clamp(1 / _STEP, _STEP) ** 0.4
        weights = (weights * step).clamp_min(_LEAST * float(weights.max()))
    return size * best


def _multipliers(h: Tensor, tokens: int) -> Tensor:
    """``<e_j, (H e)_j>`` at the best point of some ascents in the token ball, made positive."""
    generator = start_named("multipliers")
    size = _STARTS, tokens, len(h) // tokens
    e = torch.randn(size, generator=generator, dtype=h.dtype)
    rate = 1 / max(-float(torch.linalg.eigvalsh(h)[0]), _FIRST)
    for _ in range(_STEPS):
        e = e / e.norm(dim=2, keepdim=True).clamp_min(1.0)
        e = e + (e.flatten(1) @ h).view(size) * rate
    e = e / e.norm(dim=2, keepdim=True).clamp_min(1.0)
    found = (e * (e.flatten(1) @ h).view(size)).sum(2)
    best = found[int(found.sum(1).argmax())]
    most = best.max()
    return (best / most).clamp_min(_FIRST) if most > 0 else torch.ones_like(best)


def _top(values: Tensor) -> float:
    """The last of some eigenvalues, with what rounding may hide of it, 0 at least."""
    return max(float(values[-1] + _SLACK * values.abs().max()), 0.0)
