"""One attention layer of a model as an object of its own, with the input that it saw."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.errors import InputError, memory_for
from lipscope.linalg.operator import Operator
from lipscope.models import (
    LayerMap,
    LoadedModel,
    Sample,
    Trace,
    adopt_model,
    attention_sites,
    build_map,
    implementation_for,
    load_model,
    moved,
    prepared,
    reader_of,
    samples_of,
    trace,
    why_run,
)
from lipscope.models.tracing.prepare import exact_maths
from lipscope.models.tracing.residual import norm_before
from lipscope.theorems import Normed, norm_of, radius_of_norm
from lipscope.theorems.table import Map

DType = Literal["float32", "float64"]
CapturedMap = Literal["attention", "normed"]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Captured:
    """A layer and its input on one window of text or one entry of a batch.

    Attributes:
        model: Name of the model.
        layer: Index of the layer from 0.
        sample: Index of the window or entry.
        attention: The layer, with weights of its own.
        x: The input of the layer, or, if the map ``normed`` was asked for, that of the norm
            that feeds it, ``(n, d)``.
        norm: The normalisation that feeds it, or None.
        normed: The layer with that norm in front, if the map ``normed`` was asked for.
    """

    model: str
    layer: int
    sample: int
    attention: Attention
    x: Float[Tensor, "n d"]
    norm: nn.Module | None
    normed: Normed | None = None

    @property
    def radius(self) -> float:
        """Largest token norm of the input."""
        return float(torch.linalg.vector_norm(self.x, dim=-1).max())

    def linearise(self, map: Map, *, per_head: bool = False) -> Operator:
        """The Jacobian of one of the layer's maps at its input.

        Args:
            map: ``attention`` or ``heads``; the map ``normed`` where it was captured.
            per_head: One operator per query head, on a leading axis.

        Returns:
            The operator.
        """
        if self.normed is not None:
            return self.normed.linearise(self.x, per_head=per_head)
        own = "heads" if map == "heads" else "attention"
        return self.attention.linearise(self.x, map=own, per_head=per_head)

    def linearise_head(self, map: Map, head: int) -> Operator:
        """The Jacobian of one query head, without an axis of heads."""
        op, count = self.linearise(map, per_head=True), self.attention.num_heads

        def apply(product: Callable[[Tensor], Tensor], e: Tensor) -> Tensor:
            lead = e.shape[:-2]
            every = product(e.unsqueeze(-3).expand(*lead, count, *e.shape[-2:]))
            return every[..., head, :, :]

        return Operator(
            lambda e: apply(op.matvec, e),
            lambda g: apply(op.rmatvec, g),
            op.in_shape,
            op.out_shape,
            op.dtype,
            op.device,
        )

    def start(self, head: int | None, seed: int) -> torch.Generator:
        """Of a measurement: a random start that does not depend on what else is measured."""
        name = f"{seed}|{self.model}|{self.layer}|{head}|{len(self.x)}|{self.sample}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(number)

    def radius_of_norm(self) -> float:
        """Largest norm that a token can have after the norm that feeds the layer.

        Raises:
            InputError: If there is no such norm, or it is neither RMSNorm nor LayerNorm.
        """
        if self.norm is None:
            raise InputError(
                "`radius = norm` needs a norm that feeds the layer. Found none before layer "
                f"{self.layer}; give a number."
            )
        return radius_of_norm(norm_of(self.norm, self.x.shape[1]))


class ExactNorm(nn.Module):
    """A norm that computes in the precision of its input, whatever its own code asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The norm of every token."""
        with exact_maths(x.dtype):
            return self.module(x)


def capture(
    model: str | nn.Module = "minilm",
    data: str | Tensor | Mapping[str, Any] | None = None,
    *,
    layer: int,
    length: int | None = None,
    sample: int = 0,
    samples: int | None = None,
    map: CapturedMap = "attention",
    special_tokens: bool = True,
    dtype: DType = "float64",
    seed: int = 0,
    modules: str | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> tuple[Attention | Normed, Float[Tensor, "n d"]]:
    """One attention layer of a model and its input, for bounds, attacks and certificates.

    The layer is rebuilt from the model's weights and agrees with the model's own output;
    it has weights of its own, on the CPU.

    Holds for families whose weights are read in closed form (BERT, GPT-2, Llama, ViT, …).

    Args:
        model: A name for `load_model`, or a torch module.
        data: Text or a batch, as for `measure`; the default text if None.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        sample: Index of the window, or of the entry of a batch.
        samples: Number of windows that the text is cut into; 10 if None, as for `measure`.
        map: ``attention``, or ``normed`` for the layer with the norm that feeds it and that
            norm's input.
        special_tokens: Put the model's own special tokens around the window.
        dtype: Floating type of the layer and its input.
        seed: Seed of the weights of a random model.
        modules: Regular expression for the attention modules.
        tokenizer: Tokenizer for a module of your own that reads text.
        revision: Revision of a hub id.
        allow_pickle: Accept a checkpoint that exists only as a pickle.

    Returns:
        The layer and its input ``(n, d)``.

    Raises:
        InputError: If the layer or the map does not exist, or its weights are not read in
            closed form.
    """
    is_text = data is None or isinstance(data, str)
    if not is_text and (length is not None or samples is not None):
        raise InputError(
            "`length` and `samples` cut a text into windows. Found them with a batch; leave them "
            "out."
        )
    count = samples or (max(10, sample + 1) if is_text else None)
    found = captures(
        _loaded(model, tokenizer, revision, seed, allow_pickle),
        data,
        layers=[layer],
        lengths=[64 if length is None else length] if is_text else None,
        samples=count,
        chosen=[sample],
        map=map,
        special_tokens=special_tokens,
        dtype=dtype,
        modules=modules,
    )
    one = next(found)
    return one.normed or one.attention, one.x


def captures(
    model: str | LoadedModel,
    data: str | Tensor | Mapping[str, Any] | None = None,
    *,
    layers: Sequence[int] | Literal["all"],
    lengths: Sequence[int] | None,
    samples: int | None = 1,
    chosen: Sequence[int] | None = None,
    map: CapturedMap = "attention",
    special_tokens: bool = True,
    dtype: DType = "float64",
    seed: int = 0,
    modules: str | None = None,
    allow_pickle: bool = False,
) -> Iterator[Captured]:
    """Layers of a model and their inputs: for every length and sample, layer by layer.

    Args:
        model: A name for `load_model`, or a loaded model.
        data: Text or a batch; the default text if None.
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens of text windows; None for a batch.
        samples: Windows per length.
        chosen: Only these samples; all if None.
        map: As in `capture`.
        special_tokens: Put the model's own special tokens around every window.
        dtype: Floating type of layers and inputs.
        seed: Seed of the weights of a random model.
        modules: Regular expression for the attention modules.
        allow_pickle: Accept a checkpoint that exists only as a pickle.

    Yields:
        One `Captured` per length, sample and layer.

    Raises:
        InputError: As `capture` does.
    """
    if dtype not in _DTYPES:
        raise InputError(f"`dtype` should be float32 or float64. Found `{dtype}`.")
    if map not in ("attention", "normed"):
        raise InputError(f"`map` should be attention or normed. Found `{map}`.")
    loaded = _named(model, seed, allow_pickle)
    inputs = samples_of(loaded, data, lengths, samples, "spread", special_tokens)
    count = 1 + max(item.sample for item in inputs)
    for index in chosen or ():
        if not 0 <= index < count:
            raise InputError(
                f"`sample` should be between 0 and {count - 1}. Found `sample = {index}`."
            )
    found = [*attention_sites(loaded.model, modules).values()]
    known = [reader_of(site) is not None for site in found]
    if not any(known):
        raise InputError(_refusal(found[0]))
    implementation = implementation_for(loaded.model, closed=all(known))
    options = {"dtype": _DTYPES[dtype], "device": _CPU, "implementation": implementation}
    with prepared(loaded.model, **options) as (module, _):
        sites = attention_sites(module, modules)
        for item in inputs:
            if chosen is not None and item.sample not in chosen:
                continue
            record = _traced(module, item, sites, _DTYPES[dtype])
            total = range(len(record.calls))
            for layer in total if isinstance(layers, str) else layers:
                yield _captured(loaded.name, record, item, layer, map)


def layer_maps(
    model: str | LoadedModel,
    data: str | Tensor | Mapping[str, Any] | None = None,
    *,
    layers: Sequence[int] | Literal["all"],
    map: str = "attention",
    lengths: Sequence[int] | None,
    samples: int | None = 1,
    windows: str = "spread",
    special_tokens: bool = True,
    dtype: DType = "float32",
) -> Iterator[tuple[Sample, LayerMap]]:
    """Any map of a model's layers at its inputs: for every length and sample, layer by layer.

    Args:
        model: A name for `load_model`, or a loaded model.
        data: Text or a batch; the default text if None.
        layers: Indices from 0, or "all".
        map: As in `measure`; ``model`` is one map, whatever the layers.
        lengths: Numbers of tokens of text windows; None for a batch.
        samples: Windows per length; None for a batch.
        windows: ``spread`` or ``consecutive``.
        special_tokens: Put the model's own special tokens around every window.
        dtype: Floating type of layers and inputs.

    Yields:
        The sample, and the map at its input; it lives as long as the iteration.

    Raises:
        InputError: If the layer or the map does not exist.
    """
    loaded = _named(model, 0, False)
    inputs = samples_of(loaded, data, lengths, samples, windows, special_tokens)
    closed = all(reader_of(site) for site in attention_sites(loaded.model).values())
    closed = closed and map in ("heads", "attention", "normed", "residual")
    options = {"dtype": _DTYPES[dtype], "device": _CPU}
    with prepared(loaded.model, implementation="sdpa" if closed else "eager", **options) as (
        module,
        _,
    ):
        sites = attention_sites(module)
        for item in inputs:
            record = _traced(module, item, sites, _DTYPES[dtype], blocks=map in ("block", "model"))
            total = range(len(record.calls))
            asked = [None] if map == "model" else total if isinstance(layers, str) else layers
            for layer in asked:
                yield item, build_map(record, layer, map)


def _named(model: str | LoadedModel, seed: int, allow_pickle: bool) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    return _loaded(model, None, None, seed, allow_pickle)


@memory_for("The model's own forward pass")
def _traced(
    model: nn.Module,
    item: Sample,
    sites: Mapping[str, nn.Module],
    dtype: torch.dtype,
    blocks: bool = False,
) -> Trace:
    arguments = moved(item.arguments, _CPU, dtype)
    return trace(model, arguments, sites, norms=True, blocks=blocks, dtype=dtype)


def _captured(name: str, record: Trace, item: Sample, layer: int, map: CapturedMap) -> Captured:
    if not 0 <= layer < len(record.calls):
        raise InputError(
            f"`layer` should be between 0 and {len(record.calls) - 1} for `{name}`. Found {layer}."
        )
    call = record.calls[layer]
    if reader_of(call.module) is None:
        raise InputError(_refusal(call.module))
    built = build_map(record, layer, map)
    if built.attention is None:
        raise InputError(_refusal(call.module))
    norm = norm_before(record, call)
    # Copies: the model is put back as it was, and may be changed or freed by its owner.
    attention = copy.deepcopy(built.attention).requires_grad_(False)
    x = built.x.detach().clone()
    module = None if norm is None else norm.module
    normed = None
    if map == "normed":
        assert module is not None  # else the map does not exist
        own = copy.deepcopy(module).requires_grad_(False)
        normed = Normed(attention, ExactNorm(own))
    return Captured(name, layer, item.sample, attention, x, module, normed)


def _refusal(module: nn.Module) -> str:
    return (
        f"Weight-based bounds are not available for this layer, because {why_run(module)}. "
        "`lipscope measure` measures it."
    )


def _loaded(
    model: str | nn.Module, tokenizer: Any, revision: str | None, seed: int, allow_pickle: bool
) -> LoadedModel:
    if isinstance(model, nn.Module):
        return adopt_model(model, tokenizer)
    return load_model(model, revision=revision, seed=seed, allow_pickle=allow_pickle)
