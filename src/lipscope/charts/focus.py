"""Sigma of one layer against the number of tokens, with and without its top token."""

from __future__ import annotations

import altair as alt

from lipscope.charts.axes import BLUE, ORANGE, Data, Frame, across, data, guides, training_end, up
from lipscope.charts.look import AXIS, INK

ALL, REST = "all tokens move", "top token fixed"


def focus_chart(points: Data | None, means: Data | None, frame: Frame) -> alt.LayerChart:
    """Sigma with its intervals, and sigma with the top token held fixed, of one layer.

    Points are single windows, bars reach up to `upper`, lines run through geometric means;
    the other layers stand faintly behind, and dashed lines grow like n^(1/4) and n^(1/2).

    Args:
        points: Records with ``layer, head, n, sample, sigma, upper, rest, order``, or None
            where a page puts them in.
        means: Records with ``layer, head, n, sigma, rest``.
        frame: The layer and head, the axes and the size.

    Returns:
        The chart.
    """
    x, y = across(), up("value:Q", "sigma")
    here = "datum.head === head && datum.layer === layer"
    mean = alt.Chart(data("means", means))
    behind = (
        mean.transform_filter("datum.head === head && datum.layer !== layer")
        .mark_line(color=AXIS, strokeWidth=1.3, opacity=0.55)
        .encode(x=x, y=up("sigma:Q", "sigma"), detail="layer:N")
    )
    mine = mean.transform_filter(here)
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=[ALL, REST], range=[BLUE, ORANGE]),
        legend=alt.Legend(title=None, orient="top", symbolType="circle", symbolOpacity=1)
        if frame.legend
        else None,
    )
    lines = _folded(mine).mark_line(strokeWidth=2.4).encode(x=x, y=y, color=colour)
    marks = _points(points, here, colour, y)
    layers = [behind, *training_end(mine, x), *guides(mine, x, y), lines, *marks]
    return frame.around(layers, frame.ends, alt.param(name="picked", value=-1), *frame.chosen)


def _folded(records: alt.Chart, **more: str) -> alt.Chart:
    """Sigma and sigma without the token as two series of one ``value``."""
    return (
        records.transform_calculate(a="datum.sigma", b="datum.rest")
        .transform_fold(["a", "b"], as_=["key", "value"])
        .transform_filter("isValid(datum.value)")
        .transform_calculate(series=f"datum.key === 'a' ? '{ALL}' : '{REST}'", **more)
    )


def _points(points: Data | None, here: str, colour: alt.Color, y: alt.Y) -> list[alt.Chart]:
    """Windows side by side around their length: sigma with its bar, and without the token."""
    x = across("at:Q")
    base = _folded(
        alt.Chart(data("points", points)).transform_filter(here),
        at="datum.n * pow(axes.room, datum.order)",
        top="datum.key === 'a' && isValid(datum.upper) ? datum.upper : datum.value",
    )
    bars = base.mark_rule(strokeWidth=1.2, opacity=0.55).encode(x=x, y=y, y2="top:Q", color=colour)
    dots = base.mark_circle(size=30, opacity=0.75, cursor="pointer").encode(
        x=x, y=y, color=colour, tooltip="i:Q"
    )
    ring = (
        base.transform_filter("datum.i === picked && datum.key === 'a'")
        .mark_point(size=150, stroke=INK, strokeWidth=1.8, filled=False)
        .encode(x=x, y=y)
    )
    return [bars, dots, ring]
