"""Process settings before torch is imported: Ctrl-C, spinning threads, garbage collection.

Ctrl-C during the import of torch, which takes seconds, exits without a traceback. Applies only if
Python was started as the command (`lipscope`, or `python -m lipscope.cli`); other programs that
import this module keep their settings.
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
    """Restore KeyboardInterrupt on Ctrl-C, for commands that handle it."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(130)


if _starting() and "OMP_WAIT_POLICY" not in os.environ:
    # Must be set before torch is imported: waiting threads sleep after some microseconds and free
    # the processors of a busy machine. Without spinning, they wake too late for small products
    # (docs/decisions.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # of LLVM's OpenMP, in milliseconds
if _starting():
    # Full garbage collections, which scan all objects of torch and transformers, are rarer.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)
if _starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
