"""Rows on the disk: complete after any interruption, refused where they do not belong."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest

from lipscope import Measurement, TokenShare
from lipscope.errors import InputError
from lipscope.records.folder import RunFolder
from lipscope.records.tables import with_checksum
from rows import SPEC, append, lines, row, tokens_of, write_lines


def filled(path: Path, count: int = 3) -> list[Measurement]:
    rows = [row(layer=i, sigma=2.0 + i) for i in range(count)]
    with RunFolder(path, SPEC) as folder:
        for one in rows:
            append(folder, one, tokens_of(one, ["a", "b\n", "é"]))
    return rows


def test_rows_are_on_the_disk_as_they_come(tmp_path):
    folder = RunFolder(tmp_path / "run", SPEC, {"machine": "here"})
    for i in range(3):
        one = row(layer=i)
        append(folder, one, tokens_of(one, ["a", "b"]))
        # read through the file system, not through the object
        assert [r["layer"] for r in lines(tmp_path / "run" / "rows.jsonl")] == list(range(i + 1))
        assert len(lines(tmp_path / "run" / "tokens.jsonl")) == 2 * (i + 1)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    files = manifest.pop("files")
    assert sorted(files) == ["bounds", "directions", "rows", "tokens", "values"]
    origin = {"machine": "here"}
    assert manifest == {"schema": 6, "spec": SPEC, "provenance": origin, "models": {}}


def test_a_folder_gives_its_rows_back(tmp_path):
    rows = filled(tmp_path / "run")
    again = RunFolder(tmp_path / "run", SPEC)
    assert again.done == {r.id: r for r in rows}
    assert [t.text for t in again.beside(TokenShare)] == ["a", "b\n", "é"] * 3


def without_copies(path: Path) -> None:
    """As a run leaves its folder that is killed before it ends."""
    for copy in path.glob("*.parquet"):
        copy.unlink()


@pytest.mark.parametrize("copies", [True, False], ids=["with copies", "without"])
@pytest.mark.parametrize("file", ["rows.jsonl", "tokens.jsonl"])
def test_a_torn_last_line_is_cut_off(tmp_path, file, copies):
    """A kill in the middle of a write, at every byte of the last line.

    What Parquet still has comes back; a row without all of its tokens is measured again.
    """
    path = tmp_path / "run"
    rows = filled(path)
    before = {f: (path / f).read_bytes() for f in ("rows.jsonl", "tokens.jsonl")}
    data = before[file]
    last = data[:-1].rfind(b"\n") + 1
    cuts = sorted({last + 1, *range(last + 2, len(data) - 1, 97), len(data) - 1})
    for cut in cuts:
        (path / file).write_bytes(data[:cut])
        if not copies:
            without_copies(path)
        with RunFolder(path, SPEC) as folder:
            assert [*folder.done.values()] == (rows if copies else rows[:2])
            if not copies:
                append(folder, rows[2], tokens_of(rows[2], ["a", "b\n", "é"]))
            assert len(folder.beside(TokenShare)) == 9
            if copies or file == "rows.jsonl":
                assert (path / file).read_bytes() == data  # the row stands where it stood
        for name, content in before.items():
            (path / name).write_bytes(content)


LONG = "x" * 200
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a column is missing": (lambda row: row.pop("sigma"), "no `sigma`"),
    "a column with a default is": (lambda row: row.pop("side"), "no `side`"),
    "a column is new": (lambda row: row.update(colour="blue"), "`colour`"),
    "all columns are": (lambda row: row.clear(), "no `error`|no `id`|no `version`"),
    "no identity": (lambda row: row.update(id=None), "`id` = null"),
    "a list": (lambda row: row.update(id=["a"]), r'`id` = \["a"\]'),
    "words for a number": (lambda row: row.update(sigma=LONG), '`sigma` = "xxx'),
    "half a token": (lambda row: row.update(num_tokens=1.5), "`num_tokens` = 1.5"),
    "yes for a number": (lambda row: row.update(seed=True), "`seed` = true"),
    "an unknown status": (lambda row: row.update(status="fine"), '`status` = "fine"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_row_that_this_version_cannot_read_is_an_error_of_one_line(tmp_path, damage):
    path = tmp_path / "run"
    filled(path)
    change, found = DAMAGES[damage]
    _rewrite(path / "rows.jsonl", change)
    before = (path / "rows.jsonl").read_bytes()
    with pytest.raises(InputError, match=rf"rows\.jsonl`, line 2.*Found ({found})") as caught:
        RunFolder(path, SPEC)
    assert "\n" not in str(caught.value) and "choose another `out`" in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))
    assert (path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["id", "index", "text", "share_in", "share_out", "norm"])
def test_a_token_that_this_version_cannot_read_is_one_too(tmp_path, name):
    path = tmp_path / "run"
    filled(path)
    before = (path / "tokens.jsonl").read_bytes()
    for change in (lambda token: token.pop(name), lambda token: token.update({name: [1]})):
        (path / "tokens.jsonl").write_bytes(before)
        _rewrite(path / "tokens.jsonl", change)
        with pytest.raises(InputError, match=rf"tokens\.jsonl`, line 2.*`{name}`"):
            RunFolder(path, SPEC)


def _rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the second line of a file."""
    values = lines(file)
    change(values[1])
    write_lines(file, values)


