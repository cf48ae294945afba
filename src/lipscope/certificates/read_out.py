"""Certified radius of linear read-outs of a single attention layer.

Deterministic up to float64 rounding: exact gradients at X, curvature elsewhere bounded by moments
of rows, without a matrix over all coordinates. Derived here; statements and proofs:
``docs/theory/ball-certificate.md``, "The decision".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.forms import gradient
from lipscope.linalg import eigenvalue
from lipscope.models import Network
from lipscope.theorems import UNIT, Ball, BallName, HeadAt, NotApplicableError, heads_of

Form = tuple[Tensor, Tensor, Tensor]
_SLACK = 1e-9  # float64 rounding of the sums, with a margin
_PIECES = 8  # of the integral
_OVERFLOWS = 1e150  # squares of larger radii overflow
_BALANCES = tuple(2.0**k for k in range(-5, 6))


def attention_alone(net: Network) -> DotProduct | None:
    """The attention layer of a network made only of it, a pool and a head; otherwise None."""
    if len(net.branches) != 1 or net.tail:
        return None
    (only,) = net.branches
    part = only.part
    return part if isinstance(part, DotProduct) and only.norm is None and not only.skip else None


def read_out_radius(net: Network, x: Float[Tensor, "n d"], ball: BallName) -> tuple[float, int]:
    """A certified radius for the decision of a single attention layer, by moments of rows.

    With ``g_l = <W_k - W_l, pool(f(X))> + b_k - b_l`` for decision ``k`` and rival ``l``, the exact
    ``∇g_l(X)``, all heads and rows together, and a bound ``M_l(s)`` of the second derivative over
    the ball of radius ``s``: the largest radius found with ``eps ‖∇g_l‖* + int_0^eps (eps - s)
    M_l(s) ds < g_l`` for all rivals; ``‖·‖*`` is the sum of the tokens' norms (``token``) or the
    Frobenius norm.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary embedding;
    exact where f is linear in X. Memory and time grow like ``n²`` and linearly with the classes.

    Args:
        net: One attention layer, a pool and a head.
        ball: ``token``: every token moves by at most the radius; ``frobenius``: all together.

    Returns:
        The radius, infinite if the scores do not depend on the input, and the rival that limits
        it.

    Raises:
        NotApplicableError: If the layer is of another kind, or derivatives overflow.

    Source: derived here; ``docs/theory/ball-certificate.md``, "The decision".
    """
    layer = attention_alone(net)
    if layer is None:
        raise NotApplicableError("it is no attention layer by itself")
    scores = net(x)
    label = int(scores.argmax())
    rivals = torch.tensor([c for c in range(len(scores)) if c != label])
    margins = scores[label] - scores[rivals]
    differences = net.head[label] - net.head[rivals]
    sizes = net.head.norm(dim=1).max()
    outer = 1.0 if layer.output is None else layer.output.norm()
    given = [(layer.value_bias, sizes * outer), (layer.output_bias, sizes), (net.bias, 1.0)]
    # for score differences, where added biases may cancel
    rounding = UNIT * sum(float(b.norm() * factor) for b, factor in given if b is not None)
    radii = margins * 0
    if bool((margins > 0).all()):
        radii = ReadOut(layer, x, differences, net.share, ball).radii(margins - rounding)
    worst = int((radii if bool((radii > 0).any()) else margins).argmin())
    return float(radii[worst]), int(rivals[worst])


class ReadOut:
    """Scores ``g_r(X) = <w_r, pool(f(X))>`` around a centre, ``r`` of them at once.

    For ``E`` in the ball of radius ``eps``

        ``g_r(X) - g_r(X + E) <= eps slope_r + int_0^eps (eps - s) B_r(s) ds``

    with ``B(s)`` the curvature within ``s``.
    """

    def __init__(
        self,
        layer: DotProduct,
        x: Float[Tensor, "n d"],
        w: Float[Tensor, "r d_out"],
        share: Float[Tensor, " n"],
        ball: BallName,
    ) -> None:
        self.ball: BallName = ball
        self.layer, self.x, self.w = layer, x, w
        self.share = share
        self.gradients = torch.stack([gradient(lambda z, u=u: share @ layer(z) @ u, x) for u in w])
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
        # Tokens without a path of nonzero weights: no read-out depends on the input.
        reads = [(s @ (head.value != 0).double()).any(1) for head, _, s in heads]
        self.blind = ~torch.stack(reads).any(0)
        sizes = w.norm(dim=1)
        outer = 1.0 if layer.output is None else layer.output.norm()
        # one row of values per read-out: w applied to the head's values
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
        """``>= sup <∇g_r(X), E>`` over the unit ball, ``(r,)``, including rounding errors."""
        hidden = sum(c.slack for c in self.centres)
        if self.ball == "frobenius":
            return self.gradients.flatten(1).norm(dim=1) + hidden
        return self.gradients.norm(dim=-1).sum(-1) + hidden * len(self.share) ** 0.5

    @cached_property
    def hidden(self) -> float:
        """Rounding error of a score difference, without biases."""
        total = 0.0
        for c in self.centres:
            moved = c.rounding * (c.p * c.nu).sum(-1)
            total += float(UNIT * len(c.x) ** 0.5 * c.head.size_v * c.x.norm(dim=1).max())
            total += 2 * float(moved.max())
        return total

    def radii(self, margins: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        """Radii within which ``g_r`` provably falls by less than its margin.

        Sharp only for the smallest one; the others may be truncated at twice that radius.
        """
        if bool(self.blind.all()):
            return torch.full_like(margins, math.inf)
        margins = (margins - self.hidden).masked_fill(self.blind, math.inf)
        if not bool((margins > 0).all()):  # a tie, up to rounding
            return torch.zeros_like(margins)
        top = self._scale(margins)
        if top == 0.0:
            raise NotApplicableError("no radius is small enough: its derivatives overflow")
        edges, pieces, kept = [0.0], [], torch.zeros_like(margins)
        for step in range(1, 4 * _PIECES + 1):  # pieces may extend beyond a single radius
            edges.append(top * step / _PIECES)
            pieces.append(self.curvature(edges[-1]))
            reached = _largest_radii(self.slope, edges, pieces, margins)
            if not bool((reached > kept).any()):
                break
            kept = torch.maximum(kept, reached)
            if float(reached.min()) < edges[-1]:
                break
        return kept.masked_fill(self.blind, math.inf)

    def _scale(self, margins: Tensor) -> float:
        """A radius that nearly preserves all margins: half of it does; 0 if none does."""
        top = min(float((margins / self.slope).min()), _OVERFLOWS)  # upper limit of certified radii
        while top > 1 / _OVERFLOWS:
            half = top / 2
            moved = half * self.slope + half**2 / 2 * self.curvature(half)
            if bool((moved < margins).all()):
                return top
            top = half
        return 0.0

    def curvature(self, radius: float) -> Tensor:
        """``>= |<E, H_r(X') E>|`` for X' within ``radius`` and E in the unit ball, ``(r,)``."""
        rows = [_Rows(Ball(c, radius, self.ball)) for c in self.centres]
        if self.ball == "token":
            found = torch.stack([r.over_tokens for r in rows]).sum(0) @ self.share
        else:  # `min_κ max_j d_j`
            balance = self.x.new_tensor(_BALANCES)[:, None, None]
            each = (r.balanced(self.share, balance) for r in rows)
            found = sum(each, balance.new_zeros(())).amax(-1).amin(0)
        # add the slack without NaN from infinities
        return torch.nan_to_num(found * (1 + _SLACK), nan=math.inf, posinf=math.inf)


class _Rows:
    """Forms ``own_i |e_i|^2 + 2 cross_i |e_i| S_i + others_i S_i^2`` of rows, each ``(r, n)``.

    They bound the second derivative of ``o_i`` along every E in the unit ball.
    ``S_i^2 >= Var_P'(<u, e>)`` for unit ``u``: ``spread_i^2`` in the unit token ball,
    ``sum_j weights_ij |e_j|^2`` in a Frobenius ball.
    """

    def __init__(self, ball: Ball) -> None:
        c, p = ball.c, ball.p
        self.ball, self.a = ball, c.norm_a
        self.v = (c.head.value.norm(dim=1) + UNIT * c.head.size_v)[:, None]
        self.rho = ball.rho.amax(-1)
        # >= |e_j - sum_l P'_il e_l|, which is (1 - P'_ij) times a difference of two moves
        apart = 2 * p.apart * ball.visible_eps[:, None]
        self.moved = torch.minimum(apart, (ball.visible_eps + ball.shift)[:, None])
        # >= |z'_ij - z_ij|
        self.dz = self.a * self.moved + (p.change * c.mu).sum(-1, keepdim=True)

    @cached_property
    def second(self) -> Form:
        """The form of the second derivative."""
        third, mixed, top = self._passed(self._moments)
        sd_v, sd_z = self.deviations
        cross = self.v * sd_z + self.a * sd_v + self.rho * mixed
        return third, cross, 2 * self._linear(self.v, self.rho) + self.rho.square() * top

    @cached_property
    def deviations(self) -> tuple[Tensor, Tensor]:
        """``>= sqrt(Var v')``, ``(r, n)``, and ``sqrt(λ(Cov z'))``."""
        ball = self.ball

        def roots(rows: slice) -> tuple[Tensor, ...]:
            upper, z = ball.p.upper[rows], ball.c.z(rows)
            y = ball.c.y(rows).permute(2, 0, 1)
            of_z = _root_of(upper[None], z, torch.zeros_like(upper))
            return (upper * y.square()).sum(-1).sqrt(), of_z

        of_v, of_z = self._passed(roots)
        return of_v + self.v * ball.spread, of_z + self.a * ball.spread

    def _passed(self, part: Callable[[slice], tuple[Tensor, ...]]) -> list[Tensor]:
        found = [part(rows) for rows in self.ball.c.chunks]
        return [torch.cat(each, dim=-1) for each in zip(*found, strict=True)]

    def _values(self, rows: slice) -> tuple[Tensor, Tensor]:
        """``y``, ``(r, rows, n)``, and ``>= |y' - y|``."""
        c, p = self.ball.c, self.ball.p
        y = c.y(rows).permute(2, 0, 1)
        rounding = UNIT * c.head.size_v * c.x.norm(dim=-1).max()
        dy = self.v[..., None] * self.moved[rows]
        return y, dy + (p.change[rows] * y.abs()).sum(-1, keepdim=True) + rounding

    def _moments(self, rows: slice) -> tuple[Tensor, ...]:
        """Moments of ``y'`` with two ``z'`` in the rows, weighted by ``U``; the largest ``y'``."""
        upper, z, dz = self.ball.p.upper[rows], self.ball.c.z(rows), self.dz[rows]
        y, dy = self._values(rows)
        signed = [(s * y + dy).clamp_min(0.0) for s in (1, -1)]
        top = torch.stack([torch.where(upper > 0, s, 0.0).amax(-1) for s in signed]).amax(0)
        third = torch.stack([_root_of(upper * s, z, dz).square() for s in signed]).amax(0)
        mixed = _root_of(upper * torch.maximum(*signed).square(), z, dz)
        return third, mixed, top

    def _linear(self, v: Tensor, rho: Tensor) -> Tensor:
        """``>= |Cov(<V, e>, <h', e>)| / S^2``: half of it where V and h are orthogonal."""
        c = self.ball.c
        if c.rotary is not None:
            return v * rho
        along = (c.head.value @ c.head.key.T @ c.q.T).abs()
        return (v * rho + torch.minimum(along + v * c.norm_a * self.ball.eps, v * rho)) / 2

    @property
    def over_tokens(self) -> Tensor:
        """Largest values of the forms in the unit token ball, ``(r, n)``."""
        own, cross, others = self.second
        spread = self.ball.spread / self.ball.eps
        return own + 2 * cross * spread + others * spread**2

    def balanced(
        self, share: Float[Tensor, " n"], balance: Float[Tensor, "k 1 1"]
    ) -> Float[Tensor, "k r n"]:
        """The sum of the rows, diagonalised in tokens by ``2 A S <= κ A^2 + S^2 / κ``."""
        own, cross, others = self.second
        found = share * (own + balance * cross)
        return found + (share * (others + cross / balance)) @ self.weights

    @cached_property
    def weights(self) -> Tensor:
        """``C`` with ``Var_P'(<u, e>) <= sum_j C_ij |e_j|^2``, ``(n, n)``.

        ``U``, or, if one token has nearly all the weight, from moves relative to its own.
        """
        p = self.ball.p
        apart, best = p.apart.min(-1, keepdim=True)
        other = (2 * p.upper).scatter(-1, best, 2 * apart)
        return torch.where(
            other.sum(-1, keepdim=True) < p.upper.sum(-1, keepdim=True), other, p.upper
        )


