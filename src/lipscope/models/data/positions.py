"""Inputs whose position ids start elsewhere than at 0."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.data.samples import Sample
from lipscope.models.loading import LoadedModel


def offset_positions(loaded: LoadedModel, items: Sequence[Sample], offset: int) -> list[Sample]:
    """The same samples with position ids ``first + offset, first + offset + 1, …``.

    ``first`` is where the model itself starts: 0, or after the padding id (RoBERTa).

    Args:
        loaded: The model.
        items: Samples.
        offset: How much later every token stands; with 0 the samples are left as they are.

    Returns:
        The samples; those of a model that makes its positions itself are left as they are
        (`later_positions`).

    Raises:
        InputError: If the model has no positions to be moved, or too few.
    """
    if offset == 0:
        return list(items)
    if offset < 0:
        raise InputError(
            f"`position_offset` should be at least 0. Found `position_offset = {offset}`."
        )
    if _takes_ids(loaded.model):
        return [_moved_on(loaded, item, offset) for item in items]
    if not _tables(loaded.model):
        raise InputError(
            "`position_offset` needs a model that takes `position_ids` (learnt or rotary "
            "positions), or tables of positions whose start can be moved. Found "
            f"`{type(loaded.model).__name__}`, which has neither; leave it out."
        )
    for item in items:
        _tokens(loaded, item, offset)
    return list(items)


@contextlib.contextmanager
def later_positions(model: nn.Module, offset: int) -> Iterator[None]:
    """Move the start of every table of positions, where a model makes its positions itself.

    BART and its kin take no position ids; their tables are told how many tokens came before.

    Args:
        model: Any model; nothing is done to one that takes position ids.
        offset: How many tokens came before.
    """
    with contextlib.ExitStack() as stack:
        for table in _tables(model) if offset and not _takes_ids(model) else ():
            hook = _Later(table, offset)
            stack.callback(table.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


_BEFORE = "past_key_values_length"


def _takes_ids(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _tables(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if "PositionalEmbedding" in type(module).__name__
        and _BEFORE in inspect.signature(module.forward).parameters
    ]


class _Later:
    """Hook: the arguments of a table for tokens that stand later."""

    def __init__(self, table: nn.Module, offset: int) -> None:
        self.signature, self.offset = inspect.signature(table.forward), offset

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        given = bound.arguments
        # A table that is told the positions does not count.
        name = "position_ids" if given.get("position_ids") is not None else _BEFORE
        given[name] = given.get(name, 0) + self.offset
        return bound.args, bound.kwargs


def _moved_on(loaded: LoadedModel, item: Sample, offset: int) -> Sample:
    given, n = _tokens(loaded, item, offset)
    first = loaded.first_position + offset
    positions = torch.arange(first, first + n)[None]
    return replace(item, arguments={**given, "position_ids": positions})


def _tokens(loaded: LoadedModel, item: Sample, offset: int) -> tuple[Mapping[str, Any], int]:
    """The arguments and the number of tokens of a sample whose positions may be moved so far."""
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
    assert isinstance(given, Mapping)
    return given, n
