"""A decision stands within its certified radius, and the curvature behind it is never exceeded."""

import inspect
import math

import pytest
import torch

from lipscope import DotProduct, InputError
from lipscope.attacks import attack_decision
from lipscope.certificates.decision import ReadOut, certified_radius, largest_form as form_bound
from small_layers import KINDS, case, move

BALLS, POOLS = ("token", "frobenius"), ("mean", "first")


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(layer, weight: torch.Tensor, pool: str, x: torch.Tensor) -> torch.Tensor:
    """Of one input or a batch, from the layer's own forward pass."""
    y = layer(x)
    return (y.mean(-2) if pool == "mean" else y[..., 0, :]) @ weight.T


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
        read = ReadOut(layer, x, w, pool, ball)
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
    """7 kinds x 2 balls x 2 pools x 300 random points: 8,400; and descents."""
    g = torch.Generator().manual_seed(0)
    layer, x = case(kind, 2)
    weight = gaussian(3, 3, 5)
    for pool in POOLS:
        found = certified_radius(layer, x, weight, pool=pool, ball=ball)
        at = scores(layer, weight, pool, x)
        assert found.decision == int(at.argmax()) != found.rival
        assert found.margin == pytest.approx(float(at[found.decision] - at[found.rival]))
        assert found.radius > 0 and found.fraction == found.radius / found.nearest
        points = torch.stack([x + move(x, found.radius, ball, g) for _ in range(300)])
        decided = scores(layer, weight, pool, points).argmax(-1)
        assert (decided == found.decision).all()
        if pool == "first" and kind != "heads":
            continue
        tried = attack_decision(
            layer, x, weight, radius=found.radius, pool=pool, ball=ball, random=5, steps=8
        )
        assert tried.radius > found.radius
        if math.isfinite(tried.radius):  # what the attack says is so
            e = tried.point - x
            size = e.norm() if ball == "frobenius" else e.norm(dim=-1).max()
            assert float(size) == pytest.approx(tried.radius)
            there = int(scores(layer, weight, pool, tried.point).argmax())
            assert there == tried.decision != found.decision


def test_the_radius_is_near_to_where_the_decision_changes() -> None:
    """Small margins: first order decides, and both sides meet."""
    for ball in BALLS:
        for kind in ("plain", "rotary"):
            layer, x = case(kind, 4)
            weight = gaussian(5, 2, 5)
            gap = scores(layer, weight, "mean", x)
            bias = gap.flip(0) * torch.tensor([0.999, 1.0])  # nearly a tie
            found = certified_radius(layer, x, weight, bias=bias, ball=ball)
            tried = attack_decision(
                layer, x, weight, radius=found.radius, bias=bias, ball=ball, random=0, ascents=0
            )
            assert 1.0 < tried.radius / found.radius < 1.2, (kind, ball)


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
        found = certified_radius(layer, x, weight, ball=ball)
        tried = attack_decision(layer, x, weight, radius=found.radius, ball=ball)
        assert found.radius <= truth <= tried.radius + 5e-3
        assert tried.radius <= 1.02 * truth
        assert found.radius >= 0.4 * truth


@pytest.mark.parametrize("ball", BALLS)
def test_exact_where_attention_does_not_depend_on_the_input(ball: str) -> None:
    """``Q = 0``: f(X) = mean V x; the margin falls by ``|V^T w|`` per unit of every token."""
    n, value = 5, gaussian(0, 4, 4)
    layer = DotProduct(torch.zeros(2, 4).double(), gaussian(1, 2, 4), value)
    x, weight = gaussian(2, n, 4), gaussian(3, 2, 4)
    w = weight[0] - weight[1]
    margin = abs(float(w @ (value @ x.mean(0))))
    rate = float((value.T @ w).norm()) / (1 if ball == "token" else math.sqrt(n))
    found = certified_radius(layer, x, weight, ball=ball)
    assert found.radius == pytest.approx(margin / rate, rel=1e-7)
    tried = attack_decision(layer, x, weight, radius=found.radius, ball=ball)
    assert found.radius < tried.radius < found.radius * 1.01


def test_every_rival_counts() -> None:
    layer, x = case("plain", 0)
    weight = gaussian(1, 6, 5)
    whole = certified_radius(layer, x, weight)
    pairs = []
    for rival in range(6):
        if rival == whole.decision:
            continue
        two = certified_radius(layer, x, weight[[whole.decision, rival]])
        pairs.append((two.radius, rival))
    radius, rival = min(pairs)
    assert whole.rival == rival
    assert whole.radius == pytest.approx(radius, rel=0.05)  # the pieces lie elsewhere


