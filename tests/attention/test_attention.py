"""Attention in closed form: against autograd, dense SVD, finite differences, exact oracles."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from lipscope import linearise, lipschitz_bound, to_dense, top_singular
from lipscope.attention import Distance, DotProduct, L2Attention, Rotary, TokenNorm
from lipscope.certificates import certify_ball
from lipscope.errors import InputError


def random_layer(
    seed: int = 0,
    *,
    n: int = 5,
    d: int = 6,
    heads: int = 1,
    groups: int | None = None,
    k: int = 4,
    d_v: int = 3,
    d_out: int | None = 5,
    biases: bool = False,
    causal: bool = False,
    masked: bool = False,
    rotary: bool = False,
    window: int | None = None,
    bias: bool = False,
    softcap: float | None = None,
    norm: str | None = None,
) -> tuple[DotProduct, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    groups = groups or heads
    mask = None
    if masked:
        mask = (torch.rand(heads, n, n, generator=g) < 0.6) | torch.eye(n, dtype=torch.bool)
    layer = DotProduct(
        t(heads * k, d),
        t(groups * k, d),
        t(groups * d_v, d),
        None if d_out is None else t(d_out, heads * d_v),
        heads=heads,
        groups=groups,
        query_bias=t(heads * k) if biases else None,
        key_bias=t(groups * k) if biases else None,
        value_bias=t(groups * d_v) if biases else None,
        output_bias=t(d_out) if biases and d_out else None,
        causal=causal,
        mask=mask,
        rotary=Rotary(t(n, k), t(n, k)) if rotary else None,
        window=window,
        score_bias=t(heads, n, n) if bias else None,
        softcap=softcap,
        query_norm=TokenNorm(t(k * (heads if norm == "all heads" else 1)), 0.1) if norm else None,
        key_norm=TokenNorm(t(k * (groups if norm == "all heads" else 1)), 0.1) if norm else None,
    )
    return layer, t(n, d)


def jacobian(layer, x) -> torch.Tensor:
    dense = torch.autograd.functional.jacobian(layer, x)
    assert isinstance(dense, torch.Tensor)
    return dense.reshape(-1, x.numel())


CASES = {
    "one head": {},
    "heads": {"heads": 3},
    "grouped": {"heads": 4, "groups": 2},
    "one group": {"heads": 3, "groups": 1},
    "no projection": {"heads": 2, "d_out": None},
    "biases": {"heads": 2, "biases": True},
    "causal": {"heads": 2, "causal": True},
    "masked": {"heads": 2, "masked": True},
    "masked and causal": {"heads": 2, "masked": True, "causal": True},
    "rotary": {"heads": 2, "rotary": True},
    "window": {"heads": 2, "causal": True, "window": 2},
    "window both ways": {"heads": 2, "window": 2},
    "bias of the scores": {"heads": 2, "bias": True, "causal": True},
    "soft cap": {"heads": 2, "softcap": 1.5, "causal": True},
    "norm of every head": {"heads": 4, "groups": 2, "norm": "each head", "biases": True},
    "norm of all heads": {"heads": 4, "groups": 2, "norm": "all heads", "biases": True},
    "everything": {
        "heads": 4,
        "groups": 2,
        "biases": True,
        "causal": True,
        "masked": True,
        "rotary": True,
        "window": 3,
        "bias": True,
        "softcap": 1.0,
        "norm": "all heads",
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("memory", [2**30, 400], ids=["stored", "recomputed in chunks"])
def test_products_are_the_dense_jacobian(name, memory):
    layer, x = random_layer(**CASES[name])
    op = layer.linearise(x, memory=memory)
    dense = jacobian(layer, x)
    scale = float(dense.abs().max())
    assert torch.allclose(to_dense(op), dense, atol=1e-12 * scale)
    assert torch.allclose(to_dense(op.T), dense.T, atol=1e-12 * scale)


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_agrees_with_finite_differences(name):
    """Central differences with step 1e-5: error 1e-10 curvature plus 1e-11 rounding."""
    layer, x = random_layer(seed=1, **CASES[name])
    e = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    h = 1e-5
    numeric = (layer(x + h * e) - layer(x - h * e)) / (2 * h)
    exact = layer.linearise(x).matvec(e)
    assert float((numeric - exact).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("name", CASES)
def test_single_heads_add_up_to_the_layer(name):
    layer, x = random_layer(**CASES[name])
    e = torch.randn(x.shape, dtype=torch.float64)
    copies = e.expand(layer.num_heads, *e.shape)
    whole, parts = layer.linearise(x).matvec(e), layer.linearise(x, per_head=True).matvec(copies)
    if layer.output is None:
        assert torch.allclose(torch.cat(list(parts), dim=1), whole, atol=1e-11)
    else:
        assert torch.allclose(parts.sum(0), whole, atol=1e-11)
    slices = layer.linearise(x, per_head=True, map="heads").matvec(copies)
    concat = layer.linearise(x, map="heads").matvec(e)
    assert torch.allclose(torch.cat(list(slices), dim=1), concat, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_single_heads_satisfy_the_adjoint_identity(name):
    layer, x = random_layer(**CASES[name])
    op = layer.linearise(x, per_head=True)
    e = torch.randn(layer.num_heads, *op.in_shape, dtype=torch.float64)
    g = torch.randn(layer.num_heads, *op.out_shape, dtype=torch.float64)
    left, right = (op.matvec(e) * g).sum((1, 2)), (e * op.rmatvec(g)).sum((1, 2))
    assert torch.allclose(left, right, rtol=1e-11)


@given(
    n=st.integers(1, 6),
    d=st.integers(1, 5),
    heads=st.integers(1, 3),
    k=st.integers(1, 4),
    d_v=st.integers(1, 4),
    causal=st.booleans(),
    biases=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_shape_against_autograd_and_the_dense_svd(n, d, heads, k, d_v, causal, biases, seed):
    layer, x = random_layer(seed, n=n, d=d, heads=heads, k=k, d_v=d_v, causal=causal, biases=biases)
    op, dense = layer.linearise(x), jacobian(layer, x)
    assert torch.allclose(to_dense(op), dense, atol=1e-11 * float(dense.abs().max()))
    truth = float(torch.linalg.matrix_norm(dense, 2))
    top = top_singular(op, tol=1e-10, generator=torch.Generator().manual_seed(seed))
    assert math.isclose(top.sigma, truth, rel_tol=1e-9)
    assert top.upper >= truth * (1 - 1e-12)


def test_the_generic_path_agrees_with_the_closed_form():
    layer, x = random_layer(heads=2, causal=True, biases=True)
    generic = linearise(layer, x)
    assert torch.allclose(to_dense(generic), to_dense(layer.linearise(x)), atol=1e-11)


# --- exact oracles (THEORY: implementation advice)


def spectral(matrix: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def test_one_token_gives_the_value_matrix():
    layer, x = random_layer(n=1, d_out=None)
    assert torch.allclose(to_dense(layer.linearise(x)), layer.value, atol=1e-13)


def one_head(a: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> DotProduct:
    """``S_ij = <A x_i, x_j>`` and values ``V x_j``."""
    return DotProduct(a, torch.eye(a.shape[0], dtype=a.dtype), v, scale=1.0, causal=causal)


def test_zero_scores_unmasked_give_the_norm_of_the_value_matrix():
    v = torch.randn(3, 3, dtype=torch.float64)
    layer = one_head(torch.zeros(3, 3, dtype=torch.float64), v)
    x = torch.randn(7, 3, dtype=torch.float64)
    assert math.isclose(spectral(to_dense(layer.linearise(x))), spectral(v), rel_tol=1e-12)


@pytest.mark.parametrize("n", [2, 10])
def test_zero_scores_masked_give_the_cesaro_matrix(n):
    one = torch.ones(1, 1, dtype=torch.float64)
    layer = one_head(0 * one, one, causal=True)
    cesaro = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    x = torch.randn(n, 1, dtype=torch.float64)
    assert torch.allclose(to_dense(layer.linearise(x)), cesaro, atol=1e-14)
    if n == 2:
        assert round(spectral(cesaro), 4) == 1.1441  # THEORY B14


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_duplicated_tokens_give_the_splitting_identity(copies):
    """THEORY B13: max(‖J(X)‖, max_i ‖V C_i A‖), whatever the number of copies."""
    g = torch.Generator().manual_seed(3)
    a, v, x = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 3), (3, 3), (4, 3)))
    layer = one_head(a, v)
    p = torch.softmax(x @ a.T @ x.T, -1)
    split = []
    for i in range(4):
        y = x - p[i] @ x
        split.append(spectral(v @ (y.T * p[i]) @ y @ a))
    single = spectral(to_dense(layer.linearise(x)))
    many = spectral(to_dense(layer.linearise(x.repeat_interleave(copies, 0))))
    assert math.isclose(many, max(single, *split), rel_tol=1e-12)


def test_the_query_is_the_row_token():
    """The trap of THEORY 0: with A not symmetric, S is X A^T X^T."""
    a = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    q, k, _ = one_head(a, torch.eye(2, dtype=torch.float64)).project(x)
    assert torch.allclose((q @ k.mT)[0], x @ a.T @ x.T)
    assert float((q @ k.mT)[0, 0, 1]) == float((a @ x[0]) @ x[1])


def test_probabilities_that_underflow_do_no_harm():
    layer, x = random_layer(heads=2)
    far = x * 40
    dense = jacobian(layer, far)
    assert bool(dense.isfinite().all())
    assert torch.allclose(to_dense(layer.linearise(far)), dense, atol=1e-9)


@pytest.mark.parametrize("memory", [2**30, 400], ids=["stored", "recomputed in chunks"])
def test_a_row_that_may_read_nothing_gives_zero_and_moves_nothing(memory):
    layer, x = random_layer(heads=2, d_out=None)
    layer.mask = torch.ones(5, 5, dtype=torch.bool)
    layer.mask[1] = False
    assert not layer(x)[1].any() and bool(layer(x)[[0, 2, 3, 4]].all())
    with torch.no_grad():
        assert torch.allclose(layer(x), layer.heads(x))
    dense = jacobian(layer, x)
    assert not dense.unflatten(0, (5, -1))[1].any()
    assert torch.allclose(to_dense(layer.linearise(x, memory=memory)), dense, atol=1e-12)


def test_a_window_is_the_mask_that_it_stands_for():
    layer, x = random_layer(heads=2, causal=True, window=2)
    masked, _ = random_layer(heads=2)
    masked.mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    assert torch.allclose(layer(x), masked(x), atol=1e-14)


def test_a_soft_cap_is_its_definition():
    layer, x = random_layer(softcap=1.5)
    q, k, v = layer.project(x)
    p = torch.softmax(1.5 * torch.tanh(q @ k.mT / 1.5), -1)
    assert torch.allclose(layer.heads(x), (p @ v)[0], atol=1e-14)


def test_a_token_norm_is_that_of_torch():
    z, weight = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    ours = TokenNorm(weight, 0.1)(z)
    assert torch.allclose(ours, torch.nn.functional.rms_norm(z, (6,), weight, 0.1))
    by_two = TokenNorm(weight[:2], 0.1)(z).unflatten(-1, (3, 2))
    truth = torch.nn.functional.rms_norm(z.unflatten(-1, (3, 2)), (2,), weight[:2], 0.1)
    assert torch.allclose(by_two, truth)


# --- cross-attention: queries of some tokens, keys and values of others


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("memory", [2**30, 400], ids=["stored", "recomputed in chunks"])
@pytest.mark.parametrize(
    "options",
    [{}, {"biases": True, "norm": "all heads", "groups": 1}, {"softcap": 1.0, "d_out": None}],
    ids=["plain", "normed", "capped"],
)
def test_either_side_of_cross_attention_is_the_dense_jacobian(side, memory, options):
    layer, x = random_layer(heads=2, **options)
    context = torch.randn(7, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    moved = x if side == "query" else context
    dense = torch.autograd.functional.jacobian(
        (lambda z: layer(z, context)) if side == "query" else (lambda c: layer(x, c)), moved
    ).reshape(-1, moved.numel())
    op = layer.linearise(x, context=context, side=side, memory=memory)
    assert torch.allclose(to_dense(op), dense, atol=1e-12 * float(dense.abs().max()))
    assert torch.allclose(to_dense(op.T), dense.T, atol=1e-12 * float(dense.abs().max()))
    with torch.no_grad():
        assert torch.allclose(layer(x, context), layer.project_out(layer.heads(x, context)))
    e = torch.randn(2, *moved.shape, dtype=torch.float64)
    heads = layer.linearise(x, context=context, side=side, per_head=True)
    g = torch.randn(heads.matvec(e).shape, dtype=torch.float64)
    left, right = (heads.matvec(e) * g).sum((1, 2)), (e * heads.rmatvec(g)).sum((1, 2))
    assert torch.allclose(left, right, rtol=1e-11)
    parts = heads.matvec(e[:1].expand_as(e))
    joined = parts.sum(0) if layer.output is not None else torch.cat(list(parts), dim=1)
    assert torch.allclose(joined, op.matvec(e[0]), atol=1e-11)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (((4, 3), (4, 3), (4, 3)), {"heads": 3}, "query"),
        (((4, 3), (4, 2), (4, 3)), {}, "key"),
        (((4, 3), (2, 3), (4, 3)), {}, "head width"),
        (((4, 3), (4, 3), (4, 3)), {"heads": 2, "groups": 4}, "groups"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, options, message):
    with pytest.raises(InputError, match=message):
        DotProduct(*(torch.ones(s) for s in weights), **options)


@pytest.mark.parametrize("name", ["forward", "score", "projections", "weighting", "constant"])
def test_a_variant_is_computed_as_it_is_written(name) -> None:
    """Closed forms and theorems would speak of another map."""
    with pytest.raises(InputError, match=f"`Changed` should compute .*Found another `{name}`"):
        type("Changed", (L2Attention,), {name: None})
    with pytest.raises(InputError, match=r"what `Attention` computes.*Found another `linearise`"):
        type("Changed", (Distance,), {"linearise": None})
    assert issubclass(type("Named", (L2Attention,), {"extra_repr": str, "more": 1}), L2Attention)


@pytest.mark.parametrize("how", ["hook", "forward", "score"])
def test_a_layer_that_was_changed_has_no_bound(how) -> None:
    layer, x = random_layer()
    if how == "hook":
        layer.register_forward_hook(lambda *at: 100 * at[-1])
    else:
        own = getattr(layer, how)
        setattr(layer, how, lambda *args, **options: 100 * own(*args, **options))
    found = "Found hooks" if how == "hook" else f"Found a `{how}` of its own"
    for ask in (
        lambda: lipschitz_bound(layer, radius=1.0),
        lambda: certify_ball(layer, x, eps=0.1),
    ):
        with pytest.raises(InputError, match=found):
            ask()
