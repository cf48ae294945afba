"""Ball certificates: never violated, equal to the local ones at radius 0, honest when wide."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lipscope import DotProduct, InputError
from lipscope.attacks import attack_in_ball
from lipscope.certificates.balls import certify_ball
from lipscope.theorems import HeadAt, heads_of
from lipscope.theorems.derived.ball import Ball, ball_certificate, softmax_over
from lipscope.theorems.derived.local_bounds import local_norms, local_rows
from lipscope.theorems.derived.row_gram import weighted_heads
from small_layers import KINDS, case, move


def sigmas(layer: DotProduct, points: torch.Tensor) -> torch.Tensor:
    """Of autograd's dense Jacobians, not of the library's own."""
    jacobians = torch.func.vmap(torch.func.jacrev(layer))(points)
    return torch.linalg.matrix_norm(jacobians.flatten(3).flatten(1, 2), 2)


@pytest.mark.parametrize("ball", ["token", "frobenius"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "heads"])
def test_every_form_and_interval_holds(kind: str, ball: str) -> None:
    """6 kinds x 2 balls x 5 inputs x 6 radii x 12 points: 4,320 attempts."""
    g = torch.Generator().manual_seed(1)
    for seed in range(5):
        layer, x = case(kind, seed)
        head = heads_of(layer)[0]
        centre = HeadAt(head, x)
        weighted = weighted_heads(centre)
        for relative in (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0):
            eps = relative * float(x.norm(dim=1).max())
            inside = Ball(centre, eps, ball, weighted)
            forms = inside.forms()
            points = torch.stack([x + move(x, eps, ball, g) for _ in range(12)])
            found = float(sigmas(layer, points).max())
            assert all(value >= found * (1 - 1e-10) for value in forms.values()), forms
            for other in points[:3]:
                there = HeadAt(head, other)
                assert (there.p <= inside.p.upper * (1 + 1e-9) + 1e-12).all()
                assert (there.p >= inside.p.lower * (1 - 1e-9) - 1e-12).all()
                assert (there.drift <= inside.own * (1 + 1e-9)).all()


def largest_ratio(
    layer: DotProduct, x: torch.Tensor, eps: float, ball: str, count: int, g
) -> float:
    """Over random moves of all sizes up to the radius, from the forward pass alone."""
    size = torch.rand(count, generator=g, dtype=x.dtype).clamp_min(1e-3)[:, None, None]
    moves = size * torch.stack([move(x, eps, ball, g) for _ in range(count)])
    moved = (layer(x + moves) - layer(x)).flatten(1).norm(dim=1)
    return float((moved / moves.flatten(1).norm(dim=1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_no_attempt_of_many_exceeds_the_certificate(kind: str, ball: str) -> None:
    """For each kind and ball alone: 4,000 random moves and 20 ascents."""
    g = torch.Generator().manual_seed(2)
    for seed, relative in enumerate((1e-3, 1e-2, 0.03, 0.1, 0.3)):
        layer, x = case(kind, seed)
        eps = relative * float(x.norm(dim=1).max())
        found = attack_in_ball(layer, x, eps, ball=ball, random=20, ascents=2, steps=30)
        proved = certify_ball(layer, x, eps=eps, ball=ball)
        assert largest_ratio(layer, x, eps, ball, 800, g) <= proved.value
        assert found.ratio <= proved.value and found.sigma <= proved.sigma_bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_no_attempt_exceeds_the_certificate(kind: str, ball: str) -> None:
    """In each ball 7 kinds x 2 inputs x 300 random moves: 4,200; and 4 ascents: 56."""
    g = torch.Generator().manual_seed(1)
    for seed, relative in ((0, 1e-2), (1, 0.1)):
        layer, x = case(kind, seed)
        eps = relative * float(x.norm(dim=1).max())
        found = attack_in_ball(layer, x, eps, ball=ball, random=5, ascents=2, steps=6)
        proved = certify_ball(layer, x, eps=eps, ball=ball)
        assert largest_ratio(layer, x, eps, ball, 300, g) <= proved.value
        assert found.ratio <= proved.value
        assert found.sigma <= proved.sigma_bound
        assert found.attempts == 12
        moved = (found.worst - x).norm(dim=-1)
        assert (moved.norm() if ball == "frobenius" else moved.max()) <= eps * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_radius_zero_is_the_local_certificate(kind: str) -> None:
    layer, x = case(kind, 3)
    for head in heads_of(layer):
        centre = HeadAt(head, x)
        at = Ball(centre, 0.0)
        assert at.by_blocks == pytest.approx(local_norms(centre), rel=1e-12)
        assert at.by_rows == pytest.approx(local_rows(centre), rel=1e-12)
        assert at.change <= 1e-12 * at.by_rows
        assert ball_certificate(centre, 0.0) <= min(local_norms(centre), local_rows(centre)) * (
            1 + 1e-12
        )


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_the_lesser_of_two(kind: str, eps: float) -> None:
    """With the upper ends of weights, or the lower ones and the rest where it counts most."""
    layer, x = case(kind, 4)
    for head in heads_of(layer):
        at = Ball(HeadAt(head, x), eps)
        (_, y, _), *more = at.c.pieces
        assert not more
        y = torch.where(at.c.allowed[..., None], y, 0.0)
        p, squares = at.p, y.square().sum(-1)
        upper = torch.einsum("ij,ijk,ijl->ikl", p.upper, y, y)
        lower = torch.einsum("ij,ijk,ijl->ikl", p.lower, y, y)
        rest = (p.free * squares.amax(-1))[:, None, None] * torch.eye(y.shape[-1]).to(y)
        tops = [torch.linalg.eigvalsh(m)[:, -1] for m in (upper, lower + rest)]
        expected = torch.minimum(*tops).clamp_min(0)
        torch.testing.assert_close(at.sums["upper_v"], expected, rtol=1e-9, atol=1e-12)
        of_gram = torch.linalg.eigvalsh(at.sums["upper_y"])[:, -1].clamp_min(0)
        torch.testing.assert_close(of_gram, expected, rtol=1e-9, atol=1e-12)


def test_interval_survives_probabilities_that_underflow() -> None:
    """``exp(eta) P`` would be inf * 0: the pitfall of intervals outside the log domain."""
    eye = torch.eye(1, dtype=torch.float64)
    head = heads_of(DotProduct(eye, eye, eye))[0]
    x = torch.tensor([[40.0], [-40.0], [39.0]], dtype=torch.float64)
    centre = HeadAt(head, x)
    assert centre.p.min() == 0.0
    eps = torch.full((3,), 40.0, dtype=torch.float64)
    interval = softmax_over(centre, eps, "token")
    assert (interval.upper > 0.4).all()  # at zero tokens every weight is 1/3
    assert torch.isfinite(interval.change).all()
    assert math.isfinite(ball_certificate(centre, 40.0))


@pytest.mark.slow
def test_one_head_of_random_layers_is_within_three_of_the_attack() -> None:
    ratios = []
    for kind in ("plain", "causal", "biased"):
        for seed in range(4):
            layer, x = case(kind, seed, n=12, d=8)
            eps = 1e-2 * float(x.norm(dim=1).max())
            found = attack_in_ball(layer, x, eps, random=2, ascents=1, steps=9)
            ratios.append(certify_ball(layer, x, eps=eps).value / found.ratio)
    assert min(ratios) >= 1.0, ratios
    assert max(ratios) < 3.0, ratios


def test_head_alone_and_both_maps() -> None:
    layer, x = case("heads", 0)
    for map in ("attention", "heads"):
        whole = certify_ball(layer, x, eps=1e-3, map=map)
        alone = [certify_ball(layer, x, eps=1e-3, head=h, map=map) for h in (0, 1)]
        assert [h.head for h in whole.heads] == [0, 1]
        assert [a.value for a in alone] == pytest.approx([h.value for h in whole.heads])
        assert whole.value <= sum(a.value for a in alone) * (1 + 1e-12)
        assert whole.sigma <= whole.value <= whole.sigma_bound
        assert attack_in_ball(layer, x, 1e-3, map=map, random=2).ratio <= whole.value


def test_radius_per_token() -> None:
    layer, x = case("causal", 0)
    eps = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.02])
    some = certify_ball(layer, x, eps=eps)
    assert some.value < certify_ball(layer, x, eps=0.1).value
    assert attack_in_ball(layer, x, eps, random=20).ratio <= some.value


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf, "0.1"])
def test_bad_radius(eps: Any, unchecked: Any) -> None:
    layer, x = case("plain", 0)
    with pytest.raises(InputError, match="`eps` should be finite and not negative"):
        certify_ball(layer, x, eps=eps)


def test_bad_input() -> None:
    layer, x = case("plain", 0)
    with pytest.raises(InputError, match="NaN"):
        certify_ball(layer, x * math.nan, eps=0.1)
    with pytest.raises(InputError, match="shape"):
        certify_ball(layer, x[:, :2], eps=0.1)
    with pytest.raises(InputError, match="one number"):
        certify_ball(layer, x, eps=torch.ones(6), ball="frobenius")
    with pytest.raises(InputError, match="No certificate"):
        certify_ball(layer, x, eps=1e200)
    with pytest.raises(InputError, match="`head` should"):
        certify_ball(layer, x, eps=0.1, head=5)
    masked, x = case("masked", 0)
    with pytest.raises(InputError, match="No certificate: its mask"):
        certify_ball(masked, x[:3], eps=0.1)


def test_a_wide_certificate_says_so() -> None:
    """A switch of width 1e-3 inside the ball: steep, and yet less than the values allow."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[0.008], [1.0], [-1.0]], dtype=torch.float64)
    answer = certify_ball(DotProduct(one, 1000 * one, one), x, eps=0.0069)
    assert answer.ratio > 100
    assert answer.note is not None and "smaller `eps`" in answer.note


