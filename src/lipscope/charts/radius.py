"""Sigma of single rows against their radius, one colour for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import HEIGHT, WIDTH, Data, by_layer, chosen, data
from lipscope.charts.look import dressed


def radius_chart(
    points: Data | None,
    layers: Sequence[str],
    *,
    layer: str | None = None,
    head: int | None = None,
    legend: bool = False,
    width: int | str = WIDTH,
    height: int = HEIGHT,
) -> alt.LayerChart:
    """Sigma against the radius, both logarithmic; larger points are longer windows.

    Args:
        points: Records of single rows, or None where a page puts them in.
        layers: All layers in their order.
        layer: The layer in front; None for all alike.
        head: The head; None for all together.
        legend: Whether the chart has a legend of its own.
        width: Pixels, or "container".
        height: Pixels.

    Returns:
        The chart.
    """
    front = "layer === null || datum.layer === layer"
    base = alt.Chart(data("points", points)).transform_filter(
        "datum.head === head && datum.radius > 0 && datum.sigma > 0"
    )
    scale = alt.Scale(type="log", nice=False, padding=12)
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap=True)
    dots = base.mark_circle(cursor="pointer").encode(
        x=alt.X("radius:Q", title="radius: largest token norm", scale=scale, axis=axis),
        y=alt.Y("sigma:Q", title="sigma", scale=scale, axis=axis),
        size=alt.Size("n:Q", legend=None, scale=alt.Scale(range=[18, 90])),
        color=by_layer(layers, legend=legend, symbol="circle"),
        opacity=alt.when(front).then(alt.value(0.65)).otherwise(alt.value(0.07)),
        tooltip="i:Q",
    )
    chart = alt.LayerChart(layer=[dots]).add_params(*chosen(layer, head))
    return dressed(chart.properties(width=width, height=height))
