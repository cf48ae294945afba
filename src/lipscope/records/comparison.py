"""Comparison of bounds with measured sigma, and the curves of the comparison figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lipscope.display import rounded_down, rounded_up
from lipscope.records.rows import GIVEN, Bound, Measurement, grouped
from lipscope.records.sampling import geometric_mean

MEASURED, ADVERSARIAL, CERTIFICATE = "measured", "adversarial", "local certificate"
EVERYWHERE = ("global", "mean-field")
"""Scopes of bounds that hold for all inputs."""

_OFF_SCALE = 1e6  # larger multiples of the largest measured value are omitted from the figure
_SAME = 1.01  # bounds within one per cent of each other at every length share one curve


@dataclass(frozen=True)
class Curve:
    """One curve of the figure: values by number of tokens."""

    name: str  # label in the legend
    group: str  # ``measured``, ``adversarial``, ``local certificate`` or ``bound``
    points: tuple[tuple[int, float, float], ...]  # ``(n, value, upper)``


@dataclass(frozen=True)
class Comparison:
    """Measured sigma and bounds of one layer or head, in one map and metric."""

    model: str  # name of the model
    map: str  # the map
    metric: str  # the metric of all values
    layer: int  # index of the layer
    head: int | None  # query head, or None for all
    rows: list[Measurement] = field(default_factory=list)  # rows with a sigma in this metric
    # Bounds in this metric, each with its row (which may be of another metric)
    bounds: list[tuple[Measurement, Bound]] = field(default_factory=list)

    @property
    def real(self) -> list[Measurement]:
        """Rows at the user's inputs."""
        return [row for row in self.rows if given(row)]

    @property
    def allowed(self) -> str:
        """The tokens that global bounds cover, in words."""
        return allowed(bound for _, bound in self.bounds)

    def curves(self) -> tuple[list[Curve], list[str]]:
        """Curves of the figure, and the omitted bounds, which are far off the scale.

        Samples of one length are averaged (geometric mean); equal bounds share one curve.
        """
        # Rows at constructed inputs by construction: these are not averaged.
        built = grouped((row for row in self.rows if not given(row)), lambda row: row.input)
        lines = [
            _curve_of("sigma, real text", MEASURED, map(_sigma_point, self.real)),
            *(
                _curve_of(f"sigma, {kind}", ADVERSARIAL, map(_sigma_point, rows))
                for kind, rows in built.items()
            ),
            _curve_of("local certificate, real text", CERTIFICATE, self._certificates()),
        ]
        top = max((value for line in lines for _, value, _ in line.points), default=1.0)
        wide: dict[str, list[_Point]] = {}
        for row, bound in self.bounds:
            if is_upper(bound) and bound.scope in EVERYWHERE:
                wide.setdefault(bound.theorem, []).append(_bounded(row, bound))
        every = [_curve_of(name, "bound", points) for name, points in wide.items()]
        every = [line for line in every if line.points]
        # Bounds that are on the scale somewhere.
        kept = [one for one in every if min(v for _, v, _ in one.points) <= _OFF_SCALE * top]
        left_out = [f"{x.name} ({x.points[-1][1]:.1e})" for x in every if x not in kept]
        return [line for line in [*lines, *_merged_lines(kept)] if line.points], left_out

    def _certificates(self) -> list[_Point]:
        """The best local bound at every input of the user."""
        found: dict[str, tuple[Measurement, list[Bound]]] = {}
        for row, bound in self.bounds:
            if given(row):
                found.setdefault(row.id, (row, []))[1].append(bound)
        best = [(row, best_of(some, "local")) for row, some in found.values()]
        return [_bounded(row, bound) for row, bound in best if bound is not None]


