"""Models that are prepared for measurement and restored afterwards; inputs that are traced once."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lipscope.attention import Attention, MultiheadAttention, hooks_of
from lipscope.errors import InputError, memory_for, remark, type_and_shape
from lipscope.linalg import few_threads
from lipscope.models import (
    OF_FUNCTION,
    BlockOutputs,
    BlockPass,
    BlockRun,
    Choice,
    LayerMap,
    LoadedModel,
    MapEndpoints,
    ModuleWeights,
    ResidentWeights,
    Sample,
    Side,
    Trace,
    adopt_model,
    are_read,
    as_chosen,
    attention_sites,
    build_map,
    choices,
    converted,
    count_of_layers,
    device_of,
    digest,
    eval_mode,
    floating,
    implementation_for,
    later_positions,
    load_model,
    margin_of,
    overflows,
    prepared,
    remarks_on,
    run_of_blocks,
    to_device,
    trace as run_traced,
    watched_blocks,
    with_mask,
    with_words,
    without_padding,
    without_weights,
)

_MATRICES = 16  # number of token matrices that a pass stores per layer
_DRAWS = "the model draws random numbers in its forward pass: here the same ones each time"


class Setting(NamedTuple):
    """Settings for preparing a model, shared by all inputs of a run."""

    dtype: str  # floating type
    fused: bool  # whether fused attention may be used to capture inputs
    device: str  # name of the device
    side: Side  # which attention modules are layers, and through which side
    modules: str | None  # regular expression for their paths, or None
    position_offset: int  # offset of the position ids


@dataclass(frozen=True)
class Ready:
    """A model prepared for measurement."""

    model: nn.Module  # the module, or a copy in the dtype and on the device of the run
    notes: tuple[str, ...] = ()  # changes made to it
    own: tuple[Choice, ...] = ()  # its original attention implementations
    given: tuple[Choice, ...] = ()  # those of the module as given
    types: frozenset[torch.dtype] = frozenset()  # floating types of its weights and buffers
    resident: ResidentWeights | None = None  # which weights are in memory; None for all
    sites: tuple[str, ...] = ()  # paths of the attention modules that are layers

    def is_given(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether it is the module as given, unchanged and of this dtype only."""
        as_it_came = all(getattr(one.config, one.key) == one.value for one in self.given)
        return self.model is module and self.types == {dtype} and as_it_came


@dataclass(frozen=True)
class ReferenceModel:
    """A model between the two ends of a map, run unchanged."""

    function: Callable[[Tensor], Tensor]  # from the map's input to the model's output at its end
    dtype: torch.dtype  # floating type of its own computation
    # The same with stored outputs of the blocks below the map, which do not run again.
    quick: Callable[[Tensor], Tensor] | None = None


