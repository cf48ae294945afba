"""Layers of a model in half precision that overflow at an input, as the model itself runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lipscope.errors import InputError
from lipscope.models.data.samples import Sample, moved
from lipscope.models.tracing.sites import Side, attention_sites
from lipscope.models.tracing.trace import trace


def overflows(
    model: nn.Module, item: Sample, modules: str | None = None, side: Side = "self"
) -> dict[int, str]:
    """Run a model once in its own half precision and look for what is not finite.

    Models in float16 or bfloat16 are measured in float32 or float64, where such a layer has a
    sigma; this says that the model as it is stored has none there.

    Args:
        model: The model, in the dtype and on the device of its weights.
        item: The input.
        modules: As in `attention_sites`.
        side: Which calls are the layers.

    Returns:
        A remark for every layer that overflows or whose input has done so before, by layer;
        nothing for a model in float32 or wider, or one that this machine cannot run in half
        precision.
    """
    first = next(model.parameters(), None)
    if first is None or not first.is_floating_point() or first.dtype.itemsize > 2:
        return {}
    name, sites = str(first.dtype)[6:], attention_sites(model, modules, side=side)
    try:
        with _evaluated(model):
            given = moved(item.arguments, first.device, first.dtype)
            record = trace(model, given, sites, dtype=first.dtype, side=side)
    except InputError:  # not every operation exists in half precision everywhere
        return {}
    bad = [not bool(call.output.isfinite().all()) for call in record.calls]
    if True not in bad:
        return {}
    at = bad.index(True)
    inside = bool(record.calls[at].x.isfinite().all())
    said = f"layer {at} overflows" if inside else f"the model overflows before layer {at}"
    return {layer: f"in {name} {said} at this input" for layer in range(at, len(bad)) if bad[layer]}


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[Any]:
    """Eval mode, put back module by module."""
    modes = {m: m.training for m in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode
