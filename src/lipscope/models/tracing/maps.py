"""The maps of a layer, built from a trace and checked against it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention, Rotary
from lipscope.errors import InputError, out_of_memory
from lipscope.linalg import Operator, compose, linearise, plus_identity, restrict
from lipscope.models.tracing.calls import (
    ClosedForm,
    Replayed,
    TokenModule,
    Trace,
    count_heads,
    projection_by_head,
)
from lipscope.models.tracing.map_endpoints import (
    LayerMap,
    Norms,
    block_map,
    by_differentiation,
    ends_of_attention,
    from_norm,
    model_map,
    stack_map,
)
from lipscope.models.tracing.recorder import NormCall, as_tokens, close, data_address, distance
from lipscope.models.tracing.sites import AttentionCall, closed_form, why_run
from lipscope.models.tracing.trace import reaches_others
from lipscope.records import MAPS

WHOLE = ("model", "logits", "margin")  # maps of the whole model
OF_BLOCKS = ("block", "stack", *WHOLE)
PER_HEAD_MAPS = ("heads", "attention", "normed")

# Largest difference between the rebuilt map and the model's own output, relative to the
# largest output entry.
_AGREEMENT = {torch.float32: 1e-5, torch.float64: 1e-10}
_NO_BOUNDS = "so no bound from weights (local, in a ball or global) is available for this layer"
# Peak number of score matrices per head and layer on the generic path: scores, probabilities,
# their cotangents and the graph of the second pullback.
_GENERIC_COPIES = 7


def build_map(
    record: Trace, layer: int | None, name: str, *, memory: int = 2**30, per_head: bool = False
) -> LayerMap:
    """The map ``name`` of a layer (None for the whole model), checked against the trace.

    Known families are rebuilt in closed form; all others rerun the model's own modules.

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
    call = record.calls[0] if name in WHOLE else _call_of_layer(record, layer)
    attention = None if name in OF_BLOCKS else closed_form(call)
    if attention is None:
        _check_memory(record, layer, name, call.num_tokens, memory)
    if name in WHOLE:
        built = replace(model_map(record, scores=name != "model"), map=name)
    else:
        built = _layer_map(record, call, layer, name, per_head, attention)
    _check_agreement(built, record)
    remark = record.remarks.get(len(record.calls) - 1 if layer is None else layer)
    return replace(built, note="; ".join(filter(None, (built.note, remark))) or None)


def _call_of_layer(record: Trace, layer: int | None) -> AttentionCall:
    if layer is None or not 0 <= layer < len(record.calls):
        raise InputError(
            f"`layers` should be between 0 and {len(record.calls) - 1} for this model. "
            f"Found {layer}."
        )
    return record.calls[layer]


def _layer_map(
    record: Trace,
    call: AttentionCall,
    layer: int | None,
    name: str,
    per_head: bool,
    attention: Attention | None,
) -> LayerMap:
    if name in OF_BLOCKS:
        built = (block_map if name == "block" else stack_map)(record, call)
        return replace(built, layer=layer, map=name, num_heads=count_heads(call.module))
    if call.end.refusal:
        raise InputError(call.end.refusal)
    core: ClosedForm | Replayed
    core = Replayed(call, per_head) if attention is None else ClosedForm(call, attention)
    heads = attention.num_heads if attention is not None else count_heads(call.module)
    built = LayerMap(
        layer,
        name,
        call.x,
        call.end.output,
        core.attend,
        core.linearise,
        attention,
        heads,
        lambda: _head_outputs(call, core, name, heads),
        ends_of_attention(record, call, heads=name == "heads"),
        None if attention is not None else f"generic path: {why_run(call.module)}, {_NO_BOUNDS}",
        module=call.name,
        argument=", ".join(call.hidden),
        projection=_projects(call, attention, name),
    )
    if name == "heads":
        output, by_head = _own_heads(call, core), functools.partial(core.linearise, map="heads")
        return replace(built, output=output, function=core.heads, build=by_head)
    if name == "attention":
        return built
    before = norm_before(record, call)
    if name == "residual":
        return _residual_map(built, record, call, before, core)
    if before is None:
        raise InputError(
            f"The map `normed` needs a norm that feeds the layer. Found none before "
            f"`{call.name}`; use the map `attention`."
        )
    norm = TokenModule(before.module, before.x)
    return replace(
        _behind_norm(built, record, call, before),
        function=lambda x: core.attend(norm(x)),
        build=lambda x, m, h: compose(core.linearise(norm(x), m, h), linearise(norm, x)),
    )


