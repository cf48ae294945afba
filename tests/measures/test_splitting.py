"""Mass splitting and maps of measures: identities, limits, and exact transport."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from agreement import gaussian
from examples import build as build_variant
from lipscope import DotProduct, to_dense, variants
from lipscope.attention import Attention, Rotary
from lipscope.errors import InputError
from lipscope.measures import (
    TokenMeasure,
    conditional_distance,
    finite_split,
    grouped,
    in_order,
    lipschitz_ratio,
    local_constant,
    push_forward,
    repeated_tokens,
    search_ratio,
    split_at,
    tiny_mass_gain,
    tiny_mass_ratio,
    token_map,
    wasserstein,
    weighted,
    weighted_jacobian,
)
from lipscope.measures.splitting import in_closed_form, own_operator, token_blocks
from lipscope_experiments.castin2024.splitting import ratios
from small_layers import case

ONE = torch.ones(1, 1, dtype=torch.float64)
WEDGE = torch.tensor([[-3.0], [-0.3]], dtype=torch.float64)


def line(a: float) -> DotProduct:
    return DotProduct(a * ONE, ONE, ONE, scale=1.0)


def dense(f, x: Tensor) -> float:
    jacobian = torch.func.jacrev(f)(x).reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


# --- the identity


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("kind", ["plain", "biased", "heads", "sharp"])
def test_identity_of_splitting(kind, copies) -> None:
    """Every token m times, by automatic differentiation of the whole, against one of each."""
    for seed in range(3):
        layer, x = case(kind, seed, n=4)
        layer = layer.replace(causal=False)
        found = split_at(layer, x)
        whole = dense(layer, x.repeat_interleave(copies, 0))
        assert max(found.moving, found.splitting) == pytest.approx(whole, rel=1e-12)
        assert found.moving == pytest.approx(dense(layer, x), rel=1e-12)


@pytest.mark.parametrize("kind", ["plain", "biased", "heads", "sharp"])
@pytest.mark.parametrize("counts", [(1, 9), (1, 5, 5), (7, 2, 6), (12,)])
def test_equal_tokens_are_groups(kind, counts) -> None:
    """The norm at the groups, and its singular vectors, against the whole Jacobian."""
    for seed in range(3):
        layer, x = case(kind, seed, n=len(counts))
        layer = layer.replace(causal=False)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        whole = x.repeat_interleave(torch.tensor(counts), 0)[order]
        found = grouped(layer, whole)
        assert found is not None
        assert len(found.tokens) == sum(min(c, 2) for c in counts)
        assert torch.equal(found.tokens[found.group], whole)
        jacobian = layer.linearise(found.tokens, log_weights=found.log_weights)
        left, sizes, right = torch.linalg.svd(to_dense(weighted(jacobian, found.log_weights)))
        assert float(sizes[0]) == pytest.approx(dense(layer, whole), rel=1e-12)
        m = len(found.tokens)
        u, v = (found.spread(e.reshape(m, -1)) for e in (left[:, 0], right[0]))
        assert float(v.norm()) == pytest.approx(1.0, rel=1e-12)
        torch.testing.assert_close(layer.linearise(whole).matvec(v), sizes[0] * u)


def test_groups_are_for_equal_tokens_that_are_alike() -> None:
    layer, x = case("plain", 0, n=3)
    layer = layer.replace(causal=False)
    assert grouped(layer, x.repeat(2, 1)) is None  # six groups of six tokens
    assert grouped(layer, x.repeat(4, 1)) is not None
    assert grouped(layer.replace(causal=True), x.repeat(4, 1)) is None
    hidden = torch.ones(12, 12).bool()
    hidden[0, 1] = False
    assert grouped(layer.replace(mask=hidden), x.repeat(4, 1)) is None


def test_identity_for_shares_and_weights() -> None:
    """Copies of 30 and 70 %, of atoms of any weight, in the weighted norm."""
    layer, x = case("plain", 0, n=3)
    w, shares = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.3, 0.7]).double()
    found = split_at(layer, x, log_weights=w.log())
    twice = TokenMeasure(x, w).copied(shares)

    def weighted(y: Tensor) -> Tensor:
        root = twice.weights.sqrt()[:, None]
        return root * layer(y / root, log_weights=twice.weights.log())

    point = twice.points * twice.weights.sqrt()[:, None]
    expected = max(found.moving, found.splitting)
    assert expected == pytest.approx(dense(weighted, point), rel=1e-12)
    assert found.moving == pytest.approx(local_constant(layer, TokenMeasure(x, w)), rel=1e-12)


def test_copies_at_one_position() -> None:
    """Masks, rotary embeddings and biases by position: copies have their token's."""
    gen = torch.Generator().manual_seed(0)
    n, copies = 4, 2
    angles = torch.arange(n)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
    bias = torch.randn(n, n, generator=gen).double()
    seen = torch.ones(n, n).tril().bool()
    layer, x = case("biased", 1, n=n)

    def at(repeat: int) -> DotProduct:
        where = torch.arange(n).repeat_interleave(repeat)
        turned = angles[where]
        return layer.replace(
            mask=seen[where][:, where],
            score_bias=bias[where][:, where],
            rotary=Rotary(turned.cos().double(), turned.sin().double()),
        )

    found = split_at(at(1), x)
    whole = dense(at(copies), x.repeat_interleave(copies, 0))
    assert max(found.moving, found.splitting) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("kind", variants(), ids=lambda one: one.__name__)
