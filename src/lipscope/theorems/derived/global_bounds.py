"""Global Lipschitz bounds on tokens of bounded norm, derived here.

Proofs: ``docs/theory/global-bounds.md``. Key fact: the deviations ``y_ij`` of a row average to
zero under its attention, so row ``i`` of the Jacobian without its diagonal term satisfies
``|row_i e|² ≤ w_i Σ_j P_ij |e_j|²`` with ``w_i = λ_max(V (I + |a_i|² C_i) V^T)``.

Throughout ``α = ‖A‖ R²`` and ``β = (‖A‖ R + |b|) R``.
"""

from __future__ import annotations

import math

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
    row_gain,
    spectral_norm,
)
from lipscope.linalg import norm_in_double
from lipscope.theorems.derived.layer_constants import LayerHeads, Tokens, sigmoid_moves
from lipscope.theorems.directions import pair_directions, star_direction
from lipscope.theorems.head import Head
from lipscope.theorems.papers.castin2024 import two_cluster_value
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem

_CELLS = 4096


@theorem(cite=DERIVED, statement="G1")
def global_rows(head: Head, num_tokens: int, radius: float) -> float:
    """Theorem 3.3 by rows; never larger.

    ``‖V‖ (√(n κ(β²)) + α)``, ``κ(t) = max_{p≤1} p (1 + t min(1, 4p(1-p)))``.

    Holds for any mask and bias on tokens of norm at most R; not for rotary embeddings.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    alpha, beta = _alpha_beta(head, radius)
    return head.norm_v * (math.sqrt(num_tokens * kappa(beta**2)) + alpha)


@theorem(cite=DERIVED, statement="G2")
def global_rows_capped(head: Head, num_tokens: int, radius: float) -> float:
    """`global_rows` with the largest attention possible on a ball: the best global bound here.

    ``‖V‖ (√(max_j Σ_{i sees j} max_{p≤p_i} p (1 + β² min(1, 4p(1-p)))) + α)``,
    ``p_i = 1 / (1 + (N_i - 1) e^(-2β - r_i))``, ``N_i`` the number of keys visible to row ``i``,
    ``r_i`` the range of its logit bias (0 without one).

    Holds for any mask and bias on tokens of norm at most R; not for rotary embeddings. With
    ``N_i = n`` for every row it would fail under a causal mask.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    alpha, beta = _alpha_beta(head, radius)
    p_max = _largest_attention(head, num_tokens, beta)
    rows = row_gain(p_max, p_max.new_tensor([beta**2]))
    return head.norm_v * (math.sqrt(_largest_column(head, rows)) + alpha)


@theorem(cite=DERIVED, statement="mean-field constant, half the exponent")
def mean_field(head: Head, radius: float) -> float:
    """The mean-field constant with half the exponent.

    ``‖V‖ (e^β √(1 + β²) + α)``: a bound of the Wasserstein-2 Lipschitz constant.

    Holds without a mask or rotary embedding, for any bias and any number of tokens of norm at
    most R. Its exponent equals that of `castin_prop_3_6` if ``-‖A‖`` is an eigenvalue of A.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    head.unmasked()
    head.without_positions()
    alpha, beta = _alpha_beta(head, radius)
    return head.norm_v * (math.exp(beta) * math.sqrt(1 + beta**2) + alpha)


@theorem(cite=DERIVED, statement="Theorem 4.4, corrected (Hardy)", scope="mean-field")
def causal_mean_field(head: Head, radius: float) -> float:
    """A mean-field constant that holds for causal attention.

    ``‖V‖ (α + 2 (1 + 2β) e^(2β))``; the factor 2 is Hardy's constant for running means.

    Holds for the causal mask, any bias and any number of tokens of norm at most R.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    alpha, beta = _causal_alpha_beta(head, radius)
    return head.norm_v * (alpha + 2 * (1 + 2 * beta) * math.exp(2 * beta))


