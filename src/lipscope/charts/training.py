"""Sigma against training step, one colour for each layer, one brought forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from lipscope.charts.axes import Data, Frame, by_layer, data, in_front, up


def training_chart(
    points: Data | None,
    means: Data | None,
    layers: Sequence[str],
    frame: Frame,
    *,
    turn: float | None = None,
) -> alt.LayerChart:
    """Geometric means of sigma at every checkpoint, with their intervals.

    Bars reach from the lower end of the 95 % interval of the mean of log sigma over windows to
    the upper end of that of log upper. Small points are single windows of the layer in front.

    Args:
        points: Records of single rows with ``layer, head, step, sigma``, or None where a page
            puts them in.
        means: Records with ``layer, head, step, sigma, low, high`` at one length.
        layers: All layers in their order.
        frame: What is in front, the axes and the size.
        turn: Step at which the axis turns from linear to logarithmic; None for a linear one.

    Returns:
        The chart.
    """
    span: dict[str, Any] = {"domain": alt.ExprRef("axes.x"), "nice": False}
    linear = alt.Scale(type="linear", zero=False, **span)
    x = alt.X(
        "step:Q",
        title="training step",
        scale=linear if turn is None else alt.Scale(type="symlog", constant=turn, **span),
        axis=alt.Axis(
            values=alt.ExprRef("axes.xticks"), format=",d", labelOverlap=True, grid=False
        ),
    )
    y, colour = up("sigma:Q", "sigma"), by_layer(layers, legend=frame.legend)
    mean = alt.Chart(data("means", means)).transform_filter("datum.head === head")
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": in_front(0.95, 0.16)}
    bars = mean.mark_rule(strokeWidth=1.4).encode(
        x=x,
        color=colour,
        opacity=in_front(0.5, 0.06),
        y=up("low:Q", "sigma"),
        y2="high:Q",
    )
    lines = mean.mark_line(strokeWidth=2).encode(**place, y=y)
    dots = mean.mark_circle(size=40, cursor="pointer").encode(**place, y=y, tooltip="t:Q")
    single = (
        alt.Chart(data("points", points))
        .transform_filter("datum.head === head && datum.layer === layer")
        .mark_circle(size=14, cursor="pointer", opacity=0.5)
        .encode(x=x, y=y, color=colour, tooltip="i:Q")
    )
    return frame.around([bars, lines, single, dots], frame.ends, *frame.chosen)
