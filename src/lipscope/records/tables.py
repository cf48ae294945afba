"""The tables of a run: append-only JSON lines with checksums, each with a Parquet copy.

Files are replaced atomically or appended to, never through a link, and survive a power cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import secrets
import stat
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

from lipscope.errors import InputError, remark
from lipscope.records import rows

if TYPE_CHECKING:
    import polars

Record = TypeVar("Record")
PART = ".part"
SEAL = "crc"
BESIDE = ("tokens", "bounds", "directions")
"""Side tables; each line of ``rows.jsonl`` also has the number of its records in each of them."""
_SEALED = len(f', "{SEAL}": "01234567"}}')
_FOREIGN = b"\xef\xbb\xbf\r"  # byte order mark and carriage return, added by editors
_CHUNK = 2**24


def opened(path: Path, mode: str = "rb") -> IO[Any]:
    """Open a file of a run folder; links, pipes and devices are refused."""
    flags = {"rb": os.O_RDONLY, "rb+": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
    refuse_links(path)
    handle = os.open(
        path, flags[mode] | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666
    )
    # Unbuffered: on a full disk, closing a buffered file would retry the write.
    return os.fdopen(handle, mode, buffering=-1 if mode == "rb" else 0)


def sha256_of(path: Path) -> str | None:
    """Digest of a file of a run folder; None if missing or unreadable."""
    try:
        with opened(path) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (InputError, OSError):
        return None


def refuse_links(path: Path) -> None:
    """Refuse links and anything else that is not a regular file."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(kind):
        names = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}
        raise InputError(
            f"`{path}` should be a regular file. Found "
            f"{names.get(stat.S_IFMT(kind), 'a pipe or device')}; choose another `out`."
        )


