"""Records as lines of JSON with a checksum: appended and flushed, read back if they are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from lipscope.errors import InputError
from lipscope.records.files import opened, sync_folder

Record = TypeVar("Record")
SEAL = "crc"
_SEALED = len(f', "{SEAL}": "01234567"}}')
_FOREIGN = b"\xef\xbb\xbf\r"  # what editors put around a line


def sealed(line: str) -> bytes:
    r"""A line with a checksum of itself as its last entry, and its line end.

    >>> sealed('{"a": 1}')
    b'{"a": 1, "crc": "7aa88204"}\n'
    """
    body = line[:-1].encode("utf-8", "replace")
    return body + f', "{SEAL}": "{zlib.crc32(body):08x}"}}\n'.encode()


def whole(line: bytes) -> bool:
    """Whether a line says what was written.

    >>> line = sealed('{"sigma": 0.0108}').strip()
    >>> whole(line), whole(line.replace(b"0.0108", b"0.0908"))
    (True, False)
    """
    body = line[:-_SEALED]
    return line[-_SEALED:] == f', "{SEAL}": "{zlib.crc32(body):08x}"}}'.encode()


def sorted_out(data: bytes) -> tuple[bytes, list[bytes]]:
    """Complete lines: those that are whole, and those that are not.

    A byte order mark and foreign line ends do no harm.
    """
    lines = data.split(b"\n")[:-1]
    if all(map(whole, lines)):
        return data, []
    lines = [line.strip(_FOREIGN) for line in lines]
    good = [line for line in lines if whole(line)]
    bad = [line for line in lines if line and not whole(line)]
    return b"".join(line + b"\n" for line in good), bad


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines and bring them to the disk.

    Args:
        path: The file; made if need be.
        lines: With their line ends.

    Raises:
        InputError: If it is a link, or no file.
        OSError: If the disk is full; what was half written is taken back.
    """
    if not lines:
        return
    new = not path.exists()
    with opened(path, "ab") as file:
        end = os.fstat(file.fileno()).st_size
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            # Where this fails a torn last line stays, which the next opening cuts off.
            with contextlib.suppress(OSError):
                os.truncate(path, end)
            raise
    if new:
        sync_folder(path.parent)


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last line end: a line that was never finished."""
    if not os.path.lexists(path):
        return
    with opened(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 2**16)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            end = start + at + 1 if at >= 0 else start
            if at >= 0:
                break
        if end < size:
            file.truncate(end)


def objects(data: bytes, *, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""The objects of whole lines by line number, without their checksums; empty for another.

    Args:
        data: JSON lines.
        first: Number of the first line.

    Yields:
        Number and values.

    >>> list(objects(sealed('{"a": 1}')))
    [(1, {'a': 1})]
    """
    for number, line in enumerate(data.split(b"\n")[:-1], first):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # also a number of 5,000 digits
            values = None
        known = values if isinstance(values, dict) else {}
        known.pop(SEAL, None)
        yield number, known


def restored(kind: type[Record], values: Mapping[str, Any], where: str) -> Record:
    """A record from its line.

    Args:
        kind: A dataclass.
        values: Its fields.
        where: The line, for the message.

    Returns:
        The record.

    Raises:
        InputError: If its columns are not those of the record, or of another type.
    """
    known: dict[str, Any] = {}
    wrong = None
    for name, parts in _columns(kind):
        if name not in values:
            wrong = wrong or f"no `{name}`"
            continue
        value = values[name]
        if type(value) is int and float in parts and abs(value) < 2**63:
            value = float(value)  # not every writer tells 1.0 from 1
        known[name] = value
        good = value in parts if parts[0].__class__ is str else type(value) in parts
        if not (good and _can_be_kept(value)):
            wrong = wrong or f"`{name}` = {json.dumps(value)[:40]}"
    if len(values) > len(known):
        wrong = wrong or f"`{next(name for name in values if name not in known)[:40]}`"
    if wrong is not None:
        raise InputError(
            f"{where}, should be as this version of lipscope writes it. Found {wrong}; choose "
            "another `--out`."
        )
    return kind(**known)


def _can_be_kept(value: Any) -> bool:
    """Whether a table takes it: whole numbers have 64 bits, and half a surrogate is no text."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is not str or value.isascii() or not _SURROGATE.intersection(value)


_SURROGATE = frozenset(map(chr, range(0xD800, 0xE000)))


@functools.cache
def _columns(kind: type) -> list[tuple[str, tuple[Any, ...]]]:
    """Name and allowed types (or words) of every column."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        parts = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is Literal:
            parts = tuple(map(str, parts))
        found.append((field.name, parts))
    return found
