"""Sections of the report: sigma through depth, gains, edits, bounds, readings of monitors."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from lipscope.charts import MAPS, WAYS, spread, visible
from lipscope.display import ENDS, rounded_down, rounded_up
from lipscope.pages.points import (
    REAL,
    Item,
    axis,
    axis_around,
    exponential,
    folder_names,
    label,
    log_ends,
    mean_of,
    mean_of_rows,
    short,
)
from lipscope.records import (
    ADVERSARIAL,
    ALERTS,
    EDITS,
    GAINS,
    MEASURED,
    RADII,
    READINGS,
    Bound,
    Comparison,
    Measurement,
    Run,
    TextEdit,
    TokenGain,
    enclosed_mean,
    given,
    grouped,
    looseness,
    share_interval,
    share_text,
    summed,
    usable,
)

Kind = TypeVar("Kind")
_SAME = 1e-4  # norms of one tensor that two rows tell, each summed in its own order
_NORMS = ("frobenius", "max-token", "infinity")
"""Metrics in which input and output are measured alike, so that constants multiply."""


def depths_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """One record for each model, metric, text, folder and length with a map of its layers.

    The product of the blocks' constants bounds the map from the entrance of the first one to the
    end of the last, ``σ(B_k ∘ … ∘ B_0) <= σ(B_k) … σ(B_0)``, where each block reads what the one
    before it returns, all tokens move and all are read, and one norm measures input and output. It
    is taken window by window, and only where the rows show this: layers from 0 on without a gap,
    and each ``input_norm`` equal to the previous ``output_norm``.
    """
    whole = [i for i in items if i.kind == REAL and i.row.head is None and usable(i.row.sigma)]
    found = grouped(whole, lambda i: ((i.setting[0], *i.setting[2:]), i.row.num_tokens))
    return [
        _depth_record(setting, source, n, [i for i in some if i.source in (None, source)])
        for (setting, n), some in sorted(found.items(), key=lambda one: one[0][1])
        for source in dict.fromkeys(i.source for i in some if i.source) or [None]
    ]


def _depth_record(
    setting: tuple[str, ...], source: str | None, n: int, items: Sequence[Item]
) -> dict[str, Any]:
    maps: dict[str, dict[int | None, list[Measurement]]] = {}
    for item in items:
        maps.setdefault(item.row.map, {}).setdefault(item.row.layer, []).append(item.row)
    whole = maps.pop("model", {}).get(None, [])

    def means_of(name: str) -> list[dict[str, Any]]:
        return [
            {"map": name, "layer": layer, "n": n} | mean_of_rows(rows)
            for layer, rows in sorted(maps.get(name, {}).items(), key=lambda one: one[0] or 0)
        ]

    lines = [mean for name in MAPS for mean in means_of(name)]
    blocks = maps.get("block", {})
    windows, why = _products(blocks, setting[1:4])
    below = any(row.upper is None for rows in blocks.values() for row in rows)
    shared = share_text(blocks.get(0, ()), paired=False)
    products = [
        {"map": "product", "layer": k, "n": n, "open": below}
        | mean_of((chain[k] for chain in windows.values()), shared=shared)
        for k in range(len(blocks) if windows else 0)
    ]
    products += means_of("stack")
    means = [{"map": "model", "n": n} | mean_of_rows(whole)] if whole else []
    return {
        **dict(zip(("model", "metric", "move", "read", "text"), setting, strict=True)),
        "source": source,
        "n": n,
        "lines": lines,
        "whole": means,
        "products": products,
        "axes": {
            name: axis_around((m[end] for m in some for end in ("sigma", "low", "high")), 1.15)
            for name, some in (("layers", [*lines, *means]), ("products", [*products, *means]))
        },
        "said": " ".join(_product_sentences(n, windows, why, maps, whole)),
    }


_Chain = list[tuple[float, float]]  # logarithm of the product up to each block: its two ends


def _products(
    blocks: Mapping[int | None, Sequence[Measurement]], how: Sequence[str]
) -> tuple[dict[str, _Chain], str]:
    """For each window the products up to every block, or the reason why there are none."""
    metric, move, read = how
    depth = len(blocks)
    if depth < 2:
        return {}, ""
    if metric not in _NORMS or (move, read) != ("all", "all"):
        return {}, "constants multiply only where all tokens move and are read in one norm"
    if set(blocks) != set(range(depth)):
        layers = sorted(-1 if layer is None else layer for layer in blocks)
        return {}, f"layers are missing: found {', '.join(map(str, layers))}"
    by_window = [{row.tokens_sha256: row for row in blocks[k]} for k in range(depth)]
    found = {}
    for window in by_window[0]:
        rows = [some[window] for some in by_window if window in some]
        if len(rows) == depth:
            if not all(_norms_agree(a.output_norm, b.input_norm) for a, b in pairwise(rows)):
                return {}, "a block does not read what the one before it gives"
            ends = zip(*map(log_ends, rows), strict=True)
            found[window] = list(zip(*map(accumulate, ends), strict=True))
    return found, "" if found else "no window was measured at every layer"


def _norms_agree(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=_SAME)


def _product_sentences(
    n: int,
    windows: Mapping[str, _Chain],
    why: str,
    maps: Mapping[str, Mapping[int | None, Sequence[Measurement]]],
    whole: Sequence[Measurement],
) -> Iterator[str]:
    """Sentences on the product, and its ratio to sigma of the stack and of the model."""
    if not windows:
        if why:
            yield f"No product of the blocks: {why}."
        return
    blocks, last = maps["block"], len(maps["block"]) - 1
    yield (
        f"Product: of the sigmas of blocks 0 to {last}, window by window. Each block reads what "
        "the one before it gives (their norms agree), so up to the solver's intervals the product "
        "is above sigma of all these blocks together."
    )
    first = {row.tokens_sha256: row for row in blocks[0]}
    ends = {row.tokens_sha256: row for row in blocks[last]}
    for name, rows in (
        ("these blocks together (map stack)", maps.get("stack", {}).get(last, ())),
        ("the model's map", whole),
    ):
        both = [
            row
            for row in rows
            if row.tokens_sha256 in windows
            and _norms_agree(row.input_norm, first[row.tokens_sha256].input_norm)
        ]
        if both:
            pairs = [(windows[row.tokens_sha256][-1], log_ends(row)) for row in both]
            yield _times_above(n, name, pairs, shared=share_text(both, paired=False))
        if any(
            not _norms_agree(row.output_norm, ends[row.tokens_sha256].output_norm) for row in both
        ):
            yield (
                f"{name[0].upper()}{name[1:]} goes on after the last of them (a final norm, or "
                "blocks that were not measured), which the product leaves out."
            )
    if not whole:
        yield "The model's map was not measured: lipscope measure … --map model does."


def _times_above(
    n: int, name: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, shared: bool
) -> str:
    """Ratio of the product to sigma of a map, on the same windows."""
    middle = sum(product[0] - map_[0] for product, map_ in pairs) / len(pairs)
    logs = [(low - upper, high - sigma) for (low, high), (sigma, upper) in pairs]
    _, *ends = enclosed_mean(logs, independent=not shared)
    ways = (lambda v, digits: float(f"{v:.{digits}g}"), rounded_down, rounded_up)
    values = zip(ways, map(exponential, (middle, *ends)), strict=True)
    ratio, low, high = (f"{rounded(value, 3):,g}" for rounded, value in values)
    of = f"geometric mean of {len(pairs)} windows{' that share text' if shared else ', 95 %'}:"
    of = of if len(pairs) > 1 else "one window:"
    return f"At {n} tokens it is {ratio} times sigma of {name} ({of} {low} to {high})."


# --- gains ----------------------------------------------------------------------------------------

MAX_TOKENS = 20_000  # with gains, that a page carries


def gains_of(runs: Sequence[Run], settings: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """One record for each window and layer whose tokens were split."""
    found: dict[str, dict[int, TokenGain]] = {}
    for _, one in _value_records(runs, GAINS, TokenGain, settings):
        found.setdefault(one.id, {})[one.index] = one
    records, room = [], MAX_TOKENS
    for row_id, tokens in found.items():
        room -= len(tokens)
        if room >= 0:
            s, layer = settings[row_id]
            some = [tokens[index] for index in sorted(tokens)]
            about = {"s": s, "layer": layer, "sample": some[0].sample, "n": len(some)}
            gains = [gain for one in some for gain in _gain_records(one)]
            ends = (end for one in some for way in WAYS for end in _gain(one, way))
            records.append(about | {"tokens": gains, "axes": axis_around(ends, 1.1)})
    return records


def _value_records(
    runs: Sequence[Run], part: str, kind: type[Kind], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Kind]]:
    """Records of a part of the values, by their keys, without those of other versions."""
    names = {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    for run in runs:
        for key, content in run.contents(part).items():
            if content.keys() == names and content["id"] in settings:
                yield key, kind(**content)


def _gain_records(one: TokenGain) -> Iterator[dict[str, Any]]:
    for way in WAYS:
        gain, upper = _gain(one, way)
        yield {
            "index": one.index,
            "text": visible(one.text),
            "way": way,
            "gain": short(gain, rounded_down),
            "upper": short(upper, rounded_up),
            "better": way == "split" and one.better_split,
        }


def _gain(one: TokenGain, way: str) -> tuple[float | None, float | None]:
    return getattr(one, way), getattr(one, f"{way}_upper")


# --- decisions ------------------------------------------------------------------------------------


def decided_of(
    runs: Sequence[Run], settings: Mapping[str, tuple[int, str]]
) -> list[dict[str, Any]]:
    """One record for each decision whose tokens were certified one by one, or all together."""
    every = (one for run in runs for one in run.contents(RADII).values())
    known = [one for one in every if one.get("id") in settings]
    found = grouped(known, lambda one: tuple(one.get(name) for name in _DECISION))
    lengths = dict(pair for run in runs for pair in run.rows.select("id", "num_tokens").iter_rows())
    return [
        {"n": lengths[str(id)]} | _decision_record(settings[str(id)][0], some)
        for (id, _), some in found.items()
    ]


_DECISION = ("id", "question")
_WIDER = ("token", "joint", "each")  # of one radius, each ball lies in the next


def _decision_record(s: int, some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, least = some[0], min(some, key=lambda one: one["margin"])
    alone = sorted((one for one in some if one["ball"] == "token"), key=lambda one: one["tokens"])
    return {
        "s": s,
        "sample": first["sample"],
        "place": _decided_place(first),
        "by": first["by"],
        "decision": first["decision_name"],
        "rival": least["rival_name"],
        "margin": short(least["margin"]),
        "tokens": [
            {
                "index": one["tokens"][0],
                "text": visible(one["words"][0]),
                "rival": visible(one["rival_name"]),
                **_ball_record(one, some),
            }
            for one in alone
        ],
        "balls": [
            {"ball": one["ball"], "count": len(one["tokens"]), **_ball_record(one, some)}
            for one in some
            if one["ball"] != "token"
        ],
        "stopped": any(one["stopped"] for one in some),
    }


def _decided_place(one: Mapping[str, Any]) -> str:
    """Which part decides, in words; "" for the whole model."""
    if one.get("map") == "attention":
        return f"layer {one['at_layer']}"
    return f"from the input of layer {one['at_layer']} on" if one["at_layer"] else ""


def _ball_record(one: Mapping[str, Any], some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Its radius is the largest of all balls that hold this one: what is certified there holds."""
    place, tokens = _WIDER.index(one["ball"]), {*one["tokens"]}
    wider = [o for o in some if _WIDER.index(o["ball"]) >= place and tokens.issubset(o["tokens"])]
    radius = max(o["radius"] for o in wider)
    return {
        "words": one["words_within"] if radius == one["radius"] else None,
        "radius": short(rounded_down(radius)),
        "attack": short(one["attack"]),
    }


