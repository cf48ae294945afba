"""Data of the charts: rows by setting, then their points, means and exponents."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from lipscope.charts import layer_labels, tick_values
from lipscope.display import ENDS, Rounding, rounded_down, rounded_up
from lipscope.errors import InputError
from lipscope.pages import table
from lipscope.pages.table import Line, middle, stable_rank
from lipscope.records import (
    Growth,
    Measurement,
    Of,
    Run,
    TokenShare,
    enclosed_mean,
    geometric_mean,
    given,
    group_of,
    grouped,
    growth,
    records_of,
    share_text,
    usable,
)

_NAMED = 40  # letters of a text that stand for it in a control


def text_of(run: Run, name: str | None) -> str:
    """The input of a row in words; "" where the folder does not record it."""
    source = run.manifest["provenance"]
    if images := source.get("images"):
        return "random pixels" if images == "random" else f"the folder “{images}”"
    named = run.manifest["spec"].get("texts", {})
    begins, sha256 = source.get("text"), source.get("text_sha256")
    if name in named:
        begins, sha256 = name, named[name]
    if not begins or not sha256:
        return ""
    source_name = "Python's language manual" if begins == "default" else f"the text “{begins}”"
    return f"{source_name} (SHA-256 {sha256[:12]})"


def labels(texts: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Short names of texts, none for two of them.

    >>> list(labels([("0", "the text “It was”"), ("1", "the folder “photos”")]).values())
    ['It was', 'the folder “photos”']
    """
    names: dict[tuple[str, str], str] = {}
    by_name: dict[str, set[str]] = {}
    for pair in texts:
        short_name, _, digest = pair[1].partition(" (SHA-256 ")
        if short_name.startswith("the text "):
            short_name = short_name.removeprefix("the text ").strip("“”")
        names[pair] = short_name if len(short_name) <= _NAMED else f"{short_name[: _NAMED - 1]}…"
        by_name.setdefault(names[pair], set()).add(digest)
    return {
        pair: f"{name} ({pair[1][-13:-1]})" if len(by_name[name]) > 1 else name
        for pair, name in names.items()
    }


def folder_names(runs: Iterable[Run]) -> dict[str, str]:
    """The last part of each folder's path that tells it from the others, by path."""
    paths = list(dict.fromkeys(str(run.path) for run in runs))
    parts = {path: Path(path).parts for path in paths}
    for count in range(1, max((len(p) for p in parts.values()), default=0) + 1):
        names = {path: "/".join(part[-count:]) for path, part in parts.items()}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


def windows_of(
    runs: Iterable[Run], ids: Iterable[str], *, most: int | None = None
) -> dict[str, list[TokenShare]]:
    """The tokens of these rows, in their order."""
    import polars as pl

    wanted = pl.col("id").is_in(sorted(set(ids)))
    wanted = wanted if most is None else wanted & (pl.col("index") < most)
    found: dict[str, list[TokenShare]] = {}
    for run in runs:
        tokens = records_of(TokenShare, run.tokens.filter(wanted).sort("id", "index"))
        found = grouped(tokens, lambda one: one.id) | found
    return found


REAL = "real"
SETTING = (*table.SETTING, "text")


@dataclass(frozen=True)
class Item:
    """A measurement with the setting and the kind of input that it belongs to."""

    row: Measurement  # the measurement
    # Model (with what tells it from others of its name), map, metric, move, read, text
    setting: tuple[str, ...]
    s: int  # place of the setting, in order of appearance
    kind: str  # `REAL`, or what built the input
    run: Run  # the folder that holds it
    source: str | None = None  # name of the folder, where several have rows of one curve; else None

    @property
    def curve(self) -> tuple[Any, ...]:
        """The fields that the items of one growth curve share."""
        return self.setting, self.kind, self.source, self.row.layer, self.row.head


def items_of(runs: Sequence[Run]) -> list[Item]:
    """Every row of a folder once; no curve has rows of two models, texts, inputs or folders."""
    every = ((run, row) for run in runs for row in run.measurements())
    found = {(str(run.path), row.id): (run, row) for run, row in every}.values()
    names = _model_names(row for _, row in found)
    texts = labels((str(run.path), text_of(run, row.text)) for run, row in found)
    places: dict[tuple[str, ...], int] = {}
    items = []
    for run, row in found:
        text = texts[str(run.path), text_of(run, row.text)]
        setting = (names[_version(row)], row.map, row.metric, row.move, row.read, text)
        s = places.setdefault(setting, len(places))
        items.append(Item(row, setting, s, REAL if given(row) else row.input, run))
    return _by_folder(_by_radius(items if len(runs) < 2 else _curves_once(items)))


