"""Sigma through depth: one line for each map of a layer, the model's map, the product of blocks."""

from __future__ import annotations

from typing import Any

import altair as alt

from lipscope.charts.axes import BLUE, GREEN, ORANGE, PURPLE, Data, Frame, data, up
from lipscope.charts.look import INK, QUIET

MAPS = {"attention": BLUE, "normed": PURPLE, "heads": QUIET, "residual": GREEN, "block": ORANGE}
"""Maps of a layer and their colours."""
TOGETHER = {"product": ORANGE, "stack": BLUE}
"""What is said of several blocks: the product of their sigmas, sigma of all of them together."""


def depth_chart(lines: Data | None, whole: Data | None, frame: Frame) -> alt.LayerChart:
    """Sigma of every map, layer by layer, and that of the model's map as a line across.

    Args:
        lines: Records with ``map, layer, sigma, low, high``, or None where a page puts them in.
        whole: At most one record with ``sigma, low, high``.
        frame: The axis, the legend and the size.

    Returns:
        The chart.
    """
    return _drawn(data("lines", lines), whole, frame, "sigma", "map", MAPS)


def product_chart(products: Data | None, whole: Data | None, frame: Frame) -> alt.LayerChart:
    """The product of the blocks up to each layer, sigma of them together, and the model's map.

    Args:
        products: Records with ``map`` (product or stack), ``layer, sigma, low, high``, or None
            where a page puts them in.
        whole: At most one record with ``sigma, low, high``.
        frame: The axis, the legend and the size.

    Returns:
        The chart.
    """
    of = data("products", products)
    return _drawn(of, whole, frame, "sigma, product of sigmas", "blocks 0 to", TOGETHER)


def _drawn(
    lines: Any, whole: Data | None, frame: Frame, title: str, key: str, inks: dict[str, str]
) -> alt.LayerChart:
    """Lines in their inks, layer by layer, with the model's across."""
    scale = alt.Scale(domain=[*inks], range=[*inks.values()])
    legend = alt.Legend(title=key, symbolType="circle", symbolOpacity=1)
    colour = alt.Color("map:N", scale=scale, legend=legend if frame.legend else None)
    marks = [
        *_across(whole, title, named=frame.legend),
        *_along(alt.Chart(lines), title, color=colour),
    ]
    return frame.around(marks, frame.ends)


def _along(base: alt.Chart, title: str, **colour: Any) -> list[alt.Chart]:
    """Bars, a line and points, layer by layer."""
    axis = alt.Axis(format="d", tickMinStep=1, grid=False)
    x = alt.X("layer:Q", title="layer", axis=axis, scale=alt.Scale(nice=False, padding=14))
    y = up("sigma:Q", title)
    bars = base.mark_rule(strokeWidth=1.6, opacity=0.55)
    dots = base.mark_circle(size=44, opacity=1, cursor="pointer")
    return [
        bars.encode(x=x, y=up("low:Q", title), y2="high:Q", **colour),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, **colour),
        dots.encode(x=x, y=y, tooltip="z:Q", **colour),
    ]


def _across(whole: Data | None, title: str, *, named: bool) -> list[alt.Chart]:
    """The model's map: its interval as a band, its mean as a dashed line, and perhaps its name."""
    base = alt.Chart(data("whole", whole))
    word = base.mark_text(align="right", baseline="bottom", dy=-3, color=INK, fontSize=11)
    y = up("sigma:Q", title)
    name = word.encode(y=y, x=alt.value("width"), text=alt.value("the model's map"))
    return [
        base.mark_rect(opacity=0.12, color=INK).encode(y=up("low:Q", title), y2="high:Q"),
        base.mark_rule(strokeDash=[5, 4], strokeWidth=1.6, color=INK).encode(y=y, tooltip="z:Q"),
        *([name] if named else []),  # a page names it in the key above
    ]
