"""Campaigns against run folders: a sample in every run of the tests, the rest marked slow.

Each counts what it tried and what survived; `pytest -m slow -s tests/cli/test_reliability.py`
prints the numbers of `docs/reliability.md`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import lipscope as ls
from command import BERT, TEXT
from damage import (
    WHOLE,
    Count,
    campaign,
    changed_manifest,
    cuts,
    finished,
    flips,
    made,
    one_line,
    snapshot as state,
)
from lipscope.errors import InputError
from lipscope.records import tables
from lipscope.records.folder import Finished, RunFolder, read_run
from lipscope.records.manifest import Place
from lipscope.records.rows import AGAIN, TokenShare
from rows import SPEC, append, row, tokens_of
from sweeps import in_this_process


@pytest.fixture
def told(capsys):
    """Print the outcome of a campaign past pytest."""

    def tell(name: str, count: Count) -> None:
        with capsys.disabled():
            print(
                f"\n{name}: {count.tried} tried, {count.refused} refused in one line, "
                f"{count.survived} went on, 0 rows lost or changed"
            )

    return tell


# --- damage


def test_damage_a_sample(tmp_path):
    some = [*flips(1), *cuts(1), *random.Random(0).sample(sorted(WHOLE.items()), 4)]
    count = campaign(tmp_path, some, copies=True)
    assert count.survived > count.refused


def test_damage_of_a_folder_without_copies_a_sample(tmp_path):
    some = [*flips(1), *cuts(2), ("gone", WHOLE["gone"]), ("twice", WHOLE["twice"])]
    assert campaign(tmp_path, some, copies=False).refused == 0


@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False], ids=["with Parquet", "without Parquet"])
def test_damage(tmp_path, told, copies):
    every = [*flips(25), *cuts(12), *WHOLE.items()]
    told(f"damaged files, {'with' if copies else 'without'} Parquet",
         campaign(tmp_path, every, copies=copies))  # fmt: skip


def test_a_digit_that_flips_is_found_set_aside_and_said_in_one_line(tmp_path, caplog):
    wanted = finished()
    path = made(tmp_path, wanted)
    for copy in path.glob("*.parquet"):
        copy.unlink()
    data = (path / "rows.jsonl").read_bytes()
    (path / "rows.jsonl").write_bytes(data.replace(b'"sigma": 2.0,', b'"sigma": 9.0,'))
    assert [one.layer for one in read_run(path).measurements()] == [1, 2, 3]
    assert "1 damaged line, left out here" in caplog.text
    caplog.clear()
    with RunFolder(path, SPEC) as folder:
        assert [one.layer for one in folder.done.values()] == [1, 2, 3]
        (said,) = [one for one in caplog.messages if "damaged" in one]
        assert "1 damaged in `rows.jsonl`" in said and "measured again" in said
        folder.extend(wanted[:1])
    assert b'"sigma": 9.0,' in (path / "rows.damaged").read_bytes()
    assert {one.id: one.sigma for one in read_run(path).measurements()} == {
        one.row.id: one.row.sigma for one in wanted
    }


def test_another_parquet_file_beside_good_lines_is_not_believed(tmp_path):
    one, other = made(tmp_path / "a", finished()), tmp_path / "b"
    with RunFolder(other, SPEC) as folder:
        append(folder, row(layer=0, sigma=77.0))
    shutil.copy(other / "rows.parquet", one / "rows.parquet")
    assert [r.sigma for r in read_run(one).measurements()] == [f.row.sigma for f in finished()]
    with RunFolder(one, SPEC):
        pass
    import polars

    assert 77.0 not in polars.read_parquet(one / "rows.parquet")["sigma"].to_list()


def test_a_row_without_all_of_its_tokens_is_not_done(tmp_path):
    wanted = finished()
    path = made(tmp_path, wanted)
    for name in ("tokens.jsonl", "bounds.jsonl"):
        STATES["killed"](path)
        lines = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(line for line in lines if line != lines[-1]))
        with RunFolder(path, SPEC) as folder:
            assert [one.layer for one in folder.done.values()] == [0, 1, 2], name
            folder.extend(wanted[3:])
    assert len(read_run(path).tokens) == 8 and len(read_run(path).bounds) == 4


def test_a_manifest_that_is_lost_is_made_anew_and_no_row_with_it(tmp_path):
    for k, content in enumerate([None, b"", b"{", b"\0" * 300, b"[" * 100_000]):
        path = made(tmp_path / str(k), finished())
        (path / "manifest.json").unlink()
        if content is not None:
            (path / "manifest.json").write_bytes(content)
        assert len(read_run(path).measurements()) == 4
        with RunFolder(path, SPEC) as folder:
            assert len(folder.done) == 4
        assert read_run(path).manifest["spec"] == SPEC


@pytest.mark.parametrize(
    "change",
    [{"files": 3}, {"models": {"a": 1}}, {"provenance": {"a": {"b": 1}}}, {"spec": [1]},
     {"files": {"rows": {"bytes": 1e400, "lines": -1, "sha256": 0, "copy": None}}},
     {"models": {"\ud800": {}}}, {"schema": 10**400}],
    ids=str,
)  # fmt: skip
def test_a_hostile_manifest_gives_one_line_at_most(tmp_path, change):
    path = made(tmp_path, finished())
    changed_manifest(path, **change)
    for ask in (lambda: read_run(path).measurements(), lambda: RunFolder(path, SPEC).done):
        assert len(one_line(ask, str(change)) or "four") == 4


# --- power cuts


class Disk:
    """What is left of a folder after a power cut: what was synced, and nothing else.

    The most unkind file system that POSIX allows: a name may reach the disk before its content,
    and content that nobody synced is gone.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.content: dict[int, bytes] = {}
        self.names: dict[str, int] = {}
        self.states: list[tuple[dict[str, bytes], int]] = []
        self.acknowledged = 0
        real = os.fsync

        def fsync(handle: int) -> None:
            self.cut()
            real(handle)
            about = os.fstat(handle)
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if path.is_dir():
                self.names = self.present()
            else:
                self.content[about.st_ino] = path.read_bytes()
            self.cut()

        monkeypatch.setattr(tables.os, "fsync", fsync)

    def present(self) -> dict[str, int]:
        return {f.name: f.stat().st_ino for f in self.folder.iterdir()}

    def cut(self) -> None:
        """The power goes: with the names as they were synced, or as they are."""
        if not self.folder.exists():
            return
        for names in (self.names, self.present()):
            kept = {name: self.content.get(ino, b"") for name, ino in names.items()}
            if (kept, self.acknowledged) not in self.states:
                self.states.append((kept, self.acknowledged))


