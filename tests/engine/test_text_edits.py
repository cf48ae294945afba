"""Edits of a text: what ranks them, what carries them, and the verb and command that run them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import lipscope as ls
from lipscope.attacks import RECIPES, EditSearch
from lipscope.linalg import start_named
from lipscope.models import (
    Embedded,
    WindowDecoder,
    attention_sites,
    implementation_for,
    prepared,
    trace,
)
from opened import layer_of
from tiny import TEXT, tiny

ASCII = (
    "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,vocab_size=128"
)
BERT = f"random:bert:{ASCII}"
SMALL = {"length": 6, "samples": 2, "queries": 8, "layer": 1}


@pytest.fixture(scope="module")
def search():
    """Edits of ten letters on two layers in float64."""
    loaded = tiny("bert")
    how = implementation_for(loaded.model, closed=True)
    kind = {"dtype": torch.float64, "device": torch.device("cpu"), "implementation": how}
    inputs = {"input_ids": torch.tensor([list(b"The quick ")])}
    with prepared(loaded.model, **kind) as (model, _):
        sites = attention_sites(model, None)
        record = trace(model, inputs, sites, norms=False, blocks=False, dtype=torch.float64)
        embedded = Embedded(model, inputs, record, 1)
        layer, x = layer_of(loaded, "The quick ", layer=1, length=10)
        yield EditSearch(
            embedded, WindowDecoder(loaded.tokenizer), "model", (layer, x), name="test"
        )


def deciding(search: EditSearch) -> EditSearch:
    """The same search for a change of a decision between three classes."""
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()
    return dataclasses.replace(search, scores=lambda y: y.mean(1) @ weight.T)


# --- the model at vectors, and what ranks edits


def test_vectors_of_the_table_give_the_model_itself(search) -> None:
    model, ids = search.model, search.model.ids
    read, (layer, x) = model.read(ids[None]), search.attention
    assert torch.equal(model.function(ids, "model")(model.vectors(ids)), read.model[0])
    torch.testing.assert_close(read.entering[0], x, rtol=0, atol=1e-10)
    torch.testing.assert_close(read.layer[0], layer(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["change", "margin"])
def test_gradients_against_finite_differences(search, kind) -> None:
    draft = search.start.substituted(3, 80)
    one = search if kind == "change" else deciding(search)
    ids = torch.tensor(draft.ids)

    def goal(x: torch.Tensor) -> float:
        y = one.model.function(ids, "model")(x)
        if kind == "change":
            return float((y - one.clean.model[0]).square().sum() / 2)
        assert one.scores is not None
        scores = one.scores(y[None])[0]
        others = [float(s) for i, s in enumerate(scores) if i != one.decision]
        return max(others) - float(scores[one.decision])

    x, slope = one.model.vectors(ids), one.slope(draft)
    e = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        found = (goal(x + 1e-6 * e) - goal(x - 1e-6 * e)) / 2e-6
    assert float((slope * e).sum()) == pytest.approx(found, rel=1e-6)


def test_the_gradient_beside_the_text_is_a_product_with_the_jacobian(search, monkeypatch) -> None:
    """There is none at the text itself; near it, ``J^T J e``."""
    size = 1e-7
    monkeypatch.setattr("lipscope.attacks.edits._NEAR", size)
    x = search.model.vectors(search.model.ids)
    e = torch.randn(x.shape, generator=start_named("test|near")).double()
    e *= size * x.norm() / e.norm()
    exact = search.operator.rmatvec(search.operator.matvec(e))
    found = search.slope(search.start)
    assert (found - exact).norm() < 1e-4 * exact.norm()


def test_scores_of_singular_vectors_against_the_whole_vocabulary(search) -> None:
    """With P the projection on the directions that were found: ``‖J P δ‖`` of every edit."""
    values, v = search.singular
    x, table = search.model.vectors(search.model.ids), search.model.table
    n, d = x.shape
    function = search.model.function(search.model.ids, "model")
    dense = torch.autograd.functional.jacobian(function, x).reshape(-1, n * d)
    exact = torch.linalg.svdvals(dense)
    assert values[0] <= exact[0] * (1 + 1e-12) and exact[0] <= values[0] * (1 + 1e-3)
    basis = v.reshape(len(v), -1)
    onto = (dense @ basis.T @ basis).reshape(-1, n, d)
    brute = torch.stack(
        [(onto[:, i] @ (table - x[i]).T).norm(dim=0) for i in range(n)]
    )  # fmt: skip
    found = search.gains_sigma(search.start)
    torch.testing.assert_close(found, brute, rtol=1e-8, atol=1e-8 * float(brute.max()))


def test_weights_of_copies_against_finite_differences(search) -> None:
    layer, x = search.attention
    step = 1e-6 * torch.eye(len(x), dtype=torch.float64)
    for i in (0, 7):
        up, down = (layer(x, log_weights=sign * step[i]) for sign in (1, -1))
        found = (up - down) / 2e-6
        torch.testing.assert_close(search.by_weight[i], found, rtol=1e-6, atol=1e-8)


def test_what_is_predicted_is_the_jacobian_times_the_move(search) -> None:
    draft = search.start.substituted(2, 90).substituted(5, 65)
    move = search.model.vectors(torch.tensor(draft.ids)) - search.model.vectors(search.model.ids)
    exact = ls.to_dense(search.operator) @ move.flatten()
    assert search.predicted(draft) == pytest.approx(
        float(exact.norm() / search.clean.model.norm()), rel=1e-9
    )
    assert search.moved(draft) == pytest.approx(float(move.norm()))
    assert search.predicted(search.start.duplicated(2)) is None  # of the model nothing is known


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_search_that_may_run_everything_finds_the_best_of_all(search, recipe) -> None:
    """Against running every edit that a text can carry."""
    start, places = search.start, range(len(search.start.ids))
    if recipe == "duplicate":
        every = [start.duplicated(i) for i in places]
    else:
        every = [start.substituted(i, w) for i in places for w in range(128) if w != start.ids[i]]
    changes = []
    for some in (every[i : i + 64] for i in range(0, len(every), 64)):
        read = search.model.read(torch.tensor([draft.ids for draft in some]))
        for draft, y in zip(some, read.model, strict=True):
            changes.append((y[draft.kept] - search.clean.model[0]).norm())
    best = float(max(changes) / search.clean.model.norm())
    found = search.run(recipe, budget=1, queries=10**6)
    assert found.queries == len(every)
    assert found.change_model == pytest.approx(best, rel=1e-9)


# --- what a text can carry


class Greedy:
    """The longest piece first: `ab` is never read as `a`, `b`."""

    pieces = ("a", "b", "ab", "c", "<s>")
    all_special_ids = (4,)

    def __call__(self, text: str, **_) -> dict:
        ids = []
        while text:
            best = max((p for p in self.pieces[:4] if text.startswith(p)), key=len)
            ids, text = [*ids, self.pieces.index(best)], text[len(best) :]
        return {"input_ids": ids}

    def decode(self, ids, **_) -> str:
        return "".join(self.pieces[i] for i in ids)

    def convert_ids_to_tokens(self, ids) -> list:
        return [self.pieces[i] for i in ids]


def test_what_is_read_back_as_other_tokens_is_dropped() -> None:
    written = WindowDecoder(Greedy())
    assert written.survives([2, 3, 1, 0]) and written.survives([0, 0])
    assert not written.survives([0, 1, 3])
    assert written.editable([0, 4, 3]) == [0, 2]
    assert written.ordinary(5).tolist() == [True] * 4 + [False]


def test_every_edit_is_read_back(search) -> None:
    """Of 300 ids the first 128 are letters, the others no text by themselves."""
    for recipe in RECIPES:
        found = search.run(recipe, budget=2, queries=20)
        ids = found.draft.ids
        assert list(bytes(ids).decode().encode()) == list(ids) and max(ids) < 128
        assert len(found.draft.edits) <= 2


def test_a_window_that_is_no_text_by_itself_is_skipped() -> None:
    found = ls.attack_text(
        "random:bert:" + ASCII.replace("128", "300"), "aé" * 30, **{**SMALL, "samples": 6}
    )
    (some,) = {
        (one.originals, one.skipped, one.failed, one.succeeded) for one in found.summary()[:2]
    }
    assert sum(some[1:]) == some[0] and 0 < some[1] < some[0]
    assert {one.queries for one in found.edits if one.status == "skipped"} == {0}


# --- the verb


def test_budget_and_queries_are_kept(monkeypatch) -> None:
    read, texts = Embedded.read, []

    def counting(self, ids):
        texts.append(len(ids))
        return read(self, ids)

    monkeypatch.setattr(Embedded, "read", counting)
    budget = 3
    found = ls.attack_text(BERT, TEXT, budget=budget, recipes=["random", "sigma"], **SMALL)
    for one in found.edits:
        assert one.queries <= SMALL["queries"] and 1 <= one.changed <= budget
        differ = [a != b for a, b in zip(one.before, one.after, strict=True)]
        assert sum(differ) == one.changed == one.edits.count("→")
    first = [one for one in found.edits if one.changed == budget]
    assert first and all(one.queries == SMALL["queries"] for one in first)
    windows = len(found.rows)
    assert sum(texts) - sum(one.queries for one in found.edits) == 2 * windows


def test_a_decision_that_changes_is_another_nearest_text() -> None:
    between, loaded = ["zzzz zzzz", "The quick brown", "0123456789"], ls.load_model(BERT).loaded

    def nearest(text: str) -> int:
        with torch.no_grad():
            means = [
                loaded.model(torch.tensor([list(one.encode())])).last_hidden_state[0].mean(0)
                for one in (text, *between)
            ]
        return int(
            torch.stack([torch.cosine_similarity(means[0], m, 0) for m in means[1:]]).argmax()
        )

    found = ls.attack_text(
        loaded, TEXT, budget=3, between=between, **{**SMALL, "queries": 30, "samples": 4}
    )
    assert "texts" in found.by and {"succeeded"} <= {one.status for one in found.edits}
    for one in found.edits:
        assert between[nearest(one.before)] == one.decision
        assert between[nearest(one.after)] == one.decided
        assert (one.decision != one.decided) == (one.status == "succeeded")
    total = found.summary()[0]
    assert total.rate == total.succeeded / 4


def test_a_read_out_decides_as_its_matrix_does(tmp_path) -> None:
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3)).double()
    np.save(tmp_path / "w.npy", weight.numpy())
    loaded = ls.load_model(BERT).loaded
    found = ls.attack_text(
        loaded, TEXT, budget=2, read_out=tmp_path / "w.npy", recipes="hotflip", **SMALL
    )
    for one in found.edits:
        for text, decided in ((one.before, one.decision), (one.after, one.decided)):
            with torch.no_grad():
                y = loaded.model(torch.tensor([list(text.encode())])).last_hidden_state[0].mean(0)
            assert str(int((weight @ y.double()).argmax())) == decided
    np.save(tmp_path / "w.npy", np.ones((3, 11)))
    with pytest.raises(ls.InputError, match=r"`read_out` should have shape \(classes, 12\)"):
        ls.attack_text(loaded, TEXT, read_out=tmp_path / "w.npy", **SMALL)


class Classifier(torch.nn.Module):
    """A model that ends in scores of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ls.load_model(BERT).model
        self.head = torch.nn.Linear(12, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(input_ids).last_hidden_state[:, 0])


