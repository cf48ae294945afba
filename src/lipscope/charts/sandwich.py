"""The sandwich against the number of tokens: real and adversarial sigma between their bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from lipscope.charts import marks
from lipscope.charts.axes import Data, Frame, across, data, up
from lipscope.charts.look import QUIET, dressed, tooltip
from lipscope.errors import InputError
from lipscope.records import (
    ADVERSARIAL,
    CERTIFICATE,
    MEASURED,
    Bound,
    Comparison,
    Measurement,
    comparisons,
)

# Blue, orange and green that stay apart for every kind of colour vision; bounds in grey.
COLOURS = {MEASURED: "#0072b2", ADVERSARIAL: "#d55e00", CERTIFICATE: "#009e73", "bound": QUIET}
_LABEL_PIXELS = 13


def sandwich_chart(
    rows: Iterable[Measurement],
    bounds: Iterable[Bound],
    *,
    width: int = 420,
    height: int = 340,
) -> alt.VConcatChart | alt.LayerChart:
    """Real sigma, adversarial sigma, the best bound at the input and bounds on all inputs.

    Both axes are logarithmic, one chart for each layer; only rows of one map and metric, those of
    the first one. Bounds that would flatten the others are named under the title instead.

    Args:
        rows: Rows, at given and at built inputs.
        bounds: What theorems say about them.
        width: Width in pixels.
        height: Height in pixels.

    Returns:
        The chart.

    Raises:
        InputError: If there is no measured, positive value with bounds.
    """
    found = [
        one
        for one in comparisons(rows, bounds)
        if any(marks.positive(row.sigma) for row in one.real)
    ]
    if not found:
        raise InputError(
            "`rows` should hold a measured, positive sigma with bounds to draw. Found none."
        )
    first = found[0]
    kept = [one for one in found if (one.map, one.metric) == (first.map, first.metric)]
    charts = [_layer_chart(one, width, height) for one in kept]
    if len(charts) == 1:
        return dressed(charts[0])
    title = f"Bounds of sigma: {first.model}, {len(charts)} layers or heads"
    return dressed(alt.vconcat(*charts, spacing=30).properties(title=alt.TitleParams(title)))


def bounds_chart(lines: Data | None, names: Data | None, frame: Frame) -> alt.LayerChart:
    """The lines of one layer in one metric, with their names beside them.

    Args:
        lines: Records with ``name, group, n, value, upper``, or None where a page puts
            them in.
        names: Records with ``name, group, n, value``.
        frame: The axes and the size.

    Returns:
        The chart.
    """
    layers = _layers(data("lines", lines), data("names", names), across(), up("value:Q", _SIGMA))
    return frame.around(layers, frame.ends)


_SIGMA = "sigma and its bounds"


def _layers(lines: Any, names: Any, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines, bars up to `upper`, points, and the names of the lines."""
    domain = [*COLOURS]
    colour = alt.Color(
        "group:N", legend=None, scale=alt.Scale(domain=domain, range=[*COLOURS.values()])
    )
    base = alt.Chart(lines).encode(x=x, y=y, color=colour)
    drawn = base.mark_line(strokeWidth=2).encode(
        detail="name:N",
        strokeDash=alt.StrokeDash(
            "group:N", legend=None, scale=alt.Scale(domain=domain, range=_DASHES)
        ),
    )
    bars = base.mark_rule(strokeWidth=1.5).encode(y2="upper:Q")
    dots = base.mark_circle(size=34, opacity=1).encode(tooltip=tooltip("name", "n", "value"))
    words = alt.Chart(names).mark_text(align="left", dx=8, fontSize=11)
    return [drawn, bars, dots, words.encode(x=x, y=y, text="name:N", color=colour)]


def _layer_chart(of: Comparison, width: int, height: int) -> alt.LayerChart:
    lines, left_out = of.curves()
    lengths = sorted({n for line in lines for n, *_ in line.points})
    every = [v for line in lines for _, *values in line.points for v in values]
    domain = [min(every) / 1.3, max(every) * 1.3]
    left = lengths[0] / 1.1
    reach = max(lengths[-1] / lengths[0], 2.0)
    right = lengths[-1] * reach**0.85  # room for the names
    x = alt.X(
        "n:Q",
        title="number of tokens n",
        scale=alt.Scale(type="log", domain=[left, right], nice=False),
        axis=alt.Axis(values=lengths, format="d", labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title=_SIGMA,
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(format=",~g" if domain[1] < 1e6 else "~e", values=marks.tick_values(*domain)),
    )
    gap = (domain[1] / domain[0]) ** (_LABEL_PIXELS / height)
    places = marks.spread([line.points[-1][1] for line in lines], gap)
    words = [
        {"name": line.name, "group": line.group, "n": lengths[-1], "value": place}
        for line, place in zip(lines, places, strict=True)
    ]
    points = alt.InlineData(values=marks.points_of(lines))
    layers = _layers(points, alt.InlineData(values=words), x, y)
    title = alt.TitleParams(_title(of), subtitle=_subtitle(of, left_out))
    return alt.LayerChart(layer=layers).properties(width=width, height=height, title=title)


_DASHES = [[1, 0], [1, 0], [1, 0], [5, 4]]


def _title(of: Comparison) -> str:
    head = "" if of.head is None else f", head {of.head}"
    return f"Bounds of sigma: {of.model}, layer {of.layer}{head}"


def _subtitle(of: Comparison, left_out: Sequence[str]) -> list[str]:
    lines = [f"map {of.map}, metric {of.metric}; bounds on all inputs (dashed): {of.allowed}"]
    if left_out:
        lines.append(f"Off the scale: {', '.join(left_out)}.")
    return lines
