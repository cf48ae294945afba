"""A call's arguments by name, and a call of arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from lipscope.errors import InputError

Kind = inspect._ParameterKind
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


def by_name(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name; those that ``*args`` takes are called ``args[0]`` and so on."""
    signature = inspect.signature(module.forward)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as problem:
        raise InputError(
            f"`{type(module).__name__}` should be called as its `forward` is written. Found that "
            f"the model calls it otherwise: {problem}."
        ) from problem
    for name, parameter in signature.parameters.items():
        if parameter.kind is Kind.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
        elif parameter.kind is Kind.VAR_POSITIONAL:
            several = enumerate(arguments.pop(name, ()))
            arguments.update({f"{name}[{place}]": value for place, value in several})
    return arguments


def bound_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, without any key/value cache: a replay would grow it."""
    named = by_name(module, args, kwargs)
    return {k: None if k in _CACHES else v for k, v in named.items()}


def as_called(
    module: nn.Module, arguments: Mapping[str, Any], first: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call, of which the ``first`` ones have no name there.

    Neither have those before variable positional ones.
    """
    kinds = {n: p.kind for n, p in inspect.signature(module.forward).parameters.items()}
    named, args = dict(arguments), list[Any]()
    several = any(k.endswith("]") for k in named)
    for place, (name, kind) in enumerate(kinds.items()):
        unnamed = kind is Kind.POSITIONAL_OR_KEYWORD and (several or place < first)
        if kind is Kind.VAR_POSITIONAL:
            args.extend(named.pop(k) for k in [*named] if k.startswith(f"{name}["))
        elif name not in named:
            continue
        elif kind is Kind.POSITIONAL_ONLY or unnamed:
            args.append(named.pop(name))
    return tuple(args), named
