"""Ascent on sigma, and the driver that collects the worst attacks."""

import math

import pytest
import torch

import lipscope as ls
from lipscope import Operator, attacks
from lipscope.attacks import DRAWN, KNOWN, ascent
from lipscope.attacks.ascent import clamp, sigma_gradient
from lipscope.attention import Rotary
from lipscope.linalg import singular
from small import drawn, sigma

BY_HEAD = [build for name, build in attacks.PER_HEAD.items() if name != "l2_opposed"]

# --- ascent


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_sigma(causal: bool) -> None:
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(4, 3, generator=gen).double() for _ in range(3))
    layer = ls.DotProduct(q, k, v, heads=2, causal=causal, query_bias=q[:, 0])
    x, start, e = torch.randn(3, 3, 5, 3, generator=gen).double()
    value, gradient, _ = sigma_gradient(layer, x, start, steps=15)
    for i in range(3):
        assert float(value[i]) == pytest.approx(sigma(layer, x[i]), rel=1e-10)
        h = 1e-5
        ahead, behind = (sigma(layer, x[i] + s * h * e[i]) for s in (1, -1))
        slope = float((gradient[i] * e[i]).sum())
        assert slope == pytest.approx((ahead - behind) / (2 * h), rel=1e-6, abs=1e-7)


