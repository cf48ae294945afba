"""Flows of tokens: exact solutions, what is conserved, invariances, orders, events, closures."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.integrate import quad
from torch import Tensor

import lipscope as ls
from agreement import gaussian
from command import TEXT
from examples import build as build_variant
from lipscope import (
    DotProduct,
    L2Attention,
    Operator,
    SigmoidAttention,
    SinkhornAttention,
    linearise,
    variants,
)
from lipscope.attention import Attention
from lipscope.charts import Scene, animate
from lipscope.dynamics import (
    Event,
    closure,
    clusters,
    consensus,
    diameter,
    evolve,
    gaussian_flow,
    leaders,
    outgrows,
    phases,
    residual,
    sigma_along,
    sigma_of_blocks,
    sigma_through,
)
from lipscope.errors import InputError
from lipscope.measures import TokenMeasure, in_order
from tiny import tiny

ONE = torch.ones(1, 1, dtype=torch.float64)
WORDY = Event("a", lambda t, x: "b")  # pyright: ignore[reportArgumentType]


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def single(a: Tensor, value: Tensor | None = None, **options) -> DotProduct:
    """One head with ``A = a``."""
    return DotProduct(a, eye(len(a)), eye(len(a)) if value is None else value, scale=1.0, **options)


def cloud(seed: int, n: int = 40, d: int = 2) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).double()


# --- exact solutions


@pytest.mark.parametrize("v", [1.0, -2.0])
def test_tokens_without_scores_follow_their_mean(v) -> None:
    """A = 0: the mean grows with e^(vt), and differences stay as they are."""
    x, times = gaussian(5, 2), [0.3, 1.0]
    found = evolve(single(0 * eye(2), v * eye(2)), x, times)
    for t, state in zip(times, found.states, strict=True):
        expected = x + (math.exp(v * t) - 1) * x.mean(0)
        torch.testing.assert_close(state, expected, rtol=1e-7, atol=1e-7)


def test_two_opposite_tokens() -> None:
    """r' = r tanh(r²), so that t is the integral of 1 / (r tanh(r²))."""
    end = evolve(single(eye(1)), torch.tensor([[0.7], [-0.7]]), [1.5]).end.flatten()
    time, _ = quad(lambda r: 1 / (r * math.tanh(r * r)), 0.7, float(end[0]))
    assert time == pytest.approx(1.5, rel=1e-6) and float(end.sum()) == 0.0


def test_a_measure_is_its_copies() -> None:
    x, layer = gaussian(3, 2), single(gaussian(2, 2), gaussian(2, 2, seed=1))
    few = evolve(layer, TokenMeasure(x, torch.tensor([0.5, 0.25, 0.25])), [1.0]).end
    torch.testing.assert_close(evolve(layer, x[[0, 0, 1, 2]], [1.0]).end[1:], few)
    causal = layer.replace(causal=True)
    torch.testing.assert_close(evolve(causal, in_order(x), [1.0]).end, evolve(causal, x, [1.0]).end)


# --- what is conserved, and invariances


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_every_token_stays_on_its_sphere(norm) -> None:
    x, layer = gaussian(6, 4), single(gaussian(4, 4), gaussian(4, 4, seed=1), causal=True)
    for found in (
        evolve(layer, x, [0.0, 2.0], norm=norm),
        residual(layer, x, step=0.5, layers=4, norm=norm),
    ):
        start, end = found.states[0], found.end
        torch.testing.assert_close(end.norm(dim=-1), start.norm(dim=-1), rtol=1e-13, atol=0.0)
        if norm == "layer":
            assert float(found.states.mean(-1).abs().max()) < 1e-13
        assert float((end - start).abs().max()) > 0.1