def replaced(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file atomically: at any time, either the old or the new content is complete.

    The content is written to a temporary file with a unique name, synced to disk and renamed; a
    link with this name is replaced, not followed.
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
    """Sync the directory entries of a folder to disk, if the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- lines ------------------------------------------------------------------------------------


def with_checksum(line: str) -> bytes:
    r"""Add a checksum as the last entry, and a line end.

    >>> with_checksum('{"a": 1}')
    b'{"a": 1, "crc": "7aa88204"}\n'
    """
    body = line[:-1].encode("utf-8", "replace")
    return body + f', "{SEAL}": "{zlib.crc32(body):08x}"}}\n'.encode()


def is_intact(line: bytes) -> bool:
    """Whether the checksum of a line is valid.

    >>> line = with_checksum('{"sigma": 0.0108}').strip()
    >>> is_intact(line), is_intact(line.replace(b"0.0108", b"0.0908"))
    (True, False)
    """
    body = line[:-_SEALED]
    return line[-_SEALED:] == f', "{SEAL}": "{zlib.crc32(body):08x}"}}'.encode()


def sorted_out(data: bytes) -> tuple[bytes, list[bytes]]:
    """Split complete lines into intact and damaged ones.

    A byte order mark and carriage returns are ignored.
    """
    lines = data.split(b"\n")[:-1]
    if all(map(is_intact, lines)):
        return data, []
    lines = [line.strip(_FOREIGN) for line in lines]
    good = [line for line in lines if is_intact(line)]
    bad = [line for line in lines if line and not is_intact(line)]
    return b"".join(line + b"\n" for line in good), bad


def objects(data: bytes, *, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""The JSON objects of lines with line numbers, without checksums; empty for anything else.

    >>> list(objects(with_checksum('{"a": 1}')))
    [(1, {'a': 1})]
    """
    for number, line in enumerate(data.split(b"\n")[:-1], first):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # also for an integer of 5,000 digits
            values = None
        known = values if isinstance(values, dict) else {}
        known.pop(SEAL, None)
        yield number, known


def restored(kind: type[Record], values: Mapping[str, Any], where: str) -> Record:
    """A record from the values of its line, after type checks."""
    known: dict[str, Any] = {}
    wrong = None
    for name, parts in _column_types(kind):
        if name not in values:
            wrong = wrong or f"no `{name}`"
            continue
        value = values[name]
        if type(value) is int and float in parts and abs(value) < 2**63:
            value = float(value)  # some writers write 1.0 as 1
        known[name] = value
        good = value in parts if parts[0].__class__ is str else type(value) in parts
        if not (good and _can_be_kept(value)):
            wrong = wrong or f"`{name}` = {json.dumps(value)[:40]}"
    if len(values) > len(known):
        wrong = wrong or f"`{next(name for name in values if name not in known)[:40]}`"
    if wrong is not None:
        raise InputError(
            f"{where}, should be as this version of lipscope writes it. Found {wrong}; choose "
            "another `out`."
        )
    return kind(**known)


def _can_be_kept(value: Any) -> bool:
    """Whether a table can store it: integers up to 64 bits, text without lone surrogates."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is not str or value.isascii() or not _SURROGATE.intersection(value)


_SURROGATE = frozenset(map(chr, range(0xD800, 0xE000)))


@functools.cache
def _column_types(kind: type) -> list[tuple[str, tuple[Any, ...]]]:
    """Name and allowed types (or literals) of every column."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        parts = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is Literal:
            parts = tuple(map(str, parts))
        found.append((field.name, parts))
    return found


# --- a table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Digests of the lines ("" for none) and of their Parquet copy."""

    sha256: str
    copy: str


@dataclass(frozen=True)
class Stored:
    """One table of a run folder with its two files."""

    folder: Path  # the run folder
    name: str  # ``rows``, one of `BESIDE` or ``values``
    kind: type  # type of a record
    key: tuple[str, ...]  # key columns; a later record replaces an earlier one with the same key

    @property
    def lines(self) -> Path:
        """The file to which records are appended."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def parquet(self) -> Path:
        """The Parquet copy."""
        return self.folder / f"{self.name}.parquet"

    @property
    def damaged(self) -> Path:
        """The file for damaged lines."""
        return self.folder / f"{self.name}.damaged"

    @property
    def digest(self) -> str:
        """Digest of the complete lines; "" if there are none."""
        digest, some = hashlib.sha256(), False
        for part in _chunks_of_lines(self.lines):
            digest.update(part)
            some = True
        return digest.hexdigest() if some else ""

    # --- for the owner of the lock

    def append(self, lines: Sequence[str]) -> None:
        """Append records with their checksums, and sync them to disk."""
        _append(self.lines, [with_checksum(line) for line in lines])

    def cut_torn_line(self) -> None:
        """Truncate after the last line end: the rest is an incomplete line."""
        if not os.path.lexists(self.lines):
            return
        with opened(self.lines, "rb+") as file:
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

    def repair(self) -> int:
        """Set aside damaged lines; returns their number."""
        if all(sorted_out(data)[0] == data for data in _chunks_of_lines(self.lines)):
            return 0
        return self.set_aside(lambda _: False)

    def set_aside(self, unwanted: Callable[[bytes], bool], into: Path | None = None) -> int:
        """Move damaged or unwanted lines to a separate file; returns their number."""
        count = 0

        def kept() -> Iterator[bytes]:
            nonlocal count
            for data in _chunks_of_lines(self.lines):
                good, bad = sorted_out(data)
                stay, out = [], [line + b"\n" for line in bad]
                for line in good.splitlines(keepends=True):
                    (out if unwanted(line) else stay).append(line)
                _append(into or self.damaged, out)
                count += len(out)
                yield b"".join(stay)

        replaced(self.lines, kept())
        return count

    def restore(
        self, mark: Mark | None, more: Callable[[Any], dict[str, Any]] = lambda _: {}
    ) -> int:
        """Restore lines of records that exist only in the copy, with the entries of ``more``."""
        copy = self.copied(mark)
        if copy is None:
            return 0
        lost = copy.join(self.read(None), on=self.key, how="anti", nulls_equal=True).to_dicts()
        self.append([rows.to_line(one | more(one)) for one in lost])
        return len(lost)

    def compacted(self, held: Mark | None, frame: Callable[[], polars.DataFrame]) -> Mark:
        """Write the copy unless it is up to date; returns its mark."""
        digest = self.digest
        same = held is not None and held.sha256 == digest
        if held is not None and same and not (digest and self.copied(held) is None):
            return held
        if not digest and self.name not in ("rows", "tokens"):
            return Mark("", "")  # empty tables have no file
        content = io.BytesIO()
        frame().write_parquet(content)
        replaced(self.parquet, content.getvalue())  # not by polars, which raises its own errors
        return Mark(digest, hashlib.sha256(content.getvalue()).hexdigest())

    # --- for all readers

    def read(self, mark: Mark | None, *, own: bool = False) -> polars.DataFrame:
        """All records without duplicates, from the copy if it is up to date, else from the lines.

        If the copy is out of date, the lines take precedence and the copy adds missing records.

        Args:
            mark: Expected digests of the lines and the copy.
            own: Whether all lines were written or checked by this process.

        Raises:
            InputError: If a line cannot be read as a record.
        """
        import polars as pl

        copy = self.copied(mark)
        if copy is not None and mark is not None and mark.sha256 == self.digest:
            return copy
        parts = [] if copy is None else [copy]
        parts += self._from_lines(own=own)
        if not parts:
            return rows.typed_frame(self.kind, [])
        return pl.concat(parts).unique(self.key, keep="last", maintain_order=True)

    def copied(self, mark: Mark | None) -> polars.DataFrame | None:
        """The copy, if its digest matches the mark."""
        import polars as pl

        if mark is None or not mark.sha256 or not os.path.lexists(self.parquet):
            return None
        try:
            with opened(self.parquet) as file:
                # Not memory-mapped: the file may be replaced during reading.
                content = file.read()
            if hashlib.sha256(content).hexdigest() != mark.copy:
                return None
            frame = pl.read_parquet(io.BytesIO(content))
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        return frame if dict(frame.schema) == rows.schema_of(self.kind) else None

    def entries(self) -> Iterator[dict[str, Any]]:
        """The entries of all lines, including those replaced by later lines."""
        for data in _chunks_of_lines(self.lines):
            yield from (values for _, values in objects(data))

    def _from_lines(self, *, own: bool) -> Iterator[polars.DataFrame]:
        """The lines as data frames, in chunks of some megabytes."""
        number, damaged = 1, 0
        for data in _chunks_of_lines(self.lines):
            good, bad = (data, []) if own else sorted_out(data)
            frame = self._trusted(good) if own else None
            yield self._checked(good, number) if frame is None else frame
            number, damaged = number + data.count(b"\n"), damaged + len(bad)
        if damaged:
            remark(
                f"`{self.lines}` has {damaged} damaged line{'s' * (damaged > 1)}, left out here; "
                "the next run sets them aside and measures again what is missing."
            )

    def _trusted(self, data: bytes) -> polars.DataFrame | None:
        import polars as pl

        try:
            return pl.read_ndjson(io.BytesIO(data), schema=rows.schema_of(self.kind))
        except pl.exceptions.PolarsError:
            return None

    def _checked(self, data: bytes, first: int) -> polars.DataFrame:
        def records() -> Iterator[Any]:
            for number, values in objects(data, first=first):
                if self.name == "rows":
                    for name in BESIDE:
                        values.pop(name, None)
                yield restored(self.kind, values, f"`{self.lines}`, line {number}")

        return rows.typed_frame(self.kind, records())


def tables(folder: Path) -> tuple[Stored, ...]:
    """The tables of a run folder: rows, their side tables, and other values."""
    return (
        Stored(folder, "rows", rows.Measurement, ("id",)),
        Stored(folder, "tokens", rows.TokenShare, ("id", "index")),
        Stored(folder, "bounds", rows.Bound, ("id", "theorem", "eps")),
        Stored(folder, "directions", rows.Direction, ("id", "rank", "side", "index")),
        Stored(folder, "values", rows.Value, ("part", "key")),
    )


def marks_of(values: Mapping[str, Any]) -> dict[str, Mark]:
    """The marks in a manifest; invalid entries are skipped."""
    known = {
        n: v for n, v in values.items() if isinstance(v, Mapping) and {*v} >= {"sha256", "copy"}
    }
    return {name: Mark(str(one["sha256"]), str(one["copy"])) for name, one in known.items()}


def _chunks_of_lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, in chunks of some megabytes."""
    if not os.path.lexists(path):
        return
    try:
        with opened(path) as file:
            rest = b""
            while data := file.read(_CHUNK):
                whole, end, rest = (rest + data).rpartition(b"\n")
                if end:
                    yield whole + end
    except OSError as problem:
        raise InputError(
            f"`{path}` should be a file that can be read and written. Found: "
            f"{problem.strerror}; choose another `out`."
        ) from problem


def _append(path: Path, lines: Sequence[bytes]) -> None:
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
            # If this fails too, the next opening cuts the incomplete last line.
            with contextlib.suppress(OSError):
                os.truncate(path, end)
            raise
    if new:
        sync_folder(path.parent)
