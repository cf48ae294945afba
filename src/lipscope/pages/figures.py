"""Charts of the HTML report: blank for its scripts, and as files for a paper."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lipscope import charts
from lipscope.errors import InputError
from lipscope.pages.content import Content
from lipscope.pages.moves import Push
from lipscope.pages.points import REAL, SETTING, axes, axis, windows_of
from lipscope.pages.sections import bounds_of
from lipscope.records import Bound, Measurement, TokenShare, comparisons, usable

Records = list[dict[str, Any]]
Drawn = Iterator[tuple[str, charts.Chart]]  # name of a file without ending, and its chart
_LONGEST = 120  # letters of a file's name, of the 255 that file systems take


def blank_charts(layers: Sequence[str], turn: float | None) -> dict[str, charts.Chart]:
    """Every chart of the page without data, by its name in ``charts.js``.

    ``turn`` is where the axis of training steps turns from linear to logarithmic. One more chart
    is a function of a frame, an entry here and one in ``charts.js``.
    """
    partial = functools.partial
    kinds: dict[str, Callable[..., charts.Chart]] = {
        "focus": charts.focus_chart,
        "layers": charts.layers_chart,
        "exponents": charts.exponents_chart,
        "slopes": charts.slopes_chart,
        **{f"heads-{one}": partial(charts.heads_chart, quantity=one) for one in charts.TITLES},
        "radius-n": partial(charts.layers_chart, grown="radius"),
        "rank": partial(charts.layers_chart, grown="rank"),
        "sigma-radius": charts.radius_chart,
        "training": partial(charts.training_chart, turn=turn),
        **{f"signal-{one}": partial(charts.signals_chart, scale=one) for one in ("log", "linear")},
        "push": charts.push_chart,
        "bounds": charts.bounds_chart,
        "sides": charts.sides_chart,
        "ratios": charts.changes_chart,
        "shifts": partial(charts.changes_chart, of="difference"),
        "depth": charts.depth_chart,
        "products": partial(charts.depth_chart, of="products"),
        "gains": charts.gains_chart,
    }
    heights = {"bounds": 380}
    return {
        name: chart(charts.Frame(layers=layers, width="container", height=heights.get(name)))
        for name, chart in kinds.items()
    }


def write_figures(content: Content, folders: Mapping[str, Path]) -> list[Path]:
    """Write every chart of the page that has data, for every setting, in each format."""
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    kinds = (_of_settings, training_charts, _of_bounds, _of_contrast, depth_charts, _of_gains)
    drawn = [one for charts_of in kinds for one in charts_of(content)]
    drawn += push_charts(content.pushes)
    paths = [[at / f"{name}.{kind}" for kind, at in folders.items()] for name, _ in drawn]
    written = [charts.save_each(chart, each) for (_, chart), each in zip(drawn, paths, strict=True)]
    return [path for each in written for path in each]


# --- figures of rows in memory -----------------------------------------------------------------

_UNITS = {
    "frobenius": "norm of output change per norm of input change",
    "token-relative": "output change per token-relative input change",
}
_HEIGHT = 340  # of a chart of bounds, in pixels
_NAMED, _LINE = 8, 13  # lines whose names have room at their ends; pixels between two names
_HOVER = ("layer", "head", "n", "sample", "sigma", "upper", "relative", "top token", "share")


def growth_figure(content: Content, *, width: int = 380, height: int | None = None) -> charts.Chart:
    """Sigma against the number of tokens, and sigma with the top token held fixed, as one figure.

    A line of panels for each model, map, metric, move and read, all on one axis. Points are single
    rows, lines run through the geometric mean over the samples at each length, with its 95 %
    interval for the sampling of text: of three samples and more that share no text. At the end of a
    line stands its exponent, unless no power law fits. In HTML a menu selects a layer, and a
    point under the mouse tells its row.
    """
    settings, rows = content.points.settings, [item.row for item in content.items]
    drawn = [row for row in rows if usable(row.sigma)]
    height = height or (340 if len(content.layers) <= 12 else 460)
    frame = charts.Frame(
        axes(drawn), content.layers, head="every", hover=_HOVER, width=width, height=height
    )
    lines = [_View(content, s, None).growth(frame) for s in range(len(settings))]
    grows, samples = (len({getattr(r, k) for r in drawn}) for k in ("num_tokens", "sample"))
    marks = f"Points: single {'windows of text' if drawn[0].input == 'text' else 'inputs'}."
    if grows > 1:
        marks += f" Lines: geometric mean of {samples} sample{'s' * (samples > 1)}"
        bars = any(mean["apart"] for mean in content.points.means)
        marks += f"{', bars: its 95 % interval' * bars}. Dashed: like n^(1/4) and n^(1/2)."
    notes = [
        *dict.fromkeys(
            f"map {s['map']}, metric {s['metric']}, move {s['move']}, read {s['read']}; sigma: "
            + _UNITS.get(s["metric"], "output change per input change")
            for s in settings
        ),
        *(marks, *content.points.remarks),
    ]
    if lost := len(rows) - len(drawn):
        notes.append(f"Not drawn: {lost} of {len(rows)} rows, without a finite, positive sigma.")
    what = "Growth of sigma with the number of tokens" if grows > 1 else "Sigma"
    return charts.in_lines(lines, f"{what}: {content.title}", notes)


def sandwich_figure(rows: Iterable[Measurement], bounds: Iterable[Bound]) -> charts.Chart:
    """Real sigma, adversarial sigma, the best bound at the input and bounds on all inputs.

    A chart for each layer, on one logarithmic pair of axes; only rows of one map and metric, those
    of the first one. Bounds that would flatten the others are named under the title instead.

    Raises:
        InputError: If there is no measured, positive value with bounds.
    """
    found = [one for one in comparisons(rows, bounds) if any(usable(row.sigma) for row in one.real)]
    if not found:
        raise InputError(
            "`rows` should hold a measured, positive sigma with bounds to draw. Found none."
        )
    first = found[0]
    records = [bounds_of(c) for c in found if (c.map, c.metric) == (first.map, first.metric)]
    ends = [record["axes"]["y"] for record in records]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    frame = charts.Frame(records[0]["axes"] | axis(low, high), width=420, height=_HEIGHT)
    gap = (high / low) ** (_LINE / _HEIGHT)
    lines = []
    for record in records:
        head = "" if record["head"] is None else f", head {record['head']}"
        notes = [f"map {first.map}, metric {first.metric}"]
        notes[0] += f"; bounds on all inputs (dashed): {record['allowed']}"
        notes += [f"Off the scale: {', '.join(record['out'])}."] if record["out"] else []
        title = f"Bounds of sigma: {first.model}, layer {record['layer']}{head}"
        places = charts.spread([one["value"] for one in record["names"]], gap)
        names = [one | {"value": at} for one, at in zip(record["names"], places, strict=True)]
        chart = charts.bounds_chart(frame, record["lines"], names)
        lines.append([chart.properties(title={"text": title, "subtitle": notes})])
    if len(lines) == 1:
        return lines[0][0]
    return charts.in_lines(
        lines, f"Bounds of sigma: {first.model}, {len(lines)} layers or heads", []
    )


# --- one setting ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """One setting as its files show it: its layers together, or its first head."""

    content: Content  # what the report is about
    s: int  # index of the setting
    source: str | None  # folder, where several have rows of one curve

    @property
    def setting(self) -> dict[str, Any]:
        return self.content.points.settings[self.s]

    @property
    def head(self) -> int | None:
        """The head that is shown; None for all together."""
        return None if self.setting["together"] else self.setting["heads"][0]

    def frame(self, kind: str | None = None, layer: str | None = None) -> charts.Frame:
        """The head, with the axes of rows on real inputs or of ``every`` row, where asked for."""
        axes = self.setting["axes"]["all" if self.head is None else "heads"]
        layers = self.setting["layers"]
        return charts.Frame(axes[kind] if kind else None, layers, layer, self.head, legend=True)

    def here(self, record: dict[str, Any]) -> bool:
        """Whether a record is of this setting and folder."""
        return record["s"] == self.s and record["source"] in (None, self.source)

    def mine(self, records: Records, kind: str | None = None) -> Records:
        """Records of this setting, folder and head; only those of one kind of input."""
        some = [r for r in records if self.here(r) and r["head"] == self.head]
        return [r for r in some if kind is None or r["kind"] == kind]

    def growth(self, frame: charts.Frame) -> list[charts.Chart]:
        """Sigma, and sigma with the top token held fixed, of all heads that there are."""
        points, means, fits = (
            [one for one in some if self.here(one)]
            for some in (self._worded(), self.content.points.means, self.content.points.fits)
        )
        settings, moves = self.content.points.settings, self.setting["move"]
        varied = [self.setting[k] for k in SETTING if len({one[k] for one in settings}) > 1]
        first = "all tokens may move" if moves == "all" else f"tokens that move: {moves}"
        grown: tuple[charts.Grown, ...] = (
            ("sigma", "rest") if any(m["rest"] for m in means) else ("sigma",)
        )
        panels = []
        for name in grown:
            names, legend = _line_names(frame, means, fits, name), name == grown[-1]
            framed = replace(frame, legend=legend)
            chart = charts.layers_chart(framed, points, means, grown=name, names=names)
            title = first if name == "sigma" else "top token held fixed"
            heading = {"text": ", ".join([*varied, title]), "fontSize": 12, "anchor": "middle"}
            panels.append(chart.properties(title=heading))
        return panels

    def _worded(self) -> Records:
        """Points with the text of their top token."""
        of, tops = self.content.points, self.content.tops
        words = {id: charts.visible(token.text) for id, token in tops.items()}
        pairs = zip(of.points, of.items, strict=True)
        return [point | {"top token": words.get(item.row.id)} for point, item in pairs]

    def first_charts(self) -> Drawn:
        """The charts of the setting, as the page shows them first."""
        of, content = self.mine, self.content
        points, means = of(content.points.points, REAL), of(content.means, REAL)
        built = [m["kind"] for m in of(content.points.means) if m["kind"] != REAL]
        built = list(dict.fromkeys(built))
        every, real = self.frame("every"), self.frame(REAL)
        if means:
            # The layer of largest sigma at the largest length, in front of the others.
            worst = max(means, key=lambda m: (m["n"], m["sigma"]))["layer"]
            windows = [p for p in points if p["layer"] == worst]
            yield "sigma", charts.focus_chart(self.frame(REAL, worst), windows, means)
            yield "growth", charts.layers_chart(every, points, means)
        fits = of(content.points.fits)
        if some := [f for f in fits if f["kind"] in (REAL, "rest", *built[:1])]:
            yield "exponents", charts.exponents_chart(self.frame(), some, *built[:1])
        # between neighbouring lengths
        slopes = [
            {**fit, "slope": slope, "from": a, "span": f"{a}–{b}"}
            for fit in fits
            for slope, (a, b) in zip(fit["local"], pairwise(fit["lengths"]), strict=True)
        ]
        if slopes:
            yield "slopes", charts.slopes_chart(self.frame(), slopes)
        heads = [m for m in content.means if self.here(m) and m["kind"] == REAL]
        heads = [m for m in heads if m["head"] is not None]
        if cells := [m for m in heads if m["n"] == max(one["n"] for one in heads)]:
            frame = charts.Frame(layers=self.setting["layers"], legend=True)
            for one in charts.TITLES:
                yield f"heads-{one}", charts.heads_chart(frame, cells, quantity=one)
        if some := [m for m in means if m["radius"]]:
            yield "radius-n", charts.layers_chart(real, points, some, grown="radius")
        if some := [m for m in means if m["rank"]]:
            yield "rank", charts.layers_chart(real, points, some, grown="rank")
        if some := [p for p in points if p["radius"]]:
            yield "sigma-radius", charts.radius_chart(self.frame(), some)
        for kind in built:
            name = "growth-adversarial" if kind == "adversarial" else f"growth-{_file_name(kind)}"
            parts = (of(some, kind) for some in (content.points.points, content.points.means))
            yield name, charts.layers_chart(every, *parts)
        if tokens := self._tokens():
            yield "text", charts.shaded_text(tokens)

    def _tokens(self) -> list[TokenShare]:
        """The window of largest sigma."""
        points, windows = self.content.points.points, self.content.windows
        keys = [k for k in windows.windows if self.here(points[k]) and points[k]["head"] is None]
        if not keys:
            return []
        worst = max(keys, key=lambda k: points[k]["sigma"] or 0.0)
        row = self.content.points.items[worst].row
        return windows_of(self.content.runs, [row.id])[row.id]


def _line_names(frame: charts.Frame, means: Records, fits: Records, of: charts.Grown) -> Records:
    """Names at the ends of lines: layers, with their exponents where a power law fits."""
    lengths = sorted({m["n"] for m in means})
    ends = [m for m in means if m["n"] == lengths[-1] and m[of]]
    if len(lengths) < 3 or len({m["layer"] for m in ends}) < len(ends) or len(ends) > _NAMED:
        return []  # heads, or too many to be told apart; two lengths show no law
    kinds = {m["kind"] for m in ends} if of == "sigma" else {of}
    known = {f["layer"]: f["slope"] for f in fits if f["kind"] in kinds and f["fits"] is not False}
    low, high = (frame.axes or {})["y"]
    gap = (high / low) ** (_LINE / (frame.height or 1))
    return [
        {
            "layer": m["layer"],
            "sigma": place,
            "name": f"{m['layer']}: n^{known[m['layer']]:z.2f}"
            if m["layer"] in known
            else m["layer"],
        }
        for m, place in zip(ends, charts.spread([m[of] for m in ends], gap), strict=True)
    ]


def _of_settings(content: Content) -> Drawn:
    settings = content.points.settings
    views = [_View(content, k, f) for k, s in enumerate(settings) for f in s["sources"] or [None]]
    for view in views:
        name = "-" + _setting_name(view.setting, view.source) if len(views) > 1 else ""
        yield from ((f"{what}{name}", chart) for what, chart in view.first_charts())


def _setting_name(setting: dict[str, Any], source: str | None = None) -> str:
    words = [setting["model"], setting["map"], setting["metric"]]
    if (setting["move"], setting["read"]) != ("all", "all"):
        words += [setting["move"], setting["read"]]
    return _file_name("-".join([*words, *filter(None, (setting["text"], source))]))


def _file_name(name: str) -> str:
    """A name of a file; with a digest where letters were replaced or cut, so that none is taken.

    >>> _file_name("a-b"), _file_name("a/b")
    ('a-b', 'a-b-c14cddc0')
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_LONGEST]
    if plain == name:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain}-{digest}" if plain else digest


