"""Attention whose weights fall like one over a squared distance."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention.core import Attention, variant


@variant
class CauchyAttention(Attention):
    """Attention with ``P_ij ∝ 1 / (1 + |q_i - k_j|²)``: ``S_ij = -log(1 + |q_i - k_j|²)``.

    Holds for encoders and causal decoders.

    Args:
        query: ``(heads * k, d)``.
        key: ``(heads * k, d)``.
        value: ``(heads * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        heads: Number of heads.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.

    Raises:
        InputError: If the shapes do not fit together.

    Source: derived here.

    >>> eye = torch.eye(1)
    >>> CauchyAttention(eye, eye, eye)(torch.tensor([[0.0], [1.0]])).flatten()
    tensor([0.3333, 0.6667])
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        super().__init__(
            query, key, value, output, heads=heads, scale=1.0, causal=causal, mask=mask
        )

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``-log(1 + |q_i - k_j|²)``."""
        return -self._denominator(q, k, out).log()

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``-2 <q_i - k_j, dq_i - dk_j> / (1 + |q_i - k_j|²)``."""
        s = torch.matmul(torch.cat([dq, q], -1), torch.cat([2 * k, 2 * dk], -1).mT, out=out)
        own, other = (q * dq).sum(-1, keepdim=True), (k * dk).sum(-1)[..., None, :]
        return (s - 2 * own - 2 * other) / self._denominator(q, k, None)

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``2 (g k - rowsum(g) q)`` and ``2 (g^T q - colsum(g) k)``, ``g`` over the same."""
        g = gs / self._denominator(q, k, None)
        gq = torch.matmul(g, k) - g.sum(-1)[..., None] * q
        gk = torch.matmul(g.mT, q) - g.sum(-2)[..., None] * k
        return 2 * gq, 2 * gk

    @staticmethod
    def _denominator(q: Tensor, k: Tensor, out: Tensor | None) -> Tensor:
        s = torch.matmul(-2 * q, k.mT, out=out)
        return 1 + s + q.square().sum(-1, keepdim=True) + k.square().sum(-1)[..., None, :]
