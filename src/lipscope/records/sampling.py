"""Small-sample statistics: means, proportions, differences, correlation and lack of fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
RESAMPLES = 10_000


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % Student interval, ``mean ± t s / √k``.

    Holds for independent values whose mean is nearly normal; the ends are NaN for a single value.

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


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the finite, positive values; None if there are none."""
    logs = [math.log(v) for v in values if v is not None and math.isfinite(v) and v > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def enclosed_mean(
    ends: Sequence[tuple[float, float]], *, independent: bool = True
) -> tuple[float, float, float]:
    """The mean of interval-valued samples, with an enclosing interval.

    From the lower end of the 95 % Student interval of the lower ends to the upper end of that of
    the upper ends; a single value keeps its own ends, and dependent ones the means of theirs. Holds
    under the conditions of `mean_interval` for both ends.

    >>> [round(v, 3) for v in enclosed_mean([(1.0, 1.5), (2.0, 2.5), (3.0, 3.5)])]
    [2.0, -0.484, 4.984]
    """
    mean, low, _ = mean_interval([one for one, _ in ends])
    top, _, high = mean_interval([other for _, other in ends])
    return (mean, low, high) if independent and len(ends) > 1 else (mean, mean, top)


class Shift(NamedTuple):
    """Difference of the means of two samples."""

    mean: float  # difference of the means
    low: float  # lower end of its 95 % interval
    high: float  # upper end
    p: float  # two-sided p-value of no difference


Ends = Sequence[tuple[float, float]]


def paired_shift(before: Ends, after: Ends) -> Shift:
    """The mean difference of interval-valued pairs.

    Every difference lies in ``[after.low - before.high, after.high - before.low]``. The interval
    reaches from the lower Student limit of the lower ends to the upper one of the upper ends, and
    p is twice the smaller one-sided p-value: narrow values give Student's paired test. Holds for
    independent pairs with nearly normal ends.

    >>> [round(v, 3) for v in paired_shift([(0.0, 0.0)] * 3, [(v, v) for v in (1.0, 2.0, 3.0)])]
    [2.0, -0.484, 4.484, 0.074]
    """
    pairs = list(zip(before, after, strict=True))
    mean, low, high = ([y[i] - x[j] for x, y in pairs] for i, j in ((0, 0), (0, 1), (1, 0)))
    return _shift_of(math.fsum(mean) / len(mean), _of_pairs(low), _of_pairs(high))


def welch_shift(before: Ends, after: Ends) -> Shift:
    """The difference of the means of two independent samples, with Welch's interval.

    ``mean ± t √(s_a²/k_a + s_b²/k_b)`` with Welch's degrees of freedom; variances may differ.
    Holds for independent, nearly normal values.
    """
    (a, top), (b, high) = (tuple(zip(*some, strict=True)) for some in (before, after))
    mean = math.fsum(b) / len(b) - math.fsum(a) / len(a)
    return _shift_of(mean, _of_two(top, b), _of_two(a, high))


class _Estimate(NamedTuple):
    """A mean, its standard error and their degrees of freedom."""

    mean: float
    error: float
    free: float

    def beyond(self) -> float:
        """One-sided p-value of a zero mean."""
        return float(special.stdtr(self.free, -self.mean / self.error))

    def limit(self) -> float:
        """Half-width of the interval."""
        return float(special.stdtrit(self.free, (1 + CONFIDENCE) / 2)) * self.error


def _shift_of(mean: float, low: _Estimate, high: _Estimate) -> Shift:
    p = min(low.beyond(), high._replace(mean=-high.mean).beyond())
    return Shift(mean, low.mean - low.limit(), high.mean + high.limit(), min(1.0, 2 * p))


def _of_pairs(values: Sequence[float]) -> _Estimate:
    return _Estimate(fmean(values), math.sqrt(_variance(values) / len(values)), len(values) - 1)


def _of_two(a: Sequence[float], b: Sequence[float]) -> _Estimate:
    one, other = _variance(a) / len(a), _variance(b) / len(b)
    free = (one + other) ** 2 / (one**2 / (len(a) - 1) + other**2 / (len(b) - 1))
    return _Estimate(fmean(b) - fmean(a), math.sqrt(one + other), free)


def _variance(values: Sequence[float]) -> float:
    """Sample variance, at least that of rounding errors: equal values still have a test."""
    rounding = (1e-13 * max(1.0, *map(abs, values))) ** 2
    return max(variance(values), rounding)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values for multiple tests.

    ``max_{j <= i} min(1, (m - j) p_(j))``, with j from 0 in increasing order of p. Rejecting at
    ``alpha`` controls the family-wise error rate under any dependence of the tests.

    Source: Holm (1979), Scandinavian Journal of Statistics 6.

    >>> [round(v, 3) for v in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p)), key=p.__getitem__)
    found, most = [0.0] * len(p), 0.0
    for j, k in enumerate(order):
        most = max(most, min(1.0, (len(p) - j) * p[k]))
        found[k] = most
    return found