def test_every_variant_on_the_doubled_input(kind) -> None:
    """In closed form, as any function, and by automatic differentiation of the whole."""
    layer = build_variant(kind, trained=False)
    for seed in range(3):
        x = (1 + seed) * gaussian(4, 4, seed=seed)
        found, generic = split_at(layer, x), split_at(layer.forward, x)
        whole = dense(layer, torch.cat([x, x]))
        assert max(generic.moving, generic.splitting) == pytest.approx(whole, rel=1e-9)
        assert found.splitting == pytest.approx(generic.splitting, rel=1e-9)
        assert found.moving == pytest.approx(generic.moving, rel=1e-9)
        close = 1e-9 * whole  # an iteration that stops makes small gains inexact
        torch.testing.assert_close(found.gains, generic.gains, rtol=1e-8, atol=close)


def test_witness_reaches_the_gain(monkeypatch) -> None:
    layer, x = case("heads", 2, n=4)
    found = split_at(layer.replace(causal=False), x)
    own = own_operator(layer.replace(causal=False), x)
    e = torch.zeros_like(x)
    e[found.token] = found.direction
    assert float(own.matvec(e).norm()) == pytest.approx(found.splitting, rel=1e-12)
    assert float(e.norm()) == pytest.approx(1.0, rel=1e-12)
    monkeypatch.setattr("lipscope.measures.splitting._LARGE", 0)
    monkeypatch.setattr("lipscope.measures.splitting._TOL", 1e-8)
    by_solver = split_at(layer.replace(causal=False), x)
    torch.testing.assert_close(by_solver.gains, found.gains, rtol=1e-7, atol=1e-12)


def test_many_inputs_at_once() -> None:
    """What the maps of the experiment are drawn from, one input at a time."""
    layer, _ = case("plain", 4)
    x = gaussian(7, 3, 5)
    torch.testing.assert_close(
        ratios(layer, x), torch.tensor([split_at(layer, one).ratio for one in x]).double()
    )


def test_permuting_tokens_permutes_gains() -> None:
    layer, x = case("plain", 3)
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    torch.testing.assert_close(split_at(layer, x[order]).gains, split_at(layer, x).gains[order])


# --- finite moves, by exact transport


