"""No certificate is below the truth where layers cancel, saturate, repeat, vanish or explode."""

from __future__ import annotations

import math

import pytest
import torch

from hostile import EXTENDED, KINDS, hostile, jacobian, sigma_from_below
from lipscope import DotProduct, InputError
from lipscope.certificates import NetworkCertificate, certify_network
from lipscope.certificates.balls import certify_ball
from lipscope.models import Branch, Network, layer_network
from lipscope.theorems import bounds_at

TRUTH = 1e-15  # what the last digit of a bound in float64 may lack

pytestmark = pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")


def below(layer: DotProduct, x: torch.Tensor) -> tuple[list[str], int]:
    """Bounds of sigma below the truth, and how many were asked."""
    truth = sigma_from_below(jacobian(layer, x)) * (1 - TRUTH)
    values = {
        bound.theorem: bound.value
        for bound in bounds_at(layer, x, metric="frobenius", sharp=True)
        if bound.value is not None and bound.kind == "upper" and bound.sound
        if bound.scope not in ("mean-field", "limit")
    }
    for relative in (0.0, 1e-3):
        try:
            found = certify_ball(layer, x, eps=relative * float(x.norm()))
        except InputError:  # in one line, which says why
            continue
        values |= {f"ball {relative}": found.value, "over it": found.sigma_bound}
    return [name for name, value in values.items() if value < truth], len(values)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bound_is_below_sigma(kind: str) -> None:
    """Seven kinds x 2 layers: some 250 bounds; the next test asks 80 times as many."""
    for seed in range(2):
        assert below(*hostile(kind, seed))[0] == [], seed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_bound_of_many_is_below_sigma(kind: str) -> None:
    for seed in range(2, 160):
        assert below(*hostile(kind, seed))[0] == [], seed


def test_heads_that_cancel() -> None:
    """To 1e-8: Gram matrices then hold nothing but rounding, which is added."""
    g = torch.Generator().manual_seed(10)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v, x, e = w(1, 2), w(1, 2), w(1, 2), w(2, 2), w(1, 2)
    small, minus = 1e-8, torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    heads = (torch.cat([q, q + small * e]), torch.cat([k, k]), torch.cat([v, v]))
    layer = DotProduct(*heads, minus, heads=2)
    found = certify_ball(layer, x, eps=1e-3 * small)
    assert found.value >= sigma_from_below(jacobian(layer, x)) > 1e-9
    assert found.value < 1e-4  # no more than the square root of rounding


def test_a_zero_jacobian_and_a_saturated_one() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = DotProduct(eye, eye, eye, 0 * eye)
    assert certify_ball(zero, x, eps=0.1).value == 0.0
    assert all(
        b.value == 0 for b in bounds_at(zero, x, sharp=True) if b.theorem == "row_gram_joint"
    )
    alone = certify_ball(DotProduct(eye, eye, eye, scale=1.0), 24 * eye, eps=4.0)
    assert 1.0 <= alone.value < 1 + 1e-6


@pytest.mark.parametrize("scale", [1e60, 1e100, 1e160])
def test_what_overflows_is_refused_in_one_line(scale: float) -> None:
    eye = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [1.5, -1.0]], dtype=torch.float64)
    layer = DotProduct(eye, eye, scale * eye, scale * eye)
    for bound in bounds_at(layer, x, sharp=True):
        assert bound.value is None or math.isfinite(bound.value), bound.theorem
    wide = DotProduct(scale * eye, eye, eye)
    with pytest.raises(InputError, match=r"No certificate: .*too large for float64"):
        certify_ball(wide, x[[0, 0]], eps=0.1)


def certified(layer, x, weight, bias) -> NetworkCertificate:
    """Every token by the radius: the larger one of both bounds."""
    return certify_network(layer_network(layer, len(x), weight, bias), x, ball="each")


def flip_distance(size: float) -> tuple[float, float]:
    """Radius and a move that changes the decision, for two one-hot tokens of this norm."""
    eye = torch.eye(2, dtype=torch.float64)
    x = size * eye
    layer = DotProduct(
        torch.cat([eye, 2 * eye]),
        torch.cat([eye, eye]),
        torch.cat([eye, eye]),
        torch.cat([eye, -eye], 1),
        heads=2,
        scale=1.0,
    )
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    bias = torch.tensor([1e-3, 0.0], dtype=torch.float64)
    found = certified(layer, x, weight, bias)
    least = math.inf
    for angle in torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64):
        way = torch.stack([angle.cos(), angle.sin()])
        for other in (way, -way, way.flip(0), torch.zeros(2, dtype=torch.float64)):
            moves = torch.linspace(0, 2 * size, 400, dtype=torch.float64)[:, None, None]
            y = layer(x + moves * torch.stack([way, other])).mean(-2) @ weight.T + bias
            changed = (y.argmax(-1) != found.decision).nonzero()
            if len(changed):
                least = min(least, float(moves[int(changed[0])]))
    return found.radius, least


@pytest.mark.parametrize("size", [3.0, 10.0, 30.0, 100.0])
def test_no_infinite_radius_where_a_far_move_changes_the_decision(size: float) -> None:
    """Slope and curvature underflow at X: the scores depend on the input all the same."""
    radius, flipped = flip_distance(size)
    assert 0 < radius < flipped < math.inf


def test_a_radius_is_infinite_for_structural_reasons_only() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    bias = torch.tensor([1.0, 0.0], dtype=torch.float64)
    read = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    unread = DotProduct(eye, eye, eye, torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double())
    assert certified(unread, x, read, bias).radius == math.inf
    for tiny in (1e-30, 1e-200, 1e-320):
        layer = DotProduct(eye, eye, tiny * eye)
        assert certified(layer, x, read, bias).radius < math.inf
    twice = [torch.cat([eye, eye])] * 3  # two heads that cancel exactly
    layer = DotProduct(*twice, torch.cat([eye, -eye], 1), heads=2)
    assert certified(layer, x, read, bias).radius < math.inf


def test_a_margin_that_is_rounding_is_a_tie() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[3e5, 1e5], [1e5, 3e5]], dtype=torch.float64)
    layer = DotProduct(0 * eye, eye, eye)
    bias = torch.tensor([1e-11, 0.0], dtype=torch.float64)
    found = certified(layer, x, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), bias)
    assert found.radius == 0.0 and "tie" in (found.note or "")


def test_a_margin_below_the_rounding_of_the_terms_that_cancel_in_it_is_a_tie() -> None:
    """The head reads a large part of the stream by weights that cancel; scores are small."""
    large = 1e8 * torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)
    pull = torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64)
    head = torch.stack([pull, -pull])
    head = head - torch.outer(head @ large, large) / (large @ large)
    layer = DotProduct(*(1e-3 * torch.eye(3, dtype=torch.float64)[None].expand(3, -1, -1)))
    net = Network(
        (Branch(layer),),
        torch.ones(1, dtype=torch.float64),
        head,
        torch.zeros(2, dtype=torch.float64),
    )
    x = large[None] + 1e-9 * pull
    assert 0 < float(net(x).abs().max()) < 1e-5
    found = certify_network(net, x)
    assert found.radius == 0.0 and "tie" in (found.note or "")
