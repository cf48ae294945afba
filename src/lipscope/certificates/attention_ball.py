"""Attention all over an ellipsoid of inputs: its weights, and changes of its derivatives.

Inputs are ``x_0 + T xi`` with ``|xi| <= r``. Everything is a functional of ``xi``. Derived here;
proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.forms import (
    SLACK,
    norm_above,
    top_bilinear,
    top_of_gram,
    top_value,
    weighted_gram,
)

PIECES = 8  # radii of the grid on which what grows with the radius is bounded
_CANCELS = 1e-13  # of the sizes of terms whose sum may vanish: rounding, with room
_TINY = 1e-300  # a weight below it is one that underflows
_FEW = 2e7  # largest tensor of forms of the pairs both of whose ends move
_EXACT = 5e7  # largest tensor of second derivatives of all outputs that is formed


def extreme_mean(
    g: Float[Tensor, "*#b n"], lower: Float[Tensor, "*#b n"], upper: Float[Tensor, "*#b n"]
) -> Float[Tensor, "*_"]:
    """``sup <p, g>`` over weights ``lower <= p <= upper`` that add up to 1: greedy, exact."""
    g, lower, upper = torch.broadcast_tensors(g, lower, upper)
    order = g.argsort(-1, descending=True)
    room = (upper - lower).gather(-1, order)
    left = (1 - lower.sum(-1, keepdim=True)).clamp_min(0)
    given = torch.minimum((left - (room.cumsum(-1) - room)).clamp_min(0), room)
    return (lower * g).sum(-1) + (given * g.gather(-1, order)).sum(-1)


def extreme_size(g: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """``sup |<p, g>|`` over the same weights."""
    above, below = extreme_mean(g, lower, upper), extreme_mean(-g, lower, upper)
    return torch.maximum(above, below).clamp_min(0)


class AttentionAt:
    """Rows of a layer at one centre, as functionals of ``xi``: heads ``h``, rows ``i``, keys ``j``.

    Attributes:
        p: Weights ``P``, ``(h, i, j)``.
        a: Velocities of logits, centred: ``<q_i, K_j f> + <Q_i f, k_j>``, ``(h, i, j, p)``.
        query: ``Q_i T``, with half of the scale, ``(h, i, k, p)``; ``key``: ``K_j T``, likewise.
        value: ``V_j T``, ``(h, j, kv, p)``.
        v: Values, centred by ``P``, through the output projection, ``(h, i, j, d_out)``.
    """

    def __init__(
        self, layer: DotProduct, x: Float[Tensor, "n d"], t: Float[Tensor, "n d p"], rows: Tensor
    ) -> None:
        self.rows = rows
        q0, k0, v0 = layer.project(x)
        moved = layer.project(x + t.movedim(-1, 0))
        # affine maps of tokens: differences are exact up to rounding
        dq, dk, dv = (
            m.movedim(0, -1) - z[..., None] for m, z in zip(moved, (q0, k0, v0), strict=True)
        )
        still = (t == 0).flatten(1).all(1)
        for m in (dq, dk, dv):
            m[:, still] = 0.0
        self.p = layer.weights(q0, k0)[:, rows]
        self.query, self.key, self.value = dq[:, rows], dk, dv
        heads, n = self.p.shape[0], len(x)
        wide = layer.output if layer.output is not None else torch.eye(heads * v0.shape[-1]).to(x)
        self.output = wide.unflatten(1, (heads, -1)).movedim(1, 0)  # (h, d_out, kv)
        allowed = layer.visible(slice(0, n), slice(0, n))
        allowed = torch.ones(n, n, dtype=torch.bool) if allowed is None else allowed
        self.hidden = ~allowed.expand(heads, n, n)[:, rows]
        p = self.p
        velocity = torch.einsum("hik,hjkp->hijp", q0[:, rows], dk)
        velocity = velocity + torch.einsum("hikp,hjk->hijp", self.query, k0)
        velocity = velocity.masked_fill(self.hidden[..., None], 0.0)
        self.velocity = torch.einsum("hijp,hij->hip", velocity, self.single.to(p.dtype))
        self.a = velocity - torch.einsum("hij,hijp->hip", p, velocity)[:, :, None]
        self.a = self.a.masked_fill(self.hidden[..., None], 0.0)
        centred = v0[:, None] - (p @ v0)[:, :, None]
        self.v = torch.einsum("hdk,hijk->hijd", self.output, centred)
        self.v = self.v.masked_fill(self.hidden[..., None], 0.0)
        self.mean_value = torch.einsum("hij,hjkp->hikp", p, dv)
        self.jacobian = torch.einsum("hdk,hikp->idp", self.output, self.mean_value)
        self.jacobian = self.jacobian + torch.einsum("hij,hijd,hijp->idp", p, self.v, self.a)
        self.n, self.heads, self.count = n, heads, t.shape[-1]
        self._leads: list[tuple[Tensor, Tensor]] = []

    # --- once

    @cached_property
    def gram_a(self) -> Tensor:
        """``<a_j, a_l>``, ``(h, i, j, l)``."""
        return self.a @ self.a.mT

    @cached_property
    def gram_key(self) -> Tensor:
        """Of the rows of all ``K_j T``, ``(h, j k, j k)``."""
        rows = self.key.flatten(1, 2)
        return rows @ rows.mT

    @cached_property
    def gram_query(self) -> Tensor:
        """Of the rows of all ``Q_i T``, ``(h i k, h i k)``."""
        rows = self.query.flatten(0, 2)
        return rows @ rows.T

    @cached_property
    def norm_query(self) -> Tensor:
        """``‖Q_i T‖``, ``(h, i)``."""
        return top_value(self.query @ self.query.mT).sqrt()

    @cached_property
    def bend(self) -> Tensor:
        """``>= sup |<Q_i T e, (K_j - sum_l P_il K_l) T e>|`` over unit ``e``, ``(h, i, j)``."""
        mean = torch.einsum("hij,hjkp->hikp", self.p, self.key)
        apart = self.key[:, None] - mean[:, :, None]
        return top_bilinear(self.query[:, :, None], apart)

    @cached_property
    def bend_apart(self) -> Tensor:
        """The same for ``K_l - K_j``, ``(h, i, j, l)``."""
        apart = (self.key[:, None] - self.key[:, :, None])[:, None]
        return top_bilinear(self.query[:, :, None, None], apart)

    def key_spread(self, w: Float[Tensor, "h i j"]) -> Float[Tensor, "h i"]:
        """``sup (sum_j w_ij |K_j T e|^2)^(1/2)`` over unit ``e``."""
        root = w.clamp_min(0).sqrt().repeat_interleave(self.key.shape[2], -1)
        return top_value(self.gram_key[:, None] * root[..., :, None] * root[..., None, :]).sqrt()

    def together(self, c: Float[Tensor, "h i"]) -> Tensor:
        """``sup (sum_hi c_hi^2 |Q_i T e|^2)^(1/2)`` over unit ``e``."""
        w = c.clamp_min(0).reshape(-1).repeat_interleave(self.query.shape[2])
        return top_value(self.gram_query * w[:, None] * w).sqrt()

    def spread(self, w: Float[Tensor, "h i j"]) -> Tensor:
        """``λ(sum_j w_ij a_j a_j^T)^(1/2)``, ``(h, i)``."""
        root = w.clamp_min(0).sqrt()
        return top_value(self.gram_a * root[..., :, None] * root[..., None, :]).sqrt()

    @cached_property
    def turns(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor] | None:
        """Pairs ``(h, i, j)`` both of whose ends move, ``S^2`` and ``|S|``; None beyond two tokens.

        ``S = (T^T Q_i^T K_j T + T^T K_j^T Q_i T) / 2``.
        """
        both = (self.query.norm(dim=(-2, -1)) > 0)[:, :, None] & ~self.hidden
        both = both & (self.key.norm(dim=(-2, -1)) > 0)[:, None]
        pairs = int(both.sum())
        if pairs > 4 * self.heads or pairs * self.count**2 > _FEW:
            return None
        h, i, j = where = both.nonzero(as_tuple=True)
        half = self.query[h, i].mT @ self.key[h, j] / 2
        values, vectors = torch.linalg.eigh(half + half.mT)
        # what rounding may hide
        values = values.abs() + SLACK * values.abs().amax(-1, keepdim=True)
        scaled = vectors * values[:, None]
        return where, scaled @ scaled.mT, scaled @ vectors.mT

    @cached_property
    def carries(self) -> Bool[Tensor, "h 1 j"]:
        """Keys whose values move."""
        return (self.value.norm(dim=(-2, -1)) > 0)[:, None]

    @cached_property
    def single(self) -> Bool[Tensor, "h i j"]:
        """Keys that are the only one of their row that moves."""
        moves = (self.key.norm(dim=(-2, -1)) > 0)[:, None] | self.carries
        moves = moves & ~self.hidden
        return moves & (moves.sum(-1, keepdim=True) == 1)

    @cached_property
    def lone(self) -> Bool[Tensor, "h i"]:
        """Rows whose query stays and one of whose keys moves."""
        return self.single.any(-1) & (self.norm_query == 0)

    def bent(self, c: Float[Tensor, "h i"], w: Float[Tensor, "h i j"], spread: Tensor) -> Tensor:
        """``>= sup (sum_hij c_hi w_hij <e, S_hij f>^2)^(1/2)`` over unit ``e``, ``f``.

        ``spread``: the `key_spread` of ``w``.
        """
        c = c.clamp_min(0)
        found = self.together(c.sqrt() * spread)
        if self.turns is None:
            return found
        where, squares, _ = self.turns
        weights = (c[..., None] * w)[where]
        each = top_value(torch.einsum("m,mpq->pq", weights, squares)).sqrt()
        return torch.minimum(found, each)

    def bent_rows(self, w: Float[Tensor, "h i j"], spread: Tensor) -> Float[Tensor, "h i"]:
        """The same for every row alone."""
        found = self.norm_query * spread
        if self.turns is None:
            return found
        where, squares, _ = self.turns
        each = torch.zeros_like(found).index_put(where[:2], w[where] * top_value(squares), True)
        return torch.minimum(found, each.sqrt())

    def of_velocities(self, w: Float[Tensor, "h i j"]) -> Tensor:
        """``λ(sum_hij w a a^T)``."""
        return top_of_gram(self.a.flatten(0, 2), w.flatten())

    @cached_property
    def second(self) -> Float[Tensor, "i d p p"] | None:
        """Second derivatives of every output at the centre; None where they are too many."""
        rows, wide = len(self.rows), self.output.shape[1]
        if rows * wide * self.count**2 > _EXACT:
            return None
        found = self.v.new_zeros(rows, wide, self.count, self.count)
        for i in range(rows):
            p, a = self.p[:, i], self.a[:, i]
            change = torch.einsum("hj,hjkp,hjq->hkpq", p, self.value, a)
            half = torch.einsum("hdk,hkpq->dpq", self.output, change)
            keys = torch.einsum("hj,hjd,hjkp->hdkp", p, self.v[:, i], self.key)
            half = half + torch.einsum("hkp,hdkq->dpq", self.query[:, i], keys)
            weighted = (p[..., None] * self.v[:, i]).flatten(0, 1).T  # (d, h j)
            a = a.flatten(0, 1)
            torch.matmul((weighted[..., None] * a).mT, a, out=found[i])
            found[i] += half
            found[i] += half.mT
        return found

    def lead_of(self, reads: Float[Tensor, "i k d"]) -> Float[Tensor, "i k"]:
        """``>= sup |<p_ik, H_i[e, f]>|`` over unit ``e, f`` for every read-out alone.

        ``H_i = X^T M X`` has few rows ``X = (a; n; Q; sum_j P y K)``, so ``(tr H^8)^(1/8)`` is that
        of ``M X X^T``. Where heads cancel, rounding hides it: products of the rows' norms say how
        much.
        """
        for known, found in self._leads:
            if known.shape == reads.shape and torch.equal(known, reads):
                return found
        found = torch.stack([self._lead(i, one) for i, one in enumerate(reads)])
        self._leads.append((reads, found))
        return found

    def _lead(self, i: int, reads: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        count, p = len(reads), self.p[:, i]
        w = torch.einsum("kd,hdv->khv", reads, self.output)
        py = p * torch.einsum("kd,hjd->khj", reads, self.v[:, i])
        n = torch.einsum("khv,hjvp->khjp", w, self.value).flatten(1, 2)
        keys = torch.einsum("khj,hjcp->khcp", py, self.key).flatten(1, 2)
        a, query = (m.flatten(0, 1).expand(count, -1, -1) for m in (self.a[:, i], self.query[:, i]))
        x = torch.cat([a, n, query, keys], 1)
        gram = x @ x.mT
        of_a, of_n, of_query, of_keys = gram.split(
            [a.shape[1], n.shape[1], *2 * [query.shape[1]]], 1
        )
        p, py = p.reshape(-1, 1), py.flatten(1)[..., None]
        norm_a, norm_n, norm_query, norm_keys = (
            m.norm(dim=-1, keepdim=True)
            for m in x.split([a.shape[1], n.shape[1], *2 * [query.shape[1]]], 1)
        )
        hidden = (norm_a * (2 * p * norm_n + py.abs() * norm_a)).sum((1, 2))
        hidden = hidden + 2 * (norm_query * norm_keys).sum((1, 2))
        h = torch.cat([p * of_n + py * of_a, p * of_a, of_keys, of_query], 1)
        h = h @ h
        h = h @ h
        return ((h * h.mT).sum((1, 2)).clamp_min(0) + _CANCELS * hidden**8) ** 0.125

    def lead_together(self, reads: Float[Tensor, "i k d"]) -> Tensor | None:
        """``>= (sum_ik |H_ik f|^2)^(1/2)`` over unit ``f``, of the read-outs of all rows."""
        if self.second is None:
            return None
        whole = self.second.new_zeros(self.count, self.count)
        for one, second in zip(reads, self.second, strict=True):
            rows = (one @ second.flatten(1)).view(-1, self.count)
            whole += rows.T @ rows
        return top_value(whole).sqrt()

    @cached_property
    def lead_rows(self) -> tuple[Tensor, Tensor] | None:
        """``(sum_k |H_ik f|^2)^(1/2)`` of every row, ``(i,)``, and of all rows."""
        if self.second is None:
            return None
        squares = [h.flatten(0, 1).T @ h.flatten(0, 1) for h in self.second]
        rows = torch.stack([top_value(one) for one in squares]).sqrt()
        return rows, top_value(torch.stack(squares).sum(0)).sqrt()


@dataclass(frozen=True, eq=False)
class Reach:
    """What holds of the weights all over one ball."""

    radius: float
    upper: Tensor  # U, (h, i, j)
    lower: Tensor
    change: Tensor  # D >= |P' - P|
    beyond: Tensor  # >= |P' - P - P a(e)|
    total: Tensor  # tv >= sum_j |P' - P|, (h, i)
    length: Tensor  # >= |P' - P|_2
    key_upper: Tensor  # `key_spread` of U, and of D
    key_change: Tensor
    varied: Tensor  # sum_j varied_j g_j^2 >= Var'(g) where g_j = 0 for keys that stay, (h, i, j)
    carried: Tensor  # its largest, and `length`, of the keys whose values move, (h, i)
    value_length: Tensor
    own_bent: Tensor  # (h, i): sd'(alpha), (E' alpha^2)^(1/2), and by D
    mean_bent: Tensor
    change_bent: Tensor
    path: Tensor  # (h, i): integral of sd'(velocity)
    spread_upper: Tensor  # `spread` of U, D, and what is beyond
    spread_change: Tensor
    spread_beyond: Tensor


class AttentionBall:
    """A layer at a centre, all over the balls of a grid of radii up to ``r``."""

    def __init__(self, at: AttentionAt, radius: float, pieces: int = PIECES) -> None:
        self.at, self.radius, self.pieces = at, radius, pieces
        self.grid: list[Reach] = []
        path = at.p.new_zeros(at.p.shape[:2])
        for k in range(pieces):
            found = self._reach(radius * (k + 1) / pieces, path, radius / pieces)
            path = found.path
            self.grid.append(found)

    def _reach(self, r: float, path: Tensor, step: float) -> Reach:
        at, p = self.at, self.at.p
        s = at.a.norm(dim=-1) * r + at.bend * r * r
        b = s.amax(-1)
        v = at.spread(p) * r + at.bent_rows(p, at.key_spread(p)) * r * r
        # the logits' changes have P-mean 0: Jensen below, Bennett above
        z = 1 + v.square() * _bennett(b)  # infinite or not a number: nothing holds so far
        gram = at.gram_a
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        both = diagonal[..., :, None] + diagonal[..., None, :]
        apart = ((both - 2 * gram).clamp_min(0) + _CANCELS * both).sqrt()
        apart = apart * r + at.bend_apart * r * r
        # a weight that underflows is not zero, and takes no other's place
        log = p.clamp_min(_TINY).log()
        ratio = log.masked_fill(at.hidden, -torch.inf)[..., None, :] - log[..., :, None]
        others = ratio.masked_fill((p < _TINY)[..., None, :], -torch.inf)
        upper = torch.minimum(
            (p.clamp_min(_TINY) * s.exp()).clamp_max(1), torch.exp(-(others - apart).logsumexp(-1))
        )
        lower = torch.maximum(
            p * (-s).exp() / z[..., None], torch.exp(-(ratio + apart).logsumexp(-1))
        )
        upper, lower = (w.masked_fill(at.hidden, 0.0) for w in (upper, lower))
        change = torch.maximum(upper - p, p - lower).clamp_min(0)
        total = 2 * torch.minimum((upper - p).sum(-1), (p - lower).sum(-1)).clamp_min(0)
        first = torch.maximum(torch.expm1(s) - s, s.exp() * (1 - 1 / z)[..., None])
        beyond = torch.minimum(p * (first + at.bend * r * r), change + p * at.a.norm(dim=-1) * r)
        key_upper, key_change = at.key_spread(upper), at.key_spread(change)
        # of one key alone: the largest p (1 - p)
        largest = torch.maximum(upper * (1 - upper), lower * (1 - lower))
        largest = torch.where((lower < 0.5) & (upper > 0.5), 0.25, largest)
        varied = torch.where(at.single, largest, upper)
        own_bent = 2 * r * at.bent_rows(varied, key_upper)
        spread_upper = at.spread(upper)
        path = path + step * (spread_upper + own_bent)
        length = torch.minimum(change.norm(dim=-1), total / 2**0.5)
        length = torch.minimum(length, upper.amax(-1).sqrt() * path)
        return Reach(
            radius=r,
            upper=upper,
            lower=lower,
            change=change,
            beyond=beyond,
            total=total,
            length=length,
            key_upper=key_upper,
            key_change=key_change,
            mean_bent=2 * r * at.bent_rows(upper, key_upper),
            change_bent=2 * r * at.bent_rows(change, key_change),
            varied=varied,
            carried=(varied * at.carries).amax(-1),
            value_length=torch.minimum(length, (change * at.carries).norm(dim=-1)),
            own_bent=own_bent,
            path=path,
            spread_upper=spread_upper,
            spread_change=at.spread(change),
            spread_beyond=at.spread(beyond),
        )

    # --- change of the Jacobian

    def change_of(
        self, reads: Float[Tensor, "i g k d"], lead: Float[Tensor, "i g"] | None = None
    ) -> Float[Tensor, "pieces i g"]:
        """``>= ‖R_ig (J(x) - J(x_0)) T‖`` of every group of read-outs of a row, on each ball.

        ``lead`` bounds the second derivatives at the centre, ``sup |R_ig H[e, f]|``.
        """
        at = self.at
        w = torch.einsum("igkd,hdv->higkv", reads, at.output)
        y = torch.einsum("igkd,hijd->higjk", reads, at.v)
        if reads.shape[2] == 1:  # one read-out alone: rank 1
            flat = at.value.flatten(1, 2)
            gram = (flat @ flat.mT).unflatten(1, (at.n, -1)).unflatten(3, (at.n, -1))
            w1 = w[:, :, :, 0]
            of_values = torch.einsum("higv,hjvlu,higu->higjl", w1, gram, w1)
            size = top_value(of_values).sqrt()
        else:
            size = norm_above(reads)[None] * self._read_norms[:, None, None]
            size = torch.minimum(size, norm_above(w) * self._value_norms[:, None, None])
        return torch.stack([_changes(one, at, y, size, lead) for one in self.grid])

    @cached_property
    def _value_norms(self) -> Float[Tensor, " h"]:
        """``‖stack_j V_j T‖``."""
        return norm_above(self.at.value.flatten(1, 2))

    @cached_property
    def _read_norms(self) -> Float[Tensor, " h"]:
        """``‖stack_j W_h V_j T‖``."""
        at = self.at
        stack = torch.einsum("hdk,hjkp->hjdp", at.output, at.value).flatten(1, 2)
        return norm_above(stack)

    def joint_change(
        self, reads: Float[Tensor, "i k d"], lead: Tensor | None = None
    ) -> Float[Tensor, " pieces"]:
        """``>= ‖R (J(x) - J(x_0)) T‖`` of all rows together, on each ball.

        ``lead``: ``(sum_ik sup |H_ik f|^2)^(1/2)`` at the centre.
        """
        at = self.at
        outer = norm_above(reads) * self._read_norms[:, None]  # (h, i), of values as they are read
        wide = norm_above(torch.einsum("ikd,hdv->hikv", reads, at.output))
        wide = wide * self._value_norms[:, None]
        less = wide.norm(dim=-1, keepdim=True) < outer.norm(dim=-1, keepdim=True)
        outer = torch.where(less, wide, outer)
        most = outer.amax(-1) + _TINY
        y = torch.einsum("ikd,hijd->hijk", reads, at.v)
        gram = torch.einsum("hijk,hilk->hijl", y, y)
        found, path = [], outer.new_zeros(())
        for k, one in enumerate(self.grid):
            step = one.radius - (self.grid[k - 1].radius if k else 0.0)
            heavy = (outer / most[:, None]).square() * one.carried
            path = path + step * self._moved(heavy, one)
            found.append(self._joint(one, gram, outer, most.norm() * path, lead))
        return torch.stack(found)

    # --- change of the Hessian

    def hessian_change(self, bend: Bend, piece: int) -> Float[Tensor, "p p"]:
        """``Q`` with ``H(x) >= H(x_0) - Q`` for every x in a ball of the grid."""
        at, one = self.at, self.grid[piece]
        r, upper, lower, change, y = one.radius, one.upper, one.lower, one.change, bend.y
        a, n = at.a.flatten(0, 2), bend.n.flatten(0, 2)
        eye = torch.eye(at.count, dtype=a.dtype)

        def total(w: Tensor) -> Tensor:
            return weighted_gram(a, w.flatten())

        mean = extreme_size(y, lower, upper)  # |E'y|
        own = bend.n.norm(dim=-1)
        moved = r * torch.minimum(bend.size * one.value_length, (change * own).sum(-1))
        wider = own * r + (moved + mean)[..., None]  # |y' - y|
        large = y.abs() + wider
        most = large.amax(-1)
        # 2 (Cov' - Cov)(n, a)
        rows = (~at.lone)[..., None].to(upper.dtype)  # the others have a form of their own
        c = (rows * change * (1 + one.total)[..., None]).flatten()
        of_n, of_a = weighted_gram(n, c), weighted_gram(a, c)
        balance = float(torch.sqrt((top_value(of_a) + 1e-300) / (top_value(of_n) + 1e-300)))
        q = balance * of_n + of_a / balance
        # 2 Cov'(n, alpha) and 2 Cov'(n(e), q), in rows whose query moves
        turns = (at.norm_query > 0).to(upper.dtype)[..., None]
        values = top_of_gram(n, (turns * upper).flatten())
        if bool((at.single.any(-1) | (turns[..., 0] == 0)).all()):
            alone = (turns * at.single * one.varied).flatten()
            values = torch.minimum(values, top_of_gram(bend.read.flatten(0, 2), alone))
        values = values.sqrt()
        scalar = 6 * r * values * at.bent(torch.ones_like(own[..., 0]), one.varied, one.key_upper)
        # 2 (Cov' - Cov)(y, q)
        w = turns * (change * y.abs() + mean[..., None] * upper)
        keys = w.sum(1).repeat_interleave(at.key.shape[2], -1).flatten()
        within = 2 * at.together(w.sum(-1).sqrt())
        within = within * top_of_gram(at.key.flatten(0, 2), keys).sqrt() * eye
        if at.turns is not None:
            where, _, sizes = at.turns
            each = 2 * torch.einsum("m,mpq->pq", w[where], sizes)
            within = each if bool(top_value(each) < within[0, 0]) else within
        q = q + within
        # E'[y' (a + alpha)^2] - E[y a^2], means taken off
        deviation = extreme_mean(large.square(), lower, upper).sqrt()
        q = q + total(rows * (change * y.abs() + upper * wider))
        q = q + 2 * total(rows * self._mean_moved(one, deviation)) + self._of_lone(bend, one)
        bent = 2 * r * at.bent(most, one.varied, one.key_upper)
        mean_large = extreme_mean(large, lower, upper)
        straight = torch.minimum(
            top_value(total(turns * most[..., None] * upper)).sqrt(),
            top_value(total(turns * upper * large)).sqrt()
            + top_value(total((mean_large * one.path.square())[..., None] * turns * upper)).sqrt(),
        )
        scalar = scalar + 2 * straight * bent + bent.square()
        return q + scalar * eye

    def _of_lone(self, bend: Bend, one: Reach) -> Float[Tensor, "p p"]:
        """What rows ``p_s (Y + nu) + const`` add, ``p_s`` logistic in ``tau``.

        ``F'' = p (1 - p) (1 - 2 p) (Y + nu) tau^2 + 2 p (1 - p) nu tau``.
        """
        at = self.at
        h, i, s = (at.single & at.lone[..., None]).nonzero(as_tuple=True)
        tau, nu, p = at.velocity[h, i], bend.read[h, i, s], at.p[h, i, s]
        others = at.p[h, i].scatter(1, s[:, None], 0.0)
        mean = (others * bend.y[h, i]).sum(-1) / others.sum(-1).clamp_min(_TINY)
        apart = bend.y[h, i, s] - mean
        lower, upper = one.lower[h, i, s], one.upper[h, i, s]
        first = [m * (1 - m) for m in (lower, upper, p, p.new_tensor(0.5).clamp(lower, upper))]
        turning = ((3 - 3**0.5) / 6, (3 + 3**0.5) / 6)
        at_turning = (p.new_tensor(t).clamp(lower, upper) for t in turning)
        second = torch.stack([m * (1 - m) * (1 - 2 * m) for m in (lower, upper, *at_turning)])
        here = p * (1 - p) * (1 - 2 * p)
        fall = torch.where(apart > 0, here - second.amin(0), second.amax(0) - here).clamp_min(0)
        change = torch.stack([(m - first[2]).abs() for m in first]).amax(0)
        sizes = tau.norm(dim=-1), nu.norm(dim=-1)
        ratio = (sizes[0] + _TINY) / (sizes[1] + _TINY)
        of_tau = apart.abs() * fall + second.abs().amax(0) * sizes[1] * one.radius + change / ratio
        return weighted_gram(tau, of_tau) + weighted_gram(nu, change * ratio)

    def _mean_moved(self, one: Reach, deviation: Float[Tensor, "h i"]) -> Tensor:
        """``w`` with ``|E'a E'[y a]| <= sum_j w_j a_j^2`` where ``E'y^2 <= deviation^2``."""
        by_path = (deviation * one.path)[..., None] * one.upper
        ratio = ((one.upper.sum(-1) + _TINY) / (one.change.sum(-1) + _TINY)).sqrt()[..., None]
        each = (one.change * ratio + one.upper / ratio) / 2
        by_change = (deviation * one.total.sqrt())[..., None] * each
        sizes = self.at.a.square().sum(-1)
        less = (by_change * sizes).sum(-1) < (by_path * sizes).sum(-1)
        return torch.where(less[..., None], by_change, by_path)

    def _moved(self, c: Tensor, one: Reach) -> Tensor:
        """``>= (sum_hi c_hi Var'(velocity))^(1/2)``."""
        straight = self.at.of_velocities(c[..., None] * one.upper).sqrt()
        return straight + 2 * one.radius * self.at.bent(c, one.varied, one.key_upper)

    def _joint(
        self, one: Reach, gram: Tensor, outer: Tensor, path: Tensor, lead: Tensor | None
    ) -> Tensor:
        at, r, f = self.at, one.radius, 1 + one.total
        c_upper, c_change, c_beyond = (
            _top_weighted(gram, w) for w in (one.upper, one.change, one.beyond)
        )
        largest = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        largest = largest.amax(-1) + (one.change * largest).sum(-1)

        def velocities(c: Tensor, w: Tensor) -> Tensor:
            # (sum_i (sum_h c_hi d_hi)^2)^(1/2), d_hi^2 = sum_j w_hij <a_j, f>^2
            whole = c.sum(0).expand_as(c)
            return at.of_velocities(whole[..., None] * w).sqrt()

        def bends(c: Tensor, w: Tensor, key_w: Tensor) -> Tensor:
            return 2 * r * at.bent(c.sum(0).expand_as(c), w, key_w)

        def averages(w: Tensor) -> Tensor:
            return norm_above(outer[..., None] * w * at.carries).sum()

        carried = (outer * r).square()
        shared = carried * one.carried
        plain = torch.minimum(averages(one.change), path)
        plain = plain + torch.minimum(
            velocities(c_change * f.square(), one.change),
            velocities((largest * one.path).square(), one.upper),
        )
        plain = plain + bends(c_upper, one.varied, one.key_upper)
        plain = plain + velocities(shared, one.upper) + bends(shared, one.varied, one.key_upper)
        if lead is None:
            return plain
        # |E'y|^2: a mean that has moved meets E'a and, as bends are not centred, all of E'alpha
        twice = one.path.square()
        mean = torch.minimum(one.total * c_change, twice * c_upper)
        rest = averages(one.beyond) + velocities(c_beyond, one.beyond)
        rest = rest + velocities(mean * twice, one.upper)
        rest = rest + torch.minimum(
            bends(c_change, one.change, one.key_change) + bends(mean, one.upper, one.key_upper),
            bends(largest.square() * twice, one.varied, one.key_upper),
        )
        rest = rest + velocities(carried * _uneven(one, at).square(), one.change)
        rest = rest + bends(shared, one.varied, one.key_upper)
        return torch.minimum(plain, r * lead + rest)


