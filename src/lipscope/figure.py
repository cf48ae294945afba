"""Rows to charts: growth of sigma with the number of tokens, and text shaded by sensitivity.

The only module that imports altair. A chart is saved as SVG, PNG or one HTML page that
needs no network.
"""

from __future__ import annotations

import html
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import vl_convert

from lipscope.errors import InputError
from lipscope.record import Measurement, TokenShare

Chart: TypeAlias = alt.LayerChart | alt.HConcatChart | alt.VConcatChart

# The dark part of matplotlib's plasma: even steps for every kind of colour vision, and
# readable on white, which its yellow end is not.
PLASMA = ("#0d0887", "#4c02a1", "#7e03a8", "#a92395", "#cc4778", "#e56b5d", "#f0884a", "#f59a3e")
SHADES = ("#ffffff", "#fee6ce", "#fdae6b", "#e6550d", "#8c2d04")
INK, QUIET = "#222222", "#6b6b6b"
FONT, MONO = "Helvetica, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"

MAX_POINTS = 5000
"""Above this number of rows only the lines are drawn: more points cannot be told apart."""

FADED = 0.06


def growth_chart(
    rows: Sequence[Measurement],
    tokens: Iterable[TokenShare] = (),
    *,
    width: int = 380,
    height: int = 340,
) -> alt.HConcatChart | alt.VConcatChart:
    """Sigma against the number of tokens, both logarithmic, one colour for each layer.

    Points are single rows with thin bars up to `upper`, lines run through the geometric
    mean over the samples at each length, and two dashed lines show what growth like
    ``n^(1/4)`` and ``n^(1/2)`` would look like. Where rows carry `sigma_rest`, a second
    panel shows it on the same axis. In HTML a click on a layer in the legend brings it
    forward (shift-click for more), and a point under the mouse tells its row.

    Args:
        rows: Measurements; those without a finite, positive sigma are left out, and
            counted under the title.
        tokens: Their tokens, for the text of the top token under the mouse.
        width: Width of a panel in pixels.
        height: Height of a panel in pixels.

    Returns:
        The chart: one line of panels for each model, map, metric, move and read.

    Raises:
        InputError: If no row has a finite, positive sigma.
    """
    drawn = [row for row in rows if _positive(row.sigma)]
    if not drawn:
        raise InputError(
            "`rows` should hold at least one finite, positive sigma to draw. Found none among "
            f"{len(rows)} rows; their `status` and `note` say why."
        )
    names = {(t.id, t.index): t.text for t in tokens}
    labels = _layer_labels(drawn)
    settings: dict[tuple[str, ...], list[Measurement]] = {}
    for row in drawn:
        key = (row.model, row.map, row.metric, row.move, row.read)
        settings.setdefault(key, []).append(row)
    focus = alt.selection_point(name="focus", fields=["layer"], bind="legend", on="click")
    lines = [
        _panels(part, names, labels, focus, width=width, height=height)
        for part in settings.values()
    ]
    chart = lines[0] if len(lines) == 1 else alt.vconcat(*lines, spacing=30)
    return _dressed(chart.properties(title=_title(rows, drawn, list(settings))))


