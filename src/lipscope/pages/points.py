"""Rows as the charts of a page read them: settings, points, means and fitted exponents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from lipscope.charts import layer_labels, positive, tick_values
from lipscope.errors import InputError
from lipscope.pages.items import REAL, SETTING, Item, by_setting, paired
from lipscope.pages.table import Line, middle, stable_rank
from lipscope.records import Growth, Measurement, Of, enclosed_mean, group_of, growth

MAX_POINTS = 10_000
"""Rows that a page carries one by one; beyond, a part of them."""

MAX_CURVES = 1_500
"""Curves whose means and exponents a page carries: layers first, then single heads."""

_WORST = 20  # rows of a setting that are carried whatever their number


@dataclass(frozen=True)
class Points:
    """What the charts read.

    Attributes:
        settings: Values that stand on one axis, with their axes.
        items: The measurements that are carried one by one, in the order of `points`.
        points: One record each.
        means: Geometric means of every curve at each length.
        fits: Exponents of every curve, of sigma and of sigma without the top token.
        lines: For each curve on real inputs, what tables, cards and sentences say of it.
        remarks: What was left out, in words.
    """

    settings: list[dict[str, Any]]
    items: list[Item]
    points: list[dict[str, Any]]
    means: list[dict[str, Any]]
    fits: list[dict[str, Any]]
    lines: list[tuple[Item, Line]]
    remarks: list[str] = field(default_factory=list)


def points_of(items: Sequence[Item]) -> Points:
    """Everything that the charts draw."""
    settings = by_setting(items)
    carried = _carried(items)
    curves: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        curves.setdefault(item.curve, []).append(item)
    kept = layers_first(list(curves))
    remarks = []
    if len(carried) < len(items):
        remarks.append(
            f"Points show {len(carried):,} of {len(items):,} rows: the {_WORST} worst of every "
            "setting and an even sample of the others. Lines, exponents and counts are of all rows."
        )
    if len(kept) < len(curves):
        remarks.append(
            f"Lines and exponents show {len(kept):,} of {len(curves):,} curves: layers first, "
            "single heads evenly chosen."
        )
    index = {s: k for k, s in enumerate(settings)}
    samples = sorted({item.row.sample for item in items})
    order = {s: round((k + 0.5) / len(samples) - 0.5, 4) for k, s in enumerate(samples)}
    grown = {key: _grown(curves[key]) for key in kept}
    return Points(
        settings=[_setting(s, some) for s, some in settings.items()],
        items=carried,
        points=[
            _point(item, index[item.setting]) | {"order": order[item.row.sample]}
            for item in carried
        ],
        means=[m for key in kept for m in _means(curves[key], index[key[0]])],
        fits=[_fit(curves[key][0], index[key[0]], *one) for key in kept for one in grown[key]],
        lines=_lines(curves, grown),
        remarks=remarks,
    )


def as_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Records with the same keys as columns, which take less room."""
    names = list(records[0]) if records else []
    return {name: [record[name] for record in records] for name in names}


