"""A window of text, every token shaded by its share of the most sensitive direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from lipscope.charts import marks
from lipscope.charts.look import MONO, dressed, tooltip
from lipscope.charts.pieces import lay_out
from lipscope.errors import InputError
from lipscope.records import TokenShare

SHADES = ("#ffffff", "#fee6ce", "#fdae6b", "#e6550d", "#8c2d04")


def shaded_text(
    tokens: Sequence[TokenShare],
    *,
    title: str = "Text shaded by sensitivity",
    columns: int = 84,
    max_lines: int = 24,
) -> alt.LayerChart:
    """A window of text, every token shaded by its share of the most sensitive direction.

    The shade follows the cube root of `share_in`, so that a token with a thousandth of
    what the top one has can still be told from none. Word pieces are joined to their
    predecessors; long windows are cut, with a remark.

    Args:
        tokens: The tokens of one row, in any order.
        title: Title above the text.
        columns: Characters in a line.
        max_lines: Lines after which the text is cut.

    Returns:
        The chart.

    Raises:
        InputError: If there are no tokens, or none has a share.
    """
    ordered = sorted(tokens, key=lambda t: t.index)
    shares = [marks.share_of(t) for t in ordered]
    if not any(shares):
        raise InputError(
            "`tokens` should hold the tokens of one row, with `share_in`. Found "
            f"{len(ordered)} tokens without a share."
        )
    placed = lay_out(ordered, columns=columns, max_lines=max_lines)
    subtitle = []
    if len(placed) < len(ordered):
        held = sum(marks.share_of(p.token) for p in placed) / sum(shares)
        subtitle.append(
            f"Cut: the first {len(placed)} of {len(ordered)} tokens, which hold {held:.0%}"
            " of the direction."
        )
    width, height = math.ceil(marks.CELL * columns) + 8, marks.LINE * (1 + placed[-1].line)
    cells = [marks.cell_of(p, max(shares)) for p in placed]
    base = alt.Chart(alt.InlineData(values=cells), width=width, height=height)
    shade = base.mark_rect(cornerRadius=2).encode(
        x=_across("x", width),
        y=_down("y", height),
        x2="x2:Q",
        y2="y2:Q",
        color=_shade_colour(max(shares)),
        tooltip=tooltip("token", "index", "share in", "share out", "norm"),
    )
    text = base.mark_text(align="left", baseline="middle", font=MONO, fontSize=14).encode(
        x=_across("left", width),
        y=_down("middle", height),
        text="text:N",
        color=alt.Color("ink:N", scale=None),
    )
    heads = alt.TitleParams(title, subtitle=subtitle)
    return dressed(alt.layer(shade, text).properties(title=heads))


def _across(field: str, width: int) -> alt.X:
    return alt.X(f"{field}:Q", scale=alt.Scale(domain=[0, width], nice=False), axis=None)


def _down(field: str, height: int) -> alt.Y:
    scale = alt.Scale(domain=[0, height], nice=False, reverse=True)
    return alt.Y(f"{field}:Q", scale=scale, axis=None)


def _shade_colour(top: float) -> alt.Color:
    scale = alt.Scale(type="pow", exponent=1 / 3, domain=[0, top], range=SHADES, interpolate="rgb")
    return alt.Color(
        "share:Q",
        scale=scale,
        legend=alt.Legend(
            title="share of the most sensitive direction (cube-root scale)",
            format=".0%" if top > 0.2 else ".1%",
            orient="bottom",
            gradientLength=240,
            titleLimit=0,
            values=[top * part**3 for part in (0, 0.5, 0.75, 1)],
        ),
    )
