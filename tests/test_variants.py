"""Every variant of the register: trained, copied, masked, and against automatic differentiation.

A new variant needs an entry of `EXAMPLES`; what follows them is about single variants.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from agreement import agree, gaussian
from lipscope import bounds, to_dense
from lipscope.attacks import constant
from lipscope.attention import (
    Attention,
    ClippedAttention,
    DividedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    Softmax,
    TokenNorm,
    variants,
)
from lipscope.errors import InputError
from lipscope.theorems import catalogue, evaluate

N = 6


@dataclass
class Example:
    """How to build a variant: the shapes of its paper's weights, other arguments, any mask."""

    weights: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    masked: bool = True

    def build(self, kind: type[Attention], *, trained: bool = True, **options: Any) -> Attention:
        weights = {}
        for i, (name, shape) in enumerate(self.weights.items()):
            weight = gaussian(*shape, seed=i) if shape else torch.tensor(1.5 + i).double()
            weights[name] = nn.Parameter(weight) if trained else weight
        return kind(**weights, **(self.options | options))


TWO_HEADS = {"query": (6, 4), "key": (6, 4), "value": (4, 4), "output": (5, 4)}
EXAMPLES: dict[type[Attention], Example] = {
    DotProduct: Example(TWO_HEADS | {"query_bias": (6,), "output_bias": (5,)}, {"heads": 2}),
    L2Attention: Example({"query": (6, 4), "value": (4, 4), "output": (5, 4)}, {"heads": 2}),
    ScaledCosineAttention: Example(
        TWO_HEADS | {"temperature": (), "gain": ()}, {"heads": 2, "eps": 0.3}
    ),
    LipschitzNormAttention: Example(TWO_HEADS, {"heads": 2}, masked=False),
    SinkhornAttention: Example(TWO_HEADS, {"heads": 2}, masked=False),
    SigmoidAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "key_bias": (6,), "value_bias": (4,), "output_bias": (5,)},
        {"heads": 2},
    ),
    ClippedAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "value_bias": (4,)}, {"heads": 2, "radius": 1.5}
    ),
    DividedAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "value_bias": (4,)},
        {"heads": 2, "by": "G2", "num_tokens": 9, "radius": 1.5},
    ),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "masked": {"mask": (gaussian(N, N) < 0.3) | torch.eye(N, dtype=torch.bool)},
    "masked by head": {"mask": (gaussian(2, N, N) < 0.3) | torch.eye(N, dtype=torch.bool)},
    "a row reads nothing": {"mask": torch.arange(N)[:, None] != torch.full((N,), 2)},
}
each_variant = pytest.mark.parametrize("kind", variants(), ids=lambda one: one.__name__)


def build(kind: type[Attention], **options: Any) -> Attention:
    return EXAMPLES[kind].build(kind, **options)


@each_variant
@pytest.mark.parametrize("trained", [True, False], ids=["parameters", "buffers"])
def test_a_layer_keeps_its_papers_weights_and_nothing_else(kind, trained) -> None:
    layer, names = build(kind, trained=trained), set(EXAMPLES[kind].weights)
    assert {name for name, _ in layer.named_parameters()} == (names if trained else set())
    assert set(layer.state_dict()) == names
    for name, shape in EXAMPLES[kind].weights.items():
        assert layer.state_dict()[name].shape == shape
    agree(layer, gaussian(N, 4))


