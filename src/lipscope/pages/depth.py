"""Sigma through depth: every map of a layer, the whole model, the product of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lipscope.charts import MAPS, positive, tick_values
from lipscope.pages.items import REAL, Item
from lipscope.pages.points import log_ends, short, spread_of
from lipscope.records import Measurement, enclosed_mean

_SAME = 1e-4  # norms of one tensor that two rows tell, each summed in its own order
_NORMS = ("frobenius", "max-token", "infinity")
"""Metrics in which input and output are measured alike, so that constants multiply."""


def depths_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """One record for each model, metric, text, folder and length with a map of its layers.

    The product of the blocks' constants bounds the map from the entrance of the first one to the
    end of the last, ``σ(B_k ∘ … ∘ B_0) <= σ(B_k) … σ(B_0)``, where each block reads what the one
    before it gives, all tokens move and all are read, and one norm measures input and output. It is
    taken window by window, and only where the rows show this: layers from 0 on without a gap, each
    one's ``input_norm`` the ``output_norm`` of the one before.

    Args:
        items: All items.

    Returns:
        Records with ``lines`` (layer by layer and map), ``whole`` (the model's map), ``products``
        (also sigma of the blocks together, map ``stack``), axes and words.
    """
    found: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        if item.kind == REAL and item.row.head is None and positive(item.row.sigma):
            setting = (item.setting[0], *item.setting[2:])
            found.setdefault((setting, item.row.num_tokens), []).append(item)
    return [
        _record(setting, source, n, [i for i in some if i.source in (None, source)])
        for (setting, n), some in sorted(found.items(), key=lambda one: one[0][1])
        for source in dict.fromkeys(i.source for i in some if i.source) or [None]
    ]


def _record(
    setting: tuple[str, ...], source: str | None, n: int, items: Sequence[Item]
) -> dict[str, Any]:
    maps: dict[str, dict[int | None, list[Measurement]]] = {}
    for item in items:
        maps.setdefault(item.row.map, {}).setdefault(item.row.layer, []).append(item.row)
    whole = maps.pop("model", {}).get(None, [])
    lines = [
        {"map": name, "layer": layer} | _mean(rows)
        for name in MAPS
        for layer, rows in sorted(maps.get(name, {}).items(), key=lambda one: one[0] or 0)
    ]
    windows, why = _chains(maps.get("block", {}), setting[1:4])
    stack = maps.get("stack", {})
    products = [
        {"map": "product", "layer": k} | _mean_of([chain[k] for chain in windows.values()])
        for k in range(_depth(windows))
    ]
    products += [
        {"map": "stack", "layer": layer} | _mean(rows)
        for layer, rows in sorted(stack.items(), key=lambda one: one[0] or 0)
    ]
    means = [_mean(whole)] if whole else []
    return {
        **dict(zip(("model", "metric", "move", "read", "text"), setting, strict=True)),
        "source": source,
        "n": n,
        "lines": lines,
        "whole": means,
        "products": products,
        "axes": {"layers": _axis([*lines, *means]), "products": _axis([*products, *means])},
        "said": " ".join(_said(n, windows, why, maps, whole)),
    }


def _axis(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The axis of means with their intervals."""
    values = [one[end] for one in records for end in ("sigma", "low", "high") if one[end]]
    if not values:
        return None
    y = [min(values) / 1.15, max(values) * 1.15]
    return {"y": [short(v) for v in y], "yticks": tick_values(*y)}


_Chain = list[tuple[float, float]]  # logarithm of the product up to each block: its two ends


def _depth(windows: Mapping[str, _Chain]) -> int:
    return min((len(chain) for chain in windows.values()), default=0)


def _mean(rows: Sequence[Measurement]) -> dict[str, Any]:
    sigma, low, high = map(short, spread_of(rows))
    return {"sigma": sigma, "low": low, "high": high, "count": len(rows)}


def _mean_of(ends: Sequence[tuple[float, float]]) -> dict[str, Any]:
    values = (short(_exp(value)) for value in enclosed_mean(ends))
    return dict(zip(("sigma", "low", "high"), values, strict=True)) | {"count": len(ends)}


def _exp(value: float) -> float:
    """Products of many blocks may leave the range of numbers; then there is no value."""
    return math.exp(value) if value < 700 else math.inf


def _chains(
    blocks: Mapping[int | None, Sequence[Measurement]], how: Sequence[str]
) -> tuple[dict[str, _Chain], str]:
    """For each window the products up to every block, or why there are none."""
    metric, move, read = how
    depth = len(blocks)
    if depth < 2:
        return {}, ""
    if metric not in _NORMS or (move, read) != ("all", "all"):
        return {}, "constants multiply only where all tokens move and are read in one norm"
    if set(blocks) != set(range(depth)):
        return {}, f"layers are missing: found {', '.join(map(str, sorted(map(_int, blocks))))}"
    by_window = [{row.tokens_sha256: row for row in blocks[k]} for k in range(depth)]
    found = {}
    for window in by_window[0]:
        rows = [some[window] for some in by_window if window in some]
        if len(rows) == depth:
            if not all(_follows(a, b) for a, b in pairwise(rows)):
                return {}, "a block does not read what the one before it gives"
            found[window] = list(_sums(map(log_ends, rows)))
    return found, "" if found else "no window was measured at every layer"


def _int(layer: int | None) -> int:
    return -1 if layer is None else layer


def _sums(ends: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    low = high = 0.0
    for one, other in ends:
        low, high = low + one, high + other
        yield low, high


def _follows(one: Measurement, other: Measurement) -> bool:
    """Whether the second map reads what the first gives, as far as norms tell."""
    return _close(one.output_norm, other.input_norm)


def _close(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=_SAME)


def _said(
    n: int,
    windows: Mapping[str, _Chain],
    why: str,
    maps: Mapping[str, Mapping[int | None, Sequence[Measurement]]],
    whole: Sequence[Measurement],
) -> Iterator[str]:
    """What the product is, and how far it is above the blocks together and the model's map."""
    if not windows:
        if why:
            yield f"No product of the blocks: {why}."
        return
    blocks, last = maps["block"], _depth(windows) - 1
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
            and _close(row.input_norm, first[row.tokens_sha256].input_norm)
        ]
        if both:
            yield _over(n, name, [(windows[row.tokens_sha256][-1], log_ends(row)) for row in both])
        if any(not _close(row.output_norm, ends[row.tokens_sha256].output_norm) for row in both):
            yield (
                f"{name[0].upper()}{name[1:]} goes on after the last of them (a final norm, or "
                "blocks that were not measured), which the product leaves out."
            )
    if not whole:
        yield "The model's map was not measured: lipscope measure … --map model does."


def _over(n: int, name: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """How many times sigma of a map the product is, on the same windows."""
    middle = sum(product[0] - map_[0] for product, map_ in pairs) / len(pairs)
    _, *ends = enclosed_mean([(low - upper, high - sigma) for (low, high), (sigma, upper) in pairs])
    ratio, low, high = (f"{float(f'{_exp(v):.3g}'):,g}" for v in (middle, *ends))
    of = f"geometric mean of {len(pairs)} windows, 95 %:" if len(pairs) > 1 else "one window:"
    return f"At {n} tokens it is {ratio} times sigma of {name} ({of} {low} to {high})."
