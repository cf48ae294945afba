"""All charts of a report's page, compiled for Vega, with colours by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import vl_convert

from lipscope.charts import axes, exponents, look
from lipscope.charts.exponents import exponents_chart, slopes_chart
from lipscope.charts.focus import focus_chart
from lipscope.charts.heads import Quantity, heads_chart
from lipscope.charts.layers import Grown, layers_chart
from lipscope.charts.marks import palette
from lipscope.charts.radius import radius_chart
from lipscope.charts.sandwich import bounds_chart
from lipscope.charts.training import training_chart

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
GROWN: dict[str, Grown] = {"radius-n": "radius", "rank": "rank"}
FILL = "container"
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
    exponents.PURPLE: "--purple",
    "#ffffff": "--paper",
}


def in_the_page(
    layers: Sequence[str], *, turn: float | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Specifications by name, without data, and the colours that their names stand for.

    A page that names its colours changes from light to dark without drawing anything again.

    Args:
        layers: All layers in their order.
        turn: Step at which the axis of training steps turns logarithmic; None if it does not.

    Returns:
        Vega specifications, and the light colour of every name.
    """
    charts: dict[str, Any] = {
        "focus": focus_chart(None, None, width=FILL),
        "layers": layers_chart(None, None, layers, width=FILL),
        "exponents": exponents_chart(None, layers, width=FILL),
        "slopes": slopes_chart(None, layers, width=FILL),
        "sigma-radius": radius_chart(None, layers, width=FILL),
        "training": training_chart(None, None, layers, turn=turn, width=FILL),
        "bounds": bounds_chart(None, None, width=FILL, height=380),
    }
    for quantity in QUANTITIES:
        charts[f"heads-{quantity}"] = heads_chart(None, layers, quantity=quantity, width=FILL)
    for name, grown in GROWN.items():
        charts[name] = layers_chart(None, None, layers, grown=grown, width=FILL)
    names = {colour: f"--l{k}" for k, colour in enumerate(palette(len(layers)))} | _NAMES
    specs = {name: _compiled(chart, names) for name, chart in charts.items()}
    specs["bounds"]["padding"] = {"left": 2, "top": 2, "bottom": 2, "right": _NAMED}
    return specs, {name: colour for colour, name in names.items()}


def _compiled(chart: Any, names: Mapping[str, str]) -> dict[str, Any]:
    spec = vl_convert.vegalite_to_vega(chart.to_dict(validate=False))  # our own: tests check it
    spec.pop("$schema", None)  # only a name, but a page that fetches nothing holds no address
    spec["background"] = None
    spec["padding"] = 2
    text = json.dumps(spec)
    for colour, name in names.items():
        text = text.replace(f'"{colour}"', f'"var({name})"')
    return json.loads(text)
