"""Layers that share their products: each has its own, to rounding, and others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipscope.attention import (
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


def test_solves_that_share_products_end_by_themselves() -> None:
    """Sigma of every part is that of the dense Jacobian, whoever ends first."""
    layers = [DotProduct(*weights(seed), heads=HEADS) for seed in range(3)]
    ops: list[Operator] = [layer.linearise(tokens(i)) for i, layer in enumerate(layers)]
    shared = joined(ops)
    assert shared is not None
    found = together(shared, ops)
    seeds = [50, 51, 52]  # of no weight
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
