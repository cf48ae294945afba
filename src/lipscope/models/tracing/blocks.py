"""The maps ``block``, ``stack``, ``model`` and ``logits``: whole Transformer blocks, run again.

Where the layers are those of cross-attention, what moves is the decoder's stream (query
side), or the tokens of its keys and values as the blocks take them (key side); the other
stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.arguments import as_called, by_name
from lipscope.models.tracing.calls import BlockCall, Stream, Trace, as_tokens, first_tensor
from lipscope.models.tracing.flow import depends, each_tensor, place
from lipscope.models.tracing.map_endpoints import Ends, ends_of_block, ends_of_model
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.replay import Streams, replay_block
from lipscope.models.tracing.sites import AttentionCall, block_of, first_block_of
from lipscope.models.tracing.sums import close
from lipscope.models.tracing.trace import run


class Whole(NamedTuple):
    """A map of whole blocks.

    Attributes:
        x: Input, a token matrix.
        output: The model's own output, a token matrix.
        function: From one to the other.
        module: Path of the block; of the first one, for the model.
        moved: Names of its arguments that move.
        ends: Where the map is in the model.
        note: Remark for the row, or None.
    """

    x: Tensor
    output: Tensor
    function: Callable[[Tensor], Tensor]
    module: str
    moved: tuple[str, ...]
    ends: Ends
    note: str | None = None


def block_parts(record: Trace, call: AttentionCall) -> Whole:
    """The block around an attention layer.

    What moves is every argument that depends on the stream: the tensor that enters the first
    block. Several tensors are one matrix, tokens after tokens.

    Args:
        record: A trace with blocks.
        call: The layer.

    Returns:
        The map.

    Raises:
        InputError: If there is no block around the layer, it hands on several streams, or, on the
            key side, it is not given the keys' tokens as they are.
    """
    block, axis = _one_stream(_block_around(record, call)), call.token_axis
    if record.side == "key":
        moved = Streams([Stream(_names_of_states(block, call), call.kept[0], None)], axis)
    else:
        moved = Streams(_moving(record, block), axis)
    function = replay_block(block, axis, moved)
    output, ends = as_tokens(block.output, axis), ends_of_block(record, block, moved, axis)
    return Whole(moved.x, output, function, block.name, moved.names, ends)


def stack_parts(record: Trace, call: AttentionCall) -> Whole:
    """The blocks up to the one around an attention layer, from the first of their list.

    Args:
        record: A trace with blocks.
        call: The layer.

    Returns:
        The map.

    Raises:
        InputError: If there is no block around the layer, it hands on several streams, serves
            several layers or does not depend on the first one, or on the key side.
    """
    block, axis = _one_stream(_block_around(record, call)), call.token_axis
    if record.side == "key":
        raise InputError("The map `stack` follows the stream of the blocks; leave out `side`.")
    if sum(other.name == block.name for other in record.blocks) > 1:
        raise InputError(
            f"The map `stack` needs a block for every layer. Found that `{block.name}` is called "
            "for several; use the map `block` or `model`."
        )
    name = first_block_of(block.name)
    if name not in record.firsts or not _follows(block, record.firsts[name][1]):
        raise InputError(
            f"The map `stack` needs blocks that follow each other. Found none before "
            f"`{block.name}` that leads to it; use the map `block`."
        )
    first, start = record.firsts[name]
    moved = Streams([start], axis)
    function = _rerun(record, {first: moved}, block.name, once=True)
    ends = ends_of_model(record, name, moved, block.name)
    return Whole(moved.x, as_tokens(block.output, axis), function, name, moved.names, ends)


def _one_stream(block: BlockCall) -> BlockCall:
    if block.returned > 1:
        raise InputError(
            f"The maps `block` and `stack` need a block that hands on one stream. Found that "
            f"`{block.name}` returns {block.returned}; use the map `attention` or `model`."
        )
    return block


def _follows(block: BlockCall, start: Stream) -> bool:
    return any(depends(one.node, start.node) for one in block.streams)


def _moving(record: Trace, block: BlockCall) -> list[Stream]:
    """The streams of a block that depend on what entered the first block."""
    _, origin = record.firsts.get(first_block_of(block.name), (None, block.streams[0]))
    found = [one for one in block.streams if depends(one.node, origin.node)]
    found = found or block.streams[:1]
    if record.side != "self":
        found = found[:1]  # the decoder's own
    if len({one.x.shape[-1] for one in found}) > 1:
        names = ", ".join(f"`{one.names[0]}`" for one in found)
        raise InputError(
            f"The map `block` needs one stream, or several of one width that become one. Found "
            f"{names} in `{block.name}`; use the map `attention` or `model`."
        )
    return found


def model_parts(record: Trace, *, scores: bool = False) -> Whole:
    """All blocks, from the first one (of the decoder, for cross-attention), and what follows.

    What a model with a head returns is no hidden state: the map then ends at its last block, or
    at the norm that takes what that hands on; with ``scores`` it ends at what the model returns.

    Args:
        record: A trace with blocks.
        scores: Whether the map ends at the scores of the model's own head.

    Returns:
        The map.

    Raises:
        InputError: If the model has no list of blocks, ends in something else than a hidden
            state, has no head where its scores are asked for, or, on the key side, its layers read
            different tokens.
    """
    name, first, start = _first_block(record)
    output, last = record.output, ""
    whole = start.x.numel(), start.x.shape[-1]  # one token of logits may be as wide
    hidden = record.hidden or (output is not None and (output.numel(), output.shape[-1]) == whole)
    if output is None or hidden == scores:
        if scores:
            raise InputError(
                "The maps `logits` and `margin` need a model that ends in scores. Found "
                f"`{type(record.model).__name__}`, which ends in a hidden state; pass it with its "
                "head, as `AutoModelForSequenceClassification` loads it, or use the map `model`."
            )
        last, output = _last_hidden(record, name, start)
    axis = record.calls[0].token_axis
    output = as_tokens(output, axis)
    if record.side == "key":
        return _model_of_states(record, output, last)
    moved = Streams([start], axis)
    function = _rerun(record, {first: moved}, last, once=True)
    ends = ends_of_model(record, name, moved, last)
    return Whole(moved.x, output, function, name, moved.names, ends, _where(last))


def _where(last: str) -> str | None:
    return f"read after `{last}`: the model returns something else" if last else None


def _last_hidden(record: Trace, first: str, start: Stream) -> tuple[str, Tensor]:
    """Path and output of the last block of a list, or of the norm that takes it."""
    several = first.rpartition(".")[0]
    final = f"{several}.{len(list(record.model.get_submodule(several).children())) - 1}"
    block = next((b for b in reversed(record.blocks) if b.name == final), None)
    if block is None or block.output.shape != start.x.shape:
        raise InputError(
            "The map `model` goes from the first block to a last hidden state of the same width. "
            "Found another output; leave out the head, or take one part of a composite model."
        )
    taken = (n for n in record.norms if n.x_place == block.output_place)
    norm = next((n for n in taken if close(n.x, block.output)), None)
    inside = norm is not None and norm.y.shape == block.output.shape
    return (norm.name, norm.y) if norm is not None and inside else (final, block.output)


def _block_around(record: Trace, call: AttentionCall) -> BlockCall:
    # Of the calls of a block with shared weights, the first that ends after this one began.
    name, later = block_of(record.model, call.name), record.blocks[call.blocks_before :]
    found = next((block for block in later if block.name == name), None)
    if found is None:
        raise InputError(f"The map `block` needs a block around `{call.name}`. Found none.")
    return found


def _first_block(record: Trace) -> tuple[str, nn.Module, Stream]:
    site = record.calls[0].name
    if record.side == "self":
        found = next(iter(record.firsts.items()), None)
    else:
        around = block_of(record.model, site)
        name = first_block_of(around) if around is not None else ""
        found = (name, record.firsts[name]) if name in record.firsts else None
    if found is None:
        raise InputError(
            "The map `model` needs blocks in a list, from the first of which it starts. "
            f"Found none around `{site}`."
        )
    return found[0], *found[1]


def _names_of_states(block: BlockCall, call: AttentionCall) -> tuple[str, ...]:
    """Under which names a block is given the tokens of the keys."""
    states = call.kept[0]
    names = tuple(
        name
        for name, value in block.arguments.items()
        if isinstance(value, Tensor)
        and place(value) == place(states)
        and value.shape == states.shape
    )
    if not names:
        raise InputError(
            f"The maps `block` and `model` through the key side need a block that is given the "
            f"keys' tokens. Found that `{block.name}` makes those of `{call.name}` itself; use "
            "the map `attention`."
        )
    return names


def _model_of_states(record: Trace, output: Tensor, last: str) -> Whole:
    states = record.calls[0].kept[0]
    other = next((c.name for c in record.calls if place(c.kept[0]) != place(states)), None)
    if other is not None:
        raise InputError(
            "The map `model` through the key side needs layers that all read the same tokens. "
            f"Found others in `{other}`; use the map `block`."
        )
    blocks = [(_block_around(record, call), call) for call in record.calls]
    axis = record.calls[0].token_axis
    places = {
        b.module: Streams([Stream(_names_of_states(b, call), call.kept[0], None)], axis)
        for b, call in blocks
    }
    block = blocks[0][0]
    function, moved = _rerun(record, places, last, once=False), places[block.module]
    ends = ends_of_model(record, block.name, moved, last)
    return Whole(record.calls[0].x, output, function, block.name, moved.names, ends, _where(last))


def _rerun(
    record: Trace, places: Mapping[nn.Module, Streams], last: str, *, once: bool
) -> Callable[[Tensor], Tensor]:
    """What a module returns, as a function of these arguments of others; "" for the model."""
    axis, end = record.calls[0].token_axis, record.model.get_submodule(last)

    def function(x: Tensor) -> Tensor:
        found: list[Any] = []
        with contextlib.ExitStack() as stack:
            stack.callback(end.register_forward_hook(lambda *a: found.append(a[2])).remove)
            for module, moved in places.items():
                _hand_over(stack, module, moved.arguments(x), record, once=once)
            stack.enter_context(exact_maths(x.dtype))
            stack.enter_context(undisturbed(record.model))
            run(record.model, each_tensor(record.inputs, torch.clone))
        return as_tokens(first_tensor(found[-1]), axis)

    return function


def _hand_over(
    stack: contextlib.ExitStack,
    module: nn.Module,
    given: Mapping[str, Tensor],
    record: Trace,
    *,
    once: bool,
) -> None:
    """Give a module other values instead of some of its arguments, while the stack is open.

    The stream of a model is written over, so that whatever else reads that tensor (a skip, the
    memory of a decoder that reads its own input) reads the new values too.
    """
    weights = {t.untyped_storage().data_ptr() for t in record.model.parameters()}

    def is_free(x: Tensor) -> bool:
        spread = all(step > 0 or size == 1 for step, size in zip(x.stride(), x.shape, strict=True))
        own = x.untyped_storage().data_ptr() not in weights
        return record.side == "self" and own and spread and not x.is_inference()

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if once:
            handle.remove()  # a block with shared weights is called again for later layers
        arguments = by_name(module, args, kwargs)
        for name, value in given.items():
            if is_free(arguments[name]):
                arguments[name].copy_(value)
            else:
                arguments[name] = value.clone()  # the model may write into it
        return as_called(module, arguments, len(args))  # hooks of the model may count on these

    handle = module.register_forward_pre_hook(replace, with_kwargs=True)
    stack.callback(handle.remove)
