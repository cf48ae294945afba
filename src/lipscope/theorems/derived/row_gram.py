"""The row-Gram certificate: a local bound for all heads jointly.

For any positive weights ``p_ij``, the Cauchy–Schwarz inequality on row ``i`` gives
``|sum_j J_ij e_j|^2 <= ω_i sum_j p_ij |e_j|^2`` with ``ω_i`` the top eigenvalue of
``sum_j J_ij J_ij^T / p_ij``. Hence ``‖J‖^2 <= max_j sum_i p_ij ω_i``. Heads are summed inside
``J_ij`` before any norm is taken, which is far sharper than summing bounds of heads. The weights
affect only the sharpness; they come from alternating between the eigenvectors of ``ω_i`` and
the Perron vector of the block norms along these. Proof: ``docs/theory/local-certificates.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope.linalg import eigenvalue, norm_in_double
from lipscope.theorems.head import UNIT, HeadAt, HeadsAt
from lipscope.theorems.register import DERIVED, theorem
from lipscope.theorems.residual import Around

PROBES = 8  # directions of a row's output space in each round
_CHUNK = 2**23  # bytes of the largest tensor of a chunk of rows
_FLOOR = 1e-6  # smallest weight relative to the largest one
_PERRON = 100  # maximum number of Perron iterations; the weights need no more accuracy
_CANCELLATION = 1e-13  # rounding of a matrix difference relative to the trace of the first matrix


def _cache_last(make: Callable[[Any, slice], Any]) -> Callable[[Any, slice], Any]:
    """Cache the result for the last rows: repeated passes over a short input use the same rows."""

    def cached(self: JacobianRows, rows: slice) -> Any:
        if make not in self.kept or self.kept[make][0] != rows:
            self.kept[make] = rows, make(self, rows)
        return self.kept[make][1]

    return cached


class JacobianRows:
    """The rows of the Jacobian of several heads, ``J_ij = W Y_ij``.

    A norm in front multiplies a block by ``s_j (I - x_j x_j^T)``, whose square is
    ``s_j^2 (I - κ_j x_j x_j^T)`` with ``κ_j = 2 - |x_j|^2``: the action of a block along ``x_j``
    is subtracted from its Gram matrix.

    In a residual map a block is ``L_i J_ij + δ_ij D_i`` (`Around`): rows are multiplied by ``L_i``,
    and the full diagonal block adds ``L_i J_ii D_i^T``, its transpose and ``D_i D_i^T``.
    """

    def __init__(
        self, at: HeadsAt, slope: Tensor | None = None, around: Around | None = None
    ) -> None:
        self.at, self.slope, self.around = at, slope, around
        self.kept: dict[Callable[..., Any], tuple[slice, Any]] = {}
        heads, n, kv = at.v.shape
        self.concat = heads * kv
        # ‖W Y‖ = ‖R Y‖ for W = U R; without a projection R is the identity.
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
        turned = at.heads[0].rotation_norm
        self.query_size, self.key_size, self.value_size = (
            factor * w.flatten(1).norm(dim=1, keepdim=True)
            for w, factor in ((at.query, turned), (at.key, turned), (at.value, 1.0))
        )
        self.slopes = at.columns(slope).square()
        self.outer_squares = at.x.new_tensor(at.outer).square()
        self.kappa = 2 - at.x.square().sum(-1)
        self.own_keys = at.x @ at.key.mT  # no bias, no rotation: <a_ij, x_j> = <pulled, K x_j>
        self.own_queries = at.x @ at.query.mT

    def weights(self, seen: Tensor) -> Tensor:
        """Weights that equalise the columns for scalar blocks ``sqrt(seen)``."""
        size = seen.sqrt()
        most = size.max()
        if not 0 < most < math.inf:  # all blocks are zero or overflow: any weights are valid
            return self.support.to(size)
        size = size / most
        # Blocks that no probe detects, or that are negligible relative to the others, still need
        # a positive weight.
        size = size.clamp_min(_FLOOR).masked_fill(~self.support, 0.0)
        perron = torch.ones(len(size), dtype=size.dtype)
        for _ in range(_PERRON // 10):
            before = perron
            for _ in range(10):  # each step grows by less than n^2
                perron = size.T @ (size @ perron)
            perron = perron / perron.norm()
            if float((perron - before).abs().max()) < UNIT:
                break
        return size / (perron + 1e-3 * perron.max())

    def _chunks(self) -> Iterator[slice]:
        (n, d), heads = self.at.x.shape, len(self.at.heads)
        read = self.concat if self.at.rotary is None else max(self.concat, d)
        most = max(self.concat**2, self.width**2, n * max(heads, PROBES) * read)
        step = max(1, _CHUNK // (8 * most))
        return (slice(i, min(i + step, n)) for i in range(0, n, step))

    def eigenvalues(self, weights: Tensor) -> Tensor:
        """``ω_i``, ``(n,)``."""
        parts = [
            eigenvalue(self._grams(weights, rows)) + self._hidden(weights, rows)
            for rows in self._chunks()
        ]
        return torch.cat(parts)

    def probe(self, weights: Tensor, probes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lower bounds of ``ω_i``, their directions, and the squared block norms along these."""
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
            # Directions near the top share the weight: a single one would leave the others to
            # the next round, and the search would oscillate between them.
            share = (values.clamp_min(0) / values[:, -1:].clamp_min(1e-300)) ** 4
            share = share / share.sum(-1, keepdim=True)
            directions.append(basis @ turn)
            seen.append(self._seen(directions[-1] * share.sqrt()[:, None], rows))
        return torch.cat(omega), torch.cat(directions), torch.cat(seen)

    def seen(self, probes: Tensor) -> Tensor:
        """``sum_m |J_ij^T z_m|^2``, ``(n, n)``."""
        return torch.cat([self._seen(probes[rows], rows) for rows in self._chunks()])

    # Below, the leading axis of every tensor is the rows r, then heads.

    @_cache_last
    def _at_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Value weights, and values minus the row mean: ``(r, H, n)`` and ``(…, k_v)``."""
        return self.at.p[:, rows].transpose(0, 1), self.at.y(rows).transpose(0, 1)

    def _itself(self, rows: slice) -> tuple[Tensor, Tensor]:
        """``P_ii`` and ``V y_ii``: ``(r, H)`` and ``(r, H, k_v)``."""
        at, i = self.at, torch.arange(rows.start, rows.stop)
        return at.p[:, i, i].T, (at.v[:, rows] - at.o[:, rows]).transpose(0, 1)

    def _pulled(self, rows: slice) -> Tensor:
        """``R_j^T R_i q_i``, ``(r, H, m, k)``."""
        return self.at.pulled(rows).transpose(0, 1)

    @_cache_last
    def _covariance(self, rows: slice) -> Tensor:
        return self.at.covariance(rows).transpose(0, 1)

    def _query(self, rows: slice) -> Tensor:
        """The query factor of the diagonal block, ``(r, H, k)``."""
        q = self.at.q[:, rows]
        return (q if self.at.rotary is None else self.at.turned_back(rows, q)).transpose(0, 1)

    def _seen(self, probes: Tensor, rows: slice) -> Tensor:
        """`seen` for some rows: ``J_ij^T z = sum_h c_hj (V_h^T z_h + a_hj <y_hj, z_h>)``."""
        at = self.at
        heads, _, kv = at.v.shape
        z = probes if self.around is None else self.around.back(rows, probes)
        z = z if self.factor is None else self.factor.T @ z
        parts = z.unflatten(1, (heads, kv))
        c, y = self._at_rows(rows)
        through = (at.value.mT @ parts).mT  # V_h^T z_h, (r, H, m, d)
        heights = c[..., None] * (y @ parts)  # (r, H, n, m)
        here = ((self._covariance(rows).mT @ parts).mT @ at.query).sum(1)  # (r, m, d)
        if at.rotary is not None:
            pulled = torch.einsum("rhj,rhmd->rjmd", c, through)
            reads = self._pulled(rows)
            pulled += torch.einsum("rhjm,rhjk,hkd->rjmd", heights, reads, at.key)
            pulled[diagonal(rows, 1)] += here
            return self._through_norm(rows, parts, pulled.square().sum((2, 3)), probes)
        # Sums of squares from inner products of heads, without d-dimensional vectors per token.
        a = (self._query(rows)[:, :, None] @ at.key)[:, :, 0]
        flat = through.flatten(2)
        mixed = (through @ a.mT[:, None]).transpose(2, 3).flatten(2)  # (r, h, (g, m))
        mixed = mixed @ heights.mT.flatten(1, 2)
        seen = (c * (flat @ flat.mT @ c + 2 * mixed)).sum(1)
        across = (a @ a.mT) @ heights.flatten(2)
        seen += (heights * across.view_as(heights)).sum((1, 3))
        here += torch.einsum("rh,rhmd->rmd", c[diagonal(rows)], through)
        here += heights[diagonal(rows)].mT @ a
        seen[diagonal(rows, 1)] = here.square().sum((1, 2))
        return self._through_norm(rows, parts, seen, probes)

    def _through_norm(self, rows: slice, parts: Tensor, seen: Tensor, probes: Tensor) -> Tensor:
        """Rows of `seen` after the norm in front, including the residual on the diagonal."""
        if self.slope is not None:
            along = self._along(rows).transpose(1, 2).flatten(2) @ parts.flatten(1, 2)
            seen = self.slope.square() * (seen - self.kappa * along.square().sum(-1))
        if self.around is not None:
            blocks = self.around.through(rows, self._own_blocks(rows)) + self.around.own(rows)
            seen[diagonal(rows, 1)] = (blocks.mT @ probes).square().sum((1, 2))
        return seen.clamp_min(0)

    def _own_blocks(self, rows: slice) -> Tensor:
        """The blocks ``J_ii``, ``(r, d_out, d)``, after the norm in front."""
        at = self.at
        c, y = self._itself(rows)
        a = self._query(rows)[:, :, None] @ at.key
        parts = c[..., None, None] * (at.value + y[..., None] * a)
        blocks = (parts + self._covariance(rows) @ at.query).flatten(1, 2)
        blocks = blocks if self.factor is None else self.factor @ blocks
        if self.slope is None:
            return blocks
        x = at.x[rows, :, None]
        return self.slope[rows, None, None] * (blocks - (blocks @ x) * x.mT)

    def _along(self, rows: slice) -> Tensor:
        """``Y_ij x_j``: the effect of moving each token along itself, ``(r, H, n, k_v)``."""
        c, y = self._at_rows(rows)
        inner = (self._pulled(rows) * self.own_keys).sum(-1, keepdim=True)  # <a_ij, x_j>
        along = c[..., None] * (self.at.v + inner * y)
        queries = self.own_queries[:, rows].transpose(0, 1)
        along[diagonal(rows)] += (self._covariance(rows) @ queries[..., None])[..., 0]
        return along

    def _products(self, weights: Tensor, rows: slice) -> Callable[[Tensor], Tensor]:
        """Products of `_grams` with some directions, ``(r, width, m)``; formed only if needed."""
        factor = self.factor
        if factor is None or self.around is not None:
            grams = self._grams(weights, rows)
            return lambda z: grams @ z
        inner = self._inner(weights, rows)
        return lambda z: ((inner @ (z.mT @ factor).mT).mT @ factor.T).mT

    def _grams(self, weights: Tensor, rows: slice) -> Tensor:
        """``sum_j J_ij J_ij^T / p_ij`` for some rows, ``(r, width, width)``."""
        grams = self._inner(weights, rows)
        if self.factor is not None:
            grams = self.factor @ grams @ self.factor.T
        if self.around is not None:
            grams = self._beside(weights, rows, grams)
        return (grams + grams.mT) / 2

    def _beside(self, weights: Tensor, rows: slice, grams: Tensor) -> Tensor:
        """Gram matrices including the residual path."""
        assert self.around is not None
        grams = self.around.through(rows, self.around.through(rows, grams).mT)
        beside = self.around.own(rows)
        crossed = self.around.through(rows, self._own_blocks(rows)) @ beside.mT
        added = crossed + crossed.mT + beside @ beside.mT
        return grams + added / weights[rows][diagonal(rows, 1)][:, None, None]

    def _inner(self, weights: Tensor, rows: slice) -> Tensor:
        """Gram matrices before the output projection, ``(r, H k_v, H k_v)``."""
        at = self.at
        heads, n, kv = at.v.shape
        inverse = self._inverse(weights, rows)
        c, y = self._at_rows(rows)
        scaled = c * inverse[:, None]
        y = (c[..., None] * y).mT.reshape(-1, self.concat, n)
        weighted = y * inverse[:, None]
        grams = _expand(scaled @ c.mT, kv) * self.value_gram
        query = self._query(rows)
        if at.rotary is not None:
            mixed, quadratic = self._rotary_terms(self._pulled(rows), scaled, y, weighted)
        else:
            # V_h a_g for all pairs of heads, and <a_h, a_g>.
            along = self.value_key.view(self.concat, heads, -1)
            through = torch.einsum("chk,rhk->rch", along, query)
            mixed = (scaled @ y.mT).view(-1, heads, 1, heads, kv)
            mixed = through.view(-1, heads, kv, heads, 1) * mixed
            mixed = mixed.reshape(-1, self.concat, self.concat)
            keys = query[:, :, None] @ self.key_gram.view(heads, query.shape[2], -1)
            products = (keys.view(*query.shape[:2], heads, -1) * query[:, None]).sum(-1)
            quadratic = _expand(products, kv) * (weighted @ y.mT)
        grams = grams + mixed + mixed.mT + quadratic
        grams = grams + self._diagonal(rows, query) * inverse[diagonal(rows, 1)][:, None, None]
        if self.slope is None:
            return grams
        along = self._along(rows).mT.reshape(-1, self.concat, n)
        trace = grams.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        rounding = _CANCELLATION * trace * torch.eye(self.concat, dtype=grams.dtype)
        return grams - (along * (self.kappa * inverse)[:, None]) @ along.mT + rounding

    def _inverse(self, weights: Tensor, rows: slice) -> Tensor:
        return torch.where(self.support[rows], self.slopes / weights[rows], 0.0)

    def _sizes(self, rows: slice) -> Tensor:
        """Norms of the parts of each block by head, before cancellation, ``(r, H, n)``."""
        c, y = self._at_rows(rows)
        sizes = c * (self.value_size + y.norm(dim=-1) * self._reach(rows))
        covariance = self._covariance(rows).flatten(2).norm(dim=2)
        sizes[diagonal(rows)] += covariance * self.query_size[:, 0]
        return sizes

    def _reach(self, rows: slice) -> Tensor:
        """``>= |a_ij|`` in terms of the key weights and queries, ``(r, H, 1)``."""
        return (self.key_size * self.at.q[:, rows].norm(dim=-1)).T[..., None]

    def _hidden(self, weights: Tensor, rows: slice) -> Tensor:
        """Rounding error of ``ω_i``, in units of the terms that cancel in its Gram matrix."""
        inverse = self._inverse(weights, rows)
        outer = self.outer_squares
        grams = (self._sizes(rows).square() @ inverse[..., None])[..., 0] @ outer
        terms = len(outer)
        if self.around is not None:
            grams = grams * self.around.lefts[rows].square()
            beside = self.around.beside[rows].square() / weights[rows][diagonal(rows, 1)]
            grams, terms = grams + beside, terms + 1
        return UNIT * terms * math.sqrt(self.concat + inverse.shape[1]) * grams

    def _rotary_terms(
        self, pulled: Tensor, scaled: Tensor, y: Tensor, weighted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The terms linear and quadratic in ``a_hj``, which depend on ``j``."""
        _, heads, _, k = pulled.shape
        kv = self.concat // heads
        mixed, quadratic = [], []
        spread = scaled.repeat_interleave(kv, 1)
        for g in range(heads):
            block = y[:, g * kv : (g + 1) * kv].mT
            keys = slice(g * k, (g + 1) * k)
            through = self.value_key[:, keys] @ pulled[:, g].mT  # V_h a_gj
            mixed.append((through * spread) @ block)
            others = self.key_gram[:, keys] @ pulled[:, g].mT  # K_h a_gj
            inner = (others.unflatten(1, (heads, k)) * pulled.mT).sum(2)  # <a_hj, a_gj>
            quadratic.append((weighted * inner.repeat_interleave(kv, 1)) @ block)
        return torch.cat(mixed, 2), torch.cat(quadratic, 2)

    def _diagonal(self, rows: slice, query: Tensor) -> Tensor:
        """``(Y + S)(Y + S)^T - Y Y^T`` for the blocks on the diagonal, ``S_h = Cov_h Q_h``."""
        heads, k, kv = query.shape[1], query.shape[2], self.concat // query.shape[1]
        cov = self._covariance(rows)
        c, y = self._itself(rows)
        # Y Q_g^T for every g: c_h (V_h + y_h a_h^T) Q_g^T
        a_query = query[:, :, None] @ self.key_query.view(heads, k, -1)  # (r, H, 1, H k)
        y_query = self.value_query.view(heads, kv, -1) + y[..., None] * a_query
        # (Y + S / 2) S^T and its transpose, by head: S is block diagonal before Q.
        half = c[..., None, None] * y_query + cov @ self.query_gram.view(heads, k, -1) / 2
        half = half.flatten(1, 2).unflatten(2, (heads, k)).transpose(1, 2)
        crossed = (half @ cov.mT).transpose(1, 2).flatten(2)
        return crossed + crossed.mT


