"""Norms of matrices and of the softmax's Jacobian, ``L(p) = diag(p) - p p^T``, in float64."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg import by_threads

_SHARED = 2**16  # entries of a batch from which a thread more pays: 64 matrices of 32 rows
_EXACT_NORM = 1024  # rows up to which the norm of a nonnegative matrix is a full decomposition


def norm_in_double(matrix: Float[Tensor, "r c"]) -> float:
    """``‖M‖``, on the CPU in float64."""
    return float(torch.linalg.matrix_norm(matrix.detach().to("cpu", torch.float64), 2))


def norms_of_many(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """Of many small matrices, from the smaller Gram matrix of each."""
    size = m.abs().amax((-2, -1), keepdim=True)  # squares must not underflow
    m = m / torch.where(size > 0, size, 1.0)
    return size[..., 0, 0] * eigenvalue(m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m).sqrt()


def nonnegative_norm(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """``‖M‖`` of matrices without negative entries, from above.

    Exact up to rounding where they are small; else Collatz and Wielandt's bound
    ``lam_max(G) <= max_j (G w)_j / w_j`` for ``G = M^T M`` and any ``w > 0``.
    """
    gram = m.mT @ m
    if m.shape[-2] <= _EXACT_NORM:
        return eigenvalue(gram).sqrt()
    w, best = m.new_ones(*m.shape[:-2], m.shape[-1], 1), m.new_tensor(math.inf)
    for _ in range(100):
        moved = gram @ w
        best = torch.minimum(best, (moved / w).amax((-2, -1)))
        w = (moved / moved.amax(-2, keepdim=True).clamp_min(1e-300)).clamp_min(1e-12)
    return best.sqrt().nan_to_num(math.inf, math.inf)


def of_both_parts(columns: Float[Tensor, " n"], own: Float[Tensor, " n"]) -> float:
    """``min_θ sqrt(max_j (1 + θ) c_j + (1 + 1/θ) t_j²)`` over ``θ > 0``.

    Bounds ``‖T + D‖`` for ``‖T E‖² ≤ Σ_j c_j |e_j|²`` and ``D`` block diagonal with norms ``t_j``;
    never above ``max_j √c_j + max_j t_j``, which is one ``θ``. Any ``θ`` gives a bound, so
    that the search need not be exact.

    Source: derived here (``docs/theory/local-certificates.md``, F2).

    One column each, where both are equal at ``θ = 9/4``:

    >>> round(of_both_parts(torch.tensor([4.0, 0.0]), torch.tensor([0.0, 3.0])) ** 2, 6)
    13.0
    """
    size = max(float(columns.max().sqrt()), float(own.max()))
    if not 0 < size < torch.inf:
        return size
    columns, squares = columns.double() / size**2, (own.double() / size).square()
    first = float((squares.max() / columns.max().clamp_min(1e-300)).sqrt())
    middle = columns.new_tensor([max(first, 1e-150)])
    best, width = math.inf, 20.0  # in powers of two; each round narrows the grid sixteenfold
    for _ in range(6):
        theta = middle * 2.0 ** torch.linspace(-width, width, 65).double()
        values = ((1 + theta) * columns[:, None] + (1 + 1 / theta) * squares[:, None]).amax(0)
        at = int(values.argmin())
        best, middle, width = min(best, float(values[at])), theta[at], width / 16
    return size * math.sqrt(best)


def eigenvalue(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    """Largest eigenvalues of positive semidefinite matrices; inf where they overflow."""
    finite = None
    if not bool(torch.isfinite(m.sum())):  # else no entry is infinite or NaN
        finite = torch.isfinite(m).all(-1).all(-1)
        m = m.masked_fill(~finite[..., None, None], 0.0)
    tops = m[..., 0, 0] if m.shape[-1] == 1 else _tops(m)
    tops = tops.clamp_min(0.0)
    return tops if finite is None else tops.masked_fill(~finite, torch.inf)


_BISECTIONS = 60


def top_two(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖L(p)‖`` from the two largest probabilities.

    ``λ_max(L(p)) ≤ p_(1) (1 - p_(1) + p_(2)) ≤ 1/2``, with equality for uniform ``p`` and for
    two equal halves.

    Holds for every probability vector.

    Source: the function ``g_1`` of [yudin2025]; proof: ``docs/theory/global-bounds.md``.

    >>> top_two(torch.tensor([0.5, 0.5, 0.0])).item()
    0.5
    """
    top = p.topk(min(2, p.shape[-1]), dim=-1).values
    first = top[..., 0]
    second = top[..., 1] if top.shape[-1] > 1 else torch.zeros_like(first)
    return first * (_rest_of_top(p) + second)


def softmax_norm(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """``‖L(p)‖``, up to the rounding of 60 bisections and never below it by more.

    The root in ``[p_(2), p_(1)]`` of ``Σ_i p_i² / (p_i - λ) = 1``: the upper end of the last
    interval is returned.

    Holds for every probability vector.

    Source: the secular equation of a diagonal matrix minus one of rank one [golub1973].
    """
    if p.shape[-1] < 2:
        return torch.zeros_like(p[..., 0])
    top = p.topk(2, dim=-1).values
    high, low = top[..., 0].clone(), top[..., 1].clone()
    first = top[..., 0]
    for _ in range(_BISECTIONS):
        mid = (low + high) / 2
        # Only the largest entry is above λ; all other terms are negative.
        terms = p.square() / (p - mid[..., None])
        value = torch.where(terms.isfinite(), terms, 0.0).sum(-1)
        above = (value > 1) | (mid >= first)
        high, low = torch.where(above, mid, high), torch.where(above, low, mid)
    return torch.minimum(high, top_two(p)).clamp_min(0)


def balanced_mass(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖L(p)‖`` from the maximum norm to the sum of magnitudes.

    ``θ(p) = max_S 4 p(S) (1 - p(S))``, bounded by 1 and, if the largest probability exceeds
    1/2, equal to ``4 p_(1) (1 - p_(1))``. The maximum itself is a subset-sum problem.

    Holds for every probability vector.

    Source: [emadi2026], whose balanced-mass factor this is.

    >>> balanced_mass(torch.tensor([0.75, 0.125, 0.125])).item()
    0.75
    """
    first = p.amax(-1)
    return torch.where(first > 0.5, 4 * first * _rest_of_top(p), torch.ones_like(first))


def _rest_of_top(p: Tensor) -> Tensor:
    """``1 - p_(1)`` as the sum of the others, which does not cancel."""
    return p.scatter(-1, p.argmax(-1, keepdim=True), 0.0).sum(-1)


def _tops(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    def of(some: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(some)[..., -1]

    if m.ndim < 3 or m.numel() < _SHARED or m.device.type != "cpu":
        return of(m)
    return by_threads(of, m.flatten(0, -3)).view(m.shape[:-2])
