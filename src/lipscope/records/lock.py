"""The lock of a run folder: one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from lipscope.errors import InputError
from lipscope.records.files import refuse_links

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK, OWNER = ".lock", ".owner"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def take(path: Path) -> Callable[[], None]:
    """Lock a folder for this process; the system gives it free however the process ends.

    The lock is on a file of its own, since some network file systems give a lock back as soon
    as any handle of the locked file is closed. Where the file system has no locks, a file names
    the owner; one that is left by a process of this machine that has ended counts for nothing.

    Args:
        path: The folder.

    Returns:
        What gives the folder free.

    Raises:
        BlockingIOError: If another process holds it.
        InputError: If a process of another machine seems to hold it.
        OSError: If it cannot be written.
    """
    refuse_links(path / LOCK)
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise BlockingIOError from None
    except OSError as problem:
        os.close(handle)
        if problem.errno not in _NO_LOCKS:
            raise
        return _named(path / OWNER)
    return lambda: os.close(handle)


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _named(path: Path) -> Callable[[], None]:
    """Hold a folder by a file that only one process can make."""
    me = f"{socket.gethostname()} {os.getpid()}"
    for _ in range(2):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _refuse_if_alive(path)
            path.unlink(missing_ok=True)
            continue
        os.write(handle, me.encode())
        os.close(handle)
        return lambda: _give_up(path)
    raise BlockingIOError


def _refuse_if_alive(path: Path) -> None:
    host, _, number = path.read_text(encoding="utf-8", errors="replace").rpartition(" ")
    if host and host != socket.gethostname():
        raise InputError(
            f"`--out {path.parent}` is in use by process {number} on {host}; wait until it has "
            f"ended, or delete `{path.name}` there if it was killed."
        )
    with contextlib.suppress(ProcessLookupError, ValueError):
        os.kill(int(number), 0)
        raise BlockingIOError


def _give_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
