"""``x + c F(x) / L`` with L2 attention, ``x + c F(x)`` with dot products: errors of inverses."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor, nn

from lipscope import DotProduct, L2Attention, linearise, top_singular
from lipscope.charts import Panel
from lipscope.control import ContractiveAttention, solve
from lipscope.pages import number
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, chosen, grouped, line
from lipscope_experiments.simple_layers import normal

_CONSTANTS = (0.5, 0.7, 0.9)
_KINDS = {"L2": "contractive L2", "dot": "dot product"}
_BACK = 1e-12  # an inverse, in float64
_FEW_STEPS, _STEPS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@experiment("kim2021/invertibility", reads_text=False)
def invertibility(study: Study) -> None:
    """The Lipschitz Constant of Self-Attention: which residual blocks can be inverted."""
    n, d, heads = study.pick((8, 8, 2), (32, 32, 4))
    depths, seeds = study.pick(((1, 3), range(1)), ((1, 2, 4, 8), range(3)))
    axes = {"kind": _KINDS, "c": _CONSTANTS, "depth": depths, "seed": seeds}
    keys = grid(**axes, n=[n], d=[d], heads=[heads])
    found = study.values("invertibility", keys, functools.partial(_inverse_errors, study))
    _draw_errors(study, found)
    steps, keys = found[0]["steps"][-1], ("error", "mixed")
    lines = [
        (
            *(_KINDS[kind], str(c), depth, max(r["sigma"] for r in rows)),
            *(_enough_steps(rows, key) for key in keys),
            *(f"{_largest_errors(rows, key)[-1]:.1e}" for key in keys),
        )
        for (kind, c, depth), rows in grouped(found, "kind", "c", "depth")
    ]
    l2, dot = (chosen(found, kind=kind) for kind in _KINDS)
    slope = max(r["sigma"] / r["c"] for r in l2)
    columns = ("attention", "c", "blocks", "largest sigma of a block")
    columns += (f"steps to {_BACK:.0e}", "with mixing", f"error after {steps}", "with mixing")
    lost = sum(r["error"][-1] > _BACK for r in dot)
    study.claim(
        "contractive L2 attention",
        "invertible by fixed-point iteration for c < 1 (as recalled)",
        f"error after {steps} steps at most {_largest_errors(l2)[-1]:.1e}, every c and depth",
    )
    study.claim(
        "dot-product attention",
        "not Lipschitz; the iteration need not converge (as recalled)",
        f"{lost} of {len(dot)} inverses not found to {_BACK:.0e} in {steps} steps; "
        f"largest error {_largest_errors(dot)[-1]:.1e}",
    )
    study.claim(
        "how much of the constant is used",
        "–",
        f"sigma of a contractive block at random tokens is at most {number(slope)} c",
    )
    study.table("Random weights, worst of the seeds and samples", lines, columns)
    study.remark(
        "The paper's own figure and settings were not seen: its blocks may have been trained.",
        "Tokens and weights are normal, weights of variance 1 / d; float64. The error is that "
        "of the iterate with the smallest residual: a diverging iteration keeps its best one.",
        "At one c the two are not equally strong: a contractive block uses little of its c, "
        "and a dot product multiplied by c has a sigma above 1.",
        "Mixing is Anderson's, as in `InvertibleResidual.inverse`.",
    )


def _inverse_errors(
    study: Study, kind: str, c: float, depth: int, seed: int, n: int, d: int, heads: int
) -> Record:
    gen = torch.Generator().manual_seed(seed)

    def weight() -> Tensor:
        return normal(gen, d, d) / d**0.5

    def block() -> nn.Module:
        if kind == "L2":
            layer = L2Attention(weight(), weight(), weight(), heads=heads)
            return ContractiveAttention(layer, c)
        # Folding c into the values leaves one function to invert.
        return DotProduct(weight(), weight(), c * weight(), weight(), heads=heads)

    def error(steps: int, *, mixed: bool) -> float:
        """The largest entry of what is found less ``x``, each block inverted in so many steps."""
        found = y
        for g in reversed(blocks):
            found = solve(g, found, tol=0.0, max_steps=steps, accelerate=mixed).x
        return float((found - x).abs().max())

    x, steps = normal(gen, study.pick(2, 4), n, d), study.pick(_FEW_STEPS, _STEPS)
    with torch.no_grad():
        blocks, y, slopes = [block() for _ in range(depth)], x, []
        for g in blocks:
            slopes.append(top_singular(linearise(g, y[0])).sigma)
            y = y + g(y)
        plain, mixed = ([error(k, mixed=how) for k in steps] for how in (False, True))
    return {"steps": list(steps), "error": plain, "mixed": mixed, "sigma": max(slopes)}


def _largest_errors(rows: list[Record], key: str = "error") -> list[float]:
    """By number of steps."""
    return [max(some) for some in zip(*(r[key] for r in rows), strict=True)]


def _draw_errors(study: Study, found: list[Record]) -> None:
    depths = sorted({r["depth"] for r in found})
    panels = []
    for c in _CONSTANTS:
        series = []
        for kind, depth in itertools.product(_KINDS, (depths[0], depths[-1])):
            rows = chosen(found, kind=kind, c=c, depth=depth)
            name = f"{_KINDS[kind]}, {'1 block' if depth == 1 else f'{depth} blocks'}"
            series.append(line(name, rows[0]["steps"], _largest_errors(rows)))
        panels.append(Panel(f"c = {c}", series, "steps per block", "largest error of an entry"))
    study.draw("invertibility", "Error of the inverse against its steps", panels)


def _enough_steps(rows: list[Record], key: str) -> str:
    """The fewest steps of those tried after which all errors are those of an inverse."""
    errors = zip(rows[0]["steps"], _largest_errors(rows, key), strict=True)
    return str(next((k for k, error in errors if error <= _BACK), "never"))
