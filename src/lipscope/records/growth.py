"""Growth of sigma with the number of tokens: exponent, interval, and whether one fits.

A power law ``sigma ~ n^s`` is a line of log sigma on log n: fitted, with an interval for its
slope when other passages are drawn, and a test of whether a line describes the data at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from lipscope.errors import InputError
from lipscope.records.rows import Measurement
from lipscope.records.sampling import CONFIDENCE, resampled

"""Nominal coverage of the growth interval."""
LACK_OF_FIT = 0.01
"""A lack-of-fit p-value below this withdraws the power law."""

Of = Literal["sigma", "sigma_rest"]


class Group(NamedTuple):
    """What the rows of one growth curve have in common."""

    model: str
    layer: int | None
    head: int | None
    map: str
    metric: str
    move: str
    read: str
    input: str
    text: str | None
    dtype: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How sigma grows with the number of tokens in one group of rows.

    Attributes:
        slope: Exponent ``s`` of ``sigma ~ n^s`` by least squares on the logarithms.
        low: Lower end of its interval over the sampling of text; null if there is none.
        high: Upper end.
        lengths: Numbers of tokens that were compared, increasing.
        local: Slopes between neighbouring lengths, from the mean of log sigma per length.
        lack_of_fit_p: p-value of the lack-of-fit test; null where it cannot be made.
        num_samples: Samples (paired), or the smallest number of rows at a length.
        num_rows: Rows that entered.
        num_excluded: Rows without a finite, positive sigma.
        num_dropped: Rows of samples that lack another length (paired only).
        paired: Whether a sample is the same passage at every length.
        note: What limits the result; null if nothing does.
    """

    slope: float
    low: float | None
    high: float | None
    lengths: tuple[int, ...]
    local: tuple[float, ...]
    lack_of_fit_p: float | None
    num_samples: int
    num_rows: int
    num_excluded: int
    num_dropped: int
    paired: bool
    note: str | None

    @property
    def num_lengths(self) -> int:
        """Number of lengths that were compared."""
        return len(self.lengths)

    @property
    def fits(self) -> bool | None:
        """Whether a power law is compatible with the rows; null if that was not tested."""
        return None if self.lack_of_fit_p is None else self.lack_of_fit_p >= LACK_OF_FIT

    @property
    def verdict(self) -> str:
        """The exponent with its interval, or "no power law" with the local slopes."""
        if self.lack_of_fit_p is not None and not self.fits:
            local = ", ".join(f"{slope:.2f}" for slope in self.local)
            return f"no power law ({format_p(self.lack_of_fit_p)}): {local}"
        if self.low is None or self.high is None:
            return f"{self.slope:.2f}"
        return f"{self.slope:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def law(self) -> str:
        """Which of the laws ``n^0``, ``n^(1/4)``, ``n^(1/2)`` the interval holds, in words."""
        if self.fits is False:
            return "no power law"
        if self.low is None or self.high is None:
            return "no interval"
        laws = {"no growth": 0.0, "n^(1/4)": 0.25, "n^(1/2)": 0.5}
        held = [name for name, s in laws.items() if self.low <= s <= self.high]
        if held:
            return " or ".join(held)
        places = ["falls", "slower than n^(1/4)", "between n^(1/4) and n^(1/2)"]
        passed = sum(self.slope > s for s in laws.values())
        return [*places, "faster than n^(1/2)"][passed]


_group_of = attrgetter(*Group._fields)


