"""Capture, the bounds of a model and their figure: one layer, one map, between its bounds."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
import torch
from rich.console import Console

import lipscope as ls
from command import TEXT
from lipscope import Bound, Measurement, read_run
from lipscope.charts.marks import spread
from lipscope.linalg import max_token_norm
from lipscope.records.comparison import best_of, by_row, comparisons, given, looseness
from lipscope.theorems import bounds_at
from opened import layer_of
from rows import row
from tiny import TINY, tiny

BERT = f"random:bert:{TINY['bert']}"
IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])


def bound(of: Measurement, value: float | None = 1.0, **values) -> Bound:
    about = {"metric": "frobenius", "statement": "", "cite": "", "scope": "local", "radius": 1.0}
    return Bound(id=of.id, value=value, **{**about, "theorem": "t", "kind": "upper", **values})


def values_of(found: ls.Rows) -> dict[str, float]:
    """Values by theorem; what was measured under the kind of its input."""
    values = {b.theorem: b.value for b in found.bounds if b.value is not None}
    return values | {"measured" if given(r) else "adversarial": r.sigma or 0.0 for r in found}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_captured_layer_is_the_one_that_is_measured(family):
    loaded = tiny(family)
    layer, x = layer_of(loaded.model, IDS, layer=1)
    measured = ls.measure(loaded.model, IDS, layers=[1], dtype="float64", tol=1e-9)[0]
    top = ls.top_singular(layer.linearise(x), tol=1e-9)
    assert x.dtype == torch.float64
    assert top.sigma == pytest.approx(measured.sigma, rel=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_captured_layer_has_weights_of_its_own(dtype):
    loaded = tiny("bert")
    layer, x = layer_of(loaded.model, IDS, layer=1, dtype=dtype)
    before = layer(x).clone()
    for p in loaded.model.parameters():
        p.data.zero_()
    assert torch.equal(layer(x), before)
    assert not any(p.requires_grad for p in layer.parameters())


def test_the_window_is_that_of_measure():
    layer, x = layer_of(BERT, TEXT, layer=1, length=6, sample=3, dtype="float32")
    rows = ls.measure(BERT, TEXT, layers=[1], lengths=[6])
    norms = [t.norm for t in rows.tokens if t.id == rows[3].id]
    assert x.norm(dim=1).tolist() == pytest.approx(norms, rel=1e-5)
    assert layer.num_heads == 3


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("olmo", "no closed form is known for `OlmoAttention`"),
        ("phi", "`PhiAttention`, which normalises its queries and keys"),
        ("vaultgemma", "`VaultGemmaAttention`, which soft-caps its scores"),
    ],
)
def test_other_families_say_why_there_are_no_bounds(family, words):
    more = {"phi": ",qk_layernorm=true", "vaultgemma": ",num_key_value_heads=3"}
    model = f"random:{family}:{TINY['olmo']}{more.get(family, '')}"
    with pytest.raises(ls.InputError, match="not available for this layer") as found:
        layer_of(model, TEXT, layer=0, length=6)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("family", "words"),
    [("qwen3", "its queries and keys are normalised"), ("gemma2", "its scores are soft-capped")],
)
def test_layers_whose_scores_one_theorem_alone_covers_say_so(family, words):
    layer, x = layer_of(tiny(family).model, IDS, layer=0)
    found = bounds_at(layer, x)
    (largest,) = (b for b in found if b.applicable)
    assert largest.theorem == "layer_max_token"
    assert max_token_norm(layer.in_double().linearise(x.double())).lower <= largest.value
    reasons = {b.reason for b in found if "stated for" not in b.reason and "asks" not in b.reason}
    assert words in reasons
    with pytest.raises(ls.InputError, match=words):
        ls.certify(layer, x, eps=0.1)


def test_a_relative_bias_keeps_the_bounds_at_an_input():
    layer, x = layer_of(tiny("mpnet").model, IDS, layer=0)
    found = {b.theorem: b for b in bounds_at(layer, x) if b.applicable and b.kind == "upper"}
    sigma = float(torch.linalg.matrix_norm(ls.to_dense(layer.linearise(x)), 2))
    assert {
        "local_norms",
        "local_rows",
        "yudin_centred",
        "castin_thm_e_3",
        "global_rows",
        "global_rows_capped",
    } <= set(found)
    values = [b.value for b in found.values() if b.metric == "frobenius" and b.value is not None]
    assert min(values) >= sigma
    assert ls.certify(layer, x, eps=0.1).sigma_bound >= sigma


def test_what_cannot_be_captured():
    with pytest.raises(ls.InputError, match="between 0 and 1"):
        layer_of(BERT, TEXT, layer=2, length=6)
    with pytest.raises(ls.InputError, match="sample"):
        layer_of(BERT, TEXT, layer=0, length=6, sample=-1)
    with pytest.raises(ls.InputError, match="leave it out"):
        layer_of(tiny("bert").model, IDS, layer=0, length=6)


@pytest.mark.parametrize("map", ["attention", "heads"])
@pytest.mark.parametrize("per_head", [False, True])
def test_every_sound_bound_is_above_what_was_measured(map, per_head):
    found = ls.bounds(BERT, TEXT, layers="all", lengths=[6], map=map, per_head=per_head, sharp=True)
    assert len(found) == 2 * (3 if per_head else 1)
    of = by_row(found.bounds)
    for measured in found:
        assert (measured.map, measured.metric) == (map, "frobenius")
        compared = {
            b: times for b in of[measured.id] if (times := looseness(b, measured)) is not None
        }
        assert len(compared) >= 5
        assert all(b.metric == "frobenius" for b in compared)
        assert all(t == pytest.approx(b.value / measured.sigma) for b, t in compared.items())
        assert min(compared.values()) >= 1 - 1e-9
        assert all(bool(b.reason) != b.applicable for b in of[measured.id])


def test_sigma_of_a_head_is_that_of_measure():
    found = ls.bounds(BERT, TEXT, layers=[1], lengths=[6], per_head=True)
    expected = ls.measure(
        BERT, TEXT, layers=[1], lengths=[6], samples=1, per_head=True, dtype="float64"
    )
    assert [r.sigma for r in found] == pytest.approx([r.sigma for r in expected], rel=1e-2)


@pytest.mark.parametrize("metric", ["max-token", "infinity"])
@pytest.mark.parametrize("per_head", [False, True])
def test_other_metrics_are_measured_in_themselves(metric, per_head):
    found = ls.bounds(BERT, TEXT, layers=[0], lengths=[6], metric=metric, per_head=per_head)
    assert {one.metric for one in [*found, *found.bounds]} == {metric}
    of = {r.id: r for r in found}
    assert min(looseness(b, of[b.id]) or 1.0 for b in found.bounds) >= 1 - 1e-9
    layer, x = layer_of(BERT, TEXT, layer=0, length=6, sample=0)
    op = layer.linearise(x)
    dense = ls.to_dense(op).reshape(6, 12, 6, 12)
    if metric == "infinity" and not per_head:
        assert found[0].sigma == pytest.approx(float(dense.abs().sum((2, 3)).max()))


@pytest.mark.parametrize("tokens", [{"move": "first"}, {"read": "last"}, {"move": "2:3"}])
def test_a_metric_without_a_vector_has_no_shares_whichever_tokens_move(tokens):
    rows = ls.measure(BERT, TEXT, layers=0, lengths=6, samples=1, metric="max-token", **tokens)
    assert (rows[0].top_token, rows[0].top_share, rows[0].relative) == (None, None, None)
    assert {(t.share_in, t.share_out) for t in rows.tokens} == {(None, None)}
    assert "share" not in rows.summary() and "Relative" not in rows.summary()


@pytest.mark.parametrize("tokens", [{"move": "last"}, {"read": "last"}])
def test_lower_bounds_of_all_tokens_are_none_of_some(tokens):
    loaded = tiny("bert")
    whole, some = (
        ls.bounds(loaded, TEXT, layers=0, lengths=6, per_head=True, **one) for one in ({}, tokens)
    )
    lower = [[b for b in rows.bounds if b.kind == "lower"] for rows in (whole, some)]
    assert any(b.value is not None for b in lower[0])
    assert lower[1] and all(b.value is None for b in lower[1])
    of = {row.id: row for row in some}
    assert min(looseness(b, of[b.id]) or 1.0 for b in some.bounds) >= 1 - 1e-9


def test_a_metric_without_theorems_is_refused():
    with pytest.raises(ls.InputError, match="frobenius, max-token or infinity"):
        ls.bounds(BERT, TEXT, metric="token-relative")


def test_the_adversarial_value_is_between_real_text_and_global_bounds():
    found = ls.bounds(BERT, TEXT, layers=[1], lengths=[6], attack=True, ascent_steps=2)
    values = values_of(found)
    assert values["adversarial"] <= values["global_rows_capped"] * (1 + 1e-6)
    assert values["global_rows_capped"] <= values["global_rows"] * (1 + 1e-9)
    alone = ls.attack(BERT, TEXT, layer=1, length=6, steps=2).rows[-1]
    assert alone.sigma == pytest.approx(values["adversarial"], rel=1e-9)  # one answer of two verbs


def test_with_rotary_embedding_the_ascent_starts_at_the_text():
    llama = f"random:llama:{TINY['llama']}"
    found = ls.bounds(llama, TEXT, layers=[1], lengths=[6], attack=True)
    values = values_of(found)
    assert values["measured"] * (1 - 1e-3) <= values["adversarial"]
    assert values["adversarial"] <= values["global_rotary"] * (1 + 1e-6)


def test_the_radius_of_the_norm_is_above_that_of_the_text():
    text = ls.bounds(BERT, TEXT, layers=[1], lengths=[6])
    norm = ls.bounds(BERT, TEXT, layers=[1], lengths=[6], radius="norm")
    radii = [some.bounds[0].radius or 0.0 for some in (text, norm)]
    assert radii[1] >= radii[0] * (1 - 1e-5)
    assert radii[1] == pytest.approx(12**0.5)
    values = [values_of(some) for some in (text, norm)]
    assert values[0]["global_rows"] <= values[1]["global_rows"] * (1 + 1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"radius": float("nan")}, "radius = nan"),
        ({"attack": True, "per_head": True}, "all heads together"),
        ({"attack": True, "map": "heads"}, "map = heads"),
    ],
)
def test_requests_that_make_no_sense(options, words):
    with pytest.raises(ls.InputError, match=words):
        ls.bounds(BERT, TEXT, **{"layers": [0], "lengths": [6], **options})


def test_rows_carry_their_bounds():
    found = ls.bounds(BERT, TEXT, layers=[0, 1], lengths=[6])
    assert {b.id for b in found[:1].bounds} == {found[0].id}
    assert len(found[:1].bounds) * 2 == len(found.bounds)
    frame = found.bounds_to_polars()
    assert frame["theorem"].to_list() == [b.theorem for b in found.bounds]
    assert not frame["value"].is_nan().any()
    text, without = found.text(), ls.Rows(list(found)).text()
    assert "best local bound" in text and "best local bound" not in without


def test_a_misspelt_option_is_answered_with_the_one_that_is_meant():
    with pytest.raises(TypeError, match=r"'lenghts'\. Did you mean `lengths`\?"):
        ls.bounds(BERT, TEXT, lenghts=[6])


def test_files(tmp_path):
    found = ls.bounds(
        BERT, TEXT, layers="all", lengths=[4, 6], attack=True, sharp=False, out=tmp_path / "out"
    )
    figures = found.save(tmp_path / "figures")
    assert [p.name for p in figures] == ["sandwich.svg", "sandwich.png", "sandwich.html"]
    run = read_run(tmp_path / "out")
    assert run.measurements() == list(found) and run.bound_values() == found.bounds
    assert [r.input for r in found].count("text") == 4 and len(found) == 8
    svg = figures[0].read_text()
    assert "layer 0" in svg and "layer 1" in svg and "sigma, adversarial" in svg
    (tmp_path / "file").write_text("")
    with pytest.raises(ls.InputError, match="folder that can be written"):
        found.save(tmp_path / "file")


def test_lines_of_the_figure():
    one, two = (
        row(sigma=s, upper=s + 0.2, sample=k, num_tokens=8) for k, s in enumerate([2.0, 8.0])
    )
    bounds = [
        bound(one, 20.0, theorem="a"),
        bound(one, 10.0, theorem="b"),
        bound(two, 40.0, theorem="c"),
        bound(one, 3.0, theorem="ball", scope="ball", eps=0.1),
        bound(one, 1.0, theorem="wrong", sound=False),
        bound(one, 100.0, theorem="g", scope="global"),
        bound(one, 100.1, theorem="h", scope="global"),
        bound(one, 1e30, theorem="far", scope="mean-field"),
        bound(one, 1.0, theorem="limit", scope="limit"),
        bound(one, None, theorem="none", reason="it is not"),
    ]
    other = row(sigma=1e3, sample=2, num_tokens=8)  # nothing was asked about it
    (found,) = comparisons([one, two, other], bounds)
    lines, left_out = found.curves()
    assert [(line.name, line.points[0][1]) for line in lines] == [
        ("sigma, real text", pytest.approx(4.0)),
        ("local certificate, real text", pytest.approx(20.0)),
        ("g = h", pytest.approx(100.0)),
    ]
    assert left_out == ["far (1.0e+30)"]
    assert best_of(bounds, "local").theorem == "b"
    assert best_of(bounds, "limit") is None


def test_bounds_of_a_ball_stand_with_their_radius():
    one = row(sigma=2.0, num_tokens=8)
    balls = [bound(one, 3.0 + eps, theorem="ball", scope="ball", eps=eps) for eps in (0.5, 1.0)]
    console = Console(file=io.StringIO(), width=110)
    console.print(ls.Rows([one], bounds=[bound(one, 3.2, theorem="local"), *balls]).bounds_table())
    said = console.file.getvalue()
    assert "ball, eps = 0.5" in said and "≤ 3.500" in said and "1.75" in said
    assert "ball, eps = 1 " in said and "≤ 4.000" in said
    assert said.index("≤ 3.200") < said.index("≤ 3.500")  # the bound at the input comes first
    assert best_of(balls, "local") is None and looseness(balls[1], one) == 2.0


def test_labels_keep_their_distance_and_order():
    values = [3.0, 1.0, 1.01, 1.02, 50.0]
    places = spread(values, 1.5)
    ordered = sorted(places)
    assert all(b / a >= 1.5 * (1 - 1e-9) for a, b in pairwise(ordered))
    assert [places.index(p) for p in ordered] == [1, 2, 3, 0, 4]
    assert places[4] == pytest.approx(50.0)


def test_nothing_to_draw():
    with pytest.raises(ls.InputError, match="positive sigma"):
        ls.Rows([row()]).plot_bounds()
    with pytest.raises(ls.InputError, match="positive sigma"):
        ls.Rows([row(sigma=0.0)], bounds=[bound(row())]).plot_bounds()


def test_the_sharpest_bounds_come_by_themselves_where_they_take_seconds(tmp_path):
    found = ls.bounds(BERT, TEXT, lengths=[4], out=tmp_path / "run")
    values = values_of(found)
    assert values["measured"] <= values["row_gram_joint"] <= values["local_rows"]
    same = ls.bounds(BERT, TEXT, lengths=[4], sharp=True)
    assert values_of(same)["row_gram_joint"] == values["row_gram_joint"]
    # what was asked is what the folder goes on with
    longer = ls.bounds(BERT, TEXT, lengths=[6], out=tmp_path / "run")
    assert [row.num_tokens for row in longer] == [4, 6]
    assert sum(b.theorem == "row_gram_joint" and b.applicable for b in longer.bounds) == 2
    with pytest.raises(ls.InputError, match="differs in sharp"):
        ls.bounds(BERT, TEXT, lengths=[4], sharp=False, out=tmp_path / "run")


@pytest.mark.parametrize("sharp", [None, False])
def test_what_would_take_long_says_how_long(sharp):
    width = 12 * 64
    weights = [torch.eye(width, dtype=torch.float64) for _ in range(4)]
    layer, x = ls.DotProduct(*weights, heads=12), torch.ones(512, width, dtype=torch.float64)
    (left,) = bounds_at(layer, x, names=["row_gram_joint"], sharp=sharp)
    seconds = re.fullmatch(r"it takes about (\d+) s here; `sharp` computes it", left.reason)
    assert seconds is not None and int(seconds[1]) > 60
    small, few = ls.DotProduct(*(w[:2, :2] for w in weights)), x[:3, :2]
    (quick,) = bounds_at(small, few, names=["row_gram_joint"], sharp=sharp)
    assert quick.applicable == (sharp is None)


def test_theorems_that_are_named_are_computed_whatever_they_take(monkeypatch):
    monkeypatch.setattr("lipscope.theorems.layer_bounds.PATIENCE", 0.0)
    named = ls.bounds(BERT, TEXT, lengths=[4], theorems=["row_gram_joint"]).bounds
    assert [b.applicable for b in named] == [True]
    assert "row_gram_joint" not in values_of(ls.bounds(BERT, TEXT, lengths=[4]))
