"""``<g, J(x) e>`` of a layer as a differentiable function, a chunk of rows at a time."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

from lipscope.attention.blocks import reach
from lipscope.attention.layer import Layer
from lipscope.attention.precision import exact

_COPIES = 24  # score-sized tensors that are alive while one chunk is differentiated, roughly


@exact
def stretch(layer: Layer, x: Tensor, g: Tensor, e: Tensor, memory: int) -> Tensor:
    """As `Attention.stretch`."""
    (q, k, v), (dq, dk, dv) = cast(Any, jvp(layer.project, (x,), (e,)))
    heads = g if layer.output is None else g @ layer.output
    go = heads.unflatten(-1, (layer.num_heads, -1)).transpose(-3, -2)

    num_keys = k.shape[-2]

    def part(h: slice, start: int, *tensors: Tensor) -> Tensor:
        q, dq, go, k, v, dk, dv = tensors

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return layer.weights(q, k, start=start, heads=h, num_keys=num_keys) @ v

        return (jvp(attend, (q, k, v), (dq, dk, dv))[1] * go).sum()

    total = x.new_zeros(())
    chunks = _chunks(layer, q.shape[-2], k.shape[-2], memory // (_COPIES * x.element_size()))
    for h, rows in chunks:
        keys = slice(0, reach(rows, k.shape[-2], layer.causal, layer.window).stop)
        tensors = [*(t[h, rows] for t in (q, dq, go)), *(t[h, keys] for t in (k, v, dk, dv))]
        if len(chunks) == 1:
            return part(h, rows.start, *tensors)
        total = total + checkpoint(part, h, rows.start, *tensors, use_reentrant=False)
    return total


def _chunks(layer: Layer, n: int, m: int, limit: int) -> list[tuple[slice, slice]]:
    """Heads and rows of at most ``limit`` scores, or the fewest that can be."""
    heads = layer.num_heads
    if layer.weighting.all_rows:
        step = max(1, limit // (n * m))
        return [(slice(h, h + step), slice(0, n)) for h in range(0, heads, step)]
    step = max(1, limit // (heads * m))
    return [(slice(0, heads), slice(i, min(i + step, n))) for i in range(0, n, step)]
