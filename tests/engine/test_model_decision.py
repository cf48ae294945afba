"""Decisions of whole models: what they are, how far tokens may move, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.engine.model_decision import DecisionCertificate, TokenRadii, word_distances


class Tagger(nn.Module):
    """Embeddings, a block, the mean of its tokens, and classes."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 4)
        block = nn.TransformerEncoderLayer(4, 1, 6, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(4, 2)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(input_ids)).mean(1))


IDS = torch.tensor([[3, 7, 11], [5, 2, 9]])


@pytest.fixture(scope="module")
def decision() -> Any:
    return ls.load_model(Tagger().double()).decision({"input_ids": IDS})


def test_a_decision_is_the_module_s_own(decision: Any) -> None:
    module = Tagger().double().eval()
    scores = module(IDS[:1])[0].detach()
    assert decision.answer == int(scores.argmax())
    first, second = scores.topk(2).values
    assert decision.margin == pytest.approx(float(first - second), rel=1e-9)
    x = module.words(IDS[:1]).detach().requires_grad_()
    margin = module.head(module.encoder(x).mean(1))[0]
    (margin[decision.answer] - margin[decision.runner_up]).backward()
    assert x.grad is not None
    assert decision.slope == pytest.approx(float(x.grad.norm()), rel=1e-9)
    said = repr(decision)
    assert "answer" in said and "runner-up" in said and "gradient norm" in said


def test_no_random_move_within_the_radius_changes_it(decision: Any) -> None:
    found = decision.certify()
    assert isinstance(found, DecisionCertificate)
    assert 0 < found.radius <= found.first_order * 1.5
    assert found.attack is None or found.attack >= found.radius
    moves = torch.randn(2000, *decision.x.shape, dtype=torch.float64)
    moves *= found.radius / moves.flatten(1).norm(dim=1)[:, None, None]
    scores = torch.func.vmap(decision.network)(decision.x + moves)
    assert bool((scores.argmax(1) == decision.answer).all())
    assert "radius" in repr(found) and "attack" in repr(found)


ACTS, WIDTHS = (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()), (2, 9, 3, 2)


@pytest.mark.parametrize(
    ("act", "width"),
    [
        pytest.param(act, n, id=f"{n}-{act}", marks=() if n == own else pytest.mark.slow)
        for act, own in zip(ACTS, WIDTHS, strict=True)
        for n in (2, 3, 9)
    ],
)
def test_heads_of_any_hidden_width_are_certified(act: nn.Module, width: int) -> None:
    """``W_2 act(W_1 pooled)``; no move that is found within the radius flips it."""
    model = Tagger().double().eval()
    model.head = nn.Sequential(nn.Linear(4, width), act, nn.Linear(width, 2)).double()
    decided = ls.load_model(model).decision({"input_ids": IDS})
    found = decided.certify()
    assert found.radius > 0
    assert found.attack is None or found.attack > found.radius
    gen = torch.Generator().manual_seed(1)
    x = model.words(IDS[:1]).detach()
    e = torch.randn(2000, *x.shape[1:], generator=gen, dtype=x.dtype)
    e = found.radius * e / e.flatten(1).norm(dim=1)[:, None, None]
    assert bool((decided.network(x[0] + e).argmax(1) == decided.answer).all())
    scores = model.head(model.encoder(x + e).mean(1))
    assert bool((scores.argmax(1) == decided.answer).all())


def test_tokens_in_turn_are_a_map_over_the_text(decision: Any) -> None:
    told: list[str] = []
    found = decision.certify(ball="token", tokens=[0, 2], progress=told.append)
    assert isinstance(found, TokenRadii)
    assert [one.tokens for one in found.each] == [(0,), (2,)]
    assert told and told[0].startswith("token 0: ")
    assert "certified radius" in repr(found) and "other words within" in repr(found)
    assert repr(found).count("the smallest move found that changes the decision") == 1
    each = decision.certify(ball="each", tokens=[0, 2])
    assert 0 < each.radius <= min(one.radius for one in found.each) * 1.02


