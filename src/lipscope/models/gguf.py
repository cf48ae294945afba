"""GGUF files, which transformers reads three times over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

_ASKED = ("GGUFReader", "get_tensor_name_map")


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """What transformers asks of one file meanwhile is found out once.

    For configuration, weights and tokenizer it parses the file each time; and the table of names,
    which is the same for the whole model, it makes anew for every module.
    """
    import gguf

    before = {name: getattr(gguf, name) for name in _ASKED}
    try:
        for name, found in before.items():
            setattr(gguf, name, functools.cache(found))
        yield
    finally:
        for name, found in before.items():
            setattr(gguf, name, found)
