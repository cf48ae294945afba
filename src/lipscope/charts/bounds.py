"""Measured values beside bounds: the sandwich against n, and pushes beside their certificate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import (
    BLUE,
    DASHES,
    GREEN,
    HEIGHT,
    ORANGE,
    PURPLE,
    QUIET,
    Data,
    Frame,
    across,
    as_long,
    base,
    between,
    dressed,
    inline,
    tooltip,
    up,
)
from lipscope.charts.marks import CERTIFIED, INK, PROMISE
from lipscope.errors import InputError
from lipscope.records import (
    ADVERSARIAL,
    CERTIFICATE,
    MEASURED,
    Bound,
    Comparison,
    Measurement,
    comparisons,
    usable,
)

COLOURS = {MEASURED: BLUE, ADVERSARIAL: ORANGE, CERTIFICATE: GREEN, "bound": QUIET}
_LABEL_PIXELS = 13
_HEIGHT = 340  # of a chart, in pixels
_SIGMA = "sigma and its bounds"

# Each curve, its colour and its dashes: what happens is solid, but for the second of two signs.
_CURVES = {
    PROMISE: (INK, DASHES),
    CERTIFIED: (INK, [1, 3]),
    "map, along +v": (BLUE, [1, 0]),
    "map, along −v": (BLUE, [6, 3]),
    "map, along +top token": (ORANGE, [1, 0]),
    "map, along −top token": (ORANGE, [6, 3]),
    "map, random (mean, range)": (QUIET, [1, 0]),
    "block, along +v": (GREEN, [1, 0]),
    "model, along +v": (PURPLE, [1, 0]),
}


def sandwich_chart(
    rows: Iterable[Measurement], bounds: Iterable[Bound]
) -> alt.VConcatChart | alt.LayerChart:
    """Real sigma, adversarial sigma, the best bound at the input and bounds on all inputs.

    Both axes are logarithmic, one chart for each layer; only rows of one map and metric, those of
    the first one. Bounds that would flatten the others are named under the title instead.

    Raises:
        InputError: If there is no measured, positive value with bounds.
    """
    found = [one for one in comparisons(rows, bounds) if any(usable(row.sigma) for row in one.real)]
    if not found:
        raise InputError(
            "`rows` should hold a measured, positive sigma with bounds to draw. Found none."
        )
    first = found[0]
    kept = [one for one in found if (one.map, one.metric) == (first.map, first.metric)]
    charts = [_layer_chart(one).properties(width=420, height=_HEIGHT) for one in kept]
    if len(charts) == 1:
        return dressed(charts[0])
    title = f"Bounds of sigma: {first.model}, {len(charts)} layers or heads"
    return dressed(alt.vconcat(*charts, spacing=30).properties(title=alt.TitleParams(title)))


def bounds_chart(
    frame: Frame, lines: Data | None = None, names: Data | None = None
) -> alt.LayerChart:
    """The lines of one layer in one metric, with their names beside them."""
    x, y = across(), up("value:Q", _SIGMA)
    return frame.around(_sandwich(base("lines", lines), base("names", names), x, y), frame.ends)


def _sandwich(lines: alt.Chart, names: alt.Chart, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines, bars up to `upper`, points, and the names of the lines."""
    domain = [*COLOURS]
    inks = alt.Scale(domain=domain, range=[*COLOURS.values()])
    place: dict[str, Any] = {"x": x, "y": y, "color": alt.Color("group:N", legend=None, scale=inks)}
    dashes = alt.Scale(domain=domain, range=[[1, 0], [1, 0], [1, 0], DASHES])
    dash = alt.StrokeDash("group:N", legend=None, scale=dashes)
    dots = lines.mark_circle(size=34, opacity=1)
    return [
        lines.mark_line(strokeWidth=2).encode(**place, detail="name:N", strokeDash=dash),
        lines.mark_rule(strokeWidth=1.5).encode(**place, y2="upper:Q"),
        dots.encode(**place, tooltip=tooltip("name", "n", "value")),
        names.mark_text(align="left", dx=8, fontSize=11).encode(**place, text="name:N"),
    ]


def _layer_chart(of: Comparison) -> alt.LayerChart:
    lines, left_out = of.curves()
    lengths = sorted({n for line in lines for n, *_ in line.points})
    every = [v for line in lines for _, *values in line.points for v in values]
    low, high = min(every) / 1.3, max(every) * 1.3
    reach = max(lengths[-1] / lengths[0], 2.0)
    right = lengths[-1] * reach**0.85  # room for the names
    span = between(lengths[0] / 1.1, right, lengths, format="d", labelOverlap=True)
    form = ",~g" if high < 1e6 else "~e"
    x = alt.X("n:Q", title="number of tokens n", **span)
    y = alt.Y(
        "value:Q", title=_SIGMA, **between(low, high, marks.tick_values(low, high), format=form)
    )
    gap = (high / low) ** (_LABEL_PIXELS / _HEIGHT)
    places = marks.spread([line.points[-1][1] for line in lines], gap)
    words = [
        {"name": line.name, "group": line.group, "n": lengths[-1], "value": place}
        for line, place in zip(lines, places, strict=True)
    ]
    head = "" if of.head is None else f", head {of.head}"
    said = [f"map {of.map}, metric {of.metric}; bounds on all inputs (dashed): {of.allowed}"]
    said += [f"Off the scale: {', '.join(left_out)}."] if left_out else []
    title = f"Bounds of sigma: {of.model}, layer {of.layer}{head}"
    layers = _sandwich(inline(marks.curve_points(lines)), inline(words), x, y)
    return alt.LayerChart(layer=layers).properties(title=alt.TitleParams(title, subtitle=said))


# --- pushes -----------------------------------------------------------------------------------


def push_chart(
    frame: Frame, curves: Data | None = None, sizes: Data | None = None
) -> alt.LayerChart:
    """Change of the output, by what sigma promises, against the size of the move; both logarithmic.

    So the promise is the line at 1. The band is the range over random directions. Thin lines
    across: sizes at which something changes, with their names. A bold line: the size that is
    chosen. Curves have ``value`` (by ``sigma · eps``) and ``change`` (as it is).
    """
    axis = as_long(padding=8, ticks=6)
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
    drawn = base("curves", curves).transform_filter("datum.value > 0")
    told = [
        alt.Tooltip("curve:N", title="curve"),
        alt.Tooltip("eps:Q", title="size", format=".4g"),
        alt.Tooltip("change:Q", title="change", format=".4g"),
        alt.Tooltip("value:Q", title="by sigma · size", format=".4g"),
    ]
    band = drawn.transform_filter("datum.low > 0").mark_area(color=QUIET, opacity=0.18)
    lines = drawn.mark_line(strokeWidth=1.8)
    dots = drawn.transform_filter(f"datum.curve !== '{PROMISE}' && datum.curve !== '{CERTIFIED}'")
    marked = base("sizes", sizes)
    thin = marked.mark_rule(color=QUIET, strokeWidth=1, strokeDash=[2, 2])
    place: dict[str, Any] = {"angle": 270, "align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    named = {"x": x, "y": alt.value(frame.height or HEIGHT), "text": "name:N"}
    behind = marked.mark_text(fontSize=11, stroke="#ffffff", strokeWidth=3, **place)
    words = marked.mark_text(fontSize=11, color=QUIET, **place)
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
