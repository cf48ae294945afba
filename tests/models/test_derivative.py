"""Every layer is compared with finite differences of the model that it is a part of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.linalg import difference
from tiny import TEXT, encoder, tiny

X = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(1))
# What a central difference is off by at its best size, in the model's precision.
LIMIT = {"float32": 1e-2, "float64": 1e-4}


def off(row: ls.Measurement) -> float:
    """How far a row's Jacobian was from the model's own derivative."""
    return math.inf if row.derivative_error is None else row.derivative_error


class Attention(nn.Module):
    """One head, with a place for a fault between scores and values."""

    def __init__(self, fault=lambda p: p) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.o, self.fault = nn.Linear(8, 24), nn.Linear(8, 8), fault
        for p in self.parameters():
            p.data *= 3

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(self.fault((q @ k.mT).softmax(-1)) @ v)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return 2 * grad_outputs[0]


class Model(nn.Module):
    def __init__(self, attention) -> None:
        super().__init__()
        self.a = attention

    def forward(self, x):
        return x + self.a(x)


class PooledKeys(nn.Module):
    """Keys and values are the larger of each pair of tokens (EfficientLoFTR)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        pooled = nn.functional.max_pool1d(x.mT, 2).mT
        return self.o((self.q(x) @ pooled.mT).softmax(-1) @ pooled)


def test_a_kink_is_refused_as_one():
    x = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    model = Model(PooledKeys()).double()
    (row,) = ls.measure(model, x, modules="a")  # no two are equal
    assert off(row) < 1e-6
    x[0, :2] = -1.0  # equal zeros behind the ReLU
    first = nn.Sequential(nn.ReLU(), Model(PooledKeys())).double()
    with pytest.raises(ls.InputError, match="should have a derivative at its input"):
        ls.measure(first, x, modules="1.a")


@pytest.mark.parametrize(
    "map", ["heads", "attention", "normed", "residual", "block", "stack", "model"]
)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("bert", "float32"), ("bert", "float64"), ("llama", "float32"), ("olmo", "float64")],
)
def test_every_map_has_the_derivative_of_the_model(family, map, dtype):
    model = tiny(family)
    model.model.to(getattr(torch, dtype))
    rows = ls.measure(model, TEXT, lengths=12, samples=2, map=map, dtype=dtype)
    for row in rows:
        if row.sample:
            assert row.derivative_error is None
        else:
            assert off(row) < LIMIT[dtype], row.note


@pytest.mark.parametrize("options", [{"move": "2"}, {"read": "last"}, {"metric": "token-relative"}])
@pytest.mark.parametrize("per_head", [False, True])
def test_it_is_checked_whatever_moves_and_is_read(options, per_head):
    for row in ls.measure(tiny("gpt2"), TEXT, lengths=8, samples=1, per_head=per_head, **options):
        assert off(row) < LIMIT["float32"]


def test_padding_and_the_side_of_the_keys():
    ids = torch.arange(3, 12)[None]
    batch = {"input_ids": ids, "attention_mask": (ids < 9).long()}
    model = tiny("bert").model.double()
    for map in ("heads", "attention", "residual", "block", "model"):
        for row in ls.measure(model, batch, map=map, dtype="float64"):
            assert off(row) < LIMIT["float64"]
            assert row.num_tokens == 6


@pytest.mark.parametrize(
    "fault", [torch.Tensor.detach, WrongBackward.apply], ids=["detached", "wrong backward"]
)
@pytest.mark.parametrize("map", ["attention", "heads"])
def test_a_wrong_derivative_is_refused_with_both_numbers(fault, map):
    sound = ls.measure(Model(Attention()).eval(), X, map=map)[0]
    assert off(sound) < LIMIT["float32"]
    with pytest.raises(ls.InputError, match=r"Found \|J v\| = .* a finite difference gives "):
        ls.measure(Model(Attention(fault)).eval(), X, map=map)


def test_a_fault_that_one_layer_of_two_has():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention(torch.Tensor.detach)

        def forward(self, x):
            return self.second(self.first(x))

    assert off(ls.measure(Two().eval(), X, layers=0)[0]) < LIMIT["float32"]
    with pytest.raises(ls.InputError, match="finite difference"):
        ls.measure(Two().eval(), X, layers=1)


