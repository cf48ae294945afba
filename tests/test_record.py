"""Rows on the disk: complete after any interruption, refused where they do not belong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lipscope as ls
from lipscope.errors import InputError
from lipscope.record import COLUMNS, Measurement, RunFolder, TokenShare, stable_id
from rows import row, tokens_of

# As the issue lists them, in its order.
KEYS = [
    "id",
    "model",
    "revision",
    "weights",
    "layer",
    "head",
    "map",
    "metric",
    "move",
    "read",
    "input",
    "num_tokens",
    "sample",
    "start",
    "sigma",
    "upper",
    "delta",
    "status",
    "solver_residual",
    "products",
    "relative",
    "top_token",
    "top_share",
    "sigma_rest",
    "frobenius",
    "radius_max",
    "radius_rms",
    "input_norm",
    "output_norm",
    "seconds",
    "dtype",
    "device",
    "seed",
    "tokens_sha256",
    "version",
    "note",
    "error",
]
TOKEN_KEYS = ["id", "index", "text", "share_in", "share_out", "norm"]
SPEC = {"model": "minilm", "layers": [0, 1], "tol": 1e-3}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def filled(path: Path, count: int = 3) -> tuple[RunFolder, list[Measurement]]:
    folder = RunFolder(path, SPEC)
    rows = [row(layer=i, sigma=2.0 + i) for i in range(count)]
    for one in rows:
        folder.append(one, tokens_of(one, ["a", "b\n", "é"]))
    return folder, rows


# --- rows


def test_the_columns_are_those_that_are_promised():
    assert list(COLUMNS) == KEYS
    assert [field.name for field in dataclasses.fields(TokenShare)] == TOKEN_KEYS


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.sampled_from(["sigma", "upper"]))
def test_what_is_not_finite_is_null(value, name):
    line = row(**{"upper": 3.0, name: value}).to_json()
    assert "NaN" not in line and "Infinity" not in line
    values = json.loads(line, parse_constant=pytest.fail)
    assert values[name] is None
    assert list(values) == KEYS


def test_a_row_is_one_line_whatever_is_in_it():
    line = row(note="first\nsecond\u2028third", model="a\tb — é").to_json()
    assert "\n" not in line
    assert json.loads(line)["note"] == "first\nsecond\u2028third"


def test_an_id_depends_on_every_value_and_on_no_order():
    parts = {"model": "minilm", "layer": 1, "head": None, "tol": 1e-3}
    name = stable_id(parts)
    assert name == stable_id(dict(reversed(parts.items())))
    others = [stable_id(parts | {key: "else"}) for key in parts]
    assert len({name, *others}) == 5


# --- run folders


def test_rows_are_on_the_disk_as_they_come(tmp_path):
    folder = RunFolder(tmp_path / "run", SPEC, {"machine": "here"})
    for i in range(3):
        one = row(layer=i)
        folder.append(one, tokens_of(one, ["a", "b"]))
        # read through the file system, not through the object
        assert [r["layer"] for r in lines(tmp_path / "run" / "rows.jsonl")] == list(range(i + 1))
        assert len(lines(tmp_path / "run" / "tokens.jsonl")) == 2 * (i + 1)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest == {"spec": SPEC, "provenance": {"machine": "here"}}


def test_a_folder_gives_its_rows_back(tmp_path):
    _, rows = filled(tmp_path / "run")
    again = RunFolder(tmp_path / "run", SPEC)
    assert again.done == {r.id: r for r in rows}
    assert [t.text for t in again.tokens()] == ["a", "b\n", "é"] * 3


@pytest.mark.parametrize("file", ["rows.jsonl", "tokens.jsonl"])
def test_a_torn_last_line_is_cut_off(tmp_path, file):
    """A kill in the middle of a write, at every byte of the last line."""
    path = tmp_path / "run"
    filled(path)
    before = {f: (path / f).read_bytes() for f in ("rows.jsonl", "tokens.jsonl")}
    data = before[file]
    last = data[:-1].rfind(b"\n") + 1
    cuts = sorted({last + 1, *range(last + 2, len(data) - 1, 97), len(data) - 1})
    for cut in cuts:
        (path / file).write_bytes(data[:cut])
        folder = RunFolder(path, SPEC)
        if file == "rows.jsonl":
            assert [r.layer for r in folder.done.values()] == [0, 1]
            one = row(layer=2, sigma=4.0)
            folder.append(one, tokens_of(one, ["a", "b\n", "é"]))
            assert (path / file).read_bytes() == data  # the same row stands where it stood
        else:
            assert len(folder.tokens()) == 8
            assert len(lines(path / file)) == 8
        assert len(folder.tokens()) == (9 if file == "rows.jsonl" else 8)
        for name, content in before.items():
            (path / name).write_bytes(content)


def test_tokens_of_a_row_that_was_never_finished_do_not_count(tmp_path):
    path = tmp_path / "run"
    folder, rows = filled(path, 2)
    lost = row(layer=9)
    with (path / "tokens.jsonl").open("a") as file:
        file.writelines(json.dumps(vars(t)) + "\n" for t in tokens_of(lost, ["x", "y"]))
    folder = RunFolder(path, SPEC)
    assert {t.id for t in folder.tokens()} == {r.id for r in rows}
    folder.append(lost, tokens_of(lost, ["x", "y"]))  # measured again, written again
    assert len([t for t in folder.tokens() if t.id == lost.id]) == 2


@pytest.mark.parametrize("left", [[], ["manifest.part"]])
def test_a_kill_before_the_first_row_leaves_a_folder_that_can_be_used(tmp_path, left):
    """The folder is made first, its manifest written beside and then moved into place."""
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        (path / name).write_text('{"spec": {"mod')
    assert RunFolder(path, SPEC).done == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tol": 1e-4}, ["tol"]),
        ({"layers": [0]}, ["layers"]),
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
    assert str(path) in message and "--out" in message and "\n" not in message
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds something else"):
        RunFolder(tmp_path, SPEC)
    with pytest.raises(InputError, match="holds something else"):
        RunFolder(tmp_path / "thesis.txt", SPEC)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}', "null"])
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
        "from lipscope.record import InputError, RunFolder\n"
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


# --- Parquet


def types_of(path: Path) -> dict[str, str]:
    described = duckdb.sql(f"describe select * from '{path}'").fetchall()
    return {name: kind for name, kind, *_ in described}


@pytest.mark.parametrize("kind", ["full", "nothing but null"])
def test_parquet_is_read_by_polars_duckdb_and_pandas(tmp_path, kind):
    path = tmp_path / "run"
    folder = RunFolder(path, SPEC)
    extra: dict[str, Any] = {"head": 1, "revision": "abc", "sigma_rest": 1.5, "frobenius": 3.0}
    if kind != "full":
        extra = dict.fromkeys(["start", "sigma", "upper", "relative", "top_token", "top_share"])
        extra |= {"solver_residual": None, "output_norm": None, "status": "non_finite"}
    rows = [row(layer=i, **extra) for i in range(3)]
    for one in rows:
        folder.append(one, tokens_of(one, ["a", "b"]))
    folder.compact()
    file = path / "rows.parquet"
    by_polars = polars.read_parquet(file)
    by_pandas = pandas.read_parquet(file)
    by_duckdb = duckdb.sql(f"select * from '{file}'")
    assert by_polars.columns == list(by_pandas.columns) == by_duckdb.columns == KEYS
    expected = [tuple(r.to_dict().values()) for r in rows]
    assert by_polars.rows() == expected
    assert by_duckdb.fetchall() == expected
    nulls = {name for name in KEYS if rows[0].to_dict()[name] is None}
    assert set(by_pandas.columns[by_pandas.isna().all()]) == nulls
    assert len(by_pandas) == 3
    tokens = polars.read_parquet(path / "tokens.parquet")
    assert tokens.columns == duckdb.sql(f"select * from '{path}/tokens.parquet'").columns
    assert tokens.columns == list(pandas.read_parquet(path / "tokens.parquet").columns)
    assert tokens.columns == TOKEN_KEYS
    assert not list(path.glob("*.part"))


def test_types_do_not_depend_on_the_values(tmp_path):
    """So that many run folders can be read as one table."""
    full = row(head=1, revision="a", sigma_rest=1.5, frobenius=3.0, note="n", error="e")
    names = ["start", "sigma", "upper", "relative", "top_token", "top_share", "output_norm"]
    empty = row(**dict.fromkeys(names))
    for name, one in (("full", full), ("empty", empty)):
        folder = RunFolder(tmp_path / name, SPEC)
        norm = 1.0 if name == "full" else None
        token = TokenShare(id=one.id, index=0, text="a", share_in=norm, share_out=None, norm=norm)
        folder.append(one, [token])
        folder.compact()
    for file in ("rows.parquet", "tokens.parquet"):
        schemas = [polars.read_parquet(tmp_path / n / file).schema for n in ("full", "empty")]
        assert schemas[0] == schemas[1]
        assert types_of(tmp_path / "full" / file) == types_of(tmp_path / "empty" / file)
    both = duckdb.sql(f"select sigma, note, head from '{tmp_path}/*/rows.parquet' order by sigma")
    assert sorted(both.fetchall(), key=str) == [(2.0, "n", 1), (None, None, None)]
    assert polars.read_parquet(tmp_path / "full" / "rows.parquet").schema == (
        ls.Rows([full]).to_polars().schema
    )


def test_a_run_that_ended_before_its_first_row_can_be_read(tmp_path):
    folder = RunFolder(tmp_path / "run", SPEC)
    folder.compact()
    for file, names in (("rows.parquet", KEYS), ("tokens.parquet", TOKEN_KEYS)):
        path = tmp_path / "run" / file
        frame = polars.read_parquet(path)
        assert (frame.columns, len(frame)) == (names, 0)
        assert duckdb.sql(f"select * from '{path}'").columns == names
        assert list(pandas.read_parquet(path).columns) == names


def test_the_three_forms_of_a_run_say_the_same(tmp_path):
    ids = torch.tensor([[7, 80, 33, 7, 251, 104]])
    from tiny import tiny

    rows = ls.measure(tiny("bert").model, ids, rest=True, average=True, out=tmp_path / "run")
    expected = [r.to_dict() for r in rows]
    assert lines(tmp_path / "run" / "rows.jsonl") == expected
    assert polars.read_parquet(tmp_path / "run" / "rows.parquet").to_dicts() == expected
    assert rows.to_polars().to_dicts() == expected
    assert len(polars.read_parquet(tmp_path / "run" / "tokens.parquet")) == 12
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert {"lipscope", "torch", "transformers", "python", "cores"} <= set(manifest["provenance"])


# --- processes that are really stopped

MODEL = "random:bert:hidden_size=48,num_attention_heads=4,num_hidden_layers=4,intermediate_size=64"
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at intervals. " * 40
SAMPLES = 16


@pytest.fixture(scope="module")
def uninterrupted() -> ls.Rows:
    return ls.measure(MODEL, TEXT, lengths=[16, 32], samples=SAMPLES, rest=True)


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "lipscope.cli", "measure", MODEL, "--text", "text.txt"]
    command += ["--lengths", "16,32", "--samples", str(SAMPLES), "--rest"]
    return subprocess.Popen(
        [*command, "--out", "run"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_in_the_middle(
    folder: Path, how: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, str]:
    """Start the command and stop it once some rows are on the disk; its status and its words."""
    process, file = start(folder), folder / "run" / "rows.jsonl"
    limit = time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)
    how(process)
    _, said = process.communicate(timeout=60)
    count = file.read_bytes().count(b"\n")
    assert 5 <= count < 2 * 4 * SAMPLES, "not in the middle"
    return process.returncode, said


def without_seconds(rows: ls.Rows) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.to_dict().items() if k != "seconds"} for r in rows]


def finish(folder: Path) -> ls.Rows:
    """The same request, from Python."""
    return ls.measure(MODEL, TEXT, lengths=[16, 32], samples=SAMPLES, rest=True, out=folder / "run")


def test_a_killed_process_loses_no_row_that_it_had_finished(tmp_path, uninterrupted):
    """SIGKILL in mid-run, then the same command: the rows of a run without interruption."""
    status, _ = stop_in_the_middle(tmp_path, lambda process: process.kill())
    assert status == -signal.SIGKILL
    kept = (tmp_path / "run" / "rows.jsonl").read_text().split("\n")[:-1]
    again = start(tmp_path)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    after = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert after[: len(kept)] == kept  # kept as they were, not measured again
    assert len(after) == len(uninterrupted) == len({json.loads(line)["id"] for line in after})
    expected = {r["id"]: r for r in without_seconds(uninterrupted)}
    found = polars.read_parquet(tmp_path / "run" / "rows.parquet").drop("seconds").to_dicts()
    for one in found:
        _same(one, expected[one["id"]])
    assert {f.name for f in (tmp_path / "run").iterdir()} >= {
        "growth.svg", "growth.png", "growth.html", "rows.jsonl", "rows.parquet", "manifest.json",
    }  # fmt: skip


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for rounding in the last digits between two processes."""
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, float) and name != "solver_residual":
            assert math.isclose(value, other[name], rel_tol=1e-9), name
        elif name != "solver_residual":
            assert value == other[name], name


def test_control_c_ends_in_status_130_and_a_readable_folder(tmp_path, uninterrupted):
    status, said = stop_in_the_middle(tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert status == 130, said
    assert "Traceback" not in said
    assert "goes on" in said  # how to go on
    whole = lines(tmp_path / "run" / "rows.jsonl")
    frame = polars.read_parquet(tmp_path / "run" / "rows.parquet")
    assert frame.to_dicts() == whole
    counted = duckdb.sql(f"select count(*) from '{tmp_path}/run/rows.parquet'").fetchall()
    assert counted == [(len(whole),)]
    rows = finish(tmp_path)
    for one, other in zip(without_seconds(rows), without_seconds(uninterrupted), strict=True):
        _same(one, other)
    assert lines(tmp_path / "run" / "rows.jsonl")[: len(whole)] == whole
