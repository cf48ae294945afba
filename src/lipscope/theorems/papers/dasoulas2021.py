"""Dasoulas, Scaman and Virmaux: Lipschitz normalisation of attention [dasoulas2021]."""

from __future__ import annotations

from lipscope.attention.kinds.lipschitz_norm import LipschitzNormAttention
from lipscope.theorems.register import theorem


@theorem(
    cite="dasoulas2021",
    statement="LipschitzNorm, quadratic form",
    note="the constant was recalled, not read; nothing above 2.0 of its 10.55 was found",
)
def dasoulas_lipschitz_norm(layer: LipschitzNormAttention) -> float:
    """Attention with normalised scores, for any number of tokens.

    ``(e^√3 + 2√6) ‖[W_Q; W_K; W_V]‖`` a head: the constant of the map from queries, keys and
    values, times the norm of the three projections together; heads add up as ``‖W_O‖ √(Σ_h …²)``.

    Holds for self-attention without mask, all inputs.

    Source: [dasoulas2021], with as many keys as queries.
    """
    return float(layer.in_double().constant(1))
