"""From a specification to jobs: each with an id that depends on its question alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from lipscope.engine.checks import OF_TEXT
from lipscope.engine.spec import ADVERSARIAL, ASCENT, OPTIONS, REAL, Spec
from lipscope.errors import InputError
from lipscope.models import WHOLE
from lipscope.records import stable_id

# Maps whose input may be captured under fused attention where weights are read in closed form.
FUSED = ("heads", "attention", "normed", "residual")
# What every question of a specification has in common.
_SHARED = tuple(name for name, one in OPTIONS.items() if one.metadata["named"])


class InputKey(NamedTuple):
    """A window of text, an entry of a batch or a picture, as its rows name it.

    Attributes:
        num_tokens: Number of tokens; None where only the model knows.
        sample: Index among those of one length.
        start: First text token; None for a batch.
        sha256: Digest of the token ids, or of the input tensor.
    """

    num_tokens: int | None
    sample: int
    start: int | None
    sha256: str


class WindowKey(NamedTuple):
    """What jobs that share a forward pass of the model have in common; as in `Job`."""

    model: int
    weights: int | None
    dtype: str
    fused: bool
    text: str
    item: int


class MapKey(NamedTuple):
    """Which map at which input that was given; as in `Job`."""

    window: WindowKey
    map: str
    layer: int | None


class Job(NamedTuple):
    """One measurement, or one for each head.

    Attributes:
        id: Digest of the question, the same whichever verb asks it.
        model: Index of the model.
        weights: Seed of the weights of a random model; None elsewhere.
        dtype: Floating type.
        fused: Whether fused attention may be used to capture the input.
        text: Name of the source.
        item: Index of the window among those of its source.
        num_tokens: Number of tokens; None where only the model knows.
        sample: Index among the windows of one length.
        map: Name of the map.
        layer: Index of the layer; None for the maps of the whole model.
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
    item: int
    num_tokens: int | None
    sample: int
    map: str
    layer: int | None
    input: str
    radius: float | None
    metric: str
    seed: int

    @property
    def window(self) -> WindowKey:
        """What jobs that share a forward pass of the model have in common."""
        return WindowKey(self.model, self.weights, self.dtype, self.fused, self.text, self.item)

    @property
    def place(self) -> MapKey:
        """Which map at which input that was given."""
        return MapKey(self.window, self.map, self.layer)


class Shape(NamedTuple):
    """The layers and heads that a model was found to have.

    Attributes:
        layers: Number of attention layers.
        heads: Query heads of each layer where they are measured one by one, else None.
    """

    layers: int
    heads: tuple[int, ...] | None


class Survey(NamedTuple):
    """The facts about a model that its jobs are listed from.

    Attributes:
        shape: Its layers and heads.
        items: What it reads, by the name of the source.
        revision: Commit, package version or digest of the weights; None if there is none.
    """

    shape: Shape
    items: Mapping[str, Sequence[InputKey]]
    revision: str | None


def plan(spec: Spec, surveys: Sequence[Survey]) -> list[Job]:
    """All jobs of a run; those of one model, and within it of one window, stand together.

    Args:
        spec: The specification.
        surveys: Those of its models, in their order.

    Returns:
        The jobs.
    """
    return [
        job
        for model, survey in enumerate(surveys)
        for window in _windows(spec, model, survey.items)
        for job in _of_window(spec, survey, window)
    ]


def check_one_input(jobs: Sequence[Job]) -> None:
    """Refuse several inputs where the answer is of one.

    Raises:
        InputError: For a batch of several, or pictures of several sizes.
    """
    found = len({job.window for job in jobs if job.input == REAL})
    if found > 1:
        raise InputError(f"`data` should be one input here. Found {found}; give one of them.")


