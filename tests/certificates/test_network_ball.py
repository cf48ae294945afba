"""Every inner bound of a network's certificate, on inputs where it is nearly met."""

import pytest
import torch

from lipscope import DotProduct, InputError
from lipscope.certificates import NetworkBall, certify_network
from lipscope.certificates.attention_at import AttentionAt, bend_of, graded
from lipscope.certificates.attention_ball import AttentionBall
from lipscope.certificates.forms import top_bilinear
from lipscope.certificates.segment import Entry
from lipscope.certificates.tokenwise import Units
from lipscope.models import Branch, Feed, Network, Norm

F64 = torch.float64
ONE = torch.ones(1, dtype=F64)  # the share of the only ball of a grid, of the last of two
LAST = torch.tensor([0.0, 1.0], dtype=F64)


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
    assert at.lead_rows is not None and float(at.lead_rows[0]) < 1e-9
    alone, joint = ball.change_of(read[:, :, None], none), ball.joint_change(read, ONE)
    joint = torch.minimum(joint, ball.joint_change(read, ONE, lambda: none * torch.eye(3)))
    assert true <= float(alone) and true <= float(torch.linalg.matrix_norm(joint, 2)) ** 0.5


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


def one_token(seed: int) -> tuple[DotProduct, torch.Tensor, torch.Tensor]:
    """Small layers of 1 or 2 heads, some causal, with large logits; two ways for one token."""
    n, d, heads = 2 + seed % 3, 4, 1 + seed % 2
    size = (0.5, 1.5, 4.0)[seed % 3]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    q, k, v = (gaussian(100 * seed + i, d, d) for i in range(3))
    layer = DotProduct(size * q, k, v, heads=heads, mask=visible if seed % 4 == 3 else None)
    t = torch.zeros(n, d, 2, dtype=F64)
    t[seed % n] = torch.linalg.qr(gaussian(100 * seed + 4, d, 2)).Q
    return layer, gaussian(100 * seed + 5, n, d), t


def disc(radius: float) -> list[torch.Tensor]:
    """Points of a disc, its edge among them: a ball of two coordinates leaves none far from one."""
    angles = torch.linspace(0, 2 * torch.pi, 25, dtype=F64)[:-1]
    around = torch.stack([angles.cos(), angles.sin()], 1)
    return [radius * share * e for share in (1.0, 0.7, 0.35) for e in around]


@pytest.mark.parametrize("seed", range(12))
def test_one_token_alone_changes_derivatives_by_no_more(seed: int) -> None:
    """All over a disc: Jacobians of rows and of all, Hessians of a read-out, of any sign."""
    layer, x, t = one_token(seed)
    n, d = x.shape
    rows = torch.arange(n)
    at = AttentionAt(layer, x, t, rows)
    assert bool(at.single.any()) and at.turns is not None
    read = gaussian(seed, n, d)
    bend = bend_of(at, read)
    eye = torch.eye(d, dtype=F64).expand(n, d, d)

    def jacobian(xi: torch.Tensor) -> torch.Tensor:
        moved = torch.autograd.functional.jacobian(lambda e: layer(x + t @ e), xi)
        assert isinstance(moved, torch.Tensor)
        return moved

    def hessian(xi: torch.Tensor) -> torch.Tensor:
        bent = torch.autograd.functional.hessian(lambda e: (read * layer(x + t @ e)).sum(), xi)
        assert isinstance(bent, torch.Tensor)
        return bent

    j0, h0 = jacobian(torch.zeros(2, dtype=F64)), hessian(torch.zeros(2, dtype=F64))
    assert torch.allclose(h0, bend.hessian, atol=1e-9 * (1 + float(h0.abs().max())))
    for r in (0.05, 0.3, 1.0):
        ball = AttentionBall(at, r, pieces=2)
        q = ball.hessian_change(bend, LAST)
        lead = at.lead_rows
        assert lead is not None
        joint = [ball.joint_change(eye, LAST, f) for f in (lambda m=lead[1]: m, lambda: None)]
        each = ball.change_of(eye[:, None], lead[0][:, None])[1], ball.change_of(eye[:, None])[1]
        for xi in disc(r):
            change = jacobian(xi) - j0
            flat = change.flatten(0, 1)
            for form in joint:
                left = torch.linalg.eigvalsh(flat.T @ flat - form)[-1]
                assert float(left) <= 1e-9 * float(form.abs().max())
            norms = torch.linalg.matrix_norm(change, 2)
            assert all(bool((norms <= e[:, 0] * (1 + 1e-9) + 1e-12).all()) for e in each)
            fall = torch.linalg.eigvalsh(h0 - hessian(xi) - q)
            assert float(fall[-1]) <= 1e-9 * (1 + float(h0.abs().max()))


