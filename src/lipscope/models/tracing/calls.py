"""Hooks that record the calls of attention modules, norms and blocks in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope.attention import Attention, Map, MultiheadAttention
from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise, over_leading
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.recorder import (
    Inputs,
    Node,
    NormCall,
    Recorder,
    SumRecorder,
    TensorStore,
    as_called,
    as_tokens,
    bound_arguments,
    close,
    data_address,
    each_tensor,
    first_tensor,
    is_tokens,
    names_of,
    same_or_copy,
    same_tensor,
    tensors_in,
    token_arguments,
    unmarked,
)
from lipscope.models.tracing.resident_weights import ResidentWeights
from lipscope.models.tracing.sites import Applied, AttentionCall, Side, is_plain, with_weights

# Argument names of attention modules for the queries' tokens and for the source of the keys.
_QUERIES = ("hidden_states", "query")
_SOURCES = ("key", "key_tensor", "key_value_states", "encoder_hidden_states", "kv", "context")
_VALUES = ("value", "value_tensor")
_LAST = 8  # number of modules inside a layer to consider as its end


@dataclass
class Stream:
    """An input tensor of a block, with its argument names."""

    names: tuple[str, ...]  # names of the arguments
    x: Tensor
    # Its `grad_fn` in the graph of the forward pass; None if it does not depend on the input.
    node: Node | None


@dataclass
class BlockCall:
    """One call of a Transformer block."""

    name: str  # path of the block
    module: nn.Module  # the block
    arguments: dict[str, Any]  # all its arguments by name
    # Tensor arguments that depend on the model's input; if there are none, the first tensor.
    streams: list[Stream]
    output: Tensor  # the first output tensor
    returned: int = 1  # number of input-dependent outputs with the shape of the stream
    output_address: int = 0  # memory address of the output
    have: Callable[[], None] = lambda: None  # as in `AttentionCall`


@dataclass(frozen=True)
class BlockStart:
    """The arguments of a block of a model without weights, and its place in the pass."""

    arguments: dict[str, Any]  # copies of all its arguments by name
    turn: int  # index of the call, from 0
    sums: int  # number of previous sums in the pass


@dataclass
class Trace:
    """The record of one forward pass."""

    model: nn.Module
    inputs: Inputs  # the inputs of this pass
    kept: TensorStore  # the recorded tensors
    seen: SumRecorder  # sums of token matrices, for the map ``residual``
    # Which attention calls are layers: those of self-attention, or those of cross-attention
    # through one of its sides.
    side: Side = "self"
    # The layers, in call order.
    calls: list[AttentionCall] = field(default_factory=list)
    # Names of attention modules with the other kind of call, which are not layers.
    others: list[str] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)  # calls of normalisation modules, in order
    # Calls of Transformer blocks, one per layer; empty unless requested.
    blocks: list[BlockCall] = field(default_factory=list)
    # First block of each list by path, with its input stream; for ``model``.
    firsts: dict[str, tuple[nn.Module, Stream]] = field(default_factory=dict)
    # The model's output tensor (``last_hidden_state`` if available).
    output: Tensor | None = None
    hidden: bool = False  # whether the output is a ``last_hidden_state``
    complete: bool = True  # whether the pass ran to the end of the model
    # Weights in memory; None for all.
    resident: ResidentWeights | None = None
    starts: dict[str, list[BlockStart]] = field(default_factory=dict)  # inputs of resident blocks
    draws: bool = False  # whether the forward pass draws random numbers
    # Notes about this input for the rows of a layer, by layer.
    remarks: dict[int, str] = field(default_factory=dict)


def hook_site(recorder: Recorder, record: Trace, name: str, module: nn.Module) -> None:
    """Record every call of an attention module, with the modules applied inside and after it."""
    now: list[AttentionCall | None] = [None]

    def start(site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now[0] = _begin(name, site, args, kwargs, record)

    def remember(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if now[0] is not None and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            now[0].inside.append(Applied(leaf, args[0].detach(), out.detach()))

    def finish(_: nn.Module, __: Any, out: Any) -> None:
        call, now[0] = now[0], None
        if call is not None:
            several = tensors_in(out)
            if not several:
                raise InputError(
                    f"`{name}` should return a tensor. Found `{type(out).__name__}`; name a module "
                    "around it with `modules=`."
                )
            call.out_at = output_index(several, call)
            result = several[call.out_at]
            call.kept.append(result.detach())
            call.output = as_tokens(record.kept.keep(result), call.token_axis)
            # Only candidates for the end of the layer: not all tensors inside are needed.
            call.inside = [a for a in call.inside if a.y.numel() == result.numel()][-_LAST:]

    def behind(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        call = next((c for c in reversed(record.calls) if c.name == name), None)
        if call is None or len(call.kept) < 2 or not args:
            return
        for first in tensors_in(out)[:1] if same_or_copy(args[0], call.kept[1]) else ():
            call.behind.append(Applied(leaf, args[0].detach(), record.kept.keep(first)))

    recorder.around(module, start, finish)
    inside = with_weights([leaf for leaf in module.modules() if leaf is not module])
    beside = _modules_beside(record.model, name, module)
    recorder.after_each(dict.fromkeys(inside, remember) | dict.fromkeys(beside, behind))


def _modules_beside(model: nn.Module, name: str, module: nn.Module) -> list[nn.Module]:
    """Modules with weights next to an attention module: one may be its output projection."""
    if isinstance(module, nn.MultiheadAttention):
        return []
    inside, parts = set(module.modules()), name.split(".")
    found: list[nn.Module] = []
    for depth in (1, 2):
        if len(parts) > depth and not found:
            scope = model.get_submodule(".".join(parts[:-depth]))
            rest = [m for m in scope.modules() if m not in inside and module not in m.modules()]
            found = with_weights(rest)
    return found


def _begin(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Trace
) -> AttentionCall | None:
    """Record a call's input before the module runs and possibly overwrites it."""
    arguments = bound_arguments(module, args, kwargs)
    tokens = token_arguments(arguments)
    moving = (k for k, v in tokens.items() if v.requires_grad)
    names = (*(k for k in _QUERIES if k in arguments), *moving, *arguments)
    x = next((arguments[name] for name in names), None)
    given = unmarked(arguments)
    if not isinstance(x, Tensor) or x.ndim < 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"`{name}` should take a tensor of tokens first. Found {found}.")
    axis = _token_axis(module, x)
    if x.ndim != 3 or x.shape[1 - axis] != 1:
        if record.side == "self":
            record.calls.append(_in_parts(name, module, given, x.detach()))
            record.calls[-1].blocks_before = len(record.blocks)
        return None
    own = (*names_of(tokens, x), *_VALUES)
    others = {k: v for k, v in tokens.items() if k not in own}
    source = next((others[k] for k in _SOURCES if k in others), None)
    unsure: tuple[str, ...] = ()
    if source is None:  # other names: any argument that depends on the input
        one = (v for v in others.items() if v[1].requires_grad and v[1].shape[1 - axis] == 1)
        others = {k: v for k, v in one if v.shape[-1] > 1}  # masks have an axis of heads
        source = next((v for v in others.values() if v.shape[:2] != x.shape[:2]), None)
        unsure = tuple(others) if source is None else ()
    if (source is None) != (record.side == "self") and not unsure:
        record.others.append(name)
        return None
    call = AttentionCall(name, module, {}, (), axis, x, x, record.side, unsure=unsure)
    set_call_inputs(call, given, x.detach(), None if source is None else source.detach(), record)
    call.implementation = _implementation(record.model, name)
    call.sums_before, call.blocks_before = len(record.seen.sums), len(record.blocks)
    call.turn = sum(one.name == name for one in record.calls) + record.others.count(name)
    record.calls.append(call)
    return call


