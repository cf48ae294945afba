"""Moves of one ℓ2 size of the input of any map: random, by one gradient, by many."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Map = Callable[[Tensor], Tensor]
_FIRST = 1e-3  # share of the size at which the first gradient is taken: at 0 it vanishes


def of_size(move: Float[Tensor, "n d"], size: float) -> Float[Tensor, "n d"]:
    """A move scaled to ``‖E‖_F = size``."""
    return move * (size / move.norm().clamp_min(1e-30))


def random_move(x: Float[Tensor, "n d"], size: float, seed: int) -> Float[Tensor, "n d"]:
    """A move uniform on the sphere ``‖E‖_F = size``."""
    gen = torch.Generator().manual_seed(seed)
    return of_size(torch.randn(x.shape, generator=gen).to(x), size)


def sign_move(f: Map, x: Float[Tensor, "n d"], size: float, seed: int) -> Float[Tensor, "n d"]:
    """One step along the sign of a gradient (FGSM), scaled to ``‖E‖_F = size``.

    The gradient of ``‖f(X + E) - f(X)‖²`` is taken at a small random ``E``, since it vanishes
    at 0.

    Holds for every differentiable map.

    Args:
        f: The map.
        x: Its input.
        size: ``‖E‖_F``.
        seed: Of the random ``E``.

    Returns:
        The move.

    Source: the fast gradient sign method (Goodfellow et al. 2015), in another norm.
    """
    return of_size(_gradient(f, x, random_move(x, _FIRST * size, seed)).sign(), size)


def ascent_move(
    f: Map, x: Float[Tensor, "n d"], size: float, seed: int, *, steps: int = 20
) -> Float[Tensor, "n d"]:
    """Projected gradient ascent of ``‖f(X + E) - f(X)‖`` on the sphere ``‖E‖_F = size`` (PGD).

    Each step replaces ``E`` by its gradient, scaled back to the sphere: a power iteration as
    the size goes to 0. The best of all iterates is kept.

    Holds for every differentiable map; a lower value of the largest change.

    Args:
        f: The map.
        x: Its input.
        size: ``‖E‖_F``.
        seed: Of the random start.
        steps: Gradients.

    Returns:
        The move.
    """
    with torch.no_grad():
        here = f(x)
    best = move = random_move(x, size, seed)
    most = 0.0
    for _ in range(steps):
        slope = _gradient(f, x, move)
        move = of_size(slope, size)
        with torch.no_grad():
            change = float((f(x + move) - here).norm())
        if change > most:
            best, most = move, change
    return best


def _gradient(f: Map, x: Tensor, move: Tensor) -> Tensor:
    with torch.no_grad():
        here = f(x)
    point = move.detach().requires_grad_(True)
    with torch.enable_grad():
        change = (f(x + point) - here).square().sum()
        (slope,) = torch.autograd.grad(change, point)
    return slope
