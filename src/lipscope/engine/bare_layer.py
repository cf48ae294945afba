"""A layer by itself as a model: its inputs and its maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.models import LayerMap, Sample, digest


def layer_inputs(data: Any) -> list[Sample]:
    """Inputs of a layer by itself: one, ``(n, d)``, or several, ``(b, n, d)``."""
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
        argument="x",
        projection=name == "attention" and own.output is not None,
    )
