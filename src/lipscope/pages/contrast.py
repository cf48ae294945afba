"""Comparison of two runs: shared settings, differences, and significant changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lipscope.display import rounded_down, rounded_up
from lipscope.errors import InputError
from lipscope.pages.points import (
    REAL,
    Item,
    as_columns,
    axis,
    axis_of_lengths,
    folder_names,
    items_of,
    label,
    log_ends,
    short,
)
from lipscope.records import (
    CONFIDENCE,
    Ends,
    Growth,
    Measurement,
    Run,
    enclosed_mean,
    growth,
    holm,
    paired_shift,
    share_text,
    usable,
    welch_shift,
)

Cell = tuple[int | None, int | None, int]  # layer, head, number of tokens
PAIRED, APART = "the same windows", "two samples"
_Window = TypeVar("_Window")
_DEPENDENT = "windows share text, so they are not independent"


class _Folder(NamedTuple):
    """One folder's windows of a layer or head, those that have every length."""

    # By what their windows are, rows in order of length
    passages: dict[tuple[str, ...], list[Measurement]]
    fit: Growth | None  # the fitted growth; None where there is none
    why: str  # why nothing is compared, or ""


def exponent_rows(
    cells: Sequence[Cell],
    mine: Mapping[Cell, Sequence[Measurement]],
    other: Mapping[Cell, Sequence[Measurement]],
    quantity: str,
    spread: Sequence[bool],
) -> list[dict[str, Any]]:
    """Differences of the exponents of two folders, layer by layer.

    Every passage has an exponent of its own, the least-squares slope of its logarithms over the
    lengths that both folders have; longer ones than a model was trained on are left out. Passages
    that are the same in both at every length are compared in pairs, others as two samples. Holds
    for nearly normal slopes of passages that share no text. The interval includes the solver's
    uncertainty. Where no power law fits, nothing is compared.
    """
    found = []
    for layer, head in dict.fromkeys((cell[0], cell[1]) for cell in cells):
        sides = [
            [r for c in cells if c[:2] == (layer, head) for r in some[c]] for some in (mine, other)
        ]
        trained = [r.trained_length for rows in sides for r in rows if r.trained_length]
        lengths = sorted({c[2] for c in cells if c[:2] == (layer, head)})
        lengths = [n for n in lengths if n <= min(trained, default=n)]
        if len(lengths) >= 3:
            pairs = zip(sides, spread, strict=True)
            both = [_folder_of(rows, lengths, quantity, one) for rows, one in pairs]
            about = {"layer": label(layer), "head": head, "n": f"{lengths[0]} to {lengths[-1]}"}
            found.append(about | _exponent_row(both, lengths, quantity))
    _tested(found)
    return found