def groups(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """The rows of every growth curve, in order of first appearance.

    Args:
        rows: Measurements of any kind.

    Returns:
        For each combination of the fields of `Group`, its rows.
    """
    found: dict[Group, list[Measurement]] = {}
    for row in rows:
        found.setdefault(Group(*_group_of(row)), []).append(row)
    return found


def usable(sigma: float | None) -> bool:
    """Whether a sigma has a logarithm: finite and positive."""
    return sigma is not None and math.isfinite(sigma) and sigma > 0


def growth(
    rows: Sequence[Measurement], *, paired: bool, seed: int = 0, of: Of = "sigma"
) -> Growth | None:
    """The exponent of sigma in the number of tokens, with its interval and its test.

    The slope is the least-squares slope of ``log sigma`` on ``log n`` over all rows. The
    interval comes from a percentile bootstrap over samples: whole passages at once when
    they are paired across lengths, rows within each length when they are not. The
    percentiles are widened to the Student quantile, since plain ones are too narrow for
    few samples (Hesterberg 2015, "expanded percentile interval"). It speaks of the
    sampling of text; the solver's error is the row's own interval. The lack-of-fit test
    is an F test, see `paired_lack_of_fit` and `unpaired_lack_of_fit`.

    Holds for samples that are drawn independently of each other. Below five samples a
    bootstrap cannot reach 95 %, and `note` says what it reaches. A paired sample that
    lacks one of the lengths is dropped whole, and counted.

    Args:
        rows: Rows of one group; see `groups`.
        paired: Whether one sample index is the same passage at every length (windows
            "spread"), rather than a fresh one (windows "consecutive").
        seed: Seed of the bootstrap.
        of: What grows: sigma, or sigma with the top token held fixed.

    Returns:
        The growth, or None below three lengths with a finite, positive sigma.

    Raises:
        InputError: If the rows are not of one group, or hold a sample and length twice.
    """
    if len(groups(rows)) > 1:
        raise InputError(
            "`rows` should be of one layer, head, map, metric, move and read. Found "
            f"{len(groups(rows))} different groups; take them from `groups(rows)`."
        )
    logs = _log_sigma(rows, of)
    lengths = sorted({n for n, _ in logs})
    if len(lengths) < 3:
        return None
    complete = _complete(logs, lengths) if paired else logs
    kept = complete or logs
    columns = _columns(kept, lengths)
    means = np.array([column.mean() for column in columns])
    low = high = p = None
    if complete:
        low, high = _interval(columns, lengths, paired=paired, seed=seed)
        p = _lack_of_fit(columns, lengths, paired=paired)
    return Growth(
        slope=float(_weights(columns, lengths) @ means),
        low=low,
        high=high,
        lengths=tuple(lengths),
        local=tuple(float(s) for s in np.diff(means) / np.diff(np.log(lengths))),
        lack_of_fit_p=p,
        num_samples=min(len(column) for column in columns),
        num_rows=len(kept),
        num_excluded=len(rows) - len(logs),
        num_dropped=len(logs) - len(kept),
        paired=paired,
        note=_note(columns, len(logs) - len(kept), complete=bool(complete), paired=paired),
    )


def top_held_fixed(rows: Iterable[Measurement]) -> list[Measurement]:
    """The same rows with `sigma_rest` in the place of sigma; those without it have none."""
    return [replace(row, sigma=row.sigma_rest, upper=None) for row in rows]


def steps(rows: Iterable[Measurement]) -> list[tuple[Measurement, Measurement]]:
    """Pairs of rows of one group and sample at neighbouring lengths, the shorter one first."""
    curves: dict[tuple[Group, int], list[Measurement]] = {}
    for key, part in groups(rows).items():
        for row in sorted(part, key=lambda row: row.num_tokens):
            curves.setdefault((key, row.sample), []).append(row)
    return [pair for curve in curves.values() for pair in pairwise(curve)]


def slope_of(points: Iterable[tuple[float | int, float]]) -> float:
    """Least-squares slope of ``log y`` on ``log x``; NaN for fewer than two different x.

    >>> round(slope_of([(1, 2.0), (4, 4.0), (16, 8.0)]), 12)
    0.5
    """
    held = [(x, y) for x, y in points if x > 0 and usable(y)]
    x, y = (np.log(np.array([pair[i] for pair in held])) for i in (0, 1))
    if len(held) < 2 or not np.ptp(x) > 0:
        return math.nan
    return float((x - x.mean()) @ y / ((x - x.mean()) @ x))


def paired_lack_of_fit(table: np.ndarray, lengths: Sequence[int]) -> float | None:
    """Lack of fit of a line when every sample is seen at every length.

    Every sample has a line of its own; what the samples deviate from their lines *in
    common*, length by length, is set against how they differ in it:
    ``F = (SS_common / (L - 2)) / (SS_differ / ((S - 1)(L - 2)))``. Holds for samples
    with any level and slope and independent residuals of equal variance.

    Args:
        table: Values of log sigma, samples by lengths, shape ``(S, L)``.
        lengths: Numbers of tokens, ``L`` of them.

    Returns:
        The p-value, or None for one sample or fewer than three lengths.

    >>> line = np.log([16, 64, 256])
    >>> paired_lack_of_fit(np.array([1 + line, 2 + line]), [16, 64, 256])
    1.0
    """
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
    """Lack of fit of a line against pure error, when every length has its own samples.

    ``F = (SS_lof / (L - 2)) / (SS_pure / (N - L))``, where ``SS_pure`` is the spread
    within the lengths. Holds for independent rows of equal variance.

    Args:
        columns: Values of log sigma at each length.
        lengths: Numbers of tokens, one for each column.

    Returns:
        The p-value, or None without repeated lengths or with fewer than three of them.
    """
    sizes = np.array([len(column) for column in columns])
    free = int(sizes.sum()) - len(columns)
    if free < 1 or len(columns) < 3:
        return None
    means = np.array([column.mean() for column in columns])
    pure = sum(float(((column - column.mean()) ** 2).sum()) for column in columns)
    lof = float(sizes.mean()) * _off_line(means, sizes, lengths)
    return _f_test(lof, len(columns) - 2, pure, free, np.concatenate(columns))


def format_p(p: float) -> str:
    """A p-value in words.

    >>> format_p(0.0021), format_p(1e-9)
    ('p = 0.002', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _log_sigma(rows: Sequence[Measurement], of: Of) -> dict[tuple[int, int], float]:
    """``log sigma`` by (length, sample), of the rows that have one."""
    logs: dict[tuple[int, int], float] = {}
    for row in rows:
        sigma: float | None = getattr(row, of)
        if sigma is None or not usable(sigma):
            continue
        key = (row.num_tokens, row.sample)
        if key in logs:
            raise InputError(
                "`rows` should hold one row for each sample and length. Found two for "
                f"sample {row.sample} at {row.num_tokens} tokens."
            )
        logs[key] = math.log(sigma)
    return logs


def _complete(
    logs: dict[tuple[int, int], float], lengths: list[int]
) -> dict[tuple[int, int], float]:
    """The entries of those samples that have every length."""
    whole = {
        sample
        for sample in {sample for _, sample in logs}
        if all((n, sample) in logs for n in lengths)
    }
    return {key: value for key, value in logs.items() if key[1] in whole}


def _columns(logs: dict[tuple[int, int], float], lengths: list[int]) -> list[np.ndarray]:
    """``log sigma`` at each length, ordered by sample."""
    ordered = sorted(logs.items())
    return [np.array([y for (m, _), y in ordered if m == n]) for n in lengths]


def _weights(columns: Sequence[np.ndarray], lengths: Sequence[int]) -> np.ndarray:
    """Weights ``c`` with which the least-squares slope over all rows is ``c . means``."""
    sizes = np.array([len(column) for column in columns], dtype=float)
    x = np.log(lengths)
    x = x - sizes @ x / sizes.sum()
    return sizes * x / (sizes @ x**2)


def _interval(
    columns: list[np.ndarray], lengths: list[int], *, paired: bool, seed: int
) -> tuple[float | None, float | None]:
    """Percentile bootstrap of the slope; nothing where a length has a single sample."""
    smallest = min(len(column) for column in columns)
    if smallest < 2:
        return None, None
    weights = _weights(columns, lengths)
    if paired:
        # The slope of resampled means is the mean of the samples' own slopes.
        own, (parts,) = np.column_stack(columns) @ weights, resampled(seed, (smallest,))
        slopes = parts @ own
        free = smallest - 1
    else:
        parts = resampled(seed, tuple(len(column) for column in columns))
        slopes = np.column_stack([p @ c for p, c in zip(parts, columns, strict=True)]) @ weights
        free = sum(len(column) for column in columns) - len(columns)
    # A resampled mean varies by sqrt((k - 1) / k) too little, and the normal quantile is
    # too small for k samples: the tail is chosen so as to make up for both.
    student = special.stdtrit(free, (1 + CONFIDENCE) / 2)
    tail = float(special.ndtr(-student * math.sqrt(smallest / (smallest - 1))))
    low, high = np.quantile(slopes, [tail, 1 - tail])
    return float(low), float(high)


def _lack_of_fit(columns: list[np.ndarray], lengths: list[int], *, paired: bool) -> float | None:
    if paired:
        return paired_lack_of_fit(np.column_stack(columns), lengths)
    return unpaired_lack_of_fit(columns, lengths)


def _off_line(means: np.ndarray, sizes: np.ndarray, lengths: Sequence[int]) -> float:
    """Squared distance of the means from their weighted line, weights of mean one."""
    line = np.polynomial.Polynomial.fit(np.log(lengths), means, 1, w=np.sqrt(sizes))
    return float(sizes @ (means - line(np.log(lengths))) ** 2) / float(sizes.mean())


def _f_test(lof: float, lof_free: int, rest: float, free: int, values: np.ndarray) -> float:
    """p-value of ``(lof / lof_free) / (rest / free)``, also when the rest vanishes."""
    # Below this, a sum of squares is rounding of the logarithms and not a deviation.
    rounding = values.size * (1e-13 * max(1.0, float(np.abs(values).max()))) ** 2
    if lof <= rounding:
        return 1.0
    if rest <= rounding:
        return 0.0
    return float(special.fdtrc(lof_free, free, (lof / lof_free) / (rest / free)))


def _note(columns: list[np.ndarray], dropped: int, *, complete: bool, paired: bool) -> str | None:
    """What the reader of an exponent should know about the samples behind it."""
    smallest = min(len(column) for column in columns)
    remarks = []
    if not complete:
        remarks.append("no sample has every length: exponent of all rows, without interval")
    elif smallest < 2:
        remarks.append("one sample: no interval" + (" and no test" if paired else ""))
    elif paired and smallest < 5:
        # The interval cannot exceed the range of the k slopes, which misses the true
        # mean when all k lie on one side of it: probability 2^(1 - k) if symmetric.
        reach = 100 * (1 - 2.0 ** (1 - smallest))
        remarks.append(f"{smallest} samples: the interval reaches about {reach:.0f} % only")
    if dropped:
        remarks.append(f"{dropped} rows of samples that lack a length were dropped")
    return "; ".join(remarks) or None
