"""The bound of a network holds, whatever is tried; its factors are reached, or nearly so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.attention import Clip, Rotary, TokenNorm, product_norm
from lipscope.linalg import max_token_norm, to_dense
from lipscope.models import ACTIVATIONS, Branch, Chain, Feed, Network, Norm, read_parts

D, N = 8, 5
DOUBLE = torch.float64


def drawn(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def weight(rows: int, columns: int, seed: int, size: float = 1.0) -> Tensor:
    return drawn(rows, columns, seed=seed, size=size * columns**-0.5)


def turned(n: int, k: int) -> Rotary:
    angle = torch.outer(torch.arange(n, dtype=DOUBLE), 0.3 ** torch.arange(k // 2, dtype=DOUBLE))
    angle = torch.cat([angle, angle], 1)
    return Rotary(angle.cos(), angle.sin())


def inside(x: Tensor, radius: float) -> Tensor:
    return x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1)


def attacked(
    f: Callable[[Tensor], Tensor],
    radius: float,
    norm: str,
    *,
    shape: tuple[int, int] = (N, D),
    starts: int = 18,
    steps: int = 40,
    seed: int = 0,
) -> float:
    """The largest ``|J(x) e|`` found for ``|e| <= 1``: ascent in both from many starts."""
    n, d = shape
    x = drawn(starts, n, d, seed=seed)
    x = radius * x / x.norm(dim=-1, keepdim=True)
    third = starts // 3
    signs = drawn(third, n, 1, seed=seed + 1).sign()
    x[:third] = x[:third, :1] * signs + 0.1 * x[:third]  # clusters, then small tokens
    x[-third:] *= torch.logspace(-3, 0, third, dtype=DOUBLE)[:, None, None]
    e = drawn(starts, n, d, seed=seed + 2)
    x, e = x.requires_grad_(), e.requires_grad_()
    ascent = torch.optim.Adam([{"params": [x], "lr": 0.1 * radius}, {"params": [e], "lr": 0.1}])
    axes, best = (-1 if norm == "max-token" else (-2, -1)), 0.0
    for _ in range(steps):
        move = e / torch.linalg.vector_norm(e, dim=axes, keepdim=True)
        y: Tensor = torch.func.jvp(f, (inside(x, radius),), (move,))[1]
        found = y.norm(dim=-1).amax(-1) if norm == "max-token" else y.flatten(1).norm(dim=1)
        best = max(best, float(found.detach().max()))
        ascent.zero_grad()
        (-found.log().sum()).backward()
        ascent.step()
    return best


def kinds(heads: int) -> Iterator[tuple[str, ls.Attention]]:
    k = D // heads
    q, key, v, o = (weight(D, D, seed, 2.0) for seed in range(4))
    four: Any = (q, key, v, o)
    biases = {f"{name}_bias": drawn(D, seed=9 + i) for i, name in enumerate(("query", "key"))}
    whole, own = (TokenNorm(0.5 + drawn(w, seed=5).abs(), 0.1) for w in (D, k))
    yield "dot product", ls.DotProduct(*four, heads=heads)
    more = {"value_bias": drawn(D, seed=7), "output_bias": drawn(D, seed=8)}
    yield "causal, biased", ls.DotProduct(*four, heads=heads, causal=True, **biases, **more)
    yield "soft cap", ls.DotProduct(*four, heads=heads, softcap=2.0, **biases)
    yield "normed heads", ls.DotProduct(*four, heads=heads, query_norm=own, key_norm=own)
    yield "normed whole", ls.DotProduct(*four, heads=heads, query_norm=whole, key_norm=whole)
    if k > 1:
        rotary = turned(N, k)
        yield "rotary", ls.DotProduct(*four, heads=heads, rotary=rotary, **biases)
    if heads > 1:
        half = (q, key[: D // 2], v[: D // 2], o)
        yield "grouped", ls.DotProduct(*half, heads=heads, groups=heads // 2)
    yield "L2", ls.L2Attention(q, v, o, heads=heads)
    yield "L2 causal", ls.L2Attention(q, v, o, heads=heads, causal=True)
    yield "cosine", ls.ScaledCosineAttention(*four, heads=heads, temperature=2.0, eps=0.5)
    yield (
        "sigmoid",
        ls.SigmoidAttention(*four, heads=heads, **biases, value_bias=more["value_bias"]),
    )
    yield "sigmoid, offset", ls.SigmoidAttention(*four, heads=heads, offset=-0.5)
    yield "Sinkhorn", ls.SinkhornAttention(q / 3, key / 3, v, o, heads=heads)
    yield "LipschitzNorm", ls.LipschitzNormAttention(*four, heads=heads)
    yield "clipped", ls.ClippedAttention(*four, heads=heads, radius=1.0)
    yield "normalised", ls.ClippedAttention(*four, heads=heads, radius=1.0, into="normalise")
    of = {"by": "G2", "num_tokens": N, "radius": 1.0}
    yield "divided", ls.DividedAttention(*four, heads=heads, **of)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_no_attack_on_a_layer_exceeds_its_bound(heads: int, norm: Any) -> None:
    for index, (name, layer) in enumerate(kinds(heads)):
        radius = (0.3, 2.0)[(index + heads) % 2]
        bound = ls.lipschitz_bound(layer, norm=norm, radius=radius, num_tokens=N)
        found = attacked(layer, radius, norm, steps=5, starts=6, seed=heads)
        assert found <= float(bound), (name, radius)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_no_long_attack_on_a_layer_exceeds_its_bound(heads: int, norm: Any) -> None:
    """Prints how many times the bound is above the largest value found, at three radii."""
    for name, layer in kinds(heads):
        ratios = []
        for radius in (0.3, 1.0, 3.0):
            bound = ls.lipschitz_bound(layer, norm=norm, radius=radius, num_tokens=N)
            found = attacked(layer, radius, norm, steps=120, starts=24, seed=heads)
            assert found <= float(bound), (name, radius)
            ratios.append(float(bound) / found)
        print(f"{norm}, {heads} heads, {name}: " + ", ".join(f"{one:.2f}" for one in ratios))


def feeds() -> Iterator[tuple[str, Feed]]:
    """Token-wise networks of every activation, with biases and without, gated and not."""
    inner, outer, gate = weight(2 * D, D, 4), weight(D, 2 * D, 5), weight(2 * D, D, 6)
    for size in (0.0, 0.5):
        of_units, of_gate = (drawn(2 * D, seed=seed, size=size) for seed in (7, 8))
        shift = drawn(D, seed=9, size=size)
        for name in ACTIVATIONS:
            yield name, Feed(inner, of_units, outer, shift, name)
            yield f"gated {name}", Feed(inner, of_units, outer, shift, name, gate, of_gate)


@pytest.mark.parametrize("name", ["relu", "gelu", "identity"])
def test_the_radius_of_a_network_of_one_unit_is_reached(name: Any) -> None:
    """At 5 the unit is 10.5 and GELU the identity; the gate is 12.9."""
    one, zero = torch.ones(1, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)
    first = Feed(2 * one, zero + 0.5, 3 * one, zero + 0.7, name)
    last = Branch(Feed(one, zero, one, zero, "identity"), skip=False)
    for feed in (first, replace(first, gate=2.5 * one, gate_bias=zero + 0.4)):
        chain = Chain((Branch(feed, skip=False), last))
        reached = float(Chain(chain.branches[:1])(5 * one[None]))
        found = ls.lipschitz_bound(chain, radius=5.0).parts[1].radius
        assert found == pytest.approx(reached, rel=1e-9), feed.gate


def test_a_network_that_writes_nothing_hands_on_what_it_was_given() -> None:
    """On all inputs: zero times an infinite radius is zero."""
    eye, zero = torch.eye(D, dtype=DOUBLE), torch.zeros(D, dtype=DOUBLE)
    silent = Feed(eye, zero, 0 * eye, zero + 0.1, "gelu")
    last = Feed(eye, zero, eye, zero, "silu", eye, zero)
    chain = Chain((Branch(silent, skip=False), Branch(last, skip=False)))
    assert ls.lipschitz_bound(chain).parts[1].radius == pytest.approx(0.1 * D**0.5)
    clipped = Chain((Branch(silent), Branch(last, Clip(1.0))))
    assert math.isfinite(float(ls.lipschitz_bound(clipped)))


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh"])
def test_an_activation_makes_no_token_longer(name: Any) -> None:
    """Whatever its slope is: ``|act(z)| <= |z|``."""
    eye, zero = torch.eye(D, dtype=DOUBLE), torch.zeros(D, dtype=DOUBLE)
    first, last = (
        Branch(Feed(eye, zero, eye, zero, one), skip=False) for one in (name, "identity")
    )
    bound = ls.lipschitz_bound(Chain((first, last)), radius=2.0)
    assert bound.parts[1].radius == pytest.approx(2.0, rel=1e-9)
    z = torch.linspace(-30, 30, 600_001, dtype=DOUBLE)
    for one in ACTIVATIONS.values():
        assert bool((one(z).abs() <= z.abs()).all())


@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_outputs_stay_within_the_radius_that_is_handed_on(norm: Any) -> None:
    eye, zero = torch.eye(D, dtype=DOUBLE), torch.zeros(D, dtype=DOUBLE)
    last = Branch(Feed(eye, zero, eye, zero, "identity"), skip=False)
    for name, part in (*kinds(2), *feeds()):
        for radius in (0.3, 3.0):
            chain = Chain((Branch(part, skip=-0.5), last))
            bound = ls.lipschitz_bound(chain, norm=norm, radius=radius, num_tokens=N)
            x = radius * drawn(50, N, D, seed=3)
            y = Chain(chain.branches[:1])(inside(x, radius))
            assert float(y.norm(dim=-1).max()) <= bound.parts[1].radius * (1 + 1e-9), name


def mixed(heads: int, norm: Norm | Clip | None) -> Chain:
    """Weighted sums, every activation, a gate, norms and clips."""
    four = [weight(D, D, seed) for seed in range(4)]
    wide, out, gate = weight(2 * D, D, 4), weight(D, 2 * D, 5), weight(2 * D, D, 6)
    b, c = drawn(2 * D, seed=7, size=0.3), drawn(D, seed=8, size=0.3)
    branches = [Branch(norm=Clip(1.5), skip=False)]
    branches.append(Branch(ls.DotProduct(*four, heads=heads, query_bias=c), norm, skip=0.7))
    for name in ("relu", "gelu", "gelu_tanh", "silu", "tanh"):
        feed = Feed(wide, b, out, c, name, *((gate, b) if name == "silu" else ()))
        branches.append(Branch(feed, norm, skip=-0.5))
    branches.append(Branch(ls.L2Attention(four[0], four[2], four[3], heads=heads), norm))
    return Chain(tuple(branches))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_no_attack_on_a_network_exceeds_its_bound(heads: int, norm: Any) -> None:
    gain, shift = 0.5 + drawn(D, seed=1).abs(), drawn(D, seed=2)
    fronts = [None, Clip(1.0), Norm(gain, shift, 0.5), Norm(gain, shift, 0.5, centred=False)]
    for index, front in enumerate([*fronts, Norm(gain, shift, scaled=False)]):
        chain, radius = mixed(heads, front), (0.5, 3.0)[index % 2]
        bound = ls.lipschitz_bound(chain, norm=norm, radius=radius, num_tokens=N)
        assert attacked(chain, radius, norm, starts=6, steps=5, seed=heads) <= float(bound)


class Classifier(nn.Module):
    """A small encoder that is trained: norms before its parts, the mean of all tokens scored."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        made: Any = {"activation": "gelu", "norm_first": True, "batch_first": True}
        layer = nn.TransformerEncoderLayer(D, heads, 16, dropout=0.0, layer_norm_eps=0.5, **made)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@pytest.fixture(scope="module")
