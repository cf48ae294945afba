"""Growth of sigma with the number of tokens, one colour for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import (
    AXIS,
    BLUE,
    DASHES,
    FRONT,
    HERE,
    ORANGE,
    QUIET,
    Data,
    Frame,
    across,
    as_long,
    base,
    between,
    dressed,
    end_of_training,
    guides,
    in_front,
    inline,
    tooltip,
    trained_length_line,
    up,
)
from lipscope.errors import InputError
from lipscope.records import NEAR, Measurement, TokenShare, grouped, off_line, slope_of, usable

_NAMED = 8  # lines whose names have room at their ends
_LINE = 13  # pixels between two names
_FADED = 0.06  # opacity of the layers that are not in focus

Grown = Literal["sigma", "radius", "rank"]
_TITLES: dict[Grown, str] = {
    "sigma": "sigma",
    "radius": "radius: largest token norm",
    "rank": "stable rank (Frobenius norm / sigma)²",
}
ALL, REST = "all tokens move", "top token fixed"


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
        width: Of a panel in pixels.
        height: Of a panel in pixels; by default more for many layers.

    Returns:
        One line of panels for each model, map, metric, move and read.

    Raises:
        InputError: If no row has a finite, positive sigma.
    """
    drawn = [row for row in rows if usable(row.sigma)]
    if not drawn:
        raise InputError(
            "`rows` should hold a finite, positive sigma to draw. Found none among "
            f"{len(rows)} rows; their `status` and `note` say why."
        )
    names = {(t.id, t.index): t.text for t in tokens}
    labels = marks.layer_labels(drawn)
    # Values that may stand on one axis.
    settings = grouped(drawn, attrgetter("model", "map", "metric", "move", "read"))
    size = {"width": width, "height": height or (340 if len(labels) <= 12 else 460)}
    focus = alt.selection_point(name="focus", fields=["layer"], bind="legend")
    charts = []
    for key, part in settings.items():
        panels = _Panels(part, names, labels, focus, size["height"])
        charts.append(panels.chart(marks.setting_prefix(key, list(settings)), size, not charts))
    chart = charts[0] if len(charts) == 1 else alt.vconcat(*charts, spacing=30)
    title, lines = marks.growth_heading(rows, drawn, list(settings))
    return dressed(chart.properties(title=alt.TitleParams(title, subtitle=lines)))


class _Panels:
    """The panels of one setting, on one axis: sigma, and sigma without the top token."""

    def __init__(
        self,
        rows: Sequence[Measurement],
        names: Mapping[tuple[str, int], str],
        labels: list[str],
        focus: alt.Parameter,
        height: int,
    ) -> None:
        moves = f"tokens that move: {rows[0].move}"
        parts = {
            "all tokens may move" if rows[0].move == "all" else moves: [r.sigma for r in rows],
            "top token held fixed": [r.sigma_rest for r in rows],
        }
        self.points = {
            name: [
                marks.point_of(row, value, names)
                for row, value in zip(rows, values, strict=True)
                if value is not None and usable(value)
            ]
            for name, values in parts.items()
        }
        self.labels, self.focus = labels, focus
        self.metric, self.end = rows[0].metric, marks.training_end(rows)
        self.independent = marks.share_no_text(rows)
        every = [p for points in self.points.values() for p in points]
        means = marks.curve_means(every, independent=self.independent)
        values = [p[end] for p in (*every, *means) for end in ("low", "value", "high") if end in p]
        low, high = min(values), max(values)
        pad = max(1.12, (high / low) ** 0.04)
        self.domain = low / pad, high * pad
        self.gap = (self.domain[1] / self.domain[0]) ** (_LINE / height)

    def chart(self, kind: str, size: Mapping[str, int], legend: bool) -> alt.HConcatChart:
        unit = marks.UNITS.get(self.metric, f"output change per input change, {self.metric}")
        drawn = {name: points for name, points in self.points.items() if points}
        charts = []
        for name, points in drawn.items():
            last = len(charts) == len(drawn) - 1
            chart = self._panel(points, "" if charts else f"sigma: {unit}", legend and last)
            title = alt.TitleParams(kind + name, fontSize=12, anchor="middle")
            charts.append(chart.properties(**size, title=title))
        return alt.hconcat(*charts, spacing=18).resolve_legend(color="independent")

    def _panel(self, points: list[dict[str, Any]], title: str, legend: bool) -> alt.LayerChart:
        """Reference lines, the end of training, lines of means with bars, points.

        Where there is no axis title, there are no axis labels either.
        """
        labels, first = self.labels, bool(title)
        lengths = sorted({p["n"] for p in points})
        means = marks.curve_means(points, independent=self.independent)
        means = marks.side_by_side(means, labels, lengths)
        points = marks.side_by_side(points, labels, lengths)
        few, grows = len(points) <= 400, len(lengths) > 1
        room = marks.narrowest(lengths) ** 0.28
        # Room at the right for the names of the lines.
        right = room * (lengths[-1] / lengths[0] * room**2) ** (0.22 if grows else 0.0)
        span = between(
            lengths[0] / room, lengths[-1] * right, lengths, format="d", labelOverlap=True
        )
        ticks = marks.tick_values(*self.domain)
        sides = between(*self.domain, ticks, format="~g", labels=first, ticks=first)
        x = alt.X("at:Q", title="number of tokens n", **span)
        y = alt.Y("value:Q", title=title or None, **sides)
        colour = alt.Color(
            "layer:O",
            sort=labels,
            scale=alt.Scale(domain=labels, range=marks.palette(len(labels))),
            legend=None,
        )
        shown = points if len(points) <= marks.MAX_POINTS else means
        lines = inline(means).mark_line(strokeWidth=2)
        lines = lines.encode(x=x, y=y, color=colour, detail="curve:N", opacity=self._focused(0.9))
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
            lines = lines.encode(color=colour.legend(key)).add_params(self.focus)
        layers = [lines]
        if grows:
            laws = _power_laws(means, lengths, room, self.domain)
            names = _line_names(means, labels, lengths[-1] * room**0.95)
            layers = [*_dashed(laws, x, y), *end_of_training(self.end, x), lines]
            layers += _spread_names([*laws, *names], labels, self.gap, x, y)
        if bars := [mean for mean in means if "low" in mean]:
            low = y.copy()
            low.shorthand = "low:Q"
            rule = inline(bars).mark_rule(strokeWidth=2)
            opacity = self._focused(0.55)
            layers.append(rule.encode(x=x, y=low, y2="high:Q", color=colour, opacity=opacity))
        tips = ("layer", "head", "n", "sample", "sigma", "interval", "relative", "top token")
        told = tooltip(*tips, "its share") if shown is points else tooltip("layer", "n")
        dots = inline(shown).mark_circle(size=20 if few else 12)
        opacity = self._focused(0.65 if few else 0.3)
        layers.append(dots.encode(x=x, y=y, color=colour, opacity=opacity, tooltip=told))
        return alt.LayerChart(layer=layers).resolve_legend(color="independent")

    def _focused(self, strong: float) -> Any:
        return alt.when(self.focus).then(alt.value(strong)).otherwise(alt.value(_FADED))


