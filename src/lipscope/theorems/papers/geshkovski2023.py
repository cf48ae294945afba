"""Geshkovski, Letrouit, Polyanskiy and Rigollet: clusters in self-attention [geshkovski2023]."""

from __future__ import annotations

import math

from lipscope.theorems.head import Head
from lipscope.theorems.register import theorem


@theorem(cite="geshkovski2023", statement="Theorem 3.5 of Castin et al. 2024", scope="mean-field")
def geshkovski_mean_field(head: Head, radius: float) -> float:
    """Wasserstein-2 Lipschitz constant on measures in a ball, for any number of tokens.

    ``‖V‖ (1 + 3 ‖A‖ R²) e^(2 ‖A‖ R²)``.

    Holds without a mask, query bias and rotary embedding. It bounds sigma at any input with tokens
    of norm at most R, since sequences are measures with equal atoms.

    Source: [geshkovski2023], in the form of Theorem 3.5 of [castin2024].
    """
    head.unmasked()
    head.without_positions()
    head.without_bias()
    alpha = head.norm_a * radius**2
    return head.norm_v * (1 + 3 * alpha) * math.exp(2 * alpha)