class ReadyModel:
    """A loaded model that is prepared for each question; see `OpenModel`.

    ``is_layer``: whether it is a standalone attention layer.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.name, self.model = loaded, loaded.name, loaded.model
        self.tokenizer, self.is_layer = loaded.tokenizer, isinstance(loaded.model, Attention)
        self._ready: dict[Setting, Ready] = {}
        self._copies: dict[tuple[torch.dtype, torch.device], nn.Module | ResidentWeights] = {}
        self._windows: WeakValueDictionary[Any, ModelAtInput] = WeakValueDictionary()
        # Names of the calls of each kind of layer, and whether they are complete.
        self._layers: dict[tuple[Side, str | None], tuple[list[str], bool]] = {}
        self._state = _write_counts(loaded.model)
        self._whole: ReadyModel | None = None
        self.with_masks: dict[bool, ReadyModel] = {}  # the model with other masks

    @property
    def config(self) -> Any:
        """The model's Hugging Face configuration, or None."""
        return self.loaded.config

    @contextlib.contextmanager
    def ready(self, setting: Setting) -> Iterator[Ready]:
        """The model prepared with a setting; the outermost block restores it."""
        if setting in self._ready:
            yield self._ready[setting]
            return
        with contextlib.ExitStack() as stack:
            self._ready[setting] = self._enter(stack, setting)
            try:
                yield self._ready[setting]
            finally:
                del self._ready[setting]

    def _enter(self, stack: contextlib.ExitStack, setting: Setting) -> Ready:
        model = self.model
        if isinstance(model, Attention):
            return Ready(model)
        if not self._ready:
            self.check_unchanged()
        sites = attention_sites(model, setting.modules, side=setting.side)
        closed = setting.fused and are_read(sites)
        given = choices(model)
        dtype, device = getattr(torch, setting.dtype), device_of(setting.device)
        if (dtype, device) not in self._copies:
            self._copies[dtype, device] = self._converted(dtype, device)
        copy = self._copies[dtype, device]
        resident = copy if isinstance(copy, ResidentWeights) else None
        done, notes = stack.enter_context(
            prepared(
                model,
                dtype=dtype,
                device=device,
                implementation=implementation_for(model, closed=closed),
                own=copy.model if isinstance(copy, ResidentWeights) else copy,
            )
        )
        own = given
        if done is not model:
            pairs = zip(choices(done), given, strict=True)
            own = [mine._replace(value=one.value) for mine, one in pairs]
            stack.enter_context(eval_mode(model))
        for one in {done, model}:
            stack.enter_context(later_positions(one, setting.position_offset))
        paths = (site.replace("_orig_mod.", "") for site in sites)  # compiled modules are unwrapped
        return Ready(
            model=done,
            notes=tuple(notes),
            own=tuple(own),
            given=tuple(given),
            types=frozenset(t.dtype for t in floating(model)),
            resident=resident,
            sites=tuple(paths),
        )

    def _converted(self, dtype: torch.dtype, device: torch.device) -> nn.Module | ResidentWeights:
        """The model in a dtype on a device, whole or block by block."""
        model, stored = self.model, self.loaded.stored
        if not self.by_block(dtype):
            return converted(model, dtype, device)
        source = ModuleWeights(model) if stored is None else stored
        return ResidentWeights(without_weights(model, dtype, device), source, dtype, device)

    def in_half(self, device: torch.device) -> ResidentWeights | None:
        """The model in float16, if it is stored so on disk; bfloat16 has a wide range.

        None for all others.
        """
        stored, half = self.loaded.stored, torch.float16
        if stored is None or next(self.model.parameters()).dtype != half:
            return None
        if (half, device) not in self._copies:
            self._copies[half, device] = self._converted(half, device)
        found = self._copies[half, device]
        return found if isinstance(found, ResidentWeights) else None

    def by_block(self, dtype: torch.dtype) -> bool:
        """Whether its weights are read, or cast in memory, block by block."""
        if self.loaded.stored is not None:
            return True
        as_it_is = all(p.dtype == dtype for p in self.model.parameters())
        return not as_it_is and self.loaded.is_large(dtype)

    def bytes_of_states(self, setting: Setting, num_tokens: int | None) -> int:
        """Estimated memory of a pass for a window: some token matrices per layer."""
        widths = [p.numel() for p in self.model.parameters() if p.ndim == 1]
        sizes = max(widths, default=1) * getattr(torch, setting.dtype).itemsize
        sites = attention_sites(self.model, setting.modules, side=setting.side)
        return _MATRICES * len(sites) * (num_tokens or 1) * sizes

    def in_memory(self, what: str) -> ReadyModel:
        """The model with all weights in memory, as ``what`` requires; itself if it has them."""
        if self.loaded.stored is None:
            return self
        if self._whole is None:
            self._whole = ReadyModel(self.loaded.in_memory(what))
        return self._whole

    @property
    def changed(self) -> bool:
        """Whether the module's weights, parts or hooks changed since it was opened."""
        return _write_counts(self.model) != self._state

    def check_unchanged(self) -> None:
        """Refuse a module that `changed`."""
        if self.changed:
            raise InputError(
                f"`{self.name}` should be as it was when it was opened. Found other weights, "
                "parts or hooks: open it again with `load_model`."
            )

    def window(
        self,
        setting: Setting,
        sample: Sample,
        *,
        norms: bool,
        sums: bool = True,
        layers: Sequence[int] | None = None,
        memory: int = 2**30,
    ) -> ModelAtInput:
        """The model at an input; the same object as long as it is referenced.

        ``layers``: those that will be used, None for all; ``sums``: whether more than their
        attention will be used. If the model is read block by block, blocks of other layers run at
        most once and are then released; those of these layers are cached within half of ``memory``
        bytes, which they share with the hidden states of windows in the same pass.
        """
        key = (setting, sample.sha256, sample.kind, sample.sample, sample.start)
        found = self._windows.get(key)
        if (
            found is None
            or (norms and not found.norms)
            or not found.reaches(layers, sums)
            or not _same_arguments(found.sample, sample)
        ):
            self._windows[key] = found = ModelAtInput(self, setting, sample, norms, sums)
            found.layers, found.memory = layers, memory
        return found

    def check_layers(self, setting: Setting, names: list[str], *, complete: bool) -> None:
        """Refuse an input on which the model calls other modules than on earlier ones.

        A pass that is not ``complete`` called only the first of them.
        """
        key = (setting.side, setting.modules)
        held, all_held = self._layers.setdefault(key, (names, complete))
        counts = len(held), len(names)
        same = all(map(operator.eq, held, names))
        if not same or (complete and all_held and counts[0] != counts[1]):
            raise InputError(
                "The model should call the same attention modules on every input. Found "
                f"{counts[1]} calls here and {counts[0]} on an earlier input, or other modules."
            )
        if counts[1] >= counts[0]:
            self._layers[key] = names, complete or all_held