def test_a_classifier_decides_by_its_own_scores() -> None:
    torch.manual_seed(0)
    model, tokenizer = Classifier(), ls.load_model(BERT).tokenizer
    found = ls.attack_text(model, TEXT, tokenizer=tokenizer, budget=2, **SMALL)
    assert found.by == "the model's own scores"
    for one in found.edits:
        scores = model(torch.tensor([list(one.after.encode())]))
        assert int(scores.argmax()) == int(one.decided)


def test_a_run_that_was_stopped_goes_on_to_the_same_rows(command, monkeypatch) -> None:
    whole = ls.attack_text(BERT, TEXT, budget=1, **SMALL)

    def stop(done: int, total: int, row: object) -> None:
        if done == 3:
            raise KeyboardInterrupt

    options = {"budget": 1, "out": "runs/a", **SMALL}
    with pytest.raises(KeyboardInterrupt):
        ls.attack_text(BERT, TEXT, progress=stop, **options)
    assert len(ls.read_run("runs/a").values("edits")) == 3
    assert ls.attack_text(BERT, TEXT, **options).edits == whole.edits
    monkeypatch.setattr(
        "lipscope.engine.verbs.attack._Windows._made", None
    )  # nothing is computed anew
    words = ["attack", BERT, "--text", "text.txt", "--budget", "1", "--length", "6", "--layer", "1"]
    words += ["--samples", "2", "--queries", "8", "--out", "runs/a"]
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    result = command(*words, "--jsonl")
    assert result.status == 0, result.err
    assert [row["after"] for row in result.rows] == [one.after for one in whole.edits]
    shown = command(*words)
    assert shown.out.count(" → ") >= 8 and "succeeded" in shown.out and "queries" in shown.out
    sheet = command("rows", "runs/a", "--part", "edits", "--to", "csv")
    assert sheet.out.startswith("key,id,sample") and len(sheet.out.splitlines()) == 9
    assert command("rows", "runs/a", "--part", "none").status == 2
    other = command(*words[:-2], "--recipes", "random", "--out", "runs/a")
    assert other.status == 2 and "another" in other.err


