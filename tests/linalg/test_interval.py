"""The statements of docs/theory/interval.md on matrices whose singular vectors are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lipscope import linearise
from lipscope.linalg.singular import (
    Cycle,
    Evidence,
    closed_form_factor,
    golub_kahan,
    start_threshold,
)

N, M, STEPS, STARTS = 60, 65, 5, 200
SPECTRA = {
    "decaying": 0.8 ** torch.arange(N, dtype=torch.float64),
    "one above a cluster": torch.cat(
        [torch.tensor([1.05]), torch.linspace(1, 0.97, N - 1)]
    ).double(),
    "equally spaced": torch.linspace(1, 0.1, N, dtype=torch.float64),
    "dominant": torch.cat([torch.tensor([5.0]), torch.linspace(1, 0.5, N - 1)]).double(),
}


def polynomials(alpha, beta, lam):
    """``p_0 … p_k`` at ``lam`` by the recurrence of the page, without rescaling."""
    p = [0.0, 1.0]
    link = 0.0
    for j in range(len(alpha)):
        diagonal = alpha[j] ** 2 + (beta[j - 1] ** 2 if j else 0.0)
        following = alpha[j] * beta[j]
        p.append(((lam - diagonal) * p[-1] - link * p[-2]) / following)
        link = following
    return np.array(p[1:])


@pytest.mark.parametrize("seed", range(20))
def test_evidence_is_the_sum_of_squares_of_the_page(seed):
    """``sum_j p_j^2 prod_c q_c^2`` with and without a restart, from the plain recurrence."""
    generator = np.random.default_rng(seed)
    runs = []
    for steps in generator.integers(1, 12, 2):
        alpha, beta = generator.uniform(0.5, 2, steps), generator.uniform(0.1, 1, steps)
        bidiagonal = np.diag(alpha) + np.diag(beta[:-1], 1)
        runs.append((alpha, beta, np.linalg.svd(bidiagonal)))
    (alpha, beta, first), (before, coupled, second) = runs
    theta = max(first[1][0], second[1][0])  # beyond it all polynomials increase
    cycle = Cycle(before, coupled, np.abs(second[2][0]))
    for x in (1.001, 1.1, 3.0):
        total = (polynomials(alpha, beta, (x * theta) ** 2) ** 2).sum()
        growth = cycle.weights @ polynomials(before, coupled, (x * theta) ** 2)[:-1]
        for cycles, whole in (([], total), ([cycle], total * growth**2)):
            evidence = Evidence(alpha, beta, cycles, theta)
            assert evidence.excludes(x, whole**-0.5 * (1 + 1e-7))
            assert not evidence.excludes(x, whole**-0.5 * (1 - 1e-7))


def test_evidence_of_couplings_that_vanish_is_no_overflow():
    ones = np.ones(3)
    assert Evidence(ones, np.array([0.5, 0.0, 0.5]), [], 1.2).excludes(1.5, 1e-3)


@pytest.mark.parametrize("name", SPECTRA)
def test_the_statements_hold_run_by_run(name):
    generator = torch.Generator().manual_seed(len(name))
    spectrum = SPECTRA[name]
    left = torch.linalg.qr(torch.randn(M, N, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64)).Q
    matrix = left @ torch.diag(spectrum) @ right.T
    op = linearise(lambda x: x @ matrix.T, torch.zeros(N, dtype=torch.float64))
    start = torch.randn(STARTS, N, generator=generator, dtype=torch.float64)
    *_, state = golub_kahan(op, start, STEPS)
    sigma = float(spectrum[0])
    missed = {delta: np.zeros(3) for delta in (0.3, 0.1, 0.01)}
    used, chebyshev = 0.0, 0.0
    restart = []
    for i in range(STARTS):
        alpha, beta = state.alpha[i].numpy(), state.beta[i].numpy()
        b = abs(float((start[i] / start[i].norm()) @ right[:, 0]))
        bidiagonal = np.diag(alpha) + np.diag(beta[:-1], 1)
        _, values, rows = np.linalg.svd(bidiagonal)
        theta, q = values[0], rows[0]
        # Statement 5, step 1, and Statement 4, step 5
        used = max(used, b**2 * (polynomials(alpha, beta, sigma**2) ** 2).sum())
        excess = math.sqrt(max((sigma / theta) ** 2 - 1, 0.0))
        part = math.sinh((2 * STEPS - 1) * math.asinh(excess)) * b / math.sqrt(1 - b * b)
        chebyshev = max(chebyshev, part)
        # Statement 6
        y = torch.from_numpy(q) @ state.v[i, :-1]
        at_top, at_theta = (polynomials(alpha, beta, lam)[:STEPS] for lam in (sigma**2, theta**2))
        growth = (at_top @ at_theta) / np.linalg.norm(at_theta)
        assert math.isclose(abs(float(y @ right[:, 0])), b * growth, rel_tol=1e-6)
        assert np.linalg.norm(at_theta) >= 1 - 1e-12
        restart.append((y, Cycle(alpha, beta, np.abs(q))))
        evidence = Evidence(alpha, beta, [], theta)
        for delta, count in missed.items():
            t = start_threshold(N, delta)
            count[0] += sigma > theta * evidence.upper_factor(t) * (1 + 1e-12)
            count[1] += sigma > theta * closed_form_factor(STEPS, t) * (1 + 1e-12)
    *_, again = golub_kahan(op, torch.stack([y for y, _ in restart]), STEPS)
    for i, (_, cycle) in enumerate(restart):
        alpha, beta = again.alpha[i].numpy(), again.beta[i].numpy()
        theta = np.linalg.norm(np.diag(alpha) + np.diag(beta[:-1], 1), 2)
        evidence = Evidence(alpha, beta, [cycle], theta)
        for delta, count in missed.items():
            factor = evidence.upper_factor(start_threshold(N, delta))
            count[2] += sigma > theta * factor * (1 + 1e-12)
    print(f"\n{name}: b^2 S {used:.6f}, step 5 {chebyshev:.2f}", end="")
    assert used <= 1 + 1e-9
    assert chebyshev <= 1 + 1e-9
    for delta, count in missed.items():
        print(f", delta {delta}: {np.round(count / STARTS, 3)}", end="")
        # Four standard errors of a share of delta.
        assert (count / STARTS <= delta + 4 * math.sqrt(delta * (1 - delta) / STARTS)).all()
