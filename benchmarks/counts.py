"""Products until sigma is right, until the rule fires, until the interval is narrow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cases import source
from scipy.special import betaincinv
from solvers import start
from tables import Section, Target, say, table

from lipscope.linalg.interval import Evidence, start_threshold
from lipscope.linalg.krylov import golub_kahan

TOL, DELTA, RULE = 1e-3, 1e-6, 1e-2
STEPS = 36
LEVELS = (0.05, 0.1, 0.3)  # weaker rules, for comparison


@dataclass(frozen=True)
class Path:
    """One float64 run of `STEPS` steps, as its two sequences of coefficients.

    Attributes:
        size: Dimension of the input.
        alpha: Diagonal.
        beta: Superdiagonal, and the coupling to the vector after the last.
    """

    size: int
    alpha: np.ndarray
    beta: np.ndarray

    def ritz(self, k: int) -> tuple[float, float]:
        """Top Ritz value after ``k`` steps, and its residual ``r / √2``."""
        matrix = np.diag(self.alpha[:k]) + np.diag(self.beta[: k - 1], k=1)
        left, values, _ = np.linalg.svd(matrix)
        return float(values[0]), float(self.beta[k - 1] * abs(left[-1, 0])) / math.sqrt(2)

    def excludes(self, k: int, delta: float) -> bool:
        """Whether sigma beyond the tolerance is excluded after ``k`` steps."""
        theta, _ = self.ritz(k)
        evidence = Evidence(self.alpha[:k], self.beta[:k], [], theta, 1e-15)
        return evidence.excludes(1 + TOL, start_threshold(self.size, delta))

    def small(self, k: int) -> bool:
        """Whether the residual is within the tolerance after ``k`` steps."""
        theta, residual = self.ritz(k)
        return residual <= TOL * theta

    def first(self, done: Callable[[int], bool]) -> float:
        """Products (two a step) after which something holds; infinite if it never does."""
        return next((2.0 * k for k in range(1, STEPS + 1) if done(k)), math.inf)


def section(*, quick: bool) -> Section:
    """Count on pretrained layers and real text."""
    torch.set_num_threads(1)
    lengths, windows = ((64,), 1) if quick else ((64, 128, 256), 3)
    paths = _paths(lengths, windows)
    out = Section("Products to a goal")
    out.add(
        f"""{len(paths)} runs: every layer of MiniLM, {windows} windows of the default text at each
of n = {", ".join(map(str, lengths))}, two starts, float64. Products (JVPs and VJPs, two a step)
after which the Ritz value is within {TOL:g} of its limit, whether or not a run can know it; after
which the stopping rule fires (residual within {TOL:g}, and a larger singular value excluded at
{100 * (1 - RULE):g} %); and after which the interval is within {TOL:g} at delta = {DELTA:g}. The
last rows: rules that would fire earlier and prove less."""
    )
    counts = {
        "within the tolerance": [p.first(_near(p)) for p in paths],
        "the rule fires": [p.first(_rule(p, RULE)) for p in paths],
        "the interval is narrow": [p.first(_narrow(p)) for p in paths],
    }
    weaker = {
        f"rule at {100 * (1 - level):g} %": [p.first(_rule(p, level)) for p in paths]
        for level in LEVELS
    } | {"residual alone (proves nothing)": [p.first(p.small) for p in paths]}
    rows = [[name, *_quantiles(c)] for name, c in counts.items()]
    rows += [[name, *_quantiles(c)] for name, c in weaker.items()]
    out.add(table(["products until", "median", "90 %", "most"], rows))
    out.add(_on_blocks(paths[0].size))
    for (name, found), goal in zip(counts.items(), (16, 20, 40), strict=True):
        middle = float(np.median(found))
        wanted = f"products until {name}, median: at most {goal}"
        out.targets.append(Target(wanted, f"{middle:g}", middle <= goal))
    return out


def _paths(lengths: Sequence[int], windows: int) -> list[Path]:
    model, found = source("minilm"), []
    for window in model.windows(lengths, windows):
        say(f"counts: n = {window.num_tokens}, window at {window.start}")
        for case in model.cases(window, range(6)):
            x = case.x.double()
            op = case.exact_map.linearise(x)
            for seed in range(2):
                *_, run = golub_kahan(op, start(x, seed)[None], STEPS)
                found.append(Path(op.in_size, run.alpha[0].numpy(), run.beta[0].numpy()))
    return found


def _near(path: Path) -> Callable[[int], bool]:
    limit, _ = path.ritz(STEPS)
    return lambda k: path.ritz(k)[0] >= (1 - TOL) * limit


def _rule(path: Path, delta: float) -> Callable[[int], bool]:
    return lambda k: path.small(k) and path.excludes(k, delta)


def _narrow(path: Path) -> Callable[[int], bool]:
    return lambda k: path.excludes(k, DELTA)


def _quantiles(values: Sequence[float]) -> list[str]:
    return [f"{q:g}" for q in np.quantile(values, [0.5, 0.9, 1.0])]


def _on_blocks(size: int) -> str:
    """Why blocks of starts do not pay: what the polynomials have to grow by."""
    cells = []
    for delta in (RULE, DELTA):
        one, two = (
            -0.5 * math.log(float(betaincinv(r / 2, (size - r) / 2, delta))) for r in (1, 2)
        )
        cells.append(f"{one:.1f} to {two:.1f} at delta = {delta:g}")
    return (
        "Blocks of two random starts lower what a run has to show: the logarithm of the growth "
        f"that its polynomials need falls from {' and from '.join(cells)} ({size:,} dimensions). "
        "A step of a block costs twice the products, so that they would have to halve it."
    )
