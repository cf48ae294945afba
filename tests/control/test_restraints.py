"""Restraints on every variant: what a step says is true of the layer afterwards, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import lipscope as ls
from agreement import gaussian
from examples import N, build, each_variant
from lipscope.attention import (
    Attention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    Softmax,
    TokenNorm,
)
from lipscope.control import restraints
from lipscope.errors import InputError

X = gaussian(N, 4)


def logits(layer: Attention) -> torch.Tensor:
    """The largest logit of every head, from what the layer's own softmax is the softmax of."""
    with torch.no_grad():
        q, k, _ = layer.project(X)
        return layer.capped(layer.score(q, k)).flatten(1).amax(1)


def sigma(layer: Attention) -> float:
    jacobian = torch.func.jacrev(layer)(X).detach()
    return float(torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2))


def bare(kind: type[Attention]) -> Attention:
    layer = build(kind)
    none = {n: None for n in ("output", "output_bias") if n in layer.fields()}
    return layer.replace(**none)


@each_variant
def test_the_largest_logit_is_the_cap_after_a_step_or_the_step_is_refused(kind) -> None:
    layer = build(kind)
    before = logits(layer)
    cap = 0.3 * float(before.max())
    if kind is L2Attention:  # its logits are minus squares
        assert float(before.max()) <= 0
        assert ls.restrain(layer, X, "query-key-clip", cap=1e-3).step() == {}
        return
    held = ls.restrain(layer, X, "query-key-clip", cap=cap)
    if kind is LipschitzNormAttention:
        state = {name: w.clone() for name, w in layer.state_dict().items()}
        with pytest.raises(InputError, match=r"a divisor .*layer 0 \(`LipschitzNormAttention`\)"):
            held.step()
        assert all(torch.equal(w, state[name]) for name, w in layer.state_dict().items())
        return
    done, after = held.step(), logits(layer)
    assert float(after.max()) == pytest.approx(cap, rel=1e-6)
    if kind is not ScaledCosineAttention:  # which has one temperature for all heads
        torch.testing.assert_close(after, before.clamp_max(cap), rtol=1e-6, atol=0)
    assert done == {0: pytest.approx(float((after / before).min()))}
    assert held.step() == {}


@each_variant
@pytest.mark.parametrize("projected", [True, False])
def test_sigma_is_at_most_the_cap_after_a_step(kind, projected) -> None:
    layer = build(kind) if projected else bare(kind)
    cap = 0.3 * sigma(layer)
    held = ls.restrain(layer, X, "sigma-cap", cap=cap)
    if kind.__name__ == "DividedAttention" and not projected:
        state = {name: w.clone() for name, w in layer.state_dict().items()}
        with pytest.raises(InputError, match=r"`sigma-cap` should bring layer 0 .*normalised"):
            held.step()
        assert all(torch.equal(w, state[name]) for name, w in layer.state_dict().items())
        return
    done = held.step()
    assert 0.98 * cap <= sigma(layer) <= cap * (1 + 2e-4)  # a hundredth and rounding
    assert done[0] == pytest.approx(0.3, rel=0.02)
    assert held.step() == {}


@each_variant
def test_singular_values_are_at_most_the_cap_after_a_step(kind) -> None:
    layer = build(kind)
    ls.restrain(layer, X, "spectral-cap", cap=0.3).step()
    sizes = [torch.linalg.matrix_norm(w.detach(), 2) for w in layer.parameters() if w.ndim == 2]
    assert max(sizes) == pytest.approx(0.3)


@each_variant
def test_the_spread_of_a_softmax_is_asked_of_a_softmax_only(kind) -> None:
    """Rows of sigmoid weights are no probabilities: their spread was 0 whatever they were."""
    layer = build(kind)
    for how in ("softmax-spread", "softmax-spread-ratio"):
        held = ls.restrain(layer, X, how)
        if isinstance(layer.weighting, Softmax):
            assert bool(held.penalty().isfinite())
            continue
        assert kind in (SigmoidAttention, SinkhornAttention)
        with pytest.raises(InputError, match=rf"`{how}` .* softmax\. Found `{kind.__name__}"):
            held.penalty()


