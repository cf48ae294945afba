"""Dasoulas, Scaman and Virmaux: Lipschitz normalisation of attention [dasoulas2021]."""

from __future__ import annotations

import math

from lipscope.attention import CONSTANT, LipschitzNormAttention
from lipscope.theorems.register import DERIVED, theorem

PUBLISHED = math.exp(math.sqrt(3)) + 2 * math.sqrt(6)


@theorem(
    cite="dasoulas2021",
    statement="LipschitzNorm, quadratic form",
    recalled=True,
    note="the constant is above one that is proved here",
)
def dasoulas_lipschitz_norm(layer: LipschitzNormAttention) -> float:
    """Attention with normalised scores, for any number of tokens.

    ``(e^√3 + 2√6) ‖[W_Q; W_K; W_V]‖`` per head: the constant of the map from queries, keys and
    values, times the norm of the stacked projections; heads combine to ``‖W_O‖ √(Σ_h …²)``.

    Holds for self-attention without a mask, for all inputs.

    Source: [dasoulas2021], for as many keys as queries; the authors' code, constant as recalled.
    """
    return PUBLISHED / CONSTANT * lipschitz_norm_improved(layer)


@theorem(cite=DERIVED, statement="LipschitzNorm, smaller constant")
def lipschitz_norm_improved(layer: LipschitzNormAttention) -> float:
    """Attention with normalised scores, for any number of tokens.

    ``√(5 + (e+1)²) ‖[W_Q; W_K; W_V]‖`` per head, 4.34 instead of 10.55; heads combine to
    ``‖W_O‖ √(Σ_h …²)``.

    Holds for self-attention without a mask, for all inputs.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    return float(layer.in_double().constant(1))
