"""Measured values beside bounds: the sandwich against n, and pushes beside their certificate."""

from __future__ import annotations

from typing import Any

import altair as alt

from lipscope.charts import look
from lipscope.charts.marks import CERTIFIED, INK, PROMISE
from lipscope.records import (
    ADVERSARIAL,
    CERTIFICATE,
    MEASURED,
)

COLOURS = {
    MEASURED: look.BLUE,
    ADVERSARIAL: look.ORANGE,
    CERTIFICATE: look.GREEN,
    "bound": look.QUIET,
}

# Each curve, its colour and its dashes: what happens is solid, but for the second of two signs.
_CURVES = {
    PROMISE: (INK, look.DASHES),
    CERTIFIED: (INK, [1, 3]),
    "map, along +v": (look.BLUE, [1, 0]),
    "map, along −v": (look.BLUE, [6, 3]),
    "map, along +top token": (look.ORANGE, [1, 0]),
    "map, along −top token": (look.ORANGE, [6, 3]),
    "map, random (mean, range)": (look.QUIET, [1, 0]),
    "block, along +v": (look.GREEN, [1, 0]),
    "model, along +v": (look.PURPLE, [1, 0]),
}


def bounds_chart(
    frame: look.Frame, lines: look.Data | None = None, names: look.Data | None = None
) -> alt.LayerChart:
    """Measured sigma and its bounds of one layer in one metric, with their names beside them.

    Lines, bars up to `upper`, points; bounds on all inputs are dashed.
    """
    drawn, domain = look.base("lines", lines), [*COLOURS]
    inks = alt.Scale(domain=domain, range=[*COLOURS.values()])
    place: dict[str, Any] = {
        "x": look.across(),
        "y": look.up("value:Q", "sigma and its bounds"),
        "color": alt.Color("group:N", legend=None, scale=inks),
    }
    dashes = alt.Scale(domain=domain, range=[[1, 0], [1, 0], [1, 0], look.DASHES])
    dash = alt.StrokeDash("group:N", legend=None, scale=dashes)
    dots = drawn.mark_circle(size=34, opacity=1)
    words = look.base("names", names).mark_text(align="left", dx=8, fontSize=11)
    parts = [
        drawn.mark_line(strokeWidth=2).encode(**place, detail="name:N", strokeDash=dash),
        drawn.mark_rule(strokeWidth=1.5).encode(**place, y2="upper:Q"),
        dots.encode(**place, tooltip=look.tooltip("name", "n", "value")),
        words.encode(**place, text="name:N"),
    ]
    return frame.around(parts, frame.ends)


# --- pushes -----------------------------------------------------------------------------------


def push_chart(
    frame: look.Frame, curves: look.Data | None = None, sizes: look.Data | None = None
) -> alt.LayerChart:
    """Change of the output, by what sigma promises, against the size of the move; both logarithmic.

    So the promise is the line at 1. The band is the range over random directions. Thin lines
    across: sizes at which something changes, with their names. A bold line: the size that is
    chosen. Curves have ``value`` (by ``sigma · eps``) and ``change`` (as it is).
    """
    axis = look.as_long(padding=8, ticks=6)
    x = alt.X("eps:Q", title="size of the move, ‖E‖", **axis)
    y = alt.Y("value:Q", title="change of the output / (sigma · size)", **axis)
    names = list(_CURVES)
    key = alt.Legend(
        title=None,
        orient="bottom",
        columns=3,
        symbolType="stroke",
        symbolStrokeWidth=2,
        labelLimit=240,
        symbolSize=300,
    )
    colours, dashes = ([pair[k] for pair in _CURVES.values()] for k in (0, 1))
    some: dict[str, Any] = {"sort": names, "legend": key if frame.legend else None}
    colour = alt.Color("curve:N", scale=alt.Scale(domain=names, range=colours), **some)
    dash = alt.StrokeDash("curve:N", scale=alt.Scale(domain=names, range=dashes), **some)
    drawn = look.base("curves", curves).transform_filter("datum.value > 0")
    told = [
        alt.Tooltip("curve:N", title="curve"),
        alt.Tooltip("eps:Q", title="size", format=".4g"),
        alt.Tooltip("change:Q", title="change", format=".4g"),
        alt.Tooltip("value:Q", title="by sigma · size", format=".4g"),
    ]
    band = drawn.transform_filter("datum.low > 0").mark_area(color=look.QUIET, opacity=0.18)
    lines = drawn.mark_line(strokeWidth=1.8)
    dots = drawn.transform_filter(f"datum.curve !== '{PROMISE}' && datum.curve !== '{CERTIFIED}'")
    marked = look.base("sizes", sizes)
    thin = marked.mark_rule(color=look.QUIET, strokeWidth=1, strokeDash=[2, 2])
    place: dict[str, Any] = {"angle": 270, "align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    named = {"x": x, "y": alt.value(frame.height or look.HEIGHT), "text": "name:N"}
    behind = marked.mark_text(fontSize=11, stroke="#ffffff", strokeWidth=3, **place)
    words = marked.mark_text(fontSize=11, color=look.QUIET, **place)
    chosen = drawn.transform_filter("datum.eps === at").mark_rule(color=INK, strokeWidth=1.2)
    layers = [
        thin.encode(x=x),
        band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        lines.encode(x=x, y=y, color=colour, strokeDash=dash),
        dots.mark_circle(size=18).encode(x=x, y=y, color=colour, tooltip=told),
        chosen.encode(x=x),
        behind.encode(**named),
        words.encode(**named),
    ]
    return frame.around(layers, alt.param(name="at", value=None))