# --- several settings -------------------------------------------------------------------------


def training_charts(content: Content) -> Drawn:
    """Sigma against training step of every model with checkpoints, at its largest length."""
    training = content.training
    for g, group in enumerate(training.groups):
        setting = content.points.settings[group["settings"][0]]
        head, kind = (None, "all") if setting["together"] else (setting["heads"][0], "heads")
        some = [m for m in training.means if m["g"] == g and m["head"] == head]
        last = max(m["n"] for m in some)
        axes = group["axes"][kind][str(last)]
        frame = charts.Frame(axes, setting["layers"], head=head, legend=True)
        means = [m for m in some if m["n"] == last]
        name = _setting_name({**setting, "model": group["name"]})
        yield f"training-{name}", charts.training_chart(frame, [], means, turn=training.turn)


def _of_bounds(content: Content) -> Drawn:
    drawn = [record for record in content.bounded if record["lines"]]
    text = {id(record): content.points.settings[record["s"]]["text"] for record in drawn}
    folders = {record["folder"] for record in drawn}
    for record in drawn:
        words = [record[w] for w in ("model", "map", "metric", "layer")]
        words += [record["head"]] if record["head"] is not None else []
        words += [text[id(record)]] if len({*text.values()}) > 1 else []
        words += [record["folder"]] if len(folders) > 1 else []
        frame = charts.Frame(record["axes"], height=_HEIGHT)
        name = _file_name("-".join(map(str, words)))
        yield f"bounds-{name}", charts.bounds_chart(frame, record["lines"], record["names"])


