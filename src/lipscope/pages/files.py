"""The charts of a report as files, at the quality of a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lipscope.charts.axes import Frame
from lipscope.charts.look import Chart, save
from lipscope.charts.sandwich import bounds_chart
from lipscope.charts.text import shaded_text
from lipscope.charts.training import training_chart
from lipscope.pages.content import Content
from lipscope.pages.shown import SHOWN, View
from lipscope.pages.windows import SCALE
from lipscope.records.rows import TokenShare


def write_figures(content: Content, folder: Path, kind: Literal["png", "svg"]) -> list[Path]:
    """Every chart of the page that has something to draw, for every setting.

    Args:
        content: What the report is about.
        folder: Where; made if need be.
        kind: Format.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    settings = content.points.settings
    for k, setting in enumerate(settings):
        name = f"-{_plain_name(setting)}" if len(settings) > 1 else ""
        for what, chart in _charts(content, k):
            written.append(save(chart, folder / f"{what}{name}.{kind}"))
    written += [save(chart, folder / f"{n}.{kind}") for n, chart in training_charts(content)]
    for record in content.bounded:
        if record["lines"]:
            words = ("model", "map", "metric", "layer") + ("head",) * (record["head"] is not None)
            name = "-".join(str(record[w]) for w in words)
            frame = Frame(record["axes"], height=340)
            chart = bounds_chart(record["lines"], record["names"], frame)
            written.append(save(chart, folder / f"bounds-{_safe(name)}.{kind}"))
    return written


def _plain_name(setting: dict[str, Any]) -> str:
    words = [setting["model"], setting["map"], setting["metric"]]
    if (setting["move"], setting["read"]) != ("all", "all"):
        words += [setting["move"], setting["read"]]
    return _safe("-".join(words))


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "setting"


def _charts(content: Content, s: int) -> Iterator[tuple[str, Chart]]:
    """The charts of one setting, as the page shows them first."""
    view = View(content, s)
    for one in SHOWN:
        if one.records is not None and one.draw is not None and (records := one.records(view)):
            yield one.name, one.draw(view, records)
    if tokens := _tokens(content, s):
        yield "text", shaded_text(tokens)


def training_charts(content: Content) -> Iterator[tuple[str, Chart]]:
    """Sigma against training step of every model with checkpoints, at its largest length.

    Args:
        content: What the report is about.

    Yields:
        Name of the file, without ending, and the chart.
    """
    training = content.training
    for g, group in enumerate(training.groups):
        setting = content.points.settings[group["settings"][0]]
        head, kind = (None, "all") if setting["together"] else (setting["heads"][0], "heads")
        some = [m for m in training.means if m["g"] == g and m["head"] == head]
        last = max(m["n"] for m in some)
        name = _plain_name({**setting, "model": group["name"]})
        frame = Frame(group["axes"][kind][str(last)], head=head, legend=True)
        means = [m for m in some if m["n"] == last]
        chart = training_chart([], means, setting["layers"], frame, turn=training.turn)
        yield f"training-{name}", chart


def _tokens(content: Content, s: int) -> list[TokenShare]:
    """The window of largest sigma of a setting."""
    points, windows = content.points.points, content.windows
    held = [k for k in windows.windows if points[k]["s"] == s and points[k]["head"] is None]
    if not held:
        return []
    k = max(held, key=lambda k: points[k]["sigma"] or 0.0)
    window = windows.windows[k]
    return [
        TokenShare(
            id=str(k),
            index=i,
            text=text.replace(" ", "▁", 1) if text.startswith(" ") else text,
            share_in=None if share is None else share / SCALE,
            share_out=None if out is None else out / SCALE,
            norm=norm,
        )
        for i, (text, share, out, norm) in enumerate(
            zip(
                windows.texts[window["text"]],
                window["in"],
                window["out"],
                window["norm"],
                strict=True,
            )
        )
    ]
