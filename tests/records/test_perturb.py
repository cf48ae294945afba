"""Moves of one size, and what a few samples say about a mean or a share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lipscope import DotProduct
from lipscope.attacks import ascent_move, of_size, random_move, sign_move
from lipscope.measures import repeated_tokens
from lipscope.records.sampling import mean_interval, rank_correlation, share_interval
from lipscope_experiments.castin2024.robustness import split_change
from lipscope_experiments.questions.margin_gain import deepfool
from lipscope_experiments.simple_layers import top
from small import drawn, line, sigma

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("size", [1e-3, 2.0])
def test_all_moves_have_the_size(size: float) -> None:
    layer = drawn(0)
    moves = [
        random_move(X, size, 1),
        sign_move(layer, X, size, 1),
        ascent_move(layer, X, size, 1, steps=3),
        of_size(top(layer.linearise(X), 1).v, size),
        of_size(X, size),
    ]
    for move in moves:
        assert float(move.norm()) == pytest.approx(size, rel=1e-9)
    signs = sign_move(layer, X, size, 1)
    assert float(signs.abs().std()) < 1e-12 * size


def test_ascent_reaches_sigma_for_small_moves() -> None:
    layer, size = drawn(2), 1e-4
    move = ascent_move(layer, X, size, 0, steps=60)
    change = float((layer(X + move) - layer(X)).norm())
    assert change / size == pytest.approx(sigma(layer, X), rel=1e-2)


def test_splitting_a_duplicated_input() -> None:
    """One dimension, A = -1, X = (-3, -0.3): copies moved apart do more than any joint move."""
    layer, x = line(), torch.tensor([[-3.0], [-0.3]]).double()
    exact = repeated_tokens(layer, x, (2, 2))
    assert exact.splitting > exact.moving
    change = split_change(layer, x, 1e-5, 0)
    assert change / 1e-5 == pytest.approx(exact.splitting, rel=1e-3)


def test_equal_tokens_cannot_be_split() -> None:
    layer = DotProduct(*3 * [torch.eye(2).double()])
    assert split_change(layer, torch.ones(3, 2).double(), 1e-6, 0) < 1e-11


def test_intervals_against_scipy() -> None:
    values = [1.0, 2.5, 3.0, 4.5]
    mean, low, high = mean_interval(values)
    expected = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert (low, high) == pytest.approx(expected)
    assert math.isnan(mean_interval([1.0])[1])
    for hits in (0, 3, 10):
        exact = stats.binomtest(hits, 10).proportion_ci(0.95, method="exact")
        assert share_interval(hits, 10) == pytest.approx((exact.low, exact.high))


def test_the_smallest_flip_of_a_linear_read_out_is_the_nearest_hyperplane() -> None:
    """Distance to the nearest of the planes between the answer and another class."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        weight = torch.randn(4, X.numel(), generator=g).double()
        scores = weight @ X.flatten()
        margin, gain, move = deepfool(lambda e, w=weight: w @ (X + e).flatten(), X)
        answer = int(scores.argmax())
        others = [k for k in range(4) if k != answer]
        distances = [
            float((scores[answer] - scores[k]) / (weight[answer] - weight[k]).norm())
            for k in others
        ]
        rival = max(others, key=scores.__getitem__)
        assert margin == pytest.approx(float(scores[answer] - scores[rival]))
        assert gain == pytest.approx(float((weight[answer] - weight[rival]).norm()))
        # Bisection leaves 2^-12 of a move that goes 2 % beyond the plane.
        assert move is not None and float(move.norm()) == pytest.approx(min(distances), rel=1e-3)


def test_an_answer_that_nothing_changes_has_no_move() -> None:
    fixed = torch.tensor([2.0, 1.0, 0.0, -1.0]).double()
    assert deepfool(lambda e: fixed + 1e-9 * e.sum(), X)[2] is None


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_interval_of_a_rank_correlation_covers(rho: float) -> None:
    """Normal pairs, whose rank correlation is 6/π asin(ρ/2): 95 % of intervals hold it."""
    rng = np.random.default_rng(0)
    truth, held, runs = 6 / math.pi * math.asin(rho / 2), 0, 400
    for _ in range(runs):
        x, noise = rng.normal(size=(2, 60))
        y = rho * x + math.sqrt(1 - rho**2) * noise
        found, low, high = rank_correlation(x.tolist(), y.tolist())
        assert low < found < high
        held += low <= truth <= high
    # Three standard deviations of a count at 95 %, and a half per cent for the approximation.
    assert abs(held / runs - 0.95) < 3 * math.sqrt(0.95 * 0.05 / runs) + 0.005
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0])[0])