def test_whole_numbers_are_read_as_they_were_meant(tmp_path):
    """Not every writer of JSON tells 1.0 from 1."""
    path = tmp_path / "run"
    rows = filled(path)
    _rewrite(path / "rows.jsonl", lambda values: values.update(seconds=1))
    with RunFolder(path, SPEC) as folder:
        expected = [rows[0], dataclasses.replace(rows[1], seconds=1.0), rows[2]]
        assert list(folder.done.values()) == expected
    assert polars.read_parquet(path / "rows.parquet")["seconds"].to_list() == [0.1, 1.0, 0.1]


@pytest.mark.parametrize("torn", ['{"id": "a", "sig', '{"id": "a', "12", "null", '"text"', "\0\0"])
@pytest.mark.parametrize("file", ["rows.jsonl", "tokens.jsonl"])
def test_a_line_torn_in_the_middle_of_a_file_is_as_good_as_not_written(tmp_path, file, torn):
    """Two lines that ran into each other, or a block that the disk lost in a power cut."""
    path = tmp_path / "run"
    rows = filled(path)
    without_copies(path)
    whole = (path / file).read_text().splitlines()
    (path / file).write_text("\n".join([whole[0], torn + whole[1], torn, *whole[2:]]) + "\n")
    with RunFolder(path, SPEC) as folder:
        kept = [rows[0], rows[2]] if file == "rows.jsonl" else rows[1:]
        assert list(folder.done.values()) == kept
        assert len(folder.beside(TokenShare)) == 6
    aside = (path / file.replace("jsonl", "damaged")).read_text()
    assert aside == f"{torn}{whole[1]}\n{torn}\n"


@pytest.mark.parametrize("file", ["rows.jsonl", "tokens.jsonl"])
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path, file):
    path = tmp_path / "run"
    filled(path)
    (path / file).unlink()
    (path / file).mkdir()
    with pytest.raises(InputError, match=f"{file}.*choose another `out`") as caught:
        RunFolder(path, SPEC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["rows.jsonl", "tokens.jsonl", "tokens.parquet"])
def test_a_full_disk_is_an_error_of_one_line(tmp_path, file):
    """No file may grow beyond what one of them has."""
    path = tmp_path / "run"
    filled(path)
    folder, one = RunFolder(path, SPEC), row(layer=9)
    size = (path / file).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> None:
        append(folder, one, tokens_of(one, ["a"]))
        folder.compact()

    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10 * (file[-1] == "l"), before[1]))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(path.glob(".*.part"))


def test_what_a_full_disk_keeps_is_not_given_up(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "run", SPEC)
    append(folder, row(layer=0))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="free up space, then rerun the same command to resume"):
        append(folder, row(layer=1))


# --- one process at a time


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path, SPEC):
        with pytest.raises(InputError, match="another process, or open in this one;") as caught:
            RunFolder(path, SPEC)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with RunFolder(path, SPEC) as folder:
        assert folder.done == {}


