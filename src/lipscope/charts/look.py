"""Shared style, axes and file export of charts.

Data may be added later: a page inserts them when a reader makes a selection, under the names
`points`, `means`, `axes` and so on.
"""

from __future__ import annotations

import html
import importlib.resources
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import altair as alt
import vl_convert

from lipscope.charts.marks import HINT, INK, palette
from lipscope.display import picture, printable
from lipscope.errors import InputError
from lipscope.records import write_file

Chart: TypeAlias = alt.LayerChart | alt.HConcatChart | alt.VConcatChart | alt.ConcatChart
Data = Sequence[Mapping[str, Any]]

QUIET, GRID, AXIS = "#6b6b6b", "#ececec", "#bbbbbb"
# Blue and orange differ, also in brightness, for every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#8a4f9e"
DASHES = [5, 4]
FONT, MONO = "Helvetica, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
WIDTH, HEIGHT = 460, 320
QUANTITY = "quantity"  # axis title that a page sets by the signal of this name
FRONT = "layer === null || datum.layer === layer"
HERE = "(head === 'every' || datum.head === head)"
# Browsers without these fonts use wider ones, whose text would overlap layouts computed for them.
_ROOM = 32
_NAMED = 24  # extra pixels beside line labels, whose width is an estimate

# The page's style sheet defines a light and a dark value for these colours.
_NAMES = {
    INK: "--ink",
    QUIET: "--quiet",
    GRID: "--grid",
    AXIS: "--axis",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    PURPLE: "--purple",
    "#ffffff": "--paper",
}
_SPOKEN = re.compile(
    r'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="[^"]*"'
)
_PLACE, _FINER = re.compile(r' (?:d|transform)="[^"]*"'), re.compile(r"(\.\d\d)\d+")


# --- files ------------------------------------------------------------------------------------


def save_each(chart: Chart, paths: Sequence[Path]) -> list[Path]:
    """Write a chart as ``.svg``, ``.png`` (two pixels per point) and one ``.html`` page.

    The page contains its scripts and data; its content policy forbids network requests.

    Raises:
        InputError: If a path has another extension.
    """
    spec, version = _as_vega_lite(chart)
    for path in paths:
        if path.suffix == ".html":
            remark = HINT if "params" in spec else ""
            write_file(path, _page(spec, remark, version).encode())
        elif path.suffix == ".svg":
            write_file(path, _svg(spec, version).encode())
        elif path.suffix == ".png":
            write_file(path, vl_convert.vegalite_to_png(spec, vl_version=version, scale=2))
        else:
            raise InputError(
                f"`path` should end in .svg, .png or .html. Found `{path.name}`; choose one."
            )
    return list(paths)


def as_svg(chart: Chart) -> str:
    """A chart as a standalone SVG."""
    return _svg(*_as_vega_lite(chart))


def _as_vega_lite(chart: Chart) -> tuple[dict[str, Any], str]:
    """The Vega-Lite specification and version, with escaped text that cannot end the SVG."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return printable(chart.to_dict(validate=False)), version  # our own: tests check it


def _svg(spec: dict[str, Any], version: str) -> str:
    """SVG at half the size: coordinates to hundredths of a pixel, and no labels per point.

    Axes and legends keep their labels for screen readers.
    """
    svg = _SPOKEN.sub("<path", vl_convert.vegalite_to_svg(spec, vl_version=version))
    return _PLACE.sub(lambda place: _FINER.sub(r"\1", place[0]), svg)


def _page(spec: Mapping[str, Any], remark: str, version: str) -> str:
    """An HTML page for a chart; ``<`` is escaped, so that text cannot end a script."""
    # The schema address is only an identifier; a page without network access omits it.
    data = json.dumps({key: value for key, value in spec.items() if key != "$schema"})
    parts = {
        "title": html.escape(str(spec["title"]["text"])),
        "remark": html.escape(remark),
        # vl-convert's stub requires a snippet, which is optional.
        "scripts": vl_convert.javascript_bundle(vl_version=version),  # pyright: ignore[reportCallIssue]
        "spec": data.replace("<", "\\u003c"),
    }
    page = importlib.resources.files("lipscope.charts") / "chart.html"
    return re.sub(r"\{(\w+)\}", lambda at: parts.get(at[1], at[0]), page.read_text("utf-8"))


def in_the_page(
    charts: Mapping[str, Any], layers: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Vega specifications of charts without data, and the light values of their named colours.

    With named colours a page switches between light and dark without redrawing.
    """
    names = {colour: f"--l{k}" for k, colour in enumerate(palette(layers))} | _NAMES
    specs = {name: _as_vega(chart, names) for name, chart in charts.items()}
    specs["bounds"]["padding"] = {"left": 2, "top": 2, "bottom": 2, "right": _NAMED}
    return specs, {name: colour for colour, name in names.items()}


