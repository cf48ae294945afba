"""Margins of networks never fall below their bounds, nor do attention's derivatives leave theirs.

References: autograd's Jacobians and Hessians, dense spectra, descents.
"""

from dataclasses import replace

import pytest
import torch

from lipscope import DotProduct
from lipscope.attention import Rotary
from lipscope.certificates import NetworkBall, certify_network
from lipscope.certificates.attention_at import AttentionAt, bend_of
from lipscope.certificates.attention_ball import AttentionBall
from lipscope.certificates.forms import RowForm, least_in_ball, least_in_balls, thin_root
from lipscope.certificates.tokenwise import NormBall
from lipscope.models import ActivationName, Branch, Feed, Network, Norm

F64 = torch.float64
N, D, F = 3, 4, 5


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def attention(seed: int, kind: str = "plain") -> DotProduct:
    w = gaussian(seed, 4, D, D) / D**0.5
    if kind == "groups":
        return DotProduct(w[0], w[1][:2], w[2][:2], w[3], heads=2, groups=1, key_bias=w[0, 0, :2])
    if kind == "rotary":
        angle = torch.arange(N)[:, None] * torch.tensor([[0.7, 0.7]]).double()
        rotary = Rotary(angle.cos(), angle.sin())
        return DotProduct(*w, heads=2, rotary=rotary, query_bias=w[1, 0])
    if kind == "cancel":  # two equal heads, their outputs opposite
        twice = [torch.cat([one[:2]] * 2) for one in w[:3]]
        return DotProduct(*twice, torch.cat([w[3][:, :2], -w[3][:, :2]], 1), heads=2)
    if kind == "still keys":  # values move, no key does
        angle = torch.arange(N)[:, None] * torch.tensor([[0.7, 0.7]]).double()
        rotary = Rotary(angle.cos(), angle.sin())
        plain = torch.zeros_like(w[1])
        return DotProduct(w[0], plain, w[2], w[3], heads=2, rotary=rotary, key_bias=w[1, 0])
    if kind == "saturated":
        return DotProduct(30 * w[0], w[1], w[2], w[3], heads=2)
    return DotProduct(*w, heads=2, causal=kind == "causal", query_bias=w[0, 0])


SHAPES = ["identity", "one token"]
KINDS = ["plain", "causal", "groups", "rotary", "cancel", "still keys", "saturated"]


def moved_by(shape: str) -> torch.Tensor:
    """``T``: of all tokens, of one, or of few coordinates that move all, some of them little."""
    if shape == "tilted":
        return gaussian(3, N, D, 6) * torch.tensor([1.0, 1, 0.3, 0.1, 0.01, 1e-3]).double()
    t = torch.eye(N * D, dtype=F64).view(N, D, N * D)
    return t[:, :, D : 2 * D] if shape == "one token" else t


def directions(p: int, at: AttentionAt, radius: float) -> torch.Tensor:
    """Moves to the edge: random ones, and those that change one weight most."""
    a = at.a.flatten(0, 2)
    found = torch.cat([gaussian(p, 3, p), a[a.norm(dim=1) > 0][:3]])
    found = torch.cat([found, -found])
    return radius * found / found.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("shape", [*SHAPES, "tilted"])
