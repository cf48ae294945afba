"""Where questions are answered: one model at a time, one forward pass for all of a window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.answer import Question, answer
from lipscope.engine.built import asked, built_input, moved_to, on_all_inputs
from lipscope.engine.plan import FUSED, Item, Job, Shape, Survey, failed_rows, row_id
from lipscope.engine.ranges import parse_bytes, parse_tokens
from lipscope.engine.rows import row_of
from lipscope.engine.spec import REAL, Spec
from lipscope.errors import InputError, memory_for
from lipscope.models import (
    LayerMap,
    LoadedModel,
    Sample,
    Trace,
    attention_sites,
    build_map,
    check_request,
    device_of,
    implementation_for,
    inputs_of,
    later_positions,
    load_model,
    moved,
    overflows,
    prepared,
    reader_of,
    remarks_on,
    trace,
    why_run,
    without_padding,
)
from lipscope.models.data.windows import digest
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.residual import norm_before
from lipscope.records.folder import Finished
from lipscope.theorems import Normed, norm_of, radius_of_norm


class Result(NamedTuple):
    """What became of a job.

    Attributes:
        job: Its id.
        model: Index of its model.
        about: Revision and weights of the model; empty if it could not be loaded.
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
        models: Models that are loaded already, by name.
        norms: Whether the norms that feed layers are asked for, whatever the map.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Any],
        models: Mapping[str, LoadedModel] | None = None,
        *,
        norms: bool = False,
    ) -> None:
        self._needs_norms = norms or spec.radius == "norm"
        self.spec, self.sources, self.models = spec, sources, dict(models or {})
        self.device = device_of(spec.device)
        self.memory = parse_bytes(spec.memory)
        self._held: dict[str, tuple[Any, Any]] = {}
        self._given: dict[str, tuple[Tensor, str]] = {}
        self._probed: dict[tuple[Any, ...], LayerMap] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the model back as it was, and let go of it."""
        self._stack.close()
        self._held.clear()
        self._probed.clear()

    # --- what a model has

    def about(self, model: int, weights: int | None = None) -> dict[str, Any]:
        """Revision and weights of a model; of a random one, whose seeds differ, that it is one."""
        loaded = self._loaded(model, weights)
        return {
            "revision": loaded.revision,
            "weights": loaded.weights if weights is None else "random",
        }

    def survey(self, model: int) -> Survey:
        """Layers, heads and inputs of a model; every map is built once at the first input.

        Raises:
            InputError: If the model, an input, a layer, a map or its memory is not to be had.
        """
        spec = self.spec
        weights = spec.seeds[0] if spec.models[model].name.startswith("random:") else None
        items = {name: self._items(model, weights, name) for name in self.sources}
        for item in (one for some in items.values() for one in some):
            self._check_tokens(item.num_tokens)
        shape = Shape(0, None)
        for fused in (True, False):
            maps = [name for name in spec.maps if (name in FUSED) == fused]
            for name in items if maps else ():
                place = (model, weights, spec.dtypes[0], fused, name, 0, *_item(items[name][0])[:2])
                shape = self._looked_at(place, maps, [one.num_tokens for one in items[name]])
        listed = {name: [*map(_item, some)] for name, some in items.items()}
        return Survey(shape, listed, self._loaded(model, weights).revision)

    def _looked_at(
        self, place: tuple[Any, ...], maps: Sequence[str], lengths: Sequence[int | None]
    ) -> Shape:
        def job(name: str, layer: int | None) -> Job:
            metric, seed = self.spec.metrics[0], self.spec.seeds[0]
            return Job._make(("", *place, name, layer, REAL, None, metric, seed))

        if self._is_layer(job(maps[0], 0)):
            heads = [self._built(job(name, 0)).num_heads or 1 for name in maps]
            count = 1 + max(self.spec.layers or (0,))
            return Shape(count, (heads[0],) * count if self.spec.per_head else None)
        record = self._trace(job(maps[0], 0))
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
                check_request(record, layer, name, longest, self.memory)
            for layer in places:
                # Kept for the first window, whose maps they are.
                self._probed[job(name, layer).place] = built = self._built(job(name, layer))
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
            kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
            about = self._about_if_loaded(job)
            rows = failed_rows(self.spec, job, shape, f"{kind}{problem}", about)
            finished = [Finished(row) for row in rows]
        return Result(job.id, job.model, self._about_if_loaded(job), finished)

    def rows(self, job: Job) -> list[Finished]:
        """The rows of a job, with their side tables.

        Raises:
            InputError: If it cannot be answered as asked.
        """
        loaded = self._loaded(job.model, job.weights)
        built, item, remarks = self.place(job)
        model = self.spec.models[job.model]
        key = f"{model.name}|{job.layer}|{job.num_tokens or ''}|{job.sample}"
        if job.input != REAL:
            key += f"|{job.input}|{job.radius or ''}"
        question = self._question(job)
        remarks += self._reach(job, built)
        found = []
        for reply in answer(built, question, key):
            row = row_of(
                reply,
                id=row_id(job.id, reply.head),
                loaded=loaded,
                question=question,
                item=item,
                layer=job.layer,
                device=self.device,
                notes=remarks,
            )
            row = replace(row, text=job.text or None, step=model.step)
            tokens = reply.token_shares(row.id, item.tokens) if self.spec.tokens else []
            bounds = self._bounds(job, row, built) if self.spec.theorems else ()
            found.append(Finished(row, tuple(tokens), bounds))
        return found

    def place(self, job: Job) -> tuple[LayerMap, Sample, list[str]]:
        """The map of a job at its input, the input, and remarks for the row."""
        item, loaded = self._item(job), self._loaded(job.model, job.weights)
        notes = [*self._prepared(job)[1], *remarks_on(loaded, item)]
        built = self._built(job)
        if job.input == REAL:
            return built, item, notes
        x, remark = self._given.get(job.id) or self._once(
            "input",
            job[1:13],
            lambda: built_input(built, item, job, self.spec, self._radius_for(job, built)),
        )
        return *moved_to(built, item, job, x), [*notes, remark]

    def hold_input(self, job: Job, x: Tensor, remark: str) -> None:
        """Answer a job at an input that was built for it before."""
        self._given[job.id] = x, remark

    def _radius_for(self, job: Job, built: LayerMap) -> float:
        """Largest token norm of an input that is built."""
        if job.radius is not None:
            return job.radius
        largest = self._of_inputs(job)[0] if self.spec.radius == "inputs" else None
        return largest or float(torch.linalg.vector_norm(built.x, dim=-1).max())

    def layer(self, job: Job) -> tuple[Attention | Normed, nn.Module | None]:
        """The layer of a job as theorems see it, and the norm that feeds it, if any.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        built = self._built(job)
        call = None if self._is_layer(job) else self._trace(job).calls[job.layer or 0]
        if built.attention is None:
            why = why_run(call.module) if call is not None else "it is not known"
            raise InputError(
                f"Weight-based bounds are not available for this layer, because {why}. "
                "`lipscope measure` measures it."
            )
        norm = None if call is None else norm_before(self._trace(job), call)
        module = None if norm is None else norm.module
        if job.map != "normed":
            return built.attention, module
        assert module is not None  # else the map does not exist
        return Normed(built.attention, ExactNorm(module)), module

    def allowed(self, job: Job, built: LayerMap) -> tuple[float | None, float | None]:
        """Of which tokens bounds on all inputs speak: up to a radius, or from a norm on."""
        layer, norm = self.layer(job)
        if self.spec.radius == "inputs":
            return self._of_inputs(job)
        if isinstance(layer, Normed):
            return None, None
        if self.spec.radius == "norm":
            return radius_of_the_norm(norm, built.x.shape[1], job.layer), None
        return (None if self.spec.radius == "row" else float(self.spec.radius)), None

    def seconds(self, job: Job, shape: Shape) -> tuple[float, float]:
        """Time of the forward pass of a job's window, and of the job once that is done.

        Args:
            job: The job.
            shape: That of its model.
        """
        with suppress(Exception):  # a job that fails takes its time too
            self._prepared(job)
            self._item(job)
        self._held.pop("trace", None)
        began = time.perf_counter()
        with suppress(Exception):
            self._trace(job)
        between = time.perf_counter()
        self.result(job, shape)
        return between - began, time.perf_counter() - between

    def _bounds(self, job: Job, row: Any, built: LayerMap) -> tuple[Any, ...]:
        return asked(row, built, self.spec, lambda: (self.layer(job)[0], self.allowed(job, built)))

    def _reach(self, job: Job, built: LayerMap) -> list[str]:
        """Of which tokens bounds for the map ``normed`` speak, if any are asked for."""
        if job.map != "normed" or not self.spec.theorems or built.attention is None:
            return []
        layer, _ = self.layer(job)
        assert isinstance(layer, Normed)
        return [on_all_inputs(layer, built.x, self.allowed(job, built)[1])]

    def _of_inputs(self, job: Job) -> tuple[float | None, float | None]:
        """Largest token norm over all inputs of a layer; the smallest for the map ``normed``."""

        def sizes() -> tuple[float | None, float | None]:
            found, here, normed = [], self._held.pop("trace", None), job.map == "normed"
            for index in range(len(self._items(job.model, job.weights, job.text))):
                other = job._replace(item=index, input=REAL)
                layer, x = self.layer(other)[0], self._built(other).x
                known = isinstance(layer, Normed)
                size = layer.constants.size(x).min() if known else x.norm(dim=-1).max()
                found.append(float(size))
            if here is not None:
                self._held["trace"] = here
            self._held.pop("map", None)
            return (None, min(found)) if normed else (max(found), None)

        key = (job.model, job.weights, job.dtype, job.text, job.map, job.layer)
        held: dict[Any, Any] = self._once("sizes", key[:3], dict)
        if key not in held:
            held[key] = sizes()
        return held[key]

    def _question(self, job: Job) -> Question:
        spec = self.spec
        return Question(
            map=job.map,
            per_head=spec.per_head,
            metric=job.metric,
            move=spec.move,
            read=spec.read,
            rest=spec.rest,
            average=spec.average,
            tol=spec.tol,
            delta=spec.delta,
            tight=spec.tight,
            dtype=getattr(torch, job.dtype),
            seed=job.seed,
            memory=self.memory,
            side=spec.side,
            position_offset=spec.position_offset,
        )

    # --- from a name to a map, each step once

    def _once(self, what: str, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for this key; anything made for another one is let go first."""
        if self._held.get(what, (None, None))[0] != key:
            self._held.pop(what, None)
            try:
                self._held[what] = (key, make())
            except Exception as problem:
                if what != "model":
                    raise
                self._held[what] = (key, problem)  # not to be loaded again for every job
        found = self._held[what][1]
        if isinstance(found, Exception):
            raise found
        return found

    def _loaded(self, model: int, weights: int | None) -> LoadedModel:
        def load() -> LoadedModel:
            self.close()
            name = self.spec.models[model].name
            if name in self.models:
                return self.models[name]
            return load_model(name, seed=weights or 0, allow_pickle=self.spec.allow_pickle)

        return self._once("model", (model, weights), load)

    def _about_if_loaded(self, job: Job) -> dict[str, Any]:
        held = self._held.get("model", (None, None))
        if held[0] != (job.model, job.weights) or isinstance(held[1], Exception):
            return {}
        return self.about(job.model, job.weights)

    def _is_layer(self, job: Job) -> bool:
        return isinstance(self._loaded(job.model, job.weights).model, Attention)

    def _prepared(self, job: Job) -> tuple[nn.Module, list[str]]:
        loaded = self._loaded(job.model, job.weights)
        if isinstance(loaded.model, Attention):
            return loaded.model, []

        def prepare() -> tuple[nn.Module, list[str]]:
            self._stack.close()
            self._held.pop("trace", None)
            sites = self._sites(loaded.model)
            closed = job.fused and all(reader_of(site) for site in sites.values())
            model, notes = self._stack.enter_context(
                prepared(
                    loaded.model,
                    dtype=getattr(torch, job.dtype),
                    device=self.device,
                    implementation=implementation_for(loaded.model, closed=closed),
                )
            )
            for one in {model, loaded.model}:
                self._stack.enter_context(later_positions(one, self.spec.position_offset))
            return model, notes

        return self._once("prepared", job[1:5], prepare)

    def _sites(self, model: nn.Module) -> dict[str, nn.Module]:
        return attention_sites(model, self.spec.modules, side=self.spec.side)

    def _items(self, model: int, weights: int | None, name: str) -> list[Sample]:
        loaded, spec = self._loaded(model, weights), self.spec

        def cut() -> list[Sample]:
            if isinstance(loaded.model, Attention):
                return layer_inputs(self.sources[name])
            return inputs_of(
                loaded,
                self.sources[name] if spec.images is None else None,
                lengths=spec.lengths,
                samples=spec.samples,
                windows=spec.windows,
                special_tokens=spec.special_tokens,
                images=spec.images,
                resolutions=spec.resolutions,
                position_offset=spec.position_offset,
            )

        return self._once("items", (model, weights, name), cut)

    def _item(self, job: Job) -> Sample:
        return self._items(job.model, job.weights, job.text)[job.item]

    @memory_for("The model's own forward pass")
    def _trace(self, job: Job) -> Trace:
        model, item = self._prepared(job)[0], self._item(job)
        maps = {name for name in self.spec.maps if (name in FUSED) == job.fused}

        def run() -> Trace:
            self._held.pop("map", None)
            dtype = getattr(torch, job.dtype)
            record = trace(
                model,
                moved(item.arguments, self.device, dtype),
                self._sites(model),
                norms=bool({"normed", "residual"} & maps) or self._needs_norms,
                blocks=bool({"block", "model"} & maps),
                dtype=dtype,
                side=self.spec.side,
            )
            own = self._loaded(job.model, job.weights).model
            record.remarks = overflows(own, item, self.spec.modules, self.spec.side)
            return record

        return self._once("trace", job.window, run)

    @memory_for("The layer's own forward pass")
    def _built(self, job: Job) -> LayerMap:
        def build() -> LayerMap:
            per_head = self.spec.per_head
            model = self._loaded(job.model, job.weights).model
            if isinstance(model, Attention):
                return map_of_layer(model, self._item(job), job.map, getattr(torch, job.dtype))
            record = self._trace(job)
            built = build_map(record, job.layer, job.map, memory=self.memory, per_head=per_head)
            return without_padding(built, record)

        return self._once("map", job.place, lambda: self._probed.pop(job.place, None) or build())


def radius_of_the_norm(norm: nn.Module | None, width: int, layer: int | None) -> float:
    """Largest norm that a token can have after the norm that feeds a layer.

    Raises:
        InputError: If there is no such norm, or it is neither RMSNorm nor LayerNorm.
    """
    if norm is None:
        raise InputError(
            f"`radius = norm` needs a norm that feeds the layer. Found none before layer {layer}; "
            "give a number."
        )
    return radius_of_norm(norm_of(norm, width))


def layer_inputs(data: Any) -> list[Sample]:
    """Inputs of a layer by itself: one, ``(n, d)``, or several, ``(b, n, d)``."""
    if isinstance(data, list):
        return data
    if not isinstance(data, Tensor) or data.ndim not in (2, 3) or not data.is_floating_point():
        raise InputError(
            "`data` should be the input of the layer, of shape (n, d) or (b, n, d). Found "
            f"{tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__}."
        )
    batch = data if data.ndim == 3 else data[None]
    return [Sample("batch", (x,), i, None, len(x), digest(x), None) for i, x in enumerate(batch)]


def map_of_layer(layer: Attention, item: Sample, name: str, dtype: torch.dtype) -> LayerMap:
    """The map of a layer by itself at an input."""
    if name not in ("attention", "heads"):
        raise InputError(
            f"`map` should be attention or heads for a layer by itself. Found `{name}`."
        )
    assert isinstance(item.arguments, tuple)
    (x,) = item.arguments
    own = layer if layer.query.dtype == dtype else layer.replace().to(dtype=dtype)
    x = x.detach().to(own.query)
    function = own if name == "attention" else own.heads
    with torch.no_grad():
        output = function(x)

    def by_head() -> Tensor:
        with torch.no_grad():
            heads = own.heads(x).unflatten(1, (own.num_heads, -1)).transpose(0, 1)
        if name == "heads" or own.output is None:
            return heads
        return heads @ own.output.unflatten(1, (own.num_heads, -1)).permute(1, 2, 0)

    return LayerMap(
        None,
        name,
        x,
        output,
        function,
        lambda at, memory, per_head: own.linearise(at, memory=memory, map=name, per_head=per_head),
        own,
        own.num_heads,
        by_head,
    )


def _item(sample: Sample) -> Item:
    return Item(sample.num_tokens, sample.sample, sample.start, sample.sha256)
