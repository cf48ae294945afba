"""A run folder as it is read: side tables, other schemas, copies that are out of date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pytest

from folders import directed
from lipscope import Measurement, read_run
from lipscope.errors import InputError
from lipscope.records.comparison import comparisons, looseness
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.tables import with_checksum
from rows import BOUND_KEYS, SPEC, append, bound_of, lines, row, tokens_of, write_lines


def filled(path: Path, count: int = 3, *, start: int = 0) -> list[Measurement]:
    rows = [row(layer=i, sigma=2.0 + i) for i in range(start, start + count)]
    with RunFolder(path, SPEC, {"machine": "here"}) as folder:
        for one in rows:
            sides = tuple(tokens_of(one, ["a", "b"])), (bound_of(one),), tuple(directed(one))
            folder.extend([Finished(one, *sides)])
    return rows


def test_all_tables_are_read_back(tmp_path):
    rows = filled(tmp_path)
    run = read_run(tmp_path)
    assert run.measurements() == rows
    assert [t.text for t in run.token_shares()] == ["a", "b"] * 3
    assert [t.id for t in run.token_shares([rows[1].id])] == [rows[1].id] * 2
    assert run.bound_values() == [bound_of(one) for one in rows]
    assert run.bound_values([rows[2].id]) == [bound_of(rows[2])]
    assert run.direction_parts() == [part for one in rows for part in directed(one)]
    assert run.direction_parts([rows[2].id]) == directed(rows[2])
    assert run.manifest["schema"] == 6 and run.manifest["spec"] == SPEC
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


@pytest.mark.parametrize("schema", [1, 5, 7])
def test_a_folder_of_another_schema_is_refused_in_one_line(tmp_path, schema):
    filled(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": schema, "spec": SPEC}))
    assert manifest["schema"] == 6
    for ask in (read_run, lambda path: RunFolder(path, SPEC)):
        with pytest.raises(InputError, match=rf"of schema 6.*Found schema {schema}") as caught:
            ask(tmp_path)
        assert "\n" not in str(caught.value)


def test_one_theorem_may_speak_of_several_balls(tmp_path):
    one = row()
    balls = [bound_of(one, 3.0 + eps, scope="ball", eps=eps) for eps in (0.1, 0.2)]
    for _ in range(2):  # written again: the later one counts
        with RunFolder(tmp_path, SPEC) as folder:
            append(folder, one, (), [bound_of(one), *balls])
    assert read_run(tmp_path).bound_values() == [bound_of(one), *balls]


def test_values_are_kept_by_part_and_key(tmp_path):
    with RunFolder(tmp_path, SPEC) as folder:
        kept = folder.add_value("a", "x", {"n": 1, "points": (1.5, None)})
        folder.add_value("b", "x", {"n": "other"})
        assert kept == {"n": 1, "points": [1.5, None]}
        assert folder.values("a") == {"x": kept}
        folder.add_value("a", "y", {"n": 2, "points": []})
        folder.add_value("a", "x", {"n": 3, "points": []})
    assert read_run(tmp_path).values("a").select("key", "n").rows() == [("y", 2), ("x", 3)]
    assert read_run(tmp_path).values("none").is_empty()
    assert (tmp_path / "values.parquet").is_file()
    assert len(read_run(tmp_path).rows) == 0


def test_rows_are_read_while_a_run_goes_on_and_nothing_is_written(tmp_path):
    with RunFolder(tmp_path, SPEC) as folder:
        append(folder, row(layer=0), tokens_of(row(layer=0), ["a"]))
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"id": "half')  # a row that is being written
        before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
        run = read_run(tmp_path)
        assert [r.layer for r in run.measurements()] == [0] and len(run.tokens) == 1
        assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_a_killed_run_is_compacted_by_the_run_that_goes_on_and_by_no_reader(tmp_path):
    folder = RunFolder(tmp_path, SPEC)
    append(folder, row(layer=0))
    folder._release()  # as the system does for a process that is killed
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert len(read_run(tmp_path).rows) == 1
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
    assert len(polars.read_parquet(tmp_path / "rows.parquet")) == 0
    with RunFolder(tmp_path, SPEC):
        assert len(polars.read_parquet(tmp_path / "rows.parquet")) == 1


DAMAGE = {
    "half a file": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "nothing in it": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
    "one bit of it": lambda path: path.write_bytes(_flipped(path.read_bytes())),
    "of other columns": lambda path: polars.DataFrame({"id": ["a"]}).write_parquet(path),
}


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["rows", "tokens", "bounds", "directions"])
def test_a_damaged_copy_is_made_again_from_the_lines(tmp_path, damage, name):
    rows = filled(tmp_path)
    DAMAGE[damage](tmp_path / f"{name}.parquet")
    run = read_run(tmp_path)
    assert run.measurements() == rows
    assert (len(run.tokens), len(run.bounds), len(run.directions)) == (6, 3, 24)
    with RunFolder(tmp_path, SPEC) as folder:
        assert [*folder.done.values()] == rows
    assert len(polars.read_parquet(tmp_path / f"{name}.parquet")) == len(lines_of(tmp_path, name))


def lines_of(path: Path, name: str) -> list[Any]:
    return lines(path / f"{name}.jsonl")


def test_a_copy_of_other_lines_is_not_believed(tmp_path):
    """Lines that were written since, or put beside it by hand."""
    rows = filled(tmp_path)
    file = tmp_path / "rows.jsonl"
    extra = row(layer=9)
    file.write_bytes(file.read_bytes() + with_checksum(extra.to_json()))
    assert read_run(tmp_path).measurements() == [*rows, extra]
    first, *others = lines(file)
    write_lines(file, [first | {"sigma": 7.0}, *others])
    assert read_run(tmp_path).measurements()[0].sigma == 7.0


def test_rows_and_bounds_are_joined_by_id():
    text, built = row(sigma=2.0), row(sigma=3.0, input="two_cluster", sample=1)
    failed, other = row(sigma=None, sample=2), row(layer=1)
    values = [
        bound_of(text, 6.0),
        bound_of(built, None),
        bound_of(text, 9.0, theorem="global_rows_capped", scope="global", radius=5.0),
        bound_of(text, 1.0, theorem="infinity", metric="infinity"),
        bound_of(failed, 4.0),
    ]
    frobenius, infinity = comparisons([text, built, failed, other], values)
    assert (frobenius.real, frobenius.rows) == ([text], [text, built])
    assert [(b.theorem, b.value, looseness(b, r)) for r, b in frobenius.bounds] == [
        ("castin_thm_3_3", 6.0, 3.0),
        ("global_rows_capped", 9.0, 4.5),
        ("castin_thm_3_3", None, None),
    ]
    assert infinity.metric == "infinity" and infinity.rows == []  # measured in another metric
    assert [looseness(bound, r) for r, bound in infinity.bounds] == [None]
    assert frobenius.allowed == "tokens of norm up to 1"


@pytest.mark.parametrize("what", ["no such folder", "none in it"])
def test_what_is_no_run_folder(tmp_path, what):
    path = tmp_path / "x" if what == "no such folder" else tmp_path
    with pytest.raises(InputError, match=f"should be a run folder.*Found {what}"):
        read_run(path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(InputError, match="Found a file; name the folder of the run"):
        read_run(tmp_path / "rows.jsonl")
