"""One token's column of the Jacobian: below sigma, and above it with a bound of the rest.

``D_s = (J_is)_i`` is what the moves of token ``s`` alone do. ``‖D_s‖ ≤ ‖J‖``, and with ``R_s`` the
Jacobian without that column ``‖J‖² ≤ ‖D_s‖² + ‖R_s‖²``. Proofs: ``docs/theory/sink.md``.
"""

from __future__ import annotations

from torch import Tensor

from lipscope.theorems.derived.row_gram import (
    JacobianColumns,
    JacobianRows,
    weighing,
    weighted_rows,
)
from lipscope.theorems.head import HeadsAt
from lipscope.theorems.register import DERIVED, theorem

_SLACK = 1e-10  # float64 rounding of sums of n terms, with room


@theorem(cite=DERIVED, statement="one token's column", kind="lower", cost=weighing)
def sink_column(at: HeadsAt) -> float:
    """Sigma of moves of one token alone, the one for which it is largest.

    ``max_s ‖D_s‖``, ``‖D_s‖² = λ_max(sum_i J_is^T J_is)``: attention weights move with the token.

    Holds for any mask, bias and rotary embedding, at ``x``. Equal to sigma as attention becomes
    one-hot (Theorem 3.7 of [castin2024]); where it is uniform, ``1 / √n`` of it.
    """
    low, _ = JacobianColumns(at).squares()
    return max(float(low.max().sqrt()) * (1 - _SLACK) - at.slack, 0.0)


@theorem(cite=DERIVED, statement="one token's column, and a bound of the rest", cost=weighing)
def sink_column_upper(at: HeadsAt, slope: Tensor | None = None) -> float:
    """`sink_column`'s token exactly, all others by the row-Gram certificate.

    ``√(‖D_s‖² + c²)`` with ``c ≥ ‖R_s‖`` the lesser of the certificates by rows and by columns of
    the Jacobian without column ``s``.

    Holds for any mask, bias and rotary embedding, at ``x``, and through a norm in front. Equal to
    sigma where attention is uniform, and as it becomes one-hot on ``s``.
    """
    rows, columns = JacobianRows(at, slope), JacobianColumns(at, slope)
    _, high = columns.squares()
    token = int(high.argmax())
    rest = 0.0
    if len(at.x) > 1:
        rows.support[:, token] = False
        columns.support[token] = False
        rest = weighted_rows(rows).value
        rest = min(rest, weighted_rows(columns, below=rest).value)
    return float(high[token] + rest**2) ** 0.5 * (1 + _SLACK)
