"""What the process of the command sets before torch loads: Ctrl-C, threads that wait, garbage.

Ctrl-C while torch is imported, which takes seconds, ends without a traceback. Only where Python is
starting the command (`lipscope`, or `python -m lipscope.cli`); a program that imports this keeps
its own ways.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path


def _starting() -> bool:
    name = sys.argv[0] if sys.argv else ""
    return name == "-m" or Path(name).stem == "lipscope"


def as_usual() -> None:
    """Make Ctrl-C an exception again, for the command that handles it."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(130)


if _starting() and "OMP_WAIT_POLICY" not in os.environ:
    # Before torch loads, which reads it: threads that wait for each other sleep after some
    # microseconds, and leave a busy machine to its other work. Those that sleep at once wake too
    # late to help in small products (docs/decisions.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # of LLVM's OpenMP, in milliseconds
if _starting():
    # All objects of torch and transformers are looked at for garbage a hundred times less often.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)
if _starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