def _behind_norm(built: LayerMap, record: Trace, call: AttentionCall, norm: NormCall) -> LayerMap:
    """The same map with its input moved before a norm."""
    assert built.ends is not None
    x, ends = as_tokens(norm.x, call.token_axis), from_norm(record, norm, built.ends)
    return replace(built, x=x, ends=ends, argument=f"input of {norm.name}")


def _projects(call: AttentionCall, attention: Attention | None, name: str) -> bool | None:
    """Whether the output projection is part of a map; None if none was found."""
    if name == "heads":
        return False
    if attention is not None:
        return attention.output is not None
    return True if call.end.projection is not None else None


def _own_heads(call: AttentionCall, core: ClosedForm | Replayed) -> Tensor:
    """The heads in the trace, or rebuilt ones that the projection maps to the model's output."""
    if call.end.projection is None:
        raise InputError(
            f"The map `heads` needs an output projection of its own. Found none after "
            f"`{call.name}`; use the map `attention`."
        )
    if call.end.heads is not None:
        return call.end.heads
    call.have()
    with torch.no_grad():
        heads = core.heads(call.x)
        agree = close(call.end.projection(heads), call.end.output)
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


def margin_of(built: LayerMap) -> LayerMap:
    """Reduce the map of a model's scores to the margin ``s_a - s_b`` of the last row.

    ``a`` and ``b`` are the two best classes at the map's input, and stay fixed; padding is
    excluded. The decision changes at margin zero: to first order at distance ``margin / sigma``.
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
    build = by_differentiation(function)
    return replace(built, output=margin(built.output), function=function, build=build, ends=ends)


def check_request(
    record: Trace, layer: int | None, name: str, num_tokens: int, memory: int
) -> None:
    """Refuse a map that needs more than ``memory`` bytes on the generic path at this length."""
    if name in OF_BLOCKS or closed_form(record.calls[layer or 0]) is None:
        _check_memory(record, layer, name, num_tokens, memory)


def _check_memory(
    record: Trace, layer: int | None, name: str, num_tokens: int, memory: int
) -> None:
    call = record.calls[layer or 0]
    layers = (layer or 0) + 1 if name == "stack" else len(record.calls) if name in WHOLE else 1
    others = num_tokens if call.context is None else call.context.shape[0]
    pairs = num_tokens * others
    if call.context is not None and name in OF_BLOCKS:  # the block has self-attention too
        pairs += (num_tokens if call.side == "query" else others) ** 2
    heads = count_heads(call.module) or 1
    needed = _GENERIC_COPIES * layers * heads * pairs * call.x.element_size()
    if needed > memory:
        raise InputError(
            f"The map `{name}` of this model uses the generic path, which would need "
            f"about {needed / 2**30:.1f} GiB at {num_tokens} tokens. Found "
            f"`memory = {memory / 2**30:.3g}GiB`; raise `memory` or use shorter lengths."
        )


def _check_agreement(built: LayerMap, record: Trace) -> None:
    """Require that the rebuilt map gives the model's own output at the captured input."""
    rows = _rows_that_read(built, record)
    if not len(built.output[rows]) or not bool(built.output[rows].isfinite().all()):
        return  # nothing to compare, or reported as non-finite by the solver
    where, why = "the model", "this model has a computation that lipscope does not rebuild"
    if built.layer is not None:
        call = record.calls[built.layer]
        where = call.name
        if built.attention is not None:
            kind = type(call.module).__name__
            why = f"the family of `{kind}` lacks something, such as a norm, a mask, a scale, a bias"
    with torch.no_grad():
        error = distance(_rebuilt(built, where)[rows], built.output[rows])
    limit = _AGREEMENT.get(built.x.dtype, 1e-2)
    if not error <= limit:
        raise InputError(
            f"The rebuilt map `{built.map}` of `{where}` should equal the model's own output to "
            f"{limit:g}. Found a difference of {error:.2g} (relative to the largest output): {why}."
        )