def identity(
    spec: Spec,
    *,
    model: Sequence[str | None],
    item: InputKey,
    layer: int | None,
    dtype: str,
    seed: int,
    **asked: Any,
) -> str:
    """The id of a measurement: of everything that determines its sigma and its interval.

    Args:
        spec: What its question shares with others.
        model: Name and revision of the model.
        item: The input; what a built input starts from.
        layer: Index of the layer.
        dtype: Floating type.
        seed: Of the random starts.
        **asked: ``map``, ``metric``, ``input`` and ``radius`` of the job; what else was asked.

    Returns:
        The id, for all heads together.
    """
    parts = {name: getattr(spec, name) for name in _SHARED}
    if spec.causal is not None:
        parts["causal"] = spec.causal
    parts |= asked | {"model": model, "layer": layer, "dtype": dtype, "seed": seed}
    if asked.get("input") in (ADVERSARIAL, ASCENT):
        parts["ascent_steps"] = spec.ascent_steps
    return stable_id(parts | {"item": item[1:]})


def _windows(
    spec: Spec, model: int, held: Mapping[str, Sequence[InputKey]]
) -> Iterator[tuple[Any, ...]]:
    random = spec.models[model].name.startswith("random:")
    fused = [f for f in (True, False) if _maps(spec, fused=f)]
    for first in product([model], spec.seeds if random else (None,), spec.dtypes, fused):
        for name, some in held.items():
            for index, item in enumerate(some):
                if REAL in spec.inputs or item.sample == _first(some, item.num_tokens):
                    yield (*first, name, index, *item[:2])


def _maps(spec: Spec, *, fused: bool) -> list[str]:
    return [name for name in spec.maps if (name in FUSED) == fused]


def _of_window(spec: Spec, survey: Survey, window: tuple[Any, ...]) -> Iterator[Job]:
    model, weights, dtype, fused, text, index, _, sample = window
    seeds = spec.seeds if weights is None else (weights,)
    item, name = survey.items[text][index], (spec.models[model].name, survey.revision)
    layers = range(survey.shape.layers) if spec.layers is None else spec.layers
    for map in _maps(spec, fused=fused):
        first = sample == _first(survey.items[text], item.num_tokens)
        asked = product([None] if map in WHOLE else layers, _inputs(spec, first))
        for (layer, (kind, radius)), metric, seed in product(asked, spec.metrics, seeds):
            question = {"map": map, "metric": metric, "input": kind, "radius": radius}
            if kind != REAL and radius is None:
                question["radius"] = _radius(spec, survey.items[text])
            id = identity(
                spec, model=name, item=item, layer=layer, dtype=dtype, seed=seed, **question
            )
            yield Job._make((id, *window, map, layer, kind, radius, metric, seed))


def _radius(spec: Spec, items: Sequence[InputKey]) -> Any:
    """What says how large the tokens of a built input are; None for those of its own window."""
    if spec.radius == "inputs":
        return [one.sha256 for one in items] if len(items) > 1 else None
    return None if spec.radius == "row" else spec.radius


def _first(items: Sequence[InputKey], num_tokens: int | None) -> int:
    """Index of the first window of a length."""
    return min(one.sample for one in items if one.num_tokens == num_tokens)


def _inputs(spec: Spec, first: bool) -> Iterator[tuple[str, float | None]]:
    """Inputs of one window: those that are built do not depend on it, and come once."""
    for kind in spec.inputs:
        if kind == REAL:
            yield kind, None
        elif first:
            yield from ((kind, None if r == OF_TEXT else float(r)) for r in spec.radii)


def row_ids(job: Job, shape: Shape) -> list[str]:
    """The ids of the rows of a job: its own, or one for each head."""
    return [row_id(job.id, head) for head in heads_of(job, shape)]


def heads_of(job: Job, shape: Shape) -> Sequence[int | None]:
    """Heads that are measured one by one; None for all together."""
    if shape.heads is None or job.layer is None:
        return [None]
    return range(shape.heads[job.layer])


def row_id(job: str, head: int | None) -> str:
    """The id of a row of a job: the job's own, or one for each head."""
    return job if head is None else stable_id({"job": job, "head": head})
