"""The score of every variant whose logits are inner products of projected tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention.core import Attention


class InnerProduct(Attention):
    """Attention with ``S_ij = <q_i, k_j>``, whatever a variant makes ``q`` and ``k`` of."""

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``<q_i, k_j>``; scale, temperature or divisor are in ``q`` already."""
        return torch.matmul(q, k.mT, out=out)

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``<dq_i, k_j> + <q_i, dk_j>`` as one product, twice as wide."""
        return torch.matmul(torch.cat([dq, q], dim=-1), torch.cat([k, dk], dim=-1).mT, out=out)

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``gs k`` and ``gs^T q``."""
        return torch.bmm(gs, k), torch.bmm(gs.mT, q)


class Biased(InnerProduct):
    """Those with biases, masks and a scale, and nothing else of the frame.

    Args:
        query: ``(heads * k, d)``.
        key: ``(heads * k, d)``.
        value: ``(heads * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        heads: Number of heads.
        query_bias: ``(heads * k,)``.
        key_bias: ``(heads * k,)``.
        value_bias: ``(heads * d_v,)``.
        output_bias: ``(d_out,)``.
        scale: Factor of the score; ``1 / sqrt(k)`` if None.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        query_bias: Float[Tensor, " hk"] | None = None,
        key_bias: Float[Tensor, " hk"] | None = None,
        value_bias: Float[Tensor, " hv"] | None = None,
        output_bias: Float[Tensor, " d_out"] | None = None,
        scale: float | None = None,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        super().__init__(
            query,
            key,
            value,
            output,
            heads=heads,
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=output_bias,
            scale=scale,
            causal=causal,
            mask=mask,
        )
