"""Types and shapes checked as tests call: what `jaxtyping.jaxtyped` checks, for less.

Its own decorator binds the arguments of each call and checks them twice, once before and once
after it: that was half the time of the tests. Here beartype wraps the function itself: arguments
before the call, the result after it, all within one scope of axis names; at its first call, and
once for all the functions that a line of code makes. The first calls of a function are all checked,
of those that follow a few: the rest of the checks were a tenth of the time of the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

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
    if not isinstance(fn, FunctionType):
        return original(fn, typechecker=typechecker)
    return _checked(fn, typechecker)


def _checked(fn: Any, typechecker: Callable[[Any], Any]) -> Any:
    calls = 0
    guard: _Guard | None = None  # made at the first call: many a function is never called

    @functools.wraps(fn)
    def within_its_scope(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal guard, calls
        if jaxtyping.config.jaxtyping_disable:  # first: what torch compiles cannot count
            return fn(*args, **kwargs)
        calls += 1
        if calls > ALL and calls % EACH:
            return fn(*args, **kwargs)
        if guard is None:
            guard = _guarded(fn, typechecker)
        if not guard.has_axes:
            return guard.inner(*args, **kwargs)
        with _scope:
            return guard.inner(*args, **kwargs)

    return within_its_scope


class _Guard(NamedTuple):
    """A function, what the type checker made of it, and whether it names axes of arrays."""

    fn: Any
    inner: Any
    has_axes: bool


ALL, EACH = 200, 32  # calls of a function that are all checked, and which of those that follow
_scope = original("context")  # it holds nothing: entering it begins a scope
_nested: dict[CodeType, _Guard] = {}  # the first of every function that is made in another


def _guarded(fn: Any, typechecker: Callable[[Any], Any]) -> _Guard:
    """Made once for a function in a function, however often that is made: it is slow."""
    if inspect.isgeneratorfunction(fn):  # what it yields would be checked outside of its scope
        return _Guard(fn, original(fn, typechecker=typechecker), has_axes=False)
    known = _nested.get(fn.__code__)
    if known is not None:
        given = known.inner.__kwdefaults__.items()
        inner = FunctionType(known.inner.__code__, known.inner.__globals__, fn.__name__)
        inner.__kwdefaults__ = {name: fn if x is known.fn else x for name, x in given}
        return known._replace(inner=inner)
    written = fn.__annotations__
    hints = {name: _read(hint, fn) for name, hint in written.items()}
    fn.__annotations__ = hints
    inner = typechecker(fn)
    fn.__annotations__ = written
    guard = _Guard(fn, inner, any(map(_has_axes, hints.values())))
    if "<locals>" in fn.__qualname__ and inner is not fn:  # it is where nothing is to check
        _nested[fn.__code__] = guard
    return guard


def _has_axes(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_axes, hint if isinstance(hint, list) else typing.get_args(hint)))


def _read(hint: Any, fn: Any) -> Any:
    """The type that an annotation names; anything where it is known to type checkers alone."""

    def one(value: Any) -> None:
        del value

    one.__annotations__ = {"value": hint}
    try:
        return typing.get_type_hints(one, fn.__globals__, include_extras=True)["value"]
    except Exception:  # as jaxtyping does
        return Any
