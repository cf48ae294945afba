"""Small layers of every kind that a ball certificate covers, and random moves."""

from __future__ import annotations

import torch

from lipscope import DotProduct
from lipscope.attention import Rotary

KINDS = ("plain", "causal", "biased", "masked", "rotary", "heads", "sharp")


def case(kind: str, seed: int, n: int = 6, d: int = 5) -> tuple[DotProduct, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    heads = 2 if kind == "heads" else 1
    scale = 0.7 if kind == "sharp" else 0.3
    angles = torch.arange(n)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
    mask = (torch.rand(n, n, generator=g) < 0.6) | torch.eye(n, dtype=torch.bool)
    layer = DotProduct(
        t(heads * 4, d),
        t(heads * 4, d),
        t(heads * 3, d),
        t(d, heads * 3),
        heads=heads,
        query_bias=t(heads * 4) if kind in ("biased", "rotary") else None,
        key_bias=t(heads * 4) if kind in ("biased", "rotary") else None,
        causal=kind in ("causal", "rotary", "heads"),
        mask=mask if kind == "masked" else None,
        rotary=Rotary(angles.cos().double(), angles.sin().double()) if kind == "rotary" else None,
    )
    return layer, scale * t(n, d)


def move(x: torch.Tensor, eps: float, ball: str, g: torch.Generator) -> torch.Tensor:
    e = torch.randn(x.shape, generator=g, dtype=x.dtype)
    return e * (eps / (e.norm() if ball == "frobenius" else e.norm(dim=-1, keepdim=True)))
