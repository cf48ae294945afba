"""Two runs side by side, sigma through depth, and what else a page says of several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from folders import decided, edited, gained, grown, stacked, valued, written
from lipscope import Measurement, read_run, report
from lipscope.pages.content import Content
from lipscope.pages.contrast import contrast_of
from lipscope.records import EDITS, TextEdit
from lipscope.records.sampling import holm, paired_shift
from rows import row

SIGMAS = np.random.default_rng(0).lognormal(1.0, 0.2, (2, 5))


def sampled(sigmas: Sequence[float], slack: float = 1.0, **values: Any) -> list[Measurement]:
    """Windows of one layer at 16 tokens, with the digests of one text unless given."""
    text = values.pop("of", "alice")
    return [
        row(
            sample=k,
            sigma=float(v),
            upper=float(v) * slack,
            **{"tokens_sha256": f"{text}/{k}", "id": f"{values}/{text}/{k}", "relative": float(v)}
            | values,
        )
        for k, v in enumerate(sigmas)
    ]


def compared(folder: Path, *sides: Sequence[Measurement], **spec: Any) -> list[dict[str, Any]]:
    """Rows of the table of sigma of two folders."""
    runs = [read_run(written(folder / f"{k}", s, **spec)) for k, s in enumerate(sides)]
    return contrast_of(runs).tables[0]["rows"]


def ends(one: dict[str, Any]) -> list[float]:
    return [math.log(one[name]) for name in ("ratio", "low", "high")]


def test_the_same_windows_are_compared_in_pairs(tmp_path: Path) -> None:
    """Student's paired test of scipy; a window that one folder lacks is left out."""
    before, after = SIGMAS
    (one,) = compared(tmp_path, sampled(before), sampled(after[:4], model="smoothed"))
    logs = np.log(after[:4]) - np.log(before[:4])
    found = stats.ttest_1samp(logs, 0.0)
    assert one["how"] == "the same windows" and one["count"] == "4"
    assert ends(one) == pytest.approx([logs.mean(), *found.confidence_interval(0.95)], abs=1e-4)
    assert one["p"] == one["holm"] == pytest.approx(found.pvalue, rel=1e-4)
    assert one["a"] == pytest.approx(stats.gmean(before[:4]), rel=1e-4)


def test_other_windows_are_two_samples(tmp_path: Path) -> None:
    """Welch's test of scipy, with samples of unequal sizes."""
    before, after = SIGMAS[0], 2 * SIGMAS[1][:3]
    (one,) = compared(tmp_path, sampled(before), sampled(after, of="tales"))
    found = stats.ttest_ind(np.log(after), np.log(before), equal_var=False)
    mean = np.log(after).mean() - np.log(before).mean()
    assert one["how"] == "two samples" and one["count"] == "5 and 3"
    assert ends(one) == pytest.approx([mean, *found.confidence_interval(0.95)], abs=1e-4)
    assert one["p"] == pytest.approx(found.pvalue, rel=1e-4)


def test_a_few_shared_windows_leave_two_samples(tmp_path: Path) -> None:
    """Six passages and ten of one text have the first and the last in common."""
    before, after = SIGMAS[0], 2 * SIGMAS[1]
    own = [sampled(before), sampled(after, of="tales")]
    shared = [replace(own[1][0], tokens_sha256="alice/0"), *own[1][1:]]
    expected, found = compared(tmp_path / "no", *own), compared(tmp_path / "one", own[0], shared)
    assert found == expected and found[0]["count"] == "5 and 5"
    long = passages([0.3, 0.31, 0.29]), passages([0.5, 0.52, 0.51], of="tales")
    same = {f"tales/0/{n}": f"alice/0/{n}" for n in (16, 64, 256)}
    mixed = [replace(r, tokens_sha256=same.get(r.tokens_sha256, r.tokens_sha256)) for r in long[1]]
    (one,) = shifted(tmp_path / "few", long[0], mixed)
    assert (one["how"], one["count"], one["changed"]) == ("two samples", "3 and 3", True)


