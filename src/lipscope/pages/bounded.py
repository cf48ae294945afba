"""Bounds as a page shows them: the lines and the table of one layer in one metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lipscope.charts import points_of, spread, tick_values
from lipscope.pages.points import short
from lipscope.records import ADVERSARIAL, MEASURED, Bound, Comparison, Measurement, given, looseness

HEIGHT, LABEL = 360, 14
"""Height of the chart, and of one name beside it, in pixels."""


def bounded(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """One record for each model, map, metric, layer and head that bounds speak of.

    Args:
        comparisons: Rows with their bounds.

    Returns:
        Records with ``lines``, ``names`` (places of their labels), axes and a ``table``.
    """
    return [_record(one) for one in comparisons]


def _record(of: Comparison) -> dict[str, Any]:
    lines, left_out = of.curves()
    rows = [*of.rows, *(row for row, _ in of.bounds)]
    last = max(row.num_tokens for row in rows)
    sample = next(row.sample for row in rows if row.num_tokens == last)
    points = points_of(lines)

    def shown(row: Measurement) -> bool:
        return (row.num_tokens, row.sample) == (last, sample)

    return {
        "model": of.model,
        "map": of.map,
        "metric": of.metric,
        "layer": str(of.layer),
        "head": of.head,
        "n": last,
        "sample": sample,
        "allowed": of.allowed,
        "measured": bool(of.real),
        "lines": [_short(point) for point in points],
        "out": left_out,
        "table": [
            *(_measured(row) for row in of.rows if shown(row)),
            *(_asked(row, bound) for row, bound in of.bounds if shown(row)),
        ],
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


def _measured(row: Measurement) -> dict[str, Any]:
    real = given(row)
    return {
        "theorem": MEASURED if real else ADVERSARIAL,
        "statement": "sigma at this input" if real else row.input,
        "cite": "",
        "kind": MEASURED if real else "lower",
        "scope": "local" if real else "global",
        "value": short(row.sigma),
        "upper": short(row.upper),
        "times": None,
        "sound": True,
        "why": row.note or "",
    }


def _asked(row: Measurement, bound: Bound) -> dict[str, Any]:
    ball = "" if bound.eps is None else f", eps = {bound.eps:.3g}"
    return {
        "theorem": bound.theorem,
        "statement": bound.statement,
        "cite": bound.cite,
        "kind": bound.kind,
        "scope": bound.scope + ball,
        "value": short(bound.value),
        "upper": None,
        "times": short(looseness(bound, row)),
        "sound": bound.sound,
        "why": bound.note if bound.applicable else bound.reason,
    }


def cited(bounds: Iterable[Bound]) -> dict[str, list[str]]:
    """Keys of the bibliography that bounds refer to, each with the statements used.

    Args:
        bounds: Bounds of any rows.

    Returns:
        By key, its statements in order of appearance; what was derived here among them.
    """
    found: dict[str, dict[str, None]] = {}
    for bound in bounds:
        if bound.cite and bound.applicable:
            found.setdefault(bound.cite, {})[f"{bound.statement} ({bound.theorem})"] = None
    return {cite: list(statements) for cite, statements in found.items()}
