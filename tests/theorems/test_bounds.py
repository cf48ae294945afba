"""Every theorem of the catalogue: sound, ordered as proved, tight where it is said to be."""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layers import THEOREMS, all_cases, counterexample, draw, eye, sigma, single, value
from lipscope import Operator, to_dense
from lipscope.attention import DotProduct
from lipscope.errors import InputError
from lipscope.linalg import infinity_norm, linearise, max_token_norm, top_singular
from lipscope.theorems import (
    DERIVED,
    RECALLED,
    LayerSubject,
    NotApplicableError,
    absorb,
    bounds_at,
    catalogue,
    evaluate,
    heads_of,
    norm_of,
)
from lipscope.theorems.directions import eigen_directions, pair_directions, star_direction
from lipscope.theorems.papers.emadi2026 import balanced_mass
from lipscope.theorems.papers.yudin2025 import norm_of_rows, softmax_norm, top_two
from searched import searched

ROUNDING = 1e-9
# A second on the smallest layer: asked on a few cases only.
COSTLY = {"castin_lemma_3_8", "row_gram", "row_gram_joint", "sink_column_upper"}


# --- soundness, over the registry


@searched(2, 5)
def test_no_upper_bound_is_violated(count: int) -> None:
    """At least 400 comparisons a draw with dense singular values, in the theorem's own metric."""
    checked: Counter[str] = Counter()
    asked = [t for t in catalogue() if t.kind == "upper" and t.sound and t.scope != "limit"]
    asked = [t for t in asked if "eps" not in t.needs]
    cases = enumerate(itertools.product(all_cases(count), ("attention", "heads")))
    for index, ((regime, layer, x), part) in cases:
        if part == "heads" and "heads" not in regime:
            continue  # one head without projection: the same map
        op = layer.linearise(x, map=part)
        dense = to_dense(op)
        truth = {
            "frobenius": float(torch.linalg.matrix_norm(dense, 2)),
            "infinity": float(dense.abs().sum(1).max()),
            "max-token": max_token_norm(_product_with(dense, op), dense=0).lower,
        }
        radius = float(x.norm(dim=1).max())
        shared = LayerSubject(layer, part, x=x)
        for theorem in asked:
            if theorem.name in COSTLY and index >= 8 * count:
                continue
            try:
                bound = evaluate(theorem, shared, num_tokens=len(x), radius=radius)
            except NotApplicableError:
                continue
            checked[theorem.name] += 1
            assert bound >= truth[theorem.metric] * (1 - ROUNDING), (theorem.name, regime, part)
    assert sum(checked.values()) >= 400 * count
    assert set(checked) == {t.name for t in asked}, "a theorem that no case can test"


def _product_with(dense: Tensor, op: Operator) -> Operator:
    """The same operator as one matrix: an ascent of hundreds of products is then cheap."""
    return Operator(
        lambda e: (e.flatten(-2) @ dense.T).unflatten(-1, op.out_shape),
        lambda g: (g.flatten(-2) @ dense).unflatten(-1, op.in_shape),
        op.in_shape,
        op.out_shape,
        op.dtype,
    )


@pytest.mark.parametrize("name", ["castin_thm_4_4", "castin_thm_c_3_coded"])
def test_what_is_called_unsound_fails(name: str) -> None:
    if name == "castin_thm_4_4":
        layer, x = single(1e-9 * eye(1), causal=True), torch.ones(2, 1, dtype=torch.float64)
    else:
        layer, x = counterexample()
    assert not THEOREMS[name].sound
    assert value(name, layer, x=x, num_tokens=len(x), radius=1.0) < 0.9 * sigma(layer, x)


def test_every_unsound_statement_is_shown_to_fail() -> None:
    unsound = {t.name for t in catalogue() if not t.sound}
    assert unsound == {"castin_thm_4_4", "castin_thm_c_3_coded"}


# --- orderings that are proved


