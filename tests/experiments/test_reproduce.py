"""The papers' experiments: register, folder, resuming, findings, and figure 1 on tiny models."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command import SIZES, TEXT
from lipscope import Rows, cli, read_run
from lipscope.errors import InputError
from lipscope.models import load_model
from lipscope.plugins import load_plugins
from lipscope.records.folder import RunFolder
from lipscope.records.power_law import growth
from lipscope_experiments import experiments, reproduce
from lipscope_experiments.castin2024.figure1 import controls
from lipscope_experiments.data import Text, texts_named
from lipscope_experiments.experiment import Source, Study, grid
from lipscope_experiments.findings import Claim, Findings, Table, exponent, middle, page_of
from rows import row
from small import drawn, sigma

BERT = f"random:bert:{SIZES},vocab_size=300,max_position_embeddings=128"
LONG = f"random:bert:{SIZES},vocab_size=300,max_position_embeddings=512"
VIT = (
    "random:vit:hidden_size=32,num_attention_heads=2,num_hidden_layers=2,image_size=32,patch_size=8"
)
GPT2 = "random:gpt2:n_embd=12,n_head=3,n_layer=2,n_positions=128,vocab_size=300"


def said_by(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lipscope", "reproduce", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


def test_names_are_paper_and_figure() -> None:
    names = [entry.name for entry in experiments()]
    assert len(names) == len(set(names))
    assert {"castin2024/figure1"} <= set(names)
    assert all(re.fullmatch(r"[a-z0-9]+(/[a-z0-9-]+)?", name) for name in names)


def test_every_experiment_cites_the_bibliography() -> None:
    text = (Path(__file__).parents[2] / "docs" / "references.bib").read_text()
    for entry in experiments():
        assert entry.cite == "derived here" or f"{{{entry.cite}," in text, entry.name


def test_without_the_package_one_line_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr("lipscope.cli.papers.load_plugins", lambda group: ())
    for word in ("--list", "castin2024/figure3"):
        status, out, err = said_by(monkeypatch, capsys, word)
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert "`pip install ./experiments`" in err


def test_a_foreign_package_comes_in_by_its_entry_point(tmp_path, monkeypatch, capsys) -> None:
    info = tmp_path / "foreign-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lipscope.experiments]\nmine = foreign\n")
    (tmp_path / "foreign.py").write_text(
        "from types import SimpleNamespace as One\n"
        "def experiments(): return [One(name='mine/own', title='Its title', models=())]\n"
        "def reproduce(name, **options):\n"
        "    return One(claims=[One(about=name, said='1', found='2')], remarks=())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("lipscope.cli.papers.load_plugins", load_plugins.__wrapped__)
    status, out, _ = said_by(monkeypatch, capsys, "--list")
    assert status == 0 and "Its title" in out and "castin2024/figure1" in out
    status, out, _ = said_by(monkeypatch, capsys, "mine/own", "--out", str(tmp_path / "run"))
    assert status == 0 and "mine/own" in out


def test_list(monkeypatch, capsys) -> None:
    status, out, _ = said_by(monkeypatch, capsys, "--list")
    assert status == 0
    assert all(entry.name in out for entry in experiments())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nobody/figure9", "--out", "x"], "`NAME` should be one of"),
        ([], "`NAME` should name an experiment"),
        (["castin2024/figure1", "--text", "absent.txt", "--out", "x"], "absent.txt"),
        (["castin2024/figure1", "--models", "minilmm", "--out", "x"], "minilm"),
        (["castin2024/figure1", "--images", "random", "--out", "x"], "`--images` goes with"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, tmp_path, words, expected) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = said_by(monkeypatch, capsys, *words)
    assert status == 2 and out == ""
    lines = [line for line in err.splitlines() if "lipscope:" in line]
    assert len(lines) == 1 and expected in lines[0]
    assert "Traceback" not in err


def test_a_folder_of_short_texts_is_one_text(monkeypatch, tmp_path) -> None:
    """Called as the folder is, also from within; two of one name would share tables and figures."""
    for name in ("news/b.txt", "news/a.txt", "old/news/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Short, in {name}.")
    monkeypatch.chdir(tmp_path / "news")
    _, text = texts_named(["."])
    assert text == Text("news", "Short, in news/a.txt.\n\nShort, in news/b.txt.")
    with pytest.raises(InputError, match="Found two called `news`"):
        texts_named([".", str(tmp_path / "old" / "news")])


@pytest.fixture
def short_text(monkeypatch) -> None:
    """A default text that takes no time to cut into tokens."""
    monkeypatch.setattr("lipscope_experiments.data.default_text", lambda: TEXT)


@pytest.mark.slow
def test_figure1_on_tiny_models(monkeypatch, capsys, tmp_path, short_text) -> None:
    words = ["castin2024/figure1", "--quick", "--models", f"{BERT},{GPT2}", "--out", "run"]
    monkeypatch.chdir(tmp_path)
    status, _, err = said_by(monkeypatch, capsys, *words)
    assert status == 0, err
    folder = tmp_path / "run"
    text = (folder / "findings.md").read_text()
    assert "as in the published scripts" in text and "Not run on bert-base-uncased or gpt2" in text
    # A token repeated at one position: no growth at all in an unmasked layer.
    spread = float(re.search(r"largest relative change (\S+) \|", text).group(1))
    assert spread < 1e-5
    # Prefixes of one passage in a causal layer: sigma cannot fall.
    assert re.search(r"fell in 0 of [1-9]\d* steps", text)
    for name in ("real-Python-manual.svg", "adversarial.png", "rows.parquet", "manifest.json"):
        assert (folder / name).stat().st_size > 100
    with pytest.raises(InputError, match="another specification"):
        reproduce("castin2024/figure1", models=[BERT], quick=True, out=folder)


def test_values_survive_a_torn_line(tmp_path) -> None:
    calls = []

    def square(i: int) -> dict[str, int]:
        return calls.append(i) or {"square": i * i}

    def run(count: int) -> list[dict]:
        with RunFolder(tmp_path / "run", {"a": 1}) as folder:
            study = Study(folder, (), (), True, None)
            return study.values("squares", grid(i=range(count)), square)

    run(2)
    path = tmp_path / "run" / "values.jsonl"
    path.write_text(path.read_text() + '{"key": "torn')
    assert [r["square"] for r in run(4)] == [0, 1, 4, 9]
    assert calls == [0, 1, 2, 3]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 4
    assert read_run(tmp_path / "run").values("squares")["square"].to_list() == [0, 1, 4, 9]


def test_page_escapes_and_counts() -> None:
    findings = Findings(
        (Claim("‖J‖ | n", "a\nb", "1"),), (Table("More", ("x", "y"), (("1", "2"),)),), ("Not run.",)
    )
    figures = [("f.svg", "F", "0123456789abcdef")]
    text = page_of(findings, title="T", cite="castin2024", command="c", figures=figures, origin="o")
    assert "| ‖J‖ \\| n | a b | 1 |" in text
    assert "![F](f.svg)\n<!-- sha256 0123456789abcdef -->" in text and "- Not run." in text


def test_exponent_says_where_no_power_law_fits() -> None:
    rows = [
        row(num_tokens=n, sample=s, sigma=(1 + 0.01 * s) * f(n))
        for n in (16, 64, 256)
        for s in range(6)
        for f in [lambda n: 10.0 if n == 64 else 1.0]
    ]
    fit = growth(rows, paired=True)
    assert fit is not None and fit.law == "no power law" and exponent(fit).endswith("✗")
    assert exponent(None) == "–" and middle([]) == "–"


@pytest.mark.parametrize(
    "name",
    [
        "witness",
        "castin2024/figure3",
        "castin2024/mean-field",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("control/early-warning", "kim2021/invertibility", "castin2024/gaussian")
        ),
    ],
)
def test_experiments_without_a_model(name: str, tmp_path) -> None:
    told: list[str] = []
    first = reproduce(name, quick=True, out=tmp_path / "a", progress=lambda d, n, p: told.append(p))
    again = reproduce(name, quick=True, out=tmp_path / "a")
    assert first == again and told
    assert (tmp_path / "a" / "findings.md").read_text().count("| --- |") >= 2
    with pytest.raises(InputError, match="goes with experiments on models"):
        reproduce(name, models=["minilm"], out=tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["witness", "castin2024/figure3", "castin2024/mean-field"])
def test_full_sizes_without_a_model(name: str, tmp_path) -> None:
    """Other sizes than those of ``--quick``, which the other tests run."""
    found = reproduce(name, out=tmp_path / "a")
    assert found.claims and "--quick" not in (tmp_path / "a" / "findings.md").read_text()


@pytest.fixture(scope="module")
def figure3(tmp_path_factory) -> tuple[Path, Findings]:
    """A finished run, and what it found."""
    folder = tmp_path_factory.mktemp("figure3") / "run"
    return folder, reproduce("castin2024/figure3", quick=True, out=folder)


def test_sigma_of_the_witness_is_quadratic(figure3) -> None:
    """Against the closed form of one dimension: (n-1)/n R² as R grows."""
    (table,) = figure3[1].tables
    for size, *_, last in table.lines:
        n = int(size)
        if n % 2:
            assert float(last) == pytest.approx((n - 1) / n, rel=1e-3)


def test_a_finished_run_is_drawn_again_from_its_values(figure3, monkeypatch) -> None:
    folder, found = figure3
    figure = folder / "figure3.svg"
    drawn, values = figure.read_bytes(), read_run(folder).values("figure3")
    digest = hashlib.sha256(drawn).hexdigest()[:16]
    assert f"(figure3.svg)\n<!-- sha256 {digest} -->" in (folder / "findings.md").read_text()
    figure.write_bytes(b"of older code")
    monkeypatch.setattr("lipscope_experiments.castin2024.figure3.top", None)  # none is computed
    assert reproduce("castin2024/figure3", quick=True, out=folder) == found
    assert figure.read_bytes() == drawn
    assert read_run(folder).values("figure3").equals(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "castin2024/dynamics",
        "castin2024/figure2",
        "castin2024/figure4",
        "castin2024/large-radius",
        "castin2024/looseness",
        "castin2024/measures",
        "castin2024/long-context",
        "castin2024/robustness",
        "castin2024/scaling-factor",
        "castin2024/sink-law",
        "castin2024/splitting",
        "castin2024/text-edits",
        "castin2024/worst-input",
        "questions/long-context",
        "questions/margin-gain",
        "questions/kept-tokens",
        "questions/precision",
        "questions/sink",
    ],
)
def test_experiments_on_a_tiny_model(name: str, tmp_path, short_text) -> None:
    found = reproduce(name, models=[LONG], quick=True, out=tmp_path / "a")
    assert found.claims and found.tables
    text = (tmp_path / "a" / "findings.md").read_text()
    assert "nan" not in text.split("\n## ")[0]
    assert list((tmp_path / "a").glob("*.png"))


@pytest.mark.slow
def test_windows_that_repeat_another_are_no_neighbours(tmp_path, monkeypatch) -> None:
    """Windows left out leave gaps in their numbers: the next one's own sentence is set aside."""
    text = "a" * 4 * len(TEXT) + TEXT
    monkeypatch.setattr("lipscope_experiments.data.default_text", lambda: text)
    for name in ("questions/margin-gain", "castin2024/robustness"):
        found = reproduce(name, models=[LONG], quick=True, out=tmp_path / name)
        assert found.claims and found.tables
    samples = {row.sample for row in read_run(tmp_path / "questions/margin-gain").measurements()}
    assert max(samples) >= len(samples)


