"""Lower bounds over a ball of a network's margin between two classes.

Derived here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import Attention, Clip, DotProduct
from lipscope.certificates.forms import (
    OutOfReachError,
    added,
    ellipsoid,
    least_in_ball,
    least_in_balls,
    norm_above,
    positive_part,
    young,
)
from lipscope.certificates.segment import Secant, Segment, distance, square_axes
from lipscope.errors import InputError
from lipscope.models import Branch, Network

_SPREAD = 1.7  # of a unit's squared reach, over the root of the number of moving coordinates
_LEAST = 1e-6  # smallest axis of an ellipsoid relative to the largest


def segments_of(branches: tuple[Branch, ...]) -> list[tuple[Branch, ...]]:
    """Split branches before every attention."""
    found: list[list[Branch]] = [[]]
    for branch in branches:
        if isinstance(branch.part, DotProduct) and found[-1]:
            found.append([])
        found[-1].append(branch)
    return [tuple(one) for one in found]


def without_tail(net: Network) -> Network:
    """The network with a token-wise tail if a single token is read."""
    read = net.share.nonzero()
    if not net.tail or len(read) > 1 or float(net.share[read[0, 0]]) != 1.0:
        return net
    return replace(net, branches=net.branches + net.tail, tail=())


def _check(branch: Branch) -> None:
    """Refuse scores and values not supported by the bounds."""
    layer, found = branch.part, None
    if isinstance(branch.norm, Clip) or not isinstance(branch.skip, bool):
        found = "a clip of tokens" if isinstance(branch.norm, Clip) else "a weighted residual sum"
    elif isinstance(layer, Attention) and not isinstance(layer, DotProduct):
        found = f"a layer of `{type(layer).__name__}`"
    elif isinstance(layer, Attention) and any(norm is not None for norm in layer.norms()):
        found = "a layer with norms of queries, keys or values"
    elif isinstance(layer, Attention) and layer.softcap is not None:
        found = "a layer with a soft cap of its scores"
    if found is not None:
        raise InputError(
            "`net` should hold attention with scores `<Q x_i + b, K x_j + c>`, norms and plain "
            f"residual sums. Found {found}; no decision through it is certified."
        )


class NetworkBall:
    """A network on balls of moves of some tokens: the quantities shared by all margins.

    Args:
        tokens: Mask of the moving tokens.
    """

    def __init__(self, net: Network, x: Float[Tensor, "n d"], tokens: Bool[Tensor, " n"]) -> None:
        for branch in (*net.branches, *net.tail):
            _check(branch)
        self.net, self.x, self.tokens = without_tail(net), x, tokens
        n, d = x.shape
        eye = torch.eye(int(tokens.sum()) * d, dtype=x.dtype)
        self.moves = x.new_zeros(n * d, len(eye))
        self.moves[tokens.repeat_interleave(d)] = eye
        self.moves = self.moves.view(n, d, -1)
        self.cuts = segments_of(self.net.branches)
        self.pooled = bool(self.net.tail)
        read = self.net.share.nonzero()[:, 0]
        self.read = torch.arange(n) if self.pooled else read
        self.share = self.net.share[self.read]
        self._first = self._segment(0, x, self.moves)
        self.chain: list[Segment] = []
        self.radius = 0.0

    def _segment(self, k: int, x: Tensor, t: Tensor) -> Segment:
        last = k == len(self.cuts) - 1
        return Segment(self.cuts[k], x, t, self.read if last else None, last and not self.pooled)

    def grow(self, radius: float) -> bool:
        """Bound everything within this radius; False if no bound holds there."""
        self.radius, self.chain = radius, [self._first]
        try:
            self._first.grow(radius)
            for k in range(1, len(self.cuts) + self.pooled):
                below = self.chain[-1]
                x, secant = below.through(below.x)[-1], below.secant(below.x, 0.0)
                if k < len(self.cuts):
                    mixed = any(one.mixes for one in self.chain)
                    moving = torch.ones_like(self.tokens) if mixed else self.tokens
                    above = self._segment(k, x, self._axes(secant, x, moving))
                else:  # after the pool
                    x, secant = (self.share @ x)[None], self._pool(secant)
                    t = self._axes(secant, x, self.tokens.new_ones(1))
                    above = Segment(self.net.tail, x, t, last=True)
                self.chain.append(above)
                above.grow(radius)
        except OutOfReachError:
            self.chain = []
        return bool(self.chain)

    def _axes(self, s: Secant, x: Float[Tensor, "n d"], moving: Bool[Tensor, " n"]) -> Tensor:
        """``T``, ``(n, d, p)``, such that ``(M + G Z + R) xi`` is in its ellipsoid for unit ``xi``.

        For the moving tokens only: before any mixing, all others are fixed.
        """
        rows = moving.repeat_interleave(x.shape[1])
        eye = torch.eye(int(rows.sum()), dtype=x.dtype)
        least = _LEAST * (norm_above(s.middle) + 1e-30)
        parts = [(s.middle[rows], 1.0), (eye, least)]
        parts += [(one.outer[rows], one.size) for one in s.loose]
        w = young(*(float(m.norm() * size) for m, size in parts))
        e = sum(
            (m @ m.T * (size**2 / share) for (m, size), share in zip(parts, w, strict=True)),
            0 * eye,
        )
        t = x.new_zeros(x.numel(), len(eye))
        t[rows] = ellipsoid(e)
        return t.view(*x.shape, -1)

    def _pool(self, s: Secant) -> Secant:
        """The secant of the pooled vector."""

        def mean(m: Tensor) -> Tensor:
            return torch.einsum("n,ndp->dp", self.share, m.unflatten(0, (len(self.share), -1)))

        return s.read(mean)

    def margin(self, x: Tensor, label: int, rival: int) -> Tensor:
        """Score of ``label`` minus score of ``rival``."""
        s = self.net(x)
        return s[label] - s[rival]

    def moved(self, move: Tensor) -> Tensor:
        """The stream after a move of the moving tokens."""
        return self.x + self.moves @ move

    def reach(self, w: Float[Tensor, "c d"]) -> Float[Tensor, " c"]:
        """``>= |<w_c, pool(x_L) - pool(x_L)_0>|`` within the radius, for many read-outs at once."""
        one = self.chain[-1]
        share = one.x.new_ones(1) if self.pooled else self.share
        end, reads = one.end, one.reads
        j = torch.einsum("n,ndp->dp", share, end.jacobian)
        rest = end.rest
        if reads.ball is not None:
            rest = rest + torch.linalg.matrix_norm(end.lin, 2) * reads.rows_moved * self.radius
        return (w @ j).norm(dim=1) * self.radius + w.norm(dim=1) * float(share.abs() @ rest)

    def lower(
        self, move: Tensor, label: int, rival: int, balls: int | None = None
    ) -> tuple[float, Tensor]:
        """A lower bound of the margin over the ball, anchored at a move, and its minimiser.

        ``balls``: number of tokens that move by at most ``radius / sqrt(balls)`` each, instead of a
        joint ball.
        """
        x = self.moved(move)
        anchors, starts = [x], [float(move.norm())]
        for below, above in itertools.pairwise(self.chain):
            out = below.through(anchors[-1])[-1]
            if above is self.chain[-1] and self.pooled:
                out = (self.share @ out)[None]
            anchors.append(out)
            starts.append(min(distance(above.t, out - above.x), self.radius))
        w = self.net.head[label] - self.net.head[rival]
        slope = w[None] if self.pooled else self.share[:, None] * w
        # parabolas are optimised for typical distances of minima from an anchor; any are valid
        spread = min(0.3, _SPREAD / len(move) ** 0.5)
        spread *= max(1 - float(move.norm()) / self.radius, 0.01)
        lost, carried = 0.0, None
        b = g = x
        for k in range(len(self.chain) - 1, -1, -1):
            one = self.chain[k]
            gap, g, b = one.minorant(anchors[k], starts[k], slope, spread)
            lost += gap
            if carried is not None:
                s = one.secant(anchors[k], starts[k])
                s = self._pool(s) if self.pooled and k == len(self.chain) - 2 else s
                b = b - _carried(s, carried)
            if k:
                rows, side = square_axes(one.t)
                inverse = torch.zeros_like(one.t.flatten(0, 1).T)
                inverse[:, rows] = torch.linalg.inv(side)
                slope = (inverse.T @ g).view(one.x.shape)
                carried = inverse.T @ positive_part(-b) @ inverse
                if self.pooled and k == len(self.chain) - 1:
                    slope = self.share[:, None] * slope
        value = float(self.margin(x, label, rival)) - lost
        g = g - b @ move
        value = value - float(g @ move) - float(move @ b @ move) / 2
        if balls is None:
            return least_in_ball(value, g, b, self.radius)
        return least_in_balls(value, g, b, self.radius / balls**0.5, balls), move


def _carried(s: Secant, k: Tensor) -> Tensor:
    """``K'`` with ``<f, K' f> >= <S f, K S f>`` for the secant map ``S``."""
    return added([s.middle.T @ k @ s.middle, *(one.form(k) for one in s.loose)])
