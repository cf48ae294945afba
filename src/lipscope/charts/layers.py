"""Layer-by-layer charts: exponents, heads, depth, and comparison of two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from lipscope.charts.look import (
    BLUE,
    DASHES,
    GREEN,
    HERE,
    ORANGE,
    PURPLE,
    QUANTITY,
    QUIET,
    Data,
    Frame,
    across,
    base,
    in_front,
    inline,
    scale_of,
    up,
)
from lipscope.charts.marks import ALL, INK, KINDS, REST

MAPS = {"attention": BLUE, "normed": PURPLE, "heads": QUIET, "residual": GREEN, "block": ORANGE}
"""Maps of a layer with their colours."""
# Charts over depth: title, legend heading, and colours. `products` covers several blocks: the
# product of their sigmas, and sigma of their composition.
_DEPTHS = {
    "lines": ("sigma", "map", MAPS),
    "products": ("sigma, product of sigmas", "blocks 0 to", {"product": ORANGE, "stack": BLUE}),
}
SIDES = ("a", "b")
Quantity = Literal["sigma", "relative", "share"]
TITLES: dict[Quantity, str] = {
    "sigma": "sigma",
    "relative": "relative",
    "share": "share of the top token",
}
_SHAPES: dict[str, str] = dict(
    zip(KINDS, ("square", "circle", "triangle-up", "diamond", "cross"), strict=True)
)
_CELL, _ROW = 26, 34  # pixels per head and per layer


# --- through depth ----------------------------------------------------------------------------


def depth_chart(
    frame: Frame,
    values: Data | None = None,
    whole: Data | None = None,
    *,
    of: Literal["lines", "products"] = "lines",
) -> alt.LayerChart:
    """Sigma of every map by layer, with the model's map as a band and a dashed line.

    Or the product over the blocks up to each layer, and sigma of their composition.
    """
    title, key, inks = _DEPTHS[of]
    lines = base(of, values)
    drawn = {str(line["map"]) for line in values or ()}
    colour = frame.colours("map:N", inks, drawn, title=key, symbolType="circle")
    axis = alt.Axis(format="d", tickMinStep=1, grid=False)
    x = alt.X("layer:Q", title="layer", axis=axis, scale=alt.Scale(nice=False, padding=14))
    y, low = up("sigma:Q", title), up("low:Q", title)
    model = base("whole", whole)
    band = model.mark_rect(opacity=0.12, color=INK)
    dashes = model.mark_rule(strokeDash=DASHES, strokeWidth=1.6, color=INK)
    word = model.mark_text(align="right", baseline="bottom", dy=-3, color=INK, fontSize=11)
    label = word.encode(y=y, x=alt.value("width"), text=alt.value("the model's map"))
    bars = lines.mark_rule(strokeWidth=1.6, opacity=0.55)
    dots = lines.mark_circle(size=44, opacity=1, cursor="pointer")
    parts = [
        band.encode(y=low, y2="high:Q"),
        dashes.encode(y=y, tooltip="z:Q"),
        *([label] if frame.legend else []),  # a page labels it in the legend above
        bars.encode(x=x, y=low, y2="high:Q", color=colour),
        lines.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        dots.encode(x=x, y=y, tooltip="z:Q", color=colour),
    ]
    return frame.around(parts, frame.ends)


# --- exponents --------------------------------------------------------------------------------


def exponents_chart(
    frame: Frame, fits: Data | None = None, built: str = "built inputs"
) -> alt.LayerChart:
    """The exponent s of sigma ~ n^s of every layer, with its interval.

    Hollow points: no power law fits (F test, and means far from the line). Dashed: 1/4 and 1/2.
    ``built`` names the kind of constructed inputs in the records.
    """
    inks = {ALL: BLUE, REST: ORANGE, built: PURPLE}
    names = [*inks]
    data = (
        base("fits", fits)
        .transform_filter(HERE)
        .transform_calculate(
            series=f"datum.kind === 'real' ? '{ALL}' : "
            f"datum.kind === 'rest' ? '{REST}' : {json.dumps(built)}"
        )
    )
    axis = alt.Axis(grid=True, tickBand="extent", ticks=False, domain=False)
    y = alt.Y("layer:N", sort=list(frame.layers), title="layer", axis=axis)
    offset = alt.YOffset("series:N", sort=names, scale=alt.Scale(domain=names, paddingOuter=0.35))
    title = "exponent s of sigma ~ nˢ"
    ticks, scale = alt.Axis(tickCount=6, format=".2~f"), alt.Scale(zero=True, nice=True)
    x = alt.X("slope:Q", title=title, scale=scale, axis=ticks)
    series = {"real": ALL, "rest": REST}
    drawn = {series.get(fit["kind"], built) for fit in fits or ()}
    colour = frame.colours("series:N", inks, drawn, orient="top")
    place: dict[str, Any] = {"y": y, "yOffset": offset, "color": colour}
    bars = data.mark_rule(strokeWidth=2.4, opacity=0.5)
    filled = alt.Fill("series:N", scale=scale_of(inks), legend=None)
    fill = alt.when("datum.fits === false").then(alt.value("#ffffff")).otherwise(filled)
    dots = data.mark_point(size=54, strokeWidth=2, opacity=1, cursor="pointer")
    laws = inline([{"s": 0.25, "law": "¼"}, {"s": 0.5, "law": "½"}])
    word = laws.mark_text(color=QUIET, baseline="bottom", dy=-3, fontSize=11)
    parts = [
        laws.mark_rule(color=QUIET, strokeDash=DASHES, opacity=0.8).encode(x="s:Q"),
        word.encode(x="s:Q", y=alt.value(0), text="law:N"),
        bars.encode(**place, x=alt.X("low:Q", title=title), x2="high:Q"),
        dots.encode(**place, x=x, fill=fill, tooltip="f:Q"),
    ]
    height = alt.Step(_ROW, **{"for": "position"})
    return frame.around(parts, frame.chosen[1], height=height)


def slopes_chart(frame: Frame, slopes: Data | None = None) -> alt.LayerChart:
    """Slopes of log sigma over log n between consecutive lengths, one colour per layer."""
    data = base("slopes", slopes).transform_filter(f"{HERE} && datum.kind === 'real'")
    place: dict[str, Any] = {
        "x": alt.X(
            "span:O",
            title="from length to length, n",
            sort=alt.EncodingSortField("from", op="min"),
            axis=alt.Axis(grid=False, labelAngle=0, labelOverlap=True),
        ),
        "y": alt.Y("slope:Q", title="local slope", axis=alt.Axis(tickCount=6)),
        "color": frame.by_layer(),
        "opacity": in_front(0.9, 0.14),
    }
    laws = inline([{"slope": 0.25}, {"slope": 0.5}])
    parts = [
        laws.mark_rule(color=QUIET, strokeDash=DASHES, opacity=0.8).encode(y="slope:Q"),
        data.mark_line(strokeWidth=1.8).encode(**place),
        data.mark_circle(size=34).encode(**place, tooltip="f:Q"),
    ]
    return frame.around(parts, *frame.chosen)


# --- heads ------------------------------------------------------------------------------------


def heads_chart(
    frame: Frame, cells: Data | None = None, *, quantity: Quantity = "sigma"
) -> alt.LayerChart:
    """Sigma, relative, or the share of the top token, by layer and head, at one length.

    The mark of a cell is ``top``, the most frequent kind of top token. Colours are logarithmic
    except for shares.
    """
    share = quantity == "share"
    data = base("cells", cells).transform_filter(f"isValid(datum.{quantity})")
    x = alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, orient="bottom"))
    y = alt.Y("layer:N", sort=list(frame.layers), title="layer", scale=alt.Scale(reverse=False))
    range_: dict[str, Any] = {"domain": [0, 1]} if share else {"type": "log", "nice": False}
    key = alt.Legend(
        title=TITLES[quantity],
        format=".0%" if share else "~g",
        orient="top",  # with few layers it would be longer than the map
        gradientLength=220,
        titleLimit=0,
        tickCount=4,
    )
    scale = alt.Scale(scheme="viridis", **range_)
    colour = alt.Color(f"{quantity}:Q", scale=scale, legend=key)
    cell = data.mark_rect(cornerRadius=2, cursor="pointer")
    kinds = alt.Legend(
        title="kind of the top token in most windows",
        orient="top",
        titleLimit=0,
        symbolType="square",
        symbolFillColor=INK,
        symbolOpacity=1,
        symbolSize=60,
        values=list(_SHAPES),
    )
    marked = kinds if frame.legend else None
    shape = alt.Shape("top:N", scale=scale_of(_SHAPES), legend=marked)
    # Small and centred, so that the colour stays visible.
    kind = data.transform_filter("isValid(datum.top)")
    kind = kind.mark_point(size=54, fill="#ffffff", strokeWidth=1, opacity=1)
    mark = data.transform_filter(f"datum.layer === layer && {HERE}")
    mark = mark.mark_rect(fill=None, stroke=INK, strokeWidth=2.4, cornerRadius=2)
    parts = [
        cell.encode(x=x, y=y, color=colour, tooltip="m:Q"),
        kind.encode(x=x, y=y, shape=shape, stroke=alt.value(INK), tooltip="m:Q"),
        mark.encode(x=x, y=y),
    ]
    return frame.around(parts, *frame.chosen, height=alt.Step(_CELL))


# --- two runs ---------------------------------------------------------------------------------


def sides_chart(
    frame: Frame,
    means: Data | None = None,
    *,
    names: Sequence[str] = ("", ""),
    title: str = QUANTITY,
) -> alt.LayerChart:
    """Geometric means of both runs against the number of tokens, with their 95 % intervals."""
    label = f"datum.label === 'a' ? {json.dumps(names[0])} : {json.dumps(names[1])}"
    key: dict[str, Any] = {"symbolType": "circle", "orient": "top", "labelLimit": 0}
    inks = {"a": BLUE, "b": ORANGE}
    colour = frame.colours("side:N", inks, labelExpr=label, **key)
    data = base("means", means).transform_calculate(
        at="datum.n * pow(axes.room, datum.side === 'a' ? -0.12 : 0.12)"
    )
    place: dict[str, Any] = {"x": across("at:Q"), "color": colour}
    y = up("value:Q", title)
    # Clip bars at the axis: intervals from two windows can be extremely wide.
    bars = data.mark_rule(strokeWidth=1.6, opacity=0.6, clip=True)
    dots = data.mark_circle(size=46, opacity=1, cursor="pointer")
    parts = [
        bars.encode(**place, y=up("low:Q", title), y2="high:Q"),
        data.mark_line(strokeWidth=2).encode(**place, y=y),
        dots.encode(**place, y=y, tooltip="c:Q"),
    ]
    return frame.around(parts, frame.ends)


def changes_chart(
    frame: Frame,
    changes: Data | None = None,
    *,
    of: Literal["ratio", "difference"] = "ratio",
    title: str = QUANTITY,
) -> alt.LayerChart:
    """The second run relative to the first, by layer, with 95 % intervals.

    The ratio at one length, or the difference of exponents. Filled marks changed beyond sampling
    error, hollow ones did not; ``low`` is null without an interval. Dashed: no change.
    """
    x = alt.X("layer:N", sort=list(frame.layers), title="layer", axis=alt.Axis(labelAngle=0))
    if of == "ratio":
        (y, low), same = (up(f"{field}:Q", title) for field in (of, "low")), 1.0
    else:
        plain = {"scale": alt.Scale(nice=True), "axis": alt.Axis(tickCount=6)}
        y, low = (alt.Y(f"{field}:Q", title=title, **plain) for field in (of, "low"))
        same = 0.0
    data = base("changes", changes)
    line = data.mark_rule(color=QUIET, strokeDash=DASHES)
    bars = data.transform_filter("isValid(datum.low)")
    bars = bars.mark_rule(strokeWidth=1.8, color=INK, opacity=0.7)
    fill = alt.when("datum.changed").then(alt.value(ORANGE)).otherwise(alt.value("#ffffff"))
    look: Mapping[str, Any] = {"strokeWidth": 1.8, "color": ORANGE, "filled": True, "opacity": 1}
    dots = data.mark_point(size=70, cursor="pointer", **look)
    parts = [
        line.encode(y=alt.datum(same, type="quantitative")),
        bars.encode(x=x, y=low, y2="high:Q"),
        dots.encode(x=x, y=y, fill=fill, stroke=alt.value(ORANGE), tooltip="c:Q"),
    ]
    return frame.around(parts, frame.ends)
