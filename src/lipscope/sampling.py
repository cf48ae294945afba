"""What a few samples say about a mean or a share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import special

CONFIDENCE = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % Student interval, ``mean ± t s / √k``.

    Holds for independent values whose mean is nearly normal.

    Args:
        values: At least one.

    Returns:
        Mean, lower and upper end; the ends are NaN for a single value.

    >>> [round(v, 3) for v in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    k = len(values)
    mean = math.fsum(values) / k
    if k < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (k - 1))
    half = float(special.stdtrit(k - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(k)
    return mean, mean - half, mean + half


def share_interval(hits: int, total: int) -> tuple[float, float]:
    """The 95 % Clopper–Pearson interval of a share.

    Holds for independent trials, at any number of hits.

    Args:
        hits: How often it happened.
        total: Out of how many.

    Returns:
        Lower and upper end.

    >>> share_interval(0, 10)[0], round(share_interval(0, 10)[1], 3)
    (0.0, 0.308)
    """
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits == 0 else float(special.betaincinv(hits, total - hits + 1, tail))
    high = 1.0 if hits == total else float(special.betaincinv(hits + 1, total - hits, 1 - tail))
    return low, high