def test_columns_that_add_up_to_one_leave_the_mean_alone() -> None:
    """Sinkhorn: the mean follows V by itself, to the tolerance."""
    x, v = gaussian(6, 2), gaussian(2, 2, seed=1)
    layer = SinkhornAttention(gaussian(2, 2, seed=2), gaussian(2, 2, seed=3), v, scale=1.0)
    end = evolve(layer, x, [1.0]).end.mean(0)
    torch.testing.assert_close(end, torch.linalg.matrix_exp(v) @ x.mean(0), rtol=1e-6, atol=1e-7)


def test_hulls_shrink_once_renormalised() -> None:
    """V = I: tokens move towards means of others, so no two drift apart beyond the largest."""
    found = evolve(single(eye(2)), cloud(0), [0.0, 1.0, 2.0], renormalise=True, rtol=1e-6)
    sizes = [diameter(state) for state in found.states]
    assert sizes == sorted(sizes, reverse=True)


def test_order_and_rotation_of_tokens_do_not_matter() -> None:
    x, order = gaussian(6, 2), torch.tensor([3, 1, 0, 5, 4, 2])
    turn = torch.linalg.qr(gaussian(2, 2, seed=4))[0]
    spiral = torch.tensor([[0.5, -1.0], [1.0, 0.5]]).double()  # commutes with rotations
    turn = (
        turn * torch.linalg.det(turn).sign()
        if float(torch.linalg.det(turn)) > 0
        else turn[:, [1, 0]]
    )
    for norm in (None, "rms"):
        end = evolve(single(spiral, spiral.T), x, [1.0], norm=norm).end
        for moved, expected in ((x[order], end[order]), (x @ turn.T, end @ turn.T)):
            again = evolve(single(spiral, spiral.T), moved, [1.0], norm=norm).end
            torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", variants(), ids=lambda kind: kind.__name__)
def test_every_variant_flows_with_its_own_forward(kind) -> None:
    layer = build_variant(kind, trained=False)
    changes = {"output": gaussian(4, 4), "output_bias": None}
    layer = layer.replace(**{k: v for k, v in changes.items() if k in layer.fields()})
    x, h = 0.3 * gaussian(4, 4), 1e-4
    found = evolve(layer, x, [h, 0.1])
    torch.testing.assert_close((found.states[0] - x) / h, layer(x), rtol=1e-2, atol=1e-2)
    assert found.status == "done" and bool(found.end.isfinite().all())


# --- renormalised


@pytest.mark.parametrize("kind", ["one head", "causal", "biased queries", "two heads"])
def test_renormalised_is_the_same_flow(kind) -> None:
    q, k, v = (0.5 * gaussian(4, 2, seed=i) for i in range(3))
    if kind == "two heads":  # value maps that commute: polynomials of one matrix
        a = gaussian(2, 2)
        layer = DotProduct(q, k, torch.cat([a, a @ a]), torch.cat([eye(2), eye(2)], 1), heads=2)
        rate = a + a @ a
    else:
        bias = gaussian(4) if kind == "biased queries" else None
        layer = DotProduct(q, k, v[:2], causal=kind == "causal", query_bias=bias)
        rate = v[:2]
    x = gaussian(5, 2)
    found = evolve(layer, x, [1.0], renormalise=True).end
    expected = evolve(layer, x, [1.0]).end @ torch.linalg.matrix_exp(-rate).T
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_no_time_is_too_long_for_the_log_domain() -> None:
    """x would be e^1000 by then; every token reads one leader alone."""
    found = evolve(single(eye(2)), cloud(1, 12), [0.0, 1000.0], renormalise=True, rtol=1e-4)
    assert found.status == "done" and bool(found.states.isfinite().all())
    weights = found.attention(-1)
    assert float(weights.amax(-1).min()) > 1 - 1e-9
    assert len(leaders(weights)) == clusters(found.end, 0.05).count == 3


# One head, V = diag(1, 0.5): tokens that agree in the first coordinate follow the second alone.
SLOW = DotProduct(eye(2), eye(2), torch.diag(torch.tensor([1.0, 0.5])).double())
ALONE = DotProduct(ONE, ONE, 0.5 * ONE, scale=2**-0.5)
APART = torch.tensor([[1.0], [-1.0], [0.4]]).double()


