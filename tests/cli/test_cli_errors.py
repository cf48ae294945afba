"""The command: how every mistake ends, in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command import BERT, GPT2, NEOX, SHORT, TEXT, refused
from tiny import TINY

OLMO = f"random:olmo:{TINY['olmo']}"  # no closed form


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
        (
            [BERT, "--map", "block", "--per-head"],
            ["`--per-head` goes", "heads, attention, normed"],
        ),
        ([BERT, "--lengths", "16,513"], ["at most 512", "Found 513"]),
        ([GPT2, "--lengths", "2049"], ["at most 2048", "Found 2049"]),
        ([BERT, "--lengths", "0"], ["lengths", "whole numbers from 1"]),
        ([BERT, "--samples", "0"], ["samples", "at least 1", "Found `0`"]),
        ([BERT, "--samples", "-3"], ["samples", "at least 1", "Found `-3`"]),
        ([BERT, "--tol", "0"], ["tol", "between 0 and 1"]),
        ([BERT, "--tol", "-0.001"], ["tol", "between 0 and 1"]),
        ([BERT, "--tol", "nan"], ["tol", "between 0 and 1"]),
        ([BERT, "--tol", "2"], ["tol", "Found `2.0`"]),
        ([BERT, "--tol", "1e-9"], ["tol", "float32"]),
        ([BERT, "--delta", "0"], ["delta", "between 0 and 1"]),
        ([BERT, "--delta", "1"], ["delta", "between 0 and 1"]),
        ([BERT, "--delta", "-0.5"], ["delta", "between 0 and 1"]),
        ([BERT, "--delta", "nan"], ["delta", "between 0 and 1"]),
        ([BERT, "--move", "5:9"], ["`--move 5:9`", "at 6 tokens"]),
        ([BERT, "--read", "middle"], ["`--read`", "middle"]),
        ([BERT, "--device", "abacus"], ["device", "abacus"]),
        ([OLMO, "--lengths", "1024", "--memory", "1MiB"], ["generic path", "--memory"]),
        ([OLMO, "--lengths", "6,1024", "--memory", "2MiB"], ["at 1024 tokens", "shorter lengths"]),
        ([BERT, "--map", "model", "--lengths", "512", "--memory", "1MiB"], ["--memory"]),
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


@pytest.mark.parametrize("verb", ["bounds", "split", "push"])
def test_figures_without_a_folder(command, verb):
    refused(
        command(verb, BERT, "--text", "text.txt", "--figures"),
        "`--figures`.*`--out`",
        left=["text.txt"],
    )


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("--metric", "largest", "`--metric` should be one of frobenius, token-relative"),
        ("--windows", "random", "`--windows` should be one of spread, disjoint"),
        ("--dtype", "float16", "`--dtype` should be one of float32, float64"),
    ],
)
@pytest.mark.usefixtures("unchecked")  # or the check of types would refuse them first
def test_words_that_are_no_choice(lipscope, name, word, expected):
    refused(lipscope(BERT, "--text", "text.txt", "--lengths", "6", name, word), expected, word)


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
    arguments = ["--lengths", "8,16", "--samples", "300", "--windows", "disjoint"]
    refused(
        lipscope(BERT, "--text", "text.txt", *arguments),
        f"at least {300 * (8 + 16)} tokens",
        f"Found {len(TEXT)}",
    )
    options = ["minilm", "--text", "-", "--samples", "1", "--layers", "0", "--lengths", "8"]
    refused(lipscope(*options, stdin=b"the quick brown fox jumps"), "at least 6 tokens", "Found 5")
    fits = lipscope(*options, "--out", "run", stdin=b"the quick brown fox jumps over")
    assert fits.status == 0, fits.err


def test_a_text_that_is_not_there(lipscope):
    refused(lipscope(BERT, "--text", "nowhere.txt"), "nowhere.txt", "No such file")
    Path("folder").mkdir()
    refused(lipscope(BERT, "--text", "folder"), "folder", "without .txt files", left=["folder"])


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
        (["--no-special-tokens"], "special_tokens"),
        (["--map", "heads"], "map"),
        (["--rest"], "rest"),
    ):
        result = lipscope(BERT, "--text", "text.txt", *SHORT, "--out", "run", *change)
        refused(result, "another specification", rf"\b{named}\b", left=["run"])
    assert {f.name: f.read_bytes() for f in Path("run").iterdir()} == before


_BEFORE_TORCH = {
    "measure minilm --layers 9": "`--layers` should be between 0 and 5 for `minilm`. Found 9.",
    "measure minilm --map atention": "Did you mean `attention`?",
    "measure minilm --lengths 64,4096": "at most 512, the positions of `minilm`",
    "measure minilm --device abacus": "Found `abacus`",
    "measure minilm --text nothing.txt": "Found `nothing.txt`",
    "measure ./nothing": "Found no `config.json` in it.",
    f"measure {__file__}": "own module need its code",
    "measure random:bert:num_hidden_layers=2 --layers 1,2": "between 0 and 1",
    "certify minilm --head 12": "`--head` should be between 0 and 11",
    "directions minilm --among nothing.txt": "Found `nothing.txt`",
    "push minilm --layer 6 --length 8": "between 0 and 5",
}


def test_what_a_configuration_says_is_refused_before_torch(tmp_path, monkeypatch):
    code = f"""if True:
        import sys
        from lipscope.cli import app
        from lipscope.errors import InputError
        for line, expected in {_BEFORE_TORCH!r}.items():
            try:
                app(line.split(), standalone_mode=False)
            except InputError as problem:
                assert expected in str(problem), (line, problem)
            else:
                raise AssertionError(line)
        slow = {{"torch", "transformers", "numpy", "scipy", "polars", "altair"}}
        assert not slow & set(sys.modules), slow & set(sys.modules)
    """
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_what_another_pass_may_find_is_not_refused_early():
    """Layers of encoders and decoders, of other modules or sides, and positions behind padding."""
    from lipscope.engine import refuse_early

    for model, options in {
        "random:t5:num_layers=2": {"layers": [5]},
        "random:bert:num_hidden_layers=2": {"layers": [5], "modules": "self"},
        "random:gpt2:n_layer=2": {"layers": [5], "side": "query"},
        "random:roberta:max_position_embeddings=10": {"lengths": [12]},
        "someone/some-model": {"layers": [99], "lengths": [10**6]},
    }.items():
        refuse_early(model, options)