@theorem(cite=DERIVED, statement="Theorem 4.4, corrected (dyadic blocks)", scope="mean-field")
def causal_mean_field_dyadic(head: Head, radius: float) -> float:
    """The causal mean-field constant with half the exponent.

    ``‖V‖ (α + Σ_{m≥0} min(s, c 2^(-m/2)))``, ``s = e^β √(1 + β²)``, ``c = (1 + 2β) e^(2β)``;
    at most ``‖V‖ (α + s (2 log2(c/s) + 1 + 1/(1 - 2^(-1/2))))``.

    Holds for the causal mask, any bias and any number of tokens of norm at most R; better
    than `causal_mean_field` for ``β`` above about 0.9.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    alpha, beta = _causal_alpha_beta(head, radius)
    same = math.exp(beta) * math.sqrt(1 + beta**2)
    far = (1 + 2 * beta) * math.exp(2 * beta)
    blocks = math.floor(2 * math.log2(far / same)) + 1  # lags for which `same` is smaller
    tail = far * 2 ** (-blocks / 2) / (1 - 2**-0.5)
    return head.norm_v * (alpha + same * blocks + tail)


@theorem(cite=DERIVED, statement="Largest token norm", metric="max-token", scope="global")
def global_max_token(head: Head, radius: float) -> float:
    """Largest move of an output token if every input token moves by at most 1.

    ``‖V‖ (√(1 + β²) + α)``: independent of the number of tokens, without exponentials.

    Holds for any mask, bias and number of tokens of norm at most R; no rotary embedding.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    alpha, beta = _alpha_beta(head, radius)
    return head.norm_v * (math.sqrt(1 + beta**2) + alpha)


@theorem(cite=DERIVED, statement="Rotary embeddings")
def global_rotary(head: Head, num_tokens: int, radius: float) -> float:
    """`global_rows_capped` for attention with rotary embeddings.

    ``‖V‖ (√(max_j Σ_{i sees j} max_{p≤p_i} p (1 + a R min(1, 2√(p(1-p))))²) + t R)`` with
    ``a = ρ² ‖K‖ (‖Q‖ R + |b_Q|)``, ``t = ρ² ‖Q‖ (‖K‖ R + |b_K|)``,
    ``p_i = 1 / (1 + (N_i - 1) e^(-2g - r_i))``, ``g = ρ² (‖Q‖ R + |b_Q|) (‖K‖ R + |b_K|)`` and
    ``ρ`` the largest norm of a rotation: 1 unless the embedding scales.

    Holds for any mask and bias on tokens of norm at most R.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    if head.layer.rotary is None:
        raise NotApplicableError("it has no rotary embedding; `global_rows_capped` is sharper")
    rho = head.rotation_norm
    norm_q, norm_k = norm_in_double(head.query), norm_in_double(head.key)
    q = rho * (norm_q * radius + float(head.query_bias.norm()))
    k = rho * (norm_k * radius + float(head.key_bias.norm()))
    p = _largest_attention(head, num_tokens, q * k)
    rows = _rotary_gain(p, rho * norm_k * q * radius)
    return head.norm_v * (math.sqrt(_largest_column(head, rows)) + rho * norm_q * k * radius)


@theorem(cite=DERIVED, statement="Two clusters, γ*", kind="lower")
def two_cluster_star(head: Head, num_tokens: int, radius: float) -> float:
    """Proposition 3.4 without the assumption that ``A`` has a real eigenvalue.

    ``√(n-1) p (1 + 2 γ* R² (1-p))`` for ``V = I``, ``γ* = max_{|v|≤1} (|A v| - <v, A v>) / 2``,
    ``p = 1 / (1 + (n-1) e^(-2 γ* R²))``; the norm of the first column of blocks for any ``V``.

    Holds without a mask and for causal masks. ``γ*`` is at least the ``γ`` of Proposition 3.4.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    head.plain()
    direction = star_direction(head)
    if direction is None:
        raise NotApplicableError("A is zero")
    return two_cluster_value(head, direction, num_tokens, radius)


@theorem(cite=DERIVED, statement="An opposed pair", kind="lower")
def opposed_pair_gain(head: Head, num_tokens: int, radius: float) -> float:
    """The gain of moving two tokens that attract all attention against each other.

    ``√2 |V z| |a| √(Σ_{i>=3} p_i²)`` for tokens ``f ± z`` and ``r``, ``a = A r + b ⟂ z``,
    ``p_i = 1 / (2 + (N_i - 2) e^(-<a, f - r>))``. Without a bias at most ``√(n/2) R² ‖A‖ ‖V‖``,
    nearly attained for large ``R² ‖A‖`` if ``V`` attains its norm orthogonally to ``a``.

    Holds for at least three tokens, without a mask and for causal masks, with query biases, up to
    rounding.

    Source: derived here (``docs/theory/inputs.md``).
    """
    head.causal_or_unmasked()
    head.without_positions()
    found = pair_directions(head, num_tokens, radius)
    if found is None:
        raise NotApplicableError("no two tokens attract the attention of the others")
    return found.gain


def kappa(t: float) -> float:
    """``max_{0≤p≤1} p (1 + t min(1, 4p(1-p)))``, at most ``1 + t``.

    >>> kappa(0.25), round(kappa(1.0), 3)
    (1.0, 1.316)
    """
    one = torch.ones(1, dtype=torch.float64)
    return float(row_gain(one, t * one)[0])


