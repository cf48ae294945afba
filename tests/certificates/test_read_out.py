"""A read-out of one layer stands within its radius; its curvature is never exceeded."""

import math
from typing import Any

import pytest
import torch

from lipscope import DotProduct
from lipscope.certificates import certify_network, read_out_radius
from lipscope.certificates.read_out import ReadOut
from lipscope.models import Network, layer_network
from lipscope.theorems import NotApplicableError
from small_layers import KINDS, case, move

BALLS, POOLS = ("token", "frobenius"), ("mean", "first")
WHOLE = {"token": "each", "frobenius": "joint"}


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(layer, weight: torch.Tensor, pool: str, x: torch.Tensor) -> torch.Tensor:
    """Of one input or a batch, from the layer's own forward pass."""
    y = layer(x)
    return (y.mean(-2) if pool == "mean" else y[..., 0, :]) @ weight.T


def network(layer, x: torch.Tensor, weight: torch.Tensor, bias=None, pool: str = "mean") -> Network:
    return layer_network(layer, len(x), weight, bias, pool=pool)


def attacked(net: Network, x: torch.Tensor, **how: Any) -> Any:
    """The certificate of a decision that an attack changed."""
    found = certify_network(net, x, **how)
    assert found.attack is not None
    return found


def largest_form(hessian: torch.Tensor, x: torch.Tensor, ball: str) -> float:
    """``sup |<E, H E>|``: exact for the Frobenius ball, by ascent from below for the other."""
    flat = hessian.reshape(x.numel(), x.numel())
    if ball == "frobenius":
        return float(torch.linalg.matrix_norm(flat, 2))
    best = 0.0
    for sign in (1, -1):
        e = gaussian(0, *x.shape)
        for _ in range(20):
            e = e / e.norm(dim=-1, keepdim=True)
            bent = sign * (flat @ e.flatten()).view_as(e)
            best = max(best, float((e * bent).sum()))
            e = bent + 0.3 * bent.norm() / e.norm() * e
    return best


@pytest.mark.slow
@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_second_derivative_exceeds_the_curvature(kind: str, ball: str) -> None:
    """Autograd's dense Hessians at 2 pools x 2 radii x 2 points of each ball."""
    g = torch.Generator().manual_seed(0)
    layer, x = case(kind, 1)
    w = gaussian(1, 2, 5)
    for pool in POOLS if kind in ("plain", "rotary") else POOLS[:1]:
        read = ReadOut(layer, x, w, network(layer, x, w, pool=pool).share, ball)
        for relative in (1e-3, 0.3):
            radius = relative * float(x.norm(dim=1).max())
            proved = read.curvature(radius)
            for share in (0.5, 1.0):
                inside = x + share * move(x, radius, ball, g)
                for r in range(2):
                    found = torch.func.hessian(
                        lambda z, r=r, pool=pool: scores(layer, w, pool, z)[r]
                    )(inside)
                    assert largest_form(found, x, ball) <= float(proved[r]) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_stands_within_its_radius(kind: str, ball: str) -> None:
    """7 kinds x 2 balls x 2 pools x 300 random points: 8,400."""
    g = torch.Generator().manual_seed(0)
    layer, x = case(kind, 2)
    weight = gaussian(3, 3, 5)
    for pool in POOLS:
        radius, rival = read_out_radius(network(layer, x, weight, pool=pool), x, ball)
        decision = int(scores(layer, weight, pool, x).argmax())
        assert decision != rival and radius > 0
        points = torch.stack([x + move(x, radius, ball, g) for _ in range(300)])
        decided = scores(layer, weight, pool, points).argmax(-1)
        assert (decided == decision).all()


@pytest.mark.parametrize("kind", ["plain", "rotary", "heads"])
def test_the_larger_of_both_bounds_is_taken(kind: str) -> None:
    """Below the attack; and where the expansion does not fit, moments alone, with a remark."""
    layer, x = case(kind, 3)
    net = network(layer, x, gaussian(4, 2, 5))
    for ball in BALLS:
        rows, _ = read_out_radius(net, x, ball)
        found = attacked(net, x, ball=WHOLE[ball])
        assert rows <= found.radius < found.attack
        assert found.bound == ("moments" if found.radius == rows else "expansion")


