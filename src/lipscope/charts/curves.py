"""Paper-style figures: panels with curves and scatter plots."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import DASHES, QUIET, dressed, end_of_training, inline
from lipscope.errors import InputError

LineKind = Literal["points", "line", "dashes"]
Point = tuple[float | int, float | int]


@dataclass(frozen=True)
class Series:
    """A curve or scatter plot."""

    name: str  # legend entry; series of one name share a colour in all panels
    points: Sequence[Point]  # pairs ``(x, y)``; those outside the axes' domain are omitted
    kind: LineKind = "line"  # few points are also marked; dashes: a reference


@dataclass(frozen=True)
class Panel:
    """A pair of axes with its series."""

    title: str  # above the panel
    series: Sequence[Series]  # curves and scatter plots
    x: str = "number of tokens n"  # title of the horizontal axis
    y: str = "sigma"  # title of the vertical axis
    log_x: bool = True  # whether the horizontal axis is logarithmic
    log_y: bool = True  # whether the vertical axis is logarithmic
    end: int | None = None  # trained length (`training_end`), marked by a line; None: no line

    def visible(self, one: Series) -> list[Point]:
        """The points of a series within the axes' domain."""
        return [
            (x, y)
            for x, y in one.points
            if math.isfinite(x) and math.isfinite(y)
            if (x > 0 or not self.log_x) and (y > 0 or not self.log_y)
        ]


def power_law(points: Iterable[Point], exponent: float, name: str, lift: float = 1.0) -> Series:
    """A dashed reference ``c x^s`` over the range of the points, with ``c`` fitted to them.

    ``lift`` is a factor on ``c`` that offsets the line; empty without points.

    >>> power_law([(1.0, 2.0), (4.0, 4.0)], 0.5, "root").points
    ((1.0, 2.0), (4.0, 4.0))
    """
    held = [(x, y) for x, y in points if x > 0 and y > 0 and math.isfinite(y)]
    if not held:
        return Series(name, (), "dashes")
    logs = [math.log(y) - exponent * math.log(x) for x, y in held]
    c = lift * math.exp(math.fsum(logs) / len(logs))
    ends = min(x for x, _ in held), max(x for x, _ in held)
    return Series(name, tuple((x, c * x**exponent) for x in ends), "dashes")


# Six hues for every kind of colour vision; further series repeat them in paler shades.
HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
_REFERENCES = [QUIET, "#222222", "#a0a0a0"]
_TICKS = 7  # maximum number of axis labels side by side
_DOTTED = 20  # maximum number of points of a line that are marked
_BEYOND = 1e6  # references beyond this factor of the measured values leave the frame
_TITLE = 42  # maximum line length of a panel title


def curves_chart(
    title: str,
    panels: Sequence[Panel],
    *,
    notes: Sequence[str] = (),
    columns: int = 3,
    width: int = 260,
) -> alt.ConcatChart:
    """Panels side by side; series of one name share a colour and a legend entry.

    Raises:
        InputError: If no panel has a point to draw.
    """
    drawn = [panel for panel in panels if any(panel.visible(s) for s in panel.series)]
    if not drawn:
        raise InputError(f"`panels` should hold points to draw. Found none among {len(panels)}.")
    colour, dash = _legend(drawn)
    size = {"width": width, "height": 210}
    charts = [_panel_chart(panel, colour, dash).properties(**size) for panel in drawn]
    heading = alt.TitleParams(title, subtitle=list(notes), anchor="start")
    joined = alt.concat(*charts, columns=columns, spacing=22)
    joined = joined.resolve_scale(color="shared", strokeDash="shared")
    return dressed(joined.properties(title=heading))


