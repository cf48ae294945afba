"""A folder that one process may write: new or of this question, its own files in it, and locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lipscope.errors import InputError
from lipscope.records.files import PART, refuse_links
from lipscope.records.lock import LOCK, OWNER, take
from lipscope.records.manifest import MANIFEST, check_same, holds_rows, load_manifest, plain
from lipscope.records.run_location import Place
from lipscope.records.stored import tables


class Claim:
    """A folder that is checked, before anything in it is touched.

    Args:
        place: The folder.
        spec: Everything that determines its rows.
        growing: Whether it may hold other layers, lengths and samples.

    Attributes:
        path: The folder.
        spec: What is asked for, with what the folder held before.

    Raises:
        InputError: If it cannot be used.
    """

    def __init__(self, place: Place, spec: Mapping[str, Any], *, growing: bool) -> None:
        self.path = place.of(spec, growing=growing)
        self.spec = plain(spec)
        self._place, self._growing, self._replaces = place, growing, place.replaces
        self._made: list[Path] = []
        with self.writing():
            self._made = [one for one in (self.path, *self.path.parents) if not one.exists()]
        self._check()  # a folder that is refused stays as it is

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Tell in one line that the disk is full."""
        try:
            yield
        except OSError as problem:
            raise InputError(
                f"`--out {self.path}` cannot be written ({problem.strerror}); choose another "
                "folder."
            ) from problem

    def taken(self) -> Callable[[], None]:
        """Lock the folder for this process; what gives it free."""
        with self.writing():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                return take(self.path)
            except BlockingIOError:
                raise InputError(
                    f"`--out {self.path}` is in use by another process; wait until that one has "
                    "ended, or choose another folder."
                ) from None

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, once the folder is locked, after what a kill or a replaced run left."""
        for left in self.path.glob(f".*{PART}"):
            left.unlink()
        if self._replaces:
            self._place.clear()
            return None
        return self._check()

    def take_away(self) -> None:
        """Remove what opening made, and the folders that were not there before."""
        names = [MANIFEST, LOCK, OWNER]
        names += [f"{table.name}.{kind}" for table in tables(self.path) for kind in _KINDS]
        with contextlib.suppress(OSError):
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            for path in self._made:
                path.rmdir()

    def _check(self) -> dict[str, Any] | None:
        """The manifest of a run of this specification; anything else in there is refused."""
        with self.writing():
            if self.path.is_dir():
                self._refuse_links()
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
                f"`--out` should be a new folder or one of an earlier run. Found "
                f"`{self.path}`, which holds something else; choose another `--out`."
            )
        return None

    def _refuse_links(self) -> None:
        for table in tables(self.path):
            for path in (table.lines, table.parquet, table.damaged):
                refuse_links(path)
        for name in (MANIFEST, LOCK, OWNER):
            refuse_links(self.path / name)


_KINDS = ("jsonl", "parquet")


def _may_be_left(path: Path) -> bool:
    """Whether a kill before the first row can have left this file."""
    names = (MANIFEST, "manifest.damaged", LOCK, OWNER)
    ours = {f"{table.name}.{kind}" for table in tables(path.parent) for kind in _KINDS}
    bare = path.name in ours and path.is_file() and not path.stat().st_size
    return path.suffix == PART or path.name in names or bare
