"""Two runs on the same axes, and the ratio of the second one to the first, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import BLUE, ORANGE, Data, Frame, across, data, up
from lipscope.charts.look import INK, QUIET

SIDES = ("a", "b")
QUANTITY = "quantity"
"""Title of an axis that a page names by a signal of this name."""


def sides_chart(
    means: Data | None, frame: Frame, *, names: Sequence[str] = ("", ""), title: str = QUANTITY
) -> alt.LayerChart:
    """Geometric means of both runs against the number of tokens, with their 95 % intervals.

    Args:
        means: Records with ``side, n, value, low, high`` of one layer, or None where a page puts
            them in.
        frame: The axes, the legend and the size.
        names: Of the two runs, for the legend.
        title: Of the axis.

    Returns:
        The chart.
    """
    scale = alt.Scale(domain=[*SIDES], range=[BLUE, ORANGE])
    key = alt.Legend(
        title=None,
        labelExpr=f"datum.label === 'a' ? {_quoted(names[0])} : {_quoted(names[1])}",
        symbolOpacity=1,
        symbolType="circle",
        orient="top",
        labelLimit=0,
    )
    colour = alt.Color("side:N", scale=scale, legend=key if frame.legend else None)
    base = alt.Chart(data("means", means)).transform_calculate(
        at="datum.n * pow(axes.room, datum.side === 'a' ? -0.12 : 0.12)"
    )
    x, y = across("at:Q"), up("value:Q", title)
    # Ends beyond the axis are cut by it: two windows can say nearly nothing.
    bars = base.mark_rule(strokeWidth=1.6, opacity=0.6, clip=True).encode(
        x=x, y=up("low:Q", title), y2="high:Q", color=colour
    )
    lines = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    dots = base.mark_circle(size=46, opacity=1, cursor="pointer").encode(
        x=x, y=y, color=colour, tooltip="c:Q"
    )
    return frame.around([bars, lines, dots], frame.ends)


def ratios_chart(
    ratios: Data | None, layers: Sequence[str], frame: Frame, *, title: str = QUANTITY
) -> alt.LayerChart:
    """The second run divided by the first, layer by layer at one length, with 95 % intervals.

    Args:
        ratios: Records with ``layer, ratio, low, high, changed``, or None where a page puts them
            in; without an interval, ``low`` is null.
        layers: All layers in their order.
        frame: The axis and the size.
        title: Of the axis.

    Returns:
        The chart; full marks changed beyond the sampling, hollow ones did not.
    """
    value, low = (up(field, title) for field in ("ratio:Q", "low:Q"))
    base = alt.Chart(data("ratios", ratios))
    return frame.around(_beside(base, layers, value, low, 1.0), frame.ends)


def shifts_chart(
    shifts: Data | None, layers: Sequence[str], frame: Frame, *, title: str = QUANTITY
) -> alt.LayerChart:
    """Exponents of the second run less those of the first, layer by layer, with 95 % intervals.

    Args:
        shifts: Records with ``layer, difference, low, high, changed``, or None.
        layers: As for `ratios_chart`, as the others.
        frame: The size.
        title: Of the axis.
    """
    value, low = (
        alt.Y(field, title=title, scale=alt.Scale(nice=True), axis=alt.Axis(tickCount=6))
        for field in ("difference:Q", "low:Q")
    )
    return frame.around(_beside(alt.Chart(data("shifts", shifts)), layers, value, low, 0.0))


def _beside(
    base: alt.Chart, layers: Sequence[str], value: alt.Y, low: alt.Y, same: float
) -> list[alt.Chart]:
    """A mark for each layer with its interval, and a line where nothing differs."""
    x = alt.X("layer:N", sort=list(layers), title="layer", axis=alt.Axis(labelAngle=0))
    line = base.mark_rule(color=QUIET, strokeDash=[5, 4])
    bars = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=1.8, color=INK, opacity=0.7)
        .encode(x=x, y=low, y2="high:Q")
    )
    fill = alt.when("datum.changed").then(alt.value(ORANGE)).otherwise(alt.value("#ffffff"))
    dots = base.mark_point(
        size=70, strokeWidth=1.8, color=ORANGE, filled=True, opacity=1, cursor="pointer"
    ).encode(x=x, y=value, fill=fill, stroke=alt.value(ORANGE), tooltip="c:Q")
    return [line.encode(y=alt.datum(same, type="quantitative")), bars, dots]


def _quoted(text: str) -> str:
    """Text inside an expression of Vega."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"