def test_what_has_no_upper_end_is_said_to_have_none(tmp_path: Path) -> None:
    sides = [sampled(SIGMAS[k], sigma_rest=1.0, model=f"m{k}") for k in (0, 1)]
    runs = [read_run(written(tmp_path / f"{k}", s)) for k, s in enumerate(sides)]
    said = {table["quantity"]: table["said"] for table in contrast_of(runs).tables}
    assert said.pop("sigma without the top token").endswith("it has no upper end.")
    assert all(one.endswith("includes the solver's uncertainty.") for one in said.values())


def test_what_the_solver_leaves_open_is_no_change(tmp_path: Path) -> None:
    """One per cent more everywhere: a change where sigma is known, none within its interval."""
    before, after = SIGMAS[0], 1.01 * SIGMAS[0] * (1 + 1e-6 * SIGMAS[1])
    for slack, changed in ((1.0, True), (1.02, False)):
        sides = (sampled(before, slack), sampled(after, slack, model="other"))
        (one,) = compared(tmp_path / f"{slack}", *sides)
        assert one["changed"] is changed
        low, high = (math.log(1.01) + sign * math.log(slack) for sign in (-1, 1))
        assert ends(one) == pytest.approx([math.log(1.01), low, high], abs=1e-4)


@pytest.mark.parametrize(
    ("values", "why"),
    [({}, "too few windows"), ({"start": 0}, "windows share text")],
)
def test_too_few_or_overlapping_windows_have_no_interval(tmp_path: Path, values, why) -> None:
    count = 3 if values else 1
    sides = [sampled(SIGMAS[k][:count], model=f"m{k}", **values) for k in (0, 1)]
    (one,) = compared(tmp_path, *sides)
    assert (one["low"], one["p"], one["changed"]) == (None, None, False)
    assert why in one["why"] and one["ratio"]


def test_a_table_names_a_row_that_did_not_change_in_five_per_cent_at_most() -> None:
    """200 tables of 12 rows without a change; three standard errors of that rate are 4.6 %."""
    logs = np.random.default_rng(1).normal(0.0, 0.3, (200, 12, 2, 5))
    named = 0
    for table in logs:
        p = [paired_shift(*([(v, v) for v in side] for side in one.tolist())).p for one in table]
        named += min(holm(p)) <= 0.05
    assert named / len(logs) <= 0.05 + 0.046


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    """A row is rejected when Bonferroni rejects every set of rows that holds it."""
    p = [0.004, 0.03, 0.011, 0.2]
    sets = [[k for k in range(4) if mask >> k & 1] for mask in range(1, 16)]
    closed = [
        max(min(1.0, len(s) * min(p[k] for k in s)) for s in sets if j in s) for j in range(4)
    ]
    assert holm(p) == pytest.approx(closed)


def test_folders_are_matched_by_what_they_share(tmp_path: Path) -> None:
    """Several models by their names, one model on each side whatever it is; the rest is counted."""
    both = [grown(2, model=name) for name in ("one", "two")]
    a = written(tmp_path / "a", [*both[0], *both[1]])
    b = written(tmp_path / "b", [*grown(3, model="two", dtype="float64"), *grown(2, model="x")])
    found = contrast_of([read_run(a), read_run(b)])
    assert {table["model"] for table in found.tables} == {"two"}
    assert {(r["layer"], r["n"]) for r in found.tables[0]["rows"]} == {
        (layer, n) for layer in "01" for n in (16, 32, 64)
    }
    assert found.remarks == [
        "6 layers, heads or lengths only in a.",
        "9 layers, heads or lengths only in b.",
    ]
    assert ("dtype", "float32", "float32, float64") in found.differ
    assert {(r["ratio"], r["low"]) for r in found.tables[1]["rows"]} == {(1.0, 0.98039)}  # 1 / 1.02


