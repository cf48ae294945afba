"""Run a model once with hooks and keep what its attention layers saw.

Nothing is patched: hooks and settings live in context managers and are undone on exit.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lipscope.capture.sites import AttentionCall
from lipscope.errors import InputError

Inputs = Mapping[str, Any] | tuple[Any, ...]


@dataclass
class NormCall:
    """One call of a normalisation module: ``y = module(x)``."""

    module: nn.Module
    x: Tensor
    y: Tensor


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
        calls: Attention calls in the order in which they were made: the layers.
        norms: Calls of normalisation modules, in order.
        blocks: Calls of Transformer blocks, one per layer; empty unless asked for.
        output: The model's output tensor (``last_hidden_state`` where it has one).
        model: The model.
        inputs: The inputs of this pass.
    """

    model: nn.Module
    inputs: Inputs
    calls: list[AttentionCall] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    blocks: list[BlockCall] = field(default_factory=list)
    output: Tensor | None = None


class _KeepFloat64(TorchFunctionMode):
    """Answer every request for float32 with float64.

    Many models compute softmax, norms or rotary angles in float32 whatever their weights
    are, so that a float64 run would only look like one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **kwargs)


@contextlib.contextmanager
def exact_maths(dtype: torch.dtype, *, differentiable: bool = True) -> Iterator[None]:
    """No fast path that skips modules, float64 where it is asked for.

    Args:
        dtype: Floating type of the computation.
        differentiable: Only attention kernels with all derivatives; they hold every score.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as stack:
            if differentiable:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if dtype == torch.float64:
                stack.enter_context(_KeepFloat64())
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def prepared(
    model: nn.Module, *, dtype: torch.dtype, device: torch.device, implementation: str
) -> Iterator[tuple[nn.Module, list[str]]]:
    """A model ready to be measured: eval mode, one dtype, a known attention implementation.

    A model in another dtype or on another device is copied; otherwise its settings are
    changed for the time of the block and put back.

    Args:
        model: Any module.
        dtype: Floating type of weights and activations.
        device: Device to run on.
        implementation: Attention implementation of a Hugging Face model, set before any
            capture, because masks are built for one implementation and are wrong or
            missing under another.

    Yields:
        The model, and notes on what was changed.
    """
    notes: list[str] = []
    floating = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if any(t.dtype != dtype or t.device.type != device.type for t in floating):
        model = copy.deepcopy(model).to(device=device, dtype=dtype)
    modes = {m: m.training for m in model.modules()}
    grads = {p: p.requires_grad for p in model.parameters()}
    if any(m.training and _drops(m) for m in model.modules()):
        notes.append("dropout was live and has been switched off for the measurement")
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    switch = getattr(model, "set_attn_implementation", None)
    try:
        model.eval()
        for p in grads:
            p.requires_grad_(False)
        if switch is not None and before != implementation:
            switch(implementation)
        yield model, notes
    finally:
        for module, mode in modes.items():
            module.training = mode
        for p, needs in grads.items():
            p.requires_grad_(needs)
        if switch is not None and before not in (None, implementation):
            switch(before)


