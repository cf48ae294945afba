"""Inputs of layers and the weights of their heads: forward passes, no Jacobian."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lipscope.control import entropy_and_sink, largest_logits
from lipscope.engine.plan import FUSED, WindowKey
from lipscope.engine.runs import LocalRun
from lipscope.engine.session import ModelKey, Session
from lipscope.models import AttentionCall, Trace, closed_form


class Heads:
    """A layer over the entries of a batch.

    Attributes:
        module: Path of its module.
        holders: Paths of the modules that hold its weights.
        radii: Largest token norm of the map's input, entry by entry; empty for maps that do not
            read what the attention module does.
    """

    def __init__(self, module: str, holders: Sequence[str]) -> None:
        self.module, self.holders = module, holders
        self.radii: list[float] = []
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, call: AttentionCall, name: str) -> None:
        """Take an entry in; its heads if they are in closed form and no token is padding."""
        if name in ("heads", "attention"):
            self.radii.append(float(call.x.detach().norm(dim=-1).max()))
        layer = None if call.refusal else closed_form(call)
        if layer is not None and (layer.mask is None or not _hides(layer.mask)):
            self._found.append((largest_logits(layer, call.x), *entropy_and_sink(layer, call.x)))

    def worst(self) -> tuple[tuple[float, ...], ...]:
        """Largest logit, entropy and sink mass of every head, of its worst entry."""
        if not self._found:
            return (), (), ()
        logits, entropies, sinks = (torch.stack(one) for one in zip(*self._found, strict=True))
        worst = logits.amax(0), entropies.amin(0), sinks.amax(0)
        return tuple(tuple(map(float, one)) for one in worst)


def heads_of(asked: LocalRun, layers: Sequence[int]) -> dict[int, Heads]:
    """What some layers of the model of a request read, one forward pass an entry.

    Args:
        asked: The request, which need not be open.
        layers: Their indices.

    Raises:
        InputError: If an input cannot be had, or the model cannot be traced on it.
    """
    found: dict[int, Heads] = {}
    name = asked.spec.models[0].name
    with Session(asked.spec, {"": asked.data}, {name: lambda: asked.model}) as session:
        for record in _traces(session):
            names = {module: name for name, module in record.model.named_modules()}
            for layer in layers:
                call = record.calls[layer]
                parts = [call.module] if call.projection is None else [call.module, call.projection]
                # What torch's face of our own attention shows as a projection is no module of it.
                holders = [names[part] for part in parts if part in names]
                found.setdefault(layer, Heads(call.name, holders)).add(call, asked.spec.maps[0])
    return found


def _traces(session: Session) -> Iterator[Trace]:
    """The model's trace at every input; no map of a layer is built."""
    spec = session.spec
    fused = any(name in FUSED for name in spec.maps)
    for k in range(len(session.items(ModelKey(0, None), ""))):
        yield session.window(WindowKey(0, None, spec.dtypes[0], fused, "", k)).trace


def _hides(mask: Tensor) -> bool:
    """Whether a token is hidden from all."""
    return bool((~mask.flatten(0, -2).any(0)).any())


@contextlib.contextmanager
def in_full(model: nn.Module) -> Iterator[None]:
    """A model that computes in the precision of its weights, whatever a trainer put around it.

    ``accelerate`` gives a model a forward of its own that computes under autocast.
    """
    wrapped = vars(model).get("forward") if hasattr(model, "_original_forward") else None
    device = next(model.parameters()).device.type
    try:
        if wrapped is not None:
            model.forward = model._original_forward  # pyright: ignore
        with torch.autocast(device, enabled=False):
            yield
    finally:
        if wrapped is not None:
            model.forward = wrapped