def test_moments_alone_where_an_expansion_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = case("plain", 3)
    net = network(layer, x, gaussian(4, 2, 5))
    monkeypatch.setattr("lipscope.certificates.network_decision._MOST", 0)
    found = attacked(net, x)
    assert (found.radius, found.bound) == (read_out_radius(net, x, "frobenius")[0], "moments")
    assert "more than 4 GB" in (found.note or "")
    assert found.radius < found.attack


def test_the_radius_is_near_to_where_the_decision_changes() -> None:
    """Small margins: first order decides, and both sides meet."""
    for ball in BALLS:
        for kind in ("plain", "rotary"):
            layer, x = case(kind, 4)
            weight = gaussian(5, 2, 5)
            gap = scores(layer, weight, "mean", x)
            net = network(layer, x, weight, gap.flip(0) * torch.tensor([0.999, 1.0]))
            rows, _ = read_out_radius(net, x, ball)
            found = attacked(net, x, ball=WHOLE[ball])
            assert 1.0 < found.attack / rows < 1.2, (kind, ball)
            assert 1.0 < found.attack / found.radius < 1.05, (kind, ball)  # both are to 2 %


def test_one_dimension_against_a_grid() -> None:
    """Two tokens on a line: every move of a ball can be tried."""
    eye = torch.ones(1, 1, dtype=torch.float64)
    layer, x = DotProduct(eye, eye, eye), torch.tensor([[0.6], [-0.4]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    line = torch.linspace(-1, 1, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)[..., None]
    changed = scores(layer, weight, "mean", x + grid).argmax(-1) != 0
    for ball in BALLS:
        sizes = grid.abs().amax((1, 2)) if ball == "token" else grid.norm(dim=(1, 2))
        truth = float(sizes[changed].min())
        net = network(layer, x, weight)
        rows, _ = read_out_radius(net, x, ball)
        found = attacked(net, x, ball=WHOLE[ball])
        assert 0.4 * truth <= rows <= found.radius <= truth <= found.attack + 5e-3
        assert found.attack <= 1.03 * truth


@pytest.mark.parametrize("ball", BALLS)
def test_exact_where_attention_does_not_depend_on_the_input(ball: str) -> None:
    """``Q = 0``: f(X) = mean V x; the margin falls by ``|V^T w|`` per unit of every token."""
    n, value = 5, gaussian(0, 4, 4)
    layer = DotProduct(torch.zeros(2, 4).double(), gaussian(1, 2, 4), value)
    x, weight = gaussian(2, n, 4), gaussian(3, 2, 4)
    w = weight[0] - weight[1]
    margin = abs(float(w @ (value @ x.mean(0))))
    rate = float((value.T @ w).norm()) / (1 if ball == "token" else math.sqrt(n))
    net = network(layer, x, weight)
    assert read_out_radius(net, x, ball)[0] == pytest.approx(margin / rate, rel=1e-7)
    found = attacked(net, x, ball=WHOLE[ball])
    assert found.radius < found.attack < found.radius * 1.03


def test_every_rival_counts() -> None:
    layer, x = case("plain", 0)
    weight = gaussian(1, 6, 5)
    decision = int(scores(layer, weight, "mean", x).argmax())
    radius, rival = read_out_radius(network(layer, x, weight), x, "token")
    pairs = []
    for other in range(6):
        if other != decision:
            two = network(layer, x, weight[[decision, other]])
            pairs.append((read_out_radius(two, x, "token")[0], other))
    assert rival == min(pairs)[1]
    assert radius == pytest.approx(min(pairs)[0], rel=0.05)  # the pieces lie elsewhere


def test_a_tie_has_no_radius_and_a_blind_read_out_every_one() -> None:
    layer, x = case("plain", 0)
    tied = certify_network(network(layer, x, torch.ones(2, 5)), x)
    assert tied.radius == 0.0 and "tie" in (tied.note or "")
    blind = network(layer, x, torch.ones(2, 5), torch.tensor([1.0, 0.0]))
    answer = certify_network(blind, x)
    assert answer.radius == math.inf and "do not depend" in (answer.note or "")
    assert answer.attack is None


def test_other_networks_have_no_moments_of_rows() -> None:
    layer, x = case("plain", 0)
    net = network(layer, x, torch.eye(5))
    twice = Network(net.branches * 2, net.share, net.head, net.bias)
    with pytest.raises(NotApplicableError, match="no attention layer by itself"):
        read_out_radius(twice, x, "token")
