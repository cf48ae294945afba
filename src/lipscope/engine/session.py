"""A session of jobs: one model at a time, one forward pass for all questions at a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lipscope.engine.bare_layer import layer_inputs
from lipscope.engine.layer import MapAtInput
from lipscope.engine.plan import FUSED, InputKey, Job, Shape, Survey, WindowKey
from lipscope.engine.ranges import parse_bytes, parse_tokens
from lipscope.engine.ready_model import Last, ReadyModel, Setting, Window, masked, ready_model
from lipscope.engine.result import explained
from lipscope.engine.rows import failed_rows
from lipscope.engine.spec import REAL, Spec
from lipscope.engine.synthetic_inputs import front_of
from lipscope.engine.text_gradients import Texts
from lipscope.errors import InputError
from lipscope.models import WHOLE, Sample, check_request, device_of, inputs_of, with_own_head
from lipscope.records import Finished


class Result(NamedTuple):
    """The result of a job.

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


class ModelKey(NamedTuple):
    """A model of a specification, with the seed of its weights if they are random."""

    model: int
    weights: int | None


class Session:
    """Answers the jobs of a specification; what consecutive jobs share is computed once.

    Use it in a ``with`` block, whose end puts the model back as it was.

    Args:
        spec: The specification.
        sources: What models read, by name.
        models: What gives models that are had already, by name.
        norms: Whether the norms that feed layers are asked for, whatever the map.

    Attributes:
        memory: Budget in bytes.
        texts: Towards which directions turn, as a model sees them.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Any],
        models: Mapping[str, Callable[[], ReadyModel]] | None = None,
        *,
        norms: bool = False,
    ) -> None:
        self.spec, self.sources, self.models = spec, sources, models or {}
        self.memory = parse_bytes(spec.memory)
        device_of(spec.device)
        self._norms = norms or spec.radius == "norm"
        self._stack = ExitStack()
        self._model: Last[ModelKey, ReadyModel] = Last()
        self._failed: dict[ModelKey, Exception] = {}
        self._items: Last[tuple[ModelKey, str], list[Sample]] = Last()
        self._ready: Last[tuple[ModelKey, Setting], None] = Last()
        self._window: Last[WindowKey, Window] = Last()
        self._at: Last[Job, MapAtInput] = Last()
        self._sizes: Last[Any, dict[int | None, list[float]]] = Last()
        self.texts: Last[Setting, Texts] = Last()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the model back as it was, and let go of it."""
        self._stack.close()
        for held in (self._model, self._items, self._ready, self._window, self._at, self.texts):
            held.forget()

    # --- what a model has

    def model(self, key: ModelKey) -> ReadyModel:
        """A model; one that could not be loaded is not loaded again for every job."""
        if key in self._failed:
            raise self._failed[key]

        def load() -> ReadyModel:
            self.close()
            name = self.spec.models[key.model].name
            if name in self.models:
                found = self.models[name]()
            else:
                how = {"seed": key.weights or 0, "allow_pickle": self.spec.allow_pickle}
                found = masked(ready_model(name, **how), self.spec.causal)
            if not {"logits", "margin"}.intersection(self.spec.maps):
                return found
            return ReadyModel(replace(found.loaded, model=with_own_head(found.loaded)))

        try:
            return self._model.get(key, load)
        except Exception as problem:
            self._failed[key] = problem
            raise

    def about(self, model: int, weights: int | None = None) -> dict[str, Any]:
        """What rows say of a model; of a random one, whose seeds differ, that it is one."""
        about = self.model(ModelKey(model, weights)).loaded.about
        return about if weights is None else about | {"weights": "random"}

    def items(self, key: ModelKey, name: str) -> list[Sample]:
        """Every input that a source gives a model."""
        model, spec = self.model(key), self.spec

        def cut() -> list[Sample]:
            if isinstance(self.sources[name], list):  # they were cut before
                return self.sources[name]
            if model.is_layer:
                return layer_inputs(self.sources[name])
            return inputs_of(
                model.loaded,
                self.sources[name] if spec.images is None else None,
                lengths=spec.lengths,
                samples=spec.samples,
                windows=spec.windows,
                special_tokens=spec.special_tokens,
                images=spec.images,
                resolutions=spec.resolutions,
                position_offset=spec.position_offset,
            )

        return self._items.get((key, name), cut)

    def survey(self, model: int) -> Survey:
        """Layers, heads and inputs of a model; every map is built once at the first input.

        Raises:
            InputError: If the model, an input, a layer, a map or its memory is not to be had.
        """
        spec = self.spec
        weights = spec.seeds[0] if spec.models[model].name.startswith("random:") else None
        key = ModelKey(model, weights)
        items = {name: self.items(key, name) for name in self.sources}
        for item in (one for some in items.values() for one in some):
            self._check_tokens(item.num_tokens)
        shape = Shape(0, None)
        for fused in (True, False):
            maps = [name for name in spec.maps if (name in FUSED) == fused]
            for name in items if maps else ():
                window = WindowKey(model, weights, spec.dtypes[0], fused, name, 0)
                shape = self._looked_at(window, maps, [one.num_tokens for one in items[name]])
        listed = {name: [*map(_item, some)] for name, some in items.items()}
        return Survey(shape, listed, self.model(key).loaded.revision)

    def _looked_at(
        self, key: WindowKey, maps: Sequence[str], lengths: Sequence[int | None]
    ) -> Shape:
        window, per_head = self.window(key), self.spec.per_head
        if window.model.is_layer:
            built = [window.map(0, n, memory=self.memory, per_head=per_head) for n in maps]
            count = 1 + max(self.spec.layers or (0,))
            return Shape(count, (built[0].num_heads or 1,) * count if per_head else None)
        record = window.trace
        count = len(record.calls)
        layers = range(count) if self.spec.layers is None else self.spec.layers
        for layer in layers:
            if layer >= count:
                raise InputError(
                    f"`layers` should be between 0 and {count - 1} for "
                    f"`{self.spec.models[key.model].name}`. Found {layer}."
                )
        longest = max(n or record.calls[0].num_tokens for n in lengths)
        heads = [1] * count
        for name in maps:
            places = [None] if name in WHOLE else layers
            for layer in places:
                check_request(record, layer, name, longest, self.memory)
            for layer in places:
                # The first window's own, which its jobs find there.
                built = window.map(layer, name, memory=self.memory, per_head=per_head)
                window.maps[layer, name] = built
                self._check_tokens(len(built.x), len(built.output))
                heads[layer or 0] = built.num_heads or 1
        return Shape(count, tuple(heads) if per_head else None)

    def _check_tokens(self, moving: int | None, reading: int | None = None) -> None:
        """Whether the tokens that may move, and those that are read, are there."""
        for option, count in (("move", moving), ("read", reading or moving)):
            if count is not None:
                parse_tokens(getattr(self.spec, option), count, option)

    # --- a map at an input

    def window(self, key: WindowKey) -> Window:
        """The model at an input, which stays ready until another one is asked for."""
        model_key, spec = ModelKey(key.model, key.weights), self.spec
        model, item = self.model(model_key), self.items(model_key, key.text)[key.item]
        maps = {name for name in spec.maps if (name in FUSED) == key.fused}
        norms = bool({"normed", "residual"} & maps) or self._norms
        setting = Setting(
            key.dtype, key.fused, spec.device, spec.side, spec.modules, spec.position_offset
        )

        def enter() -> None:
            self._stack.close()
            self._stack.enter_context(model.ready(setting))

        def make() -> Window:
            self._at.forget()
            self._ready.get((model_key, setting), enter)
            return model.window(setting, item, norms=norms)

        return self._window.get(key, make)

    def at(self, job: Job) -> MapAtInput:
        """The map that a job asks about, at its input."""
        window, before = self.window(job.window), self._at.held
        same = before is not None and before.job.place == job.place
        given = before.given if before is not None and same else None
        return self._at.get(job, lambda: MapAtInput(self, job, window, given))

    def first(self, job: Job) -> bool:
        """Whether its input is the first one of its length."""
        some = self.items(ModelKey(job.model, job.weights), job.text)
        alike = [one.sample for one in some if one.num_tokens == job.num_tokens]
        return job.sample == min(alike)

    def of_inputs(self, job: Job) -> tuple[float | None, float | None]:
        """Largest token norm over all inputs of a layer; the smallest with a norm in front."""
        key = ModelKey(job.model, job.weights)
        held = self._sizes.get((key, job.dtype, job.text, job.map), dict)
        at = self.at(job)
        if job.layer not in held:
            layers = self._layers(job, at)
            held |= {layer: [] for layer in layers}
            # Window by window, so that one forward pass serves all layers.
            for index in range(len(self.items(key, job.text))):
                for layer in layers:
                    other = job._replace(item=index, input=REAL, layer=layer)
                    with suppress(InputError):  # a layer without weights says so in its own rows
                        held[layer].append(self.at(other).size)
        some = held[job.layer] or [at.size]  # which says why there is none
        return (max(some), None) if front_of(at.for_theorems) is None else (None, min(some))

    def _layers(self, job: Job, at: MapAtInput) -> Sequence[int | None]:
        if self.spec.layers is not None or at.model.is_layer:
            return self.spec.layers or [job.layer]
        return range(len(at.window.trace.calls))

    # --- answers

    def result(self, job: Job, shape: Shape) -> Result:
        """The result of a job; one that fails has rows that say so.

        Args:
            job: The job.
            shape: That of its model.

        Returns:
            Its rows with their side tables, and what the model is.
        """
        try:
            finished = self.at(job).finished
        except Exception as problem:  # whatever it is, the other jobs go on
            about = self._about_if_loaded(job)
            rows = failed_rows(self.spec, job, shape, explained(problem), about)
            finished = [Finished(row) for row in rows]
        return Result(job.id, job.model, self._about_if_loaded(job), finished)

    def seconds(self, job: Job, shape: Shape, clock: Callable[[], float]) -> tuple[float, float]:
        """Time of the forward pass of a job's window, and of the job once that is done.

        Args:
            job: The job.
            shape: That of its model.
            clock: What tells the time, in seconds.
        """
        self._window.forget()
        self._at.forget()
        with suppress(Exception):  # a job that fails takes its time too
            self.window(job.window)
        began = clock()
        with suppress(Exception):
            self.window(job.window).trace  # noqa: B018
        between = clock()
        self.result(job, shape)
        return between - began, clock() - between

    def _about_if_loaded(self, job: Job) -> dict[str, Any]:
        if ModelKey(job.model, job.weights) in self._failed:
            return {}
        with suppress(Exception):
            return self.about(job.model, job.weights)
        return {}


def _item(sample: Sample) -> InputKey:
    return InputKey(sample.num_tokens, sample.sample, sample.start, sample.sha256)
