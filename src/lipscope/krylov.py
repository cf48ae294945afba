"""Golub–Kahan bidiagonalisation of an operator, batched, one side reorthogonalised.

Pure decompositions: nothing here decides when to stop or what a singular value is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.operator import Operator

# A new direction shorter than this many rounding units of the operator's size is noise:
# the subspace is numerically invariant and the recurrence has ended.
_BREAKDOWN = 16.0


@dataclass(frozen=True)
class Bidiagonal:
    """The state after ``k`` steps of a batch of ``b`` runs.

    ``J V_k = U_k B_k`` and ``J^T U_k = V_k B_k^T + beta_{k+1} v_{k+1} e_k^T``, with ``B_k``
    upper bidiagonal: diagonal ``alpha_1..alpha_k``, superdiagonal ``beta_2..beta_k``.

    Attributes:
        alpha: ``(b, k)`` float64, on the CPU.
        beta: ``(b, k)`` float64: ``beta_2 .. beta_{k+1}``.
        v: ``(b, k + 1, N)`` right vectors; the last one starts the next step.
        u: ``(b, k, M)`` left vectors.
        products: Products with ``J`` or ``J^T`` so far, for each run of the batch.
    """

    alpha: Tensor
    beta: Tensor
    v: Tensor
    u: Tensor
    products: int

    @property
    def steps(self) -> int:
        """Number of steps k."""
        return self.alpha.shape[1]

    def matrix(self) -> Tensor:
        """``B_k``, shape ``(b, k, k)``."""
        return torch.diag_embed(self.alpha) + torch.diag_embed(self.beta[:, :-1], offset=1)


def golub_kahan(op: Operator, start: Tensor, capacity: int) -> Iterator[Bidiagonal]:
    """Bidiagonalise ``op`` from ``start``, yielding the decomposition after every step.

    The right vectors are reorthogonalised against all earlier ones (a second pass where
    the first one cancelled); the left ones follow from the two-term recurrence, which
    suffices for the leading singular values [simon2000] and halves that cost.

    Holds for any real operator. A run whose subspace is exhausted goes on with zeros,
    so that a batch may hold runs of different lengths.

    Args:
        op: Operator whose products accept one leading batch axis.
        start: ``(b, *in_shape)``, one nonzero start per run.
        capacity: Largest number of steps; memory is ``capacity (N + M)`` numbers a run.

    Yields:
        The state after 1, 2, …, ``capacity`` steps. Its tensors are views that the next
        step extends; copy what must outlive it.
    """
    b = start.shape[0]
    size_in, size_out = op.in_size, math.prod(op.out_shape)
    basis = _Basis(b, size_in, size_out, op, capacity)
    eps = torch.finfo(op.dtype).eps * _BREAKDOWN
    alpha, beta = (torch.zeros(b, capacity, dtype=torch.float64) for _ in range(2))
    size = torch.zeros(b, dtype=torch.float64)  # largest coefficient so far

    v = start.reshape(b, size_in)
    basis.set_v(0, v / v.norm(dim=1, keepdim=True))
    for k in range(capacity):
        w = op.mv(basis.v[:, k].reshape(b, *op.in_shape)).reshape(b, size_out)
        if k > 0:
            w = w - beta[:, k - 1, None].to(w) * basis.u[:, k - 1]
        alpha[:, k], unit = _normalise(w, size * eps)
        basis.set_u(k, unit)
        size = torch.maximum(size, alpha[:, k])

        z = op.rmv(basis.u[:, k].reshape(b, *op.out_shape)).reshape(b, size_in)
        z = z - alpha[:, k, None].to(z) * basis.v[:, k]
        z = _orthogonalise(z, basis.v[:, : k + 1])
        beta[:, k], unit = _normalise(z, size * eps)
        basis.set_v(k + 1, unit)
        size = torch.maximum(size, beta[:, k])
        yield Bidiagonal(
            alpha[:, : k + 1],
            beta[:, : k + 1],
            basis.v[:, : k + 2],
            basis.u[:, : k + 1],
            2 * (k + 1),
        )


class _Basis:
    """Storage for both bases, grown by doubling up to the capacity."""

    def __init__(self, b: int, n_in: int, n_out: int, op: Operator, capacity: int) -> None:
        first = min(capacity, 16)
        self.capacity = capacity
        self.v = torch.empty(b, first + 1, n_in, dtype=op.dtype, device=op.device)
        self.u = torch.empty(b, first, n_out, dtype=op.dtype, device=op.device)

    def set_v(self, k: int, vector: Tensor) -> None:
        self.v = self._room(self.v, k, self.capacity + 1)
        self.v[:, k] = vector

    def set_u(self, k: int, vector: Tensor) -> None:
        self.u = self._room(self.u, k, self.capacity)
        self.u[:, k] = vector

    @staticmethod
    def _room(store: Tensor, k: int, most: int) -> Tensor:
        if k < store.shape[1]:
            return store
        b, held, n = store.shape
        grown = store.new_empty(b, min(2 * held, most), n)
        grown[:, :held] = store
        return grown


def _normalise(w: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the rows (float64, CPU) and unit rows; a row at the floor becomes zero."""
    # Squares of small float32 entries underflow; the sum is taken in float64.
    norm = torch.linalg.vector_norm(w, dim=1, dtype=torch.float64)
    alive = norm > floor.to(norm.device)
    inverse = torch.where(alive, 1.0 / norm, torch.zeros_like(norm)).to(w)
    # NaN compares false; keep it visible, so that the solver can report it.
    length = torch.where(alive | norm.isnan(), norm, torch.zeros_like(norm))
    return length.cpu(), w * inverse[:, None]


def _orthogonalise(z: Tensor, basis: Tensor) -> Tensor:
    """``z`` minus its projection on the rows of ``basis``, twice where it cancels."""
    before = torch.linalg.vector_norm(z, dim=1)
    z = _project_out(z, basis)
    if (torch.linalg.vector_norm(z, dim=1) < 0.7 * before).any():
        z = _project_out(z, basis)
    return z


def _project_out(z: Tensor, basis: Tensor) -> Tensor:
    coefficients = torch.bmm(basis, z[:, :, None])
    return torch.baddbmm(z[:, :, None], basis.mT, coefficients, alpha=-1)[:, :, 0]