def test_what_clipping_cannot_reach_is_refused_and_left_as_it_was() -> None:
    """Norms, a fixed temperature, keys that are the queries, and logits that are no number."""
    weights = [nn.Parameter(gaussian(4, 4, seed=i)) for i in range(3)]
    shared = weights[0]
    normed = DotProduct(*weights, query_norm=TokenNorm(torch.ones(4).double(), 1e-6))
    for words, layer in (
        ("a norm", normed),
        ("a norm", DotProduct(*weights, key_norm=TokenNorm(torch.ones(4).double(), 1e-6))),
        ("a soft cap", DotProduct(*weights, softcap=3.0)),
        (r"a norm.*`Scaled", ScaledCosineAttention(*weights, temperature=9.0)),
        ("computed from others", DotProduct(shared, shared, weights[2])),
        ("should be finite", DotProduct(*(1e200 * gaussian(4, 4) for _ in range(3)))),
    ):
        state = {name: w.clone() for name, w in layer.state_dict().items()}
        with pytest.raises(InputError, match=words):
            ls.restrain(layer, X, "query-key-clip", cap=1e-3).step()
        assert all(torch.equal(w, state[name]) for name, w in layer.state_dict().items()), words


def test_a_step_that_does_not_bring_a_layer_there_says_so(monkeypatch) -> None:
    """A score of which a part is no product of queries and keys: measured again, it is there."""
    score = DotProduct.score

    def more(self, q, k, *, out=None):
        return score(self, q, k, out=out).add_(5.0)

    monkeypatch.setattr(DotProduct, "score", more)
    layer = DotProduct(*(nn.Parameter(gaussian(4, 4, seed=i)) for i in range(3)))
    state = {name: w.clone() for name, w in layer.state_dict().items()}
    with pytest.raises(InputError, match=r"should bring layer 0 to 2\. Found a largest logit of"):
        ls.restrain(layer, X, "query-key-clip", cap=2.0).step()
    assert all(torch.equal(w, state[name]) for name, w in layer.state_dict().items())


@pytest.mark.parametrize("how", restraints())
def test_a_layer_without_parameters_is_one_line(how) -> None:
    """Nothing to act on: a constraint says so, and a penalty is a number."""
    layer = build(DotProduct, trained=False)
    cap = 0.3 if restraints()[how].cap_is == "needed" else None
    if how in ("sigma", "sigma-estimate", "row-gram", "softmax-spread", "softmax-spread-ratio"):
        assert bool(ls.restrain(layer, X, how, cap=cap).penalty().isfinite())
        return

    def act() -> None:
        held = ls.restrain(layer, X, how, cap=cap)
        held.penalty()
        held.step()

    with pytest.raises(InputError, match=r"not trained|`nn.Parameter`|linear maps of their own"):
        act()


