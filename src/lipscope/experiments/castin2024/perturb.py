"""Perturbations of one ℓ2 size: random, singular, by gradients, and by splitting tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.linalg.operator import Operator
from lipscope.linalg.singular import top_singular

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


def _gradient(f: Map, x: Tensor, move: Tensor) -> Tensor:
    with torch.no_grad():
        here = f(x)
    point = move.detach().requires_grad_(True)
    with torch.enable_grad():
        change = (f(x + point) - here).square().sum()
        (slope,) = torch.autograd.grad(change, point)
    return slope
