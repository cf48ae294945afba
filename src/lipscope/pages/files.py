"""The charts of a report as files, at the quality of a paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from lipscope.charts.axes import WIDTH
from lipscope.charts.exponents import exponents_chart, slopes_chart
from lipscope.charts.focus import focus_chart
from lipscope.charts.heads import heads_chart
from lipscope.charts.inpage import GROWN, QUANTITIES
from lipscope.charts.layers import layers_chart
from lipscope.charts.look import Chart, save
from lipscope.charts.radius import radius_chart
from lipscope.charts.sandwich import bounds_chart
from lipscope.charts.text import shaded_text
from lipscope.charts.training import training_chart
from lipscope.pages.content import Content
from lipscope.pages.items import REAL
from lipscope.pages.windows import SCALE
from lipscope.records.rows import TokenShare

Records = list[dict[str, Any]]


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
            chart = bounds_chart(record["lines"], record["names"], axes=record["axes"], width=WIDTH)
            written.append(save(chart, folder / f"bounds-{_safe(name)}.{kind}"))
    return written


def _plain_name(setting: dict[str, Any]) -> str:
    words = [setting["model"], setting["map"], setting["metric"]]
    if (setting["move"], setting["read"]) != ("all", "all"):
        words += [setting["move"], setting["read"]]
    return _safe("-".join(words))


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "setting"


def _charts(content: Content, s: int) -> list[tuple[str, Chart]]:
    """The charts of one setting, as the page shows them first."""
    setting = content.points.settings[s]
    head = None if setting["together"] else setting["heads"][0]
    both = setting["axes"]["all" if head is None else "heads"]
    axes, real_axes = both["every"], both[REAL]
    layers = setting["layers"]

    def mine(records: Records, *, kind: bool | None = None) -> Records:
        some = [r for r in records if r["s"] == s and r["head"] == head]
        return [r for r in some if kind is None or (r["kind"] == REAL) == kind]

    points, means = content.points.points, content.points.means
    real, real_means = mine(points, kind=True), mine(means, kind=True)
    worst = _largest(real_means)
    found: list[tuple[str, Chart]] = []

    def add(name: str, records: Records, chart: Callable[[], Chart]) -> None:
        if records:
            found.append((name, chart()))

    add(
        "sigma",
        real_means,
        lambda: focus_chart(
            [p for p in real if p["layer"] == worst],
            real_means,
            axes=real_axes,
            layer=worst,
            head=head,
            legend=True,
        ),
    )
    add(
        "growth",
        real_means,
        lambda: layers_chart(real, real_means, layers, axes=axes, head=head, legend=True),
    )
    adversarial = mine(means, kind=False)
    add(
        "growth-adversarial",
        adversarial,
        lambda: layers_chart(
            mine(points, kind=False), adversarial, layers, axes=axes, head=head, legend=True
        ),
    )
    fits = mine(content.points.fits)
    add("exponents", fits, lambda: exponents_chart(fits, layers, head=head, legend=True))
    slopes = [
        {**f, "slope": slope, "from": a, "span": f"{a}–{b}"}
        for f in fits
        for slope, a, b in zip(f["local"], f["lengths"], f["lengths"][1:], strict=False)
    ]
    add("slopes", slopes, lambda: slopes_chart(slopes, layers, head=head, legend=True))
    cells = [m for m in means if m["s"] == s and m["head"] is not None and m["kind"] == REAL]
    cells = [m for m in cells if m["n"] == max(c["n"] for c in cells)]
    for quantity in QUANTITIES:
        add(
            f"heads-{quantity}",
            cells,
            lambda q=quantity: heads_chart(cells, layers, quantity=q),
        )
    for name, grown in GROWN.items():
        add(
            name,
            [m for m in real_means if m[grown]],
            lambda g=grown: layers_chart(
                real, real_means, layers, grown=g, axes=real_axes, head=head, legend=True
            ),
        )
    add(
        "sigma-radius",
        [p for p in real if p["radius"]],
        lambda: radius_chart(real, layers, head=head, legend=True),
    )
    tokens = _tokens(content, s)
    if tokens:
        found.append(("text", shaded_text(tokens)))
    return found


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
        yield (
            f"training-{name}",
            training_chart(
                [],
                [m for m in some if m["n"] == last],
                setting["layers"],
                turn=training.turn,
                axes=group["axes"][kind][str(last)],
                head=head,
                legend=True,
            ),
        )


def _largest(means: Records) -> str | None:
    last = [m for m in means if m["n"] == max(x["n"] for x in means)]
    return max(last, key=lambda m: m["sigma"])["layer"] if last else None


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
