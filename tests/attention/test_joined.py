"""Layers that share their products: each has its own, to rounding, and others are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lipscope.attention import (
    Attention,
    DotProduct,
    L2Attention,
    Rotary,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    joined,
)
from lipscope.linalg import Operator, restrict, to_dense, together, top_singular, top_singular_batch

N, D, HEADS = 5, 8, 2


def weights(seed: int, groups: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = ((D, D), (groups * D // HEADS, D), (groups * D // HEADS, D), (D, D))
    return [torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes]


def tokens(seed: int, n: int = N) -> Tensor:
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(n, D, generator=draw, dtype=torch.float64)


def turned(seed: int) -> Rotary:
    angle = torch.rand(N, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Rotary(torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1))


def tied(query: Tensor, _: Tensor, *others: Tensor, **options: int) -> L2Attention:
    return L2Attention(query, *others, **options)


KINDS = {
    "dot product": (DotProduct, {}),
    "distance": (tied, {}),
    "doubly stochastic": (SinkhornAttention, {}),
    "causal": (DotProduct, {"causal": True}),
    "window": (DotProduct, {"causal": True, "window": 2}),
    "soft cap": (DotProduct, {"softcap": 2.0}),
    "biases": (DotProduct, {"query_bias": torch.ones(D).double()}),
    "rotary": (DotProduct, {"rotary": turned(0)}),
    "sigmoid": (SigmoidAttention, {}),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("map", ["attention", "heads"])
def test_products_are_those_of_each_layer(name: str, map: str) -> None:
    kind, options = KINDS[name]
    layers = [kind(*weights(seed), heads=HEADS, **options) for seed in range(3)]
    ops = [layer.linearise(tokens(i), map=map) for i, layer in enumerate(layers)]
    shared = joined(ops)
    assert shared is not None
    for product, shape in (("matvec", ops[0].in_shape), ("rmatvec", ops[0].out_shape)):
        e = torch.randn(3, *shape, dtype=torch.float64)
        each = torch.stack([getattr(op, product)(one) for op, one in zip(ops, e, strict=True)])
        torch.testing.assert_close(getattr(shared, product)(e), each, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "each", [({}, {"causal": True}), ({"groups": 1}, {"groups": 1})], ids=["one mask", "groups"]
)
def test_masks_are_those_of_each_layer_and_groups_are_shared(each: tuple[dict, dict]) -> None:
    layers = [
        DotProduct(*weights(k, options.get("groups", HEADS)), heads=HEADS, **options)
        for k, options in enumerate(each)
    ]
    ops = [layer.linearise(tokens(i)) for i, layer in enumerate(layers)]
    shared = joined(ops)
    assert shared is not None
    for product in ("matvec", "rmatvec"):
        e = torch.randn(2, N, D, dtype=torch.float64)
        alone = torch.stack([getattr(op, product)(one) for op, one in zip(ops, e, strict=True)])
        torch.testing.assert_close(getattr(shared, product)(e), alone, rtol=1e-12, atol=1e-12)


def test_layers_that_differ_share_nothing() -> None:
    one = DotProduct(*weights(0), heads=HEADS).linearise(tokens(0))
    others = {
        "length": DotProduct(*weights(1), heads=HEADS).linearise(tokens(1, N + 1)),
        "heads": DotProduct(*weights(1), heads=1).linearise(tokens(1)),
        "soft cap": DotProduct(*weights(1), heads=HEADS, softcap=2.0).linearise(tokens(1)),
        "rotary": DotProduct(*weights(1), heads=HEADS, rotary=turned(1)).linearise(tokens(1)),
        "kind": SigmoidAttention(*weights(1), heads=HEADS).linearise(tokens(1)),
        "type": DotProduct(*weights(1), heads=HEADS).float().linearise(tokens(1).float()),
        "transpose": DotProduct(*weights(1), heads=HEADS).linearise(tokens(1)).T,
        "heads apart": DotProduct(*weights(1), heads=HEADS).linearise(tokens(1), per_head=True),
        "memory": DotProduct(*weights(1), heads=HEADS).linearise(tokens(1), memory=64),
        "restricted": restrict(
            DotProduct(*weights(1), heads=HEADS).linearise(tokens(1)), scale=torch.ones(N)
        ),
    }
    for pair in ((one, other) for other in others.values()):
        assert joined(pair) is None
        assert joined(pair[::-1]) is None
    norms = [ScaledCosineAttention(*weights(k), heads=HEADS, temperature=1.5) for k in range(2)]
    assert joined([layer.linearise(tokens(0)) for layer in norms]) is None
    turns = [DotProduct(*weights(k), heads=HEADS, rotary=turned(k)) for k in range(2)]
    assert joined([layer.linearise(tokens(0)) for layer in turns]) is None


def test_rows_whose_weights_do_not_move_are_those_of_their_layer() -> None:
    """In float32, scores so large that one token has all weight, in one layer only."""
    layers = [DotProduct(*weights(seed), heads=HEADS).float() for seed in range(2)]
    layers[1].scale = 200.0
    ops = [layer.linearise(tokens(i).float()) for i, layer in enumerate(layers)]
    shared = joined(ops)
    assert shared is not None
    e = torch.randn(2, N, D)
    each = torch.stack([op.matvec(one) for op, one in zip(ops, e, strict=True)])
    torch.testing.assert_close(shared.matvec(e), each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scores", [2**24, 3 * 330 * 8, 8])
@pytest.mark.parametrize("name", [*KINDS, "grouped", "norms"])
def test_products_with_several_vectors_are_those_with_each(
    name: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, three at a time, and one by one, where so few bytes are kept for several."""
    monkeypatch.setattr("lipscope.attention.jacobian._TOGETHER_BYTES", scores)
    if name == "norms":  # these share nothing
        layer = ScaledCosineAttention(*weights(0), heads=HEADS, temperature=1.5)
    elif name == "grouped":
        layer = DotProduct(*weights(0, 1), heads=HEADS, groups=1)
    else:
        kind, options = KINDS[name]
        layer = kind(*weights(0), heads=HEADS, **options)
    op = layer.linearise(tokens(0))
    for product in (op.matvec, op.rmatvec):
        for count in (7, 4, 1):
            e = torch.randn(count, N, D, dtype=torch.float64)
            each = torch.stack([product(one) for one in e])
            torch.testing.assert_close(product(e), each, rtol=1e-12, atol=1e-12)
        pairs = torch.randn(2, 3, N, D, dtype=torch.float64)
        each = torch.stack([torch.stack([product(one) for one in two]) for two in pairs])
        torch.testing.assert_close(product(pairs), each, rtol=1e-12, atol=1e-12)