def test_a_power_cut_at_any_moment_loses_no_row_that_was_finished(tmp_path, monkeypatch, told):
    path, wanted = tmp_path / "run", finished(6)
    path.mkdir()
    disk = Disk(path, monkeypatch)
    for part in (wanted[:3], wanted[3:]):  # two runs, the second goes on
        with RunFolder(path, SPEC) as folder:
            folder.add_model("minilm", {"revision": "1"})
            for one in part:
                folder.extend([one])
                disk.acknowledged += 1
    monkeypatch.undo()
    for kept, count in disk.states:
        after = tmp_path / "after"
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        for name, data in kept.items():
            (after / name).write_bytes(data)
        if count:
            assert len(read_run(after).measurements()) >= count
        with RunFolder(after, SPEC) as folder:
            assert [one.row for one in wanted[:count]] == [*folder.done.values()][:count]
            assert len(folder.beside(TokenShare)) == 2 * len(folder.done)
    told("power cuts", Count(len(disk.states), 0, len(disk.states)))


# --- reading writes nothing


STATES = {
    "whole": lambda path: None,
    "killed": lambda path: [copy.unlink() for copy in path.glob("*.parquet")],
    "lines gone": lambda path: (path / "rows.jsonl").unlink(),
    "lines short": lambda path: os.truncate(path / "rows.jsonl", 1500),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("lines short", "manifest gone")))
     for kind in STATES],
)  # fmt: skip
def test_no_reading_command_writes_into_a_run_folder(tmp_path, monkeypatch, capsys, kind):
    from lipscope import cli

    path = made(tmp_path / "run", finished())
    STATES[kind](path)
    before = state(path)
    assert len(read_run(path).measurements()) == 4 if kind != "killed" else True
    for command in (["rows", path], ["rows", path, "--to", "csv"],
                    ["report", path, "-o", tmp_path / "page.html"]):  # fmt: skip
        monkeypatch.setattr("sys.argv", ["lipscope", *map(str, command)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, capsys.readouterr().err
    assert state(path) == before


def test_a_link_in_a_run_folder_is_never_followed(tmp_path):
    """A folder from a stranger, whose links lead to files of ours."""
    mine = tmp_path / "mine"
    for name in ("rows.jsonl", "tokens.jsonl", "manifest.json", "rows.parquet", ".lock"):
        mine.write_text("years of work")
        path = made(tmp_path / name, finished())
        (path / name).unlink()
        (path / name).symlink_to(mine)
        with pytest.raises(InputError, match="a link"):
            RunFolder(path, SPEC)
        assert mine.read_text() == "years of work"
    path = made(tmp_path / "figures", finished())
    for name in ("growth.svg", "growth.png", "growth.html", "report.html", "report.html.part"):
        (path / name).symlink_to(mine)
    ls.Rows(read_run(path).measurements()).save(path)
    ls.report([path])
    assert mine.read_text() == "years of work"


# --- rows that failed for a reason outside the question


def test_what_failed_for_want_of_memory_is_tried_again_and_counted(tmp_path, caplog):
    lost = row(layer=0, sigma=None, status="failed", error=f"MemoryError; {AGAIN}")
    never = row(layer=1, sigma=None, status="failed", error="made for L2 attention")
    with RunFolder(tmp_path, SPEC) as folder:
        folder.extend([Finished(lost), Finished(never)])
    with RunFolder(tmp_path, SPEC) as folder:
        assert [*folder.done.values()] == [never]
        assert "1 row failed for want of a worker, memory or disk" in caplog.text
        append(folder, row(layer=0), tokens_of(row(layer=0), ["a"]))
    caplog.clear()
    with RunFolder(tmp_path, SPEC) as folder:
        assert sorted(one.layer or 0 for one in folder.done.values()) == [0, 1]
        assert "tried again" not in caplog.text


# --- where a run goes


def test_default_folders_are_numbered_and_found_again(tmp_path, monkeypatch):
    """Also when the day has changed since."""
    monkeypatch.chdir(tmp_path)

    def go(spec: dict[str, Any], **more: Any) -> str:
        place = Place(None, "a model", **more)
        with RunFolder(place, spec) as folder:
            append(folder, row())
        return place.path.name

    first = go({"a": 1})
    assert go({"a": 2}) == f"{first}-2" and go({"a": 3}) == f"{first}-3"
    assert go({"a": 1}) == first and go({"a": 3}) == f"{first}-3"
    Path("runs", first).rename(Path("runs", "2020-02-29-a-model"))
    assert go({"a": 1}) == "2020-02-29-a-model"
    assert go({"a": 4}) == first
    assert go({"lengths": [1], "b": 0}, dated=False) == "a-model"
    assert go({"lengths": [1], "b": 1}, dated=False) == "a-model-2"


def test_force_replaces_a_run_and_nothing_else(tmp_path):
    path = made(tmp_path / "run", finished())
    (path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="--force"):
        RunFolder(path, {"another": 1})
    with RunFolder(Place(path, force=True), {"another": 1}) as folder:
        assert folder.done == {}
    assert read_run(path).manifest["spec"] == {"another": 1}
    assert (path / "notes.txt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="something else"):
        RunFolder(Place(tmp_path / "other", force=True), SPEC)


def test_a_command_that_is_refused_leaves_no_folder(tmp_path):
    for ask in (
        lambda out: ls.measure(BERT, TEXT, lengths=[6], samples=1, layers=[9], out=out),
        lambda out: ls.sweep({"models": BERT, "lengths": [6], "layers": [9]}, out, workers=1),
        lambda out: ls.sweep({"models": "random:brt", "lengths": [6]}, out, workers=1),
        lambda out: ls.measure(BERT, TEXT, lengths=[6], seed=2**63, out=out),
    ):
        with pytest.raises(InputError):
            ask(tmp_path / "new" / "run")
        assert list(tmp_path.iterdir()) == []


def test_a_finished_run_answers_without_the_model_and_grows(tmp_path, monkeypatch):
    options: dict[str, Any] = {"lengths": [6], "samples": 2, "out": tmp_path / "run"}
    first = ls.measure(BERT, TEXT, layers=[1], **options)
    more = ls.measure(BERT, TEXT, layers=[0], **options)
    assert [(r.layer, r.sample) for r in more] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {r.id: r for r in more}[first[0].id] == first[0]  # not measured again
    wider = ls.measure(BERT, TEXT, layers=[0, 1], **(options | {"lengths": [6, 9]}))
    assert {r.num_tokens for r in wider} == {6, 9} and len(wider) == 8
    kept = read_run(tmp_path / "run")
    assert sorted(kept.rows["id"]) == sorted(r.id for r in wider)  # each passage once
    ls.Rows(kept.measurements()).growth()
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    import sys

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(sys.modules["lipscope.engine.ready_model"], "load_model", never)
    again = ls.measure(BERT, TEXT, layers=[0, 1], **(options | {"lengths": [6, 9]}))
    assert [*again] == [*wider]
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_finished_run_grows_by_samples(tmp_path):
    """Passages spread anew over the text; a row of one that moved is set aside, not lost."""
    options: dict[str, Any] = {"layers": [1], "lengths": [6], "out": tmp_path / "run"}
    first = ls.measure(BERT, TEXT, samples=2, **options)
    more = ls.measure(BERT, TEXT, samples=3, **options)
    assert [r.sample for r in more] == [0, 1, 2]
    assert more[0] == first[0]  # the same passage: not measured again
    assert sorted(read_run(tmp_path / "run").rows["id"]) == sorted(r.id for r in more)
    earlier = (tmp_path / "run" / "rows.earlier").read_text(encoding="utf-8")
    assert first[1].id in earlier and first[0].id not in earlier


# --- two processes, other file systems


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("lipscope.records.folder._lock", unsupported)
    with RunFolder(tmp_path, SPEC) as folder:
        append(folder, row())
        assert len(read_run(tmp_path).rows) == 1
    with RunFolder(tmp_path, SPEC) as folder:
        assert len(folder.done) == 1


def test_a_folder_of_another_version_says_so_in_one_line(tmp_path, caplog):
    with RunFolder(tmp_path, SPEC, {"lipscope": "0.0.1", "torch": "2"}) as folder:
        append(folder, row())
    with RunFolder(tmp_path, SPEC, {"lipscope": "0.0.1", "torch": "2"}):
        assert caplog.messages == []
    with RunFolder(tmp_path, SPEC, {"lipscope": "0.0.2", "torch": "2"}) as folder:
        assert len(folder.done) == 1
    (said,) = caplog.messages
    assert "begun with lipscope 0.0.1 (now 0.0.2)" in said and "`--force`" in said


def test_rows_that_nobody_asked_for_are_named_and_kept(tmp_path, caplog):
    made(tmp_path, finished())
    with RunFolder(tmp_path, SPEC) as folder:
        folder.planned([one.row.id for one in finished()[:3]])
    assert "holds 1 row outside this run" in caplog.text
    assert "minilm, layer 3" in caplog.text
    assert len(read_run(tmp_path).rows) == 4


# --- windows


def test_windows_are_distinct_and_fewer_are_said(caplog):
    letters = "".join(chr(97 + k % 26) for k in range(20))
    model = "random:gpt2:n_embd=12,n_head=3,n_layer=1"
    with caplog.at_level(logging.WARNING):
        rows = ls.measure(model, letters, lengths=[6, 20], samples=10)
    assert [r.num_tokens for r in rows] == [6, 20]  # one place for 20 letters among 20
    rows = ls.measure(model, letters, lengths=[16], samples=10)
    assert len(rows) == len({r.tokens_sha256 for r in rows}) == 5
    assert "`samples = 10`, fewer are distinct: 1 of 6 tokens, 1 of 20" in caplog.text
    # The text has four distinct windows of three letters; two that are spread over it are equal.
    repeats = "abcdabc"
    assert len(ls.measure(model, repeats, lengths=[3], samples=2)) == 1
    assert len(ls.measure(model, repeats, lengths=[3], samples=5)) == 4
    assert "`samples = 2`, fewer are distinct: 1 of 3 tokens" in caplog.text
    assert len(ls.measure(model, "ab" * 50, lengths=[7], samples=10)) == 2


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    """Back and forth by months at every look: no time is negative, every row is there."""
    whole = ls.measure(BERT, TEXT, lengths=[6], samples=3)
    jumps = itertools.cycle([1e9, -1e7, 5e8, 0.0])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + next(jumps)) * 1e9))
    found = ls.measure(BERT, TEXT, lengths=[6], samples=3, out=tmp_path / "run")
    again = ls.measure(BERT, TEXT, lengths=[6], samples=3, out=tmp_path / "run")
    assert [row.sigma for row in found] == [row.sigma for row in again]
    assert [row.sigma for row in found] == [row.sigma for row in whole]
    assert all(0 <= row.seconds < 60 for row in found)


