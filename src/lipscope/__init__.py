"""lipscope: how much can the output of attention move when its input moves?"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.face import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """A subpackage, or a public name; the latter are imported, with torch, on first access."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lipscope")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    if find_spec(f"lipscope.{name}") is not None:
        return import_module(f"lipscope.{name}")
    face = import_module("lipscope.face")
    names = {one: getattr(face, one) for one in face.__all__} | globals()
    globals().update(names)
    return names[name] if name in names else getattr(face, name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
