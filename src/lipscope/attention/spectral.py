"""Norms of weights, and bounds on a ball made of them, as functions of weights that are trained.

``α = ‖A‖ R²`` and ``β = (‖A‖ R + |b|) R``, head by head; proofs: ``docs/theory/global-bounds.md``.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention.layer import Layer, wide
from lipscope.errors import InputError, check_positive


def spectral_norm(matrix: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """``‖M‖``, with ``u v^T`` of its top singular vectors as derivative; in float32 at least.

    >>> spectral_norm(torch.tensor([[0.0, 3.0], [4.0, 0.0]])).item()
    4.0
    """
    matrix = wide(matrix)
    with torch.no_grad():
        v = top_right(matrix)
        u = _unit(matrix @ v)
    return (u * (matrix @ v)).sum((-2, -1))


def top_right(matrix: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b c 1"]:
    """The top right singular vector, from the products of the fewer rows or columns."""
    tiny = torch.finfo(matrix.dtype).tiny
    m = matrix / matrix.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    if m.shape[-2] >= m.shape[-1]:
        return torch.linalg.eigh(m.mT @ m).eigenvectors[..., -1:]
    return _unit(m.mT @ torch.linalg.eigh(m @ m.mT).eigenvectors[..., -1:])


def _unit(v: Tensor) -> Tensor:
    return v / v.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)


def product_norm(
    left: Float[Tensor, "*b k d"], right: Float[Tensor, "*b k c"]
) -> Float[Tensor, "*b"]:
    """``‖L^T R‖``, from a matrix with ``k`` rows where these are the fewer.

    >>> product_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])).item()
    10.0
    """
    with torch.no_grad():
        few = left.shape[-2] < left.shape[-1]
        v = top_right(torch.linalg.qr(left.mT, mode="r").R @ right if few else left.mT @ right)
        u = _unit(left.mT @ (right @ v))
    return ((left @ u) * (right @ v)).sum((-2, -1))


def of_heads(
    heads: Float[Tensor, " h"], output: Float[Tensor, "d_out hv"] | None
) -> Float[Tensor, ""]:
    """``‖W_O‖ √(Σ_h c_h²)``: a bound of the layer from one ``c_h`` of every head."""
    together = torch.linalg.vector_norm(heads)
    return together if output is None else spectral_norm(output) * together


BallBound = Literal["theorem-3.3", "G2", "mean-field"]


def on_ball(layer: Layer, by: BallBound, *, num_tokens: int, radius: float) -> Float[Tensor, " h"]:
    """A bound of sigma of every head, ``x ↦ P V x``, for tokens of norm at most ``radius``.

    Holds for softmax of inner products with any mask, and biases of queries, keys and values;
    ``mean-field`` without mask. No rotary embedding, bias of the scores or norms. ``theorem-3.3``
    is that of [castin2024] (with biases its Theorem E.3), for ``num_tokens`` at the most.
    """
    check_positive("radius", radius)
    scale = abs(layer.scale)
    query, key, value = (
        wide(w).unflatten(0, (heads, -1)).repeat_interleave(layer.num_heads // heads, 0)
        for w, heads in zip(
            (layer.query, layer.key, layer.value),
            (layer.num_heads, layer.num_groups, layer.num_groups),
            strict=True,
        )
    )
    alpha = scale * product_norm(key, query) * radius**2
    beta = alpha
    if layer.query_bias is not None:
        bias = wide(layer.query_bias).unflatten(0, (layer.num_heads, -1, 1))
        # vector_norm has a derivative at zero, where biases begin.
        beta = alpha + scale * radius * torch.linalg.vector_norm(key.mT @ bias, dim=(1, 2))
    if by == "theorem-3.3":
        n = num_tokens
        factor = (3 * (alpha.square() + 4 * n * beta.square() + n)).sqrt()
    elif by == "G2":
        seen, n = None, slice(0, num_tokens)
        if layer.causal or layer.window is not None or layer.mask is not None:
            seen = layer.visible(n, n, alpha.device)
        factor = _largest_rows(beta, num_tokens, seen) + alpha
    else:
        factor = beta.exp() * (1 + beta.square()).sqrt() + alpha
    bound = spectral_norm(value) * factor
    if not bool(torch.isfinite(bound).all()):
        raise InputError(
            f"The bound `{by}` at radius {radius:g} should be finite in {str(bound.dtype)[6:]}. "
            "Scale tokens or weights down, or take another bound."
        )
    return bound


def _largest_rows(
    beta: Float[Tensor, " h"], num_tokens: int, seen: Bool[Tensor, "*h n n"] | None
) -> Float[Tensor, " h"]:
    """``√(max_j Σ_{i sees j} max_{p≤p_i} p (1 + β² min(1, 4p(1-p))))``."""
    if seen is None:
        others = beta.new_tensor([num_tokens - 1.0])
    else:
        others = (seen.sum(-1) - 1).clamp_min(0).to(beta)
    p_max = 1 / (1 + others * (-2 * beta[:, None]).exp())
    rows = row_gain(p_max, beta.square()[:, None])
    if seen is None:
        return (num_tokens * rows[:, 0]).sqrt()
    return (rows[:, None] @ seen.to(rows).expand(len(rows), -1, -1))[:, 0].amax(-1).sqrt()


def row_gain(p_max: Float[Tensor, "*b n"], t: Float[Tensor, "*b _"]) -> Float[Tensor, "*b n"]:
    """``max_{p≤p_max} p (1 + t min(1, 4p(1-p)))``.

    Increasing up to 1/2, then a cubic with one maximum, beyond 1 for ``t ≤ 1/4``.
    """
    best = (1 + (1 + 0.75 / t.clamp_min(0.25)).sqrt()) / 3
    p = torch.minimum(p_max, best)
    return p * (1 + t * (4 * p * (1 - p)).masked_fill(p <= 0.5, 1.0))
