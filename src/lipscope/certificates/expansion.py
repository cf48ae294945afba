"""Second-order remainder of attention over a ball, for all heads in one matrix.

``‖f(X + E) - f(X)‖ / ‖E‖ <= ‖J(X)‖ + sup ‖rest(E)‖ / ‖E‖``: unlike a bound of every Jacobian in
the ball, this uses the spread of attention weights only in a second-order term. Derived here;
statement and proof: ``docs/theory/ball-certificate.md``, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.linalg import eigenvalue
from lipscope.theorems import Ball, BallName, HeadAt

_PIECES = 8  # of the segment from X to X + E; intervals are evaluated at the end of each
ENDS = tuple((piece + 1) / _PIECES for piece in range(_PIECES))  # as fractions of the segment
_ROUNDS = 2  # of the search for weights between heads
_SHARES = (0.4, 0.8, 1.6)  # values of t for (a + b)^2 <= (1 + t) a^2 + (1 + 1/t) b^2
_CHUNK = 2**26  # bytes per chunk of row or column matrices
_TINY = 1e-150
_SLACK = 1e-10  # float64 rounding of the weighted sums, with a margin


def rest(
    heads: Sequence[tuple[HeadAt, Channel]],
    output: Tensor | None,
    *,
    together: bool = True,
    apart: bool = True,
) -> tuple[float, list[float]]:
    """``>= ‖f(X + E) - f(X) - J(X) E‖ / ‖E‖`` for every nonzero ``E`` in the ball.

    For all heads ``together``, not folded with ``output`` (None: concatenated), and ``apart`` for
    each head, from its `HeadPath`; infinite on overflow, and for ``together`` if not requested.
    """
    widths = [c.v.shape[1] for c, _ in heads]
    if output is None:
        output = torch.eye(sum(widths), dtype=torch.float64)
    parts = output.split(widths, 1)
    found = [(c, part, channel) for (c, channel), part in zip(heads, parts, strict=True)]
    if len(found) == 1:
        alone = Summed(found).norm()
        return alone, [alone]
    each = [Summed([head]).norm() for head in found] if apart else []
    return (Summed(found).norm() if together else math.inf), each


class Summed:
    """The remainder of several heads, ``sum_h W_h r_h``, from bounds of each ``r_h``."""

    def __init__(self, heads: Sequence[tuple[HeadAt, Tensor, Channel]]) -> None:
        self.centres = [centre for centre, _, _ in heads]
        self.channels = [channel for _, _, channel in heads]
        # ‖W r‖ = ‖T r‖ for W = U T, and |K^T q| = |R q| for K^T = B R
        self.parts = _triangular([part for _, part, _ in heads])
        self.keys = _triangular([c.head.key.T for c in self.centres])

    def norm(self) -> float:
        """``>= ‖sum_h W_h r_h(E)‖ / ‖E‖``; infinite on overflow."""
        channels = self.channels
        if not all(bool(one.isfinite().all()) for c in channels for one in vars(c).values()):
            return math.inf
        own = torch.stack([c.own for c in channels])
        reach = torch.stack([c.own + c.read for c in channels])
        size = torch.stack(
            [_channel_size(*pair) for pair in zip(self.parts, channels, strict=True)]
        )
        gamma = (reach + _TINY) / (size + _TINY)
        best = math.inf
        for _ in range(_ROUNDS if len(channels) > 1 else 1):
            top, seen = self._rows(channels, gamma)
            best = min(best, self._norm(channels, own, top, gamma))
            gamma = (gamma * (reach + _TINY) / seen).sqrt()
        return best * (1 + _SLACK) if math.isfinite(best) else math.inf

    def _rows(self, channels: list[Channel], gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Top eigenvalue of ``sum_h gamma_h W_h N_h W_h^T`` per row, and its parts by head.

        These are ``|z^T W_h N_h W_h^T z|^(1/2)`` for ``z`` near the top eigenvector, ``(H, n)``.
        """
        m, n = self.parts[0].shape[0], gamma.shape[1]
        step = max(1, _CHUNK // (8 * m * m))
        tops, seen = [], []
        for rows in (slice(i, min(i + step, n)) for i in range(0, n, step)):
            whole = torch.zeros(rows.stop - rows.start, m, m, dtype=torch.float64)
            for part, channel, g in zip(self.parts, channels, gamma, strict=True):
                whole += part @ (g[rows, None, None] * channel.gram[rows]) @ part.T
            if not bool(torch.isfinite(whole).all()):
                return torch.full((n,), torch.inf, dtype=torch.float64), torch.ones_like(gamma)
            values, vectors = torch.linalg.eigh(whole)
            tops.append(values[:, -1].clamp_min(0.0))
            share = (values[:, -4:].clamp_min(0) / values[:, -1:].clamp_min(_TINY)) ** 4
            share = share / share.sum(-1, keepdim=True).clamp_min(_TINY)
            z = [part.T @ vectors[:, :, -4:] for part in self.parts]
            squares = [
                ((channel.gram[rows] @ one) * one).sum(1)
                for one, channel in zip(z, channels, strict=True)
            ]
            seen.append(torch.stack([(s * share).sum(-1).clamp_min(0).sqrt() for s in squares]))
        found = torch.cat(seen, 1)
        return torch.cat(tops), torch.maximum(found, 1e-6 * found.amax(0) + _TINY)

    def _norm(self, channels: list[Channel], own: Tensor, top: Tensor, gamma: Tensor) -> float:
        """``max_j`` of the effect of token j, through its own row and all rows attending to it."""
        mine = (top * (own.square() / gamma).sum(0)).sqrt()
        read = (top * (torch.stack([c.read for c in channels]).square() / gamma).sum(0)).sqrt()
        # any positive share is valid; rows dominated by other tokens need a large one
        even = ((read + _TINY) / (mine + 1e-3 * mine.max() + _TINY)).sqrt()
        return min(
            self._columns(channels, mine.square() * (1 + t), top * (1 + 1 / t) / gamma)
            for t in (share * even for share in _SHARES)
        )

    def _columns(self, channels: list[Channel], mine: Tensor, weights: Tensor) -> float:
        """``sqrt(max_j (mine_j + lam_max(sum_i sum_h w_hi weights_hij h_hij h_hij^T)))``."""
        found, grams = [], []
        for j in range(len(mine)):
            queries = (_query_at(c, j) for c in self.centres)
            rows = torch.cat([
                (w * channel.weights[:, j]).sqrt()[:, None] * (q @ keys.T)
                for w, channel, q, keys in zip(weights, channels, queries, self.keys, strict=True)
            ])  # fmt: skip
            gram = rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows
            grams.append(gram)
            if 8 * gram.numel() * len(grams) >= _CHUNK or j == len(mine) - 1:
                found.append(eigenvalue(torch.stack(grams)))
                grams = []
        most = float((mine + torch.cat(found)).max())  # NaN if any is
        return math.sqrt(most) if math.isfinite(most) else math.inf


@dataclass
class Channel:
    """A bound of a remainder term: ``<u, r_i> <= sqrt(u^T N_i u) (own_i |e_i| + read_i(E))``.

    ``read_i(E)^2 = sum_j weights_ij <h_ij, e_j>^2``.
    """

    gram: Tensor  # ``N_i``, ``(n, k_v, k_v)``
    size: Tensor  # ``>= ‖N_i‖^(1/2)``, ``(n,)``
    own: Tensor  # ``(n,)``
    weights: Tensor  # ``(n, n)``
    read: Tensor  # ``>= read_i(E) / ‖E‖``, ``(n,)``

    @property
    def bound(self) -> Tensor:
        """``>= |r_i| / ‖E‖``."""
        return self.size * (self.own + self.read)


class HeadPath:
    """One head on the segment from ``X`` to ``X + E``, in pieces with intervals up to their ends.

    ``known``: its balls at fractions of ``eps``; the fraction 0 is X itself.
    """

    def __init__(
        self, centre: HeadAt, eps: Tensor, ball: BallName, known: Mapping[float, Ball]
    ) -> None:
        self.c, self.eps = centre, eps
        self.still = known.get(0.0) or Ball(centre, 0.0)
        radii = [float(eps[0]) * t if ball == "frobenius" else eps * t for t in ENDS]
        self.at = [known.get(t) or Ball(centre, r, ball) for t, r in zip(ENDS, radii, strict=True)]
        self.bend = centre.norm_a * self.at[-1].visible_eps  # >= |<A e_i, e_j>| / |e_i|

    def whole(self) -> Channel:
        """All remainder terms of this head combined."""
        pieces = range(_PIECES)
        third = _merged_channels(
            [self.cumulant(k) for k in pieces]
            + [self.curvature(self.at[k].sums, 2 * self._times(k)[1]) for k in pieces]
        )
        change = _merged_channels(
            [*(self.difference(k) for k in pieces), self.curvature(self.still.sums, 1.0)]
        )
        # one choice per row for the whole segment
        moved = _select_channel(change.bound < third.bound, change, third)
        return _merged_channels([moved, *(self.values(k) for k in pieces)])

    def _times(self, piece: int) -> tuple[float, float]:
        """Integrals of ``1`` and ``1 - t`` over a piece."""
        begin, end = ENDS[piece] - 1 / _PIECES, ENDS[piece]
        return end - begin, end - begin - (end**2 - begin**2) / 2

    def _channel(self, gram: Tensor, size: Tensor, part: Tensor, own: Tensor, w: Tensor) -> Channel:
        read = (w * self.c.rho.square()).sum(-1).sqrt()
        return Channel(gram * part.square()[:, None, None], part * size, own, w, read)

    def cumulant(self, piece: int) -> Channel:
        """``integral (1 - t) kappa_t(v, s', s')``: a third cumulant, from the range of ``s'``."""
        at, sums = self.at[piece], self.at[piece].sums
        bend = 2 * ENDS[piece] * self.bend
        part = self._times(piece)[1] * _logit_speed(self.c, self.eps, bend, at.ball)
        own = sums["upper_a"].sqrt() + bend
        return self._channel(sums["upper_y"], sums["upper_v"].sqrt(), part, own, at.p.upper)

    def difference(self, piece: int) -> Channel:
        """``integral Cov_t(v, s') - Cov(v, s')`` from ``D``: small where a row is saturated.

        Logits are relative to that of the token ``r_i`` with the largest weight.
        """
        at, sums = self.at[piece], self.at[piece].sums
        most = self.c.p.argmax(-1, keepdim=True)
        upper, change = (w.scatter(-1, most, 0.0) for w in (at.p.upper, at.p.change))
        mass = upper.sum(-1, keepdim=True)
        # (a + b)^2 <= (1 + m) a^2 + (1 + 1/m) b^2
        weights = (1 + mass) * change + 2 * (1 + mass) * change.sum(-1, keepdim=True) * upper
        total = weights.sum(-1, keepdim=True)
        bend = 2 * ENDS[piece] * self.bend
        own = self._apart(weights, most[:, 0]).sqrt() + 2 * bend * total[:, 0].sqrt()
        weights = 2 * weights.scatter(-1, most, total)
        part = torch.full_like(bend, self._times(piece)[0])
        return self._channel(sums["change_y"], sums["change_v"].sqrt(), part, own, weights)

    def _apart(self, weights: Tensor, most: Tensor) -> Tensor:
        """Largest eigenvalue of ``sum_j w_ij (z_ij - z_ir) (z_ij - z_ir)^T``, ``(n,)``."""
        found = []
        for rows, _, z in self.c.pieces:
            apart = z - z[torch.arange(len(z)), most[rows], None]
            found.append(eigenvalue((weights[rows, :, None] * apart).mT @ apart))
        return torch.cat(found)

    def values(self, piece: int) -> Channel:
        """``integral Cov_t(V e, s')``: the contribution of moving values."""
        at, end = self.at[piece], ENDS[piece]
        bend = 2 * end * self.bend
        gram = self.c.gram_v.expand(len(bend), -1, -1)
        size = torch.full_like(bend, self.c.head.norm_v)
        part = self._times(piece)[0] * at.spread / end
        return self._channel(gram, size, part, at.sums["upper_a"].sqrt() + bend, at.p.upper)

    def curvature(self, sums: dict[str, Tensor], part: float) -> Channel:
        """``integral (1 - t) Cov_t(v, s'')``: logits are bilinear, ``s'' = 2 <A e_i, e_j>``.

        Or ``integral Cov(v, t s'')`` with the weights at X, from the ``sums`` there.
        """
        size, parts = sums["upper_v"].sqrt(), torch.full_like(self.bend, part)
        return self._channel(sums["upper_y"], size, parts, self.bend, torch.zeros_like(self.c.p))


def _triangular(blocks: list[Tensor]) -> list[Tensor]:
    """Blocks of columns up to a common orthogonal factor."""
    factor = torch.linalg.qr(torch.cat(blocks, 1), mode="r").R
    return list(factor.split([block.shape[1] for block in blocks], 1))


def _channel_size(part: Tensor, channel: Channel) -> Tensor:
    """``‖W N_i W^T‖^(1/2)``, ``(n,)``."""
    (small,) = _triangular([part])
    return eigenvalue(small @ channel.gram @ small.T).sqrt()


def _select_channel(mask: Tensor, a: Channel, b: Channel) -> Channel:
    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *(x.ndim - 1) * [1]), x, y)

    return Channel(*map(chosen, vars(a).values(), vars(b).values()))


