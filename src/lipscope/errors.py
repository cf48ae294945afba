"""The one exception for a mistake that its user can mend; and how to tell lack of memory.

Every public door raises it with one line that says what, where and what to do; the
command line prints that line and exits with status 2.
"""

import torch


class InputError(ValueError):
    """A request that cannot be answered as asked; the message says what to change."""


def out_of_memory(problem: BaseException) -> bool:
    """Whether an allocation failed; on a CPU torch says so in words only.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or any(
        text in str(problem) for text in words
    )
