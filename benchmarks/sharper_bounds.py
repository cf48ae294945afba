"""How loose bounds were before some sharpenings, and are now: bound over sigma, 1 is exact.

Random layers of six tokens of width 8: the old form is computed from the same parts. Proofs:
docs/theory/local-certificates.md (F2, row-Gram, residual) and docs/theory/ball-certificate.md
(moments).

Run: python benchmarks/sharper_bounds.py
"""

from statistics import median

import torch
from torch import nn

from lipscope import DotProduct, to_dense
from lipscope.linalg import eigenvalue
from lipscope.theorems import (
    HeadAt,
    HeadsAt,
    Normed,
    Residual,
    bounds_at,
    heads_of,
)
from lipscope.theorems.derived.ball import Ball
from lipscope.theorems.derived.local_bounds import local_rows
from lipscope.theorems.derived.row_gram import JacobianColumns, JacobianRows, weighted_rows


def drawn(seed: int, heads: int) -> tuple[DotProduct, torch.Tensor]:
    """A layer and tokens; attention is flat to sharp."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, o = (torch.randn(4 * heads, 8, generator=g, dtype=torch.float64) for _ in range(4))
    sharp = 3 * float(torch.rand((), generator=g))
    x = torch.randn(6, 8, generator=g, dtype=torch.float64)
    return DotProduct(sharp * q, sharp * k, v, o.T, heads=heads), x


def sigma(layer: DotProduct | Normed | Residual, x: torch.Tensor) -> float:
    """Dense."""
    return float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))


def sums(at: Ball) -> float:
    """What F2 over a ball was: two maxima, added."""
    return float((at.row @ at.p.upper).max().sqrt() + at.own.max())


f2, gram = [], {1: [], 4: []}
for seed in range(40):
    layer, x = drawn(seed, 1)
    head, true = HeadAt(heads_of(layer)[0], x), sigma(layer, x)
    f2.append((sums(Ball(head, 0.0)) / true, local_rows(head) / true))
for heads, count in ((1, 20), (4, 12)):
    for seed in range(count):
        layer, x = drawn(seed, heads)
        together, true = HeadsAt(heads_of(layer, fold=False), x, layer.output), sigma(layer, x)
        rows, columns = (
            weighted_rows(side(together)).value / true for side in (JacobianRows, JacobianColumns)
        )
        gram[heads].append((rows, min(rows, columns)))
moments = []
for seed in range(20):
    layer, x = drawn(seed, 1)
    head = HeadAt(heads_of(layer)[0], x)
    inside = Ball(head, 0.3 * float(x.norm(dim=1).mean()))
    y = inside.p.upper[:, :, None].sqrt() * head.y(slice(None))
    moments += (inside.sums["upper_v"] / eigenvalue(y.mT @ y)).tolist()

residual: dict[str, list[tuple[float, float]]] = {"plain": [], "pre-norm": [], "post-norm": []}
for seed in range(12):
    layer, x = drawn(seed, 4)
    assert layer.output is not None
    layer = layer.replace(output=layer.output / 4)  # beside the stream, as in models
    norm = nn.LayerNorm(8, dtype=torch.float64)
    norm.weight.data += 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(seed)).double()
    inner = Normed(layer, norm.requires_grad_(False))
    for form, branch, whole in (
        ("plain", layer, Residual(layer)),
        ("pre-norm", inner, Residual(inner)),
        ("post-norm", layer, Residual(layer, outer=norm)),
    ):
        bare, inside = (
            bounds_at(one, x, names=["row_gram_joint"], sharp=True)[0].value or 0.0
            for one in (branch, whole)
        )
        slope, true = 1.0, sigma(whole, x)
        if whole.outer is not None:  # what 1 + ‖J‖ is multiplied by
            slopes = torch.func.vmap(torch.func.jacrev(norm))(x + layer(x))
            slope = float(torch.linalg.matrix_norm(slopes, 2).max())
        residual[form].append((slope * (1 + bare) / true, inside / true))
for name, pairs in (("F2", f2), ("row-Gram, one head", gram[1]), ("row-Gram, four heads", gram[4])):
    before, after = (median(column) for column in zip(*pairs, strict=True))
    print(f"{name:21} median {before:.3f} before, {after:.3f} now")
print(f"second moments over a ball of 0.3 token norms: median {median(moments):.2f} of before")
for form, pairs in residual.items():
    before, after = (median(column) for column in zip(*pairs, strict=True))
    print(f"row-Gram of x + f(x), {form:9} median {before:.3f} with 1 + |J|, {after:.3f} now")