def test_ascent_stays_in_the_ball_and_improves(monkeypatch) -> None:
    layer, radius = drawn(3, d=4, k=4), 1.3
    seen: list[float] = []

    def spy(layer, x, v, *, steps):
        seen.append(float(x.norm(dim=-1).max()))
        return sigma_gradient(layer, x, v, steps=steps)

    monkeypatch.setattr("lipscope.attacks.ascent.sigma_gradient", spy)
    far = 50 * torch.ones(6, 4)  # a start outside of the ball
    found = attacks.ascend(
        layer, num_tokens=6, radius=radius, restarts=5, steps=25, start=far,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert len(seen) == 26
    assert max(seen) <= radius * (1 + 1e-6)  # the search is in float32
    assert float(found.x.norm(dim=1).max()) <= radius * (1 + 1e-12)
    assert found.start_values.shape == (6,)
    assert (found.best_values >= found.start_values).all()
    assert float(found.best_values.max()) > 1.5 * float(found.start_values[0])
    assert found.found == float(found.best_values.max())
    assert sigma(layer, found.x) == pytest.approx(found.top.sigma, rel=2e-3)
    assert found.found <= sigma(layer, found.x) * (1 + 1e-6)  # seen in float32
    assert sigma(layer, found.x) <= found.top.upper


def test_ascent_is_never_below_the_constructions() -> None:
    layer = drawn(0, d=4, k=4)
    built = [make(layer, num_tokens=6, radius=1.0).x for make in BY_HEAD]
    found = attacks.ascend(
        layer, num_tokens=6, radius=1.0, restarts=0, steps=5, start=built,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    # The ascent sees a Ritz value of a few steps: all but a thousandth of sigma.
    assert sigma(layer, found.x) >= 0.99 * max(sigma(layer, x) for x in built)


def test_batches_change_nothing() -> None:
    layer = drawn(5)
    a, b = (
        attacks.ascend(
            layer, num_tokens=4, radius=1.0, restarts=4, steps=6, memory=memory,
            generator=torch.Generator().manual_seed(7),
        )
        for memory in (2**30, 2 * 24 * 8 * (16 + 8 * 16))
    )  # fmt: skip
    torch.testing.assert_close(a.best_values, b.best_values)


def test_the_better_half_of_many_starts_goes_on(monkeypatch) -> None:
    sizes, usual = [], ascent.sigma_gradient

    def watched(layer, x, v, *, steps):
        sizes.append(len(x))
        return usual(layer, x, v, steps=steps)

    monkeypatch.setattr(ascent, "sigma_gradient", watched)
    found = attacks.ascend(
        drawn(5), num_tokens=4, radius=1.0, restarts=12, steps=8,
        generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    assert sizes == [12, *2 * [12], *2 * [6], *4 * [4]]
    assert (found.best_values >= found.start_values).all() and len(found.best_values) == 12
    assert found.top.sigma == pytest.approx(float(found.best_values.max()), rel=1e-4)


def test_clamp_leaves_what_is_inside() -> None:
    x = torch.tensor([[0.3, 0.4], [30.0, 40.0], [0.0, 0.0]])
    expected = torch.tensor([[0.3, 0.4], [0.6, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(clamp(x, 1.0), expected)


def test_reused_start_voids_upper(monkeypatch) -> None:
    """A start that depends on J can miss the top vector; a fresh one cannot, but by chance.

    An ascent follows one singular vector. Where two of them cross, it holds the second: a
    run from there never leaves its direction, and calls the smaller value converged.
    """
    scale = torch.tensor([5.0, 4.0, 1.0, 1.0, 0.5]).double()
    op = Operator(lambda e: scale * e, lambda g: scale * g, (5,), (5,), torch.float64)
    followed = torch.eye(5).double()[1]
    fresh = ls.top_singular(op, generator=torch.Generator().manual_seed(0))
    assert fresh.sigma == pytest.approx(5.0, rel=1e-3)
    assert fresh.upper >= 5.0
    monkeypatch.setattr(singular, "_random_starts", lambda op, generators: followed[None])
    reused = ls.top_singular(op)
    assert reused.status == "converged"
    assert reused.upper < 4.1  # "with probability 1 - 1e-6", yet the truth is 5


def test_choosing_the_run_voids_upper() -> None:
    """The best of many inputs for one fixed start: its interval fails far more often than delta."""
    delta, n, missed = 0.05, 12, 0
    start = torch.randn(n, generator=torch.Generator().manual_seed(0)).double()
    for trial in range(20):
        gen = torch.Generator().manual_seed(100 + trial)
        tops = torch.randn(300, n, generator=gen).double()
        tops = tops / tops.norm(dim=1, keepdim=True)
        top = tops[int((tops @ start).abs().argmin())]  # chosen with the start in sight
        op = Operator(
            lambda e, u=top: e + 9 * (e @ u)[..., None] * u,
            lambda g, u=top: g + 9 * (g @ u)[..., None] * u,
            (n,), (n,), torch.float64,
        )  # fmt: skip
        options = {"delta": delta, "max_steps": 1}
        same = ls.top_singular(op, generator=torch.Generator().manual_seed(0), **options)
        missed += same.upper < 10.0
    assert missed / 20 > 5 * delta


def test_finite_steps_tend_to_sigma() -> None:
    layer = drawn(2, causal=True, bias=True)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    top = ls.top_singular(layer.linearise(x), tol=1e-10)
    ratios = [ratio for _, ratio in attacks.confirm(layer, x, top.v)]
    truth = sigma(layer, x)
    errors = [abs(r / truth - 1) for r in ratios]
    assert errors[-1] < 1e-4
    assert errors[-1] < errors[1] < 0.5
    with pytest.raises(ls.InputError, match="nonzero"):
        attacks.confirm(layer, x, torch.zeros(6, 4).double())


# --- the driver


def test_worst_measures_everything_and_sorts() -> None:
    gen = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(4, 4, generator=gen) for _ in range(3))
    layer = ls.DotProduct(q, k, v, torch.randn(4, 4, generator=gen), heads=2)
    rows = attacks.worst(layer, num_tokens=5, radius=1.0, restarts=2, steps=8, generator=gen)
    values = [row.sigma for row in rows if row.sigma is not None]
    assert values == sorted(values, reverse=True)
    names = {row.name for row in rows}
    assert {KNOWN, DRAWN, "constant", "gamma_star", "quadratic"} <= names
    for row in rows:
        if row.x is not None:
            assert row.sigma is not None and row.upper is not None
            truth = sigma(layer.double(), row.x.double())
            assert row.sigma * (1 - 1e-4) <= truth <= row.upper
            layer.float()
        else:
            assert row.reason
    (missing,) = [row for row in rows if row.name == "l2_opposed"]
    assert missing.reason == "made for L2 attention. Found `DotProduct`."
    assert missing.head is None


def test_worst_of_a_rotary_layer_is_found_by_ascent() -> None:
    angle = torch.arange(4.0)[:, None] * torch.ones(2)
    eye = torch.eye(2)
    layer = ls.DotProduct(eye, eye, eye, rotary=Rotary(angle.cos(), angle.sin()))
    with pytest.raises(ls.InputError, match="logits depend on position; use ascent"):
        attacks.two_cluster(layer, num_tokens=4, radius=1.0)
    rows = attacks.worst(layer, num_tokens=4, radius=3.0, restarts=2, steps=10)
    assert rows[0].name == DRAWN
    assert "logits depend on position; use ascent." in {row.reason for row in rows}


def test_worst_is_never_below_an_input_that_was_given() -> None:
    gen = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(3, 3, generator=gen, dtype=torch.float64) for _ in range(3))
    layer = ls.DotProduct(q, k, v)
    bad = attacks.ascend(layer, num_tokens=4, radius=2.0, steps=30, generator=gen)
    options = {"num_tokens": 4, "names": ["constant"], "given": [bad.x], "generator": gen}
    rows = attacks.worst(layer, **options, radius=2.0, steps=0)
    assert (rows[0].sigma or 0.0) >= bad.top.sigma * (1 - 1e-3)  # the tolerance of both
    assert rows[0].name == "given"
    shorter = attacks.worst(layer, **options, radius=1.0, steps=2)
    (projected,) = [row for row in shorter if row.name == "given"]
    assert projected.radius_max == pytest.approx(1.0, abs=1e-12)


def test_worst_of_nothing_that_can_be_built_says_why() -> None:
    layer = ls.DotProduct(*3 * [torch.eye(3).double()])
    (row,) = attacks.worst(layer, num_tokens=4, radius=1.0, names=["l2_opposed"], steps=0)
    assert row.sigma is None and row.reason == "made for L2 attention. Found `DotProduct`."


def test_worst_refuses_as_many_tokens_as_the_layer_does() -> None:
    """Equal tokens are measured as one, yet count."""
    eye = torch.eye(3).double()
    short = ls.DividedAttention(eye, eye, eye, by="G2", num_tokens=8, radius=1.0)
    masked = ls.DotProduct(eye, eye, eye, mask=torch.ones(8, 8).bool())
    for layer in (short, masked):
        assert attacks.worst(layer, num_tokens=8, radius=1.0, steps=0)[0].sigma is not None
        with pytest.raises((ls.InputError, RuntimeError)):
            attacks.worst(layer, num_tokens=12, radius=1.0, steps=0)


def test_overflow_is_a_reason_and_not_a_number() -> None:
    layer = ls.DotProduct(*(1e25 * torch.ones(3, 1, 1)))
    rows = attacks.worst(layer, num_tokens=3, radius=1.0, restarts=1, steps=2)
    assert all(row.reason for row in rows if row.sigma is None)
    assert all(math.isfinite(row.sigma) for row in rows if row.sigma is not None)
