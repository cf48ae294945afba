"""The run folder: rows reach the disk as they come, survive a kill, and end as Parquet."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lipscope.errors import InputError
from lipscope.records.lock import LOCK, take
from lipscope.records.rows import (
    SCHEMA,
    Bound,
    Measurement,
    TokenShare,
    Value,
    records_of,
    to_line,
)
from lipscope.records.stored import Mark, Stored, marks_of, tables, write_parquet

if TYPE_CHECKING:
    import polars

T = TypeVar("T")
_ENTRIES = ("spec", "provenance", "models", "files")


class Finished(NamedTuple):
    """A finished row with its side tables."""

    row: Measurement
    tokens: tuple[TokenShare, ...] = ()
    bounds: tuple[Bound, ...] = ()


class RunFolder:
    """A folder of rows: append-only while it runs, Parquet when it ends.

    Files: ``manifest.json`` (specification, versions, machine, models, digests),
    ``rows.jsonl``, ``tokens.jsonl`` and ``bounds.jsonl`` (appended and flushed; what belongs
    to a row is written before the row itself, so that a row on disk is complete),
    ``values.jsonl`` (what an experiment computes besides rows), and their Parquet copies.

    It belongs to one process at a time. Use it in a ``with`` block, whose end writes the
    Parquet files and gives the folder free. `lipscope.records.run.read_run` only reads.

    Args:
        path: Folder, made if it does not exist.
        spec: Everything that determines the rows.
        origin: Machine and versions (`lipscope.records.rows.provenance`).

    Raises:
        InputError: If the folder cannot be read or written, holds another specification, or
            is in use by another process.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.spec = json.loads(json.dumps(spec, default=str))
        self._tables = tables(self.path)
        self._marks: dict[str, Mark] = {}
        self._manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "spec": self.spec,
            "provenance": dict(origin or {}),
            "models": {},
            "files": {},
        }
        self._holds_this_run()  # a folder that is refused stays as it is
        self._release = self._take()
        try:
            self.done: dict[str, Measurement] = self._open()
        except InputError:
            self._release()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.compact()
        finally:
            self._release()

    def _holds_this_run(self) -> bool:
        """Whether there is a run of this specification; anything else in there is refused."""
        manifest = self.path / "manifest.json"
        try:
            if manifest.exists():
                self._check_same(manifest)
                return True
            free = not self.path.exists() or (
                self.path.is_dir() and all(map(_may_be_left, self.path.iterdir()))
            )
        except OSError as problem:
            raise self._unwritable(problem) from problem
        if not free:
            raise InputError(
                f"`--out` should be a new folder or one of an earlier run. Found "
                f"`{self.path}`, which holds something else; choose another `--out`."
            )
        return False

    def _unwritable(self, problem: OSError) -> InputError:
        return InputError(
            f"`--out {self.path}` cannot be written ({problem.strerror}); choose another folder."
        )

    def _check_same(self, manifest: Path) -> None:
        check_same(self.path, load_manifest(manifest)["spec"], self.spec)
        if not os.access(self.path, os.W_OK):
            raise InputError(f"`--out {self.path}` cannot be written; choose another folder.")

    def _take(self) -> weakref.finalize[Any, Any]:
        """Lock the folder for this process; the system gives it free however the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = take(self.path)
        except BlockingIOError:
            raise InputError(
                f"`--out {self.path}` is in use by another process; wait until that one has "
                "ended, or choose another folder."
            ) from None
        except OSError as problem:
            raise self._unwritable(problem) from problem
        return weakref.finalize(self, os.close, handle)

    def _open(self) -> dict[str, Measurement]:
        """The finished rows, after every file was put in order."""
        if self._holds_this_run():
            held = load_manifest(self.path / "manifest.json")
            self._manifest |= held
            self._marks = marks_of(held["files"])
        else:
            self._write_manifest()
        try:
            for table in self._tables:
                table.repair()
        except OSError as problem:
            raise InputError(
                f"`{self.path}` should hold files that can be read and written. Found: {problem}; "
                "choose another `--out`."
            ) from problem
        frame = self._compact(own=False)
        return {one.id: one for one in records_of(Measurement, frame)}

    def _write_manifest(self) -> None:
        files = {name: vars(mark) for name, mark in self._marks.items()}
        self._manifest |= {"schema": SCHEMA, "files": files}
        text = json.dumps(self._manifest, indent=2, ensure_ascii=False, default=str)
        try:
            part = self.path / "manifest.part"
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path / "manifest.json")
        except OSError as problem:
            raise self._unwritable(problem) from problem

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """What is known of the models of this run, by name."""
        return self._manifest["models"]

    def append(
        self,
        row: Measurement,
        tokens: Iterable[TokenShare] = (),
        bounds: Iterable[Bound] = (),
    ) -> None:
        """Write one finished row, its tokens and bounds first, and flush all to the disk.

        Args:
            row: The row.
            tokens: Its tokens.
            bounds: Its bounds.

        Raises:
            InputError: If the disk takes no more.
        """
        self.extend([Finished(row, tuple(tokens), tuple(bounds))])

    def extend(self, finished: Sequence[Finished]) -> None:
        """Write finished rows in one go: one wait for the disk instead of one for each.

        Args:
            finished: Rows with what belongs to them.

        Raises:
            InputError: If the disk takes no more.
        """
        rows, tokens, bounds, _ = self._tables
        self._add(tokens, (to_line(token) for one in finished for token in one.tokens))
        self._add(bounds, (to_line(bound) for one in finished for bound in one.bounds))
        self._add(rows, (one.row.to_json() for one in finished))
        self.done |= {one.row.id: one.row for one in finished}

    def values(self, part: str) -> dict[str, dict[str, Any]]:
        """What was computed for a part of an experiment, by key, in the order of `add_value`."""
        return values_of(self._tables[3].read(self._marks.get("values"), own=True), part)

    def add_value(self, part: str, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write what was computed, and flush it to the disk.

        Args:
            part: Part of the experiment.
            key: Digest of what determines the value.
            content: Plain values.

        Returns:
            The content as it will be read back.

        Raises:
            InputError: If the disk takes no more.
        """
        text = json.dumps(content, ensure_ascii=False)
        self._add(self._tables[3], [to_line(Value(part=part, key=key, content=text))])
        return json.loads(text)

    def _add(self, table: Stored, lines: Iterable[str]) -> None:
        try:
            table.append(list(lines))
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def add_model(self, name: str, about: Mapping[str, Any]) -> None:
        """Note in the manifest what a model was found to be.

        Args:
            name: As in the rows.
            about: Revision, kind of weights, and the like.

        Raises:
            InputError: If it is not what this run had before, or the disk takes no more.
        """
        held, found = self._manifest["models"].get(name), json.loads(json.dumps(about))
        if held == found:
            return
        if held is not None:
            other = sorted(key for key in found if found[key] != held.get(key))
            raise InputError(
                f"`{name}` should be the model that `{self.path}` was begun with. Found another "
                f"one (it differs in {', '.join(other)}); choose another `--out`."
            )
        self._manifest["models"][name] = found
        self._write_manifest()

    def tokens(self, ids: Iterable[str] | None = None) -> list[TokenShare]:
        """The tokens of finished rows, of all or of some, each once."""
        return self._beside(1, TokenShare, ids)

    def bounds(self, ids: Iterable[str] | None = None) -> list[Bound]:
        """The bounds of finished rows, of all or of some, each once."""
        return self._beside(2, Bound, ids)

    def _beside(self, index: int, kind: type[T], ids: Iterable[str] | None) -> list[T]:
        import polars as pl

        wanted = [one for one in (self.done if ids is None else ids) if one in self.done]
        if not wanted:
            return []
        table = self._tables[index]
        frame = table.read(self._marks.get(table.name), own=True)
        return records_of(kind, frame.filter(pl.col("id").is_in(wanted)))

    def compact(self) -> None:
        """Bring the Parquet copies of all tables up to their lines.

        Raises:
            InputError: If the disk takes no more.
        """
        self._compact(own=True)

    def _compact(self, *, own: bool) -> polars.DataFrame:
        """Bring the Parquet copies up to their lines, and the manifest up to the copies.

        Args:
            own: Whether this process wrote what is behind the marks.

        Returns:
            The rows.
        """
        frame = self._tables[0].read(self._marks.get("rows"), own=own)
        marks = {table.name: self._copy(table, frame, own=own) for table in self._tables}
        if marks != self._marks:
            self._marks = marks
            self._write_manifest()
        return frame

    def _copy(self, table: Stored, rows: polars.DataFrame, *, own: bool) -> Mark:
        """Write the Parquet copy of a table unless it is there; how far it goes."""
        mark, held = table.mark(), self._marks.get(table.name)
        optional = table.name in ("bounds", "values")  # without any there is no file of them
        if (mark == held and table.readable()) or (optional and not mark.bytes):
            return mark
        frame = rows if table.name == "rows" else belonging(table.read(held, own=own), rows)
        try:
            write_parquet(frame, table.parquet)
        except OSError as problem:
            raise self._unwritable(problem) from problem
        return mark