def short(value: float | None) -> float | None:
    """A number with five significant digits, which take less room; null if not finite.

    >>> short(3.14159265), short(float("inf"))
    (3.1416, None)
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def label(layer: int | None) -> str:
    """A layer as it stands in legends."""
    return "model" if layer is None else str(layer)


# --- settings -------------------------------------------------------------------------------


def _setting(key: tuple[str, ...], items: Sequence[Item]) -> dict[str, Any]:
    """A setting with its layers, heads and the axes of all of its charts."""
    heads = {item.row.head for item in items if item.row.head is not None}
    drawn = [item for item in items if positive(item.row.sigma)]
    return {
        **dict(zip(SETTING, key, strict=True)),
        "name": items[0].row.model,
        "step": items[0].row.step,
        "layers": layer_labels(item.row for item in items),
        "heads": sorted(heads),
        "together": any(item.row.head is None for item in items),
        "kinds": list(dict.fromkeys(item.kind for item in items)),
        "sources": list(dict.fromkeys(i.source for i in items if i.source is not None)),
        "rows": len(items),
        "deltas": sorted({item.row.delta for item in items}),
        "axes": {
            "all": _both([item for item in drawn if item.row.head is None]),
            "heads": _both([item for item in drawn if item.row.head is not None]),
        },
    }


def _both(items: Sequence[Item]) -> dict[str, Any]:
    """The axes of all rows, and those of rows on real inputs."""
    real = [item.row for item in items if item.kind == REAL]
    found = axes(real)
    return {
        REAL: found,
        "every": found if len(real) == len(items) else axes([item.row for item in items]),
    }


def axes(rows: Sequence[Measurement]) -> dict[str, Any] | None:
    """Domains and ticks of sigma against n, the same for every layer of a setting."""
    if not rows:
        return None
    lengths = sorted({row.num_tokens for row in rows})
    values = [v for r in rows for v in (r.sigma, r.upper, r.sigma_rest) if v and positive(v)]
    # An upper end that is far away (steps ran out) would flatten everything else.
    top = max(r.sigma for r in rows if r.sigma)
    low, high = min(values), min(max(values), 30 * top)
    pad = max(1.12, (high / low) ** 0.04)
    y = [low / pad, high * pad]
    ratios = [b / a for a, b in pairwise(lengths)]
    room = min([2.0, *ratios]) ** 0.3
    return {
        "x": [round(lengths[0] / room, 4), round(lengths[-1] * room, 4)],
        "y": [short(v) for v in y],
        "xticks": lengths,
        "yticks": tick_values(*y),
        "room": round(room, 4),
    }


# --- points ---------------------------------------------------------------------------------


def _carried(items: Sequence[Item]) -> list[Item]:
    """All items, or the worst of every setting and an even sample of the rest."""
    if len(items) <= MAX_POINTS:
        return list(items)
    always: set[int] = set()
    places: dict[tuple[str, ...], list[int]] = {}
    for k, item in enumerate(items):
        places.setdefault(item.setting, []).append(k)
    for some in places.values() if len(places) * _WORST * 2 <= MAX_POINTS else ():
        for name in ("sigma", "relative"):
            some.sort(key=lambda k, name=name: -(getattr(items[k].row, name) or 0.0))
            always |= set(some[:_WORST])
    others = [k for k in range(len(items)) if k not in always]
    return [items[k] for k in sorted(always | set(_evenly(others, MAX_POINTS - len(always))))]


def _evenly(things: list[Any], count: int) -> list[Any]:
    if len(things) <= count:
        return things
    return [things[k * len(things) // count] for k in range(count)]


def layers_first(curves: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """All curves, or as many as are carried: whole layers, then an even part of the heads."""
    layers = _evenly([c for c in curves if c[-1] is None], MAX_CURVES)
    heads = _evenly([c for c in curves if c[-1] is not None], MAX_CURVES - len(layers))
    return [*layers, *heads]


def _point(item: Item, setting: int) -> dict[str, Any]:
    row = item.row
    return {
        "s": setting,
        "kind": item.kind,
        "source": item.source,
        "layer": label(row.layer),
        "head": row.head,
        "n": row.num_tokens,
        "sample": row.sample,
        "sigma": short(row.sigma),
        "upper": short(row.upper),
        "rest": short(row.sigma_rest),
        "relative": short(row.relative),
        "share": short(row.top_share),
        "token": row.top_token,
        "radius": short(row.radius_max),
        "rms": short(row.radius_rms),
        "rank": short(stable_rank(row)),
        "status": row.status,
        "note": row.error or (row.note if item.kind != REAL else None),
    }


def _means(items: Sequence[Item], setting: int) -> list[dict[str, Any]]:
    """One record for each length of a curve."""
    lengths: dict[int, list[Measurement]] = {}
    for item in items:
        if positive(item.row.sigma):
            lengths.setdefault(item.row.num_tokens, []).append(item.row)
    first = items[0]
    found = []
    for n, rows in sorted(lengths.items()):
        sigma, low, high = map(short, spread_of(rows))
        found.append(
            {
                "s": setting,
                "kind": first.kind,
                "source": first.source,
                "layer": label(first.row.layer),
                "head": first.row.head,
                "n": n,
                "sigma": sigma,
                "low": low,
                "high": high,
                "rest": _geometric(row.sigma_rest for row in rows),
                "relative": _geometric(row.relative for row in rows),
                "radius": _geometric(row.radius_max for row in rows),
                "rank": _geometric(map(stable_rank, rows)),
                "share": _average([row.top_share for row in rows if row.top_share is not None]),
                "count": len(rows),
                "trained": rows[0].trained_length if first.kind == REAL else None,
            }
        )
    return found


def spread_of(rows: Sequence[Measurement]) -> tuple[float, float, float]:
    """Geometric mean of sigma over windows, and the interval of `enclosed_mean` in logarithms."""
    sigma, low, high = map(math.exp, enclosed_mean([log_ends(row) for row in rows]))
    return sigma, low, high


def log_ends(row: Measurement) -> tuple[float, float]:
    """``log sigma`` and ``log upper`` of a row with a positive sigma."""
    sigma = row.sigma or 1.0
    return math.log(sigma), math.log(max(row.upper or 0.0, sigma))


def _geometric(values: Iterable[float | None]) -> float | None:
    logs = [math.log(v) for v in values if v is not None and positive(v)]
    return short(math.exp(math.fsum(logs) / len(logs))) if logs else None


def _average(values: Sequence[float]) -> float | None:
    return short(math.fsum(values) / len(values)) if values else None


# --- exponents ------------------------------------------------------------------------------


def _grown(items: Sequence[Item]) -> list[tuple[str, Growth]]:
    """The growth of one curve: of sigma, and of sigma with the top token held fixed."""
    first = items[0]
    rows = [item.row for item in items]
    found = [(first.kind, _growth(rows, paired=paired(first.run)))]
    if first.kind == REAL and any(row.sigma_rest for row in rows):
        found.append(("rest", _growth(rows, paired=paired(first.run), of="sigma_rest")))
    return [(kind, fit) for kind, fit in found if fit is not None]


def _growth(rows: Sequence[Measurement], *, paired: bool, of: Of = "sigma") -> Growth | None:
    try:
        return growth(rows, paired=paired, of=of)
    except InputError:  # one window twice in a folder, measured otherwise: no curve
        return None


def _fit(first: Item, setting: int, kind: str, fit: Growth) -> dict[str, Any]:
    beyond = fit.beyond and f": {fit.beyond.verdict} from {fit.beyond.lengths[0]} tokens on"
    return {
        "s": setting,
        "source": first.source,
        "layer": label(first.row.layer),
        "head": first.row.head,
        "kind": kind,
        "slope": short(fit.slope),
        "low": short(fit.low),
        "high": short(fit.high),
        "interval": fit.interval,
        "deviation": fit.deviation,
        "nearly": fit.nearly,
        "fits": fit.fits,
        "lengths": list(fit.lengths),
        "local": [short(s) for s in fit.local],
        "samples": fit.num_samples,
        "note": fit.note and fit.note + (beyond or ""),
    }


def _lines(
    curves: Mapping[tuple[Any, ...], list[Item]],
    grown: Mapping[tuple[Any, ...], list[tuple[str, Growth]]],
) -> list[tuple[Item, Line]]:
    """Curves on real inputs at the largest length of those they are compared with."""
    largest: dict[tuple[Any, ...], int] = {}
    for key, items in curves.items():
        most = max(item.row.num_tokens for item in items)
        largest[compared(key)] = max(most, largest.get(compared(key), 0))
    found = []
    for key in grown:
        first, num_tokens = curves[key][0], largest[compared(key)]
        if first.kind == REAL:
            last = [i.row for i in curves[key] if i.row.num_tokens == num_tokens]
            fit = dict(grown[key]).get(REAL)
            line = Line(group_of(first.row), middle(last), last, None, fit, num_tokens)
            found.append((first, line))
    return found


def compared(curve: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the curves have in common that stand beside each other: all but layer and head."""
    return (*curve[:3], curve[-1] is None)