def test_orderings() -> None:
    chains = (
        ("local_rows", "global_rows_capped", "global_rows", "castin_thm_3_3"),
        ("global_rows_capped", "mean_field", "geshkovski_mean_field"),
        ("global_rows", "castin_thm_e_3"),
        ("local_rows", "castin_thm_c_3_tightened", "castin_thm_c_3"),
        ("local_rows", "local_rows_scalar"),
        ("local_max_token", "local_max_token_scalar"),
        ("local_max_token", "global_max_token"),
        ("yudin_centred", "yudin_thm_3"),
        ("castin_prop_3_6", "castin_prop_3_6_strengthened"),
        ("castin_prop_3_6_strengthened", "mean_field"),
        ("kim_thm_3_2_improved", "kim_thm_3_2"),
        ("lipsformer_cosine_improved", "lipsformer_cosine"),
    )
    seen = set()
    for _, layer, x in all_cases(3):
        if layer.num_heads > 1 and isinstance(layer, DotProduct):
            continue
        shared = LayerSubject(layer, x=x)
        given = {"num_tokens": len(x), "radius": float(x.norm(dim=1).max())}
        values = {}
        for name in {*itertools.chain(*chains)}:
            with contextlib.suppress(NotApplicableError):
                values[name] = value(name, shared, **given)
        for low, high in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
            if not {low, high} <= {*values}:
                continue
            seen.add((low, high))
            slack = 1e-3 if "yudin" in low else ROUNDING  # ‖P‖ to a thousandth
            assert values[low] <= values[high] * (1 + slack), (low, high, values)
    assert len(seen) == sum(len(chain) - 1 for chain in chains)


# --- lower bounds are reached by their constructions


@pytest.mark.parametrize("causal", [False, True])
def test_lower_bounds_are_reached(causal: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    for trial in range(20):
        a = torch.randn(3, 3, generator=gen, dtype=torch.float64)
        v = eye(3) if trial % 2 else torch.randn(2, 3, generator=gen, dtype=torch.float64)
        layer = single(a, v, causal=causal)
        (head,) = heads_of(layer)
        n, radius = 3 + trial, 0.5 + trial % 4
        star = star_direction(head)
        directions = [("two_cluster_star", star)]
        for eigen in eigen_directions(head)[:1]:
            directions.append(("castin_prop_3_4_strengthened", eigen))
            assert star is not None and star.gamma >= eigen.gamma * (1 - 1e-9)
            if trial % 2:
                stated = value("castin_prop_3_4", layer, num_tokens=n, radius=radius)
                x = radius * eigen.rest.expand(n, -1).clone()
                x[0] = radius * eigen.first
                assert sigma(layer, x) >= stated * (1 - ROUNDING)
                strong = "castin_prop_3_4_strengthened"
                if not causal:
                    assert value(strong, layer, num_tokens=n, radius=radius) >= stated
        for name, direction in directions:
            assert direction is not None
            x = radius * direction.rest.expand(n, -1).clone()
            x[0] = radius * direction.first
            bound = value(name, layer, num_tokens=n, radius=radius)
            assert sigma(layer, x) >= bound * (1 - ROUNDING)
            assert value("global_rows_capped", layer, num_tokens=n, radius=radius) >= bound
        pair = pair_directions(head, n, radius)
        assert pair is not None
        x = torch.stack([pair.first, pair.second, *(n - 2) * [pair.rest]])
        bound = value("opposed_pair_gain", layer, num_tokens=n, radius=radius)
        assert float(x.norm(dim=1).max()) <= radius * (1 + ROUNDING)
        assert sigma(layer, x) >= bound * (1 - ROUNDING)
        least = value("global_rows_capped", layer, num_tokens=n, radius=radius)
        assert bound <= least
        if radius == 3.5 and not causal:  # both grow like √n R² ‖A‖ ‖V‖; their directions differ
            assert least <= 5.0 * bound


def test_unmasked_p_would_fail_under_a_causal_mask() -> None:
    layer, n, t = single(-eye(2), causal=True), 30, 2.0
    p = 1 / (1 + (n - 1) * math.exp(-2 * t))
    x = -torch.tensor([[t**0.5, 0.0]], dtype=torch.float64).expand(n, -1).clone()
    x[0] *= -1
    assert math.sqrt(n - 1) * p * (1 + 2 * t * (1 - p)) > 1.01 * sigma(layer, x)


def test_not_lipschitz_witness() -> None:
    """One token at the origin, the others at ±R u: growth with R²."""
    for causal in (False, True):
        layer, n = single(eye(1), causal=causal), 9
        for radius in (1.0, 10.0, 30.0):
            x = torch.full((n, 1), radius, dtype=torch.float64)
            x[::2] *= -1
            x[-1] = 0.0
            bound = value("kim_thm_3_1", layer, num_tokens=n, radius=radius)
            assert sigma(layer, x) >= bound * (1 - ROUNDING)
            assert bound == pytest.approx(1 / n + radius**2 * (n - 1) / n)


def test_mean_field_lower_bound_is_a_number_of_tokens_away() -> None:
    """n - 1 = e^(2 gamma R²), rounded: Proposition 3.6 within its integer."""
    layer, radius = single(-eye(1)), 1.5
    n = 1 + math.ceil(math.exp(2 * radius**2))
    x = torch.full((n, 1), -radius, dtype=torch.float64)
    x[0] *= -1
    assert sigma(layer, x) >= value("castin_prop_3_6", layer, radius=radius)


# --- parts


def test_softmax_norms() -> None:
    gen = torch.Generator().manual_seed(0)
    p = torch.softmax(3 * torch.randn(50, 6, generator=gen, dtype=torch.float64), 1)
    p = torch.cat([p, torch.full((1, 6), 1 / 6, dtype=p.dtype), eye(6)[:1]])
    jac = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    exact = torch.linalg.matrix_norm(jac, 2)
    assert torch.allclose(softmax_norm(p), exact, atol=1e-12)
    assert bool((top_two(p) >= exact - 1e-12).all())
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6))).double()
    to_sum = (jac @ signs.T).abs().sum(1).amax(1)
    assert bool((balanced_mass(p) >= to_sum - 1e-12).all())