def _power_laws(
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


def _line_names(
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
    dashes = inline(ends).mark_line(color=QUIET, strokeDash=DASHES, strokeWidth=1.2, clip=True)
    return [dashes.encode(x=x, y=y, detail="said:N")]


def _spread_names(
    names: Sequence[dict[str, Any]], labels: Sequence[str], gap: float, x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    """Names at the ends of lines, moved apart where they would hide each other."""
    last = max(name["at"] for name in names)
    places = marks.spread([name["value"] for name in names if name["at"] == last], gap)
    hues = dict(zip(labels, marks.palette(len(labels)), strict=True))
    # What left the frame above has its name there, under the edge.
    found: dict[int, list[dict[str, Any]]] = {0: [], 7: []}
    for name in names:
        inside = name["at"] == last
        place = {"value": places.pop(0)} if inside else {}
        hue = hues.get(name.get("layer", ""), QUIET)
        found[0 if inside else 7].append(name | place | {"hue": hue})
    return [
        inline(some)
        .mark_text(align="left", dx=5, dy=down, fontSize=11, clip=True)
        .encode(x=x, y=y, text="said:N", color=alt.Color("hue:N", scale=None, legend=None))
        for down, some in found.items()
        if some
    ]


# --- in a report ------------------------------------------------------------------------------


def layers_chart(
    frame: Frame, points: Data | None = None, means: Data | None = None, *, grown: Grown = "sigma"
) -> alt.LayerChart:
    """Sigma, radius or stable rank against the number of tokens, both logarithmic.

    Points are single rows, lines run through geometric means. Sigma has bars up to `upper` and
    guides like n^(1/4) and n^(1/2).
    """
    sigma = grown == "sigma"
    free = alt.Y(f"{grown}:Q", title=_TITLES[grown], **as_long())
    x, y, colour = across(), up("sigma:Q", "sigma") if sigma else free, frame.by_layer()
    shown = f"{HERE} && datum.{grown} > 0"
    mean = base("means", means).transform_filter(shown)
    lines = mean.mark_line(strokeWidth=2).encode(
        x=x, y=y, color=colour, detail=["layer:N", "kind:N"], opacity=in_front(0.95, 0.16)
    )
    single = base("points", points).transform_filter(shown)
    single = single.transform_calculate(
        at="datum.n * pow(axes.room, datum.order)",
        top="isValid(datum.upper) ? datum.upper : datum.sigma",
    )
    place = {"x": across("at:Q"), "y": y, "color": colour}
    bars = single.transform_filter(FRONT).mark_rule(strokeWidth=1, opacity=0.35)
    dots = single.mark_circle(size=20, cursor="pointer")
    behind = [*guides(mean, x, y), bars.encode(**place, y2="top:Q")] if sigma else []
    dots = dots.encode(**place, opacity=in_front(0.7, 0.06), tooltip="i:Q")
    return frame.around(
        [*trained_length_line(mean, x), *behind, lines, dots], frame.ends, *frame.chosen
    )


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