def _legend(panels: Sequence[Panel]) -> tuple[alt.Color, alt.StrokeDash]:
    """Colours and dashes by name: hues for measured series, greys for references."""
    kinds = {s.name: s.kind for panel in panels for s in panel.series if panel.visible(s)}
    measured = [name for name, kind in kinds.items() if kind != "dashes"]
    lines = [name for name, kind in kinds.items() if kind == "dashes"]
    hues = HUES if len(measured) <= len(HUES) else marks.palette(len(measured))
    greys = [_REFERENCES[i % len(_REFERENCES)] for i in range(len(lines))]
    names = [*measured, *lines]
    dots = all(kind == "points" for kind in kinds.values())  # they have no stroke
    legend = alt.Legend(
        title=None,
        labelLimit=320,
        symbolType="circle" if dots else "stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        symbolSize=240 if lines else 100,  # long enough to show a dash
    )
    hue = alt.Scale(domain=names, range=[*hues[: len(measured)], *greys])
    dash = alt.Scale(domain=names, range=[[1, 0]] * len(measured) + [DASHES] * len(lines))
    shared = {"legend": legend, "sort": names}
    return alt.Color("name:N", scale=hue, **shared), alt.StrokeDash("name:N", scale=dash, **shared)


def _panel_chart(panel: Panel, colour: alt.Color, dash: alt.StrokeDash) -> alt.LayerChart:
    every = [point for s in panel.series for point in panel.visible(s)]
    framed = _framed(panel)
    beyond = max(framed) < max(y for _, y in every)
    x = alt.X("x:Q", title=panel.x, **_axis([x for x, _ in every], panel.log_x))
    y = alt.Y("y:Q", title=panel.y, **_axis(framed, panel.log_y))
    layers = [
        layer.encode(x=x, y=y, color=colour, detail="name:N")
        for s in panel.series
        if panel.visible(s)
        for layer in _marks(s, panel.visible(s), dash, clip=beyond)
    ]
    layers = [*end_of_training(panel.end, x), *layers]
    title = alt.TitleParams(textwrap.wrap(panel.title, _TITLE), fontSize=12, anchor="middle")
    return alt.LayerChart(layer=layers).properties(title=title)


def _framed(panel: Panel) -> list[float | int]:
    """The vertical range: all measured values, and references nearby."""
    measured, references = [], []
    for one in panel.series:
        heights = references if one.kind == "dashes" else measured
        heights += [y for _, y in panel.visible(one)]
    if not (measured and panel.log_y):
        return measured + references
    return measured + [min(y, max(measured) * _BEYOND) for y in references]


def _marks(
    one: Series, points: list[Point], dash: alt.StrokeDash, *, clip: bool
) -> list[alt.Chart]:
    values = [{"name": one.name, "x": x, "y": y} for x, y in points]
    base = inline(values)
    if one.kind == "dashes":
        return [base.mark_line(strokeWidth=1.4, clip=clip).encode(strokeDash=dash)]
    size = 34 if len(points) <= 60 else 9
    tips = [alt.Tooltip("name:N"), *(alt.Tooltip(f"{k}:Q", format=".5g") for k in "xy")]
    dots = base.mark_circle(size=size, opacity=0.85 if size > 9 else 0.5).encode(tooltip=tips)
    if one.kind == "points":
        return [dots]
    line = base.mark_line(strokeWidth=1.8)
    return [line, dots] if len(points) <= _DOTTED else [line]


def _axis(values: list[float | int], log: bool) -> dict[str, Any]:
    """Scale and ticks covering all values."""
    low, high = min(values), max(values)
    if not log:
        step = 1 if all(isinstance(value, int) for value in values) else alt.Undefined
        axis = alt.Axis(tickCount=6, tickMinStep=step)
        return {"scale": alt.Scale(zero=False), "axis": axis}
    pad = max(1.06, (high / low) ** 0.04)
    form = ",~g" if high < 1e6 and low >= 1e-3 else ".0e"
    low, high = low / pad, high * pad
    ticks = marks.tick_values(low, high, most=_TICKS)
    return {
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
        "axis": alt.Axis(values=ticks, format=form, labelOverlap=True),
    }
