"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one window, in half-split layout.

    ``rot(x) = x cos + half(x) sin`` with ``half((a, b)) = (-b, a)`` on the two halves of a
    head. Widths beyond that of ``cos`` are left as they are.

    Attributes:
        cos: ``(n, r)``.
        sin: ``(n, r)``.
    """

    cos: Float[Tensor, "n r"]
    sin: Float[Tensor, "n r"]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate queries or keys ``(..., n, k)``."""
        turned, rest = x.split([self.cos.shape[-1], x.shape[-1] - self.cos.shape[-1]], dim=-1)
        a, b = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([-b, a], dim=-1) * self.sin
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def transpose(self, g: Tensor) -> Tensor:
        """Apply the transposed (inverse up to scale) rotation to cotangents ``(..., n, k)``."""
        turned, rest = g.split([self.cos.shape[-1], g.shape[-1] - self.cos.shape[-1]], dim=-1)
        a, b = (turned * self.sin).chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([b, -a], dim=-1)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
