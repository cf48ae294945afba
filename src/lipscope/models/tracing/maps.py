"""The maps of a layer: what is measured, built from a trace and checked against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.errors import InputError, out_of_memory
from lipscope.linalg import Operator, compose, linearise
from lipscope.models.tracing.blocks import Whole, block_parts, model_parts, stack_parts
from lipscope.models.tracing.calls import Trace, as_tokens
from lipscope.models.tracing.map_endpoints import Ends, ends_of_attention, from_norm
from lipscope.models.tracing.replay import (
    ClosedForm,
    Replayed,
    TokenModule,
    count_heads,
    projection_by_head,
)
from lipscope.models.tracing.residual import Norms, norm_before, residual
from lipscope.models.tracing.sites import AttentionCall, closed_form, why_run
from lipscope.models.tracing.sums import NormCall, close, distance

MapName = Literal[
    "heads", "attention", "normed", "residual", "block", "stack", "model", "logits", "margin"
]
MAPS: tuple[str, ...] = get_args(MapName)
WHOLE = ("model", "logits", "margin")  # of no layer
OF_BLOCKS = ("block", "stack", *WHOLE)
PER_HEAD_MAPS = ("heads", "attention", "normed")

# Largest difference between the rebuilt map and the model's own output, relative to the
# largest output entry.
_AGREEMENT = {torch.float32: 1e-5, torch.float64: 1e-10}
# Matrices of scores per head and layer that the generic path holds at its peak: scores,
# probabilities, their cotangents and the graph of the second pullback.
_GENERIC_COPIES = 7


@dataclass(frozen=True)
class LayerMap:
    """A map of one layer at one input: callable, and linearised through `linearise`.

    Attributes:
        layer: Index from 0; None for the maps of the whole model.
        map: Name of the map.
        x: The map's input, ``(n, d)``.
        output: The model's own output of the map, ``(n, d_out)``.
        attention: The layer's weights in closed form, or None on the generic path.
        num_heads: Query heads, where known.
        head_outputs: Output of every head, ``(h, n, d_out)``: its slice of ``heads``, or its
            contribution through its part of the output projection.
        ends: Where the map is in its model; None for a layer by itself, its own model.
        note: Remark for the row, or None.
        module: Path of the module that the map is of; None for a layer by itself.
        argument: What moves: names of its arguments, or of those of the norm before it.
        projection: Whether the output projection is part of it; None if none was seen.
        norms: Of the map ``residual``; None for other maps.
    """

    layer: int | None
    map: str
    x: Tensor
    output: Tensor
    function: Callable[[Tensor], Tensor]
    build: Callable[[Tensor, int, bool], Operator]
    attention: Attention | None
    num_heads: int | None
    head_outputs: Callable[[], Tensor]
    ends: Ends | None = None
    note: str | None = None
    module: str | None = None
    argument: str | None = None
    projection: bool | None = None
    norms: Norms | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The map at another input."""
        return self.function(x)

    def onward(self, product: Tensor) -> Tensor:
        """Derivative of what `ends` reads, from this product with the Jacobian."""
        return product if self.ends is None else self.ends.onward(product)

    def linearise(self, x: Tensor, *, memory: int = 2**30, per_head: bool = False) -> Operator:
        """The Jacobian at ``x``; with ``per_head`` on a leading axis of heads."""
        return self.build(x, memory, per_head)


def build_map(
    record: Trace,
    layer: int | None,
    name: str,
    *,
    memory: int = 2**30,
    per_head: bool = False,
) -> LayerMap:
    """The map ``name`` of one layer of a trace, checked against the model's own output.

    Known families are rebuilt in closed form, all others replay the model's own modules.

    Args:
        record: The trace of one input.
        layer: Index of the layer; None for the maps of the whole model.
        name: One of `MAPS`.
        memory: Bytes that the generic path may use.
        per_head: Whether single heads will be asked for.

    Returns:
        The map.

    Raises:
        InputError: If the layer or the map does not exist, the request is too large for the
            generic path, or the rebuilt map cannot run or disagrees with the model.
    """
    if name not in MAPS:
        raise InputError(f"`map` should be one of {', '.join(MAPS)}. Found `{name}`.")
    if per_head and name not in PER_HEAD_MAPS:
        raise InputError(
            f"`per_head` goes with the maps {', '.join(PER_HEAD_MAPS)}. Found `{name}`."
        )
    call = record.calls[0] if name in WHOLE else _call(record, layer)
    check_request(record, layer, name, call.num_tokens, memory)
    if name in WHOLE:
        built = _whole(None, name, None, model_parts(record, scores=name != "model"))
    else:
        built = _layer_map(record, call, layer, name, per_head)
    _check_agreement(built, record)
    remark = record.remarks.get(len(record.calls) - 1 if layer is None else layer)
    return replace(built, note="; ".join(filter(None, (built.note, remark))) or None)


