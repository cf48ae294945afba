"""A model opened once: the same numbers as the verbs, one pass a window, nothing left changed."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipscope as ls
from command import BERT, GPT2, TEXT
from tiny import tiny

WINDOW: dict[str, Any] = {"lengths": [7], "samples": 1}


def settings(model: nn.Module) -> list[Any]:
    """Everything that a measurement touches for its time."""
    modes = [m.training for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [modes, grads, hooks, getattr(model, "config", None)._attn_implementation]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtype of every forward pass that is traced."""
    module, seen = sys.modules["lipscope.engine.ready_model"], []
    real = module.run_traced

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(str(options["dtype"])[6:])
        return real(*args, **options)

    monkeypatch.setattr(module, "run_traced", counted)
    return seen


@pytest.mark.parametrize("map", ["heads", "attention", "residual", "block", "model"])
def test_a_layer_at_an_input_says_what_measure_says(map: Any) -> None:
    model, place = ls.load_model(BERT), None if map == "model" else 1
    at = model.at(TEXT, layer=place, length=7, map=map, rest=True)
    layers = "all" if map == "model" else [1]
    (row,) = ls.measure(BERT, TEXT, layers=layers, **WINDOW, map=map, rest=True)
    assert (at.sigma, at.upper, at.id) == (row.sigma, row.upper, row.id)
    assert at.row.sigma_rest == row.sigma_rest and len(at.tokens) == len(at.x) == 7
    for one in model.layers(TEXT, layers=layers, lengths=[7], map=map, dtype="float64"):
        dense = torch.autograd.functional.jacobian(one, one.x)
        dense = dense.reshape(one.output.numel(), one.x.numel())
        truth = float(torch.linalg.matrix_norm(dense, 2))
        assert [at.sigma, one.sigma] == pytest.approx([truth] * 2, rel=2e-3)


def test_another_sample_and_a_head_are_those_of_measure() -> None:
    rows = ls.measure(GPT2, TEXT, layers=[0], lengths=[6], samples=10, per_head=True)
    at = ls.load_model(GPT2).at(TEXT, layer=0, length=6, sample=3, head=1)
    (row,) = [one for one in rows if (one.sample, one.head) == (3, 1)]
    assert (at.sigma, at.upper, at.id, at.sample) == (row.sigma, row.upper, row.id, 3)


def test_verbs_of_a_layer_are_the_verbs_of_the_face() -> None:
    at = ls.load_model(BERT).at(TEXT, layer=1, length=7)
    one: dict[str, Any] = {"layer": 1, "length": 7}
    assert at.certify(eps=0.1, sharp=False).value == (
        ls.certify(BERT, TEXT, eps=0.1, sharp=False, **one).value
    )
    assert at.bounds().bounds == ls.bounds(BERT, TEXT, layers=[1], lengths=[7]).bounds
    assert at.attack(steps=2).rows[1].sigma == ls.attack(BERT, TEXT, steps=2, **one).rows[1].sigma
    assert at.split().split[0].sigma == ls.split(BERT, TEXT, layers=[1], length=7).split[0].sigma
    assert at.push(draws=0).steps == ls.push(BERT, TEXT, draws=0, **one).steps
    mine, theirs = at.directions(k=1), ls.directions(BERT, TEXT, k=1, **one)
    assert mine.directions == theirs.directions


def test_one_forward_pass_serves_every_layer_and_every_verb_of_a_dtype(passes: list[str]) -> None:
    model = ls.load_model(GPT2)
    held = [model.at(TEXT, layer=layer, length=6) for layer in (0, 1)]
    assert all(at.sigma > 0 for at in held)
    held[1].directions(k=1)
    assert passes == ["float32"]
    kept = [*model.layers(TEXT, lengths=[6], dtype="float64")]
    kept[0].bounds()
    kept[1].certify(sharp=False)
    assert passes == ["float32", "float64"]
    passes.clear()
    assert [at.layer for at in model.layers(TEXT, lengths=[5, 6], samples=2)] == [0, 1] * 4
    assert len(passes) == 3  # one of the four was held


