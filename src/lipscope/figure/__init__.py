"""Rows to charts; one kind of chart is one file.

The only package that imports altair. A chart is saved as SVG, PNG or one HTML page that
needs no network.
"""

from lipscope.figure.curves import curves_chart
from lipscope.figure.growth import growth_chart
from lipscope.figure.look import Chart, save
from lipscope.figure.sandwich import sandwich_chart
from lipscope.figure.text import shaded_text

__all__ = ["Chart", "curves_chart", "growth_chart", "sandwich_chart", "save", "shaded_text"]
