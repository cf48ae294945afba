"""How loose bounds were before three sharpenings, and are now: bound over sigma, 1 is exact.

Random layers of six tokens of width 8: the old form is computed from the same parts. Proofs:
docs/theory/local-certificates.md (F2, row-Gram) and docs/theory/ball-certificate.md (moments).

Run: python examples/sharper_bounds.py
"""

from statistics import median

import torch

from lipscope import DotProduct, to_dense
from lipscope.theorems import HeadAt, HeadsAt, heads_of
from lipscope.theorems.derived.ball import Ball
from lipscope.theorems.derived.column_gram import JacobianColumns
from lipscope.theorems.derived.gram_rows import JacobianRows
from lipscope.theorems.derived.local_bounds import local_rows
from lipscope.theorems.derived.row_gram import weighted_rows
from lipscope.theorems.spectrum import eigenvalue


def drawn(seed: int, heads: int) -> tuple[DotProduct, torch.Tensor]:
    """A layer and tokens; attention is flat to sharp."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, o = (torch.randn(4 * heads, 8, generator=g, dtype=torch.float64) for _ in range(4))
    sharp = 3 * float(torch.rand((), generator=g))
    x = torch.randn(6, 8, generator=g, dtype=torch.float64)
    return DotProduct(sharp * q, sharp * k, v, o.T, heads=heads), x


def sigma(layer: DotProduct, x: torch.Tensor) -> float:
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

for name, pairs in (("F2", f2), ("row-Gram, one head", gram[1]), ("row-Gram, four heads", gram[4])):
    before, after = (median(column) for column in zip(*pairs, strict=True))
    print(f"{name:21} median {before:.3f} before, {after:.3f} now")
print(f"second moments over a ball of 0.3 token norms: median {median(moments):.2f} of before")
