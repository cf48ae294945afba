"""What has to be known of a model before its jobs can be listed: its layers and heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lipscope.engine.sweep.bench import Bench
from lipscope.engine.sweep.plan import Shape, probes
from lipscope.engine.sweep.spec import Request


def shapes_of(request: Request, known: Mapping[str, Mapping[str, Any]]) -> list[Shape]:
    """The shape of every model; the first checkpoint stands for all of its entry.

    Every map is built once here, which finds what no job could answer before any begins.

    Args:
        request: The specification and its texts.
        known: What the manifest says about models that were met before.

    Returns:
        One shape for each model.

    Raises:
        InputError: If a model, text, length, layer or map is not to be had.
    """
    found: dict[int, Shape] = {}
    for index, model in enumerate(request.spec.models):
        if model.entry in found:
            continue
        about = known.get(model.name, {})
        if "layers" in about:
            found[model.entry] = Shape(about["layers"], about["heads"])
        else:
            found[model.entry] = _looked_at(request, index)
    return [found[model.entry] for model in request.spec.models]


def _looked_at(request: Request, index: int) -> Shape:
    bench = Bench(request.spec, request.texts)
    try:
        first, *_ = [bench.shape(job) for job in probes(request.spec, index)]
        return first
    finally:
        bench.close()