def test_what_several_vectors_share_is_forgotten_where_it_cannot_serve() -> None:
    """Made in inference mode, of a joined operator, or one of more sizes than are kept."""
    layer = DotProduct(*weights(0), heads=HEADS)
    op = layer.linearise(tokens(0))
    e = torch.randn(3, N, D, dtype=torch.float64)
    with torch.inference_mode():
        first = op.matvec(e)
    torch.testing.assert_close(op.matvec(e), first)
    for count in range(2, 9):
        op.rmatvec(torch.randn(count, N, D, dtype=torch.float64))
    at: Any = op.matvec
    assert len(at.__self__.copies) == 2
    both = joined([op, layer.linearise(tokens(1))])
    assert both is not None
    pairs = torch.randn(4, 2, N, D, dtype=torch.float64)
    each = torch.stack([both.matvec(one) for one in pairs])
    torch.testing.assert_close(both.matvec(pairs), each, rtol=1e-12, atol=1e-12)


class Tempered(Attention):
    """A score with a number of its own for every head: heads of copies would not know theirs."""

    temper = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None, None]

    def score(self, q, k, *, out=None):
        return self.temper * (q @ k.mT)

    def score_jvp(self, q, k, dq, dk, *, out=None):
        return self.temper * (dq @ k.mT + q @ dk.mT)

    def score_vjp(self, q, k, gs):
        gs = self.temper * gs
        return gs @ k, gs.mT @ q


def test_scores_that_know_their_head_share_nothing() -> None:
    ops = [Tempered(*weights(k), heads=HEADS).linearise(tokens(k)) for k in range(2)]
    assert joined(ops) is None
    e = torch.randn(3, N, D, dtype=torch.float64)
    for product in (ops[0].matvec, ops[0].rmatvec):
        torch.testing.assert_close(product(e), torch.stack([product(one) for one in e]))


def test_one_layer_at_several_inputs_has_its_weights_of_the_time() -> None:
    """Weights that change between two of them are those that each was made with."""
    layer = DotProduct(*weights(0), heads=HEADS)
    ops = [layer.linearise(tokens(i)) for i in range(2)]
    with torch.no_grad():
        layer.query *= 2
    ops.append(layer.linearise(tokens(2)))
    for some in (ops[:2], ops):
        shared = joined(some)
        assert shared is not None
        e = torch.randn(len(some), N, D, dtype=torch.float64)
        each = torch.stack([op.matvec(one) for op, one in zip(some, e, strict=True)])
        torch.testing.assert_close(shared.matvec(e), each, rtol=1e-12, atol=1e-12)


def test_solves_that_share_products_end_by_themselves() -> None:
    """Sigma of every part is that of the dense Jacobian, whoever ends first."""
    layers = [DotProduct(*weights(seed), heads=HEADS) for seed in range(6)]
    ops: list[Operator] = [layer.linearise(tokens(i)) for i, layer in enumerate(layers)]
    groups: list[list[int]] = []

    def join(some: Sequence[int]) -> Operator | None:
        groups.append([*some])
        return joined([ops[i] for i in some])

    found = together(join, ops)
    assert found is not None
    seeds = [50, 51, 52, 53, 54, 55]  # of no weight
    tops = top_singular_batch(found, [torch.Generator().manual_seed(seed) for seed in seeds])
    assert not found.left
    for top, op, seed in zip(tops, ops, seeds, strict=True):
        true = float(torch.linalg.matrix_norm(to_dense(op), 2))
        assert top.status == "converged"
        assert top.sigma <= true * (1 + 1e-12)
        assert true <= top.upper
        alone = top_singular(op, generator=torch.Generator().manual_seed(seed))
        assert top.sigma == pytest.approx(alone.sigma, rel=1e-9)
        assert top.products == alone.products
    longest = [max(tops, key=lambda top: top.products)]
    for some in groups:  # those that still go on are in it, and few others
        assert tops.index(longest[0]) in some
    sizes = [len(some) for some in groups]
    assert sizes[0] == 6
    assert all(later <= earlier / 2 for earlier, later in pairwise(sizes))
    assert found.matvec(torch.randn(6, N, D, dtype=torch.float64)).shape == (6, N, D)  # of nobody
    ends = sorted({top.products for top in tops})
    assert len(sizes) > 1 or len(ends) < 3


def test_a_rotary_layer_is_followed_entry_by_entry() -> None:
    """torch's own batching has a rule for all that the turn does: it warns where it has none."""
    layer = DotProduct(*weights(0), heads=HEADS, rotary=turned(0))
    x = torch.stack([tokens(k) for k in range(3)])
    each = torch.stack([layer(one) for one in x])
    torch.testing.assert_close(torch.func.vmap(layer)(x), each)
