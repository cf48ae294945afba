"""Every inner bound of a network's certificate, on inputs where it is nearly met."""

import pytest
import torch

from lipscope import DotProduct, InputError
from lipscope.certificates import NetworkBall, certify_network
from lipscope.certificates.activation import Units
from lipscope.certificates.attention_ball import AttentionAt, AttentionBall
from lipscope.certificates.segment import Entry
from lipscope.models import Branch, Feed, Network, Norm

F64 = torch.float64


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def moved_mean() -> tuple[DotProduct, torch.Tensor, torch.Tensor]:
    """Keys 1 and 2 trade weight while the key of token 0, which no value tells apart, moves."""
    eye = torch.eye(5, dtype=F64)
    layer = DotProduct(eye[:2], eye[2:4], eye[4:], scale=1.0)
    x, t = torch.zeros(3, 5, dtype=F64), torch.zeros(3, 5, 3, dtype=F64)
    x[0, 0], x[1, 4], x[2, 4] = 100.0, 1.0, -1.0
    t[1, 2, 0], t[2, 2, 0] = 1e-4, -1e-4
    t[0, 1, 1] = t[0, 3, 2] = 1.0
    return layer, x, t


def test_a_mean_that_moves_meets_the_whole_bend() -> None:
    """``Cov'(y, alpha)`` has ``E'y E'alpha``, though ``Cov(y, alpha)`` and ``D alpha`` vanish."""
    layer, x, t = moved_mean()
    at = AttentionAt(layer, x, t, torch.tensor([0]))
    r = 1e-6
    move = torch.tensor([r, r, r], dtype=F64) / 3**0.5
    j = torch.func.jacrev(lambda xi: layer(x + t @ xi)[0])
    true = float(torch.linalg.matrix_norm(j(move) - j(0 * move), 2))
    ball, read = AttentionBall(at, r, pieces=1), torch.ones(1, 1, 1, dtype=F64)
    none = read.new_zeros(1, 1)  # the second derivative there
    assert at.second is not None and not bool(at.second.any())
    alone, joint = ball.change_of(read[:, :, None], none), ball.joint_change(read, none[0, 0])
    assert true <= float(alone) and true <= float(joint)


def test_all_tokens_lose_at_once_what_a_norm_bends() -> None:
    """Four equal tokens that move as one: the mean of their norms changes in every row."""
    n, d = 4, 3
    eye = torch.eye(d, dtype=F64)
    layer = DotProduct(0 * eye, 0 * eye, eye)
    norm = Norm(torch.ones(d, dtype=F64), torch.zeros(d, dtype=F64), 1e-12, centred=False)
    x = torch.tensor([1.0, 0.0, 0.0], dtype=F64).expand(n, d)
    t = eye.expand(n, d, d) / n**0.5
    entry = Entry(layer, norm, x, t, 1e-3)
    move = 1e-3 * torch.tensor([3**-0.5, (2 / 3) ** 0.5, 0.0], dtype=F64)
    moved = x + t @ move
    secant = layer(norm(moved)) - layer(norm(x))
    found = (
        secant - torch.einsum("ijde,jep,p->id", entry.blocks, entry.norm.slope @ t, move)
    ).norm()
    assert 0.7 * float(entry.lost(x)) * 1e-3 <= float(found) <= float(entry.lost(x)) * 1e-3


def units(name: str, gated: bool, seed: int) -> Units:
    f, d = 5, 4
    gate = (gaussian(seed + 3, f, d), gaussian(seed + 4, f)) if gated else (None, None)
    w = (
        gaussian(seed, f, d),
        gaussian(seed + 1, f),
        gaussian(seed + 2, d, f),
        torch.zeros(d).double(),
    )
    return Units(Feed(*w, name, *gate))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"])
def test_units_stay_above_their_parabolas(name: str, gated: bool) -> None:
    """300 points of 8 boxes each, narrow and wide; and their secants between the slopes."""
    g = torch.Generator().manual_seed(0)
    for seed, wide in enumerate((1e-3, 0.05, 0.3, 1.0, 1.0, 3.0, 3.0, 10.0)):
        u = units(name, gated, seed)
        z = gaussian(seed + 9, 1, len(u.into)) * (0.1 if seed % 2 else 1.0)
        low, high = z - wide * gaussian(seed + 1, *z.shape).abs(), z + wide
        c = gaussian(seed + 5, 1, u.width)

        def hidden(z: torch.Tensor, u: Units = u) -> torch.Tensor:
            act = u.activation(z[..., : u.width])
            return act * z[..., u.width :] if u.gated else act

        share = torch.rand(300, z.shape[1], generator=g, dtype=F64)
        share[:100] = share[:100].round()  # corners
        moved = low + (high - low) * share
        dz = moved - z
        gap, slope, bend = u.minorant(c, z, low, high, (high - low).square() / 10)
        below = (c * hidden(z)).sum() - gap + (slope * dz - bend * dz.square() / 2).sum(-1)
        assert bool(((c * hidden(moved)).sum(-1) >= below - 1e-9).all())
        mid, half = u.secants(z, low, high)
        error = (half * dz.abs()).unflatten(-1, (-1, u.width)).sum(-2)
        linear = (mid * dz).unflatten(-1, (-1, u.width)).sum(-2)
        assert bool(((hidden(moved) - hidden(z) - linear).abs() <= error + 1e-9).all())


def test_scores_that_are_no_inner_products_are_refused() -> None:
    w = gaussian(0, 4, 4)
    layer = DotProduct(w, w, w, softcap=2.0)
    net = Network((Branch(layer),), torch.ones(3).double() / 3, w[:2], torch.zeros(2).double())
    with pytest.raises(InputError, match="a soft cap"):
        certify_network(net, gaussian(1, 3, 4))


def test_nothing_is_proved_where_bounds_overflow() -> None:
    """Huge logits: one-hot weights, whose bounds leave float64 before the ball is left."""
    w = torch.eye(4, dtype=F64)
    layer = DotProduct(1e3 * w, w, w)
    net = Network((Branch(layer),), torch.ones(3).double() / 3, w[:2], torch.zeros(2).double())
    x = gaussian(2, 3, 4)
    ball = NetworkBall(net, x, torch.ones(3, dtype=torch.bool))
    for radius in (1e-3, 1.0, 1e3, 1e160):
        if ball.grow(radius):
            move = radius * torch.nn.functional.normalize(gaussian(3, 12), dim=0)
            label = int(net(x).argmax())
            assert ball.lower(0 * move, label, 1 - label)[0] <= float(
                ball.margin(ball.moved(move), label, 1 - label)
            )
