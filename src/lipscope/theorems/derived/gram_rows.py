"""Rows of the Jacobian of several heads: their Gram matrices under weights, never a block.

What the row-Gram certificate (`lipscope.theorems.derived.row_gram`) is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lipscope.theorems.around import Around
from lipscope.theorems.head import UNIT
from lipscope.theorems.head_at import HeadsAt
from lipscope.theorems.spectrum import eigenvalue

_CHUNK = 2**26  # bytes of Gram matrices at a time
_FLOOR = 1e-6  # smallest weight beside the largest one
_PERRON = 100  # steps to the Perron vector at the most; the weights need no more of it
_CANCELLATION = 1e-13  # rounding of a difference of matrices, beside the trace of the first


class JacobianRows:
    """The rows of the Jacobian of several heads, ``J_ij = W Y_ij``.

    Through a norm in front a block is followed by ``s_j (I - x_j x_j^T)``, whose square is
    ``s_j^2 (I - κ_j x_j x_j^T)`` with ``κ_j = 2 - |x_j|^2``: what a block does along ``x_j`` is
    taken off its Gram matrix.

    In a residual map a block is ``L_i J_ij + δ_ij D_i`` (`Around`): rows are multiplied by ``L_i``,
    and the diagonal block, formed whole, adds ``L_i J_ii D_i^T``, its transpose and ``D_i D_i^T``.

    Args:
        at: The heads at X; on the unit sphere if there is a norm in front.
        slope: Of that norm, ``s``, ``(n,)``, or None.
        around: What stands around attention, or None.
    """

    def __init__(
        self, at: HeadsAt, slope: Tensor | None = None, around: Around | None = None
    ) -> None:
        self.at, self.slope, self.around = at, slope, around
        heads, n, kv = at.v.shape
        self.concat = heads * kv
        # ‖W Y‖ = ‖R Y‖ for W = U R; without projection R is the identity.
        self.factor = at.output
        if at.output is not None and around is None:
            self.factor = torch.linalg.qr(at.output, mode="r").R
        self.width = self.concat if self.factor is None else len(self.factor)
        self.values = at.value.reshape(self.concat, -1)
        self.value_gram = self.values @ self.values.T
        self.value_key = self.values @ at.key.flatten(0, 1).T  # V_h K_g^T
        self.key_gram = at.key.flatten(0, 1) @ at.key.flatten(0, 1).T
        self.query_gram = at.query.flatten(0, 1) @ at.query.flatten(0, 1).T
        self.value_query = self.values @ at.query.flatten(0, 1).T
        self.key_query = at.key.flatten(0, 1) @ at.query.flatten(0, 1).T
        self.support = (at.p > 0).any(0) | torch.eye(n, dtype=torch.bool)
        turned = 1.0 if at.rotary is None else at.heads[0].rotation_norm
        self.query_size, self.key_size, self.value_size = (
            factor * w.flatten(1).norm(dim=1, keepdim=True)
            for w, factor in ((at.query, turned), (at.key, turned), (at.value, 1.0))
        )
        self.kappa = 2 - at.x.square().sum(-1)
        self.own_keys = at.x @ at.key.mT  # no bias, no rotation: <a_ij, x_j> = <pulled, K x_j>
        self.own_queries = at.x @ at.query.mT

    def weights(self, seen: Tensor) -> Tensor:
        """Weights that equalise the columns if blocks were numbers ``sqrt(seen)``."""
        size = seen.sqrt()
        most = size.max()
        if not 0 < most < math.inf:  # all blocks are zero, or overflow: any weights hold
            return self.support.to(size)
        size = size / most
        # A block that no probe saw still needs a positive weight, and one that no number
        # can tell from zero beside the others.
        size = size.clamp_min(_FLOOR).masked_fill(~self.support, 0.0)
        perron = torch.ones(len(size), dtype=size.dtype)
        for _ in range(_PERRON // 10):
            before = perron
            for _ in range(10):  # grows by less than n^2 a time
                perron = size.T @ (size @ perron)
            perron = perron / perron.norm()
            if float((perron - before).abs().max()) < UNIT:
                break
        return size / (perron + 1e-3 * perron.max())

    def _pulled(self, i: int) -> Tensor:
        """``R_j^T R_i q_i``, ``(H, m, k)``."""
        return self.at.pulled(slice(i, i + 1))[:, 0]

    def _covariance(self, i: int) -> Tensor:
        return self.at.covariance(slice(i, i + 1))[:, 0]

    def _rows_at_once(self) -> int:
        return max(1, _CHUNK // (8 * max(self.concat, len(self.at.x)) * self.concat))

    def _chunks(self) -> Iterator[slice]:
        n, step = len(self.at.x), self._rows_at_once()
        return (slice(i, min(i + step, n)) for i in range(0, n, step))

    def eigenvalues(self, weights: Tensor) -> Tensor:
        """``ω_i``, ``(n,)``."""
        parts = [eigenvalue(self._grams(weights, rows)) for rows in self._chunks()]
        hidden = torch.stack([self._hidden(i, row) for i, row in enumerate(weights)])
        return torch.cat(parts) + hidden

    def probe(self, weights: Tensor, probes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lower values of ``ω_i``, the directions that carry them, and what these see."""
        omega, directions, seen = [], [], []
        for rows in self._chunks():
            product, basis = self._products(weights, rows), probes[rows]
            for _ in range(3):  # subspace iteration
                basis = torch.linalg.qr(product(basis)).Q
            small = basis.mT @ product(basis)
            if not bool(small.isfinite().all()):
                return weights.new_full((len(weights),), math.inf), probes, weights
            values, turn = torch.linalg.eigh(small)
            omega.append(values[:, -1])
            # Directions near the top share the weight: one alone would leave the others
            # to the next round, and the search would swing between them.
            share = (values.clamp_min(0) / values[:, -1:].clamp_min(1e-300)) ** 4
            share = share / share.sum(-1, keepdim=True)
            directions.append(basis @ turn)
            seen.append(self._seen(directions[-1] * share.sqrt()[:, None], rows))
        return torch.cat(omega), torch.cat(directions), torch.cat(seen)

    def seen(self, probes: Tensor) -> Tensor:
        """``sum_m |J_ij^T z_m|^2``, ``(n, n)``."""
        return torch.cat([self._seen(probes[rows], rows) for rows in self._chunks()])

    def _seen(self, probes: Tensor, rows: slice) -> Tensor:
        return torch.stack([self._seen_row(i, probes[i - rows.start]) for i in span(rows)])

    def _seen_row(self, i: int, probes: Tensor) -> Tensor:
        """One row of `seen`: sizes of ``J_ij^T z = sum_h c_hj (V_h^T z_h + a_hj <y_hj, z_h>)``."""
        at = self.at
        heads, _, kv = at.v.shape
        z = probes if self.around is None else self.around.back(i, probes)
        z = z if self.factor is None else self.factor.T @ z
        parts = z.view(heads, kv, -1)
        c = at.p[:, i]
        through = (at.value.mT @ parts).permute(0, 2, 1)  # V_h^T z_h, (H, m, d)
        heights = c[:, :, None] * ((at.v - at.o[:, i, None]) @ parts)  # (H, n, m)
        own = ((self._covariance(i).mT @ parts).mT @ at.query).sum(0)  # (m, d)
        if at.rotary is not None:
            pulled = torch.einsum("hj,hmd->jmd", c, through)
            pulled += torch.einsum("hjm,hjk,hkd->jmd", heights, self._pulled(i), at.key)
            pulled[i] += own
            return self._through_norm(i, parts, pulled.square().sum((1, 2)), probes)
        # Sums of squares from inner products of heads: no vector of d numbers per token.
        a = torch.einsum("hk,hkd->hd", at.q[:, i], at.key)
        products = torch.einsum("hmd,gmd->hg", through, through)
        mixed = torch.einsum("gjm,hmg->hj", heights, through @ a.T)
        seen = (c * (products @ c + 2 * mixed)).sum(0)
        seen += (heights * torch.einsum("hg,gjm->hjm", a @ a.T, heights)).sum((0, 2))
        here = torch.einsum("h,hmd->md", c[:, i], through) + heights[:, i].T @ a + own
        seen[i] = here.square().sum()
        return self._through_norm(i, parts, seen, probes)

    def _through_norm(self, i: int, parts: Tensor, seen: Tensor, probes: Tensor) -> Tensor:
        """What is left of one row of `seen` after the norm; the diagonal with what is beside."""
        if self.slope is not None:
            along = torch.einsum("hjk,hkm->jm", self._along(i), parts).square().sum(1)
            seen = self.slope.square() * (seen - self.kappa * along)
        if self.around is not None:
            block = self.around.through(i, self._own_block(i)) + self.around.own(i)
            seen[i] = (block.T @ probes).square().sum()
        return seen.clamp_min(0)

    def _own_block(self, i: int) -> Tensor:
        """``J_ii`` as it stands, ``(d_out, d)``, after the norm in front."""
        at = self.at
        reader = self._pulled(i)[:, i if at.rotary is not None else 0]
        a = torch.einsum("hk,hkd->hd", reader, at.key)
        parts = at.value + (at.v[:, i] - at.o[:, i])[..., None] * a[:, None]
        parts = at.p[:, i, i, None, None] * parts + self._covariance(i) @ at.query
        block = parts.flatten(0, 1)
        block = block if self.factor is None else self.factor @ block
        if self.slope is None:
            return block
        x = at.x[i]
        return self.slope[i] * (block - torch.outer(block @ x, x))

    def _along(self, i: int) -> Tensor:
        """``Y_ij x_j``: what blocks do to a move of every token along itself, ``(H, n, k_v)``."""
        at = self.at
        inner = (self._pulled(i) * self.own_keys).sum(-1)  # <a_ij, x_j>
        along = at.p[:, i, :, None] * (at.v + inner[:, :, None] * (at.v - at.o[:, i, None]))
        along[:, i] += (self._covariance(i) @ self.own_queries[:, i, :, None])[..., 0]
        return along

    def _products(self, weights: Tensor, rows: slice) -> Callable[[Tensor], Tensor]:
        """What `_grams` do to some directions each, ``(r, width, m)``; formed if it must be."""
        factor = self.factor
        if factor is None or self.around is not None:
            grams = self._grams(weights, rows)
            return lambda z: grams @ z
        inner = torch.stack([self._gram(i, weights[i]) for i in span(rows)])
        return lambda z: ((inner @ (z.mT @ factor).mT).mT @ factor.T).mT

    def _grams(self, weights: Tensor, rows: slice) -> Tensor:
        """``sum_j J_ij J_ij^T / p_ij`` for some rows, ``(r, width, width)``."""
        grams = torch.stack([self._gram(i, weights[i]) for i in span(rows)])
        if self.factor is not None:
            grams = self.factor @ grams @ self.factor.T
        if self.around is not None:
            pairs = zip(span(rows), grams, strict=True)
            grams = torch.stack([self._beside(i, gram, weights[i]) for i, gram in pairs])
        return (grams + grams.mT) / 2

    def _beside(self, i: int, gram: Tensor, weights: Tensor) -> Tensor:
        """The Gram matrix of one row with what is around attention."""
        assert self.around is not None
        gram = self.around.through(i, self.around.through(i, gram).T)
        own = self.around.own(i)
        crossed = self.around.through(i, self._own_block(i)) @ own.T
        return gram + (crossed + crossed.T + own @ own.T) / weights[i]

    def _gram(self, i: int, weights: Tensor) -> Tensor:
        at = self.at
        heads, n, kv = at.v.shape
        c, inverse = at.p[:, i], self._inverse(i, weights)
        scaled = c * inverse
        y = (c[:, :, None] * (at.v - at.o[:, i, None])).mT.reshape(self.concat, n)
        weighted = y * inverse
        gram = _expand(scaled @ c.T, kv) * self.value_gram
        if at.rotary is not None:
            pulled = self._pulled(i)
            mixed, quadratic = self._rotary_terms(pulled, scaled, y, weighted)
            query = pulled[:, i]
        else:
            query = at.q[:, i]
            # V_h a_g for every pair of heads, and <a_h, a_g>.
            along = self.value_key.view(self.concat, heads, -1)
            through = torch.einsum("chk,hk->ch", along, query).view(heads, kv, heads, 1)
            mixed = through * (scaled @ y.T).view(heads, 1, heads, kv)
            mixed = mixed.reshape(self.concat, self.concat)
            products = _bilinear(self.key_gram, query, query)
            quadratic = _expand(products, kv) * (weighted @ y.T)
        gram = gram + mixed + mixed.T + quadratic
        gram = gram + self._diagonal(i, query) * inverse[i]
        if self.slope is None:
            return gram
        along = self._along(i).mT.reshape(self.concat, n)
        rounding = _CANCELLATION * gram.trace() * torch.eye(self.concat, dtype=gram.dtype)
        return gram - (along * (self.kappa * inverse)) @ along.T + rounding

    def _inverse(self, i: int, weights: Tensor) -> Tensor:
        return torch.where(self.support[i], self.at.columns(self.slope).square() / weights, 0.0)

    def _sizes(self, i: int) -> Tensor:
        """Of the parts of every block, head by head, before they cancel, ``(H, n)``."""
        at = self.at
        apart = (at.v - at.o[:, i, None]).norm(dim=-1)
        reach = self.key_size * at.q[:, i].norm(dim=-1, keepdim=True)
        sizes = at.p[:, i] * (self.value_size + apart * reach)
        sizes[:, i] += self._covariance(i).flatten(1).norm(dim=1) * self.query_size[:, 0]
        return sizes

    def _hidden(self, i: int, weights: Tensor) -> Tensor:
        """What rounding may take off ``ω_i``, in units of what cancels in its Gram matrix."""
        inverse = self._inverse(i, weights)
        outer = weights.new_tensor(self.at.outer).square()
        gram = outer @ (self._sizes(i).square() @ inverse)
        terms = len(outer)
        if self.around is not None:
            gram = gram * self.around.lefts[i].square()
            gram, terms = gram + self.around.beside[i].square() / weights[i], terms + 1
        return UNIT * terms * math.sqrt(self.concat + len(inverse)) * gram

    def _rotary_terms(
        self, pulled: Tensor, scaled: Tensor, y: Tensor, weighted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The terms with one and with two factors ``a_hj``, which depend on ``j``."""
        heads, n, k = pulled.shape
        kv = self.concat // heads
        mixed = torch.empty_like(self.value_gram)
        quadratic = torch.empty_like(self.value_gram)
        spread = scaled.repeat_interleave(kv, 0)
        for g in range(heads):
            block = slice(g * kv, (g + 1) * kv)
            keys = slice(g * k, (g + 1) * k)
            through = self.value_key[:, keys] @ pulled[g].T  # V_h a_gj
            mixed[:, block] = (through * spread) @ y[block].T
            others = self.key_gram[:, keys] @ pulled[g].T  # K_h a_gj
            inner = (others.view(heads, k, n) * pulled.mT).sum(1)  # <a_hj, a_gj>
            quadratic[:, block] = (weighted * inner.repeat_interleave(kv, 0)) @ y[block].T
        return mixed, quadratic

    def _diagonal(self, i: int, query: Tensor) -> Tensor:
        """``(Y + S)(Y + S)^T - Y Y^T`` for the block on the diagonal, ``S_h = Cov_h Q_h``."""
        at = self.at
        heads, _, kv = at.v.shape
        cov = self._covariance(i)
        c = at.p[:, i, i]
        y = (at.v[:, i] - at.o[:, i]) * c[:, None]
        # Y Q_g^T for every g: c_h (V_h + y_h a_h^T) Q_g^T
        k = at.q.shape[-1]
        a_query = torch.einsum("hk,hkg->hg", query, self.key_query.view(heads, k, -1))
        y_query = c.repeat_interleave(kv)[:, None] * self.value_query
        y_query = y_query + y.reshape(-1, 1) * a_query.repeat_interleave(kv, 0)
        # (Y + S / 2) S^T and its transpose, head by head: S is block diagonal before Q.
        half = y_query + (cov @ self.query_gram.view(heads, k, -1)).view(self.concat, -1) / 2
        crossed = half.view(self.concat, heads, k).transpose(0, 1) @ cov.mT
        crossed = crossed.transpose(0, 1).reshape(self.concat, self.concat)
        return crossed + crossed.T


def span(rows: slice) -> range:
    """The indices of some rows."""
    return range(rows.start, rows.stop)


def _expand(matrix: Tensor, times: int) -> Tensor:
    """Each entry of a ``(H, H)`` matrix as a constant block."""
    return matrix.repeat_interleave(times, 0).repeat_interleave(times, 1)


def _bilinear(gram: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``<l_h, G_hg r_g>`` for every pair of heads, ``(H, H)``."""
    heads, k = left.shape
    read = (left.view(heads, k, 1) * gram.view(heads, k, -1)).sum(1)
    return (read.view(heads, heads, k) * right).sum(-1)
