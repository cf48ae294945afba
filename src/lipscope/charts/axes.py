"""Axes, guides and colours that the charts of a report share; their data may come later.

A chart is made once. In a file its data and its axes are part of it; in a page they are
put in when a reader chooses, by the names `points`, `means`, `axes` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from lipscope.charts.look import QUIET, dressed
from lipscope.charts.marks import palette

Data = Sequence[Mapping[str, Any]]

# Blue and orange stay apart for every kind of colour vision; so does their brightness.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#8a4f9e"
GROWS = "number of tokens n"
WIDTH, HEIGHT = 460, 320
FRONT = "layer === null || datum.layer === layer"


def data(name: str, values: Data | None) -> alt.NamedData | alt.InlineData:
    """Values that are part of the chart, or a name under which a page puts them in."""
    return alt.NamedData(name=name) if values is None else alt.InlineData(list(values), name=name)


@dataclass(frozen=True)
class Frame:
    """What every chart of a report is told besides its data.

    Attributes:
        axes: Domains and ticks, see `lipscope.pages.points.axes`.
        layer: The layer in front; None: all alike.
        head: The head; None for all together.
        legend: Whether the chart has a legend of its own.
        width: Pixels, or "container".
        height: Pixels.
    """

    axes: Mapping[str, Any] | None = None
    layer: str | None = None
    head: int | None = None
    legend: bool = False
    width: int | str = WIDTH
    height: int = HEIGHT

    @property
    def chosen(self) -> list[alt.Parameter]:
        """The layer that stands in front and the head that is shown."""
        return [alt.param(name=name, value=getattr(self, name)) for name in ("layer", "head")]

    @property
    def ends(self) -> alt.Parameter:
        """The domains and ticks of both axes."""
        blank = {"x": [1, 2], "y": [1, 2], "xticks": [1], "yticks": [1], "room": 1.1}
        return alt.param(name="axes", value=dict(self.axes or blank))

    def around(
        self, layers: list[Any], *params: alt.Parameter, height: alt.Step | None = None
    ) -> alt.LayerChart:
        """The chart of these layers, which read these parameters."""
        chart = alt.LayerChart(layer=layers).add_params(*params)
        return dressed(chart.properties(width=self.width, height=height or self.height))


def in_front(strong: float, faint: float) -> Any:
    """Opacity of the layer in front, or of all where none is, and of the others."""
    front = alt.when(FRONT).then(alt.value(strong))
    return front.otherwise(alt.value(faint))


def across(field: str = "n:Q", title: str = GROWS) -> alt.X:
    """The logarithmic axis of lengths."""
    return alt.X(
        field,
        title=title,
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


def by_layer(layers: Sequence[str], *, legend: bool, symbol: str = "stroke") -> alt.Color:
    """One colour for each layer, in even steps; ``symbol`` shows it in the legend."""
    key = alt.Legend(
        title="layer",
        symbolType=symbol,
        symbolStrokeWidth=3 * (symbol == "stroke"),
        symbolOpacity=1,
        symbolLimit=0,
        offset=40,  # room for the names of the guides
    )
    return alt.Color(
        "layer:N",
        sort=list(layers),
        scale=alt.Scale(domain=list(layers), range=palette(len(layers))),
        legend=key if legend else None,
    )


def training_end(means: alt.Chart, x: alt.X) -> list[alt.Chart]:
    """A line at the longest inputs that the model was trained on, with its name.

    Args:
        means: A chart of the means, which know the trained length.
        x: Axis of lengths.

    Returns:
        The line and its name; both empty where no mean is longer.
    """
    base = (
        means.transform_filter("isValid(datum.trained) && datum.n > datum.trained")
        .transform_aggregate(at="min(trained)")
        .transform_filter("datum.at > 0")
        .transform_calculate(said="'← trained to ' + datum.at")
    )
    return _named_line(base, x)


def _named_line(base: alt.Chart, x: alt.X) -> list[alt.Chart]:
    place = x.copy()
    place.shorthand = "at:Q"
    word = base.mark_text(align="right", baseline="bottom", dx=-4, color=QUIET, fontSize=11)
    return [
        base.mark_rule(color=QUIET, strokeWidth=1).encode(x=place),
        word.encode(x=place, y=alt.value("height"), text="said:N"),
    ]


def end_of_training(end: int | None, x: alt.X) -> list[alt.Chart]:
    """The same line from `lipscope.charts.marks.training_end`; nothing for None."""
    if end is None:
        return []
    base = alt.Chart(alt.InlineData([{"at": end, "said": f"← trained to {end}"}]))
    return _named_line(base, x)


def guides(means: alt.Chart, x: alt.X, y: alt.Y, field: str = "sigma") -> list[alt.Chart]:
    """Dashed lines like ``n^(1/4)`` and ``n^(1/2)``, from the middle of the first length.

    Args:
        means: A chart of the means that they start from.
        x: Axis of lengths.
        y: Axis of sigma.
        field: Column of the means.

    Returns:
        The lines, and their names.
    """
    laws = "[{law: '~ n^(1/4)', p: 0.25}, {law: '~ n^(1/2)', p: 0.5}]"
    base = (
        means.transform_filter(f"isValid(datum.{field})")
        .transform_calculate(log=f"log(datum.{field})")
        .transform_joinaggregate(first="min(n)", last="max(n)")
        .transform_filter("datum.n === datum.first && datum.last > datum.first")
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
    lines = base.mark_line(color=QUIET, strokeDash=[5, 4], strokeWidth=1.1, opacity=0.8)
    # One above the other, however near the ends are.
    words = [
        base.transform_filter(f"datum.end && datum.law.p === {p}").mark_text(
            align="left", dx=4, dy=dy, color=QUIET, fontSize=11
        )
        for p, dy in ((0.25, 7), (0.5, -6))
    ]
    return [
        lines.encode(**place, detail="name:N"),
        *(w.encode(**place, text="name:N") for w in words),
    ]
