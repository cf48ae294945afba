"""The map `normed`: what is read off a norm, and bounds that hold through it."""

import itertools
import re

import pytest
import torch
from torch import nn

import lipscope as ls
from command import TEXT
from layers import REGIMES, draw, draw_variant
from lipscope import Operator, to_dense
from lipscope.attention import DotProduct
from lipscope.linalg import max_token_norm
from lipscope.records.comparison import by_row, looseness
from lipscope.theorems import HeadAt, LayerSubject, Normed, bounds_at, catalogue, norm_of
from lipscope.theorems.derived.local_bounds import local_norms, local_rows
from lipscope.theorems.derived.row_gram import JacobianRows, row_gram_joint
from opened import layer_of
from tiny import TINY

ROUNDING = 1e-9
KINDS = (nn.LayerNorm, nn.RMSNorm)


def norm(kind: type, width: int, eps: float, seed: int = 0, dtype=torch.float64) -> nn.Module:
    """A norm with random gain and, for LayerNorm, shift."""
    module = kind(width, eps=eps, dtype=dtype)
    gen = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(width, generator=gen).to(dtype)
    return module.requires_grad_(False)


def jacobian(layer: Normed, x: torch.Tensor) -> torch.Tensor:
    """By automatic differentiation of both modules: nothing of it is a closed form of ours."""
    dense = torch.func.jacrev(lambda z: layer.attention(layer.norm(z)))(x)
    return dense.flatten(2).flatten(0, 1)


def operator(dense: torch.Tensor, like: Operator) -> Operator:
    """The operator of a dense matrix: its products cost nothing."""
    return Operator(
        lambda e: (e.flatten(-2) @ dense.T).unflatten(-1, like.out_shape),
        lambda g: (g.flatten(-2) @ dense).unflatten(-1, like.in_shape),
        like.in_shape,
        like.out_shape,
        dense.dtype,
    )


# --- what a norm is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 0.1])
def test_a_norm_is_read_off_its_outputs(kind: type, eps: float) -> None:
    for width, dtype in itertools.product((2, 5, 6, 33), (torch.float64, torch.float32)):
        if width == 2 and kind is nn.LayerNorm:
            continue  # its tokens are two points
        module = norm(kind, width, eps, width, dtype)
        found = norm_of(module, width)
        exact = {"rtol": 1e-9 if dtype == torch.float64 else 1e-5, "atol": 1e-6}
        assert torch.allclose(found.weight, module.weight.double(), **exact)
        shift = getattr(module, "bias", None)
        shift = torch.zeros(width) if shift is None else shift
        assert torch.allclose(found.bias, shift.double())
        assert found.centred == (kind is nn.LayerNorm)
        assert found.eps == pytest.approx(eps, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_direction_and_slope_are_those_of_the_module(kind: type) -> None:
    for seed, eps in itertools.product(range(3), (1e-12, 0.2)):
        module = norm(kind, 6, eps, seed)
        found = norm_of(module, 6)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()
        u, slope = found.direction(x), found.slope(x)
        assert torch.allclose(6**0.5 * found.weight * u + found.bias, module(x))
        assert bool((u.norm(dim=1) <= 1 + 1e-15).all())
        for i in range(4):
            jac = torch.func.jacrev(module)(x[i]) / (6**0.5 * found.weight)[:, None]
            expected = slope[i] * (torch.eye(6) - torch.outer(u[i], u[i]))
            if found.centred:
                expected = expected - slope[i] / 6
            assert torch.allclose(jac, expected, atol=1e-9)
            assert float(torch.linalg.matrix_norm(jac, 2)) <= slope[i] * (1 + ROUNDING)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Tanh(), nn.GroupNorm(2, 6)])
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    with pytest.raises(ls.InputError, match=f"Found `{type(module).__name__}`"):
        norm_of(module, 6)


# --- soundness


