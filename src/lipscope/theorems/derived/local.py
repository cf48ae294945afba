"""Local certificates of one head: upper bounds of sigma at this very input.

All of them split the Jacobian into ``T1 + T3``, the blocks ``P_ij V B_ij`` with
``B_ij = I + y_ij a_ij^T``, and ``T2``, the diagonal blocks ``V C_i A``. They hold for any
mask and bias, and for the map ``normed``: there column ``j`` is multiplied by the slope ``s_j``
of the norm, else ``s_j = 1``. Proofs: ``docs/theory/local-certificates.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.theorems.head import Head
from lipscope.theorems.point import Point, at_point
from lipscope.theorems.register import DERIVED, theorem


@theorem(cite=DERIVED, statement="F1: three norms")
def f1(head: Head, x: Tensor, slope: Tensor | None = None) -> float:
    """Norms of the three parts of the Jacobian, added.

    ``‖[P_ij s_j]‖ ‖V‖ + max_i ‖V C_i A‖ s_i + ‖[P_ij |V y_ij| |a_ij| s_j]‖``.

    Holds for any mask, bias and rotary embedding, at ``x``.
    """
    at = at_point([head], x, slope)
    p = at.p[0] * at.columns
    rank_one = _norm(p * at.spread[0] * at.norms_a[0])
    return _norm(p) * head.norm_v + float((at.norms_t2[0] * at.columns).max()) + rank_one


@theorem(cite=DERIVED, statement="F2: rows by Cauchy–Schwarz")
def f2(head: Head, x: Tensor, slope: Tensor | None = None) -> float:
    """Rows by Cauchy–Schwarz under the attention weights.

    ``sqrt(max_j s_j^2 sum_i P_ij w_i) + max_i ‖V C_i A‖ s_i`` with ``w_i`` the top eigenvalue of
    ``V (sum_j P_ij B_ij B_ij^T) V^T``, which is ``V (I + |a_i|^2 C_i) V^T`` without rotary
    embedding.

    Holds for any mask, bias and rotary embedding, at ``x``; exact as attention becomes
    one-hot, and for equal tokens.
    """
    at = at_point([head], x, slope)
    w = torch.linalg.eigvalsh(_row_grams(at))[:, -1].clamp_min(0)
    rows = ((at.p[0].T @ w).sqrt() * at.columns).max()
    return float(rows + (at.norms_t2[0] * at.columns).max())


@theorem(cite=DERIVED, statement="F2s: scalars only")
def f2_scalar(head: Head, x: Tensor, slope: Tensor | None = None) -> float:
    """F2 with every matrix replaced by its trace: ``O(n^2 d)``, no eigenvalues.

    ``‖V‖ (sqrt(max_j s_j^2 sum_i P_ij (1 + |a_i|^2 tr C_i)) + ‖A‖ max_i s_i tr C_i)``.

    Holds for any mask and bias, at ``x``; not for rotary embeddings.
    """
    head.without_rotary()
    at = at_point([head], x, slope)
    p, x = at.p[0], at.x
    x = x - x.mean(0)  # covariances do not see it, rounding does
    trace = (p @ (x * x).sum(-1) - (p @ x).square().sum(-1)).clamp_min(0)
    weights = 1 + at.norms_a[0, :, 0] ** 2 * trace
    rows = ((p.T @ weights).sqrt() * at.columns).max()
    return head.norm_v * float(rows + head.norm_a * (trace * at.columns).max())


@theorem(cite=DERIVED, statement="F3c: norms of blocks")
def f3_blocks(head: Head, x: Tensor, slope: Tensor | None = None) -> float:
    """Norm of the matrix of the blocks' norms, off the diagonal in closed form.

    ``‖[β_ij s_j]‖`` with ``β_ii = ‖J_ii‖`` and, else,
    ``β_ij = P_ij min(‖V‖ ‖I + y a^T‖, ‖V‖ + |V y| |a|)``, where
    ``‖I + y a^T‖ = (g + sqrt(g^2 + 4 + 4 <y, a>)) / 2``, ``g = |y| |a|``.

    Holds for any mask and bias, at ``x``; not for rotary embeddings.
    """
    head.without_rotary()
    at = at_point([head], x, slope)
    p, a = at.p[0], at.norms_a[0]
    mean = p @ at.x
    y = torch.cdist(mean, at.x, compute_mode="donot_use_mm_for_euclid_dist")
    keys = at.x @ head.key.T  # <y_ij, a_i> = <K y_ij, q_i>
    inner = at.q[0] @ keys.T - (at.q[0] * (p @ keys)).sum(-1, keepdim=True)
    g = y * a
    norm = (g + (g * g + 4 + 4 * inner).clamp_min(0).sqrt()) / 2
    beta = p * torch.minimum(head.norm_v * norm, head.norm_v + at.spread[0] * a)
    beta.diagonal().copy_(_diagonal_norms(at))
    return _norm(beta * at.columns)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _row_grams(at: Point) -> Tensor:
    """``V (sum_j P_ij B_ij B_ij^T) V^T`` of one head, ``(n, k_v, k_v)``."""
    p, v, o, value = at.p[0], at.v[0], at.o[0], at.value[0]
    base = value @ value.T
    cross = value @ at.key[0].T
    grams = []
    for i in range(len(at.x)):
        y = v - o[i]
        weighted = y * p[i, :, None]
        gram = base + (weighted * at.norms_a[0, i, :, None] ** 2).T @ y
        if at.rotary:  # else the weighted sum of y is zero
            mixed = cross @ at.pulled(i)[0].T @ weighted
            gram = gram + mixed + mixed.T
        grams.append(gram)
    return torch.stack(grams)


def _diagonal_norms(at: Point) -> Tensor:
    """``‖J_ii‖`` of one head, exactly, ``(n,)``."""
    norms = []
    for i in range(len(at.x)):
        a = at.pulled(i)[0, i] @ at.key[0]
        block = at.value[0] + torch.outer(at.v[0, i] - at.o[0, i], a)
        block = at.p[0, i, i] * block + at.covariance(i)[0] @ at.query[0]
        norms.append(torch.linalg.eigvalsh(block @ block.T)[-1])
    return torch.stack(norms).clamp_min(0).sqrt()
