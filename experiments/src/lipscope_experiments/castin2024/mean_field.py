"""Proposition 3.6: two unbalanced clusters, to 10 million tokens, against e^(gamma R²)."""

from __future__ import annotations

import math
from typing import Any

import torch

from lipscope import DotProduct
from lipscope.attacks import weighted_two_atoms
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope.theorems import NotApplicableError, catalogue, eigen_directions, evaluate, heads_of
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table

_MOST = 1e7  # tokens
_SIGNS = {"A = -I": -1.0, "A = +I": 1.0}
_BOUNDS = {
    "Theorem 3.5": "geshkovski_mean_field",
    "mean-field bound derived here": "mean_field",
    "Theorem 3.3 at this n": "castin_thm_3_3",
}


@experiment(
    "castin2024/mean-field",
    title="How Smooth Is Attention?, Proposition 3.6: the mean-field regime",
    cite="castin2024",
    reads_text=False,
)
def mean_field(study: Study) -> Findings:
    """Sigma of the two clusters exactly (weighted tokens), against R, and against n at one R."""
    steps = study.pick(8, 24)
    along = study.values(
        "against-R", [_job(name, k / steps) for name in _SIGNS for k in range(1, steps + 1)]
    )
    fine = study.pick(2, 6)
    counts = sorted({max(2, round(10 ** (k / fine))) for k in range(1, 1 + fine * 7)})
    across = study.values("against-n", [_count_job(n) for n in counts])
    _draw(study, along, across)
    last = {name: [r for r in along if r["layer"] == name][-1] for name in _SIGNS}
    edge = [(r["n"], r["sigma"]) for r in across]
    early = slope_of((n, s) for n, s in edge if 10 <= n <= 0.1 * _edge())
    late = slope_of((n, s) for n, s in edge if n >= 100 * _edge())
    top = max(edge, key=lambda pair: pair[1])
    return Findings(
        (
            *(
                Claim(
                    f"sigma / ((γ/2) R² e^(γR²)), {name}",
                    "tends to 1 (Proposition 3.6); like 1 + 1/(γR²) (derived here)",
                    f"{number(r['sigma'] / r['reference'])} at R = {number(r['radius'], 3)}, "
                    f"n = {r['n']:,}; 1 + 1/(γR²) = {number(1 + 1 / r['t'])}",
                )
                for name, r in last.items()
            ),
            Claim(
                "upper bounds there, divided by sigma",
                "almost tight up to a constant factor in the exponential (Section 3.2)",
                "; ".join(
                    f"{name}: "
                    + ", ".join(
                        f"{label} {number(r[key] / r['sigma'], 3)}"
                        for label, key in _BOUNDS.items()
                    )
                    for name, r in last.items()
                ),
            ),
            Claim(
                "where the growth like √n ends (A = -I, R = 2)",
                "up to n of the order of e^(2γR²)",
                f"exponent {early:.3f} below a tenth of e^(2γR²) = {_edge():.0f}, largest sigma at "
                f"n = {top[0]:,}, exponent {late:.3f} beyond a hundred times",
            ),
        ),
        (_table(along),),
        (
            "Weighted tokens: exact for any n, moves of equal tokens against each other included.",
            "For A = +I, γ = 1/8 and the exponent of the upper bounds is eight times larger.",
        ),
    )


_RADIUS = 2.0


def _edge() -> float:
    return math.exp(2 * _RADIUS**2)


def _layer(sign: float) -> DotProduct:
    eye = torch.eye(2, dtype=torch.float64)
    return DotProduct(eye, sign * eye, eye, scale=1.0)


def _job(name: str, share: float) -> ValueJob:
    layer = _layer(_SIGNS[name])
    gamma = eigen_directions(heads_of(layer)[0])[0].gamma
    radius = share * math.sqrt(math.log(_MOST) / (2 * gamma))

    def compute() -> Record:
        found = weighted_two_atoms(layer, radius=radius)
        t = gamma * radius**2
        return {
            "t": t,
            "n": found.num_tokens,
            "sigma": found.sigma,
            "moving": found.moving,
            "reference": t / 2 * math.exp(t),
            **_bounds(layer, found.num_tokens, radius),
        }

    return {"layer": name, "radius": radius}, compute


def _bounds(layer: DotProduct, num_tokens: int, radius: float) -> dict[str, float | None]:
    known = {one.name: one for one in catalogue()}
    found: dict[str, float | None] = {}
    for name in _BOUNDS.values():
        try:
            found[name] = evaluate(known[name], layer, num_tokens=num_tokens, radius=radius)
        except NotApplicableError:
            found[name] = None
    return found


def _count_job(n: int) -> ValueJob:
    def compute() -> Record:
        found = weighted_two_atoms(_layer(-1.0), radius=_RADIUS, num_tokens=n)
        return {"sigma": found.sigma, **_bounds(_layer(-1.0), n, _RADIUS)}

    return {"n": n, "radius": _RADIUS}, compute


def _draw(study: Study, along: list[Record], across: list[Record]) -> None:
    panels = []
    for name in _SIGNS:
        mine = [r for r in along if r["layer"] == name]
        curves = [("sigma", "sigma", "points"), ("(γ/2) R² e^(γR²)", "reference", "line")]
        curves += [(label, key, "dashes") for label, key in _BOUNDS.items()]
        panels.append(Panel(name, _series(mine, "radius", curves), x="radius R"))
    curves = [("sigma", "sigma", "points"), *((k, v, "dashes") for k, v in _BOUNDS.items())]
    panels.append(Panel(f"A = -I, R = {_RADIUS}", _series(across, "n", curves)))
    study.draw("mean-field", "Two unbalanced clusters", panels, columns=3)


def _series(
    records: list[Record], x: str, curves: list[tuple[str, str, Any]]
) -> tuple[Series, ...]:
    return tuple(
        Series(name, tuple((r[x], r[key]) for r in records if r[key] is not None), kind)
        for name, key, kind in curves
    )


def _table(along: list[Record]) -> Table:
    columns = ("layer", "R", "n", "sigma", "sigma / ((γ/2) R² e^(γR²))", *_BOUNDS)
    lines = tuple(
        (
            r["layer"],
            number(r["radius"], 3),
            f"{r['n']:,}",
            number(r["sigma"]),
            number(r["sigma"] / r["reference"]),
            *(number(r[key]) for key in _BOUNDS.values()),
        )
        for r in along
    )
    return Table("V = I, one token against all others", columns, lines)
