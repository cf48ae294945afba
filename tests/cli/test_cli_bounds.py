"""The commands about bounds: what they print, and how mistakes end."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from command import BERT, TEXT
from lipscope import certify, read_run, to_dense
from lipscope.theorems import RECALLED, catalogue
from opened import layer_of
from tiny import TINY

DOCS = Path(__file__).parents[2] / "docs"
OLMO, GEMMA = (f"random:{name}:{TINY[name]}" for name in ("olmo", "gemma2"))
KEYS = ["theorem", "statement", "cite", "kind", "scope", "metric", "map", "value"]
KEYS += ["applicable", "reason"]
QUICK = ["--random", "1", "--ascents", "1", "--steps", "1"]
LAYER = ["--map", "attention"]
BETWEEN = ["--between", "The quick brown fox.", "--between", "It sleeps over there."]


def test_bounds_as_json(command):
    result = command("bounds", BERT, "--text", "text.txt", "--length", "6", "--jsonl")
    assert result.status == 0, result.err
    first, *rest = result.rows
    assert first["theorem"] == "measured" and first["map"] == "attention"
    assert all(set(KEYS) <= set(row) and row["id"] == first["id"] for row in rest)
    assert 0 < first["sigma"] <= first["upper"]
    assert [row["theorem"] for row in rest] == [one.name for one in catalogue()]
    assert all(row["applicable"] == (row["value"] is not None) for row in rest)
    assert all(row["reason"] for row in rest if not row["applicable"])


def test_bounds_as_a_table(command):
    result = command("bounds", BERT, "--text", "text.txt", "--lengths", "4,6", "--layer", "1")
    assert result.status == 0, result.err
    assert result.out.count("Without a value:") == 1  # one table for all lengths
    assert (
        "measured" in result.out
        and "global_rows_capped" in result.out
        and "castin2024" in result.out
    )
    assert "Without a value:" in result.out and "it is not causal" in result.out
    assert not Path("runs").exists()


def test_bounds_through_the_norm(command):
    options = ["--text", "text.txt", "--length", "6", "--map", "normed"]
    result = command("bounds", BERT, *options)
    assert result.status == 0, result.err
    said = " ".join(result.out.split())
    assert "map normed" in said and "tokens of norm from" in said
    assert "On the whole space they are" in said
    rows = command("bounds", BERT, *options, "--jsonl").rows
    assert {row["map"] for row in rows} == {"normed"}
    assert all(row["radius"] is None and row["floor"] > 0 for row in rows[1:])


def test_names_are_printed_as_they_are(command):
    llama = f"random:llama:{TINY['llama']}"
    options = ["--text", "text.txt", "--length", "6", "--theorems", "local_rows"]
    result = command("bounds", llama, *options)
    assert result.status == 0 and result.out.startswith("random:llama:hidden_size")


def test_bounds_of_single_heads(command):
    options = ["--text", "text.txt", "--length", "6", "--per-head"]
    result = command("bounds", BERT, *options)
    assert result.status == 0, result.err
    assert len(re.findall(r"^ [012]  ", result.out, flags=re.MULTILINE)) == 3
    rows = command("bounds", BERT, *options, "--jsonl").rows
    assert {row["head"] for row in rows} == {0, 1, 2}
    lower = [r for r in rows if r["theorem"] == "two_cluster_star"]
    assert all(r["applicable"] for r in lower)


def test_bounds_with_a_figure(command):
    options = ["--text", "text.txt", "--lengths", "4,6", "--attack", "--out", "out", "--figures"]
    options += ["--ascent-steps", "1", "--theorems", "local_rows,two_cluster_star"]
    result = command("bounds", BERT, *options)
    assert result.status == 0, result.err
    names = {p.name for p in Path("out").iterdir()}
    assert {"rows.jsonl", "bounds.parquet", "sandwich.svg", "sandwich.html"} <= names
    assert command("rows", "out", "--to", "csv").out.count("\n") == 1 + 4
    assert command("report", "out", "-o", "page.html").status == 0
    assert "adversarial" in result.out


def test_attack_keeps_the_worst_input(command):
    options = ["--text", "text.txt", "--length", "6", "--steps", "2", "--out", "out"]
    result = command("attack", BERT, *options)
    assert result.status == 0, result.err
    assert "real text" in result.out and "ascent" in result.out and "two_cluster" in result.out
    real, worst = read_run("out").measurements()
    assert real.sigma and worst.sigma and real.radius_max and worst.radius_max
    radius = real.radius_max * (1 + 1e-5)
    with np.load("out/worst.npz") as kept:
        assert kept["x"].shape == kept["v"].shape == (6, 12)
        norms = np.linalg.norm(kept["x"], axis=1)
    assert norms.max() <= radius and worst.radius_max <= radius
    assert worst.sigma >= real.sigma * (1 - 1e-3)
    assert command("rows", "out", "--to", "csv").out.count("\n") == 1 + 2
    assert command("report", "out", "-o", "page.html").status == 0
    options[-3:] = ["1", "--out", "other"]
    rows = command("attack", BERT, *options, "--jsonl", "--radius", "2").rows
    assert rows and all(row["radius"] == 2.0 for row in rows)
    values = [row["sigma"] for row in rows if row["sigma"] is not None]
    assert values == sorted(values, reverse=True)


def test_the_worst_input_can_be_measured_tightly(command):
    options = ["--text", "text.txt", "--length", "6", "--steps", "2", "--out", "out"]
    result = command("attack", BERT, *options, "--jsonl")
    assert result.status == 0, result.err
    worst = result.rows[0]
    assert worst["sigma"] <= worst["upper"] <= 1.001 * worst["sigma"] * (1 + 1e-9)
    assert worst["sigma_text"] <= worst["upper_text"] <= 1.001 * worst["sigma_text"] * (1 + 1e-9)
    layer, _ = layer_of(BERT, TEXT, layer=0, length=6)
    with np.load("out/worst.npz") as kept:
        dense = to_dense(layer.linearise(torch.from_numpy(kept["x"])))
    assert worst["sigma"] == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-3)


def test_a_note_names_the_option_as_it_is_typed(command):
    few = ["--random", "1", "--ascents", "0"]
    result = command("certify", "minilm", "--layer", "3", "--length", "16", *few)
    assert re.search(r"Note: .* takes about \d+ s here; `--sharp` computes it\.", result.out)


def test_certify_is_above_its_attack(command):
    options = ["--text", "text.txt", "--length", "6", "--eps", "0.05", "--ascents", "1"]
    result = command("certify", BERT, *options)
    assert result.status == 0, result.err
    assert "The certificate holds" in result.out
    options += ["--no-sharp", "--steps", "1", "--random", "3"]
    for more in (["--ball", "frobenius"], ["--head", "1"], ["--map", "heads"]):
        (row,) = command("certify", BERT, *options, "--jsonl", *more).rows
        assert row["largest_ratio"] <= row["certificate"]
        assert row["sigma"] <= row["certificate"] * (1 + 1e-9)
        assert row["violated"] is False


def test_certify_a_layer_s_decision_between_texts(command):
    options = [BERT, "--text", "text.txt", "--length", "6", "--map", "attention", *BETWEEN]
    result = command("certify", *options, "--out", "out")
    assert result.status == 0, result.err
    for words in ("layer 0, decided by", "“The quick brown fox.”", "certified radius"):
        assert words in result.out
    rows = [command("certify", *options, "--jsonl", "--ball", b).rows[0] for b in ("each", "joint")]
    (row,) = read_run("out").measurements()
    assert (row.map, row.layer) == ("attention", 0)
    (bound,) = read_run("out").bound_values()
    assert (bound.theorem, bound.value) == ("decision_joint", rows[1]["radius"])
    assert command("report", "out", "-o", "page.html").status == 0
    for row in rows:
        assert 0 < row["radius"] < (row["attack"] or math.inf)
        assert row["violated"] is False
    # all tokens together move less than every token alone may
    assert rows[0]["radius"] <= rows[1]["radius"]
    few = ["--ball", "each", "--tokens", "0,2"]
    moved = "the decision stands while tokens 0, 2 each move by less"
    assert moved in command("certify", *options, "--out", "out", *few).out
    known = read_run("out").bound_values()
    moves = ["while tokens 0:5 together move", "while tokens 0, 2 each move"]
    assert [one.statement[-len(m) :] for one, m in zip(known, moves, strict=True)] == moves
    assert [one.metric for one in known] == ["frobenius", "max-token"]
    (row,) = command("certify", *options, "--jsonl", "--pool", "first").rows
    assert row["margin"] != rows[0]["margin"]


def test_certify_the_decision_of_a_whole_model(command):
    one_layer = BERT.replace("num_hidden_layers=2", "num_hidden_layers=1")
    Path("short.txt").write_text("The fox")
    options = ["certify", one_layer, "--decision", "--text", "short.txt", "--length", "3"]
    options += [*BETWEEN, "--ball", "token", "--tokens", "1"]
    result = command(*options, "--out", "out")
    assert result.status == 0, result.err
    for words in ("whole model", "at the smallest angle", "certified radius", "words within"):
        assert words in result.out
    (row,) = command(*options, "--jsonl", "--out", "out").rows  # from the folder
    assert row["tokens"] == [1] and 0 < row["radius"] <= (row["attack"] or math.inf)
    later = command(*["certify", BERT, *options[2:]], "--layer", "1")
    assert "from the input of layer 1 on, decided" in later.out
    (bound,) = read_run("out").bound_values()
    assert (bound.theorem, bound.kind) == ("decision_token_1", "radius")
    assert bound.value == row["radius"]
    assert read_run("out").measurements()[0].map == "model"
    (row,) = command(*options, "--jsonl", "--pool", "last").rows
    assert row["by"].endswith("an output of its last token at the smallest angle")
    for wrong in (["--eps", "1"], ["--random", "3"], ["--steps", "3"]):
        result = command(*options, *wrong)
        assert result.status == 2 and f"A decision has no `{wrong[0]}`" in result.err
    result = command(*options, "--map", "heads")
    assert result.status == 2 and "`--map` should be one of model, attention" in result.err
    result = command("certify", BERT, "--tokens", "1")
    assert result.status == 2 and "`--tokens` goes with a decision" in result.err


@pytest.mark.parametrize(
    "asked",
    [
        ["bounds", "--theorems", "local_rows", "--attack", "--ascent-steps", "1"],
        ["attack", "--steps", "1"],
        ["certify", "--no-sharp", *QUICK],
        ["certify", *LAYER, *BETWEEN],
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:-1]),
)
def test_repeating_a_finished_run_answers_at_once(command, monkeypatch, asked):
    verb, *options = asked
    options += ["--text", "text.txt", "--length", "6", "--out", "out"]
    first = command(verb, BERT, *options)
    assert first.status == 0, first.err
    held = {path: path.read_bytes() for path in Path("out").glob("*.jsonl")}

    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patch:
        patch.setattr("lipscope.engine.ready_model.load_model", loaded)
        again = command(verb, BERT, *options)
    assert again.status == 0, again.err
    assert again.out == first.out
    assert {path: path.read_bytes() for path in Path("out").glob("*.jsonl")} == held
    points = sorted(Path("out").glob("worst*.npz"))
    assert len(points) == (verb != "bounds" and "--between" not in asked)
    for path in points:  # what is gone is found again
        content = path.read_bytes()
        path.write_bytes(content[:50])
        assert command(verb, BERT, *options).out == first.out
        assert path.read_bytes()[50:] == content[50:]


def test_certificates_of_one_input_stand_beside_each_other(command):
    options = ["--text", "text.txt", "--length", "6", "--out", "out", *QUICK]
    options += ["--no-sharp"]
    first = command("certify", BERT, *options, "--eps", "0.01")
    kept = {path: path.read_bytes() for path in Path("out").glob("worst-*.npz")}
    assert command("certify", BERT, *options, "--eps", "0.02").status == 0
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(list(Path("out").glob("worst-*.npz"))) == 2
    assert {bound.eps for bound in read_run("out").bound_values()} == {0.01, 0.02}
    assert command("certify", BERT, *options, "--eps", "0.01").out == first.out
    assert len(read_run("out").measurements()) == 1


def test_a_certificate_is_read_back_as_it_was(tmp_path, monkeypatch):
    asked = {"length": 6, "eps": 0.01, "steps": 1, "out": tmp_path / "run"}
    first = certify(BERT, TEXT, **asked)
    monkeypatch.setattr("lipscope.engine.ready_model.load_model", None)
    assert certify(BERT, TEXT, **asked) == first


def test_certify_a_read_out_of_a_file(command):
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    np.save("plain.npy", weight.numpy())
    held = {"weight": weight, "bias": torch.tensor([0.0, 0.5, -0.5])}
    save_file(held, "biased.safetensors")
    save_file({"only": weight}, "only.safetensors")
    options = ["certify", BERT, "--text", "text.txt", "--length", "6", *LAYER, "--jsonl"]
    found = {}
    for name in ("plain.npy", "only.safetensors", "biased.safetensors"):
        found[name] = command(*options, "--read-out", name).rows
        del found[name][0]["seconds"]
    assert found["plain.npy"] == found["only.safetensors"]
    margins = {name: rows[0]["margin"] for name, rows in found.items()}
    assert margins["plain.npy"] != margins["biased.safetensors"]


def test_a_tie_has_no_certificate(command):
    np.save("tie.npy", np.ones((2, 12)))
    options = [BERT, "--text", "text.txt", "--length", "6", *LAYER, "--read-out", "tie.npy"]
    result = command("certify", *options)
    assert result.status == 0
    assert "certified radius 0" in result.out and "a tie: two classes" in result.out
    assert "nan" not in command("certify", *options, "--jsonl").out.lower()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.npy", None, ["readable file", "No such file"]),
        ("none.safetensors", None, ["readable file"]),
        ("read.txt", b"1 2", [".npy or .safetensors"]),
        ("bad.npy", b"no array", ["cannot be read"]),
        ("bad.safetensors", b"no tensors", ["cannot be read"]),
        ("objects.npy", np.array([{}, {}]), ["cannot be read", "pickle"]),
        ("one.npy", np.ones((1, 12)), ["two classes"]),
        ("whole.npy", np.ones((2, 12), dtype=int), ["of floats"]),
        ("narrow.npy", np.ones((2, 5)), ["(classes, 12)", "Found (2, 5)"]),
        ("nan.npy", np.full((2, 12), np.nan), ["finite"]),
        ("two.safetensors", {"a": np.ones((2, 12)), "b": np.ones((2, 12))}, ["Found a, b"]),
        ("b.safetensors", {"weight": np.ones((2, 12)), "bias": np.ones(3)}, ["`bias`", "(2,)"]),
    ],
)
def test_bad_read_outs_are_one_line(command, name, content, expected):
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    elif isinstance(content, dict):
        save_file({key: torch.from_numpy(value) for key, value in content.items()}, name)
    elif content is not None:
        np.save(name, content)
    options = ["--text", "text.txt", "--length", "6", *LAYER, "--read-out", name]
    result = command("certify", BERT, *options)
    assert result.status == 2 and result.out == ""
    assert len(result.err.strip("\n").split("\n")) == 1, result.err
    for words in expected:
        assert words in result.err


def test_theorems(command):
    result = command("theorems")
    assert result.status == 0 and "castin_thm_3_3" in result.out
    for one in catalogue():  # what fails is marked in the list as well
        assert repr(one).count("as found; fails") == (not one.sound)
    assert result.out.count("fails)") == sum(not one.sound for one in catalogue())
    rows = command("theorems", "--jsonl").rows
    assert [row["theorem"] for row in rows] == [one.name for one in catalogue()]
    for word in {row["scope"] for row in rows}:  # explained where it stands
        assert f"{word.capitalize()}:" in result.out
    some = command("theorems", "--jsonl", "--kind", "lower", "--scope", "global").rows
    assert some and {(r["kind"], r["scope"]) for r in some} == {("lower", "global")}


SOURCES = {one.cite.replace(" ", "-"): one.cite for one in catalogue()}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--markdown"], "theorems"),
        (["--families"], "families"),
        (["--variants"], "variants"),
        *((["--markdown", "--cite", cite], f"theorems/{name}") for name, cite in SOURCES.items()),
    ],
)
def test_the_generated_pages_are_up_to_date(command, options, name):
    """`lipscope theorems --markdown > docs/theorems.md`, and so on."""
    assert command("theorems", *options).out == (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_as_recalled_is_said_wherever_such_a_theorem_is_printed(command):
    """The list, the catalogue and the page of its source; tables of bounds print what it states."""
    stated = {one.statement for one in catalogue() if one.statement.endswith(f"({RECALLED})")}
    pages = [DOCS / "theorems.md", *(DOCS / "theorems").iterdir()]
    shown = [command("theorems").out, *(page.read_text(encoding="utf-8") for page in pages)]
    assert len(stated) == 4
    for one in stated:
        assert one in " ".join(shown[0].split()) and one in shown[1]
        assert any(one in page for page in shown[2:])


def test_every_source_of_theorems_has_its_page():
    assert {one.stem for one in (DOCS / "theorems").iterdir()} == set(SOURCES)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bounds", BERT, "--layer", "9"], ["between 0 and 1", "Found 9"]),
        (["bounds", BERT, "--layer", "one"], ["--layer", "one"]),
        (["bounds", OLMO], ["Weight-based bounds are not available for this layer, because"]),
        (["attack", OLMO], ["not available for this layer", "no closed form"]),
        (["certify", GEMMA], ["scores are soft-capped"]),
        (["bounds", BERT, "--radius", "-1"], ["Found `--radius -1.0`"]),
        (["bounds", BERT, "--radius", "0.01"], ["at least the largest token norm"]),
        (["bounds", BERT, "--radius", "wide"], ["--radius", "norm", "wide"]),
        (["bounds", BERT, "--length", "0"], ["lengths", "whole numbers from 1"]),
        (
            ["bounds", BERT, "--metric", "other"],
            ["frobenius, token-relative, max-token, infinity", "other"],
        ),
        (["bounds", BERT, "--map", "block"], ["attention, heads, normed"]),
        (["bounds", BERT, "--map", "normed", "--radius", "2"], ["radius", "left out"]),
        (["attack", BERT, "--radius", "-1"], ["radius", "positive"]),
        (["attack", BERT, "--radius", "1", "--like-text"], ["exclude each other"]),
        (["attack", BERT, "--layer", "2"], ["between 0 and 1"]),
        (["certify", BERT, "--ball", "round"], ["token or frobenius"]),
        (["certify", BERT, "--steps", "0"], ["steps"]),
        (["certify", BERT, "--eps", "0"], ["a ball of radius 0 holds one input"]),
        (["certify", BERT, *BETWEEN[:2] * 2], ["each by its own text"]),
        (["certify", BERT, "--length", "0"], ["`--length`", "whole number of at least 1"]),
        (["certify", BERT, "--out", "text.txt/x"], ["--out", "cannot be written"]),
        (["certify", BERT, *BETWEEN, *LAYER, "--steps", "8"], ["no `--steps`", "leave it out"]),
        (["certify", BERT, *BETWEEN, *LAYER, "--pool", "last"], ["mean or first"]),
        (["certify", BERT, *BETWEEN, *LAYER, "--eps", "0.1"], ["no `--eps`", "leave it out"]),
        (["certify", BERT, "--decision"], ["(`--between`, `--read-out`)"]),
        (["certify", BERT, "--decision", *LAYER], ["`--between` or `--read-out`"]),
        (["certify", BERT, "--pool", "mean"], ["`--pool` goes with a decision"]),
        (["certify", BERT, *BETWEEN, "--read-out", "x.npy"], ["exclude each other"]),
        (["certify", BERT, *BETWEEN[:2]], ["at least two classes"]),
        (["certify", BERT, *BETWEEN[:3], " "], ["words in it"]),
        (["certify", BERT, *BETWEEN[:3], "\udcff"], ["half a character"]),
        (["certify", GEMMA, *BETWEEN, *LAYER], ["No certificate: ", "scores are soft-capped"]),
        (["certify", BERT, "--head", "3"], ["between 0 and 2"]),
        (["certify", BERT, "--random", "-1"], ["random"]),
        (["theorems", "--kind", "upward"], ["upper, lower"]),
    ],
)
def test_mistakes_are_one_line(command, arguments, expected):
    more = [] if arguments[0] == "theorems" else ["--text", "text.txt"]
    if arguments[0] != "theorems" and "--length" not in arguments:
        more += ["--length", "6"]
    result = command(*arguments, *more)
    assert result.status == 2, result.out + result.err
    assert result.out == ""
    assert len(result.err.strip("\n").split("\n")) == 1, result.err
    for words in expected:
        assert words in result.err
    assert [p.name for p in Path().iterdir()] == ["text.txt"]