@pytest.mark.parametrize("verb", ["measure", "sweep"])
def test_what_is_left_is_told_from_the_rows_of_this_run(tmp_path, monkeypatch, capsys, verb):
    """Ten seconds a row by a clock of the test's own; those of an earlier run took none."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("lipscope.engine.sweeps.driver.local_results", in_this_process)
    keep = RunFolder.extend

    def extend(folder: RunFolder, some: Any) -> None:
        now[0] += 10 * len(some)
        keep(folder, some)

    def ask(**options: Any) -> None:
        shared = {"lengths": [6], "samples": 3, "seed": 0}
        if verb == "measure":
            ls.measure(BERT, TEXT, **shared, **options, out=tmp_path / "run")
        else:
            told, layers = options.get("progress"), options["layers"]
            shared["seeds"] = shared.pop("seed")
            spec = {"models": BERT, "texts": "text.txt", "layers": layers, **shared}
            ls.sweep(spec, tmp_path / "run", workers=1, progress=told)

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    ask(layers=[0])
    monkeypatch.setattr(RunFolder, "extend", extend)
    ask(layers=[0, 1], progress=True)
    said = [line.partition("| ")[2] or line for line in capsys.readouterr().err.split("\r")]
    told = [line.split()[-4:] for line in said if "left" in line]
    told = [(count, left) for count, _, _, left in told]
    assert told[0] == ("3/6", "?")
    assert {("4/6", "00:20"), ("5/6", "00:10"), ("6/6", "00:00")} <= {*told}
