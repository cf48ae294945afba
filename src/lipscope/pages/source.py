"""Folders as a report reads them: rows, bounds, tokens on demand, and the manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.errors import InputError
from lipscope.records.bound_rows import BoundRow, rows_of_run
from lipscope.records.rows import Measurement, TokenShare, records_of, typed_frame
from lipscope.records.run import Run, read_run

if TYPE_CHECKING:
    import polars

_BOUND_COLUMNS = tuple(column.name for column in dataclasses.fields(BoundRow))


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one folder holds.

    Attributes:
        folder: Where it is.
        rows: Its measurements.
        bounds: Rows of a sandwich.
        manifest: Specification and provenance; empty if there is none.
        run: The run folder; None for the folder of `lipscope bounds`.
    """

    folder: Path
    rows: list[Measurement] = field(default_factory=list)
    bounds: list[BoundRow] = field(default_factory=list)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None

    @cached_property
    def paired(self) -> bool:
        """Whether a sample is the same passage at every length."""
        return self.manifest.get("spec", {}).get("windows", "spread") == "spread"

    def text(self, name: str | None) -> str:
        """What a row was measured on, in words; "" where the folder does not say.

        Args:
            name: Of the text, in a sweep.
        """
        made = self.manifest.get("provenance", {})
        if images := made.get("images"):
            return "random pixels" if images == "random" else f"the folder “{images}”"
        named = self.manifest.get("spec", {}).get("texts", {})
        begins, sha256 = made.get("text"), made.get("text_sha256")
        if name in named:
            begins, sha256 = name, named[name]
        if not begins or not sha256:
            return ""
        said = "Python's language manual" if begins == "default" else f"the text “{begins}”"
        return f"{said} (SHA-256 {sha256[:12]})"

    @property
    def tokens(self) -> polars.LazyFrame:
        """Tokens of all windows."""
        return (typed_frame(TokenShare, []) if self.run is None else self.run.tokens).lazy()


def read_source(folder: str | Path) -> Source:
    """Read a folder that a command of lipscope wrote.

    Args:
        folder: A run folder, or one that `lipscope bounds` wrote.

    Returns:
        What it holds.

    Raises:
        InputError: If it is neither, or cannot be read.
    """
    folder = Path(folder)
    if (folder / "manifest.json").is_file():
        run = read_run(folder)
        rows, values = run.measurements(), run.bound_values()
        asked = {value.id for value in values}
        bounds = rows_of_run([row for row in rows if row.id in asked], values)
        return Source(folder=folder, rows=rows, bounds=bounds, manifest=run.manifest, run=run)
    if (folder / "bounds.jsonl").is_file():
        return Source(folder=folder, bounds=_bounds(folder / "bounds.jsonl"))
    raise InputError(
        "`DIR` should be a run folder, with a `manifest.json`, or one of `lipscope bounds`. Found "
        f"`{folder}`, which is {'neither' if folder.is_dir() else 'no folder'}."
    )


def windows_of(
    sources: Iterable[Source], ids: Iterable[str], *, most: int | None = None
) -> dict[str, list[TokenShare]]:
    """The tokens of these rows, in their order.

    Args:
        sources: The folders; an id of several is read from the first.
        ids: Rows.
        most: Only so many tokens from the beginning of each.

    Returns:
        By row, its tokens; a row whose tokens were not kept is missing.
    """
    import polars as pl

    wanted = set(ids)
    found: dict[str, list[TokenShare]] = {}
    for source in sources:
        if not wanted:
            break
        some = source.tokens.filter(pl.col("id").is_in(sorted(wanted)))
        frame = (some if most is None else some.filter(pl.col("index") < most)).collect()
        for one in records_of(TokenShare, frame.sort("id", "index")):
            found.setdefault(one.id, []).append(one)
        wanted -= found.keys()
    return found


def _bounds(path: Path) -> list[BoundRow]:
    """The lines of a sandwich."""
    try:
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            rows.append(BoundRow(**{n: values[n] for n in _BOUND_COLUMNS if n in values}))
    except (OSError, ValueError, TypeError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise InputError(
            f"`{path}` should be as `lipscope bounds` writes it. Found: {reason}."
        ) from None
    return rows
