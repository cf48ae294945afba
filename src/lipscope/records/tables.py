"""The tables of a run: lines of JSON with checksums that only grow, and a Parquet copy of each.

The files of a folder are written in one move or at their ends, never through a link, and are safe
from a power cut.
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
"""What a line of ``rows.jsonl`` says besides its row: how many lines of these belong to it."""
_SEALED = len(f', "{SEAL}": "01234567"}}')
_FOREIGN = b"\xef\xbb\xbf\r"  # what editors put around a line
_CHUNK = 2**24


def opened(path: Path, mode: str = "rb") -> IO[Any]:
    """A file of a run folder, which is neither a link nor a pipe or device that would hang."""
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
            f"{names.get(stat.S_IFMT(kind), 'a pipe or device')}; choose another `out`."
        )


def replaced(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in one move: at any moment the old or the new one is there, whole.

    The new one is made beside it under a name that nobody has, reaches the disk, and takes its
    place; a link of this name is replaced, not followed.
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


# --- lines ------------------------------------------------------------------------------------


def with_checksum(line: str) -> bytes:
    r"""A line with a checksum of itself as its last entry, and its line end.

    >>> with_checksum('{"a": 1}')
    b'{"a": 1, "crc": "7aa88204"}\n'
    """
    body = line[:-1].encode("utf-8", "replace")
    return body + f', "{SEAL}": "{zlib.crc32(body):08x}"}}\n'.encode()


def is_intact(line: bytes) -> bool:
    """Whether a line says what was written.

    >>> line = with_checksum('{"sigma": 0.0108}').strip()
    >>> is_intact(line), is_intact(line.replace(b"0.0108", b"0.0908"))
    (True, False)
    """
    body = line[:-_SEALED]
    return line[-_SEALED:] == f', "{SEAL}": "{zlib.crc32(body):08x}"}}'.encode()


def sorted_out(data: bytes) -> tuple[bytes, list[bytes]]:
    """Complete lines: those that are whole, and those that are not.

    A byte order mark and foreign line ends do no harm.
    """
    lines = data.split(b"\n")[:-1]
    if all(map(is_intact, lines)):
        return data, []
    lines = [line.strip(_FOREIGN) for line in lines]
    good = [line for line in lines if is_intact(line)]
    bad = [line for line in lines if line and not is_intact(line)]
    return b"".join(line + b"\n" for line in good), bad


def objects(data: bytes, *, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""The objects of whole lines by line number, without their checksums; empty for another.

    >>> list(objects(with_checksum('{"a": 1}')))
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
    """A record from its line."""
    known: dict[str, Any] = {}
    wrong = None
    for name, parts in _column_types(kind):
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
            "another `out`."
        )
    return kind(**known)


def _can_be_kept(value: Any) -> bool:
    """Whether a table takes it: whole numbers have 64 bits, and half a surrogate is no text."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is not str or value.isascii() or not _SURROGATE.intersection(value)


_SURROGATE = frozenset(map(chr, range(0xD800, 0xE000)))


@functools.cache
def _column_types(kind: type) -> list[tuple[str, tuple[Any, ...]]]:
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


# --- a table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """What a Parquet copy is a copy of: digests of the lines ("" for none) and of the copy."""

    sha256: str
    copy: str


