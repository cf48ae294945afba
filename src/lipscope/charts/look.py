"""The look of all charts, the axes that they share, and the files that they are saved as.

The data of a chart may come later: a page puts them in when a reader chooses, by the names
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
# Blue and orange stay apart for every kind of colour vision; so does their brightness.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#8a4f9e"
DASHES = [5, 4]
FONT, MONO = "Helvetica, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
WIDTH, HEIGHT = 460, 320
QUANTITY = "quantity"  # title of an axis that a page names by a signal of this name
FRONT = "layer === null || datum.layer === layer"
HERE = "(head === 'every' || datum.head === head)"
# A browser without these fonts takes a wider one: it writes over what was measured for them.
_ROOM = 32
_NAMED = 24  # pixels beside names of lines, whose width is an estimate

# The style sheet of the page gives these colours a light and a dark value.
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

    The page carries its scripts and data inside, asks no network for anything, and its
    content policy forbids it to.

    Raises:
        InputError: If an ending is another one.
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
    """A chart as a drawing that stands by itself."""
    return _svg(*_as_vega_lite(chart))


def _as_vega_lite(chart: Chart) -> tuple[dict[str, Any], str]:
    """The chart and the release it is written for; text of a row may hold what ends a drawing."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return printable(chart.to_dict(validate=False)), version  # our own: tests check it


def _svg(spec: dict[str, Any], version: str) -> str:
    """Half the size: hundredths of a pixel, and no words for each of thousands of points.

    Axes and legends keep theirs, for those who have the drawing read to them.
    """
    svg = _SPOKEN.sub("<path", vl_convert.vegalite_to_svg(spec, vl_version=version))
    return _PLACE.sub(lambda place: _FINER.sub(r"\1", place[0]), svg)


def _page(spec: Mapping[str, Any], remark: str, version: str) -> str:
    """One page around a chart; its text cannot end a script: ``<`` is written as an escape."""
    # The schema's address is only a name, but a page that fetches nothing holds none.
    data = json.dumps({key: value for key, value in spec.items() if key != "$schema"})
    parts = {
        "title": html.escape(str(spec["title"]["text"])),
        "remark": html.escape(remark),
        # vl-convert's stub asks for a snippet, which is optional.
        "scripts": vl_convert.javascript_bundle(vl_version=version),  # pyright: ignore[reportCallIssue]
        "spec": data.replace("<", "\\u003c"),
    }
    page = importlib.resources.files("lipscope.charts") / "chart.html"
    return re.sub(r"\{(\w+)\}", lambda at: parts.get(at[1], at[0]), page.read_text("utf-8"))


