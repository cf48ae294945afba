"""Variants of attention in closed form: against automatic differentiation, in float64."""

import math

import pytest
import torch

from lipscope.attention import L2Attention, LipschitzNormAttention, ScaledCosineAttention
from lipscope.errors import InputError
from lipscope.linalg.operator import to_dense


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def l2(seed: int = 0, *, heads: int = 2, causal: bool = False, output: bool = True) -> L2Attention:
    return L2Attention(
        gaussian(heads * 3, 4, seed=seed),
        gaussian(heads * 2, 4, seed=seed + 1),
        gaussian(5, heads * 2, seed=seed + 2) if output else None,
        heads=heads,
        causal=causal,
    )


def cosine(seed: int = 0, *, heads: int = 2, causal: bool = False) -> ScaledCosineAttention:
    return ScaledCosineAttention(
        gaussian(heads * 3, 4, seed=seed),
        gaussian(heads * 3, 4, seed=seed + 1),
        gaussian(heads * 2, 4, seed=seed + 2),
        gaussian(5, heads * 2, seed=seed + 3),
        heads=heads,
        temperature=2.5,
        gain=1.7,
        eps=0.3,
        causal=causal,
    )


LAYERS = {
    "L2": l2(),
    "L2, causal": l2(3, causal=True),
    "L2, no projection": l2(4, heads=1, output=False),
    "cosine": cosine(),
    "cosine, causal": cosine(5, causal=True),
    "LipschitzNorm": LipschitzNormAttention(gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4)),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


@each_layer
def test_closed_form_is_the_derivative(layer) -> None:
    x = gaussian(6, 4)
    dense = torch.func.jacrev(layer)(x).reshape(-1, x.numel())
    op = layer.linearise(x)
    assert torch.allclose(to_dense(op), dense, rtol=1e-10, atol=1e-12)
    assert torch.allclose(to_dense(op.T).T, dense, rtol=1e-10, atol=1e-12)


@each_layer
def test_forward_in_chunks_is_the_forward(layer) -> None:
    x = gaussian(6, 4)
    with torch.no_grad():
        assert torch.allclose(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("layer", [l2(), cosine()], ids=["L2", "cosine"])
def test_heads_one_by_one_add_up(layer) -> None:
    x = gaussian(6, 4)
    e = gaussian(6, 4, seed=9)
    single = layer.linearise(x, per_head=True).matvec(e.expand(layer.num_heads, -1, -1))
    assert torch.allclose(single.sum(0), layer.linearise(x).matvec(e))


def test_l2_attention_is_its_definition() -> None:
    layer = l2(causal=False)
    x = gaussian(6, 4)
    heads = []
    for w, v in zip(layer.query.chunk(2), layer.value.chunk(2), strict=True):
        z = x @ w.T
        p = torch.softmax(-(torch.cdist(z, z) ** 2) / math.sqrt(3), dim=1)
        heads.append(p @ x @ (w.T @ w / math.sqrt(3)) @ v.T)
    assert layer.output is not None
    assert torch.allclose(layer(x), torch.cat(heads, 1) @ layer.output.T)


def test_l2_jacobian_is_the_one_of_the_theory() -> None:
    """J_ij = P_ij A (I - 2 y_ij (x_j - x_i)^T A) + delta_ij 2 A C_i A, values the identity."""
    w, x = gaussian(3, 4), gaussian(5, 4)
    layer = L2Attention(w, torch.eye(4, dtype=torch.float64))
    a = w.T @ w / math.sqrt(3)
    z = x @ w.T
    p = torch.softmax(-(torch.cdist(z, z) ** 2) / math.sqrt(3), dim=1)
    blocks = torch.zeros(5, 4, 5, 4, dtype=torch.float64)
    for i in range(5):
        y = x - p[i] @ x
        for j in range(5):
            rank_one = 2 * torch.outer(y[j], a @ (x[j] - x[i]))
            blocks[i, :, j] = p[i, j] * a @ (torch.eye(4, dtype=torch.float64) - rank_one)
        blocks[i, :, i] += 2 * a @ (y.T * p[i]) @ y @ a
    assert torch.allclose(to_dense(layer.linearise(x)), blocks.reshape(20, 20))


def test_l2_does_not_see_a_common_shift_of_the_scores() -> None:
    layer = L2Attention(gaussian(3, 4), gaussian(2, 4))
    x = gaussian(5, 4)
    jump = layer(x + 7.0) - layer(x)
    assert torch.allclose(jump, jump[:1].expand_as(jump))  # P is the same, values moved along


def test_cosine_is_its_definition() -> None:
    layer = ScaledCosineAttention(
        gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4), temperature=2.0, gain=1.5, eps=0.1
    )
    x = gaussian(6, 4)
    q, k, v = (
        z / (z.square().sum(1, keepdim=True) + 0.1).sqrt()
        for z in (x @ layer.query.T, x @ layer.key.T, x @ layer.value.T)
    )
    assert torch.allclose(layer(x), 1.5 * torch.softmax(2.0 * q @ k.T, 1) @ v)


def test_lipschitz_norm_is_its_definition() -> None:
    layer = LipschitzNormAttention(gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    x = gaussian(6, 4)
    q, k, v = x @ layer.query.T, x @ layer.key.T, x @ layer.value.T
    sizes = q.norm(), k.norm(dim=1).max(), v.norm(dim=1).max()
    largest = max(sizes[0] * sizes[1], sizes[0] * sizes[2], sizes[1] * sizes[2])
    assert torch.allclose(layer(x), torch.softmax(q @ k.T / largest, 1) @ v)


def test_wrong_arguments_say_what_to_change() -> None:
    eye = torch.eye(2)
    with pytest.raises(InputError, match=r"`temperature` should be positive. Found"):
        ScaledCosineAttention(eye, eye, eye, temperature=0.0)
    with pytest.raises(InputError, match=r"`query` and `value` should have a multiple of 3 rows"):
        L2Attention(eye, eye, heads=3)
    with pytest.raises(InputError, match=r"`per_head` should be False"):
        LipschitzNormAttention(eye, eye, eye).linearise(eye, per_head=True)
