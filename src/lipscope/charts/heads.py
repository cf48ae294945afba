"""A heat map of layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import altair as alt

from lipscope.charts.axes import Data, Frame, data
from lipscope.charts.look import INK
from lipscope.charts.pieces import KINDS

Quantity = Literal["sigma", "relative", "share"]
TITLES: dict[Quantity, str] = {
    "sigma": "sigma",
    "relative": "relative",
    "share": "share of the top token",
}
SHAPES = dict(zip(KINDS, ("square", "circle", "triangle-up", "diamond", "cross"), strict=True))
_CELL = 26  # pixels


def heads_chart(
    cells: Data | None, layers: Sequence[str], frame: Frame, *, quantity: Quantity = "sigma"
) -> alt.LayerChart:
    """Sigma, relative or the share of the top token, by layer and head, at one length.

    Args:
        cells: Records with ``layer, head, sigma, relative, share`` and ``top``, the kind of token
            that most often is on top (or null), or None where a page puts them in.
        layers: All layers in their order.
        frame: The layer that is marked, with its head, the width, and whether the kinds of tokens
            have a legend.
        quantity: What the colour says; logarithmic but for shares.

    Returns:
        The chart.
    """
    share = quantity == "share"
    base = alt.Chart(data("cells", cells)).transform_filter(f"isValid(datum.{quantity})")
    x = alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, orient="bottom"))
    y = alt.Y("layer:N", sort=list(layers), title="layer", scale=alt.Scale(reverse=False))
    scale = (
        alt.Scale(scheme="viridis", domain=[0, 1])
        if share
        else alt.Scale(scheme="viridis", type="log", nice=False)
    )
    key = alt.Legend(
        title=TITLES[quantity],
        format=".0%" if share else "~g",
        orient="top",  # beside few layers it would be longer than the map
        gradientLength=220,
        titleLimit=0,
        tickCount=4,
    )
    colour = alt.Color(f"{quantity}:Q", scale=scale, legend=key)
    cell = base.mark_rect(cornerRadius=2, cursor="pointer").encode(
        x=x, y=y, color=colour, tooltip="m:Q"
    )
    # Small and in the middle: the colour around it says the value.
    kinds = alt.Legend(
        title="kind of the top token in most windows",
        orient="top",
        titleLimit=0,
        symbolType="square",
        symbolFillColor=INK,
        symbolOpacity=1,
        symbolSize=60,
        values=list(SHAPES),
    )
    shape = alt.Shape(
        "top:N",
        scale=alt.Scale(domain=[*SHAPES], range=[*SHAPES.values()]),
        legend=kinds if frame.legend else None,
    )
    kind = (
        base.transform_filter("isValid(datum.top)")
        .mark_point(size=54, fill="#ffffff", strokeWidth=1, opacity=1)
        .encode(x=x, y=y, shape=shape, stroke=alt.value(INK), tooltip="m:Q")
    )
    mark = (
        base.transform_filter("datum.layer === layer && datum.head === head")
        .mark_rect(fill=None, stroke=INK, strokeWidth=2.4, cornerRadius=2)
        .encode(x=x, y=y)
    )
    return frame.around([cell, kind, mark], *frame.chosen, height=alt.Step(_CELL))
