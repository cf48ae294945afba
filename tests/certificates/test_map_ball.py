"""Certificates of blocks and of maps of them: never exceeded, and sigma where balls are small.

References: autograd's dense Jacobians, moves to the edge, gradient ascent.
"""

import itertools

import pytest
import torch

import lipscope as ls
from lipscope import DotProduct, InputError
from lipscope.attacks import attack_in_ball
from lipscope.attention import Rotary
from lipscope.certificates import certify_map
from lipscope.certificates.tokenwise import Units
from lipscope.models import ActivationName, Branch, Chain, Feed, Norm, read_map, whole_text
from small_layers import move
from tiny import TINY

F64 = torch.float64
N, D, F = 3, 4, 6
TEXT = "It was the best of times, it was the worst of times."


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def attention(seed: int, **kind: object) -> DotProduct:
    w = gaussian(seed, 4, D, D) / D**0.5
    return DotProduct(*w, heads=2, query_bias=w[0, 0], **kind)


def rotary() -> Rotary:
    angle = torch.arange(N)[:, None] * torch.tensor([[0.7, 0.7]]).double()
    return Rotary(angle.cos(), angle.sin())


def feed(seed: int, activation: ActivationName, *, gated: bool = False) -> Feed:
    w = gaussian(seed, 3, F, D) / D**0.5
    gate = {"gate": w[2], "gate_bias": w[2, :, 1]} if gated else {}
    return Feed(w[0], 0.3 * w[0, :, 0], w[1].T, w[1, 0], activation, **gate)


def norm(seed: int, **kind: bool) -> Norm:
    return Norm(1 + 0.2 * gaussian(seed, D), gaussian(seed + 1, D), 1e-5, **kind)


CHAINS = {
    "residual": (Branch(attention(1)),),
    "alone": (Branch(attention(1), skip=False),),
    "after the norm": (Branch(attention(1), norm(2), skip=False),),
    "post-norm": (
        Branch(attention(1)),
        Branch(None, norm(2), skip=False),
        Branch(feed(3, "gelu")),
        Branch(None, norm(5), skip=False),
    ),
    "pre-norm, gated, rotary": (
        Branch(attention(1, rotary=rotary()), norm(2, centred=False)),
        Branch(feed(3, "silu", gated=True), norm(5, centred=False)),
    ),
    "two blocks": (
        Branch(attention(1, causal=True), norm(2)),
        Branch(feed(3, "relu"), norm(5)),
        Branch(attention(11, causal=True), norm(12)),
        Branch(feed(13, "gelu_tanh"), norm(15)),
    ),
    "no variance": (Branch(attention(1)), Branch(None, norm(2, scaled=False), skip=False)),
    "relu, gated": (Branch(feed(3, "relu", gated=True)), Branch(attention(1))),
}


def sigmas_at(f: Chain, points: torch.Tensor) -> torch.Tensor:
    dense = torch.func.vmap(torch.func.jacrev(f))(points)
    return torch.linalg.matrix_norm(dense.flatten(3).flatten(1, 2), 2)


def sigma_at(f: Chain, x: torch.Tensor) -> float:
    return float(sigmas_at(f, x[None]))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_nothing_moves_further_and_no_slope_is_larger(name: str, ball: str) -> None:
    """8 chains x 2 balls x 4 radii x 40 moves of any size, 12 slopes and 4 ascents."""
    f, x, g = Chain(CHAINS[name]), gaussian(100, N, D), torch.Generator().manual_seed(1)
    for eps in (1e-6, 1e-3, 1e-2, 0.03):
        proved = certify_map(f, x, eps=eps, ball=ball)
        e = torch.stack([move(x, eps, ball, g) for _ in range(40)])
        e = e * torch.rand(40, 1, 1, generator=g).double()
        moved = (f(x + e) - f(x)).flatten(1).norm(dim=1) / e.flatten(1).norm(dim=1)
        assert float(moved.max()) <= proved.value * (1 + 1e-6 * (eps < 1e-3))  # a difference rounds
        assert float(sigmas_at(f, x + e[:12]).max()) <= proved.sigma_bound
        found = attack_in_ball(f, x, eps, ball=ball, random=2, ascents=1, steps=9)
        assert found.ratio <= proved.value * (1 + 1e-6 * (eps < 1e-3))
        assert found.sigma <= proved.sigma_bound
        assert proved.value <= proved.sigma_bound * (1 + 1e-12)


@pytest.mark.parametrize("name", CHAINS)
def test_small_balls_give_sigma(name: str) -> None:
    """The excess falls like the radius; below 1e-8 it is the rounding that is allowed for."""
    f, x = Chain(CHAINS[name]), gaussian(100, N, D)
    sigma = sigma_at(f, x)
    excess = [
        certify_map(f, x, eps=eps, ball="frobenius").value / sigma - 1
        for eps in (1e-4, 1e-6, 1e-10)
    ]
    assert 0 <= excess[2] <= 1e-8
    assert excess[1] <= 1e-8 or 50 <= excess[0] / excess[1] <= 200


