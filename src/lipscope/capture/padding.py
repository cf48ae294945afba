"""Padded inputs: maps of the real tokens alone, padding held fixed and not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.capture.calls import Trace
from lipscope.capture.maps import LayerMap
from lipscope.errors import InputError
from lipscope.operator import Operator, restrict


def without_padding(built: LayerMap, record: Trace) -> LayerMap:
    """The map from the real tokens to their outputs, at the same input.

    Which tokens are real is what the caller says in ``attention_mask`` (of a decoder:
    ``decoder_attention_mask``), one entry per token. Padding stands where it is: its keys are
    hidden by the mask, and its own outputs are left out.

    Args:
        built: A map of all tokens.
        record: The trace that it was built from.

    Returns:
        The map, with a note; the map itself where there is no padding.

    Raises:
        InputError: If no token is real.
    """
    decodes, side = _in_decoder(built, record), record.side
    moved = _real(record, built.x.shape[0], decodes and side != "key")
    read = _real(record, built.output.shape[0], decodes)
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
        note="; ".join(filter(None, notes if left_out else notes[:1])) or None,
    )


def _in_decoder(built: LayerMap, record: Trace) -> bool:
    """Whether a layer belongs to the decoder of two parts; the map ``model`` has none."""
    given = record.inputs
    if built.layer is None or not isinstance(given, Mapping):
        return False
    return "decoder" in record.calls[built.layer].name.split(".")


def _real(record: Trace, count: int, decodes: bool) -> Tensor | None:
    """Indices of the real tokens, or None if all are."""
    given = record.inputs
    mask = None
    if isinstance(given, Mapping):
        mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
    # A mask of another length speaks of other tokens (a picture's, an encoder's).
    if not isinstance(mask, Tensor) or mask.shape != (1, count):
        return None
    real = (mask[0] != 0).nonzero()[:, 0]
    if not len(real):
        raise InputError("`attention_mask` should keep at least one token. Found none.")
    return None if len(real) == count else real.to(torch.int64)
