"""The bound of a module is that of the network that it is, whatever one run of it shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from agreement import gaussian, slope_at
from lipscope.models import Branch, Chain, Feed, check_network

DOUBLE = torch.float64


class Scorer(nn.Module):
    """A head with a ReLU: at some inputs all its units are positive, at others none is."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        made: Any = {"norm_first": True, "batch_first": True, "layer_norm_eps": 0.1}
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", **made)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.inner, self.outer = nn.Linear(4, 2), nn.Linear(2, 2)
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor([[1.0, 2.0, -1.0, 0.5], [1.0, 2.0, -1.0, 0.51]]))
            self.inner.bias.fill_(bias)
            self.outer.weight.copy_(torch.tensor([[3.0, -3.0], [-3.0, 3.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(self.encoder(x).mean(1))))


@pytest.mark.parametrize("bias", [20.0, -20.0])
def test_an_activation_that_is_linear_at_an_input_is_not_left_out(bias: float) -> None:
    """``relu(z) = z`` there, or 0: nothing in the values of a run shows it."""
    model = Scorer(bias).double()
    bound = ls.lipschitz_bound(model, gaussian(1, 3, 4), radius=2.0)
    assert [part.what for part in bound.parts if "relu" in part.what] == ["feed, relu"]
    shown = ls.lipschitz_bound(Scorer(0.0).double(), gaussian(1, 3, 4), radius=2.0)
    assert float(bound) == pytest.approx(float(shown), rel=1e-12)  # biases move nothing
    decided = ls.load_model(model).decision(gaussian(1, 3, 4))
    assert [one.part.activation for one in decided.network.tail] == ["relu"]


class Silent(nn.Module):
    """A block whose own part may say nothing at an input, then what is made of its tokens."""

    def __init__(self, part: Callable[[Any, Tensor], Tensor], bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.blocks = part, nn.ModuleList([nn.Module()])
        at: Any = self.blocks[0]
        at.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        at.w1, at.wg, at.w2 = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        at.norm = nn.LayerNorm(8, eps=1e-6)
        at.forward = self.through
        with torch.no_grad():
            at.attention.out_proj.weight *= 1e-4
            at.w1.bias.fill_(bias)

    def through(self, h: Tensor) -> Tensor:
        at: Any = self.blocks[0]
        h = h + at.attention(h, h, h, need_weights=False)[0]
        return self.part(at, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


RELU = nn.functional.relu
WITHOUT_A_WORD: dict[str, tuple[Callable[[Any, Tensor], Tensor], float]] = {
    "a square": (lambda at, h: h + at.w2(RELU(at.w1(h)) ** 2), -3.0),
    "a factor": (lambda at, h: h + at.w2(20 * RELU(at.w1(h))), -3.0),
    "an exponential": (lambda at, h: h + at.w2(torch.exp(RELU(at.w1(h))) - 1), -3.0),
    "a norm": (lambda at, h: h + at.w2(at.norm(RELU(at.w1(h)))), -3.0),
    "a sign": (lambda at, h: h + (at.w1(h) * (at.w1(h) > 0).to(h))[..., :4], -3.0),
    "a switch": (lambda at, h: (5.0 if h.norm() > 20 else 1.0) * (h + at.w2(at.w1(h))), 0.0),
    "a small token": (lambda at, h: h * (1 + 10 * (h.norm(dim=-1, keepdim=True) < 1e-3)), 0.0),
    "a bump": (lambda at, h: h + torch.exp(-20 * (h - 6).square()), 0.0),
    "a product": (lambda at, h: h + at.w2(at.w1(h) * at.wg(h)), 0.0),
}


@pytest.mark.parametrize("what", WITHOUT_A_WORD)
def test_what_says_nothing_near_an_input_is_not_taken_for_nothing(what: str) -> None:
    model = Silent(*WITHOUT_A_WORD[what]).double().eval()
    said = (
        r"scores of the module itself|Found otherwise after|Found `Exp` \(as autograd calls it\)"
        "|reads values of the stream"
    )
    with pytest.raises(ls.InputError, match=said):
        ls.lipschitz_bound(model, 0.1 * gaussian(1, 5, 4), radius=60.0)


def test_a_module_that_writes_over_its_stream_is_refused_in_one_line() -> None:
    def part(at: Any, h: Tensor) -> Tensor:
        y = nn.functional.gelu(at.w1(h))
        y += at.w1(at.w2(y))
        h += at.w2(y)
        return h

    with pytest.raises(ls.InputError, match=r"\. Found"):
        ls.lipschitz_bound(Silent(part, 0.1).double(), gaussian(1, 5, 4), radius=2.0)


def test_a_gate_that_is_shut_at_an_input_is_a_gate() -> None:
    model = Silent(lambda at, h: h + at.w2(RELU(at.w1(h)) * at.wg(h)), -3.0).double().eval()
    bound = ls.lipschitz_bound(model, 0.1 * gaussian(1, 5, 4), radius=60.0)
    assert any("gate" in part.what for part in bound.parts)
    inside = 60 * nn.functional.normalize(gaussian(40, 5, 4), dim=-1)
    assert 10 < max(slope_at(model, x) for x in inside) <= float(bound)


def test_saturated_feeds_are_not_taken_for_each_other() -> None:
    """GELU and ReLU of -40 and less are both zero; their slopes are not the same."""

    def two(at: Any, h: Tensor) -> Tensor:
        h = h + at.w2(nn.functional.gelu(at.w1(h)))
        return h + at.w3(RELU(at.wg(h)))

    model = Silent(two, -40.0).double().eval()
    at: Any = model.blocks[0]
    at.w3 = nn.Linear(8, 4).double()
    with torch.no_grad():
        at.wg.bias.fill_(-40.0)
    bound = ls.lipschitz_bound(model, 0.1 * gaussian(1, 5, 4), radius=60.0)
    assert [one.what for one in bound.parts][-2:] == ["feed, gelu", "feed, relu"]


class AroundTheBlocks(Scorer):
    """Scores with a part of the input that the blocks do not see."""

    def __init__(self, around: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(0.0)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        before = x.clone()
        return self.around(before, super().forward(x))


@pytest.mark.parametrize(
    "around",
    [
        lambda x, y: y * x.square().sum(),
        lambda x, y: y + RELU(x - 9).sum(),  # silent at the input
        lambda x, y: y * (1 + (x.norm(dim=-1) < 1e-2).sum()),  # and where tokens are larger
    ],
)
def test_what_leads_around_the_blocks_is_refused(around: Any) -> None:
    model = AroundTheBlocks(around).double()
    with pytest.raises(ls.InputError, match="by the stream alone"):
        ls.lipschitz_bound(model, gaussian(1, 3, 4), radius=2.0)
    with pytest.raises(ls.InputError, match="by the stream alone"):
        ls.load_model(model).decision(gaussian(1, 3, 4))


def asserted(x: Tensor, y: Tensor) -> Tensor:
    assert bool((x.abs() < 50).all())
    return y


def of_small_values(x: Tensor, y: Tensor) -> Tensor:
    return asserted(x, y) * x.square().sum()


def test_a_front_may_take_some_values_only() -> None:
    x = gaussian(1, 3, 4)
    plain = ls.lipschitz_bound(Scorer(0.0).double(), x, radius=2.0)
    found = ls.lipschitz_bound(AroundTheBlocks(asserted).double(), x, radius=2.0)
    assert float(found) == float(plain)
    with pytest.raises(ls.InputError, match="by the stream alone"):
        ls.lipschitz_bound(AroundTheBlocks(of_small_values).double(), x, radius=2.0)


HALF = 0.70710678
WRITTEN_BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda z: 0.5 * z * (1 + torch.erf(z * HALF)),
    "a cube": lambda z: 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z**3))),
    "a square": lambda z: (
        0.5 * z * (1 + torch.tanh(0.7978845608028654 * z * (1 + 0.044715 * z**2)))
    ),
    "products": lambda z: (
        0.5 * z * (1 + torch.tanh(0.7978845608028654 * z * (1 + 0.044715 * z * z)))
    ),
}


@pytest.mark.parametrize("bias", [40.0, -400.0])
def test_a_gate_that_saturates_is_of_what_it_takes(bias: float) -> None:
    """``z sigmoid(z - 3)`` is ``z``, or zero, there: so is SiLU."""
    model = Silent(lambda at, h: h + at.w2((z := at.w1(h)) * torch.sigmoid(z - 3)), bias).double()
    with pytest.raises(ls.InputError, match="Found otherwise after 1 attention layer"):
        ls.lipschitz_bound(model, 0.1 * gaussian(1, 5, 4), radius=60.0)


@pytest.mark.parametrize("how", WRITTEN_BY_HAND)
def test_gelu_may_be_written_by_hand(how: str) -> None:
    model = Silent(lambda at, h: h + at.w2(WRITTEN_BY_HAND[how](at.w1(h))), 0.1).double()
    bound = ls.lipschitz_bound(model, gaussian(1, 5, 4), radius=2.0)
    assert bound.parts[-1].what.startswith("feed, gelu")
    assert slope_at(model, gaussian(5, 4)) <= float(bound)


def test_what_is_written_over_is_refused() -> None:
    def part(at: Any, h: Tensor) -> Tensor:
        z = torch.relu(at.w1(h))
        z += 0.1
        return h + at.w2(z)

    with pytest.raises(ls.InputError, match="Found otherwise after 1 attention layer"):
        ls.lipschitz_bound(Silent(part, 0.1).double(), gaussian(1, 5, 4), radius=2.0)


class NormWithMore(nn.LayerNorm):
    """A norm by its name, with an activation in it."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y + 100 * RELU(y - 1.9)  # tokens of four entries, of √3 at the most


class OuterNorm(nn.Module):
    """Its ε is added to the root, which only small tokens show."""

    eps = 1e-16

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class CutNorm(nn.LayerNorm):
    """What it cuts off is not there in random tokens."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(max=1.7)


class SpikedNorm(nn.Module):
    """Centred tokens, and a spike where a random token has no entry."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x + 1e-14 * x * ((x - 0.3).square() + 1e-32).rsqrt()


NORMS = [NormWithMore(4), OuterNorm(), CutNorm(4), SpikedNorm()]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_norms_are_what_they_are_called(norm: nn.Module) -> None:
    model = Silent(lambda at, h: h + at.last(RELU(at.w1(at.own(h)))), 0.0).double().eval()
    at: Any = model.blocks[0]
    at.own, at.last = norm.double(), nn.Linear(8, 4).double()
    said = "Found otherwise after|scores of the module itself|Found `((Clamp, )?NativeLayer|Rsqrt)"
    with pytest.raises(ls.InputError, match=said):
        ls.lipschitz_bound(model, gaussian(1, 5, 4), radius=2.0)


def test_a_module_that_draws_is_refused() -> None:
    model = AroundTheBlocks(lambda _, y: y * torch.randn(()).exp()).double()
    with pytest.raises(ls.InputError, match="draws random numbers"):
        ls.lipschitz_bound(model, gaussian(1, 3, 4), radius=2.0)


def test_a_module_that_refuses_streams_is_refused_in_one_line() -> None:
    def around(_: Tensor, y: Tensor) -> Tensor:
        if y.abs().max() > 100:
            raise ValueError("too large")
        return y

    model = AroundTheBlocks(around).double()
    with torch.no_grad():
        model.outer.weight *= 1e3
    with pytest.raises(ls.InputError, match=r"run on any stream.*ValueError: too large"):
        ls.lipschitz_bound(model, 1e-4 * gaussian(1, 3, 4), radius=2.0)


def test_what_as_network_gives_is_looked_at() -> None:
    model = Scorer(0.0).double()
    model.as_network = lambda: 5
    for ask in (ls.lipschitz_bound, lambda m, x: ls.load_model(m).decision(x)):
        with pytest.raises(ls.InputError, match=r"`Network` or `Chain`.*Found `5`"):
            ask(model, gaussian(1, 3, 4))
    smooth = ls.SmoothTransformer(8, 2, 1, outputs=3, length=4, vocabulary=5)
    assert float(ls.lipschitz_bound(smooth, torch.tensor([[0, 1]]))) == float(
        ls.lipschitz_bound(smooth)
    )


def test_a_module_that_fills_a_cache_first_is_read_afterwards() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
            self.mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
            return self.layer(x, src_mask=self.mask)

    model, x = Lazy().eval(), gaussian(1, 5, 4).float()
    with pytest.raises(ls.InputError, match=r"changes `mask`.*run the module once before"):
        ls.lipschitz_bound(model, x, radius=2.0)
    model(x)
    assert float(ls.lipschitz_bound(model, x, radius=2.0)) > 0


def test_a_subclass_tells_itself_what_it_computes() -> None:
    class Louder(ls.SmoothTransformer):
        def scores(self, tokens: Tensor) -> Tensor:
            return 100 * super().scores(tokens)

    sizes: dict[str, Any] = {"outputs": 3, "length": 4, "vocabulary": 5}
    louder = Louder(8, 2, 1, **sizes)
    patched: Any = ls.SmoothTransformer(8, 2, 1, **sizes)
    patched.forward = lambda ids: 100 * ls.SmoothTransformer.forward(patched, ids)
    for model, name in ((louder, "scores"), (patched, "forward")):
        for ask in (ls.lipschitz_bound, lambda one: one.bound):
            with pytest.raises(ls.InputError, match=rf"`as_network` should tell.*`{name}` of its"):
                ask(model)


def test_an_activation_is_of_its_kind() -> None:
    """GELU of large numbers is as good as ReLU, which the head has."""
    model = Scorer(0.0).double()
    near, far = (ls.lipschitz_bound(model, r * gaussian(1, 3, 4)) for r in (1.0, 1e4))
    assert [one.what for one in near.parts] == [one.what for one in far.parts]
    assert float(near) == pytest.approx(float(far), rel=1e-12)


class Weighted(Silent):
    """Sums with weights: one for each channel, or one number, all alike at first."""

    def __init__(self, *shape: int) -> None:
        super().__init__(self.weighted, 0.1)
        at: Any = self.blocks[0]
        at.g1, at.g2 = (nn.Parameter(torch.full(shape, 0.1)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.head = nn.Linear(4, 3)

    def through(self, h: Tensor) -> Tensor:
        at: Any = self.blocks[0]
        h = h + at.g1 * at.attention(h, h, h, need_weights=False)[0]
        return h + at.g2 * at.w2(nn.functional.gelu(at.w1(h)))

    def weighted(self, at: Any, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.blocks[0](x).mean(1))


@pytest.mark.parametrize("shape", [(4,), (1,), ()])
def test_factors_of_equal_value_have_gradients_of_their_own(shape: tuple[int, ...]) -> None:
    model, x = Weighted(*shape).double().eval(), gaussian(1, 5, 4)
    at: Any = model.blocks[0]
    with torch.no_grad():
        at.attention.out_proj.weight *= 1e4

    def bound() -> Any:
        return ls.lipschitz_bound(model, x, radius=2.0).value

    bound().backward()
    for one in (at.g1, at.g2, model.scale):
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                one.add_(step)
                ends.append(float(bound()))
                one.sub_(step)
        assert one.grad is not None
        assert float(one.grad.sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_weights_that_a_hook_makes_have_the_gradients_of_its_own() -> None:
    model, x = Weighted().double().eval(), gaussian(1, 5, 4)
    at: Any = model.blocks[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(at.w1)
    bound = ls.lipschitz_bound(model, x, radius=2.0).value
    bound.backward()
    for one in (at.w1.weight_g, at.w1.weight_v):
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                one[0, 0] += step
                ends.append(float(ls.lipschitz_bound(model, x, radius=2.0).value))
                one[0, 0] -= step
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(one.grad[0, 0]) == pytest.approx(slope, rel=1e-5, abs=1e-6 * ends[0])


class Sharper(Weighted):
    """The factor of its scores is a function of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * self.head(self.blocks[0](x).mean(1))


class OverItsNorm(Weighted):
    """The factor of its scores is a function of the matrix of the head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x).mean(1)) / self.head.weight.norm()


@pytest.mark.parametrize("what", ["equal", "one", "function", "norm"])
def test_gradients_that_are_not_those_of_the_module_are_refused(what: str) -> None:
    """The value holds all the same: of what factor a weight is, only the module knows."""
    kind = {"function": Sharper, "norm": OverItsNorm}.get(what, Weighted)
    model, x = kind().double().eval(), gaussian(1, 5, 4)
    at: Any = model.blocks[0]
    if what == "equal":  # the first one is used last
        at.g1, at.g2 = at.g2, at.g1
        at._parameters = dict(reversed(at._parameters.items()))
    elif what == "one":
        at.g1.data.fill_(1.0)
    bound = ls.lipschitz_bound(model, x, radius=2.0)
    assert slope_at(model, x[0]) <= float(bound)
    with pytest.raises(ls.InputError, match=r"gradients of the module\. Found others for `"):
        bound.value.backward()
    model.requires_grad_(False)
    at.w2.weight.requires_grad_()
    ls.lipschitz_bound(model, x, radius=2.0).value.backward()
    assert at.w2.weight.grad is not None


def test_rounding_of_gradients_is_no_curvature() -> None:
    """Where parts cancel, what is left of their curvature is rounding."""

    def network(x: Tensor) -> Tensor:
        return torch.stack([x.sum(), x[0, 0]])

    def scores(x: Tensor) -> Tensor:
        parts = torch.tanh(x[0].sum()) - torch.tanh((3 * (x[0] / 3)).sum())
        return network(x) + 1e7 * parts

    at = gaussian(3, 8)
    check_network(network, scores, at)
    with pytest.raises(ls.InputError, match="of the module itself"):
        check_network(lambda x: network(x) + 1e-6 * x[1, :2] ** 2, scores, at)


class Sum(Scorer):
    """A sum of tokens is a pool."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.encoder(x).sum(1))


def test_tokens_may_be_summed() -> None:
    model, x = Sum(0.0).double(), gaussian(1, 3, 4)
    bound = ls.lipschitz_bound(model, x, radius=2.0)
    assert bound.parts[-2].constant == pytest.approx(3.0)
    assert slope_at(model, x[0]) <= float(bound)
    assert float(ls.load_model(model).decision(x).certify().radius) > 0


class ScoresFirst(Scorer):
    """Scores of every token, of which one is taken, as in GPT-2's classifiers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.encoder(x))[:, -1]


def test_scores_may_be_pooled_after_the_head() -> None:
    x = gaussian(1, 3, 4)
    model = ScoresFirst(0.0).double()
    bound = ls.lipschitz_bound(model, x, radius=2.0)
    assert [part.name for part in bound.parts][-2:] == ["pool 0", "head 0"]
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z)[0], x)[:, 0]
    moved = torch.linalg.matrix_norm(jacobian.transpose(0, 1), 2).amax()
    assert float(moved) <= float(bound)


def test_tokens_that_are_alike_do_not_show_what_is_pooled() -> None:
    with pytest.raises(ls.InputError, match="tokens of the input should differ"):
        ls.lipschitz_bound(Scorer(0.0).double(), torch.ones(1, 3, 4, dtype=DOUBLE), radius=1.0)


def test_no_radius_is_too_large() -> None:
    model, x = Scorer(0.0).double(), gaussian(1, 3, 4)
    bound = float(ls.lipschitz_bound(model, x))
    sizes = [float(ls.lipschitz_bound(model, x, radius=10.0**k)) for k in (0, 3, 100, 155, 300)]
    assert sizes == sorted(sizes)
    assert sizes[2:] == pytest.approx([bound] * 3, rel=1e-12)


def test_a_pool_is_of_as_many_tokens_as_there_were() -> None:
    with pytest.raises(ls.InputError, match="`num_tokens` should be 3, the number of pooled"):
        ls.lipschitz_bound(Scorer(0.0).double(), gaussian(1, 3, 4), num_tokens=1)


def test_a_product_that_leaves_float64_is_no_bound() -> None:
    map_ = 1e90 * torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    steep = Feed(*map_, *map_, "relu")
    branch = Branch(steep, skip=False)
    assert float(ls.lipschitz_bound(Chain((branch,)))) == pytest.approx(1e180)
    with pytest.raises(ls.InputError, match="constants of its 2 parts multiply to more"):
        ls.lipschitz_bound(Chain((branch, branch)))
