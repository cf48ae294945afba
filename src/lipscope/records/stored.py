"""One table of a run: lines of JSON that only grow, and a Parquet copy of the first so many."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.errors import InputError
from lipscope.records.jsonl import append_lines, cut_torn_line, objects, restored
from lipscope.records.rows import Bound, Measurement, TokenShare, Value, schema_of, typed_frame

if TYPE_CHECKING:
    import polars

_CHUNK = 2**24


@dataclass(frozen=True)
class Mark:
    """How much of the lines the Parquet copy holds.

    Attributes:
        bytes: Size of that part of the file of lines.
        lines: Number of its lines.
        sha256: Its digest: a copy that does not belong to these lines is not read.
    """

    bytes: int
    lines: int
    sha256: str


@dataclass(frozen=True)
class Stored:
    """One table of a run folder, by its two files.

    Attributes:
        folder: Where they are.
        name: ``rows``, ``tokens``, ``bounds`` or ``values``.
        kind: Type of a record.
        key: Columns that name a record; of two of one name the later one counts.
    """

    folder: Path
    name: str
    kind: type
    key: tuple[str, ...]

    @property
    def lines(self) -> Path:
        """The file to which records are appended."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def parquet(self) -> Path:
        """Its copy."""
        return self.folder / f"{self.name}.parquet"

    def append(self, lines: list[str]) -> None:
        """Append records and flush them to the disk."""
        append_lines(self.lines, lines)

    def repair(self) -> None:
        """Cut off a last line that was never finished. Only for who holds the folder."""
        cut_torn_line(self.lines)

    def read(self, mark: Mark | None, *, own: bool = False) -> polars.DataFrame:
        """All records, from the copy as far as it goes and from the lines behind it.

        Args:
            mark: How far the copy is said to go.
            own: Whether the lines behind the mark were written by this process, so that they
                need no checking.

        Returns:
            Each record once.

        Raises:
            InputError: If a line cannot be read as a record.
        """
        import polars as pl

        parts = []
        copy = self._copied(mark)
        if copy is None:
            mark = None
        else:
            parts.append(copy)
        parts.extend(self._behind(mark, own=own))
        if not parts:
            return typed_frame(self.kind, [])
        if len(parts) == 1 and copy is not None:
            return copy
        return pl.concat(parts).unique(self.key, keep="last", maintain_order=True)

    def mark(self) -> Mark:
        """The mark of a copy that holds all complete lines of the file."""
        digest, size, lines = hashlib.sha256(), 0, 0
        for part in _parts(self.lines):
            digest.update(part)
            size, lines = size + len(part), lines + part.count(b"\n")
        return Mark(size, lines, digest.hexdigest())

    def readable(self) -> bool:
        """Whether the copy is a whole Parquet file with the columns of this version."""
        import polars as pl

        try:
            return dict(pl.read_parquet_schema(self.parquet)) == schema_of(self.kind)
        except (OSError, pl.exceptions.PolarsError):
            return False

    def _copied(self, mark: Mark | None) -> polars.DataFrame | None:
        """The copy, if it is one of the first lines of this very file."""
        import polars as pl

        if mark is None or not self._begins_with(mark):
            return None
        try:
            # Not mapped into memory: the file may be replaced while it is read.
            frame = pl.read_parquet(io.BytesIO(self.parquet.read_bytes()))
        except (OSError, pl.exceptions.PolarsError):
            return None
        return frame if dict(frame.schema) == schema_of(self.kind) else None

    def _begins_with(self, mark: Mark) -> bool:
        digest, left = hashlib.sha256(), mark.bytes
        for part in _parts(self.lines):
            digest.update(part[:left])
            left -= min(left, len(part))
            if not left:
                break
        return not left and digest.hexdigest() == mark.sha256

    def _behind(self, mark: Mark | None, *, own: bool) -> Iterator[polars.DataFrame]:
        """Frames of the lines behind the mark, some megabytes at a time."""
        number = 1 + (mark.lines if mark else 0)
        for data in _parts(self.lines, start=mark.bytes if mark else 0):
            frame = self._trusted(data) if own else None
            yield self._checked(data, number) if frame is None else frame
            number += data.count(b"\n")

    def _trusted(self, data: bytes) -> polars.DataFrame | None:
        import polars as pl

        try:
            return pl.read_ndjson(io.BytesIO(data), schema=schema_of(self.kind))
        except pl.exceptions.PolarsError:
            return None

    def _checked(self, data: bytes, first: int) -> polars.DataFrame:
        records = (
            vars(restored(self.kind, values, f"`{self.lines}`, line {number}"))
            for number, values in objects(data, first=first)
        )
        return typed_frame(self.kind, records)


def tables(folder: Path) -> tuple[Stored, Stored, Stored, Stored]:
    """The tables of a run folder: rows, by their ids tokens and bounds, and other values."""
    return (
        Stored(folder, "rows", Measurement, ("id",)),
        Stored(folder, "tokens", TokenShare, ("id", "index")),
        Stored(folder, "bounds", Bound, ("id", "theorem", "eps")),
        Stored(folder, "values", Value, ("part", "key")),
    )


def marks_of(values: Mapping[str, Any]) -> dict[str, Mark]:
    """The marks in a manifest; entries that are not marks are left out."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = Mark(int(value["bytes"]), int(value["lines"]), str(value["sha256"]))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def write_parquet(frame: polars.DataFrame, path: Path) -> None:
    """Write a Parquet file in one move: never a half-written file."""
    part, content = path.with_suffix(".part"), io.BytesIO()
    frame.write_parquet(content)
    part.write_bytes(content.getvalue())  # by ourselves: polars has errors of its own
    part.replace(path)


def _parts(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines of a file, some megabytes at a time.

    Raises:
        InputError: If it is no file that can be read.
    """
    try:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(start)
            rest = b""
            while data := file.read(_CHUNK):
                whole, end, rest = (rest + data).rpartition(b"\n")
                if end:
                    yield whole + end
    except OSError as problem:
        raise InputError(
            f"`{path}` should be a file that can be read and written. Found: "
            f"{problem.strerror}; choose another `--out`."
        ) from problem
