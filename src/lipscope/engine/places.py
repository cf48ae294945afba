"""From the names in a job to the map that it asks about, each step done once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.answer import Itself
from lipscope.engine.layer import layer_inputs, map_of_layer
from lipscope.engine.plan import FUSED, Job
from lipscope.engine.ranges import parse_bytes
from lipscope.engine.spec import Spec
from lipscope.errors import InputError, memory_for
from lipscope.models import (
    OF_BLOCKS,
    LayerMap,
    LoadedModel,
    Sample,
    Trace,
    attention_sites,
    build_map,
    device_of,
    implementation_for,
    inputs_of,
    later_positions,
    load_model,
    moved,
    overflows,
    parted,
    reader_of,
    without_padding,
)
from lipscope.models import prepared as ready
from lipscope.models import trace as run_traced
from lipscope.models.pretrained import with_words
from lipscope.models.tracing.prepare import Choice, as_chosen, at_rest, choices


class Places:
    """Models, inputs, traces and maps of a specification: of each kind the last one is kept.

    Args:
        spec: The specification.
        sources: What models read, by name.
        models: What gives models that are had already, by name.
        norms: Whether the norms that feed layers are asked for, whatever the map.

    Attributes:
        device: Where models run.
        memory: Budget in bytes.
        probed: Maps that were built before their job came.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Any],
        models: Mapping[str, Callable[[], LoadedModel]],
        *,
        norms: bool,
    ) -> None:
        self.spec, self.sources, self.models = spec, sources, models
        self.device, self.memory = device_of(spec.device), parse_bytes(spec.memory)
        self.probed: dict[tuple[Any, ...], LayerMap] = {}
        self._needs_norms = norms
        self._held: dict[str, tuple[Any, Any]] = {}
        self._layers: dict[int, list[str]] = {}
        self._own: list[Choice] = []
        self._stack = ExitStack()

    def close(self) -> None:
        """Put the model back as it was, and let go of everything."""
        self._stack.close()
        self._held.clear()
        self.probed.clear()

    def let_go(self, what: str) -> None:
        """Forget the last one of a kind."""
        self._held.pop(what, None)

    def once(self, what: str, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for this key; what was made for another one is let go first."""
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

    def holds(self, model: int, weights: int | None) -> bool:
        """Whether a model is loaded, and could be."""
        held = self._held.get("model", (None, None))
        return held[0] == (model, weights) and not isinstance(held[1], Exception)

    def loaded(self, model: int, weights: int | None) -> LoadedModel:
        """A model, with the seed of its weights if they are random."""

        def load() -> LoadedModel:
            self.close()
            name = self.spec.models[model].name
            if name in self.models:
                return self.models[name]()
            return load_model(name, seed=weights or 0, allow_pickle=self.spec.allow_pickle)

        return self.once("model", (model, weights), load)

    def is_layer(self, job: Job) -> bool:
        """Whether the model is an attention layer by itself."""
        return isinstance(self.loaded(job.model, job.weights).model, Attention)

    def prepared(self, job: Job) -> tuple[nn.Module, list[str]]:
        """The model in the dtype and on the device of the run, and remarks on what was changed."""
        loaded = self.loaded(job.model, job.weights)
        if isinstance(loaded.model, Attention):
            return loaded.model, []

        def prepare() -> tuple[nn.Module, list[str]]:
            self._stack.close()
            self.let_go("trace")
            sites = self._sites(loaded.model)
            closed = job.fused and all(reader_of(site) for site in sites.values())
            self._own = choices(loaded.model)
            model, notes = self._stack.enter_context(
                ready(
                    loaded.model,
                    dtype=getattr(torch, job.dtype),
                    device=self.device,
                    implementation=implementation_for(loaded.model, closed=closed),
                )
            )
            for one in {model, loaded.model}:
                self._stack.enter_context(at_rest(one))
                self._stack.enter_context(later_positions(one, self.spec.position_offset))
            return model, notes

        return self.once("prepared", job[1:5], prepare)

    def with_head(self, job: Job) -> nn.Module | None:
        """The prepared model with the head that its checkpoint holds, if it was loaded without."""
        name = parted(self.loaded(job.model, job.weights).name)[0]
        model = self.prepared(job)[0]
        return self.once("head", job[1:5], lambda: with_words(name, model))

    def itself(self, job: Job, built: LayerMap) -> Itself:
        """The model between the ends of a map: as it was given, if that is in full precision."""
        if built.ends is None:
            return Itself(built.function, built.x.dtype)
        model, arguments = self.loaded(job.model, job.weights).model, self.item(job).arguments
        found = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
        if any(dtype.itemsize < 4 for dtype in found):
            model, found = self.prepared(job)[0], {built.x.dtype}
            arguments = moved(arguments, self.device, built.x.dtype)
        dtype = torch.float32 if torch.float32 in found else torch.float64
        if len(found) == 1:  # as for the measurement, floats are in the dtype of the weights
            arguments = moved(arguments, None, dtype)
        function = built.ends.function(model, arguments)

        def itself(x: Tensor) -> Tensor:
            with as_chosen(model, self._own):
                return function(x)

        return Itself(itself, dtype)

    def _sites(self, model: nn.Module) -> dict[str, nn.Module]:
        return attention_sites(model, self.spec.modules, side=self.spec.side)

    def items(self, model: int, weights: int | None, name: str) -> list[Sample]:
        """Every input that a source gives a model."""
        loaded, spec = self.loaded(model, weights), self.spec

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

        return self.once("items", (model, weights, name), cut)

    def item(self, job: Job) -> Sample:
        """The input of a job, as it was given."""
        return self.items(job.model, job.weights, job.text)[job.item]

    @memory_for("The model's own forward pass")
    def trace(self, job: Job) -> Trace:
        """The trace of the model at the input."""
        model, item = self.prepared(job)[0], self.item(job)
        maps = {name for name in self.spec.maps if (name in FUSED) == job.fused}

        def run() -> Trace:
            self.let_go("map")
            dtype = getattr(torch, job.dtype)
            record = run_traced(
                model,
                moved(item.arguments, self.device, dtype),
                self._sites(model),
                norms=bool({"normed", "residual"} & maps) or self._needs_norms,
                blocks=bool(maps.intersection(OF_BLOCKS)),
                dtype=dtype,
                side=self.spec.side,
                asked=self.spec.modules,
            )
            names = [call.name for call in record.calls]
            if self._layers.setdefault(job.model, names) != names:
                raise InputError(
                    "The model should call the same attention modules on every input. Found "
                    f"{len(names)} calls here and {len(self._layers[job.model])} on an earlier "
                    "input, or other modules."
                )
            own = self.loaded(job.model, job.weights).model
            record.remarks = overflows(own, item, self.spec.modules, self.spec.side)
            return record

        return self.once("trace", job.window, run)

    @memory_for("The layer's own forward pass")
    def built(self, job: Job) -> LayerMap:
        """The map at the input that was given, padding held fixed."""

        def build() -> LayerMap:
            per_head = self.spec.per_head
            model = self.loaded(job.model, job.weights).model
            if isinstance(model, Attention):
                return map_of_layer(model, self.item(job), job.map, getattr(torch, job.dtype))
            record = self.trace(job)
            built = build_map(record, job.layer, job.map, memory=self.memory, per_head=per_head)
            return without_padding(built, record)

        return self.once("map", job.place, lambda: self.probed.pop(job.place, None) or build())