def _uneven(one: Reach, at: AttentionAt) -> Tensor:
    """``c`` with ``|(Cov' - Cov)(V e, a)| <= c ‖V‖ |e| (sum_j D_j a_j^2)^(1/2)``, ``(h, i)``."""
    change, moved = one.change, one.total.sqrt()
    centred = change.amax(-1).sqrt() + change.sum(-1).sqrt() * at.p.norm(dim=-1)
    found = centred + one.value_length * moved
    # of one key s, V e ((P'_s - P_s) a_s - P'_s E'a)
    alone = ((change.sqrt() + one.upper * moved[..., None]) * at.single).amax(-1)
    return torch.where(at.single.any(-1), torch.minimum(found, alone), found)


def _changes(one: Reach, at: AttentionAt, y: Tensor, size: Tensor, lead: Tensor | None) -> Tensor:
    """`AttentionBall.change_of` on one ball, ``(i, g)``; ``y``: values read, (h, i, g, j, k)."""
    r, upper, change = one.radius, one.upper[:, :, None], one.change[:, :, None]
    if y.shape[-1] == 1:
        alone = y[..., 0]
        c_upper, c_change, c_beyond = (
            (w[:, :, None] * alone.square()).sum(-1).sqrt()
            for w in (one.upper, one.change, one.beyond)
        )
        lower = one.lower[:, :, None]
        mean = extreme_size(alone, lower, upper)
        largest = alone.abs().amax(-1) + mean
        c_upper = torch.minimum(c_upper, extreme_mean(alone.square(), lower, upper).sqrt())
    else:
        gram = torch.einsum("higjk,higlk->higjl", y, y)
        c_upper, c_change, c_beyond = (
            _top_weighted(gram, w[:, :, None]).sqrt() for w in (one.upper, one.change, one.beyond)
        )
        largest = y.norm(dim=-1)
        mean = (change * largest).sum(-1)
        largest = largest.amax(-1) + mean

    def x(t: Tensor) -> Tensor:
        return t[:, :, None]

    f = x(1 + one.total)
    shared = size * r * x(one.carried.sqrt())
    plain = size * x(one.value_length) + c_upper * x(one.own_bent)
    plain = plain + torch.minimum(
        f * c_change * x(one.spread_change), largest * x(one.path * one.spread_upper)
    )
    plain = plain + shared * x(one.spread_upper + one.own_bent)
    if lead is None:
        return plain.sum(0)
    rest = size * x((one.beyond * at.carries).norm(dim=-1)) + c_beyond * x(one.spread_beyond)
    # |E'y|: a mean that has moved meets E'a and, as bends are not centred, all of E'alpha
    mean = torch.minimum(mean, torch.minimum(x(one.total.sqrt()) * c_change, x(one.path) * c_upper))
    rest = rest + mean * x(one.path * one.spread_upper)
    rest = rest + torch.minimum(
        c_change * x(one.change_bent) + mean * x(one.mean_bent),
        largest * x(one.path * one.own_bent),
    )
    rest = rest + size * r * x(_uneven(one, at) * one.spread_change)
    rest = rest + shared * x(one.own_bent)
    return torch.minimum(plain.sum(0), r * lead + rest.sum(0))


