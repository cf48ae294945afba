"""Theorems about a row, and inputs built for a layer, from weights in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipscope.attacks import WorstInput, ascend, worst
from lipscope.attention import Attention
from lipscope.display import rounded_up
from lipscope.engine.plan import Job
from lipscope.engine.spec import ADVERSARIAL, ASCENT, WITH_THEOREMS, Spec
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models import ExactNorm, LayerMap, Norms, Sample, digest
from lipscope.records import Bound, Measurement
from lipscope.theorems import Normed, Residual, bounds_at, catalogue

_RESTARTS = 4  # random starts of an ascent, besides the text itself
_ROUGH = 0.05  # tolerance for comparing candidates; sigma is measured anew at the chosen input
_NO_WEIGHTS = "its weights are not read in closed form"
InClosedForm = Attention | Normed | Residual


# --- built inputs


class BuiltInput(NamedTuple):
    """An input built for a layer."""

    x: Tensor  # its tokens
    remark: str  # how it was built
    # all candidates, worst first; empty if there was only one
    tried: Sequence[WorstInput] = ()


def built_input(built: LayerMap, job: Job, spec: Spec, radius: float) -> BuiltInput:
    """The input that a job builds for a layer; ``adversarial``: the worst known one."""
    layer = built.attention
    if layer is None:
        raise InputError(f"`{job.input}` is not available for this layer: {_NO_WEIGHTS}.")
    name = f"{job.seed}|{spec.models[job.model].name}|{job.layer}|{job.num_tokens}|{job.input}"
    size: dict[str, Any] = {"num_tokens": len(built.x), "radius": radius}
    size["generator"] = start_named(name)
    climb: dict[str, Any] = {"restarts": _RESTARTS, "steps": spec.ascent_steps}
    if job.input == ASCENT:
        found = ascend(layer, **size, **climb, start=built.x)
        return BuiltInput(found.x, f"radius {radius:.6g}")
    if job.input == ADVERSARIAL:
        tried = worst(layer, **size, tol=_ROUGH, **climb, given=[built.x])
    else:
        tried = worst(layer, **size, tol=_ROUGH, names=(job.input,), steps=0)
    best = tried[0]
    if best.x is None or best.sigma is None:
        why = (best.reason or "sigma is not finite there").rstrip(".")
        raise InputError(f"`{job.input}` is not available for this layer: {why}.")
    head = "" if best.head is None else f", head {best.head}"
    return BuiltInput(best.x, f"{best.name}{head}, radius {radius:.6g}", tried)


def moved_to(built: LayerMap, item: Sample, job: Job, x: Tensor) -> tuple[LayerMap, Sample]:
    """A map and its sample at another input."""
    with torch.no_grad():
        moved = replace(built, x=x, output=built(x))
    return moved, replace(item, kind=job.input, start=None, sha256=digest(x), tokens=None)


# --- the layer in the form that theorems take


def of_norms(layer: Attention, norms: Norms) -> Residual:
    """The residual map of attention and its norms, each norm in the precision of its input.

    A scale is folded into the output projection, or into the norm after attention.
    """
    before, outer = (None if one is None else ExactNorm(one) for one in (norms.before, norms.outer))
    second = None if norms.second is None else ExactNorm(norms.second, norms.scale)
    if norms.scale is not None and second is None:
        layer = _scaled(layer, norms.scale.double().cpu())
    return Residual(layer if before is None else Normed(layer, before), second, outer)


def _scaled(layer: Attention, scale: Tensor) -> Attention:
    """The layer in float64, with its output scaled by a number or one number per channel."""
    layer = layer.in_double()
    fields = layer.fields()
    concat, bias = layer.num_heads * layer.value_width, fields.get("output_bias")
    output = torch.eye(concat, dtype=torch.float64) if layer.output is None else layer.output
    changes: dict[str, Tensor] = {"output": scale.reshape(-1, 1) * output}
    if bias is not None:
        changes["output_bias"] = scale * bias
    return layer.replace(**changes)


def norm_in_front(layer: InClosedForm) -> Normed | None:
    """The layer with the norm that precedes it, or None."""
    branch = layer.branch if isinstance(layer, Residual) else layer
    return branch if isinstance(branch, Normed) else None


def reach_of_bounds(layer: InClosedForm, x: Tensor, floor: float | None) -> str:
    """A remark on how bounds through a preceding norm grow near tokens of norm 0."""
    front = norm_in_front(layer)
    assert front is not None
    norm = front.constants
    floor = float(norm.size(x).min()) if floor is None else floor
    ratio = norm.steepest(0.0) / norm.steepest(floor)
    most = "at most " * isinstance(layer, Residual)  # the identity does not grow
    times = f"{most}{rounded_up(ratio, 3):.3g} times"
    reach = f"On the whole space they are {times} as large (ε = {norm.eps:.2g})"
    if not math.isfinite(ratio):
        reach = "On the whole space there is none (ε = 0)"
    less = ", its mean taken away," if norm.centred else ""
    return f"Bounds on all inputs: no token{less} has a norm below {rounded_up(floor):.4g}. {reach}"


def theorems_about(
    row: Measurement,
    built: LayerMap,
    spec: Spec,
    view: Callable[[], tuple[InClosedForm, tuple[float | None, float | None]]],
) -> tuple[Bound, ...]:
    """Every theorem of the specification for a row, with its value or the reason for having none.

    Theorems in the row's metric; in all metrics for ``frobenius``. ``view`` returns the layer in
    the form that theorems take, with the radius and the floor for bounds on all inputs: None for
    those of the row's own input.
    """
    if row.map not in WITH_THEOREMS or row.radius_max is None or not row.sigma:
        return ()
    wanted = [
        one
        for one in catalogue()
        if one.name in spec.theorems and row.metric in ("frobenius", one.metric)
    ]
    try:
        layer, (radius, floor) = view()
        found = bounds_at(
            layer.in_double(),
            built.x,
            map="heads" if row.map == "heads" else "attention",
            head=row.head,
            radius=radius,
            floor=floor,
            sharp=spec.sharp,
            names=[one.name for one in wanted],
        )
    except (RuntimeError, MemoryError, InputError) as problem:  # keep the measured row
        reason = " ".join(str(problem).split())[:300].rstrip(".")
        found = [one.record(None, reason) for one in wanted]
    whole = row.move == row.read == "all"  # sigma of some tokens may be below a lower bound
    none = {"value": None, "reason": "it is a lower bound where all tokens move and are read"}
    return tuple(
        replace(one, id=row.id, **({} if whole or one.kind == "upper" else none)) for one in found
    )
