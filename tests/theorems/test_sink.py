"""One token's column: exact, below sigma, above it with the rest, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hostile import EXTENDED, KINDS, hostile, jacobian
from layers import all_cases, eye, sigma, single, value
from lipscope import to_dense
from lipscope.attention import Attention
from lipscope.theorems import LayerSubject, NotApplicableError, bounds_at
from searched import searched

ROUNDING = 1e-9


def both(layer: Attention, x: torch.Tensor, part: str = "attention") -> tuple[float, float]:
    shared = LayerSubject(layer, part, x=x)
    return value("sink_column", shared), value("sink_column_upper", shared)


@searched(1, 4)
def test_it_is_the_largest_column_and_sigma_lies_between(count: int) -> None:
    """Against the dense Jacobian, for every mask, bias, grouping and rotary embedding."""
    seen = 0
    for regime, layer, x in all_cases(count):
        for part in ("attention", "heads"):
            try:
                low, high = both(layer, x, part)
            except NotApplicableError:
                continue
            dense = to_dense(layer.linearise(x, map=part))
            columns = dense.unflatten(1, (len(x), -1)).transpose(0, 1)
            largest = float(torch.linalg.matrix_norm(columns, 2).max())
            truth = float(torch.linalg.matrix_norm(dense, 2))
            assert low == pytest.approx(largest, rel=1e-6), (regime, part)
            assert low <= largest * (1 + ROUNDING), (regime, part)
            assert truth * (1 - ROUNDING) <= high <= 2 * truth, (regime, part)
            seen += 1
    assert seen > 10 * count


@pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")
@pytest.mark.parametrize("kind", KINDS)
def test_no_column_is_above_sigma_where_layers_cancel_or_explode(kind: str) -> None:
    for seed in range(12):
        layer, x = hostile(kind, seed)
        (low,) = bounds_at(layer, x, names=["sink_column"], sharp=True)
        if low.value is None:
            continue
        truth = jacobian(layer, x)
        size = max(float(np.abs(truth).max()), 1e-300)
        matrix = (truth / size).astype(float).reshape(truth.shape[0] * truth.shape[1], -1)
        assert low.value <= size * np.linalg.norm(matrix, 2) * (1 + 1e-12), seed


def test_uniform_attention() -> None:
    """The column has ``1 / √n`` of sigma, and the rest makes up for it exactly."""
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = both(single(0 * eye(3)), x)
    assert low == pytest.approx(1 / 3) and high == pytest.approx(1.0, rel=1e-6)


def test_one_hot_attention_on_one_token() -> None:
    """Every row reads token 0: both bounds are ``√n ‖V‖`` (Theorem 3.7's in-degree)."""
    x = torch.ones(6, 2, dtype=torch.float64)
    x[0] = 40.0
    v = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    low, high = both(single(eye(2), v), x)
    assert low == pytest.approx(2 * math.sqrt(6)) and high == pytest.approx(2 * math.sqrt(6))


def test_two_clusters() -> None:
    """The lower bound of two clusters is one of the column of their single token."""
    n, radius = 12, 1.3
    x = torch.full((n, 1), -radius, dtype=torch.float64)
    x[0] *= -1
    layer = single(-eye(1))
    stated = value("castin_prop_3_4_strengthened", layer, num_tokens=n, radius=radius)
    assert both(layer, x)[0] >= stated * (1 - ROUNDING)


def test_frozen_attention_is_no_lower_bound() -> None:
    """Scores may take away what values give: the proof needs the whole column."""
    layer = single(-1.75 * eye(1))
    x = torch.tensor([[-5.2], [-0.43]], dtype=torch.float64)
    q, k, _ = layer.project(x)
    frozen = float(layer.weights(q, k)[0].norm(dim=0).max())
    read = 1 / (1 + math.exp(-1.75 * 0.43 * (5.2 - 0.43)))  # the first row has 1 - 7e-20
    low, _ = both(layer, x)
    assert frozen == pytest.approx(math.hypot(1.0, read)) and low < sigma(layer, x) < 0.73 * frozen