def _in_parts(name: str, module: nn.Module, arguments: dict[str, Any], x: Tensor) -> AttentionCall:
    """A call on windows of tokens, or along another axis: only maps of its block are available."""
    refusal = (
        f"`{name}` should take one sample, (1, tokens, width). Found {tuple(x.shape)}: windows, "
        "several samples or another layout; use the map `block` or `model`."
    )
    flat = x.reshape(-1, x.shape[-1])
    call = AttentionCall(name, module, arguments, (), 1, flat, flat, refusal=refusal, in_parts=True)
    call.kept = [x, x]
    return call


def set_call_inputs(
    call: AttentionCall, arguments: dict[str, Any], x: Tensor, source: Tensor | None, record: Trace
) -> None:
    """Set the moving and fixed inputs of a call from the tokens of queries and of other keys."""
    keys = x if source is None else source
    moved, still = (source, x) if record.side == "key" and source is not None else (x, source)
    call.arguments, call.hidden = arguments, names_of(arguments, moved)
    call.x = as_tokens(record.kept.keep(moved), call.token_axis)
    call.context = None if still is None else as_tokens(record.kept.keep(still), call.token_axis)
    if not moved.numel():
        call.refusal = f"`{call.name}` should be given tokens. Found none."
    values = (arguments.get(k) for k in _VALUES)
    if any(isinstance(v, Tensor) and not same_tensor(v, keys) for v in values):
        call.refusal = (
            f"`{call.name}` should take its keys and values from the same tensor. Found values "
            "from another one (positions or a bottleneck before the queries?); use the map `block` "
            "or `model`."
        )
    call.kept = [moved, *call.kept[1:]]  # kept alive, so that its memory is not reused