def _curves_once(items: Sequence[Item]) -> list[Item]:
    """Items without curves of which another folder holds all rows; equal ones stay once."""
    curves: dict[tuple[str, tuple[Any, ...]], set[str]] = {}
    for i in items:
        curves.setdefault((str(i.run.path), i.curve), set()).add(i.row.id)
    kept = set[tuple[str, tuple[Any, ...]]]()
    holding: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
    for key in sorted(curves, key=lambda one: -len(curves[one])):  # in order where equal
        ids = curves[key]
        others = (one for one in holding.get(next(iter(ids)), ()) if one[0] != key[0])
        if not any(ids <= curves[one] for one in others):
            kept.add(key)
            for one in ids:
                holding.setdefault(one, []).append(key)
    return [i for i in items if (str(i.run.path), i.curve) in kept]


def _by_radius(items: Sequence[Item]) -> list[Item]:
    """Constructed inputs, with the radius in their name where there are several."""
    seen = Counter((i.curve, str(i.run.path), i.row.num_tokens, i.row.sample) for i in items)
    several = {(key[0][:2], key[1]) for key, count in seen.items() if count > 1}
    return [
        replace(i, kind=f"{i.kind}, radius {i.row.radius_max:.3g}")
        if i.kind != REAL and i.row.radius_max and (i.curve[:2], str(i.run.path)) in several
        else i
        for i in items
    ]


def _by_folder(items: Sequence[Item]) -> list[Item]:
    """Items with the name of their folder, where several folders have rows of one curve."""
    several = (
        curve
        for curve, some in grouped(items, lambda item: item.curve).items()
        if len({str(item.run.path) for item in some}) > 1
    )
    mixed = {(*curve[:2], curve[-1] is None) for curve in several}
    names = folder_names(item.run for item in items)
    return [
        replace(i, source=names[str(i.run.path)])
        if (*i.curve[:2], i.row.head is None) in mixed
        else i
        for i in items
    ]


def items_by_setting(items: Iterable[Item]) -> dict[tuple[str, ...], list[Item]]:
    """Items of one setting together, settings in their order of appearance."""
    return grouped(items, lambda item: item.setting)


def _model_names(rows: Iterable[Measurement]) -> dict[tuple[Any, ...], str]:
    """Names of models, made distinct where models share one."""
    versions: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for key, row in {_version(row): row for row in rows}.items():
        versions.setdefault(row.model, {})[key] = _version_words(row)
    names: dict[tuple[Any, ...], str] = {}
    for model, ways in versions.items():
        varied = [len(set(words)) > 1 for words in zip(*ways.values(), strict=True)]
        varied[_MASK] = True  # always named, as it is not the model itself
        for key, words in ways.items():
            names[key] = " · ".join([model, *filter(None, compress(words, varied))])
    return names


_version = attrgetter(
    "model", "step", "revision", "weights", "side", "position_offset", "dtype", "seed"
)


_MASK = 3  # place of an added or removed mask in the words


def _version_words(row: Measurement) -> list[str]:
    weights = row.weights.split(", ")
    mask = weights.pop() if weights[-1].endswith(" a causal mask") else ""
    return [
        "" if row.step is None else f"step {row.step}",
        row.revision or "",
        ", ".join(weights),
        mask,
        "" if row.side == "self" else f"side {row.side}",
        f"positions from {row.position_offset}" if row.position_offset else "",
        row.dtype,
        f"seed {row.seed}",
    ]


# --- what charts draw

MAX_POINTS = 10_000
"""Rows that a page carries one by one; beyond, a part of them."""

MAX_CURVES = 1_500
"""Curves whose means and exponents a page carries: layers first, then single heads."""

_WORST = 20  # rows of a setting that are carried whatever their number


