"""Lemma 3.1 as a check: no finite difference exceeds the largest sigma on its segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipscope.linalg.operator import linearise
from lipscope.linalg.singular import top_singular
from lipscope.linalg.starts import start_named


@dataclass(frozen=True)
class Segment:
    """A finite difference and sigma between its two ends.

    Attributes:
        slope: ``‖f(Y) - f(X)‖ / ‖Y - X‖``.
        mean: Mean of sigma over the segment, by Gauss–Legendre quadrature.
        largest: Largest sigma (upper end of its interval) among the points.
        holds: Whether ``slope ≤ largest``, up to 1e-6.
    """

    slope: float
    mean: float
    largest: float
    holds: bool


def segment(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, points: int = 8) -> Segment:
    """Compare a finite difference with sigma along the segment.

    ``‖f(Y) - f(X)‖ ≤ ∫_0^1 ‖J(X + t (Y - X)) (Y - X)‖ dt ≤ max_t sigma · ‖Y - X‖``.

    Holds for continuously differentiable maps. Sigma is seen at finitely many points, so a
    segment on which it varies fast needs more of them.

    Args:
        f: The map.
        x: One end.
        y: The other end, another point.
        points: Points of the quadrature.

    Returns:
        Both sides of the inequality.

    Source: Lemma 3.1 of [castin2024].

    >>> segment(lambda x: x**2, torch.zeros(1), torch.ones(1)).slope
    1.0
    """
    nodes, weights = np.polynomial.legendre.leggauss(points)
    sigmas = []
    for t in (nodes + 1) / 2:
        point = x + float(t) * (y - x)
        start = start_named("segment", point)
        top = top_singular(linearise(f, point), tol=1e-3, generator=start)
        sigmas.append(top.upper)
    with torch.no_grad():
        slope = float((f(y) - f(x)).norm() / (y - x).norm())
    mean = float(np.dot(weights, sigmas) / 2)
    return Segment(slope, mean, max(sigmas), slope <= max(sigmas) * (1 + 1e-6))
