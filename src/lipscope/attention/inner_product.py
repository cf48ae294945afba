"""The score of every variant whose logits are inner products of projected tokens."""

from __future__ import annotations

import torch
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