def _rebuilt(built: LayerMap, where: str) -> Tensor:
    """Output of the rebuilt map; replayed modules may fail outside the model."""
    try:
        return built(built.x)
    except InputError:
        raise
    except Exception as problem:
        if built.attention is not None or out_of_memory(problem):
            raise
        raise InputError(
            f"The map `{built.map}` of `{where}` should run on its own as in the model, "
            f"without a key/value cache. Found that it raised {type(problem).__name__}: "
            f"{str(problem)[:200]}"
        ) from problem


def _rows_that_read(built: LayerMap, record: Trace) -> Tensor | slice:
    """All rows except fully masked ones, for which conventions differ between models."""
    if built.attention is None or built.layer is None:
        return slice(None)
    call = record.calls[built.layer]
    keys = call.x if call.side != "query" or call.context is None else call.context
    empty = built.attention.empty_rows(keys)
    return slice(None) if empty is None else ~empty.reshape(-1, empty.shape[-1]).any(0)


# --- ``residual``: the sum of the input and output of an attention layer


def norm_before(record: Trace, call: AttentionCall) -> NormCall | None:
    """The norm whose output is the layer's input: same memory and same values."""
    here = data_address(call.kept[0])
    found = [n for n in record.norms if n.y_address == here and n.y.numel() == call.x.numel()]
    same = (n for n in found if close(as_tokens(n.y, call.token_axis), call.x))
    return next(same, None)


def _norm_after(record: Trace, call: AttentionCall) -> NormCall | None:
    """The norm applied directly to the attention's output, before any sum."""
    here = data_address(call.end.held)
    found = [
        n for n in record.norms if n.x_address == here and n.x.numel() == call.end.output.numel()
    ]
    same = (n for n in found if close(as_tokens(n.x, call.token_axis), call.end.output))
    return next(same, None)


def _residual_map(
    built: LayerMap,
    record: Trace,
    call: AttentionCall,
    norm: NormCall | None,
    core: ClosedForm | Replayed,
) -> LayerMap:
    """``x + s f(N(x))`` (pre-norm) or ``N(u + s f(u))`` (post-norm), with further norms.

    The variant is determined from the trace, as is the sum. The sum is the stream if the model
    adds to it again; if only a norm uses it, the output of the norm is the stream.
    """
    after = _norm_after(record, call)
    added = call.end.output if after is None else as_tokens(after.y, call.token_axis)
    second = TokenModule(after.module, after.x) if after is not None else None
    own = None if after is None else after.module
    here = data_address(call.end.held) if after is None else after.y_address
    index = scale = before = None
    if norm is not None:
        x = as_tokens(norm.x, call.token_axis)
        index, scale = _sum_of(record, call, x, added, here)
    if norm is not None and index is not None:
        built, before = _behind_norm(built, record, call, norm), TokenModule(norm.module, norm.x)
    else:
        index, scale = _sum_of(record, call, call.x, added, here)
    if index is None:
        raise InputError(
            f"The map `residual` needs a sum of the layer's input and output that the model uses "
            f"further on. Found none after `{call.name}`; use the map `block`."
        )

    def behind(y: Tensor) -> Tensor:
        y = y if second is None else second(y)
        return y if scale is None else y * scale

    def total(x: Tensor) -> Tensor:
        return x + behind(core.attend(x if before is None else before(x)))

    def operator(x: Tensor, memory: int, per_head: bool) -> Operator:
        u = x if before is None else before(x)
        op = core.linearise(u, memory, per_head)
        if second is not None or scale is not None:
            op = compose(linearise(behind, core.attend(u)), op)
        return plus_identity(op if before is None else compose(op, linearise(before, x)))

    assert built.ends is not None
    seen = record.seen.sums[index]
    if before is not None or seen.norm is None or seen.added:
        return replace(
            built,
            output=as_tokens(seen.value, call.token_axis),
            function=total,
            build=operator,
            ends=replace(built.ends, leaves="", until="", total=index),
            norms=Norms(None if before is None else before.module, own, scale=scale),
        )
    outer = TokenModule(seen.norm.module, seen.norm.x)
    return replace(
        built,
        output=as_tokens(seen.norm.y, call.token_axis),
        function=lambda x: outer(total(x)),
        build=lambda x, m, h: compose(linearise(outer, total(x)), operator(x, m, h)),
        ends=replace(built.ends, leaves=seen.norm.name, until=seen.norm.name, place=0),
        norms=Norms(second=own, outer=seen.norm.module, scale=scale),
    )


