"""lipscope: how much can the output of attention move when its input moves?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.face import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """A name of the face, which is made, torch with it, when the first one is asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lipscope")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    face = import_module("lipscope.face")
    # A room is there once the face is: nothing but its name was missing.
    names = {one: getattr(face, one) for one in face.__all__} | globals()
    globals().update(names)
    return names[name] if name in names else getattr(face, name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
