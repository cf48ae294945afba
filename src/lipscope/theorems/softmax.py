"""The Jacobian of the softmax, ``L(p) = diag(p) - p p^T``, and its norms."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_BISECTIONS = 60


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
    return first * (_others(p) + second)


def softmax_norm(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """``‖L(p)‖``, up to the rounding of 60 bisections and never below it by more.

    The root in ``[p_(2), p_(1)]`` of ``Σ_i p_i² / (p_i - λ) = 1``: the upper end of the last
    interval is returned.

    Holds for every probability vector.

    Source: the secular equation of a diagonal matrix minus one of rank one [golub1973].
    """
    if p.shape[-1] < 2:
        return torch.zeros_like(p[..., 0])
    top = p.topk(2, dim=-1).values
    high, low = top[..., 0].clone(), top[..., 1].clone()
    first = top[..., 0]
    for _ in range(_BISECTIONS):
        mid = (low + high) / 2
        # Only the largest entry is above λ; all other terms are negative.
        terms = p.square() / (p - mid[..., None])
        value = torch.where(terms.isfinite(), terms, 0.0).sum(-1)
        above = (value > 1) | (mid >= first)
        high, low = torch.where(above, mid, high), torch.where(above, low, mid)
    return torch.minimum(high, top_two(p)).clamp_min(0)


def balanced_mass(p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖L(p)‖`` from the maximum norm to the sum of magnitudes.

    ``θ(p) = max_S 4 p(S) (1 - p(S))``, bounded by 1 and, if the largest probability exceeds
    1/2, equal to ``4 p_(1) (1 - p_(1))``. The maximum itself is a subset-sum problem.

    Holds for every probability vector.

    Source: [emadi2026], whose balanced-mass factor this is.

    >>> balanced_mass(torch.tensor([0.75, 0.125, 0.125])).item()
    0.75
    """
    first = p.amax(-1)
    return torch.where(first > 0.5, 4 * first * _others(p), torch.ones_like(first))


def _others(p: Tensor) -> Tensor:
    """``1 - p_(1)`` as the sum of the others, which does not cancel."""
    return p.scatter(-1, p.argmax(-1, keepdim=True), 0.0).sum(-1)
