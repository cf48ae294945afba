"""Figure 2: the scaling factor gamma R² of every head on real data."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lipscope.attention import DotProduct
from lipscope.charts.panels import Panel, Series
from lipscope.engine.capture import Captured, captures
from lipscope.errors import InputError
from lipscope.experiments.experiment import Study, ValueJob, experiment
from lipscope.experiments.findings import Claim, Findings, Table, middle
from lipscope.experiments.texts import Text
from lipscope.models import LoadedModel
from lipscope.theorems import heads_of
from lipscope.theorems.directions import eigen_directions, star_direction

_LENGTHS = (128, 512, 4096)


@experiment(
    "castin2024/figure2",
    title="How Smooth Is Attention?, Figure 2: the scaling factor on real data",
    cite="castin2024",
    models=("minilm", "smollm2", "random:gpt2"),
    quick_models=("minilm",),
)
def figure2(study: Study) -> Findings:
    """Gamma of every head and the radius of its layer's input on text."""
    found = [record for place in study.places() for record in _of(study, *place)]
    _draw(study, found)
    positive = [r["factor"] for r in found if r["factor"] is not None]
    missing = sum(r["factor"] is None for r in found)
    shares = ", ".join(f"{_share(found, n):.1%} at n = {n:,}" for n in _LENGTHS)
    return Findings(
        (
            Claim(
                "γR² of a head",
                "of the order of 10² to 10³ (authors' slides, January 2025; the paper's own "
                "numbers were not legible)",
                f"median {middle(positive, 1)}; {missing} of {len(found)} heads have no positive γ",
            ),
            Claim(
                "heads for which n - 1 ≤ e^(2γR²)",
                "always satisfied in practice (Section 3.2)",
                shares,
            ),
            Claim(
                "γ* in place of γ (no real eigenvalue needed)",
                "γ* ≥ γ (derived here)",
                f"γ*R² {middle((r['star'] for r in found), 1)}",
            ),
        ),
        (_table(found),),
        (
            *study.not_run("bert-base-uncased"),
            "R is the root mean square token norm of the layer's input, as in the scripts.",
            "With a rotary embedding A is taken at equal positions.",
        ),
    )


def _of(study: Study, loaded: LoadedModel, text: Text) -> list[dict[str, Any]]:
    """Records of all heads of a model on one text."""
    where = f"gamma-{loaded.name}-{text.name}"
    try:
        some = captures(loaded, text.content, layers="all", lengths=[128], samples=study.pick(2, 5))
        held = list(some)
    except InputError:
        return []
    layers = dict.fromkeys(c.layer for c in held)
    jobs = []
    for layer in layers:
        mine = [c for c in held if c.layer == layer]
        radius = statistics.fmean(float(c.x.square().sum(1).mean().sqrt()) for c in mine)
        jobs += [
            _job(mine[0], head, radius, text.name) for head in range(mine[0].attention.num_heads)
        ]
    return study.values(where, jobs)


def _job(c: Captured, head: int, radius: float, text: str) -> ValueJob:
    layer = c.attention
    assert isinstance(layer, DotProduct)

    def compute() -> dict[str, Any]:
        one = heads_of(layer)[head]
        ways, star = eigen_directions(one), star_direction(one)
        gamma = ways[0].gamma if ways else None
        return {
            "radius": radius,
            "gamma": gamma,
            "case": ways[0].case if ways else None,
            "factor": None if gamma is None else gamma * radius**2,
            "star": 0.0 if star is None else star.gamma * radius**2,
        }

    return {"model": c.model, "text": text, "layer": c.layer, "head": head}, compute


def _share(found: list[dict[str, Any]], n: int) -> float:
    """Share of all heads, those without positive gamma counted as failing."""
    least = math.log(n - 1) / 2
    return sum((r["factor"] or 0.0) >= least for r in found) / len(found)


def _draw(study: Study, found: list[dict[str, Any]]) -> None:
    panels = []
    for model, text in dict.fromkeys((r["model"], r["text"]) for r in found):
        mine = [r for r in found if (r["model"], r["text"]) == (model, text)]
        last = max(r["layer"] for r in mine)
        heads = tuple((r["layer"], r["factor"]) for r in mine if r["factor"] is not None)
        edges = [
            Series(
                f"n - 1 = e^(2γR²) at n = {n:,}",
                tuple((x, math.log(n - 1) / 2) for x in (0, last)),
                "dashes",
            )
            for n in _LENGTHS
        ]
        panels.append(
            Panel(
                f"{model}, {text}",
                (Series("γR², one point for each head", heads, "points"), *edges),
                x="layer",
                y="γ R²",
                log_x=False,
            )
        )
    study.draw("figure2", "Figure 2: the scaling factor", panels, columns=2)


def _table(found: list[dict[str, Any]]) -> Table:
    lines = []
    for key in dict.fromkeys((r["model"], r["text"], r["layer"]) for r in found):
        mine = [r for r in found if (r["model"], r["text"], r["layer"]) == key]
        factors = [r["factor"] for r in mine if r["factor"] is not None]
        lines.append(
            (
                f"{key[0]}, {key[1]}",
                str(key[2]),
                f"{mine[0]['radius']:.1f}",
                middle(factors, 1),
                f"{len(mine) - len(factors)} of {len(mine)}",
                *(f"{_share(mine, n):.0%}" for n in _LENGTHS),
            )
        )
    columns = ("model, text", "layer", "R", "γR², median and range", "heads without positive γ")
    wide = tuple(f"condition holds at n = {n:,}" for n in _LENGTHS)
    return Table("By layer", (*columns, *wide), tuple(lines))