@each_variant
def test_two_steps_of_an_optimiser_change_every_account_alike(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    before = {name: w.detach().clone() for name, w in layer.named_parameters()}
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        loss = (layer(x) - 1).square().mean() + layer.stretch(x, layer(x).detach(), x)
        loss.backward()
        optimiser.step()
    assert all(not torch.equal(w, before[name]) for name, w in layer.named_parameters())
    agree(layer, x)
    assert not torch.allclose(layer(x), build(kind)(x))


@each_variant
def test_copies_are_the_layer_and_leave_it_alone(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    y = layer(x).detach()
    twin = copy.deepcopy(layer)
    fresh = EXAMPLES[kind].build(kind)
    with torch.no_grad():
        for one in (*twin.parameters(), *fresh.parameters()):
            one.mul_(1.5)
    assert not torch.allclose(twin(x), y)
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh(x), y)
    single = copy.deepcopy(layer).to(torch.float32)
    torch.testing.assert_close(single(x.float()).double(), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.in_double()(x), single.double()(x))
    same = layer.replace()
    assert list(map(id, same.parameters())) == list(map(id, layer.parameters()))
    alone = layer.in_double()
    assert not any(w.requires_grad for w in (*alone.parameters(), *alone.buffers()))
    for other in (same, alone):
        torch.testing.assert_close(other(x), y)
    torch.testing.assert_close(layer(x), y)


@each_variant
def test_heads_alone_add_up(kind) -> None:
    layer, x = build(kind), gaussian(N, 4)
    if EXAMPLES[kind].masked:
        layer = layer.replace(**MASKS["masked by head"])
    alone = [layer.head(h) for h in range(layer.num_heads)]
    assert all(one.num_heads == 1 for one in alone)
    bias = 0 if layer.output_bias is None else (len(alone) - 1) * layer.output_bias
    total = torch.stack([one(x) for one in alone]).sum(0) - bias
    torch.testing.assert_close(total, layer(x))
    torch.testing.assert_close(
        torch.cat([one.heads(x) for one in alone], 1), layer.replace(output=None)(x)
    )
    for head in (-1, layer.num_heads):
        with pytest.raises(InputError, match="`head` should be between"):
            layer.head(head)


@each_variant
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kind, mask) -> None:
    if not EXAMPLES[kind].masked:
        pytest.skip("not every mask is possible in this variant")
    layer = build(kind).replace(**MASKS[mask])
    agree(layer, gaussian(N, 4))
    if mask == "causal" and kind is not SigmoidAttention:
        x = gaussian(N, 4)
        torch.testing.assert_close(layer(x)[:3], layer(x[:3]))


@each_variant
def test_weights_of_tokens_count_their_copies(kind) -> None:
    layer, x, counts = build(kind), gaussian(N, 4), torch.tensor([1, 3, 1, 2, 1, 1])
    weights = counts.double().log()
    agree(layer, x, weights)
    if not isinstance(layer.weighting, Softmax):
        return
    expected = layer(x, x.repeat_interleave(counts, 0))
    torch.testing.assert_close(layer(x, log_weights=weights), expected)


@each_variant
def test_one_token_and_none(kind) -> None:
    layer = build(kind)
    agree(layer, gaussian(1, 4))
    none = torch.zeros(0, 4).double()
    with torch.no_grad(), pytest.raises(InputError, match="at least one token"):
        layer(none)
    for ask in (layer, layer.linearise, lambda z: layer(gaussian(1, 4), z)):
        with pytest.raises(InputError, match="at least one token"):
            ask(none)


@each_variant
@pytest.mark.parametrize("causal", [False, True])
def test_equal_tokens_are_predicted_exactly_or_not_at_all(kind, causal) -> None:
    layer = build(kind)
    if causal and not EXAMPLES[kind].masked:
        pytest.skip("no causal mask in this variant")
    layer = layer.replace(causal=True) if causal else layer
    found = constant(layer, num_tokens=5, radius=2.0)
    sigma = float(torch.linalg.matrix_norm(to_dense(layer.linearise(found.x)), 2))
    assert found.predicted is None or found.predicted == pytest.approx(sigma, rel=1e-9)
    assert (found.predicted is None) == (
        kind in (ScaledCosineAttention, SigmoidAttention, SinkhornAttention, ClippedAttention)
    )


@each_variant
def test_a_layer_in_training_is_measured_between_its_bounds(kind) -> None:
    """Without a warning: the parameters' graph is left alone."""
    layer, x = build(kind), gaussian(N, 4)
    rows = bounds(layer, x)
    truth = float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))
    assert rows[0].sigma == pytest.approx(truth, rel=1e-3)
    values = [b.value for b in rows.bounds if b.metric == "frobenius" and b.kind == "upper"]
    found = [value for value in values if value is not None]
    assert found and min(found) >= truth * (1 - 1e-9)


def test_a_norm_of_all_heads_leaves_none_alone() -> None:
    layer = build(DotProduct).replace(query_norm=TokenNorm(torch.ones(6).double(), 0.1))
    with pytest.raises(InputError, match="joins its heads"):
        layer.head(0)


@each_variant
def test_heads_one_by_one_add_up(kind) -> None:
    layer, x, e = build(kind), gaussian(N, 4), gaussian(N, 4, seed=9)
    op, single = layer.linearise(x), layer.linearise(x, per_head=True)
    pushed = single.matvec(e.expand(layer.num_heads, -1, -1))
    torch.testing.assert_close(pushed.sum(0), op.matvec(e))
    g = op.matvec(e)
    pulled = single.rmatvec(g.expand(layer.num_heads, -1, -1))
    torch.testing.assert_close(pulled.sum(0), op.rmatvec(g))


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
    with pytest.raises(InputError, match=r"`query` and `value` should have a multiple of 3 rows"):
        L2Attention(eye, eye, heads=3)


