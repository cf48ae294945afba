"""Inputs on which attention is far from smooth, each built from one head's ``A`` and ``V``.

One kind of input is one function that returns a `Construction`.
"""

from lipscope.attacks.constructions.clusters import (
    gamma_star,
    two_cluster,
    unbalanced,
    weighted_two_atoms,
)
from lipscope.attacks.constructions.construction import Construction
from lipscope.attacks.constructions.distances import l2_extremal
from lipscope.attacks.constructions.tokens import constant, dominant_token, large_radius, quadratic

__all__ = [
    "Construction",
    "constant",
    "dominant_token",
    "gamma_star",
    "l2_extremal",
    "large_radius",
    "quadratic",
    "two_cluster",
    "unbalanced",
    "weighted_two_atoms",
]
