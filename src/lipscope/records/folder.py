"""The run folder: rows reach the disk as they come, survive a kill, and end as Parquet."""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lipscope.errors import InputError, remark
from lipscope.records.manifest import (
    MANIFEST,
    empty,
    holds_rows,
    other_versions,
    write_manifest,
)
from lipscope.records.repair import repaired
from lipscope.records.rows import (
    Bound,
    Direction,
    Measurement,
    TokenShare,
    Value,
    records_of,
    to_line,
)
from lipscope.records.run_location import Place
from lipscope.records.stored import BESIDE, Mark, Stored, marks_of, tables
from lipscope.records.writable_folder import Claim

if TYPE_CHECKING:
    import polars

T = TypeVar("T")
SURVEY = "survey"
"""The part of the values that says what models were found to have."""


class Finished(NamedTuple):
    """A finished row with its side tables."""

    row: Measurement
    tokens: tuple[TokenShare, ...] = ()
    bounds: tuple[Bound, ...] = ()
    directions: tuple[Direction, ...] = ()


class RunFolder:
    """A folder of rows: append-only while it runs, Parquet when it ends.

    Files: ``manifest.json`` (specification, versions, machine, models, digests),
    ``rows.jsonl``, ``tokens.jsonl``, ``bounds.jsonl`` and ``directions.jsonl`` (each line with a
    checksum, appended and brought to the disk; what belongs to a row is written before the row
    itself, so that a row on disk is complete), ``values.jsonl`` (what an experiment computed
    besides rows, and what models were found to have), and their Parquet copies.

    It belongs to one process at a time. Use it in a ``with`` block, whose end writes the
    Parquet files and gives the folder free; a new folder that got nothing is taken away again.
    `lipscope.records.run.read_run` only reads.

    Args:
        path: Folder, made if it does not exist.
        spec: Everything that determines the rows.
        origin: Machine and versions (`lipscope.records.rows.provenance`).
        growing: Whether it may hold a run of other layers, lengths and samples, which then are
            asked for too.

    Attributes:
        spec: What this run asks for, with what the folder held before.
        done: Rows that need no measuring, by their ids: whole, and not failed for want of a
            worker, memory or disk.

    Raises:
        InputError: If the folder cannot be read or written, holds another specification, or
            is in use by another process.
    """

    def __init__(
        self,
        path: Path | Place,
        spec: Mapping[str, Any],
        origin: Mapping[str, Any] | None = None,
        *,
        growing: bool = False,
    ) -> None:
        place = path if isinstance(path, Place) else Place(Path(path))
        self._claim = Claim(place, spec, growing=growing)
        self.path, self.spec = self._claim.path, self._claim.spec
        self._tables = tables(self.path)
        self._marks: dict[str, Mark] = {}
        self._manifest = empty(self.spec, origin or {})
        self._release = weakref.finalize(self, self._claim.taken())
        try:
            with self._claim.writing():
                self.done: dict[str, Measurement] = self._open()
        except InputError:
            self._release()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        try:
            if kind is not None and self._is_bare():
                self._release()
                self._claim.take_away()
            else:
                self.compact()
        finally:
            self._release()

    # --- opening

    def _open(self) -> dict[str, Measurement]:
        """The finished rows, after every file was put in order."""
        held = self._claim.manifest()
        if held is not None:
            if others := other_versions(held["provenance"], self._manifest["provenance"]):
                remark(
                    f"`{self.path}` was begun with {others}; what it holds is kept, and `--force` "
                    "makes all of it anew."
                )
            self._manifest |= held
            self._marks = marks_of(held["files"])
        else:
            if os.path.lexists(self.path / MANIFEST):
                (self.path / MANIFEST).replace(self.path / "manifest.damaged")
            if holds_rows(self.path):
                remark(f"The manifest of `{self.path}` was lost, and is made anew from its rows.")
            self._write_manifest()
        incomplete = repaired(self.path, self._tables, self._marks)
        frame = self._compact(own=False)
        rows = {one.id: one for one in records_of(Measurement, frame)}
        done = {id: row for id, row in rows.items() if id not in incomplete and not row.passing}
        if again := sum(row.passing for row in rows.values()):
            remark(
                f"`{self.path}`: {again} row{'s' * (again > 1)} failed for want of a worker, "
                "memory or disk, and will be tried again."
            )
        return done

    def planned(self, ids: Collection[str]) -> None:
        """Say which rows this run asks for, when all its models have been looked at.

        Rows of windows that more lengths or samples have moved are set aside in
        ``rows.earlier``, so that no passage is counted twice; others that nobody asked for
        are named.

        Args:
            ids: Their ids.

        Raises:
            InputError: If the disk is full.
        """
        grown = self._manifest["spec"] != self.spec
        wanted, rows = set(ids), self._tables[0]
        frame = rows.read(self._marks.get(rows.name), own=True)
        unknown = {one.id: one for one in records_of(Measurement, frame) if one.id not in wanted}
        if grown and unknown:
            with self._claim.writing():
                count = rows.set_aside(
                    lambda line: json.loads(line)["id"] in unknown, self.path / "rows.earlier"
                )
            self.done = {id: row for id, row in self.done.items() if id in wanted}
            del self._marks[rows.name]  # else the copy would give them back
            self._compact(own=True)
            remark(
                f"`{self.path}`: {count} row{'s' * (count > 1)} of windows that moved with the new "
                "lengths or samples went to `rows.earlier`; they are measured anew."
            )
        elif unknown:
            first = next(iter(unknown.values()))
            remark(
                f"`{self.path}` holds {len(unknown)} row{'s' * (len(unknown) > 1)} that this run "
                f"does not ask for, such as {first.id} ({first.model}, layer {first.layer}, "
                f"{first.num_tokens} tokens); they are kept."
            )
        if grown:
            self._manifest["spec"] = self.spec
            self._write_manifest()

    def _is_bare(self) -> bool:
        """Whether nothing was found worth keeping."""
        rows, *_, values = self._tables
        return not any(rows.told()) and all(one.get("part") == SURVEY for one in values.told())

    # --- writing

    def _write_manifest(self) -> None:
        files = {name: vars(mark) for name, mark in self._marks.items()}
        self._manifest |= {"files": files}
        with self._claim.writing():
            write_manifest(self.path, self._manifest)

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
            InputError: If the disk is full.
        """
        self.extend([Finished(row, tuple(tokens), tuple(bounds))])

    def extend(self, finished: Sequence[Finished]) -> None:
        """Write finished rows in one go: one wait for the disk instead of one for each.

        Args:
            finished: Rows with what belongs to them.

        Raises:
            InputError: If the disk is full.
        """
        rows, *sides, _ = self._tables
        lines = self._lines(finished)
        for side in sides:
            records = (record for one in finished for record in getattr(one, side.name))
            self._add(side, [to_line(record) for record in records])
        self._add(rows, lines)
        self.done |= {one.row.id: one.row for one in finished}

    def _lines(self, finished: Sequence[Finished]) -> list[str]:
        """Rows as lines, which say how much of each side table belongs to each."""
        again = [one.row.id for one in finished if one.row.id in self.done]
        _, *sides, _ = self._tables
        held: list[Counter[str]] = []
        for index, side in enumerate(sides, 1):
            records = [*self._beside(index, side.kind, again)] if again else []
            records += [record for one in finished for record in getattr(one, side.name)]
            keys = {tuple(getattr(record, name) for name in side.key) for record in records}
            held.append(Counter(key[0] for key in keys))
        lines = []
        for one in finished:
            counts = {name: of[one.row.id] for name, of in zip(BESIDE, held, strict=True)}
            lines.append(
                json.dumps(one.row.to_dict() | counts, ensure_ascii=False, allow_nan=False)
            )
        return lines

    def values(self, part: str) -> dict[str, dict[str, Any]]:
        """What was computed for a part of an experiment, by key, in the order of `add_value`."""
        return values_of(self._tables[-1].read(self._marks.get("values"), own=True), part)

    def add_value(self, part: str, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write what was computed, and flush it to the disk.

        Args:
            part: Part of the experiment.
            key: Digest of what determines the value.
            content: Plain values.

        Returns:
            The content as it will be read back.

        Raises:
            InputError: If the disk is full.
        """
        text = json.dumps(content, ensure_ascii=False)
        self._add(self._tables[-1], [to_line(Value(part=part, key=key, content=text))])
        return json.loads(text)

    def _add(self, table: Stored, lines: list[str]) -> None:
        with self._claim.writing():
            table.append(lines)

    def add_model(self, name: str, about: Mapping[str, Any]) -> None:
        """Note in the manifest what a model was found to be.

        Args:
            name: As in the rows.
            about: Revision, kind of weights, and the like.

        Raises:
            InputError: If it is not what this run had before, or the disk is full.
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

    def directions(self, ids: Iterable[str] | None = None) -> list[Direction]:
        """The directions of finished rows, of all or of some, each part once."""
        return self._beside(3, Direction, ids)

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
            InputError: If the disk is full.
        """
        self._compact(own=True)

    def _compact(self, *, own: bool) -> polars.DataFrame:
        """Bring the Parquet copies up to their lines, and the manifest up to the copies.

        Args:
            own: Whether this process wrote what is after the marks.

        Returns:
            The rows.
        """
        frame = self._tables[0].read(self._marks.get("rows"), own=own)
        marks = {}
        for table in self._tables:
            held = self._marks.get(table.name)

            def content(table: Stored = table, held: Mark | None = held) -> polars.DataFrame:
                rows = table.name == "rows"
                return frame if rows else belonging(table.read(held, own=own), frame)

            with self._claim.writing():
                marks[table.name] = table.compacted(held, content)
        if marks != self._marks:
            self._marks = marks
            self._write_manifest()
        return frame


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