def test_what_cannot_be_compared_ends_in_one_line(command) -> None:
    written(Path("run"), grown(1))
    written(Path("block"), grown(1, map="block"))
    written(Path("later"), grown(1, lengths=(128,)))
    written(Path("built"), grown(1, input="ascent"))
    for folders, expected in (
        (["run"], "two different run folders. Found `run`."),
        (["run", "run/../run"], "two different run folders"),
        (["run", "block", "later"], "two different run folders"),
        (["run", "block"], "Found the map attention in `run` and block in `block`."),
        (["run", "later"], "Found the length 16, 32, 64 in `run` and 128 in `later`."),
        (["run", "built"], "no row with a positive sigma on a given input in `built`"),
    ):
        result = command("report", *folders, "--compare")
        assert result.status == 2 and result.out == "" and expected in result.err
        assert len(result.err.strip().splitlines()) == 1
    assert not list(Path().rglob("*.html"))


def test_words_of_a_comparison_are_its_rows(tmp_path: Path) -> None:
    runs = [read_run(written(tmp_path / name, side)) for name, side in _sides().items()]
    content = Content(runs, compare=True)
    table = content.contrast.tables[0]
    said = table["said"]
    changed = [r for r in table["rows"] if r["changed"]]
    assert {r["layer"] for r in changed} == {"0"} and len(changed) == 3
    assert "Of 6 rows with an interval, sigma changed beyond the sampling of text in 3" in said
    assert f"× {max(r['ratio'] for r in changed):.3g}" in said
    assert "Holm's procedure over the 6 rows" in said


def passages(slopes: Sequence[float], slack: float = 1.0, **values: Any) -> list[Measurement]:
    """Passages at 16, 64 and 256 tokens, each with an exponent of its own."""
    text, found = values.pop("of", "alice"), []
    for k, s in enumerate(slopes):
        for n in (16, 64, 256):
            about = {"tokens_sha256": f"{text}/{k}/{n}", "id": f"{values}/{text}/{k}/{n}"}
            sigma = (1 + 0.1 * k) * n ** float(s)
            found.append(
                row(sample=k, num_tokens=n, sigma=sigma, upper=sigma * slack, **about | values)
            )
    return found


def shifted(folder: Path, *sides: Sequence[Measurement], **spec: Any) -> list[dict[str, Any]]:
    runs = [read_run(written(folder / f"{k}", s, **spec)) for k, s in enumerate(sides)]
    return contrast_of(runs).tables[0]["exponents"]


def test_exponents_are_compared_passage_by_passage(tmp_path: Path) -> None:
    """Student's test of scipy on the passages' own slopes; Welch's where they are others."""
    before, after = np.random.default_rng(3).normal([[0.25], [0.4]], 0.02, (2, 6))
    (one,) = shifted(tmp_path / "same", passages(before), passages(after, model="later"))
    (two,) = shifted(tmp_path / "apart", passages(before), passages(after[:4], of="tales"))
    paired = stats.ttest_1samp(after - before, 0.0)
    welch = stats.ttest_ind(after[:4], before, equal_var=False)
    for found, truth, mean, how in (
        (one, paired, (after - before).mean(), "the same windows"),
        (two, welch, after[:4].mean() - before.mean(), "two samples"),
    ):
        ends = [mean, *truth.confidence_interval(0.95)]
        assert [found[k] for k in ("difference", "low", "high")] == pytest.approx(ends, abs=1e-4)
        assert found["p"] == pytest.approx(truth.pvalue, rel=1e-3) and found["how"] == how
        assert found["changed"] and found["n"] == "16 to 256"
    assert one["a"] == pytest.approx(before.mean(), abs=1e-4)


def test_exponents_are_within_what_the_solver_leaves_open(tmp_path: Path) -> None:
    """Every sigma up to 5 % larger: an exponent up to log 1.05 · sum of positive weights larger."""
    slopes = np.random.default_rng(4).normal(0.3, 0.02, 5)
    both = [passages(slopes, 1.05), passages(slopes + 0.01, 1.05, model="later")]
    (one,) = shifted(tmp_path, *both)
    x = np.log([16, 64, 256]) - np.log(64)
    open_ = 2 * math.log(1.05) * x[-1] / (x @ x)  # up at one end, down at the other, on one side
    ends = [0.01, 0.01 - open_, 0.01 + open_]
    assert [one[k] for k in ("difference", "low", "high")] == pytest.approx(ends, abs=1e-3)
    assert not one["changed"]