# --- refusals


class Hot(torch.nn.Module):
    """Reads ids through a matrix, and not through a table."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(300, 12)
        self.attention = torch.nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.matrix(torch.nn.functional.one_hot(input_ids, 300).to(self.matrix.weight))
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "`budget` should be a whole number of at least 1. Found `0`"),
        ({"budget": 7}, "`budget` should be at most 6, the tokens of a window's text. Found 7"),
        ({"budget": 3, "queries": 2}, "`queries` should be at least the budget"),
        ({"recipes": "textfooler"}, "`recipes` should be .* Found `textfooler`"),
        ({"target": "head"}, "`target` should be one of model, layer"),
        ({"images": "random"}, "Token edits need a text. Found a batch or pictures"),
        ({"data": {"input_ids": torch.ones(1, 6).long()}}, "Found a batch or pictures"),
        ({"between": ["one"]}, "`between` should name at least two classes"),
        ({"between": ["a", "b"], "read_out": "w.npy"}, "exclude each other"),
        ({"map": "model"}, "`attack_text` has no option `map`"),
        ({"recipes": "duplicate", "length": 512}, "`length` should leave room for copies"),
    ],
)
def test_what_cannot_be_asked_is_said(options, message, unchecked) -> None:
    given = {"data": TEXT, **SMALL, **options}
    with pytest.raises(ls.InputError, match=message):
        ls.attack_text(BERT, **given)


def test_models_that_cannot_be_edited_are_said() -> None:
    loaded = ls.load_model(BERT).loaded
    with pytest.raises(ls.InputError, match="should have a tokenizer"):
        ls.attack_text(dataclasses.replace(loaded, tokenizer=None), TEXT, **SMALL)
    with pytest.raises(ls.InputError, match="embedding of its token ids"):
        ls.attack_text(Hot(), TEXT, tokenizer=loaded.tokenizer, length=6, samples=1)
    with pytest.raises(ls.InputError, match="one text by its token ids"):
        ls.attack_text(
            "random:t5:d_model=12,num_heads=3,d_kv=4,num_layers=1,d_ff=16", TEXT, **SMALL
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "1", "--steps", "2"], "`--budget` edits a text"),
        (["--budget", "1", "--like-text"], "`--budget` edits a text"),
        (["--queries", "5"], "`--queries` goes with edits of a text. Found no `--budget`"),
        (["--budget", "1", "--images", "random"], "`--budget` edits a text. Found `--images`"),
    ],
)
def test_options_of_the_two_attacks_exclude_each_other(command, words, message) -> None:
    result = command("attack", BERT, *words)
    assert result.status == 2 and message in result.err and not Path("runs").exists()
