"""From a specification to jobs: each with an id that depends on what it asks for alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from lipscope.engine.sweep.checks import OF_TEXT
from lipscope.engine.sweep.spec import REAL, Spec
from lipscope.records.rows import Measurement, version

# Maps whose input may be captured under fused attention where weights are read in closed form.
FUSED = ("heads", "attention", "normed", "residual")
# Entries of which a job holds one value, and those that change no row.
_AXES = ("models", "texts", "layers", "maps", "metrics", "inputs", "radii", "dtypes", "seeds")
_IDLE = ("lengths", "samples", "memory", "device", "tokens", "allow_pickle")


class Job(NamedTuple):
    """One measurement, or one for each head.

    Attributes:
        id: Digest of everything that determines the rows.
        model: Index of the model.
        weights: Seed of the weights of a random model; None elsewhere.
        dtype: Floating type.
        fused: Whether fused attention may be used to capture the input.
        text: Name of the text.
        num_tokens: Number of tokens.
        sample: Index of the window.
        map: Name of the map.
        layer: Index of the layer; None for the map ``model``.
        input: ``real``, or what builds the input.
        radius: Largest token norm of a built input; None for that of the text.
        metric: Name of the metric.
        seed: Seed of the random starts.
    """

    id: str
    model: int
    weights: int | None
    dtype: str
    fused: bool
    text: str
    num_tokens: int
    sample: int
    map: str
    layer: int | None
    input: str
    radius: float | None
    metric: str
    seed: int

    @property
    def window(self) -> tuple[Any, ...]:
        """What jobs that share a forward pass of the model have in common."""
        return self[1:8]


class Shape(NamedTuple):
    """What a model was found to have.

    Attributes:
        layers: Number of attention layers.
        heads: Query heads that are measured one by one; None if they are not.
    """

    layers: int
    heads: int | None


def plan(spec: Spec, shapes: Sequence[Shape]) -> list[Job]:
    """All jobs of a sweep; those of one model, and within it of one window, stand together.

    Args:
        spec: The specification.
        shapes: Those of its models, in their order.

    Returns:
        The jobs.
    """
    shared = {k: v for k, v in spec.as_dict().items() if k not in (*_AXES, *_IDLE)}
    if spec.windows == "spread":  # where a window starts depends on these
        shared |= {"longest": max(spec.lengths), "samples": spec.samples}
    begun = hashlib.sha256(json.dumps(shared, sort_keys=True).encode())

    def with_id(job: Job) -> Job:
        digest = begun.copy()
        asked = [spec.models[job.model].name, spec.texts[job.text], *job[2:5], *job[6:]]
        digest.update(json.dumps(asked).encode())
        return job._replace(id=digest.hexdigest()[:16])

    return [
        with_id(job)
        for model, shape in enumerate(shapes)
        for window in _windows(spec, model)
        for job in _of_window(spec, shape, window)
    ]


def _windows(spec: Spec, model: int) -> Iterator[tuple[Any, ...]]:
    random = spec.models[model].name.startswith("random:")
    fused = [f for f in (True, False) if _maps(spec, fused=f)]
    axes = [spec.seeds if random else (None,), spec.dtypes, fused]
    samples = range(spec.samples if REAL in spec.inputs else 1)
    yield from product([model], *axes, spec.texts, spec.lengths, samples)


def _maps(spec: Spec, *, fused: bool) -> list[str]:
    return [name for name in spec.maps if (name in FUSED) == fused]


def _of_window(spec: Spec, shape: Shape, window: tuple[Any, ...]) -> Iterator[Job]:
    _, weights, _, fused, _, _, sample = window
    seeds = spec.seeds if weights is None else (weights,)
    inputs = [*_inputs(spec, sample)]
    for name in _maps(spec, fused=fused):
        layers = range(shape.layers) if spec.layers is None else spec.layers
        asked = product([None] if name == "model" else layers, inputs, spec.metrics, seeds)
        for layer, (kind, radius), metric, seed in asked:
            yield Job._make(("", *window, name, layer, kind, radius, metric, seed))


def _inputs(spec: Spec, sample: int) -> Iterator[tuple[str, float | None]]:
    """Inputs of one window: those that are built do not depend on it, and come once."""
    for kind in spec.inputs:
        if kind == REAL:
            yield kind, None
        elif sample == 0:
            yield from ((kind, None if r == OF_TEXT else float(r)) for r in spec.radii)


def probes(spec: Spec, model: int) -> list[Job]:
    """One job for each map, and one for each further text: what shows whether all can be had."""
    found: list[Job] = []
    for fused in (True, False):
        for text in spec.texts:
            weights = spec.seeds[0] if spec.models[model].name.startswith("random:") else None
            place = (model, weights, spec.dtypes[0], fused, text, spec.lengths[0], 0)
            jobs = _of_window(spec, Shape(1, None), place)
            found += {job.map: job for job in jobs}.values()
    return found


def row_ids(job: Job, shape: Shape) -> list[str]:
    """The ids of the rows of a job: its own, or one for each head."""
    heads = [None] if shape.heads is None else range(shape.heads)
    return [row_id(job, head) for head in heads]


def row_id(job: Job, head: int | None) -> str:
    """The id of a row of a job."""
    if head is None:
        return job.id
    return hashlib.sha256(f"{job.id}|{head}".encode()).hexdigest()[:16]


def failed_rows(
    spec: Spec, job: Job, shape: Shape, error: str, about: dict[str, Any]
) -> list[Measurement]:
    """The rows of a job that has no answer.

    Args:
        spec: The specification.
        job: The job.
        shape: That of its model.
        error: What went wrong, in one line.
        about: Revision and weights of its model, where known.

    Returns:
        One row, or one for each head.
    """
    model = spec.models[job.model]
    heads = [None] if shape.heads is None else [*range(shape.heads)]
    empty = dict.fromkeys(
        ("sigma", "upper", "solver_residual", "relative", "top_token", "top_share")
    )
    empty |= dict.fromkeys(("radius_max", "radius_rms", "input_norm", "output_norm"))
    return [
        Measurement(
            id=row_id(job, head),
            model=model.name,
            revision=about.get("revision"),
            weights=_weights(job, about),
            layer=job.layer,
            head=head,
            map=job.map,
            metric=job.metric,
            move=spec.move,
            read=spec.read,
            input=OF_TEXT if job.input == REAL else job.input,
            num_tokens=job.num_tokens,
            sample=job.sample,
            delta=spec.delta,
            status="failed",
            products=0,
            seconds=0.0,
            dtype=job.dtype,
            device=spec.device,
            seed=job.seed,
            tokens_sha256="",
            version=version(),
            error=" ".join(error.split())[:300],
            text=job.text,
            step=model.step,
            **empty,
        )
        for head in heads
    ]


def _weights(job: Job, about: dict[str, Any]) -> str:
    known = about.get("weights") or "unknown"
    return known if job.weights is None else f"random, seed {job.weights}"
