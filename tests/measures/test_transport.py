"""Transport between token measures: against other solvers, axioms, and finite differences."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog
from torch import Tensor

from agreement import gaussian
from lipscope.errors import InputError
from lipscope.measures import (
    TokenMeasure,
    conditional_distance,
    in_order,
    optimal_plan,
    sinkhorn_divergence,
    wasserstein,
)

SEEDS = st.integers(0, 10_000)
WIDTHS = st.integers(1, 3)
POWERS = st.sampled_from([1.0, 1.5, 2.0, 3.0])
few = settings(max_examples=25, deadline=None)


def weights(n: int, seed: int) -> Tensor:
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    return w / w.sum()


def measure(seed: int, n: int, d: int) -> TokenMeasure:
    return TokenMeasure(gaussian(n, d, seed=seed), weights(n, seed))


def linear_programme(mu: TokenMeasure, nu: TokenMeasure, p: float, extra: Tensor) -> float:
    """The definition itself, by a general solver: marginals as equations."""
    n, m = mu.num_tokens, nu.num_tokens
    costs = torch.cdist(mu.points, nu.points).pow(p) + extra
    equations = torch.cat(
        [torch.eye(n).repeat_interleave(m, 1), torch.eye(m).repeat(1, n)]
    ).double()
    ends = torch.cat([mu.weights, nu.weights])
    found = linprog(costs.flatten().numpy(), A_eq=equations.numpy(), b_eq=ends.numpy())
    return found.fun ** (1 / p)


@few
@given(SEEDS, WIDTHS, POWERS, st.integers(1, 6), st.integers(1, 6))
def test_distance_is_what_its_definition_says(seed, d, p, n, m) -> None:
    mu, nu = measure(seed, n, d), measure(seed + 1, m, d)
    expected = linear_programme(mu, nu, p, torch.zeros(n, m))
    assert float(wasserstein(mu, nu, p=p)) == pytest.approx(expected, rel=1e-7)


@few
@given(SEEDS, WIDTHS, POWERS)
def test_metric_axioms(seed, d, p) -> None:
    a, b, c = (measure(seed + i, 3 + i, d) for i in range(3))
    ab, ba, bc, ac = (float(wasserstein(*pair, p=p)) for pair in ((a, b), (b, a), (b, c), (a, c)))
    assert ab == pytest.approx(ba, rel=1e-12)
    assert ab > 0
    assert ac <= (ab + bc) * (1 + 1e-12)
    order = torch.randperm(3)
    same = TokenMeasure(a.points[order], a.weights[order])
    assert float(wasserstein(a, same, p=p)) < 1e-7 ** (1 / p)  # weights round to 1e-16
    assert float(wasserstein(a, a, p=p)) == 0.0


@few
@given(SEEDS, WIDTHS)
def test_atoms_may_be_written_as_several(seed, d) -> None:
    """Equal weights by assignment, and the same measure in halves by the network simplex."""
    mu, nu = (TokenMeasure(gaussian(4, d, seed=seed + i)) for i in range(2))
    halves = mu.copied(torch.tensor([0.3, 0.7]))
    expected = float(wasserstein(mu, nu))
    assert float(wasserstein(halves, nu)) == pytest.approx(expected, rel=1e-9)
    if d > 1:
        assert optimal_plan(mu, nu).method == "assignment"
        assert optimal_plan(halves, nu).method == "network simplex"


@few
@given(SEEDS, WIDTHS)
def test_lemmas_of_the_appendix(seed, d) -> None:
    """Lemmas A.3, A.4 (any 1-Lipschitz function is below), A.5 and A.6 of castin2024."""
    mu, nu = measure(seed, 4, d), measure(seed + 1, 5, d)
    powers = [float(wasserstein(mu, nu, p=p)) for p in (1.0, 1.5, 2.0, 4.0)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(powers))
    y = gaussian(1, d, seed=seed)

    def distance(one: TokenMeasure) -> float:  # to a point: 1-Lipschitz
        return float(one.weights @ (one.points - y).norm(dim=1))

    assert abs(distance(mu) - distance(nu)) <= powers[0] * (1 + 1e-9)
    matrix = gaussian(d, d, seed=seed + 2)

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ matrix.T)

    def g(x: Tensor) -> Tensor:
        return torch.sin(x)

    constant = float(torch.linalg.matrix_norm(matrix, 2))
    for p in (1.0, 2.0):
        pushed = float(wasserstein(mu.moved(f(mu.points)), nu.moved(f(nu.points)), p=p))
        assert pushed <= constant * float(wasserstein(mu, nu, p=p)) * (1 + 1e-9)
        apart = float(wasserstein(mu.moved(f(mu.points)), mu.moved(g(mu.points)), p=p))
        gap = (mu.weights @ (f(mu.points) - g(mu.points)).norm(dim=1).pow(p)) ** (1 / p)
        assert apart <= float(gap) * (1 + 1e-9)


# --- gradients


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("m", [4, 6])
def test_gradient_against_finite_differences(d, p, m) -> None:
    x, w = gaussian(4, d).requires_grad_(), weights(4, 0) if m == 6 else torch.full((4,), 0.25)
    nu = TokenMeasure(gaussian(m, d, seed=7), None if m == 4 else weights(m, 1))
    (gradient,) = torch.autograd.grad(wasserstein(TokenMeasure(x, w), nu, p=p), x)
    e, h = gaussian(4, d, seed=3), 1e-6
    ends = [
        float(wasserstein(TokenMeasure(x.detach() + s * h * e, w), nu, p=p)) for s in (1.0, -1.0)
    ]
    assert float((gradient * e).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_gradient_at_distance_zero_is_zero() -> None:
    x = gaussian(3, 2).requires_grad_()
    for p in (1.0, 2.0):
        value = wasserstein(TokenMeasure(x), TokenMeasure(x.detach()), p=p)
        assert value == 0
        assert not torch.autograd.grad(value, x)[0].any()


# --- the conditional distance


def at_positions(seed: int, n: int, d: int) -> TokenMeasure:
    """Ties in position, the same masses there whatever the seed."""
    return TokenMeasure(
        gaussian(n, d, seed=seed), None, torch.arange(n).div(2, rounding_mode="floor") / n
    )


@few
@given(SEEDS, WIDTHS, POWERS)
def test_conditional_distance_is_transport_at_a_prohibitive_cost(seed, d, p) -> None:
    mu, nu = at_positions(seed, 6, d), at_positions(seed + 1, 6, d)
    assert mu.positions is not None and nu.positions is not None
    across = 1e4 * (mu.positions[:, None] != nu.positions).double()
    found = float(conditional_distance(mu, nu, p=p))
    assert found == pytest.approx(linear_programme(mu, nu, p, across), rel=1e-7)
    assert found >= float(wasserstein(mu, nu, p=p)) * (1 - 1e-12)
    assert float(conditional_distance(nu, mu, p=p)) == pytest.approx(found, rel=1e-12)
    third = at_positions(seed + 2, 6, d)
    other = [float(conditional_distance(*pair, p=p)) for pair in ((mu, third), (third, nu))]
    assert found <= sum(other) * (1 + 1e-12)


def test_one_atom_a_position_is_the_euclidean_norm() -> None:
    x, y = gaussian(5, 3), gaussian(5, 3, seed=1)
    expected = float((x - y).norm()) / 5**0.5
    assert float(conditional_distance(in_order(x), in_order(y))) == pytest.approx(expected)


def test_other_positions_are_infinitely_far() -> None:
    x = gaussian(2, 2)
    half, end = torch.tensor([0.5, 1.0]), torch.tensor([0.25, 1.0])
    w = torch.tensor([0.25, 0.75])
    assert conditional_distance(TokenMeasure(x, w, half), TokenMeasure(x, w, end)) == math.inf
    assert conditional_distance(TokenMeasure(x, w, half), TokenMeasure(x, None, half)) == math.inf
    assert conditional_distance(TokenMeasure(x, w, half), TokenMeasure(x, w, half)) == 0


# --- the Sinkhorn divergence


def test_sinkhorn_divergence_is_between_0_and_the_square() -> None:
    """It grows to W_2² as ε falls, and is no distance: its square is what is compared."""
    mu, nu = measure(0, 5, 2), measure(1, 7, 2)
    exact = float(wasserstein(mu, nu)) ** 2
    values = [float(sinkhorn_divergence(mu, nu, epsilon=e)) for e in (10.0, 1.0, 0.1, 0.03)]
    assert 0 < values[0] < values[1] < values[2] < values[3]
    assert values[3] == pytest.approx(exact, rel=0.03)
    assert float(sinkhorn_divergence(mu, mu, epsilon=1.0)) == pytest.approx(0, abs=1e-12)
    far = float(sinkhorn_divergence(mu, nu, epsilon=1e6))
    between = (mu.weights @ mu.points - nu.weights @ nu.points).square().sum()
    assert far == pytest.approx(float(between), rel=1e-4)  # its limit: the means apart


def test_gradient_of_the_sinkhorn_divergence() -> None:
    x, nu = gaussian(4, 2).requires_grad_(), measure(1, 5, 2)
    w = weights(4, 5)
    (gradient,) = torch.autograd.grad(sinkhorn_divergence(TokenMeasure(x, w), nu, epsilon=0.3), x)
    e, h = gaussian(4, 2, seed=3), 1e-5
    ends = [
        float(sinkhorn_divergence(TokenMeasure(x.detach() + s * h * e, w), nu, epsilon=0.3))
        for s in (1.0, -1.0)
    ]
    assert float((gradient * e).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5)


# --- sizes


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_no_size_is_too_large_or_small(d, size) -> None:
    """Squares of these leave the float range; an atom of no weight counts for nothing."""
    x, y = measure(0, 4, d), measure(1, 5, d)
    for other in (y, TokenMeasure(gaussian(4, d, seed=2), x.weights)):
        true = float(wasserstein(x, other))
        scaled = [one.moved(size * one.points) for one in (x, other)]
        assert float(wasserstein(*scaled)) == pytest.approx(size * true, rel=1e-12)
    nothing = torch.cat([x.weights, torch.zeros(1)])
    with_it = TokenMeasure(torch.cat([x.points, size * torch.ones(1, d).double()]), nothing)
    assert float(wasserstein(with_it, y)) == pytest.approx(float(wasserstein(x, y)), rel=1e-12)
    places = torch.tensor([0.0, 0.0, 0.5, 0.5])
    pair = [TokenMeasure(size * gaussian(4, d, seed=i), None, places) for i in (0, 1)]
    plain = [TokenMeasure(gaussian(4, d, seed=i), None, places) for i in (0, 1)]
    true = float(conditional_distance(*plain))
    assert float(conditional_distance(*pair)) == pytest.approx(size * true, rel=1e-12)


def test_costs_that_dwarf_the_distance() -> None:
    """Large powers by all permutations; small moves of unequal weights by the moves themselves."""
    for seed in range(12):
        x, y = gaussian(5, 2, seed=seed), gaussian(5, 2, seed=100 + seed)
        for p in (30.0, 1000.0):
            pairs = torch.cdist(x, y)
            each = [pairs[range(5), list(one)] for one in itertools.permutations(range(5))]
            true = min(float(e.max() * (e / e.max()).pow(p).mean() ** (1 / p)) for e in each)
            found = wasserstein(TokenMeasure(x), TokenMeasure(y), p=p)
            assert float(found) == pytest.approx(true, rel=1e-9)
        mu, e = measure(seed, 5, 2), gaussian(5, 2, seed=200 + seed)
        for h in (1e-4, 1e-8):
            true = float((mu.weights * e.square().sum(1)).sum().sqrt())
            off = float(wasserstein(mu, mu.moved(mu.points + h * e))) / h / true - 1
            assert abs(off) < 1e-15 / h * 10


# --- bad input

X = torch.zeros(2, 3)
GOOD = TokenMeasure(X)
HALF = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TokenMeasure(torch.zeros(0, 3)),
            "`points` should be tokens in a tensor, (n, d), at least one. Found float32, (0, 3).",
        ),
        (lambda: TokenMeasure(torch.zeros(3)), "Found float32, (3,)."),
        (
            lambda: TokenMeasure(X / 0),
            "`points` should be finite. Found NaN or Inf in it, first at",
        ),
        (lambda: TokenMeasure(X.to(torch.complex64)), "Found complex64, (2, 3)."),
        (lambda: TokenMeasure(X, torch.tensor([0.5, 0.6])), "Found the least 0.5 and the sum 1.1."),
        (lambda: TokenMeasure(X, torch.tensor([-0.5, 1.5])), "Found the least -0.5 and the sum 1."),
        (
            lambda: TokenMeasure(X, torch.tensor([torch.nan, 1.0])),
            "`weights` should be finite. Found NaN or Inf in it, first at (0,)",
        ),
        (
            lambda: TokenMeasure(X, torch.ones(3) / 3),
            "`weights` should be numbers in a tensor, (2,). Found float32, (3,).",
        ),
        (lambda: TokenMeasure(X, HALF.clone().requires_grad_()), "`weights` should have no grad"),
        (
            lambda: TokenMeasure(X, None, torch.tensor([0.5, 1.5])),
            "`positions` should be between 0 and 1.",
        ),
        (lambda: wasserstein(GOOD, TokenMeasure(torch.zeros(2, 2))), "Found 3 and 2."),
        (lambda: TokenMeasure(X, X), "`weights` should be numbers in a tensor, (2,). Found"),
        (lambda: GOOD.copied(X[:1, :1]), "`shares` should be numbers in a tensor, (n,)."),
        (
            lambda: wasserstein(GOOD, GOOD, p=0.5),
            "`p` should be finite and at least 1. Found `p = 0.5`.",
        ),
        (lambda: wasserstein(GOOD, GOOD, p=math.nan), "`p` should be finite and at least 1."),
        (lambda: conditional_distance(GOOD, GOOD), "Both measures should have positions."),
        (lambda: sinkhorn_divergence(GOOD, GOOD, epsilon=0.0), "`epsilon` should be positive."),
        (
            lambda: sinkhorn_divergence(measure(0, 4, 2), measure(1, 5, 2), epsilon=1e-300),
            "should end with the right marginals. Found rounding errors of",
        ),
        (
            lambda: sinkhorn_divergence(
                measure(0, 4, 2), measure(1, 5, 2), epsilon=1e-4, max_steps=9
            ),
            "Sinkhorn's iteration should end within 9 steps.",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(make, message, unchecked) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def test_too_many_pairs_are_refused() -> None:
    many = TokenMeasure(torch.zeros(10_000, 2))
    with pytest.raises(InputError, match="at most 67,108,864 pairs"):
        wasserstein(many, many)


def test_what_has_no_answer_is_refused_in_one_line(unchecked) -> None:
    far = torch.tensor([[1.7e308, 0.0]], dtype=torch.float64)
    with pytest.raises(InputError, match="within the float64 range of each other"):
        wasserstein(TokenMeasure(far), TokenMeasure(-far))
    one = TokenMeasure(gaussian(3, 2))
    with pytest.raises(InputError, match="`max_steps` should be a positive integer"):
        sinkhorn_divergence(one, one, epsilon=0.1, max_steps=1.5)
    assert float(wasserstein(one, one, p=np.int64(2))) == 0.0
