"""The bound of a network holds, whatever is tried, and its parts are near to what is reached."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lipscope as ls

D = 8


def weight(rows: int, columns: int, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def ascend(network, x: Tensor, radius: float, steps: int = 150) -> float:
    """The largest quotient found in the max-over-tokens norm, for inputs of a radius."""
    best = 0.0
    x = x.clone().requires_grad_()
    step = torch.optim.Adam([x], lr=0.05 * radius)
    for _ in range(steps):
        j = torch.func.jacrev(network)(inside(x, radius))
        n, d = x.shape
        blocks = j.reshape(n, -1, n, d)
        norms = [_row(row) for row in blocks]
        value = torch.stack(norms).max()
        best = max(best, float(value.detach()))
        step.zero_grad()
        (-value).backward()
        step.step()
    return best


def inside(x: Tensor, radius: float) -> Tensor:
    return x * (radius / x.norm(dim=1, keepdim=True)).clamp_max(1)


def _row(row: Tensor) -> Tensor:
    """Lower value of ``max_{|e_j| <= 1} |Σ_j J_ij e_j|``, ``row`` ``(d_out, n, d)``."""
    with torch.no_grad():
        g = torch.linalg.eigh(torch.einsum("ond,pnd->op", row, row)).eigenvectors[:, -1]
        for _ in range(20):
            pulled = torch.einsum("o,ond->nd", g, row)
            e = pulled / pulled.norm(dim=1, keepdim=True).clamp_min(1e-300)
            g = torch.einsum("ond,nd->o", row, e)
            g = g / g.norm().clamp_min(1e-300)
    return torch.einsum("o,ond->nd", g, row).norm(dim=1).sum()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_no_ascent_exceeds_the_bound_of_a_layer(heads: int) -> None:
    q, k, v, o = (weight(D, D, seed, D**-0.5) for seed in range(4))
    layer = ls.DotProduct(q, k, v, o, heads=heads)
    for radius in (0.5, 2.0):
        bound = float(ls.lipschitz_bound(layer, radius=radius))
        x = weight(5, D, 9, 3 * radius)
        assert ascend(layer, x, radius, 40) <= bound
