"""Figure 2: the scaling factor gamma R² of every head on real data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from lipscope import DotProduct, InputError, LayerAtInput
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel
from lipscope.theorems import eigen_directions, heads_of, star_direction
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, grouped, middle
from lipscope_experiments.texts import Text

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
    heads = _heads(found)
    return Findings(
        tuple(c for m, mine in grouped(heads, "model") for c in _claims(m, mine)),
        (_table(heads),),
        (
            *study.not_run("bert-base-uncased"),
            "R is the root mean square token norm of the layer's input, as in the scripts. Each "
            "head counts once, with the mean of R² over the texts; the figure shows them apart.",
            "With a rotary embedding A is taken at equal positions.",
        ),
    )


def _heads(found: list[Record]) -> list[Record]:
    """One record a head: means over the texts."""
    heads: dict[tuple[Any, ...], list[Record]] = {}
    for r in found:
        heads.setdefault((r["model"], r["layer"], r["head"]), []).append(r)
    return [
        one[0]
        | {
            "radius": statistics.fmean(r["radius"] for r in one),
            "factor": None
            if one[0]["factor"] is None
            else statistics.fmean(r["factor"] for r in one),
            "star": statistics.fmean(r["star"] for r in one),
        }
        for one in heads.values()
    ]


def _claims(model: str, heads: list[Record]) -> Iterator[Claim]:
    positive = [r["factor"] for r in heads if r["factor"] is not None]
    shares = ", ".join(f"{_share(heads, n):.1%} at n = {n:,}" for n in _LENGTHS)
    slides = (
        "of the order of 10² to 10³ (authors' slides, January 2025; the paper's own numbers were "
        "not legible)"
    )
    yield Claim(
        f"{model}: γR² of a head",
        slides,
        f"median {middle(positive, 1)}; {len(heads) - len(positive)} of {len(heads)} heads have "
        "no positive γ",
    )
    yield Claim(
        f"{model}: γ*R², which needs no real eigenvalue",
        "γ* ≥ γ (derived here)",
        f"median {middle((r['star'] for r in heads), 1)}; "
        f"{sum(100 <= r['star'] <= 1000 for r in heads)} of {len(heads)} in 10² to 10³",
    )
    yield Claim(
        f"{model}: heads for which n - 1 ≤ e^(2γR²)",
        "always satisfied in practice (Section 3.2)",
        shares,
    )


def _of(study: Study, loaded: LoadedModel, text: Text) -> list[Record]:
    """Records of all heads of a model on one text."""
    where = f"gamma-{loaded.name}-{text.name}"
    try:
        some = layers_of(
            loaded, text.content, layers="all", lengths=[128], samples=study.pick(2, 5)
        )
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


def _job(c: LayerAtInput, head: int, radius: float, text: str) -> ValueJob:
    layer = c.attention
    assert isinstance(layer, DotProduct)

    def compute() -> Record:
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

    return {"model": c.model.name, "text": text, "layer": c.layer, "head": head}, compute


def _share(found: list[Record], n: int) -> float:
    """Share of all heads, those without positive gamma counted as failing."""
    least = math.log(n - 1) / 2
    return sum((r["factor"] or 0.0) >= least for r in found) / len(found)


def _draw(study: Study, found: list[Record]) -> None:
    panels = []
    for (model, text), mine in grouped(found, "model", "text"):
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


def _table(heads: list[Record]) -> Table:
    lines = []
    for (model, layer), mine in grouped(heads, "model", "layer"):
        factors = [r["factor"] for r in mine if r["factor"] is not None]
        lines.append(
            (
                model,
                str(layer),
                f"{mine[0]['radius']:.1f}",
                middle(factors, 1),
                f"{len(mine) - len(factors)} of {len(mine)}",
                *(f"{_share(mine, n):.0%}" for n in _LENGTHS),
            )
        )
    columns = ("model", "layer", "R", "γR², median and range", "heads without positive γ")
    wide = tuple(f"condition holds at n = {n:,}" for n in _LENGTHS)
    return Table("By layer", (*columns, *wide), tuple(lines))
