"""Records that hooks keep of calls of attention modules, norms and blocks in one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.arguments import bound_arguments
from lipscope.models.tracing.flow import Node, alike, bare, place
from lipscope.models.tracing.sites import Applied, AttentionCall, Side, has_weights
from lipscope.models.tracing.sums import Kept, NormCall, SeenSums, close

Inputs = Mapping[str, Any] | tuple[Any, ...]
# Names under which models hand the queries' tokens, and the keys' source, to an
# attention module.
_QUERIES = ("hidden_states", "query")
_SOURCES = ("key", "key_tensor", "key_value_states", "encoder_hidden_states", "kv", "context")
_VALUES = ("value", "value_tensor")
_LAST = 8  # modules inside a layer that are looked at when its end is sought


@dataclass
class Stream:
    """A tensor that a block is given, and under which names.

    Attributes:
        names: Of the arguments that hold it.
        x: Its value.
        node: What made it, in the graph of the forward pass; None if it depends on no input.
    """

    names: tuple[str, ...]
    x: Tensor
    node: Node | None


@dataclass
class BlockCall:
    """One call of a Transformer block.

    Attributes:
        name: Path of the block.
        module: The block.
        arguments: All its arguments by name.
        streams: Those of its tensors that depend on the model's input; of a block that is given
            none, its first tensor.
        output: What it returns, its first tensor of the streams' width.
        returned: How many tensors of the streams' shape it returns that depend on the input.
        output_place: Where its output lies in memory.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    streams: list[Stream]
    output: Tensor
    returned: int = 1
    output_place: int = 0


