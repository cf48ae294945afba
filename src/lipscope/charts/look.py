"""The look of all charts, their tooltips, and the files that they are saved as."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import vl_convert

from lipscope.charts import marks
from lipscope.charts.standalone import chart_page
from lipscope.display import picture, printable
from lipscope.errors import InputError
from lipscope.records import replaced

Chart: TypeAlias = alt.LayerChart | alt.HConcatChart | alt.VConcatChart | alt.ConcatChart

QUIET, GRID, AXIS, INK = "#6b6b6b", "#ececec", "#bbbbbb", marks.INK
_SPOKEN = re.compile(
    r'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="[^"]*"'
)
_PLACE, _FINER = re.compile(r' (?:d|transform)="[^"]*"'), re.compile(r"(\.\d\d)\d+")
# A browser without these fonts takes a wider one: it writes over what was measured for them.
_ROOM = 32
FONT, MONO = "Helvetica, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"


def save(chart: Chart, path: str | Path) -> Path:
    """Write a chart as ``.svg``, ``.png`` (two pixels per point) or one ``.html`` page.

    The page carries its scripts and data inside, asks no network for anything, and its
    content policy forbids it to.

    Args:
        chart: A chart of this module.
        path: File to write; the ending chooses the format.

    Returns:
        The path.

    Raises:
        InputError: If the ending is another one.
    """
    return save_each(chart, [Path(path)])[0]


def save_each(chart: Chart, paths: Sequence[Path]) -> list[Path]:
    """The same chart as several files.

    Args:
        chart: A chart of this room.
        paths: Files to write; their endings choose the formats.

    Returns:
        The paths.

    Raises:
        InputError: If an ending is another one.
    """
    spec, version = _drawn(chart)
    for path in paths:
        if path.suffix == ".html":
            remark = marks.HINT if "params" in spec else ""
            page = chart_page(spec, str(spec["title"]["text"]), remark, version=version)
            replaced(path, page.encode())
        elif path.suffix == ".svg":
            replaced(path, _svg(spec, version).encode())
        elif path.suffix == ".png":
            replaced(path, vl_convert.vegalite_to_png(spec, vl_version=version, scale=2))
        else:
            raise InputError(
                f"`path` should end in .svg, .png or .html. Found `{path.name}`; choose one."
            )
    return list(paths)


def as_svg(chart: Chart) -> str:
    """A chart as a drawing that stands by itself.

    Args:
        chart: A chart of this room.
    """
    return _svg(*_drawn(chart))


def _drawn(chart: Chart) -> tuple[dict[str, Any], str]:
    """The chart in Vega-Lite, and its release; text of a row may hold what ends a drawing."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return printable(chart.to_dict(validate=False)), version  # our own: tests check it


def _svg(spec: dict[str, Any], version: str) -> str:
    """Half the size: hundredths of a pixel, and no words for each of thousands of points.

    Axes and legends keep theirs, for those who have the drawing read to them.
    """
    svg = _SPOKEN.sub("<path", vl_convert.vegalite_to_svg(spec, vl_version=version))
    return _PLACE.sub(lambda place: _FINER.sub(r"\1", place[0]), svg)


def tooltip(*names: str) -> list[alt.Tooltip]:
    """Tooltip lines of fields that are already words, or short numbers."""
    return [
        alt.Tooltip("value:Q", title="sigma", format=".4g")
        if name == "sigma"
        else alt.Tooltip(f"{name}:N", title=name)
        for name in names
    ]


class _Drawn:
    """What a notebook shows of a chart: altair's own HTML asks the network for its scripts."""

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        svg = as_svg(self)  # pyright: ignore[reportArgumentType]
        return {"text/plain": repr(self), "text/html": picture(svg, "Chart")}


_KINDS = {
    kind: type(kind.__name__, (_Drawn, kind), {})
    for kind in (alt.LayerChart, alt.HConcatChart, alt.VConcatChart, alt.ConcatChart)
}


def dressed(chart: Any) -> Any:
    """The one look of all charts; on white, so that it also prints."""
    quiet = {"labelColor": QUIET, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12}
    made = chart.configure(
        font=FONT,
        background="#ffffff",
        padding={"left": 12, "top": 12, "bottom": 12, "right": _ROOM},
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            **quiet,
            gridColor=GRID,
            domainColor=AXIS,
            tickColor=AXIS,
            titleFontWeight="normal",
            titlePadding=8,
        ),
        legend=alt.LegendConfig(**quiet),
        title=alt.TitleConfig(
            anchor="start",
            color=INK,
            fontSize=15,
            subtitleColor=QUIET,
            subtitleFontSize=11,
            offset=12,
        ),
    )
    # Altair's own `__setattr__` would write into the chart.
    object.__setattr__(made, "__class__", _KINDS.get(type(made), type(made)))
    return made
