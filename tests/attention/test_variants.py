"""Every variant of the register: trained, copied, masked, and against automatic differentiation.

A new variant needs an entry of `EXAMPLES` in `examples.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from agreement import agree, gaussian
from examples import EXAMPLES, N, build, each_variant
from lipscope import bounds, to_dense
from lipscope.attacks import constant
from lipscope.attention import (
    ClippedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    Softmax,
    TokenNorm,
    variants,
)
from lipscope.errors import InputError

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "masked": {"mask": (gaussian(N, N) < 0.3) | torch.eye(N, dtype=torch.bool)},
    "masked by head": {"mask": (gaussian(2, N, N) < 0.3) | torch.eye(N, dtype=torch.bool)},
    "a row reads nothing": {"mask": torch.arange(N)[:, None] != torch.full((N,), 2)},
}


@each_variant
@pytest.mark.parametrize("trained", [True, False], ids=["parameters", "buffers"])
def test_a_layer_keeps_its_papers_weights_and_nothing_else(kind, trained) -> None:
    layer, names = build(kind, trained=trained), set(EXAMPLES[kind].weights)
    assert {name for name, _ in layer.named_parameters()} == (names if trained else set())
    assert set(layer.state_dict()) == names
    for name, shape in EXAMPLES[kind].weights.items():
        assert layer.state_dict()[name].shape == shape
    agree(layer, gaussian(N, 4))


@each_variant
def test_two_steps_of_an_optimiser_change_every_account_alike(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    before = {name: w.detach().clone() for name, w in layer.named_parameters()}
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        loss = (layer(x) - 1).square().mean() + layer.stretch(x, layer(x).detach(), x)
        loss.backward()
        optimiser.step()
    assert all(not torch.equal(w, before[name]) for name, w in layer.named_parameters())
    agree(layer, x)
    assert not torch.allclose(layer(x), build(kind)(x))


@each_variant
def test_copies_are_the_layer_and_leave_it_alone(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    y = layer(x).detach()
    twin = copy.deepcopy(layer)
    fresh = EXAMPLES[kind].build(kind)
    with torch.no_grad():
        for one in (*twin.parameters(), *fresh.parameters()):
            one.mul_(1.5)
    assert not torch.allclose(twin(x), y)
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh(x), y)
    single = copy.deepcopy(layer).to(torch.float32)
    torch.testing.assert_close(single(x.float()).double(), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.in_double()(x), single.double()(x))
    same = layer.replace()
    assert list(map(id, same.parameters())) == list(map(id, layer.parameters()))
    alone = layer.in_double()
    assert not any(w.requires_grad for w in (*alone.parameters(), *alone.buffers()))
    for other in (same, alone):
        torch.testing.assert_close(other(x), y)
    torch.testing.assert_close(layer(x), y)


@each_variant
def test_forward_mode_and_vmap_need_no_gradients(kind) -> None:
    """Under ``no_grad`` a layer works in chunks, which torch cannot follow."""
    layer, x, e = build(kind), gaussian(N, 4), gaussian(N, 4, seed=3)
    true = layer.linearise(x).matvec(e)
    with torch.no_grad():
        y = layer(x)
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (e,)), (y, true))
        with forward_ad.dual_level():
            moved = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, e)))
        torch.testing.assert_close(moved.tangent, true)
        torch.testing.assert_close(torch.func.vmap(layer)(x[None]), y[None])


@each_variant
@pytest.mark.parametrize("grad", [True, False])
def test_tokens_of_another_dtype_are_refused_with_both(kind, grad) -> None:
    x, said = gaussian(N, 4), r"in float64\. Found \(\d, 4\) in float32"
    with torch.set_grad_enabled(grad), pytest.raises(InputError, match=said):
        build(kind)(x.float())


@each_variant
def test_heads_alone_add_up(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    if EXAMPLES[kind].masked:
        layer = layer.replace(**MASKS["masked by head"])
    alone = [layer.head(h) for h in range(layer.num_heads)]
    assert all(one.num_heads == 1 for one in alone)
    bias = 0 if layer.output_bias is None else (len(alone) - 1) * layer.output_bias
    total = torch.stack([one(x) for one in alone]).sum(0) - bias
    torch.testing.assert_close(total, layer(x))
    torch.testing.assert_close(
        torch.cat([one.heads(x) for one in alone], 1), layer.replace(output=None)(x)
    )
    for head in (-1, layer.num_heads):
        with pytest.raises(InputError, match="`head` should be between"):
            layer.head(head)


@each_variant
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kind, mask) -> None:
    if not EXAMPLES[kind].masked:
        pytest.skip("not every mask is possible in this variant")
    layer = build(kind).replace(**MASKS[mask])
    agree(layer, gaussian(N, 4))
    if mask == "causal" and kind is not SigmoidAttention:
        x = gaussian(N, 4)
        torch.testing.assert_close(layer(x)[:3], layer(x[:3]))


@each_variant
def test_weights_of_tokens_count_their_copies(kind) -> None:
    layer, x, counts = build(kind), gaussian(N, 4), torch.tensor([1, 3, 1, 2, 1, 1])
    weights = counts.double().log()
    agree(layer, x, weights)
    if not isinstance(layer.weighting, Softmax):
        return
    expected = layer(x, x.repeat_interleave(counts, 0))
    torch.testing.assert_close(layer(x, log_weights=weights), expected)


@each_variant
def test_one_token_and_none(kind) -> None:
    layer = build(kind)
    agree(layer, gaussian(1, 4))
    none = torch.zeros(0, 4).double()
    with torch.no_grad(), pytest.raises(InputError, match="at least one token"):
        layer(none)
    for ask in (layer, layer.linearise, lambda z: layer(gaussian(1, 4), z)):
        with pytest.raises(InputError, match="at least one token"):
            ask(none)
    with pytest.raises(InputError, match=r"shape \(..., n, 4\).* Found \(2, 5\)"):
        layer(gaussian(2, 5))


@each_variant
@pytest.mark.parametrize("causal", [False, True])
def test_equal_tokens_are_predicted_exactly_or_not_at_all(kind, causal) -> None:
    layer = build(kind)
    if causal and not EXAMPLES[kind].masked:
        pytest.skip("no causal mask in this variant")
    layer = layer.replace(causal=True) if causal else layer
    found = constant(layer, num_tokens=5, radius=2.0)
    sigma = float(torch.linalg.matrix_norm(to_dense(layer.linearise(found.x)), 2))
    assert found.predicted is None or found.predicted == pytest.approx(sigma, rel=1e-9)
    assert (found.predicted is None) == (
        kind in (ScaledCosineAttention, SigmoidAttention, SinkhornAttention, ClippedAttention)
    )


@each_variant
def test_a_layer_in_training_is_measured_between_its_bounds(kind) -> None:
    """Without a warning: the parameters' graph is left alone."""
    layer, x = build(kind), gaussian(N, 4)
    rows = bounds(layer, x)
    truth = float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))
    assert rows[0].sigma == pytest.approx(truth, rel=1e-3)
    values = [b.value for b in rows.bounds if b.metric == "frobenius" and b.kind == "upper"]
    found = [value for value in values if value is not None]
    assert found and min(found) >= truth * (1 - 1e-9)


