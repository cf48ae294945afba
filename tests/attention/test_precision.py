"""Half precision and autocast: squares and sums in float32, rounded once, derivatives alike."""

from __future__ import annotations

import copy

import pytest
import torch

import lipscope as ls
from agreement import gaussian
from examples import N, build, each_variant
from lipscope.attention import (
    ClippedAttention,
    DividedAttention,
    DotProduct,
    L2Attention,
    MultiheadAttention,
    ScaledCosineAttention,
    SinkhornAttention,
    TokenNorm,
)
from lipscope.control import attention_received, entropy_and_sink, largest_logits
from lipscope.dynamics import clusters, diameter
from lipscope.errors import InputError
from lipscope.measures import split_at

each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# Weights, tokens, projections and heads are rounded: some units of the output each.
ROUNDING = 4


def off(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


@each_half
@each_variant
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_a_layer_is_that_of_float64_to_the_rounding_of_its_dtype(kind, dtype, size) -> None:
    """With gradients, without them, and under autocast: tokens above 256 have squares that
    float16 has not."""
    if kind is SinkhornAttention and size > 1:
        pytest.skip("no doubly stochastic weights at such scores")
    half, x = build(kind).to(dtype), (size * gaussian(N, 4)).to(dtype)
    exact = half.in_double()
    true, limit = exact(x.double()), ROUNDING * torch.finfo(dtype).eps
    single = copy.deepcopy(half).float()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y = half(x)
            with torch.autocast("cpu", dtype):
                cast, heads = single(x.float()), single.heads(x.float())
        assert y.dtype == cast.dtype == heads.dtype == dtype
        assert off(y, true) < limit and off(cast, true) < limit
        assert off(heads, exact.heads(x.double())) < limit


@each_half
@each_variant
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_derivatives_in_half_precision_are_those_of_the_forward(kind, dtype, size) -> None:
    """In closed form and by autograd, against a central difference in float64."""
    if kind is SinkhornAttention and size > 1:
        pytest.skip("no doubly stochastic weights at such scores")
    half, x = build(kind).to(dtype), (size * gaussian(N, 4)).to(dtype)
    exact, e = half.in_double(), gaussian(N, 4, seed=3).to(dtype)
    h = 1e-6 * size
    ends = [exact(x.double() + step * e.double()) for step in (h, -h)]
    true = (ends[0] - ends[1]) / (2 * h)
    op = half.linearise(x)
    assert op.matvec(e).dtype == dtype
    limit = ROUNDING * torch.finfo(dtype).eps
    assert off(op.matvec(e), true) < limit
    with torch.autocast("cpu", dtype):
        assert off(copy.deepcopy(half).float().linearise(x.float()).matvec(e.float()), true) < 1e-3
    # Autograd goes through the rounded output of every linear map, and back.
    (pulled,) = torch.autograd.grad(half(y := x.clone().requires_grad_()), y, op.matvec(e))
    assert off(pulled, exact.linearise(x.double()).rmatvec(true)) < 16 * limit


@each_half
@pytest.mark.parametrize("size", [1.0, 300.0, 6e4])
def test_norms_of_tokens_square_in_float32(dtype, size) -> None:
    x = gaussian(N, 4)
    x = (size * x / x.abs().max()).to(dtype)
    norm = TokenNorm(torch.ones(4, dtype=dtype), 1e-6)
    true = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).dtype == dtype
    assert off(norm(x), true) < torch.finfo(dtype).eps
    eye = torch.eye(4, dtype=dtype)
    entrance = ClippedAttention(eye, eye, eye, radius=2.0).entrance()
    assert entrance is not None
    true = x.double() * (2 / x.double().norm(dim=-1, keepdim=True)).clamp_max(1)
    assert off(entrance(x), true) < torch.finfo(dtype).eps


@each_half
def test_multihead_attention_under_autocast_at_large_inputs(dtype) -> None:
    """Distances, norms and divisors of tokens of some hundred."""
    x = 300 * gaussian(1, N, 8).float()
    options = {"scaled-cosine": {"temperature": 5.0}, "l2": {}, "lipschitz-norm": {}}
    for name, own in options.items():
        module = MultiheadAttention(8, 2, name, batch_first=True, **own)
        true, weights = copy.deepcopy(module).double()(*[x.double()] * 3)
        for need in (True, False):
            with torch.autocast("cpu", dtype):
                y, p = module(x, x, x, need_weights=need)
            assert y.dtype == dtype and off(y, true) < 16 * torch.finfo(dtype).eps
            if need:
                assert p.dtype == dtype and bool(((p.sum(-1) - 1).abs() < 0.01).all())
            if need and name != "l2":  # scores up to 5 of queries to a unit; distances are 1e5
                assert (p - weights).abs().max().item() < 10 * torch.finfo(dtype).eps


