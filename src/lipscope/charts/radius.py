"""Sigma of single rows against their radius, one colour for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import Data, Frame, by_layer, data, in_front


def radius_chart(points: Data | None, layers: Sequence[str], frame: Frame) -> alt.LayerChart:
    """Sigma against the radius, both logarithmic; larger points are longer windows.

    Args:
        points: Records of single rows, or None where a page puts them in.
        layers: All layers in their order.
        frame: What is in front, and the size.

    Returns:
        The chart.
    """
    base = alt.Chart(data("points", points)).transform_filter(
        "datum.head === head && datum.radius > 0 && datum.sigma > 0"
    )
    scale = alt.Scale(type="log", nice=False, padding=12)
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap=True)
    dots = base.mark_circle(cursor="pointer").encode(
        x=alt.X("radius:Q", title="radius: largest token norm", scale=scale, axis=axis),
        y=alt.Y("sigma:Q", title="sigma", scale=scale, axis=axis),
        size=alt.Size("n:Q", legend=None, scale=alt.Scale(range=[18, 90])),
        color=by_layer(layers, legend=frame.legend, symbol="circle"),
        opacity=in_front(0.65, 0.07),
        tooltip="i:Q",
    )
    return frame.around([dots], *frame.chosen)
