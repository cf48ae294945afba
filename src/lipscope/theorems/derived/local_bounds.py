"""Local certificates of one head: upper bounds of sigma at a given input.

All of them split the Jacobian into ``T1 + T3``, the blocks ``P_ij V B_ij`` with
``B_ij = I + y_ij a_ij^T``, and ``T2``, the diagonal blocks ``V C_i A``. They hold for any
mask and bias, and for the map ``normed``: there column ``j`` is multiplied by the slope ``s_j``
of the norm, else ``s_j = 1``. Proofs: ``docs/theory/local-certificates.md``.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg import eigenvalue, norm_in_double
from lipscope.theorems.head import HeadAt
from lipscope.theorems.register import DERIVED, theorem
from lipscope.theorems.residual import Around


@theorem(cite=DERIVED, statement="F1: three norms")
def local_norms(at: HeadAt, slope: Tensor | None = None) -> float:
    """The sum of the norms of the three parts of the Jacobian.

    ``‖[P_ij s_j]‖ ‖V‖ + max_i ‖V C_i A‖ s_i + ‖[P_ij |V y_ij| |a_ij| s_j]‖``.

    Holds for any mask, bias and rotary embedding, at ``x``.
    """
    s = at.columns(slope)
    p = at.p * s
    rank_one = norm_in_double(p * at.nu * at.rho)
    return norm_in_double(p) * at.head.norm_v + float((at.drift * s).max()) + rank_one


@theorem(cite=DERIVED, statement="F2: rows by Cauchy–Schwarz")
def local_rows(at: HeadAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """Rows by Cauchy–Schwarz under the attention weights.

    ``min_θ sqrt(max_j s_j^2 ((1 + θ) sum_i P_ij w_i + (1 + 1/θ) ‖V C_j A‖^2))`` over ``θ > 0``,
    with ``w_i`` the top eigenvalue of ``V (sum_j P_ij B_ij B_ij^T) V^T``, which is
    ``V (I + |a_i|^2 C_i) V^T`` without a rotary embedding.

    Holds for any mask, bias and rotary embedding, at ``x``; exact in the limit of one-hot
    attention, and for equal tokens. A residual map of one head replaces ``w_i`` by ``l_i^2 w_i``
    and the second part by ``l_j ‖V C_j A‖ s_j + ‖D_j‖``.
    """
    s, w, own = at.columns(slope), _row_norms(at), at.drift
    if around is None:
        return of_both_parts((at.p.T @ w) * s.square(), own * s)
    w, own = around.lefts.square() * w, around.lefts * own * s + around.beside
    return of_both_parts((at.p.T @ w) * s.square(), own)


@theorem(cite=DERIVED, statement="F2s: scalars only")
def local_rows_scalar(at: HeadAt, slope: Tensor | None = None) -> float:
    """`local_rows` with every matrix replaced by its trace: ``O(n^2 d)``, no eigenvalues.

    ``‖V‖ min_θ sqrt(max_j s_j^2 ((1 + θ) c_j + (1 + 1/θ) ‖A‖^2 (tr C_j)^2))`` with
    ``c_j = sum_i P_ij (1 + |a_i|^2 tr C_i)``.

    Holds for any mask and bias, at ``x``; not for rotary embeddings.
    """
    at.head.without_rotary()
    head, s, trace = at.head, at.columns(slope), _trace(at.p, at.x)
    weights = 1 + at.rho[:, 0] ** 2 * trace
    columns = (at.p.T @ weights) * s.square()
    return head.norm_v * of_both_parts(columns, head.norm_a * trace * s)


@theorem(cite=DERIVED, statement="F3c: norms of blocks")
def local_blocks(at: HeadAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """Norm of the matrix of block norms, closed-form off the diagonal.

    ``‖[β_ij s_j]‖`` with ``β_ii = ‖J_ii‖`` and, for i ≠ j,
    ``β_ij = P_ij min(‖V‖ ‖I + y a^T‖, ‖V‖ + |V y| |a|)``, where
    ``‖I + y a^T‖ = (g + sqrt(g^2 + 4 + 4 <y, a>)) / 2``, ``g = |y| |a|``. A residual map of one
    head has ``‖D_i + L_i J_ii‖`` on the diagonal and ``‖L_i‖ β_ij`` off it.

    Holds for any mask and bias, at ``x``; not for rotary embeddings.
    """
    at.head.without_rotary()
    p, a, head = at.p, at.rho, at.head
    mean = p @ at.x
    y = torch.cdist(mean, at.x, compute_mode="donot_use_mm_for_euclid_dist")
    keys = at.x @ head.key.T  # <y_ij, a_i> = <K y_ij, q_i>
    inner = at.q @ keys.T - (at.q * (p @ keys)).sum(-1, keepdim=True)
    g = y * a
    norm = (g + (g * g + 4 + 4 * inner).clamp_min(0).sqrt()) / 2
    beta = p * torch.minimum(head.norm_v * norm, head.norm_v + at.nu * a)
    beta = beta * at.columns(slope)
    beta = beta if around is None else around.lefts[:, None] * beta
    beta.diagonal().copy_(_diagonal_norms(at, slope, around))
    return norm_in_double(beta)


@theorem(
    cite=DERIVED,
    statement="Largest token norm, at x",
    metric="max-token",
    cost=lambda tokens, width: 3e-10 * tokens * width**3,
)
def local_max_token(at: HeadAt, slope: Tensor | None = None) -> float:
    """`global_max_token` with the attention weights at this input.

    ``max_i (√(w_i Σ_j P_ij s_j²) + ‖V C_i A‖ s_i)``, ``s_j = 1`` without a norm in front.

    Holds for any mask and bias at ``x``; no rotary embedding. Costs ``n`` eigenproblems of the
    head width.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    at.head.without_rotary()
    s = at.columns(slope)
    rows = (_row_norms(at) * (at.p @ s.square())).sqrt()
    return float((rows + at.drift * s).max())


