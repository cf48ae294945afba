"""Scaled cosine attention: normalised queries, keys and values."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import InnerProduct, of_heads, spectral_norm, variant
from lipscope.attention.layer import Masked, TokenNorm, check_frame_of, wide
from lipscope.errors import check_finite_number, check_positive


@variant
class ScaledCosineAttention(InnerProduct):
    """Attention with ``S_ij = τ <q̂_i, k̂_j>`` and values ``ν v̂_j``.

    ``ẑ = z / √(|z|² + ε)`` for the query, key and value of every token and head.

    Holds for encoders and causal decoders. Some implementations do not normalise values; that
    layer does not have the paper's Lipschitz constant and is not implemented here.

    Args:
        temperature: ``τ``, positive; a parameter may reach any sign in training, as may ``gain``.
        gain: ``ν``, positive.
        eps: ``ε``, positive.

    Raises:
        InputError: If the shapes do not fit together or a number is not positive; tensors only
            need to be finite, since training may change their sign.

    Source: scaled cosine similarity attention of [lipsformer2023].

    >>> eye = torch.eye(1)
    >>> layer = ScaledCosineAttention(eye, eye, eye, temperature=1.0, gain=2.0, eps=3.0)
    >>> layer(torch.ones(4, 1)).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    takes: ClassVar[type] = Masked
    temperature: Tensor
    gain: Tensor

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        temperature: float | Float[Tensor, ""],
        gain: float | Float[Tensor, ""] = 1.0,
        eps: float = 1e-6,
        **frame: Unpack[Masked],
    ) -> None:
        check_frame_of(frame, Masked)
        for name, number in (("temperature", temperature), ("gain", gain)):
            check = check_finite_number if isinstance(number, Tensor) else check_positive
            check(name, number)
        check_positive("eps", eps)
        super().__init__(query, key, value, output, scale=1.0, **frame)
        self.hold(temperature=_scalar(temperature, query), gain=_scalar(gain, query))
        self.eps = eps

    def norms(self) -> tuple[TokenNorm, TokenNorm, TokenNorm]:
        """``τ z / √(|z|² + ε)`` for queries; likewise for keys and values of every head."""
        k, one = self.head_width, torch.ones_like(self.gain)
        return (
            self._shortened(self.temperature, k),
            self._shortened(one, k),
            self._shortened(self.gain, self.value_width),
        )

    def constant(self, num_tokens: int) -> Float[Tensor, ""]:
        """``|ν| ε^(-1/2) √(Σ_h (√c ‖W_V‖ + |τ| ‖W_Q‖ + |τ| √c ‖W_K‖)²) ‖W_O‖``.

        ``c = min(N, e^(2|τ|))``, or ``N`` under a mask.
        """
        check_positive("eps", self.eps)
        tau, gain = wide(self.temperature).abs(), wide(self.gain).abs()
        c = gain.new_tensor(float(num_tokens))
        if not self.causal and self.mask is None:
            c = torch.minimum(c, (2 * tau).exp())
        q, k, v = (
            spectral_norm(w.unflatten(0, (self.num_heads, -1)))
            for w in (self.query, self.key, self.value)
        )
        heads = c.sqrt() * v + tau * q + tau * c.sqrt() * k
        return gain * self.eps**-0.5 * of_heads(heads, self.output)

    def _shortened(self, factor: Tensor, k: int) -> TokenNorm:
        return TokenNorm((factor * k**-0.5).expand(k), self.eps / k)


def _scalar(number: float | Tensor, like: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else like.new_tensor(number)
