"""Layers with known matrices, and what is drawn for them by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from lipscope import Attention, DotProduct, Operator, TopSingular, top_singular
from lipscope.charts import Series
from lipscope.linalg import start_named
from lipscope.theorems import bounds_at, catalogue

SIGNS = {"A = -I": -1.0, "A = +I": 1.0}


def eye(d: int) -> Tensor:
    """The identity in float64."""
    return torch.eye(d, dtype=torch.float64)


def multiple(sign: float, d: int) -> DotProduct:
    """One head with ``A = sign I`` and ``V = I``."""
    return DotProduct(sign * eye(d), eye(d), eye(d), scale=1.0)


def normal(start: str | Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64, by name or from a generator."""
    gen = start_named(start) if isinstance(start, str) else start
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def in_ball(gen: Generator, *shape: int) -> Tensor:
    """Tokens uniform in the unit ball."""
    x = normal(gen, *shape)
    far = torch.rand(*shape[:-1], 1, generator=gen, dtype=torch.float64) ** (1 / shape[-1])
    return far * x / x.norm(dim=-1, keepdim=True)


def dots(name: str, points: Tensor) -> Series:
    """Tokens of the plane, ``(n, 2)``, as points of a figure."""
    return Series(name, tuple((float(x), float(y)) for x, y in points), "points")


def embedding(hidden: Tensor) -> Tensor:
    """The mean token, normalised: what sentence encoders compare."""
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


def top(operator: Operator, seed: int = 0, **options: Any) -> TopSingular:
    """`lipscope.top_singular` from a start of this seed."""
    return top_singular(operator, generator=torch.Generator().manual_seed(seed), **options)


def bound_values(
    layer: Attention, num_tokens: int | None, radius: float, **names: str
) -> dict[str, float]:
    """Theorems in Frobenius norms at all inputs of this radius, those that apply, by other names.

    Without names every upper bound that holds.
    """
    names = names or {
        t.name: t.name for t in catalogue() if t.sound and t.kind == "upper" and t.scope != "limit"
    }
    size: dict[str, Any] = {"num_tokens": num_tokens, "radius": radius, "metric": "frobenius"}
    every = bounds_at(layer.in_double(), names=names.values(), **size)
    found = {bound.theorem: bound.value for bound in every if bound.value is not None}
    return {key: found[name] for key, name in names.items() if name in found}
