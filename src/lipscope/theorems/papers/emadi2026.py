"""Emadi: the exact norm of the softmax from maximum to sum, and what follows [emadi2026].

Only the abstract could be had. It states ``‖L(p)‖_{∞→1} = θ(p)``; the bound for a whole head
below follows from it by two lines, in the geometry of the paper (largest token norm).
"""

from __future__ import annotations

from lipscope.theorems.head import HeadAt
from lipscope.theorems.register import theorem
from lipscope.theorems.spectrum import balanced_mass


@theorem(cite="emadi2026", statement="Abstract: the balanced-mass factor", metric="max-token")
def emadi_balanced_mass(at: HeadAt) -> float:
    """Attention's change by the balanced-mass factor of every row.

    ``‖V‖ + max_i θ(P_i) (|a_i| + max_j |A^T x_j|) max_j |V (x_j - c)|``, ``c`` the mean token.

    Holds for any mask and bias at ``x``; not for rotary embeddings.

    Source: ``‖L(p)‖_{∞→1} = θ(p)`` of [emadi2026]; the rest is derived here
    (``docs/theory/global-bounds.md``).
    """
    head = at.head
    head.without_rotary()
    centred = at.x - at.x.mean(0)
    back = float(((centred @ head.key.T) @ at.factor_q.T).norm(dim=1).max())
    size = float((centred @ head.value.T).norm(dim=1).max())
    rows = balanced_mass(at.p) * (at.rho[:, 0] + back)
    return head.norm_v + size * float(rows.max())