@pytest.mark.parametrize("common", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_what_all_tokens_share_along_the_fastest_direction_decides_nothing(common) -> None:
    """Against the closed dynamics of the other coordinate, which has no fast direction."""
    x = torch.cat([torch.full_like(APART, common), APART], 1)
    times = [1.0, 10.0, 40.0, 480.0, 1000.0]
    found = evolve(SLOW, x, times, renormalise=True, rtol=1e-9)
    alone = evolve(ALONE, APART, times, renormalise=True, rtol=1e-9)
    assert found.status == alone.status == "done"
    torch.testing.assert_close(found.states[..., 1:], alone.states, rtol=1e-6, atol=1e-6)
    assert bool((found.states[..., 0] == common).all())
    for one in (found, alone):  # tokens of one cluster share weights as they like
        read = one.attention(-1)[0] @ one.end[:, -1:]
        torch.testing.assert_close(read, alone.end, rtol=1e-6, atol=1e-6)
    assert clusters(found.end, 0.1).count == clusters(alone.end, 0.1).count == 2
    steps = residual(SLOW, x, step=0.5, layers=160, renormalise=True)
    alone = residual(ALONE, APART, step=0.5, layers=160, renormalise=True)
    torch.testing.assert_close(steps.states[..., 1:], alone.states, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["sigmoid", "l2"])
def test_tokens_with_nothing_along_the_fastest_direction(kind) -> None:
    """Of other scores, too: e^t left the float range, and took the slow direction with it."""
    value, y = SLOW.value, APART[:2]
    whole: Attention
    alone: Attention
    if kind == "sigmoid":
        whole = SigmoidAttention(eye(2), eye(2), value, scale=1.0)
        alone = SigmoidAttention(ONE, ONE, 0.5 * ONE, scale=1.0)
    else:  # its projections hold the roots of the width
        whole = L2Attention(eye(2), value)
        alone = L2Attention(2**-0.25 * ONE, 2**-0.5 * 0.5 * ONE)
    times = [10.0, 500.0, 600.0]
    found = evolve(whole, torch.cat([0 * y, y], 1), times, renormalise=True, rtol=1e-6)
    expected = evolve(alone, y, times, renormalise=True, rtol=1e-6)
    assert found.status == expected.status == "done"
    torch.testing.assert_close(found.states[..., 1:], expected.states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("angle", [0.3, 1.0])
def test_digits_that_are_lost_end_the_flow(angle) -> None:
    """The same tokens turned: they agree to rounding only, and e^t makes differences of that."""
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    turn = turn.double()
    layer = SLOW.replace(value=turn @ SLOW.value @ turn.T)
    x = torch.cat([torch.full_like(APART, 3.0), APART], 1)
    found = evolve(layer, x @ turn.T, [20.0, 480.0], renormalise=True)
    assert (found.status, found.note, found.events[-1].name) == ("event", "rounding", "rounding")
    end = float(found.times[-1])
    assert 20 < end < 45  # e^(2t) eps 9 against e^t: 34 or so
    alone = evolve(ALONE, APART, [20.0, end], renormalise=True)
    torch.testing.assert_close((found.states @ turn)[..., 1:], alone.states, rtol=0, atol=2e-3)
    steps = residual(layer, x @ turn.T, step=0.5, layers=100, renormalise=True)
    assert (steps.status, steps.note) == ("event", "rounding")
    assert 20 < float(steps.times[-1]) < 45


# --- orders, and what Euler gets wrong


def test_residual_layers_are_of_order_one() -> None:
    layer, x = single(gaussian(2, 2), gaussian(2, 2, seed=1)), gaussian(4, 2)
    exact = evolve(layer, x, [1.0], rtol=1e-11).end
    errors = [
        float((residual(layer, x, step=1 / k, layers=k).end - exact).norm()) for k in (32, 64)
    ]
    assert errors[0] / errors[1] == pytest.approx(2.0, abs=0.1)
    loose, fine = (
        float((evolve(layer, x, [1.0], rtol=r).end - exact).norm()) for r in (1e-4, 1e-8)
    )
    assert fine < 1e-2 * loose < 1e-3 * errors[1]


def test_several_layers_and_one_after_another() -> None:
    x = gaussian(3, 2)
    layers = [single(gaussian(2, 2, seed=i)) for i in range(3)]
    y = x
    for layer in layers:
        y = y + 0.2 * layer(y)
    torch.testing.assert_close(residual(layers, x, step=0.2).end, y)


def test_euler_counts_other_clusters() -> None:
    """40 tokens, V = A = I, step 0.1 as in public code: four clusters for five, for good."""
    x, layer = cloud(6), single(eye(2))
    found = evolve(layer, x, [5.0, 10.0], renormalise=True, rtol=1e-6)
    assert [clusters(state, 0.05).count for state in found.states] == [5, 5]
    steps = residual(layer, x, step=0.1, layers=100, renormalise=True)
    assert [clusters(steps.states[k], 0.05).count for k in (50, 100)] == [4, 4]


# --- events


def test_consensus_has_its_time() -> None:
    """A = 0, renormalised: the diameter falls with e^(-t) exactly."""
    x = gaussian(5, 2)
    found = evolve(single(0 * eye(2)), x, [9.0], renormalise=True, events=[consensus(0.5)])
    assert found.status == "event" and found.note == "consensus"
    assert found.events[0].time == pytest.approx(math.log(diameter(x) / 0.5), rel=1e-7)
    assert diameter(found.end) == pytest.approx(0.5, rel=1e-7)
    assert float(found.times[-1]) == found.events[0].time


def test_an_event_that_is_so_from_the_start() -> None:
    found = evolve(single(ONE), ONE, [0.0, 1.0], events=[outgrows(0.5)])
    assert (found.events[0].time, found.status, len(found.times)) == (0.0, "event", 1)
    on = evolve(single(ONE), ONE, [0.0, 1.0], events=[outgrows(0.5, terminal=False)])
    assert (on.events[0].time, on.status) == (0.0, "done")


def test_a_function_may_write_into_its_argument() -> None:
    kept = torch.ones(1, 1).double()
    found = evolve(lambda x: x.neg_(), kept, [0.0, 1.0])
    assert float(found.end) == pytest.approx(math.exp(-1), rel=1e-7)
    assert float(kept) == 1.0


def test_what_leaves_the_float_range_is_an_event() -> None:
    found = evolve(single(ONE), ONE, [0.0, 1.0, 1e4], rtol=1e-5)
    assert found.note == "overflow" and bool(found.states.isfinite().all())
    assert found.events[0].time == pytest.approx(100 * math.log(10), rel=1e-3)
    steps = residual(single(ONE), ONE, step=3.0, layers=1000)
    assert steps.note == "overflow" and bool(steps.states.isfinite().all())


def test_a_layer_that_refuses_on_the_way_ends_the_flow() -> None:
    def proud(x: Tensor) -> Tensor:
        if float(x.abs().max()) > 2:
            raise InputError("Tokens should be small.")
        return x

    found = evolve(proud, ONE, [0.0, 1.0])
    assert (found.status, found.note) == ("stuck", "Tokens should be small.")
    assert float(found.end) == pytest.approx(2.0, rel=1e-6)
    asked = evolve(single(eye(2)), cloud(0), [9.0], max_evaluations=50)
    assert asked.status == "evaluations" and "50" in str(asked.note)


# --- sigma along depth


def test_sigma_along_by_differences_of_the_flow() -> None:
    layer, x, h = single(gaussian(2, 2), gaussian(2, 2, seed=1)), gaussian(2, 2), 1e-4
    found = sigma_along(layer, x, [0.0, 0.5], rtol=1e-4)
    columns = []
    for e in torch.eye(4).double().reshape(4, 2, 2):
        ends = [evolve(layer, x + s * h * e, [0.5], rtol=1e-9).end for s in (1, -1)]
        columns.append((ends[0] - ends[1]).flatten() / (2 * h))
    sigma = float(torch.linalg.matrix_norm(torch.stack(columns, 1), 2))
    assert float(found.sigma[-1]) == pytest.approx(sigma, rel=1e-4)
    assert float(found.sigma[0]) == float(found.product[0]) == 1.0
    assert found.norms is not None
    assert float(found.sigma[-1]) <= float(found.product[-1]) <= float(found.norms[-1])
    thin = sigma_through(layer, x, step=0.05, layers=10)
    for name in ("sigma", "product"):
        mine, theirs = float(getattr(thin, name)[-1]), float(getattr(found, name)[-1])
        assert mine == pytest.approx(theirs, rel=0.05)


def test_sigma_through_by_automatic_differentiation() -> None:
    layer, x = single(gaussian(2, 2), gaussian(2, 2, seed=1), causal=True), gaussian(3, 2)
    found = sigma_through(layer, x, step=0.3, layers=3, tol=1e-9)

    def through(y: Tensor) -> Tensor:
        for _ in range(3):
            y = y + 0.3 * layer(y)
        return y

    whole = torch.func.jacrev(through)(x).reshape(6, 6)
    assert float(found.sigma[-1]) == pytest.approx(
        float(torch.linalg.matrix_norm(whole, 2)), rel=1e-8
    )
    assert bool((found.excess >= 1 - 1e-9).all()) and bool((found.upper >= found.sigma).all())


def test_sigma_through_ends_where_the_layers_overflow() -> None:
    found = sigma_through(single(ONE), ONE, step=3.0, layers=1000)
    assert [event.name for event in found.events] == ["overflow"]
    assert bool(found.sigma.isfinite().all()) and found.times[-1] < found.events[0].time
    at_once = sigma_through(single(ONE), 1e99 * ONE, step=1e9, layers=3)
    assert at_once.times.tolist() == [0.0] and at_once.sigma.tolist() == [1.0]


def test_sigma_of_blocks_of_matrices() -> None:
    first, second = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
    found = sigma_of_blocks(
        [linearise(lambda x, m=m: x @ m, torch.ones(2)) for m in (first, second)]
    )
    assert found.sigma.tolist() == pytest.approx([1.0, 3.0, 3.0], rel=1e-4)
    assert found.product.tolist() == pytest.approx([1.0, 3.0, 6.0], rel=1e-4)
    same = linearise(lambda x: x, torch.ones(2))
    assert sigma_of_blocks([same] * 3, depths=[2]).times.tolist() == [0.0, 2.0]
    with pytest.raises(InputError, match="from 1 to 2"):
        sigma_of_blocks([same] * 2, depths=[3])
    wide = Operator(lambda e: e, lambda g: g, (3,), (3,))
    with pytest.raises(InputError, match="follow each other"):
        sigma_of_blocks([same, wide])


def test_sigma_from_block_to_block_ends_in_that_of_the_model() -> None:
    """Jacobians of all blocks of a model, one after another, against the map `model` itself."""
    loaded = tiny("bert")
    maps = ls.load_model(loaded).layers(TEXT, lengths=[7], map="block", dtype="float64")
    found = sigma_of_blocks([one.linearise() for one in maps], tol=1e-6)
    row = ls.measure(loaded, TEXT, lengths=[7], samples=1, map="model", dtype="float64")[0]
    assert float(found.sigma[-1]) == pytest.approx(row.sigma, rel=2e-3)
    stacks = ls.measure(loaded, TEXT, lengths=[7], samples=1, map="stack", dtype="float64")
    for row, sigma in zip(stacks, found.sigma[1:], strict=True):
        assert float(sigma) == pytest.approx(row.sigma, rel=2e-3)
    assert float(found.excess[-1]) > 1


# --- clusters


def test_clusters_and_phases() -> None:
    x = torch.tensor([[0.0], [1.0], [5.0], [2.0]])
    found = clusters(x, 1.0)
    assert (found.count, found.labels.tolist(), found.sizes) == (2, [0, 0, 1, 0], (3, 1))
    assert [clusters(x, r).count for r in (0.5, 1.0, 3.0)] == [4, 2, 1]
    held = phases([0.0, 1.0, 2.0, 4.0], [4, 2, 2, 1])
    assert [(p.count, p.start, p.end) for p in held] == [(4, 0, 1), (2, 1, 4), (1, 4, 4)]


def test_animations(tmp_path) -> None:
    points, groups = gaussian(3, 5, 2).numpy(), np.array([0, 0, 1, 1, 1])
    scene = Scene("five tokens", points, groups, ["t = 0", "t = 1", "t = 2"], points)
    with Image.open(animate(tmp_path / "a.gif", [scene, scene])) as found:
        assert (found.n_frames, found.size) == (3, (600, 346))
    with pytest.raises(InputError, match="`scenes` should all have one length"):
        animate(tmp_path / "b.gif", [replace(scene, captions=["t = 0"])])


# --- what is refused, in one line


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: evolve(single(ONE), torch.zeros(0, 1), [1.0]), "at least one"),
        (lambda: evolve(single(ONE), ONE * math.nan, [1.0]), "should be finite"),
        (lambda: evolve(single(ONE), torch.ones(2, 3), [1.0]), "Found (2, 3)"),
        (lambda: evolve(DotProduct(ONE, ONE, ONE, eye(2)[:, :1]), ONE, [1.0]), "keeps the width"),
        (lambda: evolve(single(ONE), ONE, []), "`times`"),
        (lambda: evolve(single(ONE), ONE, [1.0, 1.0]), "`times`"),
        (lambda: evolve(single(ONE), ONE, [-1.0]), "`times`"),
        (lambda: evolve(single(ONE), ONE, [1.0], rtol=0.0), "`rtol`"),
        (lambda: evolve(single(ONE), ONE, [1.0], norm="batch"), "`norm`"),
        (lambda: evolve(single(ONE), 0 * ONE, [1.0], norm="rms"), "not zero"),
        (lambda: evolve(single(ONE), ONE, [1.0], norm="rms", renormalise=True), "leave one out"),
        (lambda: evolve(lambda x: x, ONE, [1.0], renormalise=True), "goes with a layer"),
        (lambda: evolve(crossed(), torch.ones(2, 2), [1.0], renormalise=True), "commute"),
        (lambda: evolve(single(ONE), ONE, [1.0], rtol="1"), "`rtol`"),
        (lambda: evolve(single(ONE), ONE, [1.0], max_evaluations="9"), "`max_evaluations`"),
        (lambda: evolve(single(ONE), ONE, [1.0], events=[len]), "a list of `Event`"),
        (lambda: evolve(lambda x: 1.0, ONE, [1.0]), "`f` should give a tensor. Found `float`"),
        (lambda: evolve(lambda x: x / 0, ONE, [1.0]), "finite velocity"),
        (lambda: evolve(lambda x, y: x, ONE, [1.0]), "Found that it cannot: "),
        (lambda: evolve(single(ONE), TokenMeasure(ONE, 2 * ONE[0]), [1.0]), "add up to 1"),
        (lambda: residual(single(ONE), ONE, step=0.0, layers=1), "`step`"),
        (lambda: residual(single(ONE), ONE, step=0.1), "`layers`"),
        (lambda: residual(single(ONE), ONE, step=0.1, layers="3"), "`layers`"),
        (lambda: residual([single(ONE)] * 2, ONE, step=0.1, layers=3), "one for every layer"),
        (lambda: clusters(ONE, 0.0), "`radius`"),
        (lambda: clusters(ONE * math.inf, 1.0), "`points`"),
        (lambda: clusters([[0.0]], 1.0), "`points` should be tokens in a tensor, (n, d)"),
        (lambda: gaussian_flow(single(ONE), ONE[0], -ONE, [1.0]), "semidefinite"),
        (lambda: gaussian_flow(single(ONE), ONE[0], eye(2), [1.0]), "`covariance`"),
        (lambda: gaussian_flow(single(ONE), ONE, ONE, [1.0]), "`mean`"),
        (lambda: closure(single(ONE, causal=True)), "normality is preserved"),
        (lambda: sigma_along(single(ONE), torch.ones(2000, 1), [1.0]), "at most 1,024"),
        (lambda: sigma_along(single(ONE), TokenMeasure(ONE), [1.0]), "Found a measure"),
        (lambda: sigma_through(single(ONE), TokenMeasure(ONE), step=0.1, layers=1), "a measure"),
        (lambda: evolve(torch.nn.Dropout(0.5), torch.ones(9, 1), [1.0]), "call `eval()`"),
        (lambda: evolve(single(ONE), ONE, "01"), "`times`"),
        (lambda: evolve(lambda x: x, TokenMeasure(ONE), [1.0]), "an Attention layer. Found `func"),
        (lambda: evolve(None, ONE, [1.0]), "a layer or a function. Found `NoneType`"),
        (lambda: sigma_through(lambda x: x, ONE, step=0.1, layers=1), "an Attention layer"),
        (lambda: closure(torch.nn.Linear(1, 1)), "an Attention layer. Found `Linear`"),
        (lambda: phases([0.0, 1.0, 2.0], [1, 2]), "one number for each of `times`"),
        (lambda: phases(["a"], [1]), "one number for each of `times`, at least one. Found [1]"),
        (lambda: phases([0.0], 1), "one number for each of `times`"),
        (lambda: leaders(eye(2)), "`weights` should be numbers in a tensor, (n, n, n)."),
        (lambda: diameter([[0.0]]), "`points` should be tokens in a tensor"),
        (lambda: gaussian_flow(single(ONE), [0.0], ONE, [1.0]), "`mean` should be numbers in a"),
        (lambda: gaussian_flow(single(ONE), ONE[0], [[1.0]], [1.0]), "`covariance` should be"),
        (lambda: closure(single(ONE))([0.0], ONE), "`mean` should be numbers in a tensor, (1,)."),
        (lambda: closure(single(ONE))(ONE[0], -ONE), "`covariance` should be symmetric"),
        (lambda: sigma_of_blocks([ONE]), "`blocks` should be Jacobians"),
        (lambda: evolve(single(ONE), ONE, [1.0], events=[WORDY]), "event `a` should be one number"),
        (lambda: residual(two(), ONE, step=0.1, renormalise=True), "layers of one `V`"),
        (lambda: residual(two(), ONE, step=0.1).attention(2), "No layer reads the state"),
    ],
)
def test_refused_in_one_line(call, said, unchecked) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        call()


def two() -> list[Attention]:
    return [single(ONE), single(ONE, 2 * ONE)]


def test_attention_of_several_layers_is_that_of_the_layer_that_reads() -> None:
    layers, x = torch.nn.ModuleList([single(-eye(2)), single(3 * eye(2))]), gaussian(4, 2)
    found = residual(layers, x, step=0.1)
    for i in (0, 1, -2):
        layer = layers[i if i >= 0 else 1]
        weights = layer.weights(*layer.project(found.states[i])[:2])
        assert torch.equal(found.attention(i), weights)


def crossed() -> Attention:
    """Two heads whose value maps do not commute with their sum."""
    up, across = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    value = torch.cat([up, across]).double()
    both = torch.cat([eye(2), eye(2)])
    return DotProduct(both, both, value, torch.cat([eye(2), eye(2)], 1), heads=2)


def test_the_face_has_the_room() -> None:
    assert ls.dynamics.Event is Event
