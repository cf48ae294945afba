"""Effects of pushes of a layer's input by their size, beside what is promised and certified."""

from __future__ import annotations

from typing import Any

import altair as alt

from lipscope.charts.axes import BLUE, GREEN, ORANGE, Data, Frame, data
from lipscope.charts.exponents import PURPLE
from lipscope.charts.look import INK, QUIET

PROMISE, CERTIFICATE = "sigma · size", "certificate, any move"
# Each curve, its colour and its dashes: what happens is solid, but for the second of two signs.
CURVES = {
    PROMISE: (INK, [5, 4]),
    CERTIFICATE: (INK, [1, 3]),
    "map, along +v": (BLUE, [1, 0]),
    "map, along −v": (BLUE, [6, 3]),
    "map, along +top token": (ORANGE, [1, 0]),
    "map, along −top token": (ORANGE, [6, 3]),
    "map, random (mean, range)": (QUIET, [1, 0]),
    "block, along +v": (GREEN, [1, 0]),
    "model, along +v": (PURPLE, [1, 0]),
}


def push_chart(curves: Data | None, sizes: Data | None, frame: Frame) -> alt.LayerChart:
    """Change of the output, by what sigma promises, against the size of the move; both logarithmic.

    So the promise is the line at 1. Lines: `CURVES`; the band is the range over random directions.
    Thin lines across: sizes at which something changes, with their names. A bold line: the size
    that is chosen.

    Args:
        curves: Records with ``curve, eps, value`` (by ``sigma · eps``), ``change`` (as it is), and
            ``low, high`` of random directions; or None where a page puts them in.
        sizes: Records with ``eps, name``.
        frame: The size, and whether there is a legend.

    Returns:
        The chart.
    """
    axis = alt.Axis(format="~g", tickCount=6, labelOverlap=True)
    scale = alt.Scale(type="log", nice=False, padding=8)
    x = alt.X("eps:Q", title="size of the move, ‖E‖", scale=scale, axis=axis)
    y = alt.Y("value:Q", title="change of the output / (sigma · size)", scale=scale, axis=axis)
    names = list(CURVES)
    key = alt.Legend(
        title=None, orient="bottom", columns=3, symbolType="stroke", symbolStrokeWidth=2,
        labelLimit=240, symbolSize=300,
    )  # fmt: skip
    colours, dashes = ([pair[k] for pair in CURVES.values()] for k in (0, 1))
    some: dict[str, Any] = {"sort": names, "legend": key if frame.legend else None}
    colour = alt.Color("curve:N", scale=alt.Scale(domain=names, range=colours), **some)
    dash = alt.StrokeDash("curve:N", scale=alt.Scale(domain=names, range=dashes), **some)
    base = alt.Chart(data("curves", curves)).transform_filter("datum.value > 0")
    told = [
        alt.Tooltip("curve:N", title="curve"),
        alt.Tooltip("eps:Q", title="size", format=".4g"),
        alt.Tooltip("change:Q", title="change", format=".4g"),
        alt.Tooltip("value:Q", title="by sigma · size", format=".4g"),
    ]
    band = base.transform_filter("datum.low > 0").mark_area(color=QUIET, opacity=0.18)
    lines = base.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=colour, strokeDash=dash)
    dots = base.transform_filter(f"datum.curve !== '{PROMISE}' && datum.curve !== '{CERTIFICATE}'")
    marks = alt.Chart(data("sizes", sizes))
    across = marks.mark_rule(color=QUIET, strokeWidth=1, strokeDash=[2, 2]).encode(x=x)
    place: dict[str, Any] = {"angle": 270, "align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    named = {"x": x, "y": alt.value(frame.height), "text": "name:N"}
    behind = marks.mark_text(fontSize=11, stroke="#ffffff", strokeWidth=3, **place)
    words = marks.mark_text(fontSize=11, color=QUIET, **place)
    chosen = base.transform_filter("datum.eps === at").mark_rule(color=INK, strokeWidth=1.2)
    layers = [
        across,
        band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        lines,
        dots.mark_circle(size=18).encode(x=x, y=y, color=colour, tooltip=told),
        chosen.encode(x=x),
        behind.encode(**named),
        words.encode(**named),
    ]
    return frame.around(layers, alt.param(name="at", value=None))
