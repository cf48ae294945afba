"""Constructions and ascent: what they promise against dense singular values."""

import dataclasses
import math

import pytest
import torch

import lipscope as ls
from lipscope import L2Attention, attacks
from lipscope.measures import repeated_tokens
from lipscope.theorems import heads_of
from lipscope.theorems.directions import eigen_directions, star_direction
from lipscope.theorems.papers.kim2021 import phi_inverse
from searched import searched
from small import ONE, drawn, line, sigma

BY_HEAD = [build for name, build in attacks.PER_HEAD.items() if name != "l2_opposed"]

# --- what theory predicts of one head


@pytest.mark.parametrize("build", BY_HEAD)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@searched(4, 12)
def test_prediction_is_below_sigma(count: int, build, causal: bool, bias: bool) -> None:
    made = 0
    for seed in range(count):
        layer = drawn(seed, d=2 + seed % 3, k=1 + seed % 4, causal=causal, bias=bias)
        for n, radius in ((2, 0.4), (7, 1.1), (8, 2.0)):
            if build is attacks.two_cluster and not eigen_directions(heads_of(layer)[0]):
                continue
            if build is attacks.opposed_pair and n < 3:
                continue
            built = build(layer, num_tokens=n, radius=radius)
            made += 1
            assert built.x.shape == (n, layer.query.shape[1])
            assert float(built.x.norm(dim=1).max()) <= radius * (1 + 1e-12)
            assert built.predicted is not None
            if built.kind == "lower":
                assert sigma(layer, built.x) >= built.predicted * (1 - 1e-10)
    assert made >= count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("radius", [0.3, 1.0, 2.0])
def test_two_cluster_has_the_strengthened_value(causal: bool, positive: bool, radius: float):
    """Proposition 3.4 with V = I, and the factor derived here, row by row."""
    a = torch.diag(torch.tensor([3.0, 2.0, 0.5]).double() * (1 if positive else -1))
    eye = torch.eye(3).double()
    layer = ls.DotProduct(a, eye, eye, scale=1.0, causal=causal)
    gamma, n = (3 / 8 if positive else 3.0), 9
    built = attacks.two_cluster(layer, num_tokens=n, radius=radius)
    readable = torch.arange(2, n + 1) if causal else torch.full((n - 1,), n)
    p = 1 / (1 + (readable.double() - 1) * math.exp(-2 * gamma * radius**2))
    expected = (p * (1 + 2 * gamma * radius**2 * (1 - p))).norm()
    assert built.predicted == pytest.approx(float(expected), rel=1e-12)
    stated = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * gamma * radius**2))
    assert sigma(layer, built.x) >= stated
    assert ("positive" if positive else "negative") in built.name


def test_first_token_is_the_one_that_every_row_reads() -> None:
    """With x_1 anywhere else a causal mask hides it from earlier rows."""
    layer = line(causal=True)
    x = attacks.two_cluster(layer, num_tokens=12, radius=1.0).x
    assert sigma(layer, x) > 1.2 * sigma(layer, x.flip(0))


def test_star_is_never_below_the_eigenvalues() -> None:
    for seed in range(40):
        (head,) = heads_of(drawn(seed, d=3 + seed % 4, k=1 + seed % 3))
        star, found = star_direction(head), eigen_directions(head)
        assert star is not None
        assert star.gamma <= head.norm_a * (1 + 1e-12)
        gap = (head.query @ star.rest) @ head.key @ (star.first - star.rest)
        assert float(gap) == pytest.approx(2 * star.gamma, rel=1e-9)
        assert float(star.rest.norm()) <= 1 + 1e-12
        for way in found:
            assert star.gamma >= way.gamma * (1 - 1e-12)
            gap = (head.query @ way.rest) @ head.key @ (way.first - way.rest)
            assert float(gap) == pytest.approx(2 * way.gamma, rel=1e-8)


def test_star_is_the_maximum_of_a_fine_grid() -> None:
    for seed in range(5):
        (head,) = heads_of(drawn(seed, d=2, k=2))
        angle = torch.linspace(0, 2 * math.pi, 2001).double()
        circle = torch.stack([angle.cos(), angle.sin()], 1)
        v = (torch.linspace(0, 1, 201).double()[:, None, None] * circle).flatten(0, 1)
        av = v @ head.query.T @ head.key
        grid = float(((av.norm(dim=1) - (v * av).sum(1)) / 2).max())
        star = star_direction(head)
        assert star is not None
        assert grid <= star.gamma * (1 + 1e-12) <= grid * 1.001


