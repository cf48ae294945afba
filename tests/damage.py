"""Ways in which the files of a run are damaged, and what must be true afterwards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from lipscope.errors import InputError
from lipscope.records.folder import Finished, RunFolder, read_run
from lipscope.records.rows import Bound, Measurement
from lipscope.records.tables import with_checksum
from rows import SPEC, row, tokens_of

FILES = ("rows.jsonl", "tokens.jsonl", "bounds.jsonl", "manifest.json", "rows.parquet",
         "tokens.parquet", "bounds.parquet")  # fmt: skip


def finished(count: int = 4) -> list[Finished]:
    """Rows with two tokens and a bound each."""
    rows = [row(layer=i, sigma=2.0 + i / 7) for i in range(count)]
    return [Finished(one, tuple(tokens_of(one, ["é", "b\n"])), (_bound(one),)) for one in rows]


def _bound(of: Measurement) -> Bound:
    values = {"statement": "3.3", "cite": "c", "kind": "upper", "scope": "local"}
    return Bound(id=of.id, theorem="t", metric="frobenius", value=6.0, **values)


def made(path: Path, wanted: list[Finished]) -> Path:
    """A finished run folder."""
    with RunFolder(path, SPEC, {"machine": "here"}) as folder:
        folder.extend(wanted)
    return path


T = TypeVar("T")
Damage = Callable[[Path], object]


def flips(positions: int) -> Iterator[tuple[str, Damage]]:
    """One bit of a file, at places spread over it."""
    for k in range(positions):

        def flip(path: Path, k: int = k) -> None:
            data = bytearray(path.read_bytes())
            at = (2 * k + 1) * len(data) // (2 * positions)
            data[at] ^= 1 << k % 7
            path.write_bytes(bytes(data))

        yield f"bit {k}", flip


def cuts(positions: int) -> Iterator[tuple[str, Damage]]:
    """The file ends early."""
    for k in range(positions):
        yield f"cut {k}", lambda path, k=k: os.truncate(path, k * path.stat().st_size // positions)


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    return lambda path: path.write_bytes(b"".join(change(path.read_bytes().splitlines(True))))


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE = {
    "a huge number": '{"id": "x", "seed": 1%s}' % ("0" * 5000),
    "a number beyond 64 bits": '{"id": "x", "schema": 36893488147419103232}',
    "deep nesting": "[" * 100_000,
    "half a surrogate": '{"id": "\\ud800"}',
    "infinity": '{"id": "x", "sigma": 1e400}',
    "no object": "12",
}
WHOLE: dict[str, Damage] = {
    "gone": Path.unlink,
    "a link": _linked,
    "a pipe": _piped,
    "a folder": _as_folder,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "of Windows": lambda path: path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n")),
    "twice": _lines(lambda lines: lines + lines),
    "backwards": _lines(lambda lines: lines[::-1]),
    "without its second line": _lines(lambda lines: lines[:1] + lines[2:]),
    "two lines in one": _lines(lambda lines: [lines[0].rstrip(), *lines[1:]]),
} | {
    f"{name}, {kind}": _lines(lambda lines, line=line: [*lines, line + b"\n"])
    for name, text in HOSTILE.items()
    for kind, line in (("bare", text.encode()), ("with a checksum", with_checksum(text).rstrip()))
}  # fmt: skip


class Count(NamedTuple):
    """What came of a campaign."""

    tried: int
    refused: int
    survived: int


def campaign(root: Path, damages: list[tuple[str, Damage]], *, copies: bool) -> Count:
    """Damage every file in every way; read it, go on with it, and compare.

    Reading writes nothing and never gives a row another sigma; the next run either refuses in one
    line or, having measured what is missing, ends with what was there.
    """
    wanted = finished()
    whole = made(root / "whole", wanted)
    expected = {one.row.id: one.row for one in wanted}
    tried = refused = survived = 0
    for file in FILES:
        for name, damage in damages:
            path = root / "run"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
            if not copies and file.endswith("parquet"):
                continue
            damage(path / file)
            for copy in path.glob("*.parquet") if not copies else ():
                copy.unlink()
            tried += 1
            where = f"{file}: {name}"
            before = snapshot(path)
            read = one_line(lambda path=path: read_run(path).measurements(), where)
            for one in read or ():
                assert one == expected.get(one.id), where
            assert snapshot(path) == before, where
            again = one_line(lambda path=path: _gone_on(path, wanted), where)
            if again is None:
                refused += 1
                continue
            run = read_run(path)
            found = {one.id: one for one in run.measurements() if one.id in expected}
            assert found == expected, where
            assert (len(run.tokens), len(run.bounds)) == (8, 4), where
            survived += 1
    assert tried == refused + survived
    return Count(tried, refused, survived)


def one_line(ask: Callable[[], T], where: str) -> T | None:
    try:
        return ask()
    except InputError as problem:
        said = str(problem)
    assert "\n" not in said and len(said) < 600, where
    assert "remove" not in said and "delete" not in said, where
    return None


def _gone_on(path: Path, wanted: list[Finished]) -> bool:
    """What the same command does: it measures what the folder does not have."""
    with RunFolder(path, SPEC) as folder:
        folder.extend([one for one in wanted if one.row.id not in folder.done])
    with RunFolder(path, SPEC) as folder:
        assert len([one for one in wanted if one.row.id in folder.done]) == len(wanted)
    return True


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file of a folder as it is."""
    found = {}
    for file in sorted(path.iterdir()):
        about = file.lstat()
        data = file.read_bytes() if file.is_file() else b""
        found[file.name] = (about.st_mtime_ns, about.st_size, data)
    return found


def changed_manifest(path: Path, **change: object) -> None:
    """Other entries in a manifest."""
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
