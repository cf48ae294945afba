"""Bounds as a page shows them: the lines and the table of one layer in one metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lipscope.charts.marks import tick_values
from lipscope.pages.points import short
from lipscope.records.bound_rows import MEASURED, BoundRow, curves, spread

HEIGHT, LABEL = 360, 14
"""Height of the chart, and of one name beside it, in pixels."""


def bounded(rows: Sequence[BoundRow]) -> list[dict[str, Any]]:
    """One record for each model, map, metric, layer and head that bounds speak of.

    Args:
        rows: Rows of any sandwiches.

    Returns:
        Records with ``lines``, ``names`` (places of their labels), axes and a ``table``.
    """
    groups: dict[tuple[Any, ...], list[BoundRow]] = {}
    for row in rows:
        key = (row.model, row.map, row.metric, row.layer, row.head)
        groups.setdefault(key, []).append(row)
    return [_record(key, some) for key, some in groups.items()]


def _record(key: tuple[Any, ...], rows: list[BoundRow]) -> dict[str, Any]:
    model, part, metric, layer, head = key
    lines, left_out = curves(rows)
    last = max(row.num_tokens for row in rows)
    table = [row for row in rows if row.num_tokens == last]
    table = [row for row in table if row.sample == table[0].sample]
    points = [
        {"name": line.name, "group": line.group, "n": n, "value": value, "upper": upper}
        for line in lines
        for n, value, upper in line.points
    ]
    return {
        "model": model,
        "map": part,
        "metric": metric,
        "layer": str(layer),
        "head": head,
        "n": last,
        "sample": table[0].sample,
        "radius": short(table[0].radius),
        "measured": any(row.theorem == MEASURED for row in rows),
        "lines": [_short(point) for point in points],
        "out": left_out,
        "table": [_cells(row) for row in table],
        **_axes(points),
    }


def _axes(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The axes of the lines, and names beside their ends that do not cover each other."""
    if not points:
        return {"axes": None, "names": []}
    lengths = sorted({p["n"] for p in points})
    low = min(p["value"] for p in points) / 1.3
    high = max(max(p["value"], p["upper"]) for p in points) * 1.3
    ends = {p["name"]: p for p in points}  # the last length of each
    gap = (high / low) ** (LABEL / HEIGHT)
    places = spread([p["value"] for p in ends.values()], gap)
    names = [
        {"name": p["name"], "group": p["group"], "n": p["n"], "value": place}
        for p, place in zip(ends.values(), places, strict=True)
    ]
    low, high = min([low, *places]), max([high, *places])
    axes = {
        "x": [round(lengths[0] / 1.12, 4), round(lengths[-1] * 1.02, 4)],
        "y": [short(low), short(high)],
        "xticks": lengths,
        "yticks": tick_values(low, high),
    }
    return {"axes": axes, "names": [_short(name) for name in names]}


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: short(v) if isinstance(v, float) else v for k, v in record.items()}


def _cells(row: BoundRow) -> dict[str, Any]:
    return {
        "theorem": row.theorem,
        "statement": row.statement,
        "cite": row.cite,
        "kind": row.kind,
        "scope": row.scope,
        "value": short(row.value) if row.applicable else None,
        "upper": short(row.upper),
        "times": short(row.looseness),
        "sound": row.sound,
        "why": row.reason if not row.applicable else row.note,
    }


def cited(rows: Iterable[BoundRow]) -> dict[str, list[str]]:
    """Keys of the bibliography that rows refer to, each with the statements used.

    Args:
        rows: Rows of any sandwiches.

    Returns:
        By key, its statements in order of appearance; what was derived here among them.
    """
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.cite and row.applicable:
            found.setdefault(row.cite, {})[f"{row.statement} ({row.theorem})"] = None
    return {cite: list(statements) for cite, statements in found.items()}