@dataclass(frozen=True, eq=False)
class Bend:
    """A read-out ``sum_i <l_i, f_i(x)>``: its gradient and Hessian at the centre, and its parts."""

    gradient: Tensor  # (p,)
    hessian: Tensor  # (p, p)
    y: Tensor  # centred values as read, (h, i, j)
    read: Tensor  # functionals of moving values, (h, i, j, p)
    n: Tensor  # those, centred
    size: Tensor  # norm of those functionals together, (h, i)


def bend_of(at: AttentionAt, reads: Float[Tensor, "i d"]) -> Bend:
    """The second derivative ``2 Cov(n, a) + 2 Cov(y, q) + E[y a^2]`` at the centre."""
    y = torch.einsum("id,hijd->hij", reads, at.v)
    w = torch.einsum("id,hdv->hiv", reads, at.output)
    read = torch.einsum("hiv,hjvp->hijp", w, at.value)
    size = norm_above(read)
    n = read - torch.einsum("hij,hijp->hip", at.p, read)[:, :, None]
    n = n.masked_fill(at.hidden[..., None], 0.0)
    weighted = at.p[..., None] * n
    a, py = at.a.flatten(0, 2), at.p * y
    h = weighted.flatten(0, 2).T @ a
    keys = torch.einsum("hij,hjkp->hikp", py, at.key)
    h = h + at.query.flatten(0, 2).T @ keys.flatten(0, 2)
    h = h + h.T + weighted_gram(a, py.flatten())
    gradient = py.flatten() @ a + torch.einsum("hiv,hivp->p", w, at.mean_value)
    return Bend(gradient, h, y, read, n, size)


def _top_weighted(gram: Tensor, w: Tensor) -> Tensor:
    root = w.clamp_min(0).sqrt()
    return top_value(gram * root[..., :, None] * root[..., None, :])


def _bennett(b: Tensor) -> Tensor:
    """``>= (e^b - 1 - b) / b^2``."""
    b = b.clamp_min(1e-3)  # it grows
    return (torch.expm1(b) - b) / b.square()
