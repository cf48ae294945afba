"""Bounds of variants other than dot products and L2 that are derived here.

Proofs: ``docs/theory/global-bounds.md``. One head is ``f(X)_i = Σ_j P_ij V x_j`` with scores
``<A x_i, x_j>``, ``α = ‖A‖ R²``; heads add up as ``‖W_O‖ √(Σ_h …²)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention import (
    Attention,
    ClippedAttention,
    DividedAttention,
    SigmoidAttention,
    SinkhornAttention,
    of_heads,
    on_ball,
    product_norm,
    spectral_norm,
)
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem


@theorem(cite=DERIVED, statement="G2 on clipped tokens")
def clipped_everywhere(layer: ClippedAttention, num_tokens: int) -> float:
    """Attention on tokens brought into a ball, for all inputs.

    G2 (`global_rows_capped`) at the layer's own radius: what brings tokens into the ball has
    slopes of at most 1.

    Holds for any mask and biases, on all inputs of n tokens.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    _mask_of(layer, num_tokens)
    return float(layer.in_double().constant(num_tokens))


@theorem(cite=DERIVED, statement="G2 over the divisor")
def divided_ball(layer: DividedAttention, num_tokens: int, radius: float) -> float:
    """Attention divided by its own bound: G2 over the divisor, head by head.

    At most 1 for every head on the ball that the layer was made for, ``√H ‖W_O‖`` in all: G2 is
    the least of the three divisors.

    Holds for any mask and biases, on at most as many tokens as the layer takes.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    if num_tokens > layer.num_tokens:
        raise NotApplicableError(f"it takes at most {layer.num_tokens} tokens")
    _mask_of(layer, num_tokens)
    own = layer.in_double()
    bounds = own.bounds()
    heads = on_ball(own, "G2", num_tokens=num_tokens, radius=radius)
    return float(of_heads(heads / torch.where(bounds > 0, bounds, 1.0), own.output))


@theorem(cite=DERIVED, statement="Doubly stochastic weights")
def sinkhorn_ball(layer: SinkhornAttention, radius: float) -> float:
    """Sinkhorn attention on tokens of norm at most R, however many.

    ``‖V‖ (1 + 2 α)`` for every head: no root and no exponential.

    Holds for every mask that the layer takes, on tokens of norm at most R.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    own = layer.in_double()
    query, key, value = _by_head(own)
    alpha = abs(own.scale) * product_norm(key, query) * radius**2
    return float(of_heads(spectral_norm(value) * (1 + 2 * alpha), own.output))


@theorem(cite=DERIVED, statement="Sigmoid weights in a ball")
def sigmoid_ball(layer: SigmoidAttention, num_tokens: int, radius: float) -> float:
    """Sigmoid attention on tokens of norm at most R.

    ``n (‖V‖ σ(s + b) + (‖V‖ R + |b_V|) (2 ‖A‖ R + |K^T b_Q| + |Q^T b_K|) σ'_max)``,
    ``σ'_max = max_{|t|≤s} σ'(t + b)``, where
    ``s = ‖A‖ R² + (|K^T b_Q| + |Q^T b_K|) R + |<b_Q, b_K>|`` bounds the scores. Without biases and
    with ``b = -log n`` it is at most ``‖V‖ e^α (1 + 2 α)`` for every n, without a mask.

    Holds for any mask on n tokens of norm at most R.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    _mask_of(layer, num_tokens)
    own, n = layer.in_double(), num_tokens
    scale = abs(own.scale)
    query, key, value = _by_head(own)
    query_bias, key_bias, value_bias = (
        w.new_zeros(w.shape[:2]) if bias is None else bias.unflatten(0, (own.num_heads, -1))
        for w, bias in ((query, own.query_bias), (key, own.key_bias), (value, own.value_bias))
    )
    norm_v, a = spectral_norm(value), scale * product_norm(key, query)
    of_query = scale * (key.mT @ query_bias[..., None]).norm(dim=(1, 2))
    of_key = scale * (query.mT @ key_bias[..., None]).norm(dim=(1, 2))
    fixed = scale * (query_bias * key_bias).sum(-1).abs()
    scores = a * radius**2 + (of_query + of_key) * radius + fixed
    b = torch.as_tensor(own.shift(n), dtype=scores.dtype, device=scores.device).flatten()
    top = torch.sigmoid(scores + b)
    nearest = (b.abs() - scores).clamp_min(0).sigmoid()  # to the steepest point, 0
    steep = nearest * (1 - nearest)
    moved = (norm_v * radius + value_bias.norm(dim=-1)) * (2 * a * radius + of_query + of_key)
    return float(of_heads(n * (norm_v * top + moved * steep), own.output))


def _by_head(layer: Attention) -> list[Tensor]:
    weights = (layer.query, layer.key, layer.value)
    return [w.unflatten(0, (layer.num_heads, -1)) for w in weights]


def _mask_of(layer: Attention, num_tokens: int) -> None:
    if layer.mask is not None and layer.mask.shape[-1] != num_tokens:
        raise NotApplicableError(
            f"its mask was made for {layer.mask.shape[-1]} tokens, not for {num_tokens}"
        )
