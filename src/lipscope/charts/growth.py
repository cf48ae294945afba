"""Charts over number of tokens, training step, and size of a move."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt

from lipscope.charts.look import (
    AXIS,
    BLUE,
    DASHES,
    FRONT,
    GREEN,
    HEIGHT,
    HERE,
    ORANGE,
    PURPLE,
    QUIET,
    Data,
    Frame,
    across,
    as_long,
    base,
    guides,
    in_front,
    scale_of,
    tooltip,
    trained_length_line,
    up,
)
from lipscope.charts.marks import ALL, CERTIFIED, INK, PROMISE, REST
from lipscope.records import ADVERSARIAL, CERTIFICATE, MEASURED

Grown = Literal["sigma", "rest", "radius", "rank"]
_TITLES: dict[Grown, str] = {
    "sigma": "sigma",
    "rest": "sigma, top token held fixed",
    "radius": "radius: largest token norm",
    "rank": "stable rank (Frobenius norm / sigma)²",
}
_REST = {"sigma": "datum.rest", "low": "datum.rest_low", "high": "datum.rest_high"}


def layers_chart(
    frame: Frame,
    points: Data | None = None,
    means: Data | None = None,
    *,
    grown: Grown = "sigma",
    names: Data | None = None,
) -> alt.LayerChart:
    """Sigma, radius or stable rank against the number of tokens, on logarithmic axes.

    Points are single rows, lines connect geometric means. Sigma has guides like n^(1/4) and
    n^(1/2), and bars up to `upper`; if lines are labelled with ``names``, bars show their 95 %
    intervals instead, for means over windows without shared text.
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
        **place, opacity=in_front(0.7, 0.06), tooltip=tooltip(*frame.hover)
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
    rows = base("points", points).transform_filter(f"{HERE} && datum.radius > 0 && datum.sigma > 0")
    dots = rows.mark_circle(cursor="pointer").encode(
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
    """Sigma of one layer with intervals, and sigma with the top token held fixed.

    Points are single windows, bars reach up to `upper`, lines connect geometric means; other layers
    are faint in the background, and dashed lines grow like n^(1/4) and n^(1/2).
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
    drawn = [ALL, *([REST] if any(point.get("rest") for point in points or ()) else [])]
    colour = frame.colours("series:N", inks, drawn, orient="top", symbolType="circle")
    lines = _folded(mine).mark_line(strokeWidth=2.4).encode(x=x, y=y, color=colour)
    # Windows of one length side by side: sigma with its bar, and without the token.
    windows = _folded(
        base("points", points).transform_filter(here),
        at="datum.n * pow(axes.room, datum.order)",
        top="datum.key === 'a' && isValid(datum.upper) ? datum.upper : datum.value",
    )
    place = {"x": across("at:Q"), "y": y}
    bars = windows.mark_rule(strokeWidth=1.2, opacity=0.55)
    dots = windows.mark_circle(size=30, opacity=0.75, cursor="pointer")
    ring = windows.transform_filter("datum.i === picked && datum.key === 'a'")
    ring = ring.mark_point(size=150, stroke=INK, strokeWidth=1.8, filled=False)
    layers = [
        *(behind, *trained_length_line(mine, x), *guides(mine, x, y), lines),
        bars.encode(**place, y2="top:Q", color=colour),
        dots.encode(**place, color=colour, tooltip="i:Q"),
        ring.encode(**place),
    ]
    return frame.around(layers, frame.ends, alt.param(name="picked", value=-1), *frame.chosen)


def _folded(records: alt.Chart, **more: str) -> alt.Chart:
    """Sigma with and without the token as two series of one ``value``."""
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
    """Geometric means of sigma at every checkpoint, with intervals, one colour per layer.

    Bars reach from the lower end of the 95 % interval of the mean of log sigma over windows to
    the upper end of that of log upper. Small points are single windows of the selected layer.
    ``turn`` is the step at which the axis changes from linear to logarithmic; None: linear.
    """
    span: dict[str, Any] = {"domain": alt.ExprRef("axes.x"), "nice": False}
    linear = {"type": "linear", "zero": False}
    kind: dict[str, Any] = linear if turn is None else {"type": "symlog", "constant": turn}
    axis = {"format": ",d", "labelOverlap": True, "grid": False}
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(**kind, **span),
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


def signals_chart(frame: Frame, *, scale: Literal["log", "linear"] = "linear") -> alt.LayerChart:
    """A signal of every layer over training steps; triangles and rules mark alerts.

    Signals of the whole model, such as its loss, have layer "all"; an alert without a value is a
    rule.
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
    read, alerts = base("rows", None), base("alerts", None)
    place: dict[str, Any] = {"x": x, "color": colour, "opacity": front}
    rule = alerts.transform_filter("datum.value === null").mark_rule(
        color=ORANGE, strokeWidth=1.6, strokeDash=[4, 3]
    )
    triangle = alerts.transform_filter("datum.value !== null").mark_point(
        shape="triangle-down", size=110, filled=True, color=ORANGE, opacity=1
    )
    layers = [
        read.mark_line(strokeWidth=1.8).encode(**place, y=y, detail="layer:N"),
        read.mark_circle(size=14, cursor="pointer").encode(**place, y=y, tooltip="reading:Q"),
        rule.encode(x=x, tooltip="alert:Q"),
        triangle.encode(x=x, y=y, tooltip="alert:Q"),
    ]
    return frame.around(layers, frame.ends, frame.chosen[0], height=200)


# --- between bounds

COLOURS = {
    MEASURED: BLUE,
    ADVERSARIAL: ORANGE,
    CERTIFICATE: GREEN,
    "bound": QUIET,
}

# Each curve with its colour and dashes: solid lines, dashed for the negative sign.
_CURVES = {
    PROMISE: (INK, DASHES),
    CERTIFIED: (INK, [1, 3]),
    "map, along +v": (BLUE, [1, 0]),
    "map, along −v": (BLUE, [6, 3]),
    "map, along +top token": (ORANGE, [1, 0]),
    "map, along −top token": (ORANGE, [6, 3]),
    "map, random (mean, range)": (QUIET, [1, 0]),
    "block, along +v": (GREEN, [1, 0]),
    "model, along +v": (PURPLE, [1, 0]),
}


def bounds_chart(
    frame: Frame, lines: Data | None = None, names: Data | None = None
) -> alt.LayerChart:
    """Measured sigma and bounds of one layer in one metric, labelled by name.

    Lines, bars up to `upper`, points; bounds on all inputs are dashed.
    """
    drawn = base("lines", lines)
    place: dict[str, Any] = {
        "x": across(),
        "y": up("value:Q", "sigma and its bounds"),
        "color": alt.Color("group:N", legend=None, scale=scale_of(COLOURS)),
    }
    dashes = scale_of({name: DASHES if name == "bound" else [1, 0] for name in COLOURS})
    dash = alt.StrokeDash("group:N", legend=None, scale=dashes)
    dots = drawn.mark_circle(size=34, opacity=1)
    words = base("names", names).mark_text(align="left", dx=8, fontSize=11)
    parts = [
        drawn.mark_line(strokeWidth=2).encode(**place, detail="name:N", strokeDash=dash),
        drawn.mark_rule(strokeWidth=1.5).encode(**place, y2="upper:Q"),
        dots.encode(**place, tooltip=tooltip("name", "n", "value")),
        words.encode(**place, text="name:N"),
    ]
    return frame.around(parts, frame.ends)


# --- against the size of a move


def push_chart(
    frame: Frame, curves: Data | None = None, sizes: Data | None = None
) -> alt.LayerChart:
    """Change of the output relative to the prediction sigma · size, on logarithmic axes.

    The prediction is the line at 1. The band is the range over random directions. Thin vertical
    lines mark sizes at which something changes, with labels; a bold line marks the selected size.
    Curves have ``value`` (relative to ``sigma · eps``) and ``change`` (absolute).
    """
    axis = as_long(padding=8, ticks=6)
    x = alt.X("eps:Q", title="size of the move, ‖E‖", **axis)
    y = alt.Y("value:Q", title="change of the output / (sigma · size)", **axis)
    names = list(_CURVES)
    known = {curve["curve"] for curve in curves or ()}
    key = alt.Legend(
        title=None,
        values=[name for name in names if not known or name in known],
        orient="bottom",
        columns=3,
        symbolType="stroke",
        symbolStrokeWidth=2,
        labelLimit=240,
        symbolSize=300,
    )
    colours, dashes = ([pair[k] for pair in _CURVES.values()] for k in (0, 1))
    options: dict[str, Any] = {"sort": names, "legend": key if frame.legend else None}
    colour = alt.Color("curve:N", scale=alt.Scale(domain=names, range=colours), **options)
    dash = alt.StrokeDash("curve:N", scale=alt.Scale(domain=names, range=dashes), **options)
    drawn = base("curves", curves).transform_filter("datum.value > 0")
    tooltips = [
        alt.Tooltip("curve:N", title="curve"),
        alt.Tooltip("eps:Q", title="size", format=".4g"),
        alt.Tooltip("change:Q", title="change", format=".4g"),
        alt.Tooltip("value:Q", title="by sigma · size", format=".4g"),
    ]
    band = drawn.transform_filter("datum.low > 0").mark_area(color=QUIET, opacity=0.18)
    lines = drawn.mark_line(strokeWidth=1.8)
    dots = drawn.transform_filter(f"datum.curve !== '{PROMISE}' && datum.curve !== '{CERTIFIED}'")
    marked = base("sizes", sizes)
    thin = marked.mark_rule(color=QUIET, strokeWidth=1, strokeDash=[2, 2])
    place: dict[str, Any] = {"angle": 270, "align": "left", "baseline": "bottom", "dx": 4, "dy": -2}
    named = {"x": x, "y": alt.value(frame.height or HEIGHT), "text": "name:N"}
    behind = marked.mark_text(fontSize=11, stroke="#ffffff", strokeWidth=3, **place)
    words = marked.mark_text(fontSize=11, color=QUIET, **place)
    chosen = drawn.transform_filter("datum.eps === at").mark_rule(color=INK, strokeWidth=1.2)
    layers = [
        thin.encode(x=x),
        band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        lines.encode(x=x, y=y, color=colour, strokeDash=dash),
        dots.mark_circle(size=18).encode(x=x, y=y, color=colour, tooltip=tooltips),
        chosen.encode(x=x),
        behind.encode(**named),
        words.encode(**named),
    ]
    return frame.around(layers, alt.param(name="at", value=None))
