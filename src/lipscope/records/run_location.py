"""The location of a run: a folder that was named, or one chosen once its question is known."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lipscope.errors import InputError
from lipscope.records.manifest import MANIFEST, holds_rows, joined, load_manifest, plain

_RUNS = Path("runs")
_DAY = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-"
# What a run leaves, and `force` removes.
_TABLES = ("rows", "tokens", "bounds", "directions", "values")
_KINDS = ("jsonl", "parquet", "damaged", "earlier")


class Place:
    """The folder of a run.

    Args:
        path: The folder; None for one in ``runs`` that is chosen: that of the same question,
            whenever it was asked, or else a new one, numbered where the name is taken.
        name: What a chosen folder is called after.
        dated: Whether it is called after the day too; else one that the question only extends is
            the same.
        force: Whether a run of another question is replaced.

    Attributes:
        path: The folder, once it is known.
    """

    def __init__(
        self, path: Path | None, name: str = "", *, dated: bool = True, force: bool = False
    ) -> None:
        self._given, self._name, self._dated, self._force = path, name, dated, force
        self.path = path or _RUNS

    def of(self, spec: Mapping[str, Any], *, growing: bool) -> Path:
        """The folder of a question.

        Args:
            spec: Everything that determines its rows.
            growing: Whether a folder with other layers, lengths and samples may take it.
        """
        if self._given is None:
            self.path = self._chosen(plain(spec), growing=growing and not self._dated)
        return self.path

    def clear(self) -> None:
        """Remove the run that is replaced; what is not of a run stays."""
        if not self._force:
            return
        names = [f"{table}.{kind}" for table in _TABLES for kind in _KINDS]
        for name in (*names, MANIFEST):
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.glob("worst*.npz"):
            path.unlink(missing_ok=True)

    @property
    def replaces(self) -> bool:
        """Whether an earlier run here gives way."""
        return self._force and (holds_rows(self.path) or _spec(self.path) is not None)

    def _chosen(self, spec: Mapping[str, Any], *, growing: bool) -> Path:
        plain_name = re.sub(r"[^A-Za-z0-9._-]+", "-", self._name)[:100].strip("-.") or "model"
        pattern = (_DAY if self._dated else "") + re.sub(r"([\[\]*?])", r"[\1]", plain_name)
        held = [*_RUNS.glob(pattern), *_RUNS.glob(f"{pattern}-[0-9]*")]
        specs = [(path, _spec(path)) for path in sorted(held, reverse=True)]
        for same in (lambda s: s == spec, lambda s: growing and _extends(s, spec)):
            for path, one in specs:
                if one is not None and same(one):
                    return path
        day = f"{datetime.date.today():%Y-%m-%d}-" if self._dated else ""
        names = (f"{day}{plain_name}" + (f"-{k}" if k > 1 else "") for k in count(1))
        return next(p for name in names if not (p := _RUNS / name).exists())


def _extends(held: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    return joined(held, spec) == joined(spec, held)


def _spec(path: Path) -> Mapping[str, Any] | None:
    """The specification of a folder, if it is one of a run."""
    try:
        held = load_manifest(path / MANIFEST)
    except InputError:
        return None
    return None if held is None else held["spec"]
