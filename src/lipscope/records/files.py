"""Files of a run folder: written in one move, never through a link, safe from a power cut."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from lipscope.errors import InputError

PART = ".part"


def opened(path: Path, mode: str = "rb") -> IO[Any]:
    """A file of a run folder, which is neither a link nor a pipe or device that would hang.

    Args:
        path: The file.
        mode: ``rb``, ``rb+`` or ``ab`` (made if need be).

    Raises:
        InputError: If it is a link, or no file.
        OSError: If it cannot be opened.
    """
    flags = {"rb": os.O_RDONLY, "rb+": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
    refuse_links(path)
    handle = os.open(
        path, flags[mode] | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666
    )
    # No buffer: closing would try once more to write what did not fit.
    return os.fdopen(handle, mode, buffering=-1 if mode == "rb" else 0)


def sha256_of(path: Path) -> str | None:
    """Digest of a file of a run folder; None if there is none that can be read."""
    try:
        with opened(path) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (InputError, OSError):
        return None


def refuse_links(path: Path) -> None:
    """Refuse a path that stands for another place, or for no file."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(kind):
        names = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}
        raise InputError(
            f"`{path}` should be a regular file. Found "
            f"{names.get(stat.S_IFMT(kind), 'a pipe or device')}; choose another `--out`."
        )


def replaced(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in one move: at any moment the old or the new one is there, whole.

    The new one is made beside it under a name that nobody has, reaches the disk, and takes its
    place; a link of this name is replaced, not followed.

    Args:
        path: The file.
        content: What it shall hold, in one piece or several.

    Raises:
        OSError: If the disk is full; the old file stays.
    """
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}{PART}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in (content,) if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(handle)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk, where the system has a way to."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
