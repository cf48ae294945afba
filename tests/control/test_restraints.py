"""Restraints on every variant: what a step says is true of the layer afterwards, or refused."""

from __future__ import annotations

import pytest
import torch
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


def test_a_step_that_does_not_bring_a_layer_there_says_so() -> None:
    """A score of which a part is no product of queries and keys: measured again, it is there."""

    class Apart(DotProduct):
        def score(self, q, k, *, out=None):
            return super().score(q, k, out=out).add_(5.0)

    layer = Apart(*(nn.Parameter(gaussian(4, 4, seed=i)) for i in range(3)))
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
