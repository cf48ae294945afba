"""Splitting on models: the verb, the command, and the rows that a page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lipscope as ls
from command import BERT, TEXT
from lipscope.measures import split_at
from opened import layer_of
from tiny import TINY

LLAMA, GPT2 = (f"random:{name}:{TINY[name]}" for name in ("llama", "gpt2"))
LENGTH = 6


def holds(row: ls.Measurement, truth: float) -> bool:
    """Whether the interval of a row holds the truth, but for rounding."""
    assert row.sigma is not None and row.upper is not None
    return row.sigma <= truth * (1 + 1e-9) <= row.upper * (1 + 2e-9)


@pytest.mark.parametrize("model", [BERT, GPT2, LLAMA])
@pytest.mark.parametrize("map", ["attention", "heads"])
def test_gains_of_a_model_against_dense_matrices(model, map) -> None:
    found = ls.split(
        model, TEXT, layers=[1], length=LENGTH, map=map, dtype="float64", seed=1, delta=1e-6
    )
    loaded = ls.load_model(model, seed=1)
    layer, x = layer_of(loaded, TEXT, layer=1, length=LENGTH)
    whole = layer if map == "attention" else layer.replace(output=None, output_bias=None)
    exact = split_at(whole, x)
    first, apart = found.moved[0], found.split[0]
    assert holds(first, exact.moving) and holds(apart, exact.splitting)
    assert apart.top_token == exact.token
    assert (first.move, apart.move) == ("all", "copies")
    jacobian = ls.to_dense(whole.linearise(x)).reshape(-1, *x.shape)
    for one in found.tokens:
        assert one.split <= exact.gains[one.index] * (1 + 1e-9) <= one.split_upper * (1 + 1e-9)
        alone = float(torch.linalg.matrix_norm(jacobian[:, one.index], 2))
        assert one.moved <= alone * (1 + 1e-9) <= one.moved_upper * (1 + 1e-9)
    heads = [row for row in found.split if row.head is not None]
    assert len(heads) == layer.num_heads
    for row in heads:
        gain = split_at(whole.head(row.head), x).splitting
        assert holds(row, gain)


def test_what_copies_share_is_said_where_tokens_are_not_alike() -> None:
    notes = [ls.split(m, TEXT, length=LENGTH).split[0].note for m in (BERT, GPT2)]
    assert "copies" not in (notes[0] or "")
    assert "copies of a token share its position and read what it reads" in (notes[1] or "")


def test_a_layer_whose_tokens_split() -> None:
    """A = -1: the token near the origin, and the sentence on the page says so."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[-3.0], [-0.3]], dtype=torch.float64)
    found = ls.split(ls.DotProduct(-one, one, one), x)
    assert found.ratio(0) == pytest.approx(1.5535 / 1.2187, abs=1e-3)
    assert [t.better_split for t in found.tokens] == [False, True]
    assert len(found.rows) == 4
    assert "copies against each other" in found.split.summary()


def test_a_run_folder_goes_on_and_is_read(command, monkeypatch) -> None:
    arguments = ("split", BERT, "--text", "text.txt", "--layers", "0,1", "--length", "6")
    first = command(*arguments, "--out", "runs/split", "--figures")
    assert first.status == 0, first.err
    assert "single tokens" in first.out and "Splitting beats every move" in first.out
    assert {p.name for p in Path("runs/split").glob("split.*")} == {"split.svg", "split.png"}
    run = ls.read_run("runs/split")
    assert set(run.rows["move"]) == {"all", "copies"}
    held = Path("runs/split/rows.jsonl").read_bytes()

    import lipscope.engine.verbs.split as verb

    monkeypatch.setattr(verb, "_gains", None)  # nothing is computed anew
    again = command(*arguments, "--out", "runs/split", "--jsonl")
    assert again.status == 0, again.err
    assert len(again.rows) == 2 * LENGTH
    assert {row["better_split"] for row in again.rows} <= {True, False}
    assert Path("runs/split/rows.jsonl").read_bytes() == held
    page = command("report", "runs/split", "--out", "page.html")
    assert page.status == 0, page.err
    assert "copies" in Path("page.html").read_text(encoding="utf-8")
    other = command(*arguments[:-1], "8", "--out", "runs/split")
    assert other.status == 2 and "another" in other.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "residual"}, "`map` should be one of attention, heads. Found `residual`."),
        ({"layers": [7]}, "`layers` should be between 0 and"),
    ],
)
def test_what_cannot_be_split_is_said(options, message) -> None:
    with pytest.raises(ls.InputError, match=message):
        ls.split(BERT, TEXT, length=LENGTH, **options)


def test_copies_as_a_move_of_measure() -> None:
    rows = ls.measure(BERT, TEXT, layers=[0], lengths=[LENGTH], samples=1, move="copies")
    (alone,) = [r for r in ls.split(BERT, TEXT, length=LENGTH).split if r.head is None]
    assert (rows[0].id, rows[0].sigma) == (alone.id, alone.sigma)
    for options in ({"side": "key"}, {"theorems": "all"}, {"map": "normed"}):
        with pytest.raises(ls.InputError, match="`move = copies`"):
            ls.measure(BERT, TEXT, layers=[0], lengths=[LENGTH], move="copies", **options)
    with pytest.raises(ls.InputError, match="`read` should be all, first"):
        ls.measure(BERT, TEXT, layers=[0], lengths=[LENGTH], read="copies")


def test_layers_that_are_run_again_are_refused() -> None:
    class Own(torch.nn.Module):
        """Attention whose weights nobody knows."""

        num_heads = 1

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return (hidden_states @ hidden_states.mT).softmax(-1) @ hidden_states

    with pytest.raises(ls.InputError, match="needs weights that are read in closed form"):
        ls.split(torch.nn.Sequential(Own()), torch.randn(1, 5, 8), modules="0")
