"""The attention layers of a model in training on given inputs, numbered as in `measure`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipscope.attention import Attention, MultiheadAttention
from lipscope.errors import InputError, memory_for, shown
from lipscope.models import (
    AttentionCall,
    LoadedModel,
    Sample,
    Trace,
    are_read,
    attention_sites,
    checked_data,
    closed_form,
    implementation_for,
    inputs_of,
    prepared,
    to_device,
    trace,
    why_run,
)

Layers = Sequence[int] | int | Literal["all"]


@dataclass(frozen=True)
class ProbedLayer:
    """An attention layer at one entry of a batch."""

    index: int  # of the layer, from 0
    entry: int  # index of the entry
    attention: Attention  # built from the model's own weights: gradients reach them
    x: Tensor  # its input, ``(n, d)``, without gradient


class Probe:
    """A model in training and a batch on which its layers are evaluated, entry by entry.

    Each evaluation costs one forward pass per entry, in evaluation mode and without gradients;
    the model's mode is restored. Weights keep their gradients; layer inputs have none.

    ``indices`` are the selected layers; ``names`` the paths of their modules, by index: "layer"
    for a standalone layer. Arguments as for `restrain`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Tensor | Mapping[str, Any],
        *,
        layers: Layers = "all",
        modules: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"`model` should be a torch module. Found `{type(model).__name__}`.")
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(self.model, nn.MultiheadAttention):
            standalone = isinstance(self.model, MultiheadAttention)
            raise InputError(
                "`model` should hold attention, or be a layer by itself. Found a "
                "`MultiheadAttention`; give "
                f"{'`module.attention`' if standalone else 'the model that it is part of'}."
            )
        if modules is not None and not isinstance(modules, str):
            raise InputError(f"`modules` should be an expression. Found `{shown(modules)}`.")
        self.modules = modules
        _check_dtype(self.model)
        self._entries = self._cut(data)
        self._calls: list[AttentionCall] = []
        if not isinstance(self.model, Attention):
            self._calls = self._traced(self._entries[0]).calls
        count = len(self._calls) or 1
        self.indices = _chosen_layers(layers, count)
        self.names = {i: self._calls[i].name if self._calls else "layer" for i in self.indices}

    def seen(self, data: Tensor | Mapping[str, Any] | None = None) -> Iterator[ProbedLayer]:
        """Yield every selected layer at every entry, entry by entry."""
        for e, item in enumerate(self._entries if data is None else self._cut(data)):
            if isinstance(self.model, Attention):
                assert isinstance(item.arguments, tuple)
                yield ProbedLayer(0, e, self.model, _finite_input(item.arguments[0].detach(), 0))
                continue
            calls = self._traced(item).calls
            for i in self.indices:
                if i >= len(calls) or calls[i].module is not self._calls[i].module:
                    raise self._gone(i)
                yield ProbedLayer(i, e, _layer_of(calls[i]), _finite_input(calls[i].x.detach(), i))

    def weights(self, index: int) -> list[tuple[nn.Module, str]]:
        """The weight matrices of a layer, output projection included, as (module, name) pairs.

        Stacked weights, such as queries, keys and values of GPT-2, count as one matrix.
        """
        if not self._calls:
            holders = [self.model]
        else:
            call = self._calls[index]
            holders = [*call.module.modules()]
            last = call.end.projection
            # Ours shows torch its output weights a second time.
            if last is not None and not isinstance(call.module, MultiheadAttention):
                holders.append(last)
            if not set(self.model.modules()).issuperset(holders):
                raise self._gone(index)
        found: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        for holder in holders:
            if isinstance(holder, nn.Embedding | parametrize.ParametrizationList):
                continue
            kept = getattr(holder, "parametrizations", {})
            names = [n for n, p in holder.named_parameters(recurse=False) if p.ndim == 2]
            for name in [*names, *(n for n in kept if getattr(holder, n).ndim == 2)]:
                found[id(holder), name] = (holder, name)
        if not found:
            raise InputError(
                f"Layer {index} should have weight matrices to act on. Found none; give them as "
                "`nn.Parameter`."
            )
        return list(found.values())

    def _gone(self, index: int) -> InputError:
        return InputError(
            f"Layer {index} should be `{self.names[index]}` as it was at first, on every input. "
            "Found no call of it, or one of another module; make a new restraint."
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(t.device for t in [*self.model.parameters(), *self.model.buffers()])

    def module(self, index: int) -> nn.Module:
        """The module of a layer."""
        return self._calls[index].module if self._calls else self.model

    def alike(self) -> list[list[int]]:
        """The layers grouped by module, for modules that are called several times."""
        found: dict[int, list[int]] = {}
        for i in self.indices:
            found.setdefault(id(self.module(i)), []).append(i)
        return list(found.values())

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with the model's parameters."""
        owned = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        return tensor.untyped_storage().data_ptr() in owned

    def _cut(self, data: Any) -> list[Sample]:
        """Split a batch into entries."""
        if not isinstance(data, Tensor | Mapping):
            raise InputError(
                "`data` should be a batch: a tensor or a mapping of tensors. Found "
                f"`{type(data).__name__}`."
            )
        if isinstance(self.model, Attention):
            width = self.model.query.shape[1]
            if (
                not isinstance(data, Tensor)
                or data.ndim not in (2, 3)
                or data.shape[-1] != width
                or not data.numel()
            ):
                found = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
                raise InputError(
                    f"`data` should be the layer's input, (n, {width}) or (b, n, {width}). "
                    f"Found {found}."
                )
            batch = data if data.ndim == 3 else data[None]
            return [Sample("batch", (x,), i, None, len(x), "", None) for i, x in enumerate(batch)]
        loaded = LoadedModel(type(self.model).__name__, self.model, None, None, "")
        return inputs_of(
            loaded,
            checked_data(data),
            lengths=None,
            samples=None,
            windows="spread",
            special_tokens=True,
        )

    @memory_for("The model's own forward pass")
    def _traced(self, item: Sample) -> Trace:
        sites = attention_sites(self.model, self.modules)
        closed = are_read(sites)
        first = next(self.model.parameters())
        with (
            torch.autocast(first.device.type, enabled=False),
            prepared(
                self.model,
                dtype=first.dtype,
                device=first.device,
                implementation=implementation_for(self.model, closed=closed),
            ) as (model, _),
        ):
            arguments = to_device(item.arguments, first.device, first.dtype)
            # Compiled modules are excluded by now.
            sites = {name.replace("_orig_mod.", ""): site for name, site in sites.items()}
            return trace(model, arguments, sites, dtype=first.dtype, asked=self.modules)


def _check_dtype(model: nn.Module) -> None:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    kinds = kinds or {b.dtype for b in model.buffers() if b.is_floating_point()}
    if kinds not in ({torch.float32}, {torch.float64}):
        found = ", ".join(sorted(str(one)[6:] for one in kinds)) or "none"
        raise InputError(
            f"The weights should all be float32, or all float64. Found {found}; train in float32, "
            "under autocast where that is too slow."
        )


def _chosen_layers(layers: Any, count: int) -> list[int]:
    if isinstance(layers, str) and layers == "all":
        return list(range(count))
    several: Any = [layers] if isinstance(layers, Integral) else layers
    whole = isinstance(several, Sequence) and all(
        isinstance(i, Integral) and not isinstance(i, bool) for i in several
    )
    if not whole or not several:
        raise InputError(
            f"`layers` should be whole numbers from 0, or all. Found `{shown(layers)}`."
        )
    for i in several:
        if not 0 <= i < count:
            raise InputError(f"`layers` should be between 0 and {count - 1}. Found {shown(i)}.")
    return sorted({int(i) for i in several})


def _layer_of(call: AttentionCall) -> Attention:
    """The attention layer of a call, with its current weights."""
    if call.end.refusal:
        raise InputError(call.end.refusal)
    layer = closed_form(call)
    if layer is None:
        raise InputError(
            f"The weights of `{call.name}` should be read in closed form. Found that "
            f"{why_run(call.module)}."
        )
    if layer.mask is not None and bool((~layer.mask.flatten(0, -2).any(0)).any()):
        raise InputError(
            "`data` should have no padding: every token counts here. Found hidden tokens; give "
            "windows of full length."
        )
    return layer


def _finite_input(x: Tensor, index: int) -> Tensor:
    if not bool(x.isfinite().all()):
        raise InputError(
            f"The input of layer {index} should be finite. Found NaN or Inf: training diverged."
        )
    return x