def test_a_relu_at_its_kink_does_not_give_sigma() -> None:
    """Its secants keep every slope between 0 and 1 however small the ball: ``‖M‖`` is 1/2."""
    eye = torch.eye(2, dtype=F64)
    f = Chain((Branch(Feed(eye, 0 * eye[0], eye, 0 * eye[0], "relu"), skip=False),))
    found = certify_map(f, torch.zeros(1, 2), eps=1e-9, sigma=(1.0, 1.0))
    assert found.value == pytest.approx(1.0) and found.sigma_bound == pytest.approx(1.0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_tangents_of_units_are_in_their_range(activation: ActivationName, gated: bool) -> None:
    """Tight: on 201 points of the interval slopes come to within 2 % of both ends."""
    units = Units(feed(3, activation, gated=gated))
    middle = gaussian(7, 1, (2 if gated else 1) * F)
    low, high = middle - 0.6, middle + 0.6
    least, most = units.tangents(low, high)
    for k in torch.linspace(-1, 1, 41, dtype=F64):
        z = (middle + 0.6 * k).requires_grad_()
        u = z[:, F:] if gated else torch.ones_like(z)
        (slope,) = torch.autograd.grad((units.activation(z[:, :F]) * u).sum(), z)
        assert bool((slope >= least - 1e-12).all() and (slope <= most + 1e-12).all())
    if not gated and activation != "relu":
        zs = low + (high - low) * torch.linspace(0, 1, 201, dtype=F64)[:, None]
        zs.requires_grad_()
        (slopes,) = torch.autograd.grad(units.activation(zs).sum(), zs)
        assert torch.allclose(slopes.amax(0), most[0], atol=0.02)
        assert torch.allclose(slopes.amin(0), least[0], atol=0.02)


def test_hostile_chains() -> None:
    """Zero weights, heads that cancel, equal tokens, saturated rows, tokens that stay."""
    x = gaussian(100, N, D)
    zero = DotProduct(*4 * [torch.zeros(D, D, dtype=F64)], heads=2)
    found = certify_map(Chain((Branch(zero),)), x, eps=0.1)
    assert found.value == pytest.approx(1.0, abs=1e-8)
    w = gaussian(5, 4, D, D)
    twice = [torch.cat([one[:2]] * 2) for one in w[:3]]
    cancel = DotProduct(*twice, torch.cat([w[3][:, :2], -w[3][:, :2]], 1), heads=2)
    assert certify_map(Chain((Branch(cancel),)), x, eps=1e-9).value == pytest.approx(1, abs=1e-6)
    equal = x[:1].expand(N, -1).clone()
    f = Chain(CHAINS["post-norm"])
    assert certify_map(f, equal, eps=1e-9).value >= sigma_at(f, equal) * (1 - 1e-9)
    sharp = DotProduct(30 * w[0], w[1], w[2], w[3], heads=2)
    f = Chain((Branch(sharp),))
    found, g = certify_map(f, x, eps=1e-3), torch.Generator().manual_seed(2)
    for _ in range(50):
        e = move(x, 1e-3, "token", g)
        assert float((f(x + e) - f(x)).norm() / e.norm()) <= found.value
    for eps in (10.0, 1e6, 1e200):  # far beyond what anything holds for: finite, or refused
        try:
            wide = certify_map(f, x, eps=eps)
        except InputError:
            continue
        assert 1 <= wide.value <= wide.sigma_bound < float("inf")
    some = torch.tensor([0.01, 0.0, 0.02])
    found = certify_map(f, x, eps=some)
    for _ in range(50):
        e = move(x, 1.0, "token", g) * some[:, None]
        assert float((f(x + e) - f(x)).norm() / e.norm()) <= found.value
    assert found.value <= certify_map(f, x, eps=0.02).value


QUICK = {("bert", "stack"), ("gpt2", "model"), ("llama", "block"), ("llama", "residual")}


@pytest.mark.parametrize(
    ("family", "map"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in itertools.product(
            ("bert", "gpt2", "llama"), ("residual", "block", "stack", "model")
        )
    ],
)
def test_maps_of_models_are_certified(family: str, map: str) -> None:
    """The same sigma as `measure`; an attack in the ball; the chain is the map itself."""
    model = ls.load_model(f"random:{family}:{TINY[family]}")
    read = {"special_tokens": True, "longest": 5}
    batch = {"input_ids": whole_text(TEXT, model.loaded.reader_of_text(), **read)}
    at = model.at(batch, layer=1, map=map, dtype="float64")
    found = at.certify(1e-3, random=5, ascents=1)
    assert found.map == map and found.form == "slopes" and found.heads == ()
    assert found.layer == (None if map == "model" else 1)
    assert found.sigma == at.sigma and not found.violated
    assert at.sigma <= found.value <= found.sigma_bound <= 1.4 * at.sigma
    assert found.largest_ratio is not None and found.largest_ratio <= found.value
    chain, x = read_map(model.model, batch, layer=1, map=map)
    near = x + 0.1 * gaussian(3, *x.shape)
    assert torch.allclose(chain(near), at(near), atol=1e-9 * float(at(near).abs().max()))


def test_what_is_not_known_is_refused_in_one_line() -> None:
    gemma = ls.load_model(f"random:gemma2:{TINY['gemma2']}")
    with pytest.raises(InputError, match="norm of it before the sum, `Gemma2RMSNorm`"):
        ls.certify(gemma, TEXT, map="residual", length=4)
    with pytest.raises(
        InputError, match=r"A map should be attention .* certify the map `attention`"
    ):
        ls.certify(gemma, TEXT, map="block", length=4)
    olmo = ls.load_model(f"random:olmo:{TINY['olmo']}")
    with pytest.raises(InputError, match="no closed form is known for `OlmoAttention`"):
        ls.certify(olmo, TEXT, map="residual", length=4)
    bert = ls.load_model(f"random:bert:{TINY['bert']}")
    with pytest.raises(InputError, match="`head` goes with the maps attention and heads"):
        ls.certify(bert, TEXT, map="block", head=0, length=4)
    with pytest.raises(InputError, match="the input of a norm could vanish"):
        ls.certify(bert, TEXT, map="block", eps=100.0, length=4)
    with pytest.raises(InputError, match=r"at most 4 GB\. Found about"):
        certify_map(Chain(()), torch.zeros(64, 384), eps=0.1)
    with pytest.raises(InputError, match="attention or heads for a layer by itself"):
        ls.certify(attention(1), gaussian(2, N, D), map="block")
