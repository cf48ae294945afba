"""Figures 4 to 6: sigma and the radius against n, and sigma against the radius, by windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lipscope import Measurement, Rows
from lipscope.charts import Panel, power_law
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.castin2024.protocol import as_in_the_paper
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import chosen, curve, exponent, middle

_LEAST = 1.1  # range of the radius below which a slope in it says nothing


@experiment("castin2024/figure4", models=("minilm", "random:gpt2", "dinov2"))
def figure4(study: Study) -> None:
    """How Smooth Is Attention?, Figures 4 to 6: learnt positions, radius and sigma."""
    places = [
        (f"{where}, layer {layer}", chosen(rows, layer=layer), fit)
        for where, rows in _windows_or_pictures(study)
        for (_, layer, *_), fit in rows.growth().items()
    ]
    shown: dict[str, tuple[str, list[Measurement]]] = {}  # the middle layer on the first text
    for name, rows, _ in places:
        if rows[0].layer:
            shown.setdefault(rows[0].model, (name, rows))
    panels = []
    for name, rows in shown.values():
        norms = curve("radius", rows, "num_tokens", "radius_rms", "points")
        sigma = curve("sigma", rows, "num_tokens", "sigma", "points")
        both = curve("sigma", rows, "radius_rms", "sigma", "points")
        panels += [
            Panel(name, (norms,), y="radius"),
            Panel(name, (sigma, power_law(sigma.points, 0.5, "~ n^(1/2)"))),
            Panel(name, (both,), x="radius"),
        ]
    study.draw("figure4", "Figures 4 to 6: radius and sigma", panels, columns=3)
    radius = [slope_of((r.num_tokens, r.radius_rms or 0.0) for r in rows) for _, rows, _ in places]
    across = [_sigma_in_radius(rows) for _, rows, _ in places]
    steep = [slope for slope in across if math.isfinite(slope)]
    lines = tuple(
        (name, f"{min(lengths)} to {max(lengths)}", f"{r:.3f}", exponent(fit), number(a, 3))
        for (name, rows, fit), r, a in zip(places, radius, across, strict=True)
        for lengths in [[row.num_tokens for row in rows]]
    )
    columns = ("where", "n", "radius in n", "sigma in n", "sigma in the radius, at the largest n")
    study.claim(
        "radius against n",
        "grows with n in pretrained GPT-2, by its learnt positions (Appendix E.2)",
        f"exponents {middle(radius, 3)}",
    )
    study.claim(
        "sigma against the radius at one n",
        "sigma ≤ C R² √n (Theorem 3.3)",
        f"least squares, without an interval: {middle(steep)} in {len(steep)} of {len(across)} "
        f"layers; in the others the radius varies by less than {_LEAST - 1:.0%}",
    )
    study.table("Exponents", lines, columns)
    study.remark(
        *study.not_run("gpt2"),
        "The statement is about pretrained GPT-2. The models here have learnt positions, too, "
        "but none of them has a radius that grows so.",
        "The figure shows the middle layer of each model, of texts the first. Its right panels "
        "pool all n, along which radius and sigma both grow: they do not show how sigma grows "
        "with the radius at one n.",
        "Pictures: the same ones at every resolution; at any but the model's own the "
        "learnt positions are interpolated.",
    )


def _windows_or_pictures(study: Study) -> Iterator[tuple[str, Rows]]:
    """Rows of every model on every text, or on pictures of sides from 4 to 32 patches."""
    for one in study.sources():
        if one.sees:
            sides = study.pick([4, 8, 16], [4, 6, 8, 12, 16, 24, 32])
            asked = {**one.asked, "resolutions": [one.model.config.patch_size * k for k in sides]}
            asked["samples"] = None if study.images != "random" else study.pick(3, 10)
        else:
            asked = as_in_the_paper(study, one)
        asked["layers"] = one.first_and_middle
        yield one.where, study.measure(one.where, one.model, **asked)


def _sigma_in_radius(rows: Sequence[Measurement]) -> float:
    """Slope of sigma in the radius over the windows of the largest n; NaN if it hardly varies."""
    last = chosen(rows, num_tokens=max(row.num_tokens for row in rows))
    norms = [row.radius_rms or 0.0 for row in last]
    if max(norms) < _LEAST * min(norms):
        return math.nan
    return slope_of((row.radius_rms or 0.0, row.sigma or 0.0) for row in last)
