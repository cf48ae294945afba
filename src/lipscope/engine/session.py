"""Sessions: maps at their inputs, with one forward pass for all questions about a window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.answer import Answer, Question, answer, explained, failed_rows, row_of
from lipscope.engine.checks import COPIES, FREE, parse_bytes, parse_tokens
from lipscope.engine.closed_form import (
    BuiltInput,
    built_input,
    moved_to,
    norm_in_front,
    of_norms,
    reach_of_bounds,
    theorems_about,
)
from lipscope.engine.direction_words import Texts, describe_directions, slopes_of_texts, texts_for
from lipscope.engine.plan import FUSED, InputKey, Job, Shape, Survey, WindowKey
from lipscope.engine.ready_model import (
    ModelAtInput,
    ReadyModel,
    Setting,
    layer_inputs,
    masked,
    ready_model,
)
from lipscope.engine.solve_queue import SolveQueue
from lipscope.engine.spec import REAL, Spec
from lipscope.errors import InputError, memory_for
from lipscope.linalg import Operator, Watch
from lipscope.models import (
    WHOLE,
    ExactNorm,
    LayerMap,
    Sample,
    check_request,
    device_of,
    inputs_of,
    norm_before,
    usable_memory,
    why_run,
    with_own_head,
)
from lipscope.records import Direction, Finished, Measurement
from lipscope.theorems import Normed, Residual, norm_of

_MASKS = {True: "run with a causal mask in every layer", False: "run without a causal mask"}
_CHUNKS = 2**30  # bytes
K = TypeVar("K")
V = TypeVar("V")


def keep_last(held: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The value of a key in a cache of size one."""
    if key not in held:
        held.clear()  # first: both may not fit in memory
        held[key] = make()
    return held[key]