# --- edits ----------------------------------------------------------------------------------------

MAX_EDITS = 500  # windows and recipes whose texts a page carries
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def edits_of(runs: Sequence[Run], settings: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """One record for each setting, layer, target and folder with edits."""
    names, found = folder_names(runs), dict[tuple[Any, ...], dict[str, list[TextEdit]]]()
    for run in runs:
        for _, one in _value_records([run], EDITS, TextEdit, settings):
            place = (*settings[one.id], one.target, one.num_tokens, one.decision is not None)
            found.setdefault(place, {}).setdefault(names[str(run.path)], []).append(one)
    return [
        _edits_record(place, some) | {"source": name if len(by_folder) > 1 else None}
        for place, by_folder in found.items()
        for name, some in by_folder.items()
    ]


def _edits_record(place: tuple[Any, ...], edits: Sequence[TextEdit]) -> dict[str, Any]:
    s, layer, target, num_tokens, decided = place
    recipes = dict.fromkeys(one.recipe for one in edits)
    change = "change_layer" if target == "layer" else "change_model"
    largest = sorted(edits, key=lambda one: -(getattr(one, change) or -1.0))
    return {
        "s": s,
        "layer": layer,
        "target": target,
        "n": num_tokens,
        "decided": decided,
        "summary": [_summary(r, [e for e in edits if e.recipe == r]) for r in recipes],
        "edits": [_edit_record(one) for one in largest[:MAX_EDITS]],
        "count": len(edits),
    }


def _summary(recipe: str, edits: Sequence[TextEdit]) -> dict[str, Any]:
    """Counts and means, and the 95 % interval of the rate, if windows share no text."""
    found = summed(recipe, edits)
    tried = found.originals - found.skipped
    apart = tried and not share_text(edits, paired=False)
    ends = share_interval(found.succeeded, tried) if apart else (None, None)
    rate = {"rate": found.rate, "low": ends[0], "high": ends[1]}
    return _short(vars(found) | rate)


def _edit_record(one: TextEdit) -> dict[str, Any]:
    names = ("sample", "recipe", "status", "edits", "queries", "decision", "decided")
    numbers = ("change_layer", "change_model", "predicted")
    return {
        **{name: getattr(one, name) for name in names},
        **{name: short(getattr(one, name)) for name in numbers},
        "pieces": _pieces(one.before, one.after) if one.after else [["", one.before]],
    }


def _pieces(before: str, after: str) -> list[list[str]]:
    """The text in pieces: kept (""), taken out ("-") and put in ("+")."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    pieces: list[list[str]] = []
    for what, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            pieces.append(["", "".join(old[a:b])])
        else:
            pieces += [[sign, "".join(some)] for sign, some in (("-", old[a:b]), ("+", new[c:d]))]
    return [piece for piece in pieces if piece[1]]


# --- bounds ---------------------------------------------------------------------------------------

_HEIGHT, _LABEL = 360, 14  # of the chart, and of one name beside it, in pixels


def bounds_of(of: Comparison) -> dict[str, Any]:
    """Bounds of one layer or head in one metric: lines, their names, and a table."""
    lines, left_out = of.curves()
    rows = [*of.rows, *(row for row, _ in of.bounds)]
    last = max(row.num_tokens for row in rows)
    sample = next(row.sample for row in rows if row.num_tokens == last)
    points = [
        {"name": line.name, "group": line.group, "n": n, "value": value, "upper": upper}
        for line in lines
        for n, value, upper in line.points
    ]

    def shown(row: Measurement) -> bool:
        return (row.num_tokens, row.sample) == (last, sample)

    return {
        **{name: getattr(of, name) for name in ("model", "map", "metric", "head", "allowed")},
        "layer": str(of.layer),
        "n": last,
        "sample": sample,
        "measured": bool(of.real),
        "lines": [_rounded_point(point) for point in points],
        "out": left_out,
        "table": [
            *(_sigma_line(row) for row in of.rows if shown(row)),
            *(_bound_line(row, bound) for row, bound in of.bounds if shown(row)),
        ],
        **_bounds_axes(points),
    }


def _bounds_axes(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The axes of the lines, and names beside their ends that do not cover each other."""
    if not points:
        return {"axes": None, "names": []}
    lengths = sorted({p["n"] for p in points})
    low = min(p["value"] for p in points) / 1.3
    high = max(max(p["value"], p["upper"]) for p in points) * 1.3
    ends = {p["name"]: p for p in points}  # the last length of each
    gap = (high / low) ** (_LABEL / _HEIGHT)
    places = spread([p["value"] for p in ends.values()], gap)
    names = [
        {"name": p["name"], "group": p["group"], "n": p["n"], "value": place}
        for p, place in zip(ends.values(), places, strict=True)
    ]
    low, high = min([low, *places]), max([high, *places])
    x = [round(lengths[0] / 1.12, 4), round(lengths[-1] * 1.02, 4)]
    axes = {"x": x, "xticks": lengths} | axis(low, high)
    return {"axes": axes, "names": [_short(name) for name in names]}


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: short(v, ENDS.get(k)) if isinstance(v, float) else v for k, v in record.items()}