# --- checkpoints of one model side by side: sigma against training step ---

_FAR = 50  # last step by first one, beyond which steps stand on a logarithmic axis
_PAD = 0.04  # of the axis, on both sides


@dataclass(frozen=True)
class Training:
    """What the chart of sigma against training step draws.

    Attributes:
        groups: Settings that differ in their step alone: name, places of the settings, steps, axes
            by length.
        means: Geometric mean of every layer (and head) at each length and step.
        turn: Step at which the axis turns from linear to logarithmic; None for a linear one.
        remark: What was left out, or None.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    means: list[dict[str, Any]] = field(default_factory=list)
    turn: float | None = None
    remark: str | None = None

    def group_of(self, setting: int) -> int | None:
        """Place of the group that a setting belongs to."""
        found = (g for g, group in enumerate(self.groups) if setting in group["settings"])
        return next(found, None)


def training_of(items: Sequence[Item], settings: Sequence[dict[str, Any]]) -> Training:
    """Checkpoints of one model, which differ in the last number of their name."""
    groups = _groups(settings)
    if not groups:
        return Training()
    place = {s: (g, settings[s]["step"]) for g, one in enumerate(groups) for s in one["settings"]}
    index = {tuple(one[name] for name in SETTING): s for s, one in enumerate(settings)}
    curves: dict[tuple[Any, ...], dict[int, list[Measurement]]] = {}
    for item in items:
        row, at = item.row, place.get(index[item.setting])
        if at is not None and item.kind == REAL and positive(row.sigma):
            key = (at[0], item.source, row.num_tokens, row.layer, row.head)
            curves.setdefault(key, {}).setdefault(at[1], []).append(row)
    turn = _turn([step for _, step in place.values()])
    for g, group in enumerate(groups):
        group["axes"] = _axes(g, group["steps"], curves, turn)
    kept = layers_first(list(curves))
    remark = None
    if len(kept) < len(curves):
        remark = f"Steps are shown for {len(kept):,} of {len(curves):,} layers, heads and lengths."
    means = [_mean(key, step, rows) for key in kept for step, rows in sorted(curves[key].items())]
    return Training(groups, means, turn, remark)


def _groups(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, ...], list[int]] = {}
    for s, one in enumerate(settings):
        if one["step"] is not None:
            family = re.sub(r"\d+(?=\D*$)", "*", one["name"]) + one["model"][len(one["name"]) :]
            found.setdefault((family, *(one[name] for name in SETTING[1:])), []).append(s)
    return [
        {"name": key[0], "settings": some, "steps": sorted({settings[s]["step"] for s in some})}
        for key, some in found.items()
        if len({settings[s]["step"] for s in some}) > 1
    ]


def _mean(key: tuple[Any, ...], step: int, rows: Sequence[Measurement]) -> dict[str, Any]:
    """The geometric mean over the windows of one length, with its interval."""
    group, source, num_tokens, layer, head = key
    sigma, low, high = spread_of(rows)
    return {
        "g": group,
        "source": source,
        "layer": label(layer),
        "head": head,
        "n": num_tokens,
        "step": step,
        "sigma": short(sigma),
        # One window has the solver's interval alone; several also that of the sampling of text.
        "low": short(low),
        "high": short(high),
        "count": len(rows),
    }


def _turn(steps: Sequence[int]) -> float | None:
    """Where a logarithmic axis begins, if steps are so far apart that they need one."""
    first = min((step for step in steps if step > 0), default=1)
    return float(first) if max(steps) > _FAR * first else None


def _axes(
    group: int,
    steps: Sequence[int],
    curves: dict[tuple[Any, ...], dict[int, list[Measurement]]],
    turn: float | None,
) -> dict[str, dict[str, Any]]:
    """Axes for all heads together and for single ones, by length."""
    found: dict[str, dict[str, Any]] = {"all": {}, "heads": {}}
    parts: dict[tuple[str, int], list[Measurement]] = {}
    for (g, _, n, _, head), by_step in curves.items():
        if g == group:
            kind = "all" if head is None else "heads"
            some = parts.setdefault((kind, n), [])
            some += (replace(row, sigma_rest=None) for rows in by_step.values() for row in rows)
    for (kind, n), rows in parts.items():
        ends = {"x": _padded(steps, turn), "xticks": _ticks(steps)}
        found[kind][str(n)] = (axes(rows) or {}) | ends
    return found


def _padded(steps: Sequence[int], turn: float | None) -> list[float]:
    """The ends of the axis of steps."""

    def at(x: float) -> float:
        return x if turn is None else math.copysign(math.log1p(abs(x) / turn), x)

    def back(t: float) -> float:
        return t if turn is None else math.copysign(turn * math.expm1(abs(t)), t)

    first, last = at(float(steps[0])), at(float(steps[-1]))
    pad = _PAD * (last - first)
    return [round(back(first - pad), 4), round(back(last + pad), 4)]


def _ticks(steps: Sequence[int]) -> list[int]:
    """Steps that are named, the last one among them: all, or every so many."""
    every = -(-len(steps) // 10)
    return list(steps)[::-1][::every][::-1]
