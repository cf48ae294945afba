"""Process-wide torch state: random generator, default dtype, number of threads."""

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
_LOCKED: ContextVar[bool] = ContextVar("torch state is locked", default=False)
# Inputs with at most this many entries are solved in one thread: 32 tokens of width 384 are below,
# 64 above (`benchmarks/startup.py` times products of both).
_SMALL = 2**14
# The caller's number of threads, within `few_threads`; 0 outside.
_CALLER_THREADS: ContextVar[int] = ContextVar("caller threads", default=0)


@contextlib.contextmanager
def torch_state() -> Iterator[None]:
    """Lock torch's random state and default dtype against our other threads.

    Worker threads started inside the lock run in a copy of its context.
    """
    if _LOCKED.get():
        yield
        return
    with _LOCK:
        token = _LOCKED.set(True)
        try:
            yield
        finally:
            _LOCKED.reset(token)


@contextlib.contextmanager
def draws_from(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Seed torch's generators temporarily; their state is restored afterwards.

    ``devices``: indices of CUDA devices to be seeded too.

    >>> with draws_from(0):
    ...     one = torch.rand(3)
    >>> with draws_from(0):
    ...     torch.rand(3).equal(one)
    True
    """
    # Not `torch.manual_seed`: it records the stack for every uninitialised kind of device, which
    # took longer than a small model.
    with torch_state(), torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


@contextlib.contextmanager
def few_threads(entries: int | None, small: int = _SMALL) -> Iterator[None]:
    """Use a single thread for inputs of at most ``small`` entries, temporarily.

    Larger inputs, such as a batch, use the caller's number of threads. ``entries``: number of
    entries of the input, or None if unknown.

    >>> before = torch.get_num_threads()
    >>> with few_threads(64):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    outside = _CALLER_THREADS.get() or before
    wanted = before if entries is None else 1 if entries <= small else outside
    with _threads(wanted, outside):
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use a single thread for any input size: our other threads occupy the processors.

    >>> with one_thread(), few_threads(2**30):
    ...     torch.get_num_threads()
    1
    """
    with _threads(1, 1):
        yield


@contextlib.contextmanager
def _threads(wanted: int, outside: int) -> Iterator[None]:
    before, previous = torch.get_num_threads(), _CALLER_THREADS.get()
    _CALLER_THREADS.set(outside)
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _CALLER_THREADS.set(previous)


def by_threads(f: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply ``f`` to a batch of matrices in parallel, with the caller's number of threads.

    LAPACK processes small matrices sequentially in one thread. The number of threads affects
    rounding only: BLAS may sum in another order depending on memory alignment.
    """
    first, *others = batch.chunk(_CALLER_THREADS.get() or torch.get_num_threads())
    grad = torch.is_grad_enabled()

    def apply(part: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):
            return f(part)

    try:
        waiting = [_batch_threads().submit(apply, part) for part in others]
    except RuntimeError:  # the interpreter is shutting down and starts no threads
        return f(batch)
    return torch.cat([f(first), *(one.result() for one in waiting)])


@functools.cache
def _batch_threads() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count(), "batch")
    atexit.register(pool.shutdown)
    return pool


if hasattr(os, "register_at_fork"):  # forked processes have no threads of the pool
    os.register_at_fork(after_in_child=_batch_threads.cache_clear)
