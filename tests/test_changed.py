"""Models changed in one respect, inputs that take something away, and quantities of scripts."""

from __future__ import annotations

import math

import pytest
import torch

from lipscope import measure
from lipscope.attacks import constant, two_cluster
from lipscope.attention import DotProduct
from lipscope.engine.capture import captures, layer_maps
from lipscope.engine.measure import measure_built
from lipscope.errors import InputError
from lipscope.experiments.castin2024.published import castin_scripts
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
from lipscope.models.changed import Which
from lipscope.records.growth import slope_of, steps, top_held_fixed
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
    (one,) = captures(loaded, TEXT, layers=[1], lengths=[8])
    assert one.attention.causal
    with pytest.raises(InputError, match="decoder"):
        as_decoder(tiny("llama"))


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
    for _, one in layer_maps(tiny("bert"), TEXT, layers=[0], map="residual", lengths=[7]):
        pullback = torch.func.vjp(one.function, one.x)[1]
        v = pullback(one.function(one.x))[0]  # jvp(...)[0] is the value itself
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
