"""The worst inputs of a layer: every construction for every head, and gradient ascent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attacks.ascent import ascend, check_size, clamp
from lipscope.attacks.constructions import (
    Construction,
    constant,
    dominant_token,
    gamma_star,
    l2_opposed,
    large_radius,
    opposed_pair,
    quadratic,
    two_cluster,
    unbalanced,
)
from lipscope.attention import Attention, joined
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg import (
    USUAL_STEPS,
    TopSingular,
    together,
    top_singular,
    top_singular_batch,
)
from lipscope.measures import Grouped, grouped, weighted
from lipscope.theorems import DERIVED

# One construction is one function; those that place tokens by a head take its index.
PER_HEAD: dict[str, Callable[..., Construction]] = {
    "two_cluster": two_cluster,
    "gamma_star": gamma_star,
    "unbalanced": unbalanced,
    "dominant_token": dominant_token,
    "opposed_pair": opposed_pair,
    "quadratic": quadratic,
    "large_radius": large_radius,
    "l2_opposed": l2_opposed,
}
PER_LAYER: dict[str, Callable[..., Construction]] = {"constant": constant}
_TOGETHER, _MEMORY = 12, 2**28  # inputs whose products are one, and bytes of what they keep
_CLIMBED = 4  # kinds of inputs, the worst ones, from which an ascent goes on
KNOWN, DRAWN = "ascent from known inputs", "ascent from random starts"


@dataclass(frozen=True, repr=False)
class WorstInput(Shown):
    """One input and sigma of the whole layer there, or why it is not available."""

    name: str  # of the construction, `KNOWN`, `DRAWN`, or ``given`` for an input that was given
    statement: str  # where it comes from
    cite: str  # key of the bibliography, or "derived here"
    head: int | None  # head that placed the tokens, or None
    sigma: float | None  # lower end of the interval; None if not available or not finite
    upper: float | None  # upper end, valid with probability ``0.99``
    radius_max: float | None  # largest token norm
    # as in `Construction`: about the head's contribution, or the whole layer
    predicted: float | None
    x: Float[Tensor, "n d"] | None  # the input, or None
    v: Float[Tensor, "n d"] | None  # top right singular vector, for `confirm`, or None
    reason: str | None = None  # why it is not available, the solver's note if it has one, or None


def worst(
    layer: Attention,
    *,
    num_tokens: int,
    radius: float,
    names: Collection[str] | None = None,
    restarts: int = 4,
    steps: int = 40,
    given: Sequence[Tensor] = (),
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> list[WorstInput]:
    """Sigma of the whole layer at all inputs that are known to be bad, worst first.

    These are every construction for every head, the inputs that are given, the end of an ascent
    from the worst inputs of the four worst kinds, given ones a kind, and the end of another one
    from random starts. Holds for every layer; what cannot be built for it follows last, with the
    reason. Constructions are compared in float32; the best of each kind, and what overflows there,
    is measured as the layer is. Twelve heads of width 32 at n = 64 take about ten seconds on
    two cores.

    Args:
        layer: The layer; the map is ``attention``, all heads with the projection.
        restarts: Random starts of the second ascent.
        given: Inputs ``(n, d)`` besides, such as real text; tokens beyond the radius are scaled.
        tol: Tolerance of the measurements.

    Returns:
        One row per construction and head, per given input, and per ascent. The first one is
        measured again, from a start that its choice has not seen: the largest of many intervals
        misses more often.
    """
    check_size(num_tokens, radius)
    rough = copy.deepcopy(layer).float()  # twice as fast
    built = list(_all(layer, num_tokens, radius, names))
    made = [one for one in built if isinstance(one, Construction)]
    tops = _tops(rough, [one.x for one in made], tol, generator)
    rows = [one for one in built if isinstance(one, WorstInput)]
    rows += [
        _worst_row(_about(one), one.x, top, one.predicted)
        for one, top in zip(made, tops, strict=True)
    ]
    best = {row.name: row for row in sorted(rows, key=_by_sigma, reverse=True)}
    rows = [
        _measured(layer, _about(row), row.x, tol, generator, row.predicted)
        if row.x is not None and (row is best[row.name] or row.sigma is None)
        else row
        for row in rows
    ]
    about = ("given", "the input that was given, within the radius", "", None)
    rows += [_measured(layer, about, clamp(x, radius), tol, generator) for x in given]
    rows.sort(key=_by_sigma)
    if steps:
        size: dict[str, Any] = {"num_tokens": num_tokens, "radius": radius, "steps": steps}
        known = dict[str, Tensor]()
        for row in rows:
            if row.x is not None and row.sigma is not None:
                known.setdefault(row.name, row.x)
        starts = {KNOWN: (0, [*known.values()][:_CLIMBED]), DRAWN: (restarts, [])}
        for name, (count, some) in starts.items():
            if count or some:
                found = ascend(layer, **size, restarts=count, start=some, generator=generator)
                about = (name, "gradient ascent", DERIVED, None)
                rows.append(_worst_row(about, found.x, found.top, None))
    rows.sort(key=_by_sigma)
    first = rows[0]
    if first.x is not None and first.sigma is not None:  # from a start its choice has not seen
        first = _measured(layer, _about(first), first.x, tol, generator, first.predicted)
    return [first, *rows[1:]]


def _all(
    layer: Attention, num_tokens: int, radius: float, names: Collection[str] | None
) -> Iterator[Construction | WorstInput]:
    wanted = {*PER_LAYER, *PER_HEAD} if names is None else names
    for name, build in PER_LAYER.items():
        if name not in wanted:
            continue
        yield _try(name, None, partial(build, layer, num_tokens=num_tokens, radius=radius))
    for name, build in PER_HEAD.items():
        if name not in wanted:
            continue
        made = [
            _try(name, h, partial(build, layer, head=h, num_tokens=num_tokens, radius=radius))
            for h in range(layer.num_heads)
        ]
        # What fails for the layer as such is said once.
        reasons = {one.reason if isinstance(one, WorstInput) else None for one in made}
        if len(made) > 1 and len(reasons) == 1 and isinstance(made[0], WorstInput):
            made = [replace(made[0], head=None)]
        yield from made


def _try(
    name: str, head: int | None, build: Callable[[], Construction]
) -> Construction | WorstInput:
    try:
        return build()
    except InputError as why:
        reason = str(why).removeprefix("not available: ")
        return WorstInput(name, "", "", head, None, None, None, None, None, None, reason)


def _about(one: Construction | WorstInput) -> tuple[str, str, str, int | None]:
    return one.name, one.statement, one.cite, one.head


def _measured(
    layer: Attention,
    about: tuple[str, str, str, int | None],
    x: Tensor,
    tol: float,
    generator: torch.Generator | None,
    predicted: float | None = None,
) -> WorstInput:
    (top,) = _tops(layer, [x], tol, generator)
    return _worst_row(about, x, top, predicted)


def _tops(
    layer: Attention, inputs: Sequence[Tensor], tol: float, generator: torch.Generator | None
) -> list[TopSingular]:
    """Sigma of one layer at several inputs, at the cost of their different tokens where it can.

    Small ones of one size share their products.
    """
    inputs = [x.to(layer.query.dtype) for x in inputs]
    if inputs:
        with torch.no_grad():
            layer.project(inputs[0])  # may refuse so many tokens, which groups hide
    groups = [grouped(layer, x) for x in inputs]
    sizes = [len(x if g is None else g.tokens) for x, g in zip(inputs, groups, strict=True)]
    found = dict[int, TopSingular]()
    for n in sorted(set(sizes)):
        some = [i for i, size in enumerate(sizes) if size == n]
        kept = 2 * USUAL_STEPS * n * layer.query.shape[1] + 4 * layer.num_heads * n**2
        most = _MEMORY // (kept * layer.query.element_size())
        most = max(1, min(_TOGETHER, most))
        for k in range(0, len(some), most):
            part = some[k : k + most]
            sites = [(inputs[i], groups[i]) for i in part]
            found |= zip(part, _tops_of(layer, sites, tol, generator), strict=True)
    return [found[i] for i in range(len(inputs))]


def _tops_of(
    layer: Attention,
    sites: Sequence[tuple[Tensor, Grouped | None]],
    tol: float,
    generator: torch.Generator | None,
) -> list[TopSingular]:
    """Sigma at inputs of so many different tokens."""
    at = [
        layer.linearise(x) if g is None else layer.linearise(g.tokens, log_weights=g.log_weights)
        for x, g in sites
    ]
    weights = torch.stack([x.new_zeros(len(x)) if g is None else g.log_weights for x, g in sites])
    shared = together(lambda some: joined([at[i] for i in some]), at) if len(at) > 1 else None
    if shared is None:
        pairs = zip(at, weights, strict=True)
        tops = [top_singular(weighted(op, w), tol=tol, generator=generator) for op, w in pairs]
    else:
        op = weighted(shared, weights)
        tops = top_singular_batch(op, [generator] * len(at), tol=tol)
    return [
        top if g is None else replace(top, u=g.spread(top.u), v=g.spread(top.v))
        for top, (_, g) in zip(tops, sites, strict=True)
    ]


def _worst_row(
    about: tuple[str, str, str, int | None], x: Tensor, top: TopSingular, predicted: float | None
) -> WorstInput:
    radius = float(torch.linalg.vector_norm(x, dim=-1).max())
    if top.status == "non_finite":
        return WorstInput(*about, None, None, radius, predicted, x, None, top.note)
    return WorstInput(*about, top.sigma, top.upper, radius, predicted, x, top.v, top.note)


def _by_sigma(row: WorstInput) -> float:
    return float("inf") if row.sigma is None else -row.sigma