def test_more_pieces_are_sharper_and_all_of_them_hold() -> None:
    layer, x = case("heads", 0)
    weight = gaussian(1, 2, 5)
    radii = [certified_radius(layer, x, weight, steps=steps).radius for steps in (1, 4, 32)]
    assert radii == sorted(radii)
    moves = (x + move(x, radii[-1], "token", torch.Generator().manual_seed(i)) for i in range(200))
    decided = scores(layer, weight, "mean", torch.stack([*moves])).argmax(-1)
    assert (decided == scores(layer, weight, "mean", x).argmax()).all()


def test_a_tie_has_no_radius_and_a_blind_read_out_every_one() -> None:
    layer, x = case("plain", 0)
    tied = certified_radius(layer, x, torch.ones(2, 5))
    assert tied.radius == 0.0 and "tie" in tied.note
    blind = {"weight": torch.ones(2, 5), "bias": torch.tensor([1.0, 0.0])}
    answer = certified_radius(layer, x, **blind)
    assert answer.radius == math.inf and "do not depend" in answer.note
    assert attack_decision(layer, x, **blind, radius=answer.radius).radius == math.inf


def test_nearest_vector_of_a_table() -> None:
    layer, x = case("plain", 0)
    table = x[:1] + torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.0]])
    answer = certified_radius(layer, x, torch.eye(5), table=table)
    assert answer.nearest == pytest.approx(0.5)
    alone = certified_radius(layer, x[:1], torch.eye(5))
    assert alone.nearest == math.inf and alone.fraction == 0.0


def test_mistakes_are_said_in_one_line() -> None:
    layer, x = case("plain", 0)
    two = torch.ones(2, 5)
    for arguments, options, words in (
        ((x, torch.ones(1, 5)), {}, "`weight` should"),
        ((x, torch.ones(2, 4)), {}, "`weight` should"),
        ((x, two), {"steps": 0}, "`steps` should"),
        ((x[:0], two), {}, "n at least 1"),
        ((x * math.nan, two), {}, "NaN"),
        ((x, two * math.nan), {}, "finite scores"),
    ):
        with pytest.raises(InputError, match=words) as error:
            certified_radius(layer, *arguments, **options)
        assert "\n" not in str(error.value)
    # the types that pytest checks would refuse these first
    plain = inspect.unwrap(certified_radius)
    for options, words in (
        ({"bias": torch.ones(3)}, "`bias` should"),
        ({"ball": "round"}, "`ball` should be token or frobenius"),
        ({"table": torch.ones(2, 3)}, "`table` should"),
    ):
        with pytest.raises(InputError, match=words):
            plain(layer, x, two, **options)
    masked, x = case("masked", 0)
    with pytest.raises(InputError, match="No certificate: its mask"):
        certified_radius(masked, x[:3], torch.eye(5))


def third_along(layer, w: torch.Tensor, pool: str, x: torch.Tensor, e: torch.Tensor) -> float:
    """``d^3/dt^3 g(X + t E)`` at 0, by automatic differentiation three times."""

    def along(t: torch.Tensor) -> torch.Tensor:
        return scores(layer, w[None], pool, x + t * e)[0]

    function = along
    for _ in range(3):
        function = torch.func.grad(function)
    return float(function(torch.zeros((), dtype=torch.float64)))


def unit(e: torch.Tensor, ball: str) -> torch.Tensor:
    size = e.norm() if ball == "frobenius" else e.norm(dim=-1, keepdim=True)
    return e / size.clamp_min(1e-300)


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_third_derivative_exceeds_its_bound(kind: str, ball: str) -> None:
    """7 kinds x 2 balls x 2 radii x 2 pools: random directions, and ascents of the derivative."""
    g = torch.Generator().manual_seed(0)
    layer, x = case(kind, 1)
    w = gaussian(1, 1, 5)
    for pool in POOLS:
        read = ReadOut(layer, x, w, pool, ball)
        for relative in (1e-3, 0.3):
            radius = relative * float(x.norm(dim=1).max())
            proved = float(read.third(radius)[0])
            inside = x + move(x, radius, ball, g)
            for trial in range(4):
                e = unit(torch.randn(x.shape, generator=g, dtype=x.dtype), ball)
                for _ in range(0 if trial else 6):  # E^3 T grows: T(E, E, .) is its direction
                    point = e.requires_grad_(True)
                    value = torch.func.grad(
                        lambda d, z=inside, p=pool: _cubic(layer, w[0], p, z, d)
                    )(point)
                    e = unit(value.detach() + 0.5 * value.norm() * e.detach(), ball)
                found = abs(third_along(layer, w[0], pool, inside, e.detach()))
                assert found <= proved * (1 + 1e-9) + 1e-12