@theorem(cite=DERIVED, statement="Largest token norm, at x, scalars only", metric="max-token")
def local_max_token_scalar(at: HeadAt, slope: Tensor | None = None) -> float:
    """`local_max_token` with traces in place of eigenvalues.

    ``max_i (√((‖V‖² + |a_i|² t_i) Σ_j P_ij s_j²) + √(t_i · tr A^T C_i A) s_i)``,
    ``t_i = tr V C_i V^T``, ``s_j = 1`` without a norm in front.

    Holds for any mask and bias at ``x``; no rotary embedding.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    at.head.without_rotary()
    s, moved = at.columns(slope), _trace(at.p, at.v)
    turned = _trace(at.p, at.tokens_in_queries())
    rows = at.head.norm_v**2 + at.rho[:, 0] ** 2 * moved
    rows = (rows * (at.p @ s.square())).sqrt()
    return float((rows + (moved * turned).sqrt() * s).max())


def of_both_parts(columns: Float[Tensor, " n"], own: Float[Tensor, " n"]) -> float:
    """``min_θ sqrt(max_j (1 + θ) c_j + (1 + 1/θ) t_j²)`` over ``θ > 0``.

    Bounds ``‖T + D‖`` for ``‖T E‖² ≤ Σ_j c_j |e_j|²`` and ``D`` block diagonal with norms ``t_j``;
    never above ``max_j √c_j + max_j t_j``, which one ``θ`` attains. Any ``θ`` gives a bound, so
    the search may be inexact.

    Source: derived here (``docs/theory/local-certificates.md``, F2).

    One nonzero term per column, equal at ``θ = 9/4``:

    >>> round(of_both_parts(torch.tensor([4.0, 0.0]), torch.tensor([0.0, 3.0])) ** 2, 6)
    13.0
    """
    size = max(float(columns.max().sqrt()), float(own.max()))
    if not 0 < size < torch.inf:
        return size
    columns, squares = columns.double() / size**2, (own.double() / size).square()
    first = float((squares.max() / columns.max().clamp_min(1e-300)).sqrt())
    middle = columns.new_tensor([max(first, 1e-150)])
    best, width = math.inf, 20.0  # log2 scale; each round narrows the grid sixteenfold
    for _ in range(6):
        theta = middle * 2.0 ** torch.linspace(-width, width, 65).double()
        values = ((1 + theta) * columns[:, None] + (1 + 1 / theta) * squares[:, None]).amax(0)
        at = int(values.argmin())
        best, middle, width = min(best, float(values[at])), theta[at], width / 16
    return size * math.sqrt(best)


def _trace(p: Tensor, v: Tensor) -> Tensor:
    """Traces of the covariances of the rows of ``v`` under every row of ``p``."""
    v = v - v.mean(0)  # leaves covariances unchanged and reduces rounding
    return (p @ v.square().sum(-1) - (p @ v).square().sum(-1)).clamp_min(0)


def _row_norms(at: HeadAt) -> Tensor:
    """Top eigenvalues of ``V (sum_j P_ij B_ij B_ij^T) V^T``, ``(n,)``."""
    cross = at.head.key @ at.head.value.T
    found = []
    for rows in at.chunks:
        y, p = at.y(rows), at.p[rows, :, None]
        grams = at.gram_v + (y * p * at.rho[rows, :, None].square()).mT @ y
        if at.rotary is not None:  # otherwise the weighted sum of y is zero
            mixed = (at.pulled(rows) @ cross).mT @ (y * p)
            grams = grams + mixed + mixed.mT
        found.append(eigenvalue(grams))
    return torch.cat(found)


def _diagonal_norms(at: HeadAt, slope: Tensor | None, around: Around | None) -> Tensor:
    """``‖J_ii‖`` without rotary embedding, exactly, with norm and residual path, ``(n,)``."""
    head, norms = at.head, []
    for rows in at.chunks:
        i = torch.arange(rows.start, rows.stop)
        a = (at.q[rows] @ head.key)[:, None]
        blocks = head.value + (at.v[rows] - at.o[rows])[..., None] * a
        blocks = at.p[i, i, None, None] * blocks + at.covariance(rows) @ head.query
        if slope is not None:
            x = at.x[rows, :, None]
            blocks = slope[rows, None, None] * (blocks - (blocks @ x) * x.mT)
        blocks = blocks if around is None else around.own(rows) + around.through(rows, blocks)
        norms.append(eigenvalue(blocks @ blocks.mT))
    return torch.cat(norms).sqrt()