def _of_contrast(content: Content) -> Drawn:
    """Both folders at the layer that differs most, and the ratios of all, at the largest length."""
    if not content.compare:
        return
    a, b = names = content.contrast.names
    for table in content.contrast.tables:
        rows = table["rows"]
        most = max(rows, key=lambda row: abs(math.log(row["ratio"])))
        mine = [row for row in rows if row["head"] == most["head"]]
        last = [row for row in mine if row["n"] == max(row["n"] for row in mine)]
        words = [str(table[k]) for k in ("quantity", "map", "metric", "model", "text") if table[k]]
        name = _file_name("-".join([*words, *(["heads"] * table["heads"])]))
        means = [
            {"side": s, "n": r["n"], "value": r[s], "low": r[f"{s}_low"], "high": r[f"{s}_high"]}
            for r in mine
            if r["layer"] == most["layer"]
            for s in charts.SIDES
        ]
        head = "" if most["head"] is None else f", head {most['head']}"
        title, layers = f"{table['quantity']}, layer {most['layer']}{head}", content.layers
        frame = charts.Frame(table["axes"], legend=True)
        yield f"compare-{name}", charts.sides_chart(frame, means, names=names, title=title)
        title = f"{b} / {a}: {table['quantity']}{head}, {last[0]['n']} tokens"
        frame = charts.Frame(table["ratios"], layers)
        yield f"ratios-{name}", charts.changes_chart(frame, last, title=title)
        grown = [row for row in table["exponents"] if row["difference"] is not None]
        if grown := [row for row in grown if row["head"] == most["head"]]:
            title = f"exponent of {table['quantity']}{head}: {b} less {a}"
            frame = charts.Frame(layers=layers)
            chart = charts.changes_chart(frame, grown, of="difference", title=title)
            yield f"exponents-{name}", chart


