"""Moves of one ℓ2 size along a singular vector, and of tokens that are split."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import Attention, Operator, top_singular
from lipscope.attacks import Map, of_size


def singular_move(operator: Operator, size: float, seed: int) -> Float[Tensor, "n d"]:
    """The top right singular vector of a Jacobian, scaled to ``‖E‖_F = size``."""
    gen = torch.Generator().manual_seed(seed)
    return of_size(top_singular(operator, generator=gen).v, size)


def split_change(layer: Attention, x: Float[Tensor, "n d"], size: float, seed: int) -> float:
    """Change of a layer's output when its tokens are doubled and the copies moved apart.

    ``X`` doubled has weights 1/2 for every copy, so that norms are divided by ``√2``: moves
    ``(V, -V)`` with ``‖V‖_F = size`` along the direction of largest gain among them.

    Holds for unmasked layers without rotary embedding: copies share their position.

    Args:
        layer: The layer.
        x: Its input.
        size: ``‖V‖_F``, the weighted norm of the move.
        seed: Of the solver's start.

    Returns:
        ``‖f(X') - f(X)‖_F / √2`` on the doubled input.

    Source: mass splitting; derived here (``docs/theory/inputs.md``).
    """
    twice = torch.cat([x, x])
    inner = layer.linearise(twice)

    def apart(product: Map, e: Tensor) -> Tensor:
        y = product(torch.cat([e, -e], dim=-2) / 2**0.5)
        first, second = y.chunk(2, dim=-2)
        return (first - second) / 2**0.5

    n = len(x)
    operator = Operator(
        lambda e: apart(inner.matvec, e),
        lambda g: apart(inner.rmatvec, g),
        (n, inner.in_shape[1]),
        (n, inner.out_shape[1]),
        inner.dtype,
        inner.device,
    )
    move = singular_move(operator, size, seed)
    with torch.no_grad():
        change = layer(twice + torch.cat([move, -move])) - layer(twice)
    return float(change.norm()) / 2**0.5
