"""How many threads a solve takes: one for small products, in which several wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

# Entries of an input up to which a solve takes one thread: 64 tokens of width 384 are below it, 128
# above (`benchmarks/startup.py` times products of both).
_SMALL = 2**15
# The caller's threads, within `few_threads`; 0 outside.
_OUTSIDE: ContextVar[int] = ContextVar("threads outside", default=0)


@contextlib.contextmanager
def few_threads(entries: int | None, small: int = _SMALL) -> Iterator[None]:
    """One thread while an input of at most so many entries is worked on; then as before.

    Within it, the caller's threads for an input that is larger, such as a batch. ``entries``: of
    the input, None where it is not known.

    >>> before = torch.get_num_threads()
    >>> with few_threads(64):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    previous = _OUTSIDE.get()
    outside = previous or before
    wanted = before if entries is None else 1 if entries <= small else outside
    _OUTSIDE.set(outside)
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _OUTSIDE.set(previous)