def test_norm_of_rows_is_never_below() -> None:
    for regime, seed in itertools.product(("sharp", "causal", "masked"), range(10)):
        layer, x = draw(regime, seed)
        p = layer.weights(*layer.project(x)[:2])[0]
        exact = float(torch.linalg.matrix_norm(p, 2))
        assert exact * (1 - 1e-12) <= norm_of_rows(p) <= 1.01 * exact


def test_other_norms_agree_with_brute_force() -> None:
    layer, x = draw("medium", 3)
    op = layer.linearise(x)
    dense = to_dense(op)
    exact = infinity_norm(op)
    assert exact.lower == exact.upper
    assert infinity_norm(op).lower == pytest.approx(float(dense.abs().sum(1).max()))
    estimate = infinity_norm(op, dense=0)
    assert estimate.upper is None and estimate.lower <= infinity_norm(op).lower * (1 + ROUNDING)
    both = max_token_norm(op)
    assert both.upper is not None and both.lower <= both.upper <= 1.6 * both.lower
    assert max_token_norm(op, dense=0).lower <= both.lower * (1 + ROUNDING)


def test_tokens_that_an_output_does_not_read_have_no_direction_in_float32() -> None:
    layer, x = draw("causal", 3)
    op = layer.linearise(x)
    dense = to_dense(op).float()

    def product(matrix: Tensor, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        return lambda e: (e.flatten(-2) @ matrix.mT).unflatten(-1, shape)

    maps = product(dense, op.out_shape), product(dense.mT, op.in_shape)
    single = Operator(*maps, op.in_shape, op.out_shape)
    for entries in (10**6, 0):
        found, right = (max_token_norm(one, dense=entries) for one in (single, op))
        assert found.lower == pytest.approx(right.lower, rel=1e-5)
        assert found.upper == (right.upper and pytest.approx(right.upper, rel=1e-5))


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_absorbed_norms(kind: type) -> None:
    for width in (5, 6):
        torch.manual_seed(0)
        module = kind(width, eps=1e-12, dtype=torch.float64)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter).requires_grad_(False)
        norm = norm_of(module, width)
        assert torch.allclose(norm.weight, module.weight)
        x = torch.randn(7, width, dtype=torch.float64)
        layer = DotProduct(*torch.randn(3, 4, width, dtype=torch.float64))
        absorbed = absorb(layer, norm)
        assert torch.allclose(absorbed(norm.direction(x)), layer(module(x)))
        assert float(module(x).norm(dim=1).max()) <= norm.radius
        jac = torch.func.jacrev(lambda z, f=layer, m=module: f(m(z)))(x).reshape(-1, x.numel())
        bound = value("global_rows_capped", absorbed, num_tokens=7, radius=1.0) * float(
            norm.slope(x).max()
        )
        assert float(torch.linalg.matrix_norm(jac, 2)) <= bound


