"""A signal of training over steps, one colour for each layer, with the alerts of a monitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from lipscope.charts.axes import FRONT, ORANGE, Data, Frame, by_layer, data
from lipscope.charts.look import INK

_SHOWN = f"{FRONT} || datum.layer === 'all'"


def signals_chart(
    rows: Data | None,
    alerts: Data | None,
    layers: Sequence[str],
    frame: Frame,
    *,
    scale: Literal["log", "linear"] = "linear",
) -> alt.LayerChart:
    """One signal of every layer over the steps of training; triangles and rules are alerts.

    Args:
        rows: Records with ``layer, step, value``, or None where a page puts them in; the layer of
            what the whole model has, such as its loss, is "all".
        alerts: Records with ``layer, step, value``; one without a value is a rule.
        layers: All layers in their order.
        frame: What is in front, and the size.
        scale: Of the signal.

    Returns:
        The chart.
    """
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(domain=alt.ExprRef("axes.x"), nice=False),
        axis=alt.Axis(format=",d", tickMinStep=1, grid=False, labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(type=scale, domain=alt.ExprRef("axes.y"), nice=False, zero=False),
        axis=alt.Axis(format=".4~g", tickCount=5, labelOverlap=True, grid=scale == "linear"),
    )
    whole = alt.when("datum.layer === 'all'").then(alt.value(INK))
    colour = whole.otherwise(by_layer(layers, legend=frame.legend))
    front: Any = alt.when(_SHOWN).then(alt.value(0.95)).otherwise(alt.value(0.12))
    base = alt.Chart(data("rows", rows))
    told = alt.Chart(data("alerts", alerts))
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": front}
    marks = [
        base.mark_line(strokeWidth=1.8).encode(**place, y=y, detail="layer:N"),
        base.mark_circle(size=14, cursor="pointer").encode(**place, y=y, tooltip="reading:Q"),
        told.transform_filter("datum.value === null")
        .mark_rule(color=ORANGE, strokeWidth=1.6, strokeDash=[4, 3])
        .encode(x=x, tooltip="alert:Q"),
        told.transform_filter("datum.value !== null")
        .mark_point(shape="triangle-down", size=110, filled=True, color=ORANGE, opacity=1)
        .encode(x=x, y=y, tooltip="alert:Q"),
    ]
    return frame.around(marks, frame.ends, frame.chosen[0])
