"""Proposition 3.6: two unbalanced clusters to 10 million tokens, exactly, against R and n."""

from __future__ import annotations

import math

from lipscope.attacks import weighted_two_atoms
from lipscope.charts import Panel
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope.theorems import eigen_directions, heads_of
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, curve, grouped
from lipscope_experiments.simple_layers import SIGNS, bound_values, multiple

_MOST = 1e7  # tokens
_BOUNDS = {
    "Theorem 3.5": "geshkovski_mean_field",
    "mean-field bound derived here": "mean_field",
    "Theorem 3.3 at this n": "castin_thm_3_3",
}
_NAMES = {name: name for name in _BOUNDS.values()}


@experiment("castin2024/mean-field", reads_text=False)
def mean_field(study: Study) -> None:
    """How Smooth Is Attention?, Proposition 3.6: the mean-field regime."""
    steps = study.pick(8, 24)
    keys = [
        {"layer": name, "radius": k / steps * math.sqrt(math.log(_MOST) / (2 * _gamma(name)))}
        for name in SIGNS
        for k in range(1, steps + 1)
    ]
    along = study.values("against-R", keys, _at_radius)
    fine = study.pick(2, 6)
    counts = sorted({max(2, round(10 ** (k / fine))) for k in range(1, 1 + fine * 7)})
    across = study.values("against-n", grid(n=counts, radius=[_RADIUS]), _at_radius)
    panels = []
    for name, mine in [*grouped(along, "layer"), (f"A = -I, R = {_RADIUS}", across)]:
        x = "radius" if mine is not across else "n"
        series = [curve("sigma", mine, x, "sigma", "points")]
        if mine is not across:
            series.append(curve("(γ/2) R² e^(γR²)", mine, x, "reference"))
        series += [curve(label, mine, x, key, "dashes") for label, key in _BOUNDS.items()]
        words = "number of tokens n" if mine is across else "radius R"
        panels.append(Panel(name, tuple(series), words))
    study.draw("mean-field", "Two unbalanced clusters", panels, columns=3)
    last = {name: mine[-1] for name, mine in grouped(along, "layer")}
    edge = [(r["n"], r["sigma"]) for r in across]
    early = slope_of((n, s) for n, s in edge if 10 <= n <= 0.1 * _edge())
    late = slope_of((n, s) for n, s in edge if n >= 100 * _edge())
    top = max(edge, key=lambda pair: pair[1])
    for name, r in last.items():
        study.claim(
            f"sigma / ((γ/2) R² e^(γR²)), {name}",
            "tends to 1 (Proposition 3.6); like 1 + 1/(γR²) (derived here)",
            f"{number(r['sigma'] / r['reference'])} at R = {number(r['radius'], 3)}, "
            f"n = {r['n']:,}; 1 + 1/(γR²) = {number(1 + 1 / r['t'])}",
        )
    study.claim(
        "upper bounds there, divided by sigma",
        "almost tight up to a constant factor in the exponential (Section 3.2)",
        "; ".join(f"{name}: {_bounds_over_sigma(r)}" for name, r in last.items()),
    )
    study.claim(
        "where the growth like √n ends (A = -I, R = 2)",
        "up to n of the order of e^(2γR²)",
        f"exponent {early:.3f} below a tenth of e^(2γR²) = {_edge():.0f}, largest sigma at "
        f"n = {top[0]:,}, exponent {late:.3f} beyond a hundred times",
    )
    lines = [
        (
            *(r["layer"], number(r["radius"], 3), f"{r['n']:,}", r["sigma"]),
            *(r["sigma"] / r["reference"], *(r[key] for key in _BOUNDS.values())),
        )
        for r in along
    ]
    columns = ("layer", "R", "n", "sigma", "sigma / ((γ/2) R² e^(γR²))", *_BOUNDS)
    study.table("V = I, one token against all others", lines, columns)
    study.remark(
        "Weighted tokens: exact for any n, moves of equal tokens against each other included.",
        "For A = +I, γ = 1/8 and the exponent of the upper bounds is eight times larger.",
    )


_RADIUS = 2.0


def _bounds_over_sigma(r: Record) -> str:
    return ", ".join(f"{label} {number(r[key] / r['sigma'], 3)}" for label, key in _BOUNDS.items())


def _edge() -> float:
    return math.exp(2 * _RADIUS**2)


def _gamma(name: str) -> float:
    return eigen_directions(heads_of(multiple(SIGNS[name], 2))[0])[0].gamma


def _at_radius(radius: float, layer: str = "A = -I", n: int | None = None) -> Record:
    own, t = multiple(SIGNS[layer], 2), _gamma(layer) * radius**2
    found = weighted_two_atoms(own, radius=radius, num_tokens=n)
    return {
        "t": t,
        "n": found.num_tokens,
        "sigma": found.sigma,
        "moving": found.moving,
        "reference": t / 2 * math.exp(t),
        **dict.fromkeys(_NAMES),
        **bound_values(own, found.num_tokens, radius, **_NAMES),
    }
