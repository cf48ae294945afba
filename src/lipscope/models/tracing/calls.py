"""What hooks keep of the calls of attention modules, norms and blocks in one forward pass."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.sites import AttentionCall, Side, is_linear, linears
from lipscope.models.tracing.sums import Kept, NormCall, SeenSums, close

Inputs = Mapping[str, Any] | tuple[Any, ...]
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
# Names under which models hand the keys' source to an attention module.
_SOURCES = ("key", "key_tensor", "key_value_states", "encoder_hidden_states", "kv", "context")
_VALUES = ("value", "value_tensor")


@dataclass
class BlockCall:
    """One call of a Transformer block, with its other arguments."""

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    hidden: str
    x: Tensor
    output: Tensor


@dataclass
class Trace:
    """What one forward pass left behind.

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
        firsts: By path: module, name of its input and input of the first block of a list of
            blocks, in the order in which they were called; for the map ``model``.
        output: The model's output tensor (``last_hidden_state`` where it has one).
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
    firsts: dict[str, tuple[nn.Module, str, Tensor]] = field(default_factory=dict)
    output: Tensor | None = None
    remarks: dict[int, str] = field(default_factory=dict)


@dataclass
class _Inside:
    """What happens between the start and the end of one attention call."""

    call: AttentionCall | None = None
    leaves: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)


def first_tensor(output: Any) -> Tensor:
    """The output tensor of a module that may return a tuple or a record."""
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor):
        return hidden
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    found = [v for v in getattr(output, "values", list)() if isinstance(v, Tensor)]
    if not found:
        raise InputError(f"A module should return a tensor. Found `{type(output).__name__}`.")
    return found[0]


def as_tokens(x: Tensor, token_axis: int) -> Tensor:
    """A batch of one as a token matrix ``(n, d)``."""
    if x.ndim != 3:
        return x.reshape(-1, x.shape[-1])
    batch = 1 - token_axis
    # A model may put tokens first inside and the batch first at its end (XLNet).
    return x.squeeze(batch if x.shape[batch] == 1 else token_axis)


