"""Padded inputs: maps of the real tokens alone, padding held fixed and not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.errors import InputError
from lipscope.linalg.operator import Operator, restrict
from lipscope.models.tracing.calls import Trace
from lipscope.models.tracing.maps import LayerMap


def without_padding(built: LayerMap, record: Trace) -> LayerMap:
    """The map from the real tokens to their outputs, at the same input.

    Which tokens are real is what the caller says in ``attention_mask`` (of a decoder behind an
    encoder ``decoder_attention_mask``; of states that are handed to a decoder
    ``encoder_attention_mask``), one entry per token. Padding stands where it is: its keys are
    hidden by the mask, and its own outputs are left out.

    Args:
        built: A map of all tokens.
        record: The trace that it was built from.

    Returns:
        The map, with a note; the map itself where there is no padding.

    Raises:
        InputError: If no token is real.
    """
    moves, reads = _parts(built, record)
    moved = _real(record, moves, built.x.shape[0])
    read = _real(record, reads, built.output.shape[0])
    if moved is None and read is None:
        return built

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


def _real(record: Trace, of: str, count: int) -> Tensor | None:
    """Indices of the real tokens, or None if all are."""
    given = record.inputs
    mask = None
    if isinstance(given, Mapping):
        two = ("attention_mask", "decoder_attention_mask")
        states, own = two if _two_parts(record) else ("encoder_attention_mask", "attention_mask")
        mask = given.get(states if of == "states" else own)
    # A mask of another length speaks of other tokens (a picture's, an encoder's).
    if not isinstance(mask, Tensor) or mask.shape != (1, count):
        return None
    real = (mask[0] != 0).nonzero()[:, 0]
    if not len(real):
        raise InputError("`attention_mask` should keep at least one token. Found none.")
    return None if len(real) == count else real.to(torch.int64)
