"""Every map, metric, move and read, and single heads, against dense Jacobians."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope import Measurement
from tiny import TEXT, TINY, encoder
from truth import (
    ALL_MAPS,
    FAMILIES,
    HEADS,
    IDS,
    LAYER,
    WIDTH,
    N,
    Truth,
    asked,
    frobenius_of,
    heads_of,
    measured,
    shares,
    top,
    truth_of,
)

# (move, read) with the tokens that they mean, spelled out
CHOICES: dict[str, list[tuple[str, str, list[int], list[int]]]] = {
    "frobenius": [
        ("all", "all", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("first", "last", [0], [5]),
        ("not-first", "all", [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("1:3", "2:4", [1, 2, 3], [2, 3, 4]),
    ],
    "token-relative": [
        ("all", "all", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("last", "last", [5], [5]),
        ("0:4", "not-first", [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ("all", "first", [0, 1, 2, 3, 4, 5], [0]),
    ],
}


@pytest.mark.parametrize("metric", ["frobenius", "token-relative"])
@pytest.mark.parametrize("name", ALL_MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_metric_move_and_read(family, name, metric):
    jacobian, x, output = truth_of(family, name)
    for move, read, moved, seen in CHOICES[metric]:
        rows = measured(
            family, map=name, metric=metric, move=move, read=read, rest=True, average=True
        )
        assert len(rows) == 1
        row = rows[0]
        matrix = asked(jacobian, x, metric, moved, seen)
        sigma = top(matrix)
        where = (family, name, metric, move, read)
        assert row.status == "converged", where
        assert row.sigma is not None and row.upper is not None
        # 1e-6: norms and angles of Llama are float32 in transformers, float64 in lipscope
        assert math.isclose(row.sigma, sigma, rel_tol=1e-6, abs_tol=1e-12), where
        assert row.sigma <= row.upper, where
        assert sigma <= row.upper * (1 + 1e-6), where
        assert row.layer == (None if name == "model" else LAYER)
        assert (row.map, row.metric, row.move, row.read) == (name, metric, move, read)
        _check_norms(row, x, output, sigma)
        if sigma == 0.0:
            continue
        _check_rest(row, jacobian, x, (metric, moved, seen), where)
        _check_frobenius(row, float(matrix.norm()), where)


def _check_norms(row: Measurement, x: Tensor, output: Tensor, sigma: float) -> None:
    norms = x.norm(dim=1)
    near = functools.partial(math.isclose, rel_tol=1e-6)
    assert row.num_tokens == len(x)
    assert near(row.radius_max or 0, float(norms.max()))
    assert near(row.radius_rms or 0, float(norms.square().mean().sqrt()))
    assert near(row.input_norm or 0, float(x.norm()))
    assert near(row.output_norm or 0, float(output.norm()))
    relative = sigma * float(x.norm()) / float(output.norm())
    assert math.isclose(row.relative or 0, relative, rel_tol=3e-6, abs_tol=1e-12)


def _check_rest(
    row: Measurement,
    jacobian: Tensor,
    x: Tensor,
    asked_for: tuple[str, list[int], list[int]],
    where,
) -> None:
    metric, moved, seen = asked_for
    share, _ = shares(asked(jacobian, x, metric, moved, seen))
    first = int(share.argmax())
    assert row.top_token == moved[first], where
    assert math.isclose(row.top_share or 0, float(share[first]), rel_tol=1e-3), where
    rest = [i for i in moved if i != moved[first]]
    held = top(asked(jacobian, x, metric, rest, seen))
    assert row.sigma_rest is not None
    assert math.isclose(row.sigma_rest, held, rel_tol=1e-6, abs_tol=1e-12), where


def _check_frobenius(row: Measurement, dense: float, where) -> None:
    low, high = frobenius_of(row)
    assert low <= dense * (1 + 1e-3) and dense <= high * (1 + 1e-3), where  # printed digits
    assert row.frobenius is not None
    # 16 probes of a rank-one rest: chi-square of 16, its root within 1.9 but for 1e-6
    assert (row.sigma or 0.0) <= row.frobenius < 1.9 * dense, where


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_causality_forbids_is_exactly_zero(family):
    row = measured(family, move="last", read="first", rest=True, average=True)[0]
    assert row.status == "converged"
    assert (row.sigma, row.upper, row.relative, row.sigma_rest) == (0.0, 0.0, 0.0, 0.0)
    assert row.frobenius == 0.0
    assert "stable rank" not in (row.note or "")  # the zero map has none


def test_the_frobenius_norm_is_estimated_without_bias():
    """The mean of 30 independent estimates of ‖J‖², within four standard errors."""
    jacobian, _, _ = truth_of("llama", "attention")
    values = torch.linalg.svdvals(jacobian.reshape(N * WIDTH, -1))
    truth, seeds = float(values.square().sum()), 30
    rows = [measured("llama", average=True, seed=s)[0] for s in range(seeds)]
    estimates = [(r.frobenius or 0.0) ** 2 for r in rows]
    error = math.sqrt(2 * float(values.pow(4).sum()) / (16 * seeds))
    assert abs(sum(estimates) / seeds - truth) < 4 * error
    for row in rows:
        assert "stable rank" in (row.note or "")


def test_the_frobenius_norm_of_one_output_is_sigma():
    """A margin has one gradient: no chance is left, and no stable rank below 1."""
    model = f"random:gpt2:{TINY['gpt2']}"
    row = ls.measure(model, TEXT, lengths=6, samples=1, map="margin", average=True)[0]
    low, high = frobenius_of(row)
    assert row.sigma is not None and row.upper is not None
    assert row.frobenius == pytest.approx(row.sigma, rel=1e-6)
    assert low <= row.sigma <= row.upper <= high
    assert (row.note or "").endswith("stable rank 1")


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_dense_singular_vectors(family):
    jacobian, x, _ = truth_of(family, "attention")
    rows = measured(family, move="1:5", read="not-first")
    share_in, share_out = shares(asked(jacobian, x, "frobenius", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    tokens = rows.tokens
    assert [t.index for t in tokens] == list(range(N))
    assert {t.id for t in tokens} == {rows[0].id}
    found_in = torch.tensor([t.share_in for t in tokens], dtype=torch.float64)
    found_out = torch.tensor([t.share_out for t in tokens], dtype=torch.float64)
    assert found_in[0] == found_out[0] == 0.0  # neither moves nor is read
    assert torch.allclose(found_in[1:], share_in, atol=1e-5)
    assert torch.allclose(found_out[1:], share_out, atol=1e-5)
    norms = torch.tensor([t.norm for t in tokens], dtype=torch.float64)
    assert torch.allclose(norms, x.norm(dim=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["heads", "attention", "normed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_one_by_one(family, name):
    """`heads`: a head's slice; `attention`, `normed`: what it adds through its projection."""
    jacobians, x, outputs = heads_of(family, name)
    rows = measured(family, map=name, per_head=True, rest=True, average=True)
    assert [row.head for row in rows] == list(range(HEADS[family]))
    assert len({row.id for row in rows}) == len(rows)
    for row, jacobian, output in zip(rows, jacobians, outputs, strict=True):
        everything = list(range(N))
        assert math.isclose(row.sigma or 0, top(jacobian), rel_tol=1e-6)
        _check_norms(row, x, output, top(jacobian))
        _check_rest(row, jacobian, x, ("frobenius", everything, everything), (family, name))
        _check_frobenius(row, float(jacobian.norm()), (family, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_one_by_one_with_metric_move_and_read(family):
    jacobians, x, _ = heads_of(family, "attention")
    rows = measured(family, per_head=True, metric="token-relative", move="0:3", read="last")
    for row, jacobian in zip(rows, jacobians, strict=True):
        truth = top(asked(jacobian, x, "token-relative", [0, 1, 2, 3], [5]))
        assert math.isclose(row.sigma or 0, truth, rel_tol=1e-6)


def test_no_token_moves_in_proportion_to_the_norm_of_a_zero_input():
    model, nothing = encoder().eval(), torch.zeros(1, 4, 8)
    options: dict[str, Any] = {"layers": [0], "map": "attention", "rest": True}
    row = ls.measure(model, nothing, metric="token-relative", **options)[0]
    assert (row.status, row.sigma, row.upper, row.sigma_rest) == ("converged", 0.0, 0.0, 0.0)
    assert "input is zero" in (row.note or "")
    plain = ls.measure(model, nothing, **options)[0]
    assert plain.sigma is not None and plain.sigma > 0.1 and plain.note is None


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_alone_gives_the_norm_of_the_value_and_output_weights(family):
    """n = 1: the softmax is 1 whatever the scores are, hence ``J = W_O W_V``."""
    block = Truth(family, IDS[:, :1]).block
    if family == "llama":
        attention = block.self_attn
        groups = attention.v_proj.weight.unflatten(0, (2, 2))
        product = attention.o_proj.weight @ groups.repeat_interleave(3, 0).flatten(0, 1)
    elif family == "gpt2":
        product = (block.attn.c_attn.weight[:, 2 * WIDTH :] @ block.attn.c_proj.weight).T
    else:
        product = block.attention.output.dense.weight @ block.attention.self.value.weight
    row = measured(family, IDS[:, :1], rest=True)[0]
    truth = float(torch.linalg.matrix_norm(product, 2))
    assert math.isclose(row.sigma or 0, truth, rel_tol=1e-9)
    assert row.sigma_rest == 0.0
    assert (row.num_tokens, row.top_token) == (1, 0)
    assert math.isclose(row.top_share or 0, 1.0)


def test_tiny_models_are_what_the_truth_takes_them_for():
    """The hand-written maps are the models' own functions: whole model and every layer."""
    for family in FAMILIES:
        truth = Truth(family)
        output = truth.model(IDS).last_hidden_state[0]
        assert torch.allclose(truth.whole(truth.embedded[0]), output, atol=1e-5)
        u = truth.norm(truth.stream)
        weight, bias = truth.projection()
        heads = truth.each_head(u).transpose(0, 1).flatten(1)
        assert torch.allclose(heads @ weight.T + bias, truth.attention(u), atol=1e-6)
        total = truth.contributions(u).sum(0) + bias
        assert torch.allclose(total, truth.attention(u), atol=1e-6)
        assert set(TINY) >= {family}


def test_heads_of_a_layer_without_a_projection_are_its_slices() -> None:
    start = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 4, generator=start).double() for _ in range(3)]
    layer, x = ls.DotProduct(*weights, heads=2), torch.randn(3, 4, generator=start).double()
    rows = ls.measure(layer, x, per_head=True)
    dense = torch.func.jacrev(layer)(x).unflatten(1, (2, 3))
    for h, row in enumerate(rows):
        truth = float(torch.linalg.matrix_norm(dense[:, h].reshape(9, 12), 2))
        assert row.sigma == pytest.approx(truth, rel=1e-3), row.error
    parts = [one for one in ls.directions(layer, x, k=1).directions if one.side == "head"]
    u, _, vh = torch.linalg.svd(dense.reshape(18, 12))
    own = torch.einsum("ihkjd,ihk,jd->h", dense, u[:, 0].reshape(3, 2, 3), vh[0].reshape(3, 4))
    assert [one.share for one in parts] == pytest.approx((own / own.sum()).tolist(), abs=1e-3)
