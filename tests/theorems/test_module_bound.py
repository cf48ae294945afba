"""The bound of a module is that of the network that it is, whatever one run of it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from agreement import gaussian

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
    "a gate": (lambda at, h: h + at.w2(RELU(at.w1(h)) * at.wg(h)), -3.0),
    "a factor": (lambda at, h: h + at.w2(20 * RELU(at.w1(h))), -3.0),
    "an exponential": (lambda at, h: h + at.w2(torch.exp(RELU(at.w1(h))) - 1), -3.0),
    "a norm": (lambda at, h: h + at.w2(at.norm(RELU(at.w1(h)))), -3.0),
    "a sign": (lambda at, h: h + (at.w1(h) * (at.w1(h) > 0).to(h))[..., :4], -3.0),
    "a switch": (lambda at, h: (5.0 if h.norm() > 20 else 1.0) * (h + at.w2(at.w1(h))), 0.0),
}


@pytest.mark.parametrize("what", WITHOUT_A_WORD)
def test_what_says_nothing_near_an_input_is_not_taken_for_nothing(what: str) -> None:
    model = Silent(*WITHOUT_A_WORD[what]).double().eval()
    with pytest.raises(ls.InputError, match=r"scores of the module itself|Found otherwise after"):
        ls.lipschitz_bound(model, 0.1 * gaussian(1, 5, 4), radius=60.0)


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
    with pytest.raises(ls.InputError, match="`num_tokens` should be 3, as many as are pooled"):
        ls.lipschitz_bound(Scorer(0.0).double(), gaussian(1, 3, 4), num_tokens=1)
