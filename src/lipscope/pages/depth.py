"""Sigma through depth: every map of a layer, the whole model, the product of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lipscope.charts.depth import MAPS
from lipscope.charts.marks import positive, tick_values
from lipscope.pages.items import REAL, Item
from lipscope.pages.points import log_ends, short, spread_of
from lipscope.records.rows import Measurement
from lipscope.records.sampling import enclosed_mean

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
        Records with ``lines`` (layer by layer and map), ``model``, ``products`` and ``said``.
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
    products = [_mean_of([chain[k] for chain in windows.values()]) for k in range(_depth(windows))]
    means = [_mean(whole)] if whole else []
    return {
        **dict(zip(("model", "metric", "move", "read", "text"), setting, strict=True)),
        "source": source,
        "n": n,
        "lines": lines,
        "whole": means,
        "products": [{"layer": k} | one for k, one in enumerate(products)],
        "axes": {"layers": _axis([*lines, *means]), "products": _axis([*products, *means])},
        "said": " ".join(_said(n, windows, why, maps.get("block", {}), whole)),
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
    blocks: Mapping[int | None, Sequence[Measurement]],
    whole: Sequence[Measurement],
) -> Iterator[str]:
    """What the product is, and how far it is above the model's map on the same windows."""
    if not windows:
        if why:
            yield f"No product of the blocks: {why}."
        return
    depth = _depth(windows)
    yield (
        f"Product: of the sigmas of blocks 0 to {depth - 1}, window by window. Each block reads "
        "what the one before it gives (their norms agree), so up to the solver's intervals the "
        "product is above sigma of all these blocks together."
    )
    last = {row.tokens_sha256: row for row in blocks[depth - 1]}
    first = {row.tokens_sha256: row for row in blocks[0]}
    both = [
        row
        for row in whole
        if row.tokens_sha256 in windows
        and _close(row.input_norm, first[row.tokens_sha256].input_norm)
    ]
    if not both:
        yield (
            "The model's map was measured on none of these windows."
            if whole
            else "The model's map was not measured: lipscope measure … --map model does."
        )
        return
    over, middle = [], 0.0
    for row in both:
        (low, high), (sigma, upper) = windows[row.tokens_sha256][-1], log_ends(row)
        over.append((low - upper, high - sigma))
        middle += (low - sigma) / len(both)
    _, *ends = enclosed_mean(over)
    ratio, low, high = (f"{float(f'{_exp(v):.3g}'):,g}" for v in (middle, *ends))
    of = f"the mean over {len(both)} windows" if len(both) > 1 else "one window"
    yield (
        f"At {n} tokens it is {ratio} times sigma of the model's map (from {low} to {high}, {of})."
    )
    if not all(_close(row.output_norm, last[row.tokens_sha256].output_norm) for row in both):
        yield (
            "The model's map goes on behind the last of these blocks (a final norm, or blocks that "
            "were not measured), which the product leaves out."
        )
