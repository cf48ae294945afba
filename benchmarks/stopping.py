"""Does the default stopping rule keep its promise? Over a thousand real cases.

A case is a layer, a window of text and a random start. The default run (float32, tolerance
1e-3) is compared with the truth of the same layer and input in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cases import Case, source
from solvers import start, truth
from tables import Section, Target, say, table

import lipscope as ls
from lipscope.linalg.krylov import golub_kahan
from lipscope.linalg.operator import Operator

TOL = 1e-3
TRUTH_TOL = 1e-6
ROUNDING = 1e-5  # the float32 slack of the interval


@dataclass(frozen=True)
class Plan:
    """Which cases of a model: every layer at every window, from every seed."""

    model: str
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    windows: int
    seeds: int


PLANS = (
    Plan("minilm", (0, 1, 2, 3, 4, 5), (16, 32, 64, 128), 5, 6),  # 720
    Plan("smollm2", (0, 1, 5, 10, 15, 20, 25, 29), (16, 32, 64), 3, 4),  # 288
    Plan("random:gpt2:n_layer=3", (0, 1, 2), (16, 64), 3, 4),  # 72
)
QUICK = (
    Plan("minilm", (0, 3), (16, 32), 2, 3),
    Plan("random:gpt2:n_layer=1,n_embd=192", (0,), (16,), 1, 3),
)


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        model: Name of the model.
        where: Layer, length, window and seed in words.
        error: ``sigma / truth - 1``.
        upper: ``upper / truth - 1``.
        products: Products of the default run.
        enough: Products after which the Ritz value was within the tolerance of the truth.
        status: Status of the default run.
    """

    model: str
    where: str
    error: float
    upper: float
    products: int
    enough: int
    status: str


def section(*, quick: bool) -> Section:
    """Run the study and describe it."""
    torch.set_num_threads(1)  # products this small gain nothing from a second thread
    rows: list[Row] = []
    checks: list[float] = []
    narrow: list[str] = []
    for plan in QUICK if quick else PLANS:
        began = time.perf_counter()
        for index, case in enumerate(_cases(plan)):
            sigma, status = _truth(case)
            narrow.append(status)
            if index % 8 == 0:
                checks.append(abs(sigma / truth(case) - 1))
            rows += [_row(case, sigma, seed) for seed in range(plan.seeds)]
        say(f"stopping: {plan.model} done in {time.perf_counter() - began:.0f} s")
    out = Section("The stopping rule on a thousand cases")
    out.add(
        f"""{len(rows)} cases: layers of real and random models at windows of the default text, from
several random starts each; float32, default tolerance {TOL:g}, one thread. The truth of each layer
and window is lipscope's own interval (tolerance {TRUTH_TOL:g}) in float64 at the same input;
{narrow.count("converged")} of {len(narrow)} converged. {len(checks)} of them were checked
against ARPACK on the model's own module in float64: they differ by at most {max(checks):.1e}.
*Error* is sigma / truth − 1. *Misses*: `upper` below the truth. *Above*: sigma above the truth by
more than the float32 slack {ROUNDING:g}. *Enough*: products after which sigma was within {TOL:g} of
the truth, which a run cannot know."""
    )
    names = list(dict.fromkeys(r.model for r in rows))
    groups = {name: [r for r in rows if r.model == name] for name in names}
    groups = groups | ({"all": rows} if len(groups) > 1 else {})
    out.add(_outcome_table(groups))
    out.add(_products_table(groups))
    if wrong := [r for r in rows if abs(r.error) > TOL]:
        out.add("Cases above the tolerance:")
        headers = ["case", "status", "products", "enough", "error", "upper / truth − 1"]
        out.add(table(headers, [_wrong_row(r) for r in wrong]))
    out.targets = _targets(rows)
    return out


def _wrong_row(r: Row) -> list[object]:
    return [r.where, r.status, r.products, r.enough, f"{r.error:.1e}", f"{r.upper:+.3f}"]


def _cases(plan: Plan) -> Iterator[Case]:
    model = source(plan.model)
    for window in model.windows(plan.lengths, plan.windows):
        yield from model.cases(window, plan.layers)


def _truth(case: Case) -> tuple[float, str]:
    """Sigma in float64 at the float32 input, and the status of that run."""
    op = case.exact_map.linearise(case.x.double())
    generator = torch.Generator().manual_seed(10**6)
    top = ls.top_singular(op, tol=TRUTH_TOL, generator=generator)
    return top.sigma, top.status


def _row(case: Case, sigma: float, seed: int) -> Row:
    op = case.map.linearise(case.x)
    top = ls.top_singular(op, tol=TOL, generator=torch.Generator().manual_seed(seed))
    enough = _enough(op, start(case.x, seed), sigma)
    name = "random GPT-2" if case.model.startswith("random") else case.name.split(" layer")[0]
    window = case.window
    where = f"{case.name}, n = {window.num_tokens}, window at {window.start}, seed {seed}"
    error, upper = top.sigma / sigma - 1, top.upper / sigma - 1
    return Row(name, where, error, upper, top.products, enough, top.status)


def _enough(op: Operator, first: torch.Tensor, sigma: float) -> int:
    """Products after which the top Ritz value is within the tolerance of the truth."""
    state = None
    for state in golub_kahan(op, first[None], 300):
        ritz = np.linalg.norm(state.matrix()[0].numpy(), 2)
        if ritz >= (1 - TOL) * sigma:
            break
    assert state is not None
    return state.products


def _outcome_table(groups: dict[str, list[Row]]) -> str:
    headers = ["model", "cases", "converged", "worst error", "above tol", "misses", "above"]
    rows = []
    for name, group in groups.items():
        errors = np.array([r.error for r in group])
        rows.append(
            [
                name,
                len(group),
                sum(r.status == "converged" for r in group),
                f"{errors[np.abs(errors).argmax()]:.1e}",
                int((np.abs(errors) > TOL).sum()),
                sum(r.upper < 0 for r in group),
                int((errors > ROUNDING).sum()),
            ]
        )
    return table(headers, rows)


def _products_table(groups: dict[str, list[Row]]) -> str:
    headers = ["model", "products: median", "90 %", "most", "enough: median", "90 %", "most"]
    headers += ["upper/sigma − 1, %: median", "90 %", "most"]
    rows = []
    for name, group in groups.items():
        width = [100 * ((1 + r.upper) / (1 + r.error) - 1) for r in group]
        rows.append(
            [
                name,
                *_quantiles([r.products for r in group], "{:.0f}"),
                *_quantiles([r.enough for r in group], "{:.0f}"),
                *_quantiles(width, "{:.2g}"),
            ]
        )
    return table(headers, rows)


def _quantiles(values: Sequence[float], form: str) -> list[str]:
    return [form.format(q) for q in np.quantile(values, [0.5, 0.9, 1.0])]


def _targets(rows: Sequence[Row]) -> list[Target]:
    worst = max(abs(r.error) for r in rows)
    misses = sum(r.upper < 0 for r in rows)
    return [
        Target("stopping: at least 1,000 cases", f"{len(rows)}", len(rows) >= 1000),
        Target(
            "stopping: converged sigma within the tolerance", f"worst {worst:.1e}", worst <= TOL
        ),
        Target(
            "stopping: no interval misses the truth", f"{misses} of {len(rows)} miss", misses == 0
        ),
    ]