def test_rotation_has_a_star_but_no_eigenvalue() -> None:
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    layer = ls.DotProduct(turn, torch.eye(2).double(), torch.eye(2).double())
    with pytest.raises(ls.InputError, match="no nonzero real eigenvalue"):
        attacks.two_cluster(layer, num_tokens=4, radius=1.0)
    built = attacks.gamma_star(layer, num_tokens=4, radius=1.0)
    assert sigma(layer, built.x) >= (built.predicted or math.inf)


@pytest.mark.parametrize("causal", [False, True])
def test_opposed_pair_in_closed_form(causal: bool) -> None:
    """``A = -3 e_1 e_1^T``, ``V = 2 e_2 e_2^T``: the pair at ``± R e_2``, the rest at ``R e_1``."""
    one, two = torch.eye(3).double()[:2]
    query, value = -3.0 * torch.outer(one, one), 2.0 * torch.outer(two, two)
    layer = ls.DotProduct(query, torch.eye(3).double(), value, scale=1.0, causal=causal)
    n, radius = 9, 2.5
    built = attacks.opposed_pair(layer, num_tokens=n, radius=radius)
    expected = math.sqrt((n - 2) / 2) * radius**2 * 3.0 * 2.0
    assert built.predicted == pytest.approx(expected, rel=1e-6)
    assert sigma(layer, built.x) >= expected * (1 - 1e-6)
    first, second, *rest = built.x
    assert float((first - second).norm()) == pytest.approx(2 * radius, rel=1e-9)
    assert all(torch.equal(token, rest[0]) for token in rest)


@pytest.mark.parametrize("radius", [1.0, 3.0, 6.0, 20.0])
def test_opposed_pair_where_keys_attract_themselves(radius: float) -> None:
    """``A = V = I``: the rest moves inward, to where a fine grid has its maximum."""
    layer, n = ls.DotProduct(*3 * [torch.eye(4).double()], scale=1.0), 12
    built = attacks.opposed_pair(layer, num_tokens=n, radius=radius)
    share = torch.linspace(0, 1, 2001).double()[:, None]
    angle = torch.linspace(0, math.pi / 2, 2001).double()
    p = 1 / (2 + (n - 2) * torch.exp(-(radius**2) * share * (angle.cos() - share)))
    best = float((math.sqrt(2 * (n - 2)) * p * share * radius**2 * angle.sin()).max())
    assert built.predicted is not None and 0.95 * best <= built.predicted <= best
    assert sigma(layer, built.x) >= built.predicted * (1 - 1e-10)


def test_opposed_pair_needs_a_second_dimension() -> None:
    with pytest.raises(ls.InputError, match="no two tokens attract the attention of head 0"):
        attacks.opposed_pair(line(), num_tokens=5, radius=1.0)
    with pytest.raises(ls.InputError, match="at least 3"):
        attacks.opposed_pair(drawn(0), num_tokens=2, radius=1.0)


def test_opposed_pair_where_values_see_little_else_than_what_keys_read() -> None:
    """V along ``a`` up to rounding: a pair is refused, or what it promises is kept."""
    gen, refused = torch.Generator().manual_seed(0), 0
    for trial in range(60):
        query, key = (torch.randint(-4, 5, (1, 2), generator=gen).double() for _ in range(2))
        noise = 10.0 ** -(trial % 20) * torch.randn(1, 2, generator=gen).double()
        layer = ls.DotProduct(query, key, key + (trial % 2) * noise, scale=1.0)
        try:
            built = attacks.opposed_pair(layer, num_tokens=5, radius=4.0)
        except ls.InputError:
            refused += 1
            continue
        assert built.predicted is not None
        assert float(built.x.norm(dim=1).max()) <= 4.0
        assert sigma(layer, built.x) >= built.predicted * (1 - 1e-10)
    assert 30 <= refused < 60


def test_nothing_is_built_of_nothing() -> None:
    zero, eye = torch.zeros(3, 3).double(), torch.eye(3).double()
    with pytest.raises(ls.InputError, match="no two tokens attract"):
        attacks.opposed_pair(ls.DotProduct(zero, eye, eye), num_tokens=6, radius=2.0)
    with pytest.raises(ls.InputError, match="no two tokens attract"):
        attacks.opposed_pair(ls.DotProduct(eye, eye, zero), num_tokens=6, radius=2.0)
    built = attacks.large_radius(ls.DotProduct(zero, zero, eye), num_tokens=6, radius=1e9)
    assert bool(built.x.isfinite().all())


