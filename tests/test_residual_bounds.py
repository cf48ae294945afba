"""The map `residual`: bounds that hold for attention with the stream beside it, and norms around."""

import itertools

import pytest
import torch
from torch import nn

import lipscope as ls
from command import TEXT
from hostile import EXTENDED, hostile, jacobian, sigma_from_below
from layers import REGIMES, draw, draw_variant
from lipscope import DotProduct, to_dense
from lipscope.records.comparison import by_row, looseness
from lipscope.theorems import Normed, Residual, bounds_at, catalogue
from test_normed import norm
from tiny import TINY

ROUNDING = 1e-9
FORMS = ("plain", "pre-norm", "post-norm", "both sides", "own output")


def square(layer: DotProduct, seed: int) -> DotProduct:
    """The layer with an output projection onto the width of its tokens."""
    g = torch.Generator().manual_seed(seed)
    concat = layer.value_width * layer.num_heads
    return layer.replace(output=torch.randn(5, concat, generator=g, dtype=torch.float64))


def formed(form: str, layer: DotProduct, kind: type, eps: float, seed: int) -> Residual:
    before = norm(kind, 5, eps, seed)
    behind = norm(kind, 5, eps, seed + 1)
    branch = Normed(layer, before) if form in ("pre-norm", "both sides") else layer
    return Residual(
        branch,
        second=behind if form in ("both sides", "own output") else None,
        outer=behind if form == "post-norm" else None,
    )


def dense(layer: Residual, x: torch.Tensor) -> torch.Tensor:
    """By automatic differentiation of all modules."""
    return torch.func.jacrev(layer.__call__)(x).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("form", FORMS)
def test_no_bound_of_a_residual_map_is_violated(form: str) -> None:
    """Against the dense Jacobian, of every kind of layer; each form of norms around it."""
    sound = {t.name for t in catalogue() if t.sound and t.kind == "upper"}
    checked: dict[str, int] = {}
    for (a, kind), (b, regime) in itertools.product(
        enumerate((nn.LayerNorm, nn.RMSNorm)), enumerate(REGIMES)
    ):
        seed, eps = b % 3, (1e-12, 0.3)[(a + b) % 2]
        attention, x = draw(regime, seed)
        layer = formed(form, square(attention, seed), kind, eps, seed)
        truth = dense(layer, x)
        assert torch.allclose(to_dense(layer.linearise(x)), truth, atol=1e-8 * truth.abs().max())
        sigma = float(torch.linalg.matrix_norm(truth, 2))
        for bound in bounds_at(layer, x, metric="frobenius", sharp=b % 3 == a):
            if bound.value is not None and bound.theorem in sound:
                checked[bound.theorem] = checked.get(bound.theorem, 0) + 1
                assert bound.value >= sigma * (1 - ROUNDING), (bound.theorem, regime, kind, eps)
    assert {"local_norms", "local_rows", "local_blocks", "row_gram_joint"} <= {*checked}
    assert {"global_rows_capped", "mean_field"} <= {*checked}
    assert min(checked.values()) >= 2, checked
