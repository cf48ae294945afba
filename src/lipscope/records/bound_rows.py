"""Rows of a sandwich, and its lines as a chart reads them: no tensor and no drawing library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipscope.records.rows import GIVEN, Bound, Measurement

MEASURED, ADVERSARIAL, CERTIFICATE = "measured", "adversarial", "local certificate"
_OFF_SCALE = 1e6  # times the largest measured value: such a bound would flatten all others
_SAME = 1.01  # bounds within one per cent of each other at every length are one line


@dataclass(frozen=True, kw_only=True)
class BoundRow:
    """One theorem asked about one layer, or what was measured or found to stand against it.

    Attributes:
        theorem: Name in the catalogue; ``measured`` or ``adversarial``.
        statement: Where it is stated, or the construction.
        cite: Key of the bibliography, or "derived here".
        kind: ``upper``, ``lower``, or ``measured``.
        scope: ``local``, ``ball``, ``global``, ``mean-field``, ``limit``.
        metric: How input and output are measured.
        map: ``attention``, ``heads`` or ``normed``.
        value: The bound, or sigma; None if there is none.
        applicable: Whether there is a value.
        reason: Why there is none, or "".
        note: What a reader must know, or "".
        sound: False for a statement that is shown as found although it fails.
        model: Name of the model.
        layer: Index of the layer.
        head: Query head, or None for all.
        num_tokens: Number of tokens.
        sample: Index of the window.
        radius: Largest token norm that global bounds allow; None for the map ``normed``.
        floor: Smallest token norm (mean taken away if the norm does so) that global bounds for
            the map ``normed`` allow, else None.
        sigma: Lower end of a measured value, else None.
        upper: Its upper end, or None.
        looseness: Upper bound of this input divided by its measured sigma (same metric and
            map), else None.
    """

    theorem: str
    statement: str
    cite: str
    kind: str
    scope: str
    metric: str
    map: str
    value: float | None
    applicable: bool = True
    reason: str = ""
    note: str = ""
    sound: bool = True
    model: str
    layer: int
    head: int | None = None
    num_tokens: int
    sample: int
    radius: float | None
    floor: float | None = None
    sigma: float | None = None
    upper: float | None = None
    looseness: float | None = None

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(vars(self), ensure_ascii=False, allow_nan=False)

    @property
    def allowed(self) -> str:
        """The tokens of which global bounds speak, in words."""
        if self.radius is not None:
            return f"tokens of norm up to {self.radius:.4g}"
        return f"tokens of norm from {self.floor or 0.0:.4g} on"

    @property
    def bounds_here(self) -> bool:
        """Whether it is proved to be above sigma at this very input."""
        above = self.kind == "upper" and self.scope in ("local", "global", "mean-field")
        return above and self.sound and self.value is not None


@dataclass(frozen=True)
class Curve:
    """One line of the figure: values by number of tokens.

    Attributes:
        name: What stands beside it.
        group: ``measured``, ``adversarial``, ``local certificate`` or ``bound``.
        points: ``(n, value, upper)``.
    """

    name: str
    group: str
    points: tuple[tuple[int, float, float], ...]


def rows_of_run(rows: Iterable[Measurement], bounds: Iterable[Bound]) -> list[BoundRow]:
    """The sandwich of a run folder: every row with a sigma, and what theorems say about it.

    Args:
        rows: Rows of layers (the map ``model`` has no theorems).
        bounds: Their side table.

    Returns:
        For each row what was measured (``adversarial`` where the input was built), then its
        bounds.
    """
    of: dict[str, list[Bound]] = {}
    for bound in bounds:
        of.setdefault(bound.id, []).append(bound)
    found = []
    for row in rows:
        if row.sigma is None or row.layer is None:
            continue
        found.append(_measured(row))
        found += [_asked(row, bound) for bound in of.get(row.id, [])]
    return found


def _measured(row: Measurement) -> BoundRow:
    given = row.input in GIVEN
    return BoundRow(
        theorem=MEASURED if given else ADVERSARIAL,
        statement="sigma at this input" if given else row.input,
        cite="",
        kind=MEASURED if given else "lower",
        scope="local" if given else "global",
        metric=row.metric,
        value=row.sigma,
        sigma=row.sigma,
        upper=row.upper,
        **_place(row),
    )


def _asked(row: Measurement, bound: Bound) -> BoundRow:
    shared = {k: v for k, v in vars(bound).items() if k not in ("id", "radius", "eps")}
    place = _place(row)
    if bound.radius is not None:
        place["radius"] = bound.radius
    made = BoundRow(applicable=bound.value is not None, **shared, **place)
    if not made.bounds_here or bound.metric != row.metric or not row.sigma:
        return made
    return replace(made, looseness=(bound.value or 0.0) / row.sigma)


def _place(row: Measurement) -> dict[str, Any]:
    names = ("model", "layer", "head", "map", "num_tokens", "sample")
    place: dict[str, Any] = {name: getattr(row, name) for name in names}
    return place | {"radius": row.radius_max or 0.0}


def best_of(rows: Iterable[BoundRow], *scopes: str) -> BoundRow | None:
    """The smallest sound upper bound of these scopes."""
    found = [row for row in rows if row.bounds_here and row.scope in scopes]
    return min(found, key=lambda row: row.value or 0.0, default=None)


def curves(rows: Sequence[BoundRow]) -> tuple[list[Curve], list[str]]:
    """Lines of one layer, and what is left out: bounds far off the scale.

    Several samples of one length become their geometric mean; equal bounds one line.
    """
    lines = [
        _curve("sigma, real text", MEASURED, [r for r in rows if r.theorem == MEASURED]),
        _curve("sigma, adversarial", ADVERSARIAL, [r for r in rows if r.theorem == ADVERSARIAL]),
        _curve("local certificate, real text", CERTIFICATE, _certificates(rows)),
    ]
    top = max((value for line in lines for _, value, _ in line.points), default=1.0)
    names = dict.fromkeys(
        r.theorem for r in rows if r.bounds_here and r.scope in ("global", "mean-field")
    )
    left_out: list[str] = []
    merged: list[Curve] = []
    for name in names:
        line = _curve(name, "bound", [r for r in rows if r.theorem == name])
        if min(value for _, value, _ in line.points) > _OFF_SCALE * top:
            left_out.append(f"{name} ({line.points[-1][1]:.1e})")
            continue
        same = next((m for m in merged if _close(m, line)), None)
        if same is None:
            merged.append(line)
        else:
            at = merged.index(same)
            merged[at] = Curve(f"{same.name} = {name}", "bound", same.points)
    return [line for line in [*lines, *merged] if line.points], left_out


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Places of labels near these values, at least ``gap`` (a ratio) apart, in their order.

    >>> [round(v, 2) for v in spread([1.0, 1.1, 8.0], 2.0)]
    [0.74, 1.48, 8.0]
    """
    order = sorted(range(len(values)), key=lambda k: values[k])
    clusters: list[list[int]] = []
    step = math.log(gap)

    def ends(cluster: list[int]) -> tuple[float, float]:
        middle = math.fsum(math.log(values[k]) for k in cluster) / len(cluster)
        half = (len(cluster) - 1) / 2 * step
        return middle - half, middle + half

    for k in order:
        clusters.append([k])
        while len(clusters) > 1 and ends(clusters[-2])[1] + step > ends(clusters[-1])[0]:
            last = clusters.pop()
            clusters[-1] += last
    places = [0.0] * len(values)
    for cluster in clusters:
        for i, k in enumerate(cluster):
            places[k] = math.exp(ends(cluster)[0] + i * step)
    return places


