"""The run folder: append-only, crash-safe storage of rows, with Parquet copies at the end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lipscope.display import Shown
from lipscope.errors import InputError, remark, shown, unwritable
from lipscope.records.manifest import (
    LOCK,
    MANIFEST,
    Place,
    check_same,
    empty,
    holds_rows,
    load_manifest,
    other_versions,
    plain,
    read_manifest,
    write_manifest,
)
from lipscope.records.rows import (
    Bound,
    Direction,
    Measurement,
    TokenShare,
    Value,
    records_of,
    to_line,
)
from lipscope.records.tables import (
    BESIDE,
    PART,
    Mark,
    Stored,
    marks_of,
    refuse_links,
    tables,
)

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
if TYPE_CHECKING:
    import polars

T = TypeVar("T")
SURVEY = "survey"
"""The part of the values with the surveys of models."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class Finished(NamedTuple):
    """A finished row with its side tables."""

    row: Measurement
    tokens: tuple[TokenShare, ...] = ()
    bounds: tuple[Bound, ...] = ()
    directions: tuple[Direction, ...] = ()


class RunFolder:
    """A folder of rows: append-only during the run, with Parquet copies at the end.

    Files: ``manifest.json`` (specification, versions, machine, models, digests),
    ``rows.jsonl``, ``tokens.jsonl``, ``bounds.jsonl`` and ``directions.jsonl`` (each line with a
    checksum, appended and synced to disk; the side tables of a row are written before the row
    itself, so that a row on disk is complete), ``values.jsonl`` (additional values of an
    experiment, and surveys of models), and their Parquet copies.

    Only one process can open it at a time. Use it in a ``with`` block, which writes the Parquet
    files and releases the folder at the end; a new folder without content is removed. Use
    `read_run` for reading.

    Args:
        path: Folder, created if it does not exist.
        spec: Everything that determines the rows; the attribute also includes the stored
            specification of the folder.
        origin: Machine and versions (`lipscope.records.rows.provenance`).
        growing: Whether the folder may hold a run with other layers, lengths and samples, which
            are then added to the specification.

    Attributes:
        done: Finished rows by id: complete, and not failed for an external reason (no worker,
            memory or disk space).

    Raises:
        InputError: If the folder cannot be read or written, holds another specification, or
            is already open in this or another process.
    """

    def __init__(
        self,
        path: Path | Place,
        spec: Mapping[str, Any],
        origin: Mapping[str, Any] | None = None,
        *,
        growing: bool = False,
    ) -> None:
        self._place = path if isinstance(path, Place) else Place(Path(path))
        self._growing, self.spec = growing, plain(spec)
        self.path = self._place.of(spec, growing=growing)
        self._replaces = self._place.replaces
        with self._writing():
            self._made = [one for one in (self.path, *self.path.parents) if not one.exists()]
        self._check()  # first: a refused folder is left unchanged
        self._tables = tables(self.path)
        self._marks: dict[str, Mark] = {}
        self._manifest = empty(self.spec, origin or {})
        self._release = weakref.finalize(self, self._lock())
        try:
            with self._writing():
                self.done: dict[str, Measurement] = self._open()
        except InputError:
            self._release()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        try:
            rows, *_, values = self._tables
            parts = (one.get("part") for one in values.entries())
            if kind is not None and not any(rows.entries()) and all(one == SURVEY for one in parts):
                self._release()  # nothing to keep
                self._take_away()
            else:
                self.compact()
        finally:
            self._release()

    # --- the folder

    def _check(self) -> dict[str, Any] | None:
        """The manifest of a run with this specification; any other content is refused."""
        with self._writing():
            if self.path.is_dir():
                for table in tables(self.path):
                    for path in (table.lines, table.parquet, table.damaged):
                        refuse_links(path)
                for name in (MANIFEST, LOCK):
                    refuse_links(self.path / name)
            held = load_manifest(self.path / MANIFEST)
            if held is not None and not self._replaces:
                self.spec = check_same(self.path, held["spec"], self.spec, growing=self._growing)
            if held is not None or holds_rows(self.path):
                if not os.access(self.path, os.W_OK):
                    raise PermissionError(13, os.strerror(13))
                return held
            free = not self.path.exists() or (
                self.path.is_dir() and all(map(_may_be_left, self.path.iterdir()))
            )
        if not free:
            raise InputError(
                f"`out` should be a new folder or one of an earlier run. Found "
                f"`{self.path}`, which holds something else; choose another `out`."
            )
        return None

    def _lock(self) -> Callable[[], object]:
        """Lock the folder for this process; returns the release function."""
        with self._writing():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                return _taken(self.path)
            except BlockingIOError:
                raise InputError(
                    f"`out = {self.path}` is in use by another process, or open in this one; wait "
                    "until it has ended, close it, or choose another folder."
                ) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert write errors, such as a full disk, to one-line errors."""
        try:
            yield
        except OSError as problem:
            raise unwritable(f"out = {self.path}", problem) from problem

    def _open(self) -> dict[str, Measurement]:
        """The finished rows, after repair of all files."""
        for left in self.path.glob(f".*{PART}"):  # temporary files of a killed process
            left.unlink()
        if self._replaces:
            self._place.clear()
        held = None if self._replaces else self._check()
        if held is not None:
            if others := other_versions(held["provenance"], self._manifest["provenance"]):
                remark(
                    f"`{self.path}` was begun with {others}; its content is kept (use `--force` on "
                    "the command line to start over)."
                )
            self._manifest |= held
            self._marks = marks_of(held["files"])
        else:
            if os.path.lexists(self.path / MANIFEST):
                (self.path / MANIFEST).replace(self.path / "manifest.damaged")
            if holds_rows(self.path):
                remark(f"The manifest of `{self.path}` was lost; it is rebuilt from the rows.")
            self._write_manifest()
        incomplete = self._repaired()
        frame = self.compact(own=False)
        rows = {one.id: one for one in records_of(Measurement, frame)}
        done = {id: row for id, row in rows.items() if id not in incomplete and not row.passing}
        if again := sum(row.passing for row in rows.values()):
            remark(
                f"`{self.path}`: {again} row{'s' * (again > 1)} failed for want of a worker, "
                "memory or disk, and will be tried again."
            )
        return done

    def _repaired(self) -> set[str]:
        """Repair the files with a one-line report, and return the ids of incomplete rows."""
        rows = self._tables[0]
        marked = [(one, self._marks.get(one.name)) for one in self._tables]
        try:
            for one in self._tables:
                one.cut_torn_line()
            if all(mark is not None and mark.sha256 == one.digest for one, mark in marked):
                return set()
            aside = {one.lines.name: one.repair() for one in self._tables}
            back = sum(one.restore(mark) for one, mark in marked[1:])
            counts = {
                one.name: dict(one.read(mark).group_by("id").len().iter_rows())
                for one, mark in marked[1:-1]
            }
            known = (m and (not m.sha256 or one.copied(m) is not None) for one, m in marked[1:-1])
            if all(known):
                held_of, mark = counts.items(), marked[0][1]
                back += rows.restore(mark, lambda r: {n: o.get(r["id"], 0) for n, o in held_of})
            entries = [*rows.entries()]
        except OSError as problem:
            raise InputError(
                f"`{self.path}` should hold files that can be read and written. Found: {problem}; "
                "choose another `out`."
            ) from problem
        incomplete = {
            one["id"]
            for one in entries
            for name, held in counts.items()
            if isinstance(one.get("id"), str)
            and type(one.get(name)) is int
            and held.get(one["id"], 0) < one[name]
        }
        damaged = [f"{count} damaged in `{name}`" for name, count in aside.items() if count]
        parts = [f"lines set aside in `.damaged` files: {', '.join(damaged)}"] * bool(damaged)
        every, beside = ", ".join(one.name for one in self._tables), ", ".join(BESIDE)
        parts += [f"restored from Parquet: {back} of {every}"] * bool(back)
        parts += [f"rows without all of their {beside}: {len(incomplete)}"] * bool(incomplete)
        if parts:
            remark(f"`{self.path}`: {'; '.join(parts)}. Missing rows are measured again.")
        return incomplete

    def planned(self, ids: Collection[str]) -> None:
        """Set the rows of this run, after the survey of all its models.

        If more lengths or samples have moved the windows, rows of the old windows are moved to
        ``rows.earlier``, so that no passage is counted twice. Other rows that are not part of this
        run are kept, with a warning.
        """
        grown = self._manifest["spec"] != self.spec
        wanted, rows = set(ids), self._tables[0]
        held = records_of(Measurement, self._read(Measurement))
        unknown = {one.id: one for one in held if one.id not in wanted}
        if grown and unknown:
            with self._writing():
                count = rows.set_aside(
                    lambda line: json.loads(line)["id"] in unknown, self.path / "rows.earlier"
                )
            self.done = {id: row for id, row in self.done.items() if id in wanted}
            del self._marks[rows.name]  # otherwise they would be restored from the copy
            self.compact()
            remark(
                f"`{self.path}`: {count} row{'s' * (count > 1)} of windows moved by the new "
                "lengths or samples went to `rows.earlier`; they are measured again."
            )
        elif unknown:
            first = next(iter(unknown.values()))
            remark(
                f"`{self.path}` holds {len(unknown)} row{'s' * (len(unknown) > 1)} outside this "
                f"run, such as {first.id} ({first.model}, layer {first.layer}, "
                f"{first.num_tokens} tokens); they are kept."
            )
        if grown:
            self._manifest["spec"] = self.spec
            self._write_manifest()

    def _take_away(self) -> None:
        """Remove the files and folders created when the run was opened."""
        with contextlib.suppress(OSError):
            for name in (MANIFEST, LOCK, *_files_of(self._tables)):
                (self.path / name).unlink(missing_ok=True)
            for path in self._made:
                path.rmdir()

    # --- writing

    def _write_manifest(self) -> None:
        files = {name: vars(mark) for name, mark in self._marks.items()}
        self._manifest |= {"files": files}
        with self._writing():
            write_manifest(self.path, self._manifest)

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Provenance of the models of this run, by name."""
        return self._manifest["models"]

    def extend(self, finished: Sequence[Finished]) -> None:
        """Append finished rows after their side tables, and sync them to disk together."""
        rows, *sides, _ = self._tables
        lines = self._lines(finished)
        for side in sides:
            records = (record for one in finished for record in getattr(one, side.name))
            self._add(side, [to_line(vars(record)) for record in records])
        self._add(rows, lines)
        self.done |= {one.row.id: one.row for one in finished}

    def _lines(self, finished: Sequence[Finished]) -> list[str]:
        """Rows as lines, with the number of their records in each side table."""
        again = [one.row.id for one in finished if one.row.id in self.done]
        _, *sides, _ = self._tables
        held: dict[str, Counter[str]] = {}
        for side in sides:
            records = self.beside(side.kind, again)
            records += [record for one in finished for record in getattr(one, side.name)]
            keys = {tuple(getattr(record, name) for name in side.key) for record in records}
            held[side.name] = Counter(key[0] for key in keys)
        counts = ({name: of[one.row.id] for name, of in held.items()} for one in finished)
        return [to_line(vars(o.row) | count) for o, count in zip(finished, counts, strict=True)]

    def values(self, part: str) -> dict[str, dict[str, Any]]:
        """Values of a part of an experiment by key, in the order of `add_value`."""
        return values_of(self._read(Value), part)

    def add_value(self, part: str, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Append a value and sync it to disk; returns it after a JSON round trip."""
        text = json.dumps(content, ensure_ascii=False)
        self._add(self._tables[-1], [to_line({"part": part, "key": key, "content": text})])
        return json.loads(text)

    def _add(self, table: Stored, lines: list[str]) -> None:
        with self._writing():
            table.append(lines)

    def add_model(self, name: str, about: Mapping[str, Any]) -> None:
        """Record the provenance of a model in the manifest; refuse a change."""
        held, found = self._manifest["models"].get(name), json.loads(json.dumps(about))
        if held == found:
            return
        if held is not None:
            other = sorted(key for key in found if found[key] != held.get(key))
            raise InputError(
                f"`{name}` should be the model that `{self.path}` was begun with. Found another "
                f"one (it differs in {', '.join(other)}); choose another `out`."
            )
        self._manifest["models"][name] = found
        self._write_manifest()

    def beside(self, kind: type[T], ids: Iterable[str] | None = None) -> list[T]:
        """Tokens, bounds or directions of finished rows (all, or ``ids``), without duplicates."""
        wanted = [one for one in (self.done if ids is None else ids) if one in self.done]
        return records_of(kind, self._read(kind), wanted) if wanted else []

    def _read(self, kind: type) -> polars.DataFrame:
        """A table whose lines were all written or checked by this process."""
        (table,) = (one for one in self._tables if one.kind is kind)
        return table.read(self._marks.get(table.name), own=True)

    def compact(self, *, own: bool = True) -> polars.DataFrame:
        """Update the Parquet copies from the lines, then the manifest; returns the rows.

        ``own``: whether all lines were written or checked by this process.
        """
        frame = self._tables[0].read(self._marks.get("rows"), own=own)
        marks = {}
        for table in self._tables:
            held = self._marks.get(table.name)

            def content(table: Stored = table, held: Mark | None = held) -> polars.DataFrame:
                rows = table.name == "rows"
                return frame if rows else belonging(table.read(held, own=own), frame)

            with self._writing():
                marks[table.name] = table.compacted(held, content)
        if marks != self._marks:
            self._marks = marks
            self._write_manifest()
        return frame


def _may_be_left(path: Path) -> bool:
    """Whether this file may be left over from a run killed before its first row."""
    names = (MANIFEST, "manifest.damaged", LOCK)
    ours = path.name in _files_of(tables(path.parent))
    bare = ours and path.is_file() and not path.stat().st_size
    return path.suffix == PART or path.name in names or bare


def _files_of(stored: Iterable[Stored]) -> list[str]:
    return [f"{table.name}.{kind}" for table in stored for kind in ("jsonl", "parquet")]


def _taken(path: Path) -> Callable[[], object]:
    """Lock a folder for this process; the system releases the lock when the process ends.

    The lock uses a separate file, since some network file systems release a lock as soon as any
    handle of the locked file is closed. File systems without locks are not locked.
    """
    refuse_links(path / LOCK)
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise BlockingIOError from None
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    return lambda: os.close(handle)


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def belonging(side: polars.DataFrame, rows: polars.DataFrame) -> polars.DataFrame:
    """Records of finished rows only: after a kill, there may be tokens without a row."""
    if "id" not in side.columns:  # values have no row
        return side
    return side.join(rows.select("id"), on="id", how="semi", maintain_order="left")


def values_of(frame: polars.DataFrame, part: str) -> dict[str, dict[str, Any]]:
    """The values of one part of an experiment, by key."""
    import polars as pl

    some = records_of(Value, frame.filter(pl.col("part") == part))
    return {one.key: json.loads(one.content) for one in some}


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A run folder opened for reading: its tables and the manifest."""

    path: Path  # the folder
    # ``schema``, ``spec``, ``provenance`` (versions, machine), ``models`` (revision and weights of
    # each) and ``files`` (digests)
    manifest: Mapping[str, Any]

    @property
    def paired(self) -> bool:
        """Whether a sample is the same passage at every length (windows "spread")."""
        return self.manifest["spec"].get("windows", "spread") == "spread"

    @cached_property
    def rows(self) -> polars.DataFrame:
        """One line per finished row, in order of completion."""
        return self._read(Measurement)

    @cached_property
    def tokens(self) -> polars.DataFrame:
        """One line per token; ``id`` refers to its row."""
        return belonging(self._read(TokenShare), self.rows)

    @cached_property
    def bounds(self) -> polars.DataFrame:
        """One line per theorem applied to a row; ``id`` refers to the row."""
        return belonging(self._read(Bound), self.rows)

    @cached_property
    def directions(self) -> polars.DataFrame:
        """One line per component of a leading direction; ``id`` refers to its row."""
        return belonging(self._read(Direction), self.rows)

    def values(self, part: str) -> polars.DataFrame:
        """Values of one part of an experiment, one per line, with their keys."""
        import polars as pl

        lines = [{"key": key} | content for key, content in self.contents(part).items()]
        return pl.DataFrame(lines, infer_schema_length=None)

    def parts(self) -> list[str]:
        """The names of the parts with values."""
        return sorted(set(self._read(Value)["part"]) - {SURVEY})

    def contents(self, part: str) -> dict[str, dict[str, Any]]:
        """Values of one part of an experiment, by key."""
        return values_of(self._read(Value), part)

    def measurements(self) -> list[Measurement]:
        """The rows as records."""
        return records_of(Measurement, self.rows)

    def token_shares(self, ids: Sequence[str] | None = None) -> list[TokenShare]:
        """The tokens of all rows, or of those in ``ids``, as records."""
        return records_of(TokenShare, self.tokens, ids)

    def bound_values(self, ids: Sequence[str] | None = None) -> list[Bound]:
        """The bounds of all rows, or of those in ``ids``, as records."""
        return records_of(Bound, self.bounds, ids)

    def direction_parts(self, ids: Sequence[str] | None = None) -> list[Direction]:
        """The directions of all rows, or of those in ``ids``, as records."""
        return records_of(Direction, self.directions, ids)

    def _read(self, kind: type) -> polars.DataFrame:
        (table,) = (one for one in tables(self.path) if one.kind is kind)
        return table.read(marks_of(self.manifest["files"]).get(table.name))


def read_run(path: str | Path) -> Run:
    """Open a run folder for reading; its files are not modified.

    During a run, the rows finished so far are read. The lines take precedence over the Parquet
    copies; damaged lines are skipped with a warning.

    Raises:
        InputError: If it is not a run folder, cannot be read, or has another schema.
    """
    if not isinstance(path, str | Path) or not os.path.isdir(path):
        is_file = isinstance(path, str | Path) and os.path.exists(path)
        found = "a file; name the folder of the run" if is_file else "no such folder"
        raise InputError(f"`{shown(path)}` should be a run folder. Found {found}.")
    return Run(Path(path), read_manifest(Path(path)))
