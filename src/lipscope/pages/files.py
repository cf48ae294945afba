"""The charts of a report as files, at the quality of a paper."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.charts import (
    SIDES,
    WAYS,
    Chart,
    Frame,
    bounds_chart,
    depth_chart,
    gains_chart,
    product_chart,
    push_chart,
    ratios_chart,
    save_each,
    shaded_text,
    shifts_chart,
    sides_chart,
    training_chart,
)
from lipscope.pages.chart_register import SHOWN, View, built_chart
from lipscope.pages.content import Content
from lipscope.pages.pushed import Push
from lipscope.pages.windows import SCALE
from lipscope.records import TokenShare

_LONGEST = 120  # letters of a file's name, of the 255 that file systems take


def write_figures(content: Content, folders: Mapping[str, Path]) -> list[Path]:
    """Every chart of the page that has something to draw, for every setting.

    Args:
        content: What the report is about.
        folders: Where, by format; made if need be.

    Returns:
        The files.
    """
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    charts = [*_of_settings(content), *training_charts(content), *_of_bounds(content)]
    charts += [*_of_contrast(content), *_of_depths(content), *_of_gains(content)]
    charts += push_charts(content.pushes)
    paths = [[at / f"{name}.{kind}" for kind, at in folders.items()] for name, _ in charts]
    written = [save_each(chart, each) for (_, chart), each in zip(charts, paths, strict=True)]
    return [path for each in written for path in each]


def _of_settings(content: Content) -> Iterator[tuple[str, Chart]]:
    """The charts of every setting and folder."""
    settings = content.points.settings
    views = [View(content, k, f) for k, s in enumerate(settings) for f in s["sources"] or [None]]
    for view in views:
        name = _plain_name(view.setting, view.source) if len(views) > 1 else ""
        for what, chart in _charts(view):
            yield f"{what}-{name}" if name else what, chart


def _of_bounds(content: Content) -> Iterator[tuple[str, Chart]]:
    """Every layer between its bounds."""
    drawn = [record for record in content.bounded if record["lines"]]
    texts = {content.points.settings[record["s"]]["text"] for record in drawn}
    folders = {record["folder"] for record in drawn}
    for record in drawn:
        words = [record[w] for w in ("model", "map", "metric", "layer")]
        words += [record["head"]] if record["head"] is not None else []
        words += [content.points.settings[record["s"]]["text"]] if len(texts) > 1 else []
        words += [record["folder"]] if len(folders) > 1 else []
        chart = bounds_chart(record["lines"], record["names"], Frame(record["axes"], height=340))
        yield f"bounds-{_safe('-'.join(map(str, words)))}", chart


def _of_contrast(content: Content) -> Iterator[tuple[str, Chart]]:
    """Both folders at the layer that differs most, and the ratios of all, at the largest length."""
    contrast = content.contrast if content.compare else None
    for table in contrast.tables if contrast else ():
        rows = table["rows"]
        most = max(rows, key=lambda row: abs(math.log(row["ratio"])))
        mine = [row for row in rows if row["head"] == most["head"]]
        layer = [row for row in mine if row["layer"] == most["layer"]]
        last = [row for row in mine if row["n"] == max(row["n"] for row in mine)]
        words = [str(table[k]) for k in ("quantity", "map", "metric", "model", "text") if table[k]]
        words += ["heads"] * table["heads"]
        means = [
            {"side": s, "n": r["n"], "value": r[s], "low": r[f"{s}_low"], "high": r[f"{s}_high"]}
            for r in layer
            for s in SIDES
        ]
        head = "" if most["head"] is None else f", head {most['head']}"
        title = f"{table['quantity']}, layer {most['layer']}{head}"
        frame, names = Frame(table["axes"], legend=True), contrast.names if contrast else ("", "")
        yield (
            f"compare-{_safe('-'.join(words))}",
            sides_chart(means, frame, names=names, title=title),
        )
        title = f"{names[1]} / {names[0]}: {table['quantity']}{head}, {last[0]['n']} tokens"
        chart = ratios_chart(last, content.layers, Frame(table["ratios"]), title=title)
        yield f"ratios-{_safe('-'.join(words))}", chart
        grown = [row for row in table["exponents"] if row["difference"] is not None]
        if grown := [row for row in grown if row["head"] == most["head"]]:
            title = f"exponent of {table['quantity']}{head}: {names[1]} less {names[0]}"
            chart = shifts_chart(grown, content.layers, Frame(), title=title)
            yield f"exponents-{_safe('-'.join(words))}", chart


def _of_depths(content: Content) -> Iterator[tuple[str, Chart]]:
    """Sigma through depth at the length of which most is known, once for each model and text."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in content.depths:
        key = tuple(one[k] or "" for k in ("model", "metric", "move", "read", "text", "source"))
        if len({line["layer"] for line in one["lines"]}) > 1:
            best[key] = max(best.get(key, one), one, key=lambda d: (len(d["lines"]), d["n"]))
    for key, one in best.items():
        name = "-" + _safe("-".join(filter(None, key))) if len(best) > 1 else ""
        frame = Frame(one["axes"]["layers"], legend=True)
        yield f"depth{name}", depth_chart(one["lines"], one["whole"], frame)
        if one["products"]:
            frame = Frame(one["axes"]["products"], legend=True)
            yield f"products{name}", product_chart(one["products"], one["whole"], frame)