def _call(record: Trace, layer: int | None) -> AttentionCall:
    if layer is None or not 0 <= layer < len(record.calls):
        raise InputError(
            f"`layers` should be between 0 and {len(record.calls) - 1} for this model. "
            f"Found {layer}."
        )
    return record.calls[layer]


def _layer_map(
    record: Trace, call: AttentionCall, layer: int | None, name: str, per_head: bool
) -> LayerMap:
    if name == "block":
        return _whole(layer, name, count_heads(call.module), block_parts(record, call))
    if name == "stack":
        return _whole(layer, name, count_heads(call.module), stack_parts(record, call))
    if call.refusal:
        raise InputError(call.refusal)
    attention = closed_form(call)
    core: ClosedForm | Replayed
    core = Replayed(call, per_head) if attention is None else ClosedForm(call, attention)
    heads = attention.num_heads if attention is not None else count_heads(call.module)
    note = None if attention is not None else _generic(call)
    before = norm_before(record, call) if name in ("normed", "residual") else None

    def finished(
        x: Tensor,
        output: Tensor,
        function: Callable[[Tensor], Tensor],
        build: Callable[[Tensor, int, bool], Operator],
        ends: Ends,
        norms: Norms | None = None,
    ) -> LayerMap:
        return LayerMap(
            layer,
            name,
            x,
            output,
            function,
            build,
            attention,
            heads,
            lambda: _head_outputs(call, core, name, heads),
            ends,
            note,
            module=call.name,
            argument=_moved(call, before, x),
            projection=_projects(call, attention, name),
            norms=norms,
        )

    ends = ends_of_attention(record, call, heads=name == "heads")
    if name == "heads":
        return finished(call.x, _own_heads(call, core), core.heads, core.linearise_heads, ends)
    if name == "attention":
        return finished(call.x, call.output, core.attend, core.linearise_attention, ends)
    if name == "normed":
        if before is None:
            raise InputError(
                f"The map `normed` needs a norm that feeds the layer. Found none before "
                f"`{call.name}`; use the map `attention`."
            )
        norm = TokenModule(before.module, before.x)
        return finished(
            as_tokens(before.x, call.token_axis),
            call.output,
            lambda x: core.attend(norm(x)),
            lambda x, m, h: compose(core.linearise_attention(norm(x), m, h), linearise(norm, x)),
            from_norm(record, before, ends),
        )
    return finished(*residual(record, call, before, core))


def _moved(call: AttentionCall, norm: NormCall | None, x: Tensor) -> str:
    """What a row says of the input of a map: arguments of the layer, or the norm's input."""
    if norm is not None and x.data_ptr() == norm.x.data_ptr():
        return f"input of {norm.name}"
    return ", ".join(call.hidden)


def _projects(call: AttentionCall, attention: Attention | None, name: str) -> bool | None:
    """Whether the output projection is part of a map; None if none was seen."""
    if name == "heads":
        return False
    if attention is not None:
        return attention.output is not None
    return True if call.projection is not None else None


def _generic(call: AttentionCall) -> str:
    return (
        f"generic path: {why_run(call.module)}, so no bound from weights (local, in a ball or "
        "global) is available for this layer"
    )


def _own_heads(call: AttentionCall, core: ClosedForm | Replayed) -> Tensor:
    """The heads that the model computed, or those that its projection takes to its output."""
    if call.projection is None:
        raise InputError(
            f"The map `heads` needs an output projection of its own. Found none after "
            f"`{call.name}`; use the map `attention`."
        )
    if call.heads is not None:
        return call.heads
    with torch.no_grad():
        heads = core.heads(call.x)
        agree = close(call.projection(heads), call.output)
    if not agree:
        raise InputError(
            f"The heads of `{call.name}` should give its output through its output projection. "
            "Found another output; use the map `attention`."
        )
    return heads


def _head_outputs(
    call: AttentionCall, core: ClosedForm | Replayed, name: str, count: int | None
) -> Tensor:
    assert count is not None
    heads = _own_heads(call, core).unflatten(1, (count, -1)).transpose(0, 1)
    return heads if name == "heads" else heads @ projection_by_head(call).mT


def _no_heads() -> Tensor:
    raise InputError("Blocks and models have no single heads; leave out `per_head`.")


