"""What torch has one of: its generator and default type, changed in turns; how many threads."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
from torch import Tensor

_LOCK = threading.Lock()
_OURS: ContextVar[bool] = ContextVar("torch's state is ours", default=False)
# Entries of an input up to which a solve takes one thread: 32 tokens of width 384 are below it, 64
# above (`benchmarks/startup.py` times products of both).
_SMALL = 2**14
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


def by_threads(f: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """``f`` of a batch of matrices, in as many parts at a time as the caller has threads.

    For what LAPACK does with one small matrix after the other in a single thread. The number of
    threads changes rounding alone: where a matrix lies in memory, BLAS may sum in another order.
    """
    first, *others = batch.chunk(_OUTSIDE.get() or torch.get_num_threads())
    grad = torch.is_grad_enabled()

    def part(some: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):
            return f(some)

    try:
        waiting = [_batch_threads().submit(part, some) for some in others]
    except RuntimeError:  # the interpreter is about to end, and begins no work in threads
        return f(batch)
    return torch.cat([f(first), *(one.result() for one in waiting)])


@functools.cache
def _batch_threads() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count(), "batch")
    atexit.register(pool.shutdown)
    return pool


if hasattr(os, "register_at_fork"):  # a process that is forked has none of them
    os.register_at_fork(after_in_child=_batch_threads.cache_clear)
