"""Qi et al., LipsFormer: a Lipschitz constant of scaled cosine attention [lipsformer2023]."""

from __future__ import annotations

from lipscope.attention import ScaledCosineAttention, of_heads, spectral_norm
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem


@theorem(cite="lipsformer2023", statement="Theorem 1", recalled=True)
def lipsformer_cosine(layer: ScaledCosineAttention, num_tokens: int) -> float:
    """Scaled cosine attention, for all inputs of N tokens.

    ``ν ε^(-1/2) (2N(N-1) τ ‖W_K‖ + 2(N-1) τ ‖W_Q‖ + 2N ‖W_V‖)`` for one head; heads combine to
    ``‖W_O‖ √(Σ_h …²)``. Negative ``ν`` and ``τ`` (after training) count by magnitude.

    Holds without a mask: at least `lipsformer_cosine_improved` for ``N ≥ 2``, and at least sigma
    for ``N = 1``.

    Source: [lipsformer2023].
    """
    if layer.causal or layer.mask is not None:
        raise NotApplicableError("it is masked")
    own, n = layer.in_double(), num_tokens
    tau, gain = own.temperature.abs(), own.gain.abs()
    query, key, value = (
        spectral_norm(w.unflatten(0, (own.num_heads, -1))) for w in (own.query, own.key, own.value)
    )
    heads = 2 * n * (n - 1) * tau * key + 2 * (n - 1) * tau * query + 2 * n * value
    return float(gain * own.eps**-0.5 * of_heads(heads, own.output))


@theorem(cite=DERIVED, statement="LipsFormer's constant, improved")
def lipsformer_cosine_improved(layer: ScaledCosineAttention, num_tokens: int) -> float:
    """Scaled cosine attention, with deviations instead of norms.

    ``ν ε^(-1/2) (√c ‖W_V‖ + τ ‖W_Q‖ + τ √c ‖W_K‖)``, ``c = min(N, e^(2τ))``, or ``N`` under a
    mask; heads combine to ``‖W_O‖ √(Σ_h …²)``. Negative ``ν`` and ``τ`` count by magnitude.

    Holds for any mask on all inputs of N tokens.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    return float(layer.in_double().constant(num_tokens))
