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
from lipscope.theorems.around import Around
from lipscope.theorems.derived.gram_rows import JacobianRows, span
from lipscope.theorems.head_at import HeadsAt


class _Parts(NamedTuple):
    """A column's Gram matrix before its weights: ``V^T A V + V^T M K + (…)^T + K^T C K``.

    Its diagonal block has more: what it is without the covariance, ``Y``, and the covariance.
    """

    values: Tensor  # A, (H k_v, H k_v)
    mixed: Tensor  # M, (H k_v, H k)
    keys: Tensor  # C, (H k, H k)
    own: Tensor  # P_jj, (H,)
    y: Tensor  # P_jj y_jj, (H, k_v)
    q: Tensor  # (H, k)
    covariance: Tensor  # (H, k_v, k)
    inverse: Tensor  # 1 / p_jj


class JacobianColumns(JacobianRows):
    """Its transpose, row by row: block ``ji`` is ``J_ij^T``.

    With ``B`` the weights of values and keys below each other, ``J_kj = R_kj B`` where ``R_kj`` is
    ``W [P_kj I, P_kj y_kj q_kj^T]``, head by head; the diagonal block has its covariance besides.
    All is seen in an orthonormal basis of what the weights read, if that is smaller than a token
    and nothing is added to it.

    Args:
        at: The heads at X; on the unit sphere if there is a norm in front.
        slope: Of that norm, ``s``, ``(n,)``, or None.
        around: What stands around attention, no norm behind it; or None.
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

    def _bent(self, j: int, m: Tensor) -> Tensor:
        """``s_j (I - x_j x_j^T) m`` in the basis, up to a rotation; ``m`` without a norm."""
        if self.slope is None:
            return m
        x = self.tokens[j]
        square = x @ x
        # the root of the basis's part of (I - x x^T)^2 = I - κ x x^T
        along = torch.outer(x, x @ m) * ((1 - self.left[j]) / square.clamp_min(1e-300))
        return self.slope[j] * (m - along)

    def _readers(self, j: int) -> Tensor:
        """``R_j^T R_k q_k`` for every row ``k``, ``(H, n, k)``."""
        rotary = self.at.rotary
        if rotary is None:
            return self.at.q
        return Rotary(rotary.cos[j : j + 1], rotary.sin[j : j + 1]).transpose(self.at.q)

    def _seen_row(self, i: int, probes: Tensor) -> Tensor:
        """Sizes of ``J_ki z``, ``(n,)``."""
        at, z = self.at, self._bent(i, probes)
        c, y = at.p[:, :, i], at.v[:, None, i] - at.o
        along = self._readers(i) @ (self.key @ z)  # (H, n, m)
        parts = (self.value @ z)[:, None] + y[..., None] * along[:, :, None]
        parts = c[..., None, None] * parts
        parts[:, i] += self._covariance(i) @ (self.query @ z)
        written = torch.einsum("how,hkwm->kom", self.outer, parts)
        if self.around is not None:
            written[i] += probes
        return written.square().sum((1, 2))

    def _products(self, weights: Tensor, rows: slice) -> Callable[[Tensor], Tensor]:
        """What `_grams` do to some directions each, ``(r, width, m)``, head by head."""
        if self.around is not None:
            return super()._products(weights, rows)
        parts = [self._parts(j, weights[j]) for j in span(rows)]
        a, m, k, own, y, q, cov, inverse = map(torch.stack, zip(*parts, strict=True))
        values, keys, queries = (w.flatten(0, 1) for w in (self.value, self.key, self.query))
        heads = y.shape[1]

        def bent(z: Tensor) -> Tensor:
            some = [self._bent(j, one) for j, one in zip(span(rows), z, strict=True)]
            return z if self.slope is None else torch.stack(some)

        def split(w: Tensor) -> Tensor:
            return w.unflatten(1, (heads, -1))

        def through(w: Tensor, z: Tensor) -> Tensor:
            return (z.mT @ w.T).mT

        def product(z: Tensor) -> Tensor:
            z = bent(z)
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
            return bent(back + through(queries.T, on_queries))

        return product

    def _grams(self, weights: Tensor, rows: slice) -> Tensor:
        """``sum_k J_kj^T J_kj / p_kj`` for some columns, ``(r, width, width)``."""
        return torch.stack([self._gram(j, weights[j]) for j in span(rows)])

    def _inverse(self, i: int, weights: Tensor) -> Tensor:
        return torch.where(self.support[i], 1 / weights, 0.0)

    def _parts(self, i: int, weights: Tensor) -> _Parts:
        at, inverse = self.at, self._inverse(i, weights)
        heads, n, kv = at.v.shape
        k = at.q.shape[-1]
        c, q = at.p[:, :, i], self._readers(i)
        y = c[..., None] * (at.v[:, None, i] - at.o)  # (H, n, k_v)
        scaled = c * inverse
        blocks = self.outer_gram.view(heads, kv, heads, kv)
        # values with values
        scalars = (scaled @ c.T)[:, None, :, None]
        # values with keys: sum_k c_hk / p_k (W_h^T W_g y_gk) q_gk^T
        left = scaled[:, None, :, None] * y  # (h, g, k, k_v)
        mixed = torch.einsum("hvgw,hgwq->hvgq", blocks, left.mT @ q)
        # keys with keys: sum_k <W_h y_hk, W_g y_gk> / p_k q_hk q_gk^T
        written = torch.einsum("how,hkw->kho", self.outer, y)
        inner = (written @ written.mT) * inverse[:, None, None]
        right = inner[..., None] * q.transpose(0, 1)[:, None]  # (n, h, g, k)
        crossed = q.mT @ right.permute(1, 0, 2, 3).reshape(heads, n, heads * k)
        return _Parts(
            (scalars * blocks).reshape(self.concat, -1),
            mixed.reshape(self.concat, -1),
            crossed.reshape(heads * k, -1),
            c[:, i],
            y[:, i],
            q[:, i],
            self._covariance(i),
            inverse[i],
        )

    def _gram(self, i: int, weights: Tensor) -> Tensor:
        a, m, k, own, y, q, cov, inverse = self._parts(i, weights)
        values, keys = self.value.flatten(0, 1), self.key.flatten(0, 1)
        half = values.T @ (a @ values / 2 + m @ keys)
        gram = half + half.T + keys.T @ (k @ keys)
        # the covariance of the diagonal block
        extra = (self.outer @ cov @ self.query).sum(0)
        apart = own[:, None, None] * self.value + y[:, :, None] * (q[:, None] @ self.key)
        rest = ((self.outer @ apart).sum(0) + extra / 2).T @ extra
        gram = gram + (rest + rest.T) * inverse
        bent = self._bent(i, self._bent(i, (gram + gram.T) / 2).T)
        if self.around is not None:
            own = self._own_block(i)
            bent = bent + inverse * (own + own.T + torch.eye(self.width, dtype=own.dtype))
        return (bent + bent.T) / 2

    def _sizes(self, i: int) -> Tensor:
        """Of the parts of every block, head by head, before they cancel, ``(H, n)``."""
        at = self.at
        slope = 1.0 if self.slope is None else self.slope[i]
        apart = (at.v[:, None, i] - at.o).norm(dim=-1)
        sizes = at.p[:, :, i] * (self.value_size + apart * self.key_size * at.q.norm(dim=-1))
        sizes[:, i] += self._covariance(i).flatten(1).norm(dim=1) * self.query_size[:, 0]
        return slope * sizes