def _sum_of(
    record: Trace, call: AttentionCall, x: Tensor, added: Tensor, here: int
) -> tuple[int | None, Tensor | None]:
    """Index of the model's sum ``x + s added`` that is used further on, and ``s``.

    ``s`` is a recorded factor of the attention's output, at address ``here``; None for 1.
    """
    if x.shape != added.shape:
        return None, None
    scales = (None, *record.seen.factors(here, call.sums_before))
    expected = [x + (added if scale is None else added * scale) for scale in scales]
    for index, total in enumerate(record.seen.sums[call.sums_before :], call.sums_before):
        if not total.read or total.value.numel() != x.numel():
            continue
        value = as_tokens(total.value, call.token_axis)
        # For large x, several candidates are close: take the closest.
        off = {i: distance(value, one) for i, one in enumerate(expected) if close(value, one)}
        if off:
            return index, scales[min(off, key=off.__getitem__)]
    return None, None


# --- padding: held fixed and excluded from the output


def without_padding(built: LayerMap, record: Trace) -> LayerMap:
    """The map from the real tokens to their outputs, at the same input; unchanged without padding.

    Padding is marked by the caller in ``attention_mask`` (``decoder_attention_mask`` for a decoder
    after an encoder, ``encoder_attention_mask`` for the encoder states given to a decoder), with
    one entry per token, and by masks among the layer's own arguments that hide a token from all
    queries. Padding tokens are held fixed: the mask hides their keys, and their outputs are
    excluded.
    """
    moves, reads = _whose_tokens(built, record)
    call = record.calls[built.layer or 0]
    hidden, layer = None, built.attention
    if record.side != "query" and layer is None:
        hidden = hidden_keys(call)
    elif record.side != "query" and layer is not None and layer.mask is not None:
        hidden = ~layer.mask.flatten(0, -2).any(0)
    moved = _real_tokens(record, moves, built.x.shape[0], hidden)
    read = _real_tokens(
        record, reads, built.output.shape[0], hidden if record.side == "self" else None
    )
    if moved is None and read is None:
        unseen = _unrecognised(record, built.x.shape[0])
        if unseen is None or hidden is not None:
            return built
        added = f"`{unseen}` does not appear to hide any token of this layer: all move and are read"
        return replace(built, note="; ".join(filter(None, (built.note, added))))

    def whole(x: Tensor) -> Tensor:
        return x if moved is None else built.x.index_copy(0, moved, x)

    def picked(y: Tensor) -> Tensor:
        return y if read is None else y.index_select(-2, read)

    def build(x: Tensor, memory: int, per_head: bool) -> Operator:
        return restrict(built.build(whole(x), memory, per_head), move=moved, read=read)

    if record.side == "self" and layer is not None and moved is not None:
        layer = _on_tokens(layer, call, moved)
    x = built.x if moved is None else built.x[moved]
    left_out = built.x.shape[0] - x.shape[0]
    notes = [built.note, f"{left_out} padding tokens are held fixed and not read"]
    return replace(
        built,
        x=x,
        output=picked(built.output),
        function=lambda x: picked(built.function(whole(x))),
        build=build,
        head_outputs=lambda: picked(built.head_outputs()),
        attention=layer,
        ends=replace(built.ends, moved=moved, read=read) if built.ends is not None else None,
        note="; ".join(filter(None, notes if left_out else notes[:1])) or None,
    )


