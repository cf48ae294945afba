"""Golden values of the theory in one table, and the mistakes that are easily made."""

import math

import pytest
import torch

from layers import counterexample, draw, eye, sigma, single, value
from lipscope.attention import DotProduct, L2Attention
from lipscope.linalg import infinity_norm
from lipscope.theorems import bounds_at, heads_of
from lipscope.theorems.derived.global_bounds import kappa
from lipscope.theorems.papers.kim2021 import phi_inverse, tight_input, tight_value

ROUNDING = 1e-9

# --- golden values of the theory, in one table

GOLDEN = {
    "running mean of two tokens": (
        lambda: sigma(single(0 * eye(1), causal=True), torch.ones(2, 1, dtype=torch.float64)),
        1.1441,
    ),
    "running mean of ten tokens": (
        lambda: sigma(single(0 * eye(1), causal=True), torch.ones(10, 1, dtype=torch.float64)),
        1.4101,
    ),
    "C.3, truth": (lambda: sigma(*counterexample()), 27.04),
    "C.3, as coded": (
        lambda: value("castin_thm_c_3_coded", counterexample()[0], x=counterexample()[1]),
        2.828,
    ),
    "Kim, truth": (lambda: kim_one_dimensional()[0], 900.0),
    "Kim, power 4": (lambda: kim_one_dimensional()[1], 2690.5),
    "tightness, N = 3": (lambda: kim_ratio(3), 1.285),
    "tightness, N = 11": (lambda: kim_ratio(11), 1.235),
    "tightness, N = 101": (lambda: kim_ratio(101), 1.144),
    "tightness, N = 1,001": (lambda: kim_ratio(1001), 1.096),
    "tightness, N = 10,001": (lambda: kim_ratio(10001), 1.070),
    "tightness, N = 100,001": (lambda: kim_ratio(100001), 1.055),
    "quadratic growth, n = 3": (lambda: quadratic(3), 0.6670),
    "quadratic growth, n = 9": (lambda: quadratic(9), 0.8890),
    "mean-field, A = -1, R = 2: bound over 2-Dirac": (lambda: mean_field_ratio(2.0), 1.38),
}


@pytest.mark.parametrize(("compute", "expected"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_values(compute, expected: float) -> None:
    assert compute() == pytest.approx(expected, rel=6e-3 if expected == 1.38 else 5e-4)


def kim_one_dimensional() -> tuple[float, float]:
    layer = L2Attention(30 * eye(1), eye(1))
    return sigma(layer, torch.zeros(2, 1).double()), value("kim_thm_3_2", layer, num_tokens=2)


def kim_ratio(n: int) -> float:
    return value("kim_thm_3_2_infinity", L2Attention(eye(1), eye(1)), num_tokens=n) / tight_value(n)


def quadratic(n: int) -> float:
    x = torch.full((n, 1), 30.0, dtype=torch.float64)
    x[::2] *= -1
    x[0] = 0.0
    return sigma(single(eye(1)), x) / 900


def mean_field_ratio(radius: float) -> float:
    """MF over the supremum of measures on R and -R, by mass."""
    t, best = radius**2, 0.0
    for log_ratio in torch.linspace(0.0, 2 * t + 3, 400).tolist():
        w = torch.tensor([1.0, math.exp(log_ratio)], dtype=torch.float64)
        w = w / w.sum()
        x = radius * torch.tensor([1.0, -1.0], dtype=torch.float64)
        p = torch.softmax(torch.outer(-x, x) + w.log(), 1)
        m = p @ x
        jac = p * (1 + (x - m[:, None]) * -x[:, None]) - torch.diag(p @ x**2 - m**2)
        root = w.sqrt()
        norm = torch.linalg.matrix_norm(jac * root[:, None] / root, 2)
        best = max(best, float(norm), float((p @ x**2 - m**2).max()))
    return value("mean_field", single(-eye(1)), radius=radius) / best


# --- mistakes easily made


def test_row_token_is_the_query() -> None:
    """A and its transpose differ: <A x_i, x_j> with A = K^T Q."""
    (head,) = heads_of(single(torch.tensor([[0.0, 3.0], [0.0, 0.0]])))
    assert torch.equal(head.key.T @ head.query, torch.tensor([[0.0, 3.0], [0.0, 0.0]]).double())


def test_scale_is_inside_a() -> None:
    (head,) = heads_of(DotProduct(2 * eye(4), eye(4), eye(4)))
    assert head.norm_a == pytest.approx(2 / math.sqrt(4))


def test_masked_g2_counts_visible_keys() -> None:
    """The first rows see few keys, so their attention can be large."""
    given = {"num_tokens": 50, "radius": 0.1}
    layers = single(eye(2), causal=True), single(eye(2))
    assert value("global_rows_capped", layers[0], **given) > 1.3 * value(
        "global_rows_capped", layers[1], **given
    )
    x = torch.zeros(50, 2, dtype=torch.float64)
    assert sigma(layers[0], x) > value("global_rows_capped", layers[1], num_tokens=50, radius=1e-6)


def test_a_radius_that_rounding_put_below_the_largest_token_is_put_outward() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    radii = 5.0, 5.0 * (1 - 5e-6)
    exact, near = (
        bounds_at(single(eye(2)), x, radius=r, names=["castin_thm_3_3"])[0] for r in radii
    )
    assert (near.radius, near.value) == (5.0, exact.value)


def test_second_power_of_kim_fails() -> None:
    truth, bound = kim_one_dimensional()
    assert bound / 30 < truth < bound  # 30 = ‖W‖ = ‖W‖⁴ under the root over ‖W‖²


def test_tight_input_attains_the_tight_value() -> None:
    layer = L2Attention(eye(1), eye(1))
    for n in (3, 11, 101):
        op = layer.linearise(tight_input(n))
        assert infinity_norm(op).lower == pytest.approx(tight_value(n))
    assert phi_inverse(2.0) * math.exp(phi_inverse(2.0) + 1) == pytest.approx(2.0)


def test_large_tokens_reach_the_limit() -> None:
    for regime in ("medium", "causal", "masked"):
        layer, x = draw(regime, 1)
        limit = value("castin_thm_3_7_limit", layer, x=x)
        assert sigma(layer, 40 * x) == pytest.approx(limit, rel=1e-3)
        assert limit <= value("castin_thm_3_7", layer, num_tokens=len(x)) * (1 + ROUNDING)


def test_kappa_is_the_maximum() -> None:
    p = torch.linspace(0, 1, 100001, dtype=torch.float64)
    for t in (0.0, 0.2, 0.3, 1.0, 30.0):
        grid = float((p * (1 + t * (4 * p * (1 - p)).clamp_max(1) * 1.0)).max())
        grid = max(grid, 0.5 * (1 + t))
        assert kappa(t) == pytest.approx(grid, rel=1e-6)
