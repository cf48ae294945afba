"""Qi et al., LipsFormer: a Lipschitz constant of scaled cosine attention [lipsformer2023]."""

from __future__ import annotations

import math

from lipscope.attention import ScaledCosineAttention
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem
from lipscope.theorems.spectrum import norm_in_double


@theorem(cite="lipsformer2023", statement="Theorem 1", recalled=True)
def lipsformer_cosine(layer: ScaledCosineAttention, num_tokens: int) -> float:
    """Scaled cosine attention, for all inputs of N tokens.

    ``ν ε^(-1/2) (2N(N-1) τ ‖W_K‖ + 2(N-1) τ ‖W_Q‖ + 2N ‖W_V‖)`` for one head; heads add up
    as ``‖W_O‖ √(Σ_h …²)``. Of ``ν`` and ``τ`` that training turned negative, their sizes.

    Holds without mask: it is never below `lipsformer_cosine_improved` for ``N ≥ 2``, nor below
    sigma for ``N = 1``.

    Source: [lipsformer2023].
    """
    if layer.causal or layer.mask is not None:
        raise NotApplicableError("it is masked")
    n, tau = num_tokens, abs(float(layer.temperature.detach()))

    parts = (layer.query, layer.key, layer.value)
    norms = [[norm_in_double(w) for w in weight.chunk(layer.num_heads)] for weight in parts]
    heads = math.hypot(
        *[
            2 * n * (n - 1) * tau * key + 2 * (n - 1) * tau * query + 2 * n * value
            for query, key, value in zip(*norms, strict=True)
        ]
    )
    output = 1.0 if layer.output is None else norm_in_double(layer.output)
    return abs(float(layer.gain.detach())) * layer.eps**-0.5 * heads * output


@theorem(cite=DERIVED, statement="LipsFormer's constant, improved")
def lipsformer_cosine_improved(layer: ScaledCosineAttention, num_tokens: int) -> float:
    """Scaled cosine attention with deviations in place of sizes.

    ``ν ε^(-1/2) (√c ‖W_V‖ + τ ‖W_Q‖ + τ √c ‖W_K‖)``, ``c = min(N, e^(2τ))``, or ``N`` under a
    mask; heads add up as ``‖W_O‖ √(Σ_h …²)``. Of ``ν`` and ``τ`` below zero, their sizes.

    Holds for any mask on all inputs of N tokens.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    return float(layer.in_double().constant(num_tokens))
