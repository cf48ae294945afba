"""Products until sigma is right, until the rule fires, until the interval is narrow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from cases import source
from scipy.special import betaincinv
from solvers import start
from tables import Raw, Section, Target, quantiles, say, table

from lipscope.linalg.singular import Evidence, golub_kahan, start_threshold

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

    def first(self, done: Callable[[int], bool]) -> int | None:
        """Products (two a step) after which something holds; None if it never does."""
        return next((2 * k for k in range(1, STEPS + 1) if done(k)), None)


def measure(*, quick: bool) -> Raw:
    """Count on pretrained layers and real text: products until each goal, None for never."""
    torch.set_num_threads(1)
    lengths, windows = ((64,), 1) if quick else ((64, 128, 256), 3)
    raw, model = [], source("minilm")
    for window in model.windows(lengths, windows):
        say(f"counts: n = {window.num_tokens}, window at {window.start}")
        for case in model.cases(window, range(6)):
            x = case.x.double()
            op = case.exact_map.linearise(x)
            for seed in range(2):
                *_, run = golub_kahan(op, start(x, seed)[None], STEPS)
                path = Path(op.in_size, run.alpha[0].numpy(), run.beta[0].numpy())
                until = {name: path.first(done) for name, done in _goals(path).items()}
                at = {"n": window.num_tokens, "window": window.start, "layer": case.layer}
                raw.append({**at, "seed": seed, "size": path.size, "products until": until})
    return raw


def _goals(path: Path) -> dict[str, Callable[[int], bool]]:
    """What is waited for, as a function of the number of steps."""
    limit, _ = path.ritz(STEPS)

    def rule(delta: float) -> Callable[[int], bool]:
        return lambda k: path.small(k) and path.excludes(k, delta)

    return {
        "within the tolerance": lambda k: path.ritz(k)[0] >= (1 - TOL) * limit,
        "the rule fires": rule(RULE),
        "the interval is narrow": lambda k: path.excludes(k, DELTA),
        **{f"rule at {100 * (1 - level):g} %": rule(level) for level in LEVELS},
        "residual alone (proves nothing)": path.small,
    }


def render(raw: Raw) -> Section:
    """Quantiles of the counts."""
    lengths = dict.fromkeys(one["n"] for one in raw)
    windows = len({(one["n"], one["window"]) for one in raw}) // len(lengths)
    out = Section("Products to a goal")
    out.add(
        f"""{len(raw)} runs: every layer of MiniLM, {windows} windows of the default text at each
of n = {", ".join(map(str, lengths))}, two starts, float64. Products (JVPs and VJPs, two a step)
after which the Ritz value is within {TOL:g} of its limit, whether or not a run can know it; after
which the stopping rule fires (residual within {TOL:g}, and a larger singular value excluded at
{100 * (1 - RULE):g} %); and after which the interval is within {TOL:g} at delta = {DELTA:g}. The
last rows: rules that would fire earlier and prove less."""
    )
    found = {
        name: quantiles([one["products until"][name] for one in raw])
        for name in raw[0]["products until"]
    }
    rows = [[name, *(f"{q:g}" for q in three)] for name, three in found.items()]
    out.add(table(["products until", "median", "90 %", "most"], rows))
    out.add(_on_blocks(raw[0]["size"]))
    for name, goal in zip(list(found)[:3], (16, 20, 40), strict=True):
        middle = found[name][0]
        wanted = f"products until {name}, median: at most {goal}"
        out.targets.append(Target(wanted, f"{middle:g}", middle <= goal))
    return out


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