def test_directions_are_searched_for_once_a_head(monkeypatch) -> None:
    (head,), (other,) = heads_of(drawn(3)), heads_of(drawn(4))
    found = star_direction(head), star_direction(other)
    monkeypatch.setattr("lipscope.theorems.directions._starts", None)  # no search could start
    for _ in range(2):
        for seed, known in zip((3, 4), found, strict=True):
            again = star_direction(heads_of(drawn(seed))[0])
            assert again is not None and known is not None and again.gamma == known.gamma
            torch.testing.assert_close(again.rest, known.rest, rtol=0, atol=0)
            again.rest.zero_()  # nobody else sees that
    with pytest.raises(TypeError):
        star_direction(dataclasses.replace(head, query=2 * head.query))


@pytest.mark.parametrize(("n", "ratio"), [(3, 0.6670), (9, 0.8890), (33, 0.9697), (10, 0.890)])
def test_quadratic_growth(n: int, ratio: float) -> None:
    layer = ls.DotProduct(ONE, ONE, ONE)
    built = attacks.quadratic(layer, num_tokens=n, radius=30.0)
    found = sigma(layer, built.x) / 900
    assert found == pytest.approx(ratio, abs=2e-4)
    assert found * 900 == pytest.approx(built.predicted, rel=1e-6)


def test_dot_product_attention_is_not_lipschitz() -> None:
    layer = ls.DotProduct(ONE, ONE, ONE)
    at = [
        sigma(layer, attacks.quadratic(layer, num_tokens=3, radius=r).x) for r in (1.0, 10.0, 100.0)
    ]
    assert at[2] == pytest.approx(6667, rel=1e-3)
    assert at[1] == pytest.approx(67, rel=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_large_radius_reaches_its_limit(causal: bool) -> None:
    for seed in range(4):
        layer = drawn(seed, causal=causal)
        built = attacks.large_radius(layer, num_tokens=6, radius=500.0)
        assert sigma(layer, built.x) == pytest.approx(built.predicted, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("l2", [False, True])
def test_constant_is_exact_for_all_heads_together(causal: bool, l2: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 3, generator=gen).double() for _ in range(3))
    out = torch.randn(5, 4, generator=gen).double()
    if l2:
        layer: ls.Attention = L2Attention(q, v, out, heads=2, causal=causal)
    else:
        layer = ls.DotProduct(q, k, v, out, heads=2, causal=causal, query_bias=q[:, 0])
    built = attacks.constant(layer, num_tokens=6, radius=2.0)
    assert sigma(layer, built.x) == pytest.approx(built.predicted, rel=1e-10)


def test_causal_mean_of_two_is_the_cesaro_value() -> None:
    built = attacks.constant(line(causal=True), num_tokens=2, radius=1.0)
    assert built.predicted == pytest.approx(1.1441, abs=5e-5)


def test_unbalanced_is_the_best_radius() -> None:
    layer = line()
    whole = attacks.two_cluster(layer, num_tokens=100, radius=5.0)
    best = attacks.unbalanced(layer, num_tokens=100, radius=5.0)
    assert sigma(layer, best.x) > 1.8 * sigma(layer, whole.x)
    assert float(best.x.norm(dim=1).max()) == pytest.approx(math.sqrt(math.log(99) / 2), rel=0.12)


# --- repeated tokens


@pytest.mark.parametrize(("radius", "ratio"), [(2.0, 1.25), (2.5, 1.16), (3.0, 1.111)])
def test_unbalanced_clusters_of_any_size(radius: float, ratio: float) -> None:
    found = attacks.weighted_two_atoms(line(), radius=radius)
    reference = 0.5 * radius**2 * math.exp(radius**2)
    assert found.sigma / reference == pytest.approx(ratio, abs=1.5e-3)
    tripled = attacks.weighted_two_atoms(line(), radius=radius, factor=3.0)
    assert tripled.sigma > 1.15 * found.sigma


@pytest.mark.parametrize("n", [2, 3, 11, 40])
def test_repeated_tokens_against_dense(n: int) -> None:
    gen = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(4, 3, generator=gen).double() for _ in range(3))
    out, bias = torch.randn(5, 4, generator=gen).double(), torch.randn(4, generator=gen).double()
    two_heads = ls.DotProduct(q, k, v, out, heads=2, query_bias=bias)
    for layer in (two_heads, L2Attention(q, v, out, heads=2)):
        for scale in (0.5, 3.0):
            atoms = scale * torch.randn(3, 3, generator=gen).double()
            counts = (1, n - 1, 2)
            x = atoms.repeat_interleave(torch.tensor(counts), dim=0)
            assert repeated_tokens(layer, atoms, counts).sigma == pytest.approx(
                sigma(layer, x), rel=1e-10
            )