def test_no_bound_of_the_map_normed_is_violated() -> None:
    """Against the dense Jacobian of both modules, in each theorem's own metric."""
    sound = {t.name for t in catalogue() if t.sound and t.kind == "upper"}
    checked: dict[str, int] = {}
    for (a, kind), (b, regime) in itertools.product(enumerate(KINDS), enumerate(REGIMES)):
        seed, eps = b % 3, (1e-12, 0.3)[(a + b) % 2]
        attention, x = draw(regime, seed)
        layer = Normed(attention, norm(kind, 5, eps, seed))
        op = layer.linearise(x)
        dense = jacobian(layer, x)
        assert torch.allclose(to_dense(op), dense, atol=1e-8 * float(dense.abs().max()))
        truth = {
            "frobenius": float(torch.linalg.matrix_norm(dense, 2)),
            "max-token": max_token_norm(operator(dense, op), dense=0).lower,
            "infinity": float(dense.abs().sum(1).max()),
        }
        for bound in bounds_at(layer, x, sharp=(a + b) % 9 == 0):
            assert bound.radius is None
            if bound.value is not None and bound.theorem in sound:
                checked[bound.theorem] = checked.get(bound.theorem, 0) + 1
                least = truth[bound.metric] * (1 - ROUNDING)
                assert bound.value >= least, (bound.theorem, regime, kind, eps, seed)
    assert sum(checked.values()) >= 600
    assert {
        "local_norms",
        "local_rows",
        "row_gram_joint",
        "global_rows_capped",
        "global_rotary",
        "mean_field",
    } <= {*checked}
    assert min(checked.values()) >= 2, checked


def test_bounds_of_heads_through_a_norm() -> None:
    attention, x = draw("heads, grouped, biased, causal", 1)
    layer = Normed(attention, norm(nn.LayerNorm, 5, 1e-5))
    op = layer.linearise(x, per_head=True)
    basis = torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    for head in range(4):
        dense = torch.stack([op.matvec(e.expand(4, *x.shape))[head].flatten() for e in basis], 1)
        sigma = float(torch.linalg.matrix_norm(dense, 2))
        values = {b.theorem: b.value or 0.0 for b in bounds_at(layer, x, head=head, sharp=True)}
        for name in (
            "local_norms",
            "local_rows",
            "local_blocks",
            "row_gram",
            "row_gram_joint",
            "global_rows_capped",
        ):
            assert values[name] >= sigma * (1 - ROUNDING), name


@pytest.mark.parametrize("regime", ["biased, causal", "heads", "rotary, biased, causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_row_grams_take_the_norm_exactly(regime: str, kind: type) -> None:
    attention, x = draw(regime, 2)
    layer = Normed(attention, norm(kind, 5, 0.2))
    n, d = x.shape
    dense = jacobian(layer, x).view(n, -1, n, d)
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).double() + 0.1
    gram = torch.einsum("iajb,icjb,ij->iac", dense, dense, 1 / weights)
    u, slope = layer.constants.direction(x), layer.constants.slope(x)
    together = LayerSubject(layer.absorbed, x=u).together
    rows = JacobianRows(together, slope)
    expected = torch.linalg.eigvalsh(gram)[:, -1]
    assert torch.allclose(rows.eigenvalues(weights), expected, rtol=1e-9)
    probes = torch.randn(n, rows.width, 2, generator=torch.Generator().manual_seed(1)).double()
    outward = probes
    if together.output is not None:
        outward = torch.linalg.qr(together.output).Q @ probes
    seen = torch.einsum("iajb,iam->ijbm", dense, outward).square().sum((2, 3))
    assert torch.allclose(rows.seen(probes), seen, rtol=1e-9, atol=1e-12)


def test_slopes_by_token_are_sharper_than_the_chain_rule() -> None:
    for seed in range(4):
        attention, x = draw("biased", seed)
        x[0] *= 20  # one large token: only its own column is damped
        layer = Normed(attention, norm(nn.RMSNorm, 5, 1e-5, seed))
        u, slope = layer.constants.direction(x), layer.constants.slope(x)
        asked = LayerSubject(layer.absorbed, x=u)
        (head,) = asked.each(HeadAt)
        for form, at in ((local_norms, head), (local_rows, head), (row_gram_joint, asked.together)):
            through = form(at, slope)
            assert through <= form(at) * float(slope.max()) * (1 + ROUNDING)


# --- all inputs


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_on_the_whole_space(kind: type) -> None:
    """Without a floor they hold at the smallest tokens, where the norm is steepest."""
    attention, x = draw("biased", 0)
    layer = Normed(attention, norm(kind, 5, 1e-3))
    values = {b.theorem: b.value or 0.0 for b in bounds_at(layer, num_tokens=len(x))}
    here = {b.theorem: b.value or 0.0 for b in bounds_at(layer, x)}
    assert here["global_rows_capped"] < values["global_rows_capped"]
    for size in (1e-6, 1e-3, 1e-2, 0.03, 0.1, 1.0, 100.0):
        sigma = float(torch.linalg.matrix_norm(jacobian(layer, size * x), 2))
        assert values["global_rows_capped"] >= sigma
    # No slope is larger than 1 / √(d ε), and a token of norm 0 has it.
    assert float(layer.constants.slope(0 * x).max()) == pytest.approx(1 / (5 * 1e-3) ** 0.5)


def test_without_epsilon_there_is_no_bound_near_zero() -> None:
    attention, x = draw("medium", 0)
    layer = Normed(attention, norm(nn.RMSNorm, 5, 0.0))
    rows = {b.theorem: b for b in bounds_at(layer, num_tokens=4)}
    assert rows["global_rows_capped"].reason == (
        "its norm has ε = 0: there is no bound near tokens of norm 0"
    )
    assert {b.theorem: b.applicable for b in bounds_at(layer, x)}["global_rows_capped"]


def test_what_does_not_carry_over_says_why() -> None:
    attention, x = draw("medium", 0)
    capped = DotProduct(attention.query, attention.key, attention.value, softcap=5.0)
    rows = {b.theorem: b for b in bounds_at(Normed(capped, norm(nn.RMSNorm, 5, 1e-5)), x)}
    assert rows["local_norms"].reason == "its scores are soft-capped"
    rows = {b.theorem: b for b in bounds_at(Normed(attention, norm(nn.RMSNorm, 5, 1e-5)), x)}
    assert rows["two_cluster_star"].reason == "its inputs are not outputs of a norm"
    assert rows["castin_thm_3_7_limit"].reason == "tokens do not grow after a norm"
    assert rows["castin_thm_3_3"].applicable
    shifted = {b.theorem: b for b in bounds_at(Normed(attention, norm(nn.LayerNorm, 5, 1e-5)), x)}
    assert shifted["castin_thm_3_3"].reason == "its queries have a bias"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"radius": 1.0}, r"`radius` should be left out .* Found `radius = 1.0`."),
        ({"map": "heads"}, r"`map` should be 'attention' for a layer with a norm in front"),
        ({"floor": -1.0}, r"`floor` should be 0 or positive. Found `floor = -1.0`."),
        ({"floor": 1e6}, r"`floor` should be at most the smallest token norm of `x`"),
        ({"x": torch.ones(3, 5).double()}, r"Found token 0, constant, and a norm with ε = 0."),
    ],
)
def test_bad_input_says_what_to_change(given, message: str) -> None:
    attention, x = draw("medium", 0)
    with pytest.raises(ls.InputError, match=message):
        bounds_at(Normed(attention, norm(nn.LayerNorm, 5, 0.0)), **{"x": x, **given})


