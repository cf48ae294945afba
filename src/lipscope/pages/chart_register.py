"""The register of the page's charts: each in the page, where scripts fill it, and as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from lipscope.charts import (
    TITLES,
    Chart,
    Frame,
    Grown,
    Quantity,
    bounds_chart,
    depth_chart,
    exponents_chart,
    focus_chart,
    gains_chart,
    heads_chart,
    layers_chart,
    product_chart,
    push_chart,
    radius_chart,
    ratios_chart,
    shifts_chart,
    sides_chart,
    signals_chart,
    slopes_chart,
    training_chart,
)
from lipscope.pages.content import Content
from lipscope.pages.items import REAL

Records = list[dict[str, Any]]
FILL = Frame(width="container")


@dataclass(frozen=True)
class Blank:
    """All that a chart without data is told: the layers, and where the axis of steps turns."""

    layers: tuple[str, ...]
    turn: float | None = None


@dataclass(frozen=True)
class View:
    """One setting as its files show it: its layers together, or its first head.

    Attributes:
        content: What the report is about.
        s: Index of the setting.
        source: Folder, where several have rows of one curve.
    """

    content: Content
    s: int
    source: str | None = None

    @cached_property
    def setting(self) -> dict[str, Any]:
        """The setting."""
        return self.content.points.settings[self.s]

    @property
    def layers(self) -> list[str]:
        """Its layers."""
        return self.setting["layers"]

    @property
    def head(self) -> int | None:
        """The head that is shown; None for all together."""
        return None if self.setting["together"] else self.setting["heads"][0]

    def frame(self, kind: str | None = None, layer: str | None = None) -> Frame:
        """The head, with the axes of rows on real inputs or of ``every`` row, where asked for."""
        axes = self.setting["axes"]["all" if self.head is None else "heads"]
        return Frame(axes[kind] if kind else None, layer, self.head, legend=True)

    def here(self, record: dict[str, Any]) -> bool:
        """Whether a record is of this setting and folder."""
        return record["s"] == self.s and record["source"] in (None, self.source)

    def mine(self, records: Records, kind: str | None = None) -> Records:
        """Records of this setting, folder and head; only those of one kind of input."""
        some = [r for r in records if self.here(r) and r["head"] == self.head]
        return [r for r in some if kind is None or r["kind"] == kind]

    @property
    def built(self) -> list[str]:
        """Kinds of inputs that were built and have something to draw."""
        return list(
            dict.fromkeys(
                m["kind"] for m in self.mine(self.content.points.means) if m["kind"] != REAL
            )
        )

    @property
    def fits(self) -> Records:
        """Exponents on real inputs, and on the first kind that was built."""
        kinds = (REAL, "rest", *self.built[:1])
        return [f for f in self.mine(self.content.points.fits) if f["kind"] in kinds]

    @cached_property
    def points(self) -> Records:
        """Points on real inputs."""
        return self.mine(self.content.points.points, REAL)

    @cached_property
    def means(self) -> Records:
        """Means over real inputs."""
        return self.mine(self.content.means, REAL)

    @property
    def slopes(self) -> Records:
        """Slopes between neighbouring lengths."""
        return [
            {**f, "slope": slope, "from": a, "span": f"{a}–{b}"}
            for f in self.mine(self.content.points.fits)
            for slope, a, b in zip(f["local"], f["lengths"], f["lengths"][1:], strict=False)
        ]

    @property
    def cells(self) -> Records:
        """Means of single heads at the largest length."""
        means = self.content.means
        some = [m for m in means if self.here(m) and m["kind"] == REAL and m["head"] is not None]
        return [m for m in some if m["n"] == max(c["n"] for c in some)]


@dataclass(frozen=True)
class Shown:
    """One chart of the page.

    Attributes:
        name: Of its files.
        page: Draws it without data: what a script of the page fills, under the name ``spec``.
        spec: Its name in the page's scripts; None where another chart's serves.
        records: What it draws of a setting; without any there is no file. None for a chart of
            which there is not one for each setting.
        draw: Draws these records.
    """

    name: str
    spec: str | None = None
    page: Callable[[Blank], Chart] | None = None
    records: Callable[[View], Records] | None = None
    draw: Callable[[View, Records], Chart] | None = None


def _focus(view: View, means: Records) -> Chart:
    """The layer of largest sigma at the largest length, in front of the others."""
    last = max(m["n"] for m in means)
    worst = max((m for m in means if m["n"] == last), key=lambda m: m["sigma"])["layer"]
    points = [p for p in view.points if p["layer"] == worst]
    return focus_chart(points, means, view.frame(REAL, worst))


def _growth(view: View, means: Records, kind: str = REAL) -> Chart:
    points = view.mine(view.content.points.points, kind)
    return layers_chart(points, means, view.layers, view.frame("every"))


def built_chart(view: View, kind: str) -> Chart:
    """Growth on the inputs of one kind that was built."""
    return _growth(view, view.mine(view.content.points.means, kind), kind)


def _heads(quantity: Quantity) -> Shown:
    name = f"heads-{quantity}"
    return Shown(
        name,
        name,
        lambda b: heads_chart(None, b.layers, FILL, quantity=quantity),
        lambda v: v.cells,
        lambda v, cells: heads_chart(cells, v.layers, Frame(legend=True), quantity=quantity),
    )


def _grown(name: str, grown: Grown) -> Shown:
    return Shown(
        name,
        name,
        lambda b: layers_chart(None, None, b.layers, FILL, grown=grown),
        lambda v: [m for m in v.means if m[grown]],
        lambda v, means: layers_chart(v.points, means, v.layers, v.frame(REAL), grown=grown),
    )


def _signal(scale: Literal["log", "linear"]) -> Shown:
    name, size = f"signal-{scale}", replace(FILL, height=200)
    return Shown(name, name, lambda b: signals_chart(None, None, b.layers, size, scale=scale))


SHOWN: tuple[Shown, ...] = (
    Shown(
        "sigma",
        "focus",
        lambda b: focus_chart(None, None, FILL),
        lambda v: v.means,
        _focus,
    ),
    Shown(
        "growth",
        "layers",
        lambda b: layers_chart(None, None, b.layers, FILL),
        lambda v: v.means,
        _growth,
    ),
    Shown(
        "exponents",
        "exponents",
        lambda b: exponents_chart(None, b.layers, FILL),
        lambda v: v.fits,
        lambda v, fits: exponents_chart(fits, v.layers, v.frame(), *v.built[:1]),
    ),
    Shown(
        "slopes",
        "slopes",
        lambda b: slopes_chart(None, b.layers, FILL),
        lambda v: v.slopes,
        lambda v, slopes: slopes_chart(slopes, v.layers, v.frame()),
    ),
    *map(_heads, TITLES),
    _grown("radius-n", "radius"),
    _grown("rank", "rank"),
    Shown(
        "sigma-radius",
        "sigma-radius",
        lambda b: radius_chart(None, b.layers, FILL),
        lambda v: [p for p in v.points if p["radius"]],
        lambda v, points: radius_chart(points, v.layers, v.frame()),
    ),
    Shown(
        "training",
        "training",
        lambda b: training_chart(None, None, b.layers, FILL, turn=b.turn),
    ),
    *map(_signal, ("log", "linear")),
    Shown("push", "push", lambda b: push_chart(None, None, FILL)),
    Shown("bounds", "bounds", lambda b: bounds_chart(None, None, replace(FILL, height=380))),
    Shown("compare", "sides", lambda b: sides_chart(None, FILL)),
    Shown("ratios", "ratios", lambda b: ratios_chart(None, b.layers, FILL)),
    Shown("shifts", "shifts", lambda b: shifts_chart(None, b.layers, FILL)),
    Shown("depth", "depth", lambda b: depth_chart(None, None, FILL)),
    Shown("products", "products", lambda b: product_chart(None, None, FILL)),
    Shown("gains", "gains", lambda b: gains_chart(None, FILL)),
)
"""Every chart of the page. One more is its own file, an entry here and one in ``charts.js``."""
