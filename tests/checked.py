"""Types and shapes checked at every call: what `jaxtyping.jaxtyped` checks, for less.

Its own decorator binds the arguments of each call and checks them twice, once before and once
after it: that was half the time of the tests. Here beartype wraps the function itself: arguments
before the call, the result after it, all within one scope of axis names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping

original = jaxtyping.jaxtyped


def install() -> None:
    """For what is imported from now on: jaxtyping's import hook looks the decorator up by name."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """A checked function, or a class whose dataclass constructor is one."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(fn, type):
        if dataclasses.is_dataclass(fn) and not hasattr(fn.__init__, "__wrapped__"):
            fn.__init__ = jaxtyped(fn.__init__, typechecker=typechecker)
        return fn
    if not isinstance(fn, FunctionType) or inspect.isgeneratorfunction(fn):
        # What a generator yields would be checked outside of its scope.
        return original(fn, typechecker=typechecker)
    return _checked(fn, typechecker)


def _checked(fn: Any, typechecker: Callable[[Any], Any]) -> Any:
    written = fn.__annotations__
    fn.__annotations__ = {name: _read(hint, fn) for name, hint in written.items()}
    inner = typechecker(fn)
    fn.__annotations__ = written

    @functools.wraps(fn)
    def within_its_scope(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        with original("context"):
            return inner(*args, **kwargs)

    return within_its_scope


def _read(hint: Any, fn: Any) -> Any:
    """The type that an annotation names; anything where it is known to type checkers alone."""

    def one(value: Any) -> None:
        del value

    one.__annotations__ = {"value": hint}
    try:
        return typing.get_type_hints(one, fn.__globals__, include_extras=True)["value"]
    except Exception:  # as jaxtyping does
        return Any