def test_a_layer_by_itself_is_its_own_model():
    layer = ls.DotProduct(*torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(2)))
    assert off(ls.measure(layer, X[0])[0]) < LIMIT["float32"]
    layer.register_forward_hook(lambda *at: 1.1 * at[-1])
    with pytest.raises(ls.InputError, match="Found hooks"):
        ls.measure(layer, X[0])


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_a_bias_rounds_away_are_measured(size, dtype):
    """All scores are 0, so sigma is that of the mean, ‖V‖; the model itself moves by no digit."""
    layer = ls.DotProduct(
        *2 * [torch.zeros(4, 4, dtype=dtype)],
        size * torch.diag(torch.tensor([3.0, 2.0, 1.0, 1.0])).to(dtype),
        value_bias=torch.full((4,), 1e7, dtype=dtype),
    )
    x = 1e-6 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    (row,) = ls.measure(layer, x)
    assert row.sigma == pytest.approx(3 * size, rel=1e-4)
    assert "could not be checked" in str(row.note)
    assert ls.certify(layer, x, eps=1e-7, sharp=False).value >= 3 * size * (1 - 1e-4)


def test_the_model_and_its_input_are_put_back():
    model, x = encoder(dropout=0.1).train(), X.clone()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rows = ls.measure(model, x, map="model")
    assert off(rows[0]) < LIMIT["float32"]
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(x, X)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())


class TestDifference:
    """Functions whose derivative is known."""

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def test_curvature_is_seen_to_vanish(self):
        # Far from linear at the first size: sin(1e4 x).
        found = difference(
            lambda x: (1e4 * x).sin(), self.x, self.x, 1e4 * self.x * (1e4 * self.x).cos()
        )
        assert found.status == "agrees"

    def test_what_rounding_hides_is_no_disagreement(self):
        # An output of 1e12 moves by units of 1e-4: not at all, at every size.
        hidden = difference(lambda x: 1e12 + x, self.x, self.x, self.x)
        assert hidden.status == "unsettled" and hidden.quotient == 0.0
        # A product that is wrong by more than what rounding hides is still refused.
        assert difference(lambda x: 1e6 + x, self.x, self.x, 3 * self.x).status == "disagrees"

    def test_noise_is_no_disagreement(self):
        noise = torch.Generator().manual_seed(4)
        found = difference(
            lambda x: x + torch.randn(x.shape, generator=noise, dtype=x.dtype),
            self.x,
            self.x,
            3 * self.x,
        )
        assert found.status == "unsettled"

    def test_zero_is_a_derivative_too(self):
        zero = torch.zeros_like(self.x)
        assert difference(lambda x: zero, self.x, self.x, zero).status == "agrees"
        assert difference(lambda x: x, self.x, self.x, zero).status == "disagrees"

    def test_a_kink_has_no_derivative(self):
        """Slopes 2 ahead and -1 behind, beside curvature; a wrong map alone is none."""
        still, size = torch.zeros_like(self.x), float(self.x.norm())
        along = self.x.abs()

        def bent(x):
            return torch.where(x > 0, 2 * x, -x) + 10 * x**2

        found = difference(bent, still, along, 2 * along)
        assert found.status == "disagrees" and found.sides is not None
        assert found.sides == pytest.approx((2 * size, size), rel=1e-2)
        for smooth in (torch.exp, lambda x: (1e3 * x).sin(), lambda x: x):
            wrong = difference(smooth, self.x, self.x, 7 * self.x)
            assert (wrong.status, wrong.sides) == ("disagrees", None)

    @pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
    def test_any_scale(self, scale):
        x = self.x * scale
        found = difference(lambda x: x / scale, x, self.x, self.x / scale)
        assert found.status == "agrees"

    def test_tokens_that_are_zero(self):
        x = self.x.clone()
        x[2] = 0
        assert difference(lambda x: x**3, x, self.x, 3 * x**2 * self.x).status == "agrees"
        assert difference(lambda x: 2 * x, 0 * x, self.x, 2 * self.x).status == "agrees"

    @pytest.mark.parametrize("eps", [1e-12, 1e-5])
    def test_a_norm_of_a_token_that_is_zero(self, eps):
        """Linear within its epsilon only, where it multiplies by ``1 / sqrt(eps)``."""
        x = self.x.float()
        x[2] = 0
        e = torch.zeros_like(x)
        e[2] = self.x[2].float()
        product = (e - e.mean(-1, keepdim=True)) / eps**0.5

        def norm(x):
            return nn.functional.layer_norm(x, (4,), eps=eps)

        assert difference(norm, x, e, product).status == "agrees"
        assert difference(norm, x, e, 1.1 * product).status != "agrees"
