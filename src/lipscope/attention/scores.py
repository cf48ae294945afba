"""Scores that variants share: inner products and distances of projected tokens."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import Attention
from lipscope.attention.layer import Framed, check_frame_of


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
    """Those with biases, masks and a scale, and nothing else of the frame."""

    takes: ClassVar[type] = Framed

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        **frame: Unpack[Framed],
    ) -> None:
        check_frame_of(frame, Framed)
        super().__init__(query, key, value, output, **frame)


class Distance(Attention):
    """Attention with ``S_ij = -|q_i - k_j|²``, whatever a layer makes ``q`` and ``k`` of."""

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``-|q_i - k_j|²``."""
        s = torch.matmul(2 * q, k.mT, out=out)
        return s - q.square().sum(-1, keepdim=True) - k.square().sum(-1)[..., None, :]

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``-2 <q_i - k_j, dq_i - dk_j>``."""
        s = torch.matmul(torch.cat([dq, q], -1), torch.cat([2 * k, 2 * dk], -1).mT, out=out)
        own, other = (q * dq).sum(-1, keepdim=True), (k * dk).sum(-1)[..., None, :]
        return s - 2 * own - 2 * other

    def score_size(self, q: Tensor, k: Tensor) -> Tensor:
        """``(|q_i| + max_j |k_j|)²``: of what the distance is a difference."""
        q, k = q.double().norm(dim=-1), k.double().norm(dim=-1)
        return (q + k.amax(-1, keepdim=True)).square()

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``2 (gs k - rowsum(gs) q)`` and ``2 (gs^T q - colsum(gs) k)``."""
        gq = torch.matmul(gs, k) - gs.sum(-1)[..., None] * q
        gk = torch.matmul(gs.mT, q) - gs.sum(-2)[..., None] * k
        return 2 * gq, 2 * gk