AnyModel = str | Path | nn.Module | LoadedModel | ReadyModel


class ModelAtInput:
    """A model at one input, traced once on first use."""

    def __init__(
        self, model: ReadyModel, setting: Setting, sample: Sample, norms: bool, sums: bool
    ) -> None:
        self.model, self.setting, self.sample = model, setting, sample
        self.norms, self.sums = norms, sums
        self.layers: Sequence[int] | None = None  # those that will be used; None for all
        self.memory = 2**30  # bytes, half of them for cached blocks and hidden states
        # Outputs of the blocks of the model as given, in its own dtype, if known.
        self._blocks: tuple[torch.dtype, BlockRun] | None = None
        self.beside: list[ModelAtInput] = []  # windows that share a pass over the blocks
        self._with_norms: ModelAtInput | None = None  # used if this one's trace has none
        self._sites = 0  # number of attention modules, known after tracing
        # Maps built before their layer is used, and the last results.
        self.maps: dict[tuple[int | None, str], LayerMap] = {}
        self.answers: dict[Any, Any] = {}
        self.built_inputs: dict[Any, Any] = {}

    @contextlib.contextmanager
    def ready(self) -> Iterator[Ready]:
        """The prepared model inside the block, with an efficient number of threads."""
        with few_threads(self._entries), self.model.ready(self.setting) as ready:
            yield ready

    def with_norms(self) -> ModelAtInput:
        """The same with norms in its trace, by another pass if this one has none."""
        if self.norms:
            return self
        if self._with_norms is None:
            reach = {"layers": self.layers, "sums": self.sums, "memory": self.memory}
            self._with_norms = self.model.window(self.setting, self.sample, norms=True, **reach)
        return self._with_norms

    @property
    def _entries(self) -> int | None:
        """Number of entries of the largest layer input; None before the pass."""
        if self.model.is_layer:
            return max(torch.as_tensor(x).numel() for x in self.sample.arguments)
        calls = vars(self)["trace"].calls if "trace" in vars(self) else ()
        return max((call.x.numel() for call in calls), default=None)

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the run."""
        return getattr(torch, self.setting.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the run."""
        return device_of(self.setting.device)

    @property
    def arguments(self) -> Any:
        """Arguments of the model, on the device and in the dtype of the run."""
        return to_device(self.sample.arguments, self.device, self.dtype)

    @cached_property
    def trace(self) -> Trace:
        """The trace of the forward pass, shared block by block with windows beside it."""
        forward = memory_for("The model's own forward pass", self.setting.dtype)
        with forward, self.ready() as ready:
            resident = ready.resident
            sites = {name: ready.model.get_submodule(name) for name in ready.sites}
            if resident is None:
                return self._overflowing(self._pass(ready, sites), None)
            some = [self, *(o for o in self.beside if o is not self and "trace" not in vars(o))]
            some = [one for one in some if one.layers == self.layers]
            layers = self.layers if count_of_layers(ready.model, sites) else None
            with self._reading(resident, list(sites), layers):
                found = resident.turns.run([partial(one._pass, ready, sites) for one in some])
                if any(isinstance(one, Trace) and one.draws for one in found[1:]):
                    some, found = some[:1], [self._pass(ready, sites)]  # keeps draws in order
            for one, record in zip(some, found, strict=True):
                if isinstance(record, Trace):
                    vars(one)["trace"] = one._overflowing(record, layers)
            if isinstance(found[0], BaseException):
                raise found[0]
            return found[0]

    def _pass(self, ready: Ready, sites: Mapping[str, nn.Module]) -> Trace:
        setting, resident, self._sites = self.setting, ready.resident, len(sites)
        layers = self.layers if resident and count_of_layers(ready.model, sites) else None
        upto = max(layers) if layers else None
        watch = self._several and ready.is_given(self.model.model, self.dtype)
        with watched_blocks(ready.model) if watch else contextlib.nullcontext() as found:
            record = run_traced(
                ready.model,
                self.arguments,
                sites,
                norms=self.norms,
                blocks=not setting.fused,
                dtype=self.dtype,
                side=setting.side,
                asked=setting.modules,
                by_block=None if resident is None else BlockPass(resident, upto, self._briefly),
            )
        if found is not None and self._pays_to_know(record.calls[0].x, record):
            run = found()
            if run.outputs:  # empty if the model had to run twice
                self._blocks = self.dtype, run
        names = [call.name for call in record.calls]
        self.model.check_layers(setting, names, complete=record.complete)
        return record

    def _overflowing(self, record: Trace, layers: Sequence[int] | None) -> Trace:
        """The trace with remarks on overflow in the model's own half precision."""
        half, upto = self.model.in_half(self.device), max(layers) if layers else None
        if self.model.loaded.stored is None or half is not None:
            own, inputs = self.model.model if half is None else half.model, self.sample.arguments
            by_block = None if half is None else BlockPass(half, upto)
            about = self.setting.modules, self.setting.side, by_block
            record.remarks = overflows(own, inputs, *about)
        return record

    @property
    def _briefly(self) -> bool:
        """Whether nothing after the attention of the last layer is needed."""
        return self.setting.fused and not self.sums

    @property
    def num_layers(self) -> int:
        """Number of attention layers, even if the pass ended before the last."""
        record = self.trace
        return len(record.calls) if record.complete else self._sites

    def reaches(self, layers: Sequence[int] | None, sums: bool) -> bool:
        """Whether the past or future pass includes these layers, and with ``sums`` what follows."""
        if "trace" in vars(self) and not self.trace.complete:
            there = layers is not None and max(layers) < len(self.trace.calls)
            return there and (self.sums or not sums)
        self.sums |= sums
        wanted = self.layers, layers
        self.layers = None if None in wanted else sorted({k for one in wanted for k in one or ()})
        return True

    @contextlib.contextmanager
    def _reading(
        self, resident: ResidentWeights | None, sites: list[str], layers: Sequence[int] | None
    ) -> Iterator[None]:
        """Configure a pass over blocks: caching, reading order, and a progress bar."""
        if resident is None:
            yield
            return
        inside = [resident.block_of(name) for name in sites]
        asked = inside if layers is None else [inside[k] for k in layers if k < len(inside)]
        resident.kept, resident.room = frozenset(filter(None, asked)), self.memory // 2
        run = list(dict.fromkeys(filter(None, inside)))
        run = run[: 1 + max((run.index(one) for one in asked if one), default=-1)] or run
        resident.order, resident.part = tuple(run), None
        if layers and max(layers) < len(sites) and self._briefly:
            resident.part = resident.part_of(sites[max(layers)])
        if not resident.blocks_read:
            loaded, needed = self.model.loaded, sum(map(resident.bytes_of, run)) / 1e9
            disk = (
                f", {loaded.stored.bytes / 1e9:.3g} GB on disk;" if loaded.stored else " in memory;"
            )
            which = f"layer {', '.join(map(str, layers))} needs" if layers else "all layers need"
            how = f"{'read' if loaded.stored else 'cast'} one after the other"
            remark(
                f"`{loaded.name}`: {loaded.num_parameters / 1e9:.2g} G parameters{disk} {which} "
                f"{len(run)} of {len(resident.blocks)} blocks, {how}, "
                f"{needed:.2g} GB in {self.setting.dtype}."
            )
        bar: Any = tqdm(total=len(run), desc="blocks", leave=False, disable=None)
        with bar, resident.progress(lambda _: bar.update()):
            yield

    def map(self, layer: int | None, name: str, *, memory: int, per_head: bool) -> LayerMap:
        """A map at the input, checked against the model; padding is held fixed."""
        if isinstance(self.model.model, Attention):
            return map_of_layer(self.model.model, self.sample, name, self.dtype)
        with memory_for("The layer's own forward pass", self.setting.dtype), self.ready():
            built = build_map(self.trace, layer, name, memory=memory, per_head=per_head)
            built = without_padding(built, self.trace)
            return margin_of(built) if name == "margin" else built

    def notes(self) -> list[str]:
        """Remarks on the model and the input for rows."""
        with self.ready() as ready:
            notes = [*ready.notes, *remarks_on(self.model.loaded, self.sample)]
            if ready.resident is not None:
                memory = f"`memory = {self.memory >> 20}MiB`"
                notes.append(
                    f"its weights were read block by block, with {memory}, and checked against "
                    "the block's own value and derivative"
                )
        drawn = not self.model.is_layer and self.trace.draws
        return [*notes, _DRAWS] if drawn else notes

    def with_head(self, ready: Ready) -> nn.Module | None:
        """The prepared model with the head from its checkpoint, if it was loaded without one.

        None if weights are read block by block.
        """
        if ready.resident is not None:
            return None
        return with_words(self.model.loaded.source, ready.model)

    def reference(self, built: LayerMap) -> ReferenceModel:
        """The model between the ends of a map, as given if it is in full precision."""
        if built.ends is None:
            return ReferenceModel(built.function, built.x.dtype)
        model, arguments = self.model.model, self.sample.arguments
        with self.ready() as ready:
            own = ready.given
            found, resident = ready.types, ready.resident
            if resident is not None or any(dtype.itemsize < 4 for dtype in found):
                model, own, found = ready.model, ready.own, frozenset({built.x.dtype})
                arguments = to_device(arguments, self.device, built.x.dtype)
        dtype = torch.float32 if torch.float32 in found else torch.float64
        if len(found) == 1:  # as for the measurement, floats are in the dtype of the weights
            arguments = to_device(arguments, None, dtype)
        ends: MapEndpoints = built.ends
        part = model
        if resident is not None:
            block = resident.block_of(ends.leaves)
            starts = self.trace.starts.get(block, [])
            inner = ends.within(block, starts[0]) if len(starts) == 1 else None
            if inner is not None:
                ends, part, arguments = inner, model.get_submodule(block), starts[0].arguments

        def function(x: Tensor, below: BlockOutputs | None = None) -> Tensor:
            with self.ready(), as_chosen(own):
                if resident is not None:
                    resident.fill(resident.block_of(built.ends.leaves if built.ends else ""))
                return ends.function(part, arguments, below)(x)

        pays = ends.total is None and self._pays_to_know(built.x, self.trace)
        if resident is not None or not pays:
            return ReferenceModel(function, dtype)
        if self._blocks is None or self._blocks[0] != dtype:
            with self.ready(), as_chosen(own):
                self._blocks = dtype, run_of_blocks(model, arguments, dtype)
        below = self._blocks[1].below(ends.enters)
        return ReferenceModel(function, dtype, partial(function, below=below) if below else None)

    @property
    def _several(self) -> bool:
        """Whether several layers will be used."""
        return self.layers is None or len(self.layers) > 1

    def _pays_to_know(self, x: Tensor, record: Trace) -> bool:
        """Whether storing block outputs is cheaper than running the blocks for every layer."""
        size = x.numel() * x.element_size() * len(record.calls)
        return self._several and not record.draws and size <= self.memory // 4