def _rotary_gain(p_max: Tensor, c: float) -> Tensor:
    """An upper bound of ``max_{p≤p_max} p (1 + c min(1, 2√(p(1-p))))²``.

    Beyond 1/2 the first factor grows and the second falls: on each cell of a fine grid, their
    maxima are at opposite ends.
    """
    ends = torch.linspace(0.5, 1.0, _CELLS + 1, dtype=torch.float64)
    left, right = ends[:-1], ends[1:]
    cells = right * (1 + 2 * c * (left * (1 - left)).sqrt()) ** 2
    running = torch.cat([cells.new_tensor([0.5 * (1 + c) ** 2]), cells.cummax(0).values])
    cell = torch.ceil((p_max - 0.5).clamp_min(0) * 2 * _CELLS).long()
    return torch.where(p_max <= 0.5, p_max * (1 + c) ** 2, running[cell].clamp_min(running[0]))


def _largest_attention(head: Head, num_tokens: int, gap: float) -> Tensor:
    """``1 / (1 + (N_i - 1) e^(-2 gap - r_i))``, an upper bound of the weights of row ``i``."""
    seen = head.visible(num_tokens).to(torch.float64)
    apart = -2 * gap - head.bias_range(num_tokens)
    return 1 / (1 + (seen - 1).clamp_min(0) * apart.exp())


def _largest_column(head: Head, rows: Tensor) -> float:
    """``max_j Σ_{i sees j} rows_i``; all rows see token 1 without a mask and with a causal one."""
    if head.layer.mask is None and head.layer.window is None:
        return float(rows.sum())
    allowed = head.allowed(len(rows)).to(rows.dtype)
    return float((rows @ allowed).max())


def _alpha_beta(head: Head, radius: float) -> tuple[float, float]:
    head.without_rotary()
    alpha = head.norm_a * radius**2
    return alpha, alpha + head.norm_b * radius


def _causal_alpha_beta(head: Head, radius: float) -> tuple[float, float]:
    head.only_causal()
    head.without_positions()
    return _alpha_beta(head, radius)


# --- other variants than dot products and L2; a single head has scores ``<A x_i, x_j>``


@theorem(cite=DERIVED, statement="G2 on clipped tokens")
def clipped_everywhere(layer: ClippedAttention, num_tokens: int) -> float:
    """Attention on tokens projected into a ball, for all inputs.

    G2 (`global_rows_capped`) at the layer's radius: the projection into the ball is
    1-Lipschitz.

    Holds for any mask and biases, on all inputs of n tokens.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    _check_mask(layer, num_tokens)
    return float(layer.in_double().constant(num_tokens))


@theorem(cite=DERIVED, statement="G2 over the divisor")
def divided_ball(layer: DividedAttention, num_tokens: int, radius: float) -> float:
    """Attention divided by its own bound: G2 over the divisor, for each head.

    At most 1 for every head on the layer's ball, ``√H ‖W_O‖`` in total: G2 is the smallest of
    the three divisors.

    Holds for any mask and biases, for at most the layer's number of tokens.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    if num_tokens > layer.num_tokens:
        raise NotApplicableError(f"it takes at most {layer.num_tokens} tokens")
    _check_mask(layer, num_tokens)
    own = layer.in_double()
    bounds = own.bounds()
    heads = on_ball(own, "G2", num_tokens=num_tokens, radius=radius)
    return float(of_heads(heads / torch.where(bounds > 0, bounds, 1.0), own.output))


@theorem(cite=DERIVED, statement="Doubly stochastic weights")
def sinkhorn_ball(layer: SinkhornAttention, radius: float) -> float:
    """Sinkhorn attention on any number of tokens of norm at most R.

    ``‖V‖ (1 + 2 α)`` for every head: without a square root of n or an exponential.

    Holds for every mask that the layer accepts, on tokens of norm at most R.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    at = _heads_in_ball(layer, None, radius)
    alpha = at.norm_a * radius**2
    return float(of_heads(spectral_norm(at.v) * (1 + 2 * alpha), at.layer.output))


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
    _check_mask(layer, num_tokens)
    at = _heads_in_ball(layer, num_tokens, radius)
    moves, _, _ = sigmoid_moves(at)
    return float(of_heads(moves, at.layer.output))


def _heads_in_ball(layer: Attention, num_tokens: int | None, radius: float) -> LayerHeads:
    tokens = Tokens(torch.tensor(radius, dtype=torch.float64))
    return LayerHeads(layer.in_double(), tokens, num_tokens)


def _check_mask(layer: Attention, num_tokens: int) -> None:
    if layer.mask is not None and layer.mask.shape[-1] != num_tokens:
        raise NotApplicableError(
            f"its mask was made for {layer.mask.shape[-1]} tokens, not for {num_tokens}"
        )