@pytest.mark.parametrize(
    ("x", "moved", "taken_apart"),
    [(WEDGE, 1.2187, 1.5535), (torch.tensor([[-0.5], [-5.0]]).double(), 1.1928, 1.7467)],
)
def test_splitting_beats_moving_where_it_is_said_to(x, moved, taken_apart) -> None:
    """A = -1: numbers of docs/theory, confirmed by transport between the measures."""
    mu, layer = TokenMeasure(x), line(-1.0)
    found = split_at(layer, x)
    assert found.moving == pytest.approx(moved, abs=1e-4)
    assert found.splitting == pytest.approx(taken_apart, abs=1e-4)
    assert found.ratio > 1
    ratios = [finite_split(layer, mu, found, size=s) for s in (1e-2, 1e-3, 1e-4)]
    errors = [abs(r / found.splitting - 1) for r in ratios]
    assert errors[2] < 1e-6 and errors[0] > errors[1] > errors[2]
    assert finite_split(layer, mu, found, size=1e-4, whole=True) < found.moving * (1 + 1e-6)


def test_moves_of_atoms_reach_the_local_constant() -> None:
    """Lemmas 3.2, 4.2 and C.5: ratios along the top singular vector tend to sigma."""
    layer, x = case("plain", 4)
    causal, y = case("heads", 4)
    w = torch.rand(len(x), generator=torch.Generator().manual_seed(0)).double() + 0.1
    some = TokenMeasure(x, w / w.sum())
    for kind, mu in ((layer, TokenMeasure(x)), (layer, some), (causal, in_order(y))):
        constant = local_constant(kind, mu)
        gen = torch.Generator().manual_seed(1)
        for _ in range(20):
            e = torch.randn(mu.points.shape, generator=gen, dtype=torch.float64)
            moved = mu.moved(mu.points + 1e-5 * e)
            assert lipschitz_ratio(kind, mu, moved) <= constant * (1 + 1e-4)
        _, _, right = torch.linalg.svd(to_dense(weighted_jacobian(kind, mu)))
        e = right[0].reshape(mu.points.shape) / mu.weights.sqrt()[:, None]
        found = [lipschitz_ratio(kind, mu, mu.moved(mu.points + s * e)) for s in (1e-3, 1e-5)]
        assert found[1] == pytest.approx(constant, rel=1e-4)
        assert abs(found[1] - constant) < abs(found[0] - constant)


def test_ratios_stay_below_the_supremum_of_local_constants() -> None:
    """Lemma B.2 in a geodesic space: the pair of a search is below what lies between."""
    layer = line(-1.0)
    found = search_ratio(layer, radius=1.0, num_atoms=2, steps=300, starts=2)
    assert found.ratio > 2
    assert max(found.mu.radius, found.nu.radius) <= 1 + 1e-12
    plan_points = [
        found.mu.points + t * (found.nu.points - found.mu.points)
        for t in torch.linspace(0, 1, 21).tolist()
    ]
    between = [local_constant(layer, found.mu.moved(x)) for x in plan_points]
    assert found.ratio <= max(between) * (1 + 1e-6)


# --- tiny masses, moved far


@pytest.mark.parametrize(("radius", "gain"), [(2.0, 1.4116), (3.0, 1.6330), (5.0, 1.8185)])
def test_a_tiny_mass_moved_far_beats_every_small_move(radius, gain) -> None:
    """A = +1, two atoms: nothing is gained by splitting, and nearly 2 by going across."""
    x = torch.tensor([[radius], [-radius]]).double()
    mu, layer = TokenMeasure(x), line(1.0)
    targets = torch.linspace(-radius, radius, 401, dtype=torch.float64)[:, None]
    gains = tiny_mass_gain(layer, mu, targets)
    small = split_at(layer, x)
    assert float(gains.max()) == pytest.approx(gain, abs=1e-4)
    assert small.splitting < small.moving < 1.02
    atom, target = divmod(int(gains.argmax()), len(targets))
    exact = tiny_mass_ratio(layer, mu, atom, targets[target], mass=1e-6)
    assert exact == pytest.approx(float(gains.max()), rel=1e-5)


