"""What torch has one of: its generator and default type, changed in turns; how many threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

_LOCK = threading.Lock()
_OURS: ContextVar[bool] = ContextVar("torch's state is ours", default=False)
# Entries of an input up to which a solve takes one thread: 64 tokens of width 384 are below it, 128
# above (`benchmarks/startup.py` times products of both).
_SMALL = 2**15
# The caller's threads, within `few_threads`; 0 outside.
_OUTSIDE: ContextVar[int] = ContextVar("threads outside", default=0)


@contextlib.contextmanager
def torch_state() -> Iterator[None]:
    """While it lasts no other thread of ours draws, or sets types, in the midst of this one.

    A thread that works for one that is within it runs in a copy of its context.
    """
    if _OURS.get():
        yield
        return
    with _LOCK:
        token = _OURS.set(True)
        try:
            yield
        finally:
            _OURS.reset(token)


@contextlib.contextmanager
def draws_from(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """What is drawn of torch's own generators is that of a seed; afterwards they are as before.

    ``devices``: indices of the CUDA devices that draw too.

    >>> with draws_from(0):
    ...     one = torch.rand(3)
    >>> with draws_from(0):
    ...     torch.rand(3).equal(one)
    True
    """
    # Not `torch.manual_seed`: it writes down the stack for every kind of device that is asleep,
    # which took longer than a small model.
    with torch_state(), torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


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
    outside = _OUTSIDE.get() or before
    wanted = before if entries is None else 1 if entries <= small else outside
    with _threads(wanted, outside):
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread, whatever an input's size: other threads of ours have the processors.

    >>> with one_thread(), few_threads(2**30):
    ...     torch.get_num_threads()
    1
    """
    with _threads(1, 1):
        yield


@contextlib.contextmanager
def _threads(wanted: int, outside: int) -> Iterator[None]:
    before, previous = torch.get_num_threads(), _OUTSIDE.get()
    _OUTSIDE.set(outside)
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _OUTSIDE.set(previous)
