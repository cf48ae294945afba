"""Contractions, inverses with their error, determinants, densities: against dense Jacobians."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from agreement import gaussian
from lipscope import MultiheadAttention, sigma
from lipscope.attention import (
    Attention,
    ClippedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
)
from lipscope.control import (
    Contraction,
    ContractiveAttention,
    ContractiveMLP,
    Flow,
    InvertibleResidual,
    log_determinant,
    solve,
)
from lipscope.errors import InputError

D = 4


def weights(*, tied: bool = False) -> list[nn.Parameter]:
    shapes = [(6, D), *([] if tied else [(6, D)]), (4, D), (D, 4)]
    return [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(shapes)]


LAYERS = {
    "L2": lambda: L2Attention(*weights(tied=True), heads=2),
    "L2, causal": lambda: L2Attention(*weights(tied=True), heads=2, causal=True),
    "cosine": lambda: ScaledCosineAttention(*weights(), heads=2, temperature=1.0, eps=0.2),
    "LipschitzNorm": lambda: LipschitzNormAttention(*weights(), heads=2),
    "clipped": lambda: ClippedAttention(*weights(), heads=2, radius=0.7),
}


def mlp(c: float, widths: tuple[int, ...] = (D, 8, D)) -> ContractiveMLP:
    return ContractiveMLP(widths, c, generator=torch.Generator().manual_seed(0)).double()


def contractions(c: float) -> dict[str, Contraction]:
    found: dict[str, Contraction] = {"MLP": mlp(c), "linear": mlp(c, (D, D))}
    return found | {name: ContractiveAttention(build(), c) for name, build in LAYERS.items()}


def jacobian(f, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(f, x).reshape(x.numel(), x.numel())


@pytest.mark.parametrize("name", [*LAYERS, "MLP", "linear"])
def test_contractions_contract(name) -> None:
    """At random and large inputs, and after weights have moved."""
    g = contractions(0.9)[name]
    for scale in (0.1, 1.0, 30.0):
        for n in (1, 2, 7):
            x = scale * gaussian(n, D)
            assert float(sigma(g, x).detach()) <= 0.9
            with torch.no_grad():
                for w in g.parameters():
                    w.mul_(1.3)
    far = [gaussian(7, D, seed=i) * 10.0**i for i in (0, 1, 2)]
    for x, y in itertools.pairwise(far):
        assert bool((g(x) - g(y)).norm() <= 0.9 * (x - y).norm())


def test_a_contractive_layer_is_an_attention_layer_that_can_be_measured() -> None:
    """Inside a model, too, where it is read and not run."""
    for name, build in LAYERS.items():
        g, x = ContractiveAttention(build(), 0.7), gaussian(6, D)
        assert torch.allclose(g.as_layer(6)(x), g(x), rtol=1e-12, atol=1e-14), name
    model = torch.nn.Sequential(*(ContractiveAttention(LAYERS["L2"](), c) for c in (0.3, 0.6)))
    x = gaussian(6, D)
    rows = ls.bounds(model, x[None], layers="all")
    for row, g, at in zip(rows, model, (x, model[0](x)), strict=True):
        dense = torch.autograd.functional.jacobian(g, at.detach()).reshape(6 * D, 6 * D)
        assert row.sigma == pytest.approx(torch.linalg.matrix_norm(dense, 2).item(), rel=1e-3)
        assert row.note is None and row.module in ("0", "1")
    least = min(b.value for b in rows.bounds if b.value is not None and b.theorem.startswith("kim"))
    assert least == pytest.approx(0.3, rel=1e-6)


def test_a_linear_contraction_has_its_constant() -> None:
    assert float(sigma(mlp(0.9, (D, D)), gaussian(3, D)).detach()) == pytest.approx(0.9, rel=1e-9)


@pytest.mark.parametrize("name", [*LAYERS, "MLP"])
def test_gradients_go_through_the_constant(name) -> None:
    g, x = contractions(0.7)[name], gaussian(3, D)
    weight = next(g.parameters())
    e, h = gaussian(*weight.shape, seed=5), 1e-6
    (slope,) = torch.autograd.grad(g(x).square().sum(), weight)

    def moved(step: float) -> float:
        with torch.no_grad():
            weight.add_(step * e)
            value = float(g(x).square().sum())
            weight.sub_(step * e)
        return value

    assert float((slope * e).sum()) == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("c", [0.5, 0.9, 0.99])
def test_there_and_back(dtype, limit, c) -> None:
    for name, g in contractions(c).items():
        block, x = InvertibleResidual(g).to(dtype), 3 * gaussian(16, 6, D).to(dtype)
        with torch.no_grad():
            found = block.inverse(block(x))
        off = found.x - x
        assert float(off.abs().max()) < limit, name
        rounding = 4 * torch.finfo(dtype).eps * x.flatten(1).norm(dim=1) / (1 - c)
        assert bool((off.flatten(1).norm(dim=1) <= found.error + rounding).all()), name


def test_the_error_is_a_bound_at_any_tolerance() -> None:
    g = mlp(0.95)
    block, x = InvertibleResidual(g), gaussian(5, 3, D)
    y, steps = block(x).detach(), []
    for tol in (1e-1, 1e-3, 1e-6, 1e-9):
        with torch.no_grad():
            found = block.inverse(y, tol=tol)
        off = (found.x - x).flatten(1).norm(dim=1)
        assert bool((off <= found.error).all())
        assert bool((found.error <= tol * y.flatten(1).norm(dim=1)).all())
        steps.append(found.steps)
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_the_error_is_a_bound_where_rounding_is_all_that_is_left() -> None:
    """Against float64; a residual that rounds to zero, and samples that g outweighs, among them."""
    sizes = torch.tensor([0.0, 1e-8, 1.0, 3.0]).repeat(4)[:, None, None]
    y = (sizes * gaussian(16, 6, D)).float()
    for name, build in LAYERS.items():
        g = ContractiveAttention(build().float(), 0.9)
        with torch.no_grad():
            found = InvertibleResidual(g).inverse(y)
            true = solve(g.as_layer(6).in_double(), y.double(), tol=1e-14, max_steps=400).x
        off = (found.x - true).flatten(1).norm(dim=1)
        assert bool((off <= found.error).all()), name


@pytest.mark.parametrize("bias", [0.0, 1.0, 30.0])
def test_the_error_is_a_bound_whatever_is_rounded_within(bias) -> None:
    g = ContractiveMLP([D, 64, 64, D], c=0.5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, one in enumerate(g.biases):
            one.copy_(bias * gaussian(len(one), seed=i))
        block, y = InvertibleResidual(g), gaussian(200, 1, D).float()
        found = block.inverse(y)
        true = block.double().inverse(y.double()).x
    assert bool(((found.x - true).flatten(1).norm(dim=1) <= found.error).all())


def test_autocast_leaves_constants_and_inverses_alone() -> None:
    y = gaussian(3, 6, D).float()
    for name, g in contractions(0.9).items():
        block, found = InvertibleResidual(g).float(), []
        for cast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                layer = g.as_layer(6) if isinstance(g, ContractiveAttention) else None
                values = [block(y), block.inverse(y).x, Flow([block]).log_density(y)]
                values += [block.log_determinant(y, method="series", terms=3).value]
                found.append([*values, *([layer.output] if layer else [])])
                assert block(y.to(values[0].dtype if not cast else torch.bfloat16)).dtype == y.dtype
        torch.testing.assert_close(*found, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype) -> None:
    for name, g in contractions(0.5).items():
        block, x = InvertibleResidual(g).to(dtype), gaussian(3, 2, D).to(dtype)
        dense = torch.stack([jacobian(block, one).double() for one in x])
        with torch.no_grad():
            found, logdet = block.inverse(block(x)), block.log_determinant(x).value
        off = (found.x - x).float().flatten(1).norm(dim=1)
        assert bool((off <= 2 * found.error).all()), name  # y is rounded too
        off = logdet - torch.linalg.slogdet(dense).logabsdet
        assert float(off.abs().max()) < 16 * torch.finfo(dtype).eps, name


def test_other_derivatives_of_the_inverse_are_refused() -> None:
    """They would be off: the equation is solved for values and for one cotangent."""
    block, y = InvertibleResidual(mlp(0.5)), gaussian(2, 3, D).requires_grad_()
    with pytest.raises(InputError, match=r"differentiated once, by `backward`.* Found `create_gr"):
        torch.autograd.grad(block.inverse(y).x.square().sum(), y, create_graph=True)
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        with pytest.raises(InputError, match="Found forward mode or a transform"):
            transform(lambda z: block.inverse(z).x)(y.detach())
    with pytest.raises(InputError, match="`y` should hold finite numbers"):
        block.inverse(y.detach() / 0)
    with pytest.raises(InputError, match=r"errors to .* with `tol = 1e-300`"):
        block.inverse(y.detach(), tol=1e-300)


def test_mixing_takes_fewer_steps_and_no_sample_more_than_two_for_one() -> None:
    g = mlp(0.95, (D, D))
    y = gaussian(5, 3, D)
    with torch.no_grad():
        plain, mixed = (
            solve(g, y, c=g.c, tol=1e-10, max_steps=2000, accelerate=accelerate)
            for accelerate in (False, True)
        )
    assert mixed.steps < plain.steps / 3
    torch.testing.assert_close(mixed.x, plain.x)
    assert plain.steps <= 2 + math.log(1e-10) / math.log(g.c)


def test_what_does_not_contract_is_not_solved_and_says_so() -> None:
    layer = DotProduct(*(8 * gaussian(D, D, seed=i) for i in range(3)))
    y = 3 * gaussian(2, 6, D)
    with torch.no_grad():
        found = solve(layer, y, tol=1e-10, max_steps=60, accelerate=False)
    assert float(found.error.max()) > 1.0
    residual = found.x + layer(found.x) - y
    torch.testing.assert_close(found.error, residual.flatten(1).norm(dim=1))


@pytest.mark.parametrize("name", ["L2", "cosine", "MLP"])
def test_gradients_of_the_inverse(name) -> None:
    g = contractions(0.9)[name]
    block, y = InvertibleResidual(g), gaussian(2, 3, D).requires_grad_()

    def inverse(z):
        return block.inverse(z).x

    assert torch.autograd.gradcheck(inverse, (y,), check_undefined_grad=False)
    weight, e, h = next(g.parameters()), None, 1e-6
    e = gaussian(*weight.shape, seed=5)
    (slope,) = torch.autograd.grad(inverse(y).square().sum(), weight)

    def moved(step: float) -> float:
        with torch.no_grad():
            weight.add_(step * e)
            value = float(inverse(y).square().sum())
            weight.sub_(step * e)
        return value

    assert float((slope * e).sum()) == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-5)


@pytest.mark.parametrize("name", [*LAYERS, "MLP"])
def test_log_determinants_are_those_of_the_dense_jacobian(name) -> None:
    g, x = contractions(0.9)[name], gaussian(2, 3, D)
    block = InvertibleResidual(g)
    truth = torch.stack([torch.linalg.slogdet(jacobian(block, one)).logabsdet for one in x])
    exact = block.log_determinant(x)
    one = block.log_determinant(x[0])
    assert f"value={one.value.item():.4g}," in repr(one)
    assert (exact.error, exact.terms, exact.probes) == (0.0, 0, 0)
    torch.testing.assert_close(exact.value, truth)
    for terms in (1, 3, 30):
        found = block.log_determinant(x, method="series", terms=terms)
        assert bool(((found.value - truth).abs() <= found.error).all())
    found = block.log_determinant(x, method="series", tol=1e-6)
    assert found.error <= 1e-6
    shorter = block.log_determinant(x, method="series", terms=found.terms - 1)
    assert shorter.error > 1e-6
    torch.testing.assert_close(found.value, truth, rtol=0, atol=1e-6)


def test_a_large_jacobian_is_formed_where_that_is_asked() -> None:
    g, x = mlp(0.5), gaussian(300, D)  # more entries than exact traces of a series are taken of
    found = log_determinant(g, x, method="exact")
    alone = log_determinant(g, x[:, None], method="exact")  # tokens do not know of each other
    torch.testing.assert_close(found.value, alone.value.sum())


def test_random_traces_and_the_roulette_are_right_on_average() -> None:
    g, x = mlp(0.8, (D, D)), gaussian(1, 2, D)
    truth = float(log_determinant(g, x, method="exact").value.detach())
    gen = torch.Generator().manual_seed(0)
    series = log_determinant(g, x, method="series", terms=60, probes=4000, generator=gen)
    assert series.probes == 4000
    assert float(series.value.detach()) == pytest.approx(truth, abs=0.1)
    drawn = [log_determinant(g, x, method="roulette", generator=gen) for _ in range(600)]
    values = torch.stack([one.value for one in drawn]).detach()
    standard_error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - truth) < 4 * standard_error < 0.2
    assert len({one.terms for one in drawn}) > 5 and {one.error for one in drawn} == {0.0}


@pytest.mark.parametrize("method", ["exact", "series"])
def test_gradients_of_the_log_determinant(method) -> None:
    g = contractions(0.7)["L2"]
    x = gaussian(2, 2, D).requires_grad_()
    options = {"terms": 8} if method == "series" else {}

    def f(z):
        return log_determinant(g, z, method=method, **options).value

    assert torch.autograd.gradcheck(f, (x,))
    weight = next(g.parameters())
    assert torch.autograd.grad(f(x).sum(), weight)[0].abs().max() > 0


def flow(c: float = 0.9) -> Flow:
    layers = contractions(c)
    return Flow([InvertibleResidual(layers[name]) for name in ("L2", "MLP", "cosine")])


def test_a_density_is_the_change_of_variables() -> None:
    model, x = flow(), gaussian(3, 2, D)

    def through(z):
        for block in model.blocks:
            z = block(z)
        return z

    dense = torch.stack([torch.linalg.slogdet(jacobian(through, one)).logabsdet for one in x])
    noise = torch.distributions.Normal(0.0, 1.0).log_prob(through(x)).sum((-2, -1))
    torch.testing.assert_close(model.log_density(x), noise + dense)
    turned = x[:, [1, 0]]
    torch.testing.assert_close(model.log_density(turned), model.log_density(x))
    with torch.no_grad():
        back = model.inverse(through(x))
    assert float((back.x - x).abs().max()) < 1e-12
    assert bool(((back.x - x).flatten(1).norm(dim=1) <= back.error + 1e-13).all())


def test_a_density_of_points_adds_up_to_one() -> None:
    """On a line, by the trapezoidal rule."""
    model = Flow([InvertibleResidual(mlp(0.9, (1, 8, 1))) for _ in range(2)])
    x = torch.linspace(-30, 30, 6001, dtype=torch.float64)[:, None, None]
    with torch.no_grad():
        p = model.log_density(x).exp()
    assert float(torch.trapezoid(p, x[:, 0, 0])) == pytest.approx(1.0, abs=1e-6)


def test_a_density_learns_and_samples() -> None:
    """Sets of two points that lie on two sides of the origin."""
    gen = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        side = torch.tensor([[[1.0], [-1.0]]])
        return side + 0.3 * torch.randn(count, 2, 1, generator=gen)

    def block(seed: int) -> list[InvertibleResidual]:
        torch.manual_seed(seed)
        w = [nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(4, 1))]
        layer = L2Attention(*w, nn.Parameter(torch.randn(1, 4)), heads=2)
        maps = [ContractiveAttention(layer, 0.9), ContractiveMLP([1, 8, 1], 0.9, generator=gen)]
        return [InvertibleResidual(g) for g in maps]

    model = Flow([*block(0), *block(1)])
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        adam.zero_grad()
        loss = -model.log_density(draw(64)).mean()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    sample = model.sample(200, 2, 1, generator=gen)
    assert sample.shape == (200, 2, 1) and bool(sample.isfinite().all())


def test_what_cannot_be_inverted_is_refused() -> None:
    layer = LAYERS["L2"]()
    for c in (0.0, 1.0, 1.5, math.nan):
        with pytest.raises(InputError, match=r"`c` should be above 0 and below 1 to contract"):
            ContractiveAttention(layer, c)
        with pytest.raises(InputError, match=r"Found `c = "):
            ContractiveMLP([2, 2], c)
    others: list[type[Attention]] = [DotProduct, SinkhornAttention, SigmoidAttention]
    for kind in others:
        with pytest.raises(InputError, match=f"bound at all inputs.*Found {kind.__name__}"):
            ContractiveAttention(kind(*weights()), 0.9)
    with pytest.raises(InputError, match=r"output should be as wide as the input, 4. Found 6"):
        ContractiveAttention(L2Attention(gaussian(6, D), gaussian(6, D)), 0.9)
    with pytest.raises(InputError, match=r"`query` should have shape \(4 \* head width"):
        L2Attention(*weights(tied=True), heads=4)
    plain: list = [nn.Linear(D, D), layer]
    for g in plain:
        unchecked = getattr(InvertibleResidual.__init__, "__wrapped__", InvertibleResidual.__init__)
        with pytest.raises(InputError, match="`g` should be certified to contract"):
            unchecked(InvertibleResidual.__new__(InvertibleResidual), g)
    block = InvertibleResidual(mlp(0.99, (D, D)))
    with pytest.raises(InputError, match=r"`tol` should be what float64 can reach in `max_steps`"):
        block.inverse(gaussian(2, 3, D), max_steps=3)
    with pytest.raises(InputError, match=r"`tol` should be positive"):
        block.inverse(gaussian(2, 3, D), tol=0.0)
    with pytest.raises(InputError, match="`terms` should be a positive integer, and left out"):
        block.log_determinant(gaussian(2, 3, D), terms=3)
    with pytest.raises(InputError, match="`terms` should be left out of the method `roulette`"):
        block.log_determinant(gaussian(2, 3, D), method="roulette", terms=3)
    with pytest.raises(InputError, match="`probes` should be given for samples of more than 1024"):
        block.log_determinant(gaussian(300, D))
    with pytest.raises(InputError, match="`widths` should be two or more"):
        ContractiveMLP([2, 3], 0.5)
    with pytest.raises(InputError, match=r"`blocks` should be a list of `InvertibleResidual`"):
        Flow([])


def test_other_types_are_refused(unchecked) -> None:
    with pytest.raises(InputError, match=r"`x` should have shape .* Found list"):
        Flow([InvertibleResidual(mlp(0.5))]).log_density([[0.0]])  # pyright: ignore
    with pytest.raises(InputError, match="`method` should be one of exact, series, roulette"):
        log_determinant(mlp(0.5), gaussian(2, 3, D), method="exakt")  # pyright: ignore
    with pytest.raises(InputError, match="`layer` should be an attention layer"):
        ContractiveAttention(MultiheadAttention(D, 2, "l2"), 0.5)  # pyright: ignore
    with pytest.raises(InputError, match="`c` should be above 0"):
        ContractiveAttention(LAYERS["L2"](), "0.5")  # pyright: ignore