def test_words_within_a_radius_are_counted(decision: Any) -> None:
    module = Tagger().double()
    table = module.words.weight.detach()
    apart = word_distances(module, {"input_ids": IDS[:1]}, table[IDS[0]])
    assert apart is not None
    expected = torch.cdist(table, table[IDS[0]])
    expected[IDS[0], torch.arange(3)] = torch.inf
    assert torch.allclose(apart, expected)
    found = decision.certify(ball="token", token=1)
    assert found.nearest == pytest.approx(float(expected[:, 1].min()))
    assert found.words_within == int((expected[:, 1] <= found.radius).sum())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ball": "cube"}, "`ball` should be one of joint, token, each"),
        ({"ball": "joint", "token": 1}, "`token` is the one that moves"),
        ({"ball": "token", "token": 9}, "`token` should be a whole number of at most 2"),
        ({"tokens": [0, 9]}, "`tokens` should be a whole number of at most 2"),
        ({"tokens": []}, "Found none"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_certified_is_one_line(decision: Any, asked: Any, said: str) -> None:
    with pytest.raises(ls.InputError, match=said):
        decision.certify(**asked)


def test_a_decision_from_a_later_layer_on_says_nothing_of_the_first(caplog, monkeypatch):
    """As for a model whose blocks are cast one after the other."""
    monkeypatch.setattr("lipscope.models.loading.LoadedModel.is_large", lambda *_: True)
    name = "random:gpt2:n_embd=4,n_head=1,n_layer=3,n_positions=16,vocab_size=300"
    (found,) = ls.certify_decision(name, length=2, at_layer=2, ball="token", tokens=[1])
    assert found.at_layer == 2 and "blocks" not in caplog.text


def test_which_sample_of_a_batch_is_shown_and_a_block_needs_no_list() -> None:
    module = Tagger()
    module.encoder = nn.TransformerEncoderLayer(4, 1, 6, dropout=0.0, batch_first=True)
    model = ls.load_model(module)
    for found in (model.decision(IDS, sample=1), model.at(IDS, sample=1)):
        assert "sample=2 of 2 (`sample=1`)" in repr(found)
    assert "sample=" not in repr(model.decision(IDS[:1]))
    (found,) = ls.certify_decision(module, IDS[:1], tokens=[0])
    same = model.decision(IDS[:1]).certify(tokens=[0])
    assert found == replace(same, seconds=found.seconds, question=found.question)


def test_what_would_not_fit_is_refused_before_it_starts() -> None:
    module = Tagger(2)
    ids = torch.arange(20).repeat(1, 32)[:, :600]
    decision = ls.load_model(module).decision({"input_ids": ids})
    with pytest.raises(ls.InputError, match=r"at most 4 GB\. Found about .* shorter text"):
        decision.certify()


def test_layers_alone_and_later_streams(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = ls.DotProduct(*(torch.randn(4, 4, dtype=torch.float64) / 2 for _ in range(3)))
    x = torch.randn(3, 4, dtype=torch.float64)
    np.save(tmp_path / "w.npy", torch.randn(3, 4).numpy())
    found = ls.load_model(layer).decision(x, read_out=tmp_path / "w.npy")
    assert found.certify().radius > 0
    np.save(tmp_path / "w.npy", np.full((3, 4), np.nan))
    with pytest.raises(ls.InputError, match="`read_out` should be finite"):
        ls.load_model(layer).decision(x, read_out=tmp_path / "w.npy")
    (tmp_path / "w.npy").write_text("no matrix")
    with pytest.raises(ls.InputError, match=r"`read_out` cannot be read as `.npy`") as problem:
        ls.load_model(layer).decision(x, read_out=tmp_path / "w.npy")
    assert "allow_pickle" not in str(problem.value)  # which is numpy's, and unsafe
    later = ls.load_model(Tagger(2).double()).decision({"input_ids": IDS}, at_layer=1)
    assert later.certify(ball="token", token=0).words_within is None


def test_a_causal_mask_is_that_of_the_decision_and_of_the_network() -> None:
    """With it nothing that later tokens do reaches the first one; without it something does."""
    sizes = "hidden_size=8,num_attention_heads=2,num_hidden_layers=2,intermediate_size=16"
    model = ls.load_model(f"random:bert:{sizes}")
    how: dict[str, Any] = {"between": ["numbers", "classes"], "pool": "first"}
    for causal in (True, None):
        decision = model.decision("three words here", causal=causal, **how)
        moved = decision.x.clone()
        moved[1:] += torch.randn_like(moved[1:])
        for one in (decision.network, model.as_network("three words here", causal=causal)):
            same = torch.equal(one(moved).reshape(-1, 2)[0], one(decision.x).reshape(-1, 2)[0])
            assert same is (causal is True)


def test_a_token_without_influence_has_no_linear_margin() -> None:
    class Masked(Tagger):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.encoder(self.words(input_ids), src_key_padding_mask=input_ids == 0)
            return self.head(x[:, 0])

    found = ls.load_model(Masked()).decision(torch.tensor([[3, 7, 0]]))
    assert found.certify(ball="token", token=2).first_order == np.inf


class Letters:
    """A tokenizer as people write it for a model of their own."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) % 20 for one in text]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(97 + one) for one in ids]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.convert_ids_to_tokens(ids))


class OfIds(Tagger):
    """The same with another name of its argument, and an output for every token."""

    def forward(self, idx: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return self.encoder(self.words(idx))


def test_a_module_reads_a_text_whatever_its_argument_is_called() -> None:
    model = ls.load_model(OfIds(), tokenizer=Letters())
    asked: Any = {"between": ["abc", "bcd"], "pool": "mean"}
    found = model.decision("fgh", **asked)
    same = model.decision(torch.tensor([Letters()("fgh")["input_ids"]]), **asked)
    assert found.margin == pytest.approx(same.margin, rel=1e-9)
    at = model.at("fgh", length=3)
    assert at.decision(**asked).margin > 0
    assert at.directions().directions  # its words need no special tokens


def test_a_run_folder_keeps_radii_beside_the_margin_s_sigma(
    tmp_path: Path, monkeypatch: Any
) -> None:
    asked: dict[str, Any] = {"ball": "token", "tokens": [1], "out": tmp_path / "run"}
    (found,) = ls.certify_decision(Tagger(), {"input_ids": IDS[:1]}, **asked)
    run = ls.read_run(tmp_path / "run")
    (row,) = run.measurements()
    assert (row.map, row.layer, row.id) == ("margin", None, found.id)
    (bound,) = run.bound_values()
    assert (bound.id, bound.value, bound.kind) == (row.id, found.radius, "radius")
    monkeypatch.setattr("lipscope.engine.model_decision.certify_network", None)
    assert ls.certify_decision(Tagger(), {"input_ids": IDS[:1]}, **asked) == (found,)


def test_the_next_token_has_the_name_of_its_word() -> None:
    decoder = ls.load_model(
        "random:gpt2:n_embd=12,n_head=3,n_layer=1,n_positions=64,vocab_size=128"
    )
    decision = decoder.decision("The")
    assert decision.by == "the model's next token" and decision.words == ("T", "h", "e")
    assert decision.answer_name == decoder.tokenizer.convert_ids_to_tokens([decision.answer])[0]


class Interrupting:
    """A bar at which somebody presses Ctrl-C, once a radius is proved."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self, *_: Any) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)
        if "trying" in text and "certified 0," not in text:
            raise KeyboardInterrupt


@pytest.mark.parametrize("ball", ["joint", pytest.param("token", marks=pytest.mark.slow)])
def test_an_interrupt_keeps_what_was_proved_and_the_next_run_goes_on(
    tmp_path: Path, ball: Any
) -> None:
    model, batch = Tagger().double(), {"input_ids": IDS[:1]}
    whole = ls.certify_decision(model, batch, ball=ball)
    bar = Interrupting()
    some = ls.certify_decision(model, batch, ball=ball, out=tmp_path, progress=bar.update)
    assert some[-1].stopped and "interrupted" in (some[-1].note or "")
    assert 0 < some[-1].radius <= whole[0].radius and len(some) == 1
    assert any("looking for an attack" in text for text in bar.said)
    proved = [float(value) for text in bar.said for value in re.findall("certified (.+?),", text)]
    assert proved and max(proved) <= some[-1].radius
    (bound,) = ls.read_run(tmp_path).bound_values()
    assert bound.value == some[0].radius and "interrupted" in bound.note
    again = ls.certify_decision(model, batch, ball=ball, out=tmp_path)
    assert len(again) == len(whole) and not any(one.stopped for one in again)
    for one, other in zip(again, whole, strict=True):
        assert one.radius >= other.radius / 1.03 and not one.violated
    assert again[0].radius >= some[0].radius
    third = ls.certify_decision(model, batch, ball=ball, out=tmp_path)
    assert [one.radius for one in third] == [one.radius for one in again]