class MapAtInput:
    """A map of a model's layer at an input, with everything that verbs need to know about it.

    Values are computed once, on first access; the model is prepared for the computation and
    restored afterwards. ``given`` is the map at the given input, if it was built before.
    """

    def __init__(
        self, session: Session, job: Job, window: ModelAtInput, given: LayerMap | None = None
    ) -> None:
        self._session, self.spec = session, session.spec
        self.job, self.window, self.model = job, window, window.model
        solves = session.solves
        self._watch = None if solves is None else solves.watching(job.layer)
        if given is not None:
            self.__dict__["given"] = given

    @cached_property
    def given(self) -> LayerMap:
        """The map at the given input, with padding held fixed."""
        held = self.window.maps.pop((self.job.layer, self.job.map), None)
        if held is not None:
            return held
        how = {"memory": self._session.memory, "per_head": self.spec.per_head}
        return self.window.map(self.job.layer, self.job.map, **how)

    @cached_property
    def _placed(self) -> tuple[LayerMap, Sample, list[str]]:
        notes = self.window.notes()
        if self.spec.causal is not None:
            notes.append(_MASKS[self.spec.causal])
        if self.job.input == REAL:
            return self.given, self.window.sample, notes
        made = self.built_input
        with self.window.ready():
            moved = moved_to(self.given, self.window.sample, self.job, made.x)
        return *moved, [*notes, made.remark]

    @property
    def map(self) -> LayerMap:
        """The map with its input, given or built."""
        return self._placed[0]

    @property
    def item(self) -> Sample:
        """The input of the model, as identified in rows."""
        return self._placed[1]

    @property
    def remarks(self) -> list[str]:
        """Remarks for rows on the model, the input and the reach of bounds."""
        notes = self._placed[2]
        if not self.spec.theorems or self.map.attention is None:
            return notes
        named = self.job.map in ("normed", "residual")
        layer = self.for_theorems if named else self.map.attention
        if norm_in_front(layer) is None:
            return notes
        return [*notes, reach_of_bounds(layer, self.x, self.allowed[1])]

    @property
    def x(self) -> Float[Tensor, "n d"]:
        """Input of the map."""
        return self.map.x

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in the model's vocabulary; their indices if it has none."""
        own = self.item.tokens
        return own if own and len(own) == len(self.x) else tuple(map(str, range(len(self.x))))

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """The map at another input."""
        with self.window.ready():
            return self.map(x)

    def linearise(self, x: Float[Tensor, "n d"] | None = None) -> Operator:
        """The Jacobian at this or another input; the model is prepared for its products."""
        with self.window.ready():
            found = self.map.linearise(self.x if x is None else x, memory=self._session.chunks)

        def ready(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def inside(vector: Tensor) -> Tensor:
                with self.window.ready():
                    return product(vector)

            return inside

        return replace(found, matvec=ready(found.matvec), rmatvec=ready(found.rmatvec))

    # --- inputs of theorems

    @cached_property
    def for_theorems(self) -> Attention | Normed | Residual:
        """The layer in the form that theorems take, with norms for ``normed`` and ``residual``."""
        built = self.given
        if built.attention is None:
            why = "it is unknown"
            if not self.model.is_layer:
                why = why_run(self.window.trace.calls[self.job.layer or 0].module)
            raise InputError(
                f"Weight-based bounds are not available for this layer, because {why}. "
                "`lipscope measure` measures it; `lipscope.models.family` describes it."
            )
        if built.norms is not None:
            return of_norms(built.attention, built.norms)
        if self.job.map != "normed":
            return built.attention
        assert self.norm is not None  # else the map does not exist
        return Normed(built.attention, ExactNorm(self.norm))

    @property
    def attention(self) -> Attention:
        """The attention layer in closed form."""
        found = self.for_theorems
        return found if isinstance(found, Attention) else found.attention

    @cached_property
    def norm(self) -> nn.Module | None:
        """The normalisation that feeds the layer, or None."""
        if self.model.is_layer:
            return None
        record = self.window.with_norms().trace
        found = norm_before(record, record.calls[self.job.layer or 0])
        return None if found is None else found.module

    @property
    def radius(self) -> float:
        """Largest token norm of the input."""
        return float(torch.linalg.vector_norm(self.x, dim=-1).max())

    def radius_of_norm(self) -> float:
        """Largest norm that a token can have after the norm that feeds the layer."""
        if self.norm is None:
            raise InputError(
                "`radius = norm` needs a norm that feeds the layer. Found none before layer "
                f"{self.job.layer}; give a number."
            )
        return norm_of(self.norm, self.given.x.shape[1]).radius

    @cached_property
    def allowed(self) -> tuple[float | None, float | None]:
        """Token norms that bounds on all inputs cover: a maximum, or a minimum; None if unset."""
        radius = self.spec.radius
        if radius == "inputs":
            return self._session.of_inputs(self.job)
        if norm_in_front(self.for_theorems) is not None:
            if radius != "row":
                raise InputError(
                    "`radius` should be left out for a layer with a norm in front, whose bounds "
                    f"hold for tokens of every norm. Found `radius = {radius}`."
                )
            return None, None
        if radius == "norm":
            return self.radius_of_norm(), None
        return (None if radius == "row" else float(radius)), None

    @property
    def size(self) -> float:
        """Largest token norm of the input; the smallest if a norm precedes the layer."""
        front, x = norm_in_front(self.for_theorems), self.given.x
        return float(x.norm(dim=-1).max() if front is None else front.constants.size(x).min())

    @cached_property
    def built_input(self) -> BuiltInput:
        """The input that the job builds, within the radius of bounds on all inputs."""
        job, built = self.job._replace(metric="", id=""), self.given

        def make() -> BuiltInput:
            radius = self.allowed[0] if job.radius is None else job.radius
            largest = float(torch.linalg.vector_norm(built.x, dim=-1).max())
            with self.window.ready():
                return built_input(built, job, self.spec, radius or largest)

        key = job, self.spec.ascent_steps, self.spec.radius
        return keep_last(self.window.built_inputs, key, make)

    # --- answers

    @property
    def question(self) -> Question:
        """The question to solve: map, job, memory, key for the random starts, and watcher."""
        spec, job = self.spec, self.job
        key = f"{spec.models[job.model].name}|{job.layer}|{job.num_tokens or ''}|{job.sample}"
        if job.input != REAL:
            key += f"|{job.input}|{job.radius or ''}"
        return Question(self.map, spec, job, self._session.chunks, key, self._watch)

    @property
    def answers(self) -> list[Answer]:
        """The answers for the map, or for each head, including singular vectors."""
        spec, job = self.spec, self.job
        whole_tokens = spec.move != COPIES  # the model itself has no copies

        def make() -> list[Answer]:
            solved, solves = None, self._session.solves
            # A failure here recurs when the map's own row is made, and is reported there.
            with suppress(InputError, RuntimeError, MemoryError):
                solved = None if solves is None else solves.solved(self)
            # Few threads while other solves run ahead.
            beside = nullcontext() if solves is None else solves.beside()
            with beside, self.window.ready():
                check = self._session.first(job) and whole_tokens
                reference = partial(self.window.reference, self.map) if check else None
                return answer(self.question, reference, solved)

        asked = job, spec.per_head, spec.rest, spec.average, spec.directions
        return keep_last(self.window.answers, asked, make)

    @cached_property
    def finished(self) -> list[Finished]:
        """The rows, each with its side tables."""
        spec, found, about = self.spec, [], self.model.loaded.about
        more: dict[str, Any] = {"device": self.window.device.type, "notes": self.remarks}
        more |= {"of": self.map, "item": self.item}
        for reply in self.answers:
            row = row_of(spec, self.job, reply, about, **more)
            tokens = reply.token_shares(row.id, self.item.tokens) if spec.tokens else []
            bounds = ()
            if spec.theorems:
                with self.window.ready():
                    bounds = theorems_about(
                        row, self.map, spec, lambda: (self.for_theorems, self.allowed)
                    )
            with memory_for("The readings of a whole vocabulary", self.job.dtype):
                parts = self._described(row, reply)
            found.append(Finished(row, tuple(tokens), bounds, parts))
        return found

    def _described(self, row: Measurement, reply: Answer) -> tuple[Direction, ...]:
        if not reply.leading:
            return ()
        model, window, spec = self.model, self.window, self.spec
        record = None if model.is_layer else window.trace
        with window.ready() as ready:
            whole = None if record is None else window.with_head(ready)
            about = (self.map, row.id, model.loaded, self.item, record)
            memory = self._session.chunks
            found = (*describe_directions(reply.leading, *about, memory, whole),)
            if not spec.among:
                return found
            inputs = None if record is None else record.inputs
            words = isinstance(inputs, Mapping) and "input_ids" in inputs
            among = spec.among, model.loaded, record, spec.special_tokens
            reads = words and window.trace.output is not None and window.trace.output.ndim == 3
            texts = keep_last(
                self._session.texts, window.setting, lambda: texts_for(*among, reads=reads)
            )
            assert record is not None  # `texts_for` refuses None
            return (*found, *slopes_of_texts(reply.leading, self.map, row.id, record, texts))


class Result(NamedTuple):
    """The result of a job, or a certified radius of a row that is still in progress."""

    job: str  # its id
    model: int  # index of its model
    about: dict[str, Any]  # model metadata for its rows; empty if the model could not be loaded
    finished: list[Finished]  # its rows; none before the last radius
    radius: tuple[str, dict[str, Any]] | None = None  # a certified decision with its key


def failed(spec: Spec, job: Job, shape: Shape, error: str) -> Result:
    """The result of a job whose workers died: failed rows."""
    return Result(job.id, job.model, {}, failed_rows(spec, job, shape, error, {}))


class ModelKey(NamedTuple):
    """A model of a specification, with the seed of its weights if they are random."""

    model: int
    weights: int | None


class Session:
    """Answers the jobs of a specification; consecutive jobs share computations.

    Use it in a ``with`` block, which restores the model at its end. ``sources`` are the inputs of
    models by name; ``models`` returns models that are already loaded; ``norms``: record the norms
    that feed layers, for any map; ``by_layer``: a survey examines only the first layer.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Any],
        models: Mapping[str, Callable[[], ReadyModel]] | None = None,
        *,
        norms: bool = False,
        by_layer: bool = False,
    ) -> None:
        self.spec, self.sources, self.models = spec, sources, models or {}
        if spec.memory.startswith(FREE):  # or a share of it, such as `free/2`
            self.memory = usable_memory() // int(spec.memory.partition("/")[2] or 1)  # bytes
            # Memory for products and the basis, limited by default: more is no faster.
            self.chunks = min(self.memory, _CHUNKS)
        else:
            self.memory = self.chunks = parse_bytes(spec.memory)
        device_of(spec.device)
        self._norms = norms or spec.radius == "norm"
        self._by_layer = by_layer and not spec.per_head  # per head, the shape needs all layers
        self._stack = ExitStack()
        self._failed: dict[ModelKey, Exception] = {}
        # Caches of size one.
        self._model: dict[ModelKey, ReadyModel] = {}
        self._items: dict[tuple[ModelKey, str], list[Sample]] = {}
        self._ready: dict[tuple[ModelKey, Setting], None] = {}
        # Windows whose passes may be shared, None for all; windows that share the current pass.
        self.coming: Collection[WindowKey] | None = ()
        self._window: dict[WindowKey, ModelAtInput] = {}
        self._at: dict[Job, MapAtInput] = {}
        self.solves: SolveQueue[MapAtInput] | None = None  # if several jobs are expected
        self._sizes: dict[Any, dict[int | None, list[float]]] = {}
        self.texts: dict[Setting, Texts] = {}  # texts that directions are compared with

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Release everything, and stop solving ahead, whose threads nothing else would end."""
        self.close()
        self.solves = None

    def close(self) -> None:
        """Restore the model and release it."""
        if self.solves is not None:
            self.solves.end()
        self._stack.close()
        self._part()
        for held in (self._model, self._items, self._ready, self._at, self.texts):
            held.clear()

    # --- models, inputs and surveys

    def model(self, key: ModelKey) -> ReadyModel:
        """A model; after a failure, loading is not repeated for every job."""
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
            needs = [name for name in self.spec.maps if name in ("stack", *WHOLE)]
            if needs:
                found = found.in_memory(f"The map `{needs[0]}`")
            if not {"logits", "margin"}.intersection(self.spec.maps):
                return found
            return ReadyModel(replace(found.loaded, model=with_own_head(found.loaded)))

        try:
            return keep_last(self._model, key, load)
        except Exception as problem:
            self._failed[key] = problem
            raise

    def about(self, model: int, weights: int | None = None) -> dict[str, Any]:
        """Metadata of a model for rows; a random one, whose seeds differ, has weights "random"."""
        about = self.model(ModelKey(model, weights)).loaded.about
        return about if weights is None else about | {"weights": "random"}

    def items(self, key: ModelKey, name: str) -> list[Sample]:
        """All inputs of a model from a source."""
        model, spec = self.model(key), self.spec

        def cut() -> list[Sample]:
            if isinstance(self.sources[name], list):  # cut before
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

        return keep_last(self._items, (key, name), cut)

    def survey(self, model: int) -> Survey:
        """Layers, heads and inputs of a model; maps are built once at the first input."""
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
        listed = {
            name: [InputKey(s.num_tokens, s.sample, s.start, s.sha256) for s in some]
            for name, some in items.items()
        }
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
        count = window.num_layers
        layers = range(count) if self.spec.layers is None else self.spec.layers
        for layer in layers:
            if layer >= count:
                raise InputError(
                    f"`layers` should be between 0 and {count - 1} for "
                    f"`{self.spec.models[key.model].name}`. Found {layer}."
                )
        longest = max((n for n in lengths if n is not None), default=0)
        heads = [1] * count
        for name in maps:
            places = [None] if name in WHOLE else layers
            for layer in places:
                if longest > record.calls[layer or 0].num_tokens:  # else building it checks
                    check_request(record, layer, name, longest, self.memory)
            for layer in places[:1] if self._by_layer else places:
                # Stored for the jobs of the first window.
                built = window.map(layer, name, memory=self.memory, per_head=per_head)
                if record.resident is None or len(layers) == 1:
                    window.maps[layer, name] = built
                self._check_tokens(len(built.x), len(built.output))
                heads[layer or 0] = built.num_heads or 1
        return Shape(count, tuple(heads) if per_head else None)

    def _check_tokens(self, moving: int | None, reading: int | None = None) -> None:
        """Check that the tokens to move and to read exist."""
        for option, count in (("move", moving), ("read", reading or moving)):
            text = getattr(self.spec, option)
            if count is not None and text != "all":
                parse_tokens(text, count, option)

    # --- a map at an input

    def window(self, key: WindowKey) -> ModelAtInput:
        """The model at an input; it stays prepared until another window is requested.

        If the model is read block by block, several windows share a pass.
        """
        if key in self._window:
            return self._window[key]
        model_key, spec = ModelKey(key.model, key.weights), self.spec
        model, items = self.model(model_key), self.items(model_key, key.text)
        maps = {name for name in spec.maps if (name in FUSED) == key.fused}
        norms = bool({"normed", "residual"} & maps) or self._norms
        setting = self._setting(key)

        def enter() -> None:
            self._stack.close()
            self._stack.enter_context(model.ready(setting))

        self._part()
        self._at.clear()
        if self.solves is not None:
            self.solves.end()
        keep_last(self._ready, (model_key, setting), enter)
        whole = spec.among or not maps.isdisjoint(("stack", *WHOLE))
        about: dict[str, Any] = {"norms": norms, "layers": None if whole else spec.layers}
        about |= {"sums": "residual" in maps, "memory": self.memory}
        for one in self._sharing(key):
            self._window[one] = model.window(setting, items[one.item], **about)
        for one in self._window.values():
            one.beside = [*self._window.values()]
        return self._window[key]

    def _setting(self, key: WindowKey) -> Setting:
        spec = self.spec
        more = (spec.device, spec.side, spec.modules, spec.position_offset)
        return Setting(key.dtype, key.fused, *more)

    def _part(self) -> None:
        """Release the windows."""
        for one in self._window.values():
            one.beside = []
        self._window.clear()

    def _sharing(self, key: WindowKey) -> list[WindowKey]:
        """The windows that share a pass with this one: as many as fit in half of the memory."""
        model_key = ModelKey(key.model, key.weights)
        model, items = self.model(model_key), self.items(model_key, key.text)
        if model.is_layer or not model.by_block(getattr(torch, key.dtype)):
            return [key]
        left, found = 0, list[WindowKey]()
        for index, item in enumerate(items):
            one = key._replace(item=index)
            if self.coming is not None and one not in self.coming and one != key:
                continue
            size = model.bytes_of_states(self._setting(key), item.num_tokens)
            if left < size:
                if key in found:
                    break
                left, found = self.memory // 2, []
            left -= size
            found.append(one)
        return found

    def ordered(self, jobs: Sequence[Job]) -> list[Job]:
        """Announce jobs; return them in the order that reads the fewest blocks.

        That is layer by layer for windows that share a pass.
        """
        found, keys = list[Job](), [job.window for job in jobs]
        self.coming = dict.fromkeys(keys)
        several = len(self.coming) > 1
        shared = {key: self._sharing(key) if several else [key] for key in self.coming}
        for _, some in groupby(zip(keys, jobs, strict=True), lambda one: shared[one[0]]):
            found += sorted((job for _, job in some), key=lambda job: job.layer or 0)
        self.expect(found)
        return found

    def at(self, job: Job) -> MapAtInput:
        """The map of a job, at its input."""
        ahead = None if self.solves is None else self.solves.taken(job)
        if ahead is not None:
            return keep_last(self._at, job, lambda: ahead)
        key = job.window
        window, before = self.window(key), next(iter(self._at.values()), None)
        place = key, job.map, job.layer
        same = before and (before.job.window, before.job.map, before.job.layer) == place
        given = before.given if before is not None and same else None
        return keep_last(self._at, job, lambda: MapAtInput(self, job, window, given))

    def expect(
        self, jobs: Sequence[Job], watch: Callable[[int | None], Watch] | None = None
    ) -> None:
        """Announce jobs whose sigma will be requested in this order, to solve them ahead.

        ``watch`` returns a callback for a layer, which receives its intervals as they narrow.
        """
        if self.solves is not None:
            self.solves.end()
        if len(jobs) > 1 or watch is not None:
            made = partial(MapAtInput, self)
            self.solves = SolveQueue(self.spec, self.chunks, made, jobs, watch)

    def first(self, job: Job) -> bool:
        """Whether the input of a job is the first of its length."""
        some = self.items(ModelKey(job.model, job.weights), job.text)
        alike = [one.sample for one in some if one.num_tokens == job.num_tokens]
        return job.sample == min(alike)

    def of_inputs(self, job: Job) -> tuple[float | None, float | None]:
        """Largest token norm over all inputs of a layer; the smallest if a norm precedes it."""
        key = ModelKey(job.model, job.weights)
        held = keep_last(self._sizes, (key, job.dtype, job.text, job.map), dict)
        at = self.at(job)
        if job.layer not in held:
            layers = self.spec.layers or [job.layer]
            if self.spec.layers is None and not at.model.is_layer:
                layers = range(at.window.num_layers)
            held |= {layer: [] for layer in layers}
            # Window by window, so that one forward pass serves all layers.
            for index in range(len(self.items(key, job.text))):
                for layer in layers:
                    other = job._replace(item=index, input=REAL, layer=layer)
                    with suppress(InputError):  # reported in the rows of that layer
                        held[layer].append(self.at(other).size)
        some = held[job.layer] or [at.size]  # which raises the reason
        return (max(some), None) if norm_in_front(at.for_theorems) is None else (None, min(some))

    # --- answers

    def result(self, job: Job, shape: Shape) -> Result:
        """The result of a job for a model of this shape; failed rows on any error."""
        try:
            finished = self.at(job).finished
        except Exception as problem:  # the other jobs must go on
            about = self._about_if_loaded(job)
            finished = failed_rows(self.spec, job, shape, explained(problem), about)
        return Result(job.id, job.model, self._about_if_loaded(job), finished)

    def seconds(self, job: Job, shape: Shape, clock: Callable[[], float]) -> tuple[float, float]:
        """Time of the forward pass of a job's window, and of the rest of the job.

        ``clock`` returns the time in seconds.
        """
        self._part()
        self._at.clear()
        with suppress(Exception):  # failed jobs take time too
            self.window(job.window)
        began = clock()
        with suppress(Exception):
            _ = self.window(job.window).trace
        between = clock()
        self.result(job, shape)
        return between - began, clock() - between

    def _about_if_loaded(self, job: Job) -> dict[str, Any]:
        with suppress(Exception):
            return self.about(job.model, job.weights)
        return {}
