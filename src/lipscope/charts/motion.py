"""Tokens that move: scenes side by side, frame by frame, as an animated GIF."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lipscope.charts import marks
from lipscope.charts.look import QUIET
from lipscope.errors import InputError, install
from lipscope.records import replaced

_SIDE, _HEAD, _FINER = 300, 46, 2  # pixels of a scene, of what stands above it; drawn twice as fine
_FRAME = "#d4d4d4"


@dataclass(frozen=True, eq=False)
class Scene:
    """What one part of the picture shows."""

    title: str  # above it
    points: np.ndarray  # places of the tokens, ``(t, n, 2)``
    groups: np.ndarray  # the group of every token, ``(n,)``: its colour
    captions: Sequence[str]  # a line for every frame, such as the time
    outline: np.ndarray | None = None  # closed curve behind them, ``(t, m, 2)``; none if None


def animate(path: str | Path, scenes: Sequence[Scene]) -> Path:
    """Write scenes of equal length as a GIF that starts again; the last frame stays a while.

    On white, so that it reads in light and dark pages alike. Axes are equal, and the same in
    all frames of a scene.

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
    replaced(path, made.getvalue())
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
    draw.text((pad, 25 * _FINER), scene.captions[frame], fill=QUIET, font=fonts[1])
    draw.rectangle((pad, pad + head, side - pad, side + head - pad), outline=_FRAME, width=_FINER)
    if scene.outline is not None:
        curve = place(scene.outline[frame])
        draw.line([tuple(p) for p in (*curve, curve[0])], fill=QUIET, width=_FINER)
    hues = marks.palette(int(scene.groups.max()) + 1)
    size = (4.0 if scene.points.shape[1] <= 100 else 2.2) * _FINER
    for (x, y), group in zip(place(scene.points[frame]), scene.groups, strict=True):
        draw.ellipse((x - size, y - size, x + size, y + size), fill=hues[group], outline="white")
    return image.resize((_SIDE, _SIDE + _HEAD), Image.Resampling.LANCZOS)
