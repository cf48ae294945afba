"""Jobs of a specification, each with an id determined by its question."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from lipscope.engine.checks import OF_TEXT
from lipscope.engine.spec import ADVERSARIAL, ASCENT, OPTIONS, REAL, Spec
from lipscope.models import WHOLE
from lipscope.records import stable_id

# Maps whose input may be captured under fused attention if weights are read in closed form.
FUSED = ("heads", "attention", "normed", "residual")
# Options shared by all questions of a specification.
_SHARED = tuple(name for name, one in OPTIONS.items() if one.metadata["named"])


class InputKey(NamedTuple):
    """A window of text, an entry of a batch or a picture, as identified in its rows."""

    num_tokens: int | None  # number of tokens; None if only the model knows
    sample: int  # index among inputs of the same length
    start: int | None  # first text token; None for a batch
    sha256: str  # digest of the token ids, or of the input tensor


class WindowKey(NamedTuple):
    """Identifies a forward pass of the model, which jobs share; fields as in `Job`."""

    model: int
    weights: int | None
    dtype: str
    fused: bool
    text: str
    item: int


class Job(NamedTuple):
    """A measurement, or one per head."""

    id: str  # digest of the question, the same for every verb
    model: int  # index of the model
    weights: int | None  # seed of the weights of a random model; None otherwise
    dtype: str  # floating type
    fused: bool  # whether fused attention may be used to capture the input
    text: str  # name of the source
    item: int  # index of the window among those of its source
    num_tokens: int | None  # number of tokens; None if only the model knows
    sample: int  # index among windows of the same length
    map: str  # name of the map
    layer: int | None  # index of the layer; None for maps of the whole model
    input: str  # ``real``, or the construction of the input
    radius: float | None  # largest token norm of a built input; None for that of the text
    metric: str  # name of the metric
    seed: int  # seed of the random starts

    @property
    def window(self) -> WindowKey:
        """The forward pass that the job shares with others."""
        return WindowKey(self.model, self.weights, self.dtype, self.fused, self.text, self.item)


class Shape(NamedTuple):
    """The numbers of layers and heads of a model."""

    layers: int  # number of attention layers
    # number of query heads of each layer if measured individually, else None
    heads: tuple[int, ...] | None


class Survey(NamedTuple):
    """The properties of a model that determine its jobs."""

    shape: Shape  # its layers and heads
    items: Mapping[str, Sequence[InputKey]]  # its inputs by name of the source
    revision: str | None  # commit, package version or digest of the weights, or None


def plan(spec: Spec, surveys: Sequence[Survey]) -> list[Job]:
    """All jobs of a run, grouped by model and then by window."""
    return [
        job
        for model, survey in enumerate(surveys)
        for window in _windows_of(spec, model, survey.items)
        for job in _of_window(spec, survey, window)
    ]


def _identity(spec: Spec, item: InputKey, asked: Mapping[str, Any]) -> str:
    """The id for all heads: a digest of everything that determines sigma and its interval."""
    parts = {name: getattr(spec, name) for name in _SHARED}
    if spec.causal is not None:
        parts["causal"] = spec.causal
    if asked["input"] in (ADVERSARIAL, ASCENT):
        parts["ascent_steps"] = spec.ascent_steps
    return stable_id({**parts, **asked, "item": item[1:]})


def _windows_of(
    spec: Spec, model: int, held: Mapping[str, Sequence[InputKey]]
) -> Iterator[tuple[Any, ...]]:
    random = spec.models[model].name.startswith("random:")
    fused = [f for f in (True, False) if _maps_of(spec, fused=f)]
    for first in product([model], spec.seeds if random else (None,), spec.dtypes, fused):
        for name, some in held.items():
            for index, item in enumerate(some):
                if REAL in spec.inputs or item.sample == _first_sample(some, item.num_tokens):
                    yield (*first, name, index, *item[:2])


def _maps_of(spec: Spec, *, fused: bool) -> list[str]:
    return [name for name in spec.maps if (name in FUSED) == fused]


def _of_window(spec: Spec, survey: Survey, window: tuple[Any, ...]) -> Iterator[Job]:
    model, weights, dtype, fused, text, index, _, sample = window
    seeds = spec.seeds if weights is None else (weights,)
    item, name = survey.items[text][index], (spec.models[model].name, survey.revision)
    layers = range(survey.shape.layers) if spec.layers is None else spec.layers
    for map in _maps_of(spec, fused=fused):
        first = sample == _first_sample(survey.items[text], item.num_tokens)
        asked = product([None] if map in WHOLE else layers, _inputs(spec, first))
        for (layer, (kind, radius)), metric, seed in product(asked, spec.metrics, seeds):
            asks = {"map": map, "metric": metric, "input": kind, "radius": radius}
            asks |= {"model": name, "layer": layer, "dtype": dtype, "seed": seed}
            if kind != REAL and radius is None:
                asks["radius"] = _radius_key(spec, survey.items[text])
            id = _identity(spec, item, asks)
            yield Job._make((id, *window, map, layer, kind, radius, metric, seed))


def _radius_key(spec: Spec, items: Sequence[InputKey]) -> Any:
    """The key of the token norms of a built input; None for those of its own window."""
    if spec.radius == "inputs":
        return [one.sha256 for one in items] if len(items) > 1 else None
    return None if spec.radius == "row" else spec.radius


def _first_sample(items: Sequence[InputKey], num_tokens: int | None) -> int:
    """Index of the first window of a length."""
    return min(one.sample for one in items if one.num_tokens == num_tokens)


def _inputs(spec: Spec, first: bool) -> Iterator[tuple[str, float | None]]:
    """Inputs of a window; built ones do not depend on it and come only with the first."""
    for kind in spec.inputs:
        if kind == REAL:
            yield kind, None
        elif first:
            yield from ((kind, None if r == OF_TEXT else float(r)) for r in spec.radii)


def row_ids(job: Job, shape: Shape) -> list[str]:
    """The ids of the rows of a job: its own, or one per head."""
    return [row_id(job.id, head) for head in heads_one_by_one(job, shape)]


def left_over(jobs: Sequence[Job], shapes: Sequence[Shape], done: Collection[str]) -> list[Job]:
    """The jobs with a missing row, for models of the given shapes."""
    return [job for job in jobs if not all(one in done for one in row_ids(job, shapes[job.model]))]


def heads_one_by_one(job: Job, shape: Shape) -> Sequence[int | None]:
    """Heads to measure individually; None for all together."""
    if shape.heads is None or job.layer is None:
        return [None]
    return range(shape.heads[job.layer])


def row_id(job: str, head: int | None) -> str:
    """The id of a row of a job: the job's own, or one per head."""
    return job if head is None else stable_id({"job": job, "head": head})
