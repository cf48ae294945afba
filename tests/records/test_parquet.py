"""The Parquet copies of a run: the same in every reader, whatever the values are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pytest
import torch

import lipscope as ls
from lipscope import TokenShare
from lipscope.records.folder import RunFolder
from rows import KEYS, SPEC, TOKEN_KEYS, append, lines, row, tokens_of


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
        append(folder, one, tokens_of(one, ["a", "b"]))
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
        append(folder, one, [token])
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
