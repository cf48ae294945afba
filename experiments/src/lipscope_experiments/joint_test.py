"""Rank correlations of several predictors with one truth, tested jointly by permutations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy import stats
from torch import Generator, Tensor

Key = TypeVar("Key")
Ranks = Sequence[Tensor]  # one ``(units, columns)`` for each stratum
_DRAWS = 2000


def ranks(values: ArrayLike) -> Float[Tensor, "units columns"]:
    """Ranks over units, of each column by itself, centred and of unit length; zero where constant.

    The inner product of two such columns is Spearman's correlation.
    """
    found = torch.from_numpy(stats.rankdata(values, axis=0))
    found = found - found.mean(0)
    return found / found.norm(dim=0).clamp_min(1e-12)


def correlations(known: ArrayLike, change: ArrayLike) -> list[float]:
    """Spearman's correlation over units, column by column; NaN where one of them is constant."""
    a, b = ranks(known), ranks(change)
    return (a * b).sum(0).where(a.any(0) & b.any(0), torch.nan).tolist()


def mean_correlation(known: Ranks, truth: Ranks) -> float:
    """Spearman's correlation over units, mean over columns, then over strata."""
    every = [(a * b).sum(0).mean() for a, b in zip(known, truth, strict=True)]
    return float(torch.stack(every).mean())


def different(known: Mapping[str, Ranks], truth: Ranks) -> dict[str, float]:
    """For each predictor the joint level of a correlation: that any is so far from 0 by chance.

    Units are permuted within strata, all columns alike; the largest of all predictors counts.
    """
    gen, tops = Generator().manual_seed(0), []
    for _ in range(_DRAWS):
        mixed = [one[torch.randperm(len(one), generator=gen)] for one in truth]
        tops.append(max(abs(mean_correlation(one, mixed)) for one in known.values()))
    return {name: _level(tops, abs(mean_correlation(one, truth))) for name, one in known.items()}


def better(
    known: Mapping[str, Ranks], truth: Ranks, tested: Sequence[str], baselines: Sequence[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    """For each tested predictor and baseline: the gap of their correlations and its joint level.

    Predictor and baseline are swapped in random units, all columns alike: the gap of those that
    predict alike has either sign as often. The largest gap of all pairs counts.
    """
    parts = {
        (a, b): torch.cat(
            [
                ((one - other) * z).mean(1) / len(truth)
                for one, other, z in zip(known[a], known[b], truth, strict=True)
            ]
        )
        for a, b in itertools.product(tested, baselines)
    }
    every = torch.stack([*parts.values()])
    signs = torch.randint(0, 2, (every.shape[1], _DRAWS), generator=Generator().manual_seed(0))
    tops = (every @ (2 * signs - 1).to(every)).amax(0).tolist()
    gaps = every.sum(1).tolist()
    return {pair: (gap, _level(tops, gap)) for pair, gap in zip(parts, gaps, strict=True)}


def flips(values: Mapping[Key, Sequence[float]]) -> dict[Key, tuple[float, float]]:
    """For each key the mean over units and its joint level: that any is so far from 0 by chance.

    Units change sign, each in all values alike, in all ``2^units`` ways: right where a unit's
    values are as likely with the other sign. Means are over the root mean square of their values,
    which no sign changes, so that values of any size are compared; the largest of all counts.
    """
    every = torch.tensor([*values.values()], dtype=torch.float64)
    scaled = every / every.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    units = every.shape[1]
    signs = 1 - 2 * ((torch.arange(2**units)[:, None] >> torch.arange(units)) & 1)
    tops = (signs.to(every) @ scaled.T).abs().amax(1) / units
    levels = [float((tops >= float(one) - 1e-9).double().mean()) for one in scaled.mean(1).abs()]
    means = every.mean(1).tolist()
    return dict(zip(values, zip(means, levels, strict=True), strict=True))


def shown(found: tuple[float, float], digits: int = 2) -> str:
    """A gap or correlation with its joint level."""
    return f"{found[0]:+.{digits}f} (p {found[1]:.3f})"


def verdict(gaps: Mapping[str, tuple[float, float]], digits: int = 2) -> str:
    """Gaps with their joint levels, and which refute that each is above 0 at a level of 0.05."""
    lost = [name for name, (gap, p) in gaps.items() if gap <= 0 or p >= 0.05]
    said = "; ".join(f"{name} {shown(one, digits)}" for name, one in gaps.items())
    return f"{said}. " + (f"Refuted by {', '.join(lost)}" if lost else "Not refuted")


def _level(tops: Sequence[float], found: float) -> float:
    return (1 + sum(top >= found for top in tops)) / (1 + len(tops))
