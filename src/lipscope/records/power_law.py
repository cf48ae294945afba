"""Growth of sigma with the number of tokens: power-law exponent, interval and goodness of fit.

A power law ``sigma ~ n^s`` is a line in log sigma and log n. The fit gives the slope with an
interval over the sampling of text, a lack-of-fit test, and the largest deviation of the means.
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
from lipscope.records.rows import GIVEN, Measurement, TextEdit, grouped
from lipscope.records.sampling import (
    CONFIDENCE,
    paired_lack_of_fit,
    pure_error,
    resampled,
    unpaired_lack_of_fit,
)

LACK_OF_FIT = 0.01
"""Significance level of the lack-of-fit test."""
NEAR = 0.1
"""A significant relative deviation of the means above this rejects the power law."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of sigma with the number of tokens in one group of rows."""

    slope: float  # exponent ``s`` of ``sigma ~ n^s`` by least squares on the logarithms
    low: float | None  # lower end of its interval over the sampling of text; null if none
    high: float | None  # upper end
    level: float | None  # confidence level of the interval; null if none
    lengths: tuple[int, ...]  # numbers of tokens in the fit, increasing
    # Slopes between neighbouring lengths, from the mean of log sigma per length
    local: tuple[float, ...]
    lack_of_fit_p: float | None  # p-value of the lack-of-fit test; null if not available
    off: float  # largest relative deviation of the geometric means from the fitted line
    num_samples: int  # samples (paired), or the smallest number of rows at a length
    num_rows: int  # rows in the fit
    num_excluded: int  # rows without a finite, positive sigma
    num_dropped: int  # rows of incomplete samples, which lack a length (paired only)
    paired: bool  # whether a sample is the same passage at every length
    note: str | None  # limitations of the result; null if none
    # Separate fit for inputs longer than the trained length, which this one excludes; null if
    # there are fewer than three such lengths
    beyond: Growth | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a power law describes the means; null if not tested.

        True if the test finds no significant deviation, or one of at most `NEAR`.
        """
        if self.lack_of_fit_p is None:
            return None
        return self.lack_of_fit_p >= LACK_OF_FIT or self.off <= NEAR

    @property
    def nearly(self) -> bool:
        """Whether the deviation of the means is significant but small."""
        return bool(self.fits) and (self.lack_of_fit_p or 0.0) < LACK_OF_FIT

    @property
    def deviation(self) -> str:
        """Deviation of the means from the line, with its p-value: "off by 3.2 %, p = 0.002"."""
        p = "not tested" if self.lack_of_fit_p is None else format_p(self.lack_of_fit_p)
        return f"off by {percent_off(self.off)} %, {p}"

    @property
    def interval(self) -> str:
        """Name of the interval: "95 % interval", or the range of a few samples with its level."""
        if self.level is None:
            return "no interval"
        if self.level >= CONFIDENCE:
            return f"{CONFIDENCE:.0%} interval".replace("%", " %")
        level = f"{100 * self.level:.0f} %"
        article = "an" if level.startswith("8") else "a"
        return f"range of {self.num_samples} samples, {article} {level} interval of the median"

    @property
    def verdict(self) -> str:
        """The exponent with its interval, or "no power law" with the local slopes."""
        if self.fits is False:
            local = ", ".join(f"{slope:z.2f}" for slope in self.local)
            return f"no power law ({self.deviation}): {local}"
        ends = f" [{self.low:z.2f}, {self.high:z.2f}]" if self.level is not None else ""
        return f"{self.slope:z.2f}{ends}" + f" ({self.deviation})" * self.nearly

    @property
    def law(self) -> str:
        """Which of the laws ``n^0``, ``n^(1/4)``, ``n^(1/2)`` the interval contains, in words."""
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


def percent_off(share: float) -> str:
    """A fraction in per cent, to two digits; 0 below 0.01 %.

    >>> percent_off(0.0413), percent_off(9e-16)
    ('4.1', '0')
    """
    return f"{100 * share:.2g}" if share >= 1e-4 else "0"


def format_p(p: float) -> str:
    """A p-value as text.

    >>> format_p(0.0021), format_p(1e-9)
    ('p = 0.002', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


Of = Literal["sigma", "sigma_rest"]


class Group(NamedTuple):
    """The fields that the rows of one growth curve have in common."""

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


_fields_of = attrgetter(*Group._fields)


def group_of(row: Measurement) -> Group:
    """The growth curve of a row."""
    return Group(*_fields_of(row))


def groups(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """The rows of every growth curve, in order of first appearance."""
    return grouped(rows, group_of)


def usable(sigma: float | None) -> bool:
    """Whether sigma is finite and positive, so that its logarithm exists."""
    return sigma is not None and math.isfinite(sigma) and sigma > 0


def growth(
    rows: Sequence[Measurement], *, paired: bool, seed: int = 0, of: Of = "sigma"
) -> Growth | None:
    """The power-law exponent of sigma in the number of tokens, with an interval and a test of fit.

    The slope is the least-squares slope of ``log sigma`` on ``log n`` over all rows. Its interval
    covers the sampling of text; the solver's error is given by the interval of each row.

    Each paired sample has its own slope. For six or more samples, the interval is a 95 %
    percentile bootstrap of their mean, with percentiles widened to the Student quantile (Hesterberg
    2015, "expanded percentile interval"). For ``k < 6`` samples, their range contains the median
    slope with probability ``1 - 2^(1 - k)`` for every distribution; `level` is this probability.
    Unpaired samples have the 95 % Student interval ``slope ± t s sqrt(sum_n c_n² / k_n)``, with
    ``s`` the spread within the lengths and ``slope = sum_n c_n mean_n``: it holds for nearly normal
    log sigma of equal variance. The lack-of-fit test is an F test, see `paired_lack_of_fit` and
    `unpaired_lack_of_fit`.

    Inputs longer than the trained length of the model, if its files state one, are fitted
    separately (`beyond`), since changes there need not be growth.

    Interval and test hold for independent samples. If samples share text, both are omitted and
    `note` gives the reason. Paired samples that lack a length are dropped and counted.

    Args:
        paired: Whether a sample index is the same passage at every length (windows
            "spread"), rather than a new one (windows "disjoint").
        seed: Seed of the bootstrap of paired samples.
        of: The quantity to fit: sigma, or sigma with the top token held fixed.

    Returns:
        The growth, or None for fewer than three lengths with a finite, positive sigma. If only
        the inputs beyond the trained length have three, their growth.

    Raises:
        InputError: If the rows belong to several groups, or hold a sample and length twice.
    """
    if len(groups(rows)) > 1:
        raise InputError(
            "`rows` should be of one layer, head, map, metric, move and read. Found "
            f"{len(groups(rows))} different groups; take them from `groups(rows)`."
        )
    trained = rows[0].trained_length if rows and rows[0].input in GIVEN else None
    if trained is None or all(row.num_tokens <= trained for row in rows):
        return _growth(rows, paired=paired, seed=seed, of=of)
    parts = ([row for row in rows if (row.num_tokens > trained) == past] for past in (False, True))
    inside, beyond = (_growth(part, paired=paired, seed=seed, of=of) for part in parts)
    than = f"than the {trained} tokens that the model was trained on"
    if inside is None:
        return None if beyond is None else _noted(beyond, f"all inputs are longer {than}")
    what = "fitted separately" if beyond else "left out"
    return replace(_noted(inside, f"inputs longer {than} are {what}"), beyond=beyond)


def _noted(fit: Growth, remark: str) -> Growth:
    return replace(fit, note="; ".join(filter(None, [fit.note, remark])))


def _growth(rows: Sequence[Measurement], *, paired: bool, seed: int, of: Of) -> Growth | None:
    """The growth of rows on one side of the trained length."""
    logs = _log_sigma(rows, of)
    lengths = sorted({n for n, _ in logs})
    if len(lengths) < 3:
        return None
    whole = {s for _, s in logs if not paired or all((n, s) in logs for n in lengths)}
    complete = {key: value for key, value in logs.items() if key[1] in whole}
    kept = complete or logs
    used = [row for row in rows if (row.num_tokens, row.sample) in kept]
    shared = share_text(used, paired=paired)
    ordered, x = sorted(kept.items()), np.log(lengths)  # at each length ordered by sample
    columns = [np.array([y for (m, _), y in ordered if m == n]) for n in lengths]
    means = np.array([column.mean() for column in columns])
    sizes = np.array([len(column) for column in columns])
    centred = x - sizes @ x / sizes.sum()
    weights = sizes * centred / (sizes @ centred**2)  # weights @ means: the slope over all rows
    slope = float(weights @ means)
    line = sizes @ means / sizes.sum() + slope * centred
    low = high = level = p = None
    dropped = len(logs) - len(kept)
    if complete and not shared:
        low, high, level = _slope_interval(columns, weights, paired=paired, seed=seed)
        p = (paired_lack_of_fit if paired else unpaired_lack_of_fit)(columns, lengths)
    return Growth(
        slope=slope,
        low=low,
        high=high,
        level=level,
        lengths=tuple(lengths),
        local=tuple(float(s) for s in np.diff(means) / np.diff(x)),
        lack_of_fit_p=p,
        off=float(np.abs(np.expm1(means - line)).max()),
        num_samples=min(len(column) for column in columns),
        num_rows=len(kept),
        num_excluded=len(rows) - len(logs),
        num_dropped=dropped,
        paired=paired,
        note=_sample_note(columns, dropped, bool(complete), shared=shared, paired=paired),
    )


def top_held_fixed(rows: Iterable[Measurement]) -> list[Measurement]:
    """The same rows with `sigma_rest` in place of sigma."""
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


def off_line(points: Iterable[tuple[float | int, float]]) -> float:
    """Largest relative deviation of points from their least-squares power law.

    >>> round(off_line([(1, 1.0), (2, 2.2), (4, 4.0)]), 2)
    0.07
    """
    held = [(x, y) for x, y in points if x > 0 and usable(y)]
    slope = slope_of(held)
    left = np.array([math.log(y) - slope * math.log(x) for x, y in held])
    return float(np.abs(np.expm1(left - left.mean())).max()) if held else math.nan


def _log_sigma(rows: Sequence[Measurement], of: Of) -> dict[tuple[int, int], float]:
    """``log sigma`` by (length, sample), for rows with a finite, positive sigma."""
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


def share_text(rows: Sequence[Measurement] | Sequence[TextEdit], *, paired: bool) -> bool:
    """Whether windows of different samples, or of unpaired lengths, overlap."""
    longest: dict[int, Measurement | TextEdit] = {}
    for row in rows:  # the windows of a paired sample are nested in its longest one
        if paired and row.num_tokens >= longest.get(row.sample, row).num_tokens:
            longest[row.sample] = row
    windows = longest.values() if paired else rows
    held = sorted((r.start, r.start + r.num_tokens) for r in windows if r.start is not None)
    return any(one[1] > other[0] for one, other in pairwise(held))


def _slope_interval(
    columns: list[np.ndarray], weights: np.ndarray, *, paired: bool, seed: int
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Ends and level of the slope's interval; None if a length has a single sample."""
    sizes = np.array([len(column) for column in columns])
    count = int(sizes.min())
    if count < 2:
        return None, None, None
    if not paired:
        slope = float(weights @ [column.mean() for column in columns])
        free = int(sizes.sum()) - len(columns)
        scale = math.sqrt(pure_error(columns) / free * float((weights**2 / sizes).sum()))
        half = float(special.stdtrit(free, (1 + CONFIDENCE) / 2)) * scale
        return slope - half, slope + half, CONFIDENCE
    # The slope of resampled means is the mean of the samples' own slopes.
    own = np.column_stack(columns) @ weights
    if (level := 1 - 2.0 ** (1 - count)) < CONFIDENCE:
        return float(own.min()), float(own.max()), level
    # The standard deviation of resampled means is too small by sqrt((k - 1) / k), and the normal
    # quantile is too small for k samples: the tail corrects for both.
    student = special.stdtrit(count - 1, (1 + CONFIDENCE) / 2)
    tail = float(special.ndtr(-student * math.sqrt(count / (count - 1))))
    low, high = np.quantile(resampled(seed, count) @ own, [tail, 1 - tail])
    return float(low), float(high), CONFIDENCE


def _sample_note(
    columns: list[np.ndarray], dropped: int, complete: bool, *, shared: bool, paired: bool
) -> str | None:
    """Caveats about the samples behind an exponent."""
    remarks = []
    if not complete:
        remarks.append("no sample has every length: exponent of all rows, without interval")
    elif shared:
        remarks.append("windows share text, so they are not independent: no interval and no test")
    elif min(len(column) for column in columns) < 2:
        remarks.append("one sample: no interval" + (" and no test" if paired else ""))
    if dropped:
        remarks.append(f"{dropped} rows of samples that lack a length were dropped")
    return "; ".join(remarks) or None
