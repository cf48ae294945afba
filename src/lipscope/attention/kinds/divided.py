"""Dot-product attention divided by its Lipschitz bound on a ball."""

from __future__ import annotations

from typing import Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import BallBound, Biased, on_ball, variant
from lipscope.attention.layer import Framed, uncast
from lipscope.errors import InputError, check_count, check_positive


@variant
class DividedAttention(Biased):
    """Dot-product attention with each head divided by its bound: 1-Lipschitz heads on a ball.

    ``P_h X V_h^T / B_h``, with ``B_h`` the bound ``by`` of ``P_h X V_h^T`` for at most ``n``
    tokens of norm at most ``R``, recomputed from the weights in every pass and differentiable.

    Holds for encoders and decoders, biases of queries, keys and values (value biases are not
    divided), and masks; ``mean-field`` without a mask. Larger tokens are accepted, without
    any guarantee.

    Args:
        by: ``theorem-3.3`` of [castin2024] (with biases its Theorem E.3), ``G2``, or the
            ``mean-field`` bound with half the exponent.
        num_tokens: ``n``; longer inputs raise an error.
        radius: ``R``, positive.

    Raises:
        InputError: If the shapes do not fit together, a number is not positive, or the bound
            does not hold under the mask.

    Source: proposed in [castin2024]; G2 and the mean-field bound are derived here
    (``docs/theory/global-bounds.md``).

    >>> eye = torch.eye(2)
    >>> layer = DividedAttention(eye, eye, 7 * eye, by="G2", num_tokens=3, radius=1e-9)
    >>> layer(torch.tensor([[3.0, 6.0]]))  # at so small a radius, the bound is 7 √(3/3)
    tensor([[3., 6.]])
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        by: BallBound,
        num_tokens: int,
        radius: float,
        **frame: Unpack[Framed],
    ) -> None:
        check_count("num_tokens", num_tokens)
        check_positive("radius", radius)
        if by not in get_args(BallBound):
            raise InputError(f"`by` should be one of {get_args(BallBound)}. Found `{by}`.")
        if by == "mean-field" and (frame.get("causal") or frame.get("mask") is not None):
            raise InputError(
                "`by` should be `theorem-3.3` or `G2` under a mask, "
                "where the mean-field bound fails."
            )
        super().__init__(query, key, value, output, **frame)
        self.by: BallBound = by
        self.num_tokens, self.radius = num_tokens, radius

    def bounds(self) -> Float[Tensor, " h"]:
        """``B_h`` of every head."""
        n = self.num_tokens if self.mask is None else self.mask.shape[-1]
        with uncast(self.query.device):
            return on_ball(self, self.by, num_tokens=n, radius=self.radius)

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the values; skipped without value channels."""
        bounds = self.bounds()
        divisor = torch.where(bounds > 0, bounds, 1.0).repeat_interleave(self.value_width)
        return self.query, self.key, (self.value / divisor[:, None]).to(self.value.dtype)

    def project_in(
        self, x: Tensor, context: Tensor | None = None, *, biased: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Layer.project_in`."""
        found = (x if context is None else context).shape[-2]
        if max(found, x.shape[-2]) > self.num_tokens:
            raise InputError(
                f"An input should have at most `num_tokens = {self.num_tokens}` tokens. "
                f"Found {max(found, x.shape[-2])}."
            )
        return super().project_in(x, context, biased=biased)