def test_a_floor_without_a_norm_and_a_norm_before_another_variant() -> None:
    attention, x = draw("medium", 0)
    with pytest.raises(ls.InputError, match="`floor` should be left out"):
        bounds_at(attention, x, floor=1.0)
    other, y = draw_variant("L2", 0)
    with pytest.raises(ls.InputError, match="Found `L2Attention`"):
        bounds_at(Normed(other, norm(nn.RMSNorm, 4, 1e-5)), y)


# --- models


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("per_head", [False, True])
def test_normed_layers_of_models(family: str, per_head: bool) -> None:
    """Post-norm with biases (BERT), pre-norm (GPT-2), RMSNorm and rotary embedding (Llama)."""
    model = f"random:{family}:{TINY[family]}"
    about = {"layers": [1], "lengths": [6], "map": "normed", "per_head": per_head}
    found = ls.bounds(model, TEXT, sharp=True, **about)
    expected = ls.measure(model, TEXT, samples=1, dtype="float64", **about)
    assert [r.sigma for r in found] == pytest.approx([r.sigma for r in expected], rel=1e-2)
    of = by_row(found.bounds)
    for row in found:
        mine = of[row.id]
        compared = [times for b in mine if (times := looseness(b, row)) is not None]
        assert len(compared) >= (5 if family == "llama" else 9)
        assert min(compared) >= 1 - ROUNDING
        assert row.map == "normed"
        assert all(b.radius is None and (b.floor or 0.0) > 0 for b in mine)
        said = re.search(r"has a norm below (.+)\. On the whole space they are", row.note or "")
        assert said and float(said[1]) >= max(b.floor or 0.0 for b in mine)


def test_a_captured_layer_with_its_norm() -> None:
    model = f"random:llama:{TINY['llama']}"
    layer, x = layer_of(model, TEXT, layer=1, length=6, map="normed")
    plain, u = layer_of(model, TEXT, layer=1, length=6)
    assert torch.allclose(layer(x), plain(u))
    assert isinstance(layer, Normed) and torch.allclose(layer.norm(x), u)
    assert all(b.radius is None and (b.floor or 0.0) > 0 for b in bounds_at(layer, x))
    with pytest.raises(ls.InputError, match="`radius` should be left out"):
        ls.bounds(model, TEXT, layers=[0], lengths=[6], map="normed", radius=3.0)
