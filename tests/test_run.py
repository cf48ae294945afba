"""A run folder as it is read: side tables, old schemas, copies that are out of date."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pytest

import lipscope as ls
from command import BERT
from lipscope.errors import InputError
from lipscope.records.bound_rows import rows_of_run
from lipscope.records.folder import RunFolder
from lipscope.records.rows import Bound, Measurement
from lipscope.records.run import read_run
from rows import BOUND_KEYS, KEYS, SPEC, lines, row, tokens_of


def bound_of(measured: Measurement, value: float | None = 6.0, **more: Any) -> Bound:
    values: dict[str, Any] = {
        "id": measured.id,
        "theorem": "castin_thm_3_3",
        "statement": "Theorem 3.3",
        "cite": "castin2024",
        "kind": "upper",
        "scope": "local",
        "metric": "frobenius",
        "radius": 1.0,
        "value": value,
        "reason": "" if value else "it has a mask",
        "note": "",
        "sound": True,
    }
    return Bound(**(values | more))


def filled(path: Path, count: int = 3, *, start: int = 0) -> list[Measurement]:
    rows = [row(layer=i, sigma=2.0 + i) for i in range(start, start + count)]
    with RunFolder(path, SPEC, {"machine": "here"}) as folder:
        for one in rows:
            folder.append(one, tokens_of(one, ["a", "b"]), [bound_of(one)])
    return rows


def test_all_tables_are_read_back(tmp_path):
    rows = filled(tmp_path)
    run = read_run(tmp_path)
    assert run.measurements() == rows
    assert [t.text for t in run.token_shares()] == ["a", "b"] * 3
    assert [t.id for t in run.token_shares([rows[1].id])] == [rows[1].id] * 2
    assert run.bound_values() == [bound_of(one) for one in rows]
    assert run.bound_values([rows[2].id]) == [bound_of(rows[2])]
    assert run.manifest["schema"] == 2 and run.manifest["spec"] == SPEC
    assert run.manifest["provenance"] == {"machine": "here"}


def test_bounds_open_without_lipscope(tmp_path):
    rows = filled(tmp_path)
    file = tmp_path / "bounds.parquet"
    assert polars.read_parquet(file).columns == BOUND_KEYS
    assert list(pandas.read_parquet(file).columns) == BOUND_KEYS
    found = duckdb.sql(
        f"select b.value / r.sigma from '{file}' b join '{tmp_path}/rows.parquet' r using (id)"
    ).fetchall()
    assert sorted(found, reverse=True) == [(6.0 / (2.0 + i),) for i in range(len(rows))]


def test_a_folder_of_the_first_schema_is_read_and_goes_on(tmp_path):
    """As lipscope 0.1.0 wrote it: no schema, no `text` and `step`, no bounds, no digests."""
    rows = [row(layer=i) for i in range(3)]
    old = [{k: v for k, v in r.to_dict().items() if k not in ("text", "step")} for r in rows]
    tokens = [vars(t) for r in rows for t in tokens_of(r, ["a", "b"])]
    for name, values in (("rows", old), ("tokens", tokens)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
        polars.DataFrame(values).write_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "manifest.json").write_text(json.dumps({"spec": SPEC, "provenance": {"a": "b"}}))
    run = read_run(tmp_path)
    assert run.measurements() == rows
    assert len(run.tokens) == 6 and len(run.bounds) == 0
    assert run.rows.columns == KEYS
    assert polars.read_parquet(tmp_path / "rows.parquet").columns == KEYS  # compacted again
    with RunFolder(tmp_path, SPEC) as folder:
        assert list(folder.done.values()) == rows
        folder.append(row(layer=3, text="alice", step=100))
    assert [r.layer for r in read_run(tmp_path).measurements()] == [0, 1, 2, 3]
    assert read_run(tmp_path).rows["step"].to_list() == [None, None, None, 100]
    assert read_run(tmp_path).manifest["provenance"] == {"a": "b"}


@pytest.mark.parametrize("version", ["schema-1", "schema-2"])
def test_folders_that_older_versions_wrote_are_read_and_go_on(tmp_path, version):
    """Stored as they were written: the first schema, and the second before `side`."""
    folder = tmp_path / version
    shutil.copytree(Path(__file__).parent / "written" / version, folder)
    stored = lines(folder / "rows.jsonl")
    run = read_run(folder)
    assert run.rows.columns == KEYS and len(run.tokens) == 16
    later = {"text": None, "step": None, "side": "self", "position_offset": 0}
    assert [r.to_dict() for r in run.measurements()] == [later | one for one in stored]
    told: list[tuple[int, int]] = []
    rows = ls.measure(
        BERT,
        "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 20,
        lengths=[4],
        samples=2,
        rest=True,
        out=folder,
        progress=lambda *now: told.append(now[:2]),
    )
    assert told == [(4, 4)] and list(rows) == run.measurements()
    assert lines(folder / "rows.jsonl") == stored


def test_a_folder_of_a_later_schema_is_refused_in_one_line(tmp_path):
    filled(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema": 3}))
    for ask in (read_run, lambda path: RunFolder(path, SPEC)):
        with pytest.raises(InputError, match=r"Found schema 3.*update lipscope") as caught:
            ask(tmp_path)
        assert "\n" not in str(caught.value)


def test_rows_are_read_while_a_run_goes_on_and_nothing_is_written(tmp_path):
    with RunFolder(tmp_path, SPEC) as folder:
        folder.append(row(layer=0), tokens_of(row(layer=0), ["a"]))
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"id": "half')  # a row that is being written
        before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
        run = read_run(tmp_path)
        assert [r.layer for r in run.measurements()] == [0] and len(run.tokens) == 1
        assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_a_killed_run_is_compacted_when_it_is_opened(tmp_path):
    folder = RunFolder(tmp_path, SPEC)
    folder.append(row(layer=0))
    folder._release()  # as the system does for a process that is killed
    assert len(polars.read_parquet(tmp_path / "rows.parquet")) == 0
    read_run(tmp_path)
    assert len(polars.read_parquet(tmp_path / "rows.parquet")) == 1


DAMAGE = {
    "half a file": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "nothing in it": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
    "of other columns": lambda path: polars.DataFrame({"id": ["a"]}).write_parquet(path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["rows", "tokens", "bounds"])
def test_a_damaged_copy_is_made_again_from_the_lines(tmp_path, damage, name):
    rows = filled(tmp_path)
    DAMAGE[damage](tmp_path / f"{name}.parquet")
    run = read_run(tmp_path)
    assert run.measurements() == rows
    assert (len(run.tokens), len(run.bounds)) == (6, 3)
    assert len(polars.read_parquet(tmp_path / f"{name}.parquet")) == len(lines_of(tmp_path, name))


def lines_of(path: Path, name: str) -> list[Any]:
    return lines(path / f"{name}.jsonl")


def test_only_what_came_behind_the_copy_is_read_as_lines(tmp_path, monkeypatch):
    """And a copy of other lines, put beside them by hand or by `cp`, is not believed."""
    rows = filled(tmp_path / "one") + filled(tmp_path / "one", start=3)
    asked: list[int] = []
    from lipscope.records.stored import Table

    original = Table._checked

    def counted(self: Table, data: bytes, first: int) -> Any:
        asked.append(data.count(b"\n"))
        return original(self, data, first)

    monkeypatch.setattr(Table, "_checked", counted)
    assert read_run(tmp_path / "one").measurements() == rows
    assert asked == []
    file = tmp_path / "one" / "rows.jsonl"
    extra = row(layer=9)
    file.write_text(file.read_text() + extra.to_json() + "\n")
    assert read_run(tmp_path / "one").measurements() == [*rows, extra]
    assert asked == [1]
    changed = file.read_text().replace('"sigma": 2.0', '"sigma": 7.0', 1)  # of the same size
    file.write_text(changed)
    assert read_run(tmp_path / "one").measurements()[0].sigma == 7.0


def test_a_run_as_the_rows_of_a_sandwich():
    text, built = row(sigma=2.0), row(sigma=3.0, input="two_cluster", sample=1)
    failed = row(sigma=None, sample=2)
    values = [
        bound_of(text, 6.0),
        bound_of(built, None),
        bound_of(text, 9.0, theorem="global_rows_capped", scope="global", radius=5.0),
        bound_of(text, 1.0, theorem="infinity", metric="infinity"),
        bound_of(failed, 4.0),
    ]
    found = rows_of_run([text, built, failed], values)
    assert [(r.theorem, r.value, r.looseness) for r in found] == [
        ("measured", 2.0, None),
        ("castin_thm_3_3", 6.0, 3.0),
        ("global_rows_capped", 9.0, 4.5),
        ("infinity", 1.0, None),  # of another metric: not compared
        ("adversarial", 3.0, None),
        ("castin_thm_3_3", None, None),
    ]
    assert [r.radius for r in found] == [1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    assert found[-1].reason == "it has a mask" and not found[-1].applicable


@pytest.mark.parametrize("what", ["no such folder", "none in it"])
def test_what_is_no_run_folder(tmp_path, what):
    path = tmp_path / "x" if what == "no such folder" else tmp_path
    with pytest.raises(InputError, match=f"should be a run folder.*Found {what}"):
        read_run(path)
    assert list(tmp_path.iterdir()) == []
