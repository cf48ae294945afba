"""Models changed in one respect, inputs that take something away, and quantities of scripts."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomModel, T5Config, T5Model, ViTConfig, ViTModel

import lipscope as ls
from command import BERT
from lipscope import measure
from lipscope.attacks import constant, two_cluster
from lipscope.attention import DotProduct
from lipscope.engine.verbs.measure import measure_built
from lipscope.errors import InputError
from lipscope.models import (
    LoadedModel,
    as_decoder,
    quantised,
    random_tokens,
    reinitialised,
    repeated_token,
    rounded,
    rounding,
    rounding_error,
    scrambled,
    shuffled_words,
)
from lipscope.models.modified_models import Which
from lipscope.records.power_law import slope_of, steps, top_held_fixed
from lipscope_experiments.castin2024.protocol import castin_scripts
from rows import row as measurement
from small import drawn, sigma
from tiny import TEXT, tiny


def test_a_decoder_reads_no_later_token() -> None:
    loaded = as_decoder(tiny("bert"))
    ids = torch.randint(300, (1, 9))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 300
    with torch.no_grad():
        first, second = (loaded.model(i).last_hidden_state[0] for i in (ids, other))
    assert torch.equal(first[:-1], second[:-1]) and not torch.equal(first[-1], second[-1])
    one = ls.load_model(loaded).at(TEXT, layer=1, length=8, dtype="float64")
    assert one.attention.causal
    with pytest.raises(InputError, match="decoder"):
        as_decoder(tiny("llama"))


def test_a_decoder_without_its_mask_is_the_dense_jacobian_without_it() -> None:
    """Layer 0 of GPT-2 by its own module, handed a mask that hides nothing."""
    model: Any = copy.deepcopy(tiny("gpt2").model).double().requires_grad_(False)
    ids = torch.tensor([[7, 80, 33, 7, 251, 104]])
    asked: Any = {"layers": [0], "dtype": "float64", "tol": 1e-8}
    (row,) = ls.measure(model, ids, causal=False, **asked)
    model.set_attn_implementation("eager")
    x = model.h[0].ln_1(model.wte(ids) + model.wpe(torch.arange(6)))[0]
    nothing = torch.zeros(1, 1, 6, 6).double()
    dense: Any = torch.autograd.functional.jacobian(
        lambda u: model.h[0].attn(u[None], attention_mask=nothing)[0][0], x
    )
    expected = float(torch.linalg.matrix_norm(dense.reshape(x.numel(), -1), 2))
    assert row.sigma == pytest.approx(expected, rel=1e-7)
    (masked,) = ls.measure(model, ids, **asked)
    assert masked.sigma is not None and abs(masked.sigma / expected - 1) > 1e-3
    assert row.id != masked.id
    assert row.weights == "float64, without a causal mask" and masked.weights == "float64"
    assert "run without a causal mask" in str(row.note)
    assert getattr(model.config, "is_causal", True)  # as it was


def test_a_causal_encoder_is_the_one_of_the_experiment() -> None:
    ids = torch.tensor([[7, 80, 33, 7, 251, 104]])
    for map in ("attention", "model"):
        asked: Any = {"map": map, "layers": [1] if map == "attention" else "all"}
        (row,) = ls.measure(tiny("bert").model, ids, causal=True, **asked)
        (same,) = ls.measure(as_decoder(tiny("bert")), ids, **asked)
        assert row.sigma == pytest.approx(same.sigma, rel=1e-6)
    (plain,) = ls.measure(tiny("bert").model, ids, layers=[1])
    (none,) = ls.measure(tiny("bert").model, ids, layers=[1], causal=False)
    assert none.sigma == pytest.approx(plain.sigma, rel=1e-6) and none.weights == "float32"


SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 8, "num_heads": 2, "num_layers": 1}


@pytest.mark.parametrize(
    ("model", "causal", "said"),
    [
        (tiny("llama").model, False, "Found a rotary embedding in"),
        (BloomModel(BloomConfig(**SMALL)), False, "Found a bias of positions"),
        (T5Model(T5Config(**SMALL, d_kv=4, d_ff=8)), False, "reads one sequence of token ids"),
        (ViTModel(ViTConfig(hidden_size=8, num_attention_heads=2)), True, "reads token ids"),
        (nn.TransformerEncoderLayer(8, 2), False, "needs a model of transformers"),
        (ls.DotProduct(*[torch.eye(3)] * 3), True, "needs a model of transformers"),
    ],
    ids=["rotary", "bias of positions", "two parts", "pictures", "of torch", "a layer"],
)
def test_a_mask_that_cannot_be_changed_is_refused_in_one_line(
    model: nn.Module, causal: bool, said: str
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        ls.measure(model, torch.zeros(1, 3, dtype=torch.long), causal=causal)
    assert "\n" not in str(refused.value) and "`causal" in str(refused.value)


def test_the_command_line_puts_a_mask_on(command: Any) -> None:
    said = command(
        "measure", BERT, "--causal", "yes", "--lengths", "8", "--samples", "1", "--jsonl"
    )
    assert said.status == 0, said.err
    assert "with a causal mask" in json.loads(said.out.splitlines()[0])["weights"]
    for verb in ("measure", "bounds", "directions", "attack", "certify", "push", "split"):
        said = command(verb, "random:llama:num_hidden_layers=1", "--causal", "perhaps")
        assert said.status == 2 and "`--causal` should be yes or no. Found `perhaps`." in said.err


def test_rounded_rows_lie_on_their_own_grids() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    for bits, levels in ((8, 127), (4, 7), (2, 1)):
        y, step = rounded(x, bits), x.abs().amax(-1, keepdim=True) / levels
        assert bool(((y - x).abs() <= 0.50001 * step).all())
        assert bool(((y / step).round() - y / step).abs().max() < 1e-4)
        torch.testing.assert_close(y.abs().amax(-1), x.abs().amax(-1))
    whole = torch.tensor([[7.0, -3.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(rounded(whole, 4), whole)
    with pytest.raises(InputError, match="`bits` should be at least 2"):
        rounded(x, 1)


@pytest.mark.parametrize("family", ["bert", "gpt2"])  # Linear, and Conv1D with its weight turned
def test_rounding_lasts_as_long_as_its_block(family: str) -> None:
    model = tiny(family).model
    path = {"bert": "encoder.layer.0.intermediate.dense", "gpt2": "h.0.mlp.c_fc"}[family]
    one, x = model.get_submodule(path), torch.randn(2, 3, 12)
    weight = one.get_parameter("weight").detach().clone()
    rows = weight if family == "bert" else weight.T
    bias = one.get_parameter("bias").detach()
    with torch.no_grad():
        before = one(x)
        with rounding(one, "weights", 4):
            torch.testing.assert_close(one(x), x @ rounded(rows, 4).T + bias)
        with rounding(one, "inputs", 4):
            torch.testing.assert_close(one(x), rounded(x, 4) @ rows.T + bias)
        with pytest.raises(ValueError, match="inside"), rounding(one, "weights", 4):
            raise ValueError("inside")
        assert torch.equal(one(x), before)
    error = (rounded(rows, 8) - rows).norm() / rows.norm()
    assert rounding_error(one, 8) == pytest.approx(float(error), rel=1e-5)


def test_quantised_weights_take_sixteen_values_a_block() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 5)
    model = torch.nn.Sequential(layer)
    done = quantised(LoadedModel("m", model, None, None, "float32")).model[0].weight.detach()
    blocks, exact = (w.detach().unflatten(1, (-1, 32)) for w in (done, layer.weight))
    assert max(len(b.unique()) for b in blocks.flatten(0, 1)) == 16
    step = (exact.amax(-1) - exact.amin(-1)) / 15
    assert bool(((blocks - exact).abs().amax(-1) <= 0.51 * step).all())
    turned = quantised(tiny("gpt2"))  # Conv1D: rows of 12 are shorter than a block
    assert turned.weights == "rounded to Q4_1"


def test_new_weights_same_shape() -> None:
    loaded = tiny("bert")
    one, two = reinitialised(loaded, 1), reinitialised(loaded, 1)
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.weights == "random, seed 1" and one.name.endswith("random weights, seed 1")
    assert reinitialised(loaded, 2).name != one.name  # a run folder tells models by their names


def test_random_tokens_begin_alike() -> None:
    loaded = tiny("bert")
    short, long = random_tokens(loaded, 4, 3), random_tokens(loaded, 9, 3)
    assert torch.equal(short, long[:, :4])
    same = repeated_token(loaded, 5, 3)
    assert bool((same == same[:, :1]).all()) and len(same[:, 0].unique()) == 3
    assert sorted(shuffled_words("b a c", 1).split()) == ["a", "b", "c"]


def test_equal_tokens_do_not_grow() -> None:
    loaded = tiny("bert")
    found = []
    for n in (1, 3, 8):
        ids = repeated_token(loaded, n, 1)
        batch = {"input_ids": ids, "position_ids": torch.zeros_like(ids)}
        found.append([row.sigma for row in measure(loaded, batch)])
    assert torch.tensor(found).std(0).max() < 1e-6


def test_scripts_quantity_is_what_their_loop_returns() -> None:
    """The loop as published, on a map of torch's own, against the closed form."""
    for one in ls.load_model(tiny("bert")).layers(TEXT, layers=[0], map="residual", lengths=[7]):
        pullback = torch.func.vjp(one, one.x)[1]
        v = pullback(one(one.x))[0]  # jvp(...)[0] is the value itself
        u = v / v.norm()
        assert castin_scripts(one) == pytest.approx(math.sqrt(float((u * v).sum())), rel=1e-5)


