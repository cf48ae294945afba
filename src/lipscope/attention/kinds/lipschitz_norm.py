"""LipschitzNorm attention: dot products divided by the size of queries, keys and values."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import InnerProduct, of_heads, spectral_norm, variant

CONSTANT = math.sqrt(5 + (math.e + 1) ** 2)  # of the map from queries, keys and values


@variant
class LipschitzNormAttention(InnerProduct):
    """Attention with ``S_ij = <q_i, k_j> / max(uv, uw, vw)``, without a mask.

    ``u = ‖Q‖_F``, ``v = max_j |k_j|``, ``w = max_j |v_j|`` over all tokens, for every head.

    Holds without a mask. If several tokens attain a maximum, the layer is not differentiable and
    the derivative is the mean of theirs, as in automatic differentiation.

    Source: the quadratic form of LipschitzNorm in [dasoulas2021], as in the authors' code.

    >>> eye = torch.eye(2)
    >>> layer = LipschitzNormAttention(eye, eye, eye)
    >>> bool(torch.allclose(layer(torch.eye(2)), layer(10 * torch.eye(2)) / 10))
    True
    """

    by_token = False

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
    ) -> None:
        super().__init__(query, key, value, output, heads=heads, scale=1.0)

    def divisor(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``max(uv, uw, vw)`` of every head."""
        size_q = torch.linalg.vector_norm(q, dim=(-2, -1), keepdim=True)
        size_k, size_v = (
            torch.linalg.vector_norm(z, dim=-1, keepdim=True).amax(-2, keepdim=True) for z in (k, v)
        )
        sizes = torch.stack([size_q * size_k, size_q * size_v, size_k * size_v])
        return sizes.amax(0).clamp_min(torch.finfo(q.dtype).tiny)

    def constant(self, num_tokens: int) -> Float[Tensor, ""]:
        """``√(5 + (e+1)²) √(Σ_h ‖[W_Q; W_K; W_V]_h‖²) ‖W_O‖``."""
        weights = (self.query, self.key, self.value)
        heads = torch.cat([w.unflatten(0, (self.num_heads, -1)) for w in weights], 1)
        return CONSTANT * of_heads(spectral_norm(heads), self.output)
