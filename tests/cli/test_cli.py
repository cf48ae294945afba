"""The command: what it prints and what it writes."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from pathlib import Path

import polars
import pytest

import lipscope as ls
from command import BERT, GPT2, SHORT, TEXT, in_a_process
from rows import KEYS, row


def test_a_row_for_each_measurement_and_nothing_else_on_standard_output(lipscope):
    result = lipscope(BERT, "--text", "text.txt", *SHORT, "--jsonl", "--rest", "--average")
    assert result.status == 0
    assert len(result.rows) == len(result.out.splitlines()) == 4
    for values in result.rows:
        assert list(values) == KEYS
    assert [(v["layer"], v["sample"]) for v in result.rows] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    first = result.rows[0]
    assert first["head"] is None and first["error"] is None and first["revision"] is None
    assert first["weights"] == "random, seed 0"
    assert (first["map"], first["metric"], first["input"]) == ("attention", "frobenius", "text")
    assert (first["num_tokens"], first["delta"], first["dtype"]) == (6, 0.01, "float32")
    assert first["sigma"] <= first["upper"]
    assert "sigma" in result.err  # the table, and the sentences


def test_the_rows_are_those_of_the_python_function(lipscope):
    arguments = [*SHORT, "--layers", "1", "--seed", "3", "--map", "residual", "--move", "not-first"]
    arguments += [
        "--read",
        "last",
        "--metric",
        "token-relative",
        "--dtype",
        "float64",
        "--tol",
        "1e-4",
    ]
    arguments += ["--delta", "1e-3", "--windows", "disjoint", "--rest"]
    result = lipscope(BERT, "--text", "text.txt", *arguments, "--jsonl")
    assert result.status == 0, result.err
    rows = ls.measure(
        BERT,
        TEXT,
        lengths=[6],
        samples=2,
        layers=[1],
        seed=3,
        map="residual",
        move="not-first",
        read="last",
        metric="token-relative",
        dtype="float64",
        tol=1e-4,
        delta=1e-3,
        windows="disjoint",
        rest=True,
    )
    for values, expected in zip(result.rows, rows, strict=True):
        assert values | {"seconds": 0} == expected.to_dict() | {"seconds": 0}
        assert values["status"] == "converged"


def test_a_table_and_sentences_without_jsonl(lipscope):
    result = lipscope(BERT, "--text", "text.txt", "--lengths", "4,12", "--samples", "3", "--rest")
    assert result.status == 0
    table = result.out
    assert "means that a small change of the layer's input, of size ε" in table
    assert "without it" in table
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(table.splitlines()[0])
    found = ls.measure(BERT, TEXT, lengths=[4, 12], samples=3, layers=[0])
    largest = [r for r in found if r.num_tokens == 12]
    middle = sorted(r.sigma or 0 for r in largest)[1]
    assert f"{middle:.4g}" in table
    assert "runs/" not in table  # where the files are is said on standard error
    assert "runs/" in result.err


def test_files_and_the_default_folder(lipscope):
    result = lipscope(BERT, "--text", "text.txt", *SHORT)
    assert result.status == 0
    folders = list(Path("runs").iterdir())
    assert len(folders) == 1
    today = datetime.date.today()
    allowed = [today, today - datetime.timedelta(days=1)]  # at midnight
    assert any(folders[0].name.startswith(f"{day:%Y-%m-%d}-random-bert") for day in allowed)
    assert re.fullmatch(r"[\w.-]+", folders[0].name)
    names = {f.name for f in folders[0].iterdir()}
    assert names == {
        ".lock", "manifest.json", "rows.jsonl", "tokens.jsonl", "rows.parquet", "tokens.parquet",
        "values.jsonl", "values.parquet",
    }  # fmt: skip
    assert lipscope(BERT, "--text", "text.txt", *SHORT, "--figures").status == 0
    drawn = {f.name for f in folders[0].iterdir()} - names
    assert drawn == {"growth.svg", "growth.png", "growth.html"}
    assert folders[0].joinpath("growth.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in folders[0].joinpath("growth.svg").read_text()
    page = folders[0].joinpath("growth.html").read_text()
    assert "vegaEmbed" in page
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)  # needs no network
    assert polars.read_parquet(folders[0] / "rows.parquet").columns == KEYS
    assert os.listdir() == ["runs"]


def test_an_out_folder_is_continued_and_then_only_shown(lipscope):
    first = lipscope(BERT, "--text", "text.txt", *SHORT, "--jsonl", "--out", "deep/er/run")
    assert first.status == 0
    again = lipscope(BERT, "--text", "text.txt", *SHORT, "--jsonl", "--out", "deep/er/run")
    assert again.status == 0
    assert again.out == first.out  # seconds too
    assert len(Path("deep/er/run/rows.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lengths", "2:8:3"], {2, 5, 8}),
        (["--lengths", "3,7"], {3, 7}),
        (["--lengths", "9"], {9}),
    ],
)
def test_lengths(lipscope, arguments, expected):
    result = lipscope(GPT2, "--text", "text.txt", "--samples", "1", "--jsonl", *arguments)
    assert {v["num_tokens"] for v in result.rows} == expected
    assert [v["num_tokens"] for v in result.rows] == sorted(v["num_tokens"] for v in result.rows)


def test_layers_heads_and_windows(lipscope):
    common = [BERT, "--text", "text.txt", "--jsonl", "--lengths", "5", "--samples", "3"]
    result = lipscope(*common, "--layers", "1,0", "--out", "a")
    assert [v["layer"] for v in result.rows] == [1, 0] * 3
    assert [v["start"] for v in result.rows[::2]] == [0, (len(TEXT) - 5) // 2, len(TEXT) - 5]
    result = lipscope(*common, "--layers", "0", "--per-head", "--out", "b")
    assert [v["head"] for v in result.rows] == [0, 1, 2] * 3
    more = ["--layers", "0", "--lengths", "5,8", "--windows", "disjoint", "--out", "c"]
    result = lipscope(*common, *more)
    places = [0, (len(TEXT) - 13) // 2, len(TEXT) - 13]
    assert [v["start"] for v in result.rows] == [*places, *(5 + place for place in places)]
    result = lipscope(*common, "--map", "model", "--out", "d")
    assert [v["layer"] for v in result.rows] == [None] * 3


def test_special_tokens_of_a_real_model(lipscope):
    common = ["--text", "text.txt", "--jsonl", "--lengths", "5", "--samples", "1", "--layers", "0"]
    lipscope(*common, "--out", "with")  # minilm is the default
    lipscope("minilm", *common, "--no-special-tokens", "--out", "without")
    texts = [
        [json.loads(line)["text"] for line in Path(f, "tokens.jsonl").read_text().splitlines()]
        for f in ("with", "without")
    ]
    assert texts == [
        ["[CLS]", "the", "quick", "brown", "[SEP]"],
        ["the", "quick", "brown", "fox", "jumps"],
    ]


def test_text_from_standard_input(lipscope):
    text = "Ein Text mit Umlauten: ä, ö, ü. " * 10
    for start in (b"", b"\xef\xbb\xbf"):  # a byte order mark is no text
        result = lipscope(
            GPT2, "--text", "-", *SHORT, "--jsonl", "--out", f"run{len(start)}",
            stdin=start + text.encode(),
        )  # fmt: skip
        assert result.status == 0, result.err
        expected = ls.measure(GPT2, text, lengths=[6], samples=2)
        assert [v["id"] for v in result.rows] == [r.id for r in expected]


def test_bytes_are_said_to_be_the_tokens(lipscope):
    result = lipscope(BERT, "--text", "text.txt", *SHORT)
    assert result.status == 0
    assert "bytes" in result.err


def test_as_a_user_calls_it(tmp_path):
    """In a process of its own: the installed command, standard streams, no progress bar."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = GPT2 + ",vocab_size=300"  # transformers warns about the ids of special tokens
    options = ["--text", "text.txt", *SHORT, "--jsonl", "--out", "run", "--figures"]
    result = in_a_process(tmp_path, model, *options)
    assert result.status == 0, result.err
    assert [list(v) for v in result.rows] == [KEYS] * 4
    assert "\r" not in result.err and "\x1b" not in result.err
    assert (tmp_path / "run" / "growth.html").is_file()
    rows = ls.measure(model, TEXT, lengths=[6], samples=2)
    for values, expected in zip(result.rows, rows, strict=True):
        assert math.isclose(values["sigma"], expected.sigma or 0, rel_tol=1e-5)
    assert "[transformers]" not in result.err


def test_control_c_says_how_to_go_on(lipscope, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lipscope.engine.measure", interrupted)
    result = lipscope(BERT, "--text", "text.txt", *SHORT)
    assert result.status == 130
    assert "rerun the same command to resume" in result.err
    assert result.out == ""


def test_rows_with_every_status_are_one_line_of_json_each():
    for status in ("converged", "max_steps", "non_finite", "failed"):
        assert json.loads(row(status=status).to_json())["status"] == status