def depth_charts(content: Content) -> Drawn:
    """Sigma through depth at the length of which most is known, once for each model and text."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in content.depths:
        key = tuple(one[k] or "" for k in ("model", "metric", "move", "read", "text", "source"))
        if len({line["layer"] for line in one["lines"]}) > 1:
            best[key] = max(best.get(key, one), one, key=lambda d: (len(d["lines"]), d["n"]))
    for key, one in best.items():
        name = "-" + _file_name("-".join(filter(None, key))) if len(best) > 1 else ""
        frames = {what: charts.Frame(axes, legend=True) for what, axes in one["axes"].items()}
        yield f"depth{name}", charts.depth_chart(frames["layers"], one["lines"], one["whole"])
        if one["products"]:
            products = (frames["products"], one["products"], one["whole"])
            yield f"products{name}", charts.depth_chart(*products, of="products")


def _of_gains(content: Content) -> Drawn:
    for one in content.gains:
        model = content.points.settings[one["s"]]["model"]
        name = _file_name(f"{model}-{one['layer']}-{one['sample']}")
        frame = charts.Frame(one["axes"], legend=True)
        yield f"gains-{name}", charts.gains_chart(frame, one["tokens"])


def push_charts(pushes: Sequence[Push]) -> Drawn:
    """The chart of every push."""
    for push in pushes:
        name = "push" if len(pushes) == 1 else f"push-{_file_name(push.name)}"
        chart = charts.push_chart(charts.Frame(legend=True, width=620), push.curves, push.sizes)
        yield name, chart.properties(title=push.name)
