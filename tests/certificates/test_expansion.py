"""What is left beyond the first order: never more than the bound, whatever the move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope.attention import Rotary
from lipscope.certificates.balls import in_double
from lipscope.certificates.expansion import HeadPath, rest
from lipscope.theorems import Ball, BallName, HeadAt, heads_of

N, D, K = 6, 8, 4
BALLS: tuple[BallName, ...] = ("token", "frobenius")


def _layer(kind: str, seed: int, *, heads: int = 2, size: float = 1.0) -> ls.DotProduct:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return size * torch.randn(*shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.5

    biases = (
        {f"{name}_bias": draw(heads * K) for name in ("query", "key", "value")}
        if kind == "biased"
        else {}
    )
    angles = torch.arange(N, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return ls.DotProduct(
        draw(heads * K, D),
        draw(heads * K, D),
        draw(heads * K, D),
        draw(D, heads * K),
        heads=heads,
        causal=kind == "causal",
        rotary=Rotary(angles.cos(), angles.sin()) if kind == "rotary" else None,
        **biases,
    )


def _rest(layer: ls.DotProduct, x: Tensor, eps: Tensor | float, ball: BallName) -> float:
    own = in_double(layer, None)
    radii = torch.as_tensor(eps, dtype=torch.float64).expand(len(x))
    centres = [HeadAt(head, x) for head in heads_of(own, fold=False)]
    return rest([(c, HeadPath(c, radii, ball, {}).whole()) for c in centres], own.output)[0]


def _clamped(e: Tensor, eps: Tensor | float, ball: BallName) -> Tensor:
    if ball == "frobenius":
        norms = e.flatten(-2).norm(dim=-1)[..., None, None]
    else:
        norms = e.norm(dim=-1, keepdim=True)
        eps = torch.as_tensor(eps, dtype=torch.float64)
        eps = eps[:, None] if eps.ndim else eps
    return e * (eps / norms.clamp_min(1e-300)).clamp_max(1.0)


def _largest(
    layer: ls.DotProduct, x: Tensor, eps: Tensor | float, ball: BallName, tries: int = 8
) -> float:
    """The largest ``‖f(X + E) - f(X) - J E‖ / ‖E‖`` that random moves and ascent from them find."""
    g = torch.Generator().manual_seed(0)
    base, at_x = layer(x), layer.linearise(x)
    first = torch.stack([
        at_x.matvec(e) for e in torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    ]).flatten(1)  # fmt: skip

    def ratio(e: Tensor) -> Tensor:
        rest = torch.stack([layer(x + one) - base for one in e])
        rest = rest - (e.flatten(1) @ first).view_as(rest)
        return rest.flatten(1).norm(dim=1) / e.flatten(1).norm(dim=1)

    e = torch.randn(tries, *x.shape, generator=g, dtype=x.dtype)
    # single tokens and a common direction: the cases that one row or one column carries
    e[0], e[1, 1:], e[2, :-1] = e[0, :1], 0, 0
    e = _clamped(1e3 * e, eps, ball)
    best = float(ratio(e).max())
    optimiser = torch.optim.Adam([e.requires_grad_()], lr=float(e.detach().abs().max()) / 5)
    for _ in range(15):
        optimiser.zero_grad()
        ratio(e).sum().neg().backward()
        optimiser.step()
        with torch.no_grad():
            e.copy_(_clamped(e, eps, ball))
            best = max(best, float(ratio(e).max()))
    return best


@pytest.mark.parametrize("kind", ["plain", "causal", "biased", "rotary"])
@pytest.mark.parametrize("ball", BALLS)
def test_no_move_leaves_more(kind: str, ball: BallName) -> None:
    g = torch.Generator().manual_seed(5)
    for seed, size, eps in ((0, 1.0, 0.01), (1, 1.0, 0.3), (2, 2.5, 0.1), (3, 2.5, 1.0)):
        layer = _layer(kind, seed, size=size)
        x = torch.randn(N, D, generator=g, dtype=torch.float64)
        found, bound = _largest(layer, x, eps, ball), _rest(layer, x, eps, ball)
        assert found <= bound


def test_radius_of_each_token() -> None:
    layer = _layer("causal", 4)
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eps = torch.tensor([0.3, 0.5, 0.1, 0.0, 0.2, 0.01], dtype=torch.float64)
    assert _largest(layer, x, eps, "token") <= _rest(layer, x, eps, "token")


def test_second_order() -> None:
    """The rest is of second order: divided by eps it tends to a positive limit."""
    layer = _layer("biased", 6)
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rates = [_rest(layer, x, eps, "token") / eps for eps in (1e-3, 1e-5, 1e-7)]
    assert rates[2] > 0 and rates[1] == pytest.approx(rates[2], rel=1e-3)
    assert rates[0] >= rates[1] >= rates[2]
    assert _rest(layer, x, 0.0, "token") < 1e-100


def test_saturated_rows_hardly_move() -> None:
    """Where each row reads one token the weights cannot change; the third cumulant would."""
    x = 10 * torch.eye(N, D, dtype=torch.float64)
    eye = torch.eye(D, dtype=torch.float64)
    layer = ls.DotProduct(eye, eye, eye, scale=1.0)  # logits 100 apart
    assert _rest(layer, x, 0.1, "token") < 1e-12


def test_variance_of_a_squared_deviation() -> None:
    """``Var((a - mean a)^2) <= b^2 E a^2`` for ``|a| <= b``; equal for a coin of 1/2 ± 1/√8."""
    g = torch.Generator().manual_seed(0)
    atoms = 2 * torch.rand(20_000, 4, generator=g, dtype=torch.float64) - 1
    atoms[::2] = atoms[::2].sign()  # the extremes of the interval, and
    atoms[::3, 0] = 0.0
    weights = torch.rand(20_000, 4, generator=g, dtype=torch.float64) ** 4
    weights = weights / weights.sum(-1, keepdim=True)
    assert (_spread(atoms, weights) <= (weights * atoms.square()).sum(-1) + 1e-14).all()
    coin = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    p = 0.5 + 8**-0.5
    even = torch.tensor([[p, 1 - p]], dtype=torch.float64)
    assert float(_spread(coin, even)) == pytest.approx(1.0, rel=1e-12)


def _spread(atoms: Tensor, weights: Tensor) -> Tensor:
    square = (atoms - (weights * atoms).sum(-1, keepdim=True)).square()
    return (weights * (square - (weights * square).sum(-1, keepdim=True)).square()).sum(-1)


def test_certificate_takes_the_lesser() -> None:
    """Several heads: far below the sum over heads of bounds of every Jacobian in the ball."""
    layer = _layer("biased", 7, heads=4, size=1.5)
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = ls.certify(layer, x, eps=0.02)
    assert found.form == "expansion"
    assert found.sigma <= found.value <= found.sigma_bound
    assert ls.certify(layer, x, eps=0.02, sharp=False).value > found.value
    largest = _largest(layer, x, 0.02, "token")
    assert found.value >= found.sigma and largest < found.value


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", ["biased", "causal", "rotary"])
def test_balls_that_are_known_change_nothing(kind: str, ball: BallName):
    """Nor does it where their scores are those of the head with the output projection folded in."""
    layer = in_double(_layer(kind, 5), None)
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    radii = torch.full((N,), 0.2, dtype=torch.float64)
    for folded, head in zip(heads_of(layer), heads_of(layer, fold=False), strict=True):
        bare, met = HeadAt(head, x), {}
        for share in (0.0, 0.5, 1.0):
            eps = 0.2 * share if ball == "frobenius" else radii * share
            of = Ball(HeadAt(folded, x), eps, ball)
            met[share] = Ball(bare, eps, ball, scored=of)
        ours, alone = (HeadPath(bare, radii, ball, some).whole() for some in (met, {}))
        for name, value in vars(alone).items():
            torch.testing.assert_close(getattr(ours, name), value, rtol=1e-12, atol=1e-300)
