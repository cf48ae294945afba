"""The sandwich: the best lower value, the measured sigma and every bound of one and the same map.

Here capture, measurement, adversarial inputs and theorems meet; nothing is printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from lipscope.attacks import worst
from lipscope.engine.capture import Captured, captures
from lipscope.errors import InputError
from lipscope.linalg.norms import Metric
from lipscope.linalg.singular import top_singular_batch
from lipscope.models import LoadedModel
from lipscope.records.bound_rows import ADVERSARIAL, MEASURED, BoundRow
from lipscope.theorems import Bound, bounds_at, infinity_norm, max_token_norm
from lipscope.theorems.table import Map

if TYPE_CHECKING:
    from lipscope.charts.look import Chart

_STEPS_WITH_POSITIONS = 10  # of ascent from the text itself
METRICS: tuple[Metric, ...] = ("frobenius", "max-token", "infinity")
Told = Callable[[BoundRow], None]
_Allowed = tuple[float | None, float | None]


class Sandwich(Sequence[BoundRow]):
    """Rows of one or more layers, with their figure.

    Args:
        rows: Rows, those of one layer, head, length and sample together.

    >>> len(Sandwich([]))
    0
    """

    def __init__(self, rows: Sequence[BoundRow]) -> None:
        self._rows = list(rows)

    def __getitem__(self, index: Any) -> Any:
        """One row, or a `Sandwich` of some of them."""
        found = self._rows[index]
        return Sandwich(found) if isinstance(index, slice) else found

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[BoundRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<Sandwich: {len(self)} rows>"

    def parts(self) -> list[Sandwich]:
        """Rows of one layer, head, length and sample, in their order."""

        def place(row: BoundRow) -> tuple[Any, ...]:
            return row.layer, row.head, row.num_tokens, row.sample

        return [Sandwich(list(part)) for _, part in groupby(self._rows, place)]

    def plot(self) -> Chart:
        """The figure against the number of tokens, see `lipscope.charts.sandwich_chart`."""
        from lipscope.charts.sandwich import sandwich_chart

        return sandwich_chart(self._rows)

    def save(self, folder: str | Path) -> Path:
        """Rows as ``bounds.jsonl`` and the figure as SVG, PNG and HTML.

        Args:
            folder: Where; made if need be.

        Returns:
            The folder.
        """
        from lipscope.charts.look import save

        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = [row.to_json() + "\n" for row in self._rows]
            (folder / "bounds.jsonl").write_text("".join(lines), encoding="utf-8")
            chart = self.plot()
            for kind in ("svg", "png", "html"):
                save(chart, folder / f"sandwich.{kind}")
        except OSError as problem:
            raise InputError(
                f"`out` should be a folder that can be written. Found `{folder}`: "
                f"{problem.strerror}."
            ) from None
        return folder


def sandwich(
    model: str | LoadedModel = "minilm",
    data: str | Tensor | Mapping[str, Any] | None = None,
    *,
    layers: Sequence[int] | Literal["all"],
    lengths: Sequence[int] = (64,),
    samples: int = 1,
    map: str = "attention",
    per_head: bool = False,
    metric: str | None = None,
    radius: float | Literal["norm"] | None = None,
    sharp: bool = False,
    attack: bool = False,
    ascent_steps: int = 0,
    special_tokens: bool = True,
    seed: int = 0,
    allow_pickle: bool = False,
    told: Told | None = None,
) -> Sandwich:
    """Between which values the Lipschitz constant of a model's layers lies, and why.

    For every layer, length and sample: sigma with its interval, every theorem of the catalogue
    with its value or the reason why it has none, and, if asked for, the worst input found.

    Holds for families whose weights are read in closed form. A theorem is compared with a
    measurement in its own metric and map only.

    Args:
        model: A name for `load_model`, or a loaded model.
        data: Text or a batch; the default text if None.
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens; not for a batch.
        samples: Windows per length.
        map: ``attention``, ``heads`` or ``normed``.
        per_head: Ask about single query heads.
        metric: Only theorems in this metric, and sigma measured in it; all theorems and
            sigma in the Frobenius norm if None.
        radius: Largest token norm for bounds on all inputs; ``norm`` for the largest one
            after the norm that feeds the layer; that of the inputs if None. Not for the map
            ``normed``, whose bounds on all inputs hold for tokens of every norm from the
            smallest of the inputs on.
        sharp: Also the bounds that take seconds a head.
        attack: Also the worst adversarial input within the radius.
        ascent_steps: Steps of gradient ascent from the constructions and from the input
            itself; at least 10 for a layer whose logits depend on positions, for which there
            are hardly any constructions.
        special_tokens: Put the model's own special tokens around every window.
        seed: Seed of random starts, and of the weights of a random model.
        allow_pickle: Accept a checkpoint that exists only as a pickle.
        told: Called with every row as it comes.

    Returns:
        The rows.

    Raises:
        InputError: For every request that cannot be answered as asked.
    """
    part = _map(map, attack=attack, per_head=per_head)
    if metric is not None and metric not in METRICS:
        raise InputError(f"`metric` should be one of {', '.join(METRICS)}. Found `{metric}`.")
    _check_radius(radius, part)
    is_text = data is None or isinstance(data, str)
    found = list(
        captures(
            model,
            data,
            layers=layers,
            lengths=lengths if is_text else None,
            samples=samples if is_text else None,
            map="normed" if part == "normed" else "attention",
            special_tokens=special_tokens,
            seed=seed,
            allow_pickle=allow_pickle,
        )
    )
    rows: list[BoundRow] = []
    for layer in dict.fromkeys(c.layer for c in found):
        mine = [c for c in found if c.layer == layer]
        allowed = _allowed(mine, radius)
        for c in mine:
            ask = _Ask(c, allowed, part, next(m for m in METRICS if metric in (m, None)), seed)
            for row in ask.rows(metric, per_head=per_head, sharp=sharp):
                _keep(rows, row, told)
            if attack:
                _keep(rows, ask.adversarial(ascent_steps), told)
    return Sandwich(rows)


def radius_of(found: Sequence[Captured], radius: float | Literal["norm"] | None) -> float:
    """The radius that is meant: a number, that of the norm, or the largest of the inputs.

    Args:
        found: Inputs of one layer.
        radius: As in `sandwich`.

    Returns:
        The largest token norm.
    """
    if isinstance(radius, str):
        return found[0].radius_of_norm()
    return max(c.radius for c in found) if radius is None else radius


def _allowed(found: Sequence[Captured], radius: float | Literal["norm"] | None) -> _Allowed:
    """Of which tokens bounds on all inputs speak: up to a radius, or from a norm on."""
    if found[0].normed is None:
        return radius_of(found, radius), None
    norm = found[0].normed.constants
    return None, min(float(norm.size(c.x).min()) for c in found)


def sigmas(
    c: Captured, part: Map, *, per_head: bool, seed: int, tight: bool = False
) -> list[tuple[float, float]]:
    """``(sigma, upper)`` of a layer at its input, or of each of its heads.

    Args:
        c: The layer and its input.
        part: The map.
        per_head: Each query head alone.
        seed: Of the random starts.
        tight: Go on until the interval is narrow; for layers in float64.

    Returns:
        One pair, or one for each head.
    """
    heads: list[int | None] = [*range(c.attention.num_heads)] if per_head else [None]
    op = c.linearise(part, per_head=per_head)
    tops = top_singular_batch(op, [c.start(head, seed) for head in heads], tight=tight)
    return [(top.sigma, top.upper) for top in tops]


class _Ask:
    """All questions about one layer at one input."""

    def __init__(
        self, c: Captured, allowed: _Allowed, part: Map, metric: Metric, seed: int
    ) -> None:
        self.c, self.seed = c, seed
        self.radius, self.floor = allowed
        self.part: Map = part
        self.metric: Metric = metric
        self.about: dict[str, Any] = {
            "map": part,
            "model": c.model,
            "layer": c.layer,
            "num_tokens": len(c.x),
            "sample": c.sample,
            "radius": self.radius,
            "floor": self.floor,
        }

    def rows(self, metric: str | None, *, per_head: bool, sharp: bool) -> Iterator[BoundRow]:
        """What was measured, then every theorem; head by head where asked for."""
        heads: list[int | None] = [*range(self.c.attention.num_heads)] if per_head else [None]
        for head, (sigma, upper) in zip(heads, self._measured(per_head), strict=True):
            yield BoundRow(
                theorem=MEASURED,
                statement="sigma at this input",
                cite="",
                kind=MEASURED,
                scope="local",
                metric=self.metric,
                value=sigma,
                head=head,
                sigma=sigma,
                upper=upper,
                note=self._on_all_inputs(),
                **self.about,
            )
            asked = bounds_at(
                self.c.normed or self.c.attention,
                self.c.x,
                map="heads" if self.part == "heads" else "attention",
                head=head,
                radius=self.radius,
                floor=self.floor,
                metric=metric,  # pyright: ignore[reportArgumentType]
                sharp=sharp,
            )
            yield from (self._row(bound, sigma, head) for bound in asked)

    def adversarial(self, steps: int) -> BoundRow:
        """The worst input of the whole layer within the radius."""
        generator = torch.Generator().manual_seed(self.seed)
        assert self.radius is not None  # the map is `attention`
        if self.c.attention.positional:  # no construction places its tokens
            steps = max(steps, _STEPS_WITH_POSITIONS)
        found = worst(
            self.c.attention,
            num_tokens=len(self.c.x),
            radius=self.radius,
            restarts=0,
            steps=steps,
            start=[self.c.x],
            generator=generator,
        )[0]
        head = "" if found.head is None else f", head {found.head}"
        return BoundRow(
            theorem=ADVERSARIAL,
            statement=found.name + head,
            cite=found.cite,
            kind="lower",
            scope="global",
            metric="frobenius",
            value=found.sigma,
            applicable=found.sigma is not None,
            reason=found.reason or "",
            sigma=found.sigma,
            upper=found.upper,
            **self.about,
        )

    def _measured(self, per_head: bool) -> list[tuple[float, float | None]]:
        if self.metric == "frobenius":
            return [*sigmas(self.c, self.part, per_head=per_head, seed=self.seed)]
        norm = max_token_norm if self.metric == "max-token" else infinity_norm
        heads = range(self.c.attention.num_heads)
        if per_head:
            found = [norm(self.c.linearise_head(self.part, h)) for h in heads]
        else:
            found = [norm(self.c.linearise(self.part))]
        return [(each.lower, each.upper) for each in found]

    def _on_all_inputs(self) -> str:
        """What becomes of bounds for the map ``normed`` near tokens of norm 0."""
        if self.c.normed is None or self.floor is None:
            return ""
        norm, floor = self.c.normed.constants, self.floor
        ratio = norm.steepest(0.0) / norm.steepest(floor)
        reach = f"On the whole space they are {ratio:.3g} times as large (ε = {norm.eps:.2g})"
        if not math.isfinite(ratio):
            reach = "On the whole space there is none (ε = 0)"
        less = ", its mean taken away," if norm.centred else ""
        return f"Bounds on all inputs: no token{less} has a norm below {floor:.4g}. {reach}"

    def _row(self, bound: Bound, sigma: float, head: int | None) -> BoundRow:
        row = BoundRow(
            theorem=bound.theorem,
            statement=bound.statement,
            cite=bound.cite,
            kind=bound.kind,
            scope=bound.scope,
            metric=bound.metric,
            value=bound.value,
            applicable=bound.applicable,
            reason=bound.reason,
            note=bound.note,
            sound=bound.sound,
            head=head,
            **self.about,
        )
        if not row.bounds_here or bound.metric != self.metric or not sigma > 0:
            return row
        assert row.value is not None
        return replace(row, looseness=row.value / sigma)


def _keep(rows: list[BoundRow], row: BoundRow, told: Told | None) -> None:
    rows.append(row)
    if told is not None:
        told(row)


def _map(name: str, *, attack: bool, per_head: bool) -> Map:
    if name not in get_args(Map):
        raise InputError(
            f"`map` should be one of {', '.join(get_args(Map))}, of which theorems speak. Found "
            f"`{name}`."
        )
    if attack and (per_head or name != "attention"):
        raise InputError(
            "`attack` goes with the map `attention` and all heads together. Found "
            f"`map = {name}`{', per head' * per_head}."
        )
    return cast("Map", name)


def _check_radius(radius: float | str | None, part: Map) -> None:
    if radius is None:
        return
    if part == "normed":
        raise InputError(
            "`radius` should be left out for the map `normed`, whose bounds hold for tokens of "
            f"every norm from the smallest of the text on. Found `radius = {radius}`."
        )
    if radius == "norm":
        return
    if isinstance(radius, str) or not (radius > 0 and math.isfinite(radius)):
        raise InputError(
            f"`radius` should be a positive number, or `norm`. Found `radius = {radius}`."
        )
