"""Scaled cosine attention: queries, keys and values of bounded length."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention.inner_product import InnerProduct
from lipscope.attention.norms import TokenNorm
from lipscope.errors import InputError


class ScaledCosineAttention(InnerProduct):
    """Attention with ``S_ij = τ <q̂_i, k̂_j>`` and values ``ν v̂_j``.

    ``ẑ = z / √(|z|² + ε)`` for the query, key and value of every token and head.

    Holds for encoders and causal decoders. Some code leaves values as they are; that layer is
    not Lipschitz with the constant of the paper and is not this one.

    Args:
        query: ``(heads * k, d)``.
        key: ``(heads * k, d)``.
        value: ``(heads * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        temperature: ``τ``, positive.
        gain: ``ν``, positive.
        eps: ``ε``, positive.
        heads: Number of heads.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.

    Raises:
        InputError: If the shapes do not fit together or a number is not positive.

    Source: scaled cosine similarity attention of [lipsformer2023].

    >>> import torch
    >>> eye = torch.eye(1)
    >>> layer = ScaledCosineAttention(eye, eye, eye, temperature=1.0, gain=2.0, eps=3.0)
    >>> layer(torch.ones(4, 1)).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        temperature: float,
        gain: float = 1.0,
        eps: float = 1e-6,
        heads: int = 1,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        for name, number in (("temperature", temperature), ("gain", gain), ("eps", eps)):
            if not number > 0:
                raise InputError(f"`{name}` should be positive. Found `{name} = {number}`.")
        width, value_width = query.shape[0] // heads, value.shape[0] // heads

        def shortened(w: Tensor, factor: float, k: int) -> TokenNorm:
            return TokenNorm(w.new_full((k,), factor * k**-0.5), eps / k)

        super().__init__(
            query,
            key,
            value,
            output,
            heads=heads,
            scale=1.0,
            causal=causal,
            mask=mask,
            query_norm=shortened(query, temperature, width),
            key_norm=shortened(key, 1.0, width),
            value_norm=shortened(value, gain, value_width),
        )
        self.temperature, self.gain, self.eps = temperature, gain, eps