def _drops(module: nn.Module) -> bool:
    rates = (getattr(module, name, 0.0) for name in ("p", "dropout", "attention_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def trace(
    model: nn.Module,
    inputs: Inputs,
    sites: Mapping[str, nn.Module],
    *,
    norms: bool = False,
    blocks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """Run ``model`` on one input and record its attention calls.

    Args:
        model: A model inside `prepared`.
        inputs: Keyword arguments, or a tuple of positional ones; one sample.
        sites: Attention modules by path (`attention_sites`).
        norms: Also record every normalisation (for the maps ``normed`` and ``residual``).
        blocks: Also record the Transformer blocks around the sites.
        dtype: Floating type of the run.

    Returns:
        The trace; its ``calls`` are the layers.

    Raises:
        InputError: If no attention module was called.
    """
    record = Trace(model, inputs)
    with contextlib.ExitStack() as stack:
        for name, module in sites.items():
            _hook_site(stack, record, name, module)
        if norms:
            for module in model.modules():
                if "norm" in type(module).__name__.lower():
                    _hook_norm(stack, record, module)
        if blocks:
            for name in dict.fromkeys(_block_of(model, site) for site in sites):
                _hook_block(stack, record, name, model.get_submodule(name))
        stack.enter_context(torch.no_grad())
        stack.enter_context(exact_maths(dtype, differentiable=False))
        record.output = first_tensor(_run_once(model, inputs))
    if not record.calls:
        raise InputError(
            f"The model should call its attention modules ({', '.join(list(sites)[:3])}, …). "
            "Found that it called none of them on this input."
        )
    return record


def _run_once(model: nn.Module, inputs: Inputs) -> Any:
    """`run`, with whatever the model's own code raises as one line."""
    try:
        return run(model, inputs)
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as problem:
        text = " ".join(str(problem).split())[:300]
        raise InputError(
            f"`{type(model).__name__}` should run on this input. Found that its forward pass "
            f"raised {type(problem).__name__}: {text}"
        ) from problem


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model without a key/value cache."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    extra = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        extra["use_cache"] = False
    return model(**{**inputs, **extra})


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
    return x.squeeze(1 - token_axis) if x.ndim == 3 else x.reshape(-1, x.shape[-1])


def _hook_site(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    inner: list[tuple[nn.Module, Tensor, Tensor]] = []

    def remember(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            inner.append((leaf, args[0], out))

    def start(_: nn.Module, __: Any) -> None:
        inner.clear()

    def finish(site: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        record.calls.append(_read_call(name, site, args, kwargs, first_tensor(out), inner, record))

    stack.callback(module.register_forward_pre_hook(start).remove)
    for leaf in _linears(module):
        stack.callback(leaf.register_forward_hook(remember).remove)
    stack.callback(module.register_forward_hook(finish, with_kwargs=True).remove)
    _hook_outer_projection(stack, record, name, module)


def _read_call(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    inner: list[tuple[nn.Module, Tensor, Tensor]],
    record: Trace,
) -> AttentionCall:
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    arguments = {**bound, **bound.pop("kwargs", {})}
    for cache in ("past_key_values", "past_key_value", "layer_past"):
        if arguments.get(cache) is not None:
            arguments[cache] = None
    first = "hidden_states" if "hidden_states" in arguments else next(iter(arguments))
    x = arguments[first]
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise InputError(
            f"`{name}` should take a (batch, tokens, width) tensor first. Found "
            f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}."
        )
    hidden = tuple(k for k, v in arguments.items() if v is x)
    axis = 1 if getattr(module, "batch_first", True) else 0
    if x.shape[1 - axis] != 1:
        raise InputError(
            f"`{name}` should see one sample at a time. Found batch {x.shape[1 - axis]}."
        )
    call = AttentionCall(
        name, module, arguments, hidden, axis, as_tokens(x, axis), as_tokens(out, axis)
    )
    config = getattr(module, "config", None) or getattr(record.model, "config", None)
    call.implementation = getattr(config, "_attn_implementation", None)
    call.norms_before = len(record.norms)
    call.kept = [x, out]  # alive, so that no later tensor can take their place in memory
    for leaf, source, result in inner:
        if result.data_ptr() == out.data_ptr():
            call.projection, call.heads = leaf, as_tokens(source, axis)
    if call.projection is None:
        call.projection_inside = False
    return call


def _hook_outer_projection(
    stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module
) -> None:
    """Notice a linear layer outside the module that takes its output: the projection."""

    def look(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for call in reversed(record.calls):
            if call.name != name:
                continue
            if call.projection is None and args and args[0].data_ptr() == call.kept[1].data_ptr():
                call.projection, call.heads = leaf, call.output
                call.output = as_tokens(out, call.token_axis)
                call.kept.append(out)
            return

    if isinstance(module, nn.MultiheadAttention) or "norm" in _inner_kinds(module):
        return  # these apply their own projection, and more
    inside = set(module.modules())
    scope = record.model
    parts = name.split(".")
    for depth in (1, 2):
        if len(parts) > depth:
            scope = record.model.get_submodule(".".join(parts[:-depth]))
            if any(leaf not in inside for leaf in _linears(scope)):
                break
    for leaf in _linears(scope):
        if leaf not in inside:
            stack.callback(leaf.register_forward_hook(look).remove)


def _inner_kinds(module: nn.Module) -> str:
    """Class names of a module's direct children, for example of a norm after the sum."""
    return " ".join(type(child).__name__.lower() for child in module.children())


def _hook_norm(stack: contextlib.ExitStack, record: Trace, module: nn.Module) -> None:
    def finish(norm: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            record.norms.append(NormCall(norm, args[0], out))

    stack.callback(module.register_forward_hook(finish).remove)


def _hook_block(stack: contextlib.ExitStack, record: Trace, name: str, module: nn.Module) -> None:
    def finish(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        bound = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        arguments = {**bound, **bound.pop("kwargs", {})}
        for cache in ("past_key_values", "past_key_value", "layer_past"):
            if arguments.get(cache) is not None:
                arguments[cache] = None
        hidden = next(iter(arguments))
        record.blocks.append(
            BlockCall(name, block, arguments, hidden, arguments[hidden], first_tensor(out))
        )

    stack.callback(module.register_forward_hook(finish, with_kwargs=True).remove)


def _linears(module: nn.Module) -> list[nn.Module]:
    """Linear maps with a weight: ``nn.Linear`` and the transposed ``Conv1D`` of GPT-2."""
    return [m for m in module.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]


def _block_of(model: nn.Module, site: str) -> str:
    """Path of the Transformer block around a site.

    The innermost element of a module list that has linear layers besides the site's own and
    its output projection's, that is an MLP.
    """
    parts = site.split(".")
    own = len(_linears(model.get_submodule(site)))
    for depth in range(len(parts) - 1, 0, -1):
        if not parts[depth - 1].isdigit():
            continue
        path = ".".join(parts[:depth])
        if len(_linears(model.get_submodule(path))) > own + 1:
            return path
    raise InputError(
        f"The model should hold its blocks in a list for the maps `block` and `model`. Found "
        f"`{site}` outside of one."
    )
