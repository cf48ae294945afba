"""Inputs whose position ids start elsewhere than at 0."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.capture.models import LoadedModel
from lipscope.capture.samples import Sample
from lipscope.errors import InputError


def offset_positions(loaded: LoadedModel, items: Sequence[Sample], offset: int) -> list[Sample]:
    """The same samples with position ids ``first + offset, first + offset + 1, …``.

    ``first`` is where the model itself starts: 0, or behind the padding id (RoBERTa).

    Args:
        loaded: The model.
        items: Samples.
        offset: How much later every token stands; with 0 the samples are left as they are.

    Returns:
        The samples.

    Raises:
        InputError: If the model takes no position ids, or has too few positions.
    """
    if offset == 0:
        return list(items)
    if offset < 0:
        raise InputError(
            f"`position_offset` should be at least 0. Found `position_offset = {offset}`."
        )
    kind = type(loaded.model).__name__
    if "position_ids" not in inspect.signature(loaded.model.forward).parameters:
        raise InputError(
            "`position_offset` needs a model that takes `position_ids` (learnt or rotary "
            f"positions). Found `{kind}`, which does not; leave it out."
        )
    return [_moved_on(loaded, item, offset) for item in items]


def _moved_on(loaded: LoadedModel, item: Sample, offset: int) -> Sample:
    given = item.arguments
    tokens = next(
        (given[k] for k in ("input_ids", "inputs_embeds") if k in given)
        if isinstance(given, Mapping)
        else iter(()),
        None,
    )
    if not isinstance(tokens, Tensor) or "position_ids" in given:
        raise InputError(
            "`position_offset` needs input ids or embeddings without position ids of their own. "
            f"Found {', '.join(given) if isinstance(given, Mapping) else 'a plain tensor'}."
        )
    n, limit = tokens.shape[1], loaded.max_tokens
    if limit is not None and offset + n > limit:
        raise InputError(
            f"`position_offset` should be at most {limit - n} for {n} tokens, as "
            f"`{loaded.name}` has {limit} positions. Found `position_offset = {offset}`."
        )
    first = loaded.first_position + offset
    positions = torch.arange(first, first + n)[None]
    assert isinstance(given, Mapping)
    return replace(item, arguments={**given, "position_ids": positions})