@dataclass(frozen=True)
class Points:
    """The data of the charts."""

    settings: list[dict[str, Any]]  # values that stand on one axis, with their axes
    items: list[Item]  # the measurements that are carried one by one, in the order of `points`
    points: list[dict[str, Any]]  # one record each
    means: list[dict[str, Any]]  # geometric means of every curve at each length
    # Exponents of every curve, of sigma and of sigma without the top token
    fits: list[dict[str, Any]]
    # For each curve on real inputs, what tables, cards and sentences say of it
    lines: list[tuple[Item, Line]]
    remarks: list[str] = field(default_factory=list)  # what was left out, in words


def points_of(items: Sequence[Item]) -> Points:
    """The data of all charts."""
    settings = items_by_setting(items)
    carried = _carried(items)
    curves = grouped(items, lambda item: item.curve)
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
    samples = sorted({item.row.sample for item in items})
    order = {s: round((k + 0.5) / len(samples) - 0.5, 4) for k, s in enumerate(samples)}
    grown = {key: _growth_kinds(curves[key]) for key in kept}
    return Points(
        settings=[_setting_record(s, some) for s, some in settings.items()],
        items=carried,
        points=[_point_record(i) | {"order": order[i.row.sample]} for i in carried],
        means=[mean for key in kept for mean in _mean_records(curves[key])],
        fits=[_fit(curves[key][0], *one) for key in kept for one in grown[key]],
        lines=_lines_of(curves, grown),
        remarks=remarks,
    )


def as_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Records with the same keys as columns, which take less room."""
    names = list(records[0]) if records else []
    return {name: [record[name] for record in records] for name in names}


def short(value: float | None, rounded: Rounding | None = None) -> float | None:
    """A number with five significant digits, which take less room; null if not finite.

    Ends of intervals are ``rounded`` outwards: `rounded_down` or `rounded_up`.

    >>> short(3.14159265), short(float("inf"))
    (3.1416, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return rounded(value, 5) if rounded else float(f"{value:.5g}")


def label(layer: int | None) -> str:
    """The label of a layer in legends."""
    return "model" if layer is None else str(layer)


# --- settings -------------------------------------------------------------------------------


def _setting_record(key: tuple[str, ...], items: Sequence[Item]) -> dict[str, Any]:
    """A setting with its layers, heads and the axes of all of its charts."""
    heads = {item.row.head for item in items if item.row.head is not None}
    drawn = [item for item in items if usable(item.row.sigma)]
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
            "all": _axes_by_kind([item for item in drawn if item.row.head is None]),
            "heads": _axes_by_kind([item for item in drawn if item.row.head is not None]),
        },
    }


def _axes_by_kind(items: Sequence[Item]) -> dict[str, Any]:
    """The axes of all rows, and those of rows on real inputs."""
    real = axes([item.row for item in items if item.kind == REAL])
    return {REAL: real, "every": axes([item.row for item in items])}


def axes(rows: Sequence[Measurement]) -> dict[str, Any] | None:
    """Domains and ticks of sigma against n, the same for every layer of a setting."""
    if not rows:
        return None
    lengths = sorted({row.num_tokens for row in rows})
    values = [v for r in rows for v in (r.sigma, r.upper, r.sigma_rest) if v and usable(v)]
    # An upper end that is far away (steps ran out) would flatten everything else.
    top = max(r.sigma for r in rows if r.sigma)
    low, high = min(values), min(max(values), 30 * top)
    pad = max(1.12, (high / low) ** 0.04)
    return axis_of_lengths(lengths) | axis(low / pad, high * pad)