def _as_vega(chart: Any, names: Mapping[str, str]) -> dict[str, Any]:
    spec = vl_convert.vegalite_to_vega(chart.to_dict(validate=False))  # our own: tests check it
    spec.pop("$schema", None)  # only an identifier; the page omits network addresses
    for axis in spec.get("axes", ()):
        if axis.get("title") == QUANTITY:  # Vega supports a signal here, Vega-Lite does not
            axis["title"] = {"signal": QUANTITY}
            spec.setdefault("signals", []).append({"name": QUANTITY, "value": ""})
    spec |= {"background": None, "padding": 2}
    text = json.dumps(spec)
    for colour, name in names.items():
        text = text.replace(f'"{colour}"', f'"var({name})"')
    return json.loads(text)


# --- the look ---------------------------------------------------------------------------------


def tooltip(*names: str) -> list[alt.Tooltip]:
    """Tooltip lines for fields that are text or short numbers."""
    return [alt.Tooltip(f"{name}:N", title=name) for name in names]


class _Drawn:
    """Notebook display as SVG: altair's own HTML loads scripts from the network."""

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        svg = as_svg(self)  # pyright: ignore[reportArgumentType]
        return {"text/plain": repr(self), "text/html": picture(svg, "Chart")}


_KINDS = {
    kind: type(kind.__name__, (_Drawn, kind), {})
    for kind in (alt.LayerChart, alt.HConcatChart, alt.VConcatChart, alt.ConcatChart)
}


def dressed(chart: Any) -> Any:
    """Give a chart the common style; on white, so that it also prints."""
    quiet: dict[str, Any] = {
        "labelColor": QUIET,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
    }
    lines: dict[str, Any] = {"gridColor": GRID, "domainColor": AXIS, "tickColor": AXIS}
    heading: dict[str, Any] = {
        "color": INK,
        "fontSize": 15,
        "subtitleColor": QUIET,
        "subtitleFontSize": 11,
    }
    chart.config = alt.Config(  # `configure` would copy all of it
        font=FONT,
        background="#ffffff",
        padding={"left": 12, "top": 12, "bottom": 12, "right": _ROOM},
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(**quiet, **lines, titleFontWeight="normal", titlePadding=8),
        legend=alt.LegendConfig(**quiet),
        title=alt.TitleConfig(anchor="start", offset=12, **heading),
    )
    # Altair's own `__setattr__` would write into the chart.
    object.__setattr__(chart, "__class__", _KINDS.get(type(chart), type(chart)))
    return chart


# --- shared parts of report charts -------------------------------------------------------------


def base(name: str, values: Data | None) -> alt.Chart:
    """A chart with embedded values, or with data that a page inserts under a name."""
    return alt.Chart(alt.NamedData(name=name)) if values is None else inline(values)