def test_one_load_and_one_pass_serve_a_whole_certificate(command: Any, passes: list[str]) -> None:
    """Sigma, the certificate and the attack on it."""
    loads: list[str] = []
    module = sys.modules["lipscope.engine.ready_model"]
    real = module.load_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "load_model", lambda name, **how: loads.append(name) or real(name, **how)
        )
        found = command("certify", BERT, "--text", "text.txt", "--layer", "1", "--length", "6")
    assert found.status == 0, found.err
    assert loads == [BERT] and passes == ["float64"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_is_left_as_it_was_found_though_nobody_closes_anything(dtype: Any) -> None:
    module = tiny("gpt2").model.train()
    before, weights = settings(module), [p.clone() for p in module.parameters()]
    at = ls.load_model(module).at(torch.tensor([[7, 80, 33, 7, 251, 104]]), layer=1, dtype=dtype)
    assert settings(module) == before
    assert at.sigma > 0 and "dropout was live" in "; ".join(at.remarks)
    asked = at(at.x), at.linearise().matvec(at.x), at.attention, at.norm, repr(at)
    assert len(asked) == 5
    assert settings(module) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))


def test_a_map_that_is_run_again_can_be_asked_after_everything() -> None:
    """The block of a model in train mode: at another input the model is made ready anew."""
    module = tiny("gpt2").model.train()
    ids = torch.tensor([[7, 80, 33, 7]])
    at = ls.load_model(module).at(ids, layer=0, map="block", dtype="float64")
    x = at.x + 0.1
    with torch.no_grad():
        assert torch.equal(at(x), at(x))  # else dropout would be live
    e = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    h = 1e-5  # a central difference is off by its square
    quotient = (at(at.x + h * e) - at(at.x - h * e)) / (2 * h)
    torch.testing.assert_close(at.linearise().matvec(e), quotient, rtol=1e-6, atol=1e-6)


def _twice(model: Any) -> None:
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight.mul_(2.0)


def _hooked(model: Any) -> None:
    model.h[0].mlp.register_forward_hook(lambda module, args, out: 3 * out)


def _other(model: Any) -> None:
    model.h[0].mlp.act = torch.nn.ReLU()


@pytest.mark.parametrize("change", [_twice, _hooked, _other])
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # in float64 by a copy of then
def test_a_model_that_changed_since_is_refused_in_one_line(change: Any, dtype: str) -> None:
    module = tiny("gpt2").model
    model = ls.load_model(module)
    ids = torch.tensor([[7, 80, 33, 7]])
    before = model.at(ids, layer=1, dtype=dtype).sigma
    change(module)
    with pytest.raises(ls.InputError, match="parts or hooks: open it again") as found:
        model.at(ids, layer=1, dtype=dtype)
    assert "\n" not in str(found.value)
    again = ls.load_model(module)
    assert again.loaded.revision != model.loaded.revision
    assert again.at(ids, layer=1, dtype=dtype).sigma != pytest.approx(before, rel=1e-3)


def test_weights_of_inference_mode_are_read() -> None:
    with torch.inference_mode():
        model = tiny("gpt2").model
    ids = torch.tensor([[7, 80, 33, 7]])
    expected = ls.load_model(tiny("gpt2").model).at(ids).sigma
    assert ls.load_model(model).at(ids).sigma == pytest.approx(expected, rel=1e-6)


def test_a_module_reads_text_with_its_tokenizer() -> None:
    loaded = ls.load_model(BERT)
    at = ls.load_model(loaded.model, tokenizer=loaded.tokenizer).at(TEXT, layer=1, length=7)
    other = ls.load_model(BERT).at(TEXT, layer=1, length=7)  # of another name: another start
    assert at.sigma == pytest.approx(other.sigma, rel=1e-3)


def test_a_layer_by_itself_is_a_model_too() -> None:
    one = torch.diag(torch.tensor([3.0, 2.0])).double()
    at = ls.load_model(ls.DotProduct(0 * one, 0 * one, one)).at(torch.eye(2).double())
    # Queries of zero average: sigma is that of the values.
    assert at.sigma == pytest.approx(3.0) and at.norm is None and at.certify(0.1).value >= 3.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 2}, "`layers` should be between 0 and 1"),
        ({"layer": 0, "head": 9}, "`head` should be between 0 and 2"),
        ({"layer": None}, "`layer` should name one of several"),
        ({"layer": 0, "sample": -1}, "`sample` should be a whole number"),
        ({"layer": 0, "map": "nothing"}, "should be one of heads"),
        ({"layer": 0, "theorems": "all"}, "has no option `theorems`"),
        ({"layers": 0}, "has no option `layers`; write `layer=`"),
        ({"layer": 0, "length": 0}, "`length` should be a whole number of at least 1"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ls.InputError, match=words) as found:
        ls.load_model(BERT).at(TEXT, **{"length": 7, **options})
    assert "\n" not in str(found.value)