def diagonal(rows: slice, axis: int = 2) -> tuple[slice | Tensor, ...]:
    """Index of row ``i`` at token ``i`` in ``(r, …, n, …)``, with tokens on the given axis."""
    i = torch.arange(rows.start, rows.stop)
    between: tuple[slice, ...] = (slice(None),) * (axis - 1)
    return (i - rows.start, *between, i)


def _expand(matrices: Tensor, times: int) -> Tensor:
    """Each entry of ``(H, H)`` matrices as a constant block."""
    return matrices.repeat_interleave(times, -2).repeat_interleave(times, -1)


class JacobianColumns(JacobianRows):
    """The transposed Jacobian by rows: block ``ji`` is ``J_ij^T``.

    With ``B`` the value and key weights stacked, ``J_kj = R_kj B`` where ``R_kj`` is
    ``W [P_kj I, P_kj y_kj q_kj^T]`` for each head; the diagonal block also has its covariance.
    Computed in an orthonormal basis of the row space of the weights, if that is smaller than a
    token and nothing is added to the output.
    """

    def __init__(
        self, at: HeadsAt, slope: Tensor | None = None, around: Around | None = None
    ) -> None:
        super().__init__(at, slope, around)
        read = torch.cat([w.flatten(0, 1) for w in (at.value, at.key, at.query)])
        whole = around is not None or len(read) >= read.shape[1]
        basis = None if whole else torch.linalg.qr(read.T).Q
        self.value, self.key, self.query = (
            w if basis is None else w @ basis for w in (at.value, at.key, at.query)
        )
        self.tokens = at.x if basis is None else at.x @ basis
        unread = torch.zeros_like(at.x) if basis is None else at.x - self.tokens @ basis.T
        # 1 - κ |x|^2 with the basis part of x; equals (1 - |x|^2)^2 in the full space
        left = (1 - at.x.square().sum(-1)).square() + self.kappa * unread.square().sum(-1)
        self.left = left.sqrt()
        self.width = self.tokens.shape[1]
        heads, _, kv = at.v.shape
        outer = torch.eye(self.concat, dtype=at.x.dtype) if self.factor is None else self.factor
        self.outer = outer.view(-1, heads, kv).transpose(0, 1)  # (H, width out, k_v)
        self.outer_gram = outer.T @ outer
        self.support = self.support.T
        self.slopes = torch.ones_like(self.slopes)  # `_bent` applies them

    def squares(self) -> tuple[Tensor, Tensor]:
        """Squared column norms from below and above, allowing for rounding."""
        ones = torch.ones_like(self.support, dtype=self.at.x.dtype)
        hidden = torch.cat([self._hidden(ones, rows) for rows in self._chunks()])
        above = self.eigenvalues(ones)
        return (above - 2 * hidden).clamp_min(0), above

    def _bent(self, rows: slice, m: Tensor) -> Tensor:
        """``s_j (I - x_j x_j^T) m_j`` in the basis, up to a rotation; ``m`` without a norm."""
        if self.slope is None:
            return m
        x = self.tokens[rows, :, None]
        # the root of (I - x x^T)^2 = I - κ x x^T restricted to the basis
        root = (1 - self.left[rows, None, None]) / (x.mT @ x).clamp_min(1e-300)
        return self.slope[rows, None, None] * (m - x @ (x.mT @ m) * root)

    @_cache_last
    def _at_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Value weights, and values minus the mean of the reading row."""
        at = self.at
        y = at.v[:, rows, None] - at.o[:, None]
        return at.p[:, :, rows].permute(2, 0, 1), y.transpose(0, 1)

    def _readers(self, rows: slice) -> Tensor:
        """``R_j^T R_k q_k`` for every row ``k``, ``(r, H, n, k)``."""
        q = self.at.q[:, :, None].expand(-1, -1, rows.stop - rows.start, -1)
        q = q if self.at.rotary is None else self.at.turned_back(rows, q)
        return q.permute(2, 0, 1, 3)

    def _seen(self, probes: Tensor, rows: slice) -> Tensor:
        """Norms of ``J_kj z``, ``(r, n)``."""
        z = self._bent(rows, probes)[:, None]
        c, y = self._at_rows(rows)
        along = self._readers(rows) @ (self.key @ z)  # (r, H, n, m)
        parts = (self.value @ z)[:, :, None] + y[..., None] * along[:, :, :, None]
        parts = c[..., None, None] * parts
        parts[diagonal(rows)] += self._covariance(rows) @ (self.query @ z)
        written = torch.einsum("how,rhkwm->rkom", self.outer, parts)
        if self.around is not None:
            written[diagonal(rows, 1)] += probes
        return written.square().sum((2, 3))

    def _products(self, weights: Tensor, rows: slice) -> Callable[[Tensor], Tensor]:
        """Products of `_grams` with some directions, ``(r, width, m)``, by head."""
        if self.around is not None:
            return super()._products(weights, rows)
        a, m, k, own, y, q, cov, inverse = self._parts(weights, rows)
        values, keys, queries = (w.flatten(0, 1) for w in (self.value, self.key, self.query))
        heads = y.shape[1]

        def split(w: Tensor) -> Tensor:
            return w.unflatten(1, (heads, -1))

        def through(w: Tensor, z: Tensor) -> Tensor:
            return (z.mT @ w.T).mT

        def product(z: Tensor) -> Tensor:
            z = self._bent(rows, z)
            vz, kz = through(values, z), through(keys, z)
            # The diagonal block: (Y + S)^T (Y + S) - Y^T Y with S the covariance.
            apart = own[..., None, None] * split(vz) + y[..., None] * (q[:, :, None] @ split(kz))
            extra = (cov @ split(through(queries, z))).flatten(1, 2)
            seen = through(self.outer_gram, extra)
            both = through(self.outer_gram, apart.flatten(1, 2) + extra)
            seen, both = (inverse[:, None, None] * one for one in (seen, both))
            on_values = a @ vz + m @ kz + (own[..., None, None] * split(seen)).flatten(1, 2)
            pulled = q[..., None] * (y[:, :, None] @ split(seen))
            on_keys = m.mT @ vz + k @ kz + pulled.flatten(1, 2)
            on_queries = (cov.mT @ split(both)).flatten(1, 2)
            back = through(values.T, on_values) + through(keys.T, on_keys)
            return self._bent(rows, back + through(queries.T, on_queries))

        return product

    def _parts(self, weights: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Unweighted Gram matrices, ``V^T A V + V^T M K + (…)^T + K^T C K`` each.

        ``A``, ``M`` and ``C``; then, for the larger diagonal block, ``P_jj``, ``P_jj y_jj`` and
        ``q_j`` (the block without its covariance), the covariance, and ``1 / p_jj``.
        """
        inverse = self._inverse(weights, rows)
        heads, _, kv = self.at.v.shape
        (c, y), q = self._at_rows(rows), self._readers(rows)
        y = c[..., None] * y  # (r, H, n, k_v)
        scaled = c * inverse[:, None]
        blocks = self.outer_gram.view(heads, kv, heads, kv)
        # values with values
        scalars = (scaled @ c.mT)[:, :, None, :, None]
        # values with keys: sum_k c_hk / p_k (W_h^T W_g y_gk) q_gk^T
        left = scaled[:, :, None, :, None] * y[:, None]  # (r, h, g, n, k_v)
        mixed = torch.einsum("hvgw,rhgwq->rhvgq", blocks, left.mT @ q[:, None])
        # keys with keys: sum_k <W_h y_hk, W_g y_gk> / p_k q_hk q_gk^T
        written = torch.einsum("how,rhkw->rkho", self.outer, y)
        inner = (written @ written.mT) * inverse[..., None, None]
        right = inner[..., None] * q.transpose(1, 2)[:, :, None]  # (r, n, h, g, k)
        crossed = q.mT @ right.transpose(1, 2).flatten(3)
        return (
            (scalars * blocks).reshape(-1, self.concat, self.concat),
            mixed.reshape(len(q), self.concat, -1),
            crossed.flatten(1, 2),
            c[diagonal(rows)],
            y[diagonal(rows)],
            q[diagonal(rows)],
            self._covariance(rows),
            inverse[diagonal(rows, 1)],
        )

    def _grams(self, weights: Tensor, rows: slice) -> Tensor:
        """``sum_k J_kj^T J_kj / p_kj`` for some columns, ``(r, width, width)``."""
        a, m, k, own, y, q, cov, inverse = self._parts(weights, rows)
        values, keys = self.value.flatten(0, 1), self.key.flatten(0, 1)
        half = values.T @ (a @ values / 2 + m @ keys)
        grams = half + half.mT + keys.T @ (k @ keys)
        # the covariance of the diagonal block
        extra = (self.outer @ cov @ self.query).sum(1)
        apart = own[..., None, None] * self.value + y[..., None] * (q[:, :, None] @ self.key)
        rest = ((self.outer @ apart).sum(1) + extra / 2).mT @ extra
        inverse = inverse[:, None, None]
        grams = grams + (rest + rest.mT) * inverse
        bent = self._bent(rows, self._bent(rows, (grams + grams.mT) / 2).mT)
        if self.around is not None:
            own = self._own_blocks(rows)
            bent = bent + inverse * (own + own.mT + torch.eye(self.width, dtype=own.dtype))
        return (bent + bent.mT) / 2

    def _sizes(self, rows: slice) -> Tensor:
        sizes = super()._sizes(rows)
        return sizes if self.slope is None else self.slope[rows, None, None] * sizes

    def _reach(self, rows: slice) -> Tensor:
        return self.key_size * self.at.q.norm(dim=-1)