def belonging(side: polars.DataFrame, rows: polars.DataFrame) -> polars.DataFrame:
    """What belongs to finished rows: a kill may leave tokens whose row was never written."""
    if "id" not in side.columns:  # values belong to no row
        return side
    return side.join(rows.select("id"), on="id", how="semi", maintain_order="left")


def values_of(frame: polars.DataFrame, part: str) -> dict[str, dict[str, Any]]:
    """The values of one part of an experiment, by key."""
    import polars as pl

    some = records_of(Value, frame.filter(pl.col("part") == part))
    return {one.key: json.loads(one.content) for one in some}


def check_same(path: Path, held: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Refuse a folder with the run of another specification, and name what differs.

    Args:
        path: The folder.
        held: Its specification.
        spec: The one that is wanted.

    Raises:
        InputError: If they differ.
    """
    wanted = json.loads(json.dumps(spec, default=str))
    if held != wanted:
        other = sorted(k for k in {*held, *wanted} if held.get(k) != wanted.get(k))
        raise InputError(
            f"`--out {path}` holds the run of another specification (it differs in "
            f"{', '.join(other)}); choose another `--out` or repeat the same command."
        )


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run folder.

    Args:
        path: The file.

    Returns:
        Its entries.

    Raises:
        InputError: If it cannot be read, or is of another schema.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        schema = held["schema"]
        known = {name: dict(held[name]) for name in _ENTRIES} if schema == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(
            f"`{path}` should be a readable manifest. Found {problem!r}; choose another `--out`."
        ) from problem
    if schema != SCHEMA:
        raise InputError(
            f"`{path}` should be of schema {SCHEMA}, which this version of lipscope reads. Found "
            f"schema {schema}; choose another `--out`, or read it with the version that wrote it."
        )
    return {"schema": schema, **known}


def _may_be_left(path: Path) -> bool:
    """Whether a kill before the manifest was written can have left this file."""
    return path.suffix == ".part" or path.name == LOCK
