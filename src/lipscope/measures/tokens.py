"""Measures on tokens: points with weights, and with positions where the order counts."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.errors import InputError

_SUM = 1e-6  # how far from 1 weights may add up to: what rounding in float32 explains


class TokenMeasure:
    """``μ = Σ_i w_i δ_(s_i, x_i)``: tokens, their weights, and where they stand.

    Everything is in float64 on the CPU. Points keep their gradients; weights and positions
    have none.

    Attributes:
        points: The tokens ``x_i``, ``(n, d)``.
        weights: ``w_i``, ``(n,)``: not negative, of sum 1 to 1e-6 (they are divided by it);
            uniform if None.
        positions: ``s_i`` in [0, 1], ``(n,)``, where masked attention reads; or None.

    Raises:
        InputError: For no token, values that are not finite, weights that are negative or do
            not add up to 1, positions outside of [0, 1], or numbers that do not fit.

    >>> TokenMeasure(torch.zeros(2, 3), torch.tensor([0.25, 0.75])).weights.tolist()
    [0.25, 0.75]
    """

    def __init__(
        self, points: Tensor, weights: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        self.points = _plain("points", points)
        if self.points.ndim != 2 or not self.points.numel():
            raise InputError(
                "`points` should be tokens, `(n, d)`, at least one. Found the shape "
                f"`{tuple(self.points.shape)}`."
            )
        n = len(self.points)
        given = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
        row = _row("weights", given, n)
        if row.requires_grad:
            raise InputError(
                "`weights` should have no gradient: distances are differentiated in the points "
                "only. Found some that ask for it; detach them."
            )
        total, least = float(row.sum()), float(row.min())
        if least < 0 or abs(total - 1) > _SUM:
            raise InputError(
                "`weights` should be at least 0 and add up to 1. Found the least "
                f"{least:.4g} and the sum {total:.6g}."
            )
        self.weights = row / total
        self.positions = None if positions is None else _row("positions", positions, n).detach()
        if self.positions is not None:
            low, high = float(self.positions.min()), float(self.positions.max())
            if low < 0 or high > 1:
                raise InputError(
                    "`positions` should be between 0 and 1. Found some from "
                    f"{low:.4g} to {high:.4g}."
                )

    @property
    def num_tokens(self) -> int:
        """Number of atoms ``n``."""
        return len(self.points)

    @property
    def radius(self) -> float:
        """Largest norm of a token that has weight."""
        return float(self.points.detach()[self.weights > 0].norm(dim=-1).max())

    def moved(self, points: Tensor) -> TokenMeasure:
        """The same weights and positions at other points: ``T # μ`` for ``T(x_i) = points[i]``."""
        return TokenMeasure(points, self.weights, self.positions)

    def copied(self, shares: Tensor) -> TokenMeasure:
        """The same measure with every atom written as several, one after the other.

        Args:
            shares: Parts of each atom, ``(m,)``, of sum 1: copy r of atom i has weight
                ``shares[r] w_i``.
        """
        m = len(shares)
        s = self.positions
        return TokenMeasure(
            self.points.repeat_interleave(m, 0),
            (self.weights[:, None] * shares.to(self.weights)).flatten(),
            None if s is None else s.repeat_interleave(m),
        )


def in_order(points: Tensor) -> TokenMeasure:
    """The measure of a sequence: uniform weights, positions ``i / n`` for ``i = 1 … n``.

    >>> in_order(torch.zeros(4, 1)).positions
    tensor([0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64)
    """
    n = len(points)
    return TokenMeasure(points, None, torch.arange(1, n + 1, dtype=torch.float64) / n)


def _plain(name: str, values: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.is_complex() or not bool(values.isfinite().all()):
        raise InputError(f"`{name}` should be a tensor of finite numbers. Found another.")
    return values.to("cpu", torch.float64)


def _row(name: str, values: Tensor, n: int) -> Tensor:
    plain = _plain(name, values)
    if plain.shape != (n,):
        raise InputError(
            f"`{name}` should be one number for each of {n} tokens. Found the shape "
            f"`{tuple(plain.shape)}`."
        )
    return plain