def inline(values: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """A chart with embedded values."""
    return alt.Chart(alt.InlineData(values=list(values)))


def scale_of(looks: Mapping[str, Any]) -> alt.Scale:
    """The colour scale of named items."""
    return alt.Scale(domain=[*looks], range=[*looks.values()])


@dataclass(frozen=True)
class Frame:
    """Options shared by all charts of a report, besides their data."""

    axes: Mapping[str, Any] | None = None  # domains and ticks, see `lipscope.pages.points.axes`
    layers: Sequence[str] = ()  # all layers in order
    layer: str | None = None  # the selected layer; None: no selection
    head: int | Literal["every"] | None = None  # the head; None for all together
    legend: bool = False  # whether the chart has its own legend
    # fields of the tooltip of a point; a page expands its index
    hover: Sequence[str] = ("i",)
    width: int | str = WIDTH  # pixels, or "container"
    height: int | None = None  # pixels; None: the default of the chart

    @property
    def chosen(self) -> list[alt.Parameter]:
        """Parameters for the selected layer and head."""
        layer = alt.param(name="layer", value=self.layer)
        if len(self.hover) > 1:  # otherwise nothing else lets a reader choose
            menu = alt.binding_select(options=[None, *self.layers], name="layer ")
            layer = alt.param(name="layer", value=self.layer, bind=menu)
        return [layer, alt.param(name="head", value=self.head)]

    @property
    def ends(self) -> alt.Parameter:
        """Parameters for the domains and ticks of both axes."""
        blank = {"x": [1, 2], "y": [1, 2], "xticks": [1], "yticks": [1], "room": 1.1}
        return alt.param(name="axes", value=dict(self.axes or blank))

    def around(
        self, parts: Sequence[Any], *params: alt.Parameter, height: int | alt.Step = HEIGHT
    ) -> alt.LayerChart:
        """Combine these parts with the parameters they use."""
        # A copy of a layered chart costs as much as the chart: parameters and sizes come first.
        first, *others = parts
        size = {"width": self.width, "height": self.height or height}
        return dressed(alt.LayerChart(layer=[first.add_params(*params), *others], **size))

    def colours(
        self, field: str, inks: Mapping[str, str], drawn: Collection[str] = (), **legend: Any
    ) -> alt.Color:
        """One colour per name; the optional legend lists the names in use."""
        scale = scale_of(inks)
        key = alt.Legend(
            **{"title": None, "symbolOpacity": 1} | legend,
            values=[name for name in inks if not drawn or name in drawn],
        )
        return alt.Color(field, scale=scale, legend=key if self.legend else None)

    def by_layer(self, symbol: str = "stroke") -> alt.Color:
        """One colour per layer, in even steps; ``symbol`` is its legend symbol."""
        inks = dict(zip(self.layers, palette(len(self.layers)), strict=True))
        stroke = {"symbolType": symbol, "symbolStrokeWidth": 3 * (symbol == "stroke")}
        # The offset leaves room for labels of guides or lines.
        key = {"title": "layer", "symbolLimit": 0, "offset": 60, "columns": 1 + len(inks) // 17}
        colour = self.colours("layer:N", inks, **key, **stroke)
        return colour.sort(list(self.layers))


def in_lines(lines: Sequence[Sequence[Any]], title: str, subtitle: Sequence[str]) -> Any:
    """Rows of charts, with a common title and subtitle."""
    for chart in itertools.chain(*lines):
        chart.config = alt.Undefined  # the outer chart's config is enough
    joined = [alt.hconcat(*line, spacing=18).resolve_legend(color="independent") for line in lines]
    whole = joined[0] if len(joined) == 1 else alt.vconcat(*joined, spacing=30)
    return dressed(whole.properties(title=alt.TitleParams(title, subtitle=list(subtitle))))


def in_front(strong: float, faint: float, front: str = FRONT) -> Any:
    """Opacity: strong for the selected layer (all, without a selection), faint for the others."""
    return alt.when(front).then(alt.value(strong)).otherwise(alt.value(faint))


def across(field: str = "n:Q") -> alt.X:
    """The logarithmic axis of lengths."""
    return alt.X(
        field,
        title="number of tokens n",
        scale=alt.Scale(type="log", domain=alt.ExprRef("axes.x"), nice=False),
        axis=alt.Axis(values=alt.ExprRef("axes.xticks"), format="d", labelOverlap=True, grid=False),
    )


def up(field: str, title: str) -> alt.Y:
    """The logarithmic axis of sigma."""
    return alt.Y(
        field,
        title=title,
        scale=alt.Scale(type="log", domain=alt.ExprRef("axes.y"), nice=False, clamp=True),
        axis=alt.Axis(values=alt.ExprRef("axes.yticks"), format=",~g"),
    )


def as_long(*, padding: int = 12, ticks: int = 5) -> dict[str, Any]:
    """Scale and ticks of a logarithmic axis that fits its values."""
    return {
        "scale": alt.Scale(type="log", nice=False, padding=padding),
        "axis": alt.Axis(format="~g", tickCount=ticks, labelOverlap=True),
    }


def trained_length_line(means: alt.Chart, x: alt.X) -> list[alt.Chart]:
    """A labelled line at the model's trained length.

    ``means`` contain the trained length; nothing is drawn if no mean is longer.
    """
    longer = (
        means.transform_filter("isValid(datum.trained) && datum.n > datum.trained")
        .transform_aggregate(at="min(trained)")
        .transform_filter("datum.at > 0")
        .transform_calculate(caption="'← trained to ' + datum.at")
    )
    return _named_line(longer, x)


def _named_line(at: alt.Chart, x: alt.X) -> list[alt.Chart]:
    place = x.copy()
    place.shorthand = "at:Q"
    word = at.mark_text(align="right", baseline="bottom", dx=-4, color=QUIET, fontSize=11)
    return [
        at.mark_rule(color=QUIET, strokeWidth=1).encode(x=place),
        word.encode(x=place, y=alt.value("height"), text="caption:N"),
    ]


def end_of_training(end: int | None, x: alt.X) -> list[alt.Chart]:
    """The same line for `lipscope.charts.marks.training_end`; nothing for None."""
    at = {"at": end, "caption": f"← trained to {end}"}
    return [] if end is None else _named_line(inline([at]), x)


def guides(means: alt.Chart, x: alt.X, y: alt.Y, *, named: bool = True) -> list[alt.Chart]:
    """Dashed lines like ``n^(1/4)`` and ``n^(1/2)``, starting mid-range at the first length."""
    laws = "[{law: '~ n^(1/4)', p: 0.25}, {law: '~ n^(1/2)', p: 0.5}]"
    lines = (
        means.transform_filter("isValid(datum.sigma)")
        .transform_calculate(log="log(datum.sigma)")
        # A single length shows no growth.
        .transform_joinaggregate(lengths="distinct(n)", groupby=["layer", "kind", "head"])
        .transform_filter("datum.lengths > 1")
        .transform_joinaggregate(first="min(n)")
        .transform_filter("datum.n === datum.first")
        .transform_aggregate(middle="mean(log)", first="min(n)")
        # Start lower if the steeper line would leave the chart.
        .transform_calculate(
            level="max(log(axes.y[0]), min(datum.middle, log(axes.y[1])"
            " - log(axes.x[1] / datum.first) / 2))",
            law=laws,
            end="[0, 1]",
        )
        .transform_flatten(["law"])
        .transform_flatten(["end"])
        .transform_calculate(
            # To the right edge, or to where the line leaves the chart at the top.
            at="!datum.end ? datum.first : min(axes.x[1], datum.first"
            " * pow(axes.y[1] / exp(datum.level), 1 / datum.law.p))",
            value="exp(datum.level) * pow(datum.at / datum.first, datum.law.p)",
            name="datum.law.law",
        )
    )
    place = {"x": x.copy(), "y": y.copy()}
    place["x"].shorthand, place["y"].shorthand = "at:Q", "value:Q"
    dashes = lines.mark_line(color=QUIET, strokeDash=DASHES, strokeWidth=1.1, opacity=0.8)
    # Stack the labels, however close the ends are.
    words = [
        lines.transform_filter(f"datum.end && datum.law.p === {p}").mark_text(
            align="left", dx=4, dy=dy, color=QUIET, fontSize=11
        )
        for p, dy in ((0.25, 7), (0.5, -6))
    ]
    names = [word.encode(**place, text="name:N") for word in words] if named else []
    return [dashes.encode(**place, detail="name:N"), *names]
