"""Preparation of a model for measurement: mode, dtype, kernels and implementations.

Nothing is patched: context managers change the settings and restore them on exit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lipscope.errors import InputError
from lipscope.linalg import torch_state
from lipscope.models.pretrained import quiet
from lipscope.sources import CPU_ALONE

# Attributes of a Hugging Face configuration; saved and restored one by one, because the public
# setters also overwrite the sub-configurations.
_CHOICES = ("_attn_implementation_internal", "_experts_implementation_internal")
_SETTERS = ("set_attn_implementation", "set_experts_implementation")
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # of attention functions by name


class _KeepFloat64(TorchFunctionMode):
    """Replace every request for float32 by float64.

    Many models compute softmax, norms or rotary angles in float32 for all weight types, so that a
    float64 run would have only float32 accuracy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(_in_float64, args))
        kwargs = {k: _in_float64(v) for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **kwargs)


def _in_float64(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value


@contextlib.contextmanager
def exact_maths(dtype: torch.dtype, *, differentiable: bool = True) -> Iterator[None]:
    """Disable fast paths that skip modules, and compute in float64 if requested.

    ``differentiable``: allow only attention kernels with all derivatives; they store all scores.
    """
    mha = torch.backends.mha
    with torch_state(), contextlib.ExitStack() as stack:
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        mha.set_fastpath_enabled(False)
        if differentiable:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if dtype == torch.float64:
            torch.set_default_dtype(dtype)  # for tensors created by the model (masks, tables)
            stack.enter_context(_KeepFloat64())
        yield


@contextlib.contextmanager
def swapped(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Temporarily replace entries of dictionaries, such as a module's children or weights."""
    entries = list(entries)
    before = [(held, name, held[name]) for held, name, _ in entries]
    try:
        for held, name, other in entries:
            held[name] = other
        yield
    finally:
        for held, name, own in before:
            held[name] = own


def undisturbed(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run a module on copies of its buffers, so that its caches are unchanged."""
    own = ((m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items())
    return swapped((held, name, None if b is None else b.clone()) for held, name, b in own)


class ExactNorm(nn.Module):
    """A norm with an optional scale, computed in the precision of its input."""

    scale: Tensor | None

    def __init__(self, module: nn.Module, scale: Tensor | None = None) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of every token."""
        with exact_maths(x.dtype):
            y = self.module(x)
        return y if self.scale is None else y * self.scale


def converted(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model itself if it has this dtype and device, else a converted copy."""
    _check_hooks(model)
    if all(t.dtype == dtype and t.device.type == device.type for t in floating(model)):
        return model

    return copied(model)._apply(lambda t: cast_to(t, device, dtype))


def cast_to(x: Tensor, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Move a tensor to a device; cast real floats to a dtype and complex ones to its precision."""
    if x.is_complex():
        return x.to(device, dtype.to_complex())
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    own: nn.Module | None = None,
) -> Iterator[tuple[nn.Module, list[str]]]:
    """Prepare a model for measurement; yields the model and notes about the changes.

    The model is in eval mode, with one dtype and one attention implementation. These are set before
    any capture because masks are built for one implementation and are wrong or missing for another.
    A model with another dtype or device is copied (``own`` is an earlier result of `converted`);
    otherwise its settings are changed temporarily and restored.
    """
    notes: list[str] = []
    if narrow := sorted({str(t.dtype)[6:] for t in floating(model) if t.dtype.itemsize < 4}):
        # In half precision, sums and scores of real layers overflow; not in this dtype.
        kinds = " and ".join(narrow)
        notes.append(f"the weights are {kinds}: every layer was computed in {str(dtype)[6:]}")
    model = converted(model, dtype, device) if own is None else own
    if any(m.training and _drops(m) for m in model.modules()):
        notes.append("dropout was live and has been switched off for the measurement")
    with eval_mode(model), _implementations(model, implementation):
        make_weights(model)
        yield model, notes


def make_weights(model: nn.Module) -> None:
    """Compute from its parameters what hooks of torch compute before a pass (weight norm)."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                hook(module, ())


def floating(model: nn.Module) -> list[Tensor]:
    """A model's floating-point weights and buffers; shared ones once per module."""
    held = ((*m._parameters.values(), *m._buffers.values()) for m in model.modules())
    return [t for some in held for t in some if t is not None and t.is_floating_point()]


def _check_hooks(model: nn.Module) -> None:
    scripted = (n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    found = next(scripted, None)
    if found is not None:
        raise InputError(
            f"The model should take hooks. Found {f'`{found}`' if found else 'one'} compiled by "
            "`torch.jit`, which takes none; pass the original model."
        )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Temporarily set eval mode without compilation and without gradients of the weights."""
    trained = [m for m in model.modules() if m.training]
    held = (p for m in model.modules() for p in m._parameters.values())
    grads = [p for p in held if p is not None and p.requires_grad and not p.is_inference()]
    try:
        if trained:
            model.eval()
        for p in grads:
            p.requires_grad_(False)
        with _uncompiled(model):
            yield
    finally:
        for module in trained:
            module.training = True
        for p in grads:
            p.requires_grad_(True)


@functools.cache
def device_of(name: str) -> torch.device:
    """The device with this name; ``auto`` selects a GPU if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).tolist()  # fails on `meta`, which has no values
    except (RuntimeError, AssertionError, ValueError) as problem:
        raise InputError(
            f"`device` should be one of this machine. Found `{name}`{_lacking(name, problem)}"
        ) from None
    return device


def _lacking(name: str, problem: Exception) -> str:
    if name.partition(":")[0] != "cuda" or torch.cuda.is_available():
        return f": {str(problem).split(chr(10))[0][:100]}"
    if torch.version.cuda is None and torch.version.hip is None:
        return CPU_ALONE.format(torch.__version__)
    return ", and no GPU that PyTorch can use. Install its driver, or leave `device` out."


def copied(model: nn.Module, instead: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy; tensors computed from weights (weight norm, a cache) are copied as constants.

    ``instead``: replacements for objects, by id.
    """
    memo: dict[int, Any] = dict(instead or {}) | {
        id(value): value.detach().clone()
        for module in model.modules()
        for held in vars(module).values()
        for value in (held.values() if isinstance(held, dict) else [held])
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:  # modules may raise anything; the user gets one line
        raise InputError(
            f"`{type(model).__name__}` should be in the dtype and on the device of the "
            "measurement, or allow `copy.deepcopy`. Found that copying raised "
            f"{type(problem).__name__}: {str(problem)[:200]}"
        ) from problem


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Temporarily undo compilation of all modules: hooks do not run in compiled ones."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                found.append((module._modules, name, child._orig_mod))
        if module._compiled_call_impl:
            found.append((vars(module), "_compiled_call_impl", None))
    return swapped(found)


def _drops(module: nn.Module) -> bool:
    rates = (getattr(module, name, 0.0) for name in ("p", "dropout", "attention_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextlib.contextmanager
def _implementations(model: nn.Module, attention: str) -> Iterator[None]:
    """Set one attention implementation everywhere, and plain loops over experts (for float64)."""
    before, wanted = choices(model), (attention, "eager")
    _check_own_functions({attention, *(one.value for one in before if one.key == _CHOICES[0])})
    try:
        for key, setter, choice in zip(_CHOICES, _SETTERS, wanted, strict=True):
            for part in _outermost(model, setter):
                # Only if needed: setters are slow, as they inspect all submodules and imports.
                if {one.value for one in choices(part) if one.key == key} != {choice}:
                    _switch(part, setter, choice)
        yield
    finally:
        _choose(before)


def _check_own_functions(names: Iterable[Any]) -> None:
    """Refuse attention functions that were registered by a user: they may compute anything."""
    known: Any = getattr(sys.modules.get("transformers.modeling_utils"), _REGISTRY, {})
    for name in names:
        function = known.get(name)
        function = getattr(function, "func", function)  # of a `functools.partial`
        if function is not None and not f"{function.__module__}.".startswith("transformers."):
            raise InputError(
                "The model should compute attention by a function of `transformers`. Found one of "
                f"`{function.__module__}`, registered as `{name}`; choose `sdpa` or `eager`."
            )


class Choice(NamedTuple):
    """An implementation in a configuration, with its key."""

    config: Any
    key: str
    value: Any


def choices(model: nn.Module) -> list[Choice]:
    """The current implementations of attention and experts in all parts of a model."""
    return [
        Choice(config, key, getattr(config, key))
        for config in _configs(model)
        for key in _CHOICES
        if hasattr(config, key)
    ]


def _choose(some: Iterable[Choice]) -> None:
    for one in some:
        setattr(one.config, one.key, one.value)


@contextlib.contextmanager
def as_chosen(own: Iterable[Choice]) -> Iterator[None]:
    """Temporarily restore the original attention (eager or sdpa), with possibly other results."""
    own = [one for one in own if one.value in ("eager", "sdpa")]
    before = [one._replace(value=getattr(one.config, one.key)) for one in own]
    try:
        _choose(own)
        yield
    finally:
        _choose(before)


def implementation_for(model: nn.Module, *, closed: bool) -> str:
    """The attention implementation for a capture, ``sdpa`` or ``eager``.

    Fused attention saves memory in the forward pass if all layers have a closed form; the generic
    path needs the implementation with all derivatives.
    """
    outer = _outermost(model, "set_attn_implementation")
    # transformers also checks submodules that claim to support the change without having attention
    # (convolutional audio tokenizers).
    lacking = any(
        part in outer or getattr(part, "_can_set_attn_implementation", lambda: False)()
        for part in model.modules()
        if hasattr(type(part), "_supports_sdpa") and not part._supports_sdpa
    )
    # Fused attention ignores a soft cap, and transformers (5.18) does not always refuse this.
    capped = any(getattr(part, "attn_logit_softcapping", None) for part in model.modules())
    return "sdpa" if closed and not (lacking or capped) else "eager"


def _switch(part: nn.Module, setter: str, choice: str) -> None:
    try:
        with quiet():  # it warns about parts without this setting
            getattr(part, setter)(choice)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise InputError(
            f"`{type(part).__name__}` should offer the implementation `{choice}`, whose "
            f"derivatives all exist. Found that `{setter}` raised: {str(problem)[:200]}"
        ) from problem


def _outermost(model: nn.Module, setter: str) -> list[nn.Module]:
    """The outermost modules with a setter, which also applies to their submodules."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and callable(getattr(type(module), setter, None)):
            found.append(module)
            inside.update(module.modules())
    return found


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of all modules, including sub-configurations, without duplicates."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = config
        waiting.extend(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
    return list(found.values())
