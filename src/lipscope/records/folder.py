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
    Place,
    empty,
    holds_rows,
    other_versions,
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
from lipscope.records.tables import BESIDE, Mark, Stored, marks_of, tables

if TYPE_CHECKING:
    import polars

import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Iterator

from lipscope.records.manifest import check_same, load_manifest, plain
from lipscope.records.tables import PART, objects, refuse_links

_SAME = 1 + 1e-6  # two processes round differently


def repaired(folder: Path, tables: Sequence[Stored], marks: Mapping[str, Mark]) -> set[str]:
    """Put the files of a run in order, and say in a line what was wrong."""
    rows, *sides, _ = tables
    try:
        aside = {one.lines.name: one.repair(marks.get(one.name)) for one in tables}
        if all(one.as_marked(marks.get(one.name)) for one in tables):
            return set()
        aside[rows.lines.name] += _contradictions(rows, [*rows.told()])
        back = _brought_back(tables, marks)
        told = [*rows.told()]
    except OSError as problem:
        raise InputError(
            f"`{folder}` should hold files that can be read and written. Found: {problem}; "
            "choose another `--out`."
        ) from problem
    incomplete = _incomplete(told, sides, marks)
    said = [f"{count} damaged in `{name}`" for name, count in aside.items() if count]
    parts = [f"lines set aside in `.damaged` files: {', '.join(said)}"] * bool(said)
    every, beside = ", ".join(one.name for one in tables), ", ".join(BESIDE)
    parts += [f"brought back from Parquet: {back} of {every}"] * bool(back)
    parts += [f"rows without all of their {beside}: {len(incomplete)}"] * bool(incomplete)
    if parts:
        remark(f"`{folder}`: {'; '.join(parts)}. What is missing is measured again.")
    return incomplete


def _contradictions(rows: Stored, told: Sequence[Mapping[str, Any]]) -> int:
    """Set aside lines that stand twice, and all lines of a row whose intervals exclude each other.

    A row that is measured anew, or with more besides, has a later line of its own.
    """
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for one in told:
        id, sigma, upper = (one.get(name) for name in ("id", "sigma", "upper"))
        if isinstance(id, str) and isinstance(sigma, float) and isinstance(upper, float):
            low[id] = max(low.get(id, sigma), sigma)
            high[id] = min(high.get(id, upper), upper)
    against = {id for id in low if low[id] > high[id] * _SAME}
    lines = Counter(repr(one) for one in told)
    if not against and all(count == 1 for count in lines.values()):
        return 0
    seen: set[bytes] = set()

    def unwanted(line: bytes) -> bool:
        ((_, values),) = objects(line)
        twice = line in seen
        seen.add(line)
        return twice or values.get("id") in against

    return rows.set_aside(unwanted)


def _brought_back(tables: Sequence[Stored], marks: Mapping[str, Mark]) -> int:
    """Write anew the lines of records that only Parquet still has."""
    rows, *sides = tables
    count = sum(one.restore(marks.get(one.name), None) for one in sides)
    beside = _counts(sides[:-1], marks)
    return count if beside is None else count + rows.restore(marks.get("rows"), beside)


def _counts(
    sides: Sequence[Stored], marks: Mapping[str, Mark]
) -> Callable[[Mapping[str, Any]], dict[str, int]] | None:
    """How many lines of each side table belonged to a row, if that is still known."""
    found = []
    for side in sides:
        mark = marks.get(side.name)
        copy = side.copied(mark)
        if mark is None or (mark.bytes and copy is None):
            return None
        found.append({} if copy is None else dict(copy.group_by("id").len().iter_rows()))
    return lambda row: {
        name: counts.get(row["id"], 0) for name, counts in zip(BESIDE, found, strict=True)
    }


def _incomplete(
    told: Sequence[Mapping[str, Any]], sides: Sequence[Stored], marks: Mapping[str, Mark]
) -> set[str]:
    """Ids of rows that once had more beside them than is there."""
    missing: set[str] = set()
    for side in sides:
        wanted = dict(_most(told, side.name))
        if wanted:
            frame = side.read(marks.get(side.name))
            held = dict(frame.group_by("id").len().iter_rows())
            missing |= {id for id, count in wanted.items() if held.get(id, 0) < count}
    return missing


def _most(told: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, int]]:
    most: dict[str, int] = {}
    for one in told:
        id, count = one.get("id"), one.get(name)
        if isinstance(id, str) and type(count) is int and count > most.get(id, 0):
            most[id] = count
    yield from most.items()


# --- … ---

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK, OWNER = ".lock", ".owner"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def take(path: Path) -> Callable[[], None]:
    """Lock a folder for this process; the system gives it free however the process ends.

    The lock is on a file of its own, since some network file systems give a lock back as soon
    as any handle of the locked file is closed. Where the file system has no locks, a file names
    the owner; one that is left by a process of this machine that has ended counts for nothing.
    """
    refuse_links(path / LOCK)
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise BlockingIOError from None
    except OSError as problem:
        os.close(handle)
        if problem.errno not in _NO_LOCKS:
            raise
        return _named(path / OWNER)
    return lambda: os.close(handle)


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _named(path: Path) -> Callable[[], None]:
    """Hold a folder by a file that only one process can make."""
    me = f"{socket.gethostname()} {os.getpid()}"
    for _ in range(2):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _refuse_if_alive(path)
            path.unlink(missing_ok=True)
            continue
        os.write(handle, me.encode())
        os.close(handle)
        return lambda: _give_up(path)
    raise BlockingIOError


def _refuse_if_alive(path: Path) -> None:
    host, _, number = path.read_text(encoding="utf-8", errors="replace").rpartition(" ")
    if host and host != socket.gethostname():
        raise InputError(
            f"`--out {path.parent}` is in use by process {number} on {host}; wait until it has "
            f"ended, or delete `{path.name}` there if it was killed."
        )
    with contextlib.suppress(ProcessLookupError, ValueError):
        os.kill(int(number), 0)
        raise BlockingIOError


def _give_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


# --- … ---


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


# --- … ---

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
        """Write one finished row, its tokens and bounds first, and flush all to the disk."""
        self.extend([Finished(row, tuple(tokens), tuple(bounds))])

    def extend(self, finished: Sequence[Finished]) -> None:
        """Write finished rows in one go: one wait for the disk instead of one for each."""
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
        """Write what was computed, and flush it to the disk."""
        text = json.dumps(content, ensure_ascii=False)
        self._add(self._tables[-1], [to_line(Value(part=part, key=key, content=text))])
        return json.loads(text)

    def _add(self, table: Stored, lines: list[str]) -> None:
        with self._claim.writing():
            table.append(lines)

    def add_model(self, name: str, about: Mapping[str, Any]) -> None:
        """Note in the manifest what a model was found to be."""
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
        """Bring the Parquet copies of all tables up to their lines."""
        self._compact(own=True)

    def _compact(self, *, own: bool) -> polars.DataFrame:
        """Bring the Parquet copies up to their lines, and the manifest up to the copies."""
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