def output_index(several: Sequence[Tensor], call: AttentionCall) -> int:
    """Index of the output among the tensors that an attention module returns.

    The first tensor with a row for every token, except attention weights, which sum to one.
    """
    n, axis = call.num_queries, call.token_axis
    rows = [is_tokens(t) and t.shape[axis] == n and t.shape[1 - axis] == 1 for t in several]
    fitting = [i for i, fits in enumerate(rows) if fits]
    if len(fitting) < 2:
        return fitting[0] if fitting else 0
    free = (i for i in fitting if not _are_weights(several[i], call.num_keys))
    return next(free, fitting[0])


def _are_weights(x: Tensor, num_keys: int) -> bool:
    sums = x.detach().sum(-1)
    return x.shape[-1] == num_keys and bool((x >= 0).all()) and close(sums, torch.ones_like(sums))


def _token_axis(module: nn.Module, x: Tensor) -> int:
    """1 if the batch comes first, inferred from the shape, as a sample is a batch of one."""
    if x.ndim != 3:
        return 1
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module.batch_first else 0
    return 0 if x.shape[1] == 1 and x.shape[0] != 1 else 1


def _implementation(model: nn.Module, name: str) -> str | None:
    """The attention implementation in the nearest configuration, of the module or its parents."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        found = getattr(config, "_attn_implementation", None)
        if found is not None:
            return found
    return None


def hook_norm(recorder: Recorder, record: Trace, name: str, module: nn.Module) -> None:
    """Record every call of a normalisation module."""
    started: list[tuple[Tensor, int]] = []

    def start(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        started.clear()
        if args and isinstance(args[0], Tensor):
            started.append((record.kept.keep(args[0]), data_address(args[0])))

    def finish(norm: nn.Module, _: Any, out: Any) -> None:
        if not started or not isinstance(out, Tensor):
            return
        x, before = started[0]
        call = NormCall(name, norm, x, record.kept.keep(out), before, data_address(out))
        record.norms.append(call)
        total = record.seen.latest.get(before)
        if total is not None and total.norm is None:
            total.norm = call

    recorder.around(module, start, finish)


def streams_of(record: Trace, arguments: Mapping[str, Any]) -> list[Stream]:
    """Tensor arguments of a block that depend on the model's input, without duplicates."""
    given = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and v.ndim > 1}
    given = {k: v for k, v in given.items() if v.is_floating_point()}
    moving = {k: v for k, v in given.items() if v.requires_grad} or dict([*given.items()][:1])
    found: dict[tuple[str, ...], Tensor] = {}
    for x in moving.values():
        found.setdefault(names_of(moving, x), x)
    return [Stream(names, record.kept.keep(x), x.grad_fn) for names, x in found.items()]


def hook_block(recorder: Recorder, record: Trace, name: str, module: nn.Module) -> None:
    """Record every call of a Transformer block."""
    started: list[BlockCall] = []

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bound_arguments(block, args, kwargs)
        streams = streams_of(record, arguments)
        started.clear()
        if streams:
            started.append(BlockCall(name, block, unmarked(arguments), streams, streams[0].x))

    def finish(_: nn.Module, __: Any, out: Any) -> None:
        for call in started:
            like = [t for t in tensors_in(out) if t.shape == call.streams[0].x.shape]
            several = {
                data_address(t) for t in like if t.requires_grad or not torch.is_grad_enabled()
            }
            result, call.returned = first_tensor(out), len(several)
            call.output, call.output_address = record.kept.keep(result), data_address(result)
            record.blocks.append(call)

    recorder.around(module, start, finish)


def hook_start(recorder: Recorder, record: Trace, name: str, module: nn.Module) -> None:
    """Record the arguments of each call of a block."""
    started = record.starts.setdefault(name, [])

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = bound_arguments(block, args, kwargs)
        copies = each_tensor(given, lambda t: t.detach().clone())
        started.append(BlockStart(copies, len(started), len(record.seen.sums)))

    recorder.before(module, start)


