"""A quantity against the number of tokens, one colour for each layer, one brought forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import altair as alt

from lipscope.charts.axes import (
    FRONT,
    Data,
    Frame,
    across,
    by_layer,
    data,
    guides,
    in_front,
    training_end,
    up,
)

Grown = Literal["sigma", "radius", "rank"]
TITLES: dict[Grown, str] = {
    "sigma": "sigma",
    "radius": "radius: largest token norm",
    "rank": "stable rank (Frobenius norm / sigma)²",
}


def layers_chart(
    points: Data | None,
    means: Data | None,
    layers: Sequence[str],
    frame: Frame,
    *,
    grown: Grown = "sigma",
) -> alt.LayerChart:
    """Sigma, radius or stable rank against the number of tokens, both logarithmic.

    Points are single rows, lines run through geometric means. Sigma has bars up to `upper` and
    guides like n^(1/4) and n^(1/2).

    Args:
        points: Records of single rows, or None where a page puts them in.
        means: Records of geometric means.
        layers: All layers in their order.
        frame: What is in front, the axes (``y`` is of sigma and used for it only) and the size.
        grown: What grows.

    Returns:
        The chart.
    """
    sigma = grown == "sigma"
    x, y = across(), up("sigma:Q", "sigma") if sigma else _free(grown)
    colour = by_layer(layers, legend=frame.legend)
    shown = f"datum.head === head && datum.{grown} > 0"
    mean = alt.Chart(data("means", means)).transform_filter(shown)
    lines = mean.mark_line(strokeWidth=2).encode(
        x=x,
        y=y,
        color=colour,
        detail=["layer:N", "kind:N"],
        opacity=in_front(0.95, 0.16),
    )
    base = (
        alt.Chart(data("points", points))
        .transform_filter(shown)
        .transform_calculate(
            at="datum.n * pow(axes.room, datum.order)",
            top="isValid(datum.upper) ? datum.upper : datum.sigma",
        )
    )
    at = across("at:Q")
    bars = (
        base.transform_filter(FRONT)
        .mark_rule(strokeWidth=1, opacity=0.35)
        .encode(x=at, y=y, y2="top:Q", color=colour)
    )
    dots = base.mark_circle(size=20, cursor="pointer").encode(
        x=at,
        y=y,
        color=colour,
        opacity=in_front(0.7, 0.06),
        tooltip="i:Q",
    )
    behind = [*guides(mean, x, y), bars] if sigma else []
    return frame.around([*training_end(mean, x), *behind, lines, dots], frame.ends, *frame.chosen)


def _free(grown: Grown) -> alt.Y:
    """A logarithmic axis as long as its values."""
    return alt.Y(
        f"{grown}:Q",
        title=TITLES[grown],
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(format="~g", tickCount=5, labelOverlap=True),
    )
