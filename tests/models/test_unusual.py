"""Attention that is called, or answers, in unusual ways: right, or refused with its own reason.

Truths are dense Jacobians of the module itself by `torch.autograd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope import InputError

WIDTH, N = 8, 5
X = torch.randn(1, N, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
EXACT: dict[str, Any] = {"dtype": "float64", "tol": 1e-9}


def _unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        return function(*args)

    return called


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = torch.zeros(())

    def of(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))


class OwnAttention(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


class StarAttention(Own):
    def forward(self, *args: Tensor) -> Tensor:
        return self.of(args[0])


class WrappedAttention(Own):
    forward = _unnamed(Own.of)


class CachedAttention(Own):
    """Reads what stands in a cache, too, through a mask over both."""

    def forward(self, x: Tensor, mask: Tensor, cache: Tensor | None = None) -> Tensor:
        read = x if cache is None else torch.cat([cache, x], 1)
        return self.o((self.q(x) @ self.k(read).mT + mask).softmax(-1) @ self.v(read))


class ApartAttention(Own):
    """Hands its heads on side by side; their projection is called behind it (Gemma 3n)."""

    def __init__(self) -> None:
        super().__init__()
        del self.o

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).contiguous()


class SparseAttention(Own):
    def forward(self, x: Tensor, bias: Tensor) -> Any:
        return self.of(x) + bias.to_dense(), bias


class MappedAttention(Own):
    def forward(self, x: Tensor) -> Any:
        return torch.func.vmap(self.of)(x)


class CheckpointedAttention(Own):
    reentrant = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.of, x, use_reentrant=self.reentrant)


class ReentrantAttention(CheckpointedAttention):
    reentrant = True


class NestedAttention(Own):
    """As I-BERT: outputs and their scales, each a tuple; a projection behind that has a scale."""

    def forward(self, x: Tensor) -> Any:
        return ((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x),), (None,)


class Scaled(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight, self.bias), None


class SilentAttention(Own):
    def forward(self, x: Tensor) -> None:
        self.last = self.of(x)


class ComplexAttention(Own):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.of(x), x)


def bias() -> Tensor:
    return torch.eye(N, WIDTH, dtype=torch.float64)[None].to_sparse()


class Block(nn.Module):
    def __init__(self, site: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.attn, self.call = site, call
        self.dense = Scaled(nn.Linear(WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.call(self, x))


class Model(nn.Module):
    def __init__(self, *block: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(*block)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class Doubled(nn.MultiheadAttention):
    """Attention of torch by a name that is none of attention's."""

    def forward(self, *args: Any, **options: Any) -> Any:
        y, weights = super().forward(*args, **options)
        return 2 * y, weights


def truth(f: Callable[[Tensor], Tensor], x: Tensor = X) -> float:
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


