"""How much of the most sensitive direction one token carries, against the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import GROWS, HEIGHT, WIDTH, Data, by_layer, chosen, data
from lipscope.charts.look import dressed


def share_chart(
    points: Data | None,
    layers: Sequence[str],
    *,
    layer: str | None = None,
    head: int | None = None,
    legend: bool = False,
    width: int | str = WIDTH,
    height: int = HEIGHT,
) -> alt.LayerChart:
    """The share of the top token of single rows, one colour for each layer.

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
    base = alt.Chart(data("points", points)).transform_filter("datum.head === head")
    dots = base.mark_circle(cursor="pointer").encode(
        x=alt.X("n:Q", title=GROWS, scale=alt.Scale(type="log", padding=12)),
        y=alt.Y("share:Q", title="share of the top token", scale=alt.Scale(domain=[0, 1])),
        color=by_layer(layers, legend=legend, symbol="circle"),
        opacity=alt.when(front).then(alt.value(0.65)).otherwise(alt.value(0.07)),
        tooltip="i:Q",
    )
    chart = alt.LayerChart(layer=[dots]).add_params(*chosen(layer, head))
    return dressed(chart.properties(width=width, height=height))