def _merged_channels(channels: list[Channel]) -> Channel:
    """A channel for the sum of channels, by the Cauchy-Schwarz inequality."""
    scales = [(c.own + c.read + _TINY) / (c.size + _TINY) for c in channels]
    pairs = list(zip(scales, channels, strict=True))

    def total(parts: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(0)

    return Channel(
        gram=total(g[:, None, None] * c.gram for g, c in pairs),
        size=total(g * c.size.square() for g, c in pairs).sqrt(),
        own=total(c.own.square() / g for g, c in pairs).sqrt(),
        weights=total(c.weights / g[:, None] for g, c in pairs),
        read=total(c.read.square() / g for g, c in pairs).sqrt(),
    )


def _logit_speed(c: HeadAt, eps: Tensor, bend: Tensor, ball: BallName) -> Tensor:
    """``>= |<e_i, z_ij> + <h_ij, e_j>| + bend_i |e_i|``: the speed of a logit, ``(n,)``."""
    both = c.mu * eps[:, None] + c.rho * eps
    if ball == "frobenius":
        apart = (c.mu.square() + c.rho.square()).sqrt() * eps[:, None]
        both = torch.where(torch.eye(len(eps), dtype=torch.bool), both, apart)
    return both.masked_fill(~c.allowed, 0.0).amax(-1) + bend * eps


def _query_at(c: HeadAt, j: int) -> Tensor:
    """``R_j^T q_i`` for every row i, ``(n, k)``."""
    if c.rotary is None:
        return c.q
    return c.turned_back(slice(j, j + 1), c.q[:, None])[:, 0]
