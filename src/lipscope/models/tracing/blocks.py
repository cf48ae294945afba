"""The maps ``block`` and ``model``: whole Transformer blocks, run again.

Where the layers are those of cross-attention, what moves is the decoder's stream (query
side), or the tokens of its keys and values as the blocks take them (key side); the other
stays.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.calls import BlockCall, Trace, as_tokens, first_tensor
from lipscope.models.tracing.prepare import exact_maths
from lipscope.models.tracing.replay import replay_block
from lipscope.models.tracing.sites import AttentionCall, block_of, first_block_of
from lipscope.models.tracing.trace import run


class Whole(NamedTuple):
    """A map of whole blocks.

    Attributes:
        x: Input, a token matrix.
        output: The model's own output, a token matrix.
        function: From one to the other.
        module: Path of the block; of the first one, for the model.
        moved: Names of its arguments that move.
    """

    x: Tensor
    output: Tensor
    function: Callable[[Tensor], Tensor]
    module: str
    moved: tuple[str, ...]


def block_parts(record: Trace, call: AttentionCall) -> Whole:
    """The block around an attention layer.

    Args:
        record: A trace with blocks.
        call: The layer.

    Returns:
        The map.

    Raises:
        InputError: If there is no block around the layer, or, on the key side, the block is
            not given the keys' tokens as they are.
    """
    block, axis = _block_around(record, call), call.token_axis
    output = as_tokens(block.output, axis)
    states = record.side == "key"
    x = call.x if states else as_tokens(block.x, axis)
    moved = _names_of_states(block, call) if states else (block.hidden,)
    return Whole(x, output, replay_block(block, axis, moved), block.name, moved)


def model_parts(record: Trace) -> Whole:
    """All blocks, from the first one (of the decoder, for cross-attention), and what follows.

    Args:
        record: A trace with blocks.

    Returns:
        The map.

    Raises:
        InputError: If the model has no list of blocks, ends in something else than a hidden
            state, or, on the key side, its layers read different tokens.
    """
    name, first, hidden, start = _first_block(record)
    if record.output is None or record.output.shape[-1] != start.shape[-1]:
        raise InputError(
            "The map `model` goes from the first block to a last hidden state of the same width. "
            "Found another output; leave out the head, or take one part of a composite model."
        )
    output = as_tokens(record.output, record.calls[0].token_axis)
    if record.side == "key":
        return _model_of_states(record, output)
    x = as_tokens(start, record.calls[0].token_axis)
    function = _rerun(record, [(first, (hidden,))], once=True)
    return Whole(x, output, function, name, (hidden,))


def _block_around(record: Trace, call: AttentionCall) -> BlockCall:
    # A block with shared weights is called once per layer: its calls pair up with the site's.
    calls = [c for c in record.calls if c.name == call.name]
    blocks = [b for b in record.blocks if call.name.startswith(b.name + ".")]
    turn = next(i for i, c in enumerate(calls) if c is call)
    if len(blocks) != len(calls):
        raise InputError(f"The map `block` needs a block around `{call.name}`. Found none.")
    return blocks[turn]


def _first_block(record: Trace) -> tuple[str, nn.Module, str, Tensor]:
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
        and value.data_ptr() == states.data_ptr()
        and value.shape == states.shape
    )
    if not names:
        raise InputError(
            f"The maps `block` and `model` through the key side need a block that is given the "
            f"keys' tokens. Found that `{block.name}` makes those of `{call.name}` itself; use "
            "the map `attention`."
        )
    return names


def _model_of_states(record: Trace, output: Tensor) -> Whole:
    states = record.calls[0].kept[0]
    other = next((c.name for c in record.calls if c.kept[0].data_ptr() != states.data_ptr()), None)
    if other is not None:
        raise InputError(
            "The map `model` through the key side needs layers that all read the same tokens. "
            f"Found others in `{other}`; use the map `block`."
        )
    blocks = [(_block_around(record, call), call) for call in record.calls]
    places = {b.module: _names_of_states(b, call) for b, call in blocks}
    function, block = _rerun(record, list(places.items()), once=False), blocks[0][0]
    return Whole(record.calls[0].x, output, function, block.name, places[block.module])


def _rerun(
    record: Trace, places: Sequence[tuple[nn.Module, tuple[str, ...]]], *, once: bool
) -> Callable[[Tensor], Tensor]:
    """The model on the same input, but for these arguments of these modules."""
    axis = record.calls[0].token_axis

    def function(x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            for module, names in places:
                _hand_over(stack, module, names, x.unsqueeze(1 - axis), once=once)
            with exact_maths(x.dtype):
                return as_tokens(first_tensor(run(record.model, record.inputs)), axis)

    return function


def _hand_over(
    stack: contextlib.ExitStack, module: nn.Module, names: Sequence[str], x: Tensor, *, once: bool
) -> None:
    """Give a module ``x`` in the place of some of its arguments, while the stack is open."""
    order = list(inspect.signature(module.forward).parameters)

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if once:
            handle.remove()  # a block with shared weights is called again for later layers
        given = list(args)
        for name in names:
            if name in kwargs or order.index(name) >= len(given):
                kwargs = {**kwargs, name: x.clone()}  # the model may write into it
            else:
                given[order.index(name)] = x.clone()
        return tuple(given), kwargs

    handle = module.register_forward_pre_hook(replace, with_kwargs=True)
    stack.callback(handle.remove)
