"""One table of a run: lines of JSON that only grow, and a Parquet copy of the first so many."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.errors import InputError, remark
from lipscope.records.files import opened, replaced
from lipscope.records.jsonl import (
    append_lines,
    cut_torn_line,
    objects,
    restored,
    sealed,
    sorted_out,
)
from lipscope.records.rows import (
    Bound,
    Direction,
    Measurement,
    TokenShare,
    Value,
    schema_of,
    typed_frame,
)

if TYPE_CHECKING:
    import polars

_CHUNK = 2**24
BESIDE = ("tokens", "bounds", "directions")
"""What a line of ``rows.jsonl`` says besides its row: how many lines of these belong to it."""


@dataclass(frozen=True)
class Mark:
    """How much of the lines the Parquet copy holds.

    Attributes:
        bytes: Size of that part of the file of lines.
        lines: Number of its lines.
        sha256: Its digest: a copy that does not belong to these lines is not read.
        copy: Digest of the copy: another one in its place is not read.
    """

    bytes: int
    lines: int
    sha256: str
    copy: str


@dataclass(frozen=True)
class Stored:
    """One table of a run folder, by its two files.

    Attributes:
        folder: Where they are.
        name: ``rows``, one of `BESIDE` or ``values``.
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

    @property
    def damaged(self) -> Path:
        """Where lines go that cannot be believed."""
        return self.folder / f"{self.name}.damaged"

    def append(self, lines: list[str]) -> None:
        """Append records with their checksums, and bring them to the disk."""
        append_lines(self.lines, [sealed(line) for line in lines])

    # --- for who holds the folder

    def repair(self, mark: Mark | None) -> int:
        """Cut off a line that was never finished, and set aside those that are damaged.

        Args:
            mark: How far the copy goes: so far the lines were looked at before.

        Returns:
            Number of lines set aside.
        """
        cut_torn_line(self.lines)
        start = mark.bytes if mark is not None and self.begins_with(mark) else 0
        if all(sorted_out(data)[0] == data for data in _parts(self.lines, start)):
            return 0
        return self.set_aside(lambda _: False)

    def set_aside(self, unwanted: Callable[[bytes], bool], into: Path | None = None) -> int:
        """Move lines that are damaged or unwanted into a file of their own; how many."""
        count = 0

        def kept() -> Iterator[bytes]:
            nonlocal count
            for data in _parts(self.lines):
                good, bad = sorted_out(data)
                stay, out = [], [line + b"\n" for line in bad]
                for line in good.splitlines(keepends=True):
                    (out if unwanted(line) else stay).append(line)
                append_lines(into or self.damaged, out)
                count += len(out)
                yield b"".join(stay)

        replaced(self.lines, kept())
        return count

    def restore(self, mark: Mark | None, more: Callable[[Any], dict[str, Any]] | None) -> int:
        """Write anew the lines of records that only the copy still has.

        Args:
            mark: How far the copy goes, and its digest.
            more: What a line says besides its record.

        Returns:
            How many.
        """
        copy = self.copied(mark)
        if copy is None or mark is None or self.begins_with(mark):
            return 0
        lost = copy.join(self.read(None), on=self.key, how="anti", nulls_equal=True)
        values = lost.to_dicts()
        self.append([_plain(one | (more(one) if more else {})) for one in values])
        return len(values)

    def mark(self, copy: str) -> Mark:
        """The mark of a copy, by its digest, that holds all complete lines of the file."""
        digest, size, lines = hashlib.sha256(), 0, 0
        for part in _parts(self.lines):
            digest.update(part)
            size, lines = size + len(part), lines + part.count(b"\n")
        return Mark(size, lines, digest.hexdigest(), copy)

    def compacted(self, held: Mark | None, frame: Callable[[], polars.DataFrame]) -> Mark:
        """Write the copy unless it is there; how far it goes.

        Args:
            held: How far the copy is said to go.
            frame: Gives the records.
        """
        mark = self.mark("" if held is None else held.copy)
        if mark == held and (not mark.bytes or self.copied(held) is not None):
            return mark
        if not mark.bytes and self.name not in ("rows", "tokens"):
            return mark  # without any there is no file of them
        content = io.BytesIO()
        frame().write_parquet(content)
        replaced(self.parquet, content.getvalue())  # by ourselves: polars has errors of its own
        return replace(mark, copy=hashlib.sha256(content.getvalue()).hexdigest())

    # --- for everybody

    def read(self, mark: Mark | None, *, own: bool = False) -> polars.DataFrame:
        """All records, from the copy as far as it goes and from the lines after it.

        Where the lines are not those that were copied, they are believed and not the copy, which
        then only says what they lack.

        Args:
            mark: How far the copy is said to go.
            own: Whether the lines after the mark were written by this process, so that they
                need no checking.

        Returns:
            Each record once.

        Raises:
            InputError: If a line cannot be read as a record.
        """
        import polars as pl

        copy = self.copied(mark)
        parts = [] if copy is None else [copy]
        parts += self._behind(mark if copy is not None else None, own=own)
        if not parts:
            return typed_frame(self.kind, [])
        if len(parts) == 1 and copy is not None:
            return copy
        return pl.concat(parts).unique(self.key, keep="last", maintain_order=True)

    def copied(self, mark: Mark | None) -> polars.DataFrame | None:
        """The copy, if it is the one that was made."""
        import polars as pl

        if mark is None or not mark.bytes or not os.path.lexists(self.parquet):
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
        return frame if dict(frame.schema) == schema_of(self.kind) else None

    def begins_with(self, mark: Mark) -> bool:
        """Whether the file begins with the lines that were copied."""
        digest, left = hashlib.sha256(), mark.bytes
        for part in _parts(self.lines):
            digest.update(part[:left])
            left -= min(left, len(part))
            if not left:
                break
        return not left and digest.hexdigest() == mark.sha256

    def as_marked(self, mark: Mark | None) -> bool:
        """Whether the lines are just those that were copied, so that there is nothing new."""
        size = self.lines.stat().st_size if self.lines.exists() else 0
        return mark is not None and mark.bytes == size and self.begins_with(mark)

    def told(self) -> Iterator[dict[str, Any]]:
        """The entries of every line, also of those that a later one replaces."""
        for data in _parts(self.lines):
            yield from (values for _, values in objects(data))

    def _behind(self, mark: Mark | None, *, own: bool) -> Iterator[polars.DataFrame]:
        """Frames of the lines after the mark, some megabytes at a time."""
        known = mark if mark is not None and self.begins_with(mark) else None
        number, damaged = 1 + (known.lines if known else 0), 0
        for data in _parts(self.lines, start=known.bytes if known else 0):
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
            return pl.read_ndjson(io.BytesIO(data), schema=schema_of(self.kind))
        except pl.exceptions.PolarsError:
            return None

    def _checked(self, data: bytes, first: int) -> polars.DataFrame:
        def records() -> Iterator[Mapping[str, Any]]:
            for number, values in objects(data, first=first):
                if self.name == "rows":
                    for name in BESIDE:
                        values.pop(name, None)
                yield vars(restored(self.kind, values, f"`{self.lines}`, line {number}"))

        return typed_frame(self.kind, records())


def tables(folder: Path) -> tuple[Stored, ...]:
    """The tables of a run folder: rows, what belongs to them by their ids, and other values."""
    return (
        Stored(folder, "rows", Measurement, ("id",)),
        Stored(folder, "tokens", TokenShare, ("id", "index")),
        Stored(folder, "bounds", Bound, ("id", "theorem", "eps")),
        Stored(folder, "directions", Direction, ("id", "rank", "side", "index")),
        Stored(folder, "values", Value, ("part", "key")),
    )


def marks_of(values: Mapping[str, Any]) -> dict[str, Mark]:
    """The marks in a manifest; entries that are not marks are left out."""
    found = {}
    for name, value in values.items():
        try:
            mark = Mark(
                int(value["bytes"]), int(value["lines"]), str(value["sha256"]), str(value["copy"])
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if 0 <= mark.bytes < 2**63 and mark.lines >= 0:
            found[name] = mark
    return found


def _plain(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _parts(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines of a file, some megabytes at a time.

    Raises:
        InputError: If it is no file that can be read.
    """
    if not os.path.lexists(path):
        return
    try:
        with opened(path) as file:
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
