"""Yudin, Gaponov, Kudriashov and Rakhuba: local bounds by the softmax's spectrum [yudin2025]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.theorems.head import HeadAt
from lipscope.theorems.register import theorem
from lipscope.theorems.spectrum import norms_of_many, softmax_norm, top_two


@theorem(cite="yudin2025", statement="Theorem 3")
def yudin_thm_3(at: HeadAt) -> float:
    """Attention and the change of attention, the latter by the softmax's spectrum.

    ``‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i top_two(P_i))``, ``top_two(p) = p_(1) (1 - p_(1) + p_(2))``.

    Holds for any mask at ``x``; not for biases of queries or rotary embeddings.

    Source: Theorem 3 of [yudin2025], as quoted by an implementation of it.
    """
    head = at.head
    head.without_rotary()
    head.without_bias()
    size = float(norms_of_many(at.x)) ** 2 * head.norm_a
    return head.norm_v * (norm_of_rows(at.p) + 2 * size * float(top_two(at.p).max()))


@theorem(cite="yudin2025", statement="Theorem 3, centred")
def yudin_centred(at: HeadAt) -> float:
    """Theorem 3 without what the softmax does not see.

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
    """``‖P‖`` of a matrix without negative entries, never below it.

    For any ``v > 0``: ``‖P‖² ≤ max_j (P^T P v)_j / v_j`` (Collatz and Wielandt). With the
    vector of a power iteration that is ``‖P‖`` up to a thousandth, at the cost of products.
    """
    v = torch.ones_like(p[0])
    best = float("inf")
    for _ in range(64):
        image = p.T @ (p @ v)
        best = min(best, float((image / v).max()))
        # Entries that die out would make the ratio there a ratio of roundings.
        v = image / image.max() + 1e-4
    return math.sqrt(best)


def _largest_softmax_norm(p: Tensor) -> float:
    """``max_i ‖L(P_i)‖``: rows in the order of top_two, until no other can be larger."""
    ceiling, order = top_two(p).sort(descending=True)
    best, start = 0.0, 0
    while start < len(p) and float(ceiling[start]) > best:
        best = max(best, float(softmax_norm(p[order[start : start + 32]]).max()))
        start += 32
    return best
