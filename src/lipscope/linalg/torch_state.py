"""What torch has one of for all threads, its generator and default type: changed in turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

_LOCK = threading.Lock()
_OURS: ContextVar[bool] = ContextVar("torch's state is ours", default=False)


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
