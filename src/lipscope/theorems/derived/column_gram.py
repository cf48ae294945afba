"""The columns of the Jacobian of several heads, for the row-Gram certificate of its transpose.

``‖J‖ = ‖J^T‖``, so that ``‖J‖^2 <= max_i sum_j p_ij λ_max(sum_k J_kj^T J_kj / p_kj)`` for any
positive weights. Proof: ``docs/theory/local-certificates.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lipscope.attention import Rotary
from lipscope.theorems.derived.gram_rows import JacobianRows, diagonal
from lipscope.theorems.head_at import HeadsAt
from lipscope.theorems.residual_context import Around


class _Parts(NamedTuple):
    """Gram matrices before their weights, ``V^T A V + V^T M K + (…)^T + K^T C K`` each.

    Their diagonal block has more: what it is without the covariance, ``Y``, and the covariance.
    """

    values: Tensor  # A, (r, H k_v, H k_v)
    mixed: Tensor  # M, (r, H k_v, H k)
    keys: Tensor  # C, (r, H k, H k)
    own: Tensor  # P_jj, (r, H)
    y: Tensor  # P_jj y_jj, (r, H, k_v)
    q: Tensor  # (r, H, k)
    covariance: Tensor  # (r, H, k_v, k)
    inverse: Tensor  # 1 / p_jj, (r,)


class JacobianColumns(JacobianRows):
    """Its transpose, row by row: block ``ji`` is ``J_ij^T``.

    With ``B`` the weights of values and keys below each other, ``J_kj = R_kj B`` where ``R_kj`` is
    ``W [P_kj I, P_kj y_kj q_kj^T]``, head by head; the diagonal block has its covariance besides.
    All is seen in an orthonormal basis of what the weights read, if that is smaller than a token
    and nothing is added to it.

    Args:
        at: The heads at X; on the unit sphere if there is a norm in front.
        slope: Of that norm, ``s``, ``(n,)``, or None.
        around: What surrounds attention, no norm after it; or None.
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
        # 1 - κ |x|^2 with the basis's part of x, which cancels to (1 - |x|^2)^2 in all of it
        left = (1 - at.x.square().sum(-1)).square() + self.kappa * unread.square().sum(-1)
        self.left = left.sqrt()
        self.width = self.tokens.shape[1]
        heads, _, kv = at.v.shape
        outer = torch.eye(self.concat, dtype=at.x.dtype) if self.factor is None else self.factor
        self.outer = outer.view(-1, heads, kv).transpose(0, 1)  # (H, width out, k_v)
        self.outer_gram = outer.T @ outer
        self.support = self.support.T

    def _bent(self, rows: slice, m: Tensor) -> Tensor:
        """``s_j (I - x_j x_j^T) m_j`` in the basis, up to a rotation; ``m`` without a norm."""
        if self.slope is None:
            return m
        x = self.tokens[rows, :, None]
        # the root of the basis's part of (I - x x^T)^2 = I - κ x x^T
        root = (1 - self.left[rows, None, None]) / (x.mT @ x).clamp_min(1e-300)
        return self.slope[rows, None, None] * (m - x @ (x.mT @ m) * root)

    def _at_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Weights of the values, and values less the mean of the row that reads them."""
        at = self.at
        y = at.v[:, rows, None] - at.o[:, None]
        return at.p[:, :, rows].permute(2, 0, 1), y.transpose(0, 1)

    def _readers(self, rows: slice) -> Tensor:
        """``R_j^T R_k q_k`` for every row ``k``, ``(r, H, n, k)``."""
        q, rotary = self.at.q[:, :, None], self.at.rotary
        q = q.expand(-1, -1, rows.stop - rows.start, -1)
        if rotary is not None:
            q = Rotary(rotary.cos[rows], rotary.sin[rows]).transpose(q)
        return q.permute(2, 0, 1, 3)

    def _seen(self, probes: Tensor, rows: slice) -> Tensor:
        """Sizes of ``J_kj z``, ``(r, n)``."""
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
        """What `_grams` do to some directions each, ``(r, width, m)``, head by head."""
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

    def _inverse(self, weights: Tensor, rows: slice) -> Tensor:
        return torch.where(self.support[rows], 1 / weights[rows], 0.0)

    def _parts(self, weights: Tensor, rows: slice) -> _Parts:
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
        return _Parts(
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
        """Of the parts of every block, head by head, before they cancel, ``(r, H, n)``."""
        c, y = self._at_rows(rows)
        reach = self.key_size * self.at.q.norm(dim=-1)
        sizes = c * (self.value_size + y.norm(dim=-1) * reach)
        sizes[diagonal(rows)] += (
            self._covariance(rows).flatten(2).norm(dim=2) * self.query_size[:, 0]
        )
        return sizes if self.slope is None else self.slope[rows, None, None] * sizes
