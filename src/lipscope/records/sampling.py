"""What a few samples say about a mean or a share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

CONFIDENCE = 0.95
RESAMPLES = 10_000


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


@functools.lru_cache(maxsize=2)  # the curves of a report have the same sizes, and are thousands
def resampled(seed: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """The part that each value has in the means of resamples: a bootstrap as matrices.

    Args:
        seed: Of the draws.
        sizes: Numbers of values, drawn from independently.

    Returns:
        For each size a matrix of shape ``(RESAMPLES, size)``, whose rows sum to 1; not to be
        written to.
    """
    random = np.random.default_rng(seed)
    found = []
    for size in sizes:
        drawn = random.integers(size, size=(RESAMPLES, size)) + size * np.arange(RESAMPLES)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=RESAMPLES * size)
        found.append(counts.reshape(RESAMPLES, size) / size)
    return found