def axis_of_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Ends and ticks of an axis of lengths, and the factor that a length may fill."""
    room = min([2.0, *(b / a for a, b in pairwise(lengths))]) ** 0.3
    x = [round(lengths[0] / room, 4), round(lengths[-1] * room, 4)]
    return {"x": x, "xticks": list(lengths), "room": round(room, 4)}


def axis_around(values: Iterable[float | None], pad: float) -> dict[str, Any] | None:
    """The axis of positive values, with room at both ends; None where there is none."""
    drawn = [value for value in values if value is not None and usable(value)]
    return axis(min(drawn) / pad, max(drawn) * pad) if drawn else None


def axis(low: float, high: float) -> dict[str, Any]:
    """Ends and ticks of a logarithmic axis."""
    return {"y": [short(low), short(high)], "yticks": tick_values(low, high)}


# --- points ---------------------------------------------------------------------------------


def _carried(items: Sequence[Item]) -> list[Item]:
    """All items, or the worst of every setting and an even sample of the rest."""
    if len(items) <= MAX_POINTS:
        return list(items)
    always: set[int] = set()
    places = grouped(range(len(items)), lambda k: items[k].setting)
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
    """All curves, or as many as fit: whole layers, then an even sample of the heads."""
    layers = _evenly([c for c in curves if c[-1] is None], MAX_CURVES)
    heads = _evenly([c for c in curves if c[-1] is not None], MAX_CURVES - len(layers))
    return [*layers, *heads]


def _curve_fields(item: Item) -> dict[str, Any]:
    """The curve of an item."""
    place = {"layer": label(item.row.layer), "head": item.row.head}
    return {"s": item.s, "kind": item.kind, "source": item.source, **place}


_NUMBERS = {
    "sigma": "sigma",
    "upper": "upper",
    "rest": "sigma_rest",
    "relative": "relative",
    "share": "top_share",
}


def row_record(row: Measurement) -> dict[str, Any]:
    """The fields of a row in points and cards."""
    numbers = {name: short(getattr(row, of), ENDS.get(of)) for name, of in _NUMBERS.items()}
    rank = short(stable_rank(row))
    return numbers | {"rank": rank, "sample": row.sample, "token": row.top_token}


def _point_record(item: Item) -> dict[str, Any]:
    row = item.row
    return {
        **_curve_fields(item),
        **row_record(row),
        "n": row.num_tokens,
        "radius": short(row.radius_max),
        "rms": short(row.radius_rms),
        "status": row.status,
        "note": row.error or (row.note if item.kind != REAL else None),
    }


_REST_ENDS = (("sigma", ""), ("low", "_low"), ("high", "_high"))


def _mean_records(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """One record for each length of a curve."""
    first = items[0]
    rows = (item.row for item in items if usable(item.row.sigma))
    for n, some in sorted(grouped(rows, lambda row: row.num_tokens).items()):
        shares = [row.top_share for row in some if row.top_share is not None]
        rests = [math.log(row.sigma_rest or 1.0) for row in some if usable(row.sigma_rest)]
        mean = mean_of_rows(some)
        rest = mean_of(((log, log) for log in rests), shared=mean["shared"]) if rests else {}
        trained = first.kind == REAL and not some[0].weights.startswith("random")
        yield {
            **_curve_fields(first),
            "n": n,
            **mean,
            # Whether the interval is that of a mean of independent windows
            "apart": len(some) > 2 and not mean["shared"],
            **{f"rest{end}": rest.get(of) for of, end in _REST_ENDS},
            "relative": short(geometric_mean(row.relative for row in some)),
            "radius": short(geometric_mean(row.radius_max for row in some)),
            "rank": short(geometric_mean(map(stable_rank, some))),
            "share": short(math.fsum(shares) / len(shares)) if shares else None,
            "trained": some[0].trained_length if trained else None,
        }


def mean_of(logs: Iterable[tuple[float, float]], *, shared: bool = False) -> dict[str, Any]:
    """Geometric mean of values between two ends, by their logarithms: see `enclosed_mean`.

    One value, and values of windows with ``shared`` text, have the solver's interval alone; several
    others also that of the sampling of text.
    """
    logs = list(logs)
    mean, low, high = map(exponential, enclosed_mean(logs, independent=not shared))
    ends = {"low": short(low, rounded_down), "high": short(high, rounded_up)}
    return {"sigma": short(mean), **ends, "count": len(logs), "shared": shared}


def mean_of_rows(rows: Sequence[Measurement]) -> dict[str, Any]:
    """`mean_of` rows; ``open`` where one of them has a lower end only."""
    shared = share_text(rows, paired=False)
    found = mean_of(map(log_ends, rows), shared=shared)
    return found | {"open": any(row.upper is None for row in rows)}


def exponential(value: float) -> float:
    """Products of many blocks may leave the range of numbers; then there is no value."""
    return math.exp(value) if value < 700 else math.inf


def log_ends(row: Measurement) -> tuple[float, float]:
    """``log sigma`` and ``log upper`` of a row with a positive sigma."""
    sigma = row.sigma or 1.0
    return math.log(sigma), math.log(max(row.upper or 0.0, sigma))


# --- exponents ------------------------------------------------------------------------------


def _growth_kinds(items: Sequence[Item]) -> list[tuple[str, Growth]]:
    """The growth of one curve: of sigma, and of sigma with the top token held fixed."""
    first = items[0]
    rows = [item.row for item in items]
    kinds: dict[str, Of] = {first.kind: "sigma"}
    if first.kind == REAL and any(row.sigma_rest for row in rows):
        kinds["rest"] = "sigma_rest"
    found = []
    for kind, of in kinds.items():
        # One window twice in a folder, measured otherwise: no curve.
        with contextlib.suppress(InputError):
            found.append((kind, growth(rows, paired=first.run.paired, of=of)))
    return [(kind, fit) for kind, fit in found if fit is not None]


def _fit(first: Item, kind: str, fit: Growth) -> dict[str, Any]:
    beyond = fit.beyond and f": {fit.beyond.verdict} from {fit.beyond.lengths[0]} tokens on"
    return {
        **_curve_fields(first),
        "kind": kind,
        **{name: short(getattr(fit, name)) for name in ("slope", "low", "high")},
        **{name: getattr(fit, name) for name in ("interval", "deviation", "nearly", "fits")},
        "lengths": list(fit.lengths),
        "local": [short(s) for s in fit.local],
        "samples": fit.num_samples,
        "note": fit.note and fit.note + (beyond or ""),
    }


def _lines_of(
    curves: Mapping[tuple[Any, ...], list[Item]],
    grown: Mapping[tuple[Any, ...], list[tuple[str, Growth]]],
) -> list[tuple[Item, Line]]:
    """Curves on real inputs at the largest length of their comparable curves."""
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
    """The fields that comparable curves share: all but layer and head."""
    return (*curve[:3], curve[-1] is None)


# --- checkpoints ----------------------------------------------------------------------------

_FAR = 50  # last step by first one, beyond which steps stand on a logarithmic axis
_PAD = 0.04  # of the axis, on both sides


@dataclass(frozen=True)
class Training:
    """Data of the chart of sigma against training step."""

    # Settings that differ in their step alone: name, places of the settings, steps, axes by length
    groups: list[dict[str, Any]] = field(default_factory=list)
    # Geometric mean of every layer (and head) at each length and step
    means: list[dict[str, Any]] = field(default_factory=list)
    # Step at which the axis turns from linear to logarithmic; None for a linear one
    turn: float | None = None
    remark: str | None = None  # what was left out, or None


def training_of(items: Sequence[Item], settings: Sequence[dict[str, Any]]) -> Training:
    """Checkpoints of one model, which differ in the last number of their name."""
    groups = _groups(settings)
    if not groups:
        return Training()
    place = {s: (g, settings[s]["step"]) for g, one in enumerate(groups) for s in one["settings"]}
    curves: dict[tuple[Any, ...], dict[int, list[Measurement]]] = {}
    for item in items:
        row, at = item.row, place.get(item.s)
        if at is not None and item.kind == REAL and usable(row.sigma):
            key = (at[0], item.source, row.num_tokens, label(row.layer), row.head)
            curves.setdefault(key, {}).setdefault(at[1], []).append(row)
    every = [step for _, step in place.values()]
    first = min((step for step in every if step > 0), default=1)
    turn = float(first) if max(every) > _FAR * first else None
    for g, group in enumerate(groups):
        group["axes"] = _training_axes(g, group["steps"], curves, turn)
    keys = layers_first(list(curves))
    remark = None
    if len(keys) < len(curves):
        remark = f"Steps are shown for {len(keys):,} of {len(curves):,} layers, heads and lengths."
    names = ("g", "source", "n", "layer", "head")
    means = [
        {**dict(zip(names, key, strict=True)), "step": step, **mean_of_rows(rows)}
        for key in keys
        for step, rows in sorted(curves[key].items())
    ]
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


def _training_axes(
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
    many = -(-len(steps) // 10)  # steps that are named, the last one among them
    ends = {"x": _padded(steps, turn), "xticks": list(steps)[::-1][::many][::-1]}
    for (kind, n), rows in parts.items():
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
