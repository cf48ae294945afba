"""Local certificates: sound at any input, equal to their definitions, sharp where proved."""

from __future__ import annotations

import math

import pytest
import torch

from lipscope import DotProduct, to_dense
from lipscope.attention import Rotary
from lipscope.theorems import HeadAt, HeadsAt, LayerSubject, NotApplicableError, heads_of
from lipscope.theorems.derived.local_bounds import (
    local_blocks,
    local_norms,
    local_rows,
    local_rows_scalar,
)
from lipscope.theorems.derived.row_gram import (
    JacobianColumns,
    JacobianRows,
    castin_lemma_3_8,
    row_gram,
    row_gram_joint,
    weighted_rows,
)
from searched import searched


def rotation(n, width, generator):
    angle = torch.outer(torch.arange(n).double(), torch.rand(width // 2, generator=generator))
    angle = torch.cat([angle, angle], -1).double()
    return Rotary(angle.cos(), angle.sin())


def draw(seed, *, heads=1, rotary=False, n=6, d=8, k=4):
    """A layer and an input; mask, bias, projection and sharpness vary with the seed."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    sharp = 3 * float(torch.rand(1, generator=g))
    mask = None
    if seed % 5 == 0:  # some rows may not even read themselves
        mask = torch.rand(n, n, generator=g) < 0.6
        mask[:, 0] = True
    layer = DotProduct(
        sharp * normal(heads * k, d),
        sharp * normal(heads * k, d),
        normal(heads * k, d),
        normal(d, heads * k) if seed % 3 else None,
        heads=heads,
        query_bias=normal(heads * k) if seed % 4 else None,
        key_bias=normal(heads * k),
        value_bias=normal(heads * k),
        causal=seed % 2 == 0,
        mask=mask,
        rotary=rotation(n, k, g) if rotary else None,
    )
    return layer, normal(n, d) * (0.2 + 2 * float(torch.rand(1, generator=g)))


def one_head(layer, x) -> HeadAt:
    return HeadAt(heads_of(layer)[0], x)


def all_heads(layer, x) -> HeadsAt:
    return LayerSubject(layer, x=x).together


def truth(layer, x):
    return float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))


@pytest.mark.parametrize("rotary", [False, True])
@searched(12, 60)
def test_no_certificate_of_one_head_is_below_sigma(count, rotary):
    forms = [local_norms, local_rows, row_gram] + (
        [] if rotary else [local_rows_scalar, local_blocks]
    )
    for seed in range(count):
        layer, x = draw(seed, rotary=rotary)
        sigma, at = truth(layer, x), one_head(layer, x)
        for form in forms:
            assert form(at) >= sigma * (1 - 1e-12), (form.__name__, seed)


@pytest.mark.parametrize("rotary", [False, True])
@searched(10, 40)
def test_no_joint_certificate_is_below_sigma(count, rotary):
    for seed in range(count):
        layer, x = draw(seed, heads=3, rotary=rotary)
        assert row_gram_joint(all_heads(layer, x)) >= truth(layer, x), seed


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 8])
def test_row_grams_are_those_of_the_dense_blocks(rotary, seed):
    layer, x = draw(seed, heads=3, rotary=rotary)
    n = len(x)
    jacobian = to_dense(layer.linearise(x)).view(n, -1, n, x.shape[1])
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    dense = torch.einsum("iajb,icjb,ij->iac", jacobian, jacobian, 1 / weights)
    together = all_heads(layer, x)
    rows = JacobianRows(together)
    expected = torch.linalg.eigvalsh(dense)[:, -1]
    assert torch.allclose(rows.eigenvalues(weights), expected, rtol=1e-9)
    probes = torch.randn(n, rows.width, 3, generator=torch.Generator().manual_seed(1)).double()
    if rows.factor is not None:  # directions of W's own space, rotated as its factor is
        basis = torch.linalg.qr(together.output).Q
        probes_out = basis @ probes
    else:
        probes_out = probes
    seen = torch.einsum("iajb,iam->ijbm", jacobian, probes_out).square().sum((2, 3))
    assert torch.allclose(rows.seen(probes), seen, rtol=1e-9, atol=1e-12)
    assert_products_are_of_grams(rows, weights, probes)


def assert_products_are_of_grams(rows, weights, probes):
    """Directions go through a Gram matrix as through its factors."""
    every = slice(0, len(weights))
    formed = rows._grams(weights, every) @ probes
    found = rows._products(weights, every)(probes)
    assert torch.allclose(found, formed, rtol=1e-9, atol=1e-10 * float(formed.abs().max()))


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("seed", "d"), [(0, 8), (1, 8), (3, 40), (5, 8), (8, 40)])
def test_column_grams_are_those_of_the_dense_blocks(seed, d, rotary, slopes):
    """In narrow tokens, in wide ones of which weights read a part, and through a norm."""
    layer, x = draw(seed, heads=3, rotary=rotary, d=d)
    n = len(x)
    slope = None
    if slopes:
        x = x / x.norm(dim=1, keepdim=True) * (1 - 0.1 * torch.arange(n).double()[:, None])
        slope = 1 + torch.arange(n).double()
    jacobian = to_dense(layer.linearise(x)).view(n, -1, n, d)
    if slope is not None:
        bent = torch.eye(d).double() - x[:, :, None] * x[:, None]
        jacobian = torch.einsum("iajb,jbc->iajc", jacobian, bent * slope[:, None, None])
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    dense = torch.einsum("kajb,kajc,jk->jbc", jacobian, jacobian, 1 / weights)
    columns = JacobianColumns(all_heads(layer, x), slope)
    expected = torch.linalg.eigvalsh(dense)[:, -1]
    assert torch.allclose(columns.eigenvalues(weights), expected, rtol=1e-9)
    probes = torch.randn(n, columns.width, 3, generator=torch.Generator().manual_seed(1)).double()
    grams = columns._grams(weights, slice(0, n))
    seen = columns.seen(probes) / weights  # their weighted sum is the form of the Gram matrix
    total = torch.einsum("jam,jab,jbm->j", probes, grams, probes)
    assert torch.allclose(seen.sum(1), total, rtol=1e-9)
    assert_products_are_of_grams(columns, weights, probes)


def test_columns_are_often_the_sharper_side():
    gains = []
    for seed in range(12):
        layer, x = draw(seed)
        rows, columns = (
            weighted_rows(side(all_heads(layer, x))).value
            for side in (JacobianRows, JacobianColumns)
        )
        assert min(rows, columns) >= truth(layer, x) * (1 - 1e-12)
        gains.append(columns < rows)
    assert sum(gains) > 6


def test_f2_is_exact_for_one_hot_attention():
    # A large radius: every row reads one token, J has the blocks V there (Theorem 3.7).
    layer, x = draw(1)
    layer = DotProduct(layer.query, layer.key, layer.value, layer.output)
    assert math.isclose(local_rows(one_head(layer, 300 * x)), truth(layer, 300 * x), rel_tol=1e-9)


def test_all_are_exact_for_equal_tokens_but_for_the_rank_one_part():
    # C_i = 0 and y_ij = 0: J = P (x) V with P = 1/n, whose norm is |V|.
    layer, x = draw(7)
    x = x[:1].expand(6, -1)
    at = one_head(layer, x)
    for form in (local_norms, local_rows, local_rows_scalar, row_gram, local_blocks):
        assert math.isclose(form(at), truth(layer, x), rel_tol=1e-6), form.__name__


def test_heads_at_an_input_are_made_once_for_all_theorems():
    layer, x = draw(1, heads=2)
    asked = LayerSubject(layer, x=x)
    first, second = (list(asked.each(HeadAt)) for _ in range(2))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]
    assert first[0] is not next(iter(asked.each(HeadAt, bare=True)))
    before = local_rows(one_head(layer, x.clone()))
    x *= 3  # written into: what was made before still speaks of the input as it was
    assert local_rows(first[0]) == before != local_rows(one_head(layer, x))


@pytest.mark.parametrize("rotary", [False, True])
def test_heads_together_are_the_heads_one_by_one(rotary):
    layer, x = draw(1, heads=3, rotary=rotary)
    together = all_heads(layer, x)
    for h, one in enumerate(LayerSubject(layer, x=x).each(HeadAt, bare=True)):
        for name in ("q", "k", "v", "p", "o"):
            assert torch.allclose(getattr(together, name)[h], getattr(one, name), rtol=1e-13)
        assert torch.allclose(together.covariance(slice(1, 4))[h], one.covariance(slice(1, 4)))
        gaps = one.p[2, :, None] * (one.v - one.o[2])
        assert torch.allclose(one.nu[2], (one.v - one.o[2]).norm(dim=-1))
        back = one.pulled(slice(2, 3))[0] @ one.head.key  # a_2j
        assert torch.allclose(one.rho[2], back.norm(dim=-1))
        moved = one.covariance(slice(2, 3))[0] @ one.head.query
        assert math.isclose(float(one.drift[2]), float(torch.linalg.matrix_norm(moved, 2)))
        if not rotary:
            assert torch.allclose(moved, gaps.T @ x @ one.head.key.T @ one.head.query)


def test_scalar_form_is_above_f2():
    for seed in range(40):
        layer, x = draw(seed)
        at = one_head(layer, x)
        assert local_rows_scalar(at) >= local_rows(at) * (1 - 1e-12)


def test_rotary_embeddings_are_refused_where_nothing_is_derived():
    layer, x = draw(2, rotary=True)
    for form in (local_rows_scalar, local_blocks):
        with pytest.raises(NotApplicableError, match="positions"):
            form(one_head(layer, x))


def test_the_whole_layer_is_sharper_than_its_heads_added():
    layer, x = draw(4, heads=3)
    added = sum(row_gram(HeadAt(head, x)) for head in heads_of(layer))
    assert row_gram_joint(all_heads(layer, x)) <= added


def test_lemma_3_8_is_sharp_for_heads_that_move_the_output_the_same_way():
    """Equal heads, multiples of one isometry behind them: sigma is that of one, times the sum."""
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(8, 4, generator=g, dtype=torch.float64))[0]
    projection = torch.cat([0.5 * turn, turn, 2.5 * turn], 1)
    layer, x = draw(4)
    (head,) = heads_of(layer, fold=False)
    found = castin_lemma_3_8(HeadsAt((head,) * 3, x, projection))
    assert found == pytest.approx(4 * row_gram(HeadAt(head, x)), rel=1e-9)
    one = layer.replace(query=0 * layer.query, query_bias=None, output=4 * turn, causal=False)
    (head,) = heads_of(one, fold=False)  # uniform rows: J = P ⊗ V, and the certificate is exact
    found = castin_lemma_3_8(HeadsAt((head,) * 3, x, projection))
    assert found == pytest.approx(truth(one, x), rel=1e-8)
    assert found == pytest.approx(float(torch.linalg.matrix_norm(one.value, 2)) * 4, rel=1e-8)


def test_no_covariance_of_a_row_exceeds_the_squared_radius():
    """Lemma C.1: mean square deviations in a ball of radius R; opposite tokens reach R²."""

    def deviations(at: HeadAt):
        return (at.p * torch.cdist(at.p @ at.x, at.x).square()).sum(1)

    for seed in range(6):
        layer, x = draw(seed)
        assert float(deviations(one_head(layer, x)).max()) <= float(x.norm(dim=1).max()) ** 2
    level = DotProduct(*3 * [torch.zeros(4, 4, dtype=torch.float64)])
    u = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    found = deviations(one_head(level, torch.stack([u, -u])))
    assert found.tolist() == pytest.approx(2 * [float(u @ u)])