def test_it_displays_itself() -> None:
    model = ls.load_model(BERT)
    at = model.at("<b> & so on and on", layer=1, length=9)
    assert repr(model).startswith("OpenModel(name=random:bert")
    assert "parameters" in model._repr_html_()
    said, page = repr(at), at._repr_html_()
    assert f"in [{at.sigma:.4g}, {at.upper:.4g}]" in said and len(said.splitlines()) <= 8
    assert "<b>" not in page and "object at 0x" not in said


def test_decisions_of_a_layer_s_read_outs_are_a_verb_of_python_too(command: Any) -> None:
    """The verb, the command and the handle."""
    np.save("w.npy", np.random.default_rng(0).standard_normal((3, 12)))
    where: dict[str, Any] = {"read_out": "w.npy", "at_layer": 1, "length": 6, "map": "attention"}
    (each,) = ls.certify_decision(BERT, TEXT, ball="each", **where)
    (joint,) = ls.certify_decision(BERT, TEXT, **where)
    options = ["--text", "text.txt", "--layer", "1", "--length", "6", "--jsonl"]
    options += ["--map", "attention", "--read-out", "w.npy"]
    for ball, found in (("each", each), ("joint", joint)):
        (row,) = command("certify", BERT, *options, "--ball", ball).rows
        assert (row["radius"], row["map"], row["at_layer"]) == (found.radius, "attention", 1)
    assert 0 < each.radius <= joint.radius <= (joint.attack or math.inf)
    at = ls.load_model(BERT).at(TEXT, layer=1, length=6, dtype="float64")
    assert at.decision(read_out="w.npy").certify().radius == joint.radius
    with pytest.raises(ls.InputError, match="exclude each other"):
        ls.certify_decision(BERT, TEXT, read_out="w.npy", between=["a", "b"])
    with pytest.raises(ls.InputError, match="`between` or `read_out`"):
        ls.certify_decision(BERT, TEXT, map="attention")


def test_what_is_asked_of_all_heads_is_refused_for_one() -> None:
    at = ls.load_model(BERT).at(TEXT, layer=0, length=6, head=1)
    for verb in ("directions", "push", "attack", "split"):
        with pytest.raises(ls.InputError, match=f"`{verb}` applies to all heads"):
            getattr(at, verb)()
    for asked in (at.linearise, lambda: at(at.x)):  # whose sigma is not `at.sigma`
        with pytest.raises(ls.InputError, match=r"all heads together.*at.attention.head\(1\)"):
            asked()
    with pytest.raises(ls.InputError, match="`decision` applies to all heads"):
        at.decision(between=["a b", "c d"])
    with pytest.raises(ls.InputError, match="Found a layer at `map = block`"):
        ls.load_model(BERT).at(TEXT, layer=0, length=6, map="block").decision(between=["a", "b"])
    with pytest.raises(ls.InputError, match="per_head"):
        ls.certify_decision(BERT, TEXT, between=["a b", "c d"], length=6, per_head=True)


def test_bounds_of_a_head_are_its_own_and_nothing_else_is_asked_of_a_layer_at_an_input() -> None:
    at = ls.load_model(BERT).at(TEXT, layer=1, length=6, head=1)
    found = at.bounds()
    assert [row.head for row in found] == [1]
    assert found[0].sigma == pytest.approx(at.sigma, rel=1e-3)  # another dtype: the tolerance
    assert {one.id for one in found.bounds} == {found[0].id}
    whole = ls.load_model(BERT).at(TEXT, layer=1, length=6)
    for verb, name, value in (
        ("bounds", "lengths", [4]),
        ("bounds", "layers", [0]),
        ("certify", "layer", 0),
        ("directions", "samples", 3),
        ("split", "length", 4),
    ):
        with pytest.raises(ls.InputError, match=f"`{verb}` applies to this layer at this input"):
            getattr(whole, verb)(**{name: value})
    decide = ls.load_model(BERT).decision
    with pytest.raises(ls.InputError, match=r"needs the whole model. Found `map = block`"):
        decide(TEXT, length=6, map="block")
    for wrong in (decide, lambda *a, **k: ls.certify_decision(BERT, *a, **k)):
        with pytest.raises(ls.InputError, match="`dtype` should be float64"):
            wrong(TEXT, length=6, dtype="float32")


def test_tokens_are_not_taken_for_samples() -> None:
    """One row of a matrix of tokens is no input of a block."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = ls.load_model(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval())
    with pytest.raises(ls.InputError, match="add a leading batch axis to the data"):
        model.at(torch.randn(6, 8), layer=0, map="block")
