"""The smallest move of tokens that changes a classifier's answer; the least margin in a ball."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

_AT_ONCE = 500  # points through a network


def smallest_flip(
    model: nn.Module,
    x: Float[Tensor, "n d"],
    label: int,
    moves: Float[Tensor, "n 1"],
    *,
    restarts: int = 8,
    steps: int = 250,
) -> tuple[float, Float[Tensor, "n d"]]:
    """Size of the smallest move found that changes the answer, and the move; inf if none did.

    From random moves of several sizes: a step along the gradient of the margin on a sphere that
    shrinks where the answer has changed and grows where it has not; then bisection along the ray.

    Holds for classifiers of two classes; an upper value of the true radius.

    Args:
        model: From tokens ``(b, n, d)`` to two scores.
        moves: 1 for tokens that may move, 0 for others.

    Source: the decoupled direction and norm of Rony et al. (2019).
    """
    source = torch.Generator().manual_seed(0)
    margin, slope = margins_with_slopes(model, x[None], label, moves)
    first = float(margin / slope.norm())
    size = 2 * first * torch.rand(restarts, generator=source).to(x)
    e = _sized(torch.randn(restarts, *x.shape, generator=source).to(x) * moves, size)
    least, best = torch.full_like(size, math.inf), torch.zeros_like(e)
    for k in range(steps):
        margin, slope = margins_with_slopes(model, x + e, label, moves)
        flipped = margin <= 0
        better = flipped & (size < least)
        least, best = torch.where(better, size, least), torch.where(_wide(better), e, best)
        rate = 0.1 * 0.05 ** (k / steps)
        e = e - _sized(slope, 0.5 * 0.02 ** (k / steps) * size)
        size = size * torch.where(flipped, 1 - rate, 1 + rate)
        e = _sized(e, size)
    low, high = torch.zeros_like(size), torch.ones_like(size)
    for _ in range(20):
        middle = (low + high) / 2
        flipped = margins(model, x + best * _wide(middle), label) <= 0
        low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
    at = int((least * high).argmin())
    return float(least[at] * high[at]), best[at] * high[at]


def least_margin(
    model: nn.Module,
    x: Float[Tensor, "n d"],
    label: int,
    moves: Float[Tensor, "n 1"],
    radius: float,
    point: Float[Tensor, "n d"],
    points: int = 1000,
) -> float:
    """The least margin of some points in a ball, at least 600.

    Random points of the sphere, mixtures of them with an attack's end, and descents.
    """
    source, few = torch.Generator().manual_seed(0), 12
    many = points - 40 * few
    e = _sized(torch.randn(many, *x.shape, generator=source).to(x) * moves, radius)
    mix = torch.rand(many, 1, 1, generator=source).to(x)
    mix[::4], mix[1] = 0, 1
    e = _inside(mix * _sized(point[None], radius) + (1 - mix) * e, radius)
    with torch.no_grad():  # in parts: a graph of all points would take gigabytes
        least = min(float(margins(model, x + some, label).min()) for some in e.split(_AT_ONCE))
    e = e[:few]
    for k in range(40):
        _, slope = margins_with_slopes(model, x + e, label, moves)
        e = _inside(e - _sized(slope, 0.4 * radius * 0.03 ** (k / 40)), radius)
        least = min(least, float(margins(model, x + e, label).detach().min()))
    return least


def margins(model: nn.Module, x: Float[Tensor, "b n d"], label: int) -> Float[Tensor, " b"]:
    """Score of a class minus the other's."""
    scores = model(x)
    return scores[:, label] - scores[:, 1 - label]


def margins_with_slopes(
    model: nn.Module, x: Float[Tensor, "b n d"], label: int, moves: Float[Tensor, "n 1"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b n d"]]:
    """Margins, and their gradients by the tokens that move."""
    at = x.detach().requires_grad_(True)
    found = margins(model, at, label)
    return found.detach(), torch.autograd.grad(found.sum(), at)[0] * moves


def _sized(e: Tensor, size: Tensor | float) -> Tensor:
    return e * _wide(size / e.flatten(1).norm(dim=1).clamp_min(1e-12))


def _inside(e: Tensor, radius: float) -> Tensor:
    return e * _wide((radius / e.flatten(1).norm(dim=1).clamp_min(1e-12)).clamp_max(1))


def _wide(scalars: Tensor) -> Tensor:
    return scalars[:, None, None]
