"""The run folder: rows reach the disk as they come, survive a kill, and end as Parquet."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lipscope.errors import InputError
from lipscope.record import Measurement, TokenShare, typed_frame

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

if TYPE_CHECKING:
    import polars

_LOCK = ".lock"
Record = TypeVar("Record", Measurement, TokenShare)


class RunFolder:
    """A folder of rows: append-only while it runs, Parquet when it ends.

    Files: ``manifest.json`` (the specification and where it ran), ``rows.jsonl`` and
    ``tokens.jsonl`` (appended and flushed row by row; a row's tokens are written before
    the row itself, so that a row on disk is complete), and their Parquet copies.

    It belongs to one process at a time. Use it in a ``with`` block, whose end writes the
    Parquet files and gives the folder free.

    Args:
        path: Folder, made if it does not exist.
        spec: Everything that determines the rows.
        origin: Machine and versions (`lipscope.record.provenance`).

    Raises:
        InputError: If the folder cannot be read or written, holds another specification, or
            is in use by another process.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.spec = json.loads(json.dumps(spec, default=str))
        self._holds_this_run()  # a folder that is refused stays as it is
        self._release = self._take()
        try:
            if not self._holds_this_run():
                self._create(origin or {})
            rows = self._read("rows.jsonl", Measurement)
            self.done: dict[str, Measurement] = {row.id: row for row in rows}
            tokens = self._read("tokens.jsonl", TokenShare)
            self._tokens = {(token.id, token.index): token for token in tokens}
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
        try:
            held = dict(json.loads(manifest.read_text(encoding="utf-8"))["spec"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise InputError(
                f"`{manifest}` should be a readable manifest. Found {problem}; "
                "choose another `--out` or remove the folder."
            ) from problem
        if held != self.spec:
            other = sorted(k for k in {*held, *self.spec} if held.get(k) != self.spec.get(k))
            raise InputError(
                f"`--out {self.path}` holds the run of another specification (it differs in "
                f"{', '.join(other)}); choose another `--out` or repeat the same command."
            )
        if not os.access(self.path, os.W_OK):
            raise InputError(f"`--out {self.path}` cannot be written; choose another folder.")

    def _take(self) -> weakref.finalize[Any, Any]:
        """Lock the folder for this process; the system gives it free however the process ends.

        The lock is on a file of its own, since some network file systems give a lock back as
        soon as any handle of the locked file is closed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as problem:
            raise self._unwritable(problem) from problem
        release = weakref.finalize(self, os.close, handle)
        try:
            _lock(handle)
        except (BlockingIOError, PermissionError):
            release()
            raise InputError(
                f"`--out {self.path}` is in use by another process; wait until that one has "
                "ended, or choose another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        return release

    def _create(self, origin: Mapping[str, Any]) -> None:
        text = json.dumps(
            {"spec": self.spec, "provenance": dict(origin)},
            indent=2,
            ensure_ascii=False,
            default=str,
        )
        try:
            part = self.path / "manifest.part"
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path / "manifest.json")
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _read(self, name: str, kind: type[Record]) -> list[Record]:
        """The records of a file; lines that were never finished are as good as not written."""
        path = self.path / name
        try:
            lines = list(_read_lines(path))
        except OSError as problem:
            raise InputError(
                f"`{path}` should be a file that can be read and written. Found: "
                f"{problem.strerror}; choose another `--out` or remove the folder."
            ) from problem
        return [_restored(kind, values, f"`{path}`, line {number}") for number, values in lines]

    def append(self, row: Measurement, tokens: Iterable[TokenShare] = ()) -> None:
        """Write one finished row, its tokens first, and flush both to the disk.

        Args:
            row: The row.
            tokens: Its tokens.

        Raises:
            InputError: If the disk takes no more.
        """
        tokens = list(tokens)
        lines = [json.dumps(vars(token), ensure_ascii=False) for token in tokens]
        try:
            _append_lines(self.path / "tokens.jsonl", lines)
            _append_lines(self.path / "rows.jsonl", [row.to_json()])
        except OSError as problem:
            raise self._unwritable(problem) from problem
        self.done[row.id] = row
        self._tokens |= {(token.id, token.index): token for token in tokens}

    def tokens(self) -> list[TokenShare]:
        """The tokens of all finished rows, each once."""
        return [token for token in self._tokens.values() if token.id in self.done]

    def compact(self) -> None:
        """Write ``rows.parquet`` and ``tokens.parquet`` from the finished rows.

        Raises:
            InputError: If the disk takes no more.
        """
        rows = typed_frame(Measurement, (vars(row) for row in self.done.values()))
        tokens = typed_frame(TokenShare, (vars(token) for token in self.tokens()))
        try:
            write_parquet(rows, self.path / "rows.parquet")
            write_parquet(tokens, self.path / "tokens.parquet")
        except OSError as problem:
            raise self._unwritable(problem) from problem


def write_parquet(frame: polars.DataFrame, path: Path) -> None:
    """Write a Parquet file in one move: never a half-written file."""
    part, content = path.with_suffix(".part"), io.BytesIO()
    frame.write_parquet(content)
    part.write_bytes(content.getvalue())  # by ourselves: polars has errors of its own
    part.replace(path)


def _may_be_left(path: Path) -> bool:
    """Whether a kill before the manifest was written can have left this file."""
    return path.suffix == ".part" or path.name == _LOCK


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _append_lines(path: Path, lines: list[str]) -> None:
    if not lines:
        return
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines of a JSON-lines file by number; a torn last line is cut off the file."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n"), 1):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield number, values


def _restored(kind: type[Record], values: Mapping[str, Any], where: str) -> Record:
    """A record from its line; columns of a later version are left out.

    Raises:
        InputError: If a column that has no default is missing, or is of another type.
    """
    hints = typing.get_type_hints(kind)
    known: dict[str, Any] = {}
    wrong = None
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.name in values:
            value = known[field.name] = _as_number(hint, values[field.name])
            if not _is_a(hint, value):
                wrong = f"`{field.name}` = {json.dumps(value)[:40]}"
        elif field.default is dataclasses.MISSING:
            wrong = f"no `{field.name}`"
    if wrong is not None:
        raise InputError(
            f"{where}, should be as this version of lipscope writes it. Found {wrong}; choose "
            "another `--out` or remove the folder."
        )
    return kind(**known)


def _as_number(hint: Any, value: Any) -> Any:
    """A whole number in a column of floats as a float: not every writer of JSON tells them."""
    return float(value) if type(value) is int and _is_a(hint, 0.0) else value


def _is_a(hint: Any, value: Any) -> bool:
    """Whether a value from JSON is what the annotation says."""
    parts = typing.get_args(hint) or (hint,)
    return value in parts if typing.get_origin(hint) is Literal else type(value) in parts
