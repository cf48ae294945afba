"""Where questions are answered: one model at a time, one forward pass for all of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.answer import answer
from lipscope.engine.built import (
    BuiltInput,
    asked,
    built_input,
    front_of,
    moved_to,
    on_all_inputs,
)
from lipscope.engine.layer import radius_of_the_norm
from lipscope.engine.places import Places
from lipscope.engine.plan import FUSED, InputKey, Job, Shape, Survey
from lipscope.engine.question import Answer, explained
from lipscope.engine.ranges import COPIES, parse_tokens
from lipscope.engine.rows import failed_rows, row_of
from lipscope.engine.spec import REAL, Spec
from lipscope.engine.turned import texts_for, turned
from lipscope.engine.worded import worded
from lipscope.errors import InputError, memory_for
from lipscope.models import (
    LayerMap,
    LoadedModel,
    Sample,
    check_request,
    remarks_on,
    why_run,
)
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.residual import Norms, norm_before
from lipscope.records.folder import Finished
from lipscope.records.rows import Direction, Measurement
from lipscope.theorems import Normed, Residual

_DRAWS = "the model draws random numbers in its forward pass: here the same ones each time"


class Result(NamedTuple):
    """What became of a job.

    Attributes:
        job: Its id.
        model: Index of its model.
        about: What its rows say of the model; empty if it could not be loaded.
        finished: Its rows.
    """

    job: str
    model: int
    about: dict[str, Any]
    finished: list[Finished]


class Session:
    """Answers the jobs of a specification; what consecutive jobs share is computed once.

    Use it in a ``with`` block, whose end puts the model back as it was.

    Args:
        spec: The specification.
        sources: What models read, by name.
        models: What gives models that are had already, by name.
        norms: Whether the norms that feed layers are asked for, whatever the map.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Any],
        models: Mapping[str, Callable[[], LoadedModel]] | None = None,
        *,
        norms: bool = False,
    ) -> None:
        self.spec, self.sources = spec, sources
        needed = norms or spec.radius == "norm"
        self.places = Places(spec, sources, models or {}, norms=needed)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the model back as it was, and let go of it."""
        self.places.close()

    # --- what a model has

    def about(self, model: int, weights: int | None = None) -> dict[str, Any]:
        """What rows say of a model; of a random one, whose seeds differ, that it is one."""
        about = self.places.loaded(model, weights).about
        return about if weights is None else about | {"weights": "random"}

    def survey(self, model: int) -> Survey:
        """Layers, heads and inputs of a model; every map is built once at the first input.

        Raises:
            InputError: If the model, an input, a layer, a map or its memory is not to be had.
        """
        spec = self.spec
        weights = spec.seeds[0] if spec.models[model].name.startswith("random:") else None
        items = {name: self.places.items(model, weights, name) for name in self.sources}
        for item in (one for some in items.values() for one in some):
            self._check_tokens(item.num_tokens)
        shape = Shape(0, None)
        for fused in (True, False):
            maps = [name for name in spec.maps if (name in FUSED) == fused]
            for name in items if maps else ():
                place = (model, weights, spec.dtypes[0], fused, name, 0, *_item(items[name][0])[:2])
                shape = self._looked_at(place, maps, [one.num_tokens for one in items[name]])
        listed = {name: [*map(_item, some)] for name, some in items.items()}
        return Survey(shape, listed, self.places.loaded(model, weights).revision)

    def _looked_at(
        self, place: tuple[Any, ...], maps: Sequence[str], lengths: Sequence[int | None]
    ) -> Shape:
        def job(name: str, layer: int | None) -> Job:
            metric, seed = self.spec.metrics[0], self.spec.seeds[0]
            return Job._make(("", *place, name, layer, REAL, None, metric, seed))

        if self.places.is_layer(job(maps[0], 0)):
            heads = [self.places.built(job(name, 0)).num_heads or 1 for name in maps]
            count = 1 + max(self.spec.layers or (0,))
            return Shape(count, (heads[0],) * count if self.spec.per_head else None)
        record = self.places.trace(job(maps[0], 0))
        count = len(record.calls)
        layers = range(count) if self.spec.layers is None else self.spec.layers
        for layer in layers:
            if layer >= count:
                raise InputError(
                    f"`layers` should be between 0 and {count - 1} for "
                    f"`{self.spec.models[place[0]].name}`. Found {layer}."
                )
        longest = max(n or record.calls[0].num_tokens for n in lengths)
        heads: list[int] = [1] * count
        for name in maps:
            places = [None] if name == "model" else layers
            for layer in places:
                check_request(record, layer, name, longest, self.places.memory)
            for layer in places:
                # Kept for the first window, whose maps they are.
                self.places.probed[job(name, layer).place] = built = self.places.built(
                    job(name, layer)
                )
                self._check_tokens(len(built.x), len(built.output))
                heads[layer or 0] = built.num_heads or 1
        return Shape(count, tuple(heads) if self.spec.per_head else None)

    def _check_tokens(self, moving: int | None, reading: int | None = None) -> None:
        """Whether the tokens that may move, and those that are read, are there."""
        for option, count in (("move", moving), ("read", reading or moving)):
            if count is not None:
                parse_tokens(getattr(self.spec, option), count, option)

    # --- answers

    def result(self, job: Job, shape: Shape) -> Result:
        """What becomes of a job; one that fails has rows that say so.

        Args:
            job: The job.
            shape: That of its model.

        Returns:
            Its rows with their side tables, and what the model is.
        """
        try:
            finished = self.rows(job)
        except Exception as problem:  # whatever it is, the other jobs go on
            about = self._about_if_loaded(job)
            rows = failed_rows(self.spec, job, shape, explained(problem), about)
            finished = [Finished(row) for row in rows]
        return Result(job.id, job.model, self._about_if_loaded(job), finished)

    def rows(self, job: Job) -> list[Finished]:
        """The rows of a job, with their side tables.

        Raises:
            InputError: If it cannot be answered as asked.
        """
        loaded = self.places.loaded(job.model, job.weights)
        built, item, remarks = self.place(job)
        remarks += self._reach(job, built)
        found, about = [], loaded.about
        for reply in self.replies(job, built):
            device = self.places.device.type
            row = row_of(
                self.spec, job, reply, about, of=built, item=item, device=device, notes=remarks
            )
            tokens = reply.token_shares(row.id, item.tokens) if self.spec.tokens else []
            bounds = self._bounds(job, row, built) if self.spec.theorems else ()
            found.append(Finished(row, tuple(tokens), bounds, self._worded(job, row, reply, built)))
        return found

    def replies(self, job: Job, built: LayerMap) -> list[Answer]:
        """What a map answers to a job, singular vectors included; that of the last job is kept."""
        key = f"{self.spec.models[job.model].name}|{job.layer}|{job.num_tokens or ''}|{job.sample}"
        if job.input != REAL:
            key += f"|{job.input}|{job.radius or ''}"
        whole = self.spec.move != COPIES  # the model itself has no copies

        def make() -> list[Answer]:
            itself = self.places.itself(job, built) if job.sample == 0 and whole else None
            return answer(built, self.spec, job, self.places.memory, key, itself)

        return self.places.once("replies", job, make)

    def place(self, job: Job) -> tuple[LayerMap, Sample, list[str]]:
        """The map of a job at its input, the input, and remarks for the row."""
        item, loaded = self.places.item(job), self.places.loaded(job.model, job.weights)
        notes = [*self.places.prepared(job)[1], *remarks_on(loaded, item)]
        built = self.places.built(job)
        if not self.places.is_layer(job) and self.places.trace(job).draws:
            notes.append(_DRAWS)
        if job.input == REAL:
            return built, item, notes
        made = self.input_for(job)
        return *moved_to(built, item, job, made.x), [*notes, made.remark]

    def input_for(self, job: Job) -> BuiltInput:
        """The input that a job builds, within the radius of which bounds on all inputs speak."""
        built = self.places.built(job)

        def make() -> BuiltInput:
            radius = self.allowed(job, built)[0] if job.radius is None else job.radius
            largest = float(torch.linalg.vector_norm(built.x, dim=-1).max())
            return built_input(built, job, self.spec, radius or largest)

        return self.places.once("input", (*job[1:13], job.seed), make)

    def layer(self, job: Job) -> tuple[Attention | Normed | Residual, nn.Module | None]:
        """The layer of a job as theorems see it, and the norm that feeds it, if any.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        built = self.places.built(job)
        call = None if self.places.is_layer(job) else self.places.trace(job).calls[job.layer or 0]
        if built.attention is None:
            why = why_run(call.module) if call is not None else "it is not known"
            raise InputError(
                f"Weight-based bounds are not available for this layer, because {why}. "
                "`lipscope measure` measures it."
            )
        norm = None if call is None else norm_before(self.places.trace(job), call)
        module = None if norm is None else norm.module
        if built.norms is not None:
            return _residual(built.attention, built.norms), module
        if job.map != "normed":
            return built.attention, module
        assert module is not None  # else the map does not exist
        return Normed(built.attention, ExactNorm(module)), module

    def allowed(self, job: Job, built: LayerMap) -> tuple[float | None, float | None]:
        """Of which tokens bounds on all inputs speak: up to a radius, or from a norm on."""
        layer, norm = self.layer(job)
        if self.spec.radius == "inputs":
            return self._of_inputs(job)
        if front_of(layer) is not None:
            if self.spec.radius != "row":
                raise InputError(
                    "`radius` should be left out for a layer with a norm in front, whose bounds "
                    f"hold for tokens of every norm. Found `radius = {self.spec.radius}`."
                )
            return None, None
        if self.spec.radius == "norm":
            return radius_of_the_norm(norm, built.x.shape[1], job.layer), None
        return (None if self.spec.radius == "row" else float(self.spec.radius)), None

    def seconds(self, job: Job, shape: Shape, clock: Callable[[], float]) -> tuple[float, float]:
        """Time of the forward pass of a job's window, and of the job once that is done.

        Args:
            job: The job.
            shape: That of its model.
            clock: What tells the time, in seconds.
        """
        with suppress(Exception):  # a job that fails takes its time too
            self.places.prepared(job)
            self.places.item(job)
        self.places.let_go("trace")
        began = clock()
        with suppress(Exception):
            self.places.trace(job)
        between = clock()
        self.result(job, shape)
        return between - began, clock() - between

    def _bounds(self, job: Job, row: Any, built: LayerMap) -> tuple[Any, ...]:
        return asked(row, built, self.spec, lambda: (self.layer(job)[0], self.allowed(job, built)))

    @memory_for("The readings of a whole vocabulary")
    def _worded(
        self, job: Job, row: Measurement, reply: Answer, built: LayerMap
    ) -> tuple[Direction, ...]:
        places = self.places
        record = None if places.is_layer(job) else places.trace(job)
        loaded = places.loaded(job.model, job.weights)
        if not reply.leading:
            return ()
        whole = None if record is None else places.with_head(job)
        about = (built, row.id, loaded, places.item(job), record, places.memory, whole)
        found = (*worded(reply.leading, *about),)
        if not self.spec.among:
            return found
        asked_for = (self.spec.among, loaded, record, self.spec.special_tokens)
        texts = places.once("among", job[1:5], lambda: texts_for(*asked_for))
        assert record is not None  # or there are no texts for it
        return (*found, *turned(reply.leading, built, row.id, record, texts))

    def _reach(self, job: Job, built: LayerMap) -> list[str]:
        """Of which tokens bounds through a norm in front speak, if any are asked for."""
        if not self.spec.theorems or built.attention is None:
            return []
        layer = self.layer(job)[0] if job.map in ("normed", "residual") else built.attention
        if front_of(layer) is None:
            return []
        return [on_all_inputs(layer, built.x, self.allowed(job, built)[1])]

    def _of_inputs(self, job: Job) -> tuple[float | None, float | None]:
        """Largest token norm over all inputs of a layer; the smallest with a norm in front."""
        model, weights, text = job.model, job.weights, job.text
        found: dict[int | None, list[float]] = {layer: [] for layer in self._layers(job)}

        def sizes() -> dict[int | None, list[float]]:
            # Window by window, so that one forward pass serves all layers.
            for index in range(len(self.places.items(model, weights, text))):
                for layer, some in found.items():
                    other = job._replace(item=index, input=REAL, layer=layer)
                    with suppress(InputError):  # a layer without weights says so in its own rows
                        some.append(self._size(other))
            return found

        key = (model, weights, job.dtype, text, job.map)
        held: dict[Any, Any] = self.places.once("sizes", key, dict)
        if job.layer not in held:
            held |= sizes()
        some = held[job.layer] or [self._size(job)]  # which says why there is none
        return (max(some), None) if front_of(self.layer(job)[0]) is None else (None, min(some))

    def _layers(self, job: Job) -> Sequence[int | None]:
        if self.spec.layers is not None or self.places.is_layer(job):
            return self.spec.layers or [job.layer]
        return range(len(self.places.trace(job).calls))

    def _size(self, job: Job) -> float:
        """Largest token norm of an input; the smallest with a norm in front."""
        front, x = front_of(self.layer(job)[0]), self.places.built(job).x
        return float(x.norm(dim=-1).max() if front is None else front.constants.size(x).min())

    def _about_if_loaded(self, job: Job) -> dict[str, Any]:
        if not self.places.holds(job.model, job.weights):
            return {}
        return self.about(job.model, job.weights)


def _residual(layer: Attention, norms: Norms) -> Residual:
    """Attention with its norms, each in the precision of what it takes, added to its input.

    A scale is taken into the output projection, or into the norm that takes the attention's output.
    """
    before, outer = (None if one is None else ExactNorm(one) for one in (norms.before, norms.outer))
    second = None if norms.second is None else ExactNorm(norms.second, norms.scale)
    if norms.scale is not None and second is None:
        layer = _scaled(layer, norms.scale.double().cpu())
    return Residual(layer if before is None else Normed(layer, before), second, outer)


def _scaled(layer: Attention, scale: Tensor) -> Attention:
    """The layer in float64, its output times one number or one for every channel."""
    layer = layer.in_double()
    fields = layer.fields()
    concat, bias = layer.num_heads * layer.value_width, fields.get("output_bias")
    output = torch.eye(concat, dtype=torch.float64) if layer.output is None else layer.output
    changes: dict[str, Tensor] = {"output": scale.reshape(-1, 1) * output}
    if bias is not None:
        changes["output_bias"] = scale * bias
    return layer.replace(**changes)


def _item(sample: Sample) -> InputKey:
    return InputKey(sample.num_tokens, sample.sample, sample.start, sample.sha256)
