"""Checkpoints of one model side by side: sigma against training step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lipscope.charts import positive
from lipscope.pages.items import REAL, SETTING, Item
from lipscope.pages.points import axes, label, layers_first, short, spread_of
from lipscope.records import Measurement

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
    """Checkpoints of one model, which differ in the last number of their name.

    Args:
        items: All items.
        settings: Those of `lipscope.pages.points.points_of`.

    Returns:
        Groups of at least two steps, and their means.
    """
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