def trained() -> Classifier:
    torch.manual_seed(0)
    model = Classifier(4).double()
    x = drawn(64, N, D, seed=1)
    labels = x[:, :, :3].amax(1).argmax(1)
    step = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        step.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        step.step()
    assert float((model(x).argmax(1) == labels).double().mean()) > 0.7
    return model


def test_a_trained_module_is_read_bounded_and_attacked(trained: Classifier) -> None:
    x, frozen = drawn(1, N, D, seed=2), copy.deepcopy(trained).requires_grad_(False)
    parts, _ = read_parts(frozen, (x,))
    for norm in ("max-token", "frobenius"):
        bound = ls.lipschitz_bound(trained, x, norm=norm, radius=1.0)
        bound.value.backward()
        found = attacked(lambda z: parts(z)[:, None], 1.0, norm, starts=9, steps=15)
        assert found <= float(bound)
    reached = {name for name, p in trained.named_parameters() if p.grad is not None}
    assert {n for n, _ in trained.named_parameters() if n.endswith("weight")} <= reached


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_a_rotation_that_scales_does_so_to_queries_and_to_keys(softcap: Any, norm: Any) -> None:
    """As YaRN's: twice the factor of scores that are scaled by its square."""
    four, turn = [weight(D, D, seed, 0.5) for seed in range(4)], turned(N, D // 2)
    steep = Rotary(1.5 * turn.cos, 1.5 * turn.sin)
    own: Any = {"heads": 2, "query_bias": drawn(D, seed=9), "softcap": softcap}
    bounds = [
        ls.lipschitz_bound(
            ls.DotProduct(*four, rotary=one, scale=scale, **own),
            norm=norm,
            radius=1.0,
            num_tokens=N,
        )
        for one, scale in ((steep, 1.0), (turn, 2.25))
    ]
    assert float(bounds[0]) == pytest.approx(float(bounds[1]))


def test_a_norm_of_all_keys_reads_those_of_groups_once() -> None:
    q, key, v, o = (weight(D, D, seed, 2.0) for seed in range(4))
    gain = TokenNorm(0.5 + drawn(D // 2, seed=5).abs(), 0.1)
    layer = ls.DotProduct(
        q, key[: D // 2], v[: D // 2], o, heads=4, groups=2, key_norm=gain, scale=2.0
    )
    for norm in ("max-token", "frobenius"):
        bound = ls.lipschitz_bound(layer, norm=norm, radius=1.0, num_tokens=N)
        assert attacked(layer, 1.0, norm, starts=6, steps=10) <= float(bound)


# --- what is reached


def quarter(size: float = 1.0) -> Tensor:
    return size * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE)


def opposed(radius: float, pairs: int, width: int = 2) -> Tensor:
    """Tokens ``±R e_1`` in equal numbers."""
    x = torch.zeros(2 * pairs, width, dtype=DOUBLE)
    x[::2, 0], x[1::2, 0] = radius, -radius
    return x


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0])
def test_the_factor_of_a_head_is_reached(radius: float) -> None:
    """``A`` a quarter turn, tokens ``±R e_1``: every inequality of the proof is an equality."""
    eye = torch.eye(2, dtype=DOUBLE)
    layer = ls.DotProduct(quarter(), eye, eye, scale=1.0)
    bound = ls.lipschitz_bound(layer, radius=radius)
    reached = max_token_norm(layer.linearise(opposed(radius, 30))).lower
    assert float(bound) == pytest.approx(math.hypot(1, radius**2) + radius**2, rel=1e-9)
    assert 0.98 * float(bound) <= reached <= float(bound)


def test_the_number_of_tokens_counts_once_in_a_chain() -> None:
    """Rows that all read the first token: ``√n`` after one layer and after three."""
    n, eye, none = 9, torch.eye(2, dtype=DOUBLE), torch.zeros(2, 2, dtype=DOUBLE)
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[:, 0] = True
    layer = Branch(ls.DotProduct(none, none, eye, mask=mask), skip=False)
    chain = Chain((layer,) * 3)
    x = drawn(n, 2, seed=0)
    exact = float(torch.linalg.matrix_norm(to_dense(ls.linearise(chain, x)), 2))
    bound = ls.lipschitz_bound(chain, norm="frobenius", radius=1.0, num_tokens=n)
    assert exact == pytest.approx(3.0) and float(bound) == pytest.approx(exact, rel=1e-9)
    share = torch.full((n,), 1 / n, dtype=DOUBLE)
    pooled = Network(chain.branches, share, eye, torch.zeros(2, dtype=DOUBLE))
    assert float(ls.lipschitz_bound(pooled, norm="frobenius")) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_both_norms_of_a_chain_know_each_other(heads: int, pooled: bool) -> None:
    branches: list[Branch] = []
    for name, layer in kinds(heads):
        if name in ("dot product", "causal, biased", "L2", "cosine", "sigmoid"):
            branches += [Branch(None, Clip(0.4)), Branch(layer, skip=0.5)]
    if not pooled:
        net: Any = Chain(tuple(branches))
    else:
        net = Network(tuple(branches), torch.full((N,), 1 / N).double(), *two_classes())
    size: Any = {"radius": 0.4, "num_tokens": N}
    whole, largest = (
        float(ls.lipschitz_bound(net, norm=n, **size)) for n in ("frobenius", "max-token")
    )
    assert whole <= (1.0 if pooled else math.sqrt(N)) * largest * (1 + 1e-9)
    found = attacked(
        lambda x: net(x)[:, None] if pooled else net(x), 0.4, "frobenius", steps=15, starts=9
    )
    assert found <= whole


def test_rows_are_at_most_the_root_of_their_number_times_one() -> None:
    """Ninety-seven heads of L2, whose shares are not monotone in what they move by."""
    g, h, n = 4, 96, 9000
    m = math.sqrt(133) + 6
    w = torch.full((h + 1,), 3**0.5, dtype=DOUBLE)
    w[0] = 0.1
    value = torch.full((h + 1,), 1 / (g * m), dtype=DOUBLE)
    value[0] = 1.0
    out = torch.zeros(h // g + 1, h + 1, dtype=DOUBLE)
    out[0, 0] = 1.0
    for i in range(h):
        out[1 + i // g, 1 + i] = 1.0
    four: Any = torch.diag(w), torch.diag(value / w.square()), out
    layer = ls.L2Attention(*four, heads=h + 1, causal=True)
    whole, row = (
        float(ls.lipschitz_bound(layer, norm=norm, radius=1.0, num_tokens=n))
        for norm in ("frobenius", "max-token")
    )
    assert whole <= math.sqrt(n) * row * (1 + 1e-9)


@pytest.mark.parametrize(("norm", "exact"), [("frobenius", 33.0), ("max-token", 99.0)])
def test_attention_after_a_pool_reads_one_row(norm: Any, exact: float) -> None:
    eye, none = torch.eye(2, dtype=DOUBLE), torch.zeros(2, 2, dtype=DOUBLE)
    tail = (Branch(ls.DotProduct(none, none, eye), skip=False), Branch())
    share = torch.full((9,), 11.0, dtype=DOUBLE)
    net = Network((), share, eye, none[0], tail=tail)
    found = float(ls.lipschitz_bound(net, norm=norm, radius=1.0))
    assert found == pytest.approx(2 * exact, rel=1e-9)


def test_the_derivative_through_both_norms_is_that_of_differences() -> None:
    layers = dict(kinds(4))
    value = layers["dot product"].value.clone().requires_grad_()
    along = drawn(*value.shape, seed=4)

    def bound(v: Tensor) -> Tensor:
        chain = [Branch(layers["dot product"].replace(value=v), Clip(0.4), skip=0.5)] * 3
        own = ls.lipschitz_bound(Chain(tuple(chain)), norm="frobenius", radius=1.0, num_tokens=N)
        return own.value

    (slope,) = torch.autograd.grad(bound(value), value)
    with torch.no_grad():
        step = (bound(value + 1e-6 * along) - bound(value - 1e-6 * along)) / 2e-6
    assert float((slope * along).sum()) == pytest.approx(float(step), rel=1e-5)


def two_classes() -> tuple[Tensor, Tensor]:
    return weight(2, D, 3), torch.zeros(2, dtype=DOUBLE)


def means(left: Tensor, right: Tensor) -> float:
    """The bound where scores are constant: of heads ``L_h R_h`` that read means of tokens."""
    heads, _, k = left.shape
    none = torch.zeros(heads * k, right.shape[2], dtype=DOUBLE)
    output = left.movedim(0, 1).flatten(1)
    return float(
        ls.lipschitz_bound(ls.DotProduct(none, none, right.flatten(0, 1), output, heads=heads))
    )


def test_heads_add_up_as_the_projection_adds_them() -> None:
    """Where heads write side by side a root of squares, where they write alike a sum."""
    v = torch.stack([weight(2, D, seed, 2.0 / (1 + seed)) for seed in range(4)])
    norms = torch.linalg.matrix_norm(v, 2)
    apart = torch.eye(D, dtype=DOUBLE).unflatten(1, (4, 2)).movedim(1, 0)
    assert means(apart, v) == pytest.approx(float(norms.norm()))
    alike = torch.linalg.svd(v, full_matrices=False).U.mT
    assert means(alike, v) == pytest.approx(float(norms.sum()))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_heads_together_are_between_what_is_reached_and_their_sum(heads: int) -> None:
    left = drawn(heads, D, D // heads, seed=heads)
    right = drawn(heads, D // heads, D, seed=1)
    blocks, u = left @ right, drawn(64, D, seed=3)
    for _ in range(100):
        pulled = torch.einsum("bo,hod->bhd", u, blocks)
        u = torch.einsum("hod,bhd->bo", blocks, pulled / pulled.norm(dim=-1, keepdim=True))
        u = u / u.norm(dim=1, keepdim=True)
    reached = float(torch.einsum("bo,hod->bhd", u, blocks).norm(dim=-1).sum(1).max())
    found = means(left, right)
    assert reached <= found <= float(torch.linalg.matrix_norm(blocks, 2).sum()) * (1 + 1e-9)
    assert found <= 1.25 * reached


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("steep", [0.3, 1.0, 4.0])
def test_heads_that_read_one_query_reach_their_bound(heads: int, steep: float) -> None:
    """``√(H + a²) + a``: a score of 0 everywhere, and all heads moved by one move of the query."""
    n, e = 2000, torch.eye(3, dtype=DOUBLE)
    a = steep / math.sqrt(heads)
    reads = a * (torch.outer(e[0], e[2]) + torch.outer(e[1], e[0]))  # e1 to e2, e3 to e1
    query, key = reads.repeat(heads, 1), torch.eye(3, dtype=DOUBLE).repeat(heads, 1)
    value = e[0].repeat(heads, 1)
    layer = ls.DotProduct(query, key, value, scale=1.0, heads=heads)
    x = torch.zeros(n, 3, dtype=DOUBLE)
    x[:, 0] = 1.0
    x[1::2, 0] = -1.0
    # A value's move along e1, a key's along e2, at the angle that makes most of both.
    most = math.hypot(1.0, a)
    move = (e[0] + a * x[:, :1] * e[1]) / most
    move[0] = e[2]
    z = torch.func.jvp(layer, (x,), (move,))[1][0]
    found, bound = float(z.norm()), float(ls.lipschitz_bound(layer, radius=1.0))
    assert bound == pytest.approx(math.sqrt(heads + steep**2) + steep, rel=1e-9)
    assert (1 - 3 / n) * bound - 0.01 <= found <= bound


@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
@pytest.mark.parametrize("heads", [2, 4])
def test_heads_that_read_one_query_by_dense_matrices(heads: int, norm: Any) -> None:
    k, r, n = D // heads, 1.5, 7
    q, key, v, o = (torch.linalg.qr(weight(D, D, seed))[0] for seed in range(4))
    bias = drawn(D, seed=5, size=0.1)
    layer = ls.DotProduct(q, key, v, o, heads=heads, scale=1.0, query_bias=bias, causal=True)
    parts = (w.unflatten(0, (heads, k)) for w in (q, key))
    a = torch.cat([y.mT @ x for x, y in zip(*parts, strict=True)])  # the A_h above each other
    b = torch.cat([y.mT @ x for x, y in zip(bias.split(k), key.split(k), strict=True)])
    m = torch.cat([o[:, i : i + k] @ v[i : i + k] for i in range(0, D, k)], 1)
    own = r**2 * torch.linalg.matrix_norm(a, 2)
    root = 1.0 if norm == "max-token" else math.sqrt(n)
    others = root * torch.hypot(own.new_tensor(heads**0.5), own + r * b.norm())
    most = float(torch.linalg.matrix_norm(m, 2) * (others + own))
    bound = float(ls.lipschitz_bound(layer, norm=norm, radius=r, num_tokens=n))
    assert attacked(layer, r, norm, shape=(n, D), steps=20) <= bound <= most * (1 + 1e-9)


@pytest.mark.parametrize("size", [1e-85, 1e-40, 1e60])
def test_heads_of_any_size_have_the_bound_of_their_shape(size: float) -> None:
    """Scores, or values and output, of products that leave the squares of float64."""
    q, key, v, o = (weight(6, 6, seed) for seed in range(4))
    bound = float(ls.lipschitz_bound(ls.DotProduct(q, key, v, o, heads=3), radius=1.3))
    steep = ls.DotProduct(size * q, size * key, v, o, heads=3)
    assert float(ls.lipschitz_bound(steep, radius=1.3 / size)) == pytest.approx(bound)
    wide = ls.DotProduct(q, key, size * v, size * o, heads=3)
    found = float(ls.lipschitz_bound(wide, radius=1.3).value) / size / size
    assert bound * (1 - 1e-9) <= found <= 1.1 * bound


def test_cosine_attention_on_all_inputs_is_that_of_a_wide_ball() -> None:
    own = [torch.linalg.qr(weight(D, D, seed))[0] for seed in range(4)]
    layer = ls.ScaledCosineAttention(*own, heads=4, temperature=1.0)
    wide, whole = (float(ls.lipschitz_bound(layer, radius=r)) for r in (1e6, None))
    assert wide <= whole * (1 + 1e-9) and whole <= 1.01 * wide


def test_l2_attention_at_all_inputs_is_nearly_reached() -> None:
    """A token at 0 among opposed ones (Kim et al.): ``4 φ - 1 + 2 / (1 + φ)`` of ``4 φ + 1``."""
    one = torch.ones(1, 1, dtype=DOUBLE)
    layer = ls.L2Attention(one, one)
    for n in (11, 201):
        bound = float(ls.lipschitz_bound(layer, num_tokens=n))
        f = (bound - 1) / 4
        x = torch.full((n, 1), math.sqrt(1 + f), dtype=DOUBLE)
        x[0], x[1::2] = 0.0, -x[1::2]
        j = torch.func.grad(lambda z: layer(z)[0, 0])(x)
        assert f * math.exp(f + 1) == pytest.approx(n - 1)
        assert 4 * f - 1 + 2 / (1 + f) == pytest.approx(float(j.abs().sum()), rel=1e-6)


@pytest.mark.parametrize("n", [3, 8, 20])
def test_l2_attention_in_frobenius_far_from_the_origin(n: int) -> None:
    """Tokens at 0 among two opposed clusters: where weights times distances are large."""
    one = torch.ones(1, 1, dtype=DOUBLE)
    layer = ls.L2Attention(one, one)
    for radius in (0.5, 1.0, 2.0):
        bound = ls.lipschitz_bound(layer, norm="frobenius", num_tokens=n, radius=radius)
        for alone in range(1, n):
            for size in torch.linspace(0.1, 1.0, 10, dtype=DOUBLE) * radius:
                x = torch.full((n, 1), float(size), dtype=DOUBLE)
                x[:alone], x[alone::2] = 0.0, -size
                j = to_dense(layer.linearise(x))
                assert float(torch.linalg.matrix_norm(j, 2)) <= float(bound)


def test_norms_pools_and_token_wise_maps_are_reached() -> None:
    zero, x = torch.zeros(D, dtype=DOUBLE), 1e-6 * drawn(N, D, seed=1)
    gain = drawn(D, seed=2)
    for norm in (Norm(gain, zero, 0.01), Norm(gain, zero, 0.01, centred=False)):
        bound = ls.lipschitz_bound(Chain((Branch(None, norm, skip=False),)))
        slope = torch.linalg.matrix_norm(torch.func.jacrev(norm)(x[0]), 2)
        assert float(bound) == pytest.approx(float(gain.abs().max() / 0.1))
        assert 0.7 * float(bound) <= float(slope) <= float(bound)
    share = torch.full((N,), 1 / N, dtype=DOUBLE)
    head = weight(3, D, 3)
    network = Network((), share, head, torch.zeros(3, dtype=DOUBLE))
    top = float(torch.linalg.matrix_norm(head, 2))
    assert float(ls.lipschitz_bound(network)) == pytest.approx(top)
    frobenius = float(ls.lipschitz_bound(network, norm="frobenius"))
    assert frobenius == pytest.approx(top / math.sqrt(N))


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"])
def test_slopes_of_activations_are_reached(name: Any) -> None:
    """Two units of opposite sign at their steepest and their flattest point."""
    z = torch.linspace(-20, 20, 400_001, dtype=DOUBLE)
    slope = torch.func.vmap(torch.func.grad(ACTIVATIONS[name]))(z)
    one, zero = torch.ones(1, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)
    alone = Chain((Branch(Feed(one, zero, one, zero, name), skip=False),))
    most = float(ls.lipschitz_bound(alone))
    assert most - 1e-7 <= float(slope.max()) <= most
    one, back = (
        torch.tensor([[1.0], [1.0]], dtype=DOUBLE),
        torch.tensor([[1.0, -1.0]], dtype=DOUBLE),
    )
    b = torch.stack([z[slope.argmax()], z[slope.argmin()]])
    zero = torch.zeros(1, dtype=DOUBLE)
    feed = Feed(one, b, back, zero, name)
    reached = torch.func.jacrev(feed)(zero).abs().item()
    bound = float(ls.lipschitz_bound(Chain((Branch(feed, skip=False),))))
    assert reached == pytest.approx(float(slope.max() - slope.min()))
    assert reached <= bound <= 2**0.5 * reached + 0.1


# --- the formula of others


def as_coded(output: float, value: float, size: float, query_key: float) -> float:
    """``⅓ w (v + 2 v a² qk)``: attention's bound in phess2/lipschitz-transformers, 9173461.

    Norms are those of the root mean square, ``a`` of the tokens, scores are divided by the width of
    a head. The proof in print was not read: it may define the norms of heads in another way.
    """
    return output * (value + 2 * value * size**2 * query_key) / 3


@pytest.mark.parametrize(("heads", "reached"), [(1, 0.7), (4, 2.6), (8, 5.2)])
def test_a_formula_without_a_factor_for_heads_beside_ours(heads: int, reached: float) -> None:
    """All matrices of norm 1, tokens of root mean square 1: one head's scores grow with heads."""
    d = 2 * heads
    eye = torch.eye(d, dtype=DOUBLE)
    query = torch.block_diag(*[quarter()] * heads)
    layer = ls.DotProduct(query, eye, eye, eye / 3, heads=heads, scale=heads / d)
    x = opposed(d**0.5, 30, d)
    found = max_token_norm(layer.linearise(x)).lower
    formula = as_coded(1.0, 1.0, 1.0, 1.0)
    assert formula == 1.0
    ours = float(ls.lipschitz_bound(layer, radius=d**0.5))
    assert reached <= found <= ours <= (math.sqrt(heads + heads**2) + heads) / 3 * (1 + 1e-9)
    assert (found > formula) == (heads > 1)


# --- promises about the number itself


def test_the_derivative_in_the_weights_is_that_of_differences() -> None:
    layers = dict(kinds(2)).values()
    for layer in layers:
        x = layer.value.clone().requires_grad_()
        along = drawn(*x.shape, seed=4)

        def bound(v: Tensor, own: Any = layer) -> Tensor:
            changed = own.replace(value=v)
            return ls.lipschitz_bound(changed, radius=1.0, num_tokens=N).value

        (slope,) = torch.autograd.grad(bound(x), x)
        with torch.no_grad():
            change = (bound(x + 1e-6 * along) - bound(x - 1e-6 * along)) / 2e-6
        assert float((slope * along).sum()) == pytest.approx(float(change), rel=1e-5, abs=1e-6)


def test_a_number_is_rounded_up() -> None:
    layer = ls.DotProduct(*[weight(D, D, seed) for seed in range(4)], heads=2)
    bound = ls.lipschitz_bound(layer, radius=1.0)
    assert float(bound) > float(bound.value)
    assert float(bound) == pytest.approx(float(bound.value), rel=1e-11)
    assert "attention 0" in repr(bound) and "max-token" in bound._repr_html_()


def test_what_rounding_hides_where_products_cancel_is_in_the_number() -> None:
    """Two large products that differ by their last digits, beside their exact difference."""
    eye, none = torch.eye(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    for a, b in (1e8 * drawn(20, 2, seed=1)).tolist():
        inner = torch.tensor([[a, 0.0], [b, 0.0]], dtype=DOUBLE)
        outer = torch.tensor([[b / a, -1.0]], dtype=DOUBLE)
        exact = float(abs(Fraction(b / a) * Fraction(a) - Fraction(b)))
        feed = Feed(inner, none, outer, none[:1], "identity")
        assert exact <= float(ls.lipschitz_bound(Chain((Branch(feed, skip=False),))))
        layer = ls.DotProduct(0 * eye, inner, eye, query_bias=outer[0], scale=1e9)
        assert math.hypot(1, 1e9 * exact) <= float(ls.lipschitz_bound(layer, radius=1.0))


@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_a_head_of_a_vocabulary_costs_no_square_of_it(norm: Any) -> None:
    """An open decoder reads its own head: 40,000 squared would be 13 GB."""
    opened = ls.load_model("random:gpt2:n_layer=1,n_embd=8,n_head=2,vocab_size=40000")
    opened.model.requires_grad_(False)
    parts = opened.as_network("Some words.")
    assert isinstance(parts, Chain)
    head = parts.branches[-1].part
    assert isinstance(head, Feed)
    assert head.outer.shape == (40_000, 8)
    assert head.inner.shape == (8, 8)
    asked: Any = {"norm": norm, "radius": 1.0, "num_tokens": 11}
    bound = float(ls.lipschitz_bound(opened, "Some words.", **asked))
    assert bound == float(ls.lipschitz_bound(parts, **asked))
    found = attacked(parts, 1.0, norm, shape=(11, 8), starts=3, steps=10)
    assert 1e-3 * bound < found <= bound


def test_infinite_and_unknown_bounds_are_refused_in_one_line() -> None:
    four: Any = [weight(D, D, seed) for seed in range(4)]
    dot = ls.DotProduct(*four, heads=2)
    with pytest.raises(ls.InputError, match=r"attention 0.*all inputs: give `radius`"):
        ls.lipschitz_bound(dot)
    for layer in (ls.SinkhornAttention(*four), ls.LipschitzNormAttention(*four)):
        with pytest.raises(ls.InputError, match="num_tokens"):
            ls.lipschitz_bound(layer, radius=1.0)
    with pytest.raises(ls.InputError, match="num_tokens"):
        ls.lipschitz_bound(dot.replace(causal=True), radius=1.0, norm="frobenius")
    others = ~torch.eye(N, dtype=torch.bool)
    for layer in (ls.L2Attention(*four[:2]), ls.L2Attention(*four[:2], mask=others)):
        with pytest.raises(ls.InputError, match=r"attention 0.*for given `num_tokens`"):
            ls.lipschitz_bound(layer)
    model = ls.SmoothTransformer(32, 4, 2, variant="sigmoid", vocabulary=5, outputs=3, length=6)
    with pytest.raises(ls.InputError, match="scale weights down, or give `num_tokens`"):
        ls.lipschitz_bound(Chain(model.as_network().branches))
    assert math.isfinite(float(ls.lipschitz_bound(model)))
    with pytest.raises(ls.InputError, match="`data` should be an input"):
        ls.lipschitz_bound(nn.Linear(2, 2))
    with pytest.raises(ls.InputError, match=r"should hold attention .* Found none in `Linear`"):
        ls.lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ls.InputError, match="Found 1 NaN or Inf in `weight`"):
        ls.lipschitz_bound(nn.Linear(1, 1, bias=False).requires_grad_(False).apply(_spoilt))
    with pytest.raises(ls.InputError, match="training diverged"):
        ls.lipschitz_bound(Chain((Branch(dot.replace(value=four[0] * math.nan)),)), radius=1.0)
    with pytest.raises(ls.InputError, match="load_model"):
        ls.lipschitz_bound("minilm")


def _spoilt(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.fill_(math.nan)


def test_lipschitz_variants_need_no_radius() -> None:
    four: Any = [weight(D, D, seed) for seed in range(4)]
    cosine = ls.ScaledCosineAttention(*four, temperature=1.0, eps=0.5)
    for layer in (cosine, ls.ClippedAttention(*four, radius=1.0)):
        bound = float(ls.lipschitz_bound(layer))
        assert attacked(layer, 30.0, "max-token", starts=9, steps=15) <= bound
    constant = ls.DotProduct(0 * four[0], *four[1:])
    top = float(product_norm(four[3].mT, four[2]))
    assert float(ls.lipschitz_bound(constant)) == pytest.approx(top)