@dataclass(frozen=True)
class Stored:
    """One table of a run folder, by its two files."""

    folder: Path  # where they are
    name: str  # ``rows``, one of `BESIDE` or ``values``
    kind: type  # type of a record
    key: tuple[str, ...]  # columns that name a record; of two of one name the later one counts

    @property
    def lines(self) -> Path:
        """The file to which records are appended."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def parquet(self) -> Path:
        """Its copy."""
        return self.folder / f"{self.name}.parquet"

    @property
    def damaged(self) -> Path:
        """Where lines go that cannot be believed."""
        return self.folder / f"{self.name}.damaged"

    @property
    def digest(self) -> str:
        """Digest of the complete lines; "" where there are none."""
        digest, some = hashlib.sha256(), False
        for part in _chunks_of_lines(self.lines):
            digest.update(part)
            some = True
        return digest.hexdigest() if some else ""

    # --- for who holds the folder

    def append(self, lines: Sequence[str]) -> None:
        """Append records with their checksums, and bring them to the disk."""
        _append(self.lines, [with_checksum(line) for line in lines])

    def cut_torn_line(self) -> None:
        """Remove what follows the last line end: a line that was never finished."""
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
        """Set aside lines that are damaged; how many."""
        if all(sorted_out(data)[0] == data for data in _chunks_of_lines(self.lines)):
            return 0
        return self.set_aside(lambda _: False)

    def set_aside(self, unwanted: Callable[[bytes], bool], into: Path | None = None) -> int:
        """Move lines that are damaged or unwanted into a file of their own; how many."""
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
        """Write anew the lines of records that only the copy has; ``more`` is what they say too."""
        copy = self.copied(mark)
        if copy is None:
            return 0
        lost = copy.join(self.read(None), on=self.key, how="anti", nulls_equal=True).to_dicts()
        self.append([rows.to_line(one | more(one)) for one in lost])
        return len(lost)

    def compacted(self, held: Mark | None, frame: Callable[[], polars.DataFrame]) -> Mark:
        """Write the copy unless it is there; what it is a copy of."""
        digest = self.digest
        same = held is not None and held.sha256 == digest
        if held is not None and same and not (digest and self.copied(held) is None):
            return held
        if not digest and self.name not in ("rows", "tokens"):
            return Mark("", "")  # without any there is no file of them
        content = io.BytesIO()
        frame().write_parquet(content)
        replaced(self.parquet, content.getvalue())  # by ourselves: polars has errors of its own
        return Mark(digest, hashlib.sha256(content.getvalue()).hexdigest())

    # --- for everybody

    def read(self, mark: Mark | None, *, own: bool = False) -> polars.DataFrame:
        """All records, each once: of the copy if it is one of these lines, else of the lines.

        Other lines are believed and not the copy, which then only says what they lack.

        Args:
            mark: What the copy is said to be one of.
            own: Whether this process wrote or checked every line.

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
        """The copy, if it is the one that was made."""
        import polars as pl

        if mark is None or not mark.sha256 or not os.path.lexists(self.parquet):
            return None
        try:
            with opened(self.parquet) as file:
                # Not mapped into memory: the file may be replaced while it is read.
                content = file.read()
            if hashlib.sha256(content).hexdigest() != mark.copy:
                return None
            frame = pl.read_parquet(io.BytesIO(content))
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        return frame if dict(frame.schema) == rows.schema_of(self.kind) else None

    def told(self) -> Iterator[dict[str, Any]]:
        """The entries of every line, also of those that a later one replaces."""
        for data in _chunks_of_lines(self.lines):
            yield from (values for _, values in objects(data))

    def _from_lines(self, *, own: bool) -> Iterator[polars.DataFrame]:
        """Frames of the lines, some megabytes at a time."""
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
    """The tables of a run folder: rows, what belongs to them by their ids, and other values."""
    return (
        Stored(folder, "rows", rows.Measurement, ("id",)),
        Stored(folder, "tokens", rows.TokenShare, ("id", "index")),
        Stored(folder, "bounds", rows.Bound, ("id", "theorem", "eps")),
        Stored(folder, "directions", rows.Direction, ("id", "rank", "side", "index")),
        Stored(folder, "values", rows.Value, ("part", "key")),
    )


def marks_of(values: Mapping[str, Any]) -> dict[str, Mark]:
    """The marks in a manifest; entries that are not marks are left out."""
    known = {
        n: v for n, v in values.items() if isinstance(v, Mapping) and {*v} >= {"sha256", "copy"}
    }
    return {name: Mark(str(one["sha256"]), str(one["copy"])) for name, one in known.items()}


def _chunks_of_lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, some megabytes at a time."""
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
            # Where this fails a torn last line stays, which the next opening cuts off.
            with contextlib.suppress(OSError):
                os.truncate(path, end)
            raise
    if new:
        sync_folder(path.parent)