def test_given_row_is_sigma_of_the_layer() -> None:
    layer = drawn(1)
    x = two_cluster(layer, num_tokens=5, radius=1.5).x if _real(layer) else torch.ones(5, 4)
    row = measure_built(layer, x.double(), kind="two_cluster", sample=3)
    assert row.sigma == pytest.approx(sigma(layer, x.double()), rel=1e-4)
    assert (row.input, row.sample, row.num_tokens) == ("two_cluster", 3, 5)
    same = constant(DotProduct(*3 * [torch.eye(2)]), num_tokens=4, radius=1.0)
    assert measure_built(DotProduct(*3 * [torch.eye(2)]), same.x, kind="constant").sigma == (
        pytest.approx(1.0, abs=1e-6)
    )


def _real(layer: DotProduct) -> bool:
    try:
        two_cluster(layer, num_tokens=5, radius=1.5)
    except InputError:
        return False
    return True


def test_steps_go_from_length_to_length() -> None:
    rows = [measurement(num_tokens=n, sample=s, sigma=1.0) for n in (8, 2, 4) for s in (0, 1)]
    assert [(a.num_tokens, b.num_tokens) for a, b in steps(rows)] == [(2, 4), (4, 8)] * 2
    (held,) = top_held_fixed([measurement(sigma=2.0, sigma_rest=0.5)])
    assert held.sigma == 0.5
    assert math.isnan(slope_of([(4, 1.0)]))


