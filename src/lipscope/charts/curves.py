"""Several pairs of axes with curves and scatters, one legend for all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from lipscope.charts import marks
from lipscope.charts.axes import end_of_training
from lipscope.charts.look import QUIET, dressed
from lipscope.charts.panels import Panel, Point, Series
from lipscope.errors import InputError

# Six hues that stay apart for every kind of colour vision; more series repeat them paler.
HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
_REFERENCES = [QUIET, "#222222", "#a0a0a0"]
_DASH = [5, 4]
_TICKS = 7  # labels of an axis that have room beside each other
_DOTTED = 20  # points of a line that are worth a dot each
_BEYOND = 1e6  # times what was measured: a reference further off leaves the frame
_TITLE = 42  # letters of a panel's title in a line


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
    legend = _legend(drawn)
    charts = [_panel(panel, legend, width, height) for panel in drawn]
    heading = alt.TitleParams(title, subtitle=list(notes), anchor="start")
    joined = alt.concat(*charts, columns=columns, spacing=22)
    joined = joined.resolve_scale(color="shared", strokeDash="shared")
    return dressed(joined.properties(title=heading))


@dataclass(frozen=True)
class _Legend:
    """One colour for each name, and dashes for references, in one legend."""

    colour: alt.Color
    dash: alt.StrokeDash


def _legend(panels: Sequence[Panel]) -> _Legend:
    """Hues for what was measured, greys for references."""
    kinds = {s.name: s.kind for panel in panels for s in panel.series if panel.visible(s)}
    measured = [name for name, kind in kinds.items() if kind != "dashes"]
    lines = [name for name, kind in kinds.items() if kind == "dashes"]
    hues = HUES if len(measured) <= len(HUES) else marks.palette(len(measured))
    greys = [_REFERENCES[i % len(_REFERENCES)] for i in range(len(lines))]
    names = [*measured, *lines]
    dots = all(kind == "points" for kind in kinds.values())  # they have no stroke to show
    legend = alt.Legend(
        title=None,
        labelLimit=320,
        symbolType="circle" if dots else "stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        symbolSize=240 if lines else 100,  # long enough to show a dash
    )
    hue = alt.Scale(domain=names, range=[*hues[: len(measured)], *greys])
    solid, dashed = [[1, 0]] * len(measured), [_DASH] * len(lines)
    dash = alt.Scale(domain=names, range=solid + dashed)
    return _Legend(
        alt.Color("name:N", scale=hue, legend=legend, sort=names),
        alt.StrokeDash("name:N", scale=dash, legend=legend, sort=names),
    )


def _panel(panel: Panel, legend: _Legend, width: int, height: int) -> alt.LayerChart:
    every = [point for s in panel.series for point in panel.visible(s)]
    scale_x, axis_x = _axis([x for x, _ in every], panel.log_x)
    framed = _framed(panel)
    beyond = max(framed) < max(y for _, y in every)
    scale_y, axis_y = _axis(framed, panel.log_y)
    x = alt.X("x:Q", title=panel.x, scale=scale_x, axis=axis_x)
    y = alt.Y("y:Q", title=panel.y, scale=scale_y, axis=axis_y)
    layers = [
        layer.encode(x=x, y=y, color=legend.colour, detail="name:N")
        for s in panel.series
        if panel.visible(s)
        for layer in _marks(s, panel.visible(s), legend, clip=beyond)
    ]
    layers = [*end_of_training(panel.end, x), *layers]
    title = alt.TitleParams(textwrap.wrap(panel.title, _TITLE), fontSize=12, anchor="middle")
    return alt.LayerChart(layer=layers).properties(width=width, height=height, title=title)


def _framed(panel: Panel) -> list[float | int]:
    """The heights that the frame holds: all of what was measured, of references what is near."""
    of = {dashes: [] for dashes in (False, True)}
    for one in panel.series:
        of[one.kind == "dashes"] += [y for _, y in panel.visible(one)]
    measured, references = of[False], of[True]
    if not (measured and panel.log_y):
        return measured + references
    return measured + [min(y, max(measured) * _BEYOND) for y in references]


def _marks(one: Series, points: list[Point], legend: _Legend, *, clip: bool) -> list[alt.Chart]:
    values = [{"name": one.name, "x": x, "y": y} for x, y in points]
    base = alt.Chart(alt.InlineData(values=values))
    if one.kind == "dashes":
        return [base.mark_line(strokeWidth=1.4, clip=clip).encode(strokeDash=legend.dash)]
    size = 34 if len(points) <= 60 else 9
    tips = [
        alt.Tooltip("name:N"),
        alt.Tooltip("x:Q", format=".5g"),
        alt.Tooltip("y:Q", format=".5g"),
    ]
    dots = base.mark_circle(size=size, opacity=0.85 if size > 9 else 0.5).encode(tooltip=tips)
    if one.kind == "points":
        return [dots]
    line = base.mark_line(strokeWidth=1.8)
    return [line, dots] if len(points) <= _DOTTED else [line]


def _axis(values: list[float | int], log: bool) -> tuple[alt.Scale, alt.Axis]:
    """Scale and ticks around all values."""
    low, high = min(values), max(values)
    if not log:
        step = 1 if all(isinstance(value, int) for value in values) else alt.Undefined
        return alt.Scale(zero=False), alt.Axis(tickCount=6, tickMinStep=step)
    pad = max(1.06, (high / low) ** 0.04)
    domain = [low / pad, high * pad]
    form = ",~g" if high < 1e6 and low >= 1e-3 else ".0e"
    values = marks.tick_values(*domain, most=_TICKS)
    ticks = alt.Axis(values=values, format=form, labelOverlap=True)
    return alt.Scale(type="log", domain=domain, nice=False), ticks
