"""Sigmoid attention: elementwise weights without row normalisation."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import Biased, variant
from lipscope.attention.layer import Framed
from lipscope.attention.weighting import At, Weighting
from lipscope.errors import check_finite_number


class Sigmoid(Weighting):
    """``P_ij = 1 / (1 + exp(-s_ij))``: weights between 0 and 1 with arbitrary row sums."""

    def weights(self, s: Tensor) -> Tensor:
        """The sigmoid of every score."""
        return s.sigmoid()

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        """``P (1 - P) ds``."""
        (p,) = at
        return ds.mul_(p).mul_(1 - p)

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        """``P (1 - P) gp``."""
        return self.jvp(at, gp)

    def open(self, s: Tensor, shift: Tensor) -> Tensor:
        """Exclude rows whose weights are all 0 or 1 up to rounding for any shift."""
        settled = -math.log(torch.finfo(s.dtype).tiny) + shift[..., None]
        return (s.abs() < settled).any(-1)


@variant
class SigmoidAttention(Biased):
    """Attention with weights ``P_ij = σ(scale <q_i, k_j> + b)``, ``b = -log m`` for ``m`` keys.

    Each weight is between 0 and 1; rows need not add up to 1. With ``b = -log m`` they add up
    to about 1 at small scores. ``m`` counts the keys that any token may attend to, for every
    head: masked padding changes nothing.

    Holds for encoders and decoders, biases and any 0/-inf mask. For a causal layer that must not
    depend on the number of later tokens, set ``offset`` to a number. Sigma is unbounded over all
    inputs and bounded on a ball (`sigmoid_ball`).

    Args:
        offset: ``b``; None: minus the logarithm of the number of keys.

    Source: sigmoid attention of [ramapuram2024].

    >>> layer = SigmoidAttention(torch.zeros(1, 1), torch.eye(1), torch.eye(1))
    >>> layer(torch.tensor([[1.0], [2.0]])).flatten().tolist()  # weights 1 / (1 + 2)
    [1.0, 1.0]
    """

    weighting = Sigmoid()

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        offset: float | None = None,
        **frame: Unpack[Framed],
    ) -> None:
        if offset is not None:
            check_finite_number("offset", offset)
        super().__init__(query, key, value, output, **frame)
        self.offset = offset

    def shift(self, num_keys: int, added: Tensor | None = None) -> float | Tensor:
        """``b``; per head and sample if a mask hides keys."""
        if self.offset is not None:
            return self.offset
        if self.mask is None and added is None:
            return -math.log(num_keys)
        n = num_keys if self.mask is None else self.mask.shape[-2]
        if added is not None and added.shape[-2] > 1:
            n = added.shape[-2]
        seen = self.visible(slice(0, n), slice(0, num_keys), self.query.device)
        if added is not None:
            seen = added > -torch.inf if seen is None else seen & (added > -torch.inf)
        assert seen is not None
        m = seen.any(-2, keepdim=True).sum(-1, keepdim=True)
        return -m.clamp_min(1).to(self.query.dtype).log()