def _whole(layer: int | None, name: str, heads: int | None, parts: Whole) -> LayerMap:
    """A map of whole blocks, which are always run again."""
    return LayerMap(
        layer,
        name,
        parts.x,
        parts.output,
        parts.function,
        lambda x, memory, per_head: linearise(parts.function, x),
        None,
        heads,
        _no_heads,
        parts.ends,
        parts.note,
        module=parts.module,
        argument=", ".join(parts.moved),
    )


def margin_of(built: LayerMap) -> LayerMap:
    """From a model's scores to ``s_a - s_b``: the answer over the next one, of the last row.

    Which two they are is held fixed, as it is at the map's input. Their order changes where the
    margin is zero, so that ``margin / sigma`` is the distance to first order.

    Args:
        built: The map to the scores, padding left out.

    Returns:
        The map, whose output is one number.

    Raises:
        InputError: If the model has one score only.
    """
    if built.output.shape[-1] < 2:
        raise InputError("The map `margin` needs two scores. Found one; use the map `logits`.")
    best = built.output[-1].topk(2).indices

    def margin(y: Tensor) -> Tensor:
        first, second = y[..., -1:, best].split(1, dim=-1)
        return first - second

    def function(x: Tensor) -> Tensor:
        return margin(built.function(x))

    ends = None if built.ends is None else replace(built.ends, last=margin)
    build = lambda x, memory, per_head: linearise(function, x)  # noqa: E731
    return replace(built, output=margin(built.output), function=function, build=build, ends=ends)


def check_request(
    record: Trace, layer: int | None, name: str, num_tokens: int, memory: int
) -> None:
    """Refuse a map that the generic path could not hold at this length.

    Args:
        record: A trace, at any length.
        layer: Index of the layer, None for ``model``.
        name: The map.
        num_tokens: Largest number of tokens to be measured.
        memory: Bytes that may be used.

    Raises:
        InputError: If the request exceeds the memory.
    """
    call = record.calls[layer or 0]
    if name not in OF_BLOCKS and closed_form(call) is not None:
        return
    layers = (layer or 0) + 1 if name == "stack" else len(record.calls) if name in WHOLE else 1
    others = num_tokens if call.context is None else call.context.shape[0]
    pairs = num_tokens * others
    if call.context is not None and name in OF_BLOCKS:  # it attends to itself, too
        pairs += (num_tokens if call.side == "query" else others) ** 2
    heads = count_heads(call.module) or 1
    needed = _GENERIC_COPIES * layers * heads * pairs * call.x.element_size()
    if needed > memory:
        raise InputError(
            f"The map `{name}` of this model goes through the generic path, which would need "
            f"about {needed / 2**30:.1f} GiB at {num_tokens} tokens. Found "
            f"`memory = {memory / 2**30:.3g}GiB`; raise `--memory` or use shorter lengths."
        )


def _check_agreement(built: LayerMap, record: Trace) -> None:
    """The rebuilt map must give the model's own output at the captured input."""
    rows = _rows_that_read(built, record)
    if not len(built.output[rows]) or not bool(built.output[rows].isfinite().all()):
        return  # nothing to compare, or reported as non-finite by the solver
    where = record.calls[built.layer].name if built.layer is not None else "the model"
    with torch.no_grad():
        error = distance(_rebuilt(built, where)[rows], built.output[rows])
    limit = _AGREEMENT.get(built.x.dtype, 1e-2)
    if not error <= limit:
        raise InputError(
            f"The rebuilt map `{built.map}` of `{where}` should equal the model's own output to "
            f"{limit:g}. Found a difference of {error:.2g} (relative to the largest output): "
            "this model computes something that lipscope does not rebuild."
        )


def _rebuilt(built: LayerMap, where: str) -> Tensor:
    """What the rebuilt map gives; modules that are run again may not run alone."""
    try:
        return built(built.x)
    except InputError:
        raise
    except Exception as problem:
        if built.attention is not None or out_of_memory(problem):
            raise
        text = " ".join(str(problem).split())[:200]
        raise InputError(
            f"The map `{built.map}` of `{where}` should run by itself as it ran in the model, "
            f"without a key/value cache. Found that it raised {type(problem).__name__}: {text}"
        ) from problem


def _rows_that_read(built: LayerMap, record: Trace) -> Tensor | slice:
    """All rows but those that may read no token, for which every model has its own habit."""
    if built.attention is None or built.layer is None:
        return slice(None)
    call = record.calls[built.layer]
    keys = call.x if call.side != "query" or call.context is None else call.context
    empty = built.attention.empty_rows(keys)
    return slice(None) if empty is None else ~empty.reshape(-1, empty.shape[-1]).any(0)