@pytest.mark.parametrize("kind", ["plain", "rotary"])
@pytest.mark.parametrize("ball", ["token", "frobenius"])
def test_a_ball_too_large_has_no_certificate(kind: str, ball: str) -> None:
    """What is refused would indeed let outputs move further than any X' in the ball moves them."""
    layer, x = case(kind, 0)
    for eps in (30.0, 1e90, 1e200):
        with pytest.raises(InputError, match=r"^No certificate: ") as error:
            certify_ball(layer, x, eps=eps, ball=ball)
        said = str(error.value)
        assert said.count("ertificate") == 1 and "\n" not in said and "smaller `eps`" in said
    certify_ball(layer, x, eps=0.5, ball=ball)  # and a smaller one has its certificate
    with pytest.raises(InputError) as error:
        certify_ball(layer, x, eps=30.0, ball=ball)
    moved, allowed = (
        float(re.search(rf"{words} ([\d.e+]+)", str(error.value)).group(1))
        for words in ("move by", "more than the")
    )
    g = torch.Generator().manual_seed(0)
    points = torch.stack([x + move(x, 30.0, ball, g) for _ in range(50)])
    found = float((layer(points) - layer(x)).flatten(1).norm(dim=1).max())
    assert found <= allowed <= moved


@pytest.mark.slow
def test_the_attack_is_as_good_as_a_general_optimiser() -> None:
    """Against scipy's L-BFGS-B from eight starts, on moves written as directions and sizes."""
    for kind, ball in (("plain", "token"), ("sharp", "frobenius"), ("rotary", "token")):
        layer, x = case(kind, 1)
        eps = 0.1 * float(x.norm(dim=1).max())
        ours = attack_in_ball(layer, x, eps, ball=ball, random=5, ascents=3, steps=30)

        def inside(e: torch.Tensor, eps: float = eps, ball: str = ball) -> torch.Tensor:
            norm = e.norm() if ball == "frobenius" else e.norm(dim=-1, keepdim=True)
            return e * (eps / norm.clamp_min(eps))

        def minus_ratio(flat: np.ndarray, layer=layer, x=x, inside=inside):
            e = torch.from_numpy(flat).view_as(x).requires_grad_(True)
            ratio = (layer(x + inside(e)) - layer(x)).norm() / inside(e).norm()
            (slope,) = torch.autograd.grad(-ratio, e)
            return -ratio.item(), slope.flatten().numpy()

        rng = np.random.default_rng(0)
        best = max(
            -minimize(
                minus_ratio, eps * rng.normal(size=x.numel()), jac=True, method="L-BFGS-B"
            ).fun
            for _ in range(8)
        )
        assert ours.ratio >= 0.98 * best, (kind, ball)
        # and it is better than no search: at X itself there is sigma
        assert ours.ratio > certify_ball(layer, x, eps=0.0).sigma
