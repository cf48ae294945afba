"""Golub–Kahan bidiagonalisation of an operator, batched, one side reorthogonalised.

Pure decompositions: nothing here decides when to stop or what a singular value is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.linalg.operator import Operator

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
        u: ``(b, k, M)`` left vectors; None where they are not kept.
        products: Products with ``J`` or ``J^T`` so far, for each run of the batch.
    """

    alpha: Tensor
    beta: Tensor
    v: Tensor
    u: Tensor | None
    products: int

    @property
    def steps(self) -> int:
        """Number of steps k."""
        return self.alpha.shape[1]

    def matrix(self) -> Tensor:
        """``B_k``, shape ``(b, k, k)``."""
        return torch.diag_embed(self.alpha) + torch.diag_embed(self.beta[:, :-1], offset=1)


def golub_kahan(
    op: Operator, start: Tensor, capacity: int, *, keep_left: bool = True
) -> Iterator[Bidiagonal]:
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
        keep_left: Keep the left vectors; without them the memory is ``capacity N``, since the
            recurrence itself needs the last one only.

    Yields:
        The state after 1, 2, …, ``capacity`` steps. Its tensors are views that the next
        step extends; copy what must outlive it.
    """
    b = start.shape[0]
    size_in, size_out = op.in_size, math.prod(op.out_shape)
    # Memory that is not written to yet costs nothing.
    right = torch.empty(b, capacity + 1, size_in, dtype=op.dtype, device=op.device)
    left = start.new_empty(b, capacity if keep_left else 1, size_out)
    eps = torch.finfo(op.dtype).eps * _BREAKDOWN
    alpha, beta = (torch.zeros(b, capacity, dtype=torch.float64) for _ in range(2))
    size = torch.zeros(b, dtype=torch.float64)  # largest coefficient so far

    v = start.reshape(b, size_in)
    right[:, 0] = v / v.norm(dim=1, keepdim=True)
    before = left[:, 0]
    for k in range(capacity):
        now = left[:, k if keep_left else 0]
        w = op.matvec(right[:, k].reshape(b, *op.in_shape)).reshape(b, size_out)
        if k > 0:
            w = w - beta[:, k - 1, None].to(w) * before
        alpha[:, k], now[:] = _normalise(w, size * eps)
        size = torch.maximum(size, alpha[:, k])

        z = op.rmatvec(now.reshape(b, *op.out_shape)).reshape(b, size_in)
        z = z - alpha[:, k, None].to(z) * right[:, k]
        z = _orthogonalise(z, right[:, : k + 1])
        beta[:, k], right[:, k + 1] = _normalise(z, size * eps)
        size = torch.maximum(size, beta[:, k])
        before = now
        yield Bidiagonal(
            alpha[:, : k + 1],
            beta[:, : k + 1],
            right[:, : k + 2],
            left[:, : k + 1] if keep_left else None,
            2 * (k + 1),
        )


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