def test_exponents_need_a_power_law_three_lengths_and_windows_apart(tmp_path: Path) -> None:
    slopes = [0.3, 0.31, 0.29]
    bent = [
        row(**vars(r) | {"sigma": (r.sigma or 0) * (2 if r.num_tokens == 64 else 1)})
        for r in passages(slopes)
    ]
    for name, first, second, why in (
        ("bent", bent, passages(slopes, model="b"), "no power law in the first folder"),
        ("one", passages([0.3]), passages([0.3], model="b"), "too few windows"),
        ("text", passages(slopes), passages(slopes, start=0, model="b"), "windows share text"),
    ):
        (found,) = shifted(tmp_path / name, first, second)
        assert found["difference"] is None and why in found["why"] and not found["changed"]
    two = [[r for r in passages(slopes, model=m) if r.num_tokens > 16] for m in "ab"]
    assert shifted(tmp_path / "two", *two) == []
    long = [passages(slopes, model=m, trained_length=128) for m in "ab"]
    assert shifted(tmp_path / "trained", *long) == []


@pytest.mark.slow
def test_figures_of_a_comparison_of_depth_and_of_gains(tmp_path: Path) -> None:
    sides = [written(tmp_path / name, side) for name, side in _sides().items()]
    made = report(sides, tmp_path / "page.html", svg=tmp_path / "compared", compare=True)
    blocks = gained(stacked(tmp_path / "blocks"))
    made += report([blocks], tmp_path / "page.html", svg=tmp_path / "depth")
    names = {path.stem for path in made}
    assert {"compare-sigma-attention-frobenius", "ratios-sigma-attention-frobenius"} <= names
    assert {"gains-minilm-0-0", "depth", "products"} <= names


def _sides() -> dict[str, list[Measurement]]:
    """Layer 0 twice as large in the second folder, give or take; layer 1 only give or take."""
    noise = np.random.default_rng(2).lognormal(0.0, 0.02, 18)
    sides: dict[str, list[Measurement]] = {"a": [], "b": []}
    for one, v in zip(grown(2), noise, strict=True):
        for name, factor in (("a", 1.0), ("b", float(v) * (2 if one.layer == 0 else 1))):
            sigma = factor * (one.sigma or 0)
            values = {"id": f"{name}/{one.id}", "sigma": sigma, "upper": 1.001 * sigma}
            sides[name].append(row(**(vars(one) | values | {"model": name})))
    return sides


# --- through depth ---------------------------------------------------------------------------


def test_the_product_of_blocks_stands_against_the_map_of_the_model(tmp_path: Path) -> None:
    """2 · 3 · 4 = 24 on one stream: 4.8 times the model's 5, 6.86 times the 3.5 of all together."""
    (one,) = Content([read_run(stacked(tmp_path / "run"))]).depths
    products = [p for p in one["products"] if p["map"] == "product"]
    assert [p["sigma"] for p in products] == pytest.approx([2, 6, 24], rel=1e-4)
    assert products[-1]["high"] == pytest.approx(24 * 1.02**3, rel=1e-4)
    assert [p["sigma"] for p in one["products"] if p["map"] == "stack"] == [1.5, 2.5, 3.5]
    assert [w["sigma"] for w in one["whole"]] == [5.0]
    assert {line["map"] for line in one["lines"]} == {"attention", "block"}
    assert "it is 4.8 times sigma of the model's map (one window: 4.7 to 5.1)" in one["said"]
    assert "it is 6.86 times sigma of these blocks together" in one["said"]
    assert "goes on after" not in one["said"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"output_norm": 9.0}, "a block does not read what the one before it gives"),
        ({"metric": "token-relative"}, "constants multiply only where"),
        ({"only": (0, 2)}, "layers are missing: found 0, 2"),
        ({"tokens_sha256": "y"}, "no window was measured at every layer"),
    ],
)
def test_constants_are_multiplied_only_on_one_stream(tmp_path: Path, values, said) -> None:
    (one,) = Content([read_run(stacked(tmp_path / "run", **values))]).depths
    assert {p["map"] for p in one["products"]} == {"stack"} and said in one["said"] and one["lines"]


