"""Dot-product attention: the score ``<q_i, k_j>`` of Vaswani et al."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.core import Attention


class DotProduct(Attention):
    """Attention with ``S_ij = scale <Q x_i + b_Q, K x_j + b_K>``.

    Holds for encoders and decoders, grouped keys and values, biases, rotary embeddings
    and any 0/-inf mask. Not covered: soft-capped scores, normalised queries and keys.

    One head with ``Q = K = V = I`` at zero tokens averages them, so its Jacobian is
    ``1/n`` in every block and its norm 1:

    >>> import torch
    >>> from lipscope.operator import materialise
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> jacobian = materialise(layer.linearise(torch.zeros(3, 2)))
    >>> round(float(torch.linalg.matrix_norm(jacobian, 2)), 6)
    1.0
    """

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``<q_i, k_j>``; the scale is in ``q`` already."""
        return torch.matmul(q, k.mT, out=out)

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``<dq_i, k_j> + <q_i, dk_j>`` as one product, twice as wide."""
        return torch.matmul(torch.cat([dq, q], dim=-1), torch.cat([k, dk], dim=-1).mT, out=out)

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``gs k`` and ``gs^T q``."""
        return torch.bmm(gs, k), torch.bmm(gs.mT, q)
