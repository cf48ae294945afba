"""What each kind of attention is: its definition, its derivative where it has one of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from agreement import agree, gaussian
from examples import TWO_HEADS, N, build
from lipscope import to_dense
from lipscope.attention import (
    ClippedAttention,
    Distance,
    DividedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
)
from lipscope.errors import InputError
from lipscope.theorems import catalogue, evaluate


def test_l2_attention_is_its_definition() -> None:
    layer = build(L2Attention)
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


def test_temperature_and_gain_are_numbers_or_tensors() -> None:
    weights = [gaussian(*shape) for shape in TWO_HEADS.values()]
    layer = ScaledCosineAttention(*weights, temperature=2.0, gain=1.5, eps=0.1, heads=2)
    assert {"temperature", "gain"} <= set(layer.state_dict()) and not list(layer.parameters())
    other = layer.replace(temperature=torch.tensor(2.0).double(), gain=nn.Parameter(layer.gain))
    assert [name for name, _ in other.named_parameters()] == ["gain"]
    x = gaussian(N, 4)
    torch.testing.assert_close(layer(x), other(x))


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
    with pytest.raises(InputError, match=r"`query` should have shape \(3 \* head width, 2\)"):
        L2Attention(eye, eye, heads=3)


def test_tied_l2_is_lipschitz_at_every_radius_and_untied_is_not() -> None:
    """With keys ``-W`` the first token finds the others alike, 2 R apart, and itself far."""
    one, far = torch.eye(1).double(), torch.tensor([[1.0], [0.0], [-2.0]]).double()
    tied, untied = L2Attention(one, one), Distance(one, -one, one, scale=1.0)
    inputs = [far, gaussian(7, 1), torch.linspace(-1, 1, 7)[:, None].double()]

    def sigma(layer, x):
        return float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))

    bound = float(tied.constant(7))
    for radius in (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6):
        assert max(sigma(tied, radius * x) for x in inputs) <= bound
    grown = [sigma(untied, radius * far) for radius in (1.0, 1e2, 1e4)]
    assert grown[1] > 1e2 * bound and grown[2] == pytest.approx(1e4 * grown[1], rel=0.01)


def test_lipschitz_norm_of_two_heads_divides_each() -> None:
    layer, x = build(LipschitzNormAttention), gaussian(N, 4)
    alone = [layer.head(h).replace(output=None)(x) for h in range(2)]
    torch.testing.assert_close(layer.replace(output=None)(x), torch.cat(alone, 1))


def sinkhorn(s: torch.Tensor) -> torch.Tensor:
    for _ in range(3000):
        s = s - s.logsumexp(-2, keepdim=True)
        s = s - s.logsumexp(-1, keepdim=True)
    return s.exp()


def weights(layer: SinkhornAttention, x: torch.Tensor) -> torch.Tensor:
    return layer.weights(*layer.project(x)[:2])


def off_by(layer: SinkhornAttention, x: torch.Tensor) -> float:
    """By how much a row or column of weights does not add up to 1."""
    p = weights(layer, x).detach()
    return max(float((p.sum(axis) - 1).abs().max()) for axis in (-1, -2))


def test_sinkhorn_is_the_limit_of_its_iteration() -> None:
    layer = SinkhornAttention(3 * gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    x = gaussian(N, 4)
    s = (x @ layer.query.T) @ (x @ layer.key.T).T / 3**0.5
    torch.testing.assert_close(layer(x), sinkhorn(s) @ (x @ layer.value.T))
    assert off_by(layer, x) < 1e-13
    assert off_by(layer.float(), x.float()) < 1e-5
    p = weights(layer.double(), x)[0]
    other = weights(layer, x + 3.0)[0]  # shifts rows and columns of the scores only
    torch.testing.assert_close(p, other)
    assert layer(x, x[:3]).shape == (N, 2)


def test_sinkhorn_has_the_derivative_of_the_limit() -> None:
    """Against differences, where a fixed number of steps has not converged."""
    layer, x = build(SinkhornAttention, scale=4.0), gaussian(N, 4)
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))
    assert torch.autograd.gradgradcheck(layer, (x,))
    e, h = gaussian(N, 4, seed=3), 1e-5
    with torch.no_grad():
        difference = (layer(x + h * e) - layer(x - h * e)) / (2 * h)
    torch.testing.assert_close(layer.linearise(x).matvec(e), difference, rtol=1e-6, atol=1e-8)


def test_sinkhorn_takes_the_masks_that_it_can_fill() -> None:
    two = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    ring = torch.eye(N).bool() | torch.eye(N).bool().roll(1, 0)
    for mask in (two, ring, torch.stack([two, ring])):
        layer = build(SinkhornAttention, mask=mask)
        agree(layer, gaussian(N, 4))
        assert off_by(layer, gaussian(N, 4)) < 1e-13
    hidden = torch.ones(N, N).bool()
    hidden[:, -1] = False
    for mask, said in (
        (hidden, "allow a permutation of the tokens.*1 tokens being hidden from every row"),
        (torch.ones(N, N).tril().bool(), "positive. Found 15 entries where they cannot"),
    ):
        with pytest.raises(InputError, match=said):
            build(SinkhornAttention, mask=mask)
    with pytest.raises(InputError, match="`causal` should be False: the only causal weights"):
        build(SinkhornAttention, causal=True)


def test_sinkhorn_says_when_scores_are_too_far_apart() -> None:
    layer = SinkhornAttention(300 * gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    with pytest.raises(InputError, match="close enough for Sinkhorn's iteration"):
        layer(gaussian(40, 4))
    for size in (3e1, 1e2, 1e3, 1e10):  # rounding is no excuse for weights with other sums
        for weights in (layer.float(), layer.double()):
            x = (size * gaussian(9, 4)).to(weights.query)
            with pytest.raises(InputError, match="close enough for Sinkhorn's"):
                weights(x)


def test_sigmoid_is_its_definition() -> None:
    layer = SigmoidAttention(gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    x = gaussian(N, 4)
    s = (x @ layer.query.T) @ (x @ layer.key.T).T / 3**0.5
    expected = torch.sigmoid(s - math.log(N)) @ (x @ layer.value.T)
    torch.testing.assert_close(layer(x), expected)
    fixed = layer.replace(offset=-1.0, causal=True)
    torch.testing.assert_close(fixed(x), torch.sigmoid(s - 1).tril() @ (x @ layer.value.T))
    torch.testing.assert_close(fixed(x)[:3], fixed(x[:3]))
    with pytest.raises(InputError, match=r"`offset` should be a finite number. Found `off"):
        layer.replace(offset=math.nan)


@pytest.mark.parametrize("by_head", [False, True], ids=["one mask", "by head"])
def test_sigmoid_counts_the_keys_that_may_be_read(by_head: bool) -> None:
    """A padded layer is the layer without padding: value, Jacobian and gradient."""
    weights = [gaussian(4, 4, seed=i) for i in range(3)]
    x, keep = gaussian(N, 4), [N - 2, 2]  # of the tokens, the first so many
    masks = torch.stack([(torch.arange(N) < m).expand(N, N) for m in keep])
    for h, m in enumerate(keep):
        mask = masks if by_head else masks[h]
        layer = SigmoidAttention(*weights, heads=2, mask=mask).head(h)
        alone, e = layer.replace(mask=None), gaussian(N, 4, seed=4)
        expected, change, *_ = torch.func.jvp(lambda t, f=alone, m=m: f(t, t[:m]), (x,), (e,))
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer.linearise(x, memory=1).matvec(e), change)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)
        g = gaussian(*expected.shape, seed=5)
        torch.testing.assert_close(layer.stretch(x, g, e, memory=1), (g * change).sum())


def test_clipped_is_dot_product_in_the_ball() -> None:
    layer, x = build(ClippedAttention), 0.7 * gaussian(N, 4)
    inner = build(DotProduct).replace(
        query_bias=layer.query_bias, value_bias=layer.value_bias, output_bias=None
    )
    length = x.norm(dim=1, keepdim=True)
    assert bool((length > 1.5).any()) and bool((length < 1.5).any())
    torch.testing.assert_close(layer(x), inner(x * (1.5 / length).clamp_max(1)))
    smooth = layer.replace(into="normalise")
    agree(smooth, x)
    torch.testing.assert_close(smooth(x), inner(x / (1 + (length / 1.5) ** 2).sqrt()))


@pytest.mark.parametrize("by", ["theorem-3.3", "G2", "mean-field"])
@pytest.mark.parametrize("causal", [False, True])
def test_divided_is_dot_product_over_the_catalogues_bound(by, causal) -> None:
    if by == "mean-field" and causal:
        with pytest.raises(InputError, match="where the mean-field bound fails"):
            build(DividedAttention, by=by, causal=True)
        return
    name = {"theorem-3.3": "castin_thm_e_3", "G2": "global_rows_capped", "mean-field": "mean_field"}
    theorem = next(one for one in catalogue() if one.name == name[by])
    layer, x = build(DividedAttention, by=by, causal=causal).replace(output=None), gaussian(N, 4)
    inner = DotProduct(
        layer.query, layer.key, layer.value, heads=2, query_bias=layer.query_bias, causal=causal
    )
    divisors = layer.bounds()
    for h, bound in enumerate(divisors.tolist()):
        given = evaluate(theorem, inner.head(h), num_tokens=9, radius=1.5)
        assert given == pytest.approx(bound, rel=1e-12)
    heads = layer(x).unflatten(1, (2, -1)) - layer.value_bias.unflatten(0, (2, -1))
    torch.testing.assert_close(heads * divisors[:, None], inner(x).unflatten(1, (2, -1)))
    names = [name for name, _ in layer.named_parameters()]

    def f(*moved):
        return layer.replace(**dict(zip(names, moved, strict=True)))(x)

    assert torch.autograd.gradcheck(f, [w.detach().requires_grad_() for w in layer.parameters()])


def test_divided_says_what_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"at most `num_tokens = 9` tokens. Found 10"):
        build(DividedAttention)(gaussian(10, 4))
    with pytest.raises(InputError, match=r"`mean-field` at radius 1000 should be finite"):
        build(DividedAttention, by="mean-field", radius=1e3)(gaussian(3, 4))
    for wrong in ({"radius": 0.0}, {"num_tokens": 0}):
        with pytest.raises(InputError, match=f"`{next(iter(wrong))}` should be"):
            build(DividedAttention, **wrong)
    with pytest.raises(InputError, match="`radius` should be positive"):
        build(ClippedAttention, radius=math.inf)
