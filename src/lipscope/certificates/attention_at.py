"""Attention at a centre with its second derivatives, for perturbations in an ellipsoid.

Inputs are ``x_0 + T xi`` with ``|xi| <= r``; all quantities are functionals of ``xi``. Derived
here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.forms import (
    SLACK,
    RowForm,
    norm_above,
    top_bilinear,
    top_value,
    weighted_gram,
)

_MARKS = 4  # groups of balls that share eigenvalues
_CANCELS = 1e-13  # rounding relative to the size of two terms that may cancel, with a margin
TINY = 1e-300  # smaller weights have underflowed
_FEW = 2e7  # largest tensor of forms of pairs with both ends moving
_EXACT = 3e9  # maximum number of multiplications for second derivatives of all outputs
_HELD = 5e7  # maximum number of entries in memory for these


def extreme_mean(
    g: Float[Tensor, "*#b n"], lower: Float[Tensor, "*#b n"], upper: Float[Tensor, "*#b n"]
) -> Float[Tensor, "*_"]:
    """``sup <p, g>`` over weights ``lower <= p <= upper`` with sum 1: greedy, exact."""
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


def graded(f: Callable[[Tensor], Tensor], w: Float[Tensor, "b *r k"]) -> Tensor:
    """Upper bound of ``f(w_b)`` on a grid of balls, for ``f(w) = λ(sum_k w_k g_k g_k^T)^(1/2)``.

    Evaluated at one set of weights for every few balls: ``w_b <= c w'`` implies
    ``f(w_b) <= c^(1/2) f(w')``.
    """
    found = []
    for some in w.clamp_min(0).chunk(_MARKS):
        most = some.amax(0)
        share = torch.where(most > 0, some / most, 0.0).amax(-1)
        found.append(share.sqrt() * f(most))
    return torch.cat(found)


def moves_apart(t: Float[Tensor, "n d p"]) -> bool:
    """Whether every coordinate moves a single token."""
    return int((t != 0).any(1).sum(0).max()) <= 1


class AttentionAt:
    """Rows of a layer at a centre, as functionals of ``xi``: heads ``h``, rows ``i``, keys ``j``.

    Attributes:
        p: Weights ``P``, ``(h, i, j)``.
        a: Velocities of logits, centred: ``<q_i, K_j f> + <Q_i f, k_j>``, ``(h, i, j, p)``.
        query: ``Q_i T``, with half the scale, ``(h, i, k, p)``; ``key``: ``K_j T``, likewise.
        value: ``V_j T``, ``(h, j, kv, p)``.
        v: Values, centred by ``P``, through the output projection, ``(h, i, j, d_out)``.
        separate: `moves_apart`.
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
        moved_by = (t != 0).any(1)  # tokens by coordinates
        for m in (dq, dk, dv):
            m.masked_fill_(~moved_by[:, None], 0.0)
        self.separate = moves_apart(t)
        self.p = layer.weights(q0, k0)[:, rows]
        self.query, self.key, self.value = dq[:, rows].contiguous(), dk.contiguous(), dv
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
        size = velocity.norm(dim=-1)
        self.terms = size + (p * size).sum(-1, keepdim=True)  # of a, before cancellation
        centred = v0[:, None] - (p @ v0)[:, :, None]
        self.v = torch.einsum("hdk,hijk->hijd", self.output, centred)
        self.v = self.v.masked_fill(self.hidden[..., None], 0.0)
        moved_mean = torch.einsum("hij,hjkp->hikp", p, dv)
        self.jacobian = torch.einsum("hdk,hikp->idp", self.output, moved_mean)
        self.jacobian = self.jacobian + torch.einsum("hij,hijd,hijp->idp", p, self.v, self.a)
        self.n, self.heads, self.count = n, heads, t.shape[-1]
        self._leads: list[tuple[Tensor, Tensor]] = []

    # --- cached quantities

    @cached_property
    def gram_a(self) -> Tensor:
        """``<a_j, a_l>``, ``(h, i, j, l)``."""
        return self.a @ self.a.mT

    @cached_property
    def sizes(self) -> Tensor:
        """``|a_j|^2``, ``(h, i, j)``: for choosing weights, not a bound."""
        return self.a.square().sum(-1)

    @cached_property
    def apart(self) -> Tensor:
        """``>= |a_j - a_l|``, ``(h, i, j, l)``."""
        diagonal = self.gram_a.diagonal(dim1=-2, dim2=-1)
        both = diagonal[..., :, None] + diagonal[..., None, :]
        return ((both - 2 * self.gram_a).clamp_min(0) + _CANCELS * both).sqrt()

    @cached_property
    def keys_moved(self) -> Bool[Tensor, " j"]:
        """Tokens whose key or value moves in some head; the first one if there are none."""
        moved = ((self.key != 0).any(-1).any(-1) | (self.value != 0).any(-1).any(-1)).any(0)
        moved[0] |= ~moved.any()
        return moved

    @cached_property
    def gram_key(self) -> Tensor:
        """Gram matrix of the moving rows of all ``K_j T``, ``(h, j k, j k)``."""
        rows = self.key[:, self.keys_moved].flatten(1, 2)
        return rows @ rows.mT

    @cached_property
    def gram_value(self) -> Tensor:
        """``V_j T T^T V_l^T``, ``(h, j, v, l, v)``."""
        flat = self.value.flatten(1, 2)
        return (flat @ flat.mT).unflatten(1, (self.n, -1)).unflatten(3, (self.n, -1))

    @cached_property
    def gram_heads(self) -> Tensor:
        """Gram matrix of the rows of all ``Q_i T`` of a head, ``(h, i k, i k)``."""
        rows = self.query.flatten(1, 2)
        return rows @ rows.mT

    @cached_property
    def norm_query(self) -> Tensor:
        """``‖Q_i T‖``, ``(h, i)``."""
        return top_value(self.query @ self.query.mT).sqrt()

    @cached_property
    def norm_key(self) -> Tensor:
        """``‖K_j T‖``, ``(h, j)``."""
        return top_value(self.key @ self.key.mT).sqrt()

    def _stacked(self, each: Float[Tensor, "h j k p"]) -> Float[Tensor, " h"]:
        """Norms of the functionals of all tokens, stacked."""
        return norm_above(each).amax(1) if self.separate else norm_above(each.flatten(1, 2))

    @cached_property
    def value_norms(self) -> Float[Tensor, " h"]:
        """``‖stack_j V_j T‖``."""
        return self._stacked(self.value)

    @cached_property
    def read_norms(self) -> Float[Tensor, " h"]:
        """``‖stack_j W_h V_j T‖``, from a triangular factor of every ``W_h``."""
        triangle = torch.linalg.qr(self.output).R
        return self._stacked(torch.einsum("huv,hjvp->hjup", triangle, self.value))

    @cached_property
    def turning(self) -> Bool[Tensor, " i"]:
        """Rows whose query moves in some head."""
        return (self.norm_query > 0).any(0)

    @cached_property
    def bend(self) -> Tensor:
        """``>= sup |<Q_i T e, (K_j - sum_l P_il K_l) T e>|`` over unit ``e``, ``(h, i, j)``."""
        turning, found = self.turning, torch.zeros_like(self.p)
        mean = torch.einsum("hij,hjkp->hikp", self.p[:, turning], self.key)
        apart = self.key[:, None] - mean[:, :, None]
        found[:, turning] = top_bilinear(self.query[:, turning, None], apart)
        return found

    @cached_property
    def bend_apart(self) -> Tensor:
        """The same bound for ``K_l - K_j``, ``(h, i, j, l)``."""
        found = self.p.new_zeros(*self.p.shape, self.n)
        one, other = torch.triu_indices(self.n, self.n, 1)
        apart = (self.key[:, other] - self.key[:, one])[:, None]
        both, turning = self.query[:, self.turning, None], self.turning.nonzero()
        found[:, turning, one, other] = top_bilinear(both, apart)
        return torch.maximum(found, found.mT)

    def key_spread(self, w: Float[Tensor, "h i j"]) -> Float[Tensor, "h i"]:
        """``sup (sum_j w_ij |K_j T e|^2)^(1/2)`` over unit ``e``."""
        if self.separate:
            return (w.clamp_min(0).sqrt() * self.norm_key[:, None]).amax(-1)
        w = w.clamp_min(0)[..., self.keys_moved]
        root = w.sqrt().repeat_interleave(self.key.shape[2], -1)
        return top_value(self.gram_key[:, None] * root[..., :, None] * root[..., None, :]).sqrt()

    def spread(self, w: Float[Tensor, "h i j"]) -> Tensor:
        """``λ(sum_j w_ij a_j a_j^T)^(1/2)``, ``(h, i)``."""
        root = w.clamp_min(0).sqrt()
        return top_value(self.gram_a * root[..., :, None] * root[..., None, :]).sqrt()

    @cached_property
    def turns(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor] | None:
        """Pairs ``(h, i, j)`` with both ends moving, ``S^2`` and ``|S|``; None beyond two tokens.

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
        # rounding errors
        values = values.abs() + SLACK * values.abs().amax(-1, keepdim=True)
        scaled = vectors * values[:, None]
        return where, scaled @ scaled.mT, scaled @ vectors.mT

    @cached_property
    def carries(self) -> Bool[Tensor, "h 1 j"]:
        """Keys whose values move."""
        return (self.value.norm(dim=(-2, -1)) > 0)[:, None]

    @cached_property
    def single(self) -> Bool[Tensor, "h i j"]:
        """Keys that are the only moving key of their row."""
        moves = (self.key.norm(dim=(-2, -1)) > 0)[:, None] | self.carries
        moves = moves & ~self.hidden
        return moves & (moves.sum(-1, keepdim=True) == 1)

    @cached_property
    def lone(self) -> Bool[Tensor, "h i"]:
        """Rows with a fixed query and a single moving key."""
        return self.single.any(-1) & (self.norm_query == 0)

    def bent_rows(self, w: Float[Tensor, "*b h i j"], spread: Tensor) -> Float[Tensor, "*b h i"]:
        """``>= sup (sum_j w_ij <e, S_ij f>^2)^(1/2)`` over unit ``e``, ``f``, for every row.

        ``spread``: the `key_spread` of ``w``.
        """
        found = self.norm_query * spread
        if self.turns is None:
            return found
        (h, i, j), squares, _ = self.turns
        each = w[..., h, i, j] * top_value(squares)
        rows = torch.zeros_like(found).flatten(-2).index_add(-1, h * found.shape[-1] + i, each)
        return torch.minimum(found, rows.view_as(found).sqrt())

    def of_heads(self, c: Float[Tensor, "h i"]) -> Float[Tensor, " h"]:
        """``sup (sum_i c_hi |Q_i T e|^2)^(1/2)`` over unit ``e``, for every head."""
        if self.separate:
            return (c.clamp_min(0).sqrt() * self.norm_query).amax(-1)
        root = c.clamp_min(0).sqrt().repeat_interleave(self.query.shape[2], -1)
        if root.shape[1] > self.count:
            return norm_above(self.query.flatten(1, 2) * root[..., None])
        return top_value(self.gram_heads * root[..., :, None] * root[..., None, :]).sqrt()

    def form(
        self,
        a: Float[Tensor, "h i j"] | None = None,
        queries: Float[Tensor, "h i"] | None = None,
        keys: Float[Tensor, "h j"] | None = None,
        rest: Float[Tensor, "p p"] | None = None,
    ) -> RowForm:
        """``sum w_hij <a_hij, f>^2 + sum w_hi |Q_i T f|^2 + sum w_hj |K_j T f|^2 + <f, M f>``."""
        width = self.query.shape[2]
        ends = [None if w is None else w.flatten() for w in (a, queries, keys)]
        ends[1:] = [None if w is None else w.repeat_interleave(width) for w in ends[1:]]
        rows = [self.a.flatten(0, 2), self.query.flatten(0, 2), self.key.flatten(0, 2)]
        return RowForm(rows, ends, rest)

    def lead_of(
        self, reads: Float[Tensor, "i k d"], wanted: Bool[Tensor, "i k"]
    ) -> Float[Tensor, "i k"] | None:
        """``>= sup |<p_ik, H_i[e, f]>|`` over unit ``e, f`` for each read-out separately.

        Infinite if neither ``wanted`` nor available; None if too expensive.

        ``H = X^T B + B^T X`` with ``X = (a; Q)`` of few rows, and ``(tr H^4)^(1/4)`` bounds it.
        Rounding where heads cancel is bounded by the norms of rows and blocks.
        """
        inner = self.heads * (self.n + self.query.shape[2])
        few = min(inner, self.count)
        if reads[..., 0].numel() * few * (2 * inner * self.count + 4 * few**2) > 20 * _EXACT:
            return None
        same = (found for known, found in self._leads if torch.equal(known, reads))
        if (found := next(same, None)) is None:
            found = torch.full_like(reads[..., 0], torch.inf)
            self._leads.append((reads, found))
        for i, missing in enumerate(wanted & found.isinf()):
            if bool(missing.any()):
                found[i, missing] = self._lead(i, reads[i, missing])
        return found

    def _lead(self, i: int, reads: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        x, b, terms = self._halves(i, reads)
        # scale the rows of X and B to size about 1: powers of others underflow
        lost = torch.cat([self.terms[:, i].flatten(), self.query[:, i].norm(dim=-1).flatten()])
        lost = 2 * _CANCELS * terms @ lost
        most, rows = terms.amax(0), x.norm(dim=1)
        even = torch.where(rows > 0, (most / rows).sqrt(), 0.0)
        inverse = torch.where(even > 0, 1 / even, 0.0)
        x, terms = x * even[:, None], terms * inverse
        sizes = x.norm() + TINY, terms.norm(dim=1) + TINY
        x, b = x / sizes[0], b * inverse[:, None] / sizes[1][:, None, None]
        if x.shape[1] <= len(x):
            h = x.T @ b
            h = h + h.mT
            size = h.flatten(1).norm(dim=1)
            fourth = (h @ h).square().sum((1, 2))
        else:  # tr (M Z Z^T)^4 with Z = (X; B) and the block swap M; blocks (E, F; G, E^T)
            e, f, g = b @ x.T, b @ b.mT, (x @ x.T).expand(len(b), -1, -1)
            size = (2 * e.square() + f.square() + g.square()).sum((1, 2)).sqrt()
            ef, ge, square = e @ f, g @ e, e @ e + f @ g
            fourth = 2 * (square * square.mT + (ef + ef.mT) * (ge + ge.mT)).sum((1, 2))
        room = _rounding_of_powers(x)
        fourth = fourth.clamp_min(0) + room * (size + room) ** 3
        return fourth**0.25 * sizes[0] * sizes[1] + lost

    def _halves(self, i: int, reads: Float[Tensor, "k d"]) -> tuple[Tensor, Tensor, Tensor]:
        """``X = (a; Q)``, ``B_k`` with ``H_k = X^T B_k + B_k^T X``, and norms of the rows of B.

        The norms are ``sum |x_m|`` for a row ``sum x_m``, which bounds rounding if terms cancel.
        """
        p, a = self.p[:, i], self.a[:, i]
        w = torch.einsum("kd,hdv->khv", reads, self.output)
        py = p * torch.einsum("kd,hjd->khj", reads, self.v[:, i])
        of_values = p[..., None] * torch.einsum("khv,hjvp->khjp", w, self.value)
        of_a = of_values + py[..., None] / 2 * a
        of_query = torch.einsum("khj,hjcp->khcp", py, self.key)
        sizes = p * torch.einsum("khv,hjv->khj", w.abs(), self.value.norm(dim=-1))
        sizes = sizes + py.abs() / 2 * a.norm(dim=-1)
        terms = sizes, torch.einsum("khj,hjc->khc", py.abs(), self.key.norm(dim=-1))
        x = torch.cat([a.flatten(0, 1), self.query[:, i].flatten(0, 1)])
        b = torch.cat([of_a.flatten(1, 2), of_query.flatten(1, 2)], 1)  # (k, q, p)
        return x, b, torch.cat([one.flatten(1) for one in terms], 1)

    def lead_together(self, reads: Float[Tensor, "i k d"]) -> Float[Tensor, "p p"] | None:
        """``sum_ik H_ik^2`` of the read-outs of all rows; None if too expensive."""
        return self._squares(reads) if self._little(1) else None

    @cached_property
    def lead_rows(self) -> tuple[Float[Tensor, " i"], Float[Tensor, "p p"]] | None:
        """``(sum_k |H_ik f|^2)^(1/2)`` for every row, and the form of all rows."""
        if not self._little(len(self.rows)):
            return None
        eye = torch.eye(self.output.shape[1], dtype=self.p.dtype)[None]
        squares = torch.stack([self._squares(eye, [i]) for i in range(len(self.rows))])
        rows = torch.stack([top_value(one) for one in squares]).sqrt()
        return rows, squares.sum(0)

    def _little(self, forms: int) -> bool:
        """Whether this many forms of `_squares` over all rows are cheap in time and memory."""
        y = self.heads * int(self.keys_moved.sum()) * (self.value.shape[2] + self.key.shape[2])
        x, p, i = self.heads * (self.n + self.query.shape[2]), self.count, len(self.rows)
        products = forms * y * p * (y + p) + i * x * p * (2 * y + p + x)
        return products <= _EXACT and i * x * (x + y) + y * y <= _HELD

    @cached_property
    def _crossed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``a`` and ``Q`` of rows, ``V`` and ``K`` of moving keys, and their pairwise products."""
        a, q = self.a.transpose(0, 1).contiguous(), self.query.transpose(0, 1).contiguous()
        v, k = self.value[:, self.keys_moved], self.key[:, self.keys_moved]
        return (a, q, v, k), (
            *(torch.einsum("ihjp,iglp->ihjgl", *one) for one in ((a, a), (a, q), (q, q))),
            *(torch.einsum("ihjp,glup->ihjglu", x, y) for x in (a, q) for y in (v, k)),
            *(torch.einsum("hjvp,glup->hjvglu", *one) for one in ((v, v), (v, k), (k, k))),
        )

    def _squares(
        self, reads: Float[Tensor, "i k d"], rows: list[int] | None = None
    ) -> Float[Tensor, "p p"]:
        """``sum_ik H_ik^2`` of read-outs of the given rows, or of all rows.

        ``H_k = W^T N_k W``, ``W = (a; Q; V; K)``, ``N_k = (D_k, C_k; C_k^T, 0)``: for ``(a; Q)``,
        ``D_k`` has ``P_j y_kj`` on the diagonal of keys; ``C_k`` maps values of a key to the key,
        by ``P_j w_k``, and all keys to the query, by ``P_j y_kj``. So every block of
        ``sum_k N_k W W^T N_k`` is a block of ``W W^T`` times sums over k of two of these.
        """
        some, j, add = slice(None) if rows is None else rows, self.keys_moved, torch.einsum
        (a, q, v, k), (*crossed, vv, vk, kk) = self._crossed
        a, q, aa, aq, qq, av, ak, qv, qk = (one[some] for one in (a, q, *crossed))
        p = self.p[:, some].transpose(0, 1)
        w = add("ikd,hdv->ikhv", reads, self.output)
        py = p[:, None] * add("ikd,hijd->ikhj", reads, self.v[:, some])
        # h, g: heads; j, l: keys, moving ones for V or K; u, v, c, e: widths
        ww, wp = add("ikhv,ikgu->ihvgu", w, w), add("ikhv,ikgl->ihvgl", w, py)
        pp = add("ikhj,ikgl->ihjgl", py, py)
        left, right = p[..., j][..., None, None], p[:, None, None][..., j]
        wp_j, pp_j = wp[..., j], pp[..., j]
        pp_jj, aa_j = pp_j[:, :, j], right * aa[..., j]
        # of V, K by V, K: from the blocks they map to, for all rows at once
        m_vv = add("ihjgl,ihvgu->hjvglu", left * aa_j[:, :, j], ww)
        m_vk = add("ihjgc,ihvgl->hjvglc", left * aq[:, :, j], wp_j)
        m_kk = add("ihcge,ihjgl->hjcgle", qq, pp_jj)
        # of a, Q by V, K
        m_av = add("ihjgl,iguhj->ihjglu", aa_j, wp)
        m_av[:, :, j] += (left * right)[..., None] * add("iglhjv,ihvgu->ihjglu", av[:, :, j], ww)
        m_ak = add("ihjgc,ihjgl->ihjglc", aq, pp_j)
        m_ak[:, :, j] += left[..., None] * add("igchjv,ihvgl->ihjglc", qv, wp_j)
        m_qv = right[..., None] * add("iglhjc,iguhj->ihcglu", ak[:, :, j], wp_j)
        m_qk = add("igehjc,ihjgl->ihcgle", qk, pp_jj)
        # of a, Q by a, Q: half of the symmetric form
        m_aa, through = aa * pp / 2, right * add("ihjglu,iguhj->ihjgl", av, wp)
        through[:, :, j] += left * right * add("hjvglu,ihvgu->ihjgl", vv, ww) / 2
        m_aa[..., j] += through
        m_aq = add("ihjglc,ihjgl->ihjgc", ak, pp_j)
        m_aq[:, :, j] += left * add("hjvglc,ihvgl->ihjgc", vk, wp_j)
        m_qq = add("hjcgle,ihjgl->ihcge", kk, pp_jj) / 2

        by_a = add("ihjgl,iglp->ihjp", m_aa, a) + add("ihjgc,igcp->ihjp", m_aq, q)
        by_a += add("ihjglu,glup->ihjp", m_av, v) + add("ihjglu,glup->ihjp", m_ak, k)
        by_q = add("ihcge,igep->ihcp", m_qq, q) + add("ihcglu,glup->ihcp", m_qv, v)
        by_q += add("ihcglu,glup->ihcp", m_qk, k)
        by_v = add("hjvglu,glup->hjvp", m_vv, v) / 2 + add("hjvglu,glup->hjvp", m_vk, k)
        by_k = add("hjvglu,glup->hjvp", m_kk, k) / 2
        both = ((a, by_a), (q, by_q), (v, by_v), (k, by_k))
        half = torch.stack([x.flatten(0, -2).T @ y.flatten(0, -2) for x, y in both]).sum(0)
        # rounding where heads cancel, from the norms of rows and blocks
        size = p[:, None] * add("ikhv,hjv->ikhj", w.abs(), self.value.norm(dim=-1))
        size = size + py.abs() * a.norm(dim=-1)[:, None] / 2
        of_q = add("ikhj,hjc->ikhc", py.abs(), self.key.norm(dim=-1))
        size = size.square().sum((1, 2, 3)) + of_q.square().sum((1, 2, 3))
        size = size @ (a.square().sum((1, 2, 3)) + q.square().sum((1, 2, 3)))
        summed = w.shape[1] + self.count + 2 * sum(one[..., 0].numel() for one in (a, q, v, k))
        room = 5e-16 * (summed + 30)
        return half + half.T + room * size * torch.eye(self.count, dtype=p.dtype)


def _rounding_of_powers(x: Float[Tensor, "q p"]) -> float:
    """Relative rounding of powers up to the fourth of ``X^T B + B^T X``, with a margin."""
    return 2e-16 * (24 * sum(x.shape) + 200)


@dataclass(frozen=True, eq=False)
class Bend:
    """A read-out ``sum_i <l_i, f_i(x)>``: its Hessian at the centre, in parts."""

    hessian: Tensor  # (p, p)
    y: Tensor  # centred values of the read-out, (h, i, j)
    read: Tensor  # functionals of moving values, (h, i, j, p)
    n: Tensor  # the same, centred
    size: Tensor  # joint norm of these functionals, (h, i)


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
    return Bend(h, y, read, n, size)