def test_figure4_reads_pictures(tmp_path, short_text) -> None:
    """Sides of 4, 8 and 16 patches: 17, 65 and 257 tokens with the class token."""
    found = reproduce(
        "castin2024/figure4", models=[VIT], images="random", quick=True, out=tmp_path / "a"
    )
    (table,) = found.tables
    assert [line[0] for line in table.lines] == [f"{VIT}, random pixels, layer {i}" for i in (0, 1)]
    assert {line[1] for line in table.lines} == {"17 to 257"}
    text = (tmp_path / "a" / "findings.md").read_text()
    assert "--images random" in text


def test_certificates_end_at_the_first_refusal() -> None:
    """A ball within which the certificate allows more than the values do has none."""
    from lipscope_experiments.castin2024.robustness import _certificates

    layer, x = drawn(0), torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    found = _certificates(layer, x, [1e-3, 1e-2, 1e3, 1e-3], sharp=False)
    assert found[0] is not None and found[1] is not None and found[2:] == [None, None]
    assert found[0] >= 1e-3 * sigma(layer, x)


def test_text_at_one_position_stands_in_the_middle_of_training_too(monkeypatch, tmp_path) -> None:
    """Position 0 was that of the first token alone: the control must not rest on it."""
    loaded = replace(load_model(BERT), weights="float32", trained_length=48)
    asked: dict[tuple[str, int], Any] = {}

    def measure(self: Study, part: str, model: Any, data: Any = None, **options: Any) -> Rows:
        if not isinstance(data, str):
            asked[part, data["input_ids"].shape[1]] = data
        return Rows([])

    monkeypatch.setattr(Study, "measure", measure)
    with RunFolder(tmp_path / "run", {"a": 1}) as folder:
        source = Source(loaded, "words", {"data": TEXT})
        found = controls(Study(folder, (), (), True, None), source)
        next(one for one in found if one.name.endswith("position 24"))
    for n in (16, 32, 64):
        first, middle = (
            asked[f"control-text, all at position {place}-{loaded.name}, words", n]
            for place in (0, 24)
        )
        assert first["input_ids"].equal(middle["input_ids"]) and first["input_ids"].shape == (3, n)
        for batch, place in ((first, 0), (middle, 24)):
            assert batch["position_ids"].equal(torch.full((3, n), place))