def test_splitting_can_be_what_counts() -> None:
    """One token alone moves less than its two halves against each other (A = -1)."""
    atoms = torch.tensor([[-3.0], [-0.3]]).double()
    alone, twice = (repeated_tokens(line(), atoms, c) for c in ((1, 1), (2, 2)))
    assert twice.splitting > twice.moving
    assert twice.moving == pytest.approx(alone.sigma, rel=1e-12)
    double = atoms.repeat_interleave(2, dim=0)
    assert twice.sigma == pytest.approx(sigma(line(), double), rel=1e-12)


def test_ten_million_tokens() -> None:
    """At p = 1/2 the value is sqrt(n-1)/2 (1 + gamma R^2), up to row 1."""
    n = 10**7
    radius = math.sqrt(math.log(n - 1) / 2)
    found = attacks.weighted_two_atoms(line(), radius=radius, num_tokens=n)
    assert found.num_tokens == n
    assert found.sigma == pytest.approx(math.sqrt(n - 1) / 2 * (1 + radius**2), rel=1e-3)


# --- L2 attention


@pytest.mark.parametrize(("n", "ratio"), [(3, 1.285), (11, 1.235), (101, 1.144), (1001, 1.096)])
def test_l2_opposed_comes_close_to_the_bound(n: int, ratio: float) -> None:
    layer = L2Attention(ONE, ONE)
    built = attacks.l2_opposed(layer, num_tokens=n, radius=10.0)
    inverse = phi_inverse(float(n - 1))
    value = 4 * inverse
    expected = value - 1 + 2 / (1 + inverse)
    # Row 1 holds the largest row sum; one product gives it.
    first = torch.zeros(n, 1).double()
    first[0] = 1.0
    row = layer.linearise(built.x).rmatvec(first)
    assert float(row.abs().sum()) == pytest.approx(expected, rel=1e-9)
    assert (value + 1) / expected == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_l2_prediction_is_below_sigma(causal: bool) -> None:
    for seed in range(10):
        gen = torch.Generator().manual_seed(seed)
        layer = L2Attention(*torch.randn(2, 3, 4, generator=gen).double(), causal=causal)
        for radius in (0.2, 5.0):
            built = attacks.l2_opposed(layer, num_tokens=7, radius=radius)
            assert sigma(layer, built.x) >= (built.predicted or math.inf) * (1 - 1e-10)
            assert float(built.x.norm(dim=1).max()) <= radius * (1 + 1e-12)


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": -1.0}, "`radius` should be positive. Found `radius = -1.0`."),
        ({"radius": math.nan}, "`radius` should be positive. Found `radius = nan`."),
        ({"num_tokens": 0}, "`num_tokens` should be a"),
    ],
)
@pytest.mark.parametrize("build", [*attacks.PER_HEAD.values(), attacks.ascend, attacks.worst])
def test_bad_input_is_one_line(build, options: dict, message: str) -> None:
    layer = L2Attention(ONE, ONE) if build is attacks.l2_opposed else line()
    with pytest.raises(ls.InputError) as error:
        build(layer, **{"num_tokens": 4, "radius": 1.0, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("build", attacks.PER_HEAD.values())
def test_head_out_of_range_is_one_line(build) -> None:
    layer = L2Attention(ONE, ONE) if build is attacks.l2_opposed else line()
    with pytest.raises(ls.InputError, match="`head` should be between 0 and 0"):
        build(layer, num_tokens=4, radius=1.0, head=1)


def test_wrong_variant_or_mask_is_one_line() -> None:
    with pytest.raises(
        ls.InputError, match=r"made for dot-product attention\. Found `L2Attention`"
    ):
        attacks.two_cluster(L2Attention(ONE, ONE), num_tokens=4, radius=1.0)
    band = torch.eye(4).bool()
    with pytest.raises(ls.InputError, match="neither empty nor causal"):
        attacks.gamma_star(line(mask=band), num_tokens=4, radius=1.0)
    with pytest.raises(ls.InputError, match="captured for 4 tokens, not for 5"):
        attacks.gamma_star(line(mask=band), num_tokens=5, radius=1.0)
    with pytest.raises(ls.InputError, match="masked"):
        attacks.weighted_two_atoms(line(causal=True), radius=1.0)
    with pytest.raises(ls.InputError, match="beyond float64"):
        attacks.weighted_two_atoms(line(), radius=100.0)
    with pytest.raises(ls.InputError, match="`start` should have shape"):
        attacks.ascend(line(), num_tokens=3, radius=1.0, start=torch.zeros(2, 1))


def test_construction_is_frozen() -> None:
    built = attacks.constant(line(), num_tokens=2, radius=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.x = torch.zeros(1, 1)
