"""`lipscope rows`: any selection of a run folder, printed and exported."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import polars
import pytest

import folders
from lipscope import Rows, cli, report
from lipscope.records.folder import RunFolder
from rows import KEYS, SPEC, append, bound_of, row, tokens_of


@pytest.fixture
def folder(tmp_path) -> Path:
    with RunFolder(tmp_path / "run", SPEC) as run:
        for layer in range(4):
            one = row(layer=layer, sigma=2.0 + layer, model="a_b & c")
            append(
                run, one, tokens_of(one, ["x"] * (layer + 1)), [bound_of(one, 3.0 * (layer + 2))]
            )
    return tmp_path / "run"


@pytest.fixture
def called(monkeypatch, capfdbinary):
    def call(*words: object) -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "argv", ["lipscope", "rows", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capfdbinary.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, said.out, said.err.decode()

    return call


WHERE = {
    "layer >= 2 and sigma < 5": [2],
    "sigma = (select max(sigma) from rows)": [3],
    "id in (select id from bounds where value > 10)": [2, 3],
    "id in (select id from tokens group by id having count(*) = 2)": [1],
    "model like 'a%' order by sigma desc limit 2": [3, 2],
    "top_share > 1": [],
}


@pytest.mark.parametrize("where", WHERE)
def test_a_selection_is_the_one_that_duckdb_makes(folder, called, where):
    status, out, _ = called(folder, "--where", where, "--to", "json")
    assert status == 0
    found = json.loads(out)
    assert [one["layer"] for one in found] == WHERE[where]
    with duckdb.connect() as db:
        for name in ("rows", "tokens", "bounds"):
            db.sql(f"create view {name} as select * from '{folder}/{name}.parquet'")
        expected = db.sql(f"select layer from rows where {where}").fetchall()
    assert sorted(one["layer"] for one in found) == sorted(x for (x,) in expected)


def test_every_form_holds_the_same_rows(folder, called, tmp_path):
    expected = polars.read_parquet(folder / "rows.parquet")
    assert expected.columns == KEYS
    _, out, _ = called(folder, "--to", "csv")
    text = polars.read_csv(io.BytesIO(out), schema=expected.schema)
    assert text.equals(expected)
    _, out, _ = called(folder, "--to", "parquet")
    assert polars.read_parquet(io.BytesIO(out)).equals(expected)
    status, out, _ = called(folder, "--out", tmp_path / "x.parquet")
    assert (status, out) == (0, b"")
    assert polars.read_parquet(tmp_path / "x.parquet").equals(expected)
    _, out, _ = called(folder, "--to", "json")
    assert json.loads(out) == expected.to_dicts()


def test_latex_escapes_what_it_must(folder, called, tmp_path):
    with RunFolder(folder, SPEC) as run:
        append(run, row(layer=9, sigma=None, model="other%"))
    status, out, _ = called(folder, "--to", "latex")
    lines = out.decode().splitlines()
    assert status == 0
    assert lines[0] == r"\begin{tabular}{lrrrrrrl}" and lines[-1] == r"\end{tabular}"
    assert lines[2] == (
        r"model & layer & num\_tokens & sample & sigma & upper & relative & status \\"
    )
    assert lines[4] == r"a\_b \& c & 0 & 16 & 0 & 2.000 & 2.040 & 0.5000 & converged \\"
    assert lines[8] == r"other\% & 9 & 16 & 0 & -- & -- & 0.5000 & converged \\"


def test_printed_ends_hold(folder, called):
    with RunFolder(folder, SPEC) as run:
        append(run, row(layer=9, sigma=13.047189, upper=13.05001, relative=0.123456))
    for how in ((), ("--to", "latex")):
        _, out, _ = called(folder, *how)
        assert [part in out.decode() for part in ("13.04", "13.06", "0.1235")] == [True] * 3


def test_a_table_shows_what_varies(folder, called):
    status, out, _ = called(folder)
    text = out.decode()
    assert status == 0 and "4 rows" in text
    assert "sigma" in text and "5.000" in text and "frobenius" not in text


def test_a_table_tells_built_inputs_of_several_radii_apart(tmp_path, called):
    with RunFolder(tmp_path / "run", SPEC) as run:
        for radius in (3.0, 10.0):
            append(run, row(input="ascent", radius_max=radius, id=f"{radius}"), [])
    out = called(tmp_path / "run")[1].decode()
    assert "radius_max" in out and "3.000" in out and "10.00" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--where", "sigm > 4"],
            "`--where` should be an SQL condition. Found `sigm > 4`: there is no column `sigm`. "
            "Did you mean `sigma`?\n",
        ),
        (
            ["--where", "sigma >> 4"],
            "Found `sigma >> 4`: the operator BitwiseShiftRight is not known here; compare with "
            "=, <, >, in or like.\n",
        ),
        (
            ["--where", "id in (select id from tokens where token = 'x')"],
            "no column `token`. Known are id, index, text, share_in, share_out, norm.\n",
        ),
        (
            ["--where", "id in (select id from tokens where tokens.txt = 'x')"],
            "no column `txt`. Did you mean `text`?\n",
        ),
        (["--where", "sigma"], "must be of type `Boolean`, got `Float64`.\n"),
        (["--part", "directions"], "holds beside its rows: tokens, bounds. Found `directions`.\n"),
        (["--where", "sigma >"], "`--where` should be an SQL condition"),
        (["--to", "xml"], "`--to` should be one of csv, parquet, json, latex. Found `xml`"),
        (["--out", "x.xml"], "`--out` should end in .csv, .parquet, .json, .tex"),
        (["--to", "csv", "--out", "/no/such/x.csv"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(folder, called, words, expected):
    status, out, err = called(folder, *words)
    assert (status, out) == (2, b"") and expected in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(("part", "count"), [("tokens", 1 + 2 + 3 + 4), ("bounds", 4)])
def test_a_part_is_the_table_of_the_folder(folder, called, part, count):
    status, out, err = called(folder, "--part", part, "--to", "parquet")
    assert status == 0, err
    found = polars.read_parquet(io.BytesIO(out))
    assert len(found) == count
    assert found.equals(polars.read_parquet(folder / f"{part}.parquet"))


def test_bounds_are_rounded_outwards(called, tmp_path):
    with RunFolder(tmp_path / "run", SPEC) as run:
        one = row()
        kinds = ("upper", "lower", "radius")
        held = [replace(bound_of(one, 1.65555), kind=kind, theorem=kind) for kind in kinds]
        append(run, one, (), held)
    out = called(tmp_path / "run", "--part", "bounds")[1].decode()
    found = {kind: line for line in out.splitlines() for kind in kinds if f"  {kind}  " in line}
    up = {kind: "1.656" in line for kind, line in found.items() if "1.65" in line}
    assert up == {"upper": True, "lower": False, "radius": False}


def test_radii_are_rounded_down_and_lists_fit_in_a_table(called, tmp_path):
    with RunFolder(tmp_path / "run", SPEC) as run:
        radius = {"radius": 1.65555, "attack": 2.3333, "tokens": [0, 2], "words": ["=a", "b"]}
        run.add_value("radii", "k", radius)
    out = called(tmp_path / "run", "--part", "radii")[1].decode()
    assert "1.655 " in out and "2.334 " in out
    out = called(tmp_path / "run", "--part", "radii", "--to", "csv")[1]
    (found,) = polars.read_csv(io.BytesIO(out)).to_dicts()
    assert (found["tokens"], found["words"]) == ("[0, 2]", '["=a", "b"]')


def test_what_is_no_run_folder(called, tmp_path):
    status, _, err = called(tmp_path)
    assert status == 2 and "should be a run folder" in err


RECORD = ["rows.jsonl", "values.jsonl", "rows.parquet", "new.PARQUET", "manifest.json", ".lock"]


@pytest.mark.parametrize("name", RECORD)
def test_no_export_takes_the_place_of_what_was_measured(folder, called, tmp_path, name):
    (tmp_path / "link.json").symlink_to(folder / name)
    other = tmp_path / "other"
    other.mkdir()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for out in (folder / name, tmp_path / "link.json"):
        status, said, err = called(folder, "--to", "json", "--out", out)
        assert (status, said, err.count("\n")) == (2, b"", 1)
        assert f"`{out}` should not be a file of a run's record" in err and str(folder) in err
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    for out in (other / name, other / name, folder / "rows.json"):  # over one's own export, too
        assert called(folder, "--to", "json", "--out", out)[0] == 0
        assert len(json.loads(out.read_bytes())) == 4


def test_a_condition_reads_no_other_file(folder, called, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("id\n", encoding="utf-8")
    for name in ("read_csv", "READ_CSV/**/", '"read_parquet"'):
        where = f"id in (select id from {name}('{other}'))"
        status, out, err = called(folder, "--where", where)
        assert (status, out) == (2, b"") and "which reads other files" in err
    status, out, _ = called(folder, "--where", "model != 'read_csv'", "--to", "json")
    assert status == 0 and len(json.loads(out)) == 4


def test_no_cell_is_a_formula_and_no_name_an_order_to_the_terminal(tmp_path, called):
    names = ["=1+2", "+x", "-x", "@x", "random:llama:", "\x1b[31mred", "plain=1"]
    with RunFolder(tmp_path / "run", SPEC) as run:
        for name in names:
            append(run, row(model=name), [], [])
    _, out, _ = called(tmp_path / "run", "--to", "csv")
    found = polars.read_csv(io.BytesIO(out))["model"].to_list()
    assert found == ["'=1+2", "'+x", "'-x", "'@x", *names[4:]]
    _, out, _ = called(tmp_path / "run", "--to", "json")
    assert [one["model"] for one in json.loads(out)] == names
    _, out, _ = called("--help")
    assert "parquet and json store it unchanged" in " ".join(out.decode().split())
    _, out, _ = called(tmp_path / "run")
    assert "random:llama:" in out.decode() and "␛[31mred" in out.decode()
    assert "\x1b" not in out.decode()


@pytest.mark.parametrize("name", ["random:llama:", "\x1b[31mred"])
def test_names_are_printed_as_they_are(name, called):
    status, _, err = called(name)
    assert status == 2 and f"`{name}`".replace("\x1b", "\N{REPLACEMENT CHARACTER}") in err
    assert name.replace("\x1b", "␛") in Rows([row(model=name)]).text()


def test_rows_opens_what_report_opens(tmp_path, called):
    paths = [made(tmp_path / made.__name__) for made in (folders.sandwiched, folders.pushed)]
    assert report(paths)
    for path in paths:
        for form in ([], ["--to", "csv"]):
            status, out, said = called(path, *form)
            assert status == 0 and out, said