_ROUNDS = 6  # of the search for weights; further rounds gain almost nothing
_SLACK = 1e-10  # float64 rounding of sums of n terms, with a margin


def weighing(tokens: int, width: int) -> float:
    """Approximate time of the certificate on one core, in seconds.

    For every token, by rows and by columns: six rounds of a Gram matrix of the heads' concatenated
    ``width`` and a final eigenvalue computation. Fitted to 1 to 16 heads of width 16 to 64 at 8 to
    256 tokens, with torch 2 on a core of 50 GFLOP/s: within a factor of 2.
    """
    return tokens * (0.005 + width**2 * (7e-7 + 1.4e-9 * width + 6e-9 * tokens))


@theorem(cite=DERIVED, statement="row-Gram certificate, one head", cost=weighing)
def row_gram(at: HeadAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """Rows by Cauchy–Schwarz with weights chosen for this input, one head.

    The smaller of ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = λ_max(sum_j J_ij J_ij^T / p_ij)``, and
    the same for the transpose; diagonal blocks include their covariance term.

    Holds for any mask, bias and rotary embedding, at ``x``, for any weights, and unchanged with a
    norm in front, whose derivative is part of ``J_ij``. A residual map of one head includes its
    identity in ``J_ii``.
    """
    return weighted_heads(at, slope, around).value


@theorem(cite=DERIVED, statement="row-Gram certificate, all heads", cost=weighing)
def row_gram_joint(at: HeadsAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """The row-Gram certificate with all heads and the output projection in one matrix per row.

    The smaller of ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = λ_max(sum_j J_ij J_ij^T / p_ij)`` with
    ``J_ij = sum_h W_h J^h_ij``, and the same for the transpose.

    Holds for any mask, bias and rotary embedding, at ``x``, and with a norm in front; a residual
    map includes its identity in ``J_ii``, and later norms in every row (then by rows only).
    Cost: ``n`` matrices of the width of the concatenated heads in each of seven rounds.
    """
    return weighted_heads(at, slope, around).value


@theorem(cite="castin2024", statement="Lemma 3.8, over row-Gram certificates", cost=weighing)
def castin_lemma_3_8(at: HeadsAt) -> float:
    """The sum over heads, as stated: the best bound from individual heads.

    ``Σ_h ‖W_h‖ c_h`` with ``c_h`` the row-Gram certificate of head ``h`` before the output
    projection ``[W_1 … W_H]``; ``Σ_h c_h`` for concatenated heads.

    Holds for any mask, bias and rotary embedding, at ``x``. Equal to sigma if every ``c_h`` is
    exact and the heads move the output in one direction; `row_gram_joint` sums heads first.

    Source: Lemma 3.8 of [castin2024], ``Lip(f) ≤ Σ_h ‖W_h‖ Lip(f_h)``, at one input.
    """
    parts = [None] * len(at.heads) if at.output is None else at.output.chunk(len(at.heads), 1)
    return math.fsum(
        (1.0 if part is None else norm_in_double(part)) * row_gram(HeadAt(head, at.x))
        for head, part in zip(at.heads, parts, strict=True)
    )


@dataclass(frozen=True)
class Weighted:
    """A row-Gram certificate with the data of its computation."""

    value: float
    rows: JacobianRows
    weights: Tensor


def weighted_heads(
    at: HeadsAt | HeadAt, slope: Tensor | None = None, around: Around | None = None
) -> Weighted:
    """The smaller certificate, by rows or by columns, with its rows and weights."""
    at = at if isinstance(at, HeadsAt) else HeadsAt(at.heads, at.x)
    rows = weighted_rows(JacobianRows(at, slope, around))
    if around is not None and not around.plain:
        return rows  # a column's matrix would not factor over the rows attending to it
    columns = weighted_rows(JacobianColumns(at, slope, around), below=rows.value)
    return replace(rows, value=min(rows.value, columns.value))


def weighted_rows(rows: JacobianRows, *, below: float = math.inf) -> Weighted:
    """The certificate with the best weights found; infinite if certainly not ``below``."""
    best, weights = math.inf, rows.support.to(torch.float64)
    # the same Gaussian directions in every call: their mean square is a Frobenius norm
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(rows.width, PROBES, generator=generator, dtype=torch.float64)
    probes = (probes / math.sqrt(rows.width * PROBES)).expand(len(rows.at.x), -1, -1)
    seen = rows.seen(probes)  # squared norms of all blocks along the probes
    for round_ in range(_ROUNDS):
        candidate = rows.weights(seen)
        omega, probes, fresh = rows.probe(candidate, probes)
        if not bool(omega.isfinite().all()):
            break
        value = _weighted_bound(candidate, omega)
        if value < best:
            best, weights = value, candidate
        share = 2 / (round_ + 2)
        seen = (1 - share) * seen + share * fresh
    # Probes bound eigenvalues from below; the reported value uses exact ones.
    if below <= best < math.inf:
        return Weighted(math.inf, rows, weights)
    value = _weighted_bound(weights, rows.eigenvalues(weights)) * (1 + _SLACK)
    return Weighted(value, rows, weights)


def _weighted_bound(weights: Tensor, omega: Tensor) -> float:
    return float((weights * omega[:, None]).sum(0).max().sqrt())


# --- the column ``D_s = (J_is)_i`` of one token: the effect of moving token ``s`` alone. With the
# remaining Jacobian ``R_s``, ``‖D_s‖² ≤ ‖J‖² ≤ ‖D_s‖² + ‖R_s‖²``. Proofs: ``docs/theory/sink.md``


@theorem(cite=DERIVED, statement="one token's column", kind="lower", cost=weighing)
def sink_column(at: HeadsAt) -> float:
    """Sigma of moving a single token, maximised over tokens.

    ``max_s ‖D_s‖``, ``‖D_s‖² = λ_max(sum_i J_is^T J_is)``: attention weights move with the token.

    Holds for any mask, bias and rotary embedding, at ``x``. Equal to sigma in the limit of one-hot
    attention (Theorem 3.7 of [castin2024]); ``1 / √n`` of it for uniform attention.
    """
    low, _ = JacobianColumns(at).squares()
    return max(float(low.max().sqrt()) * (1 - _SLACK) - at.slack, 0.0)


@theorem(cite=DERIVED, statement="one token's column, and a bound of the rest", cost=weighing)
def sink_column_upper(at: HeadsAt, slope: Tensor | None = None) -> float:
    """The exact column of `sink_column`, plus the row-Gram certificate for the other tokens.

    ``√(‖D_s‖² + c²)`` with ``c ≥ ‖R_s‖`` the smaller certificate, by rows or by columns, of the
    Jacobian without column ``s``.

    Holds for any mask, bias and rotary embedding, at ``x``, and with a norm in front. Equal to
    sigma for uniform attention, and in the limit of one-hot attention on ``s``.
    """
    rows, columns = JacobianRows(at, slope), JacobianColumns(at, slope)
    _, high = columns.squares()
    token = int(high.argmax())
    rest = 0.0
    if len(at.x) > 1:
        rows.support[:, token] = False
        columns.support[token] = False
        rest = weighted_rows(rows).value
        rest = min(rest, weighted_rows(columns, below=rest).value)
    return float(high[token] + rest**2) ** 0.5 * (1 + _SLACK)
