"""The one exception for a mistake that its user can mend, remarks, and how to tell lack of memory.

Every public door raises it with one line that says what, where and what to do; the
command line prints that line and exits with status 2.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch


class InputError(ValueError):
    """A request that cannot be answered as asked; the message says what to change."""


def remark(text: str) -> None:
    """Say one line on standard error, or wherever the caller's logging sends it."""
    logging.getLogger("lipscope").warning("%s", text)


def out_of_memory(problem: BaseException) -> bool:
    """Whether an allocation failed; on a CPU torch says so in words only.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or any(
        text in str(problem) for text in words
    )


@contextlib.contextmanager
def memory_for(work: str) -> Iterator[None]:
    """Lack of memory that no smaller block mends, told in one line.

    Args:
        work: What needed it, as the subject of the sentence.

    Raises:
        InputError: Instead of the error of the allocation.

    >>> with memory_for("The model's own forward pass"):
    ...     raise MemoryError
    Traceback (most recent call last):
    lipscope.errors.InputError: The model's own forward pass ran out of memory. Use shorter \
inputs, a smaller model or float32; rows measured before are kept.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem):
            raise
        raise InputError(
            f"{work} ran out of memory. Use shorter inputs, a smaller model or float32; rows "
            "measured before are kept."
        ) from problem
