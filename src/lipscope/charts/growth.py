"""Growth of sigma with the number of tokens, one colour for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from lipscope.charts import marks
from lipscope.charts.axes import end_of_training
from lipscope.charts.look import QUIET, dressed, tooltip
from lipscope.errors import InputError
from lipscope.records import NEAR, Measurement, TokenShare, off_line, slope_of

_NAMED = 8  # lines whose names have room at their ends
_LINE = 13  # pixels between two names

FADED = 0.06
"""Opacity of the layers that are not in focus."""


def growth_chart(
    rows: Sequence[Measurement],
    tokens: Iterable[TokenShare] = (),
    *,
    width: int = 380,
    height: int | None = None,
) -> alt.HConcatChart | alt.VConcatChart:
    """Sigma against the number of tokens, both logarithmic, one colour for each layer.

    Points are single rows, lines run through the geometric mean over the samples at each length,
    and bars are its 95 % Student interval for the sampling of text: of three samples and more that
    share no text. Two dashed lines show what growth like ``n^(1/4)`` and ``n^(1/2)`` would look
    like; at the end of a line stands its exponent, unless its means are far from a power law. A
    line stands where inputs become longer than what
    the model was trained on, if its files say so. Where rows carry `sigma_rest`, a second
    panel shows it on the same axis. In HTML a click on a layer in the legend brings it
    forward (shift-click for more), and a point under the mouse tells its row.

    Args:
        rows: Measurements; those without a finite, positive sigma are left out, and
            counted under the title.
        tokens: Their tokens, for the text of the top token under the mouse.
        width: Width of a panel in pixels.
        height: Height of a panel in pixels; by default more for many layers.

    Returns:
        The chart: one line of panels for each model, map, metric, move and read.

    Raises:
        InputError: If no row has a finite, positive sigma.
    """
    drawn = [row for row in rows if marks.positive(row.sigma)]
    if not drawn:
        raise InputError(
            "`rows` should hold a finite, positive sigma to draw. Found none among "
            f"{len(rows)} rows; their `status` and `note` say why."
        )
    names = {(t.id, t.index): t.text for t in tokens}
    labels = marks.layer_labels(drawn)
    settings = marks.by_setting(drawn)
    tall = 340 if len(labels) <= 12 else 460
    focus = alt.selection_point(name="focus", fields=["layer"], bind="legend")
    charts = [
        _panels(
            part,
            names,
            labels,
            focus,
            kind=marks.difference(key, list(settings)),
            legend=k == 0,
            size=(width, height or tall),
        )
        for k, (key, part) in enumerate(settings.items())
    ]
    chart = charts[0] if len(charts) == 1 else alt.vconcat(*charts, spacing=30)
    title, lines = marks.heading(rows, drawn, list(settings))
    return dressed(chart.properties(title=alt.TitleParams(title, subtitle=lines)))


def _panels(
    rows: Sequence[Measurement],
    names: Mapping[tuple[str, int], str],
    labels: list[str],
    focus: alt.Parameter,
    *,
    kind: str,
    legend: bool,
    size: tuple[int, int],
) -> alt.HConcatChart:
    """The panels of one setting, on one axis: sigma, and sigma without the top token."""
    moves = "all tokens may move" if rows[0].move == "all" else f"tokens that move: {rows[0].move}"
    panels = {
        moves: [marks.point_of(row, row.sigma, names) for row in rows if row.sigma is not None]
    }
    rest = [
        marks.point_of(row, row.sigma_rest, names)
        for row in rows
        if row.sigma_rest is not None and marks.positive(row.sigma_rest)
    ]
    if rest:
        panels["top token held fixed"] = rest
    every = [p for points in panels.values() for p in points]
    independent = marks.apart(rows)
    means = marks.curve_means(every, independent=independent)
    values = [p[end] for p in (*every, *means) for end in ("low", "value", "high") if end in p]
    low, high = min(values), max(values)
    pad = max(1.12, (high / low) ** 0.04)
    domain = [low / pad, high * pad]
    metric = rows[0].metric
    unit = f"sigma: {marks.UNITS.get(metric, f'output change per input change, {metric}')}"
    charts = []
    for name, points in panels.items():
        chart = _panel(
            points,
            labels,
            focus,
            domain,
            title=unit if not charts else "",
            legend=legend and len(charts) == len(panels) - 1,
            end=marks.training_end(rows),
            independent=independent,
            height=size[1],
        )
        title = alt.TitleParams(kind + name, fontSize=12, anchor="middle")
        charts.append(chart.properties(width=size[0], height=size[1], title=title))
    return alt.hconcat(*charts, spacing=18).resolve_legend(color="independent")


def _panel(
    points: list[dict[str, Any]],
    labels: list[str],
    focus: alt.Parameter,
    domain: list[float],
    *,
    title: str,
    legend: bool,
    end: int | None,
    independent: bool,
    height: int,
) -> alt.LayerChart:
    """One panel: reference lines, the end of training, lines of means with bars, points.

    Where there is no axis title, there are no axis labels either.
    """
    first = bool(title)
    lengths = sorted({p["n"] for p in points})
    means = marks.curve_means(points, independent=independent)
    means = marks.side_by_side(means, labels, lengths)
    points = marks.side_by_side(points, labels, lengths)
    few, grows = len(points) <= 400, len(lengths) > 1
    room = marks.narrowest(lengths) ** 0.28
    # Room at the right for the names of the lines.
    right = room * (lengths[-1] / lengths[0] * room**2) ** (0.22 if grows else 0.0)
    x = alt.X(
        "at:Q",
        title="number of tokens n",
        scale=alt.Scale(type="log", domain=[lengths[0] / room, lengths[-1] * right], nice=False),
        axis=alt.Axis(values=lengths, format="d", labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title=title or None,
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(format="~g", values=marks.tick_values(*domain), labels=first, ticks=first),
    )
    colour = alt.Color(
        "layer:O",
        sort=labels,
        scale=alt.Scale(domain=labels, range=marks.palette(len(labels))),
        legend=None,
    )
    shown = points if len(points) <= marks.MAX_POINTS else means
    fade = alt.value(FADED)
    dots = alt.Chart(alt.InlineData(values=shown)).encode(x=x, y=y, color=colour)
    lines = (
        alt.Chart(alt.InlineData(values=means))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=colour,
            detail="curve:N",
            opacity=alt.when(focus).then(alt.value(0.9)).otherwise(fade),
        )
    )
    if legend:
        # Vega-Lite loses the clicks of a legend that several views share: the legend and
        # the parameter stand together in one view, the others refer to it by name.
        key = alt.Legend(
            title="layer",
            symbolType="stroke",
            symbolStrokeWidth=3,
            symbolLimit=0,
            columns=1 + len(labels) // 17,
        )
        lines = lines.encode(color=colour.legend(key)).add_params(focus)
    layers = [lines]
    if grows:
        laws = _references(means, lengths, room, domain)
        names = _exponents(means, labels, lengths[-1] * room**0.95)
        gap = (domain[1] / domain[0]) ** (_LINE / height)
        layers = [*_dashed(laws, x, y), *end_of_training(end, x), lines]
        layers += _named([*laws, *names], labels, gap, x, y)
    if bars := [mean for mean in means if "low" in mean]:
        ends = y.copy()
        ends.shorthand = "low:Q"
        opacity = alt.when(focus).then(alt.value(0.55)).otherwise(fade)
        rule = alt.Chart(alt.InlineData(values=bars)).mark_rule(strokeWidth=2)
        layers.append(rule.encode(x=x, y=ends, y2="high:Q", color=colour, opacity=opacity))
    tips = ("layer", "head", "n", "sample", "sigma", "interval", "relative")
    circles = dots.mark_circle(size=20 if few else 12).encode(
        opacity=alt.when(focus).then(alt.value(0.65 if few else 0.3)).otherwise(fade),
        tooltip=tooltip(*tips, "top token", "its share")
        if shown is points
        else tooltip("layer", "n"),
    )
    layers.append(circles)
    return alt.LayerChart(layer=layers).resolve_legend(color="independent")


def _references(
    means: Sequence[dict[str, Any]], lengths: Sequence[int], room: float, domain: Sequence[float]
) -> list[dict[str, Any]]:
    """Lines of slope 1/4 and 1/2 from the middle of the curves at the first length.

    They start lower where they would leave the frame otherwise, and end where they leave it.
    """
    start = [math.log(p["value"]) for p in means if p["n"] == lengths[0]]
    level = math.exp(math.fsum(start) / len(start))
    first, last = lengths[0], lengths[-1] * room**0.95
    level = max(domain[0], min(level, domain[1] / (last / first) ** 0.5))
    return [
        {"said": said, "from": first, "level": level, "at": at, "value": level * (at / first) ** p}
        for said, p in (("~ n^(1/4)", 0.25), ("~ n^(1/2)", 0.5))
        for at in [min(last, first * (domain[1] / level) ** (1 / p))]
    ]


def _exponents(
    means: Sequence[dict[str, Any]], labels: Sequence[str], at: float
) -> list[dict[str, Any]]:
    """What stands at the end of each line: its layer, and its exponent where it is near a law."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for p in sorted(means, key=lambda p: p["n"]):
        curves.setdefault((p["layer"], p["curve"]), []).append((p["n"], p["value"]))
    if len(curves) > min(len(labels), _NAMED) or min(map(len, curves.values())) < 3:
        return []  # heads, or too many to be told apart; two lengths show no law
    return [
        {
            "said": f"{layer}: n^{slope_of(curve):.2f}" if off_line(curve) <= NEAR else layer,
            "layer": layer,
            "at": at,
            "value": curve[-1][1],
        }
        for (layer, _), curve in curves.items()
    ]