def _cubic(layer, w: torch.Tensor, pool: str, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """The third derivative as a function of the direction."""

    def along(t: torch.Tensor) -> torch.Tensor:
        return scores(layer, w[None], pool, x + t * e)[0]

    return torch.func.grad(torch.func.grad(torch.func.grad(along)))(torch.zeros(()).double())


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fall_to_second_order_is_that_of_the_hessian(kind: str, ball: str) -> None:
    """Never below what any direction gives; in the token ball by a relaxation, within a quarter."""
    layer, x = case(kind, 1)
    w = gaussian(1, 2, 5)
    read = ReadOut(layer, x, w, "mean", ball)
    for r in range(2):
        dense = torch.func.hessian(lambda z, r=r: scores(layer, w, "mean", z)[r])(x)
        flat = -dense.reshape(x.numel(), x.numel())
        if ball == "frobenius":
            truth, loose = float(torch.linalg.eigvalsh(flat)[-1]), 1 + 1e-6
        else:
            truth, loose = 0.0, 1.25
            step = 1 / float(torch.linalg.eigvalsh(flat)[0].abs())
            for seed in range(6):
                e = gaussian(seed, *x.shape)
                for _ in range(400):  # inside the ball, too: the form is not convex
                    e = e / e.norm(dim=-1, keepdim=True).clamp_min(1.0)
                    e = e + step * (flat @ e.flatten()).view_as(e)
                e = e / e.norm(dim=-1, keepdim=True).clamp_min(1.0)
                truth = max(truth, float(e.flatten() @ flat @ e.flatten()))
        assert truth * (1 - 1e-9) <= float(read.fall[r]) <= truth * loose + 1e-9


def test_the_hessian_makes_radii_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where curvature counts, and only as far as an attack allows."""
    from lipscope.certificates import decision

    layer, x = case("rotary", 3)
    weight = gaussian(4, 2, 5)
    for ball in BALLS:
        found = certified_radius(layer, x, weight, ball=ball)
        with monkeypatch.context() as patch:
            patch.setattr(decision, "_DENSE", 0)
            before = certified_radius(layer, x, weight, ball=ball)
        assert 1.1 * before.radius < found.radius
        tried = attack_decision(layer, x, weight, radius=found.radius, ball=ball)
        assert found.radius < tried.radius < 1.4 * found.radius


@pytest.mark.parametrize("ball", BALLS)
def test_a_form_that_is_zero_negative_or_at_the_end_of_the_float_range(ball: str) -> None:
    """``sup`` is 0 of a form that is never positive, and that of ``s H`` is ``s`` times of H's."""
    square = gaussian(0, 4, 4)
    plain, below = square + square.T, -square @ square.T
    flat = torch.diag(torch.tensor([-1.0, 0.0, 0.0, -1.0])).double()  # its largest value is -0
    wanted = form_bound(plain, 2, ball)
    for s in (5e-324, 1e-319, 1e-200, 1e-19, 1.0, 1e200, 1e307):
        assert 0 <= form_bound(s * flat, 2, ball) <= 1e-9 * s
        assert s <= form_bound(-s * flat, 2, ball) <= 2.001 * s
        if s > 1e-300:
            assert 0 <= form_bound(s * below, 2, ball) <= 1e-8 * s
            assert form_bound(s * plain, 2, ball) == pytest.approx(s * wanted, rel=1e-9)
    assert form_bound(0 * plain, 2, ball) == 0.0
    # A convex form: in the token ball the sum of all entries' sizes, here all are positive.
    convex = torch.ones(4, 4).double() + torch.eye(4)
    exact = 5.0 if ball == "frobenius" else 2 * 5.0
    assert exact <= form_bound(convex, 2, ball) * (1 + 1e-9) <= exact * (1 + 1e-6)