def on_segment(f, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """``‖f(Y) - f(X)‖ / ‖Y - X‖``; mean (Gauss–Legendre) and largest sigma between the two."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    points = [x + float(t) * (y - x) for t in (nodes + 1) / 2]
    sigmas = [
        top_singular(linearise(f, point), generator=torch.Generator()).upper for point in points
    ]
    return float((f(y) - f(x)).norm() / (y - x).norm()), float(weights @ sigmas / 2), max(sigmas)


def test_finite_differences_stay_below_sigma_on_the_segment() -> None:
    for seed in range(5):
        layer, x = draw("medium", seed)
        slope, _, largest = on_segment(layer, x, x.flip(0) + 0.5)
        assert slope <= largest


def test_lemma_3_1_needs_a_convex_set() -> None:
    """The angle on the plane without a half-line: its slope is 1 / r, and it jumps by 2π."""

    def angle(x: Tensor) -> Tensor:
        return torch.atan2(x[..., 1], x[..., 0])

    above = torch.tensor([-1.0, 0.1], dtype=torch.float64)
    below = torch.tensor([-1.0, -0.1], dtype=torch.float64)
    slope, _, largest = on_segment(angle, above, below)
    assert slope > 10 * largest
    slope, mean, largest = on_segment(angle, -above, -below)  # the half-plane x > 0 is convex
    assert slope <= largest and slope == pytest.approx(mean, rel=1e-2)


# --- the table


def test_table_has_every_theorem_with_value_or_reason() -> None:
    layer, x = draw("heads, grouped, biased, causal", 0)
    rows = bounds_at(layer, x)
    assert [row.theorem for row in rows] == [theorem.name for theorem in catalogue()]
    for row in rows:
        assert row.applicable == (row.value is not None) == (not row.reason)
        assert row.value is None or math.isfinite(row.value)
    one = {row.theorem: row for row in bounds_at(layer, x, head=2)}
    assert one["global_rows_capped"].value is not None
    op = layer.linearise(x, per_head=True)
    dense = torch.stack([op.matvec(e.expand(4, *x.shape))[2].flatten() for e in units(x)], 1)
    assert one["global_rows_capped"].value >= float(torch.linalg.matrix_norm(dense, 2))


def units(x: torch.Tensor) -> torch.Tensor:
    return eye(x.numel()).reshape(-1, *x.shape)


def test_values_beyond_float64_are_not_given() -> None:
    rows = {row.theorem: row for row in bounds_at(single(eye(2)), num_tokens=4, radius=100.0)}
    assert rows["mean_field"].value is None
    assert rows["mean_field"].reason == "its value exceeds the float64 range"
    assert rows["global_rows_capped"].applicable


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"radius": -1.0, "num_tokens": 4}, r"`radius` should be positive. Found `radius = -1.0`."),
        ({"radius": 1.0, "num_tokens": 0}, r"`num_tokens` should be a positive integer"),
        ({"radius": "1", "num_tokens": 4}, r"`radius` should be positive. Found `radius = '1'`"),
        ({"x": 5}, r"`x` should have shape \(n, 2\), n at least 1. Found 5"),
        ({"radius": math.nan}, r"`radius` should be positive. Found `radius = nan`."),
        ({"x": torch.full((3, 2), math.nan)}, r"`x` should be finite. Found NaN .* token 0."),
        ({"x": torch.ones(3, 4)}, r"`x` should have shape \(n, 2\)"),
        ({"x": torch.ones(3, 2), "num_tokens": 4}, r"`num_tokens` should be that of `x`, 3."),
        ({"x": torch.ones(3, 2), "radius": 0.5}, r"`radius` should be at least the largest"),
        ({"head": 1}, r"`head` should be between 0 and 0. Found `head = 1`."),
        ({"head": "a"}, r"`head` should be between 0 and 0. Found `head = 'a'`"),
        ({"head": False}, r"`head` should be between 0 and 0. Found `head = False`"),
        ({"x": torch.ones(3, 2).cfloat()}, r"`x` should be real. Found numbers of torch.complex64"),
        ({"names": "local_row"}, r"in `lipscope.catalogue\(\)`. Found `local_row`."),
    ],
)
def test_bad_input_says_what_to_change(given, message: str, unchecked: Any) -> None:
    with pytest.raises(InputError, match=message):
        bounds_at(single(eye(2)), **given)


def test_wrong_weights_say_which() -> None:
    with pytest.raises(InputError, match=r"`layer.value` should be finite"):
        bounds_at(single(eye(2), math.nan * eye(2)), num_tokens=3, radius=1.0)


def test_what_was_recalled_says_so_wherever_it_is_printed() -> None:
    """Kim's theorem in both norms, LipsFormer's and LipschitzNorm's were not seen in print."""
    told = {one.name for one in catalogue() if one.statement.endswith(f"({RECALLED})")}
    assert told == {
        "kim_thm_3_2_infinity",
        "kim_thm_3_2",
        "lipsformer_cosine",
        "dasoulas_lipschitz_norm",
    }
    for name in told:
        assert THEOREMS[name].record(1.0).statement == THEOREMS[name].statement


def test_every_theorem_says_what_it_is() -> None:
    for theorem in catalogue():
        text = theorem.function.__doc__ or ""
        assert (theorem.summary.endswith((".", ":")) and "Holds " in text) or not theorem.sound
        assert theorem.cite == DERIVED or theorem.cite.isidentifier()