CALLS: dict[str, tuple[type[Own], Callable[[Any, Tensor], Tensor]]] = {
    "forward(*args)": (StarAttention, lambda block, x: block.attn(x)),
    "a decorator that forgets names": (WrappedAttention, lambda block, x: block.attn(x)),
    "sparse tensors": (SparseAttention, lambda block, x: block.attn(x, bias())[0]),
    "vmap inside": (MappedAttention, lambda block, x: block.attn(x)),
    "a checkpoint": (CheckpointedAttention, lambda block, x: block.attn(x)),
    "tuples in a tuple": (NestedAttention, lambda block, x: block.dense(block.attn(x)[0][0])[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_an_unusual_kind_is_exact(name) -> None:
    model = Model(CALLS[name][0](), CALLS[name][1]).double()
    block: Any = model.layers[0]
    (row,) = ls.measure(model, X, **EXACT)
    assert row.sigma == pytest.approx(truth(lambda u: block.call(block, u)), rel=1e-8)
    (whole,) = ls.measure(model, X, map="block", **EXACT)
    assert whole.sigma == pytest.approx(truth(model), rel=1e-8)


REFUSED: dict[str, tuple[type[Own], Callable[[Any, Tensor], Tensor], str]] = {
    "nothing": (
        SilentAttention,
        lambda block, x: (block.attn(x), block.attn.last)[1],
        r"`layers\.0\.attn` should return a tensor. Found `NoneType`",
    ),
    "complex numbers": (ComplexAttention, lambda block, x: block.attn(x).real, "real numbers"),
    "one value for several tokens": (
        OwnAttention,
        lambda block, x: block.attn(x[:, :1].expand(1, N, WIDTH)),
        "should take tokens with separate memory",
    ),
    "no tokens": (
        OwnAttention,
        lambda block, x: torch.cat([block.attn(x[:, :0]), x], 1),
        r"`layers\.0\.attn` should be given tokens",
    ),
    "vmap outside": (
        OwnAttention,
        lambda block, x: torch.func.vmap(block.attn)(x),
        r"one sample, \(1, tokens, width\). Found \(5, 8\)",
    ),
    "a reentrant checkpoint": (
        ReentrantAttention,
        lambda block, x: block.attn(x),
        r"Found that its backward pass raised RuntimeError: .* set use_reentrant=False",
    ),
    "what the model itself cannot do": (
        OwnAttention,
        lambda block, x: block.attn(x, 2),
        "the model calls it differently: too many positional arguments",
    ),
    "what its code cannot do": (
        OwnAttention,
        lambda block, x: block.attn(x[..., :3]),
        "its forward pass raised RuntimeError: mat1 and mat2",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_of_an_unusual_kind_is_refused_with_its_reason(name) -> None:
    site, call, said = REFUSED[name]
    with pytest.raises(InputError, match=said):
        ls.measure(Model(site(), call).double(), X, **EXACT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_takes_no_hooks_is_refused() -> None:
    model = Model(OwnAttention(), lambda block, x: block.attn(x))
    model.layers.append(torch.jit.trace(nn.Linear(WIDTH, WIDTH), X.float()))  # pyright: ignore
    with pytest.raises(InputError, match=r"Found `layers\.1` compiled by `torch\.jit`"):
        ls.measure(model, X, **EXACT)


def test_a_mistake_of_a_hook_is_not_told_as_the_models(monkeypatch) -> None:
    def mistaken(*_: object) -> None:
        raise TypeError("of a hook")

    monkeypatch.setattr("lipscope.models.tracing.calls.output_index", mistaken)
    with pytest.raises(TypeError, match="of a hook"):
        ls.measure(Model(OwnAttention(), lambda block, x: block.attn(x)).double(), X)


def test_a_block_that_calls_its_attention_twice_is_one_block() -> None:
    model = Model(OwnAttention(), lambda block, x: block.attn(x) + block.attn(2 * x)).double()
    rows = ls.measure(model, X, map="block", **EXACT)
    assert [row.sigma for row in rows] == pytest.approx([truth(model)] * 2, rel=1e-8)


@pytest.mark.parametrize("name", ["block", "model"])
def test_a_hook_behind_a_block_is_given_what_the_model_passes_by_place(name) -> None:
    """Transformers' own hooks read the first argument, where hidden states are asked for."""
    model, seen = Model(OwnAttention(), lambda block, x: block.attn(x)).double(), list[Any]()
    model.layers[0].register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    rows = ls.measure(model, X, map=name, **EXACT)
    assert rows[0].sigma == pytest.approx(truth(model), rel=1e-8)
    assert set(seen) == {X.shape}


def test_a_layer_that_reads_a_filled_cache_is_refused() -> None:
    """A block that fills the cache itself is measured with it."""
    mask = torch.zeros(1, N, 2 * N, dtype=torch.float64)
    model = Model(CachedAttention(), lambda block, x: block.attn(x, mask=mask, cache=X)).double()
    with pytest.raises(InputError, match="without a key/value cache") as error:
        ls.measure(model, X, **EXACT)
    assert "\n" not in str(error.value)
    (row,) = ls.measure(model, X, map="block", **EXACT)
    assert row.sigma == pytest.approx(truth(model), rel=1e-8)


def test_heads_side_by_side_are_taken_with_their_projection() -> None:
    model = Model(ApartAttention(), lambda block, x: block.o(block.attn(x).flatten(2)))
    block: Any = model.layers[0]
    block.o = nn.Linear(WIDTH, WIDTH)
    (row,) = ls.measure(model.double(), X, **EXACT)
    assert row.projection is True
    assert row.sigma == pytest.approx(truth(lambda x: block.call(block, x)), rel=1e-8)


def test_float64_of_what_a_model_makes_of_numbers() -> None:
    """The least float64 is no float32 (XGLM's mask), and a float32 table (DAB-DETR's) fits none."""

    class MadeAttention(Own):
        def forward(self, x: Tensor) -> Tensor:
            least = torch.tensor(torch.finfo(x.dtype).min)
            scores = torch.max(self.q(x) @ self.k(x).mT, least)
            return self.o(scores.softmax(-1) @ self.v(x)) @ torch.eye(WIDTH)

    model = Model(MadeAttention(), lambda block, x: block.attn(x))
    (row,) = ls.measure(model, X, **EXACT)
    site = OwnAttention().double()
    assert row.sigma == pytest.approx(truth(site), rel=1e-8)
    assert torch.get_default_dtype() == torch.float32


class HalfSine(torch.autograd.Function):
    """A derivative of another shape."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return args[0].sin()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0][:1]


def written_over(x: Tensor) -> Tensor:
    y = x.exp()
    z = y * y
    return z + y.add_(1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("f", "said"),
    [
        (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "set use_reentrant=False"),
        (HalfSine.apply, "invalid gradient at index 0"),
        (written_over, "modified by an inplace operation"),
        (lambda x: x.long(), r"one tensor of real numbers. Found `torch\.int64`"),
    ],
)
def test_what_torch_does_not_differentiate_is_one_line(f, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ls.sigma(f, X[0])


def test_a_jacobian_of_zero_is_no_wrong_derivative() -> None:
    """Queries that read one value move nothing: the products are rounding, and none too much."""
    keys = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = torch.randn(WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    op = ls.linearise(lambda q: (q @ keys.T).softmax(-1) @ one.expand(N, WIDTH), X[0])
    assert float(op.matvec(X[0]).abs().max()) < 1e-13


def test_a_cut_gradient_is_seen_at_an_input_of_any_seed() -> None:
    """The direction in which it is looked for is no input's own, along which a norm is constant."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="should be differentiable"):
        ls.linearise(lambda u: nn.functional.layer_norm(u, (8,)).detach(), x)


def test_attention_of_torch_is_found_by_any_name() -> None:
    """And replayed, for it may compute something else; the other layer keeps its number."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    own = Doubled(WIDTH, 2, batch_first=True).double()
    own.load_state_dict(model.layers[0].self_attn.state_dict())
    model.layers[0].self_attn = own
    rows = ls.measure(model, X, **EXACT)
    assert [row.module for row in rows] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert rows[0].sigma == pytest.approx(truth(lambda x: own(x, x, x)[0]), rel=1e-8)


@pytest.mark.parametrize("how", ["a hook", "a hook of a part", "a forward", "an activation"])
def test_attention_that_is_changed_elsewhere_is_replayed(how: str) -> None:
    """Where the change is silent at the input, a ball certificate from weights would be wrong."""
    module: Any = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    model = Model(module, lambda block, x: block.attn(x, x, x, need_weights=False)[0]).double()
    plain = ls.load_model(model).at(X, dtype="float64")
    floor, sigma = float(plain.output.min()) - 1e-3, plain.sigma
    assert plain.certify(0.1).value > sigma

    def bent(y: Tensor) -> Tensor:
        return torch.where(y > floor, y, 100 * y - 99 * floor)

    if how == "a hook":
        module.register_forward_hook(lambda _, __, y: (bent(y[0]), None))
    elif how == "a hook of a part":
        module.held = nn.Identity()
        module.held.register_forward_hook(lambda _, __, y: bent(y))
    elif how == "a forward":
        forward = module.forward
        module.forward = lambda *args, **options: (bent(forward(*args, **options)[0]), None)
    else:
        module.held = nn.PReLU().double()
    at = ls.load_model(model).at(X, dtype="float64")
    assert math.isclose(at.sigma, sigma, rel_tol=1e-6)
    with pytest.raises(InputError, match=r"part that its family does not: .*(hooks|forward|PReLU)"):
        at.certify(0.1)


def test_hooks_that_change_nothing_leave_the_weights_readable() -> None:
    """Those by which transformers keeps what layers give, and accelerate's move to a device."""
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation("eager")
    ids = torch.tensor([[1, 2, 3, 4]])
    known = ls.load_model(model).at(ids).certify(0.1).value
    model(ids, output_attentions=True, output_hidden_states=True)
    attention: Any = model.encoder.layer[0].attention.self
    assert attention._forward_hooks
    accelerate.hooks.add_hook_to_module(attention, accelerate.hooks.AlignDevicesHook("cpu"))
    assert ls.load_model(model).at(ids).certify(0.1).value == pytest.approx(known)

    class Doubling(accelerate.hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return 2 * output[0], *output[1:]

    accelerate.hooks.add_hook_to_module(attention, Doubling(), append=True)
    with pytest.raises(InputError, match="`forward` of its own"):
        ls.load_model(model).at(ids).certify(0.1)
