"""The gain of splitting each token, beside moving it."""

from __future__ import annotations

import altair as alt

from lipscope.charts.axes import BLUE, ORANGE, Data, Frame, data, up

WAYS = {"moved": BLUE, "split": ORANGE}


def gains_chart(tokens: Data | None, frame: Frame) -> alt.LayerChart:
    """Both gains of every token of a window, with their intervals.

    Args:
        tokens: Records with ``index, text, way`` (moved or split), ``gain, upper, better``, or None
            where a page puts them in.
        frame: The axis, the legend and the size.

    Returns:
        The chart; large marks: taking the token apart is known to gain more.
    """
    scale = alt.Scale(domain=[*WAYS], range=[*WAYS.values()])
    key = alt.Legend(title=None, symbolOpacity=1, orient="top")
    colour = alt.Color("way:N", scale=scale, legend=key if frame.legend else None)
    base = alt.Chart(data("tokens", tokens)).transform_filter("datum.gain > 0")
    x = alt.X(
        "index:Q",
        title="token",
        axis=alt.Axis(format="d", tickMinStep=1, grid=False),
        scale=alt.Scale(nice=False, padding=12),
    )
    y = up("gain:Q", "gain")
    bars = base.mark_rule(strokeWidth=1.6, opacity=0.6).encode(x=x, y=y, y2="upper:Q", color=colour)
    large = alt.when("datum.better").then(alt.value(90)).otherwise(alt.value(34))
    dots = base.mark_circle(opacity=1, cursor="pointer").encode(
        x=x, y=y, color=colour, size=large, tooltip="y:Q"
    )
    return frame.around([bars, dots], frame.ends)
