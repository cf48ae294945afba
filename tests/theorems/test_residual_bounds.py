"""The map `residual`: bounds that hold with the stream beside attention, and norms around it."""

import itertools

import pytest
import torch
from torch import nn

import lipscope as ls
from command import TEXT
from examples import EXAMPLES, build
from hostile import EXTENDED, KINDS, hostile, residual_jacobian, sigma_from_below
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


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_no_bound_of_a_residual_map_is_violated(form: str, both: bool) -> None:
    """Against the dense Jacobian, of every kind of layer; each form of norms around it.

    Every kind of layer with one kind of norm, and in the slow lane with both.
    """
    sound = {t.name for t in catalogue() if t.sound and t.kind == "upper"}
    checked: dict[str, int] = {}
    for (a, kind), (b, regime) in itertools.product(
        enumerate((nn.LayerNorm, nn.RMSNorm)), enumerate(REGIMES)
    ):
        if not both and (b // 3) % 2 != a:
            continue
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


def below(kind: str, seed: int, form: str) -> list[str]:
    """Bounds below sigma in 64 bits of mantissa."""
    attention, x = hostile(kind, seed)
    d = x.shape[1]
    if attention.output is None or d == 1:
        return []
    eps, g = (1e-12, 1e-5)[seed % 2], torch.Generator().manual_seed(seed)
    module = nn.RMSNorm(d, eps=eps, dtype=torch.float64).requires_grad_(False)
    module.weight.data = torch.randn(d, generator=g, dtype=torch.float64)
    layer = Residual(
        Normed(attention, module) if form in ("pre-norm", "both sides") else attention,
        second=module if form in ("both sides", "own output") else None,
        outer=module if form == "post-norm" else None,
    )
    dense = residual_jacobian(attention, x, form, module.weight.numpy(), eps)
    truth = sigma_from_below(dense) * (1 - 1e-15)
    return [
        bound.theorem
        for bound in bounds_at(layer, x, metric="frobenius", sharp=True)
        if bound.value is not None and bound.kind == "upper" and bound.sound
        if bound.scope not in ("mean-field", "limit") and bound.value < truth
    ]


hostile_only = pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")


@hostile_only
@pytest.mark.parametrize("form", FORMS)
def test_hostile_layers(form: str) -> None:
    """Heads that cancel, saturated rows, equal tokens, zeros, scales of 1e-30 to 1e30."""
    for kind, seed in itertools.product(KINDS, range(2)):
        assert below(kind, seed, form) == [], (kind, seed)


@hostile_only
def test_columns_through_a_norm_keep_their_digits() -> None:
    """``1 - κ |u|^2`` is 1e-24 for tokens far above ε; 1e-16 of rounding in it were 1e-8."""
    assert below("plain", 58, "pre-norm") == []
    assert below("zero", 8, "post-norm") == []  # a norm at zero, its slope in float64


@hostile_only
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_layers(kind: str) -> None:
    for form, seed in itertools.product(FORMS, range(2, 60)):
        assert below(kind, seed, form) == [], (form, seed)


# --- what is refused


def test_what_does_not_carry_over_says_why() -> None:
    attention, x = draw("medium", 0)
    rms = norm(nn.RMSNorm, 5, 0.0)
    rows = {b.theorem: b for b in bounds_at(Residual(square(attention, 0), outer=rms), x)}
    assert rows["two_cluster_star"].reason == "it is stated for attention without the residual path"
    assert rows["castin_thm_3_7_limit"].reason == "its limit is that of attention alone"
    assert "ε = 0" in rows["global_rows_capped"].reason
    assert rows["local_rows"].applicable
    minus = DotProduct(*3 * [torch.eye(5).double()], output=-torch.eye(5).double())
    equal = bounds_at(Residual(minus, outer=rms), x[:1].expand(3, -1))  # f(x) = -x
    assert "cancels" in next(b.reason for b in equal if b.theorem == "local_rows")


def test_bad_input_says_what_to_change() -> None:
    attention, x = draw("heads", 0)  # writes tokens of another width
    with pytest.raises(ls.InputError, match="`layer` should preserve the token width"):
        bounds_at(Residual(attention), x)
    layer = Residual(square(attention, 0))
    with pytest.raises(ls.InputError, match="`map` and `head` should be left out"):
        bounds_at(layer, x, head=0)
    with pytest.raises(ls.InputError, match="should be an RMSNorm or a LayerNorm"):
        bounds_at(Residual(layer.attention, outer=nn.Tanh()), x)


def test_other_variants_and_metrics() -> None:
    layer, x = draw_variant("L2", 0)
    values = {b.theorem: b.value for b in bounds_at(layer, x)}
    added = layer.replace(output=torch.eye(4).double()[:, : layer.value_width * layer.num_heads])
    known = {b.theorem: b.value for b in bounds_at(added, x)}
    assert values.keys() == known.keys()
    for bound in bounds_at(Residual(added), x):
        if bound.value is not None:
            assert bound.value == pytest.approx(1 + known[bound.theorem])


# --- models


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_residual_maps_of_models(family: str) -> None:
    """Post-norm (BERT), pre-norm (GPT-2), RMSNorm and rotary embedding (Llama)."""
    model = f"random:{family}:{TINY[family]}"
    found = ls.bounds(model, TEXT, layers=[1], lengths=[6], map="residual", sharp=True)
    of = by_row(found.bounds)
    for row in found:
        compared = {b.theorem: t for b in of[row.id] if (t := looseness(b, row)) is not None}
        assert len(compared) >= (5 if family == "llama" else 9)
        assert min(compared.values()) >= 1 - ROUNDING
        assert compared["row_gram_joint"] < 1.1
        assert ("On the whole space they are at most" in (row.note or "")) == (family != "bert")


def test_a_radius_goes_with_no_norm_in_front() -> None:
    about = {"layers": [0], "lengths": [6], "map": "residual", "radius": 9.0}
    with pytest.raises(ls.InputError, match="`radius` should be left out for a layer with a norm"):
        ls.bounds(f"random:gpt2:{TINY['gpt2']}", TEXT, **about)
    assert all(
        b.radius == 9.0 for b in ls.bounds(f"random:bert:{TINY['bert']}", TEXT, **about).bounds
    )


@pytest.mark.parametrize("kind", [one for one in EXAMPLES if one is not DotProduct])
def test_other_kinds_with_norms_around_them_have_bounds_for_all_inputs_or_a_reason(kind):
    """The norm's slope at an input asks for the rounding of what the heads write."""
    layer = build(kind)
    given = {name: getattr(layer, name, None) for name in ("output", "output_bias")}
    width = layer.query.shape[1]
    layer = layer.replace(**{name: one[:width] for name, one in given.items() if one is not None})
    around = nn.LayerNorm(width).double()
    for second, outer in ((around, None), (None, around), (around, around)):
        found = bounds_at(Residual(layer, second, outer), torch.randn(5, width))
        assert found and all(one.applicable or one.reason for one in found)
