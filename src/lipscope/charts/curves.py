"""Several pairs of axes with curves and scatters, one legend for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import QUIET, dressed
from lipscope.charts.panels import Panel, Point, Series
from lipscope.errors import InputError

# Six hues that stay apart for every kind of colour vision; more series repeat them paler.
HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
_REFERENCES = [QUIET, "#222222", "#a0a0a0"]


def curves_chart(
    title: str,
    panels: Sequence[Panel],
    *,
    notes: Sequence[str] = (),
    columns: int = 3,
    width: int = 260,
    height: int = 210,
) -> alt.ConcatChart:
    """Panels side by side; series of one name share one colour and one entry of the legend.

    Args:
        title: Above all panels.
        panels: What to draw.
        notes: Lines under the title.
        columns: Panels in a row.
        width: Width of a panel in pixels.
        height: Its height.

    Returns:
        The chart.

    Raises:
        InputError: If no panel has a point to draw.
    """
    drawn = [panel for panel in panels if any(panel.visible(s) for s in panel.series)]
    if not drawn:
        raise InputError(f"`panels` should hold points to draw. Found none among {len(panels)}.")
    charts = [_panel(panel, _colours(drawn), width, height) for panel in drawn]
    heading = alt.TitleParams(title, subtitle=list(notes), anchor="start")
    joined = alt.concat(*charts, columns=columns, spacing=22)
    return dressed(joined.resolve_scale(color="shared").properties(title=heading))


def _colours(panels: Sequence[Panel]) -> alt.Color:
    """One colour for each name: hues for what was measured, greys for references."""
    kinds = {s.name: s.kind for panel in panels for s in panel.series if panel.visible(s)}
    measured = [name for name, kind in kinds.items() if kind != "dashes"]
    lines = [name for name, kind in kinds.items() if kind == "dashes"]
    hues = HUES if len(measured) <= len(HUES) else marks.palette(len(measured))
    greys = [_REFERENCES[i % len(_REFERENCES)] for i in range(len(lines))]
    scale = alt.Scale(domain=[*measured, *lines], range=[*hues[: len(measured)], *greys])
    dots = all(kind == "points" for kind in kinds.values())  # they have no stroke to show
    symbol = "circle" if dots else "stroke"
    legend = alt.Legend(title=None, labelLimit=320, symbolType=symbol, symbolStrokeWidth=3)
    return alt.Color("name:N", scale=scale, legend=legend, sort=[*measured, *lines])


def _panel(panel: Panel, colour: alt.Color, width: int, height: int) -> alt.LayerChart:
    every = [point for s in panel.series for point in panel.visible(s)]
    scale_x, axis_x = _axis([x for x, _ in every], panel.log_x)
    scale_y, axis_y = _axis([y for _, y in every], panel.log_y)
    x = alt.X("x:Q", title=panel.x, scale=scale_x, axis=axis_x)
    y = alt.Y("y:Q", title=panel.y, scale=scale_y, axis=axis_y)
    layers = [
        layer.encode(x=x, y=y, color=colour, detail="name:N")
        for s in panel.series
        if panel.visible(s)
        for layer in _marks(s, panel.visible(s))
    ]
    title = alt.TitleParams(panel.title, fontSize=12, anchor="middle")
    return alt.LayerChart(layer=layers).properties(width=width, height=height, title=title)


def _marks(one: Series, points: list[Point]) -> list[alt.Chart]:
    values = [{"name": one.name, "x": x, "y": y} for x, y in points]
    base = alt.Chart(alt.InlineData(values=values))
    if one.kind == "dashes":
        return [base.mark_line(strokeDash=[5, 4], strokeWidth=1.4)]
    size = 34 if len(points) <= 60 else 9
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("x:Q", format=".5g"),
        alt.Tooltip("y:Q", format=".5g"),
    ]
    dots = base.mark_circle(size=size, opacity=0.85 if size > 9 else 0.5).encode(tooltip=tips)
    return [dots] if one.kind == "points" else [base.mark_line(strokeWidth=1.8), dots]


def _axis(values: list[float | int], log: bool) -> tuple[alt.Scale, alt.Axis]:
    """Scale and ticks around all values."""
    low, high = min(values), max(values)
    if not log:
        step = 1 if all(isinstance(value, int) for value in values) else alt.Undefined
        return alt.Scale(zero=False), alt.Axis(tickCount=6, tickMinStep=step)
    pad = max(1.06, (high / low) ** 0.04)
    domain = [low / pad, high * pad]
    form = ",~g" if high < 1e6 and low >= 1e-3 else ".0e"
    ticks = alt.Axis(values=marks.tick_values(*domain), format=form, labelOverlap=True)
    return alt.Scale(type="log", domain=domain, nice=False), ticks
