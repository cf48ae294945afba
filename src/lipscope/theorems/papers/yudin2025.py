"""Yudin, Gaponov, Kudriashov and Rakhuba: local bounds from the softmax spectrum [yudin2025]."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg import norms_of_many
from lipscope.theorems.head import HeadAt
from lipscope.theorems.register import theorem

_BISECTIONS = 60


@theorem(cite="yudin2025", statement="Theorem 3")
def yudin_thm_3(at: HeadAt) -> float:
    """Local bound from the norm of attention and the spectrum of the softmax.

    ``‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i top_two(P_i))``, ``top_two(p) = p_(1) (1 - p_(1) + p_(2))``.

    Holds for any mask at ``x``; not for biases of queries or rotary embeddings.

    Source: Theorem 3 of [yudin2025], as quoted in an implementation.
    """
    head = at.head
    head.without_rotary()
    head.without_bias()
    size = float(norms_of_many(at.x)) ** 2 * head.norm_a
    return head.norm_v * (norm_of_rows(at.p) + 2 * size * float(top_two(at.p).max()))


@theorem(cite="yudin2025", statement="Theorem 3, centred")
def yudin_centred(at: HeadAt) -> float:
    """Theorem 3 without shifts that leave the softmax unchanged.

    ``‖V‖ ‖P‖ + max_i ‖L(P_i)‖ · ‖X_c V^T‖ (‖X_c A‖ + ‖X A^T + 1 b^T‖)``, ``X_c`` the tokens
    minus their mean.

    Holds for any mask and bias at ``x``; not for rotary embeddings.

    Source: derived here from the proof of Theorem 3 of [yudin2025]
    (``docs/theory/global-bounds.md``).
    """
    head = at.head
    head.without_rotary()
    centred = at.x - at.x.mean(0)
    small_k = torch.linalg.qr(head.key.T, mode="r").R
    keys = norms_of_many((centred @ head.key.T) @ at.factor_q.T)  # ‖X_c A‖
    queries = norms_of_many(at.q @ small_k.T)  # ‖X A^T + 1 b^T‖
    change = _largest_softmax_norm(at.p) * norms_of_many(centred @ head.value.T)
    return head.norm_v * norm_of_rows(at.p) + float(change * (keys + queries))


def norm_of_rows(p: Tensor) -> float:
    """An upper bound of ``‖P‖`` for a matrix without negative entries.

    For any ``v > 0``: ``‖P‖² ≤ max_j (P^T P v)_j / v_j`` (Collatz and Wielandt). A vector from
    power iteration gives ``‖P‖`` within a thousandth, from matrix products only.
    """
    v = torch.ones_like(p[0])
    best = float("inf")
    for _ in range(64):
        image = p.T @ (p @ v)
        best = min(best, float((image / v).max()))
        # Vanishing entries would give ratios of rounding errors.
        v = image / image.max() + 1e-4
    return math.sqrt(best)


def _largest_softmax_norm(p: Tensor) -> float:
    """``max_i ‖L(P_i)‖``: rows by decreasing top_two, until no other row can be larger."""
    ceiling, order = top_two(p).sort(descending=True)
    best, start = 0.0, 0
    while start < len(p) and float(ceiling[start]) > best:
        best = max(best, float(softmax_norm(p[order[start : start + 32]]).max()))
        start += 32
    return best


def top_two(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖L(p)‖`` from the two largest probabilities.

    ``λ_max(L(p)) ≤ p_(1) (1 - p_(1) + p_(2)) ≤ 1/2``, with equality for uniform ``p`` and for
    two equal halves.

    Holds for every probability vector.

    Source: the function ``g_1`` of [yudin2025]; proof: ``docs/theory/global-bounds.md``.

    >>> top_two(torch.tensor([0.5, 0.5, 0.0])).item()
    0.5
    """
    top = p.topk(min(2, p.shape[-1]), dim=-1).values
    first = top[..., 0]
    second = top[..., 1] if top.shape[-1] > 1 else torch.zeros_like(first)
    return first * (rest_of_top(p) + second)


def softmax_norm(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """``‖L(p)‖`` by 60 bisections, never below it by more than rounding.

    The root in ``[p_(2), p_(1)]`` of ``Σ_i p_i² / (p_i - λ) = 1``; returns the upper end of the
    last interval.

    Holds for every probability vector.

    Source: the secular equation of a diagonal matrix minus a rank-one matrix [golub1973].
    """
    if p.shape[-1] < 2:
        return torch.zeros_like(p[..., 0])
    top = p.topk(2, dim=-1).values
    high, low = top[..., 0].clone(), top[..., 1].clone()
    first = top[..., 0]
    for _ in range(_BISECTIONS):
        mid = (low + high) / 2
        # Only the largest entry exceeds λ; all other terms are negative.
        terms = p.square() / (p - mid[..., None])
        value = torch.where(terms.isfinite(), terms, 0.0).sum(-1)
        above = (value > 1) | (mid >= first)
        high, low = torch.where(above, mid, high), torch.where(above, low, mid)
    return torch.minimum(high, top_two(p)).clamp_min(0)


def rest_of_top(p: Tensor) -> Tensor:
    """``1 - p_(1)`` as the sum of the others, without cancellation."""
    return p.scatter(-1, p.argmax(-1, keepdim=True), 0.0).sum(-1)
