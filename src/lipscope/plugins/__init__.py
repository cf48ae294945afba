"""Plug-ins: variants, theorems, families and experiments of other packages.

A package names its modules under an entry point group, ``lipscope.variants``,
``lipscope.theorems``, ``lipscope.families`` or ``lipscope.experiments``. They are imported when the
register of that group is first read; their decorators, the same as in lipscope, enter their
contents.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from lipscope.errors import InputError


@functools.cache
def load_plugins(group: str) -> tuple[ModuleType, ...]:
    """Import every entry point of a group, once.

    Args:
        group: A group, such as ``lipscope.theorems``.

    Returns:
        The modules.

    Raises:
        InputError: If one cannot be imported.
    """
    found = []
    for entry in sorted(entry_points(group=group), key=lambda one: one.name):
        try:
            found.append(importlib.import_module(entry.module))
        except InputError:  # which says what to do
            raise
        except Exception as problem:
            of = f" of {entry.dist.name}" if entry.dist else ""
            raise InputError(
                f"The plug-in `{entry.name}`{of} ({group}) should import `{entry.module}`. Found "
                f"{type(problem).__name__}: {problem}; mend it, or uninstall its package."
            ) from problem
    return tuple(found)


def check_name(kind: str, name: str, new: Any, taken: Any) -> None:
    """Refuse a name that an entry of another module already has.

    Args:
        kind: The kind of entry, such as ``theorem``.
        name: Its name.
        new: The new function or class.
        taken: The present entry of this name, or None.
    """
    if taken is not None and taken.__module__ != new.__module__:
        raise InputError(
            f"The name of a {kind} should be its own. Found `{name}` in `{taken.__module__}` and "
            f"in `{new.__module__}`; rename one."
        )