def _largest_radii(
    slope: Tensor, edges: list[float], pieces: list[Tensor], margins: Tensor
) -> Tensor:
    """The largest radii up to the last edge with ``eps slope + int (eps - s) B(s) ds < margin``.

    ``B`` is constant on each piece.
    """
    least, most = torch.zeros_like(margins), torch.full_like(margins, edges[-1])
    left, right = torch.tensor(edges[:-1]).to(most), torch.tensor(edges[1:]).to(most)
    bend = torch.stack(pieces, -1)

    def keeps(eps: Tensor) -> Tensor:
        far, near = ((eps[:, None] - edge).clamp_min(0.0) for edge in (left, right))
        # no inf * 0
        bent = torch.where(far > near, bend * (far.square() - near.square()) / 2, 0.0)
        return (eps * slope + bent.sum(-1)) * (1 + _SLACK) < margins

    whole = keeps(most)
    if bool(whole.all()):
        return most
    for _ in range(60):
        middle = (least + most) / 2
        held = keeps(middle)
        least, most = torch.where(held, middle, least), torch.where(held, most, middle)
    return torch.where(whole, edges[-1], least)


def _root_of(weights: Tensor, z: Tensor, dz: Tensor) -> Tensor:
    """``>= sup_u sqrt(sum_j weights_ij <z'_ij, u>^2)`` for ``|z'_ij - z_ij| <= dz_ij``."""
    grams = [(part[..., None] * z).mT @ z for part in weights.view(-1, *z.shape[:2])]
    roots = torch.stack([eigenvalue(gram).sqrt() for gram in grams])
    return roots.view(weights.shape[:-1]) + (weights * dz.square()).sum(-1).sqrt()