def test_what_lies_behind_the_last_block_is_said(tmp_path: Path) -> None:
    (one,) = Content([read_run(stacked(tmp_path / "run", end=7.0))]).depths
    assert "The model's map goes on after the last of them" in one["said"]


def test_means_of_values_from_below_have_no_upper_end(tmp_path: Path) -> None:
    """Theirs is no interval, however narrow: not at a layer, a product or a step of training."""
    content = Content([read_run(stacked(tmp_path / "run", upper=None))])
    (one,) = content.depths
    blocks = {line["layer"]: line["open"] for line in one["lines"] if line["map"] == "block"}
    assert blocks == {0: False, 1: True, 2: False}
    assert {p["open"] for p in one["products"] if p["map"] == "product"} == {True}
    rows = [row(model=f"org/lm@step{k}", step=k, upper=None) for k in (0, 10)]
    steps = Content([read_run(written(tmp_path / "steps", rows))]).as_plain()["steps"]
    assert steps["open"] == [True, True]


@pytest.mark.parametrize("apart", [True, False])
def test_windows_that_share_text_have_no_interval_for_its_sampling(tmp_path: Path, apart) -> None:
    """Three windows of 16 tokens, 16 or 8 apart: means of a layer, a product and a step."""
    norms = {"input_norm": 1.0, "output_norm": 1.0}
    rows = [
        replace(one, layer=layer, id=f"{layer}/{one.id}", start=(16 if apart else 8) * one.sample)
        for layer in (0, 1)
        for one in sampled(SIGMAS[layer][:3], 1.02, map="block", **norms)
    ]
    whole = [replace(r, map="model", layer=None, id=f"m/{r.id}") for r in rows[:3]]
    (depth,) = Content([read_run(written(tmp_path / "run", [*rows, *whole]))]).depths
    found = [*depth["lines"], *depth["whole"], *depth["products"]]
    assert {one["low"] < 0.999 * one["sigma"] for one in found} == {apart}
    assert {one["shared"] for one in found} == {not apart}
    assert ("windows, 95 %:" in depth["said"], "that share text:" in depth["said"]) == (
        apart,
        not apart,
    )
    sides = rows[:3], [replace(r, model="b", id=f"b/{r.id}") for r in rows[:3]]
    (one,) = compared(tmp_path, *sides)
    assert (one["a_low"] < 0.999 * one["a"]) is apart


# --- kinds, edits, gains ---------------------------------------------------------------------


def test_the_kind_of_the_top_token_stands_with_the_means(tmp_path: Path) -> None:
    """The first token is on top; ids without a tokenizer and pictures have no kind."""
    for words, values, top in (
        (["[CLS]", "a"], {}, "special"),
        ([",", "a"], {}, "punctuation"),
        (["101", "7"], {}, None),
        (["[CLS]", "a"], {"input": "image"}, None),
    ):
        folder = tmp_path / f"{words}{values}"
        means = Content([read_run(written(folder, grown(1, heads=2, **values), words))]).means
        assert {m["top"] for m in means} == {top}
        assert {m["often"] for m in means} == ({"3 of 3 windows"} if top else {None})