def in_the_page(
    charts: Mapping[str, Any], layers: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Vega specifications of charts without data, and the light colours that names stand for.

    A page that names its colours changes from light to dark without drawing anything again.
    """
    names = {colour: f"--l{k}" for k, colour in enumerate(palette(layers))} | _NAMES
    specs = {name: _as_vega(chart, names) for name, chart in charts.items()}
    specs["bounds"]["padding"] = {"left": 2, "top": 2, "bottom": 2, "right": _NAMED}
    return specs, {name: colour for colour, name in names.items()}


def _as_vega(chart: Any, names: Mapping[str, str]) -> dict[str, Any]:
    spec = vl_convert.vegalite_to_vega(chart.to_dict(validate=False))  # our own: tests check it
    spec.pop("$schema", None)  # only a name, but a page that fetches nothing holds no address
    for axis in spec.get("axes", ()):
        if axis.get("title") == QUANTITY:  # Vega-Lite knows no signal there, Vega does
            axis["title"] = {"signal": QUANTITY}
            spec.setdefault("signals", []).append({"name": QUANTITY, "value": ""})
    spec |= {"background": None, "padding": 2}
    text = json.dumps(spec)
    for colour, name in names.items():
        text = text.replace(f'"{colour}"', f'"var({name})"')
    return json.loads(text)


# --- the look ---------------------------------------------------------------------------------


def tooltip(*names: str) -> list[alt.Tooltip]:
    """Tooltip lines of fields that are already words, or short numbers."""
    return [alt.Tooltip(f"{name}:N", title=name) for name in names]


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
    made = chart.configure(
        font=FONT,
        background="#ffffff",
        padding={"left": 12, "top": 12, "bottom": 12, "right": _ROOM},
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(**quiet, **lines, titleFontWeight="normal", titlePadding=8),
        legend=alt.LegendConfig(**quiet),
        title=alt.TitleConfig(anchor="start", offset=12, **heading),
    )
    # Altair's own `__setattr__` would write into the chart.
    object.__setattr__(made, "__class__", _KINDS.get(type(made), type(made)))
    return made


# --- what charts of a report share ------------------------------------------------------------


def base(name: str, values: Data | None) -> alt.Chart:
    """A chart of values that are part of it, or of what a page puts in under a name."""
    return alt.Chart(alt.NamedData(name=name)) if values is None else inline(values)


def inline(values: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """A chart of values that are part of it."""
    return alt.Chart(alt.InlineData(values=list(values)))


def scale_of(looks: Mapping[str, Any]) -> alt.Scale:
    """What each name looks like."""
    return alt.Scale(domain=[*looks], range=[*looks.values()])


@dataclass(frozen=True)
class Frame:
    """What every chart of a report is told besides its data."""

    axes: Mapping[str, Any] | None = None  # domains and ticks, see `lipscope.pages.points.axes`
    layers: Sequence[str] = ()  # all layers in their order
    layer: str | None = None  # the layer in front; None: all alike
    head: int | Literal["every"] | None = None  # the head; None for all together
    legend: bool = False  # whether the chart has a legend of its own
    # what a point under the mouse says of its row; a page puts its place into words
    said: Sequence[str] = ("i",)
    width: int | str = WIDTH  # pixels, or "container"
    height: int | None = None  # pixels; that of the kind of chart if None

    @property
    def chosen(self) -> list[alt.Parameter]:
        """The layer that stands in front and the head that is shown."""
        layer = alt.param(name="layer", value=self.layer)
        if len(self.said) > 1:  # nobody else lets a reader choose
            menu = alt.binding_select(options=[None, *self.layers], name="layer ")
            layer = alt.param(name="layer", value=self.layer, bind=menu)
        return [layer, alt.param(name="head", value=self.head)]

    @property
    def ends(self) -> alt.Parameter:
        """The domains and ticks of both axes."""
        blank = {"x": [1, 2], "y": [1, 2], "xticks": [1], "yticks": [1], "room": 1.1}
        return alt.param(name="axes", value=dict(self.axes or blank))

    def around(
        self, parts: Sequence[Any], *params: alt.Parameter, height: int | alt.Step = HEIGHT
    ) -> alt.LayerChart:
        """The chart of these parts, which read these parameters."""
        chart = alt.LayerChart(layer=list(parts)).add_params(*params)
        return dressed(chart.properties(width=self.width, height=self.height or height))

    def colours(
        self, field: str, inks: Mapping[str, str], drawn: Collection[str] = (), **legend: Any
    ) -> alt.Color:
        """One colour for each name; a legend, where the chart has one, of those that are drawn."""
        scale = scale_of(inks)
        key = alt.Legend(
            **{"title": None, "symbolOpacity": 1} | legend,
            values=[name for name in inks if not drawn or name in drawn],
        )
        return alt.Color(field, scale=scale, legend=key if self.legend else None)

    def by_layer(self, symbol: str = "stroke") -> alt.Color:
        """One colour for each layer, in even steps; ``symbol`` shows it in the legend."""
        inks = dict(zip(self.layers, palette(len(self.layers)), strict=True))
        stroke = {"symbolType": symbol, "symbolStrokeWidth": 3 * (symbol == "stroke")}
        # The offset is room for the names of the guides, or of lines.
        key = {"title": "layer", "symbolLimit": 0, "offset": 60, "columns": 1 + len(inks) // 17}
        colour = self.colours("layer:N", inks, **key, **stroke)
        return colour.sort(list(self.layers))


def in_lines(lines: Sequence[Sequence[Any]], title: str, said: Sequence[str]) -> Any:
    """Charts in lines, one under the other, with one title and a few words for all of them."""
    for chart in itertools.chain(*lines):
        chart.config = alt.Undefined  # that of the whole is enough
    joined = [alt.hconcat(*some, spacing=18).resolve_legend(color="independent") for some in lines]
    whole = joined[0] if len(joined) == 1 else alt.vconcat(*joined, spacing=30)
    return dressed(whole.properties(title=alt.TitleParams(title, subtitle=list(said))))


def in_front(strong: float, faint: float, front: str = FRONT) -> Any:
    """Opacity of the layer in front, or of all where none is, and of the others."""
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
    """Scale and ticks of a logarithmic axis that is as long as its values."""
    return {
        "scale": alt.Scale(type="log", nice=False, padding=padding),
        "axis": alt.Axis(format="~g", tickCount=ticks, labelOverlap=True),
    }


def trained_length_line(means: alt.Chart, x: alt.X) -> list[alt.Chart]:
    """A line at the longest inputs that the model was trained on, with its name.

    ``means`` know the trained length; nothing where no mean is longer.
    """
    longer = (
        means.transform_filter("isValid(datum.trained) && datum.n > datum.trained")
        .transform_aggregate(at="min(trained)")
        .transform_filter("datum.at > 0")
        .transform_calculate(said="'← trained to ' + datum.at")
    )
    return _named_line(longer, x)


def _named_line(at: alt.Chart, x: alt.X) -> list[alt.Chart]:
    place = x.copy()
    place.shorthand = "at:Q"
    word = at.mark_text(align="right", baseline="bottom", dx=-4, color=QUIET, fontSize=11)
    return [
        at.mark_rule(color=QUIET, strokeWidth=1).encode(x=place),
        word.encode(x=place, y=alt.value("height"), text="said:N"),
    ]


def end_of_training(end: int | None, x: alt.X) -> list[alt.Chart]:
    """The same line from `lipscope.charts.marks.training_end`; nothing for None."""
    at = {"at": end, "said": f"← trained to {end}"}
    return [] if end is None else _named_line(inline([at]), x)


def guides(means: alt.Chart, x: alt.X, y: alt.Y, *, named: bool = True) -> list[alt.Chart]:
    """Dashed lines like ``n^(1/4)`` and ``n^(1/2)``, from the middle of the first length."""
    laws = "[{law: '~ n^(1/4)', p: 0.25}, {law: '~ n^(1/2)', p: 0.5}]"
    lines = (
        means.transform_filter("isValid(datum.sigma)")
        .transform_calculate(log="log(datum.sigma)")
        # Points alone have no growth to compare.
        .transform_joinaggregate(lengths="distinct(n)", groupby=["layer", "kind", "head"])
        .transform_filter("datum.lengths > 1")
        .transform_joinaggregate(first="min(n)")
        .transform_filter("datum.n === datum.first")
        .transform_aggregate(middle="mean(log)", first="min(n)")
        # Lower where the steeper one would leave the chart otherwise.
        .transform_calculate(
            level="max(log(axes.y[0]), min(datum.middle, log(axes.y[1])"
            " - log(axes.x[1] / datum.first) / 2))",
            law=laws,
            end="[0, 1]",
        )
        .transform_flatten(["law"])
        .transform_flatten(["end"])
        .transform_calculate(
            # To the right edge, or to where the line leaves the chart above.
            at="!datum.end ? datum.first : min(axes.x[1], datum.first"
            " * pow(axes.y[1] / exp(datum.level), 1 / datum.law.p))",
            value="exp(datum.level) * pow(datum.at / datum.first, datum.law.p)",
            name="datum.law.law",
        )
    )
    place = {"x": x.copy(), "y": y.copy()}
    place["x"].shorthand, place["y"].shorthand = "at:Q", "value:Q"
    dashes = lines.mark_line(color=QUIET, strokeDash=DASHES, strokeWidth=1.1, opacity=0.8)
    # One above the other, however near the ends are.
    words = [
        lines.transform_filter(f"datum.end && datum.law.p === {p}").mark_text(
            align="left", dx=4, dy=dy, color=QUIET, fontSize=11
        )
        for p, dy in ((0.25, 7), (0.5, -6))
    ]
    names = [word.encode(**place, text="name:N") for word in words] if named else []
    return [dashes.encode(**place, detail="name:N"), *names]
