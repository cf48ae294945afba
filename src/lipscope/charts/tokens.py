"""Token charts: text shaded by sensitivity, gains of splitting, animated GIFs of token motion."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from lipscope.charts import look, marks
from lipscope.errors import InputError, install
from lipscope.records import TokenShare, write_file

SHADES = ("#ffffff", "#fee6ce", "#fdae6b", "#e6550d", "#8c2d04")


def shaded_text(
    tokens: Sequence[TokenShare],
    *,
    title: str = "Text shaded by sensitivity",
    columns: int = 84,
    max_lines: int = 24,
) -> alt.LayerChart:
    """A window of text with tokens shaded by their share of the most sensitive direction.

    The shade follows the cube root of `share_in`, so that a token with a thousandth of the top
    share remains visible. Word pieces are joined to their predecessors; after ``max_lines`` of
    ``columns`` characters the text is truncated, with a remark.

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
    placed = marks.lay_out(ordered, columns=columns, max_lines=max_lines)
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
    """The gains of splitting and of moving each token, with intervals.

    Large marks: splitting provably gains more (``better``).
    """
    data = look.base("tokens", tokens).transform_filter("datum.gain > 0")
    axis = alt.Axis(format="d", tickMinStep=1, grid=False)
    x = alt.X("index:Q", title="token", axis=axis, scale=alt.Scale(nice=False, padding=12))
    place = {
        "x": x,
        "y": look.up("gain:Q", "gain"),
        "color": frame.colours("way:N", WAYS, orient="top"),
    }
    bars = data.mark_rule(strokeWidth=1.6, opacity=0.6).encode(**place, y2="upper:Q")
    large = alt.when("datum.better").then(alt.value(90)).otherwise(alt.value(34))
    dots = data.mark_circle(opacity=1, cursor="pointer")
    return frame.around([bars, dots.encode(**place, size=large, tooltip="y:Q")], frame.ends)


# --- animation ---------------------------------------------------------------------------------

_SIDE, _HEAD, _FINER = 300, 46, 2  # pixels of a scene and its caption; supersampling factor
_FRAME = "#d4d4d4"


@dataclass(frozen=True, eq=False)
class Scene:
    """One panel of an animation."""

    title: str  # above the panel
    points: np.ndarray  # positions of the tokens, ``(t, n, 2)``
    groups: np.ndarray  # group (colour) of every token, ``(n,)``
    captions: Sequence[str]  # one line per frame, such as the time
    outline: np.ndarray | None = None  # closed background curve, ``(t, m, 2)``, or None


def animate(path: str | Path, scenes: Sequence[Scene]) -> Path:
    """Write scenes of equal length as a looping GIF with a longer last frame.

    On white, for light and dark pages. Axes have equal scales, fixed over the frames of a scene.

    Raises:
        InputError: If Pillow is not installed, or scenes differ in length.
    """
    lengths = {len(part) for one in scenes for part in (one.points, one.captions)}
    if len(lengths) != 1:
        raise InputError(f"`scenes` should all have one length. Found {sorted(lengths)} frames.")
    try:
        from PIL import Image
    except ImportError as missing:
        raise InputError(
            f"Animations need Pillow, which is not installed; run `{install('images')}` in the "
            "folder of lipscope."
        ) from missing
    frames = []
    for frame in range(lengths.pop()):
        parts = [_scene_image(scene, frame) for scene in scenes]
        whole = Image.new("RGB", (_SIDE * len(parts), _SIDE + _HEAD), "white")
        for i, part in enumerate(parts):
            whole.paste(part, (i * _SIDE, 0))
        frames.append(whole.quantize(64))
    made = io.BytesIO()
    times = [90] * (len(frames) - 1) + [1800]
    frames[0].save(
        made, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True
    )
    path = Path(path)
    write_file(path, made.getvalue())
    return path


def _scene_image(scene: Scene, frame: int) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    side, head = _SIDE * _FINER, _HEAD * _FINER
    image = Image.new("RGB", (side, side + head), "white")
    draw = ImageDraw.Draw(image)
    every = [scene.points, *([] if scene.outline is None else [scene.outline])]
    low = np.min([one.min((0, 1)) for one in every], 0)
    high = np.max([one.max((0, 1)) for one in every], 0)
    middle, reach = (low + high) / 2, max(float((high - low).max()) / 2, 1e-12) * 1.08
    pad = 12 * _FINER

    def place(points: np.ndarray) -> np.ndarray:
        unit = (points - middle) / reach * [1, -1]
        return (unit + 1) / 2 * (side - 2 * pad) + [pad, pad + head]

    fonts = [ImageFont.load_default(size * _FINER) for size in (13, 11)]
    draw.text((pad, 7 * _FINER), scene.title, fill=marks.INK, font=fonts[0])
    draw.text((pad, 25 * _FINER), scene.captions[frame], fill=look.QUIET, font=fonts[1])
    draw.rectangle((pad, pad + head, side - pad, side + head - pad), outline=_FRAME, width=_FINER)
    if scene.outline is not None:
        curve = place(scene.outline[frame])
        draw.line([tuple(p) for p in (*curve, curve[0])], fill=look.QUIET, width=_FINER)
    hues = marks.palette(int(scene.groups.max()) + 1)
    size = (4.0 if scene.points.shape[1] <= 100 else 2.2) * _FINER
    for (x, y), group in zip(place(scene.points[frame]), scene.groups, strict=True):
        draw.ellipse((x - size, y - size, x + size, y + size), fill=hues[group], outline="white")
    return image.resize((_SIDE, _SIDE + _HEAD), Image.Resampling.LANCZOS)