@pytest.mark.parametrize("n", [6, 30])
def test_tiny_masses_nearby_are_splitting(n) -> None:
    layer, x = case("plain", 5, n=n)
    found = split_at(layer, x)
    near = x[found.token] + 1e-8 * found.direction
    gains = tiny_mass_gain(layer, TokenMeasure(x), near[None])
    assert float(gains[found.token]) == pytest.approx(found.splitting, rel=1e-4)


def test_tiny_masses_through_chains() -> None:
    """Three atoms in any dimension: the limit against exact transport at falling masses."""
    layer, x = case("plain", 6, n=4)
    mu, targets = TokenMeasure(x), gaussian(5, 5, seed=3)
    gains = tiny_mass_gain(layer, mu, targets)
    for atom in range(4):
        for k in range(5):
            exact = tiny_mass_ratio(layer, mu, atom, targets[k], mass=1e-7)
            # The atoms' own images move by O(mass), the ratio by its root.
            assert exact == pytest.approx(float(gains[atom, k]), abs=3 * 1e-7**0.5)


# --- what can never be split


def test_maps_that_nothing_splits() -> None:
    x = gaussian(5, 4)
    token_by_token = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    norm = nn.LayerNorm(4).double()
    assert split_at(token_by_token.requires_grad_(False), x).ratio == pytest.approx(1.0, rel=1e-9)
    assert split_at(norm.requires_grad_(False), x).ratio == pytest.approx(1.0, rel=1e-9)
    assert split_at(lambda y: y.mean(-2, keepdim=True).expand_as(y), x).splitting < 1e-12
    layer, _ = case("plain", 0)
    assert split_at(layer, gaussian(1, 5)).splitting < 1e-12  # one token reads itself alone
    assert (
        split_at(layer.replace(query=torch.zeros_like(layer.query)), gaussian(6, 5)).splitting == 0
    )


def test_residual_and_blocks_by_the_generic_operator() -> None:
    f = line(-1.0)
    found = split_at(lambda y: y + f(y), WEDGE)
    own = token_blocks(own_operator(f, WEDGE)).flatten()
    assert found.splitting == pytest.approx(float((1 + own).abs().max()), rel=1e-12)
    assert found.moving == pytest.approx(dense(lambda y: y + f(y), WEDGE), rel=1e-12)


# --- mean-field attention


def test_uniform_and_weighted_measures_give_the_layer() -> None:
    layer, x = case("plain", 0)
    torch.testing.assert_close(push_forward(layer, TokenMeasure(x)).points, layer(x))
    twice = TokenMeasure(x[:2], torch.tensor([1 / 3, 2 / 3]).double())
    torch.testing.assert_close(
        push_forward(layer, twice).points, layer(x[[0, 1, 1]])[:2], rtol=1e-12, atol=1e-12
    )
    written = TokenMeasure(torch.cat([x, 9 * x]), torch.tensor([1 / 6] * 6 + [0.0] * 6).double())
    torch.testing.assert_close(push_forward(layer, written).points[:6], layer(x))