def shaded_text(
    tokens: Sequence[TokenShare],
    *,
    title: str | None = None,
    columns: int = 84,
    max_lines: int = 24,
) -> alt.LayerChart:
    """A window of text, every token shaded by its share of the most sensitive direction.

    The shade follows the square root of `share_in`, that is the length of the token's
    part of the top right singular vector. Word pieces are joined to their predecessors;
    long windows are cut, with a remark.

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
    shares = {t.index: t.share_in or 0.0 for t in ordered}
    if not any(shares.values()):
        raise InputError(
            "`tokens` should hold the tokens of one row, with `share_in`. Found "
            f"{len(ordered)} tokens without a share."
        )
    cells = _layout(ordered, columns=columns, max_lines=max_lines)
    subtitle = []
    if len(cells) < len(ordered):
        held = sum(shares[cell["index"]] for cell in cells) / sum(shares.values())
        subtitle.append(
            f"Cut: the first {len(cells)} of {len(ordered)} tokens, which hold {held:.0%}"
            " of the direction."
        )
    top = max(shares.values())
    for cell in cells:
        cell["ink"] = "#ffffff" if shares[cell["index"]] > 0.45 * top else INK
    height = 22 * (1 + max(cell["line"] for cell in cells))
    base = alt.Chart(
        alt.InlineData(values=cells), width=math.ceil(8.4 * columns) + 8, height=height
    )
    place = {"x": alt.X("x:Q", scale=None, axis=None), "y": alt.Y("y:Q", scale=None, axis=None)}
    shade = base.mark_rect(cornerRadius=2).encode(
        **place,
        x2="x2:Q",
        y2="y2:Q",
        color=_shade_colour(top),
        tooltip=_tooltip("token", "index", "share in", "share out", "norm"),
    )
    place["x"], place["y"] = (
        alt.X("x text:Q", scale=None, axis=None),
        alt.Y("y text:Q", scale=None, axis=None),
    )
    text = base.mark_text(
        align="left", baseline="middle", font=MONO, fontSize=14, tooltip=None
    ).encode(**place, text="text:N", color=alt.Color("ink:N", scale=None))
    heading = alt.TitleParams(title or "", subtitle=subtitle)
    return _dressed(alt.layer(shade, text).properties(title=heading))


def save(chart: Chart, path: str | Path) -> Path:
    """Write a chart as ``.svg``, ``.png`` (two pixels per point) or one ``.html`` page.

    The page carries its scripts and data inside, asks no network for anything, and its
    content policy forbids it to.

    Args:
        chart: A chart of this module.
        path: File to write; the ending chooses the format.

    Returns:
        The path.

    Raises:
        InputError: If the ending is another one.
    """
    path = Path(path)
    if path.suffix == ".html":
        path.write_text(_page(chart.to_dict()), encoding="utf-8")
    elif path.suffix == ".svg":
        chart.save(str(path), format="svg")
    elif path.suffix == ".png":
        chart.save(str(path), format="png", scale_factor=2)
    else:
        raise InputError(
            f"`path` should end in .svg, .png or .html. Found `{path.name}`; choose one of them."
        )
    return path


def readable(text: str) -> str:
    """A token's text without the marks of its tokenizer, a leading space where it has one.

    Byte-level pieces are decoded where they are whole characters.

    >>> [readable(t) for t in ("##ing", "▁the", "Ġthe", "âĢĻ", "[CLS]")]
    ['ing', ' the', ' the', '’', '[CLS]']
    """
    if text.startswith("##") and len(text) > 2:
        return text[2:]
    if not text.isascii() and all(letter in BYTES for letter in text):
        try:
            return bytes(BYTES[letter] for letter in text).decode()
        except UnicodeDecodeError:
            return text.replace("Ġ", " ")
    return text.replace("▁", " ")


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + k): b for k, b in enumerate(other)}


BYTES = _byte_letters()


# --- growth chart ---------------------------------------------------------------------------


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _layer_labels(rows: Iterable[Measurement]) -> list[str]:
    """Layers as they stand in the legend, in their order; "model" for the whole model."""
    layers = {row.layer for row in rows}
    whole = ["model"] if None in layers else []
    return [str(layer) for layer in sorted(x for x in layers if x is not None)] + whole


def _palette(count: int) -> list[str]:
    """``count`` colours in even steps along `PLASMA`."""
    stops = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in PLASMA]
    colours = []
    for k in range(count):
        at = (len(stops) - 1) * k / max(count - 1, 1)
        i = min(int(at), len(stops) - 2)
        mix = [a + (at - i) * (b - a) for a, b in zip(stops[i], stops[i + 1], strict=True)]
        colours.append("#" + "".join(f"{round(v):02x}" for v in mix))
    return colours


def _point(row: Measurement, value: float, names: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """One row as the chart reads it: numbers for the marks, words for the tooltip."""
    layer = "model" if row.layer is None else str(row.layer)
    # The interval belongs to sigma; sigma_rest has none.
    upper = row.upper if value == row.sigma and _positive(row.upper) else None
    token = "–"
    if row.top_token is not None:
        name = names.get((row.id, row.top_token))
        token = f"{row.top_token}" if name is None else f"'{readable(name)}' ({row.top_token})"
    return {
        "layer": layer,
        "curve": f"{layer}/{row.head}",
        "head": "all" if row.head is None else str(row.head),
        "n": row.num_tokens,
        "sample": row.sample,
        "value": value,
        "upper": upper or value,
        "interval": f"[{value:.4g}, {upper:.4g}]" if upper else "–",
        "relative": "–" if row.relative is None else f"{row.relative:.3g}",
        "top token": token,
        "its share": "–" if row.top_share is None else f"{row.top_share:.1%}",
    }


def _means(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean of every curve at each length."""
    logs: dict[tuple[str, str, int], list[float]] = {}
    for p in points:
        logs.setdefault((p["layer"], p["curve"], p["n"]), []).append(math.log(p["value"]))
    return [
        {"layer": layer, "curve": curve, "n": n, "value": math.exp(math.fsum(y) / len(y))}
        for (layer, curve, n), y in logs.items()
    ]


