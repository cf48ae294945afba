"""Emadi: the exact norm of the softmax from maximum to sum, and a bound [emadi2026].

Only the abstract was available. It states ``‖L(p)‖_{∞→1} = θ(p)``; the bound of a head below
follows in two lines, in the paper's geometry (max-token norm).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.theorems.head import HeadAt
from lipscope.theorems.papers.yudin2025 import rest_of_top
from lipscope.theorems.register import theorem


@theorem(cite="emadi2026", statement="Abstract: the balanced-mass factor", metric="max-token")
def emadi_balanced_mass(at: HeadAt) -> float:
    """Bound of attention from the balanced-mass factor of every row.

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


def balanced_mass(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖L(p)‖`` from the maximum norm to the sum of magnitudes.

    ``θ(p) = max_S 4 p(S) (1 - p(S))``, bounded by 1 and, if the largest probability exceeds
    1/2, equal to ``4 p_(1) (1 - p_(1))``. The maximum itself is a subset-sum problem.

    Holds for every probability vector.

    Source: the balanced-mass factor of [emadi2026].

    >>> balanced_mass(torch.tensor([0.75, 0.125, 0.125])).item()
    0.75
    """
    first = p.amax(-1)
    return torch.where(first > 0.5, 4 * first * rest_of_top(p), torch.ones_like(first))