def _rounded_point(point: Mapping[str, Any]) -> dict[str, Any]:
    below, upper = point["group"] in (MEASURED, ADVERSARIAL), point["upper"]
    value = short(point["value"], rounded_down if below else rounded_up)
    # one number alone stays one: it is no interval
    upper = short(upper, rounded_up) if upper > point["value"] else value
    return {**point, "value": value, "upper": upper}


def _sigma_line(row: Measurement) -> dict[str, Any]:
    real = given(row)
    return {
        "theorem": MEASURED if real else ADVERSARIAL,
        "statement": "sigma at this input" if real else row.input,
        "cite": "",
        "kind": MEASURED if real else "lower",
        "scope": "local" if real else "global",
        "value": short(row.sigma, rounded_down),
        "upper": short(row.upper, rounded_up),
        "times": None,
        "sound": True,
        "why": row.note or "",
    }


def _bound_line(row: Measurement, bound: Bound) -> dict[str, Any]:
    names = ("theorem", "statement", "cite", "kind", "sound")
    ball = "" if bound.eps is None else f", eps = {bound.eps:.3g}"
    return {
        **{name: getattr(bound, name) for name in names},
        "scope": bound.scope + ball,
        "value": short(bound.value, rounded_down if bound.kind == "lower" else rounded_up),
        "upper": None,
        "times": short(looseness(bound, row)),
        "why": bound.note if bound.applicable else bound.reason,
    }


