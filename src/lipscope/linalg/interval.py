"""The upper end of the interval: what a random start says about the top singular value.

Statements and proofs: ``docs/theory/interval.md``. Everything here reads the coefficients of
a Golub–Kahan run and never sees the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv


@dataclass(frozen=True)
class Cycle:
    """What one finished restart cycle tells the upper bound of the next.

    Attributes:
        alpha: Diagonal of its bidiagonal matrix.
        beta: Superdiagonal, and the coupling to the vector after the last.
        weights: Its top right singular vector in the basis, all entries positive.
    """

    alpha: np.ndarray
    beta: np.ndarray
    weights: np.ndarray


def start_threshold(size: int, delta: float) -> float:
    """``t`` with ``P(|b_1| < t) = delta`` for a coordinate of a uniform unit vector.

    ``b_1^2`` follows the Beta(1/2, (N - 1)/2) law for ``N = size``.

    >>> round(start_threshold(1, 0.1), 3)
    1.0
    """
    if size == 1:
        return 1.0
    return math.sqrt(float(betaincinv(0.5, (size - 1) / 2, delta)))


def closed_form_factor(steps: int, threshold: float) -> float:
    """``cosh(arccosh(1/t) / (2k - 1))``: the a-priori bound on ``sigma_1 / theta_k``.

    Holds with the probability of ``threshold`` for one cycle from a uniform start.
    Source: derived here (``docs/theory/interval.md``, closed form).
    """
    return math.cosh(math.acosh(1 / threshold) / (2 * steps - 1))


class Evidence:
    """What a run has shown about singular values beyond its top Ritz value.

    The function ``sum_j p_j(lam)^2 prod_c q_c(lam)^2`` of ``lam = x^2`` in units of
    ``theta^2``, with the Lanczos polynomials ``p_0..p_k`` of ``B^T B`` and one factor ``q_c``
    per earlier cycle; it increases beyond the top Ritz value. If ``sigma_1 = x theta``, the
    start had a part of at most its inverse square root on the top direction.

    Args:
        alpha: ``alpha_1..alpha_k`` of the last cycle.
        beta: ``beta_2..beta_{k+1}`` of the last cycle.
        cycles: Earlier cycles.
        theta: Top Ritz value of the last cycle.
        floor: Rounding level relative to ``theta^2``: a coupling below it is not known to be
            smaller, so an invariant subspace is trusted to this level only.

    Source: derived here (``docs/theory/interval.md``, a-posteriori bound and restarts).
    """

    def __init__(
        self,
        alpha: np.ndarray,
        beta: np.ndarray,
        cycles: Sequence[Cycle],
        theta: float,
        floor: float = 0.0,
    ) -> None:
        self.last = _Lanczos(alpha / theta, beta / theta, floor)
        self.earlier = [
            (_Lanczos(c.alpha / theta, c.beta / theta, floor), c.weights) for c in cycles
        ]

    def excludes(self, factor: float, threshold: float) -> bool:
        """Whether ``sigma_1 > factor theta`` would need a start below the threshold."""
        excess = np.array([(factor - 1) * (factor + 1)])
        return bool(self._log(excess)[0] >= -2 * math.log(threshold))

    def upper_factor(self, threshold: float) -> float:
        """Smallest ``x >= 1`` such that ``sigma_1 <= x theta`` unless the start was unlucky.

        Solves ``sum_j p_j(lam)^2 prod_c q_c(lam)^2 = 1 / t^2``.

        Args:
            threshold: Value ``t`` of `start_threshold`.

        Returns:
            The factor ``x``.
        """
        goal = -2 * math.log(threshold)
        if goal <= 0:
            return 1.0
        low, high = 1e-17, max(1 / threshold**2, 2.0)
        for _ in range(6):  # each round narrows the bracket by 64 on a logarithmic grid
            grid = np.geomspace(low, high, 65)
            above = self._log(grid) >= goal
            first = int(np.argmax(above)) if above.any() else len(grid) - 1
            low, high = grid[max(first - 1, 0)], grid[first]
        factor = math.sqrt(1 + high)
        if not self.earlier:
            factor = min(factor, closed_form_factor(len(self.last.alpha), threshold))
        return factor

    def _log(self, excess: np.ndarray) -> np.ndarray:
        lam = 1 + excess
        total = _log_christoffel(self.last, lam)
        for lanczos, weights in self.earlier:
            total += 2 * _log_growth(lanczos, weights, lam)
        return total


@dataclass(frozen=True)
class _Lanczos:
    """The tridiagonal matrix ``T = B^T B`` in units of ``theta^2``, and its polynomials."""

    alpha: np.ndarray
    beta: np.ndarray
    floor: float

    def polynomials(self, lam: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """``p_0, p_1, …, p_k`` at ``lam``, each as (value, log of the scale it is in)."""
        before, now = np.zeros_like(lam), np.ones_like(lam)
        scale = np.zeros_like(lam)
        yield now, scale
        link = 0.0
        for j in range(len(self.alpha)):
            diagonal = self.alpha[j] ** 2 + (self.beta[j - 1] ** 2 if j else 0.0)
            following = max(self.alpha[j] * self.beta[j], self.floor, 1e-300)
            new = ((lam - diagonal) * now - link * before) / following
            size = np.maximum(np.abs(new), 1.0)
            before, now, scale = now / size, new / size, scale + np.log(size)
            link = following
            yield now, scale


def _log_christoffel(lanczos: _Lanczos, lam: np.ndarray) -> np.ndarray:
    """``log sum_{j<=k} p_j(lam)^2``."""
    total = np.full_like(lam, -np.inf)
    for value, scale in lanczos.polynomials(lam):
        with np.errstate(divide="ignore"):
            total = np.logaddexp(total, 2 * (np.log(np.abs(value)) + scale))
    return total


def _log_growth(lanczos: _Lanczos, weights: np.ndarray, lam: np.ndarray) -> np.ndarray:
    """``log q(lam)``: how much a restart raised the start's part on the top direction."""
    total = np.full_like(lam, -np.inf)
    for weight, (value, scale) in zip(weights, lanczos.polynomials(lam), strict=False):
        with np.errstate(divide="ignore"):
            total = np.logaddexp(total, np.log(weight) + np.log(np.abs(value)) + scale)
    return total
