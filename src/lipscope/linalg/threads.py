"""How many threads a solve takes: one for small products, in which several wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Entries of an input up to which a solve takes one thread: 64 tokens of width 384 are below it, 128
# above (`benchmarks/startup.py` times products of both).
_SMALL = 2**15


@contextlib.contextmanager
def few_threads(entries: int | None, small: int = _SMALL) -> Iterator[None]:
    """One thread while an input of at most so many entries is worked on; then as before.

    ``entries``: of the input, None where it is not known.

    >>> before = torch.get_num_threads()
    >>> with few_threads(64):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    if before == 1 or entries is None or entries > small:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
