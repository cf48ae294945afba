# The front door: what other rooms may use.
from .axes import Frame
from .contrast import SIDES, ratios_chart, shifts_chart, sides_chart
from .curves import curves_chart
from .depth import MAPS, depth_chart, product_chart
from .exponents import exponents_chart, slopes_chart
from .focus import focus_chart
from .gains import WAYS, gains_chart
from .growth import growth_chart
from .heads import TITLES, Quantity, heads_chart
from .inpage import in_the_page
from .layers import Grown, layers_chart
from .look import Chart, as_svg, save_each
from .marks import layer_labels, palette, points_of, positive, spread, tick_values, training_end
from .motion import Scene, animate
from .panels import LineKind, Panel, Point, Series, power_law
from .pieces import kind_of, readable, spaced
from .push import CERTIFICATE, PROMISE, push_chart
from .radius import radius_chart
from .sandwich import bounds_chart, sandwich_chart
from .signals import signals_chart
from .text import shaded_text
from .training import training_chart

__all__ = [
    "CERTIFICATE",
    "MAPS",
    "PROMISE",
    "SIDES",
    "TITLES",
    "WAYS",
    "Chart",
    "Frame",
    "Grown",
    "LineKind",
    "Panel",
    "Point",
    "Quantity",
    "Scene",
    "Series",
    "animate",
    "as_svg",
    "bounds_chart",
    "curves_chart",
    "depth_chart",
    "exponents_chart",
    "focus_chart",
    "gains_chart",
    "growth_chart",
    "heads_chart",
    "in_the_page",
    "kind_of",
    "layer_labels",
    "layers_chart",
    "palette",
    "points_of",
    "positive",
    "power_law",
    "product_chart",
    "push_chart",
    "radius_chart",
    "ratios_chart",
    "readable",
    "sandwich_chart",
    "save_each",
    "shaded_text",
    "shifts_chart",
    "sides_chart",
    "signals_chart",
    "slopes_chart",
    "spaced",
    "spread",
    "tick_values",
    "training_chart",
    "training_end",
]