def test_a_norm_of_all_heads_leaves_none_alone() -> None:
    layer = build(DotProduct).replace(query_norm=TokenNorm(torch.ones(6).double(), 0.1))
    with pytest.raises(InputError, match="joins its heads"):
        layer.head(0)


@each_variant
def test_heads_one_by_one_add_up(kind) -> None:
    layer, x, e = build(kind), gaussian(N, 4), gaussian(N, 4, seed=9)
    op, single = layer.linearise(x), layer.linearise(x, per_head=True)
    pushed = single.matvec(e.expand(layer.num_heads, -1, -1))
    torch.testing.assert_close(pushed.sum(0), op.matvec(e))
    g = op.matvec(e)
    pulled = single.rmatvec(g.expand(layer.num_heads, -1, -1))
    torch.testing.assert_close(pulled.sum(0), op.rmatvec(g))


@each_variant
def test_coinciding_tokens_and_zeros_have_gradients(kind) -> None:
    layer = build(kind)
    for x in (gaussian(1, 4).repeat(N, 1), 0 * gaussian(N, 4)):
        if kind is LipschitzNormAttention and not x.any():
            continue  # 0 / 0: it is not continuous there
        moved = x.clone().requires_grad_()
        weights = [moved, *layer.parameters()]
        for gradient in torch.autograd.grad(layer(moved).square().sum(), weights):
            assert bool(gradient.isfinite().all())
        agree(layer, x)


CONSTANTS = (
    L2Attention,
    ScaledCosineAttention,
    LipschitzNormAttention,
    ClippedAttention,
)


@pytest.mark.parametrize("kind", variants(), ids=lambda one: one.__name__)
def test_constants_are_trained_through(kind) -> None:
    if kind not in CONSTANTS:
        with pytest.raises(InputError, match="bound at all inputs of 5 tokens"):
            build(kind).constant(5)
        return
    layer = build(kind)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def constant(*moved):
        return layer.replace(**dict(zip(names, moved, strict=True))).constant(5)

    assert torch.autograd.gradcheck(constant, weights)
