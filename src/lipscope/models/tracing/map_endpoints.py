"""The model itself as a function between the endpoints of a map, using only hooks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.linalg import Operator, derivatives, linearise
from lipscope.models.tracing.calls import (
    BlockCall,
    BlockStart,
    Stream,
    Streams,
    Trace,
    linear_part,
    replay_block,
)
from lipscope.models.tracing.prepare import exact_maths
from lipscope.models.tracing.recorder import (
    AtSum,
    BlockOutputs,
    Inputs,
    NormCall,
    Reached,
    Recorder,
    as_called,
    as_tokens,
    bound_arguments,
    close,
    data_address,
    depends,
    first_tensor,
    named_arguments,
    names_of,
    run_of_blocks,
    signature_of,
    standing_in,
)
from lipscope.models.tracing.sites import AttentionCall, block_of, first_block_of


@dataclass(frozen=True)
class MapEndpoints:
    """The start and the end of a map in its model."""

    enters: str  # path of the module whose input tokens move
    arguments: tuple[str, ...]  # names of its arguments with the tokens, in order
    turn: int  # index of the call of this module
    leaves: str  # path of the module whose output is read
    until: str  # path of the module at whose end the run stops: the same, or a parent
    token_axis: int  # axis of the tokens, 0 or 1
    place: int = 0  # index of the output tensor of this module
    total: int | None = None  # index of the sum that is read instead; None for none
    # Maps ``J e`` to the derivative of the output.
    onward: Callable[[Tensor], Tensor] = lambda product: product
    moved: Tensor | None = None  # indices of the moving tokens; None for all
    read: Tensor | None = None  # indices of the output tokens; None for all
    last: Callable[[Tensor], Tensor] = lambda y: y  # final function of the output

    def function(
        self, model: nn.Module, inputs: Inputs, below: BlockOutputs | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The model's output of the map, as a function of its input tokens, ``(n, d)``.

        The tokens are written in place into the model's own tensor, so that all computations from
        this memory move with them, whatever the names of the arguments. The tensor is restored
        after each call.
        """
        return lambda x: self.beside((), model, inputs, below)(x)[0]

    def beside(
        self,
        others: Sequence[MapEndpoints],
        model: nn.Module,
        inputs: Inputs,
        below: BlockOutputs | None = None,
    ) -> Callable[[Tensor], list[Tensor]]:
        """As `function`, with the outputs at other ends in the same pass.

        Blocks in ``below`` are not run again.
        """
        ends = (self, *others)

        def function(x: Tensor) -> list[Tensor]:
            with standing_in(model, below or {}):
                found = self._run(ends, model, inputs, x)
            return [end.tokens(y) for end, y in zip(ends, found, strict=True)]

        return function

    def below(self, model: nn.Module, inputs: Inputs, x: Tensor) -> BlockOutputs:
        """Outputs of the blocks before the start of the map, so that these need not run again.

        Empty if skipping them changes the model's output at ``x``.
        """
        found = run_of_blocks(model, inputs, x.dtype, self.enters).below(self.enters)
        same = torch.equal(self.function(model, inputs, found)(x), self.function(model, inputs)(x))
        return found if same else {}

    def entering(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The map's input for other inputs of the model, ``(n, d)``."""
        dtype = next(model.parameters()).dtype
        with Recorder() as recorder, torch.no_grad():
            seen = recorder.arguments(model.get_submodule(self.enters), self._joined)
            recorder.run(model, inputs, dtype, differentiable=False)
        return self._moving(seen[self.turn])

    def _joined(self, given: Mapping[str, Any]) -> Tensor:
        """The input tokens concatenated to one matrix, a copy."""
        return torch.cat([as_tokens(given[name], self.token_axis) for name in self.arguments])

    def _moving(self, whole: Tensor) -> Tensor:
        return whole if self.moved is None else whole[self.moved]

    def gradients(
        self, model: nn.Module, inputs: Inputs, path: str, scores: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "m n d"]:
        """Gradients of scores ``(m,)`` of a module's output with respect to the moving tokens."""

        def held(given: Mapping[str, Any]) -> list[Tensor]:
            return [given[name].requires_grad_() for name in self.arguments]

        with Recorder() as recorder, torch.enable_grad():
            entered = recorder.arguments(model.get_submodule(self.enters), held)
            seen = recorder.outputs(model.get_submodule(path))
            dtype = next(model.parameters()).dtype
            recorder.run(model, inputs, dtype)
            with exact_maths(dtype):
                found = scores(as_tokens(first_tensor(seen[-1]), self.token_axis))
        if not found.requires_grad:
            raise InputError(
                f"The model should have gradients from its output back to `{self.enters}`. Found "
                "that they are cut in between."
            )
        some = []
        for one in found:
            with derivatives():
                parts = torch.autograd.grad(
                    one, entered[self.turn], retain_graph=True, materialize_grads=True
                )
            whole = torch.cat([as_tokens(part, self.token_axis) for part in parts])
            some.append(self._moving(whole))
        return torch.stack(some)

    def tokens(self, y: Tensor) -> Tensor:
        """The selected output tokens, after `last`."""
        y = as_tokens(y, self.token_axis)
        return self.last(y if self.read is None else y[self.read])

    def _run(
        self, ends: Sequence[MapEndpoints], model: nn.Module, inputs: Inputs, x: Tensor
    ) -> list[Tensor]:
        waiting = self.turn
        written: list[tuple[Tensor, Tensor]] = []
        found: dict[int, Tensor] = {}  # the latest output at each end
        settled: set[int] = set()

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal waiting
            if waiting == 0:
                given = bound_arguments(module, args, kwargs)
                self._check_apart([given[name] for name in self.arguments])
                written.extend((given[name], given[name].clone()) for name in self.arguments)
                self._write([held for held, _ in written], x)
            waiting -= 1

        def leave(k: int, out: Any) -> None:
            if written and k not in settled:
                # A copy: the model, or the restored tokens, may overwrite it.
                found[k] = first_tensor(out, ends[k].place).clone()

        def end(k: int) -> None:
            if k in found:
                settled.add(k)
            if len(settled) == len(ends):
                raise Reached

        def summed(k: int, out: Any) -> None:
            leave(k, out)
            end(k)

        with Recorder() as recorder, torch.no_grad():
            recorder.before(model.get_submodule(self.enters), enter)
            for k, one in enumerate(ends):
                if one.total is not None:
                    recorder.enter_context(AtSum(one.total, functools.partial(summed, k)))
                    continue
                leaves, until = map(model.get_submodule, (one.leaves, one.until))
                if leaves is until:
                    recorder.after(leaves, lambda _, __, out, k=k: summed(k, out))
                    continue
                recorder.after(leaves, lambda _, __, out, k=k: leave(k, out))
                recorder.after(until, lambda *_, k=k: end(k))
            try:
                with contextlib.suppress(Reached):
                    recorder.run(model, inputs, x.dtype, differentiable=False)
            finally:
                for held, before in written:
                    held.copy_(before)
        missing = next((one for k, one in enumerate(ends) if k not in found), None)
        if missing is not None:
            raise InputError(
                f"The model should run twice in the same way. Found that a second run on the same "
                f"input did not lead from `{self.enters}` to `{missing.leaves}`."
            )
        return [found[k] for k in range(len(ends))]

    def _check_apart(self, held: list[Tensor]) -> None:
        steps = (pair for t in held for pair in zip(t.stride(), t.shape, strict=True))
        if any(step == 0 and size > 1 for step, size in steps):
            raise InputError(
                f"`{self.enters}` should take tokens with separate memory. Found that entries "
                "share memory (`expand`); use the map `block` or `model`."
            )

    def _write(self, held: list[Tensor], x: Tensor) -> None:
        tokens = [as_tokens(one, self.token_axis) for one in held]
        whole = torch.cat(tokens)
        whole[slice(None) if self.moved is None else self.moved] = x.to(whole)
        for one, part in zip(held, whole.split([len(t) for t in tokens]), strict=True):
            one.copy_(part.reshape(one.shape))

    def within(self, block: str, start: BlockStart) -> MapEndpoints | None:
        """The same endpoints in a run of this block alone; None unless both are inside.

        ``start`` is its only call in the pass.
        """

        def inner(path: str) -> str | None:
            inside = f"{path}.".startswith(f"{block}.")
            return path.removeprefix(block).removeprefix(".") if inside else None

        enters, leaves, until = map(inner, (self.enters, self.leaves, self.until))
        if enters is None or leaves is None or until is None or self.turn:
            return None
        total = None if self.total is None else self.total - start.sums
        return replace(self, enters=enters, leaves=leaves, until=until, total=total)

    def at(self, path: str) -> MapEndpoints:
        """The same start, but with the whole output of a module as the end; "" for the model."""
        whole = MapEndpoints(self.enters, self.arguments, self.turn, path, path, self.token_axis)
        return replace(whole, moved=self.moved)


@dataclass(frozen=True)
class Norms:
    """Norms and scale of a map ``x -> N_o(x + s N_s(f(N_b(x))))``; None for missing ones."""

    before: nn.Module | None = None  # ``N_b``, before the attention
    second: nn.Module | None = None  # ``N_s``, of the attention's output
    outer: nn.Module | None = None  # ``N_o``, of the sum
    scale: Tensor | None = None  # ``s``, a scalar ``()`` or one factor per channel, ``(d,)``


@dataclass(frozen=True)
class LayerMap:
    """A map of one layer at one input: callable, and linearised by `linearise`."""

    layer: int | None  # index from 0; None for the maps of the whole model
    map: str  # name of the map
    x: Tensor  # the map's input, ``(n, d)``
    output: Tensor  # the model's own output of the map, ``(n, d_out)``
    function: Callable[[Tensor], Tensor]
    build: Callable[[Tensor, int, bool], Operator]
    attention: Attention | None  # the layer's weights in closed form, or None on the generic path
    num_heads: int | None  # number of query heads, if known
    # Output of every head, ``(h, n, d_out)``: its slice of ``heads``, or its contribution through
    # its part of the output projection.
    head_outputs: Callable[[], Tensor]
    # Endpoints of the map in its model; None for a layer without a model.
    ends: MapEndpoints | None = None
    note: str | None = None  # note for the row, or None
    module: str | None = None  # path of the module of the map; None for a layer without a model
    # Names of the moving arguments, or of those of the norm before it.
    argument: str | None = None
    # Whether the output projection is part of it; None if none was found.
    projection: bool | None = None
    norms: Norms | None = None  # for the map ``residual``; None for other maps

    def __call__(self, x: Tensor) -> Tensor:
        """The map at another input."""
        return self.function(x)

    def onward(self, product: Tensor) -> Tensor:
        """Derivative of the output at `ends`, from a product with the Jacobian."""
        return product if self.ends is None else self.ends.onward(product)

    def linearise(self, x: Tensor, *, memory: int = 2**30, per_head: bool = False) -> Operator:
        """The Jacobian at ``x``; with ``per_head``, it has a leading axis of heads."""
        return self.build(x, memory, per_head)


def ends_of_attention(record: Trace, call: AttentionCall, *, heads: bool = False) -> MapEndpoints:
    """Endpoints of the maps ``attention`` and ``heads``, both read after the output projection."""
    leaves, until, place = call.name, call.name, call.out_at
    if call.end.projection is not None and (call.end.goes_on or not call.end.inside):
        names = (name for name, one in record.model.named_modules() if one is call.end.projection)
        leaves, place = next(names), 0
        until = call.name if call.end.inside else leaves
    hidden = call.hidden[:1]
    ends = MapEndpoints(call.name, hidden, call.turn, leaves, until, call.token_axis, place)
    projection = call.end.projection
    if not heads or projection is None:
        return ends

    def onward(product: Tensor) -> Tensor:
        call.have()
        with torch.no_grad():
            return linear_part(projection, product)

    return replace(ends, onward=onward)


def from_norm(record: Trace, norm: NormCall, ends: MapEndpoints) -> MapEndpoints:
    """The same end, with the start moved before the norm."""
    calls = [other for other in record.norms if other.module is norm.module]
    turn = next(i for i, other in enumerate(calls) if other is norm)
    first = next(iter(signature_of(norm.module).parameters))
    return replace(ends, enters=norm.name, arguments=(first,), turn=turn)


def ends_of_model(record: Trace, first: str, moved: Streams, last: str) -> MapEndpoints:
    """From a first block to the output of a module, "" for the model's own."""
    return MapEndpoints(first, moved.firsts, 0, last, last, record.calls[0].token_axis)


# --- whole blocks, rerun
#
# For cross-attention layers, either the decoder's stream moves (query side), or the tokens of the
# keys and values as passed to the blocks (key side); the other is fixed.


def _no_heads() -> Tensor:
    raise InputError("Blocks and models have no single heads; leave out `per_head`.")


def by_differentiation(
    function: Callable[[Tensor], Tensor],
) -> Callable[[Tensor, int, bool], Operator]:
    """`LayerMap.build` for a map without a closed form, by automatic differentiation."""
    return lambda x, memory, per_head: linearise(function, x)


def _rerun_map(
    x: Tensor,
    output: Tensor,
    function: Callable[[Tensor], Tensor],
    moved: Streams,
    ends: MapEndpoints,
) -> LayerMap:
    """A map of whole blocks, which are always rerun; the caller sets its layer."""
    build = by_differentiation(function)
    names = ", ".join(moved.names)
    return LayerMap(
        None, "", x, output, function, build, None, None, _no_heads, ends, None, ends.enters, names
    )


def block_map(record: Trace, call: AttentionCall) -> LayerMap:
    """The block around an attention layer.

    All arguments that depend on the stream, the input of the first block, move. Several tensors
    are concatenated along the token axis.
    """
    block, axis = _one_stream(_block_around(record, call)), call.token_axis
    if record.side == "key":
        moved = Streams([Stream(_names_of_states(block, call), call.kept[0], None)], axis)
    else:
        moved = Streams(_moving(record, block), axis)
    function = replay_block(block, axis, moved)
    calls = [other for other in record.blocks if other.name == block.name]
    turn = next(i for i, other in enumerate(calls) if other is block)
    ends = MapEndpoints(block.name, moved.firsts, turn, block.name, block.name, axis)
    return _rerun_map(moved.x, as_tokens(block.output, axis), function, moved, ends)


def stack_map(record: Trace, call: AttentionCall) -> LayerMap:
    """The blocks up to the one around an attention layer, from the first of their list."""
    block, axis = _one_stream(_block_around(record, call)), call.token_axis
    if record.side == "key":
        raise InputError("The map `stack` follows the stream of the blocks; leave out `side`.")
    if sum(other.name == block.name for other in record.blocks) > 1:
        raise InputError(
            f"The map `stack` needs a block for every layer. Found that `{block.name}` is called "
            "for several; use the map `block` or `model`."
        )
    name = first_block_of(record.model, block.name)
    origin = record.firsts[name][1].node if name in record.firsts else None
    if not any(depends(one.node, origin) for one in block.streams):
        raise InputError(
            f"The map `stack` needs blocks that follow each other. Found none before "
            f"`{block.name}` that leads to it; use the map `block`."
        )
    first, start = record.firsts[name]
    moved = Streams([start], axis)
    function = rerun(record, {first: moved}, block.name, once=True)
    ends = ends_of_model(record, name, moved, block.name)
    return _rerun_map(moved.x, as_tokens(block.output, axis), function, moved, ends)


def _one_stream(block: BlockCall) -> BlockCall:
    if block.returned > 1:
        raise InputError(
            f"The maps `block` and `stack` need a block with one output stream. Found that "
            f"`{block.name}` returns {block.returned}; use the map `attention` or `model`."
        )
    x = block.streams[0].x
    if x.ndim == 2 and len(x) == 1:  # tokens without a batch axis were read as samples
        raise InputError(
            f"`{block.name}` should take samples, (batch, tokens, width). Found {tuple(x.shape)} "
            "of one sample; add a leading batch axis to the data."
        )
    return block


def _moving(record: Trace, block: BlockCall) -> list[Stream]:
    """The streams of a block that depend on the input of the first block."""
    _, origin = record.firsts.get(
        first_block_of(record.model, block.name), (None, block.streams[0])
    )
    found = [one for one in block.streams if depends(one.node, origin.node)]
    found = found or block.streams[:1]
    if record.side != "self":
        found = found[:1]  # the decoder's stream
    if len({one.x.shape[-1] for one in found}) > 1:
        names = ", ".join(f"`{one.names[0]}`" for one in found)
        raise InputError(
            f"The map `block` needs one stream, or several of equal width. Found "
            f"{names} in `{block.name}`; use the map `attention` or `model`."
        )
    return found


def model_map(record: Trace, *, scores: bool = False) -> LayerMap:
    """The map from the first block (of the decoder, for cross-attention) to the model's output.

    A model with a head does not return a hidden state: the map then ends at its last block, or at
    the norm after it; with ``scores`` it ends at the scores that the model returns.
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
        built = _model_of_states(record, output, last)
    else:
        moved = Streams([start], axis)
        function = rerun(record, {first: moved}, last, once=True)
        ends = ends_of_model(record, name, moved, last)
        built = _rerun_map(moved.x, output, function, moved, ends)
    note = f"read after `{last}`: the model does not return this state" if last else None
    return replace(built, note=note)


def _last_hidden(record: Trace, first: str, start: Stream) -> tuple[str, Tensor]:
    """Path and output of the last block of a list, or of the norm after it."""
    several = first.rpartition(".")[0]
    final = f"{several}.{len(list(record.model.get_submodule(several).children())) - 1}"
    block = next((b for b in reversed(record.blocks) if b.name == final), None)
    if block is None or block.output.shape != start.x.shape:
        raise InputError(
            "The map `model` goes from the first block to a last hidden state of the same width. "
            "Found another output; leave out the head, or take one part of a composite model."
        )
    taken = (n for n in record.norms if n.x_address == block.output_address)
    norm = next((n for n in taken if close(n.x, block.output)), None)
    inside = norm is not None and norm.y.shape == block.output.shape
    return (norm.name, norm.y) if norm is not None and inside else (final, block.output)


def _block_around(record: Trace, call: AttentionCall) -> BlockCall:
    # For blocks with shared weights: the first call that ends after this attention call starts.
    name, later = block_of(record.model, call.name), record.blocks[call.blocks_before :]
    found = next((block for block in later if block.name == name), None)
    if found is None:
        raise InputError(
            f"The map `block` needs a block around `{call.name}`. Found none; use the map "
            "`residual`, or make one module of attention and feed-forward network."
        )
    return found


def _first_block(record: Trace) -> tuple[str, nn.Module, Stream]:
    site = record.calls[0].name
    if record.side == "self":
        found = next(iter(record.firsts.items()), None)
    else:
        around = block_of(record.model, site)
        name = first_block_of(record.model, around) if around is not None else ""
        found = (name, record.firsts[name]) if name in record.firsts else None
    if found is None:
        raise InputError(
            "A map of the whole model needs blocks in a list, from the first of which it starts. "
            f"Found none around `{site}`; make one module of attention and feed-forward network."
        )
    return found[0], *found[1]


def _names_of_states(block: BlockCall, call: AttentionCall) -> tuple[str, ...]:
    """Argument names of a block for the tokens of the keys."""
    names = names_of(block.arguments, call.kept[0])
    if not names:
        raise InputError(
            f"The maps `block` and `model` through the key side need a block with the keys' "
            f"tokens as input. Found that `{block.name}` computes those of `{call.name}` itself; "
            "use the map `attention`."
        )
    return names


def _model_of_states(record: Trace, output: Tensor, last: str) -> LayerMap:
    states = record.calls[0].kept[0]
    other = next(
        (c.name for c in record.calls if data_address(c.kept[0]) != data_address(states)), None
    )
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
    function, moved = rerun(record, places, last, once=False), places[block.module]
    ends = ends_of_model(record, block.name, moved, last)
    return _rerun_map(record.calls[0].x, output, function, moved, ends)


def rerun(
    record: Trace, places: Mapping[nn.Module, Streams], last: str, *, once: bool
) -> Callable[[Tensor], Tensor]:
    """Output of a module as a function of arguments of other modules; "" for the model."""
    axis, end = record.calls[0].token_axis, record.model.get_submodule(last)

    def function(x: Tensor) -> Tensor:
        with Recorder() as recorder:
            found = recorder.outputs(end)
            for module, moved in places.items():
                _hand_over(recorder, module, moved.arguments(x), record, once=once)
            recorder.run(record.model, record.inputs, x.dtype)
        return as_tokens(first_tensor(found[-1]), axis)

    return function


def _hand_over(
    recorder: Recorder, module: nn.Module, given: Mapping[str, Tensor], record: Trace, *, once: bool
) -> None:
    """Replace some arguments of a module while the recorder is open.

    The stream of a model is overwritten in place, so that other uses of the tensor change too.
    """
    weights = {t.untyped_storage().data_ptr() for t in record.model.parameters()}

    def is_free(x: Tensor) -> bool:
        spread = all(step > 0 or size == 1 for step, size in zip(x.stride(), x.shape, strict=True))
        own = x.untyped_storage().data_ptr() not in weights
        return record.side == "self" and own and spread and not x.is_inference()

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if once:
            handle.remove()  # blocks with shared weights are called again for later layers
        arguments = named_arguments(module, args, kwargs)
        for name, value in given.items():
            if is_free(arguments[name]):
                with torch._C._DisableTorchDispatch():  # what is written over is not mixed
                    arguments[name].copy_(value)
            else:
                arguments[name] = value.clone()  # the model may write into it
        return as_called(module, arguments, len(args))  # the model's hooks may need positional args

    handle = recorder.before(module, put)