def _on_tokens(layer: Attention, call: AttentionCall, kept: Tensor) -> Attention | None:
    """The layer on some tokens of its input; None if their outputs depend on others too."""
    n, fields = call.num_tokens, layer.fields()

    def pairs(t: Tensor) -> Tensor:
        return t[..., kept, :][..., kept]

    seen = layer.visible(slice(0, n), slice(0, n), call.x.device)
    if seen is None:
        return None
    seen = pairs(seen)
    causal = bool((seen == torch.ones_like(seen).tril()).all())
    changes = {"causal": causal, "mask": None if causal or bool(seen.all()) else seen}
    if fields.get("window") is not None:
        changes["window"] = None
    if (bias := fields.get("score_bias")) is not None:
        changes["score_bias"] = pairs(bias)
    if (rotary := fields.get("rotary")) is not None:
        changes["rotary"] = Rotary(rotary.cos[kept], rotary.sin[kept])
    found = layer.replace(**changes)
    with torch.no_grad():
        return found if close(found(call.x[kept]), call.end.output[kept]) else None


def _whose_tokens(built: LayerMap, record: Trace) -> tuple[str, str]:
    """Which tokens move and which are read: the encoder ``states``, or the module's ``own``."""
    if record.side != "self":
        return ("states" if record.side == "key" else "own"), "own"
    name = next(iter(record.firsts), "") if built.layer is None else record.calls[built.layer].name
    moves = "own" if "decoder" in name.split(".") or not _two_parts(record) else "states"
    return moves, "own" if built.layer is None else moves


def _two_parts(record: Trace) -> bool:
    return isinstance(record.inputs, Mapping) and any(
        name.startswith("decoder_input") for name in record.inputs
    )


def _real_tokens(record: Trace, of: str, count: int, hidden: Tensor | None) -> Tensor | None:
    """Indices of the real tokens; None if there is no padding."""
    given = record.inputs
    mask = None
    if isinstance(given, Mapping):
        two = ("attention_mask", "decoder_attention_mask")
        states, own = two if _two_parts(record) else ("encoder_attention_mask", "attention_mask")
        mask = given.get(states if of == "states" else own)
    real = torch.ones(count, dtype=torch.bool)
    # A mask of another length refers to other tokens (of an image or an encoder).
    if isinstance(mask, Tensor) and mask.shape == (1, count):
        real &= (mask[0] != 0).cpu()
    if count and not bool(real.any()):
        raise InputError("`attention_mask` should keep at least one token. Found none.")
    if hidden is not None and len(hidden) == count and not bool(hidden.all()):
        real &= ~hidden.cpu()
    return None if bool(real.all()) else real.nonzero()[:, 0].to(record.calls[0].x.device)


def hidden_keys(call: AttentionCall) -> Tensor | None:
    """Keys that a mask among the arguments of a call hides from every query; None without mask.

    The meaning of mask entries is tested, not assumed: hidden tokens do not change other outputs.
    """
    if call.in_parts:
        return None
    count, hidden = call.num_keys, None
    for name, mask in call.arguments.items():
        if not _is_mask(name, mask) or mask.shape[-1] != count or mask.shape[-2:-1] == (0,):
            continue
        rows = mask.reshape(-1, count)
        same = (rows == rows[:1]).all(0)  # equal for all queries
        for value in rows[0, same].unique():
            there = same & (rows[0] == value)
            if bool(there.all()) or reaches_others(call, call.hidden, there):
                continue
            hidden = there if hidden is None else hidden | there
    return hidden


def _is_mask(name: str, value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not value.is_complex() and value.ndim > 0
    return is_tensor and ("mask" in name or "padding" in name or value.dtype == torch.bool)


def _unrecognised(record: Trace, count: int) -> str | None:
    """Name of an input that looks like a token mask with hidden tokens."""
    if not isinstance(record.inputs, Mapping):
        return None
    for name, value in record.inputs.items():
        if _is_mask(name, value) and value.shape == (1, count) and len(value.unique()) > 1:
            return name
    return None
