"""The course of training: sigma of checkpoints, and what a monitor reads."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt

from lipscope.charts.look import FRONT, HERE, ORANGE, Data, Frame, base, in_front, up
from lipscope.charts.marks import INK


def training_chart(
    frame: Frame,
    points: Data | None = None,
    means: Data | None = None,
    *,
    turn: float | None = None,
) -> alt.LayerChart:
    """Geometric means of sigma at every checkpoint, with their intervals, one colour a layer.

    Bars reach from the lower end of the 95 % interval of the mean of log sigma over windows to
    the upper end of that of log upper. Small points are single windows of the layer in front.
    ``turn`` is the step at which the axis turns from linear to logarithmic; None for a linear one.
    """
    span: dict[str, Any] = {"domain": alt.ExprRef("axes.x"), "nice": False}
    kind = {"type": "linear", "zero": False} if turn is None else {"type": "symlog"}
    more = {} if turn is None else {"constant": turn}
    axis = {"format": ",d", "labelOverlap": True, "grid": False}
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(**kind, **more, **span),
        axis=alt.Axis(values=alt.ExprRef("axes.xticks"), **axis),
    )
    y, colour = up("sigma:Q", "sigma"), frame.by_layer()
    mean = base("means", means).transform_filter(HERE)
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": in_front(0.95, 0.16)}
    ends = place | {"y": up("low:Q", "sigma"), "opacity": in_front(0.5, 0.06)}
    single = base("points", points).transform_filter(f"{HERE} && datum.layer === layer")
    windows = single.mark_circle(size=14, cursor="pointer", opacity=0.5)
    layers = [
        mean.mark_rule(strokeWidth=1.4).encode(**ends, y2="high:Q"),
        mean.mark_line(strokeWidth=2).encode(**place, y=y),
        windows.encode(x=x, y=y, color=colour, tooltip="i:Q"),
        mean.mark_circle(size=40, cursor="pointer").encode(**place, y=y, tooltip="t:Q"),
    ]
    return frame.around(layers, frame.ends, *frame.chosen)


def signals_chart(
    frame: Frame,
    rows: Data | None = None,
    alerts: Data | None = None,
    *,
    scale: Literal["log", "linear"] = "linear",
) -> alt.LayerChart:
    """One signal of every layer over the steps of training; triangles and rules are alerts.

    The layer of what the whole model has, such as its loss, is "all"; an alert without a value is
    a rule.
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
    colour = whole.otherwise(frame.by_layer())
    front = in_front(0.95, 0.12, f"{FRONT} || datum.layer === 'all'")
    read, told = base("rows", rows), base("alerts", alerts)
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": front}
    rule = told.transform_filter("datum.value === null").mark_rule(
        color=ORANGE, strokeWidth=1.6, strokeDash=[4, 3]
    )
    triangle = told.transform_filter("datum.value !== null").mark_point(
        shape="triangle-down", size=110, filled=True, color=ORANGE, opacity=1
    )
    layers = [
        read.mark_line(strokeWidth=1.8).encode(**place, y=y, detail="layer:N"),
        read.mark_circle(size=14, cursor="pointer").encode(**place, y=y, tooltip="reading:Q"),
        rule.encode(x=x, tooltip="alert:Q"),
        triangle.encode(x=x, y=y, tooltip="alert:Q"),
    ]
    return frame.around(layers, frame.ends, frame.chosen[0], height=200)