def test_norms_over_tokens_are_those_of_all_rows_together(shape: str) -> None:
    """Also where tokens move apart, and no matrix of all of them is made."""
    layer, x = attention(1, "causal"), gaussian(2, N, D)
    at = AttentionAt(layer, x, moved_by(shape), torch.tensor([0, 2]))
    assert at.separate == (shape != "tilted")
    keys, queries = gaussian(3, 2, 2, N).square(), gaussian(4, 2, 2).square()
    rows = at.key[:, None] * keys.sqrt()[..., None, None]
    expected = torch.linalg.matrix_norm(rows.flatten(2, 3), 2)
    assert torch.allclose(at.key_spread(keys), expected, rtol=1e-9)
    rows = at.query * queries.sqrt()[..., None, None]
    expected = torch.linalg.matrix_norm(rows.flatten(1, 2), 2)
    assert torch.allclose(at.of_heads(queries), expected, rtol=1e-9)
    expected = torch.linalg.matrix_norm(at.value.flatten(1, 2), 2)
    assert torch.allclose(at.value_norms, expected, rtol=1e-9)
    rows = torch.einsum("hdk,hjkp->hjdp", at.output, at.value)
    expected = torch.linalg.matrix_norm(rows.flatten(1, 2), 2)
    assert torch.allclose(at.read_norms, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, "tilted") for kind in KINDS), *(("causal", s) for s in SHAPES)]
)
def test_derivatives_of_attention_stay_within_their_changes(kind: str, shape: str) -> None:
    """Weights, Jacobians and Hessians at the edges of balls, tiny and wide, at 12 moves."""
    layer, x = attention(1, kind), gaussian(2, N, D)
    x[1] = x[2]  # equal keys
    t = moved_by(shape)
    rows = torch.tensor([0, 2])
    reads, k = gaussian(4, 2, D), gaussian(5, 2, 3, D)
    at = AttentionAt(layer, x, t, rows)

    def out(xi: torch.Tensor) -> torch.Tensor:
        return layer(x + t @ xi)[rows]

    jacobian = torch.func.jacrev(out)
    hessian = torch.func.hessian(lambda xi: (reads * out(xi)).sum())
    zero = x.new_zeros(t.shape[2])
    j0, h0, bend = jacobian(zero), hessian(zero), bend_of(at, reads)
    assert torch.allclose(at.jacobian, j0, atol=1e-12)
    assert torch.allclose(bend.hessian, h0, atol=1e-12)
    each = torch.func.hessian(lambda xi: torch.einsum("ikd,id->ik", k, out(xi)))(zero)
    fourth = torch.linalg.eigvalsh(each).pow(4).sum(-1) ** 0.25
    found = at.lead_of(k, torch.ones_like(k[..., 0], dtype=torch.bool))
    assert found is not None
    assert bool((found >= fourth * (1 - 1e-12)).all())
    room = 1e-10  # of rounding, where a row reads one key alone and nothing bends
    assert kind == "cancel" or bool((found <= fourth * (1 + 1e-6) + room).all())
    together, squares = at.lead_together(k), (each @ each).sum((0, 1))
    assert together is not None
    above = torch.linalg.eigvalsh(together - squares)
    size = 1e-9 * (1 + squares.abs().max())  # what is added for rounding where heads cancel
    assert bool((above >= 0).all() and (above <= size).all())
    for radius in (1e-4, 0.3):
        ball = AttentionBall(at, radius, pieces=2)
        one = ball.grid.of(torch.tensor([False, True]))
        lead = at.lead_rows
        assert lead is not None
        eye = torch.eye(D, dtype=F64).expand(2, 1, D, D)
        rowwise = ball.change_of(eye, lead[0][:, None])[-1, :, 0]
        alone = ball.change_of(k[:, :, None], found)[-1]
        last = torch.tensor([0.0, 1.0], dtype=F64)
        joint = ball.joint_change(k, last), ball.joint_change(k, last, lambda: at.lead_together(k))
        q = ball.hessian_change(bend, last)
        for xi in directions(len(zero), at, radius):
            q1, k1, _ = layer.project(x + t @ xi)
            p = layer.weights(q1, k1)[:, rows]
            assert bool((p <= one.upper[0] + 1e-13).all() and (p >= one.lower[0] - 1e-13).all())
            first = at.p * (at.a @ xi)
            assert bool(((p - at.p - first).abs() <= one.beyond[0] * (1 + 1e-9) + 1e-15).all())
            assert bool(((p - at.p).norm(dim=-1) <= one.length[0] * (1 + 1e-9) + 1e-15).all())
            assert bool(((p - at.p).abs().sum(-1) <= one.total[0] * (1 + 1e-9) + 1e-15).all())
            dj, room = jacobian(xi) - j0, 1e-12
            size = torch.linalg.matrix_norm(dj, 2)
            assert bool((size <= rowwise + room).all())
            read = k @ dj
            assert bool((read.norm(dim=-1) <= alone + room).all())
            flat = read.flatten(0, 1)
            for form in joint:
                left = torch.linalg.eigvalsh(flat.T @ flat - form)[-1]
                assert float(left) <= 1e-11 * (1 + float(form.abs().max()))
            least = torch.linalg.eigvalsh(hessian(xi) - h0 + q)[0]
            assert float(least) >= -1e-11


