"""Dot-product attention whose scores are divided by the size of queries, keys and values."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import variant
from lipscope.attention.inner_product import InnerProduct


@variant
class LipschitzNormAttention(InnerProduct):
    """Attention with ``S_ij = <q_i, k_j> / max(uv, uw, vw)``, one head, every token visible.

    ``u = ‖Q‖_F``, ``v = max_j |k_j|``, ``w = max_j |v_j|`` over all tokens.

    Holds for one head without mask. The divisor depends on all tokens, so the Jacobian is
    that of automatic differentiation, valid where both maxima are attained once.

    Args:
        query: ``(k, d)``.
        key: ``(k, d)``.
        value: ``(d_v, d)``.
        output: ``(d_out, d_v)``, or None.

    Raises:
        InputError: If the shapes do not fit together.

    Source: the quadratic form of LipschitzNorm in [dasoulas2021], as in the authors' code.

    >>> eye = torch.eye(2)
    >>> layer = LipschitzNormAttention(eye, eye, eye)
    >>> bool(torch.allclose(layer(torch.eye(2)), layer(10 * torch.eye(2)) / 10))
    True
    """

    by_token = False

    def __init__(
        self,
        query: Float[Tensor, "k d"],
        key: Float[Tensor, "k d"],
        value: Float[Tensor, "dv d"],
        output: Float[Tensor, "d_out dv"] | None = None,
    ) -> None:
        super().__init__(query, key, value, output, scale=1.0)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries over the divisor, keys and values, each ``(..., 1, n, width)``."""
        q, k, v = super().project(x, context)
        size_q = q.square().sum((-2, -1), keepdim=True).sqrt()
        size_k, size_v = (z.norm(dim=-1, keepdim=True).amax(-2, keepdim=True) for z in (k, v))
        sizes = torch.stack([size_q * size_k, size_q * size_v, size_k * size_v])
        return q / sizes.amax(0).clamp_min(torch.finfo(x.dtype).tiny), k, v
