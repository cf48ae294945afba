"""The manifest of a run folder: specification, versions, models and file digests."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lipscope.errors import InputError, remark
from lipscope.records.rows import SCHEMA
from lipscope.records.tables import is_intact, opened, replaced, tables

MANIFEST = "manifest.json"
LOCK = ".lock"
_VERSIONS = ("lipscope", "torch", "transformers")
_ENTRIES = ("spec", "provenance", "models", "files")
# Options in which a run may extend the folder.
_GROWING = ("layers", "lengths", "samples")
_KINDS = ("jsonl", "parquet", "damaged", "earlier")  # files of a table, removed by `force`


def empty(spec: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without models and files."""
    return {
        "schema": SCHEMA,
        "spec": plain(spec),
        "provenance": dict(origin),
        "models": {},
        "files": {},
    }


def plain(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification after a JSON round trip."""
    return json.loads(json.dumps(spec, default=str))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; an empty one if it is lost but there are rows."""
    path = folder / MANIFEST
    if not os.path.lexists(path) and not holds_rows(folder):
        raise InputError(
            f"`{folder}` should be a run folder, with a `{MANIFEST}`. Found "
            f"{'none in it' if folder.is_dir() else 'no such folder'}."
        )
    held = load_manifest(path)
    if held is None:
        remark(f"The manifest of `{folder}` is lost; its rows are read without it.")
        return empty({}, {})
    return held


def load_manifest(path: Path) -> dict[str, Any] | None:
    """The content of a manifest; None if there is none, or if it is lost but there are rows."""
    content = b"?"
    try:
        with opened(path) as file:
            content = file.read()
        held = json.loads(content)
        schema = held["schema"]
        known = _known_entries(held) if schema == SCHEMA else {}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if holds_rows(path.parent) or (isinstance(problem, ValueError) and not content.strip()):
            return None
        found = problem.strerror if isinstance(problem, OSError) else "something else"
        raise InputError(
            f"`{path}` should be a readable manifest. Found {found}; choose another `out`."
        ) from problem
    if schema != SCHEMA:
        raise InputError(
            f"`{path}` should be of schema {SCHEMA}, which this version of lipscope reads. Found "
            f"schema {str(schema)[:20]}; choose another `out`, or read it with the version that "
            "wrote it."
        )
    return {"schema": schema, **known}


def _known_entries(held: Mapping[str, Any]) -> dict[str, Any]:
    """The known entries of a manifest, after a type check."""
    json.dumps(held, ensure_ascii=False).encode()  # raises for lone surrogates
    known = {name: dict(held[name]) for name in _ENTRIES}
    for some in (known["provenance"], *known["models"].values()):
        for value in some.values():
            if isinstance(value, dict | list):
                raise TypeError(value)
    return known


def other_versions(held: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Differences between the versions in a manifest and the current ones; empty if none.

    >>> other_versions({"lipscope": "0.1", "torch": "2.5"}, {"lipscope": "0.2", "torch": "2.5"})
    'lipscope 0.1 (now 0.2)'
    """
    pairs = [(name, held.get(name), now.get(name)) for name in _VERSIONS]
    return ", ".join(
        f"{n} {was} (now {is_})" for n, was, is_ in pairs if was and is_ and was != is_
    )


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest atomically."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n"
    replaced(folder / MANIFEST, text.encode("utf-8", "replace"))


def holds_rows(folder: Path) -> bool:
    """Whether a folder holds rows of a run: at least one line with a valid checksum."""
    path = folder / "rows.jsonl"
    if not os.path.lexists(path):
        return False
    try:
        with opened(path) as file:
            return any(is_intact(line.strip(b"\xef\xbb\xbf\r\n")) for line in file)
    except (InputError, OSError):
        return False


def refuse_record(path: Path) -> None:
    """Refuse to overwrite a file of a run's record, directly or through a link."""
    for one in (path, Path(os.path.realpath(path))):
        name = one.name.lower()  # some file systems are case-insensitive
        ours = name in (MANIFEST, LOCK) or name.endswith(tuple(f".{kind}" for kind in _KINDS))
        if ours and (holds_rows(one.parent) or _spec(one.parent) is not None):
            raise InputError(
                f"`{path}` should not be a file of a run's record, written by the run only. Found "
                f"the run folder `{one.parent}`; choose another name, or another folder."
            )


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is not part of the record of a run, atomically."""
    refuse_record(path)
    replaced(path, content)


def joined(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The union of two specifications in layers, lengths and samples.

    >>> joined({"layers": [3], "samples": 5, "map": "heads"}, {"layers": [0], "samples": 2})
    {'layers': [0, 3], 'samples': 5}
    """
    found = dict(wanted)
    for name in _GROWING:
        one, other = held.get(name), wanted.get(name)
        if isinstance(one, int) and isinstance(other, int):
            found[name] = max(one, other)
        elif isinstance(one, list) and isinstance(other, list):
            found[name] = sorted({*one, *other})
        elif name == "layers":  # all of them
            found[name] = None
    return found


def check_same(
    path: Path, held: Mapping[str, Any], wanted: Mapping[str, Any], *, growing: bool = False
) -> dict[str, Any]:
    """Refuse a folder with a run of another specification; the message names the differences."""
    wanted = plain(wanted)
    both = joined(held, wanted) if growing else wanted
    names = {*held, *wanted} - (set(_GROWING) if growing else set())
    other = sorted(name for name in names if held.get(name) != wanted.get(name))
    if other:
        raise InputError(
            f"`out = {path}` holds the run of another specification (it differs in "
            f"{', '.join(other)}); choose another `out`, use the same options, or replace it "
            "(`--force` on the command line)."
        )
    return both


# --- where a run goes ------------------------------------------------------------------------

_RUNS = Path("runs")
_DAY = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-"


class Place:
    """The folder of a run.

    Args:
        path: The folder. None selects a folder in ``runs``: an existing one with the same
            specification, or else a new one, with a number if the name is taken.
        name: Base name of a selected folder.
        dated: Whether the name of a selected folder contains the date; if not, an existing folder
            that the specification extends is selected too.
        force: Whether a run of another specification is replaced.

    Attributes:
        path: The folder, once it is selected.
    """

    def __init__(
        self, path: Path | None, name: str = "", *, dated: bool = True, force: bool = False
    ) -> None:
        self._given, self._name, self._dated, self._force = path, name, dated, force
        self.path = path or _RUNS

    def of(self, spec: Mapping[str, Any], *, growing: bool) -> Path:
        """The folder for a specification."""
        if self._given is None:
            self.path = self._chosen(plain(spec), growing=growing and not self._dated)
        return self.path

    def clear(self) -> None:
        """Remove the run to be replaced; other files are left in place."""
        names = [f"{table.name}.{kind}" for table in tables(self.path) for kind in _KINDS]
        for name in (*names, MANIFEST):
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.glob("worst*.npz"):
            path.unlink(missing_ok=True)

    @property
    def replaces(self) -> bool:
        """Whether an earlier run in this folder is replaced."""
        return self._force and (holds_rows(self.path) or _spec(self.path) is not None)

    def _chosen(self, spec: Mapping[str, Any], *, growing: bool) -> Path:
        plain_name = re.sub(r"[^A-Za-z0-9._-]+", "-", self._name)[:100].strip("-.") or "model"
        pattern = (_DAY if self._dated else "") + re.sub(r"([\[\]*?])", r"[\1]", plain_name)
        held = [*_RUNS.glob(pattern), *_RUNS.glob(f"{pattern}-[0-9]*")]
        specs = ((path, _spec(path)) for path in sorted(held, reverse=True))
        known = [(path, one) for path, one in specs if one is not None]
        same = [path for path, one in known if one == spec]
        same += [path for path, one in known if growing and joined(one, spec) == joined(spec, one)]
        if same:
            return same[0]
        day = f"{datetime.date.today():%Y-%m-%d}-" if self._dated else ""
        names = (f"{day}{plain_name}" + (f"-{k}" if k > 1 else "") for k in count(1))
        return next(p for name in names if not (p := _RUNS / name).exists())


def _spec(path: Path) -> Mapping[str, Any] | None:
    """The specification of a run folder; None for other folders."""
    try:
        held = load_manifest(path / MANIFEST)
    except InputError:
        return None
    return None if held is None else held["spec"]