@pytest.mark.parametrize("centred", [False, True])
def test_norms_bend_less_than_their_parabolas(centred: bool) -> None:
    """Anchors, weights and eps; the bound is met where the angle turns fastest."""
    norm = Norm(gaussian(0, D), gaussian(1, D), 0.3, centred=centred)
    v, w, g = gaussian(2, 1, D), gaussian(3, 1, D), torch.Generator().manual_seed(4)
    for radius in (1e-3, 0.3, 0.6):
        at = NormBall(norm, v)
        assert at.within(radius * at.radial.norm(dim=-1))
        e = torch.randn(2, 300, D, generator=g, dtype=F64)
        anchor, far = v + radius * e / e.norm(dim=-1, keepdim=True)
        for one in range(0, 300, 30):
            a = v + 0.7 * (anchor[one : one + 1] - v)
            k = at.curvature(w, a, torch.tensor([radius]).double())[0]
            f = far - a
            slope = w @ norm_jacobian(norm, a[0])
            below = (w * norm(a)).sum() + (f * slope).sum(-1) - ((f @ k) * f).sum(-1) / 2
            assert bool(((norm(far) * w).sum(-1) >= below - 1e-12).all())
        out = torch.tensor([radius], dtype=F64)
        ways = torch.linspace(0, 1, 41, dtype=F64)[:, None]
        for one in range(0, 300, 30):
            way = anchor[one] + ways * (far[one] - anchor[one])
            secant = torch.stack([norm_jacobian(norm, v) for v in way]).mean(0) - at.slope[0]
            size = torch.linalg.matrix_norm(secant, 2)
            assert float(size) <= float(at.slope_change(anchor[one : one + 1], out))
        left = norm(far) - norm(v) - (far - v) @ at.slope[0].T
        assert bool(((left @ w[0]).abs() <= at.read(w) * at.remainder(out)).all())
    plain = Norm(torch.ones(D).double(), torch.zeros(D).double(), 0.0, centred=False)
    at = NormBall(plain, torch.eye(D, dtype=F64)[:1])
    assert at.within(torch.zeros(1).double())
    tiny = 1e-4 * torch.tensor([[3**-0.5, (2 / 3) ** 0.5, 0, 0]], dtype=F64)
    left = plain(at.v + tiny) - at.value - tiny @ at.slope[0].T
    bound = float(at.most * at.remainder(tiny.norm(dim=-1)))
    assert 0.95 * bound <= float(left.norm()) <= bound * 1.001  # its centre's, to second order