def comparisons(rows: Iterable[Measurement], bounds: Iterable[Bound]) -> list[Comparison]:
    """Rows and their bounds, joined by `id`, for every layer and head with bounds."""
    rows, of = list(rows), by_row(bounds)
    places = {_place(row) for row in rows if row.id in of}
    # Other inputs of the user are omitted: their sigma may exceed a local bound at this one.
    rows = [row for row in rows if row.id in of or not given(row)]
    found: dict[tuple[Any, ...], Comparison] = {}
    for row in rows:
        if row.sigma is None or row.layer is None or _place(row) not in places:
            continue
        mine = of.get(row.id, [])
        for metric in dict.fromkeys([row.metric, *(bound.metric for bound in mine)]):
            key = (row.model, row.map, metric, row.layer, row.head)
            one = found.setdefault(key, Comparison(*key))
            if metric == row.metric:
                one.rows.append(row)
            one.bounds.extend((row, bound) for bound in mine if bound.metric == metric)
    return list(found.values())


def by_row(bounds: Iterable[Bound]) -> dict[str, list[Bound]]:
    """Bounds by the `id` of their row."""
    return grouped(bounds, lambda bound: bound.id)


def given(row: Measurement) -> bool:
    """Whether the input of a row comes from the user, not from a construction."""
    return row.input in GIVEN


def is_upper(bound: Bound) -> bool:
    """Whether a bound is a proven upper bound of sigma at the input of its row.

    Ball and global bounds hold at the input too.
    """
    above = bound.kind == "upper" and bound.scope in ("local", "ball", *EVERYWHERE)
    return above and bound.sound and bound.value is not None


def looseness(bound: Bound, row: Measurement) -> float | None:
    """The ratio of an upper bound to the sigma of its row; None if not comparable."""
    if not is_upper(bound) or bound.metric != row.metric or not row.sigma:
        return None
    return (bound.value or 0.0) / row.sigma


def best_of(bounds: Iterable[Bound], *scopes: str) -> Bound | None:
    """The smallest sound upper bound in the given scopes."""
    found = [bound for bound in bounds if is_upper(bound) and bound.scope in scopes]
    return min(found, key=lambda bound: bound.value or 0.0, default=None)


def allowed(bounds: Iterable[Bound]) -> str:
    """The tokens that global bounds cover, in words."""
    for bound in bounds:
        if bound.radius is not None:
            return f"tokens of norm up to {rounded_down(bound.radius):.4g}"
        if bound.floor is not None:
            return f"tokens of norm from {rounded_up(bound.floor):.4g} on"
    return "all tokens"


# --- curves ---------------------------------------------------------------------------------

_Point = tuple[int, float | None, float | None]  # number of tokens, value, upper end


def _place(row: Measurement) -> tuple[Any, ...]:
    return row.model, row.map, row.layer, row.head


def _sigma_point(row: Measurement) -> _Point:
    return row.num_tokens, row.sigma, row.upper


def _bounded(row: Measurement, bound: Bound) -> _Point:
    return row.num_tokens, bound.value, None


def _curve_of(name: str, group: str, points: Iterable[_Point]) -> Curve:
    known = [
        (n, value, upper or value)
        for n, value, upper in points
        if value is not None and value > 0 and math.isfinite(value)
    ]
    means = []
    for n, some in sorted(grouped(known, lambda one: one[0]).items()):
        value, upper = (geometric_mean(one[k] for one in some) or 0.0 for k in (1, 2))
        means.append((n, value, upper))
    return Curve(name, group, tuple(means))


def _merged_lines(lines: Iterable[Curve]) -> list[Curve]:
    """Merge curves that nearly coincide into one with both names."""
    merged: list[Curve] = []
    for line in lines:
        at = next((k for k, other in enumerate(merged) if _coincide(other, line)), None)
        if at is None:
            merged.append(line)
        else:
            both = f"{merged[at].name} = {line.name}"
            merged[at] = Curve(both, "bound", merged[at].points)
    return merged


def _coincide(one: Curve, other: Curve) -> bool:
    if [n for n, *_ in one.points] != [n for n, *_ in other.points]:
        return False
    pairs: list[tuple[Any, Any]] = list(zip(one.points, other.points, strict=True))
    return all(1 / _SAME < a[1] / b[1] < _SAME for a, b in pairs)
