"""Inputs on which attention is far from smooth, each built from one head's ``A`` and ``V``.

``A = K^T Q / sqrt(k)``, logits ``<A x_i, x_j>``, tokens of norm at most ``R``. The head decides
where the tokens go; what is measured is the layer with its biases, heads and projection.
One kind of input is one function that returns a `Construction`; `ascend` searches.
"""

from lipscope.attacks.ascent import Ascent, ascend, confirm
from lipscope.attacks.constructions.clusters import (
    gamma_star,
    two_cluster,
    unbalanced,
    weighted_two_atoms,
)
from lipscope.attacks.constructions.construction import Construction
from lipscope.attacks.constructions.distances import l2_extremal
from lipscope.attacks.constructions.tokens import constant, dominant_token, large_radius, quadratic
from lipscope.measures.atoms import Repeated

__all__ = [
    "Ascent",
    "Construction",
    "Repeated",
    "ascend",
    "confirm",
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