def bound_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, without any key/value cache: a replay would grow it."""
    signature = inspect.signature(module.forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return {k: None if k in _CACHES else v for k, v in arguments.items()}


def hook_site(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of an attention module."""
    inside = _Inside()

    def remember(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            inside.leaves.append((leaf, args[0], out))

    def start(site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside.leaves.clear()
        inside.call = _begin(name, site, args, kwargs, record)

    def finish(_: nn.Module, __: Any, out: Any) -> None:
        if inside.call is not None:
            _finish(inside.call, first_tensor(out), inside.leaves, record)

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    for leaf in module.modules():
        if leaf is not module and (_is_norm(leaf) or isinstance(leaf, nn.Conv1d)):
            stack.callback(leaf.register_forward_hook(remember).remove)
    for leaf in linears(module):
        stack.callback(leaf.register_forward_hook(remember).remove)
    stack.callback(module.register_forward_hook(finish).remove)
    _hook_outer_projection(stack, record, name, module)


def _begin(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Trace
) -> AttentionCall | None:
    """Read a call's input before the module runs, which may write into it."""
    arguments = bound_arguments(module, args, kwargs)
    first = "hidden_states" if "hidden_states" in arguments else next(iter(arguments), None)
    x = arguments[first] if first is not None else None
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise InputError(
            f"`{name}` should take a (batch, tokens, width) tensor first. Found "
            f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}."
        )
    source = next(
        (s for k in _SOURCES if isinstance(s := arguments.get(k), Tensor) and s is not x), None
    )
    if (source is None) != (record.side == "self"):
        record.others.append(name)
        return None
    axis = _token_axis(module, x)
    if x.shape[1 - axis] != 1:
        raise InputError(
            f"`{name}` should see one sample at a time. Found batch {x.shape[1 - axis]}."
        )
    keys = x if source is None else source
    moved, still = (source, x) if record.side == "key" and source is not None else (x, source)
    hidden = tuple(k for k, v in arguments.items() if v is moved)
    seen = as_tokens(record.kept.keep(moved), axis)
    call = AttentionCall(name, module, arguments, hidden, axis, seen, seen, record.side)
    if still is not None:
        call.context = as_tokens(record.kept.keep(still), axis)
    if any(isinstance(v := arguments.get(k), Tensor) and v is not keys for k in _VALUES):
        call.refusal = (
            f"`{name}` should take its values from where its keys are from. Found values of "
            "another tensor (positions or a bottleneck before the queries?); use the map `block` "
            "or `model`."
        )
    call.implementation = _implementation(record.model, name)
    call.sums_before = len(record.seen.sums)
    call.kept = [moved]  # alive, so that no later tensor can take its place in memory
    record.calls.append(call)
    return call


def _token_axis(module: nn.Module, x: Tensor) -> int:
    """1 where the batch comes first. A sample is a batch of one, so its length tells."""
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


def _finish(
    call: AttentionCall,
    out: Tensor,
    leaves: list[tuple[nn.Module, Tensor, Tensor]],
    record: Trace,
) -> None:
    """Read a call's output and find its output projection."""
    x = call.kept[0]
    call.kept.append(out)
    call.output = as_tokens(record.kept.keep(out), call.token_axis)
    for leaf, source, _ in leaves:
        as_it_is = _same(source, x) and source.shape == x.shape  # not a transpose of it
        if isinstance(leaf, nn.Conv1d) and as_it_is:
            raise InputError(
                f"`{call.name}` should take (batch, tokens, width). Found channels first: a "
                "convolution runs over its input as it is; this layout is not covered."
            )
    applied = [leaf for leaf in leaves if is_linear(leaf[0])]
    for leaf, source, result in applied:
        if result.data_ptr() == out.data_ptr():
            call.projection, call.heads = leaf, as_tokens(source, call.token_axis)
    if isinstance(call.module, nn.MultiheadAttention):
        call.projection = call.module.out_proj  # applied without being called
    call.projection_inside = call.projection is not None
    if call.projection is None:
        _look_behind_a_sum(call, out, leaves, applied)


def _look_behind_a_sum(
    call: AttentionCall,
    out: Tensor,
    leaves: list[tuple[nn.Module, Tensor, Tensor]],
    applied: list[tuple[nn.Module, Tensor, Tensor]],
) -> None:
    """Modules that add the residual themselves (BLOOM), some with a norm after it (ALBERT).

    The attention ends at the projection, if the rest is seen to be such a sum.
    """
    axis = call.token_axis
    norm = next((leaf for leaf in leaves if _is_norm(leaf[0]) and _same(leaf[2], out)), None)
    total = as_tokens(norm[1], axis) if norm is not None else call.output
    given = [v for k, v in call.arguments.items() if k not in call.hidden]
    terms = [as_tokens(v, axis) for v in given if isinstance(v, Tensor) and v.shape == out.shape]
    if applied:
        leaf, source, result = applied[-1]
        branch = as_tokens(result, axis)
        if any(close(total, branch + t) for t in (call.x, *terms) if t.shape == branch.shape):
            call.projection, call.heads = leaf, as_tokens(source, axis)
            call.output, call.projection_inside, call.goes_on = branch, True, True
            call.kept.append(result)
            return
    if norm is not None:
        call.refusal = call.refusal or (
            f"`{call.name}` should end at its output projection. Found a norm at its end, so that "
            "its output is more than attention; use the map `block` or `model`."
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _hook_outer_projection(
    stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module
) -> None:
    """Notice a linear layer outside the module that takes its output: the projection."""

    def look(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for call in reversed(record.calls):
            if call.name != name:
                continue
            if call.projection is None and args and _same(args[0], call.kept[1]):
                call.projection, call.heads = leaf, call.output
                call.output = as_tokens(record.kept.keep(out), call.token_axis)
                call.kept.append(out)
            return

    if isinstance(module, nn.MultiheadAttention) or any(map(_is_norm, module.children())):
        return  # these apply their own projection, and more
    inside = set(module.modules())
    scope = record.model
    parts = name.split(".")
    for depth in (1, 2):
        if len(parts) > depth:
            scope = record.model.get_submodule(".".join(parts[:-depth]))
            if any(leaf not in inside for leaf in linears(scope)):
                break
    for leaf in linears(scope):
        if leaf not in inside:
            stack.callback(leaf.register_forward_hook(look).remove)


def hook_norm(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of a normalisation module."""
    started: list[tuple[Tensor, int]] = []

    def start(_: nn.Module, args: tuple[Any, ...]) -> None:
        started.clear()
        if args and isinstance(args[0], Tensor):
            started.append((record.kept.keep(args[0]), args[0].data_ptr()))

    def finish(norm: nn.Module, _: Any, out: Any) -> None:
        if not started or not isinstance(out, Tensor):
            return
        x, place = started[0]
        call = NormCall(name, norm, x, record.kept.keep(out), place, out.data_ptr())
        record.norms.append(call)
        total = record.seen.of(place)
        if total is not None and total.norm is None:
            total.norm = call

    stack.callback(module.register_forward_pre_hook(start).remove)
    stack.callback(module.register_forward_hook(finish).remove)


def hook_block(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep every call of a Transformer block."""
    started: list[tuple[dict[str, Any], str, Tensor]] = []

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bound_arguments(block, args, kwargs)
        hidden = next(iter(arguments), "")
        x = arguments.get(hidden)
        started.clear()
        if isinstance(x, Tensor):
            started.append((arguments, hidden, record.kept.keep(x)))

    def finish(block: nn.Module, _: Any, out: Any) -> None:
        for arguments, hidden, x in started:
            kept = record.kept.keep(first_tensor(out))
            record.blocks.append(BlockCall(name, block, arguments, hidden, x, kept))

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(finish).remove)


def hook_first(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    """Keep the input of the first block of a list, whether or not it holds attention."""

    def start(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bound_arguments(block, args, kwargs)
        hidden = next(iter(arguments), "")
        x = arguments.get(hidden)
        if name not in record.firsts and isinstance(x, Tensor):
            record.firsts[name] = block, hidden, record.kept.keep(x)

    stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
