"""Plug-ins: variants, theorems, families and experiments of other packages.

A package lists its modules under an entry point group: ``lipscope.variants``,
``lipscope.theorems``, ``lipscope.families`` or ``lipscope.experiments``. They are imported when the
registry of this group is first read, and register their contents on import with the same
decorators as lipscope itself.
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
    """Import all entry points of a group, once.

    Args:
        group: Entry point group, such as ``lipscope.theorems``.

    Returns:
        The imported modules.

    Raises:
        InputError: If one cannot be imported.
    """
    found = []
    for entry in sorted(entry_points(group=group), key=lambda one: one.name):
        try:
            found.append(importlib.import_module(entry.module))
        except InputError:  # already a user error
            raise
        except Exception as problem:
            of = f" of {entry.dist.name}" if entry.dist else ""
            raise InputError(
                f"The plug-in `{entry.name}`{of} ({group}) should import `{entry.module}`. Found "
                f"{type(problem).__name__}: {problem}; fix it, or uninstall its package."
            ) from problem
    return tuple(found)


def check_name(kind: str, name: str, new: Any, taken: Any) -> None:
    """Refuse a name that is already registered by another module.

    Args:
        kind: Kind of entry, such as ``theorem``.
        name: Name of the entry.
        new: The function or class to register.
        taken: The registered entry with this name, or None.
    """
    if taken is not None and taken.__module__ != new.__module__:
        raise InputError(
            f"The name of a {kind} should be unique. Found `{name}` in `{taken.__module__}` and "
            f"in `{new.__module__}`; rename one."
        )