def ready_model(model: AnyModel, *, tokenizer: Any = None, **how: Any) -> ReadyModel:
    """An open model from a name, a module, an attention layer, or a model that is open."""
    if isinstance(model, ReadyModel) and tokenizer is None:
        return model
    return ReadyModel(loaded_model(model, tokenizer=tokenizer, **how))


def loaded_model(model: AnyModel, *, tokenizer: Any = None, **how: Any) -> LoadedModel:
    """A loaded model from the same; names are those of `lipscope.models.load_model`."""
    if isinstance(model, ReadyModel):
        model = model.loaded
    if isinstance(model, MultiheadAttention):
        model = model.as_layer().replace()
    if isinstance(model, LoadedModel):
        loaded = model
    elif isinstance(model, Attention):
        loaded = replace(adopt_model(model), name="layer")
    elif isinstance(model, nn.Module):
        loaded = adopt_model(model)
    elif not isinstance(model, str | Path):
        other = f"; measure any function by `{OF_FUNCTION}`" if callable(model) else ""
        raise InputError(
            "`model` should be a name, a `Path`, a torch module or an open model. Found "
            f"`{type(model).__name__}`{other}."
        )
    else:
        loaded = load_model(str(model), **how)
    if tokenizer is None:
        return loaded
    if not (callable(tokenizer) and hasattr(tokenizer, "convert_ids_to_tokens")):
        raise InputError(
            "`tokenizer` should be one of transformers or, for a text, return a dictionary with "
            "`input_ids`, and have `convert_ids_to_tokens` and `decode`. Found "
            f"`{type(tokenizer).__name__}`."
        )
    return replace(loaded, tokenizer=tokenizer)