# --- monitors -------------------------------------------------------------------------------------

SIGNALS = {
    "loss": "linear",
    "sigma": "log",
    "relative": "log",
    "largest_logit": "linear",
    "entropy": "linear",
    "sink_mass": "linear",
    "top_share": "linear",
    "radius": "log",
    "weight_norm": "log",
    "update_norm": "log",
}
"""The signals in the order of the page, and the scale of each."""
MAX_VALUES = 40_000
"""Numbers that a page carries."""


def monitored_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One record for each monitored training."""
    names, found = folder_names(runs), []
    for run in runs:
        trainings = grouped(run.contents(READINGS).values(), lambda one: str(one.get("run")))
        alerts = [*run.contents(ALERTS).values()]
        for name, readings in trainings.items():
            steps = sorted({one["step"] for one in readings})
            every = -(-len(readings) * len(SIGNALS) // MAX_VALUES)
            ticks = {*steps[:: every or 1], steps[-1], *(one["step"] for one in alerts)}
            rows = [row for one in readings if one["step"] in ticks for row in _readings(one)]
            rows = list({(r["signal"], r["layer"], r["step"]): r for r in rows}.values())
            own = [_alert(one) for one in alerts if str(one.get("run")) == name]
            known = {row["signal"] for row in rows}
            scales = {signal: scale for signal, scale in SIGNALS.items() if signal in known}
            place = f"{name}, folder {names[str(run.path)]}" if len(names) > 1 else name
            found.append({"name": place, "scales": scales, "rows": rows, "alerts": own})
            found[-1]["axes"] = {signal: _signal_axes(signal, rows, ticks) for signal in scales}
    return found


def _signal_axes(
    signal: str, rows: Sequence[Mapping[str, Any]], steps: Iterable[int]
) -> dict[str, list[float]]:
    values = [r["value"] for r in rows if r["signal"] == signal]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    if SIGNALS[signal] == "log":
        y = [low / 1.2, high * 1.2]
    else:
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        y = [low - room, high + room]
    pad = 0.02 * (last - first) or 1.0
    return {"x": [first - pad, last + pad], "y": y}


def _readings(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = ((name, one.get(name)) for name in SIGNALS)
    return [
        {
            "signal": name,
            "layer": "all" if name == "loss" else label(one["layer"]),
            "step": one["step"],
            "value": short(value),
        }
        for name, value in values
        if value is not None and (SIGNALS[name] == "linear" or value > 0)
    ]


def _alert(one: Mapping[str, Any]) -> dict[str, Any]:
    layer = "all" if one["layer"] is None else label(one["layer"])
    signal = "sigma" if one["signal"] == "measured" else one["signal"]  # where it is missed
    return {
        "signal": signal,
        "layer": layer,
        "step": one["step"],
        "value": short(one["value"]),
        "text": one["text"].replace("`", ""),
    }
