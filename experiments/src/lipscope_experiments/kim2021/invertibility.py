"""Which residual attention blocks can be inverted: error of the inverse against its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import DotProduct, L2Attention, linearise, top_singular
from lipscope.charts import Panel, Series
from lipscope.control import ContractiveAttention, solve
from lipscope.pages import number
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table, chosen

_CONSTANTS = (0.5, 0.7, 0.9)
_KINDS = {"L2": "contractive L2", "dot": "dot product"}
_BACK = 1e-12  # an inverse, in float64


@experiment(
    "kim2021/invertibility",
    title="The Lipschitz Constant of Self-Attention: which residual blocks can be inverted",
    cite="kim2021",
    reads_text=False,
)
def invertibility(study: Study) -> Findings:
    """``x + c F(x) / L`` with L2 attention, ``x + c F(x)`` with dot products, one after another."""
    found = study.values("invertibility", _jobs(study))
    _draw(study, found)
    return _findings(study, found)


def _jobs(study: Study) -> Iterator[ValueJob]:
    n, d, heads = study.pick((8, 8, 2), (32, 32, 4))
    for kind in _KINDS:
        for c in _CONSTANTS:
            for depth in study.pick((1, 3), (1, 2, 4, 8)):
                for seed in range(study.pick(1, 3)):
                    key = {"kind": kind, "c": c, "depth": depth, "seed": seed}
                    key |= {"n": n, "d": d, "heads": heads}
                    yield key, lambda key=key: _errors(study, **key)


def _errors(
    study: Study, kind: str, c: float, depth: int, seed: int, n: int, d: int, heads: int
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)

    def weight() -> Tensor:
        return torch.randn(d, d, generator=gen, dtype=torch.float64) / d**0.5

    def block() -> nn.Module:
        if kind == "L2":
            layer = L2Attention(weight(), weight(), weight(), heads=heads)
            return ContractiveAttention(layer, c)
        # Folding c into the values leaves one function to invert.
        return DotProduct(weight(), weight(), c * weight(), weight(), heads=heads)

    x = torch.randn(study.pick(2, 4), n, d, generator=gen, dtype=torch.float64)
    with torch.no_grad():
        blocks, y, slopes = [block() for _ in range(depth)], x, []
        for g in blocks:
            slopes.append(top_singular(linearise(g, y[0])).sigma)
            y = y + g(y)
        by_steps = {k: _error(blocks, y, x, k, mixed=False) for k in _steps(study)}
        mixed = {k: _error(blocks, y, x, k, mixed=True) for k in _steps(study)}
    return {
        "steps": list(by_steps),
        "error": list(by_steps.values()),
        "mixed": list(mixed.values()),
        "sigma": max(slopes),
    }


def _error(blocks: list[nn.Module], y: Tensor, x: Tensor, steps: int, *, mixed: bool) -> float:
    """The largest entry of ``x`` found less ``x``, each block inverted in so many steps."""
    for g in reversed(blocks):
        y = solve(g, y, tol=0.0, max_steps=steps, accelerate=mixed).x
    return float((y - x).abs().max())


def _steps(study: Study) -> tuple[int, ...]:
    return study.pick((1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))


def _worst(rows: list[Record], key: str, at: int) -> float:
    return max(r[key][at] for r in rows)


def _draw(study: Study, found: list[Record]) -> None:
    depths = sorted({r["depth"] for r in found})
    panels = []
    for c in _CONSTANTS:
        series = []
        for kind, name in _KINDS.items():
            for depth in (depths[0], depths[-1]):
                rows = chosen(found, kind=kind, c=c, depth=depth)
                points = tuple(
                    (k, _worst(rows, "error", at)) for at, k in enumerate(rows[0]["steps"])
                )
                blocks = "1 block" if depth == 1 else f"{depth} blocks"
                series.append(Series(f"{name}, {blocks}", points))
        panels.append(
            Panel(f"c = {c}", tuple(series), x="steps per block", y="largest error of an entry")
        )
    study.draw("invertibility", "Error of the inverse against its steps", panels)


def _findings(study: Study, found: list[Record]) -> Findings:
    lines, last = [], len(found[0]["steps"]) - 1
    for kind, name in _KINDS.items():
        for c in _CONSTANTS:
            for depth in sorted({r["depth"] for r in found}):
                rows = chosen(found, kind=kind, c=c, depth=depth)
                lines.append(
                    (
                        name,
                        str(c),
                        str(depth),
                        number(max(r["sigma"] for r in rows)),
                        _first(rows, "error"),
                        _first(rows, "mixed"),
                        f"{_worst(rows, 'error', last):.1e}",
                        f"{_worst(rows, 'mixed', last):.1e}",
                    )
                )
    steps = found[0]["steps"][-1]
    l2, dot = (chosen(found, kind=kind) for kind in _KINDS)
    slope = max(r["sigma"] / r["c"] for r in l2)
    columns = (
        "attention",
        "c",
        "blocks",
        "largest sigma of a block",
        f"steps to {_BACK:.0e}",
        "with mixing",
        f"error after {steps}",
        "with mixing",
    )
    lost = sum(r["error"][-1] > _BACK for r in dot)
    return Findings(
        (
            Claim(
                "contractive L2 attention",
                "invertible by fixed-point iteration for c < 1 (as recalled)",
                f"error after {steps} steps at most {_worst(l2, 'error', last):.1e}, every c and "
                "depth",
            ),
            Claim(
                "dot-product attention",
                "not Lipschitz; the iteration need not converge (as recalled)",
                f"{lost} of {len(dot)} inverses not found to {_BACK:.0e} in {steps} steps; "
                f"largest error {_worst(dot, 'error', last):.1e}",
            ),
            Claim(
                "how much of the constant is used",
                "–",
                f"sigma of a contractive block at random tokens is at most {number(slope)} c",
            ),
        ),
        (Table("Random weights, worst of the seeds and samples", columns, tuple(lines)),),
        (
            "The paper's own figure and settings were not seen: its blocks may have been trained.",
            "Tokens and weights are normal, weights of variance 1 / d; float64. The error is that "
            "of the iterate with the smallest residual: a diverging iteration keeps its best one.",
            "At one c the two are not equally strong: a contractive block uses little of its c, "
            "and a dot product multiplied by c has a sigma above 1.",
            "Mixing is Anderson's, as in `InvertibleResidual.inverse`.",
        ),
    )


def _first(rows: list[Record], key: str) -> str:
    """The fewest steps of those tried after which all errors are those of an inverse."""
    steps = rows[0]["steps"]
    enough = [k for at, k in enumerate(steps) if _worst(rows, key, at) <= _BACK]
    return str(enough[0]) if enough else "never"
