"""Reports of run folders: what the page carries, what it leaves out, and the figures."""

from __future__ import annotations

import hashlib
import json
import math
import re
import resource
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scipy import stats

import lipscope as ls
from command import BERT, TEXT
from folders import NASTY, grown, pushed, sandwiched, shares, trained, written
from lipscope import Measurement, Rows, TokenShare, read_run, report
from lipscope.charts.look import save_each
from lipscope.charts.marks import spaced
from lipscope.errors import InputError
from lipscope.pages import points
from lipscope.pages.content import Content, headlines
from lipscope.pages.figures import training_charts
from lipscope.pages.html_page import bibliography, methods
from lipscope.pages.points import axes, items_of, points_of, training_of
from rows import bound_of, row, write_lines

KINDS = ["sigma", "growth", "exponents", "slopes", "radius-n", "rank", "sigma-radius", "text"]


def data_of(page: str) -> dict[str, Any]:
    """What the scripts of a page read."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def words(path: Path) -> str:
    elements = ElementTree.parse(path).iter()
    return "\n".join(e.text or "" for e in elements if e.tag.endswith(("text", "tspan")))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("page")
    rows = (
        grown()
        + grown(heads=2)
        + [row(layer=2, sample=9, sigma=None, status="failed", error="<i>boom</i>")]
    )
    runs = [
        written(folder / "run", rows),
        written(folder / "nasty", grown(layers=1, model=NASTY), text=NASTY),
        sandwiched(folder / "bounds"),
    ]
    (made,) = report(runs, folder / "report.html")
    return made.read_text(encoding="utf-8")


def test_the_page_asks_for_nothing(page: str) -> None:
    """No address in what it loads or draws; those of the licence texts of Vega are only words."""
    own = page.replace(page[page.index("<script>(() => {") : page.index('"use strict";')], "")
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", own)
    assert "http" not in re.sub(r"<h3>.*?</pre>", "", own, flags=re.DOTALL).replace(
        "http-equiv", ""
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'")


def test_text_and_names_are_escaped(page: str) -> None:
    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page.replace('"<img', "") or NASTY not in page
    assert NASTY not in page
    data = data_of(page)
    assert any(NASTY in word for text in data["texts"] for word in text)
    assert data["settings"][-1]["model"] == NASTY
    assert "&lt;i&gt;boom&lt;/i&gt;" in page  # the error of a failed row


def test_every_row_stands_there_once(page: str) -> None:
    data = data_of(page)
    count = len(data["points"]["n"])
    assert count == 27 + 54 + 1 + 9 + 3  # with heads, failed, nasty, adversarial
    assert data["points"]["kind"].count("adversarial") == 3
    assert "93 converged, 1 failed" in page and "1 row failed" in page
    # 90 rows with an interval of 1e-6 and one of ||J||_F, 3 adversarial ones of sigma alone.
    assert "at least 1 - 0.00019" in page  # rounded up


def test_exponents_are_those_of_the_rows(page: str) -> None:
    """sigma ~ n^(1/4) and, without the top token, n^(1/2), in closed form."""
    fits = data_of(page)["fits"]
    assert {fit["kind"] for fit in fits} == {"real", "rest", "adversarial"}
    for fit in fits:
        exponent = 0.5 if fit["kind"] == "rest" else 0.25
        assert fit["slope"] == pytest.approx(exponent, abs=1e-4)
        assert fit["local"] == pytest.approx([exponent] * 2, abs=1e-4)
        assert fit["lengths"] == [16, 32, 64]


def test_means_are_geometric(page: str) -> None:
    data = data_of(page)
    names = ("kind", "layer", "head", "n", "sigma", "rank")
    rows = zip(*(data["means"][name] for name in names), strict=True)
    for kind, layer, head, n, sigma, rank in rows:
        if kind == "real":
            level = (1 + int(layer) + (head or 0)) * n**0.25
            assert sigma == pytest.approx(level * (1.0 * 1.1 * 1.2) ** (1 / 3), rel=1e-4)
            assert rank == pytest.approx(16.0, rel=1e-4)


def test_bounds_are_shown_one_metric_at_a_time(page: str) -> None:
    frobenius, infinity = data_of(page)["bounds"]
    assert frobenius["metric"] == "frobenius" and infinity["metric"] == "infinity"
    names = {line["name"]: line for line in frobenius["lines"] if line["n"] == 64}
    assert names["sigma, real text"]["value"] == pytest.approx(64**0.25, rel=1e-4)
    assert names["local certificate, real text"]["value"] == pytest.approx(2 * 64**0.25, rel=1e-4)
    assert names["castin_thm_3_3"]["value"] == pytest.approx(800)
    assert not infinity["measured"]
    (lacking,) = [t for t in frobenius["table"] if t["theorem"] == "kim_thm_3_1"]
    assert lacking["value"] is None and lacking["why"] == "no L2 attention: <b>"


def test_sources_are_quoted_with_their_bibtex(page: str) -> None:
    assert "@inproceedings{castin2024," in page and "@inproceedings{kim2021," in page
    shown = page[page.index('<section id="references">') : page.index("</main>")]
    assert "Statement of local_norms (local_norms)" in shown  # derived here: no entry
    assert "Statement of kim_thm_3_1" not in shown  # it has no value
    assert len(bibliography()) > 15


def test_a_changed_mask_is_part_of_the_model_s_name(tmp_path: Path) -> None:
    weights = "random, seed 0, with a causal mask"
    run = written(tmp_path / "run", [replace(one, weights=weights) for one in grown()])
    (said,) = methods(items_of([read_run(run)]))
    assert "of minilm · with a causal mask (3 layers)" in said


def test_radii_of_decisions_are_one_source(tmp_path: Path) -> None:
    (one, *_) = rows = grown(1)
    about = {"kind": "radius", "cite": "derived here"}
    some = [
        bound_of(one, theorem=f"decision_token_{k}", statement=f"a{k} stays", **about)
        for k in range(3)
    ]
    shown = Rows(rows, bounds=some).show().html
    shown = shown[shown.index('<section id="references">') : shown.index("</main>")]
    assert shown.count("the radius of a decision") == 1 and "a1 stays" not in shown


def test_the_methods_sentence_says_what_was_measured(tmp_path: Path) -> None:
    run = written(tmp_path / "run", grown(map="block", metric="token-relative"))
    (said,) = methods(items_of([read_run(run)]))
    for part in (
        "the map “block” of minilm (3 layers)",
        "token-relative norm",
        "3 windows of text per length of 16, 32 and 64 tokens (float32, seed 0)",
        "lipscope 0.1.0",
        "δ = 1e-06",
        "[castin2024]",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("metric", "upper", "held", "lacks"),
    [
        ("frobenius", 2.1, ("top singular value", "Golub–Kahan", "δ = 1e-06."), ("lower bound",)),
        (
            "max-token",
            None,
            ("the norm of its", "alternating maximisation; each value is a lower bound (≥)."),
            ("Golub", "interval", "δ", "singular"),
        ),
        (
            "max-token",
            2.1,
            ("alternating maximisation; upper ends",),
            ("Golub", "δ", "lower bound"),
        ),
        ("infinity", None, ("row sum; each value is a lower bound (≥).",), ("Golub", "δ")),
        ("infinity", 2.0, ("the sums of all rows",), ("Golub", "δ", "lower bound")),
    ],
)
def test_the_methods_sentence_claims_what_the_metric_has(
    tmp_path: Path,
    metric: str,
    upper: float | None,
    held: tuple[str, ...],
    lacks: tuple[str, ...],
) -> None:
    run = written(tmp_path / "run", [row(metric=metric, upper=upper)])
    (said,) = methods(items_of([read_run(run)]))
    assert all(part in said for part in held), said
    assert not any(part in said for part in lacks), said


def test_the_methods_sentence_names_the_text(tmp_path: Path) -> None:
    rows = [row(text=name, sample=k) for k, name in enumerate(("alice", "default"))]
    rows += [row(layer=1, model="vit", input="image")]
    run = written(tmp_path / "run", rows, texts={"alice": "ab" * 32, "default": "cd" * 32})
    items = items_of([read_run(run)])
    assert [item.kind for item in items] == ["real"] * 3
    said = methods(items)
    for part, sentence in zip(
        (
            "on 1 window of the text “alice” (SHA-256 abababababab) per length of 16 tokens (",
            "on 1 window of Python's language manual (SHA-256 cdcdcdcdcdcd) per length of 16",
            "on 1 picture per length",
        ),
        said,
        strict=True,
    ):
        assert part in sentence


def test_every_further_row_takes_little_room(tmp_path: Path) -> None:
    """Ten thousand rows would stay below five megabytes; the slow test has them all."""
    sizes = []
    for layers in (1, 10):
        rows = grown(layers=layers, heads=2, lengths=(16, 32, 64, 128, 256), samples=5)
        run = written(tmp_path / f"run-{layers}", rows)
        (made,) = report([run], tmp_path / "report.html")
        sizes.append(made.stat().st_size)
    each = (sizes[1] - sizes[0]) / 450
    assert sizes[0] + 10_000 * each < 5_000_000


@pytest.mark.slow
def test_ten_thousand_rows_stay_below_five_megabytes(tmp_path: Path) -> None:
    rows = grown(layers=20, heads=5, lengths=(16, 32, 64, 128, 256), samples=20)
    assert len(rows) == 10_000
    (made,) = report([written(tmp_path / "run", rows)], tmp_path / "report.html")
    assert made.stat().st_size < 5_000_000
    assert len(data_of(made.read_text(encoding="utf-8"))["points"]["n"]) == 10_000


def test_more_rows_are_sampled_and_the_worst_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(points, "MAX_POINTS", 100)
    rows = grown(layers=10, samples=10)
    worst = max(rows, key=lambda r: r.sigma or 0.0)
    found = points_of(items_of([read_run(written(tmp_path / "run", rows))]))
    assert len(found.points) == 100
    assert worst in [item.row for item in found.items]
    assert len(found.means) == 30 and sum(m["count"] for m in found.means) == 300
    (remark,) = found.remarks
    assert remark.startswith("Points show 100 of 300 rows: the 20 worst of every setting")


def test_the_tokens_of_largest_share_are_those_of_a_long_window_too(tmp_path: Path) -> None:
    """Shares of 1/2000 that differ by less than what the page keeps of each, in no order."""
    (one,) = grown(1, lengths=(2000,), samples=1)
    run = written(tmp_path / "run", [one])
    held = [(1 + 1e-4 * (k * 737 % 2000) / 2000) / 2000 for k in range(2000)]
    tokens = [
        TokenShare(id=one.id, index=k, text=f"w{k}", share_in=s, share_out=None, norm=1.0)
        for k, s in enumerate(held)
    ]
    write_lines(run / "tokens.jsonl", map(vars, tokens))
    (window,) = Content([read_run(run)]).as_plain()["windows"].values()
    assert len(set(window["in"])) == 1
    top = nlargest(8, held)
    assert [held[k] for k in window["most"]] == top
    assert window["others"] == pytest.approx(math.fsum(held) - math.fsum(top), rel=1e-4)


def test_a_window_is_in_the_selection_once_and_a_text_on_the_page_once(page: str) -> None:
    """Also where every window says the same words, as here."""
    data = data_of(page)
    names = ("s", "source", "layer", "head", "kind", "n", "sample")
    shown = list(zip(*(data["points"][name] for name in names), strict=True))
    assert len(set(shown)) == len(shown)
    listed = [shown[int(k)] for k in data["windows"]]
    assert len(listed) == len(set(listed)) > 60 and {one[4] for one in listed} == {"real"}
    assert len(set(map(tuple, data["texts"]))) == len(data["texts"]) == 1


def test_runs_of_one_model_are_told_apart(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        rows = [
            row(**(vars(r) | {"id": f"{seed}/{k}", "seed": seed})) for k, r in enumerate(grown(1))
        ]
        runs.append(written(tmp_path / str(seed), rows))
    settings = points_of(items_of([read_run(run) for run in [*runs, runs[0]]])).settings
    assert [s["model"] for s in settings] == ["minilm · seed 0", "minilm · seed 1"]
    assert [s["rows"] for s in settings] == [9, 9]


def test_a_folder_has_the_same_numbers_beside_another(tmp_path: Path) -> None:
    """Two samples of one text share their first window, whose row has one id."""
    one = grown(2)
    two = [r if r.sample == 0 else replace(r, id=f"b/{r.id}", sigma=9.0) for r in one]
    runs = [read_run(written(tmp_path / name, rows)) for name, rows in (("a", one), ("b", two))]
    both = Content(runs)
    for run in runs:
        alone = Content([run])
        for some, mine in ((both.means, alone.means), (both.points.fits, alone.points.fits)):
            assert [v | {"source": None} for v in some if v["source"] == run.path.name] == mine
    assert (len(both.items), len(both.rows)) == (36, 30)
    part = read_run(written(tmp_path / "part", one[:7]))
    assert Content([part, runs[0]]).means == Content([runs[0]]).means


def test_axes_hold_every_value_and_no_runaway_end() -> None:
    rows = [row(num_tokens=n, sigma=float(n)) for n in (2, 8)] + [row(sigma=4.0, upper=1e9)]
    found = axes(rows)
    assert found is not None
    assert found["x"][0] < 2 < 16 < found["x"][1]
    assert found["y"][0] < 2 and 8 < found["y"][1] < 300
    assert axes([]) is None


def test_figures_are_those_of_the_page(tmp_path: Path, monkeypatch) -> None:
    def valid(chart: Any, paths: list[Path]) -> list[Path]:
        chart.to_dict(validate=True)  # which drawing leaves out, since it takes longest
        return save_each(chart, paths)

    monkeypatch.setattr("lipscope.charts.save_each", valid)
    run = written(tmp_path / "run", grown() + grown(heads=2))
    bounds = sandwiched(tmp_path / "bounds")
    runs = [run, bounds, pushed(tmp_path / "pushed")]
    made = report(runs, tmp_path / "report.html", png=tmp_path / "p", svg=tmp_path / "s")
    names = {path.stem for path in made if path.suffix == ".svg"}
    heads = {f"heads-{q}" for q in ("sigma", "relative", "share")}
    bounded = {f"bounds-minilm-attention-{m}-0" for m in ("frobenius", "infinity")}
    assert names == {*KINDS, *heads, *bounded, "growth-adversarial", "depth", "push"}
    assert {path.stem for path in made if path.suffix == ".png"} == names
    assert all(path.exists() for path in made)
    said = {name: words(tmp_path / "s" / f"{name}.svg") for name in names}
    assert "all tokens move" in said["sigma"] and "top token fixed" in said["sigma"]
    assert "~ n^(1/2)" in said["growth"] and "~ n^(1/4)" in said["growth"]
    assert "exponent s of sigma ~ nˢ" in said["exponents"]
    assert "16–32" in said["slopes"]
    assert "castin_thm_3_3" in said["bounds-minilm-attention-frobenius-0"]
    assert "1 % off sigma · size" in said["push"] and "decision certified" in said["push"]
    assert NASTY[:20] in said["text"].replace("\n", "")
    assert (tmp_path / "p" / "sigma.png").read_bytes().startswith(b"\x89PNG")


def test_legends_and_guides_are_of_what_is_drawn(tmp_path: Path) -> None:
    one = [r for r in grown(lengths=(16, 32)) if r.layer or r.num_tokens == 16]
    rows = [replace(r, sigma_rest=None) for r in (*one, *grown(1, lengths=(16,), map="block"))]
    report([written(tmp_path / "run", rows)], tmp_path / "page.html", svg=tmp_path / "s")
    said = {path.stem: words(path) for path in (tmp_path / "s").iterdir()}
    block = next(name for name in said if name.startswith("growth") and "block" in name)
    grows = next(name for name in said if name.startswith("growth") and "block" not in name)
    assert "~ n^(1/2)" in said[grows] and "~ n^" not in said[block]  # one length has no growth
    assert not any("top token fixed" in text for text in said.values())
    assert "attention" in said["depth"] and "residual" not in said["depth"]


def test_a_disk_that_fills_while_figures_are_drawn_is_an_error_of_one_line(tmp_path, monkeypatch):
    run = written(tmp_path / "run", grown(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(chart: Any, paths: list[Path]) -> list[Path]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        return save_each(chart, paths)

    monkeypatch.setattr("lipscope.charts.save_each", full)
    try:
        with pytest.raises(InputError, match="should be places that can be written"):
            report([run], tmp_path / "page.html", svg=tmp_path / "svg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.glob("svg/.*"), *tmp_path.glob("svg/*")]


def test_a_page_that_would_take_the_place_of_a_folder_is_refused(tmp_path):
    run = written(tmp_path / "run", grown(1))
    with pytest.raises(InputError, match=f"the file of the page. Found the folder `{tmp_path}`"):
        report([run], tmp_path)


@pytest.mark.parametrize("name", ["report.pdf", "report", "run/rows.jsonl", "run/manifest.json"])
def test_a_page_is_named_as_one(tmp_path, name):
    run = written(tmp_path / "run", grown(1))
    before = {file: file.read_bytes() for file in run.iterdir()}
    with pytest.raises(InputError, match=r"`out` should end in \.html, as a page is HTML"):
        report([run], tmp_path / name)
    with pytest.raises(InputError, match=r"`path` should end in \.html"):
        Rows(grown(1)).show().save(tmp_path / name)
    assert {file: file.read_bytes() for file in run.iterdir()} == before


def test_words_are_spaced_as_their_tokenizer_means_them() -> None:
    texts = ["[CLS]", "how", "smooth", "##ness", "grows", "?"]
    assert "".join(spaced(shares(row(), texts))) == "[CLS] how smoothness grows?"


def test_checkpoints_of_a_model_stand_side_by_side(tmp_path: Path) -> None:
    """The mean of three windows and, in logarithms, its Student interval."""
    runs = [trained(tmp_path / "run"), written(tmp_path / "other", grown(1))]
    content = Content([read_run(run) for run in runs])
    data = content.as_plain()
    (group,) = data["groups"]
    assert (group["name"], group["steps"]) == ("org/lm@step*", [0, 10, 100, 1000])
    assert [s["group"] for s in data["settings"]] == [0, 0, 0, 0, None]
    steps = data["steps"]
    assert len(steps["step"]) == 4 * 2 * 3 and set(steps["count"]) == {3}
    logs = [math.log(1 + 0.1 * k) for k in range(3)]
    mean, half = fmean(logs), stats.t.ppf(0.975, 2) * stats.sem(logs)
    for k in range(len(steps["step"])):
        level = (1 + math.log10(1 + steps["step"][k])) * (1 + int(steps["layer"][k]))
        level *= steps["n"][k] ** 0.25
        assert steps["sigma"][k] == pytest.approx(level * math.exp(mean), rel=1e-4)
        assert steps["low"][k] == pytest.approx(level * math.exp(mean - half), rel=1e-4)
        assert steps["high"][k] == pytest.approx(1.02 * level * math.exp(mean + half), rel=1e-4)
    ((name, chart),) = training_charts(content)
    assert name.startswith("training-org-lm-step--attention-frobenius-")
    said = words(save_each(chart, [tmp_path / "training.svg"])[0]).split("\n")
    assert {"training step", "sigma", "layer", "10", "1,000"} <= set(said)


def test_means_are_geometric_with_the_interval_of_windows_that_share_no_text() -> None:
    values = enumerate((1.0, 10.0, 100.0))
    rows = [row(sample=k, sigma=s, upper=s, sigma_rest=s, start=100 * k) for k, s in values]
    (mean,) = ls.Rows(rows)._content().points.means
    # Student's quantile with two degrees of freedom is 4.3027; logs are -1, 0, 1 times ln 10.
    half = 4.3027 * math.log(10) / math.sqrt(3)
    ends = [math.exp(math.log(10) - half), 10.0, math.exp(math.log(10) + half)]
    for names in (("low", "sigma", "high"), ("rest_low", "rest", "rest_high")):
        assert [mean[name] for name in names] == pytest.approx(ends, rel=1e-4)
    (shared,) = ls.Rows([replace(r, start=r.sample) for r in rows])._content().points.means
    assert mean["apart"] and not shared["apart"]


def test_one_window_has_the_interval_of_the_solver_and_far_steps_a_logarithmic_axis(
    tmp_path: Path,
) -> None:
    for steps, turn in (((10, 20), None), ((10, 501), 10.0), ((0, 1), None)):
        rows = [row(model=f"lm/{k}", step=k, sigma=2.0, upper=3.0) for k in steps]
        items = items_of([read_run(written(tmp_path / f"{turn}-{steps[0]}", rows))])
        found = training_of(items, points_of(items).settings)
        assert found.turn == turn
        # exp(log 3) is 3.0000000000000004, and rounded up as an upper end is
        ends = [(m["low"], m["sigma"], m["high"]) for m in found.means]
        assert ends == [(2.0, 2.0, 3.0001)] * 2
        low, high = found.groups[0]["axes"]["all"]["16"]["x"]
        assert low < steps[0] and steps[1] < high


@pytest.mark.parametrize("rows", [[], [row(sigma=None)]])
def test_folders_without_a_sigma_are_refused(tmp_path: Path, rows) -> None:
    run = written(tmp_path / "run", rows)
    with pytest.raises(InputError, match=r"`DIR` should hold a row with a finite, positive sigma"):
        report([run])


def test_a_folder_of_findings_alone_is_named_as_one(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [])
    with pytest.raises(InputError, match=f"Found no rows in {run}.$"):
        report([run])
    (run / "findings.md").write_text("# What was found")
    with pytest.raises(InputError, match=f"Found no rows in {run}; read its `findings.md`.$"):
        report([run])


# --- what stands apart -----------------------------------------------------------------------


def scaled(rows: list[Measurement], factor: float, **values: Any) -> list[Measurement]:
    """The same rows, that much larger, with ids of their own."""
    return [
        row(**(vars(r) | {"id": f"{r.id}/{factor}/{values}", "sigma": factor * (r.sigma or 0)}))
        for r in [row(**(vars(r) | values)) for r in rows]
    ]


def test_texts_inputs_and_folders_are_never_in_one_curve(tmp_path: Path) -> None:
    """Curves of exponent 1/4 at levels of their own: pooled, no mean would be at its level."""
    texts = {"one": "a" * 64, "two": "b" * 64}
    one, two = (scaled(grown(1), f, text=name) for name, f in (("one", 1.0), ("two", 100.0)))
    built = [
        r
        for name, f in (("unbalanced", 5.0), ("quadratic", 50.0))
        for r in scaled(grown(1), f, text="one", input=name)
    ]
    again = scaled(grown(1), 1000.0, text="one")
    runs = [
        written(tmp_path / "first", one + two + built, texts=texts),
        written(tmp_path / "second", again, texts=texts),
    ]
    data = Content([read_run(run) for run in runs]).as_plain()
    assert [s["text"] for s in data["settings"]] == ["one", "two"]
    assert [s["sources"] for s in data["settings"]] == [["first", "second"], []]
    level = (1.0 * 1.1 * 1.2) ** (1 / 3)
    names = ("s", "source", "kind", "n", "sigma", "count")
    found = zip(*(data["means"][name] for name in names), strict=True)
    at_16 = {key: (v, count) for *key, n, v, count in found for key in [tuple(key)] if n == 16}
    assert at_16 == {
        key: (pytest.approx(f * level * 16**0.25, rel=1e-4), 3)
        for key, f in {
            (0, "first", "real"): 1.0,
            (0, "second", "real"): 1000.0,
            (0, None, "unbalanced"): 5.0,
            (0, None, "quadratic"): 50.0,
            (1, None, "real"): 100.0,
        }.items()
    }
    assert {fit["samples"] for fit in data["fits"]} == {3}
    assert all(fit["slope"] in (0.25, 0.5) and fit["low"] is not None for fit in data["fits"])


def test_inputs_built_at_several_radii_stand_apart(tmp_path: Path) -> None:
    rows = [
        r for f in (1.0, 10.0) for r in scaled(grown(1), f, input="unbalanced", radius_max=3 * f)
    ]
    found = points_of(items_of([read_run(written(tmp_path / "run", [*grown(1), *rows]))]))
    assert found.settings[0]["kinds"] == ["real", "unbalanced, radius 3", "unbalanced, radius 30"]
    assert all(m["count"] == 3 for m in found.means)


def test_a_card_and_its_words_say_the_same_numbers(tmp_path: Path) -> None:
    """The middle of three windows, 1.1 times its level, of the layer of largest sigma."""
    content = Content([read_run(written(tmp_path / "run", grown()))])
    cards = content.as_plain()["cards"]
    (best,) = (card for card in cards if card["first"])
    assert (best["layer"], best["n"], best["sample"]) == ("2", 64, 1)
    assert best["sigma"] == pytest.approx(3 * 1.1 * 64**0.25, rel=1e-4)
    assert headlines(content.cards) == [best["said"]]
    for card in cards:
        assert f"Layer {card['layer']}: sigma {card['sigma']:.3g}" in card["said"]
        assert f"{card['share']:.0%}".replace("%", " %") in card["said"]
        assert "the first token, '[CLS]'" in card["said"] and card["word"] == "[CLS]"
        (fit,) = (
            f
            for f in content.as_plain()["fits"]
            if (f["layer"], f["kind"]) == (card["layer"], "real")
        )
        assert f"n^{fit['slope']:.2f}" in card["said"] and fit["interval"] in card["said"]


def test_names_of_files_do_not_collide(tmp_path: Path, monkeypatch) -> None:
    def named(chart: object, paths: list[Path]) -> list[Path]:  # drawn and looked at elsewhere
        for path in paths:
            path.touch(exist_ok=False)
        return paths

    monkeypatch.setattr("lipscope.charts.save_each", named)
    names = ["a/b", "a-b", "модель", "模型", "x" * 300]
    runs = [written(tmp_path / str(k), grown(1, model=m)) for k, m in enumerate(names)]
    made = report(runs, tmp_path / "page.html", svg=tmp_path / "svg")
    assert len(set(made)) == len(made) == 1 + 5 * len(KINDS)
    assert max(len(path.name) for path in made) < 200
    assert (tmp_path / "svg" / "sigma-a-b-attention-frobenius.svg").exists()


def test_control_characters_leave_drawings_whole(tmp_path: Path) -> None:
    bad = "a\x00b\x1b[31mc\x07d\x85e\ufffff"
    rows = grown(1, model=bad)
    run = written(tmp_path / "run", rows, ["[CLS]", bad, "\x08", "end"])
    made = report([run], tmp_path / "page.html", svg=tmp_path / "svg", png=tmp_path / "png")
    for path in made:
        if path.suffix == ".svg":
            ElementTree.parse(path)  # an XML parser takes no control character
    page = made[0].read_text(encoding="utf-8")
    own = page.replace(page[page.index("<script>(() => {") : page.index('"use strict";')], "")
    assert not re.search(r"[\x00-\x08\x0e-\x1f]|\\u00[01]", own) and "␛[31m" in own
    save_each(ls.Rows(rows).plot(), [tmp_path / "growth.svg"])
    ElementTree.parse(tmp_path / "growth.svg")


# --- the command ----------------------------------------------------------------------------


def test_the_command_draws_what_the_commands_wrote(command) -> None:
    """From measure and bounds to the page, on a tiny model."""
    ls.measure(BERT, TEXT, lengths=[4, 6, 8], samples=2, rest=True, average=True, out="run")
    ls.bounds(BERT, TEXT, layers=[0], lengths=[4], attack=True, out="bounds")
    result = command("report", "run", "bounds", "-o", "out/page.html", "--svg", "figures")
    assert result.status == 0, result.err
    first, *figures = result.out.splitlines()
    assert first == "out/page.html" and len(figures) >= 10
    data = data_of(Path(first).read_text(encoding="utf-8"))
    assert len(data["points"]["n"]) == 2 * 3 * 2 + 2
    assert [b["metric"] for b in data["bounds"]] and data["windows"]
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()[:12]
    begins = (
        f"2 windows of the text “{TEXT[:60]}…” (SHA-256 {sha256}) per length of 4, 6 and 8 tokens"
    )
    assert begins in Path(first).read_text(encoding="utf-8")
    assert not list(Path("out").glob("*.part"))


def test_the_page_stands_in_the_first_folder(command) -> None:
    written(Path("run"), grown(1))
    assert command("report", "run").out == "run/report.html\n"


def test_mistakes_end_in_one_line(command) -> None:
    Path("empty").mkdir()
    Path("bad").mkdir()
    Path("bad/manifest.json").write_text("{]", encoding="utf-8")
    written(Path("run"), grown(1))
    for arguments, expected in (
        (["nowhere"], "`nowhere` should be a run folder"),
        (["empty"], "Found none in it"),
        (["bad"], "readable manifest"),
        (["run", "-o", "run/rows.jsonl/page.html"], "places that can be written"),
        (["run", "--png", "run/rows.jsonl"], "places that can be written"),
    ):
        result = command("report", *arguments)
        assert result.status == 2 and result.out == ""
        assert len(result.err.strip().splitlines()) == 1 and expected in result.err