def test_a_lone_key_is_bounded_by_its_logistic_function() -> None:
    """One row, whose query stays: the bound is met up to the grid when the value stays, too."""
    eye = torch.eye(3, dtype=F64)
    layer = DotProduct(eye[:1], eye[1:2], eye[2:], scale=1.0)
    x, t = torch.zeros(2, 3, dtype=F64), torch.zeros(2, 3, 1, dtype=F64)
    x[0, 0], x[0, 2], x[1, 2] = 1.0, 1.0, -1.0
    t[1, 1] = 1.0
    at = AttentionAt(layer, x, t, torch.tensor([0]))
    for sign in (1.0, -1.0):
        bend = bend_of(at, torch.full((1, 1), sign, dtype=F64))
        q = AttentionBall(at, 1.0, pieces=1).hessian_change(bend, ONE)
        p = torch.linspace(-1, 1, 401, dtype=F64).sigmoid()
        # the output is sign (1 - 2 p), its second derivative at p = 1/2 is 0
        true = float((sign * 2 * p * (1 - p) * (1 - 2 * p)).max())
        assert true <= float(q) <= 1.3 * true


def test_a_bilinear_form_is_largest_at_the_norm_of_its_symmetric_part() -> None:
    for k, p in ((1, 3), (2, 5), (5, 3)):
        left, right = gaussian(k, 7, k, p), gaussian(k + 9, 7, k, p)
        half = left.mT @ right / 2
        true = torch.linalg.eigvalsh(half + half.mT).abs().amax(-1)
        none = top_bilinear(1e-165 * left, right)  # squares underflow
        assert bool((none <= 1e-160).all())
        for scale in (1.0, 1e-12, 1e60):  # queries far smaller than keys, and larger
            found = top_bilinear(scale * left, right) / scale
            assert bool((true <= found).all())
            assert torch.allclose(true, found, rtol=1e-5)


def logistic(value: float, quadratic: bool) -> AttentionAt:
    """Row 0 or 1 of two equal tokens: key 1 and its value move along one line.

    Row 0: the logit is ``xi``. Row 1: its query moves, too, and the logit is ``xi^2``.
    """
    eye = torch.eye(3, dtype=F64)
    layer = DotProduct(eye[:1], eye[1:2], eye[2:], scale=1.0)
    x, t = torch.zeros(2, 3, dtype=F64), torch.zeros(2, 3, 1, dtype=F64)
    x[0, 0] = 0.0 if quadratic else 1.0
    t[1, :, 0] = torch.tensor([float(quadratic), 1.0, value], dtype=F64)
    return AttentionAt(layer, x, t, torch.tensor([int(quadratic)]))


def test_a_value_that_moves_with_its_key() -> None:
    """``m xi p(xi)``: its second derivative falls from ``m / 2`` at the centre."""
    at, r = logistic(3.0, False), 0.5
    bend = bend_of(at, torch.ones(1, 1, dtype=F64))
    q = AttentionBall(at, r, pieces=1).hessian_change(bend, ONE)
    xi = torch.linspace(-r, r, 201, dtype=F64)
    p = xi.sigmoid()
    h = 3 * p * (1 - p) * (2 + (1 - 2 * p) * xi)
    assert float(bend.hessian) == pytest.approx(1.5)
    assert float((1.5 - h).max()) <= float(q) <= 2 * float((1.5 - h).max())


def test_a_value_that_moves_while_its_logit_bends() -> None:
    """``m xi p(xi^2)``: nothing but ``Cov(n, alpha)`` and ``Cov(n, q)`` moves, ``6 m xi p'``."""
    at, r = logistic(1.0, True), 1e-3
    bend = bend_of(at, torch.ones(1, 1, dtype=F64))
    q = AttentionBall(at, r, pieces=1).hessian_change(bend, ONE)
    true = 6 * r / 4
    assert true * (1 - 1e-4) <= float(q) <= 1.01 * true