def test_edits_and_gains_reach_the_page(tmp_path: Path) -> None:
    data = Content([read_run(gained(edited(written(tmp_path / "run", grown(1)))))]).as_plain()
    (edits,) = data["edits"]
    assert [one["recipe"] for one in edits["edits"]] == ["hotflip", "sigma"]  # the larger change
    assert edits["edits"][0]["pieces"] == [["", "the "], ["-", "cat"], ["+", "dog"], ["", " sat"]]
    first = edits["summary"][0]
    assert (first["recipe"], first["rate"]) == ("sigma", 1.0)
    assert first["low"] == pytest.approx(0.025)  # Clopper–Pearson of one of one: the tail
    (gains,) = data["gains"]
    assert [t["better"] for t in gains["tokens"]] == [False, False, False, True]
    assert [t["text"] for t in gains["tokens"] if t["way"] == "split"] == ["[CLS]", "cat"]


@pytest.mark.parametrize("start", [8, 16])
def test_rates_of_edits_are_of_one_folder_and_windows_apart(tmp_path: Path, start: int) -> None:
    """Two folders of one window each; with a second window, 16 tokens long, of start 8 or 16."""
    runs = [edited(written(tmp_path / name, grown(1))) for name in "ab"]
    for run in runs:
        first = read_run(run).contents(EDITS)[f"{EDITS}-0"]
        valued(run, EDITS, [first, first | {"sample": 1, "start": start, "status": "failed"}])
    page = Content([read_run(run) for run in runs]).as_plain()
    assert [edits["source"] for edits in page["edits"]] == ["a", "b"]
    for found in (edits["summary"][0] for edits in page["edits"]):
        assert (found["originals"], found["succeeded"]) == (2, 1)
        assert (found["low"] is None) is (start == 8)


def test_certified_radii_reach_the_page(tmp_path: Path) -> None:
    data = Content([read_run(decided(written(tmp_path / "run", grown(1))))]).as_plain()
    (one,) = data["decided"]
    assert (one["decision"], one["margin"], one["n"]) == ("good", 0.5, row(layer=0).num_tokens)
    # What all may move together, one of them may move alone; the words were counted within 0.2.
    found = [(t["text"], t["radius"], t["words"]) for t in one["tokens"]]
    assert found == [("[CLS]", 0.4812, 3), ("cat", 0.25, None)]
    ball = {"ball": "joint", "count": 2, "words": 3, "radius": 0.25, "attack": 0.9}
    each = ball | {"ball": "each", "radius": 0.1}
    assert one["balls"] == [ball, each] and not one["stopped"]


def test_a_radius_on_the_page_is_at_least_that_of_every_ball_that_holds_it(tmp_path: Path) -> None:
    folder = decided(written(tmp_path / "run", grown(1)))
    held = [*read_run(folder).contents("radii").values()]
    valued(folder, "radii", [*held, held[-1] | {"tokens": [0], "radius": math.inf}])
    (one,) = Content([read_run(folder)]).as_plain()["decided"]
    assert [t["radius"] for t in one["tokens"]] == [None, 0.25]  # None: any
    assert [ball["radius"] for ball in one["balls"]] == [0.25, 0.1, None]


def test_two_questions_with_one_answer_stand_apart_on_the_page(tmp_path: Path) -> None:
    folder = decided(written(tmp_path / "run", grown(1)))
    (held, *_) = read_run(folder).contents("radii").values()
    names = ["bad", "x", "y"]
    places: list[dict[str, Any]] = [{"at_layer": 2}, {"at_layer": 2, "map": "attention"}]
    more = [
        held | {"question": n, "rival_name": n} | p for n, p in zip(names[1:], places, strict=True)
    ]
    valued(folder, "radii", more)
    found = Content([read_run(folder)]).as_plain()["decided"]
    assert [one["place"] for one in found] == ["", "from the input of layer 2 on", "layer 2"]
    assert [(one["decision"], one["rival"]) for one in found] == [("good", n) for n in names]


def test_values_of_another_kind_are_no_edits(tmp_path: Path) -> None:
    one = asdict(TextEdit("no row", 0, 0, 4, "sigma", "model", "failed"))
    run = valued(written(tmp_path / "run", grown(1)), "edits", [{"id": "x"}, one])
    assert Content([read_run(run)]).as_plain()["edits"] == []
