"""Charts of the tokens of a window: shaded by sensitivity, and their gains when split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from lipscope.charts import look, marks
from lipscope.charts.marks import lay_out
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
    predecessors; after ``max_lines`` of ``columns`` characters the text is cut, with a remark.

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
    across = {"scale": alt.Scale(domain=[0, width], nice=False), "axis": None}
    down = {"scale": alt.Scale(domain=[0, height], nice=False, reverse=True), "axis": None}
    cells = [marks.cell_of(p, max(shares)) for p in placed]
    window = look.inline(cells).properties(width=width, height=height)
    shade = window.mark_rect(cornerRadius=2).encode(
        x=alt.X("x:Q", **across),
        y=alt.Y("y:Q", **down),
        x2="x2:Q",
        y2="y2:Q",
        color=_shade_colour(max(shares)),
        tooltip=look.tooltip("token", "index", "share in", "share out", "norm"),
    )
    text = window.mark_text(align="left", baseline="middle", font=look.MONO, fontSize=14).encode(
        x=alt.X("left:Q", **across),
        y=alt.Y("middle:Q", **down),
        text="text:N",
        color=alt.Color("ink:N", scale=None),
    )
    heads = alt.TitleParams(title, subtitle=subtitle)
    return look.dressed(alt.layer(shade, text).properties(title=heads))


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


# --- gains of splitting ------------------------------------------------------------------------

WAYS = {"moved": look.BLUE, "split": look.ORANGE}


def gains_chart(frame: look.Frame, tokens: look.Data | None = None) -> alt.LayerChart:
    """The gain of splitting each token beside that of moving it, with their intervals.

    Large marks: taking the token apart is known to gain more (``better``).
    """
    some = look.base("tokens", tokens).transform_filter("datum.gain > 0")
    axis = alt.Axis(format="d", tickMinStep=1, grid=False)
    x = alt.X("index:Q", title="token", axis=axis, scale=alt.Scale(nice=False, padding=12))
    place = {
        "x": x,
        "y": look.up("gain:Q", "gain"),
        "color": frame.colours("way:N", WAYS, orient="top"),
    }
    bars = some.mark_rule(strokeWidth=1.6, opacity=0.6).encode(**place, y2="upper:Q")
    large = alt.when("datum.better").then(alt.value(90)).otherwise(alt.value(34))
    dots = some.mark_circle(opacity=1, cursor="pointer")
    return frame.around([bars, dots.encode(**place, size=large, tooltip="y:Q")], frame.ends)