def test_masked_mean_field_generalises_the_causal_layer() -> None:
    layer, x = case("heads", 1)
    assert layer.causal
    mu = in_order(x)
    out = push_forward(layer, mu)
    torch.testing.assert_close(out.points, layer(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(out.positions, mu.positions)
    added = push_forward(layer, mu, residual=True)
    assert torch.equal(added.positions, mu.positions)
    assert conditional_distance(added, mu) < math.inf
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    assert mu.positions is not None
    shuffled = TokenMeasure(x[order], None, mu.positions[order])
    torch.testing.assert_close(push_forward(layer, shuffled).points, layer(x)[order])


def test_ties_in_position_read_each_other() -> None:
    layer, x = case("heads", 1)
    s = torch.tensor([0.2, 0.2, 0.5, 0.5, 0.5, 1.0])
    seen = (s <= s[:, None]).bool()
    expected = layer.replace(causal=False, mask=seen)(x)
    torch.testing.assert_close(push_forward(layer, TokenMeasure(x, None, s)).points, expected)
    before = token_map(layer, TokenMeasure(x, None, s), x[:1], torch.tensor([0.1]))
    assert not before.any()


def test_masked_mean_field_counterexample() -> None:
    """A = 0, V = 1: the running mean has the constant 2 of Hardy, not 1 (Theorem 4.4, p = 2)."""
    zero = DotProduct(0 * ONE, ONE, ONE, causal=True)
    for n, norm in ((2, 1.1441), (10, 1.4101), (100, 1.6300)):
        mu = in_order(gaussian(n, 1))
        assert local_constant(zero, mu) == pytest.approx(norm, abs=1e-4)
        cesaro = torch.ones(n, n).double().tril() / torch.arange(1, n + 1)[:, None]
        e = torch.linalg.svd(cesaro)[2][0][:, None]
        found = lipschitz_ratio(zero, mu, mu.moved(mu.points + e))
        assert found == pytest.approx(norm, abs=1e-4)
        assert found < 2


# --- bad input

PLAIN, X = case("plain", 0)
CAUSAL, _ = case("heads", 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: push_forward(CAUSAL, TokenMeasure(X)), "`causal = True` and no positions."),
        (lambda: push_forward(PLAIN, in_order(X)), "`causal = False` and positions."),
        (lambda: push_forward(case("rotary", 0)[0], in_order(X)), "indices of tokens"),
        (lambda: push_forward(case("masked", 0)[0], TokenMeasure(X)), "indices of tokens"),
        (lambda: push_forward(PLAIN, TokenMeasure(X[:, :2])), "the width 5 of the layer. Found 2."),
        (
            lambda: push_forward(PLAIN.replace(output=X[:3, :3]), TokenMeasure(X), residual=True),
            "keep the width of its tokens. Found 5 and 3.",
        ),
        (
            lambda: local_constant(PLAIN, TokenMeasure(X, torch.eye(6)[0])),
            "`weights` should be positive. Found an atom without weight",
        ),
        (lambda: lipschitz_ratio(PLAIN, TokenMeasure(X), TokenMeasure(X)), "positive and finite"),
        (lambda: search_ratio(PLAIN, radius=0.0), "`radius` should be positive."),
        (
            lambda: search_ratio(PLAIN, radius=1.0, starts=0),
            "`starts` should be a positive integer.",
        ),
        (lambda: split_at(PLAIN, X * torch.nan), "`x` should be finite. Found NaN or Inf in it"),
        (
            lambda: split_at(PLAIN, "x"),
            "`x` should be tokens in a tensor, (n, d), at least one. Found x.",
        ),
        (
            lambda: split_at(PLAIN, X, log_weights=X[0].double()),
            "`log_weights` should be one number for each of 6 keys. Found (5,).",
        ),
        (
            lambda: split_at(PLAIN, X, log_weights=X[:, 0] / 0),
            "`log_weights` should be finite. Found NaN or Inf in it, first at (0,).",
        ),
        (
            lambda: PLAIN(X, log_weights=X @ X.T),
            "`log_weights` should be one number for each of 6 keys. Found (6, 6).",
        ),
        (lambda: PLAIN(X, log_weights=[0.0]), "for each of 6 keys. Found [0.0]."),
        (lambda: tiny_mass_gain(CAUSAL, in_order(X), X), "not available: a causal layer"),
        (lambda: token_map(CAUSAL, in_order(X), X), "Found points without positions."),
        (
            lambda: token_map(CAUSAL, in_order(X), X, torch.full((6,), torch.nan)),
            "`positions` should be finite.",
        ),
        (lambda: token_map(CAUSAL, in_order(X), X, X), "`positions` should be numbers in a"),
        (lambda: token_map(PLAIN, X, X), "`mu` should be a `TokenMeasure`. Found `Tensor`."),
        (lambda: tiny_mass_gain(PLAIN, X, X), "`mu` should be a `TokenMeasure`."),
        (lambda: tiny_mass_gain(5, TokenMeasure(X), X), "`layer` should be an Attention layer."),
        (lambda: search_ratio(5, radius=1.0), "`layer` should be an Attention layer."),
        (lambda: own_operator(PLAIN, X.tolist()), "Tokens should be a tensor, (..., n, d)."),
        (lambda: weighted(PLAIN.linearise(X), X[0]), "one for each of 6 tokens. Found"),
        (lambda: split_at(lambda x: x.cumsum(0), X), "`f` should not depend on the order"),
        (
            lambda: split_at(lambda x: x * torch.arange(1, len(x) + 1)[:, None], X[:1]),
            "`f` should not depend on the order",
        ),
        (
            lambda: finite_split(PLAIN, TokenMeasure(X), split_at(PLAIN, X), size=0.0),
            "`size` should be positive.",
        ),
        (
            lambda: split_at(lambda x: x.sum(0, keepdim=True), X),
            "`f` should give one output for each token.",
        ),
        (
            lambda: split_at(torch.sin, X, log_weights=torch.zeros(6)),
            "`log_weights` go with softmax",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(make, message, unchecked) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def test_closed_forms_are_those_of_softmax_by_token() -> None:
    assert in_closed_form(PLAIN) and not in_closed_form(torch.sin)
    for kind in variants():
        layer: Attention = build_variant(kind, trained=False)
        if not in_closed_form(layer):
            with pytest.raises(InputError, match="copies count otherwise"):
                own_operator(layer, gaussian(5, 4))


def test_wasserstein_of_the_push_forward_has_a_gradient() -> None:
    x = X.clone().requires_grad_()
    nu = TokenMeasure(gaussian(4, 5, seed=2))

    def value(y: Tensor) -> Tensor:
        return wasserstein(push_forward(PLAIN, TokenMeasure(y)), push_forward(PLAIN, nu))

    (gradient,) = torch.autograd.grad(value(x), x)
    e, h = gaussian(6, 5, seed=4), 1e-6
    difference = float(value(X + h * e) - value(X - h * e)) / (2 * h)
    assert float((gradient * e).sum()) == pytest.approx(difference, rel=1e-5)


def test_where_nothing_moves_there_is_no_ratio() -> None:
    assert math.isnan(split_at(DotProduct(ONE, ONE, 0 * ONE), WEDGE).ratio)


def test_what_is_no_layer_or_measure_is_refused_in_one_line(unchecked) -> None:
    layer, mu = DotProduct(ONE, ONE, ONE), TokenMeasure(WEDGE)
    for call, said in (
        (lambda: push_forward(nn.Linear(1, 1), mu), "an Attention layer. Found `Linear`"),
        (lambda: local_constant(layer, WEDGE), "a `TokenMeasure`. Found `Tensor`"),
        (lambda: lipschitz_ratio(nn.Linear(1, 1), mu, mu), "an Attention layer. Found `Linear`"),
        (lambda: split_at(None, WEDGE), "a layer or a function. Found `NoneType`"),
        (lambda: split_at(nn.MultiheadAttention(1, 1), WEDGE), "that it raised TypeError"),
        (lambda: split_at(layer, WEDGE.float()), "as precise as the layer, float64"),
        (lambda: repeated_tokens(layer, WEDGE, (1.5, 2)), "2 whole numbers of at least 1"),
        (
            lambda: tiny_mass_gain(layer, TokenMeasure(WEDGE, ONE[0].new_tensor([1, 0])), WEDGE),
            "an atom without",
        ),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            call()
    single, log_weights = layer.replace(**{k: ONE.float() for k in ("query", "key", "value")}), ONE
    of_any_dtype = split_at(single, WEDGE.float(), log_weights=log_weights[0].expand(2))
    assert of_any_dtype.moving == split_at(single, WEDGE.float()).moving
    counted = repeated_tokens(layer, WEDGE, torch.tensor([1, 2]))
    assert counted.num_tokens == 3