def _certificates(rows: Sequence[BoundRow]) -> list[BoundRow]:
    """The best local bound of every length and sample."""
    places = dict.fromkeys((r.num_tokens, r.sample) for r in rows)
    found = (
        best_of([r for r in rows if (r.num_tokens, r.sample) == place], "local") for place in places
    )
    return [row for row in found if row is not None]


def _curve(name: str, group: str, rows: Iterable[BoundRow]) -> Curve:
    by_length: dict[int, list[BoundRow]] = {}
    for row in rows:
        if row.value is not None and row.value > 0 and math.isfinite(row.value):
            by_length.setdefault(row.num_tokens, []).append(row)
    points = []
    for n, some in sorted(by_length.items()):
        values = [row.value or 0.0 for row in some]
        uppers = [row.upper or row.value or 0.0 for row in some]
        points.append((n, _mean(values), _mean(uppers)))
    return Curve(name, group, tuple(points))


def _mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def _close(one: Curve, other: Curve) -> bool:
    lengths = [n for n, *_ in one.points]
    if lengths != [n for n, *_ in other.points]:
        return False
    pairs: list[tuple[Any, Any]] = list(zip(one.points, other.points, strict=True))
    return all(1 / _SAME < a[1] / b[1] < _SAME for a, b in pairs)
