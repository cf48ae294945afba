"""Layers of random weights on normal laws in several dimensions: limits, and particles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope import Attention, DotProduct, L2Attention, SinkhornAttention
from lipscope.dynamics import evolve, gaussian_flow
from lipscope.linalg import start_named
from lipscope_experiments.experiment import ValueJob
from lipscope_experiments.findings import Record, Table, average, chosen, grouped, share


def normal(name: str, *shape: int) -> Tensor:
    """Standard normal numbers by name."""
    return torch.randn(*shape, generator=start_named(name), dtype=torch.float64)


def law(name: str, d: int) -> Tensor:
    """A covariance: of Wishart's law with d degrees of freedom."""
    root = normal(name, d, d)
    return root @ root.T


def eye(d: int) -> Tensor:
    """The identity."""
    return torch.eye(d, dtype=torch.float64)


# --- other layers: how many directions are left


def _dot_product(name: str, d: int) -> Attention:
    q = normal(name, d // 2, d)
    return DotProduct(q, -q, _value(name, d), scale=d**-0.5)


def _two_heads(name: str, d: int) -> Attention:
    q = normal(name, 2 * (d // 2), d)
    value = _value(name, d)
    return DotProduct(
        q, -q, torch.cat([value, value]), torch.cat([eye(d)] * 2, 1) / 2, heads=2, scale=d**-0.5
    )


def _l2(name: str, d: int) -> Attention:
    return L2Attention(normal(name, d // 2, d), _value(name, d))


def _sinkhorn(name: str, d: int) -> Attention:
    q = normal(name, d // 2, d)
    return SinkhornAttention(q, -q, _value(name, d), scale=d**-0.5)


def _value(name: str, d: int) -> Tensor:
    """Positive semidefinite, as in public code."""
    v = normal(f"{name}|v", d, d)
    return v.T @ v / d


KINDS = {"dot product": _dot_product, "two heads": _two_heads, "Sinkhorn": _sinkhorn}
ALL = {**KINDS, "L2": _l2}  # the last grows exponentially: it has no limit


def limit_job(kind: str, d: int, seed: int) -> ValueJob:
    """What a law has become at t = 10⁴."""

    def compute() -> Record:
        name = f"limit|{d}|{seed}"
        layer, cov = KINDS[kind](name, d), law(f"{name}|start", d)
        found = gaussian_flow(layer, torch.zeros(d), cov, [1e4], rtol=1e-6)
        return {"status": found.note or "done", "ranks": found.ranks(1e-2)[-1]}

    return {"kind": kind, "d": d, "seed": seed}, compute


def limit_table(found: Sequence[Record]) -> Table:
    """Blow-ups, and ranks of the others."""
    lines = []
    for kind in KINDS:
        for d, mine in grouped(chosen(found, kind=kind), "d"):
            ends = [r for r in mine if r["status"] == "done"]
            low = sum(r["ranks"] <= (d + 1) // 2 for r in ends)
            words = share(low, len(ends)) if ends else "–"
            blown = sum(r["status"] == "blow-up" for r in mine)
            lines.append((kind, str(d), share(blown, len(mine)), words))
    columns = ("layer", "d", "blow-up", "others: rank at most ⌈d/2⌉ at t = 10⁴")
    title = "V positive semidefinite, K = -Q: eigenvalues above 1 % of the largest"
    return Table(title, columns, tuple(lines))


def plane_job(kind: str, n: int, seed: int) -> ValueJob:
    """Particles beside the closure, as far as t = 1/2."""

    def compute() -> Record:
        layer = ALL[kind](f"plane|{kind}", 2)
        m, cov = 0.5 * normal("plane|m", 2), 0.5 * law("plane|law", 2) / 2
        root = torch.linalg.cholesky(cov)
        x = m + normal(f"plane|{n}|{seed}", n, 2) @ root.T
        end = evolve(layer, x, [0.5], rtol=1e-4).end
        flow = gaussian_flow(layer, m, cov, [0.5])
        size = float(flow.covariances[-1].norm())
        return {
            "mean": float((end.mean(0) - flow.means[-1]).norm()) / size**0.5,
            "cov": float((end.T.cov() - flow.covariances[-1]).norm()) / size,
        }

    return {"kind": kind, "n": n, "seed": seed}, compute


def plane_table(found: Sequence[Record]) -> Table:
    """Errors of their means and covariances."""
    lines = []
    for (kind, n), mine in grouped(found, "kind", "n"):
        errors = (average([r[key] for r in mine]) for key in ("mean", "cov"))
        lines.append((kind, f"{n:,}", *errors))
    columns = ("layer", "particles", "mean", "covariance")
    title = "Particles against the closure in the plane, t = 0.5: relative errors"
    return Table(title, columns, tuple(lines))