def norm_jacobian(norm: Norm, v: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(norm)(v)


def test_least_values_of_forms_are_below_and_met() -> None:
    """Saddles, a gradient of 0, a form of 0; in a ball and in three."""
    for seed in range(6):
        b = gaussian(seed, 6, 6)
        b, g = (b + b.T) * (seed > 0), gaussian(seed + 9, 6) * (seed != 1)
        below, point = least_in_ball(1.0, g, b, 0.7)
        met = float(1 + g @ point + point @ b @ point / 2)
        assert below <= met + 1e-12
        assert seed == 1 or met <= below + 1e-6  # there the least direction is not in the gradient
        e = gaussian(seed + 20, 4000, 3, 2)
        e = 0.7 * e / e.norm(dim=-1, keepdim=True)
        values = 1 + e.flatten(1) @ g + ((e.flatten(1) @ b) * e.flatten(1)).sum(1) / 2
        assert least_in_balls(1.0, g, b, 0.7, 3) <= float(values.min())
    assert least_in_ball(2.0, torch.zeros(3).double(), torch.zeros(3, 3).double(), 5.0)[0] > 1.99


def feed(seed: int, name: ActivationName, gated: bool = False, out: int = D) -> Feed:
    w = gaussian(seed, F, D), gaussian(seed + 1, F), gaussian(seed + 2, out, F) / 2
    return Feed(*w, torch.zeros(out).double(), name, gaussian(seed + 3, F, D) if gated else None)


def network(kind: str, blocks: int) -> Network:
    centred, scaled = kind != "rms", kind != "no variance"
    branches: list[Branch] = []
    if kind == "embedded":  # a norm before the first block
        branches.append(Branch(None, Norm(gaussian(40, D), gaussian(41, D), 1e-5), skip=False))
    for k in range(blocks):
        norms = [
            Norm(1 + gaussian(50 + k, D) / 5, gaussian(60 + k, D), 1e-5, centred, scaled)
            for _ in range(2)
        ]
        mixer = attention(10 * k + 1, kind if kind in KINDS else "plain")
        name: ActivationName = "gelu" if kind in ("gelu", "pre") else "relu"
        name = "silu" if kind == "rms" else name
        mlp = feed(10 * k + 2, name, kind in ("rms", "gated"))
        if kind in ("pre", "rms"):
            branches += [Branch(mixer, norms[0]), Branch(mlp, norms[1])]
        else:
            branches += [Branch(mixer), Branch(None, norms[0], skip=False)]
            branches += [Branch(mlp), Branch(None, norms[1], skip=False)]
    share = torch.full((N,), 1 / N, dtype=F64)
    tail: tuple[Branch, ...] = ()
    if kind in ("tail", "first"):
        tail = (Branch(feed(70, "tanh"), skip=False),)
    if kind == "first":
        share = torch.eye(N, dtype=F64)[0]
    return Network(tuple(branches), share, gaussian(80, 3, D), gaussian(81, 3), tail)


CASES = [
    ("post", 1), ("post", 2), ("no variance", 1), ("no variance", 3), ("pre", 1), ("pre", 2),
    ("rms", 1), ("rms", 2), ("gated", 1), ("gelu", 1), ("tail", 1), ("tail", 2), ("first", 2),
    ("causal", 2), ("groups", 1), ("rotary", 1), ("cancel", 1), ("saturated", 1),
    ("embedded", 1), ("embedded", 2),
]  # fmt: skip


FAST = [
    ("post", 1, "joint"), ("rms", 1, "each"), ("pre", 2, "token"), ("gelu", 1, "joint"),
    ("gated", 1, "token"), ("tail", 1, "each"), ("embedded", 1, "token"),
]  # fmt: skip
BALLS = ["joint", "token", "each"]


@pytest.mark.slow
@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize(("kind", "blocks"), CASES)
def test_margins_of_all_networks(kind: str, blocks: int, ball: str) -> None:
    """Every network with every ball."""
    check_margins(kind, blocks, ball)


@pytest.mark.parametrize(("kind", "blocks", "ball"), FAST)
def test_margins_stay_above_their_bounds(kind: str, blocks: int, ball: str) -> None:
    """Of some."""
    check_margins(kind, blocks, ball)


@pytest.mark.parametrize(("kind", "blocks", "ball"), FAST[:3])
def test_margins_stay_above_bounds_of_thin_roots(
    kind: str, blocks: int, ball: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where half of the eigenvalues have no row: what they add is bounded by rows of attention."""
    monkeypatch.setattr("lipscope.certificates.forms._FEW", 0.3)
    check_margins(kind, blocks, ball)


def test_thin_roots() -> None:
    """As many rows as the rank; what is left out lies below the second number."""
    flat = gaussian(1, 4, 2, 6)
    flat[1, 1] = 0.0
    flat[3] = 0.0
    forms = flat.mT @ flat
    forms[:3] += 1e-12 * torch.eye(6).double()
    rows, left = thin_root(forms)
    assert rows.shape == (4, 2, 6)
    assert bool((rows[1, 0] == 0).all())
    for form, root, some in zip(forms, rows, left, strict=True):
        apart = torch.linalg.eigvalsh(root.T @ root + some * torch.eye(6).double() - form)
        assert float(apart[0]) >= -1e-14 * float(form.abs().max())
        assert float(some) <= 1e-10 * float(torch.linalg.eigvalsh(form)[-1])


def check_margins(kind: str, blocks: int, ball: str) -> None:
    """At 0.4 to 1.4 times a radius that holds: 200 moves, and 20 steps of descent from eight."""
    net, x = network(kind, blocks), gaussian(7, N, D)
    tokens = torch.tensor([False, True, False]) if ball == "token" else torch.ones(N).bool()
    count = int(tokens.sum())
    scores = net(x)
    label = int(scores.argmax())
    rival = int(scores.index_fill(0, torch.tensor([label]), -torch.inf).argmax())
    bounds = NetworkBall(net, x, tokens)
    balls, wide = (count, count**0.5) if ball == "each" else (None, 1.0)
    zero = x.new_zeros(bounds.moves.shape[2])
    radius, margin = 1.0, float(scores[label] - scores[rival])
    while not bounds.grow(radius * wide) or bounds.lower(zero, label, rival, balls)[0] <= 0.0:
        radius /= 2
        assert radius > 1e-7

    def project(e: torch.Tensor, r: float) -> torch.Tensor:
        split = e.view(-1, count, D) if ball == "each" else e[:, None]
        split = split * (r / split.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1)
        return split.reshape(e.shape)

    def margins(e: torch.Tensor) -> torch.Tensor:
        s = net(x + torch.einsum("ndp,bp->bnd", bounds.moves, e))
        return s[:, label] - s[:, rival]

    for factor in (0.4, 1.0, 1.4):
        r = factor * radius
        e = project(10 * gaussian(5, 200, len(zero)), r)
        e, found = e[margins(e).argsort()][:8], float(margins(e).min())
        for _ in range(20):
            at = e.clone().requires_grad_(True)
            (g,) = torch.autograd.grad(margins(at).sum(), at)
            e = project(e - 0.3 * r * g / g.norm(dim=1, keepdim=True).clamp_min(1e-300), r)
        found = min(found, float(margins(e).min()))
        if not bounds.grow(r * wide):
            continue
        worst = e[margins(e).argmin()]
        for anchor in (zero, 0.5 * worst, worst):
            below = bounds.lower(anchor, label, rival, balls)[0]
            assert below <= found + 1e-9 * (abs(found) + margin)
        reach = bounds.reach((net.head[label] - net.head[rival])[None])
        assert net.tail or margin - float(reach) <= found + 1e-9


@pytest.mark.parametrize("kind", ["no variance", "post", "gelu", "gated"])
def test_arguments_stay_in_ranges_that_are_close_where_it_matters(kind: str) -> None:
    """A unit of ReLU that keeps its side, or is the last to bend, has one by the rougher bound."""
    net, x = network(kind, 2), gaussian(7, N, D)
    bounds = NetworkBall(net, x, torch.ones(N).bool())
    assert bounds.grow(0.03)
    moves = torch.nn.functional.normalize(gaussian(3, 64, N * D), dim=1) * 0.03
    inputs, rough = [bounds.moved(e) for e in moves], 0
    for segment in bounds.chain:
        passed = [segment.through(one) for one in inputs]
        inputs = [one[-1] for one in passed]
        for k, branch in enumerate(segment.tokens):
            if branch.units is None:
                continue
            for one in passed:
                z = branch.units.arguments(one[k])
                assert bool((branch.low <= z).all() and (z <= branch.high).all())
            close = segment.reads.of(branch.at, branch.units.into @ branch.slope)
            wider, z = branch.reach > close, branch.units.arguments(branch.at.value)
            assert bool((branch.reach >= close * (1 - 1e-12)).all())
            last = kind == "no variance" and segment.last
            relu = kind in ("no variance", "post")
            assert last or bool((relu & (branch.reach < z.abs()))[wider].all())
            rough += int(wider.sum())
    assert (rough > 0) == (kind in ("no variance", "post"))


def test_tokens_that_stand_still_have_no_axes_until_they_are_mixed() -> None:
    net, x = network("embedded", 2), gaussian(7, N, D)
    tokens = torch.tensor([False, True, False])
    bounds = NetworkBall(net, x, tokens)
    assert bounds.grow(1e-3)
    one, two = (segment.t for segment in bounds.chain[1:])
    assert one.shape == (N, D, D) and two.shape == (N, D, N * D)
    assert bool((one[[0, 2]] == 0).all())


def test_a_network_that_no_token_moves_and_ties() -> None:
    net, x = network("post", 1), gaussian(7, N, D)
    tied = replace(net, head=net.head[:1].expand(2, -1), bias=net.bias[:1].expand(2))
    assert certify_network(tied, x).radius == 0.0
    still = replace(net, head=0 * net.head)
    assert certify_network(still, x).radius > 0.1  # where a norm could vanish it ends
    part = replace(feed(2, "relu"), inner_bias=torch.full((F,), -99.0, dtype=F64))
    assert certify_network(replace(net, branches=(Branch(part),)), x).radius > 0.0
    zero = x.clone()
    zero[1] = 0.0
    norm = Norm(torch.ones(D).double(), torch.zeros(D).double(), 0.0)
    empty = replace(net, branches=(Branch(None, norm, skip=False),))
    assert certify_network(empty, zero).radius == 0.0


def test_a_form_of_rows_is_the_matrix_that_it_stands_for() -> None:
    gen = torch.Generator().manual_seed(0)
    few, many, rest, w, u = (
        torch.randn(*shape, generator=gen, dtype=F64)
        for shape in ((3, 4), (9, 4), (4, 4), (3,), (9,))
    )
    rest = rest + rest.T
    left, right = RowForm((few, many), (w, None)), RowForm((few, many), (2 * w, u), rest)
    form = left + 0.5 * right
    known = 2 * torch.einsum("k,kp,kq->pq", w, few, few)
    known = known + torch.einsum("k,kp,kq->pq", u, many, many) / 2 + rest / 2
    assert torch.allclose(form.matrix(), known) and torch.allclose(form.trace(), known.trace())
    assert torch.allclose(form @ rest, known @ rest) and len(form) == 4
