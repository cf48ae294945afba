"""Readings of a monitor as a page shows them: every signal over steps, alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lipscope.pages.points import label, short
from lipscope.pages.runs import folder_names
from lipscope.records import Run

READINGS, ALERTS = "monitor", "alerts"
"""The parts of the values of a run folder that a monitor writes."""
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
    """One record for each training that was watched.

    Args:
        runs: The folders.

    Returns:
        Records with ``name``, ``scales`` and ``axes`` of the signals with values, ``rows`` (signal,
        layer, step, value; the layer of the loss is "all") and ``alerts`` (likewise, with text).
    """
    names, found = folder_names(runs), []
    for run in {str(run.path): run for run in runs}.values():
        trainings: dict[str, list[Mapping[str, Any]]] = {}
        for one in run.contents(READINGS).values():
            trainings.setdefault(str(one.get("run")), []).append(one)
        alerts = [*run.contents(ALERTS).values()]
        for name, readings in trainings.items():
            steps = sorted({one["step"] for one in readings})
            every = -(-len(readings) * len(SIGNALS) // MAX_VALUES)
            kept = {*steps[:: every or 1], steps[-1], *(one["step"] for one in alerts)}
            rows = [row for one in readings if one["step"] in kept for row in _rows(one)]
            rows = list({(r["signal"], r["layer"], r["step"]): r for r in rows}.values())
            own = [_alert(one) for one in alerts if str(one.get("run")) == name]
            known = {row["signal"] for row in rows}
            scales = {signal: scale for signal, scale in SIGNALS.items() if signal in known}
            place = f"{name}, folder {names[str(run.path)]}" if len(names) > 1 else name
            found.append({"name": place, "scales": scales, "rows": rows, "alerts": own})
            found[-1]["axes"] = {signal: _axes(signal, rows, kept) for signal in scales}
    return found


def _axes(
    signal: str, rows: Sequence[Mapping[str, Any]], steps: Iterable[int]
) -> dict[str, list[float]]:
    """The ends of both axes, with room at each."""
    values, first, last = (
        [r["value"] for r in rows if r["signal"] == signal],
        min(steps),
        max(steps),
    )
    low, high = min(values), max(values)
    if SIGNALS[signal] == "log":
        y = [low / 1.2, high * 1.2]
    else:
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        y = [low - room, high + room]
    pad = 0.02 * (last - first) or 1.0
    return {"x": [first - pad, last + pad], "y": y}


def _rows(one: Mapping[str, Any]) -> list[dict[str, Any]]:
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
