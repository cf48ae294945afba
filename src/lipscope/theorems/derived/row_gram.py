"""The row-Gram certificate: all heads together, far sharper than sums over heads.

For any positive weights ``p_ij``, the Cauchy–Schwarz inequality on row ``i`` gives
``|sum_j J_ij e_j|^2 <= ω_i sum_j p_ij |e_j|^2`` with ``ω_i`` the top eigenvalue of
``sum_j J_ij J_ij^T / p_ij``. Hence ``‖J‖^2 <= max_j sum_i p_ij ω_i``. The heads are summed
inside ``J_ij``, before any norm. The weights only decide how sharp the bound is; they are
found by alternating between the directions that carry ``ω_i`` and the Perron vector of
what those directions see. Proof: ``docs/theory/local-certificates.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.theorems.derived.column_gram import JacobianColumns
from lipscope.theorems.derived.gram_rows import PROBES, JacobianRows
from lipscope.theorems.head_at import HeadAt, HeadsAt
from lipscope.theorems.register import DERIVED, theorem
from lipscope.theorems.residual_context import Around
from lipscope.theorems.spectrum import spectral_norm

_ROUNDS = 6  # of the search for weights; more of them gain next to nothing
_SLACK = 1e-10  # float64 rounding of sums of n terms, with room


def weighing(tokens: int, width: int) -> float:
    """Seconds that the certificate takes on one core, about.

    For every token, by rows and by columns: six rounds of a Gram matrix of the heads' concatenated
    ``width`` and a final one whose eigenvalues are found. Fitted to 1 to 16 heads of
    width 16 to 64 at 8 to 256 tokens, with torch 2 on a core of 50 GFLOP/s: within a factor of 2.
    """
    return tokens * (0.005 + width**2 * (7e-7 + 1.4e-9 * width + 6e-9 * tokens))


@theorem(cite=DERIVED, statement="row-Gram certificate, one head", cost=weighing)
def row_gram(at: HeadAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """Rows by Cauchy–Schwarz under weights chosen for this input, one head.

    The lesser of ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = λ_max(sum_j J_ij J_ij^T / p_ij)``, and the
    same of the transpose; the diagonal blocks keep their covariance term inside.

    Holds for any mask, bias and rotary embedding, at ``x``, whatever the weights; exactly
    as it stands through a norm in front, whose derivative is a part of ``J_ij``. A residual map of
    one head has its identity inside ``J_ii``.
    """
    return weighted_heads(HeadsAt((at.head,), at.x), slope, around).value


@theorem(cite=DERIVED, statement="row-Gram certificate, all heads", cost=weighing)
def row_gram_joint(at: HeadsAt, slope: Tensor | None = None, around: Around | None = None) -> float:
    """The same with all heads and the output projection in one matrix per row.

    The lesser of ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = λ_max(sum_j J_ij J_ij^T / p_ij)`` with
    ``J_ij = sum_h W_h J^h_ij``, and the same of the transpose.

    Holds for any mask, bias and rotary embedding, at ``x``, and through a norm in front; a residual
    map has its identity inside ``J_ii``, and norms after it in every row (then by rows alone).
    Cost: ``n`` matrices of the width of the concatenated heads in each of seven rounds.
    """
    return weighted_heads(at, slope, around).value


@theorem(cite="castin2024", statement="Lemma 3.8, over row-Gram certificates", cost=weighing)
def castin_lemma_3_8(at: HeadsAt) -> float:
    """Several heads by the sum over heads, as stated: what one head at a time can give.

    ``Σ_h ‖W_h‖ c_h`` with ``c_h`` the row-Gram certificate of head ``h`` before the output
    projection ``[W_1 … W_H]``; ``Σ_h c_h`` for concatenated heads.

    Holds for any mask, bias and rotary embedding, at ``x``. Equal to sigma where every ``c_h`` is
    exact and the heads move the output the same way; `row_gram_joint` sums heads before any norm.

    Source: Lemma 3.8 of [castin2024], ``Lip(f) ≤ Σ_h ‖W_h‖ Lip(f_h)``, at one input.
    """
    parts = [None] * len(at.heads) if at.output is None else at.output.chunk(len(at.heads), 1)
    return math.fsum(
        (1.0 if part is None else spectral_norm(part)) * row_gram(HeadAt(head, at.x))
        for head, part in zip(at.heads, parts, strict=True)
    )


@dataclass(frozen=True)
class Weighted:
    """A row-Gram certificate: its value, and what it was computed from."""

    value: float
    rows: JacobianRows
    weights: Tensor


def weighted_head(at: HeadAt) -> Weighted:
    """The certificate of one head, with its rows and weights."""
    return weighted_heads(HeadsAt((at.head,), at.x))


def weighted_heads(
    at: HeadsAt, slope: Tensor | None = None, around: Around | None = None
) -> Weighted:
    """The lesser of the certificates by rows and by columns, with the rows and their weights."""
    rows = weighted_rows(JacobianRows(at, slope, around))
    if around is not None and not around.plain:
        return rows  # a column's matrix would not factor over the rows that read it
    columns = weighted_rows(JacobianColumns(at, slope, around), below=rows.value)
    return replace(rows, value=min(rows.value, columns.value))


def weighted_rows(rows: JacobianRows, *, below: float = math.inf) -> Weighted:
    """The certificate with the best weights found; infinite where it is surely not ``below``."""
    best, weights = math.inf, rows.support.to(torch.float64)
    probes = _random_probes(rows)
    seen = rows.seen(probes)  # squared: what the probes see of every block
    for round_ in range(_ROUNDS):
        candidate = rows.weights(seen)
        omega, probes, fresh = rows.probe(candidate, probes)
        if not bool(omega.isfinite().all()):
            break
        value = _bound(candidate, omega)
        if value < best:
            best, weights = value, candidate
        share = 2 / (round_ + 2)
        seen = (1 - share) * seen + share * fresh
    # The probes bound each eigenvalue from below; what is reported uses the exact ones.
    if below <= best < math.inf:
        return Weighted(math.inf, rows, weights)
    value = _bound(weights, rows.eigenvalues(weights)) * (1 + _SLACK)
    return Weighted(value, rows, weights)


def _bound(weights: Tensor, omega: Tensor) -> float:
    return float((weights * omega[:, None]).sum(0).max().sqrt())


def _random_probes(rows: JacobianRows) -> Tensor:
    """The same Gaussian directions at every call: their mean square is a Frobenius norm."""
    generator = torch.Generator().manual_seed(0)
    n, size = len(rows.at.x), rows.width
    probes = torch.randn(size, PROBES, generator=generator, dtype=torch.float64)
    return (probes / math.sqrt(size * PROBES)).expand(n, -1, -1)
