"""Two runs on the same axes, and the ratio of the second one to the first, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import BLUE, ORANGE, Data, Frame, across, data, up
from lipscope.charts.look import INK, QUIET

SIDES = ("a", "b")


def sides_chart(
    means: Data | None, frame: Frame, *, names: Sequence[str] = ("", ""), title: str = "mean"
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
    ratios: Data | None,
    layers: Sequence[str],
    frame: Frame,
    *,
    title: str = "second / first",
    difference: bool = False,
) -> alt.LayerChart:
    """The second run divided by the first, layer by layer at one length, with 95 % intervals.

    Args:
        ratios: Records with ``layer, ratio, low, high, changed``, or None where a page puts them
            in; without an interval, ``low`` is null. Differences are in ``difference``.
        layers: All layers in their order.
        frame: The axis and the size.
        title: Of the axis.
        difference: Whether the second less the first is shown instead, of exponents.

    Returns:
        The chart; full marks changed beyond the sampling, hollow ones did not.
    """
    name, field = ("shifts", "difference:Q") if difference else ("ratios", "ratio:Q")
    base = alt.Chart(data(name, ratios))
    x = alt.X("layer:N", sort=list(layers), title="layer", axis=alt.Axis(labelAngle=0))
    y, low = (_less(f, title) if difference else up(f, title) for f in (field, "low:Q"))
    same = base.mark_rule(color=QUIET, strokeDash=[5, 4]).encode(
        y=alt.datum(0.0 if difference else 1.0, type="quantitative")
    )
    bars = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=1.8, color=INK, opacity=0.7)
        .encode(x=x, y=low, y2="high:Q")
    )
    fill = alt.when("datum.changed").then(alt.value(ORANGE)).otherwise(alt.value("#ffffff"))
    dots = base.mark_point(
        size=70, strokeWidth=1.8, color=ORANGE, filled=True, opacity=1, cursor="pointer"
    ).encode(x=x, y=y, fill=fill, stroke=alt.value(ORANGE), tooltip="c:Q")
    return frame.around([same, bars, dots], *([] if difference else [frame.ends]))


def _less(field: str, title: str) -> alt.Y:
    """The axis of differences."""
    return alt.Y(field, title=title, scale=alt.Scale(nice=True), axis=alt.Axis(tickCount=6))


def _quoted(text: str) -> str:
    """Text inside an expression of Vega."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"
