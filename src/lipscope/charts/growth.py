"""Growth of sigma with the number of tokens, and over the steps of training."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import (
    AXIS,
    BLUE,
    FRONT,
    HERE,
    ORANGE,
    Data,
    Frame,
    across,
    as_long,
    base,
    guides,
    in_front,
    tooltip,
    trained_length_line,
    up,
)
from lipscope.charts.marks import INK

Grown = Literal["sigma", "rest", "radius", "rank"]
_TITLES: dict[Grown, str] = {
    "sigma": "sigma",
    "rest": "sigma, top token held fixed",
    "radius": "radius: largest token norm",
    "rank": "stable rank (Frobenius norm / sigma)²",
}
_REST = {"sigma": "datum.rest", "low": "datum.rest_low", "high": "datum.rest_high"}
ALL, REST = "all tokens move", "top token fixed"


def layers_chart(
    frame: Frame,
    points: Data | None = None,
    means: Data | None = None,
    *,
    grown: Grown = "sigma",
    names: Data | None = None,
) -> alt.LayerChart:
    """Sigma, radius or stable rank against the number of tokens, both logarithmic.

    Points are single rows, lines run through geometric means. Sigma has guides like n^(1/4) and
    n^(1/2), and bars up to `upper`; where its lines have ``names`` beside them, their 95 %
    intervals instead, of means over windows that share no text.
    """
    x, colour = across(), frame.by_layer()
    mean, single = base("means", means), base("points", points)
    if grown == "rest":
        mean, single = (one.transform_calculate(**_REST) for one in (mean, single))
    sigma = grown in ("sigma", "rest")
    field = "sigma" if sigma else grown
    free = alt.Y(f"{field}:Q", title=_TITLES[grown], **as_long())
    y = up("sigma:Q", _TITLES[grown]) if sigma else free
    mean, single = (one.transform_filter(f"{HERE} && datum.{field} > 0") for one in (mean, single))
    lines = mean.mark_line(strokeWidth=2).encode(
        x=x, y=y, color=colour, detail=["layer:N", "kind:N", "head:N"], opacity=in_front(0.95, 0.16)
    )
    single = single.transform_calculate(
        at="datum.n * pow(axes.room, datum.order)",
        top="isValid(datum.upper) ? datum.upper : datum.sigma",
    )
    place = {"x": across("at:Q"), "y": y, "color": colour}
    dots = single.mark_circle(size=20, cursor="pointer").encode(
        **place, opacity=in_front(0.7, 0.06), tooltip=tooltip(*frame.said)
    )
    behind = trained_length_line(mean, x)
    if sigma:
        behind += guides(mean, x, y, named=names is None)
    if sigma and names is None:
        bars = single.transform_filter(FRONT).mark_rule(strokeWidth=1, opacity=0.35)
        behind.append(bars.encode(**place, y2="top:Q"))
    named = []
    if names is not None:
        bars = mean.transform_filter("datum.apart").mark_rule(strokeWidth=2)
        low, faint = up("low:Q", _TITLES[grown]), in_front(0.55, 0.06)
        behind.append(bars.encode(x=x, y=low, y2="high:Q", color=colour, opacity=faint))
        words = base("names", names).mark_text(align="left", dx=4, fontSize=11)
        place = {"x": alt.value("width"), "y": y, "color": colour, "opacity": in_front(1.0, 0.06)}
        named = [words.encode(**place, text="name:N")]
    return frame.around([*behind, lines, dots, *named], frame.ends, *frame.chosen)


def radius_chart(frame: Frame, points: Data | None = None) -> alt.LayerChart:
    """Sigma of single rows against the radius, logarithmic; larger points are longer windows."""
    some = base("points", points).transform_filter(f"{HERE} && datum.radius > 0 && datum.sigma > 0")
    dots = some.mark_circle(cursor="pointer").encode(
        x=alt.X("radius:Q", title=_TITLES["radius"], **as_long()),
        y=alt.Y("sigma:Q", title="sigma", **as_long()),
        size=alt.Size("n:Q", legend=None, scale=alt.Scale(range=[18, 90])),
        color=frame.by_layer("circle"),
        opacity=in_front(0.65, 0.07),
        tooltip="i:Q",
    )
    return frame.around([dots], *frame.chosen)


def focus_chart(
    frame: Frame, points: Data | None = None, means: Data | None = None
) -> alt.LayerChart:
    """Sigma with its intervals, and sigma with the top token held fixed, of one layer.

    Points are single windows, bars reach up to `upper`, lines run through geometric means;
    the other layers stand faintly behind, and dashed lines grow like n^(1/4) and n^(1/2).
    """
    x, y = across(), up("value:Q", "sigma")
    here = f"{HERE} && datum.layer === layer"
    mean = base("means", means)
    behind = (
        mean.transform_filter(f"{HERE} && datum.layer !== layer")
        .mark_line(color=AXIS, strokeWidth=1.3, opacity=0.55)
        .encode(x=x, y=up("sigma:Q", "sigma"), detail="layer:N")
    )
    mine = mean.transform_filter(here)
    inks = {ALL: BLUE, REST: ORANGE}
    colour = frame.colours("series:N", inks, orient="top", symbolType="circle")
    lines = _folded(mine).mark_line(strokeWidth=2.4).encode(x=x, y=y, color=colour)
    # Windows side by side around their length: sigma with its bar, and without the token.
    windows = _folded(
        base("points", points).transform_filter(here),
        at="datum.n * pow(axes.room, datum.order)",
        top="datum.key === 'a' && isValid(datum.upper) ? datum.upper : datum.value",
    )
    place = {"x": across("at:Q"), "y": y}
    bars = windows.mark_rule(strokeWidth=1.2, opacity=0.55)
    dots = windows.mark_circle(size=30, opacity=0.75, cursor="pointer")
    ring = windows.transform_filter("datum.i === picked && datum.key === 'a'")
    ring = ring.mark_point(size=150, stroke=marks.INK, strokeWidth=1.8, filled=False)
    layers = [
        *(behind, *trained_length_line(mine, x), *guides(mine, x, y), lines),
        bars.encode(**place, y2="top:Q", color=colour),
        dots.encode(**place, color=colour, tooltip="i:Q"),
        ring.encode(**place),
    ]
    return frame.around(layers, frame.ends, alt.param(name="picked", value=-1), *frame.chosen)


def _folded(records: alt.Chart, **more: str) -> alt.Chart:
    """Sigma and sigma without the token as two series of one ``value``."""
    return (
        records.transform_calculate(a="datum.sigma", b="datum.rest")
        .transform_fold(["a", "b"], as_=["key", "value"])
        .transform_filter("isValid(datum.value)")
        .transform_calculate(series=f"datum.key === 'a' ? '{ALL}' : '{REST}'", **more)
    )


# --- over training


def training_chart(
    frame: Frame,
    points: Data | None = None,
    means: Data | None = None,
    *,
    turn: float | None = None,
) -> alt.LayerChart:
    """Geometric means of sigma at every checkpoint, with their intervals, one colour a layer.

    Bars reach from the lower end of the 95 % interval of the mean of log sigma over windows to
    the upper end of that of log upper. Small points are single windows of the layer in front.
    ``turn`` is the step at which the axis turns from linear to logarithmic; None for a linear one.
    """
    span: dict[str, Any] = {"domain": alt.ExprRef("axes.x"), "nice": False}
    kind = {"type": "linear", "zero": False} if turn is None else {"type": "symlog"}
    more = {} if turn is None else {"constant": turn}
    axis = {"format": ",d", "labelOverlap": True, "grid": False}
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(**kind, **more, **span),
        axis=alt.Axis(values=alt.ExprRef("axes.xticks"), **axis),
    )
    y, colour = up("sigma:Q", "sigma"), frame.by_layer()
    mean = base("means", means).transform_filter(HERE)
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": in_front(0.95, 0.16)}
    ends = place | {"y": up("low:Q", "sigma"), "opacity": in_front(0.5, 0.06)}
    single = base("points", points).transform_filter(f"{HERE} && datum.layer === layer")
    windows = single.mark_circle(size=14, cursor="pointer", opacity=0.5)
    layers = [
        mean.mark_rule(strokeWidth=1.4).encode(**ends, y2="high:Q"),
        mean.mark_line(strokeWidth=2).encode(**place, y=y),
        windows.encode(x=x, y=y, color=colour, tooltip="i:Q"),
        mean.mark_circle(size=40, cursor="pointer").encode(**place, y=y, tooltip="t:Q"),
    ]
    return frame.around(layers, frame.ends, *frame.chosen)


def signals_chart(
    frame: Frame,
    rows: Data | None = None,
    alerts: Data | None = None,
    *,
    scale: Literal["log", "linear"] = "linear",
) -> alt.LayerChart:
    """One signal of every layer over the steps of training; triangles and rules are alerts.

    The layer of what the whole model has, such as its loss, is "all"; an alert without a value is
    a rule.
    """
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(domain=alt.ExprRef("axes.x"), nice=False),
        axis=alt.Axis(format=",d", tickMinStep=1, grid=False, labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(type=scale, domain=alt.ExprRef("axes.y"), nice=False, zero=False),
        axis=alt.Axis(format=".4~g", tickCount=5, labelOverlap=True, grid=scale == "linear"),
    )
    whole = alt.when("datum.layer === 'all'").then(alt.value(INK))
    colour = whole.otherwise(frame.by_layer())
    front = in_front(0.95, 0.12, f"{FRONT} || datum.layer === 'all'")
    read, told = base("rows", rows), base("alerts", alerts)
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": front}
    rule = told.transform_filter("datum.value === null").mark_rule(
        color=ORANGE, strokeWidth=1.6, strokeDash=[4, 3]
    )
    triangle = told.transform_filter("datum.value !== null").mark_point(
        shape="triangle-down", size=110, filled=True, color=ORANGE, opacity=1
    )
    layers = [
        read.mark_line(strokeWidth=1.8).encode(**place, y=y, detail="layer:N"),
        read.mark_circle(size=14, cursor="pointer").encode(**place, y=y, tooltip="reading:Q"),
        rule.encode(x=x, tooltip="alert:Q"),
        triangle.encode(x=x, y=y, tooltip="alert:Q"),
    ]
    return frame.around(layers, frame.ends, frame.chosen[0], height=200)
