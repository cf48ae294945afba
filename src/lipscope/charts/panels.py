"""Curves and scatters as a chart reads them: plain numbers, no drawing library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

LineKind = Literal["points", "line", "dashes"]
Point = tuple[float | int, float | int]


@dataclass(frozen=True)
class Series:
    """One curve or scatter.

    Attributes:
        name: What the legend says; series of one name have one colour in all panels.
        points: Pairs ``(x, y)``; those that cannot stand on the axes are left out.
        kind: ``points``, ``line`` (with its points if they are few) or ``dashes`` (a reference).
    """

    name: str
    points: tuple[Point, ...]
    kind: LineKind = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Above the panel.
        series: What is drawn.
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is.
        end: The longest inputs that the model was trained on
            (`lipscope.charts.marks.training_end`); None for no line.
    """

    title: str
    series: tuple[Series, ...]
    x: str = "number of tokens n"
    y: str = "sigma"
    log_x: bool = True
    log_y: bool = True
    end: int | None = None

    def visible(self, one: Series) -> list[Point]:
        """The points of a series that its axes can show."""
        return [
            (x, y)
            for x, y in one.points
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or not self.log_x)
            and (y > 0 or not self.log_y)
        ]


def power_law(points: Iterable[Point], exponent: float, name: str, lift: float = 1.0) -> Series:
    """A dashed reference ``c x^s`` over the range of some points, ``c`` their best fit.

    Args:
        points: Pairs ``(x, y)``; those with a logarithm count.
        exponent: The slope ``s``.
        name: What the legend says.
        lift: Factor on ``c``, to draw it beside the points.

    Returns:
        The series; empty where there are no points.

    >>> power_law([(1.0, 2.0), (4.0, 4.0)], 0.5, "root").points
    ((1.0, 2.0), (4.0, 4.0))
    """
    held = [(x, y) for x, y in points if x > 0 and y > 0 and math.isfinite(y)]
    if not held:
        return Series(name, (), "dashes")
    logs = [math.log(y) - exponent * math.log(x) for x, y in held]
    c = lift * math.exp(math.fsum(logs) / len(logs))
    ends = min(x for x, _ in held), max(x for x, _ in held)
    return Series(name, tuple((x, c * x**exponent) for x in ends), "dashes")