def test_parts_of_a_study_share_the_rows_of_one_folder(tmp_path) -> None:
    loaded, layer, x = load_model(BERT), drawn(0), torch.ones(5, 4).double()
    asked: dict[str, Any] = {"lengths": [6], "samples": 2, "dtype": "float64"}
    told: list[tuple[str, int, int]] = []

    def run() -> list[Rows]:
        with RunFolder(tmp_path / "run", {"a": 1}) as folder:
            study = Study(folder, (), (), True, lambda *now: told.append(now))
            return [
                study.measure("plain", loaded, TEXT, **asked),
                study.measure("with more", loaded, TEXT, rest=True, **asked),
                study.measure("other layer", loaded, TEXT, layers=1, **asked),
                study.bounds("bounded", loaded, TEXT, layers=0, metric="frobenius", **asked),
                Rows(study.built("made", [(3, lambda: x)], layer=layer, kind="ones", of=loaded)),
            ]

    plain, more, part, bounded, (made,) = run()
    ids = [row.id for row in plain]
    assert [row.id for row in more] == ids
    assert [row.id for row in (*bounded, *part)] == [*ids[::2], *ids[1::2]]
    # One id stands for one sigma, and what is asked besides is there whoever came first.
    assert [row.sigma for row in more] == [row.sigma for row in plain]
    assert all(row.sigma_rest is None for row in plain)
    assert all(row.sigma_rest is not None for row in (*more, *part))
    assert {one.id for one in bounded.bounds} == {row.id for row in bounded}
    assert (made.input, made.sample, made.model) == ("ones", 3, BERT)
    assert (4, 4, "with more") in told
    # Nothing is done again, and there is one folder.
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    held = run()
    assert all(row.sigma_rest is not None for row in held[1])
    assert [[r.id for r in one] for one in held] == [ids, ids, ids[1::2], ids[::2], [made.id]]
    assert {r.id: r.sigma for one in held for r in one} == {r.id: r.sigma for r in (*plain, made)}
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    assert {row.id for row in read_run(tmp_path / "run").measurements()} == {*ids, made.id}
    assert not [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