@pytest.mark.parametrize("seed", range(4))
def test_forms_of_pairs_and_means_that_move(seed: int) -> None:
    layer, x, t = one_token(seed)
    at = AttentionAt(layer, x, t, torch.arange(len(x)))
    assert at.turns is not None
    (h, i, j), squares, sizes = at.turns
    half = at.query[h, i].mT @ at.key[h, j] / 2
    forms = half + half.mT
    assert torch.allclose(forms @ forms, squares, atol=1e-9)
    for sign in (1, -1):
        assert float(torch.linalg.eigvalsh(sizes - sign * forms).min()) >= -1e-12
    ball = AttentionBall(at, 1.0, pieces=2)
    w = ball._mean_moved(ball.grid, torch.ones(1, *at.p.shape[:2], dtype=F64))[1]
    for xi in disc(1.0):
        weights = layer.weights(*layer.project(x + t @ xi)[:2])
        a = at.a @ torch.stack(disc(1.0)[:24]).T  # velocities along every direction
        mean = torch.einsum("hij,hijk->hik", weights, a).abs()
        size = torch.einsum("hij,hijk->hik", weights, a.square()).sqrt()
        assert bool((mean * size <= torch.einsum("hij,hijk->hik", w, a.square()) + 1e-12).all())


def apart() -> tuple[AttentionAt, torch.Tensor]:
    """Row 0 turns its query with one coordinate, keys 1 and 2 turn with two others."""
    eye = torch.eye(4, dtype=F64)
    layer = DotProduct(eye[:1], eye[1:3].sum(0, keepdim=True), eye[3:], scale=1.0)
    x, t = gaussian(0, 3, 4), torch.zeros(3, 4, 3, dtype=F64)
    t[0, 0, 0] = t[1, 1, 1] = t[2, 2, 2] = 1.0
    return AttentionAt(layer, x, t, torch.arange(3)), t


def test_what_bends_is_bounded_by_a_form() -> None:
    """``sum c w alpha(e, f)^2`` over unit ``e``: never above, and half of it is met."""
    at, _ = apart()
    at.turns = None  # as where many tokens move
    c, w = gaussian(1, 1, 1, 3).abs(), gaussian(2, 1, 1, 3, 3).abs()
    ball = AttentionBall(at, 1.0, pieces=1)
    form = ball._bent(ONE, c, w, at.key_spread(w[0])[None]).matrix()
    e = torch.nn.functional.normalize(gaussian(3, 500, 3), dim=1)
    alpha = torch.einsum("hikp,mp,hjkq->mhijq", at.query, e, at.key)
    alpha = alpha + torch.einsum("hikq,hjkp,mp->mhijq", at.query, at.key, e)
    true = torch.einsum("bhi,bhij,mhijp,mhijq->mpq", c, w, alpha, alpha)
    least = torch.linalg.eigvalsh(form - true)[:, 0]
    assert float(least.min()) >= -1e-12
    e = torch.eye(3, dtype=F64)[0]  # the query alone: keys are all that is left to move
    met = sum(c[0, 0, 0] * w[0, 0, 0, j] * e.new_tensor([0, j == 1, j == 2]).diag() for j in (1, 2))
    assert torch.allclose(form[1:, 1:].diagonal(), 2 * met.diagonal()[1:])


