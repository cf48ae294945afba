"""A smoothed model is what was measured: below its target, saved whole, and told what it costs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import lipscope as ls
from command import TEXT
from lipscope import InputError
from tiny import tiny

FEW = {"length": 12, "samples": 2}


def decoder(folder: Path, **entries: Any) -> Any:
    """A small GPT-2 with a head in a folder, loaded; its tokens are bytes."""
    config = GPT2Config(
        n_embd=12, n_head=3, n_layer=2, n_positions=64, vocab_size=300, bos_token_id=0, **entries
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        for block in model.transformer.h:
            block.attn.c_attn.weight.data *= 8
            block.attn.c_proj.weight.data *= 20
    model.save_pretrained(folder)
    return ls.load_model(str(folder), tokenizer=tiny("gpt2").tokenizer)


def perplexity(folder: Path, rows: ls.Rows) -> float:
    """Of a saved model on the windows of these rows, whose tokens are bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for start, n in dict.fromkeys((row.start or 0, row.num_tokens) for row in rows):
        ids = torch.tensor([list(TEXT.encode()[start : start + n])])
        losses.append(float(model(ids, labels=ids).loss.detach()))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_saved_with_its_head_below_the_target(tmp_path, tied):
    loaded = decoder(tmp_path / "model", tie_word_embeddings=tied)
    plain = {name: t.clone() for name, t in loaded.model.state_dict().items()}
    target = 0.5 * max(row.sigma for row in ls.measure(loaded, TEXT, lengths=[12], samples=2))
    found = ls.smooth(loaded, TEXT, target=target, out=tmp_path / "smooth", **FEW)
    again = ls.load_model(str(tmp_path / "smooth"), tokenizer=loaded.tokenizer)
    rows = ls.measure(again, TEXT, lengths=[12], samples=2)
    # The cap is that of an upper end; this one has its own, a thousandth above sigma at most.
    assert max(row.upper for row in rows) <= target * 1.001
    assert max(row.sigma for row in rows) >= target * 0.98
    assert [row.sigma for row in rows] == pytest.approx([r.sigma for r in found.after], rel=2e-3)
    assert found.quality == "perplexity"
    for value, folder in ((found.quality_before, "model"), (found.quality_after, "smooth")):
        assert value == pytest.approx(perplexity(tmp_path / folder, rows), rel=1e-4)
    moved = [n for n, t in again.model.state_dict().items() if not torch.equal(t, plain[n])]
    assert moved and all(name.endswith("attn.c_proj.weight") for name in moved)
    assert all(torch.equal(t, plain[n]) for n, t in loaded.model.state_dict().items())


def test_the_attack_finds_what_sigma_of_the_model_allows(tmp_path):
    """At 1 % the model is nearly linear: its sigma times the move, or a little less."""
    loaded = decoder(tmp_path / "model")
    few = {"length": 12, "samples": 1}
    target = 0.3 * max(row.sigma for row in ls.measure(loaded, TEXT, lengths=[12], samples=1))
    found = ls.smooth(loaded, TEXT, target=target, out=tmp_path / "smooth", **few)
    after = ls.load_model(str(tmp_path / "smooth"), tokenizer=loaded.tokenizer)
    for model, change in ((loaded, found.change_before), (after, found.change_after)):
        (row,) = ls.measure(model, TEXT, lengths=[12], samples=1, map="model")
        start = row.start or 0
        ids = torch.tensor([list(TEXT.encode()[start : start + 12])])
        with torch.no_grad():
            size = 0.01 * model.model.wte(ids).norm() / model.model(ids).last_hidden_state.norm()
        assert row.sigma is not None and 0.8 < change / (row.sigma * float(size)) < 1.1


def test_training_keeps_the_cap_and_touches_the_chosen_layers_only(tmp_path):
    loaded = decoder(tmp_path / "model")
    before = ls.measure(loaded, TEXT, lengths=[12], samples=2, layers=[1])
    target = 0.5 * max(row.sigma for row in before)
    found = ls.smooth(
        loaded, TEXT, target=target, layers=[1], steps=12, out=tmp_path / "smooth", **FEW
    )
    assert max(row.upper for row in found.after) <= target * 1.001
    state, plain = ls.load_model(str(tmp_path / "smooth")).model.state_dict(), loaded.model
    moved = {n for n, t in plain.state_dict().items() if not torch.equal(t, state[n])}
    assert moved == {
        f"h.1.attn.{part}.{kind}" for part in ("c_attn", "c_proj") for kind in ("weight", "bias")
    }


def test_the_command_shows_sigma_and_agreement(command, tmp_path):
    model = "random:bert:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,"
    model += "intermediate_size=16,vocab_size=300"
    words = ["smooth", model, "--text", "text.txt", "--length", "12", "--samples", "1"]
    done = command(*words, "--target", "1e-4", "--out", "smooth")
    assert done.status == 0
    assert "Agreement of embeddings: 1 before, " in done.out
    assert "embeddings move by 1%: " in done.out
    assert (tmp_path / "smooth" / "model.safetensors").exists()
    taken = command(*words, "--target", "1e-4", "--out", "smooth")
    assert taken.status == 2 and "another `--out`, or give `--force`" in taken.err


def test_what_cannot_be_done_is_one_line(tmp_path, unchecked):
    bert = tiny("bert")
    for message, model, options in (
        (r"`target` should be positive and finite\. Found `0`", bert, {"target": 0}),
        (r"`target` should be positive and finite\. Found `nan`", bert, {"target": float("nan")}),
        (r"`layers` should be between 0 and 1", bert, {"layers": [5]}),
        (r"closed form.*`OlmoAttention`", tiny("olmo"), {}),
        (r"one of transformers", torch.nn.Linear(2, 2), {}),
    ):
        asked = {"target": 1e-3, **FEW, **options}
        with pytest.raises(InputError, match=message):
            ls.smooth(model, TEXT, out=tmp_path / "never", **asked)
    assert not (tmp_path / "never").exists()


def test_a_sigma_that_the_output_loses_beside_its_bias_is_reached_all_the_same(tmp_path) -> None:
    """No finite difference sees it; the closed form does, in both precisions."""
    biased = copy.deepcopy(tiny("bert"))
    for name, bias in biased.model.named_parameters():
        if name.endswith("output.dense.bias"):
            bias.data.fill_(1.0)
    found = ls.smooth(biased, TEXT, out=tmp_path / "smooth", target=1e-30, **FEW)
    after = found.after[0]
    assert after.sigma is not None and after.sigma <= 1e-30
    assert "could not be checked" in (after.note or "")
    again = ls.load_model(tmp_path / "smooth", tokenizer=biased.tokenizer)
    at = again.at(TEXT, layer=0, length=after.num_tokens, dtype="float64")
    assert at.sigma == pytest.approx(after.sigma, rel=2e-3)
