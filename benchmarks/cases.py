"""Real inputs of real layers: what every solver of the comparison is given."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models import (
    LayerMap,
    Sample,
    Trace,
    attention_sites,
    build_map,
    load_model,
    trace,
    windows_of_text,
)
from lipscope.models.tracing.prepare import exact_maths
from lipscope.models.tracing.recorder import first_tensor
from lipscope.models.tracing.sites import AttentionCall
from lipscope.sources import default_text

# One random layer of the size of BERT-base: d = 768, 12 heads.
BERT_BASE = "random:bert:num_hidden_layers=1"
_DTYPES = (torch.float32, torch.float64)
SHORT_NAMES = {BERT_BASE: "BERT-base size", "minilm": "MiniLM", "smollm2": "SmolLM2"}


@dataclass(frozen=True)
class Case:
    """One layer at one window: the same map and input in three forms.

    Attributes:
        model: Name of the model.
        layer: Index of the layer.
        window: The window.
        map: lipscope's own form of the map ``attention``.
        eager: The same map as the model's modules under eager attention, float32.
        exact: The same modules in float64, for the truth.
        exact_map: lipscope's own form in float64.
    """

    model: str
    layer: int
    window: Sample
    map: LayerMap
    eager: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    exact_map: LayerMap

    @property
    def x(self) -> Tensor:
        """The captured float32 input, ``(n, d)``."""
        return self.map.x

    @property
    def name(self) -> str:
        """Model and layer as the tables say it."""
        short = SHORT_NAMES.get(self.model) or f"random {self.model.split(':')[1]}"
        return short if self.model == BERT_BASE else f"{short} layer {self.layer}"


class Source:
    """A model under eager attention, in float32 and in float64."""

    def __init__(self, name: str) -> None:
        self.name, self.loaded = name, load_model(name)
        model: Any = self.loaded.model.eval().requires_grad_(False)
        model.set_attn_implementation("eager")
        # The plain `to` of modules: models from quantised files refuse their own.
        self.models = {t: nn.Module.to(copy.deepcopy(model), t) for t in _DTYPES}

    def windows(self, lengths: Sequence[int], samples: int) -> list[Sample]:
        """Windows of the default text, as `lipscope measure` cuts them."""
        return windows_of_text(
            default_text(),
            self.loaded.tokenizer,
            lengths=lengths,
            samples=samples,
        )

    def cases(self, window: Sample, layers: Sequence[int]) -> list[Case]:
        """The cases of some layers at one window."""
        single, double = (self._trace(window, dtype) for dtype in self.models)
        return [self._case(single, double, window, layer) for layer in layers]

    def _trace(self, window: Sample, dtype: torch.dtype) -> Trace:
        model = self.models[dtype]
        inputs = {"input_ids": window.ids}
        return trace(model, inputs, attention_sites(model), dtype=dtype)

    def _case(self, single: Trace, double: Trace, window: Sample, layer: int) -> Case:
        case = Case(
            self.name,
            layer,
            window,
            build_map(single, layer, "attention"),
            replay(single.calls[layer]),
            replay(double.calls[layer]),
            build_map(double, layer, "attention"),
        )
        expected = case.map.output
        for f, x in ((case.eager, case.x), (case.exact, case.x.double())):
            error = float((f(x) - expected).abs().max() / expected.abs().max())
            if error > 1e-4:
                raise AssertionError(f"{case.name}: the replayed module is off by {error:.1e}")
        return case


@functools.cache
def source(name: str) -> Source:
    """A model, loaded once."""
    return Source(name)


def replay(call: AttentionCall) -> Callable[[Tensor], Tensor]:
    """The model's own attention module, with the output projection, as ``(n, d) -> (n, d)``."""
    module: Any = call.module

    def f(x: Tensor) -> Tensor:
        arguments = {**call.arguments, **dict.fromkeys(call.hidden, x[None])}
        if x.dtype == torch.float64:  # some models compute in float32 otherwise
            with exact_maths(x.dtype):
                out = first_tensor(module(**arguments))[0]
        else:
            out = first_tensor(module(**arguments))[0]
        if call.end.projection is not None and not call.end.inside:
            out = call.end.projection(out)
        return out

    return f