@dataclass
class Trace:
    """The record of one forward pass.

    Attributes:
        model: The model.
        inputs: The inputs of this pass.
        kept: The tensors that were seen.
        seen: Sums of token matrices, for the map ``residual``.
        side: Which attention calls are the layers: those of self-attention, or those with keys
            from elsewhere, through one of their sides.
        calls: The layers, in the order in which they were called.
        others: Names of attention modules that were called the other way: no layers.
        norms: Calls of normalisation modules, in order.
        blocks: Calls of Transformer blocks, one per layer; empty unless asked for.
        firsts: By path: the first block of a list, and the stream that enters it; for ``model``.
        output: The model's output tensor (``last_hidden_state`` where it has one).
        hidden: Whether the model says itself that this is its last hidden state.
        draws: Whether its forward pass draws random numbers.
        remarks: What rows of a layer should say about this input, by layer.
    """

    model: nn.Module
    inputs: Inputs
    kept: Kept
    seen: SeenSums
    side: Side = "self"
    calls: list[AttentionCall] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    blocks: list[BlockCall] = field(default_factory=list)
    firsts: dict[str, tuple[nn.Module, Stream]] = field(default_factory=dict)
    output: Tensor | None = None
    hidden: bool = False
    draws: bool = False
    remarks: dict[int, str] = field(default_factory=dict)


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors that a module returns, in a tuple or a record or by itself."""
    while isinstance(output, tuple | list) and output and isinstance(output[0], tuple | list):
        output = output[0]  # outputs, their scales (I-BERT)
    if isinstance(output, Tensor):
        return [output]
    values = getattr(output, "values", None)
    several = values() if callable(values) else output
    return [v for v in several if isinstance(v, Tensor)] if isinstance(several, Iterable) else []


def first_tensor(output: Any, at: int = 0) -> Tensor:
    """The output of a module that may return a tuple or a record, a loss first; or by place."""
    named = [] if at else [getattr(output, name, None) for name in ("last_hidden_state", "logits")]
    found = [one for one in named if isinstance(one, Tensor)] or tensors_in(output)
    if not found:
        raise InputError(f"A module should return a tensor. Found `{type(output).__name__}`.")
    return found[at]


def as_tokens(x: Tensor, token_axis: int) -> Tensor:
    """A batch of one as a token matrix ``(n, d)``."""
    if x.ndim != 3:
        return x.reshape(-1, x.shape[-1])
    batch = 1 - token_axis
    # A model may put tokens first inside and the batch first at its end (XLNet).
    return x.squeeze(batch if x.shape[batch] == 1 else token_axis)


def hook_site(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of an attention module, and what happened to tokens inside and after it."""
    now: list[AttentionCall | None] = [None]

    def start(site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now[0] = _begin(name, site, args, kwargs, record)

    def remember(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if now[0] is not None and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            now[0].inside.append(Applied(leaf, args[0].detach(), out.detach()))

    def finish(_: nn.Module, __: Any, out: Any) -> None:
        call, now[0] = now[0], None
        if call is not None:
            if not tensors_in(out):
                raise InputError(
                    f"`{name}` should return a tensor. Found `{type(out).__name__}`; name a module "
                    "around it with `modules=`."
                )
            call.out_at = place_of_output(out, call)
            result = first_tensor(out, call.out_at)
            call.kept.append(result.detach())
            call.output = as_tokens(record.kept.keep(result), call.token_axis)
            # What may be the end of it: not every tensor inside has to be kept.
            call.inside = [a for a in call.inside if a.y.numel() == result.numel()][-_LAST:]

    def behind(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        call = next((c for c in reversed(record.calls) if c.name == name), None)
        found = tensors_in(out)[:1]
        if call is None or len(call.kept) < 2 or not args or not found:
            return
        if isinstance(args[0], Tensor) and _is_or_copies(args[0], call.kept[1]):
            call.behind.append(Applied(leaf, args[0].detach(), record.kept.keep(found[0])))

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    for leaf in module.modules():
        if leaf is not module and has_weights(leaf):
            stack.callback(leaf.register_forward_hook(remember).remove)
    stack.callback(module.register_forward_hook(finish).remove)
    for leaf in _around(record.model, name, module):
        stack.callback(leaf.register_forward_hook(behind).remove)


def _is_or_copies(taken: Tensor, result: Tensor) -> bool:
    """Whether this is a call's output, or a copy: chunks of one are concatenated (CANINE)."""
    if place(taken) == place(result):
        return True
    try:
        return torch.equal(taken.detach().flatten(), result.flatten()) and bool(result.any())
    except RuntimeError:  # of a `vmap` that has ended: the call is refused for what it was
        return False


def _around(model: nn.Module, name: str, module: nn.Module) -> list[nn.Module]:
    """Modules with weights beside an attention module: one of them may be its projection."""
    if isinstance(module, nn.MultiheadAttention):
        return []
    inside, parts = set(module.modules()), name.split(".")
    found: list[nn.Module] = []
    for depth in (1, 2):
        if len(parts) > depth and not found:
            scope = model.get_submodule(".".join(parts[:-depth]))
            rest = (m for m in scope.modules() if m not in inside and module not in m.modules())
            found = [m for m in rest if has_weights(m)]
    return found


def _begin(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Trace
) -> AttentionCall | None:
    """Read a call's input before the module runs, which may write into it."""
    arguments = bound_arguments(module, args, kwargs)
    tokens = {k: v for k, v in arguments.items() if _is_tokens(v)}
    first = next((k for k in _QUERIES if k in arguments), None)
    first = first or next((k for k, v in tokens.items() if v.requires_grad), None)
    first = first or next(iter(arguments), None)
    x = arguments[first] if first is not None else None
    given = {k: bare(v) for k, v in arguments.items()}
    if not isinstance(x, Tensor) or x.ndim < 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"`{name}` should take a tensor of tokens first. Found {found}.")
    axis = _token_axis(module, x)
    if x.ndim != 3 or x.shape[1 - axis] != 1:
        if record.side == "self":
            record.calls.append(_in_parts(name, module, given, x.detach()))
            record.calls[-1].blocks_before = len(record.blocks)
        return None
    others = {k: v for k, v in tokens.items() if not alike(v, x) and k not in _VALUES}
    source = next((others[k] for k in _SOURCES if k in others), None)
    unsure: tuple[str, ...] = ()
    if source is None:  # under another name: what depends on the input too
        one = (v for v in others.items() if v[1].requires_grad and v[1].shape[1 - axis] == 1)
        others = {k: v for k, v in one if v.shape[-1] > 1}  # masks have an axis of heads
        source = next((v for v in others.values() if v.shape[:2] != x.shape[:2]), None)
        unsure = tuple(others) if source is None else ()
    if (source is None) != (record.side == "self") and not unsure:
        record.others.append(name)
        return None
    call = AttentionCall(name, module, {}, (), axis, x, x, record.side, unsure=unsure)
    take(call, given, x.detach(), None if source is None else source.detach(), record)
    call.implementation = _implementation(record.model, name)
    call.sums_before, call.blocks_before = len(record.seen.sums), len(record.blocks)
    call.turn = sum(one.name == name for one in record.calls) + record.others.count(name)
    record.calls.append(call)
    return call


def _in_parts(name: str, module: nn.Module, arguments: dict[str, Any], x: Tensor) -> AttentionCall:
    """A call on windows of the tokens, or on tokens of other axes: only its block is a map."""
    refusal = (
        f"`{name}` should take one sample, (1, tokens, width). Found {tuple(x.shape)}: windows, "
        "several samples or another layout; use the map `block` or `model`."
    )
    flat = x.reshape(-1, x.shape[-1])
    call = AttentionCall(name, module, arguments, (), 1, flat, flat, refusal=refusal, in_parts=True)
    call.kept = [x, x]
    return call


def take(
    call: AttentionCall,
    arguments: dict[str, Any],
    x: Tensor,
    source: Tensor | None,
    record: Trace,
) -> None:
    """Say what moves in a call and what stays: the tokens of its queries, and of its keys.

    Args:
        call: The call.
        arguments: Its arguments.
        x: The tokens of its queries.
        source: Those of its keys, where they are others.
        record: The trace.
    """
    keys = x if source is None else source
    moved, still = (source, x) if record.side == "key" and source is not None else (x, source)
    call.arguments, call.hidden = arguments, _names_of(arguments, moved)
    call.x = as_tokens(record.kept.keep(moved), call.token_axis)
    call.context = None if still is None else as_tokens(record.kept.keep(still), call.token_axis)
    if not moved.numel():
        call.refusal = f"`{call.name}` should be given tokens. Found none."
    values = (arguments.get(k) for k in _VALUES)
    if any(isinstance(v, Tensor) and not alike(v, keys) for v in values):
        call.refusal = (
            f"`{call.name}` should take its values from where its keys are from. Found values of "
            "another tensor (positions or a bottleneck before the queries?); use the map `block` "
            "or `model`."
        )
    call.kept = [moved, *call.kept[1:]]  # alive: no later tensor can take its place in memory


def _names_of(arguments: Mapping[str, Any], x: Tensor) -> tuple[str, ...]:
    return tuple(name for name, value in arguments.items() if alike(value, x))


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def place_of_output(output: Any, call: AttentionCall) -> int:
    """Which of the tensors that an attention module returns is its output.

    The first one with a row for every token, unless they are indices or weights that sum to one.
    """
    several = tensors_in(output)
    n, axis = call.num_queries, call.token_axis
    rows = [_is_tokens(t) and t.shape[axis] == n and t.shape[1 - axis] == 1 for t in several]
    fitting = [i for i, fits in enumerate(rows) if fits]
    free = (i for i in fitting if not _are_weights(several[i], call.num_keys))
    return next(free, fitting[0] if fitting else 0)


def _are_weights(x: Tensor, num_keys: int) -> bool:
    sums = x.detach().sum(-1)
    return x.shape[-1] == num_keys and bool((x >= 0).all()) and close(sums, torch.ones_like(sums))


def _token_axis(module: nn.Module, x: Tensor) -> int:
    """1 where the batch comes first. A sample is a batch of one, so its length tells."""
    if x.ndim != 3:
        return 1
    if isinstance(module, nn.MultiheadAttention):
        return 1 if module.batch_first else 0
    return 0 if x.shape[1] == 1 and x.shape[0] != 1 else 1


def _implementation(model: nn.Module, name: str) -> str | None:
    """The attention implementation set nearest to a module: on it or on what holds it."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        found = getattr(config, "_attn_implementation", None)
        if found is not None:
            return found
    return None


def hook_norm(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of a normalisation module."""
    started: list[tuple[Tensor, int]] = []

    def start(_: nn.Module, args: tuple[Any, ...]) -> None:
        started.clear()
        if args and isinstance(args[0], Tensor):
            started.append((record.kept.keep(args[0]), place(args[0])))

    def finish(norm: nn.Module, _: Any, out: Any) -> None:
        if not started or not isinstance(out, Tensor):
            return
        x, before = started[0]
        call = NormCall(name, norm, x, record.kept.keep(out), before, place(out))
        record.norms.append(call)
        total = record.seen.of(before)
        if total is not None and total.norm is None:
            total.norm = call

    stack.callback(module.register_forward_pre_hook(start).remove)
    stack.callback(module.register_forward_hook(finish).remove)


def streams_of(record: Trace, arguments: Mapping[str, Any]) -> list[Stream]:
    """The tensors among a block's arguments that depend on the model's input, each once."""
    given = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and v.ndim > 1}
    given = {k: v for k, v in given.items() if v.is_floating_point()}
    moving = {k: v for k, v in given.items() if v.requires_grad} or dict([*given.items()][:1])
    found: list[tuple[Tensor, list[str]]] = []
    for name, value in moving.items():
        same = next((names for x, names in found if alike(value, x)), None)
        if same is None:
            found.append((value, [name]))
        else:
            same.append(name)
    return [Stream(tuple(names), record.kept.keep(x), x.grad_fn) for x, names in found]


def hook_block(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of a Transformer block."""
    started: list[BlockCall] = []

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bound_arguments(block, args, kwargs)
        streams = streams_of(record, arguments)
        started.clear()
        if streams:
            given = {k: bare(v) for k, v in arguments.items()}
            started.append(BlockCall(name, block, given, streams, streams[0].x))

    def finish(_: nn.Module, __: Any, out: Any) -> None:
        for call in started:
            like = [t for t in tensors_in(out) if t.shape == call.streams[0].x.shape]
            several = {place(t) for t in like if t.requires_grad or not torch.is_grad_enabled()}
            result, call.returned = first_tensor(out), len(several)
            call.output, call.output_place = record.kept.keep(result), place(result)
            record.blocks.append(call)

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(finish).remove)


def hook_first(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep the input of the first block of a list, whether or not it holds attention."""

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams = streams_of(record, bound_arguments(block, args, kwargs))
        if name not in record.firsts and streams:
            record.firsts[name] = block, streams[0]

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
