"""Figure 2: gamma of every head, times the squared radius of its layer's input on text."""

from __future__ import annotations

import math
import statistics

from lipscope import DotProduct, InputError, LayerAtInput
from lipscope.charts import Panel
from lipscope.theorems import eigen_directions, heads_of, star_direction
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, curve, grouped, level, middle

_LENGTHS = (128, 512, 4096)


@experiment("castin2024/figure2", models=("minilm", "smollm2", "random:gpt2"))
def figure2(study: Study) -> None:
    """How Smooth Is Attention?, Figure 2: the scaling factor on real data."""
    found = [record for source in study.sources() for record in _factors_of(study, source)]
    _draw_heads(study, found)
    heads = _over_texts(found)
    for model, mine in grouped(heads, "model"):
        positive = _positive(mine)
        study.claim(
            f"{model}: γR² of a head",
            "of the order of 10² to 10³ (authors' slides, January 2025; the paper's own numbers "
            "were not legible)",
            f"median {middle(positive, 1)}; {len(mine) - len(positive)} of {len(mine)} heads have "
            "no positive γ",
        )
        study.claim(
            f"{model}: γ*R², which needs no real eigenvalue",
            "γ* ≥ γ (derived here)",
            f"median {middle((r['star'] for r in mine), 1)}; "
            f"{sum(100 <= r['star'] <= 1000 for r in mine)} of {len(mine)} in 10² to 10³",
        )
        study.claim(
            f"{model}: heads for which n - 1 ≤ e^(2γR²)",
            "always satisfied in practice (Section 3.2)",
            ", ".join(f"{_holding(mine, n):.1%} at n = {n:,}" for n in _LENGTHS),
        )
    lines = [
        (
            *(*where, f"{mine[0]['radius']:.1f}", middle(positive := _positive(mine), 1)),
            f"{len(mine) - len(positive)} of {len(mine)}",
            *(f"{_holding(mine, n):.0%}" for n in _LENGTHS),
        )
        for where, mine in grouped(heads, "model", "layer")
    ]
    columns = ("model", "layer", "R", "γR², median and range", "heads without positive γ")
    holds = (f"condition holds at n = {n:,}" for n in _LENGTHS)
    study.table("By layer", lines, (*columns, *holds))
    study.remark(
        *study.not_run("bert-base-uncased"),
        "R is the root mean square token norm of the layer's input, as in the scripts. Each "
        "head counts once, with the mean of R² over the texts; the figure shows them apart.",
        "With a rotary embedding A is taken at equal positions.",
    )


def _over_texts(found: list[Record]) -> list[Record]:
    """One record a head: means over the texts."""
    keys = ("radius", "factor", "star")
    return [
        one[0] | {key: one[0][key] and statistics.fmean(r[key] for r in one) for key in keys}
        for _, one in grouped(found, "model", "layer", "head")
    ]


def _positive(heads: list[Record]) -> list[float]:
    return [r["factor"] for r in heads if r["factor"] is not None]


def _factors_of(study: Study, source: Source) -> list[Record]:
    model, asked = source.model, source.asking(128, study.pick(2, 5))
    try:
        layers = dict(grouped(layers_of(model, layers="all", **asked), "layer"))
    except InputError:
        return []
    return study.values(
        f"gamma-{model.name}-{source.name}",
        [
            {"model": model.name, "text": source.name, "layer": layer, "head": head}
            for layer, mine in layers.items()
            for head in range(mine[0].attention.num_heads)
        ],
        lambda layer, head, **_: _head_factor(layers[layer], head),
    )


def _head_factor(mine: list[LayerAtInput], head: int) -> Record:
    layer = mine[0].attention
    assert isinstance(layer, DotProduct)
    radius = statistics.fmean(float(c.x.square().sum(1).mean().sqrt()) for c in mine)
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


def _holding(found: list[Record], n: int) -> float:
    """Share of all heads, those without positive gamma counted as failing."""
    least = math.log(n - 1) / 2
    return sum((r["factor"] or 0.0) >= least for r in found) / len(found)


def _draw_heads(study: Study, found: list[Record]) -> None:
    panels = []
    for (model, text), mine in grouped(found, "model", "text"):
        ends = 0, max(r["layer"] for r in mine)
        heads = curve("γR², one point for each head", mine, "layer", "factor", "points")
        levels = {f"n - 1 = e^(2γR²) at n = {n:,}": math.log(n - 1) / 2 for n in _LENGTHS}
        edges = (level(name, y, ends) for name, y in levels.items())
        panels.append(Panel(f"{model}, {text}", (heads, *edges), "layer", "γ R²", log_x=False))
    study.draw("figure2", "Figure 2: the scaling factor", panels, columns=2)