def _of_gains(content: Content) -> Iterator[tuple[str, Chart]]:
    """What taking tokens apart gains, window by window."""
    for one in content.gains:
        model = content.points.settings[one["s"]]["model"]
        name = _safe(f"{model}-{one['layer']}-{one['sample']}")
        tokens = [
            token
            | {"way": way, "gain": token[way], "upper": token[f"{way}_upper"]}
            | {"better": token["better"] and way == "split"}
            for token in one["tokens"]
            for way in WAYS
        ]
        yield f"gains-{name}", gains_chart(tokens, Frame(one["axes"], legend=True))


def _plain_name(setting: dict[str, Any], source: str | None = None) -> str:
    words = [setting["model"], setting["map"], setting["metric"]]
    if (setting["move"], setting["read"]) != ("all", "all"):
        words += [setting["move"], setting["read"]]
    words += [word for word in (setting["text"], source) if word]
    return _safe("-".join(words))


def _safe(name: str) -> str:
    """A name of a file; with a digest where letters were replaced or cut, so that none is taken.

    >>> _safe("a-b"), _safe("a/b")
    ('a-b', 'a-b-c14cddc0')
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_LONGEST]
    if plain == name:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain}-{digest}" if plain else digest


def _charts(view: View) -> Iterator[tuple[str, Chart]]:
    """The charts of one setting, as the page shows them first."""
    for one in SHOWN:
        if one.records is not None and one.draw is not None and (records := one.records(view)):
            yield one.name, one.draw(view, records)
    for kind in view.built:
        name = "growth-adversarial" if kind == "adversarial" else f"growth-{_safe(kind)}"
        yield name, built_chart(view, kind)
    if tokens := _tokens(view):
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


def push_charts(pushes: Sequence[Push]) -> Iterator[tuple[str, Chart]]:
    """The chart of every push.

    Args:
        pushes: The pushes.

    Yields:
        Name of the file, without ending, and the chart.
    """
    for push in pushes:
        name = "push" if len(pushes) == 1 else f"push-{_safe(push.name)}"
        chart = push_chart(push.curves, push.sizes, Frame(legend=True, width=620))
        yield name, chart.properties(title=push.name)


def _tokens(view: View) -> list[TokenShare]:
    """The window of largest sigma of a setting."""
    points, windows = view.content.points.points, view.content.windows
    held = [k for k in windows.windows if view.here(points[k]) and points[k]["head"] is None]
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
