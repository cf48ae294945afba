"""Records as lines of JSON: appended and flushed, read back without their torn lines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from lipscope.errors import InputError

Record = TypeVar("Record")


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines and flush them to the disk.

    Args:
        path: The file; made if need be.
        lines: Without their line ends.

    Raises:
        OSError: If the disk takes no more; what was half written is taken back.
    """
    if not lines:
        return
    # No buffer: closing would try once more to write what did not fit, behind the cut.
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        left = memoryview("".join(line + "\n" for line in lines).encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            _cut(path, end)
            raise


def _cut(path: Path, end: int) -> None:
    # Where it fails a torn last line stays, which `cut_torn_line` removes at the next opening.
    with contextlib.suppress(OSError):
        os.truncate(path, end)


def cut_torn_line(path: Path) -> None:
    """Remove what stands behind the last line end: a line that was never finished."""
    if not path.exists():
        return
    with path.open("rb+") as file:
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
    r"""The objects of complete lines by line number; torn lines count, and give nothing.

    Args:
        data: JSON lines.
        first: Number of the first line.

    Yields:
        Number and values.

    >>> list(objects(b'{"a": 1}\n{"a": 2'))
    [(1, {'a': 1})]
    """
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n"), first):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield number, values


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
        if type(value) is int and float in parts:  # not every writer tells 1.0 from 1
            value = float(value)
        known[name] = value
        if not (value in parts if parts[0].__class__ is str else type(value) in parts):
            wrong = wrong or f"`{name}` = {json.dumps(value)[:40]}"
    if len(values) > len(known):
        wrong = wrong or f"`{next(name for name in values if name not in known)[:40]}`"
    if wrong is not None:
        raise InputError(
            f"{where}, should be as this version of lipscope writes it. Found {wrong}; choose "
            "another `--out`."
        )
    return kind(**known)


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
