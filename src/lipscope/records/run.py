"""Reading a run: the rows of a folder and what belongs to them, while it runs or after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.display import Shown
from lipscope.errors import InputError, shown
from lipscope.records.folder import SURVEY, belonging, values_of
from lipscope.records.manifest import read_manifest
from lipscope.records.rows import Bound, Direction, Measurement, TokenShare, records_of
from lipscope.records.tables import marks_of, tables

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A run folder as it is read: its tables and the manifest.

    Attributes:
        path: The folder.
        manifest: ``schema``, ``spec``, ``provenance`` (versions, machine), ``models``
            (revision and weights of each) and ``files`` (digests).
    """

    path: Path
    manifest: Mapping[str, Any]

    @cached_property
    def rows(self) -> polars.DataFrame:
        """One line for each finished row, in the order in which they were finished."""
        return self._read(0)

    @cached_property
    def tokens(self) -> polars.DataFrame:
        """One line for each token; ``id`` says for which row."""
        return belonging(self._read(1), self.rows)

    @cached_property
    def bounds(self) -> polars.DataFrame:
        """One line for each theorem that was asked about a row; ``id`` says for which one."""
        return belonging(self._read(2), self.rows)

    @cached_property
    def directions(self) -> polars.DataFrame:
        """One line for each part of a leading direction of a row; ``id`` says for which one."""
        return belonging(self._read(3), self.rows)

    def values(self, part: str) -> polars.DataFrame:
        """Values that an experiment computed for one of its parts, a line each, with their keys."""
        import polars as pl

        lines = [{"key": key} | content for key, content in self.contents(part).items()]
        return pl.DataFrame(lines, infer_schema_length=None)

    def parts(self) -> list[str]:
        """The parts of which `values` has some."""
        return sorted(set(self._read(-1)["part"]) - {SURVEY})

    def contents(self, part: str) -> dict[str, dict[str, Any]]:
        """The same by key."""
        return values_of(self._read(-1), part)

    def measurements(self) -> list[Measurement]:
        """The rows as records."""
        return records_of(Measurement, self.rows)

    def token_shares(self, ids: Sequence[str] | None = None) -> list[TokenShare]:
        """The tokens of some rows, or of all, as records."""
        return records_of(TokenShare, _of(self.tokens, ids))

    def bound_values(self, ids: Sequence[str] | None = None) -> list[Bound]:
        """The bounds of some rows, or of all, as records."""
        return records_of(Bound, _of(self.bounds, ids))

    def direction_parts(self, ids: Sequence[str] | None = None) -> list[Direction]:
        """The directions of some rows, or of all, as records."""
        return records_of(Direction, _of(self.directions, ids))

    def _read(self, index: int) -> polars.DataFrame:
        table = tables(self.path)[index]
        return table.read(marks_of(self.manifest["files"]).get(table.name))


def read_run(path: str | Path) -> Run:
    """Open a run folder for reading; nothing in it is written.

    Holds also while a run goes on: then the rows that are finished at this moment are read. Lines
    are believed, and the Parquet copies as far as they are theirs; a damaged line is left out,
    and said.

    Args:
        path: A run folder, whoever wrote it.

    Returns:
        The run.

    Raises:
        InputError: If it is no run folder, cannot be read, or is of another schema.
    """
    if not isinstance(path, str | Path) or not os.path.isdir(path):
        raise InputError(f"`{shown(path)}` should be a run folder. Found no such folder.")
    return Run(Path(path), read_manifest(Path(path)))


def _of(frame: polars.DataFrame, ids: Sequence[str] | None) -> polars.DataFrame:
    import polars as pl

    return frame if ids is None else frame.filter(pl.col("id").is_in(list(ids)))