def share_interval(hits: int, total: int) -> tuple[float, float]:
    """The 95 % Clopper–Pearson interval of a proportion.

    Holds for independent trials and any number of hits.

    >>> share_interval(0, 10)[0], round(share_interval(0, 10)[1], 3)
    (0.0, 0.308)
    """
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits == 0 else float(special.betaincinv(hits, total - hits + 1, tail))
    high = 1.0 if hits == total else float(special.betaincinv(hits + 1, total - hits, 1 - tail))
    return low, high


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's rank correlation and its 95 % interval.

    ``tanh(artanh ρ ± z √((1 + ρ²/2) / (k - 3)))``, Bonett and Wright's standard error on Fisher's
    scale. Holds for at least ten independent pairs and ``|ρ|`` below about 0.95. NaN if ``x`` or
    ``y`` is constant; the ends are NaN for fewer than ten pairs.

    Source: Bonett and Wright (2000), Psychometrika 65.

    >>> x = [float(k) for k in range(12)]
    >>> [round(v, 2) for v in rank_correlation(x, [x[1], x[0], *x[2:]])]
    [0.99, 0.97, 1.0]
    """
    from scipy import stats  # lazily: takes half a second

    k = len(x)
    if k < 2 or len({*x}) < 2 or len({*y}) < 2:
        return math.nan, math.nan, math.nan
    found: Any = stats.spearmanr(x, y)
    rho = float(found.statistic)
    if k < 10:
        return rho, math.nan, math.nan
    at = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, rho)))
    half = float(special.ndtri((1 + CONFIDENCE) / 2)) * math.sqrt((1 + rho**2 / 2) / (k - 3))
    return rho, math.tanh(at - half), math.tanh(at + half)


@functools.lru_cache(maxsize=2)  # a report has thousands of curves of the same size
def resampled(seed: int, size: int) -> np.ndarray:
    """Bootstrap matrix: the weight of each value in the mean of each resample."""
    drawn = np.random.default_rng(seed).integers(size, size=(RESAMPLES, size))
    counts = np.bincount(
        (drawn + size * np.arange(RESAMPLES)[:, None]).ravel(), minlength=RESAMPLES * size
    )
    return counts.reshape(RESAMPLES, size) / size


def paired_lack_of_fit(columns: Sequence[np.ndarray], lengths: Sequence[int]) -> float | None:
    """p-value of the lack of fit of a line when every sample is observed at every length.

    Each sample has its own line. The *common* deviation of the samples from their lines at
    each length is compared with its spread between samples:
    ``F = (SS_common / (L - 2)) / (SS_differ / ((S - 1)(L - 2)))``. Holds for samples
    of any level and slope with independent residuals of equal variance.

    >>> line = np.log([16, 64, 256])
    >>> paired_lack_of_fit([np.array([1 + v, 2 + v]) for v in line], [16, 64, 256])
    1.0
    """
    table = np.column_stack(columns)
    samples, count = table.shape
    if samples < 2 or count < 3:
        return None
    x = np.log(lengths)
    x -= x.mean()
    deviation = table - table.mean(axis=1, keepdims=True) - np.outer(table @ x / (x @ x), x)
    common = deviation.mean(axis=0)
    lof = samples * float(common @ common)
    differ = float(((deviation - common) ** 2).sum())
    return _f_test(lof, count - 2, differ, (samples - 1) * (count - 2), table)


def unpaired_lack_of_fit(columns: Sequence[np.ndarray], lengths: Sequence[int]) -> float | None:
    """p-value of the lack of fit of a line against pure error, for separate samples per length.

    ``F = (SS_lof / (L - 2)) / (SS_pure / (N - L))``, where ``SS_pure`` is the spread
    within the lengths. Holds for independent rows of equal variance.
    """
    sizes = np.array([len(column) for column in columns])
    free = int(sizes.sum()) - len(columns)
    if free < 1 or len(columns) < 3:
        return None
    means, x = np.array([column.mean() for column in columns]), np.log(lengths)
    line = np.polynomial.Polynomial.fit(x, means, 1, w=np.sqrt(sizes))
    lof = float(sizes @ (means - line(x)) ** 2)
    return _f_test(lof, len(columns) - 2, pure_error(columns), free, np.concatenate(columns))


def pure_error(columns: Sequence[np.ndarray]) -> float:
    """Sum of squared deviations from the mean of each column."""
    return sum(float(((column - column.mean()) ** 2).sum()) for column in columns)


def _f_test(lof: float, lof_free: int, rest: float, free: int, values: np.ndarray) -> float:
    """p-value of ``(lof / lof_free) / (rest / free)``; ``rest`` may vanish."""
    # A smaller sum of squares is rounding error of the logarithms.
    rounding = values.size * (1e-13 * max(1.0, float(np.abs(values).max()))) ** 2
    if lof <= rounding:
        return 1.0
    if rest <= rounding:
        return 0.0
    return float(special.fdtrc(lof_free, free, (lof / lof_free) / (rest / free)))