def _panels(
    rows: Sequence[Measurement],
    names: Mapping[tuple[str, int], str],
    labels: list[str],
    focus: alt.Parameter,
    *,
    width: int,
    height: int,
) -> alt.HConcatChart:
    """The panels of one setting, on one axis: sigma, and sigma without the top token."""
    moves = "all tokens may move" if rows[0].move == "all" else f"tokens that move: {rows[0].move}"
    panels = {moves: [_point(row, row.sigma, names) for row in rows if row.sigma is not None]}
    rest = [
        _point(row, row.sigma_rest, names)
        for row in rows
        if row.sigma_rest is not None and _positive(row.sigma_rest)
    ]
    if rest:
        panels["top token held fixed"] = rest
    every = [p for points in panels.values() for p in points]
    low, high = min(p["value"] for p in every), max(p["upper"] for p in every)
    pad = max(1.12, (high / low) ** 0.04)
    domain = [low / pad, high * pad]
    charts = [
        _panel(points, labels, focus, domain, first=k == 0).properties(
            width=width, height=height, title=alt.TitleParams(name, fontSize=12, anchor="middle")
        )
        for k, (name, points) in enumerate(panels.items())
    ]
    return alt.hconcat(*charts, spacing=18)


def _panel(
    points: list[dict[str, Any]],
    labels: list[str],
    focus: alt.Parameter,
    domain: list[float],
    *,
    first: bool,
) -> alt.LayerChart:
    """One panel: reference lines, interval bars, points, and lines of means."""
    means = _means(points)
    lengths = sorted({p["n"] for p in points})
    x = alt.X(
        "n:Q",
        title="number of tokens n",
        scale=alt.Scale(type="log", domain=[lengths[0] / 1.12, lengths[-1] * 1.3], nice=False),
        axis=alt.Axis(values=lengths, format="d", labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title="sigma: norm of output change per norm of input change" if first else None,
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(format="~g", tickCount=6, labels=first, ticks=first),
    )
    colour = alt.Color(
        "layer:O",
        sort=labels,
        scale=alt.Scale(domain=labels, range=_palette(len(labels))),
        legend=alt.Legend(
            title="layer", symbolType="circle", symbolLimit=0, columns=1 + len(labels) // 17
        ),
    )
    shown = points if len(points) <= MAX_POINTS else means
    fade = alt.value(FADED)
    dots = alt.Chart(alt.InlineData(values=shown)).encode(x=x, y=y, color=colour)
    layers: list[alt.Chart] = [
        *(_references(means, lengths, x, y) if len(lengths) > 1 else []),
        alt.Chart(alt.InlineData(values=means))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=colour,
            detail="curve:N",
            opacity=alt.when(focus).then(alt.value(0.9)).otherwise(fade),
        ),
    ]
    if shown is points:
        layers.append(
            dots.mark_rule(strokeWidth=1).encode(
                y2="upper:Q", opacity=alt.when(focus).then(alt.value(0.6)).otherwise(fade)
            )
        )
    told = ("layer", "head", "n", "sample", "sigma", "interval", "relative")
    marks = dots.mark_circle(size=22).encode(
        opacity=alt.when(focus).then(alt.value(0.65)).otherwise(fade),
        tooltip=_tooltip(*told, "top token", "its share") if shown is points else _tooltip("layer", "n"),
    )
    # The parameter must stand in one view only; the others refer to it by name.
    layers.append(marks.add_params(focus) if first else marks)
    return alt.layer(*layers)
