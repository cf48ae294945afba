"""One process at a time in a run folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"


def take(path: Path) -> int:
    """Lock a folder for this process; the system gives it free however the process ends.

    The lock is on a file of its own, since some network file systems give a lock back as soon
    as any handle of the locked file is closed.

    Args:
        path: The folder.

    Returns:
        The handle; closing it gives the folder free.

    Raises:
        BlockingIOError: If another process holds it.
        OSError: If it cannot be written.
    """
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise BlockingIOError from None
    except OSError:
        pass  # a file system without locks
    return handle


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
