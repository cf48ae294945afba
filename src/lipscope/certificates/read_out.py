"""A linear read-out of a layer over a ball: its exact gradient at X, its curvature bounded.

Derived here; statement and proof: ``docs/theory/ball-certificate.md``, "The decision".
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.errors import InputError
from lipscope.theorems.derived.ball import Ball
from lipscope.theorems.derived.intervals import BallName
from lipscope.theorems.head import UNIT, heads_of
from lipscope.theorems.head_at import HeadAt
from lipscope.theorems.register import NotApplicableError
from lipscope.theorems.spectrum import eigenvalue

Pool = Literal["mean", "first"]
_SLACK = 1e-9  # float64 rounding of the sums, with room
_FAR = 1e150  # beyond it, squares of radii overflow
_BALANCES = tuple(2.0**k for k in range(-5, 6))


def check_ball(ball: str) -> None:
    """Refuse other names than those of the two balls."""
    if ball not in ("token", "frobenius"):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")


class ReadOut:
    """Scores ``g_r(X) = <w_r, pool(f(X))>`` around one centre, ``r`` of them at once.

    For ``E`` in the ball of radius ``eps``

        ``|g_r(X + E) - g_r(X)| <= eps slope_r + int_0^eps (eps - s) curvature_r(s) ds``.

    Args:
        layer: The layer, in float64.
        x: Centre of the ball.
        w: Read-outs of the pooled output, ``(r, d_out)``.
        pool: ``mean`` over tokens, or the ``first``.
        ball: Which ball.
    """

    def __init__(
        self,
        layer: DotProduct,
        x: Float[Tensor, "n d"],
        w: Float[Tensor, "r d_out"],
        pool: Pool,
        ball: BallName,
    ) -> None:
        self.ball: BallName = ball
        self.share = x.new_zeros(len(x))
        self.share[:] = 1 / len(x)
        if pool == "first":
            self.share = (torch.arange(len(x)) == 0).to(x.dtype)
        self.gradients = torch.stack([_gradient(layer, x, each, self.share) for each in w])
        parts = w if layer.output is None else w @ layer.output
        seen = (w != 0).double()
        if layer.output is not None:
            seen = seen @ (layer.output != 0).double()
        heads = list(
            zip(
                heads_of(layer, fold=False),
                *(s.unflatten(1, (layer.num_heads, -1)).unbind(1) for s in (parts, seen)),
                strict=True,
            )
        )
        # No path of nonzero weights from a token: nothing that is read depends on the input.
        reads = [(s @ (head.value != 0).double()).any(1) for head, _, s in heads]
        self.blind = ~torch.stack(reads).any(0)
        sizes = w.norm(dim=1)
        outer = 1.0 if layer.output is None else layer.output.norm()
        # one row of values per read-out: what w makes of the head's values
        self.centres = [
            HeadAt(
                dataclasses.replace(
                    head, value=u @ head.value, size=float(sizes.max() * outer * head.value.norm())
                ),
                x,
            )
            for head, u, _ in heads
        ]

    @cached_property
    def slope(self) -> Tensor:
        """``>= sup <∇g_r(X), E>`` over the unit ball, ``(r,)``: with what rounding may hide."""
        hidden = sum(c.slack for c in self.centres)
        if self.ball == "frobenius":
            return self.gradients.flatten(1).norm(dim=1) + hidden
        return self.gradients.norm(dim=-1).sum(-1) + hidden * len(self.share) ** 0.5

    @cached_property
    def hidden(self) -> float:
        """What rounding may add to a difference of scores, biases left out."""
        total = 0.0
        for c in self.centres:
            moved = c.rounding * (c.p * c.nu).sum(-1)
            total += float(UNIT * len(c.x) ** 0.5 * c.head.size_v * c.x.norm(dim=1).max())
            total += 2 * float(moved.max())
        return total

    def radii(self, margins: Float[Tensor, " r"], steps: int) -> Float[Tensor, " r"]:
        """Radii within which ``g_r`` moves by less than its margin, as far as is proved.

        Exact only for the least of them, the others may be cut off at twice the least.

        Args:
            margins: Positive margins.
            steps: Pieces on which the curvature is taken as constant, from above.

        Raises:
            NotApplicableError: If derivatives overflow.
        """
        if bool(self.blind.all()):
            return torch.full_like(margins, math.inf)
        margins = (margins - self.hidden).masked_fill(self.blind, math.inf)
        if not bool((margins > 0).all()):  # a tie, up to rounding
            return torch.zeros_like(margins)
        top = self._scale(margins)
        if top == 0.0:
            raise NotApplicableError("no radius is small enough: its derivatives overflow")
        edges, bends, kept = [0.0], [], torch.zeros_like(margins)
        for step in range(1, 4 * steps + 1):  # pieces may reach beyond what one alone does
            edges.append(top * step / steps)
            bends.append(self.curvature(edges[-1]))
            reached = _largest(self.slope, edges, bends, margins)
            if not bool((reached > kept).any()):
                break
            kept = torch.maximum(kept, reached)
            if float(reached.min()) < edges[-1]:
                break
        return kept.masked_fill(self.blind, math.inf)

    def _scale(self, margins: Tensor) -> float:
        """A radius that nearly keeps all margins: half of it does; 0 if none does."""
        top = min(float((margins / self.slope).min()), _FAR)  # no larger one can be certified
        while top > 1 / _FAR and not self._keeps(top / 2, margins):
            top /= 2
        return top if top > 1 / _FAR else 0.0

    def _keeps(self, radius: float, margins: Tensor) -> bool:
        moved = radius * self.slope + radius**2 / 2 * self.curvature(radius)
        return bool((moved < margins).all())

    def curvature(self, radius: float) -> Tensor:
        """``>= |<E, H_r(X') E>|`` for X' within ``radius`` and E in the unit ball, ``(r,)``."""
        rows = [_Rows(Ball(centre, radius, self.ball)) for centre in self.centres]
        if self.ball == "token":
            each = [r.own + 2 * r.cross * r.spread + r.others * r.spread**2 for r in rows]
            found = torch.stack(each).sum(0) @ self.share
        else:
            found = self._over_frobenius(rows)
        # the slack, and no NaN from infinities that meet
        return torch.nan_to_num(found * (1 + _SLACK), nan=math.inf, posinf=math.inf)

    def _over_frobenius(self, rows: list[_Rows]) -> Tensor:
        """``min_κ max_j d_j``: the quadratic form made diagonal by ``2 A S <= κ A^2 + S^2 / κ``."""
        best = None
        for balance in _BALANCES:
            total = sum(
                self.share * (r.own + balance * r.cross)
                + (self.share * (r.others + r.cross / balance)) @ r.weights
                for r in rows
            )
            assert isinstance(total, Tensor)
            worst = total.amax(-1)
            best = worst if best is None else torch.minimum(best, worst)
        assert best is not None
        return best


class _Rows:
    """``|o''_i| <= own_i |e_i|^2 + 2 cross_i |e_i| S_i + others_i S_i^2``, each ``(r, n)``.

    ``S_i^2 >= Var_P'(<u, e>)`` for unit ``u``: ``spread_i^2`` in the unit token ball,
    ``sum_j weights_ij |e_j|^2`` in a Frobenius ball.
    """

    def __init__(self, ball: Ball) -> None:
        c, p = ball.c, ball.p
        self.ball = ball
        value, a = c.head.value, c.norm_a
        v = (value.norm(dim=1) + UNIT * c.head.size_v)[:, None]
        rho = ball.rho.amax(-1)
        # >= |e_j - sum_l P'_il e_l|, which is (1 - P'_ij) times a difference of two moves
        apart = 2 * p.apart * ball.visible_eps[:, None]
        moved = torch.minimum(apart, (ball.visible_eps + ball.shift)[:, None])
        # >= |z'_ij - z_ij|
        dz = a * moved + (p.change * c.mu).sum(-1, keepdim=True)
        parts = [self._moments(rows, v[..., None] * moved, dz) for rows in c.chunks()]
        spread_v, spread_z, third, mixed, top = (
            torch.cat(part, dim=-1) for part in zip(*parts, strict=True)
        )
        sd_v, sd_z = spread_v + v * ball.spread, spread_z + a * ball.spread
        self.own = third
        self.cross = v * sd_z + a * sd_v + rho * mixed
        self.others = 2 * self._linear(v, rho) + rho.square() * top

    def _moments(self, rows: slice, dv: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
        """Second and third moments of ``y'`` and ``z'`` in the rows, weighted by ``U``."""
        c, p = self.ball.c, self.ball.p
        upper, z, dz = p.upper[rows], c.z(rows), dz[rows]
        y = c.y(rows).permute(2, 0, 1)  # (r, rows, n)
        rounding = UNIT * c.head.size_v * c.x.norm(dim=-1).max()
        dy = dv[:, rows] + (p.change[rows] * y.abs()).sum(-1, keepdim=True) + rounding
        signed = [(s * y + dy).clamp_min(0.0) for s in (1, -1)]
        top = torch.stack([torch.where(upper > 0, s, 0.0).amax(-1) for s in signed]).amax(0)
        third = torch.stack([_root_of(upper * s, z, dz).square() for s in signed]).amax(0)
        mixed = _root_of(upper * torch.maximum(*signed).square(), z, dz)
        return (
            (upper * y.square()).sum(-1).sqrt(),
            _root_of(upper[None], z, torch.zeros_like(dz)),
            third,
            mixed,
            top,
        )

    def _linear(self, v: Tensor, rho: Tensor) -> Tensor:
        """``>= |Cov(<V, e>, <h', e>)| / S^2``: half of it where V and h are orthogonal."""
        c = self.ball.c
        if c.rotary is not None:
            return v * rho
        along = (c.head.value @ c.head.key.T @ c.q.T).abs()
        return (v * rho + torch.minimum(along + v * c.norm_a * self.ball.eps, v * rho)) / 2

    @cached_property
    def spread(self) -> Tensor:
        """``sqrt(Var)`` of the moves that a row reads, in the unit token ball, ``(n,)``."""
        return self.ball.spread / self.ball.eps

    @cached_property
    def weights(self) -> Tensor:
        """``C`` with ``Var_P'(<u, e>) <= sum_j C_ij |e_j|^2``, ``(n, n)``.

        ``U``; or, where one token holds nearly all the weight, moves relative to its own.
        """
        p = self.ball.p
        apart, best = p.apart.min(-1, keepdim=True)
        other = (2 * p.upper).scatter(-1, best, 2 * apart)
        return torch.where(
            other.sum(-1, keepdim=True) < p.upper.sum(-1, keepdim=True), other, p.upper
        )


def _largest(slope: Tensor, edges: list[float], bends: list[Tensor], margins: Tensor) -> Tensor:
    """The largest radii up to the last edge with ``eps slope + int (eps - s) bend ds < margin``."""
    low, high = torch.zeros_like(margins), torch.full_like(margins, edges[-1])
    left, right = torch.tensor(edges[:-1]).to(low), torch.tensor(edges[1:]).to(low)
    bend = torch.stack(bends, -1)

    def keeps(eps: Tensor) -> Tensor:
        far, near = ((eps[:, None] - edge).clamp_min(0.0).square() for edge in (left, right))
        bent = torch.where(far > near, bend * (far - near) / 2, 0.0)  # no inf * 0
        return (eps * slope + bent.sum(-1)) * (1 + _SLACK) < margins

    for _ in range(60):
        middle = (low + high) / 2
        held = keeps(middle)
        low, high = torch.where(held, middle, low), torch.where(held, high, middle)
    return torch.where(keeps(high), high, low)


def _root_of(weights: Tensor, z: Tensor, dz: Tensor) -> Tensor:
    """``>= sup_u sqrt(sum_j weights_ij <z'_ij, u>^2)`` for ``|z'_ij - z_ij| <= dz_ij``."""
    grams = [(part[..., None] * z).mT @ z for part in weights.view(-1, *z.shape[:2])]
    roots = torch.stack([eigenvalue(gram).sqrt() for gram in grams])
    return roots.view(weights.shape[:-1]) + (weights * dz.square()).sum(-1).sqrt()


def _gradient(layer: DotProduct, x: Tensor, w: Tensor, share: Tensor) -> Tensor:
    """``∇g(X)``, all heads and rows together."""
    point = x.clone().requires_grad_(True)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(share @ layer(point) @ w, point)
    return found
