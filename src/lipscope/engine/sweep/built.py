"""Inputs of a sweep that are built for a layer, and theorems asked about a row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.attacks import constructions as inputs
from lipscope.attacks.worst import worst
from lipscope.attention import Attention
from lipscope.engine.sweep.plan import Job
from lipscope.engine.sweep.spec import ADVERSARIAL, ASCENT, CONSTRUCTIONS, WITH_THEOREMS, Spec
from lipscope.errors import InputError
from lipscope.models import LayerMap, Sample
from lipscope.models.data.windows import digest
from lipscope.records.rows import Bound, Measurement
from lipscope.theorems import Theorem, bounds, catalogue

_RESTARTS = 4  # random starts of an ascent, besides the text itself
_NO_WEIGHTS = "its weights are not read in closed form"


def rebuilt(
    built: LayerMap, item: Sample, job: Job, spec: Spec
) -> tuple[LayerMap, Sample, list[str]]:
    """The map of a layer at the input that a job asks for.

    Args:
        built: The map at the text.
        item: The text's window.
        job: What is asked for.
        spec: The specification.

    Returns:
        The map and the sample with that input, and remarks on it.

    Raises:
        InputError: If it cannot be built for this layer.
    """
    if built.attention is None:
        raise InputError(f"`{job.input}` is not available for this layer: {_NO_WEIGHTS}.")
    radius = job.radius or float(torch.linalg.vector_norm(built.x, dim=-1).max())
    name = f"{job.seed}|{spec.models[job.model].name}|{job.layer}|{job.num_tokens}|{job.input}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(number)
    x, remark = _input(job, built.attention, built.x, radius, spec.ascent_steps, generator)
    with torch.no_grad():
        moved = replace(built, x=x, output=built(x))
    made = replace(item, kind=job.input, start=None, sha256=digest(x), tokens=None)
    return moved, made, [remark]


def _input(
    job: Job,
    layer: Attention,
    text: Tensor,
    radius: float,
    steps: int,
    generator: torch.Generator,
) -> tuple[Tensor, str]:
    """The tokens, and what built them."""
    size = {"num_tokens": len(text), "radius": radius}
    if job.input == ASCENT:
        options = {"restarts": _RESTARTS, "steps": steps, "generator": generator}
        return inputs.ascend(layer, start=text, **size, **options).x, f"radius {radius:.6g}"
    names = CONSTRUCTIONS if job.input == ADVERSARIAL else (job.input,)
    best = worst(layer, names=names, steps=0, generator=generator, **size)[0]
    if best.x is None or best.sigma is None:
        why = (best.reason or "sigma is not finite there").rstrip(".")
        raise InputError(f"`{job.input}` is not available for this layer: {why}.")
    head = "" if best.head is None else f", head {best.head}"
    return best.x, f"{best.name}{head}, radius {radius:.6g}"


def asked(row: Measurement, built: LayerMap, spec: Spec) -> tuple[Bound, ...]:
    """Every theorem of the specification about a row, with its value or why it has none.

    Args:
        row: The row.
        built: Its map at its input.
        spec: The specification.

    Returns:
        One record for each theorem of the row's metric; of all metrics for ``frobenius``.
    """
    if not spec.theorems or row.map not in WITH_THEOREMS or row.radius_max is None:
        return ()
    wanted = [
        one
        for one in catalogue()
        if one.name in spec.theorems and row.metric in ("frobenius", one.metric)
    ]
    found = _values(row, built, wanted)
    return tuple(replace(one, id=row.id, radius=row.radius_max) for one in found)


def _values(row: Measurement, built: LayerMap, wanted: Sequence[Theorem]) -> list[Bound]:
    if built.attention is None:
        return [one.record(None, _NO_WEIGHTS) for one in wanted]
    part = "heads" if row.map == "heads" else "attention"
    layer, names = built.attention.in_double(), [one.name for one in wanted]
    try:
        return bounds(layer, built.x, part=part, head=row.head, sharp=True, names=names)
    except (RuntimeError, MemoryError, InputError) as problem:  # the measured row stays
        reason = " ".join(str(problem).split())[:300]
        return [one.record(None, reason) for one in wanted]