def _tested(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a test, and the result of Holm's procedure on all of them."""
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row |= {"holm": short(p), "changed": p <= 1 - CONFIDENCE, "p": short(row["p"])}
    return tested


def _tested_shift(
    a: Ends, b: Ends, why: str, *, shared: bool
) -> tuple[tuple[float | None, ...], dict[str, Any]]:
    """Mean and interval of a shift, if there is one, and the test fields of its row."""
    if not why and min(len(a), len(b)) < 2:
        why = "too few windows: an interval takes two" + " of each" * (not shared)
    shift = None if why else (paired_shift if shared else welch_shift)(a, b)
    return (None, None, None) if shift is None else shift[:3], {
        "p": None if shift is None else shift.p,
        "holm": None,
        "changed": False,
        "how": PAIRED if shared else APART,
        "count": f"{len(a)}" if shared else f"{len(a)} and {len(b)}",
        "why": why,
    }


def _enclosed(value: str, low: str, high: str, ends: Iterable[float | None]) -> dict[str, Any]:
    """A value and its ends, rounded outwards, under these names."""
    rounded = {value: None, low: rounded_down, high: rounded_up}
    pairs = zip(rounded.items(), ends, strict=True)
    return {name: short(end, way) for (name, way), end in pairs}


def _folder_of(
    rows: Sequence[Measurement], lengths: Sequence[int], quantity: str, spread: bool
) -> _Folder:
    """The windows of one folder, and how they grow."""
    windows: dict[int, dict[int, Measurement]] = {}
    for row in rows:
        if row.num_tokens in lengths and _log(quantity, row) is not None:
            windows.setdefault(row.sample, {})[row.num_tokens] = row
    whole = {k: [one[n] for n in lengths] for k, one in windows.items() if len(one) == len(lengths)}
    used = [row for some in whole.values() for row in some]
    passages = {tuple(r.tokens_sha256 or str(k) for r in some): some for k, some in whole.items()}
    try:
        logs = [_log(quantity, row) or (0.0, 0.0) for row in used]
        values = [replace(row, sigma=math.exp(at)) for row, (at, _) in zip(used, logs, strict=True)]
        fit = growth(values, paired=spread)
    except InputError:
        return _Folder(passages, None, "rows of several models, texts or seeds")
    if fit is None:
        return _Folder(passages, None, "no window has every length")
    if share_text(used, paired=spread):
        return _Folder(passages, fit, _DEPENDENT)
    return _Folder(passages, fit, "no power law" if fit.fits is False else "")


def _exponent_row(
    sides: Sequence[_Folder], lengths: Sequence[int], quantity: str
) -> dict[str, Any]:
    a, b = sides
    shared = _in_both(a.passages, b.passages)
    keys = (shared, shared) if shared else (list(a.passages), list(b.passages))
    slopes = [
        [_passage_slope(side.passages[k], lengths, quantity) for k in some]
        for side, some in zip(sides, keys, strict=True)
    ]
    named = zip(("first", "second"), sides, strict=True)
    why = next((f"{side.why} in the {name} folder" for name, side in named if side.why), "")
    ends, tested = _tested_shift(slopes[0], slopes[1], why, shared=bool(shared))
    fits = {name: s.fit and short(s.fit.slope) for name, s in zip("ab", sides, strict=True)}
    return fits | _enclosed("difference", "low", "high", ends) | tested


def _passage_slope(
    rows: Sequence[Measurement], lengths: Sequence[int], quantity: str
) -> tuple[float, float]:
    """Ends of the exponent of one passage."""
    x = np.log(lengths) - np.log(lengths).mean()
    weights = x / (x @ x)
    low, high = np.array([_log(quantity, row) for row in rows], dtype=float).T
    up = weights > 0
    return float(weights @ np.where(up, low, high)), float(weights @ np.where(up, high, low))


def exponent_sentences(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on changed exponents and the basis of their intervals; "" without rows."""
    tested = [row for row in rows if row["p"] is not None]
    if not rows:
        return ""
    if not tested:
        return f"No exponents are compared: {rows[0]['why']}."
    changed = [row for row in tested if row["changed"]]
    up = sum(row["difference"] > 0 for row in changed)
    text = f"Of {len(tested)} exponents with an interval, over {tested[0]['n']} tokens, "
    text += (
        f"{len(changed)} changed beyond the sampling of text: {up} larger in the second folder, "
        f"{len(changed) - up} smaller."
        if changed
        else "none changed beyond the sampling of text."
    )
    if changed:
        most = max(changed, key=lambda row: abs(row["difference"]))
        head = "" if most["head"] is None else f", head {most['head']}"
        ends = ", ".join(f"{most[name]:+.2g}" for name in ("low", "high"))
        text += f" Most at layer {most['layer']}{head}: {most['difference']:+.2g} in [{ends}]."
    if left := len(rows) - len(tested):
        text += f" {left} more have none; the table says why."
    text += " Every passage has its own exponent; intervals as above, for nearly normal exponents."
    return text


QUANTITIES = ("sigma", "relative", "sigma without the top token")
_DIFFER = ("model", "revision", "weights", "step", "dtype", "seed", "version")


class SharedSetting(NamedTuple):
    """The setting that a row of both runs shares, besides its layer, head and length."""

    map: str
    metric: str
    move: str
    read: str
    side: str
    heads: bool
    model: str
    text: str


@dataclass(frozen=True)
class Contrast:
    """Two runs side by side."""

    names: tuple[str, str]  # of the two folders
    # What tells them apart: name, value of the first, value of the second
    differ: list[tuple[str, str, str]]
    # What was compared, a record for each place and quantity with its ``rows``
    tables: list[dict[str, Any]]
    remarks: list[str] = field(default_factory=list)  # what only one of them has, in words

    def as_plain(self) -> dict[str, Any]:
        """As the scripts of the page read it."""
        tables = [
            table | {name: as_columns(table[name]) for name in ("rows", "exponents")}
            for table in self.tables
        ]
        return vars(self) | {"tables": tables}


def contrast_of(runs: Sequence[Run]) -> Contrast:
    """Compare the rows of two folders at given inputs, layer by layer and length by length.

    A row of the table is a layer (or head) at one length. Where both folders hold the same windows
    of tokens, ratios are taken window by window (`paired_shift` of logarithms); else the windows
    are two independent samples (`welch_shift`). Both hold for nearly normal logarithms of windows
    that share no text. The interval includes the solver's uncertainty.

    Raises:
        InputError: If there are not two, or they share nothing that can be compared.
    """
    if len(runs) != 2 or len({run.path.resolve() for run in runs}) != 2:
        found = ", ".join(f"`{run.path}`" for run in runs)
        raise InputError(f"`compare` should have two different run folders. Found {found}.")
    by_path = folder_names(runs)
    names = (by_path[str(runs[0].path)], by_path[str(runs[1].path)])
    every = [items_of([run]) for run in runs]
    items = [[i for i in some if i.kind == REAL and usable(i.row.sigma)] for some in every]
    cells = [_rows_by_cell(some, other) for some, other in (items, items[::-1])]
    shared = [place for place in cells[0] if place in cells[1]]
    both = {place: [k for k in cells[0][place] if k in cells[1][place]] for place in shared}
    if not any(both.values()):
        raise InputError(_nothing(names, items))
    spread = [run.paired for run in runs]
    tables = [
        _contrast_table(place, quantity, places, cells[0][place], cells[1][place], spread)
        for place, places in both.items()
        for quantity in QUANTITIES
    ]
    tables = [table for table in tables if table is not None]
    return Contrast(names, _differences(runs, items), tables, _unshared(names, every, cells))


# --- what is compared with what --------------------------------------------------------------

_Cells = dict[SharedSetting, dict[Cell, list[Measurement]]]


def _subject(item: Item) -> tuple[str, str]:
    return item.setting[0], item.setting[-1]


def _rows_by_cell(items: Iterable[Item], others: Iterable[Item]) -> _Cells:
    """Rows by place and cell. One model (or text) on each side is the same place whatever it is."""
    items, others = list(items), list(others)
    several = [
        max(len({_subject(i)[k] for i in some}) for some in (items, others)) > 1 for k in (0, 1)
    ]
    found: _Cells = {}
    for item in items:
        row, subject = item.row, _subject(item)
        model, text = (one if more else "" for one, more in zip(subject, several, strict=True))
        heads = row.head is not None
        place = SharedSetting(row.map, row.metric, row.move, row.read, row.side, heads, model, text)
        cell = (row.layer, row.head, row.num_tokens)
        found.setdefault(place, {}).setdefault(cell, []).append(row)
    return found


_ASPECTS: dict[str, Callable[[Item], Any]] = {
    "model": lambda i: _subject(i)[0],
    "map": lambda i: i.row.map,
    "metric": lambda i: i.row.metric,
    "moved tokens": lambda i: i.row.move,
    "read tokens": lambda i: i.row.read,
    "layer": lambda i: label(i.row.layer),
    "length": lambda i: i.row.num_tokens,
    "text": lambda i: _subject(i)[1] or "not named",
}


def _nothing(names: tuple[str, str], items: Sequence[Sequence[Item]]) -> str:
    """The reason why nothing can be compared: the first field without a shared value."""
    wanted = "`compare` should have two folders that share a map, metric, layer and length."
    for name, some in zip(names, items, strict=True):
        if not some:
            return f"{wanted} Found no row with a positive sigma on a given input in `{name}`."
    for aspect, of in _ASPECTS.items():
        mine, other = ({*map(of, some)} for some in items)
        alone = aspect in ("model", "text") and len(mine) == len(other) == 1
        if not mine & other and not alone:
            return (
                f"{wanted} Found the {aspect} {_few(mine)} in `{names[0]}` and {_few(other)} in "
                f"`{names[1]}`."
            )
    return f"{wanted} Found none together in `{names[0]}` and `{names[1]}`."


def _few(values: Iterable[Any]) -> str:
    some = sorted(values, key=lambda v: (isinstance(v, str), v))
    return ", ".join(map(str, some[:4])) + (f" and {len(some) - 4} more" if len(some) > 4 else "")


def _differences(
    runs: Sequence[Run], items: Sequence[Sequence[Item]]
) -> list[tuple[str, str, str]]:
    words: dict[str, Callable[[Item], Any]] = {
        name: lambda i, name=name: getattr(i.row, name) or "–" for name in _DIFFER
    }
    words["text"] = _ASPECTS["text"]
    mine, other = items
    found = [
        (name, _few({str(of(i)) for i in mine}), _few({str(of(i)) for i in other}))
        for name, of in words.items()
    ]
    first, second = ("spread" if run.paired else "disjoint" for run in runs)
    found.append(("windows", first, second))
    return [one for one in found if one[1] != one[2]]


def _unshared(
    names: tuple[str, str], items: Sequence[Sequence[Item]], cells: Sequence[_Cells]
) -> list[str]:
    """Sentences on rows in one folder only, and on rows without an interval."""
    lines = []
    for k, name in enumerate(names):
        mine, other = cells[k], cells[1 - k]
        count = sum(c not in other.get(place, {}) for place, some in mine.items() for c in some)
        if count:
            what = "layer, head or length" if count == 1 else "layers, heads or lengths"
            lines.append(f"{count:,} {what} only in {name}.")
    built = sum(i.kind != REAL for some in items for i in some)
    if built:
        lines.append(f"{built:,} rows at built inputs are no sample of a text, and not compared.")
    return lines


# --- a table ---------------------------------------------------------------------------------


def _log(quantity: str, row: Measurement) -> tuple[float, float] | None:
    """Ends of the logarithm of a quantity; None where the row has none."""
    sigma, upper = log_ends(row)
    if quantity == "sigma":
        return sigma, upper
    value = row.relative if quantity == "relative" else row.sigma_rest
    if value is None or not usable(value):
        return None
    at = math.log(value)
    return (at, at + upper - sigma) if quantity == "relative" else (at, at)


def _contrast_table(
    place: SharedSetting,
    quantity: str,
    cells: Sequence[Cell],
    mine: Mapping[Cell, Sequence[Measurement]],
    other: Mapping[Cell, Sequence[Measurement]],
    spread: Sequence[bool],
) -> dict[str, Any] | None:
    order = sorted(cells, key=lambda cell: [-1 if k is None else k for k in cell])
    rows = (_ratio_row(quantity, cell, mine[cell], other[cell]) for cell in order)
    rows = [row for row in rows if row is not None]
    if not rows:
        return None
    tested = _tested(rows)
    axes = {"axes": _sides_axes(rows), "ratios": _ratio_axis(rows)}
    said = _contrast_sentences(rows, tested, quantity)
    exponents = exponent_rows(cells, mine, other, quantity, spread)
    return (
        place._asdict()
        | {"quantity": quantity, "rows": rows, "said": said}
        | {"exponents": exponents, "exponents_said": exponent_sentences(exponents)}
        | axes
    )


def _ratio_row(
    quantity: str, cell: Cell, mine: Sequence[Measurement], other: Sequence[Measurement]
) -> dict[str, Any] | None:
    """One layer or head at one length: both means, their ratio, and whether that is sampling."""
    mine, other, shared = _matched(mine, other)
    logs = [[_log(quantity, row) for row in some] for some in (mine, other)]
    if shared:  # a window without a value drops out on both sides
        pairs = [p for p in zip(*logs, strict=True) if None not in p]
        logs = [[p[k] for p in pairs] for k in (0, 1)]
    a, b = ([one for one in some if one is not None] for some in logs)
    if not a or not b:
        return None
    dependent = any(share_text(some, paired=False) for some in (mine, other))
    of = partial(enclosed_mean, independent=not dependent)
    ends, tested = _tested_shift(a, b, _DEPENDENT * dependent, shared=shared)
    means = [
        _enclosed(side, f"{side}_low", f"{side}_high", map(math.exp, mean))
        for side, mean in (("a", of(a)), ("b", of(b)))
    ]
    if ends[0] is None:
        before, after = (sum(one for one, _ in some) / len(some) for some in (a, b))
        ends = (after - before, None, None)
    ratio = (None if end is None else math.exp(end) for end in ends)
    place = {"layer": label(cell[0]), "head": cell[1], "n": cell[2]}
    return place | means[0] | means[1] | _enclosed("ratio", "low", "high", ratio) | tested


def _matched(
    mine: Sequence[Measurement], other: Sequence[Measurement]
) -> tuple[list[Measurement], list[Measurement], bool]:
    """Rows of the same windows in the same order; all rows where they are two samples."""
    one, two = ({row.tokens_sha256: row for row in some} for some in (mine, other))
    shared = _in_both(one, two)
    if not shared:
        return list(mine), list(other), False
    return [one[window] for window in shared], [two[window] for window in shared], True


def _in_both(one: Collection[_Window], two: Collection[_Window]) -> list[_Window]:
    """Windows in both, if they are most of the smaller sample; else none: two samples."""
    shared = [window for window in one if window and window in two]
    return shared if 2 * len(shared) > min(len(one), len(two)) else []


def _sides_axes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One pair of axes for both folders, whichever layer is shown."""
    lengths = sorted({row["n"] for row in rows})
    names = [f"{side}{end}" for side in "ab" for end in ("", "_low", "_high")]
    means = [row[side] for row in rows for side in "ab"]
    values = [row[name] for row in rows for name in names]
    # The interval of two windows can be so wide that it would flatten everything else.
    low, high = max(min(values), min(means) / 10), min(max(values), 10 * max(means))
    return axis_of_lengths(lengths) | axis(low / 1.12, high * 1.12)


def _ratio_axis(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One axis for all ratios, with 1 on it."""
    ratios = [row["ratio"] for row in rows] + [1.0]
    ends = [row[end] for row in rows for end in ("low", "high") if row[end]] + ratios
    return axis(max(min(ends), min(ratios) / 4) / 1.05, min(max(ends), 4 * max(ratios)) * 1.05)


def _contrast_sentences(
    rows: Sequence[Mapping[str, Any]], tested: Sequence[Mapping[str, Any]], quantity: str
) -> str:
    """Sentences on changed rows and the basis of their intervals."""
    changed = [row for row in tested if row["changed"]]
    up = sum(row["ratio"] > 1 for row in changed)
    text = (
        f"Of {len(tested)} rows with an interval, {quantity} changed beyond the sampling of text "
    )
    text += (
        f"in {len(changed)}: it is larger in the second folder in {up}, smaller in "
        f"{len(changed) - up}."
        if changed
        else "in none."
    )
    if not tested:
        text = f"No row has an interval: {rows[0]['why']}."
    elif changed:
        most = max(changed, key=lambda row: abs(math.log(row["ratio"])))
        head = "" if most["head"] is None else f", head {most['head']}"
        text += (
            f" Most at layer {most['layer']}{head}, {most['n']} tokens: × {most['ratio']:.3g} "
            f"(× {most['low']:.3g} to × {most['high']:.3g})."
        )
    hows = {row["how"] for row in rows}
    if PAIRED in hows:
        text += (
            " Both folders hold the same windows: ratios are taken window by window, with Student "
            "intervals (95 %, each alone) for nearly normal logarithms of independent windows."
        )
    if APART in hows:
        text += (
            " Where the folders share few windows or none, they are taken as two independent "
            "samples, with Welch intervals (95 %, each alone) for nearly normal logarithms."
        )
    if tested:
        text += (
            f" Changed: Holm's procedure over the {len(tested)} rows of this table; with "
            "probability at least 95 % it names no row that did not change."
        )
    if quantity == QUANTITIES[-1]:
        return text + " Its intervals leave out the solver's uncertainty: it has no upper end."
    return text + " Every interval includes the solver's uncertainty."
