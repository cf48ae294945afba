"""Dasoulas, Scaman and Virmaux: Lipschitz normalisation of attention [dasoulas2021]."""

from __future__ import annotations

import math

import torch

from lipscope.attention.kinds.lipschitz_norm import LipschitzNormAttention
from lipscope.theorems.register import theorem
from lipscope.theorems.spectrum import spectral_norm

CONSTANT = math.exp(math.sqrt(3)) + 2 * math.sqrt(6)


@theorem(
    cite="dasoulas2021",
    statement="LipschitzNorm, quadratic form",
    note="the constant was recalled, not read; nothing above 2.0 of its 10.55 was found",
)
def dasoulas_lipschitz_norm(layer: LipschitzNormAttention) -> float:
    """Attention with normalised scores, for any number of tokens.

    ``(e^√3 + 2√6) ‖[W_Q; W_K; W_V]‖ ‖W_O‖``: the constant of the map from queries, keys and
    values, times the norm of the three projections together.

    Holds for self-attention of one head without mask, all inputs.

    Source: [dasoulas2021], with as many keys as queries.
    """
    together = torch.cat([layer.query, layer.key, layer.value])
    return (
        CONSTANT
        * spectral_norm(together)
        * (1.0 if layer.output is None else spectral_norm(layer.output))
    )
