"""Padded inputs: maps of the real tokens alone, padding held fixed and not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.linalg import Operator, restrict
from lipscope.models.tracing.calls import Trace
from lipscope.models.tracing.maps import LayerMap
from lipscope.models.tracing.output_projection import reaches_others
from lipscope.models.tracing.sites import AttentionCall


def without_padding(built: LayerMap, record: Trace) -> LayerMap:
    """The map from the real tokens to their outputs, at the same input.

    Which tokens are real is what the caller says in ``attention_mask`` (of a decoder after an
    encoder ``decoder_attention_mask``; of states that are handed to a decoder
    ``encoder_attention_mask``), one entry per token; and what the layer's own call says: tokens
    that a mask among its arguments hides from all queries. Padding stands where it is: its keys
    are hidden by the mask, and its own outputs are left out.

    Args:
        built: A map of all tokens.
        record: The trace that it was built from.

    Returns:
        The map, with a note; the map itself where there is no padding. A mask of tokens that the
        model was given and no layer is seen to take is in a note too.

    Raises:
        InputError: If no token is real.
    """
    moves, reads = _parts(built, record)
    call = record.calls[built.layer or 0]
    hidden = None
    if record.side != "query":
        hidden = _hidden_in(built.attention) if built.attention is not None else hidden_keys(call)
    moved = _real(record, moves, built.x.shape[0], hidden)
    read = _real(record, reads, built.output.shape[0], hidden if record.side == "self" else None)
    if moved is None and read is None:
        unseen = _unrecognised(record, built.x.shape[0])
        if unseen is None or hidden is not None:
            return built
        said = f"`{unseen}` is not seen to hide any token of this layer: all move and are read"
        return replace(built, note="; ".join(filter(None, (built.note, said))))

    def whole(x: Tensor) -> Tensor:
        return x if moved is None else built.x.index_copy(0, moved, x)

    def picked(y: Tensor) -> Tensor:
        return y if read is None else y.index_select(-2, read)

    def build(x: Tensor, memory: int, per_head: bool) -> Operator:
        return restrict(built.build(whole(x), memory, per_head), move=moved, read=read)

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
        ends=replace(built.ends, moved=moved, read=read) if built.ends is not None else None,
        note="; ".join(filter(None, notes if left_out else notes[:1])) or None,
    )


def _parts(built: LayerMap, record: Trace) -> tuple[str, str]:
    """Whose tokens move and whose are read: those of ``states`` that a decoder reads, or ``own``.

    In a model of two parts, ``own`` tokens of a layer of the encoder are its states.
    """
    if record.side != "self":
        return ("states" if record.side == "key" else "own"), "own"
    if built.layer is None:
        first = next(iter(record.firsts), "")
        return ("own" if _decodes(first) or not _two_parts(record) else "states"), "own"
    name = record.calls[built.layer].name
    return ("own", "own") if _decodes(name) or not _two_parts(record) else ("states", "states")


def _decodes(name: str) -> bool:
    return "decoder" in name.split(".")


def _two_parts(record: Trace) -> bool:
    return isinstance(record.inputs, Mapping) and any(
        name.startswith("decoder_input") for name in record.inputs
    )


def _real(record: Trace, of: str, count: int, hidden: Tensor | None) -> Tensor | None:
    """Indices of the real tokens, or None if all are."""
    given = record.inputs
    mask = None
    if isinstance(given, Mapping):
        two = ("attention_mask", "decoder_attention_mask")
        states, own = two if _two_parts(record) else ("encoder_attention_mask", "attention_mask")
        mask = given.get(states if of == "states" else own)
    real = torch.ones(count, dtype=torch.bool)
    # A mask of another length speaks of other tokens (a picture's, an encoder's).
    if isinstance(mask, Tensor) and mask.shape == (1, count):
        real &= (mask[0] != 0).cpu()
    if count and not bool(real.any()):
        raise InputError("`attention_mask` should keep at least one token. Found none.")
    if hidden is not None and len(hidden) == count and not bool(hidden.all()):
        real &= ~hidden.cpu()
    return None if bool(real.all()) else real.nonzero()[:, 0].to(record.calls[0].x.device)


def _hidden_in(layer: Attention) -> Tensor | None:
    """Which keys the mask of a layer in closed form hides from every query."""
    return None if layer.mask is None else ~layer.mask.flatten(0, -2).any(0)


def hidden_keys(call: AttentionCall) -> Tensor | None:
    """Which keys a mask among the arguments of a call hides from every query, ``(m,)``.

    Whether an entry hides or shows is seen, not read: what is hidden changes no other output.

    Args:
        call: A call of self-attention, or one through the key side.

    Returns:
        True where hidden; None where no argument is a mask of the keys.
    """
    if call.in_parts:
        return None
    count, hidden = call.num_keys, None
    for name, mask in call.arguments.items():
        if not _is_mask(name, mask) or mask.shape[-1] != count or mask.shape[-2:-1] == (0,):
            continue
        rows = mask.reshape(-1, count)
        same = (rows == rows[:1]).all(0)  # for all queries
        for value in rows[0, same].unique():
            there = same & (rows[0] == value)
            if bool(there.all()) or reaches_others(call, call.hidden, there):
                continue
            hidden = there if hidden is None else hidden | there
    return hidden


def _is_mask(name: str, value: Any) -> bool:
    told = isinstance(value, Tensor) and not value.is_complex() and value.ndim > 0
    return told and ("mask" in name or "padding" in name or value.dtype == torch.bool)


def _unrecognised(record: Trace, count: int) -> str | None:
    """Name of an input that looks like a mask of tokens, some of them hidden."""
    if not isinstance(record.inputs, Mapping):
        return None
    for name, value in record.inputs.items():
        if _is_mask(name, value) and value.shape == (1, count) and len(value.unique()) > 1:
            return name
    return None