class Twice(nn.Module):
    """One attention module that is called twice, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a(x, x, x)[0]
        return x + self.a(x, x, x)[0]


def test_a_module_that_is_called_twice_is_scaled_once() -> None:
    model, x = Twice(), gaussian(1, 5, 8)
    before = [row.sigma for row in ls.measure(model, x, dtype="float64")]
    found = ls.restrain(model, x, "sigma-cap", cap=0.3).step()
    assert found[0] == found[1] == pytest.approx(0.3 / max(before), rel=0.05)
    after = [row.sigma for row in ls.measure(model, x, dtype="float64")]
    assert 0.29 <= max(after) <= 0.3 * (1 + 1e-4)
    ls.restrain(model, x, "query-key-clip", cap=0.02).step()
    clipped = ls.Monitor(model, x).read()
    assert max(one.largest_logit for one in clipped) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("how", ["spectral-norm", "spectral-gain", "query-key-norm"])
def test_a_module_that_is_called_twice_is_parametrised_once(how: str) -> None:
    model, x = Twice() if how != "query-key-norm" else Shared(), gaussian(1, 5, 8)
    y = model(x).detach()
    held = ls.restrain(model, x, how)
    if how == "spectral-gain":
        assert torch.allclose(model(x), y, rtol=1e-12)
    if how == "query-key-norm":
        assert sum(isinstance(one, TokenNorm) for one in model.modules()) == 2
    held.remove()
    assert bool(model(x).isfinite().all())


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


def act(held: ls.Restraint) -> None:
    held.penalty()
    held.step()


def swap(model: nn.TransformerEncoder) -> None:
    model.layers[0].self_attn = nn.MultiheadAttention(8, 2, batch_first=True)


def insert(model: nn.TransformerEncoder) -> None:
    model.layers.insert(0, encoder().layers[0])


def prune(model: nn.TransformerEncoder) -> None:
    model.layers = model.layers[1:]


@pytest.mark.parametrize("change", [swap, insert, prune])
@pytest.mark.parametrize("how", ["sigma", "weight-norms", "spectral-cap"])
def test_a_layer_whose_place_another_module_takes_is_refused(how: str, change) -> None:
    model, x = encoder(), torch.randn(1, 5, 8)
    held = ls.restrain(model, x, how, cap=0.1, layers=0)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # the same module inside
    act(held)
    change(model)
    if change is insert and how != "sigma":  # its weights are still the model's
        act(held)
        return
    with pytest.raises(InputError, match=r"`layers\.0\.self_attn` as it was at first"):
        act(held)


def test_a_projection_beside_its_module_may_not_change_either() -> None:
    model = Shared()
    held = ls.restrain(model, gaussian(1, 5, 8), "weight-norms")
    model.a.output.dense = nn.Linear(8, 8).double()
    with pytest.raises(InputError, match="one of another module"):
        held.penalty()


def test_every_matrix_counts_once() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    ours = block.self_attn = ls.MultiheadAttention(8, 2, batch_first=True)
    found = ls.restrain(block, torch.randn(1, 5, 8), "weight-norms").penalty()
    each = [getattr(ours.attention, name) for name in ("query", "key", "value", "output")]
    norms = [torch.linalg.matrix_norm(w, 2) for w in each]
    assert found.item() == pytest.approx(torch.stack(norms).mean().item(), rel=1e-5)


@pytest.mark.parametrize("how", ["sigma", "sigma-cap"])
def test_a_batch_of_nothing_is_refused(how: str) -> None:
    layer = build(DotProduct)
    with pytest.raises(InputError, match="`data` should be the layer's input"):
        ls.restrain(layer, X[None][:0], how, cap=0.5)


class Shared(nn.Module):
    """The same of linear maps of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1
        )
        self.a = transformers.BertModel(config).encoder.layer[0].attention.double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.a(x)[0])[0]


@pytest.mark.parametrize("how", ["spectral-norm", "spectral-gain"])
def test_norms_are_exact_at_once_and_zero_weights_are_refused(how: str) -> None:
    torch.manual_seed(1)
    encoder = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).double()
    attention, x = encoder.self_attn, gaussian(1, 5, 64)
    before = attention.in_proj_weight.detach().clone()
    held = ls.restrain(encoder, x, how, cap=2.0 if how == "spectral-norm" else None)
    norm = float(torch.linalg.matrix_norm(attention.in_proj_weight.detach(), 2))
    held.remove()
    if how == "spectral-norm":
        assert norm == pytest.approx(2.0, rel=1e-12)
    else:
        assert torch.allclose(attention.in_proj_weight, before, rtol=1e-12)
    nn.init.zeros_(attention.out_proj.weight)
    with pytest.raises(InputError, match=rf"`{how}` divides weights by their norm. Found `weight`"):
        ls.restrain(encoder, x, how)
    assert not nn.utils.parametrize.is_parametrized(attention)


def test_numbers_of_numpy_are_numbers(unchecked) -> None:
    layer = build(DotProduct)
    held = ls.restrain(layer, X, "sigma-cap", layers=[np.int64(0)], cap=np.float32(0.5))
    held.step()
    assert sigma(layer) <= 0.5 * (1 + 1e-4)
