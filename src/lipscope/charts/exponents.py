"""Fitted exponents of growth by layer, with their intervals, and slopes between lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt

from lipscope.charts.axes import BLUE, ORANGE, PURPLE, Data, Frame, by_layer, data, in_front
from lipscope.charts.look import QUIET

SERIES = {"real": ("all tokens move", BLUE), "rest": ("top token fixed", ORANGE)}
_ROW = 34  # pixels of a layer


def exponents_chart(
    fits: Data | None, layers: Sequence[str], frame: Frame, built: str = "built inputs"
) -> alt.LayerChart:
    """The exponent s of sigma ~ n^s of every layer, with its interval.

    Hollow points: no power law fits (F test, and means far from the line). Dashed: 1/4 and 1/2.

    Args:
        fits: Records with ``layer, head, kind, slope, low, high, fits``, or None where a page
            puts them in.
        layers: All layers in their order.
        frame: The head and the width.
        built: Name of the kind of built inputs that the records hold.

    Returns:
        The chart.
    """
    names = [*(name for name, _ in SERIES.values()), built]
    colours = [*(colour for _, colour in SERIES.values()), PURPLE]
    real, rest = (SERIES[key][0] for key in ("real", "rest"))
    base = (
        alt.Chart(data("fits", fits))
        .transform_filter("datum.head === head")
        .transform_calculate(
            series=f"datum.kind === 'real' ? '{real}' : "
            f"datum.kind === 'rest' ? '{rest}' : {json.dumps(built)}"
        )
    )
    y = alt.Y(
        "layer:N",
        sort=list(layers),
        title="layer",
        axis=alt.Axis(grid=True, tickBand="extent", ticks=False, domain=False),
    )
    offset = alt.YOffset("series:N", sort=names, scale=alt.Scale(domain=names, paddingOuter=0.35))
    x = alt.X(
        "slope:Q",
        title="exponent s of sigma ~ nˢ",
        scale=alt.Scale(zero=True, nice=True),
        axis=alt.Axis(tickCount=6, format=".2~f"),
    )
    scale = alt.Scale(domain=names, range=colours)
    colour = alt.Color(
        "series:N",
        scale=scale,
        legend=alt.Legend(title=None, orient="top", symbolOpacity=1) if frame.legend else None,
    )
    bars = base.mark_rule(strokeWidth=2.4, opacity=0.5).encode(
        x=alt.X("low:Q", title="exponent s of sigma ~ nˢ"),
        x2="high:Q",
        y=y,
        yOffset=offset,
        color=colour,
    )
    dots = base.mark_point(size=54, strokeWidth=2, opacity=1, cursor="pointer").encode(
        x=x,
        y=y,
        yOffset=offset,
        color=colour,
        fill=alt.when("datum.fits === false")
        .then(alt.value("#ffffff"))
        .otherwise(alt.Fill("series:N", scale=scale, legend=None)),
        tooltip="f:Q",
    )
    height = alt.Step(_ROW, **{"for": "position"})
    return frame.around([*_laws(), bars, dots], frame.chosen[1], height=height)


def _laws() -> list[alt.Chart]:
    laws = alt.Chart(alt.InlineData([{"s": 0.25, "law": "¼"}, {"s": 0.5, "law": "½"}]))
    line = laws.mark_rule(color=QUIET, strokeDash=[5, 4], opacity=0.8).encode(x="s:Q")
    word = laws.mark_text(color=QUIET, baseline="bottom", dy=-3, fontSize=11).encode(
        x="s:Q", y=alt.value(0), text="law:N"
    )
    return [line, word]


def slopes_chart(slopes: Data | None, layers: Sequence[str], frame: Frame) -> alt.LayerChart:
    """Slopes of log sigma on log n between neighbouring lengths, one colour for each layer.

    Args:
        slopes: Records with ``layer, head, kind, span, from, slope``.
        layers: All layers in their order.
        frame: What is in front, and the size.

    Returns:
        The chart.
    """
    colour = by_layer(layers, legend=frame.legend)
    base = alt.Chart(data("slopes", slopes)).transform_filter(
        "datum.head === head && datum.kind === 'real'"
    )
    place = {
        "x": alt.X(
            "span:O",
            title="from length to length, n",
            sort=alt.EncodingSortField("from", op="min"),
            axis=alt.Axis(grid=False, labelAngle=0, labelOverlap=True),
        ),
        "y": alt.Y("slope:Q", title="local slope", axis=alt.Axis(tickCount=6)),
    }
    opacity = in_front(0.9, 0.14)
    lines = base.mark_line(strokeWidth=1.8).encode(**place, color=colour, opacity=opacity)
    dots = base.mark_circle(size=34).encode(**place, color=colour, opacity=opacity, tooltip="f:Q")
    laws = (
        alt.Chart(alt.InlineData([{"slope": 0.25}, {"slope": 0.5}]))
        .mark_rule(color=QUIET, strokeDash=[5, 4], opacity=0.8)
        .encode(y="slope:Q")
    )
    return frame.around([laws, lines, dots], *frame.chosen)