def _dashed(laws: Sequence[dict[str, Any]], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    ends = [
        {"said": law["said"], "at": law[at], "value": law[value]}
        for law in laws
        for at, value in (("from", "level"), ("at", "value"))
    ]
    dashes = alt.Chart(alt.InlineData(values=ends)).mark_line(
        color=QUIET, strokeDash=[5, 4], strokeWidth=1.2, clip=True
    )
    return [dashes.encode(x=x, y=y, detail="said:N")]


def _named(
    names: Sequence[dict[str, Any]], labels: Sequence[str], gap: float, x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    """Names at the ends of lines, moved apart where they would hide each other."""
    last = max(name["at"] for name in names)
    places = marks.spread([name["value"] for name in names if name["at"] == last], gap)
    # What left the frame above has its name there, under the edge.
    ends = [places.pop(0) if name["at"] == last else name["value"] for name in names]
    hues = dict(zip(labels, marks.palette(len(labels)), strict=True))
    charts = []
    for name, end in zip(names, ends, strict=True):
        one = [{"said": name["said"], "at": name["at"], "value": end}]
        hue, down = hues.get(name.get("layer", ""), QUIET), 0 if name["at"] == last else 7
        word = alt.Chart(alt.InlineData(values=one)).mark_text(
            align="left", dx=5, dy=down, color=hue, fontSize=11, clip=True
        )
        charts.append(word.encode(x=x, y=y, text="said:N"))
    return charts