def masked(model: ReadyModel, causal: bool | None) -> ReadyModel:
    """The model with a causal mask in every layer, or in none; unchanged for None."""
    if causal is None:
        return model
    model.check_unchanged()
    if causal not in model.with_masks:
        loaded = with_mask(model.in_memory("`causal`").loaded, causal)
        model.with_masks[causal] = ReadyModel(loaded)
    return model.with_masks[causal]


def _write_counts(model: nn.Module) -> list[tuple[int, ...]]:
    """Write counts of weights, parts and their hooks; buffers and settings change in passes."""
    weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    hooks = {m: hooks_of(m) for m in model.modules() if m._forward_hooks or m._forward_pre_hooks}
    return [*weights, *((id(m), *map(id, hooks.get(m, ()))) for m in model.modules())]


def _same_arguments(one: Sample, other: Sample) -> bool:
    """Whether two samples with equal digests agree in their remaining arguments."""
    return one.arguments is other.arguments or one.kind == other.kind == "text"


# --- a standalone layer as a model: its inputs and maps


def layer_inputs(data: Any) -> list[Sample]:
    """Inputs of a standalone layer: one, ``(n, d)``, or several, ``(b, n, d)``."""
    if not isinstance(data, Tensor) or data.ndim not in (2, 3) or not data.is_floating_point():
        raise InputError(
            "`data` should be the input of the layer, floating-point numbers of shape (n, d) or "
            f"(b, n, d). Found {type_and_shape(data)}."
        )
    batch = data if data.ndim == 3 else data[None]
    return [Sample("batch", (x,), i, None, len(x), digest(x), None) for i, x in enumerate(batch)]


def map_of_layer(layer: Attention, item: Sample, name: str, dtype: torch.dtype) -> LayerMap:
    """The map of a standalone layer at an input."""
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
        argument="x",
        projection=name == "attention" and own.output is not None,
    )
