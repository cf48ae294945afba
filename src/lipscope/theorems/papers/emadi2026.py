"""Emadi: the exact norm of the softmax from maximum to sum, and what follows [emadi2026].

Only the abstract could be had. It states ``‖L(p)‖_{∞→1} = θ(p)``; the bound for a whole head
below follows from it by two lines, in the geometry of the paper (largest token norm).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.theorems.head import Head
from lipscope.theorems.point import at_point
from lipscope.theorems.register import theorem
from lipscope.theorems.softmax import balanced_mass


@theorem(cite="emadi2026", statement="Abstract: the balanced-mass factor", metric="max-token")
def emadi_balanced_mass(head: Head, x: Tensor) -> float:
    """Attention's change by the balanced-mass factor of every row.

    ``‖V‖ + max_i θ(P_i) (|a_i| + max_j |A^T x_j|) max_j |V (x_j - c)|``, ``c`` the mean token.

    Holds for any mask and bias at ``x``; not for rotary embeddings.

    Source: ``‖L(p)‖_{∞→1} = θ(p)`` of [emadi2026]; the rest is derived here
    (``docs/theory/global-bounds.md``).
    """
    head.without_rotary()
    at = at_point([head], x)
    centred = at.x - at.x.mean(0)
    small = torch.linalg.qr(head.query.T, mode="r").R
    back = float(((centred @ head.key.T) @ small.T).norm(dim=1).max())
    size = float((centred @ head.value.T).norm(dim=1).max())
    rows = balanced_mass(at.p[0]) * (at.norms_a[0, :, 0] + back)
    return head.norm_v + size * float(rows.max())
