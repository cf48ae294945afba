"""L2 attention with tied weights and the score ``-|x_i W - x_j W|²`` of Kim et al."""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from scipy.special import lambertw
from torch import Tensor

from lipscope.attention.core import Distance, of_heads, spectral_norm, variant
from lipscope.errors import InputError


def phi_inverse(y: float) -> float:
    """``φ⁻¹(y) = W_0(y / e)`` for ``y ≥ 0``, ``φ(x) = x e^(x+1)``; ``W_0`` is Lambert's function.

    >>> x = phi_inverse(9.0)
    >>> round(x * math.exp(x + 1), 12)
    9.0
    """
    return float(lambertw(y / math.e).real)


@variant
class L2Attention(Distance):
    """Attention by distance, Lipschitz over all inputs of a fixed length.

    ``f^h(X) = P^h X A_h`` with ``P^h_ij ∝ exp(-|x_i W_h - x_j W_h|² / √k)`` and
    ``A_h = W_h W_h^T / √k``; ``F(X) = [f^1 W^{V,1}, …, f^H W^{V,H}] W^O``. Queries and keys
    share their weights; with untied weights the layer is not Lipschitz.

    Holds for encoders and causal decoders.

    Args:
        query: ``W_h^T`` of all heads, ``(heads * k, d)``, for queries and keys.
        value: ``(W^{V,h})^T`` of all heads, ``(heads * d_v, d)``.
        output: ``(W^O)^T``, ``(d_out, heads * d_v)``, or None for concatenated heads.

    Source: L2 self-attention of [kim2021].

    >>> import torch
    >>> layer = L2Attention(torch.eye(2), torch.eye(2))
    >>> layer(torch.tensor([[1.0, 0.0], [1.0, 0.0]])) * 2**0.5
    tensor([[1., 0.],
            [1., 0.]])
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        super().__init__(
            query, query, value, output, heads=heads, scale=1.0, causal=causal, mask=mask
        )

    @property
    def key(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The query weights."""
        return self.query

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """``W k^(-1/4)`` for queries and keys, including the scale, and ``W^V A_h``."""
        w = self.query * self.head_width**-0.25
        by_head = w.unflatten(0, (self.num_heads, -1))
        folded = self.value.unflatten(0, (self.num_heads, -1)) @ by_head.mT @ by_head
        return w, w, folded.flatten(0, 1)

    def constant(self, num_tokens: int) -> Float[Tensor, ""]:
        """``k^(-1/2) (√N (1 + 2 φ⁻¹(N-1)) + 2 φ⁻¹(N-1)) √(Σ_h ‖W_h‖⁴ ‖W^{V,h}‖²) ‖W^O‖``."""
        if self.mask is not None and not bool(self.mask.diagonal(dim1=-2, dim2=-1).all()):
            raise InputError("`mask` should let every token read itself for a bound to hold.")
        f = phi_inverse(num_tokens - 1.0)
        w, v = (t.unflatten(0, (self.num_heads, -1)) for t in (self.query, self.value))
        heads = spectral_norm(w).square() * spectral_norm(v) * self.head_width**-0.5
        return (math.sqrt(num_tokens) * (1 + 2 * f) + 2 * f) * of_heads(heads, self.output)
