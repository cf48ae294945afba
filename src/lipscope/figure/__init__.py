"""Rows to charts; one kind of chart is one file.

The only package that imports altair. A chart is saved as SVG, PNG or one HTML page that
needs no network; those of a report (from `focus` on) also live in its page.
"""

from lipscope.figure.axes import WIDTH
from lipscope.figure.curves import curves_chart
from lipscope.figure.exponents import exponents_chart, slopes_chart
from lipscope.figure.focus import focus_chart
from lipscope.figure.growth import growth_chart
from lipscope.figure.heads import heads_chart
from lipscope.figure.inpage import GROWN, QUANTITIES, in_the_page
from lipscope.figure.layers import layers_chart
from lipscope.figure.look import Chart, save
from lipscope.figure.radius import radius_chart
from lipscope.figure.sandwich import bounds_chart, sandwich_chart
from lipscope.figure.text import shaded_text
from lipscope.figure.training import training_chart

__all__ = [
    "GROWN",
    "QUANTITIES",
    "WIDTH",
    "Chart",
    "bounds_chart",
    "curves_chart",
    "exponents_chart",
    "focus_chart",
    "growth_chart",
    "heads_chart",
    "in_the_page",
    "layers_chart",
    "radius_chart",
    "sandwich_chart",
    "save",
    "shaded_text",
    "slopes_chart",
    "training_chart",
]
