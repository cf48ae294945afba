"""Flows of normal laws: closures by quadrature, exact solutions, particles, blow-up, rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from agreement import gaussian
from lipscope import DotProduct, L2Attention, SinkhornAttention
from lipscope.dynamics import closure, evolve, gaussian_flow
from lipscope.measures import TokenMeasure
from test_dynamics import ONE, eye, single


def hermite(m: Tensor, cov: Tensor, side: int = 30) -> TokenMeasure:
    """Atoms whose moments are those of a normal law up to a high order."""
    z, w = np.polynomial.hermite_e.hermegauss(side)
    z, w = torch.tensor(z), torch.tensor(w / w.sum())
    grid = torch.cartesian_prod(z, z) if len(m) == 2 else z[:, None]
    weights = torch.cartesian_prod(w, w).prod(-1) if len(m) == 2 else w
    return TokenMeasure(m + grid @ torch.linalg.cholesky(cov).T, weights)


def law(d: int = 2) -> tuple[Tensor, Tensor]:
    root = 0.4 * gaussian(d, d, seed=7) + 0.4 * eye(d)
    return 0.5 * gaussian(d, seed=8), root @ root.T


@pytest.mark.parametrize("kind", [DotProduct, L2Attention])
def test_closures_by_quadrature(kind) -> None:
    q, v, o = (0.5 * gaussian(4, 2, seed=i) for i in range(3))
    fields = {"query": q, "value": v, "output": o.T, "heads": 2}
    if kind is DotProduct:
        biases = {"query_bias": gaussian(4), "value_bias": gaussian(4), "output_bias": gaussian(2)}
        fields |= {"key": 0.5 * gaussian(4, 2, seed=5), **biases}
    layer, (m, cov), x = kind(**fields), law(), gaussian(3, 2)
    atoms = hermite(m, cov)
    expected = layer(x, atoms.points, log_weights=atoms.weights.log())
    slope, shift = closure(layer)(m, cov)
    torch.testing.assert_close(x @ slope.T + shift, expected, rtol=1e-10, atol=1e-10)


def test_closure_of_sinkhorn_by_its_own_iteration() -> None:
    """Weighted atoms in one dimension, rows and columns scaled in turn."""
    m, var, a = 0.4, 0.8, 1.3
    atoms = hermite(torch.tensor([m]).double(), var * ONE, side=60)
    x, w = atoms.points[:, 0], atoms.weights
    s, f, g = a * x[:, None] * x, torch.zeros(60).double(), torch.zeros(60).double()
    for _ in range(500):
        f = -(s + g + w.log()).logsumexp(1)
        g = -(s + f[:, None] + w.log()[:, None]).logsumexp(0)
    read = (s + f[:, None] + g + w.log()).exp() @ x
    slope, shift = closure(SinkhornAttention(a * ONE, ONE, ONE))(torch.tensor([m]), var * ONE)
    near = (x - m).abs() < 2
    torch.testing.assert_close((x * slope[0, 0] + shift)[near], read[near], rtol=1e-6, atol=1e-6)


def test_sinkhorn_closure_solves_its_equation() -> None:
    """(Σ - C Σ^-1 C^T) A = C Σ^-1 of the coupling's covariance, for any A."""
    (m, cov), a = law(3), gaussian(3, 3, seed=2)
    slope, _ = closure(SinkhornAttention(a, eye(3), eye(3), scale=1.0))(m, cov)
    c = slope @ cov
    left = (cov - c @ torch.linalg.solve(cov, c.T)) @ a
    torch.testing.assert_close(left, slope, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [DotProduct, L2Attention, SinkhornAttention])
def test_particles_follow_their_closure(kind) -> None:
    """300 tokens with the exact first moments: what is left is of the order of the fourth ones."""
    m, cov = law()
    x = gaussian(300, 2)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(x.T.cov(correction=0))).T
    x = m + x @ torch.linalg.cholesky(cov).T
    q, v = 0.5 * gaussian(2, 2, seed=1), gaussian(2, 2, seed=2)
    layer = kind(q, v) if kind is L2Attention else kind(q, 0.5 * eye(2), v)
    found, law_ = evolve(layer, x, [0.5], rtol=1e-4), gaussian_flow(layer, m, cov, [0.5])
    torch.testing.assert_close(found.end.mean(0), law_.means[-1], rtol=0.02, atol=0.02)
    moved = found.end.T.cov(correction=0)
    torch.testing.assert_close(moved, law_.covariances[-1], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("va", [1.0, -1.0])
def test_one_dimension_exactly(va) -> None:
    """σ² = σ_0² / (1 - 2 v a σ_0² t): blow-up at 1 / (2 v a σ_0²), or decay like 1 / t."""
    found = gaussian_flow(single(va * eye(1)), torch.zeros(1), 2 * ONE, [0.0, 0.2, 3.0])
    expected = 2 / (1 - 4 * va * 0.2)
    assert float(found.covariances[1]) == pytest.approx(expected, rel=1e-7)
    if va > 0:
        assert found.blow_up == pytest.approx(0.25, rel=1e-7)
        assert bool(found.covariances.isfinite().all())
    else:
        assert found.blow_up is None and found.status == "done"


@pytest.mark.parametrize("d", [2, 5])
def test_any_dimension_exactly(d) -> None:
    """V = I: Σ^-1 = Σ_0^-1 - t (A + A^T), for every A."""
    (m, cov), a = law(d), gaussian(d, d, seed=3)
    both = a + a.T
    first = 1 / float(torch.linalg.eigvals(cov @ both).real.max())
    found = gaussian_flow(single(a), m, cov, [0.5 * first, 2 * first])
    exact = torch.linalg.inv(torch.linalg.inv(cov) - 0.5 * first * both)
    torch.testing.assert_close(found.covariances[0], exact, rtol=1e-6, atol=1e-8)
    assert found.blow_up == pytest.approx(first, rel=1e-7)


def test_rank_collapses_to_the_kernel_and_euler_misses_it() -> None:
    """V = I, A = -Q^T Q: Σ tends to its inverse's compression to ker Q; the rank is its dimension.

    Euler's steps, projected to semidefinite matrices as in public code, lose all of it.
    """
    q = torch.tensor([[2.0, 0.0, 0.0]]).double()
    cov = torch.tensor([[6.0, 3.0, 2.0], [3.0, 4.0, 1.0], [2.0, 1.0, 3.0]]).double()
    layer = DotProduct(q, -q, eye(3), scale=1.0)
    found = gaussian_flow(layer, torch.zeros(3), cov, [1.0, 1e6])
    limit = torch.linalg.inv(torch.linalg.inv(cov)[1:, 1:])
    torch.testing.assert_close(found.covariances[-1][1:, 1:], limit, rtol=1e-5, atol=1e-5)
    assert found.ranks() == [3, 2]
    stepped = cov
    for _ in range(500):
        moved = stepped @ (-q.T @ q) @ stepped
        values, vectors = torch.linalg.eigh(stepped + 0.09 * (moved + moved.T))
        stepped = vectors * values.clamp_min(1e-14) @ vectors.T
    assert int((torch.linalg.eigvalsh(stepped) > 0.1).sum()) == 1


def test_only_dot_products_blow_up() -> None:
    """Sinkhorn and L2 grow no faster than exponentially: beyond the float range is no blow-up."""
    for layer in (SinkhornAttention(eye(2), eye(2), eye(2)), L2Attention(eye(2), eye(2))):
        found = gaussian_flow(layer, torch.zeros(2), eye(2), [1.0, 1e4], rtol=1e-3)
        assert found.blow_up is None and found.note == "overflow"