def test_scrambled_weights_keep_what_they_say() -> None:
    loaded = tiny("bert")
    query, output = "encoder.layer.1.attention.self.query", "encoder.layer.1.attention.output.dense"
    before = {name: loaded.model.get_submodule(name).weight for name in (query, output)}
    entries, spectrum = scrambled(loaded, "entries"), scrambled(loaded, "spectrum")
    for name, old in before.items():
        permuted = entries.model.get_submodule(name).weight
        assert not torch.equal(permuted, old)
        assert torch.equal(permuted.flatten().sort()[0], old.flatten().sort()[0])
        turned = spectrum.model.get_submodule(name).weight
        assert not torch.allclose(turned, old, atol=1e-3)
        assert torch.allclose(
            torch.linalg.svdvals(turned), torch.linalg.svdvals(old), rtol=1e-5, atol=1e-7
        )
    words = loaded.model.get_input_embeddings().weight
    assert torch.equal(entries.model.get_input_embeddings().weight, words)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("which", ["query and key", "value and output"])
def test_scrambling_one_layer_leaves_the_rest(family: str, which: Which) -> None:
    loaded = tiny(family)
    other = scrambled(loaded, "entries", which, layer=1)
    pairs = zip(loaded.model.named_parameters(), other.model.parameters(), strict=True)
    changed = [name for (name, old), new in pairs if not torch.equal(old, new)]
    kinds = ("query", "key", "q_proj", "k_proj")
    assert len(changed) == 2 and all("layer.1." in n or "layers.1." in n for n in changed)
    found = [name.split(".")[-2] in kinds for name in changed]
    assert all(found) if which == "query and key" else not any(found)
    with pytest.raises(InputError, match="of its own"):
        scrambled(tiny("gpt2"), "entries", which)
