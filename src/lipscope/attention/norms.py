"""Normalised queries, keys, values or tokens, and tokens in a ball, with their derivatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention.precision import wide


class TokenNorm(nn.Module):
    """RMSNorm of consecutive parts of a token, each as wide as the weight.

    ``z ↦ w z / √(|z|²/k + ε)`` with ``k`` the width of ``w``: as wide as a head, it normalises
    every head by itself; as wide as all heads together, the whole projection.

    Args:
        weight: ``w``, ``(k,)``.
        eps: ``ε``, added to the mean square.

    >>> import torch
    >>> TokenNorm(torch.ones(2), eps=0.0)(torch.tensor([[3.0, 4.0]])) * 12.5**0.5
    tensor([[3., 4.]])
    """

    weight: Tensor

    def __init__(self, weight: Float[Tensor, " k"], eps: float) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.register_parameter("weight", weight)
        else:
            self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, z: Float[Tensor, "*b n w"]) -> Float[Tensor, "*b n w"]:
        """The normalised tokens."""
        at = self.at(z)
        return (at.unit * self.weight * len(self.weight) ** 0.5).flatten(-2).to(z.dtype)

    def at(self, z: Float[Tensor, "*b n w"]) -> NormAt:
        """The norm linearised at ``z``."""
        parts = wide(z).unflatten(-1, (-1, len(self.weight)))
        length = (parts.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return NormAt(parts / length / len(self.weight) ** 0.5, self.weight / length)


class Clip(nn.Module):
    """The nearest point of a ball: ``x ↦ x min(1, R / |x|)`` for every token.

    Args:
        radius: ``R``.

    >>> import torch
    >>> Clip(2.5)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[1.5000, 2.0000],
            [0.0000, 1.0000]])
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """The tokens in the ball."""
        z = wide(x)
        squares = z.square().sum(-1, keepdim=True)  # whose root has no derivative at zero
        return (z * (self.radius * squares.clamp_min(self.radius**2).rsqrt())).to(x.dtype)

    def at(self, x: Float[Tensor, "*b n d"]) -> NormAt:
        """Its derivative: that of ``R x / |x|`` outside the ball, the identity in it."""
        x = wide(x)[..., None, :]
        length = x.square().sum(-1, keepdim=True).sqrt()
        outside = length > self.radius
        unit = torch.where(outside, x / length.clamp_min(self.radius), 0.0)
        gain = torch.where(outside, self.radius / length.clamp_min(self.radius), 1.0)
        return NormAt(unit, gain)


@dataclass(frozen=True)
class NormAt:
    """A norm at one input: its derivative is ``D_g (I - u u^T)`` in every part.

    Attributes:
        unit: ``u = z / (√k r)``, ``r`` the root mean square with ``ε``; ``(*b, n, parts, k)``.
        gain: ``g = w / r``, ``(*b, n, parts, k)``.
    """

    unit: Tensor
    gain: Tensor

    def derivative(self, dz: Tensor) -> Tensor:
        """``D_g (I - u u^T) dz`` for tokens ``(*b, n, w)``."""
        dz = dz.unflatten(-1, (-1, self.unit.shape[-1]))
        along = (self.unit * dz).sum(-1, keepdim=True)
        return (self.gain * (dz - self.unit * along)).flatten(-2)

    def transpose(self, gy: Tensor) -> Tensor:
        """``(I - u u^T) D_g gy`` for cotangents ``(*b, n, w)``."""
        gz = self.gain * gy.unflatten(-1, (-1, self.unit.shape[-1]))
        return (gz - self.unit * (self.unit * gz).sum(-1, keepdim=True)).flatten(-2)