@each_half
def test_constants_of_layers_in_half_precision_are_bounds(dtype) -> None:
    """``‖W‖²`` beyond 65,504 too: a constant of infinity made a contraction of nothing."""
    layer = L2Attention(300 * gaussian(6, 4), gaussian(4, 4), heads=2).to(dtype)
    true = layer.in_double().constant(5)
    assert float(layer.constant(5)) == pytest.approx(float(true), rel=1e-5)
    cosine = ScaledCosineAttention(
        gaussian(6, 4), gaussian(6, 4), gaussian(4, 4), temperature=20.0, eps=1e-6, heads=2
    ).to(dtype)
    many = 100_001  # tokens, which float16 cannot count
    true = cosine.in_double().constant(many)
    assert float(cosine.constant(many)) == pytest.approx(float(true), rel=1e-5)


@each_variant
def test_signals_and_penalties_are_the_same_under_autocast(kind) -> None:
    """A penalty is asked for in the middle of a step, where autocast is on."""
    layer, x = build(kind).float(), gaussian(N, 4).float()

    def read() -> dict[str, torch.Tensor]:
        entropy, sink = entropy_and_sink(layer, x)
        found = {"entropy": entropy, "sink": sink, "logits": largest_logits(layer, x)}
        found["received"] = attention_received(layer, x)
        for how in ("sigma", "sigma-estimate", "row-gram", "softmax-spread", "weight-norms"):
            try:
                found[how] = ls.restrain(layer, x, how).penalty()
            except InputError:
                continue
        return found

    plain = read()
    with torch.autocast("cpu", torch.bfloat16):
        cast = read()
    assert len(plain) >= 6
    for name, value in plain.items():
        torch.testing.assert_close(cast[name], value, rtol=1e-6, atol=0, msg=name)


@each_half
def test_what_is_asked_of_points_in_half_precision_is_known_or_refused(dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [300.0, 400.0], [300.0, 401.0]], dtype=dtype)
    found = clusters(x, 10.0)
    assert found.count == 2 and diameter(x[:2]) == pytest.approx(500.0, rel=0.01)
    eye = torch.eye(2, dtype=dtype)
    with pytest.raises(InputError, match=f"float32 or float64. Found {str(dtype)[6:]}"):
        split_at(DotProduct(eye, eye, eye), x)


@pytest.mark.parametrize("kept", [2**30, 400], ids=["stored", "rebuilt"])
@pytest.mark.parametrize("kind", [DotProduct, DividedAttention, ClippedAttention])
def test_values_far_below_their_bias_keep_their_digits(kind, kept) -> None:
    """Where weights add up to 1, the bias of the values moves nothing."""
    options: dict = {"by": "G2", "num_tokens": N} if kind is DividedAttention else {}
    options |= {} if kind is DotProduct else {"radius": 3.0}
    weights = gaussian(4, 4), gaussian(4, 4), 1e-9 * gaussian(4, 4, seed=1), gaussian(3, 4)
    layer = kind(*weights, heads=2, value_bias=1e6 + gaussian(4), **options)
    x, e, g = gaussian(N, 4).float(), gaussian(N, 4, seed=2), gaussian(N, 3)
    true, layer = layer.linearise(x.double()), copy.deepcopy(layer).float()
    found = layer.linearise(x, memory=kept)
    scale = true.matvec(e).abs().max()
    torch.testing.assert_close(
        found.matvec(e.float()).double(), true.matvec(e), rtol=0, atol=1e-5 * scale
    )
    scale = true.rmatvec(g).abs().max()
    torch.testing.assert_close(
        found.rmatvec(g.float()).double(), true.rmatvec(g), rtol=0, atol=1e-5 * scale
    )
    near = layer.stretch(x, g.float(), e.float())
    assert float(near) == pytest.approx(float((g * true.matvec(e)).sum()), rel=1e-4)
    bare = layer.replace(value_bias=None)
    at = ls.top_singular(found, generator=torch.Generator().manual_seed(0))
    without = ls.top_singular(bare.linearise(x), generator=torch.Generator().manual_seed(0))
    assert at.sigma == pytest.approx(without.sigma, rel=1e-6)
    with torch.no_grad():  # the forward keeps it
        assert float((layer(x) - bare(x)).abs().max()) > 1e5
