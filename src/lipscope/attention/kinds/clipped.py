"""Dot-product attention on tokens projected into a ball: globally Lipschitz."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.core import Biased, of_heads, on_ball, variant
from lipscope.attention.layer import Clip, Framed, TokenNorm
from lipscope.errors import InputError, check_positive


@variant
class ClippedAttention(Biased):
    """Dot-product attention of ``N(x_i)``, ``|N(x)| ≤ R``: Lipschitz on all inputs.

    ``into="clip"``: ``N(x) = x min(1, R / |x|)``, the projection onto the ball.
    ``into="normalise"``: ``N(x) = x / √(1 + |x|² / R²)``, a smooth map into its interior. Both are
    1-Lipschitz, so the bound G2 on the ball holds everywhere.

    Holds for encoders and decoders, biases of queries, keys and values, and any 0/-inf mask.

    Args:
        radius: ``R``, positive.
        into: How tokens are mapped into the ball.

    Source: dot products of [vaswani2017]; the constant is derived here
    (``docs/theory/global-bounds.md``).

    >>> eye = torch.eye(1)
    >>> layer = ClippedAttention(eye, eye, eye, radius=2.0)
    >>> layer(torch.tensor([[5.0]])).item()
    2.0
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        radius: float,
        into: Literal["clip", "normalise"] = "clip",
        **frame: Unpack[Framed],
    ) -> None:
        check_positive("radius", radius)
        if into not in ("clip", "normalise"):
            raise InputError(f"`into` should be `clip` or `normalise`. Found `{into}`.")
        super().__init__(query, key, value, output, **frame)
        self.radius, self.into = radius, into

    def entrance(self) -> TokenNorm | Clip:
        """``N``."""
        if self.into == "clip":
            return Clip(self.radius)
        d = self.query.shape[1]
        weight = torch.full_like(self.query[0], self.radius * d**-0.5).detach()
        return TokenNorm(weight, self.radius**2 / d)

    def constant(self, num_tokens: int) -> Float[Tensor, ""]:
        """G2 at the radius, ``‖W_O‖ √(Σ_h …²)``."""
        heads = on_ball(self, "G2", num_tokens=num_tokens, radius=self.radius)
        return of_heads(heads, self.output)