class Untied(L2Attention):
    """The score of L2 attention with keys of their own, ``-W``, and values as they are."""

    def projections(self):
        return self.query, -self.query, self.value


def test_tied_l2_is_lipschitz_at_every_radius_and_untied_is_not() -> None:
    """Untied, the first token finds the others alike, which are 2 R apart, and itself far."""
    one, far = torch.eye(1).double(), torch.tensor([[1.0], [0.0], [-2.0]]).double()
    tied, untied = L2Attention(one, one), Untied(one, one)
    inputs = [far, gaussian(7, 1), torch.linspace(-1, 1, 7)[:, None].double()]

    def sigma(layer, x):
        return float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))

    bound = float(tied.constant(7))
    for radius in (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6):
        assert max(sigma(tied, radius * x) for x in inputs) <= bound
    grown = [sigma(untied, radius * far) for radius in (1.0, 1e2, 1e4)]
    assert grown[1] > 1e2 * bound and grown[2] == pytest.approx(1e4 * grown[1], rel=0.01)


@each_variant
def test_coinciding_tokens_and_zeros_have_gradients(kind) -> None:
    layer = build(kind)
    for x in (gaussian(1, 4).repeat(N, 1), 0 * gaussian(N, 4)):
        if kind is LipschitzNormAttention and not x.any():
            continue  # 0 / 0: it is not continuous there
        moved = x.clone().requires_grad_()
        weights = [moved, *layer.parameters()]
        for gradient in torch.autograd.grad(layer(moved).square().sum(), weights):
            assert bool(gradient.isfinite().all())
        agree(layer, x)


CONSTANTS = (
    L2Attention,
    ScaledCosineAttention,
    LipschitzNormAttention,
    ClippedAttention,
)


@pytest.mark.parametrize("kind", variants(), ids=lambda one: one.__name__)
def test_constants_are_trained_through(kind) -> None:
    if kind not in CONSTANTS:
        with pytest.raises(InputError, match="bound at all inputs of 5 tokens"):
            build(kind).constant(5)
        return
    layer = build(kind)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def constant(*moved):
        return layer.replace(**dict(zip(names, moved, strict=True))).constant(5)

    assert torch.autograd.gradcheck(constant, weights)


def test_lipschitz_norm_of_two_heads_divides_each() -> None:
    layer, x = build(LipschitzNormAttention), gaussian(N, 4)
    alone = [layer.head(h).replace(output=None)(x) for h in range(2)]
    torch.testing.assert_close(layer.replace(output=None)(x), torch.cat(alone, 1))


def sinkhorn(s: torch.Tensor) -> torch.Tensor:
    for _ in range(3000):
        s = s - s.logsumexp(-2, keepdim=True)
        s = s - s.logsumexp(-1, keepdim=True)
    return s.exp()


def test_sinkhorn_is_the_limit_of_its_iteration() -> None:
    layer = SinkhornAttention(3 * gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    x = gaussian(N, 4)
    s = (x @ layer.query.T) @ (x @ layer.key.T).T / 3**0.5
    torch.testing.assert_close(layer(x), sinkhorn(s) @ (x @ layer.value.T))
    assert float(layer.marginal_error(x)) < 1e-13
    assert float(layer.float().marginal_error(x.float())) < 1e-5
    p = layer.double().attention_weights(x)[0]
    other = layer.attention_weights(x + 3.0)[0]  # shifts rows and columns of the scores only
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
        assert float(layer.marginal_error(gaussian(N, 4))) < 1e-13
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
    with pytest.raises(InputError, match="near enough for Sinkhorn's iteration"):
        layer(gaussian(40, 4))


def test_sigmoid_is_its_definition() -> None:
    layer = SigmoidAttention(gaussian(3, 4), gaussian(3, 4, seed=1), gaussian(2, 4))
    x = gaussian(N, 4)
    s = (x @ layer.query.T) @ (x @ layer.key.T).T / 3**0.5
    expected = torch.sigmoid(s - math.log(N)) @ (x @ layer.value.T)
    torch.testing.assert_close(layer(x), expected)
    fixed = layer.replace(offset=-1.0, causal=True)
    torch.testing.assert_close(fixed(x), torch.sigmoid(s - 1).tril() @ (x @ layer.value.T))
    torch.testing.assert_close(fixed(x)[:3], fixed(x[:3]))
    with pytest.raises(InputError, match=r"`offset` should be a finite number. Found `offset = nan`"):
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