def hook_first(recorder: Recorder, record: Trace, name: str, module: nn.Module) -> None:
    """Record the input of the first block of a list, even if it has no attention."""

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams = streams_of(record, bound_arguments(block, args, kwargs))
        if name not in record.firsts and streams:
            record.firsts[name] = block, streams[0]

    recorder.before(module, start)


# --- rebuilt attention: from its weights, or by running its modules

_OUT = ("out_proj.weight", "out_proj.bias")  # of torch's own attention


def count_heads(module: nn.Module) -> int | None:
    """Number of query heads of an attention module, from common attributes; None if unknown."""
    config = getattr(module, "config", None)
    sides = {getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")}
    if len(sides) > 1:  # ambiguous: encoder and decoder differ
        config = None
    for owner in (module, config):
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            count = getattr(owner, name, None)
            if isinstance(count, int):
                return count
    return None


def projection_by_head(call: AttentionCall) -> Tensor:
    """The columns of the output projection by head, ``(h, d_out, d_v)``."""
    count, projection = count_heads(call.module), call.end.projection
    assert count is not None and projection is not None
    call.have()
    if is_plain(projection):
        weight = projection.get_parameter("weight")
        weight = weight if isinstance(projection, nn.Linear) else weight.T
    else:  # adapters and packed weights have no plain matrix: evaluate at the unit vectors
        assert call.end.heads is not None
        unit = torch.eye(call.end.heads.shape[-1], dtype=call.x.dtype, device=call.x.device)
        with torch.no_grad():
            weight = linear_part(projection, unit).mT
    return weight.unflatten(1, (count, -1)).transpose(0, 1)


def linear_part(projection: nn.Module, x: Tensor) -> Tensor:
    """The linear part of an affine module, at ``x``."""
    at_x, at_zero = (first_tensor(projection(value)) for value in (x, torch.zeros_like(x)))
    return at_x - at_zero


class ClosedForm:
    """The attention of a known family, from its weights."""

    def __init__(self, call: AttentionCall, attention: Attention) -> None:
        self.attention, self.call = attention, call
        attention.to(call.x)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        return self.attention(*self._sides(x))

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        return self.attention.heads(*self._sides(x))

    def _sides(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens of the queries, and those of keys and values if different."""
        context = self.call.context
        return (context, x) if context is not None and self.call.side == "key" else (x, context)

    def linearise(self, x: Tensor, memory: int, per_head: bool, map: Map = "attention") -> Operator:
        """The Jacobian of `attend`, or of `heads`."""
        queries, context = self._sides(x)
        return self.attention.linearise(
            queries,
            memory=memory,
            per_head=per_head,
            map=map,
            context=context,
            side="key" if self.call.side == "key" else "query",
        )


def called_again(
    call: AttentionCall, changed: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The output of an attention module, as tokens, with some arguments and weights changed."""
    # One copy per tensor: a module may write into its input, and may compare inputs by identity.
    copies = each_tensor(changed, torch.clone)
    args, kwargs = as_called(call.module, {**call.arguments, **copies})
    call.have()
    with exact_maths(call.x.dtype), undisturbed(call.module):
        out = functional_call(call.module, dict(weights or {}), args, kwargs)
        return as_tokens(first_tensor(out, call.out_at), call.token_axis)


class Replayed:
    """The attention of any other family, by running its own modules again."""

    def __init__(self, call: AttentionCall, per_head: bool) -> None:
        self.call = call
        if per_head and (call.end.projection is None or count_heads(call.module) is None):
            raise InputError(
                f"Single heads need a known head count and output projection. Found "
                f"neither in `{call.name}`; leave out `per_head`."
            )

    def _run(self, x: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        shaped = x.unsqueeze(1 - self.call.token_axis)
        return called_again(self.call, dict.fromkeys(self.call.hidden, shaped), weights)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        projection = self.call.end.projection
        if projection is None:
            return self._run(x)
        if self.call.end.goes_on:
            return self._seen_at(projection, x)[1]
        if self.call.end.inside:
            return self._run(x)
        return first_tensor(projection(self._before_projection(x)))

    def _before_projection(self, x: Tensor) -> Tensor:
        """Input of a projection next to the module; heads may be on a separate axis."""
        out, heads = self._run(x), self.call.end.heads
        return out if heads is None else out.reshape(heads.shape)

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        if isinstance(self.call.module, nn.MultiheadAttention):
            # It does not call its projection as a module: replace the weight by the identity.
            own = isinstance(self.call.module, MultiheadAttention)
            names = ("attention.output", "attention.output_bias") if own else _OUT
            weight, bias = self.call.module.out_proj.weight, self.call.module.out_proj.bias
            identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
            bare: dict[str, Tensor] = {names[0]: identity}
            if bias is not None:
                bare[names[1]] = torch.zeros_like(bias)
            return self._run(x, bare)
        if not self.call.end.inside:
            return self._before_projection(x)
        assert self.call.end.projection is not None
        return self._seen_at(self.call.end.projection, x)[0]

    def _seen_at(self, leaf: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output of an inner module when the attention runs at ``x``."""
        seen: list[tuple[Tensor, Tensor]] = []
        with Recorder() as recorder:
            recorder.after(leaf, lambda _, args, out: seen.append((args[0], out)))
            self._run(x)
        source, result = seen[-1]
        return as_tokens(source, self.call.token_axis), as_tokens(result, self.call.token_axis)

    def linearise(self, x: Tensor, memory: int, per_head: bool, map: Map = "attention") -> Operator:
        """The Jacobian of `attend`, or of `heads`."""
        if not per_head:
            return linearise(self.attend if map == "attention" else self.heads, x)
        heads = self._by_head(linearise(self.heads, x))
        if map == "heads":
            return heads
        projection = projection_by_head(self.call)
        out = replace(
            heads,
            matvec=lambda e: e @ projection.mT,
            rmatvec=lambda g: g @ projection,
            out_shape=(heads.out_shape[0], projection.shape[1]),
        )
        return compose(out, heads)

    def _by_head(self, op: Operator) -> Operator:
        """The Jacobian of `heads` for each head separately."""
        count = count_heads(self.call.module)
        assert count is not None
        n, concat = op.out_shape
        width = concat // count

        def matvec(e: Tensor) -> Tensor:
            return torch.stack(
                [op.matvec(e[h])[:, h * width : (h + 1) * width] for h in range(count)]
            )

        def rmatvec(g: Tensor) -> Tensor:
            padded = g.new_zeros(count, n, concat)
            for h in range(count):
                padded[h, :, h * width : (h + 1) * width] = g[h]
            return op.rmatvec(padded)

        products = {"matvec": over_leading(matvec, 3), "rmatvec": over_leading(rmatvec, 3)}
        return replace(op, **products, out_shape=(n, width))


class TokenModule:
    """A module as a function of a token matrix, called with the shape used by the model."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self.module, self.shape = module, like.shape

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output at ``x``, as a token matrix."""
        with exact_maths(x.dtype):
            return first_tensor(self.module(x.reshape(self.shape).clone())).reshape(x.shape[0], -1)


def replay_block(block: BlockCall, axis: int, moved: Streams) -> Callable[[Tensor], Tensor]:
    """A block as a function of these streams, with all other arguments as in the trace."""

    def function(x: Tensor) -> Tensor:
        # Copies: a block may write into its input.
        still = {n: one.x.clone() for one in block.streams for n in one.names}
        arguments = {**block.arguments, **still, **moved.arguments(x)}
        args, kwargs = as_called(block.module, arguments)
        block.have()
        with exact_maths(x.dtype), undisturbed(block.module):
            return as_tokens(first_tensor(block.module.forward(*args, **kwargs)), axis)

    return function


class Streams:
    """Several tensors of one sample, concatenated to one token matrix."""

    def __init__(self, streams: Sequence[Stream], axis: int) -> None:
        for one in streams:
            if one.x.ndim == 3 and 1 not in one.x.shape[:2]:
                raise InputError(
                    "A block should take one sample at a time, (1, tokens, width). Found "
                    f"{tuple(one.x.shape)} in `{one.names[0]}`: frames or windows instead of "
                    "samples are not covered; measure the part of the model after them."
                )
        self.streams = streams
        self.parts = [as_tokens(one.x, axis) for one in streams]
        self.x = self.parts[0] if len(streams) == 1 else torch.cat(self.parts)
        self.names = tuple(name for one in streams for name in one.names)
        self.firsts = tuple(one.names[0] for one in streams)

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        """The arguments for a token matrix, in the shapes used by the model."""
        parts = x.split([len(part) for part in self.parts])
        shaped = [
            part.reshape(one.x.shape).clone() for part, one in zip(parts, self.streams, strict=True)
        ]
        return {n: t for one, t in zip(self.streams, shaped, strict=True) for n in one.names}
