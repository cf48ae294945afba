"""All charts of a report's page, compiled for Vega, with colours by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import vl_convert

from lipscope.charts import axes, look
from lipscope.charts.contrast import QUANTITY
from lipscope.charts.marks import palette

_NAMED = 24  # pixels beside names of lines, whose width is an estimate

# The style sheet of the page gives these colours a light and a dark value.
_NAMES = {
    look.INK: "--ink",
    look.QUIET: "--quiet",
    look.GRID: "--grid",
    look.AXIS: "--axis",
    axes.BLUE: "--blue",
    axes.ORANGE: "--orange",
    axes.GREEN: "--green",
    axes.PURPLE: "--purple",
    "#ffffff": "--paper",
}


def in_the_page(
    charts: Mapping[str, Any], layers: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Specifications by name, without data, and the colours that their names stand for.

    A page that names its colours changes from light to dark without drawing anything again.

    Args:
        charts: Charts without data, by name.
        layers: Number of layers, which have colours of their own.

    Returns:
        Vega specifications, and the light colour of every name.
    """
    names = {colour: f"--l{k}" for k, colour in enumerate(palette(layers))} | _NAMES
    specs = {name: _compiled(chart, names) for name, chart in charts.items()}
    specs["bounds"]["padding"] = {"left": 2, "top": 2, "bottom": 2, "right": _NAMED}
    return specs, {name: colour for colour, name in names.items()}


def _compiled(chart: Any, names: Mapping[str, str]) -> dict[str, Any]:
    spec = vl_convert.vegalite_to_vega(chart.to_dict(validate=False))  # our own: tests check it
    spec.pop("$schema", None)  # only a name, but a page that fetches nothing holds no address
    for axis in spec.get("axes", ()):
        if axis.get("title") == QUANTITY:  # Vega-Lite knows no signal there, Vega does
            axis["title"] = {"signal": QUANTITY}
            spec.setdefault("signals", []).append({"name": QUANTITY, "value": ""})
    spec["background"] = None
    spec["padding"] = 2
    text = json.dumps(spec)
    for colour, name in names.items():
        text = text.replace(f'"{colour}"', f'"var({name})"')
    return json.loads(text)