def test_a_norm_on_a_grid_of_balls_is_never_below_and_met_at_marks() -> None:
    g, w = gaussian(0, 6, 4), gaussian(1, 16, 6).abs().cumsum(0)

    def norm(w: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_norm((g * w[:, None]).T @ g, 2).sqrt()

    found, true = graded(norm, w), torch.stack([norm(one) for one in w])
    assert bool((found >= true * (1 - 1e-12)).all())
    assert torch.allclose(found[3::4], true[3::4])
    w = torch.arange(1.0, 17.0).double()[:, None] ** 2 * w[0]  # in proportion
    assert torch.allclose(graded(norm, w), torch.stack([norm(one) for one in w]))


@pytest.mark.parametrize("scaled", [False, True])
def test_an_ellipsoid_holds_what_a_block_can_give(scaled: bool) -> None:
    """Two post-norm blocks: moves of the first one's inputs, to the edge, and what comes out."""
    n, d = 3, 4
    branches: list[Branch] = []
    for k in range(2):
        w = gaussian(10 * k, 4, d, d) / d**0.5
        f = Feed(gaussian(k + 1, 5, d), gaussian(k + 2, 5), gaussian(k + 3, d, 5) / 2,
                 torch.zeros(d).double(), "relu")  # fmt: skip
        for part in (DotProduct(*w, heads=2), f):
            norm = Norm(torch.ones(d).double(), torch.zeros(d).double(), 1e-5, True, scaled)
            branches += [Branch(part), Branch(None, norm, skip=False)]
    share = torch.full((n,), 1 / n, dtype=F64)
    net = Network(tuple(branches), share, gaussian(8, 2, d), torch.zeros(2).double())
    ball = NetworkBall(net, gaussian(9, n, d), torch.ones(n, dtype=torch.bool))
    edge = torch.nn.functional.normalize(gaussian(7, 200, n * d), dim=1)
    for radius in (1e-3, 0.01) if scaled else (1e-3, 0.05, 0.2):
        assert ball.grow(radius)
        below, above = ball.chain
        for share_of in (1.0, 0.5):
            for xi in edge[:100]:
                out = below.through(ball.moved(share_of * radius * xi))[-1] - above.x
                inside = torch.linalg.solve(above.t.flatten(0, 1), out.flatten()).norm()
                assert float(inside) <= radius * (1 + 1e-9)
        secant = below.secant(below.x, 0.0)
        direct = torch.linalg.matrix_norm(secant.middle, 2)
        sizes = torch.linalg.matrix_norm(above.t.flatten(0, 1), 2)
        assert radius > 1e-3 or float(sizes) <= 1.1 * float(direct)


@pytest.mark.parametrize("gap", [100.0, 700.0, 740.0])
def test_a_key_beside_which_all_others_are_rounded_away(gap: float) -> None:
    """``F'' = 2 p (1 - p) (1 - 2 p)`` with p logistic: where p rounds to 1, it says nothing yet."""
    eye = torch.eye(3, dtype=F64)
    layer = DotProduct(eye[:1], eye[1:2], eye[2:], scale=1.0)
    x, t = torch.zeros(2, 3, dtype=F64), torch.zeros(2, 3, 1, dtype=F64)
    x[0, 0], x[1, 1], x[0, 2], x[1, 2], t[1, 1] = 1.0, gap, -1.0, 1.0, 1.0
    at = AttentionAt(layer, x, t, torch.tensor([0]))
    bend = bend_of(at, torch.ones(1, 1, dtype=F64))
    p = (torch.linspace(-1, 1, 100_001, dtype=F64) * (gap + 5) + gap).sigmoid()
    needed = float((float(bend.hessian) - 2 * p * (1 - p) * (1 - 2 * p)).max())
    assert needed > 0.19
    assert float(AttentionBall(at, gap + 5, pieces=1).hessian_change(bend, ONE)) >= needed


@pytest.mark.parametrize("gap", [700.0, 701.0])
def test_no_radius_is_claimed_beyond_weights_that_are_rounded_away(gap: float) -> None:
    eye, large = torch.eye(3, dtype=F64), 1e4
    mask = torch.tensor([[True, True], [False, True]])
    read = torch.tensor([[0.0], [0.0], [1.0]], dtype=F64)
    layer = DotProduct(eye[:1], large * eye[1:2], eye[2:] / large, read, scale=1.0, mask=mask)
    x = torch.zeros(2, 3, dtype=F64)
    x[0, 0], x[1, 1], x[0, 2], x[1, 2] = 1.0, gap / large, -large, large
    head = torch.tensor([[24.0, 0.0, 2.0], [-24.0, 0.0, -2.0]], dtype=F64)
    half, none = torch.full((2,), 0.5, dtype=F64), torch.zeros(2, dtype=F64)
    net = Network((Branch(layer, skip=True),), half, head, none)
    scores = net(x)
    net.bias[0] = 4.2 - float(scores[0] - scores[1])
    found = certify_network(net, x, ball="token", tokens=torch.tensor([False, True]))
    move, key = x.clone(), (gap + 4) / large
    move[1, 1] -= key
    move[1, 0] -= max((found.radius**2) * (1 - 1e-9) - key**2, 0.0) ** 0.5
    beaten = net(move)
    inside = float((move - x).norm()) <= found.radius
    assert not inside or float(beaten[0] - beaten[1]) > 0