def test_a_refusal_and_an_error_give_the_folder_free(tmp_path):
    path = tmp_path / "run"
    filled(path)
    whole = (path / "rows.jsonl").read_bytes()
    (path / "rows.jsonl").write_bytes(with_checksum("{}"))
    with pytest.raises(InputError, match="line 1") as caught:
        RunFolder(path, SPEC)
    assert caught.tb is not None  # holds on to the folder, as an interactive session does
    (path / "rows.jsonl").write_bytes(whole)
    with pytest.raises(KeyboardInterrupt), RunFolder(path, SPEC):
        raise KeyboardInterrupt
    assert len(RunFolder(path, SPEC).done) == 3


def test_without_locks_in_the_file_system_a_run_goes_on(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("lipscope.records.folder._lock", unsupported)
    assert len(filled(tmp_path / "run")) == 3


# --- what is refused


def test_tokens_of_a_row_that_was_never_finished_do_not_count(tmp_path):
    path = tmp_path / "run"
    rows = filled(path, 2)
    lost = row(layer=9)
    with (path / "tokens.jsonl").open("a") as file:
        file.writelines(
            with_checksum(json.dumps(vars(t))).decode() for t in tokens_of(lost, ["x", "y"])
        )
    folder = RunFolder(path, SPEC)
    assert {t.id for t in folder.beside(TokenShare)} == {r.id for r in rows}
    append(folder, lost, tokens_of(lost, ["x", "y"]))  # measured again, written again
    assert len([t for t in folder.beside(TokenShare) if t.id == lost.id]) == 2


@pytest.mark.parametrize("left", [[], [".manifest.json.12.part"], ["manifest.json"]])
def test_a_kill_before_the_first_row_leaves_a_folder_that_can_be_used(tmp_path, left):
    """The folder is made first, its manifest written beside and then moved into place."""
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        (path / name).write_text('{"spec": {"mod' if "part" in name else "")
    assert RunFolder(path, SPEC).done == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tol": 1e-4}, ["tol"]),
        ({"layers": [0]}, ["layers"]),  # unless the verb may grow
        ({"tol": 1e-4, "model": "smollm2"}, ["model", "tol"]),
        ({"seed": 1}, ["seed"]),  # not there before
    ],
)
def test_another_specification_is_refused_and_what_differs_is_named(tmp_path, change, named):
    path = tmp_path / "run"
    filled(path)
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    with pytest.raises(InputError, match="another specification") as caught:
        RunFolder(path, SPEC | change)
    message = str(caught.value)
    assert f"it differs in {', '.join(named)})" in message
    assert str(path) in message and "choose another `out`" in message and "\n" not in message
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds something else"):
        RunFolder(tmp_path, SPEC)
    with pytest.raises(InputError, match="holds something else"):
        RunFolder(tmp_path / "thesis.txt", SPEC)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", ["{", "[]", '{"other": 1}', "null", "[" * 100000])
def test_a_manifest_that_cannot_be_read_is_an_error_of_one_line(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(InputError, match="manifest") as caught:
        RunFolder(tmp_path, SPEC)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file / "run", Path("/proc/run"), tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot be written"):
            RunFolder(path, SPEC)


@pytest.mark.parametrize("closed", ["the folder", "its parent"])
def test_permission_denied(closed):
    """As a user without privileges: root may write anywhere."""
    with tempfile.TemporaryDirectory() as root:  # the folders of pytest are closed to others
        Path(root).chmod(0o755)
        _denied(Path(root) / "parent" / "run", closed)


def _denied(path: Path, closed: str) -> None:
    filled(path)
    code = (
        "import os, sys, pathlib\n"
        # imported before the user changes: the environment may be readable for root alone
        "from lipscope.records.folder import InputError, RunFolder\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: RunFolder(pathlib.Path(sys.argv[1]), {'model': 'minilm', 'layers': [0, 1], "
        "'tol': 1e-3})\n"
        "except InputError as problem: print(problem)\n"
    )
    shut = path if closed == "the folder" else path.parent
    shut.chmod(0o555 if closed == "the folder" else 0o600)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    shut.chmod(0o755)
    assert "cannot be written" in done.stdout, done.stderr
